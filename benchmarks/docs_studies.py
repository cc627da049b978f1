"""The tables of the documentation that summarise studies."""

import statistics
from typing import Any

from docs_sources import find, load, measured_table, with_source

from luna_hf.scripting import markdown_table

FAMILIES, EXTRAPOLATION = "encoder-forward-1-layer-families-cpu-float32", "extrapolation-enwiki-cpu-bfloat16"
RECALL, PRETRAINING = "recall-cpu-float32", "mini-pretrain-cpu-bfloat16"
SELECTION = "selection"
# Of every family: the encoder that was timed, the causal model, the one that recalls, a checkpoint, and its twin.
ZOO = {
    "Luna": ("luna-tied", "luna+window", "luna-exp-64+conv", "luna-mini-en", "roberta-mini-en"),
    "ABC": ("abc-mlp-64", "abc+window", "abc-64+conv", "abc-mini-en", "roberta-mini-en"),
    "LeaPformer": ("leapformer", "leapformer", "leapformer+conv", "leapformer-mini-en", "roberta-tiny-en"),
    "LAVO": ("lavo-64", "lavo", "lavo-64+conv", "lavo-mini-en", "roberta-tiny-en"),
}


def learning() -> str:
    """Held-out loss of every system of the learning study."""
    name = "learning-pretrain-cpu-bfloat16"
    labels = {
        "luna-32": "Luna, 32 slots",
        "luna-128": "Luna, one slot for each token",
        "roberta": "RoBERTa",
        "luna-conv": "Luna, 32 slots, convolution",
        "luna-conv-tied": "the same with tied key and value",
        "roberta-conv": "RoBERTa with the same convolution",
        "luna-conv-1": "baseline: Luna, one slot, convolution",
    }
    rows = []
    for system, label in labels.items():
        runs = sorted((run for run in load(name)["runs"] if run["system"] == system), key=lambda run: run["seed"])
        accuracy = statistics.mean(run["curve"]["accuracy"][-1] for run in runs)
        losses = ", ".join(f"{run['final_loss']:.3f}" for run in runs)
        rows.append([f"`{system}`", label, f"{runs[0]['parameters']:,}", losses, f"{accuracy:.1%}"])
    table = markdown_table(["name", "model", "parameters", "held-out loss, by seed", "accuracy"], rows)
    note = f"The unigram entropy of the held-out text is {load(name)['unigram_loss']:.2f} nats."
    return with_source(f"{table}\n\n{note}", name)


def zoo() -> str:
    """A row for every family: speed, causal models, recall and a checkpoint."""
    speeds = {row["length"]: row["models"] for row in load(FAMILIES)["lengths"]}
    causal, trained = load(EXTRAPOLATION)["models"], load(PRETRAINING)["models"]
    rows = []
    for family, (encoder, generator, recaller, checkpoint, twin) in ZOO.items():
        ratios = [f"{speeds[length][encoder]['speed_over']['roberta']['median']:.2f}" for length in (512, 2048, 16384)]
        short, long = (causal[generator]["lengths"][length] for length in ("512", "16384"))
        perplexities = f"{short['perplexity']:.1f} and {long['perplexity']:.1f}"
        losses = f"{trained[checkpoint]['held_out_loss']:.2f} ({trained[twin]['held_out_loss']:.2f})"
        row = [family, *ratios, f"{long['state_bytes'] / 2**10:,.0f}", perplexities, _recall(recaller), losses]
        rows.append(row)
    header = ["family", *(f"speed, {length}" for length in ("512", "2,048", "16,384")), "state, KiB"]
    header += ["perplexity, 512 and 16,384", "recall", "loss (RoBERTa)"]
    return markdown_table(header, rows)


def _recall(system: str) -> str:
    """Share of right answers at 16 pairs, of the best learning rate: the mean over its seeds."""
    task = {"name": "recall", "causal": True, "items": 16, "symbols": 16, "gap": 12}
    runs = [run for run in load(RECALL)["runs"] if run["system"] == system and run["task"] == task]
    by_rate = {run["recipe"]["rate"]: [] for run in runs}
    for run in runs:
        by_rate[run["recipe"]["rate"]].append(run["accuracy"]["16"])
    return f"{max(map(statistics.mean, by_rate.values())):.1%}"


def selection() -> str:
    """Cosines of windows, tokens and means, alone and together."""
    sizes = {
        (128, "-", "-"): "memory window=128",
        (64, "the first", "-"): "memory window=64 selected=1 score=even",
        (128, "the first", "-"): "memory window=128 selected=1 score=even",
        (256, "the first", "-"): "memory window=256 selected=1 score=even",
        (64, "-", 64): "memory window=64 slots=64",
        (64, "64 evenly spaced", "-"): "memory window=64 selected=64 score=even",
        (64, "64 evenly spaced", 16): "memory window=64 selected=64 slots=16 score=even",
        (64, "64 selected by 16 queries", "-"): "memory window=64 selected=64",
        (64, "64 selected by 16 queries", 16): "memory window=64 selected=64 slots=16",
        (64, "64 selected by 32 queries", 16): "memory window=64 selected=64 queries=32 slots=16",
        (64, "128 selected by 32 queries", 16): "memory window=64 selected=128 queries=32 slots=16",
    }
    cells = load(SELECTION)["cells"]
    rows = [[*parts, cells[name]["keys"], *_cosines(cells[name])] for parts, name in sizes.items()]
    return measured_table(["window", "further tokens", "means", "keys", "256 tokens", "512 tokens"], rows, SELECTION)


def selection_table(title: str) -> str:
    """A table that the study of selected tokens wrote, by the start of its title."""
    sections = find(SELECTION, ".md").read_text(encoding="utf-8").split("\n## ")
    (table,) = (section.split("\n\n")[1] for section in sections if section.startswith(title))
    return table.strip()


def selection_times() -> str:
    """A section on the time of conversions; empty until that is measured."""
    times = load(SELECTION).get("times", {})
    own = [cell for cell in times.values() if _is_shown(cell)]
    if not own:
        return ""
    rows = [
        [
            *(cell["window"], cell["selected"] or "-", cell["queries"] if cell["selected"] else "-"),
            *(cell["slots"] or "-", f"{cell['milliseconds']:,.0f}"),
            *(f"{cell[f'over_{other}']:.2f}" for other in ("window", "source")),
            *_cosines(cell),
        ]
        for cell in sorted(own, key=lambda cell: cell["over_window"])
    ]
    header = ["window", "selected", "queries", "means", "ms", "time / window of 64", "time / encoder"]
    table = markdown_table([*header, "256 tokens", "512 tokens"], rows)
    text = (
        f"Time of a forward pass of {own[0]['length']:,} tokens on one thread, relative to a window of 64 alone and to "
        "the encoder itself with its positions repeated. The last columns are the cosines of the converted encoders on "
        "the rows of this study."
    )
    return f"## Time\n\n{text}\n\n{table}"


def _is_shown(cell: dict[str, Any]) -> bool:
    """Whether a conversion is a window alone, or selects 64 or 128 tokens beside a window of 64 and 16 means."""
    alone = cell["selected"] == cell["slots"] == 0
    return alone or (cell["window"] == 64 and cell["slots"] == 16 and cell["selected"] in (64, 128))


def _cosines(cell: dict[str, Any]) -> list[str]:
    """Mean cosine at either length."""
    return [f"{statistics.mean(values):.4f}" for values in cell["cosines"].values()]
