"""Positions beyond those that a model was trained on."""

import torch
from torch import Tensor


def repeat_positions(table: Tensor, first: int, length: int) -> Tensor:
    """Learned positions for longer texts: the rows of the first tokens stand again where the trained ones end.

    Neighbours so keep the offsets that were trained (Beltagy et al. 2020, Longformer, section 5).

    Args:
        table: (first + trained, d).
        first: rows in front that belong to no position (RoBERTa's, up to the pad's).
        length: positions wanted, at least one.

    Returns:
        (first + length, d).
    """
    rows = table[first:]
    repeated = rows.repeat(-(-length // rows.shape[0]), 1)[:length]
    return torch.cat([table[:first], repeated])
