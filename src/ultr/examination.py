"""Examination by position from a log alone.

Clicks fall with position because lower items are seen less, and because the ranker that logged them put worse items
there. Items that this ranker thought alike tell the two apart: where it put them apart, only examination differs. So

1. its score is recovered from the order it showed, by a Plackett-Luce model of the features, linear or a network;
2. items are put into strata by that score and by its mean over their list (which decides how high an item stands);
3. in P(c>0) = θ_k β_s, β is free in each stratum s, and EM gives θ.

What is kept is a table of strata by positions, whatever the size of the log. Items that recur can be their own strata.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyarrow import csv
from torch import Tensor

from ultr.bias import sums_by_cell
from ultr.errors import DataError
from ultr.files import content_kind, existing_file
from ultr.labels import Label
from ultr.lists import ListBatches, Lists
from ultr.log import Log
from ultr.log.build import as_data_error
from ultr.rankers import FeatureEncoder, LinearRanker, make_ranker, score_rows
from ultr.simulate import User

SCORED_ROWS = 20_000  # at least, and thirty a feature, that the logging score is learned from
STRATA = 20  # along each of the two axes, where there are clicks enough
CLICKS_IN_STRATUM = 25
HELD_OUT = 1000  # requests, at most, by which a network is judged beside a linear score
FEW_REQUESTS = 500  # too few to learn a network from
MUCH_OPEN = 0.2  # of the order of items, in nats, of what is open without any score
CLEARLY_MORE = 0.02  # of the same, that a network must explain beyond a linear score
NETWORK = {"hidden": (128, 64), "dropout": 0.1}
NETWORK_RATE, NETWORK_STEPS, NETWORK_LOOKS, NETWORK_PATIENCE = 3e-3, 1000, 50, 3
SETTLED = 1e-6  # the largest relative change of θ in an iteration that is no more worth making
RAREST = 1e-6  # of examination that is known: weights are its inverse
LEAST = 1e-3  # rarer examination cannot be told from none
MOST_POSITIONS = 5_000  # different ones: what is known of pairs of them grows with their square
START = 0.7  # of θ where it is largest: leaves room on either side, as clicks do not tell the scale


@dataclass(frozen=True, eq=False)
class Examination:
    """θ_k = P(c>0 | relevant, k) and ζ_k = P(c>0 | irrelevant, k) by position id, and what they were estimated from."""

    positions: tuple[int, ...]
    theta: Tensor
    zeta: Tensor
    impressions: Tensor
    clicks: Tensor  # positive labels
    moved: float  # the largest relative change of θ in EM's last iteration
    strata: int


@dataclass(frozen=True, eq=False)
class LoggingScore:
    """A score of each row under which the order of positions is most likely."""

    score: np.ndarray
    explained: float  # share of the order of held-out requests, in nats: 0 by chance, 1 by a ranker known exactly


@dataclass(frozen=True, eq=False)
class Fit:
    """θ and ζ by position, β by stratum, the iterations made and the largest relative change of θ in the last."""

    theta: Tensor
    zeta: Tensor
    beta: Tensor
    iterations: int
    moved: float


_KEPT: MutableMapping[Log, dict[Any, LoggingScore]] = WeakKeyDictionary()


def estimate_examination(
    log: Log,
    label: Label,
    *,
    user: User | None = None,
    sessions: int = 0,
    seed: int = 0,
    trust: bool = False,
    by_item: bool = False,
    categories: Mapping[int, int] | None = None,
) -> Examination:
    """Examination by position from what was shown and clicked in a log.

    With a `user`, so many `sessions` are drawn in place of the log's feedback. `by_item` takes item ids as strata.
    """
    if log.positions is None:
        raise DataError("examination is by position, and the log has none", mend="name it with --position")
    ids, place = np.unique(log.positions, return_inverse=True)
    positions = torch.from_numpy(place)
    shown_rows = torch.from_numpy(
        np.ones(log.rows) if log.weights is None else np.repeat(log.weights, log.lengths).astype(np.float64)
    )
    if user is None:
        clicked_rows = shown_rows * torch.from_numpy(np.asarray(label(log.actions)) > 0)
    else:
        passes = max(1, -(-sessions // len(log)))
        clicked_rows = shown_rows * _drawn_clicks(log, label, user, passes, seed)
        shown_rows = shown_rows * passes
    if by_item:
        strata = _items(log)
    else:
        strata = strata_by_logging_score(log, clicks=float(clicked_rows.sum()), seed=seed, categories=categories)
    size = int(strata.max()) + 1, len(ids)
    cells = strata * size[1] + positions
    shown, clicked = (sums_by_cell(rows, cells, size[0] * size[1]).view(size) for rows in (shown_rows, clicked_rows))
    fit = fit_table(shown, clicked, trust=trust)
    counts = shown.sum(0).float(), clicked.sum(0).float()
    return Examination(tuple(ids.tolist()), fit.theta.float(), fit.zeta.float(), *counts, fit.moved, size[0])


def check_positions(count: int, most: int = MOST_POSITIONS) -> None:
    """Refuse more different positions than can be told from one another in reasonable time and memory."""
    if count > most:
        mend = "give items that stand far down one position, such as 100"
        raise DataError(f"bias is learned of up to {most:,} positions", got=f"{count:,} in 'position'", mend=mend)


def read_propensities(path: str | Path) -> dict[str, float]:
    """Known examination, from a CSV or Parquet table with the columns `position`, `propensity` and, where it differs by
    segment, `segment`: by position (`3`), or by position and segment (`3@phone`).
    """
    path = existing_file(path)
    with as_data_error(path, "a table"):
        table = pq.read_table(path) if content_kind(path) == "Parquet" else csv.read_csv(path)
        columns = table.column_names
    if columns not in (["position", "propensity"], ["position", "propensity", "segment"]):
        got = ", ".join(columns[:5])
        what = "propensities have the columns position, propensity and perhaps segment"
        raise DataError(what, where=path, got=got, mend="name them so, in this order")
    try:
        positions = table["position"].cast(pa.int64()).to_pylist()
        values = table["propensity"].cast(pa.float64()).to_pylist()
        names = table["segment"].cast(pa.string()).to_pylist() if "segment" in columns else ()
    except (pa.ArrowException, UnicodeDecodeError) as error:
        brief = " ".join(str(error).split())[:200]
        what = f"propensities should be numbers by whole positions ({brief})"
        raise DataError(what, where=path, mend="mend or drop such rows") from error
    for position, value in zip(positions, values, strict=True):
        if position is None or value is None or not RAREST <= value <= 1:
            got = f"{value} at position {position}"
            what, mend = f"a propensity should be from {RAREST:g} to at most 1", "mend, clip or drop the row"
            raise DataError(what, where=path, got=got, mend=mend)
    keys = [str(position) for position in positions]
    if names:
        keys = [f"{key}@{name}" if name else key for key, name in zip(keys, names, strict=True)]
    if len(set(keys)) < len(keys):
        raise DataError("each position should be there once, or once a segment", where=path, mend="drop repeated rows")
    return dict(zip(keys, values, strict=True))


def _drawn_clicks(log: Log, label: Label, user: User, passes: int, seed: int) -> Tensor:
    """How often each row has a positive label in so many passes of the users over the log."""
    generator = torch.Generator().manual_seed(seed)
    lists = Lists.from_log(log.without_features())
    total = torch.zeros(lists.where.shape, dtype=torch.float64)
    for _ in range(passes):
        feedback = user.sample(lists.true_relevance, lists.shown_positions, generator, where=lists.where, check=False)
        total += label(feedback.actions, check=False) > 0
    return total[lists.where]


def _items(log: Log) -> Tensor:
    if log.item_ids is None:
        raise DataError("strata by item need item ids", mend="call their column item")
    return torch.from_numpy(np.unique(np.asarray(log.item_ids), return_inverse=True)[1])


def strata_by_logging_score(
    log: Log, *, clicks: float, seed: int = 0, categories: Mapping[int, int] | None = None
) -> Tensor:
    """The stratum of each row: the quantile of its logging score, by that of the mean score of its list."""
    return strata_of(log, logging_score(log, seed=seed, categories=categories).score, clicks=clicks)


def strata_of(log: Log, score: np.ndarray, *, clicks: float) -> Tensor:
    """As many strata as there are clicks for, by the quantiles of a score and of its mean over each list."""
    request = np.repeat(np.arange(len(log)), log.lengths)
    mean = (np.bincount(request, score) / np.maximum(1, log.lengths))[request]
    along = int(np.clip(np.sqrt(clicks / CLICKS_IN_STRATUM), 1, STRATA))
    codes = np.zeros(log.rows, np.int64)
    for values in (score, mean):
        edges = np.quantile(values, np.linspace(0, 1, along + 1)[1:-1])
        codes = codes * along + np.searchsorted(edges, values)
    return torch.from_numpy(codes)


def logging_score(log: Log, *, seed: int = 0, categories: Mapping[int, int] | None = None) -> LoggingScore:
    """`recovered_score`, which is kept as long as the log is: several parts of a run ask for it."""
    kept = _KEPT.setdefault(log, {})
    asked = seed, tuple(sorted((categories or {}).items()))
    if asked not in kept:
        kept[asked] = recovered_score(log, seed=seed, categories=categories)
    return kept[asked]


def recovered_score(log: Log, *, seed: int = 0, categories: Mapping[int, int] | None = None) -> LoggingScore:
    """Recovers the logging ranker from the order it showed (Plackett-Luce).

    It is linear in the features, unless that leaves much of the order of held-out requests open and a network explains
    more of it. It is learned from random requests if the log is large.
    """
    torch.manual_seed(seed)
    order = np.random.default_rng(seed).permutation(len(log))
    enough = np.searchsorted(np.cumsum(log.lengths[order]), max(SCORED_ROWS, 30 * len(log.feature_names)))
    held = order[len(order) - min(HELD_OUT, len(order) // 5) :]
    learned = order[: len(order) - len(held)]
    chosen = order[: int(enough) + 1]
    ranker: torch.nn.Module = _linear_score(log, chosen, categories)
    if not len(held):
        return LoggingScore(score_rows(ranker, log.features), 0.0)
    judged = _by_position(Lists.from_log(log.select(np.sort(held))))
    rival = ranker if len(chosen) <= len(learned) else _linear_score(log, learned, categories)
    nothing = max(1e-9, float(_order_loss(torch.zeros(judged[1].shape), judged[1])))
    left = _left_open(rival, judged)
    if len(learned) > FEW_REQUESTS and left > MUCH_OPEN * nothing:
        network, open_still = _network_score(log, learned, judged, categories, seed)
        if open_still < left - CLEARLY_MORE * nothing:
            ranker, left = network, open_still
    return LoggingScore(score_rows(ranker, log.features), 1 - left / nothing)


def _linear_score(log: Log, requests: np.ndarray, categories: Mapping[int, int] | None) -> LinearRanker:
    ranker = LinearRanker(FeatureEncoder(len(log.feature_names), categories))
    ranker.encoder.fit(log.features)
    torch.nn.init.zeros_(ranker.output.weight)  # what no list varies in should stay without weight
    features, where = _by_position(Lists.from_log(log.select(np.sort(requests))))
    optimizer = torch.optim.LBFGS(ranker.parameters(), max_iter=100, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = _order_loss(ranker(features), where) + 1e-4 * ranker.output.weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return ranker


def _network_score(
    log: Log,
    requests: np.ndarray,
    judged: tuple[Tensor, Tensor],
    categories: Mapping[int, int] | None,
    seed: int,
) -> tuple[torch.nn.Module, float]:
    """A small network as it was where it explained the order of held-out requests best, and what it left open."""
    network = make_ranker("mlp", FeatureEncoder(len(log.feature_names), categories), **NETWORK)
    for module in network.modules():
        if isinstance(module, FeatureEncoder):
            module.fit(log.features)
    lists, rng = ListBatches(log), np.random.default_rng(seed)
    optimizer = torch.optim.Adam(network.parameters(), lr=NETWORK_RATE)
    best, weights, waited = np.inf, network.state_dict(), 0
    for step in range(1, NETWORK_STEPS + 1):
        network.train()
        batch = torch.from_numpy(rng.choice(requests, min(256, len(requests)), replace=False))
        features, where = _by_position(lists[batch])
        optimizer.zero_grad()
        _order_loss(network(features), where).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % NETWORK_LOOKS == 0:
            left = _left_open(network.eval(), judged)
            waited += 1
            if left < best:
                best, waited = left, 0
                weights = {name: values.clone() for name, values in network.state_dict().items()}
            if waited == NETWORK_PATIENCE:
                break
    network.load_state_dict(weights)
    return network.eval(), best


def _by_position(lists: Lists) -> tuple[Tensor, Tensor]:
    """The features of lists in the order that was shown, and what of it is no padding."""
    order = torch.where(lists.where, lists.shown_positions, torch.iinfo(torch.int64).max).argsort(dim=-1)
    features = lists.features.gather(-2, order[..., None].expand_as(lists.features))
    return features, lists.where.gather(-1, order)


def _order_loss(scores: Tensor, where: Tensor) -> Tensor:
    """Minus the log of the Plackett-Luce probability of the order that is given, a row."""
    scores = scores.masked_fill(~where, -1e9)
    below = scores.flip(-1).logcumsumexp(-1).flip(-1)
    return torch.where(where, below - scores, 0.0).sum() / where.sum()


@torch.no_grad()
def _left_open(ranker: torch.nn.Module, judged: tuple[Tensor, Tensor]) -> float:
    features, where = judged
    return float(_order_loss(ranker(features), where))


def fit_table(shown: Tensor, clicked: Tensor, *, trust: bool = False, iterations: int = 6000) -> Fit:
    """Free-parameter EM for P(c>0) = θ_k β_s + ζ_k (1 - β_s) from counts in a table [strata s, positions k]; without
    trust ζ = 0.

    Clicks tell θ up to its scale, and with trust β up to an affine map. By convention the largest θ is 1, and with
    trust the smallest ζ is 0. Positions never shown have θ = 1. Two steps of EM are followed by an extrapolation of
    them (SQUAREM, Varadhan and Roland 2008), which is taken where it does not lower the likelihood.
    """
    return _fit(shown.double().numpy(), clicked.double().numpy(), trust=trust, iterations=iterations)


def _fit(shown: np.ndarray, clicked: np.ndarray, *, trust: bool, iterations: int) -> Fit:
    size = shown.shape
    strata, places = shown.nonzero()
    shown, clicked = shown[strata, places], clicked[strata, places]
    missed = shown - clicked

    def by_place(values: np.ndarray) -> np.ndarray:
        return np.bincount(places, values, size[1])

    def by_stratum(values: np.ndarray) -> np.ndarray:
        return np.bincount(strata, values, size[0])

    shown_at, shown_in = by_place(shown), by_stratum(shown)
    rate = _ratio(by_place(clicked), shown_at)
    theta = np.where(shown_at > 0, START * _ratio(rate, rate.max()), START).clip(LEAST, START)
    zeta = 0.3 * theta if trust else np.zeros_like(theta)
    beta = _ratio(by_stratum(clicked), by_stratum(shown * theta[places])).clip(0.01, 0.99)

    def step(theta: np.ndarray, zeta: np.ndarray, beta: np.ndarray) -> tuple[np.ndarray, ...]:
        clicks, misses = _joint(theta[places], zeta[places], beta[strata])
        yes = clicked * _ratio(clicks[0], clicks[0] + clicks[1])
        relevant = yes + missed * _ratio(misses[0], misses[0] + misses[1])
        after = np.where(shown_at > 0, _ratio(by_place(yes), by_place(relevant)), theta).clip(LEAST, 1)
        if trust:
            zeta = np.where(shown_at > 0, _ratio(by_place(clicked - yes), by_place(shown - relevant)), zeta)
        return after, zeta, np.where(shown_in > 0, _ratio(by_stratum(relevant), shown_in), beta)

    def likelihood(theta: np.ndarray, zeta: np.ndarray, beta: np.ndarray) -> float:
        clicks, misses = (sum(terms) for terms in _joint(theta[places], zeta[places], beta[strata]))
        least = np.finfo(np.float64).tiny
        return float((clicked * np.log(np.maximum(clicks, least)) + missed * np.log(np.maximum(misses, least))).sum())

    moved, made, bounds = np.inf, 0, np.cumsum([len(theta), len(theta)])
    while made < iterations and moved > SETTLED:
        once = step(theta, zeta, beta)
        twice = step(*once)
        point, first, second = (np.concatenate(parameters) for parameters in ((theta, zeta, beta), once, twice))
        change, bend = first - point, second - 2 * first + point
        length = min(max(float(np.linalg.norm(change)) / max(float(np.linalg.norm(bend)), 1e-300), 1.0), 64.0)
        jump = (point + 2 * length * change + length**2 * bend).clip(LEAST if not trust else 1e-6, 1 - 1e-6)
        jumped = np.split(jump, bounds)
        leap = step(jumped[0], jumped[1] if trust else zeta, jumped[2])
        best = leap if likelihood(*leap) >= likelihood(*twice) else twice
        moved = float(np.abs((best[0] / best[0].max()) / (theta / theta.max()) - 1).max())
        (theta, zeta, beta), made = best, made + 3
    theta_, zeta_, beta_, seen = (torch.from_numpy(values) for values in (theta, zeta, beta, shown_at > 0))
    return Fit(*_canonical(theta_, zeta_, beta_, seen), made, moved)


def _joint(theta: np.ndarray, zeta: np.ndarray, beta: np.ndarray) -> tuple[tuple[np.ndarray, ...], ...]:
    """P(c>0, r>0) and P(c>0, r<=0), and the same for c=0: as `bias.relevance_posterior` has them, in NumPy.

    Tables are small, and iterations many: what is computed is little beside what an operation of torch costs.
    """
    return (theta * beta, zeta * (1 - beta)), ((1 - theta) * beta, (1 - zeta) * (1 - beta))


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Of two arrays, and 0 where both vanish."""
    return numerator / np.where(denominator > 0, denominator, 1.0)


def _canonical(theta: Tensor, zeta: Tensor, beta: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The equivalent parameters with the smallest ζ/(θ-ζ) at 0 and the largest θ at 1."""
    if zeta.any() and seen.any():
        # P = a β + ζ = a (β + s) + (ζ - a s): β rises by s, and both ends of the line with it.
        slope = (theta - zeta).clamp(min=1e-9)
        shift = torch.where(seen, zeta / slope, torch.inf).min()
        theta, zeta, beta = theta - slope * shift, (zeta - slope * shift).clamp(min=0), beta + shift
        slope = (theta - zeta).clamp(min=1e-9)
        # P = a β' / b + ζ with β' = b β: the end at β' = 1 is ζ + a / b.
        stretch = torch.where(seen, slope / (1 - zeta).clamp(min=1e-9), 0.0).max()
        theta, beta = zeta + slope / stretch, beta * stretch
    else:
        largest = torch.where(seen, theta, LEAST).max()
        theta, beta = theta / largest, beta * largest
    return torch.where(seen, theta, 1.0).clamp(LEAST, 1), torch.where(seen, zeta, 0.0), beta.clamp(0, 1)
