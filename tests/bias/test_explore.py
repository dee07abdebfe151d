"""Plans of experiments that identify examination: their loss and precision, their table, and what comes back."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise, permutations

import numpy as np
import pyarrow as pa
import pytest
import torch

from swapped import RELEVANCE, THETA, experiment
from ultr.bias.audit import audit
from ultr.bias.counts import counted_swaps, impressions
from ultr.bias.estimators import fit_conditional
from ultr.bias.examination import estimate_examination
from ultr.bias.explore import (
    HASHES,
    PLANS,
    SwapTable,
    Traffic,
    fastest,
    loss_of_arm,
    loss_of_shuffle,
    make_plan,
    request_hash,
    traffic_of,
    variances,
    worst_case,
)
from ultr.bias.identification import NORMAL
from ultr.datasets import load_dataset, ranking_svm, show
from ultr.datasets.users import User, draw_sessions, simulate_log
from ultr.errors import DataError, OptionError, OutputError
from ultr.log.labels import Label
from ultr.log.swaps import parse_swap, swap_items

SHOP = Traffic(np.arange(1, 6), np.ones(5), THETA, RELEVANCE)


def clicks(order) -> float:
    """Return the expected clicks of a request; `order[p]` is the place where production's item p is shown."""
    return float(THETA[list(order)] @ RELEVANCE)


# --- Loss -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", [(0, 3), (1, 2), (0, 1, 2), (0, 2, 1), (0, 4, 2, 3)])
def test_the_loss_of_an_arm_is_that_of_its_order(arm):
    order = list(range(5))
    for before, after in zip(arm, (*arm[1:], arm[0]), strict=True):
        order[before] = after
    assert loss_of_arm(SHOP, arm) == pytest.approx(clicks(range(5)) - clicks(order))
    if len(arm) == 2:
        a, b = arm
        assert loss_of_arm(SHOP, arm) == pytest.approx((THETA[a] - THETA[b]) * (RELEVANCE[a] - RELEVANCE[b]))


def test_the_loss_of_a_shuffle_is_the_mean_over_all_orders():
    orders = [clicks(order) for order in permutations(range(5))]
    assert loss_of_shuffle(SHOP) == pytest.approx(clicks(range(5)) - np.mean(orders))
    # A third of the requests has two items.
    short = replace(SHOP, shown=np.array([1, 1, 2 / 3, 2 / 3, 2 / 3]))
    of_two = (THETA[0] - THETA[1]) * (RELEVANCE[0] - RELEVANCE[1]) / 2
    assert loss_of_shuffle(short) == pytest.approx(of_two / 3 + loss_of_shuffle(SHOP) * 2 / 3)


def test_no_examination_loses_more_than_the_worst_case():
    rng, rate = np.random.default_rng(0), THETA * RELEVANCE
    worst, swaps = worst_case(SHOP), [(0, 3), (1, 2)]
    top3 = [(0, 1), (0, 2), (1, 2), (0, 1, 2), (0, 2, 1)]  # together, not each
    np.testing.assert_allclose(worst.theta * worst.relevance, rate)
    for _ in range(200):
        theta = rng.uniform(0.05, 1, 5)
        other = replace(SHOP, theta=theta / theta[0], relevance=rate / (theta / theta[0]))
        assert all(loss_of_arm(other, arm) <= loss_of_arm(worst, arm) + 1e-12 for arm in swaps)
        assert sum(loss_of_arm(other, arm) - loss_of_arm(worst, arm) for arm in top3) <= 1e-12
        assert loss_of_shuffle(other) <= loss_of_shuffle(worst) + 1e-12


# --- Precision --------------------------------------------------------------------------------------------------------


def test_the_variance_of_one_swap_is_that_of_its_two_ratios_of_rates():
    two = replace(SHOP, positions=SHOP.positions[:2], shown=np.ones(2), theta=THETA[:2], relevance=RELEVANCE[:2])
    chance = np.outer(RELEVANCE[:2], THETA[:2])
    of_log_rate = (1 - chance) / chance / np.array([[900, 100], [100, 900]])
    of_ratio = of_log_rate.sum(1)
    found = variances(two, [(0, 1)], np.array([100.0]), 900.0, width=2)[0]
    np.testing.assert_allclose(found, [0, 1 / (1 / of_ratio).sum()])


def test_the_derivatives_of_the_variances_are_those_of_differences():
    arms, numbers, step = [(0, 1), (0, 3), (2, 3), (0, 1, 2)], np.array([50.0, 80.0, 30.0, 60.0]), 1e-4
    found, by_arm, by_control = variances(SHOP, arms, numbers, 700.0, width=4)
    for i, moved in enumerate(np.eye(4) * step):
        after = variances(SHOP, arms, numbers + moved, 700.0, width=4)[0]
        np.testing.assert_allclose((after - found) / step, by_arm[:, i], rtol=1e-3, atol=1e-9)
    after = variances(SHOP, arms, numbers, 700.0 + step, width=4)[0]
    np.testing.assert_allclose((after - found) / step, by_control, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_just_precise_enough(name):
    plan = make_plan(name, SHOP, precision=0.2, share=0.05)
    assert plan.half_widths[0] == 0
    assert 0.19 < plan.half_widths.max() <= 0.2 + 1e-6
    assert plan.positions == ((1, 2, 3) if name == "top3" else (1, 2, 3, 4, 5))
    assert plan.shares.sum() == pytest.approx(0.05 if plan.swaps else 0)
    assert plan.lost_clicks == pytest.approx(plan.requests * plan.lost_share * clicks(range(5)))
    assert 0 < plan.lost_share <= plan.most_lost_share < 0.05
    assert plan.days(plan.requests / 7) == pytest.approx(7)
    if plan.swaps:
        arms = [tuple(k - 1 for k in parse_swap(swap)) for swap in plan.swaps]
        assert plan.lost_per_request == pytest.approx(plan.shares @ [loss_of_arm(SHOP, arm) for arm in arms])
        reached = variances(SHOP, arms, plan.shares * plan.requests, 0.95 * plan.requests, width=len(plan.positions))[0]
        np.testing.assert_allclose(plan.half_widths, np.expm1(NORMAL * np.sqrt(reached)))


def test_twice_the_precision_needs_about_four_times_the_requests():
    wide, narrow = (make_plan("first", SHOP, precision=precision).requests for precision in (0.2, 0.1))
    assert narrow / wide == pytest.approx((np.log(1.2) / np.log(1.1)) ** 2, rel=0.02)


@pytest.mark.parametrize("name", ["first", "neighbours"])
def test_no_other_shares_of_the_arms_are_cheaper(name):
    plan, rng = make_plan(name, SHOP, precision=0.1, share=0.1), np.random.default_rng(0)
    arms = [tuple(k - 1 for k in parse_swap(swap)) for swap in plan.swaps]
    loss = np.array([loss_of_arm(SHOP, arm) for arm in arms])

    def cost(shares):
        needed = variances(SHOP, arms, shares, 0.9, width=5)[0].max()
        return needed * (shares @ (loss + loss.mean()))

    least = cost(plan.shares)
    for _ in range(300):
        shares = plan.shares * np.exp(rng.normal(scale=rng.choice([0.01, 0.1, 1]), size=len(arms)))
        assert cost(shares * 0.1 / shares.sum()) >= least * (1 - 1e-4)
    assert cost(np.full(len(arms), 0.1 / len(arms))) > least


def test_positions_with_few_impressions_are_left_out():
    shown = np.array([1, 1, 1, 0.2, 0.1])
    assert replace(SHOP, shown=shown).targets() == 3
    assert make_plan("first", replace(SHOP, shown=shown)).swaps == ("1-2", "1-3")
    assert fastest([make_plan(name, SHOP) for name in PLANS]).name == "first"


@pytest.mark.parametrize(
    ("name", "options"),
    [("first", {"precision": 0.0}), ("first", {"share": 0.9}), ("last", {}), ("first", {"precision": float("nan")})],
)
def test_wrong_options_are_an_error(name, options):
    with pytest.raises(OptionError):
        make_plan(name, SHOP, **options)


def test_a_log_without_enough_clicks_is_an_error():
    with pytest.raises(DataError, match=r"too few clicks.*--actions"):
        make_plan("first", replace(SHOP, relevance=RELEVANCE * 1e-15))


# --- Table ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["first", "neighbours", "top3"])
def test_the_ranges_of_the_table_cover_each_hash_once(name, tmp_path):
    plan = make_plan(name, SHOP, share=0.2)
    SwapTable.of(plan).write(tmp_path / "swaps.csv")
    header, *rows = [line.split(",") for line in (tmp_path / "swaps.csv").read_text().splitlines()]
    assert header == ["from", "to", "swap", "probability"]
    assert [int(rows[0][0]), int(rows[-1][1])] == [0, HASHES]
    assert all(int(a[1]) == int(b[0]) for a, b in pairwise(rows))
    assert [row[2] for row in rows] == [*plan.swaps, ""]
    for row, share in zip(rows, [*plan.shares, 0.8], strict=True):
        assert float(row[3]) == pytest.approx((int(row[1]) - int(row[0])) / HASHES, abs=1e-9)
        assert float(row[3]) == pytest.approx(share, abs=1e-8)
    assert SwapTable.read(tmp_path / "swaps.csv") == SwapTable.of(plan)


def test_requests_draw_the_arms_with_the_probabilities_of_the_table():
    table = SwapTable.of(make_plan("first", SHOP, share=0.2))
    ids = [f"request-{i}" for i in range(40_000)]
    arms = table.draw(ids)
    for i in (0, 17, 4711):  # by the definition
        ranges = [*table.starts, HASHES]
        place = next(j for j in range(len(table.swaps)) if ranges[j] <= request_hash(ids[i]) < ranges[j + 1])
        assert arms[i] == table.swaps[place]
    for drawn in (arms, table.draw(range(40_000))):
        counts = Counter(drawn)
        expected = 40_000 * np.array(table.probabilities)
        squares = (np.array([counts[swap] for swap in table.swaps]) - expected) ** 2 / expected
        assert squares.sum() < 20  # the 99.9% quantile of chi-squared with 4 degrees of freedom is 18.5
    assert (table.draw([17]) == table.draw(["17"])).all()


def test_a_shuffle_has_no_table():
    with pytest.raises(OptionError, match=r"no swaps for a table.*--randomised"):
        SwapTable.of(make_plan("shuffle", SHOP))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a,b\n1,2\n", "needs the columns from,to,swap,probability"),
        ("from,to,swap,probability\n", "must cover 0 to 2\\^32 once"),
        ("from,to,swap,probability\n0,100,1-2,0.1\n", "must cover"),
        ("from,to,swap,probability\n0,100,1-2,0.1\n99,4294967296,,0.9\n", "must cover"),
        ("from,to,swap,probability\n0,4294967296,1,1\n", "two or more different positions"),
        ("from,to,swap,probability\n0,x,1-2,1\n", "needs the columns"),
    ],
)
def test_a_wrong_table_is_an_error_with_a_hint(text, match, tmp_path):
    (tmp_path / "swaps.csv").write_text(text)
    with pytest.raises(DataError, match=f"{match}.*; "):
        SwapTable.read(tmp_path / "swaps.csv")


def test_a_table_is_not_overwritten_by_accident(tmp_path):
    table = SwapTable.of(make_plan("first", SHOP))
    table.write(tmp_path / "swaps.csv")
    with pytest.raises(OutputError, match="exists already"):
        table.write(tmp_path / "swaps.csv")
    table.write(tmp_path / "swaps.csv", overwrite=True)


# --- What comes back --------------------------------------------------------------------------------------------------


def test_a_stratum_has_the_items_of_one_position_in_production():
    log = experiment(500, short=0.5)
    counts = counted_swaps(impressions(log, log.actions["click"] > 0))
    cells = counts.total()
    assert cells.size == (7, 5)  # 5 positions of long requests, 2 of short ones
    # An item of position 1 is shown at all positions; those of 3 to 5 at their position and at 1.
    assert Counter(np.bincount(cells.strata).tolist()) == {5: 1, 2: 3 + 3}
    assert counted_swaps(impressions(replace(log, context={}), log.actions["click"] > 0)) is None
    control = replace(log, context={"swaps": pa.array([None] * 500, pa.string())})
    assert counted_swaps(impressions(control, log.actions["click"] > 0)) is None


@pytest.mark.parametrize("short", [0.0, 0.6])
def test_examination_is_estimated_also_if_short_requests_cannot_be_swapped(short):
    log = experiment(60_000, short=short)
    counts = counted_swaps(impressions(log, log.actions["click"] > 0))
    fit = fit_conditional(counts.total())
    error = np.sqrt(np.diag(fit.covariance()))
    assert (np.abs(np.log(fit.theta / THETA)) < 3 * error + 1e-9).all()
    assert error.max() < 0.08


def test_swaps_are_evidence_of_the_audit_and_of_training():
    log = experiment(20_000)
    report = audit(log, bootstrap=20)
    assert list(report.estimates) == ["swaps"]
    assert (report.verdict.anchor, report.verdict.status) == ("swaps", "identified")
    assert report.verdict.reasons[0] == "Some requests had swapped positions, drawn at random."
    found = estimate_examination(log, Label("click"))
    swapped = sum(arm != "" for arm in log.context["swaps"].to_pylist())
    assert found.source == f"{swapped:,} requests with swapped positions"
    np.testing.assert_allclose(found.theta, THETA, rtol=0.15)
    traffic = traffic_of(report)
    assert not traffic.assumed
    np.testing.assert_allclose(traffic.theta, THETA, rtol=0.15)


def test_the_traffic_of_a_log_that_does_not_identify_examination_is_the_worst_case():
    log = replace(experiment(5000), context={})
    traffic = traffic_of(audit(log, bootstrap=0))
    rate = [log.actions["click"][log.positions == k].mean() for k in range(1, 6)]
    assert traffic.assumed
    np.testing.assert_allclose(traffic.theta, np.sqrt(rate / rate[0]))
    np.testing.assert_allclose(traffic.theta * traffic.relevance, rate, rtol=0.05)
    assert (np.diff(traffic.relevance) <= 1e-12).all()
    one = audit(log.regroup(log.offsets[:-1], np.arange(len(log) + 1)), bootstrap=0)
    with pytest.raises(DataError, match="two or more positions"):
        traffic_of(one)


def test_an_experiment_is_as_precise_as_planned_and_loses_no_more_than_planned():
    """A small version of benchmarks/explore.py: the demo's log, a plan, and the experiments of simulated users."""
    data = load_dataset("synthetic")
    production = show(data.train, ranking_svm(data.train, seed=0)(data.train.features)).without_features()
    user = User(max_grade=data.max_grade)
    logged = simulate_log(production, user, sessions=6000)[0]
    traffic = traffic_of(audit(replace(logged, context={}, item_ids=None, relevance=None), bootstrap=0))
    plan = make_plan("first", traffic, precision=0.3, share=0.3)
    table, reached, lost = SwapTable.of(plan), [], []
    for seed in range(3):
        drawn = draw_sessions(replace(production, item_ids=None), plan.requests, seed=seed)
        before = user.click_probability(torch.from_numpy(drawn.true_relevance), torch.from_numpy(drawn.positions))
        shown = swap_items(replace(drawn, context={}), table.draw(drawn.request_ids.to_pylist()))
        chance = user.click_probability(torch.from_numpy(shown.true_relevance), torch.from_numpy(shown.positions))
        click = np.random.default_rng(seed).random(shown.rows) < chance.numpy()
        report = audit(replace(shown, relevance=None, actions={"click": click.astype(np.float32)}), bootstrap=200)
        widths = report.estimates["swaps"].half_width[1 : len(plan.positions)]
        reached.append(float((widths / plan.half_widths[1:]).mean()))
        lost.append(float((before.sum() - chance.sum()) / before.sum()))
    assert all(0.8 < each < 1.2 for each in reached), reached
    # The plan assumes the worst case; the loss differs between experiments by about a tenth of it.
    assert 0.2 * plan.lost_share < np.mean(lost) < 1.1 * plan.lost_share, (lost, plan.lost_share)
