"""PEFT adapters in folders with the config of their model: where the base is, and what the adapter must hold."""

import json
import os
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, cached_file, find_adapter_config_file, is_peft_available

_PLACE = ("cache_dir", "local_files_only", "token")
# Options that a config's `from_pretrained` uses up, but the weights need, too.
_SHARED = (*_PLACE, "force_download", "proxies", "trust_remote_code")


def base_of_adapter(
    cls: type[PreTrainedModel], source: str | os.PathLike | None, options: dict[str, Any]
) -> tuple[str | os.PathLike | None, dict[str, Any], set[str]]:
    """The base of an adapter, options of `from_pretrained` that put the adapter on it, and its tensors by name.

    The model gets the adapter's own config. Transformers would take the config from the base, whose head has other
    labels, or look for the base's weights beside the adapter's config. What is no adapter, or has no config or all
    weights, stays as it is, and so does a model in a subfolder.

    Raises:
        ImportError: peft is not installed.
        OSError: The adapter has no readable weights.
        ValueError: The class has no head, but the adapter's model had one; or the adapter names no base.
    """
    auto = options.get("adapter_kwargs") or {}  # of the Auto classes, which may have replaced the source
    adapter = auto.get("_adapter_model_path", source)
    place = {name: options[name] for name in _PLACE if options.get(name)}
    if options.get("subfolder"):  # not the adapter beside it
        auto = {name: value for name, value in auto.items() if name != "_adapter_model_path"}
        return adapter, {**options, "adapter_kwargs": auto}, set()
    place["revision"] = auto.get("revision") or options.get("revision")
    found = None if adapter is None else find_adapter_config_file(adapter, **place)
    if found is None or _has_weights(adapter):
        return source, options, set()
    if cached_file(adapter, CONFIG_NAME, _raise_exceptions_for_missing_entries=False, **place) is None:
        return source, options, set()
    if not is_peft_available():
        raise ImportError(f"{adapter} is an adapter, which needs the package peft: `pip install peft`.")
    config = options.get("config")
    if config is None:
        shared = {name: options[name] for name in _SHARED if name in options}
        wanted = {**options, "revision": place["revision"]}
        config, options = cls.config_class.from_pretrained(adapter, return_unused_kwargs=True, **wanted)
        options |= shared
    elif isinstance(config, PreTrainedConfig) and _is_of_base(config, cls, source, adapter):
        changes = _overrides(config, {**place, "revision": options.get("revision")})
        config = cls.config_class.from_pretrained(adapter, **place, **changes)
    with open(found, encoding="utf-8") as file:
        stored = json.load(file)
    base = stored.get("base_model_name_or_path")
    if not base:
        raise ValueError(
            f"{adapter} does not name its base model: save the base, and write its path into "
            "`base_model_name_or_path` of adapter_config.json."
        )
    # A collection of folders may be anywhere.
    beside = os.path.join(os.path.dirname(os.path.abspath(adapter)), os.path.basename(base))
    base = beside if os.path.isdir(adapter) and os.path.isdir(beside) and not os.path.isdir(base) else base
    tensors = adapter_tensors(adapter, place)
    start = f"{cls.base_model_prefix}."
    if not hasattr(cls, "base_model_class") and any(name.startswith(start) for name in tensors):
        raise ValueError(
            f"{adapter} is an adapter of a model with a head, which {cls.__name__} lacks: load it with the Auto "
            f"class of its head, or its base, {base}."
        )
    auto = {**auto, "_adapter_model_path": adapter, "revision": place["revision"]}
    return base, {**options, "config": config, "adapter_kwargs": auto, "revision": stored.get("revision")}, tensors


def _has_weights(source: str | os.PathLike) -> bool:
    """Whether a folder holds a whole model, perhaps in shards or as a variant, beside an adapter."""
    names = os.listdir(source) if os.path.isdir(source) else []
    kinds = (".safetensors", ".bin", ".index.json")
    return any(name.startswith(("model.", "pytorch_model.")) and name.endswith(kinds) for name in names)


def _is_of_base(
    config: PreTrainedConfig, cls: type[PreTrainedModel], source: str | os.PathLike, adapter: str | os.PathLike
) -> bool:
    """Whether a config was read from an adapter's base: by a user, or by an Auto class, which put it for the source."""
    is_replaced = config.name_or_path == str(source) != str(adapter)
    return bool(config.name_or_path) and (is_replaced or cls.__name__ not in (config.architectures or ()))


def _overrides(config: PreTrainedConfig, place: dict[str, Any]) -> dict[str, Any]:
    """What a user has changed in a base's config, with Transformers' names of options."""
    base = type(config).from_pretrained(config.name_or_path, **place)
    stock = base.to_dict()
    changed = {name: value for name, value in config.to_dict().items() if value != stock.get(name)}
    if (attention := config._attn_implementation) != base._attn_implementation:
        changed["attn_implementation"] = attention
    return changed


def adapter_tensors(adapter: str | os.PathLike, place: dict[str, Any]) -> set[str]:
    """The tensors of an adapter by the names that its model has for them.

    Raises:
        OSError: There is no such file, or it is damaged.
    """
    file = cached_file(adapter, "adapter_model.safetensors", _raise_exceptions_for_missing_entries=False, **place)
    if file is None:
        raise OSError(f"{adapter} has no adapter_model.safetensors. Save the adapter again with PEFT.")
    try:
        with safe_open(file, "pt") as tensors:
            return {name.removeprefix("base_model.model.") for name in tensors.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise OSError(f"{file} is damaged ({error}). Save the adapter again.") from error


def refuse_random_head(
    model: PreTrainedModel, base: str | os.PathLike, tensors: set[str], options: dict[str, Any]
) -> None:
    """Refuse a head of which neither the base nor an adapter with these tensors has the weights.

    Args:
        model: with the adapter.
        base: the source of its base.
        tensors, options: from `base_of_adapter`.

    Raises:
        ValueError: Such a head.
    """
    name, start = type(model).__name__, f"{model.base_model_prefix}."
    place = {key: options[key] for key in (*_PLACE, "revision") if options.get(key)}
    config = model.config_class.get_config_dict(base, **place)[0]
    if model.base_model is model or name in (config.get("architectures") or ()):
        return
    wrapped = (key for key in model.state_dict() if not key.startswith(start) and "original_module" not in key)
    own = {key.replace(".modules_to_save.default", "").replace(".base_layer", "") for key in wrapped}
    random = own - tensors - model.all_tied_weights_keys.keys()
    if heads := {key.partition(".")[0] for key in random if "lora" not in key}:
        raise ValueError(
            f"{options['adapter_kwargs']['_adapter_model_path']} is an adapter without all weights of "
            f"{', '.join(sorted(heads))} of {name}, which would be random: load it with the Auto class of the head "
            "that it was trained with, or train it with these modules in `modules_to_save`."
        )
