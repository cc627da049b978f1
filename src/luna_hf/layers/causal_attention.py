"""Causal attention: each token writes to the memory and then reads it, in one scan with a state of constant size."""

import torch
from torch import Tensor

from ..ops.attention import project_heads
from ..ops.causal_memory import attend_causal_memory
from ..ops.context import ForwardContext
from ..ops.memory_read import read_window, window_logits
from ..ops.positions import rotate
from .causal_window import write_window
from .memory_attention import Memory, MemoryAttention


class CausalAttention(MemoryAttention):
    """Causal attention to any memory; `forward` writes and reads it."""

    def write(self, states: Tensor, carried: Tensor | None, context: ForwardContext) -> Memory:
        """Not supported: a causal memory changes with every token.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "Causal attention writes and reads in one scan and has no memory to share; write it with an encoder."
        )

    def write_source(self, carried: Tensor | None, context: ForwardContext) -> None:
        """Put what self-attention needs of the source of an encoder-decoder into the cache; nothing by default."""


class CausalMemoryAttention(CausalAttention):
    """Causal multi-head attention to a memory of slots; each family implements `write_weights`."""

    def write_weights(
        self, hidden_states: Tensor, carried: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, str]:
        """Return the weight of each token in each slot, (b, h, n, m), and one of `causal_memory.NORMALISERS`."""
        raise NotImplementedError(f"{type(self).__name__} must implement `write_weights`.")

    def used_slots(self, carried: Tensor | None, context: ForwardContext) -> Tensor | None:
        """Return the mask (b, m) of the slots in use; all by default."""
        return None

    def project(self, hidden_states: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Project to queries, keys and values (b, h, n, c), and rotate queries and keys if positions are rotary."""
        query = project_heads(self.query, hidden_states, self.num_heads)
        key, value = self.key_and_value(hidden_states)
        if context.angles is not None:
            query, key = rotate(query, context.angles), rotate(key, context.angles)
        return query, key, value

    def forward(
        self, hidden_states: Tensor, carried: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Like `MemoryAttention.forward`; the weights run over slots and window, (b, h, n, m + w)."""
        cache, own_window = context.layer_cache(self.layer_idx), self.config.local_window
        query, key, value = self.project(hidden_states, context)
        weights, normaliser = self.write_weights(hidden_states, carried, context)
        window, beside = None, None
        if own_window:
            window = write_window(key, value, own_window, context, cache, prefix="window_")
            beside = window_logits(query, window, context.window)
        num_slots = weights.shape[-1]
        readable = used = self.used_slots(carried, context)
        outside = None
        if own_window and self.config.slot_counts == "outside":
            outside = (context.ranks + 1 - context.window).clamp(min=0)
        if not context.slots:
            readable = torch.zeros(query.shape[0], num_slots, dtype=torch.bool, device=key.device)
        output, read, state = attend_causal_memory(
            query,
            key,
            value,
            weights,
            normaliser,
            memory=None if cache is None else cache.sums(),
            keep=context.keep,
            steps=context.ranks + 1,
            slots=readable,
            dropout=self.attention_dropout if self.training else 0.0,
            need_weights=self.config._attn_implementation == "eager",
            count_scale=self.slot_scale,
            beside=beside,
            used=used,
            outside=outside,
        )
        if window is not None:
            output = output + read_window(read[..., num_slots:], window)
        if cache is not None:
            cache.write(**state._asdict())
        return output.transpose(1, 2).flatten(2), carried, read
