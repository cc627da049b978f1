"""The authors' models and ours: configuration, heads and arguments, in both directions.

What names and shapes of the tensors show is taken from them, the rest from the arguments.
"""

import re
from dataclasses import dataclass
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
from .reference import EPSILON, PADDING_ID, Stored

BOS, PAD, EOS, UNK = 0, PADDING_ID, 2, 3  # in every fairseq dictionary
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
HEAD_TYPES = ("classification", "regression", "ranking")
# The number of answers to a question, which fairseq's ranking task needs and the weights do not show: RACE's.
CHOICES = 4
# Arguments that a task needs and the model does not decide, with the authors' values.
_EVERY_TASK = {"data": ".", "dataset_impl": None, "seed": 1, "shorten_method": "none", "shorten_data_split_list": ""}
_MASKED_LM = {
    **{"sample_break_mode": "complete", "mask_prob": 0.15, "leave_unmasked_prob": 0.1, "random_token_prob": 0.1},
    **{"freq_weighted_replacement": False, "mask_whole_words": False},
}
_SENTENCES = {"init_token": BOS, "separator_token": EOS, "no_shuffle": False, "load_checkpoint_heads": True}
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
        "num_hidden_layers": Stored(original, prefix).layers(),
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
    weights, output = original.weights, original.weights.get(f"{LM_HEAD}weight")
    words = weights[f"{original.encoder}embed_tokens.weight"]
    is_tied = output is None or (torch.equal(output, words) and not original.options.untie_weights_luna)
    fields: dict[str, Any] = {"tie_word_embeddings": is_tied}
    if head.kind not in HEAD_TYPES:
        return fields
    fields["classifier_pooling"] = POOLINGS.get(head.part, "cls")
    fields["classifier_hidden_size"] = len(matrix(original, f"{HEADS}{head.part}.dense.weight"))
    if head.kind == "regression":
        fields |= {"num_labels": 1, "problem_type": "regression"}
    elif head.kind == "classification":
        labels = head.labels or [
            f"LABEL_{index}" for index in range(len(matrix(original, f"{HEADS}{head.part}.out_proj.weight")))
        ]
        fields |= {"id2label": dict(enumerate(labels)), "label2id": {name: i for i, name in enumerate(labels)}}
        fields["problem_type"] = "single_label_classification"
    return fields


def _of_translation(original: Original) -> dict[str, Any]:
    """Fields of an encoder-decoder."""
    weights, options = original.weights, original.options
    if options.no_token_positional_embeddings:
        raise UserError("`no_token_positional_embeddings` is true, but our models need positions.")
    tables = [weights.get(f"{part}.embed_positions.weight") for part in ("encoder", "decoder")]
    if options.encoder_learned_pos and len({table is None or len(table) for table in tables}) > 1:
        raise UserError("Source and target have different numbers of learned positions, which our models cannot have.")
    source, target = (matrix(original, f"{part}.embed_tokens.weight") for part in ("encoder", "decoder"))
    output = weights.get("decoder.output_projection.weight")
    return {
        "is_encoder_decoder": True,
        "decoder_vocab_size": len(target),
        "share_encoder_decoder_embeddings": torch.equal(source, target),
        "tie_word_embeddings": output is None or torch.equal(output, target),
        "decoder_layers": Stored(original, "decoder.").layers(),
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


def head_name(model: PreTrainedModel, given: str | None = None) -> str | None:
    """What the authors call the part that a model has beside its encoder, see `names.to_ours`.

    A classification head has by default the name before an earlier conversion, or the authors' name for the pooling.

    Raises:
        UserError: `given` does not suit the model's head, or no head of theirs reads what it reads.
    """
    kind = type(model)
    if kind not in (LunaForSequenceClassification, LunaForMultipleChoice):
        part = {LunaForMaskedLM: "lm_head", LunaForConditionalGeneration: "translation"}.get(kind)
        if given not in (None, part):
            raise UserError(f"--head {given} does not apply to a {kind.__name__}. Leave it out.")
        return part
    pooling = model.config.classifier_pooling
    names = {"cls": getattr(model.config, "fairseq_head", DEFAULT_HEAD)} | {own: name for name, own in POOLINGS.items()}
    if pooling not in names:
        raise UserError(f"`classifier_pooling` is {pooling!r}, but the authors' heads have {', '.join(names)}.")
    name = names[pooling] if given is None else given
    if not re.fullmatch(r"[^.\s]+", name):
        raise UserError(f"--head {name!r} is not a valid name: leave out dots and spaces.")
    if POOLINGS.get(name, "cls") != pooling:
        raise UserError(
            f"--head {name} would read {POOLINGS.get(name, 'cls')!r} in the authors' code, but `classifier_pooling` is "
            f"{pooling!r}. Choose {names[pooling]}."
        )
    return name


def make_arguments(model: PreTrainedModel, part: str | None) -> dict[str, Any]:
    """The authors' arguments for a model.

    Raises:
        UserError: It has a purpose that they do not support.
    """
    config, arguments = model.config, to_arguments(model.config)
    if arguments["pooler_dropout"] is None:
        arguments["pooler_dropout"] = config.hidden_dropout_prob
    arguments |= {name: float(value) for name, value in arguments.items() if name.endswith("dropout")}
    arguments["untie_weights_luna"] &= isinstance(model, LunaForMaskedLM)
    arch = f"luna_base_{'tied' if config.tie_kv else 'untied'}_512"
    return {"arch": arch, **_task(model, part), **arguments, **_EVERY_MODEL}


def _task(model: PreTrainedModel, part: str | None) -> dict[str, Any]:
    """The task, its criterion, and their arguments."""
    if isinstance(model, LunaForMultipleChoice):
        task = "sentence_ranking"
        own = {**_SENTENCES, "num_classes": CHOICES, "max_option_length": None, "ranking_head_name": part}
    elif isinstance(model, LunaForSequenceClassification):
        task = "sentence_prediction"
        own = {
            **_SENTENCES,
            "num_classes": model.config.num_labels,
            "regression_target": _is_regression(model.config),
            "add_prev_output_tokens": False,
            "classification_head_name": part,
        }
    else:
        task, own = "masked_lm", _MASKED_LM
    return {"task": task, "criterion": task, **_EVERY_TASK, **own}


def _is_regression(config: PreTrainedConfig) -> bool:
    """Whether a sequence classifier gives a number instead of a class."""
    kind, outputs = config.problem_type, config.num_labels
    if kind == "multi_label_classification" or (kind == "regression" and outputs > 1):
        raise UserError(
            f"`problem_type` is {kind!r} and `num_labels` is {outputs}, but the authors' heads choose one class or "
            "give one number."
        )
    return outputs == 1


def label_names(model: PreTrainedModel) -> list[str]:
    """Names of the classes in the order of the outputs; empty if there are no classes or they have no names."""
    names = [str(name) for _, name in sorted(model.config.id2label.items())]
    is_classifier = isinstance(model, LunaForSequenceClassification) and len(names) > 1
    return names if is_classifier and names != [f"LABEL_{index}" for index in range(len(names))] else []
