"""Uploading a finished model to the Hub."""

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from luna_hf.scripting import UserError, reason


def check_repository(name: str, token: str | None = None) -> None:
    """Check, without a network, that a repository can be written to.

    Raises:
        UserError: The name is invalid, or nobody is logged in.
    """
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"{name!r} is no name on the Hub. {reason(error)}.") from error
    if not (token or get_token()):
        raise UserError(f"{name!r} cannot be pushed, since you are not logged in to the Hub. Run: hf auth login")


def reserve_repository(name: str, private: bool | None = None, token: str | None = None) -> str:
    """Create the repository before the training, to find a missing login early, and return its full `USER/NAME`.

    Raises:
        UserError: No login or one that may only read, no network, or the Hub refuses.
    """
    try:
        repository = HfApi().create_repo(name, private=private, token=token, exist_ok=True).repo_id
        # An existing repository is found with a token that may only read, too.
        access = HfApi().whoami(token)["auth"].get("accessToken") or {}
        if access.get("role") == "read":
            raise PermissionError("the token may only read")
        return repository
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
