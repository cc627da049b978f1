"""The memories that queries read: slots, which every query reads, and windows, which the tokens around them read.

Shape letters: b batch, h heads, n tokens, q queries, m slots, w tokens of a window, s queries of a block, c head
size. Every mask is boolean with True = keep.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils import is_tracing

from .attention import KeyMask
from .context import ForwardContext, token_ranks
from .exact_tokens import in_order
from .tokens import first_places, move_to_ranks, window_reach


class BlockPart(NamedTuple):
    """A memory as a table of keys and values, and which of them each block of queries reads."""

    key: Tensor  # (rows, h, c)
    value: Tensor  # (rows, h, c)
    places: Tensor  # (blocks, k) rows that a block reads
    terms: list[Tensor]  # of the mask, each (1 or blocks, 1 or h, 1 or s, 1 or k)

    def gather(self, states: Tensor, part: slice = slice(None)) -> Tensor:
        """Take the keys or values of some blocks, (blocks, h, k, c)."""
        return key_blocks(states, self.places[part]).transpose(1, 2)


class SlotMemory(NamedTuple):
    """Keys and values of slots, or of single tokens, which every query may read."""

    key: Tensor  # (b, h, m, c)
    value: Tensor  # (b, h, m, c)
    filled: KeyMask | Tensor | None = None  # slots that may be read; (b, 1 or h, m) if a tensor; `None` for all
    bias: Tensor | None = None  # (b, h, m) added to the logits
    # (b, 1 or h, 1 or q, 1 or m), also added, or a mask; beside a window, its queries are ordered as the window's.
    query_bias: Tensor | None = None

    @classmethod
    def of_decoder(cls, key: Tensor, value: Tensor, keep: Tensor | None) -> "SlotMemory":
        """Let each token read the tokens up to itself (b, h, n, c) that a mask (b, n) keeps; without any, itself."""
        causal = torch.ones(1, key.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril()
        if keep is not None:
            causal = causal & keep[:, None]
            empty = ~causal.any(-1, keepdim=True)
            causal = causal | empty & torch.eye(key.shape[2], dtype=torch.bool, device=key.device)
        return cls(key, value, query_bias=causal[:, None])

    def filled_slots(self) -> Tensor | None:
        """Return the mask as (b, 1 or h, m), or `None` if all slots may be read."""
        if isinstance(self.filled, KeyMask):
            return self.filled.keep[:, None, : self.key.shape[2]]
        return self.filled

    def mask_terms(self) -> list[Tensor]:
        """Return what the mask of a read is made of, each (b, 1 or h, 1 or q, 1 or m): masks, and what is added."""
        of_slots = (self.filled_slots(), self.bias)
        terms = [None if term is None else term.unsqueeze(2) for term in of_slots]
        return [term for term in (*terms, self.query_bias) if term is not None]

    def mask(self) -> Tensor | None:
        """Return the mask of a read, (b, 1 or h, 1 or q, m): boolean, or with a bias additive; `None` for no mask."""
        return join_masks([self.mask_terms()], [self.key.shape[2]], self.key)

    def in_blocks(self, block: int, blocks: int) -> BlockPart:
        """Let blocks of queries read the slots of their rows."""
        batch, slots, device = self.key.shape[0], self.key.shape[2], self.key.device
        # Not `repeat_interleave`, which would need one graph for a single block and another for several.
        rows = torch.arange(blocks, device=device) // (blocks // batch)  # of the batch, for each block
        terms = [
            term.index_select(0, rows) if term.shape[2] == 1 else query_blocks(term, block)
            for term in (term.expand(batch, -1, -1, -1) for term in self.mask_terms())
        ]
        places = rows[:, None] * slots + torch.arange(slots, device=device)
        return BlockPart(_as_rows(self.key), _as_rows(self.value), places, terms)


class Readers(NamedTuple):
    """Tokens of a pass that write nothing and read the latest tokens before them, each with its own keys."""

    places: Tensor  # (b, q) where they are among the n tokens of the pass
    key: Tensor  # (b, h, q, w, c)
    value: Tensor
    real: Tensor  # (b, q, w) whether a window holds a token there

    def take(self, states: Tensor) -> Tensor:
        """Select their states: (b, h, n, ...) to (b, h, q, ...)."""
        return states.gather(2, self.places[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[-1]))

    def put(self, states: Tensor, own: Tensor, dim: int = 2) -> Tensor:
        """Put their results (b, h, q, x) into those of all tokens (b, h, n, x); or at dimension 1, without heads."""
        shape = (-1, *[1] * (dim - 1), self.places.shape[1], 1)
        return states.scatter(dim, self.places.view(shape).expand_as(own), own.to(states.dtype))

    def narrowed(self, window: int) -> "Readers":
        """Return the last tokens of the windows."""
        key, value = (states[..., -window:, :] for states in (self.key, self.value))
        return Readers(self.places, key, value, self.real[..., -window:])


class WindowMemory(NamedTuple):
    """A sliding window: keys and values of tokens, each read by the queries around it, real tokens before padding.

    All windows of one read share the same order.
    """

    key: Tensor  # (b, h, earlier + n, c)
    value: Tensor
    real: Tensor | None  # (b, earlier + n) padding mask in this order; `None` if nothing is padded
    window: int  # number of tokens that a query may read, including itself
    earlier: int = 0  # number of tokens in front without a query, from an earlier pass
    ranks: Tensor | None = None  # (b, n) ranks of the tokens; `None` if already in order
    keep: Tensor | None = None  # (b, n) padding mask in the input's order
    ordered: bool = False  # whether keys and values are already in order, even if the queries are not
    causal: bool = False
    is_step: bool = False  # whether one query reads all, the last one's
    bias: Tensor | None = None  # (w,) added to the logits of a window's tokens, from the first to the last
    elsewhere: Tensor | None = None  # (b, 1 or h, n) tokens that another part of the same read holds
    readers: Readers | None = None  # tokens that write nothing, whose places in the order are those of others

    @classmethod
    def of_encoder(
        cls, key: Tensor, value: Tensor, window: int, context: ForwardContext, elsewhere: Tensor | None = None
    ) -> "WindowMemory":
        """Keep an encoder's keys and values (b, h, n, c), to be read by the tokens on either side."""
        if context.keep is None:
            return cls(key, value, None, window, elsewhere=elsewhere)
        real = torch.arange(key.shape[2], device=key.device) < context.lengths
        return cls(key, value, real, window, ranks=context.ranks, keep=context.keep, elsewhere=elsewhere)

    @classmethod
    def of_decoder(
        cls, key: Tensor, value: Tensor, window: int, context: ForwardContext, cache: Any, prefix: str = ""
    ) -> "WindowMemory":
        """Return what new tokens read, and push them to the queue in the cache (Peng et al. 2022, section 3.3).

        Args:
            key, value: (b, h, n, c) keys and values of the new tokens.
            window: number of tokens that each token reads, including itself.
            context: context of the forward pass.
            cache: the layer's `MemoryCacheLayer`, or `None`.
            prefix: of the names of the queue's tensors in the cache, beside other states.
        """
        (batch, heads, length, size), keep, device = key.shape, context.keep, key.device
        names = (f"{prefix}key", f"{prefix}value")
        if cache is not None:  # newest last; zeros where there were fewer tokens
            zeros = key.new_zeros(batch, heads, window, size)
            queue = [cache.states.get(name, zeros).to(key.dtype) for name in names]
            if length == 1:
                pushed = [torch.cat(pair, dim=2)[:, :, 1:] for pair in zip(queue, (key, value), strict=True)]
                if keep is not None:  # padding is not pushed
                    real = keep[:, None, :, None]
                    pushed = [torch.where(real, new, old) for new, old in zip(pushed, queue, strict=True)]
                cache.write(**dict(zip(names, pushed, strict=True)))
                return cls(*pushed, _filled(window, context.ranks + 1), window, causal=True, is_step=True)
        ranks = None if keep is None else token_ranks(keep, length, device)
        # Real tokens move to the front, so that no padding lies between them.
        key, value = (move_to_ranks(states, ranks, keep) for states in (key, value))
        real = None if keep is None else torch.arange(length, device=device) < keep.sum(1, keepdim=True)
        order = {"ranks": ranks, "keep": keep, "ordered": True, "causal": True}
        if cache is None:
            return cls(key, value, real, window, **order).for_readers(context.readers)
        real = torch.ones(batch, length, dtype=torch.bool, device=device) if real is None else real
        key, value = (torch.cat(pair, dim=2) for pair in zip(queue, (key, value), strict=True))
        # The last real tokens, of the queue and the new ones, stay in the cache.
        last = real.sum(1, keepdim=True) + torch.arange(window, device=device)
        last = last[:, None, :, None].expand(-1, heads, -1, size)
        cache.write(**{name: states.gather(2, last) for name, states in zip(names, (key, value), strict=True)})
        real = torch.cat([_filled(window, context.before).expand(batch, -1), real], dim=1)
        return cls(key, value, real, window, earlier=window, **order).for_readers(context.readers)

    def for_readers(self, places: Tensor | None) -> "WindowMemory":
        """Return a causal window with what tokens at some places (b, q) read, which write nothing; see `Readers`."""
        if places is None:
            return self
        last = self.keep.long().cumsum(1).gather(1, places) + self.earlier  # the place behind the newest token
        found = last.unsqueeze(-1) + torch.arange(-self.window, 0, device=places.device)
        inside = found.clamp(min=0)  # (b, q, w)
        rows = torch.arange(places.shape[0], device=places.device)[:, None, None]
        real = (found >= 0) & self.real[rows, inside]
        key, value = (states.transpose(1, 2)[rows, inside].movedim(3, 1) for states in (self.key, self.value))
        return self._replace(readers=Readers(places, key, value, real))

    def narrowed(self, window: int) -> "WindowMemory":
        """Return a causal window of the last tokens of this one."""
        if not self.is_step:
            readers = None if self.readers is None else self.readers.narrowed(window)
            return self._replace(window=window, readers=readers)
        sides = (states[:, :, -window:] for states in (self.key, self.value))
        return WindowMemory(*sides, self.real[:, -window:], window, causal=True, is_step=True)

    def logits(self, query: Tensor, window: int) -> Tensor:
        """Compute the logits of a causal window alone, to be read beside something else; see `read`.

        Args:
            query: (b, h, n, c).
            window: number of tokens to read, the latest of the w; the others get the lowest logit.

        Returns:
            (b, h, n, w), the query's own token last.
        """
        query = query * query.shape[-1] ** -0.5
        if self.is_step:
            logits = torch.matmul(query, self.key.transpose(-1, -2))
            logits = logits.masked_fill(~self.real[:, None, None], torch.finfo(logits.dtype).min)
        else:
            states = self.put_in_order(query)
            rows, places = states.shape[0], states.shape[2]
            part = self.in_blocks(self.window)
            logits = torch.matmul(query_blocks(states, self.window), part.gather(part.key).transpose(-1, -2))
            mask = join_masks([part.terms], [logits.shape[-1]], logits)
            logits = window_weights(logits.masked_fill(~mask, torch.finfo(logits.dtype).min), self.window)
            logits = self.put_back(join_blocks(logits.transpose(1, 2), rows, places)).transpose(1, 2)
            if self.readers is not None:
                own = torch.matmul(self.readers.key, self.readers.take(query).unsqueeze(-1)).squeeze(-1)
                own = own.masked_fill(~self.readers.real[:, None], torch.finfo(logits.dtype).min)
                logits = self.readers.put(logits, own)
        unread = torch.arange(logits.shape[-1], 0, -1, device=logits.device) > window
        return logits.masked_fill(unread, torch.finfo(logits.dtype).min)

    def read(self, weights: Tensor) -> Tensor:
        """Sum a causal window's values with weights (b, h, n, w) for the keys of `logits`: (b, h, n, c)."""
        if self.is_step:
            return torch.matmul(weights, self.value)
        given, weights = weights, self.put_in_order(weights)
        rows, places = weights.shape[0], weights.shape[2]
        part = self.in_blocks(self.window)
        value = part.gather(part.value)
        weights = band_weights(query_blocks(weights, self.window), value.shape[2])
        states = join_blocks(torch.matmul(weights, value).transpose(1, 2), rows, places)
        states = self.put_back(states).transpose(1, 2)
        if self.readers is None:
            return states
        own = torch.matmul(self.readers.take(given).unsqueeze(-2), self.readers.value).squeeze(-2)
        return self.readers.put(states, own)

    def as_slots(self) -> SlotMemory:
        """Let the query of a step read all tokens, or the ordered queries of a short row the whole row under a mask."""
        if self.is_step:
            bias = None if self.bias is None else self.bias.expand(1, 1, -1)
            return SlotMemory(self.key, self.value, self.real[:, None], bias)
        key, value, readable = self.ordered_tokens()
        place, (before, after) = torch.arange(key.shape[2], device=key.device), window_reach(self.window)
        offset = place - place[:, None]
        return SlotMemory(key, value, readable, query_bias=((offset >= -before) & (offset <= after))[None, None])

    def in_blocks(self, block: int) -> BlockPart:
        """Let blocks of ordered queries read what their windows reach."""
        key, value, readable = self.ordered_tokens()
        rows, _, length, _ = key.shape
        places, inside = key_places(rows, length, self.window, block, key.device, self.causal)
        reached = inside.unsqueeze(1)
        if readable is not None:
            readable = readable.expand(rows, -1, -1)
            reached = reached & key_blocks(_as_rows(readable), places).transpose(1, 2)
        terms = [window_mask(torch.ones_like(inside[:1]).unsqueeze(1), block), reached.unsqueeze(2)]
        if self.bias is not None:
            terms.append(band_weights(self.bias.expand(1, 1, block, self.window), block + self.window - 1))
        return BlockPart(_as_rows(key), _as_rows(value), places, terms)

    def ordered_tokens(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys, values and the mask (b, 1 or h, n) of the tokens to read, in the order of `put_in_order`."""
        key, value, readable = self.key, self.value, None if self.real is None else self.real[:, None]
        if not self.ordered:
            key, value = (move_to_ranks(states, self.ranks, self.keep) for states in (key, value))
        if self.elsewhere is not None:
            left = ~in_order(self.elsewhere, self.ranks, self.keep)
            readable = left if readable is None else readable & left
        return key, value, readable

    def put_in_order(self, query: Tensor) -> Tensor:
        """Move queries (b, h, n, c) to the places of their tokens, (b, h, earlier + n, c).

        Raises:
            ValueError: The number of queries differs from the number of tokens.
        """
        tokens = self.key.shape[2] - self.earlier
        if tokens != query.shape[2]:
            raise ValueError(
                f"A window can be read only by the {tokens} tokens it was written from, but there are {query.shape[2]} "
                "queries; for cross-attention, use a memory with slots."
            )
        query = move_to_ranks(query, self.ranks, self.keep)
        return F.pad(query, (0, 0, self.earlier, 0)) if self.earlier else query

    def put_back(self, states: Tensor) -> Tensor:
        """Undo `put_in_order`: (b, earlier + n, ...) to (b, n, ...)."""
        states = states[:, self.earlier :] if self.earlier else states
        if self.ranks is None:
            return states
        # Whole rows of a (b * places, ...) table: faster than `gather`, which takes single entries.
        rows, places = states.shape[:2]
        found = self.ranks + places * torch.arange(rows, device=states.device)[:, None]
        return states.flatten(0, 1).index_select(0, found.flatten()).view(*found.shape, *states.shape[2:])


Memories = Sequence[SlotMemory | WindowMemory]


def _filled(window: int, tokens: Tensor) -> Tensor:
    """Mask the filled end of a queue: number of tokens so far (b or 1, 1) to (b or 1, w)."""
    return torch.arange(window, 0, -1, device=tokens.device) <= tokens


def _as_rows(states: Tensor) -> Tensor:
    """Flatten (b, h, n, ...) to (b * n, h, ...)."""
    return states.transpose(1, 2).flatten(0, 1)


def join_masks(terms: Sequence[list[Tensor]], sizes: Sequence[int], like: Tensor) -> Tensor | None:
    """Join the mask's terms of several memories, and put the masks of their m keys (`sizes`) side by side.

    The result is boolean, or additive if a term is; `None` if there are no terms.
    """
    if not any(terms):
        return None
    if is_additive(terms):
        masks = [reduce(torch.add, added_terms(own, like)) for own in terms]
    else:
        every = like.new_ones(1, 1, 1, 1, dtype=torch.bool)
        masks = [reduce(torch.logical_and, own or [every]) for own in terms]
    if len(masks) == 1:  # with sizes, the older exporter to ONNX would keep the example's
        return masks[0].expand(-1, -1, -1, sizes[0])
    shape = torch.broadcast_shapes(*(mask.shape[:-1] for mask in masks))
    return torch.cat([mask.expand(*shape, size) for mask, size in zip(masks, sizes, strict=True)], dim=-1)


def is_additive(terms: Sequence[list[Tensor]]) -> bool:
    """Whether the masks of several memories are added to the logits."""
    return any(term.is_floating_point() for own in terms for term in own)


def added_terms(terms: list[Tensor], like: Tensor) -> list[Tensor]:
    """Turn boolean terms into what is added to logits. Finite in sum, because a row of minus infinity would be NaN."""
    zero, unread = like.new_zeros(()), torch.finfo(like.dtype).min / 2
    added = [torch.where(term, zero, unread) if term.dtype == torch.bool else term for term in terms]
    return added or [zero.view(1, 1, 1, 1)]


# ---- windows in blocks: pure functions that split tokens into blocks and join the results ----
# A block of s queries attends, under a mask, to all keys that their windows reach, so that one attention call processes
# all blocks in time linear in n. A block is at least as long as the window.


def query_blocks(query: Tensor, block: int) -> Tensor:
    """Split queries into blocks, zero-padded at the end: (b, h, n, c) to (b * blocks, h, s, c)."""
    rows, length = query.shape[0], query.shape[2]
    blocks = _number_of_blocks(length, block)
    query, tracing = query.transpose(1, 2), is_tracing(query)
    # In a graph contiguous: padding by nothing keeps the layout, which a graph of another length does not expect.
    query = query.contiguous() if tracing else query
    if tracing or blocks * block > length:
        query = F.pad(query, (0, 0, 0, 0, 0, blocks * block - length))
    query = query.flatten(0, 1)
    # And a copy: Inductor checks whether two views in a row end in the shape that they began with. They do for a single
    # block alone, so that a graph would serve either one block or several, but not both.
    query = first_places(query, query.shape[0], 0) if tracing else query
    return query.view(rows * blocks, block, *query.shape[1:]).transpose(1, 2)


def key_places(
    rows: int, length: int, window: int, block: int, device: torch.device, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Find the keys that each block reaches, (b * blocks, s + w - 1).

    Returns:
        Indices of joined rows, (b, n, ...) flattened to (b * n, ...), and which of them lie within the block's row; the
        others are its first token.
    """
    # The number of blocks is never a dimension by itself, or a graph would be recompiled for a single block.
    blocks = _number_of_blocks(length, block)
    number = torch.arange(rows * blocks, device=device)[:, None]
    row, (before, _) = number // blocks, window_reach(window, causal)
    # Not `number % blocks`: PyTorch's exporter to ONNX takes no remainder by a number that a graph computes.
    position = (number - row * blocks) * block - before + torch.arange(block + window - 1, device=device)
    within = (position >= 0) & (position < length)
    # Not `position.clamp`, whose bounds AOTInductor of PyTorch 2.13 cannot derive.
    return row * length + torch.where(within, position, 0), within


def key_blocks(joined: Tensor, places: Tensor) -> Tensor:
    """Gather what some blocks reach, given their `key_places`: (b * n, ...) to (blocks, s + w - 1, ...)."""
    return joined.index_select(0, places.flatten()).view(*places.shape, *joined.shape[1:])


def window_mask(readable: Tensor, block: int) -> Tensor:
    """Mask the keys outside of queries' windows: (blocks, 1 or h, s + w - 1) to (blocks, 1 or h, s, s + w - 1)."""
    keys, device = readable.shape[-1], readable.device
    # The window of a block's query i starts at key i.
    offset = torch.arange(keys, device=device) - torch.arange(block, device=device)[:, None]
    band = (offset >= 0) & (offset <= keys - block)
    return readable.unsqueeze(-2) & band


def join_blocks(states: Tensor, rows: int, length: int) -> Tensor:
    """Join blocks and drop positions beyond the end: (b * blocks, s, ...) to (b, n, ...)."""
    places = _number_of_blocks(length, states.shape[1]) * states.shape[1]
    states = states.flatten(0, 1)
    if is_tracing(states) or places > length:
        # In a graph always copied, for the same reason as in `query_blocks`.
        kept = torch.arange(rows, device=states.device)[:, None] * places + torch.arange(length, device=states.device)
        states = states.index_select(0, kept.flatten())
    return states.view(rows, length, *states.shape[1:])


def window_weights(weights: Tensor, window: int) -> Tensor:
    """Select the weights of each query's window: (b * blocks, h, s, s + w - 1) to (b * blocks, h, s, w)."""
    block, keys = weights.shape[2:]
    return F.pad(weights.flatten(2), (0, block)).unflatten(2, (block, keys + 1))[..., :window]


def band_weights(weights: Tensor, keys: int) -> Tensor:
    """Invert `window_weights`, with zeros elsewhere: (b * blocks, h, s, w) to (b * blocks, h, s, keys = s + w - 1)."""
    block, window = weights.shape[2:]
    # Rows that are longer by one entry: in the flat matrix, each row then starts one entry later than the row before.
    return F.pad(weights, (0, keys + 1 - window)).flatten(2)[..., : block * keys].unflatten(2, (block, keys))


def _number_of_blocks(length: int, block: int) -> int:
    return (length + block - 1) // block
