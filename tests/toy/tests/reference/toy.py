"""A literal reference of the toy mechanism: one slot and one token at a time. Shares no code with the package."""

from types import SimpleNamespace

import torch
from torch import Tensor

from .causal import heads, read
from .luna import linear


def write(x: Tensor, states: Tensor, centre: Tensor) -> Tensor:
    """Write a slot (h, c): the mean of states (h, n, c) with weights 1 / (1 + |x - centre|^2 / c), x (h, n, c)."""
    total, weights = torch.zeros_like(centre), torch.zeros_like(centre[:, :1])
    for t in range(x.shape[1]):
        distance = ((x[:, t] - centre) ** 2).sum(-1, keepdim=True)
        weight = 1 / (1 + distance / x.shape[2])
        total, weights = total + weight * states[:, t], weights + weight
    return total / weights


def memory(x: Tensor, sides: list[Tensor], centres: Tensor) -> list[Tensor]:
    """The slots' keys and values (h, m, c), from x and the tokens' keys and values (`sides`), (h, n, c) each."""
    return [torch.stack([write(x, side, centre) for centre in centres.unbind(1)], dim=1) for side in sides]


def attend(weights: dict, own: str, index: int, x: Tensor, states: list[Tensor], config: SimpleNamespace) -> Tensor:
    """Causal attention, as `mechanism` of `causal.decode_row`; each token's memory holds it and all earlier tokens."""
    query, *sides = states
    x, centres, outputs = heads(x, config.num_attention_heads), weights[f"{own}.centres"], []
    for end in range(1, x.shape[1] + 1):
        slots = memory(x[:, :end], [side[:, :end] for side in sides], centres)
        outputs.append(read(query[:, end - 1], *slots)[0])
    return torch.stack(outputs, dim=1)


def encode(weights: dict, x: Tensor, num_heads: int) -> Tensor:
    """Encoder attention for one row (n, d), before the output projection."""
    query, *sides = (heads(linear(weights, name, x), num_heads) for name in ("query", "key", "value"))
    slots = memory(heads(x, num_heads), sides, weights["centres"])
    outputs = [read(token, *slots)[0].flatten() for token in query.unbind(1)]
    return torch.stack(outputs)
