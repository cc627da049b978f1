"""What a sentence-transformers model stores beside its transformer."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors.torch import load_file

from ..convert.files import find
from ..scripting import UserError, reason, write_json

# Modules that a conversion keeps; the first two are required, in this order.
KINDS = ("Transformer", "Pooling", "Dense", "Normalize")

# Names that its versions gave to the transformer's settings, today's first.
TRANSFORMER_CONFIGS = (
    "sentence_bert_config.json",
    *(f"sentence_{kind}_config.json" for kind in ("roberta", "distilbert", "camembert", "xlm-roberta")),
)

# Ways to pool, by the fields that a pooling's config had for them in earlier versions.
POOLINGS = {"mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max"}

_MOST_TOKENS = 10**9

# Settings of the transformer that a conversion keeps, and those that change what it reads.
_LENGTHS = ("query_length", "document_length")
_CHANGED = (
    *("processing_kwargs", "query_expansion", "processor_kwargs", "model_kwargs", "config_kwargs"),
    *("tokenizer_args", "model_args", "config_args"),  # their earlier names
)

SETTINGS, WEIGHTS = "config_sentence_transformers.json", "model.safetensors"


def _read_json(name: str, *parts: str) -> Any:
    """The content of a file of a folder or Hub name, or `None` if there is none."""
    file = "/".join(filter(None, parts))
    path = find(name, file)
    try:
        return None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"The {file} of {name} cannot be read ({reason(error)}).") from error


def find_transformer(name: str) -> str:
    """Find the transformer inside a sentence-transformers model.

    Args:
        name: folder or Hub name of any model.

    Returns:
        The subfolder with the transformer's config and weights: the first module's. Empty if they are not in a
        subfolder, if there is no such model, or if it is cached without a `modules.json`.

    Raises:
        ValueError: Its `modules.json` cannot be read.
    """
    try:
        modules = _read_json(name, "modules.json")
    except UserError:  # the Hub cannot be reached; if the root has no config either, reading it reports that
        return ""
    return "" if modules is None else _first_path(modules, name)


def _first_path(modules: Any, name: str) -> str:
    try:
        path = modules[0]["path"]
    except (LookupError, TypeError) as error:
        raise ValueError(f"The modules.json of {name} does not list modules.") from error
    if not isinstance(path, str):
        raise ValueError(f"The modules.json of {name} does not name folders.")
    return path


@dataclass(frozen=True)
class SentenceFolder:
    """A sentence-transformers model without its transformer.

    Args:
        modules: the entries of its modules.json, the transformer's first.
        pooling: how it pools states: one of the values of `POOLINGS`.
        lower: whether it lowercases texts before its tokenizer.
        lengths: how many tokens it reads of a query or a document, if that differs, by the name of the setting.
        longest: how many tokens of a text it reads; `None` for all that its transformer can.
        files: what is copied, by the path inside the folder.
        has_dense: whether it projects what it has pooled.
    """

    modules: list[dict[str, Any]]
    pooling: str
    lower: bool
    lengths: dict[str, int]
    longest: int | None
    files: dict[str, str]
    has_dense: bool

    def write(self, folder: Path, max_length: int) -> None:
        """Write everything but the transformer, which belongs into the folder itself.

        Args:
            folder: the folder to fill.
            max_length: longest input of the transformer in tokens.
        """
        for name, path in self.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)
        first, *others = self.modules
        write_json(folder / "modules.json", [{**first, "path": ""}, *others])
        settings = {"max_seq_length": max_length, "do_lower_case": self.lower, **self.lengths}
        write_json(folder / TRANSFORMER_CONFIGS[0], settings)


def read_sentence_folder(name: str) -> SentenceFolder | None:
    """Read a folder or Hub name of sentence-transformers; `None` if it is a plain model.

    Raises:
        ValueError: A file cannot be read.
        UserError: It has modules, settings or a pooling that cannot be kept, or the Hub cannot be reached.
    """
    try:
        modules = _read_json(name, "modules.json")
        return None if modules is None else _read_modules(name, modules)
    except (AttributeError, LookupError, TypeError) as error:  # a value of another type
        raise ValueError(f"{name} has JSON files of another form than sentence-transformers' ({error!r}).") from error


def _read_modules(name: str, modules: list[dict[str, Any]]) -> SentenceFolder:
    subfolder, settings = _first_path(modules, name), {}
    paths, kinds = [module["path"] for module in modules], [_kind(module.get("type", "")) for module in modules]
    if not {*kinds} <= {*KINDS} or kinds[:2] != [*KINDS[:2]] or {*kinds[2:]} & {*KINDS[:2]}:
        raise UserError(
            f"{name} has sentence-transformers modules that cannot be kept ({', '.join(kinds)}). Name a model with a "
            f"Transformer, a Pooling, and optionally {' and '.join(KINDS[2:])}."
        )
    if any(PurePosixPath(path).name != path for path in paths):
        raise UserError(f"The modules.json of {name} names files outside their folders. Name another model.")
    for config in TRANSFORMER_CONFIGS:
        settings = settings or _read_json(name, subfolder, config) or {}
    if changed := [setting for setting in _CHANGED if settings.get(setting)]:
        raise UserError(f"{name} has the setting {changed[0]}, which cannot be kept. Name a model without it.")
    own = [SETTINGS, *(f"{path}/{file}" for path in paths[1:] for file in ("config.json", WEIGHTS))]
    files = {file: place for file in own if (place := find(name, file))}
    for path, kind in zip(paths, kinds, strict=True):
        if kind == "Dense" and f"{path}/{WEIGHTS}" not in files:
            raise UserError(f"{name} has no {path}/{WEIGHTS}. Save the model again with sentence-transformers.")
        weights = load_file(files[f"{path}/{WEIGHTS}"]) if kind == "Dense" else {}
        if not all(values.isfinite().all() for values in weights.values()):
            raise UserError(f"{path}/{WEIGHTS} of {name} holds NaN or infinity. Use an earlier checkpoint.")
    longest = settings.get("max_seq_length")
    if longest is None:  # recent versions store it with the tokenizer, where others store a huge number for none
        stored = (_read_json(name, subfolder, "tokenizer_config.json") or {}).get("model_max_length")
        longest = int(stored) if stored and stored < _MOST_TOKENS else None
    if longest is not None and (type(longest) is not int or longest < 1):
        raise ValueError(f"{name} has a `max_seq_length` of {longest!r}, which is no number of tokens.")
    pooling, lower = _pooling(name, paths[1]), bool(settings.get("do_lower_case"))
    lengths = {setting: settings[setting] for setting in _LENGTHS if settings.get(setting)}
    return SentenceFolder(modules, pooling, lower, lengths, longest, files, "Dense" in kinds)


def _kind(type_name: str) -> str:
    """The class of a module of sentence-transformers; the whole type of any other module."""
    return type_name.rpartition(".")[2] if type_name.startswith("sentence_transformers.") else type_name


def _pooling(name: str, path: str) -> str:
    """How a model pools."""
    config = _read_json(name, path, "config.json") or {}
    chosen, prefix = config.get("pooling_mode"), "pooling_mode_"
    if not chosen:
        old = [field.removeprefix(prefix) for field, value in config.items() if field.startswith(prefix) and value]
        chosen = [POOLINGS.get(mode, mode) for mode in old]
    chosen = [chosen] if isinstance(chosen, str) else chosen
    if len(chosen) != 1 or chosen[0] not in POOLINGS.values():
        raise UserError(f"{name} pools by {' and '.join(chosen)}. Name a model that pools by mean, cls or max.")
    return chosen[0]
