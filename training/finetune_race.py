"""Finetune an encoder on RACE (Lai et al. 2017): English examinations, four choices a question, two levels.

    python training/finetune_race.py training/recipes/finetune_race/paper.yaml \
        --model_name_or_path MODEL [MODEL ...] --dataset_name FOLDER --output_dir outputs/race

A choice is read as

    <s> question with option </s></s> passage </s>

and, by tokenizers in BERT's layout, as `[CLS] question with option [SEP] passage [SEP]`. A question that has a blank
(`_`) is read with the option in every blank; any other is followed by a space and the option. So RoBERTa's authors
prepared the questions (fairseq, `examples/roberta/preprocess_RACE.py`); underscores in a row are one blank here. The
papers do not say which part comes first: the order is that of fairseq's `sentence_ranking` task, with which RoBERTa was
finetuned on RACE and on which the code of Luna's authors is built.

Question with option are cut to `--max_question_length` tokens, then the passage so that all fit into `--max_length`
(512, or what the model takes, if that is less). If it is not given, `--max_question_length` is 128, but at most half of
what the special tokens leave of an input: 62 for a model of 128 positions with RoBERTa's tokenizer. `--dataset_name` is
`ehovy/race` or a folder with the subfolders `middle` and `high`; `--dataset_config` chooses one level.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.options import did_you_mean
from datasets import Dataset, concatenate_datasets
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

COLUMNS = ("example_id", "article", "question", "options", "answer")
LEVELS = ("middle", "high")
EXAMPLE = """passage = "Tom has a cat and a dog. The cat sleeps all day, and the dog plays with him."
question = "Tom plays with _ ."
options = ["the cat", "the dog", "nobody", "his sister"]
# The option stands in the blank, or after a question that has none.
texts = [question.replace("_", option) if "_" in question else f"{question} {option}" for option in options]
inputs = tokenizer(texts, [passage] * len(texts), truncation="only_second", padding=True, return_tensors="pt")"""
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


def load_race(name: str, config: str) -> dict[str, Dataset]:
    """The splits of one level, or of both (`all`), as questions.

    Args:
        name: Hub name; or a folder with `middle` and `high`, each with a file for each split; or one with such files.
        config: `all`, `middle` or `high`.

    Raises:
        UserError: An unknown level, nothing to be found, a missing column, an empty split, a row that is not as it
            should be.
    """
    if config not in ("all", *LEVELS):
        raise UserError(f"--dataset_config is {config!r}.{did_you_mean(config, ('all', *LEVELS))}")
    levels = LEVELS if config == "all" else (config,)
    local = [level for level in LEVELS if (Path(name) / level).is_dir()]
    if local:
        for level in levels:
            if level not in local:
                raise UserError(
                    f"{name} has no folder `{level}`. For one level alone give --dataset_config {local[0]}."
                )
        loaded = [(f"{name}/{level}", load_splits(name, level)) for level in levels]
    else:
        loaded = [(name, load_splits(name, config))]
    questions: dict[str, list[Dataset]] = {}
    for source, splits in loaded:
        for split, rows in splits.items():
            where = f"{source}, {split}"
            require_columns(rows, COLUMNS, where)
            questions.setdefault(split, []).append(read_questions(rows, read_row, where))
    return {split: concatenate_datasets(parts) for split, parts in questions.items()}


@dataclass
class RaceArguments(ChoiceArguments):
    """Options of this script."""

    dataset_name: str = field(
        default="ehovy/race",
        metadata={"help": "Hub name, or a local folder with `middle` and `high`, each with a file for each split."},
    )
    dataset_config: str = field(default="all", metadata={"help": "all, middle or high."})


class RaceTask(ChoiceTask):
    """RACE: the passage gives way to question and option; accuracy of both levels and of each."""

    name = "race"
    title = "RACE"
    dataset = "RACE (Lai et al. 2017), for non-commercial research only"
    parts = ("passage", "question with option")
    example = EXAMPLE

    def __init__(self, arguments: RaceArguments) -> None:
        super().__init__(arguments)
        for split, rows in {"train": self.train, **self.evaluation, **self.tests}.items():
            levels = list(rows["group"])
            counts = [f"{levels.count(level):,} {level}" for level in LEVELS if level in levels]
            self.notes.append(f"{split}: {', '.join(counts)}.")

    @staticmethod
    def load(name: str, config: str) -> dict[str, Dataset]:
        """One level or both."""
        return load_race(name, config)

    @staticmethod
    def layout(tokenizer: PreTrainedTokenizerBase) -> Layout:
        """A pair with question and option in front."""
        return pair_layout(tokenizer).with_second_in_front()

    @staticmethod
    def limits(max_length: int, specials: int, asked: int | None) -> Limits:
        """Question with option: what is asked for, or 128, but at most half of the room; the passage has the rest."""
        half = (max_length - specials) // 2
        second = min(QUESTION_LENGTH, half) if asked is None else asked
        why = f", not {QUESTION_LENGTH}: half of the room" if asked is None and second < QUESTION_LENGTH else ""
        note = f"Of an input's {max_length:,} tokens question with option have at most {second:,}{why}"
        return Limits(max_length, second, f"{note} (--max_question_length).")


def main(words: list[str] | None = None) -> int:
    """The script: 0 if all is well, 2 after an error that the user can mend."""
    return run_choice_script(RaceArguments, RaceTask, __doc__, words)


if __name__ == "__main__":
    sys.exit(main())
