"""The comparison of long reviews in equal time: what is run, what is run again, and what is reported."""

import json
from pathlib import Path

import mini_long
import pytest
import running
from test_learning import check
from tiny_finetuning import write_rows


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """The options of the runs that are started together; each finishes at once."""
    calls = []

    def launch_together(commands, threads):
        found = [dict(zip(words[::2], words[1::2], strict=True)) for _, words in commands]
        for options in found:
            write_results(Path(options["--output_dir"]), int(options["--seeds"]))
        calls.append(found)

    monkeypatch.setattr(mini_long, "launch_together", launch_together)
    monkeypatch.setattr(mini_long.mini, "encoder_of", lambda options, name, length: Path(name))
    for split in ("train", "test"):
        texts = ["good " * mini_long.WORDS, "short"]
        write_rows(tmp_path / "imdb" / f"{split}.parquet", {"text": texts, "label": [1, 0]})
    return calls


def write_results(folder, seed):
    folder.mkdir(parents=True)
    run = {"model": folder.name, "seed": seed, "notes": [], "scores": {"test": {"accuracy": 0.5 + seed / 10}}}
    run |= {"training_seconds": 60, "tokens_per_second": 100, "train_rows": 10, "epochs": 1, "max_length": 2048}
    results = {"development": "test", "main_metric": "accuracy", "command": "python ...", "runs": [run]}
    (folder / "results.json").write_text(json.dumps(results))


def run(tmp_path):
    assert mini_long.main(["run", "--data", str(tmp_path), "--runs", str(tmp_path), "--seeds", "0", "1"]) == 0


def test_both_models_run_together_on_long_reviews(launched, tmp_path):
    run(tmp_path)
    assert len(launched) == 2
    for seed, pair in enumerate(launched):
        found = {options["--model_name_or_path"]: options for options in pair}
        assert {name: int(options["--max_train_samples"]) for name, options in found.items()} == mini_long.ROWS
        assert {options["--seeds"] for options in pair} == {str(seed)}
    (folder,) = {options["--dataset_name"] for options in launched[0]}
    rows = mini_long.load_dataset("parquet", data_files=f"{folder}/train.parquet", split="train")
    assert rows["label"] == [1]


def test_a_seed_with_one_finished_model_is_run_again_for_both(launched, tmp_path):
    run(tmp_path)
    (tmp_path / "mini-long" / "seed1" / "luna-mini-en" / "results.json").unlink()
    run(tmp_path)
    assert [options["--seeds"] for options in launched[2]] == ["1", "1"] and len(launched) == 3


def test_the_report_has_the_time_of_both_models(launched, tmp_path, capsys):
    run(tmp_path)
    assert mini_long.main(["report", "--runs", str(tmp_path), "--results", str(tmp_path / "results")]) == 0
    assert "| `luna-mini-en` | 10 | 60 | 100 | 55.0 (50.0 to 60.0) |" in capsys.readouterr().out
    (path,) = (tmp_path / "results").glob("long-reviews-*.json")
    assert check(path, mini_long.text)["models"]["roberta-mini-en"]["accuracy"] == [0.5, 0.6]


def test_missing_reviews_and_missing_runs_are_refused(tmp_path, capsys):
    assert mini_long.main(["run", "--data", str(tmp_path), "--runs", str(tmp_path)]) == 2
    assert "--data DATA" in capsys.readouterr().err
    assert mini_long.main(["report", "--runs", str(tmp_path)]) == 2
    assert "mini_long.py run" in capsys.readouterr().err


def test_all_runs_end_before_one_that_failed_is_reported(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(running, "ROOT", tmp_path)
    (tmp_path / "train.py").write_text("import sys; print(sys.argv[2]); sys.exit(int(sys.argv[1]))")
    with pytest.raises(running.UserError, match=r"train\.py failed with status 3"):
        running.launch_together([("train.py", ["3", "first"]), ("train.py", ["0", "second"])], 1)
    assert set(capfd.readouterr().out.split()) == {"first", "second"}


def test_committed_results():
    for path in running.RESULTS.glob("long-reviews-*.json"):
        check(path, mini_long.text)
