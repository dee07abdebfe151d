"""Users whom one curve of examination does not describe are recognised by their feedback."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

from ultr.datasets.users import make_user, simulate_log
from ultr.evaluation.comparing import STOPS, TRUSTS, compare_rankers, misfit
from ultr.evaluation.off_policy import fit_direct
from ultr.log import Log

METRIC = "off-policy-reward@10"


def logged(users: str, *, seed: int, requests: int = 3000) -> tuple[Log, dict[int, float]]:
    """Return a log of items in an order that their features explain in part, and the examination of its users."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(requests, 10, 2))
    order = np.argsort(-(features[:, :, 0] + rng.normal(size=(requests, 10))), axis=1)
    features = np.take_along_axis(features, order[:, :, None], 1).reshape(-1, 2)
    grades = np.digitize(features[:, 0] + 0.3 * rng.normal(size=len(features)), [0, 0.7, 1.3, 1.8])
    marked = rng.random(requests) < 0.2
    log = Log(
        features=features.astype(np.float32),
        offsets=10 * np.arange(requests + 1),
        request_ids=pa.array(np.arange(requests)),
        feature_names=("taste", "other"),
        positions=np.tile(np.arange(1, 11), requests),
        relevance=grades.astype(np.float32),
        context={"randomised": pa.array(marked)},
    )
    user = make_user(users, eta=1.0, dwell=None)
    theta = {k: float(user.theta(torch.tensor([k]))[0]) for k in range(1, 11)}
    return simulate_log(log, user, seed=seed)[0], theta


def found(users: str, seed: int) -> str | None:
    log, theta = logged(users, seed=seed)
    return misfit(log, log.actions["click"] > 0, theta, fit_direct(log, theta=theta, label="click")(log))


@pytest.mark.parametrize(
    ("users", "expected", "least"), [("pbm", None, 6), ("trust", TRUSTS, 5), ("cascade", STOPS, 6)]
)
def test_users_are_recognised(users, expected, least):
    assert sum(found(users, seed) == expected for seed in range(6)) >= least


def test_a_log_without_clicks_shows_nothing():
    log, theta = logged("pbm", seed=0, requests=50)
    assert misfit(log, np.zeros(log.rows, bool), theta, np.ones(log.rows)) is None


def test_a_misfit_takes_back_what_random_order_confirms():
    """The interval then has the value of an order that does not matter."""
    log, _ = logged("cascade", seed=0)
    taste = {"taste": log.features[:, 0].astype(float)}
    compared = compare_rankers(log, taste, [METRIC], label="click")
    assert not compared.confirmed
    assert STOPS in compared.evidence
    value = compared.rankers["taste"][METRIC]
    assert value.difference.low <= 0 < value.difference.difference
    assert compare_rankers(logged("pbm", seed=0)[0], taste, [METRIC], label="click").confirmed
