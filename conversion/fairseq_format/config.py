"""The authors' arguments and our configuration, in both directions.

What names and shapes of the tensors show is taken from them, the rest from the arguments.
"""

import dataclasses
import re
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from luna_hf import LunaConfig, LunaForMaskedLM, LunaForMultipleChoice, LunaForSequenceClassification, LunaModel
from luna_hf.scripting import UserError

from .checkpoint import HEADS, SENTENCE_ENCODER, Options, Original
from .reference import EPSILON, PADDING_ID

BOS, PAD, EOS, UNK = 0, PADDING_ID, 2, 3  # in every fairseq dictionary
SPECIALS, MASK = ["<s>", "<pad>", "</s>", "<unk>"], "<mask>"
# The authors' activations by their names, and transformers' names. Of two for one function, we write the first.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_accurate": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "relu": "relu",
    "tanh": "tanh",
    "linear": "linear",
}
THEIR_ACTIVATIONS = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
# The name of a classification head decides what it reads; any other name means `cls`.
POOLINGS = {"pooling_classification_head": "packed_max", "attention_classification_head": "packed_attention"}
DEFAULT_HEAD = "sentence_classification_head"
# Fields of our config that have the same value in every masked language model of the authors.
FIXED = {
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
RANKING_TASKS = ("sentence_ranking", "commonsense_qa")
# What a converted model has on its encoder, by kind.
MODELS: dict[str, type[PreTrainedModel]] = {
    "masked_lm": LunaForMaskedLM,
    "encoder": LunaModel,
    "classification": LunaForSequenceClassification,
    "regression": LunaForSequenceClassification,
    "ranking": LunaForMultipleChoice,
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


@dataclasses.dataclass(frozen=True)
class Head:
    """What a converted model has on its encoder.

    Args:
        part: `"lm_head"`, the name of a classification head, or `None` for an encoder alone.
        kind: a key of `MODELS`.
        labels: names of the classes in the order of the outputs; empty if unknown.
    """

    part: str | None
    kind: str
    labels: tuple[str, ...] = ()

    @property
    def classifier(self) -> str | None:
        """The name of the classification head, if it is one."""
        return self.part if self.kind in HEAD_TYPES else None


# ---- theirs to ours ----


def classes(original: Original, name: str) -> int:
    """Number of outputs of a classification head.

    Raises:
        UserError: The head is incomplete.
    """
    for part in ("dense.weight", "out_proj.weight"):
        layer = original.weights.get(f"{HEADS}{name}.{part}")
        if layer is None or layer.ndim != 2 or not len(layer):
            raise UserError(f"The head {name} is incomplete: `{part}` is missing or not a matrix.")
    return original.weights[f"{HEADS}{name}.out_proj.weight"].shape[0]


def make_config(original: Original, head: Head) -> LunaConfig:
    """Our configuration of a checkpoint.

    Raises:
        UserError: It is not the authors' masked language model, or its parts do not fit together.
    """
    weights, options = original.weights, original.options
    encoder = {n.removeprefix(SENTENCE_ENCODER): t for n, t in weights.items() if n.startswith(SENTENCE_ENCODER)}
    for name in ("embed_tokens.weight", "embed_positions.weight", "projected_embeddings", "layers.0.fc1.weight"):
        if name not in encoder or encoder[name].ndim != 2:
            raise UserError(f"{original.name} is damaged or no masked LM of the authors: `{name}` is not a matrix.")
    if foreign := {"layer_norm.weight", "segment_embeddings.weight"} & encoder.keys():
        raise UserError(f"{original.name} is a Luna, but no masked LM of the authors: it has `{min(foreign)}`.")
    vocab_size, width = encoder["embed_tokens.weight"].shape
    count = options.encoder_attention_heads
    if count < 1 or width % count:
        raise UserError(
            f"{original.name} has width {width}, which {count} attention heads{_assumed(original)} do not divide. Give "
            "the right number: --override encoder_attention_heads=N."
        )
    rows, positions = encoder["embed_positions.weight"].shape[0], options.max_positions
    if positions and rows != positions + PAD + 1:
        raise UserError(
            f"{original.name} has {rows:,} rows in `embed_positions.weight`, but `max_positions` is {positions:,}, "
            f"which needs {positions + PAD + 1:,}: fairseq puts {PAD + 1} before the first position. If the rows are "
            f"right: --override max_positions={rows - PAD - 1}."
        )
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "num_hidden_layers": original.layers(),
        "num_attention_heads": count,
        "intermediate_size": encoder["layers.0.fc1.weight"].shape[0],
        "projection_length": encoder["projected_embeddings"].shape[0],
        "max_position_embeddings": rows - PAD - 1,
        "tie_kv": "layers.0.self_attn.c_proj.weight" in encoder,
        "dynamic_projection": not options.fix_projection_length,
        "tie_word_embeddings": original.is_tied(),
        "hidden_act": _activation("activation_fn", options),
        "hidden_dropout_prob": options.dropout,
        "attention_probs_dropout_prob": options.attention_dropout,
        "activation_dropout": options.activation_dropout,
        "classifier_dropout": options.pooler_dropout,
        "classifier_activation": _activation("pooler_activation_fn", options),
    }
    if head.classifier:
        outputs = classes(original, head.part)
        fields |= {
            "classifier_pooling": POOLINGS.get(head.part, "cls"),
            "classifier_hidden_size": weights[f"{HEADS}{head.part}.dense.weight"].shape[0],
        }
        if head.kind == "regression":
            fields |= {"num_labels": 1, "problem_type": "regression"}
        elif head.kind == "classification":
            id2label = dict(enumerate(head.labels or [f"LABEL_{index}" for index in range(outputs)]))
            label2id = {name: index for index, name in id2label.items()}
            fields |= {"id2label": id2label, "label2id": label2id, "problem_type": "single_label_classification"}
    try:
        config = LunaConfig(**fields)
    except ValueError as error:
        raise UserError(str(error)) from error
    if head.classifier and head.part not in (DEFAULT_HEAD, *POOLINGS):
        config.fairseq_head = head.part  # for the way back
    return config


def _assumed(original: Original) -> str:
    return " (the authors' default, not in the file)" if "encoder_attention_heads" in original.assumed else ""


def _activation(name: str, options: Options) -> str:
    activation = getattr(options, name)
    if activation not in ACTIVATIONS:
        raise UserError(f"The argument `{name}` is {activation!r}. Choose one of {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[activation]


# ---- ours to theirs ----


def check_config(config: PreTrainedConfig) -> None:
    """Refuse what the authors' model cannot express.

    Raises:
        UserError: A field of the config has an unsupported value.
    """
    if config.model_type != LunaConfig.model_type:
        raise UserError(f"The model type is {config.model_type!r}, but the authors' code has only 'luna'.")
    fixed: dict[str, Any] = dict(FIXED)
    if config.num_projected_attention_heads is not None:
        fixed["num_projected_attention_heads"] = config.num_attention_heads
    if config.scale_embedding is not None:
        fixed["scale_embedding"] = False
    for field, value in fixed.items():
        if getattr(config, field) != value:
            raise UserError(f"`{field}` is {getattr(config, field)!r}, but always {value!r} in the authors' model.")
    for field in ("hidden_act", "classifier_activation"):
        if getattr(config, field) not in THEIR_ACTIVATIONS:
            raise UserError(
                f"`{field}` is {getattr(config, field)!r}, which the authors' code lacks. It has "
                f"{', '.join(THEIR_ACTIVATIONS)}."
            )
    if getattr(config, "quantization_config", None) is not None:
        raise UserError("`quantization_config` is set. Convert the model before it is quantized.")


def check_class(name: str) -> None:
    """Refuse models that the authors do not have.

    Raises:
        UserError: Such a class.
    """
    known = dict.fromkeys(model.__name__ for model in MODELS.values())
    if name not in known:
        raise UserError(f"The authors' code has no counterpart of {name}. Convert one of {', '.join(known)}.")


def head_name(model: PreTrainedModel, given: str | None = None) -> str | None:
    """What the authors call the model's head: `"lm_head"`, a classification head's name, or `None`.

    Raises:
        UserError: `given` does not suit the model's head, or no head of theirs reads what it reads.
    """
    kind = type(model).__name__
    if kind in ("LunaForMaskedLM", "LunaModel"):
        if given is not None:
            raise UserError(f"--head {given} does not apply to a {kind}, which has no classification head.")
        return "lm_head" if kind == "LunaForMaskedLM" else None
    pooling = model.config.classifier_pooling
    names = {"cls": DEFAULT_HEAD} | {pooling: name for name, pooling in POOLINGS.items()}
    if pooling not in names:
        raise UserError(f"`classifier_pooling` is {pooling!r}, but the authors' heads have {', '.join(names)}.")
    name = names[pooling] if given is None else given
    converted = getattr(model.config, "fairseq_head", None)
    if given is None and converted is not None and pooling == "cls":
        name = converted
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
    config = model.config
    pooler_dropout = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
    return {
        "arch": f"luna_base_{'tied' if config.tie_kv else 'untied'}_512",
        **_task(model, part),
        "encoder_layers": config.num_hidden_layers,
        "encoder_embed_dim": config.hidden_size,
        "encoder_ffn_embed_dim": config.intermediate_size,
        "encoder_attention_heads": config.num_attention_heads,
        "max_positions": config.max_position_embeddings,
        "tokens_per_sample": config.max_position_embeddings,
        "projection_length": config.projection_length,
        "fix_projection_length": not config.dynamic_projection,
        "untie_luna_kv": not config.tie_kv,
        "untie_weights_luna": type(model).__name__ == "LunaForMaskedLM" and not config.tie_word_embeddings,
        "activation_fn": THEIR_ACTIVATIONS[config.hidden_act],
        "pooler_activation_fn": THEIR_ACTIVATIONS[config.classifier_activation],
        "dropout": float(config.hidden_dropout_prob),
        "attention_dropout": float(config.attention_probs_dropout_prob),
        "activation_dropout": float(config.activation_dropout),
        "pooler_dropout": float(pooler_dropout),
        "encoder_layerdrop": 0,
        "encoder_layers_to_keep": None,
        "quant_noise_pq": 0,
        "quant_noise_pq_block_size": 8,
        "quant_noise_scalar": 0,
    }


def _task(model: PreTrainedModel, part: str | None) -> dict[str, Any]:
    """The task, its criterion, and their arguments."""
    kind = type(model).__name__
    if kind == "LunaForMultipleChoice":
        task = "sentence_ranking"
        own = {**_SENTENCES, "num_classes": CHOICES, "max_option_length": None, "ranking_head_name": part}
    elif kind == "LunaForSequenceClassification":
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
    """Names of the classes in the order of the outputs; empty if there are no classes or they have no names.

    Raises:
        UserError: fairseq's dictionary cannot hold a name.
    """
    config = model.config
    if type(model).__name__ != "LunaForSequenceClassification" or _is_regression(config):
        return []
    names = [str(config.id2label[index]) for index in sorted(config.id2label)]
    if names == [f"LABEL_{index}" for index in range(len(names))]:
        return []
    for place, name in enumerate(names):
        is_line = bool(name.strip()) and name == name.strip() and len(name.splitlines()) == 1
        if not is_line or name in (*SPECIALS, MASK, *names[:place]) or name.startswith("madeupword"):
            raise UserError(
                f"`id2label` names class {place} {name!r}, which label/dict.txt cannot hold. Rename it: one line, "
                "unique, no spaces around it, and not a symbol of fairseq."
            )
    return names
