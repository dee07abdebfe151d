"""Rows that nobody could see are left out where a log is read; they are neither impressions nor zero feedback."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runs import FEEDBACK, quick
from ultr.api import evaluate
from ultr.bias.engine_counts import count_on_engine
from ultr.bias.examination import estimate_examination
from ultr.errors import ColumnError
from ultr.log import Log, read_log
from ultr.log.labels import Label
from ultr.log.prepare.options import Preparation
from ultr.log.prepare.pipeline import prepare_lists
from ultr.rankers.model import load_model
from ultr.serving.scoring import score_file
from ultr.training.run import run_training
from worlds.shown import POSITIONS, SLOPE, STAYS, shown, without_column

NAMED = {"features": ["f1", "f2"], "actions": ["click"]}
TRUTH = np.arange(1, POSITIONS + 1) ** -SLOPE


def theta(log: Log) -> np.ndarray:
    found = estimate_examination(log, Label("click")).theta
    return found / found[0]


def same(a: Log, b: Log) -> None:
    for name in ("features", "offsets", "positions"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert a.request_ids.equals(b.request_ids)
    for name in a.actions:
        np.testing.assert_array_equal(a.actions[name], b.actions[name])


@pytest.mark.parametrize("viewport", [False, True])
def test_examination_is_unbiased_with_the_column_and_too_low_at_the_bottom_without(viewport):
    table = shown(12_000, viewport=viewport, seed=1)
    with_column, without = read_log(table, **NAMED), read_log(without_column(table), **NAMED)
    found = theta(with_column)
    # The last places of a viewport are shown seldom.
    first = 6 if viewport else POSITIONS
    np.testing.assert_allclose(found[:first], TRUTH[:first], rtol=0.25)
    assert np.abs(found[:first] / TRUTH[:first] - 1).mean() < 0.07
    share = STAYS ** np.arange(POSITIONS) if viewport else np.clip((11 - np.arange(1, 11)) / 8, 0, 1)
    biased = theta(without)
    assert biased[5] < 0.8 * TRUTH[5]
    assert biased[5] == pytest.approx(TRUTH[5] * share[5], rel=0.2)  # the chance to be shown is in it


def test_rows_that_were_not_shown_are_left_out_and_described():
    table = shown(300, seed=2)
    log = read_log(table, **NAMED)
    assert log.rows == int(np.sum(table["shown"]))
    assert log.hidden.rows == 3000 - log.rows
    assert log.hidden.at_end == log.hidden.requests
    assert "at the end of lists" in log.notes[0]
    assert log.columns["shown"] == "shown"
    scattered = table.set_column(3, "shown", pa.array(np.tile([0, 1], 1500))).set_column(
        1, "position", pa.array(np.tile(np.arange(10), 300))
    )
    scattered = scattered.set_column(5, "click", pa.array(np.tile([0, 1], 1500)))
    assert "also between rows that were shown" in str(read_log(scattered, **NAMED).hidden)


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=8))
def test_the_log_is_that_of_the_rows_that_were_shown(flags):
    rows = [(r, k + 1, int(flag), float(r + k)) for r, of in enumerate(flags) for k, flag in enumerate(of)]
    columns = ("request", "position", "shown", "f1")
    table = pa.table({name: [row[i] for row in rows] for i, name in enumerate(columns)})
    table = table.append_column("click", table["shown"])
    kept = table.filter(pa.array(np.asarray(table["shown"]) == 1))
    if not len(kept):
        with pytest.raises(Exception, match="there are no rows"):
            read_log(table, shown="shown")
        return
    same(read_log(table, shown="shown"), read_log(kept, shown=""))


def test_a_log_in_which_all_rows_were_shown_is_read_as_without_the_column():
    table = without_column(shown(50, seed=3))
    every = table.append_column("shown", pa.array(np.ones(len(table))))
    for named in ({}, {"shown": "shown"}):
        same(read_log(every, **NAMED, **named), read_log(table, **NAMED))
    assert read_log(every, **NAMED).hidden is None


def test_feedback_on_a_row_that_was_not_shown_is_an_error_or_a_note_if_it_is_rare():
    table = shown(2000, seed=4)
    clicks, flags = (np.array(table[name].to_pylist()) for name in ("click", "shown"))
    row = int(np.flatnonzero(flags == 0)[0])
    clicks[row] = 1
    positions = np.tile(np.arange(1, POSITIONS + 1), 2000)
    changed = table.set_column(5, "click", pa.array(clicks)).set_column(1, "position", pa.array(positions))
    log = read_log(changed, **NAMED, shown="shown")
    assert log.hidden.with_feedback == 1
    assert log.rows == flags.sum() + 1
    clicks[flags == 0] = 1
    changed = changed.set_column(5, "click", pa.array(clicks))
    with pytest.raises(ColumnError, match=f"nobody could see them.*row {row + 1}"):
        read_log(changed, **NAMED, shown="shown")
    found = read_log(changed, **NAMED)  # the column is not named, so that it is not used
    assert found.rows == len(table)
    assert "does not mark what was shown" in found.notes[0]


def test_other_values_are_an_error_if_the_column_is_named():
    table = without_column(shown(50, seed=5)).append_column("shown", pa.array(np.full(500, 2)))
    assert read_log(table, **NAMED).rows == 500
    with pytest.raises(ColumnError, match="must have 1 for rows that were shown"):
        read_log(table, **NAMED, shown="shown")
    with pytest.raises(ColumnError, match="no column 'seen' for the mark of shown rows"):
        read_log(table, **NAMED, shown="seen")


def test_prepared_lists_are_those_of_the_rows_that_were_shown(tmp_path):
    table = shown(200, seed=6)
    pq.write_table(table, tmp_path / "log.parquet")
    pq.write_table(table.filter(pa.array(np.asarray(table["shown"]) == 1)), tmp_path / "kept.parquet")
    for name in ("log", "kept"):
        options = {"shown": ""} if name == "kept" else {}
        prepare_lists(tmp_path / f"{name}.parquet", tmp_path / name, **NAMED, **options)
    same(read_log(tmp_path / "log"), read_log(tmp_path / "kept"))


def test_an_engine_counts_only_the_rows_that_were_shown(tmp_path):
    table = shown(200, seed=6)
    pq.write_table(table, tmp_path / "log.parquet")
    found = count_on_engine(str(tmp_path / "log.parquet"), Preparation(**NAMED, item="item"))
    assert found.rows == int(np.sum(table["shown"]))
    assert any("marks what was shown" in note for note in found.notes)
    np.testing.assert_array_equal(found.whole.shown, np.bincount(read_log(table, **NAMED).positions)[1:])


def test_a_run_learns_from_rows_that_were_shown_scores_all_and_evaluation_says_what_was_not(tmp_path):
    table = shown(300, seed=8)
    source = tmp_path / "log.parquet"
    pq.write_table(table, source)
    config = quick(source, method="pointwise", select=FEEDBACK, **NAMED)
    run = run_training(config, tmp_path / "run")
    model = load_model(run)
    assert model.columns["shown"] == "shown"
    score_file(model, source, tmp_path / "scores.parquet")
    scores = pq.read_table(tmp_path / "scores.parquet")
    assert len(scores) == len(table)
    rank = np.argsort(np.argsort(-np.asarray(scores["score"]).reshape(-1, POSITIONS), 1), 1)
    hidden = np.asarray(table["shown"]).reshape(-1, POSITIONS)[rank < 10] == 0
    found = evaluate(run, source, metrics="feedback-ndcg@10")
    assert any(f"{hidden.mean():.0%} of the first 10 were not shown" in note for note in found.notes)


def test_an_evaluation_transforms_the_actions_of_rows_that_were_shown_alone(tmp_path):
    table = shown(300, seed=8)
    days = np.asarray(table["request"]) // 30
    table = table.append_column("day", pa.array(days * 86400)).append_column("purchase", table["click"])
    source = tmp_path / "log.parquet"
    pq.write_table(table, source)
    late = {"action_delay": ["purchase=2d"], "time": "day", "label": "click + purchase", "features": ["f1", "f2"]}
    run = run_training(quick(source, method="pointwise", select=FEEDBACK, **late), tmp_path / "run")
    found = evaluate(run, source, metrics="feedback-ndcg@10")
    assert any("too young for their actions and left out: purchase=2 days" in note for note in found.notes)
    assert any("of the first 10 were not shown" in note for note in found.notes)


def test_describe_says_what_was_not_shown_and_proposes_a_column(tmp_path: Path, ultr):
    table = shown(400, seed=7)
    pq.write_table(table, tmp_path / "log.parquet")
    printed = ultr("describe", tmp_path / "log.parquet", "--features", "f1,f2")
    text = printed.stdout + printed.stderr
    assert "column 'shown' marks what was shown" in text
    assert "at the end of lists" in text
    renamed = without_column(table).append_column("visible", table["shown"])
    pq.write_table(renamed, tmp_path / "visible.parquet")
    printed = ultr("describe", tmp_path / "visible.parquet")
    text = " ".join((printed.stdout + printed.stderr).split())
    assert "no column marks it" in text
    assert "pass --shown visible" in text
    assert "--features" in text
    assert "visible" not in text.split("--features")[1].split(" --")[0].split("next:")[0].split("\n")[0].split()[0]
