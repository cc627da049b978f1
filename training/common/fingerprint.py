"""Fingerprints of data files, so that a run does not resume on data that have changed."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import xxhash

from luna_hf.scripting import TOKENIZER_FILES
from luna_hf.warm_start.sentence_folder import SETTINGS, TRANSFORMER_CONFIGS

_BLOCK = 1 << 16
_BLOCKS = 256


def fingerprint(paths: Iterable[Path]) -> dict[str, str]:
    """Size and content hash of each file, by its path.

    Of a file above 16 MiB, 256 evenly spaced blocks of 64 KiB are hashed, the first and the last among them. That takes
    milliseconds at any size, and misses a change only if it keeps the size and touches none of these blocks.
    """
    return {str(path): _digest(path) for path in paths}


def model_files(folder: Path) -> list[Path]:
    """The files of a model's folder that decide what it computes, also those of sentence-transformers' modules."""
    names = {"config.json", "modules.json", "added_tokens.json", SETTINGS, *TRANSFORMER_CONFIGS, *TOKENIZER_FILES}
    found = [*folder.glob("*"), *(path for path in folder.glob("*/*") if not path.parent.name.startswith("checkpoint"))]
    return sorted(path for path in found if path.name in names or path.suffix in (".safetensors", ".bin", ".model"))


def changed_files(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The files that were changed, added or removed between two fingerprints."""
    return [path for path in {**before, **after} if before.get(path) != after.get(path)]


def _digest(path: Path) -> str:
    size, digest = path.stat().st_size, xxhash.xxh3_128()
    last = max(size - _BLOCK, 0)
    starts = range(0, size, _BLOCK)
    if size > _BLOCK * _BLOCKS:
        starts = [last * index // (_BLOCKS - 1) for index in range(_BLOCKS)]
    with path.open("rb") as file:
        for start in starts:
            file.seek(start)
            digest.update(file.read(_BLOCK))
    return f"{size} bytes, {digest.hexdigest()}"
