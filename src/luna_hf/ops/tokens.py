"""Small operations on tokens and slots; `keep` masks are boolean with True = keep."""

from typing import Any

import torch
from torch import Tensor


class _JoinGradients(torch.autograd.Function):
    generate_vmap_rule = True  # with `setup_context`, what torch.func asks for

    @staticmethod
    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        # Autograd passes zeros, not None, as the gradient of an unused output.
        return grads


def join_gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors, linked in autograd: a loss on one gives a zero gradient to all others.

    Distributed training stops where a parameter has no gradient at all.
    """
    return _JoinGradients.apply(*tensors)


def weight_shares(weights: Tensor, dim: int) -> Tensor:
    """Divide weights by the sum of their absolute values over the slots, dimension `dim`; zeros stay zero."""
    weights = weights.abs()
    return weights / weights.sum(dim, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def first_places(states: Tensor, length: int, dim: int = 1) -> Tensor:
    """Copy the first `length` positions of (b, n, ...); a slice's layout would depend on whether it drops any."""
    return states.index_select(dim, torch.arange(length, device=states.device))


def window_reach(window: int, causal: bool = False) -> tuple[int, int]:
    """Return how many tokens before and after a token its window, which includes the token, reaches."""
    return (window - 1, 0) if causal else (window // 2, (window - 1) // 2)


def move_to_ranks(states: Tensor, ranks: Tensor, keep: Tensor | None) -> Tensor:
    """Move each row's real tokens to the front of (b, h, n, c), in order, with zeros behind them."""
    if keep is None:
        return states
    # Padding, as zeros, to the places behind them: the older ONNX exporter loses states that share a place.
    behind = keep.sum(-1, keepdim=True) + (~keep).long().cumsum(-1) - 1
    return write_to_slots(states, torch.where(keep, ranks, behind)[:, None], states.shape[2], keep[:, None])


def write_to_slots(states: Tensor, slots: Tensor, num_slots: int, keep: Tensor | None = None) -> Tensor:
    """Add each kept state (b, h, n, c) to its slot: `sum_i e_{slot(i)} (x) s_i`, (b, h, m, c).

    Slots and the mask `keep` are broadcastable to (b, h, n); masked tokens write nothing.
    """
    if keep is not None:
        states = states.masked_fill(~keep.unsqueeze(-1), 0.0)
    batch, heads, length, size = states.shape
    # One `index_add` of whole rows to a (b * h * m, c) table is many times faster on CPU than adding single entries.
    # Tokens come before heads, as in the projections' output, so that flattening them is a view.
    first = num_slots * torch.arange(batch * heads, device=slots.device).view(batch, 1, heads)
    rows = slots.transpose(1, 2).expand(batch, length, heads) + first
    added = states.transpose(1, 2).flatten(0, 2)
    if torch.onnx.is_in_onnx_export():  # ONNX Runtime cannot add float16
        added = added.to(torch.promote_types(added.dtype, torch.float32))
    memory = added.new_zeros(batch * heads * num_slots, size).index_add(0, rows.flatten(), added)
    return memory.view(batch, heads, num_slots, size).to(states.dtype)


def first_kept(states: Tensor, keep: Tensor | None) -> Tensor:
    """State of each row's first real token (`<s>`, even if left-padded), or zeros: (b, n, d) to (b, d)."""
    if keep is None:
        return states[:, 0]
    index = keep.int().argmax(-1)  # (b,), the first True
    found = states[torch.arange(states.shape[0], device=states.device), index]
    # Padding's state is zero, but not its gradient, which every norm of a zero state enlarges.
    return found.masked_fill(~keep.any(-1, keepdim=True), 0.0)


def masked_mean(states: Tensor, keep: Tensor | None) -> Tensor:
    """Mean over the kept entries, or zeros if nothing is kept: (b, n, d) to (b, d)."""
    if keep is None:
        return states.mean(1)
    total = states.masked_fill(~keep.unsqueeze(-1), 0.0).sum(1)
    return total / keep.sum(-1, keepdim=True).clamp(min=1)
