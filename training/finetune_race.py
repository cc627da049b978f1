"""Finetune an encoder on RACE (Lai et al. 2017): English examinations, four choices a question, two levels.

A choice is read as

    <s> passage </s></s> question with option </s>

and, by tokenizers in BERT's layout, as `[CLS] passage [SEP] question with option [SEP]`. A question that has a blank
(`_`) is read with the option in every blank; any other is followed by a space and the option. So RoBERTa's authors
prepared the questions (fairseq, `examples/roberta/preprocess_RACE.py`); underscores in a row are one blank here.
Neither paper says which part comes first. Here it is the passage; fairseq's script for RACE puts the question there.
"""

import re
from collections.abc import Mapping
from typing import Any

from multiple_choice import Question, answer_index, as_choices, as_text
from recipe import UserError

COLUMNS = ("example_id", "article", "question", "options", "answer")
LEVELS = ("middle", "high")
_BLANK = re.compile(r"_+")


def fill_in(question: str, option: str) -> str:
    """The question with the option in its blanks, or in front of the option if it has none."""
    if "_" in question:
        return _BLANK.sub(lambda _: option, question)
    return f"{question} {option}"


def level_of(example_id: Any, where: str) -> str:
    """`middle` or `high`, with which every id of RACE begins.

    Raises:
        UserError: It begins otherwise.
    """
    for level in LEVELS:
        if str(example_id).startswith(level):
            return level
    raise UserError(f"{where}: `example_id` is {example_id!r}, but must begin with middle or high, as middle12.txt.")


def read_row(row: Mapping[str, Any], where: str) -> Question:
    """A row of RACE; see `COLUMNS`.

    Raises:
        UserError: A value has another type, or the answer is not one of the options.
    """
    level = level_of(row["example_id"], where)
    options = as_choices(row["options"], "options", where)
    letters = [chr(ord("A") + index) for index in range(len(options))]
    question = as_text(row["question"], "question", where)
    return Question(
        id=row["example_id"],
        group=level,
        first=as_text(row["article"], "article", where),
        seconds=[fill_in(question, option) for option in options],
        letters=letters,
        label=answer_index(row["answer"], letters, "answer", where),
    )
