"""Read known examination (propensities) from a user's table, or from bias.json of `ultr bias` or `ultr train`.

A bias.json file is a JSON object. Both commands write

- `format`: 1
- `positions`: positions, or `position@segment` where examination differs by segment
- `theta`: examination at each of these positions, in (0, 1], or null where it could not be estimated
- `label`: the feedback that examination was estimated from
- `segments`, optionally: an object with `positions` and `theta` for each segment by name

and the other results of the command: intervals and a verdict, or the parameters of a bias model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv

from ultr.errors import DataError
from ultr.log.segments import slot
from ultr.log.values import as_data_error
from ultr.utils.files import content_kind, existing_file
from ultr.utils.jsonfiles import check_format, read_json, write_json

BIAS_FORMAT = 1
BIAS_FILE = "bias.json"
SMALLEST_KNOWN = 1e-6  # smaller propensities would give weights above a million


def read_propensities(path: str | Path) -> dict[str, float]:
    """Read known examination from a CSV or Parquet table; return it by position (`3`), or with a segment (`3@phone`).

    The columns are `position`, `propensity` and, where examination differs by segment, `segment`.
    """
    path = existing_file(path)
    with as_data_error(path, "a table"):
        table = pq.read_table(path) if content_kind(path) == "Parquet" else csv.read_csv(path)
        columns = table.column_names
    if columns not in (["position", "propensity"], ["position", "propensity", "segment"]):
        got = ", ".join(columns[:5])
        what = "a table of propensities needs the columns position, propensity and, optionally, segment"
        raise DataError(what, where=path, got=got, hint="rename the columns, and put them in this order")
    try:
        positions = table["position"].cast(pa.int64()).to_pylist()
        values = table["propensity"].cast(pa.float64()).to_pylist()
        names = table["segment"].cast(pa.string()).to_pylist() if "segment" in columns else ()
    except (pa.ArrowException, UnicodeDecodeError) as error:
        brief = " ".join(str(error).split())[:200]
        what = f"positions must be whole numbers and propensities must be numbers ({brief})"
        raise DataError(what, where=path, hint="correct or drop the rows with other values") from error
    for position, value in zip(positions, values, strict=True):
        if position is None or value is None or not SMALLEST_KNOWN <= value <= 1:
            got = f"{value} at position {position}"
            what = f"a propensity must be from {SMALLEST_KNOWN:g} to 1"
            raise DataError(what, where=path, got=got, hint="correct, clip or drop the row")
    if not positions:
        raise DataError("the table of propensities has no rows", where=path, hint="add one row for each position")
    keys = [str(position) for position in positions]
    if names:
        keys = [f"{key}@{name}" if name else key for key, name in zip(keys, names, strict=True)]
    if len(set(keys)) < len(keys):
        what = "each position must occur once, or once per segment"
        raise DataError(what, where=path, hint="drop the rows that repeat a position")
    return dict(zip(keys, values, strict=True))


def write_bias_file(folder: Path, content: Mapping[str, Any]) -> None:
    """Write bias.json into a folder; `content` has all entries but `format`."""
    write_json(folder / BIAS_FILE, {"format": BIAS_FORMAT, **content})


def read_bias_file(path: Path) -> dict[str, Any]:
    """Read a bias.json file; raise DataError if its format is not the one of this version."""
    content = read_json(path)
    check_format(content, BIAS_FORMAT, what="the bias file", where=path, hint="run the command that wrote it again")
    return content


def read_bias_theta(path: Path) -> dict[str, float]:
    """Read examination by position from a bias.json file, or from a run or `ultr bias --out` folder that has one."""
    path = path / BIAS_FILE if path.is_dir() else path
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
    pairs = zip(content["positions"], content["theta"], strict=True)
    return {str(position): float(value) for position, value in pairs if value is not None}


def theta_by_id(
    theta: Mapping[str, float], positions: tuple[int, ...], segments: tuple[str, ...] = ()
) -> dict[int, float]:
    """Return known examination by position id; a position without a value for its segment uses that of the position."""
    by_id = {}
    for position in positions:
        names = slot(position, segments), slot(position, segments).partition("@")[0]
        value = next((theta[name] for name in names if name in theta), None)
        if value is None:
            hint = "add a value for every position of the log to the table of --propensities, or to bias.json"
            raise DataError(f"position {names[0]} has no propensity", hint=hint)
        by_id[position] = value
    return by_id
