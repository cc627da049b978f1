"""Causal attention to a memory of slots, as in Luna (Ma et al. 2021, section 3.3) and ABC (Peng et al. 2022).

Token j adds its key and value to every slot with weights w_j in R^m; token t reads the slots with softmax attention,
after it and all earlier tokens have written:

    K_t = sum_{j<=t} w_j (x) k_j / N_t,  V_t = sum_{j<=t} w_j (x) v_j / N_t,  out_t = softmax(q_t K_t^T / sqrt(c)) V_t

Both running sums are causal scans (`ops/scan.py`): time and memory are linear in n, and the state has constant size.
Mechanisms differ in their weights and in the divisor N_t (`NORMALISERS`). Everything runs in float32 or wider.

Shape letters: b batch, h heads, n tokens, m slots, c head size. Every mask is boolean with True = keep.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils.generic import maybe_autocast

from .attention import count_bias, log_counts, masked_softmax
from .dispatch import choose
from .recompute_scans import scan_in_chunks
from .scan import SCAN_CHUNK, causal_scan, scan_chunk, to_chunks
from .tokens import first_places, weight_shares

# The divisor N_t of a slot's sums, and the slots that can be read:
#   "steps"    the number of tokens so far, a causal mean (Luna, section 3.3)
#   "none"     no divisor (Linformer)
#   "written"  no divisor; slots without a token yet are masked (ABC-Random)
#   "total"    the running sum of the slot's weights; slots without a token yet are masked (ABC-MLP with relu)
#   "softmax"  the weights are logits, exponentiated and divided by their running sum (ABC-MLP, appendix B.1)
NORMALISERS = ("steps", "none", "written", "total", "softmax")


# Largest rise of a slot's running maximum within a chunk. Exponentials are relative to the maximum at the chunk's end;
# an earlier token divides by sums smaller by up to e^40, twice in the gradient, and e^80 still fits in float32.
_LARGEST_RISE = 40.0

# The running maximum before the first token. Finite, because the difference of two infinities is NaN.
_LOWEST = -1e30

# Block size at the leaves of a tree, its levels above them, and its number of tokens. The table over pairs of trees has
# fewer entries than the leaves up to a length of 8 * 64 * 64.
_LEAF, _LEVELS = 8, 3

_TREE = _LEAF << _LEVELS


class CausalMemory(NamedTuple):
    """The decoding state after some tokens."""

    key: Tensor  # (b, h, c, m) sum of k_j w_j
    value: Tensor  # (b, h, m, c) sum of w_j v_j
    total: Tensor | None = None  # (b, h, 1, m) sum of w_j, if the normaliser needs it
    peak: Tensor | None = None  # (b, h, 1, m) "softmax" only: the largest logit; all sums are divided by exp(peak)
    count: Tensor | None = None  # (b, h, 1, m) number of tokens that a slot stands for, if reads depend on it


def empty_memory(query: Tensor, value: Tensor, weights: Tensor, normaliser: str) -> CausalMemory:
    """Return the state before the first token, for the inputs of `attend_causal_memory`."""
    (batch, heads, _, size), slots = query.shape, weights.shape[-1]
    like = query.new_zeros((), dtype=torch.promote_types(query.dtype, torch.float32))
    return CausalMemory(
        key=like.new_zeros(batch, heads, size, slots),
        value=like.new_zeros(batch, heads, slots, value.shape[-1]),
        total=None if normaliser in ("steps", "none") else like.new_zeros(batch, heads, 1, slots),
        peak=like.new_full((batch, heads, 1, slots), _LOWEST) if normaliser == "softmax" else None,
    )


class Reading(NamedTuple):
    """Options for reading the slots, the same for every token."""

    normaliser: str
    slots: Tensor | None  # (b, 1, 1, m) slots that may be read, or (b h, 1, m) chunk by chunk
    dropout: float
    need_weights: bool
    # For every token:
    bias: Tensor | None = None  # (..., n, m) added to the logits of the slots
    beside: Tensor | None = None  # (..., n, k) logits of other keys in the same softmax


def attend_causal_memory(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor,
    normaliser: str,
    memory: CausalMemory | None = None,
    keep: Tensor | None = None,
    steps: Tensor | None = None,
    slots: Tensor | None = None,
    dropout: float = 0.0,
    need_weights: bool = False,
    chunk_size: int = SCAN_CHUNK,
    count_scale: Tensor | None = None,
    beside: Tensor | None = None,
    used: Tensor | None = None,
    outside: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, CausalMemory]:
    """Write to the memory and read it, from left to right.

    Args:
        query, key, value: (b, h, n, c).
        weights: (b, h, n, m) write weights; logits for "softmax".
        normaliser: one of `NORMALISERS`.
        memory: state after earlier tokens; empty by default.
        keep: (b, n) padding mask. Padding writes nothing; its outputs are finite but meaningless.
        steps: (b or 1, n) number of tokens up to and including this one, at least 1; for "steps" only.
        slots: (b, m) slots that may be read; all by default.
        dropout: dropout probability of the read weights.
        need_weights: whether to return the read weights.
        chunk_size: number of tokens per chunk; the result does not depend on it.
        count_scale: (h,) scale of the logarithm of each slot's count, which is added to its logit; see `slot_counts`.
        beside: (b, h, n, k) logits of k other keys that each token reads in the same softmax, such as a window's.
        used: (b, m) slots among which `slot_counts` divides the tokens; all by default.
        outside: (b or 1, n) number of tokens that each token reads nowhere else: what its slots stand for, divided as
            `slot_counts` are; without any, it reads no slot. By default they stand for all tokens so far.

    Returns:
        The outputs (b, h, n, c) in `query`'s dtype, without the values of the keys `beside`; the read weights
        (b, h, n, m + k) after dropout, or `None` if neither needed nor of use; and the state after the last token.

    Raises:
        ValueError: `normaliser` is unknown.
    """
    if normaliser not in NORMALISERS:
        raise ValueError(f"`normaliser` is {normaliser!r}, but must be one of {', '.join(NORMALISERS)}.")
    if memory is None:
        memory = empty_memory(query, value, weights, normaliser)
    batch, heads, length = query.shape[:3]
    precise = memory.key.dtype
    if keep is not None:
        # Padding may hold anything, even NaN: none of it may reach a sum or a gradient.
        padding = ~keep[:, None, :, None]
        key, value = key.masked_fill(padding, 0.0), value.masked_fill(padding, 0.0)
        weights = weights.to(precise).masked_fill(padding, -torch.inf if normaliser == "softmax" else 0.0)
    divisor = None if normaliser != "steps" else steps.to(precise)[:, None, :, None].expand(batch, heads, length, 1)
    slots = None if slots is None else slots[:, None, None, :]
    count, bias = None, None
    if count_scale is not None:
        counts, count = slot_counts(weights.to(precise), normaliser, steps, memory.count, used)
        if outside is None:
            bias = count_bias(counts, count_scale)
        else:
            total = steps[:, None, :, None].to(precise) if normaliser == "steps" else counts.sum(-1, keepdim=True)
            bias = outside_bias(counts, total, outside, count_scale)
        bias = bias.to(precise).expand(batch, -1, -1, -1)
    if outside is not None:
        unread = (outside == 0)[:, None, :, None]
        bias = torch.zeros((), dtype=precise, device=query.device) if bias is None else bias
        bias = torch.where(unread, torch.finfo(precise).min / 2, bias)
        bias = bias.expand(batch, -1, -1, -1) if count_scale is not None else bias.expand(batch, heads, length, 1)
    beside = None if beside is None else beside.to(precise)
    need_weights = need_weights or beside is not None
    reading = Reading(normaliser, slots, dropout, need_weights, bias, beside)
    tokens = (query, key, value, weights)
    with maybe_autocast(query.device.type, enabled=False):
        if length == 1 and not torch.is_grad_enabled():
            out, read, memory = step_causal_memory(*(part.to(precise) for part in tokens), memory, divisor, reading)
            return out.to(query.dtype), read.to(query.dtype) if need_weights else None, memory._replace(count=count)
        operation = "causal_softmax_memory" if normaliser == "softmax" else "causal_memory"
        implementation = choose(operation, query) if length > 1 else "loop"
        out, read, memory = _ATTENTION[implementation](*tokens, memory, divisor, reading, keep, chunk_size)
    return out.to(query.dtype), read.to(query.dtype) if need_weights else None, memory._replace(count=count)


def slot_counts(
    weights: Tensor, normaliser: str, steps: Tensor | None, before: Tensor | None, used: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Count the tokens that each slot stands for, at every token.

    Every token counts once, divided among the slots in proportion to its write weights (their absolute values). With
    the normaliser "steps", the slots share the tokens so far evenly.

    Args:
        weights, normaliser, steps, used: see `attend_causal_memory`; padding has zero weights, or minus infinity.
        before: (b, h, 1, m) counts after earlier tokens; `None` for none.

    Returns:
        Counts (b, h, n, m), or (b or 1, 1, n, 1) if all are the same; and the counts after the last token, if they are
        to be kept in the state.
    """
    if normaliser == "steps":
        slots = weights.shape[-1] if used is None else used.sum(-1)[:, None, None, None].clamp(min=1)
        return steps[:, None, :, None].to(weights.dtype) / slots, None
    if used is not None:
        unused = ~used[:, None, None]
        weights = weights.masked_fill(unused, torch.finfo(weights.dtype).min if normaliser == "softmax" else 0.0)
    if normaliser == "softmax":
        lowest = torch.finfo(weights.dtype).min  # of padding, whose softmax would be NaN
        shares = weights.clamp(min=lowest).softmax(-1).masked_fill(weights[..., :1] == -torch.inf, 0.0)
    else:
        shares = weight_shares(weights, dim=-1)
    counts = shares.cumsum(2)
    counts = counts if before is None else counts + before
    return counts, counts[:, :, -1:]


def outside_bias(counts: Tensor, total: Tensor, outside: Tensor, scale: Tensor) -> Tensor:
    """Compute the bias of slots that stand for tokens outside the window, divided as all tokens are.

    Args:
        counts: (b or 1, 1 or h, n, m), or with a last dimension of 1 if all slots have as many, from `slot_counts`.
        total: (b or 1, 1 or h, n, 1) their sum over all slots.
        outside: (b or 1, n) number of tokens outside; 0 gives the bias of a single one.
        scale: (h,) factor of each head.

    Returns:
        (b or 1, h, n, 1 or m).
    """
    least = torch.finfo(counts.dtype).tiny ** 0.5  # whose gradient is finite
    outside = outside[:, None, :, None].to(counts.dtype).clamp(min=1)
    return log_counts(outside * counts.clamp(min=least) / total.clamp(min=least), scale)


# ---- one token, as in decoding ----


def step_causal_memory(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor,
    memory: CausalMemory,
    divisor: Tensor | None,
    reading: Reading,
) -> tuple[Tensor, Tensor, CausalMemory]:
    """Write one token to the memory and read it: outputs (b, h, 1, c), read weights and the state after it."""
    if reading.normaliser == "softmax":
        peak = torch.maximum(memory.peak, weights)
        growth, weights = (memory.peak - peak).exp(), (weights - peak).exp()
        memory = CausalMemory(memory.key * growth, memory.value * growth.mT, memory.total * growth, peak)
    readable = reading.slots
    if memory.total is not None:
        memory = memory._replace(total=memory.total + weights)
        divisor, readable = _divisor(memory.total, reading)
    keys, values = torch.addcmul(memory.key, key.mT, weights), torch.addcmul(memory.value, weights.mT, value)
    logits = torch.matmul(query * query.shape[-1] ** -0.5, keys)
    read, divided = _read_weights(logits, divisor, readable, reading)
    return torch.matmul(divided, values), read, memory._replace(key=keys, value=values)


# ---- chunk by chunk ----


def _attend_in_a_loop(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor,
    memory: CausalMemory,
    divisor: Tensor | None,
    reading: Reading,
    keep: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor | None, CausalMemory]:
    heads, length, precise = query.shape[1], query.shape[2], memory.key.dtype
    sizes = [min(chunk_size, length - first) for first in range(0, length, chunk_size)]
    if reading.normaliser == "softmax" and length > 1:
        sizes = _split_at_rises(weights.detach(), sizes, memory.peak[:, :, 0], keep)
    tokens = (query, key, value, weights, divisor, reading.bias, reading.beside)
    slots = None if reading.slots is None else reading.slots.expand(-1, heads, 1, -1).flatten(0, 1)
    # Not `reading` itself: what the function below holds stays in memory until the backward pass.
    shared = reading._replace(slots=slots, bias=None, beside=None)

    def attend(chunk: Sequence[Tensor | None], state: CausalMemory) -> tuple[list[Tensor], CausalMemory]:
        *states, divided_by, bias, beside = chunk
        states = (part.to(precise) for part in states)
        own = shared._replace(bias=bias, beside=beside)
        out, read, state = _attend_chunk(*states, state, divided_by, own)
        return [out, read] if shared.need_weights else [out], state

    state = CausalMemory(*(None if part is None else part.flatten(0, 1) for part in memory))
    (out, *read), state = scan_in_chunks(attend, tokens, state, sizes)
    memory = CausalMemory(*(None if part is None else part.unflatten(0, (-1, heads)) for part in state))
    return out, read[0] if read else None, memory


def _attend_chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor,
    state: CausalMemory,
    divisor: Tensor | None,
    reading: Reading,
) -> tuple[Tensor, Tensor, CausalMemory]:
    """Attend within one chunk (b h, n, ...), short enough that no exponential underflows, given the state before it."""
    if reading.normaliser == "softmax":
        # The peak cancels in every quotient, so it needs no gradient.
        peak = torch.maximum(state.peak, weights.detach().amax(1, keepdim=True))
        growth = (state.peak - peak).exp()
        weights = (weights - peak).exp()
        state = CausalMemory(state.key * growth, state.value * growth.transpose(1, 2), state.total * growth, peak)
    readable = reading.slots
    if state.total is not None:
        totals = weights.cumsum(1) + state.total
        state = state._replace(total=totals[:, -1:].clone())  # a view would keep the totals of the whole chunk
        divisor, readable = _divisor(totals, reading)
    logits, keys = scan_chunk(query * query.shape[-1] ** -0.5, key, weights, state.key)
    read, divided = _read_weights(logits, divisor, readable, reading)
    out, values = scan_chunk(divided, weights, value, state.value)
    return out, read, state._replace(key=keys, value=values)


def _divisor(totals: Tensor, reading: Reading) -> tuple[Tensor | None, Tensor | None]:
    """Compute the divisor of the sums and the mask of readable slots from the running sums of the weights."""
    # The gradient divides by the square of a total, which would underflow below the root of the smallest number.
    written = totals > torch.finfo(totals.dtype).tiny ** 0.5
    divisor = None if reading.normaliser == "written" else totals.masked_fill(~written, 1.0)
    if reading.normaliser == "softmax":  # every token writes to every slot
        return divisor, reading.slots
    return divisor, written if reading.slots is None else written & reading.slots


def _read_weights(
    logits: Tensor, divisor: Tensor | None, readable: Tensor | None, reading: Reading
) -> tuple[Tensor, Tensor]:
    """Return the softmax over all keys, and that of the slots divided by the divisor of the values' sums."""
    logits, num_slots = logits if divisor is None else logits / divisor, logits.shape[-1]
    logits = logits if reading.bias is None else logits + reading.bias
    if reading.beside is not None:
        if readable is not None:
            logits = logits.masked_fill(~readable, torch.finfo(logits.dtype).min)
        logits, readable = torch.cat([logits, reading.beside], dim=-1), None
    read = masked_softmax(logits, readable)
    read = F.dropout(read, reading.dropout) if reading.dropout else read
    of_slots = read[..., :num_slots]
    return read, of_slots if divisor is None else of_slots / divisor


def _split_at_rises(logits: Tensor, sizes: list[int], peak: Tensor, keep: Tensor | None) -> list[int]:
    """Halve chunks until no slot's running maximum rises too far within one; only extreme logits need it.

    Args:
        logits: (b, h, n, m), minus infinity at padding.
        sizes: chunk sizes to start from.
        peak: (b, h, m) the running maximum before the first token.
        keep: (b, n) padding mask.
    """
    chunks = logits.split(sizes, 2)
    ends = torch.stack([peak, *(chunk.amax(2) for chunk in chunks)]).cummax(0).values  # (1 + chunks, b, h, m)
    first = torch.stack([chunk[:, :, 0] for chunk in chunks])
    if keep is not None:
        # Before the first real token padding reads nothing, so a row starts at its first real token.
        row, kept = torch.arange(keep.shape[0], device=keep.device), keep.split(sizes, 1)
        written = [chunk[row, :, real.int().argmax(1)] for chunk, real in zip(chunks, kept, strict=True)]
        first = torch.where(ends[:-1] > _LOWEST, first, torch.stack(written))
    rises = ends[1:] - torch.maximum(ends[:-1], first) > _LARGEST_RISE
    if not rises.any():
        return sizes
    split, start = [], 0
    for index, size in enumerate(sizes):
        if size > 1 and rises[index].any():
            inside = slice(start, start + size)
            part = None if keep is None else keep[:, inside]
            split += _split_at_rises(logits[:, :, inside], [size // 2, size - size // 2], ends[index], part)
        else:
            split.append(size)
        start += size
    return split


# ---- without a loop over the chunks: for graphs and accelerators ----


def _attend_at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor,
    memory: CausalMemory,
    divisor: Tensor | None,
    reading: Reading,
    keep: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor, CausalMemory]:
    precise = memory.key.dtype
    query, key, value, weights = (states.to(precise) for states in (query, key, value, weights))
    readable = reading.slots
    if memory.total is not None:
        totals = weights.cumsum(2) + memory.total
        memory = memory._replace(total=totals[:, :, -1:])
        divisor, readable = _divisor(totals, reading)
    logits, keys = causal_scan(query * query.shape[-1] ** -0.5, key, weights, memory.key, chunk_size=chunk_size)
    read, divided = _read_weights(logits, divisor, readable, reading)
    out, values = causal_scan(divided, weights, value, memory.value, chunk_size=chunk_size)
    return out, read, memory._replace(key=keys, value=values)


def _attend_in_a_tree(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor,
    memory: CausalMemory,
    divisor: None,
    reading: Reading,
    keep: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor, CausalMemory]:
    """The normaliser "softmax" without control flow that depends on data or length.

    Token j enters what token t reads with weight exp(s_j - z_t), where z is the logarithm of the running sum. Split at
    positions between the two, it is a product of factors of at most 1, whose underflow is harmless. This is how the
    second half of each block of 16, 32 and 64 tokens reads the first, and how each block of 64 reads all earlier ones;
    blocks of 8 are computed directly.
    """
    length, precise = query.shape[2], memory.key.dtype
    query, key, value, weights = (
        to_chunks(states.to(precise), _TREE, fill).flatten(2, 3)
        for states, fill in ((query, 0.0), (key, 0.0), (value, 0.0), (weights, -torch.inf))
    )
    query = query * query.shape[-1] ** -0.5
    # Differences of large logarithms need float64, which MPS lacks.
    weights = weights.to(torch.float32 if query.device.type == "mps" else torch.float64)
    before = memory.peak + memory.total.clamp(min=torch.finfo(precise).tiny).to(weights.dtype).log()
    log_totals = torch.cat([before, weights], dim=2).logcumsumexp(2)
    blocks, log_totals = [_Trees(weights, log_totals, precise)], log_totals[:, :, 1:]
    blocks += [_Block(weights, log_totals, _LEAF << level, precise) for level in range(_LEVELS)]
    since = (memory.peak - log_totals).to(precise).exp()
    leaves = _Leaves(weights, log_totals, precise)

    logits = torch.matmul(query, memory.key) * since + leaves.sum_slots(query, key)
    for block in blocks:
        logits = logits + block.sum_slots(query, key)
    more = {name: getattr(reading, name) for name in ("bias", "beside")}
    more = {name: None if part is None else to_chunks(part, _TREE).flatten(2, 3) for name, part in more.items()}
    read, of_slots = _read_weights(logits, None, reading.slots, reading._replace(**more))
    out = torch.matmul(of_slots * since, memory.value) + leaves.sum_tokens(of_slots, value)
    for block in blocks:
        out = out + block.sum_tokens(of_slots, value)

    peak = torch.maximum(memory.peak, weights.detach().amax(2, keepdim=True).to(precise))
    growth, written = (memory.peak - peak).exp(), (weights - peak).to(precise).exp()
    memory = CausalMemory(
        key=memory.key * growth + torch.matmul(key.transpose(-1, -2), written),
        value=memory.value * growth.transpose(-1, -2) + torch.matmul(written.transpose(-1, -2), value),
        total=memory.total * growth + written.sum(2, keepdim=True),
        peak=peak,
    )
    return first_places(out, length, dim=2), first_places(read, length, dim=2), memory


class _Leaves:
    """The leaves of the tree: all weights exp(s_j - z_t), j <= t, of each small block, (b, h, blocks, t, j, m)."""

    def __init__(self, logits: Tensor, log_totals: Tensor, precise: torch.dtype) -> None:
        logits, log_totals = self.cut(logits), self.cut(log_totals)
        later = torch.ones(_LEAF, _LEAF, dtype=torch.bool, device=logits.device).triu(1).unsqueeze(-1)
        difference = (logits.unsqueeze(-3) - log_totals.unsqueeze(-2)).to(precise)
        self.weights = difference.masked_fill(later, -torch.inf).exp()

    @staticmethod
    def cut(states: Tensor) -> Tensor:
        return states.unflatten(2, (-1, _LEAF))

    def sum_slots(self, query: Tensor, key: Tensor) -> Tensor:
        """Compute sum_j (q_t k_j) exp(s_j - z_t): (b, h, n, m)."""
        products = torch.matmul(self.cut(query), self.cut(key).transpose(-1, -2))
        return (products.unsqueeze(-1) * self.weights).sum(-2).flatten(2, 3)

    def sum_tokens(self, read: Tensor, value: Tensor) -> Tensor:
        """Compute sum_j (p_t exp(s_j - z_t)) v_j: (b, h, n, c)."""
        products = (self.cut(read).unsqueeze(-2) * self.weights).sum(-1)
        return torch.matmul(products, self.cut(value)).flatten(2, 3)


class _Block:
    """One level of the tree: in every block of 2 * `size` tokens, the second half reads the first."""

    def __init__(self, logits: Tensor, log_totals: Tensor, size: int, precise: torch.dtype) -> None:
        self.size = size
        middle = self.halves(log_totals)[0][..., -1:, :].detach()  # cancels in the product of `writes` and `reads`
        self.writes = (self.halves(logits)[0] - middle).to(precise).exp()
        self.reads = (middle - self.halves(log_totals)[1]).to(precise).exp()

    def halves(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Split (b, h, n, ...) into the first and second halves, (b, h, blocks, size, ...) each."""
        return states.unflatten(2, (-1, 2, self.size)).unbind(3)

    def join(self, second: Tensor) -> Tensor:
        """Place second halves (b, h, blocks, size, ...) in (b, h, n, ...), with zeros in the first halves."""
        return torch.stack([torch.zeros_like(second), second], dim=3).flatten(2, 4)

    def sum_slots(self, query: Tensor, key: Tensor) -> Tensor:
        """Like `_Leaves.sum_slots`, for this level."""
        state = torch.matmul(self.halves(key)[0].transpose(-1, -2), self.writes)
        return self.join(torch.matmul(self.halves(query)[1], state) * self.reads)

    def sum_tokens(self, read: Tensor, value: Tensor) -> Tensor:
        """Like `_Leaves.sum_tokens`, for this level."""
        state = torch.matmul(self.writes.transpose(-1, -2), self.halves(value)[0])
        return self.join(torch.matmul(self.halves(read)[1] * self.reads, state))


class _Trees:
    """Above the levels: every block of `_TREE` tokens reads all earlier ones."""

    def __init__(self, logits: Tensor, log_totals: Tensor, precise: torch.dtype) -> None:
        ends = log_totals[:, :, ::_TREE].detach()  # (b, h, 1 + blocks, m); cancels like a block's middle
        first, last = ends[:, :, :-1], ends[:, :, 1:]
        earlier = torch.ones(first.shape[2], first.shape[2], dtype=torch.bool, device=ends.device).tril(-1)
        between = (last.unsqueeze(2) - first.unsqueeze(3)).to(precise).masked_fill(~earlier.unsqueeze(-1), -torch.inf)
        self.between = between.exp()  # (b, h, reading block, written block, m)
        self.writes = (self.cut(logits) - last.unsqueeze(3)).to(precise).exp()
        self.reads = (first.unsqueeze(3) - self.cut(log_totals[:, :, 1:])).to(precise).exp()

    @staticmethod
    def cut(states: Tensor) -> Tensor:
        return states.unflatten(2, (-1, _TREE))

    def sum_slots(self, query: Tensor, key: Tensor) -> Tensor:
        """Like `_Leaves.sum_slots`, for earlier blocks."""
        states = torch.matmul(self.cut(key).transpose(-1, -2), self.writes)
        states = torch.einsum("bhrwm,bhwcm->bhrcm", self.between, states)
        return (torch.matmul(self.cut(query), states) * self.reads).flatten(2, 3)

    def sum_tokens(self, read: Tensor, value: Tensor) -> Tensor:
        """Like `_Leaves.sum_tokens`, for earlier blocks."""
        states = torch.matmul(self.writes.transpose(-1, -2), self.cut(value))
        states = torch.einsum("bhrwm,bhwmc->bhrmc", self.between, states)
        return torch.matmul(self.cut(read) * self.reads, states).flatten(2, 3)


_ATTENTION = {"loop": _attend_in_a_loop, "at_once": _attend_at_once, "tree": _attend_in_a_tree}
