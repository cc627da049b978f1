"""Sources of a warm start: encoders with softmax attention, as parameters with uniform names."""

import os
import pickle
from dataclasses import replace
from typing import Any

from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel

from ..families.warm_start_rules import PROJECTION, Layout, LoadedSource
from ..registry import FAMILIES
from ..scripting import quiet, reason
from .sentence_folder import find_transformer

# Raised by files that are truncated, empty, or not weights (a web page, a Git LFS pointer), or by odd configs.
_LOADING_ERRORS = (
    *(OSError, SafetensorError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError),
    *(LookupError, TypeError, ArithmeticError, AssertionError),
)

Source = str | os.PathLike | PreTrainedModel | LoadedSource

_BERT_NAMES = {
    "cls.predictions.transform.LayerNorm.": "lm_head.layer_norm.",
    "cls.predictions.transform.": "lm_head.",
    "cls.predictions.": "lm_head.",
}

_DISTILBERT_NAMES = {
    "transformer.layer.": "encoder.layer.",
    ".attention.q_lin.": ".attention.self.query.",
    ".attention.k_lin.": ".attention.self.key.",
    ".attention.v_lin.": ".attention.self.value.",
    ".attention.out_lin.": ".attention.output.dense.",
    ".sa_layer_norm.": ".attention.output.LayerNorm.",
    ".ffn.lin1.": ".intermediate.dense.",
    ".ffn.lin2.": ".output.dense.",
    ".output_layer_norm.": ".output.LayerNorm.",
    "vocab_transform.": "lm_head.dense.",
    "vocab_layer_norm.": "lm_head.layer_norm.",
    "vocab_projector.": "lm_head.decoder.",
}

_DISTILBERT_FIELDS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}

_ELECTRA_NAMES = {
    "embeddings_project": PROJECTION,
    "generator_predictions.LayerNorm.": "lm_head.layer_norm.",
    "generator_predictions.": "lm_head.",
    "generator_lm_head.": "lm_head.decoder.",
}

# Of BERT and the models that share its vocabulary and positions.
_BERT = Layout(
    _BERT_NAMES, counts_pad_rows=False, has_pad_rows=False, fixed_head_activation=False, ordered_vocabulary=False
)

# For transformers' models; a family's own is part of its rules.
LAYOUTS = {
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert", "data2vec-text"), Layout()),
    "bert": _BERT,
    "distilbert": replace(
        _BERT,
        names=_DISTILBERT_NAMES,
        fields=_DISTILBERT_FIELDS,
        constants={"layer_norm_eps": 1e-12, "type_vocab_size": 0},
    ),
    "electra": replace(_BERT, names=_ELECTRA_NAMES, fixed_head_activation=True),
}


def layouts() -> dict[str, Layout]:
    """Every model type that can be a source, and its layout."""
    own = {model_type: family.warm_start.layout for model_type, family in FAMILIES.items()}
    return LAYOUTS | {model_type: layout for model_type, layout in own.items() if layout}


def load_source(source: Source, allow_pickle: bool = False) -> LoadedSource:
    """Read a source with transformers.

    Args:
        source: folder, Hub name or model in memory; of a sentence-transformers model, the transformer is read. What
            this function has returned before is returned again.
        allow_pickle: whether to read weights from a pickle where there are no safetensors.

    Raises:
        ValueError: It cannot be read or mapped, or its weights are pickled and `allow_pickle` is false.
    """
    if isinstance(source, LoadedSource):
        return source
    if isinstance(source, PreTrainedModel):
        name = type(source).__name__
        _check_config(source.config, name)
        return _take_apart(source, name, [], [])
    name = os.fspath(source)
    config = read_config(name)
    config.dtype = None  # keep the weights' dtype, whatever the config says
    options = {"config": config, "dtype": "auto", "use_safetensors": None if allow_pickle else True}
    try:
        with quiet():  # we report missing weights ourselves
            model, info = AutoModelForMaskedLM.from_pretrained(
                name, subfolder=find_transformer(name), output_loading_info=True, **options
            )
    except _LOADING_ERRORS as error:
        advice = "" if allow_pickle else " If they are in a pickle that you trust, pass `allow_pickle=True`."
        raise ValueError(f"The weights of {name} cannot be loaded ({reason(error)}).{advice}") from error
    return _take_apart(model, name, sorted(info["missing_keys"]), sorted(info["unexpected_keys"]))


def read_config(name: str) -> PreTrainedConfig:
    """The config of a source, a folder or a Hub name; of a sentence-transformers model, the transformer's.

    Raises:
        ValueError: It cannot be read, or its model cannot be mapped.
    """
    try:
        config = AutoConfig.from_pretrained(name, subfolder=find_transformer(name), trust_remote_code=False)
    except Exception as error:  # config files fail in many ways, all of them the user's to fix
        raise ValueError(
            f"{name} is neither a folder with a config.json nor a Hub model that transformers knows ({reason(error)})."
        ) from error
    _check_config(config, name)
    return config


def _check_config(config: PreTrainedConfig, name: str) -> None:
    """Refuse models of another architecture."""

    def has(field: str) -> Any:
        return getattr(config, field, None)

    kind, known = config.model_type, layouts()
    positions = has("position_embedding_type") or "absolute"
    if kind in FAMILIES and kind not in known:
        problem = f"is already a {kind} model, which `from_pretrained` loads"
    elif kind == "mpnet" or positions not in ("absolute", "learned", "sinusoidal"):
        problem = f"({kind}) has relative positions in its attention, which slots and means of tokens cannot carry"
    elif flags := [flag for flag in ("is_encoder_decoder", "is_decoder", "add_cross_attention") if has(flag)]:
        problem = f"is not an encoder: `{flags[0]}` is true in its config"
    elif kind not in known:
        problem = f"is a model of the type {kind}"
    elif has("quantization_config"):
        problem = "is quantized (`quantization_config`)"
    elif has("pad_token_id") is None:
        problem = "has no `pad_token_id` in its config"
    else:
        return
    raise ValueError(f"{name} {problem}. Name an encoder of one of these types: {', '.join(known)}.")


def _take_apart(model: PreTrainedModel, name: str, missing: list[str], ignored: list[str]) -> LoadedSource:
    """The parameters of a model, without those missing from its files."""
    layout, prefix = layouts()[model.config.model_type], model.base_model_prefix + "."
    tensors, names = {}, {}
    for own, tensor in model.named_parameters(remove_duplicate=False):
        if own not in missing:
            ours = layout.rename(own.removeprefix(prefix))
            tensors[ours], names[ours] = tensor.detach(), own
    has_head = "lm_head.dense.weight" in tensors
    lacking = [own for own in missing if own.startswith(prefix) or (has_head and _is_head(layout.rename(own)))]
    # If the files hold no bias of the decoder, it is the head's.
    biases = {"lm_head.bias", "lm_head.decoder.bias"}
    if biases & tensors.keys():
        lacking = [own for own in lacking if layout.rename(own) not in biases]
    beyond = [own for own in ignored if "encoder.layer." in layout.rename(own)]
    if wrong := lacking or beyond:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        problem = "lacks weights that its config requires" if lacking else "has layers beyond those of its config"
        raise ValueError(f"{name} {problem} ({', '.join(wrong[:3])}{more}).")
    if not has_head:  # in memory, a tied decoder exists anyway
        embedding = tensors["embeddings.word_embeddings.weight"].data_ptr()
        parts = [ours for ours in tensors if _is_head(ours)]
        ignored = [*ignored, *(names[ours] for ours in parts if tensors[ours].data_ptr() != embedding)]
        tensors = {ours: tensor for ours, tensor in tensors.items() if not _is_head(ours)}
    return LoadedSource(model.config, layout, tensors, names, ignored)


def _is_head(ours: str) -> bool:
    return ours.startswith("lm_head.")
