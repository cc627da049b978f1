"""Starting an encoder-decoder from a trained encoder: its config, its tokenizer and its weights."""

import dataclasses
from typing import Any

import torch
from common.models import SEQ2SEQ, load_config, load_encoder, make_config, model_fields
from data.tokenizer import borders
from torch import Tensor
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from luna_hf.configuration import BoundedMemoryConfig
from luna_hf.layers.embeddings import repeated_positions
from luna_hf.scripting import UserError, portable

# Fields that may differ from the encoder's: they do not change what its weights compute.
_FREE = {
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout"),
    *("initializer_range", "conv_initializer_range", "max_position_embeddings", "pack_activation"),
    *("sparse_prediction", "unpad_inputs", "chunk_size_feed_forward", "attn_implementation"),
}
# Fields that follow from the command and the tokenizer, and the decoder's own.
_NOT_TAKEN = {
    *("vocab_size", "is_decoder", "is_encoder_decoder", "source_is_causal", "decoder_vocab_size", "decoder_layers"),
    *("share_encoder_decoder_embeddings", "use_cache"),
    *("decoder_start_token_id", "pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id"),
}


def differences(config: PreTrainedConfig, other: PreTrainedConfig) -> list[str]:
    """Fields in which two configs differ, so that the same weights compute something else; or just the type."""
    if config.model_type != other.model_type:
        return ["model_type"]
    own, values = config.to_dict(), other.to_dict()
    names = model_fields(config.model_type, SEQ2SEQ) & own.keys() - PreTrainedConfig().to_dict().keys()
    names -= (_FREE | _NOT_TAKEN | {"init_std"}) - {"pack_activation", "decoder_layers"}
    found = (name for name in names if "drop" not in name and not name.endswith("_token_id"))
    wrong = {name for name in found if own[name] != values.get(name)}
    shares = "share_encoder_decoder_embeddings"
    if own.get(shares) and values.get(shares) is False:  # one embedding cannot hold two; the reverse is exact
        wrong.add(shares)
    return sorted(wrong)


def encoder_config(source: str) -> BoundedMemoryConfig:
    """The config of an encoder of this library.

    Raises:
        UserError: No such folder or name, or another model.
    """
    config = load_config(source)
    if not isinstance(config, BoundedMemoryConfig):
        raise UserError(
            f"`initial_encoder` {source} is a {config.model_type} model: convert it first (python -m luna_hf convert)."
        )
    return config


def complete_section(section: dict[str, Any], encoder: BoundedMemoryConfig, source: str) -> dict[str, Any]:
    """A recipe's model section with the fields that it leaves out, from the encoder at `source`.

    Raises:
        UserError: The section contradicts the encoder.
    """
    own = {field.name: getattr(encoder, field.name) for field in dataclasses.fields(encoder)}
    taken = {"model_type": encoder.model_type}
    taken |= {name: own[name] for name in own.keys() & model_fields(encoder.model_type, SEQ2SEQ) - _NOT_TAKEN}
    # Encoder-decoders scale their embeddings by default.
    taken["scale_embedding"] = encoder.scales_embedding()
    for name, value in section.items():
        if name in taken and name not in _FREE and value not in (taken[name], own.get(name)):
            raise UserError(
                f"`model.{name}` is {value!r}, but {taken[name]!r} in the encoder {source}: remove it from the model "
                "section."
            )
    free = {name: value for name, value in section.items() if name in _FREE}
    # An encoder-decoder has a row for every position, see `encoder_weights`.
    return {**section, **taken, **free, "position_period": None}


def seq2seq_config(
    section: dict[str, Any], encoder: BoundedMemoryConfig, tokenizer: PreTrainedTokenizerBase, source: str
) -> PreTrainedConfig:
    """The config of the new model, from a section that is complete.

    Raises:
        UserError: An encoder-decoder cannot have a field's value, or there is no such field.
    """
    try:
        return make_config(section, tokenizer, encoder.vocab_size, SEQ2SEQ)
    except UserError as error:
        raise UserError(f"No encoder-decoder can start from {source} with this section `model`: {error}") from error


def with_ends(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """An encoder's tokenizer, in place, with the names that encoder-decoders use for the ends of a text.

    Texts stay as the encoder knows them, for example from `[CLS]` to `[SEP]`, which become `bos_token` and `eos_token`.

    Raises:
        UserError: The tokenizer has no such tokens, or does not put its last one after a text.
    """
    _, last = borders(tokenizer)
    for name, other in (("bos_token", "cls_token"), ("eos_token", "sep_token")):
        if getattr(tokenizer, name) is None:
            setattr(tokenizer, name, getattr(tokenizer, other))
    if tokenizer("")["input_ids"][-1:] != [last]:
        raise UserError(f"A {type(tokenizer).__name__} ends no text with its eos token: name another `tokenizer`.")
    return tokenizer


def encoder_weights(source: str, section: dict[str, Any]) -> dict[str, Tensor]:
    """The weights of an encoder, with a row for each of the section's positions.

    Raises:
        UserError: They cannot be loaded, some are missing or not finite, or there cannot be so many positions.
    """
    model, _ = load_encoder(AutoModel, source, max_position_embeddings=section["max_position_embeddings"])
    weights, config, name = model.state_dict(), model.config, "embeddings.position_embeddings.weight"
    if config.position_period is not None:
        first = config.first_position
        rows = torch.arange(first + config.max_position_embeddings)
        weights[name] = weights[name][repeated_positions(rows, first, config.position_period)]
    return weights


def new_parts(model: PreTrainedModel, source: str) -> str:
    """A note on what an encoder-decoder has beside the encoder that it starts from."""
    encoder = f"{model.base_model_prefix}.encoder."
    names = [name for name, _ in model.named_parameters() if not name.startswith(encoder)]
    modules = {
        f"{name.partition('.layer.')[0]}.layer" if ".layer." in name else name.rpartition(".")[0] for name in names
    }
    return (
        f"The encoder and its embeddings are those of `{portable(source)}`. New, and trained from the start: "
        f"{', '.join(sorted(modules))}."
    )
