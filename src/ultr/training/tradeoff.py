"""The trade-off of two goals, such as clicks and purchases: the values of rankers that weight them differently.

Trees of each goal predict its expectation, E[goal | examined, x] = exp(s). The expectation of a weighted sum is the sum
of these, so that two fits give the ranker of every weighting. The test requests judge all of them, the ranker of the
run and the logged ranking by both goals, off policy, under the examination of the run.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from ultr.bias.after_click import trust_of
from ultr.errors import DataError
from ultr.evaluation.comparing import LOGGED_RANKING, drawn, off_policy_values, plausible_estimators
from ultr.evaluation.off_policy import fit_off_policy_model
from ultr.evaluation.scores import LIKELIHOOD, Mean
from ultr.log.labels import Label
from ultr.training.data import Data
from ultr.training.examining import Examined
from ultr.training.fitting import FitInputs, FitPlace, Fitted, scores_of
from ultr.training.loop import Listeners
from ultr.training.outcome import THE_RUN, evidence_of
from ultr.training.trees import TreeFit
from ultr.utils.display import begin_stage
from ultr.utils.jsonfiles import check_format, content_errors, read_json, write_json

TRADE_OFF = "tradeoff.json"  # file of a run
METRIC = "off-policy-reward@10"
FORMAT = 1


def write_trade_off(
    fit: Fitted, data: Data, ranker: nn.Module, examined: Examined, run: Path, *, on_note: Callable[[str], None]
) -> None:
    """Write the trade-off of the two goals of a run, whose `data` is as logged; `fit` is one of its fits.

    There is none without two goals, off-policy values, LightGBM, and a log in memory with test requests.
    """
    inputs, log, model = fit.inputs, data.test, examined.values
    config, goals = inputs.config, inputs.config.goals
    if len(goals) != 2 or not config.tradeoff or log is None or data.stream is not None:
        return
    if model is None or examined.examination is None or not find_spec("lightgbm"):
        return
    begin_stage("weighting the goals")
    started, logged = time.monotonic(), data.logged_scores(log)
    rankers = {} if logged is None else {LOGGED_RANKING: logged}
    expected = [_expected(inputs, examined, goal, log.features) for goal in goals]
    names = [f"{100 * share:.3g} : {100 - 100 * share:.3g}" for share in np.linspace(1, 0, config.tradeoff).tolist()]
    for name, share in zip(names, np.linspace(1, 0, config.tradeoff), strict=True):
        rankers[name] = np.log(share * expected[0] + (1 - share) * expected[1])
    rankers[THE_RUN] = scores_of(ranker, log.features)
    theta, examination, doubt = evidence_of(data, log, model, examined.examination)
    values = []
    for goal in goals:
        of_goal = fit_off_policy_model(
            data.train, label=goal, examination=examined.examination, segments=data.segments, seed=config.seed
        )
        estimators = plausible_estimators(
            log,
            METRIC,
            theta,
            of_goal.direct(log),
            draws=drawn(examination, theta),
            doubt=doubt,
            trust=trust_of(of_goal.actions, theta),
            label=goal,
        )
        values.append(off_policy_values(estimators, rankers, METRIC, next(iter(rankers)))[0])
    content = {
        "format": FORMAT,
        "metric": METRIC,
        "goals": goals,
        "weightings": names,
        "values": {name: [asdict(each[name].mean) for each in values] for name in rankers},
    }
    write_json(run / TRADE_OFF, content)
    took = f"{time.monotonic() - started:.0f} s; --set tradeoff=0 leaves it out"
    on_note(f"ultr report shows the trade-off of {' and '.join(goals)} ({took})")
    begin_stage("writing the results")


def _expected(inputs: FitInputs, examined: Examined, goal: str, features: np.ndarray) -> np.ndarray:
    """Return the expectation of a goal for rows of features by trees, relative to its total over the training rows."""
    label = np.asarray(Label(goal)(inputs.data.train.actions), np.float64)
    if not label.any():
        raise DataError(f"no training request has a positive value of the goal '{goal}'", hint="check --label")
    size, total = float(label[label > 0].mean()), float(label.sum())
    of_goal = f"({goal}) / {size!r}"  # values around 1, whatever the unit of the goal
    options: dict[str, Any] = {"label": of_goal, "rankers": ("lightgbm",), "training.warm_start": None}
    options |= {"method.name": "direct", "method.likelihood": "poisson", "training.select": LIKELIHOOD}
    data, decisions = replace(inputs.data, label=of_goal), replace(inputs.decisions, label=of_goal)
    of_trees = FitInputs(inputs.config.with_options(**options), data, decisions, "lightgbm")
    with tempfile.TemporaryDirectory(prefix="ultr-") as folder:
        ranker = TreeFit(of_trees).fit(FitPlace(Path(folder), examined, None, Listeners())).ranker
        return np.asarray(np.exp(scores_of(ranker, features).astype(np.float64)) * size / total)


def read_trade_off(run: Path) -> dict[str, Any] | None:
    """Read the trade-off of a run; None if it has none."""
    if not (run / TRADE_OFF).is_file():
        return None
    content = read_json(run / TRADE_OFF)
    check_format(content, FORMAT, what="the trade-off of the run", where=run / TRADE_OFF, hint="train again")
    with content_errors("the trade-off of the run cannot be read", where=run, hint="train again"):
        values = {str(name): [Mean(**each) for each in pair] for name, pair in content["values"].items()}
        if {*content["weightings"]} - values.keys() or any(len(pair) != 2 for pair in values.values()):
            raise ValueError("a weighting has no values of both goals")
        return {**content, "values": values}
