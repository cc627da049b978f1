"""Pure functions that the families share: heads, softmax attention, causal scan, positions, pooling, convolution.

Shape letters: b batch, h heads, n tokens, q queries, k keys, l slots, d width, c head size; p and r any sizes. Every
mask is boolean with True = keep. Nothing here holds parameters or reads a configuration.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils.generic import maybe_autocast

from .dispatch import choose

# Tokens of a step of the causal scan: the products inside a chunk cost as much as those with the state.
SCAN_CHUNK = 64


def split_heads(states: Tensor, num_heads: int) -> Tensor:
    """(b, n, d) to (b, h, n, c) with c = d / h; a view."""
    # Not `unflatten`: with it the older ONNX exporter takes the length of the example for that of all inputs.
    return states.view(*states.shape[:-1], num_heads, states.shape[-1] // num_heads).transpose(1, 2)


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None = None,
    scaling: float = 1.0,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`softmax(scaling q k^T) v` over the kept keys; a query without any key gives zeros.

    Args:
        query: (b, h, q, c).
        key, value: (b, h, k, c).
        keep: boolean, or an additive float mask, broadcastable to (b, h, q, k).
        scaling: factor of the logits.
        dropout: probability with which a weight is dropped (0 in inference).

    Returns:
        Output (b, h, q, c) and weights (b, h, q, k) as they were used, after dropout.
    """
    logits = torch.matmul(query * scaling, key.transpose(-1, -2))
    if keep is None:
        weights = masked_softmax(logits, None)
    elif keep.dtype == torch.bool:
        weights = masked_softmax(logits, keep)
    else:
        weights = masked_softmax(logits + keep, None)
    weights = F.dropout(weights, dropout) if dropout else weights
    return torch.matmul(weights, value), weights


def masked_softmax(logits: Tensor, keep: Tensor | None) -> Tensor:
    """Softmax over the last dimension among kept entries, in float32 at least; zeros where nothing is kept."""
    # PyTorch's softmax computes half precision in float32 by itself; asking for it would store the logits once more.
    if keep is None:
        return logits.softmax(-1).to(logits.dtype)  # autocast's comes in float32
    # The lowest finite number and not -inf: a row without any key must not turn into NaN, in the gradient either.
    lowest = torch.finfo(logits.dtype).min
    weights = logits.masked_fill(~keep, lowest).softmax(-1)
    return weights.masked_fill(~keep, 0.0).to(logits.dtype)


def causal_scan(
    x: Tensor,
    y: Tensor,
    z: Tensor,
    state: Tensor | None = None,
    keep: Tensor | None = None,
    chunk_size: int = SCAN_CHUNK,
) -> tuple[Tensor, Tensor]:
    """The causal running sum `out_t = x_t (state + sum_{j<=t} y_j^T z_j)`, in time and memory linear in n.

    Linear attention, Luna's causal average (paper, section 3.3) and the memory of ABC are this operator. Computed in
    float32 at least, whatever the types of the inputs: sums of half precision stop growing.

    Args:
        x, y: (b, h, n, p).
        z: (b, h, n, r).
        state: (b, h, p, r) sum over earlier tokens; none by default.
        keep: (b, n) boolean; other tokens add nothing (what they read is what the sum holds at their place).
        chunk_size: tokens that are treated at a time; the result is the same for all.

    Returns:
        Outputs (b, h, n, r) in the type of `x`, and the state after the last token (b, h, p, r).
    """
    if keep is not None:
        padding = ~keep[:, None, :, None]
        y, z = y.masked_fill(padding, 0.0), z.masked_fill(padding, 0.0)
    precise = torch.promote_types(x.dtype, torch.float32)
    if state is None:
        state = x.new_zeros(*x.shape[:2], x.shape[-1], z.shape[-1], dtype=precise)
    with maybe_autocast(x.device.type, enabled=False):
        implementation = "loop" if x.shape[2] <= chunk_size else choose("causal_scan", x)
        out, state = _SCANS[implementation](x, y, z, state, chunk_size)
    return out.to(x.dtype), state


def _scan_in_a_loop(x: Tensor, y: Tensor, z: Tensor, state: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    heads, outputs = x.shape[:2], []
    state = state.flatten(0, 1)
    # One split a tensor: its backward is one concatenation, that of slices a tensor of full length each.
    for chunk in zip(*(states.split(chunk_size, dim=2) for states in (x, y, z)), strict=True):
        out, state = scan_chunk(*(states.flatten(0, 1).to(state.dtype) for states in chunk), state)
        outputs.append(out.unflatten(0, heads))
    return torch.cat(outputs, dim=2), state.unflatten(0, heads)


def scan_chunk(x: Tensor, y: Tensor, z: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk of `causal_scan`: (b h, n, p), (b h, n, p), (b h, n, r) and the state (b h, p, r) before it."""
    after = torch.baddbmm(state, y.transpose(1, 2), z)
    if x.shape[1] == 1:  # decoding: the only token reads what it has written
        return torch.bmm(x, after), after
    within = torch.bmm(x, y.transpose(1, 2)).tril_()
    return torch.baddbmm(torch.bmm(within, z), x, state), after


def _scan_at_once(x: Tensor, y: Tensor, z: Tensor, state: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    length = x.shape[2]
    x, y, z = (to_chunks(states.to(state.dtype), chunk_size) for states in (x, y, z))  # (b, h, chunks, chunk_size, ...)
    sums = torch.matmul(y.transpose(-1, -2), z).cumsum(2)
    before = torch.cat([state.unsqueeze(2), state.unsqueeze(2) + sums[:, :, :-1]], dim=2)
    within = torch.matmul(x, y.transpose(-1, -2)).tril()
    out = torch.matmul(within, z) + torch.matmul(x, before)
    return out.flatten(2, 3)[:, :, :length], state + sums[:, :, -1]


_SCANS = {"loop": _scan_in_a_loop, "at_once": _scan_at_once}


def to_chunks(states: Tensor, chunk_size: int) -> Tensor:
    """(b, h, n, c) to (b, h, chunks, chunk_size, c), zeros behind the end."""
    padded = F.pad(states, (0, 0, 0, -states.shape[2] % chunk_size))
    return padded.unflatten(2, (-1, chunk_size))


def rotary_angles(positions: Tensor, size: int, dtype: torch.dtype = torch.float32, base: float = 10000.0) -> Tensor:
    """Angles of rotary positions (Su et al. 2021, RoFormer, equation 15): (b, n) to (b, n, size / 2).

    They are float32 at least, whatever the `dtype` of the states that are turned.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    frequencies = base ** (-torch.arange(0, size, 2, dtype=dtype, device=positions.device) / size)
    return positions.unsqueeze(-1) * frequencies


def rotate(states: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions: entry i and entry i + c / 2 of a head turn by the i-th angle of their token.

    Args:
        states: (b, h, n, c).
        angles: (b or 1, n, c / 2).

    Returns:
        (b, h, n, c) in the type of `states`; products of two rotated states depend on the distance of their tokens.
    """
    angles = angles.unsqueeze(1)
    cos, sin = angles.cos().to(states.dtype), angles.sin().to(states.dtype)
    first, second = states.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def token_ranks(keep: Tensor | None, length: int, device: torch.device) -> Tensor:
    """(b, n) long: 0 for the first real token of a row, 1 for the next; padding has its left neighbour's, or 0.

    (1, n) where nothing is padded.
    """
    if keep is None:
        return torch.arange(length, device=device)[None]
    return (keep.long().cumsum(-1) - 1).clamp(min=0)


def row_lengths(keep: Tensor | None, length: int, device: torch.device) -> Tensor:
    """(b, 1) long: real tokens of every row; (1, 1) where nothing is padded."""
    if keep is None:
        return torch.full((1, 1), length, dtype=torch.long, device=device)
    return keep.sum(-1, keepdim=True)


def move_to_ranks(states: Tensor, ranks: Tensor, keep: Tensor | None) -> Tensor:
    """(b, h, n, c) with every row's tokens moved to its front in their order, and zeros behind them."""
    if keep is None:
        return states
    return write_to_slots(states, ranks[:, None], states.shape[2], keep[:, None])


def write_to_slots(states: Tensor, slots: Tensor, num_slots: int, keep: Tensor | None = None) -> Tensor:
    """`sum_i e_{slot(i)} (x) s_i`: every kept state is added to its slot.

    Args:
        states: (b, h, n, c).
        slots: long, broadcastable to (b, h, n).
        num_slots: m.
        keep: boolean, broadcastable to (b, h, n); other tokens write nothing.

    Returns:
        (b, h, m, c).
    """
    if keep is not None:
        states = states.masked_fill(~keep.unsqueeze(-1), 0.0)
    batch, heads, length, size = states.shape
    # Whole states are added as rows of one table (b * h * m, c): on CPU many times faster than by their entries. Tokens
    # before heads, as the projections leave them, so that the rows are a view.
    first = num_slots * torch.arange(batch * heads, device=slots.device).view(batch, 1, heads)
    rows = slots.transpose(1, 2).expand(batch, length, heads) + first
    memory = states.new_zeros(batch * heads * num_slots, size)
    return memory.index_add(0, rows.flatten(), states.transpose(1, 2).flatten(0, 2)).view(batch, heads, num_slots, size)


def token_positions(keep: Tensor, padding_idx: int) -> Tensor:
    """Position ids as RoBERTa counts them: `padding_idx + t` for the t-th real token, `padding_idx` for padding.

    Args:
        keep: (b, n) boolean.

    Returns:
        (b, n) long.
    """
    return keep.long().cumsum(-1) * keep + padding_idx  # ONNX cannot add up booleans


def sinusoids(num_positions: int, dim: int, padding_idx: int | None = None) -> Tensor:
    """Sinusoidal table, sines in the first half and cosines in the second (the authors' layout), float32.

    Args:
        num_positions: rows; row p holds angle index p.
        dim: width; an odd one gets a last column of zeros.
        padding_idx: row that is zero.

    Returns:
        (num_positions, dim).
    """
    table = sinusoids_at(torch.arange(num_positions), dim)
    if padding_idx is not None:
        table[padding_idx] = 0.0
    return table


def sinusoids_at(positions: Tensor, dim: int) -> Tensor:
    """Rows of that table for any positions: (...) long to (..., dim) float32."""
    half = dim // 2
    # In float64 up to the end, where there is one: in float32 the error of an angle grows with the position.
    dtype = torch.float32 if positions.device.type == "mps" else torch.float64
    exponents = -torch.arange(half, dtype=dtype, device=positions.device) / max(half - 1, 1)
    angles = positions.unsqueeze(-1) * 10000.0**exponents  # (..., half)
    return F.pad(torch.cat([angles.sin(), angles.cos()], dim=-1), (0, dim - 2 * half)).float()


def depthwise_convolution(states: Tensor, weight: Tensor, keep: Tensor | None = None) -> Tensor:
    """Every channel's own convolution along the tokens, zero at the borders and at padding.

    Args:
        states: (b, n, d).
        weight: (d, taps), an odd number of taps; tap `taps // 2` meets the token itself.
        keep: (b, n) boolean; padded states count as zero, so that a padded row equals the row alone.

    Returns:
        (b, n, d).
    """
    if keep is not None:
        states = states.masked_fill(~keep.unsqueeze(-1), 0.0)
    # As a 2-D convolution over (b, d, 1, n) the input is a channels-last view: on CPU 3 to 5 times faster than conv1d.
    image = states.transpose(1, 2).unsqueeze(2)
    padding = (0, weight.shape[-1] // 2)
    out = F.conv2d(image, weight[:, None, None, :], padding=padding, groups=weight.shape[0])
    return out.squeeze(2).transpose(1, 2)


def causal_convolution(states: Tensor, weight: Tensor) -> Tensor:
    """Every channel's own convolution over the token itself and the taps - 1 tokens before it.

    Args:
        states: (b, taps - 1 + n, d), what was before the first token in front.
        weight: (d, taps); the last tap meets the token itself.

    Returns:
        (b, n, d).
    """
    image = states.transpose(1, 2).unsqueeze(2)  # as above
    return F.conv2d(image, weight[:, None, None, :], groups=weight.shape[0]).squeeze(2).transpose(1, 2)


def first_kept(states: Tensor, keep: Tensor | None) -> Tensor:
    """(b, n, d) to (b, d): the state of the first token that is not padding (`<s>`, also under left padding)."""
    if keep is None:
        return states[:, 0]
    index = keep.int().argmax(-1)  # (b,), the first True
    return states[torch.arange(states.shape[0], device=states.device), index]


def masked_mean(states: Tensor, keep: Tensor | None) -> Tensor:
    """(b, n, d) to (b, d): mean over the kept entries; zeros where nothing is kept."""
    if keep is None:
        return states.mean(1)
    total = states.masked_fill(~keep.unsqueeze(-1), 0.0).sum(1)
    return total / keep.sum(-1, keepdim=True).clamp(min=1)
