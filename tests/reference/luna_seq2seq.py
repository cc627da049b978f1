"""A literal, slow reference of Luna's encoder-decoder (Ma et al. 2021, section 3.4). Shares no code with the package.

One row of source and target without padding. Weights are a dict with the names of `LunaForConditionalGeneration`, and
`config` is that of the whole model.
"""

import math
from types import SimpleNamespace

import torch
from torch import Tensor

from . import causal
from .luna import attention, gelu, key_value, layer, layer_norm, linear, sinusoid, slots_in_use


def part(weights: dict, prefix: str) -> dict:
    """The weights under a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def embed(weights: dict, ids: list[int], config: SimpleNamespace) -> Tensor:
    """Embeddings (n, d) of source or target; positions count from `pad_token_id + 1` in both."""
    x = torch.stack([weights["embeddings.word_embeddings.weight"][i] for i in ids])
    x = x * math.sqrt(x.shape[-1]) if config.scale_embedding is not False else x
    first, n = config.pad_token_id + 1, len(ids)
    if config.position_embedding_type == "sinusoidal":
        x = x + torch.stack([sinusoid(first + t, x.shape[-1]) for t in range(n)])
    else:
        x = x + weights["embeddings.position_embeddings.weight"][first : first + n]
    return layer_norm(weights, "embeddings.LayerNorm", x, config.layer_norm_eps)


def encode(weights: dict, ids: list[int], config: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """States (s, d) of the source, and its packed states (l, d), of which only the slots in use."""
    used = slots_in_use(len(ids), config)
    x, p = embed(weights, ids, config), weights["packed_embeddings.weight"]
    p = p * math.sqrt(p.shape[-1]) if config.scale_embedding is not False else p
    if config.position_embedding_type == "sinusoidal":
        p = p + torch.stack([sinusoid(j, p.shape[-1]) for j in range(len(p))])
    p = layer_norm(weights, "packed_embeddings.LayerNorm", p, config.layer_norm_eps)[:used]
    for index in range(config.num_hidden_layers):
        x, p = layer(weights, index, x, p, used, config)
    x = layer_norm(weights, "encoder.final_layer_norm", x, config.layer_norm_eps)
    return x, layer_norm(weights, "packed_layer_norm", p, config.layer_norm_eps)


def causal_attention(weights: dict, own: str, y: Tensor, p: Tensor, config: SimpleNamespace) -> Tensor:
    """Section 3.3 with the packed states of the source (l, d) as P: (n, d)."""
    count = config.num_attention_heads
    sides = [linear(weights, f"{own}.query", y), *key_value(weights, own, y)]
    query, key, value = (causal.heads(side, count) for side in sides)
    pack_query = causal.heads(linear(weights, f"{own}.pack.query", p), count)
    pack_key = causal.heads(linear(weights, f"{own}.pack.key", y), count)
    logits = pack_key @ pack_query.transpose(-1, -2) / math.sqrt(pack_key.shape[-1])
    if config.pack_activation == "exp":
        output = causal.mlp(query, key, value, logits, "exp")[0]
    else:
        output = causal.luna(query, key, value, causal.omega(logits, config.pack_activation))[0]
    return torch.cat(list(output), dim=-1)


def decoder_layer(
    weights: dict, index: int, y: Tensor, p: Tensor, x: Tensor, config: SimpleNamespace
) -> tuple[Tensor, Tensor]:
    """One decoder layer: target states (n, d), packed states (l, d), source states (s, d)."""
    name, eps, first = f"encoder.layer.{index}", config.layer_norm_eps, config.norm_first

    def sub_layer(norm: str, states: Tensor, update) -> Tensor:
        if first:
            return states + update(layer_norm(weights, norm, states, eps))
        return layer_norm(weights, norm, states + update(states), eps)

    def attend(states: Tensor) -> Tensor:
        mixed = causal_attention(weights, f"{name}.attention.self", states, p, config)
        return linear(weights, f"{name}.attention.output.dense", mixed)

    y = sub_layer(f"{name}.attention.output.LayerNorm", y, attend)
    own, norm_p = f"{name}.crossattention.self", f"{name}.crossattention.self.packed_layer_norm"
    p_in = layer_norm(weights, norm_p, p, eps) if first else p
    packed_heads = config.num_projected_attention_heads or config.num_attention_heads
    packed = attention(linear(weights, f"{own}.pack.query", p_in), *key_value(weights, f"{own}.pack", x), packed_heads)

    def cross(states: Tensor) -> Tensor:
        slots = key_value(weights, own, packed)
        mixed = attention(linear(weights, f"{own}.query", states), *slots, config.num_attention_heads)
        return linear(weights, f"{name}.crossattention.output.dense", mixed)

    y = sub_layer(f"{name}.crossattention.output.LayerNorm", y, cross)
    p = p + packed if first else layer_norm(weights, norm_p, p + packed, eps)

    def feed_forward(states: Tensor) -> Tensor:
        return linear(weights, f"{name}.output.dense", gelu(linear(weights, f"{name}.intermediate.dense", states)))

    return sub_layer(f"{name}.output.LayerNorm", y, feed_forward), p


def translate_row(weights: dict, source: list[int], target: list[int], config: SimpleNamespace) -> Tensor:
    """Logits (n, decoder_vocab_size) for one row; `config` also has `packed_heads`, see `luna.pack_and_unpack`."""
    x, p = encode(part(weights, "luna.encoder."), source, config)
    decoder = part(weights, "luna.decoder.")
    y = embed(decoder, target, config)
    for index in range(config.decoder_layers):
        y, p = decoder_layer(decoder, index, y, p, x, config)
    y = layer_norm(decoder, "encoder.final_layer_norm", y, config.layer_norm_eps)
    return y @ weights["lm_head.weight"].T
