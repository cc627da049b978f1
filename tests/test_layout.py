"""What may import what: the rooms of `src/luna_hf`, the packages of `training/`, and the folders of commands.

Imports go in one direction, no modules import each other in a circle, and the package needs nothing but its
dependencies.
"""

import ast
import itertools
import re
import sys
from functools import partial
from graphlib import TopologicalSorter

import pytest
import tomllib
import torch
from helpers import ROOT, tiny_causal_model, tiny_model

SOURCE = ROOT / "src" / "luna_hf"
SOURCES = {path.relative_to(SOURCE).with_suffix("").as_posix(): path for path in SOURCE.rglob("*.py")}
# What the modules of a room may import besides each other; all may import the shared configuration.
ROOMS = {
    "ops": set(),
    "layers": {"ops"},
    "models": {"ops", "layers"},
    "families": {"ops", "layers", "models"},
}

DEPENDENCIES = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
# What a user of the wheel has: its dependencies, and what transformers cannot do without.
INSTALLED = {*(re.match(r"\w+", need)[0] for need in DEPENDENCIES), "huggingface_hub", "tokenizers"}

# The other folders whose modules the commands of a folder import.
FOLDERS = {
    "training": set(),
    "conversion": set(),
    "benchmarks": {"training"},
    "experiments": {"benchmarks", "training"},
    "model_cards": {"training"},
    "examples": set(),
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


def outer_imports(nodes):
    """The first names of what is imported from elsewhere, among nodes of a syntax tree."""
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("module", SOURCES)
def test_the_package_needs_only_its_dependencies(module):
    text = SOURCES[module].read_text(encoding="utf-8")
    assert outer_imports([*ast.walk(ast.parse(text))]) <= {*sys.stdlib_module_names, *INSTALLED, "luna_hf"}
    assert "__file__" not in text  # an installed package has no repository around it


def test_scripting_is_light():
    body = ast.parse(SOURCES["scripting"].read_text(encoding="utf-8")).body
    assert outer_imports(body) <= sys.stdlib_module_names and not room_imports("scripting")


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_import_each_other_in_one_direction(folder):
    paths = [*(ROOT / folder).rglob("*.py")]
    own = {path.stem for path in paths} | {path.parent.name for path in paths}
    modules = ((path, other) for other in FOLDERS for path in (ROOT / other).iterdir())
    places = {path.stem: other for path, other in modules if path.suffix == ".py" or any(path.glob("*.py"))}
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in paths)
    found = set().union(*(outer_imports([*ast.walk(tree)]) for tree in trees)) - own
    assert {places[name] for name in found & places.keys()} == FOLDERS[folder]


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


# ---- the way through a layer ----

# Calls into the package, and changes of file between them, in a pass of a tiny Luna of one layer.
MOST_CALLS = {"full": (71, 46), "padded": (95, 52), "training": (81, 50), "token": (55, 41)}


@pytest.mark.parametrize("case", MOST_CALLS)
def test_a_pass_takes_few_calls(case):
    ids, mask = torch.full((2, 40), 5), torch.ones(2, 40)
    mask[1, 25:] = 0
    model = (tiny_causal_model if case == "token" else partial(tiny_model, kind="mlm"))("luna", num_hidden_layers=1)
    model.train(case == "training")
    with torch.no_grad():
        cache = model(ids, use_cache=True).cache if case == "token" else None
    inputs = {
        "full": {"input_ids": ids},
        "padded": {"input_ids": ids, "attention_mask": mask},
        "training": {"input_ids": ids, "labels": ids},
        "token": {"input_ids": ids[:, :1], "cache": cache},
    }[case]
    files = []

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            files.append(frame.f_code.co_filename)

    with torch.set_grad_enabled(case == "training"):
        model(**inputs)
        sys.setprofile(profile)
        try:
            model(**inputs)
        finally:
            sys.setprofile(None)
    changes = sum(before != after for before, after in itertools.pairwise(files))
    assert len(files) <= MOST_CALLS[case][0] and changes <= MOST_CALLS[case][1], (len(files), changes)
