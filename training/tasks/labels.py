"""Labels of a data set: the problem they pose, their names, and how the model takes them."""

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow
from common.tables import shorten
from datasets import ClassLabel, Dataset, Value
from transformers import PreTrainedConfig

from luna_hf.scripting import UserError

SINGLE_LABEL, MULTI_LABEL, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
# The square of an error, summed over a batch, must fit into float32 (3.4e38).
_LARGEST = 1e18
_MANY = 20  # classes that even a small data set may have
# What programs write for a number that is none.
_MISSING = {"nan", "na", "n/a", "null", "none", "inf", "infinity"}
# What ends a line or a field of a table of predictions, or what a terminal would obey.
_BREAKS = re.compile(r"[\0-\x1f\x7f-\x9f\u2028\u2029]")
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")  # ASCII: other digits are other names
_NUMBER = re.compile(r"[+-]?((0|[1-9]\d*)(\.\d*)?|\.\d+)(e[+-]?\d+)?", re.IGNORECASE | re.ASCII)


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
            if isinstance(value, str) and not _NUMBER.fullmatch(value.strip()):  # `float` reads nan and 1_0, too
                raise ValueError(value)
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


# ---- what a column holds ----


def numbers_of_tables(splits: dict[str, Dataset], column: str, regression: bool = False) -> dict[str, Dataset]:
    """Turn labels into numbers in CSV and TSV files, which hold texts only, if those of the first split are numbers.

    They are names of classes if one has a leading zero (007), or if all are whole and some are long or have an exponent
    (1e5).

    Args:
        splits: rows by split; the first is the training split.
        column: of the labels; a split may lack it.
        regression: whether all labels are numbers by the task.
    """
    turned = {split: _with_numbers(rows, column, regression) for split, rows in splits.items()}
    return splits if _holds_text(next(iter(turned.values())), column) else turned


def _with_numbers(rows: Dataset, column: str, regression: bool) -> Dataset:
    """Rows of a CSV or TSV file with a column of numbers, if all its texts are such; other rows as they are."""
    is_text = rows.info.builder_name == "csv" and _holds_text(rows, column)  # on the Hub, types are inferred
    texts = list(rows[column]) if is_text else []
    kind = _type_of_numbers({text for text in texts if text is not None}, regression)
    if kind is None:
        return rows
    numbers = [None if text is None else int(text) if kind == "int64" else float(text) for text in texts]
    table, place = rows.data.table.replace_schema_metadata(None), rows.column_names.index(column)
    return Dataset(table.set_column(place, column, pyarrow.array(numbers, kind)))


def _holds_text(rows: Dataset, column: str) -> bool:
    return column in rows.column_names and getattr(rows.features[column], "dtype", "") == "string"


def _type_of_numbers(texts: set[str], regression: bool) -> str | None:
    """`int64` or `float64` if all texts are such numbers, and if there are any."""
    if not texts or not all(map(_NUMBER.fullmatch, texts)):
        return None
    if all(map(_INTEGER.fullmatch, texts)):
        return "int64"
    whole = all(float(text).is_integer() for text in texts)
    is_name = "e" in "".join(texts).lower() or max(map(len, texts)) > 15  # beyond, float64 has not every digit
    return None if whole and is_name and not regression else "float64"


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
    if labels.several and names != ():
        _refuse_vectors(splits, column)
    for source, values in found.items():
        if odd := [row for row in splits[source][column] if isinstance(row, list) != labels.several]:
            expected = "a list of labels" if labels.several else "one label"
            raise UserError(f"`{column}` of {source} holds {shorten(repr(odd[0]))}, but a row must hold {expected}.")
        is_regression = labels.problem_type == REGRESSION
        if is_regression and (odd := [v for v in values if isinstance(v, int | float) and abs(v) > _LARGEST]):
            raise UserError(
                f"`{column}` of {source} holds {odd[0]}, but a target may be at most {_LARGEST:g}, or float32 cannot "
                "hold the squares of errors. Divide the targets."
            )
        named = _inner(splits[source].features[column])
        if isinstance(named, ClassLabel) and labels.names not in ([], named.names) and not _only_numbers(named.names):
            raise UserError(
                f"`{column}` of {source} names its classes {listed(named.names)}, but they should be "
                f"{listed(labels.names)}, in that order. Write the labels of all files as texts, or in one order."
            )
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
    inner = _inner(feature)
    several, pointed = inner is not feature, any(isinstance(value, float) for value in values)
    if not several and names != () and all(isinstance(_whole(value), int) for value in values):
        values = set(map(_whole, values))
    kinds = {type(value) for value in values}
    if isinstance(inner, ClassLabel) and names != ():
        classes = ClassLabel(names=list(names)) if names else inner
        return Labels(classes, several, len(classes.names))
    if names == ():
        refuse_codes(rows, column, source)
    if kinds <= {int, float} and (names == () or (float in kinds and not names)):
        return Labels(Value("float64"), several, len(rows[0][column]) if several else 1)
    if names == () or not kinds or not (kinds <= {str} or kinds <= {int, bool}):
        expected = "a number per row" if names == () else "texts, whole numbers, numbers, or lists of one of them"
        held = "values of type " + (", ".join(sorted(kind.__name__ for kind in kinds)) or "no value")
        if names == () and (odd := [value for value in values if not _is_number(value)]):
            held += f", such as {shorten(repr(min(odd, key=str)))}"
        raise UserError(f"`{column}` of {source} holds {held}, but must hold {expected}.")
    missing = {value for value in values if _is_missing(str(value))}
    if missing and values > missing and all(map(_is_number, values - missing)):
        raise UserError(f"`{column}` of {source} holds {missing.pop()!r}, but the other labels are numbers.")
    if not names:
        _check_alike(map(str, values), f"`{column}` of {source}")
    classes = ClassLabel(names=list(names or map(str, sorted(values))))
    most = _MANY if pointed else max(_MANY, len(rows) / 2)
    if not several and (len(values) < 2 or len(classes.names) > most):
        raise UserError(
            f"`{column}` of {source} has {len(values):,} different values in {len(rows):,} rows, which do not "
            "look like classes. For a regression set --regression true; for classes name another --label_column."
        )
    return Labels(classes, several, len(classes.names), by_name=str in kinds or not names)


def _refuse_vectors(splits: dict[str, Dataset], column: str) -> None:
    """Refuse lists with a zero or a one for each class: they would be taken for the classes 0 and 1.

    Raises:
        UserError: All lists of the training split are such, or one names a class twice.
    """
    for place, (source, rows) in enumerate(splits.items()):
        lists = [row for row in rows[column] if isinstance(row, list)]
        widths, values = {len(row) for row in lists}, {one for row in lists for one in row}
        odd: list[list[Any]] = []
        if place == 0 and len(widths) == 1 and min(widths) > 1 and values <= {0, 1}:
            odd = lists
        elif values <= {0, 1, "0", "1"} and not any(isinstance(one, float) for one in values):  # no targets
            odd = [row for row in lists if len(set(row)) < len(row)]
        if odd:
            raise UserError(
                f"`{column}` of {source} holds {shorten(repr(odd[0]))}, which looks like a zero or a one for each "
                "class. Write the labels that apply, such as [0, 2] instead of [1, 0, 1]."
            )


def refuse_codes(rows: Dataset, column: str, source: str) -> None:
    """Refuse classes where numbers are meant: their indices would be taken for the numbers.

    Raises:
        UserError: The column names classes, and not by their indices.
    """
    named = _inner(rows.features[column])
    if isinstance(named, ClassLabel) and not _only_numbers(named.names):
        raise UserError(
            f"`{column}` of {source} holds the classes {listed(named.names)}, but must hold a number per row."
        )


def _check_alike(names: Iterable[str], where: str) -> None:
    """Refuse classes that people cannot tell apart.

    Raises:
        UserError: Two differ only in spaces, or in how Unicode composes a letter.
    """
    seen: dict[str, str] = {}
    for name in sorted(names):
        other = seen.setdefault(" ".join(unicodedata.normalize("NFC", name).split()), name)
        if other != name:
            raise UserError(
                f"{where} has the classes {other!a} and {name!a}, which look alike. Write them in one way, without "
                "spaces around them."
            )


def _inner(feature: Any) -> Any:
    """The feature of one label, also where a row holds a list of them."""
    return getattr(feature, "feature", feature)


def listed(names: Sequence[str]) -> str:
    """The names of classes for a message, without most of them if they are many or long."""
    return ", ".join(map(shorten, names[:12])) + ", ..." * (len(names) > 12)


def _whole(value: Any) -> Any:
    """1.0 as 1; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_missing(text: str) -> bool:
    return text.strip().lower().lstrip("+-") in _MISSING


def _is_number(value: Any) -> bool:
    return _NUMBER.fullmatch(str(value).strip()) is not None


def _distinct(rows: Dataset, column: str, source: str) -> set[Any]:
    """The different labels, those in lists included.

    Raises:
        UserError: A row has none, a number that is not finite, or a text with line breaks or other control characters.
    """
    found = set()
    for row, value in enumerate(rows[column]):
        for item in value if isinstance(value, list) else [value]:
            is_bad = isinstance(item, list | dict | None)
            is_bad = is_bad or (isinstance(item, str) and (not item.strip() or _BREAKS.search(item)))
            if is_bad or (isinstance(item, float) and not math.isfinite(item)):
                raise UserError(
                    f"Row {row} of {source} holds {shorten(repr(item))} in the column `{column}`, which is not a label."
                )
            found.add(item)
    return found


# ---- the labels of a checkpoint ----


@dataclass(frozen=True)
class ClassOrder:
    """How a model numbers the classes of the data.

    Attributes:
        place: index in the model of each class of the data; empty if the two agree, or if there are no classes.
        names: of the model's classes by index; empty for those of the data.
        note: what differs, for people; empty if nothing does.
    """

    place: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    note: str = ""

    def to_model(self, labels: Any) -> np.ndarray:
        """Labels in the model's order, from those of the data: class indices (b,), or a zero or one per class."""
        labels = np.asarray(labels)
        if not self.place:
            return labels
        return labels[:, np.argsort(self.place)] if labels.ndim == 2 else np.array(self.place)[labels]

    def to_data(self, labels: np.ndarray) -> np.ndarray:
        """The inverse of `to_model`."""
        if not self.place:
            return labels
        return labels[:, list(self.place)] if labels.ndim == 2 else np.argsort(self.place)[labels]

    def logits_to_data(self, logits: np.ndarray) -> np.ndarray:
        """Logits (b, classes) in the order of the data."""
        return logits[:, list(self.place)] if self.place else logits


def order_of(config: PreTrainedConfig, labels: Labels, name: str) -> ClassOrder:
    """The order of the classes in a checkpoint, whose names win if it knows the same, or as many where data have none.

    Args:
        config: of the checkpoint.
        labels: of the data.
        name: of the checkpoint, for messages.

    Raises:
        UserError: The checkpoint's `id2label` and `label2id` contradict each other.
    """
    known, names = _names_of(config, name), labels.names
    if not known or known == names:
        return ClassOrder()
    if sorted(known) == sorted(names):
        note = f"Classes are in the order of the checkpoint: {listed(known)}."
        return ClassOrder(tuple(map(known.index, names)), tuple(known), note)
    if names and len(known) == len(names) and _only_numbers(names):
        return ClassOrder((), tuple(known), f"The labels {listed(names)} are the checkpoint's {listed(known)}.")
    mine = f"those of the data are {listed(names)}" if names else "the data hold numbers"
    note = f"The checkpoint's classes are {listed(known)}, but {mine}: what its head has learned changes its meaning."
    return ClassOrder(names=() if names else tuple(f"LABEL_{place}" for place in range(labels.width)), note=note)


def _names_of(config: PreTrainedConfig, name: str) -> list[str]:
    """The names of a checkpoint's classes by index; none if it has transformers' defaults."""
    named = {int(index): str(label) for index, label in (config.id2label or {}).items()}
    numbered = {int(index): str(label) for label, index in (config.label2id or {}).items()}
    given = [names for names in (named, numbered) if set(names.values()) != {f"LABEL_{index}" for index in names}]
    if len(given) == 2 and named != numbered:
        raise UserError(
            f"config.json of {name} contradicts itself: `id2label` is {named}, but `label2id` {config.label2id}. "
            "Correct one of them."
        )
    if not given or sorted(given[0]) != list(range(len(given[0]))):
        return []
    return [given[0][index] for index in range(len(given[0]))]


def _only_numbers(names: Sequence[str]) -> bool:
    """Whether classes are named by their indices alone."""
    return list(names) == [str(index) for index in range(len(names))]
