"""What commonly goes wrong with logs from production, found without true labels; silent where too little tells."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from ultr.errors import DataError
from ultr.log import Log

LEAST_REQUESTS, SIGMAS = 100, 5.0  # for a share to be judged, and what chance does not explain
FAR_BELOW = 0.2  # of the expected share; clickless requests come down to 0.3 where nine users in ten click just once
FLAT, FLAT_SIGMAS, RISE = 0.15, 3.0, 0.3  # change of the click rate over a list, over the rate; real lists lose 1 to 6
SEEN_WHOLE = 4  # items that users may well take in at one glance
GAP_SHARE, SHOWN_MOSTLY = 0.05, 0.5  # requests with a gap; requests that show a position, for its lack to be a gap
RARE_IMPRESSIONS, RARE_CLICKS = 0.001, 100
BOT_LENGTH, BOT_SHARE, BOT_CHANCE = 5, 0.8, 1e-6  # items, share of them clicked, and how improbable that is
BOT_MIDDLE, BOT_BUMP = 0.6, 3  # keen users leave more requests from here to `BOT_SHARE` than above; bots do not
BOT_REQUESTS, BOT_CLICKS = 10, 0.01  # how many, and what share of all clicks, are worth a warning
UNCLICKED_SHARE, TWICE_SHARE = 0.001, 0.01  # of the rows with a dwell time; of the requests, with an item twice
FEATURE_REQUESTS, FEATURE_ROWS, ITEM_ROWS = 50, 50_000, 1_000_000  # needed, and looked at
SAME_VALUE, SAME_RATIO, VARIES = 0.02, 0.1, 0.01  # neighbours that differ: at one position, over those in a list, there
ORDERED_REQUESTS, ORDERED_PAIRS, STRICT_PAIRS = 0.99, 0.95, 0.5  # in the order of positions; without a tie
LARGEST_TABLE, NAMED, TINY = 1 << 20, 10, 1e-12  # position ids looked up as they are; names in a message; near zero


@dataclass(frozen=True)
class Pitfall:
    name: str
    what: str  # with the figures found
    mend: str


class _View:
    """A log and what several checks ask of it. Tables go by place, which is an index into the position ids."""

    def __init__(self, log: Log, positions: np.ndarray, clicked: np.ndarray, sample: Log | None) -> None:
        self.log, self.sample, self.lengths = log, sample, log.lengths
        self.first, self.last = log.offsets[:-1], log.offsets[1:] - 1  # row of each request
        self.weights = np.ones(len(log)) if log.weights is None else log.weights.astype(np.float64)
        self.place, self.ids = positions, np.arange(min(int(positions.max()) + 1, LARGEST_TABLE))
        if positions.max() >= LARGEST_TABLE:
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
        """The sum over the rows of each request of what a table has at their places."""
        return np.asarray(np.add.reduceat(table.astype(np.float32)[self.place], self.first))

    def numbered(self) -> bool:
        """Whether every request has the positions 1 to n, or every one 0 to n - 1."""
        first, last = self.ids[self.place[self.first]], self.ids[self.place[self.last]]
        return first[0] in (0, 1) and bool(((first == first[0]) & (last - first + 1 == self.lengths)).all())

    def trend(self) -> tuple[float, float]:
        """Change of the click rate from top to end of a list, over the rate, and its error: rank sums in requests."""
        n, m, w = self.lengths.astype(np.float64), self.clicks_of, self.weights
        spread, variance = w * n * (n**2 - 1) / 12, float(w**2 @ (m * (n - m) * (n + 1))) / 12
        if not variance:
            return 0.0, np.inf
        scale = (spread @ (n - 1)) / spread.sum() ** 2 / ((w @ m) / (w @ n))
        return float(scale * (w @ (self.rank_sums - m * (n - 1) / 2))), float(scale * np.sqrt(variance))


def _far_below(observed: np.ndarray, expected: np.ndarray, weights: np.ndarray) -> tuple[float, float] | None:
    """The shares of requests that are so and that should be, if the first is far below, and not by chance."""
    if len(weights) < LEAST_REQUESTS:
        return None
    seen, due = (float(np.average(values, weights=weights)) for values in (observed, expected))
    requests = weights.sum() ** 2 / (weights @ weights)  # that would tell as much without weights
    beyond = max(1 - FAR_BELOW, SIGMAS * np.sqrt(max(1 - due, 0.0) / max(due * requests, TINY)))
    return (seen, due) if due - seen > beyond * due else None


def _one_place(view: _View) -> Iterable[Pitfall]:
    if len(view.shown) == 1:
        mend = "nothing can be told of examination: look for the column with the true positions"
        yield Pitfall("one position only", f"every item was shown at position {view.shown[0]}", mend)
    elif (view.lengths == 1).all():
        mend = "nothing can be told of examination: take a request id that all items shown together share"
        yield Pitfall("one item per request", f"all {len(view.lengths):,} requests have one item", mend)


def _clickless_dropped(view: _View) -> Iterable[Pitfall]:
    with np.errstate(divide="ignore"):
        expected = np.exp(view.sums(np.log1p(-view.rates)))
    if shares := _far_below(view.clicks_of == 0, expected, view.weights):
        what = f"{shares[0]:.2%} of the requests have no click, where rates by position would leave {shares[1]:.1%} so"
        mend = "keep every request that was shown, or give those that stand for dropped ones a weight"
        yield Pitfall("clickless requests dropped", what, mend)


def _row_order(view: _View) -> Iterable[Pitfall]:
    n, m = view.lengths, view.clicks_of
    mixed = (m > 0) & (m < n)
    if mixed.sum() < LEAST_REQUESTS or not view.numbered():
        return
    change, error = view.trend()
    if view.log.came_in_order and n.mean() > SEEN_WHOLE and abs(change) <= FLAT_SIGMAS * error <= FLAT:
        what = f"positions number the rows of a request as they came, and clicks do not fall with them ({change:+.1%})"
        mend = "check that the position is where users saw the item, and no number given to rows when the log was made"
        yield Pitfall("position equal to row order", what, mend)
    rates = view.rates[view.place[0] :]
    top, above = np.zeros(len(rates)), np.cumprod(rates)  # P(some are clicked, not all, and they are the topmost)
    for k in range(1, len(rates)):
        top[k] = (top[k - 1] + above[k - 1]) * (1 - rates[k])
    below = 1 - top / np.maximum(1 - above - np.cumprod(1 - rates), np.maximum(top, TINY))
    if shares := _far_below((view.rank_sums != m * (m - 1) // 2)[mixed], below[n - 1][mixed], view.weights[mixed]):
        what = f"{shares[0]:.1%} of requests have a click below an unclicked item, by chance {shares[1]:.1%} would"
        mend = "take positions from before rows were sorted by label, unless it is a feed that users take item by item"
        yield Pitfall("rows sorted by label", what, mend)


def _encoded_positions(view: _View) -> Iterable[Pitfall]:
    if view.sample is None or view.sample.positions is None or len(view.sample) < FEATURE_REQUESTS:
        return
    part = _some_of(view.sample, FEATURE_ROWS)
    positions, starts, pairs = np.asarray(part.positions), part.offsets[:-1], part.lengths - 1
    inside, order = np.ones(part.rows, bool), np.argsort(positions, kind="stable")
    inside[starts] = False
    listed, same = pairs >= 2, np.diff(positions[order]) == 0
    encode, follow = [], []
    for column, name in enumerate(part.feature_names):
        x = np.nan_to_num(part.features[:, column], nan=-3e38)
        above, at_place = np.roll(x, 1), x[order]
        in_list = (x != above)[inside].sum() / max(inside.sum(), 1)
        at_one = (1 + (at_place[1:] != at_place[:-1])[same].sum()) / (1 + same.sum())  # small only where much is seen
        if in_list >= VARIES and at_one <= min(SAME_VALUE, SAME_RATIO * in_list):
            encode.append(name)
        elif name not in part.vocabularies:  # codes are in order of appearance
            up, down = (np.add.reduceat(way & inside, starts, dtype=np.int64) for way in (x > above, x < above))
            right, wrong = (up, down) if up.sum() >= down.sum() else (down, up)
            ordered = (right >= STRICT_PAIRS * pairs) & (wrong <= (1 - ORDERED_PAIRS) * pairs)
            if ordered[listed].sum() >= max(FEATURE_REQUESTS, ORDERED_REQUESTS * listed.sum()):
                follow.append(name)
    if encode:
        what = f"{len(encode)} of the features have one value at each position, whatever is shown: {_names(encode)}"
        yield Pitfall("features that encode position", what, "leave them out: they are not known before ranking")
    if follow:
        what = f"{len(follow)} of the features order items as positions do in 99% of the requests: {_names(follow)}"
        mend = "leave out what is made after ranking; from the logging ranker's score, examination cannot be told apart"
        yield Pitfall("features that order as positions do", what, mend)


def _reranked(view: _View) -> Iterable[Pitfall]:
    common = (view.impressions >= SHOWN_MOSTLY * len(view.lengths)).astype(np.int64)
    until, first, last = np.cumsum(common), view.place[view.first], view.place[view.last]
    gap = view.sums(common) < until[last] - until[first] + common[first]
    share = float(np.average(gap, weights=view.weights))
    if share > GAP_SHARE and len(gap) >= LEAST_REQUESTS:
        what = f"{share:.1%} of the requests lack a position, between those they have, that most requests show"
        mend = "log every item that was shown, at the position it was shown at, after all filters and re-ranking"
        yield Pitfall("positions with gaps", what, mend)
    change, error = view.trend()
    ranks = view.shown[0] in (0, 1) and view.shown[-1] - view.shown[0] + 1 == len(view.shown)
    if ranks and change > max(RISE, SIGMAS * error):
        what = f"the click rate rises by {change:.0%} of its mean from the top of a list to its end"
        mend = "check that 1 is the top, and that positions are those users saw and not of a stage before re-ranking"
        yield Pitfall("click rates rise with position", what, mend)


def _rarely_seen(view: _View) -> Iterable[Pitfall]:
    rare = (view.impressions < RARE_IMPRESSIONS * view.log.rows) | (view.clicks < RARE_CLICKS)
    if len(found := view.ids[rare & (view.impressions > 0)]):
        what = f"{len(found)} of {len(view.shown)} positions have under 0.1% of rows or 100 clicks: {_names(found)}"
        mend = "examination there is a guess: bring more requests, or cut lists above them"
        yield Pitfall("positions nearly never seen", what, mend)


def _bots(view: _View) -> Iterable[Pitfall]:
    n, m, w = view.lengths, view.clicks_of, view.weights
    middle = int(((n >= BOT_LENGTH) & (m > BOT_MIDDLE * n) & (m <= BOT_SHARE * n)).sum())
    keen = np.flatnonzero((n >= BOT_LENGTH) & (m > BOT_SHARE * n))
    a, p = m[keen] / n[keen], np.clip(view.sums(view.rates)[keen] / n[keen], TINY, 1 - TINY)
    # Chernoff's bound, which holds for clicks of unequal rates (Hoeffding 1956): P(m or more) <= exp(-n KL(a, p)).
    kl = a * np.log(a / p) + (1 - a) * np.log(np.maximum(1 - a, TINY) / (1 - p))
    bots = keen[(a > p) & (n[keen] * kl > -np.log(BOT_CHANCE))]
    share = w[bots] @ m[bots] / max(w @ m, TINY)
    if len(bots) >= max(BOT_REQUESTS, BOT_BUMP * middle) and share > BOT_CLICKS:
        what = f"{len(bots):,} requests have over {BOT_SHARE:.0%} of their items clicked and {share:.1%} of all clicks"
        mend = "drop requests of bots and tests, and check that clicks are not counted for whole lists"
        yield Pitfall("impossible click rates", what, mend)


def _dwell_and_clicks(view: _View) -> Iterable[Pitfall]:
    click = next((values for name, values in view.log.actions.items() if name.lower() == "click"), None)
    if click is None:
        return
    for name, values in view.log.actions.items():
        timed = "dwell" in name.lower() or "watch" in name.lower()
        if not (timed or ((values != 0) & (values != 1)).any()):
            continue
        some, clicks, alone = (int(x.sum()) for x in (values > 0, click > 0, (values > 0) & (click <= 0)))
        if alone > UNCLICKED_SHARE * some:
            what = f"{alone / some:.1%} of the {some:,} rows with '{name}' above 0 have no click"
            mend = "check how the two were joined; if one can be without the other, make the label of one alone"
            yield Pitfall(f"{name} without click", what, mend)
        if some == alone and clicks >= RARE_CLICKS:
            mend = "check how it was joined to clicks, or leave it out of the label"
            yield Pitfall(f"clicks without {name}", f"'{name}' is 0 in all {clicks:,} clicked rows", mend)


def _items_twice(view: _View) -> Iterable[Pitfall]:
    if view.log.item_ids is None:
        return
    part = _some_of(view.log.without_features(), ITEM_ROWS)
    try:
        codes = part.item_ids.dictionary_encode().indices.fill_null(-1).to_numpy(zero_copy_only=False)
    except (NotImplementedError, ValueError):  # ids of a kind that Arrow does not compare
        return
    known, values = codes >= 0, int(codes.max()) + 2
    keys = np.sort(part.request_of_row[known] * values + codes[known])
    twice = np.bincount(keys[1:][np.diff(keys) == 0] // values, minlength=len(part)) > 0
    share = float(np.average(twice, weights=part.weights))
    if share > TWICE_SHARE:
        what = f"{share:.1%} of the requests show an item at two positions or more"
        mend = "check that a request id is not used again for a later page or visit, and that rows are not repeated"
        yield Pitfall("items twice in a request", what, mend)


def _some_of(log: Log, rows: int) -> Log:
    """Requests drawn at random, of at most so many rows together (one at least)."""
    order = np.random.default_rng(0).permutation(len(log))
    return log.select(order[: max(1, int(np.searchsorted(np.cumsum(log.lengths[order]), rows, "right")))])


def _names(values: list[str] | np.ndarray) -> str:
    return ", ".join(str(value) for value in values[:NAMED]) + (", ..." if len(values) > NAMED else "")


CHECKS: tuple[Callable[[_View], Iterable[Pitfall]], ...] = (
    *(_one_place, _clickless_dropped, _row_order, _encoded_positions, _reranked),
    *(_rarely_seen, _bots, _dwell_and_clicks, _items_twice),
)


def find_pitfalls(log: Log, clicked: np.ndarray, *, sample: Log | None = None) -> list[Pitfall]:
    """What looks wrong with a log; `clicked` marks labels above 0 by row, `sample` is some requests with features."""
    if log.positions is None:
        raise DataError("the log has no positions", mend="name their column with --position")
    if np.shape(clicked) != (log.rows,):
        raise DataError(f"'clicked' should have {log.rows} values", got=list(np.shape(clicked)))
    if not len(log):
        return []
    view = _View(log, log.positions, clicked, sample)
    return [pitfall for check in CHECKS for pitfall in check(view)]
