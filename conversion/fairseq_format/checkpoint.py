"""Reading a checkpoint of the authors' fairseq code: the file in an archive or folder, its tensors, its arguments.

A checkpoint is a pickle, and a pickle can run code. Only tensors, plain values and `argparse.Namespace` are loaded;
anything else is refused by name.
"""

import argparse
import ast
import pickle
import re
import tarfile
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
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
    overrides = dict(map(_override, override))
    with tempfile.TemporaryDirectory(prefix="luna-") as unpacked:
        if source.suffix in (".pt", ".pth"):
            folder, model, name = source.parent, source, source.name
        else:
            folder = source if source.is_dir() else _unpack(source, Path(unpacked))
            model = _choose(folder, checkpoint, source)
            name = f"{source.resolve().name}/{model.relative_to(folder).as_posix()}"
        yield _read(model, folder, name, layer_norm, overrides)


def _override(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"--override {text} must have the form NAME=VALUE.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):  # a word, such as gelu
        return name, value


def _read(model: Path, folder: Path, name: str, layer_norm: str | None, overrides: Mapping[str, Any]) -> Original:
    """The checkpoint in a file, with the dictionaries beside it and in `folder`; reported as `name`."""
    state = _load(model, name)
    weights = full_names(_tensors(state, name), name)
    options, offset = complete(kind_of(weights), _arguments(state), overrides), _norm_offset(weights, layer_norm)

    def beside(*files: str) -> Path | None:
        paths = [place / file for place in (model.parent, folder) for file in files]
        return next(filter(Path.is_file, paths), None)

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


def _choose(folder: Path, checkpoint: str | None, source: Path) -> Path:
    """The model file of a folder, or of a folder in it."""
    models = sorted(path for pattern in ("*.pt", "*/*.pt") for path in folder.glob(pattern) if path.name[:2] != "._")
    wanted = (checkpoint,) if checkpoint else MODEL_NAMES
    by_name = ([path for path in models if path.as_posix().endswith(f"/{name}")] for name in wanted)
    found = next(filter(None, by_name), [] if checkpoint else models)
    if len(found) == 1:
        return found[0]
    names = ", ".join(path.relative_to(folder).as_posix() for path in found or models) or "no .pt file"
    missing = checkpoint or " or ".join(MODEL_NAMES)
    raise UserError(f"{source} must hold {missing}, but has {names}. Choose one with --checkpoint NAME.")


@contextmanager
def _reporting_damage(name: str | Path) -> Iterator[None]:
    """Turn whatever the readers of archives and pickles raise, which depends on where a file is damaged."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{name} cannot be read or unpacked ({reason(error)}). If it is damaged, truncated or a web page, download "
            f"it again, in a browser. If the disk of {tempfile.gettempdir()} is full, set TMPDIR to another folder."
        ) from error


def _is_zip(path: Path) -> bool:
    """By the first bytes: `zipfile.is_zipfile` also accepts a tar archive that ends with a zip file."""
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _unpack(source: Path, folder: Path) -> Path:
    """Unpack an archive, and return the folder. Neither kind can write outside it."""
    with _reporting_damage(source):
        if _is_zip(source):
            with zipfile.ZipFile(source) as archive:
                archive.extractall(folder)
        else:
            with tarfile.open(source) as archive:
                archive.extractall(folder, filter="data")
                while archive.fileobj.read(1 << 20):  # a compressed stream ends with its checksum
                    pass
    return folder


# ---- reading it ----


def _load(path: Path, name: str) -> dict[str, Any]:
    """The unpickled file, restricted to tensors, plain values and `argparse.Namespace`."""
    with _reporting_damage(name), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about the pickle's protocol
        is_zip = _is_zip(path)
        if is_zip:  # PyTorch ignores the checksums
            with zipfile.ZipFile(path) as archive:
                if (record := archive.testzip()) is not None:
                    raise zipfile.BadZipFile(f"the checksum of {record} is wrong")
        try:
            with torch.serialization.safe_globals([argparse.Namespace]):
                # Newer files are mapped, so that an optimizer's state takes no memory.
                state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
        except pickle.UnpicklingError as error:
            if match := re.search(r"GLOBAL (\S+)", str(error)):
                raise UserError(
                    f"{name} was not loaded because its pickle would run `{match[1]}`, which could be any code. If you "
                    "trust the file, load it where it was made, and save only `model` and, as plain values, `args`."
                ) from error
            raise
    if not isinstance(state, dict):
        raise UserError(f"{name} holds a {type(state).__name__}, not a fairseq checkpoint.")
    return state


def _tensors(state: Mapping[str, Any], name: str) -> dict[str, Tensor]:
    """The model's tensors: the entry `model`, or the whole file."""
    model = state.get("model", state)
    if not isinstance(model, dict) or not any(isinstance(value, Tensor) for value in model.values()):
        raise UserError(f"{name} holds no tensors under `model`, so it is not a fairseq checkpoint.")
    for key, value in model.items():
        if not isinstance(value, Tensor) or value.dtype not in DTYPES or value.layout != torch.strided:
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
    """The tensors by today's names: older masked language models call their encoder `decoder`.

    Raises:
        UserError: They are not those of a Luna.
    """
    if kind_of(weights) == TRANSLATION:
        return dict(weights)
    named = {re.sub(r"^decoder\.", "encoder.", key): tensor for key, tensor in weights.items()}
    if f"{SENTENCE_ENCODER}projected_embeddings" not in named:
        raise UserError(f"{name} is not a Luna: it has no packed sequence (`{SENTENCE_ENCODER}projected_embeddings`).")
    if len(named) < len(weights):
        raise UserError(f"{name} holds tensors of both an `encoder` and a `decoder`.")
    return named


def _arguments(state: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by name: the namespace `args` of older files, or the sections of `cfg` of newer ones."""

    def plain(values: Any) -> dict[str, Any]:
        return vars(values) if isinstance(values, argparse.Namespace) else dict(values or {})

    if arguments := plain(state.get("args")):
        return arguments
    sections = plain(state.get("cfg"))
    for section, choice in (("task", "task"), ("criterion", "criterion"), ("model", "arch")):
        values = plain(sections.get(section))
        arguments |= {choice: values.get("_name"), **values}
    return arguments


def _norm_offset(weights: Mapping[str, Tensor], layer_norm: str | None) -> float:
    """What to add to the weights of the norms."""
    means = [tensor.double().mean() for name, tensor in weights.items() if is_norm(name)]
    median = torch.stack(means).median().item() if means else 1.0
    if layer_norm is None and abs(median - 0.5) <= 0.1:
        raise UserError(
            f"The LayerNorm weights have a median mean of {median:.2f}, which suits neither weights nor weights less "
            "1. Choose --layer-norm plain for files from before 2023, else --layer-norm offset."
        )
    return float(median < 0.5 if layer_norm is None else layer_norm == "offset")
