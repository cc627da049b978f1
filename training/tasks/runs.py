"""What all finetuning scripts share: options, models, runs that survive a kill, sweeps, and the table at the end.

A script has a `Task` and a dataclass of options, and is otherwise this file:

    @dataclass
    class MyArguments(FinetuneArguments):
        my_option: str = field(default="x", metadata={"help": "shown by --help"})

    class MyTask(Task): ...

    def main(words: list[str] | None = None) -> int:
        return run_script(MyArguments, make_task, __doc__, words)   # make_task(arguments, training_arguments) -> Task

    if __name__ == "__main__":
        sys.exit(main())

`run_script` parses `[RECIPE.yaml] --key value ...`, builds the task, checks everything that can be checked, trains each
`Run` of the plan (one, or one for each model, setting and seed) and writes:

    output_dir/results.json, results.md      every run, median and best for each model and setting
    output_dir/ (a single run)               or output_dir/runs/<model>/<setting>/ (several)
        settings.json                        what the run is; another command may not continue it
        checkpoint-*                         of the Trainer, while the run is unfinished
        model.safetensors, config, tokenizer, README.md, predictions/*
        run.json                             its scores; written last and atomically: the run is finished
    output_dir/best/<model>/                 of several runs of a model, the chosen one; the others leave no weights

Ctrl-C or a kill (SIGTERM, SIGKILL) ends a run where it is. The same command goes on from its last checkpoint, so that
what is lost is at most the epoch since then. To save more often: `--save_strategy steps --save_steps N`, and the same
of `eval`.

The `Task` says what is trained on and how it is scored.
`finetune_arguments` holds the options, `finetune_plan` the plan, `finetune_data` reads files and folders,
`finetune_trainer` has the loss and the order of the rows, `finetune_best` chooses among several runs,
`finetune_report` has tables, cards and the upload.
"""

import dataclasses
import functools
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
from common.models import load_config, load_encoder, load_tokenizer, longest_input
from datasets import Dataset
from transformers import DataCollatorWithPadding, EvalPrediction, PreTrainedTokenizerBase, set_seed
from transformers.utils import logging

from luna_hf.scripting import UserError
from tasks.arguments import FinetuneArguments, FinetuneTrainingArguments, parse
from tasks.best import chosen_without_weights, drop_losers, keep_best
from tasks.files import Encoded
from tasks.plan import RUN_FILE, SETTINGS_FILE, Run, check_output, check_settings, plan, run_settings
from tasks.report import (
    finish_report,
    machine_and_versions,
    push_folder,
    reserve_repository,
    write_card,
    write_json,
)
from tasks.trainer import (
    CLOCK,
    SINGLE_LABEL,
    FinetuneTrainer,
    checkpoints,
    damage,
    newest_whole_checkpoint,
    number,
    stopped_early,
)

__all__ = ["FinetuneArguments", "FinetuneTrainingArguments", "Run", "Task", "parse", "run_script"]

# What different types call the dropout of the hidden states.
_DROPOUTS = ("hidden_dropout_prob", "embedding_dropout", "mlp_dropout")


class Task:
    """What is trained on and how it is scored. A script fills the attributes and overrides the methods it needs.

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
        dataset: a sentence on the data for the card.
        dataset_name, dataset_config: its name on the Hub, if it came from there.
        notes: what was done to the data, said at the start and kept with the results.
        drawn: by split, rows that are used and rows that there are, where `shrink` has left some out.
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
    notes: list[str]
    drawn: dict[str, tuple[int, int]]

    def model_fields(self) -> dict[str, Any]:
        """Fields of the model's config: labels and the type of the problem."""
        return {}

    def encode(self, rows: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Encoded:
        """Rows as the model takes them (`labels` if they have any), with their lengths."""
        raise NotImplementedError

    def collator(self, tokenizer: PreTrainedTokenizerBase, multiple: int | None) -> Callable[[list[dict]], dict]:
        """Pads a batch to its longest row (a multiple of `multiple`)."""
        return DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple)

    def scores(self, split: str, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """Metrics of a split whose rows stand in the order of `evaluation[split]` or `tests[split]`."""
        raise NotImplementedError

    def write_predictions(self, folder: Path, split: str, logits: np.ndarray) -> Path | None:
        """Write the answers for a test split; `None` if the task has no form for them."""
        return None

    def usage(self, name: str, trust: str) -> str:
        """Python for the model card that uses the model."""
        raise NotImplementedError


def say(training: FinetuneTrainingArguments, text: str) -> None:
    """Print on the main process alone."""
    if training.process_index == 0:
        print(text, flush=True)


def run_script(
    arguments_class: type[FinetuneArguments],
    make_task: Callable[[Any, FinetuneTrainingArguments], Task],
    description: str,
    words: list[str] | None = None,
    training_class: type[FinetuneTrainingArguments] = FinetuneTrainingArguments,
) -> int:
    """A finetuning script: 0 if all is well, 2 after an error that the user can mend, 130 after Ctrl-C.

    Args:
        arguments_class: the script's options.
        make_task: makes the task from them.
        description: for `--help`.
        words: command line without the script's name.
        training_class: a subclass with other defaults, where the script has them.
    """
    words = sys.argv[1:] if words is None else words
    logging.disable_progress_bar()  # of files; that of the training stays
    try:
        arguments, training = parse(arguments_class, words, description, training_class)
        check_output(Path(training.output_dir), arguments.model_name_or_path)
        task = make_task(arguments, training)
        run_all(task, arguments, training, [sys.argv[0], *words])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted. The same command goes on from the last checkpoint (end of an epoch).", file=sys.stderr)
        return 130  # what shells give for it
    return 0


def run_all(
    task: Task, arguments: FinetuneArguments, training: FinetuneTrainingArguments, command: list[str]
) -> dict[str, Any]:
    """Train every run of the plan that is not finished, and write the table.

    Args:
        task: what to train on.
        arguments, training: from `parse`.
        command: words of the command line, for the results and the card.

    Returns:
        The content of `results.json`.
    """
    folder = Path(training.output_dir)
    runs = plan(arguments, training)
    if training.resume_from_checkpoint and len(runs) > 1:
        raise UserError(
            "--resume_from_checkpoint names one checkpoint, but there are several runs; they continue alone."
        )
    if training.label_smoothing_factor and task.problem_type != SINGLE_LABEL:
        raise UserError("--label_smoothing_factor is for single-label tasks: here there is no class to smooth to.")
    asked_checkpoint(training, folder)
    shrink(task, arguments, training.seed)
    for run in runs:
        check_settings(run, run_settings(run, arguments, training))
    for note in task.notes:
        say(training, note)
    repository = None
    if training.push_to_hub:
        if len(arguments.model_name_or_path) > 1:
            raise UserError("--push_to_hub publishes one model: give one --model_name_or_path.")
        repository = reserve_repository(training)
    bases = {name: open_base(task, name, arguments, training) for name in arguments.model_name_or_path}
    prepared = {name: prepare(task, name, base, training) for name, base in bases.items()}
    finished: dict[str, list[dict[str, Any]]] = {name: [] for name in prepared}
    for index, run in enumerate(runs, 1):
        say(training, f"\n[{index}/{len(runs)}] {run.name}")
        finished[run.model].append(one_run(task, run, prepared[run.model], arguments, training, command))
        drop_losers(task, finished[run.model], training)
    folders = {}
    for name, results in finished.items():
        own = [run for run in runs if run.model == name]
        while (index := chosen_without_weights(task, results, folder)) is not None:
            say(training, f"\nThe weights of {own[index].name} were removed by an earlier command: training it again.")
            results[index] = one_run(task, own[index], prepared[name], arguments, training, command, again=True)
        folders[own[0].label] = keep_best(task, results, arguments, training, command)
    everything = [result for results in finished.values() for result in results]
    summary = finish_report(task, everything, folders, command, training)
    if repository is not None:
        push_folder(folders[runs[0].label], repository, training)
    return summary


def shrink(task: Task, arguments: FinetuneArguments, seed: int) -> None:
    """Draw `max_train_samples` and `max_eval_samples` rows at random, once for all runs; their order stays."""

    def drawn(rows: Dataset, count: int | None, split: str) -> Dataset:
        if count is None or count >= len(rows):
            return rows
        chosen = np.sort(np.random.default_rng(seed).permutation(len(rows))[:count])
        task.drawn[split] = (count, len(rows))
        task.notes.append(f"{split}: {count:,} of {len(rows):,} rows, drawn at random with seed {seed}.")
        return rows.select(chosen)

    task.drawn = {}
    task.train = drawn(task.train, arguments.max_train_samples, "train")
    task.evaluation = {split: drawn(rows, arguments.max_eval_samples, split) for split, rows in task.evaluation.items()}


@dataclass
class Base:
    """What is known of a pretrained model before any data are read with it; `extended` is its new longest input."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    extended: int | None
    notes: list[str]


@dataclass
class Prepared(Base):
    """A model's tokenizer, and the data in its tokens; the same for all its runs."""

    train: Encoded
    evaluation: dict[str, Encoded]
    tests: dict[str, Encoded]


def open_base(task: Task, name: str, arguments: FinetuneArguments, training: FinetuneTrainingArguments) -> Base:
    """Load tokenizer and model once, to find what is wrong with them before the data are tokenized.

    Raises:
        UserError: The model cannot be loaded, not for inputs of `max_length`, or not with the Trainer's options.
    """
    config = load_config(name)
    tokenizer = load_tokenizer(name, config)
    longest = longest_input(config)
    max_length = arguments.max_length or min(512, longest)
    extended = max_length if max_length > longest else None
    model, notes = load_model(task, name, extended, arguments, arguments.dropout)
    training.check_with(model)
    if arguments.max_length is None:
        notes.append(f"Inputs are at most {max_length:,} tokens long (--max_length; the model takes {longest:,}).")
    tokenizer.model_max_length = max(max_length, longest)
    return Base(tokenizer, max_length, extended, notes)


def prepare(task: Task, name: str, base: Base, training: FinetuneTrainingArguments) -> Prepared:
    """Tokenize the data for a model, and say what was found."""
    encode = functools.partial(task.encode, tokenizer=base.tokenizer, max_length=base.max_length)
    splits = {"train": task.train, **task.evaluation, **task.tests}
    encoded = {split: encode(rows) for split, rows in splits.items()}
    notes = base.notes + [part.report(split, base.max_length) for split, part in encoded.items()]
    say(training, f"\n{name}")
    for note in notes:
        say(training, f"  {note}")
    return Prepared(
        base.tokenizer,
        base.max_length,
        base.extended,
        notes,
        encoded["train"],
        {split: encoded[split] for split in task.evaluation},
        {split: encoded[split] for split in task.tests},
    )


def load_model(
    task: Task, name: str, length: int | None, arguments: FinetuneArguments, dropout: float | None
) -> tuple[Any, list[str]]:
    """The model with the task's head, and what its user should know.

    Args:
        length: extend the positions to so many tokens.
        dropout: of the hidden states, in place of the checkpoint's.
    """
    fields = {**task.model_fields(), **arguments.config_fields()}
    if dropout is not None:
        config = load_config(name)
        fields |= {field: dropout for field in _DROPOUTS if hasattr(config, field)}
    return load_encoder(task.auto_class, name, length=length, **fields)


def one_run(
    task: Task,
    run: Run,
    prepared: Prepared,
    arguments: FinetuneArguments,
    training: FinetuneTrainingArguments,
    command: list[str],
    again: bool = False,
) -> dict[str, Any]:
    """Train, evaluate and save one run, unless it is finished; continue it where a kill has left it.

    Args:
        task, run, prepared: what to train.
        arguments, training, command: of the script.
        again: train it even if it is finished.

    Returns:
        The content of `run.json`, with `folder`.
    """
    finished = run.folder / RUN_FILE
    if finished.is_file() and not again:
        say(training, f"  Finished before: {finished}.")
        remove_checkpoints(run.folder, training)
        return {**json.loads(finished.read_text(encoding="utf-8")), "folder": str(run.folder)}
    if training.process_index == 0:
        run.folder.mkdir(parents=True, exist_ok=True)
        write_json(run.folder / SETTINGS_FILE, run_settings(run, arguments, training))
    own = run_arguments(run, task, training)
    set_seed(run.seed)
    model, _ = load_model(task, run.model, prepared.extended, arguments, run.dropout)
    trainer = make_trainer(task, model, prepared, own, arguments)
    start = find_checkpoint(run, training)
    resumed_from = 0
    if start is not None:
        trainer.progress.seconds = json.loads((start / CLOCK).read_text(encoding="utf-8"))["seconds"]
        resumed_from = json.loads((start / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]
    began = time.perf_counter()
    train(trainer, start, arguments.early_stopping_patience)
    wall = time.perf_counter() - began
    scores, predictions = evaluate(task, trainer, prepared, run.folder)
    state, seconds = trainer.state, max(trainer.progress.seconds, 1e-9)
    rows = (state.epoch or 0) * len(prepared.train.rows)
    result = {
        "task": task.name,
        "title": task.title,
        "development": next(iter(task.evaluation)),
        "model": run.label,
        "model_name_or_path": run.model,
        "model_type": model.config.model_type,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "batch_size": run.batch_size,
        "learning_rate": run.learning_rate,
        "dropout": run.dropout,
        "seed": run.seed,
        "scores": scores,
        "main_metric": task.main_metric,
        "best_step": state.best_global_step,
        "steps": state.global_step,
        "planned_steps": state.max_steps,
        "epochs": number(state.epoch or 0.0),
        "history": [row for row in state.log_history if f"eval_{task.main_metric}" in row],
        "seconds": round(wall, 2),
        "training_seconds": round(seconds, 2),
        "resumed_from_step": resumed_from,
        "samples_per_second": round(rows / seconds, 2),
        "tokens_per_second": round(state.num_input_tokens_seen / seconds, 1),
        "max_length": prepared.max_length,
        "train_rows": len(prepared.train.rows),
        "drawn": task.drawn,
        "cut": {"train": {"rows": prepared.train.cut_rows, "tokens": prepared.train.cut_tokens}},
        "notes": task.notes + prepared.notes,
        "predictions": [path.name for path in predictions],
        "processes": training.world_size,
        **machine_and_versions(),
    }
    trainer.save_model(str(run.folder))
    trainer.accelerator.wait_for_everyone()
    if training.process_index == 0:
        write_card(task, result, arguments, training, command, run.folder)
        (run.folder / "training_args.bin").unlink(missing_ok=True)  # a pickle of this machine's paths
        write_json(finished, result)
    remove_checkpoints(run.folder, training)
    trainer.accelerator.wait_for_everyone()
    say(
        training,
        "  "
        + ", ".join(f"{split} {name} {value:.4f}" for split, part in scores.items() for name, value in part.items()),
    )
    for path in predictions:
        say(training, f"  Predictions: {path}")
    return {**result, "folder": str(run.folder)}


def remove_checkpoints(folder: Path, training: FinetuneTrainingArguments) -> None:
    """Delete what a finished run needs no more: the best weights stand in the folder itself."""
    if training.process_index == 0:
        for path in checkpoints(folder):
            shutil.rmtree(path)


def run_arguments(run: Run, task: Task, training: FinetuneTrainingArguments) -> FinetuneTrainingArguments:
    """The Trainer's arguments of one run."""
    share = training.world_size * training.gradient_accumulation_steps
    own = dataclasses.replace(
        training,
        output_dir=str(run.folder),
        per_device_train_batch_size=run.batch_size // share,
        learning_rate=run.learning_rate,
        seed=run.seed,
        data_seed=run.seed,
        metric_for_best_model=task.main_metric,
        greater_is_better=task.greater_is_better,
        push_to_hub=False,  # the finished folder is pushed, with its card
        resume_from_checkpoint=None,
    )
    own._n_gpu = min(own.n_gpu, 1)
    return own


def make_trainer(
    task: Task,
    model: Any,
    prepared: Prepared,
    training: FinetuneTrainingArguments,
    arguments: FinetuneArguments,
) -> FinetuneTrainer:
    """The Trainer of one run."""
    development = next(iter(task.evaluation))
    rows, order = longest_first(prepared.evaluation[development])

    def metrics(prediction: EvalPrediction) -> dict[str, float]:
        return task.scores(development, unsort(prediction.predictions, order), unsort(prediction.label_ids, order))

    watches = training.load_best_model_at_end
    return FinetuneTrainer(
        problem_type=task.problem_type,
        lengths=list(prepared.train.rows["length"]),
        patience=arguments.early_stopping_patience if watches else 0,
        model=model,
        args=training,
        train_dataset=prepared.train.rows.remove_columns("length"),
        eval_dataset=rows,
        data_collator=task.collator(prepared.tokenizer, 8 if training.bf16 or training.fp16 else None),
        processing_class=prepared.tokenizer,
        compute_metrics=metrics,
    )


def longest_first(encoded: Encoded) -> tuple[Dataset, np.ndarray]:
    """Rows by falling length, so that batches hold few pads, and where each came from."""
    order = np.argsort(-np.asarray(encoded.rows["length"]), kind="stable")
    return encoded.rows.remove_columns("length").select(order), order


def unsort(values: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Undo `longest_first`."""
    restored = np.empty_like(values)
    restored[order] = values
    return restored


def asked_checkpoint(training: FinetuneTrainingArguments, folder: Path) -> Path | None:
    """The checkpoint that `--resume_from_checkpoint` names, if it names one.

    Raises:
        UserError: It is damaged or missing; the message names the newest whole one in `folder`.
    """
    asked = training.resume_from_checkpoint
    if not asked or str(asked).lower() in ("true", "false"):
        return None
    path = Path(asked)
    fault = damage(path) if path.is_dir() else "there is no such folder"
    if fault is not None:
        found, _ = newest_whole_checkpoint(folder)
        instead = f" The newest whole one is {found}." if found else ""
        raise UserError(f"--resume_from_checkpoint {path}: {fault}.{instead}")
    return path


def find_checkpoint(run: Run, training: FinetuneTrainingArguments) -> Path | None:
    """Where to continue: the checkpoint that was asked for, or else the newest whole one.

    Raises:
        UserError: The one that was asked for is damaged or missing.
    """
    found, notes = asked_checkpoint(training, run.folder), []
    if found is None:
        found, notes = newest_whole_checkpoint(run.folder)
    for note in notes:
        say(training, f"  {note}")
    if found is not None:
        say(training, f"  Continuing from {found.name}.")
    elif notes:
        say(training, "  No whole checkpoint is left: starting again.")
    return found


def train(trainer: FinetuneTrainer, start: Path | None, patience: int) -> None:
    """Train to the end; the model then has the best weights."""
    if start is None or not stopped_early(start, patience):
        trainer.train(resume_from_checkpoint=str(start) if start else None)
        return
    state = type(trainer.state).load_from_json(str(start / "trainer_state.json"))
    weights = Path(state.best_model_checkpoint or start) / "model.safetensors"
    trainer.model.load_state_dict(safetensors.torch.load_file(weights))
    trainer.state = state


def evaluate(
    task: Task, trainer: FinetuneTrainer, prepared: Prepared, folder: Path
) -> tuple[dict[str, dict[str, float]], list[Path]]:
    """Scores of every labelled split, and the files of answers for the test splits."""
    scores, files = {}, []
    trainer.compute_metrics = None  # it knows the order of one split
    for split, encoded in {**prepared.evaluation, **prepared.tests}.items():
        rows, order = longest_first(encoded)
        output = trainer.predict(rows)
        logits = unsort(output.predictions, order)
        if "labels" in rows.column_names:
            scores[split] = task.scores(split, logits, unsort(output.label_ids, order))
        if split in task.tests and trainer.is_world_process_zero():
            (folder / "predictions").mkdir(exist_ok=True)
            path = task.write_predictions(folder / "predictions", split, logits)
            files += [path] if path is not None else []
    return scores, files
