"""The Trainer of the finetuning commands: one loss and one order for every model, and checkpoints that are whole.

It differs from transformers' Trainer in five points:

- The loss is computed here from the logits, divided by the labels of the whole update. transformers' own heads ignore
  `num_items_in_batch`, so with gradient accumulation they train on a sum of means.
- The order of the rows depends on the seed and the epoch alone. The Trainer's length-grouped sampler draws from the
  global generator, which dropout advances differently in every model, and it shuffles evaluation sets, too.
- A clock counts the seconds of training without evaluation and saving; it continues after a resume.
- Checkpoints are sealed, and a damaged one is not used.
- A loss, prediction, metric or weight that is not finite ends the run with `Diverged`. The Trainer would filter NaN out
  of its log and train on.
"""

import math
import re
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from common.optimizer import fitting
from common.seal import MANIFEST, damage, newest_intact, seal
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Sampler, SequentialSampler
from transformers import EarlyStoppingCallback as _EarlyStoppingCallback
from transformers import EvalPrediction, Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import EvalLoopOutput

from luna_hf.scripting import UserError, read_json, reason
from tasks.labels import REGRESSION, SINGLE_LABEL

# Batches that are sorted together: enough for little padding, few enough that epochs differ.
_POOL = 50
_NAME = re.compile(r"checkpoint-([0-9]+)")


class Diverged(ArithmeticError):
    """A run has a loss, prediction, metric or weight that is not finite: it has no score."""


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
        lengths: a length per row; rows of similar length form a batch, and the longest batch comes first, so that
            memory runs out at once or not at all. Equal lengths give a plain random order.
        batch_size: rows of an update.
        seed: of the order.
        epoch: returns the epoch, counted from 0, that an iteration is for. Not every loader of accelerate passes it on.
    """

    def __init__(self, lengths: list[int], batch_size: int, seed: int, epoch: Callable[[], int]) -> None:
        self.lengths, self.batch_size, self.seed, self.epoch = lengths, batch_size, seed, epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch())
        shuffled = torch.randperm(len(self.lengths), generator=generator).tolist()
        size, pool = self.batch_size, self.batch_size * _POOL
        batches = []
        for start in range(0, len(shuffled), pool):
            rows = sorted(shuffled[start : start + pool], key=lambda row: -self.lengths[row])
            batches += [rows[first : first + size] for first in range(0, len(rows), size)]
        order = torch.randperm(len(batches), generator=generator).tolist()
        # A batch that is not full must come last, or every batch after it would be cut elsewhere.
        order.sort(key=lambda index: len(batches[index]) < size)
        longest = max(range(len(order)), key=lambda place: max(self.lengths[row] for row in batches[order[place]]))
        if len(batches[order[longest]]) == size:
            order[0], order[longest] = order[longest], order[0]
        return iter([row for index in order for row in batches[index]])


class Clock(TrainerCallback, ExportableState):
    """Seconds of the updates, without evaluation and saving; checkpoints hold them."""

    def __init__(self) -> None:
        self.seconds = self._since = 0.0

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"args": {}, "attributes": {"seconds": self.seconds}}

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start."""
        self._since = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop. What an accelerator has not finished yet counts in the next update, whose loss waits for it."""
        self.seconds += time.perf_counter() - self._since


class Sealing(TrainerCallback):
    """Seals every checkpoint, and finds the best one where it is now."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The run may have been moved since the checkpoint was written; the Trainer then forgets which one is best."""
        if state.global_step:
            state.best_model_checkpoint = _best(Path(args.output_dir, f"checkpoint-{state.global_step}"))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Seal what all processes have written."""
        PartialState().wait_for_everyone()
        if state.is_world_process_zero:
            seal(Path(args.output_dir, f"checkpoint-{state.global_step}"))


class EarlyStoppingCallback(_EarlyStoppingCallback):
    """transformers' callback, for which a lower loss at the same score is an improvement, too."""

    def check_metric_value(self, args: Any, state: Any, control: Any, metric_value: float) -> None:
        """Count evaluations without an improvement; the Trainer has just logged this one, and not yet compared it."""
        super().check_metric_value(args, state, control, metric_value)
        if _has_lower_loss(state, metric_value):
            self.early_stopping_patience_counter = 0


def _has_lower_loss(state: TrainerState, score: float) -> bool:
    """Whether the newest evaluation, which has this score, equals the best one but for a lower loss."""
    losses = {entry["step"]: entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry}
    return score == state.best_metric and losses[state.global_step] < losses.get(state.best_global_step, -math.inf)


def seconds(trainer: Trainer) -> float:
    """What the `Clock` of a trainer shows, seconds before a resume included."""
    return next(part for part in trainer.callback_handler.callbacks if isinstance(part, Clock)).seconds


class Resuming:
    """What a Trainer reads of a checkpoint, which may come from somebody else; a base class beside it."""

    def _init_training_state(self, *arguments: Any) -> tuple[int, int]:
        with _continuing(arguments[3]):
            return super()._init_training_state(*arguments)

    def _load_from_checkpoint(self, checkpoint: str, *arguments: Any) -> None:
        with _continuing(checkpoint):
            super()._load_from_checkpoint(checkpoint, *arguments)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        is_sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled
        with _continuing(checkpoint), nullcontext() if is_sharded or not checkpoint else fitting(self.optimizer):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        with _continuing(checkpoint):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with _continuing(checkpoint):
            super()._load_rng_state(checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Refuse weights of another model, about which the Trainer only warns."""
        missing = {*load_result.missing_keys} - {*getattr(self.model, "all_tied_weights_keys", ())}
        if wrong := sorted({*missing, *load_result.unexpected_keys}):
            raise ValueError(f"its weights are those of another model: see {', '.join(wrong[:3])}")


class FiniteTraining(Resuming):
    """What ends a run that diverges; a base class beside a Trainer."""

    def training_step(self, *arguments: Any, **keywords: Any) -> Tensor:
        """One micro batch; its loss must be finite."""
        loss = super().training_step(*arguments, **keywords)
        self.require_finite({"training loss": loss})
        return loss

    def require_finite(self, values: Mapping[str, Any]) -> None:
        """Check numbers, arrays or tensors by name.

        Raises:
            Diverged: On every process, if one of them has a value that is not finite.
        """
        for name, value in values.items():
            finite = value is None or bool(torch.isfinite(torch.as_tensor(value)).all())
            if not self.accelerator.gather(torch.tensor(float(finite), device=self.args.device)).all():
                raise Diverged(f"{name.removeprefix('eval_')} not finite after {self.state.global_step:,} updates")


class FinetuneTrainer(FiniteTraining, Trainer):
    """Trainer with the loss, the order and the clock of this module.

    Args:
        problem_type: see `task_loss`.
        lengths: a length per training row, not in tokens of one tokenizer, so that all models see one order.
        patience: evaluations without a better metric, or an equal one with a lower loss, until the run stops; 0 never
            stops it.
        scores: metrics of the evaluation rows, from finite logits and labels.
        keywords: of `Trainer`.

    Raises:
        Diverged: In training, evaluation and prediction, on every process.
    """

    def __init__(
        self,
        *,
        problem_type: str,
        lengths: list[int] | None = None,
        patience: int = 0,
        scores: Callable[[np.ndarray, np.ndarray], dict[str, float]] | None = None,
        **keywords: Any,
    ) -> None:
        smoothing = keywords["args"].label_smoothing_factor
        loss = partial(task_loss, problem_type=problem_type, label_smoothing=smoothing)
        super().__init__(
            compute_loss_func=loss,
            preprocess_logits_for_metrics=_only_logits,
            compute_metrics=scores and self._metrics,
            **keywords,
        )
        self.scores, self.problem_type = scores, problem_type
        self.model_accepts_loss_kwargs = False  # `task_loss` divides; heads need not know
        self.lengths = lengths
        self.add_callback(Clock())
        self.add_callback(Sealing())
        if patience:
            self.add_callback(EarlyStoppingCallback(patience))

    @property
    def seconds(self) -> float:
        """Seconds of training, those before a resume included."""
        return seconds(self)

    def evaluation_loop(self, *arguments: Any, **keywords: Any) -> EvalLoopOutput:
        """Evaluate or predict; predictions must be finite, and in training also loss and metrics."""
        output = super().evaluation_loop(*arguments, **keywords)
        # Without metrics the rows may have no labels, and then no loss.
        self.require_finite({"predictions": output.predictions, **(output.metrics if self.compute_metrics else {})})
        return output

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Of equal scores, the one with the lower loss is the best: few rows soon reach a score that stays."""
        if super()._determine_best_metric(metrics, trial):
            return True
        is_better = _has_lower_loss(self.state, metrics[f"eval_{self.args.metric_for_best_model}"])
        if is_better:
            self.state.best_global_step = self.state.global_step
        return is_better

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> Any:
        """The labels of an update. The Trainer leaves out those of -100, which is a number like any other here."""
        if self.problem_type == SINGLE_LABEL:
            return super()._get_num_items_in_batch(batch_samples, device)
        counted = [{"labels": torch.zeros_like(batch["labels"])} for batch in batch_samples]
        return super()._get_num_items_in_batch(counted, device)

    def _metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        """`scores`, which are defined for finite numbers only."""
        self.require_finite({"predictions": prediction.predictions})
        return self.scores(prediction.predictions, prediction.label_ids)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        """The order of this module, unless a sequential one is requested."""
        rows = self.train_dataset if train_dataset is None else train_dataset
        if self.args.train_sampling_strategy not in ("group_by_length", "random"):
            return super()._get_train_sampler(train_dataset)
        grouped = self.args.train_sampling_strategy == "group_by_length" and self.lengths is not None
        update = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        lengths = self.lengths if grouped else [1] * len(rows)
        return SeededSampler(lengths, update, self.args.seed, lambda: int(self.state.epoch or 0))

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler | None:
        """In the order of the rows, to which the predictions belong."""
        return SequentialSampler(eval_dataset)


def _only_logits(logits: Any, labels: Tensor) -> Tensor:
    """Drop the states that some heads return beside the logits: kept for every row, they would fill the memory."""
    return logits[0] if isinstance(logits, tuple) else logits


# ---- checkpoints ----


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The content of `trainer_state.json`, the last file of a checkpoint that the Trainer writes.

    Raises:
        UserError: It is missing or damaged, or that of another checkpoint.
    """
    path = checkpoint / "trainer_state.json"
    state = read_json(path)
    step, log = state.get("global_step"), state.get("log_history")
    numbers = [state.get(name, 0) or 0 for name in ("best_metric", "epoch")]
    best = Path(str(state.get("best_model_checkpoint") or checkpoint)).name
    right = type(step) is int and checkpoint.name == f"checkpoint-{step}" and _NAME.fullmatch(best)
    right = right and all(isinstance(value, int | float) and math.isfinite(value) for value in numbers)
    if not right or not isinstance(log, list) or not all(isinstance(row, dict) for row in log):
        raise UserError(f"{path} is damaged (it is not that of {checkpoint.name})")
    return state


def checkpoints(folder: Path) -> list[Path]:
    """The Trainer's checkpoints in a folder, the newest first."""
    found = {path: _NAME.fullmatch(path.name) for path in folder.glob("checkpoint-*") if path.is_dir()}
    return sorted((path for path, name in found.items() if name), key=lambda path: -int(found[path][1]))


def remove_checkpoints(folder: Path) -> None:
    """Delete what a finished run no longer needs: the best weights are in the folder itself."""
    for path in checkpoints(folder):
        shutil.rmtree(path)


def find_checkpoint(folder: Path, tell: Callable[[str], None], needs_best: bool = True) -> Path | None:
    """Where to continue: the newest checkpoint that is intact.

    Args:
        folder: of the run.
        tell: prints.
        needs_best: whether the run ends with the best weights, so that the best checkpoint so far must be intact, too.
    """

    def wrong(checkpoint: Path) -> str | None:
        if own := _damage(checkpoint):
            return own
        best = _best(checkpoint) if needs_best else None
        if best and (other := _damage(Path(best))):
            return f"it needs {Path(best).name}, the best one until then, which is damaged: {other}"
        return None

    found = checkpoints(folder)
    if newest := newest_intact(found, lambda line: tell(f"  {line}"), wrong):
        tell(f"  Continuing from {newest.name}.")
    elif found:
        tell("  No checkpoint is intact: training from the beginning.")
    return newest


def _damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or `None`.

    One without a manifest was written by an earlier version, or a kill came between its last file and the manifest.
    """
    is_sealed = (checkpoint / MANIFEST).is_file()
    if is_sealed and (found := damage(checkpoint)):
        return found
    try:
        read_state(checkpoint)
        if is_sealed:
            return None
        for path in checkpoint.glob("*.safetensors"):
            with safe_open(path, framework="pt"):  # compares the length of the file with its header
                pass
    except (OSError, ValueError, SafetensorError) as error:
        return f"it is not complete ({reason(error)})"
    cut = [path.name for path in checkpoint.glob("*.pt*") if not zipfile.is_zipfile(path)]  # they end in a table
    parts = {"*model[._-]*": "weights", "optimizer*": "optimizer", "scheduler.pt": "scheduler.pt"}
    parts["rng_state*.pth"] = "random states"
    missing = [part for pattern, part in parts.items() if not any(checkpoint.glob(pattern))]
    missing = [] if any(checkpoint.glob("global_step*")) else missing  # DeepSpeed has other files
    return f"{cut[0]} is cut off" if cut else f"it has no {missing[0]}" if missing else None


def _best(checkpoint: Path) -> str | None:
    """The best checkpoint that another one beside it records, where it is now."""
    recorded = read_state(checkpoint).get("best_model_checkpoint")
    return str(checkpoint.with_name(Path(recorded).name)) if recorded else None


@contextmanager
def _continuing(checkpoint: str | Path | None) -> Iterator[None]:
    """Name the checkpoint in whatever its content makes a reader raise.

    Raises:
        UserError: It cannot be continued from.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a file of somebody else may hold anything
        if checkpoint is None:
            raise
        raise UserError(f"{checkpoint} cannot be continued from ({reason(error)}). Remove this folder.") from error


def train(trainer: Trainer, start: Path | None, patience: int = 0) -> None:
    """Train from a checkpoint or the beginning to the end; the model then has the best weights.

    The trainer is a `Resuming` one with a `Clock`.
    """
    with _continuing(start):
        state = TrainerState.load_from_json(str(start / "trainer_state.json")) if start else None
        is_over = start is not None and _is_over(read_state(start), patience)
    is_over = is_over and not (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled)  # they load while they train
    if not is_over:
        trainer.train(resume_from_checkpoint=str(start) if start else None)
        return
    with _continuing(start):
        best = _best(start) if trainer.args.load_best_model_at_end else None
        trainer._load_from_checkpoint(str(best or start))
        trainer.state = state
        trainer._load_callback_state()


def _is_over(state: dict[str, Any], patience: int) -> bool:
    """Whether a run had ended at a checkpoint; the Trainer would train for another update or epoch."""
    stored = state.get("stateful_callbacks", {}).get("EarlyStoppingCallback", {})
    stored = stored[0] if isinstance(stored, list) else stored
    bad = stored.get("attributes", {}).get("early_stopping_patience_counter", 0)
    return 0 < state.get("max_steps", 0) <= state["global_step"] or 0 < patience <= bad
