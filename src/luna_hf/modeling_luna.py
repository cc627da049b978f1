"""Luna encoder models (Ma et al., "Luna: Linear Unified Nested Attention", NeurIPS 2021, arXiv 2106.01540).

Two streams go through every layer: the tokens X and a packed sequence P of fixed length. The arithmetic is in
`attention_luna.py`; here stand the embedding of P, the base model and the task heads.
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
    BaseModelOutputWithPast,
    MaskedLMOutput,
    ModelOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, is_tracing
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention_base import Linear, attend, make_key_mask
from .attention_luna import LunaMasks, LunaPackAttention, LunaSelfAttention
from .attention_luna_causal import LunaCausalPack, LunaCausalSelfAttention
from .configuration_luna import LunaConfig
from .functional import first_kept, join_streams, masked_max, masked_mean, valid_slots
from .modeling_base import (
    EncoderEmbeddings,
    EncoderLayer,
    EncoderModelMixin,
    EncoderPreTrainedModel,
    EncoderStack,
    SinusoidalPositions,
    drop_if_full,
)
from .modeling_decoder import CausalLMMixin, DecoderModelMixin
from .modeling_heads import (
    MaskedLMMixin,
    MultipleChoiceMixin,
    QuestionAnsweringMixin,
    SequenceClassificationMixin,
    TokenClassificationMixin,
    TokenPooling,
)
from .state import MemoryCache
from .warm_start import warm_start
from .warm_start_source import Source


@dataclass
class PackedStreamOutput(ModelOutput):
    """What Luna's models return about the packed stream, besides the usual fields.

    Args:
        packed_hidden_states: packed states (b, l, d) after the embedding and after every layer; with
            `output_packed_hidden_states=True`.
        pack_attentions: pack weights (b, h_p, l, n) of every layer; with `output_pack_attentions=True` and eager
            attention. The usual `attentions` are the unpack weights (b, h, n, l).
    """

    packed_hidden_states: tuple[Tensor, ...] | None = None
    pack_attentions: tuple[Tensor, ...] | None = None


@dataclass
class LunaModelOutput(ModelOutput):
    """Output of `LunaModel`.

    Args:
        last_hidden_state: token states (b, n, d).
        packed_last_hidden_state: packed states (b, l, d); l is `projection_length`, or n where that is less and the
            projection dynamic (not in a traced, compiled or exported model, whose l is always `projection_length`).
        packed_attention_mask: (b, slots) long, 1 for the slots that hold a row's packed sequence: with dynamic
            projection a row of t tokens uses its first t slots, the others are never read. `None` without it.
        hidden_states, attentions: token states of every layer, unpack weights (b, h, n, l).
        packed_hidden_states, pack_attentions: see `PackedStreamOutput`.
    """

    last_hidden_state: Tensor | None = None
    packed_last_hidden_state: Tensor | None = None
    packed_attention_mask: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    packed_hidden_states: tuple[Tensor, ...] | None = None
    pack_attentions: tuple[Tensor, ...] | None = None


@dataclass
class LunaMaskedLMOutput(PackedStreamOutput, MaskedLMOutput):
    """`MaskedLMOutput` with the packed stream."""


@dataclass
class LunaSequenceClassifierOutput(PackedStreamOutput, SequenceClassifierOutput):
    """`SequenceClassifierOutput` with the packed stream."""


@dataclass
class LunaMultipleChoiceOutput(PackedStreamOutput, MultipleChoiceModelOutput):
    """`MultipleChoiceModelOutput` with the packed stream."""


@dataclass
class LunaTokenClassifierOutput(PackedStreamOutput, TokenClassifierOutput):
    """`TokenClassifierOutput` with the packed stream."""


@dataclass
class LunaQuestionAnsweringOutput(PackedStreamOutput, QuestionAnsweringModelOutput):
    """`QuestionAnsweringModelOutput` with the packed stream."""


class LunaPackedEmbeddings(nn.Module):
    """P_0: a learned packed sequence with its own LayerNorm and dropout, the same for every row."""

    def __init__(self, config: LunaConfig) -> None:
        super().__init__()
        length, width = config.projection_length, config.hidden_size
        self.weight = nn.Parameter(torch.empty(length, width))
        self.scale = 1.0
        self.positions = None
        if config.position_embedding_type == "sinusoidal":
            self.scale = math.sqrt(width)
            self.positions = SinusoidalPositions(length, width)
        self.LayerNorm = (
            nn.LayerNorm(width, eps=config.layer_norm_eps) if config.embedding_layer_norm else nn.Identity()
        )
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, batch: int, num_slots: int, keep: Tensor | None) -> Tensor:
        """(b, l, d) with l = `num_slots`; slots outside `keep` (b, l) are zero."""
        packed = self.weight[:num_slots]
        if self.positions is not None:
            packed = packed * self.scale + self.positions.table[:num_slots].to(packed.dtype)
        packed = self.dropout(self.LayerNorm(packed).expand(batch, -1, -1))
        return packed if keep is None else packed.masked_fill(~keep.unsqueeze(-1), 0.0)


class LunaLayer(EncoderLayer):
    """One layer: nested attention, feed-forward on the tokens only."""

    attention_class = LunaSelfAttention


class LunaDecoderLayer(LunaLayer):
    """One layer of a decoder: causal attention, feed-forward."""

    attention_class = LunaCausalSelfAttention


class LunaPreTrainedModel(EncoderPreTrainedModel):
    """What all Luna models share."""

    config: LunaConfig
    base_model_prefix = "luna"
    _no_split_modules = ["EncoderEmbeddings", "LunaPackedEmbeddings", "LunaLayer", "LunaDecoderLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {
        "hidden_states": LunaLayer,
        "attentions": [
            OutputRecorder(LunaSelfAttention, index=2),
            OutputRecorder(LunaCausalSelfAttention, index=2),
        ],
        "packed_hidden_states": [OutputRecorder(LunaPackedEmbeddings), OutputRecorder(LunaLayer, index=1)],
        "pack_attentions": OutputRecorder(LunaPackAttention, index=1),
    }
    auto_map = {
        "AutoConfig": "configuration_luna.LunaConfig",
        "AutoModel": "modeling_luna.LunaModel",
        "AutoModelForMaskedLM": "modeling_luna.LunaForMaskedLM",
        "AutoModelForCausalLM": "modeling_luna.LunaForCausalLM",
        "AutoModelForSequenceClassification": "modeling_luna.LunaForSequenceClassification",
        "AutoModelForMultipleChoice": "modeling_luna.LunaForMultipleChoice",
        "AutoModelForTokenClassification": "modeling_luna.LunaForTokenClassification",
        "AutoModelForQuestionAnswering": "modeling_luna.LunaForQuestionAnswering",
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LunaPackedEmbeddings):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
        elif isinstance(module, LunaCausalPack):
            # As large as token states after their LayerNorm: P has none here, and near zero all slots are the same.
            init.normal_(module.slots, mean=0.0, std=1.0)


class LunaModel(EncoderModelMixin, DecoderModelMixin, LunaPreTrainedModel):
    """Luna without a head: the encoder, with token states and packed states; or the decoder (`config.is_decoder`)."""

    def __init__(self, config: LunaConfig) -> None:
        super().__init__(config)
        self.embeddings = EncoderEmbeddings(config)
        if config.is_decoder:
            self.encoder = EncoderStack(config, LunaDecoderLayer)
            self.number_layers()
        else:
            self.packed_embeddings = LunaPackedEmbeddings(config)
            self.encoder = EncoderStack(config, LunaLayer)
            packed_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
            self.packed_layer_norm = packed_norm if config.norm_first else nn.Identity()
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        past_key_values: MemoryCache | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> LunaModelOutput | BaseModelOutputWithPast:
        """
        Args:
            input_ids: (b, n) token ids, or instead
            inputs_embeds: (b, n, d) token embeddings, before scale, positions and LayerNorm.
            attention_mask: (b, n), 1 for tokens and 0 for padding on whichever side. Without it, padding is where
                `input_ids` is `pad_token_id`.
            token_type_ids: (b, n) segments, if the model has segment embeddings.
            position_ids: (b, n) rows of the position table; by default the t-th token has row `pad_token_id + t`.
            output_hidden_states, output_attentions, output_packed_hidden_states, output_pack_attentions, return_dict:
                as keywords; see `LunaModelOutput`.

        A decoder takes `past_key_values` and `use_cache` besides, and reads the others as `DecoderModelMixin.decode`
        says.

        Raises:
            ValueError: Wrong shapes, no tokens, more than `max_position_embeddings`, a keyword without a meaning,
                or pack maps from a backend that has none.
        """
        if self.config.is_decoder:
            inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
            return self.decode(*inputs, past_key_values, use_cache, **kwargs)
        self.check_inputs(input_ids, inputs_embeds, attention_mask, {**kwargs, "past_key_values": past_key_values})
        if kwargs.get("output_pack_attentions") and self.config._attn_implementation != "eager":
            raise ValueError(
                "`output_pack_attentions` needs eager attention, but the model uses "
                f'{self.config._attn_implementation}: call `model.set_attn_implementation("eager")` first.'
            )
        keep = self.tokens_to_keep(input_ids, attention_mask)
        hidden_states = self.embeddings(input_ids, inputs_embeds, position_ids, token_type_ids, keep)
        memory, masks = self.begin(hidden_states, keep)
        hidden_states, memory = self.encoder(hidden_states, memory, masks, keep, **kwargs)
        hidden_states, memory = join_streams(hidden_states, self.packed_layer_norm(memory))
        # Not the mask of `begin`: which fields an output has must not depend on the data.
        used = self.used_slots(hidden_states, keep, memory.shape[1]) if self.config.dynamic_projection else None
        return LunaModelOutput(
            last_hidden_state=hidden_states,
            packed_last_hidden_state=memory,
            packed_attention_mask=None if used is None else used.long(),
        )

    def begin(self, hidden_states: Tensor, keep: Tensor | None) -> tuple[Tensor, LunaMasks]:
        """The packed states (b, l, d) that the first layer reads, and the masks of all layers."""
        batch, length = hidden_states.shape[:2]
        num_slots, slots = self.config.projection_length, None
        if self.config.dynamic_projection:
            # Slots beyond the padded length would be masked in every row. A graph keeps and masks them: a minimum would
            # bind it to lengths on one side of it, or be a symbol that inductor cannot compare with other sizes.
            in_graph = is_tracing(hidden_states)
            num_slots = num_slots if in_graph else min(num_slots, length)
            if in_graph or keep is not None:
                slots = drop_if_full(self.used_slots(hidden_states, keep, num_slots))
        memory = self.packed_embeddings(batch, num_slots, slots)
        masks = LunaMasks(
            tokens=make_key_mask(self.config, keep, queries=memory, keys=hidden_states),
            memory=make_key_mask(self.config, slots, queries=hidden_states, keys=memory),
        )
        return memory, masks

    def used_slots(self, hidden_states: Tensor, keep: Tensor | None, num_slots: int) -> Tensor:
        """(b, l) boolean with l = `num_slots`, True for the slots that hold a row's packed sequence."""
        if keep is None:
            keep = hidden_states.new_ones(hidden_states.shape[:2], dtype=torch.bool)
        return valid_slots(keep, num_slots)


class LunaPooling(nn.Module):
    """One vector a row, from the token states or from the packed states (paper, Table 3)."""

    is_causal = False

    def __init__(self, config: LunaConfig) -> None:
        super().__init__()
        self.config = config
        self.kind = config.classifier_pooling
        width = config.hidden_size
        if self.kind in ("cls", "mean"):
            self.tokens = TokenPooling(config)
        elif self.kind == "packed_max":
            self.in_proj = Linear(width, width)
        elif self.kind == "packed_attention":
            self.attention_dropout = config.attention_probs_dropout_prob
            self.query, self.key, self.value = (Linear(width, width) for _ in range(3))
            self.output = Linear(width, width)
            self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps)

    def forward(self, outputs: LunaModelOutput, keep: Tensor | None) -> Tensor:
        """Base model outputs and (b, n) token mask to (b, d)."""
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
        heads = self.config.num_attention_heads
        pooled, _ = attend(self, self.query(first), self.key(packed), self.value(packed), mask, heads)
        return self.LayerNorm(self.output(pooled)).squeeze(1)


class LunaForMaskedLM(MaskedLMMixin, LunaPreTrainedModel):
    """Luna with a masked language modelling head."""

    base_model_class = LunaModel
    output_class = LunaMaskedLMOutput
    _tied_weights_keys = {
        "lm_head.decoder.weight": "luna.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }

    @classmethod
    def from_roberta(
        cls,
        source: Source,
        *,
        max_length: int | None = None,
        slot_tokens: Sequence[int] | Tensor | None = None,
        seed: int = 0,
        **fields: Any,
    ) -> "LunaForMaskedLM":
        """A model that starts from a trained RoBERTa, XLM-R, CamemBERT or BERT; what is new in it is logged.

        See `warm_start`, which takes the same arguments and also returns the report.

        Args:
            source: folder, name on the Hub, or a model in memory.
            max_length: tokens that the model must take, if more than the source does.
            slot_tokens: ids of a text, from which the packed embeddings are made.
            seed: of what is new.
            fields: of the config (`projection_length`, `conv_kernel_size`, ...).

        Raises:
            ValueError: A source that cannot be mapped or read, or a field that is wrong.
        """
        model, made = warm_start(cls, source, max_length=max_length, slot_tokens=slot_tokens, seed=seed, **fields)
        made.warn()
        return model


class LunaForCausalLM(CausalLMMixin, LunaPreTrainedModel, GenerationMixin):
    """Luna with a causal language-modelling head: a decoder that generates with a state of constant size."""

    base_model_class = LunaModel
    _supports_flash_attn = False
    _supports_flex_attn = False
    _tied_weights_keys = {"lm_head.weight": "luna.embeddings.word_embeddings.weight"}


class LunaForSequenceClassification(SequenceClassificationMixin, LunaPreTrainedModel):
    """Luna with a sequence classification or regression head."""

    base_model_class = LunaModel
    pooling_class = LunaPooling
    output_class = LunaSequenceClassifierOutput


class LunaForMultipleChoice(MultipleChoiceMixin, LunaPreTrainedModel):
    """Luna with a head that scores choices, for RACE, CommonsenseQA and the like."""

    base_model_class = LunaModel
    pooling_class = LunaPooling
    output_class = LunaMultipleChoiceOutput


class LunaForTokenClassification(TokenClassificationMixin, LunaPreTrainedModel):
    """Luna with a token classification head."""

    base_model_class = LunaModel
    output_class = LunaTokenClassifierOutput


class LunaForQuestionAnswering(QuestionAnsweringMixin, LunaPreTrainedModel):
    """Luna with a span (extractive question answering) head."""

    base_model_class = LunaModel
    output_class = LunaQuestionAnsweringOutput
