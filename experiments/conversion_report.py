"""Reads the runs of `conversion.py`, compares them with the equally continued teacher, and makes a table and a plot."""

from pathlib import Path
from typing import Any

from running import finished_runs, read_json, read_log
from study_plots import panels, plain, save

from luna_hf.scripting import markdown_table

# How far above the twin a converted model may end, and how much worse it must be without its slots.
GOAL, SLOTS_GOAL = 0.02, 0.03

Run = dict[str, Any]


def read(folder: Path) -> list[Run]:
    """Every finished run below a folder."""
    return [read_run(folder, path, run) for path, run in finished_runs(folder, "runs", "conversion.py run")]


def read_run(folder: Path, path: Path, described: Run) -> Run:
    """One run with its curve over all its steps, those of stage A included."""
    entries, figures = read_log(path, "held_out"), read_json(path / "metrics.json")
    curve = [(entry["step"] + described["transfer_steps"], entry["loss"]) for entry in entries]
    errors = None
    if described["transfer_steps"]:
        lesson = folder / "fitted" / path.name
        errors = read_log(lesson, "objective")[-1]["layers"]
        first = [(entry["step"], entry["loss"]) for entry in read_log(lesson, "held_out")]
        curve = first + curve[1:]  # stage B begins with an evaluation of what stage A ended with
    steps, losses = zip(*curve, strict=True)
    return {
        **described,
        "parameters": figures["parameters"],
        "curve": {"step": list(steps), "loss": list(losses)},
        "swapped_loss": losses[0],
        "layer_errors": errors,
        "final_loss": losses[-1],
        **{name: entries[-1].get(f"{name}_loss") for name in ("slots_off", "window_off")},
    }


def condense(runs: list[Run], order: list[str]) -> Run:
    """Content of the result file: every run beside its twin, in the order of the cells."""
    twins = {run["seed"]: run["final_loss"] for run in runs if run["name"] == "teacher"}
    rows = []
    for run in sorted(runs, key=lambda run: (order.index(run["name"]), run["seed"])):
        twin, off = twins.get(run["seed"]), run["slots_off"]
        over = twin and run["final_loss"] / twin - 1
        kept = {name: run[name] for name in _KEPT}
        rows.append({**kept, "over_twin": over, "cost_of_slots_off": off and off / run["final_loss"] - 1})
    return {"goal": GOAL, "slots_goal": SLOTS_GOAL, "steps": runs[0]["curve"]["step"][-1], "runs": rows}


_KEPT = (
    *("name", "seed", "cell", "parameters", "transfer_steps", "curve", "swapped_loss", "layer_errors", "final_loss"),
    *("slots_off", "window_off"),
)


def by_cell(result: Run) -> dict[str, list[Run]]:
    """The runs of each cell, one for each seed."""
    found: dict[str, list[Run]] = {}
    for run in result["runs"]:
        found.setdefault(run["name"], []).append(run)
    return found


# ---- Markdown ----


def text(result: Run) -> str:
    """A row for every cell, with one figure for each seed."""
    header = ["run", "attention", "after the swap", "at the end", "over the twin", "without slots", "without window"]
    rows = []
    for name, runs in by_cell(result).items():
        cells = [f"{runs[0]['swapped_loss']:.3f}", join(runs, "final_loss", ".3f"), join(runs, "over_twin", "+.1%")]
        cells += [join(runs, "cost_of_slots_off", "+.1%"), join(runs, "window_off", ".3f")]
        rows.append([f"`{name}`", attention(runs[0]["cell"]), *cells])
    return markdown_table(header, rows)


def join(runs: list[Run], name: str, shape: str) -> str:
    """The figures of the seeds, or a dash."""
    values = [run[name] for run in runs if run[name] is not None]
    return ", ".join(f"{value:{shape}}" for value in values) or "-"


_LEFT_OUT = {"bias": "no count bias", "teacher": "no help by the teacher"}


def attention(cell: Run) -> str:
    """What a cell's tokens read, in words."""
    if cell["family"] == "teacher":
        return "softmax, the twin"
    window = f"window {cell['window']}" if cell["window"] else ""
    slots = f"{cell['slots']} slots ({cell['family']})" if cell["slots"] else ""
    parts = [" and ".join(part for part in (window, slots) if part)]
    parts += [words for name, words in _LEFT_OUT.items() if not cell[name]]
    parts += ["window dropout"] if cell["dropout"] else []
    parts += [f"layer {layer} keeps softmax" for layer in cell["full"]]
    return ", ".join(parts)


def plot(result: Run, path: Path) -> None:
    """Left: how far above the twin every cell ends; right: how much worse it is without its slots."""
    found = {name: runs for name, runs in by_cell(result).items() if name != "teacher"}
    figure, (left, right) = panels(1, 2, (12, 0.6 + 0.34 * len(found)), sharey=True)
    shown = ((left, "over_twin", result["goal"]), (right, "cost_of_slots_off", result["slots_goal"]))
    for axis, name, goal in shown:
        for place, runs in enumerate(found.values()):
            values = [100 * run[name] for run in runs if run[name] is not None]
            if values:
                axis.barh(place, sum(values) / len(values), 0.7, color="tab:blue", alpha=0.5)
                axis.plot(values, [place] * len(values), ".", color="black", markersize=5)
        axis.axvline(100 * goal, color="tab:red", linestyle=":", linewidth=1)
        plain(axis)
    left.set_yticks(range(len(found)), list(found), fontsize=9)
    left.invert_yaxis()
    left.set_xlim(-1, 5)  # slots alone are far beyond
    left.set_xlabel("masked-LM loss above the twin (%), cut at 5; dotted: the goal, at most")
    right.set_xlabel("loss with slots off above that with them (%); dotted: the goal, at least")
    save(figure, path)
