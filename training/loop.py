"""The training loop: optimizer groups, schedule, steps, evaluation, logging.

Everything that depends on device, precision and number of processes goes through `accelerate`.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
from recipe import UserError
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from tqdm import tqdm


@dataclass(frozen=True)
class Evaluation:
    """Held-out figures: cross-entropy in nats and accuracy over `targets` masked tokens."""

    loss: float
    accuracy: float
    targets: int


class RunLog:
    """One JSON line an entry, kept in memory as well; only the main process writes."""

    def __init__(self, path: Path, is_main_process: bool) -> None:
        self.entries: list[dict[str, Any]] = []
        self.path = path if is_main_process else None
        if self.path:
            self.path.write_text("")

    def add(self, kind: str, step: int, **values: float) -> None:
        """Append an entry, `kind` being "train" or "held_out"."""
        entry = {"kind": kind, "step": step, **values}
        self.entries.append(entry)
        if self.path:
            with self.path.open("a") as file:
                file.write(json.dumps(entry) + "\n")

    def series(self, kind: str, value: str) -> tuple[list[int], list[float]]:
        """Steps and values of the entries of a kind."""
        entries = [entry for entry in self.entries if entry["kind"] == kind]
        return [entry["step"] for entry in entries], [entry[value] for entry in entries]


def make_accelerator(mixed_precision: str, gradient_accumulation_steps: int, seed: int) -> Accelerator:
    """An `Accelerator` whose shuffling depends on the seed alone, and whose updates may span two epochs."""
    return Accelerator(
        mixed_precision=mixed_precision,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=seed),
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=gradient_accumulation_steps, sync_with_dataloader=False
        ),
    )


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices and embeddings decay; vectors (biases and norms) do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def warmup_then_linear(optimizer: Optimizer, max_steps: int, warmup_fraction: float) -> LambdaLR:
    """The rate rises linearly over the first steps, and falls linearly to 0 at `max_steps`."""
    warmup = round(warmup_fraction * max_steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return max(0.0, (max_steps - step) / (max_steps - warmup))

    return LambdaLR(optimizer, factor)


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> Evaluation:
    """Loss and accuracy at the labels of a prepared loader; every row counts once, on any number of processes."""
    was_training = model.training
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64)
    for batch in loader:
        labels = batch["labels"]
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        # Rows are gathered, not totals: accelerate repeats rows to fill the last batch, and drops them again by row.
        rows, columns = (labels != -100).nonzero(as_tuple=True)
        picked, targets = logits[rows, columns].float(), labels[rows, columns]
        losses = nn.functional.cross_entropy(picked, targets, reduction="none")
        hits = picked.argmax(-1) == targets
        sums = torch.zeros(labels.shape[0], 3, device=labels.device)
        sums.index_add_(0, rows, torch.stack([losses, hits.float(), torch.ones_like(losses)], dim=-1))
        totals += accelerator.gather_for_metrics(sums).double().sum(0).cpu()
    model.train(was_training)
    loss, hits, count = totals.tolist()
    return Evaluation(loss / count, hits / count, round(count))


def update_batches(
    accelerator: Accelerator, loader: DataLoader, accumulation: int
) -> Iterator[tuple[list[dict[str, Tensor]], Tensor, int, int]]:
    """Endless groups of `accumulation` batches, one group an update.

    Yields:
        The batches of this process; the number of labels in each (accumulation,); the labels of the whole update and
        its tokens, over all batches and processes.
    """
    batches = _endless(loader)
    while True:
        group = [next(batches) for _ in range(accumulation)]
        labels = torch.stack([(batch["labels"] != -100).sum() for batch in group])
        tokens = torch.stack([batch["attention_mask"].sum() for batch in group])
        counts = accelerator.gather(torch.stack([labels, tokens], dim=-1))  # (processes * accumulation, 2)
        # A mean over no labels is NaN. All processes see the same counts, and pass such a group over together.
        if counts[:, 0].min() > 0:
            yield group, labels, int(counts[:, 0].sum()), int(counts[:, 1].sum())


def train(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LambdaLR,
    loader: DataLoader,
    evaluate_model: Callable[[], Evaluation],
    log: RunLog,
    *,
    max_steps: int,
    max_grad_norm: float,
    log_steps: int,
    eval_steps: int,
) -> Evaluation:
    """Train for `max_steps` updates with a progress bar, and return the last evaluation.

    `model`, `optimizer` and `loader` are prepared by `accelerator`; `scheduler` is not, and counts updates. An update
    is the gradient of the mean loss over all its masked tokens, however they fall on batches and processes.

    Raises:
        UserError: The loss is no longer finite.
    """
    accumulation = accelerator.gradient_accumulation_steps
    updates = update_batches(accelerator, loader, accumulation)
    progress = tqdm(
        total=max_steps,
        unit="step",
        disable=not accelerator.is_main_process,
        dynamic_ncols=True,
        mininterval=0.5 if sys.stderr.isatty() else 30.0,  # a log file needs no line for every step
    )
    model.train()
    losses, tokens, seconds, seen = [], 0, 0.0, 0
    norm = result = None
    for step in range(1, max_steps + 1):
        started = time.perf_counter()
        group, label_counts, total_labels, total_tokens = next(updates)
        update_loss = 0.0
        for batch, labels in zip(group, label_counts, strict=True):
            with accelerator.accumulate(model):
                mean_loss = model(**batch).loss
                # Undoes the averages that accelerate (over batches) and DDP (over processes) take.
                share = labels * accumulation * accelerator.num_processes / total_labels
                accelerator.backward(mean_loss * share)
                update_loss = update_loss + mean_loss.detach() * share / accumulation
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
        rate = scheduler.get_last_lr()[0]
        if not accelerator.optimizer_step_was_skipped:
            scheduler.step()
        losses.append(update_loss)
        tokens, seen = tokens + total_tokens, seen + total_tokens
        seconds += time.perf_counter() - started
        progress.update()

        if step % log_steps == 0 or step == max_steps:
            loss = accelerator.reduce(torch.stack(losses).mean(), reduction="mean").item()
            if not math.isfinite(loss):
                raise UserError(f"The loss became {loss} before step {step}. Lower `learning_rate`, or raise warm-up.")
            progress.set_postfix(loss=f"{loss:.3f}", tokens_per_s=f"{tokens / seconds:,.0f}", refresh=False)
            log.add(
                "train",
                step,
                loss=loss,
                learning_rate=rate,
                grad_norm=float(norm),
                seen_tokens=seen,
                tokens_per_second=tokens / seconds,
            )
            losses, tokens, seconds = [], 0, 0.0
        if step % eval_steps == 0 or step == max_steps:
            result = evaluate_model()
            log.add("held_out", step, **asdict(result))
            if accelerator.is_main_process:
                progress.write(f"step {step:>6}: held-out loss {result.loss:.3f}, accuracy {result.accuracy:.1%}")
    progress.close()
    return result


def _endless(loader: DataLoader) -> Iterator[dict[str, Tensor]]:
    while True:  # a prepared loader shuffles anew in every epoch
        yield from loader
