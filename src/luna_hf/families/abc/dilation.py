"""Dilated windows (Peng et al. 2022, equation 9 and appendix A.4): a query reads every other token around it.

Even and odd tokens become separate rows, each of which is read within an ordinary window.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils import is_tracing

from ...ops.memories import Memories, SlotMemory, WindowMemory
from ...ops.memory_read import read_memories
from ...ops.tokens import first_places


def read_dilated(
    module: nn.Module, query: Tensor, memories: Memories, options: dict[str, Any] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Like `read_memories`, with every other token of windows."""
    order = next(memory for memory in memories if isinstance(memory, WindowMemory))
    split = [
        _split_window(memory)
        if isinstance(memory, WindowMemory)
        else SlotMemory(*(part.repeat_interleave(2, 0) for part in memory[:3]))  # marked tokens, for both rows
        for memory in memories
    ]
    output, weights = read_memories(module, _split(order.put_in_order(query)), split, options)

    def join(states: Tensor) -> Tensor:
        states = states.unflatten(0, (states.shape[0] // 2, 2)).transpose(1, 2).flatten(1, 2)
        return order.put_back(first_places(states, query.shape[2]))

    return join(output), None if weights is None else join(weights.transpose(1, 2)).transpose(1, 2)


def _split_window(memory: WindowMemory) -> WindowMemory:
    key, value, readable = memory.ordered_tokens()
    if readable is None and _places_to_add(key) is not None:  # the added places must be masked
        readable = torch.ones_like(key[:, :1, :, 0], dtype=torch.bool)
    elsewhere = None if readable is None else ~_split(readable.unsqueeze(-1)).squeeze(-1)
    return WindowMemory(_split(key), _split(value), None, memory.window, elsewhere=elsewhere)


def _split(states: Tensor) -> Tensor:
    """Split even and odd places into rows, zero-padded if needed: (b, h, n, c) to (2 b, h, n / 2, c)."""
    extra, states = _places_to_add(states), states.transpose(1, 2)
    states = states if extra is None else F.pad(states, (0, 0, 0, 0, 0, extra))
    return states.unflatten(1, (states.shape[1] // 2, 2)).transpose(1, 2).flatten(0, 1).transpose(1, 2)


def _places_to_add(states: Tensor) -> int | None:
    """Number of places to add to (b, h, n, c) to make n even; `None` for none."""
    length = states.shape[2]
    if not is_tracing(states):
        return length % 2 or None
    # A graph pads even and odd lengths alike, with at least two places of each parity, so that it is not recompiled.
    return 2 * ((length + 3) // 2) - length
