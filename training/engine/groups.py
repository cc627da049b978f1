"""The recipes' `parameter_groups`: parameters with a separate learning rate, or frozen for some updates."""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

from common.sections import read_section
from torch import nn
from torch.optim import Optimizer

from luna_hf.scripting import UserError


@dataclasses.dataclass(frozen=True)
class ParameterGroup:
    """An entry of `parameter_groups`.

    Attributes:
        match: regular expression, searched for in the names of the parameters.
        learning_rate: the group's peak; `None` takes the recipe's.
        frozen_steps: updates before the group starts to change.

    Raises:
        UserError: An invalid value.
    """

    match: str
    learning_rate: float | None = None
    frozen_steps: int = 0

    def __post_init__(self) -> None:
        where = f"`parameter_groups`, {self.match!r}: "
        try:
            re.compile(self.match)
        except re.error as error:
            raise UserError(f"{where}`match` is not a regular expression: {error}.") from error
        if self.learning_rate == 0:
            raise UserError(
                f"{where}`learning_rate` is {self.learning_rate}, but must be above 0. To freeze the group, set its "
                "`frozen_steps` to `max_steps`."
            )


def read_groups(entries: Iterable[Any]) -> list[ParameterGroup]:
    """The entries of a recipe's `parameter_groups`; raises the `UserError`s of `read_section` and `ParameterGroup`."""
    return [read_section(ParameterGroup, entry, "`parameter_groups`") for entry in entries]


def assign(names: Sequence[str], groups: Sequence[ParameterGroup]) -> dict[str, ParameterGroup | None]:
    """The first group that matches each name, or `None`.

    Raises:
        UserError: A group has no parameter.
    """
    found = {name: next((group for group in groups if re.search(group.match, name)), None) for name in names}
    for group in groups:
        if any(owner is group for owner in found.values()):
            continue
        raise UserError(
            f"`parameter_groups`: `match` {group.match!r} has no effect: it matches no parameter that no earlier entry "
            f"matches. Their names are {names[0]} ... {names[-1]}."
        )
    return found


def check_groups(names: Sequence[str], groups: Sequence[ParameterGroup], max_steps: int) -> None:
    """Check that every group has parameters, and that every update changes something.

    Raises:
        UserError: A group has no parameter, or an update would change nothing.
    """
    owners = assign(names, groups).values()
    if frozen := min(0 if owner is None else owner.frozen_steps for owner in owners):
        span = "the whole run" if frozen >= max_steps else f"the first {frozen:,} updates"
        raise UserError(
            f"`parameter_groups`: every trainable parameter is frozen for {span}. Lower a `frozen_steps`, or exclude "
            "some parameters from `match`."
        )


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    learning_rate: float | None = None,
    groups: Sequence[ParameterGroup] = (),
    max_steps: int | None = None,
) -> list[dict[str, Any]]:
    """Groups for an optimizer: matrices and embeddings decay, vectors (biases and norms) do not.

    Parameters that are frozen for the whole run stop needing a gradient; those that need none are omitted. Each group
    has the `frozen_steps` that `drop_frozen` reads.
    """
    owners = assign([name for name, _ in model.named_parameters()], groups)
    found = []
    for group in (None, *groups):
        rate = learning_rate if group is None or group.learning_rate is None else group.learning_rate
        frozen = 0 if group is None else group.frozen_steps
        parameters = [p for name, p in model.named_parameters() if owners[name] is group and p.requires_grad]
        if max_steps is not None and frozen >= max_steps:
            for parameter in parameters:
                parameter.requires_grad_(False)
            continue
        shared = {"frozen_steps": frozen, **({} if rate is None else {"lr": rate})}
        found += [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay, **shared},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, **shared},
        ]
    return [group for group in found if group["params"]]


def drop_frozen(optimizer: Optimizer, step: int) -> None:
    """Drop the gradients of groups that are frozen after `step` updates.

    A parameter without a gradient does not enter the norm or AdamW's moments, does not decay, and stays bitwise equal.
    """
    for group in optimizer.param_groups:
        if step < group.get("frozen_steps", 0):
            for parameter in group["params"]:
                parameter.grad = None
