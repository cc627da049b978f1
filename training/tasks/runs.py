"""Runs that survive a kill: what a finetuning command does from its options to the table at the end.

A `Command` has a `Task` and a dataclass of options. It checks everything that can be checked early, trains each `Run`
of the plan (one, or one per model, setting and seed) and writes:

    output_dir/results.json, results.md      every run, median and best for each model and setting
    output_dir/ (a single run)               or output_dir/runs/<model>/<setting>/ (several)
        settings.json                        what the run is; a command with other settings may not continue it
        checkpoint-*                         of the Trainer, while the run is unfinished
        model.safetensors, config, tokenizer, README.md, predictions/*
        run.json                             its scores; written last and atomically: the run is finished
    output_dir/best/<model>/                 of several runs of a model, the chosen one; the others leave no weights

Ctrl-C or a kill (SIGTERM, SIGKILL) ends a run immediately. The same command continues from its last checkpoint, so at
most one epoch is lost. To save more often: `--save_strategy steps --save_steps N`, and the same of `eval`.
"""

import dataclasses
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from common.hub import push_folder, reserve_repository
from common.machine import machine
from common.models import load_config, load_encoder, load_tokenizer, longest_input
from common.options import parse
from datasets import Dataset, disable_progress_bars
from transformers import PreTrainedTokenizerBase, SchedulerType, set_seed

from luna_hf.scripting import UserError, locked, run_script, write_json
from tasks.arguments import REFUSED, FinetuneArguments, FinetuneTrainingArguments
from tasks.best import drop_losers, keep_best, lost_best
from tasks.files import Encoded
from tasks.labels import REGRESSION, SINGLE_LABEL, ClassOrder
from tasks.plan import (
    RUN_FILE,
    SETTINGS_FILE,
    Run,
    check_output,
    check_settings,
    data_digest,
    is_begun,
    plan,
    read_json,
    read_run,
    run_settings,
)
from tasks.report import Result, outcome_text, write_card, write_report
from tasks.task import Job, Task
from tasks.trainer import (
    Diverged,
    FinetuneTrainer,
    find_checkpoint,
    read_state,
    remove_checkpoints,
    train,
)

# Names of the dropout of the hidden states in configs of different types.
_DROPOUTS = ("hidden_dropout_prob", "embedding_dropout", "mlp_dropout")
# Tokens of a batch, beyond which its memory deserves a note; and of the batch that the note suggests.
_ORDINARY, _SMALL = 2**14, 2**13


@dataclass(frozen=True)
class Command:
    """A finetuning command: its name (`finetune_glue`), what makes its task, and the classes of its options."""

    name: str
    description: str
    make_task: Callable[[Any], Task]
    arguments: type[FinetuneArguments]
    training: type[FinetuneTrainingArguments] = FinetuneTrainingArguments

    def parse(self, words: list[str]) -> tuple[FinetuneArguments, FinetuneTrainingArguments]:
        """The options of a command line."""
        return parse((self.arguments, self.training), words, self.description, command=self.name, refused=REFUSED)

    def main(self, words: list[str] | None = None) -> int:
        """Run the command: 0, or 2 after an error that the user can fix, or 130 after Ctrl-C."""
        words = sys.argv[1:] if words is None else words

        def script() -> None:
            arguments, training = self.parse(words)
            folder = Path(training.output_dir)
            check_output(folder, arguments.model_name_or_path, repository(training), training.hub_token)
            with locked(folder / ".lock") if training.process_index == 0 else nullcontext():
                run_all(Job(self.make_task(arguments), arguments, training, [f"training/{self.name}.py", *words]))

        disable_progress_bars()  # of `datasets`
        return run_script(script, "the same command continues from the last checkpoint", clean_on_sigterm=False)


@dataclass
class Prepared:
    """A model's tokenizer and the splits in its tokens, the same for all its runs."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    order: ClassOrder = field(default_factory=ClassOrder)
    notes: list[str] = field(default_factory=list)
    encoded: dict[str, Encoded] = field(default_factory=dict)


def run_all(job: Job) -> None:
    """Train every run of the plan that is not finished, and write the table."""
    task, training, models = job.task, job.training, job.arguments.model_name_or_path
    runs = plan(job.arguments, training)
    if training.label_smoothing_factor and task.problem_type != SINGLE_LABEL:
        raise UserError(f"--label_smoothing_factor needs single-label classification, not {task.problem_type}.")
    if training.push_to_hub and len(models) > 1:
        raise UserError("--push_to_hub publishes one model: give one --model_name_or_path.")
    task.digests = {split: data_digest(rows) for split, rows in task.splits.items()}
    equal = [split for split in task.evaluation if task.digests[split] == task.digests["train"]]
    task.notes += [f"{split}: the rows of the training split, so its scores do not hold for others." for split in equal]
    for run in runs:
        notes = check_settings(run.folder, run_settings(run, job), task.sources, job.arguments.accept_changed_data)
        task.notes += [note for note in notes if note not in task.notes]
    sample(job)
    job.print("\n".join(task.notes))
    push = training.push_to_hub and job.is_main
    if push:
        reserved = reserve_repository(repository(training), training.hub_private_repo, training.hub_token)
    prepared = {name: open_model(job, name) for name in models}
    for name, part in prepared.items():
        encode(job, name, part)
    results, folders = train_all(job, runs, prepared)
    write_report(job, results, folders)
    for model in dict.fromkeys(run.label for run in runs):
        if model not in folders:
            raise UserError(f"Every run of {model!r} diverged, so no model was saved. Lower --learning_rate.")
    if push:
        (model,) = folders.values()
        # Settings and the run's file name folders of this machine; card and table have the figures.
        ignore = ["checkpoint-*", "runs/*", SETTINGS_FILE, RUN_FILE]
        extra = [] if model == job.folder else [job.folder / "results.md"]
        push_folder(model, reserved, "Finetuned model", ignore, extra, training.hub_token)
        job.print(f"Pushed {model} to {reserved}.")


def repository(training: FinetuneTrainingArguments) -> str:
    """The name on the Hub that the options ask for, or ""."""
    name = training.hub_model_id or Path(training.output_dir).resolve().name
    return name if training.push_to_hub else ""


def train_all(job: Job, runs: list[Run], prepared: dict[str, Prepared]) -> tuple[list[Result], dict[str, Path]]:
    """Train the runs; their results, and the folder of each model's chosen weights, unless all its runs diverged."""
    finished: dict[str, list[Result]] = {name: [] for name in prepared}
    for index, run in enumerate(runs, 1):
        job.print(f"\n[{index}/{len(runs)}] {run.name}")
        finished[run.model].append(one_run(job, run, prepared[run.model]))
        drop_losers(job, finished[run.model])
    folders = {}
    for name, results in finished.items():
        own = [run for run in runs if run.model == name]
        while (index := lost_best(job, results)) is not None:
            job.print(f"\nAn earlier command removed the weights of {own[index].name}: training it again.")
            results[index] = one_run(job, own[index], prepared[name])
        if kept := keep_best(job, results):
            folders[own[0].label] = kept
    return [result for results in finished.values() for result in results], folders


def sample(job: Job) -> None:
    """Draw `max_train_samples` and `max_eval_samples` rows at random, once for all runs; their order stays."""
    task, arguments, seed = job.task, job.arguments, job.training.seed

    def drawn(rows: Dataset, count: int | None, split: str) -> Dataset:
        if count is None or count >= len(rows):
            return rows
        chosen = np.sort(np.random.default_rng(seed).permutation(len(rows))[:count])
        task.drawn[split] = (count, len(rows))
        task.notes.append(f"{split}: {count:,} of {len(rows):,} rows, drawn at random with seed {seed}.")
        return rows.select(chosen)

    task.train = drawn(task.train, arguments.max_train_samples, "train")
    task.evaluation = {split: drawn(rows, arguments.max_eval_samples, split) for split, rows in task.evaluation.items()}


# ---- models and their data ----


def open_model(job: Job, name: str) -> Prepared:
    """Load tokenizer and model once, to find what is wrong with them before the data are tokenized.

    Raises:
        UserError: The model cannot be loaded, or not for inputs of `max_length`; or the chosen optimizer or schedule
            cannot be created.
    """
    config = load_config(name)
    tokenizer = load_tokenizer(name, config)
    longest = longest_input(config)
    max_length = job.arguments.max_length or min(512, longest)
    notes = job.task.check_length(tokenizer, max_length)
    if job.arguments.max_length is None:
        notes.append(f"Inputs have at most {max_length:,} tokens (--max_length); the model takes {longest:,}.")
    prepared = Prepared(tokenizer, max_length, job.task.class_order(config, name))
    model, found = load_model(job, name, prepared, job.arguments.dropout)
    prepared.notes = [note for note in (*found, prepared.order.note, *notes) if note]
    job.training.check_with(model, job.task.main_metric)
    tokenizer.model_max_length = max(max_length, longest)
    return prepared


def encode(job: Job, name: str, prepared: Prepared) -> None:
    """Tokenize the data for a model, and print the notes on it."""
    splits = job.task.splits
    job.print(f"\n{name}: tokenizing {', '.join(splits)}")
    for split, rows in splits.items():
        encoded = job.task.encode(rows, prepared.tokenizer, prepared.max_length)
        prepared.encoded[split] = in_order(encoded, prepared.order)
        prepared.notes.append(prepared.encoded[split].report(split, prepared.max_length))
    labels, metric = prepared.encoded[job.development].rows["labels"], job.task.main_metric
    is_correlation = metric == "matthews_correlation" or (job.task.problem_type == REGRESSION and metric != "mse")
    if is_correlation and len({str(label) for label in labels}) < 2:
        raise UserError(
            f"{job.task.sources[job.development]} has equal labels in all rows to evaluate on, for which {metric} is "
            "undefined. Evaluate on rows with different labels."
        )
    job.print("\n".join(f"- {note}" for note in prepared.notes))


def in_order(encoded: Encoded, order: ClassOrder) -> Encoded:
    """Rows with labels in the order of a model's classes."""
    if not order.place or "labels" not in encoded.rows.column_names:
        return encoded
    rows = encoded.rows.map(
        lambda batch: {"labels": order.to_model(batch["labels"])},
        batched=True,
        keep_in_memory=True,
        load_from_cache_file=False,
    )
    return dataclasses.replace(encoded, rows=rows)


def load_model(job: Job, name: str, prepared: Prepared, dropout: float | None) -> tuple[Any, list[str]]:
    """The model with the task's head and long enough positions, and notes on how it was loaded."""
    fields = {**job.task.model_fields(), **job.arguments.config_fields()}
    if names := prepared.order.names:
        fields |= {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}
    if dropout is not None:
        config = load_config(name)
        fields |= {field: dropout for field in _DROPOUTS if hasattr(config, field)}
    return load_encoder(job.task.auto_class, name, prepared.max_length, **fields)


# ---- one run ----


def one_run(job: Job, run: Run, prepared: Prepared) -> Result:
    """Train, evaluate and save one run where a kill left it, unless it is finished.

    Returns:
        The content of `run.json`, with `folder`.
    """
    finished, settings = read_run(run.folder), run_settings(run, job)
    if finished and not (finished["diverged"] and read_json(run.folder / SETTINGS_FILE) != settings):
        job.print(f"  Finished before: {run.folder / RUN_FILE}.\n  {outcome_text(finished)}")
        if job.is_main:
            remove_checkpoints(run.folder)
        return finished
    job.wait()
    if job.is_main:
        run.folder.mkdir(parents=True, exist_ok=True)
        if finished or not is_begun(run.folder):
            (run.folder / RUN_FILE).unlink(missing_ok=True)
            write_json(run.folder / SETTINGS_FILE, settings)
    set_seed(run.seed)
    model, _ = load_model(job, run.model, prepared, run.dropout)
    trainer = make_trainer(job, run, model, prepared)
    if note := size_note(trainer.args, prepared.encoded["train"].longest):
        job.print(f"  {note}")
    start = find_checkpoint(run.folder, job.print, trainer.args.load_best_model_at_end)
    resumed_from = read_state(start)["global_step"] if start else 0  # `train` may delete it
    outcome = attempt(job, trainer, prepared, start, run.folder)
    result = {**describe(job, run, prepared, trainer), **outcome, "resumed_from_step": resumed_from}
    if not result["diverged"]:
        trainer.save_model(str(run.folder))
        job.wait()
    if job.is_main:
        if not result["diverged"]:
            write_card(job, result, run.folder)
        (run.folder / "training_args.bin").unlink(missing_ok=True)  # a pickle of this machine's paths
        write_json(run.folder / RUN_FILE, result)
        remove_checkpoints(run.folder)
    job.wait()
    job.print("  " + outcome_text(result))
    for name in result["predictions"]:
        job.print(f"  Predictions: {run.folder / 'predictions' / name}")
    return read_run(run.folder)


def size_note(training: Any, longest: int) -> str:
    """What to do if the largest batch does not fit into memory; "" if it is of ordinary size."""
    rows, steps = training.per_device_train_batch_size, training.gradient_accumulation_steps
    if rows == 1 or rows * longest <= _ORDINARY:
        return ""
    fitting = next(count for count in range(max(_SMALL // longest, 1), 0, -1) if rows % count == 0)
    return (
        f"A batch of {rows} rows has up to {rows * longest:,} tokens, padding included. If memory runs out, add "
        f"--per_device_train_batch_size {fitting} --gradient_accumulation_steps {rows * steps // fitting}, with which "
        "the updates stay the same."
    )


def attempt(job: Job, trainer: FinetuneTrainer, prepared: Prepared, start: Path | None, folder: Path) -> Result:
    """Train from a checkpoint or the beginning, and evaluate: `scores`, or the reason why the run `diverged`."""
    began = time.perf_counter()
    outcome: Result = {"scores": {}, "predictions": [], "diverged": None}
    try:
        train(trainer, start, job.arguments.early_stopping_patience)
        outcome["seconds"] = round(time.perf_counter() - began, 2)
        trainer.require_finite(dict(trainer.model.named_parameters()))
        scores, files = evaluate(job, trainer, prepared, folder)
        outcome |= {"scores": scores, "predictions": [path.name for path in files]}
    except Diverged as error:
        outcome = {"seconds": round(time.perf_counter() - began, 2), **outcome, "diverged": str(error)}
    return outcome


def describe(job: Job, run: Run, prepared: Prepared, trainer: FinetuneTrainer) -> Result:
    """Everything that `run.json` holds about a run but its scores."""
    task, state, spent = job.task, trainer.state, max(trainer.seconds, 1e-9)
    train = prepared.encoded["train"]
    rows = (state.epoch or 0) * len(train.rows)
    return {
        "task": task.name,
        "title": task.title,
        "development": job.development,
        "model": run.label,
        "model_name_or_path": run.model,
        "model_type": trainer.model.config.model_type,
        "labels": labels_of(task, prepared),
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        **{name: getattr(run, name) for name in ("batch_size", "learning_rate", "dropout", "seed")},
        "main_metric": task.main_metric,
        "best_step": state.best_global_step if trainer.args.load_best_model_at_end else None,
        "steps": state.global_step,
        "planned_steps": state.max_steps,
        "epochs": state.epoch or 0.0,
        "history": [row for row in state.log_history if f"eval_{task.main_metric}" in row],
        "training_seconds": round(spent, 2),
        "samples_per_second": round(rows / spent, 2),
        "tokens_per_second": round(state.num_input_tokens_seen / spent, 1),
        "max_length": prepared.max_length,
        "train_rows": len(train.rows),
        "drawn": task.drawn,
        "cut": {"train": {"rows": train.cut_rows, "tokens": train.cut_tokens}},
        "data": task.digests,
        "notes": task.notes + prepared.notes,
        "processes": job.training.world_size,
        **machine("scikit-learn"),
    }


def labels_of(task: Task, prepared: Prepared) -> list[str]:
    """The names of the classes, in the order of the model's outputs."""
    names = task.model_fields().get("id2label", {})
    return [*(prepared.order.names or names.values())] if names else []


def make_trainer(job: Job, run: Run, model: Any, prepared: Prepared) -> FinetuneTrainer:
    """The Trainer of one run."""
    task, training = job.task, job.training
    own = dataclasses.replace(
        training,
        output_dir=str(run.folder),
        per_device_train_batch_size=run.batch_size // (training.world_size * training.gradient_accumulation_steps),
        learning_rate=run.learning_rate,
        seed=run.seed,
        metric_for_best_model=task.main_metric,
        greater_is_better=task.greater_is_better,
        push_to_hub=False,  # the finished folder is pushed, with its card
    )
    own._n_gpu = min(own.n_gpu, 1)
    if own.lr_scheduler_type in (SchedulerType.GREEDY, SchedulerType.REDUCE_ON_PLATEAU):  # they follow the score
        mode = "max" if task.greater_is_better else "min"
        own.lr_scheduler_kwargs = {"mode": mode, **(own.lr_scheduler_kwargs or {})}
    train, order = prepared.encoded["train"].rows, prepared.order
    rows, places = longest_first(prepared.encoded[job.development])

    def scores(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        return task.scores(job.development, order.logits_to_data(logits[places]), order.to_data(labels[places]))

    # Tensor cores like multiples of 8; an input must not outgrow the model's positions.
    multiple = 8 if (own.bf16 or own.fp16) and prepared.max_length % 8 == 0 else None
    return FinetuneTrainer(
        problem_type=task.problem_type,
        lengths=list(train["length"]),
        patience=job.arguments.early_stopping_patience if own.load_best_model_at_end else 0,
        model=model,
        args=own,
        train_dataset=train.remove_columns("length"),
        eval_dataset=rows,
        data_collator=task.collator(prepared.tokenizer, multiple),
        processing_class=prepared.tokenizer,
        scores=scores,
    )


def longest_first(encoded: Encoded) -> tuple[Dataset, np.ndarray]:
    """Rows by falling length, so that batches hold few pads, and the place of every row among them."""
    order = np.argsort(-np.asarray(encoded.rows["length"]), kind="stable")
    return encoded.rows.remove_columns("length").select(order), np.argsort(order)


def evaluate(
    job: Job, trainer: FinetuneTrainer, prepared: Prepared, folder: Path
) -> tuple[dict[str, dict[str, float]], list[Path]]:
    """Scores of every labelled split, and the files of answers for the test splits."""
    scores, logits = {}, {}
    trainer.compute_metrics = None  # it knows the order of one split
    for split in [*job.task.evaluation, *job.task.tests]:
        rows, places = longest_first(prepared.encoded[split])
        output = trainer.predict(rows)
        logits[split] = prepared.order.logits_to_data(output.predictions[places])
        if "labels" in rows.column_names:
            labels = prepared.order.to_data(output.label_ids[places])
            scores[split] = job.task.scores(split, logits[split], labels)
            trainer.require_finite({f"{split} {name}": value for name, value in scores[split].items()})
    if not trainer.is_world_process_zero() or not job.task.tests:
        return scores, []
    place = folder / "predictions"
    place.mkdir(exist_ok=True)
    return scores, [job.task.write_predictions(place, split, logits[split]) for split in job.task.tests]
