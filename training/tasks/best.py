"""Which of one model's runs keeps its weights, and `best/<model>/`, the folder they end in.

The table names the setting with the best median over the seeds; the weights that are kept are those of the best run of
that setting. A setting's runs follow each other, so at most two runs hold weights at a time. At the end the chosen
model is copied to a hidden folder, which takes its place when it is complete; only then do the runs lose their weights.
"""

import shutil
from pathlib import Path

from luna_hf.scripting import write_json, writing
from tasks.plan import RUN_FILE, SETTINGS_FILE, read_run
from tasks.report import Result, choose, setting_of, write_card
from tasks.task import Job

# What every run leaves, with the logs of TensorBoard; the rest belongs to a model that can be loaded.
_LEFT = {RUN_FILE, SETTINGS_FILE, "predictions", "runs"}


def drop_losers(job: Job, results: list[Result]) -> None:
    """Remove the weights that can no longer be chosen, given one model's results in the order of the plan."""
    if not job.is_main:
        return
    current = setting_of(results[-1])
    parts = [[row for row in results if (setting_of(row) == current) == own] for own in (True, False)]
    chosen = [choose(part, job.task.greater_is_better) for part in parts]
    kept = [picked[0]["folder"] for picked in chosen if picked]
    for result in results:
        if result["folder"] not in kept:
            _strip(Path(result["folder"]))


def lost_best(job: Job, results: list[Result]) -> int | None:
    """Index of the chosen run if its weights are gone, because an earlier command with fewer runs chose another one.

    It no longer counts as finished.
    """
    if not (chosen := choose(results, job.task.greater_is_better)):
        return None
    best, kept = chosen[0], _folder(job, chosen[0])
    is_kept = _weights(kept) and read_run(kept).items() >= {**best, "folder": str(kept)}.items()
    if _weights(Path(best["folder"])) or is_kept:
        return None
    job.wait()
    if job.is_main:
        (Path(best["folder"]) / RUN_FILE).unlink()
    job.wait()
    return results.index(best)


def keep_best(job: Job, results: list[Result]) -> Path | None:
    """Bring the chosen model to `best/<model>/`, with a card that states from how many runs it was picked.

    Returns:
        The folder with the model: that of the run itself if it is the only one. `None` if every run diverged.
    """
    if not (chosen := choose(results, job.task.greater_is_better)):
        return None
    best, setting = chosen
    source, target = Path(best["folder"]), _folder(job, best)
    if len(results) == 1:
        return source
    if job.is_main:
        picked = {"runs": len(results), "settings": len(set(map(setting_of, results)))}
        picked |= {name: setting[name] for name in ("seeds", "median", "best", "worst")}
        for stale in target.parent.glob(f".{target.name}.*"):  # left by a kill
            shutil.rmtree(stale, ignore_errors=True)  # a lock file is none
        if _weights(source):
            with writing(target) as place:
                left_out = shutil.ignore_patterns(SETTINGS_FILE, "runs", "checkpoint-*", ".*")
                shutil.copytree(source, place, ignore=left_out, dirs_exist_ok=True)
        write_card(job, best, target, picked)
        content = {name: value for name, value in best.items() if name != "folder"}
        write_json(target / RUN_FILE, {**content, "picked": picked})
        for result in results:
            _strip(Path(result["folder"]))
    job.wait()
    return target


def _folder(job: Job, result: Result) -> Path:
    return job.folder / "best" / result["model"]


def _weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def _strip(folder: Path) -> None:
    """Remove a run's model and card; its scores, settings and predictions stay."""
    for path in folder.iterdir():
        if path.name not in _LEFT:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
