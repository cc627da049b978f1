"""Finetuning disqualifies what diverges, notices changed data, locks its folder, and survives a full disk."""

import json
import resource

import finetune_glue
import pytest
import torch
from common.tables import read_table
from safetensors.torch import load_file
from tasks import classification, runs
from tasks.plan import data_digest
from tasks.trainer import FinetuneTrainer, checkpoints
from tiny_finetuning import PLAIN, command, refused, run, topics, write_rows

from luna_hf.scripting import locked

RATES = {"sweep": True, "sweep_batch_sizes": [8], "learning_rate": None, "num_train_epochs": 1}


def read(folder, name="run"):
    """A JSON file without NaN and infinities, which JSON does not have."""
    return json.loads((folder / f"{name}.json").read_text(), parse_constant=pytest.fail)


def labelled(folder, kind="classes"):
    """Files with classes or pairs of numbers."""
    texts, labels = topics(32)
    values = labels if kind == "classes" else [[label, 0.5] for label in labels]
    path = write_rows(folder / "train.jsonl", {"text": texts, "label": values})
    dev = write_rows(folder / "dev.jsonl", {"text": texts[:9], "label": values[:9]})
    return {"train_file": path, "validation_file": dev}


# ---- runs that diverge ----


@pytest.mark.parametrize("kind", ["classes", "pairs"])
def test_a_sweep_chooses_none_of_its_diverged_runs(kind, luna, tmp_path, capsys):
    options = {**labelled(tmp_path, kind), **RATES, "sweep_learning_rates": [1e12, 1e-3, 1e6]}
    summary = run(luna, tmp_path / "out", **options)
    assert read(tmp_path / "out", "results") == summary
    medians = {row["learning_rate"]: row["median"] for row in summary["settings"]}
    assert medians[1e12] is medians[1e6] is None and medians[1e-3] is not None
    assert read(tmp_path / "out" / "best" / "luna")["learning_rate"] == 1e-3
    assert all(tensor.isfinite().all() for tensor in load_file(tmp_path / "out/best/luna/model.safetensors").values())
    table = (tmp_path / "out" / "results.md").read_text()
    assert "| luna | batch 8, learning rate 1e+06 | 42 | diverged | diverged | diverged |" in table
    assert capsys.readouterr().out.count("not finite") == 2
    assert [row["steps"] < row["planned_steps"] == 4 for row in summary["runs"]] == [True, False, True]


def break_weight(monkeypatch):
    train = runs.train

    def wrapped(trainer, *arguments):
        train(trainer, *arguments)
        trainer.model.classifier.out_proj.bias.data[0] = torch.inf

    monkeypatch.setattr(runs, "train", wrapped)


def break_prediction(monkeypatch):
    step = FinetuneTrainer.prediction_step

    def wrapped(*arguments, **keywords):
        loss, logits, labels = step(*arguments, **keywords)
        logits[0] = torch.nan
        return loss, logits, labels

    monkeypatch.setattr(FinetuneTrainer, "prediction_step", wrapped)


def break_metric(monkeypatch):
    monkeypatch.setattr(classification.TextClassification, "scores", lambda *_: {"accuracy": float("nan")})


BREAKS = {"out_proj.bias": break_weight, "predictions": break_prediction, "accuracy": break_metric}


@pytest.mark.parametrize(("name", "evaluated"), [*((name, False) for name in BREAKS), ("accuracy", True)])
def test_what_is_not_finite_ends_the_run_and_keeps_nothing(name, evaluated, luna, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    words = command(luna, out, **labelled(tmp_path), num_train_epochs=1, **({} if evaluated else PLAIN))
    with monkeypatch.context() as patch:
        BREAKS[name](patch)
        assert "luna" in refused(capsys, words)
        result = read(out)
        assert name in result["diverged"] and result["scores"] == {} and "diverged" in (out / "results.md").read_text()
        kept = {"run.json", "settings.json", "results.md", "results.json"}
        assert {path.name for path in out.iterdir()} == kept
        patch.setattr(FinetuneTrainer, "train", None)  # the same command does not repeat it
        assert "luna" in refused(capsys, words)
    # It holds nothing that another setting could overwrite.
    assert finetune_glue.main([*words, "--learning_rate", "1e-4"]) == 0 and not read(out)["diverged"]


# ---- data that change ----


def test_changed_data_are_named_or_accepted(luna, tmp_path, monkeypatch, capsys):
    options = labelled(tmp_path / "data")
    words = command(luna, tmp_path / "out", **options, num_train_epochs=2)
    name, changed = str(options["validation_file"]), options["validation_file"]
    before = changed.read_text()
    after = "dog".join(before.rsplit("fox", 1))  # the same size
    with monkeypatch.context() as patch:
        patch.setattr(runs, "write_card", None)
        with pytest.raises(TypeError):  # killed at the end
            finetune_glue.main(words)
    for finished in (False, True):
        changed.write_text(after)
        message = refused(capsys, words)
        assert name in message and "train.jsonl" not in message and "--accept_changed_data" in message
        changed.write_text(before)
        assert finished or finetune_glue.main(words) == 0
    assert set(read(tmp_path / "out")["data"]) == {"train", "validation"}
    changed.write_text(after)
    monkeypatch.setattr(FinetuneTrainer, "train", None)
    assert finetune_glue.main([*words, "--accept_changed_data"]) == 0
    assert f"{name} changed" in capsys.readouterr().out


def test_the_digest_of_a_split_is_that_of_its_rows(tmp_path):
    columns = {"text": ["a", "b"], "label": ["0", "1"]}
    digests = [
        data_digest(read_table([write_rows(tmp_path / f"x.{kind}", rows)]))
        for kind, rows in [
            *[("csv", columns), ("jsonl", columns), ("parquet", columns)],
            *[("json", {**columns, "label": ["1", "0"]}), ("tsv", {"text": ["b", "a"], "label": ["1", "0"]})],
        ]
    ]
    assert digests[0] == digests[1] == digests[2] and len(set(digests)) == 3


# ---- folders and disks ----


def test_a_second_command_on_the_folder_is_refused(luna, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    words = command(luna, out, **labelled(tmp_path))
    with locked(out / ".lock"):
        assert f"{out} is in use" in refused(capsys, words)
    assert not list(out.iterdir())


@pytest.mark.parametrize("name", ["run.json", "settings.json"])
def test_a_damaged_file_of_a_finished_run_is_named(name, luna, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    for file in ("run.json", "settings.json"):
        (out / file).write_bytes(b"{" if file == name else b"{}")
    message = refused(capsys, command(luna, out, **labelled(tmp_path)))
    assert str(out / name) in message and message.count("\n") == 1


def test_a_full_disk_takes_one_line_and_the_run_continues(luna, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    words = command(luna, out, **labelled(tmp_path), num_train_epochs=2)
    save, calls, limits = FinetuneTrainer._save_checkpoint, [], resource.getrlimit(resource.RLIMIT_FSIZE)

    def full(*arguments, **keywords):
        calls.append(1)
        if len(calls) == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        return save(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(FinetuneTrainer, "_save_checkpoint", full)
        try:
            message = refused(capsys, words)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert message.count("\n") == 1 and checkpoints(out) and not (out / "run.json").exists()
    assert finetune_glue.main(words) == 0
    assert "Continuing from checkpoint-" in capsys.readouterr().out and read(out)["resumed_from_step"] > 0
