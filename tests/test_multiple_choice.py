"""Multiple choice: texts to batches, what is cut, RACE and CommonsenseQA end to end on small synthetic rows."""

import sys
from typing import Any

import pytest
import torch
from datasets import Dataset
from helpers import ROOT, tiny_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import BertTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

sys.path.insert(0, str(ROOT / "training"))  # the scripts import their siblings plainly

import finetune_csqa
import finetune_race
import multiple_choice
from multiple_choice import ChoiceCollator, Layout, Limits
from recipe import UserError

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
    return list(multiple_choice.for_trainer(data, ("first", "second")).rows)


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


def test_race_input_is_passage_then_question_with_option() -> None:
    tokenizer = tiny_tokenizer()
    layout = multiple_choice.pair_layout(tokenizer)
    data = encoded([RACE_ROW], finetune_race, tokenizer, layout, Limits(200, 100))
    batch = ChoiceCollator(layout, tokenizer)(rows_of(data))
    passage = "the fox reads every book in a house of glass"
    for index, option in enumerate(RACE_ROW["options"]):
        wanted = tokenizer(passage, f"the fox reads in {option} .")["input_ids"]
        real = batch["attention_mask"][0, index] == 1
        assert batch["input_ids"][0, index][real].tolist() == wanted
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
    made = multiple_choice.for_trainer(data, ("passage", "question"))
    assert made.cut_by_part == {"passage": {"rows": 1, "tokens": 5 + 6}, "question": {"rows": 1, "tokens": 1}}
    assert (made.cut_rows, made.cut_tokens, made.longest, made.tokens) == (1, 12, 16, 6 + 6 + 16 + 16)
    assert made.report("train", 16) == (
        "train: 2 rows, 44 tokens in all choices, the longest input 16 of 16; "
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


def test_answers_of_another_type_are_named() -> None:
    dataset = Dataset.from_list([{**RACE_ROW, "answer": 2}])
    with pytest.raises(UserError, match=r"row 0: `answer` is 2 \(int\), but must be one of 'A'"):
        multiple_choice.read_questions(dataset, finetune_race.read_row, "here")
