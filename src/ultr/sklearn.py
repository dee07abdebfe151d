"""`UnbiasedRanker`: training and scoring with scikit-learn's manners, from frames or arrays, without files."""

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

from ultr.arguments import taken
from ultr.checkpoint import read_json
from ultr.errors import DataError, OptionError, nearest
from ultr.evaluation import evaluate_scores
from ultr.examination import estimate_examination
from ultr.labels import DEFAULT_LABEL, Label
from ultr.log import Log, read_log
from ultr.log.readers import as_table
from ultr.log.schema import Columns, resolve_columns
from ultr.methods import thresholds
from ultr.models import load_model
from ultr.offpolicy import off_policy_value
from ultr.preparing import AUTO, DEFAULT_METHOD, RunConfig
from ultr.rankers.boosters import is_trees
from ultr.runs import run_training
from ultr.training import Progress, TrainingOptions, usual_training

CLIP = 10.0  # of the weights of held-out feedback
ROW = "ultr.row"  # a column of row numbers, by which a log's rows are found again


class UnbiasedRanker(BaseEstimator):  # type: ignore[misc]
    """Learn to rank from a log of feedback.

    >>> ranker = UnbiasedRanker(method="lambdarank", label="click", steps=200)

    X has a row for each item shown. It is a frame (pandas, polars, Arrow) whose columns are found by their usual names
    or named here: `request`, `position`, `actions`, `features`, `categorical`. Or it is an array, whose columns are
    called `feature_0`, `feature_1`, ...; request and position then lie beside it in `fit`, or are columns by number:

    >>> ranker = UnbiasedRanker(label="click", request=0, position=1)

    `ranker="lightgbm"` or `"xgboost"` learns trees, with `ranker_options` as parameters of the library. What is left at
    None is as usual for the ranker: 1000 steps at a rate of 0.02 for networks, up to 500 rounds at 0.1 for trees.

    Cross-validation should keep requests whole (`cv=GroupKFold(5)`, `groups=frame["request"]`). It tells `score` of
    request and position if they are columns of X, or by metadata routing (`set_score_request(request=True, ...)`).

    After `fit`: `bias_`, what was learned about bias (as `bias.json` of a run; None if the method learns nothing);
    `theta_`, examination by position of it, if there is; `history_`, a line for each evaluation; `model_`;
    `n_features_in_`, and for frames `feature_names_in_`, the features that the ranker reads.
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
    ) -> None:
        self.method, self.method_options, self.propensities, self.label = method, method_options, propensities, label
        self.ranker, self.ranker_options, self.hidden, self.dropout = ranker, ranker_options, hidden, dropout
        self.lr, self.steps, self.batch, self.optimizer, self.weight_decay = lr, steps, batch, optimizer, weight_decay
        self.evaluate_every, self.patience, self.bias_steps = evaluate_every, patience, bias_steps
        self.select, self.held_out, self.device, self.random_state = select, held_out, device, random_state
        self.request, self.position, self.actions = request, position, actions
        self.features, self.categorical = features, categorical

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
        """Learn from what was shown and done.

        What X does not hold is given beside it: `request` and `position` as values by row, and what was done as `y` (a
        column for each action that the label reads) or as `actions` (a frame, or a mapping from names to values). What
        is named here goes before what the constructor names. `sample_weight` is one value for all rows of a request.
        """
        taken("ranker", self.ranker, str)
        given = dict(request=request, position=position, actions=actions, features=features, categorical=categorical)
        chosen = {part: getattr(self, part) if value is None else value for part, value in given.items()}
        chosen["weight"] = sample_weight
        table, named = _placed(X, chosen)
        if y is not None:
            table, named["actions"] = _with_feedback(table, y, Label(self.label))
        columns = resolve_columns(table.schema, where=f"the {type(X).__name__}", **named)
        log = read_log(table, missing="keep" if is_trees(self.ranker) else "refuse", **named)
        self._train(log)
        self._features: dict[str, Any] = {"features": list(columns.features), "categorical": list(columns.categorical)}
        self._named = {part: value for part, value in chosen.items() if _beside(part, value) is None}
        self._y_is_feedback = y is not None
        self.n_features_in_ = len(log.feature_names) if _is_frame(X) else np.shape(X)[1]
        self.__dict__.pop("feature_names_in_", None)
        if _is_frame(X):
            self.feature_names_in_ = np.array(log.feature_names, dtype=object)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """A score for each row, in the order of the rows."""
        check_is_fitted(self)
        table, model, features = _table(X), self.model_, dict(self._features)
        if not _is_frame(X):  # its columns are those of the array, or the features of the frame, that was learned from
            if table.num_columns != self.n_features_in_:
                raise DataError(f"an array should be [rows, {self.n_features_in_}], as in fit", got=list(np.shape(X)))
            table = table.rename_columns(list(getattr(self, "feature_names_in_", table.column_names)))
            numeric = [name for name in model.feature_names if name not in model.vocabularies]
            features = {"features": numeric, "categorical": list(model.vocabularies)}
        used = [*features["features"], *features["categorical"]]
        if lacking := [name for name in used if name not in table.column_names]:
            what = f"the frame lacks the feature '{lacking[0]}' that the model was trained on"
            raise DataError(what, mend=nearest(lacking[0], table.column_names))
        log = read_log(_numbered(table.select(used)), request=ROW, actions=[], missing=model.missing, **features)
        return model.score(replace(log, feature_names=model.feature_names), device=self.device)

    def rank(self, X: Any, *, request: Any = None) -> Any:
        """The frame with the columns `score` and `rank`, from 1 in each request; rows stay in their order."""
        scores = self.predict(X)
        if not _is_frame(X):
            raise DataError("rank gives back the frame it is given", got=type(X).__name__, mend="use predict")
        table, parts, _ = self._as_fitted(X, request=request)
        if taken := {"score", "rank"} & set(table.column_names):
            raise DataError("the frame has such a column already", got=f"'{min(taken)}'", mend="rename or drop it")
        log = read_log(_numbered(table.select([parts.request])), request=parts.request, item=ROW)
        rows = np.asarray(log.item_ids)
        ranks = np.empty_like(rows)
        ranks[rows] = _new_ranks(log, scores[rows], ties=rows)
        if isinstance(X, pa.Table):
            return X.append_column("score", pa.array(scores)).append_column("rank", pa.array(ranks))
        added = X.with_columns if hasattr(X, "with_columns") else X.assign
        return added(score=scores, rank=ranks)

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
        """How good the rankings are, on average over requests.

        With true labels, as `y` or in a column `relevance`, it is NDCG@10. Otherwise it is what the feedback of these
        rows says of the label's sum over the first ten places, were users shown the new rankings. `y` is such feedback
        if `fit` was given it as `y` and positions are known. Examination is `propensities`, or else is estimated from
        these rows, alike for all rankers compared on them: by `theta_`, those that overstate bias would look best.
        """
        scores = self.predict(X)
        beside = dict(request=request, position=position, actions=actions, weight=sample_weight)
        table, parts, named = self._as_fitted(X, **beside)
        label = Label(self.label)
        if y is not None and self._y_is_feedback and parts.position is not None:
            (table, named["actions"]), y = _with_feedback(table, y, label), None
        if y is None and parts.relevance is not None:
            y = table[parts.relevance]
        if y is not None:
            kept = [name for name in (parts.request, parts.weight) if name is not None]
            judged = _numbered(_with(table.select(kept), {"relevance": y}))
            log = read_log(judged, request=parts.request, weight=parts.weight, relevance="relevance", item=ROW)
            figures = evaluate_scores(log, scores[np.asarray(log.item_ids)], "ndcg@10")["ndcg@10"]
            return float(np.average(figures, weights=log.weights))
        log = read_log(_numbered(table), missing=self.model_.missing, **{**named, **self._features, "item": ROW})
        theta = {int(k): float(v) for k, v in self._known().items()} or _theta(log, label)
        own = scores[np.asarray(log.item_ids)]
        return off_policy_value(log, own, theta=theta, label=label, estimator="clipped", clip=CLIP).value

    def _as_fitted(self, X: Any, **given: Any) -> tuple[pa.Table, Columns, dict[str, Any]]:
        """X with what is given beside it, or else named as it was to `fit`; which column is what; and the names."""
        chosen = {part: self._named.get(part) if value is None else value for part, value in given.items()}
        table, named = _placed(X, chosen)
        single = named | {"actions": [], "features": [], "categorical": []}
        return table, resolve_columns(table.schema, where=f"the {type(X).__name__}", **single), named

    def _options(self, name: str) -> Mapping[str, Any]:
        return taken(name, getattr(self, name), Mapping[str, Any] | None) or {}

    def _known(self) -> Mapping[Any, float]:
        return taken("propensities", self.propensities, Mapping[Any, float] | None) or {}

    def _train(self, log: Log) -> None:
        seed = self.random_state
        if isinstance(seed, int | np.integer):
            seed = int(seed)
        else:
            try:
                seed = int(check_random_state(seed).randint(1 << 31))
            except (TypeError, ValueError) as error:
                raise OptionError("random_state is no seed", got=repr(seed)[:100], mend="give a number") from error
        taken("hidden", self.hidden, Sequence[int])
        given = {f.name: getattr(self, f.name, None) for f in fields(TrainingOptions)}
        training = {name: value for name, value in given.items() if value is not None}
        network = {"hidden": tuple(self.hidden), "dropout": self.dropout} if self.ranker == "mlp" else {}
        config = RunConfig(
            data="",
            method_options=dict(self._options("method_options")),
            propensities={str(k): float(v) for k, v in self._known().items()} or None,
            ranker_options={**network, **self._options("ranker_options")},
            training=replace(usual_training(self.ranker), **training, seed=seed),
            **{name: getattr(self, name) for name in ("method", "label", "ranker", "held_out", "select")},
        )
        if thresholds(config.method, config.label, config.method_options, ranker=config.ranker):
            what = f"'{config.method}' is for clicks: '{config.label}' counts as 1 where it is above zero"
            warnings.warn(what, stacklevel=3)
        seen: list[Progress] = []
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            run_training(config, run, log=log, checkpoint_seconds=float("inf"), on_progress=seen.append)
            self.model_ = load_model(run)
            self.bias_ = read_json(run / "bias.json") if (run / "bias.json").is_file() else None
        learned = self.bias_ or {}
        self.theta_ = dict(zip(learned["positions"], learned["theta"], strict=True)) if "theta" in learned else None
        self.history_ = [{"step": p.step, "loss": p.loss, **p.figures} for p in seen]


def _is_frame(X: Any) -> bool:
    return hasattr(X, "columns")


def _array(name: str, values: Any) -> np.ndarray:
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"'{name}' cannot be read ({error})", mend="give plain values of one type") from error


def _column(name: str, values: Any, rows: int) -> pa.Array:
    array = _array(name, values)
    try:
        if array.shape == (rows,):
            return pa.array(array)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"'{name}' cannot be read ({error})", mend="give plain values of one type") from error
    raise DataError(f"'{name}' should have one value for each of {rows} rows", got=list(array.shape))


def _table(X: Any) -> pa.Table:
    """A frame as a table, or an array, whose columns are then called feature_0, feature_1, ..."""
    if _is_frame(X):
        return as_table(X)
    array = _array("X", X)
    if array.ndim != 2:
        raise DataError("X should be a frame, or an array [rows, columns]", got=f"shape {list(array.shape)}")
    return pa.table({f"feature_{i}": _column(f"feature_{i}", v, len(array)) for i, v in enumerate(array.T)})


def _beside(part: str, value: Any) -> Mapping[str, Any] | None:
    """The columns that are given for a part as values by row; None if columns are named."""
    if part in ("request", "position", "weight"):
        return None if value is None or isinstance(value, str | int) else {part: value}
    if _is_frame(value):
        table = as_table(value)
        return dict(zip(table.column_names, table.columns, strict=True))
    return value if isinstance(value, Mapping) else None


def _with(table: pa.Table, columns: Mapping[str, Any]) -> pa.Table:
    kept = {name: table[name] for name in table.column_names if name not in columns}
    added = {name: _column(name, values, table.num_rows) for name, values in columns.items()}
    return pa.table({**kept, **added}).replace_schema_metadata(table.schema.metadata)


def _placed(X: Any, chosen: Mapping[str, Any]) -> tuple[pa.Table, dict[str, Any]]:
    """X as a table, with what is given beside it as further columns, and the names of columns by part."""
    table, named = _table(X), dict(chosen)
    for part, value in chosen.items():
        if (columns := _beside(part, value)) is not None:
            table, named[part] = _with(table, columns), list(columns) if part == "actions" else part
        elif isinstance(value, int):
            named[part] = f"feature_{value}"
    if not _is_frame(X) and named["request"] is None:
        mend = "pass request and position, as values or numbers of columns; see UnbiasedRanker on cross-validation"
        raise DataError("an array does not say which request a row belongs to", mend=mend)
    return table, named


def _with_feedback(table: pa.Table, y: Any, label: Label) -> tuple[pa.Table, list[str]]:
    """The table with y as the actions that the label reads and the table lacks, and the actions that it reads."""
    lacking = [name for name in label.actions if name not in table.column_names]
    if not lacking:
        mend = "leave y out; true labels, for score, go into a column 'relevance'"
        raise DataError(f"X holds what was done ({', '.join(label.actions)}), and there is y too", mend=mend)
    columns = _beside("actions", y)
    if columns is None:
        given = _array("y", y)
        values = given[:, None] if given.ndim == 1 else given
        if values.ndim != 2 or values.shape[1] != len(lacking):
            raise DataError(
                f"y should have a column for each of {', '.join(lacking)}", got=f"shape {list(given.shape)}"
            )
        columns = dict(zip(lacking, values.T, strict=True))
    return _with(table, columns), list(label.actions)


def _numbered(table: pa.Table) -> pa.Table:
    return table.append_column(ROW, pa.array(np.arange(table.num_rows)))


def _new_ranks(log: Log, scores: np.ndarray, *, ties: np.ndarray) -> np.ndarray:
    """The rank of each row in its request by score, from 1; equal scores by `ties`, least first."""
    order = np.lexsort((ties, -scores, np.repeat(np.arange(len(log)), log.lengths)))
    ranks = np.empty(log.rows, np.int64)
    ranks[order] = np.arange(1, log.rows + 1)
    return np.asarray(ranks - np.repeat(log.offsets[:-1], log.lengths))


def _theta(log: Log, label: Label) -> dict[int, float]:
    categories = {log.feature_names.index(name): len(values) + 1 for name, values in log.vocabularies.items()}
    found = estimate_examination(log, label, categories=categories)
    return dict(zip(found.positions, found.theta.tolist(), strict=True))
