"""Pretrain a masked language model from a recipe, and leave a folder that is ready for the Hub.

    python training/pretrain_mlm.py training/recipes/pretrain_mlm/demo.yaml
    python training/pretrain_mlm.py training/recipes/pretrain_mlm/demo.yaml --data texts/ --output-dir outputs/mine
    accelerate launch --config_file training/accelerate/multi_gpu.yaml training/pretrain_mlm.py RECIPE.yaml

Every key of the recipe can be overridden by `--key value`, those of its model section by `--model.key value`; the keys
are explained in the recipes. The same command again goes on from the last checkpoint of a run that was interrupted.
It needs the `train` extra: pip install -e ".[train]"
"""

from common import extra  # noqa: F401

# isort: split
import sys
from functools import partial
from typing import Any

from common.models import MASKED
from common.options import load_recipe
from engine import pretraining
from engine.objective import Objective
from engine.pretraining import adapt_to_overrides, command_line
from engine.recipe import PretrainRecipe


def read_recipe(path: str, words: list[str]) -> PretrainRecipe:
    """A recipe with the overrides of the command line.

    Raises:
        UserError: See `load_recipe` and `PretrainRecipe`.
    """
    return load_recipe(PretrainRecipe, path, words, adapt=partial(adapt_to_overrides, kind=MASKED))


def pretrain(recipe: PretrainRecipe, command: str) -> dict[str, Any] | None:
    """Run a recipe, or go on with it: `pretraining.pretrain` with masked language modelling."""
    return pretraining.pretrain(recipe, command, Objective())


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line, see `pretraining.command_line`."""

    def run(path: str, words: list[str], command: str) -> tuple[PretrainRecipe, dict[str, Any] | None]:
        recipe = read_recipe(path, words)
        return recipe, pretrain(recipe, command)

    arguments = sys.argv[1:] if arguments is None else arguments
    return command_line("training/pretrain_mlm.py", __doc__, PretrainRecipe, arguments, run)


if __name__ == "__main__":
    sys.exit(main())
