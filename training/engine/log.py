"""The log of a run: `log.jsonl`, one JSON object a line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from luna_hf.scripting import progress, write_text


class RunLog:
    """Entries on file and in memory; only the main process writes the file."""

    def __init__(self, path: Path, is_main_process: bool, resume_step: int | None = None) -> None:
        """Start a log, or resume one: entries after `resume_step` are dropped, since they are made again."""
        found = [] if resume_step is None else read_log(path, progress if is_main_process else None)
        self.entries = [entry for entry in found if entry["step"] <= resume_step]
        self.path = path if is_main_process else None
        if self.path:
            write_text(self.path, "".join(json.dumps(entry) + "\n" for entry in self.entries))

    def report_lost(self, expected: int, report: Callable[[str], None]) -> None:
        """Report entries that were in the log when the checkpoint was written, and are not any more."""
        if (lost := expected - len(self.entries)) > 0:
            report(f"{self.path} lacks {lost} of the {expected} entries before this checkpoint.")

    def add(self, kind: str, step: int, **values: Any) -> None:
        """Append an entry of kind "train", "held_out", "probe" or "resumed"."""
        entry = {"kind": kind, "step": step, **values}
        self.entries.append(entry)
        if self.path:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    def series(self, kind: str, value: str, against: str = "step") -> tuple[list[float], list[float]]:
        """Steps (or another value) and values of the entries of a kind that have both as numbers."""
        entries = [entry for entry in self.entries if entry["kind"] == kind]
        entries = [row for row in entries if all(isinstance(row.get(key), int | float) for key in (value, against))]
        return [entry[against] for entry in entries], [entry[value] for entry in entries]


def read_log(path: Path, report: Callable[[str], None] | None = None) -> list[dict[str, Any]]:
    """Entries of a log without damaged lines, which are reported, and without a last line that a kill has cut short."""
    entries = []
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line.decode("utf-8"))
            entries.append({"kind": entry["kind"], "step": int(entry["step"]), **entry})
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
            if report and line.endswith(b"\n"):
                report(f"Leaving out line {number} of {path}, which is damaged.")
    return entries
