"""The learning study: its driver compares what its tables claim to compare."""

import importlib
import json
import random
import re
import sys
from pathlib import Path

import finetuning
import learning
import learning_report
import pyarrow
import pytest
import running
from accelerate.state import AcceleratorState
from common.models import make_config
from helpers import ROOT
from matplotlib.figure import Figure
from pyarrow.parquet import write_table

from luna_hf.scripting import UserError

WORDS = ["the", "token", "reads", "every", "packed", "sequence", "of", "fixed", "length", "in", "its", "layer"]
SHRINK = {
    "max_steps": 4,
    "eval_steps": 2,
    "log_steps": 2,
    "vocab_size": 300,
    "block_size": 16,
    "global_batch_tokens": 64,
    "eval_blocks": 20,
    "model.hidden_size": 32,
    "model.intermediate_size": 32,
    "mixed_precision": "no",
}
SHRINK_WORDS = running.option_words(SHRINK)
RESULTS = ROOT / "experiments" / "results"
LAUNCH = running.launch


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with a corpus and a task, as the studies expect it; training commands run in this process."""

    def launch(script, words, threads):
        AcceleratorState._reset_state(reset_partial_state=True)  # as in a new process
        with pytest.MonkeyPatch.context() as command:
            command.setattr(sys, "argv", [script, *words])
            command.setattr(Figure, "savefig", lambda *_, **__: None)  # plots of single runs take half of the time
            if importlib.import_module(Path(script).stem).main(words):
                raise UserError(f"{script} failed")

    folder = tmp_path_factory.mktemp("data")
    generator = random.Random(0)
    for name, column, rows in (
        ("enwiki/train", "text", 60),
        ("enwiki/validation", "text", 12),
        ("glue/sst2/train", "sentence", 24),
        ("glue/sst2/validation", "sentence", 12),
    ):
        texts = [" ".join(generator.choices(WORDS, k=20)) + f" {index}." for index in range(rows)]
        labels = {"label": [index % 2 for index in range(rows)]} if column == "sentence" else {}
        path = folder / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_table(pyarrow.table({column: texts} | labels), path)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in (running, finetuning):
            monkeypatch.setattr(module, "launch", launch)
        yield folder


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """A folder with finished runs of two systems."""
    folder = tmp_path_factory.mktemp("runs")
    where = ["--data", str(data), "--runs", str(folder)]
    assert learning.main(["pretrain", *where, "--systems", "roberta", "luna-conv", *SHRINK_WORDS]) == 0
    return folder


def test_runs_differ_only_in_the_system_and_finished_ones_are_skipped(runs, data, capsys):
    folders = {path.name: path for path in (runs / "pretrain").iterdir()}
    assert folders.keys() == {"roberta-seed0", "luna-conv-seed0"}
    described = {name: running.read_json(path / "run.json") for name, path in folders.items()}
    plain, conv = (described[name]["recipe"] for name in ("roberta-seed0", "luna-conv-seed0"))
    assert {key for key, value in plain.items() if value != conv[key]} == {"model_name", "output_dir", "model"}
    assert conv["max_steps"] == 4 and conv["learning_rate"] == 3e-3 and conv["model"]["conv_kernel_size"] == 5
    assert len({(path / "tokenizer.json").read_text() for path in folders.values()}) == 1
    assert not any(str(folder) in json.dumps(described) for folder in (runs, data))

    weights = {path: path.stat().st_mtime_ns for path in runs.rglob("model.safetensors")}
    where = ["--data", str(data), "--runs", str(runs)]
    assert learning.main(["pretrain", *where, "--systems", "roberta", "luna-conv", *SHRINK_WORDS]) == 0
    assert weights == {path: path.stat().st_mtime_ns for path in runs.rglob("model.safetensors")}


def test_report_of_finished_runs(runs, data, tmp_path, capsys):
    folder = tmp_path / "results"
    command = ["report", "--runs", str(runs), "--results", str(folder)]
    assert learning.main(command) == 2
    assert "speed.json" in capsys.readouterr().err
    where = ["--data", str(data), "--runs", str(runs)]
    assert learning.main(["speed", *where, "--rounds", "1"]) == 0
    assert learning.main(["finetune", *where, "--tasks", "sst2", "--systems", "luna-conv", "--max_steps", "2"]) == 0
    assert learning.main(command) == 0

    (path,) = folder.glob("learning-pretrain-cpu-float32-torch*.json")
    result = check(path, learning_report.text)
    assert path.with_name(f"{path.stem}-attention.png").stat().st_size > 5_000
    assert [run["system"] for run in result["runs"]] == ["roberta", "luna-conv"]
    seconds = running.read_json(runs / "speed.json")["seconds_per_step"]
    curve, cost = result["runs"][0]["curve"], seconds["roberta"]["median"]
    assert curve["step"] == [2, 4] and curve["seconds"] == pytest.approx([2 * cost, 4 * cost], 1e-4)
    log = running.read_log(runs / "pretrain" / "roberta-seed0", "held_out")
    assert curve["loss"] == pytest.approx([entry["loss"] for entry in log], rel=1e-5)

    (path,) = folder.glob("learning-finetune-cpu-float32-torch*.json")
    task = check(path, finetuning.table)["tasks"]["sst2"]
    assert task["models"]["luna-conv"]["seeds"] == [0, 1] and task["max_length"] == 128
    assert task["command"].startswith("python training/finetune_glue.py")
    for written in folder.iterdir():
        assert not any(str(place).encode() in written.read_bytes() for place in (tmp_path, runs, data))


def check(path, text):
    """A result file names its origin and no machine's folders, and its table and plot are there."""
    result = running.read_json(path)
    assert re.fullmatch(r"python experiments/\w+\.py report", result["command"])
    assert result["protocol"] and result["date"] and result["machine"]["cpu"] and result["machine"]["threads"] >= 1
    assert {"python", "torch", "transformers", "luna_hf"} <= result["versions"].keys()
    assert path.with_suffix(".md").read_text() == text(result) + "\n"
    assert path.with_suffix(".png").stat().st_size > 5_000
    assert not re.search(r"(?<![\w.])/(work|tmp|home|root)/", path.read_text())
    return result


def test_runs_of_different_recipes_are_not_compared(runs):
    path = runs / "pretrain" / "luna-conv-seed0" / "run.json"
    text = path.read_text()
    assert len(learning_report.finished(runs)) == 2
    try:
        path.write_text(text.replace('"learning_rate": 0.003', '"learning_rate": 1.0'))
        with pytest.raises(UserError, match="learning_rate"):
            learning_report.finished(runs)
    finally:
        path.write_text(text)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["pretrain"], "--data"),
        (["report", "--max_steps", "3"], "--max_steps"),
        (["finetune", "--data", "nowhere"], "roberta-seed0"),
        (["report"], "learning.py pretrain"),
    ],
)
def test_mistakes_of_the_user(arguments, named, tmp_path, capsys):
    assert learning.main([*arguments, "--runs", str(tmp_path)]) == 2
    assert named in capsys.readouterr().err


def test_commands_run_in_processes_that_may_save_when_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "ROOT", tmp_path)
    (tmp_path / "fails.py").write_text("import sys; sys.exit(len(sys.argv))")
    with pytest.raises(UserError, match=r"fails\.py.*3"):
        LAUNCH("fails.py", ["--key", "value"], threads=1)
    (tmp_path / "stops.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(sys.argv[1]).touch(), sys.exit()))\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "time.sleep(60)\n"
    )
    with pytest.raises(KeyboardInterrupt):
        LAUNCH("stops.py", [str(tmp_path / "saved")], threads=1)
    assert (tmp_path / "saved").exists()


def test_systems_match_their_names():
    configs = {name: make_config(own, None, 300) for name, own in learning.SYSTEMS.items()}
    lunas = {name: config for name, config in configs.items() if name.startswith("luna")}
    slots = {"luna-32": 32, "luna-128": 128, "luna-conv": 32, "luna-conv-1": 1, "luna-conv-tied": 32}
    assert {name: config.projection_length for name, config in lunas.items()} == slots
    assert {name for name, config in lunas.items() if config.tie_kv} == {"luna-conv-tied"}
    kernels = {name: getattr(config, "conv_kernel_size", 0) for name, config in configs.items()}
    assert all(kernel == (5 if "conv" in name else 0) for name, kernel in kernels.items())
    assert all(config._attn_implementation == "eager" for name, config in configs.items() if name not in lunas)


@pytest.mark.parametrize("task", ["sst2", "csqa", "imdb-512"])
def test_commands_accept_the_options_of_their_tasks(task, tmp_path, capsys):
    """They get as far as looking for data or models."""
    own = finetuning.TASKS[task]
    words = own.words(tmp_path / "nowhere", [tmp_path / "a", tmp_path / "b"], [0, 1], tmp_path / "out")
    assert importlib.import_module(Path(own.script).stem).main(words) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_committed_results():
    """Their tables and sentences, among them losses that were not reached, are those that the report writes."""
    for name, text in (("pretrain", learning_report.text), ("finetune", finetuning.table)):
        (path,) = RESULTS.glob(f"learning-{name}-*.json")
        check(path, text)


def test_a_study_has_no_mean_over_runs_that_diverged():
    run = {"model": "luna-seed0", "seed": 1, "diverged": "loss", "notes": []}
    with pytest.raises(UserError, match=r"luna-seed0 .*1"):
        finetuning.condense({"development": "validation", "runs": [run]})
