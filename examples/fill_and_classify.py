"""Fill masks and classify sentences with the checkpoints of this repository.

    python examples/fill_and_classify.py [CHECKPOINTS]

CHECKPOINTS is a folder with `luna-mini-en` and `luna-mini-en-sst2`; the default is `checkpoints`. It takes seconds.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers import pipeline

import luna_hf  # noqa: F401  registers the models with Transformers
from luna_hf.scripting import Parser, UserError, run_script

MASKED = ["The capital of France is <mask>.", "She opened the <mask> and looked out at the rain."]
REVIEWS = ["a warm and funny film , beautifully acted", "a dull , endless mess", "not as bad as it sounds"]


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", metavar="CHECKPOINTS", type=Path, nargs="?", default=Path("checkpoints"))
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Print the answers of both models. Returns the exit status."""
    return run_script(lambda: answer(parse(sys.argv[1:] if words is None else words).checkpoints))


def answer(checkpoints: Path) -> None:
    """Fill the masks, then classify the reviews.

    Raises:
        UserError: A checkpoint is missing.
    """
    folders = [checkpoints / name for name in ("luna-mini-en", "luna-mini-en-sst2")]
    if missing := [str(folder) for folder in folders if not folder.is_dir()]:
        raise UserError(f"There is no {' and no '.join(missing)}. Name the folder that holds them.")

    fill_mask = pipeline("fill-mask", model=str(folders[0]), device="cpu")
    for sentence in MASKED:
        print(sentence)
        for guess in fill_mask(sentence, top_k=3):
            print(f"  {guess['score']:.2f} {guess['token_str'].strip()}")

    classify = pipeline("text-classification", model=str(folders[1]), device="cpu")
    for review, label in zip(REVIEWS, classify(REVIEWS), strict=True):
        print(f"{label['label']} {label['score']:.2f}  {review}")


if __name__ == "__main__":
    sys.exit(main())
