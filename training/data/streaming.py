"""Rows of corpora that do not fit on the disk: read, tokenized, packed, mixed and shuffled while training.

Every process reads its own part of the documents. The state holds what has been read and not yet given out, so that a
run goes on with exactly the rows that would have come.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.corpus import Corpus
from data.masking import collate
from data.rows import CYCLE, MASKS, SHUFFLE, Plan, Targets, make_row, pattern, quotas
from data.sources import READ_ERRORS, DocumentStream, Source
from data.token_store import encode
from luna_hf.scripting import UserError

# Blocks among which the next one is drawn. A long document fills some tens of them, so that neighbours in a batch come
# from many documents; the blocks are saved with every checkpoint, 2 MB at 512 tokens.
SHUFFLE_BLOCKS = 1000
# Documents that are tokenized at a time.
_DOCUMENTS = 16


@dataclass(frozen=True)
class Reading:
    """What every source of a run is read with.

    Attributes:
        corpus: says which documents are held out, to be passed over.
        tokenizer: with which.
        block_size: tokens a block, with `first` and, if it is closed, `last`.
        first: id that starts a block.
        last: id that stands between documents, and ends a block if it is closed.
        process_index: of this process.
        processes: how many share the documents.
        closed: whether `last` ends every block.
    """

    corpus: Corpus
    tokenizer: PreTrainedTokenizerBase
    block_size: int
    first: int
    last: int
    process_index: int
    processes: int
    closed: bool = True


@dataclass
class SourceReader:
    """Blocks of a source without an end, in an order shuffled within a buffer of `SHUFFLE_BLOCKS`."""

    source: Source
    reading: Reading
    seed: tuple[int, ...]
    epoch: int = 0
    drawn: int = 0
    pending: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))  # read, and not yet in a block
    buffer: np.ndarray | None = None  # [SHUFFLE_BLOCKS, block_size]

    def __post_init__(self) -> None:
        self._found = False  # whether this epoch has given any token
        self._open()

    def draw(self) -> np.ndarray:
        """A block: int64 [block_size]."""
        if self.buffer is None:
            self.buffer = np.stack([self._next_block() for _ in range(SHUFFLE_BLOCKS)])
        place = np.random.default_rng((*self.seed, self.drawn)).integers(len(self.buffer))
        block = self.buffer[place].astype(np.int64)
        self.buffer[place] = self._next_block()
        self.drawn += 1
        return block

    def state_dict(self) -> dict[str, Any]:
        """Position in the source, and what has been read beyond what was drawn."""
        return {
            "stream": self._stream.state_dict(),
            "epoch": self.epoch,
            "drawn": self.drawn,
            "pending": torch.from_numpy(self.pending.copy()),
            "buffer": None if self.buffer is None else torch.from_numpy(self.buffer.copy()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position."""
        self.epoch, self.drawn = state["epoch"], state["drawn"]
        self.pending = state["pending"].numpy().copy()
        self.buffer = None if state["buffer"] is None else state["buffer"].numpy().copy()
        self._found = self.drawn > 0
        self._open(state["stream"])

    def _open(self, state: dict[str, Any] | None = None) -> None:
        self._stream: DocumentStream = self.source.stream(self.reading.process_index, self.reading.processes)
        if state is not None:
            self._stream.load_state_dict(state)
        self._documents = iter(self._stream)

    def _next_block(self) -> np.ndarray:
        """The next block in the order of the text: int32 [block_size]."""
        reading = self.reading
        room = reading.block_size - (2 if reading.closed else 1)
        while len(self.pending) < room:
            self._read()
        inner, self.pending = self.pending[:room], self.pending[room:]
        return make_row(inner, reading.first, reading.last if reading.closed else None).astype(np.int32)

    def _read(self) -> None:
        """Add the tokens of the next documents to `pending`, each closed by an end token."""
        documents = self._next_documents()
        if not documents:
            self._start_again()
            return
        corpus = self.reading.corpus
        documents = [text for text in documents if text.strip() and not corpus.is_held_out(text)]
        pieces = [self.pending]
        for ids in encode(self.reading.tokenizer, documents) if documents else []:
            if ids:
                pieces.append(np.array([*ids, self.reading.last], dtype=np.int32))
                self._found = True
        self.pending = np.concatenate(pieces)

    def _next_documents(self) -> list[str]:
        try:
            return list(islice(self._documents, _DOCUMENTS))
        except UserError:
            raise
        except READ_ERRORS as error:
            raise UserError(f"{self.source.description} cannot be read any further: {error}") from error

    def _start_again(self) -> None:
        """Go to the first document again: the next epoch."""
        if not self._found:
            raise UserError(
                f"{self.source.description} has no text for process {self.reading.process_index + 1} of "
                f"{self.reading.processes}: too few documents, or nearly all are held out (`held_out_fraction`)."
            )
        self.epoch, self._found = self.epoch + 1, False
        self._open()


class StreamingRows:
    """The rows of a run, read from sources while it trains; see `TrainingRows`, which has the same methods.

    The sources of a mixture alternate in the same patterns as there. With another number of processes, other rows
    come: each has its own part of the documents.
    """

    def __init__(self, corpus: Corpus, reading: Reading, targets: Targets, seed: int) -> None:
        self.targets, self.reading, self.seed = targets, reading, seed
        self.quotas = quotas(list(corpus.weights))
        self.readers = [
            SourceReader(source, reading, (seed, SHUFFLE, index, reading.process_index))
            for index, source in enumerate(corpus.sources)
        ]
        self.given = 0  # rows of this process so far
        self._cycle = -1

    def updates(self, plan: Plan, first_update: int = 0) -> Iterator[list[dict[str, Tensor]]]:
        """See `TrainingRows.updates`.

        Raises:
            ValueError: `first_update` is not where the state stands.
            UserError: A source cannot be read, or has no text for this process.
        """
        update = first_update
        if update * plan.accumulation * plan.micro_batch != self.given:
            raise ValueError(f"The stream has given {self.given} rows, which is not where update {update} starts.")
        while True:
            yield [self._batch(rows) for rows in plan.rows(update)]
            update += 1

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on after the last update that was given out."""
        return {"given": self.given, "readers": [reader.state_dict() for reader in self.readers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position of `state_dict`."""
        self.given = state["given"]
        for reader, inner in zip(self.readers, state["readers"], strict=True):
            reader.load_state_dict(inner)

    def _batch(self, rows: range) -> dict[str, Tensor]:
        generators = [np.random.default_rng((self.seed, MASKS, row)) for row in rows]
        rows_made = [self.targets(self._next_row(), generator) for generator in generators]
        return collate(rows_made, self.reading.tokenizer.pad_token_id)

    def _next_row(self) -> np.ndarray:
        cycle, place = divmod(self.given, CYCLE)
        if cycle != self._cycle:
            number = cycle * self.reading.processes + self.reading.process_index
            self._cycle, self._sources = cycle, pattern(self.quotas, self.seed, number)
        self.given += 1
        return self.readers[self._sources[place]].draw()
