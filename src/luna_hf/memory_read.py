"""The memories a context is written to, and how queries read them: one softmax over any number of memories.

Every query reads all slots; a window is read only by the tokens around it. A read takes a list of memories, so that a
layer may mix slots and windows.

Shape letters: b batch, h heads, n tokens or queries, m slots, w tokens of a window, c head size. Every mask is boolean
with True = keep.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention_base import KeyMask, attend_heads
from .context import ForwardContext
from .dispatch import choose
from .functional import first_places, move_to_ranks
from .windows import (
    band_weights,
    interleave,
    join_blocks,
    key_blocks,
    key_places,
    query_blocks,
    undo_interleave,
    window_mask,
    window_weights,
)

# Number of queries per part where windows are read in parts.
_PART_QUERIES = 512


class AttentionMap(NamedTuple):
    """Attention weights for a probe."""

    weights: Tensor  # (b, h, q, k), summing to one over the keys in use
    queries: Tensor  # (b, q) boolean, True for queries that are not padding
    keys: Tensor  # (b, k), (b, 1 or h, k) or (b, h, q, k) boolean, True for keys in use


class Slots(NamedTuple):
    """Slot states for a probe."""

    states: Tensor  # (b, l, d), or per head (b, h, l, c)
    used: Tensor  # (b, l) or (b, h, l) boolean, True for slots that are not empty


Views = dict[str, AttentionMap | Slots]


# Keys, values and mask (b, 1 or h, 1 or q, k) of a read; no mask lets everything be read.
Parts = tuple[Tensor, Tensor, Tensor | None]


class SlotMemory(NamedTuple):
    """Keys and values of slots, which every query may read."""

    key: Tensor  # (b, h, m, c)
    value: Tensor  # (b, h, m, c)
    filled: KeyMask | Tensor | None = None  # slots that may be read; (b, 1 or h, m) if a tensor; `None` for all
    bias: Tensor | None = None  # (b, h, m) added to the logits

    def in_blocks(self, block_rows: int, part: slice = slice(None)) -> Parts:
        """Repeat keys and values (blocks, h, m, c) and mask (blocks, 1 or h, 1, m) for some of `block_rows` blocks."""
        batch, mask = self.key.shape[0], self.mask()
        # Not `repeat_interleave`, which would need one graph for a single block and another for several.
        rows = (torch.arange(block_rows, device=self.key.device) // (block_rows // batch))[part]
        key, value = (states.index_select(0, rows) for states in (self.key, self.value))
        return key, value, None if mask is None else mask.expand(batch, -1, -1, -1).index_select(0, rows)

    def mask(self) -> Tensor | None:
        """Return the mask of a read, (b, 1 or h, 1, m): boolean, or with a bias additive; `None` if it does nothing."""
        filled = self.filled_slots()
        if self.bias is None:
            return filled if filled is None else filled.unsqueeze(-2)
        return (self.bias if filled is None else _added(filled, self.bias)).unsqueeze(-2)

    def filled_slots(self) -> Tensor | None:
        """Return the mask as (b, 1 or h, m), or `None` if all slots may be read."""
        if isinstance(self.filled, KeyMask):
            return self.filled.keep[:, None, : self.key.shape[2]]
        return self.filled

    def views(self, weights: Tensor, tokens: Tensor) -> Views:
        """Return what a probe can inspect, given the read weights (b, h, n, m) and the queries' padding mask (b, n)."""
        filled, each = self.filled_slots(), self.key[..., 0]  # (b, h, m)
        used = torch.ones_like(each, dtype=torch.bool) if filled is None else filled.expand_as(each)
        return {"read_entropy": AttentionMap(weights, tokens, used), "slot_similarity": Slots(self.key, used)}


class WindowMemory(NamedTuple):
    """Keys and values of tokens, each read by the queries around it, ordered with real tokens before padding.

    All windows of one read share the same order.
    """

    key: Tensor  # (b, h, earlier + n, c)
    value: Tensor
    real: Tensor | None  # (b, earlier + n) padding mask in this order; `None` if nothing is padded
    window: int  # number of tokens that a query may read, including itself
    earlier: int = 0  # number of tokens in front without a query, from an earlier pass
    ranks: Tensor | None = None  # (b, n) ranks of the tokens; `None` if already in order
    keep: Tensor | None = None  # (b, n) padding mask in the input's order
    ordered: bool = False  # whether keys and values are already in order, even if the queries are not
    causal: bool = False
    dilated: bool = False  # whether to read only every other token
    bias: Tensor | None = None  # (w,) added to the logits of a window's tokens, from the first to the last

    def views(self, weights: Tensor, tokens: Tensor) -> Views:
        """Return what a probe can inspect; a window's positions beyond the text have no weight."""
        return {"attention_entropy": AttentionMap(weights, tokens, weights > 0)}


Memories = Sequence[SlotMemory | WindowMemory]


def tokens_in_window(
    key: Tensor, value: Tensor, window: int, context: ForwardContext, dilated: bool = False
) -> WindowMemory:
    """Keep an encoder's keys and values (b, h, n, c), to be read within a window or a dilated window."""
    if context.keep is None:
        return WindowMemory(key, value, None, window, dilated=dilated)
    real = torch.arange(key.shape[2], device=key.device) < context.lengths
    return WindowMemory(key, value, real, window, ranks=context.ranks, keep=context.keep, dilated=dilated)


def _added(keep: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """Turn a boolean mask into an additive one that includes a bias."""
    bias = torch.as_tensor(bias, device=keep.device)
    # Finite, because a row of minus infinity alone would be NaN.
    return torch.where(keep, bias, torch.finfo(bias.dtype).min)


def view_parts(memories: Memories, weights: Tensor, tokens: Tensor) -> Views:
    """Return what a probe can inspect of each memory, given the weights (b, h, n, keys) of reading them together."""
    sizes = [memory.window if isinstance(memory, WindowMemory) else memory.key.shape[2] for memory in memories]
    views: Views = {}
    for memory, part in zip(memories, weights.split(sizes, -1), strict=True):
        total = part.sum(-1, keepdim=True)
        share = part / total.clamp(min=torch.finfo(part.dtype).tiny) if len(sizes) > 1 else part
        views |= memory.views(share, tokens)
    return views


def read_memories(
    module: nn.Module, query: Tensor, memories: Memories, options: dict[str, Any] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Softmax attention to several memories at once, through transformers' attention interface.

    Args:
        module: the calling module, as for `attend_heads`.
        query: (b, h, n, c); if a memory is a window, the queries of its tokens.
        memories: the memories to read in one softmax.
        options: keyword arguments for the attention backend.

    Returns:
        The concatenated heads (b, n, d), and with eager attention the weights (b, h, n, keys) over the slots or window
        positions of each memory in turn.

    Raises:
        ValueError: The number of queries differs from the number of tokens in a window.
    """
    options = options or {}
    if not any(isinstance(memory, WindowMemory) for memory in memories):
        key, value, mask = _join_slots(memories)
        return attend_heads(module, query, key, value, mask, **options)
    return _read_in_blocks(module, query, memories, options)


def _join_slots(memories: Sequence[SlotMemory]) -> tuple[Tensor, Tensor, KeyMask | Tensor | None]:
    if len(memories) == 1:
        (memory,) = memories
        mask = memory.filled if isinstance(memory.filled, KeyMask) and memory.bias is None else memory.mask()
        return memory.key, memory.value, mask
    return _side_by_side([memory.in_blocks(memory.key.shape[0]) for memory in memories])


def _side_by_side(parts: Sequence[Parts]) -> Parts:
    """Concatenate what to read of several memories. The masks are boolean; if one is additive, so is the result."""
    if len(parts) == 1:
        return parts[0]
    keys, values, masks = zip(*parts, strict=True)
    key, value = torch.cat(keys, 2), torch.cat(values, 2)
    if all(mask is None for mask in masks):
        return key, value, None
    shape = torch.broadcast_shapes(*(mask.shape[:-1] for mask in masks if mask is not None))
    masks = [key.new_ones((), dtype=torch.bool) if mask is None else mask for mask in masks]
    if any(mask.is_floating_point() for mask in masks):
        masks = [m if m.is_floating_point() else _added(m, key.new_zeros(())) for m in masks]
    return key, value, torch.cat([m.expand(*shape, k.shape[2]) for m, k in zip(masks, keys, strict=True)], dim=-1)


def _read_in_blocks(
    module: nn.Module, query: Tensor, memories: Memories, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    windows = [memory for memory in memories if isinstance(memory, WindowMemory)]
    order, block = windows[0], max(memory.window for memory in windows)
    query = _put_in_order(query, order)
    rows, places = query.shape[0], query.shape[2]
    query = query_blocks(query, block)
    blocks = [_WindowBlocks.of(memory, block) if isinstance(memory, WindowMemory) else memory for memory in memories]

    def read(part: slice) -> tuple[Tensor, Tensor | None]:
        parts = [memory.in_blocks(query.shape[0], part) for memory in blocks]
        output, weights = attend_heads(module, query[part], *_side_by_side(parts), **options)
        if weights is None:
            return output, None
        pieces = zip(memories, weights.split([key.shape[2] for key, _, _ in parts], -1), strict=True)
        pieces = [window_weights(w, m.window) if isinstance(m, WindowMemory) else w for m, w in pieces]
        return output, torch.cat(pieces, -1)

    if choose("window_blocks", query, module.training) == "whole":
        output, weights = read(slice(None))
    else:
        size = max(_PART_QUERIES // block, 1)
        reads = [read(slice(first, first + size)) for first in range(0, query.shape[0], size)]
        output, weights = (None if part[0] is None else torch.cat(part) for part in zip(*reads, strict=True))
    if weights is not None:
        weights = _put_back(join_blocks(weights.transpose(1, 2), rows, places), order).transpose(1, 2)
    return _put_back(join_blocks(output, rows, places), order), weights


def window_logits(query: Tensor, memory: SlotMemory | WindowMemory, window: int) -> Tensor:
    """Compute the logits of a causal window alone, to be read beside something else; see `read_window`.

    Args:
        query: (b, h, n, c).
        memory: from `causal_window.write_window`, of w tokens.
        window: number of tokens to read, the latest of the w; the others get the lowest logit.

    Returns:
        (b, h, n, w), the query's own token last.
    """
    query = query * query.shape[-1] ** -0.5
    if isinstance(memory, SlotMemory):
        logits, keep = torch.matmul(query, memory.key.transpose(-1, -2)), memory.mask()
        logits = logits.masked_fill(~keep, torch.finfo(logits.dtype).min)
    else:
        states = _put_in_order(query, memory)
        rows, places = states.shape[0], states.shape[2]
        key, _, mask = _WindowBlocks.of(memory, memory.window).in_blocks()
        logits = torch.matmul(query_blocks(states, memory.window), key.transpose(-1, -2))
        logits = window_weights(logits.masked_fill(~mask, torch.finfo(logits.dtype).min), memory.window)
        logits = _put_back(join_blocks(logits.transpose(1, 2), rows, places), memory).transpose(1, 2)
    unread = torch.arange(logits.shape[-1], 0, -1, device=logits.device) > window
    return logits.masked_fill(unread, torch.finfo(logits.dtype).min)


def read_window(weights: Tensor, memory: SlotMemory | WindowMemory) -> Tensor:
    """Sum a causal window's values with weights (b, h, n, w) for the keys of `window_logits`: (b, h, n, c)."""
    if isinstance(memory, SlotMemory):
        return torch.matmul(weights, memory.value)
    weights = _put_in_order(weights, memory)
    rows, places = weights.shape[0], weights.shape[2]
    _, value, _ = _WindowBlocks.of(memory, memory.window).in_blocks()
    weights = band_weights(query_blocks(weights, memory.window), value.shape[2])
    states = join_blocks(torch.matmul(weights, value).transpose(1, 2), rows, places)
    return _put_back(states, memory).transpose(1, 2)


def _put_in_order(query: Tensor, order: WindowMemory) -> Tensor:
    """Move queries (b, h, n, c) to the positions of their tokens in the window, (b or 2 b, h, places, c)."""
    tokens = order.key.shape[2] - order.earlier
    if tokens != query.shape[2]:
        raise ValueError(
            f"A window can be read only by the {tokens} tokens it was written from, but there are {query.shape[2]} "
            "queries; for cross-attention, use a memory with slots."
        )
    query = move_to_ranks(query, order.ranks, order.keep)
    query = F.pad(query, (0, 0, order.earlier, 0)) if order.earlier else query
    return _dilate(query) if order.dilated else query


def _put_back(states: Tensor, order: WindowMemory) -> Tensor:
    """Undo `_put_in_order`: (b or 2 b, places, ...) to (b, n, ...)."""
    if order.dilated:
        states = first_places(undo_interleave(states), order.key.shape[2])
    states = states[:, order.earlier :] if order.earlier else states
    if order.ranks is None:
        return states
    # Whole rows of a (b * places, ...) table: faster than `gather`, which takes single entries.
    rows, places = states.shape[:2]
    found = order.ranks + places * torch.arange(rows, device=states.device)[:, None]
    return states.flatten(0, 1).index_select(0, found.flatten()).view(*found.shape, *states.shape[2:])


class _WindowBlocks(NamedTuple):
    """A window's keys and values, prepared to be gathered for blocks of queries."""

    key: Tensor  # (b * n, h, c)
    value: Tensor  # (b * n, h, c)
    real: Tensor | None  # (b * n,)
    places: Tensor  # (b * blocks, s + w - 1), of `key_places`
    inside: Tensor  # (b * blocks, s + w - 1)
    block: int  # s
    bias: Tensor | None  # (1, 1, s, s + w - 1)

    @classmethod
    def of(cls, memory: WindowMemory, block: int) -> "_WindowBlocks":
        """Put keys and values in order."""
        key, value, real = memory.key, memory.value, memory.real
        if not memory.ordered:
            key, value = (move_to_ranks(states, memory.ranks, memory.keep) for states in (key, value))
        if memory.dilated:
            if real is None and _places_to_add(key) is not None:  # the added positions must be masked
                real = torch.ones_like(key[:, 0, :, 0], dtype=torch.bool)
            key, value = _dilate(key), _dilate(value)
            real = None if real is None else _dilate(real[:, None, :, None])[:, 0, :, 0]
        rows, _, length, _ = key.shape
        places, inside = key_places(rows, length, memory.window, block, key.device, memory.causal)
        key, value = (states.transpose(1, 2).flatten(0, 1) for states in (key, value))
        bias = None
        if memory.bias is not None:
            bias = band_weights(memory.bias.expand(1, 1, block, memory.window), block + memory.window - 1)
        return cls(key, value, None if real is None else real.flatten(), places, inside, block, bias)

    def in_blocks(self, block_rows: int | None = None, part: slice = slice(None)) -> Parts:
        """Gather keys, values and mask for some blocks; their number is only for the signature of `SlotMemory`'s."""
        places, readable = self.places[part], self.inside[part]
        if self.real is not None:
            readable = readable & key_blocks(self.real, places)
        key, value = (key_blocks(states, places).transpose(1, 2) for states in (self.key, self.value))
        mask = window_mask(readable, self.block)
        return key, value, mask if self.bias is None else _added(mask, self.bias)


def _dilate(states: Tensor) -> Tensor:
    """Split even and odd positions into separate rows, zero-padded if needed: (b, h, n, c) to (2 b, h, n / 2, c)."""
    extra, states = _places_to_add(states), states.transpose(1, 2)
    return interleave(states if extra is None else F.pad(states, (0, 0, 0, 0, 0, extra))).transpose(1, 2)


def _places_to_add(states: Tensor) -> int | None:
    """Number of positions to add to (b, h, n, c) to make n even; `None` for none."""
    length = states.shape[2]
    if choose("dilation", states) == "least":
        return length % 2 or None
    return 2 * ((length + 3) // 2) - length  # for even and odd lengths, with at least two positions of each parity
