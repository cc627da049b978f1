r"""Finetune an encoder on a task of GLUE, or on texts and labels of your own.

    python training/finetune_glue.py --model_name_or_path MODEL --task_name sst2 --output_dir outputs/sst2
    python training/finetune_glue.py training/recipes/finetune_glue/paper.yaml --model_name_or_path MODEL OTHER_MODEL \
        --task_name sst2 --output_dir outputs/sweep
    python training/finetune_glue.py --model_name_or_path MODEL --train_file a.csv --validation_file b.csv \
        --output_dir outputs/own

The same command again, after Ctrl-C or a kill, goes on from the last checkpoint (end of an epoch).
"""

import csv
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
from common.options import did_you_mean
from datasets import Dataset
from engine.card import portable
from tasks.files import Encoded, encode_texts, load_splits, read_file, require_columns, require_text
from tasks.labels import Labels, read_labels
from tasks.runs import FinetuneArguments, Task, run_script
from tasks.trainer import MULTI_LABEL, REGRESSION, SINGLE_LABEL
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from luna_hf.scripting import UserError

METRICS = Path(__file__).resolve().parent / "tasks" / "metrics" / "scores"
HUB_NAME = "nyu-mll/glue"


@dataclass(frozen=True)
class GlueTask:
    """A task of GLUE: its columns, its labels in the Hub's order (none: a number from 0 to 5), and its answer files.

    `answers` are the names of the leaderboard's files, one for each test split; `named` says whether they hold the
    labels' names or numbers.
    """

    title: str
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    answers: tuple[str, ...]
    named: bool = False
    development: tuple[str, ...] = ("validation",)
    tests: tuple[str, ...] = ("test",)


TASKS = {
    "cola": GlueTask("GLUE CoLA", ("sentence",), ("unacceptable", "acceptable"), ("CoLA",)),
    "sst2": GlueTask("GLUE SST-2", ("sentence",), ("negative", "positive"), ("SST-2",)),
    "mrpc": GlueTask("GLUE MRPC", ("sentence1", "sentence2"), ("not_equivalent", "equivalent"), ("MRPC",)),
    "qqp": GlueTask("GLUE QQP", ("question1", "question2"), ("not_duplicate", "duplicate"), ("QQP",)),
    "stsb": GlueTask("GLUE STS-B", ("sentence1", "sentence2"), (), ("STS-B",)),
    "mnli": GlueTask(
        "GLUE MNLI",
        ("premise", "hypothesis"),
        ("entailment", "neutral", "contradiction"),
        ("MNLI-m", "MNLI-mm"),
        True,
        ("validation_matched", "validation_mismatched"),
        ("test_matched", "test_mismatched"),
    ),
    "qnli": GlueTask("GLUE QNLI", ("question", "sentence"), ("entailment", "not_entailment"), ("QNLI",), True),
    "rte": GlueTask("GLUE RTE", ("sentence1", "sentence2"), ("entailment", "not_entailment"), ("RTE",), True),
    "wnli": GlueTask("GLUE WNLI", ("sentence1", "sentence2"), ("not_entailment", "entailment"), ("WNLI",)),
}


@dataclass
class GlueArguments(FinetuneArguments):
    """Options of `finetune_glue.py`."""

    task_name: str | None = field(default=None, metadata={"help": f"Task of GLUE: {', '.join(TASKS)}."})
    train_file: str | None = field(default=None, metadata={"help": "Own data: csv, tsv, jsonl, json or parquet."})
    validation_file: str | None = field(default=None, metadata={"help": "Own data to choose the checkpoint by."})
    test_file: str | None = field(default=None, metadata={"help": "Own data to predict; with labels, also scored."})
    train_split: str = field(default="train", metadata={"help": "Split of the data set to train on."})
    validation_split: str | None = field(
        default=None, metadata={"help": "Split to choose the checkpoint by; by default validation (MNLI: both)."}
    )
    test_split: str | None = field(default=None, metadata={"help": "Split to predict; by default test."})
    text_columns: list[str] = field(
        default_factory=list, metadata={"help": "One column of texts, or two for pairs; of own data, by default text."}
    )
    label_column: str = field(
        default="label",
        metadata={
            "help": "Column of labels: texts or whole numbers are classes, other numbers a regression, lists of either "
            "several labels at once."
        },
    )
    class_names: list[str] = field(
        default_factory=list,
        metadata={"help": "Own data: names of the classes, in the order of labels that are numbers from 0."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.class_names and self.task_name:
            raise UserError(f"--class_names is for data of your own: {self.task_name} has its names.")
        if self.task_name is not None and self.task_name not in TASKS:
            raise UserError(f"GLUE has no task {self.task_name!r}.{did_you_mean(self.task_name, TASKS)}")
        files = [self.train_file, self.validation_file, self.test_file]
        if any(files):
            if self.dataset_name:
                raise UserError("--dataset_name and --train_file exclude each other.")
            if not (self.train_file and self.validation_file):
                raise UserError("Own data needs both --train_file and --validation_file.")
        elif not (self.task_name or self.dataset_name):
            raise UserError("Give a --task_name, or own data: --train_file and --validation_file, or --dataset_name.")
        if len(self.text_columns) > 2:
            raise UserError(f"--text_columns takes one or two columns, not {len(self.text_columns)}.")


class TextClassification(Task):
    """Classes, several labels, or numbers for texts or pairs of texts."""

    auto_class = AutoModelForSequenceClassification
    pipeline_tag = "text-classification"

    def __init__(self, arguments: GlueArguments) -> None:
        self.glue = TASKS.get(arguments.task_name or "")
        self.notes: list[str] = []
        self._load(arguments)
        self.columns = tuple(arguments.text_columns) or (self.glue.columns if self.glue else ("text",))
        self.title = self.glue.title if self.glue else _own_name(arguments)
        self.name = arguments.task_name or re.sub(r"[^\w.-]+", "-", self.title)
        column = arguments.label_column
        self._check(column)
        self.labels: Labels = read_labels(
            self.labelled,
            column,
            self.glue.labels if self.glue else tuple(arguments.class_names) or None,
            is_number=arguments.task_name == "stsb",
        )
        self.notes += self.labels.notes
        self.problem_type = self.labels.problem_type
        kind = {SINGLE_LABEL: "single_label", MULTI_LABEL: "multi_label", REGRESSION: "regression"}[self.problem_type]
        if self.problem_type == REGRESSION and self.labels.width > 1:
            kind = "regression_of_several"
        self.metric = evaluate.load(str(METRICS), arguments.task_name or kind, keep_in_memory=True)
        self.main_metric = {
            **{"single_label": "accuracy", "multi_label": "micro_f1", "regression": "pearson"},
            **{"cola": "matthews_correlation", "mrpc": "mean", "qqp": "mean", "stsb": "mean"},
            "regression_of_several": "mse",
        }.get(arguments.task_name or kind, "accuracy")
        self.greater_is_better = self.main_metric != "mse"
        self._describe(arguments)

    def _load(self, arguments: GlueArguments) -> None:
        if arguments.train_file:
            self.sources = {"train": arguments.train_file, "validation": arguments.validation_file}
            if arguments.test_file:
                self.sources["test"] = arguments.test_file
            rows = {split: read_file(path) for split, path in self.sources.items()}
            development, tests = ["validation"], ["test"] if arguments.test_file else []
            train = "train"
        else:
            train = arguments.train_split
            development = list(self.glue.development) if self.glue else ["validation"]
            tests = list(self.glue.tests) if self.glue else ["test"]
            if arguments.validation_split:
                development = [arguments.validation_split]
            if arguments.test_split:
                tests = [arguments.test_split]
            name = arguments.dataset_name or HUB_NAME
            rows = load_splits(name, arguments.dataset_config or arguments.task_name, [train, *development, *tests])
            self.sources = {split: f"{name} ({split})" for split in rows}
            if train not in rows:
                raise UserError(f"{name} has no split {train!r} to train on; it has {', '.join(rows)}.")
            missing = [split for split in development if split not in rows]
            if len(missing) == len(development):
                raise UserError(
                    f"{name} has no split {' or '.join(development)} to choose the checkpoint by. Name one with "
                    "--validation_split."
                )
            self.notes += [f"{portable(name)} has no split {split}: it is not evaluated." for split in missing]
            if arguments.test_split and arguments.test_split not in rows:
                raise UserError(f"{name} has no split {arguments.test_split!r}.")
        self.train = rows[train]
        self.evaluation = {split: rows[split] for split in development if split in rows}
        # A split that chooses the checkpoint is no test.
        self.tests = {split: rows[split] for split in tests if split in rows and split not in self.evaluation}

    def _check(self, column: str) -> None:
        """Columns of every split; which splits have labels."""
        self.labelled: dict[str, Dataset] = {}
        training = {"train": self.train, **self.evaluation}
        for split, rows in {**training, **self.tests}.items():
            source = self.sources.get(split, split)
            wanted = [*self.columns, column] if split in training else list(self.columns)
            require_columns(rows, wanted, source)
            for name in self.columns:
                require_text(rows, name, source)
            if split in training or (column in rows.column_names and not _unlabelled(rows, column)):
                self.labelled[source] = rows
        self.label_column = column

    def _describe(self, arguments: GlueArguments) -> None:
        from_hub = arguments.train_file is None and not Path(arguments.dataset_name or HUB_NAME).is_dir()
        if from_hub:
            self.dataset_name = arguments.dataset_name or HUB_NAME
            self.dataset_config = arguments.dataset_config or arguments.task_name
        texts = " and ".join(f"`{column}`" for column in self.columns)
        sizes = ", ".join(f"{len(rows):,} of {split}" for split, rows in self.evaluation.items())
        self.dataset = (
            f"{self.title}{' from ' + self.dataset_name if from_hub else ', local files'}: texts in {texts}, labels in "
            f"`{self.label_column}`; {len(self.train):,} rows to train on before any drawing, {sizes}."
        )

    def model_fields(self) -> dict[str, Any]:
        """Number, names and type of the labels."""
        names = dict(enumerate(self.labels.names))
        return {
            "num_labels": self.labels.width,
            "problem_type": self.problem_type,
            **({"id2label": names, "label2id": {name: index for index, name in names.items()}} if names else {}),
        }

    def encode(self, rows: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Encoded:
        """Texts or pairs, and labels where the split has them."""
        texts = [list(rows[column]) for column in self.columns]
        columns, tokens, cut_rows, cut_tokens = encode_texts(
            tokenizer, texts[0], texts[1] if len(texts) > 1 else None, max_length
        )
        columns["length"] = [sum(map(len, row)) for row in zip(*texts, strict=True)]
        if self.label_column in rows.column_names and not _unlabelled(rows, self.label_column):
            columns["labels"] = self.labels.encode(rows[self.label_column])
        return Encoded(Dataset.from_dict(columns), tokens, cut_rows, cut_tokens)

    def answers(self, logits: np.ndarray) -> np.ndarray:
        """Classes (b,), zeros and ones (b, labels), or numbers (b,) or (b, targets)."""
        if self.problem_type == SINGLE_LABEL:
            return logits.argmax(-1)
        if self.problem_type == MULTI_LABEL:
            return (logits > 0).astype(int)
        return logits[:, 0] if self.labels.width == 1 else logits

    def scores(self, split: str, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """GLUE's metrics, or those of the kind of problem; `mean` is what the leaderboard averages where there are two.

        A correlation with constant predictions is undefined and counts as 0.
        """
        if self.problem_type == MULTI_LABEL:
            labels = labels.astype(int)
        values = self.metric.compute(predictions=self.answers(logits), references=labels)
        values = {name: 0.0 if np.isnan(value) else float(value) for name, value in values.items()}
        if self.main_metric == "mean":
            values["mean"] = sum(values.values()) / len(values)
        return values

    def write_predictions(self, folder: Path, split: str, logits: np.ndarray) -> Path:
        """A table of index and prediction: for GLUE under the name and in the form that its leaderboard wants."""
        answers = self.answers(logits)
        name, named = split, bool(self.labels.names)
        if self.glue:
            name, named = (
                self.glue.answers[self.glue.tests.index(split) if split in self.glue.tests else 0],
                self.glue.named,
            )
        path = folder / f"{name}.tsv"
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter="\t", lineterminator="\n")
            writer.writerow(["index", "prediction"])
            for index, answer in enumerate(answers):
                writer.writerow([index, self._written(answer, named)])
        return path

    def _written(self, answer: Any, named: bool) -> str:
        if self.problem_type == MULTI_LABEL:
            return ",".join(name for name, chosen in zip(self.labels.names, answer, strict=True) if chosen)
        if self.problem_type == SINGLE_LABEL:
            return self.labels.names[answer] if named else str(int(answer))
        numbers = np.atleast_1d(answer)
        if self.glue:  # STS-B's scores go from 0 to 5
            numbers = numbers.clip(0, 5)
        return ",".join(f"{number:.3f}" for number in numbers)

    def usage(self, name: str, trust: str) -> str:
        """A pipeline; a regression has to be told that its number is no logit."""
        call = 'classify("A text.")'
        if len(self.columns) == 2:
            call = 'classify({"text": "One text.", "text_pair": "Another one."})'
        if self.problem_type == REGRESSION:
            call = call[:-1] + ', function_to_apply="none")  # the number itself'
        elif self.problem_type == MULTI_LABEL:
            call = call[:-1] + ", top_k=None)  # a probability for each label"
        return (
            "from transformers import pipeline\n\n"
            "# The name of this repository on the Hub, or the folder that holds this card.\n"
            f'classify = pipeline("text-classification", "{name}"{trust})\n{call}'
        )


def _own_name(arguments: GlueArguments) -> str:
    """What own data are called: the folder's name, or that of the folder with the files."""
    if arguments.train_file:
        folder = Path(arguments.train_file).resolve().parent
        return folder.name if folder.name and folder != Path.home().resolve() else Path(arguments.train_file).stem
    name = Path(arguments.dataset_name)
    return name.resolve().name if name.is_dir() else name.name


def _unlabelled(rows: Dataset, column: str) -> bool:
    """Whether a test split has no labels: GLUE's have -1 in every row."""
    return all(value is None or (np.isscalar(value) and value == -1) for value in rows[column])


def main(words: list[str] | None = None) -> int:
    """Run the script; see `finetuning.run_script`."""
    return run_script(GlueArguments, lambda arguments, _: TextClassification(arguments), __doc__, words)


if __name__ == "__main__":
    sys.exit(main())
