"""Pure functions shared by all families: heads, softmax attention, causal scan, positions, pooling, convolution.

Shape letters: b batch, h heads, n tokens, q queries, k keys, l slots, d width, c head size; p and r any sizes. Every
mask is boolean with True = keep. Nothing here holds parameters or reads a configuration.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils import is_tracing
from transformers.utils.generic import maybe_autocast

from .dispatch import choose
from .recompute import may_recompute

# Chunk size of the causal scan: at this size products within a chunk cost about as much as those with the state.
SCAN_CHUNK = 64


def split_heads(states: Tensor, num_heads: int) -> Tensor:
    """Split (b, n, d) states into heads (b, h, n, c), c = d / h, as a view."""
    # Not `unflatten`: the older ONNX exporter would fix the length to that of the example input.
    return states.view(*states.shape[:-1], num_heads, states.shape[-1] // num_heads).transpose(1, 2)


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None = None,
    scaling: float = 1.0,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compute `softmax(scaling q k^T) v` over the kept keys; a query with no key to attend to gives zeros.

    Args:
        query: (b, h, q, c).
        key, value: (b, h, k, c).
        keep: boolean or additive float mask, broadcastable to (b, h, q, k).
        scaling: factor applied to the logits.
        dropout: dropout probability of the weights (0 in inference).

    Returns:
        The output (b, h, q, c), and the weights (b, h, q, k) after dropout.
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
    """Softmax over the kept entries of the last dimension, in float32 or wider; zeros if nothing is kept."""
    # PyTorch accumulates a half-precision softmax in float32; an explicit cast would only store the logits twice.
    if keep is None:
        return logits.softmax(-1).to(logits.dtype)  # under autocast, softmax returns float32
    # The lowest finite number instead of -inf, which would make a fully masked row NaN, gradient included.
    lowest = torch.finfo(logits.dtype).min
    weights = logits.masked_fill(~keep, lowest).softmax(-1)
    return weights.masked_fill(~keep, 0.0).to(logits.dtype)


def count_bias(counts: Tensor, scale: Tensor) -> Tensor:
    """Compute `scale * log(max(counts, 1))`: the bias of slots that stand for that many tokens.

    A slot that stands for less than a token, as most do where a text is shorter than the memory, weighs as much as one:
    otherwise the tokens of a window would outweigh what only the slots hold.

    Args:
        counts: (b, 1 or h, ..., m).
        scale: (h,) factor of each head.
    """
    return log_counts(counts.to(torch.promote_types(scale.dtype, torch.float32)).clamp(min=1.0), scale)


def log_counts(counts: Tensor, scale: Tensor) -> Tensor:
    """Compute `scale * log(counts)` of positive counts (b, 1 or h, ...), with the scale (h,) of each head."""
    return (counts.log() * scale.view(-1, *(1 for _ in counts.shape[2:]))).to(scale.dtype)


class _JoinGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        # Autograd passes zeros, not None, as the gradient of an unused output.
        return grads


def join_gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors, linked in autograd: a loss on one gives a zero gradient to all others.

    Distributed training stops where a parameter has no gradient at all.
    """
    return _JoinGradients.apply(*tensors) if torch.is_grad_enabled() else tensors


def weight_shares(weights: Tensor, dim: int) -> Tensor:
    """Divide weights by the sum of their absolute values over the slots, dimension `dim`; zeros stay zero."""
    weights = weights.abs()
    return weights / weights.sum(dim, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def causal_scan(
    x: Tensor,
    y: Tensor,
    z: Tensor,
    state: Tensor | None = None,
    keep: Tensor | None = None,
    chunk_size: int = SCAN_CHUNK,
) -> tuple[Tensor, Tensor]:
    """Compute the causal running sum `out_t = x_t (state + sum_{j<=t} y_j^T z_j)`, in time and memory linear in n.

    This is the operator behind linear attention, Luna's causal average (section 3.3) and the causal memory of ABC. It
    runs in float32 or wider whatever the input dtypes, because half-precision sums stop growing.

    Args:
        x, y: (b, h, n, p).
        z: (b, h, n, r).
        state: (b, h, p, r) sum over earlier tokens; zero by default.
        keep: (b, n) padding mask. Padding adds nothing, but still reads the sum at its position.
        chunk_size: number of tokens per chunk; the result does not depend on it.

    Returns:
        The outputs (b, h, n, r) in `x`'s dtype, and the state after the last token (b, h, p, r).
    """
    if keep is not None:
        padding = ~keep[:, None, :, None]
        y, z = y.masked_fill(padding, 0.0), z.masked_fill(padding, 0.0)
    precise = torch.promote_types(x.dtype, torch.float32)
    if state is None:
        state = x.new_zeros(*x.shape[:2], x.shape[-1], z.shape[-1], dtype=precise)
    with maybe_autocast(x.device.type, enabled=False):
        short = x.shape[2] == 1 or (not is_tracing(x) and x.shape[2] <= chunk_size)
        implementation = "loop" if short else choose("causal_scan", x)
        out, state = _SCANS[implementation](x, y, z, state, chunk_size)
    return out.to(x.dtype), state


def _scan_in_a_loop(x: Tensor, y: Tensor, z: Tensor, state: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    scan = _Scan.apply if may_recompute(x) else _scan_chunks
    return scan(x, y, z, state, chunk_size, False)


class _Scan(torch.autograd.Function):
    """`_scan_chunks`, which keeps its inputs only: its gradients are scans as well, two of them from the end."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, z: Tensor, state: Tensor, chunk_size: int, backwards: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y, z, state)
        ctx.chunk_size, ctx.backwards = chunk_size, backwards
        return _scan_chunks(x, y, z, state, chunk_size, backwards)

    @staticmethod
    def backward(ctx: Any, out_grad: Tensor, state_grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, y, z, state), size, backwards = ctx.saved_tensors, ctx.chunk_size, ctx.backwards
        needs_x, needs_y, needs_z, needs_state = ctx.needs_input_grad[:4]
        grads: list[Tensor | None] = [None] * 6
        with maybe_autocast(x.device.type, enabled=False):
            if needs_x:
                grads[0] = _Scan.apply(out_grad, z, y, state.mT, size, backwards)[0].to(x.dtype)
            if needs_y:
                grads[1] = _Scan.apply(z, out_grad, x, state_grad.mT, size, not backwards)[0].to(y.dtype)
            if needs_z or needs_state:
                grads[2], grads[3] = _Scan.apply(y, x, out_grad, state_grad, size, not backwards)
                grads[2] = grads[2].to(z.dtype)
        return tuple(grads)


def _scan_chunks(
    x: Tensor, y: Tensor, z: Tensor, state: Tensor, chunk_size: int, backwards: bool
) -> tuple[Tensor, Tensor]:
    """Scan one chunk after the other, or from the last token to the first."""
    # Tokens before heads, as in the outputs of projections and in their gradients.
    chunks = zip(*(states.transpose(1, 2).split(chunk_size, dim=1) for states in (x, y, z)), strict=True)
    sums, outputs, order = state.flatten(0, 1), [], -1 if backwards else 1
    for chunk in list(chunks)[::order]:
        own = (states.transpose(1, 2).flatten(0, 1).to(state.dtype) for states in chunk)
        out, sums = scan_chunk(*own, sums, backwards)
        outputs.append(out.unflatten(0, (-1, x.shape[1])).transpose(1, 2))
    return torch.cat(outputs[::order], dim=1).transpose(1, 2), sums.view_as(state)


def scan_chunk(x: Tensor, y: Tensor, z: Tensor, state: Tensor, backwards: bool = False) -> tuple[Tensor, Tensor]:
    """Scan one chunk (b h, n, p), (b h, n, p), (b h, n, r), given the state (b h, p, r) before it."""
    after = torch.baddbmm(state, y.transpose(1, 2), z)
    if x.shape[1] == 1:  # a decoding step: the token reads the updated state
        return torch.bmm(x, after), after
    within = torch.bmm(x, y.transpose(1, 2))
    within = within.triu_() if backwards else within.tril_()
    return torch.baddbmm(torch.bmm(within, z), x, state), after


def _scan_at_once(x: Tensor, y: Tensor, z: Tensor, state: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    length = x.shape[2]
    x, y, z = (to_chunks(states.to(state.dtype), chunk_size) for states in (x, y, z))  # (b, h, chunks, chunk_size, ...)
    sums = torch.cat([state.unsqueeze(2), torch.matmul(y.transpose(-1, -2), z)], dim=2).cumsum(2)
    within = torch.matmul(x, y.transpose(-1, -2)).tril()
    out = torch.matmul(within, z) + torch.matmul(x, sums[:, :, :-1])
    return first_places(out.flatten(2, 3), length, dim=2), sums[:, :, -1]


_SCANS = {"loop": _scan_in_a_loop, "at_once": _scan_at_once}


def to_chunks(states: Tensor, chunk_size: int, fill: float = 0.0) -> Tensor:
    """Split (b, h, n, c) into chunks (b, h, chunks, chunk_size, c), padded at the end."""
    # In a graph at least two chunks, because it would be recompiled for a single one.
    chunks = (states.shape[2] + (2 if is_tracing(states) else 1) * chunk_size - 1) // chunk_size
    padded = F.pad(states, (0, 0, 0, chunks * chunk_size - states.shape[2]), value=fill)
    return padded.unflatten(2, (chunks, chunk_size))


def first_places(states: Tensor, length: int, dim: int = 1) -> Tensor:
    """Copy the first `length` positions of (b, n, ...); a slice's layout would depend on whether it drops any."""
    return states.index_select(dim, torch.arange(length, device=states.device))


def rotary_angles(positions: Tensor, size: int, dtype: torch.dtype = torch.float32, base: float = 10000.0) -> Tensor:
    """Compute the angles of rotary positions (Su et al. 2021, RoFormer, equation 15): (b, n) to (b, n, size / 2).

    The angles are float32 or wider, whatever the `dtype` of the states to rotate.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    frequencies = base ** (-torch.arange(0, size, 2, dtype=dtype, device=positions.device) / size)
    return positions.unsqueeze(-1) * frequencies


def rotate(states: Tensor, angles: Tensor) -> Tensor:
    """Apply rotary positions: rotate entries i and i + c / 2 of each head by the token's i-th angle.

    Args:
        states: (b, h, n, c).
        angles: (b or 1, n, c / 2).

    Returns:
        (b, h, n, c) in the dtype of `states`. The product of two rotated states depends on their relative position.
    """
    angles = angles.unsqueeze(1)
    cos, sin = angles.cos().to(states.dtype), angles.sin().to(states.dtype)
    first, second = states.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def token_ranks(keep: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Index of each token among its row's real tokens, (b, n) long; (1, n) if nothing is padded.

    Padding takes the rank of the real token to its left, or 0 if there is none.
    """
    if keep is None:
        return torch.arange(length, device=device)[None]
    return (keep.long().cumsum(-1) - 1).clamp(min=0)


def row_lengths(keep: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Number of real tokens of each row, (b, 1) long; (1, 1) if nothing is padded."""
    if keep is None:
        return torch.full((1, 1), length, dtype=torch.long, device=device)
    return keep.sum(-1, keepdim=True)


def move_to_ranks(states: Tensor, ranks: Tensor, keep: Tensor | None) -> Tensor:
    """Move each row's real tokens to the front of (b, h, n, c), in order, with zeros behind them."""
    if keep is None:
        return states
    # Padding, as zeros, to the places behind them: the older ONNX exporter loses states that share a place.
    behind = keep.sum(-1, keepdim=True) + (~keep).long().cumsum(-1) - 1
    return write_to_slots(states, torch.where(keep, ranks, behind)[:, None], states.shape[2], keep[:, None])


def write_to_slots(states: Tensor, slots: Tensor, num_slots: int, keep: Tensor | None = None) -> Tensor:
    """Add each kept state to its slot: `sum_i e_{slot(i)} (x) s_i`.

    Args:
        states: (b, h, n, c).
        slots: long, broadcastable to (b, h, n).
        num_slots: m.
        keep: boolean mask, broadcastable to (b, h, n); masked tokens write nothing.

    Returns:
        (b, h, m, c).
    """
    if keep is not None:
        states = states.masked_fill(~keep.unsqueeze(-1), 0.0)
    batch, heads, length, size = states.shape
    # One `index_add` of whole rows to a (b * h * m, c) table is many times faster on CPU than adding single entries.
    # Tokens come before heads, as in the projections' output, so that flattening them is a view.
    first = num_slots * torch.arange(batch * heads, device=slots.device).view(batch, 1, heads)
    rows = slots.transpose(1, 2).expand(batch, length, heads) + first
    memory = states.new_zeros(batch * heads * num_slots, size)
    return memory.index_add(0, rows.flatten(), states.transpose(1, 2).flatten(0, 2)).view(batch, heads, num_slots, size)


def token_positions(keep: Tensor, padding_idx: int) -> Tensor:
    """RoBERTa's position ids: `padding_idx + t` for the t-th real token (from 1), `padding_idx` for padding.

    Args:
        keep: (b, n) padding mask.

    Returns:
        (b, n) long.
    """
    return keep.long().cumsum(-1) * keep + padding_idx  # `long` because ONNX has no cumsum of booleans


def repeated_positions(position_ids: Tensor, padding_idx: int, period: int) -> Tensor:
    """Position ids whose rows repeat: positions 0 to `period - 1`, then 1 to `period - 1` again and again.

    Args:
        position_ids: (..., n) long, `padding_idx` for padding, and `padding_idx + 1` for position 0.
        period: at least 2.

    Returns:
        (..., n) long.
    """
    beyond = position_ids - padding_idx - 2  # position 1 is 0 here
    return torch.where(beyond < 0, position_ids, beyond % (period - 1) + padding_idx + 2)


def sinusoids(num_positions: int, dim: int, padding_idx: int | None = None) -> Tensor:
    """Sinusoidal position table in float32, sines in the first half and cosines in the second (fairseq's layout).

    Args:
        num_positions: number of rows; row p encodes position p.
        dim: width; if odd, the last column is zero.
        padding_idx: row to set to zero.

    Returns:
        (num_positions, dim).
    """
    table = sinusoids_at(torch.arange(num_positions), dim)
    if padding_idx is not None:
        table[padding_idx] = 0.0
    return table


def sinusoids_at(positions: Tensor, dim: int) -> Tensor:
    """Compute rows of the table of `sinusoids` for any positions: (...) long to (..., dim) float32."""
    half = dim // 2
    # float64, which MPS lacks: in float32 the error of an angle grows with the position.
    dtype = torch.float32 if positions.device.type == "mps" else torch.float64
    exponents = -torch.arange(half, dtype=dtype, device=positions.device) / max(half - 1, 1)
    angles = positions.unsqueeze(-1) * 10000.0**exponents  # (..., half)
    return F.pad(torch.cat([angles.sin(), angles.cos()], dim=-1), (0, dim - 2 * half)).float()


def depthwise_convolution(states: Tensor, weight: Tensor, keep: Tensor | None = None) -> Tensor:
    """Depthwise convolution along the tokens; tokens beyond the ends and padding count as zero.

    Args:
        states: (b, n, d).
        weight: (d, taps) with an odd number of taps; tap `taps // 2` is at the token itself.
        keep: (b, n) padding mask.

    Returns:
        (b, n, d).
    """
    if keep is not None:
        states = states.masked_fill(~keep.unsqueeze(-1), 0.0)
    return _convolve(states, weight, padding=weight.shape[-1] // 2)


def causal_convolution(states: Tensor, weight: Tensor) -> Tensor:
    """Causal depthwise convolution over each token and the taps - 1 tokens before it.

    Args:
        states: (b, taps - 1 + n, d), beginning with the taps - 1 states before the first token.
        weight: (d, taps); the last tap is at the token itself.

    Returns:
        (b, n, d).
    """
    return _convolve(states, weight)


def _convolve(states: Tensor, weight: Tensor, padding: int = 0) -> Tensor:
    if choose("convolution", states) == "shifted":
        states = F.pad(states, (0, 0, padding, padding))
        length, taps = states.shape[1] - weight.shape[-1] + 1, weight.unbind(-1)
        return sum(states[:, start : start + length] * tap for start, tap in enumerate(taps))
    # As the input of a conv2d, (b, d, 1, n) is a channels-last view: 3 to 5 times faster than conv1d on CPU.
    image, filters = states.transpose(1, 2).unsqueeze(2), weight[:, None, None, :]
    out = F.conv2d(image, filters, padding=(0, padding), groups=weight.shape[0])
    return out.squeeze(2).transpose(1, 2)


def first_kept(states: Tensor, keep: Tensor | None) -> Tensor:
    """State of each row's first real token (`<s>`, even if left-padded): (b, n, d) to (b, d)."""
    if keep is None:
        return states[:, 0]
    index = keep.int().argmax(-1)  # (b,), the first True
    return states[torch.arange(states.shape[0], device=states.device), index]


def masked_mean(states: Tensor, keep: Tensor | None) -> Tensor:
    """Mean over the kept entries, or zeros if nothing is kept: (b, n, d) to (b, d)."""
    if keep is None:
        return states.mean(1)
    total = states.masked_fill(~keep.unsqueeze(-1), 0.0).sum(1)
    return total / keep.sum(-1, keepdim=True).clamp(min=1)
