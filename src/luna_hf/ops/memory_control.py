"""Control strategies of ABC, attention with bounded-memory control (Peng et al., ACL 2022), as pure functions.

A memory of m slots is written with one control vector phi_i in R^m per token, and read with softmax attention
(equations 3 and 4):

    K~ = sum_i phi_i (x) k_i      V~ = sum_i phi_i (x) v_i      out = softmax(q K~^T / sqrt(c)) V~

A strategy is a choice of phi. Dense strategies are weights over the tokens, (b, h, m, n). If phi_i is a multiple of a
unit vector, it reduces to the token's slot, (b, 1 or h, n), and the memory is written in O(n). Sliding windows, which
tokens leave again, are not written but read in place (`ops/memories.py`).

Shape letters: b batch, h heads, n tokens, m slots, c head size. `ranks` are indices among the real tokens of a row,
so that padding on either side changes nothing. Every mask is boolean with True = keep.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils.generic import maybe_autocast

from .attention import masked_softmax
from .dispatch import choose
from .tokens import weight_shares, write_to_slots

# Number of tokens compared with the centroids at a time on a CPU, small enough for the products to stay in cache.
_NEAREST_TOKENS = 1024


# ---- dense controls: weights over the tokens ----


def control_weights(logits: Tensor, keep: Tensor | None = None, activation: str = "exp") -> Tensor:
    """Compute phi of ABC-MLP (equation 7): `alpha_i / sum_j alpha_j` per slot, with `alpha_i = activation(W x_i)`.

    Activations are "exp" (as in the paper, a softmax over the tokens), and its ablations "relu" and "sigmoid"
    (Table 8). With "relu", a slot whose logits are all negative stays empty. The logits W x_i, (b, h, m, n), give
    weights of the same shape; tokens masked by `keep`, (b, n) or (b, 1 or h, n), get weight zero. Computed in float32
    or wider.
    """
    keep = _of_slots(keep)
    if activation == "exp":
        return masked_softmax(logits, keep)
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if activation == "sigmoid":
        # The same quotient in log space, which stays accurate when all sigmoids of a slot underflow.
        return masked_softmax(F.logsigmoid(precise), keep).to(logits.dtype)
    alpha = torch.relu(precise)
    alpha = alpha if keep is None else alpha.masked_fill(~keep, 0.0)
    total = alpha.sum(-1, keepdim=True).clamp(min=torch.finfo(alpha.dtype).tiny)
    return (alpha / total).to(logits.dtype)


def control_shares(logits: Tensor, keep: Tensor | None = None, activation: str = "exp") -> Tensor:
    """Divide each token among the slots in proportion to its weights `alpha_i` in ABC-MLP (equation 7).

    Summed over the tokens, the shares (b, h, m, n) are the number of tokens that each slot stands for; all slots
    together stand for all tokens, except those whose weights are all zero ("relu"). Arguments as for `control_weights`.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if activation == "relu":
        shares = weight_shares(torch.relu(logits), dim=-2)
    else:
        shares = (F.logsigmoid(logits) if activation == "sigmoid" else logits).softmax(-2)
    return shares if keep is None else shares.masked_fill(~_of_slots(keep), 0.0)


def _of_slots(keep: Tensor | None) -> Tensor | None:
    """Turn a mask of tokens, (b, n) or (b, 1 or h, n), into one for (b, h, m, n)."""
    keep = keep.unsqueeze(1) if keep is not None and keep.dim() == 2 else keep
    return None if keep is None else keep.unsqueeze(-2)


# ---- controls that assign each token to one slot ----


def compressive_slots(ranks: Tensor, lengths: Tensor, num_slots: int) -> Tensor:
    """Mean-pooling compression (equation 8): phi_i = e_{floor(i / c)} / c with c = N / m.

    If m does not divide N, the number of tokens per slot differs by at most one; with N <= m, each token has a slot.
    Ranks (b, n) and lengths (b, 1) give (b, n) in [0, m); a slot is the mean of its tokens.
    """
    return torch.where(lengths <= num_slots, ranks, ranks * num_slots // lengths.clamp(min=1))


def compressive_starts(lengths: Tensor, num_slots: int) -> Tensor:
    """Ranks at which the slots of `compressive_slots` start, and the end of the last one: (b, 1) to (b, m + 1)."""
    slots = torch.arange(num_slots + 1, device=lengths.device)
    starts = (slots * lengths + num_slots - 1) // num_slots
    return torch.where(lengths <= num_slots, torch.minimum(slots, lengths), starts)


def global_slots(ranks: Tensor, lengths: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    """Local-to-global attention (appendix A.1): phi_i = e_j if token i is the j-th global token, else 0.

    The global tokens are m evenly spaced tokens of the row, the first included, or all tokens if there are at most m.
    Ranks (b, n) and lengths (b, 1) give slots (b, n) in [0, m), and (b, n) boolean, True for the global tokens.
    """
    # Slot j holds the token of rank floor(j * length / m), so ceil(rank * m / length) is a rank's only candidate for j.
    lengths = lengths.clamp(min=1)
    slots = -(-ranks * num_slots // lengths)
    spread = slots * lengths // num_slots == ranks
    slots = torch.where(lengths <= num_slots, ranks, slots.clamp(max=num_slots - 1))
    return slots, (lengths <= num_slots) | spread


@torch.no_grad()
def cluster_slots(key: Tensor, ranks: Tensor, lengths: Tensor, keep: Tensor | None, m: int, iterations: int) -> Tensor:
    """Clustering (section 3.2, equation 6): the membership M of k-means on the keys of each row and head.

    Lloyd's algorithm, initialised with the keys of m evenly spaced tokens, assigns all tokens to their nearest
    centroids `iterations` times. Gradients flow through the centroids written to the memory, but not through the
    membership. Keys (b, h, n, c), ranks (b, n), lengths (b, 1) and the padding mask (b, n) give (b, h, n) in [0, m).
    """
    key = key.to(torch.promote_types(key.dtype, torch.float32))
    kept = None if keep is None else keep[:, None]
    first, is_first = global_slots(ranks, lengths, m)
    is_first = is_first if keep is None else is_first & keep
    # With fewer tokens than slots the last centroids stay zero; each token is itself a centroid, which is nearer.
    centroids = write_to_slots(key, first[:, None], m, is_first[:, None])
    # Autocast would compute the products in half precision and assign tokens to the wrong clusters.
    with maybe_autocast(key.device.type, enabled=False):
        slots = _nearest(key, centroids)
        for _ in range(iterations - 1):
            counts = tokens_per_slot(slots, m, kept)
            means = write_to_slots(key, slots, m, kept) / counts.clamp(min=1).unsqueeze(-1)
            centroids = torch.where((counts > 0).unsqueeze(-1), means, centroids)
            slots = _nearest(key, centroids)
    return slots


def _nearest(key: Tensor, centroids: Tensor) -> Tensor:
    # Minimising |k - c|^2 means maximising k . c - |c|^2 / 2, because |k|^2 is the same for all centroids.
    half_norms = centroids.square().sum(-1).unsqueeze(-2) / 2
    blocks = key.split(_NEAREST_TOKENS, dim=2) if choose("nearest_centroid", key) == "parts" else [key]
    nearness = (torch.matmul(block, centroids.transpose(-1, -2)).sub_(half_norms) for block in blocks)
    return torch.cat([near.argmax(-1) for near in nearness], dim=-1)


def tokens_per_slot(slots: Tensor, num_slots: int, keep: Tensor | None = None) -> Tensor:
    """Count the kept tokens of each slot: (b, 1 or h, n) to (b, 1 or h, m) long."""
    slots, ones = (slots, torch.ones_like(slots)) if keep is None else torch.broadcast_tensors(slots, keep.long())
    return slots.new_zeros(*slots.shape[:2], num_slots).scatter_add(2, slots, ones)
