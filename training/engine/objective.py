"""What a run minimises, and what depends on it: tokenizer, rows, evaluation, log, card and plot."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from common.models import ModelKind
from data.masking import RowFormat
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine.card import plot_loss
from engine.log import RunLog
from engine.probe import probe
from engine.recipe import RunRecipe
from engine.throughput import training_flops
from luna_hf.scripting import portable

Rows = Sequence[dict[str, Tensor]]


def stack(rows: Rows, device: torch.device) -> dict[str, Tensor]:
    """A batch of rows of equal length."""
    return {name: torch.stack([row[name] for row in rows]).to(device) for name in rows[0]}


class Objective:
    """What the training loop asks of an objective; the defaults suit a model that returns its own loss.

    Attributes:
        loss_name: the loss in words.
        next_token: whether the logits at a position are for the label of the next one.
        plateau_gain: gain over the unigram baseline, in nats, below which an evaluation reports a plateau.
    """

    loss_name: ClassVar[str]
    next_token: ClassVar[bool] = False
    plateau_gain: ClassVar[float] = 0.0

    def make_module(self, model: PreTrainedModel, recipe: Any, accelerator: Accelerator) -> nn.Module:
        """The module that is called with a batch and returns a `loss`; it contains the model that is trained."""
        return model

    def trained(self, module: nn.Module, accelerator: Accelerator) -> nn.Module:
        """The model inside a prepared module, which is evaluated, probed and saved."""
        return module

    def targets(self, batch: dict[str, Tensor]) -> Tensor:
        """The number of targets that the loss is a mean over, which weights the parts of an update."""
        return (batch["labels"] != -100).sum()

    def loss(self, output: Any, targets: Tensor, tokens: Tensor) -> Tensor:
        """The part that a batch has in the loss of its update, of which it holds a share of the targets and tokens."""
        return output.loss * targets

    def flops_per_token(self, module: nn.Module, sample: dict[str, Tensor]) -> float:
        """Floating-point operations of a training step per token."""
        return training_flops(module, sample)

    def measure(
        self, module: nn.Module, accelerator: Accelerator, held_out: Rows, batch_size: int
    ) -> dict[str, Any] | None:
        """Further held-out figures for the log and `metrics.json`; called by every process."""
        return None

    def probe(self, model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Any] | None:
        """What attention does on a batch, for the log."""
        return probe(model, batch)

    def plot(self, log: RunLog, unigram_loss: float, path: Path) -> None:
        """Draw the log."""
        plot_loss(log, unigram_loss, path, self.loss_name)


class PretrainingObjective(Objective, ABC):
    """An objective of text that is cut to rows, for `pretrain`. Methods raise `UserError` for bad input.

    Attributes:
        kind: of model.
        targets_name: what the loss is a mean over, in words.
    """

    kind: ClassVar[ModelKind]
    targets_name: ClassVar[str]

    def check(self, recipe: RunRecipe) -> None:
        """Check a recipe before anything is written."""
        return

    # ---- tokenizer and rows ----

    @abstractmethod
    def train_tokenizer(
        self, documents: Iterable[str], vocab_size: int, longest: int | float
    ) -> PreTrainedTokenizerBase:
        """A new tokenizer for a model that takes `longest` tokens."""

    def adapt_tokenizer(
        self, tokenizer: PreTrainedTokenizerBase, name: str, new_model: bool
    ) -> tuple[PreTrainedTokenizerBase, list[str]]:
        """A loaded tokenizer as the model needs it, and notes; the vocabulary may grow only for a new model."""
        return tokenizer, []

    @abstractmethod
    def check_tokenizer(self, recipe: RunRecipe, tokenizer: PreTrainedTokenizerBase, longest: int | float) -> None:
        """Check that the recipe's sample texts can be used with a tokenizer, in at most `longest` tokens."""

    @abstractmethod
    def row_format(self, recipe: RunRecipe, tokenizer: PreTrainedTokenizerBase) -> RowFormat:
        """How text is cut to rows, and their labels."""

    def compile(self, model: PreTrainedModel, module: nn.Module) -> None:
        """Compile what is trained, in place: the model, without a teacher beside it."""
        model.compile()

    # ---- results ----

    @abstractmethod
    def samples(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: RunRecipe) -> dict[str, Any]:
        """Answers of the finished model, and other figures of its files."""

    @abstractmethod
    def samples_text(self, figures: dict[str, Any]) -> str:
        """The samples as text to print."""

    def start(self, recipe: RunRecipe) -> str:
        """Where the model comes from, for the card."""
        if recipe.model_name_or_path:
            return f"trained further from `{portable(recipe.model_name_or_path)}`"
        return "pretrained from scratch"

    def results(self, recipe: RunRecipe, figures: dict[str, Any]) -> str:
        """Further results for the card, as Markdown."""
        return ""

    @abstractmethod
    def card(self, recipe: RunRecipe, figures: dict[str, Any]) -> str:
        """The model card, from what `metrics.json` holds."""
