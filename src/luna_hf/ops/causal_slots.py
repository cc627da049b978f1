"""Slots that are written from left to right: their state, their normalisers, and how a token reads them.

Shape letters: b batch, h heads, n tokens, m slots, c head size. Every mask is boolean with True = keep.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .attention import count_bias, log_counts, masked_softmax
from .scan import SCAN_CHUNK
from .tokens import weight_shares

# The running maximum before the first token. Finite, because the difference of two infinities is NaN.
LOWEST = -1e30


class Normaliser(NamedTuple):
    """How the sums of a slot are divided, and whether a slot without a token can be read."""

    divisor: str | None  # "steps", the number of tokens so far; "total", the running sum of the weights; or none
    masks_empty: bool = False  # slots without a token yet are masked
    has_logits: bool = False  # the weights are logits, to be exponentiated

    @property
    def keeps_total(self) -> bool:
        """Whether the state holds the running sum of the weights."""
        return self.divisor == "total" or self.masks_empty


NORMALISERS = {
    "steps": Normaliser("steps"),  # Luna, section 3.3: a causal mean
    "none": Normaliser(None),  # ABC with Linformer's projection
    "written": Normaliser(None, masks_empty=True),  # ABC-Random
    "total": Normaliser("total", masks_empty=True),  # ABC-MLP with relu
    "softmax": Normaliser("total", has_logits=True),  # ABC-MLP, appendix B.1
}


@dataclass(frozen=True)
class SlotOptions:
    """How tokens write and read the slots; the layer's choices and what it knows about the tokens."""

    normaliser: Normaliser
    keep: Tensor | None = None  # (b, n) padding mask: padding writes nothing, and its outputs are meaningless
    steps: Tensor | None = None  # (b or 1, n) number of tokens so far, at least 1; for the divisor "steps" only
    slots: Tensor | None = None  # (b, m) slots that may be read; all by default
    used: Tensor | None = None  # (b, m) slots that share the tokens, see `slot_counts`; all by default
    dropout: float = 0.0  # probability of dropping a read weight
    need_weights: bool = False  # whether to return the read weights
    chunk_size: int = SCAN_CHUNK  # number of tokens per chunk, on which no result depends
    # Several keys in one softmax: (b, h, n, k) logits of k other keys that each token reads, such as a window's. The
    # logarithm of the number of tokens that a slot stands for, times the scale (h,), is added to its logit.
    beside: Tensor | None = None
    count_scale: Tensor | None = None
    # (b or 1, n) number of tokens that each token reads nowhere else, for which its slots stand; without any it reads
    # no slot. By default the slots stand for all tokens so far.
    outside: Tensor | None = None


class CausalMemory(NamedTuple):
    """The decoding state after some tokens."""

    key: Tensor  # (b, h, c, m) sum of k_j w_j
    value: Tensor  # (b, h, m, c) sum of w_j v_j
    total: Tensor | None = None  # (b, h, 1, m) sum of w_j, if the normaliser needs it
    peak: Tensor | None = None  # (b, h, 1, m) for logits only: the largest; all sums are divided by exp(peak)
    count: Tensor | None = None  # (b, h, 1, m) number of tokens that a slot stands for, if reads depend on it


def empty_memory(query: Tensor, value: Tensor, slots: int, normaliser: Normaliser) -> CausalMemory:
    """Return the state before the first token, for queries and values (b, h, n, c), in float32 or wider."""
    (batch, heads, _, size), dtype = query.shape, torch.promote_types(query.dtype, torch.float32)
    new = {"dtype": dtype, "device": query.device}
    row = (batch, heads, 1, slots)
    return CausalMemory(
        key=torch.zeros(batch, heads, size, slots, **new),
        value=torch.zeros(batch, heads, slots, value.shape[-1], **new),
        total=torch.zeros(row, **new) if normaliser.keeps_total else None,
        peak=torch.full(row, LOWEST, **new) if normaliser.has_logits else None,
    )


class SlotTokens(NamedTuple):
    """Tokens that write and read, (b, h, n, ...), or (b h, n, ...) in a chunk."""

    query: Tensor  # (..., n, c)
    key: Tensor  # (..., n, c)
    value: Tensor  # (..., n, c)
    weights: Tensor  # (..., n, m) write weights, or their logits
    divisor: Tensor | None = None  # (..., n, 1) of the sums, if it does not depend on the weights
    bias: Tensor | None = None  # (..., n, 1 or m) added to the logits of the slots
    beside: Tensor | None = None  # (..., n, k) logits of other keys in the same softmax


def divide_by_total(totals: Tensor, options: SlotOptions) -> tuple[Tensor | None, Tensor | None]:
    """Return the divisor of the sums, and which slots may be read, given the running sums of the weights."""
    # The gradient divides by the square of a total, which would underflow below the root of the smallest number.
    written = totals > torch.finfo(totals.dtype).tiny ** 0.5
    divisor = totals.masked_fill(~written, 1.0) if options.normaliser.divisor else None
    if not options.normaliser.masks_empty:
        return divisor, options.slots
    return divisor, written if options.slots is None else written & options.slots


def read_weights(
    logits: Tensor,
    divisor: Tensor | None,
    readable: Tensor | None,
    bias: Tensor | None,
    beside: Tensor | None,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Return the softmax over all keys, and that of the slots divided by the divisor of the values' sums."""
    logits, num_slots = logits if divisor is None else logits / divisor, logits.shape[-1]
    logits = logits if bias is None else logits + bias
    if beside is not None:
        if readable is not None:
            logits = logits.masked_fill(~readable, torch.finfo(logits.dtype).min)
        logits, readable = torch.cat([logits, beside], dim=-1), None
    read = masked_softmax(logits, readable)
    read = F.dropout(read, dropout) if dropout else read
    of_slots = read[..., :num_slots]
    return read, of_slots if divisor is None else of_slots / divisor


# ---- how many tokens a slot stands for ----


def slot_bias(weights: Tensor, options: SlotOptions, before: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Compute the bias of the slots' logits by the number of tokens that they stand for: (b or 1, 1 or h, n, 1 or m).

    Write weights (b, h, n, m) in float32 or wider are zero, or minus infinity, at padding; `before` are the counts
    (b, h, 1, m) after earlier tokens. Also returns the counts to keep in the state.
    """
    scale, outside = options.count_scale, options.outside
    bias, count = weights.new_zeros(()), None
    if scale is not None:
        counts, count = slot_counts(weights, options, before)
        if outside is None:
            bias = count_bias(counts, scale)
        else:  # the tokens outside are divided as all tokens so far are
            least = torch.finfo(counts.dtype).tiny ** 0.5  # whose gradient is finite
            total = options.steps[:, None, :, None].to(counts.dtype) if count is None else counts.sum(-1, keepdim=True)
            tokens = outside[:, None, :, None].to(counts.dtype).clamp(min=1)
            bias = log_counts(tokens * counts.clamp(min=least) / total.clamp(min=least), scale)
    bias = bias.to(weights.dtype)
    if outside is not None:
        bias = torch.where((outside == 0)[:, None, :, None], torch.finfo(weights.dtype).min / 2, bias)
    return bias, count


def slot_counts(weights: Tensor, options: SlotOptions, before: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Count the tokens that each slot stands for, at every token: (b, h, n, m), or (b or 1, 1, n, 1) if all are equal.

    Every token counts once, divided among the slots in proportion to its write weights (their absolute values). With
    the divisor "steps", the slots share the tokens so far evenly. Also returns the counts after the last token, if they
    are to be kept in the state. Arguments as for `slot_bias`.
    """
    used = options.used
    if options.normaliser.divisor == "steps":
        slots = weights.shape[-1] if used is None else used.sum(-1)[:, None, None, None].clamp(min=1)
        return options.steps[:, None, :, None].to(weights.dtype) / slots, None
    has_logits, lowest = options.normaliser.has_logits, torch.finfo(weights.dtype).min
    if used is not None:
        weights = weights.masked_fill(~used[:, None, None], lowest if has_logits else 0.0)
    if has_logits:  # padding has minus infinity alone, whose softmax would be NaN
        shares = weights.clamp(min=lowest).softmax(-1).masked_fill(weights[..., :1] == -torch.inf, 0.0)
    else:
        shares = weight_shares(weights, dim=-1)
    counts = shares.cumsum(2)
    counts = counts if before is None else counts + before
    return counts, counts[:, :, -1:]
