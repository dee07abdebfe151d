"""`UnbiasedRanker`: a scikit-learn estimator that trains on data frames or arrays in memory, and scores them."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from ultr.bias.examination import estimate_examination
from ultr.bias.propensities import BIAS_FILE, as_propensities, theta_by_id
from ultr.checks.pitfalls import Pitfall
from ultr.errors import AbsentError, DataError, OptionError, nearest
from ultr.evaluation.importance import REPEATS, FeatureImportance
from ultr.evaluation.off_policy import off_policy_value
from ultr.evaluation.scores import evaluate_scores, ranks
from ultr.log import read_log
from ultr.log.columns import Columns, resolve_columns
from ultr.log.labels import Label, default_label
from ultr.log.readers import ROW, frame_table, is_frame, joined, numbered, row_values, with_columns, with_feedback
from ultr.log.table import by_segment
from ultr.methods import thresholds
from ultr.rankers.model import load_model
from ultr.training.config import AUTO, DEFAULT_METHOD, make_config
from ultr.training.data import Decisions
from ultr.training.folder import read_metrics
from ultr.training.loop import Listeners, Progress
from ultr.training.outcome import feature_importance, read_outcome
from ultr.training.run import run_training
from ultr.utils.arguments import as_seed, check_value
from ultr.utils.display import facts_html
from ultr.utils.files import atomic_path, read_contents, write_contents
from ultr.utils.jsonfiles import check_format, content_errors, read_json, write_json

FORMAT, FITTED = 1, "ranker.json"  # the file that `save` adds to the files of a run
FITTED_TYPES = {"_features": dict, "_named": dict, "_y_is_feedback": bool, "n_features_in_": int}
# Parameters that are options of `Config` with the same short names.
OPTIONS = (
    *("method", "method_options", "label", "ranker", "hidden", "steps", "lr", "select", "held_out", "propensities"),
    *("missing", "allow_leaks", "drop_suspicious", "device"),
)
CLIP = 10.0  # in `score`, feedback is weighted by 1 / P(seen), at most by this


class UnbiasedRanker(BaseEstimator):  # type: ignore[misc]
    """A ranker that learns from logged feedback and corrects its position bias.

        >>> ranker = UnbiasedRanker(method="lambdarank", label="click", steps=200)

    X has one row per item shown. It is a frame (pandas, polars, Arrow) or an array.

    - The columns of a frame are recognised by common names, or named here: `request`, `position`, `actions`,
      `features`, `categorical`. `item`, `query` and `randomised` (request in random order) help to estimate the bias.
    - The columns of an array are called `feature_0`, `feature_1`, ... Pass request and position to `fit`, or name
      their columns by number:

        >>> ranker = UnbiasedRanker(label="click", request=0, position=1)

    All parameters have the meaning and the defaults of `ultr train`. `ranker="auto"` is the sum of a network and
    LightGBM. If `label` is None, it is `click + dwell / exp(3)`, or the click if there is no dwell. `options` are any
    other options that `ultr options` lists, by path:

        >>> ranker = UnbiasedRanker(options={"network.warmup": 10, "trees.parameters": {"num_leaves": 7}})

    - `propensities` are known probabilities that positions are seen: a dict, a Series with positions as its index, or
      the frame of propensities.csv, which `ultr bias` writes.
    - `segment` is a column of X, such as the device. Examination is estimated for each of its values. `"auto"` looks
      for a column on which examination depends, if `propensities` are not known; None uses none.
    - Networks take a missing value as the mean of training rows, with an indicator; `missing="error"` rejects it.
    - `drop_suspicious` leaves out requests with impossible click rates. Features that follow the feedback on their item
      are an error, unless `allow_leaks` is true.
    - `verbose=1` prints each evaluation.

    In cross-validation, keep all rows of a request in one fold (`cv=GroupKFold(5)`, `groups=frame["request"]`). `score`
    needs request and position as columns of X, or by metadata routing (`set_score_request(request=True, ...)`).

    Attributes after `fit`:

    - `bias_`: all estimates of position bias, as in bias.json of `ultr train`; None if the method estimates none
    - `segment_`: the column of the segment; None if there is none
    - `theta_`: position -> estimated probability that users see it; None if the method does not estimate it
    - `importance_`: the importance of the most important features on held-out requests, as `feature_importance` returns
    - `history_`: one dict per evaluation, with the kind of ranker, the step, the loss and the selection metric
    - `model_`: the trained model
    - `n_features_in_` and, for frames, `feature_names_in_`: the features of the ranker
    """

    def __init__(
        self,
        *,
        method: str = DEFAULT_METHOD,
        method_options: Mapping[str, Any] | None = None,
        propensities: Any = None,
        label: str | None = None,
        ranker: str | Sequence[str] = AUTO,
        hidden: Sequence[int] | None = None,
        steps: int | None = None,
        lr: float | None = None,
        select: str = AUTO,
        held_out: float = 0.15,
        options: Mapping[str, Any] | None = None,
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
        segment: str | int | None = AUTO,
        missing: str = "mean",
        allow_leaks: bool = False,
        drop_suspicious: bool = False,
        verbose: int = 0,
    ) -> None:
        self.method = method
        self.method_options = method_options
        self.propensities = propensities
        self.label = label
        self.ranker = ranker
        self.hidden = hidden
        self.steps = steps
        self.lr = lr
        self.select = select
        self.held_out = held_out
        self.options = options
        self.device = device
        self.random_state = random_state
        self.request = request
        self.position = position
        self.actions = actions
        self.features = features
        self.categorical = categorical
        self.item = item
        self.query = query
        self.randomised = randomised
        self.segment = segment
        self.missing = missing
        self.allow_leaks = allow_leaks
        self.drop_suspicious = drop_suspicious
        self.verbose = verbose

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
        roles = dict(request=request, position=position, actions=actions, features=features, categorical=categorical)
        sources = {role: getattr(self, role) if value is None else value for role, value in roles.items()}
        for role in ("segment", "item", "query", "randomised"):
            sources[role] = check_value(role, getattr(self, role), str | int | None)
        looks = sources["segment"] == AUTO and is_frame(X)
        sources["segment"] = None if sources["segment"] == AUTO else sources["segment"]
        sources["weight"] = sample_weight
        table, named = joined(X, sources)
        if y is not None:
            table, named["actions"] = with_feedback(table, y, self._label_of(y))
        columns = resolve_columns(table.schema, where=f"the {type(X).__name__}", **named)
        if not looks:
            named["segment"] = named["segment"] or "none"
        self._train(table, named)
        self._features: dict[str, Any] = {"features": list(columns.features), "categorical": list(columns.categorical)}
        self._named = {role: value for role, value in sources.items() if row_values(role, value) is None}
        if looks:
            self._named["segment"] = self.segment_
        self._y_is_feedback = y is not None
        self.n_features_in_ = len(self.model_.feature_names) if is_frame(X) else np.shape(X)[1]
        self.__dict__.pop("feature_names_in_", None)
        if is_frame(X):
            self.feature_names_in_ = np.array(self.model_.feature_names, dtype=object)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Return the score of each row, in the order of the rows."""
        check_is_fitted(self)
        table, model, features = frame_table(X), self.model_, dict(self._features)
        if not is_frame(X):  # an array has the columns of the array passed to fit, or the features of the frame
            if table.num_columns != self.n_features_in_:
                raise DataError(f"X must have {self.n_features_in_} columns, as in fit", got=table.num_columns)
            table = table.rename_columns(list(getattr(self, "feature_names_in_", table.column_names)))
            numeric = [name for name in model.feature_names if name not in model.vocabularies]
            features = {"features": numeric, "categorical": list(model.vocabularies)}
        used = [*features["features"], *features["categorical"]]
        if missing := [name for name in used if name not in table.column_names]:
            what = f"the frame has no column '{missing[0]}', which is a feature of the model"
            raise DataError(what, hint=nearest(missing[0], table.column_names))
        log = read_log(numbered(table.select(used)), request=ROW, actions=[], missing=model.missing, **features)
        return model.score(replace(log, feature_names=model.feature_names), device=self.device)

    def rank(self, X: Any, *, request: Any = None) -> Any:
        """Return the frame with the columns `score` and `rank` (1: best of its request); rows keep their order."""
        scores = self.predict(X)
        if not is_frame(X):
            raise DataError("rank needs a frame", got=type(X).__name__, hint="use predict for arrays")
        table, columns, _ = self._as_fitted(X, request=request)
        if existing := {"score", "rank"} & set(table.column_names):
            raise DataError(f"the frame already has a column '{min(existing)}'", hint="rename or drop this column")
        log = read_log(numbered(table.select([columns.request])), request=columns.request, item=ROW)
        rows = np.asarray(log.item_ids)
        rank = np.empty_like(rows)
        rank[rows] = 1 + ranks(log, scores[rows])
        if isinstance(X, pa.Table):
            return X.append_column("score", pa.array(scores)).append_column("rank", pa.array(rank))
        assign = X.with_columns if hasattr(X, "with_columns") else X.assign
        return assign(score=scores, rank=rank)

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
            X,
            request=request,
            position=position,
            actions=actions,
            weight=sample_weight,
            segment=None,
            query=None,
            randomised=None,
        )
        label = Label(self.model_.label)
        if y is not None and self._y_is_feedback and columns.position is not None:
            (table, named["actions"]), y = with_feedback(table, y, label), None
        if y is None and columns.relevance is not None:
            y = table[columns.relevance]
        if y is not None:
            needed = [name for name in (columns.request, columns.weight) if name is not None]
            labelled = numbered(with_columns(table.select(needed), {"relevance": y}))
            log = read_log(labelled, request=columns.request, weight=columns.weight, relevance="relevance", item=ROW)
            ndcg = evaluate_scores(log, scores[np.asarray(log.item_ids)], "ndcg@10")["ndcg@10"]
            return float(np.average(ndcg, weights=log.weights))
        log = read_log(numbered(table), missing=self.model_.missing, **{**named, **self._features, "item": ROW})
        log, segments = by_segment(log) if named.get("segment") else (log, ())
        positions = log.shown_positions("score")
        if self.propensities is None:
            theta = estimate_examination(log, label).by_position()
        else:
            theta = theta_by_id(as_propensities(self.propensities), tuple(np.unique(positions).tolist()), segments)
        scores = scores[np.asarray(log.item_ids)]
        return off_policy_value(log, scores, theta=theta, label=label, estimator="clipped", clip=CLIP).value

    def _as_fitted(self, X: Any, **sources: Any) -> tuple[pa.Table, Columns, dict[str, Any]]:
        """Return X as a table, the columns of all roles, and the columns of the roles in `sources`.

        A source is a column of X or values by row, which become a column; without one, it is the column named in `fit`.
        """
        sources = {role: self._named.get(role) if value is None else value for role, value in sources.items()}
        table, named = joined(X, sources)
        single = named | {"actions": [], "features": [], "categorical": []}
        return (
            table,
            resolve_columns(table.schema, where=f"the {type(X).__name__}", rows=lambda: table, **single),
            named,
        )

    def _label_of(self, y: Any) -> Label:
        """Return the label, or the default label for feedback `y`, whose only column is the click if it has no name."""
        if self.label is not None:
            return Label(self.label)
        columns = row_values("actions", y)
        return Label(default_label(["click"] if columns is None else columns))

    def _train(self, table: pa.Table, columns: Mapping[str, Any]) -> None:
        chosen = {name: getattr(self, name) for name in OPTIONS if getattr(self, name) is not None}
        further = check_value("options", self.options, Mapping[str, Any] | None) or {}
        if twice := sorted(chosen.keys() & further.keys()):
            raise OptionError(f"'{twice[0]}' is a parameter of its own", got="options", hint="leave it out of options")
        config = make_config(**chosen, seed=as_seed(self.random_state), columns=columns, **further)
        listeners = Listeners(on_finding=_warn, on_progress=self._show, checkpoint_seconds=inf)
        with tempfile.TemporaryDirectory() as folder:
            self._read_run(run_training(config, Path(folder) / "run", source=table, listeners=listeners))
        method, label = config.method, self.model_.label
        if thresholds(method.name, label, method.options, ranker=self.history_[-1]["ranker"]):
            what = f"'{method.name}' is a method for clicks: it uses 1 if '{label}' is above zero, else 0"
            warnings.warn(what, stacklevel=3)

    def _show(self, progress: Progress) -> None:
        if check_value("verbose", self.verbose, int):
            metrics = ", ".join(f"{name} {value:.4f}" for name, value in progress.metrics.items())
            print(f"{progress.ranker}, step {progress.step}: {metrics}")

    def _read_run(self, run: Path) -> None:
        """Set what is learned from a run directory, and keep its files in memory."""
        self.model_ = load_model(run)
        self.segment_ = Decisions.load(run).segment
        self.bias_ = read_json(run / BIAS_FILE) if (run / BIAS_FILE).is_file() else None
        bias, outcome = self.bias_ or {}, read_outcome(run)
        self.theta_ = dict(zip(bias["positions"], bias["theta"], strict=True)) if "theta" in bias else None
        self.history_ = [{**line, "loss": nan if line["loss"] is None else line["loss"]} for line in read_metrics(run)]
        saved = {} if outcome is None else outcome.about.get("importance", {})
        self.importance_ = [FeatureImportance(**each) for each in saved.get("features", [])]
        self._files = read_contents(run, without=(".lock", FITTED))

    def _html_repr(self) -> str:
        """Return what a notebook shows: scikit-learn's table of options, and after `fit` the results."""
        html = str(super()._html_repr())
        if not hasattr(self, "model_"):
            return html
        theta = ", ".join(f"{k}: {value:.3f}" for k, value in (self.theta_ or {}).items())
        last = {name: value if name == "ranker" else f"{value:.4g}" for name, value in self.history_[-1].items()}
        return html + facts_html("Fitted", {**last, "theta by position": theta or "not estimated"})

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write the fitted ranker to a folder, which `load` and the commands of `ultr` read as a run; return it."""
        check_is_fitted(self)
        params = self.get_params(deep=False)
        params["propensities"] = None if self.propensities is None else as_propensities(self.propensities)
        if not isinstance(self.random_state, int | None):
            params["random_state"] = None
        about = {
            "format": FORMAT,
            "params": params,
            **{name: getattr(self, name) for name in FITTED_TYPES},
            "is_frame": hasattr(self, "feature_names_in_"),
        }
        with atomic_path(folder, overwrite=overwrite, folder=True) as temporary:
            write_contents(temporary, self._files)
            write_json(temporary / FITTED, about)
        return Path(folder)

    @classmethod
    def load(cls, folder: str | Path) -> UnbiasedRanker:
        """Load a ranker from a folder that `save` wrote."""
        run = Path(folder)
        if not (run / FITTED).is_file():
            hint = "pass a folder that save wrote; ultr.load_model reads the model of a run"
            raise AbsentError(f"the folder has no {FITTED}", where=run, hint=hint)
        about = read_json(run / FITTED)
        check_format(about, FORMAT, what="the ranker", where=run, hint="fit and save it again")
        with content_errors("the ranker cannot be read", where=run, hint="fit and save it again"):
            ranker = cls(**about["params"])
            for name, kind in FITTED_TYPES.items():
                setattr(ranker, name, check_value(name, about[name], kind))
            ranker._read_run(run)
            if about["is_frame"]:
                ranker.feature_names_in_ = np.array(ranker.model_.feature_names, dtype=object)
        return ranker

    def feature_importance(
        self, X: Any, *, rows: int | None = None, repeats: int = REPEATS, seed: int = 0, **columns: Any
    ) -> list[FeatureImportance]:
        """Return how much the selection metric falls on X if a feature is permuted, the most important feature first.

        X must have requests that the ranker was not fitted to, with request, position and feedback, as columns or as
        arguments (`request`, `position`, `actions`). See `ultr.feature_importance`. `importance_` is the result on
        the requests that `fit` held out.
        """
        check_is_fitted(self)
        roles = {role: columns.pop(role, None) for role in ("request", "position", "actions")}
        if columns:
            raise OptionError(f"no argument '{min(columns)}'", hint=nearest(min(columns), roles))
        table, _, named = self._as_fitted(X, **roles, segment=None)
        log = read_log(table, missing=self.model_.missing, **{**named, **self._features})
        log = replace(log, feature_names=self.model_.feature_names)
        with tempfile.TemporaryDirectory() as folder:
            write_contents(Path(folder), self._files)
            return feature_importance(folder, log, rows=rows, repeats=repeats, seed=seed)


def _warn(pitfall: Pitfall) -> None:
    warnings.warn(f"{pitfall.name}: {pitfall.what}; {pitfall.hint}", stacklevel=2)
