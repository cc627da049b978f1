"""The output folder of a pretraining run, and the way from there to the Hub."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator
from huggingface_hub import HfApi

from engine.card import PLOT
from engine.checkpoint import newest_complete, read_state, remove_all
from engine.recipe import RunRecipe
from luna_hf.scripting import UserError

_PROBE = ".writable-"
_RESULTS = ("model.safetensors", "metrics.json", "README.md", PLOT)


def find_checkpoint(recipe: RunRecipe, tell: Callable[[str], None]) -> Path | None:
    """The checkpoint to go on from; `None` for a run that starts.

    Raises:
        UserError: The folder cannot be written, is the checkpoint to start from, holds a finished run, a run of
            another recipe, or other files.
    """
    folder = Path(recipe.output_dir)
    for key in ("model_name_or_path", "tokenizer", "teacher"):
        source = getattr(recipe, key, "")
        if source and Path(source).resolve() == folder.resolve():
            raise UserError(f"`output_dir` {folder} is `{key}`, which would be overwritten. Name another folder.")
    check_writable(folder)
    # Another process of this run may be trying right now whether it can write.
    present = {path.name for path in folder.iterdir() if not path.name.startswith(_PROBE)}
    if recipe.resume and (found := newest_complete(folder, tell)):
        other = recipe.differences(read_state(found)[1])
        if other:
            raise UserError(
                f"`output_dir` {folder} holds checkpoints of a run with other values of {', '.join(other)}. Name "
                "another folder, restore the values, or start again (--resume false --overwrite_output_dir true)."
            )
        return found
    # A run that stopped before its first log line has left its tokenizer alone.
    if present - {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}:
        if "log.jsonl" not in present:
            raise UserError(
                f"`output_dir` {folder} holds files, but no log.jsonl of an earlier run, so none of them is "
                "overwritten. Name another folder (--output_dir FOLDER)."
            )
        if not recipe.overwrite_output_dir:
            state = "a finished run" if "metrics.json" in present else "a run without checkpoints"
            raise UserError(
                f"`output_dir` {folder} is not empty: it holds {state}. Name another (--output_dir FOLDER), or write "
                "over what is in it (--overwrite_output_dir true)."
            )
    return None


def check_writable(folder: Path) -> None:
    """Create the folder.

    Raises:
        UserError: It is a file, or nothing can be written to it.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"`output_dir` {folder} is a file. Name a folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial = folder / f"{_PROBE}{os.getpid()}"
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise UserError(f"`output_dir` {folder} cannot be written to ({error.strerror}). Name another.") from error


def clear_output(folder: Path) -> None:
    """Remove the results of an earlier run: an interrupted one must not leave an old model beside a new tokenizer."""
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


def reserve_repository(recipe: RunRecipe) -> str:
    """Create the repository on the Hub before the training, so that a missing login is found then; its full name.

    Raises:
        UserError: No login, no network, or the Hub refuses.
    """
    name = recipe.hub_model_id or recipe.model_name
    try:
        return HfApi().create_repo(name, private=recipe.hub_private, exist_ok=True).repo_id
    except Exception as error:  # network, login, rights: all of them the user's to mend
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"`push_to_hub`: the repository {name!r} cannot be made ({reason}).") from error


def push(recipe: RunRecipe, folder: Path, repository: str) -> None:
    """Upload the folder, without checkpoints and what trackers wrote.

    Raises:
        UserError: The upload failed; the folder is as it was.
    """
    try:
        HfApi().upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="Pretrained model",
            ignore_patterns=["checkpoints/**", "*.unfinished", f"{recipe.model_name}/**"],
        )
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"The model is finished in {folder}, but its upload failed ({reason}). Try: hf upload {repository} {folder}"
        ) from error
