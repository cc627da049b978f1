"""Tables of `minilm_finetune.py`."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from minilm_finetune_tasks import TASKS
from tasks.metrics import TITLES

from luna_hf.scripting import markdown_table

Runs = dict[tuple[str, str], list[dict[str, Any]]]  # of every seed, by task and contender


def text(result: dict[str, Any]) -> str:
    """All tables that have results."""
    runs: Runs = {}
    for run in result["runs"]:
        runs.setdefault((run["task"], run["contender"]), []).append(run)
    found = {
        f"Finetuned, {which} texts: the score x 100, mean and standard deviation over the seeds": scores(runs, is_long)
        for which, is_long in (("short", False), ("long", True))
    }
    found["A masked-LM head: masked tokens of Wikipedia, held out"] = masked(runs)
    return "\n\n".join(f"{title}:\n\n{table}" for title, table in found.items() if table)


def scores(runs: Runs, is_long: bool) -> str:
    """A row for each task and a column for each contender; the last row of the short ones is the mean."""
    tasks = [name for name, task in TASKS.items() if task.is_long is is_long and any(name == own for own, _ in runs)]
    names = ordered(name for task, name in runs if task in tasks)
    rows = []
    for task in tasks:
        own = {name: runs[task, name] for name in names if (task, name) in runs}
        # Where a text is cut, questions without their answer are left out.
        largest = max((found[0] for found in own.values()), key=lambda run: run["rows"][0])
        rows.append([*head(task, largest), *(cell(task, own.get(name, [])) for name in names)])
    if len(tasks) > 1 and not is_long:  # of the long tasks, one has answers and the others classes
        rows.append(["mean", "", "", "", *(mean(runs, tasks, name) for name in names)])
    return markdown_table(["", "metric", "training rows x epochs", "guess", *names], rows) if rows else ""


def ordered(names: Iterable[str]) -> list[str]:
    """Contenders: the teacher first, then each conversion before its own variants."""
    found = list(dict.fromkeys(names))
    return sorted(found, key=lambda name: (name.partition(", ")[0] != "teacher", name))


def head(task: str, run: dict[str, Any]) -> list[str]:
    """What stands before the scores of a task."""
    guess, metric = run["baseline"], TASKS[task].metric
    rows = f"{run['rows'][0]:,} x {run['epochs']}"
    return [TASKS[task].title, TITLES.get(metric, metric), rows, "-" if guess is None else f"{guess:.1f}"]


def values(task: str, runs: Sequence[dict[str, Any]]) -> list[float]:
    """The metric of a task for each seed."""
    return [run["scores"][TASKS[task].metric] for run in runs]


def cell(task: str, runs: Sequence[dict[str, Any]]) -> str:
    """Mean and standard deviation; without the latter, one seed was run."""
    found = values(task, runs)
    if len(found) < 2:
        return "".join(f"{value:.1f}" for value in found) or "-"
    return f"{statistics.mean(found):.1f} ± {statistics.stdev(found):.1f}"


def mean(runs: Runs, tasks: Sequence[str], name: str) -> str:
    """The mean over all tasks of a table, or a dash."""
    if not all((task, name) in runs for task in tasks):
        return "-"
    return f"{statistics.mean(statistics.mean(values(task, runs[task, name])) for task in tasks):.1f}"


def masked(runs: Runs) -> str:
    """Accuracy and loss of the masked-LM heads, and of the frequencies of tokens."""
    found = {name: own[0] for (task, name), own in runs.items() if task == "mlm"}
    if not found:
        return ""
    rows = [["unigram baseline", "", *figures(next(iter(found.values()))["unigram"])]]
    rows += [[name, f"{run['tokens']:,}", *figures(run["scores"])] for name, run in found.items()]
    return markdown_table(["", "training tokens", "accuracy, %", "loss, nats"], rows)


def figures(own: dict[str, float]) -> list[str]:
    """Accuracy and loss."""
    return [f"{own['score']:.1f}", f"{own['loss']:.2f}"]
