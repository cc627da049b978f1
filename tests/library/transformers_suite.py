"""transformers' own test mixins, for the installed version.

    python tests/library/transformers_suite.py

Only transformers' source distribution contains them, not the installed wheel. As a script, this file downloads that
distribution with pip and keeps its `tests` folder under `.cache/`; `make test` and `make test-all` do this first.
`load()` makes the folder importable as `transformers_library_tests`. It never downloads, so collecting the tests needs
no network.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

PACKAGE = "transformers_library_tests"
with_slow = True  # whether to make the tests marked slow; set by conftest.py
CACHE = Path(__file__).resolve().parents[2] / ".cache" / "transformers_tests"


class NoPackageIndex(Exception):
    """pip could not reach an index that has the source distribution."""


def load() -> None:
    """Make `transformers_library_tests` importable; skip the calling module if it has not been fetched."""
    if PACKAGE in sys.modules:
        return
    folder = CACHE / importlib.metadata.version("transformers")
    if not folder.is_dir():
        pytest.skip(
            "TRANSFORMERS' OWN TESTS WERE NOT RUN: fetch them with `python tests/library/transformers_suite.py`.",
            allow_module_level=True,
        )
    sys.path.insert(0, str(folder))
    add_stand_ins(folder / PACKAGE)


def fetch(version: str, cache: Path) -> Path:
    """The folder with the package of a version's tests; downloads it if necessary.

    A temporary folder is renamed at the end, so that neither an interrupted download nor a concurrent test run leaves
    or sees an incomplete package.

    Raises:
        NoPackageIndex: no index could be reached, or it has no source distributions.
        RuntimeError: pip failed for another reason, or the distribution has an unexpected layout.
    """
    final = cache / version
    if final.is_dir():
        return final
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="incomplete-") as scratch:
        download, unpacked = Path(scratch, "download"), Path(scratch, "unpacked")
        archive = download_source(version, download)
        unpack_tests(archive, unpacked)
        try:
            unpacked.rename(final)
        except OSError:
            # A concurrent run may have been faster.
            if not final.is_dir():
                raise
    return final


def download_source(version: str, folder: Path) -> Path:
    """The source archive of a transformers version, through whatever index pip is configured for."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--retries", "1", "--no-deps"]
    # Without isolation pip reads the metadata with the installed setuptools, without a build environment.
    command += ["--no-binary", ":all:", "--no-build-isolation", f"--dest={folder}", f"transformers=={version}"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        report = (result.stdout + result.stderr)[-3000:]
        # pip's messages for an unreachable index, and for one without source distributions.
        if "connection broken by" in report or "(from versions: none)" in report:
            raise NoPackageIndex(report)
        raise RuntimeError(f"{' '.join(command)} failed:\n{report}")
    archives = list(folder.glob("transformers-*.tar.gz"))
    if len(archives) != 1:
        raise RuntimeError(f"Expected one source archive from pip, but found {os.listdir(folder)}.")
    return archives[0]


def unpack_tests(archive: Path, folder: Path) -> None:
    """Unpack an archive's `tests` folder as `folder/transformers_library_tests`."""
    with tarfile.open(archive) as tar:
        root = archive.name.removesuffix(".tar.gz")
        members = [member for member in tar.getmembers() if member.name.startswith(f"{root}/tests/")]
        if not members:
            raise RuntimeError(f"{archive.name} has no folder {root}/tests.")
        options = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        tar.extractall(folder, members, **options)
    shutil.move(folder / root / "tests", folder / PACKAGE)
    (folder / root).rmdir()
    (folder / PACKAGE / "__init__.py").touch()


def add_stand_ins(folder: Path) -> None:
    """Modules that the mixins import but the source distribution lacks; none of them holds a test.

    Folders of later distributions take precedence.
    """
    stand_ins = {
        # A base class of ModelTesterMixin, which exports models to ONNX and other formats.
        "exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
        # Only used in a check that test cases of generating models inherit from it.
        "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
        # Non-default values of base fields, which ConfigTester passes to a configuration and reads back.
        "utils.test_configuration_utils": {
            "config_common_kwargs": {
                "architectures": ["EncoderForTesting"],
                "chunk_size_feed_forward": 3,
                "dtype": "float16",
                "id2label": {0: "low", 1: "middle", 2: "high"},
                "label2id": {"low": 0, "middle": 1, "high": 2},
                "output_attentions": True,
                "output_hidden_states": True,
                "problem_type": "multi_label_classification",
                "return_dict": False,
            }
        },
    }
    for name, contents in stand_ins.items():
        parent, _ = name.split(".")
        if (folder / parent).exists():
            continue
        package = ModuleType(f"{PACKAGE}.{parent}")
        package.__path__ = []
        module = ModuleType(f"{PACKAGE}.{name}")
        vars(module).update(contents)
        sys.modules[package.__name__], sys.modules[module.__name__] = package, module


def main() -> None:
    """Fetch the tests of the installed version; without a package index, say so and let the other tests run."""
    try:
        fetch(importlib.metadata.version("transformers"), CACHE)
    except NoPackageIndex as error:
        print(f"transformers' own tests will be skipped: no package index has their source.\n{error}", file=sys.stderr)


if __name__ == "__main__":
    main()
