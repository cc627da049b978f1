r"""Finetune an encoder on CommonsenseQA (Talmor et al. 2019): five choices per question, without a passage.

    python training/finetune_csqa.py training/recipes/finetune_csqa/paper.yaml \
        --model_name_or_path MODEL [MODEL ...] --dataset_name FOLDER --output_dir outputs/csqa

A choice is encoded as

    <s> Q: question </s> A: option </s>

with one separator and not the two of RoBERTa's pairs, as RoBERTa's authors did it (fairseq,
`examples/roberta/commonsense_qa`); by tokenizers with BERT's layout as `[CLS] Q: question [SEP] A: option [SEP]`, all
in segment 0. The column `question_concept`, from which annotators wrote the question, is not used.

Question and option together are cut to `--max_question_length` tokens (default: 128, or what the model or
`--max_length` takes if that is less): the question gives way, and an option only if it exceeds all of them. The data
set's test split has no answers: the model's are written to `predictions/test.jsonl`, in the form of the leaderboard.
"""

import sys
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from tasks.arguments import option
from tasks.files import load_splits, tokenize
from tasks.multiple_choice import (
    QUESTION_LENGTH,
    ChoiceArguments,
    ChoiceTask,
    ChoiceTrainingArguments,
    clean,
    cut,
    question,
    read_questions,
)
from tasks.runs import Command
from transformers import PreTrainedTokenizerBase

from luna_hf.scripting import UserError

COLUMNS = ("id", "question", "choices", "answerKey")
EXAMPLE = """question = "Where does a fox sleep?"
options = ["hen house", "den", "office", "river", "sky"]
texts = [f"Q: {question}{tokenizer.sep_token}A: {option}" for option in options]
inputs = tokenizer(texts, truncation=True, padding=True, return_tensors="pt")"""


def read_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row of CommonsenseQA as a `question`.

    Raises:
        KeyError, TypeError, ValueError: A value has another type, or the answer is not one of the choices.
    """
    return question(
        id=row["id"],
        group="",
        shared="Q: " + clean(row["question"]),
        choices=["A: " + clean(option) for option in row["choices"]["text"]],
        letters=row["choices"]["label"],
        answer=row["answerKey"],
    )


@dataclass
class CsqaArguments(ChoiceArguments):
    """Options of this command."""

    dataset_name: str = option("tau/commonsense_qa", "Hub name, or a local folder with a file per split.")


class CsqaTask(ChoiceTask):
    """CommonsenseQA: question and option are one text with a separator in it."""

    name = "csqa"
    title = "CommonsenseQA"
    dataset = "CommonsenseQA (Talmor et al. 2019)"
    example = EXAMPLE

    def load(self, name: str, config: str | None) -> dict[str, Dataset]:
        """All splits."""
        splits = load_splits(name, config)
        return {split: read_questions(rows, COLUMNS, read_row, f"{name}, {split}") for split, rows in splits.items()}

    def question_length(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> int:
        """`--max_question_length`, or 128, or the room if that is less."""
        if tokenizer.sep_token is None:
            raise UserError(f"{type(tokenizer).__name__} has no separator token, which CommonsenseQA needs.")
        room = max_length - tokenizer.num_special_tokens_to_add() - 1
        return min(self.max_question_length or QUESTION_LENGTH, room)

    def tokenize(
        self, shared: list[str], choices: list[str], tokenizer: PreTrainedTokenizerBase, max_length: int
    ) -> dict[str, list[Any]]:
        """One text per choice."""
        length = self.question_length(tokenizer, max_length)
        options = tokenizer(choices, add_special_tokens=False, verbose=False)["input_ids"]
        shared, lost = cut(tokenizer, shared, [length - len(ids) for ids in options])
        texts = [f"{text}{tokenizer.sep_token}{choice}" for text, choice in zip(shared, choices, strict=True)]
        whole = length + tokenizer.num_special_tokens_to_add() + 1
        options = {"truncation": "longest_first", "return_attention_mask": False}  # the collator makes the masks
        return tokenize(tokenizer, texts, max_length=whole, lost=lost, **options)


COMMAND = Command("finetune_csqa", __doc__, CsqaTask, CsqaArguments, ChoiceTrainingArguments)
main, parse = COMMAND.main, COMMAND.parse

if __name__ == "__main__":
    sys.exit(main())
