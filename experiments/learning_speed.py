"""Cost of a training step of every system of `learning.py`, measured side by side.

The runs themselves follow one another over an hour, and whatever else the machine does in the meantime falls on some of
them and not on others. Here all systems take turns, a few steps each, and on a CPU what counts is processor time, which
other programs hardly change.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from common.models import make_config
from engine.groups import parameter_groups
from engine.recipe import PretrainRecipe
from measuring import progress, summary, synchronize
from transformers import AutoModelForMaskedLM

STEPS = 4  # a turn


def measure_steps(recipes: dict[str, PretrainRecipe], rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds of a training step of every system: medians over rounds in which each has a turn.

    Args:
        recipes: what to build, by name of the system; same batch for all.
        rounds: turns of each system, after one that does not count.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = {system: make_step(recipe) for system, recipe in recipes.items()}
    taken: dict[str, list[float]] = {system: [] for system in recipes}
    names = list(steps)
    for turn in range(rounds + 1):
        for system in names[turn % len(names) :] + names[: turn % len(names)]:
            spent = _seconds(steps[system], device)
            if turn:
                taken[system].append(spent / STEPS)
        progress(f"speed: round {turn} of {rounds}")
    return {system: summary(values) for system, values in taken.items()}


def make_step(recipe: PretrainRecipe) -> Callable[[], None]:
    """Forward, backward, clipping and AdamW of a recipe's model, in its precision, on a batch of random tokens."""
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision=recipe.mixed_precision)
    model = AutoModelForMaskedLM.from_config(make_config(recipe.model, None, recipe.vocab_size))
    optimizer = torch.optim.AdamW(parameter_groups(model, recipe.weight_decay), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    ids = torch.randint(4, recipe.vocab_size - 1, (recipe.update_rows, recipe.block_size))
    labels = ids.masked_fill(torch.rand(ids.shape) > recipe.mask_probability, -100)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}

    def step() -> None:
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _seconds(step: Callable[[], None], device: str) -> float:
    clock = time.process_time if device == "cpu" else time.perf_counter
    synchronize(device)
    started = clock()
    for _ in range(STEPS):
        step()
    synchronize(device)
    return clock() - started
