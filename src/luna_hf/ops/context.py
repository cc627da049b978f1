"""The data that all layers of a forward pass share, built once by the model and passed as one argument."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.utils import is_tracing

from .attention import KeyMask, make_key_mask
from .exact_tokens import ExactTokens, in_order, marked_tokens, tokens_outside
from .tokens import window_reach


class ForwardContext(NamedTuple):
    """Padding mask, token counts, cache and options of a forward pass, the same in every layer.

    A named tuple, because accelerate, FSDP and torch.compile traverse tuples. Every mask is boolean with True = keep.
    """

    keep: Tensor | None  # (b, n) padding mask; `None` if nothing is padded
    ranks: Tensor  # (b or 1, n) long: index of a token among its row's real tokens, counting earlier passes
    before: Tensor  # (b or 1, 1) long: number of real tokens of the row in earlier passes
    lengths: Tensor  # (b or 1, 1) long: number of real tokens of the row, including this pass
    rotation: Tensor | None = None  # (b or 1, n, 2, r / 2) of rotary positions, which rotate r entries of a head
    cache: Cache | None = None  # decoders only: a `state.MemoryCache`
    slot_keep: Tensor | None = None  # (b, l) mask of the slot states
    masks: Any = None  # the family's masks, in the attention backend's form
    window: int = 0  # number of tokens that a token reads besides the slots
    whole: bool = False  # encoders: whether every token reads every token, so that no slot is needed
    token_mask: KeyMask | None = None  # of all tokens, in the backend's form, where some or all of them are read
    marked: ExactTokens | None = None  # tokens that the caller marks
    selected: int = 0  # number of places for the tokens that each head selects
    written: Tensor | None = None  # (b, 1 or h, n) tokens that the slots are written from; `None` for all
    left: Tensor | None = None  # (b, 1 or h, n) the same tokens in order, if counted; `None` for all
    outside: Tensor | None = None  # (b or 1, 1 or h, 1 or n) how many of them the query of each rank reads in slots
    projected: tuple[Tensor, Tensor] | None = None  # the tokens' keys and values (b, h, n, c), if already computed
    updates_slots: bool = True  # whether something reads the slot states after the last layer
    slots: bool = True  # whether the slots are read
    options: dict[str, Any] = {}  # keyword arguments for the attention backend
    readers: Tensor | None = None  # (b, q) places of the tokens that write nothing, but whose outputs are of use
    source: Any = None  # cross-attention only: the `ForwardContext` of the source, while it is written

    def slot_tokens(self) -> Tensor | None:
        """Return the mask (b, 1 or h, n) of the tokens to write to the slots; `None` for all."""
        if self.written is None or self.keep is None:
            return self.written if self.keep is None else self.keep[:, None]
        return self.written & self.keep[:, None]

    def split(self, length: int, size: int) -> list[tuple[slice, "ForwardContext"]]:
        """Split the tokens into parts of at most `size`: where each is, and its context, without the family's masks."""
        parts = [slice(first, first + size) for first in range(0, length, size)]
        own = {name: getattr(self, name) for name in ("keep", "ranks", "rotation")}
        own = {name: tensor for name, tensor in own.items() if tensor is not None}
        return [
            (part, self._replace(masks=None, **{name: tensor[:, part] for name, tensor in own.items()}))
            for part in parts
        ]

    def layer_cache(self, layer_idx: int) -> CacheLayerMixin | None:
        """Return a layer's cache, or `None` without a cache."""
        return None if self.cache is None else self.cache.layers[layer_idx]


def token_ranks(keep: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Index of each token among its row's real tokens, (b, n) long; (1, n) if nothing is padded.

    Padding takes the rank of the real token to its left, or 0 if there is none.
    """
    if keep is None:
        return torch.arange(length, device=device)[None]
    return (keep.long().cumsum(-1) - 1).clamp(min=0)


def leading_padding(keep: Tensor) -> Tensor:
    """Padding before the first real token of a row, (b, n), from the mask of real tokens (b, n)."""
    return keep.long().cumsum(-1) == 0


def row_lengths(keep: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Number of real tokens of each row, (b, 1) long; (1, 1) if nothing is padded."""
    if keep is None:
        return torch.full((1, 1), length, dtype=torch.long, device=device)
    return keep.sum(-1, keepdim=True)


def make_context(
    keep: Tensor | None,
    length: int,
    device: torch.device,
    cache: Cache | None = None,
    options: dict[str, Any] | None = None,
    window: int = 0,
) -> ForwardContext:
    """Build the context of a pass over (b, n) tokens from its padding mask and the cache.

    Args:
        keep: (b, n) padding mask, or `None` if nothing is padded.
        length: n.
        device: device of the tokens.
        cache: state of earlier passes; read, but not changed.
        options: keyword arguments of `forward`: what to read, see `ForwardContext`, and for the attention backend.
        window: the local window, if the options have none.
    """
    options = dict(options or {})
    given, slots = options.pop("local_window", None), options.pop("read_slots", None)
    reads = {"window": window if given is None else given, "slots": slots is not False}
    seen = None if cache is None else cache.tokens
    if seen is None:
        ranks, lengths = token_ranks(keep, length, device), row_lengths(keep, length, device)
        before = torch.zeros(1, 1, dtype=torch.long, device=device)
    else:
        before = seen.to(device).unsqueeze(1)
        # Left padding gets the rank of the last token of an earlier pass, or 0 without one.
        places = torch.arange(1, length + 1, device=device) if keep is None else keep.long().cumsum(-1)
        ranks, lengths = (places + before - 1).clamp(min=0), places[..., -1:] + before
    return ForwardContext(keep, ranks, before, lengths, cache=cache, options=options, **reads)


def whole_length(config: PreTrainedConfig, window: int) -> int:
    """Return the length up to which every token of a text reads every token in windows of this size, or 0."""
    if not window or config.slot_counts != "outside" or not config.reads_exact_tokens:
        return 0
    # The first token's window reaches to the last token; that of the last one reaches as far back.
    return max(window_reach(window)[1] + 1, config.num_selected_tokens, config.softmax_length)


def selected_places(config: PreTrainedConfig, lengths: Tensor) -> int:
    """Return how many tokens a head selects from rows of these lengths (b or 1, 1), at most."""
    number, all_of = config.num_selected_tokens, config.softmax_length
    is_unknown = is_tracing(lengths) or lengths.is_meta
    has_short = all_of > number and (is_unknown or int(lengths.min()) <= all_of)
    return all_of if has_short else number


def make_encoder_context(
    config: PreTrainedConfig,
    states: Tensor,
    keep: Tensor | None,
    options: dict[str, Any] | None = None,
    marked: Tensor | None = None,
    mixes: bool = True,
) -> ForwardContext:
    """Build the context of an encoder's pass over (b, n, d) states.

    Args:
        config: the model's configuration.
        states: input of the first layer.
        keep: (b, n) padding mask, or `None` if nothing is padded.
        options: see `make_context`; and `most_marked`, the largest number of marked tokens in a row, if known.
        marked: (b, n) boolean, the tokens that the caller marks.
        mixes: whether the attention reads its slots in one softmax with a window.

    Raises:
        ValueError: There are more marked tokens than `config.max_global_tokens`.
    """
    length, device, options = states.shape[1], states.device, dict(options or {})
    most = options.pop("most_marked", None) or config.max_global_tokens
    context = make_context(keep, length, device, options=options, window=config.local_window)
    if not (mixes and (config.local_window or marked is not None)):
        return context
    counts_outside, left = config.slot_counts == "outside", None
    if not is_tracing(states):
        context = context._replace(whole=length <= whole_length(config, context.window))
    if config.num_selected_tokens and not context.whole:
        context = context._replace(selected=selected_places(config, context.lengths))
    if marked is not None and not context.whole:
        marked = marked if keep is None else marked & keep
        chosen = marked_tokens(marked, most)
        if chosen.places.shape[-1]:
            left = in_order(~chosen.mask if keep is None else ~chosen.mask & keep[:, None], context.ranks, keep)
            context = context._replace(marked=chosen, written=~chosen.mask)
    if context.whole or context.marked is not None:
        context = context._replace(token_mask=make_key_mask(config, keep, queries=states, keys=states))
    if counts_outside and not context.whole:
        context = context._replace(left=left, outside=tokens_outside(left, context.lengths, length, context.window))
    return context


def drop_if_full(keep: Tensor) -> Tensor | None:
    """Return `None` for a mask that keeps everything; while tracing, where the data is unknown, return it unchanged."""
    if is_tracing(keep) or keep.device.type == "meta" or not keep.all():
        return keep
    return None
