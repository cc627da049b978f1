"""What Luna learns on real text beside RoBERTa: pretraining curves, and scores after finetuning.

    python experiments/learning.py pretrain --data DATA
    python experiments/learning.py speed --data DATA
    python experiments/learning.py finetune --data DATA
    python experiments/learning.py report

DATA is a folder with enwiki/{train,validation}.parquet (column `text`) for pretraining, and the task folders for
finetuning. `pretrain` and `finetune` work through their list run by run, leave finished runs alone and go on with an
interrupted one: they may be stopped and given again. `report` reads what is there, and writes JSON, tables and plots to
experiments/results. See benchmarks/README.md for the protocol.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
sys.path[:0] = [str(ROOT / "training"), str(ROOT / "benchmarks")]

import learning_finetune  # noqa: E402
import learning_report  # noqa: E402
import pretrain_mlm  # noqa: E402
from common.options import UserError  # noqa: E402
from data.prepare import open_corpus, train_tokenizer  # noqa: E402
from engine.card import portable, portable_command  # noqa: E402
from learning_plots import plot_attention, plot_losses  # noqa: E402
from learning_speed import measure_steps  # noqa: E402
from measuring import header, progress, result_path, write_json  # noqa: E402

RECIPE = Path(__file__).with_suffix(".yaml")

# What makes a system: its fields in the recipe's model section. Luna's key and value are untied unless the name says
# otherwise, since RoBERTa's are.
_LUNA = {"model_type": "luna", "tie_kv": False, "projection_length": 32}
# RoBERTa's attention is eager, as Luna's is on a CPU in bfloat16: PyTorch's fused kernel takes 1.7 times as long there.
# Its configuration counts two rows of positions that are never read.
_SOFTMAX = {"attn_implementation": "eager", "max_position_embeddings": 66, "type_vocab_size": 1}
SYSTEMS: dict[str, dict[str, Any]] = {
    "roberta": {"model_type": "roberta", **_SOFTMAX},
    "luna-conv": {**_LUNA, "conv_kernel_size": 5},
    "luna-conv-1": {**_LUNA, "conv_kernel_size": 5, "projection_length": 1},
    # RoBERTa's architecture in this package, for the convolution.
    "roberta-conv": {
        "model_type": "abc_memory",
        "memory_control": "full",
        "attn_implementation": "eager",
        "conv_kernel_size": 5,
    },
    "luna-32": _LUNA,
    "luna-128": {**_LUNA, "projection_length": 128},
    "luna-conv-tied": {**_LUNA, "conv_kernel_size": 5, "tie_kv": True},
}

PROTOCOL = (
    "All systems: the same tokenizer, training rows in the same order, masks, steps and schedule, and the same masked "
    "held-out tokens, by the seed alone; a seed is that of weights, order and masks. One run after the other on the "
    "same machine. Losses at masked tokens of held-out documents, after every eval_steps. Seconds: steps times the "
    "median cost of a training step of the system, which is measured with all systems taking turns, on a CPU in "
    "processor time (the machine was shared while the runs were made: their own clock, kept as training_seconds, is "
    "not comparable); evaluation, saving and loading are not in them. RoBERTa computes its head at every position "
    "while training, the others at the masked ones, because transformers' RoBERTa has no other way. Entropies are "
    "shares of their maximum, slot similarity is the mean cosine between the packed rows Y_P of a sequence, both over "
    "8 held-out rows, first layer first."
)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line; what follows the known options of `pretrain` overrides the recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    pretraining = commands.add_parser("pretrain", help="train the systems; --key value overrides the recipe")
    pretraining.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    pretraining.add_argument("--seeds", type=int, nargs="+", default=[0])
    reporting = commands.add_parser("report", help="write tables and plots of the runs that are finished")
    reporting.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files, tables and plots")
    timing = commands.add_parser("speed", help="time a training step of every system, in turns")
    timing.add_argument("--rounds", type=int, default=15)
    tuning = commands.add_parser("finetune", help="finetune on the tasks; --key value overrides the scripts' options")
    tuning.add_argument("--tasks", nargs="+", choices=learning_finetune.TASKS, default=list(learning_finetune.TASKS))
    tuning.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["roberta", "luna-conv", "luna-conv-1"])
    tuning.add_argument("--pretraining-seed", type=int, default=0, help="which runs to start from")
    tuning.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of the finetuning")
    for command in (pretraining, timing, tuning):
        command.add_argument("--data", type=Path, required=True, help="folder of the corpora and tasks")
        command.add_argument("--threads", type=int, default=1)
    for command in (pretraining, timing, tuning, reporting):
        command.add_argument("--runs", type=Path, default=Path("outputs/learning"), help="folder of the runs")
    options, overrides = parser.parse_known_args(arguments)
    if overrides and options.what == "report":
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    options.overrides = overrides
    return options


def run_folder(runs: Path, system: str, seed: int) -> Path:
    """Where a pretraining run stands."""
    return runs / "pretrain" / f"{system}-seed{seed}"


def shared_tokenizer(options: argparse.Namespace) -> Path:
    """The tokenizer of all runs, trained on the training documents the first time.

    Raises:
        UserError: The corpus cannot be read.
    """
    folder = options.runs / "tokenizer"
    if not folder.exists():
        recipe = pretrain_mlm.read_recipe(str(RECIPE), recipe_words(options, "roberta", seed=0))
        progress("training the tokenizer")
        documents = open_corpus(recipe).training_documents()
        unfinished = folder.with_name("tokenizer.unfinished")
        train_tokenizer(documents, recipe.vocab_size, recipe.block_size).save_pretrained(unfinished)
        unfinished.rename(folder)
    return folder


def recipe_words(options: argparse.Namespace, system: str, seed: int) -> list[str]:
    """Overrides of the recipe for one run; those of the command line come last and win.

    The seed is that of everything: weights, order and masks. Systems with one seed see the same rows and masks.
    """
    corpus = options.data / "enwiki"
    values = {
        "data": corpus / "train.parquet",
        "validation": corpus / "validation.parquet",
        "model_name": f"luna-learning-{system}-seed{seed}",
        "output_dir": run_folder(options.runs, system, seed),
        "cache_dir": options.runs / "cache",
        "seed": seed,
        **{f"model.{name}": value for name, value in SYSTEMS[system].items()},
    }
    words = [word for name, value in values.items() for word in (f"--{name}", _word(value))]
    return words + options.overrides


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def pretrain(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Train every system with every seed, one after the other, unless it is finished.

    Raises:
        UserError: See `pretrain_mlm.pretrain`.
        KeyboardInterrupt: A run was stopped by a signal; it is saved, and the rest of the list is not begun.
    """
    torch.set_num_threads(options.threads)
    shared = [portable(word) for word in arguments]
    tokenizer = ["--tokenizer", str(shared_tokenizer(options))]
    for seed in options.seeds:
        for system in options.systems:
            folder = run_folder(options.runs, system, seed)
            if (folder / "run.json").exists():
                progress(f"{system}, seed {seed}: finished before")
                continue
            progress(f"{system}, seed {seed}")
            recipe = pretrain_mlm.read_recipe(str(RECIPE), recipe_words(options, system, seed) + tokenizer)
            if pretrain_mlm.pretrain(recipe, portable_command(["python", "experiments/learning.py", *shared])) is None:
                raise KeyboardInterrupt
            values = dataclasses.asdict(recipe)
            values |= {name: portable(values[name]) for name in _PATHS}
            described = {"system": system, "seed": seed, "recipe": values}
            write_json(folder / "run.json", {**header(__file__, shared, _device()), **described})


# Keys of a recipe that name places on this machine.
_PATHS = ("data", "validation", "output_dir", "cache_dir", "tokenizer")


def speed(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Measure a training step of every system, side by side.

    Raises:
        UserError: A wrong override.
    """
    torch.set_num_threads(options.threads)
    recipes = {
        system: pretrain_mlm.read_recipe(str(RECIPE), recipe_words(options, system, seed=0)) for system in SYSTEMS
    }
    shared = [portable(word) for word in arguments]
    options.runs.mkdir(parents=True, exist_ok=True)
    result = {**header(__file__, shared, _device()), "seconds_per_step": measure_steps(recipes, options.rounds)}
    write_json(options.runs / "speed.json", result)


def finetune(options: argparse.Namespace) -> None:
    """Finetune the chosen systems on the chosen tasks.

    Raises:
        UserError: See `learning_finetune.finetune`.
    """
    torch.set_num_threads(options.threads)
    models = [run_folder(options.runs, system, options.pretraining_seed) for system in options.systems]
    folder = options.runs / "finetune"
    learning_finetune.finetune(options.tasks, options.data, models, options.seeds, folder, options.overrides)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def report(options: argparse.Namespace) -> None:
    """Write what the finished runs show: JSON, Markdown and plots.

    Raises:
        UserError: There is no finished run, no measured speed, or runs of different recipes.
    """
    runs = learning_report.read_runs(options.runs)
    order = list(SYSTEMS)
    runs.sort(key=lambda run: (run["seed"], order.index(run["system"])))
    recipe = {name: value for name, value in runs[0]["recipe"].items() if name not in learning_report.OWN}
    shared = {name: runs[0][name] for name in ("date", "machine", "versions")}
    device = "cuda" if "accelerator" in runs[0]["machine"] else "cpu"
    dtype = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}[recipe["mixed_precision"]]
    result = {
        "command": "python experiments/learning.py report",
        "commands": sorted({run["command"] for run in runs}),
        **shared,
        "protocol": PROTOCOL,
        "recipe": recipe,
        "body": {name: value for name, value in runs[0]["recipe"]["model"].items() if name not in SYSTEMS["roberta"]},
        "systems": {system: SYSTEMS[system] for system in order},
        "unigram_loss": runs[0]["unigram_loss"],
        "conclusions": learning_report.conclude(runs),
        "runs": [{name: run[name] for name in run if name not in _SHARED} for run in runs],
    }
    path = result_path(options.results, "learning-pretrain", device, dtype)
    write_json(path, result)
    result = json.loads(path.read_text(encoding="utf-8"))  # table and plots show what the file says
    runs = result["runs"]
    text = f"{learning_report.table(runs, order)}\n\n{learning_report.sentences(result['conclusions'])}\n"
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    title = plot_title(result)
    plot_losses(runs, title, path.with_suffix(".png"))
    plot_attention(runs, title, path.with_name(f"{path.stem}-attention.png"))
    print(text)
    tasks = learning_finetune.read_results(options.runs / "finetune")
    if tasks:
        path = result_path(options.results, "learning-finetune", device, dtype)
        learning_finetune.write_report(tasks, shared, "python experiments/learning.py report", path)


_SHARED = {"command", "date", "machine", "versions", "recipe"}


def plot_title(result: dict[str, Any]) -> str:
    """What was run, on what."""
    recipe, machine, model = result["recipe"], result["machine"], result["body"]
    return (
        f"{model['num_hidden_layers']} layers of width {model['hidden_size']}, blocks of {recipe['block_size']}, "
        f"{recipe['global_batch_tokens']:,} tokens a step, vocabulary of {recipe['vocab_size']:,}; "
        f"{machine.get('accelerator', machine['cpu'])}, {machine['threads']} thread(s)"
    )


def main(arguments: Sequence[str]) -> int:
    """Run one of the commands; 2 for a mistake of the user, 130 when stopped."""
    options = parse(arguments)
    try:
        if options.what == "pretrain":
            pretrain(options, arguments)
        elif options.what == "speed":
            speed(options, arguments)
        elif options.what == "finetune":
            finetune(options)
        else:
            report(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
