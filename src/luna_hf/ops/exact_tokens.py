"""Tokens that a query reads exactly although its window does not hold them: marked by the caller, or selected.

*Marked* tokens are the same for all heads (Longformer's global attention; the local-to-global control of ABC,
appendix A.1, with tokens that the caller chooses). *Selected* tokens are those that the attention of a few spaced
queries asks for, in each layer and head. A softmax reads each token once: in the window, or as one of these; slots
stand for the tokens that a query reads nowhere else.

Shape letters: b batch, h heads, n tokens, g exact tokens, r spaced queries, c head size. Every mask is boolean with
True = keep. `ranks` are indices among the real tokens of a row.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils import is_tracing

from .attention import masked_softmax
from .tokens import move_to_ranks, window_reach


class ExactTokens(NamedTuple):
    """Some tokens of each row, at most g: where they are."""

    places: Tensor  # (b, 1 or h, g) long
    valid: Tensor  # (b, 1 or h, g) boolean, False where a row has fewer
    mask: Tensor  # (b, 1 or h, n) boolean, True for these tokens


def first_tokens(scores: Tensor, number: int, limits: Tensor | None = None) -> ExactTokens:
    """Choose the tokens with the highest scores (b, 1 or h, n), the first ones among equals; minus infinity for none.

    Chosen are at most `number`, g, or what `limits` (b or 1, 1) say for each row. A graph always has g places, other
    calls as many as there are tokens.
    """
    length = scores.shape[-1]
    if is_tracing(scores):
        scores = F.pad(scores, (0, number), value=-torch.inf)
    # A stable sort, because `topk` leaves open which of equal scores it takes. ONNX knows no other.
    order = {} if torch.onnx.is_in_onnx_export() else {"stable": True}
    best, places = scores.sort(dim=-1, descending=True, **order)
    valid = best[..., :number] > -torch.inf
    if limits is not None:
        valid = valid & (torch.arange(valid.shape[-1], device=scores.device) < limits.unsqueeze(1))
    places = torch.where(valid, places[..., :number], 0)
    chosen = torch.zeros_like(scores[..., :length], dtype=torch.long).scatter_add(-1, places, valid.long())
    return ExactTokens(places, valid, chosen > 0)


def marked_tokens(marked: Tensor, most: int) -> ExactTokens:
    """Find the marked tokens of every row.

    Args:
        marked: (b, n) boolean.
        most: number of marked tokens of a row, at most. A graph, which cannot count them, leaves out further ones.

    Raises:
        ValueError: A row has more.
    """
    number = most
    if not is_tracing(marked):
        number = int(marked.sum(-1).max())
        if number > most:
            raise ValueError(
                f"`global_attention_mask` marks {number} tokens of a row, but `max_global_tokens` is {most}: mark "
                "fewer, or set the config's field higher."
            )
    scores = torch.zeros(marked.shape, device=marked.device).masked_fill(~marked, -torch.inf)
    return first_tokens(scores.unsqueeze(1), number)


def spaced_places(ranks: Tensor, lengths: Tensor, keep: Tensor | None, number: int) -> tuple[Tensor, Tensor]:
    """Find evenly spaced tokens of every row: those of rank floor(k n / r), k = 0 ... r - 1, with r = `number`.

    Ranks, lengths and mask are those of a `ForwardContext`. Returns ranks and places, (b or 1, r).
    """
    spaced = torch.arange(number, device=ranks.device) * lengths // number
    if keep is None:
        return spaced, spaced
    found = (ranks.unsqueeze(1) == spaced.unsqueeze(2)) & keep.unsqueeze(1)
    return spaced, found.long().argmax(-1)


@torch.no_grad()
def attention_asked(
    query: Tensor,
    key: Tensor,
    query_ranks: Tensor,
    ranks: Tensor,
    keep: Tensor | None = None,
    window: int = 0,
) -> Tensor:
    """Average the attention that some queries (b, h, r, c) pay to each key (b, h, n, c) outside their own windows.

    Ranks (b or 1, r) and (b or 1, n), padding mask (b, n); a window of 0 tokens is none. Returns (b, h, n) float32, of
    a softmax over all tokens of the row.
    """
    logits = torch.matmul(query * query.shape[-1] ** -0.5, key.transpose(-1, -2))
    weights = masked_softmax(logits, None if keep is None else keep[:, None, None])
    if window:
        before, after = window_reach(window)
        distance = ranks.unsqueeze(1) - query_ranks.unsqueeze(2)
        outside = (distance < -before) | (distance > after)
        weights = weights * outside.unsqueeze(1).to(weights.dtype)
    return weights.mean(2).float()


def gather_tokens(states: Tensor, places: Tensor) -> Tensor:
    """Take tokens of every head: (b, h, n, c) at (b, 1 or h, g) to (b, h, g, c)."""
    batch, heads, length, size = states.shape
    # Whole rows of a (b * n * h, c) table, which projections lay out in this order.
    row, head = (torch.arange(count, device=states.device) for count in (batch, heads))
    rows = (row.view(-1, 1, 1) * length + places) * heads + head.view(1, -1, 1)
    table = states.transpose(1, 2).flatten(0, 2)
    return table.index_select(0, rows.flatten()).view(batch, heads, -1, size)


def put_tokens(states: Tensor, tokens: Tensor, chosen: ExactTokens) -> Tensor:
    """Replace the chosen tokens' states (b, n, ...) by others (b, g, ...); the choice is the same for all heads."""
    mask = chosen.mask[:, 0]
    batch, number = tokens.shape[:2]
    # The chosen tokens are in the order of the row.
    index = (mask.long().cumsum(-1) - 1).clamp(min=0) + number * torch.arange(batch, device=mask.device)[:, None]
    spread = tokens.flatten(0, 1).index_select(0, index.flatten()).view(*mask.shape, *tokens.shape[2:])
    return torch.where(mask.view(*mask.shape, *(1 for _ in tokens.shape[2:])), spread, states)


def in_order(mask: Tensor, ranks: Tensor, keep: Tensor | None) -> Tensor:
    """Order a mask (b, 1 or h, n) as the real tokens of each row, with False behind them."""
    if keep is None:
        return mask
    return move_to_ranks(mask.unsqueeze(-1).float(), ranks, keep).squeeze(-1) > 0


def tokens_outside(left: Tensor | None, lengths: Tensor, length: int, window: int) -> Tensor:
    """Count the tokens that each query reads nowhere else: those left over that its window does not hold.

    Left over are tokens (b, 1 or h, n) that are read in no part but the window, in order (`in_order`); `None` for all.
    Rows have lengths (b or 1, 1), at most n = `length`. Returns (b or 1, 1 or h, n) float32 for the query of each rank,
    or (b or 1, 1 or h, 1) without a window.
    """
    if not window:
        total = lengths.unsqueeze(1) if left is None else left.sum(-1, keepdim=True)
        return total.float()
    first, end = window_edges(lengths, length, window)
    if left is None:
        return (lengths - (end - first)).clamp(min=0).unsqueeze(1).float()
    sums = F.pad(left.long().cumsum(-1), (1, 0))
    return (sums[..., -1:] - _at(sums, end) + _at(sums, first)).float()


def stretches_outside(left: Tensor | None, starts: Tensor, lengths: Tensor, length: int, window: int) -> Tensor:
    """Count the tokens of m stretches of a row that each query reads nowhere else: (b or 1, 1 or h, 1 or n, m).

    The stretches start at ranks `starts`, (b or 1, m + 1), which include the end of the last one; see `tokens_outside`.
    """
    rank = torch.arange(length + 1, device=lengths.device)
    sums = torch.minimum(rank, lengths).unsqueeze(1) if left is None else F.pad(left.long().cumsum(-1), (1, 0))
    at = _at(sums, starts).float()
    first, end = at[..., None, :-1], at[..., None, 1:]  # (b or 1, 1 or h, 1, m)
    if not window:
        return end - first
    # As sums never fall, the sum at the smaller of two ranks is the smaller sum.
    inner, outer = (_at(sums, edge).float().unsqueeze(-1) for edge in window_edges(lengths, length, window))
    return end - first - (torch.minimum(outer, end) - torch.maximum(inner, first)).clamp(min=0)


def _at(sums: Tensor, places: Tensor) -> Tensor:
    """Look up (b, 1 or h, n) at (b or 1, p), the same for all heads: (b, 1 or h, p)."""
    if places.shape[0] == 1:
        return sums.index_select(-1, places[0])
    return sums.gather(-1, places.unsqueeze(1).expand(-1, sums.shape[1], -1))


def window_edges(lengths: Tensor, length: int, window: int) -> tuple[Tensor, Tensor]:
    """Return the rank of the first token in the window of each rank, and of the first one behind it, (b or 1, n)."""
    before, after = window_reach(window)
    rank = torch.arange(length, device=lengths.device)
    end = torch.minimum(rank + after + 1, lengths)
    return torch.minimum((rank - before).clamp(min=0), end), end
