"""ABC: attention with bounded-memory control (Peng et al., ACL 2022), in encoders.

Keys and values are written into a memory of m slots by a control strategy (`memory_control.py`); the queries read it
with multi-head softmax attention. Projections have RoBERTa's names.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .abc_control import AbcControlled
from .attention_base import make_key_mask, product
from .configuration_abc import AbcConfig
from .context import ForwardContext
from .functional import move_to_ranks, write_to_slots
from .memory_attention import Memory
from .memory_control import (
    cluster_slots,
    compressive_slots,
    control_weights,
    global_slots,
    slot_counts,
)
from .memory_read import AttentionMap, SlotMemory, Views, WindowMemory


class AbcAttention(AbcControlled):
    """Write the memory, read the memory."""

    @staticmethod
    def prepare(config: AbcConfig, states: Tensor, carried: Tensor | None, context: ForwardContext) -> ForwardContext:
        """The mask of the tokens, which only full attention reads; see `MemoryAttention.prepare`."""
        if config.memory_control != "full":
            return context
        return context._replace(masks=make_key_mask(config, context.keep, queries=states, keys=states))

    def write(self, states: Tensor, carried: Tensor | None, context: ForwardContext) -> Memory:
        """The memory of (b, n, d) states; `carried` is the control's matrix where the layers share one."""
        key, value = self.key_and_value(states)
        writer = _WRITERS[self.config.memory_control]
        return Memory([writer(self, states, key, value, self.control_weight(carried), context)], carried)

    def write_mlp(
        self, states: Tensor, key: Tensor, value: Tensor, weight: Tensor, context: ForwardContext
    ) -> SlotMemory:
        """Equation 7."""
        phi = self.control_map(states, weight, context)
        filled = (phi != 0).any(-1) if self.config.control_activation == "relu" else None
        return SlotMemory(product(phi, key), product(phi, value), filled)

    def control_map(self, states: Tensor, weight: Tensor, context: ForwardContext) -> Tensor:
        """phi of equation 7, (b, h, m, n)."""
        # Batched, so that the tokens come last and their softmax runs over neighbours in memory.
        expanded = weight.expand(states.shape[0], -1, -1)
        logits = product(expanded, states.transpose(1, 2)).unflatten(1, (self.num_heads, -1))
        return control_weights(logits, context.keep, self.config.control_activation)

    def write_linformer(
        self, states: Tensor, key: Tensor, value: Tensor, weight: Tensor, context: ForwardContext
    ) -> SlotMemory:
        """Section 3.1: phi_i is the i-th column of the matrix, i being the token's place in its row."""
        # A selection and not a slice, whose layout depends on the length being N: one graph for all lengths.
        columns = torch.arange(key.shape[2], device=key.device)
        phi = weight.index_select(1, columns).unflatten(0, (self.num_heads, -1))  # (h, m, n)
        key, value = (move_to_ranks(part, context.ranks, context.keep) for part in (key, value))
        return SlotMemory(product(phi, key), product(phi, value))

    def write_random(
        self, states: Tensor, key: Tensor, value: Tensor, weight: None, context: ForwardContext
    ) -> SlotMemory:
        """Appendix A.2: a slot is the sum of its tokens."""
        return self.write_slots(key, value, self.drawn_slots(context.ranks)[:, None], context.keep)

    def write_cluster(
        self, states: Tensor, key: Tensor, value: Tensor, weight: None, context: ForwardContext
    ) -> SlotMemory:
        """Equation 6: a slot is the centroid of its tokens."""
        m, iterations = self.config.memory_size, self.config.cluster_iterations
        slots = cluster_slots(key, context.ranks, context.lengths, context.keep, m, iterations)
        return self.write_slots(key, value, slots, context.keep, mean=True)

    def write_compressive(
        self, states: Tensor, key: Tensor, value: Tensor, weight: None, context: ForwardContext
    ) -> SlotMemory:
        """Equation 8: a slot is the mean of neighbours."""
        slots = compressive_slots(context.ranks, context.lengths, self.config.memory_size)
        return self.write_slots(key, value, slots[:, None], context.keep, mean=True)

    def write_global(
        self, states: Tensor, key: Tensor, value: Tensor, weight: None, context: ForwardContext
    ) -> SlotMemory:
        """Appendix A.1: a slot is a token."""
        slots, chosen = global_slots(context.ranks, context.lengths, self.config.memory_size)
        chosen = chosen if context.keep is None else chosen & context.keep
        return self.write_slots(key, value, slots[:, None], chosen)

    def write_slots(
        self, key: Tensor, value: Tensor, slots: Tensor, keep: Tensor | None, mean: bool = False
    ) -> SlotMemory:
        """Sums over the tokens of a slot, or their means."""
        num_slots = self.config.memory_size
        kept = None if keep is None else keep[:, None]
        counts = slot_counts(slots, num_slots, kept)  # (b, 1 or h, m)
        tokens = counts.clamp(min=1).unsqueeze(-1) if mean else 1
        # Half precision only at the end: there a sum stops growing, or is too large where the mean is not.
        precise = torch.promote_types(key.dtype, torch.float32)
        key, value = (
            (write_to_slots(states.to(precise), slots, num_slots, kept) / tokens).to(states.dtype)
            for states in (key, value)
        )
        return SlotMemory(key, value, counts > 0)

    def keep_window(
        self, states: Tensor, key: Tensor, value: Tensor, weight: None, context: ForwardContext
    ) -> WindowMemory:
        """Sections 3.3 and A.4: the tokens themselves, read by their neighbours."""
        keep, dilated = context.keep, self.config.memory_control == "dilated"
        if keep is None:
            return WindowMemory(key, value, None, self.config.memory_size, dilated=dilated)
        real = torch.arange(key.shape[2], device=key.device) < context.lengths
        window = self.config.memory_size
        return WindowMemory(key, value, real, window, ranks=context.ranks, keep=keep, dilated=dilated)

    def keep_all(self, states: Tensor, key: Tensor, value: Tensor, weight: None, context: ForwardContext) -> SlotMemory:
        """Softmax attention: a slot for every token."""
        return SlotMemory(key, value, context.masks)

    def views(self, states: Tensor, carried: Tensor | None, context: ForwardContext) -> Views:
        """As every attention; how `mlp` spreads its slots over the tokens; and full attention's map as such."""
        views, control = super().views(states, carried, context), self.config.memory_control
        if control == "full":
            return {"attention_entropy": views["read_entropy"]}
        if control == "mlp":
            phi, slots = self.control_map(states, self.control_weight(carried), context), views["slot_similarity"].used
            # Heads as rows: which slots are filled differs from head to head.
            tokens = context.tokens(states).repeat_interleave(self.num_heads, 0)
            views["write_entropy"] = AttentionMap(phi.flatten(0, 1).unsqueeze(1), slots.flatten(0, 1), tokens)
        return views


_WRITERS: dict[str, Callable[..., SlotMemory | WindowMemory]] = {
    "mlp": AbcAttention.write_mlp,
    "linformer": AbcAttention.write_linformer,
    "random": AbcAttention.write_random,
    "cluster": AbcAttention.write_cluster,
    "compressive": AbcAttention.write_compressive,
    "local_to_global": AbcAttention.write_global,
    "sliding_window": AbcAttention.keep_window,
    "dilated": AbcAttention.keep_window,
    "full": AbcAttention.keep_all,
}
