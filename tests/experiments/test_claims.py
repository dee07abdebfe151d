"""The check of the paper's claims."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultr.evaluation.scores import holm, paired_test
from ultr.experiments.lab import (
    DIRECTION,
    HELD,
    NOT,
    REVERSED,
    Claim,
    claim_above,
    claim_above_all,
    claim_level,
    claim_parts,
    claims_text,
    corrected,
    difference,
    verdict_of,
)
from ultr.report.page import Heading, Notes
from ultr.training.comparing.results import Comparison, Row, Setting

SEEDS = st.lists(st.floats(-10, 10, allow_nan=False).map(lambda v: round(v, 3)), min_size=4, max_size=4)


def comparison(**results):
    """Return a comparison of methods by their results on `reward`; the metric `other` has the opposite sign."""
    rows = [
        Row(name, Setting(0.1), {"other": [-v for v in values], "reward": values}) for name, values in results.items()
    ]
    return Comparison(rows, ["other", "reward"], rows[0].entry)


def with_requests(result, **by_request):
    """Return a comparison of which some methods have results on `reward` by request."""
    rows = [
        replace(row, by_request={"reward": np.array(by_request[row.entry])} if row.entry in by_request else {})
        for row in result.rows
    ]
    return replace(result, rows=rows)


CLEAR = comparison(
    best=[2.0, 2.1, 2.2, 2.3],
    near=[1.9, 2.2, 2.0, 2.35],  # less than the best, at times
    far=[1.0, 1.15, 1.2, 1.35],
    same=[2.0, 2.1, 2.2, 2.3],
    above=[2.5, 2.61, 2.7, 2.82],
)


@pytest.mark.parametrize(
    ("mean", "p", "verdict"),
    [
        (0.1, 0.04, HELD),
        (0.1, 0.06, DIRECTION),
        (0.1, 0.05, DIRECTION),
        (-0.1, 0.06, NOT),
        (-0.1, 0.04, REVERSED),
        (0.0, 1.0, NOT),
    ],
)
def test_a_claim_holds_only_if_the_difference_is_above_zero_and_significant(mean, p, verdict):
    assert verdict_of(mean, p) == verdict


@pytest.mark.parametrize(
    ("mean", "p", "verdict"),
    [(0.1, 0.04, HELD), (0.1, 0.06, HELD), (0.0, 1.0, HELD), (-0.1, 0.05, HELD), (-0.1, 0.04, REVERSED)],
)
def test_a_claim_of_no_loss_holds_unless_the_difference_is_below_zero_and_significant(mean, p, verdict):
    assert verdict_of(mean, p, is_level=True) == verdict


@given(SEEDS, SEEDS)
def test_one_method_above_another_is_checked_by_a_paired_test_of_their_runs(a, b):
    test = paired_test(np.array(a), np.array(b))
    claim = claim_above("text", "data", comparison(a=a, b=b), "a", "b", "reward")
    expected = {(True, True): HELD, (True, False): DIRECTION, (False, True): REVERSED, (False, False): NOT}
    assert claim.verdict == expected[test.difference > 0, test.p < 0.05]
    assert claim.evidence == (f"a minus b {test.difference:+.4f} [{test.low:+.4f}, {test.high:+.4f}], p = {test.p:.2g}")
    assert (claim.text, claim.data) == ("text", "data")
    assert (claim.difference, claim.p, claim.is_level) == (test.difference, test.p, False)


@pytest.mark.parametrize(
    ("far", "verdict"),
    [([0.0, 0.1, 0.0, 0.1], HELD), ([0.0, 2.9, 3.1, 0.0], DIRECTION)],  # by request, the second has a large spread
)
def test_a_claim_needs_a_significant_difference_over_runs_and_over_requests(far, verdict):
    best = [2.0, 2.1, 1.9, 2.2]
    result = with_requests(CLEAR, best=best, far=far)
    over_runs = difference(CLEAR, "best", "far", "reward")[0].seeds
    over_requests = paired_test(np.array(best), np.array(far))
    claim = claim_above("text", "data", result, "best", "far", "reward")
    assert claim.verdict == verdict
    assert claim.difference == over_runs.difference
    assert claim.p == max(over_runs.p, over_requests.p)
    ends = f"p = {over_runs.p:.2g} over runs, {over_requests.p:.2g} over requests"
    assert claim.evidence == (
        f"best minus far {over_runs.difference:+.4f} [{over_runs.low:+.4f}, {over_runs.high:+.4f}], {ends}"
    )


def test_results_by_request_of_one_method_are_not_tested():
    result = with_requests(CLEAR, best=[2.0, 2.1, 1.9, 2.2])
    assert difference(result, "best", "far", "reward") == difference(CLEAR, "best", "far", "reward")


def test_a_difference_is_on_the_named_metric():
    assert difference(CLEAR, "best", "far", "reward")[0].seeds.difference == pytest.approx(0.975)
    assert difference(CLEAR, "best", "far", "other")[0].seeds.difference == pytest.approx(-0.975)


def test_a_method_above_all_is_compared_with_each():
    claim = claim_above_all("text", "data", CLEAR, "above", ["far", "best"], "reward")
    assert claim.verdict == HELD
    test, words = difference(CLEAR, "above", "best", "reward")
    assert claim.evidence == f"nearest: {words}"
    assert claim.difference == test.seeds.difference
    assert claim.p == max(test.p, difference(CLEAR, "above", "far", "reward")[0].p)


@pytest.mark.parametrize(
    ("others", "verdict", "nearest", "short"),
    [
        (["far", "near"], DIRECTION, "near", "near"),
        (["near", "same", "far"], NOT, "same", "near, same"),
        (["far", "above", "near"], REVERSED, "above", "above, near"),
    ],
)
def test_the_worst_verdict_counts_for_a_method_above_all(others, verdict, nearest, short):
    claim = claim_above_all("text", "data", CLEAR, "best", others, "reward")
    assert claim.verdict == verdict
    test, words = difference(CLEAR, "best", nearest, "reward")
    assert claim.evidence == f"nearest: {words}; not significantly above: {short}"
    assert (claim.difference, claim.p) == (test.seeds.difference, test.p)
    assert verdict_of(claim.difference, claim.p) == verdict


@given(SEEDS, st.lists(SEEDS, min_size=1, max_size=3))
def test_another_method_never_improves_the_verdict_of_a_claim_above_all(mine, others):
    result = comparison(mine=mine, **{f"m{i}": values for i, values in enumerate(others)})
    order = (HELD, DIRECTION, NOT, REVERSED)
    verdicts = [claim_above("", "", result, "mine", f"m{i}", "reward").verdict for i in range(len(others))]
    claim = claim_above_all("", "", result, "mine", [f"m{i}" for i in range(len(others))], "reward")
    assert order.index(claim.verdict) == max(map(order.index, verdicts))
    assert claim.verdict == verdict_of(claim.difference, claim.p)
    named = claim.evidence.partition("above: ")[2]
    assert [name for name in named.split(", ") if name] == [
        f"m{i}" for i, verdict in enumerate(verdicts) if verdict != HELD
    ]


@pytest.mark.parametrize(
    ("method", "others", "best", "verdict"),
    [
        ("above", ["far", "best"], "best", HELD),
        ("near", ["far", "best"], "best", HELD),  # below, and not significantly
        ("same", ["best"], "best", HELD),
        ("far", ["near", "best"], "best", REVERSED),
        ("best", ["far", "above"], "above", REVERSED),
    ],
)
def test_a_method_is_level_unless_significantly_below_the_best_of_others(method, others, best, verdict):
    claim = claim_level("text", "data", CLEAR, method, others, "reward")
    assert claim.verdict == verdict
    test, words = difference(CLEAR, method, best, "reward")
    assert claim.evidence == words
    assert (claim.difference, claim.p, claim.is_level) == (test.seeds.difference, test.p, True)


def test_claims_are_corrected_for_the_number_of_claims_on_their_data_set():
    claims = [
        Claim("a", "one set", HELD, "first", 0.1, 0.01),
        Claim("b", "one set", HELD, "second", 0.1, 0.03),
        Claim("c", "one set", REVERSED, "third", -0.1, 0.02),
        Claim("a", "another", HELD, "alone", 0.1, 0.03),
        Claim("d", "one set", HELD, "of a curve"),
    ]
    assert corrected(claims) == [
        replace(claims[0], verdict=HELD, evidence="first; corrected for 3 claims p = 0.03"),
        replace(claims[1], verdict=HELD, evidence="second; corrected for 3 claims p = 0.04"),
        replace(claims[2], verdict=REVERSED, evidence="third; corrected for 3 claims p = 0.04"),
        replace(claims[3], verdict=HELD, evidence="alone; corrected for 1 claim p = 0.03"),
        claims[4],
    ]
    assert corrected([]) == []


@pytest.mark.parametrize(
    ("difference", "is_level", "before", "after"),
    [
        (0.1, False, HELD, DIRECTION),
        (-0.1, False, REVERSED, NOT),
        (-0.1, True, REVERSED, HELD),
        (0.1, True, HELD, HELD),
    ],
)
def test_a_claim_that_is_significant_alone_may_not_be_among_others(difference, is_level, before, after):
    claims = [Claim(name, "data", before, name, difference, 0.04, is_level) for name in "ab"]
    assert [claim.verdict for claim in corrected(claims[:1])] == [before]
    assert [claim.verdict for claim in corrected(claims)] == [after, after]
    assert corrected(claims)[0].evidence == "a; corrected for 2 claims p = 0.08"


CLAIMS = st.builds(
    lambda data, gap, p, is_level: Claim("text", data, verdict_of(gap, p, is_level=is_level), "why", gap, p, is_level),
    st.sampled_from(["one", "two", "three"]),
    st.floats(-1, 1),
    st.floats(0, 1),
    st.booleans(),
)


@given(st.lists(CLAIMS, max_size=8), st.randoms(use_true_random=False))
def test_a_correction_never_makes_a_difference_significant_and_does_not_depend_on_order(claims, random):
    found = corrected(claims)
    for old, new in zip(claims, found, strict=True):
        p = holm([claim.p for claim in claims if claim.data == old.data])
        of = [claim for claim in claims if claim.data == old.data].index(old)
        assert new.evidence == f"why; corrected for {len(p)} claim{'s' * (len(p) > 1)} p = {p[of]:.2g}"
        assert new.verdict == verdict_of(old.difference, p[of], is_level=old.is_level)
        assert (new.text, new.data, new.difference, new.p, new.is_level) == (
            old.text,
            old.data,
            old.difference,
            old.p,
            old.is_level,
        )
        weaker = {HELD: {HELD, DIRECTION}, REVERSED: {REVERSED, HELD if old.is_level else NOT}}
        assert new.verdict in weaker.get(old.verdict, {old.verdict})
    order = random.sample(range(len(claims)), len(claims))
    assert corrected([claims[i] for i in order]) == [found[i] for i in order]


def test_claims_are_grouped_by_text():
    claims = [
        Claim("first", "one set", HELD, "a"),
        Claim("second", "one set", NOT, "b"),
        Claim("first", "another", REVERSED, "c"),
    ]
    assert claims_text(claims) == (
        "## Claims\n\nfirst:\n\n- one set: **held**. a\n- another: **reversed**. c\n"
        "\nsecond:\n\n- one set: **did not hold**. b"
    )
    assert claim_parts(claims) == [
        Heading("first"),
        Notes(["one set: held. a"], good=True),
        Notes(["another: reversed. c"]),
        Heading("second"),
        Notes(["one set: did not hold. b"]),
    ]
