"""The gate of an update: what it stops, why, and what it lets pass; its reference of the last good logs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ultr.bias.propensities import known_slots, theta_by_id
from ultr.errors import DataError
from ultr.log import read_log
from ultr.rankers.model import load_model
from ultr.training import gate
from ultr.training.config import make_config
from ultr.training.data import used_requests
from ultr.training.gate import MOST_LOGS, Gate, extend_reference, read_reference
from ultr.training.loop import Listeners
from ultr.training.run import run_training
from ultr.training.update import update_run
from worlds.shop import shop

DAY = 1500  # requests
COLUMNS = {"request": "request_id", "position": "position", "query": "query", "segment": "device"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Write the logs of three days of a shop, and a run of trees on the first one."""
    folder, world = tmp_path_factory.mktemp("shop"), shop(4 * DAY, seed=11, bots=0.0)
    starts = np.append(np.cumsum(world.lengths) - world.lengths, len(world.log))
    for number, (first, last) in enumerate([(0, 2 * DAY), (2 * DAY, 3 * DAY), (3 * DAY, 4 * DAY)], start=1):
        table = world.log.slice(starts[first], starts[last] - starts[first])
        pq.write_table(table, folder / f"day{number}.parquet")
    columns = {**COLUMNS, "features": list(world.features), "actions": ["click"]}
    few = {"rounds": 40, "trees.lr": 0.2}
    config = make_config(str(folder / "day1.parquet"), label="click", ranker="lightgbm", columns=columns, **few)
    run_training(config, folder / "run")
    return folder


def spoilt(folder: Path, name: str, **columns) -> str:
    """Write the second day with other columns."""
    table = pq.read_table(folder / "day2.parquet")
    for column, change in columns.items():
        values = table[column].to_numpy()
        table = table.set_column(table.column_names.index(column), column, pa.array(change(values, table)))
    pq.write_table(table, folder / f"{name}.parquet")
    return str(folder / f"{name}.parquet")


def mirrored(clicks: np.ndarray, table: pa.Table) -> np.ndarray:
    """Return the clicks of each request in the reversed order of its rows."""
    request = table["request_id"].to_numpy()
    order = np.lexsort((-np.arange(len(request)), request))
    return clicks[order][np.argsort(np.lexsort((np.arange(len(request)), request)))]


def test_a_quiet_day_is_accepted_and_joins_the_reference(folder, tmp_path):
    done = update_run(folder / "run", str(folder / "day2.parquet"), tmp_path / "two")
    assert (done.status, done.accepted, done.reasons) == ("accepted", True, ())
    assert list(done.comparisons) == ["the new log", "the reference"]
    assert [len(each.rankers) for each in done.comparisons.values()] == [3, 3]  # with the logged ranking
    logs = read_reference(tmp_path / "two")
    assert len(logs) == 2
    ids = [{*log.request_ids.to_pylist()} for log in logs]
    days = [pq.read_table(folder / f"day{n}.parquet")["request_id"].to_pylist() for n in (2, 1)]
    assert all(of_log <= {*of_day} for of_log, of_day in zip(ids, days, strict=True))  # the newest first
    third = update_run(tmp_path / "two", str(folder / "day3.parquet"), tmp_path / "three")
    assert (third.status, len(read_reference(tmp_path / "three"))) == ("accepted", 3)
    assert third.comparisons["the reference"].requests == sum(map(len, logs))


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ({"text_match": lambda x, _: 1000 * x}, "feature text_match"),
        ({"rating": lambda x, _: np.full_like(x, np.nan)}, "feature rating"),
        (
            {"text_match": lambda x, _: np.random.default_rng(0).permutation(x)},
            "feedback that does not follow the ranker",
        ),
        ({"click": mirrored}, "click rates rise with position"),
        ({"click": lambda x, _: np.zeros_like(x)}, "amount of feedback"),
        ({"device": lambda x, _: np.array([each.upper() for each in x], object)}, "segments"),
    ],
)
def test_a_log_on_which_something_broke_is_quarantined_by_name(columns, name, folder, tmp_path):
    done = update_run(folder / "run", spoilt(folder, "broken", **columns), tmp_path / "run")
    assert (done.status, done.accepted, done.run) == ("quarantined", False, None)
    assert name in [each.name for each in done.reasons]
    assert done.to_json()["reasons"][0]["hint"]
    assert not list(tmp_path.iterdir())  # nothing was trained


def test_what_is_allowed_does_not_stop_and_then_the_reference_judges(folder, tmp_path):
    log, allow = spoilt(folder, "reversed", click=mirrored), ("feedback by position", "click rates rise with position")
    first = update_run(folder / "run", log, tmp_path / "run", gate=Gate(allow=allow[:1]))
    assert [each.name for each in first.reasons] == ["click rates rise with position"]
    done = update_run(folder / "run", log, tmp_path / "run", gate=Gate(allow=allow))
    assert (done.status, done.run) == ("worse", tmp_path / "run.candidate")
    assert [each.name for each in done.reasons] == ["worse on the reference"]
    assert not (tmp_path / "run").exists()
    again = update_run(folder / "run", log, tmp_path / "run", gate=Gate(allow=("all",)))
    assert again.status == "worse"  # findings about the log are allowed, a worse ranker is not


def test_too_little_evidence_is_an_answer_of_its_own(folder, tmp_path):
    table = pq.read_table(folder / "day2.parquet")
    few = table.filter(pa.array(table["request_id"].to_numpy() < 2 * DAY + 40))
    pq.write_table(few, folder / "few.parquet")
    done = update_run(folder / "run", str(folder / "few.parquet"), tmp_path / "run")
    assert (done.status, done.run) == ("not enough evidence", None)
    assert "at least 30 are needed" in done.reasons[0].what
    open_gate = Gate(min_evidence=0)
    assert (
        update_run(folder / "run", str(folder / "few.parquet"), tmp_path / "run", gate=open_gate).status != done.status
    )
    day2 = str(folder / "day2.parquet")
    clicks = update_run(folder / "run", day2, tmp_path / "two").value.effective_clicks
    much = update_run(folder / "run", day2, tmp_path / "more", gate=Gate(min_evidence=clicks + 1))
    assert (much.status, much.run) == ("not enough evidence", tmp_path / "more.candidate")


def test_a_run_without_a_reference_says_so_and_can_be_given_one(folder, tmp_path):
    run, notes = tmp_path / "old", []
    shutil.copytree(folder / "run", run)
    shutil.rmtree(run / "reference")
    broken = spoilt(folder, "units", text_match=lambda x, _: 1000 * x)
    listeners = Listeners(on_note=notes.append)
    day3 = str(folder / "day3.parquet")
    given = update_run(run, broken, tmp_path / "run", reference=day3, listeners=listeners)
    assert ([each.name for each in given.reasons], notes) == (["feature text_match"], [])
    done = update_run(run, str(folder / "day2.parquet"), tmp_path / "run", listeners=listeners)
    assert list(done.comparisons) == ["the new log"]
    assert ["has no reference" in note for note in notes] == [True, False]  # the second is of missing values


def test_the_reference_has_requests_that_the_run_has_not_used_and_is_bounded(folder, tmp_path, monkeypatch):
    model = load_model(folder / "run")
    (log,) = read_reference(folder / "run")
    trained, chose = used_requests(folder / "run", model.view(log))
    assert not trained.any()
    assert not chose.any()
    assert 0.05 < len(log) / (2 * DAY) < 0.15
    shutil.copytree(folder / "run", tmp_path / "0")
    for number in range(1, MOST_LOGS + 3):
        shutil.copytree(folder / "run", tmp_path / f"{number}")
        extend_reference(tmp_path / f"{number}", tmp_path / f"{number - 1}")
    assert len(read_reference(tmp_path / f"{number}")) == MOST_LOGS
    monkeypatch.setattr(gate, "MOST_NUMBERS", 700)  # rows times 7 features
    gate.write_reference(tmp_path / "0", read_log(folder / "day1.parquet", **COLUMNS, features=["rating"] * 1))
    assert read_reference(tmp_path / "0")[0].rows <= 700


def test_longer_lists_than_before_have_the_examination_of_the_nearest_position(folder, tmp_path):
    """An estimate of an earlier log does not know every position of a later one."""
    known = {"1@phone": 0.7, "2@phone": 0.5, "1@desk": 0.7, "4@desk": 0.3, "5@desk": 0.2}
    ids = (1, 2, 9, (1 << 20) + 3, (2 << 20) + 2)
    assert [*known_slots(known, ids, ("phone", "desk", "tv"), nearest=True).values()][:3] == [
        "1@phone",
        "2@phone",
        "2@phone",
    ]
    theta = theta_by_id(known, ids, ("phone", "desk", "tv"), nearest=True)
    expected = 0.3, pytest.approx(0.5)  # of all segments if this one is not known
    assert (theta[(1 << 20) + 3], theta[(2 << 20) + 2]) == expected
    with pytest.raises(DataError, match="position 9@phone has no propensity"):
        theta_by_id(known, ids, ("phone", "desk", "tv"))
    table = pq.read_table(folder / "day2.parquet")
    longer = table["request_id"].to_numpy() == table["request_id"][0].as_py()
    moved = np.where(longer, table["position"].to_numpy() + 60, table["position"].to_numpy())
    pq.write_table(table.set_column(3, "position", pa.array(moved)), folder / "longer.parquet")
    assert update_run(folder / "run", str(folder / "longer.parquet"), tmp_path / "run").status == "accepted"


def test_the_command_says_why_in_words_and_in_json(folder, ultr, tmp_path):
    broken = spoilt(folder, "said", text_match=lambda x, _: 1000 * x)
    done = ultr("update", folder / "run", "--log", broken, "--out", tmp_path / "run", "--json")
    assert done.returncode == 3
    found = json.loads(done.stdout)
    assert (found["status"], found["accepted"], found["run"]) == ("quarantined", False, None)
    assert [each["name"] for each in found["reasons"]] == ["feature text_match"]
    assert "feature text_match: the values of text_match have changed" in done.stderr
    assert "was not written, and nothing was trained" in done.stderr
    allowed = ultr(
        *("update", folder / "run", "--log", broken, "--out", tmp_path / "run", "--json"),
        *("--allow", "feature text_match", "--min-evidence", 1e9),
    )
    found = json.loads(allowed.stdout)
    assert (allowed.returncode, found["status"]) == (3, "not enough evidence")
