"""What the encoders of this package must reach, as data, and the comparison with a result; `compare` is for all."""

from typing import Any

# Speed relative to RobertaModel by (mode, dtype, layers or None for any number), model and length.
# They hold for base width, 128 slots of Luna and one CPU thread, and leave room for a noisy machine.
SPEED: dict[tuple[str, str, int | None], dict[str, dict[int, float]]] = {
    ("forward", "float32", None): {
        "luna-untied": {512: 0.97, 2048: 1.28, 4096: 1.75, 8192: 2.5, 16384: 4.0},
        "luna-tied": {512: 1.07, 2048: 1.40, 4096: 1.88, 8192: 2.65, 16384: 4.4},
        "abc-mlp-128": {512: 0.88, 2048: 1.12, 4096: 1.6},
        "abc-mlp-64": {512: 0.95, 2048: 1.25, 4096: 1.75},
    },
    ("forward", "bfloat16", None): {"luna-untied": {4096: 3.6}, "luna-tied": {4096: 4.0}},
    ("mlm_step", "float32", 4): {"luna-untied": {512: 1.75}, "luna-tied": {512: 1.75}},
    ("mlm_step", "float32", 12): {"luna-untied": {512: 1.3}, "luna-tied": {512: 1.3}},
}
BASE = {"width": 768, "heads": 12, "slots": 128, "threads": 1}

# Ceilings: growth of the forward's time from 2048 to 16384 tokens, and a padded batch's time over an unpadded one's.
GROWTH = 1.05
GROWTH_RANGE = (2048, 16384)
QUADRATIC = ("abc-full",)  # softmax attention, there to be compared with
PADDING = 1.05


def check(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Every floor that applies to a run, with what was measured and whether it holds."""
    settings = result["settings"]
    own = [name for name in result["models"] if name not in result["peers"]]
    checks = _padding(result, own)
    if settings["mode"] == "forward":
        checks = _growth(result, own) + _memory(result, own) + checks
    if settings["device"] == "cpu" and all(settings[name] == value for name, value in BASE.items()):
        checks = _speed(result) + checks
    return checks


def compare(what: str, model: str, measured: float, bound: float, at_least: bool) -> dict[str, Any]:
    """One floor (or ceiling), what was measured, and whether it holds."""
    holds = measured >= bound if at_least else measured <= bound
    relation = ">=" if at_least else "<="
    return {"what": what, "model": model, "measured": measured, "relation": relation, "bound": bound, "holds": holds}


def _speed(result: dict[str, Any]) -> list[dict[str, Any]]:
    settings = result["settings"]
    checks = []
    for (mode, dtype, layers), models in SPEED.items():
        if (mode, dtype) != (settings["mode"], settings["dtype"]) or layers not in (None, settings["layers"]):
            continue
        for row in result["lengths"]:
            for model, floors in models.items():
                if row["length"] in floors and model in row["models"]:
                    measured = row["models"][model]["speed_over"]["roberta"]["median"]
                    what = f"speed over roberta at {row['length']}"
                    checks.append(compare(what, model, measured, floors[row["length"]], at_least=True))
    return checks


def _growth(result: dict[str, Any], own: list[str]) -> list[dict[str, Any]]:
    growth = result["growth"]
    if growth is None or tuple(growth["range"]) != GROWTH_RANGE:
        return []
    what = f"growth exponent of time, {GROWTH_RANGE[0]} to {GROWTH_RANGE[1]}"
    return [
        compare(what, model, growth["exponents"][model]["median"], GROWTH, at_least=False)
        for model in own
        if model not in QUADRATIC
    ]


def _memory(result: dict[str, Any], own: list[str]) -> list[dict[str, Any]]:
    checks = []
    for row in result["lengths"]:
        limit = row["models"]["roberta"]["peak_memory_bytes"] / 2**20
        for model in own:
            measured = row["models"][model]["peak_memory_bytes"] / 2**20
            checks.append(compare(f"peak MiB at {row['length']}, roberta's", model, measured, limit, at_least=False))
    return checks


def _padding(result: dict[str, Any], own: list[str]) -> list[dict[str, Any]]:
    return [
        compare(f"padded over unpadded at {row['length']}", model, padding["median"], PADDING, at_least=False)
        for row in result["lengths"]
        for model in own
        if (padding := row["models"][model].get("padded_over_unpadded"))
    ]


def table(checks: list[dict[str, Any]]) -> str:
    """One line for every floor."""
    if not checks:
        return "no floor applies to this run"
    return "\n".join(
        f"{'PASS ' if check['holds'] else 'below'} {check['model']:<23} {check['what']}: "
        f"{_figure(check['measured'])} {check['relation']} {_figure(check['bound'])}"
        for check in checks
    )


def _figure(value: float) -> str:
    return f"{value:.3f}" if value == 0 or value >= 0.001 else f"{value:.1e}"
