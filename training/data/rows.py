"""The order of a run: which block row `i` is, and what it is to predict, as functions of the seed and `i` alone.

Neither the number of processes nor an interruption changes them, so a run that is resumed needs no state from here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from data.masking import collate
from data.token_store import TokenStore
from luna_hf.scripting import UserError

# Rows over which the sources of a mixture get exactly their shares.
CYCLE = 1000
# Names of the random streams of a run, which must not repeat each other.
ORDER, PATTERN, MASKS, HELD_OUT_MASKS, SHUFFLE = range(5)
# From a row's ids, int64 [length], and a generator to its input ids and labels: `Masking`, or `next_tokens`.
Targets = Callable[[np.ndarray, np.random.Generator], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class RowFormat:
    """What a row predicts, and whether an end token closes it, wherever the text is cut."""

    targets: Targets
    closed: bool


def make_row(inner: np.ndarray, first: int, last: int | None) -> np.ndarray:
    """`<s> ... </s>`, or without an end token where `last` is `None`: int64 [length]."""
    ends = [] if last is None else [last]
    return np.concatenate([[first], inner, ends]).astype(np.int64)


@dataclass(frozen=True)
class Blocks:
    """A store cut into rows `<s> ... </s>` of `block_size` tokens, or `<s> ...` if `last` is `None`; the last row
    may be shorter.

    Rows cross the borders between documents, which an end token marks. Every token is in exactly one row.
    """

    store: TokenStore
    block_size: int
    first: int
    last: int | None

    def __len__(self) -> int:
        return -(-len(self.store.tokens) // self._room)

    def __getitem__(self, index: int) -> np.ndarray:
        """Row `index`: int64 [at most block_size]."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        inner = self.store.tokens[index * self._room : (index + 1) * self._room]
        return make_row(inner, self.first, self.last)

    @property
    def _room(self) -> int:
        return self.block_size - (1 if self.last is None else 2)


def quotas(weights: list[float]) -> list[int]:
    """Rows that each source gives to a cycle: the largest remainders of its share are rounded up.

    Raises:
        UserError: A share is too small for a single row.
    """
    exact = [weight / sum(weights) * CYCLE for weight in weights]
    rows = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda source: rows[source] - exact[source])
    for source in by_remainder[: CYCLE - sum(rows)]:
        rows[source] += 1
    if 0 in rows:
        raise UserError(
            f"`data`: source {rows.index(0) + 1} has a weight of {weights[rows.index(0)]:.2g} of all, which is less "
            f"than one row of {CYCLE:,}. Raise it, or leave the source out."
        )
    return rows


@dataclass
class Mixture:
    """The order of a run: row `i` to a source and a block of it, for any `i`, without an end.

    Every cycle of `CYCLE` rows holds each source as often as its weight says, in a random pattern. A source gives its
    blocks in a random order, each once before any comes again.
    """

    lengths: list[int]
    weights: list[float]
    seed: int
    _pattern: tuple[int, Any, Any] | None = field(default=None, repr=False)
    _orders: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.quotas = quotas(self.weights)

    def __call__(self, row: int) -> tuple[int, int]:
        """Source and block of a row of the run."""
        cycle, place = divmod(row, CYCLE)
        sources, ranks = self._cycle(cycle)
        source = int(sources[place])
        epoch, position = divmod(cycle * self.quotas[source] + int(ranks[place]), self.lengths[source])
        return source, int(self._order(source, epoch)[position])

    def _cycle(self, cycle: int) -> tuple[np.ndarray, np.ndarray]:
        """Source of each row of a cycle, and how many of the same came before in it."""
        if self._pattern is None or self._pattern[0] != cycle:
            sources = pattern(self.quotas, self.seed, cycle)
            ranks = np.empty(CYCLE, dtype=np.int64)
            for source, quota in enumerate(self.quotas):
                ranks[sources == source] = np.arange(quota)
            self._pattern = cycle, sources, ranks
        return self._pattern[1:]

    def _order(self, source: int, epoch: int) -> np.ndarray:
        """The blocks of a source in the order of an epoch: the only thing in memory that grows with the corpus."""
        if self._orders.get(source, (None,))[0] != epoch:
            generator = np.random.default_rng((self.seed, ORDER, source, epoch))
            order = np.arange(self.lengths[source], dtype=np.uint32 if self.lengths[source] < 2**32 else np.uint64)
            generator.shuffle(order)
            self._orders[source] = epoch, order
        return self._orders[source][1]


def pattern(rows: list[int], seed: int, cycle: int) -> np.ndarray:
    """The sources of the rows of a cycle in a random order: int64 [CYCLE]."""
    return np.random.default_rng((seed, PATTERN, cycle)).permutation(np.repeat(np.arange(len(rows)), rows))


@dataclass(frozen=True)
class Plan:
    """How the rows of an update are dealt out to processes and their micro-batches."""

    micro_batch: int
    accumulation: int
    processes: int
    process_index: int

    @property
    def rows_per_update(self) -> int:
        """Rows of all processes."""
        return self.micro_batch * self.accumulation * self.processes

    def rows(self, update: int) -> list[range]:
        """The rows of the run in each micro-batch of this process."""
        parts = [part * self.processes + self.process_index for part in range(self.accumulation)]
        starts = [update * self.rows_per_update + part * self.micro_batch for part in parts]
        return [range(start, start + self.micro_batch) for start in starts]


@dataclass
class TrainingRows:
    """The rows of a run, read from token stores.

    Attributes:
        blocks: those of each source.
        mixture: which block row `i` is.
        targets: what it is to predict.
        pad_token_id: fills up shorter rows.
    """

    blocks: list[Blocks]
    mixture: Mixture
    targets: Targets
    pad_token_id: int

    def row(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Input ids and labels of a row of the run, int64 [length] each."""
        source, block = self.mixture(row)
        generator = np.random.default_rng((self.mixture.seed, MASKS, row))
        return self.targets(self.blocks[source][block], generator)

    def updates(self, plan: Plan, first_update: int = 0) -> Iterator[list[dict[str, Tensor]]]:
        """The micro-batches of this process for one update after the other, without an end.

        Yields:
            For every update a list of `input_ids`, `attention_mask` and `labels`, int64 [micro_batch, longest] each.
        """
        update = first_update
        while True:
            yield [collate([self.row(row) for row in rows], self.pad_token_id) for rows in plan.rows(update)]
            update += 1

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the number of the update says all."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to do; `updates` starts anywhere."""
