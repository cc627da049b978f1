"""Floors of the encoders, as data, and their comparison with a result; all benchmarks share `compare` and `table`."""

from typing import Any

# Speed relative to RobertaModel by (mode, dtype, layers or None for any number), model and length.
# They hold for base width, 128 slots of Luna (luna-16: 16) and one CPU thread, and leave room for a noisy machine.
SPEED: dict[tuple[str, str, int | str | None], dict[str, dict[int, float]]] = {
    ("forward", "float32", None): {
        "luna-untied": {512: 0.97, 2048: 1.28, 4096: 1.75, 8192: 2.5, 16384: 4.0},
        "luna-tied": {512: 1.07, 2048: 1.40, 4096: 1.88, 8192: 2.65, 16384: 4.4},
        **{name: {64: 0.95, 128: 0.95} for name in ("luna-tied-per-4", "luna-untied-per-8", "luna-tied-per-8")},
        "luna-16": {512: 1.36, 2048: 1.8, 4096: 2.45, 16384: 5.6},
        "abc-mlp-128": {512: 0.88, 2048: 1.12, 4096: 1.6},
        "abc-mlp-64": {512: 0.95, 2048: 1.25, 4096: 1.75},
        "luna-mixed-64": {512: 0.85, 2048: 1.15, 4096: 1.6, 16384: 3.6},
        "abc-mixed-64": {512: 0.85, 2048: 1.15, 4096: 1.6, 16384: 3.6},
        "leapformer": {512: 0.95, 2048: 1.3, 4096: 1.75, 16384: 4.2},
        "lavo-64": {512: 0.85, 2048: 1.2, 4096: 1.6, 16384: 3.8},
    },
    ("forward", "bfloat16", None): {
        **{"luna-untied": {4096: 3.6}, "luna-tied": {4096: 4.0}, "luna-16": {4096: 5.5}},
    },
    ("mlm_step", "float32", 4): {"luna-untied": {512: 1.75}},
    ("mlm_step", "float32", 3): {"luna-untied": {512: 1.75}, "luna-tied": {512: 1.75}},
    ("mlm_step", "float32", "base"): {"luna-tied": {512: 1.3}},
}
BASE = {"width": 768, "heads": 12, "slots": 128, "threads": 1, "device": "cpu"}

# Ceilings: growth of the forward's time from 2048 to 16384 tokens, and a padded batch's time over an unpadded one's.
GROWTH = 1.05
MIXED_GROWTH = 1.06  # of a window and slots, whose keys are copied block by block
GROWTH_RANGE = (2048, 16384)
QUADRATIC = ("abc-full",)  # softmax attention, measured for comparison
PADDING = 1.05

# Memory of a classification step relative to RobertaModel's, by length. With gradient checkpointing, both models keep
# the input of every layer, which is half of Luna's peak.
MEMORY = {2048: 0.75, 4096: 0.6}
MEMORY_CHECKPOINTED = {2048: 0.9, 4096: 0.85}

Check = dict[str, Any]


def compare(what: str, model: str, measured: float, bound: float, at_least: bool = False) -> Check:
    """One ceiling, or floor if `at_least`, with the measured value and whether it holds."""
    holds = measured >= bound if at_least else measured <= bound
    relation = ">=" if at_least else "<="
    return {"what": what, "model": model, "measured": measured, "relation": relation, "bound": bound, "holds": holds}


def table(checks: list[Check]) -> str:
    """One line for every floor."""
    lines = [
        f"{'PASS ' if check['holds'] else 'below'} {check['model']:<23} {check['what']}: "
        f"{_figure(check['measured'])} {check['relation']} {_figure(check['bound'])}"
        for check in checks
    ]
    return "\n".join(lines) or "no floor applies to this run"


def _figure(value: float) -> str:
    return f"{value:.3f}" if value == 0 or value >= 0.001 else f"{value:.1e}"


# ---- encoders ----


def check(result: dict[str, Any]) -> list[Check]:
    """Every floor that applies to a run of `encoder.py`."""
    settings, growth = result["settings"], result["growth"]
    own = [name for name in result["models"] if name not in result["peers"]]
    floors: dict[str, dict[int, float]] = {}
    memory: dict[int, float] = {}
    if all(settings[name] == value for name, value in BASE.items()):
        for layers in (None, settings["layers"]):
            floors |= SPEED.get((settings["mode"], settings["dtype"], layers), {})
        if settings["mode"] == "class_step":
            memory = MEMORY_CHECKPOINTED if settings["checkpointing"] else MEMORY
    checks = []
    for row in result["lengths"]:
        length, models = row["length"], row["models"]
        peaks = {name: model["peak_memory_bytes"] / 2**20 for name, model in models.items()}
        for name in own:
            if floor := floors.get(name, {}).get(length):
                speed = models[name]["speed_over"]["roberta"]["median"]
                checks.append(compare(f"speed over roberta at {length}", name, speed, floor, at_least=True))
            if settings["mode"] == "forward":
                what = f"peak MiB at {length}, compared with roberta"
                checks.append(compare(what, name, peaks[name], peaks["roberta"]))
            if length in memory:
                share = peaks[name] / peaks["roberta"]
                checks.append(compare(f"peak over roberta's at {length}", name, share, memory[length]))
            if padding := models[name].get("padded_over_unpadded"):
                checks.append(compare(f"padded over unpadded at {length}", name, padding["median"], PADDING))
    if settings["mode"] == "forward" and growth and tuple(growth["range"]) == GROWTH_RANGE:
        what = f"growth exponent of time, {GROWTH_RANGE[0]} to {GROWTH_RANGE[1]}"
        exponents = {name: growth["exponents"][name]["median"] for name in own if name not in QUADRATIC}
        bounds = {name: MIXED_GROWTH if "mixed" in name else GROWTH for name in exponents}
        checks += [compare(what, name, exponent, bounds[name]) for name, exponent in exponents.items()]
    return checks


# ---- variable-length inputs ----

# Speed without padding relative to padded batches of 32 texts, by mix of lengths, in a forward and a finetuning step.
# Two thirds of a batch of MRPC are tokens: leaving out padding gains about 1.48 at most.
UNEVEN = {"sst2": 1.9, "mrpc": 1.3, "imdb": 1.3, "full": 0.98}
UNEVEN_BASE = {"width": 768, "rows": 32, "threads": 1, "device": "cpu"}


def check_uneven(result: dict[str, Any]) -> list[Check]:
    """Every floor that applies to a run of `uneven.py`."""
    if any(result["settings"][name] != value for name, value in UNEVEN_BASE.items()):
        return []
    checks = []
    for entry in result["lengths"]:
        for name, model in entry["models"].items():
            what, speed = f"speed over padded, {entry['mode']}, {entry['mix']}", model["speed_over_padded"]["median"]
            checks.append(compare(what, name, speed, UNEVEN[entry["mix"]], at_least=True))
    return checks


def check_serving(result: dict[str, Any]) -> list[Check]:
    """Every floor that applies to a run of `serving.py`: variable-length texts take no longer than with RoBERTa."""
    if any(result["settings"][name] != value for name, value in {**UNEVEN_BASE, "rows": 64}.items()):
        return []
    return [
        compare(f"speed over roberta, {entry['call']}, {entry['mix']}", name, speed, 1.0, at_least=True)
        for entry in result["lengths"]
        if entry["mix"] in ("sst2", "mrpc", "imdb", "together")
        for name, model in entry["models"].items()
        for speed in [model["speed_over_roberta"]["median"]]
    ]


# ---- windows, selected tokens and slots ----

# Speed relative to BertModel by window and length: texts that a window of 256 holds, and longer ones.
WINDOWED = {
    128: {512: 0.9, 1024: 1.05, 4096: 2.3, 8192: 4.5},
    256: {16: 0.97, 64: 0.97, 128: 0.97, 512: 0.8, 1024: 0.95, 4096: 2.0, 8192: 4.0},
}
WINDOWED_SLOTS = ("abc-means-16", "abc-mlp-64", "luna-64")
WINDOWED_BASE = {"layers": 6, "width": 384, "heads": 12, "threads": 1, "device": "cpu"}
# Time of the preset with selected tokens at this length, relative to a window of 64 alone.
SELECTED, SELECTED_LENGTH, SELECTED_TIME = "abc-selected", 4096, 1.35
MIXED_TIME = 1.0  # of short and long texts in one batch, relative to the sum of both apart


def check_windowed(result: dict[str, Any]) -> list[Check]:
    """Every floor that applies to a run of `windowed.py`."""
    if any(result["settings"][name] != value for name, value in WINDOWED_BASE.items()):
        return []
    floors = {f"{slots}-w{window}": floor for slots in WINDOWED_SLOTS for window, floor in WINDOWED.items()}
    checks = []
    for row in result["lengths"]:
        length, models = row["length"], row["models"]
        for name in models:
            if floor := floors.get(name, {}).get(length):
                speed = models[name]["speed_over_bert"]["median"]
                checks.append(compare(f"speed over bert at {length}", name, speed, floor, at_least=True))
        over = models.get(SELECTED, {}).get("time_over_window")
        if length == SELECTED_LENGTH and over:
            checks.append(compare(f"time over a window at {length}", SELECTED, over["median"], SELECTED_TIME))
    for name, time in result["mixed"].items():
        # Equal times measure above 1 in every other run: within the spread is enough.
        what = "lower quartile of a mixed batch's time over its parts'"
        checks.append(compare(what, name, time["quartiles"][0], MIXED_TIME))
    return checks
