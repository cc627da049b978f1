"""Labelled data for the finetuning scripts: files and folders, or a name on the Hub, as `datasets.Dataset`."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet
from datasets import Dataset, load_dataset
from transformers import PreTrainedTokenizerBase

from luna_hf.scripting import UserError

SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".tsv")
_ROWS = 1000  # texts that are tokenized at a time


@dataclass(frozen=True)
class Encoded:
    """Rows for the Trainer, and what was cut from them.

    Attributes:
        rows: the model's inputs, `labels` where there are any, and `length`: the size of a row in characters, by which
            batches are grouped (not in tokens, which every tokenizer counts differently).
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
        return f"{split}: {len(self.rows):,} rows, {self.tokens:,} tokens, at most {max_length:,} a row; {cut}."


def read_file(path: str | Path) -> Dataset:
    """A csv, tsv, jsonl, json (lines, or one list) or parquet file.

    Raises:
        UserError: No such file, another kind of file, or one that cannot be read as what it is called.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"There is no file {path}.")
    try:
        table = _read_table(path)
    except (pyarrow.ArrowException, UnicodeDecodeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} cannot be read as {path.suffix[1:]}: {reason}") from error
    return Dataset(table)


def _read_table(path: Path) -> pyarrow.Table:
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_table(path)
    if path.suffix in (".csv", ".tsv"):
        delimiter = "," if path.suffix == ".csv" else "\t"
        return pyarrow.csv.read_csv(
            path, parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
        )
    if path.suffix == ".json" and path.read_text(encoding="utf-8").lstrip().startswith("["):
        return Dataset.from_json(str(path)).data.table
    if path.suffix in (".json", ".jsonl"):
        return pyarrow.json.read_json(path)
    raise ValueError(f"only {', '.join(SUFFIXES)} can be read")


def load_splits(
    name: str, config: str | None = None, splits: Iterable[str] = ("train", "validation", "test")
) -> dict[str, Dataset]:
    """Those of the splits that a data set has.

    Args:
        name: a local folder with `<split>.parquet` (or .jsonl, .json, .csv, .tsv; also `<split>-*.parquet`, and all of
            them in `data/`), with a subfolder for each `config` if there are several; or a name on the Hub.
        config: a part of the data set, such as `sst2` of GLUE. A folder that holds the splits itself needs none.
        splits: names to look for.

    Raises:
        UserError: No such folder and no such name, or none of the splits in it.
    """
    splits = list(splits)
    folder = Path(name)
    if folder.is_file():
        raise UserError(f"{name} is a file; a data set is a folder with a file for each split, or a name on the Hub.")
    if not folder.is_dir():
        return _from_hub(name, config, splits)
    places = [folder / config, folder / config / "data"] if config else []
    for place in [*places, folder, folder / "data"]:
        found = {split: files for split in splits if (files := split_files(place, split))}
        if found:
            return {split: _concatenated(files) for split, files in found.items()}
    listing = ", ".join(sorted(path.name for path in folder.iterdir())[:12]) or "nothing"
    raise UserError(
        f"The folder {name} has no file for {' or '.join(splits)} ({', '.join(SUFFIXES)}). It holds: {listing}."
    )


def split_files(folder: Path, split: str) -> list[Path]:
    """The files of a split in a folder: one called like it, or the numbered parts that the Hub keeps."""
    for suffix in SUFFIXES:
        whole = folder / f"{split}{suffix}"
        parts = sorted(folder.glob(f"{split}-[0-9]*-of-[0-9]*{suffix}"))
        if whole.is_file() or parts:
            return [whole] if whole.is_file() else parts
    return []


def _concatenated(files: list[Path]) -> Dataset:
    if len(files) == 1:
        return read_file(files[0])
    return Dataset(pyarrow.concat_tables([read_file(path).data.table for path in files]))


def _from_hub(name: str, config: str | None, splits: list[str]) -> dict[str, Dataset]:
    try:
        found = load_dataset(name, config)
    except Exception as error:  # the library raises a dozen types for a name that it cannot find or load
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"There is no data set {name!r}{f' ({config})' if config else ''}: no such folder here, and the Hub gave "
            f"none ({reason})."
        ) from error
    found = {split: found[split] for split in splits if split in found}
    if not found:
        raise UserError(f"The data set {name!r} has none of the splits {', '.join(splits)}.")
    return found


def require_columns(rows: Dataset, columns: Iterable[str], source: str) -> None:
    """Check that columns exist, and that there are rows.

    Raises:
        UserError: One is missing (the message names those that exist), or the split is empty.
    """
    for column in columns:
        if column not in rows.column_names:
            existing = ", ".join(f"`{name}`" for name in rows.column_names)
            raise UserError(f"{source} has no column `{column}`. It has {existing}.")
    if not len(rows):
        raise UserError(f"{source} is empty: it has columns, but no rows.")


def require_text(rows: Dataset, column: str, source: str) -> None:
    """Check that a column holds text and nothing else.

    Raises:
        UserError: Another type, or a row without a value.
    """
    kind = rows.data.table.schema.field(column).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise UserError(f"The column `{column}` of {source} holds {kind}, but must hold text.")
    for row, value in enumerate(rows[column]):
        if value is None:
            raise UserError(f"Row {row} of {source} has no value in the column `{column}`.")


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, first: list[str], second: list[str] | None, max_length: int
) -> tuple[dict[str, list[Any]], int, int, int]:
    """Tokenize texts, or pairs of them, to at most `max_length` tokens; of a pair the longer text is cut first.

    Returns:
        The model's inputs as columns; tokens kept, rows cut, tokens cut.
    """
    columns: dict[str, list[Any]] = {}
    tokens = cut_rows = cut_tokens = 0
    for start in range(0, len(first), _ROWS):
        texts = [part[start : start + _ROWS] for part in (first, second) if part is not None]
        whole = tokenizer(*texts, verbose=False)["input_ids"]
        kept = tokenizer(*texts, truncation="longest_first", max_length=max_length)
        for name, values in kept.items():
            columns.setdefault(name, []).extend(values)
        lengths = [(len(ids), len(short)) for ids, short in zip(whole, kept["input_ids"], strict=True)]
        tokens += sum(short for _, short in lengths)
        cut_rows += sum(short < long for long, short in lengths)
        cut_tokens += sum(long - short for long, short in lengths)
    return columns, tokens, cut_rows, cut_tokens
