"""Translate a text word by word while it arrives.

    python examples/translate_while_reading.py MODEL [--wait 3] [--text TEXT]

MODEL is a folder of `training/train_translation.py`, trained with `source_is_causal` (a recipe `multi30k_wait_*`). Each
word of the source begins a line, on which stands what is written before the next word arrives.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence

from transformers import AutoModelForSeq2SeqLM

from luna_hf.scripting import Parser, UserError, load_tokenizer, run_script
from luna_hf.simultaneous import SimultaneousTranslator, WaitK

TEXT = "Two men in orange shirts are playing football on a green field."


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="a folder, or a name on the Hub")
    parser.add_argument(
        "--wait", type=int, default=3, help="tokens to read before the first one (default: %(default)s)"
    )
    parser.add_argument("--text", default=TEXT, help="default: %(default)s")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Print source and translation. Returns the exit status."""
    return run_script(lambda: translate(parse(sys.argv[1:] if words is None else words)))


def translate(options: argparse.Namespace) -> None:
    """Translate a text whose words arrive one after the other.

    Raises:
        UserError: The model cannot be loaded, or does not translate while it reads.
    """
    tokenizer = load_tokenizer(options.model, required=True)
    try:
        model = AutoModelForSeq2SeqLM.from_pretrained(options.model).eval()
        translator = SimultaneousTranslator(model, tokenizer, WaitK(options.wait))
        for piece in translator.stream(arriving(options.text)):
            print(piece, end="", flush=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{options.model} cannot translate this text: {error}") from error
    print()


def arriving(text: str) -> Iterator[str]:
    """Print each word of a text when it is read."""
    for number, word in enumerate(text.split()):
        print(f"{chr(10) * bool(number)}{word:<16}", end="")
        yield f"{word} "


if __name__ == "__main__":
    sys.exit(main())
