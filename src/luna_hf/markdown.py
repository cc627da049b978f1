"""Markdown that shows texts as they are: names, labels and examples become no links, headings or HTML.

Every card is made here. Whatever is put into one is escaped, unless it is `Markdown` already.
"""

import json
import re
from collections.abc import Iterable, Sequence
from string import Template
from typing import Any

from .scripting import CONTROLS, markdown_table, readable

_BREAKS = re.compile(r"\s*[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]\s*")
# An underscore inside a word, and a dash inside a line, mean nothing; GitHub links bare addresses.
_ACTIVE = re.compile(r"[\\`*\[\]<>&~#$]|(?<![^\W_])_|_(?![^\W_])|:(?=//)|(?<=www)\.")
_FIRST = re.compile(r"^(\s*\d*)([-+=](?=[-+=\s]|$)|(?<=\d)[.)](?=\s|$))")


class Markdown(str):
    """Text that is Markdown already."""


def escape(text: object) -> Markdown:
    """A text in one line of Markdown that shows it as it is, except that a pair of backticks encloses code."""
    if isinstance(text, Markdown):
        return text
    # Every second part is code. Wherever backticks stand, each part is shown as it is.
    parts = re.split(r"`([^`]+)`", _line(text))
    shown = [code(part) if place % 2 else _ACTIVE.sub(r"\\\g<0>", part) for place, part in enumerate(parts)]
    return Markdown(_FIRST.sub(r"\1\\\2", "".join(shown)))


def code(text: object) -> Markdown:
    """A text as inline code, in one line; whitespace alone is shown by its `repr`."""
    line = _line(str(text).strip() or repr(text))
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    space = " " if "`" in line else ""
    return Markdown(f"{fence}{space}{line}{space}{fence}")


def code_block(text: str, language: str = "") -> Markdown:
    """A text as a block of code."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return Markdown(f"{fence}{language}\n{_clean(text).strip()}\n{fence}")


def quoted(text: str) -> Markdown:
    """A text as a string of Python or JSON, for code."""
    return Markdown(json.dumps(readable(text), ensure_ascii=False))


def table(header: Sequence[Any], rows: Iterable[Sequence[Any]]) -> Markdown:
    """A table."""
    header, *rows = ([escape(cell).replace("|", "\\|") for cell in line] for line in (header, *rows))
    return Markdown(markdown_table(header, rows))


def bullets(items: Iterable[object]) -> Markdown:
    """A list."""
    return Markdown("\n".join(f"- {escape(item)}" for item in items))


def fill(template: str, /, **fields: Any) -> Markdown:
    """Fill `$name` in a template of Markdown; surplus fields are ignored.

    Raises:
        KeyError: A field of the template is missing.
    """
    return Markdown(Template(template).substitute({name: escape(value) for name, value in fields.items()}))


def _line(text: object) -> str:
    return _clean(_BREAKS.sub(" ", str(text)))


def _clean(text: str) -> str:
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", readable(text))
