"""Say what `ultr bias` finds in two real search logs, next to click rates within a relevance grade.

    ULTR_DATA=DATA python benchmarks/real_logs.py [--bootstrap 200] [--out docs/real-logs.md]

`clara2` has a grade of each impression, which no estimate reads. Click rates of items with one grade fall with position
because of examination, and because items of one grade still differ, in a way that production may know.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ultr import Log, read_log
from ultr.bias.audit import BiasReport, audit, summary, with_click_models
from ultr.bias.click_models import QualityReport, compare_click_models
from ultr.bias.counts import count_cells
from ultr.bias.estimators import fit_conditional

MODELS = ["pbm", "ubm", "dbn", "sdbn", "cascade", "ccm"]
LEAST = 1000  # impressions of a grade whose click rates are shown
UNGRADED = 9  # three rows have no grade
INTRODUCTION = """# Two real search logs

`ULTR_DATA=DATA python benchmarks/real_logs.py --out docs/real-logs.md` writes this page. Neither log has
requests in random order, so no estimate here is confirmed. Examination is relative to position 1, with 95% intervals
of the sampling error.
"""
CAUTION = """It is not known who graded the items, and grade 5 is almost only at position 1. So a part of the agreement
between the logged order and the grades may be circular, and click rates within grades are no truth either: items of one
grade may still be better at the top.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap", type=int, default=200, help="bootstrap replicates")
    parser.add_argument("--out", type=Path, help="page to write")
    options = parser.parse_args()
    folder = Path(os.environ["ULTR_DATA"])
    lines = [INTRODUCTION, f"Made on {date.today()}, {platform.machine()}.\n", "## clara2\n"]
    path = folder / "clara2" / "dev.parquet"
    table = pq.read_table(path, columns=["request", "query", "item", "position", "click", "grade"])
    table = table.set_column(5, "grade", pc.fill_null(table["grade"], UNGRADED))
    log = read_log(table, features=[], actions=["click"], relevance="grade")
    report, quality = _audited(log, options.bootstrap)
    within = _within_grades(log, options.bootstrap)
    lines += [*_facts(log, report), *_table(report, within), "", CAUTION, *_grades(log), *_models(quality)]
    lines.append("## yandex-clicks\n")
    log = read_log(folder / "yandex-clicks" / "impressions.csv.gz", features=[])
    report, quality = _audited(log, options.bootstrap)
    lines += [*_facts(log, report), *_table(report, None), *_models(quality)]
    page = "\n".join(lines) + "\n"
    print(page)
    if options.out is not None:
        options.out.write_text(page)


def _audited(log: Log, bootstrap: int) -> tuple[BiasReport, QualityReport]:
    quality = compare_click_models(log, MODELS, label="click")
    return with_click_models(audit(log, label="click", bootstrap=bootstrap), quality), quality


def _facts(log: Log, report: BiasReport) -> Iterator[str]:
    queries = len(log.context["query"].unique())
    clicks = log.actions["click"].sum()
    yield f"{len(log):,} requests of {queries:,} queries, {log.rows:,} rows, {clicks:,.0f} clicks.\n"
    for name, sentence in summary(report).items():
        yield f"- {name}: {sentence}"
    yield "\n| test | result | |\n|---|---|---|"
    for test in report.refutations:
        yield f"| {test.name} | {'passed' if test.passed else 'failed'} | {test.text} |"
    yield ""


def _within_grades(log: Log, replicates: int) -> np.ndarray:
    """Return θ [positions, 3] with its interval from items with equal grades, by a bootstrap over queries."""
    grade, place = log.true_relevance.astype(int), log.shown_positions("this benchmark") - 1
    query = pa.array(log.context["query"]).dictionary_encode().indices.to_numpy()[log.request_of_row]
    width, grades, queries = place.max() + 1, grade.max() + 1, query.max() + 1
    cell = (query * grades + grade) * width + place
    graded = (grade != UNGRADED).astype(float)
    shape = (queries, grades * width)
    shown, clicked = (
        np.bincount(cell, weights, queries * grades * width).reshape(shape)
        for weights in (graded, graded * log.actions["click"])
    )
    strata, places = np.divmod(np.arange(grades * width), width)

    def theta(weights: np.ndarray) -> np.ndarray:
        fit = fit_conditional(count_cells(strata, places, weights @ shown, weights @ clicked, width=width))
        return np.asarray(fit.theta / fit.theta[0])

    rng = np.random.default_rng(0)
    drawn = [theta(rng.multinomial(queries, np.full(queries, 1 / queries)).astype(float)) for _ in range(replicates)]
    return np.column_stack([theta(np.ones(queries)), *np.nanquantile(drawn, [0.025, 0.975], axis=0)])


def _table(report: BiasReport, within: np.ndarray | None) -> Iterator[str]:
    names = list(report.estimates)
    graded = ["click rates within a grade"] if within is not None else []
    yield f"| position | click rate | {' | '.join([*names, *graded])} |"
    yield "|---|---|" + "---|" * (len(names) + len(graded))
    for i, position in enumerate(report.positions.tolist()):
        cells = [report.estimates[name].text(i) for name in names]
        if within is not None:
            middle, low, high = within[i]
            cells.append(f"{middle:.3f}" + (f" [{low:.3f}, {high:.3f}]" if i else ""))
        yield f"| {position} | {report.rate[i]:.2%} | {' | '.join(cells)} |"


def _grades(log: Log) -> Iterator[str]:
    """Yield a table of click rates by grade and position."""
    grade, position = log.true_relevance.astype(int), log.shown_positions("this benchmark")
    shown = [g for g in range(UNGRADED) if (grade == g).sum() >= LEAST]
    yield "Click rates by grade (impressions in brackets):\n"
    yield f"| position | {' | '.join(f'grade {g}' for g in shown)} |"
    yield "|---|" + "---|" * len(shown)
    for k in np.unique(position).tolist():
        cells = []
        for g in shown:
            rows = (grade == g) & (position == k)
            cells.append(f"{log.actions['click'][rows].mean():.2%} ({rows.sum():,})" if rows.sum() >= 100 else "-")
        yield f"| {k} | {' | '.join(cells)} |"
    yield ""


def _models(quality: QualityReport) -> Iterator[str]:
    yield "\nClick models, on held-out requests:\n"
    yield "| model | log-likelihood of an impression | perplexity | conditional perplexity |"
    yield "|---|---|---|---|"
    for each in sorted(quality.models, key=lambda each: -each.log_likelihood):
        some = "" if each.modelled == 1 else f" (only {each.modelled:.0%} of the rows)"
        values = f"{each.log_likelihood:.5f}{some} | {each.perplexity:.4f} | {each.conditional_perplexity:.4f}"
        yield f"| {each.model} | {values} |"
    yield ""


if __name__ == "__main__":
    main()
