"""The authors' arguments for a model of ours, the name of its head, and what they have no argument for.

The way back of `fairseq_config`.
"""

from typing import Any

from fairseq_config import ACTIVATIONS, BOS, EOS, PAD, POOLINGS
from fairseq_tokenizer import MASK, SPECIALS
from shared import UserError
from transformers import PreTrainedConfig, PreTrainedModel

from luna_hf import LunaConfig, LunaForMaskedLM, LunaForMultipleChoice, LunaForSequenceClassification, LunaModel

MODELS: dict[str, type[PreTrainedModel]] = {
    model.__name__: model
    for model in (LunaForMaskedLM, LunaModel, LunaForSequenceClassification, LunaForMultipleChoice)
}
CLASSIFIERS = ("LunaForSequenceClassification", "LunaForMultipleChoice")
# The name that the authors' code gives to a head if none is chosen; the others choose what a head reads.
DEFAULT_HEAD = "sentence_classification_head"
# What the authors' masked language model always is. The values are those of our config.
FIXED: dict[str, tuple[Any, str]] = {
    "position_embedding_type": ("learned", "has learned positions"),
    "norm_first": (False, "has post-norm layers"),
    "embedding_layer_norm": (True, "has a LayerNorm on the embeddings"),
    "layer_norm_eps": (1e-5, "has this epsilon in every LayerNorm"),
    "type_vocab_size": (0, "has no segment embeddings"),
    "conv_kernel_size": (0, "has no convolution"),
    "bos_token_id": (BOS, "takes the special tokens from its dictionary, where they have fixed ids"),
    "pad_token_id": (PAD, "takes the special tokens from its dictionary, where they have fixed ids"),
    "eos_token_id": (EOS, "takes the special tokens from its dictionary, where they have fixed ids"),
}
# Of the authors' names for one activation, the first is written.
THEIR_ACTIVATIONS = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
# Number of answers to a question, which a ranking task has to be told and on which the model does not depend: RACE's.
CHOICES = 4
# Arguments that a task wants besides what the model says, as the authors have them.
EVERY_TASK = {"data": ".", "dataset_impl": None, "seed": 1, "shorten_method": "none", "shorten_data_split_list": ""}
MASKED_LM = {
    "sample_break_mode": "complete",
    "mask_prob": 0.15,
    "leave_unmasked_prob": 0.1,
    "random_token_prob": 0.1,
    "freq_weighted_replacement": False,
    "mask_whole_words": False,
}
SENTENCES = {"init_token": BOS, "separator_token": EOS, "no_shuffle": False, "load_checkpoint_heads": True}


# ---- what can be converted ----


def check_config(config: PreTrainedConfig) -> None:
    """Refuse what the authors' model cannot express.

    Raises:
        UserError: The field of the config, its value, and what the authors' model has.
    """
    if config.model_type != LunaConfig.model_type:
        raise UserError(f"The model is of the type {config.model_type!r}. The authors' code has Luna only (`luna`).")
    for field, (value, reason) in FIXED.items():
        if getattr(config, field) != value:
            raise UserError(
                f"`{field}` is {getattr(config, field)!r}, which cannot be converted: the authors' model {reason} "
                f"({value!r})."
            )
    heads, packed = config.num_attention_heads, config.num_projected_attention_heads
    if packed not in (None, heads):
        raise UserError(
            f"`num_projected_attention_heads` is {packed}, and `num_attention_heads` is {heads}: the authors' model "
            "has as many heads in the pack attention as in the unpack attention."
        )
    for field in ("hidden_act", "classifier_activation"):
        if getattr(config, field) not in THEIR_ACTIVATIONS:
            raise UserError(
                f"`{field}` is {getattr(config, field)!r}, which the authors' code does not have. It has "
                f"{', '.join(THEIR_ACTIVATIONS)}."
            )
    if getattr(config, "quantization_config", None) is not None:
        raise UserError("`quantization_config` is set: a quantized model cannot be converted. Take the original one.")


def check_class(name: str) -> None:
    """Refuse models that the authors do not have.

    Raises:
        UserError: The class, and those that can be converted.
    """
    if name not in MODELS:
        raise UserError(
            f"The model is a {name}, which the authors' code does not have. These can be converted: "
            f"{', '.join(MODELS)}."
        )


def head_name(model: PreTrainedModel, given: str | None = None) -> str | None:
    """What the authors call the model's head: `"lm_head"`, the name of a classification head, `None` if there is none.

    Raises:
        UserError: The given name cannot be that of the model's head, or the head reads what no head of theirs reads.
    """
    if type(model).__name__ not in CLASSIFIERS:
        if given is not None:
            raise UserError(f"A {type(model).__name__} has no classification head that could be called {given}.")
        return "lm_head" if type(model).__name__ == "LunaForMaskedLM" else None
    pooling = model.config.classifier_pooling
    names = {"cls": DEFAULT_HEAD} | {pooling: name for name, pooling in POOLINGS.items()}
    if pooling not in names:
        raise UserError(
            f"`classifier_pooling` is {pooling!r}, which no head of the authors has. They have {', '.join(names)}."
        )
    name = names[pooling] if given is None else given
    if not name or "." in name or name.split() != [name]:
        raise UserError(f"--head {name!r} is no name for a head: it may hold neither a dot nor a blank.")
    meaning = POOLINGS.get(name, "cls")
    if meaning != pooling:
        raise UserError(
            f"--head {name}: a head of that name reads {meaning!r} in the authors' code, but the model's "
            f"`classifier_pooling` is {pooling!r}. "
            + (
                "Leave --head out."
                if pooling != "cls"
                else f"Choose another name, or leave --head out ({DEFAULT_HEAD})."
            )
        )
    return name


# ---- the arguments ----


def make_arguments(model: PreTrainedModel, part: str | None) -> dict[str, Any]:
    """The authors' arguments for a model.

    Raises:
        UserError: It was trained for something that they do not have.
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
    """The task, its criterion (which has the same name), and what they have to be told."""
    kind = type(model).__name__
    if kind == "LunaForMultipleChoice":
        own = {**SENTENCES, "num_classes": CHOICES, "max_option_length": None, "ranking_head_name": part}
        return {"task": "sentence_ranking", "criterion": "sentence_ranking", **EVERY_TASK, **own}
    if kind == "LunaForSequenceClassification":
        own = {
            **SENTENCES,
            "num_classes": model.config.num_labels,
            "regression_target": _is_regression(model.config),
            "add_prev_output_tokens": False,
            "classification_head_name": part,
        }
        return {"task": "sentence_prediction", "criterion": "sentence_prediction", **EVERY_TASK, **own}
    return {"task": "masked_lm", "criterion": "masked_lm", **EVERY_TASK, **MASKED_LM}


def _is_regression(config: PreTrainedConfig) -> bool:
    """Whether a sequence classifier gives a number instead of a class."""
    kind, outputs = config.problem_type, config.num_labels
    if kind == "multi_label_classification":
        raise UserError(f"`problem_type` is {kind!r}: the authors' heads choose one class, or give a number.")
    if kind == "regression" and outputs > 1:
        raise UserError(
            f"`problem_type` is {kind!r}, and `num_labels` is {outputs}: a regression head of the authors gives one "
            "number."
        )
    return outputs == 1


def label_names(model: PreTrainedModel) -> list[str]:
    """Names of the classes in the order of the outputs; none if the model has no classes, or no names for them.

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
        is_word = bool(name.strip()) and name == name.strip() and len(name.splitlines()) == 1
        if not is_word or name in (*SPECIALS, MASK, *names[:place]) or name.startswith("madeupword"):
            raise UserError(
                f"`id2label` names class {place} {name!r}. A class in fairseq's label/dict.txt has a name of its own, "
                "in one line, without blanks around it, and not one of fairseq's own symbols: rename it."
            )
    return names
