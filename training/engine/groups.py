"""Groups of parameters that learn at a rate of their own, or stay as they are for a while: `parameter_groups`."""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from common.options import did_you_mean
from torch import nn
from torch.optim import Optimizer

from luna_hf.scripting import UserError


@dataclasses.dataclass(frozen=True)
class ParameterGroup:
    """An entry of `parameter_groups`.

    Attributes:
        match: regular expression; it is searched for in the names of the parameters.
        learning_rate: the group's own peak; `None` takes the recipe's.
        frozen_steps: the group does not change before that many updates.
    """

    match: str
    learning_rate: float | None = None
    frozen_steps: int = 0


def read_groups(entries: Iterable[Any]) -> list[ParameterGroup]:
    """The entries of a recipe's `parameter_groups`, checked.

    Raises:
        UserError: An entry is no section, has an unknown key or a value out of range, or no valid expression.
    """
    return [_read_group(entry) for entry in entries]


def _read_group(entry: Any) -> ParameterGroup:
    example = "{match: control, learning_rate: 1e-3, frozen_steps: 100}"
    if not isinstance(entry, dict) or "match" not in entry:
        raise UserError(f"`parameter_groups`: {entry!r} must be a section with `match`, for example {example}.")
    known = [field.name for field in dataclasses.fields(ParameterGroup)]
    for key in entry:
        if key not in known:
            raise UserError(f"`parameter_groups`: unknown key `{key}` in {entry!r}.{did_you_mean(key, known)}")
    group = ParameterGroup(**entry)
    try:
        re.compile(group.match)
    except (re.error, TypeError) as error:
        raise UserError(
            f"`parameter_groups`: `match` {group.match!r} is no regular expression ({error}). Name a part of the "
            "parameters' names, with a backslash before what has a meaning of its own: layer\\.0\\."
        ) from error
    rate, frozen = group.learning_rate, group.frozen_steps
    if rate is not None and (type(rate) not in (int, float) or not 0 < rate < math.inf):
        raise UserError(
            f"`parameter_groups`: `learning_rate` of {group.match!r} is {rate!r}, but must be a number above 0. To "
            "keep the group as it is, set its `frozen_steps` to `max_steps`."
        )
    if type(frozen) is not int or frozen < 0:
        raise UserError(
            f"`parameter_groups`: `frozen_steps` of {group.match!r} is {frozen!r}, but must be a number of updates."
        )
    return group


def assign(names: Sequence[str], groups: Sequence[ParameterGroup]) -> dict[str, ParameterGroup | None]:
    """The first group that matches each name, or `None`.

    Raises:
        UserError: A group has no parameter.
    """
    found = {name: next((group for group in groups if re.search(group.match, name)), None) for name in names}
    for group in groups:
        if any(owner is group for owner in found.values()):
            continue
        taken = [name for name in names if re.search(group.match, name)]
        if taken:
            reason = f"all that it matches ({taken[0]}, ...) belongs to entries before it. Put it first"
        else:
            reason = f"no parameter of the model has it in its name. They are called {names[0]} ... {names[-1]}"
        raise UserError(f"`parameter_groups`: `match` {group.match!r} is in vain: {reason}.")
    return found


def check_groups(
    names: Sequence[str], groups: Sequence[ParameterGroup], max_steps: int, trained: Sequence[str] | None = None
) -> None:
    """Whether every group has parameters that can be trained, and every update something to change.

    Args:
        names: all parameters of the model.
        groups: of the recipe.
        max_steps: updates of the run.
        trained: those that the loss depends on, if not all.

    Raises:
        UserError: Not so.
    """
    owners = assign(names, groups)
    frozen = min(0 if (owner := owners[name]) is None else owner.frozen_steps for name in trained or names)
    if frozen:
        span = "the whole run" if frozen >= max_steps else f"the first {frozen:,} updates"
        raise UserError(
            f"`parameter_groups`: every parameter that could be trained is frozen for {span}, which would change "
            "nothing. Lower a `frozen_steps`, or let `match` leave some parameters out."
        )
    if trained is None:
        return
    for group in groups:
        own = [name for name in names if owners[name] is group]
        # One that is frozen for the whole run asks for no training, so nothing of it is in vain.
        if group.frozen_steps < max_steps and not set(own) & set(trained):
            raise UserError(
                f"`parameter_groups`: `match` {group.match!r} is in vain: the loss of this run depends on none of its "
                f"parameters ({own[0]}, ...), so they stay as they are. Leave the entry out, or match some that are "
                f"trained: {trained[0]} ... {trained[-1]}."
            )


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    learning_rate: float | None = None,
    groups: Sequence[ParameterGroup] = (),
    max_steps: int | None = None,
) -> list[dict[str, Any]]:
    """Groups for an optimizer: matrices and embeddings decay; vectors (biases and norms) do not.

    Args:
        model: parameters that need no gradient are left out; so are, from here on, those that are frozen for the whole
            run.
        weight_decay: of the matrices.
        learning_rate: peak of the parameters that no group matches, and of groups without their own.
        groups: of the recipe.
        max_steps: updates of the run.

    Returns:
        The unmatched parameters first, then group by group; `frozen_steps` says what `drop_frozen` looks at.
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
    """Drop the gradients of groups that are frozen at this step.

    Without a gradient a parameter counts neither in the norm nor in AdamW's moments, and does not decay: it stays as it
    is, to the bit.

    Args:
        optimizer: with groups from `parameter_groups`.
        step: updates done so far.
    """
    for group in optimizer.param_groups:
        if step < group.get("frozen_steps", 0):
            for parameter in group["params"]:
                parameter.grad = None
