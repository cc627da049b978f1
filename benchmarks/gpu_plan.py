"""What is worth measuring and training on a GPU, for as many minutes as there are.

    python benchmarks/gpu_plan.py --list
    python benchmarks/gpu_plan.py --minutes 9

The parts run in order of worth, each at most ten minutes: GPU tests, tables of speed and memory, luna-small-en for the
rest of the time, and once that is trained, further tables. The same command continues where an earlier one stopped: a
part whose results are in --out is not repeated, and training resumes from its checkpoint. On a machine that is lent,
fetch --export afterwards; its archive, unpacked into --out, lets another machine continue. See benchmarks/README.md.
"""

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from luna_hf.__main__ import describe
from luna_hf.scripting import (
    Parser,
    UserError,
    locked,
    markdown_table,
    progress,
    run_script,
    write_json,
    write_text,
    writing,
)

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "training/recipes/pretrain_mlm/luna-small-en.yaml"
SHARD = "16MB"
LIMIT = 10.0  # minutes of a part
GRACE = 0.5  # minutes for a part that is asked to stop: training saves a checkpoint
OVERHEAD = 1.5  # minutes of a training part that are not training: imports, evaluations, saving
SPEED_STEPS = 60
DONE, UNFINISHED, FAILED, SKIPPED, WAITING = "done", "unfinished", "failed", "skipped", "waiting"

LENGTHS = "512 2048 8192 16384 32768"
ENCODER = f"--models gpu --layers base --dtype bfloat16 --lengths {LENGTHS} --tokens-per-batch 32768 --rounds 10"
CAUSAL = "--layers 12 --dtype bfloat16 --lengths 1024 4096 16384 32768"
# What `--tiny` adds to the commands; a later value of an option replaces an earlier one.
TINY_ENCODER = "--lengths 16 32 --rounds 1 --layers 3 --width 32 --heads 4 --slots 8 --tokens-per-batch 64"
TINY_CAUSAL = "--lengths 16 --rounds 1 --layers 1 --width 32 --heads 2 --vocab-size 99"
UNEVEN = "--layers 12 --dtype bfloat16 --rounds 20"
TINY_UNEVEN = "--rounds 1 --layers 1 --width 32 --heads 4 --slots 8 --rows 4 --mixes sst2 full --models luna-tied"
COST = "--dtype bfloat16 --tokens-per-batch 65536 --rounds 10"
TINY_COST = "--lengths 16 32 --tokens-per-batch 64 --rounds 1 --recipe tiny --models luna-4"
TINY_TRAINING = (
    "--train_tokenizer true --vocab_size 300 --validation '' --held_out_fraction 0.2 --block_size 32 --batch_size 8 "
    "--global_batch_tokens 256 --eval_blocks 16 --mixed_precision no --compile false --model.hidden_size 32 "
    "--model.num_hidden_layers 1 --model.num_attention_heads 2 --model.intermediate_size 64"
)


@dataclass(frozen=True)
class Part:
    """A step of the plan.

    Args:
        name: of the part and its folder.
        minutes: how long it takes on an H200, estimated; a part for which less is left is not started.
        words: the command, from the plan; the first word is a script, or `-m` or `-c`.
        results: pattern of the files in its folder that exist only when it is done.
        needs: modules beside those of the models.
        after: the part whose results it reads.
    """

    name: str
    minutes: float
    words: Callable[["Plan"], list[str]]
    results: str
    needs: tuple[str, ...] = ()
    after: str = ""


class Plan:
    """The options, the folder of results, and what is known of every part."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.out, self.started = options, options.out.resolve(), time.monotonic()
        self.states: dict[str, dict[str, Any]] = {}
        with suppress(FileNotFoundError):
            self.states = json.loads((self.out / "state.json").read_text(encoding="utf-8"))

    @property
    def chosen(self) -> list[Part]:
        """The parts to run, in order of worth."""
        return [part for name, part in PARTS.items() if name in (self.options.only or PARTS)]

    def folder(self, name: str) -> Path:
        """The folder of a part."""
        return self.out / name

    def left(self) -> float:
        """Minutes until the end."""
        return self.options.minutes - (time.monotonic() - self.started) / 60

    def note(self, name: str, **values: Any) -> None:
        """Record something about a part, at once: the machine may go away."""
        self.states[name] = {**self.states.get(name, {}), **values}
        write_json(self.out / "state.json", self.states)

    def state(self, part: Part) -> str:
        """What the results and earlier runs say about a part."""
        if any(self.folder(part.name).glob(part.results)):
            return DONE
        known = self.states.get(part.name, {}).get("state", WAITING)
        return WAITING if known == DONE else known  # its results have been removed

    def obstacle(self, part: Part) -> str:
        """Why a part cannot run now; empty if it can."""
        missing = [module for module in part.needs if importlib.util.find_spec(module) is None]
        if missing:
            return f"not installed: {', '.join(missing)}"
        if part.after and self.state(PARTS[part.after]) != DONE:
            return f"{part.after} is not done"
        if self.left() < part.minutes:
            return f"needs about {part.minutes:g} minutes, {max(0.0, self.left()):.1f} are left"
        return ""


# ---- commands ----


def benchmark(script: str, words: str, tiny: str) -> Callable[[Plan], list[str]]:
    """The command of a benchmark that takes `--device` and `--output`."""

    def command(plan: Plan) -> list[str]:
        own = [*shlex.split(words), *(shlex.split(tiny) if plan.options.tiny else [])]
        return [f"benchmarks/{script}.py", *own, "--device", plan.options.device]

    return command


def tests(plan: Plan) -> list[str]:
    """`make test-gpu`, in several processes if possible: most of the time goes into compilation."""
    parallel = not plan.options.tiny and importlib.util.find_spec("xdist") is not None
    report = f"--junitxml={plan.folder('gpu-tests') / 'tests.xml'}"
    return ["-m", "pytest", "tests/test_gpu.py", "-m", "gpu", report, *(["-n", "8"] if parallel else [])]


def training(plan: Plan, name: str, steps: int, **more: Any) -> list[str]:
    """The recipe for a number of updates."""
    values = {"output_dir": plan.folder(name) / "run", "cache_dir": plan.out / "cache", "max_steps": steps, **more}
    words = [str(word) for key, value in values.items() for word in (f"--{key}", value)]
    if plan.options.tiny:
        text = plan.out / "tiny.txt"
        write_text(text, (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
        words += [*shlex.split(TINY_TRAINING), "--data", str(text)]
    return ["training/pretrain_mlm.py", RECIPE, *words]


def speed(plan: Plan) -> list[str]:
    """A run too short to learn anything: tokenizes the text, and shows how many updates the time is enough for."""
    some = {"log_steps": 10, "eval_steps": SPEED_STEPS, "save_steps": SPEED_STEPS, "min_gain_nats": -100}
    return training(plan, "luna-small-en-speed", SPEED_STEPS, **some)


def small(plan: Plan) -> list[str]:
    """The run itself. Its number of updates is fixed when it starts, since the learning rate depends on it."""
    name = "luna-small-en"
    steps = plan.states.get(name, {}).get("steps")
    if steps is None:
        minutes = plan.options.train_minutes or min(plan.left(), LIMIT) - GRACE - OVERHEAD
        steps = updates(plan.folder(f"{name}-speed") / "run", minutes)
        plan.note(name, steps=steps)
    return training(plan, name, steps, eval_steps=max(1, steps // 10), min_gain_nats=-100)


def updates(run: Path, minutes: float) -> int:
    """How many updates fit into some minutes at the speed of a finished run."""
    lines = (run / "log.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [entry for entry in map(json.loads, lines) if entry["kind"] == "train"]
    per_second = max(entry["tokens_per_second"] for entry in entries)  # the first windows contain compilation
    per_update = entries[-1]["seen_tokens"] / entries[-1]["step"]
    return max(SPEED_STEPS, int(60 * minutes * per_second / per_update))


def shards(plan: Plan) -> list[str]:
    """`write_shards`, in a process that the plan can stop."""
    places = [str(plan.folder(name)) for name in ("luna-small-en/run", "luna-small-en-shards/model")]
    return ["-c", "import sys, gpu_plan; gpu_plan.write_shards(*sys.argv[1:])", *places]


def write_shards(source: str, target: str) -> None:
    """Save a trained model in bfloat16, in shards small enough to be fetched and committed, with the run's other files.

    Raises:
        RuntimeError: The shards do not hold the weights.
    """
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    import luna_hf  # noqa: F401 (registers the models)

    model = AutoModelForMaskedLM.from_pretrained(source, dtype=torch.bfloat16)
    with writing(Path(target)) as folder:
        model.save_pretrained(folder, max_shard_size=SHARD)
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
        for path in Path(source).iterdir():
            if path.suffix in (".md", ".png", ".json", ".jsonl") and not (folder / path.name).exists():
                shutil.copy(path, folder)
        again = AutoModelForMaskedLM.from_pretrained(folder, dtype="auto").state_dict()
        if not all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items()):
            raise RuntimeError(f"The shards of {source} do not hold its weights.")


_TRAINING = ("accelerate", "datasets", "yaml")
PARTS = {
    part.name: part
    for part in (
        Part("gpu-tests", 4, tests, "tests.xml", ("pytest", "accelerate")),
        Part("encoder-forward", 3, benchmark("encoder", ENCODER, TINY_ENCODER), "encoder-*.json", ("matplotlib",)),
        Part(
            "encoder-step",
            4,
            benchmark("encoder", f"{ENCODER} --mode mlm_step", TINY_ENCODER),
            "encoder-*.json",
            ("matplotlib",),
        ),
        Part(
            "causal-training",
            2,
            benchmark("causal_training", f"{CAUSAL} --rounds 10", TINY_CAUSAL),
            "causal_training-*.json",
            ("matplotlib",),
        ),
        Part(
            "decoding",
            3,
            benchmark("generation", f"{CAUSAL} --rows 16 --rounds 20", TINY_CAUSAL),
            "generation-*.json",
            ("matplotlib",),
        ),
        Part("luna-small-en-speed", 3, speed, "run/metrics.json", _TRAINING),
        Part("luna-small-en", 4, small, "run/metrics.json", _TRAINING, "luna-small-en-speed"),
        Part("luna-small-en-shards", 0.5, shards, "model/model*.safetensors", after="luna-small-en"),
        Part("uneven", 3, benchmark("uneven", UNEVEN, TINY_UNEVEN), "uneven-*.json"),
        Part(
            "serving",
            2,
            benchmark("serving", f"{UNEVEN} --rows 512", TINY_UNEVEN),
            "serving-*.json",
            ("sentence_transformers",),
        ),
        Part(
            "training-memory",
            3,
            benchmark("encoder", f"{ENCODER} --mode class_step --checkpointing", TINY_ENCODER),
            "encoder-*.json",
            ("matplotlib",),
        ),
        Part("lra-cost", 3, benchmark("lra/cost", COST, TINY_COST), "lra-cost-*.json", ("matplotlib",)),
    )
}


# ---- running ----


def environment(device: str) -> dict[str, str]:
    """Variables of a part: the package of this checkout, no network, and no GPU if another device is asked for."""
    path = [str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    values = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **values, **({"ACCELERATE_USE_CPU": "true"} if device == "cpu" else {})}


def run_part(plan: Plan, part: Part, minutes: float) -> dict[str, Any]:
    """Run a part for some minutes at most; returns its state, a remark and its exit status."""
    words = part.words(plan)
    if words[0].startswith("benchmarks/"):
        words += ["--output", str(plan.folder(part.name))]
    plan.folder(part.name).mkdir(parents=True, exist_ok=True)
    log = plan.out / "logs" / f"{part.name}.log"
    log.parent.mkdir(exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=environment(plan.options.device),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(60 * minutes)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            stop(process)
    if plan.state(part) == DONE:
        state, remark = DONE, f"exit status {code}, see logs/{log.name}" if code else ""
    elif code:
        state, remark = FAILED, f"exit status {code}: {last_line(log)}"
    else:  # training that is asked to stop ends with status 0
        state, remark = UNFINISHED, f"stopped after {minutes:.1f} minutes"
    return {"state": state, "remark": remark, "status": code or 0}


def stop(process: subprocess.Popen) -> None:
    """End a part and its children: training saves a checkpoint, the rest of the group is killed."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(60 * GRACE)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(log: Path) -> str:
    """The last words of a failed command."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip()[-200:] for line in reversed(lines) if line.strip()), "it printed nothing")


def run_plan(plan: Plan) -> None:
    """Run the chosen parts that are not done; those that failed before come last."""
    for part in sorted(plan.chosen, key=lambda part: plan.state(part) == FAILED):
        if plan.state(part) == DONE:
            continue
        if obstacle := plan.obstacle(part):
            progress(f"{part.name}: skipped: {obstacle}")
            if plan.state(part) in (WAITING, SKIPPED):
                plan.note(part.name, state=SKIPPED, remark=obstacle)
            continue
        progress(f"{part.name}: about {part.minutes:g} minutes, {plan.left():.1f} are left")
        plan.note(part.name, state=UNFINISHED, remark="stopped with the plan")
        begun = time.monotonic()
        outcome = run_part(plan, part, min(plan.left(), LIMIT) - GRACE)
        plan.note(part.name, **outcome, minutes=round((time.monotonic() - begun) / 60, 2))
        progress(f"{part.name}: {outcome['state']} {outcome['remark']}")
        export(plan)


def export(plan: Plan) -> None:
    """Copy what is worth fetching: one archive of all results but weights and caches, and the shards beside it."""
    if not plan.options.export:
        return
    plan.options.export.mkdir(parents=True, exist_ok=True)
    heavy = {".safetensors", ".pt", ".bin", ".pkl"}

    def light(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        path = Path(entry.name)
        return None if path.suffix in heavy or {"cache", "checkpoints", ".lock"} & set(path.parts) else entry

    with tarfile.open(plan.options.export / "results.tar.gz", "w:gz") as archive:
        archive.add(plan.out, arcname=".", filter=light)
    for path in plan.folder("luna-small-en-shards").glob("model/*.safetensors"):
        shutil.copy(path, plan.options.export)


def table(plan: Plan) -> str:
    """One row for every part."""
    rows = []
    for part in PARTS.values():
        known = plan.states.get(part.name, {})
        rows.append(
            [part.name, f"{part.minutes:g}", plan.state(part), known.get("minutes", ""), known.get("remark", "")]
        )
    return markdown_table(["part", "minutes, estimated", "state", "minutes taken", "remark"], rows)


# ---- command line ----


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--list", action="store_true", help="print the parts and their states, and run nothing")
    add("--only", nargs="+", choices=PARTS, metavar="PART", help="parts to run, as --list names them")
    add("--minutes", type=float, default=60.0, help="time for everything (default: %(default)g)")
    add("--train-minutes", type=float, help="time of luna-small-en over all calls (default: the rest of the first)")
    add("--out", type=Path, default=ROOT / "outputs" / "gpu-plan", help="folder of the results (default: %(default)s)")
    fetched = os.environ.get("OUT")
    add("--export", type=Path, default=fetched and Path(fetched), help="folder to fetch (default: $OUT if set)")
    add("--device", default="cuda", help="default: %(default)s")
    add("--tiny", action="store_true", help="try every command at a tiny size, for example with --device cpu")
    options = parser.parse_args(arguments)
    if options.minutes <= 0 or (options.train_minutes is not None and options.train_minutes <= 0):
        parser.error("--minutes and --train-minutes must be above 0")
    return options


def main(arguments: Sequence[str]) -> int:
    """Run the plan: 1 if a part or a GPU test has failed, 2 after a mistake in the command."""

    def script() -> int:
        plan = Plan(parse(arguments))
        if plan.options.list:
            print(table(plan))
            return 0
        if plan.options.device != "cpu" and not torch.cuda.is_available():
            raise UserError(f"There is no device {plan.options.device}. Without a GPU, try --tiny --device cpu.")
        plan.out.mkdir(parents=True, exist_ok=True)
        with locked(plan.out / ".lock"):
            print(f"{describe()}\n", flush=True)
            write_text(plan.out / "environment.txt", describe() + "\n")
            try:
                run_plan(plan)
            finally:
                export(plan)
                print(table(plan))
        return int(any(plan.states.get(part.name, {}).get("status") for part in plan.chosen))

    return run_script(script, "the same command continues")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
