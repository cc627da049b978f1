"""RoBERTa's attention swapped for a bounded memory, on real text: loss after the swap, after transfer, and continued.

    python experiments/learning.py pretrain --data DATA --systems roberta --seeds 1
    python experiments/swap.py run --data DATA
    python experiments/swap.py finetune --data DATA
    python experiments/swap.py report

The first line trains the RoBERTa of the learning experiments on blocks of 64 tokens. `run` trains it on at blocks of
256: that is the teacher. Then it converts the teacher to every system, with and without a convolution, with and without
attention transfer, and continues all of them, and the teacher itself, at two rates. It works through its list run by
run, leaves finished runs alone and goes on with an interrupted one. DATA is a folder with
enwiki/{train,validation}.parquet (column `text`) and the task folders. `report` writes JSON, tables and plots of what
is there to experiments/results. See benchmarks/README.md for the protocol.
"""

import argparse
import dataclasses
import itertools
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
import pretrain_mlm  # noqa: E402
import swap_report  # noqa: E402
import transfer_attention  # noqa: E402
from common.models import load_tokenizer  # noqa: E402
from common.options import UserError  # noqa: E402
from data.prepare import open_corpus  # noqa: E402
from engine.card import portable, portable_command  # noqa: E402
from measuring import header, progress, result_path, write_json  # noqa: E402

from luna_hf import AbcForMaskedLM, LunaForMaskedLM  # noqa: E402
from luna_hf.warm_start import warm_start  # noqa: E402

RECIPE, TRANSFER_RECIPE = ROOT / "experiments" / "swap.yaml", ROOT / "experiments" / "swap_transfer.yaml"

# What the teacher becomes: model class and keywords of `warm_start`. `teacher` stays what it is, through the same
# classes; the `-random` ones have the paper's random start of their control.
SYSTEMS: dict[str, tuple[type, dict[str, Any]]] = {
    "teacher": (AbcForMaskedLM, {"memory_control": "full"}),
    "window-64": (AbcForMaskedLM, {"memory_control": "sliding_window", "memory_size": 64}),
    "mlp-64": (AbcForMaskedLM, {"memory_control": "mlp", "memory_size": 64}),
    "mlp-128": (AbcForMaskedLM, {"memory_control": "mlp", "memory_size": 128}),
    "linformer-64": (AbcForMaskedLM, {"memory_control": "linformer", "memory_size": 64}),
    "random-64": (AbcForMaskedLM, {"memory_control": "random", "memory_size": 64}),
    "luna-64": (LunaForMaskedLM, {"projection_length": 64}),
    "luna-128": (LunaForMaskedLM, {"projection_length": 128}),
    "mlp-64-random": (AbcForMaskedLM, {"memory_control": "mlp", "memory_size": 64, "control_init": "random"}),
    "linformer-64-random": (
        AbcForMaskedLM,
        {"memory_control": "linformer", "memory_size": 64, "control_init": "random"},
    ),
}
RATES = {"peak": 3e-3, "third": 1e-3}
CONVOLUTION = 5
# A tenth of the teacher's steps at this block length; the steps of transfer are among them.
CONTINUED_STEPS, TRANSFER_STEPS = 1000, 200

PROTOCOL = (
    "One teacher, one seed. Teacher: the RoBERTa of learning.py (seed 1) trained on with this recipe at blocks of 256. "
    "Every converted model has the same budget of steps, those of transfer among them, on the same rows in the same "
    "order with the same masks, and the same held-out masked tokens. Transfer trains the new parameters, after 50 "
    "steps the attention's others as well. The twin is the teacher itself (full attention), continued with the same "
    "budget, rate and, if the model has one, convolution. A step of transfer also runs the teacher: in seconds it "
    "costs more than a step of training."
)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One run: what the teacher becomes, and how it is continued."""

    system: str
    convolution: bool
    transfer: bool
    rate: str

    @property
    def converted(self) -> str:
        """Folder of the converted model."""
        return self.system + ("-conv" if self.convolution else "")

    @property
    def name(self) -> str:
        """Folder of the run."""
        return f"{self.converted}{'-transfer' if self.transfer else ''}-{self.rate}"


def variants(systems: Sequence[str], rates: Sequence[str]) -> list[Variant]:
    """Every run of the experiment, the most telling ones first."""
    everything = itertools.product(rates, (False, True), (False, True), systems)
    found = [Variant(system, convolution, transfer, rate) for rate, convolution, transfer, system in everything]
    return [variant for variant in found if is_of_interest(variant)]


def is_of_interest(variant: Variant) -> bool:
    """Transfer needs new parameters; the random start is compared at one rate, without the convolution."""
    nothing_new = variant.system in ("teacher", "window-64")
    nothing_new |= variant.system == "random-64" and not variant.convolution
    if variant.transfer and nothing_new:
        return False
    return not variant.system.endswith("-random") or (variant.rate == "peak" and not variant.convolution)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line; what follows the known options overrides recipes (`run`) or options of scripts (`finetune`)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    running = commands.add_parser("run", help="train the teacher, convert, transfer, continue")
    running.add_argument("--base", type=Path, default=Path("outputs/learning/pretrain/roberta-seed1"))
    running.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    running.add_argument("--rates", nargs="+", choices=RATES, default=list(RATES))
    running.add_argument("--continued-steps", type=int, default=CONTINUED_STEPS)
    running.add_argument("--transfer-steps", type=int, default=TRANSFER_STEPS)
    running.add_argument("--only-transfer", action="store_true", help="leave out the runs without transfer")
    tuning = commands.add_parser("finetune", help="finetune continued models on the tasks")
    tuning.add_argument("--tasks", nargs="+", choices=learning_finetune.TASKS, default=["sst2", "qnli"])
    tuning.add_argument("--models", nargs="+", required=True, help="names of runs, as `mlp-128-conv-transfer-peak`")
    tuning.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    reporting = commands.add_parser("report", help="write tables and plots of the runs that are finished")
    reporting.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files, tables and plots")
    for command in (running, tuning):
        command.add_argument("--data", type=Path, required=True, help="folder of the corpora and tasks")
        command.add_argument("--threads", type=int, default=1)
    for command in (running, tuning, reporting):
        command.add_argument("--runs", type=Path, default=Path("outputs/swap"), help="folder of the runs")
    options, overrides = parser.parse_known_args(arguments)
    if overrides and options.what == "report":
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    options.overrides = overrides
    return options


# ---- the steps of a run ----


def words(options: argparse.Namespace, name: str, **values: Any) -> list[str]:
    """Overrides of a recipe for one run; those of the command line come last and win."""
    corpus = options.data / "enwiki"
    values = {
        "data": corpus / "train.parquet",
        "validation": corpus / "validation.parquet",
        "model_name": f"luna-swap-{name}",
        "output_dir": options.runs / name,
        "cache_dir": options.runs / "cache",
        **values,
    }
    return [word for key, value in values.items() for word in (f"--{key}", str(value))] + options.overrides


def train_teacher(options: argparse.Namespace, command: str) -> Path:
    """The base model trained on at longer blocks; a finished one is left alone.

    Raises:
        UserError: There is no base model.
    """
    folder = options.runs / "teacher"
    if not (folder / "metrics.json").is_file():
        if not (options.base / "config.json").is_file():
            raise UserError(
                f"There is no RoBERTa in {options.base}. Train it with `python experiments/learning.py pretrain "
                "--data DATA --systems roberta --seeds 1`, or name another folder (--base)."
            )
        progress("the teacher")
        own = words(options, "teacher", model_name_or_path=options.base, eval_steps=500)
        finish(pretrain_mlm.pretrain(pretrain_mlm.read_recipe(str(RECIPE), own), command))
    return folder


def convert(options: argparse.Namespace, teacher: Path, variant: Variant) -> Path:
    """The teacher with its attention swapped."""
    folder = options.runs / "converted" / variant.converted
    if folder.is_dir():
        return folder
    model_class, keywords = SYSTEMS[variant.system]
    keywords = {**keywords, "conv_kernel_size": CONVOLUTION if variant.convolution else 0}
    if model_class is LunaForMaskedLM:
        keywords["slot_tokens"] = first_tokens(options, teacher)
    model, _ = warm_start(model_class, str(teacher), **keywords)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    model.save_pretrained(unfinished)
    load_tokenizer(str(teacher)).save_pretrained(unfinished)
    unfinished.rename(folder)
    return folder


def first_tokens(options: argparse.Namespace, teacher: Path) -> list[int]:
    """Tokens of the first training documents."""
    recipe = pretrain_mlm.read_recipe(str(RECIPE), words(options, "teacher", model_name_or_path=teacher))
    document = next(iter(open_corpus(recipe).training_documents()))
    return load_tokenizer(str(teacher))(document, add_special_tokens=False, verbose=False).input_ids


def transfer(options: argparse.Namespace, teacher: Path, variant: Variant, converted: Path, command: str) -> Path:
    """The converted model, its new parameters fitted to the teacher's attention."""
    name = f"transferred/{variant.converted}"
    if not (options.runs / name / "metrics.json").is_file():
        own = words(
            options,
            name,
            model_name=f"luna-swap-{variant.converted}-transferred",
            teacher=teacher,
            model_name_or_path=converted,
            max_steps=options.transfer_steps,
        )
        finish(transfer_attention.transfer(transfer_attention.read_recipe(str(TRANSFER_RECIPE), own), command))
    return options.runs / name


def run(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Work through the list.

    Raises:
        UserError: See what is called.
        KeyboardInterrupt: A run was stopped by a signal; it is saved, and the rest of the list is not begun.
    """
    torch.set_num_threads(options.threads)
    shared = [portable(word) for word in arguments]
    command = portable_command(["python", "experiments/swap.py", *shared])
    teacher = train_teacher(options, command)
    for variant in variants(options.systems, options.rates):
        folder = options.runs / "continued" / variant.name
        if (folder / "run.json").is_file() or (options.only_transfer and not variant.transfer):
            continue
        progress(variant.name)
        start, steps = convert(options, teacher, variant), options.continued_steps
        if variant.transfer:
            start = transfer(options, teacher, variant, start, command)
            steps -= options.transfer_steps
        name = f"continued/{variant.name}"
        own = words(
            options,
            name,
            model_name=f"luna-swap-{variant.name}",
            model_name_or_path=start,
            max_steps=steps,
            learning_rate=RATES[variant.rate],
        )
        recipe = pretrain_mlm.read_recipe(str(RECIPE), own)
        finish(pretrain_mlm.pretrain(recipe, command))
        values = dataclasses.asdict(recipe)
        values |= {key: portable(values[key]) for key in _PATHS}
        described = {**dataclasses.asdict(variant), "name": variant.name, "recipe": values}
        described["transfer_steps"] = options.transfer_steps if variant.transfer else 0
        write_json(folder / "run.json", {**header(__file__, shared, _device()), **described})


# Keys of a recipe that name places on this machine.
_PATHS = ("data", "validation", "output_dir", "cache_dir", "tokenizer", "model_name_or_path")


def finish(figures: dict[str, Any] | None) -> None:
    """Go on after a finished run.

    Raises:
        KeyboardInterrupt: It was stopped by a signal.
    """
    if figures is None:
        raise KeyboardInterrupt


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


# ---- tasks, report ----


def finetune(options: argparse.Namespace) -> None:
    """Finetune continued models on the chosen tasks.

    Raises:
        UserError: See `learning_finetune.finetune`.
    """
    torch.set_num_threads(options.threads)
    models = [options.runs / "continued" / name for name in options.models]
    folder = options.runs / "finetune"
    learning_finetune.finetune(options.tasks, options.data, models, options.seeds, folder, options.overrides)


def report(options: argparse.Namespace) -> None:
    """Write what the finished runs show.

    Raises:
        UserError: There is no finished run.
    """
    found = swap_report.read(options.runs)
    first = found["runs"][0]
    shared = {name: first[name] for name in ("date", "machine", "versions")}
    device = "cuda" if "accelerator" in first["machine"] else "cpu"
    dtype = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}[first["recipe"]["mixed_precision"]]
    command = "python experiments/swap.py report"
    result = {
        "command": command,
        "commands": sorted({run["command"] for run in found["runs"]}),
        **shared,
        "protocol": PROTOCOL,
        "recipe": {name: value for name, value in first["recipe"].items() if name not in _OWN},
        "rates": RATES,
        "systems": {name: keywords for name, (_, keywords) in SYSTEMS.items()},
        "convolution": CONVOLUTION,
        **swap_report.condense(found, list(SYSTEMS)),
    }
    path = result_path(options.results, "swap-pretrain", device, dtype)
    write_json(path, result)
    result = json.loads(path.read_text(encoding="utf-8"))  # tables and plots show what the file says
    text = swap_report.text(result)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    swap_report.plot(result, path.with_suffix(".png"))
    print(text)
    if tasks := learning_finetune.read_results(options.runs / "finetune"):
        path = result_path(options.results, "swap-finetune", device, dtype)
        learning_finetune.write_report(tasks, shared, command, path)


# Keys of a recipe in which runs differ by design.
_OWN = {"model_name", "output_dir", "cache_dir", "model_name_or_path", "learning_rate", "max_steps"}


def main(arguments: Sequence[str]) -> int:
    """Run one of the commands; 2 for a mistake of the user, 130 when stopped."""
    options = parse(arguments)
    try:
        if options.what == "run":
            run(options, arguments)
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
