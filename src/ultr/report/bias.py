"""What is known of bias: that of runs, and that of a log as `ultr bias` finds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ultr.report.parts import Card, Cards, Folded, Grid, Heading, Notes, Part, Plot, Section, Table, Text
from ultr.report.plots import bar_plot, heat_map, line_plot

MATRICES = {
    "eps_plus": ("ε⁺", "How often the better of two items has more feedback, if both are seen."),
    "eps_minus": ("ε⁻", "How often an item that is not the better one has more feedback, if both are seen."),
    "m": (
        "m",
        "How likely the item with more feedback is the better one, if both are seen; blank where no such pair was.",
    ),
}
Truth = tuple[Sequence[str], Sequence[float]] | None


# --- Of runs ----------------------------------------------------------------------------------------------------------


def bias_section(found: Mapping[str, tuple[Mapping[str, Any] | None, Truth]]) -> Section:
    """The bias that runs have found, one after another; those that look for none are named."""
    told = {name: (bias, truth) for name, (bias, truth) in found.items() if bias is not None}
    parts: list[Part] = []
    if len(told) > 1:
        parts += _together(told)
    for name, (bias, truth) in told.items():
        if len(found) > 1:
            parts.append(Heading(name))
        parts += _of_run(bias, truth)
    silent = [name for name in found if name not in told]
    if silent:
        parts.append(Text(f"No bias model: {', '.join(silent)}."))
    return Section("Bias", parts)


def _together(told: Mapping[str, tuple[Mapping[str, Any], Truth]]) -> list[Part]:
    lines = {name: (bias["positions"], _relative(bias["theta"])) for name, (bias, _) in told.items() if "theta" in bias}
    truth = next((truth for _, truth in told.values() if truth is not None), None)
    if truth is not None:
        lines["true"] = (truth[0], _relative(truth[1]))
    if len(lines) < 2:
        return []
    return [_by_position("Examination, as each run has it", lines, caption="Relative to the first position.")]


def _by_position(
    title: str, lines: Mapping[str, tuple[Sequence[Any], Sequence[Any]]], *, caption: str, y: str = ""
) -> Plot:
    as_text = {name: ([str(k) for k in at], values) for name, (at, values) in lines.items()}
    return line_plot(
        title,
        as_text,
        x="position",
        y=y or "relative to the first",
        caption=caption,
        dashed=["true"],
        from_zero=True,
        categories=True,
    )


def _of_run(bias: Mapping[str, Any], truth: Truth) -> list[Part]:
    at = [str(k) for k in bias["positions"]]
    parts: list[Part] = []
    plots: list[Plot] = []
    if "theta" in bias:
        plots.append(_theta(bias, at, truth))
        where = f"θ from {bias['theta_from']}; its scale: {bias['theta_scale']}."
        parts.append(Text(where))
    if "towers" in bias:
        lines = {f"tower of {name}": (at, values) for name, values in bias["towers"].items()}
        plots.append(_by_position("Towers", lines, caption=f"By position; each {bias['tower']}.", y="tower"))
    if "t_plus" in bias:
        lines = {"t⁺": (at, bias["t_plus"]), "t⁻": (at, bias["t_minus"])}
        plots.append(_by_position("Ratios of pairs", lines, caption="Of clicked and of unclicked items.", y="ratio"))
    if "zeta" in bias:
        lines = {"relevant items": (at, bias["theta"]), "others": (at, bias["zeta"])}
        plots.append(_by_position("Trust", lines, caption="How likely an item is clicked.", y="probability"))
    if "rho" in bias:
        caption = "How values of clicked items change by position."
        plots.append(_by_position("ρ", {"ρ": (at, bias["rho"])}, caption=caption, y="ρ"))
    if "pairs" in bias:
        names = list(bias["pairs"])
        shares = [bias["pairs"][name]["effective_share"] for name in names]
        caption = "Pairs count as this share of their number, as their weights are uneven."
        plots.append(
            bar_plot("Effective sample size", {"pairs": (names, shares)}, y="share", caption=caption, per_cent=True)
        )
    for key, (symbol, caption) in MATRICES.items():
        if key in bias:
            plots.append(
                heat_map(
                    f"{symbol} by pair of positions",
                    _off_diagonal(bias[key], zeros=key != "m"),
                    columns=at,
                    rows=at,
                    x="position of the other item",
                    y="position of the item with more feedback",
                    caption=caption,
                    largest=None if key == "eps_minus" else 1.0,
                )
            )
    parts.append(Grid(plots))
    if figures := _rests_on(bias, at):
        parts.append(Folded("Figures", figures))
    warnings = [f"{w['name']}: {w['what']}" for w in bias["warnings"]]
    parts.append(Notes(warnings) if warnings else Notes(["Nothing to warn of."], good=True))
    return parts


def _off_diagonal(matrix: Sequence[Sequence[float]], *, zeros: bool) -> list[list[float | None]]:
    """Without pairs of a position with itself, nor, where `zeros` stand for what was never seen, those."""
    return [
        [None if i == j or (value == 0 and not zeros) else value for j, value in enumerate(row)]
        for i, row in enumerate(matrix)
    ]


def _theta(bias: Mapping[str, Any], at: Sequence[str], truth: Truth) -> Plot:
    theta = _relative(bias["theta"])
    lines: dict[str, tuple[Sequence[str], Sequence[Any]]] = {"θ": (at, theta)}
    if truth is not None:
        lines["true"] = (truth[0], _relative(truth[1]))
    if any(bias.get("impressions", [])):
        rate = _relative([c / n if n else None for c, n in zip(bias["clicks"], bias["impressions"], strict=True)])
        lines["feedback rate"] = (at, rate)
        lines["rate / θ"] = (at, [r / t if r is not None and t else None for r, t in zip(rate, theta, strict=True)])
    if "theta_minus" in bias:
        lines["θ⁻"] = (at, _relative(bias["theta_minus"]))
    caption = (
        "How likely a position is looked at. The feedback rate falls with θ and with relevance; "
        "rate / θ is what is left for relevance."
    )
    return _by_position("Examination by position", lines, caption=caption)


def _rests_on(bias: Mapping[str, Any], at: Sequence[str]) -> list[Part]:
    tables: list[Part] = []
    if any(bias.get("impressions", [])):
        rows = [
            [k, f"{theta:.4f}", f"{shown:,.0f}", f"{clicks:,.0f}", f"{clicks / shown:.2%}" if shown else "-"]
            for k, theta, shown, clicks in zip(at, bias["theta"], bias["impressions"], bias["clicks"], strict=True)
        ]
        tables.append(Table(["position", "θ", "impressions", "with feedback", "rate"], rows, "What θ rests on"))
    if "pairs" in bias:
        rows = [
            [name, f"{p['pairs']:,}", f"{p['effective_share']:.1%}", f"{p['clipped']:.1%}", f"{p['largest']:.1f}"]
            for name, p in bias["pairs"].items()
        ]
        tables.append(Table(["pairs", "number", "effective", "clipped", "largest weight"], rows, "Weights of pairs"))
    if "beta" in bias:
        rows = [
            [name, *(f"{v:.3f}" for v in bias[key].values())]
            for name, key in (("β, relevance", "beta"), ("t, seen though zero", "t"))
        ]
        quantiles = [f"{float(q):.0%}" for q in bias["beta"]]
        tables.append(Table(["quantile", *quantiles], rows, "Spread over items"))
    if "held_out_log_likelihood" in bias:
        fit = bias["held_out_log_likelihood"]
        rows = [[name, f"{value:.5f}"] for name, value in fit.items()]
        tables.append(
            Table(["held-out log-likelihood", ""], rows, "Whether features explain clicks: the first should be larger")
        )
    return tables


def _relative(values: Sequence[float | None]) -> list[float | None]:
    first = next((value for value in values if value), None)
    return [None if value is None or first is None else value / first for value in values]


# --- Of a log ---------------------------------------------------------------------------------------------------------


def log_sections(report: Mapping[str, Any]) -> list[Section]:
    """What `ultr bias` found of a log, and of its segments."""
    verdict = report["verdict"]
    cards = [
        Card("verdict", verdict["status"], [verdict["advice"]]),
        Card("requests", f"{report['requests']:,}", [f"feedback: {report['label']} > 0"]),
    ]
    if (explained := report["order_explained_by_features"]) is not None:
        cards.append(
            Card("order explained by features", f"{max(0, explained):.0%}", ["estimates from them need the rest"])
        )
    if verdict["requests_needed"]:
        cards.append(
            Card("requests in random order", f"{verdict['requests_needed']:,}", ["to tell θ to within 10% everywhere"])
        )
    parts: list[Part] = [Cards(cards), Notes(verdict["reasons"], good=verdict["status"] == "identified")]
    parts.append(_estimates(report, "Examination by position"))
    parts.append(_estimates_table(report))
    parts += [Text(note) for note in report["notes"]]
    sections = [Section("Examination", parts), Section("Identification", _identification(report))]
    pitfalls = [f"{p['name']}: {p['what']}; {p['mend']}" for p in report["pitfalls"]]
    found = Notes(pitfalls) if pitfalls else Notes(["None of the usual pitfalls was found."], good=True)
    sections.append(Section("Pitfalls", [found]))
    if report["segments"]:
        inner: list[Part] = []
        for name, part in report["segments"].items():
            title = f"{name} ({part['requests']:,} requests): {part['verdict']['status']}"
            inner += [_estimates(part, title), _estimates_table(part)]
        sections.append(Section("Segments", inner))
    return sections


def _estimates(report: Mapping[str, Any], title: str) -> Plot:
    at = [str(k) for k in report["positions"]]
    lines: dict[str, tuple[Sequence[str], Sequence[Any]]] = {
        name: (at, found["theta"]) for name, found in report["estimates"].items()
    }
    bands = {name: (found["low"], found["high"]) for name, found in report["estimates"].items()}
    highest = max(report["rate"])
    lines["feedback rate"] = (at, [rate / highest if highest else None for rate in report["rate"]])
    if (anchor := report["verdict"]["anchor"]) is not None:
        theta = report["estimates"][anchor]["theta"]
        ratio = _relative([r / t if t else None for r, t in zip(report["rate"], theta, strict=True)])
        lines[f"rate / θ ({anchor})"] = (at, ratio)
    return line_plot(
        title,
        lines,
        x="position",
        y="relative",
        caption="Each estimator with its 95% interval. What the rate falls more than θ is relevance.",
        bands=bands,
        from_zero=True,
        categories=True,
    )


def _estimates_table(report: Mapping[str, Any]) -> Table:
    rows = []
    for i, position in enumerate(report["positions"]):
        cells = [
            _cell(*(found[name][i] for name in ("theta", "low", "high"))) for found in report["estimates"].values()
        ]
        rows.append([str(position), f"{report['impressions'][i]:,.0f}", f"{report['rate'][i]:.2%}", *cells])
    return Table(["position", "shown", "rate", *report["estimates"]], rows)


def _cell(theta: float | None, low: float | None, high: float | None) -> str:
    if theta is None:
        return "-"
    return f"{theta:.3f}" + (f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None and low < high else "")


def _identification(report: Mapping[str, Any]) -> list[Part]:
    parts: list[Part] = []
    likelihoods = {
        name: found["held_out_log_likelihood"]
        for name, found in report["estimates"].items()
        if found["held_out_log_likelihood"] is not None
    }
    if likelihoods:
        rows = [[name, f"{value:.5f}"] for name, value in likelihoods.items()]
        parts.append(Table(["estimator", "held-out log-likelihood"], rows))
    if report["agreements"]:
        rows = [
            [f"{a['first']}, {a['second']}", "yes" if a["agree"] else "no", f"{a['largest']:.0%}", str(a["position"])]
            for a in report["agreements"]
        ]
        parts.append(Table(["estimators", "agree", "largest difference", "at position"], rows))
    if (links := report["links"]) is not None:
        groups = links["components"]
        joined = "All positions hang together" if len(groups) == 1 else f"{len(groups)} groups of positions do not meet"
        weakest = links["weakest"]
        more = (
            "" if weakest is None else f"; the weakest link is {weakest['positions']}: {weakest['clicks']:.0f} clicks"
        )
        parts.append(Text(f"{joined}, through items that recur{more}."))
    return parts
