"""What every run sets up beside its data and model: optimizer, log, trackers and the repository it is pushed to."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from common.hub import reserve_repository

from engine.checkpoint import Counters, checkpoints
from engine.log import RunLog
from engine.loop import Run
from engine.recipe import Recipe


class Opened(NamedTuple):
    """An output folder in use: the checkpoint to resume from, the run's inputs, and which have changed since."""

    found: Path | None
    inputs: dict[str, str]
    changed: list[str]


def reserve(recipe: Recipe) -> str:
    """The repository that the run will be pushed to, or "" if it will not be."""
    if not recipe.push_to_hub:
        return ""
    return reserve_repository(recipe.hub_model_id or recipe.model_name, recipe.hub_private)


def make_optimizer(recipe: Recipe, groups: Iterable[dict[str, Any]], device: torch.device) -> torch.optim.Optimizer:
    """AdamW with the values of the recipe."""
    return torch.optim.AdamW(
        groups,
        lr=recipe.learning_rate,
        betas=(recipe.adam_beta1, recipe.adam_beta2),
        eps=recipe.adam_epsilon,
        # Faster on a CPU. Not elsewhere: accelerate cannot tell that loss scaling has skipped a fused step.
        fused=device.type == "cpu",
    )


def start_log(recipe: Recipe, accelerator: Accelerator, counters: Counters, opened: Opened) -> RunLog:
    """The log of a run that starts or resumes, which says so, and the recipe's trackers."""
    path, found = Path(recipe.output_dir) / "log.jsonl", opened.found
    log = RunLog(path, accelerator.is_main_process, counters.step if found else None)
    log.report_lost(counters.logged, accelerator.print)
    if found:
        log.add("resumed", counters.step, **({"changed": opened.changed} if opened.changed else {}))
        accelerator.print(f"Resuming from {found}: step {counters.step:,} of {recipe.max_steps:,}.")
        if opened.changed:
            accelerator.print(f"Data have changed since, which the recipe accepts: {', '.join(opened.changed)}.")
    if recipe.trackers:
        flat = {key: value for key, value in dataclasses.asdict(recipe).items() if isinstance(value, int | float | str)}
        accelerator.init_trackers(recipe.model_name, config=flat)
    return log


def stopped(run: Run, counters: Counters) -> str:
    """What to tell the user after a signal."""
    last = checkpoints(Path(run.recipe.output_dir))[-1]
    return (
        f"Stopped by {run.stop.name or 'request'} after step {counters.step:,} of {run.recipe.max_steps:,}, saved in "
        f"{last}. The same command resumes from there."
    )


def close_trackers(accelerator: Accelerator) -> None:
    """End the trackers; the processes stay connected for another run (`Accelerator.end_training` would part them)."""
    for tracker in accelerator.trackers:
        tracker.finish()
