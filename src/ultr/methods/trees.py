"""Methods for boosted trees: pairs weighted as in `pairwise-em`, or objectives of LightGBM and XGBoost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import nn

from ultr.bias.equations import exact_above, exact_below
from ultr.errors import DataError, OptionError
from ultr.lists import Lists
from ultr.log import Log
from ultr.methods.anchor import anchor_of_log
from ultr.methods.base import BOUNDS, MethodInputs, ThetaFrom
from ultr.methods.boosted_bias import BoostedOutputs
from ultr.methods.direct import POWER, is_binary
from ultr.methods.pair_weights import PairWeights
from ultr.methods.pairwise_em import PairwiseEM
from ultr.methods.position_model import LEAST_THETA, PositionModel
from ultr.rankers import FeatureEncoder, LinearRanker, fit_encoders, score_rows
from ultr.rankers.boosters import TreeRanker, TreeRows
from ultr.rankers.combined import Blend, Part, likely_weights, spread_within
from ultr.rankers.tree_objective import Kind, PairTerms, PairwiseObjective

FINAL = ("pairs", "likelihood", "blend")  # what may become the ranker of TreePairwiseEM
BUCKETS = 4  # quantiles of labels above zero, as LightGBM needs whole numbers
MAX_LEVEL = 30  # the largest label that LightGBM accepts


@dataclass(frozen=True, eq=False)
class TreeTask:
    """The inputs of LightGBM or XGBoost: rows, and our objective or parameters with one of the library's objectives."""

    rows: TreeRows
    objective: PairwiseObjective | None = None
    library_options: Mapping[str, Any] | None = None


class TreeMethod:
    """The base class of methods for boosted trees."""

    OPTIONS: ClassVar[Mapping[str, Any]] = {}
    CLICKS_ALONE: ClassVar[bool] = False
    LEARNS_ALONE: ClassVar[bool] = False  # from requests with one item

    def __init__(self, inputs: MethodInputs) -> None:
        self.inputs = inputs

    def task(self, log: Log, *, extends: bool = False) -> TreeTask:
        """Return the inputs of the tree library for a log; the pair model, if any, must be fitted before.

        With `extends`, the trees are added to others, and LightGBM takes no offset.
        """
        raise NotImplementedError

    def position_model(self) -> PositionModel | None:
        """Return the examination by position that the method needs, if any; it must be estimated before the trees."""
        return None

    def pair_model(self) -> PairWeights | None:
        """Return the method that gives pairs their weights, if any; its bias model must be fitted before the trees."""
        return None

    def finals(self, grown: TreeRanker, log: Log, validation: Log, *, seed: int) -> dict[str, nn.Module]:
        """Return the rankers of which the best on the validation requests is the final one, by name."""
        return {"trees": grown}

    def bias(self, batches: Iterable[Lists]) -> dict[str, Any] | None:
        return None

    def feedback(self, log: Log) -> tuple[np.ndarray, np.ndarray] | None:
        """Return labels and log θ [rows] of a log that users saw; None if either is unknown."""
        return None

    def labels(self, log: Log) -> np.ndarray:
        """Return the labels to learn from, by row."""
        if self.inputs.truth:
            return np.asarray(log.true_relevance, np.float32)
        return np.asarray(self.inputs.label(log.actions), np.float32)

    def rows(self, log: Log, **more: Any) -> TreeRows:
        categorical = tuple(sorted(self.inputs.categories))
        common = {"lengths": log.lengths, "names": log.feature_names, "weights": log.weights}
        return TreeRows(log.features, **{**common, "categorical": categorical, **more})


class TreePairwiseEM(TreeMethod):
    """The method `pairwise-em` with trees as its ranker: the same weights of the same pairs.

    β, μ and g of the bias model are a network (`em=network`), or LightGBM's trees that grow in each EM step
    (`em=trees`, the default of LightGBM). Trees of β and μ are also a ranker of their own, by the likelihood.
    The `final` ranker is that of the `pairs`, that of the `likelihood`, or the sum of both, each divided by the
    deviation of its scores within requests (`blend`, the default of `em=trees`); `auto` is the best of them on the
    validation requests. With `anchor=linear`, the default, a blend has one more part, which matters in small logs: a
    linear model of the log (see `ultr.methods.anchor`). The likelihood of the validation requests decides how much it
    counts. Rows of trees are not weighted (`row_power` 0).
    """

    OPTIONS: ClassVar[Mapping[str, Any]] = {
        **{name: read for name, read in PairwiseEM.OPTIONS.items() if name not in ("variant", "delta")},
        "theta": Literal["auto", "strata", "items", "regression"],
        "em": Literal["network", "trees"],
        "final": Literal["auto", "pairs", "likelihood", "blend"],
    }

    def __init__(
        self, inputs: MethodInputs, *, em: str | None = None, final: str | None = None, **options: Any
    ) -> None:
        super().__init__(inputs)
        sampled = options.get("targets") == "sampled"
        self.em = em = em or ("trees" if inputs.ranker == "lightgbm" and not (sampled or inputs.truth) else "network")
        by_value = options.get("loss", "posterior") in ("posterior", "opt-posterior")
        if final not in (None, "pairs") and not (em == "trees" and by_value):
            hint = "remove final, or use em=trees with loss=posterior"
            raise OptionError(f"final={final} needs trees of relevance, and a loss of its values", hint=hint)
        self.final = final or ("blend" if em == "trees" and by_value else "pairs")
        if em == "trees" and sampled:
            what = "em=trees cannot be used with targets=sampled"
            raise OptionError(what, hint="remove em=trees or targets=sampled")
        self.anchored = options.pop("anchor", "linear") == "linear"
        options = {**({"row_power": 0.0} if em == "trees" else {}), **options}
        self._pair_model = PairWeights(replace(inputs, bias_ranker="mlp"), **options)

    def pair_model(self) -> PairWeights:
        return self._pair_model

    def finals(self, pairs: TreeRanker, log: Log, validation: Log, *, seed: int) -> dict[str, nn.Module]:
        """Return the rankers that may be the final one, by name; `pairs` was trained on pairs."""
        outputs = self._pair_model.bias_model.network
        if self.final == "pairs" or not isinstance(outputs, BoostedOutputs) or outputs.boosters[0] is None:
            return {"pairs": pairs}
        likelihood = [
            Part(TreeRanker(booster), "lightgbm", link=link, shift=constant)
            for booster, constant, link in zip(
                outputs.boosters, outputs.constants, ("log-sigmoid", "identity"), strict=False
            )
            if booster is not None
        ]
        scores = [score_rows(ranker, validation.features) for ranker in (pairs, Blend(likelihood))]
        request = torch.from_numpy(np.ascontiguousarray(validation.request_of_row))

        def spread(values: np.ndarray) -> float:
            return float(spread_within(torch.from_numpy(values), request))

        spreads = [spread(each) for each in scores]
        weights = np.array([1 / spreads[0], *(1 / spreads[1] for _ in likelihood)])
        parts = [Part(pairs, self.inputs.ranker), *likelihood]
        anchor = self._anchor(log, seed) if self.anchored else None
        if anchor is not None:
            learned = (scores[0] / spreads[0] + scores[1] / spreads[1]) / 2
            of_anchor = score_rows(anchor, validation.features)
            of_anchor_spread = spread(of_anchor)
            share, of_linear = self._shares(
                np.column_stack([learned, of_anchor / of_anchor_spread]), request, validation
            )
            weights = np.append(share * weights / 2, of_linear / of_anchor_spread)
            parts.append(Part(anchor, "linear"))
        blend = [replace(part, weight=float(weight)) for part, weight in zip(parts, weights, strict=True)]
        rankers: dict[str, nn.Module] = {"pairs": pairs, "likelihood": Blend(likelihood), "blend": Blend(blend)}
        return rankers if self.final == "auto" else {self.final: rankers[self.final]}

    def _anchor(self, log: Log, seed: int) -> LinearRanker | None:
        """Return a linear ranker that is drawn to the ranker that wrote the log."""
        ranker = LinearRanker(FeatureEncoder(self.inputs.features, self.inputs.categories)).eval()
        fit_encoders(ranker, log.features)
        anchor = anchor_of_log(ranker.encoder, log, self.inputs.label, self._pair_model.bias_model, seed=seed)
        if anchor is None or not anchor.slopes.any():
            return None
        ranker.start_at(torch.from_numpy(anchor.slopes[None]), torch.tensor([anchor.constant]))
        return ranker

    def _shares(self, columns: np.ndarray, request: torch.Tensor, validation: Log) -> tuple[float, float]:
        """Return the weights of two columns of scores, by the likelihood of the validation requests."""
        if (feedback := self.feedback(validation)) is None:
            return 1.0, 0.0
        found = likely_weights(torch.from_numpy(columns).double(), request, *map(torch.from_numpy, feedback))
        learned, linear = found.tolist() if found.any() else (0.0, 1.0)
        return learned, linear

    def feedback(self, log: Log) -> tuple[np.ndarray, np.ndarray] | None:
        if log.positions is None or not set(self.inputs.label.actions) <= set(log.actions):
            return None
        theta = self._pair_model.bias_model.theta_at(torch.from_numpy(log.positions))
        return np.asarray(self.labels(log), np.float64), theta.log().double().cpu().numpy()

    def task(self, log: Log, *, extends: bool = False) -> TreeTask:
        objective = PairwiseObjective(pair_terms(self._pair_model, log, self.labels(log)))
        if not objective.has_pairs:
            what = "the items of every request have equal labels, so there are no pairs to learn from"
            raise DataError(what, hint="choose another label with --label")
        return TreeTask(self.rows(log), objective)

    def bias(self, batches: Iterable[Lists]) -> dict[str, Any] | None:
        return self._pair_model.bias(batches)


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
        value = pair_model.expected_value_of(label, place, logit, log_value)
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

    OPTIONS: ClassVar[Mapping[str, Any]] = {
        "labels": Literal["values", "click", "buckets"],
        "correction": Literal["none", "own"],
    }

    def __init__(self, inputs: MethodInputs, *, labels: str = "values", correction: str = "none") -> None:
        super().__init__(inputs)
        if inputs.truth and correction == "own":
            raise OptionError("true labels have no position bias to correct", hint="remove correction=own")
        self.kind, self.corrected = labels, correction == "own"

    def task(self, log: Log, *, extends: bool = False) -> TreeTask:
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
            return TreeTask(rows, library_options={"objective": "lambdarank", **options})
        if "label_gain" in options:
            label = np.asarray(options.pop("label_gain"), np.float32)[label.astype(np.int64)]
            whole = False
        options |= {"objective": "rank:ndcg", "ndcg_exp_gain": whole, "lambdarank_unbiased": self.corrected}
        return TreeTask(self.rows(log, label=label), library_options=options)


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

    def task(self, log: Log, *, extends: bool = False) -> TreeTask:
        label = self.labels(log)
        weights = None if log.weights is None else np.repeat(log.weights, log.lengths)
        rows = self.rows(log, label=label, weights=weights, lengths=None)
        if self.inputs.ranker == "lightgbm":
            return TreeTask(rows, library_options={"objective": "regression"})
        mean = float(np.average(label, weights=weights))
        return TreeTask(rows, library_options={"objective": "reg:squarederror", "base_score": mean})


class TreeDirect(TreeMethod):
    """The method `direct` with trees: E[c | x, k] = θ_k exp(s), by the library's Poisson or Tweedie regression.

    log θ is the offset of the regression. The default is Poisson for a label that is 0 or 1, and else Tweedie.
    """

    LEARNS_ALONE = True
    OPTIONS: ClassVar[Mapping[str, Any]] = {
        "likelihood": Literal["poisson", "tweedie"],
        "theta": ThetaFrom,
    }

    def __init__(self, inputs: MethodInputs, *, likelihood: str | None = None, theta: str = "auto") -> None:
        super().__init__(inputs)
        if inputs.truth:
            raise OptionError("this method corrects the bias of feedback, and true labels have none", hint=BOUNDS)
        self.likelihood = likelihood or ("poisson" if is_binary(inputs.label, inputs.binary) else "tweedie")
        self.positions = PositionModel(inputs, theta_from=theta)

    def position_model(self) -> PositionModel:
        return self.positions

    def task(self, log: Log, *, extends: bool = False) -> TreeTask:
        label = self.labels(log)
        place = self.positions.index(torch.from_numpy(log.shown_positions("the offset of direct")))
        theta = self.positions.theta[place].clamp(min=LEAST_THETA).double().numpy()
        weights = None if log.weights is None else np.repeat(log.weights, log.lengths)
        power = {} if self.likelihood == "poisson" else {"tweedie_variance_power": POWER}
        if extends and self.inputs.ranker == "lightgbm":
            # The derivatives are those with the offset: the label is c / θ, and its weight θ^(2 - power).
            exposure = theta ** (2 - power.get("tweedie_variance_power", 1.0))
            weights = exposure if weights is None else weights * exposure
            rows = self.rows(log, label=(label / theta).astype(np.float32), weights=weights, lengths=None)
        else:
            rows = self.rows(log, label=label, weights=weights, lengths=None, offset=np.log(theta))
        if self.inputs.ranker == "lightgbm":
            return TreeTask(rows, library_options={"objective": self.likelihood, **power})
        objective = "count:poisson" if self.likelihood == "poisson" else "reg:tweedie"
        return TreeTask(rows, library_options={"objective": objective, "base_score": 1.0, **power})

    def bias(self, batches: Iterable[Lists]) -> dict[str, Any] | None:
        return self.positions.report()


TREE_METHODS: dict[str, type[TreeMethod]] = {
    "direct": TreeDirect,
    "lambdarank": TreeLambdaRank,
    "pairwise-em": TreePairwiseEM,
    "pointwise": TreePointwise,
}
