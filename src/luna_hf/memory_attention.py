"""Attention in two halves: write a context to a memory of bounded size, then read it with queries.

    self-attention    read(x, write(x))
    cross-attention   read(y, write(x)), where the context is written once for any number of reads

Each mechanism implements `write`; projections and reading are shared. The causal form is in `causal_attention.py`.
"""

from typing import NamedTuple

from torch import Tensor, nn

from .attention_base import linear
from .configuration_base import BoundedMemoryConfig
from .context import ForwardContext
from .functional import split_heads
from .memory_read import Memories, Views, read_memories


class Memory(NamedTuple):
    """The result of writing a context."""

    parts: Memories  # read together in one softmax
    carried: Tensor | None = None  # passed to the next layer alongside the tokens (Luna's packed states)


class MemoryAttention(nn.Module):
    """Multi-head attention to a written context; each family implements `write`.

    The projections have RoBERTa's names; the output projection belongs to the layer.
    """

    is_causal = False  # transformers' sdpa defaults to True without this attribute

    def __init__(self, config: BoundedMemoryConfig, layer_idx: int = 0) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.attention_dropout = config.attention_probs_dropout_prob
        self.add_projections(config)

    def add_projections(self, config: BoundedMemoryConfig) -> None:
        """Create the query, key and value projections."""
        width = config.hidden_size
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def key_and_value(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Project (b, n, d) states to keys and values, (b, h, n, c) each."""
        key, value = linear(self.key, states), linear(self.value, states)
        return split_heads(key, self.num_heads), split_heads(value, self.num_heads)

    @staticmethod
    def prepare(
        config: BoundedMemoryConfig, states: Tensor, carried: Tensor | None, context: ForwardContext
    ) -> ForwardContext:
        """Return the context with the masks that the layers need, in the backend's form; called once per forward pass.

        Args:
            config: the model's configuration.
            states: (b, n, d) input of the first layer.
            carried: its other input, see `write`.
            context: context of the forward pass.
        """
        return context

    def write(self, states: Tensor, carried: Tensor | None, context: ForwardContext) -> Memory:
        """Write a context to a memory.

        Args:
            states: (b, n, d), already normed in a pre-norm model.
            carried: the state or parameter that the family's layers pass on alongside the tokens, if any.
            context: context of the tokens, with the family's masks (`prepare`).
        """
        raise NotImplementedError(f"{type(self).__name__} must implement `write`.")

    def read(
        self, hidden_states: Tensor, memory: Memory, context: ForwardContext | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Read a memory with (b, n, d) states: (b, n, d) before the output projection, and the weights if eager."""
        query = split_heads(linear(self.query, hidden_states), self.num_heads)
        return read_memories(self, query, memory.parts, None if context is None else context.options)

    def views(self, states: Tensor, carried: Tensor | None, context: ForwardContext) -> Views:
        """Return what a probe can inspect, by name, for the arguments of `forward`; needs eager attention."""
        memory = self.write(states, carried, context)
        _, weights = self.read(states, memory, context)
        (part,) = memory.parts
        return part.views(weights, context.tokens(states))

    def forward(
        self, hidden_states: Tensor, carried: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Self-attention: write the tokens to a memory and read it.

        Args:
            hidden_states: (b, n, d) token states, already normed in a pre-norm model.
            carried: see `write`.
            context: context of the forward pass.

        Returns:
            The output (b, n, d) before the output projection, `carried` for the next layer, and with eager attention
            the weights (b, h, n, keys).
        """
        memory = self.write(hidden_states, carried, context)
        output, weights = self.read(hidden_states, memory, context)
        return output, memory.carried, weights
