"""Files of a conversion: what a source has beside its weights, and a target that may be replaced."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import ModelCard, ModelCardData, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.file_download import _CACHED_NO_EXIST
from transformers import PreTrainedConfig

from ..scripting import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def find(source: str, name: str) -> str | None:
    """The path of a file of a folder or Hub repository, or `None` if there is no such file or repository.

    Raises:
        UserError: The Hub does not tell, nor does the cache.
    """
    if Path(source).is_dir():
        return str(Path(source, name)) if Path(source, name).is_file() else None
    try:
        return hf_hub_download(source, name)
    except HFValidationError:
        return None
    except (EntryNotFoundError, HfHubHTTPError) as error:
        if isinstance(error, RemoteEntryNotFoundError | RepositoryNotFoundError) and not isinstance(
            error, GatedRepoError
        ):
            return None
        # Every repository has this file, and only a download of the whole repository stores it.
        is_whole = isinstance(try_to_load_from_cache(source, ".gitattributes"), str)
        if is_whole or try_to_load_from_cache(source, name) is _CACHED_NO_EXIST:
            return None
        raise UserError(
            f"The Hub cannot be reached or refuses access, and the cache does not show whether {source} has a file "
            f"{name}. Name a folder, or run `hf download {source}` where there is access."
        ) from error


def source_card(source: str) -> ModelCardData:
    """The metadata of the source's own card; empty if it has none."""
    try:
        path = find(source, "README.md")
        return ModelCard.load(path, ignore_metadata_errors=True).data if path else ModelCardData()
    except Exception:  # written by hand, a header can be wrong in many ways
        return ModelCardData()


def check_tokenizer(tokenizer: "PreTrainedTokenizerBase", config: PreTrainedConfig, source: str) -> None:
    """Refuse a tokenizer that does not fit the model.

    Raises:
        UserError: It has more tokens than the model has rows, or another padding token.
    """
    if len(tokenizer) > config.vocab_size:
        problem = f"has {len(tokenizer):,} tokens, but its model only {config.vocab_size:,}"
    elif tokenizer.pad_token_id != config.pad_token_id:
        problem = f"pads with token {tokenizer.pad_token_id}, but its model with token {config.pad_token_id}"
    else:
        return
    raise UserError(f"The tokenizer at {source} {problem}. Save the right tokenizer there.")


def check_target(target: Path, source: str, overwrite: bool, mark: str, is_own: Callable[[Path], bool]) -> None:
    """Refuse a target that holds anything but an earlier conversion, or that cannot be replaced.

    Args:
        target: the folder to write.
        source: folder or Hub name.
        overwrite: whether an earlier conversion may be replaced.
        mark: what the card of an earlier conversion contains.
        is_own: whether a conversion writes such a subfolder.

    Raises:
        UserError: Such a target.
    """
    if target.exists() and not target.is_dir():
        raise UserError(f"TARGET {target} is a file. Name a folder.")
    place, origin = target.resolve(), Path(source).resolve()
    if Path(source).exists() and (place == origin or place in origin.parents or origin in place.parents):
        raise UserError(f"TARGET {target} is SOURCE, or one contains the other. Name another folder.")
    if target.resolve() == Path.cwd():
        raise UserError(f"TARGET {target} is the current folder, which cannot be replaced. Name another folder.")
    if target.is_mount():
        raise UserError(f"TARGET {target} is where a disk is mounted, which cannot be replaced. Name a folder in it.")
    card = target / "README.md"
    is_converted = card.is_file() and mark in card.read_text(encoding="utf-8", errors="replace")
    present = sorted(target.iterdir()) if target.exists() else []
    foreign = [path for path in present if not is_converted or (path.is_dir() and not is_own(path))]
    if foreign:
        raise UserError(f"TARGET {target} holds {foreign[0].name}, which no conversion wrote. Name another folder.")
    if present and not overwrite:
        raise UserError(f"TARGET {target} holds an earlier conversion. Name another folder or add --overwrite.")


def is_module(folder: Path) -> bool:
    """Whether a folder is one that sentence-transformers makes for a module."""
    return folder.name.partition("_")[0].isdecimal()
