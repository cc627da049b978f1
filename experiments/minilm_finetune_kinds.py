"""The kinds of tasks of `minilm_finetune.py`: the head, how rows become its inputs, and how its outputs are scored."""

import re
import string
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from minilm_contenders import SOURCE_LENGTH
from minilm_finetune_tasks import Row, Task
from tasks.metrics import compute
from transformers import (
    DataCollatorForMultipleChoice,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

Features = dict[str, Any]
# Tokens of a batch that is scored, padding included.
_BATCH = 4096
# The longest answer, in tokens.
_ANSWER = 30


class Kind(ABC):
    """A kind of task.

    Args:
        task: what is trained.
        tokenizer: of all contenders.
        length: tokens at which a text is cut: those of the task, or the model's positions if they are fewer.
    """

    head: str  # the end of the class's name
    trained: tuple[str, ...] = ("classifier",)  # the head's modules
    targets = ["labels"]
    rate = 1e-3  # peak learning rate
    collator = DataCollatorWithPadding

    def __init__(self, task: Task, tokenizer: PreTrainedTokenizerBase, length: int) -> None:
        self.task, self.tokenizer, self.length = task, tokenizer, length
        self.collate = self.collator(tokenizer)

    def fields(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Fields of the model's config."""
        return {}

    @abstractmethod
    def encode(self, row: Row) -> Features:
        """The inputs of a row, with labels."""

    @abstractmethod
    def scores(self, rows: Sequence[Row], features: Sequence[Features], outputs: list[Any]) -> dict[str, float]:
        """Metrics x 100, from the outputs of each row."""

    def baseline(self, rows: Sequence[Row]) -> float | None:
        """The metric of a guess without reading; `None` where there is no sensible one."""
        return 0.0

    def cut(self, *texts: str, **options: Any) -> Features:
        """Ids of a text or a pair of texts."""
        return dict(self.tokenizer(*texts, truncation=True, max_length=self.length, **options))

    def can_teach(self, features: Features) -> bool:
        """Whether a row has a label within the cut."""
        return True

    def size(self, features: Features) -> int:
        """Tokens of a row."""
        return len(features["input_ids"])

    @torch.no_grad()
    def evaluate(self, model: PreTrainedModel, rows: Sequence[Row]) -> dict[str, float]:
        """Score a model on rows, which are read in batches of similar length."""
        features = [self.encode(row) for row in rows]
        found: list[Any] = [None] * len(rows)
        for batch in batches([self.size(one) for one in features]):
            inputs = self.collate([{name: features[index][name] for name in self.columns} for index in batch])
            outputs = model(**{name: value for name, value in inputs.items() if name not in self.targets})
            for index, output in zip(batch, self.split(outputs), strict=True):
                found[index] = output
        return self.scores(rows, features, found)

    @property
    def columns(self) -> list[str]:
        """The names of the model's inputs and of its targets."""
        return [*self.tokenizer.model_input_names, *self.targets]

    def split(self, outputs: Any) -> list[Any]:
        """A batch of outputs, row by row."""
        return list(outputs.logits.numpy())


def batches(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Indices of rows of similar length, for batches of about `_BATCH` tokens."""
    batch: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        batch.append(index)
        if (len(batch) + 1) * sizes[batch[0]] > _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


class Classes(Kind):
    """A class for a text or a pair."""

    head = "ForSequenceClassification"

    def names(self, rows: Sequence[Row]) -> tuple[str, ...]:
        """The names of the classes: the task's, or those in the rows."""
        return self.task.labels or tuple(
            name for _, name in sorted({row["label"]: row["name"] for row in rows}.items())
        )

    def fields(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Names of the classes, and mean pooling, which the sentence encoder was trained with."""
        return {**labelled(self.names(rows)), "classifier_pooling": "mean"}

    def encode(self, row: Row) -> Features:
        """One or two texts and their class."""
        return {**self.cut(*row["texts"]), "labels": row["label"]}

    def scores(self, rows: Sequence[Row], features: Sequence[Features], outputs: list[Any]) -> dict[str, float]:
        """Accuracy, F1 (of class 1 if there are two, else the classes' mean) and Matthews' correlation."""
        guesses, labels = np.stack(outputs).argmax(-1), np.array([row["label"] for row in rows])
        f1 = "f1" if len(outputs[0]) == 2 else "macro_f1"
        return percent(compute(["accuracy", f1, "matthews_correlation"], guesses, labels))

    def baseline(self, rows: Sequence[Row]) -> float | None:
        """The share of the most frequent class."""
        most = Counter(row["label"] for row in rows).most_common(1)[0][1]
        return 100 * most / len(rows) if self.task.metric == "accuracy" else 0.0


class Numbers(Classes):
    """A number for a pair."""

    def fields(self, rows: Sequence[Row]) -> dict[str, Any]:
        """One output."""
        return {"num_labels": 1, "problem_type": "regression", "classifier_pooling": "mean"}

    def encode(self, row: Row) -> Features:
        """Two texts and a number."""
        return {**self.cut(*row["texts"]), "labels": float(row["label"])}

    def scores(self, rows: Sequence[Row], features: Sequence[Features], outputs: list[Any]) -> dict[str, float]:
        """Correlations."""
        labels = np.array([row["label"] for row in rows], dtype=float)
        return percent(compute(["spearmanr", "pearson"], np.stack(outputs)[:, 0].astype(float), labels))


class Choices(Kind):
    """A question with options, and an article or none."""

    head = "ForMultipleChoice"
    collator = DataCollatorForMultipleChoice

    def fields(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Mean pooling."""
        return {"classifier_pooling": "mean"}

    def encode(self, row: Row) -> Features:
        """A pair for each option; what an article's end loses to the length is the article's."""
        # As in finetune_race.py and finetune_csqa.py: a question and its option first, and CSQA's question before it.
        has_article = "Q: " not in row["shared"][:3]
        pairs = [(text, row["shared"]) if has_article else (row["shared"], text) for text in row["choices"]]
        options = {"truncation": "only_second" if has_article else True, "max_length": self.length}
        encoded = self.tokenizer([first for first, _ in pairs], [second for _, second in pairs], **options)
        return {**encoded, "labels": row["label"]}

    def size(self, features: Features) -> int:
        """Tokens of all options."""
        return sum(map(len, features["input_ids"]))

    def scores(self, rows: Sequence[Row], features: Sequence[Features], outputs: list[Any]) -> dict[str, float]:
        """Accuracy."""
        labels = np.array([row["label"] for row in rows])
        return percent(compute(["accuracy"], np.stack(outputs).argmax(-1), labels))

    def baseline(self, rows: Sequence[Row]) -> float | None:
        """Chance."""
        return 100 / len(rows[0]["choices"])


class Words(Kind):
    """A label for each word."""

    head = "ForTokenClassification"
    rate = 3e-4  # with 1e-3, every word stays "O"
    collator = DataCollatorForTokenClassification

    def fields(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Names of the labels."""
        return labelled(self.task.labels)

    def encode(self, row: Row) -> Features:
        """Words; the first token of each has its label."""
        encoded = self.tokenizer(row["words"], is_split_into_words=True, truncation=True, max_length=self.length)
        words = encoded.word_ids()
        firsts = [word if word != before else None for word, before in zip(words, [None, *words], strict=False)]
        return {**encoded, "labels": [-100 if word is None else row["label"][word] for word in firsts]}

    def scores(self, rows: Sequence[Row], features: Sequence[Features], outputs: list[Any]) -> dict[str, float]:
        """F1 of whole entities. A word without a token, or behind the cut, has the label "O"."""
        found, right, both = Counter(), 0, 0
        for row, own, logits in zip(rows, features, outputs, strict=True):
            places = [place for place, label in enumerate(own["labels"]) if label != -100]
            guesses = self.word_guesses(row, own, logits[places].argmax(-1))
            mine, gold = (entities([self.task.labels[label] for label in labels]) for labels in (guesses, row["label"]))
            both, right = both + len(mine & gold), right + len(gold)
            found["mine"] += len(mine)
        precision, recall = (both / count if count else 0.0 for count in (found["mine"], right))
        f1 = 2 * precision * recall / (precision + recall) if both else 0.0
        return percent({"f1": f1, "precision": precision, "recall": recall})

    def word_guesses(self, row: Row, features: Features, guesses: Sequence[int]) -> list[int]:
        """A label for each word."""
        words = self.tokenizer(row["words"], is_split_into_words=True, truncation=True, max_length=self.length)
        seen = sorted({word for word in words.word_ids() if word is not None})
        labels = [0] * len(row["words"])
        for word, guess in zip(seen, guesses, strict=True):
            labels[word] = int(guess)
        return labels


class Answers(Kind):
    """An answer that is a part of a text. The question comes first, so its tokens are marked."""

    head = "ForQuestionAnswering"
    trained = ("qa_outputs",)
    targets = ["start_positions", "end_positions"]

    def encode(self, row: Row) -> Features:
        """The question and the text, first and last token of the answer, and where the text's tokens are in it."""
        encoded = self.tokenizer(
            row["question"],
            row["context"],
            truncation="only_second",
            max_length=self.length,
            return_offsets_mapping=True,
        )
        offsets = encoded.pop("offset_mapping")
        first = row["answers"]["answer_start"][0]
        last = first + len(row["answers"]["text"][0]) - 1
        ends = (encoded.char_to_token(place, sequence_index=1) for place in (first, last))
        # Beyond the input if the answer was cut off.
        start, end = (self.length if place is None else place for place in ends)
        places = [own if part == 1 else None for own, part in zip(offsets, encoded.sequence_ids(), strict=True)]
        return {**encoded, "start_positions": start, "end_positions": end, "places": places}

    def can_teach(self, features: Features) -> bool:
        """Whether the answer is within the cut; a batch without any has no loss."""
        return max(features["start_positions"], features["end_positions"]) < self.length

    def split(self, outputs: Any) -> list[Any]:
        """Both rows of logits."""
        return list(zip(outputs.start_logits, outputs.end_logits, strict=True))

    def scores(self, rows: Sequence[Row], features: Sequence[Features], outputs: list[Any]) -> dict[str, float]:
        """SQuAD's exact match and F1 of words, the best over the right answers; F1 by the source's length, too."""
        exact, f1, parts = [], [], {"f1_short": [], "f1_long": []}
        for row, own, logits in zip(rows, features, outputs, strict=True):
            guess = best_answer(row["context"], own["places"], *logits)
            exact.append(max(plain_words(guess) == plain_words(text) for text in row["answers"]["text"]))
            f1.append(max(overlap(guess, text) for text in row["answers"]["text"]))
            parts["f1_short" if self.size(own) <= SOURCE_LENGTH else "f1_long"].append(f1[-1])
        found = {"f1": f1, "exact_match": exact, **{name: values for name, values in parts.items() if values}}
        return percent({name: float(np.mean(values)) for name, values in found.items()})

    def baseline(self, rows: Sequence[Row]) -> float | None:
        """None."""
        return None


def best_answer(context: str, places: list[Any], starts: torch.Tensor, ends: torch.Tensor) -> str:
    """The most probable part of the context, of at most `_ANSWER` tokens."""
    count = len(places)
    outside = torch.tensor([place is None for place in places])
    sums = starts[:count, None].masked_fill(outside[:, None], -1e9) + ends[:count].masked_fill(outside, -1e9)
    allowed = torch.ones(count, count, dtype=torch.bool).triu().tril(_ANSWER - 1)
    first, last = divmod(int(sums.masked_fill(~allowed, -4e9).argmax()), count)
    return "" if places[first] is None or places[last] is None else context[places[first][0] : places[last][1]]


def plain_words(text: str) -> list[str]:
    """Words in lower case without articles and punctuation, as in SQuAD's own evaluation."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def overlap(guess: str, right: str) -> float:
    """F1 of the words of an answer."""
    mine, gold = plain_words(guess), plain_words(right)
    both = sum((Counter(mine) & Counter(gold)).values())
    return 2 * both / (len(mine) + len(gold)) if both else float(mine == gold)


def entities(labels: Sequence[str]) -> set[tuple[str, int, int]]:
    """The entities in B-/I- labels, as type, first word and the word after the last.

    As in CoNLL's evaluation, an I- after another type, or after no entity, begins one.
    """
    found, start = set(), None
    for place, label in enumerate([*labels, "O"]):
        kind = label[2:]
        if start is not None and (label[0] != "I" or kind != start[0]):
            found.add((*start, place))
            start = None
        if label != "O" and start is None:
            start = (kind, place)
    return found


def labelled(names: Sequence[str]) -> dict[str, Any]:
    """Fields of a config that name the classes."""
    return {"id2label": dict(enumerate(names)), "label2id": {name: label for label, name in enumerate(names)}}


def percent(scores: dict[str, float]) -> dict[str, float]:
    """Scores x 100."""
    return {name: 100 * value for name, value in scores.items()}


KINDS = {"classes": Classes, "numbers": Numbers, "choices": Choices, "words": Words, "answers": Answers}
