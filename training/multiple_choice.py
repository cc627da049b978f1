"""Questions with choices to batches and scores: what finetuning on RACE and CommonsenseQA shares.

Every choice becomes one input, in the form of a pair as the tokenizer itself makes it. Of the two parts the first is
the same for all choices of a question (RACE: the passage; CommonsenseQA: the question) and the second differs (RACE:
question and option; CommonsenseQA: the option). The model gives one score an input, and a softmax over the choices
of a question is trained (Luna, section 4.3; Liu et al. 2019, RoBERTa, section 5.3).

What does not fit is cut at its end: first the second part to a limit of its own, then the first part so that the
whole fits. Special tokens are never cut, and every cut is counted.
"""

import dataclasses
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, List, Value
from recipe import UserError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

UNKNOWN = -1  # label of a question whose answer is not given
_FEATURES = Features(
    {
        "id": Value("string"),
        "group": Value("string"),
        "letters": List(Value("string")),
        "first": List(Value("int32")),
        "second": List(List(Value("int32"))),
        "label": Value("int64"),
        "length": Value("int32"),
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
    """Special tokens before, between and after the parts of a pair; `segments` whether `token_type_ids` are made."""

    start: list[int]
    middle: list[int]
    end: list[int]
    segments: bool

    @property
    def specials(self) -> int:
        """Number of special tokens in an input."""
        return len(self.start) + len(self.middle) + len(self.end)

    def with_one_separator(self) -> "Layout":
        """The same layout with a single separator between the parts."""
        return dataclasses.replace(self, middle=self.middle[-1:])

    def join(self, first: Sequence[int], second: Sequence[int], max_length: int) -> tuple[list[int], list[int]]:
        """Ids of one input, at most `max_length` of them, and the segment (0 or 1) of each; `first` gives way."""
        room = max_length - self.specials - len(second)
        head = [*self.start, *first[: max(room, 0)], *self.middle]
        tail = [*second, *self.end]
        # RoBERTa's pair has two separators; the segment changes after the last, as BERT's does after its only one.
        return head + tail, [0] * len(head) + [1] * len(tail)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Longest input and longest second part, in tokens: the former with special tokens, the latter without."""

    whole: int
    second: int


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
    expected: list[Question] = []

    def convert(row: Mapping[str, Any], index: int) -> dict[str, Any]:
        place = f"{where}, row {index}"
        question = read_row(row, place)
        expected[:] = expected or [question]
        count, wanted = len(question.seconds), len(expected[0].seconds)
        if count != wanted:
            raise UserError(f"{place} ({question.id}) has {count} choices, but the first row {wanted}.")
        if (question.label == UNKNOWN) != (expected[0].label == UNKNOWN):
            having = "no" if question.label == UNKNOWN else "an"
            raise UserError(
                f"{place} ({question.id}) has {having} answer, unlike the first row. "
                "A split has answers in all rows or in none."
            )
        return dataclasses.asdict(question)

    return dataset.map(
        convert, with_indices=True, remove_columns=dataset.column_names, keep_in_memory=True, load_from_cache_file=False
    )


def encode(questions: Dataset, tokenizer: PreTrainedTokenizerBase, layout: Layout, limits: Limits) -> Dataset:
    """Token ids of both parts, cut to the limits, without special tokens (`ChoiceCollator` adds them).

    Args:
        questions: what `read_questions` gives.
        tokenizer: that of the model; a "</s>" that stands in the text is text.
        layout: special tokens of an input.
        limits: longest input and longest second part.

    Returns:
        `first` (ids, as long as the shortest choice allows), `second` (ids of every choice), `label`, `tokens` (of the
        longest choice's input), `length` (its characters before cutting, by which batches are grouped: the same for
        every tokenizer), and the tokens cut in the row, summed over its choices: `cut_first`, `cut_second`.

    Raises:
        UserError: The limits leave no room for the first part.
    """
    if limits.second < 1 or limits.whole <= limits.second + layout.specials:
        raise UserError(
            f"Inputs of {limits.whole} tokens have no room for {limits.second} tokens that differ between the choices, "
            f"{layout.specials} special tokens and the text before. Raise `max_length` or lower `max_option_length`."
        )

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
    )


def _ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    encoded = tokenizer(
        texts, add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
    )
    return encoded["input_ids"]


def _cut_row(first: list[int], seconds: list[list[int]], layout: Layout, limits: Limits) -> dict[str, Any]:
    kept = [ids[: limits.second] for ids in seconds]
    rooms = [limits.whole - layout.specials - len(ids) for ids in kept]
    lengths = [layout.specials + min(len(first), room) + len(ids) for ids, room in zip(kept, rooms, strict=True)]
    return {
        "first": first[: max(rooms)],
        "second": kept,
        "tokens": max(lengths),
        "cut_first": sum(max(len(first) - room, 0) for room in rooms),
        "cut_second": sum(len(ids) - len(short) for ids, short in zip(seconds, kept, strict=True)),
    }


def count_cuts(encoded: Dataset) -> dict[str, int]:
    """What `encode` cut: rows, and tokens summed over the choices of all rows."""
    first, second = np.asarray(encoded["cut_first"]), np.asarray(encoded["cut_second"])
    return {
        "rows": len(encoded),
        "rows_first_cut": int((first > 0).sum()),
        "tokens_first_cut": int(first.sum()),
        "rows_second_cut": int((second > 0).sum()),
        "tokens_second_cut": int(second.sum()),
        "longest_input": int(max(encoded["tokens"])),
    }


def describe_cuts(split: str, cuts: dict[str, int], first: str, second: str) -> str:
    """The counts as one sentence, with the data set's names of the two parts."""
    parts = [
        f"{name} cut in {cuts[f'rows_{part}_cut']:,} ({cuts[f'tokens_{part}_cut']:,} tokens over all choices)"
        if cuts[f"rows_{part}_cut"]
        else f"no {name} cut"
        for part, name in (("second", second), ("first", first))
    ]
    return f"{split}: {cuts['rows']:,} rows, {', '.join(parts)}; longest input {cuts['longest_input']} tokens."


class ChoiceCollator:
    """Rows of `encode` to a batch, padded on the right to the longest input among all choices.

    Args:
        layout: special tokens of an input.
        max_length: longest input in tokens.
        pad_token_id: what pads hold; they are masked.
    """

    def __init__(self, layout: Layout, max_length: int, pad_token_id: int) -> None:
        self.layout, self.max_length, self.pad_token_id = layout, max_length, pad_token_id

    def __call__(self, rows: list[Mapping[str, Any]]) -> dict[str, Tensor]:
        """`input_ids`, `attention_mask` and, if the tokenizer has segments, `token_type_ids`: (rows, choices, n).

        `labels` (rows,) are left out of a split without answers.
        """
        joined = [self.layout.join(row["first"], second, self.max_length) for row in rows for second in row["second"]]
        shape = (len(joined), max(len(ids) for ids, _ in joined))
        input_ids = torch.full(shape, self.pad_token_id)
        attention_mask, token_type_ids = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        for index, (ids, segments) in enumerate(joined):
            input_ids[index, : len(ids)] = torch.tensor(ids)
            attention_mask[index, : len(ids)] = 1
            token_type_ids[index, : len(ids)] = torch.tensor(segments)
        batch = {"input_ids": input_ids, "attention_mask": attention_mask}
        if self.layout.segments:
            batch["token_type_ids"] = token_type_ids
        batch = {name: tensor.unflatten(0, (len(rows), -1)) for name, tensor in batch.items()}
        labels = torch.tensor([row["label"] for row in rows])
        return batch if (labels == UNKNOWN).any() else {**batch, "labels": labels}
