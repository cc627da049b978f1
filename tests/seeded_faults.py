"""Seed faults into the code, one at a time, and see whether the fast tests catch them.

    python tests/seeded_faults.py                          # every fault; about an hour of one core
    python tests/seeded_faults.py --only causal_memory     # those whose path or description contains the text

Each fault of `seeded_faults.yaml` replaces one piece of code in a copy of the repository. The tests listed for its file
run there, without those marked slow, until the first failure. The test that failed must pass once the fault is removed.
A fault that no test notices has survived. Results go to `seeded_faults.json`, which is updated after every fault.

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
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import yaml

from luna_hf.scripting import write_json

ROOT = Path(__file__).resolve().parent.parent
FAULTS = Path(__file__).with_suffix(".yaml")
RESULT = Path(__file__).with_suffix(".json")
FIRST_FAILURE = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


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
            names = dict.fromkeys([*entry.get("first", "").split(), *section["tests"]])
            tests = tuple(f"tests/{name}.py" for name in names)
            if (found := code.count(entry["old"])) != 1:
                raise ValueError(f"{path}: {entry['old']!r} occurs {found} times, but must occur once.")
            faults.append(Fault(path, entry["what"], entry["old"], entry["new"], tests))
    return [fault for fault in faults if only in f"{fault.path} {fault.what}"]


def copy_repository(folder: Path) -> None:
    """Copy every tracked file."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)


def run_tests(folder: Path, tests: Iterable[str]) -> tuple[str | None, float]:
    """The first of the tests that fails in a copy, or `None`, and the seconds taken.

    Raises:
        RuntimeError: pytest could not run them.
    """
    environment = os.environ | {
        **{"PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    start = time.perf_counter()
    done = subprocess.run([*command, *tests], cwd=folder, env=environment, capture_output=True, text=True)
    failure = FIRST_FAILURE.search(done.stdout)
    if done.returncode not in (0, 1, 2) or bool(done.returncode) != bool(failure):  # passed, failed, import error
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return failure[1] if failure else None, time.perf_counter() - start


def try_fault(fault: Fault, folder: Path) -> dict[str, object]:
    """Seed a fault into a copy, run its tests, and restore the file.

    Raises:
        RuntimeError: The test that failed does so without the fault as well.
    """
    path = folder / fault.path
    code = path.read_text(encoding="utf-8")
    path.write_text(code.replace(fault.old, fault.new), encoding="utf-8")
    try:
        caught_by, seconds = run_tests(folder, fault.tests)
    finally:
        path.write_text(code, encoding="utf-8")
    if caught_by and run_tests(folder, [caught_by])[0]:
        raise RuntimeError(f"{caught_by} fails without the fault, too.")
    return {
        **{"path": fault.path, "what": fault.what, "old": fault.old, "new": fault.new},
        **{"caught_by": caught_by, "seconds": round(seconds, 1)},
    }


def main() -> int:
    """Try the faults, print each result, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="try only faults whose path or description contains this text")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the repository to work in at the same time")
    options = parser.parse_args()
    faults = read_faults(options.only)
    earlier = json.loads(RESULT.read_text(encoding="utf-8")) if options.only and RESULT.exists() else []
    known = {(row["path"], row["what"]): row for row in earlier}

    def work(job: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            copy_repository(Path(folder))
            for fault in faults[job :: options.jobs]:
                row = known[fault.path, fault.what] = try_fault(fault, Path(folder))
                verdict = f"caught by {row['caught_by']}" if row["caught_by"] else "SURVIVED"
                print(f"{fault.path}: {fault.what}: {verdict} ({row['seconds']} s)", flush=True)
                write_json(RESULT, sorted(known.values(), key=lambda row: (row["path"], row["what"])))

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(work, range(options.jobs)))
    survivors = [row for row in known.values() if not row["caught_by"]]
    print(f"{len(known) - len(survivors)} of {len(known)} faults caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
