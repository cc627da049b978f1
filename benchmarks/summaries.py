"""Results of the benchmarks: how they are made from measured rounds, and what can be read from them.

All have the same form, besides the header (command, date, machine, versions, protocol):

    settings   the options
    peers      the models that others are compared with
    lengths    entries: `length`, `call` or `mix` say what was timed, `tokens` how much, and `models` has for each model
               `seconds` (a summary of the rounds), `speed_over` each peer, and often `peak_memory_bytes`

Ratios are taken within a round, and medians over the rounds.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from luna_hf.scripting import markdown_table

Result = dict[str, Any]
Rounds = dict[str, list[float]]  # seconds of every round, by model


# ---- statistics ----


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles and extremes of the rounds, and the rounds themselves."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {
        "median": statistics.median(values),
        "quartiles": [quartiles[0], quartiles[2]],
        "min": min(values),
        "max": max(values),
        "rounds": list(values),
    }


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Ratios round by round: both numbers were measured within seconds of each other."""
    return [above / below for above, below in zip(numerators, denominators, strict=True)]


def win_length(speedups: dict[int, float]) -> float | None:
    """Length from which a model is faster, at that length and at every longer one measured.

    Args:
        speedups: measured length to median ratio (peer's time over the model's time; above 1: the model is faster).

    Returns:
        The shortest measured length if the model wins there already; otherwise the point where the ratio crosses 1,
        interpolated linearly in the logarithms of length and ratio. `None` if it loses at the longest.
    """
    lengths = sorted(speedups)
    losing = [index for index, length in enumerate(lengths) if speedups[length] <= 1]
    if not losing:
        return float(lengths[0])
    last = losing[-1]
    if last == len(lengths) - 1:
        return None
    below, above = lengths[last], lengths[last + 1]
    low, high = math.log(speedups[below]), math.log(speedups[above])
    return math.exp(math.log(below) + (math.log(above) - math.log(below)) * -low / (high - low))


def growth_exponent(seconds_per_row: dict[int, float]) -> float:
    """Least-squares slope of log time against log length, two at least: 1 is linear, 2 quadratic."""
    x = [math.log(length) for length in seconds_per_row]
    y = [math.log(seconds) for seconds in seconds_per_row.values()]
    return statistics.linear_regression(x, y).slope


# ---- entries of a result ----


def describe(times: Rounds, peers: Sequence[str], **figures: dict[str, Any]) -> Result:
    """The models of an entry: seconds, speed over each peer, and further figures by name.

    Peers are compared with the first of them only.
    """
    models: Result = {}
    for name, taken in times.items():
        models[name] = {"seconds": summary(taken), **{key: values[name] for key, values in figures.items()}}
        rivals = peers[:1] if name in peers else peers
        over = {peer: summary(ratios(times[peer], taken)) for peer in rivals if peer in times and peer != name}
        if over:
            models[name]["speed_over"] = over
    return models


def figure(models: Result, name: str, what: str) -> float | None:
    """A figure of a model in an entry, if it has it: "speed PEER", "memory PEER" or "MiB"."""
    kind, _, peer = what.partition(" ")
    model = models[name]
    if kind == "speed":
        return model.get("speed_over", {}).get(peer, {}).get("median")
    if "peak_memory_bytes" not in model or (peer and peer not in models):
        return None
    return model["peak_memory_bytes"] / (models[peer]["peak_memory_bytes"] if peer else 2**20)


def growth(result: Result, call: str | None = None, within: tuple[float, float] = (0, math.inf)) -> Result:
    """For each model, a summary of the exponent with which the time of a row grows, fitted in each round.

    It is empty unless there are several lengths in the range.
    """
    entries = [entry for entry in result["lengths"] if entry.get("call") == call]
    entries = [entry for entry in entries if within[0] <= entry["length"] <= within[1]]
    found: Result = {}
    for name in entries[0]["models"] if len(entries) > 1 else ():
        rows = [[taken / entry.get("rows", 1) for taken in _rounds(entry, name)] for entry in entries]
        lengths = [entry["length"] for entry in entries]
        fits = [growth_exponent(dict(zip(lengths, times, strict=True))) for times in zip(*rows, strict=False)]
        found[name] = summary(fits)
    return found


def _rounds(entry: Result, name: str) -> list[float]:
    return entry["models"][name]["seconds"]["rounds"]


def table(result: Result) -> str:
    """A row for every entry and model: milliseconds, memory, and speed over the peers with its range."""
    entries, peers = result["lengths"], result["peers"]
    keys = [key for key in ("call", "mix", "length", "rows") if key in entries[0]]
    models = [model for entry in entries for model in entry["models"].values()]
    sizes = {"peak_memory_bytes": "peak, MiB", "state_bytes": "state, MiB"}
    sizes = {key: title for key, title in sizes.items() if any(key in model for model in models)}
    rows = []
    for entry in entries:
        for name, model in entry["models"].items():
            cells = [f"{entry[key]:,}" if isinstance(entry[key], int) else entry[key] for key in keys]
            cells += [name, f"{1e3 * model['seconds']['median']:,.1f}"]
            cells += [f"{model[key] / 2**20:,.1f}" if key in model else "-" for key in sizes]
            over = [model.get("speed_over", {}).get(peer) for peer in peers]
            cells += [f"{one['median']:.2f} ({one['min']:.2f} to {one['max']:.2f})" if one else "-" for one in over]
            rows.append(cells)
    speeds = [f"speed / {peer} (range)" for peer in peers]
    return markdown_table([*keys, "model", "ms", *sizes.values(), *speeds], rows)
