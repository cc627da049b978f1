"""Sections of a recipe, such as the entries of `parameter_groups`, as dataclasses."""

import dataclasses
from typing import Any, TypeVar

from common.options import did_you_mean, fill
from luna_hf.scripting import UserError

T = TypeVar("T")


def read_section(kind: type[T], entry: Any, where: str) -> T:
    """An instance of a dataclass from a section; `where` starts the messages.

    Raises:
        UserError: It is not a section, has an unknown key or lacks one, or a value has the wrong type or is refused by
            the dataclass.
    """
    known = [field.name for field in dataclasses.fields(kind)]
    if not isinstance(entry, dict):
        raise UserError(f"{where}: {entry!r} must be a section with some of the keys {', '.join(known)}.")
    for key in entry:
        if key not in known:
            raise UserError(f"{where}: unknown key `{key}` in {entry!r}.{did_you_mean(key, known)}")
    return fill(kind, entry, f"{where}: ")
