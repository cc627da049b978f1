"""A picture of generated Pathfinder images, to be looked at.

    PYTHONPATH=benchmarks python -m lra.gallery docs/images/pathfinder.png

Below every image, the same one with the path of the first disc in orange and the other contour in blue.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lra.pathfinder import Pathfinder, Scene, Snake

COLUMNS = 6


def draw_gallery(path: Path, seed: int = 0) -> list[Scene]:
    """Write the picture: a pair of rows for each label. Returns what it shows, row by row."""
    from matplotlib.figure import Figure

    spec, generator = Pathfinder(), np.random.default_rng(seed)
    by_label: dict[int, list[Scene]] = {1: [], 0: []}
    while min(map(len, by_label.values())) < COLUMNS:
        scene = spec.scene(generator)
        by_label[scene.label].append(scene)
    shown = [scene for scenes in by_label.values() for scene in scenes[:COLUMNS]]
    figure = Figure(figsize=(2 * COLUMNS, 8.6))
    axes = figure.subplots(4, COLUMNS)
    figure.subplots_adjust(0.005, 0.005, 0.995, 0.97, 0.03, 0.12)
    for index, scene in enumerate(shown):
        row, column = divmod(index, COLUMNS)
        for axis in axes[2 * row : 2 * row + 2, column]:
            axis.imshow(spec.render(scene), cmap="gray", vmin=0, vmax=255)
            axis.set_xticks([])
            axis.set_yticks([])
        axes[2 * row, column].set_title(f"label {scene.label}", fontsize=10)
        _trace(axes[2 * row + 1, column], scene, spec.paddle_length)
    # Without the library's version in its metadata the file depends on the images only.
    figure.savefig(path, dpi=100, metadata={"Software": None})
    return shown


def strokes(snake: Snake, length: int) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """The paddles of a path as (y, x) of both ends, the one that comes first on the path before the other."""
    ends = []
    for index, (y, x, direction) in enumerate(snake):
        pair = (y, x), (y + length * math.sin(direction), x + length * math.cos(direction))
        ends.append(pair if index == 0 else pair[::-1])
    return ends


def _trace(axis: Any, scene: Scene, length: int) -> None:
    first = next(snake for snake in scene.contours if (snake[0].y, snake[0].x) == scene.discs[0])
    for snake in scene.contours:
        points = [point for ends in strokes(snake, length) for point in ends]
        ys, xs = zip(*points, strict=True)
        axis.plot(xs, ys, color="tab:orange" if snake is first else "tab:blue", linewidth=1)
    ys, xs = zip(*scene.discs, strict=True)
    axis.plot(xs, ys, "o", color="white", markersize=5)


def main(arguments: Sequence[str]) -> None:
    """Command line: the file to write."""
    draw_gallery(Path(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
