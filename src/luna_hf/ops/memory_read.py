"""The memories that queries read: slots, windows and single tokens, all in one softmax.

Every query reads all slots; a window is read only by the tokens around it. A read takes a list of memories, so that a
layer may mix slots and windows.

Shape letters: b batch, h heads, n tokens, q queries, m slots, w tokens of a window, s queries of a block, c head
size. Every mask is boolean with True = keep.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils import is_tracing

from .attention import KeyMask, attend_heads
from .context import ForwardContext
from .dispatch import choose
from .exact_tokens import in_order
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

# Number of tokens beyond a window up to which its queries read the whole row under a mask, without blocks.
_SHORT_ROW = 128


class SlotMemory(NamedTuple):
    """Keys and values of slots, or of single tokens, which every query may read."""

    key: Tensor  # (b, h, m, c)
    value: Tensor  # (b, h, m, c)
    filled: KeyMask | Tensor | None = None  # slots that may be read; (b, 1 or h, m) if a tensor; `None` for all
    bias: Tensor | None = None  # (b, h, m) added to the logits
    # (b, 1 or h, 1 or q, 1 or m), also added, or a mask; beside a window, its queries are ordered as the window's.
    query_bias: Tensor | None = None

    def filled_slots(self) -> Tensor | None:
        """Return the mask as (b, 1 or h, m), or `None` if all slots may be read."""
        if isinstance(self.filled, KeyMask):
            return self.filled.keep[:, None, : self.key.shape[2]]
        return self.filled

    def mask_terms(self) -> list[Tensor]:
        """Return what the mask of a read is made of, each (b, 1 or h, 1 or q, 1 or m): masks, and what is added."""
        of_slots = (self.filled_slots(), self.bias)
        terms = [None if term is None else term.unsqueeze(2) for term in of_slots]
        return [term for term in (*terms, self.query_bias) if term is not None]

    def mask(self) -> Tensor | None:
        """Return the mask of a read, (b, 1 or h, 1 or q, m): boolean, or with a bias additive; `None` for no mask."""
        return _join_masks([self.mask_terms()], [self.key.shape[2]], self.key)


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
    first, options = memories[0], options or {}
    if len(memories) == 1 and isinstance(first, SlotMemory):
        plain = isinstance(first.filled, KeyMask | None) and first.bias is None and first.query_bias is None
        return attend_heads(module, query, first.key, first.value, first.filled if plain else first.mask(), **options)
    windows = [memory for memory in memories if isinstance(memory, WindowMemory)]
    if not windows:
        return _read_slots(module, query, memories, options)
    query, widest = _put_in_order(query, windows[0]), max(memory.window for memory in windows)
    # Eager attention returns weights by window.
    is_short = not is_tracing(query) and module.config._attn_implementation != "eager"
    is_short = is_short and query.shape[2] <= widest + _SHORT_ROW
    if is_short and all(memory.bias is None and not (memory.causal or memory.dilated) for memory in windows):
        memories = [_whole_row(memory) if isinstance(memory, WindowMemory) else memory for memory in memories]
        output, weights = _read_slots(module, query, memories, options)
    else:
        output, weights = _read_blocks(module, query, memories, widest, options)
    weights = None if weights is None else _put_back(weights.transpose(1, 2), windows[0]).transpose(1, 2)
    return _put_back(output, windows[0]), weights


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
        part = _window_in_blocks(memory, memory.window)
        logits = torch.matmul(query_blocks(states, memory.window), part.gather(part.key).transpose(-1, -2))
        mask = _join_masks([part.terms], [logits.shape[-1]], logits)
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
    part = _window_in_blocks(memory, memory.window)
    value = part.gather(part.value)
    weights = band_weights(query_blocks(weights, memory.window), value.shape[2])
    states = join_blocks(torch.matmul(weights, value).transpose(1, 2), rows, places)
    return _put_back(states, memory).transpose(1, 2)


# ---- masks ----


def _join_masks(terms: Sequence[list[Tensor]], sizes: Sequence[int], like: Tensor) -> Tensor | None:
    """Join the mask's terms of several memories, and put the masks of their m keys (`sizes`) side by side.

    The result is boolean, or additive if a term is; `None` if there are no terms.
    """
    if not any(terms):
        return None
    if _is_additive(terms):
        masks = [reduce(torch.add, _added(own, like)) for own in terms]
    else:
        every = like.new_ones(1, 1, 1, 1, dtype=torch.bool)
        masks = [reduce(torch.logical_and, own or [every]) for own in terms]
    shape = torch.broadcast_shapes(*(mask.shape[:-1] for mask in masks))
    masks = [mask.expand(*shape, size) for mask, size in zip(masks, sizes, strict=True)]
    return masks[0] if len(masks) == 1 else torch.cat(masks, dim=-1)


def _is_additive(terms: Sequence[list[Tensor]]) -> bool:
    return any(term.is_floating_point() for own in terms for term in own)


def _added(terms: list[Tensor], like: Tensor) -> list[Tensor]:
    """Turn boolean terms into what is added to logits. Finite in sum, because a row of minus infinity would be NaN."""
    zero, unread = like.new_zeros(()), torch.finfo(like.dtype).min / 2
    added = [torch.where(term, zero, unread) if term.dtype == torch.bool else term for term in terms]
    return added or [zero.view(1, 1, 1, 1)]


# ---- reading slots, or short rows ----


def _read_slots(
    module: nn.Module, query: Tensor, memories: Sequence[SlotMemory], options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    key, value = (torch.cat([memory[side] for memory in memories], 2) for side in (0, 1))
    sizes = [memory.key.shape[2] for memory in memories]
    mask = _join_masks([memory.mask_terms() for memory in memories], sizes, key)
    return attend_heads(module, query, key, value, mask, **options)


def _whole_row(memory: WindowMemory) -> SlotMemory:
    """Let the ordered queries of a short row read the whole row, under the mask of their windows."""
    key, value, readable = _ordered_tokens(memory)
    place, (before, after) = torch.arange(key.shape[2], device=key.device), window_reach(memory.window)
    offset = place - place[:, None]
    return SlotMemory(key, value, readable, query_bias=((offset >= -before) & (offset <= after))[None, None])


# ---- reading windows in blocks ----


class _BlockPart(NamedTuple):
    """A memory as a table of keys and values, and which of them each block of queries reads."""

    key: Tensor  # (rows, h, c)
    value: Tensor  # (rows, h, c)
    places: Tensor  # (blocks, k) rows that a block reads
    terms: list[Tensor]  # of the mask, each (1 or blocks, 1 or h, 1 or s, 1 or k)

    def gather(self, states: Tensor, part: slice = slice(None)) -> Tensor:
        """Take the keys or values of some blocks, (blocks, h, k, c)."""
        return key_blocks(states, self.places[part]).transpose(1, 2)


def _as_rows(states: Tensor) -> Tensor:
    """Flatten (b, h, n, ...) to (b * n, h, ...)."""
    return states.transpose(1, 2).flatten(0, 1)


def _slots_in_blocks(memory: SlotMemory, block: int, blocks: int) -> _BlockPart:
    batch, slots, device = memory.key.shape[0], memory.key.shape[2], memory.key.device
    # Not `repeat_interleave`, which would need one graph for a single block and another for several.
    rows = torch.arange(blocks, device=device) // (blocks // batch)  # of the batch, for each block
    terms = [
        term.index_select(0, rows) if term.shape[2] == 1 else query_blocks(term, block)
        for term in (term.expand(batch, -1, -1, -1) for term in memory.mask_terms())
    ]
    places = rows[:, None] * slots + torch.arange(slots, device=device)
    return _BlockPart(_as_rows(memory.key), _as_rows(memory.value), places, terms)


def _window_in_blocks(memory: WindowMemory, block: int) -> _BlockPart:
    key, value, readable = _ordered_tokens(memory)
    rows, _, length, _ = key.shape
    places, inside = key_places(rows, length, memory.window, block, key.device, memory.causal)
    reached = inside.unsqueeze(1)
    if readable is not None:
        readable = readable.expand(rows, -1, -1)
        reached = reached & key_blocks(_as_rows(readable), places).transpose(1, 2)
    terms = [window_mask(torch.ones_like(inside[:1]).unsqueeze(1), block), reached.unsqueeze(2)]
    if memory.bias is not None:
        terms.append(band_weights(memory.bias.expand(1, 1, block, memory.window), block + memory.window - 1))
    return _BlockPart(_as_rows(key), _as_rows(value), places, terms)


def _read_blocks(
    module: nn.Module, query: Tensor, memories: Memories, widest: int, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Read with ordered queries (b, h, n, c): (b, n, d), and if eager the weights over slots and windows."""
    in_parts = choose("window_blocks", query, module.training) == "parts"
    rows, places = query.shape[0], query.shape[2]
    block = min(widest, _PART_BLOCK) if in_parts else widest
    query = query_blocks(query, block)
    blocks = query.shape[0]
    parts = [
        _window_in_blocks(memory, block)
        if isinstance(memory, WindowMemory)
        else _slots_in_blocks(memory, block, blocks)
        for memory in memories
    ]
    sizes, table = [part.places.shape[1] for part in parts], _join_parts(parts)
    terms = [part.terms for part in parts]
    step = max(_PART_QUERIES // block, 1) if in_parts else blocks
    buffer = None
    if in_parts and _is_additive(terms):  # new memory for the mask of each part would be slow
        terms = [_added(own, table.key) for own in terms]
        buffer = table.key.new_empty(min(step, blocks), query.shape[1], block, sum(sizes))
    reads = []
    for first in range(0, blocks, step) if in_parts else (0,):
        part = slice(first, first + step) if in_parts else slice(None)
        own = [[term if term.shape[0] == 1 else term[part] for term in added] for added in terms]
        if buffer is None:
            mask = _join_masks(own, sizes, table.key)
        else:
            mask = buffer[: len(query[part])]
            for added, out in zip(own, mask.split(sizes, -1), strict=True):
                *others, last = added
                out.copy_(last) if not others else torch.add(reduce(torch.add, others).expand_as(out), last, out=out)
        key, value = table.gather(table.key, part), table.gather(table.value, part)
        reads.append(attend_heads(module, query[part], key, value, mask, **options))
    outputs, weights = zip(*reads, strict=True)
    output = join_blocks(outputs[0] if len(outputs) == 1 else torch.cat(outputs), rows, places)
    if weights[0] is None:
        return output, None
    # Without the weights of keys outside of the windows, which are zero.
    pieces = zip(memories, torch.cat(weights).split(sizes, -1), strict=True)
    weights = [
        window_weights(piece, memory.window) if isinstance(memory, WindowMemory) else piece for memory, piece in pieces
    ]
    return output, join_blocks(torch.cat(weights, -1).transpose(1, 2), rows, places).transpose(1, 2)


def _join_parts(parts: list[_BlockPart]) -> _BlockPart:
    """Join the tables of several memories, without their masks."""
    if len(parts) == 1:
        return parts[0]
    places, start = [], 0
    for part in parts:
        places.append(part.places + start)
        start += part.key.shape[0]
    key, value = (torch.cat([part[side] for part in parts]) for side in (0, 1))
    return _BlockPart(key, value, torch.cat(places, 1), [])


# ---- the order of a window's tokens ----


def _ordered_tokens(memory: WindowMemory) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return keys, values and the mask (b, 1 or h, n) of the tokens to read, in the order of `_put_in_order`."""
    key, value, readable = memory.key, memory.value, None if memory.real is None else memory.real[:, None]
    if not memory.ordered:
        key, value = (move_to_ranks(states, memory.ranks, memory.keep) for states in (key, value))
    if memory.elsewhere is not None:
        left = ~in_order(memory.elsewhere, memory.ranks, memory.keep)
        readable = left if readable is None else readable & left
    if memory.dilated:
        if readable is None and _places_to_add(key) is not None:  # the added positions must be masked
            readable = torch.ones_like(key[:, :1, :, 0], dtype=torch.bool)
        key, value = _dilate(key), _dilate(value)
        readable = None if readable is None else _dilate(readable.unsqueeze(-1)).squeeze(-1)
    return key, value, readable


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


def _dilate(states: Tensor) -> Tensor:
    """Split even and odd positions into separate rows, zero-padded if needed: (b, h, n, c) to (2 b, h, n / 2, c)."""
    extra, states = _places_to_add(states), states.transpose(1, 2)
    return interleave(states if extra is None else F.pad(states, (0, 0, 0, 0, 0, extra))).transpose(1, 2)


def _places_to_add(states: Tensor) -> int | None:
    """Number of positions to add to (b, h, n, c) to make n even; `None` for none."""
    length = states.shape[2]
    if not is_tracing(states):
        return length % 2 or None
    # A graph pads even and odd lengths alike, with at least two positions of each parity, so that it is not recompiled.
    return 2 * ((length + 3) // 2) - length
