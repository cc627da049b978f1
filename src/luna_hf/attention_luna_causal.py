"""Luna's causal attention (Ma et al. 2021, section 3.3), as decoder self-attention.

P does not depend on the tokens: it is a parameter of each layer, or in an encoder-decoder the packed states of the
source (section 3.4), which change from layer to layer. With f(x, y, z)_t = x_t sum_{j<=t} y_j^T z_j / t,

    A_pack   = omega(P W_pq (X W_pc)^T / sqrt(c))             omega: softplus or elu + 1, no softmax
    A_unpack = softmax(f(X W_q / sqrt(c), X W_k, A_pack))     over the slots
    Y        = f(A_unpack, A_pack, X W_v) W_o

This is a causal memory (`causal_memory.py`) written with weights A_pack and divided by the number of steps.

With `pack_activation="exp"`, which is not in the paper, omega is exp and the sums are divided by the running sum of
A_pack instead: a slot is then a softmax over the tokens so far, as in Luna's encoder. A slot can hold a single token,
which a mean over all steps cannot.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.utils import is_torchdynamo_compiling

from .attention_base import linear, product
from .attention_luna import LunaProjections
from .causal_attention import CausalMemoryAttention
from .configuration_luna import LunaConfig
from .context import ForwardContext
from .functional import split_heads
from .recompute import recomputed
from .state import SOURCE, MemoryCacheLayer

# Names in a decoding state.
_SOURCE_QUERY, _SOURCE_SLOTS = f"{SOURCE}pack_query", f"{SOURCE}pack_slots"


def pack_weights(pack_query: Tensor, pack_key: Tensor, activation: str) -> Tensor:
    """Compute A_pack = omega(pq . pc / sqrt(c)), in float32 or wider.

    Args:
        pack_query: (b or 1, h, l, c), P W_pq.
        pack_key: (b, h, n, c), X W_pc.
        activation: "softplus", log2(1 + 2^x) (the authors' beta = ln 2); "elu", elu(x) + 1; or "exp".

    Returns:
        (b, h, n, l), non-negative; for "exp" their logarithm, because the sums are normalised in log space.
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
        own = not config.is_encoder_decoder
        self.slots = nn.Parameter(torch.empty(config.projection_length, width)) if own else None
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)

    def initialise(self, config: LunaConfig) -> None:
        """Initialise P at the scale of normed token states: it has no LayerNorm, and near zero all slots coincide."""
        if self.slots is not None:
            init.normal_(self.slots, mean=0.0, std=1.0)


class LunaCausalAttention(LunaProjections, CausalMemoryAttention):
    """Causal pack and unpack attention; the projections have the names of `LunaAttention`."""

    def __init__(self, config: LunaConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        self.pack = LunaCausalPack(config)

    def write_weights(
        self, hidden_states: Tensor, carried: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, str]:
        """Return A_pack (b, h, n, l), or its logarithm with "exp", and how the sums are normalised."""
        pack_key = split_heads(linear(self.pack.key, hidden_states), self.num_heads)
        cache = context.layer_cache(self.layer_idx)
        if self.pack.slots is None:
            pack_query = cache.states[_SOURCE_QUERY] if carried is None else self.source_query(carried)
        else:
            pack_query = self.pack_query(cache)
        activation = self.config.pack_activation
        weights = recomputed(lambda key, query: pack_weights(query, key, activation), pack_key, pack_query)
        if activation == "exp":
            return weights, "softmax"
        dropout = self.attention_dropout if self.training else 0.0
        return F.dropout(weights, dropout) if dropout else weights, "steps"

    def used_slots(self, carried: Tensor | None, context: ForwardContext) -> Tensor | None:
        """Like `CausalMemoryAttention.used_slots`; in an encoder-decoder, the slots that the source uses."""
        if self.pack.slots is not None:
            return None
        if carried is None:
            return context.layer_cache(self.layer_idx).states.get(_SOURCE_SLOTS)
        return context.source.carried_keep

    def source_query(self, carried: Tensor) -> Tensor:
        """Return P W_pq, (b, h, l, c), with the packed states of the source (b, l, d)."""
        return split_heads(linear(self.pack.query, carried), self.num_heads)

    def write_source(self, carried: Tensor, context: ForwardContext) -> None:
        """Keep P W_pq, and which slots the source uses."""
        kept = {_SOURCE_QUERY: self.source_query(carried), _SOURCE_SLOTS: context.source.carried_keep}
        context.layer_cache(self.layer_idx).write(**kept)

    def pack_query(self, cache: MemoryCacheLayer | None) -> Tensor:
        """Return P W_pq, (1, h, l, c); cached while decoding, where it would cost more than the rest of the layer."""
        if cache is None or torch.is_grad_enabled():
            return split_heads(linear(self.pack.query, self.pack.slots).unsqueeze(0), self.num_heads)
        if is_torchdynamo_compiling() and "pack_query" in cache.constants:
            return cache.constants["pack_query"]
        key = self.pack_query_key()
        if cache.constant_keys.get("pack_query") != key:
            cache.constants["pack_query"] = self.pack_query(None).contiguous()
            cache.constant_keys["pack_query"] = key
        return cache.constants["pack_query"]

    def pack_query_key(self) -> tuple[object, ...]:
        """Return a key that changes whenever P W_pq does: parameter identity, version, dtype, device, and autocast."""
        parameters = [
            (id(parameter), parameter.dtype, parameter.device, 0 if parameter.is_inference() else parameter._version)
            for parameter in self.pack.parameters()
        ]
        device = self.pack.slots.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return (*parameters, autocast)
