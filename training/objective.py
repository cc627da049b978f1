"""What a run minimises, and what follows from that for evaluation, log, card and plot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from card import plot_loss, portable
from loop import RunLog
from pretrain_recipe import PretrainRecipe
from throughput import training_flops
from torch import Tensor, nn
from transformers import PreTrainedModel

Rows = Sequence[dict[str, Tensor]]


class Objective:
    """Masked language modelling: the model's own loss. Another objective overrides what it does differently."""

    def check(self, recipe: PretrainRecipe) -> None:
        """Raise the objective's errors before anything is written.

        Raises:
            UserError: The recipe cannot be run with this objective.
        """

    def make_module(self, model: PreTrainedModel, recipe: PretrainRecipe, accelerator: Accelerator) -> nn.Module:
        """What is called with a batch and returns something with a `loss`; it holds the model that is trained.

        Of a model from a checkpoint it is made before anything is written.

        Args:
            model: to be trained; the optimizer gets those of its parameters that still need a gradient.
            recipe: of the run.
            accelerator: says where it runs.

        Raises:
            UserError: The model does not fit the objective.
        """
        return model

    def trained(self, module: nn.Module, accelerator: Accelerator) -> nn.Module:
        """The model inside a prepared module: what is evaluated, probed and saved."""
        return module

    def targets(self, batch: dict[str, Tensor]) -> Tensor:
        """What the loss is a mean over, as a number: parts of an update count by it."""
        return (batch["labels"] != -100).sum()

    def flops_per_token(self, module: nn.Module, sample: dict[str, Tensor]) -> float:
        """Floating-point operations of a training step per token."""
        return training_flops(module, sample)

    def measure(
        self, module: nn.Module, accelerator: Accelerator, held_out: Rows, batch_size: int
    ) -> dict[str, Any] | None:
        """Figures of the objective on held-out rows, for the log and `metrics.json`; called by every process."""
        return None

    def start(self, recipe: PretrainRecipe) -> str:
        """For the card: where the model comes from."""
        if recipe.model_name_or_path:
            return f"trained on from `{portable(recipe.model_name_or_path)}`"
        return "pretrained from scratch"

    def plot(self, log: RunLog, unigram_loss: float, path: Path) -> None:
        """Draw the log."""
        plot_loss(log, unigram_loss, path)
