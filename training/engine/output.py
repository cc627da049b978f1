"""The output folder of a pretraining run."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator

from engine.card import PLOT
from engine.checkpoint import newest_complete, read_state, remove_all
from engine.recipe import RunRecipe
from luna_hf.scripting import TOKENIZER_FILES, UserError

_RESULTS = ("model.safetensors", "metrics.json", "README.md", PLOT)


def find_checkpoint(recipe: RunRecipe, log: Callable[[str], None]) -> Path | None:
    """The checkpoint to resume from, or `None` for a run that starts.

    Raises:
        UserError: The folder cannot be written, is a checkpoint that the run reads, or holds a finished run, a run of
            another recipe, or files of something else.
    """
    folder = Path(recipe.output_dir)
    for key in ("model_name_or_path", "tokenizer", "teacher"):
        source = getattr(recipe, key, "")
        if source and Path(source).resolve() == folder.resolve():
            raise UserError(f"`output_dir` {folder} is also `{key}` and would be overwritten. Name another folder.")
    check_writable(folder)
    if recipe.resume and (found := newest_complete(folder, log)):
        other = recipe.differences(read_state(found)[1])
        if other:
            raise UserError(
                f"`output_dir` {folder} holds checkpoints of a run with other values of {', '.join(other)}. Name "
                "another folder, restore the values, or start again (--no_resume --overwrite_output_dir)."
            )
        return found
    # Hidden files are those that a kill left half written, and the trial files of other processes. A run that stopped
    # before its first log line has left its tokenizer only.
    present = {path.name for path in folder.iterdir() if not path.name.startswith(".")} - set(TOKENIZER_FILES)
    if present and "log.jsonl" not in present:
        raise UserError(
            f"`output_dir` {folder} holds files but no log.jsonl of an earlier run. Name another folder "
            "(--output_dir FOLDER)."
        )
    if present and not recipe.overwrite_output_dir:
        state = "a finished run" if "metrics.json" in present else "a run without checkpoints"
        raise UserError(
            f"`output_dir` {folder} holds {state}. Name another folder (--output_dir FOLDER), or overwrite it "
            "(--overwrite_output_dir)."
        )
    return None


def check_writable(folder: Path) -> None:
    """Create the folder.

    Raises:
        UserError: It is a file, or cannot be written to.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"`output_dir` {folder} is a file. Name a folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial = folder / f".writable-{os.getpid()}"
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise UserError(f"`output_dir` {folder} cannot be written to ({error.strerror}). Name another.") from error


def clear_output(folder: Path) -> None:
    """Remove an earlier run's results, so that an interrupted run leaves no old model beside a new tokenizer."""
    remove_all(folder)
    for result in _RESULTS:
        (folder / result).unlink(missing_ok=True)


def save_model(accelerator: Accelerator, model: torch.nn.Module, folder: Path) -> None:
    """Write config, weights and code; the tokenizer is there already."""
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        folder, is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
    )
    accelerator.wait_for_everyone()
