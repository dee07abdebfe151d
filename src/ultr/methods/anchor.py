"""The anchor of a network: a linear model of the feedback, drawn to the ranker that wrote the log.

A log of a few thousand requests says little about a network, but the order of its items says much about relevance: the
ranker that wrote it was chosen because it is good. A network that starts at the anchor learns how to be better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import nn

from ultr.log import Log
from ultr.log.labels import Label
from ultr.log.table import is_grid
from ultr.methods.position_model import PositionModel
from ultr.rankers import FeatureEncoder
from ultr.rankers.networks import EncodedRanker

MOST_ROWS = 50_000  # that an anchor is fitted to
HELD_OUT = 0.2  # share of the requests that choose the deviation of the prior
DEVIATIONS = (0.03, 0.06, 0.125, 0.25, 0.5, 1.0)  # of the prior of v·x
RIDGE = 1e-3  # by row, of the ranker that wrote the log
LARGEST_LOG_RATE = 20.0
ITERATIONS = 50
Part = Literal["score", "click", "value", "none"]  # what an output of a network predicts


@dataclass(frozen=True, eq=False)
class Anchor:
    """The log of E[c] / θ is constant + slopes · x; `beta` is the mean of P(c>0) / θ, and `value` that of c > 0."""

    slopes: np.ndarray
    constant: float
    beta: float
    value: float


def start_network(
    network: nn.Module, log: Log, label: Label, model: PositionModel, parts: Sequence[Part], *, seed: int
) -> None:
    """Start a network at the anchor of a log; `parts` says what each of its outputs predicts."""
    assert isinstance(network, EncodedRanker)  # noqa: S101 - all networks are
    anchor = anchor_of_log(network.encoder, log, label, model, seed=seed)
    if anchor is None:
        return
    constants = {"score": 0.0, "click": np.log(anchor.beta / (1 - anchor.beta)), "value": np.log(anchor.value)}
    slopes = np.stack([np.zeros_like(anchor.slopes) if part in ("value", "none") else anchor.slopes for part in parts])
    shifts = np.array([constants.get(part, 0.0) for part in parts])
    network.start_at(*(torch.from_numpy(each).to(model.theta) for each in (slopes, shifts)))


@torch.no_grad()
def anchor_of_log(encoder: FeatureEncoder, log: Log, label: Label, model: PositionModel, *, seed: int) -> Anchor | None:
    """Fit the anchor of a network to a log, with the examination θ of a model; `encoder` is that of the network."""
    rows, request = some_rows(log, seed=seed)
    labels = np.asarray(label(log.actions), np.float64)[rows]
    positions = log.shown_positions("the anchor of a ranker")[rows]
    theta = model.theta_at(torch.from_numpy(positions)).double().cpu().numpy()
    if is_grid(positions):  # only their order is a measure of relevance
        positions = np.unique(positions, return_inverse=True)[1]
    features = torch.from_numpy(np.asarray(log.features[rows])).to(encoder.mean.device)
    x = encoder(features)[:, : len(encoder.mean)].double().cpu().numpy()
    return fit_anchor(x, labels, theta, positions, request, seed=seed)


def some_rows(log: Log, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of rows of some requests, all if they are few, and the number of the request of each row."""
    order = np.random.default_rng(seed).permutation(len(log))
    taken = np.zeros(len(log), bool)
    taken[order[np.cumsum(log.lengths[order]) <= MOST_ROWS]] = True
    rows = np.flatnonzero(taken[log.request_of_row])
    request: np.ndarray = (np.cumsum(taken) - 1)[log.request_of_row[rows]]
    return rows, request


def fit_anchor(
    x: np.ndarray, labels: np.ndarray, theta: np.ndarray, positions: np.ndarray, request: np.ndarray, *, seed: int
) -> Anchor | None:
    """Fit E[c] = θ exp(a + b g(x) + v·x) by Poisson regression to rows [rows, inputs] of requests; None if it cannot.

    g is the ranker that wrote the log: the linear function that explains positions within requests best. v has a normal
    prior with mean 0, so that v·x has one of `DEVIATIONS`: the smallest one for which held-out requests are about as
    likely as with the best one.
    """
    lengths, total = np.bincount(request), labels.sum()
    if not total > 0 or not x.shape[1] or len(lengths) < 10:
        return None
    toward = _logging_slopes(x, positions, request, lengths)
    used = np.column_stack([x @ toward, x]) if toward is not None else x
    free = int(toward is not None)  # b has no prior
    dispersion = float((labels**2).sum() / total)  # of Poisson: 1
    rng = np.random.default_rng(seed)
    held_out = (rng.permutation(len(lengths)) < HELD_OUT * len(lengths))[request]
    offset = np.log(theta)

    def start(rows: np.ndarray) -> np.ndarray:
        rate = max(labels[rows].sum(), 1e-9) / max(theta[rows].sum(), 1e-9)
        return np.concatenate([[np.log(rate)], np.zeros(used.shape[1])])

    def precision(deviation: float) -> np.ndarray:
        """Return the precision of the prior of the constant and of each slope; 0 if it has none."""
        with_prior = used.shape[1] - free
        return np.concatenate([np.zeros(1 + free), np.full(with_prior, max(1, with_prior) / deviation**2)])

    learned = ~held_out
    if not labels[learned].sum() > 0 or not held_out.any():
        return None
    found, losses = start(learned), []
    for deviation in DEVIATIONS:
        prior = precision(deviation)
        found = _poisson(used[learned], labels[learned], offset[learned], found, prior, dispersion)
        log_mean = np.minimum(found[0] + used[held_out] @ found[1:] + offset[held_out], LARGEST_LOG_RATE)
        losses.append(float((np.exp(log_mean) - labels[held_out] * log_mean).sum()) / dispersion)
    good = np.array(losses) <= min(losses) + 1  # in units of the log-likelihood, so that noise does not choose
    deviation = DEVIATIONS[int(good.argmax())]
    everything = np.ones(len(x), bool)
    found = _poisson(used, labels, offset, start(everything), precision(deviation), dispersion)
    slopes = found[1 + free :] + (found[1] * toward if toward is not None else 0.0)
    positive = labels > 0
    beta = float(np.clip(positive.sum() / theta.sum(), 1e-3, 1 - 1e-3))
    return Anchor(slopes, float(found[0]), beta, float(labels[positive].mean())) if np.isfinite(found).all() else None


def _logging_slopes(
    x: np.ndarray, positions: np.ndarray, request: np.ndarray, lengths: np.ndarray
) -> np.ndarray | None:
    """Return the slopes of the linear function that explains positions within requests; its deviation is 1."""

    def centred(values: np.ndarray) -> np.ndarray:
        sums = np.zeros((len(lengths), values.shape[1]))
        np.add.at(sums, request, values)
        return np.asarray(values - (sums / np.maximum(1, lengths)[:, None])[request])

    inside, place = centred(x), centred(-positions[:, None].astype(np.float64) / lengths[request][:, None])
    slopes = np.linalg.solve(inside.T @ inside + RIDGE * len(x) * np.eye(x.shape[1]), inside.T @ place[:, 0])
    deviation = float((x @ slopes).std())
    return slopes / deviation if np.isfinite(deviation) and deviation > 1e-9 else None


def _poisson(
    x: np.ndarray, labels: np.ndarray, offset: np.ndarray, start: np.ndarray, prior: np.ndarray, dispersion: float
) -> np.ndarray:
    """Return the constant and slopes with the largest posterior; `prior` has the precision of each, or 0."""
    from scipy.optimize import minimize

    def loss(values: np.ndarray) -> tuple[float, np.ndarray]:
        log_mean = np.minimum(values[0] + x @ values[1:] + offset, LARGEST_LOG_RATE)
        mean = np.exp(log_mean)
        slope = np.r_[(mean - labels).sum(), x.T @ (mean - labels)] / dispersion
        value = (mean - labels * log_mean).sum() / dispersion + 0.5 * (prior * values**2).sum()
        return float(value), slope + prior * values

    return np.asarray(minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": ITERATIONS}).x)
