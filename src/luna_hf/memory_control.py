"""Control strategies of ABC, attention with bounded-memory control (Peng et al., ACL 2022): pure functions.

A memory of m slots is written with control vectors phi_i in R^m, one for each token, and read with softmax attention
(equations 3 and 4):

    K~ = sum_i phi_i (x) k_i      V~ = sum_i phi_i (x) v_i      out = softmax(q K~^T / sqrt(c)) V~

A strategy is a choice of phi. Dense ones are weights over the tokens, (b, h, m, n). Where phi_i is a multiple of a unit
vector, the token's slot is all there is to know, (b, 1 or h, n), and the memory is written in O(n). Where tokens leave
the memory again (a window), the read is attention to the neighbours.

Shape letters: b batch, h heads, n tokens, m slots, c head size. `rank` is a token's place among the real tokens of its
row, so that no strategy sees padding, wherever it stands. Every mask is boolean with True = keep.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils import is_tracing
from transformers.utils.generic import maybe_autocast

from .functional import masked_softmax, write_to_slots

# Tokens compared with the centroids at a time on a CPU: so many products stay in cache, whatever the length.
_NEAREST_TOKENS = 1024

CONTROLS = (
    "mlp",
    "linformer",
    "random",
    "cluster",
    "sliding_window",
    "dilated",
    "local_to_global",
    "compressive",
    "full",
)
# Those that write from left to right, with a state of constant size.
CAUSAL_CONTROLS = ("mlp", "linformer", "random", "sliding_window")
ACTIVATIONS = ("exp", "relu", "sigmoid")


# ---- dense controls: weights over the tokens ----


def control_weights(logits: Tensor, keep: Tensor | None = None, activation: str = "exp") -> Tensor:
    """phi of ABC-MLP, equation 7: `alpha_i / sum_j alpha_j` per slot, with `alpha_i = activation(W x_i)`.

    Args:
        logits: (b, h, m, n), the products W x_i.
        keep: (b, n); padding gets zero.
        activation: "exp" (the paper's: a softmax over the tokens), or "relu" or "sigmoid" (its ablations, Table 8). A
            slot that relu lets no token write stays empty.

    Returns:
        (b, h, m, n), non-negative, computed in float32 at least.
    """
    keep = None if keep is None else keep[:, None, None, :]
    if activation == "exp":
        return masked_softmax(logits, keep)
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if activation == "sigmoid":
        # The same quotient by logarithms: a slot whose sigmoids are all too small for the type still has its weights.
        return masked_softmax(F.logsigmoid(precise), keep).to(logits.dtype)
    alpha = torch.relu(precise)
    alpha = alpha if keep is None else alpha.masked_fill(~keep, 0.0)
    total = alpha.sum(-1, keepdim=True).clamp(min=torch.finfo(alpha.dtype).tiny)
    return (alpha / total).to(logits.dtype)


# ---- ranks and lengths: a row without its padding ----


def row_lengths(keep: Tensor | None, length: int, device: torch.device) -> Tensor:
    """(b, 1) long: real tokens of every row; (1, 1) where nothing is padded."""
    if keep is None:
        return torch.full((1, 1), length, dtype=torch.long, device=device)
    return keep.sum(-1, keepdim=True)


# ---- controls that give every token one slot ----


def random_slots(ranks: Tensor, num_slots: int, seed: int) -> Tensor:
    """ABC-Random, appendix A.2: phi_i = e_j with j uniform in {1..m}, here a hash of rank and seed.

    The draw is the same on every machine, in every batch and for every length.

    Args:
        ranks: (b, n).
        num_slots: m.
        seed: chooses the draw.

    Returns:
        (b, n) long in [0, m).
    """
    # Two rounds of xor-shift and multiplication modulo 2^32, in 64 bits without overflow.
    mask = 0xFFFFFFFF
    hashed = (ranks + (seed * 0x9E3779B1 & mask) + 0x7F4A7C15) & mask
    for _ in range(2):
        hashed = ((hashed ^ (hashed >> 16)) * 0x045D9F3B) & mask
    hashed = hashed ^ (hashed >> 16)
    return hashed * num_slots >> 32  # the upper bits: a remainder would favour the first slots


def compressive_slots(ranks: Tensor, lengths: Tensor, num_slots: int) -> Tensor:
    """Mean-pooling compression, equation 8: phi_i = e_{floor(i / c)} / c with c = N / m.

    Where m does not divide the row's length, neighbouring slots take one token more or less; a row with at most m
    tokens is kept as it is.

    Args:
        ranks, lengths: (b, n) and (b, 1).
        num_slots: m.

    Returns:
        (b, n) long in [0, m); the memory is the mean over the tokens of a slot.
    """
    return torch.where(lengths <= num_slots, ranks, ranks * num_slots // lengths.clamp(min=1))


def global_slots(ranks: Tensor, lengths: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    """Local-to-global attention, appendix A.1: phi_i = e_j if token i is the j-th global token, else 0.

    The global tokens are m tokens spread evenly over the row, the first one among them; all if there are no more.

    Args:
        ranks, lengths: (b, n) and (b, 1).
        num_slots: m.

    Returns:
        Slots (b, n) long in [0, m), and (b, n) boolean, True for the global tokens.
    """
    # Slot j holds the token of rank floor(j * length / m): the only j that a rank can have is ceil(rank * m / length).
    lengths = lengths.clamp(min=1)
    slots = -(-ranks * num_slots // lengths)
    spread = slots * lengths // num_slots == ranks
    slots = torch.where(lengths <= num_slots, ranks, slots.clamp(max=num_slots - 1))
    return slots, (lengths <= num_slots) | spread


@torch.no_grad()
def cluster_slots(key: Tensor, ranks: Tensor, lengths: Tensor, keep: Tensor | None, m: int, iterations: int) -> Tensor:
    """Clustering, section 3.2 and equation 6: the membership M of k-means on the keys of every row and head.

    Lloyd's algorithm from the keys of m tokens spread evenly over the row; membership has no gradient, the centroids
    that the memory is written with have.

    Args:
        key: (b, h, n, c).
        ranks, lengths, keep: (b, n), (b, 1) and (b, n).
        m: number of clusters.
        iterations: assignments of all tokens to the nearest centroid; the last is returned.

    Returns:
        (b, h, n) long in [0, m).
    """
    key = key.to(torch.promote_types(key.dtype, torch.float32))
    kept = None if keep is None else keep[:, None]
    first, is_first = global_slots(ranks, lengths, m)
    is_first = is_first if keep is None else is_first & keep
    # With fewer tokens than slots the last centroids stay zero; every token is one of the others, which is nearer.
    centroids = write_to_slots(key, first[:, None], m, is_first[:, None])
    # Autocast would round the products to half precision again and put tokens into other than their nearest clusters.
    with maybe_autocast(key.device.type, enabled=False):
        slots = _nearest(key, centroids)
        for _ in range(iterations - 1):
            counts = slot_counts(slots, m, kept)
            means = write_to_slots(key, slots, m, kept) / counts.clamp(min=1).unsqueeze(-1)
            centroids = torch.where((counts > 0).unsqueeze(-1), means, centroids)
            slots = _nearest(key, centroids)
    return slots


def _nearest(key: Tensor, centroids: Tensor) -> Tensor:
    # Least |k - c|^2 is greatest k . c - |c|^2 / 2: |k|^2 is the same for all centroids.
    half_norms = centroids.square().sum(-1).unsqueeze(-2) / 2
    whole = key.device.type != "cpu" or is_tracing(key)
    blocks = [key] if whole else key.split(_NEAREST_TOKENS, dim=2)
    nearness = (torch.matmul(block, centroids.transpose(-1, -2)).sub_(half_norms) for block in blocks)
    return torch.cat([near.argmax(-1) for near in nearness], dim=-1)


def slot_counts(slots: Tensor, num_slots: int, keep: Tensor | None = None) -> Tensor:
    """Number of kept tokens of every slot: (b, h, n) to (b, h, m) long, without the dimensions that `slots` lacks."""
    ones = torch.ones_like(slots) if keep is None else keep.long().expand_as(slots)
    return slots.new_zeros(*slots.shape[:2], num_slots).scatter_add(2, slots, ones)


# ---- windows: tokens enter and leave the memory ----


def window_reach(window: int, causal: bool = False) -> tuple[int, int]:
    """Tokens before and after a token that its window of that many tokens (itself among them) holds."""
    return (window - 1, 0) if causal else (window // 2, (window - 1) // 2)


def to_windows(
    query: Tensor, key: Tensor, value: Tensor, window: int, causal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut a sequence in blocks of queries, each with all the keys and values that a window of it reaches.

    Args:
        query, key, value: (b, h, n, c).
        window: m, tokens that a query may attend to.
        causal: whether it ends with the query.

    Returns:
        Queries (b * blocks, h, m, c), keys and values (b * blocks, h, 2 m - 1, c), zeros beyond the ends.
    """
    length = query.shape[2]
    blocks = _number_of_blocks(length, window)
    query = F.pad(query.transpose(1, 2), (0, 0, 0, 0, 0, blocks * window - length))
    query = query.flatten(0, 1).unflatten(0, (query.shape[0] * blocks, window))
    key, value = (_blocks_of_keys(states.transpose(1, 2), window, causal) for states in (key, value))
    return tuple(states.transpose(1, 2) for states in (query, key, value))


def _number_of_blocks(length: int, window: int) -> int:
    return (length + window - 1) // window


def _blocks_of_keys(states: Tensor, window: int, causal: bool) -> Tensor:
    """What the windows of every block reach: (b, n, ...) to (b * blocks, 2 m - 1, ...), zeros beyond the ends."""
    # No dimension is the number of blocks alone: a graph would be made again for a length of one block.
    batch, length = states.shape[:2]
    before, _ = window_reach(window, causal)
    blocks = _number_of_blocks(length, window)
    pads = (0, 0) * (states.dim() - 2) + (before, (blocks + 1) * window - before - length)
    block = torch.arange(batch * blocks, device=states.device)
    first = (block + block // blocks) * window  # a padded row is one block longer
    places = first[:, None] + torch.arange(2 * window - 1, device=states.device)
    rows = F.pad(states, pads).flatten(0, 1).index_select(0, places.flatten())
    return rows.unflatten(0, (batch * blocks, 2 * window - 1))


def window_mask(keep: Tensor | None, length: int, window: int, device: torch.device, causal: bool = False) -> Tensor:
    """Which keys of `to_windows` a query may attend to: (b * blocks, 1, m, 2 m - 1) boolean; b is 1 without `keep`."""
    keep = torch.ones(1, length, dtype=torch.bool, device=device) if keep is None else keep
    real = _blocks_of_keys(keep, window, causal)  # (b * blocks, 2 m - 1)
    # Query i of a block has its window from key i on.
    offset = torch.arange(2 * window - 1, device=device) - torch.arange(window, device=device)[:, None]
    band = (offset >= 0) & (offset < window)
    return (real[:, None, :] & band).unsqueeze(1)


def from_windows(states: Tensor, batch: int, length: int) -> Tensor:
    """(b * blocks, m, ...) to (b, n, ...), the places beyond the end cut off."""
    places = _number_of_blocks(length, states.shape[1]) * states.shape[1]
    return first_places(states.flatten(0, 1).unflatten(0, (batch, places)), length)


def first_places(states: Tensor, length: int) -> Tensor:
    """(b, n, ...) to (b, length, ...), copied: the layout of a slice depends on whether it leaves something out."""
    return states.index_select(1, torch.arange(length, device=states.device))


def window_weights(weights: Tensor, batch: int, length: int, window: int) -> Tensor:
    """Weights of the blocks (b * blocks, h, m, 2 m - 1) to (b, h, n, m), entry j being the j-th token of the window."""
    columns = torch.arange(window, device=weights.device)
    columns = (columns[:, None] + columns).expand(*weights.shape[:3], window)
    return from_windows(weights.gather(-1, columns).transpose(1, 2), batch, length).transpose(1, 2)


def interleave(states: Tensor) -> Tensor:
    """Dilation, equation 9: (b, n, ...) to (2 b, n / 2, ...), even and odd places as rows of their own; n is even."""
    return states.unflatten(1, (states.shape[1] // 2, 2)).transpose(1, 2).flatten(0, 1)


def undo_interleave(states: Tensor) -> Tensor:
    """(2 b, n / 2, ...) to (b, n, ...)."""
    return states.unflatten(0, (states.shape[0] // 2, 2)).transpose(1, 2).flatten(1, 2)
