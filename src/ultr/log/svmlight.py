"""Read SVMlight and LETOR files: lines of `grade qid:7 1:0.5 3:0.25 # a comment`, where zeros may be omitted.

Arrow's CSV reader, which is compiled, threaded and exact, parses the numbers. In a block of lines, blanks and colons
become line ends, and `qid` becomes 000. The block is then one column of numbers, where the place of a number gives its
meaning. This is several times faster than reading line by line. Files may be gzipped.
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.csv

from ultr.errors import DataError, OptionError
from ultr.log.build import group_rows
from ultr.log.columns import Piece, check_features
from ultr.log.table import Log
from ultr.utils.files import existing_file
from ultr.utils.memory import available_memory

BLOCK_BYTES = 32 << 20  # bytes of text in a block if a whole file is read
STREAM_BYTES = 4 << 20  # the same for batches; parsing takes about twenty times as much memory
MAX_INDEX = 1_000_000  # the highest feature number
EXACT = 2**53  # ids are parsed in double precision, which is exact below this number
_NEWLINE, _SPACE, _COLON = b"\n :"
_EXPECTED = f"a line must read 'grade qid:ID 1:VALUE 2:VALUE ...', with feature numbers 1 to {MAX_INDEX:,}, each once"
_FIX_LINE = "correct or remove the line"


@dataclass(frozen=True)
class _Block:
    grades: np.ndarray  # [lines] float32
    qids: np.ndarray  # [lines] int64
    counts: np.ndarray  # [lines] number of features in each line
    indices: np.ndarray  # [values] int32, from 1
    values: np.ndarray  # [values] float32


def read_svmlight(path: str | Path) -> Log:
    """Read a log: the grades are its true relevance, a feature that a line omits is 0, and there are no positions."""
    path = existing_file(path)
    blocks = list(_read(path, BLOCK_BYTES))
    if not blocks:
        raise DataError("there are no rows", where=path, hint=_EXPECTED)
    qids = np.concatenate([block.qids for block in blocks])
    grades = np.concatenate([block.grades for block in blocks])
    features = _dense(blocks, path)
    names = _checked_names(features, grades, path, rows_before=0)
    ids = pa.array(qids)
    order, offsets, first_rows = group_rows(ids, name="qid", where=path)
    return Log(
        features=features if order is None else features[order],
        offsets=offsets,
        request_ids=ids.take(pa.array(first_rows)),
        feature_names=names,
        relevance=grades if order is None else grades[order],
    )


def svmlight_batches(path: Path, *, width: int, numbers: int) -> Iterator[Log]:
    """Yield logs of about `numbers` feature values each, in which each row is a request of its own.

    The features are `1` to `width`; others in the file are ignored, and a feature that a line omits is 0.
    """
    rows_before = 0
    for block in _read(path, STREAM_BYTES):
        row_of_value = np.repeat(np.arange(len(block.grades)), block.counts)
        rows = max(1, numbers // max(1, width))
        for first in range(0, len(block.grades), rows):
            grades, qids = block.grades[first : first + rows], block.qids[first : first + rows]
            inside = slice(*np.searchsorted(row_of_value, (first, first + rows)))
            used = block.indices[inside] <= width
            features = np.zeros((len(grades), width), np.float32)
            places = row_of_value[inside][used] - first, block.indices[inside][used] - 1
            features[places] = block.values[inside][used]
            names = _checked_names(features, grades, path, rows_before=rows_before)
            yield Log(features, np.arange(len(grades) + 1), pa.array(qids), names, relevance=grades)
            rows_before += len(grades)


def _read(path: Path, block_bytes: int) -> Iterator[_Block]:
    lines = 0
    try:
        with _open(path) as stream:
            for text in whole_lines(stream, block_bytes):
                if len(data := _tidy(text)):
                    block = _parse(data)
                    if block is None:
                        raise _bad_line(text, path, lines)
                    yield block
                lines += text.count(b"\n")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        hint = "download or write the file again"
        raise DataError(f"the gzip data is damaged ({error})", where=path, hint=hint) from error


def _checked_names(features: np.ndarray, grades: np.ndarray, path: Path, *, rows_before: int) -> tuple[str, ...]:
    """Return the names of the features; raise DataError if a feature or grade is not finite, or a grade negative."""
    names = [str(i + 1) for i in range(features.shape[1])]
    check_features(features, names, where=Piece(path, rows_before), missing="reject")
    fine = (grades >= 0) & (grades < np.inf)
    if not fine.all():
        row = int(np.flatnonzero(~fine)[0])
        got = f"{grades[row]} in row {rows_before + row + 1}"
        raise DataError("grades must be finite and not negative", where=path, got=got, hint=_FIX_LINE)
    return tuple(names)


def _dense(blocks: list[_Block], path: Path) -> np.ndarray:
    """Return the features of the blocks as one matrix; raise DataError if it does not fit in memory."""
    rows = sum(len(block.grades) for block in blocks)
    width = max(int(block.indices.max(initial=0)) for block in blocks)
    if 4 * rows * width > available_memory():
        what = f"{rows:,} rows of {width:,} features do not fit in memory"
        raise DataError(what, where=path, hint="drop features, or hash them to fewer numbers")
    matrix = np.zeros((rows, width), np.float32)
    start = 0
    for block in blocks:
        row_starts = (start + np.arange(len(block.grades), dtype=np.int64)) * width - 1  # indices count from 1
        matrix.reshape(-1)[np.repeat(row_starts, block.counts) + block.indices] = block.values
        start += len(block.grades)
    return matrix


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def whole_lines(stream: Any, block_bytes: int) -> Iterator[bytes]:
    """Yield the text of a stream in blocks of whole lines; the last line ends with a line end too."""
    rest = b""
    while read := stream.read(block_bytes):
        text = rest + read
        end = text.rfind(b"\n") + 1
        rest = text[end:]
        if end:
            yield text[:end]
    if rest.strip():
        yield rest + b"\n"


def _tidy(text: bytes) -> np.ndarray:
    """Return the bytes without comments, blank lines and carriage returns, and with single spaces between words."""
    text = re.sub(rb"#[^\n]*", b"", text).translate(bytes.maketrans(b"\t\r", b"  "))
    text = re.sub(rb"  +", b" ", text).replace(b" \n", b"\n").replace(b"\n ", b"\n")
    return np.frombuffer(bytearray(re.sub(rb"\n\n+", b"\n", text).lstrip()), np.uint8)


def _parse(data: np.ndarray) -> _Block | None:
    """Return the content of lines of tidy text; None if a line is not in the expected format."""
    at = np.flatnonzero((data == _SPACE) | (data == _COLON) | (data == _NEWLINE))
    separators = data[at]
    ends = np.flatnonzero(separators == _NEWLINE)  # index, among separators, of each line's end
    starts = np.concatenate([[0], ends[:-1] + 1])
    tokens = ends - starts + 1
    # A line is: grade SPACE qid COLON id SPACE index COLON value ... NEWLINE, so separators alternate.
    place = np.arange(len(separators)) - np.repeat(starts, tokens)  # of a separator in its own line
    expected = np.where(place & 1, np.uint8(_COLON), np.uint8(_SPACE))
    expected[ends] = _NEWLINE
    regular = (separators == expected).all() and (tokens % 2 == 1).all() and (tokens >= 3).all()
    key = at[starts] + 1  # where the word qid must be
    if not regular or not _spells(data, key, b"qid:"):
        return None
    data[key] = data[key + 1] = data[key + 2] = ord("0")
    data[at] = _NEWLINE
    numbers = _numbers(data)
    if numbers is None or len(numbers) != len(separators):
        return None
    qids, pairs = numbers[starts + 2], numbers[place > 2].reshape(-1, 2)
    with np.errstate(invalid="ignore", over="ignore"):
        indices, values = pairs[:, 0].astype(np.int32), pairs[:, 1].astype(np.float32)
    counts = (tokens - 3) // 2
    row_of_pair = np.repeat(np.arange(len(counts)), counts)
    fine = (indices == pairs[:, 0]).all() and ((indices >= 1) & (indices <= MAX_INDEX)).all()
    if not fine or (np.floor(qids) != qids).any() or (np.abs(qids) >= EXACT).any() or _repeats(row_of_pair, indices):
        return None
    return _Block(numbers[starts].astype(np.float32), qids.astype(np.int64), counts, indices, values)


def _repeats(rows: np.ndarray, indices: np.ndarray) -> bool:
    """Return whether a line has the same feature twice."""
    same_row = rows[1:] == rows[:-1]
    if (indices[1:] > indices[:-1])[same_row].all():  # most files have the features of a line in increasing order
        return False
    keys = np.sort(rows * (MAX_INDEX + 1) + indices)
    return bool((keys[1:] == keys[:-1]).any())


def _spells(data: np.ndarray, at: np.ndarray, word: bytes) -> bool:
    return all(bool((data[np.minimum(at + i, len(data) - 1)] == letter).all()) for i, letter in enumerate(word))


def _numbers(data: np.ndarray) -> np.ndarray | None:
    """Return one number per line of `data`, or None if a line is not a number."""
    try:
        column = pa.csv.read_csv(
            io.BytesIO(data.tobytes()),
            read_options=pa.csv.ReadOptions(column_names=["n"], block_size=4 << 20),
            parse_options=pa.csv.ParseOptions(delimiter=",", quote_char=False, ignore_empty_lines=False),
            convert_options=pa.csv.ConvertOptions(
                column_types={"n": pa.float64()}, null_values=[], strings_can_be_null=False
            ),
        )["n"]
    except pa.ArrowInvalid:
        return None
    return cast(np.ndarray, column.to_numpy())


def _bad_line(text: bytes, path: Path, lines_before: int) -> DataError:
    """Return the error for the first line that is not in the expected format."""
    for number, line in enumerate(text.split(b"\n"), start=lines_before + 1):
        words = line.split(b"#")[0].split()
        try:
            if not words:
                continue
            float(words[0])
            key, _, qid = words[1].partition(b":")
            if key != b"qid" or abs(int(qid)) >= EXACT:
                raise ValueError
            seen = set()
            for word in words[2:]:
                index, _, value = word.partition(b":")
                if not 1 <= int(index) <= MAX_INDEX or int(index) in seen:
                    raise ValueError
                seen.add(int(index))
                float(value)
        except (ValueError, IndexError):
            shown = line[:60].decode("utf-8", "replace") + ("..." if len(line) > 60 else "")
            return DataError(_EXPECTED, where=path, got=f"{shown!r} in line {number}", hint=_FIX_LINE)
    return DataError(_EXPECTED, where=path, hint="check the file")


def reject_names(path: object, named: Mapping[str, Any]) -> None:
    """Raise OptionError if the caller names columns, which an SVMlight file does not have."""
    if given := next((f"{role}={name!r}" for role, name in named.items() if name is not None), None):
        what, hint = "SVMlight files have no named columns", "do not name columns, or convert it to CSV or Parquet"
        raise OptionError(what, where=path, got=given, hint=hint)
