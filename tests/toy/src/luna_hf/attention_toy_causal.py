"""The toy mechanism from left to right: both sums run over the token itself and those before it."""

from torch import Tensor

from .attention_toy import ToySlots, closeness
from .causal_attention import CausalMemoryAttention
from .context import ForwardContext


class ToyCausalAttention(ToySlots, CausalMemoryAttention):
    """The slots are written token by token."""

    def write_weights(
        self, hidden_states: Tensor, carried: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, str]:
        """w, and that sums are divided by the sum of w."""
        return closeness(hidden_states, self.centres), "total"
