"""The encoder that all families share: embeddings, layer, stack, and the trunk of the models.

Parameters carry RoBERTa's names, so that a RoBERTa checkpoint fits wherever the architectures agree. A family plugs in
one attention module with the signature `(hidden_states, memory, masks) -> (output, memory, weights)`; `memory` is
whatever state it carries from layer to layer besides the tokens (Luna's packed sequence), or `None`.
"""

import difflib
import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import is_tracing

from .attention_base import Linear
from .configuration_base import EncoderConfig
from .functional import (
    causal_convolution,
    depthwise_convolution,
    move_to_ranks,
    sinusoids,
    sinusoids_at,
    token_positions,
    token_ranks,
)
from .state import CausalContext

# Rows of the feed-forward network treated at a time in inference, by device type: its inner states are the largest
# tensors of the model, and on a CPU blocks of this size stay in cache.
_FEED_FORWARD_ROWS = {"cpu": 1024}
_FEED_FORWARD_ROWS_DEFAULT = 16384


_INPUT_NAMES = ["input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds", "labels"]
_REFUSED_KEYWORDS = {
    "head_mask": "transformers 5 has no head masks.",
    "encoder_hidden_states": "the model has no cross-attention.",
    "past_key_values": "the model is an encoder and keeps no cache.",
    **dict.fromkeys(
        ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
        "every row needs its own memory, so several texts in one row would mix. Pad them (DataCollatorWithPadding).",
    ),
}


@torch.compiler.assume_constant_result  # torch.compile cannot trace difflib
def _closest_input(name: str, outputs: tuple[str, ...]) -> str | None:
    if name in outputs:
        return None
    close = difflib.get_close_matches(name, [*_INPUT_NAMES, *outputs], n=1, cutoff=0.85)
    return close[0] if close else None


class SinusoidalPositions(nn.Module):
    """Fixed table of sinusoids, read like an embedding."""

    def __init__(self, num_positions: int, dim: int, padding_idx: int | None = None) -> None:
        super().__init__()
        self.num_positions, self.dim, self.padding_idx = num_positions, dim, padding_idx
        self.table = nn.Buffer(self.make_table(), persistent=False)

    def make_table(self) -> Tensor:
        """(num_positions, dim) float32."""
        return sinusoids(self.num_positions, self.dim, self.padding_idx)

    def forward(self, position_ids: Tensor) -> Tensor:
        """(b, n) to (b, n, d)."""
        return nn.functional.embedding(position_ids, self.table)


class EndlessSinusoids(nn.Module):
    """The same sinusoids without a table, from position 0 on, for decoders."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, position_ids: Tensor) -> Tensor:
        """(b, n) to (b, n, d)."""
        return sinusoids_at(position_ids, self.dim)


class EncoderEmbeddings(nn.Module):
    """Token, position and segment embeddings, LayerNorm, dropout; padded tokens become zero."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width, padding_idx = config.hidden_size, config.pad_token_id
        num_positions = config.max_position_embeddings + padding_idx + 1
        self.padding_idx = padding_idx
        self.max_position_embeddings = config.max_position_embeddings
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=padding_idx)
        self.scale = math.sqrt(width) if config.position_embedding_type == "sinusoidal" else 1.0
        if config.position_embedding_type == "learned":
            self.position_embeddings = nn.Embedding(num_positions, width, padding_idx=padding_idx)
        elif config.position_embedding_type == "rotary":  # the attention turns queries and keys
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

    def forward(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        position_ids: Tensor | None,
        token_type_ids: Tensor | None,
        keep: Tensor | None,
    ) -> Tensor:
        """(b, n) ids, or (b, n, d) embeddings, to (b, n, d) states."""
        tokens = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        length = tokens.shape[1]
        if position_ids is None and self.position_embeddings is not None:
            every = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device) if keep is None else keep
            position_ids = token_positions(every, self.padding_idx)
        states = tokens * self.scale if self.scale != 1.0 else tokens
        if self.position_embeddings is not None:
            states = states + self.position_embeddings(position_ids).to(states.dtype)
        if self.token_type_embeddings is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros(1, length, dtype=torch.long, device=tokens.device)
            states = states + self.token_type_embeddings(token_type_ids)
        elif token_type_ids is not None:
            raise ValueError(
                "`token_type_ids` were given, but the model has no segment embeddings (`type_vocab_size` is 0). "
                "Leave them out, or configure `type_vocab_size`."
            )
        if keep is None:
            return self.dropout(self.LayerNorm(states))
        # Also before the norm: whatever stands at padding, even NaN, must reach neither a state nor a gradient.
        padding = ~keep.unsqueeze(-1)
        return self.dropout(self.LayerNorm(states.masked_fill(padding, 0.0))).masked_fill(padding, 0.0)


class DepthwiseConvolution(nn.Module):
    """`conv_kernel_size` taps over the token states, one filter a channel, no bias."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.hidden_size, config.conv_kernel_size))

    def forward(self, states: Tensor, keep: Tensor | None, masks: Any) -> Tensor:
        """(b, n, d) to (b, n, d)."""
        return depthwise_convolution(states, self.weight, keep)


class CausalConvolution(DepthwiseConvolution):
    """The same over the token itself and those before it, whose states are kept while decoding."""

    layer_index = 0  # the model numbers its layers

    def forward(self, states: Tensor, keep: Tensor | None, masks: CausalContext) -> Tensor:
        """(b, n, d) to (b, n, d)."""
        cache = masks.layer_cache(self.layer_index)
        before = None if cache is None else cache.states.get("convolution")
        ranks = None
        if keep is not None:
            # Without padding between them: moved to the front, the real tokens are the first ones.
            ranks = token_ranks(keep, states.shape[1], keep.device)
            states = move_to_ranks(states.unsqueeze(1), ranks, keep).squeeze(1)
        if before is None:
            before = states.new_zeros(states.shape[0], self.weight.shape[-1] - 1, states.shape[-1])
        seen = torch.cat([before.to(states.dtype), states], dim=1)
        out = causal_convolution(seen, self.weight)
        if cache is not None:  # last, since it is written where `before` was read from
            places = states.shape[1] if keep is None else keep.sum(1, keepdim=True)
            places = (places + torch.arange(before.shape[1], device=seen.device)).expand(seen.shape[0], -1)
            cache.write(convolution=seen.gather(1, places.unsqueeze(-1).expand(-1, -1, seen.shape[-1])))
        return out if ranks is None else out.gather(1, ranks.unsqueeze(-1).expand(out.shape))


class SubLayerOutput(nn.Module):
    """What closes a sub-layer: projection to the width, dropout, and its LayerNorm.

    In a post-norm layer the norm follows the residual; in a pre-norm layer it stands before the sub-layer.
    """

    def __init__(self, config: EncoderConfig, in_features: int) -> None:
        super().__init__()
        self.dense = Linear(in_features, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)


class FeedForwardInput(nn.Module):
    """First half of the feed-forward network: projection, activation, dropout."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.dropout = nn.Dropout(config.activation_dropout)

    def forward(self, states: Tensor) -> Tensor:
        """(..., d) to (..., intermediate_size)."""
        return self.dropout(self.activation(self.dense(states)))


class AttentionBlock(nn.Module):
    """The family's attention (`self`, RoBERTa's name), its output projection, and the optional convolution."""

    def __init__(self, config: EncoderConfig, attention_class: type[nn.Module]) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.self = attention_class(config)
        self.output = SubLayerOutput(config, config.hidden_size)
        convolution_class = CausalConvolution if config.is_decoder else DepthwiseConvolution
        self.convolution = convolution_class(config) if config.conv_kernel_size else None

    def forward(
        self, hidden_states: Tensor, memory: Tensor | None, masks: Any, keep: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Residual attention sub-layer: (b, n, d) and memory to the same shapes."""
        mixed, memory = self.mix(hidden_states, memory, masks, keep, **kwargs)
        hidden_states = hidden_states + self.output.dropout(mixed)
        return hidden_states if self.norm_first else self.output.LayerNorm(hidden_states), memory

    def mix(
        self, hidden_states: Tensor, memory: Tensor | None, masks: Any, keep: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """What the sub-layer adds to its input, before dropout: (b, n, d), and the next memory."""
        states = self.output.LayerNorm(hidden_states) if self.norm_first else hidden_states
        mixed, memory, _ = self.self(states, memory, masks, **kwargs)
        mixed = self.output.dense(mixed)
        if self.convolution is not None:
            mixed = mixed + self.convolution(states, keep, masks)
        return mixed, memory


class EncoderLayer(GradientCheckpointingLayer):
    """One layer. A family's subclass names its attention module in `attention_class`."""

    attention_class: type[nn.Module]

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.feed_forward_rows = config.chunk_size_feed_forward
        self.attention = AttentionBlock(config, self.attention_class)
        self.intermediate = FeedForwardInput(config)
        self.output = SubLayerOutput(config, config.intermediate_size)

    def forward(
        self, hidden_states: Tensor, memory: Tensor | None, masks: Any, keep: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """(b, n, d) token states and the family's memory, to the same shapes."""
        hidden_states, memory = self.attention(hidden_states, memory, masks, keep, **kwargs)
        return self.feed_forward(hidden_states), memory

    def feed_forward(self, hidden_states: Tensor) -> Tensor:
        """Residual feed-forward sub-layer, row block by row block where that saves memory."""
        rows = self.feed_forward_rows
        # Not while training, even without gradients: re-entrant checkpointing must draw the same dropout twice.
        if not rows and not self.training and not torch.is_grad_enabled() and not is_tracing(hidden_states):
            rows = _FEED_FORWARD_ROWS.get(hidden_states.device.type, _FEED_FORWARD_ROWS_DEFAULT)
        flat = hidden_states.flatten(0, 1)
        if not rows or flat.shape[0] <= rows:
            return self._feed_forward(hidden_states)
        return torch.cat([self._feed_forward(block) for block in flat.split(rows)]).view_as(hidden_states)

    def _feed_forward(self, states: Tensor) -> Tensor:
        inner = self.intermediate(self.output.LayerNorm(states) if self.norm_first else states)
        states = states + self.output.dropout(self.output.dense(inner))
        return states if self.norm_first else self.output.LayerNorm(states)


class EncoderStack(nn.Module):
    """The layers (under RoBERTa's name `layer`), and the final norm of a pre-norm model."""

    def __init__(self, config: EncoderConfig, layer_class: Callable[[EncoderConfig], EncoderLayer]) -> None:
        super().__init__()
        self.layer = nn.ModuleList(layer_class(config) for _ in range(config.num_hidden_layers))
        final = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.final_layer_norm = final if config.norm_first else nn.Identity()

    def forward(
        self, hidden_states: Tensor, memory: Tensor | None, masks: Any, keep: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """(b, n, d) states and memory through all layers."""
        for layer in self.layer:
            # Positional: what needs a gradient must be, for re-entrant checkpointing.
            hidden_states, memory = layer(hidden_states, memory, masks, keep, **kwargs)
        return self.final_layer_norm(hidden_states), memory


class EncoderPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation that all families share."""

    config: EncoderConfig
    auto_map: dict[str, str] = {}
    supports_gradient_checkpointing = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DepthwiseConvolution):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
        elif isinstance(module, SinusoidalPositions):
            init.copy_(module.table, module.make_table())

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As `PreTrainedModel.save_pretrained`; with the code that the Auto classes need where luna_hf is missing."""
        # transformers enters only the class that is being saved; every head can be loaded from these files.
        self.config.auto_map = dict(self.auto_map)
        super().save_pretrained(*args, **kwargs)

    @classmethod
    def from_roberta(
        cls, source: str | os.PathLike | PreTrainedModel, *, max_length: int | None = None, seed: int = 0, **fields: Any
    ) -> "EncoderPreTrainedModel":
        """A model that starts from a trained RoBERTa, XLM-R, CamemBERT, data2vec-text or BERT; needs the package.

        The encoder's weights are kept; a masked-LM model keeps the source's masked-LM head, too. Any other head, and
        what the family has besides RoBERTa, is new, which is logged. `luna_hf.warm_start.warm_start` takes the same
        arguments, and returns the report with the model.

        Args:
            source: folder, name on the Hub, or a model in memory.
            max_length: tokens that the model must take, if more than the source does.
            seed: of what is new.
            fields: of the config (`num_labels`, `conv_kernel_size`, ...), and options of the family's rules in
                `warm_start_<family>.py` (such as `slot_tokens` or `control_init`).

        Raises:
            ImportError: luna_hf is not installed. A checkpoint folder carries what its model needs to run, no more.
            ValueError: A causal model, a source that cannot be mapped or read, or a field that is wrong.
        """
        # In a `try` and absolute: transformers neither asks for the package nor copies the file into checkpoints.
        try:
            from luna_hf.warm_start import warm_start
        except ImportError as error:
            raise ImportError(
                "`from_roberta` needs the package, which a checkpoint folder does not carry: `pip install luna-hf`."
            ) from error
        model, made = warm_start(cls, source, max_length=max_length, seed=seed, **fields)
        made.warn()
        return model


class EncoderModelMixin:
    """Input handling of a family's base model.

    A family's `begin(hidden_states, keep) -> (memory, masks)` makes what its layers take besides the token states.
    """

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding."""
        self.embeddings.word_embeddings = value

    def check_inputs(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        keywords: dict[str, Any],
    ) -> None:
        """Refuse what an encoder would compute wrongly or silently ignore.

        Args:
            input_ids, inputs_embeds, attention_mask: as given to the model.
            keywords: whatever else was given.

        Raises:
            ValueError: Not exactly one kind of input; an empty or too long one; a mask that is not (batch, length); a
                keyword that is misspelt, or that asks for what the model does not do.
        """
        self.check_keywords(keywords)
        length, limit = self.check_shapes(input_ids, inputs_embeds, attention_mask), self.config.max_position_embeddings
        if length > limit:
            raise ValueError(
                f"The input is {length} tokens long, but the model takes at most {limit} "
                f"(`max_position_embeddings`). Truncate it (`tokenizer(..., truncation=True, max_length={limit})`) "
                "or use a model with more positions."
            )

    def check_keywords(self, keywords: dict[str, Any]) -> None:
        """Refuse keywords that are misspelt, or that ask for what the model does not do.

        Raises:
            ValueError: There is one.
        """
        outputs = ("return_dict", *(f"output_{name}" for name in self._can_record_outputs))
        for name, value in keywords.items():
            if name in _REFUSED_KEYWORDS and value is not None:
                raise ValueError(f"`{name}` is not supported: {_REFUSED_KEYWORDS[name]}")
            meant = _closest_input(name, outputs)
            if meant:
                raise ValueError(f"There is no input `{name}`. Did you mean `{meant}`?")

    def check_shapes(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        with_past: bool = False,
    ) -> int:
        """The length of the input; with a past, the mask may begin before it.

        Raises:
            ValueError: Not exactly one kind of input, an empty one, or a mask that does not fit.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of `input_ids` and `inputs_embeds`.")
        shape = input_ids.shape if inputs_embeds is None else inputs_embeds.shape[:2]
        if len(shape) != 2:
            raise ValueError(f"`input_ids` must have the shape (batch, length), but it is {tuple(shape)}.")
        if shape[1] == 0:
            with_state = " With a state, give `generate` the whole text so far and what is new." if with_past else ""
            raise ValueError(f"The input has no tokens (length 0).{with_state}")
        fits = attention_mask is None or attention_mask.shape == shape
        if with_past and not fits:
            fits = (
                attention_mask.dim() == 2 and attention_mask.shape[0] == shape[0] and attention_mask.shape[1] > shape[1]
            )
        if not fits:
            raise ValueError(
                f"`attention_mask` must have the shape {tuple(shape)} (batch, length), with 1 for tokens and 0 for "
                f"padding, but it is {tuple(attention_mask.shape)}. Masks between pairs of tokens have no meaning here."
            )
        return shape[1]

    def tokens_to_keep(self, input_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor | None:
        """(b, n) boolean, True for tokens; `None` if nothing is padded.

        Without an `attention_mask` the padding is read off the ids, as the authors do.

        Raises:
            ValueError: The mask is an additive one.
        """
        if attention_mask is not None:
            if attention_mask.is_floating_point() and not is_tracing(attention_mask) and (attention_mask < 0).any():
                raise ValueError(
                    "`attention_mask` has negative entries, as masks that are added to logits do. "
                    "Give 1 for tokens and 0 for padding."
                )
            keep = attention_mask != 0
        elif input_ids is not None:
            keep = input_ids != self.config.pad_token_id
        else:
            return None
        return drop_if_full(keep)


def drop_if_full(keep: Tensor) -> Tensor | None:
    """`None` for a mask that keeps everything: one look at the data, not taken while a graph is being traced."""
    if is_tracing(keep) or keep.device.type == "meta" or not keep.all():
        return keep
    return None
