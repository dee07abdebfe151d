"""Find common problems of production logs, without true labels. A check reports nothing if the log is too small."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from ultr.errors import DataError
from ultr.log import Log
from ultr.log.cleaning import BOT_SHARES, suspicious_of
from ultr.log.labels import is_time
from ultr.log.sampling import sample_log
from ultr.log.table import as_shown, is_grid

MIN_REQUESTS, SIGMAS = 100, 5.0  # fewest requests for a check; standard errors beyond which chance is excluded
FAR_BELOW = 0.2  # warn below this part of the expected share; 0.3 is normal if nine users in ten click exactly once
FLAT, FLAT_SIGMAS, RISE = 0.15, 3.0, 0.3  # change of the click rate over a list, by its mean; -1 to -6 is usual
SEEN_WHOLE = 4  # users may see lists up to this length at one glance, without position bias
GAP_SHARE, SHOWN_MOSTLY = 0.05, 0.5  # share of requests with a gap; it is at a position that most requests show
MIN_CLICKS = 100  # fewest clicks for a check of what they are joined with
UNCLICKED_SHARE, TWICE_SHARE = 0.001, 0.01  # share of dwell times without a click; of requests with an item twice
FEATURE_REQUESTS, FEATURE_ROWS, ITEM_ROWS = 10, 50_000, 1_000_000  # fewest requests, and most rows, that are checked
SAME_VALUE, SAME_RATIO, VARIES = 0.02, 0.1, 0.01  # shares of neighbours that differ: at a position, ratio, in a list
OWN_SCORE, RANKED_ROWS = 0.9, 10_000  # least rank correlation with position; most rows for it
LARGEST_TABLE, NAMED, TINY = 1 << 20, 10, 1e-12  # entries of a table by position id; names in a message; almost 0


@dataclass(frozen=True)
class Pitfall:
    """A problem of a log: its name, what the check found (with numbers), and what to do."""

    name: str
    what: str
    hint: str
    features: tuple[str, ...] = ()  # the features to train without


class _View:
    """A log and the arrays that checks share. `place` is the index of a row's position in `ids` and in tables."""

    def __init__(self, log: Log, positions: np.ndarray, clicked: np.ndarray, sample: Log | None) -> None:
        self.log, self.sample, self.lengths = log, sample, log.lengths
        self.first, self.last = log.offsets[:-1], log.offsets[1:] - 1  # row of each request
        self.weights = np.ones(len(log)) if log.weights is None else log.weights.astype(np.float64)
        self.place, self.ids = positions, np.arange(min(int(positions.max()) + 1, LARGEST_TABLE))
        if positions.max() >= LARGEST_TABLE or is_grid(positions):
            self.ids, self.place = np.unique(positions, return_inverse=True)
        rows = np.flatnonzero(clicked)
        bounds = np.searchsorted(rows, log.offsets)
        self.clicks_of = np.diff(bounds)  # by request
        ranks = np.cumsum(rows - np.repeat(self.first, self.clicks_of))
        self.rank_sums = np.diff(np.concatenate(([0], ranks))[bounds])  # of the clicked rows, ranks from 0
        at_click, size = self.place[rows], len(self.ids)
        self.impressions, self.clicks = (np.bincount(place, minlength=size) for place in (self.place, at_click))
        self.shown = self.ids[self.impressions > 0]
        seen, got = self.impressions, self.clicks
        if log.weights is not None:
            seen = np.bincount(self.place, np.repeat(log.weights, self.lengths), minlength=size)
            got = np.bincount(at_click, np.repeat(log.weights, self.clicks_of), minlength=size)
        self.rates = np.minimum(got / np.maximum(seen, np.finfo(np.float64).tiny), 1)

    def sums(self, table: np.ndarray) -> np.ndarray:
        """Return sums [requests]: over the rows of a request, of the value in `table` at the row's position."""
        return np.asarray(np.add.reduceat(table.astype(np.float32)[self.place], self.first))

    def numbered(self) -> bool:
        """Return True if all requests have the positions 1 to n, or all have 0 to n - 1."""
        first, last = self.ids[self.place[self.first]], self.ids[self.place[self.last]]
        return first[0] in (0, 1) and bool(((first == first[0]) & (last - first + 1 == self.lengths)).all())

    def trend(self) -> tuple[float, float]:
        """Return the change of the click rate over a list, relative to its mean, and its standard error."""
        n, m, w = self.lengths.astype(np.float64), self.clicks_of, self.weights
        spread = w * n * (n**2 - 1) / 12
        variance = float(w**2 @ (m * (n - m) * (n + 1))) / 12
        if not variance:
            return 0.0, np.inf
        scale = (spread @ (n - 1)) / spread.sum() ** 2 / ((w @ m) / (w @ n))
        return float(scale * (w @ (self.rank_sums - m * (n - 1) / 2))), float(scale * np.sqrt(variance))


def _far_below(observed: np.ndarray, expected: np.ndarray, weights: np.ndarray) -> tuple[float, float] | None:
    """Return the mean observed and expected shares if the observed one is far lower, and not by chance; else None."""
    if len(weights) < MIN_REQUESTS:
        return None
    seen, due = (float(np.average(values, weights=weights)) for values in (observed, expected))
    requests = weights.sum() ** 2 / (weights @ weights)  # the effective number of requests
    beyond = max(1 - FAR_BELOW, SIGMAS * np.sqrt(max(1 - due, 0.0) / max(due * requests, TINY)))
    return (seen, due) if due - seen > beyond * due else None


def _one_place(view: _View) -> Iterable[Pitfall]:
    if len(view.shown) == 1:
        hint = "examination cannot be estimated from this log: name the column of true positions with --position"
        yield Pitfall("one position only", f"every item was shown at position {as_shown(int(view.shown[0]))}", hint)
    elif (view.lengths == 1).all():
        hint = (
            "only items that recur at several positions can identify examination here: use a request id that all items "
            "shown together share"
        )
        yield Pitfall("one item per request", f"all {len(view.lengths):,} requests have one item", hint)


def _clickless_dropped(view: _View) -> Iterable[Pitfall]:
    with np.errstate(divide="ignore"):
        expected = np.exp(view.sums(np.log1p(-view.rates)))
    if shares := _far_below(view.clicks_of == 0, expected, view.weights):
        what = f"{shares[0]:.2%} of the requests have no click, but click rates by position predict {shares[1]:.1%}"
        hint = "log every request that was shown; if you keep a share of those without clicks, weight them by 1/share"
        yield Pitfall("clickless requests dropped", what, hint)


def _row_order(view: _View) -> Iterable[Pitfall]:
    n, m = view.lengths, view.clicks_of
    mixed = (m > 0) & (m < n)
    if mixed.sum() < MIN_REQUESTS or not view.numbered():
        return
    change, error = view.trend()
    if view.log.came_in_order and n.mean() > SEEN_WHOLE and abs(change) <= FLAT_SIGMAS * error <= FLAT:
        what = f"positions just number the rows of a request, and clicks do not fall with position ({change:+.1%})"
        hint = "check that positions are where users saw the items, and not row numbers of the log"
        yield Pitfall("position equal to row order", what, hint)
    rates = view.rates[view.place[0] :]
    top, above = np.zeros(len(rates)), np.cumprod(rates)  # top: P(some are clicked, not all, and they are first)
    for k in range(1, len(rates)):
        top[k] = (top[k - 1] + above[k - 1]) * (1 - rates[k])
    below = 1 - top / np.maximum(1 - above - np.cumprod(1 - rates), np.maximum(top, TINY))
    if shares := _far_below((view.rank_sums != m * (m - 1) // 2)[mixed], below[n - 1][mixed], view.weights[mixed]):
        what = f"{shares[0]:.1%} of requests have a click below an unclicked item, but {shares[1]:.1%} are expected"
        hint = "rows seem sorted by label: use the positions that users saw (unless users see one item at a time)"
        yield Pitfall("rows sorted by label", what, hint)


def _encoded_positions(view: _View) -> Iterable[Pitfall]:
    if view.sample is None or view.sample.positions is None or len(view.sample) < FEATURE_REQUESTS:
        return
    part = sample_log(view.sample, FEATURE_ROWS)
    ranked = sample_log(part.select(part.lengths >= 3), RANKED_ROWS)
    positions, starts = np.asarray(part.positions), part.offsets[:-1]
    inside, order = np.ones(part.rows, bool), np.argsort(positions, kind="stable")
    inside[starts] = False
    same = np.diff(positions[order]) == 0
    encode, others = [], []
    for column, name in enumerate(part.feature_names):
        x = np.nan_to_num(part.features[:, column], nan=-3e38)
        above, at_place = np.roll(x, 1), x[order]
        in_list = (x != above)[inside].sum() / max(inside.sum(), 1)
        at_one = (1 + (at_place[1:] != at_place[:-1])[same].sum()) / (1 + same.sum())  # small only if rows are many
        if in_list >= VARIES and at_one <= min(SAME_VALUE, SAME_RATIO * in_list):
            encode.append(name)
        elif name not in part.vocabularies:  # the order of codes means nothing
            others.append(column)
    follow = [part.feature_names[i] for i in others if _orders_as_positions(ranked, ranked.features[:, i])]
    if encode:
        what = f"{len(encode)} features have the same value at a position, whatever item is there: {names_of(encode)}"
        hint = "train without them: they are not known before ranking"
        yield Pitfall("features that encode position", what, hint, tuple(encode))
    if follow:
        many = f"{len(follow)} features have a rank correlation above {OWN_SCORE} with position within requests"
        what = f"{many}: {names_of(follow)}"
        hint = "train without features made after ranking; the logging ranker's score makes examination unidentified"
        yield Pitfall("features that order as positions do", what, hint, tuple(follow))


def _orders_as_positions(log: Log, values: np.ndarray) -> bool:
    """Return whether Spearman's correlation of a feature with position within requests is above `OWN_SCORE`.

    It is a mean over requests, and must exceed the threshold by two standard errors. So more requests make the decision
    surer, and do not change the threshold.
    """
    if len(log) < FEATURE_REQUESTS:
        return False
    request, starts = log.request_of_row, log.offsets[:-1]
    x = np.nan_to_num(values, nan=-3e38)
    order = np.lexsort((x, request))
    differs = np.flatnonzero(x[order][1:] != x[order][:-1]) + 1
    first = np.union1d(differs, starts)  # the first row of each group of tied rows, in order
    sizes = np.diff(first, append=log.rows)
    ranks = np.empty(log.rows)
    ranks[order] = np.repeat(first + (sizes - 1) / 2, sizes) - starts[request]
    middle = (log.lengths[request] - 1) / 2
    shown = np.arange(log.rows) - starts[request] - middle
    ranks -= middle
    products, squares, shown_squares = (np.add.reduceat(z, starts) for z in (ranks * shown, ranks**2, shown**2))
    correlation = products / np.sqrt(np.maximum(squares * shown_squares, TINY))  # 0 for a feature of the request
    error = correlation.std() / np.sqrt(len(log))
    return bool(abs(correlation.mean()) - 2 * error >= OWN_SCORE)


def _reranked(view: _View) -> Iterable[Pitfall]:
    common = (view.impressions >= SHOWN_MOSTLY * len(view.lengths)).astype(np.int64)
    until = np.cumsum(common)
    first = view.place[view.first]
    last = view.place[view.last]
    gap = view.sums(common) < until[last] - until[first] + common[first]
    share = float(np.average(gap, weights=view.weights))
    if share > GAP_SHARE and len(gap) >= MIN_REQUESTS:
        what = f"{share:.1%} of the requests skip a position that most requests have"
        hint = "log every item that was shown, with its final position after all filters and re-ranking"
        yield Pitfall("positions with gaps", what, hint)
    change, error = view.trend()
    ranks = view.shown[0] in (0, 1) and view.shown[-1] - view.shown[0] + 1 == len(view.shown)
    if ranks and change > max(RISE, SIGMAS * error):
        what = f"the click rate rises by {change:.0%} of its mean from the top of a list to its end"
        hint = "check that position 1 is the top, and that the log has the final positions, after re-ranking"
        yield Pitfall("click rates rise with position", what, hint)


def find_bots(view: _View) -> Iterable[Pitfall]:
    bots = _suspicious(view)
    if bots.any():
        share = view.weights[bots] @ view.clicks_of[bots] / (view.weights @ view.clicks_of)
        many = f"{bots.sum():,} requests have more than {BOT_SHARES[0][1]:.0%} of their items clicked"
        what = f"{many}; they have {share:.1%} of all clicks"
        hint = "leave them out (drop_suspicious), and check that one click is not counted for the whole list"
        yield Pitfall("impossible click rates", what, hint)


def _suspicious(view: _View) -> np.ndarray:
    clicks = view.clicks_of
    return suspicious_of(view.lengths, clicks, view.sums(view.rates), view.weights, float(view.weights @ clicks))


def _dwell_and_clicks(view: _View) -> Iterable[Pitfall]:
    click = next((values for name, values in view.log.actions.items() if name.lower() == "click"), None)
    if click is None:
        return
    for name, values in view.log.actions.items():
        if not (is_time(name) or ((values != 0) & (values != 1)).any()):
            continue
        some, clicks, alone = (int(x.sum()) for x in (values > 0, click > 0, (values > 0) & (click <= 0)))
        if alone > UNCLICKED_SHARE * some:
            what = f"{alone / some:.1%} of the {some:,} rows with '{name}' above 0 have no click"
            hint = f"check how clicks and '{name}' were joined; if both can occur alone, use one of them in the label"
            yield Pitfall(f"{name} without click", what, hint)
        if some == alone and clicks >= MIN_CLICKS:
            hint = f"check how clicks and '{name}' were joined, or use a label without '{name}'"
            yield Pitfall(f"clicks without {name}", f"'{name}' is 0 in all {clicks:,} clicked rows", hint)


def _items_twice(view: _View) -> Iterable[Pitfall]:
    if view.log.item_ids is None:
        return
    part = sample_log(view.log.without_features(), ITEM_ROWS)
    try:
        codes = part.item_ids.dictionary_encode().indices.fill_null(-1).to_numpy(zero_copy_only=False)
    except (NotImplementedError, ValueError):  # Arrow cannot compare ids of this type
        return
    has_id, values = codes >= 0, int(codes.max()) + 2
    keys = np.sort(part.request_of_row[has_id] * values + codes[has_id])
    twice = np.bincount(keys[1:][np.diff(keys) == 0] // values, minlength=len(part)) > 0
    share = float(np.average(twice, weights=part.weights))
    if share > TWICE_SHARE:
        what = f"{share:.1%} of the requests show the same item at two or more positions"
        hint = "check that a request id is not used again for a later page or visit, and that rows are not repeated"
        yield Pitfall("items twice in a request", what, hint)


def names_of(values: list[str] | np.ndarray) -> str:
    return ", ".join(str(value) for value in values[:NAMED]) + (", ..." if len(values) > NAMED else "")


Check = Callable[[_View], Iterable[Pitfall]]
CHECKS: tuple[Check, ...] = (
    *(_one_place, _clickless_dropped, _row_order, _encoded_positions, _reranked),
    *(find_bots, _dwell_and_clicks, _items_twice),
)
TRAINING_CHECKS: tuple[Check, ...] = (_encoded_positions, find_bots, _items_twice)  # what `ultr train` warns of


def find_pitfalls(
    log: Log, clicked: np.ndarray, *, sample: Log | None = None, checks: Iterable[Check] = CHECKS
) -> list[Pitfall]:
    """Return the problems of a log; `clicked` marks rows with a label above 0; `sample` has requests with features."""
    view = _view(log, clicked, sample)
    return [] if view is None else [pitfall for check in checks for pitfall in check(view)]


def suspicious_requests(log: Log, clicked: np.ndarray) -> np.ndarray:
    """Return the mask [requests] of requests with impossible click rates, such as those of bots.

    `clicked` marks rows with a label above 0. No request is marked if `find_pitfalls` does not warn of them.
    """
    view = _view(log, clicked, None)
    return np.zeros(0, bool) if view is None else _suspicious(view)


def _view(log: Log, clicked: np.ndarray, sample: Log | None) -> _View | None:
    """Return what checks share; None for a log without requests."""
    if log.positions is None:
        raise DataError("the log has no positions", hint="name their column with --position")
    if np.shape(clicked) != (log.rows,):
        raise DataError(f"'clicked' must have {log.rows} values, one per row", got=f"shape {list(np.shape(clicked))}")
    return _View(log, log.positions, clicked, sample) if len(log) else None
