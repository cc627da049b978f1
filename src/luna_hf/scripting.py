"""What commands share: errors for the user, exit codes, atomic writes, the head of a result, tables, tokenizers.

Everything here serves `python -m luna_hf`; commands of the repository use it too. Nothing heavy is imported; torch and
transformers are loaded by the functions that need them.
"""

import argparse
import errno
import json
import os
import platform
import re
import shlex
import shutil
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import date
from io import TextIOWrapper
from pathlib import Path
from pickle import UnpicklingError
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

try:
    import fcntl
except ImportError:  # Windows, where nothing keeps two processes apart
    fcntl = None

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "merges.txt", "sentencepiece.bpe.model"),
    *("spiece.model", "special_tokens_map.json"),
)


CONTROLS = re.compile(r"[\0-\x08\x0e-\x1f\x7f-\x9f]")


# ---- errors and exit codes ----


class UserError(ValueError):
    """A mistake that the user can fix; commands print the message without a traceback."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `UserError` instead of exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise the message.

        Raises:
            UserError: Always.
        """
        raise UserError(f"{message} (see --help)")


def reason(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class if it has none.

    PyTorch's message on a pickle that it has refused would advise to load it without the restriction.
    """
    if isinstance(error, UnpicklingError):
        code = re.search(r"GLOBAL (\S+)", str(error))
        held = f"its pickle would run {code[1]}, which could be any code" if code else ""
        return held or "its pickle is damaged, or holds more than tensors and plain values"
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def run_script(
    script: Callable[[], int | None], stopped: str = "nothing was written", clean_on_sigterm: bool = True
) -> int:
    """Run a command and return its exit status.

    Args:
        script: the command; may return an exit status.
        stopped: what to print after Ctrl-C or SIGTERM.
        clean_on_sigterm: unwind the stack on SIGTERM, so that temporary files are removed. Leave it off where the
            command installs its own handler, or where processes may block inside a collective operation.

    Returns:
        The script's status, or 0; 2 for a `UserError` or an error of the system, such as a missing permission or a full
        disk; 130 after Ctrl-C; 141 if the reader of the output has closed it.
    """
    try:
        _print_everything()
        _hide_progress_bars()
        with _restricted_unpickling(), _sigterm_unwinds(stopped) if clean_on_sigterm else nullcontext():
            try:
                return script() or 0
            finally:
                sys.stdout.flush()  # at exit, a closed output would be a traceback
    except UserError as error:
        return _stop(f"error: {' '.join(str(error).split())}")
    except PermissionError as error:
        return _stop(f"error: no permission to use {error.filename or error}: change its rights, or name another")
    except KeyboardInterrupt:
        return _stop(f"interrupted: {stopped}", 130)
    except BrokenPipeError:
        try:
            print(flush=True)
        except BrokenPipeError:  # the output is closed, by `head` for example
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        raise
    except Exception as error:
        if isinstance(error, UnicodeEncodeError) and sys.getfilesystemencoding() != "utf-8":
            return _stop(f"error: {error.object[:100]!a} cannot be used in this locale. Set PYTHONUTF8=1: {stopped}")
        if is_disk_full(error):
            place = getattr(error, "filename", None)
            return _stop(f"error: the disk is full{f' ({place})' if place else ''}: {stopped}")
        # Libraries in Rust name the error in their text only.
        if isinstance(error, OSError | UnpicklingError) or "(os error " in str(error):
            return _stop(f"error: {reason(error)}: {stopped}")
        raise


def _stop(message: str, status: int = 2) -> int:
    """Print a message in one line."""
    progress(" ".join(message.split()))
    return status


_NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # Windows has none
# Variables of PyTorch: the first restricts every `torch.load`, the second would lift its default restriction.
_UNPICKLING = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
# Of a command line: the start of `KEY=VALUE`, and the absolute paths in a list or mapping.
_KEY, _ABSOLUTE = re.compile(r"(?:[^=\[{]*=)?"), re.compile(r"(?<![\w.:/~-])/[^\s,'\"\[\]{}]+")
_WRITTEN = (".json", ".jsonl", ".md", ".png", ".safetensors", ".py")  # endings of files that commands write
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# Writers in Rust and C++ report a full disk in words only.
_DISK_FULL_WORDS = re.compile(
    rf"\(os error ({'|'.join(map(str, _DISK_FULL))})\)|PytorchStreamWriter|unexpected pos|iostream error"
)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error, or one that led to it, comes from a full disk, a quota or a limit on the size of files."""
    own = getattr(error, "errno", None) in _DISK_FULL or _DISK_FULL_WORDS.search(str(error))
    cause = error.__cause__ or error.__context__
    return bool(own) or (cause is not None and is_disk_full(cause))


@contextmanager
def _restricted_unpickling() -> Iterator[None]:
    """Let `torch.load` read nothing but tensors and plain values, whatever a library asks for.

    A checkpoint may come from somebody else. accelerate, for example, reads some of its files without a restriction.
    """
    before = {name: os.environ.pop(name, None) for name in _UNPICKLING}
    os.environ[_UNPICKLING[0]] = "1"
    try:
        yield
    finally:
        del os.environ[_UNPICKLING[0]]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def _print_everything() -> None:
    """Print characters that the terminal's encoding lacks as escapes; refuse words that this locale cannot decode.

    Raises:
        UserError: The command line has such a word: libraries in Rust and C++ could not open a file of that name.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if word := next((word for word in sys.argv if not word.isprintable() and word != readable(word)), None):
        encoding = sys.getfilesystemencoding()
        raise UserError(f"{readable(word)} is not in the encoding of this locale, {encoding}. Set PYTHONUTF8=1.")


def _hide_progress_bars() -> None:
    """Hide transformers' bars for reading and writing files, which take seconds; keep those of downloads."""
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    hides_downloads = are_progress_bars_disabled()
    logging.disable_progress_bar()
    if not hides_downloads:
        enable_progress_bars()


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the warnings of transformers."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


@contextmanager
def _sigterm_unwinds(stopped: str) -> Iterator[None]:
    def leave(number: int, frame: FrameType | None) -> NoReturn:
        print(f"terminated: {stopped}", file=sys.stderr)
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def progress(message: str) -> None:
    """Log a line to stderr."""
    print(printable(message), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """A text without what a terminal would obey: control characters become escapes."""
    return CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


# ---- files ----


@contextmanager
def locked(path: Path, folder: Path | None = None) -> Iterator[None]:
    """Hold a lock file. The operating system frees it when the process ends, also after a kill.

    Args:
        path: the lock file.
        folder: what it protects, for the error; by default the folder that holds it.

    Raises:
        UserError: Another process holds it, or it is a link.
    """
    with _open_plain(path) as file:
        if not _lock(file):
            raise UserError(
                f"{folder or path.parent} is in use by {_holder(path)}. Wait for it, or name another folder."
            )
        try:
            file.truncate(0)
            print(f"process {os.getpid()} on {platform.node()}", file=file, flush=True)
            yield
        finally:
            with suppress(OSError):  # Windows keeps a file that is open
                path.unlink()
            if fcntl:  # at once: closing the file is not enough while a forked child has it open
                fcntl.flock(file, fcntl.LOCK_UN)


def _open_plain(path: Path) -> TextIO:
    """Open a file to read and append; raises a `UserError` if it is a link, or anything else that is no file."""
    refused = UserError(f"{path} is a link to something else, or no file. Remove it, or name another folder.")
    try:
        file = open(path, "a+", encoding="utf-8", opener=lambda name, flags: os.open(name, flags | _NO_LINK, 0o666))  # noqa: SIM115
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO, None):  # link, folder, socket, pipe
            raise
        raise refused from error
    found = os.fstat(file.fileno())
    if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
        return file
    file.close()
    raise refused


def _holder(path: Path) -> str:
    """The process that has written its name into a lock, if it has yet and nobody else has written there."""
    with suppress(OSError):
        if found := re.match(rb"process \d+ on [\w.-]+", path.read_bytes()):
            return found[0].decode()
    return "another process"


def _lock(file: TextIO) -> bool:
    """Lock an open file for this process; false if another one holds it, or has removed it since it was opened."""
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(file.name))
    except (BlockingIOError, FileNotFoundError):
        return False


def refuse_links(folder: Path) -> None:
    """Refuse to write to a folder with links that may lead out of it, since a command would write where they lead.

    Pipes and devices are refused, too, at which writing would wait, and folders in the place of files.

    Raises:
        UserError: It has one.
    """
    inside = folder.resolve()
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            try:
                found = path.lstat()
            except FileNotFoundError:  # removed by another process, whose lock is noticed later
                continue
            if stat.S_ISLNK(found.st_mode):
                is_inside = path.resolve().is_relative_to(inside)
                problem = f"is a link to {os.readlink(path)}" + ", outside the folder" * (not is_inside)
                if is_inside and not re.match(r"(checkpoint|step)-\d", path.name):  # old checkpoints are removed
                    problem = ""
            elif stat.S_ISREG(found.st_mode):
                problem = "is the same file as another one (a hard link)" * (found.st_nlink > 1)
            elif stat.S_ISDIR(found.st_mode):
                problem = "is a folder where a file would be written" * (path.suffix in _WRITTEN)
            else:
                problem = "is no file, but a pipe, socket or device"
            if problem:
                raise UserError(f"{path} {problem}. Remove it, or name another folder.")
        folders[:] = set(folders) - {"wandb"}  # which links to its own log


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically: after a kill at any moment it holds the old content or the new, never a part."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.unlink(missing_ok=True)  # left by a kill, or a link to another file
    with unfinished.open("x", encoding="utf-8", errors="backslashreplace") as file:  # lone surrogates: JSON reads them
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def write_json(path: Path, content: Any) -> None:
    """Write JSON as `write_text` writes text."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


class Record(dict[str, Any]):
    """The JSON object in a file. A missing key is a `UserError` that names the file."""

    def __init__(self, content: dict[str, Any], path: Path, advice: str = "") -> None:
        super().__init__(content)
        self.path, self.advice = path, advice

    def __missing__(self, key: str) -> NoReturn:
        raise UserError(f"{self.path} is damaged (it has no {key!r}). {self.advice}".strip())


def read_json(path: Path, advice: str = "") -> Record:
    """The JSON object in a file that a command has written; `advice` ends the error.

    Raises:
        UserError: It is missing, damaged, or no object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
    except FileNotFoundError as error:
        raise UserError(f"There is no {path}. {advice}".strip()) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({reason(error)}). {advice}".strip()) from error
    return Record(content, path, advice)


@contextmanager
def writing(target: Path) -> Iterator[Path]:
    """Replace a folder atomically: yields a folder beside it, which takes its place if no error occurs.

    One process at a time may write. What a killed one has left is removed, or put back if it was the earlier target. A
    target that was empty or missing at the start must still be so at the end.

    Raises:
        UserError: The disk refuses, another process is writing, or the target has been filled meanwhile.
    """
    target = target.resolve()  # replaces what a link points to, not the link
    lock, unfinished, earlier = (target.parent / f".{target.name}.{word}" for word in ("lock", "unfinished", "earlier"))

    def tidy() -> None:
        if earlier.exists() and not target.exists():
            earlier.rename(target)
        for leftover in (unfinished, earlier):
            shutil.rmtree(leftover, ignore_errors=True)

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(lock, target), ExitStack() as stack:
            tidy()
            stack.callback(tidy)
            was_free = _is_free(target)
            unfinished.mkdir()
            yield unfinished
            if was_free and not _is_free(target):
                raise UserError(f"Another run has written to {target} in the meantime. Name another folder.")
            if target.exists():
                target.rename(earlier)
            unfinished.rename(target)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise UserError(f"{target} cannot be written ({error.strerror or error}).") from error


def _is_free(target: Path) -> bool:
    return not target.exists() or not any(target.iterdir())


# ---- paths in cards and results ----


def portable(text: str | Path) -> str:
    """A path without this machine's folders: relative to the current folder if inside it, else the last part."""
    path = Path(text)
    if not path.is_absolute():
        return readable(str(text))
    return readable(path.relative_to(Path.cwd()).as_posix() if path.is_relative_to(Path.cwd()) else path.name)


def readable(text: str) -> str:
    """A text without lone surrogates, which no file can hold: names that Python could not decode are read as UTF-8."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()


def portable_command(words: list[str]) -> str:
    """A command line with portable paths, also those inside lists and mappings, quoted for a shell."""
    parts = []
    for word in words:
        key = _KEY.match(word)[0]
        value = word[len(key) :]
        nested = value.startswith(("[", "{"))
        parts.append(key + (_ABSOLUTE.sub(lambda path: portable(path[0]), value) if nested else portable(value)))
    return shlex.join(parts)


# ---- measured results ----


def cpu_name() -> str:
    """Model name of the processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def describe_run(script: str, arguments: Sequence[str], device: str) -> dict[str, Any]:
    """The head of every result file: command, date, machine, and the versions that the figures depend on."""
    import torch
    import transformers

    import luna_hf

    machine: dict[str, Any] = {
        "cpu": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
    }
    if device != "cpu":
        machine["accelerator"] = torch.cuda.get_device_name()
    return {
        "command": portable_command(["python", script, *arguments]),
        "date": date.today().isoformat(),
        "machine": machine,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "luna_hf": luna_hf.__version__,
        },
    }


def markdown_table(header: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table, one line for each row."""
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in [header, ["---"] * len(header), *rows])


# ---- tokenizers ----


def load_tokenizer(source: str, required: bool = False, subfolder: str = "") -> "PreTrainedTokenizerBase | None":
    """The tokenizer of a folder or a Hub repository, or `None` if it has none.

    Args:
        source: folder or Hub name.
        required: whether there must be one.
        subfolder: where it is inside the source.

    Raises:
        UserError: Its files cannot be read or are incomplete; or, with `required`, there are none.
    """
    from transformers import AutoTokenizer
    from transformers.utils import cached_file

    try:
        with quiet():
            # Otherwise transformers asks on a terminal whether to run the code of a stranger's folder.
            tokenizer = AutoTokenizer.from_pretrained(source, subfolder=subfolder, trust_remote_code=False)
        why = "its vocabulary is missing"
        if not tokenizer.model_max_length > 0:
            raise ValueError(f"its `model_max_length` is {tokenizer.model_max_length}")
    except Exception as error:  # tokenizer files fail in many ways, all of them the user's to fix
        tokenizer, why = None, reason(error)
    # transformers makes an empty tokenizer where there are no files.
    if tokenizer is not None and len(tokenizer) > len(tokenizer.all_special_ids):
        return tokenizer
    silent = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    present = []
    with suppress(OSError, ValueError):  # no such source
        present = [name for name in TOKENIZER_FILES if cached_file(source, name, subfolder=subfolder, **silent)]
    if present:
        raise UserError(f"The tokenizer at {source} ({present[0]}) cannot be read: {why}.")
    if required:
        raise UserError(f"There is no tokenizer at {source} ({why}).")
    return None
