"""Labelled data from files, folders or the Hub, tokenized for the Trainer."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common.tables import KINDS, ending, read_table, refuse_packed
from datasets import Dataset, load_dataset
from transformers import PreTrainedTokenizerBase

from luna_hf.scripting import UserError, reason

_PART = re.compile(r"-(\d+)-of-(\d+)$")


@dataclass(frozen=True)
class Encoded:
    """Tokenized rows, and how much of them was cut.

    Attributes:
        rows: the model's inputs, `labels` unless the split has none, and `length`: the characters of a row, by which
            batches are grouped. Tokens would give every tokenizer its own order.
        tokens: tokens of all rows, after cutting.
        longest: tokens of the longest row, of all its choices if it has several, as they are padded.
        cut_rows: rows that were cut.
        cut_tokens: tokens that were cut off.
    """

    rows: Dataset
    tokens: int
    longest: int
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


def load_splits(
    name: str,
    config: str | None = None,
    splits: Iterable[str] = ("train", "validation", "test"),
    required: Iterable[Sequence[str]] = (),
    hint: str = "",
) -> dict[str, Dataset]:
    """Load the requested splits that a data set has.

    Args:
        name: a local folder with `<split>.parquet` (or .jsonl, .json, .csv, .tsv; or `<split>-*-of-*.parquet`), itself
            or in `data/`, and in a subfolder per `config` if there are several; or a name on the Hub.
        config: a part of the data set, such as `sst2` of GLUE.
        splits: names to look for.
        required: groups of them, of which the data set must have one each.
        hint: what ends the message about a missing one.

    Raises:
        UserError: The folder or name does not exist, or lacks a required split, or all of them.
    """
    if Path(name).is_file():
        raise UserError(f"{name} is a file; --dataset_name takes a folder with a file per split, or a Hub name.")
    splits = list(splits)
    available: dict[str, Any]
    if Path(name).is_dir():
        available = _split_files(Path(name), config, splits)
    else:
        try:
            available = load_dataset(name, config)
        except Exception as error:
            raise UserError(f"There is neither a folder nor a Hub data set {name!r} ({reason(error)}).") from error
    for group in [splits, *required]:
        if not available.keys() & set(group):
            known = f"it has {', '.join(sorted(available))}" if available else f"it has no {', '.join(KINDS)} files"
            raise UserError(f"{name} has no split {' or '.join(group)}; {known}.{hint}")
    chosen = {split: available[split] for split in splits if split in available}
    return {split: rows if isinstance(rows, Dataset) else read_table(rows) for split, rows in chosen.items()}


def _split_files(folder: Path, config: str | None, splits: Iterable[str]) -> dict[str, list[Path]]:
    """The files of every split, each one file or numbered parts, from the first place that has one of `splits`.

    Raises:
        UserError: A file is compressed, or one of these splits has several files, or lacks a part.
    """
    found: dict[str, list[Path]] = {}
    for place in (base / data for base in (folder / (config or ""), folder) for data in ("", "data")):
        paths, found = sorted(place.glob("*")), {}
        refuse_packed(path for path in paths if _PART.sub("", Path(path.stem).stem) in splits)
        for path in paths:
            if ending(path) in KINDS:
                found.setdefault(_PART.sub("", path.stem), []).append(path)
        if wanted := found.keys() & set(splits):
            for split in wanted:
                _check_parts(split, found[split])
            break
    return found


def _check_parts(split: str, files: list[Path]) -> None:
    """Check that a split is one file, or all parts of one."""
    parts = [(*map(int, part.groups()), ending(file)) for file in files if (part := _PART.search(file.stem))]
    if not parts and len(files) == 1:
        return
    if len(parts) != len(files) or len({part[1:] for part in parts}) > 1:
        names = ", ".join(file.name for file in files)
        raise UserError(f"{files[0].parent} has several files for the split {split}: {names}. Keep one.")
    if missing := set(range(parts[0][1])) - {number for number, *_ in parts}:
        raise UserError(f"{files[0].parent} lacks part {min(missing)} of the split {split} (beside {files[0].name}).")


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
    tokens = np.asarray(encoded["tokens"]).reshape(len(rows), -1)
    longest = int((tokens.max(1) * tokens.shape[1]).max())
    encoded = encoded.remove_columns(["tokens", "lost"])
    return Encoded(encoded, int(tokens.sum()), longest, int((lost > 0).sum()), int(lost.sum()))
