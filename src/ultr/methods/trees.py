"""Methods for boosted trees: pairs weighted as in `pairwise-em`, or objectives of LightGBM and XGBoost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import nn

from ultr.bias.equations import exact_above, exact_below
from ultr.errors import DataError, OptionError
from ultr.lists import Lists
from ultr.log import Log
from ultr.methods.anchor import anchor_of_log
from ultr.methods.base import BOUNDS, MethodInputs, Relevance, ThetaFrom, options_of
from ultr.methods.direct import LARGEST_LOG_RATE, POWER
from ultr.methods.pair_weights import PairWeights
from ultr.methods.pairwise_em import PairwiseEM
from ultr.methods.position_model import LEAST_THETA, PositionModel
from ultr.rankers import FeatureEncoder, LinearRanker, fit_encoders, score_rows
from ultr.rankers.boosters import TreeRanker, TreeRows
from ultr.rankers.combined import Blend, Part
from ultr.rankers.tree_objective import Kind, PairTerms, PairwiseObjective

BUCKETS = 4  # quantiles of labels above zero, as LightGBM needs whole numbers
MAX_LEVEL = 30  # the largest label that LightGBM accepts
FEWEST_LEAVES, MOST_LEAVES = 4, 31
LEAST_CLICKS, LEAST_SHARE = 20, 0.1  # of the log, that are expected in a leaf: the smaller of both
LEAST_BETA = 1e-4  # β is from this to 1 less this


@dataclass(frozen=True, eq=False)
class TreeTask:
    """The inputs of LightGBM or XGBoost: rows, and our objective or parameters with one of the library's objectives."""

    rows: TreeRows
    objective: PairwiseObjective | None = None
    library_options: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)  # that the user may replace
    loss: Callable[[Log, np.ndarray, np.ndarray], float] | None = None  # of validation rows: scores, and those before


class TreeMethod:
    """The base class of methods for boosted trees."""

    OPTIONS: ClassVar[dict[str, Any]] = {}
    CLICKS_ALONE: ClassVar[bool] = False
    LEARNS_ALONE: ClassVar[bool] = False  # from requests with one item
    positions: PositionModel | None = None  # examination by position, which must be estimated before the trees
    pairs: PairWeights | None = None  # which gives pairs their weights; its bias model must be fitted before the trees

    def __init__(self, inputs: MethodInputs) -> None:
        self.inputs = inputs

    def tasks(self, log: Log, *, extends: bool = False, anchor: np.ndarray | None = None) -> list[TreeTask]:
        """Return the inputs of the tree library for a log; the pair model, if any, must be fitted before.

        The ranker is the sum of the trees of all tasks and of the anchor, whose scores of the rows are `anchor`. With
        `extends`, the trees are added to others, and LightGBM takes no offset.
        """
        raise NotImplementedError

    def anchor(self, log: Log, *, seed: int) -> LinearRanker | None:
        """Return the linear ranker that the trees start from, if any."""
        return None

    def relevance(self, ranker: nn.Module, log: Log) -> Relevance | None:
        """Return the relevance of the rows of a log by a ranker of this method, if it models that."""
        return None

    def bias(self, batches: Iterable[Lists]) -> dict[str, Any] | None:
        """Return a report of the estimated position bias, as `Method.bias` does."""
        if self.pairs is not None:
            return self.pairs.bias(batches)
        return None if self.positions is None else self.positions.report()

    def labels(self, log: Log) -> np.ndarray:
        """Return the labels to learn from, by row."""
        if self.inputs.truth:
            return np.asarray(log.true_relevance, np.float32)
        return np.asarray(self.inputs.label(log.actions), np.float32)

    def rows(self, log: Log, **more: Any) -> TreeRows:
        categorical = tuple(sorted(self.inputs.categories))
        common = {"lengths": log.lengths, "names": log.feature_names, "weights": log.weights}
        return TreeRows(log.features, **{**common, "categorical": categorical, **more})


@torch.no_grad()
def pair_terms(pair_model: PairWeights, log: Log, labels: np.ndarray) -> PairTerms:
    """Return the terms by row from which the weights of pairs are computed, from the current bias model."""
    model, by_metric = pair_model.bias_model.eval(), pair_model.by_metric
    device = model.theta.device
    weights = np.ones(len(log)) if log.weights is None else log.weights
    if pair_model.inputs.truth and log.positions is None:
        positions = np.ones(log.rows, np.int64)
    else:
        positions = log.shown_positions("the weighting of pairs")
    place = model.index(torch.from_numpy(positions).to(device))
    label = torch.from_numpy(labels).to(device)
    outputs = torch.from_numpy(score_rows(lambda x: torch.stack(model.predictions(x), -1), log.features, device=device))
    logit, log_value, preference = outputs.to(device).unbind(-1)
    if pair_model.by_value:
        value = pair_model.expected_value_of(label, place, logit.sigmoid(), log_value.exp())
        return PairTerms(log.offsets, weights, value.cpu().numpy(), Kind.GAP, by_metric)
    theta, beta, zeta = model.theta[place].clamp(min=LEAST_THETA), logit.sigmoid(), model.zeta[place]
    rows = {
        "above": 1 / theta if pair_model.weights == "paper" else exact_above(theta, beta, zeta),
        "below": exact_below(label > 0, theta, beta, zeta),
        "place": place,
        "preference": preference,
        "beta": beta,
        "examined": model.theta_minus[place],
        "plus": model.plus,
        "minus": model.minus,
    }
    if pair_model.weights == "paper":
        kind = Kind.PAPER
    else:
        kind = Kind.TRUSTED if pair_model.trust == "pairs" else Kind.PRODUCT
    arrays = {name: values.cpu().numpy() for name, values in rows.items()}
    return PairTerms(log.offsets, weights, labels, kind, by_metric, pair_model.max_weight, **arrays)


class TreeLambdaRank(TreeMethod):
    """LambdaRank of LightGBM or XGBoost, on feedback without our correction.

    `labels` are the `values`, `click` (1 if above zero) or `buckets`: quantiles of values above zero, because LightGBM
    needs whole numbers. `correction=own` is the library's own correction of position bias: LightGBM's additive term by
    position, or XGBoost's `lambdarank_unbiased`, which uses the order of rows.
    """

    def __init__(
        self,
        inputs: MethodInputs,
        *,
        labels: Literal["values", "click", "buckets"] = "values",
        correction: Literal["none", "own"] = "none",
    ) -> None:
        super().__init__(inputs)
        if inputs.truth and correction == "own":
            raise OptionError("true labels have no position bias to correct", hint="remove correction=own")
        self.kind, self.corrected = labels, correction == "own"

    OPTIONS = options_of(__init__)

    def tasks(self, log: Log, *, extends: bool = False, anchor: np.ndarray | None = None) -> list[TreeTask]:
        label = self.labels(log)
        options: dict[str, Any] = {}
        if self.kind == "click":
            label = (label > 0).astype(np.float32)
        elif self.kind == "buckets":
            label, options["label_gain"] = bucketed(label)
        whole = bool(((label == label.round()) & (label <= MAX_LEVEL)).all())
        corrected_positions = log.shown_positions("a correction of position bias") if self.corrected else None
        if self.inputs.ranker == "lightgbm":
            if not whole:
                hint = "use pairwise-em, or set method.labels to buckets or click"
                raise DataError(f"LightGBM's lambdarank needs whole numbers up to {MAX_LEVEL} as labels", hint=hint)
            rows = self.rows(log, label=label, positions=corrected_positions)
            return [TreeTask(rows, library_options={"objective": "lambdarank", **options})]
        if "label_gain" in options:
            label = np.asarray(options.pop("label_gain"), np.float32)[label.astype(np.int64)]
            whole = False
        options |= {"objective": "rank:ndcg", "ndcg_exp_gain": whole, "lambdarank_unbiased": self.corrected}
        return [TreeTask(self.rows(log, label=label), library_options=options)]


def bucketed(label: np.ndarray) -> tuple[np.ndarray, list[float]]:
    """Return the level of each label (0 for 0; 1, 2, ... by quantiles of labels above 0), and mean labels of levels."""
    positive = label > 0
    shares = np.arange(1, BUCKETS) / BUCKETS
    edges = np.unique(np.quantile(label[positive], shares)) if positive.any() else np.zeros(0)
    levels = np.where(positive, 1 + np.searchsorted(edges, label, "left"), 0)
    levels = np.unique(levels, return_inverse=True)[1] if not (levels > 0).all() else levels
    means = [float(label[levels == i].mean()) if (levels == i).any() else 0.0 for i in range(levels.max() + 1)]
    return levels.astype(np.float32), means


class TreePointwise(TreeMethod):
    """Least squares: the score predicts the label, with the objective of LightGBM or XGBoost."""

    LEARNS_ALONE = True

    def tasks(self, log: Log, *, extends: bool = False, anchor: np.ndarray | None = None) -> list[TreeTask]:
        label = self.labels(log)
        weights = None if log.weights is None else np.repeat(log.weights, log.lengths)
        rows = self.rows(log, label=label, weights=weights, lengths=None)
        if self.inputs.ranker == "lightgbm":
            return [TreeTask(rows, library_options={"objective": "regression"})]
        mean = float(np.average(label, weights=weights))
        return [TreeTask(rows, library_options={"objective": "reg:squarederror", "base_score": mean})]


class TreeDirect(TreeMethod):
    """The method `direct` with trees: E[c | x, k] = θ_k exp(s), by regressions of the library with the offset log θ.

        hurdle    trees of clicks, P(c>0) = θ_k exp(s_1), by Poisson regression, plus trees of the values of clicked
                  rows, E[c | c>0] = exp(s_2), by gamma regression: the default for values
        poisson   the default for a label that is 0 or 1
        tweedie   variance mean^1.5

    With `anchor=linear`, the default, trees start from a linear model of the log (see `ultr.methods.anchor`), whose
    score is part of the offset and of the ranker: a small log does not tell trees what its order does. Trees have few
    leaves (`leaves_for`), unless the parameters of the library say otherwise.
    """

    LEARNS_ALONE = True

    def __init__(
        self,
        inputs: MethodInputs,
        *,
        likelihood: Literal["hurdle", "poisson", "tweedie"] | None = None,
        theta: ThetaFrom = "auto",
        anchor: Literal["linear", "none"] = "linear",
    ) -> None:
        super().__init__(inputs)
        if inputs.truth:
            raise OptionError("this method corrects the bias of feedback, and true labels have none", hint=BOUNDS)
        self.likelihood = likelihood or ("poisson" if inputs.label_is_binary else "hurdle")
        self.positions, self.anchored = PositionModel(inputs, theta_from=theta, scale=1.0), anchor == "linear"

    OPTIONS = options_of(__init__)

    def anchor(self, log: Log, *, seed: int) -> LinearRanker | None:
        if self.positions is None or not self.anchored:
            return None
        ranker = LinearRanker(FeatureEncoder(self.inputs.features, self.inputs.categories)).eval()
        fit_encoders(ranker, log.features)
        anchor = anchor_of_log(ranker.encoder, log, self.inputs.label, self.positions, seed=seed)
        if anchor is None or not anchor.slopes.any():
            return None
        slopes = torch.from_numpy(anchor.slopes[None])
        ranker.start_at(slopes, torch.zeros(1))
        # The constant is that of the first regression, so that no trees are needed to find it.
        label, theta = self.labels(log).astype(np.float64), self._theta(log)
        total = (label > 0 if self.likelihood == "hurdle" else label).sum()
        expected = (theta * np.exp(score_rows(ranker, log.features).clip(-LARGEST_LOG_RATE, LARGEST_LOG_RATE))).sum()
        ranker.start_at(slopes, torch.tensor([np.log(total / expected)]))
        return ranker

    def _theta(self, log: Log) -> np.ndarray:
        """Return θ of each row, at least `LEAST_THETA`."""
        assert self.positions is not None  # noqa: S101 - made in the constructor
        positions = torch.from_numpy(log.shown_positions("the offset of direct"))
        theta: np.ndarray = self.positions.theta_at(positions).double().numpy()
        return theta

    def tasks(self, log: Log, *, extends: bool = False, anchor: np.ndarray | None = None) -> list[TreeTask]:
        label, theta = self.labels(log), self._theta(log)
        theta = theta if anchor is None else theta * np.exp(np.clip(anchor, -LARGEST_LOG_RATE, LARGEST_LOG_RATE))
        weights = None if log.weights is None else np.repeat(log.weights, log.lengths)
        rows = self.rows(log, label=label, weights=weights, lengths=None)
        if self.likelihood != "hurdle":
            return [self._regression(self.likelihood, rows, theta, extends=extends)]
        clicked = label > 0
        clicks = self._regression("poisson", replace(rows, label=clicked.astype(np.float32)), theta, extends=extends)
        if not clicked.any():
            return [clicks]
        values = replace(
            rows,
            features=rows.features[clicked],
            label=label[clicked],
            weights=None if weights is None else weights[clicked],
        )
        of_values = self._regression("gamma", values, None, extends=extends)
        return [replace(clicks, loss=self._click_loss), replace(of_values, loss=self._value_loss)]

    def relevance(self, ranker: nn.Module, log: Log) -> Relevance | None:
        """Return β and μ, with the clicks and values of the log as their sums: trees that stop early are too flat."""
        label, clicked = self.labels(log).astype(np.float64), self.labels(log) > 0
        if self.positions is None or self.likelihood == "tweedie" or not clicked.any():
            return None
        theta = self._theta(log)
        parts = ranker.parts if isinstance(ranker, Blend) else (Part(ranker, self.inputs.ranker),)
        scores = [score_rows(part, log.features).astype(np.float64) * bool(part.weight) for part in parts]
        of_values = [isinstance(part.ranker, TreeRanker) for part in parts]
        of_values[of_values.index(True)] = False  # the first trees are those of clicks
        clicks, values = (
            np.exp(sum((s for s, other in zip(scores, of_values, strict=True) if other == chosen), np.zeros(log.rows)))
            for chosen in (False, True)
        )
        beta = clicks * (clicked.sum() / (theta * clicks).sum())
        value = values * (label[clicked].sum() / values[clicked].sum())
        return Relevance(beta.clip(LEAST_BETA, 1 - LEAST_BETA), value)

    def _click_loss(self, log: Log, scores: np.ndarray, before: np.ndarray) -> float:
        """Return minus the likelihood of which rows of a request are clicked, given how many."""
        clicked, starts = self.labels(log) > 0, log.offsets[:-1]
        scores = scores + np.log(self._theta(log))
        level = np.repeat(np.maximum.reduceat(scores, starts), log.lengths)
        level += np.log(np.repeat(np.add.reduceat(np.exp(scores - level), starts), log.lengths))
        return float((level - scores)[clicked].sum() / max(1, clicked.sum()))

    def _value_loss(self, log: Log, scores: np.ndarray, before: np.ndarray) -> float:
        """Return the mean gamma deviance, up to a constant, of the labels of clicked rows."""
        label = self.labels(log).astype(np.float64)
        label, scores = label[label > 0], (scores - before)[label > 0]
        return float((label * np.exp(-scores) + scores).mean()) if len(label) else 0.0

    def _regression(self, likelihood: str, rows: TreeRows, theta: np.ndarray | None, *, extends: bool) -> TreeTask:
        """Return the regression of the labels of rows with the mean θ exp(s), or exp(s) without θ."""
        assert rows.label is not None  # noqa: S101 - regressions have one
        clicks = int(np.count_nonzero(rows.label))
        power = {"tweedie_variance_power": POWER} if likelihood == "tweedie" else {}
        # The second derivative of both libraries is the expected number of clicks times this.
        least = math.exp(0.7) * min(LEAST_CLICKS, LEAST_SHARE * clicks)
        least *= 1.0 if rows.weights is None else float(rows.weights.mean())
        name = "min_sum_hessian_in_leaf" if self.inputs.ranker == "lightgbm" else "min_child_weight"
        shape = {name: least} if likelihood == "poisson" else {}
        by_lightgbm = self.inputs.ranker == "lightgbm"
        if theta is not None and extends and by_lightgbm:
            # The derivatives are those with the offset: the label is c / θ, and its weight θ^(2 - power).
            exposure = theta ** (2 - power.get("tweedie_variance_power", 1.0))
            weights = exposure if rows.weights is None else rows.weights * exposure
            rows = replace(rows, label=(rows.label / theta).astype(np.float32), weights=weights)
        elif theta is not None:
            rows = replace(rows, offset=np.log(theta))
        leaves = leaves_for(clicks)
        if by_lightgbm:
            return TreeTask(rows, None, {"objective": likelihood, **power}, {"num_leaves": leaves, **shape})
        objective = {"poisson": "count:poisson"}.get(likelihood, f"reg:{likelihood}")
        few = {"max_leaves": leaves, "max_depth": 0, "grow_policy": "lossguide", **shape}
        return TreeTask(rows, None, {"objective": objective, "base_score": 1.0, **power}, few)


def leaves_for(clicks: int) -> int:
    """Return the leaves of a tree: 4 for up to 10,000 clicks, then twice as many for each tenfold, up to 31.

    Feedback is noisy. In logs with about 10,000 clicks, 4 leaves were better than 16 or 31 in each of four worlds.
    """
    return int(np.clip(round(2 ** (np.log10(max(clicks, 1)) - 2)), FEWEST_LEAVES, MOST_LEAVES))


class TreePairwiseEM(TreeDirect):
    """The method `pairwise-em` with trees as its ranker.

    With the loss `posterior` or `opt-posterior`, the `final` ranker is that of the `likelihood` by default: the trees
    of `direct`, without pairs, whose order does not depend on `scale`. `pairs`, the only one for the other losses and
    with options of a bias model (`trust`, `row_power`, `targets`, `theta=regression`), are weighted as for networks; β,
    μ and g of the bias model are a network. Rows of bias models are weighted as for networks.
    """

    LEARNS_ALONE = False
    OPTIONS: ClassVar[dict[str, Any]] = {
        **{name: read for name, read in PairwiseEM.OPTIONS.items() if name not in ("variant", "delta")},
        "theta": Literal["auto", "strata", "items", "oracle", "regression"],
        "em": Literal["staged"],
        "final": Literal["pairs", "likelihood"],
    }

    def __init__(self, inputs: MethodInputs, *, final: str | None = None, **options: Any) -> None:
        of_direct = {name: options[name] for name in ("theta", "anchor") if name in options}
        of_pairs = {name for name, value in options.items() if name not in ("loss", "theta", "anchor", "scale")}
        of_pairs -= {name for name in ("trust", "em") if options.get(name) in ("none", "staged")}  # the defaults
        by_value = options.get("loss", "posterior") in ("posterior", "opt-posterior")
        regresses = options.get("theta") == "regression" or options.get("scale") == "estimated"
        likely = by_value and not of_pairs and not regresses and not inputs.truth
        if final == "likelihood" and not likely:
            hint = "remove final=likelihood, or the other options of pairs"
            what = "final=likelihood does not use pairs: its only options are theta, scale and anchor"
            raise OptionError(what, hint=hint)
        if likely and final != "pairs":
            super().__init__(inputs, **of_direct)
        else:
            options.pop("anchor", None)
            TreeMethod.__init__(self, inputs)
            self.pairs = PairWeights(replace(inputs, bias_ranker="mlp"), **options)

    def tasks(self, log: Log, *, extends: bool = False, anchor: np.ndarray | None = None) -> list[TreeTask]:
        if self.pairs is None:
            return super().tasks(log, extends=extends, anchor=anchor)
        objective = PairwiseObjective(pair_terms(self.pairs, log, self.labels(log)))
        if not objective.has_pairs:
            what = "the items of every request have equal labels, so there are no pairs to learn from"
            raise DataError(what, hint="choose another label with --label")
        return [TreeTask(self.rows(log), objective)]


TREE_METHODS: dict[str, type[TreeMethod]] = {
    "direct": TreeDirect,
    "lambdarank": TreeLambdaRank,
    "pairwise-em": TreePairwiseEM,
    "pointwise": TreePointwise,
}
