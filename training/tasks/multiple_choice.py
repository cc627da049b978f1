"""Questions with choices to batches and scores: what finetuning on RACE and CommonsenseQA shares.

Every choice becomes one input: a text that differs per choice, and a text that the choices share. The model gives one
score per input, and a softmax over the choices of a question is trained (Luna, section 4.3; Liu et al. 2019, RoBERTa,
section 5.3). The tokenizer joins and truncates, transformers' collator pads, and every cut is counted.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import evaluate
import numpy as np
from datasets import Dataset, Features, List, Value
from torch import Tensor
from transformers import AutoModelForMultipleChoice, DataCollatorForMultipleChoice, PreTrainedTokenizerBase

from luna_hf.scripting import UserError
from tasks.arguments import FinetuneArguments, FinetuneTrainingArguments, option
from tasks.files import Encoded, encode_rows, require_columns
from tasks.task import METRICS, Task

UNKNOWN = -100  # label of a question without an answer; the loss ignores it
QUESTION_LENGTH = 128  # default of --max_question_length for models that have room
_TEXT, _TEXTS = Value("string"), List(Value("string"))
# `group` names a part of the data that gets a separate score, or is empty.
QUESTION = Features(
    {"id": _TEXT, "group": _TEXT, "shared": _TEXT, "choices": _TEXTS, "letters": _TEXTS, "label": Value("int64")}
)


@dataclass
class ChoiceArguments(FinetuneArguments):
    """Options of the commands for multiple choice; the defaults are the Luna paper's (section 4.3)."""

    max_question_length: int | None = option(
        None,
        "Longest question with option in tokens, without special tokens; longer ones are cut. By default "
        f"{QUESTION_LENGTH}, or less for short inputs: half of their room where a passage follows.",
    )
    sweep_learning_rates: list[float] = option([1e-5, 2e-5, 3e-5], "Peak learning rates of a sweep.")
    sweep_dropouts: list[float] = option([0.0, 0.1, 0.2], "Dropouts of a sweep.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_question_length is not None and self.max_question_length < 2:
            raise UserError(f"--max_question_length is {self.max_question_length}, but must be at least 2.")


@dataclass
class ChoiceTrainingArguments(FinetuneTrainingArguments):
    """A single run's values: those of RoBERTa's authors for RACE and CommonsenseQA."""

    learning_rate: float = option(1e-5, "Peak learning rate.")
    per_device_train_batch_size: int = option(16, "Questions per forward pass and process.")
    per_device_eval_batch_size: int = option(16, "Questions per evaluation step.")
    weight_decay: float = option(0.01, "Weight decay; not on biases and norms.")


def clean(text: Any) -> str:
    """The text with single spaces and no line breaks.

    Raises:
        ValueError: It is not text.
    """
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is not text")
    return " ".join(text.split())


def question(**fields: Any) -> dict[str, Any]:
    """A row of `QUESTION`, from its fields with `answer`, a letter or "", in place of `label`.

    Raises:
        ValueError: The answer is not one of the letters, or they do not fit the choices.
    """
    answer, letters, choices = fields.pop("answer"), fields["letters"], fields["choices"]
    if len(choices) < 2 or len(letters) != len(choices) or len(set(letters)) != len(letters):
        raise ValueError(f"{len(choices)} choices with the letters {letters}; each of two or more needs its own")
    if answer not in ("", *letters):
        raise ValueError(f"the answer {answer!r} is not one of {', '.join(letters)}")
    return {**fields, "label": UNKNOWN if answer == "" else letters.index(answer)}


def read_questions(
    rows: Dataset, columns: Iterable[str], read_row: Callable[[dict[str, Any]], dict[str, Any]], source: str
) -> Dataset:
    """Bring the rows of a split into the form of `QUESTION`; `read_row` makes a `question` from a row with `columns`.

    Raises:
        UserError: A column is missing, a row cannot be read, has another number of choices than the first, or has an
            answer where others have none.
    """
    require_columns(rows, columns, source)

    def convert(row: dict[str, Any], index: int) -> dict[str, Any]:
        try:
            return read_row(row)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{source}, row {index}: {error}.") from error

    memory = {"keep_in_memory": True, "load_from_cache_file": False}
    questions = rows.map(convert, with_indices=True, remove_columns=rows.column_names, features=QUESTION, **memory)
    kinds = [(len(row["letters"]), row["label"] == UNKNOWN) for row in questions.select_columns(["letters", "label"])]
    odd = next((row for row, kind in enumerate(kinds) if kind != kinds[0]), None)
    if odd is not None:
        raise UserError(
            f"{source}, row {odd} ({questions[odd]['id']}) has {kinds[odd][0]} choices and "
            f"{'no' if kinds[odd][1] else 'an'} answer, unlike the first row."
        )
    return questions


def cut(tokenizer: PreTrainedTokenizerBase, texts: list[str], limits: Iterable[int]) -> tuple[list[str], list[int]]:
    """Cut texts at their ends to a number of tokens each.

    Returns:
        The texts, and the tokens that each one lost.
    """
    places = tokenizer(
        texts, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True, verbose=False
    )["offset_mapping"]
    kept, lost = [], []
    for text, offsets, limit in zip(texts, places, limits, strict=True):
        over = max(0, len(offsets) - max(0, limit))
        kept.append(text[: offsets[len(offsets) - over][0]].rstrip() if over else text)
        lost.append(over)
    return kept, lost


def _collate(pad: DataCollatorForMultipleChoice, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad to the longest choice of the batch: (rows, choices, tokens); rows without answers get ignored labels."""
    return pad([{"labels": UNKNOWN, **row} for row in rows])


class ChoiceTask(Task):
    """Rows of `read_questions`, scored by accuracy: of all rows and, if they are in groups, of each group.

    A command's class defines three methods:

    - `load(name, config)`: the splits as questions: `train` and `validation` with answers, `test` with or without.
    - `question_length(tokenizer, max_length)`: tokens that question and option may have; a `UserError` without room.
    - `tokenize(shared, choices, tokenizer, max_length)`: the columns of `files.tokenize` for these parts of inputs.

    Attributes:
        example: Python for the model card that makes `options`, and the `inputs` of `tokenizer`.

    Raises:
        UserError: A split is missing, or has no answers where they are needed.
    """

    auto_class = AutoModelForMultipleChoice
    pipeline_tag = "multiple-choice"
    example: ClassVar[str]

    def __init__(self, arguments: ChoiceArguments) -> None:
        super().__init__()
        splits = self.load(arguments.dataset_name, arguments.dataset_config)
        for split in ("train", "validation"):
            if split not in splits:
                raise UserError(f"{arguments.dataset_name} has no split `{split}`; it has {', '.join(splits)}.")
            if splits[split][0]["label"] == UNKNOWN:
                raise UserError(f"The split `{split}` of {arguments.dataset_name} has no answers.")
        self.sources = {split: f"{arguments.dataset_name} ({split})" for split in splits}
        self.train, self.evaluation = splits["train"], {"validation": splits["validation"]}
        self.tests = {"test": splits["test"]} if "test" in splits else {}
        if not Path(arguments.dataset_name).exists():
            self.dataset_name, self.dataset_config = arguments.dataset_name, arguments.dataset_config
        self.max_question_length = arguments.max_question_length
        self.metric = evaluate.load(str(METRICS), "multiple_choice", keep_in_memory=True)

    def check_length(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[str]:
        """A note on the length of questions."""
        if not tokenizer.is_fast:
            raise UserError(f"{type(tokenizer).__name__} gives no offsets; multiple choice needs a fast tokenizer.")
        length = self.question_length(tokenizer, max_length)
        return [f"Question and option have at most {length:,} of {max_length:,} tokens (--max_question_length)."]

    def encode(self, rows: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Encoded:
        """Every column of inputs holds a list per question, with one entry per choice."""
        answered, width = rows[0]["label"] != UNKNOWN, len(rows[0]["letters"])

        def encode(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
            shared = [text for text in batch["shared"] for _ in range(width)]
            choices = [text for texts in batch["choices"] for text in texts]
            flat = self.tokenize(shared, choices, tokenizer, max_length)
            flat["length"] = [len(one) + len(other) for one, other in zip(shared, choices, strict=True)]
            made = {
                name: [values[start : start + width] for start in range(0, len(values), width)]
                for name, values in flat.items()
            }
            made["length"] = [max(lengths) for lengths in made["length"]]
            return {**made, "labels": batch["label"]} if answered else made

        return encode_rows(rows, encode)

    def collator(self, tokenizer: PreTrainedTokenizerBase, multiple: int | None) -> Callable[[list[dict]], dict]:
        """Pads to the longest choice of the batch."""
        return partial(_collate, DataCollatorForMultipleChoice(tokenizer, pad_to_multiple_of=multiple))

    def scores(self, split: str, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """`accuracy`, and `accuracy_<group>` for each group of the rows."""
        groups, guesses = np.asarray({**self.tests, **self.evaluation}[split]["group"]), logits.argmax(-1)
        found = self.metric.compute(predictions=guesses, references=labels)
        for group in sorted(set(groups) - {""}, reverse=True):
            own = groups == group
            part = self.metric.compute(predictions=guesses[own], references=labels[own])
            found[f"accuracy_{group}"] = part["accuracy"]
        return found

    def write_predictions(self, folder: Path, split: str, logits: np.ndarray) -> Path:
        """A line `{"id": ..., "chosenAnswer": "A"}` per row, the form of CommonsenseQA's leaderboard."""
        path, rows = folder / f"{split}.jsonl", self.tests[split]
        with path.open("w", encoding="utf-8") as file:
            for name, letters, choice in zip(rows["id"], rows["letters"], logits.argmax(-1), strict=True):
                file.write(json.dumps({"id": name, "chosenAnswer": letters[choice]}) + "\n")
        return path

    def usage(self, name: str, trust: str) -> str:
        """Python for the model card."""
        return f'''import torch
from transformers import AutoModelForMultipleChoice, AutoTokenizer

name = "{name}"  # the name of this repository on the Hub, or the folder that holds this card
tokenizer = AutoTokenizer.from_pretrained(name{trust})
model = AutoModelForMultipleChoice.from_pretrained(name{trust}).eval()
{self.example}
with torch.no_grad():
    logits = model(**{{key: value.unsqueeze(0) for key, value in inputs.items()}}).logits[0]  # one score per option
print(options[logits.argmax()])'''
