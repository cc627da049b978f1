"""Reads the runs of `swap.py`, compares them with the equally continued teacher, and makes tables and a plot."""

import json
from pathlib import Path
from typing import Any

from learning_plots import plain, pyplot, save
from learning_report import first_step_at

from luna_hf.scripting import UserError

# The loss that a converted model must reach, relative to that of the equally continued teacher.
GOAL = 0.02

Run = dict[str, Any]
COLOURS = {
    "teacher": "black",
    "window-64": "tab:purple",
    "mlp-64": "tab:orange",
    "mlp-128": "tab:red",
    "linformer-64": "tab:green",
    "random-64": "0.6",
    "luna-64": "tab:cyan",
    "luna-128": "tab:blue",
    "mlp-64-random": "tab:brown",
    "linformer-64-random": "tab:olive",
}


def read(folder: Path) -> dict[str, Any]:
    """Everything finished below a folder: the teacher's figures, swapped models, and runs.

    Raises:
        UserError: There is no finished run.
    """
    finished = sorted((folder / "continued").glob("*/run.json"))
    if not finished:
        raise UserError(f"{folder} holds no finished run. Run `python experiments/swap.py run` first.")
    return {
        "teacher": _json(folder / "teacher" / "metrics.json"),
        "runs": [read_run(folder, path.parent) for path in finished],
    }


def read_run(folder: Path, run: Path) -> Run:
    """One run with its curve over all its steps, from the swap on and with those of transfer."""
    described = _json(run / "run.json")
    entries = [(entry["step"], entry["loss"]) for entry in read_log(run / "log.jsonl")]
    transferred = errors = None
    if described["transfer"]:
        converted = described["system"] + ("-conv" if described["convolution"] else "")
        lesson = read_log(folder / "transferred" / converted / "log.jsonl")
        errors = read_log(folder / "transferred" / converted / "log.jsonl", "objective")[-1]["layers"]
        transferred = lesson[-1]["loss"]
        # Continuing begins with an evaluation of what transfer ended with.
        moved = [(step + described["transfer_steps"], loss) for step, loss in entries[1:]]
        entries = [(entry["step"], entry["loss"]) for entry in lesson] + moved
    return {
        **described,
        "parameters": _json(run / "metrics.json")["parameters"],
        "curve": {"step": [step for step, _ in entries], "loss": [loss for _, loss in entries]},
        "swapped_loss": entries[0][1],
        "transferred_loss": transferred,
        "layer_errors": errors,
        "final_loss": entries[-1][1],
    }


def read_log(path: Path, kind: str = "held_out") -> list[dict[str, Any]]:
    """Entries of a log of one kind."""
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [entry for entry in entries if entry["kind"] == kind]


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def condense(found: dict[str, Any], systems: list[str]) -> dict[str, Any]:
    """What the result file keeps, with every run beside its twin, in the order of the systems."""
    runs = sorted(found["runs"], key=lambda run: (run["rate"], run["convolution"], systems.index(run["system"])))
    teacher_loss = found["teacher"]["held_out_loss"]
    rows = []
    for run in runs:
        twin = next((other for other in runs if is_twin(other, run)), None)
        rows.append(
            {
                **{name: run[name] for name in _KEPT},
                "twin_loss": twin and twin["final_loss"],
                "over_twin": twin and run["final_loss"] / twin["final_loss"] - 1,
                "steps_to_teacher": first_step_at(run["curve"], teacher_loss * (1 + GOAL)),
            }
        )
    return {
        "teacher": {
            name: found["teacher"][name] for name in ("held_out_loss", "unigram_loss", "seen_tokens", "parameters")
        },
        "steps": max(run["curve"]["step"][-1] for run in runs),
        "transfer_steps": max(run["transfer_steps"] for run in runs),
        "goal": GOAL,
        "runs": rows,
    }


_KEPT = (
    *("name", "system", "convolution", "transfer", "rate", "parameters", "curve"),
    *("swapped_loss", "transferred_loss", "layer_errors", "final_loss"),
)


def is_twin(other: Run, run: Run) -> bool:
    """Whether `other` is the teacher continued as `run` was."""
    same = all(other[name] == run[name] for name in ("convolution", "rate"))
    return same and other["system"] == "teacher"


def text(result: dict[str, Any]) -> str:
    """Tables and conclusions in Markdown."""
    return f"{summary(result)}\n\n{tables(result)}\n\n{sentences(result)}\n"


def summary(result: dict[str, Any], rate: str = "peak") -> str:
    """Final losses at one rate, a row a system: what its README shows."""
    found = {(r["system"], r["convolution"], r["transfer"]): r for r in result["runs"] if r["rate"] == rate}
    lines = [
        "| the attention becomes | after the swap | continued | with transfer | with a convolution | with both |",
        "| --- " * 6 + "|",
    ]
    for system in dict.fromkeys(run["system"] for run in result["runs"]):
        if (first := found.get((system, False, False))) is None:
            continue
        kinds = ((False, False), (False, True), (True, False), (True, True))
        cells = [loss(found.get((system, *kind)), "final_loss") for kind in kinds]
        lines.append("| " + " | ".join([system, loss(first, "swapped_loss"), *cells]) + " |")
    return "\n".join(lines)


def tables(result: dict[str, Any]) -> str:
    """One Markdown table for every rate."""
    rates = list(dict.fromkeys(run["rate"] for run in result["runs"]))
    return "\n\n".join(table([run for run in result["runs"] if run["rate"] == rate], rate) for rate in rates)


def table(runs: list[Run], rate: str) -> str:
    """A row for every system, with and without convolution and transfer."""
    lines = [
        f"| continued at the {rate} rate | after the swap | after transfer | end, swap + continue | over the twin | "
        "end, transfer + continue | over the twin | steps to the teacher's loss + 2 %, without / with transfer |",
        "| --- " * 8 + "|",
    ]
    for convolution in (False, True):
        for system in COLOURS:
            own = {r["transfer"]: r for r in runs if r["system"] == system and r["convolution"] == convolution}
            if not own:
                continue
            direct, moved, any_run = own.get(False), own.get(True), next(iter(own.values()))
            cells = [
                system + (" + convolution" if convolution else ""),
                f"{any_run['swapped_loss']:.3f}",
                loss(moved, "transferred_loss"),
                loss(direct, "final_loss"),
                share(direct),
                loss(moved, "final_loss"),
                share(moved),
                f"{steps(direct)} / {steps(moved)}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def loss(run: Run | None, name: str) -> str:
    """A loss, or a dash."""
    return "-" if run is None or run[name] is None else f"{run[name]:.3f}"


def share(run: Run | None) -> str:
    """How far above its twin a run ended."""
    return "-" if run is None or run["over_twin"] is None else f"{run['over_twin']:+.1%}"


def steps(run: Run | None) -> str:
    """Steps to the teacher's loss."""
    if run is None:
        return "-"
    return "not reached" if run["steps_to_teacher"] is None else f"{run['steps_to_teacher']:,}"


def sentences(result: dict[str, Any]) -> str:
    """What was reached of the goal, in words."""
    teacher, runs = result["teacher"], [run for run in result["runs"] if run["system"] != "teacher"]
    lines = [
        f"* The teacher: {teacher['parameters']:,} parameters, loss {teacher['held_out_loss']:.3f} after "
        f"{teacher['seen_tokens'] / 1e6:.1f} M tokens at this block length; unigram entropy "
        f"{teacher['unigram_loss']:.3f}. Every run has {result['steps']:,} steps, {result['transfer_steps']:,} of them "
        "transfer where there is any."
    ]
    for convolution in (False, True):
        compared = [run for run in runs if run["convolution"] == convolution and run["over_twin"] is not None]
        if not compared:
            continue
        best = min(compared, key=lambda run: run["over_twin"])
        within = sorted(run["name"] for run in compared if run["over_twin"] <= result["goal"])
        kind = "With" if convolution else "Without"
        lines.append(
            f"* {kind} the convolution, nearest to the equally continued teacher: {best['name']}, "
            f"{best['over_twin']:+.1%}. Within {result['goal']:.0%}: {', '.join(within) or 'none'}."
        )
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Held-out loss against steps: a panel for each rate, without and with the convolution; transfer is solid."""
    rates = list(dict.fromkeys(run["rate"] for run in result["runs"]))
    plt = pyplot()
    figure, axes = plt.subplots(
        len(rates), 2, figsize=(13, 4.6 * len(rates)), layout="constrained", sharex=True, squeeze=False
    )
    for row, rate in zip(axes, rates, strict=True):
        for axis, convolution in zip(row, (False, True), strict=True):
            for run in result["runs"]:
                if run["rate"] != rate or run["convolution"] != convolution:
                    continue
                style = "-" if run["transfer"] or run["system"] == "teacher" else "--"
                label = run["system"] + (", transfer" if run["transfer"] else "")
                axis.plot(
                    run["curve"]["step"], run["curve"]["loss"], style, color=COLOURS[run["system"]], label=label, lw=1.4
                )
            axis.axhline(result["teacher"]["held_out_loss"], color="black", linestyle=":", linewidth=1)
            axis.set_title(f"{rate} rate, {'with' if convolution else 'without'} the convolution", fontsize=10)
            axis.set_xlabel("steps after the swap, those of transfer included")
            plain(axis)
        row[0].set_ylabel("loss at masked held-out tokens (nats)")
    axes[0][0].legend(frameon=False, fontsize=8, ncols=2)
    save(figure, path)
