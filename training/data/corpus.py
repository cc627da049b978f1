"""Corpora: what the recipe's `data` names, as a sequence of documents.

A source is `cpython` (the documentation inside every CPython), a local file or folder of .txt, .jsonl, .json, .csv or
.parquet, or a dataset of the Hub. Opening one reads its first documents; mistakes are told here.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from common.options import did_you_mean
from datasets import load_dataset_builder
from pyarrow import DataType, types

from data.cpython_docs import read_cpython
from data.sources import (
    READ_ERRORS,
    JoinedSource,
    ListSource,
    ParquetSource,
    Source,
    TableSource,
    TextSource,
    file_identity,
    readable,
)
from luna_hf.scripting import UserError

# Endings of files that can be read, and the loader of `datasets` for those that are tables.
_LOADERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
# Names of files or folders that say that a folder is divided into splits.
_SPLITS = {"train", "validation", "valid", "val", "dev", "test"}
_SHARD = re.compile(r"[-_.]?\d+([-_]of[-_]\d+)?$")
_SECTION = {"path", "name", "split", "text_column", "weight"}
# Local files are read this far before a run starts: a moment, in which most mistakes in them show.
_LOOK_CHARACTERS = 10_000_000
# A tokenizer learns its merges from this many characters at most: several times what its counts need to settle.
TOKENIZER_CHARACTERS = 200_000_000


@dataclass(frozen=True)
class Corpus:
    """What a run reads: sources with their shares of the rows, and which documents are held out.

    Attributes:
        sources: what to train on.
        weights: share of the rows that each source gives; they sum to 1.
        validation: what to evaluate on; empty if documents of `sources` are held out for it.
        held_out_fraction: share of the documents that is held out if `validation` is empty.
        seed: of the choice of held-out documents.
        streaming: whether the sources are read while training, and not before.
    """

    sources: tuple[Source, ...]
    weights: tuple[float, ...]
    validation: tuple[Source, ...]
    held_out_fraction: float
    seed: int
    streaming: bool

    @property
    def description(self) -> str:
        """What is read, in one line."""
        shares = [f"{weight:.1%} " if len(self.sources) > 1 else "" for weight in self.weights]
        return "; ".join(share + source.description for share, source in zip(shares, self.sources, strict=True))

    @property
    def split_rule(self) -> list[Any]:
        """What decides over `is_held_out`, as json can hold it."""
        return [] if self.validation else [self.held_out_fraction, self.seed]

    def is_held_out(self, document: str) -> bool:
        """Whether a document is for evaluation. Its text decides: repeated documents fall to the same side, in any
        order, and whichever process reads them."""
        return not self.validation and document_hash(document, "split", self.seed) < self.held_out_fraction

    def side_of(self, document: str) -> str:
        """The token store that a document belongs to."""
        return "held_out" if self.is_held_out(document) else "training"

    def training_documents(self, limit: int = TOKENIZER_CHARACTERS) -> Iterator[str]:
        """Training documents to learn a tokenizer from, at most about `limit` characters by the weights of the sources.

        They are spread over the whole corpus, which is read once; in streaming they are those at the start.
        """
        for source, weight in zip(self.sources, self.weights, strict=True):
            documents = (document for document in readable(source) if not self.is_held_out(document))
            choose = first_documents if self.streaming else spread_documents
            yield from choose(documents, int(limit * weight))


def open_corpus(settings: Any) -> Corpus:
    """Find what `data` and `validation` of a recipe name, and look at the first document of each.

    Args:
        settings: with the recipe's `data`, `text_column`, `validation`, `held_out_fraction`, `streaming` and `seed`.

    Raises:
        UserError: Something is not there, cannot be read, has no such split or column, or holds no text.
    """
    sections = settings.data if isinstance(settings.data, list) else [settings.data]
    if not sections:
        raise UserError("`data` is an empty list. Name a file, a folder, a dataset of the Hub, or `cpython`.")
    sections = [_section(entry) for entry in sections]
    weights = _weights(sections)
    options = {"text_column": settings.text_column, "streaming": settings.streaming}
    sources = [open_source(section, "data", "train", **options) for section in sections]
    validation: list[Source] = []
    if settings.validation and _is_split_name(settings.validation):
        # A split of the same data.
        validation = [
            open_source({**section, "split": settings.validation}, "validation", "", **options) for section in sections
        ]
    elif settings.validation:
        validation = [open_source({"path": settings.validation}, "validation", "validation", **options)]
    known = [source.identity for source in sources]
    if any(source.identity in known for source in validation):
        raise UserError(f"`validation` {settings.validation!r} is text that `data` trains on. Name another, or none.")
    if weights is None:  # one after the other, every document once an epoch
        sources, weights = [JoinedSource(tuple(sources))] if len(sources) > 1 else sources, [1.0]
    return Corpus(
        tuple(sources),
        tuple(weights),
        tuple(validation),
        settings.held_out_fraction,
        settings.seed,
        settings.streaming,
    )


def open_source(section: dict[str, Any], key: str, default_split: str, text_column: str, streaming: bool) -> Source:
    """The source that a section `{path, name, split, text_column}` names.

    Args:
        section: without `split` it is `default_split`, or all of a folder that is not divided into splits.
        key: the recipe's key, for messages.

    Raises:
        UserError: See `open_corpus`.
    """
    path, column = section["path"], section.get("text_column", text_column)
    if path == "cpython":
        if "split" in section:
            raise UserError(f"`cpython` (`{key}`) has no splits. Leave `{section['split']}` out.")
        source: Source = ListSource(*read_cpython())
    elif Path(path).exists():
        source = _open_local(Path(path), section.get("split"), default_split, column, key)
    elif _looks_local(path):
        raise UserError(f"`{key}` is {path!r}, but there is no such file or folder. Give one, or `cpython`.")
    else:
        source = _open_hub(path, section.get("name"), section.get("split", default_split), column, key, streaming)
    _look_at_first(source, f"{path} (`{key}`)")
    return source


def document_hash(document: str, purpose: str, seed: int) -> float:
    """A number in [0, 1) that depends on the text, the purpose and the seed, and on nothing else."""
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
    """All documents, or evenly chosen ones with about `limit` characters at most, in memory for no more than that."""
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


def _section(entry: Any) -> dict[str, Any]:
    """An entry of `data` as a section."""
    section = {"path": entry} if isinstance(entry, str) else entry
    if not isinstance(section, dict):
        raise UserError(f"`data` lists {entry!r}, which is neither a name nor a section with a `path`.")
    for key in section:
        if key not in _SECTION:
            raise UserError(f"`data`: unknown key `{key}`.{did_you_mean(key, _SECTION)}")
    if not isinstance(section.get("path"), str) or not section["path"].strip():
        raise UserError(f"`data`: the section {section!r} needs a `path`: a file, a folder or a dataset of the Hub.")
    for key in ("name", "split", "text_column"):
        if key in section and not isinstance(section[key], str):
            raise UserError(f"`data`: `{key}` of {section['path']} is {section[key]!r}, but must be text (in quotes).")
    weight = section.get("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
        raise UserError(f"`data`: `weight` of {section['path']} is {weight!r}, but must be a number above 0.")
    return section


def _weights(sections: list[dict[str, Any]]) -> list[float] | None:
    """Shares of the rows that sum to 1; None if no section has a weight."""
    without = [section["path"] for section in sections if "weight" not in section]
    if len(without) == len(sections):
        return None
    if without:
        raise UserError(f"`data`: give every source a `weight`, or none. Without one: {', '.join(without)}.")
    total = sum(section["weight"] for section in sections)
    return [section["weight"] / total for section in sections]


def _is_split_name(word: str) -> bool:
    return re.fullmatch(r"[A-Za-z]\w*", word) is not None and word != "cpython" and not Path(word).exists()


def _looks_local(path: str) -> bool:
    hub_name = re.fullmatch(r"[\w.-]+/[\w.-]+", path)
    return not hub_name or path.startswith(".") or Path(path).suffix in _LOADERS


def _open_local(path: Path, split: str | None, default_split: str, column: str, key: str) -> Source:
    files = _files_of(path, key)
    loader = _LOADERS[files[0].suffix]
    by_split = {} if path.is_file() else _by_split(path, files)
    if not by_split:  # not divided: what there is, is what was asked for, whatever that is called
        by_split = {split or default_split: files} if split in (None, "train") else {"train": files}
    wanted = split or default_split
    if wanted not in by_split:
        raise UserError(f"{path} (`{key}`) has no split {wanted!r}. Those that exist: {', '.join(sorted(by_split))}.")
    files = by_split[wanted]
    of_split = f", split {wanted}" if len(by_split) > 1 else ""
    kind = "text" if loader == "text" else files[0].suffix[1:]
    description = f"{path.name} ({len(files)} {kind} file{'s' * (len(files) > 1)}{of_split})"
    if loader == "text":
        return TextSource(tuple(files), description)
    if loader == "parquet":
        return _open_parquet(files, column, description, key)
    identity = [loader, column, *map(file_identity, files)]
    # pandas would take texts such as "NA" for missing ones.
    options = {"keep_default_na": False} if loader == "csv" else {}
    builder = _builder(f"{path} (`{key}`)", loader, data_files={wanted: [str(file) for file in files]}, **options)
    return _checked_table(TableSource(builder, wanted, column, description, identity), f"{path} (`{key}`)")


def _open_parquet(files: list[Path], column: str, description: str, key: str) -> ParquetSource:
    for file in files:
        where = f"{file} (`{key}`)"
        try:
            schema = pq.read_schema(file)
        except READ_ERRORS as error:
            raise UserError(f"{where} cannot be read: {error}") from error
        _check_column(column, {field.name: field.type for field in schema}, where)
    return ParquetSource(tuple(files), column, description)


def _files_of(path: Path, key: str) -> list[Path]:
    """The files below a folder that can be read, all of one kind; or the file itself."""
    known = ", ".join(_LOADERS)
    if path.is_file():
        if path.suffix not in _LOADERS:
            raise UserError(f"{path} (`{key}`) is of no kind that can be read. Endings that can: {known}.")
        return [path]
    files = [file for file in sorted(path.rglob("*")) if file.suffix in _LOADERS and file.is_file()]
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    if not files:
        raise UserError(f"The folder {path} (`{key}`) holds no file that can be read. Endings that can: {known}.")
    suffixes = sorted({file.suffix for file in files})
    if len({_LOADERS[suffix] for suffix in suffixes}) > 1:
        raise UserError(
            f"The folder {path} (`{key}`) mixes files of several kinds: {', '.join(suffixes)}. Name one file, or put "
            "each kind into a folder of its own and list the folders."
        )
    return files


def _by_split(folder: Path, files: list[Path]) -> dict[str, list[Path]]:
    """Files by the split that their names (train.parquet, test-00000-of-00002.csv) or folders (train/0.jsonl) say;
    nothing if no name is that of a split."""
    tops = [file.relative_to(folder).parts[0] for file in files]
    names = [top if top in _SPLITS else _SHARD.sub("", file.stem) for top, file in zip(tops, files, strict=True)]
    if not _SPLITS.intersection(names):
        return {}
    by_split: dict[str, list[Path]] = {}
    for name, file in zip(names, files, strict=True):
        by_split.setdefault(name, []).append(file)
    return by_split


def _open_hub(name: str, config: str | None, split: str, column: str, key: str, streaming: bool) -> TableSource:
    where = f"`{key}` is {name!r}: there is no such file or folder, and as a dataset of the Hub it"
    builder = _builder(where, name, config)
    description = f"{name}{f' ({config})' if config else ''}, split {split}"
    identity = ["hub", *Path(builder.cache_dir).parts[-4:], split, column]  # name, configuration, version, hash
    source = TableSource(builder, split, column, description, identity, download=not streaming)
    return _checked_table(source, f"{name} (`{key}`)")


def _builder(where: str, *arguments: Any, **keywords: Any) -> Any:
    try:
        return load_dataset_builder(*arguments, **keywords)
    except (*READ_ERRORS, RuntimeError) as error:  # RuntimeError: the dataset is a script
        raise UserError(f"{where} cannot be opened: {error}") from error


def _checked_table(source: TableSource, where: str) -> TableSource:
    try:
        features = source.features()
    except StopIteration:
        features = None
    except READ_ERRORS as error:
        raise UserError(f"{where} cannot be read: {error}") from error
    if not features:
        raise UserError(f"{where}: the split {source.split!r} is empty.")
    _check_column(source.column, {field.name: field.type for field in features.arrow_schema}, where)
    return source


def _check_column(column: str, columns: dict[str, DataType], where: str) -> None:
    if column not in columns:
        raise UserError(f"{where} has no column {column!r} (`text_column`). Those that exist: {', '.join(columns)}.")
    of = columns[column].value_type if types.is_dictionary(columns[column]) else columns[column]
    if not (types.is_string(of) or types.is_large_string(of) or types.is_string_view(of)):
        raise UserError(f"The column {column!r} of {where} is not text, but {of}.")


def _look_at_first(source: Source, where: str) -> None:
    """Read the first documents: up to one with text in it, and of local files `_LOOK_CHARACTERS`."""
    enough = _LOOK_CHARACTERS
    if isinstance(source, TableSource) and source.download and not source.is_present():
        source = replace(source, download=False)
    if isinstance(source, TableSource) and source.identity[0] == "hub":
        enough = 1
    documents = characters = 0
    for document in readable(source):
        documents += 1
        characters += len(document.strip())
        if characters >= enough:
            return
    if not characters:
        what = f"{documents:,} document(s), all blank" if documents else "it is empty"
        raise UserError(f"{where} holds no text: {what}.")
