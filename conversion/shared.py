"""What the conversion commands share: the command line, the target folder, and reading, saving and comparing models."""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

import luna_hf
from luna_hf.convert import files
from luna_hf.scripting import Parser, UserError, portable_command, quiet, reason

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


def check_target(target: Path, source: str, overwrite: bool, template: Path) -> None:
    """Refuse a target that holds anything but an earlier conversion, or that cannot be replaced.

    Raises:
        UserError: Such a target; or the template of the card, which only the end needs, is missing.
    """
    if not template.is_file():
        raise UserError(f"The template of cards, {template}, is missing. Run the command in a whole clone of luna_hf.")
    files.check_target(target, source, overwrite, CARD_MARK, _is_own)


def _is_own(folder: Path) -> bool:
    names = {path.name for path in folder.iterdir()}
    return names <= set(_OWN.get(folder.name, ())) or files.is_module(folder)


def save(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Write weights, config, code and tokenizer."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", path)  # safetensors makes its files readable to their owner only


def load(source: str | Path) -> PreTrainedModel:
    """The Luna of a folder or Hub repository in eval mode, with the dtype of its stored weights.

    Raises:
        UserError: It cannot be read or is incomplete, or is no Luna.
    """
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        if config.model_type != luna_hf.LunaConfig.model_type or not config.architectures:
            raise UserError(f"{source} is of the type {config.model_type!r}, or has no `architectures`: it is no Luna.")
        config.dtype = None  # whatever config.json says
        kind = getattr(luna_hf, config.architectures[0])
        with quiet():  # its warnings are raised here
            model, info = kind.from_pretrained(source, config=config, dtype="auto", output_loading_info=True)
    except UserError:
        raise
    except Exception as error:  # depends on what is missing or damaged
        raise UserError(f"{source} is no folder or Hub name of a complete model ({reason(error)}).") from error
    if wrong := sorted({*info["missing_keys"], *info["unexpected_keys"]}):
        raise UserError(f"The weights of {source} do not fit its config.json: {', '.join(wrong[:3])}.")
    return model.eval()


def different_tensors(model: PreTrainedModel, expected: PreTrainedModel, limit: float = 0.0) -> list[str]:
    """Names of the tensors that are not equal bit for bit, or to a `limit` of the absolute difference."""
    ours, theirs = model.state_dict(), expected.state_dict()
    return sorted(
        name
        for name in ours.keys() | theirs.keys()
        if name not in ours
        or name not in theirs
        or ours[name].dtype != theirs[name].dtype
        or ours[name].shape != theirs[name].shape
        or not torch.allclose(ours[name], theirs[name], rtol=0, atol=limit)
    )
