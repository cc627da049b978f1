"""Sealed folders: any change of their files is found and named."""

import json
import os
import shutil

import pytest
from common.seal import damage, newest_intact, seal

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


def test_a_folder_is_sealed_again(folder):
    (folder / "a").write_bytes(b"new")
    seal(folder)
    assert damage(folder) is None


def test_the_newest_intact_folder_is_chosen(folder):
    told, newer = [], shutil.copytree(folder, folder / "newer")
    (newer / "a").write_bytes(b"new")
    seal(folder)
    assert newest_intact([newer, folder], told.append) == folder and "newer: a has 3 bytes" in told[0]
    assert newest_intact([newer], told.append) is None


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
