"""Trees beside what their libraries have: which rows, what they are given, and what is claimed of them."""

from __future__ import annotations

import numpy as np
import pytest

from ultr.compare import Comparison, Entry, Row, Workers
from ultr.experiments import lab as labs
from ultr.experiments import trees as experiment
from ultr.experiments.claims import HELD, REVERSED
from ultr.experiments.lab import FULL, QUICK, Lab, World
from ultr.experiments.trees import OUR_ROWS, OURS, libraries_own, tree_tables


@pytest.fixture
def made(monkeypatch, tmp_path):
    """The experiment with figures by entry in place of runs; it says what was planned."""

    def make(figure_of, budget=FULL, **options):
        plans = []

        def compared(given, *_):
            plans.extend(given)
            return [_result(plan, figure_of) for plan in given]

        monkeypatch.setattr(experiment, "compare_all", compared)
        monkeypatch.setattr(labs, "load_dataset", lambda *_, **__: None)
        outcome = tree_tables(Lab(tmp_path, budget, Workers(1), data=("ml-1m", "synthetic"), **options))
        return outcome, plans

    return make


def _result(plan, figure_of) -> Comparison:
    noise = np.random.default_rng(0).normal(scale=0.01, size=plan.seeds)
    rows = []
    for entry in plan.entries:
        values = {m: [figure_of(entry) + x for x in noise * (1 + len(entry.text) / 50)] for m in plan.metrics}
        rows.append(Row(entry.text, 0.1, values, {}))
    rows = [row if i == 0 else Row(row.entry, 0.1, row.figures, row.tested(rows[0])) for i, row in enumerate(rows)]
    return Comparison(rows, list(plan.metrics), rows[0].entry)


def test_every_library_has_all_it_offers_and_nothing_twice():
    for clicks in (False, True):
        own = libraries_own(World("synthetic", clicks=clicks))
        entries = [row.entry for rows in own.values() for row in rows] + [row.entry for row in OUR_ROWS]
        parsed = [Entry.parse(entry, "lightgbm") for entry in entries]
        assert len({(e.method, e.ranker or "lightgbm", str(sorted(e.options.items()))) for e in parsed}) == len(entries)
        for library, rows in own.items():
            mine = [Entry.parse(row.entry, "lightgbm") for row in rows]
            assert {e.ranker or "lightgbm" for e in mine} == {library}
            assert {e.options.get("correction") for e in mine} == {None, "own"}
            assert "pointwise" in {e.method for e in mine}
    assert {row.entry for row in OUR_ROWS} >= set(OURS.values())
    on_values = [row.entry for row in libraries_own(World("synthetic"))["lightgbm"]]
    assert {"lambdarank:labels=click", "lambdarank:labels=buckets"} <= set(on_values)  # as it refuses values


def test_all_are_given_the_same_and_quickly_less(made):
    _, plans = made(lambda _: 1.0)
    assert {plan.seeds for plan in plans} == {5}
    assert {(plan.base.data, plan.base.sessions) for plan in plans} == {("ml-1m", 60_000), ("synthetic", 20_000)}
    assert {plan.base.ranker for plan in plans} == {"lightgbm"}
    assert {plan.base.select for plan in plans} == {"reward@10", "ndcg@10"}
    assert len({plan.out for plan in plans}) == 4
    assert all(len(plan.rates_for(entry)) == 2 for plan in plans for entry in plan.entries)
    _, quick = made(lambda _: 1.0, budget=QUICK, runs=1)
    assert {(plan.seeds, plan.base.sessions, plan.base.training.steps) for plan in quick} == {(1, 2_000, 50)}


def test_the_claims_say_which_library_is_beaten(made, tmp_path):
    outcome, _ = made(lambda entry: 1.2 if entry.method == "pairwise-em" else 1.0)
    assert len(outcome.claims) == 8
    assert {claim.verdict for claim in outcome.claims} == {HELD}
    assert "LightGBM lambdarank + position, buckets" in outcome.text()
    assert (tmp_path / outcome.plots[0]).is_file()
    outcome, _ = made(lambda entry: 1.2 if entry.options.get("correction") and entry.ranker == "xgboost" else 1.0)
    wrong = {claim.text for claim in outcome.claims if claim.verdict == REVERSED}
    assert wrong
    assert all("XGBoost" in text for text in wrong)
