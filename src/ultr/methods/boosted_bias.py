"""A bias model whose β, μ and g are trees: between rounds, the E- and M-step run on the trees there are.

The regression EM of Wang et al. (2018) in its first form, with boosted trees, for values and pairs as well as clicks.
Each round sees the whole log: posteriors by row and by pair, one tree more for each of β, μ and g toward them, and
what depends on position from their sums.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ultr.bias import examined_zero_terms, quotient, relevance_posterior, scoring_terms, updated
from ultr.errors import DataError
from ultr.examination import LEAST
from ultr.formats import load_json
from ultr.lists import Lists
from ultr.log import Log
from ultr.methods.bias_model import BiasModel
from ultr.rankers.boosters import (
    Booster,
    LightGBM,
    TreeRows,
    lightgbm_data,
    lightgbm_parameters,
    refusal_of_lightgbm,
)
from ultr.rankers.trees import kernels, use_threads
from ultr.seals import checksum, sealed

TREES = {"num_leaves": 31, "min_data_in_leaf": 100, "lambda_l2": 1.0}
RATE, EVERY, PATIENCE = 0.1, 5, 4  # of a round; rounds between looks at held-out requests; looks without gain
SMALLEST_CURVATURE = 1e-6
CONSTANTS = "constants.json"
FIGURES = {  # by which β, μ and g are judged, and what is known of positions along with each
    "clicks": ("theta", "theta_minus", "moved"),
    "values": ("rho",),
    "pairs": ("plus", "minus", "pair_sums"),
}


class BoostedOutputs(nn.Module):
    """The logit of β, the log of μ and g of rows, each a constant and, if it has any, trees."""

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
        for name, booster in zip(FIGURES, self.boosters, strict=True):
            if booster is not None:
                booster.save(folder / f"{name}.txt", rounds=booster.rounds)
        sums = {path.name: checksum(path) for path in sorted(folder.glob("*.txt"))}
        (folder / CONSTANTS).write_text(json.dumps(sealed({"constants": self.constants, "sums": sums})))

    @staticmethod
    def is_at(folder: Path) -> bool:
        return (folder / CONSTANTS).is_file()

    @staticmethod
    def load(folder: Path, categorical: tuple[int, ...]) -> BoostedOutputs:
        content = load_json(folder / CONSTANTS, finite=True)
        kept, sums = (content["constants"], content["sums"]) if isinstance(content, dict) else (content, {})
        for name, expected in sums.items():
            if not (folder / name).is_file() or checksum(folder / name) != expected:
                mend = "restore it from a copy, or train again"
                raise DataError("the trees are not those that were written", where=folder / name, mend=mend)
        constants = [float(value) for value in kept]
        files = [folder / f"{name}.txt" for name in FIGURES]
        return BoostedOutputs(constants, [LightGBM.load(f, categorical) if f.is_file() else None for f in files])


@dataclass
class Ensemble:
    """The trees of one output: what they predict for the rows learned from, and where held-out requests liked them
    best.
    """

    trees: Any
    constant: float
    scores: Tensor
    categorical: tuple[int, ...]
    best: float = -np.inf
    best_rounds: int = 0
    waited: int = 0

    @property
    def growing(self) -> bool:
        return self.waited < PATIENCE

    def grow(self, derivatives: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        """A tree more, toward what the scores so far are told, unless held-out requests have had enough."""

        def told(scores: np.ndarray, _data: object) -> tuple[np.ndarray, np.ndarray]:
            self.scores = torch.from_numpy(scores + self.constant)
            gradient, curvature = derivatives(self.scores)
            return gradient.numpy().astype(np.float32), curvature.clamp(min=SMALLEST_CURVATURE).numpy().astype("f4")

        import lightgbm

        try:
            if self.growing:
                self.trees.update(fobj=told)
        except lightgbm.basic.LightGBMError as error:
            raise refusal_of_lightgbm(error) from error

    def look(self, figure: float, features: np.ndarray) -> bool:
        """Whether held-out requests gained; where they have not for long, it goes back to where they had."""
        if figure > self.best:
            self.best, self.best_rounds, self.waited = figure, self.trees.current_iteration(), 0
            return True
        self.waited += 1
        if not self.growing:  # what it believes from now on
            best = LightGBM(self.trees, self.best_rounds, self.categorical).predict(features)
            self.scores = torch.from_numpy(best + self.constant)
        return False


def fit_boosted(
    model: BiasModel,
    log: Log,
    labels: np.ndarray,
    *,
    judged: list[Lists],
    categorical: tuple[int, ...],
    rounds: int,
    seed: int,
    on_progress: Callable[[int, dict[str, float]], None] = lambda *_: None,
) -> None:
    """Give a bias model, whose θ is known or estimated already unless it is regressed, trees that are learned from a
    log until the requests `judged` are explained no better.
    """
    if log.positions is None:
        raise DataError("examination is by position, and the log has none", mend="name it with --position")
    place = model.index(torch.from_numpy(log.positions))
    label = torch.from_numpy(labels).double()
    em = _EM(model, log, place, label)
    rows = TreeRows(log.features, log.lengths, log.feature_names, categorical)
    data, parameters = lightgbm_data(rows), {**lightgbm_parameters(RATE, seed), **TREES, "objective": "none"}
    import lightgbm

    starts = em.starts()
    outputs = [
        Ensemble(lightgbm.Booster(parameters, data), start, torch.full_like(label, start), categorical)
        for start in starts[: 2 + model.pairs]
    ]
    kept: dict[str, Tensor] = {}
    for number in range(1, rounds + 1):
        em.step(outputs)
        if number % EVERY and number < rounds:
            continue
        model.network = _outputs(outputs, starts, categorical, best=False)
        figures = model.held_out_figures(judged)
        for output, (name, along) in zip(outputs, FIGURES.items(), strict=False):
            if output.growing and output.look(figures[name], log.features):
                kept |= {buffer: getattr(model, buffer).clone() for buffer in along}
        on_progress(number, figures)
        if not any(output.growing for output in outputs):
            break
    for buffer, values in kept.items():
        getattr(model, buffer).copy_(values)
    model.network = _outputs(outputs, starts, categorical, best=True)
    model.held_out_figures(judged)


def _outputs(outputs: list[Ensemble], starts: list[float], categorical: tuple[int, ...], *, best: bool) -> nn.Module:
    """What the trees predict: with all their rounds, or with those that held-out requests liked best."""
    boosters: list[Booster | None] = [None, None, None]
    for i, output in enumerate(outputs):
        rounds = output.best_rounds if best or not output.growing else output.trees.current_iteration()
        boosters[i] = LightGBM(output.trees, rounds, categorical) if rounds else None
    return BoostedOutputs(starts, boosters)


class _EM:
    """The E- and M-step over a whole log."""

    def __init__(self, model: BiasModel, log: Log, place: Tensor, label: Tensor) -> None:
        self.model, self.place, self.label, self.positive = model, place, label, label > 0
        self.offsets = np.ascontiguousarray(log.offsets, np.int64)
        self.requests = np.ones(len(log)) if log.weights is None else log.weights.astype(np.float64)
        self.rows = torch.from_numpy(np.repeat(self.requests, log.lengths))

    def starts(self) -> list[float]:
        """One β and one μ for all rows, by which clicks and values are what they are on average."""
        model, rows = self.model, self.rows
        theta, zeta = model.theta[self.place].double(), model.zeta[self.place].double()
        clicks = self.positive.double()
        beta = float((rows * (clicks - zeta)).sum() / (rows * (theta - zeta)).sum().clamp(min=1e-9))
        value = (rows * clicks * self.label / model.rho[self.place]).sum() / (rows * clicks).sum().clamp(min=1e-9)
        return [float(torch.tensor(beta).clamp(0.001, 0.999).logit()), float(value.clamp(min=1e-4).log()), 0.0]

    def step(self, outputs: list[Ensemble]) -> None:
        """A tree more for each output, toward posteriors by what is believed now, and from them what depends on
        position.
        """
        model, (click, value) = self.model, outputs[:2]
        theta, zeta, rho = (values[self.place].double() for values in (model.theta, model.zeta, model.rho))
        weights = self.rows * model.row_weights(self.place)

        def toward_relevance(logit: Tensor) -> tuple[Tensor, Tensor]:
            # The curvature is that of the likelihood itself (Fisher's): EM's own, β (1-β), makes steps too short.
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
        seen, zeros = (self._by_place(self.rows * term) for term in terms)
        model.theta_minus.copy_(updated(seen, zeros, model.theta_minus))
        if model.scaled_values:
            clicks = self.rows * self.positive
            sums = self._by_place(clicks * self.label), self._by_place(clicks * value.scores.exp())
            found = updated(*sums, model.rho).clamp(0.01, 100)
            model.rho.copy_(found / found[model.theta.argmax()])
        if model.pairs:
            outputs[2].grow(lambda preference: self._toward_preference(preference, theta, beta))
        if model.theta_from == "regression":
            self._regress(beta, theta)

    def _by_place(self, values: Tensor) -> Tensor:
        size = len(self.model.index)
        return torch.zeros(size, dtype=values.dtype).index_add_(0, self.place, values).to(self.model.theta.dtype)

    def _regress(self, beta: Tensor, theta: Tensor) -> None:
        """θ by Fisher's scoring on all rows, its largest value held at its scale, if that is not estimated."""
        model = self.model
        scored, expected = (self._by_place(self.rows * term) for term in scoring_terms(self.positive, theta, beta))
        found, shown = updated(scored, expected, model.theta), expected > 0
        if model.scale is not None:
            found = found / found[shown].max() * model.scale
        found = torch.where(shown, found.clamp(LEAST, 1), model.theta)
        model.moved.copy_((found / model.theta - 1).abs().max())
        model.theta.copy_(found)

    def _toward_preference(self, preference: Tensor, theta: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """The E-step of pairs; ε⁺ and ε⁻ follow from it at once."""
        model = self.model
        compiled = kernels()
        use_threads()
        tables = (table.double().numpy() for table in (model.plus, model.minus))
        gradient, curvature, sums = compiled.preference_step(
            preference.numpy(), self.offsets, self.requests, self.label.numpy(), theta.numpy(), beta.numpy(),
            self.place.numpy(), *tables,
        )  # fmt: skip
        model.pair_sums.copy_(torch.from_numpy(sums).view(4, -1))
        model.take_trust()
        mean = max(curvature.mean(), 1e-12)
        return torch.from_numpy(gradient / mean), torch.from_numpy(curvature / mean)
