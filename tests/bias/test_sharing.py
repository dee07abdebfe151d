"""Estimates of examination in several contexts share strength: they are more precise, cover the truth, and say why."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow.compute as pc
import pytest
from scipy import stats

from ultr.bias import logging_policy
from ultr.bias.audit import audit
from ultr.bias.estimators import ConditionalFit
from ultr.bias.examination import Examination, estimate_examination
from ultr.bias.identification import NOT
from ultr.bias.sharing import SIZES, Slots, _log_density, share_strength, told_position
from ultr.log import read_log
from ultr.log.labels import Label
from ultr.log.table import SEPARATOR, SHIFT, by_segment, grid_ids, slot
from worlds.contexts import contexts

PLACES = np.arange(1, 11)


def make(seed: int, slopes: dict[str, float], *, errors: dict[str, float], bump: float = 0.0) -> tuple:
    """Return θ by slot with errors, the slots, and the truth: log θ falls by a slope over log k in each context."""
    rng = np.random.default_rng(seed)
    names = [name for name in slopes for _ in PLACES]
    positions = np.tile(PLACES, len(slopes)).astype(float)
    truth = np.array([-slopes[name] * np.log(k) for name, k in zip(names, positions, strict=True)])
    truth += bump * rng.normal(size=len(PLACES))[np.tile(PLACES, len(slopes)) - 1]
    error = np.array([errors[name] for name in names])
    y = truth + error * rng.normal(size=len(truth))
    centre = np.eye(len(y))
    centre[:, 0] -= 1  # relative to the first slot
    covariance = centre @ np.diag(error**2) @ centre.T
    fit = ConditionalFit(np.exp(centre @ y), 0.0, np.eye(len(y)), 0, covariance)
    contexts = [*slopes]
    return fit, Slots.of(positions, np.array([contexts.index(name) for name in names]), contexts), centre @ truth


def test_a_small_context_gets_the_curve_of_the_others():
    errors = {"phone": 0.05, "desk": 0.05, "tablet": 0.6}
    alone, shared, chosen = [], [], []
    for seed in range(30):
        fit, slots, truth = make(seed, {"phone": 1.0, "desk": 1.0, "tablet": 1.0}, errors=errors)
        found, (deviation,) = share_strength(fit, slots, slots)
        last = slice(20, 30)

        def error(theta: np.ndarray, last: slice = last, truth: np.ndarray = truth) -> float:
            """Return the error of the shape of the last context, whatever its level."""
            return float(np.std((np.log(theta) - truth)[last]))

        alone.append(error(fit.theta))
        shared.append(error(found.theta))
        chosen.append(deviation.size)
    assert np.mean(shared) < 0.3 * np.mean(alone)
    assert np.mean(np.array(chosen) <= SIZES[1]) > 0.8  # examination does not depend on the column


def test_the_curves_of_contexts_stay_apart_where_the_log_says_so():
    slopes = {"phone": 1.4, "desk": 0.6, "tablet": 1.0}
    fit, slots, truth = make(0, slopes, errors=dict.fromkeys(slopes, 0.05))
    found, (deviation,) = share_strength(fit, slots, slots)
    np.testing.assert_allclose(np.log(found.theta), truth, atol=0.15)
    assert deviation.size > 0.1
    ratio = {name: 5.0 ** (1.0 - slope) for name, slope in slopes.items()}  # at position 5, over the mean
    for name, (middle, low, high) in deviation.ratios.items():
        assert low < ratio[name] < high
        assert middle == pytest.approx(ratio[name], rel=0.15)


@pytest.mark.parametrize("bump", [0.0, 0.2])
def test_intervals_cover_the_truth(bump):
    slopes = {
        f"{a}{SEPARATOR}{b}": 1 + x + z for a, x in (("p", 0.2), ("d", -0.2)) for b, z in (("s", 0.1), ("h", -0.1))
    }
    errors = dict(zip(slopes, (0.05, 0.1, 0.2, 0.4), strict=True))
    inside = []
    for seed in range(60):
        fit, slots, truth = make(seed, slopes, errors=errors, bump=bump)
        found, _ = share_strength(fit, slots, slots)
        error = np.sqrt(np.maximum(found.covariance().diagonal(), 1e-12))
        inside.append((np.abs(np.log(found.theta) - truth) <= 1.96 * error)[1:])
    assert 0.90 < np.mean(inside) < 0.99


def test_columns_that_do_not_matter_are_told_from_those_that_do():
    matters, not_matters = [], []
    for seed in range(20):
        slopes = {f"{a}{SEPARATOR}{b}": 1 + x for a, x in (("p", 0.3), ("d", -0.3)) for b in ("yes", "no")}
        fit, slots, _ = make(seed, slopes, errors=dict.fromkeys(slopes, 0.1))
        _, (device, login) = share_strength(fit, slots, slots)
        matters.append(device.size)
        not_matters.append(login.size)
    assert min(matters) >= 0.1
    assert np.mean(np.array(not_matters) <= 0.05) >= 0.8


def test_a_combination_has_a_curve_of_its_own_only_if_it_needs_one():
    values = [f"{a}{SEPARATOR}{b}" for a in "pd" for b in "sh"]
    odd = {values[0]: 1.8, values[1]: 1.0, values[2]: 1.0, values[3]: 1.0}
    fit, slots, truth = make(1, odd, errors=dict.fromkeys(values, 0.05))
    found, _ = share_strength(fit, slots, slots)
    assert np.abs(np.log(found.theta) - truth).max() < 0.2


def test_slots_without_an_estimate_get_that_of_their_values():
    slopes = {"phone": 1.0, "desk": 1.0}
    fit, slots, truth = make(2, slopes, errors=dict.fromkeys(slopes, 0.02))
    theta = fit.theta.copy()
    theta[15:] = np.nan
    found, _ = share_strength(ConditionalFit(theta, 0.0, fit.information, 0, fit.spread), slots, slots)
    np.testing.assert_allclose(np.log(found.theta), truth, atol=0.2)
    assert (found.covariance().diagonal()[15:] > fit.covariance().diagonal()[15:].min()).all()


def test_the_posterior_is_that_of_a_normal_model():
    """With one context and a wide prior, θ is the estimate itself; the density is that of scipy."""
    rng = np.random.default_rng(0)
    root = rng.normal(size=(4, 4))
    covariance, y = root @ root.T + np.eye(4), rng.normal(size=4)
    zero = stats.multivariate_normal(np.zeros(4), covariance)
    assert _log_density(y, covariance) - _log_density(2 * y, covariance) == pytest.approx(
        zero.logpdf(y) - zero.logpdf(2 * y)
    )
    fit, slots, _ = make(3, {"all": 1.0}, errors={"all": 0.01})
    found, _ = share_strength(fit, slots, slots)
    np.testing.assert_allclose(found.theta, fit.theta, rtol=0.03)


def test_a_bias_that_is_only_possible_widens_intervals_and_changes_no_weight():
    slopes = {"phone": 1.2, "desk": 0.8}
    fit, slots, _ = make(4, slopes, errors=dict.fromkeys(slopes, 0.1))
    found, (own,) = share_strength(fit, slots, slots)
    steeper = np.outer(slots.log_position, slots.log_position)
    doubted = replace(fit, spread=fit.spread + steeper, probable=fit.spread)
    same, (wider,) = share_strength(doubted, slots, slots)
    np.testing.assert_allclose(same.theta, found.theta)
    added = same.covariance() - found.covariance()
    np.testing.assert_allclose(added, steeper, atol=0.1)  # all contexts share the bias, so that it stays
    assert wider.size == own.size
    np.testing.assert_allclose(wider.ratios["phone"], own.ratios["phone"], rtol=0.05)  # the same bias in all contexts


def test_values_with_the_separator_in_them_are_one_column():
    slots = Slots.of(np.array([1.0, 2.0]), np.arange(2), ["a + b", "a"])
    assert slots.values == (("a", "a + b"),)


def test_a_log_with_two_columns_is_estimated_near_the_truth():
    table, truth = contexts(30_000, seed=5)
    log, segments = by_segment(read_log(table, segment="device,surface", randomised="random", features=[]))
    found = estimate_examination(log, Label("click"), segments=segments)
    theta = {slot(k, segments): value for k, value in found.by_position().items()}
    off = [np.log(theta[k] / theta[f"1@{k.partition('@')[2]}"] / truth[k]) for k in theta]
    assert np.sqrt(np.mean(np.square(off))) < 0.12
    ratios = found.deviations[0].ratios
    assert ratios["desk"][1] > 1.2  # the lower end of the interval
    assert ratios["phone"][2] < 0.85


def test_small_contexts_are_recovered_within_a_tenth_and_intervals_cover():
    table, truth = contexts(12_000, seed=7, random_share=0.5)
    log, segments = by_segment(read_log(table, segment="device,surface", randomised="random", features=[]))
    found = estimate_examination(log, Label("click"), segments=segments)
    places = {slot(k, segments): i for i, k in enumerate(found.positions)}
    here = np.array([places[name] for name in truth])
    first = np.array([places[f"1@{name.partition('@')[2]}"] for name in truth])
    error = np.log(found.theta[here] / found.theta[first] / np.array([*truth.values()]))
    spread = found.covariance
    sd = np.sqrt(np.maximum(spread[here, here] + spread[first, first] - 2 * spread[here, first], 0))
    assert np.abs(np.expm1(error[here != first])).mean() < 0.1
    assert (np.abs(error) <= 1.96 * sd + 1e-9).mean() >= 0.9


@pytest.fixture(scope="module")
def audited():
    """Return a log of two columns, and its audit."""
    table, _ = contexts(4000, seed=3, random_share=0.5)
    log = read_log(table, segment="device,surface", randomised="random", features=[])
    return log, audit(log, bootstrap=20)


def test_the_audit_has_the_estimate_of_training(audited):
    log, report = audited
    coded, segments = by_segment(log)
    trained = estimate_examination(coded, Label("click"), segments=segments)
    theta = {slot(k, segments): value for k, value in trained.by_position().items()}
    assert len(report.segments) == 4
    for name, part in report.segments.items():
        own = np.array([theta[f"{k}@{name}"] for k in part.positions])
        place = int(np.flatnonzero(part.positions == part.reference)[0])
        np.testing.assert_allclose(part.estimates["shared"].theta, own / own[place])
        assert part.verdict.anchor == "shared"
        used = np.array([*part.propensities().values()])
        np.testing.assert_allclose(used / used.max(), own / own.max())
    found = report.to_json()["contexts"]
    assert found == trained.contexts("device,surface")
    assert found["device"]["ratios"]["desk"][1] > 1 > found["device"]["ratios"]["phone"][2]


def test_segments_of_one_column_are_estimated_alone(audited):
    log = audited[0]
    alone = replace(
        log, context={**log.context, "segment": pc.replace_substring(log.context["segment"], SEPARATOR, "/")}
    )
    report = audit(alone, bootstrap=20)
    assert "contexts" not in report.to_json()
    assert all("shared" not in part.estimates for part in report.segments.values())
    whole = audited[1]
    np.testing.assert_array_equal(whole.estimates["randomised"].theta, report.estimates["randomised"].theta)


def test_without_evidence_the_segments_share_that_of_features(monkeypatch):
    monkeypatch.setattr(logging_policy, "MUCH_OPEN", np.inf)  # no network of the logging score
    table, _ = contexts(800, seed=1)
    log = read_log(table.drop_columns(["item", "random"]), segment="device,surface")
    report = audit(log, bootstrap=10)
    assert {part.verdict.status for part in report.segments.values()} == {NOT}
    assert {part.verdict.anchor for part in report.segments.values()} <= {"shared", None}
    assert audit(log.without_features(), bootstrap=10).contexts == {}


def test_an_estimate_with_deviations_is_read_as_it_was_written(tmp_path):
    table, _ = contexts(3000)
    log, segments = by_segment(read_log(table, segment="device,login", randomised="random", features=[]))
    found = estimate_examination(log, Label("click"), segments=segments)
    found.save(tmp_path / "examination.json")
    again = Examination.load(tmp_path / "examination.json")
    assert again.deviations == found.deviations
    assert len(again.deviations) == 2
    np.testing.assert_array_equal(again.theta, found.theta)


def test_deviations_of_a_grid_are_told_for_a_slot():
    assert told_position([1, 2, 3]) == "5"
    rows, columns = np.divmod(np.arange(24), 3)
    assert told_position((grid_ids(rows + 1, columns) + (1 << SHIFT)).tolist()) == "r5c0"
    assert told_position(grid_ids(rows[:9] + 1, columns[:9] + 1).tolist()) == "r3c1"
    assert told_position(grid_ids(2, np.arange(3)).tolist()) == "r2c4"
    assert told_position(grid_ids(np.arange(3), 1).tolist()) == "r4c1"
