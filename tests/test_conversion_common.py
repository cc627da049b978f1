"""What all conversion scripts do with their target, with signals, and with a disk that is full."""

import os
import signal
import subprocess
import sys
import time

import fairseq_luna
import pytest
import shared as common
from helpers import ROOT
from safetensors import SafetensorError
from shared import UserError, run_script, writing
from tiny_fairseq import write_archive, write_tiny

# A conversion that says when it has begun to write, and then takes its time.
SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background may have been told to ignore it
sys.path.insert(0, sys.argv[1])
import fairseq_luna

def slow(folder, *_):
    (folder / "part").write_text("x")
    print("writing", flush=True)
    time.sleep(60)

fairseq_luna.save = slow
sys.exit(fairseq_luna.main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [(signal.SIGTERM, 128 + signal.SIGTERM, "terminated"), (signal.SIGINT, 130, "interrupted")],
)
def test_a_run_that_is_stopped_leaves_nothing(number, status, said, tmp_path):
    source, temporary = write_archive(write_tiny(tmp_path / "source" / "luna.tiny")), tmp_path / "temporary"
    temporary.mkdir()
    words = [sys.executable, "-c", SLOW, str(ROOT / "conversion"), str(source), str(tmp_path / "out")]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    for line in process.stdout:
        if line == "writing\n":
            break
    assert list(temporary.glob("luna-*")) and list(tmp_path.glob(".out.unfinished-*"))
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status
    assert errors.splitlines()[-1] == f"{said}: nothing was written" and "Traceback" not in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "temporary"]
    assert not list(temporary.glob("luna-*"))


def test_interrupted():
    def stopped():
        raise KeyboardInterrupt

    assert run_script(stopped) == 130
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        Exception("No space left on device (os error 28)"),
    ],
    ids=["python", "safetensors", "tokenizers"],
)
def test_a_full_disk(error, tmp_path):
    with pytest.raises(UserError, match=r"cannot be written .*No space left"), writing(tmp_path / "out"):
        raise error
    assert not list(tmp_path.iterdir())


def test_errors_of_ours_are_not_the_disk_s(tmp_path):
    with pytest.raises(ZeroDivisionError), writing(tmp_path / "new" / "folders" / "out"):
        raise ZeroDivisionError
    with pytest.raises(UserError, match=r"^of the source"), writing(tmp_path / "new" / "folders" / "out"):
        raise UserError("of the source (os error 5)")
    assert not list(tmp_path.iterdir())


def test_no_room_to_unpack(tmp_path, capsys, monkeypatch):
    archive = write_archive(write_tiny(tmp_path / "luna.tiny"))

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fairseq_checkpoint.shutil.copyfileobj", full)
    assert fairseq_luna.main([str(archive), str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "TMPDIR" in message and "No space left" in message


def test_two_runs_to_one_target(tmp_path):
    """The slower one does not replace what the faster one wrote."""
    with pytest.raises(UserError, match="another run in the meantime"), writing(tmp_path / "out") as folder:
        (folder / "model").write_text("slow")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "model").write_text("fast")
    assert (tmp_path / "out" / "model").read_text() == "fast"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_target_that_cannot_be_made_is_said_first(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr(fairseq_luna, "make_model", lambda *_: pytest.fail("the checkpoint was converted first"))
    assert fairseq_luna.main([str(write_tiny(tmp_path / "source")), str(tmp_path / "file" / "out")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_others_may_read_what_is_written(tmp_path):
    source = write_tiny(tmp_path / "source")
    assert fairseq_luna.main([str(source), str(tmp_path / "out")]) == 0
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert len(modes) == 1


def test_the_hub_is_asked_once(tmp_path, capsys, monkeypatch):
    """And not for every file, with a warning for every attempt."""
    asked = []

    def unreachable(name, file):
        asked.append(file)
        raise OSError("We couldn't connect to the Hub\nand more")

    monkeypatch.setattr("fairseq_tokenizer.cached_file", unreachable)
    source = write_tiny(tmp_path / "source", bpe=False)
    started = time.monotonic()
    assert fairseq_luna.main([str(source), str(tmp_path / "out")]) == 2
    assert time.monotonic() - started < 10 and asked == ["vocab.json"]
    captured = capsys.readouterr()
    assert "from openai-community/gpt2 on the Hub" in captured.err and not captured.out
    assert "(We couldn't connect to the Hub)" in captured.err and "--gpt2-bpe FOLDER" in captured.err


def test_the_words_of_a_disk():
    assert common.is_of_disk(OSError()) and not common.is_of_disk(ValueError("of the os"))
