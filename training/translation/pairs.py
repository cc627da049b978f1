"""Parallel text from files or the Hub, its tokens, and batches of about equally many tokens."""

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from common.tables import KINDS, check_file, check_texts, ending, read_lines, read_table, refuse_packed, shorten
from data.sources import is_hub_name
from data.tokenizer import ending as with_end
from data.tokenizer import train_tokenizer
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub.utils import logging
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from luna_hf.scripting import UserError, progress, reason
from luna_hf.simultaneous import ReadAll, WaitK
from translation.recipe import TranslationRecipe

IGNORED = -100
# Batches whose pairs are sorted by length together.
_POOL = 64
_ORDER = 0


@dataclass(frozen=True)
class Pairs:
    """The texts of a split; both lists are equally long."""

    source: list[str]
    target: list[str]
    name: str

    def __len__(self) -> int:
        return len(self.source)

    def digest(self) -> str:
        """A fingerprint of all texts."""
        digest = hashlib.blake2b(digest_size=16)
        for text in (*self.source, *self.target):
            digest.update(f"{len(text)} {text}".encode())
        return digest.hexdigest()


def read_pairs(recipe: TranslationRecipe, split: str) -> Pairs:
    """The pairs of a split, without those that have an empty side, which are counted.

    `data` is a folder with a table for each split (`train.parquet`, `.jsonl`, `.csv` or `.tsv`) or two text files
    (`train.de`, `train.en`), or a name on the Hub; if that has a configuration named like the languages (`de-en`), that
    one. A table has a column of texts for each language, or a column `translation` with both.

    Raises:
        UserError: There is no such folder or name, or no such split, or it lacks a language, or holds other than text.
    """
    folder, languages = Path(recipe.data), (recipe.source_language, recipe.target_language)
    files = [folder / f"{split}.{language}" for language in languages]
    tables = _tables(folder, split) if folder.is_dir() else []
    if tables and (texts := [file for file in files if file.is_file()]):
        raise UserError(f"{folder} has both {texts[0].name} and {tables[0].name} for the split {split}. Remove one.")
    if all(file.is_file() for file in files):
        sides = [_lines(file) for file in files]
        if len(sides[0]) != len(sides[1]):
            raise UserError(f"{files[0]} has {len(sides[0]):,} lines, but {files[1]} has {len(sides[1]):,}.")
    else:
        missing = [file.name for file in files if not file.is_file()]
        table = _table(folder, split, tables, missing) if folder.is_dir() else _hub_table(recipe.data, split, languages)
        sides = _columns(table, languages, f"{recipe.data} ({split})")
    kept = [(a.strip(), b.strip()) for a, b in zip(*sides, strict=True) if a and b and a.strip() and b.strip()]
    if not kept:
        raise UserError(f"{recipe.data} has no pairs in its split {split}.")
    if left_out := len(sides[0]) - len(kept):
        pairs = f"{left_out:,} of {len(sides[0]):,} pairs"
        progress(f"{recipe.data} ({split}): {pairs} have an empty side and are left out.")
    return Pairs([a for a, _ in kept], [b for _, b in kept], split)


def _lines(path: Path) -> list[str]:
    check_file(path)
    return list(read_lines(path))


def _tables(folder: Path, split: str) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.stem == split and ending(file) in KINDS)


def _table(folder: Path, split: str, found: list[Path], missing: list[str]) -> datasets.Dataset:
    """The table of a split, the one in `found`; errors name the text files that are `missing`."""
    refuse_packed(file for file in sorted(folder.iterdir()) if file.name.startswith(f"{split}."))
    if len(found) != 1:
        raise UserError(
            f"{folder} has {len(found) or 'no'} tables for the split {split}, and no {' or '.join(missing)}. It needs "
            f"one of {', '.join(split + suffix for suffix in KINDS)}, or a text file for each language."
        )
    return read_table(found)


def _hub_table(name: str, split: str, languages: tuple[str, str]) -> datasets.Dataset:
    """The table of a split on the Hub, of the configuration with the languages' names (`de-en`) if there is one."""
    advice = "Name a folder with tables or text files, or a data set on the Hub (--data)."
    if Path(name).exists() or not is_hub_name(name):
        raise UserError(f"`data`: there is no folder {name!r}. {advice}")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # each attempt to reach the Hub warns
    try:
        configurations = datasets.get_dataset_config_names(name)
        pairs = ("-".join(languages), "-".join(reversed(languages)))
        return datasets.load_dataset(name, next((pair for pair in pairs if pair in configurations), None), split=split)
    except (ConnectionError, DatasetNotFoundError) as error:
        state = "cannot be reached" if isinstance(error, ConnectionError) else "has no data set of that name"
        raise UserError(f"`data`: there is no folder {name!r}, and the Hub {state}. {advice}") from error
    except Exception as error:  # of `datasets`, for a missing split or a damaged file
        raise UserError(f"The data set {name} on the Hub cannot be read ({reason(error)}).") from error
    finally:
        logging.set_verbosity(verbosity)


def _columns(table: datasets.Dataset, languages: tuple[str, str], name: str) -> list[list[str | None]]:
    columns = {name: table[name] for name in table.column_names}
    if "translation" in columns and not columns.keys() >= {*languages}:
        rows = [row or {} for row in columns["translation"]]
        if odd := [row for row in rows if not isinstance(row, dict)]:
            raise UserError(f"`translation` of {name} holds {shorten(repr(odd[0]))} instead of a text per language.")
        first = next(filter(None, rows), {})
        columns = {language: [row.get(language) for row in rows] for language in first}
    if missing := [language for language in languages if language not in columns]:
        raise UserError(f"{name} has the columns {', '.join(columns) or 'none'}, but not {', '.join(missing)}.")
    sides = [list(columns[language]) for language in languages]
    for language, texts in zip(languages, sides, strict=True):
        check_texts(texts, language, name, missing=True)
    return sides


def joint_tokenizer(pairs: Pairs, vocab_size: int, longest: int) -> PreTrainedTokenizerBase:
    """One byte-level BPE for both languages; a text is its tokens and `</s>`."""
    return with_end(train_tokenizer((*pairs.source, *pairs.target), vocab_size, longest))


@dataclass(frozen=True)
class EncodedPairs:
    """Token ids of pairs, each ending with the end token; how many were too long, and how many sources were cut."""

    source: list[np.ndarray]
    target: list[np.ndarray]
    left_out: int
    cut: int = 0

    @property
    def lengths(self) -> np.ndarray:
        """The longer side of each pair: int64 [pairs]."""
        return np.array([max(len(a), len(b)) for a, b in zip(self.source, self.target, strict=True)])

    def batch(
        self,
        rows: np.ndarray,
        pad: int,
        start: int,
        widths: tuple[int | None, int | None] = (None, None),
        wait: int | None = None,
    ) -> dict[str, Tensor]:
        """A padded batch of rows, with the `widths` of source and target, or as long as the longest of each.

        Returns:
            `input_ids`, `attention_mask`, `decoder_input_ids` (the labels behind `start`) and `labels`, int64 each; and
            `visible_source` of wait-k, or of reading all with k = 0, unless `wait` is `None`.
        """
        source, target = [self.source[row] for row in rows], [self.target[row] for row in rows]
        shifted = [np.concatenate([[start], ids[:-1]]) for ids in target]
        batch = {
            "input_ids": _pad(source, pad, widths[0]),
            "attention_mask": _pad([np.ones_like(ids) for ids in source], 0, widths[0]),
            "decoder_input_ids": _pad(shifted, pad, widths[1]),
            "labels": _pad(target, IGNORED, widths[1]),
        }
        if wait is not None:
            policy, lengths = WaitK(wait) if wait else ReadAll(), batch["attention_mask"].sum(1)
            batch["visible_source"] = policy.visible(lengths, batch["labels"].shape[1])
        return batch


def _pad(rows: list[np.ndarray], value: int, width: int | None) -> Tensor:
    padded = np.full((len(rows), width or max(map(len, rows))), value, dtype=np.int64)
    for place, ids in enumerate(rows):
        padded[place, : len(ids)] = ids
    return torch.from_numpy(padded)


def encode_pairs(
    pairs: Pairs, tokenizer: PreTrainedTokenizerBase, longest: int, leave_out: bool, cut: bool = False
) -> EncodedPairs:
    """Encode pairs; those with a side of more than `longest` tokens are left out, or an error.

    With `cut`, sources of more tokens keep the first ones and the end.

    Raises:
        UserError: A pair is too long and may not be left out, or nothing remains.
    """
    sides = [encode(texts, tokenizer) for texts in (pairs.source, pairs.target)]
    number = sum(len(ids) > longest for ids in sides[0]) if cut else 0
    sides[0] = cut_to(sides[0], longest) if cut else sides[0]
    fits = [max(len(a), len(b)) <= longest for a, b in zip(*sides, strict=True)]
    if not leave_out and not all(fits):
        raise UserError(
            f"{fits.count(False):,} pairs of the split {pairs.name} have more than `max_length` ({longest}) tokens. "
            "Raise it, since none may be left out of an evaluation."
        )
    if not any(fits):
        raise UserError(f"Every pair of the split {pairs.name} has more than `max_length` ({longest}) tokens.")
    source, target = ([ids for ids, kept in zip(side, fits, strict=True) if kept] for side in sides)
    return EncodedPairs(source, target, fits.count(False), number)


def cut_to(rows: list[np.ndarray], longest: int) -> list[np.ndarray]:
    """Rows of at most `longest` ids: the first ones, and the end token."""
    return [ids if len(ids) <= longest else np.concatenate([ids[: longest - 1], ids[-1:]]) for ids in rows]


def check_sources(pairs: Pairs, tokenizer: PreTrainedTokenizerBase, longest: float) -> None:
    """Check before training that a model of `longest` source tokens can translate every pair.

    Raises:
        UserError: A source is longer.
    """
    if (found := max(map(len, encode(pairs.source, tokenizer)))) > longest:
        raise UserError(
            f"A source of the split {pairs.name} has {found:,} tokens, but the model takes at most {longest}. Raise "
            "`max_position_embeddings`, or remove it."
        )


def encode(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    """Token ids of texts by a tokenizer that ends them: int64 [length]. A literal "</s>" in a text is text."""
    ids = tokenizer(texts, split_special_tokens=True, truncation=False, verbose=False)["input_ids"]
    return [np.array(row, dtype=np.int64) for row in ids]


def epoch_batches(lengths: np.ndarray, tokens: int, seed: int, epoch: int) -> list[np.ndarray]:
    """The batches of an epoch in random order: pairs of similar length, at most `tokens` a side with padding.

    They depend on the lengths, the seed and the epoch alone.
    """
    generator = np.random.default_rng((seed, _ORDER, epoch))
    order = generator.permutation(len(lengths))
    pool = max(_POOL * tokens // int(lengths.mean()), 1)
    batches = []
    for first in range(0, len(order), pool):
        part = order[first : first + pool]
        part = part[np.argsort(lengths[part], kind="stable")]
        begin = 0
        for place in range(len(part)):
            if (place + 1 - begin) * lengths[part[place]] > tokens:
                batches.append(part[begin:place])
                begin = place
        batches.append(part[begin:])
    return [batches[place] for place in generator.permutation(len(batches))]


@dataclass(frozen=True)
class Order:
    """Which batches a process gets."""

    tokens: int
    accumulation: int
    processes: int
    index: int
    seed: int


def updates(
    pairs: EncodedPairs, order: Order, pad: int, start: int, first_update: int = 0, waits: Sequence[int] = ()
) -> Iterator[list[dict[str, Tensor]]]:
    """The batches of this process for every update from `first_update` on, without an end; resuming needs no state.

    Args:
        waits: each batch draws one of them, see `EncodedPairs.batch`.
    """
    lengths = pairs.lengths

    def rows() -> Iterator[np.ndarray]:
        for epoch in count():
            yield from epoch_batches(lengths, order.tokens, order.seed, epoch)

    batches, group = rows(), order.accumulation * order.processes
    for update in count():
        mine: list[Any] = [next(batches) for _ in range(group)][order.index :: order.processes]
        if update >= first_update:
            drawn = random.Random(f"{order.seed} {update} {order.index}")
            yield [pairs.batch(part, pad, start, wait=drawn.choice(waits) if waits else None) for part in mine]
