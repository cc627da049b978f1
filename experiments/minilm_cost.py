"""Time and memory of conversions of all-MiniLM-L6-v2 beside their source, and their scores against time.

    python experiments/minilm_cost.py measure --data DATA --models checkpoints/luna-minilm-en-4096
    python experiments/minilm_cost.py report

`measure` times every text length on one thread, the source and the first model also in other number formats; DATA gives
the lengths of the documents that `minilm.py` scores. `report` measures nothing: it writes the tables, and draws the
scores in `minilm.json` against these times. Times are kept: the same command continues.
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Container, Sequence
from copy import deepcopy
from functools import cache, partial
from importlib.metadata import version
from itertools import product, starmap
from pathlib import Path
from typing import Any, NamedTuple

import torch
from running import KEPT, RESULTS, read_json, run_alone

# isort: split
import deployment
import measuring
import summaries
from deployment import Batch, Run
from minilm_contenders import Bm25, Reader
from minilm_cost_report import BAG, BM25, DTYPES, FLOAT32, TASKS, TEACHER, WINDOWS, plot, text, windows
from minilm_tasks import LONG
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import SequenceClassifierOutput

from luna_hf.convert.report import pool_states, read_ids, shipped_texts, special_tokens
from luna_hf.scripting import Parser, UserError, load_tokenizer, progress, quiet, write_json, write_text

SCRIPT = "experiments/minilm_cost.py"
HUB = "sentence-transformers/all-MiniLM-L6-v2"
PROTOCOL = (
    "From ids to the normalised mean of the states: English novels, one thread, ends counted. The source reads up to "
    "512 tokens in one pass, and longer texts in equal windows of at most 128 or 256 tokens, all in one batch. A "
    "conversion reads 4,096 tokens in one pass, and longer texts in equal passes one after the other. Time: CPU time "
    "of the process, because other programs share the machine; at each length all contenders and formats in turn, in "
    "an order that rotates; ratios are taken within a round, medians over rounds. Memory: peak resident size of a "
    "call minus the size before it, each in its own process after a call on a short text; freed blocks of 1 MiB and "
    "more go back to the system. The bag of word vectors is timed from ids, BM25 from words to the weights of one "
    "document. Cosine: to the float32 vectors of four texts of 512 tokens."
)
LENGTHS = [16, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
SHORT, ROWS = (16, 128), 8  # lengths that are also read in batches of so many texts
FORMAT_LENGTHS = (128, 512, 2048)
WARM_UP_LENGTH, REPEATED_TOKENS = 16, 512  # a single pass over a short text is too short for the clock
COMPARED_ROWS, COMPARED_LENGTH = 4, 512


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("what", choices=COMMANDS, help="step")
    add("--teacher", default=HUB, help="folder of the source, or its name on the Hub (default: %(default)s)")
    add("--models", nargs="*", type=Path, default=[], help="folders of conversions")
    add("--data", type=Path, help="folder with the tasks")
    add("--lengths", nargs="+", type=measuring.positive, default=LENGTHS, help="tokens (default: 16 to 8,192)")
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="number formats (default: all)")
    add("--rounds", type=measuring.positive, default=5, help="default: %(default)s")
    add("--programs", type=Path, help="folder that keeps the exported models for the next run (default: none)")
    add("--results", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    if options.what == "measure" and options.data is None:
        raise UserError("`measure` needs --data, the folder with the tasks.")
    if options.what == "measure" and not options.models:
        raise UserError("`measure` needs --models, the folders of conversions.")
    if min(options.lengths) < 3:
        raise UserError(f"--lengths {min(options.lengths)} leaves no token between the ends; give 3 or more.")
    options.threads, options.device = 1, "cpu"  # for benchmarks/measuring.py
    return options


# ---- contenders ----


class Plan(NamedTuple):
    """How a contender reads texts.

    Attributes:
        folder: of its model.
        size: tokens of its longest pass.
        lengths: of the texts that it reads so.
        together: whether the passes of a text are one batch.
    """

    folder: str
    size: int
    lengths: range
    together: bool


def plans(options: argparse.Namespace) -> dict[str, Plan]:
    """All contenders that need a model, by name.

    Raises:
        UserError: A folder holds no model, or two have the same name.
    """
    size = AutoConfig.from_pretrained(options.teacher).max_position_embeddings
    found = {TEACHER: Plan(options.teacher, size, range(size + 1), True)}
    for size in WINDOWS:
        found[windows(size)] = Plan(options.teacher, size, range(size + 1, sys.maxsize), True)
    for folder in options.models:
        if folder.name in (*found, Path(options.teacher).name):
            raise UserError(f"Two folders are named {folder.name}. Rename one: the name stands in the results.")
        if not (folder / "config.json").is_file():
            raise UserError(f"{folder} holds no model. Name a folder of a conversion.")
        size = AutoConfig.from_pretrained(folder).max_position_embeddings
        found[folder.name] = Plan(str(folder), size, range(sys.maxsize), False)
    return found


class Embedder(nn.Module):
    """A sentence encoder with mean pooling, as the ways of `deployment.py` take a model: its logits are the vectors."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        with quiet():
            self.model = AutoModel.from_pretrained(folder, dtype=torch.float32)
        self.config = self.model.config
        self.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SequenceClassifierOutput:
        """Vectors (b, d) of ids (b, n)."""
        states = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return SequenceClassifierOutput(logits=F.normalize(pool_states(states, attention_mask, "mean"), dim=-1))


def use_bfloat16(model: nn.Module, folder: Path, threads: int) -> tuple[Run, int]:
    """Weights and states in bfloat16."""
    return deployment.use_pytorch(deepcopy(model).bfloat16(), folder, threads)


# What prepares a number format, and the packages that it needs.
WAYS = {
    FLOAT32: deployment.WAYS[FLOAT32],
    "bfloat16": (use_bfloat16, ()),
    **{way: deployment.WAYS[way] for way in DTYPES if way in deployment.WAYS and way != FLOAT32},
}


class Programs:
    """Models in the number formats, made when they are first needed, with their exported files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[tuple[str, str], tuple[Run, int]] = {}

    def get(self, plan: Plan, way: str) -> tuple[Run, int]:
        """The call of a contender's model in a format, and the bytes of its program."""
        key = (plan.folder, way)
        if key not in self.made:
            own = self.folder / Path(plan.folder).name
            own.mkdir(parents=True, exist_ok=True)
            self.made[key] = WAYS[way][0](Embedder(plan.folder), own, 1)
        return self.made[key]


# ---- texts ----


@cache
def novel_ids(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """The ids of the texts of the package, one after the other, without ends."""
    return torch.cat(read_ids(tokenizer, shipped_texts()))


def make_batches(tokenizer: PreTrainedTokenizerBase, plan: Plan, length: int, rows: int = 1) -> list[Batch]:
    """Texts of so many tokens, ends included, as a contender reads them."""
    first, last = special_tokens(tokenizer)
    ends = len(first) + len(last)
    passes = math.ceil((length - ends) / (plan.size - ends))
    each, count = math.ceil((length - ends) / passes), rows * passes
    ids = novel_ids(tokenizer)
    parts = ids.repeat(math.ceil(count * each / len(ids)))[: count * each].view(count, each)
    ids = torch.cat([first.expand(count, -1), parts, last.expand(count, -1)], 1)
    return [
        {"input_ids": part, "attention_mask": torch.ones_like(part)}
        for part in ids.split(count if plan.together else rows)
    ]


@torch.no_grad()
def read(run: Run, batches: Sequence[Batch], repeats: int = 1) -> None:
    """The timed call."""
    for _ in range(repeats):
        for batch in batches:
            run(batch)


def document_tokens(data: Path, reader: Reader) -> dict[str, float]:
    """Mean tokens of the documents of each task, ends included."""
    found = {}
    for task in TASKS:
        progress(f"documents of {task}")
        texts = [text for part in LONG[task](data).values() for text in part.documents.values()]
        found[task] = statistics.mean(map(len, reader.ids(texts))) + 2
    return found


# ---- measurements ----


class Job(NamedTuple):
    """What is measured in turn: all contenders in float32, or the source and the first model in several formats."""

    length: int
    rows: int
    ways: tuple[str, ...]


def jobs(options: argparse.Namespace, done: Container[tuple[int, int, str]]) -> list[Job]:
    """What is left to measure; `done` has lengths, rows and formats."""
    found = [(length, 1, (FLOAT32,)) for length in options.lengths]
    found += [(length, ROWS, (FLOAT32,)) for length in SHORT if length in options.lengths]
    others = [way for way in options.ways if way != FLOAT32]
    formats = [
        (n, 1, tuple(w for w in others if (n, 1, w) not in done)) for n in FORMAT_LENGTHS if n in options.lengths
    ]
    left = [job for job in found if (*job[:2], FLOAT32) not in done]
    return [*starmap(Job, left), *(Job(n, rows, (FLOAT32, *ways)) for n, rows, ways in formats if ways)]


def cases(options: argparse.Namespace, job: Job) -> list[tuple[str, str]]:
    """Names and number formats of a job."""
    names = [name for name, plan in options.plans.items() if job.length in plan.lengths]
    if len(job.ways) > 1:
        names = [TEACHER if TEACHER in names else windows(WINDOWS[-1]), options.models[0].name]
    return list(product(names, job.ways))


def peak(case: tuple[str, str], length: int, options: argparse.Namespace) -> int:
    """Peak bytes of one call beyond what the process held before it; run it in a separate process."""
    (name, way), tokenizer = case, load_tokenizer(options.teacher, required=True)
    plan = options.plans[name]
    run, _ = Programs(options.programs).get(plan, way)
    read(run, make_batches(tokenizer, plan, WARM_UP_LENGTH))
    batches = make_batches(tokenizer, plan, length)
    return measuring.extra_memory(lambda: read(run, batches), "cpu")


def time_job(options: argparse.Namespace, programs: Programs, source: Reader, job: Job) -> list[dict[str, Any]]:
    """Time a job: an entry for each number format."""
    progress(f"{job.rows} x {job.length} tokens, {', '.join(map(DTYPES.get, job.ways))}")
    repeats, actions = max(1, REPEATED_TOKENS // (job.length * job.rows)), {}
    for name, way in cases(options, job):
        batches = make_batches(source.tokenizer, options.plans[name], job.length, job.rows)
        actions[name, way] = partial(read, programs.get(options.plans[name], way)[0], batches, repeats)
    if len(job.ways) == job.rows == 1:
        whole = Plan(options.teacher, job.length, range(job.length + 1), True)
        ids = make_batches(source.tokenizer, whole, job.length)[0]["input_ids"][0, 1:-1].tolist()
        words = source.tokenizer.decode(ids)
        actions[BAG, FLOAT32] = lambda: [source.bag([ids]) for _ in range(repeats)]
        actions[BM25, FLOAT32] = lambda: [Bm25([words]) for _ in range(repeats)]
    times = measuring.interleave(actions, options.rounds, "cpu", warm_up=False, clock=time.process_time)
    entries = []
    for way in job.ways[1:] or job.ways:  # beside other formats, float32 is only there to compare with
        own = {name: [taken / repeats for taken in times[name, way]] for name, other in actions if other == way}
        models = summaries.describe(own, [TEACHER, windows(WINDOWS[-1])])
        for name in own if way != FLOAT32 else ():
            models[name]["over_float32"] = summaries.summary(summaries.ratios(times[name, FLOAT32], times[name, way]))
        sizes = {"length": job.length, "call": way, "rows": job.rows, "tokens": job.length * job.rows}
        entries.append({**sizes, "models": measuring.rounded(models)})
    return entries


@torch.no_grad()
def describe(programs: Programs, plan: Plan, way: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
    """Bytes of a model in a number format, and the mean cosine of its vectors to those in float32."""
    (batch,) = make_batches(tokenizer, plan, min(COMPARED_LENGTH, plan.size), COMPARED_ROWS)
    run, size = programs.get(plan, way)
    exact = programs.get(plan, FLOAT32)[0](batch)
    return {"bytes": size, "cosine": F.cosine_similarity(run(batch).double(), exact.double()).mean().item()}


def open_result(options: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """The result so far with the head of this run, and its path.

    Raises:
        UserError: It was measured on another machine.
    """
    path, head = options.results / "minilm_cost.json", options.header
    before = read_json(path) if path.is_file() else {"commands": [], "packages": {}, "models": {}, "lengths": []}
    if before.get("machine", head["machine"]) != head["machine"]:
        raise UserError(f"{path} has the times of another machine. Name another folder for --results.")
    result = {**before, **head, "protocol": PROTOCOL}
    result["commands"] = list(dict.fromkeys([*before["commands"], head["command"]]))
    options.results.mkdir(parents=True, exist_ok=True)
    return path, result


def measure(options: argparse.Namespace) -> None:
    """Measure what is not in the results: times, then memory."""
    options.plans, tokenizer = plans(options), load_tokenizer(options.teacher, required=True)
    path, result = open_result(options)
    source = Reader(partial(AutoModel.from_pretrained, options.teacher), tokenizer)
    if "document_tokens" not in result:
        result["document_tokens"] = document_tokens(options.data, source)
    installed = deployment.installed_ways([way for way in options.ways if way in deployment.WAYS])
    options.ways = [way for way in WAYS if way in {*installed, *({"bfloat16"} & {*options.ways})}]
    result["packages"].update({name: version(name) for way in options.ways for name in WAYS[way][1]})
    with tempfile.TemporaryDirectory() as folder:
        options.programs = options.programs or Path(folder)
        programs = Programs(options.programs)
        for job in jobs(options, {(one["length"], one["rows"], one["call"]) for one in result["lengths"]}):
            for name, way in cases(options, job):
                known = result["models"].setdefault(TEACHER if name.startswith(TEACHER) else name, {})
                if way not in known:
                    plan = options.plans[name]._replace(together=True)
                    known[way] = measuring.rounded(describe(programs, plan, way, tokenizer))
            result["lengths"] += time_job(options, programs, source, job)
            result["lengths"].sort(key=lambda entry: (entry["rows"], entry["length"]))
            write_json(path, result)
        for entry in (entry for entry in result["lengths"] if entry["rows"] == 1):
            held = {name: model for name, model in entry["models"].items() if name in options.plans}
            left = [(name, entry["call"]) for name, model in held.items() if "peak_memory_bytes" not in model]
            memory = measuring.measure_memory(peak, {entry["length"]: left} if left else {}, options)
            for (name, _), value in memory.get(entry["length"], {}).items():
                held[name]["peak_memory_bytes"] = value
            write_json(path, result)
    report(options)


def report(options: argparse.Namespace) -> None:
    """Write the tables, and the plot if there are scores.

    Raises:
        UserError: There are no times.
    """
    path = options.results / "minilm_cost.json"
    result = read_json(path, f"Run `python {SCRIPT} measure` first.")
    write_text(path.with_suffix(".md"), text(result) + "\n")
    scored = path.with_name("minilm.json")
    if scored.is_file():
        plot(result, read_json(scored)["scores"], path.with_suffix(".png"))
    else:
        progress(f"There is no {scored}, so that no plot was drawn. Run `python experiments/minilm.py long` first.")


COMMANDS = {"measure": measure, "report": report}


def main(arguments: Sequence[str]) -> int:
    """Run a step and return its exit status."""
    return run_alone(SCRIPT, parse, lambda options: COMMANDS[options.what](options), arguments, stopped=KEPT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
