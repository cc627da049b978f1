"""Options of the finetuning scripts: `[RECIPE.yaml] --key value ...`, with the paper's values as defaults."""

import argparse
import json
import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import yaml
from common.options import did_you_mean
from transformers import HfArgumentParser, SchedulerType, Trainer, TrainingArguments, get_scheduler
from transformers.integrations import get_available_reporting_integrations

from luna_hf.scripting import UserError

# Options of the Trainer that these scripts set themselves: given, they would be ignored without a word.
_SET_HERE = {
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), "the script always trains, evaluates and predicts"),
    **dict.fromkeys(("metric_for_best_model", "greater_is_better"), "the task names the score that chooses"),
    **dict.fromkeys(("remove_unused_columns", "label_names", "length_column_name"), "the task names the columns"),
    **dict.fromkeys(("hub_strategy", "hub_always_push"), "the finished model is pushed, once"),
    "data_seed": "--seeds decides the order of the rows, too",
    "include_num_input_tokens_seen": "tokens are always counted, without padding",
}
# The lowest value of an option, and whether it is excluded itself.
_LOWEST = {
    **dict.fromkeys(
        ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"), (1, False)
    ),
    **dict.fromkeys(("learning_rate", "weight_decay", "warmup_steps", "max_grad_norm", "seed"), (0, False)),
    **dict.fromkeys(("num_train_epochs", "adam_epsilon", "save_total_limit", "logging_steps"), (0, True)),
}
_ORDERS = ("group_by_length", "random", "sequential")


@dataclass
class FinetuneArguments:
    """Options that every finetuning script has; a script adds its own in a subclass."""

    model_name_or_path: list[str] = field(
        default_factory=list,
        metadata={"help": "Folder or Hub name of a pretrained encoder; several are compared on equal terms."},
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "Hub name, or a local folder with a file for each split (parquet, jsonl, csv)."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Part of the data set."})
    max_length: int | None = field(
        default=None,
        metadata={
            "help": "Longest input in tokens; longer ones are cut, and counted. By default 512, or what the model "
            "takes. More than the model takes extends its positions."
        },
    )
    model_config: list[str] = field(
        default_factory=list,
        metadata={"help": "Fields of the model's config as KEY=VALUE, such as classifier_pooling=packed_max."},
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on so many rows, drawn at random."})
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "Evaluate on so many rows of each dev split, drawn at random."}
    )
    sweep: bool = field(
        default=False, metadata={"help": "Try every batch size with every learning rate, as the paper does."}
    )
    sweep_batch_sizes: list[int] = field(
        default_factory=lambda: [16, 32], metadata={"help": "Rows of an update, over all processes."}
    )
    sweep_learning_rates: list[float] = field(
        default_factory=lambda: [5e-6, 1e-5, 2e-5], metadata={"help": "Peak learning rates."}
    )
    sweep_dropouts: list[float] = field(
        default_factory=list, metadata={"help": "Dropouts to try with each of them; none: that of --dropout."}
    )
    dropout: float | None = field(
        default=None, metadata={"help": "Dropout of the hidden states; by default that of the checkpoint."}
    )
    seeds: list[int] = field(default_factory=list, metadata={"help": "Repeat every setting with these seeds."})
    early_stopping_patience: int = field(
        default=3, metadata={"help": "Evaluations without a better score until a run stops; 0 never stops it."}
    )
    model_name: str | None = field(default=None, metadata={"help": "Name in the model card."})
    language: str | None = field(default=None, metadata={"help": "Of the texts, for the model card: en."})
    license: str | None = field(default=None, metadata={"help": "Of the model, for the model card."})

    def __post_init__(self) -> None:
        if not self.model_name_or_path:
            raise UserError("--model_name_or_path is missing: the folder or Hub name of a pretrained encoder.")
        positive = {
            "max_train_samples": self.max_train_samples,
            "max_eval_samples": self.max_eval_samples,
            **{f"sweep_batch_sizes ({value})": value for value in self.sweep_batch_sizes},
            **{f"sweep_learning_rates ({value})": value for value in self.sweep_learning_rates},
        }
        for name, value in positive.items():
            if value is not None and value <= 0:
                raise UserError(f"--{name} must be above 0.")
        for dropout in [*self.sweep_dropouts, *([] if self.dropout is None else [self.dropout])]:
            if not 0 <= dropout < 1:
                raise UserError(f"A dropout of {dropout} is not possible: at least 0 and below 1.")
        if self.max_length is not None and self.max_length < 8:
            raise UserError(f"--max_length is {self.max_length}, but must be at least 8.")
        if self.early_stopping_patience < 0:
            raise UserError("--early_stopping_patience must be at least 0.")
        if self.model_name is not None and not re.fullmatch(r"[\w.-]+", self.model_name):
            raise UserError(f"--model_name is {self.model_name!r}, but must be letters, digits, dots and dashes.")
        self.config_fields()

    def config_fields(self) -> dict[str, Any]:
        """`model_config` as a dictionary.

        Raises:
            UserError: A word without an equal sign.
        """
        values = {}
        for word in self.model_config:
            key, equals, value = word.partition("=")
            if not equals:
                raise UserError(f"--model_config {word!r} must be KEY=VALUE, such as classifier_pooling=packed_max.")
            values[key] = yaml.safe_load(value)
        return values


@dataclass
class FinetuneTrainingArguments(TrainingArguments):
    """transformers' TrainingArguments with the values of the Luna paper (and of RoBERTa, whose recipe it follows)."""

    learning_rate: float = field(default=2e-5, metadata={"help": "Peak learning rate."})
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Rows of a forward pass on each process."})
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "Rows of an evaluation step."})
    num_train_epochs: float = field(default=20.0, metadata={"help": "Epochs at most."})
    adam_beta2: float = field(default=0.98, metadata={"help": "Decay of AdamW's mean square."})
    adam_epsilon: float = field(default=1e-6, metadata={"help": "Epsilon of AdamW."})
    weight_decay: float = field(default=0.1, metadata={"help": "Weight decay; not on biases and norms."})
    warmup_steps: float = field(default=0.06, metadata={"help": "Warm-up: a share of the steps below 1, or a count."})
    eval_strategy: str = field(default="epoch", metadata={"help": "When to evaluate: no, steps, epoch."})
    save_strategy: str = field(default="epoch", metadata={"help": "When to save; as eval_strategy."})
    save_total_limit: int | None = field(
        default=2, metadata={"help": "Checkpoints to keep while a run is unfinished, the best one among them."}
    )
    load_best_model_at_end: bool = field(default=True, metadata={"help": "Keep the weights with the best score."})
    logging_steps: float = field(default=100, metadata={"help": "Steps between two lines of the log."})
    train_sampling_strategy: str = field(
        default="group_by_length", metadata={"help": "group_by_length, random or sequential."}
    )
    restore_callback_states_from_checkpoint: bool = field(
        default=True, metadata={"help": "Early stopping goes on counting after a resume."}
    )
    remove_unused_columns: bool = field(default=False, metadata={"help": "The scripts pass on what a model takes."})

    def __post_init__(self) -> None:
        for name, (lowest, excluded) in _LOWEST.items():
            value = getattr(self, name)
            if value is not None and not (value > lowest if excluded else value >= lowest):
                raise UserError(f"--{name} is {value}, but must be {'above' if excluded else 'at least'} {lowest}.")
            if value is not None and not math.isfinite(value):
                raise UserError(f"--{name} is {value}, but must be a finite number.")
        for name in ("adam_beta1", "adam_beta2", "label_smoothing_factor"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"--{name} is {getattr(self, name)}, but must be at least 0 and below 1.")
        reporters = [self.report_to] if isinstance(self.report_to, str) else self.report_to or []
        there = [*get_available_reporting_integrations(), "all", "none"]
        missing = [name for name in reporters if name not in there]
        if missing:
            raise UserError(
                f"--report_to {' '.join(missing)}: not installed, or unknown. Here it can be {', '.join(there)}."
            )
        self.include_num_input_tokens_seen = "non_padding"  # for the speed in the results
        # Without it, processes on CPUs would not know of each other.
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        self.dataloader_pin_memory = self.dataloader_pin_memory and torch.cuda.is_available()
        super().__post_init__()
        if self.train_sampling_strategy not in _ORDERS:  # the Trainer takes any other word for `random`
            raise UserError(
                f"--train_sampling_strategy is {self.train_sampling_strategy!r}, but must be {', '.join(_ORDERS)}."
            )

    def check_with(self, model: torch.nn.Module) -> None:
        """Make what the Trainer would make before its first step.

        Raises:
            UserError: An optimizer whose package is missing, or an optimizer or schedule that lacks an argument.
        """
        try:
            Trainer.get_optimizer_cls_and_kwargs(self, model)
            probe = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
            if self.lr_scheduler_type not in (SchedulerType.GREEDY, SchedulerType.REDUCE_ON_PLATEAU):
                get_scheduler(self.lr_scheduler_type, probe, 1, 10, self.lr_scheduler_kwargs)
        except (ImportError, ValueError, TypeError, RuntimeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            chosen = f"--optim {self.optim.value} with --lr_scheduler_type {self.lr_scheduler_type.value}"
            raise UserError(f"{chosen} cannot be used: {reason}") from error


ArgumentsType = TypeVar("ArgumentsType", bound=FinetuneArguments)


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Commands of the description stay as they are written, and every option has its default."""


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message[0].upper() + message[1:] + ". `--help` lists the options.")


def parse(
    arguments_class: type[ArgumentsType],
    words: list[str],
    description: str = "",
    training_class: type[FinetuneTrainingArguments] = FinetuneTrainingArguments,
) -> tuple[ArgumentsType, FinetuneTrainingArguments]:
    """Options from an optional recipe and the command line, which wins.

    Args:
        arguments_class: the script's options.
        words: command line without the script's name; the first may be a YAML file with the same keys.
        description: for `--help`.
        training_class: the Trainer's options with the script's defaults.

    Raises:
        UserError: No such recipe, a misspelt key (with the closest one), a value of a wrong type or out of range.
    """
    classes = (arguments_class, training_class)
    names = {option.name for one in classes for option in fields(one) if option.init}
    known = names | {f"no_{option.name}" for one in classes for option in fields(one) if option.default is True}
    words = list(words)
    given = []
    if words and not words[0].startswith("-"):
        given = _recipe_words(Path(words.pop(0)), names)
    for word in [*given, *words]:
        key = word[2:].partition("=")[0].replace("-", "_")
        if word.startswith("--") and key not in known | {"help"}:
            raise UserError(f"Unknown option {word.partition('=')[0]}.{_suggestion(key, known)}")
        if word.startswith("--") and key.removeprefix("no_") in _SET_HERE:
            raise UserError(f"{word.partition('=')[0]} has no effect here: {_SET_HERE[key.removeprefix('no_')]}.")
    parser = _Parser(classes, description=description, formatter_class=_Help, allow_abbrev=False)
    try:
        arguments, training = parser.parse_args_into_dataclasses(given + words, look_for_args_file=False)
    except (ValueError, ImportError, TypeError) as error:
        raise error if isinstance(error, UserError) else UserError(str(error)) from error
    if not any(word.partition("=")[0].replace("-", "_") == "__output_dir" for word in given + words):
        raise UserError("--output_dir is missing: the folder to write to.")
    return arguments, training


def _suggestion(key: str, known: set[str]) -> str:
    told = did_you_mean(key, known)
    return told if told.startswith(" Did") else " `--help` lists the options."


def _recipe_words(path: Path, known: set[str]) -> list[str]:
    """A recipe as words of a command line."""
    if not path.is_file():
        raise UserError(f"There is no recipe file {path}. After an optional recipe come options, `--key value`.")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold `key: value` lines.")
    words = []
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise UserError(f"{path}: unknown key `{key}`.{_suggestion(name, known)}")
        if value is None or value == []:
            continue
        parts = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
        words += [f"--{name}", *map(str, parts)]
    return words
