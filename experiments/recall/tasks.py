"""Synthetic tasks whose answers lie farther back than a window reaches.

Every function returns token ids (rows, n), and labels (rows, n) that hold the answer at the position whose output is to
predict it and `IGNORED` elsewhere. A causal model reads the question and predicts the answer there; an encoder finds a
mask after the question and predicts it at the mask. Between what is to be remembered and the first question lie `gap`
fillers.

    recall   k1 v1 k2 v2 ... . . . k2 k1 ...          multi-query associative recall (Arora et al. 2024, "Zoology")
    copy     s1 s2 s3 ... . . . ? s1 s2 ...           the symbols in order, after a start token
    needle   s s s ! v s s s . . . ?                  the value after the marker, among random symbols

Symbols are drawn without regard to their frequency, so the rows of two seeds practically never coincide.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100
FILLER, PAD, QUESTION, MASK, MARKER = range(5)
NUM_SPECIAL = 5


@dataclass(frozen=True)
class Task:
    """A task at one size.

    Args:
        name: "recall", "copy" or "needle".
        causal: whether rows are for a causal model, not for an encoder.
        items: number of pairs (recall), of symbols to copy (copy), or of symbols around the needle (needle).
        symbols: number of different keys, and of different values.
        gap: number of fillers between what is to be remembered and the first question.
    """

    name: str
    causal: bool
    items: int
    symbols: int
    gap: int

    def __post_init__(self) -> None:
        if self.name not in _ROWS:
            raise ValueError(f"There is no task {self.name!r}. Choose one of {', '.join(_ROWS)}.")
        if self.name == "recall" and self.items > self.symbols:
            raise ValueError(f"{self.items} pairs need as many different keys. Raise `symbols` ({self.symbols}).")

    @property
    def vocab_size(self) -> int:
        """Special tokens, keys and values."""
        return NUM_SPECIAL + 2 * self.symbols

    @property
    def length(self) -> int:
        """Number of tokens in a row."""
        return self.draw(1, torch.Generator())[0].shape[1]

    def draw(self, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw ids and labels, (rows, n) each."""
        return _ROWS[self.name](self, rows, generator)


def distinct(rows: int, count: int, symbols: int, generator: torch.Generator) -> Tensor:
    """Draw `count` different numbers below `symbols` in every row, in random order."""
    return torch.rand(rows, symbols, generator=generator).argsort(1)[:, :count]


def questions(asked: Tensor, answers: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Ids and labels of questions (rows, q) with one answer each; an encoder's are followed by a mask."""
    if causal:
        return asked, answers
    masks, ignored = torch.full_like(asked, MASK), torch.full_like(answers, IGNORED)
    return torch.stack([asked, masks], 2).flatten(1), torch.stack([ignored, answers], 2).flatten(1)


def _join(task: Task, remembered: Tensor, asked: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    gap = asked.new_full((len(asked), task.gap), FILLER)
    ids = torch.cat([remembered, gap, asked], 1)
    ignored = asked.new_full((len(asked), ids.shape[1] - labels.shape[1]), IGNORED)
    return ids, torch.cat([ignored, labels], 1)


def _recall(task: Task, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    keys = NUM_SPECIAL + distinct(rows, task.items, task.symbols, generator)
    values = NUM_SPECIAL + task.symbols + distinct(rows, task.items, task.symbols, generator)
    order = distinct(rows, task.items, task.items, generator)
    pairs = torch.stack([keys, values], 2).flatten(1)
    return _join(task, pairs, *questions(keys.gather(1, order), values.gather(1, order), task.causal))


def _copy(task: Task, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    symbols = NUM_SPECIAL + torch.randint(task.symbols, (rows, task.items), generator=generator)
    start = symbols.new_full((rows, 1), QUESTION)
    if task.causal:  # each copied symbol is the question for the next
        return _join(task, symbols, torch.cat([start, symbols[:, :-1]], 1), symbols)
    return _join(task, symbols, torch.full_like(symbols, MASK), symbols)


def _needle(task: Task, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    hay = NUM_SPECIAL + torch.randint(2 * task.symbols, (rows, task.items), generator=generator)
    place = torch.randint(task.items - 1, (rows, 1), generator=generator)
    value = NUM_SPECIAL + task.symbols + torch.randint(task.symbols, (rows, 1), generator=generator)
    hay = hay.scatter(1, place, MARKER).scatter(1, place + 1, value)
    return _join(task, hay, *questions(torch.full_like(value, QUESTION), value, task.causal))


_ROWS = {"recall": _recall, "copy": _copy, "needle": _needle}
