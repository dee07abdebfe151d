"""Runs on watch times and delayed actions: every method, resumed runs, evaluations and updates see the same actions."""

from __future__ import annotations

import functools
import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

import ultr.api
from runs import KNOWN, PLAIN, Killed, files_of, killed_at, quick
from ultr.errors import DataError, OptionError
from ultr.lists import Lists
from ultr.log import read_log, write_log
from ultr.methods import METHODS, TREE_METHODS, make_method
from ultr.training.data import ActionModel, Decisions, decide, load_run_data
from ultr.training.fitting import FitInputs
from ultr.training.gate import Gate
from ultr.training.run import run_training
from ultr.training.update import update_run
from ultr.utils.jsonfiles import read_json, write_json
from worlds.watches import FEATURES, watches

WATCH = {"watch": "watch", "duration": "duration", "censored": "cut", "remove_duration": True}
LATE = {"time": "time", "action_delay": "purchase=7d", "action_times": "purchase=bought_at"}
COLUMNS = {"columns": {"actions": "click,watch,purchase", "features": ",".join(FEATURES), "segment": "none"}}
OPEN = Gate(min_evidence=0, allow=("all",))


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return watches(600, seed=0).log


@pytest.fixture(scope="module")
def path(table, tmp_path_factory):
    file = tmp_path_factory.mktemp("log") / "log.parquet"
    pq.write_table(table, file)
    return file


def chosen(path, **options):
    return quick(path, **{**COLUMNS, **PLAIN, "propensities": KNOWN, **options})


@pytest.fixture(scope="module")
def run(path, tmp_path_factory):
    return run_training(
        chosen(path, **WATCH, **LATE, label="watch + purchase"), tmp_path_factory.mktemp("runs") / "run"
    )


@pytest.fixture(scope="module")
def data(path):
    return load_run_data(chosen(path, **WATCH, **LATE))


# --- Training ---------------------------------------------------------------------------------------------------------


def test_all_parts_of_the_data_are_transformed_by_estimates_of_the_train_requests(data, path):
    assert data.label == "watch"
    assert data.actions.watch.groups
    assert data.actions.arrivals[0].ages
    read = {"actions": "click,watch,purchase", "features": "duration", "segment": ""}
    log = data.actions(read_log(path, **data.actions.reading, **read))
    watch = dict(zip(log.request_ids.to_pylist(), np.split(log.actions["watch"], log.offsets[1:-1]), strict=True))
    for part in (data.train, data.validation, data.test):
        assert part.extra == {}
        for request, values in zip(
            part.request_ids.to_pylist(), np.split(part.actions["watch"], part.offsets[1:-1]), strict=True
        ):
            np.testing.assert_array_equal(values, watch[request])
    raw = read_log(path, **data.actions.reading, **read)
    train = raw.select(pc.is_in(raw.request_ids, data.train.request_ids).to_numpy(zero_copy_only=False))
    assert data.actions.watch.fit(train) == data.actions.watch


def test_without_options_nothing_changes(path):
    plain = load_run_data(chosen(path, label="watch"))
    assert plain.actions is None
    raw = read_log(path, actions="watch", features="duration")
    order = np.argsort(plain.train.request_ids.to_numpy())[:5]
    of_raw = raw.select(plain.train.request_ids.to_numpy()[order])
    np.testing.assert_array_equal(plain.train.select(order).actions["watch"], of_raw.actions["watch"])
    uncut = {"watch": "watch", "censored": "none"}
    none = pq.read_table(path).append_column("none", pa.array(np.zeros(raw.rows, np.int64)))
    same = load_run_data(chosen("", label="watch", **uncut), none)
    np.testing.assert_array_equal(same.train.actions["watch"], plain.train.actions["watch"])


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns_from_quantiles(name, path, data):
    config = chosen(path, **WATCH, **LATE, method=name, propensities=None)
    inputs = FitInputs(config, data, decide(config, data), "mlp").of_method()
    assert inputs.label.expression == "watch"
    torch.manual_seed(0)
    method = make_method(name, inputs)
    loss = method.loss(Lists.from_log(data.train.select(np.arange(50))))
    loss.backward()
    assert torch.isfinite(loss)
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in method.parameters())


@pytest.mark.parametrize("name", TREE_METHODS)
def test_every_tree_method_learns_from_quantiles(name, path, tmp_path):
    options = {"method_options": {"labels": "buckets"}} if name == "lambdarank" else {}  # it takes whole numbers
    made = run_training(chosen(path, **WATCH, **LATE, method=name, ranker="lightgbm", **options), tmp_path / "run")
    scores = ultr.load_run(made).score(read_log(path, features=list(FEATURES)))
    assert np.isfinite(scores).all()
    assert np.ptp(scores) > 0


@pytest.mark.parametrize("ranker", ["mlp", "lightgbm"])
def test_a_resumed_run_has_the_same_actions_and_files(ranker, path, tmp_path):
    config = chosen(path, **WATCH, **LATE, ranker=ranker)
    whole = run_training(config, tmp_path / "whole")
    with pytest.raises(Killed):
        run_training(config, tmp_path / "run", listeners=killed_at(4))
    resumed = run_training(config, tmp_path / "run", resume=True)
    assert Decisions.load(resumed) == Decisions.load(whole)
    assert files_of(resumed) == files_of(whole)
    for name in ("weights.safetensors", "model.txt"):
        if (whole / "model" / name).is_file():
            assert (resumed / "model" / name).read_bytes() == (whole / "model" / name).read_bytes()


def test_a_resumed_run_does_not_fit_again(path, tmp_path, monkeypatch):
    config = chosen(path, **WATCH, **LATE)
    with pytest.raises(Killed):
        run_training(config, tmp_path / "run", listeners=killed_at(4))
    monkeypatch.setattr("ultr.log.watch.WatchModel.fit", lambda *_: pytest.fail("the watch times were fitted again"))
    monkeypatch.setattr("ultr.log.delays.Arrival.fit", lambda *_: pytest.fail("the arrivals were fitted again"))
    run_training(config, tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("watch", "groups", 0, "deviation"), -1.0),
        (("watch", "groups", 0, "levels", 0), "high"),
        (("watch", "limits"), [1.0]),
        (("arrivals", 0, "shares", 0), 2.0),
        (("arrivals", 0, "delay"), float("inf")),
    ],
)
def test_damaged_estimates_are_rejected(where, value, run, tmp_path):
    content = read_json(run / "decisions.json")
    inside = content["actions"]
    for key in where[:-1]:
        inside = inside[key]
    inside[where[-1]] = value
    (tmp_path / "run").mkdir()
    write_json(tmp_path / "run" / "decisions.json", content)
    with pytest.raises(DataError, match="train again"):
        Decisions.load(tmp_path / "run")


# --- Options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"action_delay": "purchase=7d"}, "needs the times of requests"),
        ({"action_delay": "purchase=soon", "time": "time"}, "duration such as 7d"),
        ({"action_delay": "7d", "time": "time"}, "NAME=VALUE"),
        ({"action_times": "purchase=bought_at"}, "are given without its delay"),
        ({"actions_until": "2026-05-01"}, "actions_until needs action_delay"),
        ({**LATE, "actions_until": "tomorrow"}, "must be a time"),
        ({"duration": "duration"}, "needs the action with the watch time"),
        ({"watch": "watch"}, "no effect by itself"),
        ({"watch": "watch", "remove_duration": True}, "needs the length"),
        ({"watch": "watch", "capped": True}, "needs the length"),
        ({**LATE, "users": "pbm"}, "at once"),
        ({"time": "time"}, "split by time"),
    ],
)
def test_options_that_do_not_belong_together_are_errors(options, said):
    with pytest.raises(OptionError, match=said):
        quick("log.parquet", **options)


def test_delays_may_be_texts_lists_or_tables():
    for given in ("purchase=7d,like=1h", ["purchase=7d", "like=1h"], {"purchase": "7d", "like": "1h"}):
        assert quick("x", time="t", action_delay=given).data.action_delay == ("purchase=7d", "like=1h")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({**WATCH, "duration": "length"}, "no column 'length'"),
        ({**WATCH, "watch": "watched"}, "no action 'watched'"),
        ({**LATE, "action_delay": "order=7d", "action_times": ()}, "no action 'order'"),
        ({**LATE, "time": "moment"}, "no column 'moment' for the time"),
        ({**LATE, "action_delay": "purchase=90d"}, "old enough"),
    ],
)
def test_columns_that_the_log_lacks_are_errors(options, said, path):
    with pytest.raises(DataError, match=said):
        load_run_data(chosen(path, **options))


def test_prepared_lists_and_logs_without_the_columns_are_rejected(path, table):
    with pytest.raises(DataError, match="no column 'duration'"):
        load_run_data(chosen("", **WATCH), read_log(table, features="new", actions="watch"))


# --- Evaluation and updates -------------------------------------------------------------------------------------------


def test_evaluate_transforms_a_log_as_the_run_did(run, path, table):
    other = watches(400, seed=1).log
    ids = pa.array(other["request"].to_numpy() + 10_000)
    other = other.set_column(0, "request", ids)
    found = ultr.api.evaluate(run, other, metrics="feedback-dcg@10").comparison
    log = Decisions.load(run).actions(
        read_log(
            other,
            actions="click,watch,purchase",
            features=list(FEATURES),
            time="time",
            extra=["duration", "cut", "bought_at"],
        )
    )
    assert found.requests == len(log) < 400
    scores = ultr.load_run(run).score(log)
    expected = ultr.evaluate_scores(log, scores, "feedback-dcg@10", label="watch + purchase")["feedback-dcg@10"].mean()
    assert found.rankers[str(run)]["feedback-dcg@10"].mean.mean == pytest.approx(expected, rel=1e-5)
    left_out = ultr.api.evaluate(run, other, metrics="feedback-dcg@10", action_delay=["purchase=7d"]).comparison
    assert left_out.requests < found.requests  # without the times of purchases, no young request stays
    every = ultr.api.evaluate(
        run, other, metrics="feedback-dcg@10", action_delay=["purchase=7d"], actions_until="2026-06-30"
    )
    assert every.comparison.requests == 400


def test_runs_with_other_options_are_not_compared(run, path, tmp_path):
    other = run_training(chosen(path, label="watch + purchase"), tmp_path / "run")
    with pytest.raises(OptionError, match="transform actions differently"):
        ultr.api.evaluate([run, other], path)


def day(number: int, path) -> pa.Table:
    """Return the log of one day, of other requests than in the log at `path`."""
    log = watches(1500, seed=5 + number).log
    times = pc.subtract(log["time"], pa.scalar(np.datetime64("2026-05-01", "us")))
    inside = pc.equal(pc.floor(pc.divide(times.cast(pa.int64()).cast(pa.float64()), 86_400e6)), float(number))
    log = log.filter(inside)
    return log.set_column(0, "request", pa.array(log["request"].to_numpy() + 100_000 * (1 + number)))


def test_an_update_keeps_the_estimates_and_learns_from_a_young_day_by_the_curve(run, path, tmp_path):
    pq.write_table(pa.concat_tables([day(10, path), day(11, path)]), tmp_path / "days.parquet")
    found = update_run(run, str(tmp_path / "days.parquet"), tmp_path / "new", gate=OPEN, steps=4)
    assert found.accepted
    before, after = (Decisions.load(each) for each in (run, tmp_path / "new"))
    assert after.actions == before.actions
    assert after.label == "watch + purchase"


def test_an_update_leaves_out_young_requests_where_the_curve_is_not_known(path, tmp_path):
    late = {"time": "time", "action_delay": "purchase=7d", "label": "click + purchase"}
    run = run_training(chosen(path, **late), tmp_path / "run")
    young, old = day(12, path), day(2, path)
    pq.write_table(young, tmp_path / "young.parquet")
    pq.write_table(pa.concat_tables([old, young]), tmp_path / "both.parquet")
    update = functools.partial(update_run, run, out=tmp_path / "new", gate=OPEN, steps=4)
    with pytest.raises(DataError, match="old enough"):
        update(str(tmp_path / "young.parquet"))
    assert not (tmp_path / "new").exists()
    found = update(str(tmp_path / "both.parquet"))
    assert found.accepted
    about = read_json(tmp_path / "new" / "outcome" / "outcome.json")["data"]
    requests = len(pc.unique(old["request"]))
    assert about["requests"] < requests < about["requests"] + 0.5 * requests  # train requests are a part of the old day
    later = update_run(
        run, str(tmp_path / "young.parquet"), tmp_path / "later", gate=OPEN, steps=4, actions_until="2026-05-25"
    )
    assert later.accepted


def days_later(log: pa.Table, days: int) -> pa.Table:
    """Return a log moved to a later time, without the purchases after the end of the fourteenth day."""
    end, later = np.datetime64("2026-05-15", "us"), np.timedelta64(days * 86_400_000_000, "us")
    moved = log.set_column(3, "time", pc.add(log["time"], pa.scalar(later)))
    bought = pc.add(log["bought_at"], pa.scalar(later))
    known = pc.fill_null(pc.less(bought, pa.scalar(end)), False)
    moved = moved.set_column(7, "purchase", known.cast(pa.int64()))
    return moved.set_column(8, "bought_at", pc.if_else(known, bought, None))


def test_a_young_day_is_no_bad_day_for_the_gate(tmp_path):
    """Without the option its purchases are a fraction of those of other days, which stops the update."""
    before = watches(8000, seed=3).log
    old = pc.less(before["time"], pa.scalar(np.datetime64("2026-05-04", "us")))
    other = watches(8000, seed=4).log.filter(old)
    other = other.set_column(0, "request", pc.add(other["request"], 100_000))
    young = days_later(other, 11).set_column(0, "request", pc.add(other["request"], 100_000))
    logs = {"before": before, "young": young, "both": pa.concat_tables([other, young])}
    for name, content in logs.items():
        pq.write_table(content, tmp_path / f"{name}.parquet")
    early = {"label": "purchase", "where": ["time < 2026-05-04"]}
    late = {"label": "purchase", "time": "time", "action_delay": "purchase=7d"}

    def reasons(name: str, new: str, **options) -> list[str]:
        columns = {"actions": "click,watch,purchase", "features": "suits,quality,duration", "segment": "none"}
        run = tmp_path / name
        if not run.exists():
            run_training(chosen(tmp_path / "before.parquet", **options, columns=columns, test=0.3), run)
        update = functools.partial(update_run, run, str(tmp_path / f"{new}.parquet"), tmp_path / f"{name}-{new}")
        return [each.name for each in update(gate=Gate(min_evidence=0), steps=4, where=()).reasons]

    assert reasons("naive", "young", **early) == ["amount of feedback"]
    assert reasons("careful", "both", **late) == []
    timed = {**late, "action_times": "purchase=bought_at"}
    assert reasons("by-arrivals", "young", **timed) == []


def test_commands_take_delays(ultr, path, run, tmp_path):
    late = ("--action-delay", "purchase=7d")
    done = ultr(
        "bias", path, "--label", "purchase", "--features", ",".join(FEATURES), *late, "--time", "time", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert 200 < json.loads(done.stdout)["requests"] < 400  # about half of 600
    assert "--action-delay needs the times" in ultr("bias", path, *late).stderr
    done = ultr("evaluate", run, path, "--metrics", "feedback-dcg@10", *late, "--actions-until", "2026-06-30", "--json")
    assert done.returncode == 0, done.stderr
    options = ("--ranker", "mlp", "--steps", 5, "--set", "method.name=pointwise", "--set", "time=time", "--seed", 3)
    options += ("--features", ",".join(FEATURES))
    done = ultr("train", path, "--out", tmp_path / "run", "--label", "purchase", *late, *options)
    assert done.returncode == 0, done.stderr
    assert "requests are too young for their actions and left out: purchase=7 days" in done.stderr
    assert Decisions.load(tmp_path / "run").actions == ActionModel(
        "time", Decisions.load(tmp_path / "run").actions.arrivals
    )


def test_log_in_memory_keeps_the_columns_that_it_needs(table, tmp_path):
    read = read_log(table, actions="watch", features=list(FEATURES), extra=["duration", "cut"])
    data = load_run_data(chosen("", **WATCH, label="watch"), read)
    assert data.train.actions["watch"].max() <= 1
    write_log(data.train, tmp_path / "log.parquet")
