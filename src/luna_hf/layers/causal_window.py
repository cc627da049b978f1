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
    queue = None if cache is None else _open_queue(key, window, cache, prefix)
    if queue is not None and key.shape[2] == 1:
        queue = _push(queue, key, value, context.keep)
        cache.write(**{prefix + name: states for name, states in queue.items()})
        return SlotMemory(queue["key"], queue["value"], _filled(window, context.ranks + 1)[:, None])
    batch, length, keep = key.shape[0], key.shape[2], context.keep
    ranks = None if keep is None else token_ranks(keep, length, keep.device)
    # Real tokens move to the front, so that no padding lies between them.
    key, value = (move_to_ranks(states, ranks, keep) for states in (key, value))
    real = None if keep is None else torch.arange(length, device=keep.device) < keep.sum(1, keepdim=True)
    if queue is None:
        return WindowMemory(key, value, real, window, ranks=ranks, keep=keep, ordered=True, causal=True)
    real = torch.ones(batch, length, dtype=torch.bool, device=key.device) if real is None else real
    filled = _filled(window, context.before).expand(batch, -1)
    key, value = (
        torch.cat([queue[name].to(states.dtype), states], dim=2) for name, states in (("key", key), ("value", value))
    )
    cache.write(**{prefix + name: states for name, states in _newest(key, value, real, window).items()})
    real = torch.cat([filled, real], dim=1)
    order = {"earlier": window, "ranks": ranks, "keep": keep, "ordered": True}
    return WindowMemory(key, value, real, window, **order, causal=True)


def _filled(window: int, tokens: Tensor) -> Tensor:
    """Mask the filled end of a queue: number of tokens so far (b or 1, 1) to (b or 1, w)."""
    return torch.arange(window, 0, -1, device=tokens.device) <= tokens


def _open_queue(key: Tensor, window: int, cache: MemoryCacheLayer, prefix: str) -> dict[str, Tensor]:
    """Return the cached keys and values, newest last; zeros where there were fewer tokens."""
    batch, heads, _, size = key.shape
    zeros = key.new_zeros(batch, heads, window, size)
    return {name: cache.states.get(prefix + name, zeros) for name in ("key", "value")}


def _push(queue: dict[str, Tensor], key: Tensor, value: Tensor, keep: Tensor | None) -> dict[str, Tensor]:
    """Push one token (b, h, 1, c) onto the queue (b, h, w, c), except in rows where it is padding (`keep`, (b, 1))."""
    pushed = {
        name: torch.cat([queue[name][:, :, 1:].to(states.dtype), states], dim=2)
        for name, states in (("key", key), ("value", value))
    }
    if keep is None:
        return pushed
    return {name: torch.where(keep[:, None, :, None], states, queue[name]) for name, states in pushed.items()}


def _newest(key: Tensor, value: Tensor, real: Tensor, size: int) -> dict[str, Tensor]:
    """Return the last `size` real tokens of a queue followed by n new tokens.

    Args:
        key, value: (b, h, size + n, c), with padding at the end.
        real: (b, n) padding mask of the new tokens.
    """
    first = real.sum(1, keepdim=True)
    places = (first + torch.arange(size, device=real.device))[:, None, :, None]
    expanded = places.expand(-1, key.shape[1], -1, key.shape[-1])
    return {"key": key.gather(2, expanded), "value": value.gather(2, expanded)}
