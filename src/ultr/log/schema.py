"""Which column plays which part: named by the caller, or found by the names people use."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import pyarrow as pa

from ultr.errors import ColumnError, OptionError, nearest
from ultr.log.table import ACTIONS_KEY, CATEGORICAL_KEY

# The names looked for, most telling first, without regard to case. `query` is not among them: a query recurs.
NAMES = {
    "request": "request request_id qid query_id search_id session session_id impression_id list_id group_id group",
    "position": "position pos rank slot display_position",
    "relevance": "relevance true_relevance grade",
    "weight": "weight request_weight sample_weight",
    "item": "item item_id doc doc_id docid document_id product_id movie_id video_id article_id",
    "query": "query query_id qid query_text",
    "segment": "",
    "randomised": "randomised randomized",
}
CONTEXT = ("query", "segment", "randomised")  # what a whole request has
ACTIONS = (
    "click clicks clicked dwell dwell_time watch watch_time watch_ratio like liked share shared save saved comment "
    "follow favorite cart add_to_cart purchase purchased order ordered revenue conversion converted"
)
ACTION_NAMES = frozenset(ACTIONS.split())
OFTEN_TEXT = {"comment", "order", "ordered"}  # actions where they hold numbers
FEATURE_PATTERN = re.compile(r"features?([_.\[-].+|\d+)?|[fx][_.-]?\d+", re.IGNORECASE)


@dataclass(frozen=True)
class Columns:
    """The part each column of a table plays."""

    request: str
    position: str | None
    actions: tuple[str, ...]
    features: tuple[str, ...]
    categorical: tuple[str, ...]
    relevance: str | None
    weight: str | None
    item: str | None
    context: Mapping[str, str]  # query, segment, randomised: where there is one, its column

    @property
    def used(self) -> list[str]:
        single = [self.request, self.position, self.relevance, self.weight, self.item, *self.context.values()]
        return [name for name in single if name is not None] + [*self.actions, *self.features, *self.categorical]

    def unused(self, names: Iterable[str]) -> list[str]:
        used = set(self.used)
        return [name for name in names if name not in used]


def resolve_columns(
    schema: pa.Schema,
    *,
    where: object,
    request: str | None = None,
    position: str | None = None,
    actions: Sequence[str] | str | None = None,
    features: Sequence[str] | str | None = None,
    categorical: Sequence[str] | str | None = None,
    relevance: str | None = None,
    weight: str | None = None,
    item: str | None = None,
    query: str | None = None,
    segment: str | None = None,
    randomised: str | None = None,
) -> Columns:
    """Give each part its column: the one named, or else the first of the usual names that is there.

    Features are the columns named or matched by the given patterns (`emb_*`), or else those called `features`,
    `feature_...`, `f1`, `x_1`. Other columns are left alone, as any of them may be an action or an identifier.
    """
    names = schema.names
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise ColumnError("column names should differ", where=where, got=f"'{twice}' twice", mend="rename one")
    given = [wanted for wanted in (actions, features, categorical) if wanted is not None]
    asked = _asked(request, position, relevance, weight, item, query, segment, randomised, several=given) & set(names)
    # A column that the caller gives a part is not looked at for any other.
    by_lower = {name.lower(): name for name in reversed(names) if name not in asked}

    def one(part: str, given: str | None) -> str | None:
        if given is None:
            return next((by_lower[usual] for usual in NAMES[part].split() if usual in by_lower), None)
        if given not in names:
            raise ColumnError(f"no column '{given}' for the {part}", where=where, mend=nearest(str(given), names))
        return given

    single = {
        part: one(part, given)
        for part, given in {
            "request": request,
            "position": position,
            "relevance": relevance,
            "weight": weight,
            "item": item,
            "segment": segment,
            "randomised": randomised,
        }.items()
    }
    by_lower = {lower: name for lower, name in by_lower.items() if name != single["request"]}
    single["query"] = one("query", query)
    free = [n for n in names if n not in asked and n not in single.values()]
    if actions is None:
        chosen_actions = _saved(schema, ACTIONS_KEY) or _usual_actions(schema, free)
    else:
        chosen_actions = _matching(actions, names, part="actions", where=where)
    if categorical is None:
        chosen_categorical = _saved(schema, CATEGORICAL_KEY)
    else:
        chosen_categorical = _matching(categorical, names, part="categorical features", where=where)
    if features is None:
        taken = {*chosen_actions, *chosen_categorical}
        chosen_features = tuple(n for n in free if n not in taken and FEATURE_PATTERN.fullmatch(n))
    else:
        chosen_features = _matching(features, names, part="features", where=where)
    columns = Columns(
        request=single["request"] or "",
        position=single["position"],
        actions=chosen_actions,
        features=chosen_features,
        categorical=chosen_categorical,
        relevance=single["relevance"],
        weight=single["weight"],
        item=single["item"],
        context={part: name for part in CONTEXT if (name := single[part]) is not None},
    )
    _check(columns, names, where)
    return columns


def _check(columns: Columns, names: Sequence[str], where: object) -> None:
    """Refuse a log without requests, one with actions but no positions, and columns with two parts."""
    if not columns.request:
        mend = f"name it with --request (request=...); columns: {_some(names)}"
        raise ColumnError("found no column that says which request a row belongs to", where=where, mend=mend)
    if columns.actions and columns.position is None:
        mend = f"name it with --position (position=...); row order is not taken for position; columns: {_some(names)}"
        raise ColumnError("found actions but no column that says where an item was shown", where=where, mend=mend)
    twice = next((name for name, count in Counter(columns.used).items() if count > 1), None)
    if twice is not None:
        raise OptionError(f"column '{twice}' is given two parts", where=where, mend="give each column one part")


def _usual_actions(schema: pa.Schema, names: Iterable[str]) -> tuple[str, ...]:
    """Columns named like actions; where such a name is often that of a text, only if they hold numbers."""
    likely = (n for n in names if n.lower() in ACTION_NAMES)
    return tuple(n for n in likely if n.lower() not in OFTEN_TEXT or _holds_numbers(schema.field(n).type))


def _asked(*single: str | None, several: Sequence[Sequence[str] | str]) -> set[str]:
    """The columns that the caller names, patterns among them."""
    listed = [name for wanted in several for name in _listed(wanted)]
    return {name for name in (*single, *listed) if name is not None}


def _listed(wanted: Sequence[str] | str) -> list[str]:
    listed = wanted.split(",") if isinstance(wanted, str) else wanted
    if not isinstance(listed, Sequence) or not all(isinstance(name, str) for name in listed):
        raise OptionError("columns are given as names", got=repr(wanted))
    return [name.strip() for name in listed]


def _holds_numbers(kind: pa.DataType) -> bool:
    while hasattr(kind, "value_type"):  # lists hold what their values are
        kind = kind.value_type
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _saved(schema: pa.Schema, key: bytes) -> tuple[str, ...]:
    """The columns that a log which `write_log` wrote says play a part, whatever their names."""
    return tuple(name for name in saved_names(schema, key) if name in schema.names)


def saved_names(schema: pa.Schema, key: bytes) -> list[str]:
    """Names that `write_log` left in a schema; none where something else is there."""
    try:
        saved = json.loads((schema.metadata or {}).get(key, b"[]"))
    except ValueError:
        return []
    fine = isinstance(saved, list) and all(isinstance(name, str) for name in saved) and len(set(saved)) == len(saved)
    return saved if fine else []


def _matching(wanted: Sequence[str] | str, names: Sequence[str], *, part: str, where: object) -> tuple[str, ...]:
    patterns = [pattern for pattern in _listed(wanted) if pattern]
    found: dict[str, None] = {}
    present = set(names)
    for pattern in patterns:
        hits = [pattern] if pattern in present else [n for n in names if fnmatchcase(n, pattern)]
        if not hits:
            raise ColumnError(f"no column '{pattern}' among the {part}", where=where, mend=nearest(pattern, names))
        found.update(dict.fromkeys(hits))
    return tuple(found)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def not_numbers(name: str, kind: object, *, what: str, where: object) -> ColumnError:
    """That a column should hold numbers, and what it holds."""
    mend = "convert it, or name it with --categorical" if what == "feature" else "convert it, or name another"
    return ColumnError(f"{what} column '{name}' should hold numbers", where=where, got=f"type {kind}", mend=mend)
