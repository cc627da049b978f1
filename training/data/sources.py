"""Sources of documents, and streams of them that can go on where they stood."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

import pyarrow.parquet as pq
from datasets import Features, IterableDataset
from datasets.distributed import split_dataset_by_node
from datasets.exceptions import DatasetsError
from pyarrow import ArrowException

from luna_hf.scripting import UserError

# What reading a file or a dataset raises when something is wrong with it.
READ_ERRORS = (OSError, ValueError, ArrowException, DatasetsError)

_PARQUET_ROWS = 256  # texts in memory at a time


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
        return ["text", *map(file_identity, self.files)]

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(map(read_text_documents, self.files))

    def stream(self, process_index: int = 0, processes: int = 1) -> CountedStream:
        """See `Source`."""
        return CountedStream(self, process_index, processes)


@dataclass(frozen=True)
class ParquetSource:
    """A column of local parquet files, read where they are.

    The reader of `datasets` is not used for them: its threads may end a process that exits with an abort.
    """

    files: tuple[Path, ...]
    column: str
    description: str

    @property
    def identity(self) -> list[Any]:
        """Column, and path, size and time of every file."""
        return ["parquet", self.column, *map(file_identity, self.files)]

    def __iter__(self) -> Iterator[str]:
        for file in self.files:
            with pq.ParquetFile(file, memory_map=True) as table:
                for batch in table.iter_batches(_PARQUET_ROWS, columns=[self.column]):
                    yield from (text or "" for text in batch.column(0).to_pylist())

    def stream(self, process_index: int = 0, processes: int = 1) -> CountedStream:
        """See `Source`."""
        return CountedStream(self, process_index, processes)


@dataclass(frozen=True)
class TableSource:
    """A column of jsonl or csv files, or of a dataset of the Hub, through `datasets`.

    Attributes:
        builder: of `datasets`.
        split: of the builder.
        column: with the texts.
        description: see `Source`.
        identity: see `Source`.
        download: get the whole dataset first (once; it stays in the cache of `datasets`).
    """

    builder: Any
    split: str
    column: str
    description: str
    identity: list[Any]
    download: bool = False

    def is_present(self) -> bool:
        """Whether the dataset is in the cache, so that nothing needs to be fetched."""
        return self.download and Path(self.builder.cache_dir).is_dir()

    def features(self) -> Features | None:
        """Names and types of the columns; nothing is downloaded for it but the first rows."""
        if self.is_present():
            return self.builder.as_dataset(split=self.split).features
        return self.builder.as_streaming_dataset(split=self.split)._resolve_features().features

    def stream(self, process_index: int = 0, processes: int = 1) -> TableStream:
        """See `Source`."""
        if self.download:
            self.builder.download_and_prepare()
            dataset = self.builder.as_dataset(split=self.split).to_iterable_dataset()
        else:
            dataset = self.builder.as_streaming_dataset(split=self.split)
        dataset = dataset.select_columns([self.column])
        if processes > 1:  # files are shared out if they divide evenly, else rows
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


def readable(source: Source) -> Iterator[str]:
    """All documents of a source.

    Raises:
        UserError: Reading failed.
    """
    documents = None
    while True:
        try:
            documents = documents or iter(source.stream())
            document = next(documents, None)
        except UserError:
            raise
        except READ_ERRORS as error:
            raise UserError(f"{source.description} cannot be read: {error}") from error
        if document is None:
            return
        yield document


def file_identity(path: Path) -> list[Any]:
    """What changes when a file does: path, size and time."""
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]
