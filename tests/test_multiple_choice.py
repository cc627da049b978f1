"""Multiple choice: texts to batches, what is cut, RACE and CommonsenseQA end to end on small synthetic rows."""

import json
import re
import shutil

import finetune_csqa
import finetune_race
import numpy as np
import pytest
import torch
from datasets import Dataset
from helpers import tiny_tokenizer
from huggingface_hub import ModelCard
from tasks.multiple_choice import CsqaArguments, CsqaTask, RaceArguments, RaceTask, fill_in, read_questions
from tasks.trainer import FinetuneTrainer
from tiny_finetuning import (
    MODEL_TYPES,
    PLAIN,
    checkpoint,
    command,
    csqa_rows,
    race_rows,
    refused,
    run,
    write_rows,
    write_split,
)
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForMultipleChoice, AutoTokenizer, BertTokenizer, PreTrainedTokenizerFast

from luna_hf.scripting import UserError

SCRIPTS = {"race": finetune_race, "csqa": finetune_csqa}
TASKS = {"race": RaceTask, "csqa": CsqaTask}
WORDS = ["the", "fox", "reads", "every", "book", "in", "a", "house", "of", "glass"]
RACE_ROW = {
    "example_id": "middle1.txt",
    "article": "the fox reads every book\nin a house  of glass",
    "question": "the fox reads in  _  .",
    "options": ["a house", "a book", "the glass", "a fox"],
    "answer": "C",
}
CSQA_ROW = {
    "id": "x1",
    "question": "the fox reads in a what",
    "question_concept": "fox",
    "choices": {"label": ["A", "B", "C", "D", "E"], "text": ["house", "book", "glass", "fox", "every"]},
    "answerKey": "B",
}


def wordpiece():
    """A tokenizer of BERT's kind, one token per word."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    return BertTokenizer(vocab={word: index for index, word in enumerate([*specials, *WORDS, *"qb.:"])})


def modernbert_tokenizer():
    """[CLS] and [SEP] without segments, as ModernBERT's."""
    backend = wordpiece().backend_tokenizer
    backend.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    inputs = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=inputs, **names)


TOKENIZERS = {"luna": tiny_tokenizer(), "bert": wordpiece(), "modernbert": modernbert_tokenizer()}


def task_on(folder, rows, script=finetune_race, **options):
    """A task with the rows as training and dev split."""
    for split in ("train", "validation"):
        path = folder / "middle" / f"{split}.jsonl" if script is finetune_race else folder / f"{split}.jsonl"
        write_split(path, rows)
    if script is finetune_race:
        return RaceTask(RaceArguments(["m"], dataset_name=str(folder), dataset_config="middle", **options))
    return CsqaTask(CsqaArguments(["m"], dataset_name=str(folder), **options))


def batch_of(task, tokenizer, max_length=100, multiple=None):
    """All rows of the training split in one batch, and what was cut."""
    encoded = task.encode(task.train, tokenizer, max_length)
    return task.collator(tokenizer, multiple)(list(encoded.rows.remove_columns("length"))), encoded


# ---- inputs ----


@pytest.mark.parametrize("kind", list(TOKENIZERS))
def test_race_input_is_question_with_option_then_passage(kind, tmp_path):
    tokenizer = TOKENIZERS[kind]
    batch, _ = batch_of(task_on(tmp_path, [RACE_ROW]), tokenizer)
    passage = "the fox reads every book in a house of glass"
    texts = [f"the fox reads in {option} ." for option in RACE_ROW["options"]]
    wanted = tokenizer(texts, [passage] * 4, padding=True, return_tensors="pt")
    assert set(batch) == {*wanted, "labels"} and batch["labels"].tolist() == [2]
    assert ("token_type_ids" in batch) == (kind == "bert")
    for name, tensor in wanted.items():
        assert torch.equal(batch[name][0], tensor), name


@pytest.mark.parametrize("kind", list(TOKENIZERS))
def test_csqa_input_has_one_separator_and_one_segment(kind, tmp_path):
    tokenizer = TOKENIZERS[kind]
    batch, _ = batch_of(task_on(tmp_path, [CSQA_ROW], finetune_csqa), tokenizer)
    for choice, option in enumerate(CSQA_ROW["choices"]["text"]):
        parts = [
            tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in ("Q: " + CSQA_ROW["question"], f"A: {option}")
        ]
        wanted = [tokenizer.cls_token_id, *parts[0], tokenizer.sep_token_id, *parts[1], tokenizer.sep_token_id]
        assert batch["input_ids"][0, choice][batch["attention_mask"][0, choice] == 1].tolist() == wanted
    assert batch["labels"].tolist() == [1] and not batch.get("token_type_ids", torch.zeros(1)).any()


@pytest.mark.parametrize(
    ("question", "option", "text"),
    [
        ("the fox reads in _ .", "a house", "the fox reads in a house ."),
        ("who reads", "a house", "who reads a house"),
        ("_ and __ .", "a house", "a house and a house ."),
        ("in _ .", r"a \1 \g<0>", r"in a \1 \g<0> ."),
    ],
)
def test_race_fills_blanks(question, option, text):
    assert fill_in(question, option) == text


def test_a_special_token_in_the_text_is_text(tmp_path):
    tokenizer = TOKENIZERS["luna"]
    rows = [{**RACE_ROW, "article": "a </s> b", "question": "_ </s> c"}]
    batch, _ = batch_of(task_on(tmp_path, rows), tokenizer)
    assert (batch["input_ids"] == tokenizer.eos_token_id).sum(-1).tolist() == [[3] * 4]  # those of the pair


def test_batches_are_padded_to_the_longest_choice_and_rows_without_answers_are_ignored(tmp_path):
    rows = [{**RACE_ROW, "options": ["a", "the book of"], "answer": "", "article": "fox " * n} for n in (2, 5)]
    task = task_on(tmp_path, [{**row, "answer": "A"} for row in rows])
    task.train = read_questions(Dataset.from_list(rows), RaceTask.columns, RaceTask.read_row, "here")
    # 5 words of the question, 3 of the option, 5 of the passage, 3 special tokens
    for multiple, width in ((None, 16), (16, 16), (10, 20)):
        batch, encoded = batch_of(task, TOKENIZERS["bert"], multiple=multiple)
        assert batch["input_ids"].shape == batch["token_type_ids"].shape == (2, 2, width)
        assert torch.equal(batch["input_ids"] == 0, batch["attention_mask"] == 0)
        assert batch["labels"].tolist() == [-100, -100] and "labels" not in encoded.rows.column_names
    assert batch["attention_mask"].sum(-1).tolist() == [[11, 13], [14, 16]]
    assert list(encoded.rows["length"]) == [len("the fox reads in the book of .") + len("fox fox"), 49]


# ---- cuts ----


def test_the_question_is_cut_first_then_the_passage_and_all_is_counted(tmp_path):
    short = {**RACE_ROW, "article": "fox", "question": "q", "options": ["a", "b"], "answer": "A"}
    # 5 + 1 and 5 + 3 tokens of question and option; 12 of the passage
    long = {**short, "article": "fox " * 12, "question": "q q q q q", "options": ["a", "a book of"]}
    task, tokenizer = task_on(tmp_path, [short, long], max_question_length=7), TOKENIZERS["bert"]
    batch, encoded = batch_of(task, tokenizer, max_length=16)
    # Room for the passage: 16 - 3 special tokens - 6 or 7; one token of the question and 5 + 6 of the passage are lost.
    assert (encoded.cut_rows, encoded.cut_tokens, encoded.tokens) == (1, 1 + 5 + 6, 6 + 6 + 16 + 16)
    assert "1 (50.0%) were cut, which lost 12 tokens" in encoded.report("train", 16)
    q, a, book, fox = tokenizer.convert_tokens_to_ids(["q", "a", "book", "fox"])
    assert batch["input_ids"][1].tolist() == [
        [2, *[q] * 5, a, 3, *[fox] * 7, 3],
        [2, *[q] * 5, a, book, 3, *[fox] * 6, 3],
    ]
    assert batch["attention_mask"].sum(-1).tolist() == [[6, 6], [16, 16]]


@pytest.mark.parametrize("kind", ["luna", "bert"])
def test_the_question_of_csqa_gives_way_to_the_option(kind, tmp_path):
    tokenizer = TOKENIZERS[kind]
    row = {**CSQA_ROW, "choices": {"label": ["A", "B"], "text": ["fox", "a house of glass"]}}
    task = task_on(tmp_path, [row], finetune_csqa, max_question_length=9)
    batch, encoded = batch_of(task, tokenizer)
    question = tokenizer("Q: " + row["question"], add_special_tokens=False)["input_ids"]
    lost = 0
    for choice, option in enumerate(row["choices"]["text"]):
        answer = tokenizer(f"A: {option}", add_special_tokens=False)["input_ids"]
        kept = question[: max(0, 9 - len(answer))]
        lost += len(question) + len(answer) - 9
        wanted = [tokenizer.cls_token_id, *kept, tokenizer.sep_token_id, *answer[:9], tokenizer.sep_token_id]
        assert batch["input_ids"][0, choice].tolist() == wanted
    assert encoded.cut_tokens == lost > 0


@pytest.mark.parametrize(
    ("name", "max_length", "asked", "length"),
    [
        *[("race", 512, None, 128), ("race", 128, None, 62), ("race", 128, 100, 100), ("race", 128, 124, None)],
        *[("csqa", 512, None, 128), ("csqa", 128, None, 125), ("csqa", 128, 200, 125)],
    ],
)
def test_question_lengths_follow_the_option_and_the_room(name, max_length, asked, length, tmp_path):
    row = {"race": RACE_ROW, "csqa": CSQA_ROW}[name]
    task = task_on(tmp_path, [row], SCRIPTS[name], max_question_length=asked)
    if length is None:
        with pytest.raises(UserError, match=f"{max_length} tokens.*--max_question_length"):
            task.check_length(TOKENIZERS["luna"], max_length)
    else:
        assert task.question_length(TOKENIZERS["luna"], max_length) == length
        assert f" {length:,} of {max_length:,} " in task.check_length(TOKENIZERS["luna"], max_length)[0]


# ---- rows that are refused ----


@pytest.mark.parametrize(
    ("name", "change", "value"),
    [
        ("race", {"answer": "E"}, "'E' is not in list"),
        ("race", {"article": None}, "NoneType"),
        ("race", {"options": ["a", "b", "c"]}, "middle1.txt.* 3 choices"),
        ("race", {"example_id": "low1.txt"}, "form of the data set"),
        ("race", {"answer": ""}, "middle1.txt.*no answer"),
        ("csqa", {"answerKey": "F"}, "'F'"),
        ("csqa", {"choices": {"label": ["A", "B", "C"], "text": ["x", "y"]}}, "shorter"),
    ],
)
def test_bad_rows_are_named(name, change, value):
    task, row = TASKS[name], {"race": RACE_ROW, "csqa": CSQA_ROW}[name]
    rows = Dataset.from_list([row] * 3 + [{**row, **change}])
    with pytest.raises(UserError, match=f"here, row 3.*{value}"):
        read_questions(rows, task.columns, task.read_row, "here")


@pytest.mark.parametrize(
    ("name", "change", "value"),
    [
        ("race", {"options": "['a', 'b', 'c', 'd']"}, "options must be a list"),
        ("race", {"answer": 0}, "0 is not in list"),
        ("csqa", {"choices": {"label": ["A", "A"], "text": ["x", "y"]}}, "one letter"),
        ("csqa", {"choices": "{'label': ['A']}"}, "string indices"),
    ],
)
def test_data_of_another_form_are_refused(name, change, value):
    task, row = TASKS[name], {"race": RACE_ROW, "csqa": CSQA_ROW}[name]
    with pytest.raises(UserError, match=f"here, row 0.*{value}"):
        read_questions(Dataset.from_list([{**row, **change}]), task.columns, task.read_row, "here")


# ---- runs ----


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Folders with RACE by level, and CommonsenseQA with a test split without answers."""
    folder = tmp_path_factory.mktemp("data")
    for level, counts in (("middle", (24, 12, 5)), ("high", (32, 10, 9))):
        for seed, (split, count) in enumerate(zip(("train", "validation", "test"), counts, strict=True)):
            write_split(folder / "race" / level / f"{split}.parquet", race_rows(count, level, seed))
    for seed, (split, count) in enumerate((("train", 24), ("validation", 20), ("test", 11))):
        write_split(folder / "csqa" / f"{split}.parquet", csqa_rows(count, seed, answers=split != "test"))
    return {"race": folder / "race", "csqa": folder / "csqa"}


def test_a_split_of_one_level_is_refused(data, tmp_path):
    folder = shutil.copytree(data["race"], tmp_path / "race")
    (folder / "middle" / "test.parquet").unlink()
    with pytest.raises(UserError, match="has the split test for one level only"):
        RaceTask(RaceArguments(["m"], dataset_name=str(folder), dataset_config="all"))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {model_type: checkpoint(folder / model_type, model_type) for model_type in MODEL_TYPES}


def words_of(data, name, model, output_dir, **options):
    return command(model, output_dir, **{"max_length": 40, "dataset_name": data[name], **options})


@pytest.fixture(scope="module")
def race_run(data, models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("race") / "out"
    options = {"max_length": 40, "max_question_length": 16, "dataset_name": data["race"], "num_train_epochs": 6}
    run(models["luna"], folder, finetune_race, **options, **PLAIN)
    return folder


@pytest.fixture(scope="module")
def csqa_runs(data, models, tmp_path_factory):
    """Every type of model with one budget."""
    folder = tmp_path_factory.mktemp("csqa") / "out"
    options = {"max_length": None, "dataset_name": data["csqa"], "num_train_epochs": 1, **PLAIN}
    run(list(models.values()), folder, finetune_csqa, **options)
    return folder


def guesses(folder, task, rows):
    """The answers of a finished folder, one question at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForMultipleChoice.from_pretrained(folder).eval()
    collator = task.collator(tokenizer, None)
    with torch.no_grad():
        rows = task.encode(rows, tokenizer, 40).rows.remove_columns(["length", "labels"])
        return [int(model(**{**collator([row]), "labels": None}).logits.argmax()) for row in rows]


def test_race_is_learnt_and_scored_by_level(data, race_run):
    result = json.loads((race_run / "run.json").read_text())
    counts = {"validation": {"middle": 12, "high": 10}, "test": {"middle": 5, "high": 9}}
    assert list(result["scores"]) == ["validation", "test"]
    for split, scores in result["scores"].items():
        assert list(scores) == ["accuracy", "accuracy_middle", "accuracy_high"]
        right = sum(scores[f"accuracy_{level}"] * count for level, count in counts[split].items())
        assert right / sum(counts[split].values()) == pytest.approx(scores["accuracy"])
    assert result["scores"]["validation"]["accuracy"] > 0.7
    assert "train: 24 middle, 32 high." in result["notes"]
    # Row by row the file of predictions, the saved folder and the scores agree.
    arguments = RaceArguments(["x"], dataset_name=str(data["race"]), max_question_length=16)
    task = RaceTask(arguments)
    lines = [json.loads(line) for line in (race_run / "predictions" / "test.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == list(task.tests["test"]["id"])
    letters = [line["chosenAnswer"] for line in lines]
    assert letters == ["ABCD"[guess] for guess in guesses(race_run, task, task.tests["test"])]
    labels = np.asarray(task.tests["test"]["label"])
    only_middle = np.eye(4)[np.where(np.arange(14) < 5, labels, (labels + 1) % 4)]
    found = task.scores("test", only_middle, labels)
    assert found == pytest.approx({"accuracy": 5 / 14, "accuracy_middle": 1.0, "accuracy_high": 0.0})


def test_csqa_compares_models_and_predicts_the_test_split(csqa_runs):
    summary = json.loads((csqa_runs / "results.json").read_text())
    assert [row["model"] for row in summary["settings"]] == MODEL_TYPES
    assert all(list(one["scores"]) == ["validation"] for one in summary["runs"])  # the test split has no answers
    # Models of 40 positions need no option for the length.
    assert {(one["steps"], one["max_length"]) for one in summary["runs"]} == {(3, 40)}
    assert all(
        "Question and option have at most 37 of 40 tokens (--max_question_length)." in one["notes"]
        for one in summary["runs"]
    )
    for name in MODEL_TYPES:
        (folder,) = (csqa_runs / "runs" / name).iterdir()
        lines = [json.loads(line) for line in (folder / "predictions" / "test.jsonl").read_text().splitlines()]
        assert [line["id"] for line in lines] == [f"2-{index}" for index in range(11)]
        assert {line["chosenAnswer"] for line in lines} <= set("ABCDE")


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_example_of_the_card_makes_the_inputs_of_the_training(name, race_run, csqa_runs, tmp_path, capsys):
    folder = race_run if name == "race" else next((csqa_runs / "runs" / "luna").iterdir())
    card = ModelCard.load(folder / "README.md")
    assert all(result.task_type == "multiple-choice" for result in card.data.eval_results)
    metrics = {result.metric_type for result in card.data.eval_results}
    assert metrics == ({"accuracy", "accuracy_middle", "accuracy_high"} if name == "race" else {"accuracy"})
    code = card.text.partition("```python\n")[2].partition("```")[0]
    code, count = re.subn(r'name = "[^"]*"', f'name = "{folder}"', code)
    found = {}
    exec(code, found)
    options = found["options"]
    assert count == 1 and capsys.readouterr().out.strip() in options
    row = {**CSQA_ROW, "question": found["question"], "choices": {"label": list("ABCDE"), "text": options}}
    if name == "race":
        row = {**RACE_ROW, "article": found["passage"], "question": found["question"], "options": options}
    task = task_on(tmp_path, [row], SCRIPTS[name], max_question_length=30 if name == "race" else None)
    batch, _ = batch_of(task, found["tokenizer"], found["tokenizer"].model_max_length)
    for key in ("input_ids", "attention_mask"):
        assert torch.equal(found["inputs"][key], batch[key][0]), key


# ---- what is refused before training ----


def without(column):
    return lambda rows: [{name: value for name, value in row.items() if name != column} for row in rows]


def with_values(**values):
    return lambda rows: [{**row, **values} for row in rows]


@pytest.mark.parametrize(
    ("name", "split", "change", "value"),
    [
        ("race", "train", without("options"), "train.*`options`"),
        ("csqa", "validation", with_values(answerKey=""), "`validation`.* no answers"),
        ("race", "validation", lambda rows: rows[:0], r"validation\.parquet"),
        ("csqa", "train", with_values(choices={"label": "ABCDE", "text": "abcde"}), "row 0 .*must hold lists"),
        ("csqa", "train", None, "no split train; it has validation"),
    ],
)
def test_bad_data_are_refused(name, split, change, value, models, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(FinetuneTrainer, "train", None)
    for part in ("train", "validation"):
        rows = race_rows(8, "middle", 0) if name == "race" else csqa_rows(8, 0)
        if part != split or change:
            kept = change(rows) if part == split else rows
            columns = {key: [row[key] for row in kept] for key in (kept or rows)[0]}
            write_rows(tmp_path / "data" / f"{part}.parquet", columns)
    words = words_of({name: tmp_path / "data"}, name, models["luna"], tmp_path / "out")
    assert re.search(value, refused(capsys, words, SCRIPTS[name]))


@pytest.mark.parametrize(("key", "value"), [("dataset_config", "hihg"), ("max_question_length", 128)])
def test_wrong_options_are_refused(key, value, data, models, tmp_path, capsys):
    message = refused(capsys, words_of(data, "race", models["luna"], tmp_path / "out", **{key: value}), finetune_race)
    assert key in message and str(value) in message
