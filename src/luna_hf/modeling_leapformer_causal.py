"""Causal LeaPformer (Agostinelli et al. 2024): the bare decoder and the language model."""

from transformers import GenerationMixin

from .attention_leapformer_causal import LeapformerCausalAttention
from .configuration_leapformer import LeapformerConfig
from .modeling_base import BoundedMemoryPreTrainedModel
from .modeling_decoder import CausalLMMixin, DecoderModelMixin
from .modeling_layers import TransformerLayer

# No attentions: the state does not hold the earlier tokens.
_RECORDED = {"hidden_states": TransformerLayer}


class LeapformerCausalModel(DecoderModelMixin, BoundedMemoryPreTrainedModel):
    """The LeaPformer decoder without a head."""

    config: LeapformerConfig
    base_model_prefix = "leapformer"
    _can_record_outputs = _RECORDED
    attention_class = LeapformerCausalAttention


class LeapformerForCausalLM(CausalLMMixin, BoundedMemoryPreTrainedModel, GenerationMixin):
    """LeaPformer with a causal language modelling head; generates with a decoding state of constant size."""

    config: LeapformerConfig
    base_model_prefix = "leapformer"
    _can_record_outputs = _RECORDED
    base_model_class = LeapformerCausalModel


__all__ = ["LeapformerCausalModel", "LeapformerForCausalLM"]
