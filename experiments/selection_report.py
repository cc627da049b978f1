"""Tables and plot of the study of selected tokens."""

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selection_rules import Lsg, Memory
from study_plots import panels, plain, save

from luna_hf.scripting import markdown_table

Groups = dict[str, list[Memory | Lsg]]
BUDGETS = (81, 97, 161, 193, 321)  # the sizes of LSG attention with blocks of 16, 32 and 64
LONG = "512"  # the length that the plot and the choice are about
PARTS = {"score": "selection by the {}", "place": "queries {}", "shared": "shared by all heads"}
PARTS |= {"mass": "attention normalised over tokens {} the window", "counts": "{} counts"}


def text(result: dict[str, Any], groups: Groups) -> str:
    """All tables that have results, and the commands."""
    tables = {
        "Windows and selected tokens, 16 queries, 16 means": sizes,
        "Best cosine at 512 tokens for a number of keys, 16 queries": budgets,
        "Without selection": parts,
        "Queries that select, 64 tokens, 16 means": queries,
        "Slots beside 64 tokens selected by 16 queries": slots,
        "More of several": more,
        "Variants: difference of the cosine in thousandths, and its standard error": variants,
        "LSG attention": lsg,
        "Conversions: time and cosine": times,
    }
    found = [f"## {title}\n\n{table}" for title, make in tables.items() if (table := make(result, groups))]
    head = f"{result['protocol']} {result['rows']} rows of each length. Cosines at 256 / 512 tokens."
    return "\n\n".join([head, *found, "\n".join(f"- Command: `{command}`" for command in result["commands"])])


def mean(cell: dict[str, Any], length: str = LONG) -> float:
    """Mean cosine over the rows."""
    return statistics.mean(cell["cosines"][length])


def both(cell: dict[str, Any] | None) -> str:
    """Mean cosines at both lengths, or a dash."""
    return " / ".join(f"{mean(cell, length):.4f}" for length in cell["cosines"]) if cell else "-"


def cell_of(result: dict[str, Any], rule: Memory | Lsg) -> dict[str, Any] | None:
    """The result of a rule, if there is one."""
    return result["cells"].get(rule.name())


def grid(result: dict[str, Any], rules: Sequence[Memory], rows: str, columns: str, header: Sequence[str]) -> str:
    """A table of one field against another; empty without results."""
    found = {(getattr(rule, rows), getattr(rule, columns)): cell_of(result, rule) for rule in rules}
    if not any(found.values()):
        return ""
    across = list(dict.fromkeys(column for _, column in found))
    down = list(dict.fromkeys(row for row, _ in found))
    header = [header[0], *(f"{header[1]} {column}" for column in across)]
    return markdown_table(header, [[row or "all", *(both(found[row, column]) for column in across)] for row in down])


# ---- tables ----


def sizes(result: dict[str, Any], groups: Groups) -> str:
    """Window against selected tokens."""
    return grid(result, groups["sizes"], "window", "selected", ["window", "selected"])


def queries(result: dict[str, Any], groups: Groups) -> str:
    """Number of queries against the window."""
    return grid(result, groups["queries"], "queries", "window", ["queries", "window"])


def slots(result: dict[str, Any], groups: Groups) -> str:
    """Number of slots against the window."""
    return grid(result, groups["slots"], "slots", "window", ["slots", "window"]).replace("| all |", "| none |")


def parts(result: dict[str, Any], groups: Groups) -> str:
    """Windows, slots and evenly spaced tokens."""
    rows = [
        [
            rule.window,
            {0: "-", 1: "the first"}.get(rule.selected, f"{rule.selected} evenly spaced"),
            rule.slots or "-",
            rule.keys,
            both(cell),
        ]
        for rule in groups["parts"]
        if (cell := cell_of(result, rule))
    ]
    return markdown_table(["window", "tokens", "slots", "keys", "cosine"], rows) if rows else ""


def more(result: dict[str, Any], groups: Groups) -> str:
    """Larger memories, by their keys."""
    cells = [cell for rule in groups["more"] if (cell := cell_of(result, rule))]
    names = ("window", "selected", "queries", "slots", "keys")
    rows = [[*(cell[name] for name in names), both(cell)] for cell in sorted(cells, key=lambda cell: cell["keys"])]
    return markdown_table([*names, "cosine"], rows) if rows else ""


def lsg(result: dict[str, Any], groups: Groups) -> str:
    """LSG attention's choices, with the factor across."""
    rules = [rule for rule in groups["lsg"] if cell_of(result, rule)]
    if not rules:
        return ""
    factors = sorted({rule.factor for rule in rules if rule.kind != "none"})
    rows = []
    for rule in sorted(dict.fromkeys(dataclasses.replace(rule, factor=4) for rule in rules), key=lambda own: own.block):
        cells = [cell_of(result, dataclasses.replace(rule, factor=factor)) for factor in factors]
        rows.append([rule.block, rule.kind.replace("_", " "), rule.keys, *map(both, cells)])
    return markdown_table(["block", "sparse tokens", "keys", *(f"factor {factor}" for factor in factors)], rows)


def variants(result: dict[str, Any], groups: Groups) -> str:
    """Differences from the rule that a variant changes, row by row."""
    found: dict[str, dict[int, str]] = {}
    centres: dict[int, Memory] = {}
    for rule in groups["variants"]:
        centre = centres.setdefault(rule.window, rule)
        cell, base = cell_of(result, rule), cell_of(result, centre)
        if cell and base and rule != centre:
            found.setdefault(describe(rule, centre), {})[rule.window] = " / ".join(
                difference(cell["cosines"][length], base["cosines"][length]) for length in cell["cosines"]
            )
    if not found:
        return ""
    rows = [[name, *(own.get(window, "-") for window in centres)] for name, own in found.items()]
    return markdown_table(["variant", *(f"window {window}" for window in centres)], rows)


def describe(rule: Memory, centre: Memory) -> str:
    """What a variant changes, in words."""
    changed = [name for name in PARTS if getattr(rule, name) != getattr(centre, name)]
    words = ", ".join(PARTS[name].format(getattr(rule, name)) for name in changed)
    return f"{words} (seed {rule.seed})" if rule.place == "drawn" else words


def difference(values: Sequence[float], base: Sequence[float]) -> str:
    """Mean difference in thousandths and its standard error over the rows."""
    own = [1000 * (value - other) for value, other in zip(values, base, strict=True)]
    error = statistics.stdev(own) / len(own) ** 0.5 if len(own) > 1 else 0.0
    return f"{statistics.mean(own):+.2f} ± {error:.2f}"


def budgets(result: dict[str, Any], groups: Groups) -> str:
    """The best rule of either kind with at most so many keys."""
    rows = []
    for most in BUDGETS:
        best = [best_of(result, attention, most) for attention in ("memory", "lsg")]
        if any(best):
            rows.append([most, *(text for cell in best for text in (summary(cell), both(cell)))])
    header = ["keys at most", "window + selected + slots", "cosine", "LSG: block, factor, sparse tokens", "cosine"]
    return markdown_table(header, rows) if rows else ""


def best_of(result: dict[str, Any], attention: str, most: int) -> dict[str, Any] | None:
    """The cell with the highest cosine; of memories, those that the library can have: by 16 queries, no variant."""
    own = [cell for cell in result["cells"].values() if cell["attention"] == attention and cell["keys"] <= most]
    if attention == "memory":
        own = [cell for cell in own if plain_memory(cell)]
    return max(own, key=mean, default=None)


def plain_memory(cell: dict[str, Any]) -> bool:
    """Whether a memory has no other choices than its sizes."""
    names = ("score", "place", "shared", "mass", "counts", "queries")
    return all(cell[name] == getattr(Memory(1), name) for name in names)


def summary(cell: dict[str, Any] | None) -> str:
    """Sizes of a rule."""
    if cell is None:
        return "-"
    if cell["attention"] == "lsg":
        factor = "-" if cell["kind"] == "none" else cell["factor"]
        return f"{cell['block']}, {factor}, {cell['kind'].replace('_', ' ')}"
    return f"{cell['window']} + {cell['selected']} + {cell['slots']}"


def times(result: dict[str, Any], groups: Groups) -> str:
    """Conversions by their time."""
    own = sorted(result["times"].values(), key=lambda cell: cell["over_window"])
    if not own:
        return ""
    length = f"{own[0]['length']:,}"
    rows = [
        [
            *(cell["window"], cell["selected"], cell["queries"] if cell["selected"] else "-", cell["slots"] or "-"),
            *(f"{cell['milliseconds']:,.0f}", f"{cell['over_window']:.2f}", f"{cell['over_source']:.2f}", both(cell)),
        ]
        for cell in own
    ]
    header = ["window", "selected", "queries", "slots", f"ms for {length} tokens", "x a window of 64", "x the encoder"]
    return markdown_table([*header, "cosine"], rows)


# ---- plot ----


def plot(result: dict[str, Any], path: Path) -> None:
    """1 - cosine at 512 tokens against the keys of a query, the queries that select, and the time if measured."""
    figure, axes = panels(1, 3 if result["times"] else 2, (15 if result["times"] else 11, 4.6))
    memories = [cell for cell in result["cells"].values() if cell["attention"] == "memory"]
    plot_keys(axes[0], result, memories)
    plot_queries(axes[1], memories)
    if result["times"]:
        plot_times(axes[2], list(result["times"].values()))
    for axis in axes:
        axis.set_yscale("log")
        axis.legend(frameon=False, fontsize=8)
        plain(axis)
    axes[0].set_ylabel(f"1 - cosine at {LONG} tokens, untrained")
    save(figure, path)


def plot_keys(axis: Any, result: dict[str, Any], memories: list[dict[str, Any]]) -> None:
    """Windows with more and more selected tokens, a window alone or with even tokens, LSG attention."""
    own = [cell for cell in memories if plain_memory(cell) and cell["selected"] and cell["slots"] == 16]
    for window in sorted({cell["window"] for cell in own}):
        draw(axis, [cell for cell in own if cell["window"] == window], f"window {window}, selected, 16 means", "o-")
    bare = [cell for cell in memories if cell["selected"] == cell["slots"] == 0 and cell["keys"] <= max(BUDGETS)]
    draw(axis, bare, "window alone", "k.--")
    even = [cell for cell in memories if cell["score"] == "even" and cell["slots"] == 0]
    draw(axis, [cell for cell in even if cell["selected"] == 1], "window, first token", "k.-")
    draw(axis, [cell for cell in even if cell["selected"] > 1], "window, 64 even tokens", "kx")
    lsgs = [cell for cell in result["cells"].values() if cell["attention"] == "lsg"]
    draw(axis, lsgs, "LSG attention", "^", color="0.6")
    axis.set_xlabel("keys that a query reads")


def plot_queries(axis: Any, memories: list[dict[str, Any]]) -> None:
    """Queries that select, 64 tokens and 16 means."""
    own = [cell for cell in memories if cell["selected"] == 64 and cell["slots"] == 16 and cell["queries"]]
    own = [cell for cell in own if plain_memory({**cell, "queries": 16})]
    for window in sorted({cell["window"] for cell in own}):
        cells = [cell for cell in own if cell["window"] == window]
        if len(cells) > 1:
            draw(axis, cells, f"window {window}, 64 selected, 16 means", "o-", against="queries")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.set_xlabel("queries that select")


def plot_times(axis: Any, own: list[dict[str, Any]]) -> None:
    """Conversions, with 16 queries and 16 means, and windows alone."""
    full = [cell for cell in own if cell["selected"] and cell["slots"] == 16 and cell["queries"] == 16]
    for window in sorted({cell["window"] for cell in full}):
        cells = [cell for cell in full if cell["window"] == window]
        draw(axis, cells, f"window {window}, selected, 16 means", "o-", against="over_window")
    bare = [cell for cell in own if cell["selected"] == cell["slots"] == 0]
    draw(axis, bare, "window alone", "k.--", against="over_window")
    axis.set_xlabel(f"time of {own[0]['length']:,} tokens over that of a window of 64 alone")


def draw(axis: Any, cells: Sequence[dict[str, Any]], label: str, style: str, against: str = "keys", **own: Any) -> None:
    """A line or points, by their place on the horizontal axis."""
    points = sorted((cell[against], 1 - mean(cell)) for cell in cells)
    if points:
        axis.plot(*zip(*points, strict=True), style, label=label, **own)
