"""What a run is selected and judged by where there are no true labels: the value of its ranking off policy.

A judge is made of the requests that a run learns from, the same for every method: a ranker that was judged by the
examination it found itself would gain by overstating it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ultr.checkpoint import load_tensors, read_json, save_tensors, write_json
from ultr.errors import DataError
from ultr.evaluation import OFF_POLICY, evaluate_scores, parse_any_metric
from ultr.examination import estimate_examination
from ultr.files import atomic_path
from ultr.formats import check_format
from ultr.labels import Label
from ultr.log import Log
from ultr.log.segments import slot
from ultr.offpolicy import DirectModel, OffPolicyValue, fit_direct, off_policy_value
from ultr.rankers import FeatureEncoder
from ultr.simulate import User, simulate_log

FORMAT = 1


@dataclass(frozen=True, eq=False)
class Judge:
    """Examination by position, and a direct model of feedback; both of other requests than those that are judged."""

    theta: Mapping[str, float]  # by position, or `position@segment`
    direct: DirectModel

    def value(
        self, log: Log, scores: np.ndarray, metric: str, *, label: str, segments: Sequence[str] = ()
    ) -> OffPolicyValue:
        """The value of a ranking of the items that a log shows; `metric` is off-policy-reward@k or off-policy-dcg@k."""
        kind, k = parse_any_metric(metric)
        if log.positions is None:
            raise DataError("off policy, a ranking is judged by feedback at positions", mend="name their column")
        least = min(self.theta.values())  # of positions that it has never seen
        ids = np.unique(log.positions).tolist()
        theta = {position: self.theta.get(slot(position, segments), least) for position in ids}
        direct = self.direct(log)
        return off_policy_value(log, scores, theta=theta, label=label, kind=kind, k=k or 10, direct=direct)

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


def load_judge(folder: Path) -> Judge | None:
    """The judge that a run was selected by; none where that was by other means."""
    if not folder.is_dir():
        return None
    about, tensors = read_json(folder / "judge.json"), load_tensors(folder / "direct.safetensors")
    check_format(about, FORMAT, what="the judge", where=folder, mend="train again", unmarked=True)
    try:
        encoder = FeatureEncoder(int(about["features"]), only=about["numeric"])
        weights = tensors.pop("weights")
        encoder.load_state_dict(tensors)
        direct = DirectModel(encoder, weights, float(about["intercept"]), *map(float, about["range"]))
        return Judge({str(name): float(theta) for name, theta in about["theta"].items()}, direct)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise DataError(f"the judge cannot be read ({error})", where=folder, mend="train again") from error


def make_judge(
    train: Log,
    *,
    label: str,
    known: Mapping[int, float] | None = None,
    segments: Sequence[str] = (),
    categories: Mapping[int, int] | None = None,
    user: User | None = None,
    sessions: int = 0,
    seed: int = 0,
) -> Judge:
    """Examination that is known, or else found from the log as for the methods, and a direct model of its feedback."""
    if user is not None:
        train, _ = simulate_log(train, user, seed=seed, sessions=min(len(train) * 4, max(len(train), sessions)))
    theta = known
    if theta is None:
        found = estimate_examination(train, Label(label), seed=seed, categories=categories)
        theta = dict(zip(found.positions, found.theta.tolist(), strict=True))
    direct = fit_direct(train, theta=theta, label=label, seed=seed)
    return Judge({slot(position, segments): value for position, value in theta.items()}, direct)


def figures_of(
    log: Log,
    scores: np.ndarray,
    metrics: Sequence[str],
    *,
    user: User | None = None,
    label: str,
    judge: Judge | None = None,
    segments: Sequence[str] = (),
) -> dict[str, np.ndarray]:
    """`evaluate_scores`, and off policy what is asked for so."""
    plain = [name for name in metrics if not name.startswith(OFF_POLICY)]
    found: dict[str, Any] = evaluate_scores(log, scores, plain, user=user, label=label) if plain else {}
    for name in metrics:
        if name.startswith(OFF_POLICY):
            if judge is None:
                raise DataError(
                    f"'{name}' needs examination by position, and the run was selected by other means",
                    mend="train with --select auto",
                )
            found[name] = judge.value(log, scores, name, label=label, segments=segments).per_request
    for name, figures in found.items():
        if not np.isfinite(figures).all():
            got = f"{int((~np.isfinite(figures)).sum()):,} of {len(figures):,} requests"
            raise DataError(f"'{name}' is not finite", got=got, mend="scale the label or true labels down")
    return {name: found[name] for name in metrics}
