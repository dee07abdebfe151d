"""Trees next to the objectives of their libraries: rows, budgets and claims."""

from __future__ import annotations

import numpy as np
import pytest

from pages import plots_of
from ultr.experiments import lab as labs
from ultr.experiments import tables as experiment
from ultr.experiments.lab import FULL, HELD, QUICK, REVERSED, Lab, World
from ultr.experiments.tables import OUR_ROWS, OURS, library_rows, tree_tables
from ultr.training.comparing.plan import Entry
from ultr.training.comparing.results import Comparison, Row, Setting, with_tests
from ultr.training.comparing.tasks import Workers


@pytest.fixture
def made(monkeypatch, tmp_path):
    """Make the result of the experiment from one value per entry in place of runs; also return the plans."""

    def make(value_of, budget=FULL, **options):
        plans = []

        def compared(new_plans, *_):
            plans.extend(new_plans)
            return [_result(plan, value_of) for plan in new_plans]

        monkeypatch.setattr(experiment, "compare_all", compared)
        monkeypatch.setattr(labs, "load_dataset", lambda *_, **__: None)
        outcome = tree_tables(Lab(tmp_path, budget, Workers(1), data=("ml-1m", "synthetic"), **options))
        return outcome, plans

    return make


def _result(plan, value_of) -> Comparison:
    noise = np.random.default_rng(0).normal(scale=0.01, size=plan.seeds)
    rows = []
    for entry in plan.entries:
        values = {m: [value_of(entry) + x for x in noise * (1 + len(entry.text) / 50)] for m in plan.metrics}
        rows.append(Row(entry.text, Setting(0.1), values))
    return Comparison(with_tests(rows, rows[0].entry), list(plan.metrics), rows[0].entry)


def test_every_library_has_all_its_objectives_and_no_row_twice():
    for clicks in (False, True):
        by_library = library_rows(World("synthetic", clicks=clicks))
        entries = [row.entry for rows in by_library.values() for row in rows] + [row.entry for row in OUR_ROWS]
        parsed = [Entry.parse(entry, ["lightgbm"]) for entry in entries]
        assert len({(e.method, e.kind, str(sorted(e.options.items()))) for e in parsed}) == len(entries)
        for library, rows in by_library.items():
            parsed = [Entry.parse(row.entry, ["lightgbm"]) for row in rows]
            assert {e.kind for e in parsed} == {library}
            assert {e.options.get("correction") for e in parsed} == {None, "own"}
            assert "pointwise" in {e.method for e in parsed}
    assert {row.entry for row in OUR_ROWS} >= set(OURS.values())
    on_values = [row.entry for row in library_rows(World("synthetic"))["lightgbm"]]
    assert {"lambdarank:labels=click", "lambdarank:labels=buckets"} <= set(
        on_values
    )  # LightGBM rejects continuous values


def test_all_rows_have_the_same_budget_and_less_with_quick(made):
    _, plans = made(lambda _: 1.0)
    assert {plan.seeds for plan in plans} == {5}
    bases = [plan.base for plan in plans]
    assert {(base.data.source, base.simulation.sessions) for base in bases} == {
        ("ml-1m", 30_000),
        ("synthetic", 30_000),
    }
    assert {base.rankers for base in bases} == {("lightgbm",)}
    assert {base.selection for base in bases} == {"off-policy-likelihood", "reward@10", "ndcg@10"}
    assert {tuple(plan.metrics) for plan in plans} == {
        tuple(f"{name}@{k}" for k in (3, 5, 10)) for name in ("reward", "ndcg")
    }
    assert len({plan.out for plan in plans}) == 8  # labels, data sets, with and without true labels
    assert {plan.longest for plan in plans} == {1}
    assert all(
        {n: len(v) for n, v in plan.choices(entry).items()} == {"lr": 2} for plan in plans for entry in plan.entries
    )
    _, quick = made(lambda _: 1.0, budget=QUICK, runs=1)
    assert {(plan.seeds, plan.base.simulation.sessions, plan.base.trees.rounds) for plan in quick} == {(1, 5_000, 50)}


def test_the_claims_name_the_library(made, tmp_path):
    outcome, _ = made(lambda entry: 1.2 if entry.method == "pairwise-em" else 1.0)
    assert len(outcome.claims) == 16
    assert {claim.verdict for claim in outcome.claims} == {HELD}
    assert "LightGBM lambdarank + position, buckets" in outcome.text()
    outcome.write(tmp_path)
    plots = plots_of((tmp_path / "trees.html").read_text())
    metrics = [plot["layout"]["xaxis"]["title"]["text"] for plot in plots]
    assert metrics == ["reward@10"] * 4 + ["ndcg@10"] * 4  # the last metric of each world
    assert {claim.evidence.partition("; corrected for ")[2][:8] for claim in outcome.claims} == {
        "4 claims"  # on each data set
    }
    assert all(set(dots["y"]) == set(mean["y"]) for dots, mean in (plot["data"] for plot in plots))
    outcome, _ = made(lambda entry: 1.2 if entry.options.get("correction") and entry.kind == "xgboost" else 1.0)
    wrong = {claim.text for claim in outcome.claims if claim.verdict == REVERSED}
    assert wrong
    assert all("XGBoost" in text for text in wrong)
