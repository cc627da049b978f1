"""Write the measured tables of README.md and docs/ from the committed results, and the tables of docs/reference.

    python benchmarks/update_docs.py
    python benchmarks/update_docs.py --pictures     draws the pictures of benchmarks

A page marks the place of a table with a `begin` and an `end` comment that carry its name, and `BLOCKS` maps the name to
the function that writes it. Nothing is measured here: the same results always give the same pages and pictures.
"""

import argparse
import functools
import importlib
import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import reference_tables
import summaries
from plots import plot

from luna_hf.scripting import markdown_table

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
MARKER = re.compile(r"(<!-- begin ([\w-]+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)
PICTURE = re.compile(r"!\[[^\]]*\]\((?:\.\./)*(benchmarks/results/[^)]+)\.png\)")
LABELS = {
    "roberta": "RoBERTa",
    "roberta-eager": "unfused RoBERTa",
    "modernbert": "ModernBERT",
    "luna-untied": "Luna, untied",
    "luna-tied": "Luna, tied",
    "luna-untied-per-4": "Luna, untied, 4 tokens per slot",
    "luna-tied-per-4": "Luna, tied, 4 tokens per slot",
    "luna-untied-per-8": "Luna, untied, 8 tokens per slot",
    "luna-tied-per-8": "Luna, tied, 8 tokens per slot",
    "luna-16": "Luna, tied, 16 slots",
    "abc-mlp-16": "ABC, 16 slots",
    "abc-mlp-64": "ABC, 64 slots",
    "abc-mlp-128": "ABC, 128 slots",
    "leapformer": "LeaPformer",
    "cosformer": "cosFormer",
    "linear-attention": "linear attention",
    "lavo-64": "LAVO, 64 bases, window of 64",
    "scan": "the scan alone",
    "luna": "Luna",
    "abc": "ABC",
    "lavo": "LAVO",
    "linear": "linear attention",
    "sdpa": "fused softmax attention",
    "eager": "unfused softmax attention",
    "luna-64": "Luna, 64 slots",
    "luna-mixed-64": "Luna, 64 slots, window of 32",
    "abc-mixed-64": "ABC, 64 slots, window of 32",
    "abc-window-64": "ABC, window of 64",
    "gpt2": "GPT-2",
    "gpt2-static": "GPT-2 with `StaticCache`",
    "sst2": "SST-2",
    "mrpc": "MRPC",
    "imdb": "IMDB",
    "together": "all three",
    "full": "equal lengths",
}
Result = dict[str, Any]
Column = tuple[str, str]  # a model, and what of it: a key of `FIGURES`, or "speed PEER", "memory PEER"

# ---- results ----


def find(name: str, suffix: str = ".json") -> Path:
    """The committed file of a result, whatever its version of torch if its name has one."""
    (path,) = [*ROOT.glob(f"*/results/{name}-torch*{suffix}"), *ROOT.glob(f"experiments/results/{name}{suffix}")]
    return path


@functools.cache
def load(name: str) -> Result:
    """A committed result."""
    return json.loads(find(name).read_text(encoding="utf-8"))


def span(values: Iterable[float], digits: int) -> str:
    """The smallest and the largest of some values."""
    values = list(values)
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def machine(result: Result) -> str:
    """Hardware and versions of a result."""
    if "hardware" in result:  # of the commands in training/, in words
        versions = re.findall(r"(?:torch|transformers) [^,]+", result["versions"])
        return f"{result['hardware'].replace('1 thread(s)', '1 thread').replace('(s)', 's')}; {', '.join(versions)}"
    own, versions = result["machine"], result["versions"]
    hardware = f"{own['cpu']} with {own['cpu_capability']}, {own['threads']} thread, {own['cores']} cores"
    return f"{hardware}; torch {versions['torch']}, transformers {versions['transformers']}; {result['date']}"


def ratios(entry: Any) -> Iterable[dict[str, Any]]:
    """Every ratio below an entry of a result, as its summary over the rounds."""
    if isinstance(entry, dict) and "quartiles" in entry:
        yield entry
    elif isinstance(entry, dict):
        for key, item in entry.items():
            yield from ratios(item) if key != "seconds" else ()


def spread(result: Result) -> str:
    """How far the quartiles of the rounds lie from their median, for a typical ratio and for the worst."""
    found = [ratio for row in result["lengths"] for ratio in ratios(row)]
    shares = [
        max(abs(quartile - ratio["median"]) for quartile in ratio["quartiles"]) / ratio["median"] for ratio in found
    ]
    numbers = sorted({len(ratio["rounds"]) for ratio in found})
    many = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else numbers[0]
    return (
        f"medians of {many} rounds; a typical ratio has its quartiles within "
        f"{statistics.median(shares):.0%} of its median, the noisiest within {max(shares):.0%}"
    )


def source(name: str) -> str:
    """Machine, versions, date and spread, with a link to the result, which has the commands."""
    result, path = load(name), find(name).relative_to(ROOT).as_posix()
    noise = f"; {spread(result)}" if "lengths" in result else ""
    return f"Measured on {machine(result)}{noise}. [Commands and data](../{path})"


def with_source(text: str, *names: str) -> str:
    """A text with the source of the results that it shows."""
    sources = "\n\n".join(map(source, names))
    return f"{text}\n\n{sources}"


# ---- tables ----

FIGURES: dict[str, Callable[[Result], str]] = {
    "MiB": lambda model: f"{model['peak_memory_bytes'] / 2**20:,.0f}",
    "ms": lambda model: f"{1e3 * model['seconds']['median']:,.1f}",
    "state, MiB": lambda model: f"{model['state_bytes'] / 2**20:,.1f}" if "state_bytes" in model else "-",
    "MiB in all": lambda model: f"{(model['held_bytes'] + model['peak_memory_bytes']) / 2**20:,.0f}",
    "padded / full": lambda model: (
        f"{model['padded_over_unpadded']['median']:.2f} ({span(model['padded_over_unpadded']['quartiles'], 2)})"
    ),
}


def figure(models: Result, name: str, what: str) -> str:
    """One cell: of a model at one length, one of `FIGURES`, or its speed or memory relative to a peer's."""
    if what in FIGURES:
        return FIGURES[what](models[name])
    value = summaries.figure(models, name, what)
    return "-" if value is None else f"{value:.2f}"


def title(what: str) -> str:
    """A figure in the head of a table."""
    kind, _, peer = what.partition(" ")
    return f"{kind} / {LABELS[peer]}" if peer in LABELS else what


def by_length(name: str, columns: Sequence[Column], lengths: Sequence[int] = ()) -> str:
    """A row for every length of a result, with figures of several models."""
    header = [f"{LABELS.get(model, model)}, {title(what)}" for model, what in columns]
    header = [re.sub(r", speed / ", " / ", text) for text in header]
    rows = [
        [f"{row['length']:,}", *(figure(row["models"], *column) for column in columns)]
        for row in load(name)["lengths"]
        if not lengths or row["length"] in lengths
    ]
    return markdown_table(["tokens", *header], rows)


def by_model(results: dict[str, str], columns: Sequence[str], models: Sequence[str] = ()) -> str:
    """A row for every length and model of results that have a label; by default, of the models that have ratios."""
    rows = []
    for name, label in results.items():
        for row in load(name)["lengths"]:
            own = [one for one in row["models"] if one in models or (not models and one not in load(name)["peers"])]
            where = [label, f"{row['rows']} x {row['length']:,}"]
            held = {one: {**load(name)["models"][one], **row["models"][one]} for one in row["models"]}
            rows += [[*where, LABELS.get(one, one), *(figure(held, one, each) for each in columns)] for one in own]
    return with_source(markdown_table(["", "tokens", "model", *map(title, columns)], rows), *results)


def across(name: str, figures: dict[str, str]) -> str:
    """A table for every figure, under its title: a row for every call and model, a column for every length or mix."""
    entries = load(name)["lengths"]
    calls = list(dict.fromkeys(entry["call"] for entry in entries))
    tables = []
    for heading, what in figures.items():
        rows, places = [], [str(entry.get("mix") or f"{entry['length']:,}") for entry in entries]
        for call in calls:
            found = [entry["models"] for entry in entries if entry["call"] == call]
            for one in found[0]:
                cells = [figure(models, one, what) for models in found]
                if set(cells) != {"-"}:
                    rows.append([*([call] if len(calls) > 1 else []), LABELS.get(one, one), *cells])
        columns = [LABELS.get(place, place) for place in dict.fromkeys(places)]
        head = ["call"] if len(calls) > 1 else []
        tables.append(f"{heading}:\n\n{markdown_table([*head, 'model', *columns], rows)}")
    return with_source("\n\n".join(tables), name)


def growth(name: str, models: Sequence[str]) -> str:
    """The exponents of the growth of time."""
    found = summaries.growth(load(name), within=(2048, 16384))
    lengths = [entry["length"] for entry in load(name)["lengths"] if 2048 <= entry["length"] <= 16384]
    powers = [f"{LABELS[one]} {found[one]['median']:.2f} ({span(found[one]['rounds'], 2)})" for one in models]
    return (
        f"Exponent of the growth of time from {lengths[0]:,} to {lengths[-1]:,} tokens (1 is linear, 2 is quadratic; "
        f"range over the rounds in brackets): {'; '.join(powers)}."
    )


def over(name: str, peers: Sequence[str], own: Sequence[str] = (), memory: bool = True, exponents: bool = True) -> str:
    """Speed over peers and memory of the models of a result by length, and the growth of their time."""
    models = own or [model for model in load(name)["models"] if model not in load(name)["peers"]]
    columns = [(model, f"speed {peer}") for peer in peers for model in models]
    columns += [(model, "MiB") for model in (*models, *peers)] if memory else []
    text = by_length(name, columns)
    return with_source(f"{text}\n\n{growth(name, models)}" if exponents else text, name)


def by_name(name: str, peer: str) -> str:
    """A row for every model of a result, with its speed over a peer by length."""
    entries = load(name)["lengths"]
    models = [model for model in entries[0]["models"] if model != peer]
    rows = [[f"`{one}`", *(figure(entry["models"], one, f"speed {peer}") for entry in entries)] for one in models]
    return with_source(markdown_table(["model", *(f"{entry['length']:,}" for entry in entries)], rows), name)


def front() -> str:
    """The short table of README.md."""
    name, peers = ENCODER + "3-layer-luna-cpu-float32", ("roberta", "modernbert")
    columns = [*(("luna-tied", f"speed {peer}") for peer in peers), *((one, "MiB") for one in ("luna-tied", *peers))]
    table = by_length(name, columns, (128, 512, 2048, 8192)).replace(LABELS["luna-tied"], "Luna")
    return f"{table}\n\nMeasured on {machine(load(name))}: {spread(load(name))}."


def timed(name: str) -> str:
    """The table that a benchmark prints."""
    return with_source(summaries.table(load(name)), name)


def deployment(name: str) -> str:
    """The table of ways to run a model; its benchmark imports what takes seconds."""
    return with_source(importlib.import_module("deployment").markdown(load(name)), name)


def report(name: str) -> str:
    """The Markdown that a command wrote beside its JSON file."""
    return with_source(find(name, ".md").read_text(encoding="utf-8").strip(), name)


ENCODER = "encoder-forward-"
DECODING = {
    "Time of a step in ms": "ms",
    "Speed over GPT-2 with `DynamicCache`": "speed gpt2",
    "Speed over GPT-2 with `StaticCache`": "speed gpt2-static",
    "State in MiB": "state, MiB",
}
LUNAS, PEERS = ("luna-untied", "luna-tied"), ("roberta", "modernbert")
BLOCKS: dict[str, Callable[[], str]] = {
    "speed": front,
    "encoder": partial(over, ENCODER + "3-layer-luna-cpu-float32", PEERS, LUNAS),
    "whole": partial(
        by_model,
        {
            ENCODER + "base-chosen-cpu-float32": "forward",
            "encoder-mlm_step-base-chosen-cpu-float32": "training step",
        },
        ("speed roberta", "speed modernbert", "MiB in all"),
        ("luna-tied", *PEERS),
    ),
    "abc": partial(over, ENCODER + "1-layer-abc-cpu-float32", ["roberta"]),
    "few": partial(over, ENCODER + "1-layer-few-cpu-float32", ["roberta"]),
    "few-bfloat16": partial(over, ENCODER + "1-layer-few-cpu-bfloat16", ["roberta"]),
    "few-modernbert": partial(over, ENCODER + "3-layer-chosen-cpu-float32", PEERS, exponents=False),
    "short": partial(over, ENCODER + "1-layer-short-cpu-float32", ["roberta"], memory=False, exponents=False),
    "range": partial(over, ENCODER + "1-layer-chosen-cpu-float32", ["roberta"]),
    "families": partial(over, ENCODER + "1-layer-families-cpu-float32", ["roberta"]),
    "controls": partial(by_name, ENCODER + "1-layer-controls-cpu-float32", "roberta"),
    "training-step": partial(
        by_model,
        {
            "encoder-mlm_step-3-layer-luna-cpu-float32": "3 layers",
            "encoder-mlm_step-4-layer-abc-cpu-float32": "4 layers",
        },
        ("speed roberta", "speed modernbert"),
    ),
    "class-step": partial(
        by_model,
        {
            "encoder-class_step-base-chosen-cpu-float32": "default",
            "encoder-class_step-base-checkpointing-chosen-cpu-float32": "checkpointing",
        },
        ("MiB", "speed roberta", "memory roberta"),
        ("roberta", *LUNAS, "abc-mlp-64"),
    ),
    "bfloat16": partial(
        by_model,
        {ENCODER + "1-layer-cpu-bfloat16": "emulated", ENCODER + "1-layer-abc-cpu-bfloat16": "native"},
        ["speed roberta"],
    ),
    "padding": partial(
        by_model,
        {
            ENCODER + "2-layer-padding-cpu-float32": "AVX2",
            ENCODER + "2-layer-padding-abc-cpu-float32": "AVX512",
        },
        ["padded / full"],
    ),
    "abc-paper": partial(
        by_model,
        {ENCODER + "1-layer-eager-cpu-float32": ""},
        ("speed roberta-eager", "speed roberta", "memory roberta-eager", "memory roberta"),
        ("abc-mlp-64", "abc-mlp-128"),
    ),
    "deployment": lambda: deployment("deployment-cpu-float32"),
    "windowed": partial(by_name, ENCODER + "6-layer-windowed-cpu-float32", "bert"),
    "windowed-bfloat16": partial(by_name, ENCODER + "6-layer-windowed-cpu-bfloat16", "bert"),
    "attention": partial(
        across,
        "attention-12-heads-of-64-cpu-float32",
        {"Speed over fused attention": "speed sdpa", "Speed over unfused attention": "speed eager"},
    ),
    "causal": partial(
        across,
        "attention-causal-cpu-float32",
        {"Speed over fused softmax attention": "speed sdpa", "Time in ms": "ms", "Peak memory in MiB": "MiB"},
    ),
    "generation": partial(across, "generation-decoding-4-layer-cpu-float32", DECODING),
    "generation-rows": partial(across, "generation-decoding-4-layer-4-rows-cpu-float32", DECODING),
    "serving": partial(across, "uneven-pipeline-encode-cpu-float32", {"Speed over RoBERTa": "speed roberta"}),
    "uneven": partial(
        across,
        "uneven-forward-finetune-cpu-float32",
        {"Speed over RoBERTa": "speed roberta", "Speed over the same model with padding computed": "speed padded"},
    ),
    **{
        name: partial(timed, result)
        for name, result in {
            "causal-training": "generation-training-4-layer-cpu-float32",
            "seq2seq-generation": "generation-translation-4-layer-cpu-float32",
        }.items()
    },
    **{
        name: partial(report, result)
        for name, result in {
            "guarantees": "guarantees-cpu-float32",
            "lra": "lra-short-cpu-bfloat16",
            "minilm": "minilm",
            "minilm-cost": "minilm_cost",
            "minilm-finetune": "minilm_finetune",
            "multi30k": "translation-multi30k-cpu-float32",
            "perplexity": "perplexity-enwiki-cpu-float32",
            "simultaneous": "simultaneous-multi30k-cpu-float32",
            "summaries": "summaries-cpu-bfloat16",
            "teacher": "teacher",
        }.items()
    },
    **reference_tables.BLOCKS,
}

# ---- pages and pictures ----


def render(page: str, path: Path) -> str:
    """A page with its marked tables written anew, and their links relative to its path.

    Raises:
        KeyError: The page marks a table that does not exist.
    """
    up = "../" * len(path.relative_to(ROOT).parent.parts)
    return MARKER.sub(lambda match: f"{match[1]}{BLOCKS[match[2]]().replace('](../', f']({up}')}\n{match[3]}", page)


def pictures() -> list[Path]:
    """The pictures of benchmarks that the pages show, without their endings."""
    shown = {ROOT / name for path in PAGES for name in PICTURE.findall(path.read_text(encoding="utf-8"))}
    return sorted(path for path in shown if not path.name.startswith("lra-"))  # by lra/report.py


def main() -> None:
    """Rewrite the pages, or draw the pictures that they show."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pictures", action="store_true", help="draw the pictures instead")
    if parser.parse_args().pictures:
        for path in pictures():
            result = json.loads(path.with_name(f"{path.name}.json").read_text(encoding="utf-8"))
            plot(result, path.with_name(f"{path.name}.png"))
        return
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        if (new := render(page, path)) != page:
            path.write_text(new, encoding="utf-8")
            print(f"updated {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
