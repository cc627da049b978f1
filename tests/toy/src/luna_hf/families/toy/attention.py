"""Attention of the toy mechanism: a slot is a mean over the tokens, weighted by closeness to its centre c_s.

w_js = 1 / (1 + |x_j - c_s|^2 / c),  K_s = sum_j w_js k_j / sum_j w_js,  V_s = sum_j w_js v_j / sum_j w_js

In the causal form the sums run up to and including the current token.
"""

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ...layers.causal_attention import CausalMemoryAttention
from ...layers.memory_attention import Memory, MemoryAttention
from ...ops.attention import product, split_heads
from ...ops.context import ForwardContext
from .configuration import ToyConfig


def closeness(states: Tensor, centres: Tensor) -> Tensor:
    """Compute w (b, h, n, m) from states (b, n, d) and centres (h, m, c)."""
    difference = split_heads(states, centres.shape[0]).unsqueeze(-2) - centres.unsqueeze(-3)
    return 1 / (1 + difference.square().mean(-1))


def weighted_means(weights: Tensor, states: Tensor, keep: Tensor | None) -> Tensor:
    """Weighted means (b, h, m, c) of (b, h, n, c) states with weights (b, h, n, m); zeros if no token is kept."""
    if keep is not None:
        weights = weights.masked_fill(~keep[:, None, :, None], 0.0)
    total = weights.sum(2, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    return product((weights / total).transpose(-1, -2), states)


class ToySlots(MemoryAttention):
    """Attention with one learned centre per slot, for encoders and decoders."""

    def __init__(self, config: ToyConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        size = config.hidden_size // config.num_attention_heads
        self.centres = nn.Parameter(torch.empty(config.num_attention_heads, config.num_slots, size))

    def initialise(self, config: ToyConfig) -> None:
        """Initialise the centres at the scale of normed states."""
        super().initialise(config)
        init.normal_(self.centres)


class ToyAttention(ToySlots):
    """Encoder attention: all tokens write the slots."""

    def write(self, states: Tensor, slot_states: Tensor | None, context: ForwardContext) -> Memory:
        """Write the slots' keys and values."""
        weights, parts = closeness(states, self.centres), self.key_and_value(states)
        means = (weighted_means(weights, part, context.keep) for part in parts)
        return Memory([self.slot_memory(*means, context)], slot_states)


class ToyCausalAttention(ToySlots, CausalMemoryAttention):
    """Causal attention: the tokens write the slots one after another."""

    def write_weights(
        self, hidden_states: Tensor, slot_states: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, str]:
        """Return w and its normaliser: sums are divided by the running sum of w."""
        return closeness(hidden_states, self.centres), "total"
