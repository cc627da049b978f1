"""Causal LAVO (Zhang et al. 2023, equation 4): each token reads the mean over itself and all earlier tokens.

    X~_t = B * H_t,   H_t = ((t - 1) H_{t-1} + B x_t) / t,   global_t = softmax(q_t X~_t^T) X~_t

Every token has its own memory, but it is B times one number per base: reading it takes two products with B. The state,
of constant size, is the sum t H_t, and the keys and values of the window. The number of tokens is in `MemoryCache`.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils.generic import maybe_autocast

from .attention_lavo import LavoProjections, Read, mean_of_parts
from .causal_attention import CausalAttention
from .causal_window import write_window
from .context import ForwardContext
from .functional import rotate
from .memory_read import SlotMemory, WindowMemory


def running_sums(states: Tensor, bases: Tensor, before: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
    """Compute t H_t of equation 4 at every token, in float32 or wider.

    Args:
        states: (b, h, n, c) x_t.
        bases: (h, r, c).
        before: (b, h, r) sum over earlier tokens; zero by default.
        keep: (b, n) padding mask.

    Returns:
        (b, h, n, r).
    """
    precise = torch.promote_types(states.dtype, torch.float32)
    if keep is not None:
        states = states.masked_fill(~keep[:, None, :, None], 0.0)
    with maybe_autocast(states.device.type, enabled=False):
        sums = torch.matmul(states.to(precise), bases.to(precise).transpose(-1, -2)).cumsum(2)
    return sums if before is None else sums + before.unsqueeze(2)


def read_orthogonal(query: Tensor, bases: Tensor, means: Tensor, dropout: float = 0.0) -> tuple[Tensor, Tensor]:
    """Read each token's own memory (equation 4), in the dtype of its means.

    Args:
        query: (b, h, n, c).
        bases: (h, r, c).
        means: (b, h, n, r) H_t.
        dropout: dropout probability of the weights.

    Returns:
        The outputs (b, h, n, c), and the weights (b, h, n, r) after dropout.
    """
    with maybe_autocast(query.device.type, enabled=False):
        query, bases = query.to(means.dtype), bases.to(means.dtype)
        weights = (torch.matmul(query, bases.transpose(-1, -2)) * means).softmax(-1)
        weights = F.dropout(weights, dropout) if dropout else weights
        return torch.matmul(weights * means, bases), weights


class LavoCausalAttention(LavoProjections, CausalAttention):
    """Causal self-attention, with the same parameters as the encoder's `LavoAttention`."""

    def forward(
        self, hidden_states: Tensor, carried: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Like `MemoryAttention.forward`; the weights run over slots and window, (b, h, n, r + w), and sum to one."""
        output, weights = mean_of_parts(self.attend(*self.project(hidden_states), context))
        return output, carried, weights

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
        if context.angles is not None:
            query, key = rotate(query, context.angles), rotate(key, context.angles)
        cache = context.layer_cache(self.layer_idx)
        window = write_window(key, value, self.config.local_window, context, cache, prefix="window_")
        if not context.window:
            return None
        return self.read_window(query, latest(window, context.window), context.window, context.options)

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


def latest(memory: SlotMemory | WindowMemory, window: int) -> SlotMemory | WindowMemory:
    """Narrow what `write_window` returned to the last tokens of the window."""
    if isinstance(memory, WindowMemory):
        return memory._replace(window=window)
    key, value = memory.key[:, :, -window:], memory.value[:, :, -window:]
    return SlotMemory(key, value, memory.filled[..., -window:])
