"""Write the measured tables of README.md and docs/ from the committed results.

    python benchmarks/update_docs.py

A page marks the place of a table with a `begin` and an `end` comment that carry its name, and `BLOCKS` maps the name to
the function that writes it. Nothing is measured here: the same results always give the same pages.
"""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import docs_studies as studies
from docs_choices import choices
from docs_sources import (
    ROOT,
    Result,
    load,
    machine,
    measured_table,
    report,
    span,
    spread,
    with_source,
)
from lra import results as lra

from luna_hf.scripting import markdown_table

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
MARKER = re.compile(r"(<!-- begin ([\w-]+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)
LABELS = {
    "roberta": "RoBERTa",
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
    "luna-mixed-64": "Luna, tied, window and slots",
    "luna-mixed-64-untied": "Luna, untied, window and slots",
    "abc-mixed-64": "ABC, window and slots",
    "leapformer": "LeaPformer",
    "cosformer": "cosFormer",
    "linear-attention": "linear attention",
    "lavo-64": "LAVO, 64 bases, window of 64",
}
FORWARD, ABC = "encoder-forward-3-layer-luna-cpu-float32", "encoder-forward-1-layer-abc-cpu-float32"
FEW, WINDOWED = "encoder-forward-1-layer-few-cpu-float32", "windowed-6-layer-cpu-float32"
SHORT = "encoder-forward-1-layer-short-cpu-float32"
FEW_BFLOAT16 = "encoder-forward-1-layer-few-cpu-bfloat16"
FEW_MODERNBERT = "encoder-forward-3-layer-chosen-cpu-float32"
FAMILIES, ATTENTION = "encoder-forward-1-layer-families-cpu-float32", "attention-12-heads-of-64-cpu-float32"
WHOLE, STEP = "encoder-forward-base-chosen-cpu-float32", "encoder-mlm_step-base-chosen-cpu-float32"
CLASS_STEP = "encoder-class_step-base-chosen-cpu-float32"
CHECKPOINTED = "encoder-class_step-base-checkpointing-chosen-cpu-float32"
DEPLOYMENT = "deployment-cpu-float32"
UNEVEN, SERVING = "uneven-2-layer-cpu-float32", "serving-cpu-float32"
RANGE = "encoder-forward-1-layer-chosen-cpu-float32"
SEQ2SEQ = "seq2seq_generation-4-layer-cpu-float32"
CAUSAL = "causal-attention-cpu-float32"
CAUSAL_TRAINING = "causal_training-4-layer-cpu-float32"
MULTI30K = "translation-multi30k-cpu-float32"
LRA, LRA_COST, LRA_COST_LUNA = "lra-short-cpu-bfloat16", "lra-cost-cpu-float32", "lra-cost-luna-cpu-float32"
PEERS = ("roberta", "modernbert")

# ---- encoders ----


def _over(models: Result, name: str, peer: str = "roberta") -> str:
    ratio = models[name]["speed_over"].get(peer)
    return f"{ratio['median']:.2f}" if ratio else "-"


def _by_length(name: str, speeds: Sequence[tuple[str, str]], memory: Sequence[str], lengths: Sequence[int] = ()) -> str:
    """A row for every length: speed relative to peers, then peak memory."""
    header = ["tokens", *(f"{LABELS[model]} / {LABELS[peer]}" for model, peer in speeds)]
    header += [f"{LABELS[model]}, MiB" for model in memory]
    rows = [
        [
            f"{row['length']:,}",
            *(_over(row["models"], *pair) for pair in speeds),
            *(f"{row['models'][model]['peak_memory_bytes'] / 2**20:.0f}" for model in memory),
        ]
        for row in load(name)["lengths"]
        if not lengths or row["length"] in lengths
    ]
    return markdown_table(header, rows)


def _crossing(name: str, models: Sequence[str], peer: str = "roberta") -> str:
    wins = load(name)["wins"]
    return ", ".join(f"{wins[model][peer]:,.0f} tokens ({LABELS[model]})" for model in models)


def _growth(name: str, models: Sequence[str]) -> str:
    short, long = load(name)["growth"]["range"]
    found = {model: load(name)["growth"]["exponents"][model] for model in models}
    powers = [f"{LABELS[model]} {one['median']:.2f} ({span(one['rounds'], 2)})" for model, one in found.items()]
    return (
        f"Exponent of the growth of time from {short:,} to {long:,} tokens (1 is linear, 2 is quadratic; range over "
        f"the rounds in brackets): {'; '.join(powers)}."
    )


def _range(name: str, model: str, peer: str) -> str:
    """The least and the greatest speed over a peer at any length."""
    return span((row["models"][model]["speed_over"][peer]["median"] for row in load(name)["lengths"]), 1)


def _front() -> str:
    models = ["luna-tied", "roberta", "modernbert"]
    speeds = [("luna-tied", peer) for peer in models[1:]]
    layers = _by_length(FORWARD, speeds, models, (128, 512, 2048, 8192)).replace(LABELS["luna-tied"], "Luna")
    return (
        f"{layers}\n\nMeasured on {machine(load(FORWARD))}: {spread(FORWARD)}.\n\n"
        f"Layer for layer, {_losing()}. From 512 to 8,192 tokens, the whole Luna model (12 layers) is "
        f"{_range(WHOLE, 'luna-tied', 'roberta')} times as fast as RoBERTa-base (12 layers) and "
        f"{_range(WHOLE, 'luna-tied', 'modernbert')} times as fast as ModernBERT-base (22 layers)."
    )


def _losing() -> str:
    """Up to which length Luna's peers are faster, layer for layer."""
    wins = load(FORWARD)["wins"]["luna-tied"]
    lengths = " and ".join(f"{LABELS[peer]} up to {wins[peer]:,.0f} tokens" for peer in ("roberta", "modernbert"))
    return f"RoBERTa and ModernBERT are faster than Luna on short texts: {lengths}"


def _summary() -> str:
    exponents = load(ABC)["growth"]["exponents"]
    luna, roberta = (2 ** exponents[name]["median"] for name in ("luna-untied", "roberta"))
    return (
        f"- Layer for layer, RoBERTa is faster on short texts, up to "
        f"{_crossing(FORWARD, ['luna-untied', 'luna-tied'])} and {_crossing(ABC, ['abc-mlp-128'])}. ModernBERT is "
        f"faster up to {_crossing(FORWARD, ['luna-untied', 'luna-tied'], 'modernbert')}.\n"
        f"- From 512 to 8,192 tokens, the whole Luna model (12 layers, tied) is "
        f"{_range(WHOLE, 'luna-tied', 'roberta')} times as fast as RoBERTa-base (12 layers) and "
        f"{_range(WHOLE, 'luna-tied', 'modernbert')} times as fast as ModernBERT-base (22 layers).\n"
        f"- From 2,048 to 16,384 tokens, doubling the length multiplies Luna's time by {luna:.1f} and RoBERTa's by "
        f"{roberta:.1f}.\n- {_decoding()}"
    )


def _encoder() -> str:
    models = ["luna-untied", "luna-tied"]
    speeds = [(model, peer) for peer in ("roberta", "modernbert") for model in models] + [("modernbert", "roberta")]
    table = _by_length(FORWARD, speeds, ["luna-tied", "roberta", "modernbert"])
    return with_source(f"{table}\n\n{_growth(FORWARD, [*models, 'roberta', 'modernbert'])}", FORWARD)


def _whole() -> str:
    """Whole models: ratios of speed, and memory with what the models hold, of a forward and of a training step."""
    models = ["luna-tied", "roberta", "modernbert"]
    pairs = [("luna-tied", "roberta"), ("luna-tied", "modernbert"), ("modernbert", "roberta")]
    header = ["", "tokens", *(f"{LABELS[model]} / {LABELS[peer]}" for model, peer in pairs)]
    header += [f"{LABELS[model]}, MiB" for model in models]
    rows = []
    for name, label in ((WHOLE, "forward"), (STEP, "training step")):
        result = load(name)
        for row in result["lengths"]:
            cells = [_over(row["models"], *pair) for pair in pairs]
            for model in models:
                held = result["models"][model]["held_bytes"] + row["models"][model]["peak_memory_bytes"]
                cells.append(f"{held / 2**20:,.0f}")
            rows.append([label, f"{row['rows']} x {row['length']:,}", *cells])
    sizes = ", ".join(
        f"{LABELS[model]} {one['layers']} layers, {one['parameters'] / 1e6:.0f} M parameters"
        for model, one in load(STEP)["models"].items()
    )
    return with_source(f"{markdown_table(header, rows)}\n\n{sizes}.", WHOLE, STEP)


def _class_step() -> str:
    """Speed and memory of a classification step, plain and with gradient checkpointing, against RoBERTa's."""
    results = [load(CLASS_STEP), load(CHECKPOINTED)]
    rows = []
    for plain, checkpointed in zip(*(result["lengths"] for result in results), strict=True):
        for name in plain["models"]:
            cells = []
            for models in (plain["models"], checkpointed["models"]):
                peak, shares = models[name]["peak_memory_bytes"], ["-", "-"]
                if name != "roberta":
                    shares = [_over(models, name), f"{peak / models['roberta']['peak_memory_bytes']:.2f}"]
                cells += [f"{peak / 2**20:,.0f}", *shares]
            rows.append([f"{plain['rows']} x {plain['length']:,}", LABELS[name], *cells])
    header = ["MiB", "speed / RoBERTa", "memory / RoBERTa"]
    header = ["tokens", "model", *header, *(f"with checkpointing: {title}" for title in header)]
    return measured_table(header, rows, CLASS_STEP, CHECKPOINTED)


def _abc() -> str:
    models = ["abc-mlp-64", "abc-mlp-128"]
    table = _by_length(ABC, [(name, "roberta") for name in (*models, "luna-untied")], [*models, "roberta"])
    return with_source(f"{table}\n\n{_growth(ABC, models)}", ABC)


def _over_roberta(name: str) -> str:
    """Speed over RoBERTa and memory of every model of a result, and their growth."""
    models = [model for model in load(name)["models"] if model != "roberta"]
    table = _by_length(name, [(model, "roberta") for model in models], [*models, "roberta"])
    return with_source(f"{table}\n\n{_growth(name, models)}", name)


def _few_modernbert() -> str:
    """Luna with few slots beside ModernBERT, layer for layer."""
    pairs = [("luna-16", "modernbert"), ("luna-16", "roberta"), ("modernbert", "roberta")]
    table = _by_length(FEW_MODERNBERT, pairs, ["luna-16", "modernbert", "roberta"])
    return with_source(table, FEW_MODERNBERT)


def _short() -> str:
    """Speed over RoBERTa on short texts."""
    models = [model for model in load(SHORT)["models"] if model != "roberta"]
    return with_source(_by_length(SHORT, [(model, "roberta") for model in models], []), SHORT)


def _controls() -> str:
    name = "encoder-forward-1-layer-controls-cpu-float32"
    rows = load(name)["lengths"]
    models = [model for model in rows[0]["models"] if model.startswith("abc-")]
    cells = [[f"`{model[4:]}`", *(_over(row["models"], model) for row in rows)] for model in models]
    return measured_table(["control", *(f"{row['length']:,} tokens" for row in rows)], cells, name)


def _one_length(names: dict[str, str], peers: Sequence[str] = PEERS) -> str:
    """A row for every model of results that have one length each."""
    rows = [
        [label, LABELS[model], *(_over(row["models"], model, peer) for peer in peers)]
        for name, label in names.items()
        for row in load(name)["lengths"]
        for model in row["models"]
        if model not in PEERS
    ]
    return measured_table(["setting", "model", *(f"speed over {LABELS[peer]}" for peer in peers)], rows, *names)


def _padding() -> str:
    names = [f"encoder-forward-2-layer-padding{kind}-cpu-float32" for kind in ("", "-abc")]
    rows = {
        (LABELS[model], row["length"]): row["models"][model]["padded_over_unpadded"]
        for name, family in zip(names, ("luna", "abc"), strict=True)
        for row in load(name)["lengths"]
        for model in row["models"]
        if model.startswith(family)
    }
    cells = [[m, f"{n:,}", f"{one['median']:.2f} ({span(one['quartiles'], 2)})"] for (m, n), one in rows.items()]
    return measured_table(["model", "tokens", "time padded / full, median (quartiles)"], cells, *names)


def _paper() -> str:
    name, rows = "encoder-forward-1-layer-eager-cpu-float32", []
    models = load(name)["lengths"][0]["models"]
    peers = ("roberta-eager", "roberta")
    for model, speed, memory in (("abc-mlp-64", "1.5", "0.5"), ("abc-mlp-128", "1.3", "0.6")):
        peak = {own: models[own]["peak_memory_bytes"] for own in (model, *peers)}
        shares = [f"{peak[model] / peak[peer]:.2f}" for peer in peers]
        rows.append([LABELS[model], speed, *(_over(models, model, peer) for peer in peers), memory, *shares])
    header = ["model", "speed over unfused, paper", "speed over unfused", "speed over fused"]
    return measured_table([*header, "memory / unfused, paper", "memory / unfused", "memory / fused"], rows, name)


# ---- causal models ----


def _causal_training() -> str:
    result = load(CAUSAL_TRAINING)
    last = result["lengths"][-1]
    own = [model for name, model in last["models"].items() if name not in result["peers"]]
    speed = span((model["speed_over"]["gpt2"]["median"] for model in own), 1)
    memory = span((model["memory_over"]["gpt2"] for model in own), 2)
    return (
        f"At {last['length']:,} tokens, a training step of Luna and ABC is {speed} times as fast as GPT-2's and takes "
        f"{memory} times its memory."
    )


# ---- demos and generation ----


def _demo() -> str:
    name = "demo-cpu-float32"
    own = load(name)
    rows = [
        [f"Luna, {own['parameters'] / 1e6:.1f} M parameters", own["held_out_loss"], own["held_out_accuracy"]],
        ["unigram baseline", own["unigram_loss"], own["unigram_accuracy"]],
    ]
    header = [f"on {own['held_out_targets']:,} masked tokens of held-out text", "loss (nats)", "accuracy"]
    return measured_table(header, [[label, f"{loss:.3f}", f"{share:.1%}"] for label, loss, share in rows], name)


def _continuation() -> str:
    asked = load("clm-demo-cpu-float32")["continuations"][0]
    return f"```\n{asked['prompt']}{asked['greedy']}\n```"


def _clm_demo() -> str:
    own = load("clm-demo-cpu-float32")
    text = (
        f"The model has {own['parameters'] / 1e6:.1f} M parameters and a perplexity of "
        f"{own['held_out_perplexity']:.0f} on {own['held_out_targets']:,} tokens of held-out text. The unigram "
        f"baseline has {math.exp(own['unigram_loss']):.0f}."
    )
    return with_source(text, "clm-demo-cpu-float32")


def _decoding() -> str:
    result = load("generation-4-layer-cpu-float32")
    last = result["lengths"][-1]["models"]
    own = [name for name in last if name not in result["peers"]]
    dynamic, static = (span((last[name]["speed_over"][peer]["median"] for name in own), 1) for peer in result["peers"])
    growth = span((result["growth"][name]["median"] for name in own), 2)
    state = span((last[name]["state_bytes"] / 2**20 for name in own), 1)
    cache = f"{last['gpt2']['state_bytes'] / 2**20:.0f}"
    return (
        f"A decoding step of Luna and ABC takes {growth} times as long after 16,384 tokens as after 1,024. Their state "
        f"takes {state} MiB; GPT-2's keys and values take {cache} MiB. The step is {dynamic} times as fast as GPT-2's "
        f"with `DynamicCache`, the default of `generate`, and {static} times as fast as with `StaticCache`."
    )


def _decoding_bound() -> str:
    """What a decoding step reads, and the speed that follows from it."""
    result = load("generation-4-layer-cpu-float32")
    positions = (result["settings"]["longest"] + result["settings"]["room"]) * result["settings"]["width"]
    weights = 4 * (result["models"]["gpt2"]["parameters"] - positions)
    cache = result["lengths"][-1]["models"]["gpt2"]["state_bytes"]
    return (
        f"With one text, memory bandwidth limits a step. GPT-2 reads {weights / 1e6:.0f} MB of weights and, at 16K "
        f"tokens, {cache / 1e6:.0f} MB of keys and values. Luna and ABC read about as many weights, so neither can be "
        f"much more than {(weights + cache) / weights:.1f} times as fast as `gpt2-static`. With more texts or layers, "
        "keys and values make up a larger share."
    )


BLOCKS: dict[str, Callable[[], str]] = {
    "speed": _front,
    "demo": _demo,
    "clm-demo-text": _continuation,
    "clm-demo": _clm_demo,
    "summary": _summary,
    "encoder": _encoder,
    "whole": _whole,
    "abc": _abc,
    "few": lambda: _over_roberta(FEW),
    "few-modernbert": _few_modernbert,
    "few-bfloat16": lambda: _over_roberta(FEW_BFLOAT16),
    "short": _short,
    "windowed": lambda: report(WINDOWED),
    "windowed-bfloat16": lambda: report("windowed-6-layer-cpu-bfloat16"),
    "families": lambda: _over_roberta(FAMILIES),
    "attention": lambda: report(ATTENTION),
    "deployment": lambda: report(DEPLOYMENT),
    "controls": _controls,
    "training-step": lambda: _one_length(
        {
            "encoder-mlm_step-3-layer-luna-cpu-float32": "3 layers",
            "encoder-mlm_step-4-layer-abc-cpu-float32": "4 layers",
        }
    ),
    "class-step": _class_step,
    "choices": choices,
    "bfloat16": lambda: _one_length(
        {"encoder-forward-1-layer-cpu-bfloat16": "emulated", "encoder-forward-1-layer-abc-cpu-bfloat16": "native"},
        ("roberta",),
    ),
    "padding": _padding,
    "uneven": lambda: report(UNEVEN),
    "serving": lambda: report(SERVING),
    "range": lambda: _over_roberta(RANGE),
    "abc-paper": _paper,
    "causal": lambda: report(CAUSAL),
    "causal-training": lambda: report(CAUSAL_TRAINING),
    "causal-training-short": _causal_training,
    "decoding": _decoding,
    "decoding-bound": _decoding_bound,
    "generation": lambda: report("generation-4-layer-cpu-float32"),
    "generation-rows": lambda: report("generation-4-layer-4-rows-cpu-float32"),
    "seq2seq-generation": lambda: report(SEQ2SEQ),
    "perplexity": lambda: report("perplexity-enwiki-cpu-float32"),
    "guarantees": lambda: report("guarantees-cpu-float32"),
    "learning": studies.learning,
    "learning-finetune": lambda: report("learning-finetune-cpu-bfloat16"),
    "recall": lambda: report("recall-cpu-float32"),
    "mini-pretrain": lambda: report("mini-pretrain-cpu-bfloat16"),
    "mini-scores": lambda: report("mini-scores-cpu-bfloat16"),
    "zoo": studies.zoo,
    "extrapolation": lambda: report(studies.EXTRAPOLATION),
    "selection": studies.selection,
    "selection-lsg": lambda: studies.selection_table("Best cosine at 512 tokens"),
    "selection-variants": lambda: studies.selection_table("Variants"),
    "selection-times": studies.selection_times,
    "teacher": lambda: report("teacher"),
    "multi30k": lambda: report(MULTI30K),
    "long-reviews": lambda: report("long-reviews-cpu-bfloat16"),
    "lra": lambda: report(LRA),
    "lra-cost": lambda: report(LRA_COST),
    "lra-cost-luna": lambda: report(LRA_COST_LUNA),
    "lra-published": lra.published,
}


def render(page: str, path: Path) -> str:
    """A page with its marked tables written anew, and their links relative to its path.

    Raises:
        KeyError: The page marks a table that does not exist.
    """
    up = "../" * len(path.relative_to(ROOT).parent.parts)
    return MARKER.sub(lambda match: f"{match[1]}{BLOCKS[match[2]]().replace('](../', f']({up}')}\n{match[3]}", page)


def main() -> None:
    """Rewrite the pages."""
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        if (new := render(page, path)) != page:
            path.write_text(new, encoding="utf-8")
            print(f"updated {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
