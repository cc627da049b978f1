"""Recall across segments: pairs in an early segment of a document, asked for in a later one.

    python experiments/segments.py run
    python experiments/segments.py report

A Luna encoder with `segment_length` is trained from scratch on rows of several segments: keys and values stand in the
first, questions in the same or a later one, and fillers between them. `run` trains every system with every number of
pairs and seed on one thread; finished runs are skipped. `report` writes JSON, a table and a plot;
published runs stay unless they have been repeated.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from finetuning import score_cell
from recall.systems import ADDED
from recall.tasks import Task
from recall.training import Recipe, train
from running import KEPT, RESULTS, joined_versions, publish, read_json, run_alone
from study_plots import panels, plain, save
from torch import Tensor

from luna_hf.scripting import Parser, UserError, markdown_table, progress, write_json

SCRIPT = "experiments/segments.py"
SEGMENT = SLOTS = SYMBOLS = 16
ADDED["segments"] = {**ADDED["conv"], "segment_length": SEGMENT}
ADDED["segments-self"] = {**ADDED["segments"], "packed_self_attention": True}
DISTANCES = (0, 1, 2, 4, 8)
# What the model is, and whether the packed states pass from one segment to the next.
SYSTEMS = {
    "self": (f"luna-{SLOTS}+segments-self", True),
    "grown": (f"luna-{SLOTS}+segments-self", True),
    "paper": (f"luna-{SLOTS}+segments", True),
    "none": (f"luna-{SLOTS}+segments-self", False),
}
LABELS = {
    "self": "P passed on, `packed_self_attention`",
    "grown": "P passed on, `packed_self_attention`, distances grow in training",
    "paper": "P passed on, attention of the paper",
    "none": "every segment for itself",
}
PROTOCOL = (
    f"Luna encoders of two layers, width 64, one head and {SLOTS} slots, with a convolution of three tokens; segments "
    f"of {SEGMENT} tokens. A row holds pairs of {SYMBOLS} keys and {SYMBOLS} values in its first segment and asks for "
    "all of them in a later one, or in the same; every batch draws its distance. Where distances grow, training begins "
    "with the same segment, and the next distance is added once the last is answered in 90% of the cases. Accuracy on "
    "256 held-out rows at each distance. Who knows the values of a row, but not their keys, is right in one of as many "
    "cases as there are pairs."
)


@dataclass(frozen=True)
class SegmentedRecall(Task):
    """Recall with pairs in the first segment and questions in a later one.

    Args:
        distances: segments between pairs and questions, of which every batch draws one.
        memory: whether a model sees the whole row; else only the segment with the questions.
    """

    distances: tuple[int, ...] = DISTANCES
    memory: bool = True

    def draw(self, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw ids and labels."""
        distance = self.distances[torch.randint(len(self.distances), (), generator=generator).item()]
        first = distance * SEGMENT
        task = Task(self.name, False, self.items, self.symbols, max(first - 2 * self.items, 0))
        ids, labels = task.draw(rows, generator)
        return (ids, labels) if self.memory else (ids[:, first:], labels[:, first:])

    @property
    def length(self) -> int:
        """The number of positions, which start anew in every segment."""
        return SEGMENT


def growing(task: SegmentedRecall) -> list[tuple[Task, Task]]:
    """Stages of training, each of which adds the next distance and is left once that distance is learned."""
    last = range(1, len(DISTANCES) + 1)
    return [(replace(task, distances=DISTANCES[:n]), replace(task, distances=DISTANCES[n - 1 : n])) for n in last]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("what", choices=("run", "report"), help="step of the study")
    add("--runs", type=Path, default=Path("outputs/segments"), help="folder of the runs (default: %(default)s)")
    add("--results", type=Path, default=RESULTS, help="folder for the JSON file, table and plot of `report`")
    add("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="default: all")
    add("--items", type=int, nargs="+", choices=(1, 2, 4), default=[1, 4], help="pairs (default: 1 4)")
    add("--rate", type=float, default=3e-3, help="learning rate (default: %(default)s)")
    add("--seeds", type=int, nargs="+", default=[0, 1], help="default: 0 1")
    add("--steps", type=int, default=3000, help="largest number of updates (default: %(default)s)")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    """Train every system unless that is done."""
    options.runs.mkdir(parents=True, exist_ok=True)
    for seed, items, system in itertools.product(options.seeds, options.items, options.systems):
        name = f"{items}-items-{system}-seed{seed}"
        path = options.runs / f"{name}.json"
        if path.exists():
            continue
        model, memory = SYSTEMS[system]
        task = SegmentedRecall("recall", False, items, SYMBOLS, 0, memory=memory)
        recipe = Recipe(options.rate, options.steps, seed=seed)
        tests = {str(distance): replace(task, distances=(distance,)) for distance in DISTANCES}
        found = train(model, task, recipe, tests, growing(task) if system == "grown" else ())
        written = {**options.header, "system": system, "task": asdict(task), "recipe": asdict(recipe), **found}
        write_json(path, written)
        scores = " ".join(f"{accuracy:.3f}" for accuracy in found["tests"].values())
        progress(f"{name}: {scores} after {found['steps']:,} steps, {found['seconds']:.0f} s")


def report(options: argparse.Namespace) -> None:
    """Write the accuracies of the finished runs.

    Raises:
        UserError: There is none.
    """
    runs = [read_json(path) for path in sorted(options.runs.glob("*.json"))]
    if not runs:
        raise UserError(f"{options.runs} has no finished run. Run `python {SCRIPT} run` first.")
    kept = ("system", "task", "recipe", "tests", "steps", "curve")
    entries = {cell(run): {name: run[name] for name in kept} for run in runs}
    commands, sources = {run["command"] for run in runs}, [*runs]
    for path in options.results.glob("segments-*.json"):
        published = read_json(path)
        entries = {cell(run): run for run in published["runs"]} | entries
        commands |= set(published["commands"])
        sources.append(published)
    result = {
        "command": f"python {SCRIPT} report",
        "commands": sorted(commands),
        **{name: runs[0][name] for name in ("date", "machine")},
        "versions": joined_versions(sources),
        "protocol": PROTOCOL,
        "runs": [entries[key] for key in sorted(entries)],
    }
    publish(options.results, "segments", "no", result, text, {"": plot})


def cell(run: dict[str, Any]) -> tuple[int, str, int]:
    """What identifies a run: number of pairs, system and seed."""
    return run["task"]["items"], run["system"], run["recipe"]["seed"]


def grouped(result: dict[str, Any]) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """The runs of every number of items and system."""
    keys = [(run["task"]["items"], run["system"]) for run in result["runs"]]
    keys = sorted(set(keys), key=lambda key: (key[0], list(SYSTEMS).index(key[1])))
    return {key: [run for run in result["runs"] if (run["task"]["items"], run["system"]) == key] for key in keys}


def text(result: dict[str, Any]) -> str:
    """A row for each number of pairs and system: accuracy at every distance, mean and extremes over the seeds."""
    rows = []
    for (items, system), runs in grouped(result).items():
        scores = [score_cell([100 * run["tests"][str(distance)] for run in runs]) for distance in DISTANCES]
        rows.append([str(items), LABELS[system], *scores, ", ".join(f"{run['steps']:,}" for run in runs)])
    header = ["pairs", "model", "same segment", *(f"{distance} later" for distance in DISTANCES[1:]), "updates"]
    return markdown_table(header, rows)


def plot(result: dict[str, Any], path: Path) -> None:
    """Mean accuracy against distance, a panel for each number of pairs."""
    groups = grouped(result)
    numbers = sorted({items for items, _ in groups})
    figure, axes = panels(1, len(numbers), (5.5 * len(numbers), 3.8), sharey=True, squeeze=False)
    for axis, items in zip(axes[0], numbers, strict=True):
        for system in SYSTEMS:
            if runs := groups.get((items, system)):
                means = [100 * statistics.mean(run["tests"][str(distance)] for run in runs) for distance in DISTANCES]
                axis.plot(range(len(DISTANCES)), means, marker="o", label=LABELS[system].replace("`", ""))
        axis.axhline(100 / SYMBOLS, color="0.6", linestyle=":", label="chance")
        axis.set_xticks(range(len(DISTANCES)), map(str, DISTANCES))
        axis.set_xlabel("segments between pair and question")
        axis.set_title(f"{items} pair{'s' if items > 1 else ''}", fontsize=10)
        plain(axis)
    axes[0][0].set_ylabel("right answers (per cent)")
    axes[0][0].legend(frameon=False, fontsize=9)
    save(figure, path)


def main(arguments: Sequence[str]) -> int:
    """Run the study and return its exit status."""
    commands = {"run": run, "report": report}
    return run_alone(SCRIPT, parse, lambda options: commands[options.what](options), arguments, stopped=KEPT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
