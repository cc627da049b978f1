"""Runs of a command in a forked process, disturbed at chosen moments, and what they leave (see test_faults.py).

Every case starts in one folder, so that paths are the same in every case:

    inputs/     what the command reads
    disk/       what it writes: `out`, for pretraining `cache`, and `datasets`, the cache of that library
    tmp/        temporary files
"""

import ctypes
import gc
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from processes import exit_code, started

from luna_hf.scripting import markdown_table

# What differs between two undisturbed runs: times, and how often a run was resumed.
_VOLATILE = re.compile(r"second|per_second|mfu|runtime|date|resumed|machine|peak|load", re.IGNORECASE)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate"}
_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000  # flags of unshare(2)
SECONDS = 120


class Moment(NamedTuple):
    """What to do before the n-th change of a file below `disk`, counted from 1: send a signal, or wait for `go`."""

    number: int
    signal: int = 0


class Ended(NamedTuple):
    """How a run ended; `changes` are the changes of files below `disk`, in order."""

    code: int | None
    out: str
    err: str
    changes: list[str]

    @property
    def told(self) -> str:
        """The error line of a run that refused, or an empty text: one line, the last one, without a traceback."""
        lines = self.err.strip().splitlines() or [""]
        errors = [line for line in lines if line.startswith("error: ")]
        clean = self.code == 2 and errors == lines[-1:] and "Traceback" not in self.out + self.err
        return lines[-1] if clean else ""

    @property
    def short(self) -> str:
        """For a failure's report."""
        lines = [line for line in (self.out + self.err).splitlines() if line.strip() and "%|" not in line]
        return "\n".join([f"exit {self.code}", *lines[-12:]])


# ---- in the process of the command ----


def _command(folder: str, module: str, words: Sequence[str], moment: Moment | None, name: str) -> None:
    """Run a command from the folder of the case; its output goes to files beside it."""
    os.chdir(folder)
    for descriptor, suffix in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{name}.{suffix}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    gc.freeze()  # what the server has imported
    import datasets
    from tiny_training import start

    tempfile.tempdir = str(Path("tmp").absolute())
    datasets.config.HF_DATASETS_CACHE = Path("disk/datasets").absolute()
    sys.argv = [f"{module}.py", *words]
    script = importlib.import_module(module)
    _watch(Path(folder) / "disk", open(f"{name}.changes", "w", buffering=1), moment, name)  # noqa: SIM115
    sys.exit(start(script, list(words)))


def _watch(root: Path, record: Any, moment: Moment | None, name: str) -> None:
    """Write every change of a file below `root` to `record`, and act before one of them."""
    count, inside = 0, False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count, inside
        if inside or not (event in _CHANGES or (event == "open" and arguments[2] & _WRITES)):
            return
        path = _path(event, arguments)
        if path is None or not path.is_relative_to(root) or path.is_relative_to(root / "datasets"):
            return
        inside, count = True, count + 1
        record.write(f"{event} {path.relative_to(root)}\n")
        if moment and count == moment.number:
            if moment.signal:
                os.kill(os.getpid(), moment.signal)
            else:
                _wait(f"{name}.go", f"{name}.held")
        inside = False

    sys.addaudithook(hook)


def _path(event: str, arguments: tuple[Any, ...]) -> Path | None:
    """The path of an audit event; within an open folder if it has the descriptor of one, as in `shutil.rmtree`."""
    path, place = arguments[0], Path.cwd()
    if event in ("os.remove", "os.rmdir") and arguments[1] != -1:
        place = Path(os.readlink(f"/proc/self/fd/{arguments[1]}"))
    return place / path if isinstance(path, str | os.PathLike) else None


def _wait(go: str, held: str) -> None:
    Path(held).touch()
    while not Path(go).exists():
        time.sleep(0.01)


def _command_on_small_disk(folder: str, module: str, words: Sequence[str], size: int, name: str) -> None:
    """Run a command on a disk of `size` bytes (a tmpfs, in a mount namespace), and copy what it left to `after`."""
    mount_disk(Path(folder) / "disk", size)
    child = os.fork()
    if not child:
        _command(folder, module, words, None, name)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    shutil.copytree(Path(folder) / "disk", Path(folder) / "after", symlinks=True)
    sys.exit(code)


def mount_disk(place: Path, size: int) -> None:
    """Mount a disk of `size` bytes with the content of a folder in its place, for this process only.

    Raises:
        OSError: The system allows it neither to this user nor in a user namespace.
    """
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()

    def call(function: str, *arguments: Any) -> None:
        if getattr(libc, function)(*arguments):
            raise OSError(ctypes.get_errno(), function)

    before = place.with_name("before")
    shutil.copytree(place, before)
    if user:
        call("unshare", _NEW_USER | _NEW_MOUNTS)
        for file, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path(f"/proc/self/{file}").write_text(text)
    else:
        call("unshare", _NEW_MOUNTS)
    private = 1 << 18 | 1 << 14  # MS_PRIVATE, MS_REC
    call("mount", b"none", b"/", None, private, None)
    call("mount", b"tmpfs", str(place).encode(), b"tmpfs", 0, f"size={size}".encode())
    shutil.copytree(before, place, dirs_exist_ok=True)
    shutil.rmtree(before)


# ---- the folder of a case ----


@dataclass
class Place:
    """The folder in which the cases of one command run, one after the other, and snapshots of it."""

    folder: Path
    module: str
    words: list[str]

    def __post_init__(self) -> None:
        for name in ("inputs", "disk", "tmp"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def start(self, moment: Moment | None = None, words: Sequence[str] = (), name: str = "run") -> BaseProcess:
        """Start the command, with further words."""
        for suffix in ("out", "err", "changes", "held", "go"):
            (self.folder / f"{name}.{suffix}").unlink(missing_ok=True)
        return started(_command, str(self.folder), self.module, [*self.words, *words], moment, name)

    def end(self, process: BaseProcess, name: str = "run", seconds: float = SECONDS) -> Ended:
        """Wait for the end of a run; one that hangs is killed, and its exit code is -9."""
        code = exit_code(process, seconds)
        files = (self.folder / f"{name}.{suffix}" for suffix in ("out", "err", "changes"))
        texts = [path.read_text(errors="replace") if path.exists() else "" for path in files]
        return Ended(code, texts[0], texts[1], texts[2].splitlines())

    def run(self, moment: Moment | None = None, words: Sequence[str] = ()) -> Ended:
        """Run the command to its end, or to the moment that ends it."""
        return self.end(self.start(moment, words))

    def run_on_small_disk(self, size: int) -> Ended:
        """Run the command on a disk of `size` bytes, which has room again when this returns."""
        process = started(_command_on_small_disk, str(self.folder), self.module, self.words, size, "run")
        ended, after = self.end(process), self.folder / "after"
        if after.exists():
            shutil.rmtree(self.folder / "disk")
            after.rename(self.folder / "disk")
        return ended

    def run_held(self, moment: Moment, meanwhile: Callable[[], Ended]) -> tuple[Ended, Ended | None]:
        """Run the command, and something else while it waits at a moment."""
        process, other = self.start(moment, name="first"), None
        deadline = time.monotonic() + SECONDS
        while process.is_alive() and time.monotonic() < deadline:
            if (self.folder / "first.held").exists():
                other = meanwhile()
                break
            time.sleep(0.01)
        (self.folder / "first.go").touch()
        return self.end(process, "first"), other

    def reset(self, snapshot: Path | None = None) -> None:
        """Empty the disk, or bring it back to a snapshot; temporary files are removed."""
        for name in ("disk", "tmp"):
            shutil.rmtree(self.folder / name)
        shutil.copytree(snapshot, self.folder / "disk") if snapshot else (self.folder / "disk").mkdir()
        (self.folder / "tmp").mkdir()

    def snapshot(self, name: str) -> Path:
        """A copy of the disk."""
        shutil.rmtree(target := self.folder / name, ignore_errors=True)
        return shutil.copytree(self.folder / "disk", target)

    def left(self) -> dict[str, Any]:
        """The files below `disk` as far as they are the same after every undisturbed run.

        A kill leaves a lock file, which is as good as none.
        """
        disk = self.folder / "disk"
        paths = (path for path in sorted(disk.rglob("*")) if path.is_file())
        names = {path: path.relative_to(disk).as_posix() for path in paths}
        kept = {path: name for path, name in names.items() if not re.search(r"^datasets/|\.lock$", name)}
        return {name: _content(path) for path, name in kept.items()}


def _content(path: Path) -> Any:
    """What must be equal of a file: everything but times, and plots and cards, which print them."""
    if path.suffix in (".png", ".md"):
        return None
    try:
        if path.suffix == ".jsonl":
            rows = [_steady(json.loads(line)) for line in path.read_text().splitlines()]
            return [row for row in rows if not (isinstance(row, dict) and row.get("kind") == "resumed")]
        if path.suffix == ".json":
            return _steady(json.loads(path.read_text()))
    except ValueError:  # damaged
        pass
    return path.read_bytes()


def _steady(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _steady(item) for key, item in value.items() if not _VOLATILE.search(key)}
    return [_steady(item) for item in value] if isinstance(value, list) else value


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Names of files that are missing, additional or different."""
    missing = object()
    return [name for name in {**expected, **found} if found.get(name, missing) != expected.get(name, missing)]


def tables(kinds: Sequence[dict[str, Any]]) -> str:
    """Outcomes for every command and kind of fault, summed by kind and by command."""
    outcomes, made = ("tried", "exact", "refused", "lost"), []
    for by, other in (("kind", "command"), ("command", "kind")):
        rows = []
        for name in dict.fromkeys(row[by] for row in kinds):
            own = [row for row in kinds if row[by] == name and row["tried"]]
            rows.append([name, len(own), *(sum(row[outcome] for row in own) for outcome in outcomes)])
        rows.append(["all", len({row[other] for row in kinds}), *(sum(row[o] for row in kinds) for o in outcomes)])
        made.append(markdown_table([by, f"{other}s", *outcomes], rows))
    return "\n\n".join(made)
