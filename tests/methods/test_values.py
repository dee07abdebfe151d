"""The model of the value of feedback by ordinal regression in the direct method."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ultr.errors import OptionError
from ultr.evaluation.scores import evaluate_scores, paired_test
from ultr.lists import ListBatches, Lists
from ultr.log import Log, write_log
from ultr.log.labels import Label
from ultr.methods import MethodInputs, make_method
from ultr.rankers import score_rows
from ultr.rankers.feedback import THRESHOLDS, OrdinalHurdle
from ultr.rankers.model import load_model
from ultr.training.config import TrainingOptions, make_config
from ultr.training.feed import Feed
from ultr.training.loop import start, take_step
from ultr.training.run import run_training

NAMES = ("x", "y", "seconds")
SPREAD = 1.5  # of the logarithm of watch times


def feed_log(seed: int, requests: int = 400, items: int = 5, spread: float = 1.0) -> Log:
    """Make a feed that plays by itself: every item is watched, for a share of its duration that its features decide."""
    rng = np.random.default_rng(seed)
    rows = requests * items
    features = rng.normal(size=(rows, 3))
    features[:, 2] = np.exp(3 + features[:, 2])  # duration
    share = 1 / (1 + np.exp(-features[:, 0] - features[:, 1] * (features[:, 0] > 0)))
    watched = share * features[:, 2] * np.exp(rng.normal(size=rows) * spread - spread**2 / 2)
    return Log(
        features=features.astype(np.float32),
        offsets=np.arange(0, rows + 1, items),
        request_ids=pa.array(np.arange(requests)),
        feature_names=NAMES,
        positions=np.tile(np.arange(1, items + 1), requests),
        actions={"dwell": watched.astype(np.float32)},
        relevance=np.log1p(share * features[:, 2]).astype(np.float32),  # of the mean watch time
    )


def inputs(**changes) -> MethodInputs:
    given_ = {
        "label": Label("dwell"),
        "features": 3,
        "positions": (1, 2, 3, 4, 5),
        "ranker_options": {"hidden": (16,)},
        "propensities": dict.fromkeys(range(1, 6), 1.0),
        "feature_names": NAMES,
    }
    return MethodInputs(**{**given_, **changes})


ORDINAL = {"values": "ordinal"}


def made(log: Log):
    torch.manual_seed(0)
    method = make_method("direct", inputs(), **ORDINAL)
    method.estimate_bias(log, user=None, sessions=0, seed=0)
    return method


def test_the_loss_of_ordinal_regression_is_the_explicit_sum():
    log = feed_log(0, requests=6)
    method, lists = made(log), Lists.from_log(log)
    outputs = method.ranker.ranker(lists.features).detach()
    total = 0.0
    for row, c in zip(outputs.reshape(-1, 1 + THRESHOLDS).tolist(), log.actions["dwell"].tolist(), strict=True):
        total += -math.log((1 - 1e-6) / (1 + math.exp(-row[0])))
        for m, threshold in enumerate(method.ranker.thresholds.tolist()):
            p = 1 / (1 + math.exp(-row[1 + m]))
            total += -math.log(p if c > threshold else 1 - p) / THRESHOLDS
    assert float(method.loss(lists).detach()) == pytest.approx(total / 6, rel=1e-4)


def test_right_probabilities_give_the_mean_label():
    log = feed_log(0)
    ranker = made(log).ranker
    labels = torch.from_numpy(log.actions["dwell"])
    share = (labels[:, None] > ranker.thresholds).double().mean(0).logit()
    value = ranker.value(share.expand(1, THRESHOLDS).float())
    assert float(value) == pytest.approx(float(labels.mean()), rel=1e-5)


@given(st.lists(st.floats(2**-7, 2**13, width=32), min_size=1, max_size=40), st.floats(-30, 30, width=32))
def test_values_are_between_the_smallest_and_the_largest_label(labels, output):
    labels = np.array(labels, np.float32)
    ranker = OrdinalHurdle(torch.nn.Identity())
    ranker.fit_values(labels)
    value = float(ranker.value(torch.full((1, THRESHOLDS), output)))
    assert labels.min() * (1 - 1e-4) <= value <= labels.max() * (1 + 1e-4)


def test_a_model_of_values_needs_the_hurdle():
    with pytest.raises(OptionError, match="cannot be used with likelihood=poisson"):
        make_method("direct", inputs(), likelihood="poisson", **ORDINAL)


def test_a_log_without_feedback_has_scores():
    log = feed_log(0, requests=3)
    log = replace(log, actions={"dwell": np.zeros(log.rows, np.float32)})
    method = made(log)
    assert torch.isfinite(method.loss(Lists.from_log(log)))
    assert torch.isfinite(method.score(torch.from_numpy(log.features))).all()


def test_a_run_with_this_model_of_values_is_loaded(tmp_path):
    log = feed_log(0, requests=60)
    write_log(log, tmp_path / "log.parquet")
    options = {"ranker": "mlp", "hidden": (6,), "steps": 10, "evaluate_every": 5, "batch": 16, "device": "cpu"}
    options |= {"method_options": ORDINAL, "propensities": {str(k): 1.0 for k in range(1, 6)}}
    config = make_config(str(tmp_path / "log.parquet"), method="direct", label="dwell", **options)
    model = load_model(run_training(config, tmp_path / "run"))
    assert model.ranker.KIND == "ordinal"
    (outputs,) = model.ranker.by_network(torch.from_numpy(log.features))
    expected = torch.sigmoid(outputs[..., 0]) * model.ranker.value(outputs[..., 1:])
    np.testing.assert_allclose(model.score(log), expected.detach().numpy(), rtol=1e-5)


def learned(method, log: Log):
    """Train a method on a log."""
    options = TrainingOptions(steps=1500, batch=128, lr=0.05, schedule="cosine", device="cpu")
    state = start(method, log, options)
    method.estimate_bias(log, user=None, sessions=0, seed=0)
    feed = Feed(ListBatches(log), batch=options.batch, seed=0)
    for step in range(options.steps):
        take_step(state, feed(step), options)
    return method.eval()


def error_of_probabilities(ranker: OrdinalHurdle, other: Log) -> float:
    """Return the mean error of P(c > t) for log-normal watch times."""
    outputs = ranker.by_network(torch.from_numpy(other.features))[0][..., 1:].detach()
    mean = torch.from_numpy(np.expm1(other.relevance))[:, None]
    true = torch.special.ndtr((mean.log() - SPREAD**2 / 2 - ranker.thresholds.log()) / SPREAD)
    return float((outputs.sigmoid() - true).abs().mean())


@pytest.mark.long
def test_watch_times_are_recovered_and_ranked_better_than_by_least_squares():
    """Few watch times are very long, which disturbs least squares."""
    log, other = (feed_log(seed, requests=2000, spread=SPREAD) for seed in (0, 1))
    figures = {}
    for name, options in (("pointwise", {}), ("direct", ORDINAL)):
        torch.manual_seed(0)
        method = learned(make_method(name, inputs(ranker_options={"hidden": (32, 16)}), **options), log)
        scores = score_rows(method.score, other.features, device="cpu")
        figures[name] = evaluate_scores(other, scores, "ndcg@5")["ndcg@5"]
    error = error_of_probabilities(method.ranker, other)
    test = paired_test(figures["direct"], figures["pointwise"])
    found = f"{figures['direct'].mean():.4f} ({test.difference:+.4f}, p = {test.p:.1e})"
    print(f"\nmean error {error:.3f}; NDCG@5 {found}")
    assert error < 0.04
    assert test.difference > 0
    assert test.significant
