"""ABC encoder models (Peng et al., "ABC: Attention with Bounded-memory Control", ACL 2022, arXiv 2110.02488).

A RoBERTa whose attention reads a memory of fixed size. The arithmetic is in `memory_control.py` and `attention_abc.py`;
here stand the base model and the task heads. Every parameter but the control's has RoBERTa's name and shape.
"""

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPast,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention_abc import AbcControl, AbcMasks, AbcSelfAttention, has_control
from .attention_abc_causal import AbcCausalSelfAttention
from .attention_base import make_key_mask
from .configuration_abc import AbcConfig
from .functional import token_ranks
from .memory_control import row_lengths
from .modeling_base import (
    EncoderEmbeddings,
    EncoderLayer,
    EncoderModelMixin,
    EncoderPreTrainedModel,
    EncoderStack,
)
from .modeling_decoder import CausalLMMixin, DecoderModelMixin
from .modeling_heads import (
    MaskedLMMixin,
    MultipleChoiceMixin,
    QuestionAnsweringMixin,
    SequenceClassificationMixin,
    TokenClassificationMixin,
)
from .state import MemoryCache


class AbcLayer(EncoderLayer):
    """One layer: bounded-memory attention and feed-forward."""

    attention_class = AbcSelfAttention


class AbcDecoderLayer(AbcLayer):
    """One layer of a decoder: causal bounded-memory attention and feed-forward."""

    attention_class = AbcCausalSelfAttention


class AbcPreTrainedModel(EncoderPreTrainedModel):
    """What all ABC models share."""

    config: AbcConfig
    base_model_prefix = "abc"
    _no_split_modules = ["EncoderEmbeddings", "AbcControl", "AbcLayer", "AbcDecoderLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {
        "hidden_states": AbcLayer,
        "attentions": OutputRecorder(AbcSelfAttention, index=2),
    }
    auto_map = {
        "AutoConfig": "configuration_abc.AbcConfig",
        "AutoModel": "modeling_abc.AbcModel",
        "AutoModelForMaskedLM": "modeling_abc.AbcForMaskedLM",
        "AutoModelForCausalLM": "modeling_abc.AbcForCausalLM",
        "AutoModelForSequenceClassification": "modeling_abc.AbcForSequenceClassification",
        "AutoModelForMultipleChoice": "modeling_abc.AbcForMultipleChoice",
        "AutoModelForTokenClassification": "modeling_abc.AbcForTokenClassification",
        "AutoModelForQuestionAnswering": "modeling_abc.AbcForQuestionAnswering",
    }

    @torch.no_grad()
    def _init_weights(self, module: torch.nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, AbcControl):
            # Linformer's slots are sums over all positions: with this deviation they are as large as a key.
            deviation = self.config.initializer_range
            if self.config.memory_control == "linformer":
                deviation = self.config.max_position_embeddings**-0.5
            init.normal_(module.weight, mean=0.0, std=deviation)


class AbcModel(EncoderModelMixin, DecoderModelMixin, AbcPreTrainedModel):
    """ABC without a head: the encoder, or the decoder (`config.is_decoder`)."""

    def __init__(self, config: AbcConfig) -> None:
        super().__init__(config)
        self.embeddings = EncoderEmbeddings(config)
        self.control = AbcControl(config) if has_control(config) and config.share_control else None
        self.encoder = EncoderStack(config, AbcDecoderLayer if config.is_decoder else AbcLayer)
        self.number_layers()
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
    ) -> BaseModelOutput | BaseModelOutputWithPast:
        """
        Args:
            input_ids: (b, n) token ids, or instead
            inputs_embeds: (b, n, d) token embeddings, before scale, positions and LayerNorm.
            attention_mask: (b, n), 1 for tokens and 0 for padding on whichever side. Without it, padding is where
                `input_ids` is `pad_token_id`.
            token_type_ids: (b, n) segments, if the model has segment embeddings.
            position_ids: (b, n) rows of the position table; by default the t-th token has row `pad_token_id + t`. The
                memory control goes by the order of the tokens, whatever these say.
            output_hidden_states, output_attentions, return_dict: as keywords. The attentions (eager only) are what each
                token reads: (b, h, n, m) over the slots, over the places of its window, or (b, h, n, n) of full
                attention.

        A decoder takes `past_key_values` and `use_cache` besides, and reads the others as `DecoderModelMixin.decode`
        says.

        Raises:
            ValueError: Wrong shapes, no tokens, more than `max_position_embeddings`, a keyword without a meaning.
        """
        if self.config.is_decoder:
            inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
            memory = None if self.control is None else self.control()
            return self.decode(*inputs, past_key_values, use_cache, memory=memory, **kwargs)
        self.check_inputs(input_ids, inputs_embeds, attention_mask, {**kwargs, "past_key_values": past_key_values})
        keep = self.tokens_to_keep(input_ids, attention_mask)
        hidden_states = self.embeddings(input_ids, inputs_embeds, position_ids, token_type_ids, keep)
        memory, masks = self.begin(hidden_states, keep)
        hidden_states, _ = self.encoder(hidden_states, memory, masks, keep, **kwargs)
        return BaseModelOutput(last_hidden_state=hidden_states)

    def begin(self, hidden_states: Tensor, keep: Tensor | None) -> tuple[Tensor | None, AbcMasks]:
        """The control that the layers share, if they do, and the masks of all layers."""
        full = self.config.memory_control == "full"
        length, device = hidden_states.shape[1], hidden_states.device
        masks = AbcMasks(
            keep=keep,
            tokens=make_key_mask(self.config, keep, queries=hidden_states, keys=hidden_states) if full else None,
            ranks=token_ranks(keep, length, device),
            lengths=row_lengths(keep, length, device),
        )
        return None if self.control is None else self.control(), masks


class AbcForMaskedLM(MaskedLMMixin, AbcPreTrainedModel):
    """ABC with a masked language modelling head."""

    base_model_class = AbcModel
    output_class = MaskedLMOutput
    _tied_weights_keys = {
        "lm_head.decoder.weight": "abc.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }


class AbcForCausalLM(CausalLMMixin, AbcPreTrainedModel, GenerationMixin):
    """ABC with a causal language-modelling head: a decoder that generates with a state of constant size."""

    base_model_class = AbcModel
    _supports_flash_attn = False
    _supports_flex_attn = False
    _tied_weights_keys = {"lm_head.weight": "abc.embeddings.word_embeddings.weight"}


class AbcForSequenceClassification(SequenceClassificationMixin, AbcPreTrainedModel):
    """ABC with a sequence classification or regression head."""

    base_model_class = AbcModel
    output_class = SequenceClassifierOutput


class AbcForMultipleChoice(MultipleChoiceMixin, AbcPreTrainedModel):
    """ABC with a head that scores choices, for RACE, CommonsenseQA and the like."""

    base_model_class = AbcModel
    output_class = MultipleChoiceModelOutput


class AbcForTokenClassification(TokenClassificationMixin, AbcPreTrainedModel):
    """ABC with a token classification head."""

    base_model_class = AbcModel
    output_class = TokenClassifierOutput


class AbcForQuestionAnswering(QuestionAnsweringMixin, AbcPreTrainedModel):
    """ABC with a span (extractive question answering) head."""

    base_model_class = AbcModel
    output_class = QuestionAnsweringModelOutput
