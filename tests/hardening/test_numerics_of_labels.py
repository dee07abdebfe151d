"""Check labels, dwell times, examination and propensities at extreme inputs: right values, or a clear error."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from scipy.sparse import csr_matrix

from hardening.extremes import GARBAGE, Ranked, assert_near, check_draws, effort, pools, ranked, write_counts
from ultr.bias.counts import Counts
from ultr.bias.estimators import SMALLEST, bradley_terry, fit_conditional, fit_trust, harvest, position_based
from ultr.bias.logging_policy import _order_loss
from ultr.datasets.base import by_grade
from ultr.datasets.users import USERS, Dwell, make_user
from ultr.errors import LabelError
from ultr.log.labels import _FUNCTIONS, _OPERATORS, _UNARY, DEFAULT_LABEL, Label

LABEL = 1e-5  # the error of exp and ** grows with the exponent, which is at most 88 here
DWELL = 1e-6  # one interpolation
EXPECTED = 1e-5  # P(click) by position and grade, times a value that is integrated in double precision
ORDER = 1e-6  # relative to the largest score, at the size of which sums of exponentials are rounded
ACTIONS = (0.0, 1e-40, 1e-30, 1e-3, 1.0, 2.5, 80.0, 1e6, 1e30, 3e38)
CONSTANTS = ("0", "1", "3", "0.5", "1e-30", "1e30", "1e200", "1e400", "10**3")
SMOOTH = (
    DEFAULT_LABEL,
    "click * log1p(dwell)",
    "sqrt(dwell) + (dwell > 30)",
    "clip(dwell, 0.5, 1e200)",
    "min(dwell, 1e200, 1e300) / (1 + click)",
    "max(click, dwell / 100) ** 0.5",
    "exp(-dwell) * click",
    "abs(click - 3)",
)
SYMBOLS = ("+", "-", "*", "/", "**", "<", "<=", ">", ">=", "==", "!=")
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True, scope="module")
def _counts() -> Iterator[None]:
    yield from write_counts("numerics of labels")


def both_libraries(actions: dict[str, np.ndarray]) -> list[dict]:
    return [actions, {name: torch.from_numpy(values) for name, values in actions.items()}]


@effort
@pytest.mark.parametrize("expression", SMOOTH)
def test_labels_are_as_in_double_precision(expression, examples):
    label = Label(expression)

    def holds(seed: int) -> None:
        draw = pools(seed)
        actions = {"click": draw((0.0, 1.0), 50).numpy(), "dwell": draw((0.0, 1e-30, 0.7, 88.0, 1e6), 50).numpy()}
        double = {name: values.astype(np.float64) for name, values in actions.items()}
        for single, exact in zip(both_libraries(actions), both_libraries(double), strict=True):
            actual = torch.as_tensor(label(single))
            assert actual.dtype == torch.float32
            assert_near(f"label {expression}", actual, torch.as_tensor(label(exact)), rtol=LABEL)

    check_draws("labels", examples, seeds, holds)


def test_every_operator_and_function_of_labels_is_drawn():
    assert len(SYMBOLS) == len(_OPERATORS)
    assert {*_UNARY, "min", "max", "clip"} == {*_FUNCTIONS}


def nested(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    two = st.tuples(inner, st.sampled_from(SYMBOLS), inner).map(lambda parts: "({} {} {})".format(*parts))
    one = st.tuples(st.sampled_from(_UNARY), inner).map(lambda parts: "{}({})".format(*parts))
    several = st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(lambda parts: "{}({}, {})".format(*parts))
    clipped = st.tuples(inner, inner, inner).map(lambda parts: "clip({}, {}, {})".format(*parts))
    return two | one | several | clipped | inner.map("-{}".format)


expressions = st.recursive(st.sampled_from(["click", "dwell", *CONSTANTS]), nested, max_leaves=6)


@effort
def test_any_expression_of_any_actions_is_finite_or_rejected(examples):
    def holds(case: tuple[str, int]) -> None:
        expression, seed = case
        draw = pools(seed)
        try:
            label = Label(expression)
        except LabelError:  # it has no action
            return
        single = {name: draw(ACTIONS, 8).numpy() for name in ("click", "dwell")}
        double = {name: values.astype(np.float64) for name, values in single.items()}
        for actions in (*both_libraries(single), *both_libraries(double)):
            try:
                values = label(actions)
            except LabelError as error:
                assert "finite and not negative" in str(error)  # noqa: PT017
                continue
            assert values.dtype == actions["click"].dtype
            assert ((values >= 0) & (values < np.inf)).all()

    check_draws("expressions", 10 * examples, st.tuples(expressions, seeds), holds)


@effort
def test_dwell_times_by_grade_are_as_in_double_precision_and_within_their_table(examples):
    def holds(case: tuple[int, int]) -> None:
        seed, highest = case
        grades = pools(seed)((0.0, 1e-30, 0.3, 1.0, highest / 3, highest - 1e-3, highest, 1e30), 40)
        for dwell in (Dwell(), Dwell((2.0,), (0.0,)), Dwell((-50.0, 50.0), (0.0, 5.0))):
            for single, double in zip(
                dwell.parameters(grades, highest), dwell.parameters(grades.double(), highest), strict=True
            ):
                scale = max(map(abs, (*dwell.mu, *dwell.sigma)))
                assert_near("dwell", single, double, rtol=DWELL, scale=scale)
            mu, sigma = dwell.parameters(grades.double(), highest)
            assert ((mu >= min(dwell.mu)) & (mu <= max(dwell.mu))).all()
            assert ((sigma >= min(dwell.sigma)) & (sigma <= max(dwell.sigma))).all()
        ends = by_grade((1.0, 5.0, 2.0), torch.tensor([0.0, highest / 2, highest]), highest)
        torch.testing.assert_close(ends, torch.tensor([1.0, 5.0, 2.0]), rtol=1e-6, atol=0)

    check_draws("dwell", examples, st.tuples(seeds, st.sampled_from([1, 4, 30])), holds)


@effort
@pytest.mark.parametrize("name", USERS)
def test_what_users_are_expected_to_do_is_as_in_double_precision(name, examples):
    user = make_user(name, dwell=None)

    def holds(case: Ranked) -> None:
        positions = torch.from_numpy(
            np.random.default_rng(case.seed).choice([0, 1, 2, 10, 11, 5000, 2**62], case.labels.shape)
        )
        single, double = (
            user.expected(grades, positions, "click", where=case.where)
            for grades in (case.labels, case.labels.double())
        )
        assert_near(f"expected feedback, {name}", single, double, rtol=EXPECTED, scale=1e-3)
        assert ((double >= 0) & (double <= 1)).all()

    check_draws("users", examples, ranked(labels=(0.0, 1e-30, 1e-7, 0.5, 3.0, 4.0)), holds)


# --- Examination --------------------------------------------------------------------------------------------------


@effort
def test_examination_of_any_counts_is_a_probability(examples):
    def holds(seed: int) -> None:
        rng = np.random.default_rng(seed)
        size = tuple(rng.integers(1, 6, 2))
        strata, places = np.indices(size).reshape(2, -1)
        shown = rng.choice([0.0, 1e-6, 1.0, 30.0, 1e12], size).ravel()
        cells = Counts(strata, places, size, shown, shown * rng.choice([0.0, 1e-9, 0.2, 1.0], size).ravel())
        fit = fit_trust(cells, iterations=60)
        for values, least in ((fit.theta, SMALLEST), (fit.zeta, 0), (fit.beta, 0)):
            assert ((values >= least) & (values <= 1)).all(), values
        assert np.isfinite(fit.moved)
        theta = fit_conditional(cells).theta
        assert (theta[np.isfinite(theta)] >= 0).all()
        assert np.isfinite(theta).any()

    check_draws("examination", examples, seeds, holds)


@effort
def test_the_likelihood_of_an_order_is_as_in_double_precision(examples):
    def holds(case: Ranked) -> None:
        if not case.where.any():
            return
        scores, results = case.scores.clamp(-1e4, 1e4), []
        largest = torch.where(case.where, scores, 0.0).abs().max().double().clamp(min=1)
        dirty = torch.where(case.where, scores, pools(case.seed)(GARBAGE, *scores.shape))
        for values in (scores, scores.double(), dirty):
            values.requires_grad_()
            loss = _order_loss(values, case.where)
            results.append((loss.detach(), torch.autograd.grad(loss, values)[0]))
        assert_near("likelihood of an order", results[0][0], results[1][0], rtol=ORDER, scale=largest)
        assert_near("gradient of it", results[0][1], results[1][1], rtol=ORDER, scale=largest)
        assert torch.equal(results[2][0], results[0][0])
        assert torch.equal(results[2][1], results[0][1])

    check_draws("order", examples, ranked(), holds)


def positive_where_identified(theta: np.ndarray) -> bool:
    return bool((np.isnan(theta) | ((theta > 0) & (theta < np.inf))).all())


@effort
def test_propensities_of_any_counts_are_positive_where_identified(examples):
    def holds(seed: int) -> None:
        rng = np.random.default_rng(seed)
        width, items, groups = int(rng.integers(1, 6)), int(rng.integers(1, 8)), 4
        wins = rng.choice([0.0, 1e-6, 1.0, 7.0, 1e9], (width, width))
        np.fill_diagonal(wins, 0)
        assert positive_where_identified(bradley_terry(wins))
        shown = rng.choice([0.0, 1.0, 1e-3, 1e6], (items * width, groups))
        clicked = shown * rng.choice([0.0, 1e-6, 0.5, 1.0], shown.shape)
        cells = np.arange(items * width)
        counts = Counts(cells // width, cells % width, (items, width), csr_matrix(shown), csr_matrix(clicked))
        weights = rng.choice([0.0, 1.0, 3.0], (groups, 3))
        for estimator in (harvest, position_based):
            assert positive_where_identified(estimator(counts, weights))

    check_draws("propensities", examples, seeds, holds)
