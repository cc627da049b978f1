"""Softmax attention through transformers' backends, to keys or to several memories, slots and windows, at once.

Shape letters: b batch, h heads, n tokens, q queries, m slots, w tokens of a window, s queries of a block, c head
size. Every mask is boolean with True = keep.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_torchdynamo_exporting, is_tracing

from .attention import KeyMask, UnpaddedKeys, flex_key_mask, softmax_attention
from .dispatch import choose, prefers_products
from .memories import (
    BlockPart,
    Memories,
    SlotMemory,
    WindowMemory,
    added_terms,
    is_additive,
    join_blocks,
    join_masks,
    query_blocks,
    window_weights,
)

# Where windows are read in parts: the number of queries of a part, and at most of a block. A shorter block reads fewer
# keys beyond its windows, but copies more.
_PART_QUERIES, _PART_BLOCK = 512, 64

# Number of tokens beyond a window up to which its queries read the whole row under a mask, without blocks.
_SHORT_ROW = 128


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Eager attention for transformers' interface: (b, h, q, c) queries to (b, q, h, c) outputs, and the weights."""
    output, weights = softmax_attention(query, key, value, attention_mask, scaling, dropout)
    return output.transpose(1, 2), weights


def attend_heads(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: KeyMask | Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Multi-head softmax attention with any numbers of queries and keys, through transformers' attention interface.

    Args:
        module: the calling module, with `config`, `is_causal = False` and `attention_dropout`.
        query, key, value: (b, h, q, c) and (b, h, k, c); logits are scaled by c^-1/2.
        mask: from `make_key_mask`, or `None`; or a tensor that broadcasts to (b, h, q, k), boolean (True = may be
            attended to) or added to the logits. Only eager and sdpa accept a tensor; other backends fall back to sdpa.

    Returns:
        The concatenated heads (b, q, d), and the weights (b, h, q, k) if the backend returns them (eager does).
    """
    backend = module.config._attn_implementation
    if isinstance(mask, Tensor):
        mask, backend = KeyMask(mask, mask), "eager" if backend == "eager" else "sdpa"
    elif mask is None and backend == "flex_attention":  # slots that may all be read, of any number
        mask = flex_key_mask(None, *(states.transpose(1, 2) for states in (query, key)))
    kwargs |= {
        "scaling": query.shape[-1] ** -0.5,
        "dropout": module.attention_dropout if module.training else 0.0,
        "is_causal": False,
    }
    # The flash path would take position ids that restart for packed documents, in queries and keys alike.
    kwargs.pop("position_ids", None)
    attention = ALL_ATTENTION_FUNCTIONS.get_interface(backend, eager_attention_forward)
    if backend == "sdpa" and query.dtype == torch.bfloat16 and prefers_products(query):
        attention = eager_attention_forward
    if mask is not None and mask.unpadded is not None:
        output, weights = _attend_unpadded(attention, module, query, key, value, mask.unpadded, **kwargs)
        return output.flatten(-2), weights
    if mask is not None and mask.extra_keys:
        key, value = (F.pad(states, (0, 0, 0, mask.extra_keys)) for states in (key, value))
    backend_mask = None if mask is None else mask.for_queries(query.shape[2])
    output, weights = attention(module, query, key, value, backend_mask, **kwargs)
    if is_torchdynamo_exporting():
        # Which layout the kernel returns depends on whether gradients are recorded, and the exporter to ONNX does not.
        output = output.clone(memory_format=torch.contiguous_format)
    return output.flatten(-2), weights


def _attend_unpadded(
    attention: Any, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, keys: UnpaddedKeys, **kwargs: Any
) -> tuple[Tensor, None]:
    """Call a variable-length kernel with all queries of every row, but only the kept keys.

    Transformers' flash path assumes that queries and keys are the same tokens, so a key mask would drop queries too.
    Passing explicit sequence boundaries and no mask avoids that.
    """
    batch, _, num_queries, _ = query.shape
    rows = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))  # (batch * length, heads, head_dim)
    query, key, value = rows
    key, value = key[keys.indices], value[keys.indices]
    borders = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * num_queries
    output, _ = attention(
        module,
        *(states.unsqueeze(0).transpose(1, 2) for states in (query, key, value)),  # (1, heads, total, head_dim)
        None,
        cu_seq_lens_q=borders,
        cu_seq_lens_k=keys.cu_seq_lens,
        max_length_q=num_queries,
        max_length_k=keys.max_length,
        **kwargs,
    )
    return output.view(batch, num_queries, *output.shape[-2:]), None


def read_memories(
    module: nn.Module, query: Tensor, memories: Memories, options: dict[str, Any] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Softmax attention to several memories at once, for a module as in `attend_heads`.

    Queries (b, h, n, c), those of its tokens if a memory is a window, give the concatenated heads (b, n, d), and with
    eager attention the weights (b, h, n, keys) over the slots or window positions of each memory in turn.

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
    if windows[0].readers is not None:
        return _read_by_readers(module, query, windows[0], options)
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


def _read_by_readers(
    module: nn.Module, query: Tensor, window: WindowMemory, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Read a window, and what its readers read: each of them is a row of one query."""

    def as_rows(states: Tensor) -> Tensor:
        return states.transpose(1, 2).flatten(0, 1)

    output, weights = read_memories(module, query, [window._replace(readers=None)], options)
    readers, bias = window.readers, None if window.bias is None else window.bias.expand(1, 1, -1)
    slots = SlotMemory(as_rows(readers.key), as_rows(readers.value), readers.real.flatten(0, 1)[:, None], bias)
    own, shown = read_memories(module, as_rows(readers.take(query)).unsqueeze(2), [slots], options)
    output = readers.put(output, own.view(*readers.places.shape, -1), dim=1)
    if weights is not None:
        weights = readers.put(weights, shown.squeeze(2).unflatten(0, readers.places.shape).transpose(1, 2))
    return output, weights


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
