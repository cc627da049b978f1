"""What a translation run minimises: cross-entropy with smoothed labels, over the tokens of the target."""

from types import SimpleNamespace

import torch
from accelerate import Accelerator
from engine.objective import Objective
from torch import Tensor, nn
from transformers import PreTrainedModel

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
    """Translation: the model is trained through `SmoothedLoss`, and its attention is not probed."""

    loss_name = "loss of the target's tokens"

    def make_module(self, model: PreTrainedModel, recipe: TranslationRecipe, accelerator: Accelerator) -> nn.Module:
        """The model with its loss."""
        return SmoothedLoss(model, recipe.label_smoothing)

    def trained(self, module: nn.Module, accelerator: Accelerator) -> nn.Module:
        """The model inside."""
        return accelerator.unwrap_model(module).model

    def probe(self, model: PreTrainedModel, batch: dict[str, Tensor]) -> None:
        """Nothing."""
        return None


def inverse_square_root(step: int, warmup: int) -> float:
    """Factor of the learning rate: linear warm-up, then falling with the root of the step (Vaswani et al. 2017)."""
    return (step + 1) / warmup if step < warmup else (warmup / (step + 1)) ** 0.5


def unigram_loss(rows: list[dict[str, Tensor]], counts: Tensor) -> float:
    """Cross-entropy in nats of the labels of rows under the frequencies `counts` (vocabulary,), with one added."""
    labels = torch.cat([row["labels"][row["labels"] != IGNORED] for row in rows])
    return -((counts + 1).double() / (counts + 1).sum()).log()[labels].mean().item()
