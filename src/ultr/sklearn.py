"""`UnbiasedRanker`: a scikit-learn estimator that trains on data frames or arrays in memory, and scores them."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from ultr.bias.examination import estimate_examination
from ultr.errors import DataError, OptionError, nearest
from ultr.evaluation.off_policy import off_policy_value
from ultr.evaluation.scores import evaluate_scores
from ultr.log import Log, read_log
from ultr.log.labels import DEFAULT_LABEL, Label
from ultr.log.readers import as_table
from ultr.log.schema import Columns, resolve_columns
from ultr.methods import thresholds
from ultr.rankers.boosters import is_trees
from ultr.rankers.model import load_model
from ultr.training.config import AUTO, DEFAULT_METHOD, RunConfig, TrainingOptions, default_training
from ultr.training.loop import Progress
from ultr.training.outcome import ranks
from ultr.training.run import run_training
from ultr.utils.arguments import check_value
from ultr.utils.jsonfiles import read_json

CLIP = 10.0  # in `score`, feedback is weighted by 1 / P(seen), at most by this
ROW = "ultr.row"  # column with the row numbers of X, because a log has its rows in another order


class UnbiasedRanker(BaseEstimator):  # type: ignore[misc]
    """A ranker that learns from logged feedback and corrects its position bias.

    >>> ranker = UnbiasedRanker(method="lambdarank", label="click", steps=200)

    X has one row per item shown. It is a frame (pandas, polars, Arrow) or an array.

    - The columns of a frame are recognised by common names, or named here: `request`, `position`, `actions`,
      `features`, `categorical`. `item`, `query` and `randomised` (request in random order) help to estimate the bias.
    - The columns of an array are called `feature_0`, `feature_1`, ... Pass request and position to `fit`, or name
      their columns by number:

    >>> ranker = UnbiasedRanker(label="click", request=0, position=1)

    `ranker="lightgbm"` or `"xgboost"` trains trees, with `ranker_options` as parameters of the library. If `steps` and
    `lr` are None, networks train for 1000 steps with learning rate 0.02, and trees for up to 500 rounds with 0.1.

    In cross-validation, keep all rows of a request in one fold (`cv=GroupKFold(5)`, `groups=frame["request"]`). `score`
    needs request and position as columns of X, or by metadata routing (`set_score_request(request=True, ...)`).

    Attributes after `fit`:

    - `bias_`: all estimates of position bias, as in bias.json of `ultr train`; None if the method estimates none
    - `theta_`: position -> estimated probability that users see it; None if the method does not estimate it
    - `history_`: one dict per evaluation, with the step, the loss and the selection metric
    - `model_`: the trained model
    - `n_features_in_` and, for frames, `feature_names_in_`: the features of the ranker
    """

    def __init__(
        self,
        *,
        method: str = DEFAULT_METHOD,
        method_options: Mapping[str, Any] | None = None,
        propensities: Mapping[int, float] | None = None,
        label: str = DEFAULT_LABEL,
        ranker: str = "mlp",
        ranker_options: Mapping[str, Any] | None = None,
        hidden: Sequence[int] = (512, 256, 128),
        dropout: float = 0.0,
        lr: float | None = None,
        steps: int | None = None,
        batch: int = 256,
        optimizer: str = "adagrad",
        weight_decay: float = 0.0,
        evaluate_every: int | None = None,
        patience: int | None = None,
        bias_steps: int = 3000,
        select: str = AUTO,
        held_out: float = 0.2,
        device: str = "auto",
        random_state: int | np.random.RandomState | None = 0,
        request: str | int | None = None,
        position: str | int | None = None,
        actions: Sequence[str] | str | None = None,
        features: Sequence[str] | str | None = None,
        categorical: Sequence[str] | str | None = None,
        item: str | int | None = None,
        query: str | int | None = None,
        randomised: str | int | None = None,
    ) -> None:
        self.method, self.method_options, self.propensities, self.label = method, method_options, propensities, label
        self.ranker, self.ranker_options, self.hidden, self.dropout = ranker, ranker_options, hidden, dropout
        self.lr, self.steps, self.batch, self.optimizer, self.weight_decay = lr, steps, batch, optimizer, weight_decay
        self.evaluate_every, self.patience, self.bias_steps = evaluate_every, patience, bias_steps
        self.select, self.held_out, self.device, self.random_state = select, held_out, device, random_state
        self.request, self.position, self.actions = request, position, actions
        self.features, self.categorical = features, categorical
        self.item, self.query, self.randomised = item, query, randomised

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
        sample_weight: Any = None,
    ) -> UnbiasedRanker:
        """Learn from the items that were shown and the feedback on them.

        `request` and `position` are names of columns of X, or arrays with one value per row. Feedback is in X, in `y`
        (one column for each action of the label) or in `actions` (a frame, or a mapping from names to arrays).
        Arguments here replace those of the constructor. `sample_weight` must be equal for all rows of a request.
        """
        check_value("ranker", self.ranker, str)
        roles = dict(request=request, position=position, actions=actions, features=features, categorical=categorical)
        sources = {role: getattr(self, role) if value is None else value for role, value in roles.items()}
        sources |= {"weight": sample_weight, "item": self.item, "query": self.query, "randomised": self.randomised}
        table, named = _joined(X, sources)
        if y is not None:
            table, named["actions"] = _with_feedback(table, y, Label(self.label))
        columns = resolve_columns(table.schema, where=f"the {type(X).__name__}", **named)
        log = read_log(table, missing="keep" if is_trees(self.ranker) else "reject", **named)
        self._train(log)
        self._features: dict[str, Any] = {"features": list(columns.features), "categorical": list(columns.categorical)}
        self._named = {role: value for role, value in sources.items() if _values(role, value) is None}
        self._y_is_feedback = y is not None
        self.n_features_in_ = len(log.feature_names) if _is_frame(X) else np.shape(X)[1]
        self.__dict__.pop("feature_names_in_", None)
        if _is_frame(X):
            self.feature_names_in_ = np.array(log.feature_names, dtype=object)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Return the score of each row, in the order of the rows."""
        check_is_fitted(self)
        table, model, features = _table(X), self.model_, dict(self._features)
        if not _is_frame(X):  # an array has the columns of the array passed to fit, or the features of the frame
            if table.num_columns != self.n_features_in_:
                raise DataError(f"X must have {self.n_features_in_} columns, as in fit", got=table.num_columns)
            table = table.rename_columns(list(getattr(self, "feature_names_in_", table.column_names)))
            numeric = [name for name in model.feature_names if name not in model.vocabularies]
            features = {"features": numeric, "categorical": list(model.vocabularies)}
        used = [*features["features"], *features["categorical"]]
        if missing := [name for name in used if name not in table.column_names]:
            what = f"the frame has no column '{missing[0]}', which is a feature of the model"
            raise DataError(what, hint=nearest(missing[0], table.column_names))
        log = read_log(_numbered(table.select(used)), request=ROW, actions=[], missing=model.missing, **features)
        return model.score(replace(log, feature_names=model.feature_names), device=self.device)

    def rank(self, X: Any, *, request: Any = None) -> Any:
        """Return the frame with the columns `score` and `rank` (1: best of its request); rows keep their order."""
        scores = self.predict(X)
        if not _is_frame(X):
            raise DataError("rank needs a frame", got=type(X).__name__, hint="use predict for arrays")
        table, columns, _ = self._as_fitted(X, request=request)
        if existing := {"score", "rank"} & set(table.column_names):
            raise DataError(f"the frame already has a column '{min(existing)}'", hint="rename or drop this column")
        log = read_log(_numbered(table.select([columns.request])), request=columns.request, item=ROW)
        rows = np.asarray(log.item_ids)
        rank = np.empty_like(rows)
        rank[rows] = 1 + ranks(log, scores[rows])
        if isinstance(X, pa.Table):
            return X.append_column("score", pa.array(scores)).append_column("rank", pa.array(rank))
        with_columns = X.with_columns if hasattr(X, "with_columns") else X.assign
        return with_columns(score=scores, rank=rank)

    def score(
        self,
        X: Any,
        y: Any = None,
        *,
        request: Any = None,
        position: Any = None,
        actions: Any = None,
        sample_weight: Any = None,
    ) -> float:
        """Return the quality of the new rankings, as a mean over requests; larger is better.

        - With true labels, in `y` or in a column `relevance`, this is NDCG@10.
        - Otherwise it is the sum of labels over the first ten items if users saw the new rankings, estimated from
          logged feedback. `y` counts as feedback if feedback was in `y` of `fit` and positions are known.

        The estimate uses `propensities`, the probabilities that positions are seen, or estimates them from X. It does
        not use `theta_`, because rankers that overstate the bias would then have the best scores.
        """
        scores = self.predict(X)
        table, columns, named = self._as_fitted(
            X, request=request, position=position, actions=actions, weight=sample_weight, query=None, randomised=None
        )
        label = Label(self.label)
        if y is not None and self._y_is_feedback and columns.position is not None:
            (table, named["actions"]), y = _with_feedback(table, y, label), None
        if y is None and columns.relevance is not None:
            y = table[columns.relevance]
        if y is not None:
            needed = [name for name in (columns.request, columns.weight) if name is not None]
            labelled = _numbered(_with(table.select(needed), {"relevance": y}))
            log = read_log(labelled, request=columns.request, weight=columns.weight, relevance="relevance", item=ROW)
            ndcg = evaluate_scores(log, scores[np.asarray(log.item_ids)], "ndcg@10")["ndcg@10"]
            return float(np.average(ndcg, weights=log.weights))
        log = read_log(_numbered(table), missing=self.model_.missing, **{**named, **self._features, "item": ROW})
        known = {int(k): float(v) for k, v in self._propensities().items()}
        theta = known or estimate_examination(log, label).by_position()
        scores = scores[np.asarray(log.item_ids)]
        return off_policy_value(log, scores, theta=theta, label=label, estimator="clipped", clip=CLIP).value

    def _as_fitted(self, X: Any, **sources: Any) -> tuple[pa.Table, Columns, dict[str, Any]]:
        """Return X as a table, the columns of all roles, and the columns of the roles in `sources`.

        A source is a column of X or values by row, which become a column; without one, it is the column named in `fit`.
        """
        sources = {role: self._named.get(role) if value is None else value for role, value in sources.items()}
        table, named = _joined(X, sources)
        single = named | {"actions": [], "features": [], "categorical": []}
        return table, resolve_columns(table.schema, where=f"the {type(X).__name__}", **single), named

    def _options(self, name: str) -> Mapping[str, Any]:
        return check_value(name, getattr(self, name), Mapping[str, Any] | None) or {}

    def _propensities(self) -> Mapping[Any, float]:
        return check_value("propensities", self.propensities, Mapping[Any, float] | None) or {}

    def _train(self, log: Log) -> None:
        seed = self.random_state
        if isinstance(seed, int | np.integer):
            seed = int(seed)
        else:
            try:
                seed = int(check_random_state(seed).randint(1 << 31))
            except (TypeError, ValueError) as error:
                what = "'random_state' is not a seed"
                raise OptionError(what, got=repr(seed)[:100], hint="pass a whole number") from error
        check_value("hidden", self.hidden, Sequence[int])
        options = {f.name: getattr(self, f.name, None) for f in fields(TrainingOptions)}
        training = {name: value for name, value in options.items() if value is not None}
        network = {"hidden": tuple(self.hidden), "dropout": self.dropout} if self.ranker == "mlp" else {}
        config = RunConfig(
            data="",
            method_options=dict(self._options("method_options")),
            propensities={str(k): float(v) for k, v in self._propensities().items()} or None,
            ranker_options={**network, **self._options("ranker_options")},
            training=replace(default_training(self.ranker), **training, seed=seed),
            **{name: getattr(self, name) for name in ("method", "label", "ranker", "held_out", "select")},
        )
        if thresholds(config.method, config.label, config.method_options, ranker=config.ranker):
            what = f"'{config.method}' is a method for clicks: it uses 1 if '{config.label}' is above zero, else 0"
            warnings.warn(what, stacklevel=3)
        evaluations: list[Progress] = []
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            run_training(config, run, log=log, checkpoint_seconds=float("inf"), on_progress=evaluations.append)
            self.model_ = load_model(run)
            self.bias_ = read_json(run / "bias.json") if (run / "bias.json").is_file() else None
        bias = self.bias_ or {}
        self.theta_ = dict(zip(bias["positions"], bias["theta"], strict=True)) if "theta" in bias else None
        self.history_ = [{"step": p.step, "loss": p.loss, **p.metrics} for p in evaluations]


def _is_frame(X: Any) -> bool:
    return hasattr(X, "columns")


def _array(name: str, values: Any) -> np.ndarray:
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"'{name}' cannot be read ({error})", hint="pass an array with values of one type") from error


def _column(name: str, values: Any, rows: int) -> pa.Array:
    array = _array(name, values)
    try:
        if array.shape == (rows,):
            return pa.array(array)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"'{name}' cannot be read ({error})", hint="pass an array with values of one type") from error
    raise DataError(f"'{name}' must have one value for each of {rows} rows", got=f"shape {list(array.shape)}")


def _table(X: Any) -> pa.Table:
    """Return a frame or an array as a table; the columns of an array are called feature_0, feature_1, ..."""
    if _is_frame(X):
        return as_table(X)
    array = _array("X", X)
    if array.ndim != 2:
        raise DataError("X must be a frame or an array [rows, columns]", got=f"shape {list(array.shape)}")
    return pa.table({f"feature_{i}": _column(f"feature_{i}", v, len(array)) for i, v in enumerate(array.T)})


def _values(role: str, value: Any) -> Mapping[str, Any] | None:
    """Return column name -> values if `value` holds values by row; None if it names columns of X."""
    if role in ("request", "position", "weight"):
        return None if value is None or isinstance(value, str | int) else {role: value}
    if _is_frame(value):
        table = as_table(value)
        return dict(zip(table.column_names, table.columns, strict=True))
    return value if isinstance(value, Mapping) else None


def _with(table: pa.Table, columns: Mapping[str, Any]) -> pa.Table:
    others = {name: table[name] for name in table.column_names if name not in columns}
    added = {name: _column(name, values, table.num_rows) for name, values in columns.items()}
    return pa.table({**others, **added}).replace_schema_metadata(table.schema.metadata)


def _joined(X: Any, sources: Mapping[str, Any]) -> tuple[pa.Table, dict[str, Any]]:
    """Return X as a table and role -> column name; sources that hold values by row become columns of the table."""
    table, named = _table(X), dict(sources)
    for role, value in sources.items():
        if (columns := _values(role, value)) is not None:
            table, named[role] = _with(table, columns), list(columns) if role == "actions" else role
        elif isinstance(value, int):
            named[role] = f"feature_{value}"
    if not _is_frame(X) and named["request"] is None:
        hint = "pass request and position as arrays or column numbers; in cross-validation, use metadata routing"
        raise DataError("X is an array, and the request of each row is not given", hint=hint)
    return table, named


def _with_feedback(table: pa.Table, y: Any, label: Label) -> tuple[pa.Table, list[str]]:
    """Add y to the table, as the actions of the label that are not columns yet; return all actions of the label too."""
    missing = [name for name in label.actions if name not in table.column_names]
    if not missing:
        hint = "leave out y; for score, put true labels into a column 'relevance'"
        raise DataError(f"feedback is given twice, in X ({', '.join(label.actions)}) and in y", hint=hint)
    columns = _values("actions", y)
    if columns is None:
        array = _array("y", y)
        values = array[:, None] if array.ndim == 1 else array
        if values.ndim != 2 or values.shape[1] != len(missing):
            got = f"shape {list(array.shape)}"
            raise DataError(f"y must have one column for each of {', '.join(missing)}", got=got)
        columns = dict(zip(missing, values.T, strict=True))
    return _with(table, columns), list(label.actions)


def _numbered(table: pa.Table) -> pa.Table:
    return table.append_column(ROW, pa.array(np.arange(table.num_rows)))
