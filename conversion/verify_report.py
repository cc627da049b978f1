"""What `verify.py` reports: differences by layer and stream, and a table of them."""

import dataclasses
import math
from dataclasses import dataclass

from torch import Tensor

TOLERANCE = 1e-5
# In float64, where a right model differs by its last digits only; times the largest number where that is above 1.
EXACT = 1e-9


@dataclass(frozen=True)
class Row:
    """One comparison: the states of one stream after one layer, over all rows of ids.

    Args:
        layer: `"embedding"`, `"layer 1"`, ..., `"last"`, `"logits"` or a head's name.
        stream: `"tokens"`, `"packed"`, or `""` for logits.
        difference: the largest one with the model in float32, as it is and not relative to anything.
        magnitude: the largest number of the original there.
        limit: what is allowed in float32.
        exact: the largest difference with the model in float64, where that was measured. It then decides.
    """

    layer: str
    stream: str
    difference: float
    magnitude: float = 1.0
    limit: float = TOLERANCE
    exact: float | None = None

    @property
    def name(self) -> str:
        """Layer and stream."""
        return f"{self.layer}, {self.stream}" if self.stream else self.layer

    @property
    def exact_limit(self) -> float:
        """What is allowed in float64."""
        return EXACT * max(1.0, self.magnitude)

    @property
    def within(self) -> bool:
        """Whether the difference in float32 is not above the limit; never where it is no number, or infinite."""
        return math.isfinite(self.difference) and self.difference <= self.limit

    @property
    def ok(self) -> bool:
        """Whether the two are equal here: in float64 where that was measured, else in float32."""
        if self.exact is None or not math.isfinite(self.difference):
            return self.within
        return self.exact <= self.exact_limit


@dataclass(frozen=True)
class Report:
    """All comparisons of a model with its original.

    Args:
        rows: one for every layer and stream, and one for the head, in the order of the computation.
        problems: what is wrong before any number is compared; then there are no rows.
        inputs: what was put through both, for example "4 rows of 1, 64, 128 and 160 tokens".
        precision: of both sides.
        relative: whether the limits grow with the numbers.
    """

    rows: list[Row]
    problems: list[str]
    inputs: str = ""
    precision: str = ""
    relative: bool = False

    @property
    def ok(self) -> bool:
        """Whether everything was compared and is equal, but for what float64 proves to be the rounding of float32."""
        return bool(self.rows) and not self.problems and all(row.ok for row in self.rows)

    @property
    def largest(self) -> float:
        """The largest difference in float32; NaN if any is."""
        return largest([row.difference for row in self.rows])

    @property
    def exact(self) -> float | None:
        """The largest difference in float64; `None` if that was not measured."""
        measured = [row.exact for row in self.rows if row.exact is not None]
        return largest(measured) if measured else None

    @property
    def rounding(self) -> bool:
        """Whether the two are equal, and float32 is above its limit somewhere."""
        return self.ok and not all(row.within for row in self.rows)

    def with_exact(self, exact: list[Row]) -> "Report":
        """The same with the differences of a second run, in which the model is in float64."""
        differences = {row.name: row.difference for row in exact}
        rows = [dataclasses.replace(row, exact=differences[row.name]) for row in self.rows]
        return dataclasses.replace(self, rows=rows)

    def summary(self) -> str:
        """One sentence or two."""
        if self.problems:
            return f"Not equal to the original: {'; '.join(self.problems)}."
        if not self.ok:
            return f"Not equal to the original: first at {self._first()}."
        equal = f"Equal to the original on {self.inputs}: "
        if self.rounding:
            return equal + self._rounding()
        if self.relative:
            near = max(self.rows, key=lambda row: row.difference / row.limit)
            return (
                f"{equal}no difference is above its limit. The nearest to it is {near.name}: {near.difference:.1e}, "
                f"where {near.limit:.1e} is allowed for numbers of up to {near.magnitude:.3g}."
            )
        return f"{equal}largest difference {self.largest:.1e}, where {TOLERANCE:.0e} is allowed."

    def _first(self) -> str:
        row = next(row for row in self.rows if not row.ok)
        allowed = f"{row.limit:.1e}" if self.relative else f"{row.limit:.0e}"
        told = f"{row.name}, where the difference is {row.difference:.1e} and {allowed} is allowed"
        if self.relative:
            return f"{told} (a file of outputs cannot tell rounding, which sharp attention enlarges; a checkpoint can)"
        return told if row.exact is None else f"{told}; it is not rounding, for in float64 it is {row.exact:.1e}"

    def _rounding(self) -> str:
        above = [row for row in self.rows if not row.within]
        order = list(dict.fromkeys(row.layer for row in self.rows))
        where = ranges([order.index(name) for name in dict.fromkeys(row.layer for row in above)], order)
        near = max(self.rows, key=lambda row: row.exact / row.exact_limit)
        return (
            f"in float64 no difference is above its limit; the nearest to it is {near.name}, {near.exact:.1e}, where "
            f"{near.exact_limit:.0e} is allowed. In float32 the largest is "
            f"{self.largest:.1e}: what is above {TOLERANCE:.0e} ({where}, with numbers of up to "
            f"{largest([row.magnitude for row in above]):.3g}) is its rounding."
        )

    def lines(self) -> list[str]:
        """The table, one line for every layer, and the summary."""
        if not self.rows:
            return [self.summary()]
        about = [f"Inputs: {self.inputs}", f"Types: {self.precision}"]
        beside: tuple[str, ...] = ()  # what stands behind each difference
        if self.exact is not None:
            beside = ("float64", "numbers")
            about.append("Columns: difference in float32, the same in float64, largest number of the original")
        elif self.relative:
            beside = ("limit",)
        width = max(len(row.layer) for row in self.rows)
        header = "".join(f"  {name:>8}" for stream in ("tokens", "packed") for name in (stream, *beside))
        lines = [*about, "", f"{'':{width}}{header}"]
        for layer in dict.fromkeys(row.layer for row in self.rows):
            here = [row for row in self.rows if row.layer == layer]
            cells = "".join(f"  {cell:>8}" for row in here for cell in self._cells(row))
            lines.append(f"{layer:{width}}{cells}{self._mark(here)}")
        return [*lines, "", self.summary()]

    def _cells(self, row: Row) -> list[str]:
        cells = [f"{row.difference:.1e}"]
        if row.exact is not None:
            return [*cells, f"{row.exact:.1e}", f"{row.magnitude:.3g}"]
        return [*cells, f"{row.limit:.1e}"] if self.relative else cells

    def _mark(self, here: list[Row]) -> str:
        if not all(row.ok for row in here):
            return "  not equal"
        return "" if all(row.within for row in here) else "  rounding"


def largest(numbers: list[float]) -> float:
    """The maximum; NaN if any number is, 0 if there are none."""
    return math.nan if any(map(math.isnan, numbers)) else max(numbers, default=0.0)


def ranges(places: list[int], names: list[str]) -> str:
    """Names at ascending places, three and more neighbours as `first to last`."""
    runs: list[list[int]] = []
    for place in places:
        if runs and place == runs[-1][-1] + 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    parts = [
        f"{names[run[0]]} to {names[run[-1]]}" if len(run) > 2 else ", ".join(names[place] for place in run)
        for run in runs
    ]
    return ", ".join(parts)


class Mismatch(Exception):
    """The two models give states of different shapes."""


class Comparison:
    """Collects differences by layer and stream.

    Args:
        relative: whether the limit is `TOLERANCE` times the largest number of a layer where that is above 1.
    """

    def __init__(self, relative: bool = False) -> None:
        self.relative = relative
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
        rows = []
        for key, differences in self.differences.items():
            magnitude = largest(self.magnitudes[key])
            limit = TOLERANCE * max(1.0, magnitude) if self.relative else TOLERANCE
            rows.append(Row(*key, largest(differences), magnitude, limit))
        return rows


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
