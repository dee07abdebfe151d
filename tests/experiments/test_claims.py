"""The check of the paper's claims."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultr.evaluation.scores import PairedTest, paired_test
from ultr.experiments.claims import (
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
    difference,
    verdict_of,
)
from ultr.report.parts import Heading, Notes
from ultr.training.compare import Comparison, Row

SEEDS = st.lists(st.floats(-10, 10, allow_nan=False).map(lambda v: round(v, 3)), min_size=4, max_size=4)


def comparison(**results):
    """Return a comparison of methods by their results on `reward`; the metric `other` has the opposite sign."""
    rows = [Row(name, 0.1, {"other": [-v for v in values], "reward": values}, {}) for name, values in results.items()]
    return Comparison(rows, ["other", "reward"], rows[0].entry)


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
    assert verdict_of(PairedTest(mean, mean - 1, mean + 1, p, 5)) == verdict


@given(SEEDS, SEEDS)
def test_one_method_above_another_is_checked_by_a_paired_test_of_their_runs(a, b):
    test = paired_test(np.array(a), np.array(b))
    claim = claim_above("text", "data", comparison(a=a, b=b), "a", "b", "reward")
    expected = {(True, True): HELD, (True, False): DIRECTION, (False, True): REVERSED, (False, False): NOT}
    assert claim.verdict == expected[test.difference > 0, test.p < 0.05]
    assert claim.evidence == (f"a minus b {test.difference:+.4f} [{test.low:+.4f}, {test.high:+.4f}], p = {test.p:.2g}")
    assert (claim.text, claim.data) == ("text", "data")


def test_a_difference_is_on_the_named_metric():
    assert difference(CLEAR, "best", "far", "reward")[0].difference == pytest.approx(0.975)
    assert difference(CLEAR, "best", "far", "other")[0].difference == pytest.approx(-0.975)


def test_a_method_above_all_is_compared_with_each():
    claim = claim_above_all("text", "data", CLEAR, "above", ["far", "best"], "reward")
    assert claim.verdict == HELD
    assert claim.evidence == "nearest: " + difference(CLEAR, "above", "best", "reward")[1]


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
    words = difference(CLEAR, "best", nearest, "reward")[1]
    assert claim.evidence == f"nearest: {words}; not significantly above: {short}"


@given(SEEDS, st.lists(SEEDS, min_size=1, max_size=3))
def test_another_method_never_improves_the_verdict_of_a_claim_above_all(mine, others):
    result = comparison(mine=mine, **{f"m{i}": values for i, values in enumerate(others)})
    order = (HELD, DIRECTION, NOT, REVERSED)
    verdicts = [claim_above("", "", result, "mine", f"m{i}", "reward").verdict for i in range(len(others))]
    claim = claim_above_all("", "", result, "mine", [f"m{i}" for i in range(len(others))], "reward")
    assert order.index(claim.verdict) == max(map(order.index, verdicts))
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
    assert claim.evidence == difference(CLEAR, method, best, "reward")[1]


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
