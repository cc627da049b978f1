"""What the conversion commands share: the command line, the target folder, and saving a model."""

import argparse
import shutil
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from luna_hf.convert import files
from luna_hf.scripting import Parser, portable_command

# Identifies the card of an earlier conversion.
CARD_MARK = "python conversion/"
# Subfolders that conversions write: the labels of a fairseq classifier, and the tokenizer of a target language.
_OWN = {"label": ("dict.txt",), "target": ("tokenizer.json", "tokenizer_config.json")}


def make_parser(script: str, description: str | None, source: str) -> Parser:
    """A parser for SOURCE, TARGET and --overwrite; `source` is the help of the first."""
    parser = Parser(
        prog=f"python conversion/{script}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SOURCE", help=source)
    parser.add_argument("target", metavar="TARGET", type=Path, help="folder to write; must be new or empty")
    parser.add_argument("--overwrite", action="store_true", help="replace TARGET if an earlier conversion wrote it")
    return parser


def command(script: str, words: list[str]) -> str:
    """The command that repeats a conversion, without this machine's folders."""
    return portable_command(["python", f"conversion/{script}", *(word for word in words if word != "--overwrite")])


def check_target(target: Path, source: str, overwrite: bool) -> None:
    """Refuse a target that holds anything but an earlier conversion, or that cannot be replaced.

    Raises:
        UserError: Such a target.
    """
    files.check_target(target, source, overwrite, CARD_MARK, _is_own)


def _is_own(folder: Path) -> bool:
    return {path.name for path in folder.iterdir()} <= set(_OWN.get(folder.name, ()))


def save(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Write weights, config, code and tokenizer."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", path)  # safetensors makes its files readable to their owner only
