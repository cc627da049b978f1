"""Interruptions, damage, full disks, changed data and second runs: a pretraining run resumes exactly, or is refused."""

import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time

import pretrain_mlm
import pytest
from engine import checkpoint, log
from engine import run as run_module
from engine.pretraining import Pretraining
from helpers import ROOT
from processes import exit_code, started
from tiny_training import (
    DEMO,
    SCRIPT,
    Killed,
    arguments,
    dies_at_call,
    environment,
    files_of,
    losses,
    run,
    same_weights,
    script,
    start,
    write_corpus,
)

from luna_hf.scripting import locked

# Log entries and checkpoints alternate, so that a checkpoint must hold the losses since the last entry.
DROPOUT = {"model__hidden_dropout_prob": 0.1, "max_steps": 6, "save_steps": 2, "eval_steps": 3, "log_steps": 3}


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted") / "out"
    run(folder, data=corpus, **DROPOUT)
    return folder


def kill(words, monkeypatch, module=Pretraining, name="update", call=5):
    with monkeypatch.context() as patched, pytest.raises(Killed):
        dies_at_call(patched, module, name, call)
        start(pretrain_mlm, words)


@pytest.fixture(scope="module")
def killed_run(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed") / "out"
    with pytest.MonkeyPatch.context() as monkeypatch:
        kill(arguments(DEMO, folder, data=corpus, **DROPOUT), monkeypatch)
    return folder


@pytest.fixture
def killed(killed_run, corpus, tmp_path):
    """A killed run that was moved to another folder, and the command that continues it there."""
    folder = tmp_path / "out"
    return shutil.copytree(killed_run, folder), arguments(DEMO, folder, data=corpus, **DROPOUT)


MOMENTS = {
    "the tokenizer is saved": (Pretraining, "write_tokenizer", 1),
    "between checkpoints": (Pretraining, "update", 5),
    "a checkpoint is complete under its other name": (checkpoint, "seal", 2),
    "a checkpoint is in place": (Pretraining, "save", 2),
    "the model is saved": (run_module, "save_model", 1),
    "all but the removal of checkpoints is done": (Pretraining, "report", 1),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_at_any_moment_resumes_exactly(corpus, tmp_path, monkeypatch, uninterrupted, moment):
    folder, words = tmp_path / "out", arguments(DEMO, tmp_path / "out", data=corpus, **DROPOUT)
    kill(words, monkeypatch, *MOMENTS[moment])
    logged = losses(folder)
    assert start(pretrain_mlm, words) == 0
    assert losses(folder) == losses(uninterrupted) and same_weights(folder, uninterrupted)
    assert losses(folder)[: len(logged)] == logged  # nothing that was logged is lost
    entries = [entry for entry in log.read_log(folder / "log.jsonl") if entry["kind"] != "resumed"]
    assert len(entries) == len({(entry["kind"], entry["step"]) for entry in entries})
    seconds = [entry["seconds"] for entry in entries if entry["kind"] == "train"]
    assert seconds == sorted(seconds)
    assert not list(folder.rglob("*.unfinished")) and not (folder / "checkpoints").exists()


def flip(path):
    """Change four bytes in the middle of a file."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 4] = bytes(byte ^ 0xFF for byte in content[middle : middle + 4])
    path.write_bytes(content)


def edit_step(path):
    path.write_text(path.read_text().replace('"step": 4', '"step": 3'))


DAMAGE = {
    "flipped moments": ("optimizer.bin", flip),
    "an edited step": ("state.json", edit_step),
    "no manifest": ("files.json", lambda path: path.write_text("[]")),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(killed, capsys, uninterrupted, kind):
    folder, words = killed
    newest, (name, damaged) = checkpoint.checkpoints(folder)[-1], DAMAGE[kind]
    before = files_of(newest)
    damaged(newest / name)
    assert files_of(newest) != before
    assert start(pretrain_mlm, words) == 0
    printed = capsys.readouterr().out
    assert f"{newest.name}: {name}" in printed and "step-00000002: step 2 of 6" in printed
    assert losses(folder) == losses(uninterrupted)


def _tensors(name, content):
    return lambda folder: checkpoint.torch.save(content, folder / name)


def _state(**changes):
    def changed(folder):
        state = json.loads((folder / "state.json").read_text())
        for part, values in changes.items():
            state[part] = {**state[part], **values} if isinstance(values, dict) else values
        (folder / "state.json").write_text(json.dumps(state))

    return changed


PLANTED = {
    "no state of an optimizer": _tensors("optimizer.bin", [1]),
    "no position in the data": _tensors("data_0.pt", [1]),
    "a step that is a text": _state(counters={"step": "x"}),
    "a step below zero": _state(counters={"step": -3}),
    "the step of another": _state(counters={"step": 10**9}),
    "no counters": _state(counters=[1]),
    "losses that are a text": _state(counters={"window": "x"}),
    "no record": _state(record=[1]),
    "no inputs": _state(record={"inputs": 5}),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_sealed_checkpoint_that_does_not_fit_is_named(corpus, tmp_path, monkeypatch, capsys, name):
    folder, words = tmp_path / "out", arguments(DEMO, tmp_path / "out", data=corpus, **DROPOUT)
    kill(words, monkeypatch)
    newest = checkpoint.checkpoints(folder)[-1]
    PLANTED[name](newest)
    checkpoint.seal(newest)
    assert start(pretrain_mlm, words) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and str(newest) in error


class Code:
    """Makes a folder where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_pickles_of_a_checkpoint_run_no_code(killed, tmp_path, capsys):
    folder, words = killed
    newest, made = checkpoint.checkpoints(folder)[-1], tmp_path / "made"
    pickles = [path for path in newest.iterdir() if path.suffix in (".pkl", ".bin", ".pt")]
    assert len(pickles) > 3
    for path in pickles:
        content = path.read_bytes()
        path.write_bytes(pickle.dumps(Code(str(made)), protocol=2))
        checkpoint.seal(newest)
        assert start(pretrain_mlm, words) == 2 and not made.exists(), path
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("error: ") and str(newest) in error, path
        # accelerate goes on without its random states, and then they are not those of the run.
        assert ("random states" if path.name.startswith("random_states") else "mkdir") in error, path
        path.write_bytes(content)


def test_entries_of_a_log_without_numbers_are_not_drawn(tmp_path):
    rows = [{"step": 1, "loss": 2.0}, {"step": 2}, {"step": 3, "loss": "x"}, {"step": float("inf"), "loss": 1.0}]
    (tmp_path / "log.jsonl").write_text(
        "".join(json.dumps({"kind": "train", **row}) + "\n" for row in rows) + "[" * 99_999
    )
    assert log.RunLog(tmp_path / "log.jsonl", True, 9).series("train", "loss") == ([1], [2.0])


def test_a_damaged_log_loses_the_damaged_lines_only(corpus, tmp_path, monkeypatch, capsys, uninterrupted):
    folder, words = tmp_path / "out", arguments(DEMO, tmp_path / "out", data=corpus, **{**DROPOUT, "log_steps": 1})
    kill(words, monkeypatch, call=6)
    logged = losses(folder)
    path = folder / "log.jsonl"
    path.write_bytes(path.read_bytes().replace(b"kind", b"\xff\xfe\xfd\xfc", 1))
    assert start(pretrain_mlm, words) == 0
    assert f"line 1 of {path}" in capsys.readouterr().err
    assert losses(folder)[: len(logged) - 2] == logged[1:-1] and same_weights(folder, uninterrupted)


@pytest.mark.parametrize("log_is", ["kept", "removed"])
def test_a_run_that_had_only_to_be_finished(corpus, tmp_path, monkeypatch, capsys, uninterrupted, log_is):
    folder, words = tmp_path / "out", arguments(DEMO, tmp_path / "out", data=corpus, **DROPOUT)
    kill(words, monkeypatch, run_module, "save_model", 1)
    entries = len((folder / "log.jsonl").read_text().splitlines())
    if log_is == "removed":
        (folder / "log.jsonl").unlink()
    capsys.readouterr()
    assert start(pretrain_mlm, words) == 0
    assert (f"log.jsonl lacks {entries} of" in capsys.readouterr().out) == (log_is == "removed")
    assert same_weights(folder, uninterrupted)
    assert 0 < json.loads((folder / "metrics.json").read_text())["mfu"] < 1.5


def test_a_run_without_a_checkpoint_starts_again(corpus, tmp_path, monkeypatch, uninterrupted):
    options = {**DROPOUT, "save_steps": 4, "overwrite_output_dir": "false", "trackers": "[tensorboard]"}
    folder, words = tmp_path / "out", arguments(DEMO, tmp_path / "out", data=corpus, **options)
    kill(words, monkeypatch, checkpoint, "seal", 1)
    assert (folder / "log.jsonl").exists() and not checkpoint.checkpoints(folder)
    assert start(pretrain_mlm, words) == 0
    assert losses(folder) == losses(uninterrupted)


def test_what_is_left_of_a_finished_runs_checkpoints_is_removed(corpus, tmp_path, monkeypatch, capsys):
    folder, options = tmp_path / "out", {**DROPOUT, "overwrite_output_dir": "false"}
    words = arguments(DEMO, folder, data=corpus, **options)
    kill(words, monkeypatch, Pretraining, "report", 1)
    for path in checkpoint.checkpoints(folder):
        (path / "model.safetensors").unlink()
    finished = files_of(folder / "model.safetensors")
    assert pretrain_mlm.main(words) == 2
    error = capsys.readouterr().err
    assert "--overwrite_output_dir" in error and "damaged" not in error
    assert files_of(folder / "model.safetensors") == finished and not (folder / "checkpoints").exists()


# ---- data that change, and disks that fill ----


def rewrite(path):
    """Other text of the same size, at the same time."""
    times = path.stat()
    path.write_text(path.read_text().replace("the", "eht"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("role", ["data", "validation"])
def test_changed_data_are_refused_or_accepted(tmp_path, monkeypatch, capsys, role):
    texts = {name: write_corpus(tmp_path / name) for name in ("data", "validation")}
    folder, options = tmp_path / "out", {**DROPOUT, **texts}
    words = arguments(DEMO, folder, **options)
    unchanged = run(tmp_path / "unchanged", **options)
    kill(words, monkeypatch)
    before = files_of(folder)
    rewrite(texts[role] / "b.txt")
    assert pretrain_mlm.main(words) == 2
    error = capsys.readouterr().err
    assert str(texts[role] / "b.txt") in error and "--accept_changed_data" in error and "a.txt" not in error
    assert files_of(folder) == before
    assert start(pretrain_mlm, [*words, "--accept-changed-data"]) == 0
    assert str(texts[role] / "b.txt") in capsys.readouterr().out
    figures = json.loads((folder / "metrics.json").read_text())
    assert any("step 4" in note and "b.txt" in note for note in figures["notes"])
    for name in ("inputs_fingerprint", "held_out_loss"):
        assert figures[name] != unchanged[name]


@pytest.mark.parametrize("writer", [(checkpoint, "seal"), (checkpoint.torch, "save")], ids=["seal", "torch"])
def test_a_full_disk_leaves_the_earlier_checkpoint(corpus, tmp_path, monkeypatch, capsys, uninterrupted, writer):
    folder, words = tmp_path / "out", arguments(DEMO, tmp_path / "out", data=corpus, **DROPOUT)
    module, name = writer
    original = getattr(module, name)

    def full(*values, **keywords):
        if checkpoint.checkpoints(folder):
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*values, **keywords)

    with monkeypatch.context() as patched:
        patched.setattr(module, name, full)
        assert pretrain_mlm.main(words) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and "step-00000004" in error
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000002"]
    assert start(pretrain_mlm, words) == 0
    assert losses(folder) == losses(uninterrupted)


# ---- two runs in one folder ----


def test_a_folder_in_use_is_refused(corpus, tmp_path, capsys):
    folder, words = tmp_path / "out", arguments(DEMO, tmp_path / "out", data=corpus, **LONG)
    process = start_and_wait(words, folder, entries=3)
    before = losses(folder)
    assert pretrain_mlm.main(words) == 2
    error = capsys.readouterr().err
    assert str(process.pid) in error and str(folder) in error and error.count("\n") == 1
    process.kill()
    process.join()
    assert losses(folder)[: len(before)] == before
    with locked(folder / ".lock"):  # a killed process no longer holds it
        pass


def start_and_wait(words, folder, entries):
    """A run in a new process, once its log has this many lines."""
    process, path = started(exit_with, words), folder / "log.jsonl"
    while not (path.is_file() and len(path.read_text().splitlines()) >= entries):
        assert process.is_alive(), "the run ended before it could be interrupted"
        time.sleep(0.005)
    return process


def exit_with(words):
    sys.exit(pretrain_mlm.main(words))


LONG = {**DROPOUT, "max_steps": 60, "save_steps": 5, "eval_steps": 1000, "log_steps": 1}


def test_sigkill_and_then_sigterm_do_not_change_the_losses(corpus, tmp_path):
    folder, words = tmp_path / "out", arguments(DEMO, tmp_path / "out", data=corpus, **LONG)
    process = start_and_wait(words, folder, entries=7)
    process.kill()
    assert exit_code(process) == -signal.SIGKILL
    logged = losses(folder)
    process = start_and_wait(words, folder, entries=16)
    process.terminate()
    assert exit_code(process) == 0
    stopped_at = losses(folder)[-1][1]
    assert checkpoint.checkpoints(folder)[-1].name == f"step-{stopped_at:08d}"
    assert start(pretrain_mlm, words) == 0
    run(tmp_path / "reference", data=corpus, **LONG)
    assert losses(folder)[: len(logged)] == logged
    assert losses(folder) == losses(tmp_path / "reference") and same_weights(folder, tmp_path / "reference")
    assert sum(entry["kind"] == "resumed" for entry in log.read_log(folder / "log.jsonl")) == 2


def held_out(folder):
    return [entry["loss"] for entry in log.read_log(folder / "log.jsonl") if entry["kind"] == "held_out"]


def test_checkpoints_are_resumed_by_the_same_recipe_only(corpus, tmp_path, monkeypatch, capsys):
    options = {**DROPOUT, "model__hidden_dropout_prob": 0.0, "overwrite_output_dir": "false"}
    words = arguments(DEMO, tmp_path / "out", data=corpus, **options)
    kill(words, monkeypatch, call=3)
    assert pretrain_mlm.main([*words, "--learning-rate", "1e-4"]) == 2
    assert "learning_rate" in capsys.readouterr().err
    assert pretrain_mlm.main([*words, "--no-resume"]) == 2
    assert "--overwrite_output_dir" in capsys.readouterr().err
    assert len(checkpoint.checkpoints(tmp_path / "out")) == 1
    # These change nothing that is learnt. The checkpoint lies between updates, however many passes they have.
    assert start(pretrain_mlm, [*words, "--log-steps", "2", "--batch-size", "2"]) == 0
    resumed = held_out(tmp_path / "out")
    assert "resumed" in (tmp_path / "out" / "log.jsonl").read_text()
    assert start(pretrain_mlm, [*words, "--no-resume", "--overwrite-output-dir"]) == 0
    assert "resumed" not in (tmp_path / "out" / "log.jsonl").read_text()
    assert resumed == pytest.approx(held_out(tmp_path / "out"), rel=1e-5)


@pytest.mark.slow
def test_two_processes_resume_exactly(corpus, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    options = LONG
    words = arguments(DEMO, tmp_path / "out", data=corpus, **options)
    process = subprocess.Popen([sys.executable, *launcher, SCRIPT, *words], cwd=ROOT, env=environment())
    path = tmp_path / "out" / "log.jsonl"
    while not (path.is_file() and len(path.read_text().splitlines()) >= 25):
        assert process.poll() is None
        time.sleep(0.02)
    process.terminate()
    process.wait()
    assert script(*words, launcher=launcher).returncode == 0
    assert script(*arguments(DEMO, tmp_path / "whole", data=corpus, **options), launcher=launcher).returncode == 0
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")
