"""Rows for a conversion: passages of documents in all lengths, and single sentences.

A row depends on the seed, the update and the pass alone: resuming needs no state, and any number of processes reads the
same rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from data.masking import Targets, collate
from data.token_store import TokenStore
from torch import Tensor

from converting.recipe import Lengths

# Documents that are looked at for one that fills a row.
_TRIES = 16
# The random streams of a run.
TRAINING, HELD_OUT = range(2)


class Frame(NamedTuple):
    """The ids that begin and end a row, and padding's."""

    first: int
    last: int
    pad: int


class Documents:
    """The documents of several stores, drawn in proportion to weights and tokens."""

    def __init__(self, stores: Sequence[TokenStore], weights: Sequence[float], last: int) -> None:
        self.stores, self.weights = list(stores), np.array(weights) / sum(weights)
        self.borders = [self._borders(store, last) for store in stores]

    @staticmethod
    def _borders(store: TokenStore, last: int) -> np.ndarray:
        ends = np.flatnonzero(np.asarray(store.tokens) == last)
        return np.concatenate([[-1], ends, [len(store.tokens)]])

    def document(self, generator: np.random.Generator, by_tokens: bool) -> np.ndarray:
        """The tokens of a document, drawn by its number of tokens, or evenly."""
        number = generator.choice(len(self.stores), p=self.weights)
        tokens, borders = self.stores[number].tokens, self.borders[number]
        if by_tokens:
            place = np.searchsorted(borders, generator.integers(len(tokens)), side="right") - 1
            place = min(place, len(borders) - 2)
        else:
            place = generator.integers(len(borders) - 1)
        return tokens[borders[place] + 1 : borders[place + 1]]

    def passage(self, generator: np.random.Generator, size: int) -> np.ndarray:
        """At most `size` successive tokens of a document: from its start, or from anywhere.

        Of documents that are all shorter, the longest of a few is taken whole.
        """
        best = np.empty(0, dtype=np.int64)
        for _ in range(_TRIES):
            found = self.document(generator, by_tokens=True)
            if len(found) >= size:
                start = generator.integers(len(found) - size + 1) if generator.random() < 0.5 else 0
                return found[start : start + size]
            best = max(best, found, key=len)
        return best


class Rows:
    """The rows of a run.

    Args:
        documents: what passages are cut from.
        sentences: documents that are rows of their own; `None` for none.
        sentence_share: of the passes that hold sentences.
        pass_tokens: tokens of a pass at most, unless one row has more.
        positions: of the model, if some are new: rows are then placed anywhere among them, see `place`.
    """

    def __init__(
        self,
        documents: Documents,
        sentences: Documents | None,
        sentence_share: float,
        frame: Frame,
        pass_tokens: int,
        seed: int,
        masking: Targets | None = None,
        positions: int = 0,
    ) -> None:
        self.documents, self.sentences, self.sentence_share = documents, sentences, sentence_share
        self.frame, self.pass_tokens, self.seed, self.masking = frame, pass_tokens, seed, masking
        self.positions = positions

    def batch(self, lengths: Sequence[Lengths], *place: int, masked: bool = False) -> dict[str, Tensor]:
        """The rows of a pass, (b, n) long each: `input_ids` and `attention_mask`, and perhaps `labels`, `position_ids`.

        Args:
            lengths: to draw the rows' length from.
            place: number of the update, and of the pass among those of all processes.
        """
        generator = np.random.default_rng((self.seed, TRAINING, *place))
        shares = np.array([part.share for part in lengths])
        part = lengths[generator.choice(len(lengths), p=shares / shares.sum())]
        if self.sentences and generator.random() < self.sentence_share:
            found = self.draw_sentences(generator, part.high - 2)
        else:
            size = round(np.exp(generator.uniform(np.log(part.low), np.log(part.high))))
            count = max(1, self.pass_tokens // size)
            found = [self.documents.passage(generator, size - 2) for _ in range(count)]
        rows = [self.row(tokens) for tokens in found]
        pairs = [self.masking(row, generator) if masked else (row, row) for row in rows]
        batch = collate(pairs, self.frame.pad)
        if not masked:
            del batch["labels"]
        return batch | self.place(batch["attention_mask"], generator) if self.positions else batch

    def place(self, mask: Tensor, generator: np.random.Generator) -> dict[str, Tensor]:
        """Positions (b, n) of the rows of a pass: the first token keeps its own, the others start at a random offset.

        So short rows train late positions, too.
        """
        length = mask.shape[1]
        offset = int(generator.integers(self.positions - length + 1))
        places = torch.arange(length) + offset
        places[0] = 0
        return {"position_ids": (places + self.frame.pad + 1).where(mask.bool(), self.frame.pad)}

    def draw_sentences(self, generator: np.random.Generator, size: int) -> list[np.ndarray]:
        """Sentences of at most `size` tokens, as many as fit into a pass with their padding, and one at least."""
        found, longest = [], 0
        while True:
            sentence = self.sentences.document(generator, by_tokens=False)[:size]
            longest = max(longest, len(sentence) + 2)
            if found and longest * (len(found) + 1) > self.pass_tokens:
                return found
            found.append(sentence)

    def row(self, tokens: np.ndarray) -> np.ndarray:
        """A row with its ends: int64 [n + 2]."""
        return np.concatenate([[self.frame.first], tokens, [self.frame.last]]).astype(np.int64)

    def held_out(self, length: int, count: int) -> Tensor | None:
        """(count, length) full rows that depend on the seed alone; `None` if there are no documents of that length."""
        generator = np.random.default_rng((self.seed, HELD_OUT, length))
        found = [self.documents.passage(generator, length - 2) for _ in range(count)]
        found = [self.row(tokens) for tokens in found if len(tokens) == length - 2]
        return torch.from_numpy(np.stack(found)) if found else None
