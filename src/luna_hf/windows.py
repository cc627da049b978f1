"""Sliding-window attention in blocks: pure functions that split tokens into blocks and join the results.

A block of s queries attends, under a mask, to all keys that their windows reach, so that one attention call processes
all blocks in time linear in n. A block is at least as long as the window.

Shape letters: b batch, h heads, n tokens, w tokens of a window, s tokens of a block, c head size. Every mask is boolean
with True = keep.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils import is_tracing

from .functional import first_places


def window_reach(window: int, causal: bool = False) -> tuple[int, int]:
    """Return how many tokens before and after a token its window, which includes the token, reaches."""
    return (window - 1, 0) if causal else (window // 2, (window - 1) // 2)


def query_blocks(query: Tensor, block: int) -> Tensor:
    """Split queries into blocks, zero-padded at the end: (b, h, n, c) to (b * blocks, h, s, c)."""
    rows, length = query.shape[0], query.shape[2]
    blocks = _number_of_blocks(length, block)
    query = query.transpose(1, 2)
    # In a graph contiguous: padding by nothing keeps the layout, which a graph of another length does not expect.
    query = query.contiguous() if is_tracing(query) else query
    query = F.pad(query, (0, 0, 0, 0, 0, blocks * block - length))
    return query.flatten(0, 1).unflatten(0, (rows * blocks, block)).transpose(1, 2)


def key_blocks(states: Tensor, window: int, block: int, causal: bool = False) -> Tensor:
    """Gather the keys or values that each block reaches: (b, h, n, c) to (b * blocks, h, s + w - 1, c)."""
    return _reached(states.transpose(1, 2), window, block, causal).transpose(1, 2)


def window_mask(
    keep: Tensor | None, length: int, window: int, block: int, device: torch.device, causal: bool = False
) -> Tensor:
    """Mask the keys of `key_blocks` outside a query's window: (b * blocks, 1, s, s + w - 1), b = 1 without `keep`."""
    keep = torch.ones(1, length, dtype=torch.bool, device=device) if keep is None else keep
    real = _reached(keep, window, block, causal)  # (b * blocks, s + w - 1)
    # The window of a block's query i starts at key i.
    offset = torch.arange(block + window - 1, device=device) - torch.arange(block, device=device)[:, None]
    band = (offset >= 0) & (offset < window)
    return (real[:, None, :] & band).unsqueeze(1)


def join_blocks(states: Tensor, rows: int, length: int) -> Tensor:
    """Join blocks and drop positions beyond the end: (b * blocks, s, ...) to (b, n, ...)."""
    places = _number_of_blocks(length, states.shape[1]) * states.shape[1]
    return first_places(states.flatten(0, 1).unflatten(0, (rows, places)), length)


def window_weights(weights: Tensor, window: int) -> Tensor:
    """Select the weights of each query's window: (b * blocks, h, s, s + w - 1) to (b * blocks, h, s, w)."""
    block, keys = weights.shape[2:]
    return F.pad(weights.flatten(2), (0, block)).unflatten(2, (block, keys + 1))[..., :window]


def band_weights(weights: Tensor, keys: int) -> Tensor:
    """Invert `window_weights`, with zeros elsewhere: (b * blocks, h, s, w) to (b * blocks, h, s, keys = s + w - 1)."""
    block, window = weights.shape[2:]
    # Rows that are longer by one entry: in the flat matrix, each row then starts one entry later than the row before.
    return F.pad(weights, (0, keys + 1 - window)).flatten(2)[..., : block * keys].unflatten(2, (block, keys))


def interleave(states: Tensor) -> Tensor:
    """Dilation (ABC, equation 9): split even and odd positions into rows, (b, n, ...) to (2 b, n / 2, ...), n even."""
    return states.unflatten(1, (states.shape[1] // 2, 2)).transpose(1, 2).flatten(0, 1)


def undo_interleave(states: Tensor) -> Tensor:
    """Invert `interleave`: (2 b, n / 2, ...) to (b, n, ...)."""
    return states.unflatten(0, (states.shape[0] // 2, 2)).transpose(1, 2).flatten(1, 2)


def _number_of_blocks(length: int, block: int) -> int:
    return (length + block - 1) // block


def _reached(states: Tensor, window: int, block: int, causal: bool) -> Tensor:
    """Gather what each block reaches, zero-padded: (b, n, ...) to (b * blocks, s + w - 1, ...)."""
    # The number of blocks is never a dimension by itself, or a graph would be recompiled for a single block.
    rows, length = states.shape[:2]
    before, _ = window_reach(window, causal)
    blocks = _number_of_blocks(length, block)
    pads = (0, 0) * (states.dim() - 2) + (before, (blocks + 1) * block - before - length)
    number = torch.arange(rows * blocks, device=states.device)
    first = (number + number // blocks) * block  # padding makes each row one block longer
    places = first[:, None] + torch.arange(block + window - 1, device=states.device)
    reached = F.pad(states, pads).flatten(0, 1).index_select(0, places.flatten())
    return reached.unflatten(0, (rows * blocks, block + window - 1))
