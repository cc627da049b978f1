"""Positions: ids as in RoBERTa, sinusoids, and rotary angles."""

import torch
from torch import Tensor
from torch.nn import functional as F


def rotation(positions: Tensor, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Compute the cosines and sines of rotary positions (Su et al. 2021, RoFormer, equation 15).

    Positions (b, n) give (b, n, 2, size / 2), where `size` entries of a head are rotated, in `dtype` but at least
    float32.
    """
    angles = position_angles(positions, size // 2, size // 2)
    waves = torch.stack([angles.cos(), angles.sin()], dim=-2)
    return waves.to(torch.promote_types(dtype, torch.float32)).to(positions.device)


def rotate(states: Tensor, rotation: Tensor) -> Tensor:
    """Apply rotary positions: rotate entries i and i + c / 2 of each head (b, h, n, c) by the token's i-th angle.

    The product of two states rotated so, with the result (b or 1, n, 2, c / 2) of `rotation`, depends on their relative
    position.
    """
    cos, sin = rotation.unsqueeze(1).to(states.dtype).unbind(-2)
    first, second = states.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def sinusoids(positions: Tensor, dim: int) -> Tensor:
    """Sinusoidal position embeddings, sines in the first half and cosines in the second (fairseq's layout).

    Positions (...) give (..., dim) float32, with a last column of zeros if `dim` is odd.
    """
    half = dim // 2
    angles = position_angles(positions, half, max(half - 1, 1))
    waves = torch.cat([angles.sin(), angles.cos()], dim=-1).float().to(positions.device)
    return F.pad(waves, (0, dim - 2 * half))


def position_angles(positions: Tensor, count: int, divisor: int) -> Tensor:
    """Compute the angles `position * 10000^(-i / divisor)` for i = 0 ... count - 1: (...) to (..., count).

    In float64, because in float32 the error of an angle grows with the position; on the CPU if the device is MPS, which
    lacks it.
    """
    device = torch.device("cpu") if positions.device.type == "mps" else positions.device
    exponents = -torch.arange(count, dtype=torch.float64, device=device) / divisor
    return positions.to(device).unsqueeze(-1) * 10000.0**exponents


def repeat_positions(table: Tensor, first: int, length: int) -> Tensor:
    """Extend a position table by repeating its rows, or truncate it (Beltagy et al. 2020, Longformer, section 5).

    Repetition preserves the learned relations between neighbouring positions, except where two copies meet. The table
    (first + trained, d) begins with `first` rows that are no positions (in RoBERTa, those up to the padding row).
    Returns (first + length, d), with `length` at least 1.
    """
    rows = table[first:]
    repeated = rows.repeat(-(-length // rows.shape[0]), 1)[:length]
    return torch.cat([table[:first], repeated])
