"""What a task is, and what a command hands from step to step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import DataCollatorWithPadding, PreTrainedConfig, PreTrainedTokenizerBase

from luna_hf.scripting import UserError
from tasks.arguments import FinetuneArguments, FinetuneTrainingArguments
from tasks.labels import SINGLE_LABEL, ClassOrder


class Task:
    """What is trained on and how it is scored. A task fills the attributes and defines four methods:

    - `encode(rows, tokenizer, max_length)`: the rows tokenized, as `files.Encoded`.
    - `scores(split, logits, labels)`: the metrics of a split, given in the order of its rows.
    - `write_predictions(folder, split, logits)`: writes the answers for a test split; the path.
    - `usage(name, trust)`: Python for the model card; `name` is in quotes, `trust` a further argument of
      `from_pretrained`, or empty.

    Args:
        rows: the splits by name.
        source: what messages call the data: a data set (a folder or a name on the Hub), or files by split.
        train: the split to train on.
        development: splits to evaluate on, as far as there are any; the first one chooses the checkpoint.
        tests: splits to predict, as far as there are any and they are no development splits.
        config: part of a data set on the Hub.

    Attributes:
        name, title: short (`sst2`) and for people (`GLUE SST-2`).
        auto_class, pipeline_tag: the Auto class of the head, and its tag on the Hub.
        problem_type: `single_label_classification` (also multiple choice), `multi_label_classification`, `regression`.
        main_metric: the score (a key of what `scores` returns) that chooses the checkpoint and fills the table.
        greater_is_better: whether that score is to be large.
        dataset: a sentence on the data for the card.
        dataset_name, dataset_config: its name on the Hub, if it came from there.
        notes: what was done to the data, printed at the start and kept with the results.
        sources: what messages call a split.
        digests: hash of the rows of every split, before any are drawn.
        drawn: by split, the numbers of rows used and available, where `--max_*_samples` left some out.
    """

    name: str
    title: str
    auto_class: type
    pipeline_tag: str
    problem_type: str = SINGLE_LABEL
    main_metric: str = "accuracy"
    greater_is_better: bool = True
    dataset: str = ""
    dataset_name: str | None = None
    dataset_config: str | None = None

    def __init__(
        self,
        rows: dict[str, Dataset],
        source: str | dict[str, str],
        train: str,
        development: Sequence[str],
        tests: Sequence[str],
        config: str | None = None,
    ) -> None:
        if train in development:
            raise UserError(
                f"The split {train} is to train on and to evaluate on. Name another with --validation_split."
            )
        if train in tests:
            raise UserError(f"The split {train} is to train on and to predict. Name another with --test_split.")
        if train != "train" and "train" in (*development, *tests):
            raise UserError(
                f"The split train is to evaluate on or to predict, but {train} to train on: only the training split "
                "may be called train. Rename the files."
            )
        self.train = rows[train]
        self.evaluation = {split: rows[split] for split in development if split in rows}
        self.tests = {split: rows[split] for split in tests if split in rows and split not in self.evaluation}
        self.sources = source if isinstance(source, dict) else {split: f"{source} ({split})" for split in rows}
        self.sources["train"] = self.sources[train]
        if isinstance(source, str) and not Path(source).exists():
            self.dataset_name, self.dataset_config = source, config
        self.notes: list[str] = []
        self.digests: dict[str, str] = {}
        self.drawn: dict[str, tuple[int, int]] = {}

    @property
    def splits(self) -> dict[str, Dataset]:
        """All splits by name."""
        return {"train": self.train, **self.evaluation, **self.tests}

    def model_fields(self) -> dict[str, Any]:
        """Fields of the model's config: labels and the type of the problem."""
        return {}

    def class_order(self, config: PreTrainedConfig, name: str) -> ClassOrder:
        """How the checkpoint `name` numbers the classes of the data."""
        return ClassOrder()

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

    def wait(self) -> None:
        """Wait until every process is here."""
        self.training.distributed_state.wait_for_everyone()
