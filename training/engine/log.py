"""The log of a run: `log.jsonl`, one JSON object a line."""

import json
from pathlib import Path
from typing import Any

from luna_hf.scripting import write_text


class RunLog:
    """Entries on file and in memory; only the main process writes the file."""

    def __init__(self, path: Path, is_main_process: bool, resume_step: int | None = None) -> None:
        """Start a log, or resume one: entries after `resume_step` are dropped, since they are made again."""
        self.entries = [] if resume_step is None else [e for e in read_log(path) if e["step"] <= resume_step]
        self.path = path if is_main_process else None
        if self.path:
            write_text(self.path, "".join(json.dumps(entry) + "\n" for entry in self.entries))

    def add(self, kind: str, step: int, **values: Any) -> None:
        """Append an entry of kind "train", "held_out", "probe", "objective" or "resumed"."""
        entry = {"kind": kind, "step": step, **values}
        self.entries.append(entry)
        if self.path:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    def series(self, kind: str, value: str, against: str = "step") -> tuple[list[float], list[float]]:
        """Steps (or another value) and values of the entries of a kind."""
        entries = [entry for entry in self.entries if entry["kind"] == kind]
        return [entry[against] for entry in entries], [entry[value] for entry in entries]


def read_log(path: Path) -> list[dict[str, Any]]:
    """Entries of a log, without a last line that a kill has cut short."""
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            entries.append(json.loads(line))
        except ValueError:
            break
    return entries
