"""What the conversion commands share: the command line, the target folder, files of a source, and saving a model."""

import argparse
import shutil
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from luna_hf.scripting import Parser, UserError, portable_command

# Identifies the card of an earlier conversion.
CARD_MARK = "python conversion/"


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


def find(source: str, name: str) -> str | None:
    """The path of a file of a folder or Hub repository, or `None` if there is no such file."""
    return cached_file(
        source, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )


def check_target(target: Path, source: str, overwrite: bool) -> None:
    """Refuse a target that holds anything but an earlier conversion, or that cannot be replaced.

    Raises:
        UserError: Such a target.
    """
    if target.exists() and not target.is_dir():
        raise UserError(f"TARGET {target} is a file. Name a folder.")
    if Path(source).exists() and target.resolve() in (Path(source).resolve(), *Path(source).resolve().parents):
        raise UserError(f"TARGET {target} is SOURCE or contains it. Name another folder.")
    if target.resolve() == Path.cwd():
        raise UserError(f"TARGET {target} is the current folder, which cannot be replaced. Name another folder.")
    present = sorted(target.iterdir()) if target.exists() else []
    if not present:
        return
    card = target / "README.md"
    converted = card.is_file() and CARD_MARK in card.read_text(encoding="utf-8", errors="replace")
    # A conversion writes one subfolder at most, that of a fairseq classifier's labels.
    foreign = [path for path in present if path.is_dir() and not _is_labels(path)] if converted else present
    if foreign:
        raise UserError(f"TARGET {target} holds {foreign[0].name}, which no conversion wrote. Name another folder.")
    if not overwrite:
        raise UserError(f"TARGET {target} holds an earlier conversion. Name another folder or add --overwrite.")


def _is_labels(folder: Path) -> bool:
    return folder.name == "label" and [path.name for path in folder.iterdir()] == ["dict.txt"]


def save(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, card: str) -> None:
    """Write weights, config, code, tokenizer and card."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    readme = folder / "README.md"
    readme.write_text(card, encoding="utf-8")
    for path in folder.glob("*.safetensors"):
        shutil.copymode(readme, path)  # safetensors makes its files readable to their owner only
