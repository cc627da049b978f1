"""Sliding-window attention in blocks: pure functions that split tokens into blocks and join the results.

A block of s queries attends, under a mask, to all keys that their windows reach, so that one attention call processes
all blocks in time linear in n. A block is at least as long as the window.

Shape letters: b batch, h heads, n tokens, w tokens of a window, s tokens of a block, c head size. Every mask is
boolean with True = keep.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils import is_tracing

from .tokens import first_places


def window_reach(window: int, causal: bool = False) -> tuple[int, int]:
    """Return how many tokens before and after a token its window, which includes the token, reaches."""
    return (window - 1, 0) if causal else (window // 2, (window - 1) // 2)


def query_blocks(query: Tensor, block: int) -> Tensor:
    """Split queries into blocks, zero-padded at the end: (b, h, n, c) to (b * blocks, h, s, c)."""
    rows, length = query.shape[0], query.shape[2]
    blocks = _number_of_blocks(length, block)
    query, tracing = query.transpose(1, 2), is_tracing(query)
    # In a graph contiguous: padding by nothing keeps the layout, which a graph of another length does not expect.
    query = query.contiguous() if tracing else query
    if tracing or blocks * block > length:
        query = F.pad(query, (0, 0, 0, 0, 0, blocks * block - length))
    query = query.flatten(0, 1)
    # And a copy: Inductor checks whether two views in a row end in the shape that they began with. They do for a single
    # block alone, so that a graph would serve either one block or several, but not both.
    query = first_places(query, query.shape[0], 0) if tracing else query
    return query.view(rows * blocks, block, *query.shape[1:]).transpose(1, 2)


def key_places(
    rows: int, length: int, window: int, block: int, device: torch.device, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Find the keys that each block reaches, (b * blocks, s + w - 1).

    Returns:
        Indices of joined rows, (b, n, ...) flattened to (b * n, ...), and which of them lie within the block's row; the
        others are its first token.
    """
    # The number of blocks is never a dimension by itself, or a graph would be recompiled for a single block.
    blocks = _number_of_blocks(length, block)
    number = torch.arange(rows * blocks, device=device)[:, None]
    row, (before, _) = number // blocks, window_reach(window, causal)
    # Not `number % blocks`: PyTorch's exporter to ONNX takes no remainder by a number that a graph computes.
    position = (number - row * blocks) * block - before + torch.arange(block + window - 1, device=device)
    within = (position >= 0) & (position < length)
    # Not `position.clamp`, whose bounds AOTInductor of PyTorch 2.13 cannot derive.
    return row * length + torch.where(within, position, 0), within


def key_blocks(joined: Tensor, places: Tensor) -> Tensor:
    """Gather what some blocks reach, given their `key_places`: (b * n, ...) to (blocks, s + w - 1, ...)."""
    return joined.index_select(0, places.flatten()).view(*places.shape, *joined.shape[1:])


def window_mask(readable: Tensor, block: int) -> Tensor:
    """Mask the keys outside of queries' windows: (blocks, 1 or h, s + w - 1) to (blocks, 1 or h, s, s + w - 1)."""
    keys, device = readable.shape[-1], readable.device
    # The window of a block's query i starts at key i.
    offset = torch.arange(keys, device=device) - torch.arange(block, device=device)[:, None]
    band = (offset >= 0) & (offset <= keys - block)
    return readable.unsqueeze(-2) & band


def join_blocks(states: Tensor, rows: int, length: int) -> Tensor:
    """Join blocks and drop positions beyond the end: (b * blocks, s, ...) to (b, n, ...)."""
    places = _number_of_blocks(length, states.shape[1]) * states.shape[1]
    states = states.flatten(0, 1)
    if is_tracing(states) or places > length:
        # In a graph always copied, for the same reason as in `query_blocks`.
        kept = torch.arange(rows, device=states.device)[:, None] * places + torch.arange(length, device=states.device)
        states = states.index_select(0, kept.flatten())
    return states.view(rows, length, *states.shape[1:])


def window_weights(weights: Tensor, window: int) -> Tensor:
    """Select the weights of each query's window: (b * blocks, h, s, s + w - 1) to (b * blocks, h, s, w)."""
    block, keys = weights.shape[2:]
    return F.pad(weights.flatten(2), (0, block)).unflatten(2, (block, keys + 1))[..., :window]


def band_weights(weights: Tensor, keys: int) -> Tensor:
    """Invert `window_weights`, with zeros elsewhere: (b * blocks, h, s, w) to (b * blocks, h, s, keys = s + w - 1)."""
    block, window = weights.shape[2:]
    # Rows that are longer by one entry: in the flat matrix, each row then starts one entry later than the row before.
    return F.pad(weights, (0, keys + 1 - window)).flatten(2)[..., : block * keys].unflatten(2, (block, keys))


def _number_of_blocks(length: int, block: int) -> int:
    return (length + block - 1) // block
