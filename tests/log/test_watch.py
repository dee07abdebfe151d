"""Watch times that were cut, and their quantiles: against other estimators, integrals and closed forms."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, optimize, stats

from ultr.errors import DataError
from ultr.log import Log
from ultr.log.watch import GROUPS, LEAST, WatchGroup, WatchModel, distribution, fit_log_normal


def watch_log(times, **extra) -> Log:
    rows = len(times)
    return Log(
        features=np.zeros((rows, 1), np.float32),
        offsets=np.arange(rows + 1),
        request_ids=pa.array(np.arange(rows)),
        feature_names=("f",),
        positions=np.ones(rows, np.int64),
        actions={"watch": np.asarray(times, np.float64)},
        extra={name: np.asarray(values, np.float64) for name, values in extra.items()},
    )


def drawn(seed: int, rows: int = 4000, deviation: float = 0.8):
    """Return wanted times, durations, and ends of sessions; all are independent given the duration."""
    rng = np.random.default_rng(seed)
    duration = np.exp(rng.uniform(np.log(10), np.log(300), rows))
    wanted = 5 * np.sqrt(duration) * np.exp(deviation * rng.normal(size=rows))
    return wanted, duration, rng.exponential(60, rows)


def cut_log(seed: int, rows: int = 4000) -> tuple[Log, np.ndarray]:
    wanted, duration, session = drawn(seed, rows)
    uncut = np.minimum(wanted, duration)
    return watch_log(np.minimum(uncut, session), duration=duration, cut=session < uncut), uncut


def test_without_cuts_the_estimates_are_mean_and_deviation():
    logs = np.random.default_rng(0).normal(2, 0.7, 500)
    mean, deviation, (var, cov, var_log) = fit_log_normal(logs, np.zeros(500, bool))
    assert mean == pytest.approx(logs.mean())
    assert deviation == pytest.approx(logs.std())
    assert (var, cov, var_log) == pytest.approx((logs.var() / 500, 0, 1 / 1000), abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_with_cuts_another_optimizer_finds_the_same_maximum(seed):
    rng = np.random.default_rng(seed)
    wanted, limit = rng.normal(1, 0.8, 300), rng.normal(1.2, 0.5, 300)
    logs, cut = np.minimum(wanted, limit), limit < wanted
    mean, deviation, _ = fit_log_normal(logs, cut)

    def loss(parameters):
        m, s = parameters[0], np.exp(parameters[1])
        return -stats.norm.logpdf(logs[~cut], m, s).sum() - stats.norm.logsf(logs[cut], m, s).sum()

    best = optimize.minimize(loss, [0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-7, "fatol": 1e-9})
    assert (mean, np.log(deviation)) == pytest.approx(tuple(best.x), abs=1e-4)


def test_the_covariance_is_the_inverse_of_the_numerical_information():
    rng = np.random.default_rng(5)
    wanted, limit = rng.normal(1, 0.8, 300), rng.normal(1.2, 0.5, 300)
    logs, cut = np.minimum(wanted, limit), limit < wanted
    mean, deviation, (var, cov, var_log) = fit_log_normal(logs, cut)

    def loss(m, log_s):
        s = np.exp(log_s)
        return -stats.norm.logpdf(logs[~cut], m, s).sum() - stats.norm.logsf(logs[cut], m, s).sum()

    at, h = np.array([mean, np.log(deviation)]), 1e-4
    step = np.eye(2) * h
    second = [
        [
            (loss(*(at + a + b)) - loss(*(at + a - b)) - loss(*(at - a + b)) + loss(*(at - a - b))) / (4 * h * h)
            for b in step
        ]
        for a in step
    ]
    np.testing.assert_allclose(np.linalg.inv(second), [[var, cov], [cov, var_log]], rtol=1e-3)


@pytest.mark.parametrize(("cut", "end"), [(1.0, np.inf), (30.0, np.inf), (5.0, 20.0), (19.0, 20.0), (500.0, np.inf)])
def test_a_cut_watch_is_continued_by_the_integral_of_what_is_left(cut, end):
    group = WatchGroup(2.0, 0.9, (0.0, 0.0, 0.0), (1.0,), (0.5,))
    law = stats.lognorm(0.9, scale=np.exp(2.0))
    rest = integrate.quad(law.sf, cut, end, epsabs=1e-14)[0] / law.sf(cut)  # E[min(T, end) - cut | T > cut]
    assert group.beyond(np.array([cut]), end)[0] == pytest.approx(cut + rest, rel=1e-5)


@given(st.floats(-5, 8), st.floats(0.05, 3), st.floats(1e-3, 1e5), st.floats(1, 100))
def test_a_continued_watch_is_longer_and_ends_with_the_item(mean, deviation, cut, times):
    group = WatchGroup(mean, deviation, (0.0, 0.0, 0.0), (1.0,), (0.5,))
    endless, ended = (float(group.beyond(np.array([cut]), end)[0]) for end in (np.inf, cut * times))
    assert np.isfinite(endless)
    assert endless >= cut
    assert cut <= ended <= cut * times
    assert ended <= endless * (1 + 1e-6)


def test_the_distribution_is_that_of_kaplan_and_meier():
    """Five watches: at 1, 2 (cut), 3, 3 (cut), 5. S = 4/5 after 1, 4/5 · 2/3 after 3, and 0 after 5."""
    times, levels = distribution(np.array([1.0, 2, 3, 3, 5]), np.array([0, 1, 0, 1, 0], bool))
    after = [1 - 4 / 5, 1 - 4 / 5 * 2 / 3, 1.0]
    assert times.tolist() == [1, 3, 5]
    assert levels.tolist() == pytest.approx([after[0] / 2, (after[0] + after[1]) / 2, (after[1] + after[2]) / 2])


def test_the_estimates_are_right_where_watches_are_cut():
    log, uncut = cut_log(1)
    model = WatchModel("watch", "duration", "cut").fit(log)
    assert model.ends
    assert len(model.groups) == GROUPS
    wanted, duration, _ = drawn(1)
    group = np.searchsorted(model.limits, duration)
    inside = []
    for g, each in enumerate(model.groups):
        truth = (5 * np.sqrt(duration[group == g])).mean() * np.exp(0.8**2 / 2)
        value, low, high = each.expected
        assert value == pytest.approx(truth, rel=0.3)
        inside.append(low <= truth <= high)
    assert sum(inside) >= 8  # of ten intervals of 95%
    assert log.actions["watch"].mean() < 0.8 * uncut.mean()
    assert model(log).actions["watch"].mean() == pytest.approx(uncut.mean(), rel=0.03)
    capped = WatchModel("watch", "duration", "cut", capped=True).fit(log)
    assert capped(log).actions["watch"].mean() == pytest.approx(wanted.mean(), rel=0.08)


def test_watches_that_were_not_cut_keep_their_times():
    log, _ = cut_log(2)
    changed = WatchModel("watch", "duration", "cut").fit(log)(log).actions["watch"]
    cut = log.extra["cut"] > 0
    np.testing.assert_array_equal(changed[~cut], log.actions["watch"][~cut].astype(np.float32))
    assert (changed[cut] >= log.actions["watch"][cut].astype(np.float32)).all()
    nothing = WatchModel("watch", "duration", "cut").fit(
        watch_log([*range(1, 60), 0], duration=[99] * 60, cut=[0] * 60)
    )
    again = nothing(watch_log([0.0, 5.0], duration=[99, 99], cut=[0, 0])).actions["watch"]
    assert again.tolist() == [0, 5]


@pytest.mark.parametrize("censored", [None, "cut"])
def test_quantiles_have_the_mean_one_half_for_every_duration(censored):
    log, _ = cut_log(3)
    model = WatchModel("watch", "duration", censored, quantiles=True).fit(log)
    values = model(log).actions["watch"]
    group = np.searchsorted(model.limits, log.extra["duration"])
    assert (values > 0).all()
    assert (values <= 1).all()
    for g in range(GROUPS):
        assert values[group == g].mean() == pytest.approx(0.5, abs=0.02)
    assert abs(np.corrcoef(values, np.log(log.extra["duration"]))[0, 1]) < 0.05
    assert np.corrcoef(log.actions["watch"], np.log(log.extra["duration"]))[0, 1] > 0.2


def test_quantiles_with_cuts_are_those_of_watches_that_were_not_cut():
    """Where sessions end, long watches are rare among the logged ones; the quantile of a time must not rise by that."""
    log, uncut = cut_log(4, rows=8000)
    _, duration, _ = drawn(4, 8000)
    truth = WatchModel("watch", "duration", quantiles=True).fit(watch_log(uncut, duration=duration))
    corrected = WatchModel("watch", "duration", "cut", quantiles=True).fit(log)
    naive = WatchModel("watch", "duration", quantiles=True).fit(log)
    times = np.linspace(5, 60, 20)
    errors = [
        np.mean([np.abs(a.quantile(times) - b.quantile(times)) for a, b in zip(m.groups, truth.groups, strict=True)])
        for m in (corrected, naive)
    ]
    assert errors[0] < 0.03 < 2 * errors[0] + 0.03 < errors[1]


@given(st.integers(0, 1000), st.lists(st.floats(1e-3, 1e4), min_size=2, max_size=20))
def test_a_longer_watch_never_has_a_lower_quantile(seed, times):
    rng = np.random.default_rng(seed)
    known = np.round(rng.lognormal(3, 1, 80), 1) + 0.1
    model = WatchModel("watch", "duration", "cut", quantiles=True)
    model = model.fit(watch_log(known, duration=known * rng.uniform(1, 3, 80), cut=rng.random(80) < 0.3))
    levels = model(watch_log(np.sort(times), duration=np.full(len(times), 20.0), cut=np.zeros(len(times))))
    assert (np.diff(levels.actions["watch"]) >= 0).all()


def test_items_that_are_repeated_do_not_end_at_their_duration():
    rng = np.random.default_rng(0)
    log = watch_log(rng.lognormal(3, 1, 500), duration=np.full(500, 10.0))
    assert not WatchModel("watch", "duration", quantiles=True).fit(log).ends
    with pytest.raises(DataError, match="longer than the duration"):
        WatchModel("watch", "duration", capped=True).fit(log)


def test_a_small_group_has_the_estimates_of_all():
    times = np.random.default_rng(0).lognormal(3, 1, LEAST)
    model = WatchModel("watch", "duration", quantiles=True)
    model = model.fit(watch_log(times, duration=times * np.linspace(2, 9, LEAST)))
    assert len(set(model.groups)) == 1


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"cut": np.zeros(60)}, "no column 'duration'"),
        ({"cut": np.full(60, 2.0), "duration": np.full(60, 99.0)}, "must be 1 for a watch"),
        ({"cut": np.zeros(60), "duration": np.full(60, np.nan)}, "positive number"),
        ({"cut": np.ones(60), "duration": np.full(60, 99.0)}, "too few watches"),
    ],
)
def test_columns_that_cannot_be_used_are_errors(extra, said):
    with pytest.raises(DataError, match=said):
        WatchModel("watch", "duration", "cut").fit(watch_log(np.arange(1, 61), **extra))


def test_an_unknown_action_is_an_error():
    with pytest.raises(DataError, match="no action 'watched'"):
        WatchModel("watched", "duration", "cut").fit(watch_log([1.0], duration=[2], cut=[0]))


@pytest.mark.parametrize(
    ("times", "levels"), [((), ()), ((1.0, 1.0), (0.1, 0.2)), ((1.0, 2.0), (0.2, 0.1)), ((1.0,), ())]
)
def test_a_damaged_group_is_rejected(times, levels):
    with pytest.raises(ValueError, match="times"):
        WatchGroup(0.0, 1.0, (0.0, 0.0, 0.0), times, levels)
