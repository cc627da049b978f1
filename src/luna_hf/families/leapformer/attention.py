"""Linear attention of LeaPformer (Agostinelli et al. 2024), cosFormer (Qin et al. 2022) and their relatives.

Keys and values are written as sums over the tokens, and read without a softmax (LeaPformer, equations 5 and 8):

    out_i = phi(q_i) S / phi(q_i) z,   S = sum_j phi(k_j) (x) v_j,   z = sum_j phi(k_j)

Features phi are relu or elu + 1, re-weighted by proportions p_i, p'_j of the tokens, learned or static. Since
cos(a - b) = cos a cos b + sin a sin b, this is linear attention with features of twice the size:

    relu(q_i) relu(k_j)^T cos(pi/2 (p_i - p'_j)) = phi(q_i) phi(k_j)^T,   phi(x) = [x cos(pi/2 p), x sin(pi/2 p)]

Rotary positions (appendix A.6) rotate the features after the feature map, in S only: z needs features that are not
negative. As in the authors' code, they rotate half of the entries of a head.

The normaliser phi(q_i) z is at least `FLOOR`, as in cosFormer's code. The result is the exact quotient for every
larger normaliser, and finite, like its gradient, for every other: zeros if a query matches no key. The normaliser is
proportional to the keys, so another floor is the same as another scale of the keys.

Shape letters: b batch, h heads, n tokens, q queries, k keys, c head size, f features (2 c with proportions, else c).

In the causal form the sums run up to and including the current token. The state, both sums after the last token, has
constant size.
"""

import math
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils.generic import maybe_autocast

from ...layers.causal_attention import CausalAttention
from ...layers.memory_attention import Memory, MemoryAttention
from ...ops.attention import project_heads
from ...ops.context import ForwardContext
from ...ops.positions import rotate, rotation
from ...ops.recompute import may_recompute
from ...ops.scan import causal_scan
from .configuration import LeapformerConfig

# Lower bound of the normaliser.
FLOOR = 1e-6

# Tokens whose gradients are computed together; those of a base model fit a core's cache.
_PART = 64


class Features(NamedTuple):
    """Features of queries or keys, in float32 or wider; both are the same tensor unless positions are rotary."""

    rotated: Tensor  # (b, h, n, f)
    plain: Tensor  # (b, h, n, f) for the normaliser


class LinearMemory(NamedTuple):
    """The sums that a context is written to, in float32 or wider."""

    value: Tensor  # (b, h, f, c) S, the sum of phi(k_j) (x) v_j
    total: Tensor  # (b, h, f) z, the sum of phi(k_j)

    def plus(self, other: "LinearMemory") -> "LinearMemory":
        """Return the sums over the tokens of both."""
        return LinearMemory(self.value + other.value, self.total + other.total)


def map_features(states: Tensor, feature_map: str) -> Tensor:
    """Map (b, h, n, c) to features that are not negative, in float32 or wider, by `"relu"` or `"elu"` (elu + 1)."""
    states = states.to(torch.promote_types(states.dtype, torch.float32))
    if feature_map == "relu":
        return F.relu(states)
    # Not `F.elu`: expm1(x) + 1 loses the small features, and its gradient has the wrong layout in a compiled graph.
    return torch.where(states > 0, states + 1.0, states.clamp(max=0.0).exp())


def make_features(features: Tensor, proportions: Tensor | None = None, turn: Tensor | None = None) -> Features:
    """Re-weight features.

    Args:
        features: (b, h, n, c), from `map_features`.
        proportions: (b or 1, h or 1, n) in [0, 1], of equation 8; `None` for no re-weighting.
        turn: (b or 1, n, 2, r / 2) rotary positions, which rotate the first r features of each head.
    """
    rotated = features
    if turn is not None:
        size = 2 * turn.shape[-1]
        rotated = torch.cat([rotate(features[..., :size], turn), features[..., size:]], dim=-1)
    if proportions is None:
        return Features(rotated, features)
    plain = reweight(features, proportions)
    return Features(plain if turn is None else reweight(rotated, proportions), plain)


def reweight(features: Tensor, proportions: Tensor) -> Tensor:
    """Multiply features (b, h, n, c) by the cosine and the sine of their proportions: (b, h, n, 2 c)."""
    angles = proportions.to(features.dtype) * (math.pi / 2)
    if angles.shape == features.shape[:-1] and may_recompute(features):
        return _Reweight.apply(features, angles)
    return _reweight(features, angles)


def _reweight(features: Tensor, angles: Tensor) -> Tensor:
    weights = torch.stack([angles.cos(), angles.sin()], dim=-1).unsqueeze(-1)  # (b or 1, h or 1, n, 2, 1)
    return (features.unsqueeze(-2) * weights).flatten(-2)


class _Reweight(torch.autograd.Function):
    """`_reweight` with gradients that take a fifth of the time, because what lies between them stays in the cache."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, angles: Tensor) -> Tensor:
        ctx.save_for_backward(features, angles)
        return _reweight(features, angles)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, Tensor | None]:
        features, angles = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative
            needed = [tensor for tensor in ctx.saved_tensors if tensor.requires_grad]
            found = iter(torch.autograd.grad(_reweight(features, angles), needed, given, create_graph=True))
            return tuple(next(found) if need else None for need in ctx.needs_input_grad)
        of_features, of_angles = torch.empty_like(features), torch.empty_like(angles)
        parts = (states.split(_PART, dim=2) for states in (features, angles, given, of_features, of_angles))
        for own, angle, grad, feature_grad, angle_grad in zip(*parts, strict=True):
            cos, sin = angle.cos().unsqueeze(-1), angle.sin().unsqueeze(-1)
            of_cos, of_sin = grad.chunk(2, dim=-1)
            feature_grad.copy_((of_cos * cos).addcmul_(of_sin, sin))
            angle_grad.copy_((of_sin * cos).addcmul_(of_cos, sin, value=-1.0).mul_(own).sum(-1))
        return of_features, of_angles


def write_sums(key: Features, value: Tensor) -> LinearMemory:
    """Sum the features of keys (b, h, k, f) and their products with values (b, h, k, c); padding has zero features."""
    with maybe_autocast(value.device.type, enabled=False):
        sums = torch.matmul(key.rotated.transpose(-1, -2), value.to(key.rotated.dtype))
    return LinearMemory(sums, key.plain.sum(2))


def read_sums(query: Features, memory: LinearMemory) -> Tensor:
    """Read with (b, h, q, f) features: (b, h, q, c)."""
    with maybe_autocast(query.plain.device.type, enabled=False):
        normaliser = torch.matmul(query.plain, memory.total.unsqueeze(-1))
        return torch.matmul(query.rotated, memory.value) / normaliser.clamp(min=FLOOR)


def implied_weights(query: Features, key: Features) -> Tensor:
    """Compute the weights (b, h, q, k) with which queries read values, in quadratic time."""
    with maybe_autocast(query.plain.device.type, enabled=False):
        normaliser = torch.matmul(query.plain, key.plain.sum(2).unsqueeze(-1))
        return torch.matmul(query.rotated, key.rotated.transpose(-1, -2)) / normaliser.clamp(min=FLOOR)


class LearnedProportion(nn.Module):
    """LeaP, a network from the features of a token to its proportion, shared by all heads (section 3.3)."""

    def __init__(self, size: int, inner_size: int) -> None:
        super().__init__()
        self.inner = nn.Linear(size, inner_size)
        self.outer = nn.Linear(inner_size, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Map features (b, h, n, c) to proportions (b, h, n), in float32 or wider."""
        # Tokens come before heads in memory, so that flattening them is a view.
        inner = F.relu(self.inner(features.transpose(1, 2)))
        logits = self.outer(inner).squeeze(-1).transpose(1, 2)
        # At first, all proportions are near 0.5, where they are equal in bfloat16 and would get no gradient.
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).sigmoid()


class LinearAttention(MemoryAttention):
    """Features of queries and keys, for encoders and decoders."""

    def __init__(self, config: LeapformerConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        learned, size = config.reweighting == "learned", config.hidden_size // config.num_attention_heads
        sizes = (size, -(-size // config.leap_factor))
        self.query_proportion = LearnedProportion(*sizes) if learned else None
        self.key_proportion = LearnedProportion(*sizes) if learned else None

    @staticmethod
    def rotary_size(config: LeapformerConfig) -> int:
        """Half of a head, rounded to an even number of at least 2."""
        return 2 * max(config.hidden_size // config.num_attention_heads // 4, 1)

    def queries(self, states: Tensor) -> Tensor:
        """Project (b, n, d) states to queries (b, h, n, c)."""
        return project_heads(self.query, states, self.num_heads)

    def query_features(self, query: Tensor, context: ForwardContext) -> Features:
        """Compute the features of queries (b, h, n, c)."""
        return self.features(query, self.query_proportion, context)

    def key_features(self, key: Tensor, context: ForwardContext) -> Features:
        """Compute the features of keys (b, h, n, c); those of padding are zero."""
        return self.features(key, self.key_proportion, context, context.keep)

    def features(
        self, states: Tensor, network: nn.Module | None, context: ForwardContext, keep: Tensor | None = None
    ) -> Features:
        """Compute the features of queries or keys (b, h, n, c), zero where `keep` (b, n) is False."""
        features = map_features(states, self.config.feature_map)
        if keep is not None:
            features = features.masked_fill(~keep[:, None, :, None], 0.0)
        proportions, turn = None, context.rotation
        if network is not None:
            proportions = network(features.to(states.dtype))
        elif self.config.reweighting == "cosine":  # equation 9, with the number of real tokens
            proportions = ((context.ranks + 1).to(features.dtype) / context.lengths.clamp(min=1)).unsqueeze(1)
        elif self.config.reweighting == "rotary" and turn is None:
            turn = rotation(context.ranks, self.rotary_size(self.config), features.dtype)
        return make_features(features, proportions, turn)

    def drop_tokens(self, value: Tensor) -> Tensor:
        """Apply attention dropout to values (b, h, n, c), each token of a head as a whole."""
        if not (self.attention_dropout and self.training):
            return value
        return value * F.dropout(torch.ones_like(value[..., :1]), self.attention_dropout)


class LeapformerAttention(LinearAttention):
    """Encoder attention: all tokens write the sums."""

    memory_class = LinearMemory

    def write(self, states: Tensor, slot_states: Tensor | None, context: ForwardContext) -> Memory:
        """Write the sums over the tokens."""
        return Memory([self.write_tokens(*self.key_and_value(states), context)], slot_states)

    def write_tokens(self, key: Tensor, value: Tensor, context: ForwardContext) -> LinearMemory:
        """Write (b, h, n, c) keys and values."""
        value = self.drop_tokens(value)
        written = [
            write_sums(self.key_features(key[:, :, part], own), value[:, :, part])
            for part, own in self.token_parts(key, context)
        ]
        return reduce(LinearMemory.plus, written)

    def read(self, hidden_states: Tensor, memory: Memory, context: ForwardContext) -> tuple[Tensor, None]:
        """Like `MemoryAttention.read`; sums have no weights to return."""
        output = self.read_tokens(self.queries(hidden_states), *memory.parts, context)
        return output.flatten(2).to(hidden_states.dtype), None

    def read_tokens(self, query: Tensor, memory: LinearMemory, context: ForwardContext) -> Tensor:
        """Read with (b, h, n, c) queries: (b, n, h, c) in float32 or wider."""
        outputs = [
            read_sums(self.query_features(query[:, :, part], own), memory).transpose(1, 2)
            for part, own in self.token_parts(query, context)
        ]
        return torch.cat(outputs, dim=1)

    def forward(
        self, hidden_states: Tensor, slot_states: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Like `MemoryAttention.forward`; the weights (b, h, n, n) are computed only if asked for."""
        output, slot_states, _ = super().forward(hidden_states, slot_states, context)
        asked = context.options.get("output_attentions", self.config.output_attentions)
        if not asked or self.config._attn_implementation != "eager":
            return output, slot_states, None
        return output, slot_states, self.weights(hidden_states, context)

    def weights(self, states: Tensor, context: ForwardContext) -> Tensor:
        """Compute the weights (b, h, n, n) of self-attention; rotary positions make some negative."""
        key, _ = self.key_and_value(states)
        query = self.query_features(self.queries(states), context)
        return implied_weights(query, self.key_features(key, context)).to(states.dtype)


def attend_causally(
    query: Features, key: Features, value: Tensor, memory: LinearMemory | None = None, keep: Tensor | None = None
) -> tuple[Tensor, LinearMemory]:
    """Write to the sums and read them, from left to right.

    Features of queries and keys are (b, h, n, f), those of padded keys zero; values are (b, h, n, c). Returns the
    outputs (b, h, n, c) in the dtype of the features, and the sums after the last token.
    """
    values, totals = (None, None) if memory is None else (memory.value, memory.total.unsqueeze(-1))
    if query.rotated is query.plain:  # the normaliser is the sum of values of 1, a column of the same scan
        before = None if memory is None else torch.cat([values, totals], dim=-1)
        output, sums = causal_scan(query.plain, key.plain, F.pad(value, (0, 1), value=1.0), before, keep)
        (output, normaliser), (values, totals) = (both.split([value.shape[-1], 1], -1) for both in (output, sums))
    else:
        output, values = causal_scan(query.rotated, key.rotated, value, values, keep)
        normaliser, totals = causal_scan(query.plain, key.plain, torch.ones_like(value[..., :1]), totals, keep)
    # Copies, so that a state does not depend on how it was computed, nor holds on to more.
    memory = LinearMemory(values.contiguous(), totals.squeeze(-1).contiguous())
    return output / normaliser.clamp(min=FLOOR), memory


class LeapformerCausalAttention(LinearAttention, CausalAttention):
    """Causal self-attention, with the same parameters as the encoder's `LeapformerAttention`."""

    def forward(
        self, hidden_states: Tensor, slot_states: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None, None]:
        """Like `MemoryAttention.forward`, without weights: the state does not hold the earlier tokens."""
        output = self.attend(self.queries(hidden_states), *self.key_and_value(hidden_states), context)
        return output.transpose(1, 2).flatten(2).to(hidden_states.dtype), slot_states, None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: ForwardContext) -> Tensor:
        """Update the state with (b, h, n, c) keys and values, and read it: (b, h, n, c) in float32 or wider."""
        cache = context.layer_cache(self.layer_idx)
        sums = {} if cache is None else {name: cache.states.get(name) for name in LinearMemory._fields}
        memory = LinearMemory(**sums) if sums.get("value") is not None else None
        output, memory = attend_causally(
            self.query_features(query, context),
            self.key_features(key, context),
            self.drop_tokens(value),
            memory,
            context.keep,
        )
        if cache is not None:
            cache.write(**memory._asdict())
        return output
