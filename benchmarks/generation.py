"""Time per token and memory of generation against the length of the context, beside GPT-2 with its KV cache.

    python benchmarks/generation.py --check-floors

What is timed is one decoding step as `generate` makes it: the model's forward of one token with its cache. The models
have the same size and random weights. See benchmarks/README.md for the protocol.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from floors import compare, table
from measuring import (
    RESULTS,
    extra_memory,
    header,
    in_own_process,
    progress,
    ratios,
    result_path,
    rotated,
    seconds,
    slots_of,
    steady_allocator,
    summary,
    write_json,
)
from plots import Panel, machine_name, plot_panels
from torch import Tensor
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, PreTrainedModel, StaticCache
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from luna_hf import FAMILIES, MemoryCache

PROTOCOL = (
    "One decoding step: the model's forward of one token of every row, with the cache, an attention mask of ones and "
    "logits for that token, as generate makes it. Every round times one step of every model after every length of "
    "context, the order rotated from round to round; ratios are taken within a round, medians over rounds. A state "
    "grows by one token in each round, as in generation. The models of this package have read random tokens, "
    "in parts of 512; GPT-2's caches are filled with random keys and values, since reading 16K tokens takes it minutes "
    "and changes no shape. gpt2: DynamicCache, generate's default, which copies all keys and values in every step; "
    "gpt2-static: StaticCache of just the length needed, written in place, not compiled. The process's allocator is "
    "left as it is. State: bytes of the tensors in the cache. Memory: state, and peak resident size of a step beyond "
    "it, each model and length in its own process, freed blocks of 1 MiB and more going back to the system. "
    "generate: time between two tokens of a call of generate, greedy, over that of a step, at the shortest length."
)

# Family and fields of this package's models; a family without a row joins with 64 slots.
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "luna-64": ("luna", {"projection_length": 64}),
    "abc-mlp-64": ("abc_memory", {"memory_control": "mlp", "memory_size": 64}),
    "abc-window-64": ("abc_memory", {"memory_control": "sliding_window", "memory_size": 64}),
}
_NAMED = {family for family, _ in OWN.values()}
OWN |= {family: (family, slots_of(family, 64)) for family in FAMILIES if family not in _NAMED}
DYNAMIC, STATIC = "gpt2", "gpt2-static"  # one model, two caches
PEERS = (DYNAMIC, STATIC)
NAMES = (*OWN, *PEERS)
PART = 512  # tokens that are read at a time
WARM_UP, GENERATE_ROUNDS = 2, 3  # steps; calls of generate

# Floors, for the sizes of BASE on one CPU thread in float32.
BASE = {"layers": 4, "width": 768, "heads": 12, "vocab_size": 50257, "threads": 1, "device": "cpu", "dtype": "float32"}
GROWTH_LENGTHS, GROWTH = (1024, 16384), 1.05
# Speed over GPT-2 at 16,384 tokens by rows and cache. A step reads all weights once: with one row they are two thirds
# of the bytes of the static cache, and no model of this size can be much more than 2.5 times as fast as that.
SPEED = {(1, DYNAMIC): 4.0, (1, STATIC): 1.8, (4, DYNAMIC): 4.0, (4, STATIC): 3.0}
GENERATE = 1.1

Times = dict[int, dict[str, list[float]]]  # length, model: seconds of every round


@dataclass(frozen=True)
class Setting:
    """Sizes and conditions that all models of a run share."""

    layers: int
    width: int
    heads: int
    vocab_size: int
    rows: int
    longest: int  # context
    room: int  # tokens that are added to a context at most
    device: str
    threads: int
    dtype: str = "float32"


def build(name: str, setting: Setting) -> PreTrainedModel:
    """A randomly initialised model, in eval mode, which `generate` does not end."""
    torch.manual_seed(0)
    if name in PEERS:
        config = GPT2Config(
            vocab_size=setting.vocab_size,
            n_embd=setting.width,
            n_layer=setting.layers,
            n_head=setting.heads,
            n_positions=setting.longest + setting.room,
            bos_token_id=None,
            eos_token_id=None,
        )
        model = GPT2LMHeadModel(config)
    else:
        family, fields = OWN[name]
        config = FAMILIES[family].config(
            vocab_size=setting.vocab_size,
            hidden_size=setting.width,
            num_hidden_layers=setting.layers,
            num_attention_heads=setting.heads,
            intermediate_size=4 * setting.width,
            **fields,
        )
        model = FAMILIES[family].causal_lm(config)
    model.generation_config.eos_token_id = None
    return model.to(setting.device).eval()


def random_tokens(length: int, setting: Setting) -> Tensor:
    """(rows, length) ids."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, setting.vocab_size, (setting.rows, length), generator=generator)
    return ids.to(setting.device)


@torch.no_grad()
def read_tokens(model: PreTrainedModel, lengths: Sequence[int], setting: Setting) -> dict[int, MemoryCache]:
    """The state of a model of this package after the first tokens of one text, for every length."""
    cache, states, seen = MemoryCache(model.config), {}, 0
    for length in sorted(lengths):
        for part in random_tokens(max(lengths), setting)[:, seen:length].split(PART, dim=1):
            model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        states[length], seen = copy.deepcopy(cache), length
    return states


def fill_cache(name: str, model: PreTrainedModel, length: int, setting: Setting) -> Cache:
    """A cache of GPT-2 with random keys and values, the same for both kinds."""
    if name == DYNAMIC:
        cache = DynamicCache(config=model.config)
    else:
        cache = StaticCache(config=model.config, max_cache_len=length + setting.room)
    generator = torch.Generator().manual_seed(length)
    shape = (setting.rows, setting.heads, length, setting.width // setting.heads)
    for layer in range(setting.layers):
        key, value = (torch.randn(shape, generator=generator).to(setting.device) for _ in range(2))
        cache.update(key, value, layer)
    return cache


def make_states(name: str, model: PreTrainedModel, lengths: Sequence[int], setting: Setting) -> dict[int, Cache]:
    """What the model keeps of contexts of these lengths."""
    if name in OWN:
        return read_tokens(model, lengths, setting)
    return {length: fill_cache(name, model, length, setting) for length in lengths}


def state_bytes(cache: Cache) -> int:
    """Size of all tensors in a cache."""
    if isinstance(cache, MemoryCache):
        return cache.nbytes
    return sum(states.nbytes for layer in cache.layers for states in (layer.keys, layer.values))


def make_step(model: PreTrainedModel, cache: Cache, length: int, setting: Setting) -> Callable[[], Tensor]:
    """One decoding step after a context of this length; the next call is the next step."""
    token = random_tokens(1, setting)
    mask = torch.ones(setting.rows, length + setting.room, dtype=torch.long, device=setting.device)
    seen = length

    @torch.no_grad()
    def step() -> Tensor:
        nonlocal seen
        seen += 1
        inputs = {"input_ids": token, "attention_mask": mask[:, :seen], "past_key_values": cache}
        return model(**inputs, use_cache=True, logits_to_keep=1).logits

    return step


# ---- measurements ----


def step_memory(name: str, length: int, setting: Setting) -> int:
    """Bytes of the state and of what a step takes at its peak beyond it; run it in a process of its own."""
    steady_allocator()
    torch.set_num_threads(setting.threads)
    model = build(name, setting)
    cache = make_states(name, model, [length], setting)[length]
    step = make_step(model, cache, length, setting)
    step()
    return state_bytes(cache) + extra_memory(step, setting.device)


def measure_memory(options: argparse.Namespace, setting: Setting) -> dict[int, dict[str, int]]:
    """Peak bytes of every length and model."""
    memory: dict[int, dict[str, int]] = {}
    for length in options.lengths:
        progress(f"memory: length {length}")
        memory[length] = {name: in_own_process(step_memory, name, length, setting) for name in NAMES}
    return memory


def measure_time(steps: dict[int, dict[str, Callable[[], Tensor]]], rounds: int, device: str) -> Times:
    """Seconds of one step of every model and length in every round."""
    for actions in steps.values():
        for action in actions.values():
            for _ in range(WARM_UP):
                action()
    times: Times = {length: {name: [] for name in actions} for length, actions in steps.items()}
    for turn in range(rounds):
        for name in rotated(NAMES, turn):
            for length, actions in steps.items():
                times[length][name].append(seconds(actions[name], device))
        progress(f"round {turn + 1} of {rounds}")
    return times


class Clock(BaseStreamer):
    """Notes when `generate` has chosen a token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Called with the prompt, and with every token."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to do."""

    def gap(self) -> float:
        """Median seconds between two tokens; the first comes with the reading of the prompt."""
        return median(after - before for before, after in zip(self.times[1:], self.times[2:], strict=False))


def measure_generate(
    models: dict[str, PreTrainedModel],
    steps: dict[str, Callable[[], Tensor]],
    length: int,
    setting: Setting,
    count: int,
) -> dict[str, dict[str, Any]]:
    """For every model the time of a token in `generate` over that of a step."""
    prompt = random_tokens(length, setting)
    mask = torch.ones_like(prompt)
    over: dict[str, list[float]] = {name: [] for name in models if name != STATIC}
    for turn in range(GENERATE_ROUNDS):
        for name in over:
            clock = Clock()
            options = {"max_new_tokens": count + 2, "do_sample": False, "streamer": clock}
            models[name].generate(prompt, attention_mask=mask, **options)
            over[name].append(clock.gap() / median(seconds(steps[name], setting.device) for _ in range(count)))
        progress(f"generate: round {turn + 1} of {GENERATE_ROUNDS}")
    return {name: summary(values) for name, values in over.items()}


# ---- result ----


def describe_length(
    length: int, times: dict[str, list[float]], states: dict[str, int], memory: dict[str, int]
) -> dict[str, Any]:
    """One entry of the result's `lengths`."""
    models: dict[str, dict[str, Any]] = {}
    for name, taken in times.items():
        models[name] = {"seconds": summary(taken), "state_bytes": states[name], "memory_bytes": memory[name]}
        if name in OWN:
            models[name]["speed_over"] = {peer: summary(ratios(times[peer], taken)) for peer in PEERS}
    return {"length": length, "models": models}


def describe_growth(times: Times) -> dict[str, dict[str, Any]] | None:
    """Time of a step at the longer of `GROWTH_LENGTHS` over that at the other, if both were measured."""
    short, long = GROWTH_LENGTHS
    if short not in times or long not in times:
        return None
    return {name: summary(ratios(times[long][name], times[short][name])) for name in times[long]}


def check(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Every floor that applies to a run, with what was measured and whether it holds."""
    settings, checks = result["settings"], []
    for name in OWN:
        sizes = [row["models"][name]["state_bytes"] for row in result["lengths"]]
        checks.append(compare("largest state over the smallest", name, max(sizes) / min(sizes), 1.0, at_least=False))
    if any(settings[name] != value for name, value in BASE.items()):
        return checks
    short, long = GROWTH_LENGTHS
    for name in OWN:
        if result["growth"]:
            growth = result["growth"][name]["median"]
            checks.append(compare(f"time of a step at {long} over {short}", name, growth, GROWTH, at_least=False))
        checks.append(
            compare("generate over a step", name, result["generate"][name]["median"], GENERATE, at_least=False)
        )
        over = {row["length"]: row["models"][name]["speed_over"] for row in result["lengths"]}.get(long, {})
        for peer, speed in over.items():
            if floor := SPEED.get((settings["rows"], peer)):
                checks.append(compare(f"speed over {peer} at {long}", name, speed["median"], floor, at_least=True))
    return checks


def markdown(result: dict[str, Any]) -> str:
    """The result as a table with a row for every length, and the ratios in words."""
    # Milliseconds; state and, in brackets, peak of a step with its state.
    lines = [
        f"| tokens | {' | '.join(f'{name}, ms' for name in NAMES)} | {' | '.join(f'{name}, MiB' for name in NAMES)} |",
        "| --- " * (1 + 2 * len(NAMES)) + "|",
    ]
    for row in result["lengths"]:
        cells = [f"{row['length']:,}"]
        cells += [f"{1e3 * row['models'][name]['seconds']['median']:.1f}" for name in NAMES]
        sizes = [(row["models"][name]["state_bytes"], row["models"][name]["memory_bytes"]) for name in NAMES]
        cells += [f"{state / 2**20:.1f} ({peak / 2**20:.1f})" for state, peak in sizes]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    last = result["lengths"][-1]
    for peer in PEERS:
        ratio = {name: last["models"][name]["speed_over"][peer] for name in OWN}
        lines.append(f"* Speed over {peer} after {last['length']:,} tokens: {_in_words(ratio, 1)}.")
    if result["growth"]:
        short, long = GROWTH_LENGTHS
        lines.append(
            f"* Time of a step after {long:,} tokens over that after {short:,}: {_in_words(result['growth'])}."
        )
    lines.append(f"* Time of a token in `generate` over that of a step: {_in_words(result['generate'])}.")
    return "\n".join(lines)


def _in_words(ratio: dict[str, dict[str, Any]], digits: int = 2) -> str:
    return ", ".join(f"{name} {values['median']:.{digits}f}" for name, values in ratio.items())


def plot(result: dict[str, Any], path: Path) -> None:
    """Time of a step and memory against length."""

    def curves(value: Callable[[dict[str, Any]], float]) -> dict[str, dict[int, float]]:
        return {name: {row["length"]: value(row["models"][name]) for row in result["lengths"]} for name in NAMES}

    panels = [
        Panel("time of a token (milliseconds)", curves(lambda own: 1e3 * own["seconds"]["median"])),
        Panel("memory beyond the model (MiB)", curves(lambda own: own["memory_bytes"] / 2**20)),
    ]
    settings = result["settings"]
    title = (
        f"generation, {settings['layers']} layers of width {settings['width']}, {settings['rows']} row(s), "
        f"{settings['dtype']}, {machine_name(result['machine'])}"
    )
    plot_panels(panels, title, path, dashed=PEERS)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384], help="contexts")
    parser.add_argument("--rows", type=int, default=1, help="texts that are continued at a time")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--vocab-size", type=int, default=50257)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the JSON file, the table and the plot")
    parser.add_argument("--check-floors", action="store_true", help="exit 1 if a floor is missed")
    options = parser.parse_args(arguments)
    options.lengths = sorted(set(options.lengths))
    return options


def make_setting(options: argparse.Namespace) -> Setting:
    """What the models need of the command line."""
    names = ("layers", "width", "heads", "vocab_size", "rows", "device", "threads")
    room = WARM_UP + (1 + GENERATE_ROUNDS) * options.rounds + 2
    return Setting(**{name: getattr(options, name) for name in names}, longest=options.lengths[-1], room=room)


def run(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Measure everything."""
    torch.set_num_threads(options.threads)
    setting = make_setting(options)
    memory = measure_memory(options, setting)
    models = {name: build(name, setting) for name in (*OWN, DYNAMIC)}
    models[STATIC] = models[DYNAMIC]
    states = {}
    for name, model in models.items():
        progress(f"context: {name}")
        states[name] = make_states(name, model, options.lengths, setting)
    sizes = {length: {name: state_bytes(states[name][length]) for name in NAMES} for length in options.lengths}
    steps = {
        length: {name: make_step(models[name], states[name][length], length, setting) for name in NAMES}
        for length in options.lengths
    }
    times = measure_time(steps, options.rounds, setting.device)
    shortest = options.lengths[0]
    result = {
        **header(__file__, arguments, setting.device),
        "protocol": PROTOCOL,
        "settings": {**vars(setting), "rounds": options.rounds},
        "peers": list(PEERS),
        "models": {name: {"parameters": model.num_parameters()} for name, model in models.items()},
        "growth": describe_growth(times),
        "generate": measure_generate(models, steps[shortest], shortest, setting, options.rounds),
        "lengths": [describe_length(n, times[n], sizes[n], memory[n]) for n in options.lengths],
    }
    result["floors"] = check(result)
    return result


def main(arguments: Sequence[str]) -> int:
    """Measure, print, write; 1 if a floor was to be checked and is missed."""
    options = parse(arguments)
    result = run(options, arguments)
    rows = "" if options.rows == 1 else f"-{options.rows}-rows"
    path = result_path(options.output, f"generation-{options.layers}-layer{rows}", options.device, "float32")
    write_json(path, result)
    result = json.loads(path.read_text(encoding="utf-8"))  # rounded: the table is that of the file
    path.with_suffix(".md").write_text(markdown(result) + "\n", encoding="utf-8")
    print(markdown(result), table(result["floors"]), sep="\n\n")
    if len(options.lengths) > 1:
        plot(result, path.with_suffix(".png"))
    return int(options.check_floors and not all(check["holds"] for check in result["floors"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
