"""A literal, slow reference of LAVO: one row, one head and one token at a time.

Equations and sections are those of Zhang et al. 2023 (arXiv 2312.11135). Shares no code with the package.
"""

import math
from types import SimpleNamespace

import torch
from torch import Tensor

from .causal import heads, rotate
from .luna import linear


def softmax(logits: Tensor) -> Tensor:
    """Softmax of a vector."""
    exponentials = torch.exp(logits - logits.max().detach())
    return exponentials / exponentials.sum()


def code(bases: Tensor, tokens: Tensor) -> Tensor:
    """Equation 3: CODE(X) = B * H for one head, (r, c) and (n, c) to (r, c)."""
    h = sum(bases @ x for x in tokens) / len(tokens)
    return torch.stack([b * mean for b, mean in zip(bases, h, strict=True)])


def code_so_far(bases: Tensor, tokens: Tensor) -> list[Tensor]:
    """Equation 4: X~_{<=t} for every t, from the recurrence of H_t."""
    memories, h = [], torch.zeros(len(bases), dtype=tokens.dtype)
    for t, x in enumerate(tokens, start=1):
        h = ((t - 1) * h + bases @ x) / t
        memories.append(torch.stack([b * mean for b, mean in zip(bases, h, strict=True)]))
    return memories


def read(query: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Section 3.1: softmax(q_t^T X~^T) X~ of one query (c,), and the weights (r,)."""
    weights = softmax(memory @ query)
    return weights @ memory, weights


def places(t: int, n: int, w: int, causal: bool) -> list[int | None]:
    """Section 3.2: the w tokens that token t sees, `None` beyond the row; w // 2 before itself, or the last w."""
    first = t - (w - 1) if causal else t - w // 2
    return [place if 0 <= place < n else None for place in range(first, first + w)]


def local(
    t: int, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, w: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """Sections 3.2 and 3.3: the local feature (c,) of token t of (n, c), and its weights (w,); `bias` is P."""
    inside = places(t, len(query), w, causal)
    read_places = [place for place in inside if place is not None]
    scores = key[read_places] @ query[t] / math.sqrt(query.shape[1])
    if bias is not None:  # P_{j - i + w - 1}
        scores = scores + bias[[place - t + w - 1 for place in read_places]]
    shares = softmax(scores)
    weights = torch.zeros(w, dtype=value.dtype)
    weights[[index for index, place in enumerate(inside) if place is not None]] = shares
    return shares @ value[read_places], weights


def head(
    bases: Tensor | None,
    bias: Tensor | None,
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    config: SimpleNamespace,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """One head of self-attention: (n, c) queries, and queries, keys and values of the window; (n, c) and weights."""
    query, window_query, key, value = rows
    n, w = len(query), config.local_window
    locals_, tokens = [], value
    if w and (config.attention_parts != "global" or config.context_dissection):
        locals_ = [local(t, window_query, key, value, bias, w, causal) for t in range(n)]
        if config.context_dissection:
            tokens = torch.stack([feature for feature, _ in locals_])
    parts = []
    if config.attention_parts != "local":
        memories = code_so_far(bases, tokens) if causal else [code(bases, tokens)] * n
        parts.append([read(query[t], memories[t]) for t in range(n)])
    if locals_ and config.attention_parts != "global":
        parts.append(locals_)
    outputs = torch.stack([sum(part[t][0] for part in parts) / len(parts) for t in range(n)])
    return outputs, torch.stack([torch.cat([part[t][1] for part in parts]) / len(parts) for t in range(n)])


def attention(weights: dict, x: Tensor, config: SimpleNamespace, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Self-attention of one row (n, d) without padding: the heads (h, n, c), and the weights (h, n, any).

    Args:
        weights: the parameters of the attention, by name.
        x: (n, d) states.
        config: fields of `LavoConfig`.
        causal: whether a token reads only itself and earlier tokens.
    """
    query, value = (heads(linear(weights, name, x), config.num_attention_heads) for name in ("query", "value"))
    key, turned = query, query
    if "key.weight" in weights:
        key = heads(linear(weights, "key", x), config.num_attention_heads)
        if config.position_embedding_type == "rotary":
            key, turned = rotate(key), rotate(query)
    found = []
    for index, rows in enumerate(zip(query, turned, key, value, strict=True)):
        bases = weights["bases"][index] if "bases" in weights else None
        found.append(head(bases, weights.get("position_bias"), rows, config, causal))
    outputs, maps = zip(*found, strict=True)
    return torch.stack(outputs), torch.stack(maps)


def cross_attention(weights: dict, y: Tensor, x: Tensor, config: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """Equations 5 and 6: targets (m, d) read a source (n, d); the heads (h, m, c) and the weights (h, m, r)."""
    query, value = heads(linear(weights, "query", y), config.num_attention_heads), linear(weights, "value", x)
    value, outputs, maps = heads(value, config.num_attention_heads), [], []
    for index in range(len(query)):
        memory = code(weights["bases"][index], value[index])
        reads = [read(q, memory) for q in query[index]]
        outputs.append(torch.stack([output for output, _ in reads]))
        maps.append(torch.stack([row for _, row in reads]))
    return torch.stack(outputs), torch.stack(maps)


def attend(weights: dict, own: str, index: int, x: Tensor, states: list[Tensor], config: SimpleNamespace) -> Tensor:
    """Causal attention, as `mechanism` of `causal.decode_row`; only the window reads rotated queries and keys."""
    names = {name.removeprefix(f"{own}."): tensor for name, tensor in weights.items() if name.startswith(f"{own}.")}
    return attention(names, x, config, causal=True)[0]
