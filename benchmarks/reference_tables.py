"""The tables of docs/reference: the options of the commands, the keys of the recipes and the fields of the configs.

Every command is asked for its help, and the parser or the dataclasses that would print it are read instead.
"""

import argparse
import ast
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import MISSING
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parents[1] / "training"))

from common import options

from luna_hf import FAMILIES, BoundedMemoryConfig
from luna_hf.scripting import markdown_table

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("training", "conversion", "model_cards")  # whose commands have tables of their options
MEASURING = ("benchmarks", "benchmarks/lra", "experiments", "examples")  # whose commands are only named
# Options of these classes have pages of their own, which their release decides.
FOREIGN = ("transformers.", "sentence_transformers.")
# The fields that all families share, by the first of a group.
GROUPS = {
    "vocab_size": "Size and feed-forward network",
    "max_position_embeddings": "Positions and embeddings",
    "norm_first": "Norms, initialisation and convolution",
    "local_window": "Window, marked and selected tokens",
    "full_attention_layers": "Softmax layers, masked-LM head and padding",
    "classifier_pooling": "Classification heads",
    "pad_token_id": "Special tokens and output layer",
    "is_decoder": "Decoders and encoder-decoders",
    "chunk_size_feed_forward": "Inference",
}


class Row(NamedTuple):
    """An option, a key or a field."""

    name: str
    kind: str
    default: str
    about: str
    section: str = ""


# ---- cells ----


def kind_of(hint: Any) -> str:
    """A type in words. `None` is left out: the default or the meaning says so."""
    kinds = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        words = [kind_of(kind) for kind in kinds if kind is not type(None)]
        return " or ".join(word for word in words if word != "int" or "float" not in words)
    if get_origin(hint) is Literal:
        return ", ".join(f"`{value}`" for value in kinds if value)
    if get_origin(hint) is list:
        return "list" if Any in kinds else f"list of {kind_of(*kinds)}"
    names = {dict: "section", Path: "path"}
    known = {str, bool, int, float}
    return names.get(get_origin(hint) or hint, hint.__name__ if hint in known else "str")


def shown(value: Any) -> str:
    """A value as a cell."""
    text = value if isinstance(value, str) and value else json.dumps(value, default=str)
    return f"`{text.replace(f'{ROOT}/', '')}`"


def prose(text: str) -> str:
    """A text as a cell: what Markdown or HTML would read as markup is escaped outside of code."""
    pieces = re.split("(`+[^`]*`+)", " ".join(text.split()))
    return "".join(
        piece if piece[:1] == "`" else re.sub(r"([*\[\]])", r"\\\1", piece.replace("<", "&lt;")) for piece in pieces
    )


def table(head: Sequence[str], rows: Sequence[Row]) -> str:
    """Rows as a Markdown table, one for each section."""
    parts = []
    for section in dict.fromkeys(row.section for row in rows):
        cells = [[f"`{row.name}`", row.kind, row.default, prose(row.about)] for row in rows if row.section == section]
        body = markdown_table(head, [[cell.replace("|", "\\|") for cell in line] for line in cells])
        parts.append(f"**{section[:1].upper()}{section[1:]}**\n\n{body}" if section else body)
    return "\n\n".join(parts)


# ---- commands ----


def scripts(folders: Sequence[str]) -> list[Path]:
    """The commands of folders."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).glob("*.py"))]
    return [path for path in paths if '__name__ == "__main__"' in path.read_text(encoding="utf-8")]


def ask(module: str) -> argparse.ArgumentParser | tuple[Any, ...]:
    """A command's parser, or the arguments of its `options.help_text`."""
    asked: list[Any] = []
    sys.path[:0] = {str(ROOT / folder) for folder in FOLDERS}.difference(sys.path)  # before a package called `build`
    with (
        mock.patch.object(argparse.ArgumentParser, "print_help", lambda parser, file=None: asked.append(parser)),
        mock.patch.object(options, "help_text", lambda *given: asked.append(given) or ""),
        mock.patch("builtins.print"),
        suppress(SystemExit),
    ):
        importlib.import_module(module).main(["--help"])
    return asked[0]


def command_table(module: str) -> str:
    """The options of a command, or the keys of its recipes with the values of one."""
    found = ask(module)
    if isinstance(found, argparse.ArgumentParser):
        return table(("option", "type", "default", "meaning"), list(parser_rows(found)))
    classes, _, command, recipe, positional, refused = found
    if recipe == "required":
        path = ROOT / options.recipes_of(command)[0]
        return table(("key", "type", f"in {path.name}", "meaning"), recipe_rows(path, classes))
    return table(("option", "type", "default", "meaning"), list(option_rows(classes, refused, positional)))


def parser_rows(parser: argparse.ArgumentParser) -> Iterator[Row]:
    """The options of a parser."""
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        name = ", ".join(action.option_strings) or str(action.metavar or action.dest).upper()
        kind = ", ".join(f"`{choice}`" for choice in action.choices or ()) or kind_of(action.type or str)
        kind = "flag" if action.nargs == 0 else f"list of {kind}" if action.nargs in ("+", "*") else kind
        about, _, told = parser._get_formatter()._expand_help(action).removesuffix(")").partition(" (default: ")
        given = shown(action.default) if action.default and action.nargs != 0 else ""
        yield Row(name, kind, "required" if action.required and action.nargs != "*" else given or prose(told), about)


def option_rows(classes: Sequence[type], refused: Sequence[str], positional: str) -> Iterator[Row]:
    """The options of dataclasses, see `options.parse`."""
    for field, owner in options.declared(classes, refused):
        if not owner.__module__.startswith(FOREIGN):
            about, default = options.explained(field, owner)
            given = "required" if default is MISSING else shown(default) if default or default == 0 else ""
            name = positional.upper() if field.name == positional else f"--{field.name}"
            yield Row(name, kind_of(get_type_hints(owner)[field.name]), given, about.replace(" (required)", ""))


def recipe_rows(path: Path, classes: Sequence[type]) -> list[Row]:
    """The keys of a recipe, with its values and comments."""
    kinds = {name: kind_of(hint) for one in classes for name, hint in get_type_hints(one).items()}
    text, rows, section = path.read_text(encoding="utf-8").partition("\n\n")[2], [], ""
    values = options.parse_yaml(text, str(path))
    for line in text.splitlines():
        if begins := re.match(r"# -+ (.*?) -+", line):
            section = begins[1]
        elif begins := re.match(r"(\w+):.*?(?:\s# ?(.*))?$", line):
            value = shown(values[begins[1]])
            rows.append(Row(begins[1], kinds[begins[1]], value if len(value) < 40 else "", begins[2] or "", section))
        elif more := re.match(r"\s+# ?(.*)", line):
            rows[-1] = rows[-1]._replace(about=f"{rows[-1].about} {more[1]}")
    return rows


def summaries_of(folders: Sequence[str]) -> str:
    """The first line of the docstring of every command of folders."""
    paths = scripts(folders)
    texts = [ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))).split("\n\n")[0] for path in paths]
    rows = [(f"`{path.relative_to(ROOT).as_posix()}`", prose(text)) for path, text in zip(paths, texts, strict=True)]
    return markdown_table(("command", "what it does"), rows)


# ---- configs ----


def config_table(config: type[BoundedMemoryConfig]) -> str:
    """The fields that the docstring of a config explains."""
    rows, section, is_shared = [], "", config is BoundedMemoryConfig
    fields = re.search(r"^    Args:\n(.*?)(?:\n\n|\Z)", config.__doc__, re.DOTALL | re.MULTILINE)[1]
    for names, about in re.findall(r"^ {8}(\w[\w, ]*): (.*(?:\n {12}.*)*)", fields, re.MULTILINE):
        for name in names.split(", "):
            section, field = GROUPS.get(name, section) if is_shared else "", config.__dataclass_fields__[name]
            rows.append(Row(name, kind_of(field.type), f"`{field.default!r}`", about, section))
    return table(("field", "type", "default", "meaning"), rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "options-luna_hf-convert": partial(command_table, "luna_hf.convert.command"),
    **{f"options-{path.parent.name}-{path.stem}": partial(command_table, path.stem) for path in scripts(FOLDERS)},
    "commands-measuring": partial(summaries_of, MEASURING),
    "fields-shared": partial(config_table, BoundedMemoryConfig),
    **{f"fields-{name}": partial(config_table, family.config) for name, family in FAMILIES.items()},
}
