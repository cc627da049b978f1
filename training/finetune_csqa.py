"""Finetune an encoder on CommonsenseQA (Talmor et al. 2019): five choices a question, without a passage.

A choice is read as

    <s> Q: question </s> A: option </s>

with one separator and not the two of RoBERTa's pairs, as RoBERTa's authors did (fairseq,
`examples/roberta/commonsense_qa`); by tokenizers in BERT's layout as `[CLS] Q: question [SEP] A: option [SEP]`. The
column `question_concept`, from which annotators wrote the question, is not read.
"""

from collections.abc import Mapping
from typing import Any

from multiple_choice import Question, answer_index, as_choices, as_text
from recipe import UserError

COLUMNS = ("id", "question", "choices", "answerKey")


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
