"""Causal attention to a memory of slots, as in Luna (Ma et al. 2021, section 3.3) and ABC (Peng et al. 2022).

Token j adds its key and value to every slot with weights w_j in R^m; token t reads the slots with softmax attention,
after it and all earlier tokens have written:

    K_t = sum_{j<=t} w_j (x) k_j / N_t,  V_t = sum_{j<=t} w_j (x) v_j / N_t,  out_t = softmax(q_t K_t^T / sqrt(c)) V_t

Both running sums are causal scans (`ops/scan.py`): time and memory are linear in n, and the state has constant size.
Mechanisms differ in their weights and in the divisor N_t (`NORMALISERS`). Everything runs in float32 or wider.

Shape letters: b batch, h heads, n tokens, m slots, c head size. Every mask is boolean with True = keep.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.utils.generic import maybe_autocast

from .causal_graph import attend_in_a_tree
from .causal_slots import (
    LOWEST,
    NORMALISERS,
    CausalMemory,
    SlotOptions,
    SlotTokens,
    divide_by_total,
    empty_memory,
    read_weights,
    slot_bias,
)
from .dispatch import choose
from .scan import causal_scan, scan_chunk, scan_in_chunks, scan_token

# Largest rise of a slot's running maximum within a chunk. Exponentials are relative to the maximum at the chunk's end;
# an earlier token divides by sums smaller by up to e^40, twice in the gradient, and e^80 still fits in float32.
_LARGEST_RISE = 40.0


def attend_causal_memory(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor,
    normaliser: str,
    memory: CausalMemory | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None, CausalMemory]:
    """Write to the memory and read it, from left to right.

    Args:
        query, key, value: (b, h, n, c).
        weights: (b, h, n, m) write weights; logits for "softmax".
        normaliser: one of `NORMALISERS`.
        memory: state after earlier tokens; empty by default.
        options: fields of `SlotOptions`.

    Returns:
        The outputs (b, h, n, c) in `query`'s dtype, without the values of the keys `beside`; the read weights
        (b, h, n, m + k) after dropout, or `None` if neither needed nor of use; and the state after the last token.
    """
    own = SlotOptions(NORMALISERS[normaliser], **options)
    kind, length = own.normaliser, query.shape[2]
    if memory is None:
        memory = empty_memory(query, value, weights.shape[-1], kind)
    precise = memory.key.dtype
    if own.keep is not None:
        # Padding may hold anything, even NaN: none of it may reach a sum or a gradient.
        padding = ~own.keep[:, None, :, None]
        key, value = key.masked_fill(padding, 0.0), value.masked_fill(padding, 0.0)
        weights = weights.to(precise).masked_fill(padding, -torch.inf if kind.has_logits else 0.0)
    divisor = own.steps.to(precise)[:, None, :, None] if kind.divisor == "steps" else None
    bias, count, beside = None, None, own.beside
    if own.count_scale is not None or own.outside is not None:
        bias, count = slot_bias(weights.to(precise), own, memory.count)
    if beside is not None:
        own, beside = replace(own, need_weights=True), beside.to(precise)
    if own.slots is not None:
        own = replace(own, slots=own.slots[:, None, None, :])
    tokens = SlotTokens(query, key, value, weights, divisor, bias, beside)
    with maybe_autocast(query.device.type, enabled=False):
        if length == 1:
            out, read, memory = attend_tokens(tokens, memory, own, scan_token)
        else:
            form = choose("causal_softmax_memory" if kind.has_logits else "causal_memory", query)
            out, read, memory = _FORMS[form](tokens, memory, own)
    return out.to(query.dtype), read.to(query.dtype) if own.need_weights else None, memory._replace(count=count)


def attend_tokens(
    tokens: SlotTokens, memory: CausalMemory, options: SlotOptions, scan: Callable[..., tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor, CausalMemory]:
    """Write tokens to the memory and read it: outputs, read weights and the state after them.

    Args:
        tokens: so few that no exponential of logits underflows.
        memory: the state before them, in the precision to compute in.
        options: see `SlotOptions`; the mask of slots is broadcastable to the write weights.
        scan: `causal_scan` or a faster form for these tokens.
    """
    query, key, value, weights, divisor, bias, beside = tokens
    precise = memory.key.dtype
    query, key, value, weights = query.to(precise), key.to(precise), value.to(precise), weights.to(precise)
    if options.normaliser.has_logits:
        # The peak cancels in every quotient, so it needs no gradient.
        peak = torch.maximum(memory.peak, weights.detach().amax(-2, keepdim=True))
        growth, weights = (memory.peak - peak).exp(), (weights - peak).exp()
        memory = CausalMemory(memory.key * growth, memory.value * growth.mT, memory.total * growth, peak)
    readable = options.slots
    if memory.total is not None:
        totals = weights.cumsum(-2) + memory.total
        memory = memory._replace(total=totals[..., -1:, :].clone())  # a view would keep the totals of all tokens
        divisor, readable = divide_by_total(totals, options)
    logits, keys = scan(query * query.shape[-1] ** -0.5, key, weights, memory.key)
    read, divided = read_weights(logits, divisor, readable, bias, beside, options.dropout)
    out, values = scan(divided, weights, value, memory.value)
    return out, read, memory._replace(key=keys, value=values)


def _attend_at_once(
    tokens: SlotTokens, memory: CausalMemory, options: SlotOptions
) -> tuple[Tensor, Tensor, CausalMemory]:
    """Without a loop over the tokens, on an accelerator or in a graph."""
    return attend_tokens(tokens, memory, options, partial(causal_scan, chunk_size=options.chunk_size))


def _attend_in_a_loop(
    tokens: SlotTokens, memory: CausalMemory, options: SlotOptions
) -> tuple[Tensor, Tensor | None, CausalMemory]:
    """Chunk by chunk."""
    batch, heads, length, _ = tokens.query.shape
    sizes = [min(options.chunk_size, length - first) for first in range(0, length, options.chunk_size)]
    if options.normaliser.has_logits:
        sizes = _split_at_rises(tokens.weights.detach(), sizes, memory.peak[:, :, 0], options.keep)
    slots = None if options.slots is None else options.slots.expand(-1, heads, 1, -1).flatten(0, 1)
    # Without tensors of all tokens: what the function below holds stays in memory until the backward pass.
    shared = SlotOptions(options.normaliser, slots=slots, dropout=options.dropout, need_weights=options.need_weights)
    divisor, bias = (
        None if part is None else part.expand(batch, heads, length, -1) for part in (tokens.divisor, tokens.bias)
    )

    def attend(chunk: Sequence[Tensor | None], state: CausalMemory) -> tuple[list[Tensor], CausalMemory]:
        out, read, state = attend_tokens(SlotTokens(*chunk), state, shared, scan_chunk)
        return [out, read] if shared.need_weights else [out], state

    state = CausalMemory(*(None if part is None else part.flatten(0, 1) for part in memory))
    (out, *read), state = scan_in_chunks(attend, tokens._replace(divisor=divisor, bias=bias), state, sizes)
    memory = CausalMemory(*(None if part is None else part.unflatten(0, (-1, heads)) for part in state))
    return out, read[0] if read else None, memory


def _split_at_rises(logits: Tensor, sizes: list[int], peak: Tensor, keep: Tensor | None) -> list[int]:
    """Halve chunks until no slot's running maximum rises too far within one; only extreme logits need it.

    Logits (b, h, n, m) are minus infinity at padding; `peak` (b, h, m) is the maximum before the first token.
    """
    chunks = logits.split(sizes, 2)
    ends = torch.stack([peak, *(chunk.amax(2) for chunk in chunks)]).cummax(0).values  # (1 + chunks, b, h, m)
    first = torch.stack([chunk[:, :, 0] for chunk in chunks])
    if keep is not None:
        # Before the first real token padding reads nothing, so a row starts at its first real token.
        row, kept = torch.arange(keep.shape[0], device=keep.device), keep.split(sizes, 1)
        written = [chunk[row, :, real.int().argmax(1)] for chunk, real in zip(chunks, kept, strict=True)]
        first = torch.where(ends[:-1] > LOWEST, first, torch.stack(written))
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


_FORMS = {"loop": _attend_in_a_loop, "at_once": _attend_at_once, "tree": attend_in_a_tree}
