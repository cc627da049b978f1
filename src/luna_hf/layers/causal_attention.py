"""Causal attention: each token writes to the memory and then reads it, in one scan with a state of constant size."""

import torch
from torch import Tensor

from ..ops.attention import project_heads
from ..ops.causal_memory import attend_causal_memory
from ..ops.causal_slots import CausalMemory
from ..ops.context import ForwardContext
from ..ops.memories import WindowMemory
from ..ops.positions import rotate
from .memory_attention import Memory, MemoryAttention


class CausalAttention(MemoryAttention):
    """Causal attention to any memory; `forward` writes and reads it."""

    def write(self, states: Tensor, slot_states: Tensor | None, context: ForwardContext) -> Memory:
        """Not supported: a causal memory changes with every token.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "Causal attention writes and reads in one scan and has no memory to share; write it with an encoder."
        )

    def write_source(self, slot_states: Tensor | None, context: ForwardContext) -> None:
        """Put what self-attention needs of the source of an encoder-decoder into the cache; nothing by default."""


class CausalMemoryAttention(CausalAttention):
    """Causal multi-head attention to a memory of slots; each family implements `write_weights`."""

    def write_weights(
        self, hidden_states: Tensor, slot_states: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, str]:
        """Return the weight of each token in each slot, (b, h, n, m), and one of `causal_slots.NORMALISERS`."""
        raise NotImplementedError(f"{type(self).__name__} must implement `write_weights`.")

    def used_slots(self, slot_states: Tensor | None, context: ForwardContext) -> Tensor | None:
        """Return the mask (b, m) of the slots in use; all by default."""
        return None

    def project(self, hidden_states: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Project to queries, keys and values (b, h, n, c), and rotate queries and keys if positions are rotary."""
        query = project_heads(self.query, hidden_states, self.num_heads)
        key, value = self.key_and_value(hidden_states)
        if context.rotation is not None:
            query, key = rotate(query, context.rotation), rotate(key, context.rotation)
        return query, key, value

    def forward(
        self, hidden_states: Tensor, slot_states: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Like `MemoryAttention.forward`; the weights run over slots and window, (b, h, n, m + w)."""
        query, key, value = self.project(hidden_states, context)
        weights, normaliser = self.write_weights(hidden_states, slot_states, context)
        used, memory = self.used_slots(slot_states, context), None
        cache = None if context.cache is None else context.cache.layers[self.layer_idx]
        if cache is not None and "value" in cache.states:
            memory = CausalMemory(*map(cache.states.get, CausalMemory._fields))
        options = {"slots": used, "used": used, "keep": context.keep, "steps": context.ranks + 1}
        if not context.slots:
            options["slots"] = torch.zeros(query.shape[0], weights.shape[-1], dtype=torch.bool, device=key.device)
        window = None
        if self.config.local_window:
            window = WindowMemory.of_decoder(key, value, self.config.local_window, context, cache, "window_")
            options |= {"beside": window.logits(query, context.window), "count_scale": self.slot_scale}
            if self.config.slot_counts == "outside":
                options["outside"] = (context.ranks + 1 - context.window).clamp(min=0)
        options["dropout"] = self.attention_dropout if self.training else 0.0
        options["need_weights"] = self.config._attn_implementation == "eager"
        output, read, state = attend_causal_memory(query, key, value, weights, normaliser, memory, **options)
        if window is not None:
            output = output + window.read(read[..., weights.shape[-1] :])
        if cache is not None:
            cache.write(**state._asdict())
        return output.transpose(1, 2).flatten(2), slot_states, read
