"""Train an encoder-decoder to translate, from a recipe, into a folder that is ready for the Hub.

    python training/train_translation.py training/recipes/train_translation/multi30k_luna16.yaml --data FOLDER
    accelerate launch --config_file training/accelerate/multi_gpu.yaml training/train_translation.py RECIPE.yaml

`--key value` overrides a key of the recipe, `--model.key value` a key of its model section. If a run is interrupted,
the same command resumes it from its last checkpoint. Afterwards the mean of the last checkpoints translates the
validation and the test split with beam search; BLEU and chrF are sacreBLEU's. Needs the `train` and `translate` extras:
pip install -e ".[train,translate]"
"""

from common import extra, extra_translate  # noqa: F401

# isort: split
import sys
from collections.abc import Sequence

from accelerate import PartialState
from common.models import SEQ2SEQ
from common.options import parse
from datasets import disable_progress_bars
from engine.command import adapt_to_overrides
from translation.recipe import TranslationRecipe
from translation.run import run

from luna_hf.scripting import portable_command, run_script

NAME = "train_translation"
_STOPPED = "the same command resumes from the last checkpoint, if there is one"


def read_recipe(path: str, words: Sequence[str] = ()) -> TranslationRecipe:
    """A recipe with overrides; raises the `UserError`s of `options.parse` and of the recipe's class."""
    return parse(
        [TranslationRecipe],
        [str(path), *words] if path else words,
        __doc__,
        command=NAME,
        recipe="required",
        adapt=lambda values, overrides: adapt_to_overrides(values, overrides, SEQ2SEQ),
    )[0]


def train(words: Sequence[str]) -> int:
    """Run, and return 1 if BLEU on the validation split is below the recipe's `min_bleu`."""
    recipe = read_recipe(*words[:1], words[1:]) if words else read_recipe("", words)
    figures = run(recipe, portable_command(["python", f"training/{NAME}.py", *words]))
    PartialState().destroy_process_group()
    if figures is None or "validation" not in figures or figures["validation"]["bleu"]["score"] >= recipe.min_bleu:
        return 0
    print(f"BLEU is below the recipe's `min_bleu` of {recipe.min_bleu}. Train longer (`max_steps`).", file=sys.stderr)
    return 1


def main(words: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    disable_progress_bars()  # of `datasets`
    words = sys.argv[1:] if words is None else list(words)
    return run_script(lambda: train(words), _STOPPED, clean_on_sigterm=False)


if __name__ == "__main__":
    sys.exit(main())
