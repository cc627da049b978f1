"""The keys of the recipes of `convert.py`."""

import dataclasses
import itertools
import math
from typing import Any, ClassVar, NamedTuple

from common.options import did_you_mean
from common.sections import read_section
from engine.recipe import Recipe

from luna_hf import FAMILIES
from luna_hf.scripting import UserError

# Parts of the loss, see `objective.py`.
OBJECTIVES = ("attention", "hidden", "pooled", "spans", "mlm", "kl")
# Those that rows beyond the teacher's reach have; all rows but these have the others.
LONG_OBJECTIVES = ("pooled", "spans", "mlm")


class Lengths(NamedTuple):
    """Rows of `low` to `high` tokens, the logarithm drawn evenly, and their share of a stage's passes."""

    low: int
    high: int
    share: float


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of a run, with its own loss, lengths and schedule.

    Attributes:
        name: for the log.
        share: of the run's updates.
        lengths: of its rows.
        weights: objective -> its weight in the loss.
        learning_rate: peak rate of the source's parameters; by default the recipe's. With 0 they do not change.
        new_learning_rate: of the parameters that the source lacks.
        first, last: its updates, `range(first, last)`, which `ConvertRecipe.plan` sets.

    Raises:
        UserError: An invalid value.
    """

    name: str
    share: float
    lengths: list[Any]
    weights: dict[str, Any]
    learning_rate: float
    new_learning_rate: float
    first: int = 0
    last: int = 0

    def __post_init__(self) -> None:
        where = f"`stages`, {self.name}: "
        if not self.weights or not all(map(_is_positive, self.weights.values())):
            raise UserError(f"{where}`weights` must be a section of objectives and numbers above 0.")
        for name in self.weights:
            if name not in OBJECTIVES:
                raise UserError(f"{where}unknown objective `{name}`.{did_you_mean(name, OBJECTIVES)}")
        try:
            lengths = [Lengths(*entry) for entry in self.lengths]
            right = lengths and all(4 <= low <= high and _is_positive(share) for low, high, share in lengths)
        except TypeError:
            right = False
        if not right:
            raise UserError(
                f"{where}`lengths` must be a list of [shortest, longest, share of the tokens], for example "
                "[[16, 512, 1]]."
            )
        object.__setattr__(self, "lengths", lengths)

    def factor(self, step: int, warmup_fraction: float) -> float:
        """The share of the peak rate at an update: linear warm-up and linear decay within the stage."""
        own, steps = step - self.first, self.last - self.first
        warmup = round(warmup_fraction * steps)
        return (own + 1) / (warmup + 1) if own < warmup else (steps - own) / (steps - warmup)


@dataclasses.dataclass(frozen=True)
class ConvertRecipe(Recipe):
    """The keys of the recipes of `convert.py`.

    Raises:
        UserError: A value is out of range, or two values contradict each other.
    """

    # source
    teacher: str
    allow_pickle: bool
    language: str
    # text
    data: str | list[Any]
    sentences: str | list[Any]
    sentence_share: float
    text_column: str
    validation: str
    held_out_fraction: float
    cache_dir: str
    mask_probability: float
    # optimisation
    global_batch_tokens: int
    pass_tokens: int
    freeze_embeddings: bool
    warmup_fraction: float
    teacher_longest: int
    teacher_windows: list[Any]
    stages: list[Any]
    # reporting
    eval_tokens: int

    free_to_change: ClassVar[frozenset[str]] = Recipe.free_to_change | {"language", "cache_dir", "save_steps"}
    # What the readers of text ask for beside the keys above.
    streaming: ClassVar[bool] = False
    eval_blocks: ClassVar[int] = 1
    block_size: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(("teacher",), bool, "the folder or Hub name of the encoder to convert")
        self.require(("data",), bool, "files, a folder, a name on the Hub, or a list of these")
        family = self.model.get("model_type")
        self.require(("model",), lambda _: family in FAMILIES, f"a section with `model_type`: {', '.join(FAMILIES)}")
        if self.sentence_share:
            self.require(("sentences",), bool, "named if `sentence_share` is above 0")
        self.require(("teacher_longest",), lambda value: value >= 8, "at least 8, for example 256")
        self.require(("teacher_windows",), _are_sizes, "a list of sizes of at least 8 tokens, for example [64, 128]")
        multiple = f"a multiple of `pass_tokens` ({self.pass_tokens})"
        self.require(("global_batch_tokens",), lambda v: v >= 1 and v % self.pass_tokens == 0, multiple)
        for stage in self.plan():
            self._check_objectives(stage)

    def _check_objectives(self, stage: Stage) -> None:
        """Refuse weights under which some rows have no loss, or that would be ignored."""
        own, where = set(stage.weights), f"`stages`, {stage.name}: "
        if "attention" in own and len(own) > 1:
            raise UserError(f"{where}`attention` must be the only objective of its stage. Give the others a stage.")
        if own == {"spans"}:
            raise UserError(f"{where}rows of at most {self.teacher_longest} tokens have no `spans`. Add `pooled`.")
        longest = max(lengths.high for lengths in stage.lengths)
        if longest > self.teacher_longest and not own & {"attention", *LONG_OBJECTIVES}:
            raise UserError(
                f"{where}rows of over {self.teacher_longest} tokens (`teacher_longest`) have no {' or '.join(own)}. "
                "Add `pooled` or `spans`, or lower `lengths`."
            )

    @property
    def continues(self) -> bool:
        """Whether the run starts from a trained model."""
        return True

    def plan(self) -> list[Stage]:
        """The stages, with the updates of each.

        Raises:
            UserError: A stage has an unknown key or a wrong value, or the shares do not add up to 1.
        """
        self.require(("stages",), bool, "a list of stages, see training/recipes/convert/tiny.yaml")
        default = {"learning_rate": self.learning_rate}
        entries = [default | stage if isinstance(stage, dict) else stage for stage in self.stages]
        read = [read_section(Stage, entry, "`stages`") for entry in entries]
        shares = [stage.share for stage in read]
        if abs(sum(shares) - 1) > 1e-6:
            raise UserError(f"`stages`: the sum of each `share` must be 1, but is {sum(shares):g}.")
        ends = [round(total * self.max_steps) for total in itertools.accumulate(shares, initial=0.0)]
        pairs = zip(read, itertools.pairwise(ends), strict=True)
        return [dataclasses.replace(stage, first=first, last=last) for stage, (first, last) in pairs]

    @property
    def longest(self) -> int:
        """The longest row of any stage, in tokens."""
        return max(lengths.high for stage in self.plan() for lengths in stage.lengths)


def stage_at(stages: list[Stage], step: int) -> Stage:
    """The stage of an update; after the last update, the last stage."""
    return next((stage for stage in stages if stage.first <= step < stage.last), stages[-1])


def _are_sizes(value: list[Any]) -> bool:
    """Whether a key lists sizes of windows."""
    return bool(value) and all(isinstance(size, int) and size >= 8 for size in value)


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf
