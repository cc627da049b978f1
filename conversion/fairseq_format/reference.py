"""The authors' models, written out in float64 for one row (or one pair of rows) without padding.

Source: Ma et al., "Luna: Linear Unified Nested Attention", NeurIPS 2021 (arXiv 2106.01540), sections 3.1 to 3.4. Where
the paper leaves a point open, the authors' released code decides, and a comment says so. Everything comes from the
stored tensors by their official names and from the authors' arguments. Neither luna_hf nor the table of names is used,
so no mistake there can stay hidden. Without padding, no masks are needed.

Shapes: n tokens (of the source or the target), l packed slots in use, width d, h heads.
"""

import math
from itertools import count

import torch
from torch import Tensor

from .checkpoint import Original
from .names import HEADS, LM_HEAD

# The authors' dictionary begins with `<s> <pad> </s> <unk>`; positions count from the row after padding's.
PADDING_ID = 1
EPSILON = 1e-5  # of every LayerNorm


class Stored:
    """Tensors under a prefix, each cast to float64 only when used, to save memory."""

    def __init__(self, original: Original, prefix: str) -> None:
        self.original, self.prefix, self.options = original, prefix, original.options

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.original.weights

    def __getitem__(self, name: str) -> Tensor:
        return self.original.weights[self.prefix + name].double()

    def under(self, prefix: str) -> "Stored":
        """The tensors under a longer prefix."""
        return Stored(self.original, self.prefix + prefix)

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """The rows `ids` of an embedding."""
        return self.original.weights[self.prefix + name][ids].double()

    def layers(self) -> int:
        """Number of layers."""
        return next(i for i in count() if f"layers.{i}.fc1.weight" not in self)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x W^T + b."""
        return x @ self[f"{name}.weight"].T + self[f"{name}.bias"]

    def norm(self, name: str, x: Tensor) -> Tensor:
        """LayerNorm."""
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + EPSILON)
        return scaled * self[f"{name}.weight"] + self[f"{name}.bias"]


def run(original: Original, tokens: Tensor, part: str | None = "lm_head") -> dict[str, Tensor]:
    """What the authors' masked language model computes for ids (n,), with `"lm_head"` or a head of another name.

    Returns:
        Float64 tensors: `hidden.{i}.x` (n, d) and `hidden.{i}.px` (l, d) after the embedding (i = 0) and every layer;
        `logits` (n, vocabulary) or `head.{name}` (classes,), or neither if `part` is `None`.
    """
    states, x, p = encode(original, tokens, "hidden")
    if part is None:
        return states
    if part == "lm_head":
        return states | {"logits": masked_lm_head(original, x)}
    return states | {f"head.{part}": classification_head(original, part, x, p)}


def translate(original: Original, source: Tensor, target: Tensor) -> dict[str, Tensor]:
    """What the authors' encoder-decoder computes for ids (s,) and (n,).

    Returns:
        Float64 tensors: the states of `run`, named `encoder` and `decoder` (without `px`), and `logits` (n, target
        vocabulary). In a pre-norm model, those of the last layer include the final LayerNorm.
    """
    states, memory, p = encode(original, source, "encoder")
    stored = Stored(original, "decoder.")
    states["decoder.0.x"] = x = embed(stored, target)
    for i in range(stored.layers()):
        x, p = decoder_layer(stored.under(f"layers.{i}."), x, p, memory)
        if stored.options.encoder_normalize_before and i + 1 == stored.layers():
            x = stored.norm("layer_norm", x)
        states[f"decoder.{i + 1}.x"] = x
    output = "output_projection.weight" if "output_projection.weight" in stored else "embed_tokens.weight"
    return states | {"logits": x @ stored[output].T}


def encode(original: Original, tokens: Tensor, name: str) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The states of the encoder, by `{name}.{i}`, and the last X (n, d) and P (l, d)."""
    stored = Stored(original, original.encoder)
    x, p = embed(stored, tokens), embed_packed(stored, len(tokens))
    states = {f"{name}.0.x": x, f"{name}.0.px": p}
    for i in range(stored.layers()):
        x, p = encoder_layer(stored.under(f"layers.{i}."), x, p)
        if stored.options.encoder_normalize_before and i + 1 == stored.layers():
            x, p = stored.norm("layer_norm", x), stored.norm("proj_layer_norm", p)
        states |= {f"{name}.{i + 1}.x": x, f"{name}.{i + 1}.px": p}
    return states, x, p


# ---- embeddings ----


def embed(stored: Stored, tokens: Tensor) -> Tensor:
    """X_0 (n, d): token embeddings, scaled in translation, with positions, then LayerNorm where there is one.

    Released code: the first token takes row padding_id + 1 of the positions.
    """
    x, positions = stored.rows("embed_tokens.weight", tokens), PADDING_ID + 1 + torch.arange(len(tokens))
    x = x if stored.options.no_scale_embedding else x * math.sqrt(x.shape[-1])
    learned = stored.options.encoder_learned_pos
    x = x + (stored.rows("embed_positions.weight", positions) if learned else sinusoids(positions, x.shape[-1]))
    return _first_norm(stored, x, "emb_layer_norm", "layernorm_embedding")


def embed_packed(stored: Stored, length: int) -> Tensor:
    """P_0 (l, d): the learned packed sequence (section 3.1); beside sinusoidal positions it has its own, from 0.

    Released code: a row of `length` tokens uses at most that many slots, unless the projection is fixed.
    """
    p = stored["projected_embeddings"]
    p = p if stored.options.no_scale_embedding else p * math.sqrt(p.shape[-1])
    p = p if stored.options.encoder_learned_pos else p + sinusoids(torch.arange(len(p)), p.shape[-1])
    p = _first_norm(stored, p, "proj_emb_layer_norm", "layernorm_porjected_embedding")
    return p if stored.options.fix_projection_length else p[:length]


def _first_norm(stored: Stored, x: Tensor, *names: str) -> Tensor:
    return next((stored.norm(name, x) for name in names if f"{name}.weight" in stored), x)


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Sines, then cosines, then zeros in a column left over; rounded to float32 like the authors' table."""
    half = width // 2
    angles = positions[:, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / max(half - 1, 1))
    table = torch.zeros(len(positions), width, dtype=torch.float64)
    table[:, :half], table[:, half : 2 * half] = angles.sin(), angles.cos()
    return table.float().double()


# ---- layers ----


def encoder_layer(stored: Stored, x: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """One layer (equations 3, 4 and 6): X_A = LN(Y_X + X), P' = LN(Y_P + P), X' = LN(FFN(X_A) + X_A)."""
    x, p = attention(stored, "self_attn", "self_atten_proj_layer_norm", x, p, None)
    return feed_forward(stored, x), p


def decoder_layer(stored: Stored, x: Tensor, p: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """One layer of the decoder: causal attention with P, attention to the source, which updates P, feed-forward."""
    first = stored.options.encoder_normalize_before
    y = causal_attention(stored, stored.norm("self_attn_layer_norm", x) if first else x, p)
    x = x + y if first else stored.norm("self_attn_layer_norm", x + y)
    x, p = attention(stored, "encoder_attn", "encoder_atten_proj_layer_norm", x, p, memory)
    return feed_forward(stored, x), p


def attention(
    stored: Stored, name: str, packed_norm: str, x: Tensor, p: Tensor, context: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention of X (n, d) and P (l, d) to a context (m, d), by default X; in a pre-norm layer, norms come first."""
    norm, first = f"{name}_layer_norm", stored.options.encoder_normalize_before
    before = (stored.norm(norm, x), stored.norm(packed_norm, p)) if first else (x, p)
    y_x, y_p = nested(stored.under(f"{name}."), *before, before[0] if context is None else context)
    x, p = x + y_x, p + y_p
    return (x, p) if first else (stored.norm(norm, x), stored.norm(packed_norm, p))


def nested(stored: Stored, x: Tensor, p: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
    """Pack: Y_P = Attn(P, C) (l, d). Unpack: Y_X = Attn(X, Y_P) W_o (n, d).

    Released code: the heads of the pack are not projected, and the unpack reads Y_P before its residual connection and
    LayerNorm. Tied models have one projection for key and value.
    """
    heads = stored.options.encoder_attention_heads
    key, value = ("pc_proj", "pc_proj") if "pc_proj.weight" in stored else ("pk_proj", "pv_proj")
    y_p = attend(
        stored.linear("pq_proj", p),
        stored.linear(key, context),
        stored.linear(value, context),
        stored.options.encoder_projected_attention_heads or heads,
    )
    key, value = _unpack(stored)
    y_x = attend(stored.linear("q_proj", x), stored.linear(key, y_p), stored.linear(value, y_p), heads)
    return stored.linear("out_proj", y_x), y_p


def _unpack(stored: Stored) -> tuple[str, str]:
    return ("c_proj", "c_proj") if "c_proj.weight" in stored else ("k_proj", "v_proj")


def attend(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    """softmax(Q K^T / sqrt(d / h)) V in every head (equation 1), concatenated: (m, d), (n, d), (n, d) to (m, d)."""
    query, key, value = (split(states, heads) for states in (query, key, value))
    weights = torch.softmax(query @ key.mT / math.sqrt(query.shape[-1]), dim=-1)
    return (weights @ value).transpose(0, 1).flatten(1)


def split(states: Tensor, heads: int) -> Tensor:
    """(n, d) to (h, n, d / h)."""
    return states.unflatten(-1, (heads, -1)).transpose(0, 1)


def causal_attention(layer: Stored, x: Tensor, p: Tensor) -> Tensor:
    """Section 3.3, token by token: (n, d)."""
    stored, heads = layer.under("self_attn."), layer.options.encoder_attention_heads
    query, key, value, pack_key = (
        split(stored.linear(name, x), heads) for name in ("q_proj", *_unpack(stored), "pc_proj")
    )
    pack_query = split(stored.linear("pq_proj", p), heads)
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
    return stored.linear("out_proj", torch.stack(outputs))


def feed_forward(stored: Stored, x: Tensor) -> Tensor:
    """The feed-forward sub-layer."""
    first = stored.options.encoder_normalize_before
    inner = stored.linear("fc1", stored.norm("final_layer_norm", x) if first else x)
    x = x + stored.linear("fc2", activation(stored.options.activation_fn, inner))
    return x if first else stored.norm("final_layer_norm", x)


# ---- heads ----


def masked_lm_head(original: Original, x: Tensor) -> Tensor:
    """(n, d) to (n, vocabulary), as in RoBERTa: dense, activation, LayerNorm, output matrix and bias.

    Without an output matrix in the file, the token embedding takes its place.
    """
    stored = Stored(original, LM_HEAD)
    x = stored.norm("layer_norm", activation(stored.options.activation_fn, stored.linear("dense", x)))
    matrix = stored if "weight" in stored else Stored(original, f"{original.encoder}embed_tokens.")
    return x @ matrix["weight"].T + stored["bias"]


def classification_head(original: Original, name: str, x: Tensor, p: Tensor) -> Tensor:
    """Final states (n, d) and (l, d) to (classes,). The head's name decides what it reads (released code)."""
    stored = Stored(original, f"{HEADS}{name}.")
    if name == "pooling_classification_head":
        pooled = stored.linear("in_proj", p).amax(0)
    elif name == "attention_classification_head":
        query = stored.linear("attn.q_proj", x[:1])
        key, value = stored.linear("attn.k_proj", p), stored.linear("attn.v_proj", p)
        attended = attend(query, key, value, stored.options.encoder_attention_heads)
        pooled = stored.norm("layernorm", stored.linear("attn.out_proj", attended)).squeeze(0)
    else:
        pooled = x[0]
    return stored.linear("out_proj", activation(stored.options.pooler_activation_fn, stored.linear("dense", pooled)))


def activation(name: str, x: Tensor) -> Tensor:
    """An activation by the authors' name for it.

    Raises:
        KeyError: Their code has no activation of that name.
    """
    accurate = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return {
        "gelu": 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
        "gelu_accurate": accurate,
        "gelu_fast": accurate,
        "relu": x.clamp(min=0),
        "tanh": torch.tanh(x),
        "linear": x,
    }[name]
