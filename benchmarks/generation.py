"""Time per token and memory of generation against the length of the context, beside GPT-2 with its KV cache.

    python benchmarks/generation.py --check-floors

The timed call is one decoding step as in `generate`: the model's forward of one token with its cache. The models have
the same size and random weights. See docs/speed.md for the protocol.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import measuring
import torch
from floors import compare
from plots import Panel, machine_name, plot_panels
from torch import Tensor
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, PreTrainedModel, StaticCache
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from luna_hf import FAMILIES, MemoryCache
from luna_hf.scripting import describe_run, markdown_table, progress, run_script

PROTOCOL = (
    "One decoding step: the model's forward of one token of every row, with the cache, an attention mask of ones and "
    "logits for that token, as in generate. Every round times one step of every model after every length of context, "
    "in an order that rotates from round to round; ratios are taken within a round, medians over rounds. A state grows "
    "by one token in each round, as in generation. The models of this package have read random tokens, in parts of "
    "512; GPT-2's caches are filled with random keys and values, since reading 16K tokens takes minutes and changes no "
    "shape. gpt2: DynamicCache, generate's default, which copies all keys and values in every step; gpt2-static: "
    "StaticCache of exactly the length needed, written in place, not compiled. The allocator has its defaults. State: "
    "bytes of the tensors in the cache. Memory: state, and peak resident size of a step beyond it, each model and "
    "length in its own process (on an accelerator: peak allocated, in one process), where freed blocks of 1 MiB and "
    "more go back to the system. generate: time between two tokens of a greedy call of generate, relative to a step, "
    "at the shortest length."
)
SETTINGS = (
    *("layers", "width", "heads", "vocab_size", "rows", "longest", "room"),
    *("dtype", "device", "threads", "rounds"),
)

# Family and fields of this package's models; a family without an entry joins with 64 slots.
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "luna-64": ("luna", {"projection_length": 64}),
    "luna-mixed-64": ("luna", {"projection_length": 64, "local_window": 32}),
    "abc-mlp-64": ("abc_memory", {"memory_control": "mlp", "memory_size": 64}),
    "abc-mixed-64": ("abc_memory", {"memory_control": "mlp", "memory_size": 64, "local_window": 32}),
    "abc-window-64": ("abc_memory", {"memory_control": "sliding_window", "memory_size": 64}),
}
_NAMED = {family for family, _ in OWN.values()}
OWN |= {family: (family, measuring.slots_of(family, 64)) for family in FAMILIES if family not in _NAMED}
DYNAMIC, STATIC = "gpt2", "gpt2-static"  # one model, two caches
PEERS = (DYNAMIC, STATIC)
NAMES = (*OWN, *PEERS)
PART = 512  # tokens read at a time
WARM_UP, GENERATE_ROUNDS = 2, 3  # steps; calls of generate

# Floors, for the sizes of BASE on one CPU thread in float32.
BASE = {"layers": 4, "width": 768, "heads": 12, "vocab_size": 50257, "threads": 1, "device": "cpu", "dtype": "float32"}
GROWTH_LENGTHS, GROWTH = (1024, 16384), 1.05
# Speed over GPT-2 at 16,384 tokens by rows and cache. A step reads all weights once: with one row they are two thirds
# of the bytes of the static cache, which limits the speed of any model of this size to about 2.5 times the peer's.
SPEED = {(1, DYNAMIC): 4.0, (1, STATIC): 1.8, (4, DYNAMIC): 4.0, (4, STATIC): 3.0}
GENERATE = 1.1

Times = dict[int, dict[str, list[float]]]  # length, model: seconds of every round


def build(name: str, setting: argparse.Namespace) -> PreTrainedModel:
    """A randomly initialised model in eval mode, without dropout, and without an end token for `generate`."""
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
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        )
        make = GPT2LMHeadModel
    else:
        family, fields = OWN[name]
        config = FAMILIES[family].config(
            vocab_size=setting.vocab_size,
            hidden_size=setting.width,
            num_hidden_layers=setting.layers,
            num_attention_heads=setting.heads,
            intermediate_size=4 * setting.width,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **fields,
        )
        make = FAMILIES[family].causal_lm
    with torch.device(setting.device):  # an accelerator draws random weights faster
        model = make(config)
    model.generation_config.eos_token_id = None
    return model.to(device=setting.device, dtype=getattr(torch, setting.dtype)).eval()


def random_tokens(length: int, setting: argparse.Namespace) -> Tensor:
    """(rows, length) ids."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, setting.vocab_size, (setting.rows, length), generator=generator)
    return ids.to(setting.device)


@torch.no_grad()
def read_tokens(model: PreTrainedModel, lengths: Sequence[int], setting: argparse.Namespace) -> dict[int, MemoryCache]:
    """States of a model of this package after the first tokens of a text, by length."""
    cache, states, seen = MemoryCache(model.config), {}, 0
    for length in sorted(lengths):
        for part in random_tokens(max(lengths), setting)[:, seen:length].split(PART, dim=1):
            model(part, cache=cache, use_cache=True, logits_to_keep=1)
        states[length], seen = copy.deepcopy(cache), length
    return states


def fill_cache(name: str, model: PreTrainedModel, length: int, setting: argparse.Namespace) -> Cache:
    """A cache of GPT-2 with random keys and values, the same for both kinds of cache."""
    room = {} if name == DYNAMIC else {"max_cache_len": length + setting.room}
    cache = (StaticCache if room else DynamicCache)(config=model.config, **room)
    generator = torch.Generator(setting.device).manual_seed(length)
    kind = {"device": setting.device, "dtype": getattr(torch, setting.dtype)}
    shape = (setting.rows, setting.heads, length, setting.width // setting.heads)
    for layer in range(setting.layers):
        key, value = (torch.randn(shape, generator=generator, **kind) for _ in range(2))
        cache.update(key, value, layer)
    return cache


def make_states(name: str, model: PreTrainedModel, setting: argparse.Namespace) -> dict[int, Cache]:
    """The model's caches after contexts of the chosen lengths."""
    if name in OWN:
        return read_tokens(model, setting.lengths, setting)
    return {length: fill_cache(name, model, length, setting) for length in setting.lengths}


def state_bytes(cache: Cache) -> int:
    """Size of all tensors in a cache."""
    if isinstance(cache, MemoryCache):
        return cache.nbytes
    return sum(states.nbytes for layer in cache.layers for states in (layer.keys, layer.values))


def make_step(model: PreTrainedModel, cache: Cache, length: int, setting: argparse.Namespace) -> Callable[[], Tensor]:
    """One decoding step after a context of this length; the next call is the next step."""
    token = random_tokens(1, setting)
    mask = torch.ones(setting.rows, length + setting.room, dtype=torch.long, device=setting.device)
    seen = length

    @torch.no_grad()
    def step() -> Tensor:
        nonlocal seen
        seen += 1
        inputs = {"input_ids": token, "attention_mask": mask[:, :seen], "cache": cache}
        return model(**inputs, use_cache=True, logits_to_keep=1).logits

    return step


# ---- measurements ----


def step_memory(name: str, length: int, setting: argparse.Namespace) -> int:
    """Bytes of the state, plus the peak of a step beyond it; run it in a separate process."""
    model = build(name, setting)
    cache = make_states(name, model, argparse.Namespace(**{**vars(setting), "lengths": [length]}))[length]
    step = make_step(model, cache, length, setting)
    step()
    return state_bytes(cache) + measuring.extra_memory(step, setting.device)


def measure_time(steps: dict[int, dict[str, Callable[[], Tensor]]], rounds: int, device: str) -> Times:
    """Seconds of one step of every model and length in every round."""
    for actions in steps.values():
        for action in actions.values():
            for _ in range(WARM_UP):
                action()
    times: Times = {length: {name: [] for name in actions} for length, actions in steps.items()}
    for turn in range(rounds):
        for name in measuring.rotated(NAMES, turn):
            for length, actions in steps.items():
                times[length][name].append(measuring.seconds(actions[name], device))
        progress(f"round {turn + 1} of {rounds}")
    return times


class Clock(BaseStreamer):
    """Records when `generate` emits a token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Record the prompt, or a token."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing."""

    def gap(self) -> float:
        """Median seconds between two tokens; the first one includes reading the prompt."""
        return median(after - before for before, after in zip(self.times[1:], self.times[2:], strict=False))


def measure_generate(
    models: dict[str, PreTrainedModel],
    steps: dict[str, Callable[[], Tensor]],
    length: int,
    setting: argparse.Namespace,
    count: int,
) -> dict[str, dict[str, Any]]:
    """Time of a token in `generate` relative to a step, for every model."""
    prompt = random_tokens(length, setting)
    mask = torch.ones_like(prompt)
    over: dict[str, list[float]] = {name: [] for name in models if name != STATIC}
    for turn in range(GENERATE_ROUNDS):
        for name in over:
            clock = Clock()
            options = {"max_new_tokens": count + 2, "do_sample": False, "streamer": clock}
            models[name].generate(prompt, attention_mask=mask, **options)
            step = median(measuring.seconds(steps[name], setting.device) for _ in range(count))
            over[name].append(clock.gap() / step)
        progress(f"generate: round {turn + 1} of {GENERATE_ROUNDS}")
    return {name: measuring.summary(values) for name, values in over.items()}


# ---- result ----


def describe_length(
    length: int, times: dict[str, list[float]], states: dict[str, int], memory: dict[str, int]
) -> dict[str, Any]:
    """One entry of the result's `lengths`."""
    models: dict[str, dict[str, Any]] = {}
    for name, taken in times.items():
        models[name] = {"seconds": measuring.summary(taken), "state_bytes": states[name], "memory_bytes": memory[name]}
        if name in OWN:
            models[name]["speed_over"] = {peer: measuring.compare(times[peer], taken) for peer in PEERS}
    return {"length": length, "models": models}


def check(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Every floor that applies to a run."""
    settings, checks = result["settings"], []
    own = [name for name in result["models"] if name not in result["peers"]]
    for name in own:
        sizes = [row["models"][name]["state_bytes"] for row in result["lengths"]]
        checks.append(compare("largest state over the smallest", name, max(sizes) / min(sizes), 1.0))
    if any(settings[name] != value for name, value in BASE.items()):
        return checks
    short, long = GROWTH_LENGTHS
    last = {row["length"]: row["models"] for row in result["lengths"]}.get(long, {})
    for name in own:
        if result["growth"]:
            ratio = result["growth"][name]["median"]
            checks.append(compare(f"time of a step at {long} over {short}", name, ratio, GROWTH))
        checks.append(compare("generate over a step", name, result["generate"][name]["median"], GENERATE))
        for peer, speed in last[name]["speed_over"].items() if last else ():
            if floor := SPEED.get((settings["rows"], peer)):
                checks.append(compare(f"speed over {peer} at {long}", name, speed["median"], floor, at_least=True))
    return checks


def markdown(result: dict[str, Any]) -> str:
    """A row for every length, milliseconds, then MiB of the state and (in brackets) of a step; ratios in words."""
    rows, names = [], list(result["lengths"][0]["models"])
    for row in result["lengths"]:
        models = row["models"].values()
        times = [f"{1e3 * model['seconds']['median']:.1f}" for model in models]
        sizes = [f"{model['state_bytes'] / 2**20:.1f} ({model['memory_bytes'] / 2**20:.1f})" for model in models]
        rows.append([f"{row['length']:,}", *times, *sizes])
    header = ["tokens", *(f"{name}, ms" for name in names), *(f"{name}, MiB" for name in names)]
    lines = [markdown_table(header, rows), ""]
    last = result["lengths"][-1]
    for peer in PEERS:
        ratio = {name: model["speed_over"][peer] for name, model in last["models"].items() if "speed_over" in model}
        lines.append(f"* Speed relative to {peer} after {last['length']:,} tokens: {_in_words(ratio, 1)}.")
    if result["growth"]:
        short, long = GROWTH_LENGTHS
        lines.append(f"* Time of a step after {long:,} tokens relative to {short:,}: {_in_words(result['growth'])}.")
    lines.append(f"* Time of a token in `generate` relative to a step: {_in_words(result['generate'])}.")
    return "\n".join(lines)


def _in_words(ratio: dict[str, dict[str, Any]], digits: int = 2) -> str:
    return ", ".join(f"{name} {values['median']:.{digits}f}" for name, values in ratio.items())


def plot(result: dict[str, Any], path: Path) -> None:
    """Time of a step and memory against length."""
    rows = {row["length"]: row["models"] for row in result["lengths"]}
    times = {name: {n: 1e3 * models[name]["seconds"]["median"] for n, models in rows.items()} for name in NAMES}
    memory = {name: {n: models[name]["memory_bytes"] / 2**20 for n, models in rows.items()} for name in NAMES}
    panels = [Panel("time of a token (milliseconds)", times), Panel("memory beyond the model (MiB)", memory)]
    settings = result["settings"]
    title = (
        f"generation, {settings['layers']} layers of width {settings['width']}, {settings['rows']} row(s), "
        f"{settings['dtype']}, {machine_name(result['machine'])}"
    )
    plot_panels(panels, title, path, peers=PEERS)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line, with the longest context and the tokens added to it at most."""
    lengths = [1024, 2048, 4096, 8192, 16384]
    sizes = {"rows": 1, "layers": 4, "width": 768, "heads": 12, "vocab_size": 50257, "rounds": 20}
    parser = measuring.make_parser(__doc__, lengths=lengths, **sizes)
    measuring.add_dtype(parser)
    options = parser.parse_args(arguments)
    options.lengths = sorted(set(options.lengths))
    options.longest = options.lengths[-1]
    options.room = WARM_UP + (1 + GENERATE_ROUNDS) * options.rounds + 2
    return options


def run(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Measure everything."""
    torch.set_num_threads(options.threads)
    memory = measuring.measure_memory(step_memory, dict.fromkeys(options.lengths, NAMES), options)
    models = {name: build(name, options) for name in (*OWN, DYNAMIC)}
    models[STATIC] = models[DYNAMIC]
    states = {}
    for name, model in models.items():
        progress(f"context: {name}")
        states[name] = make_states(name, model, options)
    sizes = {length: {name: state_bytes(states[name][length]) for name in NAMES} for length in options.lengths}
    steps = {
        length: {name: make_step(models[name], states[name][length], length, options) for name in NAMES}
        for length in options.lengths
    }
    times = measure_time(steps, options.rounds, options.device)
    shortest = options.lengths[0]
    result = {
        **describe_run(__file__, arguments, options.device),
        "protocol": PROTOCOL,
        "settings": {name: getattr(options, name) for name in SETTINGS},
        "peers": list(PEERS),
        "models": {name: {"parameters": model.num_parameters()} for name, model in models.items()},
        "growth": measuring.growth(times, GROWTH_LENGTHS),
        "generate": measure_generate(models, steps[shortest], shortest, options, options.rounds),
        "lengths": [describe_length(n, times[n], sizes[n], memory[n]) for n in options.lengths],
    }
    return {**result, "floors": check(result)}


def main(arguments: Sequence[str]) -> int:
    """Measure, print and write; 1 if floors are checked and one is missed, 2 after a mistake in the command."""

    def script() -> int:
        options = parse(arguments)
        measuring.require_device(options.device)
        subject = f"generation-{options.layers}-layer" + ("" if options.rows == 1 else f"-{options.rows}-rows")
        return measuring.publish(options, subject, run(options, arguments), markdown, plot)

    return run_script(script)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
