"""Labels of a data set: the problem they pose, their names, and how the model takes them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import ClassLabel, Dataset, Value

from luna_hf.scripting import UserError
from tasks.files import shorten

SINGLE_LABEL, MULTI_LABEL, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
_MANY = 20  # classes that even a small data set may have
_MISSING = {"nan", "na", "n/a", "null", "none"}  # what programs write for a number that is none


@dataclass(frozen=True)
class Labels:
    """What a column of labels holds.

    Attributes:
        feature: of one label: `ClassLabel`, or a number.
        several: whether a row holds a list of labels.
        width: outputs of the model.
        by_name: whether the data hold the classes' names and not their indices.
    """

    feature: ClassLabel | Value
    several: bool
    width: int
    by_name: bool = False

    @property
    def problem_type(self) -> str:
        """The problem, as transformers calls it."""
        if isinstance(self.feature, Value):
            return REGRESSION
        return MULTI_LABEL if self.several else SINGLE_LABEL

    @property
    def names(self) -> list[str]:
        """Of the classes by index; none for a regression."""
        return [] if isinstance(self.feature, Value) else self.feature.names

    def encode_one(self, value: Any) -> int | float:
        """Index of a class, or the number.

        Raises:
            ValueError: There is no such class, or it is no number.
        """
        if isinstance(self.feature, Value):
            return float(value)
        place = self.feature.encode_example(str(_whole(value)) if self.by_name else _whole(value))
        if place < 0:  # the Hub's mark for a missing label
            raise ValueError(value)
        return place

    def encode(self, column: Iterable[Any]) -> list[Any]:
        """Indices, numbers, or a zero or one per class."""
        if not self.several:
            return [self.encode_one(value) for value in column]
        rows = [[self.encode_one(value) for value in row] for row in column]
        if self.problem_type == REGRESSION:
            return rows
        return [[float(place in row) for place in range(self.width)] for row in rows]


def read_labels(splits: dict[str, Dataset], column: str, names: Sequence[str] | None = None) -> Labels:
    """Find out what a column holds in the training split, and check that every split fits.

    Texts, whole numbers and `ClassLabel` are classes; other numbers a regression; lists of either several labels per
    row. Whole numbers with a decimal point (1.0), as pandas writes a column of integers that has lost a value, are
    classes, too, except in lists.

    Args:
        splits: labelled rows by the name that messages use; the first is the training split.
        column: of the labels.
        names: of the classes by index, where the task is known; an empty one makes all numbers a regression.

    Raises:
        UserError: A value is missing or of another type, a split has a class that training lacks, or the values do not
            look like classes.
    """
    found = {source: _distinct(rows, column, source) for source, rows in splits.items()}
    source, rows = next(iter(splits.items()))
    labels = _labels(found[source], rows, column, source, names)
    for source, values in found.items():
        for value in sorted(values, key=str):
            try:
                labels.encode_one(value)
            except (ValueError, TypeError) as error:
                raise UserError(
                    f"`{column}` of {source} holds {shorten(repr(value))}, but the labels of the training data are "
                    f"{listed(labels.names) or 'numbers'}. Remove these rows, or add such rows to the training data."
                ) from error
    if labels.several and labels.problem_type == REGRESSION:
        widths = {len(row) for part in splits.values() for row in part[column]}
        if len(widths) > 1:
            raise UserError(f"`{column}` holds lists of different lengths: {sorted(widths)}.")
    return labels


def _labels(values: set[Any], rows: Dataset, column: str, source: str, names: Sequence[str] | None) -> Labels:
    """What the training split holds, given its different values."""
    feature = rows.features[column]
    inner = getattr(feature, "feature", feature)
    several, pointed = inner is not feature, any(isinstance(value, float) for value in values)
    if not several and names != () and all(isinstance(_whole(value), int) for value in values):
        values = set(map(_whole, values))
    kinds = {type(value) for value in values}
    if isinstance(inner, ClassLabel):
        return Labels(inner, several, len(inner.names))
    if kinds <= {int, float} and (names == () or (float in kinds and not names)):
        return Labels(Value("float64"), several, len(rows[0][column]) if several else 1)
    if names == () or not kinds or not (kinds <= {str} or kinds <= {int, bool}):
        expected = "a number per row" if names == () else "texts, whole numbers, numbers, or lists of one of them"
        held = ", ".join(sorted(kind.__name__ for kind in kinds)) or "no value"
        raise UserError(f"`{column}` of {source} holds values of type {held}, but must hold {expected}.")
    missing = {value for value in values if str(value).strip().lower() in _MISSING}
    if missing and values > missing and all(map(_is_number, values - missing)):
        raise UserError(f"`{column}` of {source} holds {missing.pop()!r}, but the other labels are numbers.")
    classes = ClassLabel(names=list(names or map(str, sorted(values))))
    most = _MANY if pointed else max(_MANY, len(rows) / 2)
    if not several and (len(values) < 2 or len(classes.names) > most):
        raise UserError(
            f"`{column}` of {source} has {len(values):,} different values in {len(rows):,} rows, which do not "
            "look like classes. For a regression set --regression true; for classes name another --label_column."
        )
    return Labels(classes, several, len(classes.names), by_name=str in kinds or not names)


def listed(names: Sequence[str]) -> str:
    """The names of classes for a message, without most of them if they are many or long."""
    return ", ".join(map(shorten, names[:12])) + ", ..." * (len(names) > 12)


def _whole(value: Any) -> Any:
    """1.0 as 1; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_number(value: Any) -> bool:
    return str(value).strip().lstrip("+-").replace(".", "", 1).isdigit()


def _distinct(rows: Dataset, column: str, source: str) -> set[Any]:
    """The different labels, those in lists included.

    Raises:
        UserError: A row has none, or a number that is not finite.
    """
    found = set()
    for row, value in enumerate(rows[column]):
        for item in value if isinstance(value, list) else [value]:
            blank = isinstance(item, str) and not item.strip()
            if item is None or blank or isinstance(item, list | dict) or item in (math.inf, -math.inf) or item != item:
                raise UserError(
                    f"Row {row} of {source} holds {shorten(repr(item))} in the column `{column}`, which is not a label."
                )
            found.add(item)
    return found
