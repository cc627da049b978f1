"""Command-line options that say how to read a checkpoint of the authors, shared by the commands that read one."""

import argparse
import ast
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from luna_hf.scripting import UserError

from .checkpoint import Original, open_original


def add_reading_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `open_checkpoint` reads."""
    add = parser.add_argument
    add("--checkpoint", metavar="NAME", help="model file to read, if an archive or folder holds several")
    add(
        "--layer-norm",
        choices=("plain", "offset"),
        help="what the file stores for each LayerNorm: its weight (published checkpoints), or its weight less 1 (code "
        "of 2023 and later); detected by default",
    )
    add(
        "--override",
        action="append",
        metavar="NAME=VALUE",
        default=[],
        help="replace an argument of the training run, for example encoder_attention_heads=12",
    )


def open_checkpoint(source: Path, options: argparse.Namespace) -> AbstractContextManager[Original]:
    """Open a checkpoint with these options; see `open_original`."""
    overrides = dict(map(_parse_override, options.override))
    return open_original(source, options.checkpoint, options.layer_norm, overrides)


def _parse_override(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"--override {text} must have the form NAME=VALUE.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):  # a word, such as gelu
        return name, value
