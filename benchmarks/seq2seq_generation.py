"""Time per token and memory of translation against the length of the source, beside BART with its KV cache.

    python benchmarks/seq2seq_generation.py --check-floors

The timed calls are those of `generate`: reading the source up to the first token, and then one token. The models have
the same size and random weights. See docs/speed.md for the protocol.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measuring
import torch
from floors import compare
from generation import random_tokens
from plots import Panel, machine_name, plot_panels
from transformers import BartConfig, BartForConditionalGeneration, DynamicCache, EncoderDecoderCache, PreTrainedModel

from luna_hf import FAMILIES, MemoryCache
from luna_hf.scripting import describe_run, markdown_table, progress, run_script

PROTOCOL = (
    "Encoder-decoders with random weights, as many layers in the decoder as in the encoder. Source: the encoder, and "
    "the decoder's forward of the start token. Token: the decoder's forward of one more token with its cache, as in "
    "generate. Every round times both for every model at every length, in an order that rotates from round to round, "
    "the token as the median of 5; ratios are taken within a round, medians over rounds. bart: sdpa, DynamicCache. "
    "State: bytes of the tensors that a decoding step needs; bart's are the keys and values of the source. The "
    "encoder's states, which generate keeps for bart, are not counted."
)
SETTINGS = ("layers", "width", "heads", "vocab_size", "slots", "rows", "dtype", "device", "threads", "rounds")
PEER = "bart"
NAMES = (*FAMILIES, PEER)
CALLS = ("source", "token")
TOKENS = 5  # of each round

# Floors, for the sizes of BASE on one CPU thread in float32.
BASE = {"layers": 4, "width": 768, "heads": 12, "vocab_size": 32000, "threads": 1, "device": "cpu", "dtype": "float32"}
GROWTH_LENGTHS, GROWTH = (128, 8192), 1.1
# Of a token after the longest source. A step reads the weights of the decoder and the output layer, 230 MB, and bart's
# another 201 MB of keys and values: no model of this size can be twice as fast.
SPEED = 1.2

Times = dict[int, dict[str, dict[str, list[float]]]]  # length, model, call: seconds of every round


def build(name: str, setting: argparse.Namespace) -> PreTrainedModel:
    """A randomly initialised encoder-decoder in eval mode, without dropout."""
    torch.manual_seed(0)
    if name == PEER:
        sizes = {"layers": setting.layers, "attention_heads": setting.heads, "ffn_dim": 4 * setting.width}
        config = BartConfig(
            vocab_size=setting.vocab_size,
            d_model=setting.width,
            max_position_embeddings=max(setting.lengths),
            dropout=0.0,
            **{f"{part}_{size}": value for part in ("encoder", "decoder") for size, value in sizes.items()},
        )
        model = BartForConditionalGeneration(config)
    else:
        config = FAMILIES[name].config(
            vocab_size=setting.vocab_size,
            hidden_size=setting.width,
            num_hidden_layers=setting.layers,
            decoder_layers=setting.layers,
            num_attention_heads=setting.heads,
            intermediate_size=4 * setting.width,
            position_embedding_type="sinusoidal",
            max_position_embeddings=max(setting.lengths),
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            is_encoder_decoder=True,
            **measuring.slots_of(name, setting.slots),
        )
        model = FAMILIES[name].seq2seq_lm(config)
    return model.to(device=setting.device, dtype=getattr(torch, setting.dtype)).eval()


@torch.no_grad()
def read_source(name: str, model: PreTrainedModel, length: int, setting: argparse.Namespace) -> dict[str, Any]:
    """Read a source and the start token; return what the next steps need."""
    source, start = random_tokens(length, setting), random_tokens(1, setting)
    mask = torch.ones_like(source)
    if name == PEER:
        state = {"encoder_outputs": model.get_encoder()(source, attention_mask=mask), "attention_mask": mask}
        state["cache"] = EncoderDecoderCache(DynamicCache(), DynamicCache())
        model(decoder_input_ids=start, use_cache=True, **state)
        return state
    cache = MemoryCache(model.config)
    model(source, attention_mask=mask, decoder_input_ids=start, cache=cache, use_cache=True)
    return {"cache": cache}


@torch.no_grad()
def next_token(model: PreTrainedModel, state: dict[str, Any], setting: argparse.Namespace) -> None:
    """One decoding step."""
    model(decoder_input_ids=random_tokens(1, setting), use_cache=True, **state)


def state_bytes(cache: MemoryCache | EncoderDecoderCache) -> int:
    """Size of all tensors in a cache."""
    if isinstance(cache, MemoryCache):
        return cache.nbytes
    layers = (*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers)
    return sum(states.nbytes for layer in layers for states in (layer.keys, layer.values))


def measure(models: dict[str, PreTrainedModel], setting: argparse.Namespace) -> tuple[Times, dict[int, dict[str, int]]]:
    """Seconds of both calls in every round, and the bytes of the states."""
    times: Times = {length: {name: {call: [] for call in CALLS} for name in NAMES} for length in setting.lengths}
    sizes: dict[int, dict[str, int]] = {length: {} for length in setting.lengths}
    for turn in range(setting.rounds + 1):  # the first warms up
        for name in measuring.rotated(NAMES, turn):
            for length in setting.lengths:
                state: dict[str, Any] = {}

                def read(name: str = name, length: int = length, state: dict[str, Any] = state) -> None:
                    state |= read_source(name, models[name], length, setting)

                def step(name: str = name, state: dict[str, Any] = state) -> None:
                    next_token(models[name], state, setting)

                source = measuring.seconds(read, setting.device)
                sizes[length][name] = state_bytes(state["cache"])
                steps = sorted(measuring.seconds(step, setting.device) for _ in range(TOKENS))
                if turn:
                    times[length][name]["source"].append(source)
                    times[length][name]["token"].append(steps[TOKENS // 2])
        progress(f"round {turn} of {setting.rounds}" if turn else "warmed up")
    return times, sizes


def describe_length(length: int, times: dict[str, dict[str, list[float]]], sizes: dict[str, int]) -> dict[str, Any]:
    """One entry of the result's `lengths`."""
    models: dict[str, dict[str, Any]] = {}
    for name, taken in times.items():
        models[name] = {"state_bytes": sizes[name]}
        models[name] |= {call: measuring.summary(seconds) for call, seconds in taken.items()}
        if name != PEER:
            models[name]["speed_over"] = {PEER: measuring.compare(times[PEER], taken)}
    return {"length": length, "models": models}


def check(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Every floor that applies to a run."""
    settings, checks = result["settings"], []
    own = [name for name in result["models"] if name not in result["peers"]]
    for name in own:
        # A source shorter than the number of slots fills only some of Luna's.
        rows = [row for row in result["lengths"] if row["length"] >= settings["slots"]]
        sizes = [row["models"][name]["state_bytes"] for row in rows]
        checks.append(compare("largest state over the smallest", name, max(sizes) / min(sizes), 1.0))
    if any(settings[name] != value for name, value in BASE.items()) or not result["growth"]:
        return checks
    short, long = GROWTH_LENGTHS
    last = result["lengths"][-1]["models"]
    for name in own:
        ratio = result["growth"][name]["token"]["median"]
        checks.append(compare(f"time of a token after {long} over {short}", name, ratio, GROWTH))
        speed = last[name]["speed_over"][PEER]["token"]["median"]
        checks.append(compare(f"speed over {PEER} of a token after {long}", name, speed, SPEED, at_least=True))
    return checks


def markdown(result: dict[str, Any]) -> str:
    """A row for every length and model."""
    rows = []
    for row in result["lengths"]:
        for name, model in row["models"].items():
            over = model.get("speed_over", {}).get(PEER)
            speeds = [f"{over[call]['median']:.2f}" if over else "-" for call in CALLS]
            cells = [f"{row['length']:,}", name, f"{model['source']['median']:.3f}", speeds[0]]
            cells += [f"{1e3 * model['token']['median']:.1f}", speeds[1], f"{model['state_bytes'] / 2**20:.1f}"]
            rows.append(cells)
    over = f"speed over {PEER}"
    header = ["source tokens", "model", "source, seconds", over, "token, ms", over, "state, MiB"]
    lines = [markdown_table(header, rows)]
    if result["growth"]:
        short, long = GROWTH_LENGTHS
        ratios = ", ".join(f"{name} {values['token']['median']:.2f}" for name, values in result["growth"].items())
        lines.append(f"Time of a token after {long:,} source tokens relative to {short:,}: {ratios}.")
    return "\n\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Time of a token and state against the length of the source."""
    rows = {row["length"]: row["models"] for row in result["lengths"]}
    times = {name: {n: 1e3 * row[name]["token"]["median"] for n, row in rows.items()} for name in NAMES}
    sizes = {name: {n: row[name]["state_bytes"] / 2**20 for n, row in rows.items()} for name in NAMES}
    settings = result["settings"]
    title = (
        f"encoder-decoders, {settings['layers']} and {settings['layers']} layers of width {settings['width']}, "
        f"{settings['dtype']}, {machine_name(result['machine'])}"
    )
    panels = [Panel("time of a token (milliseconds)", times), Panel("state (MiB)", sizes)]
    plot_panels(panels, title, path, peers=[PEER])


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    sizes = {"rows": 1, "layers": 4, "width": 768, "heads": 12, "vocab_size": 32000, "slots": 64, "rounds": 7}
    parser = measuring.make_parser(__doc__, lengths=[128, 512, 2048, 8192], **sizes)
    measuring.add_dtype(parser)
    options = parser.parse_args(arguments)
    options.lengths = sorted(set(options.lengths))
    return options


def run(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Measure everything."""
    torch.set_num_threads(options.threads)
    models = {name: build(name, options) for name in NAMES}
    times, sizes = measure(models, options)
    result = {
        **describe_run(__file__, arguments, options.device),
        "protocol": PROTOCOL,
        "settings": {name: getattr(options, name) for name in SETTINGS},
        "peers": [PEER],
        "models": {name: {"parameters": model.num_parameters()} for name, model in models.items()},
        "growth": measuring.growth(times, GROWTH_LENGTHS),
        "lengths": [describe_length(n, times[n], sizes[n]) for n in options.lengths],
    }
    return {**result, "floors": check(result)}


def main(arguments: Sequence[str]) -> int:
    """Measure, print and write; 1 if floors are checked and one is missed, 2 after a mistake in the command."""

    def script() -> int:
        options = parse(arguments)
        measuring.require_device(options.device)
        subject = f"seq2seq_generation-{options.layers}-layer" + ("" if options.rows == 1 else f"-{options.rows}-rows")
        return measuring.publish(options, subject, run(options, arguments), markdown, plot)

    return run_script(script)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
