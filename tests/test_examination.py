"""Examination from a log: the table's EM against truth, strata against confounding, and known propensities."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ultr import examination
from ultr.bias import item_log_likelihood
from ultr.errors import DataError
from ultr.examination import estimate_examination, fit_table, read_propensities, recovered_score
from ultr.labels import Label
from ultr.log import Log
from ultr.simulate import EYE_TRACKING, TrustUser, User, simulate_log

THETA = torch.tensor(EYE_TRACKING, dtype=torch.float64)
RELATIVE = (THETA / THETA[0]).numpy()


def likelihood(clicked, missed, theta, zeta, beta) -> torch.Tensor:
    yes, no = (item_log_likelihood(torch.tensor(seen), theta, beta, zeta) for seen in (True, False))
    return (clicked * yes + missed * no).sum()


def binomial(shown: torch.Tensor, probability: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return torch.binomial(shown, probability, generator=torch.Generator().manual_seed(seed))


def uneven_counts(strata: int = 200, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Impressions that put the relevant strata higher, and the relevance of each stratum."""
    generator = torch.Generator().manual_seed(seed)
    beta = 0.05 + 0.6 * torch.rand(strata, generator=generator, dtype=torch.float64) ** 2
    tilt = torch.exp(-2 * beta[:, None] * torch.linspace(0, 1, 10, dtype=torch.float64))
    return (20_000 * tilt).round(), beta


def test_free_parameter_em_finds_theta_though_positions_follow_relevance():
    shown, beta = uneven_counts()
    clicked = binomial(shown, THETA * beta[:, None])
    naive = clicked.sum(0) / shown.sum(0)
    found = fit_table(shown, clicked)
    assert np.abs(found.theta.numpy() / RELATIVE - 1).max() < 0.02
    assert np.abs((naive / naive[0]).numpy() / RELATIVE - 1).max() > 0.15
    np.testing.assert_allclose(found.theta[0] * found.beta, THETA[0] * beta, rtol=0.1)
    assert found.moved < 1e-5
    assert found.theta.max() == 1


def test_trust_is_recovered_up_to_what_is_identified():
    """Of P = α_k β + ζ_k an affine map of β changes nothing: α is identified up to scale, ζ/α up to shift and scale."""
    shown, beta = uneven_counts()
    shown = 20 * shown
    k = torch.arange(1.0, 11, dtype=torch.float64)
    user = TrustUser()
    plus, minus = THETA * user.trust(k), THETA * user.mistrust(k)
    found = fit_table(shown, binomial(shown, plus * beta[:, None] + minus * (1 - beta[:, None])), trust=True)
    slope, true_slope = found.theta - found.zeta, plus - minus
    np.testing.assert_allclose(slope / slope[0], true_slope / true_slope[0], rtol=0.05)

    def standardised(values):
        return (values - values[-1]) / (values[0] - values[-1])

    np.testing.assert_allclose(standardised(found.zeta / slope), standardised(minus / true_slope), atol=0.01)
    assert found.zeta.min() == pytest.approx(0, abs=1e-9)
    assert found.theta.max() == pytest.approx(1)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    strata=st.integers(1, 6),
    positions=st.integers(1, 5),
    trust=st.booleans(),
    most=st.integers(0, 50),
)
def test_any_table_gives_probabilities_and_no_less_likelihood_than_click_rates(seed, strata, positions, trust, most):
    generator = torch.Generator().manual_seed(seed)
    shown = torch.randint(0, most + 1, (strata, positions), generator=generator).double()
    clicked = (torch.rand(strata, positions, generator=generator) * (shown + 1)).floor().minimum(shown)
    found = fit_table(shown, clicked, trust=trust, iterations=300)
    for values in (found.theta, found.zeta, found.beta):
        assert torch.isfinite(values).all()
        assert ((values >= 0) & (values <= 1)).all()
    assert (found.theta[shown.sum(0) == 0] == 1).all()
    if clicked.sum() and shown.sum(0).min() > 0 and not trust and (found.theta > 1e-3).all():
        rate = (clicked.sum(0) / shown.sum(0)).clamp(1e-9, 1)
        flat = torch.ones(strata, dtype=torch.float64) * rate.max()
        counts = clicked, shown - clicked
        least = likelihood(*counts, rate / rate.max(), torch.zeros(positions), flat[:, None])
        assert likelihood(*counts, found.theta, found.zeta, found.beta[:, None]) >= least - 1e-2 * least.abs() - 1e-6


def confounded_log(requests: int = 3000, seed: int = 0, *, linear: bool = True):
    """Ten items by a ranker that knows half of what makes them relevant; linear in the features, or not at all."""
    rng = np.random.default_rng(seed)
    log = Log(
        features=rng.normal(size=(10 * requests, 4)).astype(np.float32),
        offsets=10 * np.arange(requests + 1),
        request_ids=pa.array([f"r{i}" for i in range(requests)]),
        feature_names=("f0", "f1", "f2", "f3"),
    )
    known = log.features[:, 0] if linear else log.features[:, 0] * log.features[:, 3]
    worth = known + log.features[:, 1]
    grades = np.clip(np.round(1.5 + 1.2 * worth + 0.5 * rng.normal(size=len(worth))), 0, 4).astype(np.float32)
    logged = known + 0.3 * log.features[:, 2]
    order = np.argsort(-logged.reshape(requests, 10), axis=1).argsort(axis=1) + 1
    return replace(log, relevance=grades, positions=order.reshape(-1).astype(np.int64)), logged


def largest_error(log: Log, seed: int = 0) -> float:
    found = estimate_examination(log, Label("click"), user=User(dwell=None), sessions=500_000, seed=seed)
    return float(np.abs(found.theta.numpy() / found.theta[0].item() / RELATIVE - 1).max())


def test_the_logging_score_is_recovered_from_the_order_alone(monkeypatch):
    log, logged = confounded_log()
    monkeypatch.setattr(examination, "_network_score", lambda *_: pytest.fail("a linear order needs no network"))
    found = recovered_score(log)
    assert np.corrcoef(found.score, logged)[0, 1] > 0.99
    assert found.explained > 0.9


@pytest.mark.long
def test_an_order_that_is_not_linear_is_recovered_by_a_network(monkeypatch):
    log, logged = confounded_log(linear=False)
    score = recovered_score(log)
    assert np.corrcoef(score.score, logged)[0, 1] > 0.9
    monkeypatch.setattr(examination, "logging_score", lambda *_, **__: score)
    error = largest_error(log)
    assert error < 0.15
    monkeypatch.undo()
    monkeypatch.setattr(examination, "MUCH_OPEN", np.inf)
    assert abs(np.corrcoef(recovered_score(log).score, logged)[0, 1]) < 0.5
    assert largest_error(log) > 2 * error


def test_a_network_that_explains_no_more_is_not_used(monkeypatch):
    log, _ = confounded_log(requests=800)
    rng = np.random.default_rng(1)
    shuffled = replace(log, positions=np.concatenate([rng.permutation(10) + 1 for _ in range(len(log))]))
    tried = []
    original = examination._network_score
    monkeypatch.setattr(examination, "NETWORK_STEPS", 100)
    monkeypatch.setattr(examination, "_network_score", lambda *given: tried.append(original(*given)) or tried[-1])
    found = recovered_score(shuffled)
    assert len(tried) == 1  # a random order is left open by any score
    monkeypatch.setattr(examination, "MUCH_OPEN", np.inf)
    assert abs(found.explained) < 0.05
    np.testing.assert_array_equal(found.score, recovered_score(shuffled).score)


@pytest.mark.long
@pytest.mark.parametrize("shuffled", [False, True])
def test_theta_is_recovered_from_lists_in_a_rankers_order_and_in_random_order(shuffled):
    log, _ = confounded_log(requests=5000)
    if shuffled:
        rng = np.random.default_rng(1)
        log = replace(log, positions=np.concatenate([rng.permutation(10) + 1 for _ in range(len(log))]))
    errors = [largest_error(log, seed) for seed in range(3 if shuffled else 5)]
    assert np.mean(errors) < (0.05 if shuffled else 0.15), errors


def test_a_logs_own_clicks_and_items_that_recur_are_read():
    log, _ = confounded_log(requests=4000)
    drawn, _ = simulate_log(log, User(), seed=3)
    found = estimate_examination(drawn, Label("click"))
    assert float(found.impressions.sum()) == drawn.rows
    assert float(found.clicks.sum()) == drawn.actions["click"].sum()
    items = np.random.default_rng(0).integers(0, 50, drawn.rows)
    by_item = estimate_examination(replace(drawn, item_ids=items), Label("click"), by_item=True)
    assert by_item.strata == 50
    with pytest.raises(DataError, match="item ids"):
        estimate_examination(replace(drawn, item_ids=None), Label("click"), by_item=True)
    with pytest.raises(DataError, match="by position"):
        estimate_examination(replace(drawn, positions=None), Label("click"))


def test_request_weights_count_like_repeated_requests():
    log, _ = confounded_log(requests=400)
    drawn, _ = simulate_log(log, User(), seed=3)
    twice = drawn.select(np.repeat(np.arange(400), 2))
    weighted = replace(drawn, weights=np.full(400, 2.0, np.float32))
    a, b = (estimate_examination(x, Label("click")) for x in (twice, weighted))
    np.testing.assert_allclose(a.clicks, b.clicks)
    np.testing.assert_allclose(a.theta, b.theta, rtol=0.3)  # the score is learned from other rows


def test_propensities_are_read_and_checked(tmp_path):
    path = tmp_path / "propensities.csv"
    path.write_text("position,propensity\n1,1.0\n2,0.5\n")
    assert read_propensities(path) == {"1": 1.0, "2": 0.5}
    pq.write_table(pa.table({"position": [1, 2], "propensity": [1.0, 0.5]}), tmp_path / "propensities.parquet")
    assert read_propensities(tmp_path / "propensities.parquet") == {"1": 1.0, "2": 0.5}
    path.write_text("position,propensity,segment\n1,1,phone\n1,0.5,desk\n")
    assert read_propensities(path) == {"1@phone": 1.0, "1@desk": 0.5}
    for text, match in {
        "position,theta\n1,1\n": "columns position, propensity",
        "position,propensity\n1,0\n": "from 1e-06",
        "position,propensity\n1,1.5\n": "at most 1",
        "position,propensity\nfirst,0.5\n": "numbers",
        "position,propensity\n1,0.5\n1,0.6\n": "once",
        "position,propensity\n1,\n": "from 1e-06",
        "": "empty",
    }.items():
        path.write_text(text)
        with pytest.raises(DataError, match=match):
            read_propensities(path)
    path.write_bytes(b"\x80position,propensity\n1,1\n")
    with pytest.raises(DataError, match="cannot be read as a table"):
        read_propensities(path)
