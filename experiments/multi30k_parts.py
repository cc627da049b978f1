"""Train a LeaPformer some of whose attentions are softmax attention, as in its paper's table 6.

    python experiments/multi30k_parts.py RECIPE.yaml --model.model_type leapformer_parts --model.softmax_parts "[cross]"

A recipe and options of `training/train_translation.py`. `softmax_parts` names what keeps softmax attention: encoder,
decoder (to the target) or cross (to the source). The saved models load only where this file has been imported.
"""

import sys

from running import ROOT  # noqa: F401  # finds the packages of training

# isort: split
import train_translation
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from luna_hf import AbcConfig, LeapformerConfig, LeapformerForConditionalGeneration
from luna_hf.families.abc.attention import AbcCausalAttention

PARTS = ("encoder", "decoder", "cross")
# Longer than any source or target: a window that holds all tokens is softmax attention.
WINDOW = 128


class PartsConfig(LeapformerConfig):
    """LeaPformer's, with the parts that keep softmax attention."""

    model_type = "leapformer_parts"

    softmax_parts: list[str] | None = None


class PartsForConditionalGeneration(LeapformerForConditionalGeneration):
    """LeaPformer with softmax attention in `config.softmax_parts`."""

    config_class = PartsConfig

    def __init__(self, config: PartsConfig) -> None:
        super().__init__(config)
        own = {name: getattr(config, name) for name in ("hidden_size", "num_attention_heads", "initializer_range")}
        own |= {"attention_probs_dropout_prob": config.attention_probs_dropout_prob, "attn_implementation": "sdpa"}
        softmax = AbcConfig(memory_control="sliding_window", memory_size=WINDOW, is_decoder=True, **own)
        encoder, decoder = self.base_model.encoder.encoder.layer, self.base_model.decoder.encoder.layer
        places = {
            "encoder": [layer.attention for layer in encoder],
            "decoder": [layer.attention for layer in decoder],
            "cross": [layer.crossattention for layer in decoder],
        }
        for part in config.softmax_parts or ():
            for place in places[part]:
                place.self = AbcCausalAttention(softmax, place.self.layer_idx)
                for module in place.self.modules():
                    self._init_weights(module)


AutoConfig.register(PartsConfig.model_type, PartsConfig)
AutoModelForSeq2SeqLM.register(PartsConfig, PartsForConditionalGeneration)

if __name__ == "__main__":
    sys.exit(train_translation.main(sys.argv[1:]))
