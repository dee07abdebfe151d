"""Complete audits of simulated logs whose examination is known."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bias.worlds import THETA, small_log, with_rare_positions, world
from ultr.bias import counts, logging_policy
from ultr.bias.audit import audit, rows_of, summary, with_click_models
from ultr.bias.click_models import ModelQuality, QualityReport
from ultr.bias.identification import CARE, CONDITIONAL, IDENTIFIED, NOT, Refutation
from ultr.errors import DataError
from ultr.log import read_log
from worlds.shop import FEATURES, shop

RELATIVE = THETA / THETA[0]


@pytest.fixture(autouse=True)
def linear(monkeypatch):
    """Skip the network of the logging score: orders here are linear in the features or random."""
    monkeypatch.setattr(logging_policy, "MUCH_OPEN", np.inf)


def covers(found, theta=RELATIVE) -> bool:
    """Return True if intervals that are 1.5 times as wide contain the truth at every position."""
    low, high = found.theta * (found.low / found.theta) ** 1.5, found.theta * (found.high / found.theta) ** 1.5
    return bool(((low <= theta + 1e-9) & (theta <= high + 1e-9)).all())


def strict_json(report) -> dict:
    return json.loads(json.dumps(report.to_json(), allow_nan=False))


def test_lists_in_random_order_identify_examination_if_the_log_says_so():
    log = world("random")
    marked = replace(log, context={**log.context, "randomised": pa.array(np.ones(3000, bool))})
    assert audit(marked, bootstrap=20).verdict.status == IDENTIFIED
    report = audit(log, bootstrap=40)
    assert report.verdict.status == CONDITIONAL
    names = ["halves of items", "shuffled", "halves of time", "position given the item", "other items"]
    assert [(test.name, test.passed) for test in report.refutations] == [(name, True) for name in names]
    assert list(report.estimates) == ["harvest", "items"]
    assert all(covers(found) for found in report.estimates.values())
    assert [found.agree for found in report.agreements] == [True]
    assert report.links["components"] == [[1, 2, 3, 4, 5]]
    assert report.explained is None
    assert (report.requests, report.reference, report.sampled_requests) == (3000, 1, 0)
    np.testing.assert_array_equal(report.impressions, 3000)
    assert not report.pitfalls
    assert not report.notes


def test_different_rankers_and_swaps_identify_examination():
    log = world("rankers", features=3)
    report = audit(log, bootstrap=40)
    assert report.verdict.status in (CONDITIONAL, CARE)
    assert report.verdict.anchor == "items"
    assert all(covers(report.estimates[name]) for name in ("harvest", "items"))
    naive = report.rate / report.rate[0]
    assert np.abs(naive / RELATIVE - 1).mean() > 2 * np.abs(report.anchor.theta / RELATIVE - 1).mean()
    assert list(report.estimates) == ["harvest", "items", "strata", "regression"]
    assert report.sampled_requests == 3000


def test_an_order_that_features_explain_does_not_identify_examination():
    report = audit(world("deterministic", features=3, requests=2000), bootstrap=20)
    assert report.verdict.status == NOT
    assert report.explained > 0.8
    assert report.verdict.requests_needed > 0
    assert set(report.estimates) == {"strata", "regression"}


def test_items_that_never_recur_without_features_do_not_identify_examination():
    report = audit(world("deterministic", requests=500), bootstrap=20)
    assert (report.verdict.status, report.verdict.anchor) == (NOT, None)
    assert report.anchor is None
    assert report.propensities() == {}
    assert report.estimates == {}
    assert report.links is None


def with_order(seen: float, unseen: float, chance: float, *, requests: int = 3000):
    """Make a log ordered by a feature, by something that is not a feature and by chance; clicks depend on both."""
    rng, shown = np.random.default_rng(0), len(THETA)
    x, hidden, noise = rng.normal(size=(3, requests, shown))
    order = np.argsort(-(seen * x + unseen * hidden + chance * noise), axis=1)
    x, hidden = (np.take_along_axis(values, order, axis=1) for values in (x, hidden))
    clicked = rng.random((requests, shown)) < THETA / (1 + np.exp(1 - x - hidden))
    return replace(
        world("fresh", requests=requests, features=1),
        features=x.reshape(-1, 1).astype(np.float32),
        actions={"click": clicked.reshape(-1).astype(np.float32)},
        item_ids=None,
        context={},
    )


@pytest.mark.parametrize(
    ("order", "wrong"),
    [((0, 1, 0), True), ((1, 1, 0), True), ((1, 0, 1), False), ((0, 0, 1), False)],
    ids=["unseen", "seen and unseen", "seen and chance", "chance"],
)
def test_features_alone_do_not_identify_examination_whatever_decided_the_order(order, wrong):
    report = audit(with_order(*order), bootstrap=20)
    assert report.verdict.status == NOT
    error = np.abs(report.estimates["strata"].theta / RELATIVE - 1).mean()
    assert error > 0.3 if wrong else error < 0.1


def test_an_order_by_something_unseen_looks_like_chance():
    """No rule could tell these two logs apart: features explain as much of both orders."""
    unseen, chance = (audit(with_order(1, *order), bootstrap=0).explained for order in ((1, 0), (0, 1)))
    assert unseen == pytest.approx(chance, abs=0.05)
    assert 0.1 < unseen < 0.3


def with_bots(log, share: float = 0.01):
    bots = np.random.default_rng(0).random(len(log)) < share
    clicks = np.maximum(log.actions["click"], np.repeat(bots, log.lengths))
    return replace(log, actions={"click": clicks.astype(np.float32)}), int(bots.sum())


LONG = 0.9 / np.arange(1, 9)


def test_bots_are_left_out_of_the_estimates():
    log, number = with_bots(world("random", requests=4000, theta=LONG, features=3))
    part = log.select(np.arange(1000))
    report = audit(log.without_features(), sample=part, bootstrap=30)
    assert report.left_out == pytest.approx(number, abs=3)  # users may click everywhere too
    assert report.requests == 4000 - report.left_out
    assert 980 < report.sampled_requests < 1000
    assert report.verdict.status == CONDITIONAL
    assert covers(report.anchor, LONG / LONG[0])
    assert f"The estimates leave out {report.left_out} suspicious requests" in report.notes[0]
    assert "impossible click rates" in [pitfall.name for pitfall in report.pitfalls]
    assert strict_json(report)["left_out"] == report.left_out


def test_an_estimate_with_bots_is_not_identified_without_care():
    log, _ = with_bots(world("random", requests=4000, theta=LONG))
    report = audit(log, bootstrap=30, keep_suspicious=True)
    assert (report.requests, report.left_out) == (4000, 0)
    assert not covers(report.anchor, LONG / LONG[0])
    assert report.verdict.status == CARE
    assert any("suspicious requests" in reason for reason in report.verdict.reasons)


def test_the_report_says_what_intervals_cover():
    assert "sampling error only" in strict_json(audit(world("random", requests=300), bootstrap=5))["intervals"]


def test_rare_positions_do_not_rule_the_propensities():
    """Positions 6 to 41 are shown twice, and positions 39 to 41 are clicked each time."""
    log = replace(with_rare_positions(world("random", requests=3000, features=3)), item_ids=None, context={})
    for bootstrap in (0, 30):
        report = audit(log, bootstrap=bootstrap)
        found = np.array(list(report.propensities().values()))
        assert len(found) == 41
        assert found.max() == found[0] == pytest.approx(0.7)
        np.testing.assert_allclose(found[:5] / found[0], RELATIVE, rtol=0.2)
        np.testing.assert_allclose(found[5:], found[4], rtol=0.3)


def test_known_propensities_of_rare_positions_are_kept():
    known = {k: 1 / k for k in range(1, 42)}
    report = audit(with_rare_positions(world("random", requests=500)), known=known, bootstrap=10)
    np.testing.assert_allclose(list(report.propensities().values()), 0.7 / np.arange(1, 42), rtol=1e-6)


def test_features_that_explain_clicks_estimate_examination_in_random_order():
    report = audit(world("fresh", features=3, noise=0), bootstrap=20)
    assert (report.verdict.status, report.verdict.anchor) == (NOT, "strata")
    assert abs(report.explained) < 0.02
    assert covers(report.estimates["strata"])
    assert covers(report.estimates["regression"])
    held = {name: found.held_out for name, found in report.estimates.items()}
    assert all(-1 < value < 0 for value in held.values())


def test_requests_in_random_order_are_used_before_items():
    log = world("random")
    marks = np.arange(3000) % 2 == 0
    log = replace(log, context={**log.context, "randomised": pa.array(marks)})
    assert audit(log, bootstrap=30).verdict.anchor == "randomised"
    report = audit(replace(log, item_ids=pa.array(np.arange(log.rows))), bootstrap=30)
    assert report.verdict.anchor == "randomised"
    assert report.verdict.status == IDENTIFIED
    assert "random order" in report.verdict.reasons[0]
    rate = log.actions["click"].reshape(3000, 5)[marks].mean(0)
    np.testing.assert_allclose(report.estimates["randomised"].theta, rate / rate[0])
    assert covers(report.estimates["randomised"])
    narrow, wide = (audit(log, bootstrap=30).estimates[name].half_width[1:] for name in ("harvest", "randomised"))
    assert (narrow < wide * 1.5).all()


def test_randomised_requests_without_a_click_are_ignored():
    log = world("random", requests=500)
    marks = log.actions["click"].reshape(-1, 5).sum(1) == 0
    report = audit(replace(log, context={**log.context, "randomised": pa.array(marks)}), bootstrap=10)
    assert "randomised" not in report.estimates


def test_known_propensities_are_reported_next_to_the_estimates():
    known = {k + 1: float(v) for k, v in enumerate(0.5 * THETA)}
    report = audit(world("random"), bootstrap=30, known={**known, 99: 0.1})
    assert (report.verdict.anchor, report.verdict.status) == ("known", IDENTIFIED)
    np.testing.assert_allclose(report.estimates["known"].theta, RELATIVE)
    np.testing.assert_allclose(report.estimates["known"].low, report.estimates["known"].high)
    assert report.estimates["known"].held_out == pytest.approx(report.estimates["harvest"].held_out, abs=0.01)


def test_known_propensities_that_the_log_contradicts_need_care():
    report = audit(world("random"), bootstrap=30, known=dict.fromkeys(range(1, 6), 0.5))
    assert (report.verdict.anchor, report.verdict.status) == ("known", CARE)
    assert any(reason.startswith("The estimates known and ") for reason in report.verdict.reasons)
    held = {name: found.held_out for name, found in report.estimates.items()}
    assert held["known"] < min(held["harvest"], held["items"])


@pytest.fixture(scope="module")
def long_lists():
    """The audit of a shop with lists of up to 40 items, whose last positions are nearly never shown."""
    made = shop(4000, random_share=0.3, bots=0)
    log = read_log(made.log, features=list(FEATURES), query="")
    position = made.log["position"].to_numpy()
    truth = np.bincount(position, made.examination)[1:] / np.bincount(position)[1:]
    return audit(log, bootstrap=20, sample=log.select(np.arange(300))), truth


def test_rare_positions_share_one_estimate(long_lists):
    report, truth = long_lists
    assert report.verdict.anchor == "randomised"
    assert len(report.positions) > 30
    rows = rows_of(report)
    assert len(rows) < len(report.positions)
    assert rows[-1].positions.endswith(f" to {report.positions[-1]}")
    last = report.anchor.theta[report.pool == report.pool[-1]]
    assert len(last) > 5
    assert (last == last[0]).all()
    weights = report.impressions
    error = np.average(np.abs(np.log(report.anchor.theta / (truth / truth[0]))), weights=weights)
    assert error < 0.2  # where the rows are; the mean examination of users with two devices


def test_the_requests_needed_do_not_follow_from_positions_nearly_never_shown(long_lists):
    report, _ = long_lists
    few = audit(read_log(shop(800, bots=0).log, features=[], item="", query=""), bootstrap=20)
    assert 0 < few.verdict.requests_needed < 10_000
    assert f"show about {few.verdict.requests_needed:,} requests in random order" in few.verdict.next_step
    assert report.verdict.requests_needed <= 3 * few.verdict.requests_needed


def test_the_next_step_follows_the_segments_that_are_less_sure(long_lists):
    report = long_lists[0]
    sure = replace(report, verdict=replace(report.verdict, status=IDENTIFIED, next_step="none"))
    weak = replace(report, verdict=replace(report.verdict, status=CARE, next_step="show more"))
    assert summary(replace(sure, segments={"web": sure}))["next step"] == "none"
    assert summary(replace(sure, segments={"web": sure, "app": weak}))["next step"] == "for segment 'app', show more"
    assert summary(replace(weak, segments={"app": weak}))["next step"] == "show more"


def quality(**likelihood):
    models = (ModelQuality(name, value, value, 1.5, 1.5, 1.0, 3, 0.1, {}) for name, value in likelihood.items())
    return QualityReport("items", 700, 100, 200, tuple(models))


def test_the_verdict_says_if_clicks_depend_on_each_other(long_lists):
    report = long_lists[0]
    reasons = with_click_models(report, quality(pbm=-0.33, ubm=-0.32, dbn=-0.31)).verdict.reasons
    assert reasons[:-1] == report.verdict.reasons
    assert "The click model dbn predicts held-out clicks better than the position-based model (by 6.1%)" in reasons[-1]
    assert "an average" in reasons[-1]
    for same in (None, quality(pbm=-0.33, ubm=-0.329), quality(ubm=-0.32, dbn=-0.31)):
        assert with_click_models(report, same) == report


def test_a_summary_has_the_bias_the_verdict_its_assumption_the_positions_and_the_next_step(long_lists):
    report = long_lists[0]
    words = summary(report)
    assert list(words) == ["how biased", "verdict", "positions", "next step"]
    tested = replace(
        report, refutations=(Refutation("shuffled", True, 0, "."), Refutation("other items", False, 1, "."))
    )
    of_others = "failed: other items; passed: shuffled (of estimates from items, which are not used)"
    assert summary(tested)["tests"] == of_others
    by_items = summary(replace(tested, verdict=replace(report.verdict, assumption="chance decides")))
    assert list(by_items) == ["how biased", "verdict", "assumption", "tests", "positions", "next step"]
    assert (by_items["assumption"], by_items["tests"]) == ("chance decides", "failed: other items; passed: shuffled")
    assert re.match(
        r"compared with position 1, users look 0\.\d\d times as often at 2, 0\.\d\d at 3", words["how biased"]
    )
    assert re.search(r"^1 to \d+ .*known to within 30% \(\d+\.\d% of rows\)", words["positions"])
    assert re.search(r"share one estimate: .*\d+ to \d+$", words["positions"])


@pytest.mark.parametrize(("falls", "clear"), [(0.0, False), (0.03, True)])
def test_differences_that_sampling_error_explains_are_no_clear_bias(falls, clear):
    rng = np.random.default_rng(0)
    shown = np.tile(np.arange(8), 60_000)
    items = rng.permuted(np.tile(np.arange(8), (60_000, 1)), axis=1).ravel()
    clicks = rng.random(len(shown)) < 0.1 * (1 - falls * shown)
    columns = {"request": np.repeat(np.arange(60_000), 8), "item": items, "position": shown + 1, "click": clicks}
    table = pa.table(columns | {"query": np.zeros(len(shown), int)})
    words = summary(audit(read_log(table, features=[]), bootstrap=40))
    assert words["how biased"].startswith("no clear bias: sampling error") != clear


def test_a_summary_names_the_first_position_if_another_is_the_reference(long_lists):
    report = replace(long_lists[0], reference=2)
    assert re.search(r"compared with position 2, users look [\d.]+ times as often at 1", summary(report)["how biased"])


def test_missing_values_of_features_do_not_make_items_incomparable():
    log = world("random", requests=600, features=3)
    features = log.features.copy()
    codes = np.asarray(log.item_ids)
    features[codes % 3 == 0, 1] = np.nan  # of an item, always the same
    report = audit(replace(log, features=features, context={}), bootstrap=5)
    assert report.verdict.anchor == "items"
    assert np.isfinite(report.estimates["regression"].theta).all()


def with_segments(log, keep, names=("desk", "phone"), seed=1):
    """A log of two segments; users of the second examine lower positions less often."""
    rng = np.random.default_rng(seed)
    second = np.arange(len(log)) % 2 == 1
    kept = rng.random((len(log), len(keep))) < np.where(second[:, None], keep, 1)
    clicks = log.actions["click"] * kept.reshape(-1)
    segment = pa.array([names[i] for i in second.astype(int)], pa.string())
    return replace(log, actions={"click": clicks}, context={**log.context, "segment": segment})


KEEP = np.array([1, 0.7, 0.5, 0.4, 0.4])


def test_segments_with_different_examination_are_estimated_separately():
    report = audit(with_segments(world("random", requests=6000), KEEP), bootstrap=30)
    assert set(report.segments) == {"desk", "phone"}
    desk, phone = report.segments["desk"], report.segments["phone"]
    assert desk.requests == phone.requests == 3000
    assert covers(desk.anchor)
    assert covers(phone.anchor, RELATIVE * KEEP)
    assert (phone.anchor.high[1:] < desk.anchor.low[1:]).all()
    mean = (RELATIVE + RELATIVE * KEEP) / 2
    assert covers(report.anchor, mean)
    assert not phone.segments


def test_propensities_may_be_known_by_segment():
    known = {f"{k + 1}@phone": float(v) for k, v in enumerate(THETA * KEEP)}
    report = audit(with_segments(world("random"), KEEP), known=known, bootstrap=20)
    assert "known" not in report.estimates
    assert report.segments["desk"].verdict.anchor == "items"
    assert report.segments["phone"].verdict.anchor == "known"
    np.testing.assert_allclose(report.segments["phone"].anchor.theta, RELATIVE * KEEP)


def test_segments_use_their_part_of_the_sample():
    log = with_segments(world("fresh", requests=1200, features=3), KEEP, names=("desk", None))
    report = audit(log, sample=log.select(np.arange(900)), bootstrap=10)
    assert {name: part.sampled_requests for name, part in report.segments.items()} == {"desk": 450, "": 450}
    assert report.sampled_requests == 900


def test_only_the_largest_segments_with_a_click_are_audited(monkeypatch):
    log = world("random", requests=600)
    sizes = [300, 200, 60, 40]
    segment = np.repeat(["a", "b", "c", "d"], sizes)
    clicks = log.actions["click"] * (np.repeat(segment, 5) != "b")
    log = replace(log, actions={"click": clicks}, context={"segment": pa.array(segment)})
    monkeypatch.setattr(sys.modules["ultr.bias.audit"], "MAX_SEGMENTS", 3)
    assert list(audit(log, bootstrap=10).segments) == ["a", "c"]


def test_features_come_from_the_sample_and_items_from_the_log():
    log = world("random", features=3, requests=1500)
    report = audit(log.without_features(), sample=log.select(np.arange(600)), bootstrap=10)
    assert report.sampled_requests == 600
    assert report.requests == 1500
    whole = audit(log.without_features(), bootstrap=10)
    np.testing.assert_allclose(report.estimates["harvest"].theta, whole.estimates["harvest"].theta)


def test_a_sample_without_a_position_estimates_the_others():
    log = world("fresh", features=3, requests=1500)
    part = log.select(np.arange(600))
    part = part.regroup(np.flatnonzero(part.positions < 5), np.arange(601) * 4)
    report = audit(log.without_features(), sample=part, bootstrap=10)
    np.testing.assert_array_equal(np.isfinite(report.estimates["strata"].theta), [True] * 4 + [False])
    propensities = report.propensities()
    assert list(propensities) == [1, 2, 3, 4, 5]
    assert propensities[5] == propensities[4]  # that of the next position


def test_the_largest_propensity_is_seven_tenths():
    report = audit(world("random", requests=1500), bootstrap=10)
    found = report.propensities()
    assert list(found) == [1, 2, 3, 4, 5]
    values = np.array(list(found.values()))
    assert values.max() == pytest.approx(0.7)
    np.testing.assert_allclose(values / values[0], report.anchor.theta / report.anchor.theta[0])


def test_items_that_recur_with_different_features_are_not_compared():
    log = world("random", requests=600, features=3)
    other = np.random.default_rng(0).normal(size=log.features.shape).astype(np.float32)
    changing = replace(log, features=other, context={})
    report = audit(changing, bootstrap=10)
    assert set(report.estimates) == {"strata", "regression"}
    assert any("items that occur again have other features" in note for note in report.notes)
    for steady in (replace(log, context={}), replace(changing, context=log.context)):
        report = audit(steady, bootstrap=10)
        assert "harvest" in report.estimates
        assert not report.notes


@pytest.mark.parametrize("items", [None, pa.array(np.arange(3000))])
def test_features_are_used_if_no_item_recurs(items):
    log = world("fresh", requests=600, features=3)
    report = audit(replace(log, item_ids=items, context={}), bootstrap=10)
    assert set(report.estimates) == {"strata", "regression"}
    assert not report.notes


def test_the_share_of_sampled_items_is_noted(monkeypatch):
    monkeypatch.setattr(counts, "CELLS", 300)
    report = audit(world("random", requests=500), bootstrap=10)
    share = re.fullmatch(
        r"The estimators harvest and items use a random (.*)% of the items that were clicked and .*", *report.notes
    )
    assert 0 < float(share[1]) < 100


def test_relevance_is_regressed_on_a_sample_of_many_features(monkeypatch):
    monkeypatch.setattr(sys.modules["ultr.bias.audit"], "MAX_FEATURES", 2)
    report = audit(world("fresh", requests=300, features=3), bootstrap=5)
    assert "The estimator regression uses 2 of 3 features, chosen at random." in report.notes
    assert "regression" in report.estimates


def test_too_many_positions_are_rejected(monkeypatch):
    monkeypatch.setattr(counts, "MAX_AUDITED_POSITIONS", 2)
    with pytest.raises(DataError, match=r"up to 2 different positions, got \d+ in 'position'; drop the rows"):
        audit(small_log(0))


@pytest.mark.parametrize("label", ["click", "2 * (click > 0) - 0"])
def test_a_log_without_positive_feedback_is_rejected(label):
    log = small_log(0)
    with pytest.raises(DataError, match="no positive feedback"):
        audit(replace(log, actions={"click": np.zeros(log.rows, np.float32)}), label=label)


def test_feedback_is_where_the_label_is_positive():
    log = world("random", requests=500)
    dwell = log.actions["click"] * np.random.default_rng(0).uniform(0, 20, log.rows).astype(np.float32)
    log = replace(log, actions={**log.actions, "dwell": dwell})
    report = audit(log, label="dwell > 10", bootstrap=10)
    np.testing.assert_allclose(report.rate, (dwell > 10).reshape(-1, 5).mean(0))


def test_weights_count_like_repeated_requests():
    log = world("random", requests=800)
    weights = np.random.default_rng(0).integers(1, 4, 800).astype(np.float32)
    weighted = audit(replace(log, weights=weights), bootstrap=10)
    repeated = audit(log.select(np.repeat(np.arange(800), weights.astype(int))), bootstrap=10)
    np.testing.assert_allclose(weighted.impressions, repeated.impressions)
    np.testing.assert_allclose(weighted.rate, repeated.rate)
    for name in ("harvest", "items"):
        np.testing.assert_allclose(weighted.estimates[name].theta, repeated.estimates[name].theta, rtol=1e-3)


def test_the_same_seed_gives_the_same_report():
    log = world("random", requests=400)
    first, again, other = (strict_json(audit(log, bootstrap=10, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_the_pitfalls_of_a_log_are_in_its_report():
    log = world("random", requests=2000, theta=THETA / 3)
    clicked = log.actions["click"].reshape(-1, 5).any(1)
    names = [found.name for found in audit(log.select(clicked), bootstrap=10).pitfalls]
    assert "clickless requests dropped" in names


def test_reports_are_json_without_nan():
    log = with_segments(world("random", requests=800, features=3), KEEP)
    clicks = log.actions["click"] * (log.positions < 5)  # the last position has no clicks, and joins the one above
    report = strict_json(audit(replace(log, actions={"click": clicks}), bootstrap=10, known={1: 0.5, 2: 0.4}))
    assert report["pools"] == [0, 1, 2, 3, 3]
    assert report["estimates"]["harvest"]["theta"][4] == report["estimates"]["harvest"]["theta"][3]
    assert report["estimates"]["known"]["theta"] == [1, 0.8, None, None, None]
    assert report["verdict"]["advice"]
    assert set(report["segments"]) == {"desk", "phone"}
    assert report["order_explained_by_features"] < 0.1
    assert set(report["agreements"][0]) == {"first", "second", "largest", "position", "agree", "typical"}


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), requests=st.integers(1, 60), weights=st.booleans(), queries=st.booleans())
def test_any_small_log_has_a_report(seed, requests, weights, queries):
    log = small_log(seed, requests=requests, weights=weights, queries=queries)
    assume(log.actions["click"].any())
    report = audit(log, bootstrap=10)
    strict_json(report)
    propensities = report.propensities()
    assert all(0 < value <= 0.7 for value in propensities.values())
    assert report.verdict.status == NOT or len(propensities) > 1


def two_parts():
    """A log where items move between 1 and 2, or among 3, 4 and 5, but not from one group to the other."""
    rng = np.random.default_rng(0)
    upper, lower = (rng.permuted(np.tile(places, (2000, 1)), axis=1) for places in ([0, 1], [2, 3, 4]))
    items = np.arange(2000)[:, None] % 20 * 5 + np.column_stack([upper, lower])
    clicks = rng.random((2000, 5)) < THETA * rng.uniform(0.2, 0.9, 100)[items]
    actions = {"click": clicks.reshape(-1).astype(np.float32)}
    return replace(world("random", requests=2000), item_ids=pa.array(items.reshape(-1)), actions=actions, context={})


def test_groups_of_positions_without_links_are_not_identified():
    report = audit(two_parts(), bootstrap=20)
    assert report.links["components"] == [[1, 2], [3, 4, 5]]
    assert (report.verdict.status, report.verdict.anchor) == (NOT, None)
    np.testing.assert_array_equal(np.isfinite(report.estimates["items"].theta), [True] * 2 + [False] * 3)


def test_the_reason_is_that_positions_are_not_linked():
    assert "at more than one position" not in audit(two_parts(), bootstrap=20).verdict.reasons[0]


@pytest.mark.parametrize(
    ("items", "reason"),
    [(None, "The log has no item ids"), (pa.array(np.arange(10_000)), "No clicked item was shown at more than one")],
)
def test_the_reason_says_why_items_give_no_estimate(items, reason):
    assert audit(replace(two_parts(), item_ids=items), bootstrap=5).verdict.reasons[0].startswith(reason)


def test_a_sample_without_a_click_has_no_estimates():
    log = world("random", requests=600, features=3)
    none = replace(log.select(np.arange(50)), actions={"click": np.zeros(250, np.float32)})
    report = audit(log.without_features(), sample=none, bootstrap=10)
    assert report.verdict.anchor == "items"


def test_features_without_information_do_not_explain_clicks_by_overfitting():
    log = world("random", features=3, requests=300)
    noise = np.random.default_rng(0).normal(size=(log.rows, 60)).astype(np.float32)
    log = replace(log, features=noise, feature_names=tuple(f"x{i}" for i in range(60)), item_ids=None, context={})
    report = audit(log, bootstrap=10)
    assert report.verdict.status == NOT
    assert report.estimates["regression"].held_out < report.estimates["strata"].held_out + 0.01


def test_training_uses_the_examination_that_the_report_shows():
    """The curve of bias.json, which `ultr train --bias` reads, is that of the recommended estimate."""
    log = world("random", requests=600)
    report = audit(replace(log, context={"randomised": pa.array(np.ones(600, bool))}), bootstrap=20)
    shown = report.anchor.theta / np.nanmax(report.anchor.theta)
    found = np.array(list(report.propensities().values()))
    np.testing.assert_allclose(found / found.max(), shown)
