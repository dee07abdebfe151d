"""How trees learn from feedback: by pairs weighed as in `pairwise-em`, or by what their libraries have of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from ultr.bias import exact_weights
from ultr.errors import DataError, OptionError
from ultr.lists import Lists
from ultr.log import Log
from ultr.methods.base import MethodInputs, one_of
from ultr.methods.pairwise_em import LEAST_THETA, PairwiseEM
from ultr.rankers import score_rows
from ultr.rankers.boosters import TreeRows
from ultr.rankers.trees import Kind, PairTerms, PairwiseObjective

BUCKETS = 4  # of labels above zero, for libraries that take whole numbers alone
MOST_LEVELS = 30  # of whole numbers that LightGBM takes


@dataclass(frozen=True, eq=False)
class TreeTask:
    """What a library is given: rows, and an objective of ours or parameters of its own."""

    rows: TreeRows
    objective: PairwiseObjective | None = None
    own: Mapping[str, Any] | None = None


class TreeMethod:
    """A way for trees to learn."""

    OPTIONS: ClassVar[Mapping[str, Callable[[str], Any]]] = {}
    CLICKS_ALONE: ClassVar[bool] = False

    def __init__(self, inputs: MethodInputs) -> None:
        self.inputs = inputs

    def task(self, log: Log) -> TreeTask:
        """What is learned from a log, once all that comes first has been learned."""
        raise NotImplementedError

    def weigher(self) -> PairwiseEM | None:
        """What must be fitted before, if anything: a bias model, and the weights of pairs that follow from it."""
        return None

    def bias(self, batches: Iterable[Lists]) -> dict[str, Any] | None:
        return None

    def labels(self, log: Log) -> np.ndarray:
        """What is learned from, by row."""
        if self.inputs.truth:
            return np.asarray(log.true_relevance, np.float32)
        return np.asarray(self.inputs.label(log.actions), np.float32)

    def rows(self, log: Log, **more: Any) -> TreeRows:
        categorical = tuple(sorted(self.inputs.categories))
        shown = {"lengths": log.lengths, "names": log.feature_names, "categorical": categorical, "weights": log.weights}
        return TreeRows(log.features, **{**shown, **more})


class TreePairwiseEM(TreeMethod):
    """`pairwise-em` with trees as its ranker: the same weights of the same pairs.

    `em` says what the bias model's β, μ and g are: a `network`, or `trees` too (LightGBM's), grown between E- and
    M-steps.
    """

    OPTIONS: ClassVar[Mapping[str, Callable[[str], Any]]] = {
        **{name: read for name, read in PairwiseEM.OPTIONS.items() if name != "variant"},
        "em": one_of("em", "network", "trees"),
    }

    def __init__(self, inputs: MethodInputs, *, em: str = "network", **options: Any) -> None:
        super().__init__(inputs)
        self.em = em
        if em == "trees" and options.get("targets") == "sampled":
            raise OptionError("trees are regressed on soft targets", mend="leave targets=sampled out, or em=trees")
        # A method of networks has a ranker of its own: the smallest there is, and it stays as it is.
        self._weigher = PairwiseEM(replace(inputs, ranker="linear", ranker_options={}, bias_ranker="mlp"), **options)

    def weigher(self) -> PairwiseEM:
        return self._weigher

    def task(self, log: Log) -> TreeTask:
        objective = PairwiseObjective(pair_terms(self._weigher, log, self.labels(log)))
        if not objective.has_pairs:
            raise DataError("no two items of a request differ in what is learned from", mend="check --label")
        return TreeTask(self.rows(log), objective)

    def bias(self, batches: Iterable[Lists]) -> dict[str, Any] | None:
        return self._weigher.bias(batches)


@torch.no_grad()
def pair_terms(weigher: PairwiseEM, log: Log, labels: np.ndarray) -> PairTerms:
    """By row, what the weights of `weigher` follow from, as its bias model now is."""
    model, by_metric = weigher.bias_model.eval(), weigher.kind == "opt"
    device = model.theta.device
    weights = np.ones(len(log)) if log.weights is None else log.weights
    if log.positions is None and not weigher.inputs.truth:
        raise DataError("pairs are weighed by position, and the log has none", mend="name it with --position")
    positions = np.ones(log.rows, np.int64) if log.positions is None else log.positions
    place = model.index(torch.from_numpy(positions).to(device))
    label = torch.from_numpy(labels).to(device)
    outputs = torch.from_numpy(score_rows(lambda x: torch.stack(model.predictions(x), -1), log.features, device=device))
    logit, log_value, preference = outputs.to(device).unbind(-1)
    if weigher.weights == "posterior":
        value = weigher.expected_value_of(label, place, logit, log_value)
        return PairTerms(log.offsets, weights, value.cpu().numpy(), Kind.GAP, by_metric)
    theta, beta = model.theta[place].clamp(min=LEAST_THETA), logit.sigmoid()
    rows = {
        "above": 1 / theta,
        "below": exact_weights(label > 0, torch.ones_like(theta), theta, beta),
        "place": place,
        "preference": preference,
        "beta": beta,
        "examined": model.theta_minus[place],
        "plus": model.plus,
        "minus": model.minus,
    }
    if weigher.weights == "paper":
        kind = Kind.PAPER
        if weigher.trust != "pairs":
            rows |= {"plus": torch.ones_like(model.plus), "minus": torch.zeros_like(model.minus)}
    else:
        kind = Kind.TRUSTED if weigher.trust == "pairs" else Kind.PRODUCT
    arrays = {name: values.cpu().numpy() for name, values in rows.items()}
    return PairTerms(log.offsets, weights, labels, kind, by_metric, weigher.max_weight, **arrays)


class TreeLambdaRank(TreeMethod):
    """The library's own LambdaRank, on feedback as it is.

    `labels` are the `values`, `click` (whether they are above zero) or `buckets`: quantiles of those above zero, as
    LightGBM takes whole numbers alone. `correction=own` is what the library has against position bias: LightGBM's
    additive term by position, or XGBoost's `lambdarank_unbiased`, to which rows go in the order of their positions.
    """

    OPTIONS: ClassVar[Mapping[str, Callable[[str], Any]]] = {
        "labels": one_of("labels", "values", "click", "buckets"),
        "correction": one_of("correction", "none", "own"),
    }

    def __init__(self, inputs: MethodInputs, *, labels: str = "values", correction: str = "none") -> None:
        super().__init__(inputs)
        if inputs.truth and correction == "own":
            raise OptionError("true labels have no position bias to correct", mend="leave correction=own out")
        self.kind, self.corrected = labels, correction == "own"

    def task(self, log: Log) -> TreeTask:
        label = self.labels(log)
        own: dict[str, Any] = {}
        if self.kind == "click":
            label = (label > 0).astype(np.float32)
        elif self.kind == "buckets":
            label, own["label_gain"] = bucketed(label)
        whole = bool(((label == label.round()) & (label <= MOST_LEVELS)).all())
        if self.corrected and log.positions is None:
            raise DataError("position bias is corrected by position, and the log has none", mend="name it: --position")
        if self.inputs.ranker == "lightgbm":
            if not whole:
                mend = "use pairwise-em, or add --option labels=buckets or labels=click"
                raise DataError(f"LightGBM's lambdarank takes whole numbers up to {MOST_LEVELS} as labels", mend=mend)
            positions = log.positions if self.corrected else None
            return TreeTask(self.rows(log, label=label, positions=positions), own={"objective": "lambdarank", **own})
        if "label_gain" in own:
            label = np.asarray(own.pop("label_gain"), np.float32)[label.astype(np.int64)]
            whole = False
        own |= {"objective": "rank:ndcg", "ndcg_exp_gain": whole, "lambdarank_unbiased": self.corrected}
        return TreeTask(self.rows(log, label=label), own=own)


def bucketed(label: np.ndarray) -> tuple[np.ndarray, list[float]]:
    """0 for zero and 1, 2, ... for quantiles of what is above it; and the mean of each."""
    positive = label > 0
    shares = np.arange(1, BUCKETS) / BUCKETS
    edges = np.unique(np.quantile(label[positive], shares)) if positive.any() else np.zeros(0)
    found = np.where(positive, 1 + np.searchsorted(edges, label, "left"), 0)
    found = np.unique(found, return_inverse=True)[1] if not (found > 0).all() else found
    means = [float(label[found == level].mean()) if (found == level).any() else 0.0 for level in range(found.max() + 1)]
    return found.astype(np.float32), means


class TreePointwise(TreeMethod):
    """Squared error of the score as a prediction of the label."""

    def task(self, log: Log) -> TreeTask:
        label = self.labels(log)
        weights = None if log.weights is None else np.repeat(log.weights, log.lengths)
        rows = self.rows(log, label=label, weights=weights, lengths=None)
        if self.inputs.ranker == "lightgbm":
            return TreeTask(rows, own={"objective": "regression"})
        mean = float(np.average(label, weights=weights))
        return TreeTask(rows, own={"objective": "reg:squarederror", "base_score": mean})


TREE_METHODS: dict[str, type[TreeMethod]] = {
    "lambdarank": TreeLambdaRank,
    "pairwise-em": TreePairwiseEM,
    "pointwise": TreePointwise,
}
