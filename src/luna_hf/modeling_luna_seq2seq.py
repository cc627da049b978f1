"""The Luna encoder-decoder (Ma et al. 2021, section 3.4).

The packed states of the source are the queries with which the decoder's causal attention packs the target, and with
which its cross-attention packs the source again; this updates them for the next layer. They do not depend on the
target.
"""

from collections.abc import Sequence

from torch import Tensor
from transformers import GenerationMixin
from transformers.modeling_outputs import ModelOutput

from .attention_luna import LunaAttention
from .attention_luna_causal import LunaCausalAttention
from .configuration_luna import LunaConfig
from .context import drop_if_full
from .functional import join_gradients
from .modeling_base import BoundedMemoryPreTrainedModel
from .modeling_luna import LunaModel, LunaModelOutput
from .modeling_seq2seq import (
    ConditionalGenerationMixin,
    CrossDecoderMixin,
    Seq2SeqModelMixin,
    Seq2SeqPreTrainedModel,
)


class LunaCrossDecoder(CrossDecoderMixin, BoundedMemoryPreTrainedModel):
    """The decoder of the Luna encoder-decoder."""

    config: LunaConfig
    base_model_prefix = "luna"
    attention_class = LunaCausalAttention
    cross_attention_class = LunaAttention

    def name_outputs(self, outputs: Sequence[Tensor]) -> ModelOutput:
        """Like `CrossDecoderMixin.name_outputs`, with the packed states and the mask of their slots."""
        return LunaModelOutput(*outputs[: 3 if self.config.dynamic_projection else 2])

    def source_carried(self, outputs: ModelOutput) -> tuple[Tensor, Tensor | None]:
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

    def join_carried(self, hidden_states: Tensor, carried: Tensor) -> Tensor:
        """Link the states to the last packed states, whose LayerNorm would have no gradient otherwise."""
        return join_gradients(hidden_states, carried)[0]


class LunaSeq2SeqModel(Seq2SeqModelMixin, Seq2SeqPreTrainedModel):
    """The Luna encoder-decoder without a head."""

    config: LunaConfig
    base_model_prefix = "luna"
    encoder_class = LunaModel
    decoder_class = LunaCrossDecoder


class LunaForConditionalGeneration(ConditionalGenerationMixin, Seq2SeqPreTrainedModel, GenerationMixin):
    """The Luna encoder-decoder with a language modelling head; generates with a state of constant size."""

    config: LunaConfig
    base_model_prefix = "luna"
    base_model_class = LunaSeq2SeqModel


__all__ = ["LunaForConditionalGeneration", "LunaSeq2SeqModel"]
