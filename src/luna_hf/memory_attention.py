"""Attention as two halves: a context is written to a memory of bounded size, and queries read it.

    self-attention    read(x, write(x))
    cross-attention   read(y, write(x)), the context written once for any number of reads

A mechanism says how it writes; the projections and the read are the same for all. The form from left to right is in
`causal_attention.py`.
"""

from typing import NamedTuple

from torch import Tensor, nn

from .attention_base import Linear
from .configuration_base import BoundedMemoryConfig
from .context import ForwardContext, make_context
from .functional import split_heads
from .memory_read import Memories, Views, read_memories


class Memory(NamedTuple):
    """A written context."""

    parts: Memories  # what queries read, in one softmax
    carried: Tensor | None = None  # what the next layer is given besides the tokens (Luna's packed states)


class MemoryAttention(nn.Module):
    """Multi-head attention to a written context; a family defines `write`.

    The projections have RoBERTa's names. The output projection is not here but in the layer.
    """

    is_causal = False  # transformers' sdpa takes a missing attribute for True

    def __init__(self, config: BoundedMemoryConfig, layer_idx: int = 0) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.attention_dropout = config.attention_probs_dropout_prob
        self.add_projections(config)

    def add_projections(self, config: BoundedMemoryConfig) -> None:
        """Create the matrices of queries, keys and values."""
        width = config.hidden_size
        self.query, self.key, self.value = (Linear(width, width) for _ in range(3))

    def key_and_value(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """(b, n, d) to (b, h, n, c) each."""
        return split_heads(self.key(states), self.num_heads), split_heads(self.value(states), self.num_heads)

    @staticmethod
    def prepare(
        config: BoundedMemoryConfig, states: Tensor, carried: Tensor | None, context: ForwardContext
    ) -> ForwardContext:
        """The context with whatever masks the layers need in the backend's form; made once for all of them.

        Args:
            config: of the model.
            states: (b, n, d) what the first layer reads.
            carried: what it is given besides.
            context: of the forward pass.
        """
        return context

    def write(self, states: Tensor, carried: Tensor | None, context: ForwardContext) -> Memory:
        """The memory of a context.

        Args:
            states: (b, n, d), already normed in a pre-norm model.
            carried: what the family's layers hand on besides the tokens, or share.
            context: of the tokens, with the family's masks (`prepare`).
        """
        raise NotImplementedError(f"{type(self).__name__} has to define `write`.")

    def read(
        self, hidden_states: Tensor, memory: Memory, context: ForwardContext | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """What (b, n, d) states find in a memory: (b, n, d) before the output projection, and the weights if eager."""
        query = split_heads(self.query(hidden_states), self.num_heads)
        return read_memories(self, query, memory.parts, None if context is None else context.options)

    def views(self, states: Tensor, carried: Tensor | None, context: ForwardContext) -> Views:
        """What a probe may look at, by name, for the arguments of `forward` and eager attention."""
        memory = self.write(states, carried, context)
        _, weights = self.read(states, memory, context)
        (part,) = memory.parts
        return part.views(weights, context.tokens(states))

    def forward(
        self, hidden_states: Tensor, carried: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Self-attention.

        Args:
            hidden_states: (b, n, d) token states, already normed in a pre-norm model.
            carried: see `write`.
            context: of the forward pass.

        Returns:
            Output before its projection (b, n, d), what the next layer is given besides the tokens, and with eager
            attention the weights (b, h, n, keys).
        """
        memory = self.write(hidden_states, carried, context)
        output, weights = self.read(hidden_states, memory, context)
        return output, memory.carried, weights


def write_memory(
    attention: MemoryAttention,
    states: Tensor,
    attention_mask: Tensor | None = None,
    *,
    carried: Tensor | None = None,
    carried_mask: Tensor | None = None,
) -> Memory:
    """Write a context once, for any number of reads with `read_memory`.

    Writing costs time linear in the context. What is kept does not grow with it, so that a read costs the same after
    500 tokens and after 50,000 (but for ABC's `full`, which keeps every token).

    Args:
        attention: of a layer of any encoder here, `model.encoder.layer[0].attention.self`.
        states: (b, n, d) the context, already normed in a pre-norm model.
        attention_mask: (b, n), 1 for tokens and 0 for padding; all are tokens by default.
        carried: what the family's layers take besides tokens: Luna's packed states (b, l, d), or the control's matrix
            that the layers of an ABC model share (`model.control()`).
        carried_mask: (b, l), 1 for the packed states that count; by default what the config says.

    Raises:
        ValueError: The family needs something to be carried, and nothing is given.
    """
    keep, carried_keep = (None if mask is None else mask != 0 for mask in (attention_mask, carried_mask))
    context = make_context(keep, states.shape[1], states.device)._replace(carried_keep=carried_keep)
    return attention.write(states, carried, attention.prepare(attention.config, states, carried, context))


def read_memory(attention: MemoryAttention, hidden_states: Tensor, memory: Memory) -> tuple[Tensor, Tensor | None]:
    """Read a context that was written with `write_memory`: `read(x, write(x))` is self-attention, any others cross-.

    Args:
        attention: the one that wrote it.
        hidden_states: (b, n, d) what asks; n has nothing to do with the context's length.
        memory: from `write_memory`.

    Returns:
        (b, n, d) heads concatenated, before the output projection (`layer.attention.output.dense`), and with eager
        attention the weights (b, h, n, slots).

    Raises:
        ValueError: The memory is a window, which only its own tokens can read.
    """
    return attention.read(hidden_states, memory)
