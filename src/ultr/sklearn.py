"""`UnbiasedRanker`: training and scoring with scikit-learn's manners, from frames or arrays, without files."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from ultr.checkpoint import read_json
from ultr.errors import DataError
from ultr.evaluation import evaluate_scores
from ultr.labels import DEFAULT_LABEL
from ultr.log import Log, read_log
from ultr.methods import thresholds
from ultr.models import load_model
from ultr.runs import DEFAULT_METHOD, DEFAULT_SELECT, RunConfig, run_training
from ultr.training import TrainingOptions


class UnbiasedRanker(BaseEstimator):  # type: ignore[misc]
    """Learn to rank from a log of feedback.

    >>> ranker = UnbiasedRanker(method="lambdarank", label="click", steps=200)

    `fit` takes a frame (pandas, polars, Arrow) whose columns are found by name or given, or an array of features with
    `actions`, `request` and `position` beside it. `predict` gives a score for each row of a frame or array. `bias_`
    holds what was learned about bias.
    """

    def __init__(
        self,
        *,
        method: str = DEFAULT_METHOD,
        method_options: Mapping[str, Any] | None = None,
        propensities: Mapping[int, float] | None = None,
        label: str = DEFAULT_LABEL,
        ranker: str = "mlp",
        hidden: Sequence[int] = (512, 256, 128),
        dropout: float = 0.0,
        lr: float = 0.02,
        steps: int = 1000,
        batch: int = 256,
        optimizer: str = "adagrad",
        weight_decay: float = 0.0,
        evaluate_every: int = 50,
        patience: int = 0,
        bias_steps: int = 3000,
        select: str = DEFAULT_SELECT,
        held_out: float = 0.2,
        device: str = "auto",
        random_state: int = 0,
    ) -> None:
        self.method = method
        self.method_options = method_options
        self.propensities = propensities
        self.label = label
        self.ranker = ranker
        self.hidden = hidden
        self.dropout = dropout
        self.lr = lr
        self.steps = steps
        self.batch = batch
        self.optimizer = optimizer
        self.weight_decay = weight_decay
        self.evaluate_every = evaluate_every
        self.patience = patience
        self.bias_steps = bias_steps
        self.select = select
        self.held_out = held_out
        self.device = device
        self.random_state = random_state

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        request: Any = None,
        position: Any = None,
        actions: Any = None,
        features: Sequence[str] | str | None = None,
        categorical: Sequence[str] | str | None = None,
    ) -> UnbiasedRanker:
        """Learn from a frame, whose columns may be named; or from an array of features with arrays beside it.

        With an array, `y` is the click of each row, or `actions` a mapping from names to values.
        """
        named = {"request": request, "position": position, "actions": actions}
        if isinstance(X, np.ndarray):
            log = _log_of_arrays(X, y, **named)
        else:
            log = read_log(X, **named, features=features, categorical=categorical)
        options = {} if self.ranker == "linear" else {"hidden": tuple(self.hidden), "dropout": self.dropout}
        known = None if self.propensities is None else {str(k): float(v) for k, v in self.propensities.items()}
        config = RunConfig(
            data="",
            method=self.method,
            method_options=dict(self.method_options or {}),
            propensities=known,
            label=self.label,
            ranker=self.ranker,
            ranker_options=options,
            held_out=self.held_out,
            select=self.select,
            training=TrainingOptions(
                steps=self.steps,
                batch=self.batch,
                lr=self.lr,
                optimizer=self.optimizer,
                weight_decay=self.weight_decay,
                evaluate_every=self.evaluate_every,
                patience=self.patience,
                bias_steps=self.bias_steps,
                seed=self.random_state,
                device=self.device,
            ),
        )
        if thresholds(config.method, config.label, config.method_options):
            what = f"'{config.method}' is for clicks: '{config.label}' counts as 1 where it is above zero"
            warnings.warn(what, stacklevel=2)
        history: list[dict[str, float]] = []
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            run_training(
                config,
                run,
                log=log,
                checkpoint_seconds=float("inf"),
                on_progress=lambda p: history.append({"step": p.step, "loss": p.loss, **p.figures}),
            )
            self.model_ = load_model(run)
            self.bias_ = read_json(run / "bias.json") if (run / "bias.json").is_file() else None
        self.history_ = history
        self.n_features_in_ = len(log.feature_names)
        self.feature_names_in_ = np.array(log.feature_names, dtype=object)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """A score for each row, in the order of the rows."""
        check_is_fitted(self)
        table = _features_table(X, self.model_.feature_names)
        model = self.model_
        columns = [
            model.codes_of(name, np.asarray(table[name]))
            if name in model.vocabularies
            else np.asarray(table[name], dtype=np.float32)
            for name in model.feature_names
        ]
        rows = np.column_stack(columns).astype(np.float32)
        if not np.isfinite(rows).all():
            raise DataError("features should be finite", got=f"{int((~np.isfinite(rows)).sum())} values that are not")
        return self.model_.score_features(rows, device=self.device)

    def score(self, X: Any, y: Any, *, request: Any = None) -> float:
        """Mean NDCG@10 over requests, given true labels; `request` is a column's name or an array."""
        scores = self.predict(X)
        requests = np.zeros(len(scores)) if request is None else X[request] if isinstance(request, str) else request
        table = {"request": np.asarray(requests), "relevance": np.asarray(y), "row": np.arange(len(scores))}
        log = read_log(pa.table(table), item="row")
        return float(evaluate_scores(log, scores[log.item_ids.to_numpy()], "ndcg@10")["ndcg@10"].mean())


def _log_of_arrays(X: np.ndarray, y: Any, *, request: Any, position: Any, actions: Any) -> Log:
    if X.ndim != 2:
        raise DataError("an array of features is [rows, features]", got=list(X.shape))
    given: Mapping[str, Any] = actions if isinstance(actions, Mapping) else {} if y is None else {"click": y}
    if not given or request is None or position is None:
        raise DataError(
            "an array of features needs what was done beside it",
            mend="pass y (clicks) or actions, request and position",
        )
    columns = {"request": request, "position": position, **given}
    for name, values in columns.items():
        if np.shape(values) != (len(X),):
            raise DataError(f"'{name}' should have one value for each of {len(X)} rows", got=list(np.shape(values)))
    table = {name: np.asarray(values) for name, values in columns.items()}
    table |= {f"feature_{i}": np.ascontiguousarray(X[:, i]) for i in range(X.shape[1])}
    return read_log(pa.table(table), request="request", position="position", actions=list(given), features="feature_*")


def _features_table(X: Any, names: Sequence[str]) -> Mapping[str, Any]:
    if isinstance(X, np.ndarray):
        if X.ndim != 2 or X.shape[1] != len(names):
            raise DataError(f"features should be [rows, {len(names)}]", got=list(X.shape))
        return {name: X[:, i] for i, name in enumerate(names)}
    known = list(getattr(X, "column_names", None) or X.columns)
    lacking = [name for name in names if name not in known]
    if lacking:
        raise DataError(f"the frame lacks the feature '{lacking[0]}' that the model was trained on")
    return {name: X[name] for name in names}
