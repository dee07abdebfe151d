"""The objective of trees: derivatives against differences, weights against torch, and the E-step of pairs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ultr.errors import DataError
from ultr.lists import Lists
from ultr.log import Log
from ultr.log.labels import Label
from ultr.methods import MethodInputs, make_tree_method
from ultr.methods.pairwise_em import PairwiseEM
from ultr.methods.trees import pair_terms
from ultr.rankers.boosters import BOOSTERS, Boosting
from ultr.rankers.tree_objective import CURVATURE, Kind, PairTerms, PairwiseObjective

LENGTHS = (1, 2, 3, 17, 2)
POSITIONS = (3, 7, 12, 40, 41, 99)
FEATURES = 3
OPTIONS = [
    {"loss": "posterior"},
    {"loss": "posterior", "trust": "clicks"},
    {"loss": "posterior", "trust": "values"},
    {"loss": "opt-posterior"},
    {"loss": "ipw"},
    {"loss": "ipw", "max_weight": 2},
    {"loss": "ipw", "weights": "exact"},
    {"loss": "ipw", "weights": "exact", "trust": "clicks"},
    {"loss": "bayes-ipw"},
    {"loss": "bayes-ipw", "weights": "exact"},
    {"loss": "opt"},
    {"loss": "opt", "max_weight": "none"},
    {"loss": "opt", "weights": "exact"},
    {"loss": "opt", "weights": "exact", "max_weight": 2},
]


def offsets_of(lengths) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


def terms(kind: Kind = Kind.GAP, lengths=LENGTHS, seed: int = 0, **changes) -> PairTerms:
    rng = np.random.default_rng(seed)
    rows, places = sum(lengths), 5
    given = {
        "value": rng.integers(0, 3, rows) * 1.5,
        "above": rng.uniform(1, 4, rows),
        "below": rng.uniform(0.5, 3, rows),
        "place": rng.integers(0, places, rows),
        "preference": rng.normal(size=rows),
        "beta": rng.uniform(size=rows),
        "examined": rng.uniform(size=rows),
        "plus": rng.uniform(0.5, 1, (places, places)),
        "minus": rng.uniform(0, 0.5, (places, places)),
    }
    return PairTerms(offsets_of(lengths), rng.uniform(0.5, 2, len(lengths)), kind=kind, **{**given, **changes})


def apart(rows: int, seed: int = 1) -> np.ndarray:
    """Return scores whose order does not change by a small step."""
    rng = np.random.default_rng(seed)
    return 0.3 * rng.permutation(rows) + 0.1 * rng.uniform(size=rows)


# --- Derivatives --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [np.inf, 2.0])
@pytest.mark.parametrize("by_metric", [False, True])
@pytest.mark.parametrize("kind", Kind)
def test_derivatives_are_those_of_the_loss(kind, by_metric, clip):
    objective = PairwiseObjective(terms(kind, by_metric=by_metric, clip=clip))
    rows, total = len(objective.terms.value), objective.terms.weights.sum()
    scores, h = apart(rows), 1e-3
    moved = np.array([[objective.loss(scores + sign * step) for sign in (1, -1)] for step in h * np.eye(rows)]) * total
    gradient, curvature = objective.derivatives(scores)
    here = total * objective.loss(scores)
    np.testing.assert_allclose(gradient, (moved[:, 0] - moved[:, 1]) / (2 * h), atol=1e-4)
    np.testing.assert_allclose(curvature, (moved.sum(1) - 2 * here) / h**2, atol=1e-4)
    assert np.abs(gradient[1:]).max() > 0.1
    assert gradient[0] == curvature[0] == 0  # a list of one item has no pairs


@pytest.mark.parametrize("kind", Kind)
def test_clipping_changes_the_loss(kind):
    scores = apart(sum(LENGTHS))
    free, clipped = (PairwiseObjective(terms(kind, clip=clip)) for clip in (np.inf, 1.0))
    assert clipped.loss(scores) < free.loss(scores)
    assert np.abs(clipped.derivatives(scores)[0]).sum() < np.abs(free.derivatives(scores)[0]).sum()


@pytest.mark.parametrize("by_metric", [False, True])
@given(seed=st.integers(0, 10**6), lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4))
@settings(max_examples=30)
def test_both_computations_of_gaps_give_the_same_derivatives(by_metric, seed, lengths):
    """Gaps have a faster computation that is used if the loss is not needed."""
    objective = PairwiseObjective(terms(Kind.GAP, lengths, seed, by_metric=by_metric))
    scores = np.random.default_rng(seed).normal(size=sum(lengths)).round(1)
    for fast, slow in zip(objective.derivatives(scores), objective._computed(scores, True), strict=False):
        np.testing.assert_allclose(fast, slow, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("by_metric", [False, True])
@pytest.mark.parametrize("kind", Kind)
def test_requests_without_pairs_have_no_effect(kind, by_metric):
    given = terms(kind, by_metric=by_metric)
    flat = PairwiseObjective(replace(given, value=np.ones_like(given.value)))
    gradient, curvature = flat.derivatives(apart(len(given.value)))
    assert not gradient.any()
    assert not curvature.any()
    assert flat.loss(apart(len(given.value))) == 0
    assert flat.scale == 1


def test_the_first_curvature_is_scaled():
    objective = PairwiseObjective(terms(Kind.PRODUCT))
    gradient, curvature = objective(np.zeros(len(objective.terms.value)))
    assert gradient.dtype == curvature.dtype == np.float32
    assert curvature.mean() == pytest.approx(CURVATURE, rel=1e-5)
    assert objective.last_loss() == pytest.approx(objective.loss(np.zeros(len(objective.terms.value))))


def test_memory_grows_only_with_the_rows():
    given = terms(Kind.PAPER, (3000,))
    assert max(values.size for values in vars(given).values() if isinstance(values, np.ndarray)) == 3000


# --- Scores far apart ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_metric", [False, True])
@pytest.mark.parametrize("kind", Kind)
def test_wide_scores_give_finite_derivatives(kind, by_metric):
    objective = PairwiseObjective(terms(kind, by_metric=by_metric))
    for size in (1e2, 590.0, 1e3, 1e6, 1e30):
        scores = size * np.random.default_rng(0).uniform(-1, 1, sum(LENGTHS))
        gradient, curvature = objective.derivatives(scores)
        assert np.isfinite(gradient).all(), size
        assert np.isfinite(curvature).all(), size
        assert (curvature >= 0).all(), size
        assert np.isfinite(objective.loss(scores)), size


@pytest.mark.parametrize("kind", Kind)
def test_far_away_items_leave_the_pairs_of_others_alone(kind):
    """Moving the first item of a request far away does not change the pairs of the other items."""
    rows = 6
    value = np.array([0.0, 1, 2, 0, 1, 3])
    objective = PairwiseObjective(terms(kind, (rows,), value=value))
    for gap in (1.0, 300.0, 380.0, 590.0):
        scores = np.array([0.0, 0.5, -0.3, 0.1, 0.9, 0.2]) - gap
        scores[0] = 0  # the worst item is above all others
        wide = scores.copy()
        wide[0] = 5000
        near, far = objective.derivatives(scores), objective.derivatives(wide)
        if gap > 40:  # the derivatives of its pairs are at their limits
            np.testing.assert_allclose(near[0], far[0], rtol=1e-9)
            np.testing.assert_allclose(near[1], far[1], rtol=1e-9, atol=1e-12)
        shifted = objective.derivatives(scores - 1e4)
        np.testing.assert_allclose(near[0], shifted[0], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(near[1], shifted[1], rtol=1e-9, atol=1e-9)


# --- Threads ------------------------------------------------------------------------------------------------------


@pytest.fixture
def threads():
    """Run a function with one thread, then with two."""
    before = torch.get_num_threads()

    def both(run):
        found = []
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(run())
            assert torch.get_num_threads() == number  # threads of compiled code do not change those of torch
        return found

    yield both
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", Kind)
def test_threads_change_no_bit_of_the_derivatives(kind, threads):
    lengths = np.random.default_rng(0).integers(1, 20, 300)
    objective = PairwiseObjective(terms(kind, tuple(lengths), by_metric=True))
    one, two = threads(lambda: objective._computed(apart(sum(lengths)), True))
    for a, b in zip(one, two, strict=True):
        assert np.array_equal(a, b)


# --- Comparison with torch ----------------------------------------------------------------------------------------


def make_log(lengths, seed: int = 0, *, weighted: bool = True) -> Log:
    """Make a log of lists at some of the positions, ascending, with ties in the feedback."""
    rng = np.random.default_rng(seed)
    rows = sum(lengths)
    features = rng.normal(size=(rows, FEATURES)).astype(np.float32)
    click = (rng.uniform(size=rows) < 0.3 + 0.5 * (features[:, 0] > 0)).astype(np.float32)
    return Log(
        features=features,
        offsets=offsets_of(lengths),
        request_ids=pa.array(range(len(lengths))),
        feature_names=tuple("abc"),
        positions=np.concatenate([np.sort(rng.choice(POSITIONS, n, replace=False)) for n in lengths]),
        actions={"click": click, "dwell": click * rng.choice([5, 20, 60], rows).astype(np.float32)},
        relevance=rng.integers(0, 5, rows).astype(np.float32),
        weights=rng.uniform(0.5, 2, len(lengths)).astype(np.float32) if weighted else None,
    )


def tree_method(seed: int = 0, *, ranker: str = "lightgbm", truth: bool = False, **options):
    """Make a method whose bias model has arbitrary values, as if it was trained."""
    torch.manual_seed(seed)
    inputs = MethodInputs(Label(), FEATURES, POSITIONS, ranker=ranker, truth=truth, feature_names=tuple("abc"))
    method = make_tree_method("pairwise-em", inputs, final="pairs", **options)
    model, size = method.pairs.bias_model, len(POSITIONS)
    if truth:
        return method
    model.theta.uniform_(0.005, 1)
    model.theta_minus.uniform_(0, 1)
    if method.pairs.trust == "pairs":
        model.plus.uniform_(0.3, 1)
        model.minus.copy_(model.plus * torch.rand(size, size))
    if model.trust_in_clicks:
        model.zeta.copy_(model.theta * torch.rand(size))
    if model.scaled_values:
        model.rho.uniform_(0.5, 2)
    for parameter in model.network.parameters():
        torch.nn.init.normal_(parameter, std=0.5 if parameter.ndim == 1 else 0.2)
    return method


def padded(values: np.ndarray, lists: Lists) -> torch.Tensor:
    return torch.zeros(lists.where.shape).masked_scatter(lists.where, torch.from_numpy(values.astype(np.float32)))


def by_torch(pair_model, log: Log, scores: np.ndarray, options) -> tuple[float, np.ndarray]:
    """Return the loss of some scores, and its gradient by row, as the method for networks has it."""
    lists = Lists.from_log(log)
    given = padded(scores, lists).requires_grad_()
    network = PairwiseEM(replace(pair_model.inputs, ranker="linear"), final="pairs", **options)
    network.bias_model, network.score = pair_model.bias_model, lambda _: given
    loss = network.loss(lists)
    loss.backward()
    return loss.item(), given.grad[lists.where].numpy()


def assert_as_torch_has_it(method, log: Log, scores: np.ndarray, **options) -> None:
    pair_model = method.pairs
    objective = PairwiseObjective(pair_terms(pair_model, log, method.labels(log)))
    loss, gradient = by_torch(pair_model, log, scores, options)
    total = len(log) if log.weights is None else log.weights.sum()
    assert objective.loss(scores) == pytest.approx(loss, rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(objective.derivatives(scores)[0], total * gradient, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5), seed=st.integers(0, 10**6), weighted=st.booleans())
@settings(max_examples=15)
def test_losses_and_gradients_equal_those_of_networks(options, lengths, seed, weighted):
    log = make_log(lengths, seed, weighted=weighted)
    scores = np.random.default_rng(seed).normal(size=log.rows).round(1).astype(np.float32)
    assert_as_torch_has_it(tree_method(seed, **options), log, scores, **options)
    assert_as_torch_has_it(tree_method(seed, **options), log, np.zeros(log.rows, np.float32), **options)


@pytest.mark.parametrize("loss", ["posterior", "opt-posterior", "opt", "ipw"])
def test_true_labels_have_the_same_weights_as_for_networks(loss):
    log = make_log([1, 4, 6, 2, 5])
    scores = np.random.default_rng(0).normal(size=log.rows).astype(np.float32)
    method = tree_method(loss=loss, truth=True)
    assert_as_torch_has_it(method, log, scores, loss=loss)
    shown, never = (PairwiseObjective(pair_terms(method.pairs, some, log.relevance)) for some in (log, unseen(log)))
    assert shown.loss(scores) == never.loss(scores)


def unseen(log: Log) -> Log:
    return replace(log, positions=None)


def test_feedback_without_positions_is_rejected():
    method, log = tree_method(loss="ipw"), unseen(make_log([3, 2]))
    with pytest.raises(DataError, match="--position"):
        method.tasks(log)


@pytest.mark.parametrize("options", [{"loss": "posterior"}, {"loss": "opt", "weights": "exact"}], ids=["value", "pair"])
@pytest.mark.parametrize("ranker", BOOSTERS)
def test_grown_trees_have_the_loss_of_torch_and_lower_it(ranker, options):
    log = make_log(np.random.default_rng(0).integers(1, 7, 400))
    method = tree_method(1, ranker=ranker, **options)
    (task,), found = method.tasks(log), []
    # The bias model of seed 1 values clicked items more than others.
    # Leaves can be small, because only the training loss is checked.
    parameters = {"min_data_in_leaf": 5} if ranker == "lightgbm" else {"min_child_weight": 0.1}
    how = Boosting(30, 0.3, parameters=parameters, objective=task.objective)
    BOOSTERS[ranker].grow(task.rows, how, lambda booster, rounds: found.append(booster) or False)
    scores = found[-1].predict(log.features)
    assert len(found) == found[-1].rounds == 30
    assert_as_torch_has_it(method, log, scores.astype(np.float32), **options)
    if options["loss"] == "posterior":  # |ΔDCG| changes with the order
        assert task.objective.loss(scores) < 0.7 * task.objective.loss(np.zeros(log.rows))
    clicked, scored = log.actions["click"] > 0, np.asarray(scores)
    assert scored[clicked].mean() > scored[~clicked].mean() + 0.3
