"""Causal LAVO (Zhang et al. 2023, equation 4): the bare decoder and the language model."""

from transformers import GenerationMixin

from .attention_lavo_causal import LavoCausalAttention
from .configuration_lavo import LavoConfig
from .modeling_base import BoundedMemoryPreTrainedModel
from .modeling_decoder import CausalLMMixin, DecoderModelMixin


class LavoCausalModel(DecoderModelMixin, BoundedMemoryPreTrainedModel):
    """The LAVO decoder without a head."""

    config: LavoConfig
    base_model_prefix = "lavo"
    attention_class = LavoCausalAttention


class LavoForCausalLM(CausalLMMixin, BoundedMemoryPreTrainedModel, GenerationMixin):
    """LAVO with a causal language modelling head; generates with a decoding state of constant size."""

    config: LavoConfig
    base_model_prefix = "lavo"
    base_model_class = LavoCausalModel


__all__ = ["LavoCausalModel", "LavoForCausalLM"]
