"""Times of this working tree and of an earlier commit, interleaved in one process.

    python benchmarks/against_commit.py 65e44cd

The package of the commit is unpacked under another name, models of both versions get the same weights, and every round
runs both in alternating order. The cases are those of the other benchmarks: encoders in a forward and a training step,
with and without padding; causal models in a forward, a training step and decoding; causal operators. One thread. A
ratio above 1 means that this tree is slower.
"""

import argparse
import importlib.util
import io
import itertools
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch
from measuring import RESULTS, seconds, slots_of, steady_allocator
from summaries import ratios, summary
from transformers import PreTrainedModel

import luna_hf
from luna_hf import FAMILIES
from luna_hf.families.abc.configuration import CONTROLS
from luna_hf.scripting import Parser, describe_run, run_script, write_json

ROOT = Path(__file__).resolve().parent.parent
SIZES = {
    **{"vocab_size": 1000, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 4096},
}
ENCODERS = {
    "luna-tied": ("luna", {"tie_kv": True}),
    "luna-untied": ("luna", {"tie_kv": False}),
    "luna-16": ("luna", {"projection_length": 16}),
    **{f"abc-{control}": ("abc_memory", {"memory_control": control}) for control in CONTROLS},
}
CAUSAL = {
    "luna": ("luna", {}),
    "luna-conv": ("luna", {"conv_kernel_size": 5}),
    "abc-mlp": ("abc_memory", {}),
    "abc-window": ("abc_memory", {"memory_control": "sliding_window"}),
}
# Kind and length of the cases of every encoder and of every causal model.
ENCODER_CASES = (("forward", 512), ("forward", 2048), ("padded", 512), ("train", 512))
CAUSAL_CASES = (("causal", 2048), ("causal-train", 1024), ("decode", 1024))
SUFFIXES = {"forward": "Model", "padded": "Model", "train": "ForMaskedLM"}  # of the model's class; else ForCausalLM
DECODED = 20  # tokens in one timed call; a single one is too short for the clock

Pair = tuple[Callable[[], Any], Callable[[], Any]]


def load_commit(commit: str, folder: Path) -> ModuleType:
    """The package at a commit, importable beside the installed one."""
    command = ["git", "archive", commit, "src/luna_hf"]
    archive = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    (folder / "src" / "luna_hf").rename(folder / "luna_hf_before")
    sys.path.insert(0, str(folder))
    return importlib.import_module("luna_hf_before")


def models(packages: Sequence[ModuleType], kind: str, family: str, options: dict[str, Any]) -> Pair:
    """The timed calls of both versions of a model, with equal weights."""
    kind, length = kind.rsplit("-", 1)
    name, weights, calls = FAMILIES[family].config.__name__.removesuffix("Config"), None, []
    for package in packages:
        fields = {**SIZES, **slots_of(family, 64), "num_hidden_layers": 4 if kind == "decode" else 2, **options}
        config = getattr(package, f"{name}Config")(**fields)
        model = getattr(package, name + SUFFIXES.get(kind, "ForCausalLM"))(config).eval()
        weights = weights or model.state_dict()
        model.load_state_dict(weights)
        if kind in SUFFIXES and hasattr(package, "absorb_projections"):  # earlier versions did so by themselves
            package.absorb_projections(model)
        calls.append(step(model, kind, int(length), package))
    return tuple(calls)


def step(model: PreTrainedModel, kind: str, length: int, package: ModuleType) -> Callable[[], Any]:
    """The timed call."""
    ids = torch.randint(4, 1000, (max(1, 1024 // length), length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 3 * length // 4 :] = 0

    @torch.no_grad()
    def forward() -> None:
        model(ids, attention_mask=mask if kind == "padded" else None)

    def train() -> None:
        model.train()
        model.zero_grad()
        model(ids, labels=ids).loss.backward()

    cache = package.MemoryCache(model.config) if kind == "decode" else None

    @torch.no_grad()
    def decode() -> None:
        for _ in range(DECODED):
            model(ids[:1, :1], cache=cache, use_cache=True)

    return {"decode": decode, "train": train, "causal-train": train}.get(kind, forward)


def find(package: ModuleType, *names: str) -> ModuleType:
    """The first of some modules of the package that exists: earlier versions had no subpackages."""
    found = (name for name in names if importlib.util.find_spec(f"{package.__name__}.{name.partition('.')[0]}"))
    return importlib.import_module(f"{package.__name__}.{next(found)}")


def operators(packages: Sequence[ModuleType], name: str, length: int = 2048) -> Pair:
    """The timed calls of both versions of a causal operator."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, weights = (torch.randn(1, 12, length, 64, generator=generator) for _ in range(4))
    steps = torch.arange(1, length + 1)[None]

    def call(package: ModuleType) -> Callable[[], Any]:
        attend = find(package, "ops.causal_memory", "causal_memory").attend_causal_memory
        scan = find(package, "ops.scan", "functional").causal_scan
        return {
            "scan": partial(scan, query, key, value),
            "steps": partial(attend, query, key, value, weights.exp(), "steps", steps=steps),
            "softmax": partial(attend, query, key, value, weights, "softmax"),
        }[name]

    return tuple(map(call, packages))


def cases(packages: Sequence[ModuleType]) -> dict[str, Callable[[], Pair]]:
    """The comparisons by name; each pair is built only when it runs."""
    made: dict[str, Callable[[], Pair]] = {}
    for variants, kinds in ((ENCODERS, ENCODER_CASES), (CAUSAL, CAUSAL_CASES)):
        for (name, (family, options)), (kind, length) in itertools.product(variants.items(), kinds):
            made[f"{kind}-{name}-{length}"] = partial(models, packages, f"{kind}-{length}", family, options)
    for name in ("scan", "steps", "softmax"):
        made[f"operator-{name}-2048"] = partial(operators, packages, name)
    return made


def compare(pair: Pair, rounds: int) -> dict[str, Any]:
    """Seconds of both versions, round by round, after a warm-up of each."""
    for action in pair:
        action()
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for side in (0, 1) if number % 2 else (1, 0):
            times[side].append(seconds(pair[side], "cpu"))
    return {"before": summary(times[0]), "now": summary(times[1]), "ratio": summary(ratios(times[1], times[0]))}


def main() -> None:
    """See the top of the file."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the earlier version")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with names that contain TEXT")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each case (default: 9)")
    parser.add_argument("--output", type=Path, help="JSON file (default: benchmarks/results/against-COMMIT.json)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    steady_allocator()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, make in cases((load_commit(options.commit, Path(folder)), luna_hf)).items():
            if options.only in name:
                results[name] = compare(make(), options.rounds)
                ratio, low, high = (results[name]["ratio"][part] for part in ("median", "min", "max"))
                milliseconds = 1e3 * results[name]["before"]["median"]
                print(f"{name:32} {milliseconds:9.1f} ms, now x {ratio:.3f} ({low:.3f} to {high:.3f})", flush=True)
    if not results:
        parser.error(f"no case has {options.only!r} in its name")
    medians = [result["ratio"]["median"] for result in results.values()]
    print(f"{len(medians)} cases: ratios from {min(medians):.3f} to {max(medians):.3f}, median {median(medians):.3f}")
    path = options.output or RESULTS / f"against-{options.commit}.json"
    write_json(path, {**describe_run(__file__, sys.argv[1:], "cpu"), "results": results})


if __name__ == "__main__":
    sys.exit(run_script(main))
