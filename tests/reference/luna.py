"""A literal, slow reference of Luna: one row, one head and one query at a time. Shares no code with the package.

Equations are those of Ma et al. 2021 (arXiv 2106.01540). Weights are a dict with the parameter names of `LunaModel`.
"""

import math
from types import SimpleNamespace

import torch
from torch import Tensor

from . import mixed


def softmax_read(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Eq. 1 for one query (c,), given keys and values (k, c)."""
    if keys.shape[0] == 0:
        return torch.zeros_like(query)
    logits = torch.stack([query @ key / math.sqrt(query.shape[0]) for key in keys])
    weights = torch.exp(logits - logits.max())
    weights = weights / weights.sum()
    return sum(weight * value for weight, value in zip(weights, values, strict=True))


def attention(queries: Tensor, keys: Tensor, values: Tensor, num_heads: int) -> Tensor:
    """Multi-head attention of (q, d) over (k, d), heads concatenated, without output projection."""
    size = queries.shape[-1] // num_heads
    heads = []
    for h in range(num_heads):
        part = slice(h * size, (h + 1) * size)
        heads.append(torch.stack([softmax_read(q[part], keys[:, part], values[:, part]) for q in queries]))
    return torch.cat(heads, dim=-1)


def linear(weights: dict, name: str, states: Tensor) -> Tensor:
    """x W^T + b."""
    return states @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def layer_norm(weights: dict, name: str, states: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last dimension; the identity if the model has no LayerNorm of that name."""
    if f"{name}.weight" not in weights:
        return states
    mean = states.mean(-1, keepdim=True)
    variance = ((states - mean) ** 2).mean(-1, keepdim=True)
    return (states - mean) / torch.sqrt(variance + eps) * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def gelu(states: Tensor) -> Tensor:
    """x Phi(x)."""
    return states * 0.5 * (1 + torch.erf(states / math.sqrt(2)))


def key_value(weights: dict, name: str, states: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, from two matrices or one shared matrix."""
    if f"{name}.key_value.weight" in weights:
        both = linear(weights, f"{name}.key_value", states)
        return both, both
    key = "key" if f"{name}.key.weight" in weights else "value"  # LAVO without a window has no keys
    return linear(weights, f"{name}.{key}", states), linear(weights, f"{name}.value", states)


def convolution(weights: dict, name: str, states: Tensor) -> Tensor:
    """Depthwise convolution out_t = sum_j w_j * x_{t + j - k // 2}, with zeros beyond the ends."""
    taps = weights[f"{name}.weight"]  # (d, k)
    out = []
    for t in range(states.shape[0]):
        total = torch.zeros_like(states[0])
        for j in range(taps.shape[1]):
            source = t + j - taps.shape[1] // 2
            if 0 <= source < states.shape[0]:
                total = total + taps[:, j] * states[source]
        out.append(total)
    return torch.stack(out)


def pack_and_unpack(
    weights: dict, own: str, x: Tensor, p: Tensor, used: int, config: SimpleNamespace
) -> tuple[Tensor, Tensor]:
    """Eq. 4 (pack) and eq. 5 (unpack) with inputs x (n, d) and p (l, d): (n, d) and (l, d).

    In a mixed layer, the tokens read those in their window together with the slots.
    """
    heads, window = config.num_attention_heads, config.local_window
    packed = attention(
        linear(weights, f"{own}.pack.query", p), *key_value(weights, f"{own}.pack", x), config.packed_heads
    )
    query = linear(weights, f"{own}.query", x)
    slots = [states[:used] for states in key_value(weights, own, packed)]
    if not window and not getattr(config, "marked", ()):
        return attention(query, *slots, heads), packed
    tokens, counts, outputs = key_value(weights, own, x), torch.full((used,), len(x) / used, dtype=x.dtype), []
    for h in range(heads):
        part = slice(h * x.shape[1] // heads, (h + 1) * x.shape[1] // heads)
        q, own_slots, own_tokens = query[:, part], *([side[:, part] for side in pair] for pair in (slots, tokens))
        scale = weights[f"{own}.slot_scale"][h] if config.slot_count_bias and window else 0.0
        rule = mixed.Rule.of(config, scale)
        selected = mixed.select(q, own_tokens[0], rule) if rule.selected else []
        outputs.append(mixed.attention(q, own_slots, [True] * used, counts, own_tokens, rule, selected)[0])
    return torch.cat(outputs, dim=-1), packed


def layer(weights: dict, index: int, x: Tensor, p: Tensor, used: int, config: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """One layer on one row without padding: x (n, d), p (l, d); only the first `used` slots are unpacked.

    Eq. 4 (pack), eq. 5 (unpack), eq. 6 (residuals and norms). A layer with full attention leaves p alone.
    """
    name = f"encoder.layer.{index}"
    eps, own = config.layer_norm_eps, f"{name}.attention.self"
    norm_a, norm_p, norm_f = (
        f"{name}.attention.output.LayerNorm",
        f"{own}.packed_layer_norm",
        f"{name}.output.LayerNorm",
    )
    x_in = layer_norm(weights, norm_a, x, eps) if config.norm_first else x
    p_in = layer_norm(weights, norm_p, p, eps) if config.norm_first else p

    if index in (config.full_attention_layers or ()):
        sides = (linear(weights, f"{own}.{side}", x_in) for side in ("query", "key", "value"))
        read = attention(*sides, config.num_attention_heads)
    else:
        read, packed = pack_and_unpack(weights, own, x_in, p_in, used, config)
        p = p + packed if config.norm_first else layer_norm(weights, norm_p, p + packed, eps)
    update = linear(weights, f"{name}.attention.output.dense", read)
    if f"{name}.attention.convolution.weight" in weights:
        update = update + convolution(weights, f"{name}.attention.convolution", x_in)

    x = x + update if config.norm_first else layer_norm(weights, norm_a, x + update, eps)
    inner = layer_norm(weights, norm_f, x, eps) if config.norm_first else x
    inner = linear(weights, f"{name}.output.dense", gelu(linear(weights, f"{name}.intermediate.dense", inner)))
    x = x + inner
    return (x if config.norm_first else layer_norm(weights, norm_f, x, eps)), p


def slots_in_use(tokens: int, config: SimpleNamespace) -> int:
    """Number of slots of a row: one more for every `tokens_per_slot` tokens that have begun, while there are slots."""
    if not config.dynamic_projection:
        return config.projection_length
    begun = [first for first in range(tokens) if first % config.tokens_per_slot == 0]
    return min(len(begun), config.projection_length)


def sinusoid(position: int, dim: int) -> Tensor:
    """Sines, then cosines, of position * 10000^(-i / (d/2 - 1)), rounded to float32 as the model stores them."""
    half = dim // 2
    angles = [position * 10000 ** (-i / (half - 1)) for i in range(half)]
    values = [math.sin(a) for a in angles] + [math.cos(a) for a in angles] + [0.0] * (dim - 2 * half)
    return torch.tensor(values, dtype=torch.float64).float().double()


def encode_row(
    weights: dict, token_ids: list[int], config: SimpleNamespace, memory: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Token states (n, d) and packed states (l, d) of the whole encoder for one row without padding.

    P starts from `memory`, the packed states of an earlier call, if it is given.
    """
    n, slots = len(token_ids), config.projection_length
    used = slots_in_use(n, config) if memory is None else slots
    x = torch.stack([weights["embeddings.word_embeddings.weight"][i] for i in token_ids])
    p = weights["packed_embeddings.weight"]
    first_position = config.pad_token_id + 1
    if config.position_embedding_type == "sinusoidal":
        scale = math.sqrt(x.shape[-1])
        x = x * scale + torch.stack([sinusoid(first_position + t, x.shape[-1]) for t in range(n)])
        p = p * scale + torch.stack([sinusoid(j, x.shape[-1]) for j in range(slots)])
    else:
        x = x + weights["embeddings.position_embeddings.weight"][first_position : first_position + n]
    if "embeddings.token_type_embeddings.weight" in weights:
        x = x + weights["embeddings.token_type_embeddings.weight"][0]
    x = layer_norm(weights, "embeddings.LayerNorm", x, config.layer_norm_eps)
    p = layer_norm(weights, "packed_embeddings.LayerNorm", p, config.layer_norm_eps)
    # Unused slots start as zero; they are packed, but never read.
    p = torch.cat([p[:used], torch.zeros_like(p[used:])]) if memory is None else memory
    for i in range(config.num_hidden_layers):
        x, p = layer(weights, i, x, p, used, config)
    x = layer_norm(weights, "encoder.final_layer_norm", x, config.layer_norm_eps)
    return x, layer_norm(weights, "packed_layer_norm", p, config.layer_norm_eps)
