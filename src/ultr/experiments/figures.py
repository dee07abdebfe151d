"""Figures 3, 4 and 5 of the paper behind pairwise-em (CIKM 2022): gains over LambdaRank, and bias by position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ultr.datasets.users import make_user
from ultr.evaluation.scores import Mean, mean_with_interval
from ultr.experiments.lab import DIRECTION, HELD, NOT, TITLES, Claim, ExperimentResult, Lab, World, row_of
from ultr.experiments.paper import BAYES, DEFAULT, DELTAS, ETAS, FIGURE_METHODS, NAMES, OPT
from ultr.report.bias import pair_map
from ultr.report.page import Grid, Section, Table, Text
from ultr.report.plots import line_plot
from ultr.training.comparing.plan import run_folder
from ultr.training.comparing.results import Comparison
from ultr.utils.jsonfiles import finite, read_json

LOWER = "lambdarank"
FIGURE_DATA = ["yahoo", "ml-1m", "synthetic"]


def figure3(lab: Lab) -> ExperimentResult:
    """Repeat Figure 3: the gain over LambdaRank by severity of position bias, for clicks and continuous labels."""
    available, absent = lab.find(FIGURE_DATA)
    groups = [
        (f"{kind}, {TITLES.get(data, data)}", [lab.world(data, clicks=clicks, eta=eta) for eta in ETAS])
        for data in available
        for kind, clicks in (("continuous label", False), ("clicks", True))
    ]
    title = "Figure 3: gain over LambdaRank by the severity of position bias"
    text = "loss_opt is robust to the severity of position bias: the largest gain at every eta"
    return _gains(lab, "figure3", title, text, groups, "eta", lambda world: world.eta, absent)


def figure4(lab: Lab) -> ExperimentResult:
    """Repeat Figure 4: the gain over LambdaRank by the weight of dwell time in the label."""
    available, absent = lab.find(FIGURE_DATA)
    groups = [(TITLES.get(data, data), [lab.world(data, delta=delta) for delta in DELTAS]) for data in available]
    title = "Figure 4: gain over LambdaRank by the weight of dwell time"
    text = "loss_opt is robust to the weight of the continuous label: the largest gain at every delta"
    return _gains(lab, "figure4", title, text, groups, "delta", lambda world: world.delta, absent)


def _gains(
    lab: Lab,
    name: str,
    title: str,
    claimed: str,
    groups: Sequence[tuple[str, Sequence[World]]],
    axis: str,
    value: Callable[[World], float],
    absent: dict[str, str],
) -> ExperimentResult:
    """Compare methods in groups of worlds (simulated settings), in each of which every method is tuned."""
    entries = list(FIGURE_METHODS)
    compared = lab.compare([world for _, worlds in groups for world in worlds], entries, reference=LOWER)
    sections, claims, results = [], [], {}
    for head, worlds in groups:
        metric, at = worlds[0].metrics[-1], [value(world) for world in worlds]
        gains = {e: [_gain(compared[w], e, metric) for w in worlds] for e in entries if e != LOWER}
        lines, bands = _lines(at, {NAMES[e]: means for e, means in gains.items()}, scale=100)
        y = f"gain in {metric} over LambdaRank, %"
        plot = line_plot(head, lines, x=axis, y=y, bands=bands, categories=True, caption="With 95% intervals.")
        rows = [[NAMES[e], *(_percent(gain) for gain in means)] for e, means in gains.items()]
        sections.append(Section(head, [plot, Table(["method", *(f"{axis} {x:g}" for x in at)], rows)]))
        if lab.seeds > 1:
            there = [compared[world] for world in worlds]
            claims.append(_largest(claimed, head, OPT, gains, there, metric))
            ours = claimed.replace("loss_opt", "the default").capitalize()
            claims.append(_largest(ours, head, DEFAULT, gains, there, metric))
        results[head] = {
            "metric": metric,
            axis: at,
            "gain": finite({entry: [vars(gain) for gain in means] for entry, means in gains.items()}),
            "seeds": {e: [row_of(compared[w], e).results[metric] for w in worlds] for e in entries},
        }
    about = f"{lab.protocol} Gains are in %, with 95% intervals."
    return ExperimentResult(name, f"{title} (budget: {lab.budget.name})", about, sections, claims, results, absent)


def _lines(at: Sequence[float], means: Mapping[str, Sequence[Mean]], scale: float = 1.0) -> tuple[Any, Any]:
    """Return the lines and bands of a `line_plot` of means with intervals, at the x values `at`, times `scale`."""

    def column(line: Sequence[Mean], name: str) -> list[float]:
        return [scale * getattr(mean, name) for mean in line]

    lines = {name: (at, column(line, "mean")) for name, line in means.items()}
    return lines, {name: (column(line, "low"), column(line, "high")) for name, line in means.items()}


def _gain(result: Comparison, entry: str, metric: str) -> Mean:
    """Return the mean over runs of a method's relative gain over LambdaRank, the lower bound."""
    values, lower = (np.array(row_of(result, e).results[metric]) for e in (entry, LOWER))
    return mean_with_interval(values / lower - 1)


def _percent(gain: Mean) -> str:
    return f"{gain.mean:+.2%}" + (f" [{gain.low:+.2%}, {gain.high:+.2%}]" if np.isfinite(gain.low) else "")


def _largest(
    text: str, head: str, method: str, gains: dict[str, list[Mean]], results: Sequence[Comparison], metric: str
) -> Claim:
    """Check the claim that a method has the largest gain in every world, with p < 0.05; ours are not compared."""
    differences, first, significant = [], 0, 0
    others = [entry for entry in gains if entry not in (OPT, DEFAULT)]
    for at, result in enumerate(results):
        best = max(others, key=lambda entry: gains[entry][at].mean)
        test = row_of(result, method).tested(row_of(result, best))[metric]
        gap = test.seeds.difference
        first += gap > 0
        significant += gap > 0 and test.significant
        differences.append(f"{gap:+.4f} over {NAMES[best]} (p = {test.p:.2g})")
    verdict = HELD if significant == len(results) else DIRECTION if first == len(results) else NOT
    evidence = f"first at {first} of {len(results)}, significantly at {significant}: " + "; ".join(differences)
    return Claim(text, head, verdict, evidence)


def figure5(lab: Lab) -> ExperimentResult:
    """Repeat Figure 5: examination, click rate and their ratio by position; m (see `MATRICES`) by position pair."""
    available, absent = lab.find(FIGURE_DATA)
    compared = lab.compare([lab.world(data) for data in available], [BAYES], reference=BAYES)
    sections, claims, results = [], [], {}
    for world, result in compared.items():
        head = TITLES.get(world.data, world.data)
        curves = _bias_of(lab, world, result)
        positions, m = curves.pop("positions"), curves.pop("m")
        user = make_user("pbm", eta=world.eta)
        true = [user.examination[min(k, len(user.examination)) - 1] ** world.eta for k in positions]
        lines, bands = _lines(positions, {name: [*map(mean_with_interval, v.T)] for name, v in curves.items()})
        lines["true theta"] = (positions, true)
        plot = line_plot(
            "Examination by position",
            lines,
            x="position",
            y="probability",
            caption="Means over runs with 95% intervals.",
            dashed=["true theta"],
            bands=bands,
            from_zero=True,
            categories=True,
        )
        rows = [[name, *(f"{mean:.3f}" for mean in values.mean(0))] for name, values in curves.items()]
        rows.append(["true theta", *(f"{v:.3f}" for v in true)])
        seen = m[np.isfinite(m)] if np.isfinite(m).any() else np.zeros(1)
        spread = f"m_ij over pairs of positions: {seen.min():.2f} to {seen.max():.2f}, deviation {seen.std():.3f}"
        plots = Grid([plot, pair_map("m", m.tolist(), [str(k) for k in positions])])
        sections.append(Section(head, [plots, Table(["position", *map(str, positions)], rows), Text(spread)]))
        claims += _falling(head, curves)
        results[world.data] = {
            "positions": positions,
            "true_theta": true,
            **{name: values.tolist() for name, values in curves.items()},
            "m": finite(m.tolist()),
        }
    title = f"Figure 5: examination by position (budget: {lab.budget.name})"
    about = f"{lab.seeds} runs of {BAYES}. Clicks identify only ratios of theta, so the largest theta is set to 0.7."
    return ExperimentResult("figure5", title, about, sections, claims, results, absent)


def _bias_of(lab: Lab, world: World, result: Comparison) -> dict[str, Any]:
    """Return theta, P(c>0) and their ratio as [run, position], and m averaged over runs (NaN: no such pair)."""
    plan = lab.plan(world, [BAYES], reference=BAYES)
    folders = [run_folder(plan.out, BAYES, result.rows[0].setting, seed) for seed in range(lab.seeds)]
    reports = [read_json(folder / "bias.json") for folder in folders]
    theta = np.array([report["theta"] for report in reports])
    rate = np.array([np.array(report["clicks"]) / np.array(report["impressions"]) for report in reports])
    m = np.array([report["m"] for report in reports])
    counted = (m > 0).sum(0)
    mean = np.where(counted > 0, m.sum(0) / np.maximum(counted, 1), np.nan)
    return {
        "positions": reports[0]["positions"],
        "theta": theta,
        "P(c>0)": rate,
        "P(c>0) / theta": rate / theta,
        "m": mean,
    }


def _falling(head: str, curves: dict[str, np.ndarray]) -> list[Claim]:
    claims = []
    for name, text in (
        ("theta", "theta falls with position"),
        ("P(c>0) / theta", "P(c>0)/theta, the relevance of the items at a position, falls with position"),
    ):
        mean = curves[name].mean(0)
        steps = np.diff(mean)
        correlation = float(np.corrcoef(np.arange(len(mean)), mean)[0, 1]) if np.ptp(mean) else 0.0
        verdict = HELD if (steps < 0).all() else DIRECTION if correlation < 0 else NOT
        evidence = f"{(steps < 0).sum()} of {len(steps)} steps fall, from {mean[0]:.3f} to {mean[-1]:.3f}"
        claims.append(Claim(text, head, verdict, f"{evidence}; correlation {correlation:+.2f}"))
    return claims
