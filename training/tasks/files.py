"""Labelled data, read by `datasets.load_dataset` from files, folders or the Hub, and tokenized for the Trainer."""

import glob
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from common.tables import SEPARATORS, check_file, ending, why_unreadable
from datasets import Dataset, load_dataset
from transformers import PreTrainedTokenizerBase

from luna_hf.scripting import UserError, reason
from tasks.labels import shorten

_CSV = ("csv", {"keep_default_na": False})  # a text may be "None" or "NA"
READERS = {
    **{".parquet": ("parquet", {}), ".jsonl": ("json", {}), ".json": ("json", {}), ".csv": _CSV},
    ".tsv": ("csv", {"sep": SEPARATORS[".tsv"], **_CSV[1]}),
}


@dataclass(frozen=True)
class Encoded:
    """Tokenized rows, and how much of them was cut.

    Attributes:
        rows: the model's inputs, `labels` unless the split has none, and `length`: the characters of a row, by which
            batches are grouped. Tokens would give every tokenizer its own order.
        tokens: tokens of all rows, after cutting.
        cut_rows: rows that were cut.
        cut_tokens: tokens that were cut off.
    """

    rows: Dataset
    tokens: int
    cut_rows: int
    cut_tokens: int

    def report(self, split: str, max_length: int) -> str:
        """One sentence on the split."""
        cut = "none was cut"
        if self.cut_rows:
            lost = self.cut_tokens / (self.tokens + self.cut_tokens)
            share = self.cut_rows / len(self.rows)
            cut = f"{self.cut_rows:,} ({share:.1%}) were cut, which lost {self.cut_tokens:,} tokens ({lost:.1%})"
        return f"{split}: {len(self.rows):,} rows, {self.tokens:,} tokens, at most {max_length:,} per input; {cut}."


def read_files(paths: list[Path]) -> Dataset:
    """Read csv, tsv, jsonl, json or parquet files of one kind.

    Raises:
        UserError: A file is missing, of another kind, empty, damaged, not UTF-8, or has a column twice.
    """
    first = paths[0]
    if missing := [path for path in paths if not path.is_file()]:
        raise UserError(f"There is no file {missing[0]}.")
    if ending(first) not in READERS:
        raise UserError(f"{first} is not a {', '.join(READERS)} file.")
    for path in paths:
        check_file(path)
    builder, options = READERS[ending(first)]
    try:
        return load_dataset(builder, data_files=[glob.escape(str(path)) for path in paths], split="train", **options)
    except Exception as error:  # readers raise a dozen types
        raise UserError(f"{first} cannot be read as {ending(first)[1:]}: {why_unreadable(error)}.") from error


def load_splits(
    name: str, config: str | None = None, splits: Iterable[str] = ("train", "validation", "test")
) -> dict[str, Dataset]:
    """Load the requested splits that a data set has.

    Args:
        name: a local folder with `<split>.parquet` (or .jsonl, .json, .csv, .tsv; or `<split>-*-of-*.parquet`), itself
            or in `data/`, and in a subfolder per `config` if there are several; or a name on the Hub.
        config: a part of the data set, such as `sst2` of GLUE.
        splits: names to look for.

    Raises:
        UserError: The folder or name does not exist, or has none of the splits.
    """
    splits, folder = list(splits), Path(name)
    if folder.is_file():
        raise UserError(f"{name} is a file; --dataset_name takes a folder with a file per split, or a Hub name.")
    if not folder.is_dir():
        try:
            found = load_dataset(name, config)
        except Exception as error:
            raise UserError(f"There is neither a folder nor a Hub data set {name!r} ({reason(error)}).") from error
        found = {split: found[split] for split in splits if split in found}
    else:
        for place in _places(folder, config):
            if found := {split: read_files(files) for split in splits if (files := _split_files(place, split))}:
                break
    if not found:
        raise UserError(f"{name} has none of the splits {', '.join(splits)} ({', '.join(READERS)}).")
    return found


def split_names(name: str, config: str | None = None) -> list[str]:
    """All splits of a data set that `load_splits` can load."""
    folder = Path(name)
    if not folder.is_dir():
        return sorted(load_dataset(name, config))
    for place in _places(folder, config):
        if found := {re.sub(r"-\d+-of-\d+$", "", path.stem) for path in place.glob("*") if ending(path) in READERS}:
            return sorted(found)
    return []


def _places(folder: Path, config: str | None) -> list[Path]:
    """Where the files of a data set may be."""
    return [place for own in dict.fromkeys((folder / (config or ""), folder)) for place in (own, own / "data")]


def _split_files(folder: Path, split: str) -> list[Path]:
    """The file named after the split, or its numbered parts."""
    for suffix in READERS:
        wanted = re.compile(rf"{re.escape(split)}(-\d+-of-\d+)?(?i:\{suffix})")
        if files := sorted(path for path in folder.glob("*") if wanted.fullmatch(path.name)):
            return files[:1] if files[0].stem == split else files
    return []


def require_columns(rows: Dataset, columns: Iterable[str], source: str) -> None:
    """Check that columns exist, and that there are rows.

    Raises:
        UserError: A column is missing, or the split is empty.
    """
    for column in columns:
        if column not in rows.column_names:
            raise UserError(f"{source} has no column `{column}`; it has {', '.join(rows.column_names)}.")
    if not len(rows):
        raise UserError(f"{source} is empty: it has columns, but no rows.")


def require_text(rows: Dataset, column: str, source: str) -> None:
    """Check that a column holds a text in every row.

    Raises:
        UserError: It has another type, or a row lacks a value.
    """
    values, is_csv = rows.data.column(column), rows.info.builder_name == "csv"
    is_text = getattr(rows.features[column], "dtype", "") in ("string", "large_string")
    # In a CSV file an empty text is a missing one.
    if is_text and not values.null_count and not (is_csv and pc.any(pc.equal(values, "")).as_py()):
        return
    for row, value in enumerate(rows[column]):
        if value is None or (is_csv and value == ""):
            raise UserError(f"Row {row} of {source} has no value in the column `{column}`.")
        if not isinstance(value, str):
            raise UserError(
                f"Row {row} of {source} holds {shorten(repr(value))} in the column `{column}`, which must hold text."
            )


def tokenize(
    tokenizer: PreTrainedTokenizerBase,
    *texts: list[str],
    max_length: int,
    truncation: str,
    lost: list[int] | None = None,
    **options: Any,
) -> dict[str, list[Any]]:
    """Tokenize texts, or pairs of texts, to at most `max_length` tokens.

    Args:
        tokenizer: the model's.
        texts: one list of texts, or two for pairs.
        max_length: longest input, special tokens included.
        truncation: which text of a pair gives way, in transformers' words (`longest_first`, `only_second`).
        lost: tokens that the texts lost before.
        options: further keywords of the tokenizer.

    Returns:
        The model's inputs, with `tokens` and `lost`: the numbers of tokens kept and cut off.
    """
    whole = tokenizer(*texts, verbose=False, **options)["input_ids"]
    kept = dict(tokenizer(*texts, truncation=truncation, max_length=max_length, **options))
    tokens = [len(ids) for ids in kept["input_ids"]]
    before = lost or [0] * len(tokens)
    lost = [len(ids) - count + cut for ids, count, cut in zip(whole, tokens, before, strict=True)]
    return {**kept, "tokens": tokens, "lost": lost}


def encode_rows(rows: Dataset, encode: Callable[[dict[str, list[Any]]], dict[str, list[Any]]]) -> Encoded:
    """Tokenize a split.

    `encode` makes the columns of `Encoded.rows`, `tokens` and `lost` from a batch of rows. The last two are numbers per
    row, or lists of them.
    """
    memory = {"keep_in_memory": True, "load_from_cache_file": False}
    encoded = rows.map(encode, batched=True, remove_columns=rows.column_names, **memory)
    lost = np.asarray(encoded["lost"]).reshape(len(rows), -1).sum(1)
    tokens = int(np.sum(encoded["tokens"]))
    return Encoded(encoded.remove_columns(["tokens", "lost"]), tokens, int((lost > 0).sum()), int(lost.sum()))
