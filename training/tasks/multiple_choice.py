"""Questions with choices to batches and scores: RACE and CommonsenseQA.

Every choice becomes one input: a text that differs per choice, and a text that the choices share. The model gives one
score per input, and a softmax over the choices of a question is trained (Luna, section 4.3; Liu et al. 2019, RoBERTa,
section 5.3). The tokenizer joins and truncates, transformers' collator pads, and every cut is counted.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from datasets import Dataset, Features, List, Value, concatenate_datasets
from torch import Tensor
from transformers import AutoModelForMultipleChoice, DataCollatorForMultipleChoice, PreTrainedTokenizerBase

from luna_hf.scripting import UserError
from tasks.arguments import FinetuneArguments, FinetuneTrainingArguments, option
from tasks.files import Encoded, encode_rows, load_splits, require_columns, tokenize
from tasks.metrics import compute
from tasks.task import Task

UNKNOWN = -100  # label of a question without an answer; the loss ignores it
QUESTION_LENGTH = 128  # default of --max_question_length for models that have room
LEVELS = ("middle", "high")  # of RACE
_TEXT, _TEXTS = Value("string"), List(Value("string"))
# `group` names a part of the data that gets a separate score, or is empty.
QUESTION = Features(
    {"id": _TEXT, "group": _TEXT, "shared": _TEXT, "choices": _TEXTS, "letters": _TEXTS, "label": Value("int64")}
)
_NO_MASKS = {"return_attention_mask": False}  # the collator makes them


@dataclass
class ChoiceArguments(FinetuneArguments):
    """Options of the commands for multiple choice; the defaults are the Luna paper's (section 4.3)."""

    max_question_length: int | None = option(
        None,
        "Most tokens of a question and an option, without special tokens; longer ones are cut. By default "
        f"{QUESTION_LENGTH}, or less if --max_length is small: half of it if a passage follows.",
    )
    sweep_learning_rates: list[float] = option([1e-5, 2e-5, 3e-5], "Peak learning rates of a sweep.")
    sweep_dropouts: list[float] = option([0.0, 0.1, 0.2], "Dropouts of a sweep.")


@dataclass
class RaceArguments(ChoiceArguments):
    """Options of `finetune_race.py`."""

    dataset_name: str = option(
        "ehovy/race", "Hub name, or a local folder with `middle` and `high`, each with a file per split."
    )
    dataset_config: Literal["all", "middle", "high"] = option("all", "Level of the examinations: all, middle or high.")


@dataclass
class CsqaArguments(ChoiceArguments):
    """Options of `finetune_csqa.py`."""

    dataset_name: str = option("tau/commonsense_qa", "Hub name, or a local folder with a file per split.")


@dataclass
class ChoiceTrainingArguments(FinetuneTrainingArguments):
    """A single run's values: those of RoBERTa's authors for RACE and CommonsenseQA."""

    learning_rate: float = option(1e-5, "Peak learning rate.")
    per_device_train_batch_size: int = option(16, "Questions per forward pass and process.")
    per_device_eval_batch_size: int = option(16, "Questions per evaluation step.")
    weight_decay: float = option(0.01, "Weight decay; not on biases and norms.")


# ---- rows ----


def race_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row of RACE in the form of `QUESTION`; a value that does not fit raises an error."""
    if not isinstance(row["options"], list):
        raise TypeError("options must be a list")
    text, letters = _clean(row["question"]), [chr(ord("A") + index) for index in range(len(row["options"]))]
    return {
        "id": row["example_id"],
        "group": next(level for level in LEVELS if row["example_id"].startswith(level)),
        "shared": _clean(row["article"]),
        "choices": [fill_in(text, _clean(option)) for option in row["options"]],
        "letters": letters,
        "label": UNKNOWN if row["answer"] in (None, "") else letters.index(row["answer"]),
    }


def csqa_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row of CommonsenseQA in the form of `QUESTION`; a value that does not fit raises an error."""
    letters = row["choices"]["label"]
    if not all(isinstance(row["choices"][name], list) for name in ("label", "text")):
        raise TypeError("choices must hold lists")
    if len(set(letters)) != len(letters):
        raise ValueError("two choices have one letter")
    return {
        "id": row["id"],
        "group": "",
        "shared": "Q: " + _clean(row["question"]),
        "choices": ["A: " + _clean(text) for _, text in zip(letters, row["choices"]["text"], strict=True)],
        "letters": letters,
        "label": UNKNOWN if row["answerKey"] in (None, "") else letters.index(row["answerKey"]),
    }


def fill_in(text: str, option: str) -> str:
    """The question with the option in its blanks, or followed by the option if it has none."""
    return re.sub("_+", lambda _: option, text) if "_" in text else f"{text} {option}"


def _clean(text: str) -> str:
    """The text with single spaces and no line breaks."""
    return " ".join(text.split())


def read_questions(
    rows: Dataset, columns: Iterable[str], read_row: Callable[[dict[str, Any]], dict[str, Any]], source: str
) -> Dataset:
    """Bring the rows of a split into the form of `QUESTION`.

    Raises:
        UserError: A column is missing, a row cannot be read, has another number of choices than the first, or has an
            answer where others have none.
    """
    require_columns(rows, columns, source)
    questions: list[dict[str, Any]] = []
    for index, row in enumerate(rows):
        try:
            questions.append(read_row(row))
        except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
            raise UserError(f"{source}, row {index} does not have the form of the data set ({error!r}).") from error
        choices, known = ((len(one["choices"]), one["label"] != UNKNOWN) for one in (questions[-1], questions[0]))
        if choices != known:
            raise UserError(
                f"{source}, row {index} ({questions[-1]['id']}) has {choices[0]} choices and "
                f"{'an' if choices[1] else 'no'} answer, unlike the first row."
            )
    return Dataset.from_list(questions, features=QUESTION)


# ---- inputs ----


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

    A subclass defines `question_length`, the tokens that question and option may have, and `tokenize`, which makes the
    columns of `files.tokenize` from the two texts of inputs.
    """

    auto_class = AutoModelForMultipleChoice
    pipeline_tag = "multiple-choice"
    columns: ClassVar[tuple[str, ...]]
    read_row: ClassVar[Callable[[dict[str, Any]], dict[str, Any]]]
    example: ClassVar[str]  # Python that makes `inputs` from `options`, for the card

    def __init__(self, arguments: ChoiceArguments) -> None:
        name, config = arguments.dataset_name, arguments.dataset_config
        splits = self.load(name, config)
        super().__init__(splits, name, "train", ["validation"], ["test"], config)
        for split in ("train", "validation"):
            if splits[split][0]["label"] == UNKNOWN:
                raise UserError(f"The split `{split}` of {name} has no answers.")
        for split, rows in splits.items():
            counts = Counter(rows["group"])
            if "" not in counts:
                self.notes.append(f"{split}: {', '.join(f'{count:,} {group}' for group, count in counts.items())}.")
        self.max_question_length = arguments.max_question_length

    def load(self, name: str, config: str | None) -> dict[str, Dataset]:
        """The splits as questions: `train` and `validation` with answers, `test` with or without."""
        splits = load_splits(name, config, required=(["train"], ["validation"]))
        return {
            split: read_questions(rows, self.columns, self.read_row, f"{name}, {split}")
            for split, rows in splits.items()
        }

    def check_length(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[str]:
        """A note on the length of questions."""
        if not tokenizer.is_fast:
            raise UserError(f"{type(tokenizer).__name__} gives no offsets; multiple choice needs a fast tokenizer.")
        length = self.question_length(tokenizer, max_length)
        if length < 1:
            raise UserError(
                f"Inputs of {max_length} tokens have no room for a passage beside --max_question_length "
                f"{self.max_question_length}. Raise --max_length or lower --max_question_length."
            )
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
        found = compute(["accuracy"], guesses, labels)
        for group in sorted(set(groups) - {""}, reverse=True):
            own = groups == group
            found[f"accuracy_{group}"] = compute(["accuracy"], guesses[own], labels[own])["accuracy"]
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
        return f"""import torch
from transformers import AutoModelForMultipleChoice, AutoTokenizer

name = {name}  # the name of this repository on the Hub, or the folder that holds this card
tokenizer = AutoTokenizer.from_pretrained(name{trust})
model = AutoModelForMultipleChoice.from_pretrained(name{trust}).eval()
{self.example}
with torch.no_grad():
    logits = model(**{{key: value.unsqueeze(0) for key, value in inputs.items()}}).logits[0]  # one score per option
print(options[logits.argmax()])"""


class RaceTask(ChoiceTask):
    """RACE: the passage gives way to question and option; accuracy of both levels and of each."""

    name = "race"
    title = "RACE"
    dataset = "RACE (Lai et al. 2017), for non-commercial research only"
    columns = ("example_id", "article", "question", "options", "answer")
    read_row = staticmethod(race_row)
    example = """import re

passage = "Tom has a cat and a dog. The cat sleeps all day, and the dog plays with him."
question = "Tom plays with _ ."
options = ["the cat", "the dog", "nobody", "his sister"]
# The option fills the blank, or follows a question that has none.
filled = question if "_" in question else f"{question} _"
texts = [re.sub("_+", lambda _: option, filled) for option in options]
inputs = tokenizer(texts, [passage] * len(texts), truncation="only_second", padding=True, return_tensors="pt")"""

    def load(self, name: str, config: str | None) -> dict[str, Dataset]:
        """The splits of one level, or of both (`all`); a local folder has a subfolder for each."""
        load, is_local = super().load, any((Path(name) / level).is_dir() for level in LEVELS)
        parts = [load(name, level) for level in (LEVELS if is_local and config == "all" else (config,))]
        found = [*map(set, parts)]
        if lacking := sorted(set.union(*found) - set.intersection(*found)):
            raise UserError(
                f"{name} has the split {lacking[0]} for one level only. Add it for the other, or name a level."
            )
        return {split: concatenate_datasets([part[split] for part in parts]) for split in parts[0]}

    def question_length(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> int:
        """`--max_question_length`, or 128, but at most half of the room; 0 if the passage has none."""
        room = max_length - tokenizer.num_special_tokens_to_add(pair=True)
        length = self.max_question_length or min(QUESTION_LENGTH, room // 2)
        return length if length < room else 0

    def tokenize(
        self, shared: list[str], choices: list[str], tokenizer: PreTrainedTokenizerBase, max_length: int
    ) -> dict[str, list[Any]]:
        """Pairs of question with option, and passage."""
        length = self.question_length(tokenizer, max_length)
        choices, lost = cut(tokenizer, choices, [length] * len(choices))
        options = {"max_length": max_length, "truncation": "only_second", "split_special_tokens": True, **_NO_MASKS}
        return tokenize(tokenizer, choices, shared, lost=lost, **options)


class CsqaTask(ChoiceTask):
    """CommonsenseQA: question and option are one text with a separator in it."""

    name = "csqa"
    title = "CommonsenseQA"
    dataset = "CommonsenseQA (Talmor et al. 2019)"
    columns = ("id", "question", "choices", "answerKey")
    read_row = staticmethod(csqa_row)
    example = """question = "Where does a fox sleep?"
options = ["hen house", "den", "office", "river", "sky"]
texts = [f"Q: {question}{tokenizer.sep_token}A: {option}" for option in options]
inputs = tokenizer(texts, truncation=True, padding=True, return_tensors="pt")"""

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
        lengths = map(len, tokenizer(choices, add_special_tokens=False, verbose=False)["input_ids"])
        shared, lost = cut(tokenizer, shared, [length - own for own in lengths])
        texts = [f"{text}{tokenizer.sep_token}{choice}" for text, choice in zip(shared, choices, strict=True)]
        whole = length + tokenizer.num_special_tokens_to_add() + 1
        return tokenize(tokenizer, texts, max_length=whole, truncation="longest_first", lost=lost, **_NO_MASKS)
