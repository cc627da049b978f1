"""The causal toy: the bare decoder and the language model."""

from transformers import GenerationMixin

from .attention_toy_causal import ToyCausalAttention
from .configuration_toy import ToyConfig
from .modeling_base import BoundedMemoryPreTrainedModel
from .modeling_decoder import CausalLMMixin, DecoderModelMixin


class ToyCausalModel(DecoderModelMixin, BoundedMemoryPreTrainedModel):
    """The toy decoder without a head."""

    config: ToyConfig
    base_model_prefix = "toy"
    attention_class = ToyCausalAttention


class ToyForCausalLM(CausalLMMixin, BoundedMemoryPreTrainedModel, GenerationMixin):
    """The toy decoder with a causal language modelling head."""

    config: ToyConfig
    base_model_prefix = "toy"
    base_model_class = ToyCausalModel


__all__ = ["ToyCausalModel", "ToyForCausalLM"]
