"""Sealed folders: their files are on disk, and a manifest lists sizes and checksums, so that damage is found.

Every checkpoint of a run is sealed, those of the pretraining loop and those of the Trainer.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import xxhash

from luna_hf.scripting import write_json

MANIFEST = "files.json"
_PART = 1 << 20


def seal(folder: Path) -> None:
    """Flush every file of a folder to disk, then write the manifest."""
    (folder / MANIFEST).unlink(missing_ok=True)  # of what the folder held before
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    for path in paths:
        sync(path)
    listed = {path.relative_to(folder).as_posix(): [path.stat().st_size, _checksum(path)] for path in paths}
    write_json(folder / MANIFEST, listed)
    sync(folder)


def damage(folder: Path) -> str | None:
    """The first difference between a sealed folder and its manifest, or `None`. Every file is read whole."""
    try:
        return next(_differences(folder), None)
    except OSError as error:
        return f"{Path(error.filename or folder).name} cannot be read ({error.strerror})"
    except (ValueError, TypeError, AttributeError, RecursionError):
        return f"{MANIFEST} is not a manifest"


def newest_intact(
    found: Iterable[Path], tell: Callable[[str], None], wrong: Callable[[Path], str | None] = damage
) -> Path | None:
    """The first of the checkpoints that is intact; `tell` gets a line about each damaged one before it.

    Args:
        found: the newest first.
        tell: prints.
        wrong: what is wrong with a checkpoint, or `None`.
    """
    for checkpoint in found:
        if (difference := wrong(checkpoint)) is None:
            return checkpoint
        tell(f"Ignoring the damaged checkpoint {checkpoint.name}: {difference}.")
    return None


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _differences(folder: Path) -> Iterator[str]:
    listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if (name := path.relative_to(folder).as_posix()) not in {*listed, MANIFEST}:
            yield f"{MANIFEST} does not list {name}"
    for name, (size, checksum) in listed.items():
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif path.stat().st_size != size:
            yield f"{name} has {path.stat().st_size:,} bytes instead of {size:,}"
        elif _checksum(path) != checksum:
            yield f"{name} differs from its checksum"


def _checksum(path: Path) -> str:
    """XXH3: damage is an accident, not an attack, and a cryptographic hash would take longer than the reading."""
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while part := file.read(_PART):
            state.update(part)
    return state.hexdigest()
