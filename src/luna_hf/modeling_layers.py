"""Building blocks of all models, encoders and decoders: embeddings, layers and the layer stack.

Parameters have RoBERTa's names, so that a RoBERTa checkpoint loads wherever the architectures agree. A family plugs in
a `memory_attention.MemoryAttention`: `(hidden_states, carried, context) -> (output, carried, weights)`, where `carried`
passes from layer to layer alongside the tokens (Luna's packed sequence), or is `None`.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import is_tracing

from .attention_base import linear
from .configuration_base import BoundedMemoryConfig
from .context import ForwardContext
from .dispatch import choose
from .functional import depthwise_convolution, repeated_positions, sinusoids, sinusoids_at, token_positions
from .memory_attention import FullAttention, MemoryAttention
from .recompute import keep_inputs, may_recompute

# Number of tokens per block of the feed-forward network in inference, by device type; the CPU's blocks fit in cache.
_FEED_FORWARD_ROWS = {"cpu": 1024}
_FEED_FORWARD_ROWS_DEFAULT = 16384


class SinusoidalPositions(nn.Module):
    """Fixed sinusoidal position table, indexed like an embedding."""

    def __init__(self, num_positions: int, dim: int, padding_idx: int | None = None) -> None:
        super().__init__()
        self.num_positions, self.dim, self.padding_idx = num_positions, dim, padding_idx
        self.table = nn.Buffer(self.make_table(), persistent=False)

    def initialise(self, config: BoundedMemoryConfig) -> None:
        """Recompute the table, which is not saved in checkpoints."""
        init.copy_(self.table, self.make_table())

    def make_table(self) -> Tensor:
        """Compute the table, (num_positions, dim) float32."""
        return sinusoids(self.num_positions, self.dim, self.padding_idx)

    def forward(self, position_ids: Tensor) -> Tensor:
        """Look up positions: (b, n) to (b, n, d)."""
        return nn.functional.embedding(position_ids, self.table)


class EndlessSinusoids(nn.Module):
    """Sinusoidal positions computed on the fly, for decoders, which accept inputs of any length."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, position_ids: Tensor) -> Tensor:
        """Encode positions, counted from 0: (b, n) to (b, n, d)."""
        return sinusoids_at(position_ids, self.dim)


class TokenEmbeddings(nn.Module):
    """Token, position and segment embeddings, LayerNorm, dropout, projection if widths differ; padding is zero."""

    def __init__(self, config: BoundedMemoryConfig) -> None:
        super().__init__()
        width, padding_idx = config.embedding_width(), config.pad_token_id
        num_positions = config.position_rows() + padding_idx + 1
        self.padding_idx, self.period = padding_idx, config.position_period
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=padding_idx)
        self.scale = math.sqrt(width) if config.scales_embedding() else 1.0
        # Decoders count positions from 0. That of an encoder-decoder has the positions of its encoder.
        self.first_position = padding_idx + 1 if config.is_encoder_decoder else 0
        if config.position_embedding_type == "learned":
            self.position_embeddings = nn.Embedding(num_positions, width, padding_idx=padding_idx)
        elif config.position_embedding_type in ("rotary", "none"):  # rotary: applied to queries and keys
            self.position_embeddings = None
        elif config.is_decoder:
            self.position_embeddings = EndlessSinusoids(width)
        else:
            self.position_embeddings = SinusoidalPositions(num_positions, width, padding_idx)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width) if config.type_vocab_size else None
        self.LayerNorm = (
            nn.LayerNorm(width, eps=config.layer_norm_eps) if config.embedding_layer_norm else nn.Identity()
        )
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.embeddings_project = nn.Linear(width, config.hidden_size) if width != config.hidden_size else None

    def forward(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        position_ids: Tensor | None,
        token_type_ids: Tensor | None,
        keep: Tensor | None,
    ) -> Tensor:
        """Embed (b, n) ids, or complete (b, n, `embedding_size` or d) token embeddings, to (b, n, d) states."""
        tokens = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        length = tokens.shape[1]
        if position_ids is None and self.position_embeddings is not None:
            every = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device) if keep is None else keep
            position_ids = token_positions(every, self.padding_idx)
        states = tokens * self.scale if self.scale != 1.0 else tokens
        if self.period is not None:
            position_ids = repeated_positions(position_ids, self.padding_idx, self.period)
        if self.position_embeddings is not None:
            states = states + self.position_embeddings(position_ids + self.first_position).to(states.dtype)
        if self.token_type_embeddings is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros(1, length, dtype=torch.long, device=tokens.device)
            states = states + self.token_type_embeddings(token_type_ids)
        # All-zero ids, as many tokenizers return, are the same as none; traced, they cannot be read.
        elif token_type_ids is not None and not is_tracing(token_type_ids) and token_type_ids.any():
            raise ValueError(
                f"`token_type_ids` contain {token_type_ids.max()}, but the model has no segment embeddings "
                "(`type_vocab_size` is 0). Leave them out, or use a model with `type_vocab_size` above 0."
            )
        if keep is None:
            return self.finish(states)
        # Masked before the norm, too: padding may hold anything, even NaN, which must not reach a state or a gradient.
        padding = ~keep.unsqueeze(-1)
        return self.finish(states.masked_fill(padding, 0.0)).masked_fill(padding, 0.0)

    def finish(self, states: Tensor) -> Tensor:
        """Apply LayerNorm, dropout and any projection to the sum of embeddings; returns states (b, n, d)."""
        states = self.dropout(self.LayerNorm(states))
        return states if self.embeddings_project is None else linear(self.embeddings_project, states)


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
        return self.activate(linear(self.dense, states))

    def activate(self, inner: Tensor) -> Tensor:
        """Apply activation and dropout."""
        return self.dropout(self.activation(inner))


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
        self, hidden_states: Tensor, carried: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None]:
        """Apply the sub-layer with its residual connection; returns states (b, n, d) and `carried`.

        In a post-norm layer, what follows applies `output.LayerNorm` to the states.
        """
        mixed, carried = self.mix(hidden_states, carried, context)
        return hidden_states + self.output.dropout(mixed), carried

    def mix(
        self, hidden_states: Tensor, carried: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the update that the residual connection adds, before dropout: (b, n, d), and `carried`."""
        states = self.output.LayerNorm(hidden_states) if self.norm_first else hidden_states
        attention, output = self.self, self.output.dense
        # The tokens of a stream are projected together, not by bucket. Another class of attention is a wrapper, such as
        # FSDP's, which must be called.
        is_plain = isinstance(context, ForwardContext) and isinstance(attention, MemoryAttention)
        # Without gradients, neither form has anything to save where every token is read.
        if is_plain and (torch.is_grad_enabled() or not context.whole) and attention.may_project(states, output):
            mixed, carried = attention.forward_projected(states, carried, context, output)
        else:
            mixed, carried = context.in_rows(lambda *inputs: attention(*inputs)[:2], states, carried)
            mixed = linear(output, mixed)
        if self.convolution is not None:
            convolved, _ = context.in_rows(lambda rows, _, own: (self.convolution(rows, own), None), states, None)
            mixed = mixed + convolved
        return mixed, carried


class TransformerLayer(GradientCheckpointingLayer):
    """One layer of an encoder or decoder: attention and feed-forward network."""

    def __init__(self, config: BoundedMemoryConfig, *attention: Any) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.feed_forward_rows = config.chunk_size_feed_forward
        self.attention = AttentionBlock(config, *attention)
        self.intermediate = FeedForwardInput(config)
        self.output = SubLayerOutput(config, config.intermediate_size)

    def forward(
        self, hidden_states: Tensor, carried: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None]:
        """Apply both sub-layers; returns token states (b, n, d) and `carried`."""
        hidden_states, carried = self.attention(hidden_states, carried, context)
        return self.feed_forward(hidden_states, self.attention), carried

    def feed_forward(self, hidden_states: Tensor, before: nn.Module) -> Tensor:
        """Apply the feed-forward sub-layer with its residual connection, in blocks of tokens if that saves memory.

        Args:
            hidden_states: (b, n, d) the output of the sub-layer `before`, whose LayerNorm is still to be applied in a
                post-norm layer.
        """
        norm = self.output.LayerNorm if self.norm_first else before.output.LayerNorm
        rows = self.feed_forward_rows
        if not rows and choose("feed_forward", hidden_states, self.training) == "parts":
            rows = _FEED_FORWARD_ROWS.get(hidden_states.device.type, _FEED_FORWARD_ROWS_DEFAULT)
        flat = hidden_states.flatten(0, 1)
        if not rows or flat.shape[0] <= rows:
            return self._feed_forward(hidden_states, norm)
        return torch.cat([self._feed_forward(block, norm) for block in flat.split(rows)]).view_as(hidden_states)

    def _feed_forward(self, states: Tensor, norm: nn.LayerNorm) -> Tensor:
        def widen(states: Tensor) -> tuple[Tensor, Tensor]:
            normed = norm(states)
            return states if self.norm_first else normed, linear(self.intermediate.dense, normed)

        def narrow(inner: Tensor) -> Tensor:
            return linear(self.output.dense, self.intermediate.activate(inner))

        def apply(states: Tensor) -> tuple[Tensor, Tensor]:
            states, inner = widen(states)
            return states, narrow(inner)

        if not may_recompute(states, norm, self.intermediate, self.output):
            normed = norm(states)
            states = states if self.norm_first else normed
            update = linear(self.output.dense, self.intermediate(normed))
        elif self.gradient_checkpointing and self.training:  # memory counts more than time
            states, update = keep_inputs(apply, states)
        else:  # the large products are kept; norms and activations are cheap
            states, inner = keep_inputs(widen, states)
            update = keep_inputs(narrow, inner)
        states = states + self.output.dropout(update)
        return states if self.norm_first else self.output.LayerNorm(states)


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

    def forward(self, hidden_states: Tensor, carried: Tensor | None, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        """Apply all layers, with their other inputs; returns token states (b, n, d) and `carried`."""
        for layer in self.layer:
            # Positional arguments, because re-entrant checkpointing gives keyword arguments no gradient.
            hidden_states, carried = layer(hidden_states, carried, *inputs)
        return self.final_layer_norm(hidden_states), carried
