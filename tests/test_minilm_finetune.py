"""The finetuning of converted sentence encoders: its tasks, its scores, and runs that continue exactly."""

import argparse
import dataclasses
import json
import shutil
import statistics
import sys
from pathlib import Path

import build
import golden
import minilm_finetune
import minilm_finetune_kinds as kinds
import minilm_finetune_mlm as mlm
import minilm_finetune_tasks as tasks
import minilm_finetune_train as training
import numpy as np
import publish
import pytest
import ship
import torch
import yaml
from catalogue import Zoo
from common.hub import push_folder, reserve_repository
from helpers import ROOT, refused, run_python
from hub_stub import HubStub
from minilm import recipe_model
from minilm_contenders import in_windows
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from pyarrow import Table, parquet
from safetensors.torch import load_file
from test_convert_command import WORDS, write_model
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    pipeline,
    set_seed,
)

from luna_hf import AbcForMaskedLM, AbcForTokenClassification, AbcModel
from luna_hf.models import adapters as adapters_of_models

FIELDS = {"memory_control": "compressive", "local_window": 4, "num_selected_tokens": 4, "memory_size": 2}
TEXTS = [" ".join((WORDS * 3)[start : start + size]) for start, size in ((0, 3), (1, 9), (2, 20), (3, 6))]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def tokenizer(source):
    return AutoTokenizer.from_pretrained(source)


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(Table.from_pylist(rows), path)


# ---- tasks and scores ----


def test_entities_are_those_of_conll():
    labels = ["B-a", "I-a", "I-b", "O", "I-a", "B-a", "O", "B-b"]
    assert kinds.entities(labels) == {("a", 0, 2), ("b", 2, 3), ("a", 4, 5), ("a", 5, 6), ("b", 7, 8)}
    assert kinds.entities([]) == kinds.entities(["O"]) == set()


def test_words_without_a_token_count_as_missed(tokenizer):
    task = dataclasses.replace(tasks.TASKS["wnut17"], labels=("O", "B-a", "I-a"))
    own = kinds.Words(task, tokenizer, 5)  # room for three words
    row = {"words": [*WORDS[:3], "\u200b", *WORDS[3:5]], "label": [1, 2, 0, 0, 0, 1]}
    features = own.encode(row)
    logits = np.eye(3)[[0, 1, 2, 2, 0]]  # right, and an entity too long by a word
    assert own.scores([row], [features], [logits])["f1"] == 0
    logits[3] = [1, 0, 0]
    assert own.scores([row], [features], [logits]) == pytest.approx({"precision": 100, "recall": 50, "f1": 200 / 3})


def test_answers_are_scored_as_in_squad(tokenizer, monkeypatch):
    assert kinds.overlap("The cat, a dog", "cat dog bird") == pytest.approx(0.8)
    assert kinds.overlap("", "the") == 1 and kinds.overlap("a dog", "cat") == 0
    own, context = kinds.Answers(tasks.TASKS["squad"], tokenizer, 12), "every token reads the packed sequence in turn"
    row = {"question": "token", "context": context, "answers": {"text": ["packed sequence"], "answer_start": [22]}}
    features = own.encode(row)
    places = [features["input_ids"].index(tokenizer.convert_tokens_to_ids(word)) for word in ("packed", "sequence")]
    assert [features[name] for name in own.targets] == places
    starts, ends = torch.zeros(14), torch.zeros(14)
    starts[1], starts[places[0]], ends[places[1]], ends[places[0] - 1] = 9, 5, 5, 6  # the question is no answer
    assert kinds.best_answer(context, features["places"], starts, ends) == "packed sequence"
    assert own.scores([row], [features], [(starts, ends)]) == {"f1": 100, "exact_match": 100, "f1_short": 100}
    monkeypatch.setattr(kinds, "SOURCE_LENGTH", own.size(features) - 1)
    rows, outputs = [row, {**row, "question": "no"}], [(starts, ends), (-starts, ends)]
    small = {**features, "input_ids": features["input_ids"][:-1]}
    found = own.scores(rows, [features, small], outputs)
    assert found["f1_long"] == 100 > found["f1_short"] and found["f1"] == (100 + found["f1_short"]) / 2
    short = kinds.Answers(tasks.TASKS["squad"], tokenizer, 10)
    cut = short.encode({**row, "answers": {"text": ["turn"], "answer_start": [41]}})
    assert cut["end_positions"] == 10 and not short.can_teach(cut) and own.can_teach(features)


def test_a_paragraph_is_hidden_in_its_article(monkeypatch):
    monkeypatch.setattr(tasks, "HIDDEN", 9)
    row = {"id": "1", "context": "the packed", "answers": {"text": ["packed"], "answer_start": [4]}}
    paragraphs = {"the packed": 2, "every token": 2, "reads": 1, "in turn": 20, "sequence": 4}
    for seed in range(5):
        found = tasks.hide(row, paragraphs, tasks.random.Random(seed))
        assert sorted(found["context"].split("\n")) == ["every token", "reads", "sequence", "the packed"]
        start = found["answers"]["answer_start"][0]
        assert found["context"][start : start + 6] == "packed"


# ---- the source on windows ----


def test_windows_repeat_the_question_and_are_read_alone(source, tokenizer):
    whole = AbcModel.from_pretrained_encoder(source, memory_control="full").eval()
    model = in_windows(AbcModel.from_pretrained_encoder(source, memory_control="full").eval(), 8)
    rest = (WORDS * 2)[3:14]
    batch = tokenizer(["every token", WORDS[0]], [" ".join(rest), WORDS[1]], padding=True, return_tensors="pt")
    states = model(**batch).last_hidden_state
    place = 4  # after the question's two words and its ends
    for part in np.array_split(rest, 4):  # eight tokens are the question, three words and an end
        alone = whole(**tokenizer("every token", " ".join(part), return_tensors="pt")).last_hidden_state[0]
        torch.testing.assert_close(states[0, place : place + len(part)], alone[4:-1])
        place += len(part)
    torch.testing.assert_close(states[0, place], alone[-1])
    short = whole(**tokenizer(WORDS[0], WORDS[1], return_tensors="pt")).last_hidden_state[0]
    torch.testing.assert_close(states[1, : len(short)], short)
    single = tokenizer(" ".join(rest), return_tensors="pt")
    found = model(**single).last_hidden_state[0, 1:-1]
    parts = [tokenizer(" ".join(part), return_tensors="pt") for part in np.array_split(rest, 2)]
    torch.testing.assert_close(found, torch.cat([whole(**part).last_hidden_state[0, 1:-1] for part in parts]))


# ---- training ----


class Killed(Exception):
    pass


def train_mlm(source, tokenizer, folder, stop=None):
    """LoRA and a masked-LM head for six updates, of which the run is killed after `stop`; returns its weights."""
    ends = np.arange(1, 25) * 12
    blocks = mlm.Blocks(np.random.default_rng(0).integers(5, 13, 24 * 12), ends, tokenizer, 0.3, 0)
    set_seed(0)
    model = AbcForMaskedLM.from_pretrained_encoder(source, sparse_prediction=True, max_length=40, **FIELDS)
    settings = training.LoraSettings(1e-2, 4, 1, 0, ("lm_head.dense",), rank=2, bias="all", save_steps=2)
    adapted = training.adapt(model, settings)

    def collate(rows):
        if stop is not None:
            collate.calls += 1
            if collate.calls > stop:
                raise Killed
        return mlm.pad(rows)

    collate.calls = 0
    training.train(adapted, blocks, blocks.lengths, collate, settings, folder)
    return {name: value.clone() for name, value in adapted.state_dict().items()}


def test_a_killed_run_continues_exactly(source, tokenizer, tmp_path):
    whole = train_mlm(source, tokenizer, tmp_path / "whole")
    with pytest.raises(Killed):
        train_mlm(source, tokenizer, tmp_path / "killed", stop=5)
    assert not (tmp_path / "killed" / "checkpoint-6").exists()
    continued = train_mlm(source, tokenizer, tmp_path / "killed")
    fresh = AbcForMaskedLM.from_pretrained_encoder(source, max_length=40, **FIELDS).state_dict()
    assert whole.keys() == continued.keys()
    assert all(torch.equal(whole[name], continued[name]) for name in whole)
    moved = [name for name, value in whole.items() if "lora_B" in name and value.abs().sum() > 0]
    assert moved and torch.equal(
        fresh["abc.embeddings.word_embeddings.weight"], whole["base_model.model.lm_head.decoder.weight"]
    )


# ---- the command ----


def write_tasks(data):
    """A few rows of a task of each kind, and of two long ones."""
    labels = [0, 1] * 3
    for split in ("train", "validation"):
        rows = [{"sentence": TEXTS[label], "label": label} for label in labels]
        write(data / f"glue/sst2/{split}.parquet", rows)
        pairs = [{"sentence1": TEXTS[0], "sentence2": TEXTS[2 - label], "label": 2.5 * label} for label in labels]
        write(data / f"glue/stsb/{split}.parquet", pairs)
        choices = {"label": ["A", "B"], "text": WORDS[:2]}
        questions = [{"id": "", "question": TEXTS[0], "choices": choices, "answerKey": "AB"[label]} for label in labels]
        write(data / f"commonsense_qa/{split}.parquet", questions)
        write(data / f"wnut17/{split}.parquet", [{"tokens": WORDS[:4], "ner_tags": [0, 1, 2, 9]}] * 6)
        answers = [{"text": ["the packed"], "answer_start": [text.index("the packed")]} for text in TEXTS[1:3]]
        known = [
            {"id": str(number), "title": "a", "question": "reads", "context": text, "answers": answer}
            for number, (text, answer) in enumerate(zip(TEXTS[1:3], answers, strict=True))
        ]
        write(data / f"squad/{split}.parquet", known)
        write(data / f"squadshifts_new_wiki/{split}.parquet", known)
        contracts = [{"text": " ".join(WORDS * 60), "label": label, "label_text": "xy"[label]} for label in labels]
        write(data / f"cuad_contract_type/{split}.parquet", contracts)
        texts = [{"text": " ".join(WORDS * 40)}] * 3
        write(data / f"enwiki/{split}.parquet", texts)
        write(data / f"novels/{split}.parquet", texts)


@pytest.fixture(scope="module")
def conversion(source, tokenizer, tmp_path_factory):
    """A folder of a conversion that reads 120 tokens, with the recipe in its card."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    AbcModel.from_pretrained_encoder(source, max_length=120, position_period=38, **FIELDS).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    recipe = {"model_name": "tiny", "model": {"model_type": "abc_memory", "max_length": 120, **FIELDS}}
    (folder / "README.md").write_text(f"```yaml\n{yaml.safe_dump(recipe, sort_keys=False)}```\n")
    return folder


def run(source, conversion, folder, *options):
    words = ["run", "--teacher", str(source), "--models", str(conversion), "--data", str(folder / "data")]
    return minilm_finetune.main([*words, "--runs", str(folder / "runs"), *map(str, options)])


def finished(folder):
    """Every run by task, contender and seed."""
    runs = [json.loads(path.read_text()) for path in folder.glob("runs/*/*/*/run.json")]
    return {(one["task"], one["contender"], one["seed"]): one for one in runs}


def test_every_kind_of_task_is_trained_scored_and_kept(source, conversion, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(mlm, "LENGTH", 32)
    monkeypatch.setattr(mlm, "SHORT", 16)
    monkeypatch.setattr(minilm_finetune, "SOURCE_LENGTH", 40)
    write_tasks(tmp_path / "data")
    kinds = ["sst2", "stsb", "csqa", "wnut17", "squad", "mlm"]
    assert run(source, conversion, tmp_path, "--contenders", "tiny", "--tasks", *kinds) == 0
    assert run(source, conversion, tmp_path, "--tasks", "contracts", "--seeds", 1, "--bf16") == 0
    found = finished(tmp_path)
    parts = ["tiny", "tiny, untrained", "tiny, without slots", "tiny, without selected tokens"]
    parts.append("tiny, without slots and selected tokens")
    assert found.keys() == {(name, "tiny", 0) for name in kinds} | {
        ("contracts", name, 1) for name in ["teacher", minilm_finetune.WINDOWS, *parts]
    }
    # The teacher has 40 positions, the conversion 120; a contract has 134 tokens.
    names = ("teacher", minilm_finetune.WINDOWS, "tiny")
    assert [found["contracts", name, 1]["longest"] for name in names] == [40, 134, 120]
    precisions = {one["task"]: one["precision"] for one in found.values()}
    assert precisions == {**dict.fromkeys(kinds, "float32"), "contracts": "bfloat16"}
    assert not [*tmp_path.glob("runs/*/*/*/checkpoint-*")]
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/*/*/run.json")}
    assert run(source, conversion, tmp_path, "--contenders", "tiny", "--tasks", *kinds) == 0
    assert times == {path: path.stat().st_mtime_ns for path in times}
    results = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path)]
    assert minilm_finetune.main(["report", *results]) == 0
    table = (tmp_path / "minilm_finetune.md").read_text()
    score = found["sst2", "tiny", 0]["scores"]["accuracy"]
    assert f"| SST-2 | accuracy | 6 x 2 | 50.0 | {score:.1f} |" in table and "unigram baseline" in table
    shutil.rmtree(tmp_path / "runs")
    assert minilm_finetune.main(["report", *results]) == 0
    assert (tmp_path / "minilm_finetune.md").read_text() == table


def test_a_task_starts_from_the_finished_run_of_another(source, tokenizer, conversion, tmp_path, capsys):
    write_tasks(tmp_path / "data")
    starts = {"tiny": "tiny", "tiny, without slots": "tiny-without-slots", minilm_finetune.WINDOWS: "teacher"}
    for contender, start in starts.items():
        assert run(source, conversion, tmp_path, "--contenders", contender, "--tasks", "squad_long") == 2
        assert f"squad/{start}/seed-0, which is not finished. Run its task first" in capsys.readouterr().err
    long = ["--contenders", "tiny", "--tasks", "squad_long"]
    assert run(source, conversion, tmp_path, "--contenders", "tiny", "--tasks", "squad") == 0
    assert run(source, conversion, tmp_path, *long) == 0
    kind = kinds.Answers(tasks.TASKS["squad_long"], tokenizer, 40)
    model = minilm_finetune.conversion(conversion, kind.head, {})
    adapted = training.adapt(model, training.LoraSettings(1e-3, 4, 1, 0, kind.trained))
    folder = tmp_path / "runs" / "squad" / "tiny" / "seed-0"
    minilm_finetune.start_from(folder, adapted)
    saved = load_file(folder / "adapter_model.safetensors")
    torch.testing.assert_close(get_peft_model_state_dict(adapted), saved)
    assert any("qa_outputs" in name for name in saved)


def test_all_positions_of_the_source(source, conversion, monkeypatch):
    options = argparse.Namespace(teacher=source, models=[conversion])
    for task, has in (("sst2", False), ("squad", True), ("contracts", False)):
        assert ("tiny, with 512 positions" in minilm_finetune.contenders(options, task)) == has
    monkeypatch.setattr(minilm_finetune, "SOURCE_POSITIONS", 40)
    whole = minilm_finetune.unrepeated(conversion, source, "ForQuestionAnswering", {}).base_model.eval()
    own, given = whole.state_dict(), AutoModel.from_pretrained(source).state_dict()
    repeated = AbcModel.from_pretrained(conversion).eval()
    positions = "embeddings.position_embeddings.weight"
    assert all(torch.equal(own[name], value) for name, value in repeated.state_dict().items() if name != positions)
    assert torch.equal(own[positions][-40:], given[positions][:40])
    ids = torch.arange(40).remainder(8).add(5)[None]
    short, long = (model(input_ids=ids[:, :38]).last_hidden_state for model in (whole, repeated))
    assert torch.equal(short, long)
    assert not torch.allclose(*(model(input_ids=ids).last_hidden_state for model in (whole, repeated)))


def test_an_interrupted_run_is_not_continued_with_other_options(source, conversion, tmp_path, capsys, monkeypatch):
    write_tasks(tmp_path / "data")
    words = ["--contenders", "tiny", "--tasks", "sst2"]
    with monkeypatch.context() as patch:
        patch.setattr(minilm_finetune, "finetune", lambda *_: sys.exit(1))
        with pytest.raises(SystemExit):
            run(source, conversion, tmp_path, *words, "--rows", 4)
    assert run(source, conversion, tmp_path, *words) == 2
    assert "'rows': 4" in capsys.readouterr().err
    assert run(source, conversion, tmp_path, *words, "--rows", 4) == 0
    assert not [*tmp_path.glob("runs/*/*/*/settings.json")]


# ---- adapters ----

# Runs without luna_hf, and with the repositories of the stub alone.
LOAD = """
import json, sys
from transformers import pipeline
classify = pipeline("text-classification", "tester/tiny-sst2", trust_remote_code=True, device="cpu", top_k=None)
json.dump(classify(sys.argv[1]), open(sys.argv[2], "w"))
"""


@pytest.fixture(scope="module")
def clone(source, conversion, tmp_path_factory):
    """A clone with a base and with an adapter on it for each head."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(conversion, folder / "checkpoints" / "tiny")
    write_tasks(folder / "data")
    entry = {"summary": "An adapter.", "data": "words", "base": "tiny", "limits": ["It is tiny."]}
    entries = {f"tiny-{task}": {**entry, "task": task} for task in ("sst2", "csqa", "wnut17", "squad", "mlm")}
    catalogue = {"defaults": {"language": "en", "license": "mit"}, "data": {"words": "W."}}
    catalogue["checkpoints"] = {"tiny": {**entry, "base": ""}, **entries}
    (folder / "model_cards").mkdir()
    (folder / "model_cards" / "zoo.yaml").write_text(yaml.safe_dump(catalogue))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(mlm, "LENGTH", 32)
        models = Path("checkpoints/tiny")
        heads = [values["task"] for values in entries.values()]
        assert run(source, models, folder, "--contenders", "tiny", "teacher", "--bf16", "--tasks", *heads) == 0
        results = folder / "experiments" / "results"
        assert minilm_finetune.main(["report", "--runs", "runs", "--results", str(results)]) == 0
        zoo = Zoo(folder)
        for name, values in entries.items():
            ship.ship(zoo, name, [folder / "runs" / values["task"] / "tiny" / "seed-0"])
            build.write(zoo, name)
        yield zoo


NAMES = ["tiny-sst2", "tiny-csqa", "tiny-wnut17", "tiny-squad", "tiny-mlm"]


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_is_a_checkpoint_like_others(clone, name, monkeypatch, capsys):
    monkeypatch.chdir(clone.root)
    own, task = clone.checkpoint(name), name.removeprefix("tiny-")
    files = {path.name for path in own.folder.iterdir()}
    assert {
        "adapter_model.safetensors",
        "tokenizer.json",
        "modeling_abc.py",
    } <= files and "model.safetensors" not in files
    weights = load_file(own.folder / "adapter_model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    model, tokenizer = golden.load(own.folder)
    assert model.config.max_position_embeddings == 120 and model.config.architectures == [type(model).__name__]
    trained = load_file(clone.root / "runs" / task / "tiny" / "seed-0" / "adapter_model.safetensors")
    trained = {name: value for name, value in trained.items() if name in weights}
    assert len(trained) == len(weights)
    state = {
        name.replace(".modules_to_save", "").replace(".default", ""): value
        for name, value in model.state_dict().items()
        if "original_module" not in name
    }
    for place, value in trained.items():
        torch.testing.assert_close(state[place.removeprefix("base_model.model.")], value.bfloat16().float())
    assert {"lora_A", "lora_B"} < {place.split(".")[-2] for place in trained}
    for case in own.golden["cases"]:
        found = golden.values(own.golden["kind"], model, tokenizer, case)
        torch.testing.assert_close(found, torch.tensor(case["values"]), atol=1e-4, rtol=1e-4)
    card = (own.folder / "README.md").read_text()
    scores = [row["values"][0] for row in clone.rows if (row["model"], row["task"]) == ("tiny", task)]
    shown = "| unigram baseline |" if task == "mlm" else f"| {statistics.median(scores):.3f} |"
    assert shown in card and "library_name: peft" in card and "--seeds 0 --bf16" in card
    exec(build.Card(clone, name).usage(), {})
    assert not build.is_stale(clone, name)


@pytest.mark.parametrize("name", ["luna-minilm-en-4096-imdb", "luna-minilm-en-4096-squad"])
def test_an_adapter_of_a_variant_reads_as_it_was_trained(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    model, _ = golden.load(ROOT / "checkpoints" / name)
    assert model.config.num_selected_tokens == model.config.softmax_length == 0
    assert AutoConfig.from_pretrained("checkpoints/luna-minilm-en-4096").num_selected_tokens == 128
    with refused("softmax_length"):
        AutoModel.from_pretrained("checkpoints/luna-minilm-en-4096", num_selected_tokens=0)
    command = build.Card(Zoo(), name).repeat()
    assert '--contenders "luna-minilm-en-4096, without selected tokens"' in command
    assert "/luna-minilm-en-4096-without-selected-tokens/seed-" in command


def test_labels_are_the_adapters_wherever_it_is_loaded_from(clone, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # not the clone
    folder = clone.checkpoint("tiny-wnut17").folder
    for model in (
        AutoModelForTokenClassification.from_pretrained(folder),
        AbcForTokenClassification.from_pretrained(folder),
    ):
        assert model.config.id2label == dict(enumerate(tasks.WNUT)) and not model.training
    changed = AbcForTokenClassification.from_pretrained(folder, classifier_dropout=0.5)
    assert changed.config.classifier_dropout == 0.5 and changed.num_labels == len(tasks.WNUT)
    base = clone.root / "checkpoints" / "tiny"
    assert AutoModelForTokenClassification.from_pretrained(base).num_labels == 2
    monkeypatch.setattr(adapters_of_models, "is_peft_available", lambda: False)
    with refused("pip install peft", error=ImportError):
        AbcForTokenClassification.from_pretrained(folder)


@pytest.mark.parametrize(
    ("task", "loader", "named"),
    [
        ("sst2", AutoModelForMaskedLM, "lm_head of AbcForMaskedLM"),
        ("sst2", AutoModelForTokenClassification, "classifier of AbcForTokenClassification"),
        ("wnut17", AutoModelForQuestionAnswering, "qa_outputs"),
        ("mlm", AutoModelForSequenceClassification, "classifier of AbcForSequenceClassification"),
        ("sst2", AutoModel, "its base, checkpoints/tiny"),
        ("mlm", AbcModel, "a model with a head"),
    ],
)
def test_an_adapter_of_another_head_is_refused(clone, task, loader, named, monkeypatch):
    monkeypatch.chdir(clone.root)
    with refused(f"tiny-{task} is an adapter", named):
        loader.from_pretrained(clone.checkpoint(f"tiny-{task}").folder)


def test_an_adapter_keeps_the_head_of_its_base(conversion, tmp_path):
    """Of the class that the base was saved as; LoRA alone is in the adapter."""
    AbcForMaskedLM.from_pretrained(conversion).save_pretrained(tmp_path / "base")
    model = AbcForMaskedLM.from_pretrained(tmp_path / "base")
    adapted = get_peft_model(model, LoraConfig(target_modules=["query"]))
    adapted.save_pretrained(tmp_path / "adapter")
    model.config.save_pretrained(tmp_path / "adapter")
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "adapter")
    assert torch.equal(loaded.lm_head.dense.weight, model.lm_head.dense.weight)
    with refused("classifier of AbcForSequenceClassification"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "adapter")


@pytest.mark.parametrize("loader", [AutoModelForTokenClassification, AbcForTokenClassification])
def test_an_adapter_without_its_base_is_refused(clone, loader, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(clone.checkpoint("tiny-wnut17").folder, "alone")
    with refused("alone is an adapter for checkpoints/tiny", "Put that model's folder beside", error=OSError):
        loader.from_pretrained("alone")


def test_a_published_adapter_loads_from_the_hub_alone(clone, monkeypatch, tmp_path):
    monkeypatch.chdir(clone.root)
    text = clone.checkpoint("tiny-sst2").golden["cases"][0]["texts"][0]
    expected = pipeline("text-classification", str(clone.checkpoint("tiny-sst2").folder), top_k=None)(text)[0]
    with HubStub() as hub:
        hub.patch(monkeypatch, tmp_path)
        push_folder(clone.root / "checkpoints" / "tiny", reserve_repository("tester/tiny"), "Base")
        publish.publish(clone, "tiny-sst2", "tester/tiny-sst2")
        files = hub.repositories["tester/tiny-sst2"]
        assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "tester/tiny"
        assert b"base_model: tester/tiny" in files["README.md"]
        run_python(LOAD, text, tmp_path / "found.json", env=hub.environment(tmp_path / "loading"), blocked=True)
    (found,) = json.loads((tmp_path / "found.json").read_text())
    assert {row["label"] for row in found} == {"negative", "positive"}
    assert [row["score"] for row in found] == pytest.approx([row["score"] for row in expected], rel=1e-4)


def test_what_a_user_changes_reaches_an_adapter(clone, monkeypatch, tmp_path):
    """Also from the Hub, where the Auto class has put it into the base's config; all else is as trained."""
    folder, base, auto = clone.checkpoint("tiny-sst2").folder, clone.root / "checkpoints" / "tiny", AutoConfig
    labels = {0: "NEG", 1: "POS"}
    changes = {"attn_implementation": "eager", "hidden_dropout_prob": 0.3, "output_hidden_states": True}
    auto_model = AutoModelForSequenceClassification
    found = [
        auto_model.from_pretrained(folder, **changes, id2label=labels),
        auto_model.from_pretrained(folder, config=auto.from_pretrained(base, **changes, id2label=labels)),
    ]
    with HubStub() as hub:
        hub.patch(monkeypatch, tmp_path)
        push_folder(base, reserve_repository("tester/tiny"), "Base")
        publish.publish(clone, "tiny-sst2", "tester/tiny-sst2")
        found.append(auto_model.from_pretrained("tester/tiny-sst2", **changes, id2label=labels))
    for model in found:
        config = model.config
        assert (config._attn_implementation, config.hidden_dropout_prob) == ("eager", 0.3)
        assert config.output_hidden_states and config.id2label == labels
    trained = auto.from_pretrained(folder)
    assert auto_model.from_pretrained(folder, config=auto.from_pretrained(base)).config.id2label == trained.id2label


def test_a_shipped_conversion_says_how_it_was_made():
    assert recipe_model(ROOT / "checkpoints" / "luna-minilm-en-4096")["model_type"] == "luna"
