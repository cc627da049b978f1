"""What a run leaves to be read: the model card with its measured figures, and the plot of the loss."""

import json
import math
import os
import platform
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import Any

import matplotlib
import torch
import yaml
from huggingface_hub import EvalResult, ModelCardData

from engine.loop import RunLog
from engine.recipe import CausalRecipe, PretrainRecipe, RunRecipe
from luna_hf import FAMILIES
from luna_hf.scripting import portable, portable_command  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "model_cards" / "template.md"
CAUSAL_TEMPLATE = ROOT / "model_cards" / "causal.md"
PLOT = "loss.png"
_PACKAGES = ("luna-hf", "torch", "transformers", "tokenizers", "accelerate", "datasets")


def count(value: int | None) -> str:
    """A number with separators; what is not known while text is streamed is said so."""
    return "an unknown number of" if value is None else f"{value:,}"


def machine() -> dict[str, str]:
    """Processor or GPU, threads, system and versions; no names of hosts or users."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    threads = f"{torch.get_num_threads()} thread(s), {os.cpu_count()} core(s)"
    packages = ", ".join(f"{package} {version(package)}" for package in _PACKAGES)
    return {
        "hardware": f"{device}, {threads}, {platform.system()} {platform.machine()}",
        "versions": f"Python {platform.python_version()}, {packages}",
    }


Measured = list[tuple[str, str, float]]


def metadata(recipe: RunRecipe, figures: dict[str, Any], task: str, tag: str, measured: Measured) -> str:
    """The card's YAML header, as the Hub reads it.

    Args:
        recipe: what was run.
        figures: what was measured.
        task: the Hub's pipeline tag.
        tag: for the kind of model.
        measured: type, name and value of every metric.
    """
    dataset = {"dataset_type": "text", "dataset_name": "held-out documents of the training corpus"}
    results = [
        EvalResult(task, metric_type=kind, metric_name=name, metric_value=round(value, 4), **dataset)
        for kind, name, value in measured
    ]
    model_type = figures["model_type"]
    own_code = ["linear-attention", "custom_code"] if model_type in FAMILIES else []
    return ModelCardData(
        language=recipe.language or None,
        license=recipe.license or None,
        library_name="transformers",
        pipeline_tag=task,
        tags=[model_type, tag, *own_code],
        base_model=_on_hub(recipe.model_name_or_path),
        datasets=_hub_datasets(recipe) or None,
        model_name=recipe.model_name,
        eval_results=results,
    ).to_yaml()


def make_card(recipe: PretrainRecipe, figures: dict[str, Any]) -> str:
    """Fill `model_cards/template.md` from a run.

    Args:
        recipe: what was run.
        figures: what was measured, as written to `metrics.json`.
    """
    measured = [
        ("loss", "masked-token loss (nats)", figures["held_out_loss"]),
        ("accuracy", "masked-token accuracy", figures["held_out_accuracy"]),
    ]
    return fill_card(
        TEMPLATE,
        recipe,
        figures,
        metadata=metadata(recipe, figures, "fill-mask", "masked-lm", measured),
        answers="\n".join(_answer_row(answer) for answer in figures["fill_mask"]),
        example=json.dumps(figures["fill_mask"][0]["sentence"]),
        mask_probability=f"{recipe.mask_probability:.0%}",
        masked_unit="words, and with them all their tokens," if recipe.whole_word_masking else "tokens",
        longest=figures["longest_input"],
    )


def make_causal_card(recipe: CausalRecipe, figures: dict[str, Any]) -> str:
    """Fill `model_cards/causal.md` from a run.

    Args:
        recipe: what was run.
        figures: what was measured, as written to `metrics.json`.
    """
    measured = [
        ("perplexity", "perplexity per token", figures["held_out_perplexity"]),
        ("loss", "next-token loss (nats)", figures["held_out_loss"]),
        ("accuracy", "next-token accuracy", figures["held_out_accuracy"]),
    ]
    longest, state = figures["longest_input"], figures["state_bytes"]
    if state is None:
        memory = f"Inputs and what is generated are together at most {longest} tokens long."
    else:
        memory = (
            f"What it keeps of the text while it generates is {state:,} bytes a sequence in float32, after ten tokens "
            f"and after ten thousand. It was trained on {recipe.block_size} tokens at a time; longer texts are taken, "
            "but how well it reads them was not measured."
        )
    return fill_card(
        CAUSAL_TEMPLATE,
        recipe,
        figures,
        metadata=metadata(recipe, figures, "text-generation", "causal-lm", measured),
        memory=memory,
        continuations="\n\n".join(_continuation(row) for row in figures["continuations"]),
        example=json.dumps(recipe.prompts[0]),
        sample_tokens=recipe.sample_tokens,
        seed=recipe.seed,
    )


def _continuation(row: dict[str, Any]) -> str:
    cells = [f"| {how} | {_code(row[how])} |" for how in ("greedy", "sampled")]
    return "\n".join([f"| {_code(row['prompt'])} | goes on |", "| --- | --- |", *cells])


def fill_card(template: Path, recipe: RunRecipe, figures: dict[str, Any], **own: Any) -> str:
    """Fill a template with what every run has, and with what only this kind of run has (`own`)."""
    own_code = figures["model_type"] in FAMILIES
    return Template(template.read_text(encoding="utf-8")).substitute(
        own,
        model_name=recipe.model_name,
        model_type=figures["model_type"],
        start=figures["start"],
        trust=", trust_remote_code=True" if own_code else "",
        trust_note=" With the package `luna_hf` imported, `trust_remote_code` is not needed." if own_code else "",
        parameters=f"{figures['parameters']:,}",
        plot=PLOT,
        **_result_fields(figures),
        **_data_fields(recipe, figures),
        **_training_fields(recipe, figures),
    )


def _result_fields(figures: dict[str, Any]) -> dict[str, str]:
    return {
        "loss": f"{figures['held_out_loss']:.3f}",
        "perplexity": f"{figures['held_out_perplexity']:.1f}",
        "accuracy": f"{figures['held_out_accuracy']:.1%}",
        "unigram_loss": f"{figures['unigram_loss']:.3f}",
        "unigram_perplexity": f"{math.exp(figures['unigram_loss']):.1f}",
        "unigram_accuracy": f"{figures['unigram_accuracy']:.1%}",
        "unigram_from": figures["unigram_from"],
        "gain": f"{figures['gain_nats']:.3f}",
        "targets": f"{figures['held_out_targets']:,}",
    }


def _data_fields(recipe: RunRecipe, figures: dict[str, Any]) -> dict[str, str]:
    if recipe.validation:
        held_out = f"Evaluated on the text of `{portable(recipe.validation)}`"
    else:
        documents = (figures["training_documents"], figures["held_out_documents"])
        of = "" if None in documents else f" of {sum(documents):,}"
        held_out = f"By document, {count(figures['held_out_documents'])}{of} were held out, at random"
    blocks = f"{figures['evaluated_blocks']:,} of {count(figures['held_out_blocks'])} blocks are evaluated"
    if recipe.train_tokenizer:
        tokenizer = "a byte-level BPE, was trained on the training documents only"
    else:
        tokenizer = f"is that of `{portable(recipe.tokenizer or recipe.model_name_or_path)}`"
    return {
        "corpus": figures["corpus"],
        "held_out": f"{held_out}; {blocks}.",
        "tokenizer": f"The tokenizer, of {figures['vocabulary']:,} tokens, {tokenizer}.",
    }


def _training_fields(recipe: RunRecipe, figures: dict[str, Any]) -> dict[str, str]:
    seen, available = figures["seen_tokens"], figures["training_tokens"]
    of = f", {seen / available:.2g} times the {available:,} tokens of training text" if available else ""
    values = asdict(recipe)
    for name in ("output_dir", "cache_dir", "validation", "tokenizer", "model_name_or_path", "teacher"):
        if name in values:
            values[name] = portable(values[name])
    values["data"] = _portable_data(recipe.data)
    skipped = f"; {figures['skipped_updates']} updates were skipped" if figures["skipped_updates"] else ""
    return {
        "command": figures["command"],
        "steps": f"{recipe.max_steps:,} of {recipe.global_batch_tokens:,} tokens{skipped}",
        "seen": f"{seen:,}{of}, in blocks of {recipe.block_size}",
        "notes": "".join(f"- {note}\n" for note in figures["notes"]),
        "seconds": f"{figures['training_seconds']:,.0f}",
        "mfu": f"{figures['mfu']:.0%}",
        "hardware": figures["hardware"],
        "precision": "float32" if recipe.mixed_precision == "no" else f"{recipe.mixed_precision} mixed precision",
        "processes": figures["processes"],
        "versions": figures["versions"],
        "recipe": yaml.safe_dump(values, sort_keys=False, width=110).strip(),
    }


def _portable_data(data: str | list[Any]) -> str | list[Any]:
    if isinstance(data, str):
        return portable(data)
    return [portable(part) if isinstance(part, str) else {**part, "path": portable(part["path"])} for part in data]


def _on_hub(name: str) -> str | None:
    """The name, if it is one of the Hub and not a folder."""
    return name if name and name.count("/") <= 1 and not Path(name).exists() else None


def _hub_datasets(recipe: RunRecipe) -> list[str]:
    parts = recipe.data if isinstance(recipe.data, list) else [recipe.data]
    paths = [part if isinstance(part, str) else part["path"] for part in parts]
    return [path for path in paths if path.count("/") == 1 and not Path(path).exists()]


def plot_loss(log: RunLog, unigram_loss: float, path: Path, name: str) -> None:
    """Draw training and held-out loss by step, with the unigram baseline; `name` is that of the loss."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(*log.series("train", "loss"), color="tab:blue", alpha=0.5, label="training")
    axes.plot(*log.series("held_out", "loss"), color="tab:red", marker="o", markersize=3, label="held-out")
    axes.axhline(unigram_loss, color="black", linestyle=":", label="unigram baseline")
    axes.set_xlabel("step")
    axes.set_ylabel(f"{name} (nats)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def plot_transfer(log: RunLog, unigram_loss: float, path: Path) -> None:
    """Draw the transfer error, of training and of the held-out layers, and the held-out loss beside it, by step."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(*log.series("train", "loss"), color="tab:blue", alpha=0.5, label="training, mean of the layers")
    steps, layers = log.series("objective", "layers")
    for number, errors in enumerate(zip(*layers, strict=True)):
        shade = 0.2 + 0.7 * number / len(layers[0])
        label = f"held-out, layer {number + 1}" if number in (0, len(layers[0]) - 1) else None
        left.plot(steps, errors, color=str(shade), marker="o", markersize=2, linewidth=1, label=label)
    left.set_ylim(bottom=0)
    left.set_ylabel("relative squared error of attention")
    right.plot(*log.series("held_out", "loss"), color="tab:red", marker="o", markersize=3, label="held-out")
    right.axhline(unigram_loss, color="black", linestyle=":", label="unigram baseline")
    right.set_ylabel("masked-token loss (nats)")
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _answer_row(answer: dict[str, Any]) -> str:
    guesses = ", ".join(f"{_code(guess['token'])} {guess['score']:.0%}" for guess in answer["guesses"])
    return f"| {_code(answer['sentence'])} | {guesses} |"


def _code(text: str) -> str:
    """Text as code inside a table: `repr` shows a line break, and a backtick or bar must not end the cell."""
    text = text.strip() or repr(text)
    fence = "``" if "`" in text else "`"
    padding = " " if "`" in text else ""
    return f"{fence}{padding}{' '.join(text.splitlines())}{padding}{fence}".replace("|", "\\|")


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if sys.platform == "linux" and information.is_file():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
