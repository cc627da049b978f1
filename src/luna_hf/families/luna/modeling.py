"""Luna models (Ma et al., "Luna: Linear Unified Nested Attention", NeurIPS 2021, arXiv 2106.01540).

Through every layer of an encoder pass the tokens X and a packed sequence P of fixed length. This file
has the embedding of P, the base models and the heads; the attention is in `attention.py`.

In an encoder-decoder (section 3.4) the packed states of the source are the queries with which the decoder's causal
attention packs the target, and with which its cross-attention packs the source again; this updates them for the next
layer. They do not depend on the target.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.modeling_outputs import (
    MaskedLMOutput,
    ModelOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, is_tracing
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import OutputRecorder

from ...layers.block import TransformerLayer
from ...layers.embeddings import SinusoidalPositions
from ...layers.recorded import Recorded
from ...models.base import BoundedMemoryPreTrainedModel
from ...models.conditional_generation import ConditionalGenerationMixin
from ...models.decoder import CausalLMMixin, DecoderModelMixin
from ...models.encoder import EncoderModelMixin, EncoderPreTrainedModel
from ...models.encoder_decoder import (
    CrossDecoderMixin,
    Seq2SeqModelMixin,
    Seq2SeqPreTrainedModel,
)
from ...models.encoder_heads import (
    MaskedLMMixin,
    MultipleChoiceMixin,
    QuestionAnsweringMixin,
    SequenceClassificationMixin,
    TokenClassificationMixin,
    TokenPooling,
)
from ...models.streaming import StreamingDecoderMixin
from ...ops.attention import make_key_mask, split_heads
from ...ops.context import ForwardContext, drop_if_full, make_encoder_context
from ...ops.memory_read import attend_heads
from ...ops.tokens import first_kept, join_gradients, masked_mean
from ...ops.unpadding import UnpaddedBatch, UnpaddedContext
from .attention import LunaAttention, LunaCausalAttention, LunaPackAttention, slots_for, valid_slots
from .configuration import LunaConfig


@dataclass
class PackedOutput(ModelOutput):
    """Fields of the packed states, added to the outputs of Luna's models.

    Args:
        packed_hidden_states: packed states (b, l, d) after the embedding and after each layer, with
            `output_packed_hidden_states=True`.
        pack_attentions: pack weights (b, h_p, l, n) of each layer, with `output_pack_attentions=True` and eager
            attention. The usual `attentions` are the unpack weights (b, h, n, l).
        packed_states: what a later call can start from (b, l, d), with `output_packed_states=True`.
    """

    packed_hidden_states: tuple[Tensor, ...] | None = None
    pack_attentions: tuple[Tensor, ...] | None = None
    packed_states: Tensor | None = None


@dataclass
class LunaModelOutput(ModelOutput):
    """Output of `LunaModel`.

    Args:
        last_hidden_state: token states (b, n, d).
        packed_last_hidden_state: packed states (b, l, d), where l is `projection_length`, or with dynamic projection
            at most n / `tokens_per_slot`, rounded up, except in a traced, compiled or exported model. `None` with
            `softmax_length`, unless packed states are asked for (`output_packed_states`): short texts do not need them.
        packed_attention_mask: (b, l) long, 1 for slots in use: with dynamic projection, a row of t tokens uses only its
            first t / `tokens_per_slot` slots, rounded up, and the others are never read. `None` without dynamic
            projection.
        hidden_states: token states (b, n, d) after the embedding and after each layer.
        attentions: unpack weights (b, h, n, l) of each layer.
        packed_hidden_states: see `PackedOutput`.
        pack_attentions: see `PackedOutput`.
        packed_states: see `PackedOutput`.
    """

    last_hidden_state: Tensor | None = None
    packed_last_hidden_state: Tensor | None = None
    packed_attention_mask: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    packed_hidden_states: tuple[Tensor, ...] | None = None
    pack_attentions: tuple[Tensor, ...] | None = None
    packed_states: Tensor | None = None


@dataclass
class LunaMaskedLMOutput(PackedOutput, MaskedLMOutput):
    """`MaskedLMOutput` with the packed states."""


@dataclass
class LunaSequenceClassifierOutput(PackedOutput, SequenceClassifierOutput):
    """`SequenceClassifierOutput` with the packed states."""


@dataclass
class LunaMultipleChoiceOutput(PackedOutput, MultipleChoiceModelOutput):
    """`MultipleChoiceModelOutput` with the packed states."""


@dataclass
class LunaTokenClassifierOutput(PackedOutput, TokenClassifierOutput):
    """`TokenClassifierOutput` with the packed states."""


@dataclass
class LunaQuestionAnsweringOutput(PackedOutput, QuestionAnsweringModelOutput):
    """`QuestionAnsweringModelOutput` with the packed states."""


class LunaPackedEmbeddings(Recorded):
    """The initial packed sequence P_0: a learned parameter shared by all rows, with LayerNorm and dropout."""

    def __init__(self, config: LunaConfig) -> None:
        super().__init__()
        length, width = config.projection_length, config.hidden_size
        self.weight = nn.Parameter(torch.empty(length, width))
        self.scale = math.sqrt(width) if config.scales_embedding() else 1.0
        is_sinusoidal = config.position_embedding_type == "sinusoidal"
        self.positions = SinusoidalPositions(width) if is_sinusoidal else None
        self.LayerNorm = (
            nn.LayerNorm(width, eps=config.layer_norm_eps) if config.embedding_layer_norm else nn.Identity()
        )
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def initialise(self, config: LunaConfig) -> None:
        """Initialise P_0 like the other embeddings."""
        init.normal_(self.weight, mean=0.0, std=config.initializer_range)

    def forward(self, batch: int, num_slots: int, keep: Tensor | None, packed_states: Tensor | None = None) -> Tensor:
        """Return P_0, (b, l, d) with l = `num_slots`; slots masked by `keep` (b, l) are zero.

        If an earlier call has left its `packed_states` (b, l, d), P_0 is these.
        """
        if packed_states is not None:
            return packed_states
        packed = self.weight[:num_slots]
        packed = packed * self.scale if self.scale != 1.0 else packed
        if self.positions is not None:
            packed = packed + self.positions(torch.arange(num_slots, device=packed.device)).to(packed.dtype)
        packed = self.dropout(self.LayerNorm(packed).expand(batch, -1, -1))
        return packed if keep is None else packed.masked_fill(~keep.unsqueeze(-1), 0.0)


class LunaPreTrainedModel(EncoderPreTrainedModel):
    """Base class of the Luna encoders."""

    config: LunaConfig
    base_model_prefix = "luna"
    _no_split_modules = [*EncoderPreTrainedModel._no_split_modules, "LunaPackedEmbeddings"]
    _can_record_outputs = {
        **EncoderPreTrainedModel._can_record_outputs,
        "packed_hidden_states": [OutputRecorder(LunaPackedEmbeddings), OutputRecorder(TransformerLayer, index=1)],
        "pack_attentions": OutputRecorder(LunaPackAttention, index=1),
    }


class LunaModel(EncoderModelMixin, LunaPreTrainedModel):
    """The Luna encoder without a head; returns token states and packed states."""

    attention_class = LunaAttention
    own_keywords = (*EncoderModelMixin.own_keywords, "packed_states", "reads_packed_states")

    def add_layers(self, config: LunaConfig) -> None:
        """Create the layers, the embedding of P and, in a pre-norm model, P's final LayerNorm."""
        self.packed_embeddings = LunaPackedEmbeddings(config)
        super().add_layers(config)
        packed_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.packed_layer_norm = packed_norm if config.norm_first else nn.Identity()
        # Whether a head, or the caller without one, reads the packed states.
        self.reads_packed_states = not config.softmax_length

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        packed_states: torch.FloatTensor | None = None,
        global_attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> LunaModelOutput:
        """Like `EncoderModelMixin.forward`, with `output_packed_hidden_states` and `output_pack_attentions`.

        Args:
            packed_states: (b, l, d) the `packed_states` of an earlier call, from which P starts instead of the learned
                P_0. All slots are in use then, and a row without a token keeps what it is given.
            output_packed_states: keyword only; returns `packed_states` for a later call.
            reads_packed_states: keyword only; `False` if nothing reads the packed states that are returned, which may
                then be those of an earlier layer.

        Raises:
            ValueError: As in `EncoderModelMixin.forward`; also if `packed_states` have another shape, or a row holds
                several texts.
        """
        if kwargs.get("output_pack_attentions") and self.config._attn_implementation != "eager":
            raise ValueError(
                "`output_pack_attentions` needs eager attention, but the model uses "
                f'{self.config._attn_implementation}. Call `model.set_attn_implementation("eager")` first.'
            )
        wanted = kwargs.pop("output_packed_states", False)
        if wanted or packed_states is not None:
            kwargs["reads_packed_states"] = True
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, global_attention_mask)
        output = super().forward(*inputs, packed_states=packed_states, return_dict=True, **kwargs)
        if packed_states is not None:
            if output.packed_attention_mask is not None:
                output.packed_attention_mask = torch.ones_like(output.packed_attention_mask)
            keep = self.tokens_to_keep(input_ids, attention_mask)
            if keep is not None:
                packed = output.packed_last_hidden_state
                has_tokens = keep.any(-1)[:, None, None]
                output.packed_last_hidden_state = torch.where(has_tokens, packed, packed_states.to(packed.dtype))
        if wanted:
            output.packed_states = output.packed_last_hidden_state
        return output

    def begin(
        self, hidden_states: Tensor, keep: Tensor | None, marked: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, ForwardContext]:
        """Return P_0 (b, l, d), the first layer's packed states, and the context shared by all layers."""
        (batch, length, width), given = hidden_states.shape, options.pop("packed_states", None)
        context = self.make_context(hidden_states, keep, marked, options)
        num_slots = self.config.projection_length
        if given is not None:
            if given.shape != (batch, num_slots, width):
                raise ValueError(
                    f"`packed_states` must have shape {(batch, num_slots, width)}, but have {tuple(given.shape)}. Take "
                    f"them from a call with at least {num_slots * self.config.tokens_per_slot} tokens."
                )
            given = given.to(hidden_states.dtype)
            context = context._replace(slot_keep=torch.ones(given.shape[:2], dtype=torch.bool, device=given.device))
        elif self.config.dynamic_projection:
            # Slots beyond the padded length would be masked in every row, so they can be dropped.
            if not is_tracing(hidden_states):
                num_slots = min(num_slots, slots_for(self.config, length))
            else:  # taking the smaller number would specialise a graph to one side
                used = valid_slots(self.config, context.lengths, num_slots).expand(batch, -1)
                context = context._replace(slot_keep=used)
        packed_queries = hidden_states[:, :1].expand(-1, num_slots, -1)  # a stand-in: masks need only P's shape
        context = self.attention_class.prepare(self.config, hidden_states, packed_queries, context)
        return self.packed_embeddings(batch, num_slots, context.slot_keep, given), context

    def make_context(
        self, states: Tensor, keep: Tensor | None, marked: Tensor | None, options: dict[str, Any]
    ) -> ForwardContext:
        """Like `EncoderModelMixin.make_context`; packed states that nothing reads need not be updated."""
        options = dict(options)
        asked = options.pop("reads_packed_states", self.reads_packed_states)
        for name in ("output_packed_hidden_states", "output_pack_attentions"):
            asked = asked or options.get(name, getattr(self.config, name, False))
        context = make_encoder_context(self.config, states, keep, options, marked)
        return context._replace(updates_slots=asked)

    def text_slot_states(self, unpadded: UnpaddedBatch) -> tuple[Tensor, tuple[int, ...]]:
        """Return P_0 for every text, in as many slots as padded rows would have, and the slots of each bucket."""
        num_slots, slots, keep = self.config.projection_length, None, None
        if self.config.dynamic_projection:
            num_slots = min(num_slots, slots_for(self.config, unpadded.longest))
            slots = [min(num_slots, slots_for(self.config, bucket.length)) for bucket in unpadded.buckets]
            keep = valid_slots(self.config, unpadded.lengths.sort(dim=0).values, num_slots)
        texts = len(unpadded.lengths)
        return self.packed_embeddings(texts, num_slots, keep), tuple(slots or [num_slots] * len(unpadded.buckets))

    def make_output(
        self, hidden_states: Tensor, slot_states: Tensor, context: ForwardContext | UnpaddedContext
    ) -> LunaModelOutput:
        """Return the output with token states and packed states."""
        # A loss uses one of them; the last layer's parameters that serve only the other need a gradient, too.
        packed = self.packed_layer_norm(slot_states)
        if torch.is_grad_enabled():
            hidden_states, packed = join_gradients(hidden_states, packed)
        # Not `context.slot_keep`, which is `None` if nothing is padded: output fields must not depend on the data.
        slots = None
        if self.config.dynamic_projection:
            slots = valid_slots(self.config, context.lengths, packed.shape[1]).long().expand(packed.shape[0], -1)
        own = context.contexts[0] if isinstance(context, UnpaddedContext) else context
        if self.config.softmax_length and not own.updates_slots:
            packed = slots = None
        return LunaModelOutput(
            last_hidden_state=hidden_states, packed_last_hidden_state=packed, packed_attention_mask=slots
        )


def masked_max(states: Tensor, keep: Tensor | None) -> Tensor:
    """Maximum over the kept entries, or zeros if nothing is kept: (b, n, d) to (b, d)."""
    if keep is None:
        return states.amax(1)
    pooled = states.masked_fill(~keep.unsqueeze(-1), torch.finfo(states.dtype).min).amax(1)
    return pooled.masked_fill(~keep.any(-1, keepdim=True), 0.0)


class LunaPooling(nn.Module):
    """Pool the token states or the packed states to one vector per row (paper, Table 3)."""

    is_causal = False

    def __init__(self, config: LunaConfig) -> None:
        super().__init__()
        self.config = config
        self.kind = config.classifier_pooling
        width = config.hidden_size
        if self.kind in ("cls", "mean"):
            self.tokens = TokenPooling(config)
        elif self.kind == "packed_max":
            self.in_proj = nn.Linear(width, width)
        elif self.kind == "packed_attention":
            self.attention_dropout = config.attention_probs_dropout_prob
            self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
            self.output = nn.Linear(width, width)
            self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps)

    def forward(self, outputs: LunaModelOutput, keep: Tensor | None) -> Tensor:
        """Pool the base model's outputs, given the padding mask (b, n), to (b, d)."""
        if self.kind in ("cls", "mean"):
            return self.tokens(outputs, keep)
        packed, slots = outputs.packed_last_hidden_state, outputs.packed_attention_mask
        slots = None if slots is None else drop_if_full(slots.bool())
        if self.kind == "packed_max":
            return masked_max(self.in_proj(packed), slots)
        if self.kind == "packed_mean":
            return masked_mean(packed, slots)
        first = first_kept(outputs.last_hidden_state, keep).unsqueeze(1)  # (b, 1, d)
        mask = make_key_mask(self.config, slots, queries=first, keys=packed)
        sides = (self.query(first), self.key(packed), self.value(packed))
        pooled, _ = attend_heads(self, *(split_heads(side, self.config.num_attention_heads) for side in sides), mask)
        return self.LayerNorm(self.output(pooled)).squeeze(1)


class LunaHeadMixin:
    """A head on Luna's token states, or on its packed states."""

    def add_head(self, config: LunaConfig) -> None:
        """Create the head's modules; only some of them read the packed states."""
        super().add_head(config)
        pooling = getattr(self, "pooling", None)
        self.luna.reads_packed_states = pooling is not None and pooling.kind.startswith("packed")


class LunaForMaskedLM(LunaHeadMixin, MaskedLMMixin, LunaPreTrainedModel):
    """Luna with a masked language modelling head."""

    base_model_class = LunaModel
    output_class = LunaMaskedLMOutput


class LunaForSequenceClassification(LunaHeadMixin, SequenceClassificationMixin, LunaPreTrainedModel):
    """Luna with a sequence classification or regression head."""

    base_model_class = LunaModel
    pooling_class = LunaPooling
    output_class = LunaSequenceClassifierOutput


class LunaForMultipleChoice(LunaHeadMixin, MultipleChoiceMixin, LunaPreTrainedModel):
    """Luna with a multiple-choice head, for tasks such as RACE and CommonsenseQA."""

    base_model_class = LunaModel
    pooling_class = LunaPooling
    output_class = LunaMultipleChoiceOutput


class LunaForTokenClassification(LunaHeadMixin, TokenClassificationMixin, LunaPreTrainedModel):
    """Luna with a token classification head."""

    base_model_class = LunaModel
    output_class = LunaTokenClassifierOutput


class LunaForQuestionAnswering(LunaHeadMixin, QuestionAnsweringMixin, LunaPreTrainedModel):
    """Luna with a span head for extractive question answering."""

    base_model_class = LunaModel
    output_class = LunaQuestionAnsweringOutput


class LunaCausalModel(DecoderModelMixin, BoundedMemoryPreTrainedModel):
    """The Luna decoder without a head."""

    config: LunaConfig
    base_model_prefix = "luna"
    attention_class = LunaCausalAttention


class LunaForCausalLM(CausalLMMixin, BoundedMemoryPreTrainedModel, GenerationMixin):
    """Luna with a causal language modelling head; generates with a decoding state of constant size."""

    config: LunaConfig
    base_model_prefix = "luna"
    base_model_class = LunaCausalModel


class LunaCrossDecoder(CrossDecoderMixin, BoundedMemoryPreTrainedModel):
    """The decoder of the Luna encoder-decoder."""

    config: LunaConfig
    base_model_prefix = "luna"
    attention_class = LunaCausalAttention
    cross_attention_class = LunaAttention

    def name_outputs(self, outputs: Sequence[Tensor]) -> ModelOutput:
        """Like `CrossDecoderMixin.name_outputs`, with the packed states and the mask of their slots."""
        return LunaModelOutput(*outputs[: 3 if self.config.dynamic_projection else 2])

    def source_slot_states(self, outputs: ModelOutput) -> tuple[Tensor, Tensor | None]:
        """Return the packed states of the source (b, l, d), and which slots (b, l) it uses.

        Raises:
            ValueError: The encoder's output has no packed states.
        """
        packed, used = (outputs.get(name) for name in ("packed_last_hidden_state", "packed_attention_mask"))
        if packed is None:
            raise ValueError(
                "`encoder_outputs` has no packed states, which Luna's decoder needs: pass the output of "
                "`model.get_encoder()`, a `LunaModelOutput`."
            )
        return packed, None if used is None else drop_if_full(used != 0)

    def join_slot_states(self, hidden_states: Tensor, slot_states: Tensor) -> Tensor:
        """Link the states to the last packed states, whose LayerNorm would have no gradient otherwise."""
        return join_gradients(hidden_states, slot_states)[0] if torch.is_grad_enabled() else hidden_states


class LunaStreamingDecoder(StreamingDecoderMixin, BoundedMemoryPreTrainedModel):
    """The decoder of the Luna encoder-decoder with a causal source."""

    config: LunaConfig
    base_model_prefix = "luna"
    attention_class = LunaCausalAttention


class LunaSeq2SeqModel(Seq2SeqModelMixin, Seq2SeqPreTrainedModel):
    """The Luna encoder-decoder without a head."""

    config: LunaConfig
    base_model_prefix = "luna"
    encoder_class = LunaModel
    decoder_class = LunaCrossDecoder
    streaming_classes = (LunaCausalModel, LunaStreamingDecoder)

    def __init__(self, config: LunaConfig) -> None:
        super().__init__(config)
        self.encoder.reads_packed_states = True  # the decoder does, after short sources too


class LunaForConditionalGeneration(ConditionalGenerationMixin, Seq2SeqPreTrainedModel, GenerationMixin):
    """The Luna encoder-decoder with a language modelling head; generates with a state of constant size."""

    config: LunaConfig
    base_model_prefix = "luna"
    base_model_class = LunaSeq2SeqModel


__all__ = [
    "LunaCausalModel",
    "LunaForCausalLM",
    "LunaForConditionalGeneration",
    "LunaForMaskedLM",
    "LunaForMultipleChoice",
    "LunaForQuestionAnswering",
    "LunaForSequenceClassification",
    "LunaForTokenClassification",
    "LunaModel",
    "LunaModelOutput",
    "LunaPreTrainedModel",
    "LunaSeq2SeqModel",
]
