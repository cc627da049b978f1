"""Learning on real text, Luna beside RoBERTa: pretraining curves, and scores after finetuning.

    python experiments/learning.py pretrain --data DATA
    python experiments/learning.py speed --data DATA
    python experiments/learning.py finetune --data DATA
    python experiments/learning.py report

DATA has enwiki/{train,validation}.parquet (column `text`) for pretraining, and the task folders for finetuning.
`pretrain` and `finetune` skip finished runs and continue interrupted ones: stop and repeat them freely. `speed` times a
training step of every pretrained system. `report` writes JSON, tables and plots of the finished runs.

Options of `pretrain` and `finetune` that are not listed here, `--key value`, override the recipe (learning.yaml) and
the options of the finetuning commands.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import finetuning
import learning_report
import torch
from accelerate import Accelerator
from running import DEVICE, describe, make_parser, pretrain, publish, run_study, shared_fields
from study_plots import plot_attention, plot_losses
from transformers import AutoConfig, AutoModelForMaskedLM

from luna_hf.scripting import progress, write_json

SCRIPT = "experiments/learning.py"
RECIPE = Path(__file__).with_suffix(".yaml")

# Fields of the recipe's model section that make a system. Luna's key and value are untied, as RoBERTa's are, unless the
# name says `tied`.
_LUNA = {"model_type": "luna", "tie_kv": False, "projection_length": 32}
# Eager attention for RoBERTa, since Luna's is eager on a CPU in bfloat16: PyTorch's fused kernel takes 1.7 times as
# long there. RoBERTa's config counts two rows of positions that are never read.
_EAGER = {"attn_implementation": "eager"}
SYSTEMS: dict[str, dict[str, Any]] = {
    "roberta": {"model_type": "roberta", **_EAGER, "max_position_embeddings": 66, "type_vocab_size": 1},
    "luna-conv": {**_LUNA, "conv_kernel_size": 5},
    "luna-conv-1": {**_LUNA, "conv_kernel_size": 5, "projection_length": 1},
    # RoBERTa's architecture in this package, for the convolution.
    "roberta-conv": {"model_type": "abc_memory", "memory_control": "full", **_EAGER, "conv_kernel_size": 5},
    "luna-32": _LUNA,
    "luna-128": {**_LUNA, "projection_length": 128},
    "luna-conv-tied": {**_LUNA, "conv_kernel_size": 5, "tie_kv": True},
}

PROTOCOL = (
    "All systems share the tokenizer, the order of training rows, the masks, steps and schedule, and the masked "
    "held-out tokens; the seed sets weights, order and masks. Runs follow one another on the same machine. Losses are "
    "those at masked tokens of held-out documents, every eval_steps. Seconds are steps times the median cost of a "
    "training step of the system, measured with all systems taking turns, on a CPU in processor time; evaluation, "
    "saving and loading are not included. The machine was shared during the runs, so their own clock "
    "(training_seconds) is not comparable. While training, RoBERTa computes its head at every position, because "
    "transformers' RoBERTa has no other way; the others compute it at the masked ones. Entropies are shares of their "
    "maximum, and slot similarity is the mean cosine between the packed rows Y_P of a sequence, both over 8 held-out "
    "rows, first layer first."
)
STEPS_PER_TURN = 4


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line; unknown options are overrides."""
    parser = make_parser(__doc__, COMMANDS, "outputs/learning")
    add = parser.add_argument
    add("--systems", nargs="+", choices=SYSTEMS, help="default: all for `pretrain`, three for `finetune`")
    add("--seeds", type=int, nargs="+", help="of pretraining (default: 0) or finetuning (default: 0 1)")
    add("--tasks", nargs="+", choices=finetuning.TASKS, default=list(finetuning.TASKS), help="of `finetune`")
    add("--pretraining-seed", type=int, default=0, help="of the runs that `finetune` starts from (default: 0)")
    add("--rounds", type=int, default=15, help="turns of each system in `speed` (default: 15)")
    options, options.overrides = parser.parse_known_args(arguments)
    return options


def run_folder(options: argparse.Namespace, system: str, seed: int) -> Path:
    """Folder of a pretraining run."""
    return options.runs / "pretrain" / f"{system}-seed{seed}"


def recipe_values(options: argparse.Namespace, system: str, seed: int) -> dict[str, Any]:
    """What the recipe leaves open for one run."""
    return {
        "model_name": f"luna-learning-{system}-seed{seed}",
        "output_dir": run_folder(options, system, seed),
        "seed": seed,
        **{f"model.{name}": value for name, value in SYSTEMS[system].items()},
    }


def pretrain_all(options: argparse.Namespace) -> None:
    """Train every system with every seed, one after the other, unless it is finished."""
    progress("tokenizer")  # trained by a run of one step, and shared by all others
    tokenizer = options.runs / "tokenizer"
    one_step = argparse.Namespace(**{**vars(options), "overrides": [*options.overrides, "--max_steps", "1"]})
    pretrain(one_step, RECIPE, {**recipe_values(options, "roberta", 0), "output_dir": tokenizer})
    for seed in options.seeds or [0]:
        for system in options.systems or SYSTEMS:
            folder = run_folder(options, system, seed)
            if (folder / "run.json").exists():
                progress(f"{system}, seed {seed}: already finished")
                continue
            progress(f"{system}, seed {seed}")
            pretrain(options, RECIPE, {**recipe_values(options, system, seed), "tokenizer": tokenizer})
            describe(options, folder, system=system, seed=seed)


# ---- speed ----


def speed(options: argparse.Namespace) -> None:
    """Time a training step of every pretrained system, in turns: other load on the machine then hits all of them."""
    runs = {run["system"]: (folder, run["recipe"]) for folder, run in learning_report.finished(options.runs)}
    steps = {system: make_step(folder, recipe) for system, (folder, recipe) in runs.items()}
    taken: dict[str, list[float]] = {system: [] for system in steps}
    names = list(steps)
    for turn in range(options.rounds + 1):  # the first warms up
        for system in names[turn % len(names) :] + names[: turn % len(names)]:
            seconds = _seconds(steps[system])
            if turn:
                taken[system].append(seconds / STEPS_PER_TURN)
        progress(f"speed: round {turn} of {options.rounds}")
    measured = {system: {"median": statistics.median(rounds), "rounds": rounds} for system, rounds in taken.items()}
    write_json(options.runs / "speed.json", {**options.header, "seconds_per_step": measured})


def make_step(folder: Path, recipe: dict[str, Any]) -> Callable[[], None]:
    """Forward, backward, clipping and AdamW of a run's model, in its precision, on a batch of random tokens."""
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision=recipe["mixed_precision"])
    backend = {name: recipe["model"][name] for name in ("attn_implementation",) if name in recipe["model"]}
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForMaskedLM.from_config(config, **backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=recipe["weight_decay"])
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    shape = (recipe["global_batch_tokens"] // recipe["block_size"], recipe["block_size"])
    ids = torch.randint(4, config.vocab_size - 1, shape)
    labels = ids.masked_fill(torch.rand(shape) > recipe["mask_probability"], -100)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}

    def step() -> None:
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), recipe["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()

    return step


def _seconds(step: Callable[[], None]) -> float:
    clock = time.process_time if DEVICE == "cpu" else time.perf_counter
    started = clock()
    for _ in range(STEPS_PER_TURN):
        step()
    if DEVICE != "cpu":
        torch.accelerator.synchronize()
    return clock() - started


# ---- tasks and report ----


def finetune(options: argparse.Namespace) -> None:
    """Finetune the chosen systems on the chosen tasks."""
    systems = options.systems or ["roberta", "luna-conv", "luna-conv-1"]
    finetuning.finetune(options, [run_folder(options, system, options.pretraining_seed) for system in systems])


def report(options: argparse.Namespace) -> None:
    """Write the results of the finished runs."""
    order = list(SYSTEMS)
    runs = learning_report.read_runs(options.runs)
    runs.sort(key=lambda run: (run["seed"], order.index(run["system"])))
    shared = shared_fields(SCRIPT, runs, learning_report.OWN)
    model = runs[0]["recipe"]["model"]
    result = {
        **shared,
        "protocol": PROTOCOL,
        "body": {name: value for name, value in model.items() if name not in SYSTEMS["roberta"]},
        "systems": SYSTEMS,
        "unigram_loss": runs[0]["unigram_loss"],
        "runs": [{name: run[name] for name in run if name not in {*shared, "command"}} for run in runs],
    }
    plots = {"": plot_losses, "-attention": plot_attention}
    precision = result["recipe"]["mixed_precision"]
    publish(options.results, "learning-pretrain", precision, result, learning_report.text, plots)
    finetuning.report(options, "learning-finetune", shared)


COMMANDS = {"pretrain": pretrain_all, "speed": speed, "finetune": finetune, "report": report}


def main(arguments: Sequence[str]) -> int:
    """Run one of the commands and return the exit status."""
    return run_study(SCRIPT, parse, COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
