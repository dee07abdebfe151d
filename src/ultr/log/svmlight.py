"""Reading SVMlight and LETOR files: `grade qid:7 1:0.5 3:0.25 # a comment`, features sparse or dense, gzipped or not.

The text is cut into numbers by Arrow's CSV reader, which is compiled, threaded and exact: blanks, colons and line ends
of a block all become line ends, `qid` becomes a number, and the block is then one column of numbers whose meaning
follows from their order. That is several times faster than reading line by line.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.csv

from ultr.errors import DataError, OptionError
from ultr.files import existing_file
from ultr.log.build import Piece, check_features
from ultr.log.table import Log
from ultr.memory import available_memory

BLOCK_BYTES = 32 << 20
STREAM_BYTES = 4 << 20  # a block and what it is parsed with take some twenty times as much
MAX_INDEX = 1_000_000
EXACT = 2**53  # numbers pass through double precision
_TAB, _NEWLINE, _RETURN, _SPACE, _HASH, _COLON = b"\t\n\r #:"
_EXPECTED = f"a line should read 'grade qid:ID 1:VALUE 2:VALUE ...', each feature once and up to {MAX_INDEX:,}"


@dataclass(frozen=True)
class _Block:
    grades: np.ndarray  # [lines] float32
    qids: np.ndarray  # [lines] int64
    counts: np.ndarray  # [lines] features of each line
    indices: np.ndarray  # [values] int32, from 1
    values: np.ndarray  # [values] float32


def read_svmlight(path: str | Path) -> Log:
    """A log with true relevance and features `1`, `2`, ...; values left out are zero. There are no positions."""
    path = existing_file(path)
    blocks = list(_read(path, BLOCK_BYTES))
    if not blocks:
        raise DataError("there are no rows", where=path, mend=_EXPECTED)
    qids = np.concatenate([block.qids for block in blocks])
    grades = np.concatenate([block.grades for block in blocks])
    features = _dense(blocks, path)
    names = _checked(features, grades, path, rows_before=0)
    order, offsets, ids = _group(qids)
    return Log(
        features=features if order is None else features[order],
        offsets=offsets,
        request_ids=pa.array(ids),
        feature_names=names,
        relevance=grades if order is None else grades[order],
    )


def svmlight_batches(path: Path, *, width: int, numbers: int) -> Iterator[Log]:
    """The rows as they come, each as a request of its own, some at a time: about so many `numbers`.

    They have features `1` to `width`, whatever others the file has; values left out are zero.
    """
    before = 0
    for block in _read(path, STREAM_BYTES):
        row_of_value = np.repeat(np.arange(len(block.grades)), block.counts)
        rows = max(1, numbers // max(1, width))
        for first in range(0, len(block.grades), rows):
            grades, qids = block.grades[first : first + rows], block.qids[first : first + rows]
            inside = slice(*np.searchsorted(row_of_value, (first, first + rows)))
            known = block.indices[inside] <= width
            features = np.zeros((len(grades), width), np.float32)
            places = row_of_value[inside][known] - first, block.indices[inside][known] - 1
            features[places] = block.values[inside][known]
            names = _checked(features, grades, path, rows_before=before)
            yield Log(features, np.arange(len(grades) + 1), pa.array(qids), names, relevance=grades)
            before += len(grades)


def _read(path: Path, block_bytes: int) -> Iterator[_Block]:
    lines = 0
    try:
        with _open(path) as stream:
            for text in _blocks_of_lines(stream, block_bytes):
                block = _parse(text, path, lines)
                lines += text.count(b"\n")
                if len(block.grades):
                    yield block
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"the gzip data is damaged ({error})", where=path, mend="fetch or write the file again"
        ) from error


def _checked(features: np.ndarray, grades: np.ndarray, path: Path, *, rows_before: int) -> tuple[str, ...]:
    """The names of features, which must be finite, as must grades."""
    names = [str(i + 1) for i in range(features.shape[1])]
    check_features(features, names, where=Piece(path, rows_before), missing="refuse")
    fine = (grades >= 0) & (grades < np.inf)
    if not fine.all():
        row = int(np.flatnonzero(~fine)[0])
        got = f"{grades[row]} in row {rows_before + row + 1}"
        raise DataError("grades should be finite and not negative", where=path, got=got, mend="mend or drop the line")
    return tuple(names)


def _group(qids: np.ndarray) -> tuple[np.ndarray | None, np.ndarray, np.ndarray]:
    starts = np.concatenate([[0], np.flatnonzero(np.diff(qids)) + 1])
    ids = qids[starts]
    if len(np.unique(ids)) == len(ids):
        return None, np.append(starts, len(qids)).astype(np.int64), ids
    distinct, first, codes = np.unique(qids, return_index=True, return_inverse=True)
    by_appearance = np.argsort(first)
    rank = np.empty_like(by_appearance)
    rank[by_appearance] = np.arange(len(distinct))
    order = np.argsort(rank[codes], kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rank[codes]))]).astype(np.int64)
    return order, offsets, distinct[by_appearance]


def _dense(blocks: list[_Block], path: Path) -> np.ndarray:
    """The blocks as one matrix; each block is dropped once it is copied, so memory peaks at little above the result."""
    rows = sum(len(block.grades) for block in blocks)
    width = max(int(block.indices.max(initial=0)) for block in blocks)
    if 4 * rows * width > available_memory():
        what = f"{rows:,} rows of {width:,} features do not fit in memory"
        raise DataError(what, where=path, mend="drop features or hash them to fewer")
    matrix = np.zeros((rows, width), np.float32)
    start = 0
    for block in blocks:
        row_starts = (start + np.arange(len(block.grades), dtype=np.int64)) * width - 1  # indices count from 1
        matrix.reshape(-1)[np.repeat(row_starts, block.counts) + block.indices] = block.values
        start += len(block.grades)
    return matrix


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _blocks_of_lines(stream: BinaryIO, block_bytes: int) -> Iterator[bytes]:
    rest = b""
    while read := stream.read(block_bytes):
        text = rest + read
        end = text.rfind(b"\n") + 1
        rest = text[end:]
        if end:
            yield text[:end]
    if rest.strip():
        yield rest + b"\n"


def _parse(text: bytes, path: Path, lines_before: int) -> _Block:
    raw = np.frombuffer(text, np.uint8)
    data = _tidy(raw)
    empty = np.zeros(0, np.float32)
    if not len(data):
        return _Block(empty, empty.astype(np.int64), empty.astype(np.int64), empty.astype(np.int32), empty)
    is_separator = (data == _SPACE) | (data == _COLON) | (data == _NEWLINE)
    at = np.flatnonzero(is_separator)
    separators = data[at]
    ends = np.flatnonzero(separators == _NEWLINE)  # index, among separators, of each line's end
    starts = np.concatenate([[0], ends[:-1] + 1])
    tokens = ends - starts + 1
    # A line is: grade SPACE qid COLON id SPACE index COLON value ... NEWLINE, so separators alternate.
    odd = np.zeros(len(separators), np.uint8)
    odd[1::2] = 1
    odd ^= np.repeat((starts & 1).astype(np.uint8), tokens)  # parity of a separator's place in its own line
    expected = np.where(odd, np.uint8(_COLON), np.uint8(_SPACE))
    expected[ends] = _NEWLINE
    regular = (separators == expected).all() and (tokens % 2 == 1).all() and (tokens >= 3).all()
    key = at[starts] + 1  # where the word qid should stand
    if not regular or not _spells(data, key, b"qid:"):
        raise _bad_line(text, path, lines_before)
    data[key] = data[key + 1] = data[key + 2] = ord("0")
    data[at] = _NEWLINE
    numbers = _numbers(data)
    if numbers is None or len(numbers) != len(separators):
        raise _bad_line(text, path, lines_before)
    qids = numbers[starts + 2]
    is_pair = np.ones(len(numbers), bool)
    is_pair[starts] = is_pair[starts + 1] = is_pair[starts + 2] = False
    pairs = numbers[is_pair].reshape(-1, 2)
    with np.errstate(invalid="ignore"):
        indices = pairs[:, 0].astype(np.int32)
    counts = (tokens - 3) // 2
    row_of_pair = np.repeat(np.arange(len(counts)), counts)
    fine = (indices == pairs[:, 0]).all() and ((indices >= 1) & (indices <= MAX_INDEX)).all()
    if not fine or (np.floor(qids) != qids).any() or (np.abs(qids) >= EXACT).any() or _repeats(row_of_pair, indices):
        raise _bad_line(text, path, lines_before)
    with np.errstate(over="ignore"):
        values = pairs[:, 1].astype(np.float32)
    return _Block(numbers[starts].astype(np.float32), qids.astype(np.int64), counts, indices, values)


def _repeats(rows: np.ndarray, indices: np.ndarray) -> bool:
    """Whether a feature stands twice in a line."""
    same_row = rows[1:] == rows[:-1]
    if (indices[1:] > indices[:-1])[same_row].all():  # they usually rise
        return False
    keys = np.sort(rows * (MAX_INDEX + 1) + indices)
    return bool((keys[1:] == keys[:-1]).any())


def _tidy(raw: np.ndarray) -> np.ndarray:
    """The bytes without comments, blank lines, carriage returns, and with single spaces between words only."""
    data = raw.copy()
    data[(data == _TAB) | (data == _RETURN)] = _SPACE
    if (data == _HASH).any():
        newlines = np.flatnonzero(data == _NEWLINE)
        hashes = np.flatnonzero(data == _HASH)
        line_of_hash, first = np.unique(np.searchsorted(newlines, hashes), return_index=True)
        edges = np.zeros(len(data) + 1, np.int8)
        edges[hashes[first]] += 1
        edges[newlines[line_of_hash]] -= 1
        data = data[np.cumsum(edges[:-1], dtype=np.int8) == 0]
    blank = (data == _SPACE) | (data == _NEWLINE)
    after_blank = np.concatenate([[True], blank[:-1]])
    drop = after_blank & (data == _SPACE)  # runs of spaces, and spaces that begin a line
    if drop.any():
        data = data[~drop]
    before_newline = np.concatenate([data[1:] == _NEWLINE, [False]])
    drop = (data == _SPACE) & before_newline
    if drop.any():
        data = data[~drop]
    newline = data == _NEWLINE
    drop = newline & np.concatenate([[True], newline[:-1]])
    return data[~drop] if drop.any() else data


def _spells(data: np.ndarray, at: np.ndarray, word: bytes) -> bool:
    return all(bool((data[np.minimum(at + i, len(data) - 1)] == letter).all()) for i, letter in enumerate(word))


def _numbers(data: np.ndarray) -> np.ndarray | None:
    """One number per line of `data`, or None where a line is none."""
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
    """Find the first line that does not read as it should; only called when there is one."""
    for number, line in enumerate(text.split(b"\n"), start=lines_before + 1):
        words = line.split(b"#")[0].split()
        try:
            if not words:
                continue
            float(words[0])
            key, _, qid = words[1].partition(b":")
            if key != b"qid":
                raise ValueError
            if abs(int(qid)) >= EXACT:
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
            return DataError(
                f"{_EXPECTED}", where=path, got=f"{shown!r} in line {number}", mend="mend or drop the line"
            )
    return DataError(_EXPECTED, where=path, mend="check the file")


def has_no_names(path: Path, given: str, value: object) -> OptionError:
    """That columns cannot be named."""
    what, mend = "SVMlight files have no named columns", "name none, or write CSV or Parquet"
    return OptionError(what, where=path, got=f"{given}={value!r}", mend=mend)
