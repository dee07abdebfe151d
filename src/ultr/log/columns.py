"""The columns of a log: their roles (request, position, action, ...), and checks of their values."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ultr.errors import ColumnError, DataError, OptionError, nearest
from ultr.log.bins import Edges, split_edges
from ultr.log.table import (
    ACTIONS_KEY,
    CATEGORICAL_KEY,
    FEATURE_NAMES_KEY,
    GRID,
    MOST_GRID_COLUMNS,
    MOST_GRID_ROWS,
    grid_ids,
)
from ultr.utils.stores import reject_network

# --- Roles ------------------------------------------------------------------------------------------------------------
# The role of each column of a log (request, position, action, ...): named by the caller, or found by common names.

# The common names of each role, best first; case is ignored. `query` is not a name of a request, because queries recur.
NAMES = {
    "request": "request request_id qid query_id search_id session session_id impression_id list_id group_id group",
    "position": "position pos rank slot display_position",
    "row": "row grid_row",
    "column": "column grid_column",
    "relevance": "relevance true_relevance grade",
    "weight": "weight request_weight sample_weight",
    "item": "item item_id doc doc_id docid document_id product product_id sku movie_id video_id article article_id",
    "shown": "shown was_shown is_shown in_viewport",
    "query": "query query_id qid query_text",
    "segment": "",
    "randomised": "randomised randomized is_randomised is_randomized random_order is_random explore is_explore "
    "exploration is_exploration",
    "swaps": "swap swaps",
}
REQUESTS = NAMES["request"].split()
GRID_ROLES = ("row", "column")  # of a grid, in place of the position; they have common names only if it has no column
CONTEXT = ("query", "segment", "randomised", "swaps")  # roles with one value per request
SEVERAL = ("actions", "features", "categorical")  # roles that several columns may have
ROLES = (*NAMES, *SEVERAL)
ACTIONS = (
    "click clicks clicked dwell dwell_time dwell_seconds dwell_ms dwell_time_s dwell_time_ms "
    "watch watch_time watch_ratio watch_seconds watch_ms watch_time_s watch_time_ms like liked share shared save saved "
    "comment follow favorite cart add_to_cart purchase purchased order ordered revenue conversion converted"
)
ACTION_NAMES = frozenset(ACTIONS.split())
OFTEN_TEXT = {"comment", "order", "ordered"}  # these are actions only if they hold numbers
RESERVED_POSITIONS = f"must not be from {GRID:,} to {2 * GRID - 1:,}, which stand for slots of grids"
FEATURE_PATTERN = re.compile(r"features?([_.\[-].+|\d+)?|[fx][_.-]?\d+", re.IGNORECASE)


@dataclass(frozen=True)
class Columns:
    """The columns of a table, by their role in a log."""

    request: str
    position: str | None
    actions: tuple[str, ...]
    features: tuple[str, ...]
    categorical: tuple[str, ...]
    relevance: str | None
    weight: str | None
    item: str | None
    context: Mapping[str, str]  # a role in CONTEXT -> its column, if the table has one
    absent: Mapping[str, str] = field(default_factory=dict)  # role -> its column in training, if the table lacks it
    segments: tuple[str, ...] = ()  # the columns whose values together are the segment of a request
    shown: str | None = None  # the column that marks the rows that were shown
    shown_named: bool = False  # whether the caller, or training, named this column
    places: tuple[str, ...] = ()  # the column of the position, or two of a grid, which `position` has with a comma
    requests: tuple[str, ...] = ()  # the columns with common names of requests, best first, if the caller named none
    request_note: str = ""  # why the request is not the first of `requests`

    @property
    def place_roles(self) -> dict[str, str]:
        """The column of the position, or those of the row and the column of a grid, by role."""
        return dict(zip(GRID_ROLES if len(self.places) > 1 else ("position",), self.places, strict=False))

    edges: Mapping[str, Edges] = field(default_factory=dict)  # of the bins of a segment column, if they are named

    @property
    def by_role(self) -> dict[str, Any]:
        """The column of each role that has one; a list of columns for actions, features and categorical."""
        single = {role: getattr(self, role) for role in ("request", "position", "item", "relevance", "weight", "shown")}
        several = {role: list(getattr(self, role)) for role in SEVERAL}
        return {role: names for role, names in {**single, **self.context, **several}.items() if names}

    @property
    def notes(self) -> tuple[str, ...]:
        """Why the request is not the usual column, and a message for each column of training that the table lacks."""
        absent = (
            f"there is no column '{name}', which was the {role} in training; to use another one, name it with --{role}"
            for role, name in self.absent.items()
            if role != "shown"  # other logs may have only rows that were shown
        )
        return (*filter(None, [self.request_note]), *absent)

    @property
    def used(self) -> list[str]:
        """All columns with a role; a segment that is a categorical feature too is listed once."""
        context = [name for role, name in self.context.items() if role != "segment"]
        context += [name for name in self.segments if name not in self.categorical]
        single = [self.request, *self.places, self.relevance, self.weight, self.item, self.shown, *context]
        return [name for name in single if name is not None] + [*self.actions, *self.features, *self.categorical]

    @property
    def ids(self) -> list[str]:
        """The columns of ids and categories, which CSV files hold as texts, so that 007 and 7 stay different."""
        named = (self.request, self.item, self.context.get("query"), *self.segments, *self.categorical)
        return [name for name in named if name is not None]

    def unused(self, names: Iterable[str]) -> list[str]:
        used = set(self.used)
        return [name for name in names if name not in used]


def resolve_columns(
    schema: pa.Schema,
    *,
    where: object,
    trained: Mapping[str, Any] | None = None,
    rows: Callable[[], pa.Table] | None = None,
    **named: Any,
) -> Columns:
    """Return the column of each role: the one that the caller named, or else the first common name in the schema.

    `named` maps the roles in `ROLES` to a column name, or to several for actions, features and categorical; an empty
    name means that no column has this role. Features may be named by patterns (`emb_*`). If the caller names none,
    features are columns called `features`, `feature_...`, `f1` or `x_1`. Other columns are not taken as features,
    because any of them may be an action or an id. `trained` has the columns of a training log (`Log.columns`), which
    are used for the roles that are not named. No other column takes their place if they are missing. `rows` returns the
    first rows. If several columns have common names of requests, the request is one in which no position repeats there.
    """
    if unknown := next((role for role in named if role not in ROLES), None):
        raise OptionError(f"a log has no column for {unknown!r}", hint=nearest(unknown, ROLES))
    names = schema.names
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise ColumnError("column names must be unique", where=where, got=f"'{twice}' twice", hint="rename one of them")
    named, absent = _as_in_training(_with_grid(named, where), trained or {}, schema, where)
    listed = [name for role in SEVERAL if named.get(role) is not None for name in as_names(named[role])]
    listed += [part for role in NAMES for part in _parts(role, named.get(role), names)]
    named_columns = set(listed) & set(names)
    # A column that the caller names for one role is not considered for any other.
    by_lower = {name.lower(): name for name in reversed(names) if name not in named_columns}

    def one(role: str) -> str | None:
        name: str | None = named.get(role)
        if name is None:
            return next((by_lower[common] for common in NAMES[role].split() if common in by_lower), None)
        if not name:
            return None
        for part in _parts(role, name, names):
            if part not in names:
                title = "mark of shown rows" if role == "shown" else role
                raise ColumnError(f"no column '{part}' for the {title}", where=where, hint=nearest(str(part), names))
        return name

    single = {role: one(role) for role in NAMES if role not in ("query", *GRID_ROLES)}
    mark = single["randomised"]
    if mark and named.get("randomised") is None and not _holds_numbers(schema.field(mark).type):
        single["randomised"] = None  # such as a text that names an experiment
    requests = () if named.get("request") is not None else tuple(by_lower[n] for n in REQUESTS if n in by_lower)
    request_note = ""
    if len(requests) > 1 and rows is not None and single["position"] in names:
        single["request"], request_note = _request_of(requests, str(single["position"]), rows())
    by_lower = {lower: name for lower, name in by_lower.items() if name != single["request"]}
    single["query"] = one("query")  # after the request, because requests and queries share some common names
    free = [n for n in names if n not in named_columns and n not in single.values()]

    def several(role: str, title: str, default: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
        return default() if named.get(role) is None else _matching(named[role], names, title, where=where)

    actions = several("actions", "actions", lambda: _saved(schema, ACTIONS_KEY) or _common_actions(schema, free))
    if actions and single["position"] is None and named.get("position") is None:
        grid = [name for role in GRID_ROLES if (name := one(role)) is not None]
        single["position"] = ",".join(grid) if len(grid) == len(GRID_ROLES) else None
        free = [n for n in free if n not in grid or single["position"] is None]
    categorical = several("categorical", "categorical features", lambda: _saved(schema, CATEGORICAL_KEY))
    rest = [n for n in free if n not in {*actions, *categorical}]
    features = several("features", "features", lambda: tuple(n for n in rest if FEATURE_PATTERN.fullmatch(n)))
    columns = Columns(
        request=single["request"] or "",
        position=single["position"],
        actions=actions,
        features=features,
        categorical=categorical,
        relevance=single["relevance"],
        weight=single["weight"],
        item=single["item"],
        context={role: name for role in CONTEXT if (name := single[role]) is not None},
        absent=absent,
        segments=_parts("segment", single["segment"], names),
        shown=single["shown"],
        shown_named=bool(named.get("shown")),
        places=_parts("position", single["position"], names),
        edges=dict(split_edges(part, names) for part in _listed("segment", single["segment"], names)),
        requests=requests,
        request_note=request_note,
    )
    _check(columns, names, where)
    return columns


def _request_of(names: Sequence[str], position: str, rows: pa.Table) -> tuple[str, str]:
    """Return the first column within which no position repeats, and a note if it is not the first of all.

    A column with another value in each row cannot be the request. Without any such column, the first one is taken.
    """
    if not {*names, position} <= {*rows.column_names} or any(
        pa.types.is_nested(rows[n].type) for n in (*names, position)
    ):
        return names[0], ""
    rows = rows.filter(pc.is_valid(rows[position]))

    def different(*columns: str) -> int:
        return int(rows.group_by([*columns]).aggregate([]).num_rows)

    if different(names[0], position) == len(rows):
        return names[0], ""
    for name in names[1:]:
        if different(name, position) == len(rows) > different(name):
            hint = "to use another column, name it with --request"
            return name, f"the request is '{name}', because positions repeat within '{names[0]}'; {hint}"
    return names[0], ""


def _with_grid(named: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Return `named` with the row and the column of a grid as two columns of the position."""
    grid = {role: named[role] for role in GRID_ROLES if named.get(role)}
    others = {role: name for role, name in named.items() if role not in GRID_ROLES}
    if not grid:
        return others
    if len(grid) < len(GRID_ROLES):
        ((role, name),) = grid.items()
        what, hint = "a slot of a grid needs a row and a column", "name both, with --row and --column"
        raise OptionError(what, where=where, got=f"only the {role} '{name}'", hint=hint)
    if others.get("position"):
        what, hint = "positions are given twice", "pass --position for a list, or --row and --column for a grid"
        raise OptionError(what, where=where, got=f"'{others['position']}' and {' and '.join(grid)}", hint=hint)
    return {**others, "position": ",".join(grid[role] for role in GRID_ROLES)}


def _as_in_training(
    named: Mapping[str, Any], trained: Mapping[str, Any], schema: pa.Schema, where: object
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return `named` with the columns of training for all other roles, and the single columns that are missing.

    Raise ColumnError if a request or feature column is missing. Actions may be missing: labels say which they need.
    """
    present = set(schema.names)
    chosen = dict(named)
    absent = dict[str, str]()
    for role, columns in trained.items():
        if chosen.get(role) is not None:
            continue
        single = _parts(role, columns, present) if isinstance(columns, str) else columns
        missing = [name for name in single if name not in present]
        if role == "features" and missing and set(missing) <= set(saved_names(schema, FEATURE_NAMES_KEY)):
            continue  # the names of training are in a column of lists
        if role == "actions":
            chosen[role] = [name for name in columns if name in present]
        elif not missing:
            chosen[role] = columns
        elif role in ("request", "features", "categorical"):
            what = f"there is no column '{missing[0]}', which was {'the request' if role == 'request' else 'a feature'}"
            hint = f"name the columns of this file with --{role}" if role != "request" else "name it with --request"
            raise ColumnError(f"{what} in training", where=where, hint=hint)
        else:
            chosen[role], absent[role] = "", columns
    return chosen, absent


def _parts(role: str, name: str | None, names: Collection[str]) -> tuple[str, ...]:
    """Return the columns that a name stands for: several, with commas between them, may make a segment or a grid."""
    listed = _listed(role, name, names)
    return tuple(split_edges(part, names)[0] for part in listed) if role == "segment" else listed


def _listed(role: str, name: str | None, names: Collection[str]) -> tuple[str, ...]:
    """Return the columns that a name lists with commas between them; those of a segment have their bins."""
    if not name:
        return ()
    one = role not in ("segment", "position") or name in names or (role == "segment" and split_edges(name)[0] in names)
    return (name,) if one else tuple(as_names(name))


def segment_columns(name: str) -> list[str]:
    """Return the columns that the name of a segment lists, without their bins."""
    return [split_edges(part)[0] for part in as_names(name)]


def _check(columns: Columns, names: Sequence[str], where: object) -> None:
    """Raise an error if a log has no request ids, if it has actions but no positions, or if a column has two roles."""
    if not columns.request:
        hint = f"name it with --request (request=...); columns: {some(names)}"
        raise ColumnError("found no column with the request id of each row", where=where, hint=hint)
    if columns.actions and columns.position is None:
        hint = "name it with --position, or those of a grid with --row and --column; row order is not a position"
        hint = f"{hint}; columns: {some(names)}"
        raise ColumnError("found actions but no column with the position of each item", where=where, hint=hint)
    if len(columns.places) > len(GRID_ROLES):
        what, hint = "a position must have one column, or a row and a column", "pass --position, or --row and --column"
        raise OptionError(what, where=where, got=f"'{columns.position}'", hint=hint)
    twice = next((name for name, count in Counter(columns.used).items() if count > 1), None)
    if twice is not None:
        raise OptionError(f"column '{twice}' has two roles", where=where, hint="give each column one role")


def _common_actions(schema: pa.Schema, names: Iterable[str]) -> tuple[str, ...]:
    """Return the columns with common names of actions; some of these names count only if the column holds numbers."""
    likely = (n for n in names if n.lower() in ACTION_NAMES)
    return tuple(n for n in likely if n.lower() not in OFTEN_TEXT or _holds_numbers(schema.field(n).type))


def as_names(columns: Sequence[str] | str) -> list[str]:
    """Return names that are given as a list, or as a text with commas."""
    if isinstance(columns, str):
        return [name.strip() for name in columns.split(",")]
    if not isinstance(columns, Sequence) or not all(isinstance(name, str) for name in columns):
        raise OptionError("columns must be names, or a list of names", got=repr(columns))
    return list(columns)


def _holds_numbers(kind: pa.DataType) -> bool:
    while hasattr(kind, "value_type"):  # the type of a list's values
        kind = kind.value_type
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _saved(schema: pa.Schema, key: bytes) -> tuple[str, ...]:
    """Return the columns that `write_log` recorded in the schema under a key, and that the schema still has."""
    return tuple(name for name in saved_names(schema, key) if name in schema.names)


def saved_names(schema: pa.Schema, key: bytes) -> list[str]:
    """Return the names that `write_log` recorded in a schema under a key; an empty list if there are none."""
    try:
        saved = json.loads((schema.metadata or {}).get(key, b"[]"))
    except ValueError:
        return []
    fine = isinstance(saved, list) and all(isinstance(name, str) for name in saved) and len(set(saved)) == len(saved)
    return saved if fine else []


def _matching(columns: Sequence[str] | str, names: Sequence[str], title: str, *, where: object) -> tuple[str, ...]:
    """Return those of `names` that a list of names and patterns (`emb_*`) selects; `title` is their role in errors."""
    chosen: dict[str, None] = {}
    present = set(names)
    for pattern in filter(None, as_names(columns)):
        matches = [pattern] if pattern in present else [n for n in names if fnmatchcase(n, pattern)]
        if not matches:
            raise ColumnError(f"no column '{pattern}' for the {title}", where=where, hint=nearest(pattern, names))
        chosen.update(dict.fromkeys(matches))
    return tuple(chosen)


def some(names: Sequence[str], most: int = 12) -> str:
    """Return the first names as a text, and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def not_numbers(name: str, kind: object, *, what: str, where: object) -> ColumnError:
    """Return the error for a column that must hold numbers and does not; `what` is the role of the column."""
    hint = "name it with --categorical, or convert it" if what == "feature" else "convert it, or name another column"
    return ColumnError(f"{what} column '{name}' must hold numbers", where=where, got=f"type {kind}", hint=hint)


# --- Values -----------------------------------------------------------------------------------------------------------
# Check the values of a column, and convert them to arrays: ids, numbers, features and categories.

Missing = Literal["reject", "keep"]
MAX_CATEGORIES = 1 << 24  # codes are stored as float32, which is exact up to here
ROWS_AT_ONCE = 2048  # rows that are copied to the feature matrix at a time, to stay in the CPU's cache


@dataclass(frozen=True)
class Piece:
    """The place of some rows in a file, so that error messages can name the file and the number of a row in it."""

    path: object
    rows_before: int

    def __str__(self) -> str:
        return str(self.path)


def row_number(where: object, row: int) -> int:
    """Return the number of a row in its file, counted from 1."""
    return row + 1 + (where.rows_before if isinstance(where, Piece) else 0)


@contextmanager
def as_data_error(path: object, kind: str) -> Iterator[None]:
    """Turn the exceptions that reading a file of format `kind` causes into a DataError."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError, csv.Error) as error:
        reject_network(error, path)
        brief = " ".join(str(error).split())[:200]
        raise DataError(f"cannot be read as {kind} ({brief})", where=path, hint="check or rewrite the file") from error


def combined(column: pa.ChunkedArray) -> Any:
    """Return a column as one Arrow array of a plain type."""
    return _plain(column.chunk(0) if column.num_chunks == 1 else column.combine_chunks())


def _plain(array: Any) -> Any:
    """Convert categories, extension types and polars' string views to plain types, which all Arrow kernels support."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _plain(array.storage)
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(array.indices, _plain(array.dictionary)).dictionary_decode()
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return array.cast(pa.large_string() if pa.types.is_string_view(kind) else pa.large_binary())
    return array


def is_list(kind: pa.DataType) -> bool:
    return any(test(kind) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def is_number(kind: pa.DataType) -> bool:
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal)
    return any(test(kind) for test in kinds)


def without_missing(column: pa.ChunkedArray) -> tuple[pa.ChunkedArray, int]:
    """Return a column of numbers with 0 in place of missing values (also NaN), and the number of such values."""
    kind = column.type
    if pa.types.is_floating(kind):
        gaps = pc.is_null(column, nan_is_null=True)
        count = int(pc.sum(gaps).as_py() or 0)
        return (pc.if_else(gaps, pa.scalar(0, kind), column) if count else column), count
    if pa.types.is_null(kind):
        return pa.chunked_array([pa.array(np.zeros(len(column), np.int64))]), len(column)
    count = column.null_count
    if not count or not is_number(kind):
        return column, 0
    return pc.fill_null(column, pa.scalar(False if pa.types.is_boolean(kind) else 0, kind)), count


def missing_note(name: str, count: int) -> str:
    return f"{count:,} rows have no value in action column '{name}'; they count as 0"


def item_codes(items: Any) -> np.ndarray:
    """Return a number for each item id, equal for equal ids; -1 for ids that are missing or cannot be compared."""
    try:
        indices = items.dictionary_encode().indices
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        return np.full(len(items), -1)
    return np.asarray(pc.fill_null(indices.cast(pa.int64()), -1).to_numpy(zero_copy_only=False))


def check_no_nulls(column: Any, name: str, where: object, *, what: str) -> None:
    if column.null_count:
        row = pc.index(pc.is_null(column), True).as_py()
        text = f"{what} column '{name}' has {column.null_count} missing values (first in row {row_number(where, row)})"
        raise ColumnError(text, where=where, hint="fill them or drop those rows")


def position_values(table: pa.Table, columns: Columns, where: object) -> np.ndarray:
    """Return the position id of each row: its position in a list, or its slot in a grid."""
    limits = {"row": MOST_GRID_ROWS, "column": MOST_GRID_COLUMNS}
    found = []
    for role, name in columns.place_roles.items():
        values = place_values(table[name], name, where)
        if (large := values >= limits[role] if role in limits else values // GRID == 1).any():
            row = int(large.argmax())
            got, hint = f"{values[row]} in row {row_number(where, row)}", "number them 1, 2, ..., or drop those rows"
            what = f"must be below {limits[role]:,}" if role in limits else RESERVED_POSITIONS
            raise ColumnError(f"{role}s in column '{name}' {what}", where=where, got=got, hint=hint)
        found.append(values)
    return found[0] if len(found) == 1 else np.asarray(grid_ids(*found))


def place_values(column: pa.ChunkedArray, name: str, where: object) -> np.ndarray:
    values = numeric(column, name, "position", where)
    with np.errstate(invalid="ignore"):  # a value that does not fit int64 changes, which is detected below
        whole = values.astype(np.int64)
    for wrong, what, hint in (
        (whole != values, "must be whole numbers", "number the places where items were shown: 1, 2, ..."),
        (whole < 0, "must not be negative", "drop the rows of items that were not shown"),
    ):
        if wrong.any():
            row = int(wrong.argmax())
            got = f"{values[row]} in row {row_number(where, row)}"
            raise ColumnError(f"positions in column '{name}' {what}", where=where, got=got, hint=hint)
    return whole


def numeric(column: pa.ChunkedArray, name: str, what: str, where: object) -> np.ndarray:
    values = combined(column)
    kind = values.type
    if not is_number(kind):
        raise not_numbers(name, kind, what=what, where=where)
    check_no_nulls(values, name, where, what=what)
    if pa.types.is_decimal(kind):
        values = values.cast(pa.float64())
    return np.asarray(values.to_numpy(zero_copy_only=False))


def non_negative(column: pa.ChunkedArray, name: str, what: str, where: object) -> np.ndarray:
    """Return a column as float32; raise ColumnError if a number is negative or not finite."""
    with np.errstate(over="ignore"):
        values = numeric(column, name, what, where).astype(np.float32)
    fine = (values >= 0) & (values < np.inf)
    if not fine.all():
        row = int(fine.argmin())
        got = f"{combined(column)[row].as_py()} in row {row_number(where, row)} ({int((~fine).sum())} such rows)"
        text = f"{what} column '{name}' must be finite and not negative in every row"
        raise ColumnError(text, where=where, got=got, hint="correct or drop the column")
    return values


def feature_matrix(
    table: pa.Table, names: tuple[str, ...], *, where: object, missing: Missing
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return all feature columns as one float32 matrix, and their names."""
    blocks: list[np.ndarray] = []
    labels: list[str] = []
    saved = saved_names(table.schema, FEATURE_NAMES_KEY)
    for name in names:
        column = table[name]
        if is_list(column.type):
            block = _list_column(column, name, where)
            use_saved = len(names) == 1 and len(saved) == block.shape[1]
            labels += saved if use_saved else [f"{name}[{i}]" for i in range(block.shape[1])]
        else:
            block = _feature_column(column, name, where)[:, None]
            labels.append(name)
        blocks.append(block)
    matrix = blocks[0] if len(blocks) == 1 else _side_by_side(blocks, table.num_rows)
    check_features(matrix, labels, where=where, missing=missing)
    return matrix, tuple(labels)


def _side_by_side(blocks: list[np.ndarray], rows: int) -> np.ndarray:
    matrix = np.empty((rows, sum(block.shape[1] for block in blocks)), np.float32)
    for start in range(0, rows, ROWS_AT_ONCE):
        chosen, place = slice(start, start + ROWS_AT_ONCE), 0
        for block in blocks:
            matrix[chosen, place : place + block.shape[1]] = block[chosen]
            place += block.shape[1]
    return matrix


def category_codes(column: pa.ChunkedArray, name: str, where: object) -> tuple[np.ndarray, Any]:
    """Return categories as codes (1, 2, ...; 0 for a missing value), and the string of each code from 1, sorted."""
    try:
        encoded = combined(column).cast(pa.string()).dictionary_encode()
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        got, hint = f"type {column.type}", "convert it to numbers or strings"
        raise ColumnError(f"column '{name}' cannot be categorical", where=where, got=got, hint=hint) from error
    if len(encoded.dictionary) >= MAX_CATEGORIES:
        got = f"{len(encoded.dictionary):,}"
        raise ColumnError(f"'{name}' has too many categories", where=where, got=got, hint="hash or drop it")
    order = pc.sort_indices(encoded.dictionary)
    sorted_code = np.zeros(len(order) + 1, np.float32)  # the last entry, of index -1, is for a missing value
    sorted_code[order.to_numpy()] = np.arange(1, len(order) + 1)
    return sorted_code[pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)], encoded.dictionary.take(order)


def _feature_column(column: pa.ChunkedArray, name: str, where: object) -> np.ndarray:
    values = combined(column)
    if values.null_count and (is_number(values.type) or pa.types.is_null(values.type)):
        values = pc.fill_null(values.cast(pa.float64()), float("nan"))  # check_features rejects or accepts NaN
    with np.errstate(over="ignore"):
        return numeric(pa.chunked_array([values]), name, "feature", where).astype(np.float32, copy=False)


def _list_column(column: pa.ChunkedArray, name: str, where: object) -> np.ndarray:
    """Return a column of lists of one length as a matrix; contiguous float32 data is not copied."""
    values = combined(column)
    check_no_nulls(values, name, where, what="feature")
    lengths = pc.list_value_length(values)
    bounds = pc.min_max(lengths).as_py()
    if bounds["min"] != bounds["max"]:
        got, hint = f"lengths {bounds['min']} to {bounds['max']}", "pad the shorter lists"
        raise ColumnError(f"feature column '{name}' must have lists of one length", where=where, got=got, hint=hint)
    flat = _feature_column(pa.chunked_array([values.flatten()]), name, where)
    return flat.reshape(len(values), bounds["max"])


def check_features(matrix: np.ndarray, names: list[str], *, where: object, missing: Missing) -> None:
    """Raise ColumnError if a feature is infinite, or is NaN while `missing` is "reject"."""
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(matrix.sum()):  # a sum is not finite if a value is not, and takes no memory
            return
    bad = ~np.isfinite(matrix) if missing == "reject" else np.isinf(matrix)
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        hint = "replace or clip them (values beyond 3.4e38 do not fit float32)"
        if missing == "reject" and np.isnan(matrix[row, column]):
            hint = "fill them, or leave out missing=error (for read_log, missing='reject')"
        raise ColumnError(
            f"feature '{names[column]}' has values that are not finite",
            where=where,
            got=f"{matrix[row, column]} in row {row_number(where, row)} ({int(bad[:, column].sum())} such rows)",
            hint=hint,
        )
