"""Floors of speed and memory (`floors.yaml`), and their comparison with a result."""

from pathlib import Path
from typing import Any

import summaries
import yaml

FLOORS = Path(__file__).with_suffix(".yaml")
Check = dict[str, Any]


def check(script: str, result: dict[str, Any]) -> list[Check]:
    """Every floor of a benchmark that applies to a result: with the same settings, and for its lengths and models."""
    checks = []
    for rule in yaml.safe_load(FLOORS.read_text(encoding="utf-8")).get(script, []):
        if any(result["settings"].get(name) != value for name, value in rule["settings"].items()):
            continue
        bounds, call = rule.get("at_least") or rule["at_most"], rule.get("call")
        found: dict[tuple[str, Any], float | None] = {}
        if rule["figure"] == "growth":
            exponents = summaries.growth(result, call, tuple(rule["within"]))
            found = {(name, "growth"): one["median"] for name, one in exponents.items()}
            bounds = {name: {"growth": bound} for name, bound in bounds.items()}
        for entry in result["lengths"]:
            for name in entry["models"] if rule["figure"] != "growth" and entry.get("call") == call else ():
                place = next((key for key in bounds.get(name, {}) if key in (entry.get("length"), entry.get("mix"))), 0)
                found[name, place] = summaries.figure(entry["models"], name, rule["figure"]) if place else None
        for (name, place), measured in found.items():
            bound = bounds.get(name, {}).get(place)
            if bound is not None and measured is not None:
                checks.append(compare(f"{rule['figure']}, {call or ''} {place}", name, measured, bound, rule))
    return checks


def compare(what: str, model: str, measured: float, bound: float, rule: dict[str, Any]) -> Check:
    """One floor, or ceiling, with the measured value and whether it holds."""
    relation = ">=" if "at_least" in rule else "<="
    holds = measured >= bound if relation == ">=" else measured <= bound
    return {"what": what, "model": model, "measured": measured, "relation": relation, "bound": bound, "holds": holds}


def table(checks: list[Check]) -> str:
    """One line for every floor."""
    lines = [
        f"{'PASS ' if check['holds'] else 'below'} {check['model']:<23} {check['what']}: "
        f"{check['measured']:.3f} {check['relation']} {check['bound']:.3f}"
        for check in checks
    ]
    return "\n".join(lines) or "no floor applies to this run"
