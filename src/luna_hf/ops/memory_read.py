"""The memories a context is written to, and how queries read them: one softmax over any number of memories.

Every query reads all slots; a window is read only by the tokens around it. A read takes a list of memories, so that a
layer may mix slots and windows.

Shape letters: b batch, h heads, n tokens or queries, m slots, w tokens of a window, c head size. Every mask is
boolean with True = keep.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils import is_tracing

from .attention import KeyMask, attend_heads
from .context import ForwardContext
from .dispatch import choose
from .tokens import first_places, move_to_ranks
from .window import (
    band_weights,
    interleave,
    join_blocks,
    key_blocks,
    key_places,
    query_blocks,
    undo_interleave,
    window_mask,
    window_reach,
    window_weights,
)

# Where windows are read in parts: the number of queries of a part, and at most of a block. A shorter block reads fewer
# keys beyond its windows, but copies more.
_PART_QUERIES, _PART_BLOCK = 512, 64

# Number of tokens beyond a window up to which a single block reads a whole row.
_SHORT_ROW = 128


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
    """Keys and values of slots, or of single tokens, which every query may read."""

    key: Tensor  # (b, h, m, c)
    value: Tensor  # (b, h, m, c)
    filled: KeyMask | Tensor | None = None  # slots that may be read; (b, 1 or h, m) if a tensor; `None` for all
    bias: Tensor | None = None  # (b, h, m) added to the logits
    # (b, 1 or h, 1 or n, 1 or m), also added; beside a window, its queries are ordered as the window's tokens.
    query_bias: Tensor | None = None

    def rows(self) -> tuple[Tensor, Tensor]:
        """Return keys and values as rows, (b * m, h, c)."""
        return _as_rows(self.key), _as_rows(self.value)

    def places(self, block_rows: int) -> Tensor:
        """Find the rows that each of `block_rows` blocks of queries reads, (blocks, m)."""
        batch, slots = self.key.shape[0], self.key.shape[2]
        return _rows_of_blocks(block_rows, batch, self.key.device)[:, None] * slots + torch.arange(
            slots, device=self.key.device
        )

    @property
    def is_biased(self) -> bool:
        """Whether the mask of a read is additive."""
        return self.bias is not None or self.query_bias is not None

    def mask_blocks(self, blocks: "_Blocks", part: slice) -> Tensor | None:
        """Return the mask of some blocks of queries, (blocks, 1 or h, 1 or s, m): boolean, or with a bias additive."""
        batch, rows = self.key.shape[0], _rows_of_blocks(blocks.number, self.key.shape[0], self.key.device)[part]
        mask = _key_mask(self.filled_slots(), self.bias)
        mask = None if mask is None else mask.unsqueeze(-2).expand(batch, -1, -1, -1).index_select(0, rows)
        if self.query_bias is None:
            return mask
        bias = self.query_bias.expand(batch, -1, -1, -1)
        bias = bias.index_select(0, rows) if bias.shape[2] == 1 else query_blocks(bias, blocks.size)[part]
        return _sum_of_masks(mask, bias).expand(-1, -1, -1, self.key.shape[2])

    def fill_mask(self, blocks: "_Blocks", part: slice, buffer: Tensor) -> None:
        """Write the mask of some blocks, made additive, to a buffer (blocks, h, s, m)."""
        mask = self.mask_blocks(blocks, part)
        zero = buffer.new_zeros(())
        buffer.copy_(zero if mask is None else mask if mask.is_floating_point() else _added(mask, zero))

    def mask(self) -> Tensor | None:
        """Return the mask of a read, (b, 1 or h, 1, m): boolean, or with a bias additive; `None` if it does nothing."""
        mask = _key_mask(self.filled_slots(), self.bias)
        mask = None if mask is None else mask.unsqueeze(-2)
        return mask if self.query_bias is None else _sum_of_masks(mask, self.query_bias)

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
    elsewhere: Tensor | None = None  # (b, 1 or h, n) tokens that another part of the same read holds

    def views(self, weights: Tensor, tokens: Tensor) -> Views:
        """Return what a probe can inspect; a window's positions beyond the text have no weight."""
        return {"attention_entropy": AttentionMap(weights, tokens, weights > 0)}


Memories = Sequence[SlotMemory | WindowMemory]


def tokens_in_window(
    key: Tensor,
    value: Tensor,
    window: int,
    context: ForwardContext,
    dilated: bool = False,
    elsewhere: Tensor | None = None,
) -> WindowMemory:
    """Keep an encoder's keys and values (b, h, n, c), to be read within a window or a dilated window."""
    own = {"dilated": dilated, "elsewhere": elsewhere}
    if context.keep is None:
        return WindowMemory(key, value, None, window, **own)
    real = torch.arange(key.shape[2], device=key.device) < context.lengths
    return WindowMemory(key, value, real, window, ranks=context.ranks, keep=context.keep, **own)


def _as_rows(states: Tensor) -> Tensor:
    """Flatten (b, h, n, c) to (b * n, h, c)."""
    return states.transpose(1, 2).flatten(0, 1)


def _rows_of_blocks(block_rows: int, batch: int, device: torch.device) -> Tensor:
    """Return the row of the batch that each block of queries belongs to, (blocks,)."""
    # Not `repeat_interleave`, which would need one graph for a single block and another for several.
    return torch.arange(block_rows, device=device) // (block_rows // batch)


def _key_mask(filled: Tensor | None, bias: Tensor | None) -> Tensor | None:
    if filled is None or bias is None:
        return filled if bias is None else bias
    return _added(filled, bias)


def _sum_of_masks(mask: Tensor | None, bias: Tensor) -> Tensor:
    """Add a bias to a mask that is boolean, additive or missing."""
    if mask is None:
        return bias
    return _added(mask, bias) if mask.dtype == torch.bool else mask + bias


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
    options, first = options or {}, memories[0]
    if len(memories) == 1 and isinstance(first, SlotMemory):
        plain = isinstance(first.filled, KeyMask | None) and first.bias is None and first.query_bias is None
        return attend_heads(module, query, first.key, first.value, first.filled if plain else first.mask(), **options)
    for memory in memories:
        if isinstance(memory, WindowMemory):
            return _read_in_blocks(module, query, memories, options)
    return attend_heads(module, query, *_join_slots(memories), **options)


def _join_slots(memories: Sequence[SlotMemory]) -> tuple[Tensor, Tensor, Tensor | None]:
    key, value = (torch.cat([memory[side] for memory in memories], 2) for side in (0, 1))
    return key, value, _side_by_side([memory.mask() for memory in memories], [m.key.shape[2] for m in memories], key)


def _side_by_side(masks: Sequence[Tensor | None], sizes: Sequence[int], like: Tensor) -> Tensor | None:
    """Concatenate the masks of several memories' keys. They are boolean; if one is additive, so is the result."""
    if len(masks) == 1 or all(mask is None for mask in masks):
        return masks[0]
    shape = torch.broadcast_shapes(*(mask.shape[:-1] for mask in masks if mask is not None))
    masks = [like.new_ones((), dtype=torch.bool) if mask is None else mask for mask in masks]
    if any(mask.is_floating_point() for mask in masks):
        masks = [m if m.is_floating_point() else _added(m, like.new_zeros(())) for m in masks]
    return torch.cat([mask.expand(*shape, size) for mask, size in zip(masks, sizes, strict=True)], dim=-1)


def _read_in_blocks(
    module: nn.Module, query: Tensor, memories: Memories, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    windows = [memory for memory in memories if isinstance(memory, WindowMemory)]
    order, block = windows[0], max(memory.window for memory in windows)
    in_parts = choose("window_blocks", query, module.training) == "parts"
    query = _put_in_order(query, order)
    rows, places = query.shape[0], query.shape[2]
    # Blocks of a short row would mostly reach beyond it. Eager attention returns weights by window.
    is_short = not is_tracing(query) and module.config._attn_implementation != "eager" and places <= block + _SHORT_ROW
    is_short = is_short and all(memory.bias is None and not memory.causal for memory in windows)
    if is_short:
        block = places
    elif in_parts:
        block = min(block, _PART_BLOCK)
    query = query_blocks(query, block)
    blocks = _Blocks.of(memories, block, query.shape[0], is_short)

    def read(part: slice) -> tuple[Tensor, Tensor | None]:
        mask = blocks.mask(part) if buffer is None else blocks.fill_mask(part, buffer)
        output, weights = attend_heads(module, query[part], *blocks.keys(part), mask, **options)
        return output, None if weights is None else blocks.weights(weights)

    size, buffer = max(_PART_QUERIES // block, 1), None
    if in_parts and blocks.additive:
        shape = min(size, blocks.number), query.shape[1], block, blocks.places.shape[1]
        buffer = torch.empty(shape, dtype=blocks.key.dtype, device=query.device)
    if in_parts:
        reads = [read(slice(first, first + size)) for first in range(0, query.shape[0], size)]
        output, weights = (None if part[0] is None else torch.cat(part) for part in zip(*reads, strict=True))
    else:
        output, weights = read(slice(None))
    if weights is not None:
        weights = _put_back(join_blocks(weights.transpose(1, 2), rows, places), order).transpose(1, 2)
    return _put_back(join_blocks(output, rows, places), order), weights


class _Blocks:
    """What blocks of queries read of several memories: one table of keys and values, and the rows of each block."""

    def __init__(self, memories: Sequence["SlotMemory | _WindowBlocks"], block: int, block_rows: int) -> None:
        self.memories, self.size, self.number = memories, block, block_rows
        keys, values = zip(*(memory.rows() for memory in memories), strict=True)
        self.key, self.value = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in (keys, values))
        starts = itertools.accumulate((key.shape[0] for key in keys[:-1]), initial=0)
        places = [memory.places(block_rows) + start for memory, start in zip(memories, starts, strict=True)]
        self.sizes = [found.shape[1] for found in places]
        self.additive = any(memory.is_biased for memory in memories)
        self.places = torch.cat(places, 1)

    @classmethod
    def of(cls, memories: Memories, block: int, block_rows: int, is_row: bool = False) -> "_Blocks":
        """Put windows in order; see `_WindowBlocks.of`."""
        ordered = [
            _WindowBlocks.of(memory, block, is_row) if isinstance(memory, WindowMemory) else memory
            for memory in memories
        ]
        return cls(ordered, block, block_rows)

    def keys(self, part: slice) -> tuple[Tensor, Tensor]:
        """Gather keys and values of some blocks, (blocks, h, keys, c)."""
        key, value = (key_blocks(rows, self.places[part]).transpose(1, 2) for rows in (self.key, self.value))
        return key, value

    def mask(self, part: slice) -> Tensor | None:
        """Return the mask of some blocks, (blocks, 1 or h, 1 or s, keys)."""
        return _side_by_side([memory.mask_blocks(self, part) for memory in self.memories], self.sizes, self.key)

    def fill_mask(self, part: slice, buffer: Tensor) -> Tensor:
        """Like `mask`, if it is additive, in a buffer (blocks, h, s, keys): new memory for each part would be slow."""
        buffer, first = buffer[: len(self.places[part])], 0
        for memory, size in zip(self.memories, self.sizes, strict=True):
            memory.fill_mask(self, part, buffer[..., first : first + size])
            first += size
        return buffer

    def weights(self, weights: Tensor) -> Tensor:
        """Leave out the weights of keys outside the windows, which are zero: (blocks, h, s, slots and windows)."""
        pieces = zip(self.memories, weights.split(self.sizes, -1), strict=True)
        return torch.cat(
            [memory.window_weights(w) if isinstance(memory, _WindowBlocks) else w for memory, w in pieces], -1
        )


def window_logits(query: Tensor, memory: SlotMemory | WindowMemory, window: int) -> Tensor:
    """Compute the logits of a causal window alone, to be read beside something else; see `read_window`.

    Args:
        query: (b, h, n, c).
        memory: from `write_window`, of w tokens.
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
    readable: Tensor | None  # (b * n, 1 or h)
    reached: Tensor  # (b * blocks, s + w - 1), of `key_places`; (b, n) where a block is a row
    inside: Tensor  # like `reached`
    band: Tensor  # (1, 1, s, s + w - 1) boolean, the window of each query
    bias: Tensor | None  # (1, 1, s, s + w - 1)
    window: int  # w

    @property
    def is_biased(self) -> bool:
        """Whether the mask of a read is additive."""
        return self.bias is not None

    @classmethod
    def of(cls, memory: WindowMemory, block: int, is_row: bool = False) -> "_WindowBlocks":
        """Put keys and values in order; with `is_row`, a block is a whole row, and reaches nothing beyond it."""
        key, value, readable = memory.key, memory.value, memory.real
        if not memory.ordered:
            key, value = (move_to_ranks(states, memory.ranks, memory.keep) for states in (key, value))
        readable = None if readable is None else readable[:, None]
        if memory.elsewhere is not None:
            elsewhere = memory.elsewhere
            if memory.keep is not None:
                moved = move_to_ranks(elsewhere.unsqueeze(-1).to(key.dtype), memory.ranks, memory.keep)
                elsewhere = moved.squeeze(-1) != 0
            readable = ~elsewhere if readable is None else readable & ~elsewhere
        if memory.dilated:
            if readable is None and _places_to_add(key) is not None:  # the added positions must be masked
                readable = torch.ones_like(key[:, :1, :, 0], dtype=torch.bool)
            key, value = _dilate(key), _dilate(value)
            readable = None if readable is None else _dilate(readable.unsqueeze(-1)).squeeze(-1)
        rows, _, length, _ = key.shape
        reached, inside = key_places(rows, length, memory.window, block, key.device, memory.causal)
        band = window_mask(torch.ones_like(inside[:1]).unsqueeze(1), block)
        readable = None if readable is None else readable.expand(rows, -1, -1).transpose(1, 2).flatten(0, 1)
        bias = None
        if memory.bias is not None:
            bias = band_weights(memory.bias.expand(1, 1, block, memory.window), block + memory.window - 1)
        if is_row:
            first = window_reach(memory.window, memory.causal)[0]
            reached, inside, band = (part[..., first : first + length] for part in (reached, inside, band))
            bias = None if bias is None else bias[..., first : first + length]
        return cls(_as_rows(key), _as_rows(value), readable, reached, inside, band, bias, memory.window)

    def rows(self) -> tuple[Tensor, Tensor]:
        """Return keys and values, (b * n, h, c)."""
        return self.key, self.value

    def places(self, block_rows: int) -> Tensor:
        """Return the rows that each block of queries reaches, (blocks, s + w - 1)."""
        return self.reached

    def mask_blocks(self, blocks: "_Blocks", part: slice) -> Tensor:
        """Return the mask of some blocks, (blocks, 1 or h, s, s + w - 1): boolean, or additive if the others are."""
        if not blocks.additive and self.bias is None:
            return self.readable_keys(part).unsqueeze(-2) & self.band
        return torch.add(*self.mask_terms(part))

    def fill_mask(self, blocks: "_Blocks", part: slice, buffer: Tensor) -> None:
        """Write the mask of some blocks, made additive, to a buffer (blocks, h, s, s + w - 1)."""
        band, keys = self.mask_terms(part)
        torch.add(band.expand(buffer.shape), keys, out=buffer)

    def readable_keys(self, part: slice) -> Tensor:
        """Return which keys some blocks may read, (blocks, 1 or h, s + w - 1)."""
        inside = self.inside[part].unsqueeze(1)
        if self.readable is None:
            return inside
        return inside & key_blocks(self.readable, self.reached[part]).transpose(1, 2)

    def mask_terms(self, part: slice) -> tuple[Tensor, Tensor]:
        """Return the sum of an additive mask: (1, 1, s, keys) and (blocks, 1 or h, 1, keys).

        One addition is faster than combining boolean masks of every head.
        """
        readable, zero = self.readable_keys(part), self.key.new_zeros(())
        unread = torch.finfo(self.key.dtype).min / 2
        band = torch.where(self.band, zero if self.bias is None else self.bias, unread)
        return band, torch.where(readable, zero, unread).unsqueeze(-2)

    def in_blocks(self) -> Parts:
        """Gather keys, values and mask of all blocks."""
        key, value = (key_blocks(states, self.reached).transpose(1, 2) for states in (self.key, self.value))
        return key, value, self.readable_keys(slice(None)).unsqueeze(-2) & self.band

    def window_weights(self, weights: Tensor) -> Tensor:
        """Select the weights of each query's window, (blocks, h, s, w)."""
        return window_weights(weights, self.window)


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
