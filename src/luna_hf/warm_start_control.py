"""How a learned memory control starts from the attention of a trained encoder, instead of at random.

A slot of ABC-MLP is attention with a learned query that does not depend on the text (the paper's section 4, "pseudo
query"). A trained encoder has a good one for every place: what its own attention asks for there. Slots then hold the
surroundings of places spread evenly over the text, and a token finds its surroundings in the slot nearest to it.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def place_states(positions: Tensor, segment: Tensor | None, norm: tuple[Tensor, Tensor], eps: float) -> Tensor:
    """What the first layer of an encoder reads at places without a word: LayerNorm(position + first segment).

    Args:
        positions: (p, d) rows of the position table.
        segment: (d,) embedding of the first segment, if there are segments.
        norm: weight and bias (d,) of the embeddings' LayerNorm.
        eps: its epsilon.

    Returns:
        (p, d), float32.
    """
    states = positions.float() if segment is None else positions.float() + segment.float()
    return F.layer_norm(states, states.shape[-1:], norm[0].float(), norm[1].float(), eps)


def pseudo_queries(states: Tensor, query: tuple[Tensor, Tensor], key: Tensor, num_heads: int) -> Tensor:
    """W of equation 7 such that `W x` are the logits of an attention: `(W_q s + b_q) . W_k x / sqrt(c)`.

    The bias of the keys would add the same to all tokens of a slot, which the softmax over them takes out.

    Args:
        states: (m, d), what asks; one slot each, in every head.
        query: weight (d, d) and bias (d,) of the query projection.
        key: weight (d, d) of the key projection.
        num_heads: h.

    Returns:
        (h * m, d), float32, in the order of `AbcControl.weight`.
    """
    asked = F.linear(states, query[0].float(), query[1].float()).unflatten(-1, (num_heads, -1))  # (m, h, c)
    keys = key.float().unflatten(0, (num_heads, -1))  # (h, c, d)
    return (torch.einsum("mhc,hcd->hmd", asked, keys) * asked.shape[-1] ** -0.5).flatten(0, 1)


def spread_places(count: int, length: int) -> Tensor:
    """(count,) long: the middles of `count` equal parts of `length` places."""
    return (2 * torch.arange(count) + 1) * length // (2 * count)
