"""Finetune conversions of all-MiniLM-L6-v2 with LoRA, beside their source finetuned alike.

    python experiments/minilm_finetune.py run --data DATA --models checkpoints/luna-minilm-en-4096 --tasks sst2 qnli
    python experiments/minilm_finetune.py run --data DATA --models checkpoints/luna-minilm-en-4096 --tasks mlm
    python experiments/minilm_finetune.py report

`run` finetunes each contender for each task with each seed, and scores it. Contenders are the source with its own
softmax attention ("teacher", which reads at most 512 tokens) and the folders of `--models`. Where texts may exceed 256
tokens, there is each folder without its "slots", its "selected tokens" or both; up to 512 tokens also "with 512
positions" instead of repeated ones; for long tasks also the source on windows of 256 tokens, and each folder
"untrained". `mlm` trains a masked-LM head for the folders. A run has a folder in
`--runs` with its scores (`run.json`) and its adapter of PEFT; finished runs are kept, and an interrupted one continues
from its last checkpoint. `report` collects the runs in `--runs` and writes the tables; runs that it has collected
before may be gone.

`squad_long` starts from the finished run of `squad`, so it has no "untrained".
"""

import argparse
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from running import KEPT, RESULTS, joined, read_json, run_alone

# isort: split
import minilm_finetune_mlm as mlm
import peft
from minilm import TEACHER, label, recipe_model
from minilm_contenders import SOURCE_LENGTH, SOURCE_POSITIONS, in_windows, switches, without
from minilm_finetune_kinds import KINDS
from minilm_finetune_report import text
from minilm_finetune_tasks import TASKS, sampled
from minilm_finetune_train import LoraSettings, adapt, tidy, train
from peft import PeftModel
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from luna_hf import FAMILIES, AbcConfig
from luna_hf.scripting import (
    TOKENIZER_FILES,
    Parser,
    UserError,
    load_tokenizer,
    locked,
    progress,
    quiet,
    write_json,
    write_text,
)
from luna_hf.warm_start import warm_start

SCRIPT = "experiments/minilm_finetune.py"
WINDOWS = f"teacher, windows of {SOURCE_LENGTH}"
MLM_RATE, MLM_RANK, MLM_BATCH = 1e-3, 32, 16
# Tokens of training between checkpoints.
SAVED = 50_000


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("what", choices=COMMANDS, help="step of the study")
    add("--teacher", default=TEACHER, help="folder of the source, or its name on the Hub (default: %(default)s)")
    add("--models", nargs="*", type=Path, default=[], help="folders of conversions; the first one's tokenizer is used")
    add("--data", type=Path, help="folder with the tasks")
    add("--tasks", nargs="+", choices=[*TASKS, "mlm"], default=list(TASKS), help="tasks (default: all but mlm)")
    add("--contenders", nargs="+", help="names of contenders (default: all)")
    add("--seeds", nargs="+", type=int, default=[0], help="seeds of the new head and of the order (default: 0)")
    add("--rate", type=float, help="learning rate (default: that of the kind of task)")
    add("--rows", type=int, help="training rows of each task instead of the table's, for trials")
    add("--bf16", action="store_true", help="multiply matrices in bfloat16, faster where the CPU has them")
    add("--runs", nargs="+", type=Path, default=[Path("outputs/minilm-finetune")], help="folder of the runs")
    add("--results", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    if options.what == "run" and options.data is None:
        raise UserError("`run` needs --data, the folder with the tasks.")
    if options.what == "run" and not options.models:
        raise UserError("`run` needs --models, the folders of conversions.")
    if options.what == "run" and len(options.runs) > 1:
        raise UserError("`run` writes to one folder. Name one in --runs.")
    return options


# ---- contenders ----

# A model with a head, given the end of its class's name and fields of its config.
Load = Callable[[str, dict[str, Any]], PreTrainedModel]


def contenders(options: argparse.Namespace, task: str) -> dict[str, Load]:
    """What a task compares, by name.

    Raises:
        UserError: A folder holds no conversion or no recipe, or two have the same name.
    """
    found: dict[str, Load] = {} if task == "mlm" else {"teacher": partial(teacher, options.teacher)}
    is_long, after = (TASKS[task].is_long, TASKS[task].after) if task in TASKS else (False, "")
    if is_long:
        found[WINDOWS] = partial(teacher_in_windows, options.teacher)
    for folder in options.models:
        if folder.name in found:
            raise UserError(f"Two folders are named {folder.name}. Rename one: the name stands in the results.")
        if not (folder / "config.json").is_file():
            raise UserError(f"{folder} holds no conversion. Name a finished folder of training/convert.py.")
        config = AutoConfig.from_pretrained(folder)
        found[folder.name] = partial(conversion, folder)
        if is_long and not after:  # the untrained conversion has no run on short texts to start from
            found[label(folder.name, "untrained")] = partial(untrained, recipe_model(folder), options.teacher)
        if task not in TASKS or TASKS[task].length <= SOURCE_LENGTH:
            continue
        for part in switches(config):
            found[label(folder.name, part)] = partial(switched_off, folder, part)
        if (config.position_period or SOURCE_POSITIONS) < TASKS[task].length <= SOURCE_POSITIONS:
            found[f"{folder.name}, with {SOURCE_POSITIONS} positions"] = partial(unrepeated, folder, options.teacher)
    return found


def teacher(source: str, head: str, fields: dict[str, Any]) -> PreTrainedModel:
    """The source with its own softmax attention, and the same head as the conversions."""
    own = FAMILIES[AbcConfig.model_type].model(head)
    return warm_start(own, source, memory_control="full", **fields)[0]


def teacher_in_windows(source: str, head: str, fields: dict[str, Any]) -> PreTrainedModel:
    """The same on windows, whose states the head reads side by side."""
    model = teacher(source, head, fields)
    in_windows(model.base_model, SOURCE_LENGTH)
    return model


def conversion(folder: Path, head: str, fields: dict[str, Any]) -> PreTrainedModel:
    """A conversion with a new head."""
    model_type = AutoConfig.from_pretrained(folder).model_type
    return FAMILIES[model_type].model(head).from_pretrained(folder, **fields)


def untrained(start: dict[str, Any], source: str, head: str, fields: dict[str, Any]) -> PreTrainedModel:
    """The conversion that a run of training/convert.py started from, with a new head."""
    own = dict(start)
    return warm_start(FAMILIES[own.pop("model_type")].model(head), source, **own, **fields)[0]


def switched_off(folder: Path, part: str, head: str, fields: dict[str, Any]) -> PreTrainedModel:
    """A conversion without a part, with a new head."""
    model = conversion(folder, head, fields)
    without(model.base_model, part)
    return model


def unrepeated(folder: Path, source: str, head: str, fields: dict[str, Any]) -> PreTrainedModel:
    """A conversion with all positions of its source, which it repeats later, and a new head."""
    model = untrained({**recipe_model(folder), "position_period": SOURCE_POSITIONS}, source, head, fields)
    positions = "embeddings.position_embeddings.weight"  # frozen in training
    own, trained = (part.base_model.state_dict() for part in (model, conversion(folder, head, {})))
    model.base_model.load_state_dict({**trained, positions: own[positions]})
    return model


# ---- steps ----


@dataclass(frozen=True)
class Run:
    """One finetuning and its folder."""

    task: str
    contender: str
    seed: int
    load: Load
    folder: Path

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.task}, {self.contender}, seed {self.seed}"


def planned(options: argparse.Namespace) -> Iterator[Run]:
    """The runs, in the order of seeds, contenders and tasks as they are named.

    Raises:
        UserError: A contender has none.
    """
    found = {task: contenders(options, task) for task in options.tasks}
    known = list(dict.fromkeys(name for loads in found.values() for name in loads))
    for name in options.contenders or ():
        if name not in known:
            raise UserError(f"There is no contender {name!r} in these tasks. There are: {'; '.join(known)}.")
    for seed in options.seeds:
        for name in options.contenders or known:
            for task in (task for task in options.tasks if name in found[task]):
                yield Run(task, name, seed, found[task][name], folder_of(options.runs[0], task, name, seed))


def folder_of(runs: Path, task: str, contender: str, seed: int) -> Path:
    """Where a run's results are."""
    return runs / task / contender.replace(", ", "-").replace(" ", "-") / f"seed-{seed}"


def run_all(options: argparse.Namespace) -> None:
    """Train and score what is not finished."""
    options.header["versions"]["peft"] = peft.__version__
    tokenizer = load_tokenizer(options.models[0], required=True)
    for run in list(planned(options)):
        if (run.folder / "run.json").is_file():
            continue
        run.folder.mkdir(parents=True, exist_ok=True)
        with locked(run.folder / ".lock"):
            begin(run, options)
            progress(f"{run.name} ...")
            result = (masked_lm if run.task == "mlm" else finetune)(run, options, tokenizer)
            head = {name: getattr(run, name) for name in ("task", "contender", "seed")}
            write_json(run.folder / "run.json", {**options.header, **head, **result})
            tidy(run.folder)
            progress(f"{run.name}: {result['scores']}")


def begin(run: Run, options: argparse.Namespace) -> None:
    """Note what a run is trained with, so that no other command continues it.

    Raises:
        UserError: It was interrupted, and trained with something else.
    """
    path, own = run.folder / "settings.json", {name: getattr(options, name) for name in ("rate", "rows", "bf16")}
    if path.is_file() and (before := read_json(path)) != own:
        raise UserError(f"{run.folder} holds a run with {before}. Continue it with these options, or remove it.")
    write_json(path, own)


def fresh(run: Run, head: str, fields: dict[str, Any]) -> PreTrainedModel:
    """The model before its training: the seed decides on its head."""
    set_seed(run.seed)
    with quiet():
        # LoRA has no dropout either: on a CPU, drawing both takes a third of the time. That of the states is left.
        return run.load(head, {"attention_probs_dropout_prob": 0.0, **fields})


def finetune(run: Run, options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Finetune for a task; writes the adapter. Returns scores, cost and settings."""
    task, kind_class = TASKS[run.task], KINDS[TASKS[run.task].kind]
    most = {"train": options.rows or task.train, "test": task.test}
    rows, test = (sampled(task.read(options.data, split, tokenizer), count) for split, count in most.items())
    model = fresh(run, kind_class.head, kind_class(task, tokenizer, task.length).fields(rows))
    reach = task.length if run.contender == WINDOWS else model.config.max_position_embeddings
    kind = kind_class(task, tokenizer, min(task.length, reach))
    features = list(filter(kind.can_teach, map(kind.encode, rows)))
    lengths = [kind.size(one) for one in features]
    features = [{name: one[name] for name in kind.columns} for one in features]
    steps = max(10, round(SAVED / (task.batch * sum(lengths) / len(lengths))))
    rate = options.rate or kind.rate
    settings = LoraSettings(rate, task.batch, task.epochs, run.seed, kind.trained, save_steps=steps, bf16=options.bf16)
    adapted = adapt(model, settings)
    if task.after:  # the source on windows starts from its run in one pass
        is_own = run.contender in contenders(options, task.after)
        start = run.contender if is_own else run.contender.partition(", ")[0]
        start_from(folder_of(options.runs[0], task.after, start, run.seed), adapted)
    cost = train(adapted, features, lengths, kind.collate, settings, run.folder)
    scores = kind.evaluate(adapted, test)
    save(adapted, run.folder, options.models[0])
    return {
        "split": task.split,
        "scores": scores,
        "baseline": kind.baseline(test),
        "rows": [len(features), len(test)],
        **cost,
        "rate": settings.rate,
        "precision": "bfloat16" if settings.bf16 else "float32",
        "epochs": settings.epochs,
        "longest": max(lengths),
    }


def start_from(folder: Path, adapted: PeftModel) -> None:
    """Load the adapter and the head of a finished run.

    Raises:
        UserError: The run is not finished.
    """
    if not (folder / "run.json").is_file():
        raise UserError(f"Training starts from {folder}, which is not finished. Run its task first.")
    peft.set_peft_model_state_dict(adapted, peft.load_peft_weights(str(folder), device="cpu"))


def masked_lm(run: Run, options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Train a masked-LM head and LoRA; writes the adapter. Returns scores, cost and settings."""
    blocks = mlm.training_blocks(options.data, tokenizer, run.seed, run.folder / "blocks.npz")
    test = mlm.test_blocks(options.data, tokenizer)
    model = fresh(run, "ForMaskedLM", {"sparse_prediction": True, "hidden_dropout_prob": 0.0})
    rate, trained = options.rate or MLM_RATE, ("lm_head.dense", "lm_head.layer_norm")
    settings = LoraSettings(
        rate, MLM_BATCH, 1, run.seed, trained, rank=MLM_RANK, bias="all", save_steps=100, bf16=options.bf16
    )
    adapted = adapt(model, settings)
    for name, parameter in model.base_model.named_parameters():
        parameter.requires_grad &= not name.endswith("bias")  # of all biases, only that of the output is trained
    cost = train(adapted, blocks, blocks.lengths, mlm.pad, settings, run.folder)
    scores = mlm.score(adapted, test)
    model.config.sparse_prediction = False
    save(adapted, run.folder, options.models[0])
    return {
        "scores": scores,
        "unigram": mlm.unigram(blocks, test, model.config.vocab_size),
        "rows": [len(blocks), len(test)],
        **cost,
        "rate": settings.rate,
        "precision": "bfloat16" if settings.bf16 else "float32",
        "epochs": settings.epochs,
        "longest": max(blocks.lengths),
    }


def save(adapted: PeftModel, folder: Path, tokenizer: Path) -> None:
    """Write the adapter, the config of its model, and the tokenizer of a folder."""
    model = adapted.get_base_model()
    adapted.save_pretrained(folder)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    for file in filter(Path.is_file, (tokenizer / name for name in TOKENIZER_FILES)):
        shutil.copyfile(file, folder / file.name)


def report(options: argparse.Namespace) -> None:
    """Collect the runs and write the table.

    Raises:
        UserError: There are no runs.
    """
    path = options.results / "minilm_finetune.json"
    before = read_json(path)["runs"] if path.is_file() else []
    found = [read_json(one) for folder in options.runs for one in sorted(folder.glob("*/*/*/run.json"))]
    runs = {(run["task"], run["contender"], run["seed"]): dict(run) for run in [*before, *found]}
    if not runs:
        raise UserError(f"There are no runs in {options.runs[0]}. Run `python {SCRIPT} run` first.")
    kept = [runs[key] for key in sorted(runs)]
    result = {
        "command": f"python {SCRIPT} report",
        "commands": sorted({run["command"] for run in kept}),
        "date": kept[-1]["date"],
        **{name: joined(run[name] for run in kept) for name in ("machine", "versions")},
        "rows": rows_of_cards(kept),
        "runs": kept,
    }
    options.results.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    write_text(path.with_suffix(".md"), text(result) + "\n")


def rows_of_cards(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the cards show: a task's metric for every seed of a contender.

    Beside a conversion they show the baselines: the teacher, its windows, and conversions without selected tokens.
    """
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        if run["task"] in TASKS:
            found.setdefault((run["contender"], run["task"]), []).append(run)
    rows = []
    for (name, task), own in found.items():
        kind = TASKS[task]
        values = [run["scores"][kind.metric] / 100 for run in own]
        row = {"model": name, "task": task, "title": kind.title, "metric": kind.metric, "split": kind.split}
        is_baseline = name in ("teacher", WINDOWS) or name.endswith(", without selected tokens")
        rows.append({**row, "values": values, "baseline": is_baseline})
    return rows


COMMANDS = {"run": run_all, "report": report}


def main(arguments: Sequence[str]) -> int:
    """Run a step and return its exit status."""

    def study(options: argparse.Namespace) -> None:
        COMMANDS[options.what](options)

    return run_alone(SCRIPT, parse, study, arguments, stopped=KEPT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
