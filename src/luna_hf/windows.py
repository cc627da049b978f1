"""Attention to the neighbours, block by block: pure functions that cut tokens into blocks and put the results together.

A block of queries reads the keys that any of their windows reaches, with a mask, so that one attention call serves all
blocks in linear time. The block is as long as the window, or longer.

Shape letters: b batch, h heads, n tokens, w tokens of a window, s of a block, c head size. Every mask is boolean with
True = keep.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def window_reach(window: int, causal: bool = False) -> tuple[int, int]:
    """Tokens before and after a token that its window of that many tokens (itself among them) holds."""
    return (window - 1, 0) if causal else (window // 2, (window - 1) // 2)


def query_blocks(query: Tensor, block: int) -> Tensor:
    """(b, h, n, c) to (b * blocks, h, s, c), zeros beyond the end."""
    rows, length = query.shape[0], query.shape[2]
    blocks = _number_of_blocks(length, block)
    query = F.pad(query.transpose(1, 2), (0, 0, 0, 0, 0, blocks * block - length))
    return query.flatten(0, 1).unflatten(0, (rows * blocks, block)).transpose(1, 2)


def key_blocks(states: Tensor, window: int, block: int, causal: bool = False) -> Tensor:
    """What the windows of every block reach: (b, h, n, c) to (b * blocks, h, s + w - 1, c), zeros beyond the ends."""
    return _reached(states.transpose(1, 2), window, block, causal).transpose(1, 2)


def window_mask(
    keep: Tensor | None, length: int, window: int, block: int, device: torch.device, causal: bool = False
) -> Tensor:
    """Which keys of `key_blocks` a query may attend to: (b * blocks, 1, s, s + w - 1); b is 1 without `keep`."""
    keep = torch.ones(1, length, dtype=torch.bool, device=device) if keep is None else keep
    real = _reached(keep, window, block, causal)  # (b * blocks, s + w - 1)
    # Query i of a block has its window from key i on.
    offset = torch.arange(block + window - 1, device=device) - torch.arange(block, device=device)[:, None]
    band = (offset >= 0) & (offset < window)
    return (real[:, None, :] & band).unsqueeze(1)


def join_blocks(states: Tensor, rows: int, length: int) -> Tensor:
    """(b * blocks, s, ...) to (b, n, ...), the places beyond the end cut off."""
    places = _number_of_blocks(length, states.shape[1]) * states.shape[1]
    return first_places(states.flatten(0, 1).unflatten(0, (rows, places)), length)


def window_weights(weights: Tensor, window: int) -> Tensor:
    """Weights over `key_blocks` (b * blocks, h, s, s + w - 1) to (b * blocks, h, s, w), those of the query's window."""
    columns = torch.arange(weights.shape[2], device=weights.device)[:, None]
    columns = (columns + torch.arange(window, device=weights.device)).expand(*weights.shape[:3], window)
    return weights.gather(-1, columns)


def first_places(states: Tensor, length: int) -> Tensor:
    """(b, n, ...) to (b, length, ...), copied: the layout of a slice depends on whether it leaves something out."""
    return states.index_select(1, torch.arange(length, device=states.device))


def interleave(states: Tensor) -> Tensor:
    """Dilation (ABC, equation 9): (b, n, ...) to (2 b, n / 2, ...), even and odd places as rows; n is even."""
    return states.unflatten(1, (states.shape[1] // 2, 2)).transpose(1, 2).flatten(0, 1)


def undo_interleave(states: Tensor) -> Tensor:
    """(2 b, n / 2, ...) to (b, n, ...)."""
    return states.unflatten(0, (states.shape[0] // 2, 2)).transpose(1, 2).flatten(1, 2)


def _number_of_blocks(length: int, block: int) -> int:
    return (length + block - 1) // block


def _reached(states: Tensor, window: int, block: int, causal: bool) -> Tensor:
    """(b, n, ...) to (b * blocks, s + w - 1, ...), zeros beyond the ends."""
    # No dimension is the number of blocks alone: a graph would be made again for a length of one block.
    rows, length = states.shape[:2]
    before, _ = window_reach(window, causal)
    blocks = _number_of_blocks(length, block)
    pads = (0, 0) * (states.dim() - 2) + (before, (blocks + 1) * block - before - length)
    number = torch.arange(rows * blocks, device=states.device)
    first = (number + number // blocks) * block  # a padded row is one block longer
    places = first[:, None] + torch.arange(block + window - 1, device=states.device)
    reached = F.pad(states, pads).flatten(0, 1).index_select(0, places.flatten())
    return reached.unflatten(0, (rows * blocks, block + window - 1))
