"""What a run leaves to be read: the model card with its measured figures, and the plot of the loss."""

import json
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
from loop import RunLog
from recipe import PretrainRecipe

from luna_hf import FAMILIES

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "model_cards" / "template.md"
PLOT = "loss.png"
_PACKAGES = ("luna-hf", "torch", "transformers", "tokenizers", "accelerate")


def portable(text: str) -> str:
    """A path without the machine it is on: relative to the repository if inside it, else its last part."""
    path = Path(text)
    if not path.is_absolute():
        return text
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def portable_command(words: list[str]) -> str:
    """The command line as a user of any machine would type it."""
    parts = []
    for word in words:
        key, equals, value = word.partition("=")
        parts.append(f"{key}={portable(value)}" if equals else portable(word))
    return " ".join(f"'{part}'" if " " in part else part for part in parts)


def machine() -> dict[str, str]:
    """Processor or GPU, threads, system and versions; no names of hosts or users."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    threads = f"{torch.get_num_threads()} thread(s), {os.cpu_count()} core(s)"
    packages = ", ".join(f"{package} {version(package)}" for package in _PACKAGES)
    return {
        "hardware": f"{device}, {threads}, {platform.system()} {platform.machine()}",
        "versions": f"Python {platform.python_version()}, {packages}",
    }


def metadata(recipe: PretrainRecipe, figures: dict[str, Any]) -> str:
    """The card's YAML header, as the Hub reads it."""
    dataset = {"dataset_type": "text", "dataset_name": "held-out documents of the training corpus"}
    measured = [
        ("loss", "masked-token loss (nats)", figures["held_out_loss"]),
        ("accuracy", "masked-token accuracy", figures["held_out_accuracy"]),
    ]
    results = [
        EvalResult("fill-mask", metric_type=kind, metric_name=name, metric_value=round(value, 4), **dataset)
        for kind, name, value in measured
    ]
    own_code = ["linear-attention", "custom_code"] if recipe.model["model_type"] in FAMILIES else []
    return ModelCardData(
        language=recipe.language or None,
        license=recipe.license or None,
        library_name="transformers",
        pipeline_tag="fill-mask",
        tags=[recipe.model["model_type"], "masked-lm", *own_code],
        model_name=recipe.model_name,
        eval_results=results,
    ).to_yaml()


def make_card(recipe: PretrainRecipe, figures: dict[str, Any]) -> str:
    """Fill `model_cards/template.md` from a run.

    Args:
        recipe: what was run.
        figures: what was measured, as written to `metrics.json`.
    """
    own_code = recipe.model["model_type"] in FAMILIES
    values = asdict(recipe)
    values.update(output_dir=portable(recipe.output_dir), data=portable(recipe.data))
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        metadata=metadata(recipe, figures),
        model_name=recipe.model_name,
        model_type=recipe.model["model_type"],
        trust=", trust_remote_code=True" if own_code else "",
        trust_note=" With the package `luna_hf` imported, `trust_remote_code` is not needed." if own_code else "",
        parameters=f"{figures['parameters']:,}",
        vocabulary=f"{figures['vocabulary']:,}",
        block_size=recipe.block_size,
        longest=figures["longest_input"],
        loss=f"{figures['held_out_loss']:.3f}",
        accuracy=f"{figures['held_out_accuracy']:.1%}",
        unigram_loss=f"{figures['unigram_loss']:.3f}",
        unigram_accuracy=f"{figures['unigram_accuracy']:.1%}",
        gain=f"{figures['gain_nats']:.3f}",
        targets=f"{figures['held_out_targets']:,}",
        mask_probability=f"{recipe.mask_probability:.0%}",
        corpus=figures["corpus"],
        documents=f"{figures['held_out_documents']:,}",
        all_documents=f"{figures['held_out_documents'] + figures['training_documents']:,}",
        training_tokens=f"{figures['training_tokens']:,}",
        seen_tokens=f"{figures['seen_tokens']:,}",
        steps=f"{recipe.max_steps:,}",
        epochs=f"{figures['seen_tokens'] / figures['training_tokens']:.1f}",
        answers="\n".join(_answer_row(answer) for answer in figures["fill_mask"]),
        example=json.dumps(recipe.fill_mask[0]),
        plot=PLOT,
        command=figures["command"],
        seconds=f"{figures['training_seconds']:,.0f}",
        hardware=figures["hardware"],
        precision="float32" if recipe.mixed_precision == "no" else f"{recipe.mixed_precision} mixed precision",
        processes=figures["processes"],
        versions=figures["versions"],
        recipe=yaml.safe_dump(values, sort_keys=False, width=110).strip(),
    )


def plot_loss(log: RunLog, unigram_loss: float, path: Path) -> None:
    """Draw training and held-out loss by step, with the unigram baseline."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(*log.series("train", "loss"), color="tab:blue", alpha=0.5, label="training")
    axes.plot(*log.series("held_out", "loss"), color="tab:red", marker="o", markersize=3, label="held-out")
    axes.axhline(unigram_loss, color="black", linestyle=":", label="unigram baseline")
    axes.set_xlabel("step")
    axes.set_ylabel("masked-token loss (nats)")
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
    return f"{fence}{padding}{text}{padding}{fence}".replace("|", "\\|")


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if sys.platform == "linux" and information.is_file():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
