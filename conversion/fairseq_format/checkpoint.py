"""Reading a checkpoint of the authors' fairseq code: the file in an archive or folder, its tensors, its arguments.

A checkpoint is a pickle, and a pickle can run code. Only tensors, plain values and `argparse.Namespace` are loaded;
anything else is refused by name.
"""

import argparse
import dataclasses
import errno
import lzma
import pickle
import re
import shutil
import tarfile
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from luna_hf.scripting import UserError, reason

MODEL_NAMES = ("model.pt", "checkpoint_best.pt", "checkpoint_last.pt")  # in order of preference
# `input0` and `label` are folders of fairseq's binarised tasks.
DICTIONARY, LABELS = "dict.txt", "label/dict.txt"
DICTIONARIES = (DICTIONARY, f"input0/{DICTIONARY}")
BPE_NAMES = ("encoder.json", "vocab.bpe", "vocab.json", "merges.txt")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SENTENCE_ENCODER, LM_HEAD, HEADS = "encoder.sentence_encoder.", "encoder.lm_head.", "classification_heads."
EMBEDDING, OUTPUT = f"{SENTENCE_ENCODER}embed_tokens.weight", f"{LM_HEAD}weight"
NORM = re.compile(r"(layer_norm|layernorm|layernorm_embedding|layernorm_porjected_embedding)\.weight$")
# Arguments whose absence is reported. A file without one of the others means "no".
_REPORTED = (
    *("encoder_attention_heads", "activation_fn", "pooler_activation_fn", "fix_projection_length"),
    *("dropout", "attention_dropout", "activation_dropout", "pooler_dropout"),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """The authors' arguments that define a model, with their names and defaults."""

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
    max_positions: int = 0  # unknown; else checked against the position table


@dataclasses.dataclass(frozen=True)
class TranslationOptions:
    """The authors' arguments that define an encoder-decoder, with their names and defaults.

    `pack_activation` is not one of theirs: their code had elu + 1 until August 2021, and softplus since.
    """

    arch: str | None = None
    task: str | None = None
    criterion: str | None = None
    source_lang: str = ""
    target_lang: str = ""
    encoder_embed_dim: int = 0
    decoder_embed_dim: int = 0
    encoder_ffn_embed_dim: int = 0
    decoder_ffn_embed_dim: int = 0
    encoder_attention_heads: int = 8
    decoder_attention_heads: int = 8
    encoder_projected_attention_heads: int = 0
    decoder_projected_attention_heads: int = 0
    encoder_learned_pos: bool = False
    decoder_learned_pos: bool = False
    encoder_normalize_before: bool = False
    decoder_normalize_before: bool = False
    no_token_positional_embeddings: bool = False
    no_scale_embedding: bool = False
    fix_projection_length: bool = False
    activation_fn: str = "relu"
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    max_source_positions: int = 1024
    max_target_positions: int = 1024
    pack_activation: str = "softplus"


def is_translation(weights: Mapping[str, Tensor]) -> bool:
    """Whether the tensors are those of an encoder-decoder of the authors."""
    return "decoder.layers.0.encoder_attn.pq_proj.weight" in weights and "encoder.projected_embeddings" in weights


@dataclasses.dataclass(frozen=True)
class Original:
    """A checkpoint of the authors' code."""

    name: str  # of the file, with its archive or folder
    weights: dict[str, Tensor]  # as stored; every name begins with `encoder.` or `classification_heads.`
    options: Options | TranslationOptions  # the arguments of the training run
    assumed: tuple[str, ...] = ()  # options that the file lacks, which have the authors' defaults
    norm_offset: float = 0.0  # to add to every LayerNorm weight: 0, or 1 where the file stores `weight - 1`
    norm_mean: float = 1.0  # median over the norms of their mean weight, as stored
    norm_detected: bool = True  # whether the offset was detected rather than given
    left_out: tuple[str, ...] = ()  # entries of the file other than tensors and arguments
    dictionary: Path | None = None  # dict.txt, or dict.de.txt of the source language
    target_dictionary: Path | None = None  # dict.en.txt of the target language
    labels: Path | None = None  # label/dict.txt
    bpe: Path | None = None  # the folder of GPT-2's files

    def layers(self) -> int:
        """Number of layers.

        Raises:
            UserError: A layer is missing.
        """
        names = (re.search(r"sentence_encoder\.layers\.(\d+)\.", name) for name in self.weights)
        found = {int(match[1]) for match in names if match}
        if found != set(range(len(found))):
            raise UserError(f"The checkpoint has the layers {sorted(found)}; some are missing.")
        return len(found)

    def heads(self) -> list[str]:
        """Names of the classification heads, in the order of the file."""
        return list(dict.fromkeys(name.split(".")[1] for name in self.weights if name.startswith(HEADS)))

    def is_tied(self) -> bool:
        """Whether the output matrix is the token embedding: absent, or equal without an argument that unties it."""
        output = self.weights.get(OUTPUT)
        if output is None:
            return True
        return torch.equal(output, self.weights[EMBEDDING]) and not self.options.untie_weights_luna

    def with_plain_norms(self) -> "Original":
        """The same checkpoint with plain LayerNorm weights, in at least float32: `1 + w` needs more digits than `w`."""
        return dataclasses.replace(
            self, weights={n: plain_norm(n, t, self.norm_offset) for n, t in self.weights.items()}, norm_offset=0.0
        )


def plain_norm(name: str, tensor: Tensor, offset: float) -> Tensor:
    """A tensor, with `offset` added if it is the weight of a LayerNorm."""
    if not offset or not NORM.search(name):
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) + offset


@contextmanager
def open_original(
    source: Path,
    checkpoint: str | None = None,
    layer_norm: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Iterator[Original]:
    """Open an archive (.zip, .tar, .tar.gz), a folder or a checkpoint file.

    Args:
        source: its path.
        checkpoint: name of the model file, where there are several.
        layer_norm: `"plain"` if the file stores LayerNorm weights, `"offset"` if it stores them less 1; detected by
            default.
        overrides: values that replace the authors' arguments in the file.

    Raises:
        UserError: It is missing, damaged, ambiguous or not a Luna.
    """
    if not source.exists():
        raise UserError(f"{source} does not exist. SOURCE is an archive, a folder or a checkpoint file.")
    with ExitStack() as stack:
        try:
            unpacked = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="luna-")))
            original = read(*_locate(source, unpacked, checkpoint), layer_norm, overrides or {})
        except OSError as error:
            raise UserError(
                f"{error.filename or source} cannot be read or unpacked ({error.strerror or error}). If the disk of "
                f"{tempfile.gettempdir()} is full, set TMPDIR to another folder."
            ) from error
        yield original


def read(
    folder: Path, model: str, name: str, layer_norm: str | None = None, overrides: Mapping[str, Any] | None = None
) -> Original:
    """The checkpoint in the file `model` of a folder, reported as `name`; see `open_original`."""
    state = _load(folder / model, name)
    weights = _tensors(state, name)
    if is_translation(weights):
        options, assumed = _options(state, overrides or {}, TranslationOptions)
    else:
        weights = official_names(weights, name)
        options, assumed = _options(state, overrides or {}, Options)
    offset, mean = _norm_offset(weights, layer_norm)
    places = [(folder / model).parent, folder]

    def beside(*files: str) -> Path | None:
        return next((place / file for place in places for file in files if (place / file).is_file()), None)

    bpe = beside(*BPE_NAMES)
    return Original(
        name=name,
        weights=weights,
        options=options,
        assumed=assumed,
        norm_offset=offset,
        norm_mean=mean,
        norm_detected=layer_norm is None,
        left_out=tuple(str(key) for key in state if key not in ("model", "args", "cfg")) if "model" in state else (),
        dictionary=beside(*_source_dictionaries(options)),
        target_dictionary=beside(f"dict.{getattr(options, 'target_lang', '')}.txt"),
        labels=beside(LABELS),
        bpe=bpe.parent if bpe else None,
    )


# ---- finding the file ----


def _locate(source: Path, unpacked: Path, checkpoint: str | None) -> tuple[Path, str, str]:
    """Folder and name of the model file, and the name to report; archives are unpacked to `unpacked`."""
    if source.is_dir():
        paths = [path for pattern in ("*", "*/*") for path in source.glob(pattern) if path.is_file()]
        model = _choose(sorted(path.relative_to(source).as_posix() for path in paths), checkpoint, source)
        return source, model, f"{source.resolve().name}/{model}"
    if not _is_checkpoint(source):
        model = _unpack(source, unpacked, checkpoint)
        return unpacked, model, f"{source.name}/{model}"
    if checkpoint not in (None, source.name):
        raise UserError(f"--checkpoint {checkpoint} does not apply to the file {source.name}. Leave it out.")
    return source.parent, source.name, source.name


def _choose(names: list[str], checkpoint: str | None, source: Path) -> str:
    """The model file among the files of an archive or folder."""
    models = [name for name in names if name.endswith(".pt") and not _is_junk(name)]
    if checkpoint is not None:
        found = [name for name in models if checkpoint in (name, PurePosixPath(name).name)]
    else:
        by_name = ([name for name in models if PurePosixPath(name).name == known] for known in MODEL_NAMES)
        found = next((names for names in by_name if names), models)
    if len(found) == 1:
        return found[0]
    if not models:
        if any(PurePosixPath(name).name == "config.json" for name in names):
            raise UserError(f"{source} is a transformers checkpoint, not a fairseq one, and needs no conversion.")
        raise UserError(f"{source} holds no checkpoint ({', '.join(MODEL_NAMES)} or another .pt file).")
    what = f"no checkpoint {checkpoint}" if checkpoint and not found else "several checkpoints"
    raise UserError(f"{source} holds {what}: {', '.join(found or models)}. Choose one with --checkpoint NAME.")


def _is_junk(name: str) -> bool:
    """Whether macOS put it into the archive."""
    return "__MACOSX" in name or PurePosixPath(name).name.startswith("._")


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


def _unpack(source: Path, folder: Path, checkpoint: str | None) -> str:
    """Unpack the model file of an archive and the small files beside it; the model's name."""
    with _reporting_damage(source):
        if _is_zip(source):
            with zipfile.ZipFile(source) as archive:
                return _unpack_members(archive.namelist(), archive.open, source, folder, checkpoint)
        if tarfile.is_tarfile(source):
            with tarfile.open(source) as archive:
                names = [member.name for member in archive if member.isfile()]
                model = _unpack_members(names, archive.extractfile, source, folder, checkpoint)
                while archive.fileobj.read(1 << 20):  # a compressed stream ends with its checksum
                    pass
                return model
    with open(source, "rb") as file:
        start = file.read(64).lstrip().lower()
    if start.startswith((b"<!doctype", b"<html")):
        raise UserError(f"{source} is a web page: the site asked for a confirmation. Download it in a browser.")
    raise UserError(f"{source} is not a readable archive or checkpoint; it may be truncated. Download it again.")


def _unpack_members(
    names: list[str], opener: Callable[[str], Any], source: Path, folder: Path, checkpoint: str | None
) -> str:
    model = _choose(names, checkpoint, source)
    for name in names:
        file = PurePosixPath(name).name
        is_dictionary = file.startswith("dict.") and file.endswith(".txt")
        if name != model and ((not is_dictionary and file not in BPE_NAMES) or _is_junk(name)):
            continue
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{source} holds a path that leads outside it ({name}). Do not use it.")
        path.parent.mkdir(parents=True, exist_ok=True)
        with opener(name) as packed, open(path, "wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    return model


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
            warnings.simplefilter("ignore", UserWarning)  # about the pickle's protocol, which the error names
            # Newer files are mapped, so that an optimizer's state takes no memory.
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except OSError:
        raise
    except pickle.UnpicklingError as error:
        if match := re.search(r"GLOBAL (\S+)", str(error)):
            raise UserError(
                f"{name} was not loaded because its pickle would run `{match[1]}`, which could be any code. If you "
                "trust the file, load it where it was made, and save only `model` and, as plain values, `args`."
            ) from error
        raise UserError(
            f"{name} is damaged, or pickled with a protocol that cannot be read safely. Copy it again, or, if you "
            "trust it, load it where it was made and save it again with torch.save."
        ) from error
    except Exception as error:  # depends on where a file is truncated
        raise UserError(f"{name} is damaged or truncated ({reason(error)}). Download or copy it again.") from error
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
    """Refuse weights from training that diverged.

    Raises:
        UserError: A tensor holds NaN or infinity.
    """
    for key, tensor in weights.items():
        if not tensor.isfinite().all():
            raise UserError(f"`{key}` of {name} holds NaN or infinity. Convert an earlier checkpoint.")


def official_names(weights: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The tensors by their full names: `encoder.` is added where it is missing, and replaces `decoder.`.

    Raises:
        UserError: They are not those of a masked language model of Luna.
    """
    inner = next((key for key in weights if re.fullmatch(r"(.*\.)?embed_tokens\.weight", key)), None)
    # Prefix of the sentence encoder in the file -> the part of it that becomes `encoder.`.
    places = {SENTENCE_ENCODER: "encoder.", "decoder.sentence_encoder.": "decoder.", "sentence_encoder.": "", "": ""}
    prefix = None if inner is None else inner.removesuffix("embed_tokens.weight")
    if prefix is None or prefix not in places:
        raise UserError(f"{name} is not a masked language model of Luna: it has {', '.join([*weights][:3])}, ...")
    if f"{prefix}projected_embeddings" not in weights:
        is_roberta = any(re.search(r"layers\.\d+\.self_attn\.(in_proj|k_proj)", key) for key in weights)
        hint = " It is a RoBERTa; start from it with conversion/roberta_to_luna.py." if is_roberta else ""
        raise UserError(f"{name} is not a Luna: it has no packed sequence (`projected_embeddings`).{hint}")
    named = {}
    for key, value in weights.items():
        if key.startswith(HEADS):
            full = key
        elif prefix == "" and not key.startswith("lm_head."):
            full = SENTENCE_ENCODER + key
        else:
            full = f"encoder.{key.removeprefix(places[prefix])}"
        if full in named:
            raise UserError(f"{name} holds `{full}` twice, with and without a prefix.")
        named[full] = value
    return named


def _options(
    state: Mapping[str, Any], overrides: Mapping[str, Any], kind_of_model: type[Any]
) -> tuple[Any, tuple[str, ...]]:
    """The arguments, and the names of those that have a default because the file lacks them."""
    fields = {field.name: field for field in dataclasses.fields(kind_of_model)}
    if unknown := sorted(set(overrides) - set(fields)):
        raise UserError(f"--override has no argument {', '.join(unknown)}. It has {', '.join(sorted(fields))}.")
    given = _arguments(state)
    present = {name: given[name] for name in fields if given.get(name) is not None} | dict(overrides)
    # The one default of the authors' large models that no tensor shows.
    values = {"encoder_attention_heads": 16} if "large" in str(given.get("arch")) else {}
    for name, value in present.items():
        kind = type(fields[name].default)
        if kind is float and type(value) is int:
            value = float(value)
        if kind is not type(None) and type(value) is not kind:
            raise UserError(f"The argument `{name}` is {value!r}, but must be of type {kind.__name__}.")
        values[name] = value
    reported = (name for name in _REPORTED if name in fields)
    return kind_of_model(**values), tuple(name for name in reported if name not in present)


def _arguments(state: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by name: the namespace `args` of older files, or the sections of `cfg` of newer ones."""
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
    raise UserError(f"The arguments of the checkpoint are a {type(values).__name__}, not a namespace or dictionary.")


def _source_dictionaries(options: Options | TranslationOptions) -> tuple[str, ...]:
    language = getattr(options, "source_lang", "")
    return (f"dict.{language}.txt",) if language else DICTIONARIES


def _norm_offset(weights: Mapping[str, Tensor], layer_norm: str | None) -> tuple[float, float]:
    """What to add to the weights of the norms, and the median of their means as stored."""
    means = [tensor.double().mean() for name, tensor in weights.items() if NORM.search(name)]
    if not means:
        raise UserError("The checkpoint has no LayerNorm, so it is not a masked language model of Luna.")
    median = torch.stack(means).median().item()
    if layer_norm is None and abs(median - 0.5) <= 0.1:
        raise UserError(
            f"The LayerNorm weights have a median mean of {median:.2f}, which suits neither weights nor weights less "
            "1. Choose --layer-norm plain for files from before 2023, else --layer-norm offset."
        )
    return float(median < 0.5 if layer_norm is None else layer_norm == "offset"), median
