"""The study of long inputs: it finetunes at every length, measures the cost, and reports both."""

import finetuning
import longer
import pytest
import running
from test_learning import check
from test_learning import data as learning_data  # noqa: F401  a fixture
from tiny_finetuning import checkpoint, topics, write_rows

from luna_hf.scripting import UserError


def test_scores_and_costs_are_reported(learning_data, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(longer, "launch", finetuning.launch)
    monkeypatch.setattr(longer, "STEP_TOKENS", 64)
    monkeypatch.setattr(longer, "STEPS", 1)
    monkeypatch.setattr(longer, "apart", lambda function, *arguments: function(*arguments))  # saves imports
    for seed, split in enumerate(("train", "test")):
        texts, labels = topics(24, seed)
        write_rows(tmp_path / "data" / "imdb" / f"{split}.parquet", {"text": texts, "label": labels})
    folders = {name: checkpoint(tmp_path / name, name) for name in ("roberta", "luna")}
    words = ["--runs", str(tmp_path / "runs"), "--lengths", "64"]  # more than the 40 positions
    models = ["--models", *(f"{name}={folder}" for name, folder in folders.items())]
    data = ["--data", str(tmp_path / "data")]
    assert longer.main(["run", *words, *data, *models, "--seeds", "0", "--max_steps", "1", "--bf16", "false"]) == 0
    assert longer.main(["speed", *words, *models]) == 0
    assert longer.main(["report", *words, "--results", str(tmp_path / "results")]) == 0
    (path,) = (tmp_path / "results").glob("longer-imdb-*.json")
    found = check(path, longer.text)["models"]
    assert {name: set(lengths) for name, lengths in found.items()} == {name: {"64"} for name in folders}
    for one in (one for lengths in found.values() for one in lengths.values()):
        assert len(one["scores"]) == 1 and one["seconds"] > 0


def test_a_report_needs_the_costs(tmp_path):
    with pytest.raises(UserError, match=r"longer\.py speed"):
        longer.report(longer.parse(["report", "--runs", str(tmp_path)]))


def test_models_are_named():
    with pytest.raises(UserError, match="NAME=FOLDER"):
        longer.parse(["run", "--models", "outputs/model"])


def test_committed_results():
    for path in running.RESULTS.glob("longer-imdb-*.json"):
        check(path, longer.text)
