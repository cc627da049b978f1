"""A literal, slow reference of mixed attention: one softmax over the slots and the tokens of a window.

The logit of a slot gets `scale * log(max(count, 1))`, where `count` is the number of tokens that the slot stands for:
every token counts once, divided among the slots in proportion to what it writes. Shares no code with the package.
"""

import math

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
    exponentials = torch.exp(logits - logits.max())
    shares = exponentials / exponentials.sum()
    weights = torch.zeros(len(used) + len(inside), dtype=query.dtype)
    columns = [*read_slots, *(len(used) + i for i in range(len(inside)) if inside[i] is not None)]
    weights[columns] = shares
    return shares @ values, weights


def attention(
    query: Tensor,
    slots: tuple[Tensor, Tensor],
    used: list[bool],
    bias: Tensor,
    tokens: tuple[Tensor, Tensor],
    window: int,
) -> tuple[Tensor, Tensor]:
    """Let every token of an encoder's row (n, c) read, as in `read`: (n, c), and weights (n, m + window)."""
    n = len(query)
    reads = [read(query[t], slots, used, bias, tokens, places(t, n, window, causal=False)) for t in range(n)]
    outputs, weights = zip(*reads, strict=True)
    return torch.stack(outputs), torch.stack(weights)
