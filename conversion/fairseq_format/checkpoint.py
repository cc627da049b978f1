"""Reading a checkpoint of the authors' fairseq code: the file in an archive or folder, its tensors, its arguments.

A checkpoint is a pickle, and a pickle can run code. Only tensors, plain values and `argparse.Namespace` are loaded;
anything else is refused by name.
"""

import argparse
import ast
import errno
import lzma
import pickle
import re
import tarfile
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from luna_hf.scripting import UserError, reason

from .arguments import MASKED_LM, TRANSLATION, complete
from .names import HEADS, SENTENCE_ENCODER, is_norm, shift_norms

MODEL_NAMES = ("model.pt", "checkpoint_best.pt", "checkpoint_last.pt")  # in order of preference
# `input0` and `label` are folders of fairseq's binarised tasks.
DICTIONARY, LABELS = "dict.txt", "label/dict.txt"
DICTIONARIES = (DICTIONARY, f"input0/{DICTIONARY}")
BPE_NAMES = ("encoder.json", "vocab.bpe", "vocab.json", "merges.txt")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Original:
    """A checkpoint of the authors' code."""

    name: str  # of the file, with its archive or folder
    weights: dict[str, Tensor]  # by full names; LayerNorm weights without an offset
    options: argparse.Namespace  # the arguments of the training run, see `arguments.complete`
    dtype: torch.dtype = torch.float32  # of the tensors; of several types, one that holds them all
    norm_offset: float = 0.0  # what was added to every LayerNorm weight: 0, or 1 where the file stores `weight - 1`
    left_out: tuple[str, ...] = ()  # entries of the file other than tensors and arguments
    dictionary: Path | None = None  # dict.txt, or dict.de.txt of the source language
    target_dictionary: Path | None = None  # dict.en.txt of the target language
    labels: Path | None = None  # label/dict.txt
    bpe: Path | None = None  # the folder of GPT-2's files

    @property
    def kind(self) -> str:
        """`MASKED_LM` or `TRANSLATION`."""
        return kind_of(self.weights)

    @property
    def encoder(self) -> str:
        """What the names of the encoder's tensors begin with."""
        return "encoder." if self.kind == TRANSLATION else SENTENCE_ENCODER

    def heads(self) -> list[str]:
        """Names of the classification heads, in the order of the file."""
        return list(dict.fromkeys(name.split(".")[1] for name in self.weights if name.startswith(HEADS)))


def kind_of(weights: Mapping[str, Tensor]) -> str:
    """`MASKED_LM` or `TRANSLATION`."""
    is_translation = "decoder.layers.0.encoder_attn.pq_proj.weight" in weights
    return TRANSLATION if is_translation and "encoder.projected_embeddings" in weights else MASKED_LM


# ---- the command line ----


def add_reading_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `open_checkpoint` reads."""
    add = parser.add_argument
    add("--checkpoint", metavar="NAME", help="model file to read, if an archive or folder holds several")
    about = "LayerNorm weights as stored: plain, or less 1 (the authors' code since 2023); detected by default"
    add("--layer-norm", choices=("plain", "offset"), help=about)
    about = "replace an argument of the training run, for example encoder_attention_heads=12"
    add("--override", action="append", metavar="NAME=VALUE", default=[], help=about)


@contextmanager
def open_checkpoint(
    source: Path, checkpoint: str | None = None, layer_norm: str | None = None, override: Sequence[str] = ()
) -> Iterator[Original]:
    """Open an archive (.zip, .tar, .tar.gz), a folder or a checkpoint file, with the options above.

    Raises:
        UserError: It is missing, damaged, ambiguous or not a Luna.
    """
    if not source.exists():
        raise UserError(f"{source} does not exist. SOURCE is an archive, a folder or a checkpoint file.")
    with tempfile.TemporaryDirectory(prefix="luna-") as unpacked:
        try:
            original = _read(*_locate(source, Path(unpacked), checkpoint), layer_norm, dict(map(_override, override)))
        except OSError as error:
            raise UserError(
                f"{error.filename or source} cannot be read or unpacked ({error.strerror or error}). If the disk of "
                f"{tempfile.gettempdir()} is full, set TMPDIR to another folder."
            ) from error
        yield original


def _override(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"--override {text} must have the form NAME=VALUE.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):  # a word, such as gelu
        return name, value


def _read(folder: Path, model: str, name: str, layer_norm: str | None, overrides: Mapping[str, Any]) -> Original:
    """The checkpoint in the file `model` of a folder, reported as `name`."""
    state = _load(folder / model, name)
    weights = full_names(_tensors(state, name), name)
    options, offset = complete(kind_of(weights), _arguments(state), overrides), _norm_offset(weights, layer_norm)
    places = [(folder / model).parent, folder]

    def beside(*files: str) -> Path | None:
        return next((place / file for place in places for file in files if (place / file).is_file()), None)

    bpe = beside(*BPE_NAMES)
    languages = [getattr(options, f"{side}_lang", "") for side in ("source", "target")]
    return Original(
        name=name,
        weights=shift_norms(weights, offset),
        options=options,
        dtype=reduce(torch.promote_types, {tensor.dtype for tensor in weights.values()}),
        norm_offset=offset,
        left_out=tuple(str(key) for key in state if key not in ("model", "args", "cfg")) if "model" in state else (),
        dictionary=beside(f"dict.{languages[0]}.txt") if languages[0] else beside(*DICTIONARIES),
        target_dictionary=beside(f"dict.{languages[1]}.txt"),
        labels=beside(LABELS),
        bpe=bpe.parent if bpe else None,
    )


# ---- finding the file ----


def _locate(source: Path, unpacked: Path, checkpoint: str | None) -> tuple[Path, str, str]:
    """Folder and name of the model file, and the name to report; archives are unpacked to `unpacked`."""
    if source.is_file() and _is_checkpoint(source):
        if checkpoint not in (None, source.name):
            raise UserError(f"--checkpoint {checkpoint} does not apply to the file {source.name}. Leave it out.")
        return source.parent, source.name, source.name
    if source.is_file():
        _unpack(source, unpacked)
    folder = source if source.is_dir() else unpacked
    paths = [path for pattern in ("*", "*/*") for path in folder.glob(pattern) if path.is_file()]
    model = _choose(sorted(path.relative_to(folder).as_posix() for path in paths), checkpoint, source)
    return folder, model, f"{source.resolve().name}/{model}"


def _choose(names: list[str], checkpoint: str | None, source: Path) -> str:
    """The model file among the files of an archive or folder."""
    models = [name for name in names if name.endswith(".pt") and "/._" not in f"/{name}"]  # of macOS
    if not models:
        hint = " It is a transformers checkpoint." if any(name.endswith("config.json") for name in names) else ""
        raise UserError(f"{source} holds no checkpoint ({', '.join(MODEL_NAMES)} or another .pt file).{hint}")
    if checkpoint is not None:
        found = [name for name in models if checkpoint in (name, PurePosixPath(name).name)]
    else:
        by_name = ([name for name in models if PurePosixPath(name).name == known] for known in MODEL_NAMES)
        found = next((names for names in by_name if names), models)
    if len(found) == 1:
        return found[0]
    what = f"no checkpoint {checkpoint}" if checkpoint and not found else "several checkpoints"
    raise UserError(f"{source} holds {what}: {', '.join(found or models)}. Choose one with --checkpoint NAME.")


def _is_zip(path: Path) -> bool:
    """By the first bytes: `zipfile.is_zipfile` also accepts a tar archive that ends with a zip file."""
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _is_checkpoint(path: Path) -> bool:
    """Whether a file is itself a checkpoint (newer ones are zip files too), not an archive that contains one."""
    if path.suffix == ".pt" or not _is_zip(path):
        return path.suffix == ".pt"
    with _reporting_damage(path), zipfile.ZipFile(path) as archive:
        return any(PurePosixPath(name).name == "data.pkl" for name in archive.namelist())


@contextmanager
def _reporting_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:  # a password, or a compression that Python lacks
        raise UserError(f"{path} cannot be unpacked ({error}). Unpack it yourself and name the folder.") from error
    except (OSError, zipfile.BadZipFile, tarfile.TarError, EOFError, KeyError, lzma.LZMAError, zlib.error) as error:
        if getattr(error, "errno", None) not in (None, errno.EINVAL):  # the disk's fault, not the archive's
            raise
        raise UserError(f"{path} is damaged or truncated ({error}). Download or copy it again.") from error


def _unpack(source: Path, folder: Path) -> None:
    """Unpack an archive. Neither kind can write outside the folder."""
    with _reporting_damage(source):
        if _is_zip(source):
            with zipfile.ZipFile(source) as archive:
                return archive.extractall(folder)
        if tarfile.is_tarfile(source):
            with tarfile.open(source) as archive:
                archive.extractall(folder, filter="data")
                while archive.fileobj.read(1 << 20):  # a compressed stream ends with its checksum
                    pass
                return None
    with open(source, "rb") as file:
        is_page = file.read(64).lstrip().lower().startswith((b"<!doctype", b"<html"))
    hint = " It is a web page: the site asked for a confirmation. Download it in a browser." if is_page else ""
    raise UserError(f"{source} is not a readable archive or checkpoint; it may be truncated.{hint}")


# ---- reading it ----


def _load(path: Path, name: str) -> dict[str, Any]:
    """The unpickled file, restricted to tensors, plain values and `argparse.Namespace`."""
    is_zip = _is_zip(path)
    if is_zip:  # PyTorch ignores the checksums
        with _reporting_damage(Path(name)), zipfile.ZipFile(path) as archive:
            if (record := archive.testzip()) is not None:
                raise UserError(f"{name} is damaged: the checksum of {record} is wrong. Download or copy it again.")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about the pickle's protocol
            # Newer files are mapped, so that an optimizer's state takes no memory.
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except OSError:
        raise
    except Exception as error:  # depends on where a file is truncated
        if isinstance(error, pickle.UnpicklingError) and (match := re.search(r"GLOBAL (\S+)", str(error))):
            raise UserError(
                f"{name} was not loaded because its pickle would run `{match[1]}`, which could be any code. If you "
                "trust the file, load it where it was made, and save only `model` and, as plain values, `args`."
            ) from error
        raise UserError(
            f"{name} is damaged, truncated, or cannot be read safely ({reason(error)}). Download or copy it again, or, "
            "if you trust it, load it where it was made and save it again with torch.save."
        ) from error
    if not isinstance(state, dict):
        raise UserError(f"{name} holds a {type(state).__name__}, not a fairseq checkpoint.")
    return state


def _tensors(state: Mapping[str, Any], name: str) -> dict[str, Tensor]:
    """The model's tensors: the entry `model`, or the whole file."""
    model = state.get("model", state)
    if not isinstance(model, dict) or not any(isinstance(value, Tensor) for value in model.values()):
        raise UserError(f"{name} holds no tensors under `model`, so it is not a fairseq checkpoint.")
    for key, value in model.items():
        is_weight = isinstance(value, Tensor) and value.dtype in DTYPES and value.layout == torch.strided
        if not (isinstance(key, str) and is_weight):
            raise UserError(f"{name} holds `{key}` under `model`, which is not a dense floating-point tensor.")
    check_finite(model, name)
    return model


def check_finite(weights: Mapping[str, Tensor], name: str) -> None:
    """Refuse weights from training that diverged, or that were cast to a type that cannot hold them.

    Raises:
        UserError: A tensor holds NaN or infinity.
    """
    for key, tensor in weights.items():
        if not tensor.isfinite().all():
            raise UserError(f"`{key}` of {name} holds NaN or infinity.")


def full_names(weights: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The tensors; in a masked language model, `encoder.` is added where it is missing, and replaces `decoder.`.

    Raises:
        UserError: They are not those of a Luna.
    """
    if kind_of(weights) == TRANSLATION:
        return dict(weights)
    # Prefix of the sentence encoder in the file -> the part of it that becomes `encoder.`.
    places = {SENTENCE_ENCODER: "encoder.", "decoder.sentence_encoder.": "decoder.", "sentence_encoder.": "", "": ""}
    prefix = next((place for place in places if f"{place}projected_embeddings" in weights), None)
    if prefix is None:
        raise UserError(f"{name} is not a Luna: it has no packed sequence (`projected_embeddings`).")
    named = {}
    for key, value in weights.items():
        start = SENTENCE_ENCODER if prefix == "" and not key.startswith("lm_head.") else "encoder."
        named[key if key.startswith(HEADS) else start + key.removeprefix(places[prefix])] = value
    if len(named) < len(weights):
        raise UserError(f"{name} holds tensors twice, with and without a prefix.")
    return named


def _arguments(state: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by name: the namespace `args` of older files, or the sections of `cfg` of newer ones."""

    def plain(values: Any) -> dict[str, Any]:
        return vars(values) if isinstance(values, argparse.Namespace) else dict(values or {})

    try:
        sections, arguments = plain(state.get("cfg")), plain(state.get("args"))
        for section, choice in () if arguments else (("task", "task"), ("criterion", "criterion"), ("model", "arch")):
            values = plain(sections.get(section))
            arguments |= {choice: values.get("_name"), **values}
        return arguments
    except (TypeError, ValueError) as error:
        raise UserError(f"The arguments of the checkpoint are not a dictionary ({error}).") from error


def _norm_offset(weights: Mapping[str, Tensor], layer_norm: str | None) -> float:
    """What to add to the weights of the norms."""
    means = [tensor.double().mean() for name, tensor in weights.items() if is_norm(name)]
    if not means:
        raise UserError("The checkpoint has no LayerNorm, so it is not a Luna.")
    median = torch.stack(means).median().item()
    if layer_norm is None and abs(median - 0.5) <= 0.1:
        raise UserError(
            f"The LayerNorm weights have a median mean of {median:.2f}, which suits neither weights nor weights less "
            "1. Choose --layer-norm plain for files from before 2023, else --layer-norm offset."
        )
    return float(median < 0.5 if layer_norm is None else layer_norm == "offset")
