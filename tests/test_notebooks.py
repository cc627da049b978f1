"""The notebooks of `examples/notebooks` run from top to bottom, print what they show, and are fit to publish."""

import json
import re

import nbformat
import pytest
from helpers import ROOT
from notebooks import FOLDER, executed, printed

DECIMAL = re.compile(r"\d+\.\d+")
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def agree(stored, fresh):
    """Whether two texts have the same words, and decimals that differ by at most one in their last place.

    Other machines add in another order, which can change the rounding.
    """
    if DECIMAL.sub("#", stored) != DECIMAL.sub("#", fresh):
        return False
    pairs = zip(DECIMAL.findall(stored), DECIMAL.findall(fresh), strict=True)
    return all(abs(float(one) - float(other)) < 1.5 * 10 ** -len(one.partition(".")[2]) for one, other in pairs)


def test_it_runs_and_prints_what_it_shows(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "clone").mkdir()
    stored, fresh = nbformat.read(path, as_version=4), executed(path, tmp_path / "clone")
    for one, other in zip(stored.cells, fresh.cells, strict=True):
        if one.cell_type == "code":
            assert agree(printed(one), printed(other)), (one.id, printed(one), printed(other))


def test_it_is_small_clean_and_in_order(path):
    text = path.read_text(encoding="utf-8")
    assert len(text) < 100_000 and not re.search(r"/(work|tmp|home|root|usr)/|Warning", text)
    notebook = json.loads(text)
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    assert all(set(cell["metadata"]) <= {"tags"} for cell in cells)
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs and all(output.get("name") == "stdout" for output in outputs)  # no progress, tables or widgets


def test_its_links_resolve(path):
    text = "".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown")
    for link in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (FOLDER / link).exists(), link
