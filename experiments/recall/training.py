"""A training loop for the recall study: small models, a few minutes at most, one thread."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .systems import make_model, state_bytes
from .tasks import IGNORED, Task

TEST_SEED = 10**9  # training seeds are small numbers
TEST_ROWS = 256
SOLVED, ADVANCES = 0.99, 0.9
SMALLEST = {True: 2, False: 1}  # of causal models and encoders


@dataclass(frozen=True)
class Recipe:
    """How a system is trained.

    Args:
        rate: largest learning rate; it rises for 50 steps and then falls linearly to a tenth.
        steps: largest number of updates; training ends once the system has solved the largest size.
        rows: rows of an update; twice as many for an encoder, and at the two smallest sizes.
        seed: of weights and training rows.
        positions: `position_embedding_type`; by default "sinusoidal" in causal models, "learned" in encoders.
        eval_steps: updates between evaluations.
    """

    rate: float
    steps: int = 1000
    rows: int = 32
    seed: int = 0
    positions: str | None = None
    eval_steps: int = 50


def sizes(task: Task) -> list[int]:
    """Sizes from 2 (encoders: 1), doubling, up to the task's own."""
    powers = (SMALLEST[task.causal] << power for power in range(task.items.bit_length()))
    return [*(size for size in powers if size < task.items), task.items]


class Curriculum:
    """Sizes of the training rows: half of them the largest so far, which grows when the system is right in 90 %.

    With rows of 16 pairs from the start, no causal model left the plateau where it guesses among the values of the row.
    The last quarter of the steps uses all sizes in any case. An encoder uses all of them from the start, equally often.
    """

    def __init__(self, task: Task, recipe: Recipe, generator: torch.Generator) -> None:
        self.sizes, self.recipe, self.generator = sizes(task), recipe, generator
        self.level = 0 if task.causal else len(self.sizes) - 1
        self.causal = task.causal

    def draw(self, step: int) -> int:
        """Draw the level of an update: an index of `sizes`."""
        if step >= 0.75 * self.recipe.steps:
            self.level = len(self.sizes) - 1
        if self.causal and torch.rand((), generator=self.generator) < 0.5:
            return self.level
        return torch.randint(self.level + 1, (), generator=self.generator).item()

    def advance(self, accuracy: Callable[[int], float]) -> bool:
        """Move to the first size that is not yet learned; return whether the largest is solved."""
        while (found := accuracy(self.sizes[self.level])) >= ADVANCES and self.level + 1 < len(self.sizes):
            self.level += 1
        return self.level + 1 == len(self.sizes) and found >= SOLVED


def scheduled(recipe: Recipe, step: int) -> float:
    """Learning rate of an update, counted from 0."""
    return recipe.rate * min(1.0, (step + 1) / 50) * (1 - 0.9 * step / recipe.steps)


def answers(model: nn.Module, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and labels of the answers, (number, vocab_size) and (number,)."""
    cached = {"use_cache": False} if model.config.is_decoder else {}
    asked = labels != IGNORED
    return model(input_ids=ids, **cached).logits[asked], labels[asked]


@torch.no_grad()
def evaluate(model: nn.Module, task: Task) -> float:
    """Accuracy on the held-out rows of a task."""
    ids, labels = task.draw(TEST_ROWS, torch.Generator().manual_seed(TEST_SEED))
    model.eval()
    logits, labels = answers(model, ids, labels)
    model.train()
    return (logits.argmax(-1) == labels).float().mean().item()


def train(system: str, task: Task, recipe: Recipe) -> dict[str, Any]:
    """Train a system on a task; return its curve, its accuracy at every size, and its costs."""
    torch.manual_seed(recipe.seed)
    model = make_model(system, task, recipe.positions).train()
    generator = torch.Generator().manual_seed(recipe.seed)
    curriculum = Curriculum(task, recipe, generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    curve: dict[str, list[float]] = {"step": [], "size": [], "accuracy": []}

    def accuracy(size: int) -> float:
        found = evaluate(model, replace(task, items=size))
        for name, value in zip(curve, (step + 1, size, found), strict=True):
            curve[name].append(value)
        return found

    started = time.process_time()
    for step in range(recipe.steps):
        level = curriculum.draw(step)
        rows = recipe.rows * (2 if level < 2 or not task.causal else 1)
        logits, labels = answers(model, *replace(task, items=curriculum.sizes[level]).draw(rows, generator))
        optimizer.param_groups[0]["lr"] = scheduled(recipe, step)
        F.cross_entropy(logits, labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % recipe.eval_steps == 0 and curriculum.advance(accuracy):
            break
    return {
        "curve": curve,
        "accuracy": {str(size): evaluate(model, replace(task, items=size)) for size in curriculum.sizes},
        "steps": step + 1,
        "seconds": time.process_time() - started,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "state_bytes": state_bytes(model, task) if task.causal else None,
    }
