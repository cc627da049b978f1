"""The English inside every CPython, as a corpus that needs no download."""

import ast
import os
import platform
import re
import sysconfig
import warnings
from pathlib import Path
from typing import Any

from luna_hf.scripting import UserError

# Folders beside the standard library: installed packages, tests, and the topics, which are read separately.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "pydoc_data"}
_BLANK_LINES = re.compile(r"\n\s*\n")
# The lines of dashes and stars under a heading.
_UNDERLINE = re.compile(r"^[ \t]*[*=~^+#-]{4,}[ \t]*\n?", re.MULTILINE)


def read_cpython(library: Path | None = None) -> tuple[list[str], str, list[Any]]:
    """The language reference in `pydoc_data.topics`, and the docstrings of the standard library.

    A topic is a document, and so are the docstrings of a module. Topics quote each other, and classes repeat the
    docstrings of their bases. Only the first copy of a paragraph is kept, so that held-out documents share none with
    the training text. Sources are parsed, never imported; `library` is by default that of the running interpreter.

    Returns:
        The documents, a description, and JSON values that change with them.

    Raises:
        UserError: The folder holds no sources (some distributions remove them).
    """
    library = library or Path(sysconfig.get_paths()["stdlib"])
    topics = read_topics(library / "pydoc_data" / "topics.py")
    modules = []
    for folder, subfolders, files in os.walk(library):
        subfolders[:] = sorted(set(subfolders) - _NOT_LIBRARY)
        modules += [read_docstrings(Path(folder, file)) for file in sorted(files) if file.endswith(".py")]
    modules = [text for text in modules if text]
    seen: set[str] = set()
    documents = [kept for text in topics + modules if (kept := drop_seen_paragraphs(text, seen))]
    if not documents:
        raise UserError(
            f"`data: cpython` needs the sources of the standard library, which {library} lacks. Use another Python, or "
            "set `data` to a file or folder."
        )
    description = (
        f"the documentation inside CPython {platform.python_version()}: {len(topics)} topics of the language reference "
        f"and the docstrings of {len(modules)} modules, {sum(map(len, documents)):,} characters without repeated "
        "paragraphs"
    )
    return documents, description, ["cpython", platform.python_version(), str(library)]


def read_topics(path: Path) -> list[str]:
    """The texts in `pydoc_data/topics.py`, sorted by name; none if there is no such file."""
    for node in _parse(path).body if path.is_file() else []:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return [text for _, text in sorted(ast.literal_eval(node.value).items())]
    return []


def read_docstrings(path: Path) -> str:
    """The docstrings of a module, its classes and functions, in source order, separated by blank lines."""
    try:
        tree = _parse(path)
    except (SyntaxError, ValueError):  # templates and samples of broken code
        return ""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return "\n\n".join(text for node in nodes if (text := ast.get_docstring(node)))


def drop_seen_paragraphs(text: str, seen: set[str]) -> str:
    """The paragraphs that are not in `seen`, ignoring spacing; they are added to it."""
    kept = []
    for paragraph in _BLANK_LINES.split(_UNDERLINE.sub("", text)):
        key = " ".join(paragraph.split())
        if key and key not in seen:
            seen.add(key)
            kept.append(paragraph.strip("\n"))
    return "\n\n".join(kept)


def _parse(path: Path) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in the library's sources
        return ast.parse(path.read_bytes())
