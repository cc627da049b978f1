r"""Finetune an encoder on RACE (Lai et al. 2017): English examinations, four choices per question, two levels.

    python training/finetune_race.py training/recipes/finetune_race/paper.yaml \
        --model_name_or_path MODEL [MODEL ...] --dataset_name FOLDER --output_dir outputs/race

A choice is encoded as

    <s> question with option </s></s> passage </s>

or, by tokenizers with BERT's layout, as `[CLS] question with option [SEP] passage [SEP]`. The option fills every blank
(`_`) of the question, or follows it if there is none, as RoBERTa's authors did it (fairseq,
`examples/roberta/preprocess_RACE.py`); consecutive underscores are one blank here. The papers do not specify the order
of the parts: this one is that of fairseq's `sentence_ranking` task, with which RoBERTa was finetuned on RACE and on
which the code of Luna's authors is built.

Question with option are cut to `--max_question_length` tokens, then the passage so that both fit into `--max_length`
(default: 512, or what the model takes if that is less). The default of `--max_question_length` is 128, but at most half
of what the special tokens leave of an input: 62 for a model of 128 positions with RoBERTa's tokenizer. `--dataset_name`
is `ehovy/race` or a folder with the subfolders `middle` and `high`; `--dataset_config` chooses one level.
"""

import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset, concatenate_datasets
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

COLUMNS = ("example_id", "article", "question", "options", "answer")
LEVELS = ("middle", "high")
EXAMPLE = """passage = "Tom has a cat and a dog. The cat sleeps all day, and the dog plays with him."
question = "Tom plays with _ ."
options = ["the cat", "the dog", "nobody", "his sister"]
# The option fills the blank, or follows a question that has none.
texts = [question.replace("_", option) if "_" in question else f"{question} {option}" for option in options]
inputs = tokenizer(texts, [passage] * len(texts), truncation="only_second", padding=True, return_tensors="pt")"""


def fill_in(text: str, option: str) -> str:
    """The question with the option in its blanks, or followed by the option if it has none."""
    return re.sub("_+", lambda _: option, text) if "_" in text else f"{text} {option}"


def read_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row of RACE as a `question`.

    Raises:
        ValueError: A value has another type, the id has no level, or the answer is not one of the options.
    """
    level = next((level for level in LEVELS if str(row["example_id"]).startswith(level)), None)
    if level is None:
        raise ValueError(f"example_id {row['example_id']!r} does not begin with middle or high")
    text = clean(row["question"])
    return question(
        id=row["example_id"],
        group=level,
        shared=clean(row["article"]),
        choices=[fill_in(text, clean(option)) for option in row["options"]],
        letters=[chr(ord("A") + index) for index in range(len(row["options"]))],
        answer=row["answer"],
    )


@dataclass
class RaceArguments(ChoiceArguments):
    """Options of this command."""

    dataset_name: str = option(
        "ehovy/race", "Hub name, or a local folder with `middle` and `high`, each with a file per split."
    )
    dataset_config: Literal["all", "middle", "high"] = option("all", "Level of the examinations: all, middle or high.")


class RaceTask(ChoiceTask):
    """RACE: the passage gives way to question and option; accuracy of both levels and of each."""

    name = "race"
    title = "RACE"
    dataset = "RACE (Lai et al. 2017), for non-commercial research only"
    example = EXAMPLE

    def load(self, name: str, config: str) -> dict[str, Dataset]:
        """The splits of one level, or of both (`all`)."""
        levels = LEVELS if config == "all" else (config,)
        local = [level for level in LEVELS if (Path(name) / level).is_dir()]
        if local and (missing := set(levels) - set(local)):
            raise UserError(f"{name} has no folder {missing.pop()}. For one level set --dataset_config {local[0]}.")
        questions: dict[str, list[Dataset]] = {}
        for level in levels if local else (config,):
            for split, rows in load_splits(name, level).items():
                source = f"{name}/{level if local else ''}, {split}"
                questions.setdefault(split, []).append(read_questions(rows, COLUMNS, read_row, source))
        for split, parts in questions.items():
            counts = Counter(level for part in parts for level in part["group"])
            self.notes.append(f"{split}: {', '.join(f'{count:,} {level}' for level, count in counts.items())}.")
        return {split: concatenate_datasets(parts) for split, parts in questions.items()}

    def question_length(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> int:
        """`--max_question_length`, or 128, but at most half of the room; the passage has the rest."""
        room = max_length - tokenizer.num_special_tokens_to_add(pair=True)
        length = self.max_question_length or min(QUESTION_LENGTH, room // 2)
        if not 0 < length < room:
            raise UserError(
                f"Inputs of {max_length} tokens have no room for a passage beside --max_question_length {length}. "
                "Raise --max_length or lower --max_question_length."
            )
        return length

    def tokenize(
        self, shared: list[str], choices: list[str], tokenizer: PreTrainedTokenizerBase, max_length: int
    ) -> dict[str, list[Any]]:
        """Pairs of question with option, and passage."""
        length = self.question_length(tokenizer, max_length)
        choices, lost = cut(tokenizer, choices, [length] * len(choices))
        options = {"split_special_tokens": True, "return_attention_mask": False}  # the collator makes the masks
        return tokenize(
            tokenizer, choices, shared, max_length=max_length, truncation="only_second", lost=lost, **options
        )


COMMAND = Command("finetune_race", __doc__, RaceTask, RaceArguments, ChoiceTrainingArguments)
main, parse = COMMAND.main, COMMAND.parse

if __name__ == "__main__":
    sys.exit(main())
