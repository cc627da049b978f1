"""Opens a checkpoint of the authors' fairseq code: the file in an archive or a folder, its tensors, its arguments.

A checkpoint is a pickle, and a pickle can run code. Only tensors, plain values and `argparse.Namespace` are read from
it; anything else is refused with its name.
"""

import argparse
import dataclasses
import errno
import lzma
import os
import pickle
import re
import shutil
import tarfile
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from shared import UserError
from torch import Tensor

# Names of a model file, in the order in which they are preferred.
MODEL_NAMES = ("model.pt", "checkpoint_best.pt", "checkpoint_last.pt")
# Files beside it that matter; `input0` and `label` are folders of fairseq's binarized tasks.
DICTIONARY, LABELS = "dict.txt", "label/dict.txt"
DICTIONARIES = (DICTIONARY, f"input0/{DICTIONARY}")
BPE_NAMES = ("encoder.json", "vocab.bpe", "vocab.json", "merges.txt")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Arguments whose absence is worth a word: of the other options, it is what files hold for "no".
TELLING = (
    *("encoder_attention_heads", "activation_fn", "pooler_activation_fn", "fix_projection_length"),
    *("dropout", "attention_dropout", "activation_dropout", "pooler_dropout"),
)
NORM = re.compile(r"(layer_norm|layernorm)\.weight$")
HEADS = "classification_heads."
ROBERTA = (
    "It is a RoBERTa checkpoint, not one of Luna. transformers has RoBERTa's models and tokenizer ready "
    "(FacebookAI/roberta-base on the Hub), and conversion/roberta_to_luna.py makes a Luna from them."
)


@dataclasses.dataclass(frozen=True)
class Options:
    """The authors' arguments that a model depends on, under their names and with their defaults."""

    arch: str | None = None
    task: str | None = None
    criterion: str | None = None
    encoder_attention_heads: int = 12
    activation_fn: str = "gelu"
    pooler_activation_fn: str = "tanh"
    dropout: float = 0.1
    attention_dropout: float = 0.1
    activation_dropout: float = 0.0
    pooler_dropout: float = 0.0
    fix_projection_length: bool = False
    untie_weights_luna: bool = False
    regression_target: bool = False


@dataclasses.dataclass(frozen=True)
class Original:
    """A checkpoint of the authors' code.

    Args:
        name: file name, with that of its archive or folder.
        weights: tensors as stored, under names that all begin with `encoder.` or `classification_heads.`.
        options: the arguments it was trained with.
        assumed: options that the file does not have, so that the authors' defaults stand for them.
        norm_offset: what has to be added to the weight of every LayerNorm: 0, or 1 where the file holds `weight - 1`.
        norm_mean: the median over the norms of the mean of their weights, as stored.
        norm_detected: whether the offset was found out, and not given.
        left_out: entries of the file besides the tensors and the arguments.
        dictionary, labels, bpe: `dict.txt`, `label/dict.txt`, and the folder of GPT-2's files, if they are there.
    """

    name: str
    weights: dict[str, Tensor]
    options: Options
    assumed: tuple[str, ...] = ()
    norm_offset: float = 0.0
    norm_mean: float = 1.0
    norm_detected: bool = True
    left_out: tuple[str, ...] = ()
    dictionary: Path | None = None
    labels: Path | None = None
    bpe: Path | None = None


def layers(weights: Mapping[str, Tensor]) -> int:
    """Number of layers."""
    found = {int(match[1]) for name in weights if (match := re.search(r"sentence_encoder\.layers\.(\d+)\.", name))}
    if found != set(range(len(found))):
        raise UserError(f"The layers of the checkpoint are numbered {sorted(found)}: some are missing.")
    return len(found)


def heads(weights: Mapping[str, Tensor]) -> list[str]:
    """Names of the classification heads, in the order of the file."""
    return list(dict.fromkeys(name.split(".")[1] for name in weights if name.startswith(HEADS)))


@contextmanager
def open_original(
    source: Path,
    checkpoint: str | None = None,
    layer_norm: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Iterator[Original]:
    """Open an archive (.zip, .tar, .tar.gz), a folder, or a checkpoint file.

    Args:
        source: where it is.
        checkpoint: which of several model files, by its name.
        layer_norm: what the file holds of a LayerNorm: `"plain"` weights, or `"offset"` for weights less 1. Found out
            unless given.
        overrides: arguments of the authors that take the place of those in the file.

    Raises:
        UserError: It is missing, damaged, ambiguous, or not a Luna; the message names the fix.
    """
    try:
        place = tempfile.TemporaryDirectory(prefix="luna-")
    except OSError as error:
        raise UserError(
            f"There is no room for temporary files ({error.strerror or error}). Set the variable TMPDIR to a folder "
            "that can be written."
        ) from error
    with place as unpacked:
        try:
            original = _open(source, Path(unpacked), checkpoint, layer_norm, overrides)
        except OSError as error:
            raise UserError(f"{error.filename or source} cannot be read ({error.strerror or error}).") from error
        yield original


def _open(
    source: Path,
    unpacked: Path,
    checkpoint: str | None,
    layer_norm: str | None,
    overrides: Mapping[str, Any] | None,
) -> Original:
    if not source.exists():
        raise UserError(f"There is no {source}. SOURCE is an archive, a folder, or a checkpoint file.")
    if not os.access(source, os.R_OK | os.X_OK if source.is_dir() else os.R_OK):
        raise UserError(f"{source} cannot be read: you have no permission to.")
    if source.is_dir():
        model = _choose(_listed(source), checkpoint, source)
        return read(source, model, f"{source.resolve().name}/{model}", layer_norm, overrides)
    if not _is_checkpoint(source):
        model = _unpack(source, unpacked, checkpoint)
        return read(unpacked, model, f"{source.name}/{model}", layer_norm, overrides)
    if checkpoint not in (None, source.name):
        raise UserError(f"SOURCE is the checkpoint {source.name}, and --checkpoint names {checkpoint}: leave it out.")
    return read(source.parent, source.name, source.name, layer_norm, overrides)


def read(
    folder: Path, model: str, name: str, layer_norm: str | None = None, overrides: Mapping[str, Any] | None = None
) -> Original:
    """The checkpoint in a file of a folder; see `open_original`.

    Raises:
        UserError: As there.
    """
    state = _load(folder / model, name)
    weights = official_names(_tensors(state, name), name)
    options, assumed = _options(state, overrides or {})
    offset, mean = _norm_offset(weights, layer_norm)
    beside = [(folder / model).parent, folder]
    bpe = next((place for place in beside if any((place / file).is_file() for file in BPE_NAMES)), None)
    return Original(
        name=name,
        weights=weights,
        options=options,
        assumed=assumed,
        norm_offset=offset,
        norm_mean=mean,
        norm_detected=layer_norm is None,
        left_out=tuple(str(key) for key in state if key not in ("model", "args", "cfg")) if "model" in state else (),
        dictionary=_beside(beside, *DICTIONARIES),
        labels=_beside(beside, LABELS),
        bpe=bpe,
    )


def _beside(places: list[Path], *names: str) -> Path | None:
    return next((place / name for place in places for name in names if (place / name).is_file()), None)


# ---- finding the file ----


def _listed(folder: Path) -> list[str]:
    """Files of a folder and of the folders in it that may be read."""
    inner = [path for path in folder.iterdir() if path.is_dir() and os.access(path, os.R_OK | os.X_OK)]
    paths = [*folder.iterdir(), *(path for place in inner for path in place.iterdir())]
    return sorted(path.relative_to(folder).as_posix() for path in paths if path.is_file())


def _choose(names: list[str], checkpoint: str | None, source: Path) -> str:
    """The model file among the files of an archive or a folder."""
    models = [name for name in names if name.endswith(".pt") and not _is_junk(name)]
    if checkpoint is not None:
        found = [name for name in models if checkpoint in (name, PurePosixPath(name).name)]
    else:
        by_name = ([name for name in models if PurePosixPath(name).name == known] for known in MODEL_NAMES)
        found = next((names for names in by_name if names), models)
    if len(found) == 1:
        return found[0]
    if not models:
        raise UserError(_nothing_found(names, source))
    what = f"no checkpoint {checkpoint}" if checkpoint and not found else "several checkpoints"
    raise UserError(f"{source} holds {what}: {', '.join(found or models)}. Choose one with --checkpoint NAME.")


def _nothing_found(names: list[str], source: Path) -> str:
    if any(PurePosixPath(name).name == "config.json" for name in names):
        return (
            f"{source} is a checkpoint of transformers and not one of fairseq. It needs no conversion; verify.py takes "
            "it as its first argument."
        )
    message = f"{source} holds no checkpoint ({', '.join(MODEL_NAMES)} or another .pt file), nor do the folders in it."
    archives = [name for name in names if name.endswith((".zip", ".tar", ".tar.gz", ".tgz"))]
    deeper = [path.parent.relative_to(source).as_posix() for path in source.rglob("*.pt")] if source.is_dir() else []
    if found := [*archives, *dict.fromkeys(sorted(deeper))]:
        message += f" But there is {', '.join(found[:3])}: name {'that' if len(found) == 1 else 'one'} as SOURCE."
    return message


def _is_junk(name: str) -> bool:
    """What macOS puts into archives."""
    return "__MACOSX" in name or PurePosixPath(name).name.startswith("._")


def _is_zip(path: Path) -> bool:
    """By its first bytes: `zipfile.is_zipfile` also takes a tar archive with a zip file at its end for one."""
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _is_checkpoint(path: Path) -> bool:
    """Whether a file is a checkpoint itself and not an archive with one in it; newer ones are zip files, too."""
    if path.suffix == ".pt" or not _is_zip(path):
        return path.suffix == ".pt"
    with _damage_told(path), zipfile.ZipFile(path) as archive:
        return any(PurePosixPath(name).name == "data.pkl" for name in archive.namelist())


@contextmanager
def _damage_told(path: Path) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:  # a password, a rare compression
        raise UserError(f"{path} cannot be unpacked here ({error}). Unpack it and name the folder.") from error
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, KeyError, OSError, lzma.LZMAError, zlib.error) as error:
        raise UserError(f"{path} is damaged or cut short ({error}). Download it again.") from error


def _unpack(source: Path, folder: Path, checkpoint: str | None) -> str:
    """Unpack the model file of an archive, and the small files beside it; the model's name."""
    with _damage_told(source):
        if _is_zip(source):
            with zipfile.ZipFile(source) as archive:
                return _unpack_members(archive.namelist(), archive.open, source, folder, checkpoint)
        if tarfile.is_tarfile(source):
            with tarfile.open(source) as archive:
                names = [member.name for member in archive if member.isfile()]
                model = _unpack_members(names, archive.extractfile, source, folder, checkpoint)
                while archive.fileobj.read(1 << 20):  # a compressed stream has its checksum at the end
                    pass
                return model
    if source.suffix == ".txt":
        raise UserError(f"{source} is no archive and no checkpoint. Name the folder it is in.")
    with open(source, "rb") as file:
        start = file.read(64).lstrip().lower()
    if start.startswith((b"<!doctype", b"<html")):
        raise UserError(
            f"{source} is a web page and no archive: the site asked for a confirmation. Download it in a browser."
        )
    raise UserError(
        f"{source} is no archive that can be read: it is cut short, or neither .zip nor .tar.gz. Download it again."
    )


def _unpack_members(
    names: list[str], opener: Callable[[str], Any], source: Path, folder: Path, checkpoint: str | None
) -> str:
    model = _choose(names, checkpoint, source)
    small = (DICTIONARY, *BPE_NAMES)
    for name in names:
        if name != model and (PurePosixPath(name).name not in small or _is_junk(name)):
            continue
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{source} holds a file outside itself ({name}): do not use it.")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with opener(name) as packed, open(path, "wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise
            raise UserError(
                f"{source} cannot be unpacked in {folder.parent} ({error.strerror or error}). Set the variable TMPDIR "
                "to a folder with more room, or unpack it yourself and name the folder."
            ) from error
    return model


# ---- reading it ----


def _load(path: Path, name: str) -> dict[str, Any]:
    """The pickle, with nothing in it but tensors, plain values and `argparse.Namespace`."""
    _check_sums(path, name)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of the pickle's protocol; the error says it
            # Newer files are mapped: of a file with the optimizer's state, only the weights then need memory.
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except pickle.UnpicklingError as error:
        if match := re.search(r"GLOBAL (\S+)", str(error)):
            plain = "`cfg`, made plain by OmegaConf.to_container," if "omegaconf" in match[1] else "`args`"
            raise UserError(
                f"{name} was not read: it wants to run `{match[1]}`, and a pickle that runs code can do anything. Only "
                "tensors, plain values and argparse.Namespace are read. If you trust the file, load it where it was "
                f"made and save its {plain} and `model` alone."
            ) from error
        raise UserError(
            f"{name} is damaged, or a pickle with instructions that are not read here, as those of newer protocols. "
            "Download or copy it again; or load it where it was made, if you trust it, and save it again with "
            "torch.save."
        ) from error
    except PermissionError as error:
        raise UserError(f"{name} cannot be read: you have no permission to.") from error
    # What a file that is cut short raises depends on where it is cut.
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].split(". ")[0]
        raise UserError(f"{name} is damaged or cut short ({reason}). Download or copy it again.") from error
    if not isinstance(state, dict):
        raise UserError(f"{name} holds {type(state).__name__} and no checkpoint of fairseq.")
    return state


def _check_sums(path: Path, name: str) -> None:
    """Refuse a zip file with a record that is not what its checksum says, which PyTorch does not look at."""
    if os.access(path, os.R_OK) and _is_zip(path):
        with _damage_told(Path(name)), zipfile.ZipFile(path) as archive:
            if (record := archive.testzip()) is not None:
                raise UserError(
                    f"{name} is damaged (in its record {record}, by its checksum). Download or copy it again."
                )


def _tensors(state: Mapping[str, Any], name: str) -> dict[str, Tensor]:
    """The model's state: the entry `model`, or the whole file."""
    model = state.get("model", state)
    if not isinstance(model, dict) or not any(isinstance(value, Tensor) for value in model.values()):
        raise UserError(f"{name} holds no tensors under `model`: it is no checkpoint of fairseq.")
    odd = [str(key) for key, value in model.items() if not (isinstance(key, str) and isinstance(value, Tensor))]
    if odd:
        raise UserError(f"{name} holds things that are no tensors under `model`: {', '.join(odd[:5])}.")
    odd = [key for key, value in model.items() if value.dtype not in DTYPES or value.layout != torch.strided]
    if odd:
        raise UserError(
            f"{name} holds tensors of a type that no Luna has (integers, 8 bits, sparse): {', '.join(odd[:5])}."
        )
    return model


def official_names(weights: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The tensors under their full names: `encoder.` put before them where it is absent or called `decoder.`.

    Raises:
        UserError: It is not a masked language model of Luna.
    """
    inner = next((key for key in weights if re.fullmatch(r"(.*\.)?embed_tokens\.weight", key)), None)
    places = {
        "encoder.sentence_encoder.": "encoder.",
        "decoder.sentence_encoder.": "decoder.",
        "sentence_encoder.": "",
        "": "",
    }
    prefix = None if inner is None else inner.removesuffix("embed_tokens.weight")
    if prefix is None or prefix not in places:
        raise UserError(f"{name} is not a masked language model of Luna ({_some(weights)}).")
    if f"{prefix}projected_embeddings" not in weights:
        is_roberta = any(re.search(r"layers\.\d+\.self_attn\.(in_proj|k_proj)", key) for key in weights)
        what = ROBERTA if is_roberta else "It is not a Luna, and cannot be converted."
        raise UserError(f"{name} has no packed sequence (`projected_embeddings`). {what}")
    named = {}
    for key, value in weights.items():
        if key.startswith(HEADS):
            full = key
        elif prefix == "" and not key.startswith("lm_head."):
            full = f"encoder.sentence_encoder.{key}"
        else:
            full = f"encoder.{key.removeprefix(places[prefix])}"
        if full in named:
            raise UserError(f"{name} holds `{full}` twice, with and without a prefix.")
        named[full] = value
    return named


def _some(weights: Mapping[str, Tensor]) -> str:
    names = list(weights)
    return f"its tensors are {', '.join(names[:3])}, ..." if len(names) > 3 else f"its tensors are {', '.join(names)}"


def _options(state: Mapping[str, Any], overrides: Mapping[str, Any]) -> tuple[Options, tuple[str, ...]]:
    """The arguments, and the names of those for which a default stands."""
    fields = {field.name: field for field in dataclasses.fields(Options)}
    if unknown := sorted(set(overrides) - set(fields)):
        raise UserError(f"--override knows no argument {', '.join(unknown)}. It knows {', '.join(sorted(fields))}.")
    given = _arguments(state)
    arch = str(given.get("arch") or "")
    # The only default that a tensor does not tell and that the authors' large models set otherwise.
    defaults = {"encoder_attention_heads": 16} if "large" in arch else {}
    present = {name: given[name] for name in fields if given.get(name) is not None}
    values = {**defaults, **present, **overrides}
    for name, value in values.items():
        kind = type(fields[name].default)
        if kind in (int, float) and type(value) in (int, float) and _is_whole_as(kind, value):
            values[name] = kind(value)
        elif kind is not type(None) and type(value) is not kind:
            raise UserError(f"The argument `{name}` is {value!r}, and should be of the type {kind.__name__}.")
    assumed = tuple(name for name in TELLING if name not in present and name not in overrides)
    return Options(**values), assumed


def _is_whole_as(kind: type, value: float) -> bool:
    try:
        return kind(value) == value
    except (OverflowError, ValueError):  # infinity and what is no number, as int
        return False


def _arguments(state: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by name: the namespace `args` of older files, or the sections of `cfg` in newer ones."""
    if state.get("args") is not None:
        return _plain(state["args"])
    sections = _plain(state.get("cfg") or {})
    arguments: dict[str, Any] = {}
    for section, choice in (("task", "task"), ("criterion", "criterion"), ("model", "arch")):
        values = _plain(sections.get(section) or {})
        arguments |= {name: value for name, value in values.items() if name != "_name"}
        if values.get("_name"):
            arguments.setdefault(choice, values["_name"])
    return arguments


def _plain(values: Any) -> dict[str, Any]:
    if isinstance(values, argparse.Namespace):
        return vars(values)
    if isinstance(values, dict):
        return values
    raise UserError(f"The arguments of the checkpoint are a {type(values).__name__}, which is not read.")


def _norm_offset(weights: Mapping[str, Tensor], layer_norm: str | None) -> tuple[float, float]:
    """What to add to the weights of the norms, and the median of their means as stored."""
    means = [tensor.double().mean() for name, tensor in weights.items() if NORM.search(name)]
    if not means:
        raise UserError("The checkpoint has no LayerNorm: it is not a masked language model of Luna.")
    median = torch.stack(means).median().item()
    if layer_norm is None and not abs(median - 0.5) > 0.1:
        raise UserError(
            f"It cannot be told whether the file holds the weights of the LayerNorms or these less 1: the median of "
            f"their means is {median:.2f}. Files from before 2023 hold the weights: --layer-norm plain; else "
            "--layer-norm offset."
        )
    offset = median < 0.5 if layer_norm is None else layer_norm == "offset"
    return float(offset), median
