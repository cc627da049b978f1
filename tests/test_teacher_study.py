"""The study of conversions of a real encoder: its rows, ranks and recipes are what its page says."""

import argparse
import json

import convert
import numpy as np
import pytest
import teacher
import teacher_distant
import teacher_scores
import teacher_slots
import teacher_texts
import torch
import yaml
from pyarrow import Table, parquet
from test_convert_command import WORDS, write_model
from transformers import AutoModel, AutoTokenizer

from luna_hf import FAMILIES
from luna_hf.convert.command import make_plain
from luna_hf.warm_start import warm_start


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("source"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    make_plain(tokenizer, 40)
    return AutoModel.from_pretrained(folder).eval(), tokenizer


def write(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(Table.from_pydict(columns), path)


def test_ranks_count_ties_against_the_model():
    queries = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    documents = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    assert teacher_scores.rank(queries, documents, torch.tensor([0, 1, 1])) == [2, 1, 3]


def test_vectors_do_not_depend_on_the_batch(source):
    model, tokenizer = source
    encoder = teacher_scores.Encoder(model, tokenizer)
    texts = [tokenizer(" ".join(WORDS[: 1 + n % 8] * 3), add_special_tokens=False)["input_ids"] for n in range(9)]
    found = encoder.whole(texts)
    for text, vector in zip(texts, found, strict=True):
        torch.testing.assert_close(encoder.whole([text])[0], vector, rtol=1e-5, atol=1e-6)
    text = texts[7]
    parts = [encoder.whole([text[at : at + 8]])[0] for at in range(0, len(text), 8)]
    expected = torch.nn.functional.normalize(torch.stack(parts).mean(0), dim=0)
    torch.testing.assert_close(encoder.windows(10)([text])[0], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(encoder.cut(10)([text])[0], parts[0], rtol=1e-5, atol=1e-6)


PEOPLE, PLACES = WORDS[:3], [WORDS[4], WORDS[5], WORDS[7]]


@pytest.fixture
def task(source, tmp_path, monkeypatch):
    monkeypatch.setattr(teacher_distant, "NAMES", PEOPLE)
    monkeypatch.setattr(teacher_distant, "CITIES", PLACES)
    monkeypatch.setattr(teacher_distant, "TASKS", {"needle": 1})
    write(tmp_path / "enwiki/validation.parquet", text=[" ".join(WORDS * 60)] * 2)
    return teacher_distant.Distant(tmp_path, source[1])


def test_facts_and_question_stand_far_apart(task):
    people, places_of = (
        dict(zip((ids[0] for ids in task.ids(words)), range(3), strict=True)) for words in (PEOPLE, PLACES)
    )
    batch = task.batch([1, 2, 3], [20, 31, 25], np.random.default_rng(0))
    for row, (count, distance) in enumerate(zip((1, 2, 3), (20, 31, 25), strict=True)):
        ids = batch.ids[row][batch.mask[row].bool()].tolist()
        places = {name: getattr(batch, name)[row].nonzero().flatten().tolist() for name in ("facts", "question")}
        stated, asked = ([ids[place] for place in places[name]] for name in ("facts", "question"))
        said = [(token in people, token) for token in stated if token in people or token in places_of]
        pairs = list(zip(said[::2], said[1::2], strict=True))
        assert len(pairs) == count and all(who[0] and not where[0] for who, where in pairs)
        (name,) = (token for token in asked if token in people)
        assert [places_of[where] for (_, who), (_, where) in pairs if who == name] == [batch.labels[row]]
        assert places["question"][0] - places["facts"][-1] == distance + 2
        assert [place for place, token in enumerate(ids) if token == 3] == [places["facts"][-1] + 1, len(ids) - 1]


def test_rows_do_not_depend_on_the_model(task):
    assert torch.equal(next(task.updates(3)).ids, next(task.updates(3)).ids)
    pairs = list(zip(task.tests(2, 256), task.tests(2, 256), strict=True))
    assert len(pairs) > 1 and all(torch.equal(one.ids, other.ids) for one, other in pairs)


def test_finetuning_and_its_figures(task, source, monkeypatch):
    monkeypatch.setattr(teacher_distant, "NEAR", (4, 8))
    monkeypatch.setattr(teacher_distant, "FAR", (4, 8))
    monkeypatch.setattr(teacher_distant, "UPDATES", 3)
    monkeypatch.setattr(teacher_distant, "WARMUP", 1)
    monkeypatch.setattr(teacher_distant, "DISTANCES", (8, 400))
    monkeypatch.setattr(teacher_distant, "TESTED", {8: 8, 400: 8})
    found = teacher_distant.finetune(source[0], False, task, longest=120)["accuracy"]
    assert found["needle"].keys() == {"8"} and found["needle"]["8"] in [12.5 * hits for hits in range(9)]


def test_texts_are_without_scored_rows(tmp_path, capsys):
    for files in (*teacher_texts.DOCUMENTS.values(), teacher_texts.SENTENCES):
        for name, columns in files:
            write(tmp_path / f"data/{name}.parquet", **{column: [f"{name} {column}", "twice"] for column in columns})
    write(tmp_path / "data/medquad/corpus.parquet", _id=["a", "b"], text=["scored", "kept"])
    write(tmp_path / "data/medquad/qrels_test.parquet", **{"corpus-id": ["a"]})
    assert teacher_texts.main([str(tmp_path / "data"), str(tmp_path / "texts")]) == 0
    assert "medquad: 1 texts" in capsys.readouterr().out
    assert "kept" in (tmp_path / "texts/medquad/train.jsonl").read_text()
    sentences = (tmp_path / "texts/sentences/train.jsonl").read_text().splitlines()
    assert len(sentences) == len(set(sentences)) == 1 + sum(len(columns) for _, columns in teacher_texts.SENTENCES)


@pytest.mark.parametrize("name", teacher.cells())
def test_recipes_of_all_cells(name, tmp_path):
    options = argparse.Namespace(texts=tmp_path, runs=tmp_path, source="source")
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(teacher.recipe(name, options)))
    recipe = convert.read_recipe(path)
    assert recipe.plan()[-1].last == recipe.max_steps and recipe.longest <= teacher.LONGEST
    assert {cell for cell, _ in teacher.FINETUNED.values()} <= {"source", *teacher.cells()}


@pytest.mark.parametrize("family", ["luna", "abc_memory"])
@torch.no_grad()
def test_sharpened_slots(family, tmp_path):
    own = {"luna": {"projection_length": 8, "tie_kv": False}, "abc_memory": {"memory_size": 8, "share_control": False}}
    folder = write_model(tmp_path)
    model, _ = warm_start(FAMILIES[family].base_model, folder, local_window=4, position_period=40, **own[family])
    ids = torch.randint(5, 12, (2, 30))
    found = {}
    for factor in (1.0, teacher_slots.BLUR, 0.0):
        changed = teacher_slots.sharpened(model.eval(), factor)
        with teacher_slots.watch_ends(changed) as shares:
            found[factor] = changed(ids).last_hidden_state
        assert len(shares) == 2
        if factor == 0:  # all tokens weigh the same
            torch.testing.assert_close(torch.stack(shares), torch.full((2,), 2 / 30))
    torch.testing.assert_close(found[teacher_slots.BLUR], model(ids).last_hidden_state)
    assert (found[1.0] - found[0.0]).abs().max() > 1e-3


def test_report(tmp_path):
    folder, results = tmp_path / "runs/window-64", tmp_path / "results"
    folder.mkdir(parents=True), results.mkdir()
    start, end = ({"cosine": {"16": 1.0, "512": value}, "slots_off": {}} for value in (0.5, 0.75))
    entries = [{"kind": "held_out", "step": 0, **start}, {"kind": "held_out", "step": 5, **end}]
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, entries)))
    (folder / "metrics.json").write_text(json.dumps(end | {"seen_tokens": 1000, "command": "none of the report's"}))
    scores = {"stsb": 80.0, "race_ndcg": 70.0, "novels_r1": 60.0, "novels_mrr": 65.04}
    found = {"needle": {"20": 100.0, "256": 6.0}, "recall": {"20": 99.0}}
    slots = {"luna-0-64": [{"factor": 0.5, "ends": 0.25, "cosine": {"512": 0.9, "1024": 0.8}}]}
    result = {"scores": {"source": scores}, "distant": {"source": {"accuracy": found}}, "runs": {}, "slots": slots}
    (results / "teacher.json").write_text(json.dumps(result))
    assert teacher.main(["report", "--runs", str(tmp_path / "runs"), "--results", str(results)]) == 0
    text = (results / "teacher.md").read_text()
    for row in (
        "| window-64 | untrained | 1.0000 | 0.5000 | - | - |",
        "| window-64 | trained | 1.0000 | 0.7500 | - | - |",
        "| source | 80.0 | 70.0 | 60.0 | 65.0 |",
        "| source | 100.0 | 6.0 | 99.0 | - |",
        "| luna-0-64 | 0.5 | 25.0% | 0.9000 | 0.8000 |",
    ):
        assert row in text
    assert (results / "teacher.png").stat().st_size > 1000
    assert "command" not in json.loads((results / "teacher.json").read_text())["runs"]["window-64"]["trained"]
