"""Speed, memory and precision of the causal scan and of the families' causal attentions.

    python benchmarks/causal.py --check-floors

The contenders: `causal_scan` alone, the core of Luna's causal attention (its pack weights given) and that of causal ABC
(its slot logits given), these operators written with cumulative sums of outer products, LeaPformer's and LAVO's
attention after their projections, and softmax attention through `scaled_dot_product_attention(is_causal=True)`. See
docs/speed.md for the protocol.
"""

import argparse
import copy
import math
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import measuring
import torch
from floors import compare
from plots import Panel, machine_name, plot_panels
from torch import Tensor, nn
from torch.nn import functional as F

from luna_hf import LavoConfig, LeapformerConfig
from luna_hf.families.lavo.attention import LavoCausalAttention, mean_of_parts
from luna_hf.families.leapformer.attention import FLOOR, LeapformerCausalAttention
from luna_hf.ops.causal_memory import attend_causal_memory
from luna_hf.ops.context import make_context
from luna_hf.ops.scan import causal_scan
from luna_hf.scripting import describe_run, markdown_table, progress, run_script

PROTOCOL = (
    "One sequence, random normal queries, keys and values; Luna's pack weights are softplus of normal numbers, ABC's "
    "slot logits normal numbers of deviation 1; LeaPformer includes the network of its proportions, and LAVO's window "
    "has as many tokens as it has slots. forward: no gradients; backward: forward, and backward to all inputs. Time: "
    "wall clock; every round times every contender at every length, in an order that rotates from round to round; a "
    "call of less than five seconds is made three times and the median taken; ratios are taken within a round, medians "
    "over rounds. The process keeps freed memory for the next call. Memory: peak resident size of one call minus the "
    "size before it, each contender, length and mode in its own process, where freed blocks of 1 MiB and more go back "
    "to the system. Error: root mean square of the difference to a token-by-token recurrence in float64, relative to "
    "that of its outputs."
)

FORWARD, BACKWARD = "forward", "backward"
MODES = (FORWARD, BACKWARD)
OUTER = {name: f"{name}-outer" for name in ("scan", "luna", "abc")}  # the same by cumulative sums of outer products
OWN = (*OUTER, "leapformer", "lavo")
SDPA = "sdpa"
PEERS = (*OUTER.values(), SDPA)
OUTER_LENGTH = 2048  # at most, since these hold n p r numbers, and their gradients as many again
ABC_SCALES = (1, 8, 30, 100, 300)
SHORT_CALL, REPEATS = 5.0, 3

# Floors; they hold for the sizes of BASE on one CPU thread in float32.
BASE = {"heads": 12, "size": 64, "slots": 64, "threads": 1, "device": "cpu", "dtype": "float32"}
OVER_OUTER = {2048: {FORWARD: 20.0, BACKWARD: 15.0}}
OVER_SDPA = {8192: {name: {FORWARD: 8.0, BACKWARD: 6.0 if name in OUTER else 8.0} for name in OWN}}
MEMORY_LENGTH, MEMORY = 8192, 1.5  # with backward, relative to sdpa, of the scans from that length
# LeaPformer's and LAVO's gradients outgrow the caches: they keep three to four times the memory of the scans.
GROWTH_LENGTHS, GROWTH, OTHER_GROWTH = (8192, 16384), 2.1, 2.5
ERROR = 1e-6

Times = dict[int, dict[str, dict[str, list[float]]]]  # length, contender, mode: seconds of every round


# ---- contenders: (query, key, value, weights), each (1, h, n, size or slots), to outputs (1, h, n, size) ----


def scan(query: Tensor, key: Tensor, value: Tensor, weights: Tensor) -> Tensor:
    """The operator alone."""
    return causal_scan(query, key, value)[0]


def luna(query: Tensor, key: Tensor, value: Tensor, weights: Tensor) -> Tensor:
    """Luna's causal attention after its projections and pack weights."""
    return attend_causal_memory(query, key, value, weights, "steps", steps=_steps(query)[:, 0, :, 0])[0]


def abc(query: Tensor, key: Tensor, value: Tensor, weights: Tensor) -> Tensor:
    """Causal ABC after its projections and slot logits."""
    return attend_causal_memory(query, key, value, weights, "softmax")[0]


@cache
def make_module(name: str, heads: int, size: int, slots: int) -> nn.Module:
    """LeaPformer's or LAVO's attention with random parameters, in eval mode."""
    shape = {"hidden_size": heads * size, "num_attention_heads": heads, "is_decoder": True}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == "leapformer":
            return LeapformerCausalAttention(LeapformerConfig(**shape)).eval().requires_grad_(False)
        config = LavoConfig(**shape, num_bases=slots, local_window=slots, attn_implementation="sdpa")
        module = LavoCausalAttention(config).eval().requires_grad_(False)
        module.initialise(config)
        module.position_bias.normal_()
    return module


def _module_for(name: str, query: Tensor, weights: Tensor) -> nn.Module:
    return make_module(name, query.shape[1], query.shape[3], weights.shape[3]).to(query)


def leapformer(query: Tensor, key: Tensor, value: Tensor, weights: Tensor) -> Tensor:
    """LeaPformer's causal attention after its projections, with learned proportions."""
    context = make_context(None, query.shape[2], query.device)
    return _module_for("leapformer", query, weights).attend(query, key, value, context)


def lavo(query: Tensor, key: Tensor, value: Tensor, weights: Tensor) -> Tensor:
    """LAVO's causal attention after its projections: slots, and a window of as many tokens."""
    context = make_context(None, query.shape[2], query.device, window=weights.shape[3])
    output, _ = mean_of_parts(_module_for("lavo", query, weights).attend(query, key, value, context))
    return output.unflatten(-1, (query.shape[1], query.shape[3])).transpose(1, 2)


def outer_scan(query: Tensor, key: Tensor, value: Tensor, weights: Tensor | None = None) -> Tensor:
    """The running sum of outer products in full: n p r numbers for each head."""
    sums = (key.unsqueeze(-1) * value.unsqueeze(-2)).cumsum(2)
    return torch.matmul(query.unsqueeze(-2), sums).squeeze(-2)


def outer_luna(query: Tensor, key: Tensor, value: Tensor, weights: Tensor) -> Tensor:
    """Luna's causal attention by `outer_scan`."""
    steps = _steps(query)
    read = (outer_scan(query * query.shape[-1] ** -0.5, key, weights) / steps).softmax(-1)
    return outer_scan(read / steps, weights, value)


def outer_abc(query: Tensor, key: Tensor, value: Tensor, weights: Tensor) -> Tensor:
    """Causal ABC by `outer_scan` with one maximum for all tokens, for logits near each other."""
    weights = (weights - weights.amax(2, keepdim=True)).exp()
    totals = weights.cumsum(2)
    read = (outer_scan(query * query.shape[-1] ** -0.5, key, weights) / totals).softmax(-1)
    return outer_scan(read / totals, weights, value)


def sdpa(query: Tensor, key: Tensor, value: Tensor, weights: Tensor) -> Tensor:
    """Softmax attention over the prefix."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


CONTENDERS: dict[str, Callable[..., Tensor]] = {
    "scan": scan,
    "luna": luna,
    "abc": abc,
    "leapformer": leapformer,
    "lavo": lavo,
    "scan-outer": outer_scan,
    "luna-outer": outer_luna,
    "abc-outer": outer_abc,
    "sdpa": sdpa,
}


def _steps(query: Tensor) -> Tensor:
    return torch.arange(1, query.shape[2] + 1, device=query.device)[None, None, :, None]


def contenders_at(length: int) -> list[str]:
    """Contenders that fit in memory at a length."""
    return [name for name in CONTENDERS if length <= OUTER_LENGTH or name not in OUTER.values()]


def make_inputs(name: str, length: int, options: argparse.Namespace, scale: float = 1.0) -> list[Tensor]:
    """Query, key, value and the contender's weights; the same numbers for all contenders at a length."""
    generator = torch.Generator().manual_seed(length)
    sizes = (options.size, options.size, options.size, options.slots)
    query, key, value, weights = (
        torch.randn(1, options.heads, length, size, generator=generator).to(options.device) for size in sizes
    )
    return [query, key, value, F.softplus(weights) if name.startswith("luna") else weights * scale]


def make_action(name: str, length: int, mode: str, options: argparse.Namespace) -> Callable[[], None]:
    """The timed call."""
    attend, inputs = CONTENDERS[name], make_inputs(name, length, options)
    if mode == FORWARD:

        @torch.no_grad()
        def forward() -> None:
            attend(*inputs)

        return forward
    used = inputs if name.startswith(("luna", "abc")) else inputs[:3]
    for states in used:
        states.requires_grad_()
    gradient = torch.randn(1, options.heads, length, options.size).to(options.device)

    def forward_and_backward() -> None:
        torch.autograd.grad(attend(*inputs), used, gradient)

    return forward_and_backward


# ---- precision ----


def recurrence(name: str, query: Tensor, key: Tensor, value: Tensor, weights: Tensor) -> Tensor:
    """The outputs of a contender in `OWN`, computed token by token in float64."""
    query, key, value, weights = (states[0].double() for states in (query, key, value, weights))
    if name in ("leapformer", "lavo"):
        module = copy.deepcopy(make_module(name, query.shape[0], query.shape[2], weights.shape[2])).double()
        return (_recur_leapformer if name == "leapformer" else _recur_lavo)(module, query, key, value)
    if name == "scan":
        return _sum_outer(query, key, value)
    heads, length, slots = weights.shape
    scaling = query.shape[-1] ** -0.5
    written = query.new_zeros(heads, query.shape[-1], slots)
    values, total = query.new_zeros(heads, slots, value.shape[-1]), query.new_zeros(heads, 1, slots)
    peak = weights[:, :1]
    outputs = []
    for token in range(length):
        now = slice(token, token + 1)
        write = weights[:, now]
        if name == "abc":
            higher = torch.maximum(peak, write)
            growth, write, peak = (peak - higher).exp(), (write - higher).exp(), higher
            written, values, total = written * growth, values * growth.transpose(1, 2), total * growth
        total = total + (write if name == "abc" else 1.0)
        written, values = written + key[:, now].transpose(1, 2) @ write, values + write.transpose(1, 2) @ value[:, now]
        read = (scaling * query[:, now] @ written / total).softmax(-1)
        outputs.append(read / total @ values)
    return torch.cat(outputs, dim=1)


def _sum_outer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    state, outputs = 0.0, []
    for x, y, z in zip(query.split(1, 1), key.split(1, 1), value.split(1, 1), strict=True):
        state = state + y.transpose(1, 2) @ z
        outputs.append(x @ state)
    return torch.cat(outputs, dim=1)


def _recur_leapformer(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    def features(states: Tensor, proportion: nn.Module) -> Tensor:
        states = states.relu()
        part = proportion.outer(proportion.inner(states).relu()).sigmoid() * (math.pi / 2)
        return torch.cat([states * part.cos(), states * part.sin()], dim=-1)

    query, key = features(query, module.query_proportion), features(key, module.key_proportion)
    normaliser = _sum_outer(query, key, torch.ones_like(value[..., :1]))
    return _sum_outer(query, key, value) / normaliser.clamp(min=FLOOR)


def _recur_lavo(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    width, outputs, total = module.config.local_window, [], 0.0
    for token in range(query.shape[1]):
        first = max(token - width + 1, 0)
        asked, seen = query[:, token : token + 1], slice(first, token + 1)
        bias = module.position_bias[width - 1 - (token - first) : width]
        scores = asked @ key[:, seen].transpose(1, 2) * query.shape[-1] ** -0.5 + bias
        local = scores.softmax(-1) @ value[:, seen]
        total = total + local @ module.bases.transpose(1, 2)
        memory = module.bases * (total / (token + 1)).transpose(1, 2)
        outputs.append((local + (asked @ memory.transpose(1, 2)).softmax(-1) @ memory) / 2)
    return torch.cat(outputs, dim=1)


def relative_error(name: str, length: int, options: argparse.Namespace, scale: float = 1.0) -> float:
    """Root mean square of the error relative to that of the outputs; NaN if any output is NaN."""
    inputs = make_inputs(name, length, options, scale)
    with torch.no_grad():
        expected = recurrence(name, *inputs)
        difference = CONTENDERS[name](*inputs)[0].double() - expected
    return (difference.square().mean() / expected.square().mean()).sqrt().item()


def measure_errors(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Errors at every length, and at the shortest length for every scale of ABC's logits."""
    cases = [(name, length, 1) for length in options.lengths for name in OWN]
    cases += [("abc", options.lengths[0], scale) for scale in ABC_SCALES if scale != 1]
    errors = []
    for name, length, scale in cases:
        progress(f"error: length {length}, {name}, scale {scale}")
        error = relative_error(name, length, options, scale)
        errors.append({"contender": name, "length": length, "scale": scale, "relative_rms": error})
    return errors


# ---- time and memory ----


def peak_memory(mode: str, name: str, length: int, options: argparse.Namespace) -> int:
    """Peak bytes of one call beyond its inputs; run it in a separate process."""
    make_action(name, min(length, 64), mode, options)()
    return measuring.extra_memory(make_action(name, length, mode, options), options.device)


def measure_time(options: argparse.Namespace) -> Times:
    """Seconds of every round. A contender runs all its lengths in a row, since their ratio is a result too."""
    times: Times = {n: {name: {mode: [] for mode in MODES} for name in contenders_at(n)} for n in options.lengths}
    repeats: dict[tuple[str, int, str], int] = {}
    for turn in range(-1, options.rounds):  # the first warms up
        for name in measuring.rotated(list(CONTENDERS), turn):
            for mode in MODES:
                for length in (n for n in options.lengths if name in times[n]):
                    action = make_action(name, length, mode, options)
                    calls = repeats.get((name, length, mode), 1)
                    taken = median(measuring.seconds(action, options.device) for _ in range(calls))
                    if turn < 0:
                        repeats[name, length, mode] = REPEATS if taken < SHORT_CALL else 1
                    else:
                        times[length][name][mode].append(taken)
        progress(f"round {turn + 1} of {options.rounds}")
    return times


# ---- result ----


def describe_length(length: int, times: dict[str, dict[str, list[float]]], memory: dict[str, Any]) -> dict[str, Any]:
    """One entry of the result's `lengths`."""
    contenders: dict[str, Any] = {name: {} for name in times}
    for name, taken in times.items():
        rivals = [rival for rival in (OUTER.get(name), SDPA) if name in OWN and rival in times]
        for mode in MODES:
            peak = memory[mode][length][name]
            contenders[name][mode] = {"seconds": measuring.summary(taken[mode]), "peak_memory_bytes": peak}
            if rivals:
                over = {rival: measuring.compare(times[rival][mode], taken[mode]) for rival in rivals}
                contenders[name][mode]["speed_over"] = over
    return {"length": length, "contenders": contenders}


def check(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Every floor that applies to a run."""
    checks = []
    for error in result["errors"]:
        what = f"relative error at {error['length']}, logits of deviation {error['scale']}"
        checks.append(compare(what, error["contender"], error["relative_rms"], ERROR))
    if any(result["settings"][name] != value for name, value in BASE.items()):
        return checks
    for row in result["lengths"]:
        for name in OWN:
            for mode, measured in row["contenders"][name].items():
                rivals = {OUTER.get(name): OVER_OUTER, SDPA: {n: own[name] for n, own in OVER_SDPA.items()}}
                for rival, floors in rivals.items():
                    if rival and row["length"] in floors:
                        speed, floor = measured["speed_over"][rival]["median"], floors[row["length"]][mode]
                        what = f"{mode}, speed over {rival} at {row['length']}"
                        checks.append(compare(what, name, speed, floor, at_least=True))
        if row["length"] >= MEMORY_LENGTH:
            peaks = {name: modes[BACKWARD]["peak_memory_bytes"] for name, modes in row["contenders"].items()}
            what = f"backward, memory over sdpa at {row['length']}"
            checks += [compare(what, name, peaks[name] / peaks[SDPA], MEMORY) for name in OUTER]
    short, long = GROWTH_LENGTHS
    for name in OWN if result["growth"] else ():
        most = GROWTH if name in OUTER else OTHER_GROWTH
        for mode, growth in result["growth"][name].items():
            checks.append(compare(f"{mode}, time at {long} over {short}", name, growth["median"], most))
    return checks


def markdown(result: dict[str, Any]) -> str:
    """A table of milliseconds, ratios and memory; growth and errors in words."""
    rows = []
    for row in result["lengths"]:
        for name, modes in row["contenders"].items():
            cells = [f"{row['length']:,}", name]
            cells += [f"{1e3 * modes[mode]['seconds']['median']:,.1f}" for mode in MODES]
            for rival in (OUTER.get(name), SDPA):
                over = [modes[mode].get("speed_over", {}).get(rival) for mode in MODES]
                cells += [f"{ratio['median']:.1f}" if ratio else "-" for ratio in over]
            rows.append([*cells, *(f"{modes[mode]['peak_memory_bytes'] / 2**20:,.0f}" for mode in MODES)])
    titles = ("ms", "over outer products", "over sdpa", "MiB")
    second = ("ms with backward", "with backward", "with backward", "MiB with backward")
    header = ["length", "contender", *(title for pair in zip(titles, second, strict=True) for title in pair)]
    lines = [markdown_table(header, rows), ""]
    if result["growth"]:
        short, long = GROWTH_LENGTHS
        growth = [
            f"{name} {modes[FORWARD]['median']:.2f} ({modes[BACKWARD]['median']:.2f} with backward)"
            for name, modes in result["growth"].items()
        ]
        lines.append(f"* Time at {long:,} tokens relative to {short:,}: {', '.join(growth)}.")
    plain = [error for error in result["errors"] if error["scale"] == 1]
    largest = {name: max(e["relative_rms"] for e in plain if e["contender"] == name) for name in OWN}
    scaled = [f"{e['relative_rms']:.1e} ({e['scale']})" for e in result["errors"] if e["scale"] != 1]
    values = ", ".join(f"{name} {error:.1e}" for name, error in largest.items())
    lines.append(
        f"* Largest relative error at any length: {values}; abc with slot logits of a larger standard "
        f"deviation (in brackets): {', '.join(scaled)}."
    )
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Time per token and memory against length."""
    times: dict[str, dict[str, dict[int, float]]] = {mode: {} for mode in MODES}
    memory: dict[str, dict[int, float]] = {}
    for row in result["lengths"]:
        length = row["length"]
        for name, modes in row["contenders"].items():
            for mode in MODES:
                times[mode].setdefault(name, {})[length] = 1e6 * modes[mode]["seconds"]["median"] / length
            memory.setdefault(name, {})[length] = modes[BACKWARD]["peak_memory_bytes"] / 2**20
    panels = [
        Panel("forward, microseconds per token", times[FORWARD]),
        Panel("forward and backward, microseconds per token", times[BACKWARD]),
        Panel("peak memory with backward (MiB)", memory),
    ]
    settings = result["settings"]
    title = (
        f"causal attention, {settings['heads']} heads of {settings['size']}, {settings['slots']} slots, "
        f"{settings['dtype']}, {machine_name(result['machine'])}"
    )
    plot_panels(panels, title, path, peers=PEERS)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = measuring.make_parser(__doc__, lengths=[2048, 8192, 16384], heads=12, size=64, slots=64, rounds=5)
    options = parser.parse_args(arguments)
    options.lengths = sorted(set(options.lengths))
    return options


def run(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Measure everything."""
    torch.set_num_threads(options.threads)
    present = {length: contenders_at(length) for length in options.lengths}
    memory = {mode: measuring.measure_memory(partial(peak_memory, mode), present, options) for mode in MODES}
    errors = measure_errors(options)
    measuring.keeping_allocator()
    times = measure_time(options)
    settings = {name: getattr(options, name) for name in ("heads", "size", "slots", "threads", "device", "rounds")}
    result = {
        **describe_run(__file__, arguments, options.device),
        "protocol": PROTOCOL,
        "settings": {**settings, "dtype": "float32", "rows": 1},
        "peers": list(PEERS),
        "errors": errors,
        "growth": measuring.growth(times, GROWTH_LENGTHS),
        "lengths": [describe_length(n, times[n], memory) for n in options.lengths],
    }
    return {**result, "floors": check(result)}


def main(arguments: Sequence[str]) -> int:
    """Measure, print and write; 1 if floors are checked and one is missed, 2 after a mistake in the command."""

    def script() -> int:
        options = parse(arguments)
        measuring.require_device(options.device)
        return measuring.publish(options, "causal-attention", run(options, arguments), markdown, plot)

    return run_script(script)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
