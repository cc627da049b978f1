"""What all layers of one forward pass know: made once by the model, passed as one argument."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.utils import is_tracing

from .functional import row_lengths, token_ranks


class ForwardContext(NamedTuple):
    """The tokens of a forward pass, and everything else that is the same in every layer.

    A named tuple, which accelerate, FSDP and the compiler look into. Every mask is boolean with True = keep.
    """

    keep: Tensor | None  # (b, n) real tokens; `None` where nothing is padded
    ranks: Tensor  # (b or 1, n) long: a token's place among the real tokens of its row, those before this pass included
    before: Tensor  # (b or 1, 1) long: real tokens of the row before this pass
    lengths: Tensor  # (b or 1, 1) long: real tokens of the row, this pass included
    angles: Tensor | None = None  # (b or 1, n, c / 2) of rotary positions
    cache: Cache | None = None  # of a decoder: a `state.MemoryCache`
    carried_keep: Tensor | None = None  # (b, l) entries that count of what the layers carry besides tokens
    masks: Any = None  # of the family, in the backend's form
    options: dict[str, Any] = {}  # keywords for the attention backend

    def tokens(self, states: Tensor) -> Tensor:
        """(b, n) real tokens of (b, n, d) states, also where nothing is padded."""
        return torch.ones_like(states[..., 0], dtype=torch.bool) if self.keep is None else self.keep

    def layer_cache(self, layer_idx: int) -> CacheLayerMixin | None:
        """Where a layer keeps its state, if anything is kept."""
        return None if self.cache is None else self.cache.layers[layer_idx]


def make_context(
    keep: Tensor | None,
    length: int,
    device: torch.device,
    cache: Cache | None = None,
    options: dict[str, Any] | None = None,
) -> ForwardContext:
    """The context of a pass over (b, n) tokens, with the counts that follow from its mask and from a cache.

    Args:
        keep: (b, n) real tokens, or `None`.
        length: n.
        device: of the tokens.
        cache: with what earlier passes have read; its state is not changed.
        options: keywords for the attention backend.
    """
    ranks, lengths = token_ranks(keep, length, device), row_lengths(keep, length, device)
    before = torch.zeros(1, 1, dtype=torch.long, device=device)
    if cache is not None and cache.tokens is not None:
        before = cache.tokens.to(device).unsqueeze(1)
        # Padding before the first token counts from the token before it, if there is one.
        ranks = ranks + before if keep is None else (keep.long().cumsum(-1) + before - 1).clamp(min=0)
        lengths = lengths + before
    return ForwardContext(keep, ranks, before, lengths, cache=cache, options=options or {})


def drop_if_full(keep: Tensor) -> Tensor | None:
    """`None` for a mask that keeps everything: one look at the data, not taken while a graph is being traced."""
    if is_tracing(keep) or keep.device.type == "meta" or not keep.all():
        return keep
    return None
