"""Reads the pretraining runs of `learning.py`, compares them, and writes the comparison as Markdown."""

import math
import statistics
from bisect import bisect_right
from pathlib import Path
from typing import Any

from running import finished_runs, read_json, read_log

from luna_hf.scripting import UserError, markdown_table

# What Luna with the convolution must reach.
STEP_SHARE = 0.5  # of plain RoBERTa's steps, to plain RoBERTa's final loss
RELATIVE_LOSS = 0.02  # above the loss of softmax with the convolution

# Keys of a recipe that differ between runs by design.
OWN = {"model_name", "output_dir", "cache_dir", "seed", "model", "log_steps", "save_steps", "save_total_limit"}

# Systems of which the losses are compared step by step.
COMPARED = (("luna-conv", "roberta-conv"), ("luna-conv", "luna-conv-1"), ("roberta-conv", "luna-conv-1"))

Run = dict[str, Any]


def finished(folder: Path) -> list[tuple[Path, Run]]:
    """Folder and `run.json` of every finished pretraining run.

    Raises:
        UserError: There is none, or two were run with different recipes.
    """
    runs = finished_runs(folder, "pretrain", "learning.py pretrain")
    first = runs[0][1]
    for _, run in runs[1:]:
        differing = [key for key, value in run["recipe"].items() if key not in OWN and value != first["recipe"][key]]
        if differing:
            raise UserError(
                f"{run['system']} and {first['system']} in {folder} differ in {', '.join(differing)} and cannot be "
                "compared. Keep each recipe in a separate folder (--runs)."
            )
    return runs


def read_runs(folder: Path) -> list[Run]:
    """Header, figures and curves of every finished run; `seconds` are steps times the measured cost of a step.

    Raises:
        UserError: See `finished`; or the speed was not measured.
    """
    runs, speed = finished(folder), folder / "speed.json"
    if not speed.is_file():
        raise UserError(f"{speed} is missing. Run `python experiments/learning.py speed` first.")
    seconds = read_json(speed)["seconds_per_step"]
    return [read_run(path, run, seconds[run["system"]]["median"]) for path, run in runs]


def read_run(folder: Path, run: Run, step_seconds: float) -> Run:
    """Header, figures and curves of one run."""
    figures = read_json(folder / "metrics.json")
    held_out, probes = read_log(folder, "held_out"), read_log(folder, "probe")
    return {
        **run,
        "parameters": figures["parameters"],
        "unigram_loss": figures["unigram_loss"],
        "targets": figures["held_out_targets"],
        "training_seconds": figures["training_seconds"],
        "tokens_per_second": run["recipe"]["global_batch_tokens"] / step_seconds,
        "final_loss": held_out[-1]["loss"],
        "curve": {
            **{name: [entry[name] for entry in held_out] for name in ("step", "loss", "accuracy")},
            "seconds": [entry["step"] * step_seconds for entry in held_out],
        },
        "probe": {name: [entry[name] for entry in probes] for name in (probes[0] if probes else ()) if name != "kind"},
    }


def first_step_at(curve: dict[str, list[float]], target: float) -> int | None:
    """The first evaluated step with at most the target loss; `None` if it was not reached."""
    return next((step for step, loss in zip(curve["step"], curve["loss"], strict=True) if loss <= target), None)


def pairs(runs: list[Run], first: str, second: str) -> list[tuple[int, Run, Run]]:
    """Seed and runs of two systems for every common seed: the same rows in the same order with the same masks."""
    found = {(run["system"], run["seed"]): run for run in runs}
    common = sorted(seed for system, seed in found if system == first and (second, seed) in found)
    return [(seed, found[first, seed], found[second, seed]) for seed in common]


def differences(runs: list[Run], first: str, second: str) -> dict[int, dict[int, tuple[float, float]]]:
    """Loss of the first system minus that of the second, in nats and relative, by seed and quarter of the steps."""
    found = {}
    for seed, left, right in pairs(runs, first, second):
        steps = left["curve"]["step"]
        quarters = [max(bisect_right(steps, steps[-1] * n / 4) - 1, 0) for n in (1, 2, 3, 4)]
        losses = {steps[i]: (left["curve"]["loss"][i], right["curve"]["loss"][i]) for i in quarters}
        found[seed] = {step: (ours - theirs, ours / theirs - 1) for step, (ours, theirs) in losses.items()}
    return found


# ---- Markdown ----


def text(result: dict[str, Any]) -> str:
    """Table and conclusions of a result file."""
    return f"{table(result['runs'], list(result['systems']))}\n\n{sentences(result['runs'])}"


def table(runs: list[Run], order: list[str]) -> str:
    """One row for each system: means over the seeds, with the extremes where there are several."""
    targets = {run["seed"]: run["final_loss"] for run in runs if run["system"] == "roberta"}
    rows = []
    for system in order:
        own = [run for run in runs if run["system"] == system]
        if not own:
            continue
        reached = [first_step_at(run["curve"], targets[run["seed"]]) for run in own if run["seed"] in targets]
        total = own[0]["curve"]["step"][-1]
        when = ("not reached" if step is None else f"{step:,} ({step / total:.2f})" for step in reached)
        cells = [system, f"{own[0]['parameters']:,}", ", ".join(str(run["seed"]) for run in own)]
        cells.append(spread([run["final_loss"] for run in own], 3))
        cells.append(spread([run["unigram_loss"] - run["final_loss"] for run in own], 2))
        cells.append(spread([100 * run["curve"]["accuracy"][-1] for run in own], 1) + " %")
        cells += [", ".join(when) or "-", f"{statistics.mean(run['tokens_per_second'] for run in own):,.0f}"]
        probed = ("pack_entropy", "unpack_entropy", "slot_similarity")
        rows.append(cells + [layers(own[0]["probe"], name) for name in probed])
    header = ["system", "parameters", "seeds", "final loss", "below unigram (nats)", "accuracy"]
    header += ["steps to plain RoBERTa's final loss (share)", "tokens/s"]
    return markdown_table([*header, "pack entropy", "unpack entropy", "slot similarity"], rows)


def spread(values: list[float], digits: int) -> str:
    """Mean, and the extremes in brackets if there are several values."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def layers(probe: dict[str, list[Any]], name: str) -> str:
    """The last values of a probe, first layer first; softmax maps appear in the column of the pack maps."""
    label = ""
    if name == "pack_entropy" and "attention_entropy" in probe:
        name, label = "attention_entropy", "(softmax) "
    if name not in probe:
        return "-"
    return label + " / ".join("-" if value is None else f"{value:.2f}" for value in probe[name][-1])


def sentences(runs: list[Run]) -> str:
    """The comparisons that the study is about, each with its expectation if there was one."""
    lines, shares = [], []
    for seed, ours, theirs in pairs(runs, "luna-conv", "roberta"):
        step = first_step_at(ours["curve"], theirs["final_loss"])
        shares.append(math.inf if step is None else step / theirs["curve"]["step"][-1])
        reaches = "does not reach" if step is None else "reaches"
        when = "" if step is None else f" at step {step:,}, {shares[-1]:.2f} of its steps"
        target = f"plain RoBERTa's final loss of {theirs['final_loss']:.3f}"
        lines.append(f"* Seed {seed}: luna-conv {reaches} {target}{when}.")
    lines.append(f"  Expected: at most {STEP_SHARE}. {_holds(shares, STEP_SHARE)}")
    for first, second in COMPARED:
        found = differences(runs, first, second)
        for seed, steps in found.items():
            values = ", ".join(f"{step:,}: {nats:+.3f} ({share:+.1%})" for step, (nats, share) in steps.items())
            lines.append(f"* Seed {seed}: loss of {first} minus loss of {second} at step {values}.")
        if second == "roberta-conv":
            ends = [list(steps.values())[-1][1] for steps in found.values()]
            lines.append(f"  Expected at the end: at most {RELATIVE_LOSS:+.0%}. {_holds(ends, RELATIVE_LOSS)}")
    losses: dict[str, list[float]] = {}
    for run in runs:
        losses.setdefault(run["system"], []).append(run["final_loss"])
    spreads = [f"{name} {max(values) - min(values):.3f}" for name, values in losses.items() if len(values) > 1]
    if spreads:
        lines.append(f"* Largest difference between the seeds of a system (nats): {', '.join(spreads)}.")
    return "\n".join(lines)


def _holds(values: list[float], limit: float) -> str:
    if not values:
        return "Not measured."
    return "It holds." if max(values) <= limit else "It does not hold."
