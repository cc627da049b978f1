"""The Trainer of the finetuning scripts: one loss and one order for every model, and checkpoints that are whole.

What it changes in transformers' Trainer, and why:

- The loss is computed here, from the logits, and divided by the number of labels of the whole update. transformers' own
  heads ignore `num_items_in_batch`: with gradient accumulation they train on a sum of means.
- The order of the rows depends on the seed and the epoch alone. The Trainer's length-grouped sampler draws from the
  global generator, which dropout moves on differently in every model, and it shuffles evaluation sets, too.
- Early stopping goes on counting after a resume.
"""

import json
import math
import time
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Sampler, SequentialSampler
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

SINGLE_LABEL, MULTI_LABEL, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
# Batches that are sorted together: enough for little padding, few enough that epochs differ.
_POOL = 50
# Beside the Trainer's files in a checkpoint: seconds of training up to it.
CLOCK = "clock.json"


def task_loss(
    outputs: Any,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    *,
    problem_type: str,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Loss of a batch, in float32 at least: cross-entropy, binary cross-entropy or squared error.

    Args:
        outputs: the model's, with `logits` (b, classes); for a regression (b, targets).
        labels: (b,) class indices; (b, classes) zeros and ones; (b,) or (b, targets) numbers.
        num_items_in_batch: labels in the whole update; the loss is the sum over this batch divided by it. `None` gives
            the mean over this batch.
        problem_type: transformers' name of the problem. Multiple choice is a single-label classification.
        label_smoothing: share of the probability that goes evenly to all classes; single label only.
    """
    logits = outputs["logits"]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    reduction = "mean" if num_items_in_batch is None else "sum"
    if problem_type == SINGLE_LABEL:
        loss = F.cross_entropy(logits, labels, reduction=reduction, label_smoothing=label_smoothing)
    else:
        compare = F.mse_loss if problem_type == REGRESSION else F.binary_cross_entropy_with_logits
        loss = compare(logits, labels.to(logits).view_as(logits), reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


class SeededSampler(Sampler[int]):
    """A new random order in every epoch, from the seed and the epoch alone.

    Args:
        lengths: a length for each row; rows of about one length stand together, the longest batch first (so that
            memory runs out at once or not at all). All equal: a plain random order.
        batch_size: rows of an update.
        seed: of the order.
    """

    def __init__(self, lengths: list[int], batch_size: int, seed: int) -> None:
        self.lengths, self.batch_size, self.seed, self.epoch = lengths, batch_size, seed, 0

    def __len__(self) -> int:
        return len(self.lengths)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch, counted from 0."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        shuffled = torch.randperm(len(self.lengths), generator=generator).tolist()
        size, pool = self.batch_size, self.batch_size * _POOL
        batches = []
        for start in range(0, len(shuffled), pool):
            rows = sorted(shuffled[start : start + pool], key=lambda row: -self.lengths[row])
            batches += [rows[first : first + size] for first in range(0, len(rows), size)]
        order = torch.randperm(len(batches), generator=generator).tolist()
        # A batch that is not full has to be the last, or every batch after it would be cut elsewhere.
        order.sort(key=lambda index: len(batches[index]) < size)
        longest = max(range(len(order)), key=lambda place: max(self.lengths[row] for row in batches[order[place]]))
        if len(batches[order[longest]]) == size:
            order[0], order[longest] = order[longest], order[0]
        return iter([row for index in order for row in batches[index]])


class _Progress(TrainerCallback):
    """Sets the sampler's epoch; counts the seconds of training without evaluation and saving."""

    def __init__(self) -> None:
        self.sampler: SeededSampler | None = None
        self.seconds = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Let the clock run."""
        self._since = time.perf_counter()

    def stop(self) -> bool:
        """Stop the clock; whether it ran."""
        if self._since is None:
            return False
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - self._since
        self._since = None
        return True

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.sampler is not None:
            self.sampler.set_epoch(int(state.epoch or 0))
        self.start()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.stop()


class FinetuneTrainer(Trainer):
    """Trainer with the loss and the order of this module.

    Args:
        problem_type: see `task_loss`.
        lengths: a length for each training row, not in tokens of one tokenizer, so that all models see one order.
        patience: evaluations without a better metric until the run stops; 0 never stops it.
        keywords: of `Trainer`.
    """

    def __init__(
        self, *, problem_type: str, lengths: list[int] | None = None, patience: int = 0, **keywords: Any
    ) -> None:
        smoothing = keywords["args"].label_smoothing_factor
        loss = partial(task_loss, problem_type=problem_type, label_smoothing=smoothing)
        super().__init__(compute_loss_func=loss, preprocess_logits_for_metrics=_only_logits, **keywords)
        self.model_accepts_loss_kwargs = False  # the division is done in `task_loss`; heads need not know
        self.lengths = lengths
        self.progress = _Progress()
        self.add_callback(self.progress)
        if patience:
            self.add_callback(EarlyStoppingCallback(patience))

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        """The order of this module, unless a sequential one is asked for."""
        rows = self.train_dataset if train_dataset is None else train_dataset
        if self.args.train_sampling_strategy not in ("group_by_length", "random"):
            return super()._get_train_sampler(train_dataset)
        grouped = self.args.train_sampling_strategy == "group_by_length" and self.lengths is not None
        update = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self.progress.sampler = SeededSampler(self.lengths if grouped else [1] * len(rows), update, seed)
        return self.progress.sampler

    def evaluate(self, *arguments: Any, **keywords: Any) -> dict[str, float]:
        """As the Trainer's; the clock of the training stands still."""
        ran = self.progress.stop()
        metrics = super().evaluate(*arguments, **keywords)
        if ran:
            self.progress.start()
        return metrics

    def _save_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
        ran = self.progress.stop()
        if self.args.should_save:
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / CLOCK).write_text(json.dumps({"seconds": self.progress.seconds}), encoding="utf-8")
        super()._save_checkpoint(*arguments, **keywords)
        if ran:
            self.progress.start()

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler | None:
        """As the rows come: whoever reads the predictions has to know which row they belong to."""
        return SequentialSampler(eval_dataset)


def _only_logits(logits: Any, labels: Tensor) -> Tensor:
    """Some heads return states beside the logits; keeping them for every row would fill the memory."""
    return logits[0] if isinstance(logits, tuple) else logits


def damage(checkpoint: Path) -> str | None:
    """What is missing or cut off in a Trainer checkpoint; `None` if it is whole.

    `trainer_state.json` is the last file that the Trainer writes.
    """
    for name in ("trainer_state.json", CLOCK, "optimizer.pt", "scheduler.pt"):
        if not (checkpoint / name).is_file():
            return f"{name} is missing"
    for name in ("trainer_state.json", CLOCK):
        try:
            json.loads((checkpoint / name).read_text(encoding="utf-8"))
        except ValueError:
            return f"{name} is cut off"
    for path in [*checkpoint.glob("*.pt"), *checkpoint.glob("rng_state*.pth")]:
        if path.name != "scaler.pt" and not zipfile.is_zipfile(path):
            return f"{path.name} is cut off"
    if not list(checkpoint.glob("rng_state*.pth")):
        return "rng_state.pth is missing"
    weights = sorted(checkpoint.glob("*.safetensors"))
    if not weights:
        return "model.safetensors is missing"
    for path in weights:
        try:
            with safe_open(path, framework="pt"):  # compares the length of the file with its header
                pass
        except (SafetensorError, OSError):
            return f"{path.name} is cut off"
    return None


def checkpoints(folder: Path) -> list[Path]:
    """The Trainer's checkpoints in a folder, the newest first."""
    found = [path for path in folder.glob("checkpoint-*") if path.name.partition("-")[2].isdigit() and path.is_dir()]
    return sorted(found, key=lambda path: -int(path.name.partition("-")[2]))


def newest_whole_checkpoint(folder: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint to continue from, if any, and a sentence for each damaged one that was passed over."""
    notes = []
    for path in checkpoints(folder):
        fault = damage(path)
        if fault is None:
            return path, notes
        notes.append(f"{path.name} is damaged ({fault}) and is not used.")
    return None, notes


def stopped_early(checkpoint: Path, patience: int) -> bool:
    """Whether early stopping had ended the run at a checkpoint; the Trainer would train on for an epoch."""
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    stored = state.get("stateful_callbacks", {}).get("EarlyStoppingCallback", {})
    stored = stored[0] if isinstance(stored, list) else stored
    return patience > 0 and stored.get("attributes", {}).get("early_stopping_patience_counter", 0) >= patience


def number(value: float) -> float | None:
    """A finite number for JSON, which knows neither infinity nor NaN."""
    return value if math.isfinite(value) else None
