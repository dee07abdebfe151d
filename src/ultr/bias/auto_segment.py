"""Find a column, such as the device, on which examination depends, so that it can be estimated for each of its values.

A column is tested if it has one value per request, and few values with enough clicks each. Only the evidence of
`estimators` counts: requests in random order, or items shown at several positions. It is used within each value, so
that neither other queries nor more clicks at all positions matter: ratios of θ between positions must differ.

- The test is a likelihood ratio, of one θ for all values against one for each, given the clicks of each stratum. It is
  divided by the dispersion of clicks between groups of requests, because clicks of one request depend on each other.
- A column is chosen if the difference is significant (Bonferroni over columns) and large enough to matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from scipy import sparse
from scipy.special import gammaincc

from ultr.bias.counts import (
    Counts,
    Impressions,
    clicked_rows,
    counted_items,
    counted_random,
    counted_swaps,
    impressions,
    log_counts,
)
from ultr.bias.estimators import (
    POOL_CLICKS,
    RANDOM,
    ConditionalFit,
    best_source,
    fit_conditional,
    items_comparable,
    relative_variance,
)
from ultr.checks.pitfalls import suspicious_requests
from ultr.log import Log, read_log
from ultr.log.columns import Columns, as_data_error, combined, resolve_columns
from ultr.log.labels import click_label
from ultr.log.readers import FIRST_ROWS, as_table, first_rows, is_files, read_columns
from ultr.log.sampling import SAMPLE_ROWS, sample_log
from ultr.log.table import as_shown, is_grid

MOST_COLUMNS = 5  # columns that are tested, at most
MOST_VALUES = 8  # a column with more values is not tested
LEAST_REQUESTS, LEAST_CLICKS = 200, 200  # of each value
LEVEL = 0.001  # of the test, for all columns together
MATERIAL = float(np.log(1.15))  # typical difference of log θ between two values that matters
FEATURES = 8  # features that show whether an item is the same one when it occurs again
SHOWN_POSITION = 5  # position of which messages tell θ, if it was tested
COUNTED = {"randomised": counted_random, "swaps": counted_swaps, "items": counted_items}  # by source of evidence
# A column of whole numbers is tested only if it has one of these names: other numbers are measures or ids.
CODED = frozenset(("device", "platform", "os", "client", "app", "browser", "surface", "page_type", "layout"))


@dataclass(frozen=True, eq=False)
class Segment:
    """A column on which examination depends, and θ of each value at the positions that were compared."""

    column: str
    values: tuple[str, ...]
    positions: tuple[int, ...]
    theta: np.ndarray  # [values, positions] relative to the first of the positions
    p: float  # corrected for the number of columns
    difference: float  # typical difference of log θ between two values, without sampling error
    further: tuple[str, ...] = ()  # other columns on which examination depends within a value of this one

    @property
    def clear(self) -> bool:
        return self.difference >= MATERIAL and self.p < LEVEL

    def __str__(self) -> str:
        shown = SHOWN_POSITION - 1 + self.positions[0] if is_grid(self.positions) else SHOWN_POSITION
        at = min(range(1, len(self.positions)), key=lambda i: abs(self.positions[i] - shown))
        theta = _listed([f"{value:.2f}" for value in self.theta[:, at]])
        p = f"p = {self.p:.0e}" if self.p >= 1e-12 else "p < 1e-12"
        here, first = as_shown(self.positions[at]), as_shown(self.positions[0])
        looks = f"at position {here} users look {theta} times as often as at {first}"
        names = ",".join((self.column, *self.further))
        hint = f"; it depends on {_listed(self.further)} too: --segment {names} uses all" if self.further else ""
        return f"'{self.column}' ({', '.join(self.values)}): {looks} ({p}){hint}"


def _listed(texts: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))


def find_segment(
    source: Any,
    *,
    label: str | None = None,
    time: str | None = None,
    columns: Mapping[str, Any] | None = None,
    **reading: Any,
) -> Segment | None:
    """Return the column of a log on which examination depends most surely; None if there is none.

    The source is one of `read_log`; prepared lists and SVMlight have no such column. `columns` are those that the
    caller names, by role, and `reading` has further arguments of `read_log`. A row counts as clicked if its `label`
    (default: the click) is above 0. The column of the `time` is not a segment.
    """
    named = {role: name for role, name in (columns or {}).items() if name is not None}
    source = source if is_files(source) else as_table(source)
    roles, names = segment_candidates(source, time=time, columns=named)
    if roles is None or not names:
        return None
    further = {"features": list(roles.features[:FEATURES]), "categorical": names}
    return choose_segment(read_log(source, **reading, **{**named, **further}), names, label=label)


def _candidates(head: pa.Table, columns: Columns, time: str | None) -> list[str]:
    """Return the columns that may be segments, judged by their types and by the first rows of a log."""
    taken = set(columns.used) - set(columns.categorical) | {time}
    names = [name for name in head.column_names if name not in taken and _may_be_segment(head.schema.field(name))]
    plain = pa.table({name: combined(head[name]) for name in (columns.request, *names)})

    def one_of_few(name: str) -> bool:
        """Return whether each request has one value of a column, and the column few values."""
        pairs, requests, values = (
            plain.group_by(keys).aggregate([]).num_rows for keys in ([columns.request, name], [columns.request], [name])
        )
        return bool(pairs == requests and values <= MOST_VALUES)

    return [name for name in names if one_of_few(name)][:MOST_COLUMNS]


def _may_be_segment(column: pa.Field) -> bool:
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_boolean)
    return any(is_kind(kind) for is_kind in texts) or (pa.types.is_integer(kind) and column.name.lower() in CODED)


def choose_segment(log: Log, names: Sequence[str], *, label: str | None = None) -> Segment | None:
    """Return the best of the columns `names` of a log, which are among its categorical features."""
    # The whole log, which training reads, must have one value per request, and no other value than the sample.
    values_of = {name: len(np.unique(_column(log, name))) for name in names if _one_per_request(log, name)}
    label = label or click_label(log.actions)
    suspicious = suspicious_requests(log.without_features(), clicked_rows(log, label))
    log = sample_log(log.select(~suspicious) if suspicious.any() else log, SAMPLE_ROWS)
    clicked = clicked_rows(log, label)
    common = [(name, *part) for name in values_of if (part := _values(log, name, clicked)) is not None]
    several = [(name, values, code) for name, values, code in common if len(values) == values_of[name]]
    if not several:
        return None
    seen = impressions(replace(log, weights=None), clicked)  # θ does not depend on the weights of requests
    others = [i for i, name in enumerate(log.feature_names) if name not in names]
    described = replace(
        log, features=log.features[:, others], feature_names=tuple(log.feature_names[i] for i in others)
    )
    if not items_comparable(replace(described, vocabularies={}), by_query=seen.by_query):
        seen = replace(seen, items=None)
    best = best_source(log_counts(seen))
    if best is None:
        return None
    tested = [_tested(seen, *column, source=best.name, columns=len(several)) for column in several]
    chosen = {each.column: each for each in tested if each is not None and each.clear}
    if not chosen:
        return None
    first = min(chosen.values(), key=lambda each: (each.p, -each.difference))
    held = next(value for name, _, value in several if name == first.column)
    rest = [each for each in several if each[0] in chosen and each[0] != first.column]
    further = [each[0] for each in rest if _depends_within(seen, held, *each, source=best.name, columns=len(several))]
    return replace(first, further=tuple(further))


def _column(log: Log, name: str) -> np.ndarray:
    return log.features[:, log.feature_names.index(name)]


def _one_per_request(log: Log, name: str) -> bool:
    values = _column(log, name)
    return bool((values == np.repeat(values[log.offsets[:-1]], log.lengths)).all())


def _values(log: Log, name: str, clicked: np.ndarray) -> tuple[tuple[str, ...], np.ndarray] | None:
    """Return the values of a column and the index of each request's value; None if they are too many or too rare."""
    used, code = np.unique(_column(log, name)[log.offsets[:-1]], return_inverse=True)
    clicks = np.bincount(np.repeat(code, log.lengths), clicked)
    if not 2 <= len(used) <= MOST_VALUES or np.bincount(code).min() < LEAST_REQUESTS or clicks.min() < LEAST_CLICKS:
        return None
    texts = ["", *log.vocabularies[name].to_pylist()]  # a missing value has code 0, and is the segment ""
    return tuple(texts[int(i)] for i in used), code


def _tested(
    seen: Impressions, column: str, values: tuple[str, ...], value: np.ndarray, *, source: str, columns: int
) -> Segment | None:
    """Test whether θ differs between the values of requests; None if fewer than two positions can be compared.

    `value` has the index of each request's value. The p value is corrected for the number of `columns`.
    """
    count = COUNTED[source]
    counts = [each for v in range(int(value.max()) + 1) if (each := count(seen.select(value == v))) is not None]
    if len(counts) <= value.max():
        return None
    compared = np.array([each.total().compared_clicks() for each in counts]).min(0)
    places = np.flatnonzero(compared >= POOL_CLICKS)
    # Positions are not pooled: values with lists of other lengths would have other positions in a pool.
    if len(places) > 1:
        theta = np.array([fit_conditional(_at(each, places).total()).theta for each in counts])
        places = places[np.isfinite(theta).all(0)]
    if len(places) < 2:
        return None
    parts = [_at(each, places) for each in counts]
    fits = [fit_conditional(each.total()) for each in parts]
    theta = np.array([fit.theta for fit in fits])
    if not np.isfinite(theta).all():
        return None
    common = fit_conditional(_together(parts)).theta
    gains = [_likelihood(each, own) - _likelihood(each, common) for each, own in zip(parts, theta, strict=True)]
    dispersion = np.mean([_dispersion(each, fit) for each, fit in zip(parts, fits, strict=True)])
    freedom = (len(parts) - 1) * (len(places) - 1)
    p = float(gammaincc(freedom / 2, max(0.0, sum(gains)) / max(1.0, float(dispersion))))
    shown = np.bincount(seen.place, minlength=len(seen.positions))[places]
    positions = tuple(seen.positions[places].tolist())
    difference = _difference(fits, compared[places], shown)
    return Segment(column, values, positions, theta / theta[:, :1], p * columns, difference)


def _depends_within(
    seen: Impressions, held: np.ndarray, column: str, values: tuple[str, ...], value: np.ndarray, **options: Any
) -> bool:
    """Return whether θ differs between the values of a column where another column, `held`, has one value."""
    number = int(held.max()) + 1
    options["columns"] *= number
    for v in range(number):
        left, code = np.unique(value[held == v], return_inverse=True)
        names = tuple(values[i] for i in left)
        found = _tested(seen.select(held == v), column, names, code, **options) if len(left) > 1 else None
        if found is not None and found.clear:
            return True
    return False


def _at(counts: Counts, places: np.ndarray) -> Counts:
    """Return the counts at some positions, which are numbered 0, 1, ... then."""
    kept = counts.select(np.isin(counts.places, places))
    return replace(kept, places=np.searchsorted(places, kept.places), size=(counts.size[0], len(places)))


def _together(parts: Sequence[Counts]) -> Counts:
    """Return the cells of all parts; a stratum of one part is not one of another."""
    before = np.cumsum([0, *(part.size[0] for part in parts)])
    cells = [part.total() for part in parts]
    strata = np.concatenate([each.strata + first for each, first in zip(cells, before, strict=False)])
    places, shown, clicked = (
        np.concatenate([getattr(each, name) for each in cells]) for name in ("places", "shown", "clicked")
    )
    return Counts(strata, places, (int(before[-1]), parts[0].size[1]), shown, clicked)


def _shares(cells: Counts, theta: np.ndarray) -> np.ndarray:
    """Return the share of the clicks of its stratum that each cell is expected to have."""
    expected = cells.shown * theta[cells.places]
    return np.asarray(expected / np.bincount(cells.strata, expected, cells.size[0])[cells.strata])


def _likelihood(counts: Counts, theta: np.ndarray) -> float:
    """Return the log-likelihood of θ given the clicks of each stratum."""
    cells = counts.total()
    some = cells.clicked > 0
    return float(cells.clicked[some] @ np.log(_shares(cells, theta)[some]))


def _dispersion(counts: Counts, fit: ConditionalFit) -> float:
    """Return the variance of the score of log θ between groups of requests, relative to that of independent clicks."""
    cells = counts.total()
    strata, width = cells.size
    index = np.arange(len(cells.places))
    share = sparse.csr_matrix((_shares(cells, fit.theta), (cells.places, cells.strata)), (width, strata))
    of_place = sparse.csr_matrix((np.ones(len(index)), (cells.places, index)), (width, len(index)))
    of_stratum = sparse.csr_matrix((np.ones(len(index)), (cells.strata, index)), (strata, len(index)))
    score = (of_place @ counts.clicked - share @ (of_stratum @ counts.clicked)).toarray()
    return float(np.trace(fit.covariance() @ score @ score.T) / (width - 1))


def _difference(fits: Sequence[ConditionalFit], clicks: np.ndarray, shown: np.ndarray) -> float:
    """Return the root mean square, over pairs of values and impressions, of the difference of log θ.

    θ is relative to the position with the most clicks. The part that sampling error is expected to cause is left out.
    """
    reference = int(clicks.argmax())
    log_theta = np.log([fit.theta / fit.theta[reference] for fit in fits])
    errors = [relative_variance(fit.covariance(), reference) for fit in fits]
    squares = 2 * log_theta.var(0, ddof=1) - 2 * np.mean(errors, axis=0)
    weights = np.where(np.arange(len(shown)) == reference, 0, shown)
    return float(np.sqrt(max(0.0, np.average(squares, weights=weights))))


def segment_candidates(
    source: Any, *, time: str | None = None, columns: Mapping[str, Any] | None = None
) -> tuple[Columns | None, list[str]]:
    """Return the columns of a log by role, and the names of columns that may be segments; few rows are read.

    Prepared lists and SVMlight have no such columns, and no roles.
    """
    named = {role: name for role, name in (columns or {}).items() if name is not None}
    if is_files(source):
        roles = read_columns(source, **named)
        if roles is None:
            return None, []
        head = first_rows(source)
    else:
        head = as_table(source)
        roles = resolve_columns(head.schema, where="the table", rows=lambda: head.slice(0, FIRST_ROWS), **named)
    if not (roles.actions and (roles.item or {*RANDOM} & roles.context.keys())):
        return roles, []
    with as_data_error(source, "a log"):
        return roles, _candidates(head.slice(0, FIRST_ROWS), roles, time)
