"""Corpora: the documents that a recipe's `data` names.

A source is `cpython` (the documentation inside every CPython), a local .txt, .jsonl, .json, .csv, .tsv or .parquet
file, a folder of one kind of them, or a dataset on the Hub. Opening one reads its first documents, to report errors
early.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from common.fingerprint import fingerprint
from common.sections import read_section
from common.tables import KINDS, check_file, column_names, ending, refuse_packed, stream_column
from datasets import IterableDataset, load_dataset_builder

from data.cpython_docs import read_cpython
from data.sources import Source, is_hub_name, read_text_documents, reading
from luna_hf.scripting import UserError

_KINDS = {".txt": "text", **KINDS}
# A file or folder with one of these names divides its folder into splits.
_SPLITS = {"train", "validation", "valid", "val", "dev", "test"}
_NAMED = 3  # splits that a message names
_SHARD = re.compile(r"[-_.]?\d+([-_]of[-_]\d+)?$")
# Local sources are read this far before a run starts: a moment, which finds most of their errors.
_LOOK_CHARACTERS = 10_000_000
# As the start of every file is.
_LOOK_BYTES = 1 << 16
# Most characters that a tokenizer learns its merges from: several times what its counts need to settle.
TOKENIZER_CHARACTERS = 200_000_000


@dataclass(frozen=True)
class Section:
    """An entry of a recipe's `data`; `None` stands for the default.

    Raises:
        UserError: An invalid value.
    """

    path: str
    name: str | None = None
    split: str | None = None
    text_column: str | None = None
    weight: float | None = None

    def __post_init__(self) -> None:
        if not self.path.strip():
            raise UserError("`data`: a `path` is empty. Name a file, a folder or a dataset on the Hub.")
        if self.weight is not None and not 0 < self.weight < float("inf"):
            raise UserError(f"`data`: the `weight` of {self.path} is {self.weight}, but must be a number above 0.")


@dataclass(frozen=True)
class Corpus:
    """The sources of a run with their shares of the rows, and the choice of held-out documents.

    Attributes:
        sources: training text.
        weights: share of the rows from each source; they sum to 1.
        validation: evaluation text; if empty, documents of `sources` are held out for evaluation.
        held_out_fraction: share of the documents to hold out if `validation` is empty.
        seed: of that choice.
        streaming: whether the sources are read during training instead of before it.
    """

    sources: tuple[Source, ...]
    weights: tuple[float, ...]
    validation: tuple[Source, ...]
    held_out_fraction: float
    seed: int
    streaming: bool

    @property
    def description(self) -> str:
        """The sources and their weights, in one line."""
        shares = [f"{weight:.1%} " if len(self.sources) > 1 else "" for weight in self.weights]
        return "; ".join(share + source.description for share, source in zip(shares, self.sources, strict=True))

    @property
    def split_rule(self) -> list[Any]:
        """The parameters of `is_held_out`, as JSON values."""
        return [] if self.validation else [self.held_out_fraction, self.seed]

    @property
    def evaluation_shares(self) -> tuple[float, ...]:
        """The share of the evaluated rows from each source of evaluation text."""
        return tuple(1 / len(self.validation) for _ in self.validation) or self.weights

    def fingerprint(self) -> dict[str, str]:
        """The content of every file, or the version of what is no file, by name."""
        sources = self.sources + self.validation
        return {name: content for source in sources for name, content in source.fingerprint().items()}

    def is_held_out(self, document: str) -> bool:
        """Whether a document is for evaluation.

        Its text decides, so repeated documents fall on the same side, in any order and any process.
        """
        return not self.validation and document_hash(document, "split", self.seed) < self.held_out_fraction

    def side_of(self, document: str) -> str:
        """The name of the token store for a document."""
        return "held_out" if self.is_held_out(document) else "training"

    def check_split(self) -> None:
        """Read documents until there are some to train on in every source, and some to evaluate on.

        Raises:
            UserError: All documents fall on one side.
        """
        held_out = bool(self.validation)
        more = "add documents (blank lines separate those of a text file)"
        for source in self.sources:
            training = False
            for document in source.stream():
                if document.strip():
                    is_held_out = self.is_held_out(document)
                    training, held_out = training or not is_held_out, held_out or is_held_out
                if training and held_out:
                    break
            if not training:
                raise UserError(
                    f"Every document of {source.description} is held out. Lower `held_out_fraction` or {more}."
                )
        if not held_out:
            raise UserError(
                f"A `held_out_fraction` of {self.held_out_fraction} holds out no document of {self.description}. Raise "
                f"it, {more}, or name a `validation` text."
            )

    def training_documents(self, limit: int = TOKENIZER_CHARACTERS) -> Iterator[str]:
        """Training documents to train a tokenizer on: about `limit` characters at most, in proportion to the weights.

        They come from the whole corpus, which is read once; when streaming, from its start.

        Raises:
            UserError: See `check_split`.
        """
        self.check_split()
        choose = first_documents if self.streaming else spread_documents
        for source, weight in zip(self.sources, self.weights, strict=True):
            documents = (document for document in source.stream() if not self.is_held_out(document))
            yield from choose(documents, int(limit * weight))


def open_corpus(settings: Any) -> Corpus:
    """Open the sources in the `data` and `validation` of a recipe, and read the first documents of each.

    Raises:
        UserError: A source is missing, unreadable or empty, lacks a split or column, or is also the validation text.
    """
    entries = settings.data if isinstance(settings.data, list) else [settings.data]
    if not entries:
        raise UserError("`data` is an empty list. Name a file, a folder, a dataset on the Hub, or `cpython`.")
    sections = [
        Section(entry) if isinstance(entry, str) else read_section(Section, entry, "`data`") for entry in entries
    ]
    without = [section.path for section in sections if section.weight is None]
    if 0 < len(without) < len(sections):
        raise UserError(f"`data`: give every source a `weight`, or none. Without one: {', '.join(without)}.")
    options = {"text_column": settings.text_column, "streaming": settings.streaming}
    sources = [open_source(section, "data", "train", **options) for section in sections]
    name, evaluated = settings.validation, []
    if name and re.fullmatch(r"[A-Za-z]\w*", name) and name != "cpython" and not Path(name).exists():
        evaluated = [replace(section, split=name) for section in sections]  # a split of the training data
    elif name:
        evaluated = [Section(name)]
    validation = [open_source(section, "validation", "validation", **options) for section in evaluated]
    trained_on = [source.identity for source in sources]
    if any(source.identity in trained_on for source in validation):
        raise UserError(f"`validation` {name!r} is also training text (`data`). Name another text, or leave it empty.")
    if without and len(sources) > 1:
        sources = [_joined(sources)]
    total = sum(section.weight or 0 for section in sections)
    weights = [1.0] if without else [section.weight / total for section in sections]
    choice = settings.held_out_fraction, settings.seed, settings.streaming
    return Corpus(tuple(sources), tuple(weights), tuple(validation), *choice)


def open_source(section: Section, key: str, default_split: str, text_column: str, streaming: bool) -> Source:
    """The source of a section; raises the errors of `open_corpus`, which name `key`.

    Without `split`, it is `default_split`, or all of a folder without splits.
    """
    path, split, column = section.path, section.split, section.text_column or text_column
    where = f"{path} (`{key}`)"
    if path == "cpython":
        if split:
            raise UserError(f"`cpython` (`{key}`) has no split {split!r}.")
        documents, description, identity = read_cpython()
        read = partial(IterableDataset.from_dict, {"text": documents})
        return Source(description, identity, ((read, "text"),), lambda: {path: json.dumps(identity)})
    if Path(path).exists():
        source = _open_files(Path(path), split, default_split, column, where)
        _look(source, where, _LOOK_CHARACTERS)
        return source
    if not is_hub_name(path) or ending(Path(path)) in _KINDS:
        raise UserError(f"`{key}`: there is no file or folder {path!r}.")
    return _open_hub(path, section.name, split or default_split, column, where, streaming)


def document_hash(document: str, purpose: str, seed: int) -> float:
    """A number in [0, 1) that depends on the text, the purpose and the seed only."""
    salt = f"{purpose} {seed}".encode()[:16]
    digest = hashlib.blake2b(document.encode("utf-8", "surrogatepass"), digest_size=8, salt=salt).digest()
    return int.from_bytes(digest, "big") / 2**64


def first_documents(documents: Iterable[str], limit: int) -> Iterator[str]:
    """Documents from the start, until they have `limit` characters."""
    characters = 0
    for document in documents:
        if characters >= limit:
            return
        characters += len(document)
        yield document


def spread_documents(documents: Iterable[str], limit: int) -> list[str]:
    """All documents, or an even sample of about `limit` characters; no more than that is held in memory."""
    share, kept, characters = 1.0, [], 0
    for document in documents:
        number = document_hash(document, "tokenizer", 0)
        if number < share:
            kept.append((number, document))
            characters += len(document)
        while characters > limit and len(kept) > 1:
            share /= 2
            kept = [(number, document) for number, document in kept if number < share] or kept[:1]
            characters = sum(len(document) for _, document in kept)
    return [document for _, document in kept]


def _joined(sources: list[Source]) -> Source:
    """Sources one after the other, so that every document comes once an epoch."""
    return Source(
        "; ".join(source.description for source in sources),
        ["joined", *(source.identity for source in sources)],
        tuple(part for source in sources for part in source.parts),
        lambda: {name: content for source in sources for name, content in source.fingerprint().items()},
    )


# ---- files ----


def _open_files(path: Path, split: str | None, default_split: str, column: str, where: str) -> Source:
    by_split = _files_by_split(path, where)
    wanted = split or default_split
    if list(by_split) == [""]:  # no splits: all of it is training text, or evaluation text if named as such
        by_split = {default_split if split is None else "train": by_split[""]}
    if wanted not in by_split:
        raise UserError(f"{where} has no split {wanted!r}, only: {', '.join(sorted(by_split))}.")
    files = by_split[wanted]
    for file in files:
        check_file(file, _LOOK_BYTES)
    kind = _KINDS[ending(files[0])]
    name = "text" if kind == "text" else ending(files[0])[1:]
    plural, of_split = "s" * (len(files) > 1), f", split {wanted}{_rest(by_split, wanted)}" if len(by_split) > 1 else ""
    description = f"{path.name or 'own text'} ({len(files)} {name} file{plural}{of_split})"
    status = [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    if kind == "text":
        # One tuple of files, not a list, so that processes share the documents instead of the files.
        read = partial(IterableDataset.from_generator, read_text_documents, gen_kwargs={"files": tuple(files)})
        return Source(description, ["text", *status], ((read, "text"),), partial(fingerprint, files))
    with reading(where):
        for file in files:
            _check_column(column_names(file), column, where)
    # A list of files, which processes divide if they can.
    read = partial(IterableDataset.from_generator, stream_column, gen_kwargs={"files": files, "column": column})
    return Source(description, [kind, column, *status], ((read, column),), partial(fingerprint, files))


def _files_by_split(path: Path, where: str) -> dict[str, list[Path]]:
    """The readable files of a folder by split, or all as the split "" if no file or folder is named after a split.

    The split is the name of the folder (train/0.jsonl), or of the file without a number (test-00000-of-00002.csv).
    """
    files = {path: (path.name,)}
    if path.is_dir():
        files = {file: file.relative_to(path).parts for file in sorted(path.rglob("*")) if file.is_file()}
        files = {file: parts for file, parts in files.items() if not any(part.startswith(".") for part in parts)}
    refuse_packed(files)
    files = {file: parts for file, parts in files.items() if ending(file) in _KINDS}
    if not files:
        raise UserError(f"{where} holds no file that can be read. Known endings: {', '.join(_KINDS)}.")
    if len({_KINDS[ending(file)] for file in files}) > 1:
        suffixes = ", ".join(sorted({file.suffix for file in files}))
        raise UserError(f"{where} mixes {suffixes} files. Name one file, or list a folder for each kind.")
    names = [parts[0] if parts[0] in _SPLITS else _SHARD.sub("", file.stem) for file, parts in files.items()]
    if path.is_file() or not _SPLITS.intersection(names):
        return {"": list(files)}
    return {name: [file for file, other in zip(files, names, strict=True) if other == name] for name in names}


def _rest(by_split: dict[str, list[Path]], wanted: str) -> str:
    """The splits that are not read, in words."""
    others = [split for split in by_split if split != wanted]
    more = f" and {len(others) - _NAMED} more" * (len(others) > _NAMED)
    return f"; not read: {', '.join(others[:_NAMED])}{more}"


# ---- the Hub ----


def _open_hub(name: str, config: str | None, split: str, column: str, where: str, streaming: bool) -> Source:
    with reading(f"{where} is not a local file or folder, and as a dataset on the Hub it"):
        builder = load_dataset_builder(name, config)
    stream = partial(builder.as_streaming_dataset, split=split)

    def download() -> IterableDataset:
        builder.download_and_prepare()  # once; it stays in the cache of `datasets`
        return builder.as_dataset(split=split).to_iterable_dataset()

    read = stream if streaming else download
    # A look at a dataset downloads no more than its first rows.
    first = read if Path(builder.cache_dir).is_dir() else stream
    with reading(where):
        _check_column(_columns(first()), column, where)
    description = f"{name}{f' ({config})' if config else ''}, split {split}"
    identity = ["hub", *Path(builder.cache_dir).parts[-4:], split, column]  # name, configuration, version, hash
    source = Source(description, identity, ((read, column),), lambda: {description: json.dumps(identity)})
    _look(replace(source, parts=((first, column),)), where, 1)
    return source


# ---- checks ----


def _columns(dataset: IterableDataset) -> list[str]:
    return dataset.column_names or list(next(iter(dataset), {}))  # none if it is empty


def _check_column(columns: list[str], column: str, where: str) -> None:
    if columns and column not in columns:
        raise UserError(f"{where} has no column {column!r} (`text_column`), only: {', '.join(columns)}.")


def _look(source: Source, where: str, characters: int) -> None:
    """Read the first documents, until their text has enough characters."""
    found = 0
    for found in accumulate(len(document.strip()) for document in source.stream()):
        if found >= characters:
            return
    if not found:
        raise UserError(f"{where} holds no text.")
