"""Examination by row and column: estimates near the truth, intervals that cover it, and outputs that name slots."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ultr.bias.audit import audit, summary
from ultr.bias.engine_counts import count_on_engine
from ultr.bias.estimators import ConditionalFit, pools
from ultr.bias.examination import Examination, estimate_examination
from ultr.bias.propensities import read_bias_theta, read_propensities, theta_by_id, write_bias_file
from ultr.bias.sharing import Slots, share_strength, slots_of
from ultr.errors import DataError
from ultr.log import read_log
from ultr.log.labels import Label
from ultr.log.prepare.options import Preparation
from ultr.log.table import by_segment, grid_ids, slot
from ultr.methods.base import PositionIndex
from ultr.report.bias import grid_maps, log_sections
from worlds.grids import grids

CLICK = Label("click")


def estimated(table: pa.Table, **named: str) -> Examination:
    return estimate_examination(read_log(table, randomised="random", features=[], **named), CLICK)


def errors(found: Examination, truth: dict[str, float]) -> tuple[np.ndarray, np.ndarray]:
    """Return errors of log θ relative to the most clicked slot, and whether 95% intervals cover the truth."""
    anchor, spread = int(found.clicks.argmax()), found.covariance
    true = np.log([truth[slot(k)] for k in found.positions])
    log_theta = np.log(found.theta)
    error = log_theta - log_theta[anchor] - true + true[anchor]
    variance = spread.diagonal() + spread[anchor, anchor] - 2 * spread[anchor]
    return error, np.abs(error) <= 1.96 * np.sqrt(np.maximum(variance, 1e-12))


def as_list(table: pa.Table, size: int) -> pa.Table:
    position = np.tile(np.arange(1, size + 1), table.num_rows // size)
    return table.drop(["row", "column"]).append_column("position", pa.array(position))


@pytest.mark.parametrize("world", ["grid", "carousel"])
def test_a_grid_is_estimated_near_the_truth_and_better_than_slot_by_slot(world):
    shared, alone, covered = [], [], []
    for seed in range(3):
        table, truth = grids(5000, world=world, seed=seed)
        error, inside = errors(estimated(table), truth)
        shared.append(error)
        covered.append(inside)
        slots = dict(enumerate(truth.values(), 1))
        alone.append(errors(estimated(as_list(table, 24)), {str(k): theta for k, theta in slots.items()})[0])
    rms = [float(np.sqrt(np.mean(np.square(each)))) for each in (shared, alone)]
    assert rms[0] < 0.1
    assert rms[0] < 0.8 * rms[1]
    assert np.mean(covered) > 0.93


def test_a_fold_between_columns_is_a_step():
    table, truth = grids(10_000, world="carousel", seed=7)
    theta = {slot(k): value for k, value in estimated(table).by_position().items()}
    for row in range(1, 5):
        fall = theta[f"r{row}c5"] / theta[f"r{row}c4"]
        assert fall == pytest.approx(truth[f"r{row}c5"] / truth[f"r{row}c4"], rel=0.2)


@pytest.mark.parametrize("axis", ["row", "column"])
def test_a_grid_with_one_row_or_one_column_is_a_list_to_the_bit(axis):
    table, _ = grids(2000, world="list", seed=3)
    if axis == "column":
        table = table.rename_columns(
            [{"row": "column", "column": "row"}.get(name, name) for name in table.column_names]
        )
    found, as_before = estimated(table), estimated(as_list(table, 8))
    np.testing.assert_array_equal(found.theta, as_before.theta)
    np.testing.assert_array_equal(found.covariance, as_before.covariance)
    assert [slot(k) for k in found.positions][:2] == (["r1c1", "r2c1"] if axis == "row" else ["r1c1", "r1c2"])
    report, before = (
        audit(read_log(t, randomised="random", features=[]), bootstrap=5) for t in (table, as_list(table, 8))
    )
    for name, estimate in report.estimates.items():
        np.testing.assert_array_equal(estimate.logs, before.estimates[name].logs)


def test_a_slot_without_clicks_has_what_its_row_and_column_suggest():
    rows, columns = np.repeat(np.arange(1, 5), 6), np.tile(np.arange(1, 7), 4)
    truth = -0.4 * np.log(rows) - 0.7 * (columns > 4)
    centre = np.eye(24)
    centre[:, 0] -= 1
    spread = 0.02**2 * centre @ centre.T
    theta = np.exp(truth)
    theta[[9, 17]] = np.nan
    slots = slots_of(grid_ids(rows, columns), ())
    found, deviations = share_strength(ConditionalFit(theta, 0.0, np.eye(24), 0, spread), slots, slots)
    assert deviations == ()
    np.testing.assert_allclose(np.log(found.theta), truth, atol=0.08)
    assert found.covariance()[9, 9] > 1.1 * found.covariance()[8, 8]


def test_doubt_about_a_bias_widens_intervals_and_moves_nothing():
    rng = np.random.default_rng(0)
    rows, columns = np.repeat(np.arange(1, 5), 4), np.tile(np.arange(1, 5), 4)
    slots = slots_of(grid_ids(rows, columns), ())
    bias = np.outer(slope := np.arange(16) / 8, slope)
    theta = np.exp(-0.5 * np.log(rows) + 0.05 * rng.normal(size=16))
    theta, spread = theta / theta[0], 0.05**2 * (np.eye(16) + 1)
    sure, _ = share_strength(ConditionalFit(theta, 0.0, np.eye(16), 0, spread), slots, slots)
    doubted, _ = share_strength(ConditionalFit(theta, 0.0, np.eye(16), 0, spread + bias, spread), slots, slots)
    np.testing.assert_allclose(doubted.theta, sure.theta)
    assert (doubted.covariance().diagonal()[1:] > sure.covariance().diagonal()[1:]).all()


def test_pools_stay_within_rows():
    ids = grid_ids(np.repeat([1, 2, 3], 4), np.tile(np.arange(1, 5), 3))
    clicks = np.array([100.0, 3, 3, 3, 5, 5, 5, 5, 1, 0, 0, 0])
    np.testing.assert_array_equal(pools(clicks, ids), [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])
    np.testing.assert_array_equal(pools(clicks, ids + (7 << 20)), pools(clicks, ids))


def test_segments_of_a_grid_share_strength():
    table, truth = grids(6000, seed=2)
    device = np.repeat(np.where(np.arange(6000) % 4, "phone", "desk"), 24)
    log, names = by_segment(
        read_log(table.append_column("device", pa.array(device)), segment="device", randomised="random", features=[])
    )
    found = estimate_examination(log, CLICK, segments=names)
    assert len(found.deviations) == 1
    theta = {slot(k, names): value for k, value in found.by_position().items()}
    off = [np.log(theta[f"{k}@{name}"] / theta[f"r1c1@{name}"] / truth[k]) for k in truth for name in names]
    assert np.sqrt(np.mean(np.square(off))) < 0.2


@pytest.fixture(scope="module")
def report():
    table, truth = grids(4000, seed=1)
    return audit(read_log(table, randomised="random", features=[]), bootstrap=50), truth


def test_an_audit_shares_strength_and_names_slots(report):
    found, truth = report
    logs = found.estimates["items"].theta
    assert np.isfinite(logs).all()
    assert len(np.unique(logs.round(12))) == 24  # no two slots share one θ
    true = np.array([truth[slot(k)] for k in found.positions.tolist()])
    estimate = found.estimates["items"]
    assert np.sqrt(np.mean(np.log(estimate.theta / true) ** 2)) < 0.12
    assert ((estimate.low <= true) & (true <= estimate.high))[1:].mean() > 0.85
    content = found.to_json()
    assert content["positions"] == [*truth]
    assert content["reference"] == "r1c1"
    assert "compared with position r1c1, users look 0." in summary(found)["how biased"]
    assert "times as often at r1c6" in summary(found)["how biased"]
    json.dumps(content)


def test_an_audit_is_drawn_as_a_heat_map(report):
    content = report[0].to_json()
    plots = log_sections(content)[0].parts
    (plot,) = [each for each in plots if getattr(each, "title", "") == "Examination by row and column"]
    (trace,) = plot.figure["data"]
    assert trace["type"] == "heatmap"
    assert trace["x"] == [f"c{k}" for k in range(1, 7)]
    assert trace["y"] == [f"r{k}" for k in range(1, 5)]
    theta = content["estimates"][content["verdict"]["anchor"]]["theta"]
    np.testing.assert_array_equal(np.array(trace["z"]).ravel(), theta)
    assert grid_maps("t", ["1", "2"], [1.0, 0.5]) == []
    by_segment = grid_maps("t", ["r1c1@a", "r1c2@a", "r2c2@b"], [1.0, None, 0.5])
    assert [plot.title for plot in by_segment] == ["t: a", "t: b"]


def test_known_propensities_are_by_slot(report, tmp_path):
    found, truth = report
    write_bias_file(tmp_path, found.to_json())
    known = read_bias_theta(tmp_path)
    assert [*known] == [*truth]
    path = tmp_path / "propensities.csv"
    path.write_text("position,propensity\n" + "".join(f"{k},{v}\n" for k, v in truth.items()))
    assert read_propensities(path) == pytest.approx(truth)
    id_, beyond = grid_ids(2, 3), grid_ids(9, 3)
    assert theta_by_id(truth, (id_,)) == {id_: truth["r2c3"]}
    assert theta_by_id(truth, (beyond,), nearest=True) == {beyond: truth["r4c3"]}
    with pytest.raises(DataError, match="position r9c3 has no propensity"):
        theta_by_id(truth, (beyond,))
    path.write_text("position,propensity\nr1c1,1\nr1,0.5\n")
    with pytest.raises(DataError, match="positions must be whole numbers"):
        read_propensities(path)
    table = read_log(grids(300, seed=1)[0], features=[])
    audited = audit(table, bootstrap=5, known=truth).estimates["known"].theta
    np.testing.assert_allclose(audited, [*truth.values()])


def test_an_engine_counts_a_grid_as_memory_does(tmp_path):
    table, _ = grids(800, seed=4)
    pq.write_table(table, tmp_path / "log.parquet")
    counted = count_on_engine(str(tmp_path / "log.parquet"), Preparation(randomised="random", features="f*"))
    in_memory = audit(read_log(table, randomised="random", features=[]), bootstrap=5)
    np.testing.assert_array_equal(counted.whole.positions, in_memory.positions)
    np.testing.assert_array_equal(counted.whole.clicks, in_memory.clicks)


def test_an_unknown_slot_has_the_index_of_the_nearest_one_in_its_column():
    import torch

    index = PositionIndex(tuple(grid_ids(np.repeat([1, 2], 3), np.tile([1, 2, 3], 2)).tolist()))
    unknown = torch.tensor([grid_ids(9, 2), grid_ids(2, 3), grid_ids(1, 8)])
    assert index(unknown).tolist() == [4, 5, 2]


def test_slots_of_positions_in_a_list_are_not_shared():
    assert slots_of(np.arange(1, 11), ()) is None
    assert slots_of(10**9 + np.arange(10), ()) is None
    assert isinstance(slots_of(grid_ids(np.array([1, 1, 2]), np.array([1, 2, 1])), ()), Slots)
    assert slots_of(grid_ids(np.arange(1, 5), 1), ()) is None
