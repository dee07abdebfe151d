"""A network and trees whose sum is the ranker of a run: when they are trained, their shares, and updates of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import ultr.training.data
from runs import FEEDBACK, KNOWN, Killed, feedback_log, kill, killed_at, quick, scores, steps_to, write_feedback
from training.test_update import STILL, day, read
from training.test_warm_start import config, write
from ultr.errors import OptionError, UltrError
from ultr.rankers.model import load_model
from ultr.serving.export import export_run
from ultr.training.config import make_config
from ultr.training.data import Decisions, decide, load_run_data
from ultr.training.folder import current_folder, part_of, read_metrics
from ultr.training.gate import Gate
from ultr.training.run import run_training
from ultr.training.update import update_config, update_run
from ultr.utils.jsonfiles import read_json

pytest.importorskip("lightgbm")
BOTH = {"ranker": "auto", "propensities": KNOWN, "select": FEEDBACK}


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    return write_feedback(tmp_path_factory.mktemp("log"))


@pytest.fixture(scope="module")
def both(log, tmp_path_factory) -> Path:
    return run_training(quick(log, **BOTH), tmp_path_factory.mktemp("both") / "run")


# --- When both are trained --------------------------------------------------------------------------------------------


def decided(**options) -> Decisions:
    config = make_config("log", **options)
    return decide(config, load_run_data(config, feedback_log(20)))


def test_a_network_and_trees_are_trained_if_they_can_be(monkeypatch):
    assert (decided().rankers, decided().notes) == (("mlp", "lightgbm"), ())
    for options in ({"device": "cpu"}, {"steps": 5}, {"loss": "posterior"}, {"tree_parameters": {"num_leaves": 5}}):
        assert decided(**options).rankers == ("mlp", "lightgbm")
    for options in ({"method": "pointwise"}, {"loss": "opt"}, {"learn_from": "truth"}):
        assert decided(**options).rankers == ("mlp",)
    for kind in ("mlp", "linear", "lightgbm"):
        assert decided(ranker=kind).rankers == (kind,)
    monkeypatch.setattr(ultr.training.data, "size", lambda: 2)
    assert decided().rankers == ("mlp",)
    assert "several processes" in decided().notes[0]


@pytest.mark.parametrize("absent", ["lightgbm", "numba"])
def test_a_network_is_trained_alone_if_a_package_is_not_installed(absent, monkeypatch):
    find = ultr.training.data.find_spec
    monkeypatch.setattr(ultr.training.data, "find_spec", lambda name: None if name == absent else find(name))
    assert decided().rankers == ("mlp",)
    assert "pip install" in decided().notes[0]


def test_streamed_lists_and_simulated_users_train_a_network_alone():
    data = load_run_data(make_config("log"), feedback_log(20))
    streamed = decide(make_config("log"), replace(data, stream=object()))
    assert (streamed.rankers, streamed.streamed) == (("mlp",), True)
    assert "streamed" in streamed.notes[0]
    assert decide(make_config("log", users="pbm"), data).rankers == ("mlp",)


def test_the_decisions_are_read_back_equal(tmp_path):
    found = Decisions("click", ("mlp",), (8, 4), "device", ("phone", "desk"), True, ("a note",))
    found.save(tmp_path)
    assert Decisions.load(tmp_path) == found


# --- The sum ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rankers", ["linear,lightgbm", "mlp,xgboost"])
def test_all_pairs_of_kinds_can_be_summed(rankers, log, tmp_path):
    run = run_training(quick(log, **{**BOTH, "ranker": rankers}), tmp_path / "run")
    network, trees = rankers.split(",")
    shares = read_json(run / "bias.json")["shares"]
    assert shares.keys() == {network, trees}
    names = [part.name for part in load_model(run).ranker.parts]
    assert (names[0] == trees) == (shares[trees] > 0)  # trees come first, as models and converters expect them
    assert (names[-1] == network) == (shares[network] > 0)
    assert np.isfinite(scores(run, log)).all()


def test_a_run_of_one_ranker_is_its_own_part(log, tmp_path):
    run = run_training(quick(log, **{**BOTH, "ranker": "lightgbm"}), tmp_path / "run")
    assert part_of(run, "lightgbm") == run
    assert "shares" not in read_json(run / "bias.json")


def test_missing_values_are_rejected_if_the_network_rejects_them(both, log, tmp_path, monkeypatch):
    assert load_model(both).missing == "keep"
    # A network without a share would be left out, and trees take missing values.
    monkeypatch.setattr("ultr.training.combining._shares", lambda *_: [0.5, 0.5])
    run = run_training(quick(log, **BOTH, missing="error"), tmp_path / "run")
    assert load_model(run).missing == "reject"


def test_a_network_that_fails_leaves_the_trees_for_the_next_attempt(both, log, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(UltrError, match="no network"):
        patch.setattr(
            "ultr.training.networks.NetworkFit.fit", lambda *_: (_ for _ in ()).throw(UltrError("no network"))
        )
        run_training(quick(log, **BOTH), tmp_path / "run")
    load_model(part_of(current_folder(tmp_path / "run"), "lightgbm"))
    steps: list[tuple[str, int]] = []
    run = run_training(quick(log, **BOTH), tmp_path / "run", resume=True, listeners=steps_to(steps))
    assert {ranker for ranker, _ in steps} == {"mlp"}
    np.testing.assert_array_equal(scores(run, log), scores(both, log))


# --- Updates ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def days(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("days")
    return [write(folder / f"{n}.parquet", day(n, shops)) for n, shops in enumerate(("abc", ["0-new", "c", "b", "a"]))]


def of_day(path):
    return config(path, ranker="auto", method="pairwise-em", bias_steps=4, **STILL, **{"trees.rounds": 12})


@pytest.fixture(scope="module")
def first(days, tmp_path_factory) -> Path:
    return run_training(of_day(days[0]), tmp_path_factory.mktemp("first") / "first")


def test_an_update_updates_the_network_and_the_trees(first, days, tmp_path):
    """The second day has the categories in another order; both keep the codes of the first day."""
    result = update_run(first, days[1], tmp_path / "second", gate=Gate(0.999, 0, ("all",)))
    assert result.accepted
    run = tmp_path / "second"
    assert list(tmp_path.iterdir()) == [run]
    decisions = Decisions.load(run)
    assert decisions.rankers == ("mlp", "lightgbm")
    assert decisions.hidden == Decisions.load(first).hidden
    for ranker in decisions.rankers:
        assert next(line for line in read_metrics(run) if line["ranker"] == ranker)["step"] == 0  # it starts warm
    log = read(days[1])
    network, model = load_model(part_of(run, "mlp")), load_model(run)
    for each in (network, model):
        assert each.vocabularies["shop"].to_pylist() == ["a", "b", "c", "0-new"]
    part = model.ranker.parts[-1]
    alone = part.ranker(torch.from_numpy(model.columns_of(log)).float()).detach().numpy()
    np.testing.assert_allclose(alone, network.score(log), atol=1e-5)
    export_run(run, tmp_path / "exported")  # it raises an error if the ONNX model has other scores


def test_a_killed_update_is_continued(first, days, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("ultr.training.networks.NetworkFit.fit", kill)
        update_run(first, days[1], tmp_path / "second", gate=Gate(0.999, 0, ("all",)))
    with monkeypatch.context() as patch:
        patch.setattr("ultr.training.trees.TreeFit._run_bias_stage", kill)
        update_run(first, days[1], tmp_path / "second", gate=Gate(0.999, 0, ("all",)))
    assert [path.name for path in tmp_path.iterdir()] == ["second"]
    with pytest.raises(UltrError, match="exists already"):  # other steps of the network are another update
        update_run(first, days[1], tmp_path / "second", gate=Gate(0.999, 0, ("all",)), steps=3)


def test_an_update_with_further_features_keeps_those_of_the_run(first, days, tmp_path):
    more = pq.read_table(days[1]).append_column("f2", pa.array(np.random.default_rng(0).normal(size=1200)))
    wide = write(tmp_path / "wide.parquet", more)
    columns = {"features": ["f0", "f1", "f2"], "categorical": ["shop"]}
    run = run_training(update_config(first, wide).with_options(columns=columns), tmp_path / "second")
    assert load_model(run).feature_names == load_model(first).feature_names


def test_a_network_can_start_from_its_part_of_a_sum(first, days, tmp_path):
    chosen = of_day(days[1]).with_options(ranker="mlp", warm_start=str(first))
    run = run_training(chosen, tmp_path / "second")
    log = read(days[1])
    alone, before = load_model(run).score(log), load_model(part_of(first, "mlp")).score(log)
    assert np.corrcoef(alone, before)[0, 1] > 0.99999  # its spread is that of the new log


def test_the_kinds_of_the_sum_must_be_those_of_the_run_it_starts_from(first, days, tmp_path):
    with pytest.raises(OptionError, match="trees of this run are of lightgbm"):
        chosen = of_day(days[1]).with_options(ranker="mlp,xgboost", warm_start=str(first))
        run_training(chosen, tmp_path / "second", listeners=killed_at(0))
    assert list(tmp_path.iterdir()) == []
