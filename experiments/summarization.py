"""Summaries of long documents: every family and softmax attention from scratch, and a converted encoder, by length.

    python experiments/summarization.py run --data DATA
    python experiments/summarization.py cost
    python experiments/summarization.py report

`run` trains every system at every length of the source by `training/train_translation.py`, and scores it on the
validation split; finished runs are skipped. DATA has the folders `scisummnet` (papers, sentences that cite them, and
summaries) and `wiki_lead` (articles and their first paragraphs). `cost` measures time and memory with random weights.
`report` writes JSON, tables and a plot; published runs of the same recipe stay unless they have been repeated. Options
that are not listed here, `--key value`, override those of the training command; they hold for every system. Runs with
another `--max_steps` have rows of their own in the tables, and need a folder of their own (`--runs`).
"""

import argparse
import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from running import (
    ROOT,
    describe,
    finished_runs,
    keep_published,
    launch,
    make_parser,
    option_words,
    publish,
    read_json,
    run_study,
    shared_fields,
)

# isort: split
import measuring
import pandas
import summarization_cost
from multi30k import score_cell
from plots import panels, plain, save
from translation.scores import METRICS, rouge

from luna_hf.scripting import UserError, markdown_table, progress, write_json

SCRIPT, SUBJECT = "experiments/summarization.py", "summaries"
RECIPES = ROOT / "training" / "recipes" / "train_translation"
LENGTHS = (512, 1024, 2048, 4096)
# Source lengths of each task; the articles have at most about 1,000 tokens.
TASKS = {"scisummnet": LENGTHS, "wiki_lead": LENGTHS[:2]}
# Beyond, nothing is read at any length; longer summaries do not fit into the shortest one and are left out.
DOCUMENT_WORDS, SUMMARY_WORDS = max(LENGTHS), 300
# Systems: what the tables call them, the recipe, and what differs from it. As in `multi30k.py`, softmax attention is
# Pegasus: pre-norm, with sinusoidal positions.
SYSTEMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "softmax": (
        "softmax attention (Pegasus)",
        "lavo",
        {
            "model.model_type": "pegasus",
            **{"model.d_model": 128, "model.encoder_layers": 4, "model.scale_embedding": True},
            **{f"model.{part}_attention_heads": 4 for part in ("encoder", "decoder")},
            **{f"model.{part}_ffn_dim": 256 for part in ("encoder", "decoder")},
            **{"model.activation_function": "relu", "model.init_std": 0.0884},
        },
    ),
    "lavo": ("LAVO, 64 bases and a window", "lavo", {}),
    "abc": ("ABC, 64 slots and a window", "lavo", {"model.model_type": "abc_memory", "model.memory_size": 64}),
    "luna": (
        "Luna, 64 slots and a window",
        "lavo",
        {"model.model_type": "luna", "model.projection_length": 64, "model.tie_kv": False},
    ),
    "leapformer": ("LeaPformer", "lavo", {"model.model_type": "leapformer", "model.local_window": 0}),
    "minilm": (
        "Luna from a converted MiniLM",
        "minilm",
        {"initial_encoder": ROOT / "checkpoints" / "luna-minilm-en-4096", "learning_rate": 1e-3},
    ),
}
# Documents in an update, and a budget for a CPU.
DOCUMENTS = 2
SETTING = {
    **{"vocab_size": 8000, "test_split": "", "max_steps": 500, "warmup_steps": 100, "learning_rate": 3e-3},
    **{"eval_steps": 250, "save_steps": 50, "log_steps": 20, "average_checkpoints": 3, "save_total_limit": 3},
    **{"num_beams": 1, "max_new_tokens": 200, "eval_batch_size": 10},
}
OWN = (
    *("model", "model_name", "output_dir", "data", "seed", "max_length", "batch_tokens", "initial_encoder"),
    *("max_steps", "warmup_steps", "learning_rate", "eval_steps", "save_steps"),
)
PROTOCOL = (
    f"A source is its first tokens up to the length; an update has about {DOCUMENTS} documents. ROUGE is F x 100 with "
    f"stemmer, on the validation split; pairs with a summary of more than {SUMMARY_WORDS} words are left out."
)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line; unknown options are overrides."""
    parser = make_parser(__doc__, COMMANDS, "outputs/summaries")
    add = parser.add_argument
    add("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="default: all")
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="default: all")
    add("--lengths", nargs="+", type=measuring.positive, default=list(LENGTHS), help="of sources (default: all)")
    add("--seeds", type=int, nargs="+", default=[0], help="default: 0")
    options, options.overrides = parser.parse_known_args(arguments)
    return options


# ---- training ----


def prepare(data: Path, task: str, folder: Path) -> None:
    """Write the tables `train` and `validation` of a task with the columns document and summary.

    Raises:
        UserError: There is no such data.
    """
    for split in ("train", "validation"):
        path, source = folder / f"{split}.jsonl", data / task / f"{split}.parquet"
        if path.is_file():
            continue
        if not source.is_file():
            raise UserError(f"There is no file {source}. Name the folder that holds {task} with --data.")
        rows = []
        for row in pandas.read_parquet(source).to_dict("records"):
            parts = [row.get("abstract", ""), *row.get("citations", ()), row["document"]]
            words = re.findall(r"\S+\s*", "\n".join(parts))[:DOCUMENT_WORDS]
            rows.append({"document": "".join(words), "summary": row["summary"]})
        kept = [row for row in rows if len(row["summary"].split()) <= SUMMARY_WORDS]
        progress(f"{task}, {split}: {len(kept)} of {len(rows)} pairs")
        folder.mkdir(parents=True, exist_ok=True)
        pandas.DataFrame(kept).to_json(path, orient="records", lines=True)


def recipe_words(system: str, length: int, **values: Any) -> list[str]:
    """The words of the training command for a system and a length of the source."""
    _, recipe, changes = SYSTEMS[system]
    values = {**SETTING, "max_length": length, "batch_tokens": DOCUMENTS * length, **changes, **values}
    return [str(RECIPES / f"summarize_{recipe}.yaml"), *option_words(values)]


def run(options: argparse.Namespace) -> None:
    """Train every system on every task at every length, seed by seed, unless that is done."""
    cells = itertools.product(options.tasks, options.lengths, options.seeds, options.systems)
    for task, length, seed, system in cells:
        name = f"{system}-{task}-{length}-seed{seed}"
        folder, tables = options.runs / "train" / name, options.runs / "data" / task
        if length > max(TASKS[task]) or (folder / "run.json").exists():
            continue
        progress(name)
        prepare(options.data, task, tables)
        own = {"data": tables, "model_name": name, "output_dir": folder, "seed": seed}
        words = [*recipe_words(system, length, **own), *options.overrides]
        launch("training/train_translation.py", words, options.threads)
        if not (folder / "metrics.json").is_file():
            raise KeyboardInterrupt
        describe(options, folder, system=system, task=task, length=length, seed=seed)


# ---- cost ----


def cost(options: argparse.Namespace) -> None:
    """Measure time and memory of every system at every length."""
    path = options.runs / "cost.json"
    options.runs.mkdir(parents=True, exist_ok=True)
    rows = read_json(path)["rows"] if path.is_file() else []
    measured = {(row["system"], row["length"]) for row in rows}
    for length, system in itertools.product(options.lengths, options.systems):
        if (system, length) in measured:
            continue
        words = [*recipe_words(system, length), *options.overrides]
        figures = measuring.in_own_process(summarization_cost.measure_cell, words, length, options.threads)
        rows.append({"system": system, "length": length, **figures})
        write_json(path, {**options.header, "protocol": summarization_cost.PROTOCOL, "rows": rows})
        progress(f"{system}, {length}: {figures}")


# ---- report ----


def report(options: argparse.Namespace) -> None:
    """Write scores and costs."""
    found = finished_runs(options.runs, "train", f"{Path(SCRIPT).name} run")
    result = {**shared_fields(SCRIPT, [run for _, run in found], OWN), "protocol": PROTOCOL}
    about = {run["task"]: None for _, run in found}
    about = {task: describe_task(options.runs / "data" / task) for task in about}
    result["runs"] = [entry(path, run) | {"data": about[run["task"]]} for path, run in found]
    path = options.runs / "cost.json"
    result["cost"] = read_json(path) if path.is_file() else None
    keep_published(result, options.results, SUBJECT, cell)
    publish(options.results, SUBJECT, result["recipe"]["mixed_precision"], result, text, {"": plot})


def cell(run: dict[str, Any]) -> tuple[int, ...]:
    """What identifies a run, in the order of the table."""
    places = list(TASKS).index(run["task"]), list(SYSTEMS).index(run["system"])
    return (*places, run["max_steps"], run["length"], run["seed"])


def describe_task(folder: Path) -> dict[str, Any]:
    """Number of pairs of a task, and the scores of the first three sentences of the documents."""
    tables = {split: pandas.read_json(folder / f"{split}.jsonl", lines=True) for split in ("train", "validation")}
    leads = [" ".join(re.split(r"(?<=[.!?])\s+", text.strip())[:3]) for text in tables["validation"]["document"]]
    scores = rouge(leads, list(tables["validation"]["summary"]))
    return {**{split: len(table) for split, table in tables.items()}, "lead": values(scores)}


def values(scores: dict[str, Any]) -> dict[str, float]:
    """ROUGE by name."""
    return {name: scores[name]["score"] for name in METRICS["summarization"]}


def entry(folder: Path, run: dict[str, Any]) -> dict[str, Any]:
    """A run in the result file."""
    figures = read_json(folder / "metrics.json")
    own = {name: run[name] for name in ("task", "system", "length", "seed")}
    own |= {name: figures[name] for name in ("parameters", "training_seconds", "held_out_loss", "unigram_loss")}
    own |= {name: run["recipe"][name] for name in ("max_steps", "learning_rate")}
    sample = figures["validation"]["samples"][0]["translation"]
    return {**own, "scores": values(figures["validation"]), "sample": sample}


def by_task(result: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The runs of each task."""
    return {task: list(runs) for task, runs in itertools.groupby(result["runs"], lambda run: run["task"])}


def by_system(runs: list[dict[str, Any]]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """The runs of each system and number of updates."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["system"], run["max_steps"]), []).append(run)
    return groups


def text(result: dict[str, Any]) -> str:
    """For each task a row for each system and number of updates, with its scores by length; and the cost."""
    parts = []
    for task, runs in by_task(result).items():
        about = runs[0]["data"]
        lengths = sorted({run["length"] for run in runs})
        lead = " / ".join(f"{score:.1f}" for score in about["lead"].values())
        rows = [["first three sentences", "-", "-", "-", *[lead] * len(lengths)]]
        for (system, updates), own in by_system(runs).items():
            cells = [SYSTEMS[system][0], f"{own[0]['parameters'] / 1e6:.1f} M", f"{updates:,}"]
            cells.append(str(len({run["seed"] for run in own})))
            for length in lengths:
                scores = [run["scores"] for run in own if run["length"] == length]
                columns = [[one[name] for one in scores] for name in METRICS["summarization"]]
                cells.append(" / ".join(map(score_cell, columns)) if scores else "-")
            rows.append(cells)
        header = ["", "parameters", "updates", "seeds", *(f"{length:,} tokens" for length in lengths)]
        about = f"{about['train']:,} documents to train on, {about['validation']:,} scored"
        parts.append(f"{task}, {about}; ROUGE-1 / 2 / L:\n\n{markdown_table(header, rows)}")
    if result["cost"]:
        names = {system: name for system, (name, *_) in SYSTEMS.items()}
        parts.append(summarization_cost.cost_text(result["cost"]["rows"], names))
    return "\n\n".join(parts)


def plot(result: dict[str, Any], path: Path) -> None:
    """Seconds of an update and of generating, by the length of the source; nothing without costs."""
    if not result["cost"]:
        return
    titles = {"update_seconds": "an update", "generate_seconds": f"generating {summarization_cost.GENERATED} tokens"}
    figure, axes = panels(1, len(titles), (12, 4.4))
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        for index, system in enumerate(SYSTEMS):
            own = [row for row in result["cost"]["rows"] if row["system"] == system]
            style = {"color": "black", "linestyle": "--"} if system == "softmax" else {"color": f"C{index}"}
            lengths, seconds = ([row[column] for row in own] for column in ("length", name))
            axis.plot(lengths, seconds, marker="o", label=SYSTEMS[system][0], **style)
        axis.set_title(title)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("tokens of the source")
        plain(axis)
    axes[0].set_ylabel("seconds")
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, ncols=3, loc="outside lower center")
    save(figure, path)


COMMANDS = {"run": run, "cost": cost, "report": report}


def main(arguments: Sequence[str]) -> int:
    """Run one of the commands and return the exit status."""
    return run_study(SCRIPT, parse, COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
