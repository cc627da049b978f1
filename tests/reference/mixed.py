"""A literal, slow reference of mixed attention: one softmax over slots, marked and selected tokens, and a window.

The slots of a query stand for the tokens that it reads nowhere else: the logit of a slot gets `scale * log(mass)`,
where `mass` is its part of these tokens. With the older rule, "all", they stand for all tokens, and the logit gets
`scale * log(max(count, 1))`. Every token counts once, divided among the slots in proportion to what it writes. Shares
no code with the package.
"""

import math
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor


def shares(writes: Tensor) -> Tensor:
    """Divide each token (row) of (n, m) write weights among the slots; zeros for a token that writes nothing."""
    rows = []
    for row in writes:
        total = row.abs().sum()
        rows.append(row.abs() / total if total > 0 else 0 * row)
    return torch.stack(rows)


def biases(counts: Tensor, scale: Tensor | float) -> Tensor:
    """What is added to the logits of slots that stand for so many tokens (any shape); 0 for less than one token."""
    return scale * torch.log(torch.where(counts > 1, counts, 1.0))


def places(t: int, n: int, window: int, causal: bool) -> list[int | None]:
    """The tokens in the window of token t, `None` beyond the row.

    In an encoder window // 2 tokens before t, t itself and the rest after it; if causal, the last tokens up to t.
    """
    first = t - (window - 1 if causal else window // 2)
    return [place if 0 <= place < n else None for place in range(first, first + window)]


def read(
    query: Tensor,
    slots: tuple[Tensor, Tensor],
    used: list[bool],
    bias: Tensor,
    tokens: tuple[Tensor, Tensor],
    inside: list[int | None],
) -> tuple[Tensor, Tensor]:
    """Read slots and window with one query of one head.

    Args:
        query: (c,).
        slots: keys and values of the slots, (m, c) each.
        used: which of the m slots may be read.
        bias: (m,), added to the slots' logits.
        tokens: keys and values of the row's tokens, (n, c) each.
        inside: the tokens in the window, see `places`.

    Returns:
        The output (c,) and the weights (m + window,), 0 where nothing is read.
    """
    read_slots = [j for j in range(len(used)) if used[j]]
    read_tokens = [place for place in inside if place is not None]
    keys, values = (torch.cat([slots[side][read_slots], tokens[side][read_tokens]]) for side in (0, 1))
    bias = torch.cat([bias[read_slots], torch.zeros(len(read_tokens), dtype=bias.dtype)])
    logits = keys @ query / math.sqrt(query.shape[0]) + bias
    exponentials = torch.exp(logits - logits.max())  # a slot with a bias of minus infinity weighs nothing
    shares = exponentials / exponentials.sum()
    weights = torch.zeros(len(used) + len(inside), dtype=query.dtype)
    columns = [*read_slots, *(len(used) + i for i in range(len(inside)) if inside[i] is not None)]
    weights[columns] = shares
    return shares @ values, weights


class Rule(NamedTuple):
    """What tokens read besides their windows, and how much the slots weigh.

    Args:
        window: number of tokens of a window, 0 for none.
        scale: of the logarithm of a slot's tokens; 0 for none.
        counts: "outside", the tokens that a query reads nowhere else; or "all", at least one.
        selected: number of selected tokens.
        softmax_length: number of tokens of a row up to which it selects all.
        queries: number of queries that select.
        marked: the marked tokens.
        read_all: whether marked tokens read all tokens.
    """

    window: int
    scale: Tensor | float
    counts: str = "outside"
    selected: int = 0
    softmax_length: int = 0
    queries: int = 1
    marked: tuple[int, ...] = ()
    read_all: bool = True

    @classmethod
    def of(cls, config: SimpleNamespace, scale: Tensor | float) -> "Rule":
        """The rule of a config, which may also have `marked`, a list of tokens."""
        return cls(
            config.local_window,
            scale,
            config.slot_counts,
            config.num_selected_tokens,
            config.softmax_length,
            config.num_selection_queries,
            tuple(getattr(config, "marked", ())),
            config.global_tokens_read_all,
        )

    def inside(self, t: int, n: int) -> list[int]:
        """The tokens in the window of token t."""
        return [place for place in places(t, n, self.window, causal=False) if place is not None]


def select(query: Tensor, key: Tensor, rule: Rule) -> list[int]:
    """The selected tokens of one head, from queries and keys (n, c).

    Of queries floor(k n / r), the softmax over all tokens is averaged where their own windows do not reach; the largest
    averages are taken, compared in float32, of equal ones the first.
    """
    n = len(query)
    scores = [torch.zeros((), dtype=query.dtype) for _ in range(n)]
    for k in range(rule.queries):
        t = k * n // rule.queries
        weights = torch.softmax(key @ query[t] / math.sqrt(query.shape[1]), 0)
        for place in range(n):
            if place not in rule.inside(t, n):
                scores[place] = scores[place] + weights[place] / rule.queries
    order = sorted(range(n), key=lambda place: (-float(scores[place].float()), place))
    return [place for place in order if place not in rule.marked][: n if n <= rule.softmax_length else rule.selected]


def masses(left: list[int], shares: Tensor, member: list[int] | None) -> Tensor:
    """How many of the tokens `left` each slot stands for: those in it, or an equal part of all by its share (m,)."""
    if member is None:
        return len(left) * shares
    return torch.tensor([sum(member[place] == j for place in left) for j in range(len(shares))]).to(shares.dtype)


def attention(
    query: Tensor,
    slots: tuple[Tensor, Tensor],
    used: list[bool],
    counts: Tensor,
    tokens: tuple[Tensor, Tensor],
    rule: Rule,
    selected: list[int],
    member: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Let every token of an encoder's row (n, c) read slots, marked and selected tokens and its window.

    Args:
        query: (n, c) of one head.
        slots: keys and values of the slots, (m, c) each.
        used: which of the m slots may be read.
        counts: (m,) number of tokens that were written to each slot.
        tokens: keys and values of the row's tokens, (n, c) each.
        rule: what is read.
        selected: from `select`.
        member: the slot of every token, if a query's slots stand for their own tokens.

    Returns:
        (n, c), and weights (n, m + marked + selected + window): 0 for what is not read, or was read before. Rows of
        marked tokens that read all others are 0.
    """
    n, m = query.shape[0], len(used)
    exact = [*rule.marked, *selected]
    outputs, reads = [], []
    for t in range(n):
        if t in rule.marked and rule.read_all:
            outputs.append(torch.softmax(tokens[0] @ query[t] / math.sqrt(query.shape[1]), 0) @ tokens[1])
            reads.append(torch.zeros(m + len(exact) + rule.window, dtype=query.dtype))
            continue
        inside = places(t, n, rule.window, causal=False)
        inside = [None if place in exact else place for place in inside]
        may, bias = used, biases(counts, rule.scale)
        if rule.counts == "outside":
            left = [place for place in range(n) if place not in inside and place not in exact]
            mass = masses(left, counts / counts.sum() if counts.sum() > 0 else 0 * counts, member)
            may = [used[j] and float(mass[j]) > 0 for j in range(m)]
            bias = rule.scale * torch.log(torch.where(mass > 0, mass, 1.0)) + 0 * counts
        output, weights = read(query[t], slots, may, bias, tokens, [*exact, *inside])
        outputs.append(output)
        reads.append(weights)
    return torch.stack(outputs), torch.stack(reads)
