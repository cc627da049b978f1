"""Positions: ids as in RoBERTa, sinusoids, and rotary angles."""

import torch
from torch import Tensor
from torch.nn import functional as F


def rotation(positions: Tensor, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Compute the cosines and sines of rotary positions (Su et al. 2021, RoFormer, equation 15).

    Args:
        positions: (b, n).
        size: number of entries of a head that are rotated.
        dtype: of the states to rotate; the result is float32 or wider.

    Returns:
        (b, n, 2, size / 2).
    """
    dtype = torch.promote_types(dtype, torch.float32)
    frequencies = 10000.0 ** (-torch.arange(0, size, 2, dtype=dtype, device=positions.device) / size)
    angles = positions.unsqueeze(-1) * frequencies
    return torch.stack([angles.cos(), angles.sin()], dim=-2)


def rotate(states: Tensor, rotation: Tensor) -> Tensor:
    """Apply rotary positions: rotate entries i and i + c / 2 of each head by the token's i-th angle.

    Args:
        states: (b, h, n, c).
        rotation: (b or 1, n, 2, c / 2) cosines and sines, from `rotation`.

    Returns:
        (b, h, n, c) in the dtype of `states`. The product of two rotated states depends on their relative position.
    """
    cos, sin = rotation.unsqueeze(1).to(states.dtype).unbind(-2)
    first, second = states.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


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


def repeat_positions(table: Tensor, first: int, length: int) -> Tensor:
    """Extend a position table by repeating its rows, or truncate it (Beltagy et al. 2020, Longformer, section 5).

    Repetition preserves the learned relations between neighbouring positions, except where two copies meet.

    Args:
        table: (first + trained, d).
        first: number of leading rows that are not positions (in RoBERTa, those up to the padding row).
        length: number of positions to return, at least 1.

    Returns:
        (first + length, d).
    """
    rows = table[first:]
    repeated = rows.repeat(-(-length // rows.shape[0]), 1)[:length]
    return torch.cat([table[:first], repeated])
