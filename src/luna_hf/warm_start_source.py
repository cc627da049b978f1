"""Sources of a warm start: encoders of RoBERTa's architecture, taken apart into parameters under one set of names."""

import os
import pickle
import re
from typing import Any

from huggingface_hub.errors import HfHubHTTPError, HFValidationError, StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES
from transformers.utils import logging

from .families import FAMILIES
from .warm_start_rules import HEAD_NAMES, Layout, LoadedSource

# A file that is cut off, empty, or something else altogether (a page of HTML, a pointer of Git LFS).
_LOADING_ERRORS = (OSError, SafetensorError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError)

Source = str | os.PathLike | PreTrainedModel

_BERT_HEAD = {
    "lm_head.dense.weight": ("cls.predictions.transform.dense.weight",),
    "lm_head.dense.bias": ("cls.predictions.transform.dense.bias",),
    "lm_head.layer_norm.weight": ("cls.predictions.transform.LayerNorm.weight",),
    "lm_head.layer_norm.bias": ("cls.predictions.transform.LayerNorm.bias",),
    "lm_head.decoder.weight": ("cls.predictions.decoder.weight",),
    "lm_head.bias": ("cls.predictions.decoder.bias", "cls.predictions.bias"),
}
_ROBERTA = Layout(HEAD_NAMES)
# Those of transformers; a family's own is part of its rules.
LAYOUTS = {
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "data2vec-text": _ROBERTA,
    "bert": Layout(
        _BERT_HEAD,
        counts_pad_rows=False,
        has_pad_rows=False,
        fixed_head_activation=False,
        ordered_vocabulary=False,
    ),
}


def layouts() -> dict[str, Layout]:
    """Every model type that can be a source, and how to read it."""
    own = {model_type: family.warm_start.layout for model_type, family in FAMILIES.items()}
    return LAYOUTS | {model_type: layout for model_type, layout in own.items() if layout}


def load_source(source: Source) -> LoadedSource:
    """Read a source through transformers.

    Raises:
        ValueError: It cannot be mapped, or cannot be read.
    """
    if isinstance(source, PreTrainedModel):
        name = type(source).__name__
        _check_config(source.config.to_dict(), name)
        return _take_apart(source, name, set(), [])
    if not isinstance(source, str | os.PathLike):
        raise ValueError(
            f"A source is a folder, a name on the Hub or a transformers model, not a {type(source).__name__}."
        )
    name = os.fspath(source)
    config = read_config(name)
    config.dtype = None  # the weights' own type is kept, whatever the config says
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its report of missing weights is replaced by ours
    try:
        # Weights of another shape pass here, since transformers' own error does not name them.
        model, info = AutoModelForMaskedLM.from_pretrained(
            name, config=config, dtype="auto", ignore_mismatched_sizes=True, output_loading_info=True
        )
    except _LOADING_ERRORS as error:
        # Torch's own message advises loading a file that is no pickle without its safeguard.
        is_garbage = isinstance(error, pickle.UnpicklingError)
        reason = "a file is damaged, or does not hold weights" if is_garbage else _first_line(error)
        raise ValueError(
            f"The weights of {name} cannot be loaded ({reason}). The folder must hold the whole file "
            "or files that `save_pretrained` wrote: copy or download it again."
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    if info["mismatched_keys"]:
        first, has, wanted = min(info["mismatched_keys"])
        others = len(info["mismatched_keys"]) - 1
        raise ValueError(
            f"{name}: {first} has the shape {tuple(has)} in the file, but {tuple(wanted)} by config.json"
            f"{f' (and {others} more differ)' if others else ''}: files and config do not belong together."
        )
    return _take_apart(model, name, set(info["missing_keys"]), sorted(info["unexpected_keys"]))


def read_config(name: str) -> PreTrainedConfig:
    """The config of a source, a folder or a name on the Hub.

    Raises:
        ValueError: It cannot be read, or is that of a model that cannot be mapped.
    """
    _check_config(_read_values(name), name)
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise ValueError(f"The config of {name} cannot be read ({_first_line(error)}).") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _read_values(name: str) -> dict[str, Any]:
    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "config.json")):
        raise ValueError(
            f"{name} is no checkpoint: it holds no config.json. Name a folder that `save_pretrained` wrote, or a "
            "model on the Hub."
        )
    try:
        values, _ = PreTrainedConfig.get_config_dict(name)
    except (OSError, ValueError, HFValidationError, HfHubHTTPError) as error:
        reason = _first_line(error)
        if os.path.isdir(name):
            raise ValueError(f"The config.json of {name} cannot be read ({reason}).") from error
        raise ValueError(f"There is no model {name!r}, neither as a folder nor on the Hub ({reason}).") from error
    if not values:
        raise ValueError(f"There is no model {name!r}: neither a folder with a config.json, nor a name on the Hub.")
    return values


def _check_config(config: dict[str, Any], name: str) -> None:
    """Refuse by its config what has another architecture.

    Raises:
        ValueError: What it is, and what to give instead.
    """
    kind, known = config.get("model_type"), layouts()
    wanted = f"A warm start needs an encoder of RoBERTa's architecture: {', '.join(known)}."
    if not kind:
        raise ValueError(f"{name}: its config names no `model_type`. {wanted}")
    if kind in FAMILIES and kind not in known:
        raise ValueError(
            f"{name} is a {kind} model already: load it with `from_pretrained`, and train it further. {wanted}"
        )
    if config.get("is_encoder_decoder"):
        raise ValueError(f"{name} is an encoder-decoder ({kind}). {wanted}")
    if config.get("is_decoder"):
        raise ValueError(
            f"{name} is a decoder (`is_decoder` is true in its config): its tokens have learned to look back only. "
            f"{wanted}"
        )
    if kind not in known:
        is_decoder = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
        what = "a decoder" if is_decoder else "another architecture"
        raise ValueError(f"{name} is a {kind} model, {what}. {wanted}")
    if config.get("add_cross_attention"):
        raise ValueError(f"{name} has cross-attention (`add_cross_attention`), which an encoder cannot use. {wanted}")
    positions = config.get("position_embedding_type") or "absolute"
    if positions not in ("absolute", "learned", "sinusoidal"):
        raise ValueError(
            f"{name} has relative positions (`position_embedding_type` is {positions!r}), which are part of its "
            "attention. Choose a checkpoint with absolute positions."
        )
    if config.get("quantization_config"):
        raise ValueError(f"{name} is quantized. Give the checkpoint that it was made from.")
    if config.get("pad_token_id") is None and "pad_token_id" in config:
        raise ValueError(f"{name}: its config has no `pad_token_id`. Set it to the tokenizer's.")


def _take_apart(model: PreTrainedModel, name: str, missing: set[str], ignored: list[str]) -> LoadedSource:
    """The parameters of a model, without those that its files did not hold.

    Raises:
        ValueError: A part of the encoder, or of the head, is not there; layers that the config does not count.
    """
    _check_layers(model.config.num_hidden_layers, [*dict(model.named_parameters()), *ignored], name)
    layout, prefix = layouts()[model.config.model_type], model.base_model_prefix + "."
    tensors, names = {}, {}
    for own, tensor in model.named_parameters(remove_duplicate=False):
        if own in missing:
            continue
        if tensor.is_meta or not tensor.is_floating_point():
            raise ValueError(f"{name}: {own} is not in memory as a floating-point tensor. Load the model plainly.")
        tensors[own.removeprefix(prefix)] = tensor.detach()
        names[own.removeprefix(prefix)] = own
    head = {own for owns in layout.head.values() for own in owns}
    has_head = layout.head["lm_head.dense.weight"][0] in tensors
    lacking = sorted(own for own in missing if own.startswith(prefix) or (has_head and own in head))
    # Where the decoder has no bias of its own in the files, the head's is meant.
    lacking = [own for own in lacking if own not in layout.head["lm_head.bias"] or not _any_bias(layout, tensors)]
    if lacking:
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        raise ValueError(
            f"{name} lacks weights of its own architecture ({', '.join(lacking[:3])}{more}): files and config do not "
            "belong together."
        )
    if not has_head:
        # In memory a tied decoder exists all the same.
        embedding = tensors["embeddings.word_embeddings.weight"].data_ptr()
        parts = {own: tensor for own, tensor in tensors.items() if own in head}
        ignored = [*ignored, *(own for own, tensor in parts.items() if tensor.data_ptr() != embedding)]
        tensors = {own: tensor for own, tensor in tensors.items() if own not in head}
    return LoadedSource(model.config, layout, tensors, names, ignored)


def _check_layers(count: int, names: list[str], name: str) -> None:
    """Refuse layers beyond those of the config: they were trained, and would be dropped.

    Raises:
        ValueError: How many there are, and how many the config says.
    """
    found = [int(match[1]) for own in names if (match := re.search(r"\bencoder\.layer\.(\d+)\.", own))]
    if max(found, default=0) >= count:
        raise ValueError(
            f"{name} has {max(found) + 1} layers, but {count} by `num_hidden_layers` of its config: files and config "
            "do not belong together."
        )


def _any_bias(layout: Layout, tensors: dict[str, Tensor]) -> bool:
    return any(own in tensors for own in layout.head["lm_head.bias"])
