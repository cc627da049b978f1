"""What a run minimises, and what follows from that for model, tokenizer, rows, evaluation, log, card and plot."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from common.models import MASKED
from data.masking import RowFormat
from data.prepare import masked_rows
from data.tokenizer import train_tokenizer
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, pipeline

from engine.card import make_card, plot_loss
from engine.loop import PLATEAU_GAIN, RunLog
from engine.probe import probe
from engine.recipe import RunRecipe
from engine.throughput import training_flops
from luna_hf.scripting import UserError, portable

Rows = Sequence[dict[str, Tensor]]


class Objective:
    """Masked language modelling: the model's own loss. Another objective overrides what it does differently."""

    kind = MASKED  # of model
    targets_name = "masked tokens"
    loss_name = "masked-token loss"
    next_token = False  # whether logits are for the label of the next position
    plateau_gain = PLATEAU_GAIN

    def check(self, recipe: RunRecipe) -> None:
        """Raise the objective's errors before anything is written.

        Raises:
            UserError: The recipe cannot be run with this objective.
        """

    # ---- tokenizer and rows ----

    def train_tokenizer(
        self, documents: Iterable[str], vocab_size: int, longest: int | float
    ) -> PreTrainedTokenizerBase:
        """A new tokenizer, for a model that takes `longest` tokens."""
        return train_tokenizer(documents, vocab_size, longest)

    def adapt_tokenizer(
        self, tokenizer: PreTrainedTokenizerBase, name: str, new_model: bool
    ) -> tuple[PreTrainedTokenizerBase, list[str]]:
        """A loaded tokenizer as the model needs it, and what was changed.

        Args:
            tokenizer: as loaded.
            name: where it is from, for messages.
            new_model: whether its vocabulary may still grow.

        Raises:
            UserError: It cannot be made to fit.
        """
        return tokenizer, []

    def check_tokenizer(self, recipe: RunRecipe, tokenizer: PreTrainedTokenizerBase, longest: int | float) -> None:
        """Whether words can be masked, and the sentences of `fill_mask` have at most `longest` tokens.

        Raises:
            UserError: Not so.
        """
        if tokenizer.mask_token is None:
            raise UserError("The tokenizer has no mask token, which masked language modelling needs.")
        for sentence in recipe.fill_mask:
            length = len(tokenizer(with_mask(sentence, tokenizer), verbose=False).input_ids)
            if length > longest:
                raise UserError(
                    f"A sentence of `fill_mask` has {length} tokens, but the model takes {longest}: {sentence!r}"
                )

    def row_format(self, recipe: RunRecipe, tokenizer: PreTrainedTokenizerBase) -> RowFormat:
        """What rows are like.

        Raises:
            UserError: The tokenizer cannot make such rows.
        """
        return masked_rows(recipe, tokenizer)

    # ---- training ----

    def make_module(self, model: PreTrainedModel, recipe: RunRecipe, accelerator: Accelerator) -> nn.Module:
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

    def probe(self, model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Any] | None:
        """What attention does on a batch, for the log."""
        return probe(model, batch)

    # ---- what is left ----

    def samples(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: RunRecipe) -> dict[str, Any]:
        """What the finished model answers to what the recipe asks, and other figures of its files."""
        return {"fill_mask": answer(model, tokenizer, recipe.fill_mask)}

    def show_samples(self, figures: dict[str, Any]) -> None:
        """Print them."""
        for row in figures["fill_mask"]:
            guesses = ", ".join(
                f"{guess['token'].strip() or guess['token']!r} {guess['score']:.0%}" for guess in row["guesses"]
            )
            print(f"  {row['sentence']}\n    {guesses}")

    def start(self, recipe: RunRecipe) -> str:
        """For the card: where the model comes from."""
        if recipe.model_name_or_path:
            return f"trained on from `{portable(recipe.model_name_or_path)}`"
        return "pretrained from scratch"

    def card(self, recipe: RunRecipe, figures: dict[str, Any]) -> str:
        """The model card."""
        return make_card(recipe, figures)

    def plot(self, log: RunLog, unigram_loss: float, path: Path) -> None:
        """Draw the log."""
        plot_loss(log, unigram_loss, path, self.loss_name)


def with_mask(sentence: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The sentence with the tokenizer's own mask token in the place of `<mask>`."""
    return sentence.replace("<mask>", tokenizer.mask_token)


def answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sentences: list[str], guesses: int = 3
) -> list[dict[str, Any]]:
    """The most probable tokens for the `<mask>` of each sentence."""
    fill_mask = pipeline("fill-mask", model=model, tokenizer=tokenizer, top_k=guesses)
    rows = []
    for sentence in (with_mask(sentence, tokenizer) for sentence in sentences):
        best = [{"token": row["token_str"], "score": row["score"]} for row in fill_mask(sentence)]
        rows.append({"sentence": sentence, "guesses": best})
    return rows
