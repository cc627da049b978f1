"""The one reader of users' files: tables in CSV, TSV, JSON and parquet, and lines of text.

Every text is the text that stands in the file; no type is inferred from it. All files are UTF-8, with or without a byte
order mark, and their lines end with LF or CRLF.

- CSV is RFC 4180. A line of TSV is a row, and quotes in it are characters. Both begin with the names of the columns.
  All values are texts, and an empty one is missing (`None`).
- JSON is an object per line, or one list of objects. A key that an object lacks is a missing value.
- Parquet keeps its types.
"""

import codecs
import csv
import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
from datasets import Dataset, Json, concatenate_datasets
from pyarrow import parquet

from luna_hf.scripting import UserError, printable, reason

# The kinds of tables, by the ending of their names.
KINDS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv"}
_PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip")
_BLOCK = 1 << 16  # bytes read at a time
_LOOK = 100  # rows of JSON that are read for the names of its columns

csv.field_size_limit(2**31 - 1)  # a text may be a book


def ending(path: Path) -> str:
    """The suffix that decides how a file is read: `.csv` for `A.CSV`."""
    return path.suffix.lower()


def refuse_packed(paths: Iterable[Path]) -> None:
    """Refuse files such as `train.csv.gz`, which would otherwise be passed over.

    Raises:
        UserError: A file is compressed.
    """
    for path in paths:
        if ending(path) in _PACKED and ending(Path(path.stem)) in (*KINDS, ".txt"):
            raise UserError(f"{path} is compressed. Unpack it: {', '.join(KINDS)} files are read as they are.")


def shorten(text: str, width: int = 40) -> str:
    """The beginning of a text, in one line, without what a terminal would obey."""
    text = printable(" ".join(text.split()))
    return text if len(text) <= width else text[: width - 3] + "..."


# ---- tables ----


def read_table(paths: list[Path]) -> Dataset:
    """Read the parts of a table into memory, one after the other. Columns of CSV and TSV are texts.

    The `builder_name` in the `info` of the result is the kind of the files.

    Raises:
        UserError: A file is missing, of another kind, empty, damaged, not UTF-8, or ragged; has a column twice, or
            other columns than the first.
    """
    first = paths[0]
    refuse_packed(paths)
    if missing := [path for path in paths if not path.is_file()]:
        raise UserError(f"There is no file {missing[0]}.")
    if ending(first) not in KINDS:
        raise UserError(f"{first} is not a {', '.join(KINDS)} file.")
    parts = []
    for path in paths:
        check_file(path)
        try:
            parts.append(_read_part(path))
        except UserError:
            raise
        except (OSError, ValueError, LookupError, pyarrow.ArrowException) as error:
            raise UserError(f"{path} cannot be read as {ending(path)[1:]}: {reason(error)}.") from error
        if sorted(parts[-1].column_names) != sorted(parts[0].column_names):
            names = ", ".join(parts[-1].column_names), ", ".join(parts[0].column_names)
            raise UserError(f"{path} has the columns {names[0]}, but {first.name} has {names[1]}.")
    try:
        rows = concatenate_datasets(parts)
    except ValueError as error:  # columns of different types
        raise UserError(f"The parts of {first} do not fit each other: {reason(error)}.") from error
    if not len(rows):
        raise UserError(f"{first} is empty: it holds no rows.")
    rows.info.builder_name = KINDS[ending(first)]
    return rows


def _read_part(path: Path) -> Dataset:
    if KINDS[ending(path)] == "parquet":
        column_names(path)  # refuses a name that comes twice
        table = parquet.read_table(path)
        table.validate(full=True)  # texts that are not UTF-8
        return Dataset(table)
    is_json, rows = KINDS[ending(path)] == "json", list(_rows(path))
    names = list(dict.fromkeys(name for row in rows for name in row)) if rows else column_names(path)
    columns = {name: [row.get(name) for row in rows] for name in names}
    return Dataset(pyarrow.table({name: _column(values, is_json) for name, values in columns.items()}))


def _column(values: list[Any], is_json: bool) -> pyarrow.Array:
    kinds = {type(value) for value in values if value is not None}
    try:
        if bool in kinds and len(kinds) > 1:  # pyarrow would read `true` among numbers as 1
            raise pyarrow.ArrowTypeError
        return pyarrow.array(values, None if is_json else pyarrow.string())
    except (pyarrow.ArrowException, OverflowError):  # values of several types
        return pyarrow.array(list(map(json.dumps, values)), pyarrow.string()).cast(Json().pa_type)


def stream_column(files: Iterable[Path], column: str) -> Iterator[dict[str, Any]]:
    """The rows of tables, one in memory at a time, with one of their columns.

    Raises:
        UserError: See `read_table`. Damaged parquet files raise the errors of pyarrow.
    """
    for path in files:
        if KINDS[ending(path)] == "parquet":
            with parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=256, columns=[column]):
                    yield from batch.to_pylist()
        else:
            yield from ({column: row.get(column)} for row in _rows(path))


def column_names(path: Path) -> list[str]:
    """The columns of a table; of JSON, those of its first rows."""
    if KINDS[ending(path)] == "parquet":
        return _header(path, parquet.read_schema(path).names)
    if KINDS[ending(path)] == "csv":
        return _header(path, next(_records(path), (1, []))[1])
    return list(dict.fromkeys(name for row in islice(_objects(path), _LOOK) for name in row))


def require_text(rows: Dataset, column: str, source: str) -> None:
    """Check that a column holds a text in every row.

    Raises:
        UserError: It has another type, or a row lacks a value.
    """
    is_text = getattr(rows.features[column], "dtype", "") in ("string", "large_string")
    if not is_text or rows.data.column(column).null_count:
        check_texts(rows[column], column, source)


def check_texts(values: Iterable[Any], column: str, source: str, missing: bool = False) -> None:
    """Check that all values of a column are texts, or missing ones if `missing`.

    Raises:
        UserError: One is not.
    """
    for row, value in enumerate(values):
        if not isinstance(value, str) and not (missing and value is None):
            raise UserError(
                f"Row {row} of {source} holds {shorten(repr(value))} in the column `{column}`, which must hold text."
            )


# ---- rows ----


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a CSV, TSV or JSON file."""
    if KINDS[ending(path)] == "json":
        yield from _objects(path)
        return
    records = _records(path)
    names = _header(path, next(records, (1, []))[1])
    blank: list[int] = []  # numbers of empty lines: no rows at the end of a file, or the empty values of a column
    for line, record in records:
        if not record:
            blank.append(line)
            continue
        for number, fields in [*((number, [""] * (len(names) == 1)) for number in blank), (line, record)]:
            if len(fields) != len(names):
                advice = "" if ending(path) == ".tsv" else " Write values that hold a comma between double quotes."
                raise UserError(
                    f"{path} names {len(names)} columns, but line {number} has {len(fields)} values.{advice}"
                )
            yield {name: field or None for name, field in zip(names, fields, strict=True)}
        blank = []


def _header(path: Path, names: list[str]) -> list[str]:
    """The names of columns; those without one, as pandas' index, are numbered."""
    if not any(names) and KINDS[ending(path)] == "parquet":
        raise UserError(f"{path} has no columns with a name.")
    if not any(names):
        raise UserError(f"{path} begins with an empty line. Its first line must hold the names of the columns.")
    names = [name or f"Unnamed: {place}" for place, name in enumerate(names)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{path} has the column {twice[0]!r} twice. Rename or remove one.")
    return names


def _records(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The number of the last line, and the fields, of every record of a CSV or TSV file; none of an empty line."""
    if ending(path) == ".tsv":
        yield from ((number, line.split("\t") if line else []) for number, line in enumerate(read_lines(path), 1))
        return
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader, line = csv.reader(file, strict=True), 0
        try:
            for record in reader:
                line = reader.line_num
                yield line, record
        except csv.Error as error:
            cause = f"the row that begins in line {line + 1} has quotes that do not close, or text behind them"
            raise UserError(
                f"{path} cannot be read as csv: {cause} ({error}). Inside of quotes, write a quote twice."
            ) from error


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file with one per line, or with a list of them."""
    hint = "A JSON file holds an object per line, or one list of objects"
    is_first = True
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(file, 1):
            is_list = is_first and line.lstrip().startswith("[")
            is_first = is_first and not line.strip()
            try:
                values = _parse(line + file.read()) if is_list else [_parse(line)] if line.strip() else []
            except ValueError as error:
                raise UserError(f"{path} cannot be read as json: line {number}: {reason(error)}. {hint}.") from error
            for place, value in enumerate(values):
                if not isinstance(value, dict):
                    where = f"element {place}" if is_list else f"line {number}"
                    raise UserError(f"{path}: {where} is {shorten(repr(value))}. {hint}.")
                yield value
            if is_list:
                return


def _parse(text: str) -> Any:
    """The value of a JSON text. A whole number beyond 64 bits, which no column of numbers holds, stays a text."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_int=_integer)
    except RecursionError as error:
        raise ValueError("its lists or objects are nested too deeply") from error
    if "\\ud" in text.lower() and re.search("[\ud800-\udfff]", json.dumps(value, ensure_ascii=False)):
        raise ValueError("it has half of a surrogate pair")
    return value


def _integer(digits: str) -> int | str:
    return int(digits) if len(digits) < 20 and -(2**63) <= int(digits) < 2**63 else digits


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


# ---- lines, and what is checked first ----


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a text, without their ends. Only LF and CRLF end a line."""
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for line in file:
            yield line.removesuffix("\n").removesuffix("\r")


def check_file(path: Path, limit: int | None = None) -> None:
    """Refuse a file that is empty, not UTF-8, or without a line: CR alone ends those of old systems.

    Args:
        path: of a text file, a table, or lines of JSON.
        limit: bytes to read for the check of the encoding; by default all.

    Raises:
        UserError: Such a file.
    """
    if path.stat().st_size <= _BLOCK and not path.read_bytes().removeprefix(codecs.BOM_UTF8).strip():
        raise UserError(f"{path} is empty: it holds no text.")
    if ending(path) != ".parquet":
        _check_encoding(path, limit)
    if ending(path) not in (".csv", ".json", ".jsonl", ".parquet"):
        with path.open("rb") as file:
            head = file.read(_BLOCK)
        if b"\r" in head[:-1] and b"\n" not in head:
            raise UserError(f"{path} ends its lines with CR alone. Convert it: `tr '\\r' '\\n' < {path.name} > NEW`.")


def why_unreadable(error: BaseException) -> str:
    """Why a file or a data set of the Hub could not be read."""
    error = error.__cause__ or error
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text (convert it, for example with iconv)"
    return "it is empty" if isinstance(error, StopIteration) else reason(error)


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
