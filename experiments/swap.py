"""RoBERTa's attention swapped for a bounded memory: loss after the swap, after transfer, and after more training.

    python experiments/learning.py pretrain --data DATA --systems roberta --seeds 1
    python experiments/swap.py run --data DATA
    python experiments/swap.py finetune --data DATA --models RUN ...
    python experiments/swap.py report

The first command trains the RoBERTa of the learning study on blocks of 64 tokens. `run` trains it further on blocks of
256, which gives the teacher; then it converts the teacher to every system, with and without a convolution, with and
without attention transfer, and continues all of them, and the teacher itself, at two learning rates. It skips finished
runs and continues interrupted ones. DATA has enwiki/{train,validation}.parquet (column `text`) and the task folders.
`report` writes JSON, tables and plots of the finished runs.

Options of `run` and `finetune` that are not listed here, `--key value`, override the recipes (swap.yaml,
swap_transfer.yaml) and the options of the finetuning commands.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import finetuning
import swap_report
from pyarrow.parquet import ParquetFile
from running import describe, make_parser, pretrain, publish, run_study, shared_fields

from luna_hf import AbcForMaskedLM, LunaForMaskedLM
from luna_hf.scripting import UserError, load_tokenizer, progress, writing
from luna_hf.warm_start import warm_start

SCRIPT = "experiments/swap.py"
RECIPE = Path(__file__).with_suffix(".yaml")
TRANSFER_RECIPE = RECIPE.with_name("swap_transfer.yaml")


def _abc(control: str, size: int = 64, **fields: Any) -> tuple[type, dict[str, Any]]:
    return AbcForMaskedLM, {"memory_control": control, "memory_size": size, **fields}


# What the teacher becomes: model class and keywords of `warm_start`. `teacher` stays what it is, through the same
# classes; `-random` has the paper's random start of the control.
SYSTEMS: dict[str, tuple[type, dict[str, Any]]] = {
    "teacher": (AbcForMaskedLM, {"memory_control": "full"}),
    "window-64": _abc("sliding_window"),
    "mlp-64": _abc("mlp"),
    "mlp-128": _abc("mlp", 128),
    "linformer-64": _abc("linformer"),
    "random-64": _abc("random"),
    "luna-64": (LunaForMaskedLM, {"projection_length": 64}),
    "luna-128": (LunaForMaskedLM, {"projection_length": 128}),
    "mlp-64-random": _abc("mlp", control_init="random"),
    "linformer-64-random": _abc("linformer", control_init="random"),
}
RATES = {"peak": 3e-3, "third": 1e-3}
CONVOLUTION = 5
# A tenth of the teacher's steps at this block length; the steps of transfer are among them.
CONTINUED_STEPS, TRANSFER_STEPS = 1000, 200
# Keys of a recipe that differ between runs by design.
OWN = {"model_name", "output_dir", "cache_dir", "model_name_or_path", "learning_rate", "max_steps"}

PROTOCOL = (
    "One teacher, one seed. Teacher: the RoBERTa of learning.py (seed 1), trained further with this recipe at blocks "
    "of 256. Every converted model has the same budget of steps, including those of transfer, on the same rows in the "
    "same order with the same masks, and the same held-out masked tokens. Transfer trains the new parameters, and "
    "after 50 steps the other parameters of attention as well. The twin is the teacher itself (full attention), "
    "continued with the same budget, rate and, if the model has one, convolution. A step of transfer also runs the "
    "teacher, so it takes longer than a step of training."
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

    @property
    def included(self) -> bool:
        """Transfer needs new parameters; the random start is compared at one rate, without the convolution."""
        nothing_new = self.system in ("teacher", "window-64") or (self.system == "random-64" and not self.convolution)
        elsewhere = self.system.endswith("-random") and (self.rate != "peak" or self.convolution)
        return not elsewhere and not (self.transfer and nothing_new)


def variants(systems: Sequence[str], rates: Sequence[str]) -> list[Variant]:
    """Every run of the study, the most informative ones first."""
    every = itertools.product(rates, (False, True), (False, True), systems)
    found = [Variant(system, convolution, transfer, rate) for rate, convolution, transfer, system in every]
    return [variant for variant in found if variant.included]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line; unknown options are overrides."""
    parser = make_parser(__doc__, COMMANDS, "outputs/swap")
    add = parser.add_argument
    base = Path("outputs/learning/pretrain/roberta-seed1")
    add("--base", type=Path, default=base, help="RoBERTa to start from (default: %(default)s)")
    add("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="of `run` (default: all)")
    add("--rates", nargs="+", choices=RATES, default=list(RATES), help="of `run` (default: both)")
    add("--continued-steps", type=int, default=CONTINUED_STEPS, help="default: %(default)s")
    add("--transfer-steps", type=int, default=TRANSFER_STEPS, help="of these (default: %(default)s)")
    add("--models", nargs="+", default=[], help="runs to finetune, for example mlp-128-conv-transfer-peak")
    add("--tasks", nargs="+", choices=finetuning.TASKS, default=["sst2", "qnli"], help="of `finetune`")
    add("--seeds", type=int, nargs="+", help="of `finetune` (default: 0 1)")
    options, options.overrides = parser.parse_known_args(arguments)
    if options.what == "finetune" and not options.models:
        raise UserError("`finetune` needs --models, the runs to finetune.")
    return options


# ---- the steps of a run ----


def train_teacher(options: argparse.Namespace) -> Path:
    """The base model, trained further at longer blocks.

    Raises:
        UserError: There is no base model.
    """
    if not (options.base / "config.json").is_file():
        raise UserError(
            f"There is no RoBERTa in {options.base}. Train it with `python experiments/learning.py pretrain --data "
            "DATA --systems roberta --seeds 1`, or name another folder (--base)."
        )
    values = {"model_name": "luna-swap-teacher", "model_name_or_path": options.base, "eval_steps": 500}
    return pretrain(options, RECIPE, {**values, "output_dir": options.runs / "teacher"})


def convert(options: argparse.Namespace, teacher: Path, variant: Variant) -> Path:
    """The teacher with its attention swapped."""
    folder = options.runs / "converted" / variant.converted
    if not folder.is_dir():
        tokenizer = load_tokenizer(str(teacher), required=True)
        model_class, keywords = SYSTEMS[variant.system]
        keywords = {**keywords, "conv_kernel_size": CONVOLUTION if variant.convolution else 0}
        if model_class is LunaForMaskedLM:  # the packed sequence is made from the first document
            batch = next(ParquetFile(options.data / "enwiki" / "train.parquet").iter_batches(1, columns=["text"]))
            text = batch["text"][0].as_py()
            keywords["slot_tokens"] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        model, _ = warm_start(model_class, str(teacher), **keywords)
        with writing(folder) as unfinished:
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
    return folder


def transfer(options: argparse.Namespace, teacher: Path, variant: Variant, converted: Path) -> Path:
    """The converted model, its new parameters fitted to the teacher's attention."""
    values = {
        "model_name": f"luna-swap-{variant.converted}-transferred",
        "output_dir": options.runs / "transferred" / variant.converted,
        "teacher": teacher,
        "model_name_or_path": converted,
        "max_steps": options.transfer_steps,
    }
    return pretrain(options, TRANSFER_RECIPE, values, "transfer_attention")


def run(options: argparse.Namespace) -> None:
    """Convert, transfer and continue every variant that is not finished."""
    teacher = train_teacher(options)
    for variant in variants(options.systems, options.rates):
        folder = options.runs / "continued" / variant.name
        if (folder / "run.json").is_file():
            continue
        progress(variant.name)
        start, spent = convert(options, teacher, variant), 0
        if variant.transfer:
            start, spent = transfer(options, teacher, variant, start), options.transfer_steps
        values = {
            "model_name": f"luna-swap-{variant.name}",
            "output_dir": folder,
            "model_name_or_path": start,
            "max_steps": options.continued_steps - spent,
            "learning_rate": RATES[variant.rate],
        }
        pretrain(options, RECIPE, values)
        describe(options, folder, **dataclasses.asdict(variant), name=variant.name, transfer_steps=spent)


# ---- tasks and report ----


def finetune(options: argparse.Namespace) -> None:
    """Finetune continued models on the chosen tasks."""
    finetuning.finetune(options, [options.runs / "continued" / name for name in options.models])


def report(options: argparse.Namespace) -> None:
    """Write the results of the finished runs."""
    teacher, runs = swap_report.read(options.runs)
    shared = shared_fields(SCRIPT, runs, OWN)
    result = {
        **shared,
        "protocol": PROTOCOL,
        "rates": RATES,
        "systems": {name: keywords for name, (_, keywords) in SYSTEMS.items()},
        "convolution": CONVOLUTION,
        **swap_report.condense(teacher, runs, list(SYSTEMS)),
    }
    precision = shared["recipe"]["mixed_precision"]
    publish(options.results, "swap-pretrain", precision, result, swap_report.text, {"": swap_report.plot})
    finetuning.report(options, "swap-finetune", shared)


COMMANDS = {"run": run, "finetune": finetune, "report": report}


def main(arguments: Sequence[str]) -> int:
    """Run one of the commands and return the exit status."""
    return run_study(SCRIPT, parse, COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
