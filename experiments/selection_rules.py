"""Attention of a pretrained encoder, masked to what a bounded memory would hold; dense, so only for short rows.

`install` has a transformers model read through an `Emulation`, whose `rule` is one of two:

- `Memory`: a window, tokens that each head selects, and slots that hold the means of the rest, in one softmax.
- `Lsg`: LSG attention (Condevaux and Harispe 2022, "LSG Attention: Extrapolation of Pretrained Transformers to Long
  Sequences"), as lsg-converter 0.1.9 converts a BERT. That does not run with transformers 5; with 4.36 its states and
  these agree to 6e-6, those of random hashes aside.
"""

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, one_hot, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

NAME = "emulated_memory"


class Emulation:
    """Attention function of transformers that computes `rule`, softmax attention if it is `None`."""

    def __init__(self) -> None:
        self.rule: Memory | Lsg | None = None
        self.calls = 0

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Attention of full rows, (b, h, n, c) each; returns (b, n, h, c)."""
        if attention_mask is not None:
            raise ValueError("The emulation takes full rows without a mask.")
        self.calls += 1
        bias = None
        if self.rule is not None:
            key, value, bias = self.rule.read(query, key, value, scaling, module.layer_idx)
        read = scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)
        return read.transpose(1, 2).contiguous(), None


def install(model: PreTrainedModel) -> Emulation:
    """Have a model, which must use transformers' attention interface, read through an emulation."""
    emulation = Emulation()
    AttentionInterface.register(NAME, emulation)
    model.set_attn_implementation(NAME)
    return emulation


@dataclasses.dataclass(frozen=True)
class Rule:
    """What the two kinds share."""

    def name(self) -> str:
        """The fields that differ from the defaults, and those that have none."""
        own = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return " ".join([type(self).__name__.lower(), *own])


# ---- window, selected tokens, slots ----


@dataclasses.dataclass(frozen=True)
class Memory(Rule):
    """One softmax for each query and head over three parts.

    - Window: the query of rank i reads the ranks i - w // 2 to i + (w - 1) // 2.
    - Selected: the full softmax attention of r queries of the row, without what falls into their own windows, averaged;
      the m highest tokens of a head are read by every query whose window does not hold them. Ties: the lower rank.
    - Slots: all other tokens in s stretches of equal length of the row; a slot is the mean of their keys and of their
      values, and the logarithm of the number of its tokens outside the query's window is added to its logit.

    Args:
        window: w.
        selected: m; every token if the row has no more.
        queries: r; every query if the row has no more, or if it is 0.
        slots: s.
        score: "mean" or "maximum" over the queries; or "even", tokens of the ranks floor(k n / m) without any score.
        place: the queries' ranks: "spaced", floor(k n / r); "centred", floor((2 k + 1) n / (2 r)); "drawn" for each
            layer.
        seed: of drawn queries.
        shared: whether all heads share the mean of their scores.
        mass: of the queries' attention, "row": normalised over all tokens; "outside": over those that the query's
            window does not hold.
        counts: "exact": of the slot's tokens outside the window; "uniform": the slot's share of the tokens that were
            not selected, times the number of these outside the window.
    """

    window: int
    selected: int = 0
    queries: int = 16
    slots: int = 0
    score: str = "mean"
    place: str = "spaced"
    seed: int = 0
    shared: bool = False
    mass: str = "row"
    counts: str = "exact"

    @property
    def keys(self) -> int:
        """How many keys a query reads at most."""
        return self.window + self.selected + self.slots

    def read(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, layer: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values, those of the slots last, and what is added to the logits, (b, h, n, n + s)."""
        near = window(query.shape[-2], self.window)
        chosen = self.choose(query, key, scaling, near, layer)
        bias = torch.zeros(()).where(near | chosen[:, :, None], -torch.inf)
        if not self.slots:
            return key, value, bias
        shares = (~chosen)[..., None] * stretches(len(near), self.slots)  # (b, h, n, s)
        counts = shares.sum(2)
        outside = (~near).float() @ shares
        if self.counts == "uniform":
            total = counts.sum(-1).clamp(min=1)[..., None, None]
            outside = counts[:, :, None] * outside.sum(-1, keepdim=True) / total
        key, value = (
            torch.cat([part, shares.mT @ part / counts.clamp(min=1)[..., None]], dim=2) for part in (key, value)
        )
        return key, value, torch.cat([bias, outside.log()], dim=-1)

    def choose(self, query: Tensor, key: Tensor, scaling: float, near: Tensor, layer: int) -> Tensor:
        """Which tokens a head selects, (b, h, n)."""
        *shape, length, _ = query.shape
        if self.selected >= length:
            return torch.ones(*shape, length, dtype=torch.bool)
        chosen = torch.zeros(*shape, length, dtype=torch.bool)
        if self.score == "even":
            chosen[..., torch.arange(self.selected) * length // max(self.selected, 1)] = True
            return chosen
        scores = self.rate(query, key, scaling, near, layer)
        order = scores.argsort(dim=-1, descending=True, stable=True)
        return chosen.scatter(-1, order[..., : self.selected], True)

    def rate(self, query: Tensor, key: Tensor, scaling: float, near: Tensor, layer: int) -> Tensor:
        """Score of every token, (b, h, n)."""
        ranks = self.ranks(len(near), layer)
        own = near[ranks]
        logits = query[:, :, ranks] @ key.mT * scaling
        if self.mass == "outside":
            weights = logits.masked_fill(own, -torch.inf).softmax(-1).nan_to_num()
        else:
            weights = logits.softmax(-1).masked_fill(own, 0)
        scores = weights.mean(2) if self.score == "mean" else weights.amax(2)
        return scores.mean(1, keepdim=True).expand_as(scores) if self.shared else scores

    def ranks(self, length: int, layer: int) -> Tensor:
        """Ranks of the queries that select."""
        if not 0 < self.queries < length:
            return torch.arange(length)
        if self.place == "drawn":
            generator = torch.Generator().manual_seed(1000 * self.seed + layer)
            return torch.randperm(length, generator=generator)[: self.queries].sort().values
        steps = torch.arange(self.queries)
        if self.place == "centred":
            return (2 * steps + 1) * length // (2 * self.queries)
        return steps * length // self.queries


@functools.cache
def window(length: int, size: int) -> Tensor:
    """Whether a query's window holds a token, (n, n)."""
    offset = torch.arange(length) - torch.arange(length)[:, None]
    return (offset >= -(size // 2)) & (offset <= (size - 1) // 2)


@functools.cache
def stretches(length: int, slots: int) -> Tensor:
    """Which slot holds a token, (n, s), ones and zeros."""
    return one_hot(torch.arange(length) * slots // length, slots).float()


# ---- LSG attention ----


@dataclasses.dataclass(frozen=True)
class Lsg(Rule):
    """LSG attention of a row of blocks of b tokens, behind one global token.

    - Global: a second [CLS], of position 0, in front of the row. It reads every token, and every token reads it; its
      last state takes the place of the first token's (`lengthen`, `shorten`).
    - Local: a query reads its own block and both neighbours.
    - Sparse: of the tokens before and after these three blocks it reads, on either side, the b nearest of those that
      are kept, one of f tokens, which its position alone, its norm or a mean decides. `kind` is "stride": each f-th,
      from h mod f in head h; "block_stride": the h-th (circular) stretch of b / f in each block; "norm": the b / f keys
      of a block with the largest norms; "pooling": means of f neighbours; "bos_pooling": such sums, weighted by the
      softmax of the row's first query; "lsh": means of tokens of a block with equal hashes, in two rounds of b and
      b / f hashes; "none": no sparse tokens.
    - A mean weighs as much as one token. Rows of at most two blocks are read by softmax attention.

    Args:
        block: b; rows must be multiples of it.
        factor: f.
        kind: see above.
        seed: of the hashes.
    """

    block: int
    factor: int = 4
    kind: str = "norm"
    seed: int = 0

    @property
    def keys(self) -> int:
        """How many keys a query reads at most, but for the global token's."""
        return 1 + (3 if self.kind == "none" else 5) * self.block

    def read(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, layer: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Like `Memory.read`, for a row behind its global token."""
        length = key.shape[2] - 1
        if length <= 2 * self.block:
            return key, value, None
        near = self.local(length)
        if self.kind == "none":
            return key, value, torch.zeros(()).where(near, -torch.inf)
        own = [part[:, :, 1:] for part in (query, key, value)]
        key_sparse, value_sparse, kept = self.sparse(*own, scaling, layer)
        far = self.reach(length) & kept[:, :, None]
        bias = torch.zeros(()).where(torch.cat([near.expand(*far.shape[:2], -1, -1), far], dim=-1), -torch.inf)
        return torch.cat([key, key_sparse], dim=2), torch.cat([value, value_sparse], dim=2), bias

    def local(self, length: int) -> Tensor:
        """Whether a query reads a token of the row or the global one, (1 + n, 1 + n)."""
        blocks = torch.arange(length) // self.block
        near = torch.ones(1 + length, 1 + length, dtype=torch.bool)
        near[1:, 1:] = (blocks - blocks[:, None]).abs() <= 1
        return near

    def reach(self, length: int) -> Tensor:
        """Whether a query reads a sparse token if that is kept, (1 + n, n / f)."""
        step = self.block // self.factor
        first = (torch.arange(length) // self.block * step)[:, None]
        place = torch.arange(length // self.factor)
        before = (place >= first - step - self.block) & (place < first - step)
        after = (place >= first + 2 * step) & (place < first + 2 * step + self.block)
        return torch.cat([torch.zeros(1, len(place), dtype=torch.bool), before | after])

    def sparse(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, layer: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of the sparse tokens, and which of them hold anything, (b, h, n / f)."""
        if self.kind == "lsh":
            return self.hashed(key, value, layer)
        if "pooling" in self.kind:
            parts = [part.unflatten(2, (-1, self.factor)) for part in (key, value)]
            weights = torch.full_like(parts[0][..., :1], 1 / self.factor)
            if self.kind == "bos_pooling":
                weights = (parts[0] @ query[:, :, None, 0, :, None] * scaling).softmax(3)
            key, value = ((weights * part).sum(3) for part in parts)
        else:
            places = self.places(key)[..., None].expand(-1, -1, -1, key.shape[-1])
            key, value = (part.gather(2, places) for part in (key, value))
        return key, value, torch.ones(key.shape[:3], dtype=torch.bool)

    def places(self, key: Tensor) -> Tensor:
        """Ranks of the tokens that are kept, (b, h, n / f)."""
        _, heads, length, _ = key.shape
        step, head = self.block // self.factor, torch.arange(heads)[:, None, None]
        blocks = torch.arange(0, length, self.block)[:, None]
        if self.kind == "norm":
            norms = key.norm(dim=-1).unflatten(2, (-1, self.block))
            return (blocks + norms.topk(step).indices).flatten(2)
        if self.kind == "block_stride":
            found = blocks + (torch.arange(step) + head * step) % self.block
        else:
            found = (torch.arange(0, length, self.factor) + head[:, 0] % self.factor)[:, None]
        return found.flatten(1).expand(key.shape[0], -1, -1)

    def hashed(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Means of the tokens of a block that share a hash."""
        generator = torch.Generator().manual_seed(1000 * self.seed + layer)
        key, value = (part.unflatten(2, (-1, self.block)) for part in (key, value))
        counts = torch.ones_like(key[..., :1])
        for buckets in (self.block, self.block // self.factor):
            planes = torch.randn(key.shape[1], 1, key.shape[-1], buckets // 2, generator=generator)
            sides = normalize(key, dim=-1) @ planes
            found = one_hot(torch.cat([sides, -sides], dim=-1).argmax(-1), buckets).float() * (counts > 0)
            key, value, counts = (found.mT @ part for part in (key, value, counts))
        key, value = ((part / counts.clamp(min=1)).flatten(2, 3) for part in (key, value))
        return key, value, counts.flatten(2) > 0

    @staticmethod
    def lengthen(ids: Tensor) -> Tensor:
        """A row's ids behind those of the global token."""
        return torch.cat([ids[:, :1], ids], dim=1)

    @staticmethod
    def positions(length: int) -> Tensor:
        """Positions, counted from 0, of a row behind its global token."""
        return torch.cat([torch.zeros(1, dtype=torch.long), torch.arange(length)])

    @staticmethod
    def shorten(states: Tensor) -> Tensor:
        """A row's states, the global token's in place of the first."""
        return torch.cat([states[:, :1], states[:, 2:]], dim=1)
