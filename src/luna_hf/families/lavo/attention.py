"""LAVO, linear attention via orthogonal memory (Zhang et al. 2023).

Each head compresses what its tokens hold, x_1 ... x_n, into r slots, along bases B that start out orthogonal, and
reads the slots with softmax attention (equation 3):

    X~ = B * H,   H = 1/n sum_t B x_t,   global_t = softmax(q_t X~^T) X~

The bases are parameters: orthonormal rows at the start (Saxe et al. 2013; orthonormal columns if r exceeds the head
size c), and not kept orthogonal in training. The global attention has no factor 1/sqrt(c).

Tokens also read a window with softmax attention (section 3.2), whose scores, scaled by 1/sqrt(c), get a learned bias
that depends on the distance of query and key (section 3.3). The output is the mean of both parts. With context
dissection, x_t is the output of the local attention, otherwise the value of token t, W_v times its state.

The paper leaves some choices open, or its text and figures differ:

- It compresses tokens of the full width. Here each head has its own bases and compresses values, so that all of
  RoBERTa's projections have a use; with W_v = I and one head, this is the paper's.
- Every token sees exactly w tokens, itself included: those of `window_reach`, half of them on either side. Its bias P
  is the same for all heads and starts at zero. P has the paper's 2 w - 1 entries, one for each distance; tokens that
  see w tokens read only w of them: an encoder those in the middle, a decoder the first w.
- Cross-attention has no local part (section 3.4): the memory holds the values of the source.

Shape letters: b batch, h heads, n tokens, r bases, w tokens of a window, c head size.

Causal form (equation 4): each token reads the mean over itself and all earlier tokens.

    X~_t = B * H_t,   H_t = ((t - 1) H_{t-1} + B x_t) / t,   global_t = softmax(q_t X~_t^T) X~_t

Every token has its own memory, but it is B times one number per base: reading it takes two products with B. The
state, of constant size, is the sum t H_t, and the keys and values of the window. The number of tokens is in
`MemoryCache`.
"""

from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.utils.generic import maybe_autocast

from ...layers.causal_attention import CausalAttention
from ...layers.memory_attention import Memory, MemoryAttention
from ...ops.attention import project_heads, split_heads
from ...ops.context import ForwardContext
from ...ops.memories import SlotMemory, WindowMemory
from ...ops.memory_read import read_memories
from ...ops.positions import rotate
from ...ops.tokens import window_reach
from .configuration import LavoConfig


def compress(states: Tensor, bases: Tensor, keep: Tensor | None = None) -> Tensor:
    """Compress a context into an orthogonal memory (CODE, equation 3), in float32 or wider.

    States x_t (b, h, n, c), bases (h, r, c) and a padding mask (b, n) give (b, h, r, c); zeros for a row without
    tokens.
    """
    precise = torch.promote_types(states.dtype, torch.float32)
    if keep is not None:
        states = states.masked_fill(~keep[:, None, :, None], 0.0)
    count = states.shape[2] if keep is None else keep.sum(-1).clamp(min=1)[:, None, None, None]
    with maybe_autocast(states.device.type, enabled=False):
        # The mean of B x_t is B times the mean of x_t.
        mean = states.sum(2, keepdim=True, dtype=precise) / count
        bases = bases.to(precise)
        return bases * torch.matmul(bases, mean.transpose(-1, -2))


class Read(NamedTuple):
    """One part of the attention's output."""

    memory: SlotMemory | WindowMemory | None  # `None` if every token reads its own
    output: Tensor  # (b, n, d)
    weights: Tensor | None  # (b, h, n, r or w), with eager attention


def mean_of_parts(parts: list[Read]) -> tuple[Tensor, Tensor | None]:
    """Average the outputs, and put the weights with which slots and window are then read side by side, slots first."""
    if len(parts) == 1:
        return parts[0].output, parts[0].weights
    output = reduce(torch.add, (part.output for part in parts)) / len(parts)  # `sum` would add to zero first
    if parts[0].weights is None:
        return output, None
    return output, torch.cat([part.weights for part in parts], dim=-1) / len(parts)


class LavoProjections(MemoryAttention):
    """Parameters and reads of encoders and decoders."""

    has_slots = False  # the window has its own softmax

    def __init__(self, config: LavoConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        size = config.hidden_size // config.num_attention_heads
        local, bases = self.key is not None, config.attention_parts != "local"
        biased = local and config.window_position_bias
        self.bases = nn.Parameter(torch.empty(self.num_heads, config.num_bases, size)) if bases else None
        self.position_bias = nn.Parameter(torch.empty(2 * config.local_window - 1)) if biased else None

    def initialise(self, config: LavoConfig) -> None:
        """Initialise the bases of each head, orthonormal, and the bias of positions, zero."""
        super().initialise(config)
        if self.bases is not None:
            drawn = torch.empty_like(self.bases, dtype=torch.float32)
            for head in drawn:
                init.orthogonal_(head)
            init.copy_(self.bases, drawn)
        if self.position_bias is not None:
            init.zeros_(self.position_bias)

    def add_projections(self, config: LavoConfig) -> None:
        """Create the projections; there are no keys if nothing reads the window."""
        width, local = config.hidden_size, config.attention_parts != "global" or config.context_dissection
        self.query, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.key = nn.Linear(width, width) if local and config.local_window else None

    def heads(self, layer: nn.Linear, states: Tensor) -> Tensor:
        """Project (b, n, d) states to (b, h, n, c)."""
        return project_heads(layer, states, self.num_heads)

    def project(self, states: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Project (b, n, d) states to queries, keys (`None` if nothing reads the window) and values (b, h, n, c)."""
        key = None if self.key is None else self.heads(self.key, states)
        return self.heads(self.query, states), key, self.heads(self.value, states)

    def read_window(self, query: Tensor, memory: WindowMemory, options: dict[str, Any]) -> Read:
        """Read a window with queries (b, h, n, c), with the bias P_{j - i + w - 1} of the configured w."""
        if self.position_bias is not None:
            first = self.config.local_window - 1 - window_reach(memory.window, memory.causal)[0]
            memory = memory._replace(bias=self.position_bias[first : first + memory.window])
        return Read(memory, *read_memories(self, query, [memory], options))

    def compressed(self, value: Tensor, local: Read | None) -> Tensor:
        """Return x_t, what the memory is written from: (b, h, n, c)."""
        dissected = local is not None and self.config.context_dissection
        return split_heads(local.output, self.num_heads) if dissected else value


class LavoAttention(LavoProjections):
    """LAVO self-attention: read the window, write the result to the memory and read that, too."""

    def write(self, states: Tensor, slot_states: Tensor | None, context: ForwardContext) -> Memory:
        """Write the values of (b, n, d) states, as for cross-attention; `slot_states` passes by unchanged.

        Raises:
            ValueError: The model has no memory (`config.attention_parts` is "local").
        """
        if self.bases is None:
            raise ValueError("The attention has no memory to write, since `config.attention_parts` is 'local'.")
        return Memory([self.slots(self.heads(self.value, states), context)], slot_states)

    def slots(self, states: Tensor, context: ForwardContext) -> SlotMemory:
        """Compress (b, h, n, c) states."""
        memory = compress(states, self.bases, context.keep).to(states.dtype)
        return SlotMemory(memory, memory)

    def read(
        self, hidden_states: Tensor, memory: Memory, context: ForwardContext | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Like `MemoryAttention.read`."""
        options = None if context is None else context.options
        _, *output = self.read_slots(self.heads(self.query, hidden_states), *memory.parts, options)
        return tuple(output)

    def read_slots(self, query: Tensor, slots: SlotMemory, options: dict[str, Any] | None) -> Read:
        """Read the memory with queries (b, h, n, c)."""
        # The backends divide the logits by the root of the head size.
        return Read(slots, *read_memories(self, query * query.shape[-1] ** 0.5, [slots], options))

    def attend(self, query: Tensor, key: Tensor | None, value: Tensor, context: ForwardContext) -> list[Read]:
        """Read the parts of the output for (b, h, n, c) queries, keys and values, global before local."""
        local, parts = None, []
        if key is not None and context.window:
            window = WindowMemory.of_encoder(key, value, context.window, context)
            local = self.read_window(query, window, context.options)
        if self.bases is not None and context.slots:
            slots = self.slots(self.compressed(value, local), context)
            parts.append(self.read_slots(query, slots, context.options))
        return parts if local is None or self.config.attention_parts == "global" else [*parts, local]

    def forward(
        self, hidden_states: Tensor, slot_states: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Like `MemoryAttention.forward`; the weights run over slots and window, (b, h, n, r + w), and sum to one."""
        output, weights = mean_of_parts(self.attend(*self.project(hidden_states), context))
        return output, slot_states, weights


def running_sums(states: Tensor, bases: Tensor, before: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
    """Compute t H_t of equation 4 at every token, (b, h, n, r), in float32 or wider.

    States x_t (b, h, n, c), bases (h, r, c), padding mask (b, n); `before` is the sum over earlier tokens, (b, h, r).
    """
    precise = torch.promote_types(states.dtype, torch.float32)
    if keep is not None:
        states = states.masked_fill(~keep[:, None, :, None], 0.0)
    with maybe_autocast(states.device.type, enabled=False):
        sums = torch.matmul(states.to(precise), bases.to(precise).transpose(-1, -2)).cumsum(2)
    return sums if before is None else sums + before.unsqueeze(2)


def read_orthogonal(query: Tensor, bases: Tensor, means: Tensor, dropout: float = 0.0) -> tuple[Tensor, Tensor]:
    """Read each token's own memory (equation 4), in the dtype of its means H_t, (b, h, n, r).

    Queries (b, h, n, c) and bases (h, r, c) give the outputs (b, h, n, c), and the weights (b, h, n, r) after dropout.
    """
    with maybe_autocast(query.device.type, enabled=False):
        query, bases = query.to(means.dtype), bases.to(means.dtype)
        weights = (torch.matmul(query, bases.transpose(-1, -2)) * means).softmax(-1)
        weights = F.dropout(weights, dropout) if dropout else weights
        return torch.matmul(weights * means, bases), weights


class LavoCausalAttention(LavoProjections, CausalAttention):
    """Causal self-attention, with the same parameters as the encoder's `LavoAttention`."""

    def forward(
        self, hidden_states: Tensor, slot_states: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Like `MemoryAttention.forward`; the weights run over slots and window, (b, h, n, r + w), and sum to one."""
        output, weights = mean_of_parts(self.attend(*self.project(hidden_states), context))
        return output, slot_states, weights

    def attend(self, query: Tensor, key: Tensor | None, value: Tensor, context: ForwardContext) -> list[Read]:
        """Read the parts of the output for (b, h, n, c) queries, keys and values, global before local."""
        local = None if key is None else self.attend_window(query, key, value, context)
        parts = []
        if self.bases is not None:
            memory = self.attend_memory(query, self.compressed(value, local), context)
            parts += [memory] if context.slots else []
        if local is not None and self.config.attention_parts != "global":
            parts.append(local)
        return parts

    def attend_window(self, query: Tensor, key: Tensor, value: Tensor, context: ForwardContext) -> Read | None:
        """Update the window of the state, and read it; `None` if this pass leaves it out."""
        if context.rotation is not None:
            query, key = rotate(query, context.rotation), rotate(key, context.rotation)
        cache = context.layer_cache(self.layer_idx)
        window = WindowMemory.of_decoder(key, value, self.config.local_window, context, cache, "window_")
        if not context.window:
            return None
        return self.read_window(query, window.narrowed(context.window), context.options)

    def attend_memory(self, query: Tensor, states: Tensor, context: ForwardContext) -> Read:
        """Update the sum of the state with (b, h, n, c) states, and read the memory of every token."""
        cache = context.layer_cache(self.layer_idx)
        total = None if cache is None else cache.states.get("total")
        dropout = self.attention_dropout if self.training else 0.0
        outputs, shown = [], []
        for part, own in self.token_parts(query, context):
            sums = running_sums(states[:, :, part], self.bases, total, own.keep)
            means, total = sums / (own.ranks + 1).to(sums.dtype)[:, None, :, None], sums[:, :, -1]
            output, weights = read_orthogonal(query[:, :, part], self.bases, means, dropout)
            # (b, n, h, c) is the layout that the output projection needs.
            outputs.append(output.transpose(1, 2).to(query.dtype))
            shown += [weights.to(query.dtype)] if self.config._attn_implementation == "eager" else []
        if cache is not None:
            cache.write(total=total)
        return Read(None, torch.cat(outputs, dim=1).flatten(2), torch.cat(shown, dim=2) if shown else None)
