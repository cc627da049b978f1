"""The English inside every CPython, as a corpus that needs no download."""

import ast
import os
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from luna_hf.scripting import UserError

# Folders of the standard library's tree that are not the library: installed packages, and tests.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "pydoc_data"}
_BLANK_LINES = re.compile(r"\n\s*\n")
# The lines of dashes and stars under a heading.
_UNDERLINE = re.compile(r"^[ \t]*[*=~^+#-]{4,}[ \t]*\n?", re.MULTILINE)


def read_cpython(library: Path | None = None) -> tuple[list[str], str, list[Any]]:
    """The English inside CPython: the language reference of `pydoc_data.topics`, and the library's docstrings.

    A topic is a document, and so are the docstrings of one module. Topics quote each other, and classes repeat the
    docstrings of their bases: a paragraph is kept where it comes first, so that no held-out document shares one with
    the training text. Sources are parsed, never imported.

    Args:
        library: folder of the standard library; by default that of the running interpreter.

    Returns:
        The documents, one sentence that says what was read, and what changes with it.

    Raises:
        UserError: The folder holds no sources (some distributions strip them).
    """
    library = library or Path(sysconfig.get_paths()["stdlib"])
    topics = read_topics(library / "pydoc_data" / "topics.py")
    modules = [text for text in map(read_docstrings, library_sources(library)) if text]
    seen: set[str] = set()
    documents = [kept for text in topics + modules if (kept := drop_seen_paragraphs(text, seen))]
    if not documents:
        raise UserError(
            "This Python comes without the sources of its standard library, so `data: cpython` has nothing to read. "
            "Use another Python, or set `data` to a .txt file or a folder of them."
        )
    characters = sum(map(len, documents))
    return (
        documents,
        f"the documentation inside CPython {platform.python_version()}: {len(topics)} topics of the language reference "
        f"and the docstrings of {len(modules)} modules, {characters:,} characters without repeated paragraphs",
        ["cpython", platform.python_version(), str(library)],
    )


def read_topics(path: Path) -> list[str]:
    """The texts of `pydoc_data/topics.py` in the order of their names; none if the file is missing.

    Some versions of Python write escaped strings there, others raw ones; read as a literal they are the same.
    """
    if not path.is_file():
        return []
    for node in _parse(path).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            topics = ast.literal_eval(node.value)
            return [topics[name] for name in sorted(topics)]
    return []


def library_sources(library: Path) -> Iterator[Path]:
    """The library's .py files, without tests and installed packages, in an order that no file system changes."""
    for folder, subfolders, files in os.walk(library):
        subfolders[:] = sorted(set(subfolders) - _NOT_LIBRARY)
        yield from (Path(folder, file) for file in sorted(files) if file.endswith(".py"))


def read_docstrings(path: Path) -> str:
    """The docstrings of a module, its classes and functions, in source order, with a blank line between them."""
    try:
        tree = _parse(path)
    except (SyntaxError, ValueError):  # templates and samples of broken code
        return ""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return "\n\n".join(text for node in nodes if (text := ast.get_docstring(node)))


def drop_seen_paragraphs(text: str, seen: set[str]) -> str:
    """The text without the paragraphs that `seen` holds (spacing aside); adds the others to `seen`."""
    kept = []
    for paragraph in _BLANK_LINES.split(_UNDERLINE.sub("", text)):
        key = " ".join(paragraph.split())
        if key and key not in seen:
            seen.add(key)
            kept.append(paragraph.strip("\n"))
    return "\n\n".join(kept)


def _parse(path: Path) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in the library's own sources
        return ast.parse(path.read_bytes())
