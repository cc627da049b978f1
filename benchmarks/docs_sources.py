"""Where the measured tables of the documentation come from: the committed results, their commands and machines."""

import functools
import json
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from luna_hf.scripting import markdown_table

ROOT = Path(__file__).resolve().parents[1]
# What the command of a result took on its machine while that was quiet.
MINUTES = {
    "encoder-forward-3-layer-luna-cpu-float32": 7,
    "encoder-forward-base-chosen-cpu-float32": 17,
    "encoder-mlm_step-base-chosen-cpu-float32": 2,
    "encoder-forward-1-layer-abc-cpu-float32": 5,
    "encoder-forward-1-layer-eager-cpu-float32": 1,
    "encoder-forward-1-layer-controls-cpu-float32": 8,
    "encoder-forward-1-layer-cpu-bfloat16": 5,
    "encoder-forward-1-layer-abc-cpu-bfloat16": 1,
    "encoder-forward-2-layer-padding-cpu-float32": 5,
    "encoder-forward-2-layer-padding-abc-cpu-float32": 2,
    "encoder-mlm_step-3-layer-luna-cpu-float32": 1,
    "encoder-mlm_step-4-layer-abc-cpu-float32": 3,
    "causal-attention-cpu-float32": 8,
    "causal_training-4-layer-cpu-float32": 4,
    "generation-4-layer-cpu-float32": 6,
    "generation-4-layer-4-rows-cpu-float32": 8,
    "guarantees-cpu-float32": 1,
    "demo-cpu-float32": 5,
    "clm-demo-cpu-float32": 3,
    "perplexity-enwiki-cpu-float32": 7,
}
# Results whose contenders were timed in turn, in rounds.
_INTERLEAVED = (
    "attention",
    "causal",
    "deployment",
    "encoder",
    "generation",
    "lra-cost",
    "seq2seq",
    "serving",
    "uneven",
    "windowed",
)
Result = dict[str, Any]


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
    versions = result["versions"]
    if "hardware" in result:
        versions = dict(part.rsplit(" ", 1) for part in versions.split(", "))
        hardware = re.sub(r"\b1 (\w+)\(s\)", r"1 \1", result["hardware"]).replace("(s)", "s")
    else:
        own = result["machine"]
        hardware = f"{own['cpu']} with {own['cpu_capability']}, {own['threads']} thread, {own['cores']} cores"
    return f"{hardware}; torch {versions['torch']}, transformers {versions['transformers']}"


def _ratios(entry: Any) -> Iterable[dict[str, Any]]:
    """Every ratio below an entry of a result, as its summary over the rounds."""
    if isinstance(entry, dict) and "quartiles" in entry:
        yield entry
    elif isinstance(entry, dict):
        for key, item in entry.items():
            yield from _ratios(item) if key != "seconds" else ()


def spread(name: str) -> str:
    """How far the quartiles of the rounds lie from their median, for a typical ratio and for the worst."""
    ratios = [ratio for row in load(name)["lengths"] for ratio in _ratios(row)]
    shares = [
        max(abs(quartile - ratio["median"]) for quartile in ratio["quartiles"]) / ratio["median"] for ratio in ratios
    ]
    numbers = sorted({len(ratio["rounds"]) for ratio in ratios})
    many = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else numbers[0]
    return (
        f"medians of {many} rounds; a typical ratio has its quartiles within "
        f"{statistics.median(shares):.0%} of its median, the noisiest within {max(shares):.0%}"
    )


def _source(name: str) -> str:
    """Command, machine, data and spread."""
    result, path = load(name), find(name).relative_to(ROOT).as_posix()
    own = dict.fromkeys([*result.get("commands", []), result["command"]])
    commands = "\n".join(f"- Command: `{command}`" for command in own)
    minutes = f" ({MINUTES[name]} min)" if name in MINUTES else ""
    date = f"; {result['date']}" if "date" in result else ""
    interleaved = name.startswith(_INTERLEAVED)
    rounds = f"\n- Spread: {spread(name)}" if interleaved else ""
    return f"{commands}{minutes}\n- Machine: {machine(result)}{date}; [data](../{path}){rounds}"


def with_source(text: str, *names: str) -> str:
    """A text with the commands, machines and data of the results that it shows."""
    sources = "\n\n".join(map(_source, names))
    return f"{text}\n\n<details><summary>How this was measured</summary>\n\n{sources}\n\n</details>"


def measured_table(header: Sequence[str], rows: Iterable[Sequence[str]], *names: str) -> str:
    """A Markdown table with its sources."""
    return with_source(markdown_table(header, rows), *names)


def report(name: str) -> str:
    """The Markdown that a benchmark wrote beside its JSON file."""
    return with_source(find(name, ".md").read_text(encoding="utf-8").strip(), name)
