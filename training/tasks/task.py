"""What a task is, and what a command hands from step to step."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from tasks.arguments import FinetuneArguments, FinetuneTrainingArguments
from tasks.labels import SINGLE_LABEL

METRICS = Path(__file__).resolve().parent / "metrics" / "scores"


class Task:
    """What is trained on and how it is scored. A command fills the attributes and defines four methods:

    - `encode(rows, tokenizer, max_length)`: the rows tokenized, as `files.Encoded`.
    - `scores(split, logits, labels)`: the metrics of a split, given in the order of its rows.
    - `write_predictions(folder, split, logits)`: writes the answers for a test split; the path.
    - `usage(name, trust)`: Python for the model card; `trust` is a further argument of `from_pretrained`, or empty.

    Attributes:
        name: short, for tables and folders: `sst2`.
        title: for people: `GLUE SST-2`.
        auto_class: the Auto class of the head.
        pipeline_tag: of the Hub.
        problem_type: `single_label_classification` (also multiple choice), `multi_label_classification`, `regression`.
        train: rows of the training split.
        evaluation: dev splits by name; the first one chooses the checkpoint.
        tests: test splits by name, with or without labels.
        main_metric: the score (a key of what `scores` returns) that chooses the checkpoint and fills the table.
        greater_is_better: whether that score is to be large.
        dataset: a sentence on the data for the card.
        dataset_name, dataset_config: its name on the Hub, if it came from there.
        notes: what was done to the data, printed at the start and kept with the results.
        sources: what messages call a split: a file, or a data set and its split.
        digests: hash of the rows of every split, before any are drawn.
        drawn: by split, the numbers of rows used and available, where `--max_*_samples` left some out.
    """

    name: str
    title: str
    auto_class: type
    pipeline_tag: str
    problem_type: str = SINGLE_LABEL
    train: Dataset
    evaluation: dict[str, Dataset]
    tests: dict[str, Dataset]
    main_metric: str = "accuracy"
    greater_is_better: bool = True
    dataset: str = ""
    dataset_name: str | None = None
    dataset_config: str | None = None

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.sources: dict[str, str] = {}
        self.digests: dict[str, str] = {}
        self.drawn: dict[str, tuple[int, int]] = {}

    @property
    def splits(self) -> dict[str, Dataset]:
        """All splits by name."""
        return {"train": self.train, **self.evaluation, **self.tests}

    def model_fields(self) -> dict[str, Any]:
        """Fields of the model's config: labels and the type of the problem."""
        return {}

    def check_length(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[str]:
        """Notes on how the parts of an input share `max_length` tokens.

        Raises:
            UserError: A part has no room.
        """
        return []

    def collator(self, tokenizer: PreTrainedTokenizerBase, multiple: int | None) -> Callable[[list[dict]], dict]:
        """Pads a batch to its longest row, rounded up to a multiple of `multiple`."""
        return DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple)


@dataclass(frozen=True)
class Job:
    """One command: its task, its options, and the words it was called with."""

    task: Task
    arguments: FinetuneArguments
    training: FinetuneTrainingArguments
    command: list[str]

    @property
    def folder(self) -> Path:
        """`--output_dir`."""
        return Path(self.training.output_dir)

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes and prints."""
        return self.training.process_index == 0

    @property
    def development(self) -> str:
        """The split that chooses the checkpoint."""
        return next(iter(self.task.evaluation))

    def print(self, text: str) -> None:
        """Print on the main process alone."""
        if self.is_main:
            print(text, flush=True)
