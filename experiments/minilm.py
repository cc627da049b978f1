"""Judge conversions of all-MiniLM-L6-v2 beside their source, its windows, BM25 and a bag of its word vectors.

    python experiments/minilm.py short --data DATA --models outputs/abc-minilm-en-4096
    python experiments/minilm.py long --data DATA --models outputs/abc-minilm-en-4096
    python experiments/minilm.py late --data DATA --models outputs/abc-minilm-en-4096
    python experiments/minilm.py shared --data DATA --models outputs/abc-minilm-en-4096
    python experiments/minilm.py report

`--models` are folders of `training/convert.py`; each is also scored before its training, and without its slots,
its selected tokens or both. `short`, `long` and `shared` score through mteb (pip install -e ".[judge]"): short texts;
long documents; the source's queries with a conversion's documents, and the reverse. `--tasks` names other tasks, mteb's
or whole benchmarks, which it downloads: --tasks "MTEB(eng, v2)" LongEmbed. `late` searches passages in their context
(`minilm_late.py`). Scores are kept: the same command continues. `report` writes the tables and the plot.
"""

import argparse
import re
import sys
import time
from collections.abc import Collection, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from running import KEPT, RESULTS, joined, read_json, run_alone

# isort: split
from minilm_contenders import SOURCE_LENGTH, Contender, Reader, in_one_pass, source_ways, switches, without
from minilm_late import OWN_WAYS, SOURCE_WAYS, Late
from minilm_report import plot, text
from minilm_tasks import LONG, SHORT
from transformers import AutoConfig, AutoModel, PreTrainedModel

from luna_hf import FAMILIES
from luna_hf.scripting import Parser, UserError, load_tokenizer, progress, quiet, write_json, write_text
from luna_hf.warm_start import warm_start

SCRIPT = "experiments/minilm.py"
TEACHER = "sentence-transformers/all-MiniLM-L6-v2"
TASKS = {"short": tuple(SHORT), "long": tuple(LONG), "shared": ("scifact", "race", "qmsum")}
# Where the parts that can be switched off are compared; elsewhere only what somebody would use.
SWITCHED = ("race", "novels")
# Of the short tasks, those with texts beyond the source's 256 tokens; shorter ones an untrained conversion reads alike.
LONGER = ("scifact", "medquad")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("what", choices=COMMANDS, help="step of the judgement")
    add("--teacher", default=TEACHER, help="folder of the source, or its name on the Hub (default: %(default)s)")
    add("--models", nargs="*", type=Path, default=[], help="folders of conversions")
    add("--data", type=Path, help="folder with the tasks")
    add("--tasks", nargs="+", help="tasks or benchmarks (default: those of the step)")
    add("--contenders", nargs="+", help="names of contenders (default: all)")
    add("--bf16", action="store_true", help="multiply matrices in bfloat16, faster where the CPU has them")
    add("--results", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    if options.what == "late" and options.data is None:
        raise UserError("`late` needs --data, the folder with the tasks.")
    return options


# ---- contenders ----


class Models:
    """The source, and every conversion: as it is (""), "untrained", and without each of its `switches`."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Find them; each is loaded when it is first needed.

        Raises:
            UserError: A folder holds no conversion or no recipe, or two have the same name.
        """
        tokenizer = load_tokenizer(options.teacher, required=True)
        self.teacher = Reader(partial(AutoModel.from_pretrained, options.teacher), tokenizer, options.bf16)
        self.readers: dict[str, dict[str, Reader]] = {}
        for folder in options.models:
            if folder.name in self.readers:
                raise UserError(f"Two folders are named {folder.name}. Rename one: the name stands in the results.")
            if not (folder / "config.json").is_file():
                raise UserError(f"{folder} holds no conversion. Name a finished folder of training/convert.py.")
            config = AutoConfig.from_pretrained(folder)
            parts = {"": partial(AutoModel.from_pretrained, folder)}
            parts["untrained"] = partial(untrained, recipe_model(folder), options.teacher)
            for part in switches(config):
                parts[part] = partial(switched_off, folder, part)
            self.readers[folder.name] = {part: Reader(load, tokenizer, options.bf16) for part, load in parts.items()}

    def forget(self) -> None:
        """Forget all vectors."""
        for reader in (self.teacher, *(reader for parts in self.readers.values() for reader in parts.values())):
            reader.forget()


def recipe_model(folder: Path) -> dict[str, Any]:
    """The fields `model` of the recipe that made a conversion: `recipe.yaml` where it is shipped, else in a run's card.

    Raises:
        UserError: There is none.
    """
    if (folder / "recipe.yaml").is_file():
        return yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))["model"]
    card = (folder / "README.md").read_text(encoding="utf-8") if (folder / "README.md").is_file() else ""
    if not (found := re.search(r"```yaml\n(model_name:.*?)```", card, re.DOTALL)):
        raise UserError(f"{folder} has no card with a recipe. Name a finished folder of training/convert.py.")
    return yaml.safe_load(found[1])["model"]


def untrained(fields: dict[str, Any], teacher: str) -> PreTrainedModel:
    """The conversion that a run started from."""
    own = dict(fields)
    with quiet():
        return warm_start(FAMILIES[own.pop("model_type")].base_model, teacher, **own)[0]


def switched_off(folder: Path, part: str) -> PreTrainedModel:
    """A conversion without a part."""
    return without(AutoModel.from_pretrained(folder), part)


def contenders(models: Models, step: str, task: str) -> dict[str, Contender | None]:
    """What a task compares, by name; `None` stands for BM25."""
    source, found = source_ways(models.teacher), dict[str, Contender | None]()
    if step == "shared":
        return shared_contenders(models, source)
    if step == "short":
        source = {name: source[name] for name in ("teacher, cut at 256", "bag of word vectors")}
    searches = step == "long" or task in LONGER
    found |= {**source, "BM25": None} if searches else source
    for name, readers in models.readers.items():
        found[name] = in_one_pass(readers[""])
        if task in LONGER:
            short = readers[""].cut(SOURCE_LENGTH)
            found[f"{name}, cut at {SOURCE_LENGTH}"] = Contender(readers[""].ids, short, short)
        parts = (["untrained"] if searches else []) + (list(readers)[2:] if task in SWITCHED else [])
        for part in parts:
            whole = readers[part] if part == "untrained" else readers[""]
            found[label(name, part)] = in_one_pass(readers[part], whole)
    return found


def label(name: str, part: str) -> str:
    """What the tables call a conversion, as it is (""), untrained, or without a part."""
    return f"{name}, {part}" if part == "untrained" else f"{name}, without {part}" if part else name


def shared_contenders(models: Models, source: dict[str, Contender]) -> dict[str, Contender]:
    """One model's queries with another's documents."""
    found = {}
    for name, readers in models.readers.items():
        own, asked = in_one_pass(readers[""]), source["teacher, cut at 256"].queries
        found[f"{name}, queries of the teacher"] = Contender(own.tokens, asked, own.documents)
        for way in ("teacher, cut at 256", "teacher, mean of windows of 128"):
            found[f"{name}, documents of the {way}"] = Contender(own.tokens, own.queries, source[way].documents)
    return found


# ---- steps ----


def open_result(options: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """The result so far with the head of this run, and its path."""
    path = options.results / "minilm.json"
    before = read_json(path) if path.is_file() else {"commands": [], "scores": {}, "late": {}}
    result = {**options.header, **{name: value for name, value in before.items() if name not in options.header}}
    for name in ("machine", "versions"):
        result[name] = joined(head[name] for head in (before, options.header) if name in head)
    result["commands"] += [] if options.header["command"] in result["commands"] else [options.header["command"]]
    options.results.mkdir(parents=True, exist_ok=True)
    return path, result


def evaluate(options: argparse.Namespace) -> None:
    """Score what is not in the results, task by task.

    Raises:
        UserError: mteb is not installed.
    """
    if find_spec("mteb") is None:
        raise UserError('mteb is not installed. Install the judge extra: pip install -e ".[judge]"')
    import mteb
    from minilm_mteb import VectorModel, WordModel, find_tasks, score

    path, result = open_result(options)
    result["versions"]["mteb"] = mteb.__version__
    models, names = Models(options), options.tasks or TASKS[options.what]
    check_names(options, {one for name in names for one in contenders(models, options.what, name)})
    for task in (task for name in names for task in find_tasks(name, options.data)):
        name = task.metadata.name
        scores = result["scores"].setdefault(name, {})
        for contender, own in contenders(models, options.what, name).items():
            if contender not in scores and contender in (options.contenders or [contender]):
                start = time.perf_counter()
                figures = score(WordModel() if own is None else VectorModel(contender, own), task)
                seconds = round(time.perf_counter() - start, 1)
                scores[contender] = {**figures, "seconds": seconds} | (
                    {"precision": "bfloat16"} if options.bf16 else {}
                )
                write_json(path, result)
                progress(f"{name}, {contender}: {scores[contender]}")
        models.forget()


def check_names(options: argparse.Namespace, known: Collection[str]) -> None:
    """Find a wrong name of `--contenders` before hours of scores.

    Raises:
        UserError: There is one.
    """
    for name in options.contenders or ():
        if name not in known:
            raise UserError(f"There is no contender {name!r}. There are: {'; '.join(sorted(known))}.")


def late(options: argparse.Namespace) -> None:
    """Score what is not in the results: passages alone, and within their article."""
    path, result = open_result(options)
    models = Models(options)
    task, scores = Late(options.data, models.teacher), result["late"]
    result["late_counts"] = task.counts()
    ways = task.ways(models.teacher, "teacher", SOURCE_WAYS)
    for way, titles in {"passage alone": False, "title and passage": True}.items():
        ways[f"BM25, {way}"] = partial(task.count_words, titles)
    for name, readers in models.readers.items():
        for part, reader in readers.items():
            ways |= task.ways(reader, label(name, part), OWN_WAYS[:1] if part else OWN_WAYS)
    check_names(options, ways)
    for name, figures in ways.items():
        if name not in scores and name in (options.contenders or [name]):
            scores[name] = figures()
            write_json(path, result)
            progress(f"late, {name}: {scores[name]}")


def report(options: argparse.Namespace) -> None:
    """Write the tables and the plot.

    Raises:
        UserError: There are no results.
    """
    path = options.results / "minilm.json"
    result = read_json(path, f"Run `python {SCRIPT} long` first.")
    write_text(path.with_suffix(".md"), text(result) + "\n")
    plot(result, path.with_suffix(".png"))


COMMANDS = {**dict.fromkeys(TASKS, evaluate), "late": late, "report": report}


def main(arguments: Sequence[str]) -> int:
    """Run a step and return its exit status."""

    def study(options: argparse.Namespace) -> None:
        COMMANDS[options.what](options)

    return run_alone(SCRIPT, parse, study, arguments, stopped=KEPT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
