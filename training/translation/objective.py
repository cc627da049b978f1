"""What a translation run minimises: cross-entropy with smoothed labels, over the tokens of the target."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from common.models import SEQ2SEQ
from data.masking import RowFormat
from engine.objective import Objective
from engine.throughput import training_flops
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from translation.pairs import IGNORED
from translation.recipe import TranslationRecipe


class SmoothedLoss(nn.Module):
    """A model with the loss of smoothed labels (Szegedy et al. 2016), as in fairseq.

    The loss of a token is (1 - s) times that of the label and s times the mean over the vocabulary.
    """

    def __init__(self, model: PreTrainedModel, smoothing: float) -> None:
        super().__init__()
        self.model, self.smoothing = model, smoothing

    def forward(self, labels: Tensor, **inputs: Tensor) -> SimpleNamespace:
        """Return the mean `loss` over the labels (b, n) that are not ignored."""
        logits = self.model(**inputs, use_cache=False).logits.float()
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, label_smoothing=self.smoothing
        )
        return SimpleNamespace(loss=loss)


class TranslationObjective(Objective):
    """Translation; only what the training loop calls."""

    kind = SEQ2SEQ
    targets_name = "target tokens"
    loss_name = "loss of the target's tokens"

    def make_module(self, model: PreTrainedModel, recipe: TranslationRecipe, accelerator: Accelerator) -> nn.Module:
        """The model with its loss."""
        return SmoothedLoss(model, recipe.label_smoothing)

    def trained(self, module: nn.Module, accelerator: Accelerator) -> nn.Module:
        """The model inside."""
        return accelerator.unwrap_model(module).model

    def flops_per_token(self, module: nn.Module, sample: dict[str, Tensor]) -> float:
        """Floating-point operations of a training step per source token."""
        return training_flops(module, sample)

    def probe(self, model: PreTrainedModel, batch: dict[str, Tensor]) -> None:
        """Nothing."""
        return None

    def train_tokenizer(
        self, documents: Iterable[str], vocab_size: int, longest: int | float
    ) -> PreTrainedTokenizerBase:
        """Not called: see `pairs.joint_tokenizer`."""
        raise NotImplementedError

    def check_tokenizer(self, recipe: Any, tokenizer: PreTrainedTokenizerBase, longest: int | float) -> None:
        """Nothing to check."""

    def row_format(self, recipe: Any, tokenizer: PreTrainedTokenizerBase) -> RowFormat:
        """Not called: rows are pairs."""
        raise NotImplementedError

    def samples(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: Any) -> dict[str, Any]:
        """Nothing: translations come with their scores."""
        return {}

    def samples_text(self, figures: dict[str, Any]) -> str:
        """Nothing."""
        return ""

    def card(self, recipe: Any, figures: dict[str, Any]) -> str:
        """Not called: see `card.make_card`."""
        raise NotImplementedError


def inverse_square_root(step: int, warmup: int) -> float:
    """Factor of the learning rate: linear warm-up, then falling with the root of the step (Vaswani et al. 2017)."""
    return (step + 1) / warmup if step < warmup else (warmup / (step + 1)) ** 0.5


def unigram_loss(rows: list[dict[str, Tensor]], counts: Tensor) -> float:
    """Cross-entropy in nats of the labels of rows under the frequencies `counts` (vocabulary,), with one added."""
    labels = torch.cat([row["labels"][row["labels"] != IGNORED] for row in rows])
    return -((counts + 1).double() / (counts + 1).sum()).log()[labels].mean().item()
