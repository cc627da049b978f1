"""What a run needs when it ends, checked when it starts."""

import tempfile
from importlib import import_module
from pathlib import Path

from common.cards import TEMPLATES
from common.hub import check_repository
from common.machine import machine
from luna_hf.scripting import UserError, reason, refuse_links


def check_end(folder: Path, option: str, repository: str = "", token: str | None = None) -> None:
    """Create the output folder, and check all else that only the end of a run needs.

    Args:
        folder: where the run writes.
        option: what the user calls it.
        repository: the name on the Hub of what will be pushed, if anything will be.
        token: for the Hub, if not the stored one.

    Raises:
        UserError: The folder is a file, cannot be written to or has links that lead out of it; the card or its plot
            cannot be made; or the name on the Hub is invalid, or nobody is logged in.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{option} {folder} is a file. Name a folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # without a name, so that a kill leaves nothing
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"{option} {folder} cannot be written to ({why}). Name another folder.") from error
    refuse_links(folder)
    machine()
    if not TEMPLATES.is_dir():
        raise UserError(
            f"The templates of cards, {TEMPLATES}, are missing. Run the command in a whole clone of luna_hf."
        )
    try:
        import_module("matplotlib.pyplot")
    except Exception as error:  # a broken installation fails in many ways
        raise UserError(f"matplotlib cannot be imported ({reason(error)}). Install it again.") from error
    if repository:
        check_repository(repository, token)
