"""Fit a bias model whose β (relevance), μ (value of a click) and g (preference) are boosted trees, by EM.

It is the regression EM of Wang et al. (2018) in its original form, with boosted trees, for values and pairs as well as
clicks. Each round computes the posteriors of all rows and pairs of the log, adds a tree towards them to each of β, μ
and g, and updates the parameters by position from the sums of posteriors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ultr.bias.equations import examined_zero_terms, quotient, relevance_posterior, scoring_terms, updated
from ultr.bias.estimators import SMALLEST
from ultr.errors import DataError
from ultr.lists import Lists
from ultr.log import Log
from ultr.methods.bias_model import BiasModel
from ultr.rankers.boosters import Booster, LightGBM, TreeRows, lightgbm_data, lightgbm_error, lightgbm_parameters
from ultr.rankers.tree_objective import preference_step
from ultr.utils.jsonfiles import add_checksum, file_checksum, load_json
from ultr.utils.optimisation import EarlyStopping

TREES = {"num_leaves": 31, "min_data_in_leaf": 100, "lambda_l2": 1.0}
RATE, EVERY, PATIENCE = 0.1, 5, 4  # learning rate; rounds between evaluations; evaluations without gain before the end
SMALLEST_CURVATURE = 1e-6
CONSTANTS = "constants.json"
METRICS = {  # the held-out metrics that stop β, μ and g, and the buffers of the model that belong to each
    "clicks": ("theta", "theta_minus", "moved"),
    "values": ("rho",),
    "pairs": ("plus", "minus", "pair_sums"),
}


class BoostedOutputs(nn.Module):
    """A module from features to the logit of β, the log of μ, and g; each is a constant plus trees, if it has any."""

    def __init__(self, constants: list[float], boosters: list[Booster | None]) -> None:
        super().__init__()
        self.constants, self.boosters = constants, boosters

    def forward(self, features: Tensor) -> Tensor:
        rows = features.reshape(-1, features.shape[-1]).cpu().numpy()
        columns = [
            np.full(len(rows), constant) + (0.0 if booster is None else booster.predict(rows))
            for constant, booster in zip(self.constants, self.boosters, strict=True)
        ]
        outputs = torch.from_numpy(np.stack(columns, -1).astype(np.float32)).to(features.device)
        return outputs.view(*features.shape[:-1], len(columns))

    def save(self, folder: Path) -> None:
        for name, booster in zip(METRICS, self.boosters, strict=True):
            if booster is not None:
                booster.save(folder / f"{name}.txt", rounds=booster.rounds)
        sums = {path.name: file_checksum(path) for path in sorted(folder.glob("*.txt"))}
        first = [0 if booster is None else min(booster.first, booster.rounds) for booster in self.boosters]
        content = {"constants": self.constants, "sums": sums, "first_rounds": first}
        (folder / CONSTANTS).write_text(json.dumps(add_checksum(content)))

    @staticmethod
    def is_at(folder: Path) -> bool:
        return (folder / CONSTANTS).is_file()

    @staticmethod
    def load(folder: Path, categorical: tuple[int, ...]) -> BoostedOutputs:
        content = load_json(folder / CONSTANTS, finite=True)
        values, sums = (content["constants"], content["sums"]) if isinstance(content, dict) else (content, {})
        for name, expected in sums.items():
            if not (folder / name).is_file() or file_checksum(folder / name) != expected:
                hint = "restore it from a copy, or train again"
                raise DataError("the file of trees is missing or was changed", where=folder / name, hint=hint)
        constants = [float(value) for value in values]
        files = [folder / f"{name}.txt" for name in METRICS]
        boosters = [LightGBM.load(file, categorical) if file.is_file() else None for file in files]
        first = content.get("first_rounds") if isinstance(content, dict) else None
        for booster, rounds in zip(boosters, first or (), strict=False):
            if booster is not None:
                booster.first = int(rounds)
        return BoostedOutputs(constants, boosters)


@dataclass
class Ensemble:
    """The trees of β, μ or g, their predictions for the training rows, and the best round on held-out requests."""

    trees: Any
    constant: float
    scores: Tensor
    categorical: tuple[int, ...]
    first: int | None = None  # rounds of the first training, if these trees extend those of another bias model
    stopping: EarlyStopping = field(default_factory=EarlyStopping)

    @property
    def growing(self) -> bool:
        return not self.stopping.is_over(PATIENCE)

    def grow(self, derivatives: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        """Add a tree that follows the derivatives at the current scores, unless the held-out metric stopped rising."""

        def objective(scores: np.ndarray, _data: object) -> tuple[np.ndarray, np.ndarray]:
            self.scores = torch.from_numpy(scores + self.constant)
            gradient, curvature = derivatives(self.scores)
            return gradient.numpy().astype(np.float32), curvature.clamp(min=SMALLEST_CURVATURE).numpy().astype("f4")

        import lightgbm

        try:
            if self.growing:
                self.trees.update(fobj=objective)
        except lightgbm.basic.LightGBMError as error:
            raise lightgbm_error(error) from error

    def evaluate(self, metric: float, features: np.ndarray) -> bool:
        """Return True if the held-out metric improved; if growth stops, set `scores` to those of the best round."""
        if self.stopping.update(metric, self.trees.current_iteration()):
            return True
        if not self.growing:
            best = LightGBM(self.trees, self.stopping.best_step, self.categorical).predict(features)
            self.scores = torch.from_numpy(best + self.constant)
        return False


def fit_boosted(
    model: BiasModel,
    log: Log,
    labels: np.ndarray,
    *,
    held_out: list[Lists],
    categorical: tuple[int, ...],
    rounds: int,
    seed: int,
    growth: int = 3,
    binned: Callable[[], Any] | None = None,
    on_progress: Callable[[int, dict[str, float]], None] = lambda *_: None,
) -> None:
    """Fit trees for a bias model to a log, until the likelihood of the `held_out` requests stops improving.

    θ of the model must be known or estimated already, unless it is regressed. If the model has trees already, they are
    extended; those of a model that has grown to `growth` times its first size, only from the first ones on. `binned`
    returns the rows of the log as a new `lightgbm.Dataset`, if there is a faster way than to find their bins again.
    """
    place = model.index(torch.from_numpy(log.shown_positions("a bias model")))
    label = torch.from_numpy(labels).double()
    em = _EM(model, log, place, label)
    rows = TreeRows(log.features, log.lengths, log.feature_names, categorical)
    parameters = {**lightgbm_parameters(RATE, seed, log.features.size), **TREES, "objective": "none"}
    before = model.network if isinstance(model.network, BoostedOutputs) else BoostedOutputs(em.starts(), [None] * 3)
    starts = before.constants
    extended = [trees and trees.to_extend(max(growth * trees.first, rounds)) for trees in before.boosters]
    data = binned or (lambda: lightgbm_data(rows))
    outputs = _ensembles(data, categorical, parameters, starts[: 2 + model.pairs], extended)
    best: dict[str, Tensor] = {}
    if any(extended):  # the trees before the first round may be the best
        model.network = _outputs(outputs, starts, categorical, best=False)
        metrics = {name: float(value) for name, value in model.held_out_metrics(held_out).items()}
        for output, (name, buffers) in zip(outputs, METRICS.items(), strict=False):
            output.stopping.update(metrics[name], output.trees.current_iteration())
            best |= {buffer: getattr(model, buffer).clone() for buffer in buffers}
    for number in range(1, rounds + 1):
        em.step(outputs)
        if number % EVERY and number < rounds:
            continue
        model.network = _outputs(outputs, starts, categorical, best=False)
        metrics = {name: float(value) for name, value in model.held_out_metrics(held_out).items()}
        for output, (name, buffers) in zip(outputs, METRICS.items(), strict=False):
            if output.growing and output.evaluate(metrics[name], log.features):
                best |= {buffer: getattr(model, buffer).clone() for buffer in buffers}
        on_progress(number, metrics)
        if not any(output.growing for output in outputs):
            break
    for buffer, values in best.items():
        getattr(model, buffer).copy_(values)
    model.network = _outputs(outputs, starts, categorical, best=True)
    model.held_out_metrics(held_out)


def _ensembles(
    new_data: Callable[[], Any],
    categorical: tuple[int, ...],
    parameters: dict[str, Any],
    starts: list[float],
    extended: list[Booster | None],
) -> list[Ensemble]:
    """Return the trees of each output before the first round: none, or those that are extended.

    Trees that are extended need data of their own, which have their scores before the first round.
    """
    import lightgbm

    shared, ensembles = new_data(), []
    shared.free_raw_data = True  # it extends no trees, so it needs no features
    scores = torch.zeros(0)  # LightGBM passes the scores to the first round
    for start, trees in zip(starts, extended, strict=False):
        if trees is None:
            booster = lightgbm.Booster(parameters, shared)
        else:
            data = new_data()
            # LightGBM has no function that only prepares trees to be extended: a round without derivatives adds none.
            how = {"num_boost_round": 1, "init_model": trees.trees, "keep_training_booster": True}
            booster = lightgbm.train({**parameters, "objective": _no_derivatives}, data, **how)
            data.data = None  # a copy of the features, which only the scores before the first round needed
            while booster.current_iteration() > trees.rounds:
                booster.rollback_one_iter()
        first = None if trees is None else trees.first
        ensembles.append(Ensemble(booster, start, scores, categorical, first))
    return ensembles


def _no_derivatives(scores: np.ndarray, _data: object) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(len(scores), np.float32), np.ones(len(scores), np.float32)


def _outputs(outputs: list[Ensemble], starts: list[float], categorical: tuple[int, ...], *, best: bool) -> nn.Module:
    """Return a module of the trees' predictions, with all rounds, or up to the best round on held-out requests."""
    boosters: list[Booster | None] = [None, None, None]
    for i, output in enumerate(outputs):
        rounds = output.stopping.best_step if best or not output.growing else output.trees.current_iteration()
        boosters[i] = LightGBM(output.trees, rounds, categorical, output.first) if rounds else None
    return BoostedOutputs(starts, boosters)


class _EM:
    """The E- and M-step of a bias model over a whole log."""

    def __init__(self, model: BiasModel, log: Log, place: Tensor, label: Tensor) -> None:
        self.model, self.place, self.label, self.positive = model, place, label, label > 0
        self.offsets = np.ascontiguousarray(log.offsets, np.int64)
        self.requests = np.ones(len(log)) if log.weights is None else log.weights.astype(np.float64)
        self.rows = torch.from_numpy(np.repeat(self.requests, log.lengths))

    def starts(self) -> list[float]:
        """Return the constants of the outputs: one β and one μ for all rows, which match the mean clicks and values."""
        model, rows = self.model, self.rows
        theta, zeta = model.theta[self.place].double(), model.zeta[self.place].double()
        clicks = self.positive.double()
        beta = float((rows * (clicks - zeta)).sum() / (rows * (theta - zeta)).sum().clamp(min=1e-9))
        value = (rows * clicks * self.label / model.rho[self.place]).sum() / (rows * clicks).sum().clamp(min=1e-9)
        return [float(torch.tensor(beta).clamp(0.001, 0.999).logit()), float(value.clamp(min=1e-4).log()), 0.0]

    def step(self, outputs: list[Ensemble]) -> None:
        """Add a tree towards the current posteriors to each output, then update the parameters by position."""
        model, (click, value) = self.model, outputs[:2]
        theta, zeta, rho = (values[self.place].double() for values in (model.theta, model.zeta, model.rho))
        weights = self.rows * model.row_weights(self.place)

        def toward_relevance(logit: Tensor) -> tuple[Tensor, Tensor]:
            # The curvature is that of the likelihood (Fisher's). That of EM, β (1-β), would make steps too short.
            beta = logit.sigmoid()
            target, clicked = relevance_posterior(self.positive, theta, beta, zeta), theta * beta + zeta * (1 - beta)
            slope = (theta - zeta) * beta * (1 - beta)
            return weights * (beta - target), weights * quotient(slope.square(), clicked * (1 - clicked))

        def toward_value(log_value: Tensor) -> tuple[Tensor, Tensor]:
            share = torch.where(self.positive, self.label / rho * torch.exp(-log_value), 0.0)
            return weights * torch.where(self.positive, 1 - share, 0.0), weights * share

        click.grow(toward_relevance)
        value.grow(toward_value)
        beta = click.scores.sigmoid()
        terms = examined_zero_terms(self.positive, theta, beta)
        examined, zeros = (self._by_place(self.rows * term) for term in terms)
        model.theta_minus.copy_(updated(examined, zeros, model.theta_minus))
        if model.scaled_values:
            clicks = self.rows * self.positive
            sums = self._by_place(clicks * self.label), self._by_place(clicks * value.scores.exp())
            new_rho = updated(*sums, model.rho).clamp(0.01, 100)
            model.rho.copy_(new_rho / new_rho[model.theta.argmax()])
        if model.pairs:
            outputs[2].grow(lambda preference: self._toward_preference(preference, theta, beta))
        if model.theta_from == "regression":
            self._regress(beta, theta)

    def _by_place(self, values: Tensor) -> Tensor:
        size = len(self.model.index)
        return torch.zeros(size, dtype=values.dtype).index_add_(0, self.place, values).to(self.model.theta.dtype)

    def _regress(self, beta: Tensor, theta: Tensor) -> None:
        """Update θ by Fisher's scoring on all rows; its largest value stays at `scale`, unless that is estimated."""
        model = self.model
        scored, expected = (self._by_place(self.rows * term) for term in scoring_terms(self.positive, theta, beta))
        new_theta, shown = updated(scored, expected, model.theta), expected > 0
        if model.scale is not None:
            new_theta = new_theta / new_theta[shown].max() * model.scale
        new_theta = torch.where(shown, new_theta.clamp(SMALLEST, 1), model.theta)
        model.moved.copy_((new_theta / model.theta - 1).abs().max())
        model.theta.copy_(new_theta)

    def _toward_preference(self, preference: Tensor, theta: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the E-step of pairs, update ε⁺ and ε⁻ if they are learned, and return the derivatives of g."""
        model = self.model
        tables = (table.double().numpy() for table in (model.plus, model.minus))
        gradient, curvature, sums = preference_step(
            preference.numpy(), self.offsets, self.requests, self.label.numpy(), theta.numpy(), beta.numpy(),
            self.place.numpy(), *tables,
        )  # fmt: skip
        if model.trust_in_pairs:
            right, all_right, wrong, all_wrong = by_pair = torch.from_numpy(sums).to(model.plus)
            model.pair_sums.copy_(by_pair.view(4, -1))
            model.take_trust(updated(right, all_right, model.plus), updated(wrong, all_wrong, model.minus))
        mean = max(curvature.mean(), 1e-12)
        return torch.from_numpy(gradient / mean), torch.from_numpy(curvature / mean)
