"""Causal attention of the toy mechanism: sums run up to and including the current token."""

from torch import Tensor

from .attention_toy import ToySlots, closeness
from .causal_attention import CausalMemoryAttention
from .context import ForwardContext


class ToyCausalAttention(ToySlots, CausalMemoryAttention):
    """Causal attention: the tokens write the slots one after another."""

    def write_weights(
        self, hidden_states: Tensor, carried: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, str]:
        """Return w and its normaliser: sums are divided by the running sum of w."""
        return closeness(hidden_states, self.centres), "total"
