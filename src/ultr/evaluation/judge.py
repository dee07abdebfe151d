"""The judge of a run: a model that estimates the metric of a ranking from logged feedback, without true labels.

A judge is made from the training requests and is the same for every method. A method that evaluated rankings with its
own estimate of examination could get a better value from a wrong estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from ultr.bias.examination import estimate_examination
from ultr.datasets.simulate import simulate_log
from ultr.datasets.users import User
from ultr.errors import DataError
from ultr.evaluation.off_policy import DirectModel, OffPolicy, OffPolicyValue, fit_direct
from ultr.evaluation.scores import OFF_POLICY, ScoreMetrics, parse_any_metric
from ultr.log import Log
from ultr.log.labels import Label
from ultr.log.segments import slot
from ultr.rankers import FeatureEncoder
from ultr.utils.files import atomic_path
from ultr.utils.jsonfiles import check_format, read_json, write_json
from ultr.utils.tensors import load_tensors, save_tensors

FORMAT = 1


@dataclass(frozen=True, eq=False)
class Judge:
    """A model that estimates the metric of a ranking from logged feedback.

    Examination and the model of feedback `direct` come from other requests than those that are evaluated.
    """

    theta: Mapping[str, float]  # examination by position, or by `position@segment`
    direct: DirectModel
    source: str | None = None  # the evidence of examination, in words; None if it is known, or was not saved

    def estimator(
        self,
        log: Log,
        metric: str,
        *,
        label: str,
        segments: Sequence[str] = (),
        device: torch.device | str = "cpu",
    ) -> OffPolicy:
        """Return what estimates a metric of rankings of a log by scores: off-policy-reward@k, -dcg@k or -gain@k."""
        kind, k = parse_any_metric(metric)
        if log.positions is None:
            raise DataError(f"'{metric}' needs the positions of items", hint="name their column with --position")
        theta = self.theta_of(np.unique(log.positions).tolist(), segments)
        direct = _direct_values(self.direct, log)
        return OffPolicy(log, theta=theta, label=label, kind=kind, k=k or 10, direct=direct, device=device)

    def theta_of(self, positions: Sequence[int], segments: Sequence[str] = ()) -> dict[int, float]:
        """Return examination by position id; positions that the judge does not know have its lowest examination."""
        least = min(self.theta.values())
        return {position: self.theta.get(slot(position, segments), least) for position in positions}

    def value(
        self, log: Log, scores: np.ndarray, metric: str, *, label: str, segments: Sequence[str] = ()
    ) -> OffPolicyValue:
        """Estimate a metric of the ranking of a log by scores [rows]."""
        return self.estimator(log, metric, label=label, segments=segments)(scores)

    def save(self, folder: Path) -> None:
        encoder = self.direct.encoder
        about = {
            "format": FORMAT,
            "theta": dict(self.theta),
            "features": encoder.features,
            "numeric": encoder.numeric.tolist(),
            "intercept": self.direct.intercept,
            "range": [self.direct.lowest, self.direct.highest],
        }
        with atomic_path(folder, overwrite=True, folder=True) as temporary:
            write_json(temporary / "judge.json", about)
            save_tensors(temporary / "direct.safetensors", {**encoder.state_dict(), "weights": self.direct.weights})


@lru_cache(maxsize=2)
def _direct_values(model: DirectModel, log: Log) -> np.ndarray:
    """Return the model's values of a log, which do not depend on scores and are needed again with other scores."""
    return model(log)


def load_judge(folder: Path) -> Judge | None:
    """Load a judge (see `Judge`) from its folder; return None if there is none, as the run was selected without it."""
    if not folder.is_dir():
        return None
    about, tensors = read_json(folder / "judge.json"), load_tensors(folder / "direct.safetensors")
    check_format(about, FORMAT, what="the model that estimates off-policy metrics", where=folder, hint="train again")
    try:
        encoder = FeatureEncoder(int(about["features"]), only=about["numeric"])
        weights = tensors.pop("weights")
        encoder.load_state_dict(tensors)
        direct = DirectModel(encoder, weights, float(about["intercept"]), *map(float, about["range"]))
        return Judge({str(name): float(theta) for name, theta in about["theta"].items()}, direct)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        what = f"the model that estimates off-policy metrics cannot be read ({error})"
        raise DataError(what, where=folder, hint="train again") from error


def make_judge(
    train: Log,
    *,
    label: str,
    known: Mapping[int, float] | None = None,
    segments: Sequence[str] = (),
    user: User | None = None,
    sessions: int = 0,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Judge:
    """Make a judge (see `Judge`) from training requests; `known` is the known examination by position id.

    With a simulated `user`, its feedback in about `sessions` sessions replaces that of the log.
    """
    if user is not None:
        train, _ = simulate_log(train, user, seed=seed, sessions=min(len(train) * 4, max(len(train), sessions)))
    theta, source = known, None
    if theta is None:
        found = estimate_examination(train, Label(label), seed=seed, device=device)
        theta, source = found.by_position(), found.source
    direct = fit_direct(train, theta=theta, label=label, seed=seed)
    return Judge({slot(position, segments): value for position, value in theta.items()}, direct, source)


def evaluate_requests(
    log: Log,
    scores: np.ndarray,
    metrics: Sequence[str],
    *,
    user: User | None = None,
    label: str,
    judge: Judge | None = None,
    segments: Sequence[str] = (),
    device: torch.device | str = "cpu",
) -> dict[str, np.ndarray]:
    """Return metrics [requests] of scores [rows]; the `judge` estimates those named `off-policy-*` from feedback."""
    evaluate = request_metrics(log, metrics, user=user, label=label, judge=judge, segments=segments, device=device)
    return evaluate(scores)


def request_metrics(
    log: Log,
    metrics: Sequence[str],
    *,
    user: User | None = None,
    label: str,
    judge: Judge | None = None,
    segments: Sequence[str] = (),
    device: torch.device | str = "cpu",
    keep: bool = False,
) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
    """Return a function from scores [rows] to metrics [requests], as `evaluate_requests`; `keep` if it is called often.

    What does not depend on the scores is computed here, once.
    """
    plain = [name for name in metrics if not name.startswith(OFF_POLICY)]
    of_labels = ScoreMetrics(log, plain, user=user, label=label, device=device, keep=keep) if plain else None
    off_policy: dict[str, OffPolicy] = {}
    for name in metrics:
        if name.startswith(OFF_POLICY):
            if judge is None:
                what = f"'{name}' needs an estimate of examination, which this run has not saved"
                raise DataError(what, hint=f"train again with --select {name}")
            off_policy[name] = judge.estimator(log, name, label=label, segments=segments, device=device)

    def evaluate(scores: np.ndarray) -> dict[str, np.ndarray]:
        results = {} if of_labels is None else of_labels(scores)
        results |= {name: estimator(scores).per_request for name, estimator in off_policy.items()}
        return {name: check_finite(results)[name] for name in metrics}

    return evaluate


def check_finite(results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return metric -> values [requests]; raise DataError if a value is not finite."""
    for name, values in results.items():
        if not np.isfinite(values).all():
            got = f"infinite or missing values in {int((~np.isfinite(values)).sum()):,} of {len(values):,} requests"
            raise DataError(f"'{name}' must be finite", got=got, hint="scale the label or the true labels down")
    return results
