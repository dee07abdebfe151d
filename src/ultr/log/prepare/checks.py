"""Checks of a log before `ultr prepare` writes anything; DuckDB or Spark counts bad values, without the features."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from ultr.errors import ColumnError, DataError
from ultr.log.build import MAX_WEIGHT, MIN_WEIGHT
from ultr.log.queries import LARGEST_QUERY, time_bounds
from ultr.log.suspicious import BOT_LENGTH, BOT_MIDDLE, suspicious_of

LARGEST = float(np.finfo(np.float32).max)  # the largest number that lists can hold
Fetch = Callable[[Any], pa.Table]


def check_rows(rows: Any, names: Mapping[str, str], *, fetch: Fetch, where: object) -> tuple[int, dict[str, int]]:
    """Return the number of rows, and of missing values by action column; raise ColumnError for other bad values.

    `names` maps roles to column names.
    """
    position = rows.position
    counts = {
        "rows": rows.count(),
        "request missing": rows.request.isnull().sum(),
        "position missing": position.isnull().sum(),
        "position negative": (position < 0).sum(),
    }
    if position.type().is_floating():
        counts["position broken"] = ((position % 1 != 0) | (position > 2.0**53) | position.isnan()).sum()
    numbers = [n for n in rows.columns if n.startswith("action_") or n in ("relevance", "weight")]
    for name in numbers:
        value = rows[name]
        low, high = (MIN_WEIGHT, MAX_WEIGHT) if name == "weight" else (0, LARGEST)
        fine = (value >= low) & (value <= high)
        gap = value.isnull()
        if value.type().is_floating():
            fine = fine & ~value.isnan()
            gap = gap | value.isnan() if name.startswith("action_") else gap
        if name.startswith("action_"):
            fine = fine | gap
        counts[f"{name} missing"] = gap.sum()
        counts[f"{name} bad"] = (~fine).sum()
    for name in ("randomised", "time"):
        if name in rows.columns:
            counts[f"{name} missing"] = rows[name].isnull().sum()
    # The keys of `counts` are not valid column names, so the engine gets numbered names in the same order.
    sums = {f"count_{i}": value.cast("int64") for i, value in enumerate(counts.values())}
    results = fetch(rows.aggregate(**sums)).to_pylist()[0]
    bad_rows = {what: results[f"count_{i}"] or 0 for i, what in enumerate(counts)}
    total = int(bad_rows.pop("rows"))
    if not total:
        raise DataError("there are no rows", where=where, hint="check --where, or the query that made the data")
    missing = {}
    for what, count in bad_rows.items():
        if count and what.startswith("action_") and what.endswith("missing"):
            missing[names[what.split()[0]]] = count
        elif count:
            raise _column_error(*what.split(), names=names, count=count, where=where)
    return total, missing


def _column_error(role: str, problem: str, *, names: Mapping[str, str], count: int, where: object) -> ColumnError:
    column, title = names.get(role, role), "action" if role.startswith("action_") else role
    if problem == "missing":
        what = f"column '{column}' has {count:,} missing values"
        return ColumnError(what, where=where, hint="fill them, or drop those rows")
    hint = "correct or drop the column"
    if problem == "broken":
        what, hint = f"positions in column '{column}' must be whole numbers", "number the places of items: 1, 2, ..."
    elif role == "position":
        what, hint = f"positions in column '{column}' must not be negative", "drop rows of items that were not shown"
    elif role == "weight":
        what = f"weight column '{column}' must be finite and positive, from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
    else:
        what = f"{title} column '{column}' must be finite and not negative in every row"
    return ColumnError(what, where=where, got=f"other values in {count:,} rows", hint=hint)


def count_differing(rows: Any, roles: list[str], *, fetch: Fetch) -> dict[str, int]:
    """Return, for each role whose column has several values in a request, the number of such requests."""
    if not roles:
        return {}
    tests = {}
    for role in roles:
        value = rows[role]
        mixed = (value.count() != 0) & (value.count() != rows.count())
        tests[role] = (value.min() != value.max()).coalesce(False) | mixed
    requests = rows.group_by("request").aggregate(**tests)
    counts = fetch(requests.aggregate(**{role: requests[role].sum().cast("int64") for role in roles})).to_pylist()[0]
    return {role: count for role, count in counts.items() if count}


def divides(rows: Any, *, fetch: Fetch) -> bool:
    """Return whether queries can divide a log into splits: none of them has most of the rows, as in a feed."""
    of_query = rows.group_by("query").aggregate(rows=rows.count())
    counts = fetch(of_query.aggregate(largest=of_query["rows"].max(), total=of_query["rows"].sum())).to_pylist()[0]
    return bool(counts["largest"] <= LARGEST_QUERY * counts["total"])


def reject_differing(counts: Mapping[str, int], names: Mapping[str, str], *, where: object) -> None:
    """Raise ColumnError if `counts`, from `count_differing`, has a column with several values in a request."""
    for role, count in counts.items():
        what = f"column '{names[role]}' ({role}) must have one value per request"
        raise ColumnError(what, where=where, got=f"several in {count:,} requests", hint="correct or drop it")


def suspicious_ids(rows: Any, actions: int, *, fetch: Fetch) -> Any:
    """Return the ids of requests with impossible click rates, as an Arrow array; any action counts as a click.

    The engine counts items, clicks and expected clicks of requests; only those with many clicks are fetched.
    """
    import ibis

    clicked = ibis.or_(*(rows[f"action_{i}"] > 0 for i in range(actions))) if actions else ibis.literal(False)
    weight = rows.weight if "weight" in rows.columns else ibis.literal(1.0)
    shown = rows.select("request", "position", clicked=clicked.cast("float64"), weight=weight)
    of_position = shown.group_by("position").aggregate(
        rate=(shown.clicked * shown.weight).sum() / shown.weight.sum(), got=(shown.clicked * shown.weight).sum()
    )
    all_clicks = fetch(of_position.aggregate(clicks=of_position.got.sum()))["clicks"][0].as_py()
    joined = shown.join(of_position.select("position", "rate"), "position")
    of_request = joined.group_by("request").aggregate(
        items=joined.count(), clicks=joined.clicked.sum(), expected=joined.rate.sum(), weight=joined.weight.max()
    )
    many = (of_request["items"] >= BOT_LENGTH) & (of_request.clicks > BOT_MIDDLE * of_request["items"])
    eager = fetch(of_request.filter(many)).sort_by("request").combine_chunks()
    names = ("items", "clicks", "expected", "weight")
    items, clicks, expected, weights = (eager[name].to_numpy().astype(np.float64) for name in names)
    mask = suspicious_of(items, clicks, expected, weights, all_clicks or 0.0)
    return eager["request"].combine_chunks().filter(pa.array(mask))


def bounds_by_time(rows: Any, validation: float, test: float, *, fetch: Fetch) -> tuple[float, float]:
    """Return the times at which the validation and the test split start, so that they have these shares of requests."""
    first = rows.group_by("request").aggregate(time=rows.time.min())
    counts = fetch(first.group_by("time").aggregate(count=first.count())).sort_by("time")
    return time_bounds(counts["time"].to_numpy(), counts["count"].to_numpy(), validation, test)
