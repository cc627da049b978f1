"""The table of docs/speed.md that says what to choose when, from the results of the tables below it."""

from collections.abc import Sequence
from typing import Any

from docs_sources import load

from luna_hf.scripting import markdown_table

FORWARD, FEW = "encoder-forward-3-layer-luna-cpu-float32", "encoder-forward-1-layer-few-cpu-float32"
FEW_BFLOAT16, SHORT = "encoder-forward-1-layer-few-cpu-bfloat16", "encoder-forward-1-layer-short-cpu-float32"
CLASS_STEP = "encoder-class_step-base-chosen-cpu-float32"
CHECKPOINTED = "encoder-class_step-base-checkpointing-chosen-cpu-float32"
SERVING, DEPLOYMENT = "serving-cpu-float32", "deployment-cpu-float32"
EIGHT_BIT_WEIGHTS = "export.md#8-bit-weights"


def choices() -> str:
    """A row for every use: what to choose, and what that gains."""
    rows = [
        ["variable-length inputs", "any family; nothing to set", _serving()],
        ["64 to 256 tokens, all alike", "`tokens_per_slot=8`", _speeds(SHORT, "luna-tied-per-8", (64, 128, 256))],
        ["512 tokens and more", "16 slots, if the task allows", _speeds(FEW, "luna-16", (512, 2048, 16384))],
        ["the same with 128 slots", "nothing to set", _speeds(FORWARD, "luna-tied", (512, 2048, 8192))],
        [
            "a CPU with bfloat16 instructions",
            'bfloat16 (`dtype="bfloat16"`), 16 slots',
            _speeds(FEW_BFLOAT16, "luna-16", (512, 2048, 16384)),
        ],
        ["finetuning at the limit of memory", "gradient checkpointing", _memory()],
        ["one text at a time, short", f"[ONNX Runtime, int8]({EIGHT_BIT_WEIGHTS})", _deployed("onnx-int8", 32)],
        [
            "one text at a time, long",
            f"[torchao's int8, compiled]({EIGHT_BIT_WEIGHTS})",
            _deployed("torchao-int8", 512),
        ],
    ]
    return markdown_table(["inputs", "choose", "gain"], rows)


def _entry(name: str, **keys: Any) -> dict[str, Any]:
    """The models of the one entry of a result that has these values."""
    (found,) = (row for row in load(name)["lengths"] if all(row[key] == value for key, value in keys.items()))
    return found["models"]


def _listed(values: Sequence[str]) -> str:
    return f"{', '.join(values[:-1])} and {values[-1]}"


def _speeds(name: str, model: str, lengths: Sequence[int]) -> str:
    ratios = [_entry(name, length=length)[model]["speed_over"]["roberta"]["median"] for length in lengths]
    figures, tokens = _listed([f"{ratio:.2f}" for ratio in ratios]), _listed([f"{length:,}" for length in lengths])
    return f"{figures} times RoBERTa's speed at {tokens} tokens"


def _serving() -> str:
    mixes = {"sst2": "SST-2", "mrpc": "MRPC", "imdb": "IMDB"}
    speeds = [_entry(SERVING, call="pipeline", mix=mix)["luna-tied"]["speed_over_roberta"]["median"] for mix in mixes]
    figures = _listed([f"{speed:.1f}" for speed in speeds])
    return f"{figures} times RoBERTa's speed in a `pipeline` with the lengths of {_listed(list(mixes.values()))}"


def _memory() -> str:
    plain, checkpointed = (_entry(name, length=4096) for name in (CLASS_STEP, CHECKPOINTED))
    whole = plain["roberta"]["peak_memory_bytes"]
    shares = [models["luna-tied"]["peak_memory_bytes"] / whole for models in (plain, checkpointed)]
    return (
        f"{shares[1]:.0%} of the memory that a step of RoBERTa takes without it at 4,096 tokens; Luna without it takes "
        f"{shares[0]:.0%}"
    )


def _deployed(way: str, length: int) -> str:
    ratios = [ways[way]["speed_over_pytorch"]["median"] for ways in _entry(DEPLOYMENT, length=length).values()]
    return (
        f"{min(ratios):.1f} to {max(ratios):.1f} times the speed of the same small model in PyTorch at {length} tokens"
    )
