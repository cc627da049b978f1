"""ABC, attention with bounded-memory control (Peng et al., ACL 2022).

A control strategy (`ops/memory_control.py`) writes keys and values into a memory of m slots; the queries read it with
multi-head softmax attention. The projections have RoBERTa's names.

Causal form (section 2 and appendix B.1): the memory is written from left to right.

    K~_t = K~_{t-1} + phi_t (x) k_t,  V~_t = V~_{t-1} + phi_t (x) v_t,  out_t = softmax(q_t K~_t^T / sqrt(c)) V~_t

The decoding state has constant size. The learned control divides both sums by the running sum of its weights; a
sliding window is a queue of the last m tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.utils import is_tracing

from ...layers.causal_attention import CausalMemoryAttention
from ...layers.memory_attention import Memory, MemoryAttention
from ...ops.attention import make_key_mask, product, split_heads
from ...ops.context import ForwardContext
from ...ops.exact_tokens import in_order, stretches_outside
from ...ops.memories import Memories, SlotMemory, WindowMemory
from ...ops.memory_control import (
    cluster_slots,
    compressive_slots,
    compressive_starts,
    control_shares,
    control_weights,
    global_slots,
    tokens_per_slot,
)
from ...ops.memory_read import read_memories
from ...ops.recompute import recomputed
from ...ops.tokens import move_to_ranks, weight_shares, write_to_slots
from .configuration import AbcConfig
from .dilation import read_dilated


def random_slots(ranks: Tensor, num_slots: int, seed: int) -> Tensor:
    """ABC-Random (appendix A.2): phi_i = e_j with j uniform in {1..m}, here a hash of rank and seed.

    The hash gives the same draw on every machine, in every batch and at every length: ranks (b, n) to (b, n) in [0, m).
    """
    # Two rounds of xor-shift and multiplication modulo 2^32, in int64 to avoid overflow.
    mask = 0xFFFFFFFF
    hashed = (ranks + (seed * 0x9E3779B1 & mask) + 0x7F4A7C15) & mask
    for _ in range(2):
        hashed = ((hashed ^ (hashed >> 16)) * 0x045D9F3B) & mask
    hashed = hashed ^ (hashed >> 16)
    return hashed * num_slots >> 32  # scaled instead of taken modulo m, which would favour the first slots


class AbcControl(nn.Module):
    """The learned matrix of a control strategy: W of equation 7, (h * m, d), or Linformer's projection, (h * m, N)."""

    def __init__(self, config: AbcConfig) -> None:
        super().__init__()
        columns = {"mlp": config.hidden_size, "linformer": config.max_position_embeddings}[config.memory_control]
        self.weight = nn.Parameter(torch.empty(config.num_attention_heads * config.memory_size, columns))

    def initialise(self, config: AbcConfig) -> None:
        """Initialise the matrix. A Linformer slot sums over N positions: 1 / sqrt(N) keeps it at a key's scale."""
        is_linformer = config.memory_control == "linformer"
        deviation = config.max_position_embeddings**-0.5 if is_linformer else config.initializer_range
        init.normal_(self.weight, mean=0.0, std=deviation)

    def forward(self) -> Tensor:
        """Return the matrix. Calling the module, unlike reading its attribute, runs FSDP's and accelerate's hooks."""
        return self.weight


def make_control(config: AbcConfig, shared: bool) -> AbcControl | None:
    """Create the model's shared control (`shared`) or a layer's own; `None` if the config has no such control."""
    is_learned = config.memory_control in ("mlp", "linformer")
    is_used = len(config.full_attention_layers or ()) < config.num_hidden_layers
    return AbcControl(config) if is_learned and is_used and config.share_control == shared else None


class SharedControl:
    """Mixin that adds a control shared by all layers to an ABC model, and passes its matrix from layer to layer."""

    def add_layers(self, config: AbcConfig) -> None:
        """Create the shared control, if any, and the layers."""
        self.control = make_control(config, shared=True)
        super().add_layers(config)

    def first_slot_states(self) -> Tensor | None:
        """Return the shared control matrix, or `None` if every layer has its own or the strategy has none."""
        return None if self.control is None else self.control()


class AbcControlled(MemoryAttention):
    """Attention with a control matrix that belongs to the layer or is shared by all layers."""

    def __init__(self, config: AbcConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        self.control = make_control(config, shared=False)

    def control_weight(self, slot_states: Tensor | None) -> Tensor | None:
        """Return the learned matrix, the layer's own or the shared one; `None` for strategies without parameters."""
        return slot_states if self.control is None else self.control()

    def drawn_slots(self, ranks: Tensor) -> Tensor:
        """Draw the slot of each token from its rank, per layer or once for all layers (appendix A.2)."""
        config = self.config
        seed = config.control_seed if config.share_control else config.control_seed + self.layer_idx
        return random_slots(ranks, config.memory_size, seed)


# What a control writes: the tokens' keys and values (b, h, n, c), or their states (b, 1, n, d), whose slots are then
# projected.
Sources = tuple[Tensor, ...]


class AbcAttention(AbcControlled):
    """ABC self-attention: write keys and values into the memory, then read it."""

    @staticmethod
    def prepare(
        config: AbcConfig, states: Tensor, slot_states: Tensor | None, context: ForwardContext
    ) -> ForwardContext:
        """Add the padding mask in the backend's form, needed only for full attention; see `MemoryAttention.prepare`."""
        if config.memory_control != "full":
            return context
        mask = make_key_mask(config, context.keep, queries=states, keys=states)
        return context._replace(masks=mask, marked=None, written=None)  # every token is read already

    def write(self, states: Tensor, slot_states: Tensor | None, context: ForwardContext) -> Memory:
        """Write (b, n, d) states to a memory; `slot_states` is the control matrix if the layers share one."""
        write, sources = _WRITERS[self.config.memory_control], self.sources(states, context)
        return Memory([write(self, states, sources, self.control_weight(slot_states), context)], slot_states)

    def sources(self, states: Tensor, context: ForwardContext) -> Sources:
        """Return what to write."""
        if context.projected is None and self.config.memory_control in _POOLING:
            return (states[:, None],)
        return context.projected or self.key_and_value(states)

    def write_weighted(self, phi: Tensor, sources: Sources, tokens: Tensor | None = None) -> list[Tensor]:
        """Write keys and values as sums with weights phi (b or 1, h, m, n).

        Args:
            tokens: (b or 1, 1 or h, n), where the sources are not zero, if phi is not zero elsewhere.
        """
        return [product(phi, source) for source in sources]

    def unused_parameters(self, slot_states: Tensor | None, context: ForwardContext) -> list[Tensor]:
        """Like `MemoryAttention.unused_parameters`."""
        weight = self.control_weight(slot_states)
        return super().unused_parameters(slot_states, context) + ([] if weight is None else [weight])

    def write_mlp(self, states: Tensor, sources: Sources, weight: Tensor, context: ForwardContext) -> SlotMemory:
        """Write with a learned attention over the tokens (equation 7)."""
        activation, tokens = self.config.control_activation, context.slot_tokens()

        def write(states: Tensor, sources: Sources, weight: Tensor) -> tuple[Any, ...]:
            logits = self.control_logits(states, weight)
            phi = control_weights(logits, tokens, activation)
            filled = (phi != 0).any(-1) if activation == "relu" else None
            counts = None
            if self.slot_scale is not None:
                counts = control_shares(logits, tokens, activation).sum(-1)
            return self.write_weighted(phi, sources), filled, counts

        inputs = states, sources, weight
        # The weights of few slots take a few per cent of a layer's time. One source: it is projected when written.
        few = weight.shape[0] <= states.shape[2] and len(sources) == 2
        written, filled, counts = recomputed(write, *inputs) if few else write(*inputs)
        return self.slot_memory(*written, context, filled, counts)

    def control_logits(self, states: Tensor, weight: Tensor) -> Tensor:
        """Compute W x of equation 7, (b, h, m, n)."""
        # Batched so that the tokens are the last dimension: the softmax then runs over contiguous memory.
        expanded = weight.expand(states.shape[0], -1, -1)
        return product(expanded, states.transpose(1, 2)).unflatten(1, (self.num_heads, -1))

    def write_linformer(self, states: Tensor, sources: Sources, weight: Tensor, context: ForwardContext) -> SlotMemory:
        """Write with column i of the learned matrix, where i is the token's rank in its row (section 3.1)."""
        # `index_select` instead of a slice: a slice's layout differs at length N, which would force a second graph.
        columns = torch.arange(states.shape[1], device=states.device)
        phi = weight.index_select(1, columns).unflatten(0, (self.num_heads, -1))[None]  # (1, h, m, n)
        real = (columns < context.lengths).unsqueeze(1)  # (b or 1, 1 or h, n)
        if context.written is not None:
            tokens = context.slot_tokens()
            sources = tuple(source.masked_fill(~tokens.unsqueeze(-1), 0.0) for source in sources)
            real = in_order(tokens, context.ranks, context.keep)
        sources = tuple(move_to_ranks(source, context.ranks, context.keep) for source in sources)
        counts = None if self.slot_scale is None else sum_over(weight_shares(phi, dim=2), real)
        return self.slot_memory(*self.write_weighted(phi, sources, real), context, counts=counts)

    def write_random(self, states: Tensor, sources: Sources, weight: None, context: ForwardContext) -> SlotMemory:
        """Write each token to a random slot; a slot is the sum of its tokens (appendix A.2)."""
        return self.write_slots(sources, self.drawn_slots(context.ranks)[:, None], context)

    def write_cluster(self, states: Tensor, sources: Sources, weight: None, context: ForwardContext) -> SlotMemory:
        """Write the centroids of a k-means clustering of the keys (equation 6)."""
        m, iterations = self.config.memory_size, self.config.cluster_iterations
        slots = cluster_slots(sources[0], context.ranks, context.lengths, context.keep, m, iterations)
        return self.write_slots(sources, slots, context, mean=True)

    def write_compressive(self, states: Tensor, sources: Sources, weight: None, context: ForwardContext) -> SlotMemory:
        """Write the means of runs of neighbouring tokens (equation 8)."""
        m, lengths = self.config.memory_size, context.lengths
        slots = compressive_slots(context.ranks, lengths, m)
        memory = self.write_slots(sources, slots[:, None], context, mean=True)
        if context.outside is None:
            return memory
        # The tokens of a slot that a query reads nowhere else can be counted exactly.
        length, window = states.shape[1], context.window
        outside = stretches_outside(context.left, compressive_starts(lengths, m), lengths, length, window)
        return self.weigh_slots(SlotMemory(memory.key, memory.value), outside, None)

    def write_global(self, states: Tensor, sources: Sources, weight: None, context: ForwardContext) -> SlotMemory:
        """Write m evenly spaced tokens, one per slot (appendix A.1)."""
        slots, chosen = global_slots(context.ranks, context.lengths, self.config.memory_size)
        return self.write_slots(sources, slots[:, None], context, chosen=chosen[:, None])

    def write_slots(
        self,
        sources: Sources,
        slots: Tensor,
        context: ForwardContext,
        mean: bool = False,
        chosen: Tensor | None = None,
    ) -> SlotMemory:
        """Write each slot as the sum, or the mean, of its tokens; of the `chosen` ones (b, 1, n) only, if given."""
        num_slots, kept = self.config.memory_size, context.slot_tokens()
        if chosen is not None:
            kept = chosen if kept is None else chosen & kept
        counts = tokens_per_slot(slots, num_slots, kept)  # (b, 1 or h, m)
        # Accumulate in float32: a half-precision sum stops growing, or overflows although the mean would not.
        precise = torch.promote_types(sources[0].dtype, torch.float32)
        if kept is not None:  # the others to a slot of their own, which is cheaper than a masked copy of all tokens
            slots = torch.where(kept, slots, num_slots)
        tokens = counts.unsqueeze(-1)
        written = [
            (write_to_slots(source.to(precise), slots, num_slots + 1)[:, :, :-1] / tokens.clamp(min=1)).to(source.dtype)
            for source in sources
        ]
        if len(sources) == 1:  # the projections of few means are the means of many projections; empty slots stay zero
            written = [state * (tokens > 0) for state in self.key_and_value(written[0].squeeze(1))]
        if not mean:
            written = [state * tokens for state in written]
        # A global token is a sample of the row: it stands for its stretch, not only for itself.
        is_sample = self.config.memory_control == "local_to_global"
        return self.slot_memory(*written, context, counts > 0, None if is_sample else counts)

    def keep_window(self, states: Tensor, sources: Sources, weight: None, context: ForwardContext) -> WindowMemory:
        """Keep all keys and values, to be read within a sliding or dilated window (section 3.3, appendix A.4)."""
        return WindowMemory.of_encoder(*sources, self.config.memory_size, context)

    def keep_all(self, states: Tensor, sources: Sources, weight: None, context: ForwardContext) -> SlotMemory:
        """Keep one slot per token: ordinary softmax attention."""
        return SlotMemory(*sources, context.masks)

    def read_parts(
        self, query: Tensor, memories: Memories, options: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Like `read_memories`, in a dilated window if the control is one."""
        return (read_dilated if self.config.memory_control == "dilated" else read_memories)(
            self, query, memories, options
        )


def sum_over(phi: Tensor, real: Tensor) -> Tensor:
    """Sum weights (b or 1, h, m, n) over the tokens of a mask (b or 1, 1 or h, n): (b, h, m)."""
    return torch.matmul(phi, real.unsqueeze(-1).to(phi.dtype)).squeeze(-1)


# Controls that assign each token to one slot, the same in all heads.
_POOLING = ("random", "compressive", "local_to_global")
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


class AbcCausalAttention(AbcControlled, CausalMemoryAttention):
    """Causal ABC self-attention, with the same parameters as the encoder's `AbcAttention`."""

    def forward(
        self, hidden_states: Tensor, slot_states: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Like `CausalMemoryAttention.forward`; a window's weights run over its tokens, the current token last."""
        if self.config.memory_control != "sliding_window":
            return super().forward(hidden_states, slot_states, context)
        query, key, value = self.project(hidden_states, context)
        cache, is_eager = context.layer_cache(self.layer_idx), self.config._attn_implementation == "eager"
        # Every window holds all tokens before. Padding gets the output of a real token, but for readers.
        is_whole = cache is None and not is_eager and not is_tracing(key) and key.shape[2] <= self.config.memory_size
        if is_whole and (context.keep is None or context.readers is not None):
            row = SlotMemory.of_decoder(key, value, context.keep)
            return read_memories(self, query, [row], context.options)[0], slot_states, None
        window = WindowMemory.of_decoder(key, value, self.config.memory_size, context, cache)
        if is_eager:  # which also returns weights
            output, weights = read_memories(self, query, [window], context.options)
            return output, slot_states, weights

        def read(query: Tensor, window: WindowMemory) -> Tensor:
            return read_memories(self, query, [window], context.options)[0]

        return recomputed(read, query, window, module=self), slot_states, None

    def write_weights(
        self, hidden_states: Tensor, slot_states: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, str]:
        """Return phi before normalisation, (b, h, n, m), and its normaliser."""
        config, batch = self.config, hidden_states.shape[0]
        if config.memory_control == "random":
            one_hot = F.one_hot(self.drawn_slots(context.ranks), config.memory_size).to(hidden_states.dtype)
            return one_hot[:, None].expand(batch, self.num_heads, -1, -1), "written"
        weight = self.control_weight(slot_states)
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
