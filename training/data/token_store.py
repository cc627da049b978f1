"""Documents to token ids on disk, written once and mapped into memory from then on."""

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from data.sources import Source, readable
from luna_hf.scripting import UserError

# Part of the name of a token store: raised when its files change.
_FORMAT = 1
_BUILDING = ".building"  # ending of a folder that is being written
# Documents are tokenized together up to this many characters: enough to keep every core busy, little memory.
_BATCH_CHARACTERS = 2_000_000
# The same where only so many tokens are wanted: little more is read than that.
_LIMITED_CHARACTERS = 50_000


def encode(tokenizer: PreTrainedTokenizerBase, documents: list[str]) -> list[list[int]]:
    """Token ids of every document, whole and without special tokens; a "<s>" that stands in the text is text."""
    encoded = tokenizer(
        documents,
        add_special_tokens=False,
        split_special_tokens=True,
        truncation=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    return encoded["input_ids"]


def borders(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """The ids that start and end a row: `<s>` and `</s>`, or `[CLS]` and `[SEP]`.

    Raises:
        UserError: The tokenizer has neither, or no padding token.
    """
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.cls_token_id
    last = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    if first is None or last is None or tokenizer.pad_token_id is None:
        raise UserError(
            "The tokenizer lacks tokens that rows need: one to start with (bos or cls), one to end with (eos or sep) "
            "and one to pad with. Use another, or train one."
        )
    return first, last


@dataclass(frozen=True)
class TokenStore:
    """Token ids of documents on disk, in a row, with the end token between documents.

    Attributes:
        tokens: uint16 or uint32 [tokens], mapped into memory.
        counts: int64 [vocabulary], how often each id occurs in the documents.
        documents: number of documents that have tokens.
    """

    tokens: np.ndarray
    counts: np.ndarray
    documents: int


class StoreWriter:
    """Writes the files of one `TokenStore`."""

    def __init__(self, folder: Path, name: str, vocabulary: int, last: int) -> None:
        self.folder, self.name, self.last = folder, name, last
        self.documents = self.tokens = 0
        self.dtype = np.dtype(np.uint16 if vocabulary <= 2**16 else np.uint32)
        self.counts = np.zeros(vocabulary, dtype=np.int64)
        self.file = (folder / f"{name}.bin").open("wb")

    def add(self, ids: list[int]) -> None:
        """Append a document; an empty one leaves no trace."""
        if not ids:
            return
        if self.documents:
            self.file.write(np.array([self.last], dtype=self.dtype).tobytes())
        array = np.array(ids, dtype=self.dtype)
        self.file.write(array.tobytes())
        self.counts += np.bincount(array, minlength=len(self.counts))
        self.documents += 1
        self.tokens += len(ids)

    def close(self) -> None:
        """Finish; the description is written last."""
        self.file.close()
        np.save(self.folder / f"{self.name}_counts.npy", self.counts)
        description = {"documents": self.documents, "dtype": self.dtype.name}
        (self.folder / f"{self.name}.json").write_text(json.dumps(description) + "\n", encoding="utf-8")


def open_store(folder: Path, name: str) -> TokenStore:
    """Open a store that `build_stores` has written."""
    description = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    file = folder / f"{name}.bin"
    tokens = np.empty(0, np.uint16)  # an empty file cannot be mapped
    if file.stat().st_size:
        tokens = np.memmap(file, dtype=description["dtype"], mode="r")
    return TokenStore(tokens, np.load(folder / f"{name}_counts.npy"), description["documents"])


def tokens_of(store: TokenStore) -> int:
    """Tokens of the documents, without those between them."""
    return int(store.counts.sum())


def store_folder(
    cache_dir: str,
    source: Source,
    split_rule: list[Any],
    limits: dict[str, int | None],
    tokenizer: PreTrainedTokenizerBase,
) -> Path:
    """Where the stores of `build_stores` are kept: a name that changes with the text, its split and the tokenizer."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    rules.update(truncation=None, padding=None)  # of the last call, and not used here
    parts = [_FORMAT, source.identity, split_rule, limits, rules, borders(tokenizer), len(tokenizer)]
    return Path(cache_dir) / hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]


def build_stores(
    folder: Path,
    source: Source,
    side_of: Callable[[str], str],
    limits: dict[str, int | None],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Tokenize a source into `folder`, which appears at once and complete; nothing to do if it is there.

    Args:
        folder: see `store_folder`.
        source: what to read.
        side_of: name of the store that a document belongs to.
        limits: the stores to write, with the number of tokens that is enough for each (None: all there are).
        tokenizer: with which.

    Raises:
        UserError: Reading fails, or the folder cannot be written.
    """
    if folder.is_dir():
        return
    building = folder.with_name(f"{folder.name}.{platform.node()}.{os.getpid()}{_BUILDING}")
    try:
        remove_abandoned(folder.parent)
        shutil.rmtree(building, ignore_errors=True)  # of an earlier process with this number
        building.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"`cache_dir` {folder.parent} cannot be written: {error}. Name another folder.") from error
    try:
        _write_stores(building, source, side_of, limits, tokenizer)
        try:
            building.replace(folder)
        except OSError:
            if not folder.is_dir():  # another process was first, with the same content
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def remove_abandoned(cache_dir: Path) -> None:
    """Remove what processes of this machine that were killed in `build_stores` have left."""
    for path in cache_dir.glob(f"*.{platform.node()}.*{_BUILDING}"):
        process = path.name.removesuffix(_BUILDING).rpartition(".")[2]
        try:
            os.kill(int(process), 0)
        except (ValueError, ProcessLookupError):
            shutil.rmtree(path, ignore_errors=True)
        except PermissionError:  # it runs, for another user
            continue


def _write_stores(
    folder: Path,
    source: Source,
    side_of: Callable[[str], str],
    limits: dict[str, int | None],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    writers = {name: StoreWriter(folder, name, len(tokenizer), borders(tokenizer)[1]) for name in limits}
    with tqdm(desc=f"tokenizing {source.description}"[:60], unit=" tokens", unit_scale=True, leave=False) as bar:
        documents = ((side_of(text), text) for text in readable(source))
        wanted = ((side, text) for side, text in documents if side in writers)
        limited = all(limit is not None for limit in limits.values())
        for batch in document_batches(wanted, _LIMITED_CHARACTERS if limited else _BATCH_CHARACTERS):
            for (side, _), ids in zip(batch, encode(tokenizer, [text for _, text in batch]), strict=True):
                writers[side].add(ids)
                bar.update(len(ids))
            if limited and all(writers[name].tokens >= limit for name, limit in limits.items()):
                break
    for writer in writers.values():
        writer.close()


def document_batches(documents: Iterable[tuple[str, str]], characters: int) -> Iterator[list[tuple[str, str]]]:
    """Pairs of a name and a document, without blank documents, in lists of about `characters`."""
    batch, size = [], 0
    for name, document in documents:
        if not document.strip():
            continue
        batch.append((name, document))
        size += len(document)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
