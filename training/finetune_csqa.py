"""Finetune an encoder on CommonsenseQA (Talmor et al. 2019): five choices a question, without a passage.

    python training/finetune_csqa.py training/recipes/finetune_csqa/paper.yaml \
        --model_name_or_path MODEL [MODEL ...] --dataset_name FOLDER --output_dir outputs/csqa

A choice is read as

    <s> Q: question </s> A: option </s>

with one separator and not the two of RoBERTa's pairs, as RoBERTa's authors did (fairseq,
`examples/roberta/commonsense_qa`); by tokenizers in BERT's layout as `[CLS] Q: question [SEP] A: option [SEP]`, all in
segment 0. The column `question_concept`, from which annotators wrote the question, is not read.

Question and option together are cut to 128 tokens: the question gives way, and an option of more than half of them.
The data set's test split has no answers: those of the model are written to `predictions/test.jsonl`, in the form of the
leaderboard.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from finetune_data import load_splits, require_columns
from finetuning import run_script
from multiple_choice import (
    ChoiceArguments,
    ChoiceTask,
    ChoiceTrainingArguments,
    Layout,
    Limits,
    Question,
    answer_index,
    as_choices,
    as_text,
    pair_layout,
    read_questions,
)
from recipe import UserError
from transformers import PreTrainedTokenizerBase

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

    def __init__(self, arguments: CsqaArguments) -> None:
        super().__init__(load_csqa(arguments.dataset_name, arguments.dataset_config), arguments.max_question_length)
        if not Path(arguments.dataset_name).exists():
            self.dataset_name, self.dataset_config = arguments.dataset_name, arguments.dataset_config

    def layout(self, tokenizer: PreTrainedTokenizerBase) -> Layout:
        """A single separator."""
        return pair_layout(tokenizer).as_one_text()

    def limits(self, max_length: int, layout: Layout) -> Limits:
        """Question and option share the script's limit, or what the model takes."""
        whole = min(max_length, self.max_question_length + layout.specials)
        return Limits(whole, second=(whole - layout.specials) // 2)

    def usage(self, name: str, trust: str) -> str:
        """Python for the model card."""
        return f'''import torch
from transformers import AutoModelForMultipleChoice, AutoTokenizer

name = "{name}"  # the name of this repository on the Hub, or the folder that holds this card
tokenizer = AutoTokenizer.from_pretrained(name{trust})
model = AutoModelForMultipleChoice.from_pretrained(name{trust}).eval()
question = "Where does a fox sleep?"
options = ["hen house", "den", "office", "river", "sky"]
texts = [f"Q: {{question}}{{tokenizer.sep_token}}A: {{option}}" for option in options]
inputs = tokenizer(texts, truncation=True, padding=True, return_tensors="pt")
with torch.no_grad():
    logits = model(**{{key: value.unsqueeze(0) for key, value in inputs.items()}}).logits[0]  # one score an option
print(options[logits.argmax()])'''


def main(words: list[str] | None = None) -> int:
    """The script: 0 if all is well, 2 after an error that the user can mend."""
    return run_script(
        CsqaArguments,
        lambda arguments, training: CsqaTask(arguments),
        __doc__,
        words,
        training_class=ChoiceTrainingArguments,
    )


if __name__ == "__main__":
    sys.exit(main())
