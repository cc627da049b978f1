"""What every conversion command does with its target, with signals, and with a full disk."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import fairseq_luna
import from_roberta
import luna_to_fairseq
import pytest
import roberta_to_luna
from helpers import ROOT, refused
from tiny_fairseq import write_archive, write_tiny

from luna_hf.scripting import UserError, writing

# A conversion that reports when it begins to write, and then waits.
SLOW = """
import sys, time
sys.path.insert(0, sys.argv[1])
import fairseq_luna

def slow(folder, *_):
    (folder / "part").write_text("x")
    print("writing", flush=True)
    time.sleep(60)

fairseq_luna.save = slow
sys.exit(fairseq_luna.main(sys.argv[2:]))
"""


@pytest.fixture
def source(tmp_path):
    return write_tiny(tmp_path / "source" / "luna.tiny")


def run(source, target, *words):
    return fairseq_luna.main([str(source), str(target), *words])


def test_a_killed_run_leaves_nothing(source, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    words = [sys.executable, "-c", SLOW, str(ROOT / "conversion"), str(write_archive(source)), str(tmp_path / "out")]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert any(line == "writing\n" for line in process.stdout)
    assert list(temporary.glob("luna-*")) and (tmp_path / ".out.unfinished").is_dir()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and "Traceback" not in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "temporary"]
    assert not list(temporary.glob("luna-*"))


def test_an_error_keeps_the_earlier_conversion(source, tmp_path, capsys, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to("real")  # a link stays one
    assert run(source, tmp_path / "out") == 0
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert run(source, tmp_path / "out") == 2 and "--overwrite" in capsys.readouterr().err

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("luna_hf.LunaForMaskedLM.save_pretrained", full_disk)
        assert run(source, tmp_path / "out", "--overwrite") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert run(source, tmp_path / "out", "--overwrite") == 0
    assert (tmp_path / "out").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "real", "source"]


@pytest.mark.parametrize("command", [fairseq_luna, roberta_to_luna, luna_to_fairseq])
def test_a_second_conversion_is_refused_at_once(command, source, tmp_path, capsys, monkeypatch):
    for module in (from_roberta, luna_to_fairseq, fairseq_luna):
        name = "make_model" if module is fairseq_luna else "load_tokenizer"
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("it has read the source"))
    with writing(tmp_path / "out"):
        assert command.main([str(source), str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert str(tmp_path / "out") in message and str(os.getpid()) in message and message.count("\n") == 1


def test_two_runs_with_one_target(tmp_path):
    """The slower one does not replace what the faster one wrote."""
    with refused("out", error=UserError), writing(tmp_path / "out") as folder:
        (folder / "model").write_text("slow")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "model").write_text("fast")
    assert (tmp_path / "out" / "model").read_text() == "fast"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("moved", [False, True])
def test_what_a_killed_process_left_is_removed_or_put_back(moved, tmp_path):
    for name in (".out.unfinished", ".out.earlier", *([] if moved else ["out"])):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    with writing(tmp_path / "out") as folder:
        assert [path.name for path in (tmp_path / "out").iterdir()] == [".out.earlier" if moved else "out"]
        (folder / "new").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]


def test_targets_that_are_refused(source, tmp_path, capsys, monkeypatch):
    """Before any work."""
    monkeypatch.setattr(fairseq_luna, "make_model", lambda *_: pytest.fail("the checkpoint was converted first"))
    (tmp_path / "file").write_text("x")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    monkeypatch.chdir(tmp_path)
    targets = {
        "out": "thesis.tex",
        "file": "file",
        str(source): "SOURCE",
        str(source.parent): "SOURCE",
        ".": "TARGET .",
    }
    for target, named in targets.items():
        for words in ([], ["--overwrite"]):
            assert run(source, target, *words) == 2
            assert named in capsys.readouterr().err
    assert (tmp_path / "out" / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("command", [fairseq_luna, roberta_to_luna, luna_to_fairseq])
def test_what_the_end_needs_is_checked_first(command, source, tmp_path, capsys, monkeypatch):
    module = from_roberta if command is roberta_to_luna else command
    monkeypatch.setattr(module, "TEMPLATE", tmp_path / "gone.md")
    assert command.main([str(source), str(tmp_path / "out")]) == 2
    assert f"{tmp_path / 'gone.md'}, is missing" in capsys.readouterr().err
    monkeypatch.undo()
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "out")
    assert command.main([str(source), str(tmp_path / "out")]) == 2
    assert "mounted" in capsys.readouterr().err


def test_the_hub_is_asked_once(tmp_path, capsys, monkeypatch):
    """Not for every file."""
    asked = []

    def unreachable(name, file):
        asked.append(file)
        raise OSError("We couldn't connect to the Hub\nand more")

    monkeypatch.setattr("fairseq_format.tokenizer.cached_file", unreachable)
    assert run(write_tiny(tmp_path / "source", bpe=False), tmp_path / "out") == 2
    assert asked == ["vocab.json"]
    message = capsys.readouterr().err
    assert all(named in message for named in ("openai-community/gpt2", "couldn't connect to the Hub", "--gpt2-bpe"))
