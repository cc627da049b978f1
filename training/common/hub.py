"""Uploading a finished model to the Hub."""

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi

from luna_hf.scripting import UserError, reason


def reserve_repository(name: str, private: bool | None = None, token: str | None = None) -> str:
    """Create the repository before the training, to find a missing login early, and return its full `USER/NAME`.

    Raises:
        UserError: No login, no network, or the Hub refuses.
    """
    try:
        return HfApi().create_repo(name, private=private, token=token, exist_ok=True).repo_id
    except Exception as error:  # network, login, rights: all of them the user's to fix
        raise UserError(f"The repository {name!r} on the Hub cannot be created ({reason(error)}).") from error


def push_folder(
    folder: Path,
    repository: str,
    message: str,
    ignore: Sequence[str] = (),
    extra: Sequence[Path] = (),
    token: str | None = None,
) -> None:
    """Upload a folder without hidden files and `ignore` (patterns), and the `extra` files from elsewhere beside it.

    Raises:
        UserError: The upload failed; the folder is complete all the same.
    """
    shared = {"repo_id": repository, "commit_message": message, "token": token}
    try:
        HfApi().upload_folder(folder_path=folder, ignore_patterns=[".*", *ignore], **shared)
        for path in extra:
            HfApi().upload_file(path_or_fileobj=path, path_in_repo=path.name, **shared)
    except Exception as error:
        raise UserError(
            f"The model in {folder} is complete, but the upload failed ({reason(error)}). "
            f"Try: hf upload {repository} {folder}"
        ) from error
