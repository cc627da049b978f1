r"""Perplexity of causal language models at context lengths beyond their training, in constant memory.

    python training/evaluate_perplexity.py outputs/luna-clm --data texts/
    python training/evaluate_perplexity.py luna=outputs/luna abc=outputs/abc gpt2=outputs/gpt2 --data texts/ \
        --output outputs/perplexity

Models of luna_hf carry their state from part to part; other models read overlapping windows. Every length scores the
same tokens. Needs the `train` extra: pip install -e ".[train]"
"""

from common import extra  # noqa: F401

# isort: split
import itertools
import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from common.finish import check_end
from common.machine import machine
from common.models import CAUSAL, load_config, load_tokenizer
from common.options import parse
from engine.card import drawing
from engine.perplexity import Settings, evaluate

from luna_hf.markdown import table
from luna_hf.scripting import locked, portable_command, run_script, write_json, write_text


def run(settings: Settings, command: str) -> dict[str, Any]:
    """Evaluate every model, print a table, and write the files.

    Raises:
        UserError: See `perplexity.evaluate`.
    """
    models, parts = [], [word.partition("=") for word in settings.models]
    named = [(label if equals else "", folder if equals else label) for label, equals, folder in parts]
    for _, folder in named:  # what is missing is found before the first is evaluated
        load_tokenizer(folder, load_config(folder, kind=CAUSAL), padded=False)
    for label, folder in named:
        figures = evaluate(folder, settings)
        models.append({**figures, "model": label or figures["model"]})
        print(report(models[-1:], settings), flush=True)
    result = {
        "command": command,
        "data": Path(settings.data).name or settings.data,
        "dtype": settings.dtype,
        "part": settings.part,
        "stride": settings.step,
        "models": models,
        **machine(),
    }
    if len(models) > 1:
        print("\n" + report(models, settings))
    if settings.output:
        folder = Path(settings.output)
        write_json(folder / "perplexity.json", result)
        write_text(folder / "perplexity.md", report(models, settings) + "\n")
        plot(models, folder / "perplexity.png")
    return result


def report(models: list[dict[str, Any]], settings: Settings) -> str:
    """Perplexities as a Markdown table, with the size of the state."""
    lengths = sorted(settings.lengths)
    rows = []
    for model in models:
        figures = [model["lengths"][str(length)] for length in lengths]
        state = figures[-1]["state_bytes"]
        rows.append(
            [
                model["model"],
                f"{model['parameters'] / 1e6:.2f} M",
                "carried state" if model["mode"] == "carried" else f"window of {settings.part}",
                *(f"{each['perplexity']:.2f}" for each in figures),
                "none" if state is None else f"{state / 2**10:,.0f} KiB",
            ]
        )
    return table(["model", "parameters", "context", *(f"{length:,}" for length in lengths), "state"], rows)


def plot(models: list[dict[str, Any]], path: Path) -> None:
    """Draw the perplexity by position in the longest context."""
    with drawing(path) as (axes,):
        for model in models:
            borders, losses = model["by_position"]["borders"], model["by_position"]["loss"]
            label = f"{model['model']} ({model['mode']})"
            axes.plot(borders[1:], [math.exp(loss) for loss in losses], marker="o", label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(borders[1:], [f"{a:,}-{b:,}" for a, b in itertools.pairwise(borders)])
        axes.set_xlabel("position in the context (tokens)")
        axes.set_ylabel("perplexity")


def main(words: Sequence[str] | None = None) -> int:
    """Run from the command line; see `run_script` for the exit status."""
    words = sys.argv[1:] if words is None else list(words)

    def script() -> None:
        options = {"command": "evaluate_perplexity", "recipe": "none", "positional": "models"}
        (settings,) = parse([Settings], words, __doc__, **options)
        if settings.output:
            check_end(Path(settings.output), "--output")
        with locked(Path(settings.output, ".lock")) if settings.output else nullcontext():
            run(settings, portable_command(["python", "training/evaluate_perplexity.py", *words]))

    return run_script(script, "no file was written", clean_on_sigterm=False)


if __name__ == "__main__":
    sys.exit(main())
