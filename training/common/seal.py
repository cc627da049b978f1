"""Sealed folders: their files are on disk, and a manifest lists sizes and checksums, so that damage is found."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import xxhash

from luna_hf.scripting import write_json

_MANIFEST = "files.json"
_PART = 1 << 20


def seal(folder: Path) -> None:
    """Flush every file of a folder to disk, then write the manifest."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    for path in paths:
        sync(path)
    listed = {path.relative_to(folder).as_posix(): [path.stat().st_size, _checksum(path)] for path in paths}
    write_json(folder / _MANIFEST, listed)
    sync(folder)


def damage(folder: Path) -> str | None:
    """The first difference between a sealed folder and its manifest, or `None`. Every file is read whole."""
    try:
        return next(_differences(folder), None)
    except OSError as error:
        return f"{Path(error.filename or folder).name} cannot be read ({error.strerror})"
    except (ValueError, TypeError, AttributeError):
        return f"{_MANIFEST} is not a manifest"


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _differences(folder: Path) -> Iterator[str]:
    listed = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if (name := path.relative_to(folder).as_posix()) not in {*listed, _MANIFEST}:
            yield f"{_MANIFEST} does not list {name}"
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
