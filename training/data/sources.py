"""Sources of documents, and streams of them that resume where they stopped."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from common.tables import not_utf8, why_unreadable
from datasets import IterableDataset
from datasets.distributed import split_dataset_by_node
from datasets.exceptions import DatasetsError
from pyarrow import ArrowException

from luna_hf.scripting import UserError, progress

# Opens a dataset, as often as needed; and the name of its text column.
Part = tuple[Callable[[], IterableDataset], str]


@dataclass
class DocumentStream:
    """Documents in order; the state is the position of the next one.

    Attributes:
        description: for error messages.
        datasets: read one after the other; each has one column, the text.
        current: index of the dataset being read.
        resumed: its loaded position, until a row is read (before that, `datasets` reports the start).
        rows: rows read; `None` if the stream did not begin at the start.
        blank: rows read that have no text.
    """

    description: str
    datasets: list[IterableDataset]
    current: int = 0
    resumed: dict[str, Any] | None = None
    rows: int | None = 0
    blank: int = 0

    def __iter__(self) -> Iterator[str]:
        with reading(self.description):
            while self.current < len(self.datasets):
                for row in self.datasets[self.current]:
                    self.resumed = None
                    ((column, text),) = row.items()
                    if not isinstance(text, str | None):
                        kind = type(text).__name__
                        raise UserError(f"{self.description}: the column {column!r} has {kind}, but must have text.")
                    text = text or ""  # a missing text counts as an empty one
                    if self.rows is not None:
                        self.rows += 1
                        self.blank += not text.strip()
                    yield text
                self.current += 1
        if self.rows and self.blank:
            _progress_once(f"{self.description}: {self.blank:,} of {self.rows:,} rows have no text and are skipped.")

    def state_dict(self) -> dict[str, Any]:
        """The position, as JSON values."""
        ended = self.current == len(self.datasets)
        position = None if ended else self.resumed or self.datasets[self.current].state_dict()
        return {"current": self.current, "position": position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to a position."""
        self.current, self.resumed, self.rows = state["current"], state["position"], None
        if self.resumed:
            self.datasets[self.current].load_state_dict(self.resumed)


@dataclass(frozen=True)
class Source:
    """A sequence of documents that can be read repeatedly, always in the same order.

    Attributes:
        description: for people.
        identity: JSON values that change whenever the documents do.
        parts: datasets, one after the other.
        fingerprint: reads the content of every file, or the version of what is no file, by name.
    """

    description: str
    identity: list[Any]
    parts: tuple[Part, ...]
    fingerprint: Callable[[], dict[str, str]]

    def stream(self, process_index: int = 0, processes: int = 1) -> DocumentStream:
        """The documents of one process; those of all processes together are the source.

        Raises:
            UserError: The source cannot be opened. Iterating raises it for text that cannot be read.
        """
        with reading(self.description):
            datasets = [read().select_columns([column]) for read, column in self.parts]
        if processes == 1:
            return DocumentStream(self.description, datasets)
        # Processes share the files if these divide evenly, and the rows otherwise.
        datasets = [split_dataset_by_node(dataset, process_index, processes) for dataset in datasets]
        return DocumentStream(f"{self.description} (part {process_index + 1} of {processes})", datasets)


@contextmanager
def reading(description: str) -> Iterator[None]:
    """Name what is being read in the errors of `datasets`.

    Raises:
        UserError: Reading fails.
    """
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, LookupError, RuntimeError, ArrowException, DatasetsError, StopIteration) as error:
        raise UserError(f"{description} cannot be read: {why_unreadable(error)}.") from error


def is_hub_name(path: str) -> bool:
    """Whether a path that does not exist can be a name on the Hub, `USER/NAME`."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", path) is not None and not path.startswith(".")


@cache  # a source is read several times
def _progress_once(message: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        progress(message)


def read_text_documents(files: tuple[Path, ...]) -> Iterator[dict[str, str]]:
    """The documents of text files, separated by blank lines as in RoBERTa's training data, one in memory at a time.

    Raises:
        UserError: A file is not UTF-8.
    """
    for path in files:
        lines: list[str] = []
        position = 0
        with path.open("rb") as file:
            for raw in file:
                try:
                    line = raw.decode("utf-8" if position else "utf-8-sig").replace("\r\n", "\n")
                except UnicodeDecodeError as error:
                    raise not_utf8(path, error, position + error.start) from error
                position += len(raw)
                if line.strip():
                    lines.append(line)
                elif lines:
                    yield {"text": "".join(lines).strip("\n")}
                    lines = []
        if lines:
            yield {"text": "".join(lines).strip("\n")}
