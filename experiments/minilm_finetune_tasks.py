"""The tasks of `minilm_finetune.py`: which rows, how many, how long, and how often; from a folder of public data sets.

A row is a dict. Its keys by kind of task:

    classes, numbers    texts (one or two), label
    choices             choices, shared, label (see tasks.multiple_choice)
    words               words, label (one for each word)
    answers             id, question, context, answers (`text` and `answer_start`, as in SQuAD)
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import running  # noqa: F401  # finds the packages of training
from minilm_tasks import read
from tasks.multiple_choice import csqa_row, race_row
from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]
Reader = Callable[[Path, str, PreTrainedTokenizerBase], list[Row]]

_ENTITIES = ("corporation", "creative-work", "group", "location", "person", "product")
WNUT = ("O", *(f"{place}-{entity}" for entity in _ENTITIES for place in "BI"))
_ENTAILS = ("entailment", "not_entailment")
HEADING, HIDDEN, REVIEW = 2000, 2000, 400


@dataclass(frozen=True)
class Task:
    """What is trained and scored.

    Args:
        kind: of the model's head and of the rows.
        read: rows of the split "train" or "test".
        train, test: the most rows, drawn with a fixed seed; `None` takes all.
        epochs: passes over the training rows.
        length: tokens at which a text is cut.
        metric: what the tables show, by its name in the scores; x 100.
        labels: names of the classes; empty: those of the rows' `name`.
        is_long: whether texts are beyond the source's 512 positions.
        batch: rows of an update.
        split: what is scored, by its name in the data set.
        after: task whose finished run training starts from, with its head.
    """

    title: str
    kind: Literal["classes", "numbers", "choices", "words", "answers"]
    read: Reader
    train: int | None
    test: int | None
    epochs: int
    length: int = 256
    metric: str = "accuracy"
    labels: tuple[str, ...] = ()
    is_long: bool = False
    batch: int = 32
    split: str = "validation"
    after: str = ""


def sampled(rows: list[Row], most: int | None) -> list[Row]:
    """At most so many rows, the same in every run."""
    return rows if most is None or most >= len(rows) else random.Random(0).sample(rows, most)


# ---- readers ----


def texts(
    data: Path, split: str, _: PreTrainedTokenizerBase, files: dict[str, str], columns: tuple[str, ...]
) -> list[Row]:
    """Texts, or pairs, with a class or a number."""
    return [
        {"texts": tuple(row[column] for column in columns), "label": row["label"], "name": row.get("label_text")}
        for row in read(data, files[split])
    ]


def glue(name: str, *columns: str, test: str = "validation") -> Reader:
    """A task of GLUE, scored on its validation split."""
    files = {"train": f"glue/{name}/train", "test": f"glue/{name}/{test}"}
    return partial(texts, files=files, columns=columns)


def intents(name: str, test: str) -> Reader:
    """Requests and what they ask for."""
    return partial(texts, files={"train": f"{name}/train", "test": f"{name}/{test}"}, columns=("text",))


def long_reviews(data: Path, split: str, tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    """IMDB: reviews of more than 400 tokens."""
    found = texts(data, split, tokenizer, {"train": "imdb/train", "test": "imdb/test"}, ("text",))
    rows = [row for row in found if len(row["texts"][0]) > 3 * REVIEW]  # surely fewer tokens: spares the tokenizer
    counts = tokenizer([row["texts"][0] for row in rows], truncation=False, verbose=False)["input_ids"]
    return [row for row, ids in zip(rows, counts, strict=True) if len(ids) > REVIEW]


def contracts(data: Path, split: str, tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    """Contracts and their type, without the heading, which often names it."""
    files = {"train": "cuad_contract_type/train", "test": "cuad_contract_type/validation"}
    rows = texts(data, split, tokenizer, files, ("text",))
    return [{**row, "texts": (row["texts"][0][HEADING:],)} for row in rows]


def common_sense(data: Path, split: str, _: PreTrainedTokenizerBase) -> list[Row]:
    """CommonsenseQA."""
    return [csqa_row(row) for row in read(data, f"commonsense_qa/{'train' if split == 'train' else 'validation'}")]


def race(data: Path, split: str, _: PreTrainedTokenizerBase) -> list[Row]:
    """RACE, both levels."""
    return [race_row(row) for level in ("middle", "high") for row in read(data, f"race/{level}/{split}")]


def entities(data: Path, split: str, _: PreTrainedTokenizerBase) -> list[Row]:
    """WNUT17, scored on its validation split."""
    rows = read(data, f"wnut17/{'train' if split == 'train' else 'validation'}")
    return [{"words": row["tokens"], "label": row["ner_tags"]} for row in rows]


def questions(data: Path, split: str, _: PreTrainedTokenizerBase) -> list[Row]:
    """SQuAD and new articles of Wikipedia (SquadShifts), whose validation split is scored with as much of SQuAD's."""
    other = "train" if split == "train" else "validation"
    new = read(data, f"squadshifts_new_wiki/{other}")
    known = read(data, f"squad/{other}")
    return new + (known if split == "train" else sampled(known, len(new)))


def hidden_questions(data: Path, split: str, tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    """The same questions, each with its paragraph among others of its article, about 2,000 tokens together."""
    rows = questions(data, split, tokenizer)
    articles: dict[str, dict[str, int]] = {}
    for row in rows:
        articles.setdefault(row["title"], {})[row["context"]] = 0
    for paragraphs in articles.values():
        ids = tokenizer(list(paragraphs), truncation=False, add_special_tokens=False, verbose=False)["input_ids"]
        paragraphs.update((text, len(own)) for text, own in zip(paragraphs, ids, strict=True))
    return [hide(row, articles[row["title"]], random.Random(row["id"])) for row in rows]


def hide(row: Row, paragraphs: dict[str, int], draw: random.Random) -> Row:
    """A row whose context is its paragraph at a random place among others, given the tokens of each."""
    own, others = row["context"], [text for text in paragraphs if text != row["context"]]
    draw.shuffle(others)
    kept, count = [], paragraphs[own]
    for text in others:
        if count + paragraphs[text] <= HIDDEN:
            kept.append(text)
            count += paragraphs[text]
    place = draw.randint(0, len(kept))
    before = "".join(f"{text}\n" for text in kept[:place])
    starts = [start + len(before) for start in row["answers"]["answer_start"]]
    context = "\n".join([*kept[:place], own, *kept[place:]])
    return {**row, "context": context, "answers": {"text": row["answers"]["text"], "answer_start": starts}}


# ---- table ----

_PAIR, _REVIEW = ("sentence1", "sentence2"), ("negative", "positive")
_IMDB = Task(
    "IMDB, reviews of over 400 tokens, at 512",
    "classes",
    long_reviews,
    1500,
    1000,
    1,
    512,
    labels=_REVIEW,
    batch=8,
    split="test",
)
_SQUAD = Task("SQuAD and SquadShifts", "answers", questions, 6000, 2000, 1, 384, "f1")

TASKS = {
    "sst2": Task("SST-2", "classes", glue("sst2", "sentence"), 12000, None, 2, labels=_REVIEW),
    "mrpc": Task("MRPC", "classes", glue("mrpc", *_PAIR), None, None, 3, labels=("not_equivalent", "equivalent")),
    "qnli": Task("QNLI", "classes", glue("qnli", "question", "sentence"), 6000, 2000, 2, labels=_ENTAILS),
    "qqp": Task(
        "QQP", "classes", glue("qqp", "question1", "question2"), 6000, 2000, 2, labels=("not_duplicate", "duplicate")
    ),
    "mnli": Task(
        "MNLI, matched",
        "classes",
        glue("mnli", "premise", "hypothesis", test="validation_matched"),
        *(6000, 2000, 2),
        labels=("entailment", "neutral", "contradiction"),
    ),
    "rte": Task("RTE", "classes", glue("rte", *_PAIR), None, None, 3, labels=_ENTAILS),
    "cola": Task(
        "CoLA",
        "classes",
        glue("cola", "sentence"),
        *(5000, None, 3),
        metric="matthews_correlation",
        labels=("unacceptable", "acceptable"),
    ),
    "stsb": Task("STS-B", "numbers", glue("stsb", *_PAIR), None, None, 3, metric="spearmanr"),
    "banking77": Task("Banking77", "classes", intents("banking77", "test"), None, 2000, 4, split="test"),
    "clinc150": Task("CLINC150", "classes", intents("clinc150", "validation"), None, 2000, 3),
    "csqa": Task("CommonsenseQA", "choices", common_sense, None, None, 2, batch=16),
    "race": Task("RACE", "choices", race, 1500, 1000, 1, 448, batch=8, split="test"),
    "wnut17": Task("WNUT17", "words", entities, None, None, 5, metric="f1", labels=WNUT),
    "squad": replace(_SQUAD, batch=16),
    "squad_long": replace(
        _SQUAD,
        title="SQuAD and SquadShifts, hidden in 2,000 tokens",
        read=hidden_questions,
        train=3000,
        test=500,
        length=2304,
        is_long=True,
        batch=8,
        after="squad",
    ),
    "imdb_512": _IMDB,
    "imdb_2048": replace(_IMDB, title="IMDB, reviews of over 400 tokens, at 2,048", length=2048, is_long=True),
    "contracts": Task("contract types", "classes", contracts, None, None, 3, 4096, is_long=True, batch=8),
}
