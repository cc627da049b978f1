"""The order of a run: the block in row `i` and its masks depend on the seed and `i` alone.

Neither the number of processes nor an interruption changes them, so resuming needs no state.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count
from typing import Any

import numpy as np
from torch import Tensor

from data.masking import RowFormat, collate
from data.token_store import TokenStore
from luna_hf.scripting import UserError

# Rows in which the sources of a mixture have exactly their shares.
CYCLE = 1000
# The random streams of a run, which must not repeat each other.
ORDER, PATTERN, MASKS, HELD_OUT_MASKS, SHUFFLE, WINDOWS = range(6)


@dataclass(frozen=True)
class Frame:
    """Makes a row of `size` ids from tokens: `<s> ... </s>`, or `<s> ...` if `last` is None."""

    size: int
    first: int
    last: int | None

    @property
    def room(self) -> int:
        """Tokens between the ends of a full row."""
        return self.size - (1 if self.last is None else 2)

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """A row: int64 [at most size]."""
        return np.concatenate([[self.first], tokens, [] if self.last is None else [self.last]]).astype(np.int64)


@dataclass(frozen=True)
class Blocks:
    """A store cut into rows. Every token is in exactly one; the last row may be shorter.

    Rows cross the borders between documents, which an end token marks.
    """

    store: TokenStore
    frame: Frame

    def __len__(self) -> int:
        return -(-len(self.store.tokens) // self.frame.room)

    def __getitem__(self, index: int) -> np.ndarray:
        """Row `index`: int64 [at most frame.size]."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.frame(self.store.tokens[index * self.frame.room : (index + 1) * self.frame.room])


def quotas(weights: list[float]) -> list[int]:
    """Rows of each source in a cycle; the largest remainders are rounded up.

    Raises:
        UserError: A share is less than one row.
    """
    exact = [weight / sum(weights) * CYCLE for weight in weights]
    rows = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda source: rows[source] - exact[source])
    for source in by_remainder[: CYCLE - sum(rows)]:
        rows[source] += 1
    if 0 in rows:
        source = rows.index(0)
        raise UserError(
            f"`data`: source {source + 1} has a weight of {weights[source]:.2g}, which is less than one row in "
            f"{CYCLE:,}. Raise it, or remove the source."
        )
    return rows


def pattern(rows: list[int], seed: int, cycle: int) -> np.ndarray:
    """The sources of the rows of a cycle, in random order: int64 [CYCLE]."""
    return np.random.default_rng((seed, PATTERN, cycle)).permutation(np.repeat(np.arange(len(rows)), rows))


class Mixture:
    """The order of a run: the source and block of row `i`, for any `i`.

    Every cycle of `CYCLE` rows has the sources in the proportions of their weights, in random order. The blocks of a
    source come in random order, each once an epoch.
    """

    def __init__(self, lengths: list[int], weights: list[float], seed: int) -> None:
        self.lengths, self.seed, self.quotas = lengths, seed, quotas(weights)
        self._sources = lru_cache(1)(partial(pattern, self.quotas, seed))
        self._orders = [lru_cache(1)(partial(self._order, source)) for source in range(len(lengths))]

    def __call__(self, row: int) -> tuple[int, int]:
        """Source and block of a row of the run."""
        cycle, place = divmod(row, CYCLE)
        sources = self._sources(cycle)
        source = int(sources[place])
        before = cycle * self.quotas[source] + int((sources[:place] == source).sum())
        epoch, position = divmod(before, self.lengths[source])
        return source, int(self._orders[source](epoch)[position])

    def _order(self, source: int, epoch: int) -> np.ndarray:
        """The blocks of a source in the order of an epoch: the only thing in memory that grows with the corpus."""
        order = np.arange(self.lengths[source], dtype=np.uint32 if self.lengths[source] < 2**32 else np.uint64)
        np.random.default_rng((self.seed, ORDER, source, epoch)).shuffle(order)
        return order


@dataclass(frozen=True)
class Plan:
    """How the rows of an update are distributed over processes and their micro-batches."""

    micro_batch: int
    accumulation: int
    processes: int
    process_index: int

    def rows(self, update: int) -> list[range]:
        """The rows of the run in each micro-batch of this process."""
        parts = [part * self.processes + self.process_index for part in range(self.accumulation)]
        starts = [(update * self.accumulation * self.processes + part) * self.micro_batch for part in parts]
        return [range(start, start + self.micro_batch) for start in starts]


class Rows(ABC):
    """The rows of a run."""

    def __init__(self, row_format: RowFormat, pad_token_id: int, seed: int) -> None:
        self.format, self.pad_token_id, self.seed = row_format, pad_token_id, seed

    @abstractmethod
    def ids(self, row: int) -> np.ndarray:
        """The token ids of a row of the run: int64 [at most block_size]."""

    def updates(self, plan: Plan, first_update: int = 0) -> Iterator[list[dict[str, Tensor]]]:
        """The micro-batches of this process for every update from `first_update` on, without an end.

        Yields:
            For every update a list of batches, see `collate`.
        """
        for update in count(first_update):
            made = ([self._row(row) for row in rows] for rows in plan.rows(update))
            yield [collate(rows, self.pad_token_id, self.format.separator) for rows in made]

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs besides the number of the update."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restore `state_dict`."""

    def _row(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        return self.format.targets(self.ids(row), np.random.default_rng((self.seed, MASKS, row)))


class TrainingRows(Rows):
    """The rows of a run, read from the blocks of each source in the order of a mixture."""

    def __init__(self, blocks: list[Blocks], mixture: Mixture, row_format: RowFormat, pad_token_id: int) -> None:
        super().__init__(row_format, pad_token_id, mixture.seed)
        self.blocks, self.mixture = blocks, mixture

    def ids(self, row: int) -> np.ndarray:
        """See `Rows`."""
        source, block = self.mixture(row)
        return self.blocks[source][block]
