"""Distillation: one ensemble of trees learns the scores of a whole ranker, and both are compared on other requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ultr.errors import DataError, redact
from ultr.evaluation.off_policy import load_off_policy_model, request_metrics
from ultr.evaluation.scores import FEEDBACK, OFF_POLICY, judging_metric, less_is_better, paired_test, ranks
from ultr.log import Log
from ultr.log.sampling import sample_log
from ultr.log.table import by_segment
from ultr.rankers.boosters import BOOSTERS, Booster, Boosting, TreeRows
from ultr.rankers.model import Model
from ultr.training.data import Decisions, columns_for_run, read_rows, used_requests
from ultr.training.examining import VALUES
from ultr.training.folder import read_config
from ultr.training.outcome import agreements

ROWS = 1_000_000  # of the log that are used, at most
ROUNDS, LR, PATIENCE = 300, 0.1, 20
STOPPING, JUDGING = 0.1, 0.2  # shares of requests that choose the number of rounds, and that judge
LEAST = 20  # requests that the run did not use, from which on they alone judge
PARAMETERS = {"lightgbm": {"num_leaves": 31}, "xgboost": {"max_depth": 6}}


@dataclass(frozen=True, eq=False)
class Distilled:
    """Trees that learned the scores of a ranker."""

    booster: Booster
    log: str
    rows: int  # that they learned from
    requests: int  # that judged them
    unused: bool  # whether the run had not used the requests that judged them
    agreement: float  # mean of Kendall's τ between the rankings of the trees and of the ranker
    metric: str | None  # None if the log has no feedback and no true labels for it
    values: Mapping[str, float]  # of the metric: ranker, trees, difference, low, high

    def to_json(self) -> dict[str, Any]:
        about = {key: value for key, value in asdict(self).items() if key != "booster"}
        return {"library": self.booster.LIBRARY, "rounds": self.booster.rounds, **about}


def distil(run: Path, model: Model, source: str | None, *, library: str, seed: int = 0) -> Distilled:
    """Train trees on the scores of a run's model on the rows of a log, and compare both on requests of it.

    Without a `source`, the log is that of training.
    """
    log = _read(run, model, source)
    source = source or read_config(run).data.source
    log = sample_log(log, ROWS, seed=seed)
    learn, stop, judge, unused = _split(run, log, seed)
    log = model.view(log)
    scores = model.score(log).astype(np.float64)
    booster = _fit(model, log, scores, learn, stop, library, seed)
    held_out, of_ranker = log.select(judge), _of(log, scores, judge)
    of_trees = booster.predict(np.asarray(held_out.features))
    tau = agreements(held_out, ranks(held_out, of_ranker), ranks(held_out, of_trees))
    metric, values = _values(run, model, held_out, of_ranker, of_trees)
    rows = int(log.lengths[learn].sum())
    agreement = float(np.nanmean(tau)) if np.isfinite(tau).any() else float("nan")
    return Distilled(booster, redact(source), rows, len(judge), unused, agreement, metric, values)


def _read(run: Path, model: Model, source: str | None) -> Log:
    config, columns = read_config(run), columns_for_run(run, model, {})
    try:
        if not (source or config.data.source):
            raise DataError("it was in memory")
        return read_rows(source or config.data.source, split="train", data_dir=config.data.folder, columns=columns)[0]
    except DataError as error:
        if source:
            raise
        what = "the ranker is not trees alone, and trees cannot learn its scores from the log of training"
        got = f"{error.where}: {error.what}" if error.where else error.what
        raise DataError(what, where=run, got=got, hint="add --distill LOG") from error


def _split(run: Path, log: Log, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
    """Return the requests to learn from, that choose the number of rounds, and that judge.

    Requests that the run did not use judge, if there are enough. The last value says whether they do.
    """
    rng = np.random.default_rng(seed)
    several = np.flatnonzero(log.lengths > 1)
    most = int(JUDGING * len(several))
    if most < 1 or len(several) - most < 2:
        what = "too few requests with two items or more to learn scores from"
        raise DataError(what, got=len(several), hint="pass a larger log with --distill")
    used = used_requests(run, log)
    free = several if used is None else several[~(used[0] | used[1])[several]]
    unused = used is not None and len(free) >= min(LEAST, most)
    judge = rng.permutation(free if unused else several)[:most]
    others = rng.permutation(np.setdiff1d(several, judge))
    count = max(1, int(STOPPING * len(others)))
    return np.sort(others[count:]), np.sort(others[:count]), np.sort(judge), unused


def _of(log: Log, values: np.ndarray, requests: np.ndarray) -> np.ndarray:
    """Return the values [rows] of some requests."""
    chosen = np.zeros(len(log), bool)
    chosen[requests] = True
    return np.asarray(values[chosen[log.request_of_row]])


def _centred(log: Log) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that subtracts from values [rows] the mean of their request."""
    request, lengths = log.request_of_row, log.lengths
    return lambda values: np.asarray(values - (np.bincount(request, values, len(lengths)) / lengths)[request])


def _fit(
    model: Model, log: Log, scores: np.ndarray, learn: np.ndarray, stop: np.ndarray, library: str, seed: int
) -> Booster:
    """Grow trees by the squared error of differences of scores within requests, until it stops to fall."""
    taught, stopping = log.select(learn), log.select(stop)
    target, centred = _of(log, scores, learn), _centred(taught)
    wanted, centred_stop = _of(log, scores, stop), _centred(stopping)
    features = np.asarray(stopping.features)
    sums = np.zeros(len(features))
    errors: list[float] = []
    grown: list[Booster] = []

    def residuals(predicted: np.ndarray, _data: Any) -> tuple[np.ndarray, np.ndarray]:
        return centred(np.asarray(predicted, np.float64) - target), np.ones(len(target))

    def after_round(booster: Booster, rounds: int) -> bool:
        nonlocal sums
        sums = sums + booster.predict(features, rounds - 1, rounds)
        errors.append(float(np.square(centred_stop(sums - wanted)).mean()))
        grown[:] = [booster]
        return rounds - int(np.argmin(errors)) > PATIENCE

    categorical = tuple(sorted(model.feature_names.index(name) for name in model.vocabularies))
    codes = max((len(values) for values in model.vocabularies.values()), default=0) + 1
    # Splits by one value of a category, because most engines have no others.
    parameters = {**PARAMETERS[library], "max_cat_to_onehot": codes + 1}
    rows = TreeRows(np.asarray(taught.features), None, model.feature_names, categorical)
    how = Boosting(ROUNDS, LR, seed, parameters, residuals)
    BOOSTERS[library].grow(rows, how, after_round)
    if not grown:
        raise DataError("no trees were grown", hint="pass a larger log with --distill")
    return grown[0].shortened(int(np.argmin(errors)) + 1)


def _values(
    run: Path, model: Model, log: Log, of_ranker: np.ndarray, of_trees: np.ndarray
) -> tuple[str | None, dict[str, float]]:
    """Return the metric that judges the run, and its values for both rankers; None without labels for it."""
    metric = judging_metric(read_config(run).selection)
    if not log.actions if metric.startswith((FEEDBACK, OFF_POLICY)) else log.relevance is None:
        return None, {}
    segments = Decisions.load(run).segments if "segment" in log.context else ()
    judged = by_segment(log, segments)[0] if segments else log
    values = request_metrics(
        judged, [metric], label=model.label, model=load_off_policy_model(run / VALUES), segments=segments, keep=True
    )
    ranker, trees = values(of_ranker)[metric], values(of_trees)[metric]
    sign = -1 if less_is_better(metric) else 1
    test = paired_test(sign * trees, sign * ranker, log.weights)
    means = {
        name: float(np.average(each, weights=log.weights)) for name, each in (("ranker", ranker), ("trees", trees))
    }
    return metric, {**means, "difference": test.difference, "low": test.low, "high": test.high}
