"""Extends learned positions beyond the length that a model was trained on."""

import torch
from torch import Tensor


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
