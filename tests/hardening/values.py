"""Bad values of every kind, and a check that calls with them work or are rejected with a clear message."""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from ultr.errors import UltrError
from ultr.log import Log

NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 7, 10**9, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**70, 10**400, True, False),
    *(0.0, -0.0, 0.5, 1.5, -2.5, 5e-324, 1e-310, 1e-38, 1e38, -1e38, 1e300, 1e308, math.nan, math.inf, -math.inf),
    *(np.float16(2), np.float32(0.5), np.float64(math.nan), np.int8(-3), np.int64(3), np.uint64(2**64 - 1), np.True_),
    *(1j, Decimal(1), Fraction(1, 2), np.datetime64("2020-01-01")),
)
OTHERS: tuple[Any, ...] = (
    *(None, "", "x", "click", "reward", "no such name", "\0", "a" * 300, "ultr/none", b"x", object(), int, print),
    *([], (), {}, set(), [None], ["x"], [1, "x"], [[1], [1, 2]], [[]], {"x": 1}, {1: "x"}, {None: None}, range(3)),
    *(Path("nothing/here"), Path(), iter([1, 2]), slice(3), Ellipsis, NotImplemented),
    *(pd.DataFrame({"x": [1.0]}), pd.Series([1.0, None]), pl.DataFrame({"x": ["a"]}), pa.table({"x": [1]})),
    *(torch.ones(3), torch.ones(3, requires_grad=True), torch.zeros(()), np.ma.masked_array([1.0, 2.0], [True, False])),
)
TEXTS = st.text(max_size=12)
KINDS = (*("f4", "f8") * 8, "f2", ">f4", ">f8", "i1", "i8", ">i8", "u8", "?", "O", "c16", "U5", "M8[s]", "g")
DTYPES = (
    *(torch.float32, torch.float64, torch.int64, torch.bool) * 3,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.bool,
)
POOLS: dict[str, tuple[float, ...]] = {
    "typical": (0, 1, 2, 3, 0.5),
    "zero": (0.0, -0.0),
    "ones": (1,),
    "tiny": (5e-324, 1e-310, 1e-45, 1e-38, 0),
    "large": (1e38, -1e38, 3e38, 1, 0),
    "huge": (1e300, -1e300, 1e308, 0),
    "whole": (10**9, 2**53 + 1, 2**62, 0, 1),
    "negative": (-1, -2.5, 3),
    "broken": (math.nan, math.inf, -math.inf, 1, 2),
}


@st.composite
def arrays(draw: st.DrawFn, rows: int = 6, *columns: int) -> Any:
    """Draw arrays of any type, shape and layout; most have `rows` rows."""
    shape = draw(
        st.sampled_from([(rows, *columns)] * 20 + [(0,), (), (1,), (rows + 1,), (rows, 1), (1, rows), (rows, 2, 2)])
    )
    pool = POOLS[draw(st.sampled_from(sorted(POOLS)))]
    picked = np.array(pool, float)[np.random.default_rng(draw(st.integers(0, 9))).integers(0, len(pool), shape)]
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        array = np.asarray(picked).astype(draw(st.sampled_from(KINDS)))
    layout = draw(st.sampled_from(["plain", "plain", "backwards", "strided", "locked", "listed"]))
    if layout == "backwards" and array.ndim:
        return array[::-1]
    if layout == "strided" and array.ndim:
        return np.repeat(array, 2, axis=0)[::2]
    if layout == "locked":
        array.flags.writeable = False
    return array.tolist() if layout == "listed" else array


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw tensors of any type, most of them two lists of three items."""
    shape = draw(st.sampled_from([(2, 3)] * 20 + [(6,), (), (0,), (2, 0), (0, 3), (3,), (2, 4), (1, 2, 3), (3, 2)]))
    numbers = draw(st.sampled_from([(0, 1), (0,), (1,), (0, 1, 2, 3), (-1, 5), (1e30, 0), (1e-40, 0), (0, math.nan)]))
    seeded = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    made = torch.tensor(numbers, dtype=torch.float64)[torch.randint(len(numbers), shape, generator=seeded)]
    made = made.to(draw(st.sampled_from([*DTYPES, torch.complex64])))
    return made.transpose(0, -1).contiguous().transpose(0, -1) if made.ndim > 1 and draw(st.booleans()) else made


ANYTHING = st.sampled_from(NUMBERS) | st.sampled_from(OTHERS) | TEXTS | arrays()


class Made(NamedTuple):
    """A value that is made within the call, because making it may raise an error."""

    make: Callable[..., Any]
    options: Mapping[str, Any]

    def __call__(self) -> Any:
        return self.make(**self.options)


COLUMN = st.sampled_from(sorted(POOLS))
PARTS: dict[str, SearchStrategy[Any]] = {
    "lengths": st.sampled_from([(1,), (2, 3, 1), (1, 1, 1, 1), (12, 3), (40,)]),
    "features": COLUMN,
    "positions": st.sampled_from(["from 0", "gaps", "far", "last", "equal", "none"]),
    "click": COLUMN,
    "dwell": COLUMN,
    "relevance": COLUMN | st.none(),
    "weights": COLUMN,
    "items": st.sampled_from(["distinct", "repeated", "null"]),
    "context": st.sampled_from(["query", "segment", "randomised"]),
    "double": st.just(True),
}


@st.composite
def logs(draw: st.DrawFn) -> Made:
    """Draw logs of the right shape with one or two bad or unusual parts."""
    parts = draw(st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=2, unique=True))
    return Made(make_log, {part: draw(PARTS[part]) for part in parts})


def make_log(
    lengths: tuple[int, ...] = (4,) * 8,
    *,
    features: str = "normal",
    positions: str = "from 1",
    click: str = "typical",
    dwell: str = "typical",
    relevance: str | None = "grades",
    weights: str | None = None,
    items: str = "none",
    context: str = "none",
    double: bool = False,
) -> Log:
    rng, rows, requests = np.random.default_rng(0), sum(lengths), len(lengths)

    def column(pool: str | None, size: Any = rows) -> Any:
        if pool in (None, "normal", "grades"):
            return {None: None, "normal": rng.normal(size=size), "grades": rng.integers(0, 5, size) + 0.0}[pool]
        values = np.array(POOLS[pool], float)[rng.integers(0, len(POOLS[pool]), size)]
        return values if double else np.clip(values, -3e38, 3e38).astype(np.float32)

    place = np.concatenate([np.arange(length) for length in lengths])
    spread = {"from 1": place + 1, "from 0": place, "gaps": 3 * place + 5, "far": place + 10**9, "equal": 0 * place}
    spread["last"] = 2**63 - 1 - place
    ids = {"distinct": np.arange(rows), "repeated": np.arange(rows) % 5}.get(items)
    about = {
        "query": np.arange(requests) % 2,
        "segment": np.arange(requests) % 2,
        "randomised": np.arange(requests) > 1,
    }
    return Log(
        features=column(features, (rows, 3)),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        request_ids=pa.array(np.arange(requests)),
        feature_names=("f0", "f1", "f2"),
        positions=spread.get(positions),
        actions={"click": column(click), "dwell": column(dwell)},
        relevance=column(relevance),
        weights=column(weights, requests),
        item_ids=pa.nulls(rows, pa.int64()) if items == "null" else None if ids is None else pa.array(ids),
        context={context: pa.array(about[context])} if context in about else {},
    )


def frame() -> dict[str, Any]:
    return {
        "request": [1, 1, 2, 2, 3, 3],
        "position": [1, 2] * 3,
        "click": [0, 1, 0, 0, 1, 1],
        "f1": np.arange(6.0),
        "f2": np.ones(6),
        "weight": [1, 1, 2, 2, 1, 1],
    }


FRAMES = st.sampled_from([pd.DataFrame, pl.DataFrame, pa.table])
COLUMN_VALUES = arrays().filter(lambda a: np.ndim(a) == 1 and len(a) == 6) | st.lists(
    st.sampled_from([*NUMBERS, None, "x"]), min_size=6, max_size=6
)


@st.composite
def framed(draw: st.DrawFn) -> Any:
    """Draw frames of three libraries with one or two columns replaced, renamed, dropped or duplicated."""
    columns = frame()
    for name in draw(st.lists(st.sampled_from(sorted(columns)), min_size=1, max_size=2, unique=True)):
        how = draw(st.sampled_from(["replaced"] * 4 + ["dropped", "renamed"]))
        if how == "replaced":
            columns[name] = draw(COLUMN_VALUES)
        else:
            values = columns.pop(name)
            columns |= {} if how == "dropped" else {draw(TEXTS): values}
    kind = draw(FRAMES)
    twice = draw(st.integers(0, 9)) == 0
    try:
        made = kind(columns)
        return pd.concat([made, made[made.columns[:1]]], axis=1) if twice and kind is pd.DataFrame else made
    except Exception:  # the library cannot make a frame of these columns
        return None


class Case(NamedTuple):
    """A function, arguments that work, and bad values for some arguments, in addition to those for all arguments."""

    call: Callable[..., Any]
    good: Callable[[], dict[str, Any]]
    bad: Mapping[str, SearchStrategy[Any]] = {}
    check: Callable[[Any], bool] | None = None  # of the result for finite arguments (default: is_finite)
    examples: int = 15
    long: int = 600


def draw_arguments(case: Case, data: st.DataObject) -> dict[str, Any]:
    """Draw arguments that work except for one or two, most of them of the right type."""
    arguments = case.good()
    for name in data.draw(st.lists(st.sampled_from(sorted(arguments)), min_size=1, max_size=2, unique=True)):
        likely = name in case.bad and data.draw(st.integers(0, 5)) > 0
        arguments[name] = data.draw(case.bad[name] if likely else ANYTHING, label=name)
    return arguments


def outcomes(case: Case, examples: int) -> Counter[str]:
    """Count the calls with one or two bad arguments that work, and those that are rejected."""
    counts: Counter[str] = Counter()

    # No shrinking: the values are small, and it would take minutes if a call takes a second.
    @settings(max_examples=examples, database=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    @given(st.data())
    def call(data: st.DataObject) -> None:
        counts[outcome(case, draw_arguments(case, data))] += 1

    call()
    return counts


def check(case: Case) -> None:
    """Check that good arguments work, and that some bad ones are rejected."""
    case.call(**case.good())
    assert outcomes(case, case.examples)["rejected"], "no bad value was tried"


def count(name: str, case: Case) -> None:
    """Try many bad arguments, and append the counts to the file that `ULTR_COUNTS` names."""
    counts = outcomes(case, case.long)
    if "ULTR_COUNTS" in os.environ:
        with Path(os.environ["ULTR_COUNTS"]).open("a") as file:
            file.write(json.dumps({"function": name, "works": counts["works"], "rejected": counts["rejected"]}) + "\n")


def outcome(case: Case, arguments: dict[str, Any]) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            made = {name: value() if isinstance(value, Made) else value for name, value in arguments.items()}
            result = case.call(**made)
        except UltrError as error:
            clear = error.got is not None or error.hint is not None or re.search("should|must", error.what)
            assert clear, f"the error has no value and no hint: {error}"  # noqa: PT017
            assert len(str(error)) < 2000  # noqa: PT017
            return "rejected"
    if is_finite(made):
        assert (case.check or is_finite)(result), f"{result} of {made}"
    return "works"


def is_finite(value: Any) -> bool:
    """Return whether all numbers in a value, at any depth, are finite."""
    if isinstance(value, float | complex | np.number):
        return bool(np.isfinite(value))
    if isinstance(value, torch.Tensor):
        return bool(torch.isfinite(value).all())
    if isinstance(value, np.ndarray):
        return value.dtype.kind not in "fc" or bool(np.isfinite(value).all())
    if isinstance(value, Mapping):
        return all(map(is_finite, value.values()))
    if isinstance(value, list | tuple | set):
        return all(map(is_finite, value))
    if isinstance(value, pd.DataFrame | pd.Series | pl.DataFrame):
        return is_finite(value.to_numpy())
    return is_finite(vars(value)) if is_dataclass(value) and not isinstance(value, type) else True
