"""The study of the small English models: what runs after what, and the table of their scores."""

import json
import shutil

import mini
import mini_losses
import mini_scores
import pytest
import torch
from helpers import ROOT, tiny_tokenizer
from pretrain_mlm import read_recipe
from transformers import RobertaForMaskedLM

from luna_hf.ops.positions import sinusoids

RECIPE = ROOT / "training" / "recipes" / "pretrain_mlm" / "luna-mini-en.yaml"


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Names of the commands that are started, with their options; each run finishes at once."""
    calls = []

    def launch(script, words, threads):
        options = dict(zip(words[1::2], words[2::2], strict=True))
        calls.append((script, options))
        folder = tmp_path / options["--model_name"]
        folder.mkdir()
        (folder / "metrics.json").touch()

    monkeypatch.setattr(mini, "launch", launch)
    monkeypatch.setattr(mini, "ROOT", tmp_path)  # nothing is shipped
    monkeypatch.setattr(mini, "lengthen_twin", lambda folder, source, length: folder)
    for name, file in ((mini.TOKENIZER, "tokenizer.json"), ("roberta-mini-en-start", "config.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    return calls


def train(tmp_path, *names):
    assert mini.main(["train", *names, "--data", str(tmp_path), "--runs", str(tmp_path)]) == 0


def test_a_model_is_trained_after_what_it_starts_from_and_finished_stages_are_skipped(launched, tmp_path):
    train(tmp_path, "roberta-mini-en")
    assert [options["--model_name"] for _, options in launched] == ["roberta-mini-en-128", "roberta-mini-en"]
    assert launched[0][1]["--model_name_or_path"] == str(tmp_path / "roberta-mini-en-start")
    train(tmp_path, "luna-mini-en-clm", "luna-mini-en")
    names = ["luna-mini-en-clm", "luna-mini-en-128", "luna-mini-en"]
    assert [options["--model_name"] for _, options in launched[2:]] == names
    assert launched[2][0] == "training/pretrain_clm.py"
    train(tmp_path, "luna-mini-en", "roberta-mini-en")
    assert len(launched) == 5


def test_a_shipped_stage_is_not_trained_again(launched, tmp_path):
    shipped = tmp_path / "checkpoints" / "luna-mini-en-128"
    shipped.mkdir(parents=True)
    train(tmp_path, "luna-mini-en")
    ((_, options),) = launched
    assert (options["--model_name"], options["--model_name_or_path"]) == ("luna-mini-en", str(shipped))
    train(tmp_path, "luna-mini-en-128")  # but itself it can be repeated
    assert launched[1][1]["--output_dir"] == str(tmp_path / "luna-mini-en-128")


def test_a_model_that_is_not_shipped_is_finetuned_from_its_run(tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(mini, "ROOT", tmp_path)
    monkeypatch.setattr(mini.finetuning, "finetune", lambda options, models, tasks: found.extend(models))
    (tmp_path / "checkpoints" / "luna-mini-en").mkdir(parents=True)
    monkeypatch.setattr(mini, "lengthen_twin", lambda folder, source, length: folder)
    for name in ("luna-mini-en", "roberta-mini-en"):
        (tmp_path / name).mkdir()
    assert mini.main(["finetune", "luna-mini-en", "roberta-mini-en", "--data", "data", "--runs", str(tmp_path)]) == 0
    assert set(found) == {
        tmp_path / "checkpoints" / "luna-mini-en",
        tmp_path / "roberta-mini-en",
        tmp_path / "roberta-mini-en-2048-start",  # for imdb-2048
    }


def tokens(name):
    """What a stage and those before it read, in tokens."""
    if name in mini.STARTS:
        source, _ = mini.STARTS[name]
        return tokens(source) if source else 0
    stage, recipe = mini.STAGES[name], read_recipe(RECIPE)
    keys = {key: stage.changes.get(key, getattr(recipe, key)) for key in ("max_steps", "global_batch_tokens")}
    return keys["max_steps"] * keys["global_batch_tokens"] + (tokens(stage.start) if stage.start else 0)


def test_models_and_their_twins_read_the_same_number_of_tokens():
    assert tokens("luna-mini-en") == tokens("roberta-mini-en") >= 80e6
    assert tokens("leapformer-mini-en") == tokens("lavo-mini-en") == tokens("roberta-tiny-en") >= 15e6
    assert tokens("luna-mini-en-4096") - tokens("luna-mini-en") >= 8e6


def test_new_positions_are_extrapolated():
    waves = sinusoids(514, 16)
    waves = torch.cat([torch.randn(2, 16), 0.3 * waves[2:].roll(1, 1) + 0.2])  # a linear function of the sinusoids
    long = mini.extrapolate(waves[:130], 2, 512)
    assert long.shape == (514, 16) and torch.equal(long[:130], waves[:130])
    assert (long - waves)[130:].std() < 0.65 * waves[130:].std()  # 128 positions do not show the slow waves


def test_the_longer_twin_is_the_same_on_short_texts(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path / "tokens")
    source = mini.start_twin(tmp_path / "short", tmp_path / "tokens")
    target = mini.lengthen_twin(tmp_path / "long", source, 512)
    ids = torch.arange(5, 105).unsqueeze(0)
    short, long = (RobertaForMaskedLM.from_pretrained(folder)(ids).logits for folder in (source, target))
    assert torch.equal(short, long)
    assert RobertaForMaskedLM.from_pretrained(target)(torch.full((1, 512), 5)).logits.isfinite().all()


def test_missing_texts_are_refused(tmp_path, capsys):
    assert mini.main(["train", "luna-mini-en", "--data", str(tmp_path), "--runs", str(tmp_path)]) == 2
    assert str(tmp_path / "enwiki" / "train.parquet") in capsys.readouterr().err


@pytest.mark.parametrize("name", ["luna-large", "abc-mini-en"])
def test_a_model_that_cannot_be_trained_is_refused(name, capsys):
    assert mini.main(["train", name, "--data", "data"]) == 2
    assert f"There is no model {name} to train" in capsys.readouterr().err


def write_scores(runs, model, task, scores):
    """What a finetuning command leaves, as far as the table reads it."""
    path = runs / model / "finetune" / task / "results.json"
    path.parent.mkdir(parents=True)
    shared = {"model": model, "notes": [], "training_seconds": 60, "tokens_per_second": 100}
    shared |= {"train_rows": 10, "epochs": 1, "max_length": mini_scores.TASKS[task].max_length}
    own = [{**shared, "seed": seed, "scores": {"validation": score}} for seed, score in enumerate(scores)]
    results = {"development": "validation", "main_metric": "accuracy", "command": "python ...", "runs": own}
    path.write_text(json.dumps(results))


def test_the_table_has_means_extremes_and_the_average_of_common_tasks(tmp_path, capsys):
    write_scores(tmp_path, "luna-mini-en", "sst2", [{"accuracy": 0.8}, {"accuracy": 0.9}])
    write_scores(tmp_path, "luna-mini-en", "imdb-2048", [{"accuracy": 0.1}])
    write_scores(tmp_path, "luna-mini-en", "qnli", [{"accuracy": 0.2}])
    both = {"accuracy": 0.6, "f1": 0.8, "mean": 0.7}
    write_scores(tmp_path, "luna-mini-en", "mrpc", [both])
    write_scores(tmp_path, "roberta-mini-en", "mrpc", [both])
    write_scores(tmp_path, "roberta-mini-en", "sst2", [{"accuracy": 0.5}])
    header = {"command": "python ...", "date": "2026", "machine": {}, "versions": {"torch": "2", "transformers": "5"}}
    mini_scores.publish_scores(tmp_path, tmp_path / "results", header)
    lines = {tuple(cell.strip() for cell in line.split("|")[1:3]): line for line in capsys.readouterr().out.split("\n")}
    assert "85.0 (80.0 to 90.0) | 50.0 | 83.2 | 85.9" in lines["sst2", "accuracy"]
    assert "80.0 | 80.0 | 81.1" in lines["mrpc", "f1"]
    assert "20.0 | - |" in lines["qnli", "accuracy"]
    assert "77.5 | 60.0" in lines["**average**", ""]
    (path,) = (tmp_path / "results").glob("mini-scores-*.json")
    rows = json.loads(path.read_text())["rows"]
    assert {row["dataset"] for row in rows} == {"nyu-mll/glue", "stanfordnlp/imdb"}
    assert rows[0]["values"] == [0.8, 0.9] and path.with_suffix(".png").is_file()
    for model in ("luna-mini-en", "roberta-mini-en"):
        shutil.rmtree(tmp_path / model)
    write_scores(tmp_path, "roberta-mini-en", "sst2", [{"accuracy": 0.6}])
    mini_scores.publish_scores(tmp_path, tmp_path / "results", header)
    again = json.loads(path.read_text())["rows"]  # scores whose runs are gone stay
    assert [row for row in again if (row["model"], row["task"]) != ("roberta-mini-en", "sst2")] == [
        row for row in rows if (row["model"], row["task"]) != ("roberta-mini-en", "sst2")
    ]
    (replaced,) = [row for row in again if (row["model"], row["task"]) == ("roberta-mini-en", "sst2")]
    assert replaced["values"] == [0.6]


def write_run(folder, losses, tokens):
    """What a pretraining run leaves, as far as the table reads it."""
    folder.mkdir()
    entries = [
        {"kind": "held_out", "seen_tokens": tokens * (number + 1), "loss": loss} for number, loss in enumerate(losses)
    ]
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, entries)))
    names = ("held_out_accuracy", "held_out_targets", "unigram_loss", "unigram_accuracy", "longest_input", "hardware")
    own = {
        "parameters": 6e6,
        "held_out_loss": losses[-1],
        "seen_tokens": tokens * len(losses),
        "training_seconds": 3600,
    }
    (folder / "metrics.json").write_text(json.dumps({**dict.fromkeys(names, 1), **own, "command": "python ..."}))


def test_a_curve_goes_on_in_the_second_stage(tmp_path, capsys):
    write_run(tmp_path / "luna-mini-en-128", [5.0, 4.0], 10_000_000)
    write_run(tmp_path / "luna-mini-en", [4.5, 3.5], 5_000_000)
    write_run(tmp_path / "roberta-mini-en-128", [6.0], 1)
    header = {"command": "python ...", "date": "2026", "machine": {}, "versions": {"torch": "2", "transformers": "5"}}
    mini_losses.publish_losses(tmp_path, tmp_path / "results", header)
    assert "| `luna-mini-en` | 6.0 M | 30 M | 3.500 (1.000) |" in capsys.readouterr().out
    (path,) = (tmp_path / "results").glob("mini-pretrain-*.json")
    (model,) = json.loads(path.read_text())["models"].values()
    assert model["curve"]["tokens"] == [10_000_000, 20_000_000, 25_000_000, 30_000_000]
    assert model["seconds"] == 7200 and path.with_suffix(".png").is_file()
    for run in tmp_path.glob("luna-mini-en*"):
        shutil.rmtree(run)
    write_run(tmp_path / "luna-mini-en-4096", [3.0], 1)
    mini_losses.publish_losses(tmp_path, tmp_path / "results", header)
    models = json.loads(path.read_text())["models"]  # a model whose runs are gone keeps its figures
    assert list(models) == ["luna-mini-en", "luna-mini-en-4096"] and models["luna-mini-en"] == model
