"""The training loop: schedule, steps, evaluation, logging.

Everything that depends on device, precision and number of processes goes through `accelerate`.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from engine.checkpoint import Counters
from engine.groups import drop_frozen
from engine.recipe import RunRecipe
from engine.sharding import check_backend
from luna_hf.scripting import UserError, write_text

# A model that knows token statistics and topic but does not read its context stays within this many nats of the unigram
# baseline (measured: benchmarks/README.md, "Learning").
PLATEAU_GAIN = 0.75


@dataclass(frozen=True)
class Evaluation:
    """Held-out figures: cross-entropy in nats, its exponential, and accuracy over `targets` tokens."""

    loss: float
    perplexity: float
    accuracy: float
    targets: int


class RunLog:
    """One JSON line an entry, kept in memory as well; only the main process writes."""

    def __init__(self, path: Path, is_main_process: bool, resume_step: int | None = None) -> None:
        """Start a log, or go on with one: entries after `resume_step` are dropped, since they come again."""
        self.entries = [] if resume_step is None else [e for e in read_log(path) if e["step"] <= resume_step]
        self.path = path if is_main_process else None
        if self.path:
            write_text(self.path, "".join(json.dumps(entry) + "\n" for entry in self.entries))

    def add(self, kind: str, step: int, **values: Any) -> None:
        """Append an entry, `kind` being "train", "held_out", "probe", "objective" or "resumed"."""
        entry = {"kind": kind, "step": step, **values}
        self.entries.append(entry)
        if self.path:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    def series(self, kind: str, value: str, against: str = "step") -> tuple[list[float], list[float]]:
        """Steps (or another value) and values of the entries of a kind."""
        entries = [entry for entry in self.entries if entry["kind"] == kind]
        return [entry[against] for entry in entries], [entry[value] for entry in entries]


def read_log(path: Path) -> list[dict[str, Any]]:
    """Entries of a log; a last line that a kill has cut short is left out."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    entries = []
    for line in lines:
        try:
            entries.append(json.loads(line))
        except ValueError:
            break
    return entries


def split_update(rows: int, batch_size: int, processes: int) -> tuple[int, int]:
    """Rows of a forward pass and passes of an update on each process, for the same global batch on any number of them.

    Args:
        rows: blocks an update, over all processes.
        batch_size: most blocks a process takes in one pass.
        processes: number of processes.

    Raises:
        UserError: The rows cannot be dealt out evenly.
    """
    if rows % processes:
        raise UserError(
            f"`global_batch_tokens` makes {rows} blocks an update, which {processes} processes cannot share evenly. "
            f"Make it a multiple of {processes} times `block_size`."
        )
    share = rows // processes
    passes = next(n for n in range(-(-share // batch_size), share + 1) if share % n == 0)
    return share // passes, passes


def make_accelerator(recipe: RunRecipe) -> Accelerator:
    """An `Accelerator` for the recipe's precision and trackers; the number of passes an update is set when known.

    Raises:
        UserError: A tracker is not installed, or the device has no such precision, or cannot be sharded over.
    """
    for tracker in recipe.trackers:
        if tracker not in (available := sorted(map(str, get_available_trackers()))):
            raise UserError(f"`trackers`: {tracker!r} is not installed or unknown. Available: {', '.join(available)}.")
    try:
        accelerator = Accelerator(
            cpu=not torch.accelerator.is_available(),  # without it, processes on CPUs would not know of each other
            mixed_precision=recipe.mixed_precision,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False),
            log_with=list(recipe.trackers) or None,
            project_dir=recipe.output_dir,
            # A tokenizer may be trained for longer than the others would wait.
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=6))],
        )
    except (ValueError, ImportError) as error:
        raise UserError(f"`trackers` {recipe.trackers}, `mixed_precision` {recipe.mixed_precision}: {error}") from error
    check_backend(accelerator)
    return accelerator


def warmup_then_decay(optimizer: Optimizer, max_steps: int, warmup_fraction: float, power: float) -> LambdaLR:
    """The rate rises linearly over the first steps, and falls to 0 at `max_steps` as a polynomial (1: a line)."""
    warmup = round(warmup_fraction * max_steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return max(0.0, (max_steps - step) / (max_steps - warmup)) ** power

    return LambdaLR(optimizer, factor)


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    held_out: list[dict[str, Tensor]],
    batch_size: int,
    next_token: bool = False,
) -> Evaluation:
    """Loss and accuracy at the labels; every row counts once, on any number of processes.

    Args:
        accelerator: its processes share the rows.
        model: a masked-LM or a causal model; with its head at every position outside training.
        held_out: rows of `input_ids`, `attention_mask` and `labels`, equally long.
        batch_size: rows of a forward pass.
        next_token: whether the logits at a position are for the label of the next, as a causal model's.
    """
    was_training, no_state = model.training, {"use_cache": False} if next_token else {}
    model.eval()
    stride = accelerator.num_processes * batch_size
    totals = torch.zeros(3, dtype=torch.float64)
    for first in range(0, len(held_out), stride):
        mine = first + accelerator.process_index * batch_size
        # All processes run equally many passes; one that has no rows left runs a row whose labels do not count.
        rows = held_out[mine : mine + batch_size] or held_out[:1]
        batch = {name: torch.stack([row[name] for row in rows]).to(accelerator.device) for name in rows[0]}
        labels = batch.pop("labels") if mine < len(held_out) else torch.full_like(batch.pop("labels"), -100)
        logits = model(**batch, **no_state).logits
        if next_token:
            logits, labels = logits[:, :-1], labels[:, 1:]
        logits = logits[labels != -100].float()
        targets = labels[labels != -100]
        losses = nn.functional.cross_entropy(logits, targets, reduction="sum").double().item()
        hits = (logits.argmax(-1) == targets).sum().item()
        totals += torch.tensor([losses, hits, targets.numel()], dtype=torch.float64)
    model.train(was_training)
    totals = accelerator.gather(totals.to(accelerator.device).unsqueeze(0)).sum(0)
    loss, hits, count = totals.tolist()
    return Evaluation(loss / count, math.exp(loss / count), hits / count, round(count))


@dataclass
class Run:
    """What a run is made of; `model` and `optimizer` are prepared by `accelerator`, and `scheduler` counts updates.

    `model` is called with a batch and returns something with a `loss`, the mean over its `targets`. Below
    `plateau_gain` an evaluation says that the context is not read yet.
    """

    recipe: RunRecipe
    accelerator: Accelerator
    model: nn.Module
    optimizer: Optimizer
    scheduler: LambdaLR
    updates: Iterator[list[dict[str, Tensor]]]
    evaluate: Callable[[], Evaluation]
    targets: Callable[[dict[str, Tensor]], Tensor]
    measure: Callable[[], dict[str, Any] | None]
    probe: Callable[[], dict[str, Any] | None]
    save: Callable[[Counters], None]
    stop_requested: Callable[[], bool]
    log: RunLog
    evaluate_first: bool
    unigram_loss: float
    flops_per_token: float
    peak_flops: float
    notes: list[str]
    plateau_gain: float = PLATEAU_GAIN


@dataclass
class Update:
    """What one update did: mean loss and norm of the gradient, rate, tokens; `stop` if some process was asked to."""

    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    stop: bool


def train(run: Run, counters: Counters) -> Evaluation | None:
    """Train from where `counters` stand to `max_steps`, and return the last evaluation; `None` if stopped by request.

    An update is the gradient of the mean loss over all its targets (masked tokens, next tokens), however they fall on
    passes and processes.

    Raises:
        UserError: The loss or the gradient is not finite, more often than the recipe allows.
    """
    recipe, accelerator = run.recipe, run.accelerator
    progress = tqdm(
        total=recipe.max_steps,
        initial=counters.step,
        unit="step",
        disable=not accelerator.is_main_process,
        dynamic_ncols=True,
        mininterval=0.5 if sys.stderr.isatty() else 30.0,  # a log file needs no line for every step
    )
    run.model.train()
    tokens, seconds, result = 0, 0.0, None
    if run.evaluate_first and counters.step == 0:
        log_evaluation(run, counters, run.evaluate(), progress)
    while counters.step < recipe.max_steps:
        started = time.perf_counter()
        update = one_update(run, counters)
        elapsed = time.perf_counter() - started
        counters.step += 1
        counters.seen_tokens += update.tokens
        counters.seconds += elapsed
        counters.window += [update.loss] if math.isfinite(update.loss) else []  # else the update was skipped
        tokens, seconds, last = tokens + update.tokens, seconds + elapsed, counters.step == recipe.max_steps
        progress.update()
        if (counters.step % recipe.log_steps == 0 or last) and counters.window:
            log_window(run, counters, update, tokens / seconds, progress)
            tokens, seconds = 0, 0.0
        if counters.step % recipe.eval_steps == 0 or last:
            result = run.evaluate()
            log_evaluation(run, counters, result, progress)
        if counters.step % recipe.save_steps == 0 or last or update.stop:
            run.save(counters)
        if update.stop and not last:
            progress.close()
            return None
    progress.close()
    return result or run.evaluate()


def one_update(run: Run, counters: Counters) -> Update:
    """Forward and backward passes over the next batches, and a step of the optimizer unless it would do harm."""
    accelerator, optimizer, processes = run.accelerator, run.optimizer, run.accelerator.num_processes
    group = next(run.updates)
    mine = [(run.targets(batch), batch["attention_mask"].sum()) for batch in group]
    mine.append((torch.tensor(int(run.stop_requested())), torch.tensor(0)))
    counts = accelerator.gather(torch.tensor(mine, device=accelerator.device).unsqueeze(0))  # (processes, passes+1, 2)
    total_targets, loss, norm = counts[:, :-1, 0].sum(), torch.zeros((), device=accelerator.device), None
    for batch, (targets, _) in zip(group, mine, strict=False):
        batch = {name: tensor.to(accelerator.device, non_blocking=True) for name, tensor in batch.items()}
        with accelerator.accumulate(run.model):
            mean_loss = run.model(**batch).loss
            # Undoes the averages that accelerate (over passes) and DDP (over processes) take.
            share = targets.to(accelerator.device) * len(group) * processes / total_targets
            accelerator.backward(mean_loss * share)
            loss = loss + mean_loss.detach().float() * share / len(group)
            if accelerator.sync_gradients:
                drop_frozen(optimizer, counters.step)
                norm = accelerator.clip_grad_norm_(run.model.parameters(), run.recipe.max_grad_norm)
    loss, norm = accelerator.reduce(loss, reduction="mean").item(), float(norm)
    rate = run.scheduler.get_last_lr()[0]
    # The scaler of fp16 finds its scale by overflowing: there only the loss tells.
    if math.isfinite(loss) and (math.isfinite(norm) or accelerator.scaler is not None):
        optimizer.step()
        optimizer.zero_grad()
        if not accelerator.optimizer_step_was_skipped:
            run.scheduler.step()
    else:
        optimizer.zero_grad()
        skip(run, counters, loss, norm)
    return Update(loss, norm, rate, int(counts[:, :-1, 1].sum()), bool(counts[:, -1, 0].max()))


def skip(run: Run, counters: Counters, loss: float, norm: float) -> None:
    """Pass an update over whose loss or gradient is not finite.

    Raises:
        UserError: That has happened more often than `max_skipped_steps`.
    """
    counters.skipped += 1
    what = f"step {counters.step + 1}: loss {loss}, gradient norm {norm}"
    if counters.skipped > run.recipe.max_skipped_steps:
        raise UserError(
            f"Training broke down at {what}. The checkpoints before it are as they were. Lower `learning_rate`, raise "
            "`warmup_fraction`, or allow some steps to be skipped (`max_skipped_steps`)."
        )
    run.accelerator.print(f"Skipped {what} ({counters.skipped} of at most {run.recipe.max_skipped_steps}).")


def log_window(run: Run, counters: Counters, update: Update, speed: float, progress: tqdm) -> None:
    """Log the mean loss since the last entry, on file, trackers and progress bar."""
    loss = sum(counters.window) / len(counters.window)
    counters.window.clear()
    values = {
        "loss": loss,
        "learning_rate": update.learning_rate,
        "grad_norm": update.grad_norm,
        "seen_tokens": counters.seen_tokens,
        "tokens_per_second": speed,
        "mfu": speed * run.flops_per_token / (run.peak_flops * run.accelerator.num_processes),
        "seconds": counters.seconds,
    }
    run.log.add("train", counters.step, **values)
    run.accelerator.log({f"train/{name}": value for name, value in values.items()}, step=counters.step)
    progress.set_postfix(
        loss=f"{loss:.3f}",
        lr=f"{update.learning_rate:.1e}",
        tokens_per_s=f"{speed:,.0f}",
        mfu=f"{values['mfu']:.0%}",
        refresh=False,
    )


def log_evaluation(run: Run, counters: Counters, result: Evaluation, progress: tqdm) -> None:
    """Log held-out figures, and say whether the model reads its context yet."""
    gain = run.unigram_loss - result.loss
    values = {**asdict(result), "gain_nats": gain, "seconds": counters.seconds, "seen_tokens": counters.seen_tokens}
    if attention := run.probe():
        run.log.add("probe", counters.step, **attention)
    if measured := run.measure():
        run.log.add("objective", counters.step, **measured)
    run.log.add("held_out", counters.step, **values)
    run.accelerator.log({f"held_out/{name}": value for name, value in values.items()}, step=counters.step)
    if run.accelerator.is_main_process:
        plateau = " - plateau: hardly more than token statistics, the context is not read yet"
        plateau = plateau if gain < run.plateau_gain else ""
        objective = f", objective {measured['loss']:.4f}" if measured else ""
        progress.write(
            f"step {counters.step:>6}: held-out loss {result.loss:.3f} (unigram {run.unigram_loss:.3f}), perplexity "
            f"{result.perplexity:.1f}, accuracy {result.accuracy:.1%}{objective}{plateau}"
        )
