"""Classification and regression of texts or pairs of texts: the tasks of GLUE, and own data."""

import dataclasses
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common.options import did_you_mean
from common.tables import read_table, require_text
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedTokenizerBase

from luna_hf.scripting import UserError, portable
from tasks.arguments import FinetuneArguments, option
from tasks.files import Encoded, encode_rows, load_splits, require_columns, tokenize
from tasks.labels import (
    MULTI_LABEL,
    REGRESSION,
    SINGLE_LABEL,
    ClassOrder,
    listed,
    numbers_of_tables,
    order_of,
    read_labels,
)
from tasks.metrics import compute
from tasks.task import Task

# Folders whose names say nothing of the data in them.
_PLACES = {"data", "datasets", "input", "inputs", "output", "outputs", "tmp"}
# What a file of training rows is called, alone or before or after the name of the data.
_SPLIT = r"(^|[-_. ]+)(train|training|data)([-_. ]\d+[-_. ]of[-_. ]\d+)?$|^(train|training)[-_. ]+"

HUB_NAME = "nyu-mll/glue"


@dataclass(frozen=True)
class TextTask:
    """A task of GLUE, or own data.

    Attributes:
        title: for people.
        columns: of the texts.
        labels: names in the Hub's order; none for a number, `None` for what the labels themselves tell.
        metrics: names of `metrics.METRICS`; by default those of the kind of problem. The first one chooses the
            checkpoint, or in GLUE the `mean` of two.
        answers: names of the leaderboard's files, one per test split.
        named: whether files of answers hold the labels' names and not their indices.
        development, tests: the splits.
    """

    title: str
    columns: tuple[str, ...] = ("text",)
    labels: tuple[str, ...] | None = None
    metrics: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    named: bool = False
    development: tuple[str, ...] = ("validation",)
    tests: tuple[str, ...] = ("test",)


_PAIR, _ENTAILMENT = ("sentence1", "sentence2"), ("entailment", "not_entailment")
_ONE, _BOTH = ("accuracy",), ("accuracy", "f1")
TASKS = {
    "cola": TextTask("GLUE CoLA", ("sentence",), ("unacceptable", "acceptable"), ("matthews_correlation",), ("CoLA",)),
    "sst2": TextTask("GLUE SST-2", ("sentence",), ("negative", "positive"), _ONE, ("SST-2",)),
    "mrpc": TextTask("GLUE MRPC", _PAIR, ("not_equivalent", "equivalent"), _BOTH, ("MRPC",)),
    "qqp": TextTask("GLUE QQP", ("question1", "question2"), ("not_duplicate", "duplicate"), _BOTH, ("QQP",)),
    "stsb": TextTask("GLUE STS-B", _PAIR, (), ("pearson", "spearmanr"), ("STS-B",)),
    "mnli": TextTask(
        "GLUE MNLI",
        ("premise", "hypothesis"),
        ("entailment", "neutral", "contradiction"),
        _ONE,
        ("MNLI-m", "MNLI-mm"),
        named=True,
        development=("validation_matched", "validation_mismatched"),
        tests=("test_matched", "test_mismatched"),
    ),
    "qnli": TextTask("GLUE QNLI", ("question", "sentence"), _ENTAILMENT, _ONE, ("QNLI",), named=True),
    "rte": TextTask("GLUE RTE", _PAIR, _ENTAILMENT, _ONE, ("RTE",), named=True),
    "wnli": TextTask("GLUE WNLI", _PAIR, _ENTAILMENT[::-1], _ONE, ("WNLI",)),
}
# Metrics of own data, by the problem and whether a row has several labels or numbers.
_METRICS = {
    (SINGLE_LABEL, False): ("accuracy", "macro_f1", "matthews_correlation"),
    (MULTI_LABEL, True): ("micro_f1", "macro_f1", "exact_match"),
    (REGRESSION, False): ("pearson", "spearmanr", "mse"),
    (REGRESSION, True): ("mse",),
}


@dataclass
class GlueArguments(FinetuneArguments):
    """Options of `finetune_glue.py`."""

    task_name: str | None = option(None, f"Task of GLUE: {', '.join(TASKS)}.")
    train_file: str | None = option(None, "Own data: csv, tsv, jsonl, json or parquet.")
    validation_file: str | None = option(None, "Own data by which the checkpoint is chosen.")
    test_file: str | None = option(None, "Own data to predict; scored if they have labels.")
    train_split: str = option("train", "Split to train on.")
    validation_split: str | None = option(
        None, "Split that chooses the checkpoint; by default validation (MNLI: both)."
    )
    test_split: str | None = option(None, "Split to predict; by default test.")
    text_columns: list[str] = option([], "Column of texts, or two for pairs; by default text (own data).")
    label_column: str = option(
        "label",
        "Column of labels: texts or whole numbers are classes, other numbers a regression, lists of either several "
        "labels per row. 1.0 counts as a whole number.",
    )
    regression: bool = option(False, "Take whole numbers in own data for the targets of a regression, not for classes.")
    class_names: list[str] = option([], "Names of the classes of own data with labels 0, 1, ..., in that order.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task_name is not None and self.task_name not in TASKS:
            raise UserError(f"GLUE has no task {self.task_name!r}.{did_you_mean(self.task_name, TASKS)}")
        if sum(map(bool, (self.task_name, self.class_names, self.regression))) > 1:
            raise UserError("Set at most one of --task_name, --class_names and --regression: each states the labels.")
        if self.train_file or self.validation_file or self.test_file:
            if self.dataset_name:
                raise UserError("Set either --dataset_name or --train_file, not both.")
            if not (self.train_file and self.validation_file):
                raise UserError("Own data need both --train_file and --validation_file.")
            if self.dataset_config or self.train_split != "train" or self.validation_split or self.test_split:
                raise UserError("--train_file has no splits or parts: leave out --dataset_config and --*_split.")
        elif not (self.task_name or self.dataset_name):
            raise UserError("Set --task_name, or for own data --train_file and --validation_file, or --dataset_name.")
        if self.validation_split == self.train_split:
            raise UserError(f"--validation_split is the split to train on, {self.train_split}. Name another one.")
        if len(set(self.class_names)) < len(self.class_names):
            raise UserError(f"--class_names names a class twice: {', '.join(self.class_names)}.")
        if len(self.text_columns) > 2:
            raise UserError(f"--text_columns takes one or two columns, not {len(self.text_columns)}.")
        if len({*self.text_columns, self.label_column}) <= len(self.text_columns):
            raise UserError(f"A column is named twice: {', '.join([*self.text_columns, self.label_column])}.")

    def spec(self) -> TextTask:
        """The row of `TASKS`, or one of own data, with what the options replace."""
        labels = () if self.regression else tuple(self.class_names) or None
        found = TASKS[self.task_name] if self.task_name else TextTask(own_name(self), labels=labels)
        given = {"columns": self.text_columns, "development": [self.validation_split], "tests": [self.test_split]}
        return dataclasses.replace(found, **{name: tuple(value) for name, value in given.items() if any(value)})


class TextClassification(Task):
    """Classes, several labels per row, or numbers, for texts or pairs of texts."""

    auto_class = AutoModelForSequenceClassification
    pipeline_tag = "text-classification"

    def __init__(self, arguments: GlueArguments) -> None:
        self.spec, self.is_glue = arguments.spec(), arguments.task_name is not None
        self.label_column, self.title = arguments.label_column, self.spec.title
        self.name = arguments.task_name or re.sub(r"[^\w.-]+", "-", self.title)
        self._load(arguments)
        for split, rows in self.splits.items():
            labels = () if split in self.tests else (self.label_column,)
            require_columns(rows, (*self.spec.columns, *labels), self.sources[split])
            for column in self.spec.columns:
                require_text(rows, column, self.sources[split])
        # Missing labels are -1 in GLUE, unless the data have such a class.
        self.missing = (None, -1) if -1 not in self.train[self.label_column] else (None,)
        used = {split: rows for split, rows in self.splits.items() if split not in self.tests or self._labelled(rows)}
        labelled = {self.sources[split]: rows for split, rows in used.items()}
        self.labels = read_labels(labelled, self.label_column, self.spec.labels)
        self.problem_type = self.labels.problem_type
        self.metrics = self.spec.metrics or _METRICS[self.problem_type, self.labels.several]
        self.main_metric = "mean" if self.is_glue and len(self.metrics) > 1 else self.metrics[0]
        self.greater_is_better = self.main_metric != "mse"
        self.notes.append(self._label_note())

    def _load(self, arguments: GlueArguments) -> None:
        """Read the splits from files, a folder or the Hub."""
        train, development, tests = "train", self.spec.development, self.spec.tests
        if arguments.train_file:
            files = {train: arguments.train_file, "validation": arguments.validation_file, "test": arguments.test_file}
            sources = {split: path for split, path in files.items() if path}
            rows = {split: read_table([Path(path)]) for split, path in sources.items()}
            rows = numbers_of_tables(rows, self.label_column, self.spec.labels == ())
            super().__init__(rows, sources, train, ["validation"], ["test"])
        else:
            train, name = arguments.train_split, arguments.dataset_name or HUB_NAME
            config = arguments.dataset_config or arguments.task_name
            required = [(train,), development, *([tests] if arguments.test_split else [])]
            hint = " Name another with --train_split, --validation_split or --test_split."
            rows = load_splits(name, config, [train, *development, *tests], required, hint)
            rows = numbers_of_tables(rows, self.label_column, self.spec.labels == ())
            super().__init__(rows, name, train, development, tests, config)
            missing = [split for split in development if split not in rows]
            self.notes += [f"{portable(name)} has no split {split}: it is not evaluated." for split in missing]
        source = f"from {self.dataset_name}" if self.dataset_name else "local files"
        self.dataset = (
            f"{self.title}, {source}: texts in `{'`, `'.join(self.spec.columns)}`, labels in `{self.label_column}`; "
            f"{len(self.train):,} training rows."
        )

    def _labelled(self, rows: Dataset) -> bool:
        """Whether a split has labels; GLUE's test splits have -1 in every row."""
        column = self.label_column
        return column in rows.column_names and not all(label in self.missing for label in rows[column])

    def _label_note(self) -> str:
        """What the labels were taken for."""
        if self.problem_type == REGRESSION:
            return f"`{self.label_column}` holds numbers: a regression."
        note = f"{len(self.labels.names)} labels: {listed(self.labels.names)}."
        if getattr(self.train.features[self.label_column], "dtype", "").startswith("float"):
            note += " They are whole numbers, so they were taken for classes; for a regression set --regression true."
        return note

    def model_fields(self) -> dict[str, Any]:
        """Number, names and type of the labels."""
        fields = {"num_labels": self.labels.width, "problem_type": self.problem_type}
        if names := dict(enumerate(self.labels.names)):
            fields |= {"id2label": names, "label2id": {name: index for index, name in names.items()}}
        return fields

    def class_order(self, config: PreTrainedConfig, name: str) -> ClassOrder:
        """The order that a checkpoint knows."""
        return order_of(config, self.labels, name)

    def encode(self, rows: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Encoded:
        """Texts or pairs, and labels if the split has them."""
        labelled = self._labelled(rows)

        def encode(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
            texts = [batch[column] for column in self.spec.columns]
            made = tokenize(tokenizer, *texts, max_length=max_length, truncation="longest_first")
            made["length"] = [sum(map(len, row)) for row in zip(*texts, strict=True)]
            return {**made, "labels": self.labels.encode(batch[self.label_column])} if labelled else made

        return encode_rows(rows, encode)

    def answers(self, logits: np.ndarray) -> np.ndarray:
        """Classes (b,), zeros and ones (b, labels), or numbers (b,) or (b, targets)."""
        if self.problem_type == SINGLE_LABEL:
            return logits.argmax(-1)
        if self.problem_type == MULTI_LABEL:
            return (logits > 0).astype(int)
        return logits if self.labels.several else logits[:, 0]

    def scores(self, split: str, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """GLUE's metrics, or those of the kind of problem; where GLUE has two, also the `mean` of its leaderboard."""
        values = compute(self.metrics, self.answers(logits), labels)
        return {**values, "mean": sum(values.values()) / len(values)} if self.main_metric == "mean" else values

    def write_predictions(self, folder: Path, split: str, logits: np.ndarray) -> Path:
        """A table of index and prediction: for GLUE with the name and in the form that its leaderboard expects."""
        path = folder / f"{dict(zip(self.spec.tests, self.spec.answers, strict=False)).get(split, split)}.tsv"
        lines = [f"{index}\t{self._written(answer)}\n" for index, answer in enumerate(self.answers(logits))]
        path.write_text("".join(["index\tprediction\n", *lines]), encoding="utf-8", newline="")
        return path

    def _written(self, answer: Any) -> str:
        names = self.labels.names
        if self.problem_type == MULTI_LABEL:
            return ",".join(name for name, chosen in zip(names, answer, strict=True) if chosen)
        if self.problem_type == SINGLE_LABEL:
            return names[answer] if self.spec.named or not self.is_glue else str(answer)
        if self.is_glue:  # STS-B's scores range from 0 to 5
            return f"{np.clip(answer, 0, 5):.3f}"
        return ",".join(map(str, np.atleast_1d(answer)))  # as few digits as give the same float32

    def usage(self, name: str, trust: str) -> str:
        """A pipeline; for a regression it must return the number itself."""
        text = '"A text."' if len(self.spec.columns) == 1 else '{"text": "One text.", "text_pair": "Another one."}'
        more = {REGRESSION: ', function_to_apply="none"', MULTI_LABEL: ", top_k=None"}.get(self.problem_type, "")
        return (
            "from transformers import pipeline\n\n"
            "# The name of this repository on the Hub, or the folder that holds this card.\n"
            f'classify = pipeline("text-classification", {name}{trust})\nclassify({text}{more})'
        )


def own_name(arguments: GlueArguments) -> str:
    """The name of own data: that of the data set, or of the file of training rows without its split.

    `reviews-train.csv` and `reviews/train.csv` are called reviews. The user's home has no name, nor have the folder in
    which the command runs and those of `_PLACES`.
    """
    path = Path(os.path.normpath(arguments.train_file or arguments.dataset_name))
    if not arguments.train_file:
        return portable(path.name) if path.name not in ("", "..") else "own data"
    name, folder = re.sub(_SPLIT, "", path.stem, flags=re.IGNORECASE), path.parent
    is_named = folder.name not in ("", "..", *_PLACES) and folder.resolve() not in (Path.cwd(), Path.home().resolve())
    return portable(name or folder.name) if name or is_named else "own data"
