"""Sections of a report page about position bias: estimated by runs, or in a log by `ultr bias`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ultr.bias.identification import IDENTIFIED, INTERVALS
from ultr.bias.sharing import told_position
from ultr.log.table import SLOT, by_row, position_id
from ultr.report.page import (
    Answers,
    Card,
    Cards,
    Folded,
    Grid,
    Heading,
    Headline,
    Notes,
    Part,
    Plot,
    Section,
    Table,
    Text,
)
from ultr.report.plots import bar_plot, heat_map, interval_plot, line_plot

# Key in bias.json -> symbol and caption, for quantities that a run estimates by pair of positions.
MATRICES = {
    "eps_plus": ("ε⁺", "The probability that the better of two items has more feedback, if both are seen."),
    "eps_minus": ("ε⁻", "The probability that an item that is not better has more feedback, if both are seen."),
    "m": ("m", "The probability that the item with more feedback is better, if both are seen. Blank: no such pair."),
}
Truth = tuple[Sequence[str], Sequence[float]] | None


# --- The bias of runs -------------------------------------------------------------------------------------------------


def bias_section(runs: Mapping[str, tuple[Mapping[str, Any] | None, Truth]]) -> Section:
    """Return a section with the bias that runs estimated, given name -> (content of bias.json, true examination)."""
    estimated = {name: (bias, truth) for name, (bias, truth) in runs.items() if bias is not None}
    parts: list[Part] = []
    if len(estimated) > 1:
        parts += _together(estimated)
    for name, (bias, truth) in estimated.items():
        if len(runs) > 1:
            parts.append(Heading(name))
        parts += _bias_of_run(bias, truth)
    if estimated and (without := [name for name in runs if name not in estimated]):
        parts.append(Text(f"No bias model: {', '.join(without)}."))
    return Section("Bias", parts)


def _together(estimated: Mapping[str, tuple[Mapping[str, Any], Truth]]) -> list[Part]:
    lines = {
        name: (bias["positions"], _relative(bias["theta"])) for name, (bias, _) in estimated.items() if "theta" in bias
    }
    truth = next((truth for _, truth in estimated.values() if truth is not None), None)
    if truth is not None:
        lines["true"] = (truth[0], _relative(truth[1]))
    if len(lines) < 2:
        return []
    return [_by_position("Examination, as each run estimated it", lines, caption="Relative to the first position.")]


def _by_position(
    title: str, lines: Mapping[str, tuple[Sequence[Any], Sequence[Any]]], *, caption: str, y: str = ""
) -> Plot:
    """Return a plot of lines by position, in ascending order within a segment."""
    ordered = {}
    for name, (at, values) in lines.items():
        points = sorted(zip(map(str, at), values, strict=True), key=lambda point: _place(point[0]))
        ordered[name] = [k for k, _ in points], [value for _, value in points]
    return line_plot(
        title,
        ordered,
        x="position",
        y=y or "relative to the first",
        caption=caption,
        dashed=["true"],
        from_zero=True,
        categories=sorted({k for at, _ in ordered.values() for k in at}, key=_place),
    )


def _place(slot: str) -> tuple[str, int]:
    """Return the segment and the position of a slot such as `3` or `3@phone`."""
    position, _, segment = slot.partition("@")
    return segment, position_id(position)


def grid_maps(title: str, at: Sequence[str], values: Sequence[Any], *, caption: str = "") -> list[Plot]:
    """Return a heat map of values by slot of a grid, for each segment; none if the positions are those of a list."""
    segments: dict[str, list[tuple[int, Any]]] = {}
    for slot, value in zip(at, values, strict=True):
        position, _, segment = slot.partition("@")
        if SLOT.fullmatch(position):
            segments.setdefault(segment, []).append((position_id(position), value))
    plots = []
    for segment, pairs in segments.items():
        rows, columns, matrix = by_row(*zip(*pairs, strict=True))
        known = [value for _, value in pairs if value is not None]
        named = f"{title}: {segment}" if segment else title
        most = max(known, default=1.0)
        plots.append(
            heat_map(named, matrix, columns=columns, rows=rows, x="column", y="row", caption=caption, largest=most)
        )
    return plots


def _bias_of_run(bias: Mapping[str, Any], truth: Truth) -> list[Part]:
    at = [str(k) for k in bias["positions"]]
    parts: list[Part] = []
    plots: list[Plot] = []
    if "theta" in bias:
        caption = "How often users look at each slot, relative to the first."
        plots += grid_maps("Examination by row and column", at, _relative(bias["theta"]), caption=caption)
        plots.append(examination_plot(bias, truth))
        error = bias.get("theta_standard_error")
        sure = "" if error is None else f" (standard error {error:.1%})"
        parts.append(Text(f"Source of θ: {bias['theta_from']}{sure}. Scale of θ: {bias['theta_scale']}."))
    if "summary" in bias:
        parts.append(Answers(bias["summary"]))
    if "towers" in bias:
        lines = {f"tower of {name}": (at, values) for name, values in bias["towers"].items()}
        how = "multiplied by" if bias["tower"] == "multiplies" else "increased by"
        caption = f"A tower is the part of the model that sees only the position; the prediction is {how} its output."
        plots.append(_by_position("Towers", lines, caption=caption, y="output"))
    if "t_plus" in bias:
        lines = {"t⁺": (at, bias["t_plus"]), "t⁻": (at, bias["t_minus"])}
        caption = "The bias of a position relative to the first: t⁺ for clicked items, t⁻ for items without a click."
        plots.append(_by_position("Ratios of pairs", lines, caption=caption, y="ratio"))
    if "zeta" in bias:
        lines = {"relevant items": (at, bias["theta"]), "other items": (at, bias["zeta"])}
        plots.append(_by_position("Trust", lines, caption="The probability of a click at a position.", y="probability"))
    if "rho" in bias:
        caption = "How the label of clicked items, such as dwell time, changes with position."
        plots.append(_by_position("ρ", {"ρ": (at, bias["rho"])}, caption=caption, y="ρ"))
    if "pairs" in bias:
        names = list(bias["pairs"])
        shares = [bias["pairs"][name]["effective_share"] for name in names]
        caption = "Uneven weights reduce the effective number of pairs to this share."
        plots.append(
            bar_plot("Effective sample size", {"pairs": (names, shares)}, y="share", caption=caption, per_cent=True)
        )
    plots += context_plots(bias)
    if bias.get("actions"):
        plots.append(actions_plot(bias["actions"]))
    plots += [pair_map(key, bias[key], at) for key in MATRICES if key in bias]
    parts.append(Grid(plots))
    if tables := _tables(bias, at):
        parts.append(Folded("Tables", tables))
    warnings = [f"{w['name']}: {w['what']}" for w in bias["warnings"]]
    parts.append(Notes(warnings) if warnings else Notes(["No warnings."], good=True))
    return parts


def context_plots(bias: Mapping[str, Any]) -> list[Plot]:
    """Return a plot for each column of segments that share strength, from the content of bias.json."""
    at = told_position([position_id(str(position).partition("@")[0]) for position in bias["positions"]])
    caption = f"Looks at position {at}, relative to the first position, over the average of all values; 95% intervals."
    return [
        interval_plot(
            f"Examination by {column}",
            {value or "missing": ratio for value, ratio in deviation["ratios"].items()},
            x="times as often",
            caption=caption,
        )
        for column, deviation in bias.get("contexts", {}).items()
    ]


def pair_map(key: str, matrix: Sequence[Sequence[float]], at: Sequence[str]) -> Plot:
    """Return a heat map of a quantity by pair of positions; `key` is in `MATRICES`, `at` are the positions."""
    symbol, caption = MATRICES[key]
    return heat_map(
        f"{symbol} by pair of positions",
        [
            [
                None if i == j or not math.isfinite(value) or (value == 0 and key == "m") else value
                for j, value in enumerate(row)
            ]
            for i, row in enumerate(matrix)
        ],
        columns=at,
        rows=at,
        x="position of the other item",
        y="position of the item with more feedback",
        caption=caption,
        largest=None if key == "eps_minus" else 1.0,
    )


def actions_plot(actions: Mapping[str, Mapping[str, Any]]) -> Plot:
    """Return a plot of how actions after the click depend on position, given the `actions` of bias.json."""
    curves = {name if each["used"] else f"{name} (not used)": each for name, each in actions.items()}
    return line_plot(
        "Actions after a click",
        {name: ([str(k) for k in each["positions"]], each["tau"]) for name, each in curves.items()},
        x="position",
        y="relative to the first",
        caption="The mean of an action on clicked rows, if an item is clicked at another position; 95% intervals.",
        bands={name: (each["low"], each["high"]) for name, each in curves.items()},
        from_zero=True,
        categories=True,
    )


def examination_plot(bias: Mapping[str, Any], truth: Truth) -> Plot:
    """Return a plot of the examination that a run estimated (bias.json), next to the true one if it is known."""
    at, theta = [str(k) for k in bias["positions"]], _relative(bias["theta"])
    lines: dict[str, tuple[Sequence[str], Sequence[Any]]] = {"θ": (at, theta)}
    caption = (
        "θ is the probability that a position is seen. The feedback rate falls with θ and with relevance; "
        "rate / θ shows the part that is due to relevance."
    )
    if (used := bias.get("theta_used", bias["theta"])) != bias["theta"]:
        lines["θ used"] = (at, _relative(used))
        caption += " θ is not sure, so feedback is corrected by less: by θ used."
    if truth is not None:
        lines["true"] = (truth[0], _relative(truth[1]))
    if any(bias.get("impressions", [])):
        rate = _relative([c / n if n else None for c, n in zip(bias["clicks"], bias["impressions"], strict=True)])
        lines["feedback rate"] = (at, rate)
        lines["rate / θ"] = (at, [r / t if r is not None and t else None for r, t in zip(rate, theta, strict=True)])
    if "theta_minus" in bias:
        lines["θ⁻"] = (at, _relative(bias["theta_minus"]))
    return _by_position("Examination by position", lines, caption=caption)


def _tables(bias: Mapping[str, Any], at: Sequence[str]) -> list[Part]:
    tables: list[Part] = []
    if any(bias.get("impressions", [])):
        rows = [
            [k, f"{theta:.4f}", f"{shown:,.0f}", f"{clicks:,.0f}", f"{clicks / shown:.2%}" if shown else "-"]
            for k, theta, shown, clicks in zip(at, bias["theta"], bias["impressions"], bias["clicks"], strict=True)
        ]
        tables.append(Table(["position", "θ", "impressions", "with feedback", "rate"], rows, "The data behind θ"))
    if "pairs" in bias:
        rows = [
            [name, f"{p['pairs']:,}", f"{p['effective_share']:.1%}", f"{p['clipped']:.1%}", f"{p['largest']:.1f}"]
            for name, p in bias["pairs"].items()
        ]
        tables.append(Table(["pairs", "number", "effective", "clipped", "largest weight"], rows, "Weights of pairs"))
    if "beta" in bias:
        rows = [
            [name, *(f"{v:.3f}" for v in bias[key].values())]
            for name, key in (("β, relevance", "beta"), ("t, seen without feedback", "t"))
        ]
        quantiles = [f"{float(q):.0%}" for q in bias["beta"]]
        tables.append(Table(["quantile", *quantiles], rows, "Spread over items"))
    if "held_out_log_likelihood" in bias:
        fit = bias["held_out_log_likelihood"]
        rows = [[name, f"{value:.5f}"] for name, value in fit.items()]
        tables.append(Table(["held-out log-likelihood", ""], rows, "If features explain clicks, row 1 is larger"))
    return tables


def _relative(values: Sequence[float | None]) -> list[float | None]:
    first = next((value for value in values if value), None)
    return [None if value is None or first is None else value / first for value in values]


# --- The bias of a log ------------------------------------------------------------------------------------------------


def log_sections(report: Mapping[str, Any]) -> list[Section]:
    """Return the sections of a bias report (`BiasReport.to_json`), for the log and its segments."""
    verdict = report["verdict"]
    cards = [
        Card("requests", f"{report['requests']:,}", [f"feedback: {report['label']} > 0"]),
    ]
    if (explained := report["order_explained_by_features"]) is not None:
        cards.append(
            Card("order explained by features", f"{max(0, explained):.0%}", ["estimates from features use the rest"])
        )
    if verdict["requests_needed"]:
        cards.append(
            Card("random requests needed", f"{verdict['requests_needed']:,}", ["to identify θ where most rows are"])
        )
    headline = Headline(f"Position bias: {verdict['status']}", verdict["advice"], good=verdict["status"] == IDENTIFIED)
    more = {name: text for name, text in report.get("summary", {}).items() if name != "verdict"}
    answers = Answers({"why": " ".join(verdict["reasons"]), **more})
    parts: list[Part] = [headline, *_estimates(report), answers, Cards(cards), _estimates_table(report)]
    parts += [actions_plot(report["actions"])] if report.get("actions") else []
    parts += [Text(note) for note in report["notes"]]
    sections = [Section("Examination", parts), Section("Identification", _identification(report))]
    pitfalls = [f"{p['name']}: {p['what']}; {p['hint']}" for p in report["pitfalls"]]
    notes = Notes(pitfalls) if pitfalls else Notes(["No common problem of logs was found."], good=True)
    sections.append(Section("Pitfalls", [notes]))
    if report["segments"]:
        inner: list[Part] = [Grid(plots)] if (plots := context_plots(report)) else []
        for name, part in report["segments"].items():
            title = f"{name} ({part['requests']:,} requests): {part['verdict']['status']}"
            inner += [*_estimates(part, title), _estimates_table(part)]
        sections.append(Section("Segments", inner))
    return sections


def _estimates(report: Mapping[str, Any], title: str = "Examination by position") -> list[Part]:
    """Return the plot of all estimates, after a heat map of the recommended one (or of the feedback) for a grid."""
    at, anchor = [str(k) for k in report["positions"]], report["verdict"]["anchor"]
    if anchor is None:
        values, caption = report["rate"], "The feedback rate of each slot, because examination is not identified."
    else:
        values = report["estimates"][anchor]["theta"]
        caption = f"How often users look at each slot, relative to {report['reference']} (estimate: {anchor})."
    maps = grid_maps(title.replace("by position", "by row and column"), at, values, caption=caption)
    return [*maps, estimates_plot(report, title)]


def estimates_plot(report: Mapping[str, Any], title: str = "Examination by position", *, truth: Truth = None) -> Plot:
    """Return a plot of all estimates of a bias report (`BiasReport.to_json`), with their intervals."""
    at = [str(k) for k in report["positions"]]
    lines: dict[str, tuple[Sequence[str], Sequence[Any]]] = {
        name: (at, estimate["theta"]) for name, estimate in report["estimates"].items()
    }
    bands = {name: (estimate["low"], estimate["high"]) for name, estimate in report["estimates"].items()}
    highest = max(report["rate"])
    lines["feedback rate"] = (at, [rate / highest if highest else None for rate in report["rate"]])
    if (anchor := report["verdict"]["anchor"]) is not None:
        theta = report["estimates"][anchor]["theta"]
        ratio = _relative([r / t if t else None for r, t in zip(report["rate"], theta, strict=True)])
        lines[f"rate / θ ({anchor})"] = (at, ratio)
    if truth is not None:
        lines["true"] = (truth[0], _relative(truth[1]))
    return line_plot(
        title,
        lines,
        x="position",
        y="relative",
        caption=f"{INTERVALS} If the feedback rate falls more than θ, the difference is due to relevance.",
        dashed=["true"],
        bands=bands,
        from_zero=True,
        categories=True,
    )


def _estimates_table(report: Mapping[str, Any]) -> Table:
    rows = []
    for i, position in enumerate(report["positions"]):
        cells = [
            _cell(*(estimate[name][i] for name in ("theta", "low", "high")))
            for estimate in report["estimates"].values()
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
        name: estimate["held_out_log_likelihood"]
        for name, estimate in report["estimates"].items()
        if estimate["held_out_log_likelihood"] is not None
    }
    if likelihoods:
        rows = [[name, f"{value:.5f}"] for name, value in likelihoods.items()]
        parts.append(Table(["estimator", "held-out log-likelihood"], rows))
    if tests := report.get("refutations"):
        rows = [[each["name"], "passed" if each["passed"] else "failed", each["text"]] for each in tests]
        caption = "Tests that fail if the assumption of estimates from items is wrong. To pass them proves nothing."
        parts.append(Table(["test", "result", "why"], rows, caption))
    if report["agreements"]:
        rows = [
            [
                f"{a['first']}, {a['second']}",
                "yes" if a["agree"] else "no",
                f"{a['typical']:.0%}" if "typical" in a else "-",
                f"{a['largest']:.0%}",
                str(a["position"]),
            ]
            for a in report["agreements"]
        ]
        head = ["estimators", "agree", "mean difference", "largest difference", "at position"]
        caption = "Two estimators agree if their differences are within sampling error at all positions."
        parts.append(Table(head, rows, caption))
    if (links := report["links"]) is not None:
        groups = links["components"]
        linked = "link all positions" if len(groups) == 1 else f"leave {len(groups)} groups of positions without a link"
        text = f"Items that were shown at several positions {linked}."
        if (weakest := links["weakest"]) is not None:
            first, second = weakest["positions"]
            text += f" The weakest link is between positions {first} and {second}: {weakest['clicks']:.0f} clicks."
        parts.append(Text(text))
    return parts
