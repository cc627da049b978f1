"""The code in a saved folder: a file for the configuration and one for the models, joined from the package's modules.

A file holds what its classes can reach, in the order of dependence: imports first, then the definitions as they stand
in the package, below a comment with the docstring of their module. The same classes always give the same file.
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedConfig

PACKAGE = __name__.partition(".")[0]
_WIDTH = 120
_HEADER = """\
# luna_hf {version}. SPDX-License-Identifier: Apache-2.0
# Joined from the package's modules by `save_pretrained`; changes belong there.
"""


class Definition(NamedTuple):
    """A statement at the top of a module, other than an import."""

    names: tuple[str, ...]  # that it defines
    uses: frozenset[str]
    source: str  # with the comment above it
    is_block: bool  # a class or function
    spaced: bool  # whether blank lines separate it from what stands above it


class External(NamedTuple):
    """An import from another package: `import module`, `from module import name`, either with `as bound`."""

    module: str
    name: str | None
    bound: str


class Module(NamedTuple):
    """A module of the package, taken apart."""

    path: tuple[str, ...]  # below the package, such as ("ops", "attention")
    docstring: str
    definitions: tuple[Definition, ...]
    externals: dict[str, External]  # by the name that each binds
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
    config.auto_map = {
        **(getattr(config, "auto_map", None) or {}),
        "AutoConfig": f"configuration_{family}.{own.__name__}",
    }
    (folder / f"configuration_{family}.py").write_text(join(path), encoding="utf-8")
    prefix = f"modeling_{family}."
    models = {name.removeprefix(prefix) for name in config.auto_map.values() if name.startswith(prefix)}
    if models:
        code = join((*path[:-1], "modeling"), frozenset(models), path, f"configuration_{family}")
        (folder / f"modeling_{family}.py").write_text(code, encoding="utf-8")


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
    used = {name for module in modules for own in module.definitions if kept & {*own.names} for name in own.uses}
    imports = {module.externals[name] for module in modules for name in module.externals.keys() & used}
    beside_used = sorted(used & elsewhere)
    docstring = modules[-1].docstring + ("\n" if "\n" in modules[-1].docstring else "")
    parts = [_HEADER.format(version=sys.modules[PACKAGE].__version__), f'"""{docstring}"""', ""]
    parts += _import_lines(imports)
    if beside_used:
        parts += ["", _import_line(f".{beside_name}", beside_used)]
    sections = []
    for module in modules:
        definitions = [own for own in module.definitions if kept & {*own.names}]
        sections += [[*_section(module, definitions, is_root=module is modules[-1])]] if definitions else []
    for number, section in enumerate(sections):
        parts += ["", *section] if number else section
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
    definitions, externals, needs, end = [], {}, [], 0
    for node in tree.body:
        start, above = min([node.lineno, *(own.lineno for own in getattr(node, "decorator_list", ()))]) - 1, end
        end = node.end_lineno
        if isinstance(node, ast.ImportFrom) and node.level:
            needs.append((*path[: -node.level], *node.module.split(".")))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            externals |= {own.bound: own for own in _externals(node)}
        elif not isinstance(node, ast.Expr) and (names := _names(node)) != ("__all__",):
            while start > above and lines[start - 1].startswith("#"):
                start -= 1
            code = "\n".join(lines[start:end])
            is_block = isinstance(node, ast.ClassDef | ast.FunctionDef)
            definitions.append(Definition(names, _uses(node), code, is_block, start > above))
    return Module(path, ast.get_docstring(tree), tuple(definitions), externals, tuple(needs))


def _names(node: ast.stmt) -> tuple[str, ...]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return (node.name,)
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return tuple(own.id for target in targets for own in ast.walk(target) if isinstance(own, ast.Name))


def _uses(node: ast.AST) -> frozenset[str]:
    """The names that code reads, in annotations that are strings, too."""
    found = set()
    for own in ast.walk(node):
        if isinstance(own, ast.Name):
            found.add(own.id)
        for annotation in (getattr(own, "annotation", None), getattr(own, "returns", None)):
            for part in ast.walk(annotation) if annotation else ():
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    found |= _uses(ast.parse(part.value, mode="eval"))
    return frozenset(found)


def _externals(node: ast.Import | ast.ImportFrom) -> Iterator[External]:
    for own in node.names:
        if isinstance(node, ast.ImportFrom):
            yield External(node.module, own.name, own.asname or own.name)
        else:
            yield External(own.name, None, own.asname or own.name.partition(".")[0])


def defined(module: Module) -> list[str]:
    """The names that a module defines."""
    return [name for own in module.definitions for name in own.names]


def _reach(modules: list[Module], roots: Iterable[str]) -> set[str]:
    """Return the names that the roots need, themselves included."""
    uses = {name: own.uses for module in modules for own in module.definitions for name in own.names}
    kept, waiting = set(), [*roots]
    while waiting:
        if (name := waiting.pop()) in uses and name not in kept:
            kept.add(name)
            waiting += uses[name]
    return kept


def _import_lines(imports: set[External]) -> Iterator[str]:
    """Import statements in the order of isort: the standard library, then other packages."""
    sections = ([], [])
    for own in imports:
        sections[own.module.partition(".")[0] not in sys.stdlib_module_names].append(own)
    for number, section in enumerate(sections):
        yield from [""] if number and all(sections) else []
        for module, bound in sorted((own.module, own.bound) for own in section if own.name is None):
            yield f"import {module}" if bound == module.partition(".")[0] else f"import {module} as {bound}"
        members: dict[tuple[str, str], list[str]] = {}
        for module, name, bound in sorted(own for own in section if own.name):
            alias = "" if name == bound else f"{name} as {bound}"
            members.setdefault((module, alias), []).append(alias or name)
        for (module, _), names in sorted(members.items()):
            yield _import_line(module, names)


def _import_line(module: str, names: list[str]) -> str:
    names = sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    line = f"from {module} import {', '.join(names)}"
    return (
        line if len(line) <= _WIDTH else f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"
    )


def _section(module: Module, definitions: list[Definition], is_root: bool) -> Iterator[str]:
    """The definitions of a module, below its docstring as a comment; the docstring of the root is the file's."""
    yield from ("", f"# ---- {'/'.join(module.path)}.py ----")
    if not is_root:
        yield from ("#", *(f"# {line}".rstrip() for line in module.docstring.splitlines()))
    before = None
    for own in definitions:
        if own.is_block or (before and before.is_block):
            yield from ("", "")
        elif before is None or own.spaced:
            yield ""
        yield own.source
        before = own
