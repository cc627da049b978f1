"""Labels of a data set: which problem they pose, what they are called, and how the model takes them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from datasets import ClassLabel, Dataset

from luna_hf.scripting import UserError
from tasks.trainer import MULTI_LABEL, REGRESSION, SINGLE_LABEL

_SHOWN = 12  # labels that a message lists
_MANY = 20  # classes that even a small data set may have


@dataclass(frozen=True)
class Labels:
    """What the labels of all splits are.

    Attributes:
        problem_type: transformers' name of it.
        names: of the classes by index; none for a regression.
        values: what stands in the data for each class.
        width: outputs of the model.
        notes: what the user should know.
    """

    problem_type: str
    names: list[str]
    values: list[Any]
    width: int
    notes: list[str] = field(default_factory=list)

    def encode(self, column: Iterable[Any]) -> list[Any]:
        """Indices, numbers, or a zero or one for each label."""
        if self.problem_type == REGRESSION:
            return [[float(number) for number in row] if self.width > 1 else float(row) for row in column]
        index = {value: place for place, value in enumerate(self.values)}
        if self.problem_type == SINGLE_LABEL:
            return [index[value] for value in column]
        places = [{index[value] for value in row} for row in column]
        return [[float(place in row) for place in range(self.width)] for row in places]


def read_labels(
    splits: dict[str, Dataset], column: str, known: tuple[str, ...] | None = None, is_number: bool = False
) -> Labels:
    """Find out what a column of labels holds; it must be the same in all splits.

    Texts, whole numbers and `ClassLabel` are classes; other numbers a regression; lists of texts or whole numbers
    several labels at once; lists of other numbers, all of one length, a regression on several targets.

    Args:
        splits: labelled rows by the name that messages use; the first is the training split.
        column: of the labels.
        known: names by index, where the task is known.
        is_number: whole numbers are numbers here and not classes.

    Raises:
        UserError: A value is missing or of another type, a class of another split does not occur in training, or a
            number is outside the range of the known names.
    """
    kinds = {source: _kind(rows, column, source) for source, rows in splits.items()}
    (first, kind), *others = kinds.items()
    for source, other in others:
        if other != kind:
            raise UserError(f"`{column}` holds {kind} in {first}, but {other} in {source}.")
    stored = _stored_names(splits[first], column)
    if known is not None and (is_number or not known):
        known, stored = None, None
        if kind not in ("numbers", "whole numbers"):
            raise UserError(f"`{column}` of {first} holds {kind}, but this task needs a number for each row.")
        kind = "numbers"
    if known is not None and kind not in ("texts", "whole numbers"):
        raise UserError(f"`{column}` of {first} holds {kind}, but this task has classes: {', '.join(known)}.")
    if kind == "numbers":
        return Labels(REGRESSION, [], [], 1)
    if kind == "lists of numbers":
        return _several_targets(splits, column)
    lists = kind.startswith("lists")
    if kind.endswith("whole numbers"):
        names = list(stored or known or ())
        return _numbered(splits, column, names, lists)
    return _named(splits, column, list(known or ()), lists)


def _kind(rows: Dataset, column: str, source: str) -> str:
    """What all values of a column are."""
    kinds = {}
    for row, value in enumerate(rows[column]):
        kinds.setdefault(_kind_of(value), row)
    kinds.pop("empty list", None)
    if set(kinds) == {"whole numbers", "numbers"} or set(kinds) == {"lists of whole numbers", "lists of numbers"}:
        kinds.pop("whole numbers", None)
        kinds.pop("lists of whole numbers", None)
    if len(kinds) == 1 and next(iter(kinds)) not in ("nothing", "something else"):
        return next(iter(kinds))
    if not kinds:
        raise UserError(f"`{column}` of {source} holds nothing but empty lists.")
    told = ", ".join(f"{kind} (row {row})" for kind, row in kinds.items())
    raise UserError(
        f"`{column}` of {source} holds {told}. Labels are texts or whole numbers (classes), numbers (regression), or "
        "lists of them (several labels), the same in every row."
    )


def _kind_of(value: Any) -> str:
    if isinstance(value, bool):
        return "whole numbers"
    if isinstance(value, str):
        return "texts" if value.strip() else "nothing"
    if isinstance(value, int):
        return "whole numbers"
    if isinstance(value, float):
        return "nothing" if math.isnan(value) else "numbers"
    if value is None:
        return "nothing"
    if isinstance(value, list):
        kinds = {_kind_of(item) for item in value}
        if not kinds:
            return "empty list"
        if kinds == {"whole numbers", "numbers"}:
            return "lists of numbers"
        if len(kinds) == 1 and next(iter(kinds)) in ("texts", "whole numbers", "numbers"):
            return f"lists of {next(iter(kinds))}"
    return "something else"


def _stored_names(rows: Dataset, column: str) -> list[str] | None:
    feature = rows.features[column]
    feature = getattr(feature, "feature", feature)
    return list(feature.names) if isinstance(feature, ClassLabel) else None


def _distinct(rows: Dataset, column: str, lists: bool) -> set[Any]:
    return {item for value in rows[column] for item in value} if lists else set(rows[column])


def _numbered(splits: dict[str, Dataset], column: str, names: list[str], lists: bool) -> Labels:
    """Classes that are whole numbers: with names, they count from 0; without, each number is its own name."""
    notes = []
    (first, rows), *_ = splits.items()
    if not names:
        found = sorted(_distinct(rows, column, lists))
        return _checked(splits, column, found, [str(value) for value in found], lists, notes)
    for source, part in splits.items():
        outside = sorted(value for value in _distinct(part, column, lists) if not 0 <= value < len(names))
        if outside:
            raise UserError(
                f"`{column}` of {source} holds {outside[0]}, but the labels go from 0 ({names[0]}) to "
                f"{len(names) - 1} ({names[-1]})."
            )
    found = _distinct(rows, column, lists)
    unused = [name for index, name in enumerate(names) if index not in found]
    if unused:
        notes.append(f"{first} has no row with the label {', '.join(unused)}.")
    return Labels(MULTI_LABEL if lists else SINGLE_LABEL, names, list(range(len(names))), len(names), notes)


def _named(splits: dict[str, Dataset], column: str, known: list[str], lists: bool) -> Labels:
    """Classes that are texts; in the known order, or sorted."""
    rows = next(iter(splits.values()))
    found = sorted(_distinct(rows, column, lists))
    if known:
        strange = [value for value in found if value not in known]
        if strange:
            raise UserError(f"`{column}` holds {strange[0]!r}, but the labels of this task are {', '.join(known)}.")
        found = known
    return _checked(splits, column, found, found, lists, [])


def _checked(
    splits: dict[str, Dataset], column: str, values: list[Any], names: list[str], lists: bool, notes: list[str]
) -> Labels:
    """Labels, once no other split has a class that training does not have."""
    for source, rows in splits.items():
        strange = sorted(_distinct(rows, column, lists) - set(values))
        if strange:
            known = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
            raise UserError(f"`{column}` of {source} holds {strange[0]!r}, which does not occur in training: {known}.")
    count = len(next(iter(splits.values())))
    if len(values) > max(_MANY, count / 2) and not lists:
        raise UserError(
            f"`{column}` holds {len(values):,} different values in {count:,} rows: these are no classes. For a "
            "regression the numbers need decimal points (2.0); for classes name another --label_column."
        )
    if len(values) < 2 and not lists:
        raise UserError(f"`{column}` holds a single class, {names[0]!r}: there is nothing to learn.")
    notes.append(f"{len(names)} labels: {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}.")
    return Labels(MULTI_LABEL if lists else SINGLE_LABEL, names, values, len(values), notes)


def _several_targets(splits: dict[str, Dataset], column: str) -> Labels:
    widths = {}
    for source, rows in splits.items():
        for row, value in enumerate(rows[column]):
            widths.setdefault(len(value), f"row {row} of {source}")
    if len(widths) > 1:
        told = ", ".join(f"{width} ({where})" for width, where in widths.items())
        raise UserError(
            f"`{column}` holds lists of numbers of different lengths: {told}. A regression needs one length."
        )
    return Labels(REGRESSION, [], [], next(iter(widths)))
