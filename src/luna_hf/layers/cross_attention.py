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
        self.self = attention_class.across(config, layer_idx)
        self.output = SubLayerOutput(config, config.hidden_size)

    def forward(
        self, hidden_states: Tensor, carried: Tensor | None, source: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Apply the sub-layer with its residual connection.

        Args:
            hidden_states: (b, n, d) target states.
            carried: see `MemoryAttention.write`.
            source: (b, s, d) source states to write; `None` to read the memory in the cache.
            context: context of the target, with that of the source.

        Returns:
            The states (b, n, d), `carried` for the next layer, and with eager attention the read weights (b, h, n, m).
            The LayerNorm of a post-norm layer is not applied.
        """
        memory = self.cached(context) if source is None else self.self.write(source, carried, context.source)
        states = self.output.LayerNorm(hidden_states) if self.norm_first else hidden_states
        mixed, weights = self.self.read(states, memory, context)
        hidden_states = hidden_states + self.output.dropout(self.output.dense(mixed))
        return hidden_states, carried if source is None else memory.carried, weights

    def cached(self, context: ForwardContext) -> Memory:
        """Return the memory in the cache."""
        states, kind = context.layer_cache(self.layer_idx).states, self.self.memory_class
        return Memory([kind(**{name: states.get(SOURCE + name) for name in kind._fields})])

    def write_source(self, carried: Tensor | None, source: Tensor, context: ForwardContext) -> Tensor | None:
        """Write the source (b, s, d) to the memory in the cache; returns `carried` for the next layer."""
        with float32_products(source):
            memory = self.self.write(source, carried, context.source)
        (part,) = memory.parts
        if hasattr(part, "filled_slots"):  # a tensor, whatever the attention backend
            part = part._replace(filled=part.filled_slots())
        cache = context.layer_cache(self.layer_idx)
        cache.write(**{SOURCE + name: state for name, state in part._asdict().items()})
        return memory.carried


class CrossLayer(TransformerLayer):
    """One layer of the decoder: causal attention, cross-attention and feed-forward network."""

    def __init__(
        self,
        config: BoundedMemoryConfig,
        layer_idx: int,
        attention_class: type[MemoryAttention],
        convolution_class: type[nn.Module],
        cross_attention_class: type[MemoryAttention],
    ) -> None:
        super().__init__(config, layer_idx, attention_class, convolution_class)
        self.crossattention = CrossAttentionBlock(config, layer_idx, cross_attention_class)

    def forward(
        self, hidden_states: Tensor, carried: Tensor | None, source: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None]:
        """Apply the three sub-layers, see `CrossAttentionBlock.forward`."""
        output = self.attention.output
        with float32_products(hidden_states):
            update, carried = self.attention(hidden_states, carried, context)
            hidden_states = hidden_states + output.dropout(update)
            hidden_states = hidden_states if self.norm_first else output.LayerNorm(hidden_states)
            hidden_states, carried, _ = self.crossattention(hidden_states, carried, source, context)
            return self.feed_forward(hidden_states, self.crossattention), carried

    def write_source(self, carried: Tensor | None, source: Tensor, context: ForwardContext) -> Tensor | None:
        """Put what the layer needs of the source (b, s, d) into the cache; returns `carried` for the next layer."""
        self.attention.self.write_source(carried, context)
        return self.crossattention.write_source(carried, source, context)
