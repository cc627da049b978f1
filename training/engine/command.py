"""The command line of the pretraining commands."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from common.models import ModelKind, model_fields
from common.options import parse

from engine.objective import PretrainingObjective
from engine.pretraining import pretrain
from engine.recipe import RunRecipe
from luna_hf.scripting import portable_command, run_script

_STOPPED = "the same command resumes from the last checkpoint, if there is one"


class Command:
    """A pretraining command: the name and docstring of its script, the keys of its recipes, and its objective."""

    def __init__(
        self, name: str, description: str, recipe_class: type[RunRecipe], objective: type[PretrainingObjective]
    ) -> None:
        self.name, self.description, self.recipe_class, self.objective = name, description, recipe_class, objective

    def read_recipe(self, path: str | Path, words: Sequence[str] = ()) -> Any:
        """A recipe with overrides; raises the `UserError`s of `options.parse` and of the recipe's class."""
        return self._parse([str(path), *words])

    def pretrain(self, recipe: RunRecipe, command: str) -> dict[str, Any] | None:
        """Start or resume a run; see `pretraining.pretrain`."""
        figures = pretrain(recipe, command, self.objective())
        PartialState().destroy_process_group()
        return figures

    def main(self, words: Sequence[str] | None = None) -> int:
        """Run from the command line.

        Returns:
            The exit status: 1 if the gain is below the recipe's `min_gain_nats`, or see `run_script`.
        """
        words = sys.argv[1:] if words is None else list(words)
        return run_script(lambda: self._run(words), _STOPPED, clean_on_sigterm=False)

    def _parse(self, words: list[str]) -> RunRecipe:
        return parse(
            [self.recipe_class],
            words,
            self.description,
            command=self.name,
            recipe="required",
            adapt=lambda values, overrides: adapt_to_overrides(values, overrides, self.objective.kind),
        )[0]

    def _run(self, words: list[str]) -> int:
        recipe = self._parse(words)
        figures = self.pretrain(recipe, portable_command(["python", f"training/{self.name}.py", *words]))
        if figures is None or figures["gain_nats"] >= recipe.min_gain_nats:
            return 0
        print(
            f"The gain over the unigram baseline is {figures['gain_nats']:.3f} nats, below the recipe's "
            f"`min_gain_nats` of {recipe.min_gain_nats}. Train longer (`max_steps`) or on more text.",
            file=sys.stderr,
        )
        return 1


def adapt_to_overrides(values: dict[str, Any], overrides: dict[str, Any], kind: ModelKind) -> None:
    """Drop values of the recipe that an override on the command line contradicts, and print which."""
    model = values.get("model") if isinstance(values.get("model"), dict) else {}
    new_type = overrides.get("model.model_type", model.get("model_type"))
    if start := overrides.get("model_name_or_path"):
        if model:
            given = [f"{key[6:]}={value}" for key, value in overrides.items() if key.startswith("model.")]
            but = f"; overridden: {', '.join(given)}" if given else ""
            print(f"Ignoring the recipe's model section, since the model starts from {start}{but}.")
        values["model"] = {}
    elif new_type != model.get("model_type"):
        unknown = sorted(set(model) - model_fields(new_type, kind) - {"model_type"})
        if unknown:
            print(f"Ignoring fields of the recipe's model section that {new_type} does not have: {', '.join(unknown)}.")
        values["model"] = {name: value for name, value in model.items() if name not in unknown}
    if start or "tokenizer" in overrides:
        overrides.setdefault("train_tokenizer", False)
    elif overrides.get("train_tokenizer") is True:
        values["tokenizer"] = ""
