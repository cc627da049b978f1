"""Variable-length texts without padding between them.

An *unpadded batch* holds the tokens of all texts one after the other, (1, t, d): linear layers, norms and
feed-forward networks run on it as they are. What mixes the tokens of a text, attention and convolutions, needs rows:
the texts are sorted by length into a few *buckets*, rows (b, n, d) that are padded to the longest of their bucket. As
a bucket is an ordinary padded batch, no text can reach another, and every mechanism works as it does there.

Shape letters: t tokens of an unpadded batch, p places of all buckets, b texts of a bucket, n places of a text, l
slot states.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils import is_tracing

from .context import ForwardContext

# Keywords of a forward pass that say where texts begin, as flash attention's and Mamba's kernels call them.
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")

# What another bucket costs, by device type: as much as this many tokens of any width, and this many multiply-adds.
_BUCKET_COST = {"cpu": (24, 6e5)}

_BUCKET_COST_DEFAULT = (0, 2.4e9)

# Number of different lengths, at most, at which buckets may end.
_MOST_ENDS = 64


class Bucket(NamedTuple):
    """Texts of like lengths, as the rows of a padded batch."""

    rows: int  # b
    length: int  # n, the length of the longest
    keep: Tensor | None  # (b, n) padding mask; `None` if all have the same length


class UnpaddedBatch(NamedTuple):
    """Where the tokens of a batch are: in the input, without padding, and in the buckets."""

    shape: tuple[int, int]  # of the input
    tokens: Tensor | None  # (t,) places of the tokens in the flattened input; `None` for all in order
    positions: Tensor  # (1, t) index of each token in its text
    lengths: Tensor  # (texts, 1) numbers of tokens, in the order of the input
    longest: int  # length to which padding would extend every text
    buckets: tuple[Bucket, ...]
    gather: Tensor  # (p,) token of each place; padding repeats the last token of its text
    scatter: Tensor  # (t,) place of each token
    by_input: Tensor  # (texts,) for the texts in the order of the input, their numbers by length
    cost: float  # of its computation, in tokens

    def select(self, inputs: Tensor | None) -> Tensor | None:
        """Take the tokens from an input (1 or b, n, ...): (1, t, ...)."""
        if inputs is None or (self.tokens is None and inputs.shape[:2] == self.shape):
            return inputs if inputs is None else inputs.reshape(1, -1, *inputs.shape[2:])
        flat = inputs.expand(*self.shape, *inputs.shape[2:]).flatten(0, 1)
        return (flat if self.tokens is None else flat.index_select(0, self.tokens)).unsqueeze(0)

    def in_buckets(self, states: Tensor) -> list[Tensor]:
        """Split what belongs to the tokens, (t, ...), into the rows of every bucket; padding holds a token's."""
        places, parts, first = states.index_select(0, self.gather), [], 0
        for rows, length, _ in self.buckets:
            parts.append(places[first : first + rows * length].view(rows, length, *states.shape[1:]))
            first += rows * length
        return parts

    def restore(self, states: Tensor) -> Tensor:
        """Put states (1, t, d) back to the places of the input, with zeros at padding."""
        if self.tokens is None:
            return states.view(*self.shape, -1)
        flat = states.new_zeros(self.shape[0] * self.shape[1], states.shape[-1])
        return flat.index_copy(0, self.tokens, states.squeeze(0)).view(*self.shape, -1)


class UnpaddedContext(NamedTuple):
    """The counterpart of `ForwardContext` for an unpadded batch: a context for every bucket."""

    batch: UnpaddedBatch
    contexts: tuple[ForwardContext, ...]
    slots: tuple[int, ...] | None  # number of slot states (l) for each text of a bucket; `None` if texts share them
    lengths: Tensor  # (texts, 1) number of tokens

    def split(self, states: Tensor, slot_states: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
        """Split tokens (1, t, d) and slot states (texts, l, d), by length, into the rows of every bucket."""
        owned, first = [], 0
        for number, bucket in enumerate(self.batch.buckets):
            own = slot_states
            if self.slots is not None and slot_states is not None:
                own = slot_states[first : first + bucket.rows, : self.slots[number]]
            owned.append(own)
            first += bucket.rows
        return [*zip(self.batch.in_buckets(states.squeeze(0)), owned, strict=True)]

    def in_rows(
        self, function: Callable[..., tuple[Tensor, ...]], states: Tensor, slot_states: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Apply what needs whole texts, a function of (b, n, d) states, slot states and a context, bucket by bucket."""
        outputs, after = [], []
        for rows, context in zip(self.split(states, slot_states), self.contexts, strict=True):
            output, own = function(*rows, context)[:2]
            outputs.append(output.flatten(0, 1))
            if self.slots is not None and own is not None:
                own = F.pad(own, (0, 0, 0, slot_states.shape[1] - own.shape[1]))
            after.append(own)
        states = torch.cat(outputs).index_select(0, self.batch.scatter).unsqueeze(0)
        return states, after[0] if self.slots is None or after[0] is None else torch.cat(after)

    def restore(self, states: Tensor, slot_states: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the states in the shape of the input, and the slot states with its texts in order."""
        if self.slots is not None and slot_states is not None:
            slot_states = slot_states.index_select(0, self.batch.by_input)
        return self.batch.restore(states), slot_states


# ---- where texts begin ----


def is_readable(tensor: Tensor | None) -> bool:
    """Whether the entries of a tensor can be read: not while tracing, and not on the meta device."""
    return tensor is None or not (is_tracing(tensor) or tensor.is_meta)


def find_starts(
    shape: tuple[int, int], keep: Tensor | None, position_ids: Tensor | None, boundaries: dict[str, Tensor | None]
) -> Tensor | None:
    """Find the first token of every text of a (b, n) input, if a row holds several: (b, n) boolean, or `None`.

    Texts begin where `cu_seq_lens_q` or `seq_idx` of the `boundaries` say, the keywords of `BOUNDARIES`; without them,
    where `position_ids` (1 or b, n) return to the row's first.

    Raises:
        ValueError: The boundaries do not match the input, or all positions are equal.
    """
    cumulated, of_keys, numbers = given = [boundaries.get(name) for name in BOUNDARIES]
    if not all(map(is_readable, given)):
        raise ValueError("A compiled or traced model reads one text per row: pad the texts (DataCollatorWithPadding).")
    marked = {}
    if cumulated is not None or of_keys is not None:
        marked["cu_seq_lens_q"] = _starts_from_lengths(shape, cumulated, of_keys)
    if numbers is not None:
        if numbers.shape != shape:
            raise ValueError(f"`seq_idx` must have shape {tuple(shape)}, but has shape {tuple(numbers.shape)}.")
        marked["seq_idx"] = F.pad(numbers[:, 1:] != numbers[:, :-1], (1, 0), value=True)
    if position_ids is not None and shape[1] > 1 and is_readable(position_ids) and is_readable(keep):
        marked["position_ids"] = _starts_from_positions(shape, keep, position_ids)
    if not marked:
        return None
    (name, starts), *others = marked.items()
    for other, found in others:
        found = found.to(starts.device)
        if (found & ~starts).any() or (other == "seq_idx" and not torch.equal(found, starts)):
            raise ValueError(f"`{other}` restart within a text of `{name}`: let both mark the same texts, or give one.")
    return starts if starts[:, 1:].any() else None


def _starts_from_lengths(shape: tuple[int, int], cumulated: Tensor | None, of_keys: Tensor | None) -> Tensor:
    if cumulated is None or not (of_keys is None or torch.equal(cumulated, of_keys)):
        raise ValueError("`cu_seq_lens_q` and `cu_seq_lens_k` must be equal: give the boundaries of the texts in both.")
    total = shape[0] * shape[1]
    ends = cumulated.tolist()
    if cumulated.dim() != 1 or not ends or (ends[0], ends[-1]) != (0, total) or (cumulated.diff() < 1).any():
        raise ValueError(f"`cu_seq_lens_q` must rise from 0 to the number of tokens, {total}, but is {ends}.")
    starts = torch.zeros(total, dtype=torch.bool, device=cumulated.device)
    starts[cumulated[:-1].long()] = True
    starts = starts.view(shape)
    if not starts[:, 0].all():
        raise ValueError(f"`cu_seq_lens_q` must hold the end of every row of {shape[1]} tokens, but is {ends}.")
    return starts


def _starts_from_positions(shape: tuple[int, int], keep: Tensor | None, position_ids: Tensor) -> Tensor:
    positions = position_ids.expand(shape)
    keep = torch.ones_like(positions, dtype=torch.bool) if keep is None else keep
    begins = positions.gather(1, keep.long().argmax(1, keepdim=True))  # (b, 1) of the first tokens
    counts = (positions[:, :-1] == begins) & (positions[:, 1:] == begins + 1) & ~keep[:, :-1] & ~keep[:, 1:]
    if (counts & (keep.flip(1).cumsum(1).flip(1)[:, 1:] > 0)).any():
        raise ValueError(
            "`position_ids` count a text of padding alone, which they cannot mark, as padding may have any position. "
            "Give `cu_seq_lens_q` and `cu_seq_lens_k`, or `seq_idx`."
        )
    # Real tokens only, one after the other.
    rows, columns = keep.nonzero(as_tuple=True)
    real, of_row = positions[keep], torch.ones_like(rows, dtype=torch.bool)
    of_row[1:] = rows[1:] != rows[:-1]
    first = begins[rows, 0]
    pairs = ~of_row[1:]
    if pairs.any() and (real[1:] == real[:-1])[pairs].all():
        raise ValueError(
            "All `position_ids` are equal, as of texts of one token each. Leave them out, or if these are "
            "texts, give `cu_seq_lens_q` and `cu_seq_lens_k`, or `seq_idx`."
        )
    starts = torch.zeros_like(keep)
    starts[rows[1:], columns[1:]] = (real[1:] <= real[:-1]) & (real[1:] == first[1:]) & pairs
    starts[:, 0] = True
    return starts


# ---- buckets ----


def bucket_cost(device: torch.device, width: int) -> float:
    """What another bucket costs, in tokens, for a model of this width."""
    tokens, products = _BUCKET_COST.get(device.type, _BUCKET_COST_DEFAULT)
    return tokens + products / width**2


def plan_buckets(lengths: Sequence[int], cost: float) -> list[int]:
    """Divide texts, given ascending lengths, such that all buckets have the fewest places, each counted `cost` more.

    Returns the number of texts in each bucket.
    """
    total = len(lengths)
    if not total:
        return []
    # The last text of each length; of many lengths, some of them.
    lasts = [i for i in range(1, total + 1) if i == total or lengths[i] > lengths[i - 1]]
    ends = lasts[:: -(-len(lasts) // _MOST_ENDS)]
    ends = ends if ends[-1] == total else [*ends, total]
    best: list[tuple[float, int]] = [(0.0, 0)]  # for the texts up to each end: the cost, and which end is before
    starts = [0, *ends]
    for end in ends:
        length, least = lengths[end - 1], (float("inf"), 0)
        for number, (before, _) in enumerate(best):
            least = min(least, (before + (end - starts[number]) * length + cost, number))
        best.append(least)
    sizes, i = [], len(ends)
    while i:
        before = best[i][1]
        sizes.append(starts[i] - starts[before])
        i = before
    return sizes[::-1]


def unpad_batch(
    keep: Tensor | None,
    starts: Tensor | None,
    shape: tuple[int, int],
    device: torch.device,
    width: int,
    border: int = 0,
) -> UnpaddedBatch:
    """Lay out a batch of `shape` (b, n) and width d without its padding.

    Args:
        keep: (b, n) padding mask; `None` if nothing is padded.
        starts: (b, n) from `find_starts`; `None` if every row is one text. A text may be padding alone.
        border: texts of up to this length share no bucket with longer ones.
    """
    if starts is None:
        texts = torch.arange(shape[0], device="cpu")[:, None].expand(shape).flatten()
    else:
        texts = starts.flatten().cpu().cumsum(0) - 1
    number_of_texts = int(texts[-1]) + 1
    tokens = None if keep is None else keep.flatten().cpu().nonzero().squeeze(-1)
    texts = texts if tokens is None else texts[tokens]
    lengths = texts.bincount(minlength=number_of_texts)
    first = lengths.cumsum(0) - lengths  # of each text, its first token
    order = lengths.argsort(stable=True)
    by_length = lengths[order].tolist()
    buckets, gathers, scatter, number, places = [], [], torch.empty_like(texts), 0, 0
    below, cost = bisect_right(by_length, border), bucket_cost(device, width)
    sizes = plan_buckets(by_length[:below], cost) + plan_buckets(by_length[below:], cost)
    for rows in sizes:
        own, length = order[number : number + rows], max(by_length[number + rows - 1], 1)
        index = torch.arange(length, device="cpu")
        mask = index < lengths[own, None]
        # The place of a text without tokens holds any other's.
        gather = (first[own, None] + index.clamp(max=lengths[own, None] - 1)).clamp(min=0)
        scatter[gather[mask]] = places + mask.flatten().nonzero().squeeze(-1)
        equal = by_length[number] == length
        buckets.append(Bucket(rows, length, None if equal else mask.to(device)))
        gathers.append(gather.flatten())
        number, places = number + rows, places + rows * length
    return UnpaddedBatch(
        shape=shape,
        tokens=None if tokens is None else tokens.to(device),
        positions=(torch.arange(len(texts), device="cpu") - first[texts]).unsqueeze(0).to(device),
        lengths=lengths.unsqueeze(1).to(device),
        longest=shape[1] if starts is None else by_length[-1],
        buckets=tuple(buckets),
        gather=torch.cat(gathers).to(device),
        scatter=scatter.to(device),
        by_input=order.argsort().to(device),
        cost=places + cost * len(buckets),
    )
