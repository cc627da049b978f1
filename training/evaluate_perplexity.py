"""Perplexity of causal language models at context lengths they were not trained on, in constant memory.

    python training/evaluate_perplexity.py outputs/luna-clm --data texts/
    python training/evaluate_perplexity.py luna=outputs/luna abc=outputs/abc gpt2=outputs/gpt2 --data texts/ \
        --output outputs/perplexity

Our models carry their state on from part to part; other models read windows that overlap. Every length scores the same
tokens. With `--output`, figures, a table and a plot are written there.
It needs the `train` extra: pip install -e ".[train]"
"""

from common import extra  # noqa: F401

# isort: split
import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from engine.card import machine
from engine.output import check_writable
from engine.perplexity import MODES, Settings, evaluate

from luna_hf.scripting import UserError, portable_command, write_json, write_text

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folder or name on the Hub; or LABEL=MODEL")
    parser.add_argument("--data", required=True, help="text to score: a file, a folder, a dataset of the Hub, cpython")
    parser.add_argument("--text-column", default="text", help="where a table holds the text")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192, 16384], help="context lengths")
    parser.add_argument("--tokens", type=int, default=262144, help="tokens to score at most, the same at every length")
    parser.add_argument("--part", type=int, default=512, help="tokens of a forward pass, or of a sliding window")
    parser.add_argument("--stride", type=int, help="tokens that each sliding window scores; half of --part by default")
    parser.add_argument("--rows", type=int, default=8192, help="tokens of a forward pass over all its rows")
    parser.add_argument("--mode", choices=MODES, default="", help="carried (default of our models) or sliding")
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", help="of the models; states stay float32")
    parser.add_argument("--output", default="", help="folder for perplexity.json, perplexity.md and perplexity.png")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Evaluate every model, print a table, and write the files.

    Raises:
        UserError: See `perplexity`.
    """
    settings = Settings(tuple(options.lengths), options.tokens, options.part, options.stride, options.rows)
    if options.output:
        check_writable(Path(options.output))
    models = []
    for word in options.models:
        label, equals, folder = word.partition("=")
        given = (folder if equals else word, options.data, options.text_column, settings)
        figures = evaluate(*given, _DTYPES[options.dtype], options.mode)
        models.append({**figures, "model": label if equals else figures["model"]})
        print(table(models[-1:], settings), flush=True)
    result = {
        "command": command,
        "data": Path(options.data).name,
        "dtype": options.dtype,
        "part": options.part,
        "stride": settings.step,
        "models": models,
        **machine(),
    }
    if len(models) > 1:
        print("\n" + table(models, settings))
    if options.output:
        folder = Path(options.output)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "perplexity.json", result)
        write_text(folder / "perplexity.md", table(models, settings) + "\n")
        plot(models, folder / "perplexity.png")
    return result


def table(models: list[dict[str, Any]], settings: Settings) -> str:
    """Perplexities as a Markdown table, with the bytes that the state takes."""
    lengths = sorted(settings.lengths)
    rows = [
        ["model", "parameters", "context", *(f"{length:,}" for length in lengths), "state"],
        ["---"] * (len(lengths) + 4),
    ]
    for model in models:
        figures = [model["lengths"][str(length)] for length in lengths]
        kept = figures[-1]["state_bytes"]
        rows.append(
            [
                model["model"],
                f"{model['parameters'] / 1e6:.2f} M",
                "carried state" if model["mode"] == "carried" else f"window of {settings.part}",
                *(f"{each['perplexity']:.2f}" for each in figures),
                "none" if kept is None else f"{kept / 2**10:,.0f} KiB",
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def plot(models: list[dict[str, Any]], path: Path) -> None:
    """Draw the perplexity by position in the longest context."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for model in models:
        borders = model["by_position"]["borders"]
        perplexities = torch.tensor(model["by_position"]["loss"]).exp().tolist()
        axes.plot(borders[1:], perplexities, marker="o", label=f"{model['model']} ({model['mode']})")
    axes.set_xscale("log", base=2)
    axes.set_xticks(borders[1:], [f"{a:,}-{b:,}" for a, b in itertools.pairwise(borders)])
    axes.set_xlabel("position in the context (tokens)")
    axes.set_ylabel("perplexity")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; 2 for a mistake of the user."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    try:
        run(options, portable_command(["python", "training/evaluate_perplexity.py", *arguments]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
