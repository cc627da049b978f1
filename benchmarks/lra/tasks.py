"""The five tasks of Long Range Arena, as token ids or grey levels with labels.

ListOps and Pathfinder32 are generated (`listops.py`, `pathfinder.py`). Text, Image and Retrieval are read from the
Hub or from a folder: IMDB as bytes, CIFAR-10 in grey, and pairs of papers of the ACL Anthology Network as bytes, in
the tables that the benchmark publishes.

Two points differ from the published benchmark, which validates Text on its test split, and whose validation file of
ListOps contains its test file: here validation rows are held out of the training rows, and no row of one split is in
another, except that IMDB's own test split repeats some reviews of its training split.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common.fingerprint import fingerprint
from common.seal import seal
from common.tables import require_text
from datasets import Dataset, Features, List, Value
from huggingface_hub import snapshot_download
from tasks.files import load_splits, require_columns
from tasks.labels import numbers_of_tables
from tqdm.auto import tqdm

from lra.cache import Row, digests, folder_of, generated, is_whole, write_rows
from lra.listops import VOCAB_SIZE, ListOps
from lra.pathfinder import Pathfinder
from luna_hf.scripting import UserError, portable, reason, writing

NAMES = ("listops", "text", "retrieval", "image", "pathfinder")
SEED = 0  # of what is generated, held out and drawn
PAD = 0
BYTES_VOCABULARY = 257  # byte b has the id b + 1
PIXELS = 1024
SPLITS = ("train", "validation", "test")
_IMAGES = ("pixels", "img", "image")  # columns that may hold the images
_LABELS = {b"0": 0, b"1": 1, b"0.0": 0, b"1.0": 1}
_FORMAT = 1  # of converted tables; raise it when they change
_HELD_OUT = 0.1  # of the training rows, for validation, where the data have no validation split


@dataclass(frozen=True)
class Task:
    """What a model must know of a task.

    Attributes:
        name: one of `NAMES`.
        inputs: "tokens", "pixels" or "pairs" (of two sequences of tokens).
        vocab_size: number of token ids, of which 0 is padding; of pixels, number of grey levels.
        max_length: of a sequence, after cutting.
        num_labels: number of classes.
        source: what was read or generated, in one sentence.
    """

    name: str
    inputs: str
    vocab_size: int
    max_length: int
    num_labels: int
    source: str


@dataclass(frozen=True)
class _Published:
    """A task as published.

    Attributes:
        title: what the rows are.
        rows: their number in each split that the data have.
        hub: name of the data on the Hub; `None` for data that are generated, or not there.
    """

    title: str
    inputs: str
    vocab_size: int
    max_length: int
    num_labels: int
    rows: dict[str, int]
    hub: str | None = None


_BYTES = {"vocab_size": BYTES_VOCABULARY, "max_length": 4000, "num_labels": 2}
_PIXELS = {"inputs": "pixels", "vocab_size": 256, "max_length": PIXELS}
_AAN_ROWS = {"train": 147086, "validation": 18090, "test": 17437}
_PUBLISHED = {
    "listops": _Published(
        "ListOps", "tokens", VOCAB_SIZE, 2000, 10, {"train": 96000, "validation": 2000, "test": 2000}
    ),
    "text": _Published("IMDB", "tokens", **_BYTES, rows={"train": 25000, "test": 25000}, hub="stanfordnlp/imdb"),
    "retrieval": _Published("AAN", "pairs", **_BYTES, rows=_AAN_ROWS),
    "image": _Published(
        "CIFAR-10", **_PIXELS, num_labels=10, rows={"train": 50000, "test": 10000}, hub="uoft-cs/cifar10"
    ),
    "pathfinder": _Published(
        "Pathfinder32 (hard)",
        **_PIXELS,
        num_labels=2,
        rows={"train": 160000, "validation": 20000, "test": 20000},
    ),
}
_GENERATORS = {"listops": ListOps, "pathfinder": Pathfinder}
_COLUMNS = {
    "tokens": {"input_ids": "int16"},
    "pixels": {"pixel_values": "uint8"},
    "pairs": {"input_ids": "int16", "input_ids_2": "int16"},
}


def load_task(
    name: str,
    data: str | Path | None,
    cache: Path,
    rows: Mapping[str, int] | None = None,
    max_length: int | None = None,
) -> tuple[Task, dict[str, Dataset]]:
    """Load or generate a task.

    Args:
        name: one of `NAMES`.
        data: a Hub name or a folder, for text (`text`, `label`), image (`pixels`, or `img`, and `label`) and retrieval
            (`new_aan_pairs.train.tsv`, `.eval.tsv` and `.test.tsv`); text and image have a default on the Hub. What is
            generated ignores it.
        cache: folder for what is generated or converted.
        rows: numbers of rows of "train", "validation" and "test"; by default, all. Read rows are drawn from those
            that there are; of what is generated, no more is made.
        max_length: longest sequence of tokens, by default as published; longer ones are cut.

    Returns:
        The task, and train, validation and test. Their columns are `input_ids`, also `input_ids_2` for pairs, or
        `pixel_values`, and `label`. Sequences are not padded.

    Raises:
        UserError: The data or the numbers are wrong.
    """
    published, rows = _PUBLISHED[name], rows or {}
    length = max_length or published.max_length
    if published.inputs == "pixels" and length != PIXELS:
        raise UserError(f"The {PIXELS:,} pixels of {name} cannot be cut to {length:,}. Leave max_length out.")
    if name in _GENERATORS:
        splits = _generate(name, cache, {**published.rows, **rows}, length)
        source = f"{published.title}, generated with seed {SEED} to the published parameters: {_counts(splits)}"
        if {split: len(split_rows) for split, split_rows in splits.items()} != published.rows:
            source += f" (published: {', '.join(f'{count:,}' for count in published.rows.values())})"
        source += ", no two equal"
    else:
        splits, source = _read(name, data or published.hub, cache, rows, length)
    if length < published.max_length:
        source += f", cut to {length:,} tokens"
    return Task(name, published.inputs, published.vocab_size, length, published.num_labels, source), splits


def _counts(splits: Mapping[str, Dataset]) -> str:
    return ", ".join(f"{split} {len(rows):,}" for split, rows in splits.items()) + " rows"


# ---- generated ----


def _generate(name: str, cache: Path, rows: Mapping[str, int], length: int) -> dict[str, Dataset]:
    spec, columns = _GENERATORS[name](), _COLUMNS[_PUBLISHED[name].inputs]

    def draw(generator: np.random.Generator) -> Iterator[Row]:
        return ((sequence[:length], label) for sequence, label in spec.draw(generator))

    return generated(cache, name, {**asdict(spec), "cut": length}, draw, rows, columns, SEED)


# ---- read ----


def _read(
    name: str, data: str | Path | None, cache: Path, rows: Mapping[str, int], length: int
) -> tuple[dict[str, Dataset], str]:
    """The splits of a task that is not generated, and their source in words."""
    published = _PUBLISHED[name]
    splits = _read_pairs(data, cache, length) if name == "retrieval" else _read_rows(name, str(data), length)
    differing = [
        f"{split} {len(splits[split]):,} of {count:,}"
        for split, count in published.rows.items()
        if len(splits[split]) != count
    ]
    source = published.title
    if differing:
        source = f"a subset of {source} or a substitute for it ({', '.join(differing)} rows)"
    held_out = "validation" not in splits
    generator = np.random.default_rng(SEED)
    if held_out:
        splits["train"], splits["validation"] = _hold_out(splits["train"], _COLUMNS[published.inputs], generator)
    splits = {split: _some(splits[split], rows.get(split), split, generator) for split in SPLITS}
    place = portable(Path(data).resolve()) if Path(data).is_dir() else data
    source += f", read from {place}: {_counts(splits)}"
    return splits, source + (", validation held out of train" if held_out else "")


def _hold_out(rows: Dataset, columns: Iterable[str], generator: np.random.Generator) -> tuple[Dataset, Dataset]:
    """Divide rows; those of the second part occur only once, so that none is in the first part too."""
    keys = list(digests(rows, columns))
    count = Counter(keys)
    alone = [index for index, key in enumerate(keys) if count[key] == 1]
    held_out = np.sort(generator.permutation(alone)[: max(1, round(_HELD_OUT * len(rows)))])
    return rows.select(np.setdiff1d(np.arange(len(rows)), held_out)), rows.select(held_out)


def _some(rows: Dataset, count: int | None, split: str, generator: np.random.Generator) -> Dataset:
    """So many rows, drawn; or all."""
    order = generator.permutation(len(rows))
    if count is None:
        return rows
    if count > len(rows):
        raise UserError(f"{split} has {len(rows):,} rows, fewer than {count:,}. Ask for at most {len(rows):,}.")
    return rows.select(np.sort(order[:count]))


def _read_rows(name: str, data: str, length: int) -> dict[str, Dataset]:
    """Encode the rows of text or image."""
    found = numbers_of_tables(load_splits(data, splits=SPLITS), "label")
    if missing := [split for split in ("train", "test") if split not in found]:
        raise UserError(f"{data} has no split {missing[0]!r}. Name a data set that has train and test.")
    encode = partial(_encode_text, length=length) if name == "text" else _encode_images
    (column,) = _COLUMNS[_PUBLISHED[name].inputs]
    features = Features({column: List(Value(_COLUMNS[_PUBLISHED[name].inputs][column])), "label": Value("int64")})
    splits = {}
    for split, rows in found.items():
        origin = f"{split} of {data}"
        given = "text" if name == "text" else next((key for key in _IMAGES if key in rows.column_names), _IMAGES[0])
        require_columns(rows, (given, "label"), origin)
        if name == "text":
            require_text(rows, given, origin)
        labels = set(rows["label"])
        if wrong := labels - set(range(_PUBLISHED[name].num_labels)):
            raise UserError(f"{origin} has the label {wrong.pop()}; it must be below {_PUBLISHED[name].num_labels}.")
        splits[split] = rows.map(
            lambda batch, given=given: {column: encode(batch[given]), "label": batch["label"]},
            batched=True,
            remove_columns=rows.column_names,
            features=features,
            keep_in_memory=True,
            load_from_cache_file=False,
        )
    return splits


def _encode_text(texts: list[str], length: int) -> list[np.ndarray]:
    return [byte_ids(text.encode(), length) for text in texts]


def _encode_images(images: list[Any]) -> list[np.ndarray]:
    """Grey levels of pictures, or of lists of pixels."""
    pixels = [np.asarray(image.convert("L") if hasattr(image, "convert") else image).ravel() for image in images]
    if wrong := [len(levels) for levels in pixels if len(levels) != PIXELS]:
        raise UserError(f"An image has {wrong[0]:,} pixels. The task takes 32 x 32 ({PIXELS:,}) in grey.")
    return [levels.astype(np.uint8) for levels in pixels]


def byte_ids(text: bytes, length: int) -> np.ndarray:
    """The first bytes of a text as token ids, int16 [at most `length`]."""
    return np.frombuffer(text[:length], np.uint8).astype(np.int16) + 1


# ---- pairs ----


def _read_pairs(data: str | Path | None, cache: Path, length: int) -> dict[str, Dataset]:
    """Convert the published tables once, and read the result."""
    paths, columns = _tables(data), _COLUMNS["pairs"]
    key = {"format": _FORMAT, "max_length": length, "files": list(fingerprint(paths.values()).values())}
    folder = folder_of(cache, "retrieval", key)
    if not is_whole(folder):
        with writing(folder) as unfinished:
            for split, path in paths.items():
                write_rows(unfinished / f"{split}.arrow", columns, _pairs(path, length))
            seal(unfinished)
    return {split: Dataset.from_file(str(folder / f"{split}.arrow")) for split in paths}


def _tables(data: str | Path | None) -> dict[str, Path]:
    """The three published files, from a folder or the Hub."""
    names = {split: f"new_aan_pairs.{part}.tsv" for split, part in zip(SPLITS, ("train", "eval", "test"), strict=True)}
    advice = f"Name a folder that has {', '.join(names.values())}; they are in the benchmark's lra_release archive."
    if data is None:
        raise UserError(f"Retrieval has no default data. {advice}")
    folder = Path(data)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(str(data), repo_type="dataset", allow_patterns="*new_aan_pairs.*.tsv"))
        except Exception as error:  # network, login, names: all of them the user's to fix
            raise UserError(
                f"There is neither a folder nor a Hub data set {data} ({reason(error)}). {advice}"
            ) from error
    paths = {split: next(folder.rglob(name), folder / name) for split, name in names.items()}
    if missing := [path.name for path in paths.values() if not path.is_file()]:
        raise UserError(f"{data} has no {missing[0]}. {advice}")
    return paths


def _pairs(path: Path, length: int) -> Iterator[Row]:
    """The rows of a table without a header: label, two ids, two texts."""
    with path.open("rb") as file, tqdm(desc=path.name, total=path.stat().st_size, unit="B", unit_scale=True) as bar:
        for number, line in enumerate(file, 1):
            bar.update(len(line))
            fields = line.rstrip(b"\r\n").split(b"\t")
            if len(fields) != 5:
                what = "label, two ids and two texts"
                raise UserError(f"Line {number} of {path} has {len(fields)} fields between tabs instead of 5 ({what}).")
            if fields[0] not in _LABELS:
                raise UserError(f"Line {number} of {path} begins with {fields[0][:20]!r} instead of the label 0 or 1.")
            yield byte_ids(fields[3], length), byte_ids(fields[4], length), _LABELS[fields[0]]
