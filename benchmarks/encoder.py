"""Speed and memory of the encoders of this package against transformers' RobertaModel and ModernBertModel.

    python benchmarks/encoder.py --lengths 512 2048 4096 8192 16384 --layers 1 --check-floors

One interleaved run: every round times every model once at every length, the order of the models turning from round to
round, and what is reported are medians over the rounds of the ratios within a round. A machine that slows down for a
minute thereby slows all models. See benchmarks/README.md for the protocol and the commands of the published results.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import floors
import torch
from contenders import (
    MODEL_SETS,
    PEERS,
    WARM_UP_LENGTH,
    Setting,
    build,
    contender_names,
    make_action,
    make_batch,
    peak_memory,
)
from measuring import (
    RESULTS,
    growth_exponent,
    header,
    in_own_process,
    progress,
    ratios,
    result_path,
    rotated,
    seconds,
    summary,
    win_length,
    write_json,
)
from plots import plot
from torch import Tensor, nn

PROTOCOL = (
    "Time: wall clock of one call per model, length and round, models interleaved inside a round and their order "
    "rotated from round to round; ratios are taken within a round, medians over rounds. Memory: peak resident size "
    "(on an accelerator: peak allocated) of one call minus the size before it, each model and length in its own "
    "process, after building the model and one call on a tiny input, with freed blocks of 1 MiB and more going back to "
    "the system. Random weights, random tokens, dropout 0 for all "
    "models, attention through sdpa (roberta-eager: products and softmax one after the other). "
    "forward: eval, no gradients, base models without pooler, vocabulary of 1000. "
    "mlm_step: forward, backward and fused AdamW of the masked-LM models, vocabulary of 50265, 15 % of the positions "
    "labelled; the models of this package and ModernBERT apply the head only there (sparse_prediction), RoBERTa has "
    "no such option."
)
DIFFERENCES = (
    "Same width, heads, layers and positions for all. ModernBERT differs in kind: gated feed-forward (three matrices "
    "instead of two, so 1.5 times the weights at the same intermediate size), pre-norm, no biases, rotary positions, "
    "full attention in every third layer beginning with the first and windows of 128 in the others; its sdpa path "
    "computes windows as a masked full attention."
)

Times = dict[int, dict[str, dict[str, list[float]]]]  # length, model, "unpadded" or "padded": seconds of every round


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["forward", "mlm_step"], default="forward")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 4096, 8192, 16384])
    parser.add_argument("--tokens-per-batch", type=int, default=4096, help="rows = max(1, tokens / length)")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--slots", type=int, default=128, help="of models whose names do not say theirs")
    parser.add_argument(
        "--models",
        nargs="+",
        default=["standard"],
        metavar="MODEL",
        help=f"models, or a set of them ({', '.join(MODEL_SETS)}), beside roberta; the set names the file",
    )
    parser.add_argument(
        "--modernbert-intermediate",
        type=int,
        help="inner width of ModernBERT's gated feed-forward; default 4 * width, as the others (8/3 * width: as many "
        "weights as the others)",
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--padding",
        action="store_true",
        help="also time a batch (of 2 rows at least) in which half of the rows lack a quarter of their tokens",
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the JSON file and the plot")
    parser.add_argument("--check-floors", action="store_true", help="compare with floors.py; exit 1 if one is missed")
    options = parser.parse_args(arguments)
    try:
        options.names = contender_names(options.models)
    except ValueError as error:
        parser.error(str(error))
    return options


def make_setting(options: argparse.Namespace) -> Setting:
    """What the models need of the command line."""
    return Setting(
        mode=options.mode,
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        modernbert_intermediate=options.modernbert_intermediate or 4 * options.width,
        slots=options.slots,
        max_length=max(options.lengths),
        dtype=options.dtype,
        device=options.device,
        threads=options.threads,
    )


def rows_for(length: int, options: argparse.Namespace) -> int:
    """Rows of a batch; a padded one is compared with an unpadded one of the same shape and needs two."""
    return max(2 if options.padding else 1, options.tokens_per_batch // length)


def measure_memory(setting: Setting, options: argparse.Namespace) -> dict[int, dict[str, int]]:
    """Peak bytes of every length and model."""
    memory: dict[int, dict[str, int]] = {}
    for length in options.lengths:
        memory[length] = {}
        for name in options.names:
            progress(f"memory: length {length}, {name}")
            memory[length][name] = in_own_process(peak_memory, name, setting, rows_for(length, options), length)
    return memory


def measure_time(models: dict[str, nn.Module], setting: Setting, options: argparse.Namespace) -> Times:
    """Seconds of every call of the interleaved run."""
    actions = {name: make_action(model, setting) for name, model in models.items()}
    kinds = ["unpadded", "padded"] if options.padding else ["unpadded"]
    # On an accelerator the first call of a shape chooses kernels; on a CPU it would only cost time.
    for length in [WARM_UP_LENGTH] if setting.device == "cpu" else options.lengths:
        for action in actions.values():
            action(make_batch(setting, 1, min(length, setting.max_length)))
    times: Times = {n: {name: {kind: [] for kind in kinds} for name in models} for n in options.lengths}
    for turn in range(options.rounds):
        for length in options.lengths:
            batches = {kind: make_batch(setting, rows_for(length, options), length, kind == "padded") for kind in kinds}
            one_round(actions, batches, turn, setting.device, times[length])
            took = ", ".join(f"{name} {times[length][name]['unpadded'][-1]:.3g} s" for name in models)
            progress(f"round {turn + 1} of {options.rounds}, length {length}: {took}")
    return times


def one_round(
    actions: dict[str, Callable[[dict[str, Tensor]], None]],
    batches: dict[str, dict[str, Tensor]],
    turn: int,
    device: str,
    times: dict[str, dict[str, list[float]]],
) -> None:
    """Time every model once on every batch, beginning with another model (and the other batch) each round."""
    kinds = list(batches)
    for name in rotated(list(actions), turn):
        for kind in kinds if turn % 2 == 0 else kinds[::-1]:
            times[name][kind].append(seconds(lambda name=name, kind=kind: actions[name](batches[kind]), device))


def describe_length(
    length: int, rows: int, times: dict[str, dict[str, list[float]]], memory: dict[str, int]
) -> dict[str, Any]:
    """One entry of the result's `lengths`: time, throughput, memory and ratios of every model."""
    models = {}
    for name, kinds in times.items():
        taken = summary(kinds["unpadded"])
        models[name] = {
            "seconds": taken,
            "tokens_per_second": rows * length / taken["median"],
            "peak_memory_bytes": memory[name],
        }
        if name not in PEERS:
            models[name]["speed_over"] = {
                peer: summary(ratios(times[peer]["unpadded"], kinds["unpadded"])) for peer in PEERS if peer in times
            }
        if "padded" in kinds:
            models[name]["padded_over_unpadded"] = summary(ratios(kinds["padded"], kinds["unpadded"]))
    return {"length": length, "rows": rows, "models": models}


def describe_growth(lengths: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Exponent of the time of one row against its length within `floors.GROWTH_RANGE`, fitted round by round."""
    low, high = floors.GROWTH_RANGE
    inside = [row for row in lengths if low <= row["length"] <= high]
    if len(inside) < 2:
        return None
    exponents = {}
    for name in inside[0]["models"]:
        rounds = zip(*(row["models"][name]["seconds"]["rounds"] for row in inside), strict=True)
        fits = [
            growth_exponent({row["length"]: taken / row["rows"] for row, taken in zip(inside, times, strict=True)})
            for times in rounds
        ]
        exponents[name] = summary(fits)
    measured = [row["length"] for row in inside]
    return {"range": [min(measured), max(measured)], "exponents": exponents}


def describe_wins(lengths: list[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """For every own model and peer the length from which it is faster, or `None`."""
    return {
        name: {
            peer: win_length({row["length"]: row["models"][name]["speed_over"][peer]["median"] for row in lengths})
            for peer in model["speed_over"]
        }
        for name, model in lengths[0]["models"].items()
        if "speed_over" in model
    }


def table(result: dict[str, Any]) -> str:
    """The result as aligned text."""
    columns = {peer: max(13, len(peer) + 2) for peer in result["peers"]}
    lines = [
        f"{'length':>7} {'model':<23} {'tokens/s':>9} {'memory MiB':>11}"
        + "".join(f" {'x ' + peer:>{width}}" for peer, width in columns.items())
        + f" {'(min-max)':>13} {'padded':>7}"
    ]
    for row in result["lengths"]:
        for name, model in row["models"].items():
            line = f"{row['length']:>7} {name:<23} {model['tokens_per_second']:>9.0f}"
            line += f" {model['peak_memory_bytes'] / 2**20:>11.1f}"
            over = model.get("speed_over")
            for peer, width in columns.items():
                line += f" {over[peer]['median']:>{width}.2f}" if over else " " * (width + 1)
            spread = f"({over['roberta']['min']:.2f}-{over['roberta']['max']:.2f})" if over else ""
            line += f" {spread:>13}"
            if padding := model.get("padded_over_unpadded"):
                line += f" {padding['median']:>7.3f}"
            lines.append(line.rstrip())
    return "\n".join(lines)


def conclusions(result: dict[str, Any]) -> str:
    """Win lengths and growth exponents in words."""
    shortest = min(row["length"] for row in result["lengths"])
    lines = []
    for name, wins in result["wins"].items():
        for peer, length in wins.items():
            if length is None:
                said = "not faster at the longest length measured"
            elif length == shortest:
                said = f"faster from {shortest} tokens on, the shortest length measured"
            else:
                said = f"faster from {length:.0f} tokens on (interpolated)"
            lines.append(f"{name} against {peer}: {said}")
    if growth := result["growth"]:
        fitted = ", ".join(f"{name} {fit['median']:.3f}" for name, fit in growth["exponents"].items())
        lines.append(f"growth exponent of one row's time, {growth['range'][0]} to {growth['range'][1]}: {fitted}")
    return "\n".join(lines)


def subject(options: argparse.Namespace) -> str:
    """First part of the file name: what was measured."""
    chosen = options.models[0] if len(options.models) == 1 and options.models[0] in MODEL_SETS else "chosen"
    suffix = "" if chosen == "standard" else f"-{chosen}"
    return f"encoder-{options.mode}-{options.layers}-layer" + ("-padding" if options.padding else "") + suffix


def run(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Measure everything that the options ask for."""
    options.lengths = sorted(set(options.lengths))
    torch.set_num_threads(options.threads)
    setting = make_setting(options)
    # First, while this process is small: at 12 layers the models of the timed run take gigabytes together.
    memory = measure_memory(setting, options)
    models = {name: build(name, setting) for name in options.names}
    times = measure_time(models, setting, options)
    lengths = [describe_length(n, rows_for(n, options), times[n], memory[n]) for n in options.lengths]
    result = {
        **header(__file__, arguments, setting.device),
        "protocol": PROTOCOL,
        "differences": DIFFERENCES,
        "settings": {**vars(setting), "tokens_per_batch": options.tokens_per_batch, "rounds": options.rounds},
        "peers": [name for name in models if name in PEERS],
        "models": {name: {"parameters": model.num_parameters()} for name, model in models.items()},
        "wins": describe_wins(lengths),
        "growth": describe_growth(lengths),
        "lengths": lengths,
    }
    result["floors"] = floors.check(result)
    return result


def main(arguments: Sequence[str]) -> int:
    """Measure, print, write; 1 if a floor was to be checked and is missed."""
    options = parse(arguments)
    result = run(options, arguments)
    path = result_path(options.output, subject(options), options.device, options.dtype)
    write_json(path, result)
    print(table(result), conclusions(result), sep="\n\n")
    if len(options.lengths) > 1:
        plot(result, path.with_suffix(".png"))
    if options.check_floors:
        print("", floors.table(result["floors"]), sep="\n")
        return int(not all(check["holds"] for check in result["floors"]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
