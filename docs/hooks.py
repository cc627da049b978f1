"""Hooks of MkDocs: files of the repository that pages link to become part of the site.

On a forge, a page in docs/ links to a recipe, a result or a model card by its relative path. The site holds a copy of
each such file below `repo/`: Markdown and source code as pages, everything else as it is. Links are rewritten to match.
"""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)(?=[)#])")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".toml": "toml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that pages link to, and those that these link to in turn."""
    waiting = [ROOT / "docs" / file.src_uri for file in files.documentation_pages()]
    while waiting:
        page = waiting.pop()
        for link in LINK.findall(page.read_text(encoding="utf-8")):
            path = Path(os.path.normpath(page.parent / link))
            uri = site_uri(path)
            if not path.is_file() or ROOT not in path.parents or files.get_file_from_path(uri):
                continue
            if path.suffix in LANGUAGES:
                files.append(File.generated(config, uri, content=as_page(path)))
            else:
                files.append(File.generated(config, uri, abs_src_path=str(path)))
            waiting += [path] if path.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links relative to the place of a page, and of its targets, in the site."""
    uri = page.file.src_uri
    own = ROOT / uri.removeprefix("repo/") if uri.startswith("repo/") else ROOT / "docs" / uri

    def placed(link: re.Match[str]) -> str:
        path = Path(os.path.normpath(own.parent / link[1]))
        return posixpath.relpath(site_uri(path), posixpath.dirname(uri)) if path.is_file() else link[1]

    return markdown if page.meta.get("is_source") else LINK.sub(placed, markdown)


def site_uri(path: Path) -> str:
    """Where a file of the repository is in the site."""
    if (ROOT / "docs") in path.parents:
        return path.relative_to(ROOT / "docs").as_posix()
    relative = Path(os.path.relpath(path, ROOT)).as_posix()
    return f"repo/{relative}.md" if path.suffix in LANGUAGES else f"repo/{relative}"


def as_page(path: Path) -> str:
    """A page that shows source code."""
    name, code = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    head = f"---\ntitle: {path.name}\nis_source: true\nsearch:\n  exclude: true\n---\n\n# {path.name}\n\n`{name}`\n\n"
    return f"{head}~~~~~{LANGUAGES[path.suffix]}\n{code}\n~~~~~\n"
