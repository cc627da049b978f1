"""What a sentence-transformers model stores beside its transformer."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ..convert.files import find
from ..scripting import UserError, reason, write_json

# Modules that a conversion keeps; the first two are required, in this order.
KINDS = ("Transformer", "Pooling", "Dense", "Normalize")

# Names that its versions gave to the transformer's settings, today's first.
TRANSFORMER_CONFIGS = (
    "sentence_bert_config.json",
    *(f"sentence_{kind}_config.json" for kind in ("roberta", "distilbert", "camembert", "xlm-roberta")),
)

POOLINGS = ("mean", "cls", "max")

_MOST_TOKENS = 10**9

SETTINGS, WEIGHTS = "config_sentence_transformers.json", "model.safetensors"

# Earlier names of the fields of a pooling's config, without `pooling_mode_` -> today's values of `pooling_mode`.
OLD_POOLINGS = {
    "cls_token": "cls",
    "max_tokens": "max",
    "mean_tokens": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean_tokens": "weightedmean",
    "lasttoken": "lasttoken",
}


def _read_json(name: str, file: str) -> Any:
    """The content of a file of a folder or Hub name, or `None` if there is none.

    Raises:
        ValueError: It cannot be read.
    """
    try:
        path = find(name, file)
    except OSError:  # no model of this name, which reading its config reports
        return None
    try:
        return None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"The {file} of {name} cannot be read ({reason(error)}).") from error


def _read_modules(name: str) -> list[dict[str, Any]] | None:
    """The modules of a sentence-transformers model, at least one, or `None` if there is no such model.

    Raises:
        ValueError: Its `modules.json` cannot be read.
    """
    modules = _read_json(name, "modules.json")
    try:
        if modules is not None:
            first, *others = ({"type": "", **module, "path": module["path"]} for module in modules)
            return [first, *others]
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"The modules.json of {name} cannot be read ({reason(error)}).") from error
    return None


def find_transformer(name: str) -> str:
    """Find the transformer inside a sentence-transformers model.

    Args:
        name: folder or Hub name of any model.

    Returns:
        The subfolder with the transformer's config and weights: the first module's. Empty if they are not in a
        subfolder, or if there is no such model.

    Raises:
        ValueError: Its `modules.json` cannot be read.
    """
    modules = _read_modules(name)
    return modules[0]["path"] if modules else ""


# ---- everything but the transformer ----


@dataclass(frozen=True)
class SentenceFolder:
    """A sentence-transformers model without its transformer.

    Args:
        modules: the entries of its modules.json, the transformer's first.
        pooling: how it pools states: one of `POOLINGS`.
        lower: whether it lowercases texts before its tokenizer.
        longest: how many tokens of a text it reads; `None` for all that its transformer can.
        files: what is copied, by the path inside the folder.
        has_dense: whether it projects what it has pooled.
    """

    modules: list[dict[str, Any]]
    pooling: str
    lower: bool
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
        write_json(folder / TRANSFORMER_CONFIGS[0], {"max_seq_length": max_length, "do_lower_case": self.lower})


def read_sentence_folder(name: str) -> SentenceFolder | None:
    """Read a folder or Hub name of sentence-transformers; `None` if it is a plain model.

    Raises:
        ValueError: A file cannot be read.
        UserError: It has modules or a pooling that cannot be kept.
    """
    modules = _read_modules(name)
    if modules is None:
        return None
    kinds = [_kind(module) for module in modules]
    unknown = [module["type"] for module, kind in zip(modules, kinds, strict=True) if kind not in KINDS]
    if unknown or kinds[:2] != list(KINDS[:2]) or set(kinds[2:]) & set(KINDS[:2]):
        found = unknown[0] if unknown else ", ".join(kinds)
        raise UserError(
            f"{name} has sentence-transformers modules that cannot be kept ({found}). Name a model with a Transformer, "
            f"a Pooling, and optionally {' and '.join(KINDS[2:])}."
        )
    if any(PurePosixPath(module["path"]).name != module["path"] for module in modules):
        raise UserError(f"The modules.json of {name} names files outside their folders. Name another model.")
    subfolder, settings = modules[0]["path"], {}
    for config in TRANSFORMER_CONFIGS:
        settings = settings or _read_json(name, f"{subfolder}/{config}".lstrip("/")) or {}
    files = {}
    for module, kind in zip(modules[1:], kinds[1:], strict=True):
        files |= _files_of(name, module["path"], kind)
    if path := find(name, SETTINGS):
        files[SETTINGS] = path
    longest = settings.get("max_seq_length")
    if longest is None:  # recent versions store it with the tokenizer, where others store a huge number for none
        stored = (_read_json(name, f"{subfolder}/tokenizer_config.json".lstrip("/")) or {}).get("model_max_length")
        longest = int(stored) if stored and stored < _MOST_TOKENS else None
    own = bool(settings.get("do_lower_case")), longest
    return SentenceFolder(modules, _pooling(name, modules[1]["path"]), *own, files, "Dense" in kinds)


def _kind(module: dict[str, Any]) -> str:
    """The class of a module of sentence-transformers; the whole type of any other module."""
    return module["type"].rpartition(".")[2] if module["type"].startswith("sentence_transformers.") else module["type"]


def _files_of(name: str, path: str, kind: str) -> dict[str, str]:
    """What a module has stored."""
    found = {file: find(name, file) for file in (f"{path}/config.json", f"{path}/{WEIGHTS}")}
    if kind == "Dense" and not all(found.values()):
        raise UserError(f"{name} has no {path}/{WEIGHTS}. Save the model again with sentence-transformers.")
    return {file: place for file, place in found.items() if place}


def _pooling(name: str, path: str) -> str:
    """How a model pools.

    Raises:
        UserError: In a way that is not supported.
    """
    config = _read_json(name, f"{path}/config.json") or {}
    chosen = config.get("pooling_mode") or [old for old in OLD_POOLINGS if config.get(f"pooling_mode_{old}")]
    chosen = [chosen] if isinstance(chosen, str) else [OLD_POOLINGS.get(mode, mode) for mode in chosen]
    if len(chosen) != 1 or chosen[0] not in POOLINGS:
        raise UserError(
            f"{name} pools by {' and '.join(chosen) or 'an unknown rule'}. Name a model that pools by mean, cls or max."
        )
    return chosen[0]
