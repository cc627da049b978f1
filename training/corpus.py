"""Corpora: what the recipe's `data` names, as a sequence of documents.

A source is `cpython` (the documentation inside every CPython), a local file or folder of .txt, .jsonl, .json, .csv or
.parquet, or a dataset of the Hub. Opening one reads no more than its first document; mistakes are told here.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

from cpython_docs import read_cpython
from datasets import IterableDataset, Value, load_dataset_builder
from datasets.distributed import split_dataset_by_node
from datasets.exceptions import DatasetsError
from pyarrow import ArrowException
from recipe import UserError, did_you_mean

# Endings of files that can be read, and the loader of `datasets` for those that are tables.
_LOADERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
# Names of files or folders that say that a folder is divided into splits.
_SPLITS = {"train", "validation", "valid", "val", "dev", "test"}
_SHARD = re.compile(r"[-_.]?\d+([-_]of[-_]\d+)?$")
_SECTION = {"path", "name", "split", "text_column", "weight"}
# A tokenizer learns its merges from this many characters at most: several times what its counts need to settle.
TOKENIZER_CHARACTERS = 200_000_000


class Source(Protocol):
    """A sequence of documents that can be read again and again, always in the same order."""

    description: str  # what it is, for people
    identity: list[Any]  # changes whenever the documents do; can be written as json

    def stream(self, process_index: int = 0, processes: int = 1) -> "DocumentStream":
        """The documents of one process from the start; those of all processes together are the source."""
        ...


class DocumentStream(Protocol):
    """Documents one after the other; the state tells where the next one is."""

    def __iter__(self) -> Iterator[str]: ...

    def state_dict(self) -> dict[str, Any]:
        """The position, as json can hold it."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position."""
        ...


@dataclass
class CountedStream:
    """Every `processes`-th document of something that can be iterated again; going to a position reads up to it."""

    documents: Any
    process_index: int = 0
    processes: int = 1
    read: int = 0

    def __iter__(self) -> Iterator[str]:
        for document in islice(iter(self.documents), self.read, None):
            index, self.read = self.read, self.read + 1
            if index % self.processes == self.process_index:
                yield document

    def state_dict(self) -> dict[str, Any]:
        """See `DocumentStream`."""
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `DocumentStream`."""
        self.read = state["read"]


@dataclass
class TableStream:
    """A column of a streamed data set of `datasets`, which keeps the position itself (a shard and a row)."""

    dataset: IterableDataset
    column: str

    def __iter__(self) -> Iterator[str]:
        for row in self.dataset:
            yield row[self.column] or ""  # a missing text is an empty one

    def state_dict(self) -> dict[str, Any]:
        """See `DocumentStream`."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `DocumentStream`."""
        self.dataset.load_state_dict(state)


@dataclass
class JoinedStream:
    """Streams one after the other."""

    streams: list[DocumentStream]
    current: int = 0

    def __iter__(self) -> Iterator[str]:
        for index in range(self.current, len(self.streams)):
            self.current = index
            yield from self.streams[index]

    def state_dict(self) -> dict[str, Any]:
        """See `DocumentStream`."""
        return {"current": self.current, "streams": [stream.state_dict() for stream in self.streams]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `DocumentStream`."""
        self.current = state["current"]
        for stream, inner in zip(self.streams, state["streams"], strict=True):
            stream.load_state_dict(inner)


@dataclass(frozen=True)
class ListSource:
    """Documents in memory."""

    documents: list[str]
    description: str
    identity: list[Any]

    def stream(self, process_index: int = 0, processes: int = 1) -> CountedStream:
        """See `Source`."""
        return CountedStream(self.documents, process_index, processes)


@dataclass(frozen=True)
class TextSource:
    """Text files, in which a blank line ends a document, as in the files RoBERTa was trained on."""

    files: tuple[Path, ...]
    description: str

    @property
    def identity(self) -> list[Any]:
        """Path, size and time of every file."""
        return ["text", *map(_file_identity, self.files)]

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(map(read_text_documents, self.files))

    def stream(self, process_index: int = 0, processes: int = 1) -> CountedStream:
        """See `Source`."""
        return CountedStream(self, process_index, processes)


@dataclass(frozen=True)
class TableSource:
    """The text column of jsonl, csv or parquet files, or of a dataset of the Hub, through `datasets`.

    Local files are read where they are. A dataset of the Hub is downloaded once, or streamed.
    """

    builder: Any
    split: str
    column: str
    description: str
    identity: list[Any]
    download: bool = False

    def stream(self, process_index: int = 0, processes: int = 1) -> TableStream:
        """See `Source`."""
        if self.download:
            self.builder.download_and_prepare()
            dataset = self.builder.as_dataset(split=self.split).to_iterable_dataset()
        else:
            dataset = self.builder.as_streaming_dataset(split=self.split)
        dataset = dataset.select_columns([self.column])
        if processes > 1:
            dataset = split_dataset_by_node(dataset, rank=process_index, world_size=processes)
        return TableStream(dataset, self.column)


@dataclass(frozen=True)
class JoinedSource:
    """Several sources, one after the other."""

    sources: tuple[Source, ...]

    @property
    def description(self) -> str:
        """Those of the sources."""
        return "; ".join(source.description for source in self.sources)

    @property
    def identity(self) -> list[Any]:
        """Those of the sources."""
        return ["joined", *(source.identity for source in self.sources)]

    def stream(self, process_index: int = 0, processes: int = 1) -> "JoinedStream":
        """See `Source`."""
        return JoinedStream([source.stream(process_index, processes) for source in self.sources])


@dataclass(frozen=True)
class Corpus:
    """What a run reads: sources with their shares of the rows, and which documents are held out.

    Attributes:
        sources: what to train on.
        weights: share of the rows that each source gives; they sum to 1.
        validation: what to evaluate on; empty if documents of `sources` are held out for it.
        held_out_fraction: share of the documents that is held out if `validation` is empty.
        seed: of the choice of held-out documents.
    """

    sources: tuple[Source, ...]
    weights: tuple[float, ...]
    validation: tuple[Source, ...]
    held_out_fraction: float
    seed: int

    @property
    def description(self) -> str:
        """What is read, in one line."""
        shares = [f"{weight:.1%} " if len(self.sources) > 1 else "" for weight in self.weights]
        return "; ".join(share + source.description for share, source in zip(shares, self.sources, strict=True))

    @property
    def split_rule(self) -> list[Any]:
        """What decides over `is_held_out`, as json can hold it."""
        return [] if self.validation else [self.held_out_fraction, self.seed]

    def is_held_out(self, document: str) -> bool:
        """Whether a document is for evaluation. Its text decides: repeated documents fall to the same side, in any
        order, and whichever process reads them."""
        return not self.validation and document_hash(document, "split", self.seed) < self.held_out_fraction

    def training_documents(self, limit: int = TOKENIZER_CHARACTERS, streaming: bool = False) -> Iterator[str]:
        """Training documents to learn a tokenizer from, at most about `limit` characters by the weights of the sources.

        They are spread over the whole corpus, which is read once; in streaming they are those at the start.
        """
        for source, weight in zip(self.sources, self.weights, strict=True):
            documents = (document for document in source.stream() if not self.is_held_out(document))
            if streaming:
                yield from first_documents(documents, int(limit * weight))
            else:
                yield from spread_documents(documents, int(limit * weight))


def open_corpus(settings: Any) -> Corpus:
    """Find what `data` and `validation` of a recipe name, and look at the first document of each.

    Args:
        settings: with the recipe's `data`, `text_column`, `validation`, `held_out_fraction`, `streaming` and `seed`.

    Raises:
        UserError: Something is not there, cannot be read, has no such split or column, or holds no text.
    """
    sections = settings.data if isinstance(settings.data, list) else [settings.data]
    if not sections:
        raise UserError("`data` is an empty list. Name a file, a folder, a dataset of the Hub, or `cpython`.")
    sections = [_section(entry) for entry in sections]
    weights = _weights(sections, settings.streaming)
    options = {"text_column": settings.text_column, "streaming": settings.streaming}
    sources = [open_source(section, "data", "train", **options) for section in sections]
    validation: list[Source] = []
    if settings.validation and _is_split_name(settings.validation):
        # A split of the same data.
        validation = [
            open_source({**section, "split": settings.validation}, "validation", "", **options) for section in sections
        ]
    elif settings.validation:
        validation = [open_source({"path": settings.validation}, "validation", "validation", **options)]
    if weights is None:  # one after the other, every document once an epoch
        sources, weights = [JoinedSource(tuple(sources))] if len(sources) > 1 else sources, [1.0]
    return Corpus(tuple(sources), tuple(weights), tuple(validation), settings.held_out_fraction, settings.seed)


def open_source(section: dict[str, Any], key: str, default_split: str, text_column: str, streaming: bool) -> Source:
    """The source that a section `{path, name, split, text_column}` names.

    Args:
        section: without `split` it is `default_split`, or all of a folder that is not divided into splits.
        key: the recipe's key, for messages.

    Raises:
        UserError: See `open_corpus`.
    """
    path, column = section["path"], section.get("text_column", text_column)
    if path == "cpython":
        source: Source = ListSource(*read_cpython())
    elif Path(path).exists():
        source = _open_local(Path(path), section.get("split"), default_split, column, key)
    elif _looks_local(path):
        raise UserError(f"`{key}` is {path!r}, but there is no such file or folder. Give one, or `cpython`.")
    else:
        source = _open_hub(path, section.get("name"), section.get("split", default_split), column, key, streaming)
    _look_at_first(source, path, key)
    return source


def document_hash(document: str, purpose: str, seed: int) -> float:
    """A number in [0, 1) that depends on the text, the purpose and the seed, and on nothing else."""
    salt = f"{purpose} {seed}".encode()[:16]
    digest = hashlib.blake2b(document.encode("utf-8", "surrogatepass"), digest_size=8, salt=salt).digest()
    return int.from_bytes(digest, "big") / 2**64


def first_documents(documents: Iterable[str], limit: int) -> Iterator[str]:
    """Documents from the start, until they have `limit` characters."""
    characters = 0
    for document in documents:
        if characters >= limit:
            return
        characters += len(document)
        yield document


def spread_documents(documents: Iterable[str], limit: int) -> list[str]:
    """All documents, or evenly chosen ones with about `limit` characters at most, in memory for no more than that."""
    share, kept, characters = 1.0, [], 0
    for document in documents:
        number = document_hash(document, "tokenizer", 0)
        if number < share:
            kept.append((number, document))
            characters += len(document)
        while characters > limit and len(kept) > 1:
            share /= 2
            kept = [(number, document) for number, document in kept if number < share] or kept[:1]
            characters = sum(len(document) for _, document in kept)
    return [document for _, document in kept]


def read_text_documents(path: Path) -> Iterator[str]:
    """The documents of a text file, which blank lines separate; of the file, one document is in memory.

    Raises:
        UserError: The file is not UTF-8.
    """
    lines: list[str] = []
    position = 0
    with path.open("rb") as file:
        for raw in file:
            try:
                line = raw.decode("utf-8").replace("\r\n", "\n")
            except UnicodeDecodeError as error:
                at = position + error.start
                raise UserError(f"{path.name} is not UTF-8 text ({error.reason} at byte {at}). Convert it.") from error
            position += len(raw)
            if line.strip():
                lines.append(line)
            elif lines:
                yield "".join(lines).strip("\n")
                lines = []
    if lines:
        yield "".join(lines).strip("\n")


def _section(entry: Any) -> dict[str, Any]:
    """An entry of `data` as a section."""
    section = {"path": entry} if isinstance(entry, str) else entry
    if not isinstance(section, dict):
        raise UserError(f"`data` lists {entry!r}, which is neither a name nor a section with a `path`.")
    for key in section:
        if key not in _SECTION:
            raise UserError(f"`data`: unknown key `{key}`.{did_you_mean(key, _SECTION)}")
    if not isinstance(section.get("path"), str) or not section["path"].strip():
        raise UserError(f"`data`: the section {section!r} needs a `path`: a file, a folder or a dataset of the Hub.")
    for key in ("name", "split", "text_column"):
        if key in section and not isinstance(section[key], str):
            raise UserError(f"`data`: `{key}` of {section['path']} is {section[key]!r}, but must be text (in quotes).")
    weight = section.get("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
        raise UserError(f"`data`: `weight` of {section['path']} is {weight!r}, but must be a number above 0.")
    return section


def _weights(sections: list[dict[str, Any]], streaming: bool) -> list[float] | None:
    """Shares of the rows that sum to 1; None if no section has a weight."""
    without = [section["path"] for section in sections if "weight" not in section]
    if len(without) == len(sections):
        return None
    if without:
        raise UserError(f"`data`: give every source a `weight`, or none. Without one: {', '.join(without)}.")
    total = sum(section["weight"] for section in sections)
    return [section["weight"] / total for section in sections]


def _is_split_name(word: str) -> bool:
    return re.fullmatch(r"[A-Za-z]\w*", word) is not None and word != "cpython" and not Path(word).exists()


def _looks_local(path: str) -> bool:
    hub_name = re.fullmatch(r"[\w.-]+/[\w.-]+", path)
    return not hub_name or path.startswith(".") or Path(path).suffix in _LOADERS


def _open_local(path: Path, split: str | None, default_split: str, column: str, key: str) -> Source:
    files = _files_of(path, key)
    loader = _LOADERS[files[0].suffix]
    by_split = {} if path.is_file() else _by_split(path, files)
    if not by_split:  # not divided: what there is, is what was asked for, whatever that is called
        by_split = {split or default_split: files} if split in (None, "train") else {"train": files}
    wanted = split or default_split
    if wanted not in by_split:
        raise UserError(f"{path} (`{key}`) has no split {wanted!r}. Those that exist: {', '.join(sorted(by_split))}.")
    files = by_split[wanted]
    of_split = f", split {wanted}" if len(by_split) > 1 else ""
    kind = "text" if loader == "text" else files[0].suffix[1:]
    description = f"{path.name} ({len(files)} {kind} file{'s' * (len(files) > 1)}{of_split})"
    if loader == "text":
        return TextSource(tuple(files), description)
    identity = [loader, column, *map(_file_identity, files)]
    builder = _builder(f"{path} (`{key}`)", loader, data_files={wanted: [str(file) for file in files]})
    return _table(builder, wanted, column, description, identity, str(path), key)


def _files_of(path: Path, key: str) -> list[Path]:
    """The files below a folder that can be read, all of one kind; or the file itself."""
    known = ", ".join(_LOADERS)
    if path.is_file():
        if path.suffix not in _LOADERS:
            raise UserError(f"{path} (`{key}`) is of no kind that can be read. Endings that can: {known}.")
        return [path]
    files = [file for file in sorted(path.rglob("*")) if file.suffix in _LOADERS and file.is_file()]
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    if not files:
        raise UserError(f"The folder {path} (`{key}`) holds no file that can be read. Endings that can: {known}.")
    suffixes = sorted({file.suffix for file in files})
    if len({_LOADERS[suffix] for suffix in suffixes}) > 1:
        raise UserError(
            f"The folder {path} (`{key}`) mixes files of several kinds: {', '.join(suffixes)}. Name one file, or put "
            "each kind into a folder of its own and list the folders."
        )
    return files


def _by_split(folder: Path, files: list[Path]) -> dict[str, list[Path]]:
    """Files by the split that their names (train.parquet, test-00000-of-00002.csv) or folders (train/0.jsonl) say;
    nothing if no name is that of a split."""
    tops = [file.relative_to(folder).parts[0] for file in files]
    names = [top if top in _SPLITS else _SHARD.sub("", file.stem) for top, file in zip(tops, files, strict=True)]
    if not _SPLITS.intersection(names):
        return {}
    by_split: dict[str, list[Path]] = {}
    for name, file in zip(names, files, strict=True):
        by_split.setdefault(name, []).append(file)
    return by_split


def _open_hub(name: str, config: str | None, split: str, column: str, key: str, streaming: bool) -> Source:
    where = f"`{key}` is {name!r}: there is no such file or folder, and as a dataset of the Hub it"
    builder = _builder(where, name, config)
    description = f"{name}{f' ({config})' if config else ''}, split {split}"
    return _table(builder, split, column, description, None, name, key, download=not streaming)


def _builder(where: str, *arguments: Any, **keywords: Any) -> Any:
    try:
        return load_dataset_builder(*arguments, **keywords)
    except (OSError, ValueError, DatasetsError) as error:
        raise UserError(f"{where} cannot be opened: {error}") from error


def _table(
    builder: Any,
    split: str,
    column: str,
    description: str,
    identity: list[Any] | None,
    path: str,
    key: str,
    download: bool = False,
) -> TableSource:
    """A source of one column, after a look at the names of splits and columns."""
    try:
        features = builder.as_streaming_dataset(split=split)._resolve_features().features
    except (OSError, ValueError, ArrowException, DatasetsError) as error:
        raise UserError(f"{path} (`{key}`), split {split!r}, cannot be read: {error}") from error
    if not features:
        raise UserError(f"{path} (`{key}`): the split {split!r} is empty.")
    if column not in features:
        raise UserError(
            f"{path} (`{key}`) has no column {column!r} (`text_column`). Those that exist: {', '.join(features)}."
        )
    if not isinstance(features[column], Value) or features[column].dtype not in ("string", "large_string"):
        raise UserError(f"The column {column!r} of {path} (`{key}`) is not text: {features[column]}.")
    identity = identity or ["hub", str(builder.cache_dir), split, column]
    return TableSource(builder, split, column, description, identity, download)


def _look_at_first(source: Source, path: str, key: str) -> None:
    """Read up to the first document with text in it."""
    documents = 0
    if isinstance(source, TableSource):
        source = replace(source, download=False)
    try:
        for document in source.stream():
            documents += 1
            if document.strip():
                return
    except UserError:
        raise
    except (OSError, ValueError, ArrowException, DatasetsError) as error:
        raise UserError(f"{path} (`{key}`) cannot be read: {error}") from error
    what = f"{documents:,} documents, all blank" if documents else "it is empty"
    raise UserError(f"{path} (`{key}`) holds no text: {what}.")


def _file_identity(path: Path) -> list[Any]:
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]
