"""What is refused of rows before anything is written: counted by the engine, on the narrow columns alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from ultr.errors import ColumnError, DataError
from ultr.log.build import HEAVIEST, LIGHTEST

LARGEST = float(np.finfo(np.float32).max)
Fetch = Callable[[Any], pa.Table]


def check_rows(rows: Any, names: Mapping[str, str], *, fetch: Fetch, where: object) -> int:
    """Refuse values that no log may have, and give the number of rows. `names` are the columns' own names."""
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
        low, high = (LIGHTEST, HEAVIEST) if name == "weight" else (0, LARGEST)
        fine = (value >= low) & (value <= high)
        if value.type().is_floating():
            fine = fine & ~value.isnan()
        counts[f"{name} missing"] = value.isnull().sum()
        counts[f"{name} bad"] = (~fine).sum()
    for name in ("randomised", "time"):
        if name in rows.columns:
            counts[f"{name} missing"] = rows[name].isnull().sum()
    # Plain names for the engine, in the order of `counts`.
    named = {f"count_{i}": value.cast("int64") for i, value in enumerate(counts.values())}
    found = fetch(rows.aggregate(**named)).to_pylist()[0]
    figures = {what: found[f"count_{i}"] or 0 for i, what in enumerate(counts)}
    total = int(figures.pop("rows"))
    if not total:
        raise DataError("there are no rows", where=where, mend="check the conditions or the query that made it")
    for what, count in figures.items():
        if count:
            _refuse(*what.split(), names=names, count=count, where=where)
    return total


def _refuse(part: str, how: str, *, names: Mapping[str, str], count: int, where: object) -> None:
    column, what = names.get(part, part), "action" if part.startswith("action_") else part
    rows = f"{count:,} such rows"
    if how == "missing":
        raise ColumnError(f"column '{column}' has {count:,} missing values", where=where, mend="fill them or drop them")
    if how == "broken":
        mend = "give each item the place it was shown at: 1, 2, ..."
        raise ColumnError(f"positions in column '{column}' should be whole numbers", where=where, got=rows, mend=mend)
    if part == "position":
        mend = "drop the rows if it marks items that were not shown"
        raise ColumnError(f"positions in column '{column}' should not be negative", where=where, got=rows, mend=mend)
    positive = f"finite and positive, from {LIGHTEST:g} to {HEAVIEST:g}"
    should = positive if part == "weight" else "finite and not negative"
    mend = "clean the column or leave it out"
    raise ColumnError(f"{what} column '{column}' should be {should} in every row", where=where, got=rows, mend=mend)


def differing(rows: Any, parts: list[str], *, fetch: Fetch) -> dict[str, int]:
    """Of each part that a whole request has: the number of requests where it is not the same in all rows."""
    if not parts:
        return {}
    tests = {}
    for part in parts:
        value = rows[part]
        mixed = (value.count() != 0) & (value.count() != rows.count())
        tests[part] = (value.min() != value.max()).coalesce(False) | mixed
    requests = rows.group_by("request").aggregate(**tests)
    found = fetch(requests.aggregate(**{part: requests[part].sum().cast("int64") for part in parts})).to_pylist()[0]
    return {part: count for part, count in found.items() if count}


def refuse_differing(counts: Mapping[str, int], names: Mapping[str, str], *, where: object) -> None:
    for part, count in counts.items():
        raise ColumnError(
            f"column '{names[part]}' ({part}) should have one value per request",
            where=where,
            got=f"several in {count:,} requests",
            mend="it is said of whole requests; leave it out if it is not",
        )


def time_bounds(rows: Any, validation: float, test: float, *, fetch: Fetch) -> tuple[float, float]:
    """Times from which requests are for validation and for testing, so that the latest shares are."""
    first = rows.group_by("request").aggregate(time=rows.time.min())
    counts = fetch(first.group_by("time").aggregate(count=first.count())).sort_by("time")
    times, requests = counts["time"].to_numpy(), counts["count"].to_numpy()
    later = requests[::-1].cumsum()[::-1]  # requests at each time or after it

    def bound(share: float) -> float:
        return float(times[np.abs(later - share * later[0]).argmin()]) if share > 0 else float("inf")

    test_from = bound(test)
    return (min(bound(validation + test), test_from) if validation > 0 else test_from), test_from
