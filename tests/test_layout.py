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
from pathlib import Path

import pytest
import tomllib
import torch
from helpers import ROOT, tiny_causal_model, tiny_model

import luna_hf


def modules_in(folder):
    """The file of every module below a folder, by its name with dots."""
    files = {".".join(path.relative_to(folder).with_suffix("").parts): path for path in folder.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in files.items()}


SOURCE, TRAINING = ROOT / "src" / "luna_hf", ROOT / "training"
SOURCES, MODULES = modules_in(SOURCE), modules_in(TRAINING)
# What the modules of a room may import besides each other; all may import the shared configuration.
ROOMS = {
    "ops": {"configuration"},
    "layers": {"configuration", "ops"},
    "models": {"configuration", "ops", "layers"},
    "families": {"configuration", "ops", "layers", "models"},
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

# What the modules of a package may import besides each other.
ALLOWED = {
    "common": set(),
    "data": {"common"},
    "engine": {"common", "data"},
    "objectives": {"common", "data", "engine"},
    "tasks": {"common"},
    "translation": {"common", "data", "engine"},
    "converting": {"common", "data", "engine"},
    "commands": {"common", "data", "engine", "objectives", "tasks", "translation", "converting"},
}


def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(folder, path, modules):
    """The modules below a folder that a file there imports, also under `TYPE_CHECKING` and inside functions."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = path.relative_to(folder).parts[: -node.level] if node.level else ()
            base = ".".join(filter(None, (*parents, node.module)))
            names = {f"{base}.{alias.name}".lstrip(".") for alias in node.names}
            found |= {name if name in modules else base or "__init__" for name in names}
    return found & modules.keys()


def package_of(module):
    package = module.partition(".")[0]
    return package if package in {**ALLOWED, **ROOMS, "configuration": 0} else "commands"


@pytest.mark.parametrize(("folder", "modules", "allowed"), [(SOURCE, SOURCES, ROOMS), (TRAINING, MODULES, ALLOWED)])
def test_imports_follow_the_direction(folder, modules, allowed):
    graph = {module: imports_of(folder, path, modules) for module, path in modules.items()}
    assert sum(map(len, graph.values())) > 200
    TopologicalSorter({module: names - {module} for module, names in graph.items()}).prepare()  # has no circle
    for module, names in graph.items():
        own = package_of(module)
        # Commands of `training/` do not import each other.
        may = {*allowed.get(own, ()), *([own] if own != "commands" else [])}
        if own in allowed:
            assert {package_of(name) for name in names} <= may, module


def test_rooms_import_at_module_level_only():
    for module, path in SOURCES.items():
        nodes = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.ImportFrom) and node.col_offset]
        inner = [node.module for node in nodes if node.level or node.module.partition(".")[0] == "luna_hf"]
        # A model needs the installed package for a warm start only.
        assert package_of(module) not in ROOMS or inner == ["luna_hf.warm_start"] * (module == "models.base"), module


def outer_imports(nodes):
    """The first names of what is imported from elsewhere, among nodes of a syntax tree."""
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names}


def test_the_package_needs_only_its_dependencies():
    for module, path in SOURCES.items():
        found = outer_imports([*ast.walk(parsed(path))])
        assert found <= {*sys.stdlib_module_names, *INSTALLED, "luna_hf"}, module
        assert "__file__" not in path.read_text(encoding="utf-8"), module  # it has no repository around it


def test_scripting_is_light():
    body = parsed(SOURCES["scripting"]).body
    assert outer_imports(body) <= sys.stdlib_module_names and not imports_of(SOURCE, SOURCES["scripting"], SOURCES)


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_import_each_other_in_one_direction(folder):
    paths = [*(ROOT / folder).rglob("*.py")]
    own = {path.stem for path in paths} | {path.parent.name for path in paths}
    modules = ((path, other) for other in FOLDERS for path in (ROOT / other).iterdir())
    places = {path.stem: other for path, other in modules if path.suffix == ".py" or any(path.glob("*.py"))}
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in paths)
    found = set().union(*(outer_imports([*ast.walk(tree)]) for tree in trees)) - own
    assert {places[name] for name in found & places.keys()} == FOLDERS[folder]


# ---- the way through a layer ----

# Calls into the package, and changes of file between them, in a pass of a tiny Luna of one layer.
MOST_CALLS = {"full": (56, 37), "padded": (70, 41), "training": (67, 42), "token": (55, 41)}


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
    files, package = [], str(Path(luna_hf.__file__).parent)  # not the checkout's, if another is installed

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            files.append(frame.f_code.co_filename)

    with torch.set_grad_enabled(case == "training"):
        model(**inputs)
        sys.setprofile(profile)
        try:
            model(**inputs)
        finally:
            sys.setprofile(None)
    changes = sum(before != after for before, after in itertools.pairwise(files))
    assert 0 < len(files) <= MOST_CALLS[case][0] and changes <= MOST_CALLS[case][1], (len(files), changes)
