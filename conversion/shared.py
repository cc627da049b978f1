"""What the conversion scripts share: errors for the user, the command line, files of the Hub, and the target folder."""

import argparse
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from logging import ERROR, getLogger
from pathlib import Path
from types import FrameType
from typing import NoReturn

from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file, logging

from luna_hf.scripting import UserError

ROOT = Path(__file__).resolve().parent.parent
# By this a card is known as one that a conversion wrote.
CARD_MARK = "python conversion/"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "merges.txt", "sentencepiece.bpe.model"),
    *("spiece.model", "special_tokens_map.json"),
)


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are a `UserError`."""

    def error(self, message: str) -> NoReturn:
        """Raise the complaint."""
        raise UserError(f"{message} (see --help)")


def portable(text: str) -> str:
    """A path without the machine it is on: relative to the repository if inside it, else its last part."""
    path = Path(text)
    if not path.is_absolute():
        return text
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def find(source: str, name: str) -> str | None:
    """The path of a file of a folder or Hub name; `None` if it is not there."""
    return cached_file(
        source, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )


def load_tokenizer(source: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a folder or Hub name; `None` if it has none.

    Raises:
        UserError: It has files of a tokenizer that cannot be read, or too few of them.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        tokenizer, reason = AutoTokenizer.from_pretrained(source), "its vocabulary is missing"
    except Exception as error:  # tokenizer files fail in many ways, all of them the user's to mend
        tokenizer, reason = None, (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    finally:
        logging.set_verbosity(verbosity)
    # Without files, transformers makes an empty one.
    if tokenizer is not None and len(tokenizer) > len(tokenizer.all_special_ids):
        return tokenizer
    try:
        present = [name for name in TOKENIZER_FILES if find(source, name)]
    except (OSError, ValueError):  # no such source, which loading the model says better
        return None
    if present:
        raise UserError(f"The tokenizer at {source} ({present[0]}) cannot be read: {reason}.")
    return None


@contextmanager
def without_retry_warnings() -> Iterator[None]:
    """A Hub that cannot be reached is asked again and again, with a warning each time; the error says it once."""
    requests = getLogger("huggingface_hub.utils._http")
    level = requests.level
    requests.setLevel(ERROR)
    try:
        yield
    finally:
        requests.setLevel(level)


# ---- the target folder ----


def check_target(target: Path, source: str, overwrite: bool) -> None:
    """Refuse a folder that holds anything but an earlier conversion that may be replaced, or that cannot be replaced.

    Raises:
        UserError: What it holds, and what to do.
    """
    if target.exists() and not target.is_dir():
        raise UserError(f"TARGET {target} is a file. Name a folder.")
    if Path(source).exists() and target.resolve() in (Path(source).resolve(), *Path(source).resolve().parents):
        raise UserError(f"TARGET {target} is SOURCE, or holds it. Name another folder.")
    if target.resolve() == Path.cwd():
        raise UserError(
            f"TARGET {target} is the folder that this runs in, which cannot be replaced. Name another folder."
        )
    present = sorted(target.iterdir()) if target.exists() else []
    if not present:
        return
    card = target / "README.md"
    converted = card.is_file() and CARD_MARK in card.read_text(encoding="utf-8", errors="replace")
    # The only folder that a conversion writes is that of a classifier's labels, for fairseq.
    foreign = [path for path in present if path.is_dir() and not _is_labels(path)] if converted else present
    if foreign:
        raise UserError(
            f"TARGET {target} holds files that no conversion wrote ({foreign[0].name}). Name another folder."
        )
    if not overwrite:
        raise UserError(
            f"TARGET {target} holds an earlier conversion. Name another folder, or replace it (--overwrite)."
        )


def _is_labels(folder: Path) -> bool:
    return folder.name == "label" and [path.name for path in folder.iterdir()] == ["dict.txt"]


@contextmanager
def writing(target: Path) -> Iterator[Path]:
    """A folder beside the target to write to, which takes the target's place when all went well.

    Raises:
        UserError: The disk does not take it, or another run was faster.
    """
    target = target.resolve()  # what a link leads to is replaced, not the link
    unfinished, earlier = (target.parent / f".{target.name}.{word}-{os.getpid()}" for word in ("unfinished", "earlier"))
    was_free = _is_free(target)
    made = [parent for parent in target.parents if not parent.exists()]
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        if was_free and not _is_free(target):
            raise UserError(f"TARGET {target} was written by another run in the meantime. Name another folder.")
        if target.exists():
            target.rename(earlier)
        unfinished.rename(target)
    except Exception as error:
        if isinstance(error, UserError) or not is_of_disk(error):
            raise
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"TARGET {target} cannot be written ({reason}).") from error
    finally:
        if earlier.exists() and not target.exists():
            earlier.rename(target)
        for leftover in (unfinished, earlier):
            shutil.rmtree(leftover, ignore_errors=True)
        for parent in made if not target.exists() else ():
            with suppress(OSError):  # something else may be in it by now
                parent.rmdir()


def _is_free(target: Path) -> bool:
    return not target.exists() or not any(target.iterdir())


def is_of_disk(error: Exception) -> bool:
    """Whether a disk is the cause; the libraries in Rust say so in words only."""
    return isinstance(error, OSError) or "(os error" in str(error)


def save(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, card: str) -> None:
    """Write weights, config, code, tokenizer and card."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    readme = folder / "README.md"
    readme.write_text(card, encoding="utf-8")
    for path in folder.glob("*.safetensors"):
        shutil.copymode(readme, path)  # safetensors lets the owner alone read its files


# ---- running a script ----


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """No bars while files are read and written, which takes seconds; those of downloads stay."""
    shown, downloads = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    logging.disable_progress_bar()
    if downloads:
        enable_progress_bars()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _termination_cleans_up() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that unfinished folders and unpacked archives go."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        print("terminated: nothing was written", file=sys.stderr)
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_script(script: Callable[[], None]) -> int:
    """Run what a script does; its exit status: 0, 2 for something the user can mend, 130 after Ctrl-C."""
    try:
        with without_progress_bars(), _termination_cleans_up():
            script()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except PermissionError as error:
        print(f"error: {error.filename or error} cannot be used: you have no permission to.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return 130
    return 0
