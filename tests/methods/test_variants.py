"""Variants of other toolboxes, against sums written out and by enumeration."""

from __future__ import annotations

import math

import pytest
import torch

from conftest import make_shown_log
from ultr.datasets.users import User, simulate_log
from ultr.errors import OptionError
from ultr.lists import Lists
from ultr.log.labels import Label
from ultr.methods import MethodInputs, make_method

POSITIONS = tuple(range(1, 13))


def inputs(**changes) -> MethodInputs:
    given = {"label": Label("click"), "features": 3, "positions": POSITIONS, "ranker_options": {"hidden": (4,)}}
    return MethodInputs(**{**given, "binary": ("click",), **changes})


def lists_of(seed: int = 0, requests: int = 30) -> Lists:
    log, _ = simulate_log(make_shown_log(requests=requests, seed=seed), User(eta=0.5), seed=seed)
    return Lists.from_log(log)


# --- Variants of other toolboxes ----------------------------------------------------------------------------------


def test_regression_em_of_ultra_moves_theta_by_a_twentieth_of_the_mean_posterior():
    torch.manual_seed(0)
    method = make_method("regression-em", inputs(), variant="ultra").eval()
    assert method.sampled
    assert method.positions.theta.tolist() == pytest.approx([0.9] * len(POSITIONS))
    before = method.positions.theta.tolist()
    for seed in (0, 1):
        lists = lists_of(seed)
        clicks, beta = method.clicks(lists), method.score(lists.features).sigmoid().detach()
        posteriors: dict[int, list[float]] = {k: [] for k in POSITIONS}
        for u, i in lists.where.nonzero().tolist():
            k, b = int(lists.positions[u, i]), float(beta[u, i])
            examined = 1.0 if clicks[u, i] else before[k - 1] * (1 - b) / (1 - before[k - 1] * b)
            posteriors[k].append(examined)
        method.update(lists)
        before = [
            t + 0.05 * (sum(posteriors[k]) / len(posteriors[k]) - t) for k, t in zip(POSITIONS, before, strict=True)
        ]
        assert method.positions.theta.tolist() == pytest.approx(before, rel=1e-4)


def test_regression_em_of_ultra_does_not_scale_theta():
    with pytest.raises(OptionError, match="variant=ultra"):
        make_method("regression-em", inputs(), variant="ultra", scale=0.5)


def test_released_pairwise_debiasing_moves_ratios_by_a_twentieth_of_those_of_a_batch():
    torch.manual_seed(0)
    method = make_method("pairwise-debias", inputs(), variant="released").eval()
    plus, minus = [1.0] * len(POSITIONS), [1.0] * len(POSITIONS)
    for seed in (0, 1):
        lists = lists_of(seed, requests=80)
        clicks, scores = method.clicks(lists), method.score(lists.features).detach()
        of_click, of_none, shown = ([0.0] * len(POSITIONS) for _ in range(3))
        loss = 0.0
        for u in range(len(lists)):
            items = lists.where[u].nonzero().flatten().tolist()
            for i in items:
                shown[int(lists.positions[u, i]) - 1] += 1
            for i in items:
                for j in items:
                    if clicks[u, i] and not clicks[u, j]:
                        a, b = int(lists.positions[u, i]) - 1, int(lists.positions[u, j]) - 1
                        pair = math.log1p(math.exp(-float(scores[u, i] - scores[u, j])))
                        loss += pair / (plus[a] * minus[b])
                        of_click[a] += pair / minus[b]
                        of_none[b] += pair / plus[a]
        assert float(method.loss(lists).detach()) == pytest.approx(loss / len(lists), rel=1e-4)
        method.update(lists)
        for sums, ratios, found in ((of_click, plus, method.plus), (of_none, minus, method.minus)):
            for k in range(len(POSITIONS)):
                if sums[k] > 0:
                    ratio = math.sqrt(sums[k] / shown[k] / (sums[0] / shown[0]))
                    ratios[k] = min(max(ratios[k] + 0.05 * (ratio - ratios[k]), 0.01), 100)
            assert found.tolist() == pytest.approx(ratios, rel=1e-4)
