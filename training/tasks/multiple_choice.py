"""Questions with choices to batches and scores: what finetuning on RACE and CommonsenseQA shares.

Every choice becomes one input, in the form of a pair as the tokenizer itself makes it. Of the two parts the first is
the same for all choices of a question (RACE: the passage; CommonsenseQA: the question) and the second differs (RACE:
question and option; CommonsenseQA: the option); which stands in front is the script's. The model gives one score an
input, and a softmax over the choices of a question is trained (Luna, section 4.3; Liu et al. 2019, RoBERTa, section
5.3).

What does not fit is cut at its end: first the second part to a limit of its own, then the first part so that the
whole fits. Special tokens are never cut, and every cut is counted.
"""

import dataclasses
import json
import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
import torch
from common.models import load_config, load_tokenizer, longest_input
from datasets import Dataset, Features, List, Value
from torch import Tensor
from transformers import AutoModelForMultipleChoice, PreTrainedTokenizerBase

from luna_hf.scripting import UserError
from tasks.files import Encoded
from tasks.runs import FinetuneArguments, FinetuneTrainingArguments, Task, run_script

METRICS = Path(__file__).resolve().parent / "metrics" / "scores"
UNKNOWN = -1  # label of a question whose answer is not given
QUESTION_LENGTH = 128  # --max_question_length where nothing is said and the inputs are long enough
_QUESTIONS = Features(
    {
        "id": Value("string"),
        "group": Value("string"),
        "first": Value("string"),
        "seconds": List(Value("string")),
        "letters": List(Value("string")),
        "label": Value("int64"),
    }
)
_FEATURES = Features(
    {
        "id": Value("string"),
        "group": Value("string"),
        "letters": List(Value("string")),
        "first": List(Value("int32")),
        "second": List(List(Value("int32"))),
        "label": Value("int64"),
        "length": Value("int32"),
        "kept": List(Value("int32")),
        "longest": Value("int32"),
        "tokens": Value("int32"),
        "cut_first": Value("int32"),
        "cut_second": Value("int32"),
    }
)


@dataclasses.dataclass(frozen=True)
class Question:
    """One row of a data set, in the form that every data set is brought to.

    Attributes:
        id: the row's own id.
        group: what accuracies are reported by (`middle`), or "".
        first: text that the choices share.
        seconds: one text a choice.
        letters: name of each choice in the data set.
        label: index of the right choice, or `UNKNOWN`.
    """

    id: str
    group: str
    first: str
    seconds: list[str]
    letters: list[str]
    label: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """Special tokens before, between and after the parts of a pair; `segments` whether `token_type_ids` are made, and
    `second_in_front` whether the parts change places."""

    start: list[int]
    middle: list[int]
    end: list[int]
    segments: bool
    second_in_front: bool = False

    @property
    def specials(self) -> int:
        """Number of special tokens in an input."""
        return len(self.start) + len(self.middle) + len(self.end)

    def as_one_text(self) -> "Layout":
        """One separator between the parts and one segment, as if it were one text with a separator in it."""
        return dataclasses.replace(self, middle=self.middle[-1:], segments=False)

    def with_second_in_front(self) -> "Layout":
        """The part that differs before the one that is shared."""
        return dataclasses.replace(self, second_in_front=True)

    def join(self, first: Sequence[int], second: Sequence[int]) -> tuple[list[int], list[int]]:
        """Ids of an input, and the segment (0 or 1) of each."""
        if self.second_in_front:
            first, second = second, first
        head, tail = [*self.start, *first, *self.middle], [*second, *self.end]
        return head + tail, [0] * len(head) + [1] * len(tail)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Longest input and longest second part, in tokens: the former with special tokens, the latter without.

    `note` says to people what the limits are and why.
    """

    whole: int
    second: int
    note: str = ""

    def check(self, specials: int) -> None:
        """See that both parts have room beside so many special tokens.

        Raises:
            UserError: One has none.
        """
        if self.second < 1 or self.whole <= self.second + specials:
            raise UserError(
                f"Inputs of {self.whole} tokens have no room for {self.second} tokens that differ between the choices, "
                f"{specials} special tokens and the text before. Raise --max_length or lower --max_question_length."
            )


def pair_layout(tokenizer: PreTrainedTokenizerBase) -> Layout:
    """The special tokens that a tokenizer puts around a pair: `<s> A </s></s> B </s>`, `[CLS] A [SEP] B [SEP]`.

    Raises:
        UserError: It puts none before, between or after the two.
    """
    pair = tokenizer("a", "b", return_special_tokens_mask=True)
    ids, special = pair["input_ids"], pair["special_tokens_mask"]
    text = [index for index, flag in enumerate(special) if not flag]
    border = next((index for index in text if index + 1 < len(ids) and special[index + 1]), 0)
    following = [index for index in text if index > border]
    if not following or not text[0] or following[-1] + 1 == len(ids):
        raise UserError(
            f"{type(tokenizer).__name__} puts no special tokens before, between and after a pair of texts. Multiple "
            "choice needs a tokenizer with <s> and </s>, or [CLS] and [SEP]."
        )
    start, middle, end = ids[: text[0]], ids[border + 1 : following[0]], ids[following[-1] + 1 :]
    return Layout(start, middle, end, segments="token_type_ids" in tokenizer.model_input_names)


def as_text(value: Any, column: str, where: str) -> str:
    """The value with single spaces and no line breaks; it may be blank.

    Raises:
        UserError: It is no text.
    """
    if not isinstance(value, str):
        raise UserError(f"{where}: `{column}` is {value!r} ({type(value).__name__}), but must be text.")
    return " ".join(value.split())


def as_choices(values: Any, column: str, where: str) -> list[str]:
    """Texts of the choices, with single spaces.

    Raises:
        UserError: They are no list of two or more texts.
    """
    if not isinstance(values, list | tuple | np.ndarray) or not 2 <= len(values) <= len(string.ascii_uppercase):
        raise UserError(f"{where}: `{column}` is {values!r}, but must be a list of 2 to 26 texts.")
    return [as_text(value, column, where) for value in values]


def answer_index(letter: Any, letters: list[str], column: str, where: str) -> int:
    """Index of the answer among the choices; `UNKNOWN` for "".

    Raises:
        UserError: It is not text, or not one of the letters.
    """
    if letter == "":
        return UNKNOWN
    if not isinstance(letter, str) or letter not in letters:
        raise UserError(
            f"{where}: `{column}` is {letter!r} ({type(letter).__name__}), but must be one of "
            f"{', '.join(map(repr, letters))}."
        )
    return letters.index(letter)


def read_questions(dataset: Dataset, read_row: Callable[[Mapping[str, Any], str], Question], where: str) -> Dataset:
    """Bring every row to the form of `Question` and check what only the rows together can tell.

    Args:
        dataset: a split with the data set's own columns.
        read_row: makes a `Question` of a row; its second argument says where the row is, for messages.
        where: the split, for messages.

    Returns:
        One column for each field of `Question`.

    Raises:
        UserError: A row is not as it should be, has another number of choices than the first, or only some of the rows
            have an answer. The message names the row.
    """
    first: list[Question] = []

    def convert(rows: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        made = []
        for index, values in zip(indices, zip(*rows.values(), strict=True), strict=True):
            place = f"{where}, row {index}"
            question = read_row(dict(zip(rows, values, strict=True)), place)
            first[:] = first or [question]
            _compare(question, first[0], place)
            made.append(question)
        return {name: [getattr(question, name) for question in made] for name in _QUESTIONS}

    return dataset.map(
        convert,
        batched=True,
        with_indices=True,
        remove_columns=dataset.column_names,
        features=_QUESTIONS,
        keep_in_memory=True,
        load_from_cache_file=False,
        desc="Reading",
    )


def _compare(question: Question, first: Question, place: str) -> None:
    """Every row has as many choices as the first of its split, and an answer if that has one."""
    count, wanted = len(question.seconds), len(first.seconds)
    if count != wanted:
        raise UserError(f"{place} ({question.id}) has {count} choices, but the first row {wanted}.")
    if (question.label == UNKNOWN) != (first.label == UNKNOWN):
        having = "no" if question.label == UNKNOWN else "an"
        raise UserError(
            f"{place} ({question.id}) has {having} answer, unlike the first row. "
            "A split has answers in all rows or in none."
        )


def encode(questions: Dataset, tokenizer: PreTrainedTokenizerBase, layout: Layout, limits: Limits) -> Dataset:
    """Token ids of both parts, cut to the limits, without special tokens (`ChoiceCollator` adds them).

    Args:
        questions: what `read_questions` gives.
        tokenizer: that of the model; a "</s>" that stands in the text is text.
        layout: special tokens of an input.
        limits: longest input and longest second part.

    Returns:
        `first` (ids), `kept` (how many of them every choice has room for), `second` (ids of every choice), `label`;
        `longest` (tokens of the longest choice's input), `length` (its characters before cutting, by which batches are
        grouped: the same for every tokenizer); and summed over the row's choices `tokens`, `cut_first`, `cut_second`.

    Raises:
        UserError: The limits leave no room for the first part.
    """
    limits.check(layout.specials)

    def encode_rows(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        distinct = list(dict.fromkeys(rows["first"]))  # a passage of RACE has several questions
        known = dict(zip(distinct, _ids(tokenizer, distinct), strict=True))
        flat = iter(_ids(tokenizer, [text for texts in rows["seconds"] for text in texts]))
        made = [
            _cut_row(known[first], [next(flat) for _ in seconds], layout, limits)
            for first, seconds in zip(rows["first"], rows["seconds"], strict=True)
        ]
        lengths = [
            len(first) + max(map(len, seconds)) for first, seconds in zip(rows["first"], rows["seconds"], strict=True)
        ]
        return {"length": lengths} | {name: [row[name] for row in made] for name in made[0]}

    return questions.map(
        encode_rows,
        batched=True,
        remove_columns=["seconds"],
        features=_FEATURES,
        keep_in_memory=True,
        load_from_cache_file=False,
        desc="Tokenizing",
    )


def _ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    encoded = tokenizer(
        texts, add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
    )
    return encoded["input_ids"]


def _cut_row(first: list[int], seconds: list[list[int]], layout: Layout, limits: Limits) -> dict[str, Any]:
    short = [ids[: limits.second] for ids in seconds]
    kept = [min(len(first), limits.whole - layout.specials - len(ids)) for ids in short]
    tokens = [layout.specials + count + len(ids) for count, ids in zip(kept, short, strict=True)]
    return {
        "first": first[: max(kept)],
        "kept": kept,
        "second": short,
        "longest": max(tokens),
        "tokens": sum(tokens),
        "cut_first": sum(len(first) - count for count in kept),
        "cut_second": sum(len(ids) - len(cut) for ids, cut in zip(seconds, short, strict=True)),
    }


@dataclasses.dataclass(frozen=True)
class EncodedChoices(Encoded):
    """What the Trainer takes, and what was cut, part by part; tokens are summed over all choices.

    Attributes:
        parts: names of the two parts: `("passage", "question with option")`.
        cut_by_part: rows that were cut and tokens that were lost, for each part.
        longest: tokens of the longest input.
        limit: tokens that an input could have at most.
    """

    parts: tuple[str, str]
    cut_by_part: dict[str, dict[str, int]]
    longest: int
    limit: int

    def report(self, split: str, max_length: int) -> str:
        """One sentence on the split."""
        said = []
        for part in reversed(self.parts):
            cut = self.cut_by_part[part]
            share = cut["rows"] / len(self.rows)
            lost = f"{part} cut in {cut['rows']:,} ({share:.1%}), which lost {cut['tokens']:,} tokens"
            said.append(lost if cut["rows"] else f"no {part} cut")
        return (
            f"{split}: {len(self.rows):,} rows, {self.tokens:,} tokens in all choices, the longest input "
            f"{self.longest:,} of at most {self.limit:,}; {'; '.join(said)}."
        )


def for_trainer(encoded: Dataset, parts: tuple[str, str], limit: int) -> EncodedChoices:
    """What `encode` gives, without the columns that only people read; `labels` if there are answers.

    Args:
        encoded: the rows.
        parts: names of the two parts, for the report.
        limit: longest input that was allowed.
    """
    cuts = {}
    for part, column in zip(parts, ("cut_first", "cut_second"), strict=True):
        lost = np.asarray(encoded[column])
        cuts[part] = {"rows": int((lost > 0).sum()), "tokens": int(lost.sum())}
    any_cut = np.asarray(encoded["cut_first"]) + np.asarray(encoded["cut_second"])
    columns = ["first", "kept", "second", "length"]
    labelled = encoded[0]["label"] != UNKNOWN
    rows = encoded.rename_column("label", "labels").select_columns([*columns, "labels"] if labelled else columns)
    return EncodedChoices(
        rows=rows,
        tokens=int(np.sum(encoded["tokens"])),
        cut_rows=int((any_cut > 0).sum()),
        cut_tokens=int(any_cut.sum()),
        parts=parts,
        cut_by_part=cuts,
        longest=int(np.max(encoded["longest"])),
        limit=limit,
    )


class ChoiceCollator:
    """Rows of `encode` to a batch, padded on the right to the longest input among all choices.

    Args:
        layout: special tokens of an input.
        tokenizer: for the id of the pads, which are masked.
        multiple: the width is rounded up to a multiple of it, if the model takes as much.
    """

    def __init__(self, layout: Layout, tokenizer: PreTrainedTokenizerBase, multiple: int | None = None) -> None:
        self.layout, self.pad_token_id = layout, tokenizer.pad_token_id
        self.multiple, self.widest = multiple or 1, tokenizer.model_max_length

    def __call__(self, rows: list[Mapping[str, Any]]) -> dict[str, Tensor]:
        """`input_ids`, `attention_mask` and, if the layout has segments, `token_type_ids`: (rows, choices, n).

        `labels` (rows,) are there if the rows have them.
        """
        joined = [
            self.layout.join(row["first"][:kept], second)
            for row in rows
            for kept, second in zip(row["kept"], row["second"], strict=True)
        ]
        longest = max(len(ids) for ids, _ in joined)
        width = max(longest, min(-(-longest // self.multiple) * self.multiple, self.widest))
        input_ids = torch.full((len(joined), width), self.pad_token_id)
        attention_mask, token_type_ids = torch.zeros_like(input_ids), torch.zeros_like(input_ids)
        for index, (ids, segments) in enumerate(joined):
            input_ids[index, : len(ids)] = torch.tensor(ids)
            attention_mask[index, : len(ids)] = 1
            token_type_ids[index, : len(ids)] = torch.tensor(segments)
        batch = {"input_ids": input_ids, "attention_mask": attention_mask}
        if self.layout.segments:
            batch["token_type_ids"] = token_type_ids
        batch = {name: tensor.unflatten(0, (len(rows), -1)) for name, tensor in batch.items()}
        if "labels" in rows[0]:
            batch["labels"] = torch.tensor([row["labels"] for row in rows])
        return batch


@dataclasses.dataclass
class ChoiceArguments(FinetuneArguments):
    """Options of the scripts for multiple choice; the defaults are the Luna paper's (section 4.3)."""

    max_question_length: int | None = dataclasses.field(
        default=None,
        metadata={
            "help": "Longest question with option in tokens, without special tokens; longer ones are cut. By default "
            f"{QUESTION_LENGTH}, or less where the inputs are short: where a passage follows, half of their room."
        },
    )
    sweep_learning_rates: list[float] = dataclasses.field(
        default_factory=lambda: [1e-5, 2e-5, 3e-5], metadata={"help": "Peak learning rates."}
    )
    sweep_dropouts: list[float] = dataclasses.field(
        default_factory=lambda: [0.0, 0.1, 0.2], metadata={"help": "Dropouts to try with each of them."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_question_length is not None and self.max_question_length < 2:
            raise UserError(f"--max_question_length is {self.max_question_length}, but must be at least 2.")


@dataclasses.dataclass
class ChoiceTrainingArguments(FinetuneTrainingArguments):
    """A single run's values: those of RoBERTa's authors for RACE and CommonsenseQA."""

    learning_rate: float = dataclasses.field(default=1e-5, metadata={"help": "Peak learning rate."})
    per_device_train_batch_size: int = dataclasses.field(
        default=16, metadata={"help": "Questions of a forward pass on each process."}
    )
    per_device_eval_batch_size: int = dataclasses.field(
        default=16, metadata={"help": "Questions of an evaluation step."}
    )
    weight_decay: float = dataclasses.field(default=0.01, metadata={"help": "Weight decay; not on biases and norms."})


class ChoiceTask(Task):
    """Rows of `read_questions`, scored by accuracy: of all rows and, if they are in groups, of each group.

    A script's class names the parts, reads the splits (`train` and `validation` with answers; `test` with or without)
    and says how long the parts are and in what layout.

    Attributes:
        parts: names of the part that choices share and of that which differs.
        example: Python for the model card that makes `options`, and the `inputs` of `tokenizer`.

    Raises:
        UserError: A split is missing, or has no answers where they are needed.
    """

    auto_class = AutoModelForMultipleChoice
    pipeline_tag = "multiple-choice"
    parts: tuple[str, str]
    example: str

    def __init__(self, arguments: ChoiceArguments) -> None:
        splits = self.load(arguments.dataset_name, arguments.dataset_config)
        for split in ("train", "validation"):
            if split not in splits:
                raise UserError(f"{self.title} has no split `{split}` here; there is {', '.join(splits)}.")
            if splits[split][0]["label"] == UNKNOWN:
                raise UserError(f"The split `{split}` of {self.title} has no answers.")
        self.train, self.evaluation = splits["train"], {"validation": splits["validation"]}
        self.tests = {"test": splits["test"]} if "test" in splits else {}
        if not Path(arguments.dataset_name).exists():
            self.dataset_name, self.dataset_config = arguments.dataset_name, arguments.dataset_config
        self.max_question_length = arguments.max_question_length
        self.metric = evaluate.load(str(METRICS), "multiple_choice", keep_in_memory=True)
        self.notes = []

    @staticmethod
    def load(name: str, config: str | None) -> dict[str, Dataset]:
        """The splits as questions."""
        raise NotImplementedError

    @staticmethod
    def layout(tokenizer: PreTrainedTokenizerBase) -> Layout:
        """Special tokens of an input."""
        raise NotImplementedError

    @staticmethod
    def limits(max_length: int, specials: int, asked: int | None) -> Limits:
        """Longest input and second part.

        Args:
            max_length: tokens that an input may have at most.
            specials: how many of them are special tokens.
            asked: `--max_question_length`, if it is given.
        """
        raise NotImplementedError

    def encode(self, rows: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> EncodedChoices:
        """Rows as `ChoiceCollator` takes them."""
        layout = self.layout(tokenizer)
        limits = self.limits(max_length, layout.specials, self.max_question_length)
        return for_trainer(encode(rows, tokenizer, layout, limits), self.parts, limits.whole)

    def collator(self, tokenizer: PreTrainedTokenizerBase, multiple: int | None) -> ChoiceCollator:
        """Adds the special tokens, and pads to the longest choice of the batch."""
        return ChoiceCollator(self.layout(tokenizer), tokenizer, multiple)

    def scores(self, split: str, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """`accuracy`, and `accuracy_<group>` for each group of the rows."""
        rows = self.tests[split] if split in self.tests else self.evaluation[split]
        groups, guesses = np.asarray(rows["group"]), logits.argmax(-1)
        found = self.metric.compute(predictions=guesses, references=labels)
        for group in sorted(set(groups) - {""}, reverse=True):
            own = groups == group
            part = self.metric.compute(predictions=guesses[own], references=labels[own])
            found |= {f"{name}_{group}": value for name, value in part.items()}
        return found

    def write_predictions(self, folder: Path, split: str, logits: np.ndarray) -> Path:
        """A line `{"id": ..., "chosenAnswer": "A"}` for each row, the form of CommonsenseQA's leaderboard."""
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
    logits = model(**{{key: value.unsqueeze(0) for key, value in inputs.items()}}).logits[0]  # one score an option
print(options[logits.argmax()])'''


def limit_notes(task_class: type[ChoiceTask], arguments: ChoiceArguments) -> list[str]:
    """What the limits are for the inputs of every model; needs no data, which take longer to read.

    Raises:
        UserError: A model's config or tokenizer cannot be loaded, or `--max_question_length` leaves no room.
    """
    notes = []
    for name in arguments.model_name_or_path:
        config = load_config(name)
        specials = task_class.layout(load_tokenizer(name, config)).specials
        max_length = arguments.max_length or min(512, longest_input(config))  # as `finetuning.prepare` has it
        limits = task_class.limits(max_length, specials, arguments.max_question_length)
        limits.check(specials)
        notes.append(limits.note)
    return list(dict.fromkeys(notes))


def run_choice_script(
    arguments_class: type[ChoiceArguments],
    task_class: type[ChoiceTask],
    description: str,
    words: list[str] | None = None,
) -> int:
    """`run_script` for multiple choice: limits that do not fit are refused before the data are read."""

    def make_task(arguments: ChoiceArguments, training: FinetuneTrainingArguments) -> ChoiceTask:
        notes = limit_notes(task_class, arguments)
        task = task_class(arguments)
        task.notes += notes
        return task

    return run_script(arguments_class, make_task, description, words, ChoiceTrainingArguments)
