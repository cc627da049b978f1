"""Causal LeaPformer: the sums of `attention_leapformer.py` run up to and including the current token.

The state, both sums after the last token, has constant size.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .attention_leapformer import FLOOR, Features, LinearAttention, LinearMemory
from .causal_attention import CausalAttention
from .context import ForwardContext
from .functional import causal_scan


def attend_causally(
    query: Features, key: Features, value: Tensor, memory: LinearMemory | None = None, keep: Tensor | None = None
) -> tuple[Tensor, LinearMemory]:
    """Write to the sums and read them, from left to right.

    Args:
        query, key: features (b, h, n, f); those of padded keys are zero.
        value: (b, h, n, c).
        memory: the sums over earlier tokens; zero by default.
        keep: (b, n) padding mask.

    Returns:
        The outputs (b, h, n, c) in the dtype of the features, and the sums after the last token.
    """
    values, totals = (None, None) if memory is None else (memory.value, memory.total.unsqueeze(-1))
    if query.rotated is query.plain:  # the normaliser is the sum of values of 1, a column of the same scan
        before = None if memory is None else torch.cat([values, totals], dim=-1)
        output, sums = causal_scan(query.plain, key.plain, F.pad(value, (0, 1), value=1.0), before, keep)
        (output, normaliser), (values, totals) = (both.split([value.shape[-1], 1], -1) for both in (output, sums))
    else:
        output, values = causal_scan(query.rotated, key.rotated, value, values, keep)
        normaliser, totals = causal_scan(query.plain, key.plain, torch.ones_like(value[..., :1]), totals, keep)
    # Copies, so that a state does not depend on how it was computed, nor holds on to more.
    memory = LinearMemory(values.contiguous(), totals.squeeze(-1).contiguous())
    return output / normaliser.clamp(min=FLOOR), memory


class LeapformerCausalAttention(LinearAttention, CausalAttention):
    """Causal self-attention, with the same parameters as the encoder's `LeapformerAttention`."""

    def forward(
        self, hidden_states: Tensor, carried: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None, None]:
        """Like `MemoryAttention.forward`, without weights: the state does not hold the earlier tokens."""
        output = self.attend(self.queries(hidden_states), *self.key_and_value(hidden_states), context)
        return output.transpose(1, 2).flatten(2).to(hidden_states.dtype), carried, None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: ForwardContext) -> Tensor:
        """Update the state with (b, h, n, c) keys and values, and read it: (b, h, n, c) in float32 or wider."""
        cache = context.layer_cache(self.layer_idx)
        sums = {} if cache is None else {name: cache.states.get(name) for name in LinearMemory._fields}
        memory = LinearMemory(**sums) if sums.get("value") is not None else None
        output, memory = attend_causally(
            self.query_features(query, context),
            self.key_features(key, context),
            self.drop_tokens(value),
            memory,
            context.keep,
        )
        if cache is not None:
            cache.write(**memory._asdict())
        return output
