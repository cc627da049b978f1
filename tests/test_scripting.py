"""What all commands share: locks on folders, full disks, fingerprints of data."""

import io
import json
import os
import pickle
import resource
import subprocess
import sys

import pytest
import torch
from common.fingerprint import changed_files, fingerprint
from helpers import ROOT, refused
from safetensors.torch import save_file

from luna_hf.scripting import (
    UserError,
    _lock,
    locked,
    read_json,
    refuse_links,
    run_script,
    write_text,
)

_HOLD = """
import sys
from pathlib import Path
from scripting import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


_FORK = """
import os, sys
from pathlib import Path
from scripting import locked
with locked(Path(sys.argv[1])):
    child = os.fork()
    if not child:
        sys.stdin.read()
        os._exit(0)
print("free", flush=True)
os.waitpid(child, 0)
"""


def start(program, folder):
    """A process that imports `scripting.py` alone, which takes no time."""
    command = [sys.executable, "-c", program, str(folder / ".lock")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src" / "luna_hf")}
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def holder(tmp_path):
    with start(_HOLD, tmp_path) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_lock_names_its_holder_and_ends_with_it(tmp_path, holder):
    with refused(tmp_path, holder.pid, error=UserError), locked(tmp_path / ".lock"):
        pass
    holder.kill()
    holder.wait()
    with locked(tmp_path / ".lock"):
        assert (tmp_path / ".lock").exists()
    assert not (tmp_path / ".lock").exists()


def test_lock_is_free_after_an_error(tmp_path):
    with pytest.raises(KeyError), locked(tmp_path / ".lock"):
        raise KeyError
    with locked(tmp_path / ".lock"), refused(tmp_path, error=UserError), locked(tmp_path / ".lock"):
        pass
    assert not list(tmp_path.iterdir())


def test_lock_is_free_while_a_forked_child_lives(tmp_path):
    with start(_FORK, tmp_path) as process:
        assert process.stdout.readline() == "free\n"
        with locked(tmp_path / ".lock"):
            pass


def test_a_removed_file_is_no_lock(tmp_path):
    """Its holder has removed it between the opening and the locking by this process."""
    path = tmp_path / ".lock"
    with path.open("a+") as file:
        path.unlink()
        assert not _lock(file)
        path.touch()  # of a third process
        assert not _lock(file)
        with locked(path):
            pass


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\0garbage", b"\n" * 9, b"a\nb\nc", b"process x on y", b"[] \x1b[31m"]
)
def test_a_lock_is_reported_in_one_line_whatever_it_holds(tmp_path, holder, content):
    (tmp_path / ".lock").write_bytes(content)
    with refused("in use by another process", error=UserError), locked(tmp_path / ".lock"):
        pass
    holder.kill()
    holder.wait()
    (tmp_path / ".lock").write_bytes(content)  # of a process that was killed
    with locked(tmp_path / ".lock"):
        assert (tmp_path / ".lock").read_text().startswith("process ")


def test_an_error_is_one_line_that_a_terminal_shows(capsys):
    def script():
        raise UserError("There is no a\nb\x1b[2J\x9b\u043f.")

    assert run_script(script) == 2
    assert capsys.readouterr().err == "error: There is no a b\\x1b[2J\\x9b\u043f.\n"


@pytest.mark.parametrize("error", [PermissionError(13, "denied", "out/.lock"), PermissionError("out/.lock")])
def test_a_missing_permission_takes_one_line_that_names_the_file(error, capsys):
    def script():
        raise error

    assert run_script(script) == 2
    assert "error: no permission to use out/.lock: change its rights" in capsys.readouterr().err


# ---- encodings ----

_PRINT = r"""
import sys
import scripting as s
from pathlib import Path
from tqdm import tqdm
s._hide_progress_bars = lambda: None  # which imports transformers
def script():
    print("\u0441\u043e\u0431\u0430\u043a\u0430 \U0001f415")
    print("\u0441\u043e\u0431\u0430\u043a\u0430", file=sys.stderr)
    for _ in tqdm([1]):
        tqdm.write("\u4e2d")
    s.write_text(Path("text"), s.readable("\u4e2d \udcd0\udca9"))
    s.write_json(Path("json"), "\u4e2d \udcd0\ud800")
def use():
    open(chr(0x4e2d))
sys.exit(s.run_script(use if len(sys.argv) > 1 else script))
"""
PLAIN_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ENCODINGS = [
    {"PYTHONIOENCODING": "latin-1"},
    {"PYTHONIOENCODING": "ascii:strict"},
    {"PYTHONIOENCODING": "cp1252"},
    PLAIN_LOCALE,
    {"LC_ALL": "C", "PYTHONUTF8": "1"},
]


def run_light(folder, *words, **variables):
    """Run `_PRINT` in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src" / "luna_hf"), **variables}
    command = [sys.executable, "-c", _PRINT, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", cwd=folder)


@pytest.mark.parametrize("variables", ENCODINGS)
def test_any_text_is_printed_and_files_are_utf8(variables, tmp_path):
    ended = run_light(tmp_path, **variables)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr and len(ended.stdout.splitlines()) == 2
    assert (tmp_path / "text").read_text(encoding="utf-8") == "\u4e2d \u0429"
    assert json.loads((tmp_path / "json").read_text(encoding="utf-8")) == "\u4e2d \udcd0\ud800"


@pytest.mark.parametrize("word", ["\u4e2d", "x"])
def test_a_name_that_the_locale_cannot_express_takes_one_line(word, tmp_path):
    """A word of the command line, and a name from elsewhere, such as a recipe."""
    ended = run_light(tmp_path, word, **PLAIN_LOCALE)
    assert ended.returncode == 2 and "PYTHONUTF8=1" in ended.stderr and ended.stderr.count("\n") == 1


def _fill_text(path):
    path.write_bytes(b"0" * 10_000)


def _fill_torch(path):
    torch.save(torch.zeros(10_000), path)


def _fill_safetensors(path):
    save_file({"x": torch.zeros(10_000)}, path)


@pytest.mark.parametrize("fill", [_fill_text, _fill_torch, _fill_safetensors])
def test_full_disk_takes_one_line(tmp_path, capsys, fill):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, before[1]))
    try:
        status = run_script(lambda: fill(tmp_path / "file"), "earlier checkpoints are whole")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    error = capsys.readouterr().err
    assert status == 2
    assert error.startswith("error: ") and error.count("\n") == 1
    assert "earlier checkpoints are whole" in error


def _rust():
    raise Exception("Permission denied (os error 13)")


def _folder_in_place_of_a_file():
    open(ROOT)  # noqa: SIM115


def _lines():
    raise UserError("first\n  second")


def _pickle():
    torch.load(io.BytesIO(pickle.dumps(Code())), weights_only=False)


class Code:
    """Raises where it is unpickled."""

    def __reduce__(self):
        return exec, ("raise KeyError",)


@pytest.mark.parametrize("script", [_rust, _folder_in_place_of_a_file, _lines, _pickle])
def test_errors_of_the_system_and_pickles_take_one_line(capsys, monkeypatch, script):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    before = dict(os.environ)
    assert run_script(script) == 2 and dict(os.environ) == before
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


def test_what_a_link_leads_to_is_not_written(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    lock, unfinished = tmp_path / "out" / ".lock", tmp_path / "out" / ".run.json.unfinished"
    lock.parent.mkdir()
    for make in (lock.symlink_to, lock.hardlink_to):
        make(victim)
        with refused(lock, error=UserError), locked(lock):
            pass
        lock.unlink()
    unfinished.symlink_to(victim)
    write_text(tmp_path / "out" / "run.json", "{}")
    assert victim.read_text() == "mine" and not unfinished.exists()


@pytest.mark.parametrize("kind", ["file", "dangling", "folder", "in a folder", "checkpoint"])
def test_links_that_lead_out_of_a_folder_are_refused(tmp_path, kind):
    out = tmp_path / "out"
    (out / "inner" / "wandb").mkdir(parents=True)
    (tmp_path / "victim").touch()
    (out / "near").symlink_to("inner")  # stays inside
    (out / "inner" / "wandb" / "log").symlink_to(tmp_path / "victim")
    refuse_links(out)
    link = (out / "inner" if kind == "in a folder" else out) / ("checkpoint-3" if kind == "checkpoint" else "link")
    link.symlink_to({"checkpoint": "inner", "dangling": "../gone", "folder": tmp_path}.get(kind, tmp_path / "victim"))
    with refused(link, error=UserError):
        refuse_links(out)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.hardlink_to(path.parents[1] / "victim")])
def test_pipes_hard_links_and_folders_for_files_in_a_folder_are_refused(tmp_path, make):
    (tmp_path / "victim").touch()
    (tmp_path / "out").mkdir()
    make(tmp_path / "out" / "config.json")
    with refused(tmp_path / "out" / "config.json", error=UserError):
        refuse_links(tmp_path / "out")


@pytest.mark.parametrize("content", [None, b"", b'{"a": 1', b"[]", b"null", b"\xff", b"[" * 100_000, b'{"b": 1}'])
def test_a_damaged_json_file_is_named(tmp_path, content):
    path = tmp_path / "run.json"
    if content is not None:
        path.write_bytes(content)
    with refused(path, error=UserError):
        read_json(path)["a"]


def test_output_that_its_reader_has_closed_is_no_traceback():
    script = "import luna_hf.scripting as s, sys; sys.exit(s.run_script(lambda: print('x')))"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()  # as `| head` does
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.mark.parametrize("size", [0, 10, 20_000_000])
def test_fingerprint_sees_changes(tmp_path, size):
    same, other, gone = (tmp_path / name for name in ("same", "other", "gone"))
    for path in (same, other, gone):
        path.write_bytes(b"a" * size)
    before = fingerprint([same, other, gone])
    with other.open("r+b") as file:
        file.seek(max(size - 1, 0))
        file.write(b"b")
    (tmp_path / "new").touch()
    assert changed_files(before, before) == []
    after = fingerprint([same, other, tmp_path / "new"])
    assert changed_files(before, after) == [str(other), str(gone), str(tmp_path / "new")]
