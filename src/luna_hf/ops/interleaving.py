"""Source and target tokens in the order in which a policy reads and writes them (Ma et al. 2019, section 3).

Before target token t is written, a policy has read the first g(t) tokens of the source. One causal scan then runs over
all tokens: the source tokens up to g(t) come before target token t, and the others after it.

Shape letters: b batch, s source tokens, n target tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .context import ForwardContext


class Interleaving(NamedTuple):
    """The order of a pass, and the context of its tokens, in which `keep` is True for the source tokens that write."""

    order: Tensor  # (b, s + n) the place of each token of the merged row in [source, target]
    targets: Tensor  # (b, n) the place of each target token in the merged row
    context: ForwardContext

    def merge(self, source: Tensor | None, target: Tensor) -> Tensor:
        """Merge states (b, s, d), if there are any, and (b, n, d): (b, s + n, d)."""
        states = target if source is None else torch.cat([source, target], dim=1)
        return states.gather(1, self.order.unsqueeze(-1).expand_as(states))

    def at_targets(self, merged: Tensor, dim: int) -> Tensor:
        """Select the target tokens along the dimension of the tokens, behind which is one more."""
        places = self.targets.view(-1, *[1] * (dim - 1), self.targets.shape[-1], 1)
        sizes = [*merged.shape[:dim], -1, merged.shape[-1]]
        return merged.gather(dim, places.expand(sizes))


def interleave(keep: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the order and the target places of an `Interleaving`, and its mask of writing tokens (b, s + n).

    Args:
        keep: (b, s) padding mask of the source.
        visible: (b, n) long, g(t), the number of real source tokens that each target token may read; it never falls.
    """
    (batch, source), length = keep.shape, visible.shape[1]
    counts, visible = keep.long().cumsum(1), visible.contiguous()
    new = {"device": keep.device}
    # As many tokens of the other side stand before a token as its side's rank adds to its own place.
    of_source = torch.arange(source, **new) + torch.searchsorted(visible, counts)
    of_target = torch.arange(length, **new) + torch.searchsorted(counts, visible, right=True)
    places = torch.cat([of_source, of_target], dim=1)
    order = torch.empty_like(places).scatter_(1, places, torch.arange(source + length, **new).expand_as(places))
    writes = torch.cat([keep, keep.new_zeros(batch, length)], dim=1).gather(1, order)
    return order, of_target, writes
