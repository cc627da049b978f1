"""Options that every finetuning command has, with the paper's values as defaults."""

from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from common.options import parse_yaml
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from transformers import IntervalStrategy, SchedulerType, Trainer, TrainingArguments, get_scheduler
from transformers.integrations import get_available_reporting_integrations
from transformers.training_args import trainer_log_levels

from luna_hf.scripting import UserError, reason

# Options of the Trainer that these commands set themselves, would ignore, or cannot train with. The others work.
REFUSED = {
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), "the command always trains, evaluates and predicts"),
    **dict.fromkeys(("metric_for_best_model", "greater_is_better"), "the task names the score that chooses"),
    **dict.fromkeys(("remove_unused_columns", "label_names", "length_column_name"), "the task names the columns"),
    **dict.fromkeys(("hub_strategy", "hub_always_push"), "the finished model is pushed, once"),
    "resume_from_checkpoint": "the same command finds the newest whole checkpoint",
    "data_seed": "--seeds decides the order of the rows, too",
    "include_num_input_tokens_seen": "tokens are always counted, without padding",
    "logging_nan_inf_filter": "a loss that is not finite ends the run",
    "hub_revision": "the model is pushed to the main branch",
    "dataloader_drop_last": "every row is trained on and evaluated",
    "auto_find_batch_size": "results name the batch size; lower --per_device_train_batch_size instead",
    "save_only_model": "an interrupted run continues with the state of its optimizer",
    "parallelism_config": "it is an object of Python; start the command with `accelerate launch`",
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), "the saved weights would be rounded, too"),
    **dict.fromkeys(("use_liger_kernel", "liger_kernel_config"), "the models of this package have no Liger kernels"),
    **dict.fromkeys(("prediction_loss_only", "batch_eval_metrics"), "a score needs the predictions of all rows"),
    **dict.fromkeys(("eval_do_concat_batches", "eval_use_gather_object"), "a score needs one array of predictions"),
    "debug": "its hooks stop at masks, which are no numbers",
    "include_for_metrics": "a score is computed from predictions and labels alone",
}


def option(default: Any, text: str) -> Any:
    """A field of a dataclass of options, with its line in `--help`; `MISSING` makes it required."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": text})
    return field(default=default, metadata={"help": text})


@dataclass
class FinetuneArguments:
    """Options that every finetuning command has; a command adds its own in a subclass."""

    model_name_or_path: list[str] = option(
        MISSING, "Folder or Hub name of a pretrained encoder (required); several are compared on equal terms."
    )
    dataset_name: str | None = option(None, "Hub name, or a local folder with a file per split (parquet, jsonl, csv).")
    dataset_config: str | None = option(
        None, "Part of a data set that has several: its configuration on the Hub, or a subfolder."
    )
    max_length: int | None = option(
        None,
        "Longest input in tokens; longer ones are cut, and counted. By default 512, or what the model takes if that is "
        "less. A larger value extends the model's positions.",
    )
    model_config: list[str] = option(
        [], "Fields of the model's config as KEY=VALUE, such as classifier_pooling=packed_max."
    )
    max_train_samples: int | None = option(None, "Train on this many rows, drawn at random.")
    max_eval_samples: int | None = option(None, "Evaluate on this many rows of each dev split, drawn at random.")
    sweep: bool = option(False, "Try every batch size with every learning rate, as the paper does.")
    sweep_batch_sizes: list[int] = option([16, 32], "Rows of an update, over all processes.")
    sweep_learning_rates: list[float] = option([5e-6, 1e-5, 2e-5], "Peak learning rates of a sweep.")
    sweep_dropouts: list[float] = option([], "Dropouts of a sweep; by default that of --dropout.")
    dropout: float | None = option(None, "Dropout of the hidden states; by default that of the checkpoint.")
    seeds: list[int] = option([], "Repeat every setting with these seeds; by default --seed.")
    accept_changed_data: bool = option(False, "Continue a run, or report its scores, although its data have changed.")
    early_stopping_patience: int = option(3, "Evaluations without a better score until a run stops; 0 never stops it.")
    model_name: str | None = option(
        None, "Name of the model in its card; by default it is made of those of the checkpoint and the task."
    )
    language: str | None = option(None, "Language of the texts for the model card, as a code such as en.")
    license: str | None = option(
        None, "License of the model for the model card, as the Hub writes it, such as apache-2.0."
    )

    def __post_init__(self) -> None:
        self.config_fields()
        folder = Path(self.dataset_name or "", self.dataset_config or "")
        if self.dataset_name and Path(self.dataset_name).is_dir() and not folder.is_dir() and folder.name != "all":
            raise UserError(f"--dataset_config: there is no folder {folder}.")

    def config_fields(self) -> dict[str, Any]:
        """`model_config` as a dictionary.

        Raises:
            UserError: A word without an equal sign, a value that is not YAML, or a field that follows from the data.
        """
        for word in self.model_config:
            if "=" not in word:
                raise UserError(f"--model_config {word!r} must be KEY=VALUE, such as classifier_pooling=packed_max.")
            if word.partition("=")[0] in ("num_labels", "id2label", "label2id", "problem_type"):
                raise UserError(f"--model_config {word!r}: remove it, since the labels of the data decide.")
        words = [(word, *word.split("=", 1)) for word in self.model_config]
        if twice := [key for _, key, _ in words if [other for _, other, _ in words].count(key) > 1]:
            raise UserError(f"--model_config sets {twice[0]} twice.")
        return {key: parse_yaml(value, f"--model_config {word}") for word, key, value in words}


class CheckedTraining:
    """What training arguments check in every finetuning command; a base class beside transformers'."""

    def __post_init__(self) -> None:
        if not self.output_dir.strip():
            raise UserError("--output_dir is empty. Name a folder.")
        available = [*get_available_reporting_integrations(), "all", "none"]
        for name in [self.report_to] if isinstance(self.report_to, str) else self.report_to or []:
            if name not in available:
                raise UserError(f"--report_to {name} is unknown or not installed. Available: {', '.join(available)}.")
        for name in ("log_level", "log_level_replica"):
            if getattr(self, name) not in trainer_log_levels:
                raise UserError(f"--{name} {getattr(self, name)} is unknown. Known: {', '.join(trainer_log_levels)}.")
        self.logging_nan_inf_filter = False
        # Otherwise processes on CPUs would not find each other.
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        self.dataloader_pin_memory = self.dataloader_pin_memory and torch.cuda.is_available()
        super().__post_init__()
        steps = IntervalStrategy.STEPS
        if self.load_best_model_at_end and self.save_strategy == steps and self.save_steps != self.eval_steps:
            raise UserError(
                f"--save_steps {self.save_steps:g} is not --eval_steps {self.eval_steps:g}, so that the best weights "
                "might not be saved. Set both to the same number, or add --save_strategy best."
            )
        names = ("num_workers", "persistent_workers", "prefetch_factor", "multiprocessing_context", "in_order")
        DataLoader([0], **{name: getattr(self, f"dataloader_{name}") for name in names})  # raises what does not fit

    def check_with(self, model: torch.nn.Module, main_metric: str | None = None) -> None:
        """Create a Trainer, its optimizer and its schedule once, as is done otherwise after the data are tokenized.

        Raises:
            UserError: A package or an argument is missing, or a value is out of range.
        """
        layer = torch.nn.Linear(1, 1)
        repeated = self.activation_checkpointing_kwargs or self.gradient_checkpointing_kwargs or {}
        try:
            own = replace(self, metric_for_best_model=main_metric, push_to_hub=False, label_smoothing_factor=0.0)
            Trainer(layer, own, train_dataset=[0], eval_dataset=[0])
            checkpoint(layer, torch.zeros(1), **{"use_reentrant": False, **repeated})
            if self.torch_compile:
                torch.compile(layer, backend=self.torch_compile_backend or "inductor", mode=self.torch_compile_mode)
        except (ImportError, ValueError, TypeError, RuntimeError) as error:
            raise UserError(f"The options of the Trainer cannot be used: {reason(error)}.") from error
        try:
            kind, options = Trainer.get_optimizer_cls_and_kwargs(self, model)
            optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
            if kind.__module__.startswith("torch.optim"):
                optimizer = kind(optimizer.param_groups[0]["params"], **options)
            if self.lr_scheduler_type not in (SchedulerType.GREEDY, SchedulerType.REDUCE_ON_PLATEAU):
                get_scheduler(self.lr_scheduler_type, optimizer, 1, 10, self.lr_scheduler_kwargs)
        except (ImportError, ValueError, TypeError, RuntimeError) as error:
            chosen = f"--optim {self.optim.value} with --lr_scheduler_type {self.lr_scheduler_type.value}"
            raise UserError(f"{chosen} cannot be used: {reason(error)}.") from error


@dataclass
class FinetuneTrainingArguments(CheckedTraining, TrainingArguments):
    """transformers' TrainingArguments with the values of the Luna paper (and of RoBERTa, whose recipe it follows)."""

    output_dir: str = option(MISSING, "Folder to write to (required).")
    learning_rate: float = option(2e-5, "Peak learning rate.")
    per_device_train_batch_size: int = option(32, "Rows per forward pass and process.")
    per_device_eval_batch_size: int = option(64, "Rows per evaluation step.")
    num_train_epochs: float = option(20.0, "Most epochs; early stopping may end a run sooner.")
    adam_beta2: float = option(0.98, "Decay of AdamW's mean square.")
    adam_epsilon: float = option(1e-6, "Epsilon of AdamW, added to the divisor of an update.")
    weight_decay: float = option(0.1, "Weight decay; not on biases and norms.")
    warmup_steps: float = option(0.06, "Warm-up: a share of the steps below 1, or a count.")
    eval_strategy: str = option(
        "epoch", "When to evaluate: after every epoch, every --eval_steps updates (steps), or never (no)."
    )
    save_strategy: str = option(
        "epoch", "When to save: as --eval_strategy, which it must equal to keep the best weights."
    )
    save_total_limit: int | None = option(2, "Checkpoints to keep while a run is unfinished, the best one among them.")
    load_best_model_at_end: bool = option(True, "Keep the weights with the best score.")
    logging_steps: float = option(100, "Updates between two lines of the log.")
    train_sampling_strategy: Literal["group_by_length", "random", "sequential"] = option(
        "group_by_length",
        "Order of the rows: group_by_length (batches of similar length, for little padding), random or sequential.",
    )
    restore_callback_states_from_checkpoint: bool = option(True, "Early stopping continues its count after a resume.")
    remove_unused_columns: bool = option(False, "The commands pass on what a model takes.")

    def __post_init__(self) -> None:
        self.include_num_input_tokens_seen = "non_padding"  # for the speed in the results
        super().__post_init__()
