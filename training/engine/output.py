"""The output folder of a pretraining run."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from common.fingerprint import changed_files, fingerprint, model_files
from common.finish import check_end
from common.seal import sync
from data.corpus import Corpus

from engine.card import PLOT
from engine.checkpoint import checkpoints, newest_complete, read_state, remove_all
from engine.recipe import Recipe
from luna_hf.scripting import TOKENIZER_FILES, UserError, locked

_RESULTS = ("model.safetensors", "metrics.json", "README.md", PLOT)
T = TypeVar("T")


def on_main(accelerator: Accelerator, task: Callable[[], T]) -> T:
    """Run a task on the main process only, and return its result on every process.

    Raises:
        UserError, OSError: The task raises it; all processes do, so that none waits for the main process.
    """
    outcome: list[T | Exception | None] = [None]
    if accelerator.is_main_process:
        try:
            outcome = [task()]
        except (UserError, OSError) as error:
            outcome = [error]
    (result,) = broadcast_object_list(outcome)
    if isinstance(result, Exception):
        raise result
    return result


@contextmanager
def held(accelerator: Accelerator, folder: Path, repository: str = "") -> Iterator[None]:
    """Hold the output folder for this run; if nothing is written to a new one, it is removed again.

    Raises:
        UserError: It cannot be written, `repository` not be pushed to, or another run holds it; see `check_end`.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    with ExitStack() as stack:

        def hold() -> None:
            for path in reversed(made):  # a stack: the folder itself is removed first
                stack.callback(_remove_empty, path)
            check_end(folder, "`output_dir`", repository)
            stack.enter_context(locked(folder / ".lock"))

        on_main(accelerator, hold)
        yield


def find_checkpoint(recipe: Recipe, log: Callable[[str], None]) -> Path | None:
    """The checkpoint to resume from, or `None` for a run that starts.

    Raises:
        UserError: The folder cannot be written, is a checkpoint that the run reads, or holds a finished run, a run of
            another recipe, or files of something else.
    """
    folder = Path(recipe.output_dir)
    for key in ("model_name_or_path", "tokenizer", "teacher", "initial_weights", "initial_encoder"):
        source = getattr(recipe, key, "")
        if source and Path(source).resolve() == folder.resolve():
            raise UserError(f"`output_dir` {folder} is also `{key}` and would be overwritten. Name another folder.")
    # A kill may have stopped the removal of a finished run's checkpoints, which are of no use any more.
    finished = (folder / "metrics.json").is_file()
    if recipe.resume and (found := newest_complete(folder, log, needed=not finished)):
        other = recipe.differences(read_state(found)[1].get("recipe", {}))
        if other:
            raise UserError(
                f"`output_dir` {folder} holds checkpoints of a run with other values of {', '.join(other)}. Name "
                "another folder, restore the values, or start again (--no_resume --overwrite_output_dir)."
            )
        return found
    if recipe.resume and finished:
        remove_all(folder)
    # Hidden files are those that a kill left half written, and the lock. A run that stopped before its first checkpoint
    # has left no more than its tokenizer, its log and those of its trackers.
    present = {path.name for path in folder.iterdir() if not path.name.startswith(".")} - set(TOKENIZER_FILES)
    if present and "log.jsonl" not in present:
        raise UserError(
            f"`output_dir` {folder} holds files but no log.jsonl of an earlier run. Name another folder "
            "(--output_dir FOLDER)."
        )
    begun = {"log.jsonl", recipe.model_name} | ({"checkpoints"} if not checkpoints(folder) else set())
    if present - begun and not recipe.overwrite_output_dir:
        state = "a finished run" if finished else f"an earlier run ({min(present - begun)})"
        raise UserError(
            f"`output_dir` {folder} holds {state}. Name another folder (--output_dir FOLDER), or overwrite it "
            "(--overwrite_output_dir)."
        )
    return None


def fingerprint_inputs(recipe: Recipe, corpus: Corpus) -> dict[str, str]:
    """The content of what a run reads again when it resumes: text, the tokenizer in its folder, the teacher, and the
    config of the model that it starts from.
    """
    folder, names = Path(recipe.output_dir), []
    teacher, start = _models(recipe)
    if teacher and Path(teacher).is_dir():
        names = model_files(Path(teacher))
    if start and Path(start, "config.json").is_file():
        names = [Path(start, "config.json")]
    return {**corpus.fingerprint(), **fingerprint_tokenizer(folder), **fingerprint(names)}


def _models(recipe: Recipe) -> tuple[str, str]:
    """The teacher of a run and the model that it starts from, as far as it has them."""
    return getattr(recipe, "teacher", "") or "", getattr(recipe, "model_name_or_path", "") or ""


def fingerprint_tokenizer(folder: Path) -> dict[str, str]:
    """The content of the tokenizer in an output folder, without the folder's name, since it may be moved."""
    found = fingerprint(path for name in TOKENIZER_FILES if (path := folder / name).is_file())
    return {f"{Path(path).name} in output_dir": content for path, content in found.items()}


def changed_inputs(recipe: Recipe, found: Path, inputs: dict[str, str]) -> list[str]:
    """The names of inputs that have changed since a checkpoint, if the recipe accepts it.

    Raises:
        UserError: It does not.
    """
    before = read_state(found)[1].get("inputs", {})
    folders = [Path(name) for name in _models(recipe) if name]
    changed = [
        path
        for path in changed_files(before, inputs)  # earlier versions stored fewer files of models
        if path in before or not any(Path(path).is_relative_to(folder) for folder in folders)
    ]
    if changed and not recipe.accept_changed_data:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise UserError(
            f"Data have changed since {found} was written: {', '.join(changed[:3])}{more}. Restore them, continue with "
            "the changed data (--accept_changed_data), or start again (--no_resume --overwrite_output_dir)."
        )
    return changed


def clear_output(folder: Path) -> None:
    """Remove an earlier run's results, so that an interrupted run leaves no old model beside a new tokenizer."""
    remove_all(folder)
    for result in _RESULTS:
        (folder / result).unlink(missing_ok=True)


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # it holds something, or was not made
        folder.rmdir()


def save_model(accelerator: Accelerator, model: torch.nn.Module, folder: Path) -> None:
    """Write config, weights and code, and flush them to disk; the tokenizer is there already."""
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        folder, is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
    )
    if accelerator.is_main_process:
        for path in filter(Path.is_file, folder.iterdir()):
            sync(path)
    accelerator.wait_for_everyone()
