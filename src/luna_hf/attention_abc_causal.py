"""Causal ABC (Peng et al. 2022, section 2 and appendix B.1): the memory is written from left to right.

    K~_t = K~_{t-1} + phi_t (x) k_t,  V~_t = V~_{t-1} + phi_t (x) v_t,  out_t = softmax(q_t K~_t^T / sqrt(c)) V~_t

The decoding state has constant size. The learned control divides both sums by the running sum of its weights; a sliding
window is a queue of the last m tokens.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .abc_control import AbcControlled
from .attention_base import product
from .causal_attention import CausalMemoryAttention
from .causal_window import write_window
from .context import ForwardContext
from .functional import split_heads
from .memory_read import SlotMemory, WindowMemory, read_memories
from .recompute import recomputed


class AbcCausalAttention(AbcControlled, CausalMemoryAttention):
    """Causal ABC self-attention, with the same parameters as the encoder's `AbcAttention`."""

    def forward(
        self, hidden_states: Tensor, carried: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Like `CausalMemoryAttention.forward`; a window's weights run over its tokens, the current token last."""
        if self.config.memory_control != "sliding_window":
            return super().forward(hidden_states, carried, context)
        query, key, value = self.project(hidden_states, context)
        cache = context.layer_cache(self.layer_idx)
        window = write_window(key, value, self.config.memory_size, context, cache)
        if self.config._attn_implementation == "eager":  # which also returns weights
            output, weights = read_memories(self, query, [window], context.options)
            return output, carried, weights

        def read(query: Tensor, window: WindowMemory | SlotMemory) -> Tensor:
            return read_memories(self, query, [window], context.options)[0]

        return recomputed(read, query, window), carried, None

    def write_weights(
        self, hidden_states: Tensor, carried: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, str]:
        """Return phi before normalisation, (b, h, n, m), and its normaliser."""
        config, batch = self.config, hidden_states.shape[0]
        if config.memory_control == "random":
            one_hot = F.one_hot(self.drawn_slots(context.ranks), config.memory_size).to(hidden_states.dtype)
            return one_hot[:, None].expand(batch, self.num_heads, -1, -1), "written"
        weight = self.control_weight(carried)
        if config.memory_control == "linformer":
            # Beyond the matrix's N columns, positions wrap around to the first one.
            phi = weight.t()[context.ranks % weight.shape[1]]  # (b or 1, n, h m)
            return split_heads(phi, self.num_heads).expand(batch, -1, -1, -1), "none"
        logits = split_heads(product(hidden_states, weight.t()), self.num_heads)
        if config.control_activation == "relu":
            return torch.relu(logits), "total"
        if config.control_activation == "sigmoid":
            logits = F.logsigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)))
        return logits, "softmax"
