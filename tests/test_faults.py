"""Every command against every kind of fault: it ends as if nothing had happened, or refuses in one line.

    make test-faults

A case disturbs a run, or what it has left or reads, and then starts the same command again. Its outcome is

    exact       the command leaves the same files as an undisturbed run, bit by bit (but for times)
    refused     it exits with 2 and one line that names the file or folder, and changes nothing
    lost        anything else: another result, a traceback, a run that hangs

and no case may be lost. The commands are the rows of `fault_table.py`, the kinds of faults are `KINDS` below.
"""

import functools
import itertools
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from fault_table import ROWS, Row
from faults import Moment, Place, differences, mount_disk
from helpers import ROOT
from processes import exit_code, started

EXACT, REFUSED, LOST = "exact", "refused", "lost"
KILLS, SIGNALS, TIMED, HELD = 8, 3, 2, 3  # cases of a kind for each command
SIZES = (0.1, 0.3, 0.6, 0.9, 1.3, 1.6)  # of a small disk, relative to what a finished run needs


class Case(NamedTuple):
    """What was done, what came of it, and what a failure reports."""

    name: str
    outcome: str
    detail: str = ""


@dataclass
class Stage:
    """A command with its undisturbed run."""

    name: str
    row: Row
    place: Place
    expected: dict[str, Any]
    printed: str
    changes: list[str]
    seconds: float

    def again(self, name: str, *named: str, allowed: Sequence[str] = (EXACT, REFUSED), before: str = "") -> Case:
        """The outcome of the same command once more; a refusal must name one of `named`.

        Lines of a damaged log may be missing if the run has named the log.
        """
        found, detail = self.place.left(), before
        ended = self.place.run()
        left, told = self.place.left(), ended.told
        if ended.code == 0 and "log.jsonl" in named and "out/log.jsonl" in ended.out + ended.err:
            left["out/log.jsonl"] = self.expected["out/log.jsonl"]
        harm = [name for name in differences(left, found) if not re.search(r"unfinished|building", name)]
        detail += f"\nharm {harm[:8]}, expected {allowed}, found {ended.short}"
        complete = not differences(left, self.expected)
        if not self.expected:  # a command that only prints
            complete = ended.out == self.printed
        if complete and (ended.code == 0 or (told and self.expected)):  # a finished run may be refused
            outcome = EXACT
        elif told and not harm and (not named or any(word in told for word in named)):
            outcome = REFUSED
        else:
            outcome, detail = LOST, f"{detail}\ndifferent: {differences(left, self.expected)[:8]}\nnamed: {named}"
        return Case(name, outcome if outcome in allowed else LOST, detail)

    def interrupted(self) -> Path:
        """A snapshot of a run that was killed when it had two checkpoints, and what it reads as it was then."""
        target = self.place.folder / "interrupted"
        if not target.exists():
            self.place.reset()
            wanted = [number for number, change in enumerate(self.changes, 1) if re.search(self.row.last, change)]
            assert self.place.run(Moment(wanted[0], signal.SIGKILL)).code == -signal.SIGKILL
            self.place.snapshot(target.name)
        return target

    def finished(self) -> Path:
        """A snapshot of the undisturbed run."""
        return self.place.folder / "finished"


@functools.cache
def stage(name: str, folder: Path) -> Stage:
    """The undisturbed run of a row."""
    row = ROWS[name]
    place = Place(folder / re.sub(r"\W+", "-", name), row.module, row.words)
    row.make(place.folder / "inputs")
    began = time.monotonic()
    ended = place.run()
    assert ended.code == 0, ended.short
    seconds = time.monotonic() - began
    place.snapshot("finished")
    return Stage(name, row, place, place.left(), ended.out, ended.changes, seconds)


def moments(changes: list[str], count: int) -> list[int]:
    """Numbers of changes, evenly spread over the different ones: a change of every file, of one checkpoint of many."""
    kinds: dict[str, list[int]] = {}
    for number, change in enumerate(changes, 1):
        kinds.setdefault(re.sub(r"[0-9a-f]*\d[0-9a-f]*", "#", re.sub(r"\w+\.py", ".py", change)), []).append(number)
    chosen = [numbers[index % len(numbers)] for index, numbers in enumerate(kinds.values())]
    places = sorted({round(place) for place in np.linspace(0, len(chosen) - 1, count)}) if chosen else []
    return [chosen[place] for place in places]


# ---- kinds of faults ----


def killed(on: Stage) -> Iterator[Case]:
    """SIGKILL at a change of a file, and at random times."""
    for number in moments(on.changes, KILLS):
        on.place.reset()
        ended = on.place.run(Moment(number, signal.SIGKILL))
        assert ended.code == -signal.SIGKILL, f"change {number} did not come: {ended.short}"
        yield on.again(f"change {number}, {on.changes[number - 1]}", allowed=(EXACT,), before=str(ended.changes[-1:]))
    for share in np.random.default_rng(0).uniform(0.2, 1, TIMED):
        on.place.reset()
        process = on.place.start()
        time.sleep(share * on.seconds)
        process.kill()
        yield on.again(f"after {share:.0%}", allowed=(EXACT,), before=str(on.place.end(process).changes[-1:]))


def killed_twice(on: Stage) -> Iterator[Case]:
    """SIGKILL, and SIGKILL again in the run that continues."""
    numbers = moments(on.changes, 2 * HELD)[1::2]
    for number in numbers:
        on.place.reset()
        assert on.place.run(Moment(number, signal.SIGKILL)).code == -signal.SIGKILL
        on.place.run(Moment(max(number // 3, 1), signal.SIGKILL))  # which may end first
        yield on.again(f"changes {number} and {number // 3}", allowed=(EXACT,))


def _signalled(on: Stage, number: int) -> Iterator[Case]:
    for moment in moments(on.changes, SIGNALS + 2)[1:-1]:
        on.place.reset()
        ended = on.place.run(Moment(moment, number))
        case = on.again(f"change {moment}, {on.changes[moment - 1]}", allowed=(EXACT,), before=ended.short)
        clean = "Traceback" not in ended.out + ended.err and ended.code in (0, -number, 128 + number)
        yield case if clean else Case(case.name, LOST, ended.short)


def terminated(on: Stage) -> Iterator[Case]:
    """SIGTERM."""
    return _signalled(on, signal.SIGTERM)


def interrupted(on: Stage) -> Iterator[Case]:
    """Ctrl-C."""
    return _signalled(on, signal.SIGINT)


def spoilt(content: bytes, editable: bool) -> dict[str, bytes]:
    """A file's content, damaged in several ways; with `editable`, one of its numbers is also another."""
    middle = len(content) // 2
    flipped = bytes(byte ^ 0xFF for byte in content[middle : middle + 4])
    ways = {
        "flipped bytes": content[:middle] + flipped + content[middle + 4 :],
        "cut in half": content[:middle],
        "empty": b"",
    }
    if editable and (digit := re.search(rb"\d", content)):
        ways["edited"] = content[: digit.start()] + b"%d" % ((int(digit[0]) + 1) % 10) + content[digit.end() :]
    return {way: new for way, new in ways.items() if new != content}


def _damaged(on: Stage, snapshot: Path, wanted: Callable[[Path], bool], edited: bool = True) -> Iterator[Case]:
    names = [path.relative_to(snapshot) for path in sorted(snapshot.rglob("*")) if path.is_file()]
    for name in filter(wanted, names):
        ways = spoilt((snapshot / name).read_bytes(), edited and name.suffix == ".json")
        if "checkpoint" in name.parent.as_posix():
            ways["missing"] = None
        for way, content in ways.items():
            on.place.reset(snapshot)
            path = on.place.folder / "disk" / name
            path.unlink() if content is None else path.write_bytes(content)
            yield on.again(f"{name}: {way}", name.name, name.parent.name, "disk/out")


def damaged_run(on: Stage) -> Iterator[Case]:
    """Damaged files of an interrupted run: of the newest checkpoint, older weights, log, settings, tokenizer."""
    if not on.row.last:
        return
    snapshot = on.interrupted()
    steps = {path: path.name.rpartition("-")[2] for path in snapshot.glob(on.row.checkpoints)}
    newest = max((path for path, step in steps.items() if step.isdigit()), key=lambda path: int(steps[path]))

    def wanted(name: Path) -> bool:
        inside = name.is_relative_to(newest.relative_to(snapshot))
        inside |= "checkpoint" in name.parent.as_posix() and name.suffix == ".safetensors"  # of which one is the best
        top = not re.search(r"checkpoint", name.as_posix()) and name.parts[0] == "out"
        return (inside or top) and name.suffix not in (".py", ".lock", ".md") and not name.name.startswith(".")

    on.place.reset(snapshot)
    resumed = on.place.run().out  # damage to a checkpoint that is not read would prove nothing
    assert re.search(rf"from \S*{newest.name}\b", resumed), resumed[-1000:]
    yield from _damaged(on, snapshot, wanted)


def damaged_cache(on: Stage) -> Iterator[Case]:
    """Damaged files of the tokenized text, in an interrupted run."""
    if (on.finished() / "cache").exists():
        yield from _damaged(on, on.interrupted(), lambda name: name.parts[0] == "cache")


def damaged_result(on: Stage) -> Iterator[Case]:
    """Damaged files of a finished run that tell later runs that it is finished."""
    if on.row.last:
        yield from _damaged(
            on, on.finished(), lambda name: name.name in ("run.json", "settings.json", "metrics.json"), edited=False
        )


def damaged_model(on: Stage) -> Iterator[Case]:
    """A cut or empty file of a model that the command reads; exact if it needs no such file."""
    for model in on.row.models:
        for path in sorted((on.place.folder / "inputs" / model).iterdir()):
            if path.suffix not in (".json", ".safetensors", ".pt"):
                continue
            content = path.read_bytes()
            for way, part in (("cut in half", content[: len(content) // 2]), ("empty", b"")):
                path.write_bytes(part)
                on.place.reset()
                yield on.again(f"{model}/{path.name}: {way}", path.name, f"inputs/{model}")
            path.write_bytes(content)


def full_disk(on: Stage) -> Iterator[Case]:
    """No space left, and the same command when there is space again."""
    if not on.expected:
        return
    need = sum(-(-path.stat().st_size // 4096) * 4096 for path in on.finished().rglob("*") if path.is_file())
    for share in SIZES:
        on.place.reset()
        ended = on.place.run_on_small_disk(size := int(share * need) // 4096 * 4096 + 4096)
        if ended.code == 0:
            continue
        case = on.again(f"{size} bytes", allowed=(EXACT,), before=ended.short)
        yield case if ended.told else Case(case.name, LOST, ended.short)


def two_runs(on: Stage) -> Iterator[Case]:
    """The same command while it runs: one of the two is refused and the other exact, or both are."""
    locks = (number for number, change in enumerate(on.changes, 1) if re.match(r"open .*\.lock$", change))
    locked = next(locks, 0)
    for number in moments(on.changes, HELD + 2)[1:-1]:
        on.place.reset()
        first, second = on.place.run_held(Moment(number), on.place.run)
        assert second, f"change {number} did not come: {first.short}"
        both, different = (first, second), differences(on.place.left(), on.expected)
        refused = [one.told for one in both if one.code != 0]
        one_by_one = not refused and number <= locked  # the second ends before the first holds the folder
        outcome = EXACT if one_by_one else REFUSED if len(refused) == 1 and "disk/out" in refused[0] else LOST
        detail = "\n".join([f"different: {different}", *(one.short for one in both)])
        yield Case(f"change {number}, {on.changes[number - 1]}", LOST if different else outcome, detail)


def one_cache(on: Stage) -> Iterator[Case]:
    """Two runs into two folders that share the cache of the tokenized text: both are exact."""
    writing = [number for number, change in enumerate(on.changes, 1) if change.startswith("open cache/")]
    for number in writing[:: max(len(writing) // 2, 1)]:
        on.place.reset()
        other = ["--output_dir", "disk/other"]
        both = on.place.run_held(Moment(number), lambda other=other: on.place.run(words=other))
        left = on.place.left()
        for name in [name for name in left if name.startswith("other")]:
            same, names_folders = name.replace("other", "out", 1), name.endswith("metrics.json")
            if left.pop(name) != left.get(same) and not names_folders:
                left[name] = "different"
        different = differences(left, on.expected)
        fine = not different and [one and one.code for one in both] == [0, 0]
        detail = "\n".join([f"different: {different}", *(one.short for one in both if one)])
        yield Case(f"change {number}, {on.changes[number - 1]}", EXACT if fine else LOST, detail)


def changed_data(on: Stage) -> Iterator[Case]:
    """A data file that changes between a kill and the next run, which goes on with an option or the old data."""
    if not on.row.changes:
        return
    name, accept = on.row.changes
    path, snapshot = on.place.folder / name, on.interrupted()
    content, time_before = path.read_bytes(), path.stat().st_mtime_ns
    last = content.splitlines(keepends=True)[-1]
    ways = {"longer": content + (b"\n" if path.suffix == ".txt" else b"") + last, "same size": content.swapcase()}
    if path.suffix != ".txt":
        ways["same size"] = content.replace(b"token", b"nekot")
    for way, new in ways.items():
        on.place.reset(snapshot)
        path.write_bytes(new)
        case = on.again(f"{name}: {way}", path.name, f"inputs/data ({path.stem})", allowed=(REFUSED,))
        accepted = on.place.run(words=accept) if case.outcome == REFUSED else None
        path.write_bytes(content)
        os.utime(path, ns=(time_before, time_before))
        on.place.reset(snapshot)
        restored = on.again(f"{name}: restored", allowed=(EXACT,))
        if accepted and accepted.code:
            case = Case(f"{name}: {way}, accepted", LOST, accepted.short)
        yield restored if restored.outcome == LOST else case


def changed_data_of_a_finished_run(on: Stage) -> Iterator[Case]:
    """A data file that changes after the end of a run."""
    if not on.row.changes:
        return
    name, _ = on.row.changes
    path = on.place.folder / name
    content, time_before = path.read_bytes(), path.stat().st_mtime_ns
    on.place.reset(on.finished())
    path.write_bytes(content + content.splitlines(keepends=True)[-1])
    ended = on.place.run()
    path.write_bytes(content)
    os.utime(path, ns=(time_before, time_before))
    kept = not differences(on.place.left(), on.expected)
    yield Case(name, REFUSED if ended.told and kept else LOST, ended.short)


KINDS: dict[str, Callable[[Stage], Iterator[Case]]] = {
    "killed at any moment": killed,
    "killed twice": killed_twice,
    "SIGTERM": terminated,
    "Ctrl-C": interrupted,
    "damaged files of an interrupted run": damaged_run,
    "damaged token cache": damaged_cache,
    "damaged results": damaged_result,
    "damaged model to read": damaged_model,
    "full disk": full_disk,
    "two runs into one folder": two_runs,
    "two runs that share a cache": one_cache,
    "data changed before a resume": changed_data,
    "data changed after the end": changed_data_of_a_finished_run,
}


@functools.cache
def disk_can_be_limited(folder: Path) -> bool:
    """Whether this machine allows a process to mount a disk for itself."""
    (folder / "trial").mkdir()
    return exit_code(started(mount_disk, folder / "trial", 1 << 20)) == 0


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ROWS])
def test_no_run_is_lost(name, kind, folder, record_property):
    if kind == "full disk" and not disk_can_be_limited(folder):
        pytest.skip("neither root nor user namespaces: no small disk can be mounted")
    on = stage(name, folder)
    cases = list(KINDS[kind](on))
    counts = {outcome: sum(case.outcome == outcome for case in cases) for outcome in (EXACT, REFUSED, LOST)}
    record_property("faults", {"command": name, "kind": kind, "tried": len(cases), **counts})
    lost = [f"{case.name}\n{case.detail}" for case in cases if case.outcome == LOST]
    if lost:
        pytest.fail("\n\n".join([f"{len(lost)} of {len(cases)} cases lost", *lost]), pytrace=False)


def test_every_command_has_a_row():
    scripts = {path.stem for folder in ("training", "conversion") for path in (ROOT / folder).glob("*.py")}
    commands = {
        name
        for name in scripts
        if 'if __name__ == "__main__":' in next(ROOT.glob(f"[tc][ro]*/{name}.py")).read_text(encoding="utf-8")
    }
    assert commands == {row.module for row in ROWS.values()}


def test_the_committed_result_covers_the_table():
    kinds = json.loads(Path(__file__).with_name("faults.json").read_text(encoding="utf-8"))["kinds"]
    assert {(row["command"], row["kind"]) for row in kinds} == set(itertools.product(ROWS, KINDS))
    assert sum(row["tried"] for row in kinds) > 500 and not any(row["lost"] for row in kinds)
