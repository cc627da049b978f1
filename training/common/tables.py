"""Files of rows or text: what their readers let pass, or report in words of their own."""

import codecs
import csv
from pathlib import Path

from luna_hf.scripting import UserError, reason

# The separators of the files that begin with a line of column names.
SEPARATORS = {".csv": ",", ".tsv": "\t"}
_BLOCK = 1 << 16  # bytes read at a time


def ending(path: Path) -> str:
    """The suffix that decides how a file is read: `.csv` for `A.CSV`."""
    return path.suffix.lower()


def check_file(path: Path, limit: int | None = None) -> None:
    """Refuse a file that its reader would misread.

    Args:
        path: of a text file, a table, or lines of JSON.
        limit: bytes to read for the check of the encoding; by default all.

    Raises:
        UserError: It is empty, not UTF-8, has a column twice, or values without a column.
    """
    if path.stat().st_size <= _BLOCK and not path.read_bytes().strip():
        raise UserError(f"{path} is empty: it holds no text.")
    if ending(path) == ".parquet":
        return
    _check_encoding(path, limit)
    if separator := SEPARATORS.get(ending(path)):
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            records = csv.reader(file, delimiter=separator)
            columns, first = next(records, []), next(records, [])
        if len(first) > len(columns):  # pandas would shift the columns
            raise UserError(f"{path} names {len(columns)} columns, but its first row has {len(first)} values.")
        if twice := [name for name in columns if name and columns.count(name) > 1]:
            raise UserError(f"{path} has the column {twice[0]!r} twice. Rename or remove one.")


def why_unreadable(error: BaseException) -> str:
    """Why `datasets` could not read a file."""
    error = error.__cause__ or error
    text = str(error)
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text (convert it, for example with iconv)"
    if isinstance(error, StopIteration):
        return "it is empty"
    if "column names don't match" in text:
        return "a part of its rows has other columns than the first ones"
    if "corresponds to no data" in text:
        return "it holds no rows"
    return reason(error).replace("extension<arrow.json>", "values of several types")


def not_utf8(path: Path, error: UnicodeDecodeError, byte: int) -> UserError:
    """The error for text in another encoding."""
    with path.open("rb") as file:
        encoding = "UTF-16" if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "LATIN1"
    return UserError(
        f"{path} is not UTF-8 text ({error.reason} at byte {byte}). Convert it, for example with `iconv -f {encoding} "
        f"-t UTF-8 {path.name} > new{path.suffix}`."
    )


def _check_encoding(path: Path, limit: int | None) -> None:
    decoder, position = codecs.getincrementaldecoder("utf-8")(), 0
    with path.open("rb") as file:
        while limit is None or position < limit:
            block = file.read(_BLOCK)
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                start = position + len(block) - len(error.object)  # it begins with what the last block left
                raise not_utf8(path, error, start + error.start) from error
            if not block:
                return
            position += len(block)
