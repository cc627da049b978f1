"""The model card of a pretraining run with its measured figures, and the plots of its log."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
import yaml
from common import cards
from common.machine import plural
from huggingface_hub import EvalResult

from engine.log import RunLog
from engine.recipe import Recipe, RunRecipe
from engine.windows import switches_table
from luna_hf.markdown import Markdown, bullets, code, code_block
from luna_hf.scripting import portable

PLOT = "loss.png"


def make_card(
    template: str,
    recipe: RunRecipe,
    figures: dict[str, Any],
    task: str,
    metrics: dict[str, tuple[str, str]],
    **own: Any,
) -> str:
    """Fill a template of `model_cards/` from what `metrics.json` holds.

    `task` is the Hub's pipeline tag; `metrics` gives the name and the figure of each metric in the header;
    `own` are the fields that only this template has.
    """
    dataset = {"dataset_type": "text", "dataset_name": "held-out documents of the training corpus"}
    metadata = cards.metadata(
        name=recipe.model_name,
        model_type=figures["model_type"],
        base_model=recipe.model_name_or_path,
        tags=[figures["model_type"], {"fill-mask": "masked-lm", "text-generation": "causal-lm"}[task]],
        results=[
            EvalResult(task, metric_type=kind, metric_name=name, metric_value=round(figures[key], 4), **dataset)
            for kind, (name, key) in metrics.items()
        ],
        language=recipe.language,
        license=recipe.license,
        pipeline_tag=task,
        datasets=[path for path in _paths(recipe.data) if "/" in path and cards.on_hub(path)],
    )
    return cards.fill(
        template,
        figures["model_type"],
        metadata,
        more_results=Markdown(f"{parts}\n\n" if (parts := switches_table(figures)) else ""),
        **own,
        **run_fields(recipe, figures, PLOT),
        **_result_fields(figures),
        **_data_fields(recipe, figures),
        **_training_fields(recipe, figures),
    )


def count(value: int | None) -> str:
    """A number with separators, or words for one that is unknown while text is streamed."""
    return "an unknown number of" if value is None else f"{value:,}"


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
        "start": figures["start"],
    }


def _data_fields(recipe: RunRecipe, figures: dict[str, Any]) -> dict[str, str]:
    if recipe.validation:
        held_out = f"Evaluated on the text of `{portable(recipe.validation)}`"
    else:
        documents = (figures["training_documents"], figures["held_out_documents"])
        of = "" if None in documents else f" of {sum(documents):,}"
        held_out = f"Documents are held out at random: {count(figures['held_out_documents'])}{of}"
    blocks = f"{figures['evaluated_blocks']:,} of {count(figures['held_out_blocks'])} blocks are evaluated"
    origin = f"comes from `{portable(recipe.tokenizer or recipe.model_name_or_path)}`"
    trained = "is a byte-level BPE trained on the training documents only"
    return {
        "corpus": figures["corpus"],
        "held_out": f"{held_out}; {blocks}.",
        "tokenizer": f"The tokenizer, with {figures['vocabulary']:,} tokens, "
        f"{trained if recipe.train_tokenizer else origin}.",
    }


def _training_fields(recipe: RunRecipe, figures: dict[str, Any]) -> dict[str, str]:
    seen, available = figures["seen_tokens"], figures["training_tokens"]
    times = f", {seen / available:.2g} times the {available:,} tokens of training text" if available else ""
    skipped = f"; {figures['skipped_updates']} updates were skipped" if figures["skipped_updates"] else ""
    return {
        "steps": f"{recipe.max_steps:,} of {recipe.global_batch_tokens:,} tokens{skipped}",
        "seen": f"{seen:,}{times}, in blocks of {recipe.block_size}",
        "mfu": f"{figures['mfu']:.0%}",
        "precision": "float32" if recipe.mixed_precision == "no" else f"{recipe.mixed_precision} mixed precision",
        "processes": plural(figures["processes"], "process", "processes"),
    }


def run_fields(recipe: Recipe, figures: dict[str, Any], plot: str) -> dict[str, str]:
    """What the card of every run states."""
    return {
        "model_name": recipe.model_name,
        "plot": plot,
        "parameters": f"{figures['parameters']:,}",
        "notes": Markdown(f"{bullets(figures['notes'])}\n" if figures["notes"] else ""),
        "command": code(figures["command"]),
        "seconds": f"{figures['training_seconds']:,.0f}",
        **{name: figures[name] for name in ("hardware", "versions")},
        "recipe": code_block(yaml.safe_dump(_portable(asdict(recipe)), sort_keys=False, width=110), "yaml"),
    }


def _portable(value: Any) -> Any:
    """A value without this machine's folders."""
    if isinstance(value, dict):
        return {key: _portable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_portable(each) for each in value]
    return portable(value) if isinstance(value, str) else value


def _paths(data: str | list[Any]) -> list[str]:
    parts = data if isinstance(data, list) else [data]
    return [part if isinstance(part, str) else part["path"] for part in parts]


@contextmanager
def drawing(path: Path, panels: int = 1, width: float = 7.0) -> Iterator[list[Any]]:
    """A row of axes to draw on; saved to `path` afterwards, with grid and legend."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(1, panels, figsize=(width, 4), layout="constrained", squeeze=False)
    yield list(grid[0])
    for axes in grid[0]:
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)


def plot_loss(log: RunLog, unigram_loss: float, path: Path, name: str) -> None:
    """Draw training and held-out loss by step, and the unigram baseline; `name` is the loss in words."""
    with drawing(path) as (axes,):
        axes.plot(*log.series("train", "loss"), color="tab:blue", alpha=0.5, label="training")
        axes.plot(*log.series("held_out", "loss"), color="tab:red", marker="o", markersize=3, label="held-out")
        axes.axhline(unigram_loss, color="black", linestyle=":", label="unigram baseline")
        axes.set_ylabel(f"{name} (nats)")
        axes.set_xlabel("step")
