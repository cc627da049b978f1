"""Causal ABC (Peng et al. 2022, section 2 and appendix B.1): a memory that is written from left to right.

    K~_t = K~_{t-1} + phi_t (x) k_t,  V~_t = V~_{t-1} + phi_t (x) v_t,  out_t = softmax(q_t K~_t^T / sqrt(c)) V~_t

The state has a constant size. The learned control divides both by the running sum of its weights; a sliding window is a
queue of the last m tokens.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .attention_abc import AbcSelfAttention
from .attention_base import attend_heads, product
from .causal_memory import attend_causal_memory
from .functional import move_to_ranks, rotate, split_heads, token_ranks
from .memory_control import (
    from_windows,
    random_slots,
    to_windows,
    window_mask,
    window_weights,
)
from .state import CausalContext, MemoryCacheLayer, read_memory


class AbcCausalSelfAttention(AbcSelfAttention):
    """Write the memory and read it, token by token; parameters as in the encoder's attention."""

    def forward(
        self, hidden_states: Tensor, memory: Tensor | None, context: CausalContext, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """One attention.

        Args:
            hidden_states: (b, n, d) token states, already normed in a pre-norm model.
            memory: the control's matrix if the layers share one, else `None`.
            context: of the forward pass, with the cache that holds the state.

        Returns:
            Output before its projection (b, n, d); `memory` as it was; and with eager attention the weights
            (b, h, n, m) over the slots, or over the tokens of the window in their order, the token itself last.
        """
        cache = context.layer_cache(self.layer_index)
        states = (self.query(hidden_states), self.key(hidden_states), self.value(hidden_states))
        query, key, value = (split_heads(part, self.num_heads) for part in states)
        if context.angles is not None:
            query, key = rotate(query, context.angles), rotate(key, context.angles)
        if self.config.memory_control == "sliding_window":
            output, weights = self.attend_queue(query, key, value, context, cache, **kwargs)
            return output, memory, weights
        control, normaliser = self.control_of(hidden_states, memory, context)
        output, read, state = attend_causal_memory(
            query,
            key,
            value,
            control,
            normaliser,
            memory=read_memory(cache),
            keep=context.keep,
            dropout=self.attention_dropout if self.training else 0.0,
            need_weights=self.config._attn_implementation == "eager",
        )
        if cache is not None:
            cache.write(**state._asdict())
        return output.transpose(1, 2).flatten(2), memory, read

    def control_of(self, hidden_states: Tensor, memory: Tensor | None, context: CausalContext) -> tuple[Tensor, str]:
        """phi before its normalisation (b, h, n, m), and the normaliser."""
        config, ranks = self.config, context.steps - 1
        if config.memory_control == "random":
            seed = config.control_seed if config.share_control else config.control_seed + self.layer_index
            slots = random_slots(ranks, config.memory_size, seed)  # (b or 1, n)
            one_hot = F.one_hot(slots, config.memory_size).to(hidden_states.dtype)
            return one_hot[:, None].expand(hidden_states.shape[0], self.num_heads, -1, -1), "written"
        weight = self.control() if self.control is not None else memory
        if config.memory_control == "linformer":
            # Tokens beyond the matrix meet its columns again from the first.
            phi = weight.t()[ranks % weight.shape[1]]  # (b or 1, n, h m)
            return split_heads(phi, self.num_heads).expand(hidden_states.shape[0], -1, -1, -1), "none"
        logits = split_heads(product(hidden_states, weight.t()), self.num_heads)
        if config.control_activation == "relu":
            return torch.relu(logits), "total"
        if config.control_activation == "sigmoid":
            logits = F.logsigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)))
        return logits, "softmax"

    def attend_queue(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: CausalContext,
        cache: MemoryCacheLayer | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Section 3.3: attention to the last m tokens, itself among them; (b, n, d) and weights (b, h, n, m)."""
        queue = None if cache is None else self.open_queue(key, cache)
        if queue is not None and query.shape[2] == 1:
            return self.attend_newest(query, push(queue, key, value, context.keep), context, cache, **kwargs)
        batch, length, keep = query.shape[0], query.shape[2], context.keep
        ranks = None if keep is None else token_ranks(keep, length, keep.device)
        # Without padding between them: moved to the front, the real tokens are the first ones.
        query, key, value = (move_to_ranks(states, ranks, keep) for states in (query, key, value))
        real = None if keep is None else torch.arange(length, device=keep.device) < keep.sum(1, keepdim=True)
        before = 0
        if queue is not None:
            before = self.config.memory_size
            real = torch.ones(batch, length, dtype=torch.bool, device=query.device) if real is None else real
            filled = torch.arange(before, 0, -1, device=query.device) <= context.before  # (b or 1, m)
            real_queue = filled.expand(batch, -1)
            key, value = (
                torch.cat(pair, dim=2)
                for pair in ((queue["key"].to(key.dtype), key), (queue["value"].to(key.dtype), value))
            )
            cache.write(**newest(key, value, real, before))
            query, real = F.pad(query, (0, 0, before, 0)), torch.cat([real_queue, real], dim=1)
        output, weights = self.attend_window(query, key, value, real, **kwargs)
        output, weights = output[:, before:], None if weights is None else weights[:, :, before:]
        if ranks is not None:
            output = output.gather(1, ranks.unsqueeze(-1).expand(output.shape))
            if weights is not None:
                weights = weights.gather(2, ranks[:, None, :, None].expand(weights.shape))
        return output, weights

    def open_queue(self, key: Tensor, cache: MemoryCacheLayer) -> dict[str, Tensor]:
        """The last m keys and values before these tokens, the newest last; zeros where there were fewer."""
        if "value" in cache.states:
            return cache.states
        batch, heads, _, size = key.shape
        return dict.fromkeys(("key", "value"), key.new_zeros(batch, heads, self.config.memory_size, size))

    def attend_newest(
        self, query: Tensor, queue: dict[str, Tensor], context: CausalContext, cache: MemoryCacheLayer, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """One token, whose key and value have been pushed."""
        cache.write(**queue)
        filled = torch.arange(self.config.memory_size, 0, -1, device=query.device) <= context.steps  # (b or 1, m)
        return attend_heads(self, query, queue["key"], queue["value"], filled[:, None, None], **kwargs)

    def _attend_window(
        self, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        rows, places, window = query.shape[0], query.shape[2], self.config.memory_size
        mask = window_mask(real, places, window, query.device, causal=True)
        mask = mask if real is not None else mask.repeat(rows, 1, 1, 1)
        blocks = to_windows(query, key, value, window, causal=True)
        output, weights = attend_heads(self, *blocks, mask, **kwargs)  # (rows * blocks, m, d)
        weights = None if weights is None else window_weights(weights, rows, places, window)
        return from_windows(output, rows, places), weights


def push(queue: dict[str, Tensor], key: Tensor, value: Tensor, keep: Tensor | None) -> dict[str, Tensor]:
    """The queue (b, h, m, c) after one more token (b, h, 1, c), if that is none of padding (b, 1)."""
    pushed = {
        name: torch.cat([queue[name][:, :, 1:].to(states.dtype), states], dim=2)
        for name, states in (("key", key), ("value", value))
    }
    if keep is None:
        return pushed
    return {name: torch.where(keep[:, None, :, None], states, queue[name]) for name, states in pushed.items()}


def newest(key: Tensor, value: Tensor, real: Tensor, size: int) -> dict[str, Tensor]:
    """The last `size` real tokens of a queue of that many and of new ones behind it.

    Args:
        key, value: (b, h, size + n, c), the real ones of the new tokens in front of the others.
        real: (b, n).
    """
    first = real.sum(1, keepdim=True)
    places = (first + torch.arange(size, device=real.device))[:, None, :, None]
    expanded = places.expand(-1, key.shape[1], -1, key.shape[-1])
    return {"key": key.gather(2, expanded), "value": value.gather(2, expanded)}
