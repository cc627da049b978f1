"""The training loop: updates, schedule, evaluation, logging; `accelerate` handles devices, precision and processes."""

import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from engine.checkpoint import Counters, StopRequest
from engine.groups import drop_frozen
from engine.log import RunLog
from engine.probe import probe
from engine.recipe import Recipe
from engine.sharding import check_backend, is_sharded
from engine.windows import SWITCHES, is_mixed
from luna_hf.scripting import UserError

# Held-out rows for the probe of attention.
_PROBED = 8
# What the progress bar shows, with its format.
_ON_THE_BAR = {"stage": "", "loss": ".3f", "learning_rate": ".1e", "tokens_per_second": ",.0f", "mfu": ".0%"}


@dataclass(frozen=True)
class Evaluation:
    """Held-out figures: cross-entropy in nats, its exponential, and accuracy over `targets` tokens."""

    loss: float
    perplexity: float
    accuracy: float
    targets: int


def stack(rows: Sequence[dict[str, Tensor]], device: torch.device) -> dict[str, Tensor]:
    """A batch of rows of equal length."""
    return {name: torch.stack([row[name] for row in rows]).to(device) for name in rows[0]}


def split_update(rows: int, batch_size: int, processes: int) -> tuple[int, int]:
    """Rows in a forward pass and passes in an update on each process, for the same global batch on any number.

    Raises:
        UserError: The `rows` of an update cannot be shared evenly.
    """
    if rows % processes:
        raise UserError(
            f"`global_batch_tokens` gives {rows} blocks an update, which {processes} processes cannot share evenly: "
            f"make it a multiple of {processes} times `block_size`."
        )
    share = rows // processes
    passes = next(n for n in range(-(-share // batch_size), share + 1) if share % n == 0)
    return share // passes, passes


def make_accelerator(recipe: Recipe) -> Accelerator:
    """An `Accelerator` for the recipe's precision and trackers; the number of passes in an update is set later.

    Raises:
        UserError: A tracker is not installed, or the device lacks the precision or the sharding backend.
    """
    for tracker in recipe.trackers:
        if tracker not in (available := sorted(map(str, get_available_trackers()))):
            raise UserError(f"`trackers`: {tracker!r} is unknown or not installed. Available: {', '.join(available)}.")
    try:
        accelerator = Accelerator(
            cpu=not torch.accelerator.is_available(),  # otherwise processes on CPUs do not find each other
            mixed_precision=recipe.mixed_precision,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False),
            log_with=list(recipe.trackers) or None,
            project_dir=recipe.output_dir,
            # Training a tokenizer may take longer than the default timeout.
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=6))],
        )
    except (ValueError, ImportError) as error:
        raise UserError(f"`trackers` {recipe.trackers}, `mixed_precision` {recipe.mixed_precision}: {error}") from error
    check_backend(accelerator)
    return accelerator


def warmup_then_decay(optimizer: Optimizer, max_steps: int, warmup_fraction: float, power: float) -> LambdaLR:
    """Linear warmup, then polynomial decay to 0 at `max_steps`."""
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
    **options: Any,
) -> Evaluation:
    """Loss and accuracy at the labels of held-out rows, each counted once on any number of processes.

    With `next_token`, the logits at a position are for the label of the next one. `options` are further inputs of the
    model.

    Raises:
        UserError: The loss is not finite.
    """
    was_training, options = model.training, options | ({"use_cache": False} if next_token else {})
    model.eval()
    stride = accelerator.num_processes * batch_size
    totals = torch.zeros(3, dtype=torch.float64)
    for first in range(0, len(held_out), stride):
        mine = first + accelerator.process_index * batch_size
        # All processes run equally many passes. One without rows runs a row with all labels ignored.
        rows = held_out[mine : mine + batch_size] or held_out[:1]
        batch = stack(rows, accelerator.device)
        labels = batch.pop("labels") if mine < len(held_out) else torch.full_like(batch.pop("labels"), -100)
        logits = model(**batch, **options).logits
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
    return Evaluation(loss / count, perplexity(loss / count, "held-out text"), hits / count, round(count))


def switched_losses(accelerator: Accelerator, model: nn.Module, *arguments: Any) -> dict[str, float]:
    """The held-out loss of a mixed model without its slots, and without its window; nothing for other models.

    Args:
        accelerator, model, arguments: those of `evaluate`.
    """
    if not is_mixed(accelerator.unwrap_model(model).config):
        return {}
    return {name: evaluate(accelerator, model, *arguments, **reads).loss for name, reads in SWITCHES.items()}


def perplexity(loss: float, what: str) -> float:
    """The exponential of a loss in nats.

    Raises:
        UserError: The loss on `what` is not finite, or the result would not be.
    """
    if not loss < math.log(sys.float_info.max):
        raise UserError(f"The loss on {what} is {loss:.4g}: the model has diverged, or its weights are damaged.")
    return math.exp(loss)


@dataclass
class Update:
    """The result of one update; `stop` is true if any process has been asked to stop."""

    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    stop: bool
    parts: dict[str, float] = field(default_factory=dict)


class Loop:
    """The updates of a run, with its evaluations, its log and its checkpoints.

    Attributes:
        recipe, accelerator: of the run.
        module, optimizer: prepared by `accelerate`; `scheduler` counts updates.
        updates: for every update, the batches of this process.
        held_out: rows to evaluate on.
        counters: the progress.
        log: on file.
        unigram_loss: held-out loss of the baseline, in nats.
        flops_per_token: of a training step.
        peak_flops: rate of the device.
        notes: for the card.
        loss_name: the loss in words.
        next_token: whether the logits at a position are for the label of the next one.
        plateau_gain: gain over the unigram baseline, in nats, below which an evaluation reports a plateau.
    """

    loss_name: ClassVar[str]
    next_token: ClassVar[bool] = False
    plateau_gain: ClassVar[float] = 0.0

    module: nn.Module
    optimizer: Optimizer
    scheduler: LambdaLR
    updates: Iterator[list[dict[str, Tensor]]]
    held_out: list[dict[str, Tensor]]
    log: RunLog
    unigram_loss: float
    flops_per_token: float
    peak_flops: float

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.accelerator = recipe, make_accelerator(recipe)
        self.counters, self.stop = Counters(processes=self.accelerator.num_processes), StopRequest()
        self.notes: list[str] = []

    @property
    def trained(self) -> nn.Module:
        """The model that is evaluated and saved, still wrapped by `accelerate`."""
        return self.module

    def save(self) -> None:
        """Write a checkpoint."""
        raise NotImplementedError

    def train(self) -> Any:
        """Train up to `max_steps`, and return the last evaluation, or `None` after a request to stop.

        Raises:
            UserError: The loss or the gradient is not finite more often than the recipe allows, or in every update; or
                the held-out loss is not finite.
        """
        bar = tqdm(
            total=self.recipe.max_steps,
            initial=self.counters.step,
            unit="step",
            disable=not self.accelerator.is_main_process,
            dynamic_ncols=True,
            mininterval=0.5 if sys.stderr.isatty() else 30.0,  # keeps log files short
        )
        with bar as progress:  # closed before an error is printed
            result = self._train(progress)
        if self.counters.skipped >= self.counters.step:
            raise UserError(
                f"All {self.counters.step:,} updates were skipped, since loss or gradient was not finite. Check the "
                "model that the run starts from, or lower `learning_rate`; then start again (--no_resume "
                "--overwrite_output_dir)."
            )
        return result

    def _train(self, progress: tqdm) -> Any:
        recipe, counters = self.recipe, self.counters
        tokens, seconds, result = 0, 0.0, None
        if recipe.continues and counters.step == 0:
            self.evaluate(progress)
        while counters.step < recipe.max_steps:
            started = time.perf_counter()
            update = self.update()
            elapsed = time.perf_counter() - started
            counters.step += 1
            counters.seen_tokens += update.tokens
            counters.seconds += elapsed
            counters.window += [update.loss] if math.isfinite(update.loss) else []  # else the update was skipped
            tokens, seconds, last = tokens + update.tokens, seconds + elapsed, counters.step == recipe.max_steps
            progress.update()
            if (counters.step % recipe.log_steps == 0 or last) and counters.window:
                self.log_updates(update, tokens / seconds, progress)
                tokens, seconds = 0, 0.0
            if counters.step % recipe.eval_steps == 0 or last:
                result = self.evaluate(progress)
            if counters.step % recipe.save_steps == 0 or last or update.stop:
                self.save()
            if update.stop and not last:
                return None
        return self.measure() if result is None else result

    # ---- updates ----

    def update(self) -> Update:
        """Forward and backward passes over the next batches, and an optimizer step if loss and gradient are finite.

        The gradient is that of the mean loss over all targets, however these are spread over passes and processes.
        """
        accelerator, processes, recipe = self.accelerator, self.accelerator.num_processes, self.recipe
        group, step = next(self.updates), self.counters.step
        window = recipe.windows and recipe.windows.draw(step, recipe.max_steps, recipe.seed)
        reads = {} if window is None else {"local_window": window}
        mine = [((batch["labels"] != -100).sum(), batch["attention_mask"].sum()) for batch in group]
        mine.append((torch.tensor(int(self.stop.name is not None)), torch.tensor(0)))
        counts = accelerator.gather(
            torch.tensor(mine, device=accelerator.device).unsqueeze(0)
        )  # (processes, passes+1, 2)
        targets, loss, norm = counts[:, :-1, 0].sum(), torch.zeros((), device=accelerator.device), None
        for batch, (own, _) in zip(group, mine, strict=False):
            batch = {name: tensor.to(accelerator.device, non_blocking=True) for name, tensor in batch.items()}
            with accelerator.accumulate(self.module):
                # Undoes the averaging by accelerate (over passes) and DDP (over processes).
                share = own.to(accelerator.device) * len(group) * processes / targets
                part = self.module(**batch, **reads).loss * share
                accelerator.backward(part)
                loss = loss + part.detach().float() / len(group)
                if accelerator.sync_gradients:
                    drop_frozen(self.optimizer, step)
                    norm = accelerator.clip_grad_norm_(self.module.parameters(), recipe.max_grad_norm)
        loss, norm = accelerator.reduce(loss, reduction="mean").item(), float(norm)
        rate = self.scheduler.get_last_lr()[0]
        if self.step(loss, norm) and not accelerator.optimizer_step_was_skipped:
            self.scheduler.step()
        return Update(loss, norm, rate, int(counts[:, :-1, 1].sum()), bool(counts[:, -1, 0].max()))

    def step(self, loss: float, norm: float) -> bool:
        """Step the optimizer if loss and gradient are finite, else count a skipped update; returns which.

        Raises:
            UserError: More than `max_skipped_steps` have been skipped.
        """
        # With fp16, overflowing gradients are how the scaler finds its scale: only the loss counts.
        if finite := math.isfinite(loss) and (math.isfinite(norm) or self.accelerator.scaler is not None):
            self.optimizer.step()
        self.optimizer.zero_grad()
        if finite:
            return True
        if self.accelerator.scaler is not None:  # which has unscaled the gradients, and otherwise refuses the next ones
            self.accelerator.scaler.update()
        self.counters.skipped += 1
        most, what = self.recipe.max_skipped_steps, f"step {self.counters.step + 1}: loss {loss}, gradient norm {norm}"
        if self.counters.skipped > most:
            raise UserError(
                f"Training diverged at {what}. Earlier checkpoints are intact. Lower `learning_rate`, warm up "
                "for longer, or allow steps to be skipped (`max_skipped_steps`)."
            )
        self.accelerator.print(f"Skipped {what} ({self.counters.skipped} of at most {most}).")
        return False

    def utilisation(self, speed: float) -> float:
        """Model FLOPs utilisation: the share of all processes' peak rate that `speed`, in tokens per second, takes."""
        return speed * self.flops_per_token / (self.peak_flops * self.accelerator.num_processes)

    def figures(self, update: Update, speed: float) -> dict[str, Any]:
        """What a log entry has about the updates since the last one."""
        return {
            "loss": sum(self.counters.window) / len(self.counters.window),
            "learning_rate": update.learning_rate,
            "grad_norm": update.grad_norm,
            "seen_tokens": self.counters.seen_tokens,
            "tokens_per_second": speed,
            "mfu": self.utilisation(speed),
        }

    def log_updates(self, update: Update, speed: float, progress: tqdm) -> None:
        """Log the updates since the last entry to file, trackers and progress bar."""
        values = {**self.figures(update, speed), "seconds": self.counters.seconds}
        self.counters.window.clear()
        self.log.add("train", self.counters.step, **values)
        self._track("train", values)
        shown = {name: f"{values[name]:{style}}" for name, style in _ON_THE_BAR.items() if name in values}
        progress.set_postfix(shown, refresh=False)

    def _track(self, prefix: str, values: dict[str, Any]) -> None:
        numbers = {f"{prefix}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
        self.accelerator.log(numbers, step=self.counters.step)

    # ---- evaluation ----

    # An evaluation reads a model in other ways than an update: compiling each would take longer than evaluating does.
    @torch.compiler.set_stance("force_eager")
    def measure(self) -> Evaluation:
        """Held-out figures of the model."""
        return evaluate(self.accelerator, self.trained, self.held_out, self.recipe.batch_size, self.next_token)

    def probe(self) -> dict[str, Any] | None:
        """Statistics of the attention on some held-out rows; `None` where the parameters are sharded."""
        if is_sharded(self.accelerator):
            return None
        batch = stack(self.held_out[:_PROBED], self.accelerator.device)
        return probe(self.accelerator.unwrap_model(self.trained), batch)

    @torch.compiler.set_stance("force_eager")
    def evaluate(self, progress: tqdm) -> Evaluation:
        """Log held-out figures, and whether the model is still on the plateau of token statistics."""
        result, counters = self.measure(), self.counters
        gain = self.unigram_loss - result.loss
        evaluated = self.held_out, self.recipe.batch_size, self.next_token
        switched = switched_losses(self.accelerator, self.trained, *evaluated)
        values = {**asdict(result), **switched, "gain_nats": gain}
        values |= {"seconds": counters.seconds, "seen_tokens": counters.seen_tokens}
        if attention := self.probe():
            self.log.add("probe", counters.step, **attention)
        self.log.add("held_out", counters.step, **values)
        self._track("held_out", values)
        if self.accelerator.is_main_process:
            without = ", slots off {slots_off_loss:.3f}, window off {window_off_loss:.3f}" if switched else ""
            plateau = " - plateau: little more than token statistics, the context is not used yet"
            progress.write(
                f"step {counters.step:>6}: held-out loss {result.loss:.3f} (unigram {self.unigram_loss:.3f}), "
                f"perplexity {result.perplexity:.1f}, accuracy {result.accuracy:.1%}{without.format(**switched)}"
                f"{plateau if gain < self.plateau_gain else ''}"
            )
        return result
