"""Finetune an encoder on CommonsenseQA (Talmor et al. 2019): five choices a question, without a passage.

    python training/finetune_csqa.py training/recipes/finetune_csqa/paper.yaml \
        --model_name_or_path MODEL [MODEL ...] --dataset_name FOLDER --output_dir outputs/csqa

A choice is read as

    <s> Q: question </s> A: option </s>

with one separator and not the two of RoBERTa's pairs, as RoBERTa's authors did (fairseq,
`examples/roberta/commonsense_qa`); by tokenizers in BERT's layout as `[CLS] Q: question [SEP] A: option [SEP]`, all in
segment 0. The column `question_concept`, from which annotators wrote the question, is not read.

Question and option together are cut to `--max_question_length` tokens (128, or what the model or `--max_length` takes,
if that is less): the question gives way, and an option of more than half of them.
The data set's test split has no answers: those of the model are written to `predictions/test.jsonl`, in the form of the
leaderboard.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from tasks.files import load_splits, require_columns
from tasks.multiple_choice import (
    QUESTION_LENGTH,
    ChoiceArguments,
    ChoiceTask,
    Layout,
    Limits,
    Question,
    answer_index,
    as_choices,
    as_text,
    pair_layout,
    read_questions,
    run_choice_script,
)
from transformers import PreTrainedTokenizerBase

from luna_hf.scripting import UserError

COLUMNS = ("id", "question", "choices", "answerKey")
EXAMPLE = """question = "Where does a fox sleep?"
options = ["hen house", "den", "office", "river", "sky"]
texts = [f"Q: {question}{tokenizer.sep_token}A: {option}" for option in options]
inputs = tokenizer(texts, truncation=True, padding=True, return_tensors="pt")"""


def read_row(row: Mapping[str, Any], where: str) -> Question:
    """A row of CommonsenseQA; see `COLUMNS`.

    Raises:
        UserError: A value has another type, or the answer is not one of the choices.
    """
    choices = row["choices"]
    if not isinstance(choices, Mapping) or not {"label", "text"} <= set(choices):
        raise UserError(f"{where}: `choices` is {choices!r}, but must have `label` and `text`.")
    letters = as_choices(choices["label"], "choices.label", where)
    options = as_choices(choices["text"], "choices.text", where)
    if len(letters) != len(options) or len(set(letters)) != len(letters):
        raise UserError(f"{where}: `choices` has labels {letters} for {len(options)} texts; each text needs its own.")
    return Question(
        id=as_text(row["id"], "id", where),
        group="",
        first="Q: " + as_text(row["question"], "question", where),
        seconds=["A: " + option for option in options],
        letters=letters,
        label=answer_index(row["answerKey"], letters, "answerKey", where),
    )


def load_csqa(name: str, config: str | None) -> dict[str, Dataset]:
    """The splits as questions.

    Raises:
        UserError: Nothing to be found, a missing column, an empty split, a row that is not as it should be.
    """
    questions = {}
    for split, rows in load_splits(name, config).items():
        where = f"{name}, {split}"
        require_columns(rows, COLUMNS, where)
        questions[split] = read_questions(rows, read_row, where)
    return questions


@dataclass
class CsqaArguments(ChoiceArguments):
    """Options of this script."""

    dataset_name: str = field(
        default="tau/commonsense_qa", metadata={"help": "Hub name, or a local folder with a file for each split."}
    )


class CsqaTask(ChoiceTask):
    """CommonsenseQA: question and option are one text with a separator in it."""

    name = "csqa"
    title = "CommonsenseQA"
    dataset = "CommonsenseQA (Talmor et al. 2019)"
    parts = ("question", "option")
    example = EXAMPLE

    @staticmethod
    def load(name: str, config: str | None) -> dict[str, Dataset]:
        """All splits."""
        return load_csqa(name, config)

    @staticmethod
    def layout(tokenizer: PreTrainedTokenizerBase) -> Layout:
        """A single separator."""
        return pair_layout(tokenizer).as_one_text()

    @staticmethod
    def limits(max_length: int, specials: int, asked: int | None) -> Limits:
        """Question and option share what is asked for, or 128 tokens, or the room that there is if that is less."""
        wanted = asked or QUESTION_LENGTH
        shared = min(wanted, max_length - specials)
        why = f", not {wanted:,}: more has no room" if shared < wanted else ""
        note = f"Question and option together have at most {shared:,} tokens{why} (--max_question_length)."
        return Limits(shared + specials, second=shared // 2, note=note)


def main(words: list[str] | None = None) -> int:
    """The script: 0 if all is well, 2 after an error that the user can mend."""
    return run_choice_script(CsqaArguments, CsqaTask, __doc__, words)


if __name__ == "__main__":
    sys.exit(main())
