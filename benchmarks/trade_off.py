"""Quality against cost in one number: relative composite performance (Agostinelli et al. 2024, section 4.1).

RCP compares an attention mechanism with softmax attention, its yardstick: how many times as fast it is, divided by what
it loses in accuracy, in standard deviations of the systems of a benchmark. Softmax attention itself has 1.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class System(NamedTuple):
    """An attention mechanism in a benchmark."""

    name: str
    accuracy: float  # mean over the tasks, in per cent
    throughput: float  # in any unit, the same for all systems
    memory: float = 1.0  # peak memory in any unit, the same for all systems


def deviation(systems: Sequence[System]) -> float:
    """Standard deviation of the systems' accuracies, the yardstick included, as a sample (n - 1).

    Raises:
        statistics.StatisticsError: There are fewer than two systems.
    """
    return statistics.stdev(system.accuracy for system in systems)


def relative_performance(system: System, softmax: System, spread: float, memory: bool = False) -> float:
    """RCP (equation 11), or with `memory` RCP_mem (equation 12), which rewards speed and memory by half each.

    Its value is infinite for a system more accurate than softmax attention by `spread` or more, which would have to be
    divided by zero or less.

    Args:
        system: the system to judge.
        softmax: softmax attention in the same benchmark.
        spread: see `deviation`.
        memory: whether memory counts.
    """
    reward = system.throughput / softmax.throughput
    if memory:
        reward = (reward + softmax.memory / system.memory) / 2
    penalty = 1 + (softmax.accuracy - system.accuracy) / spread
    return reward / penalty if penalty > 0 else float("inf")


def plot_trade_off(systems: Sequence[System], softmax: System, path: Path, memory: bool = False) -> None:
    """Write a PNG with accuracy against reward (times as fast, or also as small), and curves of equal RCP."""
    import numpy as np
    from matplotlib.figure import Figure

    spread = deviation([softmax, *systems])
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axis = figure.subplots()
    for number, system in enumerate((softmax, *systems)):
        reward = relative_performance(system._replace(accuracy=softmax.accuracy), softmax, spread, memory)
        color = "black" if system is softmax else f"C{number - 1}"
        label = f"{system.name}: {relative_performance(system, softmax, spread, memory):.2f}"
        marker = "s" if system is softmax else "o"
        axis.plot(reward, system.accuracy, marker, color=color, label=label)
    (left, right), (low, high) = axis.get_xlim(), axis.get_ylim()
    rewards = np.linspace(max(left, 0.01), right + 0.2 * (right - left), 200)
    for level in (1, 2, 3, 4, 6, 8, 12):
        heights = softmax.accuracy - spread * (rewards / level - 1)
        axis.plot(rewards, heights, color="0.8", linewidth=1, zorder=0)
        inside = np.flatnonzero((heights > low) & (heights < high))
        if inside.size:
            axis.annotate(str(level), (rewards[inside[-1]], heights[inside[-1]]), color="0.6", fontsize=8)
    axis.set_xlim(left, rewards[-1])
    axis.set_ylim(low, high)
    axis.set_xlabel("times as fast as softmax" + (" and as small, mean" if memory else ""))
    axis.set_ylabel("accuracy (%)")
    title = f"{'RCP_mem' if memory else 'RCP'} (grey: equal)"
    axis.legend(title=title, frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, metadata={"Software": None})
