"""Token ids of documents on disk, written once and memory-mapped from then on."""

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common.seal import damage, seal, sync
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from data.corpus import Corpus
from data.sources import Source
from data.tokenizer import borders, encode
from luna_hf.scripting import UserError, reason

# Part of a store's name; raise it when the files change.
_FORMAT = 2
_BUILDING = ".building"  # suffix of an unfinished folder
# Characters of the documents that are tokenized together: enough to keep every core busy, little memory.
_BATCH_CHARACTERS = 2_000_000
# The same if only a limited number of tokens is needed, so that little more is read.
_LIMITED_CHARACTERS = 50_000
Limits = dict[str, int | None]


@dataclass(frozen=True)
class TokenStore:
    """Token ids of documents, concatenated with the end token between documents.

    Attributes:
        tokens: uint16 or uint32 [tokens], memory-mapped.
        counts: int64 [vocabulary], occurrences of each id in the documents.
        documents: number of documents with at least one token.
    """

    tokens: np.ndarray
    counts: np.ndarray
    documents: int

    @property
    def size(self) -> int:
        """Tokens of the documents, without the end tokens between them."""
        return int(self.counts.sum())


class StoreWriter:
    """Writes the files of one `TokenStore`."""

    def __init__(self, folder: Path, name: str, vocabulary: int, last: int) -> None:
        self.folder, self.name, self.last = folder, name, last
        self.documents = self.tokens = 0
        self.dtype = np.dtype(np.uint16 if vocabulary <= 2**16 else np.uint32)
        self.counts = np.zeros(vocabulary, dtype=np.int64)
        self.file = (folder / f"{name}.bin").open("wb")

    def add(self, ids: list[int]) -> None:
        """Append a document, unless it is empty."""
        if not ids:
            return
        separator = [self.last] if self.documents else []
        self.file.write(np.array(separator + ids, dtype=self.dtype).tobytes())
        self.counts += np.bincount(ids, minlength=len(self.counts))
        self.documents += 1
        self.tokens += len(ids)

    def close(self) -> None:
        """Finish, with a description."""
        self.file.close()
        np.save(self.folder / f"{self.name}_counts.npy", self.counts)
        description = {"documents": self.documents, "dtype": self.dtype.name}
        (self.folder / f"{self.name}.json").write_text(json.dumps(description) + "\n", encoding="utf-8")


def open_store(folder: Path, name: str) -> TokenStore:
    """Open a store written by `build_stores`."""
    description = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    file = folder / f"{name}.bin"
    tokens = np.empty(0, np.uint16)  # an empty file cannot be mapped
    if file.stat().st_size:
        tokens = np.memmap(file, dtype=description["dtype"], mode="r")
    return TokenStore(tokens, np.load(folder / f"{name}_counts.npy"), description["documents"])


def store_folder(
    cache_dir: str, source: Source, corpus: Corpus, limits: Limits, tokenizer: PreTrainedTokenizerBase
) -> Path:
    """The folder for `build_stores`; its name changes with the text, its split and the tokenizer."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    rules.update(truncation=None, padding=None)  # left over from the last call, and not used here
    text = [source.identity, source.fingerprint(), corpus.split_rule]
    parts = [_FORMAT, text, limits, rules, borders(tokenizer), len(tokenizer)]
    return Path(cache_dir) / hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]


def remove_damaged(folder: Path) -> None:
    """Remove the folder of `build_stores`, with a message, if its files are not those that were written."""
    if folder.is_dir() and (wrong := damage(folder)):
        print(f"Tokenizing again, since the cache {folder} is damaged: {wrong}.")
        shutil.rmtree(folder)


def build_stores(
    folder: Path, source: Source, corpus: Corpus, limits: Limits, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Tokenize a source into `folder`, which appears at once and complete. An existing folder is kept.

    `corpus` decides which store a document belongs to. `limits` names the stores to write, each with the number of
    tokens that suffices (None for all).

    Raises:
        UserError: The source cannot be read or divided, or the folder cannot be written.
    """
    if folder.is_dir():
        return
    corpus.check_split()
    building = folder.with_name(f"{folder.name}.{platform.node()}.{os.getpid()}{_BUILDING}")
    try:
        remove_abandoned(folder.parent)
        shutil.rmtree(building, ignore_errors=True)  # left by an earlier process with this id
        building.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"`cache_dir` {folder.parent} cannot be written: {error}. Name another folder.") from error
    try:
        writers = {name: StoreWriter(building, name, len(tokenizer), borders(tokenizer)[1]) for name in limits}
        wanted = (document for document in source.stream() if corpus.side_of(document) in writers)
        limited = None not in limits.values()
        with tqdm(desc=f"tokenizing {source.description}"[:60], unit=" tokens", unit_scale=True, leave=False) as bar:
            for batch in document_batches(wanted, _LIMITED_CHARACTERS if limited else _BATCH_CHARACTERS):
                for document, ids in zip(batch, encode(tokenizer, batch), strict=True):
                    writers[corpus.side_of(document)].add(ids)
                    bar.update(len(ids))
                if limited and all(writers[name].tokens >= limit for name, limit in limits.items()):
                    break
        for writer in writers.values():
            writer.close()
        seal(building)
        try:
            building.replace(folder)
            sync(folder.parent)
        except OSError:
            if not folder.is_dir():  # else another process has just written the same
                raise
    except OSError as error:
        raise UserError(f"`cache_dir` {folder.parent} cannot be written: {reason(error)}. Name another.") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def remove_abandoned(cache_dir: Path) -> None:
    """Remove unfinished folders of killed processes of this machine."""
    for path in cache_dir.glob(f"*.{platform.node()}.*{_BUILDING}"):
        process = path.name.removesuffix(_BUILDING).rpartition(".")[2]
        try:
            os.kill(int(process), 0)
        except (ValueError, ProcessLookupError):
            shutil.rmtree(path, ignore_errors=True)
        except PermissionError:  # it is running, for another user
            continue


def document_batches(documents: Iterable[str], characters: int) -> Iterator[list[str]]:
    """Documents in lists of about `characters`, without blank ones."""
    batch, size = [], 0
    for document in documents:
        if not document.strip():
            continue
        batch.append(document)
        size += len(document)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
