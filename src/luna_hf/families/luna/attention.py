"""Luna's nested attention (Ma et al. 2021, section 3.1): pack the tokens into l slots, then unpack them again.

    pack      Y_P = Attn(P, C, C)                 l queries over the tokens of the context C (C = X in an encoder)
    unpack    Y_X = Attn(X, Y_P, Y_P) W_o         n queries over the l slots

Packing writes the memory, unpacking reads it. Both are ordinary multi-head softmax attention, so both go through
transformers' attention interface. The packed context has no output projection; W_o belongs to the layer
(`attention.output.dense`, as in RoBERTa).

Causal form (section 3.3): P does not depend on the tokens. It is a parameter of each layer, or in an encoder-decoder
the packed states of the source (section 3.4), which change from layer to layer. With
f(x, y, z)_t = x_t sum_{j<=t} y_j^T z_j / t,

    A_pack   = omega(P W_pq (X W_pc)^T / sqrt(c))             omega: softplus or elu + 1, no softmax
    A_unpack = softmax(f(X W_q / sqrt(c), X W_k, A_pack))     over the slots
    Y        = f(A_unpack, A_pack, X W_v) W_o

This is a causal memory (`ops/causal_memory.py`) written with weights A_pack and divided by the number of steps.

With `pack_activation="exp"`, which is not in the paper, omega is exp and the sums are divided by the running sum of
A_pack instead: a slot is then a softmax over the tokens so far, as in Luna's encoder. A slot can hold a single token,
which a mean over all steps cannot.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.utils import is_torchdynamo_compiling

from ...layers.cache import SOURCE, MemoryCacheLayer
from ...layers.causal_attention import CausalMemoryAttention
from ...layers.memory_attention import Memory, MemoryAttention
from ...layers.recorded import Recorded
from ...ops.attention import KeyMask, linear, make_key_mask, product, project_heads, split_heads
from ...ops.context import ForwardContext, drop_if_full
from ...ops.memory_read import attend_heads
from ...ops.recompute import is_plain, is_watched, recomputed
from .configuration import LunaConfig


class LunaMasks(NamedTuple):
    """Padding masks of the two attentions; `None` where every key may be read."""

    tokens: KeyMask | None
    slots: KeyMask | None


def slots_for(config: LunaConfig, tokens: Any) -> Any:
    """Return how many slots a row of so many tokens, a number or tensor, uses with dynamic projection, at most."""
    return (tokens + config.tokens_per_slot - 1) // config.tokens_per_slot


def valid_slots(config: LunaConfig, lengths: Tensor, num_slots: int) -> Tensor:
    """Dynamic projection: mask (b, l) of the slots in use; a row of t tokens uses its first `slots_for(config, t)`.

    Rows have lengths (b, 1); l is `num_slots`.
    """
    return torch.arange(num_slots, device=lengths.device) < slots_for(config, lengths)


class LunaProjections:
    """Query, key and value projections; with `tie_kv`, keys and values share one matrix."""

    def add_projections(self, config: LunaConfig) -> None:
        """Create the query, key and value projections."""
        width = config.hidden_size
        self.query = nn.Linear(width, width)
        if config.tie_kv:
            self.key_value = nn.Linear(width, width)
        else:
            self.key, self.value = nn.Linear(width, width), nn.Linear(width, width)

    def key_and_value(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Project (b, n, d) states to keys and values, (b, h, n, c) each."""
        shape = (*states.shape[:-1], self.num_heads, self.head_size)
        if self.config.tie_kv:
            both = self.key_value(states).view(shape).transpose(1, 2)
            return both, both
        return self.key(states).view(shape).transpose(1, 2), self.value(states).view(shape).transpose(1, 2)


class LunaPackAttention(LunaProjections, Recorded):
    """Pack attention: the slots attend to the tokens of the context."""

    is_causal = False

    def __init__(self, config: LunaConfig) -> None:
        super().__init__()
        self.config = config
        self.num_heads = config.num_projected_attention_heads or config.num_attention_heads
        self.head_size = config.hidden_size // self.num_heads
        self.attention_dropout = config.attention_probs_dropout_prob
        self.add_projections(config)

    def forward(self, packed_query: Tensor, states: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor | None]:
        """Compute Y_P (b, l, d) from P (b, l, d) and (b, n, d) states; if eager, also the weights (b, h_p, l, n)."""
        shape = (*packed_query.shape[:-1], self.num_heads, self.head_size)
        query = self.query(packed_query).view(shape).transpose(1, 2)
        return attend_heads(self, query, *self.key_and_value(states), context.masks.tokens, **context.options)


class LunaAttention(LunaProjections, MemoryAttention):
    """A layer's pack and unpack attention, with the residual connection and LayerNorm of the packed states.

    The unpack projections belong to this module, under RoBERTa's names; the pack projections are in `pack`.
    """

    def __init__(self, config: LunaConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        self.pack = LunaPackAttention(config)
        self.packed_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    @staticmethod
    def prepare(config: LunaConfig, states: Tensor, slot_states: Tensor, context: ForwardContext) -> ForwardContext:
        """Add the masks of tokens and slots to the context.

        The slot mask is `context.slot_keep` if given; otherwise dynamic projection derives it from the tokens. The slot
        states are the packed ones, (b, l, d).

        Raises:
            ValueError: `slot_states` is `None`.
        """
        if slot_states is None:
            raise ValueError("Luna needs packed states to write a memory: pass `slot_states`, (batch, slots, width).")
        slots = context.slot_keep
        if slots is None and config.dynamic_projection:
            batch, count = slot_states.shape[:2]
            if context.keep is not None or count > slots_for(config, states.shape[1]):
                slots = valid_slots(config, context.lengths, count).expand(batch, -1)
        slots = None if slots is None else drop_if_full(slots)
        masks = LunaMasks(
            tokens=make_key_mask(config, context.keep, queries=slot_states, keys=states),
            slots=make_key_mask(config, slots, queries=states, keys=slot_states),
        )
        return context._replace(slot_keep=slots, masks=masks)

    def write(self, states: Tensor, slot_states: Tensor, context: ForwardContext) -> Memory:
        """Pack (b, n, d) states into slots with the packed states (b, l, d), and update these for the next layer."""
        packed_context, slot_states = self.update_packed(states, slot_states, context)
        return Memory(
            [self.slot_memory(*self.key_and_value(packed_context), context, context.masks.slots)], slot_states
        )

    def write_whole(self, states: Tensor, slot_states: Tensor, context: ForwardContext) -> Memory:
        """Like `MemoryAttention.write_whole`; the packed states are updated where something reads them."""
        memory = super().write_whole(states, slot_states, context)
        if not context.updates_slots:
            return memory
        return memory._replace(slot_states=self.update_packed(states, slot_states, context)[1])

    def unused_parameters(self, slot_states: Tensor | None, context: ForwardContext) -> list[Tensor]:
        """Like `MemoryAttention.unused_parameters`."""
        unused = super().unused_parameters(slot_states, context)
        if context.updates_slots:
            return unused
        return [*unused, *self.pack.parameters(), *self.packed_layer_norm.parameters()]

    def update_packed(self, states: Tensor, slot_states: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """Return the packed context Y_P and the packed states for the next layer, (b, l, d) each."""
        queries = self.packed_layer_norm(slot_states) if self.config.norm_first else slot_states
        packed_context, _ = self.pack(queries, states, context)
        slot_states = slot_states + self.dropout(packed_context)
        return packed_context, slot_states if self.config.norm_first else self.packed_layer_norm(slot_states)


# Names in a decoding state.
_SOURCE_QUERY, _SOURCE_SLOTS = f"{SOURCE}pack_query", f"{SOURCE}pack_slots"


def pack_weights(pack_query: Tensor, pack_key: Tensor, activation: str) -> Tensor:
    """Compute A_pack = omega(pq . pc / sqrt(c)), (b, h, n, l), in float32 or wider.

    Activations omega: "softplus", log2(1 + 2^x) (the authors' beta = ln 2); "elu", elu(x) + 1; or "exp", for which the
    logarithm is returned, because the sums are normalised in log space. P W_pq is (b or 1, h, l, c), X W_pc
    (b, h, n, c).
    """
    logits = product(pack_key, (pack_query * pack_query.shape[-1] ** -0.5).transpose(-1, -2))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if activation == "exp":
        return logits
    if activation == "elu":
        return F.elu(logits) + 1.0
    # Above the threshold PyTorch returns x itself; 40 makes that exact in float64, too.
    return F.softplus(logits, beta=math.log(2.0), threshold=40.0)


class LunaCausalPack(nn.Module):
    """A layer's P, unless it comes from a source, its query projection, and the key projection of the tokens."""

    def __init__(self, config: LunaConfig) -> None:
        super().__init__()
        width = config.hidden_size
        own = not config.is_encoder_decoder or config.source_is_causal
        self.slots = nn.Parameter(torch.empty(config.projection_length, width)) if own else None
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)

    def initialise(self, config: LunaConfig) -> None:
        """Initialise P at the scale of normed token states: it has no LayerNorm, and near zero all slots coincide."""
        if self.slots is not None:
            init.normal_(self.slots, mean=0.0, std=1.0)

    def forward(self, batch: int) -> Tensor:
        """Return P W_pq, (1, l, d), or (b, l, d) where hooks may tell rows apart, as PEFT's do.

        Calling the module, unlike reading `slots`, runs FSDP's and accelerate's hooks.
        """
        return linear(self.query, self.slots.expand(batch if is_watched(self.query) else 1, -1, -1))


class LunaCausalAttention(LunaProjections, CausalMemoryAttention):
    """Causal pack and unpack attention; the projections have the names of `LunaAttention`."""

    def __init__(self, config: LunaConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        self.pack = LunaCausalPack(config)

    def write_weights(
        self, hidden_states: Tensor, slot_states: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, str]:
        """Return A_pack (b, h, n, l), or its logarithm with "exp", and how the sums are normalised."""
        pack_key = project_heads(self.pack.key, hidden_states, self.num_heads)
        cache = None if context.cache is None else context.cache.layers[self.layer_idx]
        if self.pack.slots is None:
            pack_query = cache.states[_SOURCE_QUERY] if slot_states is None else self.source_query(slot_states)
        else:
            pack_query = self.pack_query(cache, hidden_states)
        activation = self.config.pack_activation
        weights = recomputed(pack_weights, pack_query, pack_key, activation)
        if activation == "exp":
            return weights, "softmax"
        dropout = self.attention_dropout if self.training else 0.0
        return F.dropout(weights, dropout) if dropout else weights, "steps"

    def used_slots(self, slot_states: Tensor | None, context: ForwardContext) -> Tensor | None:
        """Like `CausalMemoryAttention.used_slots`; in an encoder-decoder, the slots that the source uses."""
        if self.pack.slots is not None:
            return None
        if slot_states is None:
            return context.layer_cache(self.layer_idx).states.get(_SOURCE_SLOTS)
        return context.source.slot_keep

    def source_query(self, slot_states: Tensor) -> Tensor:
        """Return P W_pq, (b, h, l, c), with the packed states of the source (b, l, d)."""
        return project_heads(self.pack.query, slot_states, self.num_heads)

    def write_source(self, slot_states: Tensor, context: ForwardContext) -> None:
        """Keep P W_pq, and which slots the source uses."""
        kept = {_SOURCE_QUERY: self.source_query(slot_states), _SOURCE_SLOTS: context.source.slot_keep}
        context.layer_cache(self.layer_idx).write(**kept)

    def pack_query(self, cache: MemoryCacheLayer | None, hidden_states: Tensor) -> Tensor:
        """Return P W_pq, (b or 1, h, l, c) for states (b, n, d).

        It is cached while decoding, where it would cost more than the rest of the layer, but not with adapters and
        hooks, which may change from pass to pass.
        """
        is_transformed = torch._C._are_functorch_transforms_active()  # whose tensors have no address
        if cache is None or torch.is_grad_enabled() or is_transformed or not is_plain(self.pack.query):
            return split_heads(self.pack(hidden_states.shape[0]), self.num_heads)
        device = hidden_states.device.type
        if is_torchdynamo_compiling() and "pack_query" in cache.constants:
            return cache.constants["pack_query"]
        # It changes with the parameters' identity, version, data, dtype and device, and with autocast.
        key: list[object] = [torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None]
        for own in (self.pack.slots, *self.pack.query.parameters()):
            key += [id(own), own.data_ptr(), own.dtype, own.device, 0 if own.is_inference() else own._version]
        if cache.constant_keys.get("pack_query") != key:
            cache.constants["pack_query"] = self.pack_query(None, hidden_states).contiguous()
            cache.constant_keys["pack_query"] = key
        return cache.constants["pack_query"]
