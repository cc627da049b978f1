"""Execute the notebooks of `examples/notebooks`, and write their outputs into the files.

    PYTHONPATH=src OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venv/bin/python tests/notebooks.py [NAME ...]

Do so after a change of a notebook, or of what it prints; `test_notebooks.py` compares stored outputs with new ones.
"""

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples" / "notebooks"
# Seconds of a notebook: a busy machine takes several times as long as the minute that it promises.
TIMEOUT = 500


def executed(path: Path, clone: Path) -> NotebookNode:
    """A notebook with new outputs, run by a new kernel at its place in a folder that stands for a clone.

    Raises:
        CellExecutionError: A cell failed.
    """
    for name in ("checkpoints", "src"):
        (clone / name).symlink_to(ROOT / name)
    place = clone / FOLDER.relative_to(ROOT)
    place.mkdir(parents=True)
    notebook = nbformat.read(path, as_version=4)
    settings = {"timeout": TIMEOUT, "record_timing": False, "coalesce_streams": True}
    NotebookClient(notebook, resources={"metadata": {"path": str(place)}}, **settings).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":  # progress and warnings are of one run only
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata.pop("widgets", None)
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def printed(cell: NotebookNode) -> str:
    """What a cell printed; nothing for one with the tag `varies`: times, and what training gives on this machine."""
    if "varies" in cell.metadata.get("tags", ()):
        return ""
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def main(names: list[str]) -> None:
    """Record the named notebooks, or all."""
    for path in [FOLDER / name for name in names] or sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as clone:
            notebook = executed(path, Path(clone))
        nbformat.write(notebook, path)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main(sys.argv[1:])
