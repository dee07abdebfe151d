"""Runs that continue yesterday's run: trees, bias models, splits, windows of days with decay, and kills."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from runs import Killed, killed_at
from training.test_warm_start import config, table, write
from ultr.errors import OptionError, OutputError
from ultr.log import read_log
from ultr.methods import MethodInputs, make_tree_method
from ultr.rankers.boosters import BOOSTERS, Boosting
from ultr.rankers.model import load_model
from ultr.training.config import Config
from ultr.training.data import Data, Decisions, decide, load_run_data, used_requests
from ultr.training.fitting import FitInputs, start_trees
from ultr.training.folder import read_config, read_metrics
from ultr.training.gate import Gate
from ultr.training.loop import Listeners
from ultr.training.run import run_training
from ultr.training.update import update_config
from ultr.training.update import update_run as update_with_a_gate
from ultr.utils.jsonfiles import read_json, write_json

OPEN = Gate(min_evidence=0, allow=("all",))  # for logs of a few requests
update_run = functools.partial(update_with_a_gate, gate=OPEN)
STILL = {"steps": 4, "evaluate_every": 4, "lr": 1e-12}


def day(number: int, shops=("a", "b", "c"), requests: int = 300) -> pa.Table:
    """Return the log of a day; ids of requests are unique over all days."""
    content = table(list(shops), seed=number, requests=requests, falls=1)
    ids = pa.array(content["request"].to_numpy() + 10_000 * number)
    dwell = pa.array(content["click"].to_numpy() * np.exp(0.5 * content["f1"].to_numpy()))
    content = content.set_column(0, "request", ids).append_column("dwell", dwell)
    return content.append_column("day", pa.array(np.full(len(ids), number)))


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    folder = tmp_path_factory.mktemp("days")
    shops = {1: "abc", 2: ["0-new", "c", "b", "a"], 3: "cab"}
    return {n: write(folder / f"day{n}.parquet", day(n, shops[n])) for n in shops}


def trees(path, ranker="lightgbm", **options) -> Config:
    few = {"steps": 12, "evaluate_every": 4, "lr": 0.1, "tree_parameters": {"max_depth": 3}}
    return config(path, ranker=ranker, method="pairwise-em").with_options(**few).with_options(**options)


def inputs_of(chosen: Config, data: Data) -> MethodInputs:
    return FitInputs(chosen, data, decide(chosen, data), chosen.kinds[0]).of_method()


@pytest.fixture(scope="module")
def blend(days, tmp_path_factory):
    return run_training(trees(days[1], label="click + dwell"), tmp_path_factory.mktemp("trees") / "blend")


def read(path):
    return read_log(path, features="f0,f1", categorical="shop")


# --- Trees ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranker", BOOSTERS)
@pytest.mark.parametrize("method", ["pairwise-em", "direct"])
def test_trees_start_at_yesterdays_scores_whatever_the_codes_of_categories(ranker, method, days, tmp_path):
    options = {"final": "pairs"} if (method, ranker) == ("pairwise-em", "lightgbm") else {}
    first = run_training(trees(days[1], ranker, method=method, method_options=options), tmp_path / "first")
    run = update_run(first, days[2], tmp_path / "second", steps=4, lr=1e-12).run
    assert [line["step"] for line in read_metrics(run)] == [0, 2, 4]
    log, before, after = read(days[2]), load_model(first), load_model(run)
    assert list(after.vocabularies["shop"].to_pylist()) == ["a", "b", "c", "0-new"]  # the codes of the trees stay
    np.testing.assert_allclose(after.score(log), before.score(log), atol=1e-5)


def test_all_parts_of_a_blend_get_further_rounds(blend, days, tmp_path):
    run = update_run(blend, days[2], tmp_path / "run", steps=8, lr=0.3).run
    parts = (read_json(folder / "model" / "model.json")["parts"] for folder in (blend, run))
    before, after = ([part for part in each if part["ranker"] == "lightgbm"] for each in parts)
    assert len(before) == len(after) > 1
    assert [part["first_rounds"] for part in after] == [part["rounds"] for part in before]
    assert sum(part["rounds"] for part in after) > sum(part["rounds"] for part in before)
    assert read_json(run / "bias.json")["theta_used"] == read_json(blend / "bias.json")["theta_used"]
    kept = [load_model(folder).ranker.parts[1].ranker.booster for folder in (blend, run)]
    features, rounds = read(days[1]).features, kept[0].rounds
    np.testing.assert_allclose(kept[1].predict(features, 0, rounds), kept[0].predict(features), atol=1e-6)


def test_trees_that_no_round_of_was_used_start_again(blend, days, tmp_path):
    """Trees of clicks or values that are not better than none have weight 0 in their run."""
    shutil.copytree(blend, tmp_path / "run")
    path = tmp_path / "run" / "model" / "model.json"
    about = read_json(path)
    about["parts"][0]["weight"] = 0.0
    write_json(path, about)
    anchor, (clicks, values) = start_trees("lightgbm", tmp_path / "run", read(days[1]))
    assert clicks is None
    assert values is not None
    assert anchor is not None
    run = update_run(tmp_path / "run", days[2], tmp_path / "updated", steps=8, lr=0.3).run
    assert read_json(run / "model" / "model.json")["parts"][0]["rounds"] <= 8


@pytest.mark.parametrize("ranker", BOOSTERS)
def test_an_update_drops_the_trees_of_earlier_updates_if_they_are_too_many(ranker, days):
    chosen = trees(days[1], ranker, method="pointwise")
    run_data, grown = load_run_data(chosen), []
    (task,) = make_tree_method("pointwise", inputs_of(chosen, run_data)).tasks(run_data.train)
    how = Boosting(8, 0.3, library_options=task.library_options)
    BOOSTERS[ranker].grow(task.rows, how, lambda trees, _: bool(grown.append(trees)))
    booster, features = grown[-1], run_data.train.features
    booster.first = 2
    assert booster.to_extend(9) is booster
    short = booster.to_extend(8)
    assert (short.rounds, short.first) == (2, 2)
    np.testing.assert_allclose(short.predict(features), booster.predict(features, 0, 2), atol=1e-6)


@pytest.mark.parametrize("ranker", BOOSTERS)
def test_rounds_that_are_added_have_the_derivatives_of_the_offset(ranker, days):
    """`direct` has log theta as its offset; LightGBM takes none next to trees that are extended."""
    chosen = trees(days[1], ranker, method="direct", propensities={"1": 1.0, "2": 0.5, "3": 0.3, "4": 0.2})
    run_data = load_run_data(chosen)
    method = make_tree_method("direct", inputs_of(chosen, run_data))

    def grow(rounds, extends, start=None):
        (task,), grown = method.tasks(run_data.train, extends=extends), []
        how = Boosting(rounds, 0.3, library_options=task.library_options)
        BOOSTERS[ranker].grow(task.rows, how, lambda trees, _: bool(grown.append(trees)), start=start)
        return grown[-1]

    whole = grow(6, False).predict(run_data.train.features)
    parts = grow(6, True, grow(3, False)).predict(run_data.train.features)
    np.testing.assert_allclose(parts, whole, atol=1e-4)


def test_a_killed_update_of_trees_resumes_to_the_same_trees(blend, days, tmp_path):
    chosen = update_config(blend, days[2], steps=8)
    whole = run_training(chosen, tmp_path / "whole")
    with pytest.raises(Killed):
        run_training(chosen, tmp_path / "half", listeners=killed_at(4))
    again = run_training(chosen, tmp_path / "half", resume=True)
    assert [line["step"] for line in read_metrics(again)] == [line["step"] for line in read_metrics(whole)]
    log = read(days[2])
    np.testing.assert_allclose(load_model(again).score(log), load_model(whole).score(log), rtol=1e-5, atol=1e-6)


def test_trees_extend_trees_of_their_own_library(blend, days, tmp_path):
    with pytest.raises(OptionError, match=r"the trees of this run are of lightgbm.*pass --ranker lightgbm"):
        run_training(trees(days[2], "xgboost", warm_start=str(blend)), tmp_path / "run")


# --- Bias models and splits -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def network(days, tmp_path_factory):
    chosen = config(days[1], method="pairwise-em", bias_steps=100)
    return run_training(chosen, tmp_path_factory.mktemp("networks") / "run")


def test_the_fit_of_a_bias_model_starts_from_that_of_yesterday(network, days, tmp_path):
    first, again = [], []
    chosen = config(days[3], method="pairwise-em", bias_steps=1, steps=1)
    run_training(chosen, tmp_path / "nothing", listeners=Listeners(on_bias_progress=first.append))
    chosen = chosen.with_options(warm_start=str(network))
    run_training(chosen, tmp_path / "run", listeners=Listeners(on_bias_progress=again.append))
    assert [progress.step for progress in again] == [0, 1]
    assert again[0].metrics["clicks"] > first[0].metrics["clicks"] + 0.1  # of the same held-out requests
    theta = [read_json(tmp_path / name / "bias.json")["theta"] for name in ("nothing", "run")]
    assert theta[0] == theta[1]  # it is estimated from the new log in both


def test_requests_of_yesterdays_training_stay_training_requests(network, days, tmp_path):
    both = f"{days[1]},{days[2]}"
    chosen = config(both, method="pairwise-em", warm_start=str(network), test=0.2)
    run_data = load_run_data(chosen)
    for name in ("validation", "test"):
        trained, _ = used_requests(network, getattr(run_data, name))
        assert not trained.any()
    trained, selected = used_requests(network, run_data.train)
    assert (int(trained.sum()), int(selected.sum())) == (225, 0)  # those of the first day that it was trained on
    assert int(used_requests(network, run_data.validation)[1].sum()) == 45
    assert sum(map(len, (run_data.train, run_data.validation, run_data.test))) == 600


# --- A window of days -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["several", "pattern", "partitions", "time"])
def test_weights_decay_with_the_days_of_requests(how, days, tmp_path):
    options = {"time": "at"} if how == "time" else {}
    for number in (1, 2, 3):
        content = day(number).append_column("at", pa.array(np.full(1200, 86_400 * (100 + number))))
        place = tmp_path / (f"date=2026-11-0{number}" if how == "partitions" else "")
        place.mkdir(exist_ok=True)
        write(place / f"{number}.parquet", content)
    several = ",".join(str(tmp_path / f"{number}.parquet") for number in (1, 2, 3))
    data = {"several": several, "pattern": str(tmp_path / "*.parquet")}.get(how, str(tmp_path))
    run_data = load_run_data(config(data, decay=2.0, **options))
    for log in (run_data.train, run_data.validation):
        ages = 3 - np.asarray(log.request_ids) // 10_000
        np.testing.assert_allclose(log.weights, 2.0 ** (-ages / 2), rtol=1e-6)
    assert "time" not in run_data.train.columns


def test_a_decay_needs_days(days):
    with pytest.raises(OptionError, match="the days of the log are not known"):
        load_run_data(config(days[1], decay=1.0))


# --- The gate and kills -----------------------------------------------------------------------------------------------


def test_an_update_has_the_options_of_its_run(network, days):
    before, chosen = read_config(network), update_config(network, days[2], decay=2.0, time="at", lr=0.7)
    assert (chosen.network.hidden, chosen.label, chosen.network.lr) == (before.network.hidden, "click", 0.7)
    assert (chosen.network.steps, chosen.network.bias_steps) == (60 // 5, 100 // 5)  # it starts near its end
    assert (chosen.data.source, chosen.data.decay, chosen.data.test) == (days[2], 2.0, 0.2)
    assert chosen.training.warm_start == str(network)
    assert chosen.examination.bias == str(network / "bias.json")
    assert update_config(network, days[2], refit_bias=True).examination.bias is None
    for name, column in before.data.columns.named().items():
        assert chosen.data.columns.named()[name] in (column, tuple(column.split(",")))


def test_an_update_on_lists_has_segments_if_its_run_has_them(network, tmp_path):
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "lists.json").write_text("{}")
    assert Decisions.load(network).segment is None
    assert update_config(network, tmp_path / "lists").data.columns.named()["segment"] == ""
    run = tmp_path / "run"
    shutil.copytree(network, run)
    replace(Decisions.load(run), segment="device").save(run)
    assert "segment" not in update_config(run, tmp_path / "lists").data.columns.named()


def test_a_worse_ranker_is_not_accepted(network, days, tmp_path, monkeypatch):
    worst_is_chosen = lambda metric: metric != "likelihood"  # noqa: E731 - of the ranker, not of its bias model
    monkeypatch.setattr("ultr.training.loop.less_is_better", worst_is_chosen)
    worse = update_run(network, days[2], tmp_path / "run", lr=50.0, patience=0, gate=Gate(0.5, 0, ("all",)))
    assert worse.value.difference.difference < 0
    assert (worse.accepted, worse.run) == (False, tmp_path / "run.candidate")
    assert not (tmp_path / "run").exists()
    load_model(worse.run)


def test_a_gate_is_a_probability(network, days, tmp_path):
    with pytest.raises(OptionError) as raised:
        update_run(network, days[2], tmp_path / "run", gate=Gate(1.0))
    assert raised.value.got == 1.0


def test_an_update_can_be_killed_and_called_again(network, days, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(Killed):
        update_run(network, days[2], out, steps=20, listeners=killed_at(0))
    first = update_run(network, days[2], out, steps=20)
    assert (first.accepted, first.run) == (True, out)
    assert list(tmp_path.iterdir()) == [out]
    steps = []
    again = update_run(network, days[2], out, steps=20, listeners=Listeners(on_progress=steps.append))
    assert (again.accepted, again.run, steps) == (True, out, [])  # it was killed after it was accepted
    assert again.value.mean == first.value.mean
    with pytest.raises(OutputError):
        update_run(network, days[2], out, steps=21)
    other = update_run(network, days[2], out, steps=21, overwrite=True)
    assert (other.run, read_config(out).network.steps) == (out, 21)
    assert list(tmp_path.iterdir()) == [out]


def test_only_a_run_is_ever_overwritten(network, days, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "holiday.jpg").write_text("")
    with pytest.raises(OutputError, match="not a run; "):
        update_run(network, days[2], tmp_path / "photos", overwrite=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["photos", "holiday.jpg"]


@pytest.mark.parametrize("killed", [False, True])
def test_a_corrected_log_at_the_same_path_is_learned_from(killed, network, days, tmp_path):
    """The wrong log leaves a rejected or an unfinished candidate, which is not used; its note says so."""
    path, out, notes = tmp_path / "day.parquet", tmp_path / "run", []
    path.write_bytes(Path(days[1]).read_bytes())
    if killed:
        with pytest.raises(Killed):
            update_run(network, str(path), out, listeners=killed_at(0))
    else:
        update_run(network, str(path), tmp_path / "run", steps=5)
        out.rename(tmp_path / "run.candidate")
    path.write_bytes(Path(days[2]).read_bytes())
    options = {} if killed else {"steps": 5}
    done = update_run(network, str(path), out, listeners=Listeners(on_note=notes.append), **options)
    assert len(notes) == 1
    assert notes[0].endswith("was started with a different log or options, so it is trained again")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "day.parquet").write_bytes(path.read_bytes())
    undisturbed = update_run(network, str(tmp_path / "other" / "day.parquet"), tmp_path / "other" / "run", **options)
    log = read_log(days[2], categorical="shop", features="f0,f1")
    np.testing.assert_array_equal(load_model(done.run).score(log), load_model(undisturbed.run).score(log))
    with pytest.raises(OutputError, match="exists already"):  # the result is not of the log as it is now
        path.write_bytes(Path(days[3]).read_bytes())
        update_run(network, str(path), out, **options)


# --- A simulated month ------------------------------------------------------------------------------------------------


def month(tmp_path, ultr, **sizes):
    path = Path(__file__).parents[2] / "benchmarks" / "daily.py"
    spec = importlib.util.spec_from_file_location("benchmark_of_days", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    days = module.simulated_month(tmp_path, lambda arguments: ultr(*arguments).returncode, **sizes)
    return days, module.summary(days)


def test_a_few_days_of_the_simulated_month(ultr, tmp_path):
    options = ["--label", "click", "--method", "pointwise", "--ranker", "lightgbm", "--steps", "20"]
    days, (difference, _, _) = month(tmp_path, ultr, days=3, requests=200, window=2, compare=1, options=options)
    assert [(day.number, day.kills) for day in days] == [(2, 0)]
    assert difference > -0.05
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"days", "first", "scratch-2", "run-2" if days[0].accepted else "run-2.candidate"}


@pytest.mark.long
@pytest.mark.parametrize("ranker", ["lightgbm", "mlp"])
def test_a_month_of_updates_is_no_worse_than_training_from_scratch_in_a_third_of_the_time(ranker, ultr, tmp_path):
    options = ["--label", "click", "--ranker", ranker]
    _, (difference, error, ratio) = month(tmp_path, ultr, days=30, requests=1000, compare=5, options=options)
    assert difference > -2 * error - 0.002
    assert ratio < 1 / 3
