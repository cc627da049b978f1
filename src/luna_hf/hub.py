"""The code in a saved folder: a file for the configuration and one for the models, joined from the package's modules.

A file holds what its classes can reach, in the order of dependence: imports first, then the definitions as they stand
in the package, below a comment with the docstring of their module. The same classes always give the same file.
"""

import ast
import sys
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedConfig

PACKAGE = __name__.partition(".")[0]
_HEADER = """\
# luna_hf {version}. SPDX-License-Identifier: Apache-2.0
# Joined from the package's modules by `save_pretrained`; changes belong there.
"""


class Definition(NamedTuple):
    """A statement at the top of a module, other than an import, or in a class."""

    names: tuple[str, ...]  # that it defines; a method's follows a dot; none where it is always kept
    uses: frozenset[str]  # names, and attributes after a dot
    source: str  # with the comment above it
    body: tuple["Definition", ...] = ()  # the statements of a class, some of whose methods may be left out

    def parts(self, kept: set[str]) -> list["Definition"]:
        """Return the definition and the statements of its body, as far as they are kept."""
        if not kept & {*self.names}:
            return []
        return [self, *(own for own in self.body if not own.names or kept & {*own.names})]


class Module(NamedTuple):
    """A module of the package, taken apart."""

    path: tuple[str, ...]  # below the package, such as ("ops", "attention")
    docstring: str
    definitions: tuple[Definition, ...]
    externals: dict[str, str]  # import statements from other packages, by the name that each binds
    needs: tuple[tuple[str, ...], ...]  # paths of the modules that it imports


def write_code(config: PreTrainedConfig, folder: str | Path) -> None:
    """Write the code of one of the package's configurations, and of the models that its `auto_map` names.

    Args:
        config: of a class of the package; the `auto_map` gets its entry `AutoConfig`.
        folder: where `config.json` will be.
    """
    own = type(config)
    path = tuple(own.__module__.split(".")[1:])
    family = path[-2]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"configuration_{family}.py").write_text(join(path), encoding="utf-8")
    # Earlier versions wrote the models into several files.
    modeling, names = f"modeling_{family}", defined(take_apart((*path[:-1], "modeling")))
    auto_map, models = {"AutoConfig": f"configuration_{family}.{own.__name__}"}, set()
    for auto, entry in (getattr(config, "auto_map", None) or {}).items():
        file, _, name = entry.partition(".")
        if file.startswith(modeling) and name in names:
            entry = f"{modeling}.{name}"
            models.add(name)
        auto_map.setdefault(auto, entry)
    config.auto_map = auto_map
    if models:
        code = join((*path[:-1], "modeling"), frozenset(models), path, f"configuration_{family}")
        (folder / f"{modeling}.py").write_text(code, encoding="utf-8")


@cache
def join(
    path: tuple[str, ...],
    roots: frozenset[str] | None = None,
    beside: tuple[str, ...] | None = None,
    beside_name: str = "",
) -> str:
    """Return the code of a module and of all that it needs, as one file.

    Args:
        path: of the module below the package, such as `("families", "luna", "modeling")`.
        roots: names to keep, with what they reach; by default all.
        beside: path of a module that is joined into another file, with all that it needs.
        beside_name: name of the other file, without `.py`.
    """
    elsewhere = {name for module in gather(beside) for name in defined(module)} if beside else set()
    modules = [module for module in gather(path) if not beside or module not in gather(beside)]
    kept = _reach(modules, roots or {name for module in modules for name in defined(module)})
    used = _used(modules, kept)
    imports = {module.externals[name] for module in modules for name in module.externals.keys() & used}
    beside_used = sorted(used & elsewhere)
    docstring = modules[-1].docstring + ("\n" if "\n" in modules[-1].docstring else "")
    parts = [_HEADER.format(version=sys.modules[PACKAGE].__version__), f'"""{docstring}"""', ""]
    for is_other in (False, True):  # the standard library, then other packages
        lines = [line for line in imports if (_top_module(line) not in sys.stdlib_module_names) == is_other]
        parts += [*sorted(lines, key=lambda line: (line.startswith("from"), line)), *[""] * (not is_other)]
    parts += ["", *(f"from .{beside_name} import {name}" for name in beside_used)] if beside_used else []
    for module in modules:
        parts_kept = (own.parts(kept) for own in module.definitions)
        sources = ["\n".join(part.source for part in own if part.source) for own in parts_kept if own]
        # The docstring of the root is the file's.
        about = [] if module is modules[-1] else ["", *module.docstring.splitlines()]
        comment = "\n".join(f"# {line}".rstrip() for line in [f"---- {'/'.join(module.path)}.py ----", *about])
        parts += ["\n\n" + "\n\n\n".join([comment, *sources])] if sources else []
    return "\n".join(parts) + "\n"


def gather(path: tuple[str, ...]) -> list[Module]:
    """Return a module and all of the package that it imports, in the order of dependence."""
    found: dict[tuple[str, ...], Module] = {}

    def visit(path: tuple[str, ...]) -> None:
        module = take_apart(path)
        for needed in module.needs:
            if needed not in found:
                visit(needed)
        found[path] = module

    visit(path)
    return list(found.values())


@cache
def take_apart(path: tuple[str, ...]) -> Module:
    """Parse a module of the package."""
    source = files(PACKAGE).joinpath(*path[:-1], f"{path[-1]}.py").read_text(encoding="utf-8")
    tree, lines = ast.parse(source), source.splitlines()
    definitions, externals, needs = [], {}, []
    for node in tree.body:
        start = min([node.lineno, *(own.lineno for own in getattr(node, "decorator_list", ()))]) - 1
        if isinstance(node, ast.ImportFrom) and node.level:
            needs.append((*path[: -node.level], *node.module.split(".")))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            externals |= _externals(node)
        elif not isinstance(node, ast.Expr) and (names := _names(node)) != ("__all__",):
            while lines[start - 1].startswith("#"):
                start -= 1
            internal = path[0] in ("ops", "layers") and isinstance(node, ast.ClassDef)
            if internal and not any(_is_library(base, externals) for base in node.bases):
                definitions.append(_take_class_apart(node, lines, start))
            else:
                definitions.append(Definition(names, _uses(node), "\n".join(lines[start : node.end_lineno])))
    return Module(path, ast.get_docstring(tree), tuple(definitions), externals, tuple(needs))


def _is_library(base: ast.expr, externals: dict[str, str]) -> bool:
    """Whether a base class may call methods that the package does not."""
    name = ast.unparse(base)
    return name not in ("nn.Module", "NamedTuple") and ("." in name or name in externals)


def _take_class_apart(node: ast.ClassDef, lines: list[str], start: int) -> Definition:
    body, head = [], [use for own in (*node.bases, *node.decorator_list) for use in _uses(own)]
    for own in node.body:
        first, start = start, own.end_lineno
        may_go = body and isinstance(own, ast.FunctionDef) and not own.name.startswith("__")
        names = (f".{own.name}",) if may_go and not hasattr(nn.Module, own.name) else ()
        body.append(Definition(names, _uses(own), "\n".join(lines[first:start])))
    return Definition((node.name,), frozenset(head), "", tuple(body))


def _names(node: ast.stmt) -> tuple[str, ...]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return (node.name,)
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return tuple(own.id for target in targets for own in ast.walk(target) if isinstance(own, ast.Name))


def _uses(node: ast.AST) -> frozenset[str]:
    """The names that code reads, in annotations that are strings, too, and attributes, each after a dot."""
    found = set()
    for own in ast.walk(node):
        if isinstance(own, ast.Name):
            found.add(own.id)
        elif isinstance(own, ast.Attribute):
            found.add(f".{own.attr}")
        elif isinstance(own, ast.Constant) and isinstance(own.value, str):  # for `getattr`
            found.add(f".{own.value}")
        for annotation in (getattr(own, "annotation", None), getattr(own, "returns", None)):
            for part in ast.walk(annotation) if annotation else ():
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    found |= _uses(ast.parse(part.value, mode="eval"))
    return frozenset(found)


def _externals(node: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """A statement for each name that an import binds."""
    found, start = {}, f"from {node.module} import" if isinstance(node, ast.ImportFrom) else "import"
    for own in node.names:
        bound = own.asname or (own.name if isinstance(node, ast.ImportFrom) else own.name.partition(".")[0])
        found[bound] = f"{start} {own.name}" + (f" as {own.asname}" if own.asname else "")
    return found


def _top_module(line: str) -> str:
    return line.split()[1].partition(".")[0]


def defined(module: Module) -> list[str]:
    """The names that a module defines."""
    return [name for own in module.definitions for name in own.names]


def _reach(modules: list[Module], roots: Iterable[str]) -> set[str]:
    """Return the names that the roots need, themselves included."""
    kept, needed = set(), {*roots}
    while needed - kept:
        kept |= needed
        needed = _used(modules, kept)
    return kept


def _used(modules: list[Module], kept: set[str]) -> set[str]:
    parts = (part for module in modules for own in module.definitions for part in own.parts(kept))
    return {name for part in parts for name in part.uses}
