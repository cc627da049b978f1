"""Attention in two halves: write a context to a memory of bounded size, then read it with queries.

    self-attention    read(x, write(x))
    cross-attention   read(y, write(x)), where the context is written once for any number of reads

Each mechanism implements `write`; projections and reading are shared. The causal form is in `causal_attention.py`.
"""

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..configuration import BoundedMemoryConfig
from ..ops.attention import KeyMask, count_bias, log_counts, make_key_mask, split_heads
from ..ops.context import ForwardContext
from ..ops.dispatch import choose
from ..ops.exact_tokens import (
    ExactTokens,
    attention_asked,
    first_tokens,
    gather_tokens,
    in_order,
    put_tokens,
    spaced_places,
    tokens_outside,
)
from ..ops.memories import Memories, SlotMemory, WindowMemory
from ..ops.memory_read import attend_heads, read_memories
from ..ops.recompute import may_recompute, save_inputs, snapshot
from ..ops.tokens import join_gradients
from .recorded import Recorded

# Number of tokens per part where tokens are processed in parts.
_PART_TOKENS = 512

# Number of keys, relative to the width, up to which reading them again in the backward pass takes a few per cent of a
# layer's time.
_MOST_KEYS = 0.5


class Memory(NamedTuple):
    """The result of writing a context."""

    parts: Memories  # read together in one softmax
    slot_states: Tensor | None = None  # passed to the next layer alongside the tokens (Luna's packed states)
    marked: "MarkedReads | None" = None  # tokens of the context that read all of it


class MarkedReads(NamedTuple):
    """Tokens of an encoder that read all tokens, not the memory."""

    tokens: ExactTokens
    key: Tensor  # (b, h, n, c)
    value: Tensor  # (b, h, n, c)
    mask: KeyMask | None  # padding mask of all tokens


class MemoryAttention(Recorded):
    """Multi-head attention to a written context; each family implements `write`.

    The projections have RoBERTa's names; the output projection belongs to the layer.
    """

    is_causal = False  # transformers' sdpa defaults to True without this attribute
    has_slots = True  # whether a window of `config.local_window` is read in one softmax with them
    memory_class: type = SlotMemory  # the part that cross-attention writes and reads
    read_parts = read_memories

    def __init__(self, config: BoundedMemoryConfig, layer_idx: int = 0) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.head_size = config.hidden_size // self.num_heads
        self.attention_dropout = config.attention_probs_dropout_prob
        counts = config.local_window and config.slot_count_bias and self.has_slots
        self.slot_scale = nn.Parameter(torch.empty(self.num_heads)) if counts else None
        self.add_projections(config)

    @classmethod
    def for_cross_attention(cls, config: BoundedMemoryConfig, layer_idx: int) -> "MemoryAttention":
        """Create a decoder layer's cross-attention, without what only self-attention needs."""
        attention = cls(config.for_cross_attention(), layer_idx)
        for module in attention.modules():
            if hasattr(module, "config"):
                module.config = config  # the decoder's own, whose attention backend may change
        return attention

    def initialise(self, config: BoundedMemoryConfig) -> None:
        """Initialise the scales, such that a slot counts as many tokens as it stands for."""
        if self.slot_scale is not None:
            init.ones_(self.slot_scale)

    def add_projections(self, config: BoundedMemoryConfig) -> None:
        """Create the query, key and value projections."""
        width = config.hidden_size
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def key_and_value(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Project (b, n, d) states to keys and values, (b, h, n, c) each."""
        shape = (*states.shape[:-1], self.num_heads, self.head_size)
        return self.key(states).view(shape).transpose(1, 2), self.value(states).view(shape).transpose(1, 2)

    @staticmethod
    def rotary_size(config: BoundedMemoryConfig) -> int:
        """Return the number of entries of each head that rotary positions rotate."""
        return config.hidden_size // config.num_attention_heads

    @staticmethod
    def prepare(
        config: BoundedMemoryConfig, states: Tensor, slot_states: Tensor | None, context: ForwardContext
    ) -> ForwardContext:
        """Return the context with the masks that the layers need, in the backend's form; called once per forward pass.

        Args:
            config: the model's configuration.
            states: (b, n, d) input of the first layer.
            slot_states: its other input, see `write`.
            context: context of the forward pass.
        """
        return context

    def write(self, states: Tensor, slot_states: Tensor | None, context: ForwardContext) -> Memory:
        """Write a context to a memory.

        Args:
            states: (b, n, d), already normed in a pre-norm model.
            slot_states: what the layers pass on alongside the tokens to write the slots with: Luna's packed states
                (b, l, d), or the control matrix shared by the layers of an ABC model; `None` in other families.
            context: context of the tokens, with the family's masks (`prepare`).
        """
        raise NotImplementedError(f"{type(self).__name__} must implement `write`.")

    def token_parts(self, states: Tensor, context: ForwardContext) -> list[tuple[slice, ForwardContext]]:
        """Return the parts of the tokens (b, h, n, c) that are processed at a time, with their contexts."""
        if choose("token_parts", states, self.training) == "whole":
            return [(slice(None), context)]
        return context.split(states.shape[2], _PART_TOKENS)

    def slot_memory(
        self,
        key: Tensor,
        value: Tensor,
        context: ForwardContext,
        filled: KeyMask | Tensor | None = None,
        counts: Tensor | None = None,
    ) -> SlotMemory:
        """Make the memory of slots, with the logarithm of their counts as a bias if the config asks for it.

        Softmax attention to s equal tokens equals attention to one slot, their mean, whose logit is larger by log s.

        Args:
            key, value, filled: see `SlotMemory`.
            context: context of the tokens that were written.
            counts: (b, 1 or h, m) number of tokens that each slot stands for; by default, the slots in use share a
                row's tokens evenly.
        """
        slots = SlotMemory(key, value, filled)
        if context.outside is not None:
            return self.weigh_slots(slots, context.outside, counts)
        if self.slot_scale is None:
            return slots
        if counts is None:
            used = slots.filled_slots()
            used = torch.ones_like(key[:, :1, :, 0], dtype=torch.bool) if used is None else used
            lengths = context.lengths.unsqueeze(1).to(torch.promote_types(self.slot_scale.dtype, torch.float32))
            counts = lengths / used.sum(-1, keepdim=True).clamp(min=1)  # (b, 1 or h, 1)
        return slots._replace(bias=count_bias(counts, self.slot_scale).expand(-1, -1, key.shape[2]))

    def weigh_slots(self, slots: SlotMemory, outside: Tensor, counts: Tensor | None) -> SlotMemory:
        """Let the slots of each query stand for the tokens that it reads nowhere else, divided as `counts` are.

        Args:
            slots: without a bias.
            outside: (b or 1, 1 or h, 1 or n) number of these tokens; a query that has none reads no slot. Or
                (b or 1, 1 or h, 1 or n, m), the number of them in each slot.
            counts: see `slot_memory`.
        """
        each = outside if outside.dim() == 4 else outside.unsqueeze(-1)
        some, unread = each > 0, torch.finfo(slots.key.dtype).min / 2
        if self.slot_scale is None:
            weight = torch.zeros((), dtype=slots.key.dtype, device=outside.device)
            return slots._replace(query_bias=torch.where(some, weight, unread))
        each = each.to(torch.promote_types(self.slot_scale.dtype, torch.float32)).clamp(min=1.0)
        slots = slots._replace(query_bias=torch.where(some, log_counts(each, self.slot_scale), unread))
        if outside.dim() == 4:
            return slots
        if counts is None:
            used = slots.filled_slots()
            counts = torch.ones_like(slots.key[:, :1, :, 0]) if used is None else used
        counts = counts.to(each.dtype)
        least = torch.finfo(counts.dtype).tiny ** 0.5  # whose gradient is finite
        shares = counts.clamp(min=least) / counts.sum(-1, keepdim=True).clamp(min=least)
        return slots._replace(bias=log_counts(shares, self.slot_scale).expand(-1, self.num_heads, -1))

    def write_own(self, states: Tensor, slot_states: Tensor | None, context: ForwardContext) -> Memory:
        """Like `write`, with what the context's own tokens also read: the tokens around them, and the exact ones."""
        mixes = context.window or context.marked is not None or context.selected
        if not (self.has_slots and mixes):
            return self.write(states, slot_states, context)
        if context.whole:
            return self.write_whole(states, slot_states, context)
        key, value = self.key_and_value(states)
        context, marked = context._replace(projected=(key, value)), context.marked
        selected = self.select_tokens(states, key, context) if context.selected else None
        exact = [chosen for chosen in (marked, selected) if chosen is not None]
        elsewhere = reduce(torch.logical_or, (chosen.mask for chosen in exact)) if exact else None
        if selected is not None:
            context = self.leave_to_slots(~elsewhere, context)
        parts = [
            SlotMemory(gather_tokens(key, chosen.places), gather_tokens(value, chosen.places), chosen.valid)
            for chosen in exact
        ]
        memory = self.write(states, slot_states, context)
        written = [
            part._replace(elsewhere=elsewhere) if isinstance(part, WindowMemory) else part for part in memory.parts
        ]
        if not context.slots:
            written = []
        if context.window:
            parts.append(WindowMemory.of_encoder(key, value, context.window, context, elsewhere))
        if marked is not None and self.config.global_tokens_read_all:
            memory = memory._replace(marked=MarkedReads(marked, key, value, context.token_mask))
        return memory._replace(parts=[*written, *parts])

    def write_whole(self, states: Tensor, slot_states: Tensor | None, context: ForwardContext) -> Memory:
        """Keep every token, to be read by all: softmax attention."""
        key, value = self.key_and_value(states)
        unused = self.unused_parameters(slot_states, context) if torch.is_grad_enabled() else []
        if unused:
            key, *_ = join_gradients(key, *unused)
        return Memory([SlotMemory(key, value, context.token_mask)], slot_states)

    def unused_parameters(self, slot_states: Tensor | None, context: ForwardContext) -> list[Tensor]:
        """Return what has no effect where every token is read; it gets a gradient of zero, as DDP requires."""
        return [] if self.slot_scale is None else [self.slot_scale]

    def select_tokens(self, states: Tensor, key: Tensor, context: ForwardContext) -> ExactTokens:
        """Select tokens for each head by the attention of a few evenly spaced queries.

        Args:
            states: (b, n, d).
            key: (b, h, n, c) keys of the tokens.
            context: context of the tokens.
        """
        keep, number = context.keep, self.config.num_selection_queries
        ranks, places = spaced_places(context.ranks, context.lengths, keep, number)
        with torch.no_grad():
            rows = gather_tokens(states.unsqueeze(1), places.unsqueeze(1)).squeeze(1)
            query = split_heads(self.query(rows), self.num_heads)
            scores = attention_asked(query, key, ranks, context.ranks, keep, context.window)
        may = context.slot_tokens()  # neither padding nor marked
        scores = scores if may is None else scores.masked_fill(~may, -torch.inf)
        limits, number, all_of = None, self.config.num_selected_tokens, self.config.softmax_length
        if context.selected > number:
            limits = torch.where(context.lengths <= all_of, all_of, number)
        return first_tokens(scores, context.selected, limits)

    def leave_to_slots(self, left: Tensor, context: ForwardContext) -> ForwardContext:
        """Write the slots from some tokens (b, h, n) only, and count those outside of each query's window."""
        context = context._replace(written=left)
        if context.outside is None:
            return context
        ordered = in_order(context.slot_tokens(), context.ranks, context.keep)
        outside = tokens_outside(ordered, context.lengths, left.shape[-1], context.window)
        return context._replace(left=ordered, outside=outside)

    def read(
        self, hidden_states: Tensor, memory: Memory, context: ForwardContext | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Read a memory with (b, n, d) states: (b, n, d) before the output projection, and the weights if eager."""
        memory = memory._replace(slot_states=None)
        if torch.is_grad_enabled() and self.config._attn_implementation != "eager":
            parts = memory.parts
            keys = sum(2 * part.window if isinstance(part, WindowMemory) else part.key.shape[2] for part in parts)
            # In this order: comparing the number of keys would specialise a graph.
            if may_recompute(hidden_states) and keys <= hidden_states.shape[-1] * _MOST_KEYS:
                project = snapshot(self.query)
                states = hidden_states if project else self.query(hidden_states)
                return save_inputs(self._read, states, memory, context, project or _same, module=self)
        return self._read(hidden_states, memory, context, self.query)

    def _read(
        self, hidden_states: Tensor, memory: Memory, context: ForwardContext | None, project: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        shape = (*hidden_states.shape[:-1], self.num_heads, self.head_size)
        query = project(hidden_states).view(shape).transpose(1, 2)
        options = {} if context is None else context.options
        output, weights = self.read_parts(query, memory.parts, options)
        if memory.marked is None:
            return output, weights
        tokens, *sides = memory.marked
        whole, _ = attend_heads(self, gather_tokens(query, tokens.places), *sides, **options)
        weights = None if weights is None else weights.masked_fill(tokens.mask.unsqueeze(-1), 0.0)
        return put_tokens(output, whole, tokens), weights

    def forward(
        self, hidden_states: Tensor, slot_states: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Self-attention: write the tokens to a memory and read it.

        Args:
            hidden_states: (b, n, d) token states, already normed in a pre-norm model.
            slot_states: see `write`.
            context: context of the forward pass.

        Returns:
            The output (b, n, d) before the output projection, `slot_states` for the next layer, and with eager
            attention the weights (b, h, n, keys).
        """
        memory = self.write_own(hidden_states, slot_states, context)
        output, weights = self.read(hidden_states, memory, context)
        return output, memory.slot_states, weights


def _same(states: Tensor) -> Tensor:
    return states


class FullAttention(MemoryAttention):
    """Softmax attention to all tokens, as in RoBERTa, for `config.full_attention_layers`."""

    has_slots = False

    def write(self, states: Tensor, slot_states: Tensor | None, context: ForwardContext) -> Memory:
        """Keep one slot per token; `slot_states` passes by unchanged."""
        mask = make_key_mask(self.config, context.keep, queries=states, keys=states)
        return Memory([SlotMemory(*self.key_and_value(states), mask)], slot_states)
