"""The tables of the documentation that summarise studies."""

import statistics

from docs_sources import load, with_source

from luna_hf.scripting import markdown_table

FAMILIES, EXTRAPOLATION = "encoder-forward-1-layer-families-cpu-float32", "extrapolation-enwiki-cpu-bfloat16"
RECALL, PRETRAINING = "recall-cpu-float32", "mini-pretrain-cpu-bfloat16"
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


def swap(rate: str) -> str:
    """Final losses at one learning rate: direct, with transfer, with a convolution, with both."""
    runs = [run for run in load("swap-pretrain-cpu-bfloat16")["runs"] if run["rate"] == rate]
    found = {(run["system"], run["convolution"], run["transfer"]): run for run in runs}
    rows = []
    for system in dict.fromkeys(run["system"] for run in runs):
        ends = [found.get((system, *kind)) for kind in ((False, False), (False, True), (True, False), (True, True))]
        losses = [f"{run['final_loss']:.3f}" if run else "-" for run in ends]
        rows.append([f"`{system}`", f"{ends[0]['swapped_loss']:.3f}", *losses])
    header = ["attention", "after the swap", "continued", "with transfer", "with a convolution", "with both"]
    return markdown_table(header, rows)


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
