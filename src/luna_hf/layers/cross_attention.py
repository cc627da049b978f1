"""The layers of a decoder that reads a source: causal attention, cross-attention and feed-forward network."""

from torch import Tensor, nn

from ..configuration import BoundedMemoryConfig
from ..ops.attention import float32_products
from ..ops.context import ForwardContext
from .block import SubLayerOutput, TransformerLayer
from .cache import SOURCE
from .memory_attention import Memory, MemoryAttention
from .recorded import Recorded


class CrossAttentionBlock(Recorded):
    """Cross-attention sub-layer: the family's attention (`self`, as in RoBERTa) and output projection."""

    def __init__(self, config: BoundedMemoryConfig, layer_idx: int, attention_class: type[MemoryAttention]) -> None:
        super().__init__()
        self.norm_first, self.layer_idx = config.norm_first, layer_idx
        self.self = attention_class.for_cross_attention(config, layer_idx)
        self.output = SubLayerOutput(config, config.hidden_size)

    def forward(
        self, hidden_states: Tensor, slot_states: Tensor | None, source: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Apply the sub-layer with its residual connection.

        Args:
            hidden_states: (b, n, d) target states.
            slot_states: see `MemoryAttention.write`.
            source: (b, s, d) source states to write; `None` to read the memory in the cache.
            context: context of the target, with that of the source.

        Returns:
            The states (b, n, d), `slot_states` for the next layer, and with eager attention the read weights
            (b, h, n, m). The LayerNorm of a post-norm layer is not applied.
        """
        memory = self.cached(context) if source is None else self.self.write(source, slot_states, context.source)
        states = self.output.LayerNorm(hidden_states) if self.norm_first else hidden_states
        mixed, weights = self.self.read(states, memory, context)
        hidden_states = hidden_states + self.output.dropout(self.output.dense(mixed))
        return hidden_states, slot_states if source is None else memory.slot_states, weights

    def cached(self, context: ForwardContext) -> Memory:
        """Return the memory in the cache."""
        states, kind = context.layer_cache(self.layer_idx).states, self.self.memory_class
        return Memory([kind(**{name: states.get(SOURCE + name) for name in kind._fields})])

    def write_source(self, slot_states: Tensor | None, source: Tensor, context: ForwardContext) -> Tensor | None:
        """Write the source (b, s, d) to the memory in the cache; returns `slot_states` for the next layer."""
        with float32_products(source):
            memory = self.self.write(source, slot_states, context.source)
        (part,) = memory.parts
        if hasattr(part, "filled_slots"):  # a tensor, whatever the attention backend
            part = part._replace(filled=part.filled_slots())
        cache = context.layer_cache(self.layer_idx)
        cache.write(**{SOURCE + name: state for name, state in part._asdict().items()})
        return memory.slot_states


class StreamedAttentionBlock(CrossAttentionBlock):
    """Cross-attention to a source that is written token by token, with the family's causal attention.

    Source and target are merged in the order in which a policy reads and writes them. One scan runs over all tokens, to
    which source tokens alone write, and of which the outputs at target tokens are kept.
    """

    def forward(
        self, hidden_states: Tensor, slot_states: Tensor | None, source: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Like `CrossAttentionBlock.forward`; `context.source` is an `Interleaving`.

        The weights (b, h, n, m + w) run over slots and window, if the family's causal attention returns any.
        """
        states = self.output.LayerNorm(hidden_states) if self.norm_first else hidden_states
        merged = context.source
        read, _, weights = self.self(merged.merge(source, states), None, merged.context)
        read, weights = merged.at_targets(read, 1), None if weights is None else merged.at_targets(weights, 2)
        return hidden_states + self.output.dropout(self.output.dense(read)), slot_states, weights

    def write_source(self, slot_states: Tensor | None, source: Tensor, context: ForwardContext) -> Tensor | None:
        """Write more of the source (b, s, d) to the memory in the cache."""
        with float32_products(source):
            self.self(source, None, context.source.context)
        return slot_states


class CrossLayer(TransformerLayer):
    """One layer of the decoder: causal attention, cross-attention and feed-forward network."""

    cross_class = CrossAttentionBlock

    def __init__(
        self,
        config: BoundedMemoryConfig,
        layer_idx: int,
        attention_class: type[MemoryAttention],
        convolution_class: type[nn.Module],
        cross_attention_class: type[MemoryAttention],
    ) -> None:
        super().__init__(config, layer_idx, attention_class, convolution_class)
        self.crossattention = self.cross_class(config, layer_idx, cross_attention_class)

    def forward(
        self, hidden_states: Tensor, slot_states: Tensor | None, source: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None]:
        """Apply the three sub-layers, see `CrossAttentionBlock.forward`."""
        output = self.attention.output
        with float32_products(hidden_states):
            update, slot_states = self.attention(hidden_states, slot_states, context)
            hidden_states = hidden_states + output.dropout(update)
            hidden_states = hidden_states if self.norm_first else output.LayerNorm(hidden_states)
            hidden_states, slot_states, _ = self.crossattention(hidden_states, slot_states, source, context)
            return self.feed_forward(hidden_states, self.crossattention), slot_states

    def write_source(self, slot_states: Tensor | None, source: Tensor, context: ForwardContext) -> Tensor | None:
        """Write the source (b, s, d) to the cache; returns `slot_states` for the next layer."""
        self.attention.self.write_source(slot_states, context)
        return self.crossattention.write_source(slot_states, source, context)


class StreamedLayer(CrossLayer):
    """A decoder layer whose source is written token by token."""

    cross_class = StreamedAttentionBlock

    def write_source(self, slot_states: Tensor | None, source: Tensor, context: ForwardContext) -> Tensor | None:
        """Write more of the source (b, s, d) to the cache."""
        return self.crossattention.write_source(slot_states, source, context)
