"""Multiple choice: texts to batches, what is cut, RACE and CommonsenseQA end to end on small synthetic rows."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_finetuning
import torch
import yaml
from datasets import Dataset
from helpers import ROOT, randomise, tiny_tokenizer
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from tiny_finetuning import MODEL_TYPES, checkpoint, command, finetuning, write_rows
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForMultipleChoice,
    AutoTokenizer,
    BertTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

import finetune_csqa  # isort: skip  (tiny_finetuning puts the scripts on the path)
import finetune_race  # isort: skip
from tasks import multiple_choice  # isort: skip
from tasks.multiple_choice import ChoiceCollator, Layout, Limits  # isort: skip
from luna_hf.scripting import UserError  # isort: skip

SCRIPTS = {"race": finetune_race, "csqa": finetune_csqa}
RECIPES = sorted((ROOT / "training" / "recipes").glob("finetune_[rc]*/*.yaml"))

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


def wordpiece() -> BertTokenizer:
    """A tokenizer of BERT's kind, one token a word."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = ["q", "b", ".", ":"]
    return BertTokenizer(vocab={word: index for index, word in enumerate([*specials, *WORDS, *letters])})


def modernbert_tokenizer() -> PreTrainedTokenizerFast:
    """[CLS] and [SEP] without segments, as ModernBERT's."""
    backend = wordpiece().backend_tokenizer
    backend.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        unk_token="[UNK]",
        model_input_names=["input_ids", "attention_mask"],
    )


def encoded(
    rows: list[dict[str, Any]], script: Any, tokenizer: PreTrainedTokenizerBase, layout: Layout, limits: Limits
) -> Dataset:
    """Rows of a data set as the model's ids."""
    questions = multiple_choice.read_questions(Dataset.from_list(rows), script.read_row, "here")
    return multiple_choice.encode(questions, tokenizer, layout, limits)


def rows_of(data: Dataset) -> list[dict[str, Any]]:
    """What the Trainer hands to the collator."""
    return list(multiple_choice.for_trainer(data, ("first", "second"), 100).rows)


# --- token layouts ---


def test_roberta_pair_is_the_tokenizers_own() -> None:
    tokenizer = tiny_tokenizer()
    layout = multiple_choice.pair_layout(tokenizer)
    assert (layout.start, layout.middle, layout.end, layout.segments) == ([0], [2, 2], [2], False)
    first, second = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("the fox", "a book"))
    assert layout.join(first, second)[0] == tokenizer("the fox", "a book")["input_ids"]


def test_bert_pair_is_the_tokenizers_own_with_segments() -> None:
    tokenizer = wordpiece()
    layout = multiple_choice.pair_layout(tokenizer)
    first, second = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("the fox", "a book"))
    own = tokenizer("the fox", "a book")
    assert layout.join(first, second) == (own["input_ids"], own["token_type_ids"])
    assert layout.segments


def test_modernbert_pair_has_no_segments() -> None:
    layout = multiple_choice.pair_layout(modernbert_tokenizer())
    assert (layout.start, layout.middle, layout.end, layout.segments) == ([2], [3], [3], False)


def test_a_tokenizer_without_a_pair_is_refused() -> None:
    tokenizer = modernbert_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    with pytest.raises(UserError, match="no special tokens before, between and after"):
        multiple_choice.pair_layout(tokenizer)


@pytest.mark.parametrize(
    "question, text",
    [
        ("the fox reads in  _  .", "the fox reads in  a house  ."),
        ("who reads", "who reads a house"),
        ("_ and __ .", "a house and a house ."),
    ],
)
def test_race_fills_blanks(question: str, text: str) -> None:
    assert finetune_race.fill_in(question, "a house") == text


def test_a_backslash_in_an_option_is_text() -> None:
    assert finetune_race.fill_in("in _ .", r"a \1 \g<0>") == r"in a \1 \g<0> ."


TOKENIZERS = [tiny_tokenizer(), wordpiece(), modernbert_tokenizer()]


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["luna", "bert", "modernbert"])
def test_race_input_is_question_with_option_then_passage(tokenizer: PreTrainedTokenizerBase) -> None:
    layout = finetune_race.RaceTask.layout(tokenizer)
    data = encoded([RACE_ROW], finetune_race, tokenizer, layout, Limits(200, 100))
    batch = ChoiceCollator(layout, tokenizer)(rows_of(data))
    passage = "the fox reads every book in a house of glass"
    for index, option in enumerate(RACE_ROW["options"]):
        wanted = tokenizer(f"the fox reads in {option} .", passage)
        real = batch["attention_mask"][0, index] == 1
        assert batch["input_ids"][0, index][real].tolist() == wanted["input_ids"]
        if layout.segments:
            assert batch["token_type_ids"][0, index][real].tolist() == wanted["token_type_ids"]
    assert batch["labels"].tolist() == [2]


def test_csqa_input_has_one_separator() -> None:
    tokenizer = tiny_tokenizer()
    layout = multiple_choice.pair_layout(tokenizer).as_one_text()
    data = encoded([CSQA_ROW], finetune_csqa, tokenizer, layout, Limits(100, 50))
    batch = ChoiceCollator(layout, tokenizer)(rows_of(data))
    real = batch["attention_mask"][0, 1] == 1
    decoded = tokenizer.decode(batch["input_ids"][0, 1][real])
    assert decoded == "<s>Q: the fox reads in a what</s>A: book</s>"
    assert batch["labels"].tolist() == [1]


def test_a_special_token_in_the_text_is_text() -> None:
    tokenizer = tiny_tokenizer()
    layout = multiple_choice.pair_layout(tokenizer)
    row = {**RACE_ROW, "article": "a </s> b"}
    data = encoded([row], finetune_race, tokenizer, layout, Limits(200, 100))
    assert tokenizer.eos_token_id not in data[0]["first"]


# --- cuts ---


def test_question_is_cut_first_then_the_passage_and_all_is_counted() -> None:
    tokenizer, layout = wordpiece(), multiple_choice.pair_layout(wordpiece())
    short = {**RACE_ROW, "article": "fox", "question": "q", "options": ["a", "b"], "answer": "A"}
    # 5 + 1 and 5 + 3 tokens of question and option; 12 of the passage
    long = {
        **RACE_ROW,
        "article": " ".join(["fox"] * 12),
        "question": "q q q q q",
        "options": ["a", "a book of"],
        "answer": "B",
    }
    data = encoded([short, long], finetune_race, tokenizer, layout, Limits(whole=16, second=7))
    row = data[1]
    assert [len(ids) for ids in row["second"]] == [6, 7]
    # room for the passage: 16 - 3 special tokens - 6 or 7
    assert row["kept"] == [7, 6] and len(row["first"]) == 7
    made = multiple_choice.for_trainer(data, ("passage", "question"), 16)
    assert made.cut_by_part == {"passage": {"rows": 1, "tokens": 5 + 6}, "question": {"rows": 1, "tokens": 1}}
    assert (made.cut_rows, made.cut_tokens, made.longest, made.tokens) == (1, 12, 16, 6 + 6 + 16 + 16)
    assert made.report("train", 50) == (
        "train: 2 rows, 44 tokens in all choices, the longest input 16 of at most 16; "
        "question cut in 1 (50.0%), which lost 1 tokens; passage cut in 1 (50.0%), which lost 11 tokens."
    )
    batch = ChoiceCollator(layout, tokenizer)(rows_of(data))
    assert batch["input_ids"].shape == (2, 2, 16)
    assert batch["attention_mask"].sum(-1).tolist() == [[6, 6], [16, 16]]
    for choice, ids in enumerate(row["second"]):  # the end is whole, the passage gave way
        assert batch["input_ids"][1, choice].tolist() == [2, *row["first"][: 13 - len(ids)], 3, *ids, 3]


def test_limits_without_room_for_the_passage_are_refused() -> None:
    tokenizer = wordpiece()
    with pytest.raises(UserError, match="no room for 20 tokens that differ"):
        encoded([RACE_ROW], finetune_race, tokenizer, multiple_choice.pair_layout(tokenizer), Limits(22, 20))


@pytest.mark.parametrize(
    "task, max_length, asked, whole, second, why",
    [
        (finetune_race.RaceTask, 512, None, 512, 128, ""),
        (finetune_race.RaceTask, 260, None, 260, 128, ""),
        (finetune_race.RaceTask, 259, None, 259, 127, "not 128: half of the room"),
        (finetune_race.RaceTask, 128, None, 128, 62, "not 128: half of the room"),
        (finetune_race.RaceTask, 8, None, 8, 2, "not 128: half of the room"),
        (finetune_race.RaceTask, 128, 100, 128, 100, ""),
        (finetune_csqa.CsqaTask, 512, None, 132, 64, ""),
        (finetune_csqa.CsqaTask, 128, None, 128, 62, "124 tokens, not 128: more has no room"),
        (finetune_csqa.CsqaTask, 128, 200, 128, 62, "124 tokens, not 200: more has no room"),
        (finetune_csqa.CsqaTask, 128, 2, 6, 1, ""),
    ],
)
def test_limits_follow_what_is_asked_and_the_room(
    task: Any, max_length: int, asked: int | None, whole: int, second: int, why: str
) -> None:
    limits = task.limits(max_length, 4, asked)
    assert (limits.whole, limits.second) == (whole, second)
    assert why in limits.note and ("not" in limits.note) == bool(why)
    limits.check(4)


def test_limits_are_said_for_every_model(models: dict[str, Path], tmp_path: Path) -> None:
    long = checkpoint(tmp_path / "long", max_position_embeddings=600)
    names = [str(name) for name in (*models.values(), long)]
    arguments = finetune_race.RaceArguments(names)
    assert multiple_choice.limit_notes(finetune_race.RaceTask, arguments) == [
        "Of an input's 40 tokens question with option have at most 18, not 128: half of the room "
        "(--max_question_length).",
        "Of an input's 512 tokens question with option have at most 128 (--max_question_length).",
    ]
    arguments = finetune_race.RaceArguments(names, max_length=300, max_question_length=296)
    with pytest.raises(UserError, match="Inputs of 300 tokens have no room for 296 tokens"):
        multiple_choice.limit_notes(finetune_race.RaceTask, arguments)


# --- batches ---


def test_batch_is_padded_to_its_longest_choice_only() -> None:
    tokenizer, layout = wordpiece(), multiple_choice.pair_layout(wordpiece())
    rows = [{**RACE_ROW, "options": ["a", "the book of"], "answer": "A", "article": "fox " * n} for n in (2, 5)]
    data = encoded(rows, finetune_race, tokenizer, layout, Limits(60, 30))
    collator, longest = ChoiceCollator(layout, tokenizer), list(data["longest"])
    assert longest[0] < longest[1]
    rows = rows_of(data)
    for part, width in ((rows[:1], longest[0]), (rows[1:], longest[1]), (rows, longest[1])):
        batch = collator(part)
        assert batch["input_ids"].shape == (len(part), 2, width)
        assert torch.equal(batch["input_ids"] == tokenizer.pad_token_id, batch["attention_mask"] == 0)
        assert batch["token_type_ids"].shape == batch["input_ids"].shape
    assert ChoiceCollator(layout, tokenizer, multiple=8)(rows)["input_ids"].shape[-1] == -(-longest[1] // 8) * 8


def test_rows_without_answers_have_no_labels() -> None:
    tokenizer, layout = wordpiece(), multiple_choice.pair_layout(wordpiece()).as_one_text()
    data = encoded([{**CSQA_ROW, "answerKey": ""}], finetune_csqa, tokenizer, layout, Limits(60, 30))
    assert set(ChoiceCollator(layout, tokenizer)(rows_of(data))) == {"input_ids", "attention_mask"}


# --- rows that are refused ---


@pytest.mark.parametrize(
    "script, row, change, message",
    [
        (finetune_race, RACE_ROW, {"answer": "E"}, r"here, row 1: `answer` is 'E' .* 'A', 'B', 'C', 'D'"),
        (finetune_race, RACE_ROW, {"article": None}, "here, row 1: `article` is None"),
        (finetune_race, RACE_ROW, {"options": ["a", "b", "c"]}, r"row 1 \(middle1.txt\) has 3 choices, .* 4"),
        (finetune_race, RACE_ROW, {"options": ["a"]}, "row 1: `options`"),
        (finetune_race, RACE_ROW, {"options": None}, "row 1: `options` is None"),
        (finetune_race, RACE_ROW, {"example_id": "low1.txt"}, "row 1: `example_id` is 'low1.txt'"),
        (finetune_race, RACE_ROW, {"answer": ""}, "has no answer, unlike the first"),
        (finetune_csqa, CSQA_ROW, {"answerKey": "F"}, "row 1: `answerKey` is 'F'"),
        (finetune_csqa, CSQA_ROW, {"choices": None}, "row 1: `choices` is None"),
        (finetune_csqa, CSQA_ROW, {"choices": {"label": ["A", "A"], "text": ["x", "y"]}}, "each text needs its own"),
        (finetune_csqa, CSQA_ROW, {"choices": {"label": ["A", "B", "C"], "text": ["x", "y"]}}, "each text needs"),
    ],
)
def test_bad_rows_are_named(script: Any, row: dict[str, Any], change: dict[str, Any], message: str) -> None:
    dataset = Dataset.from_list([row, {**row, **change}])
    with pytest.raises(UserError, match=message):
        multiple_choice.read_questions(dataset, script.read_row, "here")


def test_a_bad_row_far_down_is_named_by_its_place_in_the_split() -> None:
    dataset = Dataset.from_list([CSQA_ROW] * 2100 + [{**CSQA_ROW, "answerKey": ""}])
    with pytest.raises(UserError, match=r"here, row 2100 \(x1\) has no answer, unlike the first"):
        multiple_choice.read_questions(dataset, finetune_csqa.read_row, "here")


def test_answers_of_another_type_are_named() -> None:
    dataset = Dataset.from_list([{**RACE_ROW, "answer": 2}])
    with pytest.raises(UserError, match=r"row 0: `answer` is 2 \(int\), but must be one of 'A'"):
        multiple_choice.read_questions(dataset, finetune_race.read_row, "here")


# --- runs ---


def race_rows(count: int, level: str, seed: int) -> list[dict[str, Any]]:
    """Questions whose right option is the one with a fox; every passage has two of them."""
    generator = random.Random(f"{level}{seed}")
    rows = []
    for index in range(count):
        options = ["the fox", "a dog reads", "cat", "the packed sequence"]
        generator.shuffle(options)
        words = generator.choices(tiny_finetuning.WORDS, k=generator.randint(2, 9))
        rows.append(
            {
                "example_id": f"{level}{index // 2}.txt",
                "article": " ".join(words) + ".",
                "question": generator.choice(["the token reads _ .", "every token reads"]),
                "options": options,
                "answer": "ABCD"[options.index("the fox")],
            }
        )
    return rows


def csqa_rows(count: int, seed: int, answers: bool = True) -> list[dict[str, Any]]:
    """Questions whose right option is the fox."""
    generator = random.Random(seed)
    rows = []
    for index in range(count):
        options = ["fox", "dog", "cat", "lazy token", "sequence"]
        generator.shuffle(options)
        question = " ".join(generator.choices(tiny_finetuning.WORDS, k=generator.randint(2, 9)))
        rows.append(
            {
                "id": f"{seed}-{index}",
                "question": question,
                "question_concept": "fox",
                "choices": {"label": list("ABCDE"), "text": options},
                "answerKey": "ABCDE"[options.index("fox")] if answers else "",
            }
        )
    return rows


def write_split(path: Path, rows: list[dict[str, Any]]) -> None:
    """A parquet file of the rows."""
    write_rows(path, {name: [row[name] for row in rows] for name in rows[0]})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with RACE by level, and CommonsenseQA with a test split without answers."""
    folder = tmp_path_factory.mktemp("data")
    for level, counts in (("middle", (24, 12, 5)), ("high", (32, 10, 9))):
        for seed, (split, count) in enumerate(zip(("train", "validation", "test"), counts, strict=True)):
            write_split(folder / "race" / level / f"{split}.parquet", race_rows(count, level, seed))
    for seed, (split, count) in enumerate((("train", 48), ("validation", 20), ("test", 11))):
        write_split(folder / "csqa" / f"{split}.parquet", csqa_rows(count, seed, answers=split != "test"))
    return {"race": folder / "race", "csqa": folder / "csqa"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny checkpoint of each type."""
    folder = tmp_path_factory.mktemp("models")
    return {model_type: checkpoint(folder / model_type, model_type) for model_type in MODEL_TYPES}


def words_of(data: dict[str, Path], task: str, model: Any, output_dir: Path, **options: Any) -> list[str]:
    """Command line of a short run."""
    short = {"max_length": 40, "max_question_length": 16, "dataset_name": data[task]}
    return command(model, output_dir, **{**short, **options})


def run(data: dict[str, Path], task: str, model: Any, output_dir: Path, **options: Any) -> dict[str, Any]:
    """A short run in this process; the content of its results.json."""
    assert SCRIPTS[task].main(words_of(data, task, model, output_dir, **options)) == 0
    return json.loads((output_dir / "results.json").read_text())


@pytest.fixture(scope="module")
def race_run(data: dict[str, Path], models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("race") / "out"
    run(data, "race", models["luna"], folder, num_train_epochs=6)
    return folder


@pytest.fixture(scope="module")
def csqa_runs(data: dict[str, Path], models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models with one budget."""
    folder = tmp_path_factory.mktemp("csqa") / "out"
    run(data, "csqa", list(models.values()), folder, num_train_epochs=3)
    return folder


def guesses(folder: Path, task: Any, rows: Dataset) -> list[int]:
    """The answers of a finished folder, one question at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForMultipleChoice.from_pretrained(folder).eval()
    collator = task.collator(tokenizer, None)
    with torch.no_grad():
        batches = [collator([row]) for row in task.encode(rows, tokenizer, 40).rows]
        return [int(model(**{**batch, "labels": None}).logits.argmax()) for batch in batches]


def test_race_is_learnt_and_scored_by_level(data: dict[str, Path], race_run: Path) -> None:
    result = json.loads((race_run / "run.json").read_text())
    counts = {"validation": {"middle": 12, "high": 10}, "test": {"middle": 5, "high": 9}}
    assert list(result["scores"]) == ["validation", "test"]
    for split, scores in result["scores"].items():
        assert list(scores) == ["accuracy", "accuracy_middle", "accuracy_high"]
        right = sum(scores[f"accuracy_{level}"] * count for level, count in counts[split].items())
        assert right / sum(counts[split].values()) == pytest.approx(scores["accuracy"])
    assert result["scores"]["validation"]["accuracy"] > 0.7
    # Row by row: the file of predictions, the folder that was saved, and the scores say the same.
    arguments = finetune_race.RaceArguments(["x"], dataset_name=str(data["race"]), max_question_length=16)
    task = finetune_race.RaceTask(arguments)
    lines = [json.loads(line) for line in (race_run / "predictions" / "test.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == list(task.tests["test"]["id"])
    letters = [line["chosenAnswer"] for line in lines]
    assert letters == ["ABCD"[guess] for guess in guesses(race_run, task, task.tests["test"])]
    right = [letter == "ABCD"[label] for letter, label in zip(letters, task.tests["test"]["label"], strict=True)]
    assert sum(right[:5]) / 5 == pytest.approx(result["scores"]["test"]["accuracy_middle"])
    assert sum(right[5:]) / 9 == pytest.approx(result["scores"]["test"]["accuracy_high"])


def test_csqa_compares_models_and_predicts_the_test_split(data: dict[str, Path], csqa_runs: Path) -> None:
    summary = json.loads((csqa_runs / "results.json").read_text())
    assert [row["model"] for row in summary["models"]] == MODEL_TYPES
    assert [run["steps"] for run in summary["runs"]] == [18] * len(MODEL_TYPES)
    assert all(list(run["scores"]) == ["validation"] for run in summary["runs"])  # the test split has no answers
    for name in MODEL_TYPES:
        (folder,) = (csqa_runs / "runs" / name).iterdir()
        lines = [json.loads(line) for line in (folder / "predictions" / "test.jsonl").read_text().splitlines()]
        assert [line["id"] for line in lines] == [f"2-{index}" for index in range(11)]
        assert {line["chosenAnswer"] for line in lines} <= set("ABCDE")


def test_what_was_cut_is_printed_kept_and_in_the_card(
    data: dict[str, Path], models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    result = run(data, "race", models["luna"], tmp_path, max_length=14, max_question_length=7, max_steps=1)
    sentence = r"train: 56 rows, [\d,]+ tokens in all choices, the longest input 14 of at most 14; "
    sentence += r"question with option cut in \d+ \(.*\), which lost \d+ tokens; passage cut in \d+"
    assert re.search(sentence, capsys.readouterr().out)
    assert any(re.match(sentence, note) for note in result["runs"][0]["notes"])
    card = (tmp_path / "README.md").read_text()
    assert re.search(sentence, card) and "train: 24 middle, 32 high." in card


def test_a_short_model_needs_no_options(
    data: dict[str, Path], models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    sentence = "Of an input's 40 tokens question with option have at most 18, not 128: half of the room"
    words = command(models["luna"], tmp_path, dataset_name=data["race"], max_steps=1)
    place = words.index("--max_length")
    assert finetune_race.main(words[:place] + words[place + 2 :]) == 0
    assert sentence in capsys.readouterr().out and sentence in (tmp_path / "README.md").read_text()
    result = json.loads((tmp_path / "run.json").read_text())
    assert result["max_length"] == 40
    assert any(note.startswith(sentence) for note in result["notes"])
    assert any(" of at most 40; " in note for note in result["notes"])


def test_race_card_is_valid_and_its_example_runs(
    data: dict[str, Path], race_run: Path, capsys: pytest.CaptureFixture
) -> None:
    card = ModelCard.load(race_run / "README.md")
    names = {(result.dataset_split, result.metric_type) for result in card.data.eval_results}
    assert ("test", "accuracy_high") in names and ("validation", "accuracy") in names
    assert all(result.task_type == "multiple-choice" for result in card.data.eval_results)
    found = run_example(race_run)
    task = finetune_race.RaceTask(finetune_race.RaceArguments(["x"], dataset_name=str(data["race"])))
    row = {**RACE_ROW, "article": found["passage"], "question": found["question"], "options": found["options"]}
    check_example(found, task, finetune_race, row, capsys.readouterr().out)


def test_csqa_example_of_the_card_runs(data: dict[str, Path], csqa_runs: Path, capsys: pytest.CaptureFixture) -> None:
    task = finetune_csqa.CsqaTask(finetune_csqa.CsqaArguments(["x"], dataset_name=str(data["csqa"])))
    for name in MODEL_TYPES:
        (folder,) = (csqa_runs / "runs" / name).iterdir()
        found = run_example(folder)
        row = {**CSQA_ROW, "question": found["question"], "choices": {"label": list("ABCDE"), "text": found["options"]}}
        check_example(found, task, finetune_csqa, row, capsys.readouterr().out)


def run_example(folder: Path) -> dict[str, Any]:
    """Execute the Python of a card, with the folder in place of the name; its variables."""
    code = (folder / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    code, count = re.subn(r'name = "[^"]*"', f'name = "{folder}"', code)
    assert count == 1
    found: dict[str, Any] = {}
    exec(code, found)
    return found


def check_example(found: dict[str, Any], task: Any, script: Any, row: dict[str, Any], printed: str) -> None:
    """The example feeds what the script trained on, and prints one of the options."""
    assert printed.strip() in found["options"]
    questions = multiple_choice.read_questions(Dataset.from_list([row]), script.read_row, "here")
    layout = task.layout(found["tokenizer"])
    limits = Limits(found["tokenizer"].model_max_length, second=30)
    batch = ChoiceCollator(layout, found["tokenizer"])(
        rows_of(multiple_choice.encode(questions, found["tokenizer"], layout, limits))
    )
    for name in ("input_ids", "attention_mask"):
        assert torch.equal(found["inputs"][name], batch[name][0]), name


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["luna", "bert", "modernbert"])
def test_csqa_example_has_the_layout_of_every_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    layout = multiple_choice.pair_layout(tokenizer).as_one_text()
    parts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("Q: the fox", "A: a book")]
    assert tokenizer(f"Q: the fox{tokenizer.sep_token}A: a book")["input_ids"] == layout.join(*parts)[0]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_accumulation_equals_one_batch(
    model_type: str, data: dict[str, Path], models: dict[str, Path], tmp_path: Path
) -> None:
    # A head that is not new passes large gradients on.
    before = AutoModelForMultipleChoice.from_pretrained(models[model_type])
    randomise(before)
    before.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(models[model_type]).save_pretrained(tmp_path / "model")
    # Plain gradient descent: AdamW would hide a gradient that is four times too large.
    fixed = {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant", "warmup_steps": 0}
    fixed |= {"max_steps": 2, "max_grad_norm": 0, "weight_decay": 0}
    weights = []
    for name, size, steps in (("one", 8, 1), ("four", 2, 4)):
        more = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
        result = run(data, "race", tmp_path / "model", tmp_path / name, **fixed, **more)
        assert result["runs"][0]["batch_size"] == 8
        weights.append(load_file(tmp_path / name / "model.safetensors"))
    start = load_file(tmp_path / "model" / "model.safetensors")
    assert max((weights[0][name] - weight).abs().max() for name, weight in start.items()) > 1e-3
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, atol=2e-6, rtol=1e-5, msg=name)


# --- recipes ---


@pytest.mark.parametrize("recipe_file", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_recipe_is_commented_and_runs(
    recipe_file: Path, data: dict[str, Path], models: dict[str, Path], tmp_path: Path
) -> None:
    lines = recipe_file.read_text().splitlines()
    assert all("#" in line for line in lines if line.strip())
    for word in ("command", "hardware", "wall time", "expect"):
        assert any(line.startswith(f"#   {word}") for line in lines), word
    task = recipe_file.parent.name.partition("_")[2]
    recipe = yaml.safe_load(recipe_file.read_text())
    sweep = ["--sweep_batch_sizes", "8", "--sweep_learning_rates", "1e-3"] if recipe.get("sweep") else []
    shrunk = words_of(data, task, models["luna"], tmp_path, max_steps=1, max_train_samples=16, max_eval_samples=8)
    assert SCRIPTS[task].main([str(recipe_file), *shrunk, *sweep]) == 0
    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert [run["dropout"] for run in runs] == (recipe["sweep_dropouts"] if sweep else [recipe["dropout"]] * len(runs))


def test_paper_recipes_and_defaults_are_the_papers() -> None:
    for task, script in SCRIPTS.items():
        assert getattr(script, f"{task.capitalize()}Task").limits(512, 4, None).note.count(" 128 ") == 1
        paper = ROOT / "training" / "recipes" / f"finetune_{task}" / "paper.yaml"
        own = {"race": "RaceArguments", "csqa": "CsqaArguments"}[task]
        words = ["--model_name_or_path", "x", "--output_dir", "y"]
        for line, length in (([str(paper), *words], 128), (words, None)):
            arguments, training = finetuning.parse(
                getattr(script, own), line, "", multiple_choice.ChoiceTrainingArguments
            )
            assert arguments.sweep_batch_sizes == [16, 32]
            assert arguments.sweep_learning_rates == [1e-5, 2e-5, 3e-5]
            assert arguments.sweep_dropouts == [0.0, 0.1, 0.2]
            assert arguments.max_question_length == length
            assert (training.adam_beta1, training.adam_beta2, training.adam_epsilon) == (0.9, 0.98, 1e-6)
            assert (training.weight_decay, training.warmup_steps, training.lr_scheduler_type) == (0.01, 0.06, "linear")


# --- what is refused before training ---


def refused(capsys: pytest.CaptureFixture, task: str, words: list[str]) -> str:
    """The message of a run that does not begin."""
    capsys.readouterr()
    assert SCRIPTS[task].main(words) == 2
    message = capsys.readouterr().err.splitlines()[-1]  # bars of progress stand before it
    assert message.startswith("error: ")
    return message


def changed(data: dict[str, Path], task: str, folder: Path, change: Any, split: str = "train") -> dict[str, Path]:
    """The data set in a new folder, with the rows of a split as `change` makes them (no rows: no file)."""
    rows = {
        name: (race_rows(8, "middle", 0) if task == "race" else csqa_rows(8, 0)) for name in ("train", "validation")
    }
    rows[split] = change(rows[split])
    for name, content in rows.items():
        if content:
            write_split(folder / f"{name}.parquet", content)
    return {task: folder}


def without(column: str) -> Any:
    return lambda rows: [{name: value for name, value in row.items() if name != column} for row in rows]


def with_values(**values: Any) -> Any:
    return lambda rows: [{**row, **values} for row in rows]


@pytest.mark.parametrize(
    "task, split, change, message",
    [
        ("race", "train", without("options"), r"train has no column `options`"),
        ("csqa", "validation", without("answerKey"), r"validation has no column `answerKey`"),
        ("race", "train", with_values(answer=2), r"train, row 0: `answer` is 2 \(int\), but must be one of 'A'"),
        ("csqa", "train", with_values(answerKey=1.0), r"row 0: `answerKey` is 1.0 \(float\)"),
        ("race", "validation", with_values(answer="F"), r"validation, row 0: `answer` is 'F'"),
        ("race", "train", with_values(answer=""), r"The split `train` of RACE has no answers"),
        ("csqa", "validation", with_values(answerKey=""), r"The split `validation` of CommonsenseQA has no answers"),
        ("race", "validation", lambda rows: [], r"RACE has no split `validation` here; there is train"),
        ("csqa", "train", lambda rows: [], r"CommonsenseQA has no split `train` here; there is validation"),
    ],
)
def test_bad_data_are_refused(
    task: str, split: str, change: Any, message: str, data: Any, models: Any, tmp_path: Path, capsys: Any
) -> None:
    bad = changed(data, task, tmp_path / "data", change, split)
    assert re.search(message, refused(capsys, task, words_of(bad, task, models["luna"], tmp_path / "out")))


@pytest.mark.parametrize("task", SCRIPTS)
def test_an_empty_split_is_refused(task: str, data: Any, models: Any, tmp_path: Path, capsys: Any) -> None:
    bad = changed(data, task, tmp_path / "data", lambda rows: rows)
    table = Dataset.from_parquet(str(tmp_path / "data" / "train.parquet")).select([])
    table.to_parquet(str(tmp_path / "data" / "train.parquet"))
    assert "is empty" in refused(capsys, task, words_of(bad, task, models["luna"], tmp_path / "out"))


def test_missing_folders_and_levels_are_refused(data: Any, models: Any, tmp_path: Path, capsys: Any) -> None:
    luna, out = models["luna"], tmp_path / "out"
    for task in SCRIPTS:
        message = refused(capsys, task, words_of({task: tmp_path / "none"}, task, luna, out))
        assert "There is no data set" in message
    write_split(tmp_path / "half" / "high" / "train.parquet", race_rows(4, "high", 0))
    message = refused(capsys, "race", words_of({"race": tmp_path / "half"}, "race", luna, out))
    assert "has no folder `middle`. For one level alone give --dataset_config high" in message
    message = refused(capsys, "race", words_of(data, "race", luna, out, dataset_config="hihg"))
    assert "--dataset_config is 'hihg'. Did you mean `high`?" in message


@pytest.mark.parametrize("task", SCRIPTS)
def test_bad_options_models_and_folders_are_refused(
    task: str, data: Any, models: Any, tmp_path: Path, capsys: Any
) -> None:
    luna, out = models["luna"], tmp_path / "out"
    message = refused(capsys, task, words_of(data, task, luna, out, max_question_lenght=5))
    assert "Unknown option --max_question_lenght. Did you mean `max_question_length`?" in message
    message = refused(capsys, task, words_of(data, task, luna, out, max_question_length=1))
    assert "--max_question_length is 1, but must be at least 2" in message
    GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=40)).save_pretrained(tmp_path / "gpt2")
    message = refused(capsys, task, words_of(data, task, tmp_path / "gpt2", out))
    assert "is a gpt2 checkpoint" in message
    (tmp_path / "file").write_text("")
    message = refused(capsys, task, words_of(data, task, luna, tmp_path / "file" / "out"))
    assert "cannot be written to" in message
    assert not out.exists() or not list(out.glob("*.safetensors"))


def test_a_question_limit_that_leaves_no_passage_is_refused_before_the_data_are_read(
    models: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    read = []
    monkeypatch.setattr(finetune_race, "load_race", lambda *words: read.append(words))
    words = words_of({"race": tmp_path}, "race", models["luna"], tmp_path / "out", max_question_length=128)
    message = refused(capsys, "race", words)
    assert "Inputs of 40 tokens have no room for 128 tokens" in message and "--max_question_length" in message
    assert not read


@pytest.mark.parametrize("task", SCRIPTS)
def test_an_interrupted_run_continues_and_a_truncated_checkpoint_is_refused(
    task: str, data: Any, models: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    out = tmp_path / "out"
    words = words_of(data, task, models["luna"], out, num_train_epochs=1)

    def interrupted(*arguments: Any, **keywords: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(finetuning, "evaluate", interrupted)
        assert SCRIPTS[task].main(words) == 130
    (saved,) = out.glob("checkpoint-*")
    whole = (saved / "optimizer.pt").read_bytes()
    (saved / "optimizer.pt").write_bytes(whole[:-100])
    message = refused(capsys, task, [*words, "--resume_from_checkpoint", str(saved)])
    assert "optimizer.pt is cut off" in message
    (saved / "optimizer.pt").write_bytes(whole)
    assert SCRIPTS[task].main(words) == 0
    assert f"Continuing from {saved.name}." in capsys.readouterr().out
    assert json.loads((out / "run.json").read_text())["resumed_from_step"] > 0
