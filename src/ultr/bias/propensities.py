"""Read known examination (propensities) from a user's table, or from bias.json of `ultr bias` or `ultr train`.

A bias.json file is a JSON object. Both commands write

- `format`: 1
- `positions`: positions (`r2c3` for row 2 and column 3 of a grid), or `position@segment` if examination differs
- `theta`: examination at each of these positions, in (0, 1], or null where it could not be estimated
- `label`: the feedback that examination was estimated from
- `segments`, optionally: an object with `positions` and `theta` for each segment by name

and the other results of the command: intervals and a verdict, or the parameters of a bias model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv

from ultr.errors import DataError
from ultr.log.columns import as_data_error
from ultr.log.readers import as_table
from ultr.log.table import SEPARATOR, SLOT, position_id, rows_and_columns, slot
from ultr.utils.files import content_kind, existing_file
from ultr.utils.jsonfiles import check_format, read_json, write_json

COLUMNS = ["position", "propensity", "segment"]  # of a table of propensities; the last one is optional
BIAS_FORMAT = 1
BIAS_FILE = "bias.json"
LITTLE = 1e-3  # a number much smaller than 1
SMALLEST_KNOWN = 1e-6  # smaller propensities would give weights above a million


def read_propensities(path: str | Path) -> dict[str, float]:
    """Read known examination from a CSV or Parquet table; return it by position (`3`), or with a segment (`3@phone`).

    The columns are `position`, `propensity` and, where examination differs by segment, `segment`. Positions in a grid
    are slots such as `r2c3`.
    """
    path = existing_file(path)
    with as_data_error(path, "a table"):
        table = pq.read_table(path) if content_kind(path) == "Parquet" else csv.read_csv(path)
        columns = table.column_names
    return _from_table(table, columns, where=path)


def as_propensities(values: Any) -> dict[str, float]:
    """Return known examination as `read_propensities` does, from values in memory.

    - a mapping from positions (3 or "3"), or from `3@phone` or (3, "phone") if examination differs by segment
    - a pandas Series with such an index
    - a frame (pandas, polars, Arrow) as of propensities.csv; `position` and `segment` may be the index
    """
    if isinstance(values, Mapping):
        return _checked([_key(key) for key in values], list(values.values()), where="propensities")
    if hasattr(values, "index") and hasattr(values, "to_numpy") and not hasattr(values, "columns"):
        return as_propensities(dict(zip(values.index.tolist(), values.to_numpy().tolist(), strict=True)))
    if hasattr(values, "reset_index") and "position" not in values.columns:
        values = values.rename_axis(["position", "segment"][: values.index.nlevels]).reset_index()
    if not isinstance(values, pa.Table) and not hasattr(values, "columns"):
        hint = "pass a dict, a Series with positions as its index, or the frame of propensities.csv"
        raise DataError("propensities cannot be read", got=type(values).__name__, hint=hint)
    table = as_table(values)
    return _from_table(table, [name for name in COLUMNS if name in table.column_names], where="propensities")


def _key(key: Any) -> str:
    """Return the key of a position, such as 3 or 3.0, or of a position and a segment: `3`, or `3@phone`."""
    if isinstance(key, tuple) and len(key) == 2:
        return f"{_key(key[0])}@{key[1]}" if key[1] is not None and key[1] == key[1] else _key(key[0])
    text = str(int(key)) if isinstance(key, float) and key.is_integer() else str(key)
    position = text.partition("@")[0]
    if not position.isdecimal() and not SLOT.fullmatch(position):
        hint = "count from 0 or 1, or write slots of a grid as r2c3"
        raise DataError("positions of propensities must be whole numbers", got=repr(key), hint=hint)
    return text


def _from_table(table: pa.Table, columns: list[str], *, where: object) -> dict[str, float]:
    if sorted(columns) not in (sorted(COLUMNS[:2]), sorted(COLUMNS)):
        got = ", ".join(table.column_names[:5])
        what = "a table of propensities needs the columns position, propensity and, optionally, segment"
        raise DataError(what, where=where, got=got, hint="rename the columns, and drop others")
    try:
        positions = _positions(table["position"])
        values = table["propensity"].cast(pa.float64()).to_pylist()
        names = table["segment"].cast(pa.string()).to_pylist() if "segment" in columns else [None] * len(positions)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        brief = " ".join(str(error).split())[:200]
        what = f"positions must be whole numbers and propensities must be numbers ({brief})"
        raise DataError(what, where=where, hint="correct or drop the rows with other values") from error
    keys = [f"{position}@{name}" if name else str(position) for position, name in zip(positions, names, strict=True)]
    return _checked(keys, values, where=where)


def _positions(column: pa.ChunkedArray) -> list[Any]:
    """Return positions as numbers, or as the texts of slots of a grid if all are."""
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        texts = [str(text).strip() for text in column.to_pylist()]
        if texts and all(map(SLOT.fullmatch, texts)):
            return texts
    return list(column.cast(pa.int64()).to_pylist())


def _checked(keys: list[str], values: list[Any], *, where: object) -> dict[str, float]:
    """Return key -> propensity; raise DataError if a key is missing or repeated, or if a value is out of range."""
    for key, value in zip(keys, values, strict=True):
        number = value if isinstance(value, int | float) or hasattr(value, "__float__") else None
        if key.startswith("None") or number is None or not SMALLEST_KNOWN <= float(number) <= 1:
            got = f"{value} at position {key}"
            what = f"a propensity must be from {SMALLEST_KNOWN:g} to 1"
            raise DataError(what, where=where, got=got, hint="correct, clip or drop the row")
    if not keys:
        raise DataError("the table of propensities has no rows", where=where, hint="add one row for each position")
    if len(set(keys)) < len(keys):
        what = "each position must occur once, or once per segment"
        raise DataError(what, where=where, hint="drop the rows that repeat a position")
    return {key: float(value) for key, value in zip(keys, values, strict=True)}


def write_bias_file(folder: Path, content: Mapping[str, Any]) -> None:
    """Write bias.json into a folder; `content` has all entries but `format`."""
    write_json(folder / BIAS_FILE, {"format": BIAS_FORMAT, **content})


def bias_file(path: Path) -> Path:
    """Return the bias.json of a run or of an `ultr bias --out` folder; a path of a file as it is."""
    return path / BIAS_FILE if path.is_dir() else path


def read_bias_file(path: Path) -> dict[str, Any]:
    """Read a bias.json file; raise DataError if its format is not the one of this version."""
    content = read_json(path)
    check_format(content, BIAS_FORMAT, what="the bias file", where=path, hint="run the command that wrote it again")
    return content


def read_bias_theta(path: Path) -> dict[str, float]:
    """Read examination by position from a bias.json file, or from a run or `ultr bias --out` folder that has one."""
    path = bias_file(path)
    content = read_bias_file(path)
    try:
        theta = _theta_of(content)
        for segment, part in content.get("segments", {}).items():
            theta |= {f"{position}@{segment}": value for position, value in _theta_of(part).items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        hint = "name a folder that ultr bias --out wrote, a run of pairwise-em, or its bias.json"
        raise DataError("the file has no examination by position", where=path, hint=hint) from error
    if not theta:
        hint = "train without --bias, or give known examination with --propensities"
        raise DataError("examination could not be estimated: every theta in the file is null", where=path, hint=hint)
    if wrong := [k for k, value in theta.items() if not 0 < value <= 1]:
        got, hint = f"{theta[wrong[0]]} at position {wrong[0]}", "run the command that wrote the file again"
        raise DataError("examination must be above 0 and at most 1", where=path, got=got, hint=hint)
    return theta


def _theta_of(content: Mapping[str, Any]) -> dict[str, float]:
    """Return what a run corrected feedback by, or the estimate of ultr bias."""
    pairs = zip(content["positions"], content.get("theta_used", content["theta"]), strict=True)
    return {str(position): float(value) for position, value in pairs if value is not None}


def theta_by_id(
    theta: Mapping[str, float], positions: tuple[int, ...], segments: tuple[str, ...] = (), *, nearest: bool = False
) -> dict[int, float]:
    """Return known examination by position id; `nearest` is as for `known_slots`.

    With `nearest`, an unknown segment has the θ that the values of its columns suggest, unless it is of one column and
    there is a curve of all segments.
    """
    texts = {position: slot(position, segments) for position in positions}
    unknown = {k for k, text in texts.items() if nearest and (SEPARATOR in text or text.partition("@")[0] not in theta)}
    found = {position: suggested(theta, texts[position]) for position in unknown}
    names = known_slots(theta, tuple(k for k in positions if found.get(k) is None), segments, nearest=nearest)
    return {position: found.get(position) or theta[names[position]] for position in positions}


def suggested(theta: Mapping[str, float], text: str) -> float | None:
    """Return θ at a slot of an unknown segment, such as `3@tablet + search`; None if the segment is known.

    log θ, at the nearest known position, is a mean of segments and a part for each value of a column, by least squares
    of the known segments. An unknown value has no part.
    """
    known: dict[str, dict[str, float]] = {}  # segment -> position -> θ
    for name, value in theta.items():
        position, at, segment = name.partition("@")
        if at:
            known.setdefault(segment, {})[position] = value
    position, at, wanted = text.partition("@")
    if not at or not known or wanted in known:
        return None
    nearest = min({k for curve in known.values() for k in curve}, key=lambda k: (_apart(k, position), position_id(k)))
    there = {segment: np.log(curve[nearest]) for segment, curve in known.items() if nearest in curve}
    values = {segment: set(enumerate(segment.split(SEPARATOR))) for segment in (*there, wanted)}
    parts = sorted(set().union(*values.values()))
    # A part costs more than the mean, so that the mean is that of the segments.
    design = {segment: [1.0, *(LITTLE * (part in has) for part in parts)] for segment, has in values.items()}
    solved = np.linalg.lstsq(np.array([design[segment] for segment in there]), np.array([*there.values()]))[0]
    return float(np.exp(np.clip(solved @ design[wanted], np.log(SMALLEST_KNOWN), 0)))


def known_slots(
    known: Collection[str], positions: tuple[int, ...], segments: tuple[str, ...] = (), *, nearest: bool = False
) -> dict[int, str]:
    """Return the text of each position id in `known`; a position that is unknown for its segment has none there.

    With `nearest`, an unknown position has the text of the nearest one of its segment, or else of all: an estimate from
    an earlier log does not know a list that is longer than all before.
    """
    by_id = {}
    for position in positions:
        names = slot(position, segments), slot(position, segments).partition("@")[0]
        name = next((name for name in names if name in known), None)
        if name is None and nearest:
            name = _nearest(known, *names[0].split("@", 1))
        if name is None:
            hint = "add a value for every position of the log to the table of --propensities, or to bias.json"
            raise DataError(f"position {names[0]} has no propensity", hint=hint)
        by_id[position] = name
    return by_id


def _nearest(known: Collection[str], position: str, segment: str = "") -> str | None:
    """Return the known text of the nearest position, in the same segment if that is known, or in the most similar."""
    values = segment.split(SEPARATOR)

    def distance(name: str) -> tuple[bool, int, int, str]:
        at, _, other = name.partition("@")
        alike = sum(a == b for a, b in zip(values, other.split(SEPARATOR), strict=False))
        return other != segment, -alike, _apart(at, position), name

    return min(known, key=distance, default=None)


def _apart(a: str, b: str) -> int:
    """Return how many positions, or rows and columns of a grid, are between two positions such as `3` or `r2c3`."""
    first, second = position_id(a), position_id(b)
    if not SLOT.fullmatch(b):
        return abs(first - second)
    return sum(abs(x - y) for x, y in zip(rows_and_columns(first), rows_and_columns(second), strict=True))
