"""Projections absorbed by few slots instead of applied to many tokens: the same numbers from fewer products.

A projection is linear and so is what a memory does with its result, so each can move to the side of the slots. For
one head, with q a slot's query, k and v a slot's key and value, and A a softmax over the tokens:

    pack     softmax(q (x W_k + b_k)^T) (x W_v + b_v)  =  [A x] W_v + b_v,    A = softmax([q W_k^T] x^T)
    write    phi (x W_k + b_k)                         =  [phi x] W_k + sum(phi) b_k
    read     softmax((x W_q + b_q) k^T) v W_o          =  softmax(x [W_q k^T] + b_q k^T) [v W_o]

What is in brackets has one row for each head and slot. The key's bias adds the same to all logits of a softmax over
the tokens, which cancels it; the value's passes through, because the weights sum to one: with dropout, to their sum.

Shape letters: b batch, h heads, n tokens, m slots, d width, c = d / h head size. Every mask is boolean with True =
keep.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import product


def _of_heads(states: Tensor, matrices: Tensor) -> Tensor:
    """Multiply (b, h, m, p) states with a matrix for each head, (h, p, r), to (b, h, m, r)."""
    # One product for each head and all rows: with a batch of states, the matrices would be copied for each row.
    rows = product(states.transpose(0, 1).flatten(1, 2), matrices)
    return rows.unflatten(1, (states.shape[0], -1)).transpose(0, 1)


def absorbed_pack(
    query: Tensor,
    states: Tensor,
    key: nn.Linear,
    value: nn.Linear,
    keep: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention of the slots' queries (b, h, m, c) to (b, n, d) tokens: the concatenated heads (b, m, d).

    The layers `key` and `value` project the tokens, and may be the same. A row of padding alone, masked by `keep`
    (b, n), gives zeros. Dropout drops weights.
    """
    heads, size = query.shape[1], query.shape[-1]
    folded = _of_heads(query * size**-0.5, key.weight.unflatten(0, (heads, size)))  # (b, h, m, d)
    logits = product(folded.flatten(1, 2), states.transpose(1, 2))
    if keep is not None:
        logits.masked_fill_(~keep.unsqueeze(1), torch.finfo(logits.dtype).min)
    weights = F.dropout(logits.softmax(-1), dropout)
    read = product(weights, states).unflatten(1, (heads, -1))
    shares = weights.sum(-1).unflatten(1, (heads, -1)) if dropout else read.new_ones(1, 1, 1)
    if keep is not None:
        real = keep.any(-1).to(read.dtype)[:, None, None]
        read, shares = read * real.unsqueeze(-1), shares * real
    packed = project_slots(read, shares, value, heads).transpose(1, 2).flatten(2)
    # A gradient of zero for the key's bias: training with several processes waits for that of every parameter.
    return packed + 0.0 * key.bias.sum() if torch.is_grad_enabled() else packed


def project_slots(slots: Tensor, shares: Tensor, layer: nn.Linear, heads: int) -> Tensor:
    """Project weighted sums of tokens, as if the tokens had been projected before they were summed: (b, h, m, c).

    The sums are (b, h, m, d), or (b, 1, m, d) if the same for all heads; `shares`, the sums of the weights, are
    broadcastable to (b, 1 or h, m).
    """
    weight, bias = layer.weight.unflatten(0, (heads, -1)), layer.bias.view(heads, 1, -1)
    if slots.shape[1] == 1:
        projected = product(slots, layer.weight.T).unflatten(-1, (heads, -1)).transpose(1, 3).squeeze(3)
    else:
        projected = _of_heads(slots, weight.transpose(1, 2))
    return projected + shares.unsqueeze(-1) * bias


def absorbed_read(
    states: Tensor,
    query: nn.Linear,
    key: Tensor,
    value: Tensor,
    output: nn.Linear,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention of (b, n, d) tokens to slots, given the layers of the queries and of the output: (b, n, d).

    Keys and values of the slots are (b, h, m, c). The mask is broadcastable to (b, h, 1, m), boolean or added to the
    logits; without slots, attention yields zero. Dropout drops weights.
    """
    batch, heads, slots, size = key.shape
    key = key * size**-0.5
    folded = _of_heads(key, query.weight.unflatten(0, (heads, size))).flatten(1, 2)  # (b, h * m, d)
    bias = product(key, query.bias.view(heads, size, 1)).transpose(-1, -2)  # (b, h, 1, m)
    if mask is not None and mask.dtype == torch.bool:
        bias = bias.masked_fill(~mask, torch.finfo(bias.dtype).min)
        value = value.masked_fill(~mask.transpose(-1, -2), 0.0)
    elif mask is not None:
        bias = bias + mask
    values = _of_heads(value, output.weight.T.unflatten(0, (heads, size))).flatten(1, 2)
    logits = product(states, folded.transpose(1, 2)).view(batch, -1, heads, slots)
    weights = F.dropout(logits.add_(bias.transpose(1, 2)).softmax(-1), dropout)
    return product(weights.flatten(2), values).add_(output.bias)
