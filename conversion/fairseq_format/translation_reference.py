"""The authors' encoder-decoder, written out in float64 for one pair of rows without padding; see `reference.py`.

Source: Ma et al. 2021 (arXiv 2106.01540), sections 3.1 to 3.4, and where they leave a point open, the authors' released
code. Everything comes from the stored tensors by their official names and from the authors' arguments.

Shapes: s source tokens, n target tokens, l packed slots in use, width d, h heads.
"""

import math

import torch
from torch import Tensor

from .checkpoint import Original
from .reference import PADDING_ID, Stored, activation, attend


def translate(original: Original, source: Tensor, target: Tensor) -> dict[str, Tensor]:
    """What the authors' model computes for ids (s,) and (n,).

    Returns:
        Float64 tensors: `encoder.{i}.x` (s, d) and `encoder.{i}.px` (l, d) after the embedding (i = 0) and every layer,
        the same for `decoder` with `x` (n, d), and `logits` (n, target vocabulary). In a pre-norm model, those of the
        last layer include the final LayerNorm.
    """
    states = encode(original, source)
    memory, p = list(states.values())[-2:]
    stored, options = Stored(original, "decoder."), original.options
    x = embed(stored, target)
    states |= {"decoder.0.x": x}
    for i in range(count(original, "decoder.")):
        x, p = decoder_layer(Stored(original, f"decoder.layers.{i}."), x, p, memory)
        states |= {f"decoder.{i + 1}.x": x, f"decoder.{i + 1}.px": p}
    if options.decoder_normalize_before:
        states[f"decoder.{i + 1}.x"] = x = stored.norm("layer_norm", x)
    has_output = "output_projection.weight" in stored
    output = stored["output_projection.weight" if has_output else "embed_tokens.weight"]
    return states | {"logits": x @ output.T}


def count(original: Original, part: str) -> int:
    """Number of layers of the encoder or decoder."""
    layers = 0
    while f"{part}layers.{layers}.fc1.weight" in original.weights:
        layers += 1
    return layers


def encode(original: Original, source: Tensor) -> dict[str, Tensor]:
    """The states of the encoder; the last two are what the decoder gets."""
    stored, options = Stored(original, "encoder."), original.options
    x, p = embed(stored, source), embed_packed(stored, len(source))
    states = {"encoder.0.x": x, "encoder.0.px": p}
    for i in range(count(original, "encoder.")):
        x, p = encoder_layer(Stored(original, f"encoder.layers.{i}."), x, p)
        states |= {f"encoder.{i + 1}.x": x, f"encoder.{i + 1}.px": p}
    if options.encoder_normalize_before:
        x, p = stored.norm("layer_norm", x), stored.norm("proj_layer_norm", p)
        states |= {f"encoder.{i + 1}.x": x, f"encoder.{i + 1}.px": p}
    return states


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Sines, then cosines, then zeros in a column left over; rounded to float32 like the authors' table."""
    half = width // 2
    angles = positions[:, None] * torch.exp(-math.log(10000) / max(half - 1, 1) * torch.arange(half).double())
    table = torch.zeros(len(positions), width, dtype=torch.float64)
    table[:, :half], table[:, half : 2 * half] = angles.sin(), angles.cos()
    return table.float().double()


def embed(stored: Stored, tokens: Tensor) -> Tensor:
    """Token embeddings, scaled by sqrt(d), with positions from row padding_id + 1, then LayerNorm: (n, d)."""
    x, positions = stored.rows("embed_tokens.weight", tokens), PADDING_ID + 1 + torch.arange(len(tokens))
    x = x if stored.options.no_scale_embedding else x * math.sqrt(x.shape[-1])
    if "embed_positions.weight" in stored:
        x = x + stored.rows("embed_positions.weight", positions)
    elif not stored.options.no_token_positional_embeddings:
        x = x + sinusoids(positions, x.shape[-1])
    return stored.norm("layernorm_embedding", x) if "layernorm_embedding.weight" in stored else x


def embed_packed(stored: Stored, length: int) -> Tensor:
    """P_0 (l, d), scaled like the tokens; with sinusoidal positions it has its own, from 0."""
    p = stored["projected_embeddings"]
    p = p if stored.options.no_scale_embedding else p * math.sqrt(p.shape[-1])
    if not (stored.options.encoder_learned_pos or stored.options.no_token_positional_embeddings):
        p = p + sinusoids(torch.arange(len(p)), p.shape[-1])
    p = stored.norm("layernorm_porjected_embedding", p) if "layernorm_porjected_embedding.weight" in stored else p
    return p if stored.options.fix_projection_length else p[:length]


def nested(stored: Stored, attn: str, x: Tensor, p: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
    """Pack the context with P, unpack with X: Y_X (n, d) with its output projection, and Y_P (l, d)."""
    options = stored.options
    key, value = ("pc_proj", "pc_proj") if f"{attn}pc_proj.weight" in stored else ("pk_proj", "pv_proj")
    packed = attend(
        stored.linear(f"{attn}pq_proj", p),
        stored.linear(attn + key, context),
        stored.linear(attn + value, context),
        options.encoder_projected_attention_heads or options.encoder_attention_heads,
    )
    key, value = ("c_proj", "c_proj") if f"{attn}c_proj.weight" in stored else ("k_proj", "v_proj")
    read = attend(
        stored.linear(f"{attn}q_proj", x),
        stored.linear(attn + key, packed),
        stored.linear(attn + value, packed),
        options.encoder_attention_heads,
    )
    return stored.linear(f"{attn}out_proj", read), packed


def encoder_layer(stored: Stored, x: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """One layer of the encoder."""
    first = stored.options.encoder_normalize_before
    before = [stored.norm("self_attn_layer_norm", x), stored.norm("self_atten_proj_layer_norm", p)] if first else [x, p]
    y, packed = nested(stored, "self_attn.", *before, before[0])
    x, p = x + y, p + packed
    if not first:
        x, p = stored.norm("self_attn_layer_norm", x), stored.norm("self_atten_proj_layer_norm", p)
    return feed_forward(stored, x, first), p


def decoder_layer(stored: Stored, x: Tensor, p: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """One layer of the decoder: causal attention with P, attention to the source, which updates P, feed-forward."""
    first = stored.options.decoder_normalize_before
    y = causal_attention(stored, stored.norm("self_attn_layer_norm", x) if first else x, p)
    x = x + y if first else stored.norm("self_attn_layer_norm", x + y)
    before = [x, p]
    if first:
        before = [stored.norm("encoder_attn_layer_norm", x), stored.norm("encoder_atten_proj_layer_norm", p)]
    y, packed = nested(stored, "encoder_attn.", *before, memory)
    x, p = x + y, p + packed
    if not first:
        x, p = stored.norm("encoder_attn_layer_norm", x), stored.norm("encoder_atten_proj_layer_norm", p)
    return feed_forward(stored, x, first), p


def causal_attention(stored: Stored, x: Tensor, p: Tensor) -> Tensor:
    """Section 3.3, token by token: (n, d)."""
    heads, attn = stored.options.encoder_attention_heads, "self_attn."
    key, value = ("c_proj", "c_proj") if f"{attn}c_proj.weight" in stored else ("k_proj", "v_proj")
    names = ("q_proj", key, value, "pc_proj")
    query, key, value, pack_key = (split(stored.linear(attn + name, x), heads) for name in names)
    pack_query = split(stored.linear(f"{attn}pq_proj", p), heads)
    scale = query.shape[-1] ** -0.5
    logits = pack_key @ pack_query.mT * scale  # (h, n, l)
    if stored.options.pack_activation == "elu":
        pack = torch.where(logits > 0, logits + 1, logits.clamp(max=0).exp())
    else:
        pack = torch.logaddexp2(logits, torch.zeros_like(logits))
    keys = torch.zeros(heads, query.shape[-1], len(p), dtype=x.dtype)
    values, outputs = keys.mT.clone(), []
    for t in range(len(x)):
        keys = keys + key[:, t, :, None] * pack[:, t, None]
        values = values + pack[:, t, :, None] * value[:, t, None]
        read = torch.softmax((query[:, t, None] * scale @ keys).squeeze(1) / (t + 1), dim=-1)
        outputs.append((read[:, None] @ values).squeeze(1).flatten() / (t + 1))
    return stored.linear(f"{attn}out_proj", torch.stack(outputs))


def split(states: Tensor, heads: int) -> Tensor:
    """(n, d) to (h, n, d / h)."""
    return states.unflatten(-1, (heads, -1)).transpose(0, 1)


def feed_forward(stored: Stored, x: Tensor, first: bool) -> Tensor:
    """The feed-forward sub-layer."""
    inner = stored.norm("final_layer_norm", x) if first else x
    x = x + stored.linear("fc2", activation(stored.options.activation_fn, stored.linear("fc1", inner)))
    return x if first else stored.norm("final_layer_norm", x)
