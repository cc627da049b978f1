"""The encoders of the guarantees table: this package's and transformers' own, tiny and randomly initialised.

Windows, blocks, chunks and landmarks are scaled down with the lengths of the tests, so that each model runs its
efficient attention, not the full attention that some fall back to on short inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from measuring import slots_of
from transformers import PreTrainedModel

from luna_hf import FAMILIES

VOCAB_SIZE, PAD, FIRST_TOKEN = 64, 1, 3

_TOKENS = {"vocab_size": VOCAB_SIZE, "pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": 2}
_SIZES = {**_TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_T5_SIZES = {**_TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "local_radius": 15}


Fields = Callable[[int], dict[str, Any]]


@dataclass(frozen=True)
class Subject:
    """One row of the comparison."""

    name: str  # of transformers' class, up to a comma
    cost: str  # growth of time with length according to paper and documentation
    fields: Fields  # of the config, from the longest input
    # Position id of the first token, where left padding needs explicit `position_ids`; None if it needs none.
    first_position: int | None = None
    model_class: type[PreTrainedModel] | None = None

    def build(self, length: int) -> PreTrainedModel:
        """A model for inputs of up to this length."""
        model_class = self.model_class or getattr(hf, self.name.partition(",")[0])
        return model_class(model_class.config_class(**self.fields(length)))


def randomised(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """The model in eval mode, with weights large enough to show leaks."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model.eval()


def _sizes(extra_positions: int = 0, **fields: Any) -> Fields:
    """BERT's fields and a model's own."""
    return lambda length: {**_SIZES, **fields, "max_position_embeddings": length + extra_positions}


def _nystrom(length: int) -> dict[str, Any]:
    return {**_sizes()(length), "segment_means_seq_len": length, "num_landmarks": 16}


def _fnet(length: int) -> dict[str, Any]:
    return {name: value for name, value in _sizes()(length).items() if name != "num_attention_heads"}


def _funnel(length: int) -> dict[str, Any]:
    sizes = {"d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64, "block_sizes": [1, 1], "num_decoder_layers": 1}
    return {"vocab_size": VOCAB_SIZE, "pad_token_id": PAD, **sizes}


def _long_t5(kind: str) -> Fields:
    return lambda _: {**_T5_SIZES, "encoder_attention_type": kind, "global_block_size": 16}


def _reformer(**fields: Any) -> Fields:
    return lambda length: {
        **{name: _SIZES[name] for name in ("vocab_size", "hidden_size", "num_attention_heads", "pad_token_id")},
        "max_position_embeddings": length,
        "attention_head_size": 8,
        "feed_forward_size": 64,
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 16,
        "lsh_attn_chunk_length": 16,
        "axial_pos_shape": (16, length // 16),
        "axial_pos_embds_dim": (8, 24),
        **fields,
    }


def _own(name: str) -> Subject:
    model = FAMILIES[name].base_model
    return Subject(f"{model.__name__} (this package)", "n", _sizes(**slots_of(name, 16)), model_class=model)


SUBJECTS: tuple[Subject, ...] = (
    *map(_own, FAMILIES),
    Subject("RobertaModel", "n^2", _sizes(2)),
    Subject("ModernBertModel", "n^2", _sizes(cls_token_id=0, sep_token_id=2)),
    Subject("LongformerModel", "n", _sizes(2, attention_window=32)),
    Subject("BigBirdModel", "n", _sizes(block_size=16, num_random_blocks=2, sep_token_id=2), first_position=0),
    Subject("LongT5EncoderModel, local", "n", _long_t5("local")),
    Subject("LongT5EncoderModel, transient-global", "n (w + n/k)", _long_t5("transient-global")),
    Subject("NystromformerModel, defaults", "n", _sizes(), first_position=2),
    Subject("NystromformerModel, approximation", "n", _nystrom, first_position=2),
    Subject("FNetModel", "n log n", _fnet, first_position=0),
    Subject("FunnelModel", "n^2", _funnel),
    Subject("ReformerModel, defaults", "n log n", _reformer(), first_position=0),
    Subject("ReformerModel, hash_seed=0", "n log n", _reformer(hash_seed=0), first_position=0),
    Subject("YosoModel", "n", _sizes(), first_position=2),
    Subject("MraModel", "n", _sizes(), first_position=2),
)
# Footnotes, by the name of a subject.
NOTES = {
    "ModernBertModel": "every third layer attends globally, the others in windows",
    "LongformerModel": "no global attention (the default); pads internally to its window; the attention is linear, but "
    "each forward builds an n x n mask, which dominates at this small width",
    "BigBirdModel": "attention_type block_sparse (the default); pads internally to its block, and uses full attention "
    "for short inputs; the attention is linear, but each layer fills n x n zeros, which dominates at this small width",
    "LongT5EncoderModel, transient-global": "every token attends to its window w and to one state per block of k = 16 "
    "tokens",
    "NystromformerModel, defaults": "segment_means_seq_len = num_landmarks (the default) computes full attention; the "
    "paper's is linear",
    "NystromformerModel, approximation": "segment_means_seq_len = length of the inputs, 16 landmarks; raises on any "
    "padded batch",
    "FNetModel": "takes no attention_mask",
    "FunnelModel": "halves the length between blocks and upsamples at the end",
    "ReformerModel, defaults": "draws new hashes in every forward; pads internally to its chunks",
    "ReformerModel, hash_seed=0": "the documentation reserves a fixed hash_seed for tests",
    "YosoModel": "use_expectation=True (the default): the expectation over hashes, which is full attention; the "
    "paper's linear form needs a CUDA kernel",
    "MraModel": "attention needs a CUDA kernel and returns zeros without it, so a CPU can test nothing",
}
