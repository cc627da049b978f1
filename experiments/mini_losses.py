"""Held-out losses of the small English models during and after pretraining, as JSON, table and plot."""

from pathlib import Path
from typing import Any

from running import publish, read_json, read_log
from study_plots import panels, plain, save

from luna_hf.scripting import UserError, markdown_table

# The stages of each masked language model, in their order.
CURVES = {
    "luna-mini-en": ("luna-mini-en-128", "luna-mini-en"),
    "roberta-mini-en": ("roberta-mini-en-128", "roberta-mini-en"),
    "abc-mini-en": ("abc-mini-en-fit", "abc-mini-en"),
    "luna-mini-en-4096": ("luna-mini-en-4096",),
    "leapformer-mini-en": ("leapformer-mini-en-128", "leapformer-mini-en"),
    "lavo-mini-en": ("lavo-mini-en-128", "lavo-mini-en"),
    "roberta-tiny-en": ("roberta-tiny-en-128", "roberta-tiny-en"),
    "luna-mini-en-clm": ("luna-mini-en-clm",),
}
PROTOCOL = (
    "Held-out loss and accuracy are measured on articles of the validation split of Wikipedia, on the same masked "
    "tokens for all models with rows of 512 tokens. Tokens and seconds are sums over the stages of a model, without "
    "those of the model that it starts from. The machine was shared, so seconds are not comparable."
)


def publish_losses(runs: Path, results: Path, header: dict[str, Any]) -> None:
    """Write the losses of all finished models; those of others stay as they were published.

    Raises:
        UserError: No model is finished.
    """
    found = {name: describe(runs, stages) for name, stages in CURVES.items() if finished(runs, stages)}
    if not found:
        raise UserError(f"{runs} has no trained model. Run `python experiments/mini.py train` first.")
    for path in results.glob("mini-pretrain-*.json"):
        found = read_json(path)["models"] | found
    models = {name: found[name] for name in CURVES if name in found}
    head = {name: header[name] for name in ("command", "date", "machine", "versions")}
    publish(results, "mini-pretrain", "bf16", {**head, "protocol": PROTOCOL, "models": models}, table, {"": plot})


def finished(runs: Path, stages: tuple[str, ...]) -> bool:
    """Whether all stages of a model are complete."""
    return all((runs / stage / "metrics.json").is_file() for stage in stages)


def describe(runs: Path, stages: tuple[str, ...]) -> dict[str, Any]:
    """Figures of a model's last stage, sums over its stages, and its curve."""
    every = [read_json(runs / stage / "metrics.json") for stage in stages]
    last, curve, before = every[-1], {"tokens": [], "loss": [], "stage": []}, 0
    for number, (stage, figures) in enumerate(zip(stages, every, strict=True)):
        for entry in read_log(runs / stage, "held_out"):
            curve["tokens"].append(before + entry["seen_tokens"])
            curve["loss"].append(entry["loss"])
            curve["stage"].append(number)
        before += figures["seen_tokens"]
    kept = ("parameters", "held_out_loss", "held_out_accuracy", "held_out_targets", "unigram_loss", "unigram_accuracy")
    shared = {name: last[name] for name in (*kept, "longest_input", "hardware")}
    return {
        **shared,
        "commands": [figures["command"] for figures in every],
        "tokens": before,
        "seconds": sum(figures["training_seconds"] for figures in every),
        "slots_off_loss": last.get("slots_off_loss"),
        "window_off_loss": last.get("window_off_loss"),
        "curve": curve,
    }


def table(result: dict[str, Any]) -> str:
    """A Markdown row for each model."""
    rows = []
    for name, model in result["models"].items():
        off = [f"{model[key]:.3f}" if model[key] else "-" for key in ("slots_off_loss", "window_off_loss")]
        loss = f"{model['held_out_loss']:.3f} ({model['unigram_loss']:.3f})"
        sizes = [f"{model['parameters'] / 1e6:.1f} M", f"{model['tokens'] / 1e6:.0f} M"]
        accuracy = f"{100 * model['held_out_accuracy']:.1f}%"
        rows.append([f"`{name}`", *sizes, loss, accuracy, *off, f"{model['seconds'] / 3600:.1f}"])
    header = ["model", "parameters", "tokens", "loss (unigram)", "accuracy", "without slots", "without window", "hours"]
    return markdown_table(header, rows)


def plot(result: dict[str, Any], path: Path) -> None:
    """Held-out loss of the masked language models with rows of 512 tokens against the tokens read."""
    figure, axis = panels(1, 1, (8, 4.5))
    for number, name in enumerate(("luna-mini-en", "roberta-mini-en")):
        if name not in result["models"]:
            continue
        curve = result["models"][name]["curve"]
        for stage in sorted(set(curve["stage"])):
            places = [place for place, own in enumerate(curve["stage"]) if own == stage]
            tokens = [curve["tokens"][place] / 1e6 for place in places]
            losses = [curve["loss"][place] for place in places]
            axis.plot(tokens, losses, color=f"C{number}", label=None if stage else name)
            if stage and not number:
                axis.axvline(tokens[0], color="0.7", linestyle=":", linewidth=1)
                axis.annotate(" rows of 512 tokens", (tokens[0], axis.get_ylim()[1]), va="top", color="0.4", fontsize=9)
    axis.set_xlabel("tokens read (millions)")
    axis.set_ylabel("loss at masked held-out tokens (nats)")
    axis.legend(frameon=False)
    plain(axis)
    save(figure, path)
