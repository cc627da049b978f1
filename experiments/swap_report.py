"""Reads the runs of `swap.py`, compares them with the equally continued teacher, and makes tables and a plot."""

import itertools
from pathlib import Path
from typing import Any

from learning_report import first_step_at
from running import finished_runs, read_json, read_log
from study_plots import panels, plain, save

from luna_hf.scripting import markdown_table

# How far above the equally continued teacher a converted model may end.
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


def read(folder: Path) -> tuple[Run, list[Run]]:
    """The teacher's figures, and every finished run below a folder."""
    runs = finished_runs(folder, "continued", "swap.py run")
    return read_json(folder / "teacher" / "metrics.json"), [read_run(folder, path, run) for path, run in runs]


def read_run(folder: Path, run: Path, described: Run) -> Run:
    """One run with its curve over all its steps, from the swap on and including those of transfer."""
    entries = [(entry["step"], entry["loss"]) for entry in read_log(run, "held_out")]
    transferred = errors = None
    if described["transfer"]:
        lesson = folder / "transferred" / (described["system"] + ("-conv" if described["convolution"] else ""))
        errors = read_log(lesson, "objective")[-1]["layers"]
        first = [(entry["step"], entry["loss"]) for entry in read_log(lesson, "held_out")]
        transferred = first[-1][1]
        # The continued run begins with an evaluation of the transferred model, which is here already.
        entries = first + [(step + described["transfer_steps"], loss) for step, loss in entries[1:]]
    return {
        **described,
        "parameters": read_json(run / "metrics.json")["parameters"],
        "curve": {"step": [step for step, _ in entries], "loss": [loss for _, loss in entries]},
        "swapped_loss": entries[0][1],
        "transferred_loss": transferred,
        "layer_errors": errors,
        "final_loss": entries[-1][1],
    }


def condense(teacher: Run, runs: list[Run], systems: list[str]) -> dict[str, Any]:
    """Content of the result file: every run beside its twin, in the order of the systems."""
    runs = sorted(runs, key=lambda run: (run["rate"], run["convolution"], systems.index(run["system"])))
    twins = {(run["convolution"], run["rate"]): run["final_loss"] for run in runs if run["system"] == "teacher"}
    rows = []
    for run in runs:
        twin = twins.get((run["convolution"], run["rate"]))
        over = twin and run["final_loss"] / twin - 1
        reached = first_step_at(run["curve"], teacher["held_out_loss"] * (1 + GOAL))
        kept = {name: run[name] for name in _KEPT}
        rows.append({**kept, "twin_loss": twin, "over_twin": over, "steps_to_teacher": reached})
    return {
        "teacher": {name: teacher[name] for name in ("held_out_loss", "unigram_loss", "seen_tokens", "parameters")},
        "steps": max(run["curve"]["step"][-1] for run in runs),
        "transfer_steps": max(run["transfer_steps"] for run in runs),
        "goal": GOAL,
        "runs": rows,
    }


_KEPT = (
    *("name", "system", "convolution", "transfer", "rate", "parameters", "curve"),
    *("swapped_loss", "transferred_loss", "layer_errors", "final_loss"),
)


# ---- Markdown ----


def text(result: dict[str, Any]) -> str:
    """Tables and conclusions of a result file."""
    rates = dict.fromkeys(run["rate"] for run in result["runs"])
    tables = [table([run for run in result["runs"] if run["rate"] == rate], rate) for rate in rates]
    return "\n\n".join([summary(result), *tables, sentences(result)])


def summary(result: dict[str, Any], rate: str = "peak") -> str:
    """Final losses at one rate, a row for each system."""
    found = {(r["system"], r["convolution"], r["transfer"]): r for r in result["runs"] if r["rate"] == rate}
    kinds = ((False, False), (False, True), (True, False), (True, True))
    rows = []
    for system in dict.fromkeys(run["system"] for run in result["runs"]):
        if first := found.get((system, False, False)):
            cells = [loss(found.get((system, *kind)), "final_loss") for kind in kinds]
            rows.append([system, loss(first, "swapped_loss"), *cells])
    header = [
        "the attention becomes",
        "after the swap",
        "continued",
        "with transfer",
        "with a convolution",
        "with both",
    ]
    return markdown_table(header, rows)


def table(runs: list[Run], rate: str) -> str:
    """A row for every system, with and without convolution and transfer."""
    header = [f"continued at the {rate} rate", "after the swap", "after transfer", "end, swap + continue"]
    header += ["over the twin", "end, transfer + continue", "over the twin"]
    header += ["steps to the teacher's loss + 2 %, without / with transfer"]
    rows = []
    for convolution, system in itertools.product((False, True), COLOURS):
        own = {r["transfer"]: r for r in runs if r["system"] == system and r["convolution"] == convolution}
        direct, moved = own.get(False), own.get(True)
        if own:
            name = system + (" + convolution" if convolution else "")
            cells = [loss(direct or moved, "swapped_loss"), loss(moved, "transferred_loss")]
            cells += [loss(direct, "final_loss"), share(direct), loss(moved, "final_loss"), share(moved)]
            rows.append([name, *cells, f"{steps(direct)} / {steps(moved)}"])
    return markdown_table(header, rows)


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
    """The teacher, and the runs nearest to the goal, in words."""
    teacher, runs = result["teacher"], [run for run in result["runs"] if run["system"] != "teacher"]
    lines = [
        f"* Teacher: {teacher['parameters']:,} parameters, loss {teacher['held_out_loss']:.3f} after "
        f"{teacher['seen_tokens'] / 1e6:.1f} M tokens at this block length; unigram entropy "
        f"{teacher['unigram_loss']:.3f}. Every run has {result['steps']:,} steps, including "
        f"{result['transfer_steps']:,} of transfer where there is any."
    ]
    for convolution, kind in ((False, "Without"), (True, "With")):
        compared = [run for run in runs if run["convolution"] == convolution and run["over_twin"] is not None]
        if compared:
            best = min(compared, key=lambda run: run["over_twin"])
            within = sorted(run["name"] for run in compared if run["over_twin"] <= result["goal"])
            lines.append(
                f"* {kind} the convolution, {best['name']} ends nearest to the equally continued teacher: "
                f"{best['over_twin']:+.1%}. Within {result['goal']:.0%}: {', '.join(within) or 'none'}."
            )
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Held-out loss against steps, without and with the convolution at each rate; runs with transfer are solid."""
    rates = list(dict.fromkeys(run["rate"] for run in result["runs"]))
    figure, axes = panels(len(rates), 2, (13, 4.6 * len(rates)), sharex=True, squeeze=False)
    for row, rate in zip(axes, rates, strict=True):
        for axis, convolution in zip(row, (False, True), strict=True):
            for run in result["runs"]:
                if run["rate"] == rate and run["convolution"] == convolution:
                    style = "-" if run["transfer"] or run["system"] == "teacher" else "--"
                    label, colour = run["system"] + (", transfer" if run["transfer"] else ""), COLOURS[run["system"]]
                    axis.plot(run["curve"]["step"], run["curve"]["loss"], style, color=colour, label=label, lw=1.4)
            axis.axhline(result["teacher"]["held_out_loss"], color="black", linestyle=":", linewidth=1)
            axis.set_title(f"{rate} rate, {'with' if convolution else 'without'} the convolution", fontsize=10)
            axis.set_xlabel("steps after the swap, including transfer")
            plain(axis)
        row[0].set_ylabel("loss at masked held-out tokens (nats)")
    axes[0][0].legend(frameon=False, fontsize=8, ncols=2)
    save(figure, path)
