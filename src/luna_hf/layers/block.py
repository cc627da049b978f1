"""A layer of an encoder or decoder, and the stack of layers.

Parameters have RoBERTa's names, so that a RoBERTa checkpoint loads wherever the architectures agree. A family plugs
in a `MemoryAttention`. What it writes its slots with passes from layer to layer alongside the tokens: `slot_states`,
such as Luna's packed sequence, or `None`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import is_tracing

from ..configuration import BoundedMemoryConfig
from ..ops.attention import float32_products
from ..ops.context import ForwardContext
from ..ops.convolution import depthwise_convolution
from ..ops.recompute import is_watched, may_recompute, save_inputs, snapshot
from ..ops.unpadding import UnpaddedContext
from .memory_attention import FullAttention, MemoryAttention
from .recorded import Recorded

# Number of tokens that the feed-forward network takes at a time: on a CPU, whose cache they fit, and elsewhere.
_CPU_ROWS, _ROWS = 1024, 16384


class DepthwiseConvolution(nn.Module):
    """Depthwise convolution of `conv_kernel_size` taps over the token states, without bias."""

    def __init__(self, config: BoundedMemoryConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.weight = nn.Parameter(torch.empty(config.hidden_size, config.conv_kernel_size))

    def initialise(self, config: BoundedMemoryConfig) -> None:
        """Initialise the filters."""
        init.normal_(self.weight, mean=0.0, std=config.conv_initializer_range or config.initializer_range)

    def forward(self, states: Tensor, context: ForwardContext) -> Tensor:
        """Convolve (b, n, d) states to the same shape."""
        return depthwise_convolution(states, self.weight, context.keep)


class SubLayerOutput(nn.Module):
    """End of a sub-layer: output projection, dropout and LayerNorm, grouped under RoBERTa's names.

    In a post-norm layer the LayerNorm follows the residual connection; in a pre-norm layer it precedes the sub-layer.
    """

    def __init__(self, config: BoundedMemoryConfig, in_features: int) -> None:
        super().__init__()
        self.dense = nn.Linear(in_features, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)


class FeedForwardInput(nn.Module):
    """First half of the feed-forward network: projection, activation, dropout."""

    def __init__(self, config: BoundedMemoryConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.dropout = nn.Dropout(config.activation_dropout)

    def forward(self, states: Tensor) -> Tensor:
        """Map (..., d) to (..., intermediate_size)."""
        return self.dropout(self.activation(self.dense(states)))


class AttentionBlock(nn.Module):
    """Attention sub-layer: the family's attention (`self`, as in RoBERTa), output projection, optional convolution."""

    def __init__(
        self,
        config: BoundedMemoryConfig,
        layer_idx: int,
        attention_class: type[MemoryAttention],
        convolution_class: type[DepthwiseConvolution],
    ) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        full = layer_idx in (config.full_attention_layers or ())
        self.self = (FullAttention if full else attention_class)(config, layer_idx)
        self.output = SubLayerOutput(config, config.hidden_size)
        self.convolution = convolution_class(config, layer_idx) if config.conv_kernel_size else None

    def forward(
        self, hidden_states: Tensor, slot_states: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the update that the layer adds to the states, before dropout: (b, n, d), and `slot_states`."""
        states = self.output.LayerNorm(hidden_states) if self.norm_first else hidden_states
        update, slot_states = self.attend(states, slot_states, context)
        if self.convolution is not None:
            convolved, _ = _in_rows(context, lambda rows, _, own: (self.convolution(rows, own), None), states, None)
            update = update + convolved
        return update, slot_states

    def attend(
        self, states: Tensor, slot_states: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None]:
        """Apply attention and output projection to normed states (b, n, d)."""
        read, slot_states = _in_rows(context, self.self, states, slot_states)
        return self.output.dense(read), slot_states


def _in_rows(
    context: ForwardContext | UnpaddedContext, function: Callable[..., Any], states: Tensor, slot_states: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Apply what needs whole texts, a function of (b, n, d) states, slot states and a context."""
    if isinstance(context, ForwardContext):
        return function(states, slot_states, context)[:2]
    return context.in_rows(function, states, slot_states)


class TransformerLayer(Recorded, GradientCheckpointingLayer):
    """One layer of an encoder or decoder: attention and feed-forward network."""

    def __init__(self, config: BoundedMemoryConfig, *attention: Any) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.feed_forward_rows = config.chunk_size_feed_forward
        self.attention = AttentionBlock(config, *attention)
        self.intermediate = FeedForwardInput(config)
        self.output = SubLayerOutput(config, config.intermediate_size)

    def forward(
        self, hidden_states: Tensor, slot_states: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None]:
        """Apply both sub-layers; returns token states (b, n, d) and `slot_states`."""
        with float32_products(hidden_states):
            update, slot_states = self.attention(hidden_states, slot_states, context)
            hidden_states = hidden_states + self.attention.output.dropout(update)
            return self.feed_forward(hidden_states, self.attention), slot_states

    def feed_forward(self, hidden_states: Tensor, before: nn.Module) -> Tensor:
        """Apply the feed-forward sub-layer with its residual connection, in blocks of tokens if that saves memory.

        Args:
            hidden_states: (b, n, d) the output of the sub-layer `before`, whose LayerNorm is still to be applied in a
                post-norm layer.
        """
        norm = self.output.LayerNorm if self.norm_first else before.output.LayerNorm
        rows = self.feed_forward_rows or _rows_at_a_time(hidden_states, self.training)
        flat = hidden_states.flatten(0, 1)
        if not rows or flat.shape[0] <= rows or is_watched(self.intermediate, self.output):
            return self._feed_forward(hidden_states, norm)
        return torch.cat([self._feed_forward(block, norm) for block in flat.split(rows)]).view_as(hidden_states)

    def _feed_forward(self, states: Tensor, norm: nn.LayerNorm) -> Tensor:
        parts: list[Any] = [None]
        if torch.is_grad_enabled() and may_recompute(states, self.intermediate, self.output):
            inner, output = self.intermediate, self.output
            parts = [snapshot(part) for part in (norm, inner.dense, inner.activation, inner.dropout, output.dense)]
        if None in parts:
            normed = norm(states)
            states = states if self.norm_first else normed
            update = self.output.dense(self.intermediate(normed))
        else:
            states, update = self._feed_forward_again(states, *parts)
        states = states + self.output.dropout(update)
        return states if self.norm_first else self.output.LayerNorm(states)

    def _feed_forward_again(
        self, states: Tensor, norm: Callable, dense: Callable, activation: Callable, dropout: Callable, last: Callable
    ) -> tuple[Tensor, Tensor]:
        """Return the states and their update, some of which is computed again in the backward pass."""

        def widen(states: Tensor) -> tuple[Tensor, Tensor]:
            normed = norm(states)
            return states if self.norm_first else normed, dense(normed)

        def narrow(inner: Tensor) -> Tensor:
            return last(dropout(activation(inner)))

        def apply(states: Tensor) -> tuple[Tensor, Tensor]:
            states, inner = widen(states)
            return states, narrow(inner)

        if self.gradient_checkpointing and self.training:  # memory counts more than time
            return save_inputs(apply, states)
        states, inner = save_inputs(widen, states)  # the large products are kept; norms and activations are cheap
        return states, save_inputs(narrow, inner)


def _rows_at_a_time(states: Tensor, training: bool) -> int:
    """Return how many tokens the feed-forward network takes at a time, whose inner states are large; 0 for all."""
    if is_tracing(states):
        return 0
    if states.device.type == "cpu":
        return _CPU_ROWS
    # Re-entrant checkpointing, which must draw the same dropout twice, also runs without gradients, but in training.
    return 0 if training or torch.is_grad_enabled() else _ROWS


class LayerStack(nn.Module):
    """The layers (`layer`, as in RoBERTa), and the final LayerNorm of a pre-norm model."""

    def __init__(
        self,
        config: BoundedMemoryConfig,
        *classes: type[nn.Module],
        layer_class: type[TransformerLayer] = TransformerLayer,
    ) -> None:
        super().__init__()
        layers = range(config.num_hidden_layers)
        self.layer = nn.ModuleList(layer_class(config, layer_idx, *classes) for layer_idx in layers)
        final = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.final_layer_norm = final if config.norm_first else nn.Identity()

    def forward(self, hidden_states: Tensor, slot_states: Tensor | None, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        """Apply all layers, with their other inputs; returns token states (b, n, d) and `slot_states`."""
        for layer in self.layer:
            # Positional arguments, because re-entrant checkpointing gives keyword arguments no gradient.
            hidden_states, slot_states = layer(hidden_states, slot_states, *inputs)
        return self.final_layer_norm(hidden_states), slot_states
