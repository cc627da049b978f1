"""Reading several memories, slots and windows, in one softmax.

Shape letters: b batch, h heads, n tokens, q queries, m slots, w tokens of a window, s queries of a block, c head
size. Every mask is boolean with True = keep.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import is_tracing

from .attention import KeyMask, attend_heads
from .dispatch import choose
from .memories import BlockPart, Memories, SlotMemory, WindowMemory, added_terms, is_additive, join_masks
from .window import join_blocks, query_blocks, window_weights

# Where windows are read in parts: the number of queries of a part, and at most of a block. A shorter block reads fewer
# keys beyond its windows, but copies more.
_PART_QUERIES, _PART_BLOCK = 512, 64

# Number of tokens beyond a window up to which its queries read the whole row under a mask, without blocks.
_SHORT_ROW = 128


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
    if isinstance(first, WindowMemory) and first.is_step:
        memories = [first := first.as_slots()]
    if len(memories) == 1 and isinstance(first, SlotMemory):
        plain = isinstance(first.filled, KeyMask | None) and first.bias is None and first.query_bias is None
        return attend_heads(module, query, first.key, first.value, first.filled if plain else first.mask(), **options)
    windows = [memory for memory in memories if isinstance(memory, WindowMemory)]
    if not windows:
        return _read_slots(module, query, memories, options)
    query, widest = windows[0].put_in_order(query), max(memory.window for memory in windows)
    # Eager attention returns weights by window.
    is_short = not is_tracing(query) and module.config._attn_implementation != "eager"
    is_short = is_short and query.shape[2] <= widest + _SHORT_ROW
    if is_short and all(memory.bias is None and not memory.causal for memory in windows):
        memories = [memory.as_slots() if isinstance(memory, WindowMemory) else memory for memory in memories]
        output, weights = _read_slots(module, query, memories, options)
    else:
        output, weights = _read_blocks(module, query, memories, widest, options)
    weights = None if weights is None else windows[0].put_back(weights.transpose(1, 2)).transpose(1, 2)
    return windows[0].put_back(output), weights


def _read_slots(
    module: nn.Module, query: Tensor, memories: Sequence[SlotMemory], options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    key, value = (torch.cat([memory[side] for memory in memories], 2) for side in (0, 1))
    sizes = [memory.key.shape[2] for memory in memories]
    mask = join_masks([memory.mask_terms() for memory in memories], sizes, key)
    return attend_heads(module, query, key, value, mask, **options)


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
        memory.in_blocks(block) if isinstance(memory, WindowMemory) else memory.in_blocks(block, blocks)
        for memory in memories
    ]
    sizes, table = [part.places.shape[1] for part in parts], _join_parts(parts)
    terms = [part.terms for part in parts]
    step = max(_PART_QUERIES // block, 1) if in_parts else blocks
    buffer = None
    if in_parts and is_additive(terms):  # new memory for the mask of each part would be slow
        terms = [added_terms(own, table.key) for own in terms]
        buffer = table.key.new_empty(min(step, blocks), query.shape[1], block, sum(sizes))
    reads = []
    for first in range(0, blocks, step) if in_parts else (0,):
        part = slice(first, first + step) if in_parts else slice(None)
        own = [[term if term.shape[0] == 1 else term[part] for term in added] for added in terms]
        if buffer is None:
            mask = join_masks(own, sizes, table.key)
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


def _join_parts(parts: list[BlockPart]) -> BlockPart:
    """Join the tables of several memories, without their masks."""
    if len(parts) == 1:
        return parts[0]
    places, start = [], 0
    for part in parts:
        places.append(part.places + start)
        start += part.key.shape[0]
    key, value = (torch.cat([part[side] for part in parts]) for side in (0, 1))
    return BlockPart(key, value, torch.cat(places, 1), [])
