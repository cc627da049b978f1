r"""Finetune an encoder on a task of GLUE, or on your own texts and labels.

    python training/finetune_glue.py --model_name_or_path MODEL --task_name sst2 --output_dir outputs/sst2
    python training/finetune_glue.py training/recipes/finetune_glue/paper.yaml --model_name_or_path MODEL OTHER_MODEL \
        --task_name sst2 --output_dir outputs/sweep
    python training/finetune_glue.py --model_name_or_path MODEL --train_file a.csv --validation_file b.csv \
        --output_dir outputs/own

After Ctrl-C or a kill, the same command continues from the last checkpoint (the end of an epoch).
"""

import csv
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
from common.options import did_you_mean
from datasets import Dataset
from tasks.arguments import FinetuneArguments, option
from tasks.files import (
    Encoded,
    encode_rows,
    load_splits,
    read_files,
    require_columns,
    require_text,
    split_names,
    tokenize,
)
from tasks.labels import MULTI_LABEL, REGRESSION, SINGLE_LABEL, listed, read_labels
from tasks.runs import Command
from tasks.task import METRICS, Task
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from luna_hf.scripting import UserError, portable

HUB_NAME = "nyu-mll/glue"
# The kind of problem, which names its metrics, and the metric that chooses the checkpoint.
KINDS = {SINGLE_LABEL: ("single_label", "accuracy"), MULTI_LABEL: ("multi_label", "micro_f1")}


@dataclass(frozen=True)
class GlueTask:
    """A task of GLUE.

    Attributes:
        title: for people.
        columns: of the texts.
        labels: names in the Hub's order; none for a number from 0 to 5.
        answers: names of the leaderboard's files, one per test split.
        named: whether these files hold the labels' names and not their indices.
        main_metric: that chooses the checkpoint; `mean` of two.
        development, tests: the splits.
    """

    title: str
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    answers: tuple[str, ...]
    named: bool = False
    main_metric: str = "accuracy"
    development: tuple[str, ...] = ("validation",)
    tests: tuple[str, ...] = ("test",)


_PAIR, _MEAN, _ENTAILMENT = ("sentence1", "sentence2"), {"main_metric": "mean"}, ("entailment", "not_entailment")
_COLA = {"main_metric": "matthews_correlation"}
_MNLI = {
    "development": ("validation_matched", "validation_mismatched"),
    "tests": ("test_matched", "test_mismatched"),
}
TASKS = {
    "cola": GlueTask("GLUE CoLA", ("sentence",), ("unacceptable", "acceptable"), ("CoLA",), **_COLA),
    "sst2": GlueTask("GLUE SST-2", ("sentence",), ("negative", "positive"), ("SST-2",)),
    "mrpc": GlueTask("GLUE MRPC", _PAIR, ("not_equivalent", "equivalent"), ("MRPC",), **_MEAN),
    "qqp": GlueTask("GLUE QQP", ("question1", "question2"), ("not_duplicate", "duplicate"), ("QQP",), **_MEAN),
    "stsb": GlueTask("GLUE STS-B", _PAIR, (), ("STS-B",), **_MEAN),
    "mnli": GlueTask(
        "GLUE MNLI",
        ("premise", "hypothesis"),
        ("entailment", "neutral", "contradiction"),
        ("MNLI-m", "MNLI-mm"),
        named=True,
        **_MNLI,
    ),
    "qnli": GlueTask("GLUE QNLI", ("question", "sentence"), _ENTAILMENT, ("QNLI",), named=True),
    "rte": GlueTask("GLUE RTE", _PAIR, _ENTAILMENT, ("RTE",), named=True),
    "wnli": GlueTask("GLUE WNLI", _PAIR, _ENTAILMENT[::-1], ("WNLI",)),
}


@dataclass
class GlueArguments(FinetuneArguments):
    """Options of `finetune_glue.py`."""

    task_name: str | None = option(None, f"Task of GLUE: {', '.join(TASKS)}.")
    train_file: str | None = option(None, "Own data: csv, tsv, jsonl, json or parquet.")
    validation_file: str | None = option(None, "Own data that choose the checkpoint.")
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
        if self.class_names and self.task_name:
            raise UserError(f"--class_names is for own data; --task_name {self.task_name} has its names.")
        if self.regression and (self.task_name or self.class_names):
            other = "--class_names" if self.class_names else f"--task_name {self.task_name}"
            raise UserError(f"--regression is for own data with numbers; leave out {other}.")
        if self.task_name is not None and self.task_name not in TASKS:
            raise UserError(f"GLUE has no task {self.task_name!r}.{did_you_mean(self.task_name, TASKS)}")
        if self.train_file or self.validation_file or self.test_file:
            if self.dataset_name:
                raise UserError("Set either --dataset_name or --train_file, not both.")
            if not (self.train_file and self.validation_file):
                raise UserError("Own data need both --train_file and --validation_file.")
        elif not (self.task_name or self.dataset_name):
            raise UserError("Set --task_name, or for own data --train_file and --validation_file, or --dataset_name.")
        if len(self.text_columns) > 2:
            raise UserError(f"--text_columns takes one or two columns, not {len(self.text_columns)}.")
        if self.label_column in self.text_columns:
            raise UserError(f"--label_column {self.label_column} is also one of --text_columns. Name another column.")


class TextClassification(Task):
    """Classes, several labels per row, or numbers, for texts or pairs of texts."""

    auto_class = AutoModelForSequenceClassification
    pipeline_tag = "text-classification"

    def __init__(self, arguments: GlueArguments) -> None:
        super().__init__()
        self.glue = TASKS.get(arguments.task_name or "")
        self.columns = tuple(arguments.text_columns) or (self.glue.columns if self.glue else ("text",))
        self.label_column = arguments.label_column
        self.title = self.glue.title if self.glue else own_name(arguments)
        self.name = arguments.task_name or re.sub(r"[^\w.-]+", "-", self.title)
        self._load(arguments)
        self._check()
        training = {self.sources[split]: rows for split, rows in {"train": self.train, **self.evaluation}.items()}
        tests = {self.sources[split]: rows for split, rows in self.tests.items() if self._labelled(rows)}
        names = () if arguments.regression else tuple(arguments.class_names) or None
        self.labels = read_labels({**training, **tests}, self.label_column, self.glue.labels if self.glue else names)
        self.problem_type = self.labels.problem_type
        self.notes.append(self._label_note())
        several = self.problem_type == REGRESSION and self.labels.several
        number = ("regression_of_several", "mse") if several else ("regression", "pearson")
        kind, self.main_metric = KINDS.get(self.problem_type, number)
        if self.glue:
            kind, self.main_metric = arguments.task_name, self.glue.main_metric
        self.greater_is_better = self.main_metric != "mse"
        self.metric = evaluate.load(str(METRICS), kind, keep_in_memory=True)
        self._describe(arguments)

    def _load(self, arguments: GlueArguments) -> None:
        """The splits, and by split the words that messages use for it."""
        train, development, tests = arguments.train_split, ["validation"], ["test"]
        if self.glue:
            development, tests = list(self.glue.development), list(self.glue.tests)
        if arguments.train_file:
            files = {"validation": arguments.validation_file, "test": arguments.test_file}
            self.sources = {train: arguments.train_file, **{split: path for split, path in files.items() if path}}
            rows = {split: read_files([Path(path)]) for split, path in self.sources.items()}
            development, tests = ["validation"], ["test"]
        else:
            development = [arguments.validation_split] if arguments.validation_split else development
            tests = [arguments.test_split] if arguments.test_split else tests
            name = arguments.dataset_name or HUB_NAME
            rows = load_splits(name, arguments.dataset_config or arguments.task_name, [train, *development, *tests])
            self.sources = {split: f"{name} ({split})" for split in rows}
            wanted = {"train": [train], "validation": development, "test": tests if arguments.test_split else [train]}
            for option, names in wanted.items():
                if not any(split in rows for split in names):
                    known = ", ".join(split_names(name, arguments.dataset_config or arguments.task_name))
                    raise UserError(
                        f"{name} has no split {' or '.join(names)}; it has {known}. Name one with --{option}_split."
                    )
            missing = [split for split in development if split not in rows]
            self.notes += [f"{portable(name)} has no split {split}: it is not evaluated." for split in missing]
        self.sources["train"] = self.sources[train]
        self.train = rows[train]
        self.evaluation = {split: rows[split] for split in development if split in rows}
        # A split that chooses the checkpoint is not a test.
        self.tests = {split: rows[split] for split in tests if split in rows and split not in self.evaluation}

    def _check(self) -> None:
        """Columns of every split; test splits may lack labels."""
        for split, rows in self.splits.items():
            wanted = self.columns if split in self.tests else (*self.columns, self.label_column)
            require_columns(rows, wanted, self.sources[split])
            for name in self.columns:
                require_text(rows, name, self.sources[split])

    def _labelled(self, rows: Dataset) -> bool:
        """Whether a test split has labels; GLUE's have -1 in every row."""
        column = self.label_column
        return column in rows.column_names and not all(label in (None, -1) for label in rows[column])

    def _label_note(self) -> str:
        """What the labels were taken for."""
        if self.problem_type == REGRESSION:
            return f"`{self.label_column}` holds numbers: a regression."
        note = f"{len(self.labels.names)} labels: {listed(self.labels.names)}."
        if getattr(self.train.features[self.label_column], "dtype", "").startswith("float"):
            note += " They are whole numbers, so they were taken for classes; for a regression set --regression true."
        return note

    def _describe(self, arguments: GlueArguments) -> None:
        name = arguments.dataset_name or HUB_NAME
        source = "local files"
        if arguments.train_file is None and not Path(name).is_dir():
            self.dataset_name, source = name, f"from {name}"
            self.dataset_config = arguments.dataset_config or arguments.task_name
        self.dataset = (
            f"{self.title}, {source}: texts in `{'`, `'.join(self.columns)}`, labels in `{self.label_column}`; "
            f"{len(self.train):,} rows to train on before any sampling."
        )

    def model_fields(self) -> dict[str, Any]:
        """Number, names and type of the labels."""
        fields = {"num_labels": self.labels.width, "problem_type": self.problem_type}
        if names := dict(enumerate(self.labels.names)):
            fields |= {"id2label": names, "label2id": {name: index for index, name in names.items()}}
        return fields

    def encode(self, rows: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Encoded:
        """Texts or pairs, and labels if the split has them."""
        labelled = self._labelled(rows)

        def encode(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
            texts = [batch[column] for column in self.columns]
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
        values = self.metric.compute(
            predictions=self.answers(logits),
            references=labels.astype(int) if self.problem_type == MULTI_LABEL else labels,
        )
        return {**values, "mean": sum(values.values()) / len(values)} if self.main_metric == "mean" else values

    def write_predictions(self, folder: Path, split: str, logits: np.ndarray) -> Path:
        """A table of index and prediction: for GLUE with the name and in the form that its leaderboard expects."""
        name, named = split, bool(self.labels.names)
        if self.glue:
            place = self.glue.tests.index(split) if split in self.glue.tests else 0
            name, named = self.glue.answers[place], self.glue.named
        path = folder / f"{name}.tsv"
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter="\t", lineterminator="\n")
            writer.writerow(["index", "prediction"])
            writer.writerows([index, self._written(answer, named)] for index, answer in enumerate(self.answers(logits)))
        return path

    def _written(self, answer: Any, named: bool) -> str:
        if self.problem_type == MULTI_LABEL:
            return ",".join(name for name, chosen in zip(self.labels.names, answer, strict=True) if chosen)
        if self.problem_type == SINGLE_LABEL:
            return self.labels.names[answer] if named else str(int(answer))
        numbers = np.atleast_1d(answer)
        if self.glue:  # STS-B's scores range from 0 to 5
            numbers = numbers.clip(0, 5)
            return f"{numbers.item():.3f}"
        return ",".join(map(str, numbers))  # as few digits as give the same float32

    def usage(self, name: str, trust: str) -> str:
        """A pipeline; for a regression it must return the number itself."""
        text = '"A text."' if len(self.columns) == 1 else '{"text": "One text.", "text_pair": "Another one."}'
        more = {REGRESSION: ', function_to_apply="none"', MULTI_LABEL: ", top_k=None"}.get(self.problem_type, "")
        return (
            "from transformers import pipeline\n\n"
            "# The name of this repository on the Hub, or the folder that holds this card.\n"
            f'classify = pipeline("text-classification", "{name}"{trust})\nclassify({text}{more})'
        )


def own_name(arguments: GlueArguments) -> str:
    """The name of own data: that of the data set, or of the folder with the files."""
    if arguments.train_file:
        folder = Path(arguments.train_file).resolve().parent
        return folder.name if folder.name and folder != Path.home().resolve() else Path(arguments.train_file).stem
    name = Path(arguments.dataset_name)
    return name.resolve().name if name.is_dir() else name.name


COMMAND = Command("finetune_glue", __doc__, TextClassification, GlueArguments)
main, parse = COMMAND.main, COMMAND.parse

if __name__ == "__main__":
    sys.exit(main())
