"""The packages of `src/luna_hf` and of `training/` depend on each other in one direction; no modules in a circle."""

import ast
from graphlib import TopologicalSorter

import pytest
from helpers import ROOT

SOURCE = ROOT / "src" / "luna_hf"
SOURCES = {path.relative_to(SOURCE).with_suffix("").as_posix(): path for path in SOURCE.rglob("*.py")}
# What the modules of a room may import besides each other; all may import the shared configuration.
ROOMS = {
    "ops": set(),
    "layers": {"ops"},
    "models": {"ops", "layers"},
    "families": {"ops", "layers", "models"},
}

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


def room_imports(module):
    """The modules of the package that a module imports, as paths, also inside functions."""
    found, parents = set(), module.split("/")
    for node in ast.walk(ast.parse(SOURCES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*parents[: -node.level], *(node.module or "").split(".")]
            path = "/".join(filter(None, base))
            names = {"/".join(filter(None, (path, alias.name))) for alias in node.names}
            found |= {name for name in names if name in SOURCES} or {path if path in SOURCES else f"{path}/__init__"}
    return found


@pytest.mark.parametrize("module", [module for module in SOURCES if module.partition("/")[0] in ROOMS])
def test_rooms_follow_the_direction(module):
    room = module.partition("/")[0]
    wrong = {
        name for name in room_imports(module) if name.partition("/")[0] not in {room, "configuration", *ROOMS[room]}
    }
    assert not wrong


def test_the_package_has_no_circle():
    graph = {module: room_imports(module) for module in SOURCES}
    assert sum(map(len, graph.values())) > 200
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("module", [module for module in SOURCES if module.partition("/")[0] in ROOMS])
def test_rooms_import_at_module_level_only(module):
    body = ast.parse(SOURCES[module].read_text(encoding="utf-8"))
    inner = [node for node in ast.walk(body) if isinstance(node, ast.ImportFrom) and node.col_offset]
    inner = [node for node in inner if node.level or node.module.partition(".")[0] == "luna_hf"]
    # A model needs the installed package for a warm start only.
    assert [node.module for node in inner] == (["luna_hf.warm_start"] if module == "models/base" else [])


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
