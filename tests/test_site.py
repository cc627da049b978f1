"""The documentation site builds without a warning, finds its pages, and asks no other server for anything."""

import json
import re
import subprocess
import sys

import pytest
import yaml
from helpers import ROOT

CONFIG = ROOT / "mkdocs.yml"
PAGES = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
# How-to guides longer than this are hard to follow.
MOST_LINES = 150


def entries(section):
    """The pages of a part of the navigation."""
    if isinstance(section, str):
        return [section]
    items = section.values() if isinstance(section, dict) else section
    return [page for item in items for page in entries(item)]


TABS = {name: pages for tab in yaml.safe_load(CONFIG.read_text())["nav"] for name, pages in tab.items()}
NAVIGATION = {name: entries(pages) for name, pages in TABS.items()}


def build(folder):
    """Build the site in a folder; a warning is an error."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(CONFIG), "--site-dir", folder]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build(folder)
    return folder


def test_every_page_is_in_the_navigation_once():
    listed = [page for pages in NAVIGATION.values() for page in pages if not page.startswith("repo/")]
    assert sorted(listed) == sorted(PAGES)


def test_guides_are_short():
    long = {page: len((ROOT / "docs" / page).read_text().splitlines()) for page in NAVIGATION["How-to guides"]}
    assert not {page: lines for page, lines in long.items() if lines > MOST_LINES}


def test_pages_are_built_and_found(site):
    for page in PAGES:
        name = page.replace("README.md", "index.md").replace(".md", ".html")
        assert (site / name).is_file(), name
    index = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    assert any("late chunking" in entry["text"].lower() for entry in index)
    assert not [entry for entry in index if entry["location"].startswith("repo/src/")]


def test_files_that_pages_link_to_are_in_the_site(site):
    results = (site / "results" / "minilm.html").read_text()
    (link,) = set(re.findall(r'href="([^"]+/minilm\.json)"', results))
    assert (site / "results" / link).resolve().is_file()
    recipe = site / "repo" / "training" / "recipes" / "convert" / "minilm.yaml.html"
    assert 'class="highlight"' in recipe.read_text()


def test_pages_load_nothing_from_another_server(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r'<(?:script|img|iframe)[^>]+src="(https?://[^"]+)', text)
        loaded += re.findall(r'<link[^>]+rel="(?:stylesheet|preload|icon)"[^>]+href="(https?://[^"]+)', text)
        assert not loaded, (page.name, loaded)
