"""The window of a decoder: a queue of the last tokens' keys and values, of constant size."""

import torch
from torch import Tensor

from .context import ForwardContext
from .functional import move_to_ranks, token_ranks
from .memory_read import SlotMemory, WindowMemory
from .state import MemoryCacheLayer


def write_window(
    key: Tensor, value: Tensor, window: int, context: ForwardContext, cache: MemoryCacheLayer | None
) -> SlotMemory | WindowMemory:
    """What these tokens read: the last `window` tokens, earlier ones from the cache, which is brought up to date.

    Args:
        key, value: (b, h, n, c) of the new tokens.
        window: tokens that one reads, itself among them.
        context: of the forward pass.
        cache: the layer's, if a state is kept.

    Returns:
        A window; for a single token with a state the queue as slots, the token itself in the last.
    """
    queue = None if cache is None else _open_queue(key, window, cache)
    if queue is not None and key.shape[2] == 1:
        queue = _push(queue, key, value, context.keep)
        cache.write(**queue)
        return SlotMemory(queue["key"], queue["value"], _filled(window, context.ranks + 1)[:, None])
    batch, length, keep = key.shape[0], key.shape[2], context.keep
    ranks = None if keep is None else token_ranks(keep, length, keep.device)
    # Without padding between them: moved to the front, the real tokens are the first ones.
    key, value = (move_to_ranks(states, ranks, keep) for states in (key, value))
    real = None if keep is None else torch.arange(length, device=keep.device) < keep.sum(1, keepdim=True)
    if queue is None:
        return WindowMemory(key, value, real, window, ranks=ranks, keep=keep, ordered=True, causal=True)
    real = torch.ones(batch, length, dtype=torch.bool, device=key.device) if real is None else real
    filled = _filled(window, context.before).expand(batch, -1)
    key, value = (
        torch.cat([queue[name].to(states.dtype), states], dim=2) for name, states in (("key", key), ("value", value))
    )
    cache.write(**_newest(key, value, real, window))
    real = torch.cat([filled, real], dim=1)
    order = {"earlier": window, "ranks": ranks, "keep": keep, "ordered": True}
    return WindowMemory(key, value, real, window, **order, causal=True)


def _filled(window: int, tokens: Tensor) -> Tensor:
    """(b or 1, 1) numbers of tokens so far to the places of a queue that hold one, the last ones: (b or 1, w)."""
    return torch.arange(window, 0, -1, device=tokens.device) <= tokens


def _open_queue(key: Tensor, window: int, cache: MemoryCacheLayer) -> dict[str, Tensor]:
    """The last keys and values before these tokens, the newest last; zeros where there were fewer."""
    if "value" in cache.states:
        return cache.states
    batch, heads, _, size = key.shape
    return dict.fromkeys(("key", "value"), key.new_zeros(batch, heads, window, size))


def _push(queue: dict[str, Tensor], key: Tensor, value: Tensor, keep: Tensor | None) -> dict[str, Tensor]:
    """The queue (b, h, w, c) after one more token (b, h, 1, c), unless that is padding (b, 1)."""
    pushed = {
        name: torch.cat([queue[name][:, :, 1:].to(states.dtype), states], dim=2)
        for name, states in (("key", key), ("value", value))
    }
    if keep is None:
        return pushed
    return {name: torch.where(keep[:, None, :, None], states, queue[name]) for name, states in pushed.items()}


def _newest(key: Tensor, value: Tensor, real: Tensor, size: int) -> dict[str, Tensor]:
    """The last `size` real tokens of a queue of that many and of new ones behind it.

    Args:
        key, value: (b, h, size + n, c), the real ones of the new tokens in front of the others.
        real: (b, n).
    """
    first = real.sum(1, keepdim=True)
    places = (first + torch.arange(size, device=real.device))[:, None, :, None]
    expanded = places.expand(-1, key.shape[1], -1, key.shape[-1])
    return {"key": key.gather(2, expanded), "value": value.gather(2, expanded)}
