"""Seed faults into the code, one at a time, and see whether the fast tests catch them.

    python tests/seeded_faults.py                          # every fault; two hours of one core, less with --jobs
    python tests/seeded_faults.py --only causal_memory     # those whose path or description contains the text

Each fault of `seeded_faults.yaml` replaces one piece of code in a copy of the repository. The tests listed for its file
run there, without those marked slow, until the first failure. A fault that no test notices has survived. Every list of
tests must first pass on the unchanged copy. Results go to `seeded_faults.json`, which is updated after every fault.

The exit status is 1 if a fault survives.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parent.parent
FAULTS = Path(__file__).with_suffix(".yaml")
RESULT = Path(__file__).with_suffix(".json")
FIRST_FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


class Fault(NamedTuple):
    """One change to one file, and the tests that should notice it."""

    path: str
    what: str
    old: str
    new: str
    tests: tuple[str, ...]


def read_faults(only: str = "") -> list[Fault]:
    """The faults whose path or description contains a text.

    Raises:
        ValueError: The code to replace is not in its file exactly once.
    """
    faults = []
    for path, section in yaml.safe_load(FAULTS.read_text(encoding="utf-8")).items():
        code = (ROOT / path).read_text(encoding="utf-8")
        for entry in section["faults"]:
            if (found := code.count(entry["old"])) != 1:
                raise ValueError(f"{path}: {entry['old']!r} occurs {found} times, but must occur once.")
            faults.append(Fault(path, entry["what"], entry["old"], entry["new"], tuple(section["tests"])))
    return [fault for fault in faults if only in f"{fault.path} {fault.what}"]


def copy_repository(folder: Path) -> None:
    """Copy every tracked file."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)


def run_tests(folder: Path, tests: tuple[str, ...]) -> tuple[bool, str, float]:
    """Whether the tests pass in a copy, what pytest printed, and the seconds taken."""
    environment = os.environ | {
        **{"PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
    }
    files = [f"tests/{name}.py" for name in tests]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    start = time.perf_counter()
    done = subprocess.run([*command, *files], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1, 2):  # passed, failed, or could not be imported
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0, done.stdout, time.perf_counter() - start


def check_unchanged(folder: Path, tests: tuple[str, ...]) -> None:
    """Stop if the tests fail without a fault: they could not tell anything then.

    Raises:
        RuntimeError: They fail.
    """
    passed, printed, _ = run_tests(folder, tests)
    if not passed:
        raise RuntimeError(f"{', '.join(tests)} fail on the unchanged code:\n{printed[-3000:]}")


def try_fault(fault: Fault, folder: Path) -> dict[str, object]:
    """Seed a fault into a copy, run its tests, and restore the file."""
    path = folder / fault.path
    code = path.read_text(encoding="utf-8")
    path.write_text(code.replace(fault.old, fault.new), encoding="utf-8")
    try:
        passed, printed, seconds = run_tests(folder, fault.tests)
    finally:
        path.write_text(code, encoding="utf-8")
    failure = FIRST_FAILURE.search(printed)
    caught_by = None if passed else failure[1] if failure else "collection"
    return {
        **{"path": fault.path, "what": fault.what, "old": fault.old, "new": fault.new},
        **{"caught": not passed, "caught_by": caught_by, "seconds": round(seconds, 1)},
    }


def try_all(faults: list[Fault], folder: Path) -> Iterator[dict[str, object]]:
    """Try faults one after the other in one copy, each list of tests first without a fault."""
    copy_repository(folder)
    checked = set()
    for fault in faults:
        if fault.tests not in checked:
            check_unchanged(folder, fault.tests)
            checked.add(fault.tests)
        yield try_fault(fault, folder)


def main() -> int:
    """Try the faults, print each result, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="try only faults whose path or description contains this text")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the repository to work in at the same time")
    options = parser.parse_args()
    faults = read_faults(options.only)
    earlier = json.loads(RESULT.read_text(encoding="utf-8")) if options.only and RESULT.exists() else []
    known = {(row["path"], row["what"]): row for row in earlier}
    paths = sorted({fault.path for fault in faults})  # one copy takes all faults of a file: it checks their tests once

    def work(job: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for row in try_all(
                [fault for fault in faults if paths.index(fault.path) % options.jobs == job], Path(folder)
            ):
                known[row["path"], row["what"]] = row
                verdict = f"caught by {row['caught_by']}" if row["caught"] else "SURVIVED"
                print(f"{row['path']}: {row['what']}: {verdict} ({row['seconds']} s)", flush=True)
                RESULT.write_text(json.dumps(sorted(known.values(), key=lambda row: row["path"]), indent=1) + "\n")

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(work, range(options.jobs)))
    survivors = [row for row in known.values() if not row["caught"]]
    print(f"{len(known) - len(survivors)} of {len(known)} faults caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
