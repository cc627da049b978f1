"""What longer inputs are worth: movie reviews read up to 256, 512, 1,024 and 2,048 tokens.

    python experiments/longer.py run --data DATA --models roberta=FOLDER mixed=FOLDER
    python experiments/longer.py speed --models roberta=FOLDER mixed=FOLDER
    python experiments/longer.py report

`run` finetunes pretrained models on IMDB at every length, with one setting for all; it skips finished runs. `speed`
measures time and memory of a training step at every length, each in a separate process. DATA has the folder
`imdb`. `report` writes JSON, a table and a plot.

Options of `run` that are not listed here, `--key value`, override those of the finetuning command.
"""

import argparse
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import finetuning
import torch
from finetuning import Finetuning
from running import launch, make_parser, publish, read_json, run_study
from study_plots import panels, plain, save
from transformers import AutoConfig, AutoModelForSequenceClassification

from luna_hf.scripting import UserError, markdown_table, progress, write_json

SCRIPT = "experiments/longer.py"
LENGTHS = (256, 512, 1024, 2048)
ROWS, EPOCHS = 3000, 2
# With the state of <s> instead of the mean, softmax attention does not leave chance in as many steps.
POOLING = "mean"
# A measured step reads the same number of tokens at every length.
STEP_TOKENS, STEPS = 8192, 5
PROTOCOL = (
    "Finetuning with one setting for all models and lengths (see setting); the weights after the last step count. The "
    "classifier reads the mean of the states. Reviews are cut to the length; learned positions are repeated beyond "
    "those of pretraining. Accuracy on 2,000 reviews of the test split, drawn once: one standard error is 1 point. "
    "Seconds and memory: a training step (forward, backward, AdamW, bfloat16) on full rows, in a separate process; "
    "seconds are processor time, the median of the steps after the first; memory is the growth of the process's peak "
    "over its size with model and optimizer loaded."
)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line; unknown options are overrides."""
    parser = make_parser(__doc__, COMMANDS, "outputs/longer")
    add = parser.add_argument
    add("--models", nargs="+", default=[], metavar="NAME=FOLDER", help="pretrained models")
    add("--lengths", type=int, nargs="+", default=list(LENGTHS), help="default: all")
    add("--seeds", type=int, nargs="+", default=[0, 1], help="default: 0 1")
    options, options.overrides = parser.parse_known_args(arguments)
    if options.what != "report" and not all("=" in model for model in options.models or [""]):
        raise UserError(f"`{options.what}` needs --models NAME=FOLDER ...")
    options.models = dict(model.split("=", 1) for model in options.models)
    return options


def run(options: argparse.Namespace) -> None:
    """Finetune every model at every length, the shortest first."""
    for length in options.lengths:
        for name, folder in options.models.items():
            progress(f"{name}, {length:,} tokens")
            given = {**finetuning.IMDB, "max_eval_samples": 2000}
            if pools(folder):
                given["model_config"] = f"classifier_pooling={POOLING}"
            task = Finetuning("imdb", ROWS, EPOCHS, length, given)
            output = options.runs / "finetune" / name / f"{length}"
            words = task.words(options.data, [Path(folder)], options.seeds, output)
            launch(task.script, [*words, *options.overrides], options.threads)


def pools(folder: str) -> bool:
    """Whether a model's classifier can read the mean of the states; that of transformers' RoBERTa cannot."""
    return hasattr(AutoConfig.from_pretrained(folder), "classifier_pooling")


# ---- cost ----


def speed(options: argparse.Namespace) -> None:
    """Time and memory of a training step of every model at every length."""
    costs = {}
    for name, folder in options.models.items():
        for length in options.lengths:
            cost = apart(step_cost, folder, length, options.threads)
            progress(f"{name}, {length:,} tokens: {cost['seconds']:.2f} s, {cost['mebibytes']:.0f} MiB")
            costs.setdefault(name, {})[f"{length}"] = cost
    write_json(options.runs / "cost.json", {**options.header, "step_tokens": STEP_TOKENS, "costs": costs})


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function, run in a separate process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def step_cost(folder: str, length: int, threads: int) -> dict[str, float]:
    """Processor seconds of a training step, and the growth of the process's peak memory in MiB."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = load(folder, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    shape = (max(STEP_TOKENS // length, 1), length)
    ids = torch.randint(5, model.config.vocab_size - 1, shape)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.zeros(len(ids)).long()}

    def step() -> float:
        started = time.process_time()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - started

    before = _resident()
    seconds = [step() for _ in range(STEPS + 1)][1:]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # KiB on Linux
    return {"seconds": statistics.median(seconds), "slowest": max(seconds), "mebibytes": peak - before}


def load(folder: str, length: int) -> Any:
    """A model for classification that takes `length` tokens, in training mode."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "training"))
    from common.models import extend_positions

    fields = {"classifier_pooling": POOLING} if pools(folder) else {}
    model = AutoModelForSequenceClassification.from_pretrained(folder, **fields)
    extend_positions(model, length)
    return model.train()


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


# ---- report ----


def report(options: argparse.Namespace) -> None:
    """Write scores and costs of the finished runs."""
    cost = options.runs / "cost.json"
    if not cost.is_file():
        raise UserError(f"{cost} is missing. Run `python {SCRIPT} speed` first.")
    measured, models, commands = read_json(cost), {}, []
    for path in sorted((options.runs / "finetune").glob("*/*/results.json")):
        results = read_json(path)
        found = finetuning.condense(results)
        (own,) = found["models"].values()
        commands.append(found["command"])
        scores = [score[found["metric"]] for score in own["scores"]]
        entry = {"scores": scores, "seeds": own["seeds"], "learning_rate": results["runs"][0]["learning_rate"]}
        models.setdefault(path.parents[1].name, {})[path.parent.name] = entry
    for name, costs in measured["costs"].items():
        for length, one in costs.items():
            models.setdefault(name, {}).setdefault(length, {}).update(one)
    result = {
        "command": f"python {SCRIPT} report",
        "commands": [measured["command"]],
        "finetuning": commands,
        **{name: measured[name] for name in ("date", "machine", "versions", "step_tokens")},
        "protocol": PROTOCOL,
        "setting": {**finetuning.SETTING, "rows": ROWS, "epochs": EPOCHS},
        "models": models,
    }
    publish(options.results, "longer-imdb", "bf16", result, text, {"": plot})


def text(result: dict[str, Any]) -> str:
    """A row for each model and length."""
    header = [
        "model",
        "learning rate",
        "tokens",
        "accuracy (%)",
        f"seconds for {result['step_tokens']:,} tokens",
        "memory (MiB)",
    ]
    rows = []
    for name, lengths in result["models"].items():
        for length, own in sorted(lengths.items(), key=lambda item: int(item[0])):
            score = finetuning.score_cell([100 * score for score in own["scores"]]) if "scores" in own else "-"
            cost = [f"{own['seconds']:.2f}", f"{own['mebibytes']:.0f}"] if "seconds" in own else ["-", "-"]
            rate = f"{own['learning_rate']:g}" if "scores" in own else "-"
            rows.append([f"`{name}`", rate, f"{int(length):,}", score, *cost])
    return markdown_table(header, rows)


def plot(result: dict[str, Any], path: Path) -> None:
    """Accuracy, seconds and memory against the length of the input."""
    figure, axes = panels(1, 3, (13, 4))
    for name, lengths in result["models"].items():
        every = sorted((int(length), own) for length, own in lengths.items())
        scored = [(length, own["scores"]) for length, own in every if "scores" in own]
        means = [100 * statistics.mean(scores) for _, scores in scored]
        (line,) = axes[0].plot([length for length, _ in scored], means, marker="o", label=name)
        for length, scores in scored:
            axes[0].plot([length] * len(scores), [100 * score for score in scores], ".", color=line.get_color())
        for axis, field in zip(axes[1:], ("seconds", "mebibytes"), strict=True):
            costs = [(length, own[field]) for length, own in every if field in own]
            if costs:
                axis.plot(*zip(*costs, strict=True), marker="o", color=line.get_color())
    titles = ("accuracy (%)", f"seconds of a step of {result['step_tokens']:,} tokens", "memory of the step (MiB)")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("tokens of a review, at most")
        axis.set_title(title, fontsize=10)
        plain(axis)
    axes[0].legend(frameon=False)
    save(figure, path)


COMMANDS = {"run": run, "speed": speed, "report": report}


def main(arguments: Sequence[str]) -> int:
    """Run one of the commands and return the exit status."""
    return run_study(SCRIPT, parse, COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
