"""Sources of a warm start: encoders with softmax attention, as parameters with uniform names."""

import os
import pickle
import posixpath
import re
from dataclasses import replace
from typing import Any

from huggingface_hub.errors import HfHubHTTPError, HFValidationError, StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import has_file, logging

from ..families.warm_start_rules import HEAD_NAMES, PROJECTION, Layout, LoadedSource
from ..registry import FAMILIES
from ..scripting import reason
from .sentence_folder import find_transformer

# Raised by files that are truncated, empty, or not weights (a web page, a Git LFS pointer).
_LOADING_ERRORS = (OSError, SafetensorError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError)


# Names of files with weights.
_SAFE = ("model.safetensors", "model.safetensors.index.json")

_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


Source = str | os.PathLike | PreTrainedModel


_BERT_HEAD = {
    "lm_head.dense.weight": ("cls.predictions.transform.dense.weight",),
    "lm_head.dense.bias": ("cls.predictions.transform.dense.bias",),
    "lm_head.layer_norm.weight": ("cls.predictions.transform.LayerNorm.weight",),
    "lm_head.layer_norm.bias": ("cls.predictions.transform.LayerNorm.bias",),
    "lm_head.decoder.weight": ("cls.predictions.decoder.weight",),
    "lm_head.bias": ("cls.predictions.decoder.bias", "cls.predictions.bias"),
}

_DISTILBERT_HEAD = {
    "lm_head.dense.weight": ("vocab_transform.weight",),
    "lm_head.dense.bias": ("vocab_transform.bias",),
    "lm_head.layer_norm.weight": ("vocab_layer_norm.weight",),
    "lm_head.layer_norm.bias": ("vocab_layer_norm.bias",),
    "lm_head.decoder.weight": ("vocab_projector.weight",),
    "lm_head.bias": ("vocab_projector.bias",),
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

_ELECTRA_HEAD = {
    "lm_head.dense.weight": ("generator_predictions.dense.weight",),
    "lm_head.dense.bias": ("generator_predictions.dense.bias",),
    "lm_head.layer_norm.weight": ("generator_predictions.LayerNorm.weight",),
    "lm_head.layer_norm.bias": ("generator_predictions.LayerNorm.bias",),
    "lm_head.decoder.weight": ("generator_lm_head.weight",),
    "lm_head.bias": ("generator_lm_head.bias",),
}

_ROBERTA = Layout(HEAD_NAMES)

# Of BERT and the models that share its vocabulary and positions.
_BERT = Layout(_BERT_HEAD, counts_pad_rows=False, has_pad_rows=False, ordered_vocabulary=False)

# For transformers' models; a family's own is part of its rules.
LAYOUTS = {
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "data2vec-text": _ROBERTA,
    "bert": replace(_BERT, fixed_head_activation=False),
    "distilbert": replace(
        _BERT,
        head=_DISTILBERT_HEAD,
        names=_DISTILBERT_NAMES,
        fields=_DISTILBERT_FIELDS,
        constants={"layer_norm_eps": 1e-12, "type_vocab_size": 0},
        fixed_head_activation=False,
    ),
    "electra": replace(_BERT, head=_ELECTRA_HEAD, names={"embeddings_project": PROJECTION}),
}


def layouts() -> dict[str, Layout]:
    """Every model type that can be a source, and its layout."""
    own = {model_type: family.warm_start.layout for model_type, family in FAMILIES.items()}
    return LAYOUTS | {model_type: layout for model_type, layout in own.items() if layout}


def load_source(source: Source, allow_pickle: bool = False) -> LoadedSource:
    """Read a source with transformers.

    Args:
        source: folder, Hub name or model in memory; of a sentence-transformers model, the transformer is read.
        allow_pickle: whether to read weights from a pickle where there are no safetensors.

    Raises:
        ValueError: It cannot be read or mapped, or its weights are pickled and `allow_pickle` is false.
    """
    if isinstance(source, PreTrainedModel):
        name = type(source).__name__
        _check_config(source.config.to_dict(), name)
        return _take_apart(source, name, set(), [])
    if not isinstance(source, str | os.PathLike):
        raise ValueError(
            f"The source is a {type(source).__name__}, but must be a folder, a Hub name or a transformers model."
        )
    name = os.fspath(source)
    config, folder = read_config(name), find_transformer(name)
    config.dtype = None  # keep the weights' dtype, whatever the config says
    if not allow_pickle:
        _check_files(name, folder)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # we report missing weights ourselves
    try:
        # Wrong shapes are reported below, because transformers' error does not name the weights.
        options = {"ignore_mismatched_sizes": True, "output_loading_info": True}
        model, info = AutoModelForMaskedLM.from_pretrained(
            name, subfolder=folder, config=config, dtype="auto", **options
        )
    except _LOADING_ERRORS as error:
        # Torch's message suggests loading a damaged pickle without its safeguard.
        is_garbage = isinstance(error, pickle.UnpicklingError)
        why = "a file is damaged or holds no weights" if is_garbage else reason(error)
        raise ValueError(f"The weights of {name} cannot be loaded ({why}). Copy or download them again.") from error
    finally:
        logging.set_verbosity(verbosity)
    if info["mismatched_keys"]:
        first, has, wanted = min(info["mismatched_keys"])
        others = len(info["mismatched_keys"]) - 1
        raise ValueError(
            f"{name}: {first} has the shape {tuple(has)}, but its config requires {tuple(wanted)}"
            f"{f' (and {others} more differ)' if others else ''}. Restore the config that belongs to the weights."
        )
    return _take_apart(model, name, set(info["missing_keys"]), sorted(info["unexpected_keys"]))


def _check_files(name: str, folder: str) -> None:
    """Refuse a source without safetensors.

    Raises:
        ValueError: There are none, or it cannot be told.
    """
    try:
        safe, pickled = (
            any(has_file(name, posixpath.join(folder, file)) for file in files) for files in (_SAFE, _PICKLED)
        )
    except OSError as error:
        raise ValueError(f"The weights of {name} cannot be found ({reason(error)}).") from error
    if not safe and pickled:
        raise ValueError(
            f"{name} holds its weights in a pickle, which can run code: pass `allow_pickle=True` if you trust it, or "
            "choose a checkpoint with model.safetensors."
        )
    if not safe:
        raise ValueError(f"{name} holds no weights (model.safetensors). Copy or download them again.")


def read_config(name: str) -> PreTrainedConfig:
    """The config of a source, a folder or a Hub name; of a sentence-transformers model, the transformer's.

    Raises:
        ValueError: It cannot be read, or its model cannot be mapped.
    """
    folder = find_transformer(name)
    _check_config(_read_values(name, folder), name)
    try:
        return AutoConfig.from_pretrained(name, subfolder=folder)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise ValueError(f"The config of {name} cannot be read ({reason(error)}).") from error


def _read_values(name: str, folder: str) -> dict[str, Any]:
    try:
        if not os.path.isdir(name) or os.path.isfile(os.path.join(name, folder, "config.json")):
            values, _ = PreTrainedConfig.get_config_dict(name, subfolder=folder)
            if values:
                return values
    except (OSError, ValueError, HFValidationError, HfHubHTTPError) as error:
        if not isinstance(error.__cause__, HFValidationError):  # else a path, of no folder
            raise ValueError(f"The config.json of {name} cannot be read ({reason(error)}).") from error
    raise ValueError(f"{name} is neither a folder with a config.json nor a model on the Hub.")


def _check_config(config: dict[str, Any], name: str) -> None:
    """Refuse models of another architecture.

    Raises:
        ValueError: Such a model.
    """
    kind, known = config.get("model_type"), layouts()
    wanted = f"Name an encoder of one of these types: {', '.join(known)}."
    if kind in FAMILIES and kind not in known:
        raise ValueError(f"{name} is already a {kind} model: load it with `from_pretrained` to train it. {wanted}")
    for field in ("is_encoder_decoder", "is_decoder", "add_cross_attention"):
        if config.get(field):
            raise ValueError(f"{name} is not an encoder: `{field}` is true in its config. {wanted}")
    if kind == "mpnet":
        raise ValueError(
            f"{name} is an MPNet, whose attention adds a learned bias by relative position, which slots and means of "
            "tokens cannot carry: choose a checkpoint with absolute positions."
        )
    if kind not in known:
        raise ValueError(f"{name} is a model of the type {kind}. {wanted}")
    positions = config.get("position_embedding_type") or "absolute"
    if positions not in ("absolute", "learned", "sinusoidal"):
        raise ValueError(
            f"{name} has relative positions (`position_embedding_type` is {positions!r}) as part of its attention. "
            "Choose a checkpoint with absolute positions."
        )
    if config.get("quantization_config"):
        raise ValueError(f"{name} is quantized (`quantization_config`). Choose the checkpoint that it was made from.")
    if config.get("pad_token_id") is None and "pad_token_id" in config:
        raise ValueError(f"{name} has no `pad_token_id` in its config. Set the tokenizer's.")


def _take_apart(model: PreTrainedModel, name: str, missing: set[str], ignored: list[str]) -> LoadedSource:
    """The parameters of a model, without those missing from its files.

    Raises:
        ValueError: Parts of the encoder or head are missing or not finite, or there are more layers than in the config.
    """
    layout, prefix = layouts()[model.config.model_type], model.base_model_prefix + "."
    renamed = [layout.rename(own) for own in (*dict(model.named_parameters()), *ignored)]
    _check_layers(model.config.num_hidden_layers, renamed, name)
    tensors, names = {}, {}
    for own, tensor in model.named_parameters(remove_duplicate=False):
        if own in missing:
            continue
        if tensor.is_meta or not tensor.is_floating_point():
            raise ValueError(f"{name}: {own} is not a floating-point tensor in memory. Load it without quantization.")
        if not tensor.isfinite().all():
            raise ValueError(f"{name}: {own} holds NaN or infinity. Use an earlier checkpoint.")
        ours = layout.rename(own.removeprefix(prefix))
        tensors[ours], names[ours] = tensor.detach(), own
    head = {own for owns in layout.head.values() for own in owns}
    has_head = layout.head["lm_head.dense.weight"][0] in tensors
    lacking = sorted(own for own in missing if own.startswith(prefix) or (has_head and own in head))
    # If the files hold no bias of the decoder, it is the head's.
    lacking = [own for own in lacking if own not in layout.head["lm_head.bias"] or not _any_bias(layout, tensors)]
    if lacking:
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        raise ValueError(
            f"{name} lacks weights that its config requires ({', '.join(lacking[:3])}{more}). Restore the config that "
            "belongs to the weights."
        )
    if not has_head:
        # In memory, a tied decoder exists anyway.
        embedding = tensors["embeddings.word_embeddings.weight"].data_ptr()
        parts = {own: tensor for own, tensor in tensors.items() if own in head}
        ignored = [*ignored, *(own for own, tensor in parts.items() if tensor.data_ptr() != embedding)]
        tensors = {own: tensor for own, tensor in tensors.items() if own not in head}
    return LoadedSource(model.config, layout, tensors, names, ignored)


def _check_layers(count: int, names: list[str], name: str) -> None:
    """Refuse trained layers beyond those of the config, which would be dropped.

    Raises:
        ValueError: There are more layers than in the config.
    """
    found = [int(match[1]) for own in names if (match := re.search(r"\bencoder\.layer\.(\d+)\.", own))]
    if max(found, default=0) >= count:
        raise ValueError(
            f"{name} has {max(found) + 1} layers, but `num_hidden_layers` is {count}. Restore the config that belongs "
            "to the weights."
        )


def _any_bias(layout: Layout, tensors: dict[str, Tensor]) -> bool:
    return any(own in tensors for own in layout.head["lm_head.bias"])
