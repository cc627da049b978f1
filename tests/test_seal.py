"""Sealed folders: any change of their files is found and named."""

import json
import os

import pytest
from common.seal import damage, seal

CHANGES = {
    "cut": lambda path: os.truncate(path, 5),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "another byte": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"),
    "removed": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "inner" / "b").write_bytes(bytes(range(256)) * 9000)  # several parts
    seal(tmp_path)
    return tmp_path


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_found(folder, change):
    assert damage(folder) is None
    CHANGES[change](folder / "inner" / "b")
    assert damage(folder).startswith("inner/b ")


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{}x", b"\xff", b'{"a": 0}', b'{"a": [0]}', b'{"a": {}}', b"1"])
def test_a_damaged_manifest_is_found(folder, content):
    manifest = folder / "files.json"
    manifest.unlink() if content is None else manifest.write_bytes(content)
    assert damage(folder).startswith("files.json ")


def test_a_file_that_the_manifest_lacks_is_found(folder):
    manifest = folder / "files.json"
    listed = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({"a": listed["a"]}))
    assert damage(folder).endswith(" inner/b")
