"""Checkpoints of a run: written atomically, verified before they are read, rotated; and requests to stop.

    OUTPUT/checkpoints/step-00000300/     model, optimizer, schedule, random states, data position, counters
    OUTPUT/checkpoints/step-00000300/files.json     names, sizes and checksums of these files, written last

A checkpoint is written to a folder with another name, which is renamed when all of it is on disk. So a kill at any
moment leaves the earlier checkpoints intact.
"""

import logging
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from common.machine import plural
from common.optimizer import fitting
from common.seal import newest_intact, seal, sync

from engine.sharding import is_sharded, stored_classes
from luna_hf.scripting import UserError, is_disk_full, read_json, reason, write_json

_FOLDER = "checkpoints"
_PREFIX = "step-"
_UNFINISHED = ".unfinished"
_STATE = "state.json"


@dataclass
class Counters:
    """The progress of a run; `window` holds the losses since the last of the `logged` entries of the log."""

    step: int = 0
    seen_tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0
    window: list[float] = field(default_factory=list)
    processes: int = 1
    logged: int = 0


def checkpoints(output_dir: Path) -> list[Path]:
    """Finished checkpoints of a run, oldest first."""
    folder = output_dir / _FOLDER
    found = folder.glob(f"{_PREFIX}*") if folder.is_dir() else []
    return sorted(path for path in found if path.suffix != _UNFINISHED)


def newest_complete(output_dir: Path, log: Callable[[str], None], needed: bool = True) -> Path | None:
    """The newest intact checkpoint; damaged ones are logged and ignored.

    Raises:
        UserError: A checkpoint is `needed` and there are some, but every one is damaged.
    """
    found = checkpoints(output_dir)
    newest = newest_intact(reversed(found), log)
    if newest is None and found and needed:
        raise UserError(f"Every checkpoint in {output_dir / _FOLDER} is damaged: remove that folder to start again.")
    return newest


def save_checkpoint(
    accelerator: Accelerator,
    output_dir: Path,
    counters: Counters,
    record: dict[str, Any],
    data_state: dict[str, Any],
    keep: int,
) -> Path:
    """Write a checkpoint of everything that `accelerator` has prepared, and of this process's `data_state`.

    Called by every process. Once it is complete, only the newest `keep` checkpoints stay; if it fails, what was written
    is removed. `record` is compared with that of the run that resumes.
    """
    final = output_dir / _FOLDER / _name(counters.step)
    unfinished = final.with_name(final.name + _UNFINISHED)
    if accelerator.is_main_process:
        remove_unfinished(output_dir)
        unfinished.mkdir(parents=True)
    accelerator.wait_for_everyone()
    try:
        logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)  # it warns about tied weights at every save
        accelerator.save_state(str(unfinished))
        torch.save({"data": data_state, "random": torch.get_rng_state()}, unfinished / _data_file(accelerator))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            write_json(unfinished / _STATE, {"counters": asdict(counters), "record": record})
            seal(unfinished)
            _put_in_place(unfinished, final, keep)
    except Exception as error:
        shutil.rmtree(unfinished, ignore_errors=True)  # a full disk has room again
        if not is_disk_full(error):
            raise
        raise UserError(
            f"The disk is full: {final} cannot be written. Earlier checkpoints are intact; make room, and start again."
        ) from error
    accelerator.wait_for_everyone()
    return final


def _put_in_place(unfinished: Path, final: Path, keep: int) -> None:
    if final.exists():  # from before the run was resumed at an older one
        shutil.rmtree(final)
    os.replace(unfinished, final)
    sync(final.parent)
    # Newer ones are damaged, or the run would not be here: they do not count as kept.
    earlier = [path for path in checkpoints(final.parents[1]) if path <= final]
    for old in earlier[:-keep]:
        shutil.rmtree(old)


def intact_until(output_dir: Path, step: int, log: Callable[[str], None]) -> list[Path]:
    """Intact checkpoints up to a step, oldest first; damaged ones are logged. Later ones are of no run that went on."""
    found = [path for path in checkpoints(output_dir) if path.name <= _name(step)]
    return [path for path in found if newest_intact([path], log)]


def read_state(checkpoint: Path) -> tuple[Counters, dict[str, Any]]:
    """Counters of a checkpoint, and the `record` of its run.

    Raises:
        UserError: They are missing or damaged, or those of another checkpoint.
    """
    state = read_json(checkpoint / _STATE)
    found, record, defaults = state["counters"], state["record"], asdict(Counters())
    right = isinstance(found, dict) and isinstance(record, dict)
    right = right and all(isinstance(record.get(part, {}), dict) for part in ("recipe", "inputs"))
    known = {name: found[name] for name in defaults if name in found} if right else {}
    for name, value in known.items():
        kind = type(defaults[name])
        numbers, kind = (value, float) if kind is list and isinstance(value, list) else ([value], kind)
        right = right and all(type(number) in (kind, int) for number in numbers)
    if not right or _name(known.get("step", 0)) != checkpoint.name:
        raise UserError(f"{checkpoint / _STATE} is damaged (it is not that of {checkpoint.name}). Remove this folder.")
    return Counters(**known), record


def _name(step: int) -> str:
    """The folder of a checkpoint."""
    return f"{_PREFIX}{step:08}"


def load_checkpoint(accelerator: Accelerator, checkpoint: Path) -> dict[str, Any]:
    """Load a checkpoint into what `accelerator` has prepared, and return the data position of this process.

    A file of it may come from somebody else: commands read nothing but tensors and plain values (`run_script`).

    Raises:
        UserError: Another number of processes wrote it, so that the run could not be continued exactly; or its files
            do not fit the run, or hold code.
    """
    counters, _ = read_state(checkpoint)
    if counters.processes != accelerator.num_processes:
        raise UserError(
            f"{checkpoint.name} was written by {plural(counters.processes, 'process', 'processes')}, but this run has "
            f"{accelerator.num_processes}: start as many as before."
        )
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.serialization.safe_globals(stored_classes(accelerator)))
            for optimizer in [] if is_sharded(accelerator) else accelerator._optimizers:
                stack.enter_context(fitting(optimizer))
            accelerator.load_state(str(checkpoint))
        own = torch.load(checkpoint / _data_file(accelerator), weights_only=True)
        data, random = own["data"], own["random"]
        restored = torch.equal(torch.get_rng_state(), random)  # accelerate ignores what it cannot restore
    except Exception as error:  # a file of somebody else may hold anything
        raise UserError(f"{checkpoint} cannot be loaded: {reason(error)}. Remove this folder.") from error
    accelerator.step = 0  # counts the passes of an update, and checkpoints are written between updates
    if not restored:
        raise UserError(f"The random states in {checkpoint} cannot be restored on this machine.")
    return data


def remove_unfinished(output_dir: Path) -> None:
    """Remove what a kill during a save has left."""
    for path in (output_dir / _FOLDER).glob(f"{_PREFIX}*{_UNFINISHED}"):
        shutil.rmtree(path)


def remove_all(output_dir: Path) -> None:
    """Remove the checkpoints of a run that is finished or starts again; a kill leaves all of them or none."""
    removed = output_dir / f".{_FOLDER}.removed"
    shutil.rmtree(removed, ignore_errors=True)  # left by a kill
    with suppress(FileNotFoundError):
        (output_dir / _FOLDER).rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


class StopRequest:
    """Within this context, SIGTERM and SIGINT (Ctrl-C) ask the run to save and stop; a second one stops it at once."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        with suppress(ValueError):  # only the main thread may set handlers
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        self.__exit__()

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


def _data_file(accelerator: Accelerator) -> str:
    return f"data_{accelerator.process_index}.pt"
