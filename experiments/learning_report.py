"""Reads the pretraining runs of `learning.py`, compares them, and writes the comparison as Markdown."""

import statistics
from pathlib import Path
from typing import Any

from running import read_json, read_log

from luna_hf.scripting import UserError

# What Luna with the convolution must reach.
STEP_SHARE = 0.5  # of plain RoBERTa's steps, to plain RoBERTa's final loss
RELATIVE_LOSS = 0.02  # above the loss of softmax with the convolution

# Keys of a recipe that differ between runs by design.
OWN = {"model_name", "output_dir", "cache_dir", "seed", "model", "log_steps", "save_steps", "save_total_limit"}

Run = dict[str, Any]


def finished(folder: Path) -> list[tuple[Path, Run]]:
    """Folder and `run.json` of every finished pretraining run.

    Raises:
        UserError: There is none, or two were run with different recipes.
    """
    runs = [(path.parent, read_json(path)) for path in sorted((folder / "pretrain").glob("*/run.json"))]
    if not runs:
        raise UserError(f"{folder} has no finished run. Run `python experiments/learning.py pretrain` first.")
    first = runs[0][1]
    for _, run in runs[1:]:
        differing = [key for key, value in run["recipe"].items() if key not in OWN and value != first["recipe"][key]]
        if differing:
            raise UserError(
                f"{run['system']} and {first['system']} in {folder} differ in {', '.join(differing)} and cannot be "
                "compared. Keep each recipe in a folder of its own (--runs)."
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
    figures, held_out, probes = (
        read_json(folder / "metrics.json"),
        read_log(folder, "held_out"),
        read_log(folder, "probe"),
    )
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


# ---- comparisons ----


def first_step_at(curve: dict[str, list[float]], target: float) -> int | None:
    """The first evaluated step with at most the target loss; `None` if it was not reached."""
    return next((step for step, loss in zip(curve["step"], curve["loss"], strict=True) if loss <= target), None)


def of_system(runs: list[Run], system: str) -> dict[int, Run]:
    """The runs of a system by seed."""
    return {run["seed"]: run for run in runs if run["system"] == system}


def pairs(runs: list[Run], first: str, second: str) -> list[tuple[int, Run, Run]]:
    """Seed and runs of two systems for every common seed: the same rows in the same order with the same masks."""
    left, right = of_system(runs, first), of_system(runs, second)
    return [(seed, left[seed], right[seed]) for seed in sorted(left.keys() & right.keys())]


def differences(runs: list[Run], first: str, second: str) -> list[dict[str, Any]]:
    """Loss of the first system minus that of the second at every quarter of the steps, for every common seed."""
    found = []
    for seed, left, right in pairs(runs, first, second):
        steps, last = left["curve"]["step"], left["curve"]["step"][-1]
        quarters = [max((i for i, step in enumerate(steps) if step <= last * n / 4), default=0) for n in (1, 2, 3, 4)]
        losses = [(left["curve"]["loss"][i], right["curve"]["loss"][i]) for i in quarters]
        found.append(
            {
                "seed": seed,
                "steps": [steps[i] for i in quarters],
                "nats": [ours - theirs for ours, theirs in losses],
                "relative": [ours / theirs - 1 for ours, theirs in losses],
            }
        )
    return found


def conclude(runs: list[Run]) -> dict[str, Any]:
    """The comparisons that the study is about, each with its expectation if there was one."""
    reached = []
    for seed, ours, theirs in pairs(runs, "luna-conv", "roberta"):
        step = first_step_at(ours["curve"], theirs["final_loss"])
        share = None if step is None else step / theirs["curve"]["step"][-1]
        reached.append({"seed": seed, "target": theirs["final_loss"], "step": step, "share": share})
    softmax = differences(runs, "luna-conv", "roberta-conv")
    losses = {run["system"]: [r["final_loss"] for r in of_system(runs, run["system"]).values()] for run in runs}
    return {
        "roberta_gain": [run["unigram_loss"] - run["final_loss"] for run in of_system(runs, "roberta").values()],
        "luna_conv_reaches_roberta": {
            "expected_share": STEP_SHARE,
            "holds": bool(reached) and all(row["share"] is not None and row["share"] <= STEP_SHARE for row in reached),
            "seeds": reached,
        },
        "luna_conv_against_roberta_conv": {
            "expected_relative": RELATIVE_LOSS,
            "holds": bool(softmax) and all(row["relative"][-1] <= RELATIVE_LOSS for row in softmax),
            "seeds": softmax,
        },
        "luna_conv_against_one_slot": {"seeds": differences(runs, "luna-conv", "luna-conv-1")},
        "roberta_conv_against_one_slot": {"seeds": differences(runs, "roberta-conv", "luna-conv-1")},
        "seed_spread": {system: max(values) - min(values) for system, values in losses.items() if len(values) > 1},
    }


# ---- Markdown ----


def text(result: dict[str, Any]) -> str:
    """Table and conclusions of a result file."""
    return f"{table(result['runs'], list(result['systems']))}\n\n{sentences(result['conclusions'])}"


def table(runs: list[Run], order: list[str]) -> str:
    """One row for each system: means over the seeds, with the extremes where there are several."""
    plain = of_system(runs, "roberta")
    rows = [
        "| system | parameters | seeds | final loss | below unigram (nats) | accuracy | steps to plain RoBERTa's "
        "final loss (share) | tokens/s | pack entropy | unpack entropy | slot similarity |",
        "| --- " * 11 + "|",
    ]
    for system in order:
        own = list(of_system(runs, system).values())
        if not own:
            continue
        shares = [first_step_at(run["curve"], plain[run["seed"]]["final_loss"]) for run in own if run["seed"] in plain]
        total = own[0]["curve"]["step"][-1]
        cells = [
            system,
            f"{own[0]['parameters']:,}",
            ", ".join(str(run["seed"]) for run in own),
            spread([run["final_loss"] for run in own], 3),
            spread([run["unigram_loss"] - run["final_loss"] for run in own], 2),
            spread([100 * run["curve"]["accuracy"][-1] for run in own], 1) + " %",
            ", ".join("not reached" if step is None else f"{step:,} ({step / total:.2f})" for step in shares) or "-",
            f"{statistics.mean(run['tokens_per_second'] for run in own):,.0f}",
            *(layers(own[0]["probe"], name) for name in ("pack_entropy", "unpack_entropy", "slot_similarity")),
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


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


def sentences(conclusions: dict[str, Any]) -> str:
    """The conclusions in words, one line each."""
    lines = []
    reached = conclusions["luna_conv_reaches_roberta"]
    for row in reached["seeds"]:
        reaches = "does not reach" if row["step"] is None else "reaches"
        when = "" if row["step"] is None else f" at step {row['step']:,}, {row['share']:.2f} of its steps"
        target = f"plain RoBERTa's final loss of {row['target']:.3f}"
        lines.append(f"* Seed {row['seed']}: luna-conv {reaches} {target}{when}.")
    lines.append(f"  Expected: at most {reached['expected_share']}. {_holds(reached)}")
    softmax = conclusions["luna_conv_against_roberta_conv"]
    lines += _quarters(softmax["seeds"], "luna-conv", "roberta-conv")
    lines.append(f"  Expected at the end: at most {softmax['expected_relative']:+.0%}. {_holds(softmax)}")
    lines += _quarters(conclusions["luna_conv_against_one_slot"]["seeds"], "luna-conv", "luna-conv-1")
    lines += _quarters(conclusions["roberta_conv_against_one_slot"]["seeds"], "roberta-conv", "luna-conv-1")
    if spreads := conclusions["seed_spread"]:
        values = ", ".join(f"{system} {value:.3f}" for system, value in spreads.items())
        lines.append(f"* Largest difference between the seeds of a system (nats): {values}.")
    return "\n".join(lines)


def _holds(conclusion: dict[str, Any]) -> str:
    return "It holds." if conclusion["holds"] else "It does not hold." if conclusion["seeds"] else "Not measured."


def _quarters(rows: list[dict[str, Any]], first: str, second: str) -> list[str]:
    lines = []
    for row in rows:
        values = zip(row["steps"], row["nats"], row["relative"], strict=True)
        steps = ", ".join(f"{step:,}: {nats:+.3f} ({relative:+.1%})" for step, nats, relative in values)
        lines.append(f"* Seed {row['seed']}: loss of {first} minus loss of {second} at step {steps}.")
    return lines
