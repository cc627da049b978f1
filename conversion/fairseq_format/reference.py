"""The authors' masked language model and its classification heads, written out in float64 for one row without padding.

Source: Ma et al., "Luna: Linear Unified Nested Attention", NeurIPS 2021 (arXiv 2106.01540), sections 3.1 and 3.2. Where
the paper leaves a point open, the authors' released code decides, and a comment says so. Everything comes from the
stored tensors by their official names and from the authors' arguments. Neither luna_hf nor a table of names is used, so
no mistake there can stay hidden. A single row without padding needs no masks.

Shapes: n tokens, l packed slots in use, width d, h heads.
"""

import math

import torch
from torch import Tensor

from .checkpoint import LM_HEAD, SENTENCE_ENCODER, Original

# The authors' dictionary begins with `<s> <pad> </s> <unk>`; positions count from the row after padding's.
PADDING_ID = 1
EPSILON = 1e-5  # of every LayerNorm


def run(original: Original, tokens: Tensor, head: str | None = None) -> dict[str, Tensor]:
    """What the authors' model computes for one row of ids.

    Args:
        original: the stored tensors and the authors' arguments.
        tokens: (n,) ids without padding.
        head: name of a classification head; `None` for the masked-LM head.

    Returns:
        Float64 tensors: `hidden.{i}.x` (n, d) and `hidden.{i}.px` (l, d) after the embedding (i = 0) and every layer;
        `logits` (n, vocabulary) or `head.{name}` (classes,).
    """
    states = encode(original, tokens)
    x, p = list(states.values())[-2:]
    if head is None:
        return states | {"logits": masked_lm_head(original, x)}
    return states | {f"head.{head}": classification_head(original, head, x, p)}


def encode(original: Original, tokens: Tensor) -> dict[str, Tensor]:
    """The hidden states of `run`; the last two are the final ones."""
    x, p = embed_tokens(original, tokens), embed_packed(original, len(tokens))
    states = {"hidden.0.x": x, "hidden.0.px": p}
    while f"{SENTENCE_ENCODER}layers.{len(states) // 2 - 1}.fc1.weight" in original.weights:
        i = len(states) // 2
        x, p = layer(Stored(original, f"{SENTENCE_ENCODER}layers.{i - 1}."), x, p)
        states |= {f"hidden.{i}.x": x, f"hidden.{i}.px": p}
    return states


class Stored:
    """Tensors under a prefix, each cast to float64 only when used, to save memory."""

    def __init__(self, original: Original, prefix: str) -> None:
        self.original, self.prefix, self.options = original, prefix, original.options

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.original.weights

    def __getitem__(self, name: str) -> Tensor:
        return self.original.weights[self.prefix + name].double()

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """The rows `ids` of an embedding."""
        return self.original.weights[self.prefix + name][ids].double()

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x W^T + b."""
        return x @ self[f"{name}.weight"].T + self[f"{name}.bias"]

    def norm(self, name: str, x: Tensor) -> Tensor:
        """LayerNorm. Files of the later code store `weight - 1`; `norm_offset` adds the 1."""
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + EPSILON)
        return scaled * (self[f"{name}.weight"] + self.original.norm_offset) + self[f"{name}.bias"]


def embed_tokens(original: Original, tokens: Tensor) -> Tensor:
    """X_0 (n, d): token and learned position embeddings, then LayerNorm.

    Released code: the first token takes row padding_id + 1 of the position embedding.
    """
    stored = Stored(original, SENTENCE_ENCODER)
    positions = PADDING_ID + 1 + torch.arange(len(tokens))
    x = stored.rows("embed_tokens.weight", tokens) + stored.rows("embed_positions.weight", positions)
    return stored.norm("emb_layer_norm", x)


def embed_packed(original: Original, length: int) -> Tensor:
    """P_0 (l, d): the learned packed sequence (section 3.1) with its own LayerNorm and no positions.

    Released code: a row of `length` tokens uses at most that many slots, unless the projection is fixed.
    """
    stored = Stored(original, SENTENCE_ENCODER)
    p = stored["projected_embeddings"]
    if not original.options.fix_projection_length:
        p = p[:length]
    return stored.norm("proj_emb_layer_norm", p)


def layer(stored: Stored, x: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """One layer: equations 3 (pack), 4 (unpack) and 6; `p` (l, d) comes from the previous layer."""
    heads, attn = stored.options.encoder_attention_heads, "self_attn."
    # Pack: Y_P = Attn(P, X). The concatenated heads are not projected (released code). Tied models have one projection
    # for key and value; the names show which kind a file holds.
    key, value = ("pc_proj", "pc_proj") if f"{attn}pc_proj.weight" in stored else ("pk_proj", "pv_proj")
    y_p = attend(
        stored.linear(f"{attn}pq_proj", p),
        stored.linear(attn + key, x),
        stored.linear(attn + value, x),
        heads,
    )
    # Unpack: Y_X = Attn(X, Y_P) W_o reads Y_P before its residual connection and LayerNorm.
    key, value = ("c_proj", "c_proj") if f"{attn}c_proj.weight" in stored else ("k_proj", "v_proj")
    y_x = attend(
        stored.linear(f"{attn}q_proj", x),
        stored.linear(attn + key, y_p),
        stored.linear(attn + value, y_p),
        heads,
    )
    # X_A = LN(Y_X + X), P' = LN(Y_P + P).
    x = stored.norm("self_attn_layer_norm", x + stored.linear(f"{attn}out_proj", y_x))
    p = stored.norm("self_atten_proj_layer_norm", p + y_p)
    # X' = LN(FFN(X_A) + X_A). P has no feed-forward network.
    inner = activation(stored.options.activation_fn, stored.linear("fc1", x))
    return stored.norm("final_layer_norm", x + stored.linear("fc2", inner)), p


def attend(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    """softmax(Q K^T / sqrt(d / h)) V in every head (equation 1), concatenated: (m, d), (n, d), (n, d) to (m, d)."""
    query, key, value = (t.unflatten(-1, (heads, -1)).transpose(0, 1) for t in (query, key, value))  # (h, ., d / h)
    weights = torch.softmax(query @ key.mT / math.sqrt(query.shape[-1]), dim=-1)
    return (weights @ value).transpose(0, 1).flatten(1)


def masked_lm_head(original: Original, x: Tensor) -> Tensor:
    """(n, d) to (n, vocabulary), as in RoBERTa: dense, activation, LayerNorm, output matrix and bias.

    Without an output matrix in the file, the token embedding takes its place.
    """
    stored = Stored(original, LM_HEAD)
    x = stored.norm("layer_norm", activation(stored.options.activation_fn, stored.linear("dense", x)))
    matrix = stored if "weight" in stored else Stored(original, f"{SENTENCE_ENCODER}embed_tokens.")
    return x @ matrix["weight"].T + stored["bias"]


def classification_head(original: Original, name: str, x: Tensor, p: Tensor) -> Tensor:
    """Final states (n, d) and (l, d) to (classes,). The head's name decides what it reads (released code)."""
    stored = Stored(original, f"classification_heads.{name}.")
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
        ValueError: Their code has no activation of that name.
    """
    if name == "gelu":
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    if name in ("gelu_accurate", "gelu_fast"):
        return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if name == "relu":
        return x.clamp(min=0)
    if name == "tanh":
        return torch.tanh(x)
    if name == "linear":
        return x
    raise ValueError(f"The authors' code has no activation {name!r}.")
