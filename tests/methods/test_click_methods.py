"""The methods for clicks: losses and updates, compared with explicit sums, and unbiasedness by enumeration."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from conftest import make_shown_log
from ultr.bias.estimators import SMALLEST as LEAST
from ultr.datasets.users import CascadeUser, DependentUser, TrustUser, User, simulate_log
from ultr.errors import OptionError
from ultr.lists import ListBatches, Lists
from ultr.log.labels import DEFAULT_LABEL, Label
from ultr.methods import Method, MethodInputs, make_method, thresholds
from ultr.methods.base import POSITION_SPEED
from ultr.methods.counterfactual import LEAST_RATIO, MOST_RATIO
from ultr.methods.position_model import FORGET, WARM_UP
from ultr.training.config import TrainingOptions
from ultr.training.feed import Feed
from ultr.training.loop import start, take_step

NAMES = ("dla", "regression-em", "pairwise-debias", "ipw-pointwise", "ipw-listwise", "affine")
IDS = (3, 70, 500, 1200)
BIAS = {
    "dla": {"g": [0.3, -0.5, 0.1, -1.4]},
    "regression-em": {"theta": [0.6, 0.9, 0.3, 0.1]},
    "pairwise-debias": {"plus": [1.0, 0.7, 1.4, 0.2], "minus": [1.0, 1.3, 0.4, 0.8]},
    "ipw-pointwise": {"theta": [0.6, 0.9, 0.3, 0.1]},
    "ipw-listwise": {"theta": [0.6, 0.9, 0.3, 0.1]},
    "affine": {"theta": [0.6, 0.9, 0.3, 0.15], "zeta": [0.3, 0.2, 0.1, 0.0]},
}


class FirstFeature(nn.Module):
    """A ranker whose score is a feature, so that a test can set it and compute its gradient."""

    def forward(self, features: Tensor) -> Tensor:
        return features[..., 0]


def inputs(**changes) -> MethodInputs:
    return MethodInputs(**{"label": Label("click"), "features": 1, "positions": IDS, **changes})


def make(name: str, *, bias: dict | None = None, given: dict | None = None, **options) -> Method:
    """Make a method in double precision that scores by the first feature, with a fixed bias."""
    method = make_method(name, inputs(**(given or {})), **options)
    method.ranker = FirstFeature()
    method.double()
    for key, values in (bias or {}).items():
        if key == "g":
            method.propensity.weight.data = numbers(values) / POSITION_SPEED
        else:
            holder = method if hasattr(method, key) else method.positions
            getattr(holder, key).copy_(numbers(values))
    return method


def ready(name: str, **options) -> Method:
    return make(name, bias=BIAS[name], **options)


def numbers(values) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def lists_of(scores, positions, clicks, *, where=None, weights=None) -> Lists:
    scores = numbers(scores)
    return Lists(
        features=scores[..., None],
        where=torch.ones_like(scores, dtype=torch.bool) if where is None else torch.as_tensor(where),
        weights=numbers([1.0] * len(scores) if weights is None else weights),
        positions=torch.as_tensor(positions).expand(scores.shape).clone(),
        actions={"click": numbers(clicks)},
    )


def random_lists(seed: int = 0, requests: int = 14, spread: float = 1.0) -> Lists:
    """Make lists with positions in any order, padding with clicks in any slot, and unequal weights."""
    rng = np.random.default_rng(seed)
    shape = requests, 6
    positions = np.stack([rng.permutation([*IDS, *IDS[:2]]) for _ in range(requests)])
    where = rng.random(shape) < 0.7
    where[:, 2] = True
    clicks = np.where(where, rng.random(shape) < 0.4, 1.0)
    scores = np.where(where, rng.normal(size=shape) * spread, 9.0)
    return lists_of(scores, positions, clicks, where=where, weights=rng.uniform(0.2, 3, requests))


@pytest.fixture
def lists() -> Lists:
    return random_lists()


@pytest.fixture(params=NAMES)
def name(request) -> str:
    return request.param


def single(method: Method, lists: Lists) -> tuple[Method, Lists]:
    """Return the lists in single precision, as in training."""
    actions = {key: values.float() for key, values in lists.actions.items()}
    return method.float(), replace(
        lists, features=lists.features.float(), weights=lists.weights.float(), actions=actions
    )


# --- Explicit sums ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    score: float
    position: int
    label: float
    held: float  # the score that weights are computed from

    @property
    def place(self) -> int:
        return IDS.index(self.position)

    @property
    def clicked(self) -> bool:
        return self.label > 0


Requests = list[tuple[float, list[Item]]]


def requests_of(lists: Lists, *, held: Lists | None = None, label: str = "click") -> Requests:
    labels = Label(label)(lists.actions)
    found = []
    for u in range(len(lists)):
        items = [
            Item(
                lists.features[u, i, 0].item(),
                lists.positions[u, i].item(),
                labels[u, i].item(),
                (held or lists).features[u, i, 0].item(),
            )
            for i in range(lists.where.shape[1])
            if lists.where[u, i]
        ]
        found.append((lists.weights[u].item(), items))
    return found


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def log_sum(values: list[float]) -> float:
    return math.log(sum(math.exp(value) for value in values))


def written_dla(items: list[Item], g: list[float], most: float, held: dict) -> float:
    total, top = 0.0, min(items, key=lambda item: item.position)
    for i in items:
        if i.clicked:
            seen = min(most, math.exp(held["g"][0] - held["g"][i.place]))
            relevant = min(most, math.exp(top.held - i.held))
            total += seen * (log_sum([j.score for j in items]) - i.score)
            total += relevant * (log_sum([g[j.place] for j in items]) - g[i.place])
    return total


def posterior(item: Item, theta: float) -> float:
    beta = sigmoid(item.held)
    return 1.0 if item.clicked else (1 - theta) * beta / (1 - theta * beta)


def written_regression(items: list[Item], theta: list[float]) -> float:
    total = 0.0
    for i in items:
        target = posterior(i, theta[i.place])
        total -= target * math.log(sigmoid(i.score)) + (1 - target) * math.log(1 - sigmoid(i.score))
    return total


def pair_losses(items: list[Item]) -> list[tuple[Item, Item, float]]:
    """Yield pairs of a clicked and an unclicked item, with |ΔNDCG| log(1 + exp(-gap))."""
    rank = {id(i): 1 + sum(j.held > i.held for j in items) for i in items}
    ideal = sum(1 / math.log2(1 + r) for r in range(1, 1 + sum(i.clicked for i in items)))
    return [
        (i, j, abs(1 / math.log2(1 + rank[id(i)]) - 1 / math.log2(1 + rank[id(j)])) / ideal * pain(i, j))
        for i, j in product(items, items)
        if i.clicked and not j.clicked
    ]


def pain(i: Item, j: Item) -> float:
    return math.log(1 + math.exp(j.score - i.score))


def written_pairs(items: list[Item], plus: list[float], minus: list[float]) -> float:
    return sum(loss / (plus[i.place] * minus[j.place]) for i, j, loss in pair_losses(items))


def written_squares(items: list[Item], theta: list[float], most: float, values: bool) -> float:
    worth = [i.label if values else float(i.clicked) for i in items]
    return sum((i.score - c * min(most, 1 / theta[i.place])) ** 2 for i, c in zip(items, worth, strict=True))


def written_softmax(items: list[Item], theta: list[float], most: float, values: bool) -> float:
    normaliser, worth = log_sum([j.score for j in items]), [i.label if values else float(i.clicked) for i in items]
    return sum(c * min(most, 1 / theta[i.place]) * (normaliser - i.score) for i, c in zip(items, worth, strict=True))


def written_affine(items: list[Item], theta: list[float], zeta: list[float], most: float) -> float:
    total = 0.0
    for i in items:
        weight = min(most, 1 / (theta[i.place] - zeta[i.place]))
        total += (i.score - (i.clicked - zeta[i.place]) * weight) ** 2
    return total


def written_out(
    name: str, requests: Requests, *, bias: dict | None = None, held: dict | None = None, most=20.0, values=False
) -> float:
    """Compute the loss of a method from its definition; `held` is the bias that weights are computed from."""
    bias = bias or BIAS[name]

    def of_list(items: list[Item]) -> float:
        match name:
            case "dla":
                return written_dla(items, bias["g"], most, held or bias)
            case "regression-em":
                return written_regression(items, bias["theta"])
            case "pairwise-debias":
                return written_pairs(items, bias["plus"], bias["minus"])
            case "ipw-pointwise":
                return written_squares(items, bias["theta"], most, values)
            case "ipw-listwise":
                return written_softmax(items, bias["theta"], most, values)
            case _:
                return written_affine(items, bias["theta"], bias["zeta"], most)

    return sum(weight * of_list(items) for weight, items in requests) / sum(weight for weight, _ in requests)


@pytest.mark.parametrize("seed", range(3))
def test_losses_equal_explicit_sums(name, seed):
    lists = random_lists(seed)
    method, given_lists = single(ready(name), lists)
    assert method.loss(given_lists).item() == pytest.approx(written_out(name, requests_of(lists)), rel=1e-4)


@pytest.mark.parametrize("name", ["dla", "ipw-pointwise", "ipw-listwise", "affine"])
def test_weights_are_at_most_max_weight(name, lists):
    loss = ready(name, max_weight=1.5).loss(lists).item()
    assert loss == pytest.approx(written_out(name, requests_of(lists), most=1.5), rel=1e-9)
    assert loss != pytest.approx(written_out(name, requests_of(lists)), rel=1e-2)


def test_a_click_at_a_rarely_examined_position_counts_twenty_times():
    click = lists_of([[0.0]], [[1200]], [[1.0]])
    rare = {"theta": [0.5, 0.5, 0.5, 1e-9]}
    assert make("ipw-pointwise", bias=rare).loss(click).item() == pytest.approx(20**2)
    assert make("affine", bias={**rare, "zeta": [0.0] * 4}).loss(click).item() == pytest.approx(20**2)


def test_affine_learns_nothing_from_positions_where_relevance_does_not_raise_clicks():
    click = lists_of([[0.0]], [[70]], [[1.0]])
    method = make("affine", bias={"theta": [0.6, 0.2, 0.6, 0.6], "zeta": [0.1, 0.4, 0.1, 0.1]})
    assert method.loss(click).item() == 0


def test_positions_never_seen_count_as_the_nearest(name, lists):
    method, near = ready(name), torch.tensor([2, 80, 300, 10**9])
    index = method.index if hasattr(method, "index") else method.positions.index
    moved = replace(lists, positions=near[index(lists.positions)])
    assert method.loss(moved).item() == pytest.approx(method.loss(lists).item(), rel=1e-12)


def test_the_order_of_rows_is_not_used_as_position(name):
    scores, clicks = [[0.4, -0.2, 0.9, 0.0]], [[0.0, 1.0, 1.0, 0.0]]
    down, up = lists_of(scores, list(IDS), clicks), lists_of(scores, list(IDS[::-1]), clicks)
    method = ready(name)
    assert method.loss(down).item() == pytest.approx(written_out(name, requests_of(down)), rel=1e-9)
    assert method.loss(up).item() == pytest.approx(written_out(name, requests_of(up)), rel=1e-9)
    assert method.loss(up).item() != pytest.approx(method.loss(down).item(), rel=1e-3)


# --- Gradients ----------------------------------------------------------------------------------------------------


def with_grad(lists: Lists) -> Lists:
    return replace(lists, features=lists.features.clone().requires_grad_())


def shifted(lists: Lists, place: tuple[int, int], by: float) -> Lists:
    features = lists.features.clone()
    features[place] += by
    return replace(lists, features=features)


def test_no_gradient_for_scores_flows_through_weights(name):
    lists, step = random_lists(requests=4), 1e-5
    leaf = with_grad(lists)
    ready(name).loss(leaf).backward()
    through = 0.0
    for place in map(tuple, torch.nonzero(lists.where).tolist()):
        up, down = shifted(lists, place, step), shifted(lists, place, -step)

        def slope(held_up, held_down, up=up, down=down):
            ends = requests_of(up, held=held_up), requests_of(down, held=held_down)
            return (written_out(name, ends[0]) - written_out(name, ends[1])) / (2 * step)

        held = slope(lists, lists)
        assert leaf.features.grad[(*place, 0)].item() == pytest.approx(held, rel=1e-5, abs=1e-8)
        through = max(through, abs(slope(up, down) - held))
    if name in ("dla", "regression-em"):
        assert through > 1e-3


def test_no_gradient_for_propensities_flows_through_weights(lists):
    method, step, requests = ready("dla"), 1e-5, requests_of(lists)
    method.loss(lists).backward()
    for k in range(4):
        ends = [[g + sign * step * (j == k) for j, g in enumerate(BIAS["dla"]["g"])] for sign in (1, -1)]
        above, below = (written_out("dla", requests, bias={"g": g}, held=BIAS["dla"]) for g in ends)
        slope = method.propensity.weight.grad[k].item() / POSITION_SPEED
        assert slope == pytest.approx((above - below) / (2 * step), rel=1e-5)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "dla"])
def test_only_dla_learns_bias_by_gradients(name):
    assert not list(ready(name).parameters())


# --- Unbiasedness, by enumeration ---------------------------------------------------------------------------------

THETA = {3: 0.9, 70: 0.5, 500: 0.3, 1200: 0.15}
SHOWN = (500, 3, 1200)
ORDERS = (SHOWN, (3, 70, 500), (70, 1200, 3))
RHO = (0.7, 0.2, 0.4)
SCORES = (0.3, -0.6, 1.1)


def outcomes(scores=SCORES, *, positions=SHOWN, rho=RHO, believed=(1.0, 0.0)) -> tuple[Lists, Tensor]:
    """Make a list in every hidden state (examined, relevant, clicked), weighted by its probability."""
    clicks, relevant, weights = [], [], []
    states = list(product((0, 1), repeat=3))
    for state in product(states, repeat=len(positions)):
        chance = 1.0
        for (e, r, c), k, p in zip(state, positions, rho, strict=True):
            chance *= (THETA[k] if e else 1 - THETA[k]) * (p if r else 1 - p)
            chance *= believed[1 - r] if c else 1 - believed[1 - r]
        if chance:
            clicks.append([e * c for e, r, c in state])
            relevant.append([r for e, r, c in state])
            weights.append(chance)
    assert sum(weights) == pytest.approx(1)
    return lists_of([scores] * len(clicks), positions, clicks, weights=weights), numbers(relevant)


def joined(*parts: Lists) -> Lists:
    return Lists(
        features=torch.cat([part.features for part in parts]),
        where=torch.cat([part.where for part in parts]),
        weights=torch.cat([part.weights for part in parts]),
        positions=torch.cat([part.positions for part in parts]),
        actions={"click": torch.cat([part.actions["click"] for part in parts])},
    )


def mean_gradient(method: Method, lists: Lists) -> list[float]:
    leaf = with_grad(lists)
    method.loss(leaf).backward()
    return leaf.features.grad[..., 0].sum(0).tolist()


def known(name: str, **options) -> Method:
    return make(name, given={"propensities": THETA}, **options)


def test_the_mean_gradient_of_pointwise_ipw_is_that_of_true_relevance():
    lists, relevant = outcomes()
    truth = [
        sum(w * 2 * (s - r[i]) for w, r in zip(lists.weights, relevant, strict=True)) for i, s in enumerate(SCORES)
    ]
    assert mean_gradient(known("ipw-pointwise"), lists) == pytest.approx([float(t) for t in truth], rel=1e-6)
    naive = make("ipw-pointwise", bias={"theta": [1.0] * 4})
    assert mean_gradient(naive, lists) != pytest.approx([float(t) for t in truth], rel=1e-2)


def test_the_mean_loss_of_listwise_ipw_is_that_of_true_relevance():
    lists, relevant = outcomes()
    normaliser = log_sum(list(SCORES))
    truth = sum(
        w * sum(r_i * (normaliser - s) for r_i, s in zip(r.tolist(), SCORES, strict=True))
        for w, r in zip(lists.weights.tolist(), relevant, strict=True)
    )
    assert known("ipw-listwise").loss(lists).item() == pytest.approx(truth, rel=1e-6)
    assert make("ipw-listwise", bias={"theta": [1.0] * 4}).loss(lists).item() != pytest.approx(truth, rel=1e-2)


def test_the_label_of_affine_has_the_mean_of_relevance_for_clicks_from_trust():
    trust, mistrust = 0.95, 0.3
    lists, _ = outcomes(believed=(trust, mistrust))
    bias = {"theta": [trust * THETA[k] for k in IDS], "zeta": [mistrust * THETA[k] for k in IDS]}
    gradient = mean_gradient(make("affine", bias=bias), lists)
    labels = [s - slope / 2 for s, slope in zip(SCORES, gradient, strict=True)]
    assert labels == pytest.approx(RHO, rel=1e-6)
    ipw = mean_gradient(make("ipw-pointwise", bias={"theta": bias["theta"]}), lists)
    assert [s - slope / 2 for s, slope in zip(SCORES, ipw, strict=True)] != pytest.approx(RHO, rel=0.1)


@pytest.mark.parametrize("loss", ["pointwise", "listwise"])
@pytest.mark.parametrize("user", [TrustUser(eta=0.7), User(attraction=RHO[:2], max_grade=1)], ids=["trust", "pbm"])
def test_affine_with_known_theta_and_trust_has_the_mean_loss_of_true_relevance(user, loss):
    """The clicks are enumerated with the probabilities of the users, from which the method takes α and ζ."""
    positions = torch.tensor([1, 2, 5, 10])
    grades = numbers([user.max_grade, 0.0, 1.0, 0.0])
    truth = user.attracted(grades)
    chances = user.click_probability(grades, positions)
    outcomes = numbers(list(product((0.0, 1.0), repeat=4)))
    weights = torch.where(outcomes > 0, chances, 1 - chances).prod(-1)
    given = {"positions": tuple(positions.tolist()), "user": user}
    method = make("affine", given=given, loss=loss, theta="oracle", max_weight="none")
    scores = numbers([0.3, -0.8, 1.1, 0.2])
    lists = lists_of(scores.expand(16, 4), positions, outcomes, weights=weights)
    assert weights @ method.relevance(lists) == pytest.approx(truth.numpy(), rel=1e-5, abs=1e-6)
    if loss == "pointwise":
        expected = ((scores - truth) ** 2).sum() + (weights @ (method.relevance(lists) - truth) ** 2).sum()
    else:  # the smallest estimate of each list is taken off if it is negative
        taken = -weights @ method.relevance(lists).amin(-1).clamp(max=0)
        expected = ((truth + taken) * -scores.log_softmax(-1)).sum()
    assert float(method.loss(lists)) == pytest.approx(float(expected), rel=1e-5)


def test_the_listwise_loss_of_affine_is_that_of_listwise_ipw_with_trust(lists):
    bias = BIAS["affine"]
    affine, ipw = make("affine", bias=bias, loss="listwise"), make("ipw-listwise", bias=bias, trust="clicks")
    assert float(affine.loss(lists)) == float(ipw.loss(lists))
    assert float(affine.loss(lists)) != float(make("affine", bias=bias).loss(lists))


def test_clipping_lowers_the_mean_below_relevance():
    lists, _ = outcomes()
    labels = [
        s - d / 2 for s, d in zip(SCORES, mean_gradient(known("ipw-pointwise", max_weight=2), lists), strict=True)
    ]
    expected = [min(2, 1 / THETA[k]) * THETA[k] * p for k, p in zip(SHOWN, RHO, strict=True)]
    assert labels == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("positions", [SHOWN, (70, 500, 3), (1200, 500, 70)])
def test_dla_is_stationary_at_relevance_and_propensities(positions):
    lists, _ = outcomes([math.log(p) + 0.8 for p in RHO], positions=positions)
    method = make("dla", bias={"g": [math.log(THETA[k]) - 0.3 for k in IDS]}, max_weight=1e6)
    assert mean_gradient(method, lists) == pytest.approx([0.0] * 3, abs=1e-7)
    assert method.propensity.weight.grad.tolist() == pytest.approx([0.0] * 4, abs=1e-7)


def test_dla_is_not_stationary_at_wrong_propensities():
    lists, _ = outcomes([math.log(p) for p in RHO])
    method = make("dla", bias={"g": [0.0] * 4})
    assert max(map(abs, mean_gradient(method, lists))) > 1e-2
    assert method.propensity.weight.grad.abs().max() > 1e-2


def test_dla_learns_the_propensities_of_a_small_example():
    world = joined(*(outcomes([math.log(p) for p in RHO], positions=k)[0] for k in ORDERS))
    method = make("dla", max_weight=1e6)
    optimizer = torch.optim.Adam([method.propensity.weight], lr=0.2 / POSITION_SPEED)
    for _ in range(80):
        optimizer.zero_grad()
        method.loss(world).backward()
        optimizer.step()
    found = method.bias([])
    assert found["positions"] == list(IDS)
    assert found["theta"] == pytest.approx([THETA[k] / THETA[3] for k in IDS], rel=0.02)


# --- Regression EM ------------------------------------------------------------------------------------------------


def updates(method: Method, *batches: Lists) -> Method:
    with torch.no_grad():
        for lists in batches:
            method.update(lists)
    return method


@pytest.mark.parametrize(("score", "k"), [(-2.0, 3), (0.0, 500), (3.0, 70)])
def test_the_target_is_one_for_a_click_and_the_posterior_else(score, k):
    theta, beta = BIAS["regression-em"]["theta"][IDS.index(k)], sigmoid(score)
    missed, absent = (1 - theta) * beta, 1 - beta
    for click, target in ((1.0, 1.0), (0.0, missed / (missed + absent))):
        slope = mean_gradient(ready("regression-em"), lists_of([[score]], [[k]], [[click]]))[0]
        assert beta - slope == pytest.approx(target, rel=1e-6)


def test_sampled_targets_are_draws_with_the_mean_of_soft_ones():
    torch.manual_seed(0)
    scores, positions, clicks, draws = [0.5, -0.3, 1.2], [500, 3, 70], [0.0, 1.0, 0.0], 20_000
    one = lists_of([scores], positions, [clicks])
    many = with_grad(lists_of([scores] * draws, positions, [clicks] * draws))
    ready("regression-em", targets="sampled").loss(many).backward()
    drawn = many.features.detach()[..., 0].sigmoid() - many.features.grad[..., 0] * draws
    torch.testing.assert_close(drawn, drawn.round())
    soft = mean_gradient(ready("regression-em"), one)
    for i, slope in enumerate(soft):
        target = sigmoid(scores[i]) - slope
        error = math.sqrt(max(0.0, target * (1 - target)) / draws)
        assert drawn[:, i].mean().item() == pytest.approx(target, abs=4 * error + 1e-6)
    assert 0.1 < drawn[:, 0].mean() < 0.9


def written_theta(batches: list[Lists], scale: float) -> list[float]:
    """Return θ after batches: ratios of click rates, then Σ [c>0]/(1-θβ) / Σ β/(1-θβ) of averages over batches."""
    theta, averages = [scale] * 4, [[0.0] * 4 for _ in range(4)]
    for n, lists in enumerate(batches, start=1):
        requests = requests_of(lists)
        total = sum(weight for weight, items in requests for _ in items)
        found = [[0.0] * 4 for _ in range(4)]
        for weight, items in requests:
            for i in items:
                missed = 1 - theta[i.place] * sigmoid(i.score)
                for row, term in zip(found, (1, i.clicked, i.clicked / missed, sigmoid(i.score) / missed), strict=True):
                    row[i.place] += weight / total * term
        share = n**-FORGET
        averages = [
            [(1 - share) * a + share * b for a, b in zip(*rows, strict=True)]
            for rows in zip(averages, found, strict=True)
        ]
        shown, clicks, scored, expected = averages
        rates = [c / s if s else 0.0 for c, s in zip(clicks, shown, strict=True)]
        after = rates if n <= WARM_UP else [a / b if b else 0.0 for a, b in zip(scored, expected, strict=True)]
        after = [scale * value / max(after) for value in after]
        theta = [min(1.0, max(LEAST, value)) if s else old for value, s, old in zip(after, shown, theta, strict=True)]
    return theta


@pytest.mark.parametrize("count", [1, 2, WARM_UP, WARM_UP + 1, WARM_UP + 5])
def test_theta_equals_explicit_sums(count):
    batches = [random_lists(seed, requests=5) for seed in range(count)]
    method = updates(make("regression-em", scale=0.8), *batches)
    assert method.positions.theta.tolist() == pytest.approx(written_theta(batches, 0.8), rel=1e-5)


def test_theta_is_estimated_if_relevance_is_known():
    scores = [math.log(p / (1 - p)) for p in RHO]
    world = joined(*(outcomes(scores, positions=k)[0] for k in ORDERS))
    method = updates(make("regression-em", scale=0.9), *[world] * 300)
    assert method.positions.theta.tolist() == pytest.approx(list(THETA.values()), rel=1e-2)
    assert method.bias([])["theta"] == pytest.approx(method.positions.theta.tolist(), abs=1e-5)


def test_the_largest_theta_is_fixed_even_if_another_position_has_most_clicks():
    rho = (0.05, 0.5, 0.9)
    world, _ = outcomes([math.log(p / (1 - p)) for p in rho], positions=(3, 70, 500), rho=rho)
    method = updates(make("regression-em", scale=0.9), *[world] * 300)
    assert method.positions.theta[:3].tolist() == pytest.approx([0.9, 0.5, 0.3], rel=1e-2)


@pytest.mark.parametrize("scale", [0.4, 1.0])
def test_the_largest_theta_is_fixed_at_its_scale(scale):
    method = make("regression-em", scale=scale)
    for seed in range(WARM_UP + 10):
        updates(method, random_lists(seed))
        assert method.positions.theta.max().item() == pytest.approx(scale)


def test_lists_without_clicks_count():
    clicked = lists_of([[0.1, 0.4]] * 3, [3, 70], [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    more = lists_of(
        [[0.1, 0.4]] * 6, [[3, 70]] * 3 + [[1200, 70]] * 3, [*clicked.actions["click"].tolist(), *[[0, 0]] * 3]
    )
    for count in (1, WARM_UP + 3):
        with_them, without = (updates(make("regression-em"), *[batch] * count) for batch in (more, clicked))
        before, after = without.positions.theta[1].item(), with_them.positions.theta[1].item()
        assert after < 0.9 * before
    assert make("regression-em").loss(more).item() != pytest.approx(
        make("regression-em").loss(clicked).item(), rel=0.01
    )


def test_known_propensities_are_fixed(lists):
    method = known("regression-em")
    before = copy.deepcopy(method.state_dict())
    updates(method, *[lists] * 30)
    assert all(torch.equal(before[key], value) for key, value in method.state_dict().items())
    assert method.positions.theta.tolist() == pytest.approx(list(THETA.values()))
    assert method.bias([])["theta_from"] == "known propensities"


@pytest.mark.parametrize("name", ["ipw-pointwise", "ipw-listwise"])
def test_known_propensities_are_not_estimated_again(name):
    log, _ = simulate_log(make_shown_log(), User(), seed=0)
    given_theta = {k: 1 / k for k in range(1, 13)}
    method = make_method(name, inputs(positions=tuple(given_theta), propensities=given_theta, features=3))
    method.estimate_bias(log, user=None, sessions=0, seed=0)
    assert method.positions.theta.tolist() == pytest.approx(list(given_theta.values()))


# --- Pairwise debiasing -------------------------------------------------------------------------------------------


def pair_sums(lists: Lists, plus: list[float], minus: list[float]) -> list[list[float]]:
    """Return, as shares, loss over t⁻ by position of the click, loss over t⁺ by the other, and impressions."""
    sums, requests = [[0.0] * 4 for _ in range(3)], requests_of(lists)
    total = sum(weight for weight, items in requests for _ in items)
    for weight, items in requests:
        for i, j, loss in pair_losses(items):
            sums[0][i.place] += weight * loss / minus[j.place] / total
            sums[1][j.place] += weight * loss / plus[i.place] / total
        for i in items:
            sums[2][i.place] += weight / total
    return sums


def ratios(sums: list[list[float]], power: float = 1.0) -> tuple[list[float], list[float]]:
    def relative(losses: list[float]) -> list[float]:
        means = [loss / shown for loss, shown in zip(losses, sums[2], strict=True)]
        return [(mean / means[0]) ** power for mean in means]

    return relative(sums[0]), relative(sums[1])


def mixed(first: list[list[float]], second: list[list[float]], share: float) -> list[list[float]]:
    return [
        [(1 - share) * a + share * b for a, b in zip(*rows, strict=True)] for rows in zip(first, second, strict=True)
    ]


@pytest.mark.parametrize("regularisation", [0.0, 1.0, 2.5])
def test_an_update_is_the_ratio_of_sums_to_the_power_of_one_over_p_plus_one(lists, regularisation):
    method = updates(ready("pairwise-debias", regularisation=regularisation), lists)
    plus, minus = ratios(pair_sums(lists, **BIAS["pairwise-debias"]), 1 / (regularisation + 1))
    assert method.plus.tolist() == pytest.approx(plus, rel=1e-6)
    assert method.minus.tolist() == pytest.approx(minus, rel=1e-6)
    assert (method.plus[0], method.minus[0]) == (1, 1)
    assert method.bias([])["t_plus"] == pytest.approx(plus, abs=1e-5)


def test_ratios_are_of_averages_and_not_averages_of_ratios():
    calm, loud = random_lists(1), random_lists(2, spread=6.0)
    method = updates(make("pairwise-debias"), calm)
    first = pair_sums(calm, [1.0] * 4, [1.0] * 4)
    second = pair_sums(loud, method.plus.tolist(), method.minus.tolist())
    updates(method, loud)
    share = 2**-FORGET
    plus, minus = ratios(mixed(first, second, share))
    assert method.plus.tolist() == pytest.approx(plus, rel=1e-6)
    assert method.minus.tolist() == pytest.approx(minus, rel=1e-6)
    averaged = [(1 - share) * a + share * b for a, b in zip(ratios(first)[0], ratios(second)[0], strict=True)]
    assert method.plus.tolist() != pytest.approx(averaged, rel=0.05)


def without_position(lists: Lists, k: int) -> Lists:
    return replace(lists, where=lists.where & (lists.positions != k))


def assert_bias(method: Method, plus: list[float], minus: list[float]) -> None:
    assert method.plus.tolist() == pytest.approx(plus, rel=1e-6)
    assert method.minus.tolist() == pytest.approx(minus, rel=1e-6)


@pytest.mark.parametrize("regularisation", [0.0, 1.5])
def test_without_a_loss_at_the_first_position_nothing_changes(lists, regularisation):
    absent = without_position(lists, IDS[0])
    method = updates(ready("pairwise-debias", regularisation=regularisation), *[absent] * 3)
    assert_bias(method, **BIAS["pairwise-debias"])
    assert math.isfinite(method.loss(absent).item())


def test_each_ratio_changes_after_its_first_loss_at_the_first_position():
    never = lists_of([[0.2, 0.5, -0.1]], [70, 3, 500], [[1.0, 0.0, 1.0]])
    method = updates(ready("pairwise-debias"), never)
    assert method.plus.tolist() == pytest.approx(BIAS["pairwise-debias"]["plus"])
    assert method.minus.tolist() == pytest.approx(BIAS["pairwise-debias"]["minus"])
    always = lists_of([[0.2, 0.5, -0.1]], [70, 3, 500], [[0.0, 1.0, 0.0]])
    updates(method, always)
    assert torch.isfinite(method.state_dict()["sums"]).all()
    assert method.plus[0] == method.minus[0] == 1


def test_a_later_batch_without_the_first_position_leaves_its_mean(lists):
    method = updates(make("pairwise-debias"), lists)
    absent = without_position(random_lists(5), IDS[0])
    first = pair_sums(lists, [1.0] * 4, [1.0] * 4)
    second = pair_sums(absent, method.plus.tolist(), method.minus.tolist())
    updates(method, absent)
    assert_bias(method, *ratios(mixed(first, second, 2**-FORGET)))


def test_positions_never_shown_keep_their_values(lists):
    absent = without_position(lists, IDS[2])
    method = updates(ready("pairwise-debias"), absent, absent)
    assert method.plus[2].item() == pytest.approx(BIAS["pairwise-debias"]["plus"][2])
    assert method.minus[2].item() == pytest.approx(BIAS["pairwise-debias"]["minus"][2])
    assert method.plus[1].item() != pytest.approx(BIAS["pairwise-debias"]["plus"][1])


def test_positions_absent_in_a_batch_keep_their_mean_loss(lists):
    method = updates(make("pairwise-debias"), lists)
    before = (method.sums[:2] / method.sums[2]).clone()
    updates(method, without_position(random_lists(5), IDS[2]))
    torch.testing.assert_close((method.sums[:2] / method.sums[2])[:, 2], before[:, 2])
    means = method.sums[0] / method.sums[2]
    torch.testing.assert_close(method.plus[2], means[2] / means[0])


@pytest.mark.parametrize("kind", ["lists of one", "no clicks", "all clicked"])
def test_lists_without_pairs_change_nothing(lists, kind):
    clicks = lists.actions["click"]
    if kind == "lists of one":
        lists = replace(lists, where=lists.where & (torch.arange(6) == 2))
    else:
        lists = lists.with_actions(
            {"click": torch.zeros_like(clicks) if kind == "no clicks" else torch.ones_like(clicks)}
        )
    method = updates(ready("pairwise-debias"), lists, lists)
    assert_bias(method, **BIAS["pairwise-debias"])
    leaf = with_grad(lists)
    loss = method.loss(leaf)
    loss.backward()
    assert loss.item() == 0
    assert not leaf.features.grad.any()


def test_ratios_stay_within_bounds():
    far = lists_of([[200.0, -200.0, 0.0], [200.0, -200.0, 0.0]], [3, 70, 500], [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    method = updates(make("pairwise-debias"), far)
    assert method.plus[1] == MOST_RATIO
    assert torch.isfinite(method.loss(far))


# --- Labels and options -------------------------------------------------------------------------------------------


def with_dwell(lists: Lists) -> Lists:
    clicks = lists.actions["click"]
    dwell = clicks * torch.linspace(0.5, 90, clicks.numel()).view(clicks.shape).double()
    return lists.with_actions({"click": clicks, "dwell": dwell})


def test_a_continuous_label_counts_as_a_click_if_it_is_above_zero(name, lists):
    lists = with_dwell(lists)
    clicks, dwell = ready(name), ready(name, given={"label": Label(DEFAULT_LABEL)})
    assert torch.equal(clicks.loss(lists), dwell.loss(lists))
    updates(clicks, lists)
    updates(dwell, lists)
    assert all(torch.equal(a, b) for a, b in zip(clicks.buffers(), dwell.buffers(), strict=True))
    assert thresholds(name, DEFAULT_LABEL, {})
    assert not thresholds(name, "click", {})
    assert not thresholds(name, " click ", {})


@pytest.mark.parametrize("name", ["ipw-pointwise", "ipw-listwise"])
def test_ipw_can_weight_the_label_itself(name, lists):
    lists = with_dwell(lists)
    method = ready(name, given={"label": Label(DEFAULT_LABEL)}, labels="values")
    requests = requests_of(lists, label=DEFAULT_LABEL)
    assert method.loss(lists).item() == pytest.approx(written_out(name, requests, values=True), rel=1e-6)
    assert method.loss(lists).item() != pytest.approx(ready(name).loss(lists).item(), rel=0.01)
    assert not thresholds(name, DEFAULT_LABEL, {"labels": "values"})
    assert thresholds(name, DEFAULT_LABEL, {"labels": "clicks"})


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("dla", {"max_weight": 0.9}, "'max_weight' must be none or"),
        ("dla", {"max_weight": "nan"}, "'max_weight' must be none or"),
        ("dla", {"max_weights": 5}, "no option 'max_weights'.*did you mean 'max_weight'"),
        ("regression-em", {"targets": "hard"}, "'targets' must be one of soft, sampled"),
        ("regression-em", {"scale": 0}, "'scale' must be estimated or"),
        ("regression-em", {"scale": 1.01}, "'scale' must be estimated or"),
        ("regression-em", {"scale": "nan"}, "'scale' must be estimated or"),
        ("regression-em", {"target": "soft"}, "no option 'target'.*did you mean 'targets'"),
        ("pairwise-debias", {"regularisation": -0.1}, "'regularisation' must be at least 0"),
        ("pairwise-debias", {"regularisation": "inf"}, "'regularisation' must be finite"),
        ("pairwise-debias", {"regularization": 1}, "no option 'regularization'.*did you mean 'regularisation'"),
        ("ipw-pointwise", {"theta": "regression"}, "'theta' must be one of auto, strata, items"),
        ("ipw-pointwise", {"labels": "raw"}, "'labels' must be one of clicks, values"),
        ("ipw-listwise", {"max_weight": "many"}, "'max_weight' must be none or"),
        ("ipw-listwise", {"label": "values"}, "no option 'label'.*did you mean 'labels'"),
        ("affine", {"max_weight": 0}, "'max_weight' must be none or"),
        ("affine", {"theta": "guess"}, "'theta' must be one of auto, strata, items"),
        ("affine", {"labels": "values"}, "no option 'labels'"),
    ],
)
def test_wrong_options_are_rejected(name, options, match):
    with pytest.raises(OptionError, match=f"(?s){match}"):
        make_method(name, inputs(), **options)


@pytest.mark.parametrize("name", ["affine", "ipw-listwise", "direct", "pairwise-em"])
def test_known_theta_needs_simulated_users_who_look_by_position(name):
    with pytest.raises(OptionError, match="theta=oracle needs simulated users; pass --users pbm"):
        make_method(name, inputs(), theta="oracle")
    for user in (CascadeUser(), DependentUser()):
        with pytest.raises(OptionError, match="depends on the position alone"):
            make_method(name, inputs(user=user), theta="oracle")


def test_known_theta_is_that_of_the_users_with_or_without_their_trust():
    user, ids = TrustUser(eta=0.5), torch.tensor(IDS)
    for name in ("ipw-pointwise", "doubly-robust", "pl-rank"):
        for trust in ("none", "clicks"):
            positions = make_method(name, inputs(user=user), theta="oracle", trust=trust).positions
            trusted = trust == "clicks"
            theta, k = user.theta(ids), ids.float()
            torch.testing.assert_close(positions.theta, theta * user.trust(k) if trusted else theta)
            torch.testing.assert_close(positions.zeta, theta * user.mistrust(k) * trusted)
    model = make_method("pairwise-em", inputs(user=user), theta="oracle", trust="clicks").bias_model
    torch.testing.assert_close(torch.stack([model.theta, model.zeta]), torch.stack(user.click_levels(ids)))
    assert torch.equal(make_method("direct", inputs(user=user), theta="oracle").positions.theta, user.theta(ids))


def test_affine_rejects_known_propensities():
    with pytest.raises(OptionError, match="cannot use known propensities"):
        known("affine")


# --- Training and any lists ---------------------------------------------------------------------------------------


def test_steps_use_one_optimizer_at_the_learning_rate_of_the_schedule():
    log, _ = simulate_log(make_shown_log(), User(), seed=0)
    torch.manual_seed(0)
    theta = {k: 1 / k for k in range(1, 13)}
    given_inputs = inputs(features=3, positions=tuple(theta), propensities=theta, ranker_options={"hidden": (4,)})
    method = make_method("ipw-pointwise", given_inputs)
    options = TrainingOptions(steps=5, lr=0.1, schedule="linear", optimizer="adagrad", clip=0.0, device="cpu")
    state = start(method, log, options)
    other, feed = copy.deepcopy(method), Feed(ListBatches(log), batch=16, seed=0)
    parameters = list(other.parameters())
    squares = [torch.zeros_like(p) for p in parameters]
    for step in range(5):
        take_step(state, feed(step), options)
        slopes = torch.autograd.grad(other.loss(feed(step)), parameters)
        squares = [total + slope**2 for total, slope in zip(squares, slopes, strict=True)]
        for p, total, slope in zip(parameters, squares, slopes, strict=True):
            p.data -= 0.1 * (1 - step / 5) * slope / (total.sqrt() + 1e-10)
    for found, expected in zip(method.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@st.composite
def any_lists(draw) -> Lists:
    requests, length = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    size = requests * length

    def grid(values) -> Tensor:
        return torch.tensor(draw(st.lists(values, min_size=size, max_size=size))).view(requests, length)

    where = grid(st.booleans())
    where[:, draw(st.integers(0, length - 1))] = True
    return Lists(
        features=grid(st.floats(-1e3, 1e3, width=32))[..., None],
        where=where,
        weights=torch.tensor(draw(st.lists(st.floats(0.125, 8), min_size=requests, max_size=requests))),
        positions=grid(st.integers(0, 2000) | st.sampled_from(IDS)),
        actions={"click": grid(st.sampled_from([0.0, 1.0]))},
    )


@pytest.mark.parametrize("name", NAMES)
@given(lists=any_lists(), more=any_lists())
@settings(max_examples=25)
def test_any_lists_give_finite_losses_and_bias(name, lists, more):
    method = updates(make(name).float(), lists, more, lists)
    leaf = with_grad(more)
    loss = method.loss(leaf)
    loss.backward()
    assert 0 <= loss.item() < math.inf
    assert torch.isfinite(leaf.features.grad).all()
    for key, values in method.named_buffers():
        assert torch.isfinite(values).all(), key
        assert (values >= 0).all(), key
    if name == "pairwise-debias":
        assert ((method.plus >= LEAST_RATIO) & (method.plus <= MOST_RATIO)).all()
        assert ((method.minus >= LEAST_RATIO) & (method.minus <= MOST_RATIO)).all()
    elif name != "dla":
        assert ((method.positions.theta >= 0.9 * LEAST) & (method.positions.theta <= 1)).all()
