"""The packages of `training/` depend on each other in one direction, and no two modules import each other."""

import ast
from graphlib import TopologicalSorter

import pytest
from helpers import ROOT

TRAINING = ROOT / "training"
MODULES = {
    ".".join(path.relative_to(TRAINING).with_suffix("").parts).removesuffix(".__init__"): path
    for path in TRAINING.rglob("*.py")
}
# What the modules of a package may import besides each other.
ALLOWED = {
    "common": set(),
    "data": {"common"},
    "engine": {"common", "data"},
    "objectives": {"common", "data", "engine"},
    "tasks": {"common"},
    "translation": {"common", "data", "engine"},
    "converting": {"common", "data", "engine", "objectives"},
    "commands": {"common", "data", "engine", "objectives", "tasks", "translation", "converting"},
}


def package_of(module):
    package = module.partition(".")[0]
    return package if package in ALLOWED else "commands"


def imports_of(module):
    """The modules of `training/` that a module imports, also under `TYPE_CHECKING` and inside functions."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} has a relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return found & MODULES.keys()


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_direction(module):
    allowed = {package_of(module), *ALLOWED[package_of(module)]}
    wrong = {name for name in imports_of(module) if package_of(name) not in allowed}
    if package_of(module) == "commands":
        wrong |= {name for name in imports_of(module) if package_of(name) == "commands"}
    assert not wrong


def test_there_is_no_circle():
    TopologicalSorter({module: imports_of(module) - {module} for module in MODULES}).prepare()


def test_scripting_is_light():
    source = ast.parse((ROOT / "src" / "luna_hf" / "scripting.py").read_text(encoding="utf-8"))
    heavy = [node.module for node in source.body if isinstance(node, ast.ImportFrom) and "." in (node.module or "")]
    assert heavy == ["collections.abc"]
