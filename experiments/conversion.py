"""A RoBERTa converted to window and slots with its teacher's help: loss, what the loss is made of, and tasks.

    python experiments/learning.py pretrain --data DATA --systems roberta --seeds 1
    python experiments/swap.py run --data DATA --systems teacher --rates third
    python experiments/conversion.py run --data DATA --teacher outputs/swap/teacher
    python experiments/conversion.py finetune --data DATA --models RUN ...
    python experiments/conversion.py report

    python experiments/conversion.py grow --data DATA --teacher outputs/swap/teacher --runs outputs/deeper
    python experiments/conversion.py run --data DATA --runs outputs/deeper --teacher outputs/deeper/teacher --rate 3e-4
    python experiments/conversion.py layers --data DATA --runs outputs/deeper --teacher outputs/deeper/teacher \
        --models luna-seed0 mlp-seed0 --subject conversion-deeper
    python experiments/conversion.py report --runs outputs/deeper --subject conversion-deeper

The first two commands train the teacher of the warm-start study. `run` converts it to every cell of the study: stage A
fits the attention of every layer to the teacher's, stage B trains the whole model on masked text while it imitates the
teacher. A cell takes as many steps as the twin, which is the teacher itself, trained further. `run` skips finished
runs and continues interrupted ones. DATA has enwiki/{train,validation}.parquet (column `text`) and the task folders.
`report` writes JSON, tables and plots of the finished runs. `layers` measures what each converted layer costs after
stage A. `grow` makes a teacher of twice the depth and width, in RUNS/teacher.

Options of `run`, `grow` and `finetune` that are not listed here, `--key value`, override the recipe (conversion.yaml)
and the options of the finetuning commands.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import conversion_layers
import conversion_report
import finetuning
import torch
from grow import deepen, widen
from pyarrow.parquet import ParquetFile
from running import describe, make_parser, pretrain, publish, run_study, shared_fields
from transformers import RobertaForMaskedLM

from luna_hf import AbcForMaskedLM, LunaForMaskedLM
from luna_hf.scripting import UserError, load_tokenizer, progress, writing
from luna_hf.warm_start import warm_start

SCRIPT = "experiments/conversion.py"
RECIPE = Path(__file__).with_suffix(".yaml")
# Keys of a recipe that differ between runs by design.
OWN = {
    *("model_name", "output_dir", "cache_dir", "model_name_or_path", "learning_rate", "max_steps", "seed"),
    *("parameter_groups", "window_dropout", "teacher", "mlm_weight", "kl_weight", "hidden_weight"),
}

# What the teacher lacks. Stage A trains it alone; in stage B, its rate is a multiple of the body's.
NEW = r"control|slot_scale|pack"
FIT_RATE = 3e-3
NEW_FACTOR = 3
WEIGHTS = {"mlm_weight": 1.0, "kl_weight": 1.0, "hidden_weight": 1.0}
# Window dropout of stage A; in stage B, half a window or none is drawn ever more rarely.
HALF_OFF = {"windows": [0], "probability": 0.5, "final_probability": 0.5}
# How a grown teacher is trained.
GROWN = {"learning_rate": 1e-3, "max_steps": 10000, "save_steps": 1000}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One way to convert the teacher.

    Attributes:
        family: what writes the slots, "mlp" (ABC) or "luna"; for a window alone, "window"; "teacher" for the twin.
        window, slots: sizes; 0 for none.
        bias: whether a slot's logit counts its tokens.
        teacher: whether the teacher helps, in both stages; without it, all steps are masked-language modelling.
        dropout: whether the window is left out of some batches.
        full: layers that keep the teacher's attention.
    """

    family: str
    window: int = 0
    slots: int = 0
    bias: bool = True
    teacher: bool = True
    dropout: bool = False
    full: tuple[int, ...] = ()

    def start(self) -> tuple[type, dict[str, Any]]:
        """Model class and keywords of `warm_start`."""
        if self.family == "teacher":
            return AbcForMaskedLM, {"memory_control": "full"}
        if self.family == "window":
            return AbcForMaskedLM, {"memory_control": "sliding_window", "memory_size": self.window}
        keywords: dict[str, Any] = {"full_attention_layers": list(self.full)} if self.full else {}
        if self.window:
            keywords |= {"local_window": self.window, "slot_count_bias": self.bias}
        if self.family == "luna":
            return LunaForMaskedLM, {"projection_length": self.slots, **keywords}
        return AbcForMaskedLM, {"memory_control": self.family, "memory_size": self.slots, **keywords}


def cells(window: int, slots: int) -> dict[str, Cell]:
    """Every cell of the study, the most informative ones first."""
    both = {family: Cell(family, window, slots) for family in ("mlp", "luna")}
    ablations = {
        "no-teacher": {"teacher": False},
        "dropout": {"dropout": True},
        "no-bias": {"bias": False},
        "full-0": {"full": (0,)},
        "full-1": {"full": (1,)},
        "full-2": {"full": (2,)},  # of a deeper teacher
        "window-32": {"window": 32},
    }
    return {
        "teacher": Cell("teacher"),
        **both,
        "window": Cell("window", window),
        **{f"{family}-slots": Cell(family, 0, slots) for family in both},
        **{
            f"{family}-{name}": dataclasses.replace(cell, **fields)
            for name, fields in ablations.items()
            for family, cell in both.items()
        },
    }


PROTOCOL = (
    "One teacher. The twin is the teacher itself, trained further on masked text for as many steps, at the rate of the "
    "body. All runs of a seed see the same rows in the same order with the same masks; the seed sets order and masks. "
    "Held-out masked tokens are the same for all. Steps of stage A are among the steps of a run; a step with the "
    "teacher's help also runs the teacher. Slots off and window off: the finished model, evaluated without them."
)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line; unknown options are overrides."""
    parser = make_parser(__doc__, COMMANDS, "outputs/conversion")
    add = parser.add_argument
    add("--teacher", type=Path, default=Path("outputs/swap/teacher"), help="RoBERTa to convert (default: %(default)s)")
    add("--cells", nargs="+", help="of `run` (default: all for two layers)")
    add("--seeds", type=int, nargs="+", default=[0, 1], help="of `run` or `finetune` (default: 0 1)")
    add("--window", type=int, default=8, help="tokens around each token (default: %(default)s)")
    add("--slots", type=int, default=64, help="default: %(default)s")
    add("--steps", type=int, default=1000, help="of a run (default: %(default)s)")
    add("--rate", type=float, default=1e-3, help="learning rate of the body; a third of the teacher's is a good start")
    add("--transfer-steps", type=int, default=100, help="of these (default: %(default)s)")
    add("--models", nargs="+", default=[], help="of `finetune` and `layers`: runs, such as mlp-seed0")
    add("--tasks", nargs="+", choices=finetuning.TASKS, default=["sst2", "qnli"], help="of `finetune`")
    add("--subject", default="conversion", help="name of the results of `report` (default: %(default)s)")
    options, options.overrides = parser.parse_known_args(arguments)
    known = cells(options.window, options.slots)
    options.cells = options.cells or [name for name in known if not name.endswith("full-2")]
    if unknown := set(options.cells) - set(known):
        raise UserError(f"There is no cell {sorted(unknown)[0]!r}. Cells: {', '.join(known)}.")
    if options.what == "finetune" and not options.models:
        raise UserError("`finetune` needs --models, the runs to finetune.")
    return options


# ---- the steps of a run ----


def first_text(options: argparse.Namespace) -> list[int]:
    """The tokens of the first training document."""
    batch = next(ParquetFile(options.data / "enwiki" / "train.parquet").iter_batches(1, columns=["text"]))
    tokenizer = load_tokenizer(str(options.teacher), required=True)
    return tokenizer(batch["text"][0].as_py(), add_special_tokens=False, verbose=False).input_ids


def grow(options: argparse.Namespace) -> None:
    """Train a teacher that starts as a wider and deeper copy of another."""
    start = options.runs / "grown"
    if not start.is_dir():
        model = RobertaForMaskedLM.from_pretrained(options.teacher).eval()
        model = deepen(widen(model), torch.tensor([first_text(options)[:256]]))
        with writing(start) as unfinished:
            model.save_pretrained(unfinished)
            load_tokenizer(str(options.teacher), required=True).save_pretrained(unfinished)
    values = {"model_name": "conversion-teacher", "model_name_or_path": start, "output_dir": options.runs / "teacher"}
    pretrain(options, RECIPE, {**values, **GROWN})


def convert(options: argparse.Namespace, name: str, cell: Cell) -> Path:
    """The teacher with its attention swapped."""
    folder = options.runs / "converted" / name
    if not folder.is_dir():
        tokenizer = load_tokenizer(str(options.teacher), required=True)
        model_class, keywords = cell.start()
        if model_class is LunaForMaskedLM:  # the packed sequence is made from the first document
            keywords["slot_tokens"] = first_text(options)
        model, _ = warm_start(model_class, str(options.teacher), **keywords)
        with writing(folder) as unfinished:
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
    return folder


def run_cell(options: argparse.Namespace, name: str, cell: Cell, seed: int) -> None:
    """Convert the teacher and train it in stages, unless that run is finished."""
    folder = options.runs / "runs" / f"{name}-seed{seed}"
    if (folder / "run.json").is_file():
        return
    progress(folder.name)
    shared = {"seed": seed, "model_name_or_path": convert(options, name, cell)}
    helped = cell.teacher and cell.family != "teacher"
    spent = 0
    if helped and cell.slots:  # a window alone has nothing to fit
        spent = options.transfer_steps
        values = {
            **shared,
            "model_name": f"{folder.name}-fitted",
            "window_dropout": HALF_OFF if cell.dropout else {},
            "output_dir": options.runs / "fitted" / folder.name,
            "teacher": options.teacher,
            "max_steps": spent,
            "learning_rate": FIT_RATE,
            "parameter_groups": [{"match": NEW}, {"match": "", "frozen_steps": spent}],
        }
        shared["model_name_or_path"] = pretrain(options, RECIPE, values, "transfer_attention")
    values = {
        **shared,
        "model_name": folder.name,
        "window_dropout": {"windows": [0, cell.window // 2]} if cell.dropout else {},
        "output_dir": folder,
        "max_steps": options.steps - spent,
        "learning_rate": options.rate,
        "parameter_groups": [{"match": NEW, "learning_rate": NEW_FACTOR * options.rate}] if cell.slots else [],
        **({"teacher": options.teacher, **WEIGHTS} if helped else {}),
    }
    pretrain(options, RECIPE, values, "distill_mlm" if helped else "pretrain_mlm")
    describe(options, folder, name=name, seed=seed, cell=dataclasses.asdict(cell), transfer_steps=spent)


def run(options: argparse.Namespace) -> None:
    """Train every cell with every seed, one after the other, unless it is finished."""
    known = cells(options.window, options.slots)
    for name in options.cells:
        for seed in options.seeds:
            run_cell(options, name, known[name], seed)


# ---- tasks and report ----


def finetune(options: argparse.Namespace) -> None:
    """Finetune finished runs on the chosen tasks."""
    finetuning.finetune(options, [options.runs / "runs" / name for name in options.models])


def report(options: argparse.Namespace) -> None:
    """Write the results of the finished runs."""
    runs = conversion_report.read(options.runs)
    shared = shared_fields(SCRIPT, runs, OWN)
    order = list(cells(options.window, options.slots))
    result = {**shared, "protocol": PROTOCOL, **conversion_report.condense(runs, order)}
    precision = shared["recipe"]["mixed_precision"]
    publish(options.results, options.subject, precision, result, conversion_report.text, {"": conversion_report.plot})
    finetuning.report(options, f"{options.subject}-finetune", shared)


COMMANDS = {"run": run, "grow": grow, "finetune": finetune, "layers": conversion_layers.layers, "report": report}


def main(arguments: Sequence[str]) -> int:
    """Run one of the commands and return the exit status."""
    return run_study(SCRIPT, parse, COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
