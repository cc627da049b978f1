"""The authors' models and ours: configuration, heads and arguments, in both directions.

What names and shapes of the tensors show is taken from them, the rest from the arguments.
"""

import re
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from luna_hf import (
    LunaConfig,
    LunaForConditionalGeneration,
    LunaForMaskedLM,
    LunaForMultipleChoice,
    LunaForSequenceClassification,
    LunaModel,
)
from luna_hf.scripting import UserError

from .arguments import TRANSLATION, to_arguments, to_fields
from .checkpoint import Original
from .names import HEADS, LM_HEAD

BOS, PAD, EOS, UNK = 0, 1, 2, 3  # in every fairseq dictionary; positions count from the row after padding's
EPSILON = 1e-5  # of every LayerNorm of the authors
SPECIALS, MASK = ["<s>", "<pad>", "</s>", "<unk>"], "<mask>"
# The name of a classification head decides what it reads; any other name means `cls`.
POOLINGS = {"pooling_classification_head": "packed_max", "attention_classification_head": "packed_attention"}
DEFAULT_HEAD = "sentence_classification_head"
# Fields of our config that have the same value in every masked language model of the authors.
FIXED = {
    "is_encoder_decoder": False,
    "position_embedding_type": "learned",
    "norm_first": False,
    "embedding_layer_norm": True,
    "layer_norm_eps": EPSILON,
    "type_vocab_size": 0,
    "tokens_per_slot": 1,
    "local_window": 0,
    "full_attention_layers": None,
    "conv_kernel_size": 0,
    "bos_token_id": BOS,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
}
# What a converted model is, by kind.
MODELS: dict[str, type[PreTrainedModel]] = {
    "masked_lm": LunaForMaskedLM,
    "encoder": LunaModel,
    "classification": LunaForSequenceClassification,
    "regression": LunaForSequenceClassification,
    "ranking": LunaForMultipleChoice,
    "translation": LunaForConditionalGeneration,
}
# What those without a classification head have on their encoder, see `Head`.
PARTS = {"masked_lm": "lm_head", "encoder": None, "translation": "translation"}
HEAD_TYPES = ("classification", "regression", "ranking")
# The number of answers to a question, which fairseq's ranking task needs and the weights do not show: RACE's.
CHOICES = 4
# Arguments that a task needs and the model does not decide, with the authors' values.
_EVERY_TASK = {"data": ".", "dataset_impl": None, "seed": 1, "shorten_method": "none", "shorten_data_split_list": ""}
_SENTENCES = {"init_token": BOS, "separator_token": EOS, "no_shuffle": False, "load_checkpoint_heads": True}
_TASKS = {
    "masked_lm": {
        **{"sample_break_mode": "complete", "mask_prob": 0.15, "leave_unmasked_prob": 0.1, "random_token_prob": 0.1},
        **{"freq_weighted_replacement": False, "mask_whole_words": False},
    },
    "sentence_prediction": {**_SENTENCES, "add_prev_output_tokens": False},
    "sentence_ranking": {**_SENTENCES, "num_classes": CHOICES, "max_option_length": None},
}
_EVERY_MODEL = {
    **{"encoder_layerdrop": 0, "encoder_layers_to_keep": None},
    **{"quant_noise_pq": 0, "quant_noise_pq_block_size": 8, "quant_noise_scalar": 0},
}


@dataclass(frozen=True)
class Head:
    """What a converted model has on its encoder.

    Args:
        part: `"lm_head"`, the name of a classification head, `"translation"`, or `None` for an encoder alone.
        kind: a key of `MODELS`.
        labels: names of the classes in the order of the outputs; empty if unknown.
    """

    part: str | None
    kind: str
    labels: tuple[str, ...] = ()


# ---- theirs to ours ----


def matrix(original: Original, name: str) -> Tensor:
    """A stored tensor.

    Raises:
        UserError: There is no such matrix.
    """
    tensor = original.weights.get(name)
    if tensor is None or tensor.ndim != 2:
        raise UserError(f"{original.name} is damaged or no Luna of the authors: `{name}` is not a matrix.")
    return tensor


def make_config(original: Original, head: Head) -> LunaConfig:
    """Our configuration of a checkpoint.

    Raises:
        UserError: It is not one of the authors' models, or its parts do not fit together.
    """
    options, prefix = original.options, original.encoder
    words = matrix(original, f"{prefix}embed_tokens.weight")
    fields = {
        **to_fields(options, original.kind),
        "vocab_size": len(words),
        "hidden_size": words.shape[1],
        "num_hidden_layers": _layers(original, prefix),
        "intermediate_size": len(matrix(original, f"{prefix}layers.0.fc1.weight")),
        "projection_length": len(matrix(original, f"{prefix}projected_embeddings")),
        "max_position_embeddings": _positions(original),
        "tie_kv": f"{prefix}layers.0.self_attn.c_proj.weight" in original.weights,
        **(_of_translation(original) if original.kind == TRANSLATION else _of_head(original, head)),
    }
    try:
        config = LunaConfig(**fields)
    except ValueError as error:
        assumed = f" Not in the file: {', '.join(options.assumed)}." if options.assumed else ""
        raise UserError(f"{error} To correct an argument of the file: --override NAME=VALUE.{assumed}") from error
    if head.kind in HEAD_TYPES and head.part not in (DEFAULT_HEAD, *POOLINGS):
        config.fairseq_head = head.part  # for the way back
    return config


def _layers(original: Original, prefix: str) -> int:
    """Number of layers of an encoder or decoder."""
    return next(i for i in count() if f"{prefix}layers.{i}.fc1.weight" not in original.weights)


def _positions(original: Original) -> int:
    """Number of positions: the rows of the table after those up to padding's."""
    options = original.options
    if not options.encoder_learned_pos:
        return options.max_source_positions
    rows = len(matrix(original, f"{original.encoder}embed_positions.weight")) - PAD - 1
    given = getattr(options, "max_positions", 0)
    if given and rows != given:  # else a table without the rows of the padding id would lose two positions
        raise UserError(
            f"{original.name} has {rows + PAD + 1:,} rows in `embed_positions.weight`, but `max_positions` is "
            f"{given:,}, which needs {given + PAD + 1:,}: fairseq puts {PAD + 1} before the first position. If the "
            f"rows are right: --override max_positions={rows}."
        )
    return rows


def _of_head(original: Original, head: Head) -> dict[str, Any]:
    """Fields of the output layer, and of a classification head."""
    output, words = (
        original.weights.get(name) for name in (f"{LM_HEAD}weight", f"{original.encoder}embed_tokens.weight")
    )
    is_tied = output is None or (torch.equal(output, words) and not original.options.untie_weights_luna)
    fields: dict[str, Any] = {"tie_word_embeddings": is_tied}
    if head.kind not in HEAD_TYPES:
        return fields
    fields["classifier_pooling"] = POOLINGS.get(head.part, "cls")
    fields["classifier_hidden_size"] = len(matrix(original, f"{HEADS}{head.part}.dense.weight"))
    if head.kind == "regression":
        return {**fields, "num_labels": 1, "problem_type": "regression"}
    if head.kind == "ranking":
        return fields
    outputs = len(matrix(original, f"{HEADS}{head.part}.out_proj.weight"))
    id2label = dict(enumerate(head.labels or [f"LABEL_{index}" for index in range(outputs)]))
    label2id = {name: index for index, name in id2label.items()}
    return {**fields, "id2label": id2label, "label2id": label2id, "problem_type": "single_label_classification"}


def _of_translation(original: Original) -> dict[str, Any]:
    """Fields of an encoder-decoder."""
    weights, options = original.weights, original.options
    if options.no_token_positional_embeddings:
        raise UserError("`no_token_positional_embeddings` is true, but our models need positions.")
    source, target = (matrix(original, f"{part}.embed_tokens.weight") for part in ("encoder", "decoder"))
    output = weights.get("decoder.output_projection.weight")
    return {
        "is_encoder_decoder": True,
        "decoder_vocab_size": len(target),
        "share_encoder_decoder_embeddings": torch.equal(source, target),
        "tie_word_embeddings": output is None or torch.equal(output, target),
        "decoder_layers": _layers(original, "decoder."),
        "num_projected_attention_heads": options.encoder_projected_attention_heads or None,
        "embedding_layer_norm": "encoder.layernorm_embedding.weight" in weights,
        "layer_norm_eps": EPSILON,
        "bos_token_id": BOS,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "decoder_start_token_id": EOS,
    }


# ---- ours to theirs ----


def check_config(config: PreTrainedConfig) -> None:
    """Refuse what the authors' masked language model cannot express, except for values of arguments.

    Raises:
        UserError: A field of the config has an unsupported value.
    """
    fixed: dict[str, Any] = {**FIXED, "quantization_config": None}
    if config.num_projected_attention_heads is not None:
        fixed["num_projected_attention_heads"] = config.num_attention_heads
    if config.scale_embedding is not None:
        fixed["scale_embedding"] = False
    for field, value in fixed.items():
        if (ours := getattr(config, field, None)) != value:
            raise UserError(f"`{field}` is {ours!r}, but always {value!r} in the authors' model.")
    to_arguments(config)


def head_of(model: PreTrainedModel, given: str | None = None) -> Head:
    """What a model has on its encoder.

    A classification head has by default the name before an earlier conversion, or the authors' name for the pooling.

    Raises:
        UserError: `given` does not suit the model's head, or the authors have no such model or head.
    """
    kind = next((kind for kind, row in MODELS.items() if row is type(model)), None)
    if kind is None:
        raise UserError(f"The authors' code has no counterpart of a {type(model).__name__}.")
    if kind not in HEAD_TYPES:
        if given is not None:
            raise UserError(f"--head {given} does not apply to a {type(model).__name__}. Leave it out.")
        return Head(PARTS[kind], kind)
    pooling = model.config.classifier_pooling
    names = {"cls": getattr(model.config, "fairseq_head", DEFAULT_HEAD)} | {own: name for name, own in POOLINGS.items()}
    if pooling not in names:
        raise UserError(f"`classifier_pooling` is {pooling!r}, but the authors' heads have {', '.join(names)}.")
    name = names[pooling] if given is None else given
    if not re.fullmatch(r"[^.\s]+", name) or POOLINGS.get(name, "cls") != pooling:
        raise UserError(
            f"--head {name!r} must have no dots or spaces, and would read {POOLINGS.get(name, 'cls')!r} in the "
            f"authors' code, but `classifier_pooling` is {pooling!r}. Choose {names[pooling]}."
        )
    problem, outputs = model.config.problem_type, model.config.num_labels
    if problem == "multi_label_classification" or (problem == "regression" and outputs > 1):
        raise UserError(
            f"`problem_type` is {problem!r} and `num_labels` is {outputs}, but the authors' heads choose one class or "
            "give one number."
        )
    is_regression = kind == "classification" and outputs == 1
    return Head(name, "regression" if is_regression else kind, label_names(model) if outputs > 1 else ())


def label_names(model: PreTrainedModel) -> tuple[str, ...]:
    """Names of the classes of a sequence classifier in the order of the outputs; empty if they have no names."""
    names = tuple(str(name) for _, name in sorted(model.config.id2label.items()))
    is_named = names != tuple(f"LABEL_{index}" for index in range(len(names)))
    return names if is_named and isinstance(model, LunaForSequenceClassification) else ()


def make_arguments(model: PreTrainedModel, head: Head) -> dict[str, Any]:
    """The authors' arguments for a model.

    Raises:
        UserError: They lack a value.
    """
    config, arguments = model.config, to_arguments(model.config)
    if arguments["pooler_dropout"] is None:
        arguments["pooler_dropout"] = config.hidden_dropout_prob
    arguments |= {name: float(value) for name, value in arguments.items() if name.endswith("dropout")}
    arguments["untie_weights_luna"] &= head.kind == "masked_lm"
    task, own = "masked_lm", {}
    if head.kind == "ranking":
        task, own = "sentence_ranking", {"ranking_head_name": head.part}
    elif head.kind in HEAD_TYPES:
        own = {"num_classes": config.num_labels, "regression_target": head.kind == "regression"}
        task, own = "sentence_prediction", {**own, "classification_head_name": head.part}
    arch = f"luna_base_{'tied' if config.tie_kv else 'untied'}_512"
    named = {"arch": arch, "task": task, "criterion": task}
    return {**named, **_EVERY_TASK, **_TASKS[task], **own, **arguments, **_EVERY_MODEL}
