"""Rows on disk: written once, in files that appear whole, and memory-mapped from then on."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from common.seal import damage, seal, sync
from datasets import Dataset, concatenate_datasets
from tqdm.auto import tqdm

from luna_hf.scripting import locked, progress, write_json

# Sequences, then the label.
Row = tuple[Any, ...]
_FORMAT = 1  # part of a cache's name; raise it when its files change
_PART = 2000  # generated rows in a file; a killed generation loses so many at most
_BATCH = 500  # rows in memory while a file is written
# The small splits come first, so that their rows do not depend on the number of training rows.
_ORDER = ("test", "validation", "train")


def generated(
    cache: Path,
    name: str,
    parameters: Mapping[str, Any],
    draw: Callable[[np.random.Generator], Iterator[Row]],
    rows: Mapping[str, int],
    columns: Mapping[str, str],
    seed: int,
) -> dict[str, Dataset]:
    """Generate the rows of all splits, none equal to another, unless the cache has them.

    A killed generation continues with the part where it stopped, and gives the rows it would have given.

    Args:
        cache: holds a folder for each name, parameters, numbers of rows and seed.
        name: of the task.
        parameters: JSON values that the rows depend on.
        draw: rows without end.
        rows: their number in train, validation and test.
        columns: the sequences' names, with the numpy types of their items.
        seed: of the rows.

    Raises:
        UserError: Another process is generating the same.
    """
    key = {"format": _FORMAT, "part": _PART, "seed": seed, "rows": dict(rows), "parameters": dict(parameters)}
    folder = folder_of(cache, name, key)
    plan = [(split, start) for split in _ORDER for start in range(0, rows[split], _PART)]
    paths = {part: folder / f"{part[0]}-{part[1]:06}.arrow" for part in plan}
    if not is_whole(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f".{folder.name}.lock"), folder):
            write_json(folder / "parameters.json", key)
            seen: set[bytes] = set()
            with tqdm(desc=f"generating {name}", total=sum(rows.values()), unit=" rows") as bar:
                for (split, start), path in paths.items():
                    count = min(_PART, rows[split] - start)
                    if path.exists():
                        seen.update(digests(Dataset.from_file(str(path)), columns))
                        bar.update(count)
                        continue
                    generator = np.random.default_rng([seed, _ORDER.index(split), start])
                    fresh = islice(_unseen(draw(generator), seen), count)
                    write_rows(path, columns, _counted(fresh, bar))
            seal(folder)
    return {
        split: concatenate_datasets([Dataset.from_file(str(path)) for part, path in paths.items() if part[0] == split])
        for split in rows
    }


def folder_of(cache: Path, name: str, key: Any) -> Path:
    """The folder of a cache, named after a hash of what its content depends on."""
    return cache / f"{name}-{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}"


def is_whole(folder: Path) -> bool:
    """Whether a cache is finished; a finished one that is damaged is removed, with a message."""
    if not (folder / "files.json").exists():
        return False
    if wrong := damage(folder):
        progress(f"Making {folder} anew, since it is damaged: {wrong}.")
        shutil.rmtree(folder)
    return not wrong


def write_rows(path: Path, columns: Mapping[str, str], rows: Iterable[Row]) -> None:
    """Write rows into an Arrow file, which appears at once and complete.

    Args:
        path: of the file.
        columns: names of the sequences, with the numpy types of their items; a column `label` follows.
        rows: a sequence for each of them, and the label.
    """
    types = [pa.from_numpy_dtype(dtype) for dtype in columns.values()]
    lists = [(name, pa.list_(kind)) for name, kind in zip(columns, types, strict=True)]
    schema = pa.schema([*lists, ("label", pa.int64())])
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.unlink(missing_ok=True)  # left by a kill, or a link to another file
    with pa.OSFile(str(unfinished), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for batch in _batches(rows):
            *sequences, labels = zip(*batch, strict=True)
            arrays = [_list_array(items, kind) for items, kind in zip(sequences, types, strict=True)]
            writer.write_batch(pa.record_batch([*arrays, pa.array(labels, pa.int64())], schema=schema))
    sync(unfinished)
    os.replace(unfinished, path)
    sync(path.parent)


def digests(rows: Dataset, columns: Iterable[str]) -> Iterator[bytes]:
    """A hash of each row's sequences, for rows as they are stored (no `select` before)."""
    sequences = [_sequences(rows.data.column(column)) for column in columns]
    return map(_digest, zip(*sequences, strict=True))


def _sequences(column: pa.ChunkedArray) -> Iterator[np.ndarray]:
    for chunk in column.chunks:
        offsets, values = chunk.offsets.to_numpy(), chunk.values.to_numpy()
        yield from (values[begin:end] for begin, end in pairwise(offsets))


def _digest(sequences: Sequence[np.ndarray]) -> bytes:
    state = xxhash.xxh3_128()
    for items in sequences:
        state.update(len(items).to_bytes(8, "little") + items.tobytes())
    return state.digest()


def _unseen(rows: Iterator[Row], seen: set[bytes]) -> Iterator[Row]:
    """The rows whose sequences are new; they are added to `seen`."""
    for row in rows:
        if (digest := _digest(row[:-1])) not in seen:
            seen.add(digest)
            yield row


def _counted(rows: Iterable[Row], bar: tqdm) -> Iterator[Row]:
    for row in rows:
        yield row
        bar.update()


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    rows = iter(rows)
    while batch := list(islice(rows, _BATCH)):
        yield batch


def _list_array(items: Sequence[np.ndarray], kind: pa.DataType) -> pa.ListArray:
    offsets = np.cumsum([0, *map(len, items)], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(items), kind))
