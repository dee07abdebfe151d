"""Report a trained bias model: its parameters, statistics of them over some lists, and warnings of problems."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ultr.bias.equations import examined_though_zero, pair_trust, quotient, sums_by_cell
from ultr.evaluation.metrics import batch_innermost
from ultr.lists import Lists
from ultr.methods.bias_model import BiasModel
from ultr.methods.losses import gaps, preferred_pairs
from ultr.methods.position_model import numbers

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
KINDS = ("both above zero", "one above zero")


class Tally:
    """Sums over lists, from which the report of a bias model is computed."""

    def __init__(self, model: BiasModel) -> None:
        size, device = len(model.index), model.theta.device
        self.model = model
        self.betas: list[Tensor] = []
        self.ts: list[Tensor] = []
        self.zeros = torch.zeros(2, size, device=device)  # items with label 0 by position: Σ t, number
        self.trust = torch.zeros(2, size * size, device=device)  # by pair of positions: Σ m, number of item pairs
        self.kinds = [[0, 0.0, 0.0, 0, 0.0] for _ in KINDS]  # pairs, Σ w, Σ w², clipped, largest

    def add(self, lists: Lists, weights: Tensor, clip: float) -> None:
        model, labels = self.model, self.model.labels(lists)
        place, size = model.index(lists.shown_positions), len(model.index)
        logit, _, preference = model.of_lists(lists)
        beta, zero = logit.sigmoid(), lists.where & (labels <= 0)
        t = examined_though_zero(model.theta[place], beta)[zero]
        self.betas.append(beta[lists.where])
        self.ts.append(t)
        self.zeros += torch.stack([sums_by_cell(values, place[zero], size) for values in (t, torch.ones_like(t))])
        preferred = preferred_pairs(labels, where=lists.where)
        lower_positive = batch_innermost(labels > 0)[..., None, :]
        both = preferred & lower_positive
        for row, chosen in zip(self.kinds, (both, preferred & ~lower_positive), strict=True):
            _add_weights(row, weights[chosen].double(), clip)
        if model.pairs:
            cells = batch_innermost(place)
            i, j = cells[..., :, None], cells[..., None, :]
            m = pair_trust(model.plus[i, j], model.minus[i, j], gaps(preference).sigmoid())
            pairs = (torch.where(both, m, 0.0), both.float())
            self.trust += torch.stack([sums_by_cell(values, i * size + j, size * size) for values in pairs])


def _add_weights(row: list[float], weights: Tensor, clip: float) -> None:
    if len(weights):
        clipped = weights.clamp(max=clip)
        row[0] += len(weights)
        row[1] += float(clipped.sum())
        row[2] += float(clipped.square().sum())
        row[3] += int((weights > clip).sum())
        row[4] = max(row[4], float(weights.max()))


@torch.no_grad()
def diagnosis(
    model: BiasModel, batches: Iterable[Lists], *, weights: Callable[[Lists, Tensor], Tensor], clip: float
) -> dict[str, Any]:
    """Return θ and the other parameters of a bias model, statistics of them over some lists, and warnings.

    `weights` returns the pair weights of lists, given their labels; `clip` is the largest weight that training uses.
    """
    model.eval()
    tally, size = Tally(model), len(model.index)
    for lists in batches:
        tally.add(lists, weights(lists, model.labels(lists)), clip)
    report: dict[str, Any] = {
        **model.report(),
        "theta_minus": numbers(quotient(*tally.zeros)),
        "beta": _quantiles(tally.betas),
        "t": _quantiles(tally.ts),
        "pairs": {name: _kind(row) for name, row in zip(KINDS, tally.kinds, strict=True)},
        "held_out_log_likelihood": dict(zip(("beta of x", "one beta"), numbers(model.held_out), strict=True)),
    }
    if model.scaled_values:
        report["rho"] = numbers(model.rho)
    if model.pairs:
        report |= {
            "eps_plus": _matrix(model.plus),
            "eps_minus": _matrix(model.minus),
            "m": _matrix(quotient(*tally.trust).view(size, size)),  # 0 for positions without such pairs
        }
    report["warnings"] = [{"name": name, "what": what} for name, what in _warnings(model, report)]
    return report


def _warnings(model: BiasModel, report: dict[str, Any]) -> Iterable[tuple[str, str]]:
    if report["beta"]["0.05"] > 0.9 or report["t"]["0.95"] < 0.02:
        what = "almost all items count as relevant, or almost no unclicked items as examined"
        yield "collapse", f"{what}: theta may be too low"
    yield from model.warnings()
    with_x, without = model.held_out.tolist()
    if with_x < without:
        yield "divergence", "the model explains held-out clicks worse with features than without"
    for name, kind in report["pairs"].items():
        if kind["clipped"] > 0.01:
            yield "weights clipped", f"{kind['clipped']:.1%} of the pairs (labels: {name}) weigh more than max_weight"
        if kind["pairs"] > 100 and kind["effective_share"] < 0.05:
            few = f"a few pairs (labels: {name}) dominate"
            yield "weights uneven", f"{few}: the effective number of pairs is {kind['effective_share']:.1%} of all"
    if model.pairs:
        right, all_right, wrong, all_wrong = model.pair_sums
        reversed_ = (quotient(wrong, all_wrong) > quotient(right, all_right)) & (all_right > 0) & (all_wrong > 0)
        if bool(reversed_.any()):
            pairs = f"{int(reversed_.sum())} pairs of positions"
            yield "trust reversed", f"eps- would exceed eps+ for {pairs}; it is set to eps+ there"


def _kind(row: list[float]) -> dict[str, float]:
    pairs, total, squares, clipped, largest = row
    return {
        "pairs": int(pairs),
        "effective_share": round(total**2 / (pairs * squares), 4) if squares else 0.0,
        "clipped": round(clipped / pairs, 4) if pairs else 0.0,
        "largest": round(largest, 2),
    }


def _quantiles(parts: list[Tensor]) -> dict[str, float]:
    values = torch.cat(parts)[: 1 << 20] if parts else torch.zeros(0)
    if not len(values):
        return {str(q): 0.0 for q in QUANTILES}
    quantiles = values.float().cpu().quantile(torch.tensor(QUANTILES))
    return {str(q): round(v, 4) for q, v in zip(QUANTILES, quantiles.tolist(), strict=True)}


def _matrix(values: Tensor) -> list[list[float]]:
    return [numbers(row) for row in values]
