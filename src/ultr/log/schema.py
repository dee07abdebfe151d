"""The role of each column of a log (request, position, action, ...): named by the caller, or found by common names."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import pyarrow as pa

from ultr.errors import ColumnError, OptionError, nearest
from ultr.log.table import ACTIONS_KEY, CATEGORICAL_KEY, FEATURE_NAMES_KEY

# The common names of each role, best first; case is ignored. `query` is not a name of a request, because queries recur.
NAMES = {
    "request": "request request_id qid query_id search_id session session_id impression_id list_id group_id group",
    "position": "position pos rank slot display_position",
    "relevance": "relevance true_relevance grade",
    "weight": "weight request_weight sample_weight",
    "item": "item item_id doc doc_id docid document_id product product_id sku movie_id video_id article article_id",
    "query": "query query_id qid query_text",
    "segment": "",
    "randomised": "randomised randomized is_randomised is_randomized random_order",
}
CONTEXT = ("query", "segment", "randomised")  # roles with one value per request
SEVERAL = ("actions", "features", "categorical")  # roles that several columns may have
ROLES = (*NAMES, *SEVERAL)
ACTIONS = (
    "click clicks clicked dwell dwell_time watch watch_time watch_ratio like liked share shared save saved comment "
    "follow favorite cart add_to_cart purchase purchased order ordered revenue conversion converted"
)
ACTION_NAMES = frozenset(ACTIONS.split())
OFTEN_TEXT = {"comment", "order", "ordered"}  # these are actions only if they hold numbers
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
    context: Mapping[str, str]  # query, segment or randomised -> its column, if the table has one
    absent: Mapping[str, str] = field(default_factory=dict)  # role -> its column in training, if the table lacks it

    @property
    def by_role(self) -> dict[str, Any]:
        """The column of each role that has one; a list of columns for actions, features and categorical."""
        single = {role: getattr(self, role) for role in ("request", "position", "item", "relevance", "weight")}
        several = {role: list(getattr(self, role)) for role in SEVERAL}
        return {role: names for role, names in {**single, **self.context, **several}.items() if names}

    @property
    def notes(self) -> tuple[str, ...]:
        """A message for each column of training that the table does not have."""
        return tuple(
            f"there is no column '{name}', which was the {role} in training; to use another one, name it with --{role}"
            for role, name in self.absent.items()
        )

    @property
    def used(self) -> list[str]:
        """All columns with a role; a segment that is a categorical feature too is listed once."""
        context = [name for role, name in self.context.items() if role != "segment" or name not in self.categorical]
        single = [self.request, self.position, self.relevance, self.weight, self.item, *context]
        return [name for name in single if name is not None] + [*self.actions, *self.features, *self.categorical]

    def unused(self, names: Iterable[str]) -> list[str]:
        used = set(self.used)
        return [name for name in names if name not in used]


def resolve_columns(
    schema: pa.Schema, *, where: object, trained: Mapping[str, Any] | None = None, **named: Any
) -> Columns:
    """Return the column of each role: the one that the caller named, or else the first common name in the schema.

    `named` maps the roles in `ROLES` to a column name, or to several for actions, features and categorical; an empty
    name means that no column has this role. Features may be named by patterns (`emb_*`). If the caller names none,
    features are columns called `features`, `feature_...`, `f1` or `x_1`. Other columns are not taken as features,
    because any of them may be an action or an id. `trained` has the columns of a training log (`Log.columns`), which
    are used for the roles that are not named. No other column takes their place if they are missing.
    """
    if unknown := next((role for role in named if role not in ROLES), None):
        raise OptionError(f"a log has no column for {unknown!r}", hint=nearest(unknown, ROLES))
    names = schema.names
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise ColumnError("column names must be unique", where=where, got=f"'{twice}' twice", hint="rename one of them")
    named, absent = _as_in_training(named, trained or {}, schema, where)
    listed = [name for role in SEVERAL if named.get(role) is not None for name in _as_list(named[role])]
    named_columns = {*listed, *(named.get(role) for role in NAMES)} & set(names)
    # A column that the caller names for one role is not considered for any other.
    by_lower = {name.lower(): name for name in reversed(names) if name not in named_columns}

    def one(role: str) -> str | None:
        name: str | None = named.get(role)
        if name is None:
            return next((by_lower[common] for common in NAMES[role].split() if common in by_lower), None)
        if not name:
            return None
        if name not in names:
            raise ColumnError(f"no column '{name}' for the {role}", where=where, hint=nearest(str(name), names))
        return name

    single = {role: one(role) for role in NAMES if role != "query"}
    by_lower = {lower: name for lower, name in by_lower.items() if name != single["request"]}
    single["query"] = one("query")  # after the request, because requests and queries share some common names
    free = [n for n in names if n not in named_columns and n not in single.values()]

    def several(role: str, title: str, default: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
        return default() if named.get(role) is None else _matching(named[role], names, title, where=where)

    actions = several("actions", "actions", lambda: _saved(schema, ACTIONS_KEY) or _common_actions(schema, free))
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
    )
    _check(columns, names, where)
    return columns


def _as_in_training(
    named: Mapping[str, Any], trained: Mapping[str, Any], schema: pa.Schema, where: object
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return `named` with the columns of training for all other roles, and the single columns that are missing.

    Raise ColumnError if a request or feature column is missing. Actions may be missing: labels say which they need.
    """
    present, chosen, absent = set(schema.names), dict(named), dict[str, str]()
    for role, columns in trained.items():
        if chosen.get(role) is not None:
            continue
        missing = [name for name in ([columns] if isinstance(columns, str) else columns) if name not in present]
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


def _check(columns: Columns, names: Sequence[str], where: object) -> None:
    """Raise an error if a log has no request ids, if it has actions but no positions, or if a column has two roles."""
    if not columns.request:
        hint = f"name it with --request (request=...); columns: {_some(names)}"
        raise ColumnError("found no column with the request id of each row", where=where, hint=hint)
    if columns.actions and columns.position is None:
        hint = f"name it with --position (position=...); row order is not a position; columns: {_some(names)}"
        raise ColumnError("found actions but no column with the position of each item", where=where, hint=hint)
    twice = next((name for name, count in Counter(columns.used).items() if count > 1), None)
    if twice is not None:
        raise OptionError(f"column '{twice}' has two roles", where=where, hint="give each column one role")


def _common_actions(schema: pa.Schema, names: Iterable[str]) -> tuple[str, ...]:
    """Return the columns with common names of actions; some of these names count only if the column holds numbers."""
    likely = (n for n in names if n.lower() in ACTION_NAMES)
    return tuple(n for n in likely if n.lower() not in OFTEN_TEXT or _holds_numbers(schema.field(n).type))


def _as_list(columns: Sequence[str] | str) -> list[str]:
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
    for pattern in filter(None, _as_list(columns)):
        matches = [pattern] if pattern in present else [n for n in names if fnmatchcase(n, pattern)]
        if not matches:
            raise ColumnError(f"no column '{pattern}' for the {title}", where=where, hint=nearest(pattern, names))
        chosen.update(dict.fromkeys(matches))
    return tuple(chosen)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def not_numbers(name: str, kind: object, *, what: str, where: object) -> ColumnError:
    """Return the error for a column that must hold numbers and does not; `what` is the role of the column."""
    hint = "name it with --categorical, or convert it" if what == "feature" else "convert it, or name another column"
    return ColumnError(f"{what} column '{name}' must hold numbers", where=where, got=f"type {kind}", hint=hint)
