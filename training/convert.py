"""Convert a trained encoder and train the result to compute what its source computes, from one recipe.

    python training/convert.py training/recipes/convert/tiny.yaml
    python training/convert.py RECIPE.yaml --teacher FOLDER --data texts/ --output_dir outputs/mine
    accelerate launch --config_file training/accelerate/multi_gpu.yaml training/convert.py RECIPE.yaml

The source (BERT, RoBERTa, XLM-R, DistilBERT, ELECTRA or a sentence-transformers folder of one) is the teacher. `model`
chooses the family and its fields, `stages` what is trained, on which lengths, with which loss. After an interruption
the same command resumes from the last checkpoint. `python -m luna_hf convert` converts without training.
"""

from common import extra  # noqa: F401

# isort: split
import sys
from collections.abc import Sequence
from pathlib import Path

from accelerate import PartialState
from common.options import parse
from converting.recipe import ConvertRecipe
from converting.run import convert

from luna_hf.scripting import portable_command, run_script


def read_recipe(path: str | Path, words: Sequence[str] = ()) -> ConvertRecipe:
    """A recipe with overrides; raises the `UserError`s of `options.parse` and of `ConvertRecipe`."""
    return parse([ConvertRecipe], [str(path), *words], __doc__, command="convert", recipe="required")[0]


def main(words: Sequence[str] | None = None) -> int:
    """Run from the command line; see `run_script` for the exit status."""
    words = sys.argv[1:] if words is None else list(words)

    def script() -> None:
        (recipe,) = parse([ConvertRecipe], words, __doc__, command="convert", recipe="required")
        convert(recipe, portable_command(["python", "training/convert.py", *words]))
        PartialState().destroy_process_group()

    return run_script(
        script, "the same command resumes from the last checkpoint, if there is one", clean_on_sigterm=False
    )


if __name__ == "__main__":
    sys.exit(main())
