"""Results of the recall study: one JSON file, a table for each task and form, and plots."""

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from running import publish, read_json
from study_plots import panels, plain, save

from luna_hf.scripting import UserError, markdown_table

Run = dict[str, Any]
COLOURS = {"softmax": "black", "window": "0.5", "abc": "tab:blue", "luna": "tab:orange", "luna-exp": "tab:red"}
COLOURS |= {"leapformer": "tab:purple", "linear": "tab:brown", "lavo": "tab:green"}
LINES = {"": ":", "window": "-", "conv": "--", "both": "-."}
LINES |= {"conv-narrow": (0, (1, 3)), "window-uncounted": (0, (5, 1)), "both-uncounted": (0, (3, 1, 1, 1))}
PLOTTED = ("", "window", "conv", "both")  # ablations are in the tables
_SHARED = ("command", "date", "machine", "versions")


def publish_all(runs: Path, results: Path) -> None:
    """Write JSON, Markdown and plots of all finished runs; those of others stay as they were published.

    Raises:
        UserError: There is none.
    """
    found = [read_json(path) for path in sorted(runs.glob("*.json"))]
    if not found:
        raise UserError(f"{runs} has no finished run. Run `python experiments/recall_study.py run` first.")
    commands = {run["command"] for run in found}
    kept = [{name: value for name, value in run.items() if name not in _SHARED} for run in found]
    for path in results.glob("recall-*.json"):
        published = read_json(path)
        commands |= set(published["commands"])
        kept += [run for run in published["runs"] if _key(run) not in set(map(_key, kept))]
    result = {
        "command": "python experiments/recall_study.py report",
        "commands": sorted(commands),
        **{name: found[0][name] for name in ("date", "machine", "versions")},
        "runs": sorted(kept, key=_key),
    }
    publish(results, "recall", "no", result, text, {"-slots": plot_slots, "-items": plot_items, "-curves": plot_curves})


def _key(run: Run) -> str:
    """What makes a run: its system, task and recipe."""
    return json.dumps([run[name] for name in ("system", "task", "recipe")], sort_keys=True)


# ---- numbers ----


def settings(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """The runs of every task, form and size, by its name; `recall` first."""
    named: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run["task"]["name"] != "recall", not run["task"]["causal"])):
        task = run["task"]
        form = "causal" if task["causal"] else "encoder"
        name = f"{task['name']}, {form}, {task['items']} items of {task['symbols']} symbols"
        named.setdefault(name, []).append(run)
    return named


def score(run: Run) -> float:
    """Accuracy at the largest size."""
    return run["accuracy"][str(run["task"]["items"])]


def sweep(runs: list[Run], system: str) -> dict[str, list[Run]]:
    """A system's runs by learning rate, and positions where they are not the default."""
    found: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run["recipe"]["positions"] or "", run["recipe"]["rate"])):
        if run["system"] == system:
            rate, positions = run["recipe"]["rate"], run["recipe"]["positions"]
            found.setdefault(f"{rate:g}" + (f", {positions}" if positions else ""), []).append(run)
    return found


def best(runs: list[Run], system: str) -> list[Run]:
    """A system's runs in the part of its sweep with the best mean accuracy over the seeds."""
    return max(sweep(runs, system).values(), key=lambda seeds: statistics.mean(map(score, seeds)))


def parts(system: str) -> tuple[str, int, str]:
    """Mechanism, number of slots (0 for none), and what is added: "luna-16+window" gives ("luna", 16, "window")."""
    base, _, added = system.partition("+")
    name, _, slots = base.rpartition("-")
    return (name, int(slots), added) if slots.isdecimal() else (base, 0, added)


def systems_of(runs: list[Run]) -> list[str]:
    """Systems in the order of the tables: by mechanism, what is added, and slots."""
    order = list(COLOURS)

    def key(system: str) -> tuple[Any, ...]:
        name, slots, added = parts(system)
        return (order.index(name) if name in order else len(order), name, list(LINES).index(added), slots)

    return sorted({run["system"] for run in runs}, key=key)


# ---- Markdown ----


def text(result: dict[str, Any]) -> str:
    """One table for each setting."""
    return "\n\n".join(f"{name}:\n\n{table(runs)}" for name, runs in settings(result["runs"]).items())


def table(runs: list[Run]) -> str:
    """A row for every system: accuracy at each size in the best part of its sweep, what it took, and the sweep."""
    names = list(runs[0]["accuracy"])
    rows = []
    for system in systems_of(runs):
        own = best(runs, system)
        tried = (f"{percent(list(map(score, seeds)))} at {setting}" for setting, seeds in sweep(runs, system).items())
        cells = [system, *(percent([run["accuracy"][size] for run in own]) for size in names)]
        cells.append(", ".join(f"{run['steps']:,}" for run in own))
        state = own[0]["state_bytes"]
        cells.append("-" if state is None else f"{state:,}")
        rows.append([*cells, "; ".join(tried)])
    header = ["system", *(f"{size} items" for size in names), "steps", "state (bytes)", f"{names[-1]} items, by rate"]
    return markdown_table(header, rows)


def percent(shares: list[float]) -> str:
    """Mean in per cent, with the extremes if there are several."""
    mean = f"{100 * statistics.mean(shares):.1f}"
    return mean if len(shares) == 1 else f"{mean} ({100 * min(shares):.1f} to {100 * max(shares):.1f})"


# ---- plots ----


def _panels(result: dict[str, Any], across_slots: bool = False) -> tuple[Any, list[tuple[Any, list[Run]]]]:
    """A panel for every form and size of associative recall, and its runs."""
    plotted = [run for run in result["runs"] if run["task"]["name"] == "recall" and parts(run["system"])[2] in PLOTTED]
    named = settings(plotted)
    if across_slots and len(named) > 1:
        numbers = {name: {parts(run["system"])[1] for run in runs} for name, runs in named.items()}
        named = {name: runs for name, runs in named.items() if len(numbers[name]) > 3} or named
    figure, axes = panels(1, len(named), (6.8 * len(named), 4.6), sharey=False, squeeze=False)
    for axis, name in zip(axes[0], named, strict=True):
        axis.set_title(name, fontsize=10)
        plain(axis)
    return figure, list(zip(axes[0], named.values(), strict=True))


def _style(system: str) -> dict[str, Any]:
    name, _, added = parts(system)
    return {"color": COLOURS[name], "linestyle": LINES[added], "linewidth": 1.6}


def plot_slots(result: dict[str, Any], path: Path) -> None:
    """Accuracy at the largest size against the number of slots; systems without slots are horizontal lines."""
    figure, drawn = _panels(result, across_slots=True)
    for axis, runs in drawn:
        lines: dict[tuple[str, str], dict[int, float]] = {}
        for system in systems_of(runs):
            name, slots, added = parts(system)
            if name in COLOURS:
                lines.setdefault((name, added), {})[slots] = 100 * statistics.mean(map(score, best(runs, system)))
        for (name, added), found in lines.items():
            label, style = name + (f"+{added}" if added else ""), {"color": COLOURS[name], "linestyle": LINES[added]}
            if 0 in found:
                axis.axhline(found[0], label=label, linewidth=1, **style)
            else:
                axis.plot(list(found), list(found.values()), marker="o", label=label, **style)
    _finish_shares(figure, drawn, "slots", path)


def _finish_shares(figure: Any, drawn: Any, across: str, path: Path) -> None:
    """Label panels of shares of right answers, and save the figure."""
    for axis, _ in drawn:
        axis.set_xscale("log", base=2)
        axis.set_xlabel(across)
        axis.set_ylim(-3, 103)
        axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    drawn[0][0].set_ylabel("right answers (per cent)")
    save(figure, path)


def plot_items(result: dict[str, Any], path: Path) -> None:
    """Accuracy against the size, of softmax, of a window alone, and of systems with most slots."""
    figure, drawn = _panels(result)
    for axis, runs in drawn:
        most = max(parts(run["system"])[1] for run in runs)
        for system in systems_of(runs):
            name, slots, _ = parts(system)
            if name in COLOURS and slots in (0, most):
                found = best(runs, system)
                sizes = [int(size) for size in found[0]["accuracy"]]
                means = [100 * statistics.mean(run["accuracy"][str(size)] for run in found) for size in sizes]
                axis.plot(sizes, means, marker="o", label=system, **_style(system))
    _finish_shares(figure, drawn, "items", path)


def plot_curves(result: dict[str, Any], path: Path) -> None:
    """Right answers in a row of the size trained so far, against steps, of the same systems as in `plot_items`."""
    figure, drawn = _panels(result)
    for axis, runs in drawn:
        most = max(parts(run["system"])[1] for run in runs)
        for system in systems_of(runs):
            name, slots, _ = parts(system)
            if name in COLOURS and slots in (0, most):
                curve = best(runs, system)[0]["curve"]
                right = [size * share for size, share in zip(curve["size"], curve["accuracy"], strict=True)]
                axis.plot(curve["step"], right, label=system, **_style(system))
        axis.set_xlabel("steps")
        axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    drawn[0][0].set_ylabel("right answers in a row")
    save(figure, path)
