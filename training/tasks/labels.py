"""Labels of a data set: the problem they pose, their names, and how the model takes them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import ClassLabel, Dataset, Value

from luna_hf.scripting import UserError

SINGLE_LABEL, MULTI_LABEL, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
_MANY = 20  # classes that even a small data set may have
_MISSING = {"nan", "na", "n/a", "null", "none", "inf", "-inf"}  # what programs write for a number that is none
_LARGEST = torch.finfo(torch.float32).max  # a larger label is infinite in the loss


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

    def index(self, value: Any) -> int:
        """Index of a class.

        Raises:
            ValueError: There is no such class.
        """
        value = _whole(value)
        place = self.feature.encode_example(str(value) if self.by_name else value)
        if place < 0:  # the Hub's mark for a missing label
            raise ValueError(value)
        return place

    def encode(self, column: Iterable[Any]) -> list[Any]:
        """Indices, numbers, or a zero or one per class."""
        if self.problem_type != MULTI_LABEL:
            convert = float if self.problem_type == REGRESSION else self.index
            return [[convert(value) for value in row] if self.several else convert(row) for row in column]
        chosen = [{self.index(value) for value in row} for row in column]
        return [[float(place in row) for place in range(self.width)] for row in chosen]


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
    feature = rows.features[column]
    inner = getattr(feature, "feature", feature)
    several, values = inner is not feature, found[source]
    pointed = any(isinstance(value, float) for value in values)
    if not several and names != () and all(isinstance(_whole(value), int) for value in values):
        values = set(map(_whole, values))
    if odd := [other for other in splits if hasattr(splits[other].features[column], "feature") != several]:
        raise UserError(f"`{column}` holds lists in only one of {source} and {odd[0]}.")
    kinds = {type(value) for value in values}
    if isinstance(inner, ClassLabel):
        labels = Labels(inner, several, len(inner.names))
    elif kinds <= {int, float} and (names == () or (float in kinds and not names)):
        widths = {len(row) for part in splits.values() for row in part[column]} if several else {1}
        if len(widths) > 1:
            raise UserError(f"`{column}` holds lists of different lengths: {sorted(widths)}.")
        labels = Labels(Value("float64"), several, widths.pop())
    elif names == () or not kinds or not (kinds <= {str} or kinds <= {int, bool}):
        expected = "a number per row" if names == () else "texts, whole numbers, numbers, or lists of one of them"
        held = feature if len(kinds) < 2 else f"values of types {', '.join(sorted(kind.__name__ for kind in kinds))}"
        held = "texts" if kinds == {str} else held
        raise UserError(f"`{column}` of {source} holds {held}, but must hold {expected}.")
    else:
        classes = ClassLabel(names=list(names or map(str, sorted(values))))
        labels = Labels(classes, several, len(classes.names), by_name=str in kinds or not names)
        most = _MANY if pointed else max(_MANY, len(rows) / 2)
        if not several and (len(values) < 2 or len(classes.names) > most):
            raise UserError(
                f"`{column}` of {source} has {len(values):,} different values in {len(rows):,} rows, which do not "
                "look like classes. For a regression set --regression true; for classes name another --label_column."
            )
    for source, values in found.items():
        for value in sorted(values, key=str):
            try:
                float(value) if labels.problem_type == REGRESSION else labels.index(value)
            except (ValueError, TypeError) as error:
                raise UserError(
                    f"`{column}` of {source} holds {shorten(repr(value))}, but the labels of the training data are "
                    f"{listed(labels.names) or 'numbers'}. Remove these rows, or add such rows to the training data."
                ) from error
    return labels


def shorten(text: str, width: int = 40) -> str:
    """The beginning of a text, in one line."""
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 3] + "..."


def listed(names: Sequence[str]) -> str:
    """The names of classes for a message, without most of them if they are many or long."""
    return ", ".join(map(shorten, names[:12])) + ", ..." * (len(names) > 12)


def _whole(value: Any) -> Any:
    """1.0 as 1; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _distinct(rows: Dataset, column: str, source: str) -> set[Any]:
    """The different labels, those in lists included.

    Raises:
        UserError: A row has none, or a number that is infinite in float32.
    """
    found, texts = set(), {}
    for row, value in enumerate(rows[column]):
        for item in value if isinstance(value, list) else [value]:
            if item is None or item != item or (isinstance(item, str) and not item.strip()):
                raise UserError(f"Row {row} of {source} has no value in the column `{column}`.")
            if isinstance(item, list | dict):
                raise UserError(
                    f"Row {row} of {source} holds {shorten(repr(item))} in the column `{column}`, which is not a label."
                )
            if isinstance(item, int | float) and abs(item) > _LARGEST:
                raise UserError(
                    f"Row {row} of {source} holds {item} in the column `{column}`, which is infinite in float32."
                )
            found.add(item)
            if isinstance(item, str):
                texts.setdefault(item.strip().lower(), (row, item))
    missing = [texts.pop(name) for name in _MISSING & texts.keys()]
    if missing and texts and all(map(_is_number, texts)):
        row, item = min(missing)
        raise UserError(f"Row {row} of {source} holds {item!r} in the column `{column}`; the other labels are numbers.")
    return found


def _is_number(text: str) -> bool:
    try:
        return float(text) is not None
    except ValueError:
        return False
