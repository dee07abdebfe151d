"""A network and trees on the same log: their sum is the ranker of the run, also if the process is killed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from conftest import make_shown_log
from training.test_update import STILL, day, read
from training.test_warm_start import config, write
from ultr.datasets.simulate import simulate_log
from ultr.datasets.users import User
from ultr.errors import OptionError, OutputError
from ultr.log import read_log, write_log
from ultr.rankers.combined import likely_share
from ultr.rankers.model import load_model
from ultr.serving.export import export_run
from ultr.training import joined as joined_module
from ultr.training.command import train_command
from ultr.training.config import RunConfig, TrainingOptions
from ultr.training.data import load_run_data
from ultr.training.joined import is_joined, network_of, with_trees
from ultr.training.replace import successor
from ultr.training.run import run_training, train_both
from ultr.training.update import update_config, update_run
from ultr.utils.jsonfiles import read_json

pytest.importorskip("lightgbm")
FAST = TrainingOptions(steps=6, bias_steps=4, batch=16, evaluate_every=3, device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("joined")
    log, _ = simulate_log(make_shown_log(requests=80), User())
    write_log(replace(log, relevance=None), folder / "log.parquet")
    return folder


@pytest.fixture(scope="module")
def configs(folder):
    shared = {"data": str(folder / "log.parquet"), "select": "feedback-ndcg@10", "training": FAST}
    return [
        RunConfig(ranker_options={"hidden": [8]}, both=True, **shared),
        RunConfig(ranker="lightgbm", both=True, **shared),
    ]


@pytest.fixture(scope="module")
def joined(folder, configs):
    started = []
    run = train_both(configs, folder / "joined", on_start=started.append)
    assert started == configs
    return run


def ranker_of(run):
    return read_json(run / "config.json")["ranker"]


def within(scores, log):
    """Return scores minus their mean in the request."""
    return scores - (np.bincount(log.request_of_row, scores) / log.lengths)[log.request_of_row]


def test_the_ranker_of_a_joined_run_is_the_sum_of_both(joined, folder, configs):
    share = read_json(joined / "bias.json")["shares"]["a network"]
    assert 0 < share < 1
    log, validation = read_log(configs[0].data), load_run_data(configs[0]).validation
    expected = np.zeros(log.rows)
    for part, config_alone in zip((share, 1 - share), configs, strict=True):
        alone = load_model(run_training(replace(config_alone, both=False), folder / f"{config_alone.ranker}-alone"))
        spread = np.sqrt(np.mean(within(alone.score(validation), validation) ** 2))
        expected += part * within(alone.score(log), log) / spread
    np.testing.assert_allclose(within(load_model(joined).score(log), log), expected, atol=1e-5)


def test_a_joined_run_says_what_it_is(joined, configs):
    share = read_json(joined / "bias.json")["shares"]["a network"]
    words = f"the sum of a network ({share:.0%}) and lightgbm ({1 - share:.0%}), by the likelihood"
    assert read_json(joined / "bias.json")["summary"]["ranker"].startswith(words)
    assert is_joined(joined)
    assert ranker_of(network_of(joined)) == "mlp"
    load_model(network_of(joined))
    saved = RunConfig.from_json(read_json(joined / "config.json"), where=joined)
    assert saved.ranker_name == "mlp + lightgbm"
    assert "--ranker auto" in train_command(saved)[0]
    assert sorted(path.name for path in joined.parent.iterdir() if path.name.startswith(".")) == []
    again = []
    train_both(configs, joined, on_start=again.append, resume=True)
    assert again == [configs[1]]  # it is finished


def test_missing_values_are_rejected_if_the_network_rejects_them(joined, configs, tmp_path):
    assert load_model(joined).missing == "keep"
    run = train_both([replace(each, missing="error") for each in configs], tmp_path / "run")
    assert load_model(run).missing == "reject"


def test_a_joined_run_can_be_exported(joined, tmp_path):
    exported = export_run(joined, tmp_path / "exported")
    assert json.loads((tmp_path / "exported" / "model.json").read_text())["parity"]["rows"] > 0
    assert exported.keeps_missing


def test_a_killed_run_leaves_the_network_and_is_continued(configs, joined, tmp_path):
    out, steps = tmp_path / "run", []

    def stop(progress):
        steps.append(progress.step)
        if steps.count(3) == 2:  # the first evaluation of the trees
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_both(configs, out, on_progress=stop, checkpoint_seconds=0)
    assert ranker_of(out) == "mlp"
    load_model(out)
    assert successor(out).is_dir()
    train_both(configs, out, resume=True)
    assert is_joined(out)
    assert not successor(out).exists()
    log = read_log(configs[0].data)
    np.testing.assert_allclose(load_model(out).score(log), load_model(joined).score(log), rtol=1e-5, atol=1e-6)


def test_trees_that_fail_leave_the_network(configs, tmp_path):
    broken = replace(configs[1], ranker_options={"num_leaves": -1})
    with pytest.raises(Exception, match="num_leaves"):
        train_both([configs[0], broken], tmp_path / "run")
    assert ranker_of(tmp_path / "run") == "mlp"
    load_model(tmp_path / "run")


def test_a_resumed_run_has_the_options_it_started_with(configs, tmp_path):
    """The options of the command that resumes are not those of the run, and are not among the chosen ones."""
    out, network = tmp_path / "run", replace(configs[0], held_out=0.3)
    with pytest.raises(KeyboardInterrupt):
        train_both([network, replace(configs[1], held_out=0.3)], out, on_progress=interrupt, checkpoint_seconds=0)
    train_both(configs, out, resume=True, chosen=[])
    assert [read_json(run / "config.json")["held_out"] for run in (out, network_of(out))] == [0.3, 0.3]


def interrupt(_progress):
    raise KeyboardInterrupt


@pytest.mark.parametrize("ranker", [0, 1])
def test_a_run_of_one_ranker_stays_as_it_is_if_it_is_resumed(ranker, configs, tmp_path):
    out = run_training(replace(configs[ranker], both=False), tmp_path / "run")
    train_both(configs, out, resume=True, chosen=[])
    assert not is_joined(out)
    assert not read_json(out / "config.json")["both"]


def test_what_is_left_of_a_deleted_run_is_not_resumed(configs, tmp_path):
    out, steps = tmp_path / "run", []

    def stop_in_trees(progress):
        steps.append(progress.step)
        if steps.count(3) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_both(configs, out, on_progress=stop_in_trees, checkpoint_seconds=0)
    shutil.rmtree(out)
    with pytest.raises(KeyboardInterrupt):
        train_both(configs, out, on_progress=interrupt, checkpoint_seconds=0)
    train_both(configs, out, resume=True)
    assert is_joined(out)


def test_trees_cannot_join_a_run_that_does_not_exist(configs, tmp_path):
    with pytest.raises(OptionError, match="no run of a network"):
        run_training(configs[1], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_trees_are_trained_if_they_can_be(configs, monkeypatch):
    network = replace(configs[0], training=replace(FAST, seed=3))
    both = with_trees(network, ["data", "out", "seed"])
    assert [each.ranker for each in both] == ["mlp", "lightgbm"]
    assert [each.both for each in both] == [True, True]
    assert (both[1].joins, both[1].training.seed, both[1].training.steps) == (True, 3, 500)
    for other in (
        {"users": "pbm"},
        {"method": "pointwise"},
        {"method_options": {"loss": "opt"}},
        {"warm_start": "run"},
        {"stream": "yes"},
    ):
        assert len(with_trees(replace(network, **other), [])) == 1
    assert len(with_trees(network, ["steps"])) == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(with_trees(network, [])) == 1
    monkeypatch.delenv("WORLD_SIZE")
    for absent in ("lightgbm", "numba"):
        monkeypatch.setattr(joined_module, "find_spec", lambda name, absent=absent: None if name == absent else name)
        assert len(with_trees(network, [])) == 1


# --- The share --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("truth", "low", "high"), [(1.0, 0.9, 1.0), (0.5, 0.35, 0.65), (0.0, 0.0, 0.1)])
def test_the_share_is_recovered_from_many_labels(truth, low, high):
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 20_000))
    theta = rng.uniform(0.2, 1, 20_000)
    labels = rng.poisson(theta * np.exp(truth * first + (1 - truth) * second - 2)).astype(float)
    share = likely_share(*map(torch.from_numpy, (first, second, labels, np.log(theta))))
    assert low <= share <= high


def test_the_share_is_near_a_half_if_labels_tell_nothing():
    first, second = torch.randn(2, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert likely_share(first, second, torch.zeros(200), torch.zeros(200)) == pytest.approx(0.5, abs=0.01)


def test_a_ranker_in_the_wrong_direction_has_no_share():
    rng = np.random.default_rng(0)
    truth, noise = rng.normal(size=(2, 4000))
    labels = rng.poisson(np.exp(truth - 2)).astype(float)
    wrong, right = torch.from_numpy(-truth + 0.1 * noise), torch.from_numpy(truth + 2 * noise)
    assert likely_share(wrong, right, torch.from_numpy(labels), torch.zeros(4000, dtype=torch.float64)) < 0.2


@pytest.mark.parametrize("scale", [1e-6, 1e12])
def test_the_share_does_not_depend_on_the_scale_of_labels(scale):
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 4000))
    labels = rng.poisson(np.exp(first - 2)).astype(float)
    given = [torch.from_numpy(each) for each in (first, second)]
    theta = torch.zeros(4000, dtype=torch.float64)
    shares = [likely_share(*given, torch.from_numpy(labels * by), theta) for by in (1.0, scale)]
    assert shares[0] == pytest.approx(shares[1], abs=1e-4)
    assert shares[0] > 0.8


# --- Updates ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    folder = tmp_path_factory.mktemp("days")
    return [write(folder / f"{n}.parquet", day(n, shops)) for n, shops in enumerate(("abc", ["0-new", "c", "b", "a"]))]


def both(path):
    network = replace(config(path, method="pairwise-em", training={**STILL, "bias_steps": 4}), both=True)
    return [network, replace(network, ranker="lightgbm", ranker_options={})]


def test_an_update_of_a_joined_run_updates_both(days, tmp_path):
    """The second day has the categories in another order; both keep the codes of the first day."""
    first = train_both(both(days[0]), tmp_path / "first")
    result = update_run(first, days[1], tmp_path / "second", gate=0.999)
    assert result.accepted
    run = tmp_path / "second"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]
    assert is_joined(run)
    assert read_json(run / "config.json")["warm_start"] == str(first)
    assert read_json(network_of(run) / "config.json")["warm_start"] == str(network_of(first))
    log = read(days[1])
    network, model = load_model(network_of(run)), load_model(run)
    for each in (network, model):
        assert each.vocabularies["shop"].to_pylist() == ["a", "b", "c", "0-new"]
    part = model.ranker.parts[-1]
    alone = part.ranker(torch.from_numpy(model.columns_of(log)).float()).detach().numpy()
    np.testing.assert_allclose(alone, network.score(log), atol=1e-5)
    export_run(run, tmp_path / "exported")  # it raises an error if the ONNX model has other scores


def test_a_killed_update_of_a_joined_run_is_continued(days, tmp_path, monkeypatch):
    first = train_both(both(days[0]), tmp_path / "first")

    def killed(*_args, **_rest):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("ultr.training.trees.join", killed)
        update_run(first, days[1], tmp_path / "second", gate=0.999)
    assert ranker_of(tmp_path / "second.candidate") == "mlp"
    update_run(first, days[1], tmp_path / "second", gate=0.999)
    assert is_joined(tmp_path / "second")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]
    with pytest.raises(OutputError, match="exists already"):  # other steps of the network are another update
        update_run(first, days[1], tmp_path / "second", gate=0.999, steps=3)


def test_an_update_with_further_features_keeps_those_of_the_run(days, tmp_path):
    first = train_both(both(days[0]), tmp_path / "first")
    more = pq.read_table(days[1]).append_column("f2", pa.array(np.random.default_rng(0).normal(size=1200)))
    wide = write(tmp_path / "wide.parquet", more)
    columns = {"features": ["f0", "f1", "f2"], "categorical": ["shop"]}
    configs = [
        replace(update_config(run, wide), columns=columns, training=both(wide)[0].training)
        for run in (network_of(first), first)
    ]
    run = train_both(configs, tmp_path / "second")
    assert load_model(run).feature_names == load_model(first).feature_names


def test_a_network_can_start_from_a_joined_run(days, tmp_path):
    first = train_both(both(days[0]), tmp_path / "first")
    run = run_training(replace(both(days[1])[0], warm_start=str(first)), tmp_path / "second")
    assert read_json(run / "config.json")["warm_start"] == str(network_of(first))
