"""Two kinds of ranker on the same log: the better one keeps the name of the run, also if the process is killed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from conftest import make_shown_log
from ultr.datasets.simulate import simulate_log
from ultr.datasets.users import User
from ultr.log import write_log
from ultr.rankers.model import load_model
from ultr.training import contest
from ultr.training.config import RunConfig, TrainingOptions
from ultr.training.contest import with_rivals
from ultr.training.outcome import value_of_run
from ultr.training.replace import successor
from ultr.training.run import run_training, train_best

pytest.importorskip("lightgbm")
METRIC = "feedback-ndcg@10"
FAST = TrainingOptions(steps=6, bias_steps=4, batch=16, evaluate_every=3, device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("contest")
    log, _ = simulate_log(make_shown_log(requests=80), User())
    write_log(replace(log, relevance=None), folder / "log.parquet")
    return folder


@pytest.fixture(scope="module")
def configs(folder):
    shared = {"data": str(folder / "log.parquet"), "select": METRIC, "training": FAST}
    return {
        "mlp": RunConfig(ranker_options={"hidden": [8]}, **shared),
        "lightgbm": RunConfig(ranker="lightgbm", **shared),
    }


@pytest.fixture(scope="module")
def values(folder, configs):
    """The value of each ranker, trained alone."""
    alone = {name: run_training(config, folder / name) for name, config in configs.items()}
    return {name: value_of_run(run)[1] for name, run in alone.items()}


def ranker_of(run):
    return json.loads((run / "config.json").read_text())["ranker"]


def chosen(run):
    return json.loads((run / "bias.json").read_text())["summary"]["chosen"]


@pytest.mark.parametrize("order", [("mlp", "lightgbm"), ("lightgbm", "mlp")])
def test_the_better_ranker_is_kept_whatever_the_order(order, configs, values, tmp_path):
    assert values["mlp"] != values["lightgbm"]
    best = max(values, key=values.get)
    started = []
    run = train_best([configs[name] for name in order], tmp_path / "run", on_start=started.append)
    assert [config.ranker for config in started] == list(order)
    assert ranker_of(run) == best
    assert value_of_run(run)[1] == values[best]
    assert chosen(run).startswith(f"{best}, by {METRIC} on validation requests (")
    assert all(f"{name} {value:.4f}" in chosen(run) for name, value in values.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    again = []
    train_best([configs[name] for name in order], run, on_start=again.append, resume=True, chosen=[])
    assert len(again) == 1  # it is finished


def test_a_killed_contest_leaves_the_first_run_and_is_continued(configs, values, tmp_path):
    out, steps = tmp_path / "run", []

    def stop(progress):
        steps.append(progress.step)
        if steps.count(3) == 2:  # the first evaluation of the second run
            raise KeyboardInterrupt

    both = list(configs.values())
    with pytest.raises(KeyboardInterrupt):
        train_best(both, out, on_progress=stop, checkpoint_seconds=0)
    assert ranker_of(out) == "mlp"
    load_model(out)
    assert successor(out).is_dir()
    train_best(both, out, resume=True, chosen=[])
    best = max(values, key=values.get)
    assert ranker_of(out) == best
    assert f"{best} {values[best]:.4f}" in chosen(out)
    assert not successor(out).exists()


def test_rivals_of_the_same_kind_are_compared_too(configs, tmp_path):
    both = [replace(configs["mlp"], training=replace(FAST, seed=seed)) for seed in (0, 1)]
    alone = [value_of_run(run_training(config, tmp_path / str(i)))[1] for i, config in enumerate(both)]
    assert alone[0] != alone[1]
    for order in (both, both[::-1]):
        run = train_best(order, tmp_path / f"run-{order[0].training.seed}")
        assert value_of_run(run)[1] == max(alone)


def test_a_rival_that_fails_leaves_the_run(configs, tmp_path):
    broken = replace(configs["lightgbm"], ranker_options={"num_leaves": -1})
    with pytest.raises(Exception, match="num_leaves"):
        train_best([configs["mlp"], broken], tmp_path / "run")
    assert ranker_of(tmp_path / "run") == "mlp"
    load_model(tmp_path / "run")


def test_trees_are_tried_if_they_can_be(configs, monkeypatch):
    network = replace(configs["mlp"], training=replace(FAST, seed=3))
    both = with_rivals(network, ["data", "out", "seed"])
    assert [config.ranker for config in both] == ["mlp", "lightgbm"]
    assert (both[1].training.seed, both[1].training.steps) == (3, 500)
    for other in (
        {"users": "pbm"},
        {"method": "pointwise"},
        {"method_options": {"loss": "opt"}},
        {"warm_start": "run"},
        {"stream": "yes"},
    ):
        assert len(with_rivals(replace(network, **other), [])) == 1
    assert len(with_rivals(network, ["steps"])) == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(with_rivals(network, [])) == 1
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(contest, "find_spec", lambda _: None)
    assert len(with_rivals(network, [])) == 1
