"""What `verify.py` reports: differences by layer and stream, and a table of them."""

import math
from dataclasses import dataclass

from torch import Tensor

TOLERANCE = 1e-5
# In float64, where a right model differs by its last digits only.
EXACT = 1e-9


@dataclass(frozen=True)
class Row:
    """One comparison: the states of one stream after one layer, over all rows of ids."""

    layer: str  # "embedding", "layer 1", ..., "last", "logits" or a head's name
    stream: str  # "tokens", "packed", or "" for logits
    difference: float
    tolerance: float = TOLERANCE

    @property
    def name(self) -> str:
        """Layer and stream."""
        return f"{self.layer}, {self.stream}" if self.stream else self.layer

    @property
    def ok(self) -> bool:
        """Whether the difference is a number, and not above the tolerance."""
        return self.difference <= self.tolerance


@dataclass(frozen=True)
class Report:
    """All comparisons of a model with its original.

    Args:
        rows: one for every layer and stream, and one for the head, in the order of the computation.
        problems: what kept the two from being compared; then there are no rows.
        inputs: what was put through both, for example "4 rows of 1, 64, 128 and 160 tokens".
        precision: of both sides.
        exact: the largest difference with the model in float64, measured where float32 is above the tolerance.
    """

    rows: list[Row]
    problems: list[str]
    inputs: str = ""
    precision: str = ""
    exact: float | None = None

    @property
    def ok(self) -> bool:
        """Whether everything could be compared and is equal to the tolerance."""
        return bool(self.rows) and not self.problems and all(row.ok for row in self.rows)

    @property
    def largest(self) -> float:
        """The largest difference; NaN if any is."""
        return largest([row.difference for row in self.rows])

    @property
    def rounding(self) -> bool:
        """Whether the two are the same function, and what is above the tolerance is the rounding of float32."""
        return not self.problems and self.exact is not None and self.exact <= EXACT

    def summary(self) -> str:
        """One sentence."""
        if self.problems:
            return f"Not equal to the original: {'; '.join(self.problems)}."
        if self.ok:
            return (
                f"Equal to the original on {self.inputs}: largest difference {self.largest:.1e}, where {TOLERANCE:.0e} "
                "is allowed."
            )
        first = next(row for row in self.rows if not row.ok)
        return (
            f"Not equal to the original: first at {first.name}, where the difference is {first.difference:.1e} and "
            f"{TOLERANCE:.0e} is allowed."
            + (f" It is rounding: in float64 the largest difference is {self.exact:.1e}." if self.rounding else "")
        )

    def lines(self) -> list[str]:
        """The table, one line for every layer, and the summary."""
        if not self.rows:
            return [self.summary()]
        width = max(len(row.layer) for row in self.rows)
        lines = [f"Inputs: {self.inputs}", f"Types: {self.precision}", "", f"{'':{width}}    tokens    packed"]
        for layer in dict.fromkeys(row.layer for row in self.rows):
            here = [row for row in self.rows if row.layer == layer]
            cells = "  ".join(f"{row.difference:8.1e}" for row in here)
            lines.append(f"{layer:{width}}  {cells}" + ("" if all(row.ok for row in here) else "  not equal"))
        return [*lines, "", self.summary()]


def largest(numbers: list[float]) -> float:
    """The maximum; NaN if any number is, 0 if there are none."""
    return math.nan if any(map(math.isnan, numbers)) else max(numbers, default=0.0)


class Mismatch(Exception):
    """The two models give states of different shapes."""


class Comparison:
    """Collects differences by layer and stream."""

    def __init__(self) -> None:
        self.differences: dict[tuple[str, str], list[float]] = {}
        self.magnitudes: dict[tuple[str, str], list[float]] = {}

    def add(self, layer: str, stream: str, ours: Tensor, theirs: Tensor, where: Tensor | None = None) -> None:
        """Compare two tensors of one shape, or the part of them that a boolean mask `where` chooses.

        Raises:
            Mismatch: They have different shapes.
        """
        if ours.shape != theirs.shape:
            what = f"{layer}, {stream}" if stream else layer
            raise Mismatch(f"{what}: the model gives {tuple(ours.shape)}, the original {tuple(theirs.shape)}")
        ours, theirs = ours.double(), theirs.double()
        if where is not None:
            ours, theirs = ours[where], theirs[where]
        self.differences.setdefault((layer, stream), []).append((ours - theirs).abs().max().item())
        self.magnitudes.setdefault((layer, stream), []).append(theirs.abs().max().item())

    def rows(self) -> list[Row]:
        """A row for every layer and stream that was added."""
        return [
            Row(*key, difference=largest(differences) / max(1.0, largest(self.magnitudes[key])))
            for key, differences in self.differences.items()
        ]


def layer_name(i: int) -> str:
    """What the i-th hidden state is called."""
    return f"layer {i}" if i else "embedding"


def counted(number: int, word: str, plural: str = "s") -> str:
    """`1 row`, `2 rows`."""
    return f"{number} {word}{'' if number == 1 else plural}"


def listed(numbers: list[int]) -> str:
    """`1`, `1 and 2`, `1, 2 and 3`."""
    *front, last = map(str, numbers)
    return f"{', '.join(front)} and {last}" if front else last
