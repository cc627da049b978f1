"""The study of summaries: its tables, and in miniature its runs, its costs and its report."""

import json

import pandas
import pytest
import running
import summarization as study
import summarization_cost
from helpers import FAMILIES, slots_of
from test_convert_command import WORDS, write_model
from tiny_translation import SETTINGS
from transformers import AutoTokenizer

from luna_hf.scripting import UserError

LEAD = {"rouge1": 40.0, "rouge2": 20.0, "rougeL": 30.0}


def write_papers(folder):
    folder.mkdir(parents=True)
    for split, number in {"train": 12, "validation": 3}.items():
        rows = [
            {
                **{"abstract": f"The token {WORDS[place % 8]}.", "citations": ["It reads.", "In turn!"]},
                **{"document": "Every sequence. " * 20, "summary": WORDS[place % 8], "title": "packed"},
            }
            for place in range(number)
        ]
        pandas.DataFrame(rows).to_parquet(folder / f"{split}.parquet")


def test_a_document_is_abstract_citations_and_body(tmp_path, monkeypatch):
    write_papers(tmp_path / "scisummnet")
    monkeypatch.setattr(study, "DOCUMENT_WORDS", 9)
    study.prepare(tmp_path, "scisummnet", tmp_path / "tables")
    first = json.loads((tmp_path / "tables" / "train.jsonl").read_text().splitlines()[0])
    assert first == {"document": "The token every.\nIt reads.\nIn turn!\nEvery sequence. ", "summary": "every"}
    about = study.describe_task(tmp_path / "tables")
    assert (about["train"], about["validation"]) == (12, 3)
    # The abstract and both citations: one of seven words is the summary's only one.
    assert about["lead"]["rouge1"] == pytest.approx(25) and about["lead"]["rouge2"] == 0


def test_long_summaries_are_left_out(tmp_path, monkeypatch):
    (tmp_path / "wiki_lead").mkdir()
    rows = [{"document": "a b", "summary": text} for text in ("one two", "one two three")]
    for split in ("train", "validation"):
        pandas.DataFrame(rows).to_parquet(tmp_path / "wiki_lead" / f"{split}.parquet")
    monkeypatch.setattr(study, "SUMMARY_WORDS", 2)
    study.prepare(tmp_path, "wiki_lead", tmp_path / "tables")
    assert [*pandas.read_json(tmp_path / "tables" / "train.jsonl", lines=True)["summary"]] == ["one two"]
    with pytest.raises(UserError, match=r"no file .*scisummnet.*train\.parquet.* --data"):
        study.prepare(tmp_path, "scisummnet", tmp_path / "others")


def test_tables_hold_every_system_beside_the_lead():
    scores = {"rouge1": 31.0, "rouge2": 11.0, "rougeL": 21.0}
    runs = [
        {
            "task": "scisummnet",
            "system": name,
            "length": 512,
            "seed": 0,
            "parameters": 2e6,
            "max_steps": 600,
            "scores": scores,
            "data": {"train": 707, "validation": 100, "lead": LEAD},
        }
        for name in study.SYSTEMS
    ]
    runs.append({**runs[0], "length": 1024, "scores": {name: score + 1 for name, score in scores.items()}})
    runs.append({**runs[0], "max_steps": 5000, "scores": {name: score + 2 for name, score in scores.items()}})
    cells = {"peak_bytes": 2**21, "update_seconds": 0.25, "generate_seconds": 0.5}
    cost = [{"system": name, "length": length, **cells} for name in study.SYSTEMS for length in (512, 1024)]
    table = study.text({"runs": runs, "cost": {"rows": cost}})
    assert "scisummnet, 707 documents to train on, 100 scored" in table
    assert "| first three sentences | - | - | - | 40.0 / 20.0 / 30.0 | 40.0 / 20.0 / 30.0 |" in table
    softmax, lavo = (study.SYSTEMS[name][0] for name in ("softmax", "lavo"))
    assert f"| {softmax} | 2.0 M | 600 | 1 | 31.0 / 11.0 / 21.0 | 32.0 / 12.0 / 22.0 |" in table
    assert f"| {softmax} | 2.0 M | 5,000 | 1 | 33.0 / 13.0 / 23.0 | - |" in table
    assert f"| {lavo} | 2.0 M | 600 | 1 | 31.0 / 11.0 / 21.0 | - |" in table
    assert f"| {lavo} | 0.25 / 2 / 0.50 | 0.25 / 2 / 0.50 |" in table


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    source = write_model(folder / "source")
    options = {**slots_of("luna", 4), "local_window": 8, "max_length": 40}
    FAMILIES["luna"].base_model.from_pretrained_encoder(source, **options).save_pretrained(folder / "luna")
    AutoTokenizer.from_pretrained(source).save_pretrained(folder / "luna")
    return folder / "luna"


def words_of(values):
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


@pytest.mark.slow
def test_systems_are_trained_scored_and_measured(encoder, tmp_path, monkeypatch):
    write_papers(tmp_path / "data" / "scisummnet")
    where = ["--runs", str(tmp_path / "runs"), "--lengths", "32"]
    shared = {name: value for name, value in SETTINGS.items() if not name.startswith("model.")}
    del shared["max_length"]
    tiny = {f"model.{name}": 16 for name in ("hidden_size", "intermediate_size")} | {"model.decoder_layers": 1}
    groups = {
        ("lavo", "abc", "luna", "leapformer"): {**tiny, "model.num_hidden_layers": 1, "model.num_attention_heads": 2},
        ("softmax",): {},
        ("minilm",): {"initial_encoder": encoder},
    }
    for systems, changes in groups.items():
        command = ["run", *where, "--data", str(tmp_path / "data"), "--tasks", "scisummnet", "--systems", *systems]
        assert study.main([*command, *words_of(shared | changes)]) == 0
    measured = ["--systems", "softmax", "leapformer"]
    monkeypatch.setattr(summarization_cost, "GENERATED", 5)
    assert study.main(["cost", *where, *measured]) == 0
    report = ["report", "--runs", str(tmp_path / "runs"), "--results", str(tmp_path)]
    assert study.main(report) == 0
    (path,) = tmp_path.glob("summaries-*.json")
    first = running.read_json(path)
    next((tmp_path / "runs" / "train").glob("*lavo*/run.json")).unlink()  # published runs stay
    assert study.main(report) == 0 and running.read_json(path)["runs"] == first["runs"]
    (path,) = tmp_path.glob("summaries-*.json")
    result = running.read_json(path)
    assert [run["system"] for run in result["runs"]] == list(study.SYSTEMS)
    assert all(0 <= score <= 100 for run in result["runs"] for score in run["scores"].values())
    assert result["runs"][0]["data"]["train"] == 12
    assert all(row["update_seconds"] > 0 and row["peak_bytes"] > 0 for row in result["cost"]["rows"])
    assert path.with_suffix(".png").is_file() and path.with_suffix(".md").is_file()
