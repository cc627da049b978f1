"""A literal, slow reference of LeaPformer: one row, one head and one pair of tokens at a time.

Equations are those of Agostinelli et al. 2024 (arXiv 2405.13046). It computes every weight, where the package
decomposes the similarity. Shares no code with the package.
"""

import math
from types import SimpleNamespace

import torch
from torch import Tensor

from .causal import heads
from .luna import linear

FLOOR = 1e-6  # of the normaliser, as in cosFormer's code


def feature(state: Tensor, kind: str) -> Tensor:
    """S_q and S_k of equation 4, for one query or key (c,): relu, or elu + 1."""
    negative = torch.zeros_like(state) if kind == "relu" else torch.exp(torch.where(state > 0, 0.0, state))
    return torch.where(state > 0, state + (kind == "elu"), negative)


def learned(weights: dict, name: str, features: Tensor) -> Tensor:
    """LeaP of equation 10 for one query or key (c,): two layers, relu between them, sigmoid at the end."""
    inner = linear(weights, f"{name}.inner", features)
    outer = linear(weights, f"{name}.outer", torch.where(inner > 0, inner, 0.0))
    return 1 / (1 + torch.exp(-outer[0]))


def rotate(features: Tensor, position: int) -> Tensor:
    """R of equation 13 for one query or key (c,), on half of the entries: (i, i + r/2) by position 10000^(-2i / r)."""
    size = 2 * max(features.shape[0] // 4, 1)
    turned = list(features)
    for i in range(size // 2):
        angle = position * 10000 ** (-2 * i / size)
        a, b = features[i], features[i + size // 2]
        turned[i] = a * math.cos(angle) - b * math.sin(angle)
        turned[i + size // 2] = a * math.sin(angle) + b * math.cos(angle)
    return torch.stack(turned)


def head(
    weights: dict, query: Tensor, key: Tensor, value: Tensor, config: SimpleNamespace, causal: bool
) -> tuple[Tensor, Tensor]:
    """One head: (q, c) queries, (k, c) keys and values; outputs (q, c) and weights (q, k), equation 3."""
    queries = [feature(state, config.feature_map) for state in query]
    keys = [feature(state, config.feature_map) for state in key]
    if config.reweighting == "learned":
        asked = [learned(weights, "query_proportion", state) for state in queries]
        given = [learned(weights, "key_proportion", state) for state in keys]
    elif config.reweighting == "cosine":  # equation 9
        asked = [torch.tensor((i + 1) / len(queries), dtype=query.dtype) for i in range(len(queries))]
        given = [torch.tensor((j + 1) / len(keys), dtype=query.dtype) for j in range(len(keys))]
    else:
        asked = given = [torch.zeros((), dtype=query.dtype)] * max(len(queries), len(keys))
    rotary = config.reweighting == "rotary" or config.position_embedding_type == "rotary"
    turned = [[rotate(s, t) if rotary else s for t, s in enumerate(side)] for side in (queries, keys)]
    outputs, rows = [], []
    for i in range(len(queries)):
        similarities, normaliser = [], 0.0
        for j in range(len(keys)):
            visible = 0.0 if causal and j > i else 1.0
            sigma = visible * torch.cos(math.pi / 2 * (asked[i] - given[j]))  # equation 8
            similarities.append((turned[0][i] @ turned[1][j]) * sigma)
            normaliser = normaliser + (queries[i] @ keys[j]) * sigma
        rows.append(torch.stack(similarities) / torch.clamp(normaliser, min=FLOOR))
        outputs.append(sum(weight * value[j] for j, weight in enumerate(rows[-1])))
    return torch.stack(outputs), torch.stack(rows)


def attention(
    weights: dict, x: Tensor, config: SimpleNamespace, context: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Multi-head attention on one row without padding.

    Args:
        weights: the parameters of the attention, by name.
        x: (n, d) states that read.
        config: fields of `LeapformerConfig`.
        context: (any, d) states to read; x (self-attention) by default.
        causal: whether a token reads only itself and earlier tokens.

    Returns:
        The heads (h, n, c) and the weights (h, n, any).
    """
    context = x if context is None else context
    sides = linear(weights, "query", x), linear(weights, "key", context), linear(weights, "value", context)
    sides = (heads(side, config.num_attention_heads) for side in sides)
    rows = [head(weights, *parts, config, causal) for parts in zip(*sides, strict=True)]
    outputs, maps = zip(*rows, strict=True)
    return torch.stack(outputs), torch.stack(maps)


def attend(weights: dict, own: str, index: int, x: Tensor, states: list[Tensor], config: SimpleNamespace) -> Tensor:
    """Causal attention, as `mechanism` of `causal.decode_row`; rotates features, not the projections in `states`."""
    names = {name.removeprefix(f"{own}."): tensor for name, tensor in weights.items() if name.startswith(f"{own}.")}
    return attention(names, x, config, causal=True)[0]
