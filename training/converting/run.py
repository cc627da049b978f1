"""A conversion with training: from a recipe to a folder that is ready for the Hub."""

import dataclasses
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common.hub import push_folder
from common.machine import machine
from data.corpus import Corpus, open_corpus
from data.masking import make_masking
from data.prepare import open_stores
from data.tokenizer import borders
from engine.checkpoint import (
    Counters,
    StopRequest,
    checkpoints,
    load_checkpoint,
    read_state,
    remove_all,
    remove_unfinished,
    save_checkpoint,
)
from engine.log import RunLog
from engine.loop import make_accelerator
from engine.output import changed_inputs, clear_output, find_checkpoint, fingerprint_inputs, held, on_main, save_model
from engine.setup import Opened, close_trackers, make_optimizer, reserve, start_log
from engine.sharding import is_sharded
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from transformers import AutoModel, AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase

from converting.card import make_card
from converting.evaluation import HeldOut, plot, summary
from converting.models import Made, groups, make_pair
from converting.objective import Pair
from converting.recipe import ConvertRecipe, Stage, stage_at
from converting.texts import Documents, Frame, Rows
from luna_hf import FAMILIES
from luna_hf.convert.command import make_plain
from luna_hf.scripting import UserError, load_tokenizer, write_json, write_text
from luna_hf.warm_start.sentence_folder import SentenceFolder, find_transformer, read_sentence_folder
from luna_hf.warm_start.source import read_config

PLOT = "conversion.png"


@dataclasses.dataclass
class Run:
    """The parts of a run."""

    recipe: ConvertRecipe
    stages: list[Stage]
    accelerator: Accelerator
    pair: Pair
    rows: Rows
    optimizer: Optimizer
    scheduler: LambdaLR
    held_out: HeldOut
    stop: StopRequest
    log: RunLog
    record: dict[str, Any]

    @property
    def folder(self) -> Path:
        """The output folder."""
        return Path(self.recipe.output_dir)

    @property
    def passes(self) -> int:
        """Forward passes of an update, on each process."""
        return self.recipe.global_batch_tokens // self.recipe.pass_tokens // self.accelerator.num_processes


def convert(recipe: ConvertRecipe, command: str) -> dict[str, Any] | None:
    """Start or resume a run; `command` is the command line for the card.

    Returns:
        The content of `metrics.json`; `None` if a signal stopped the run.

    Raises:
        UserError: A mistake in the recipe, the source, a folder or a text.
    """
    accelerator, folder = make_accelerator(recipe), Path(recipe.output_dir)
    passes = recipe.global_batch_tokens // recipe.pass_tokens
    if is_sharded(accelerator) or passes % accelerator.num_processes:
        raise UserError(
            f"`global_batch_tokens` gives {passes} passes, which {accelerator.num_processes} processes cannot share "
            "evenly. Raise it, and launch without sharding."
        )
    with held(accelerator, folder):
        found = on_main(accelerator, lambda: find_checkpoint(recipe, print))
        tokenizer, sentences = read_source(recipe)
        frame = Frame(*borders(tokenizer), tokenizer.pad_token_id)
        made = make_pair(recipe, sentences.pooling if sentences else "mean", frame)
        make_plain(tokenizer, made.pair.student.config.max_position_embeddings)
        corpora = open_corpora(recipe)
        accelerator.print(f"Read {'; '.join(corpus.description for corpus in corpora)}.", *made.report, sep="\n")
        repository = on_main(accelerator, lambda: reserve(recipe))
        opened = on_main(accelerator, lambda: open_folder(recipe, tokenizer, corpora, found))
        positions = made.pair.student.config.max_position_embeddings if made.kept_positions else 0
        rows, held_out = open_rows(recipe, corpora, tokenizer, accelerator, frame, positions)
        run, counters = prepare(recipe, accelerator, made, rows, held_out, opened)
        with run.stop:
            ended = train(run, counters)
        if not ended:
            last = checkpoints(folder)[-1]
            accelerator.print(f"Stopped after step {counters.step:,}, saved in {last}. The same command resumes there.")
            close_trackers(accelerator)
            return None
        figures = finish(run, sentences, corpora, counters, command)
        close_trackers(accelerator)
        if repository and accelerator.is_main_process:
            push_folder(folder, repository, "Converted model", ignore=["checkpoints/**", f"{recipe.model_name}/**"])
    return figures


# ---- the parts ----


def read_source(recipe: ConvertRecipe) -> tuple[PreTrainedTokenizerBase, SentenceFolder | None]:
    """The source's tokenizer, and what sentence-transformers stores beside its transformer, if it is of that library.

    Raises:
        UserError: It has no tokenizer, or a pooling or module that cannot be kept.
    """
    try:
        sentences, config = read_sentence_folder(recipe.teacher), read_config(recipe.teacher)
        subfolder = find_transformer(recipe.teacher)
    except ValueError as error:
        raise UserError(f"`teacher`: {error}") from error
    if config.model_type in FAMILIES:
        raise UserError(f"`teacher` {recipe.teacher} is a model of this package already. Name what it was made from.")
    return load_tokenizer(recipe.teacher, required=True, subfolder=subfolder), sentences


def open_corpora(recipe: ConvertRecipe) -> list[Corpus]:
    """Documents and, if the recipe names any, sentences."""
    named = [recipe] + ([dataclasses.replace(recipe, data=recipe.sentences, validation="")] if recipe.sentences else [])
    return [open_corpus(each) for each in named]


def open_folder(
    recipe: ConvertRecipe, tokenizer: PreTrainedTokenizerBase, corpora: list[Corpus], found: Path | None
) -> Opened:
    """Clean the output folder, and give a run that starts its tokenizer.

    Raises:
        UserError: Inputs have changed since the checkpoint `found`.
    """
    folder = Path(recipe.output_dir)
    if found:
        remove_unfinished(folder)
    else:
        clear_output(folder)
        tokenizer.save_pretrained(folder)
    inputs = {name: content for corpus in corpora for name, content in fingerprint_inputs(recipe, corpus).items()}
    return Opened(found, inputs, changed_inputs(recipe, found, inputs) if found else [])


def open_rows(
    recipe: ConvertRecipe,
    corpora: list[Corpus],
    tokenizer: PreTrainedTokenizerBase,
    accelerator: Accelerator,
    frame: Frame,
    positions: int,
) -> tuple[Rows, Rows]:
    """Rows to train on, and held-out ones."""
    stores = [open_stores(recipe, corpus, tokenizer, accelerator) for corpus in corpora]
    training = [Documents(own, corpus.weights, frame.last) for (own, _), corpus in zip(stores, corpora, strict=True)]
    sentences = training[1] if len(training) > 1 else None
    masking = make_masking(tokenizer, recipe.mask_probability, False) if tokenizer.mask_token_id is not None else None
    shared = {"frame": frame, "pass_tokens": recipe.pass_tokens, "seed": recipe.seed}
    held_out = Documents(stores[0][1], corpora[0].evaluation_shares, frame.last)
    rows = Rows(training[0], sentences, recipe.sentence_share, masking=masking, positions=positions, **shared)
    return rows, Rows(held_out, None, 0.0, **shared)


def prepare(
    recipe: ConvertRecipe,
    accelerator: Accelerator,
    made: Made,
    rows: Rows,
    held_out: Rows,
    opened: Opened,
) -> tuple[Run, Counters]:
    """Optimizer and schedule, new or from a checkpoint, and the run's progress."""
    stages, pair = recipe.plan(), made.pair
    found = groups(pair.student, made.new, recipe.weight_decay, recipe.freeze_embeddings, made.kept_positions)
    optimizer = make_optimizer(recipe, found, accelerator.device)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] = 1.0  # the schedule gives the rates themselves
    scheduler = LambdaLR(optimizer, [rate(recipe, stages, group["is_new"]) for group in found])
    accelerator.register_for_checkpointing(scheduler)
    # Not wrapped for several processes: what has a gradient changes with the stage, so the loop sums gradients itself.
    pair = dataclasses.replace(
        pair,
        student=accelerator.prepare_model(pair.student, evaluation_mode=True),
        teacher=pair.teacher.to(accelerator.device),
    )
    optimizer = accelerator.prepare_optimizer(optimizer)
    evaluated = HeldOut(pair, held_out, recipe.eval_tokens, recipe.longest)
    set_seed(recipe.seed, device_specific=True)
    counters = Counters(processes=accelerator.num_processes)
    if opened.found:
        load_checkpoint(accelerator, opened.found)
        counters = read_state(opened.found)[0]
    log = start_log(recipe, accelerator, counters, opened)
    record = {"recipe": dataclasses.asdict(recipe), "inputs": opened.inputs}
    parts = (accelerator, pair, rows, optimizer, scheduler, evaluated, StopRequest(), log, record)
    return Run(recipe, stages, *parts), counters


def rate(recipe: ConvertRecipe, stages: list[Stage], is_new: bool) -> Any:
    """The learning rate of a group by update."""

    def at(step: int) -> float:
        stage = stage_at(stages, step)
        return (stage.new_learning_rate if is_new else stage.learning_rate) * stage.factor(step, recipe.warmup_fraction)

    return at


# ---- the loop ----


def train(run: Run, counters: Counters) -> bool:
    """Train from `counters.step` on; returns whether the run has ended, rather than been asked to stop."""
    recipe, patient = run.recipe, 0.5 if sys.stderr.isatty() else 30.0
    shown = {"disable": not run.accelerator.is_main_process, "dynamic_ncols": True, "mininterval": patient}
    with tqdm(total=recipe.max_steps, initial=counters.step, unit="step", **shown) as bar:
        if counters.step == 0:
            evaluate(run, counters, bar)
        tokens, seconds = 0, 0.0
        while counters.step < recipe.max_steps:
            started = time.perf_counter()
            parts, count, stop = update(run, counters)
            elapsed = time.perf_counter() - started
            counters.step += 1
            counters.seen_tokens += count
            counters.seconds += elapsed
            tokens, seconds = tokens + count, seconds + elapsed
            bar.update()
            is_last = counters.step == recipe.max_steps
            if counters.step % recipe.log_steps == 0 or is_last:
                log_update(run, counters, parts, tokens / seconds, bar)
                tokens, seconds = 0, 0.0
            if counters.step % recipe.eval_steps == 0 or is_last:
                evaluate(run, counters, bar)
            if counters.step % recipe.save_steps == 0 or is_last or stop:
                counters.logged = len(run.log.entries)
                save_checkpoint(run.accelerator, run.folder, counters, run.record, {}, recipe.save_total_limit)
            if stop and not is_last:
                return False
    return True


def update(run: Run, counters: Counters) -> tuple[dict[str, float], int, bool]:
    """One update; returns the parts of its loss, its tokens, and whether any process has been asked to stop.

    Raises:
        UserError: The loss or the gradient is not finite more often than the recipe allows.
    """
    accelerator, stage, tokens = run.accelerator, stage_at(run.stages, counters.step), 0
    masked, sums = bool({"mlm", "kl"} & set(stage.weights)), {}
    for part in range(run.passes):
        number = part * accelerator.num_processes + accelerator.process_index
        batch = run.rows.batch(stage.lengths, counters.step, number, masked=masked)
        batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
        with accelerator.autocast():
            losses = run.pair.losses(batch, list(stage.weights))
        loss = sum(stage.weights[name] * value for name, value in losses.items())
        accelerator.backward(loss / run.passes)
        for name, value in {**losses, "loss": loss}.items():
            sums.setdefault(name, []).append(float(value.detach()))
        tokens += int(batch["attention_mask"].sum())
    parameters = average_gradients(accelerator, run.pair.student)
    norm = float(accelerator.clip_grad_norm_(parameters, run.recipe.max_grad_norm))
    parts = {name: sum(values) / len(values) for name, values in sums.items()}
    if math.isfinite(parts["loss"]) and (math.isfinite(norm) or accelerator.scaler is not None):
        run.optimizer.step()
    else:
        counters.skipped += 1
        if counters.skipped > run.recipe.max_skipped_steps:
            raise UserError(
                f"Training diverged at step {counters.step + 1} (loss {parts['loss']}, gradient norm {norm}). Earlier "
                "checkpoints are intact. Lower the `learning_rate` of the stage."
            )
    run.scheduler.step()
    run.optimizer.zero_grad()
    own = torch.tensor([tokens, int(run.stop.name is not None)], device=accelerator.device)
    total = accelerator.reduce(own, "sum")
    return {**parts, "grad_norm": norm}, int(total[0]), bool(total[1])


def average_gradients(accelerator: Accelerator, model: PreTrainedModel) -> list[nn.Parameter]:
    """Average the gradients of all processes, in place; returns the parameters that have one in any process."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    has = torch.tensor([int(parameter.grad is not None) for parameter in parameters], device=accelerator.device)
    found = [
        parameter for parameter, any_has in zip(parameters, accelerator.reduce(has, "sum"), strict=True) if any_has
    ]
    if accelerator.num_processes > 1:
        for parameter in found:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = accelerator.reduce(own, "mean")
    return found


def log_update(run: Run, counters: Counters, parts: dict[str, float], speed: float, bar: tqdm) -> None:
    """Log the parts of the last update's loss."""
    stage = stage_at(run.stages, counters.step - 1)
    values = {"stage": stage.name, **parts, "seen_tokens": counters.seen_tokens, "tokens_per_second": speed}
    run.log.add("train", counters.step, **values, seconds=counters.seconds)
    run.accelerator.log({f"train/{name}": value for name, value in parts.items()}, step=counters.step)
    bar.set_postfix(
        {"stage": stage.name, "loss": f"{parts['loss']:.4f}", "tokens_per_s": f"{speed:,.0f}"}, refresh=False
    )


def evaluate(run: Run, counters: Counters, bar: tqdm) -> None:
    """Log held-out figures; the main process measures."""
    if not run.accelerator.is_main_process:
        return
    figures = run.held_out.measure(run.pair)
    run.log.add("held_out", counters.step, **figures, seen_tokens=counters.seen_tokens, seconds=counters.seconds)
    run.accelerator.log({f"cosine/{length}": value for length, value in figures["cosine"].items()}, step=counters.step)
    bar.write(f"step {counters.step:>6}, {counters.seen_tokens:,} tokens: cosine at {summary(figures)}")


def finish(
    run: Run, sentences: SentenceFolder | None, corpora: list[Corpus], counters: Counters, command: str
) -> dict[str, Any]:
    """Save the model, measure its files, write plot, card and figures, and remove the checkpoints."""
    folder, has_head = run.folder, hasattr(run.pair.student, "lm_head")
    save_model(run.accelerator, run.pair.student, folder)
    reloaded = (AutoModelForMaskedLM if has_head else AutoModel).from_pretrained(folder).eval()
    longest = reloaded.config.max_position_embeddings
    pair = dataclasses.replace(run.pair, student=reloaded.to(run.accelerator.device))
    figures = {
        **run.held_out.measure(pair),
        "rows": {str(length): len(ids) for length, ids in run.held_out.rows.items()},
        "kind": "sentences" if sentences else "masked words" if has_head else "states",
        "model_type": reloaded.config.model_type,
        "parameters": reloaded.num_parameters(),
        "longest_input": longest,
        "corpus": "; ".join(corpus.description for corpus in corpora),
        "seen_tokens": counters.seen_tokens,
        "training_seconds": counters.seconds,
        "skipped_updates": counters.skipped,
        "command": command,
        **machine(),
    }
    if run.accelerator.is_main_process:
        if sentences:
            sentences.write(folder, longest)
        plot(run.log, folder / PLOT)
        write_text(folder / "README.md", make_card(run.recipe, figures, PLOT))
        write_json(folder / "metrics.json", figures)  # a run that has this file is finished
        print(f"Written to {folder}: cosine to the source at {summary(figures)}")
    run.accelerator.wait_for_everyone()
    if run.accelerator.is_main_process:
        remove_all(folder)
    return figures
