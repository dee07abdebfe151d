"""Figures 3, 4 and 5 of the paper, and m_ij by position pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ultr.checkpoint import read_json
from ultr.compare import Comparison, Entry, run_folder
from ultr.evaluation import Mean, mean_with_interval, paired_test
from ultr.experiments.claims import DIRECTION, HELD, NOT, Claim, row_of
from ultr.experiments.lab import TITLES, Lab, Outcome, World, markdown_table
from ultr.experiments.paper import BAYES, DELTAS, ETAS, FIGURE_METHODS, OPT
from ultr.plots import Line, Panel, write_line_plot, write_matrix_plot
from ultr.simulate import make_user

LOWER = "lambdarank"
NAMES = {entry: name for name, entry in FIGURE_METHODS.items()}
FIGURE_DATA = ["yahoo", "ml-1m", "synthetic"]


def figure3(lab: Lab) -> Outcome:
    """Gain over LambdaRank by the severity of position bias, for both kinds of label."""
    here, absent = lab.find(FIGURE_DATA)
    groups = [
        (f"{kind}, {TITLES.get(data, data)}", [World(data, clicks=clicks, eta=eta) for eta in ETAS])
        for data in here
        for kind, clicks in (("continuous label", False), ("clicks", True))
    ]
    title = "Figure 3: gain over LambdaRank by the severity of position bias"
    text = "loss_opt is robust to the severity of position bias: the largest gain at every eta"
    return _gains(lab, "figure3", title, text, groups, "eta", lambda world: world.eta, absent)


def figure4(lab: Lab) -> Outcome:
    """Gain over LambdaRank by the weight of dwell time."""
    here, absent = lab.find(FIGURE_DATA)
    groups = [(TITLES.get(data, data), [World(data, delta=delta) for delta in DELTAS]) for data in here]
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
) -> Outcome:
    """Rates are tuned in the world of the tables (eta 1, delta 3) and used in all of a group."""
    entries = list(FIGURE_METHODS.values())
    usual = {World(world.data, clicks=world.clicks): None for _, worlds in groups for world in worlds}
    tuned = lab.compare(list(usual), entries, reference=LOWER)
    rates = {w: {row.entry: row.lr for row in result.rows} for w, result in tuned.items()}
    every = [world for _, worlds in groups for world in worlds]
    given = {world: rates[World(world.data, clicks=world.clicks)] for world in every}
    results = lab.compare(every, entries, reference=LOWER, rate_of=given)
    panels, sections, claims, figures = [], [], [], {}
    for head, worlds in groups:
        metric = worlds[0].metrics[-1]
        gains = {e: [_gain(results[w], e, metric) for w in worlds] for e in entries if e != LOWER}
        panels.append(
            Panel(
                head,
                [value(world) for world in worlds],
                axis,
                f"gain in {metric} over LambdaRank, %",
                [_line(NAMES[entry], found) for entry, found in gains.items()],
            )
        )
        rows = [[NAMES[e], *(_percent(gain) for gain in found)] for e, found in gains.items()]
        heads = ["method", *(f"{axis} {value(world):g}" for world in worlds)]
        sections.append(f"## {head}\n\n" + markdown_table(heads, rows))
        if lab.seeds > 1:
            claims.append(_largest(claimed, head, gains, [results[world] for world in worlds], metric))
        figures[head] = {
            "metric": metric,
            axis: [value(world) for world in worlds],
            "gain": {entry: [_plain(gain) for gain in found] for entry, found in gains.items()},
            "seeds": {e: [row_of(results[w], e).figures[metric] for w in worlds] for e in entries},
        }
    write_line_plot(lab.out / f"{name}.svg", panels)
    about = f"{lab.seeds} runs; the rate of each method as tuned at eta 1, delta 3. Gain in % with its 95% interval."
    text = f"{title} (budget: {lab.budget.name})"
    return Outcome(name, text, [about, *sections], claims, figures, absent, [f"{name}.svg"])


def _gain(result: Comparison, entry: str, metric: str) -> Mean:
    """The gain over the lower bound, run by run."""
    own, lower = (np.array(row_of(result, e).figures[metric]) for e in (entry, LOWER))
    return mean_with_interval(own / lower - 1)


def _plain(gain: Mean) -> dict[str, float | None]:
    """For JSON, which has no infinity: one run has no interval."""
    return {name: value if np.isfinite(value) else None for name, value in vars(gain).items()}


def _line(name: str, gains: Sequence[Mean]) -> Line:
    values = [100 * gain.mean for gain in gains]
    if not all(np.isfinite(gain.low) for gain in gains):
        return Line(name, values)
    return Line(name, values, [100 * gain.low for gain in gains], [100 * gain.high for gain in gains])


def _percent(gain: Mean) -> str:
    return f"{gain.mean:+.2%}" + (f" [{gain.low:+.2%}, {gain.high:+.2%}]" if np.isfinite(gain.low) else "")


def _largest(text: str, head: str, gains: dict[str, list[Mean]], results: Sequence[Comparison], metric: str) -> Claim:
    """Whether loss_opt has the largest gain everywhere, and significantly."""
    words, first, sure = [], 0, 0
    others = [entry for entry in gains if entry != OPT]
    for at, result in enumerate(results):
        best = max(others, key=lambda entry: gains[entry][at].mean)
        above = np.array(row_of(result, OPT).figures[metric]), np.array(row_of(result, best).figures[metric])
        test = paired_test(*above)
        first += test.difference > 0
        sure += test.difference > 0 and test.significant
        words.append(f"{test.difference:+.4f} over {NAMES[best]} (p = {test.p:.2g})")
    verdict = HELD if sure == len(results) else DIRECTION if first == len(results) else NOT
    return Claim(
        text, head, verdict, f"first at {first} of {len(results)}, significantly at {sure}: " + "; ".join(words)
    )


def figure5(lab: Lab) -> Outcome:
    """Examination, click rate and their ratio by position, and how far pairs of positions are trusted."""
    here, absent = lab.find(FIGURE_DATA)
    worlds = [World(data) for data in here]
    results = lab.compare(worlds, [BAYES], reference=BAYES)
    panels, sections, claims, figures = [], [], [], {}
    plots = ["figure5.svg"]
    for world, result in results.items():
        head = TITLES.get(world.data, world.data)
        found = _bias_of(lab, world, result)
        positions, m = found.pop("positions"), found.pop("m")
        plots.append(f"figure5-m-{world.data}.svg")
        axes = "i above j in the feedback: i down, j across"
        write_matrix_plot(lab.out / plots[-1], {f"m_ij, {head}": m}, names=positions, axes=axes)
        lines = [_line_of(name, values) for name, values in found.items()]
        user = make_user("pbm", eta=world.eta)
        true = np.array([user.examination[min(k, len(user.examination)) - 1] for k in positions]) ** world.eta
        lines.append(Line("true theta", true.tolist()))
        panels.append(Panel(head, positions, "position", "probability", lines))
        rows = [[name, *(f"{mean:.3f}" for mean in values.mean(0))] for name, values in found.items()]
        rows.append(["true theta", *(f"{v:.3f}" for v in true)])
        sections.append(f"## {head}\n\n" + markdown_table(["position", *map(str, positions)], rows))
        claims += _falling(head, found)
        seen = m[np.isfinite(m)] if np.isfinite(m).any() else np.zeros(1)
        sections.append(
            f"m_ij over pairs of positions: {seen.min():.2f} to {seen.max():.2f}, deviation {seen.std():.3f}"
        )
        figures[world.data] = {
            "positions": positions,
            "true_theta": true.tolist(),
            **{name: values.tolist() for name, values in found.items()},
            "m": [[None if not np.isfinite(v) else v for v in row] for row in m.tolist()],
        }
    write_line_plot(lab.out / "figure5.svg", panels)
    title = f"Figure 5: examination by position (budget: {lab.budget.name})"
    about = f"{lab.seeds} runs of `{BAYES}`; theta is held at 0.7 where it is largest, as clicks tell ratios alone."
    return Outcome("figure5", title, [about, *sections], claims, figures, absent, plots)


def _bias_of(lab: Lab, world: World, result: Comparison) -> dict[str, Any]:
    """By run and position: theta, P(c>0) and their ratio; and the mean over runs of m, NaN where no pair was seen."""
    plan = lab.plan(world, [BAYES], reference=BAYES, rate_of={})
    folders = [run_folder(plan.out, Entry.parse(BAYES), result.rows[0].lr, seed) for seed in range(lab.seeds)]
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


def _line_of(name: str, values: np.ndarray) -> Line:
    means = [mean_with_interval(column) for column in values.T]
    if len(values) < 2:
        return Line(name, [mean.mean for mean in means])
    return Line(name, [mean.mean for mean in means], [mean.low for mean in means], [mean.high for mean in means])


def _falling(head: str, found: dict[str, np.ndarray]) -> list[Claim]:
    claims = []
    for name, text in (
        ("theta", "theta falls with position"),
        ("P(c>0) / theta", "P(c>0)/theta, the relevance of what stands there, falls with position"),
    ):
        mean = found[name].mean(0)
        steps = np.diff(mean)
        rank = float(np.corrcoef(np.arange(len(mean)), mean)[0, 1]) if np.ptp(mean) else 0.0
        verdict = HELD if (steps < 0).all() else DIRECTION if rank < 0 else NOT
        words = f"{(steps < 0).sum()} of {len(steps)} steps fall, from {mean[0]:.3f} to {mean[-1]:.3f}"
        claims.append(Claim(text, head, verdict, f"{words}; correlation {rank:+.2f}"))
    return claims
