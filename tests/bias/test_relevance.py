"""Relevance from feedback: the posterior against integrals, coverage of intervals, cut points, and evidence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special, stats

import ultr
from bias.judged import SHOWN, JudgedWorld, judged_world
from ultr.bias.counts import Counts, count_cells
from ultr.bias.examination import Examination
from ultr.bias.relevance import (
    Pairs,
    Prediction,
    attraction,
    checked_cuts,
    default_cuts,
    fit_prediction,
    inverse_trigamma,
    judge,
    pairs_of_log,
)
from ultr.errors import DataError, OptionError

KNOWN = {k: k**-0.8 for k in range(1, SHOWN + 1)}


@pytest.fixture(scope="module")
def world() -> JudgedWorld:
    return judged_world(0)


@pytest.fixture(scope="module")
def pairs(world) -> Pairs:
    return pairs_of_log(world.log, "click")


def test_pairs_have_the_counts_of_the_rows(world, pairs):
    table = world.log.to_table().to_pandas()
    groups = table.groupby(["query", "item"], sort=False)
    index = list(zip(pairs.queries.to_pylist(), pairs.items.to_pylist(), strict=True))
    assert len(set(index)) == len(pairs) == groups.ngroups
    np.testing.assert_array_equal(pairs.impressions, groups.size().loc[index])
    np.testing.assert_array_equal(pairs.clicks, groups["click"].sum().loc[index])
    np.testing.assert_allclose(pairs.mean_rank, groups["position"].mean().loc[index])
    assert (np.diff(pairs.query) >= 0).all()
    theta = np.array([*KNOWN.values()])
    shown = table.assign(theta=theta[table["position"] - 1]).groupby(["query", "item"])["theta"].sum()
    np.testing.assert_allclose(pairs.examined(theta), shown.loc[index])


@given(st.integers(0, 5), st.floats(0.1, 50), st.floats(0.3, 5), st.floats(0.05, 1), st.floats(-4, 0))
@settings(max_examples=25, deadline=None)
def test_the_posterior_is_that_of_an_integral(clicks, examined, shape, spread, log_mean):
    """The pair is alone in its query. The integrals are over log u and log t on a grid."""
    found = attraction(
        np.array([float(clicks)]),
        np.array([examined]),
        np.array([log_mean]),
        np.array([0]),
        Prediction(np.zeros(1), shape, spread),
    )
    z = np.linspace(-8, 8, 401)[:, None]
    log_t = np.linspace(-60 / shape, 5, 4001)[None]
    log_rate = log_mean + spread * z + log_t
    log_weight = stats.norm.logpdf(z) + shape * log_t - shape * np.exp(log_t)
    log_weight = log_weight + clicks * log_rate - examined * np.exp(log_rate)
    weight = np.exp(log_weight - log_weight.max())
    mean = (weight * log_rate).sum() / weight.sum()
    assert found.mean[0] == pytest.approx(mean, abs=0.02)
    assert found.variance[0] == pytest.approx((weight * (log_rate - mean) ** 2).sum() / weight.sum(), rel=0.03)


def test_the_likelihood_of_a_pair_is_negative_binomial():
    """The coefficients and the shape of simulated counts are found again."""
    random = np.random.default_rng(1)
    examined, x = random.uniform(1, 20, 20_000), random.normal(size=(20_000, 1))
    rate = np.exp(-1 + 0.7 * x[:, 0]) * random.gamma(2.0, 1 / 2.0, 20_000)
    clicks = random.poisson(examined * rate).astype(float)
    fit = fit_prediction(clicks, examined, x, np.zeros(20_000, np.int64))
    assert fit.spread == 0
    np.testing.assert_allclose([*fit.coefficients, fit.shape], [-1, 0.7, 2.0], atol=0.06)


def test_the_spread_of_queries_is_fitted():
    random = np.random.default_rng(2)
    query = np.repeat(np.arange(1500), 10)
    rate = np.exp(-1 + 0.8 * random.normal(size=1500))[query] * random.gamma(1.5, 1 / 1.5, 15_000)
    examined = random.uniform(2, 20, 15_000)
    clicks = random.poisson(examined * rate).astype(float)
    fit = fit_prediction(clicks, examined, np.zeros((15_000, 0)), query)
    np.testing.assert_allclose([fit.coefficients[0], fit.shape, fit.spread], [-1, 1.5, 0.8], atol=0.1)


@pytest.mark.parametrize(("weight", "least"), [(1.0, 0.91), (0.2, 0.9)])
def test_intervals_cover_the_truth(weight, least):
    """Examination is known. `benchmarks/judgments.py` has the coverage if it is estimated."""
    covered = []
    for seed in range(3):
        world = judged_world(seed, weight=weight)
        pairs = pairs_of_log(world.log, "click")
        found, truth = judge(pairs, Examination.known(KNOWN), weight=weight), world.truth(pairs)
        covered.append(((found.low <= truth) & (truth <= found.high)).mean())
        assert np.corrcoef(np.log(found.relevance), np.log(truth))[0, 1] > 0.4
    assert least < np.mean(covered) < 0.98


def test_judgments_are_nearer_to_the_truth_than_corrected_click_rates_and_than_production(world, pairs):
    truth = world.truth(pairs)
    found = judge(pairs, Examination.known(KNOWN), weight=1.0)
    rates = pairs.clicks / found.examined
    errors = [((each - truth) ** 2).mean() for each in (found.relevance, rates, found.predicted)]
    assert errors[0] < 0.6 * errors[1]
    assert errors[0] < 0.8 * errors[2]
    assert found.relevance.mean() == pytest.approx(truth.mean(), rel=0.1)


def test_the_error_of_examination_widens_intervals(pairs):
    theta = Examination.known(KNOWN)
    covariance = np.diag([0.0, *np.full(SHOWN - 1, 0.25)])
    sure, unsure = (judge(pairs, each, weight=1.0) for each in (theta, replace(theta, covariance=covariance)))
    wider = np.log(unsure.high / unsure.low) / np.log(sure.high / sure.low)
    assert np.median(wider[pairs.mean_rank > 5]) > 1.01
    assert np.median(wider[pairs.mean_rank < 2]) < np.median(wider[pairs.mean_rank > 5])
    np.testing.assert_allclose(unsure.relevance, sure.relevance, rtol=0.15)


def test_without_weight_the_feedback_on_a_pair_changes_nothing(pairs):
    found = judge(pairs, Examination.known(KNOWN), weight=0.0)
    np.testing.assert_allclose(found.relevance, found.predicted, rtol=0.05)  # but for the error of the prediction


def test_rare_pairs_are_not_sure(pairs):
    found = judge(pairs, Examination.known(KNOWN))
    assert found.sure.any()
    assert not found.sure[found.examined < 1].any()
    assert found.evidence[found.sure].min() >= 0.2
    np.testing.assert_allclose((found.low < found.relevance) & (found.relevance < found.high), True)


def test_a_pair_gets_more_relevance_for_more_clicks_and_less_for_more_impressions():
    def one(clicks: float, shown: float) -> float:
        shows = np.array([*np.full(50, 10.0), shown])
        amounts = np.array([*np.tile([0, 1, 2, 0, 1], 10), clicks], float)
        cells = count_cells(np.arange(51), np.zeros(51, np.int64), shows, amounts, width=1)
        pairs = Pairs(None, pa.array(np.arange(51)), np.zeros(51, np.int64), np.array([1]), cells, amounts)
        return float(judge(pairs, Examination.known({1: 1.0}), weight=1.0).relevance[-1])

    assert one(0, 10) < one(2, 10) < one(6, 10)
    assert one(2, 40) < one(2, 10)


def test_amounts_are_counted_in_their_unit(world, pairs):
    """Every click has the value 3: relevance is three times as high, with the same relative intervals."""
    log = replace(world.log, actions={"spend": world.log.actions["click"] * 3})
    tripled = pairs_of_log(log, "spend")
    assert tripled.unit == pytest.approx(3)
    a, b = (judge(each, Examination.known(KNOWN), weight=1.0) for each in (pairs, tripled))
    np.testing.assert_allclose(b.relevance, 3 * a.relevance, rtol=1e-3)
    np.testing.assert_allclose(b.high / b.low, a.high / a.low, rtol=1e-3)
    assert (a.grade == b.grade).mean() > 0.99  # cut points are rounded to three digits


def test_features_predict_relevance():
    """Production ranks at random, so only the feature tells relevant items that were shown rarely."""
    world = judged_world(3, most=6, shape=30.0, spread=0.0)
    values = np.log(world.relevance)[np.repeat(world.log.context["query"], SHOWN), world.log.item_ids]
    log = replace(world.log, features=values[:, None].astype(np.float32), feature_names=("taste",))
    without, with_feature = pairs_of_log(world.log, "click"), pairs_of_log(log, "click")
    truth = np.log(world.truth(without))
    a, b = (judge(each, Examination.known(KNOWN), weight=1.0).relevance for each in (without, with_feature))
    assert with_feature.feature_names == ("taste",)
    assert np.corrcoef(np.log(a), truth)[0, 1] + 0.1 < np.corrcoef(np.log(b), truth)[0, 1]


@given(st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=20))
def test_the_inverse_of_trigamma(values):
    np.testing.assert_allclose(special.polygamma(1, inverse_trigamma(np.array(values))), values, rtol=1e-6)


def test_default_cuts_are_at_half_grades_of_the_gain():
    relevance, shown = np.append(np.full(98, 0.1), [0.7, 0.7]), np.ones(100)
    assert default_cuts(relevance, shown, 3) == pytest.approx(
        [0.7 * (2 ** (g + 0.5) - 1) / 7 for g in range(3)], rel=0.01
    )
    assert len(default_cuts(relevance, shown, 4)) == 4


def test_probabilities_of_grades_are_those_of_the_posterior(pairs):
    """With cut points at the ends of an interval, the middle grade has its probability."""
    found = judge(pairs, Examination.known(KNOWN))
    most = int(found.evidence.argmax())
    again = judge(pairs, Examination.known(KNOWN), cuts=[found.low[most], found.high[most]], sure=0.95 - 1e-9)
    assert (again.grade[most], bool(again.sure[most])) == (1, True)
    assert again.probability[most] == pytest.approx(0.95)


@pytest.mark.parametrize("cuts", [[], [0.2, 0.1], [0.0, 0.1], [0.1, np.nan], [0.1, np.inf]])
def test_bad_cut_points_are_rejected(cuts):
    with pytest.raises(OptionError, match="cut points"):
        checked_cuts(cuts)


def test_bad_options_and_logs_are_rejected(world, pairs):
    with pytest.raises(OptionError, match=r"weight must be from 0 to 1, got 1\.5"):
        judge(pairs, Examination.known(KNOWN), weight=1.5)
    with pytest.raises(DataError, match="item ids"):
        pairs_of_log(replace(world.log, item_ids=None), "click")
    with pytest.raises(DataError, match="no row"):
        pairs_of_log(replace(world.log, item_ids=pa.nulls(world.log.rows, pa.string())), "click")


def test_rows_without_an_item_are_left_out(world, pairs):
    ids = world.log.item_ids.to_pylist()
    fewer = pairs_of_log(replace(world.log, item_ids=pa.array([None, *ids[1:]])), "click")
    assert fewer.impressions.sum() == pairs.impressions.sum() - 1


def test_a_log_without_queries_has_one_pair_for_each_item(world):
    found = ultr.judgments(replace(world.log, context={}))
    assert found.pairs.queries is None
    assert len(found) == len(set(world.log.item_ids.to_pylist()))
    assert found.table().column_names[0] == "item"


def test_the_function_reads_frames_and_takes_propensities(world):
    frame = world.log.to_table().to_pandas()
    found = ultr.judgments(frame, propensities=KNOWN, grades=4, segment="none")
    assert (len(found.cuts), found.examination) == (4, "known propensities")
    table = found.table().to_pandas().set_index(["query", "item"])
    assert table["impressions"].sum() == len(frame)
    assert (
        table.loc[(0, frame["item"][0]), "impressions"]
        == ((frame["query"] == 0) & (frame["item"] == frame["item"][0])).sum()
    )
    estimated = ultr.judgments(world.log)
    assert "clicks on items" in estimated.examination
    assert np.corrcoef(np.log(estimated.relevance), np.log(found.relevance))[0, 1] > 0.9


def test_segments_share_the_pairs(world):
    """Half of the requests are on phones, whose users look at fewer positions."""
    phone = np.arange(len(world.log)) % 2 == 0
    log = replace(world.log, context={**world.log.context, "segment": pa.array(np.where(phone, "phone", "desktop"))})
    found = ultr.judgments(log)
    assert len(found) == len(pairs_of_log(world.log, "click"))
    assert found.pairs.mean_rank.max() <= SHOWN
    assert len(found.pairs.positions) == 2 * SHOWN


def test_a_log_without_feedback_has_low_judgments_that_are_not_certain():
    world = judged_world(5, queries=20)
    log = replace(world.log, actions={"click": np.zeros(world.log.rows, np.float32)})
    found = judge(pairs_of_log(log, "click"), Examination.known(KNOWN), weight=1.0)
    assert np.isfinite(found.relevance).all()
    assert found.relevance.max() < 0.1


def test_the_marginal_likelihood_is_that_of_integrate():
    """E[log λ] with one click in one examined impression, r = 1 and no spread: Gamma(2, 1/μ + 1)."""
    found = attraction(np.ones(1), np.ones(1), np.zeros(1), np.zeros(1, np.int64), Prediction(np.zeros(1), 1.0, 0.0))
    density = stats.gamma(2, scale=0.5).pdf
    mean = integrate.quad(lambda rate: np.log(rate) * density(rate), 0, 50)[0]
    assert found.mean[0] == pytest.approx(mean, abs=1e-5)


def test_likely_clicks_vary_less_than_rare_ones_and_so_say_more():
    random = np.random.default_rng(0)
    shown = random.integers(30, 90, 400).astype(float)
    truth = random.uniform(0.4, 0.9, 400)
    clicks = random.binomial(shown.astype(int), truth).astype(float)
    cells = Counts(np.arange(400), np.zeros(400, np.int64), (400, 1), shown, clicks)
    pairs = Pairs(None, pa.array(np.arange(400)), np.zeros(400, np.int64), np.array([1]), cells, clicks)
    rate = clicks.sum() / shown.sum()
    np.testing.assert_allclose(pairs.dispersion, 1 - rate)
    found = judge(pairs, Examination.known({1: 1.0}), weight=1.0)
    assert np.abs(found.relevance - truth).mean() < np.abs(clicks / shown - truth).mean()
    assert 0.9 < ((found.low <= truth) & (truth <= found.high)).mean() < 0.99
    reliable = np.var(truth) / (np.var(truth) + rate * (1 - rate) / 60)
    assert found.evidence.mean() == pytest.approx(reliable, abs=0.1)


def test_the_dispersion_is_the_mean_over_the_positions_of_a_pair():
    cells = Counts(np.array([0, 0, 1]), np.array([0, 1, 1]), (2, 2), np.array([4.0, 4, 8]), np.array([2.0, 1, 2]))
    pairs = Pairs(None, pa.array([0, 1]), np.zeros(2, np.int64), np.array([1, 2]), cells, np.array([3.0, 2]))
    first, second = 1 / 2, 1 / 4  # click rates of the positions
    both = (4 * first * (1 - first) + 4 * second * (1 - second)) / (4 * first + 4 * second)
    np.testing.assert_allclose(pairs.dispersion, [both, 1 - second])
    np.testing.assert_allclose(pairs.examined(np.array([1.0, 0.5])), [6.0, 4.0])  # impressions, not divided


def test_a_log_without_features_and_with_few_clicks_needs_no_warning_of_torch():
    log = judged_world(0, queries=3, items=SHOWN, most=4).log
    found = ultr.judgments(log)  # tests turn every warning into an error
    assert len(found) == len(found.relevance) > 0
