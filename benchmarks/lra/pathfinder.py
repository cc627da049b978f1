"""Pathfinder32: do two discs lie on one path? Images generated to the specification of Long Range Arena.

The task is Linsley et al.'s (2018, arXiv 1805.08315); the sizes are those of the benchmark's hard split. An image shows
two contours, dashed curves of 14 paddles, and up to five distractors of 4 paddles. One disc marks the beginning of a
contour, the other the end of the same contour (label 1) or of the other one (label 0).

A contour grows paddle by paddle. The pivot lies `margin` beyond the head of the last paddle. The next head is a
pixel at the distance `paddle_length + margin` from the pivot, drawn with the weight cos^2(continuity * turn), or 0
beyond a right angle, and the paddle reaches back from it. No paddle comes within the margins of earlier ones,
except of the one that it continues. The first paddle of one contour lies in the middle of the image, that of the
other begins `seed_distance` from it. Where a contour cannot go on, the image is begun anew. As in the published
images, the contours are darker than the distractors, and all of them are drawn so thin that the discs stand out.

In one respect this is stricter than the published generator, which does not compare the paddles that the two
contours place at the same time: there they may touch, here they may not, so that the label is always right.
"""

import math
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

_EDGE = 8  # pixels around the image in which no paddle may lie, so that none needs a check against the border
_TOLERANCE = 1e-9


class Paddle(NamedTuple):
    """A stroke from a pixel, `paddle_length` pixels in a direction (radians, from right to down).

    The pixel of a contour's first paddle is its tail, and that of the others is the head.
    """

    y: int
    x: int
    direction: float


Snake = list[Paddle]


class Scene(NamedTuple):
    """What an image shows.

    Attributes:
        contours: the two long paths, from beginning to end.
        distractors: the short ones.
        discs: (y, x) of the two discs.
        label: whether the discs lie on the same contour.
    """

    contours: tuple[Snake, Snake]
    distractors: list[Snake]
    discs: tuple[tuple[int, int], tuple[int, int]]
    label: int


@dataclass(frozen=True)
class Pathfinder:
    """The published parameters (lengths in pixels).

    Args:
        size: of the square image.
        paddle_length: from tail to head.
        paddle_thickness: of a stroke.
        margin: between paddles of different paths, and half the gap between those of one path.
        padding: width of the border in which no paddle lies.
        contour_length: paddles of a contour.
        distractor_length: paddles of a distractor.
        distractors: their number; one for which five attempts find no room is left out.
        continuity: the higher, the straighter.
        seed_distance: between the beginnings of the contours.
        marker_radius: of the discs.
        paddle_contrast: of the contours, relative to the distractors.
        snake_contrast: of contours and distractors, relative to the discs.
        antialias: the picture is drawn so many times larger, and scaled down.
    """

    size: int = 32
    paddle_length: int = 2
    paddle_thickness: float = 0.5
    margin: int = 1
    padding: int = 1
    contour_length: int = 14
    distractor_length: int = 4
    distractors: int = 5
    continuity: float = 1.0
    seed_distance: int = 7
    marker_radius: float = 1.5
    paddle_contrast: float = 0.75
    snake_contrast: float = 2.0
    antialias: int = 2

    def draw(self, generator: np.random.Generator) -> Iterator[tuple[np.ndarray, int]]:
        """Draw images without end: grey levels uint8 [size * size], row by row, and the label."""
        while True:
            scene = self.scene(generator)
            yield self.render(scene).ravel(), scene.label

    def scene(self, generator: np.random.Generator) -> Scene:
        """Draw a scene."""
        return self.grower.scene(generator.random)

    @cached_property
    def grower(self) -> "Grower":
        """What grows the paths; it remembers what follows from the parameters."""
        return Grower(self)

    def render(self, scene: Scene) -> np.ndarray:
        """The image of a scene, uint8 [size, size]; its brightest pixel has the value 255."""
        canvas = np.zeros((self.size + 2 * _EDGE,) * 2)
        brightness = self.paddle_contrast * self.snake_contrast, self.snake_contrast
        for snakes, contrast in zip((scene.contours, scene.distractors), brightness, strict=True):
            for paddle in (paddle for snake in snakes for paddle in snake):
                self._stamp(canvas, paddle.y, paddle.x, contrast * self.stroke(paddle.direction))
        for y, x in scene.discs:
            self._stamp(canvas, y, x, self.disc)
        image = canvas[_EDGE:-_EDGE, _EDGE:-_EDGE]
        return np.rint(image * (255 / image.max())).astype(np.uint8)

    def stroke(self, direction: float) -> np.ndarray:
        """The picture of a paddle that begins in the middle, float [odd, odd]."""
        return _stroke(self, direction)

    @cached_property
    def disc(self) -> np.ndarray:
        """The picture of a disc, float [odd, odd]."""
        return _picture(self, 0, 0, self.marker_radius)

    def _stamp(self, canvas: np.ndarray, y: int, x: int, picture: np.ndarray) -> None:
        reach = len(picture) // 2
        top, left = y + _EDGE - reach, x + _EDGE - reach
        place = canvas[top : top + len(picture), left : left + len(picture)]
        np.maximum(place, picture, out=place)


# ---- drawing ----


@lru_cache(1024)
def _stroke(spec: Pathfinder, direction: float) -> np.ndarray:
    end = spec.paddle_length * math.sin(direction), spec.paddle_length * math.cos(direction)
    return _picture(spec, *end, spec.paddle_thickness / 2)


def _picture(spec: Pathfinder, end_y: float, end_x: float, radius: float) -> np.ndarray:
    """All points within a radius of the line from the middle to a point: drawn larger, then scaled down (Lanczos)."""
    reach = math.ceil(math.hypot(end_y, end_x) + radius) + 1
    fine = np.arange(-reach * spec.antialias, reach * spec.antialias + 1) / spec.antialias
    drawn = _distance(fine[:, None], fine[None], end_y, end_x) <= radius + _TOLERANCE
    offset = np.arange(-reach, reach + 1)[:, None] - fine
    weights = np.where(np.abs(offset) < 3, np.sinc(offset) * np.sinc(offset / 3), 0)
    weights /= weights.sum(1, keepdims=True)
    return np.clip(weights @ drawn @ weights.T, 0, 1)


def _distance(y: np.ndarray, x: np.ndarray, end_y: float, end_x: float) -> np.ndarray:
    """The distance of points from the line between (0, 0) and an end."""
    length = end_y**2 + end_x**2
    along = np.clip((y * end_y + x * end_x) / length, 0, 1) if length else 0.0
    return np.hypot(y - along * end_y, x - along * end_x)


# ---- growing ----
# A set of pixels is an integer with a bit for each: sets move by shifts and meet in `&`, faster than arrays do.
# The set of what lies around a pixel has its bit 0 `_reach` rows above and `_reach` columns before it.

_DRAWS = 3  # of a paddle, before its path is given up
_ATTEMPTS = 5  # at a distractor
Uniform = Callable[[], float]  # draws numbers from 0 to 1


class _Step(NamedTuple):
    """A way to continue a path from a pivot.

    Attributes:
        weight: how often it is taken.
        around_head: pixels within the margin of the head; all must be free.
        area: pixels within the margin of the paddle.
        dy, dx: the head.
        direction: of the way to it.
    """

    weight: float
    around_head: int
    area: int
    dy: int
    dx: int
    direction: float


class _Tip(NamedTuple):
    """The growing end of a path.

    Attributes:
        y, x: pivot of the last paddle, `margin` before its tail.
        direction: of the last paddle, from tail to head.
        area: its pixels with the margin; only the paddle that continues it may come close.
    """

    y: int
    x: int
    direction: float
    area: int


class Grower:
    """Grows the paths of images of one kind."""

    def __init__(self, spec: Pathfinder) -> None:
        self.spec, self._stride = spec, spec.size + 2 * _EDGE
        self._step = spec.paddle_length + spec.margin
        self._reach = self._step + spec.margin
        inside = np.zeros((self._stride, self._stride), bool)
        inside[(slice(_EDGE + spec.padding, _EDGE + spec.size - spec.padding),) * 2] = True
        self._inside = sum(1 << bit for bit in np.flatnonzero(inside).tolist())
        self._border = ~self._inside & ((1 << self._stride**2) - 1)
        self._areas: dict[float, int] = {}
        self._steps: dict[float, list[_Step]] = {}

    def scene(self, uniform: Uniform) -> Scene:
        """Draw a scene."""
        while not (grown := self._contours(uniform)):
            pass
        contours, taken = grown
        distractors = []
        for _ in range(self.spec.distractors):
            for _ in range(_ATTEMPTS):
                if grown := self._distractor(taken, uniform):
                    distractors.append(grown[0])
                    taken = grown[1]
                    break
        label, first = int(uniform() < 0.5), int(uniform() < 0.5)
        begin, end = contours[first][0], contours[first if label else 1 - first][-1]
        return Scene(contours, distractors, ((begin.y, begin.x), (end.y, end.x)), label)

    def _contours(self, uniform: Uniform) -> tuple[tuple[Snake, Snake], int] | None:
        """Two contours and the pixels that they take, or `None` if one cannot go on."""
        spec, taken = self.spec, self._border
        middle = range(2 * spec.seed_distance, spec.size - 2 * spec.seed_distance)
        while True:
            first = Paddle(*(middle[int(uniform() * len(middle))] for _ in "yx"), _any_direction(uniform))
            if all(place in middle for place in _ahead(first, spec.paddle_length)):
                break
        second = Paddle(*_ahead(first._replace(direction=_any_direction(uniform)), spec.seed_distance), 0)
        second = second._replace(direction=_any_direction(uniform))
        snakes, tips = ([first], [second]), [self._tip(first), self._tip(second)]
        if tips[1].area & (tips[0].area | taken):
            return None
        for _ in range(spec.contour_length - 1):
            for index, snake in enumerate(snakes):
                grown = self._grow(tips[index], taken | tips[1 - index].area, uniform)
                if not grown:
                    return None
                taken |= tips[index].area
                snake.append(grown[0])
                tips[index] = grown[1]
        return snakes, taken | tips[0].area | tips[1].area

    def _distractor(self, taken: int, uniform: Uniform) -> tuple[Snake, int] | None:
        """A distractor, and the pixels taken with it; or `None` if it cannot go on."""
        direction, blocked = _any_direction(uniform), 0
        for bit in _bits(self._area_of(direction)):
            blocked |= (taken << self._reach * (self._stride + 1)) >> bit
        free = self._inside & ~blocked
        if not free:
            return None
        place = 0
        while not free >> place & 1:
            place = int(uniform() * self._stride**2)
        seed = Paddle(place // self._stride - _EDGE, place % self._stride - _EDGE, direction)
        snake, tip = [seed], self._tip(seed)
        for _ in range(self.spec.distractor_length - 1):
            if not (grown := self._grow(tip, taken, uniform)):
                return None
            taken |= tip.area
            snake.append(grown[0])
            tip = grown[1]
        return snake, taken | tip.area

    def _grow(self, tip: _Tip, taken: int, uniform: Uniform) -> tuple[Paddle, _Tip] | None:
        """The next paddle of a path, or `None` if there is no room."""
        y, x = _ahead(tip, self._step + self.spec.margin)
        shift = self._shift(y, x)
        near, total, sums, steps = taken >> shift, 0.0, [], []
        for step in self._steps_after(tip.direction):
            if not step.around_head & near:
                total += step.weight
                sums.append(total)
                steps.append(step)
        if total < 1e-4:
            return None
        for _ in range(_DRAWS):
            step = steps[bisect(sums, uniform() * total)]
            if not step.area & near:
                paddle = Paddle(y + step.dy, x + step.dx, math.atan2(-step.dy, -step.dx))
                return paddle, _Tip(y, x, step.direction, step.area << shift)
        return None

    def _tip(self, seed: Paddle) -> _Tip:
        """The end of a path that has a first paddle only."""
        area = self._area_of(seed.direction) << self._shift(seed.y, seed.x)
        return _Tip(*_ahead(seed, -self.spec.margin), seed.direction, area)

    def _shift(self, y: int, x: int) -> int:
        """Moves the set of what lies around a pixel to its place in the image."""
        return (y + _EDGE - self._reach) * self._stride + x + _EDGE - self._reach

    def _area_of(self, direction: float) -> int:
        """The pixels within the margin of a paddle in a direction, around its pixel."""
        if direction not in self._areas:
            self._areas[direction] = self._near(0, 0, direction, self.spec.paddle_length)
        return self._areas[direction]

    def _steps_after(self, direction: float) -> list[_Step]:
        """The possible steps after a paddle in a direction."""
        if direction not in self._steps:
            span, steps = range(-self._step, self._step + 1), []
            for dy, dx in ((dy, dx) for dy in span for dx in span if abs(math.hypot(dy, dx) - self._step) < 0.5):
                forward, back = math.atan2(dy, dx), math.atan2(-dy, -dx)
                turn = abs(math.remainder(forward - direction, math.tau)) * self.spec.continuity
                if turn < math.pi / 2:
                    head = self._near(dy, dx, back, 0)
                    area = self._near(dy, dx, back, self.spec.paddle_length)
                    steps.append(_Step(math.cos(turn) ** 2, head, area, dy, dx, forward))
            self._steps[direction] = steps
        return self._steps[direction]

    def _near(self, dy: int, dx: int, direction: float, length: int) -> int:
        """The pixels within the margin of a line that begins (dy, dx) from a pixel."""
        span = np.arange(-self._reach, self._reach + 1)
        end = length * math.sin(direction), length * math.cos(direction)
        near = _distance(span[:, None] - dy, span - dx, *end) <= self.spec.margin + _TOLERANCE
        return sum(1 << y * self._stride + x for y, x in np.argwhere(near).tolist())


def _ahead(place: Paddle | _Tip, distance: int) -> tuple[int, int]:
    """The pixel at a distance in the direction of a paddle or tip."""
    return (
        round(place.y + distance * math.sin(place.direction)),
        round(place.x + distance * math.cos(place.direction)),
    )


def _any_direction(uniform: Uniform) -> float:
    """A whole number of degrees, as in the published generator."""
    return math.radians(int(uniform() * 360) - 180)


def _bits(number: int) -> Iterator[int]:
    while number:
        last = number & -number
        yield last.bit_length() - 1
        number ^= last
