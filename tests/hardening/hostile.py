"""Make hostile files, and draw them with hypothesis; `hostile_cases` has a table of named ones."""

from __future__ import annotations

import gzip
import io
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet as pq
from hypothesis import strategies as st

REQUESTS, ITEMS = 20, 4
ROWS = REQUESTS * ITEMS


# Valid files


def base(requests: int = REQUESTS, items: int = ITEMS, *, strings: bool = True) -> pa.Table:
    """Make a log that every command accepts, with feedback and true labels."""
    rng = np.random.default_rng(0)
    rows = requests * items
    click = rng.random(rows) < 0.4
    return pa.table(
        {
            "request": [f"r{i // items}" if strings else i // items for i in range(rows)],
            "item": rng.integers(0, 12, rows),
            "position": np.arange(rows) % items + 1,
            "click": click.astype(np.int64),
            "dwell": np.where(click, rng.exponential(20, rows), 0.0),
            "relevance": rng.integers(0, 3, rows),
            "f1": rng.normal(size=rows),
            "f2": rng.normal(size=rows),
        }
    )


def parquet_bytes(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def csv_bytes(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pa.csv.write_csv(table, sink)
    return sink.getvalue()


def arrow_bytes(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def svmlight_bytes(requests: int = REQUESTS, items: int = ITEMS) -> bytes:
    rng = np.random.default_rng(0)
    lines = [f"{rng.integers(0, 3)} qid:{i // items} 1:{rng.random():.3f} 2:{i}" for i in range(requests * items)]
    return "\n".join([*lines, ""]).encode()


def clean(suffix: str) -> bytes:
    """Return the content of a valid file."""
    table = base()
    return {
        ".parquet": lambda: parquet_bytes(table),
        ".csv": lambda: csv_bytes(table),
        ".csv.gz": lambda: gzip.compress(csv_bytes(table), mtime=0),
        ".arrow": lambda: arrow_bytes(table),
        ".txt": svmlight_bytes,
        ".txt.gz": lambda: gzip.compress(svmlight_bytes(), mtime=0),
    }[suffix]()


KINDS = (".parquet", ".csv", ".csv.gz", ".arrow", ".txt", ".txt.gz")


def holds(content: bytes | str | Callable[[], bytes], suffix: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        data = content() if callable(content) else content
        path = folder / f"hostile{suffix}"
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return path

    return make


def with_column(table: pa.Table, name: str, values: Any) -> pa.Table:
    column = values if isinstance(values, pa.Array) else pa.array(values)
    return table.set_column(table.schema.get_field_index(name), name, column)


# Strategies

HOSTILE_NUMBERS = (0, -1, 1, 2, 0.5, -0.0, 1e-45, 5e-324, 1e30, 3.4e38, 1e39, 1e308, 2**53, 2**63 - 1, -(2**63), 10**9)
HOSTILE_NUMBERS += (float("nan"), float("inf"), -float("inf"))
HOSTILE_TEXTS = ("", " ", "\0", "r1", "1", "01", "1e5", "NaN", "null", "[x]", "'", '"', ",", "\n", "=1+1", "é")


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, bytes]:
    """Draw a valid file and damage it: cut it, or flip, insert, drop, repeat or swap some bytes."""
    suffix = draw(st.sampled_from(KINDS))
    content = bytearray(clean(suffix))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(content)))
        how = draw(st.sampled_from(("cut", "flip", "insert", "drop", "repeat", "swap")))
        length = draw(st.integers(1, 40))
        if how == "cut":
            del content[place:]
        elif how == "flip":
            for at in range(place, min(len(content), place + length)):
                content[at] ^= draw(st.integers(1, 255))
        elif how == "insert":
            content[place:place] = draw(st.binary(min_size=1, max_size=40))
        elif how == "drop":
            del content[place : place + length]
        elif how == "repeat":
            content[place:place] = content[place : place + length]
        else:
            other = draw(st.integers(0, len(content)))
            content[place : place + length], content[other : other + length] = (
                content[other : other + length],
                content[place : place + length],
            )
    return suffix, bytes(content)


def _columns() -> st.SearchStrategy[pa.Array]:
    numbers = st.one_of(st.sampled_from(HOSTILE_NUMBERS), st.floats(width=64), st.integers(-(2**63), 2**63 - 1))
    floats = numbers.map(float)
    whole = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5)
    texts = st.sampled_from(HOSTILE_TEXTS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
    kinds = (
        (floats, pa.float64()),
        (floats, pa.float32()),
        (st.integers(0, 3).map(float), pa.float16()),
        (whole, pa.int64()),
        (st.integers(0, 2**64 - 1), pa.uint64()),
        (st.integers(-128, 127), pa.int8()),
        (st.booleans(), pa.bool_()),
        (texts, pa.string()),
        (texts, pa.large_string()),
        (st.binary(max_size=3), pa.binary()),
        (st.integers(0, 40_000), pa.date32()),
        (st.integers(0, 2**60), pa.timestamp("us")),
        (st.none(), pa.null()),
        (st.lists(st.none() | floats, max_size=3), pa.list_(pa.float64())),
        (st.lists(floats, min_size=2, max_size=2), pa.list_(pa.float32(), 2)),
        (st.fixed_dictionaries({"a": floats}), pa.struct([("a", pa.float64())])),
    )

    def column(kind: tuple[Any, Any]) -> st.SearchStrategy[pa.Array]:
        few = st.lists(kind[0], min_size=1, max_size=4)  # a few values that recur, as in real columns
        holes = st.sampled_from((0, 0, 0, 1))
        return st.builds(partial(_filled, kind=kind[1]), few, holes, st.booleans())

    return st.sampled_from(kinds).flatmap(column)


def _filled(few: list[Any], holes: int, dictionary: bool, *, kind: pa.DataType) -> pa.Array:
    values = [few[i // ITEMS % len(few)] for i in range(ROWS)]
    for hole in range(holes):
        values[hole * 7 + 3] = None
    column = pa.array(values, kind)
    plain = pa.types.is_nested(kind) or pa.types.is_float16(kind)  # pyarrow cannot encode these
    return column.dictionary_encode() if dictionary and not plain else column


@st.composite
def tables(draw: st.DrawFn) -> tuple[str, bytes]:
    """Draw a log with some drawn columns, as Parquet or CSV, or as Arrow if these cannot store the values."""
    table = base(strings=draw(st.booleans()))
    for name in draw(st.lists(st.sampled_from(table.column_names), min_size=1, max_size=2, unique=True)):
        table = with_column(table, name, draw(_columns()))
    extra = draw(st.sampled_from((None, None, "weight", "randomised", "query", "features", "comment", "")))
    if extra is not None:
        table = table.append_column(extra, draw(_columns()))
    table = table.slice(0, draw(st.sampled_from((ROWS, ROWS, ROWS, ITEMS, 5, 1, 0))))
    try:
        return (".csv", csv_bytes(table)) if draw(st.booleans()) else (".parquet", parquet_bytes(table))
    except pa.ArrowException:  # the format cannot store such values
        return ".arrow", arrow_bytes(table)


@st.composite
def texts(draw: st.DrawFn) -> tuple[str, bytes]:
    """Draw a CSV or SVMlight file with some drawn lines."""
    suffix, alphabet = draw(
        st.sampled_from(((".csv", ",\";\t\r\0 rR01.eE-+naif'|é"), (".txt", "qid: 0123456789.e-+#\tnaif\r")))
    )
    lines = clean(suffix).split(b"\n")
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(lines)))
        lines.insert(place, draw(st.text(alphabet, max_size=30)).encode())
    if draw(st.booleans()):
        lines = lines[: draw(st.integers(0, len(lines)))]
    return suffix, b"\n".join(lines)


def files() -> st.SearchStrategy[tuple[str, bytes]]:
    return damaged() | tables() | texts()


@st.composite
def propensities(draw: st.DrawFn) -> tuple[str, bytes]:
    """Draw a table position,propensity with some drawn fields and sometimes damaged bytes."""
    rows = [[str(k), str(1 / k)] for k in range(1, ITEMS + 1)]
    odd = st.sampled_from((*map(str, HOSTILE_NUMBERS), *HOSTILE_TEXTS)) | st.text(max_size=4)
    for _ in range(draw(st.integers(0, 3))):
        rows[draw(st.integers(0, len(rows) - 1))][draw(st.integers(0, 1))] = draw(odd)
    text = "\n".join(",".join(row) for row in [["position", "propensity"], *rows])
    content = bytearray(text.encode("utf-8", "surrogatepass"))
    if draw(st.booleans()):
        place = draw(st.integers(0, len(content)))
        content[place : place + draw(st.integers(0, 5))] = draw(st.binary(max_size=5))
    return ".csv", bytes(content)


@st.composite
def spoilt_json(draw: st.DrawFn, text: str) -> str:
    """Draw JSON with one value replaced or deleted."""
    about = json.loads(text)
    inside, key = about, None
    while isinstance(inside, dict | list) and inside and (key is None or draw(st.booleans())):
        if key is not None and not isinstance(inside[key], dict | list):
            break
        inside = inside if key is None else inside[key]
        if not inside:
            return draw(st.sampled_from(("", "[]", text[: len(text) // 2])))
        key = draw(st.sampled_from(sorted(inside) if isinstance(inside, dict) else range(len(inside))))
    if draw(st.booleans()):
        others = (None, [], {}, "", "x", -1, 0, 1e30, 2**70, True, [1], [[]], ["x"], {"x": 1}, math.nan, math.inf)
        inside[key] = draw(st.sampled_from(others))
    else:
        del inside[key]
    return json.dumps(about)
