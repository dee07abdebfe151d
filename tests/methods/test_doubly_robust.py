"""Estimates of relevance (ips, policy-aware, dr, dm), by enumeration of positions and clicks against closed forms."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ultr.bias.counts import item_codes
from ultr.datasets.users import EYE_TRACKING, User, simulate_log
from ultr.errors import OptionError
from ultr.lists import Lists
from ultr.log import Log, write_log
from ultr.log.labels import Label
from ultr.methods import METHODS, MethodInputs, make_method
from ultr.methods.base import PositionIndex
from ultr.methods.counterfactual import IPW
from ultr.methods.position_model import PRIOR_IMPRESSIONS, PROPENSITY, STRATA
from ultr.rankers.model import load_model
from ultr.training.config import TrainingOptions, make_config
from ultr.training.loop import start
from ultr.training.run import run_training
from ultr.utils.jsonfiles import read_json

POSITIONS = (1, 2, 3)
THETA = np.array([0.9, 0.5, 0.2])
ZETA = np.array([0.3, 0.1, 0.05])
POLICY = np.array([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.0, 0.0, 1.0]])  # P(position | item) of three kinds of items
ESTIMATORS = ("ips", "policy-aware", "dr", "dm")
NAMES = [name for name, method in METHODS.items() if issubclass(method, IPW) and "estimator" in method.OPTIONS]


class Kinds(nn.Module):
    """Strata that are given: the first feature of an item."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PositionIndex(POSITIONS)

    def forward(self, lists: Lists) -> Tensor:
        return lists.features[..., 0].long()


class Given(nn.Module):
    """A bias model whose outputs are given by kind of item: the logit of beta, the log of mu, and g."""

    def __init__(self, beta: np.ndarray, value: float = 1.0) -> None:
        super().__init__()
        logit = torch.logit(torch.as_tensor(beta, dtype=torch.float64))
        given = torch.stack([logit, torch.full_like(logit, math.log(value)), torch.zeros_like(logit)], -1)
        self.register_buffer("given", given)

    def forward(self, features: Tensor) -> Tensor:
        return self.given[features[..., 0].long()]


def made(
    estimator: str,
    *,
    model: np.ndarray,
    theta: np.ndarray = THETA,
    zeta: np.ndarray | None = None,
    policy: np.ndarray = POLICY,
    value: float = 1.0,
    name: str = "ipw-pointwise",
    **options,
) -> IPW:
    """Make a method in double precision that knows θ, ζ, the logging policy and the model of relevance."""
    label = Label("click" if value == 1 else "dwell")
    inputs = MethodInputs(label, features=1, positions=POSITIONS, binary=("click",), ranker_options={"hidden": (4,)})
    method = make_method(name, inputs, **{"max_weight": "none", "estimator": estimator, **options}).double()
    method.positions.theta.copy_(torch.as_tensor(theta))
    method.positions.zeta.copy_(torch.as_tensor(np.zeros(3) if zeta is None else zeta))
    if method.has_bias_stage({"estimator": estimator}):
        method.positions.network = Given(model, value)
    if method.policy is not None:
        method.policy.strata = Kinds()
        method.policy.counts.zero_()[: len(policy)] = torch.as_tensor(policy)
    return method


def every_case(value: float = 1.0) -> Lists:
    """Return lists of one item: each kind of item at each position, without and with a click of this value."""
    kind, place, click = (axis.reshape(-1, 1) for axis in torch.meshgrid(*map(torch.arange, (3, 3, 2)), indexing="ij"))
    return Lists(
        features=kind[..., None].double(),
        where=torch.ones_like(kind, dtype=torch.bool),
        weights=torch.ones(len(kind), dtype=torch.float64),
        positions=place + 1,
        actions={"click": click.double(), "dwell": value * click.double()},
    )


def estimates(method: IPW, value: float = 1.0) -> np.ndarray:
    """Return the estimate of relevance [kind, position, click]."""
    return method.relevance(every_case(value)).view(3, 3, 2).numpy()


def moments(found: np.ndarray, true: np.ndarray, *, zeta: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the variance of an estimate by kind, over all positions and clicks of the logging policy."""
    irrelevant = np.zeros(3) if zeta is None else zeta
    click = THETA * true[:, None] + irrelevant * (1 - true[:, None])
    chance = POLICY[..., None] * np.stack([1 - click, click], -1)
    mean = (chance * found).sum((1, 2))
    return mean, (chance * (found - mean[:, None, None]) ** 2).sum((1, 2))


TRUE = np.array([0.3, 0.6, 0.1])
WRONG = np.array([0.5, 0.2, 0.15])


# --- Enumeration ----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.booleans())
def test_with_a_right_propensity_the_mean_is_relevance_whatever_the_model_is(seed, trust):
    true, model = np.random.default_rng(seed).uniform(0.02, 0.98, (2, 3))
    zeta = ZETA if trust else None
    for estimator in ("ips", "policy-aware", "dr"):
        mean, _ = moments(estimates(made(estimator, model=model, zeta=zeta)), true, zeta=zeta)
        np.testing.assert_allclose(mean, true, rtol=1e-6)


@pytest.mark.parametrize("trust", [False, True])
def test_with_a_right_model_the_mean_is_relevance_though_the_policy_is_wrong_or_weights_are_limited(trust):
    zeta = ZETA if trust else None
    wrong = np.full((3, 3), 1 / 3)
    for options in ({"policy": wrong}, {"max_weight": 1.5}, {"policy": wrong, "max_weight": 2}):
        mean, _ = moments(estimates(made("dr", model=TRUE, zeta=zeta, **options)), TRUE, zeta=zeta)
        np.testing.assert_allclose(mean, TRUE, rtol=1e-6)
        mean, _ = moments(estimates(made("policy-aware", model=TRUE, zeta=zeta, **options)), TRUE, zeta=zeta)
        assert np.abs(mean / TRUE - 1).max() > 0.2


def test_with_a_wrong_model_and_a_wrong_policy_the_error_is_the_product_of_both():
    wrong = np.full((3, 3), 1 / 3)
    mean, _ = moments(estimates(made("dr", model=WRONG, policy=wrong)), TRUE)
    np.testing.assert_allclose(mean - TRUE, (1 - POLICY @ THETA / (wrong @ THETA)) * (WRONG - TRUE), rtol=1e-6)


def test_examination_must_be_right_also_if_the_model_is():
    """m = r does not make up for a wrong α: the mean is r (1 + (ρ - ρ') / ρ') with ρ' of the wrong one."""
    wrong = np.array([0.9, 0.7, 0.1])
    mean, _ = moments(estimates(made("dr", model=TRUE, theta=wrong)), TRUE)
    right, other = POLICY @ THETA, POLICY @ wrong
    np.testing.assert_allclose(mean, TRUE * (1 + (right - other) / other), rtol=1e-6)


def test_the_variance_is_its_closed_form_and_below_that_of_both_inverse_propensities():
    """The variance of dr is that of policy-aware less Var(α) m (2r - m) / ρ², so it is lower if 0 < m < 2r."""
    for model in (WRONG, TRUE, 0.5 * TRUE, 1.9 * np.minimum(TRUE, 0.5)):
        found = {name: moments(estimates(made(name, model=model)), TRUE)[1] for name in ESTIMATORS}
        rho, square = POLICY @ THETA, POLICY @ THETA**2
        by_position = (POLICY / THETA).sum(1) * TRUE - TRUE**2
        policy_aware = TRUE / rho - TRUE**2
        spread = square - rho**2
        doubly_robust = policy_aware - spread * model * (2 * TRUE - model) / rho**2
        np.testing.assert_allclose(found["ips"], by_position, rtol=1e-6)
        np.testing.assert_allclose(found["policy-aware"], policy_aware, rtol=1e-6)
        np.testing.assert_allclose(found["dr"], doubly_robust, rtol=1e-6)
        assert (found["dr"][:2] < found["policy-aware"][:2]).all()
        assert (found["policy-aware"][:2] < found["ips"][:2]).all()
        np.testing.assert_allclose(found["dm"], 0, atol=1e-12)


def test_bias_with_limited_weights_is_below_that_of_inverse_propensities_and_of_a_wrong_model():
    rho, limit = POLICY @ THETA, 2.0
    kept = np.minimum(1, limit * rho)
    found = {name: moments(estimates(made(name, model=WRONG, max_weight=limit)), TRUE)[0] for name in ESTIMATORS}
    np.testing.assert_allclose(found["dr"] - TRUE, (1 - kept) * (WRONG - TRUE), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found["policy-aware"] - TRUE, -(1 - kept) * TRUE, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found["dm"], WRONG, rtol=1e-6)
    assert (np.abs(found["dr"] - TRUE) < np.abs(found["dm"] - TRUE)).all()
    assert (np.abs(found["dr"] - TRUE) <= np.abs(found["policy-aware"] - TRUE) + 1e-9).all()


def test_dr_is_neither_ips_nor_the_model_and_is_ips_for_an_item_at_one_position():
    dr, ips, aware, dm = (estimates(made(name, model=WRONG)) for name in ("dr", "ips", "policy-aware", "dm"))
    for other in (ips, aware, dm):
        assert (np.abs(dr - other)[:2] > 0.01).all()
    np.testing.assert_allclose(dr[2, 2], ips[2, 2], rtol=1e-6)  # the third kind is always at the last position


def test_values_have_the_same_mean():
    true, value = TRUE, 3.5
    found = estimates(made("dr", model=WRONG, value=value, labels="values"), value)
    np.testing.assert_allclose(moments(found, true)[0], true * value, rtol=1e-6)
    trusted = estimates(made("dr", model=WRONG, value=value, zeta=ZETA, labels="values"), value)
    np.testing.assert_allclose(moments(trusted, true, zeta=ZETA)[0], true * value, rtol=1e-6)


def test_an_item_that_was_never_shown_rests_on_the_model_and_the_report_counts_it():
    unseen = np.array([0.9, 0.5, 1e-6])  # the cut-off is after the second position
    for limit in ("none", 20):
        method = made("dr", model=WRONG, theta=unseen, max_weight=limit)
        np.testing.assert_allclose(estimates(method)[2, 2], [WRONG[2]] * 2, rtol=1e-6)
    assert not estimates(made("policy-aware", model=WRONG, theta=unseen))[2, 2].any()
    report = method.bias([every_case()])
    assert report["item_propensity"] == {"rows": 18, "clipped": 6, "never_shown": 6}
    assert [each["name"] for each in report["warnings"]] == ["weights clipped"]
    assert "6 of 18" in report["warnings"][0]["what"]
    assert "warnings" in made("dr", model=WRONG).bias([every_case()])
    assert not made("dr", model=WRONG).bias([every_case()])["warnings"]


# --- The logging policy ---------------------------------------------------------------------------------------------


def policy_log(requests: int = 2000, seed: int = 0, items: int = 60, noise: float = 1.0) -> Log:
    """Make a log of six of some items per request, in the noisy order of their first feature; grades follow both."""
    rng = np.random.default_rng(seed)
    x = np.random.default_rng(7).normal(size=(items, 2)).astype(np.float32)
    chosen = np.concatenate([rng.choice(items, 6, replace=False) for _ in range(requests)])
    score = x[chosen, 0] + noise * rng.gumbel(size=len(chosen))
    order = np.lexsort((-score, np.repeat(np.arange(requests), 6)))
    positions = np.empty(len(chosen), np.int64)
    positions[order] = np.tile(np.arange(1, 7), requests)
    grades = np.clip(np.round(2 + x[chosen, 0] + x[chosen, 1]), 0, 4).astype(np.float32)
    return Log(
        features=x[chosen],
        offsets=np.arange(0, len(chosen) + 1, 6),
        request_ids=pa.array(np.arange(requests)),
        feature_names=("f0", "f1"),
        positions=positions,
        relevance=grades,
        item_ids=pa.array(chosen),
    )


KNOWN = dict(zip(range(1, 7), EYE_TRACKING, strict=False))


def of_log(log: Log, name: str = "ipw-pointwise", **options) -> IPW:
    inputs = MethodInputs(Label("click"), features=2, positions=tuple(KNOWN), propensities=KNOWN, binary=("click",))
    method = make_method(name, inputs, **options)
    start(method, log, TrainingOptions(device="cpu"))
    method.estimate_bias(log, user=None, sessions=0, seed=0)
    method.estimate_policy(log, seed=0)
    return method.eval()


def test_the_propensity_by_stratum_is_the_mean_over_the_positions_of_its_rows():
    log = policy_log()
    method, lists = of_log(log, estimator="policy-aware"), Lists.from_log(log)
    strata = method.policy.strata(lists).flatten().numpy()
    theta = np.array(list(KNOWN.values()))[log.positions - 1]
    found = method.propensity(lists).flatten().numpy()
    assert len(set(strata)) == STRATA
    for stratum in range(STRATA):
        np.testing.assert_allclose(found[strata == stratum], theta[strata == stratum].mean(), rtol=1e-5)


def test_the_propensity_by_item_is_that_of_its_other_impressions_and_of_its_stratum():
    log = policy_log(requests=300)
    log = replace(log, weights=np.random.default_rng(0).uniform(0.5, 2, len(log)).astype(np.float32))
    method = of_log(log, estimator="dr")
    found = method.with_targets(log).actions[PROPENSITY]
    mean = method.propensity(Lists.from_log(log)).flatten().numpy().astype(float)
    alpha, items = np.array(list(KNOWN.values()))[log.positions - 1], item_codes(log)
    rows = np.repeat(log.weights, log.lengths).astype(float)
    rows /= rows.mean()
    for row in (0, 7, 500):
        others = np.flatnonzero((items == items[row]) & (np.arange(log.rows) != row))
        prior = PRIOR_IMPRESSIONS * np.average(mean, weights=rows)
        ratio = (rows[others] @ alpha[others] + prior) / (rows[others] @ mean[others] + prior)
        assert found[row] == pytest.approx(mean[row] * ratio, rel=1e-4)
    apart = replace(log, item_ids=pa.array(np.arange(log.rows)))
    np.testing.assert_allclose(method.with_targets(apart).actions[PROPENSITY], mean, rtol=1e-5)
    assert method.with_targets(replace(log, item_ids=None)).actions.keys() == log.actions.keys()
    assert of_log(log).with_targets(log) is log


def test_items_have_a_more_precise_propensity_than_strata_if_features_do_not_explain_the_order():
    log = policy_log(requests=4000, noise=0.3)
    log = replace(log, features=np.stack([np.zeros(log.rows), log.features[:, 1]], 1).astype(np.float32))
    method = of_log(log, estimator="dr")
    theta = np.array(list(KNOWN.values()))[log.positions - 1]
    items = item_codes(log)
    true = (np.bincount(items, theta) / np.bincount(items))[items]
    by_stratum = method.propensity(Lists.from_log(log)).flatten().numpy()
    by_item = method.with_targets(log).actions[PROPENSITY]
    errors = [float(np.sqrt(np.mean((each / true - 1) ** 2))) for each in (by_stratum, by_item)]
    print(f"\nerror of the propensity by stratum {errors[0]:.1%}, by item {errors[1]:.1%}")
    assert errors[1] < 0.1
    assert errors[0] > 0.3


# --- In a simulated world -------------------------------------------------------------------------------------------


CUT_OFF = (1.0, 0.8, 0.6, *[1e-9] * 7)  # users see the first three positions


class Modelled(nn.Module):
    """A wrong model of relevance: three quarters of it."""

    def __init__(self, user: User) -> None:
        super().__init__()
        self.user = user

    def forward(self, features: Tensor) -> Tensor:
        beta = 0.75 * self.user.attracted((2 + features.sum(-1)).round().clamp(0, 4))
        return torch.stack([beta.logit(), torch.zeros_like(beta), torch.zeros_like(beta)], -1)


def test_the_relevance_of_items_has_less_bias_than_a_wrong_model_and_less_variance_than_inverse_propensities():
    """The mean r̂ of each of 60 items, a half of which is below the cut-off, in 300 requests and 200 draws.

    Bias and standard deviation are root mean squares over items, relative to relevance. The policy is estimated.
    """
    user, draws, logged = User(examination=CUT_OFF, epsilon=0.4), 200, policy_log(requests=4000, seed=1000)
    both = [(name, limit) for name in ESTIMATORS for limit in (20, 2)]
    cases = {(name, limit): of_log(logged, estimator=name, max_weight=limit) for name, limit in both}
    for method in cases.values():
        method.positions.theta.copy_(user.theta(torch.tensor(list(KNOWN))))
        method.positions.network = Modelled(user)
    ratios = {case: [] for case in cases}
    for draw in range(draws):
        log, _ = simulate_log(policy_log(requests=300, seed=draw), user, seed=draw)
        lists, items = Lists.from_log(log), log.item_ids.to_numpy()
        relevance = np.bincount(items, user.attracted(lists.relevance).flatten())
        for case, method in cases.items():
            ratios[case].append(np.bincount(items, method.relevance(lists).flatten()) / relevance)
    bias, deviation = {}, {}
    for case, each in ratios.items():
        mean, deviation[case] = np.mean(each, axis=0), float(np.sqrt(np.var(each, axis=0).mean()))
        bias[case] = float(np.sqrt(max(0.0, np.mean((mean - 1) ** 2) - deviation[case] ** 2 / draws)))
        print(f"\n{case[0]}, weights to {case[1]}: bias {bias[case]:.1%}, deviation {deviation[case]:.1%}", end="")
    assert bias["dr", 20] < 0.5 * min(bias["policy-aware", 20], 0.5 * bias["dm", 20], 0.1 * bias["ips", 20])
    assert deviation["dr", 20] < 0.95 * deviation["policy-aware", 20]
    assert bias["dr", 2] < 0.7 * min(bias["dm", 2], bias["policy-aware", 2], bias["ips", 2])


# --- Losses ---------------------------------------------------------------------------------------------------------


def in_one_list(clicks: list[float]) -> Lists:
    """Return a list of the three kinds of items, at the positions 2, 1 and 3."""
    return Lists(
        features=torch.arange(3.0, dtype=torch.float64)[None, :, None],
        where=torch.ones(1, 3, dtype=torch.bool),
        weights=torch.ones(1, dtype=torch.float64),
        positions=torch.tensor([[2, 1, 3]]),
        actions={"click": torch.tensor([clicks], dtype=torch.float64)},
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_method_learns_from_every_estimate(name, estimator):
    method = made(estimator, model=WRONG, name=name).train()
    assert not method.positions.training
    method.loss(in_one_list([0.0, 1.0, 0.0])).backward()
    assert any(bool(p.grad.abs().sum() > 0) for p in method.ranker.parameters() if p.grad is not None)
    assert all(p.grad is None for p in method.positions.parameters())
    assert method.has_bias_stage({"estimator": estimator}) == (estimator in ("dr", "dm"))
    assert method.limits_weights({"estimator": estimator}) == (estimator != "dm")


def test_the_pointwise_loss_is_least_squares_on_the_estimate():
    for name, estimator in (("ipw-pointwise", "dr"), ("doubly-robust", None)):
        method, lists = made(estimator, model=WRONG, name=name).eval(), in_one_list([0.0, 1.0, 0.0])
        expected = float((method.score(lists.features) - method.relevance(lists)).detach().square().sum())
        assert float(method.loss(lists).detach()) == pytest.approx(expected)


def test_losses_that_are_linear_in_relevance_have_a_minimum():
    """r̂ is negative where a click was expected and did not come; r̂ less its minimum has the same differences."""
    method, lists = made("dr", model=np.array([0.1, 0.9, 0.1])), in_one_list([0.0, 0.0, 1.0])
    relevance, moved = method.relevance(lists), method.relevance_above_zero(lists)
    assert float(relevance.min()) < -0.1
    assert float(moved.min()) == 0
    torch.testing.assert_close(moved - moved[0, 2], relevance - relevance[0, 2])
    ips = made("ips", model=WRONG)
    assert torch.equal(ips.relevance_above_zero(lists), ips.relevance(lists))


def test_prpo_limits_what_an_item_with_negative_relevance_loses():
    """With ips no item has negative relevance, so that only the other branch of PRPO is used."""
    lists, ranks, clip = in_one_list([0.0, 0.0, 1.0]), torch.tensor([[[1, 2, 3]], [[3, 2, 1]]]), 1.1
    method = made("dr", model=np.array([0.1, 0.9, 0.1]), name="prpo", clip=clip)
    relevance, (gains, _) = method.relevance(lists)[0], method.gains(lists, ranks)
    discount = 1 / np.log2([2, 3, 4])
    logged = discount[[1, 0, 2]]
    negative = 0
    for i, value in enumerate(relevance.tolist()):
        for k in range(3):
            ratio = discount[k] / logged[i]
            bound = min(ratio, clip) if value >= 0 else max(ratio, 1 / clip)
            negative += value < 0 and ratio < 1 / clip
            assert float(gains[0, i, k]) == pytest.approx(bound * logged[i] * value)
    assert negative == 2  # the item that was logged first gains no more than 1 - 1/clip by a lower rank
    assert float(made("ips", model=WRONG, name="prpo").relevance(lists).min()) == 0


def test_options_that_do_not_fit_are_rejected():
    with pytest.raises(OptionError, match="trust=clicks cannot be used with values"):
        made("ips", model=WRONG, trust="clicks", labels="values")
    with pytest.raises(OptionError, match="trust=clicks cannot be used with values"):
        made("ips", model=WRONG, trust="clicks", name="doubly-robust")
    with pytest.raises(OptionError, match="no option 'estimator'"):
        made("dr", model=WRONG, name="safe-ipw")
    inputs = MethodInputs(Label("click"), features=1, positions=POSITIONS, propensities=dict.fromkeys(POSITIONS, 1.0))
    with pytest.raises(OptionError, match="cannot use known propensities"):
        make_method("ipw-listwise", inputs, trust="clicks")


def test_a_run_estimates_the_policy_also_if_it_takes_the_bias_model_of_another(tmp_path):
    log, _ = simulate_log(policy_log(requests=200), User(), seed=0)
    write_log(log, tmp_path / "log.parquet")
    options = {"ranker": "mlp", "hidden": (6,), "steps": 4, "bias_steps": 4, "evaluate_every": 2, "batch": 16}
    options |= {"method.estimator": "dr", "device": "cpu"}
    reports, scores = [], []
    for name, more in (("first", {}), ("second", {"bias": str(tmp_path / "first")})):
        config = make_config(str(tmp_path / "log.parquet"), method="pl-rank", label="click", **options, **more)
        scores.append(load_model(run_training(config, tmp_path / name)).score(log))
        reports.append(read_json(tmp_path / name / "bias.json")["item_propensity"])
    assert reports[0] == reports[1]
    assert reports[0]["rows"] > 0
    np.testing.assert_array_equal(*scores)
