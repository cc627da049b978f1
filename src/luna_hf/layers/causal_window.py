"""Sliding window of a decoder (Peng et al. 2022, section 3.3): a queue of the latest keys and values."""

import torch
from torch import Tensor

from ..ops.context import ForwardContext
from ..ops.memory_read import SlotMemory, WindowMemory
from ..ops.tokens import move_to_ranks, token_ranks
from .cache import MemoryCacheLayer


def write_window(
    key: Tensor, value: Tensor, window: int, context: ForwardContext, cache: MemoryCacheLayer | None, prefix: str = ""
) -> SlotMemory | WindowMemory:
    """Return the window that the new tokens read, and update the cache with their keys and values.

    Args:
        key, value: (b, h, n, c) keys and values of the new tokens.
        window: number of tokens that each token reads, including itself.
        context: context of the forward pass.
        cache: the layer's cache, if there is one.
        prefix: of the names of the queue's tensors in the cache, beside other states.

    Returns:
        A window; or, for a single token with a cache, the queue as slots with that token last.
    """
    (batch, heads, length, size), keep, device = key.shape, context.keep, key.device
    names = (f"{prefix}key", f"{prefix}value")
    if cache is not None:  # newest last; zeros where there were fewer tokens
        zeros = key.new_zeros(batch, heads, window, size)
        queue = [cache.states.get(name, zeros).to(key.dtype) for name in names]
        if length == 1:
            pushed = [torch.cat(pair, dim=2)[:, :, 1:] for pair in zip(queue, (key, value), strict=True)]
            if keep is not None:  # padding is not pushed
                real = keep[:, None, :, None]
                pushed = [torch.where(real, new, old) for new, old in zip(pushed, queue, strict=True)]
            cache.write(**dict(zip(names, pushed, strict=True)))
            return SlotMemory(*pushed, _filled(window, context.ranks + 1)[:, None])
    ranks = None if keep is None else token_ranks(keep, length, device)
    # Real tokens move to the front, so that no padding lies between them.
    key, value = (move_to_ranks(states, ranks, keep) for states in (key, value))
    real = None if keep is None else torch.arange(length, device=device) < keep.sum(1, keepdim=True)
    order = {"ranks": ranks, "keep": keep, "ordered": True, "causal": True}
    if cache is None:
        return WindowMemory(key, value, real, window, **order)
    real = torch.ones(batch, length, dtype=torch.bool, device=device) if real is None else real
    key, value = (torch.cat(pair, dim=2) for pair in zip(queue, (key, value), strict=True))
    # The last real tokens, of the queue and the new ones, stay in the cache.
    last = real.sum(1, keepdim=True) + torch.arange(window, device=device)
    last = last[:, None, :, None].expand(-1, heads, -1, size)
    cache.write(**{name: states.gather(2, last) for name, states in zip(names, (key, value), strict=True)})
    real = torch.cat([_filled(window, context.before).expand(batch, -1), real], dim=1)
    return WindowMemory(key, value, real, window, earlier=window, **order)


def _filled(window: int, tokens: Tensor) -> Tensor:
    """Mask the filled end of a queue: number of tokens so far (b or 1, 1) to (b or 1, w)."""
    return torch.arange(window, 0, -1, device=tokens.device) <= tokens
