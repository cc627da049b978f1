"""Rows of corpora that do not fit on the disk: read, tokenized, packed, mixed and shuffled during training.

Every process reads its own part of the documents. The state holds what has been read but not yet used, so a resumed
run continues with exactly the rows that would have come.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.corpus import Corpus
from data.masking import RowFormat
from data.rows import CYCLE, SHUFFLE, Frame, Plan, Rows, pattern, quotas
from data.sources import DocumentStream
from data.tokenizer import borders, encode
from luna_hf.scripting import UserError

# Blocks that the next one is drawn from. A long document fills some tens of them, so neighbours in a batch come from
# many documents. Every checkpoint holds them: 2 MB at 512 tokens.
SHUFFLE_BLOCKS = 1000
# Documents that are tokenized at a time.
_DOCUMENTS = 16


@dataclass
class SourceReader:
    """The blocks of a source, epoch after epoch, shuffled within a buffer of `SHUFFLE_BLOCKS`.

    Attributes:
        open: the documents from the start.
        tokenize: documents to token ids, each document closed by an end token.
        frame: tokens to rows.
        seed: of the shuffling.
        drawn: blocks drawn so far.
        pending: int32 [tokens], read but not yet in a block.
        buffer: int32 [SHUFFLE_BLOCKS, frame.size], read but not yet drawn.
    """

    open: Callable[[], DocumentStream]
    tokenize: Callable[[list[str]], list[list[int]]]
    frame: Frame
    seed: tuple[int, ...]
    drawn: int = 0
    pending: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    buffer: np.ndarray | None = None

    def __post_init__(self) -> None:
        self._found = False  # whether this epoch has had any token
        self._open()

    def draw(self) -> np.ndarray:
        """A block: int64 [frame.size]."""
        if self.buffer is None:
            self.buffer = np.stack([self.next_block() for _ in range(SHUFFLE_BLOCKS)])
        place = np.random.default_rng((*self.seed, self.drawn)).integers(len(self.buffer))
        block = self.buffer[place].astype(np.int64)
        self.buffer[place] = self.next_block()
        self.drawn += 1
        return block

    def next_block(self) -> np.ndarray:
        """The next block in the order of the text: int32 [frame.size]."""
        while len(self.pending) < self.frame.room:
            documents = list(islice(self._documents, _DOCUMENTS))
            if not documents:
                if not self._found:
                    raise UserError(
                        f"{self._stream.description} has no text to train on: too few documents, or nearly all are "
                        "held out (`held_out_fraction`)."
                    )
                self._found = False  # the next epoch starts
                self._open()
            pieces = [np.array(ids, dtype=np.int32) for ids in self.tokenize(documents)]
            self._found |= bool(pieces)
            self.pending = np.concatenate([self.pending, *pieces])
        tokens, self.pending = self.pending[: self.frame.room], self.pending[self.frame.room :]
        return self.frame(tokens).astype(np.int32)

    def state_dict(self) -> dict[str, Any]:
        """The position in the source, and what has been read beyond the blocks drawn."""
        return {
            "stream": self._stream.state_dict(),
            "drawn": self.drawn,
            "pending": torch.from_numpy(self.pending.copy()),
            "buffer": None if self.buffer is None else torch.from_numpy(self.buffer.copy()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.drawn, self.pending = state["drawn"], state["pending"].numpy().copy()
        self.buffer = None if state["buffer"] is None else state["buffer"].numpy().copy()
        self._found = self.drawn > 0
        self._open(state["stream"])

    def _open(self, state: dict[str, Any] | None = None) -> None:
        self._stream = self.open()
        if state is not None:
            self._stream.load_state_dict(state)
        self._documents = iter(self._stream)


class StreamingRows(Rows):
    """The rows of a run, read from the sources during training.

    The sources alternate as in a `Mixture`. Another number of processes gives other rows, as each process reads its
    own part of the documents.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: PreTrainedTokenizerBase,
        frame: Frame,
        row_format: RowFormat,
        seed: int,
        process_index: int,
        processes: int,
    ) -> None:
        super().__init__(row_format, tokenizer.pad_token_id, seed)
        end = borders(tokenizer)[1]

        def tokenize(documents: list[str]) -> list[list[int]]:
            kept = [text for text in documents if text.strip() and not corpus.is_held_out(text)]
            return [[*ids, end] for ids in encode(tokenizer, kept) if ids] if kept else []

        self.readers = [
            SourceReader(
                partial(source.stream, process_index, processes), tokenize, frame, (seed, SHUFFLE, index, process_index)
            )
            for index, source in enumerate(corpus.sources)
        ]
        self.given = 0  # rows of this process so far
        rows = quotas(list(corpus.weights))
        self._sources = lru_cache(1)(lambda cycle: pattern(rows, seed, cycle * processes + process_index))

    def ids(self, row: int) -> np.ndarray:
        """The next row of this process, from the source that is due."""
        cycle, place = divmod(self.given, CYCLE)
        self.given += 1
        return self.readers[self._sources(cycle)[place]].draw()

    def updates(self, plan: Plan, first_update: int = 0) -> Iterator[list[dict[str, Tensor]]]:
        """See `Rows.updates`.

        Raises:
            ValueError: The state is not at `first_update`.
            UserError: A source cannot be read, or has no text for this process.
        """
        if first_update * plan.accumulation * plan.micro_batch != self.given:
            raise ValueError(f"The stream is at row {self.given}, which is not where update {first_update} starts.")
        return super().updates(plan, first_update)

    def state_dict(self) -> dict[str, Any]:
        """See `Rows`: everything read so far, but not used."""
        return {"given": self.given, "readers": [reader.state_dict() for reader in self.readers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Rows`."""
        self.given = state["given"]
        for reader, inner in zip(self.readers, state["readers"], strict=True):
            reader.load_state_dict(inner)
