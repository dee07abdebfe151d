"""`ultr train --set` and `--config`: options by path, on the command line or in a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conftest import make_shown_log
from hardening.repeated import digest
from ultr.cli.training_options import training_config
from ultr.datasets.users import User, simulate_log
from ultr.errors import OptionError, UltrError
from ultr.log import write_log
from ultr.training.config import Config, make_config
from ultr.training.folder import read_config
from ultr.utils.jsonfiles import write_json

SMALL = ("--ranker", "mlp", "--steps", 2, "--set", "hidden=4", "--set", "bias_steps=2", "--device", "cpu")


@pytest.fixture(scope="module")
def log_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "log.parquet"
    write_log(simulate_log(make_shown_log(requests=60), User())[0], path)
    return path


@pytest.fixture
def file(tmp_path):
    return tmp_path / "run.toml"


def test_options_of_set_have_the_types_of_the_tree():
    sets = ["network.hidden=64,32", "lr=0.5", "patience=3", "allow_leaks=true", "where=country = de"]
    sets += ["trees.parameters.num_leaves=7", "trees.parameters.boosting=goss", "method.max_weight=2", "ranker=mlp"]
    config = training_config({"data": ["a.parquet", "b.parquet"], "seed": 3, "label": None}, sets=sets)
    expected = make_config(
        "a.parquet,b.parquet",
        ranker="mlp",
        seed=3,
        hidden=(64, 32),
        allow_leaks=True,
        where=("country = de",),
        tree_parameters={"num_leaves": 7, "boosting": "goss"},
        method_options={"max_weight": 2.0},
        **{"network.lr": 0.5, "network.patience": 3},
    )
    assert config == expected
    assert "label" not in config.model_fields_set  # it was not chosen


def test_options_without_a_network_mean_those_of_trees():
    config = training_config({"ranker": "lightgbm", "steps": 7}, sets=["lr=0.3"])
    assert (config.trees.rounds, config.trees.lr, config.network) == (7, 0.3, Config().network)


def test_command_line_options_replace_those_of_the_file_and_these_the_defaults(file):
    file.write_text(
        'steps = 9\nlabel = "click"\n[network]\nlr = 0.5\nhidden = [4, 3]\n[trees.parameters]\nnum_leaves = 5\n'
    )
    config = training_config({"steps": 2}, sets=["network.lr=0.1", "trees.parameters.max_bin=20"], file=file)
    chosen = config.model_dump(exclude_unset=True)
    assert chosen == {
        "data": {"source": ""},
        "label": "click",
        "network": {"steps": 2, "lr": 0.1, "hidden": (4, 3)},
        "trees": {"parameters": {"num_leaves": 5, "max_bin": 20}},
    }


def test_another_method_has_none_of_the_options_of_the_file(file):
    file.write_text('[method]\nname = "pal-click"\nposition_dropout = 0.2\n')
    assert training_config({}, file=file).method.options == {"position_dropout": 0.2}
    assert training_config({"method": "dla"}, file=file).method.options == {}


def test_propensities_are_read_from_a_table(file, tmp_path):
    table = tmp_path / "known.csv"
    table.write_text("position,propensity\n1,1\n2,0.5\n")
    file.write_text(f'[examination]\npropensities = "{table}"\n')
    known = {"1": 1.0, "2": 0.5}
    assert training_config({}, file=file).examination.propensities == known
    assert training_config({"propensities": table}).examination.propensities == known
    assert training_config({}, sets=[f"propensities={table}"]).examination.propensities == known


def test_the_configuration_of_a_run_is_a_file_of_options(tmp_path):
    config = make_config("log.parquet", ranker="xgboost", steps=7, columns={"item": "sku"}, method="direct")
    write_json(tmp_path / "config.json", config.to_json())
    assert training_config({}, file=tmp_path / "config.json") == config
    assert training_config({"seed": 5}, file=tmp_path / "config.json") == config.with_options(seed=5)


@pytest.mark.parametrize(
    ("options", "sets", "message"),
    [
        ({}, ["hiden=3"], "there is no option 'hiden'; did you mean 'hidden'?; ultr options lists all of them"),
        ({}, ["netwrk.hidden=3"], "there is no option 'netwrk.hidden'; did you mean 'network.hidden'?"),
        ({}, ["network.steps=many"], "'steps' must be"),
        ({}, ["hidden"], "--set must have the form NAME=VALUE, got 'hidden'; pass, for example, --set network."),
        ({}, ["split=late"], "'split' must be"),
        ({}, ["method.speed=3"], "no option 'speed'"),
        ({"steps": 2}, ["network.steps=3"], "'network.steps' is given twice, got 3 and 2"),
        ({}, ["lr=1", "lr=2"], "'lr' is given twice, got 1 and 2"),
        ({}, ["split=time"], "a split by time needs both"),
    ],
)  # fmt: skip
def test_wrong_options_are_rejected(options, sets, message):
    with pytest.raises(OptionError) as error:
        training_config(options, sets=sets)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepps = 3", "there is no option 'stepps'; did you mean 'steps'?"),
        ("[netwrok]\nhidden = [3]", "there is no option 'netwrok.hidden'; did you mean 'network.hidden'?"),
        ("[network]\nsteps = 'many'", "'steps' must be"),
        ("[data]\nallow_leaks = 'perhaps'", "'allow_leaks' must be"),
        ("network = 3", "there is no option 'network'"),
        ("steps = = 3", "the file of options cannot be read (Invalid value"),
    ],
)
def test_wrong_files_are_rejected_with_their_name(text, message, file):
    file.write_text(text)
    with pytest.raises(OptionError) as error:
        training_config({"seed": 1}, file=file)
    assert str(error.value).startswith(f"{file}: {message}")


def test_absent_files_and_other_json_are_errors(tmp_path):
    with pytest.raises(OptionError, match="cannot be read"):
        training_config({}, file=tmp_path / "none.toml")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UltrError):
        training_config({}, file=tmp_path / "other.json")


def test_the_same_value_may_be_given_twice():
    assert training_config({"steps": 2}, sets=["steps=2"]).network.steps == 2


FEW = ("--set", "trees.rounds=4", "--set", "hidden=4", "--steps", 2, "--device", "cpu")
NONE_NAMED = ("--item", "", "--segment", "none", "--where", "position <= 5", "--seed", 3)
TABLE = ("--propensities", "known.csv", "--method", "ipw-pointwise", *SMALL)


@pytest.mark.parametrize("options", [SMALL, FEW, (*FEW, *NONE_NAMED), TABLE], ids=["mlp", "both", "none", "table"])
def test_a_run_is_repeated_from_its_configuration_with_the_same_bits(options, ultr, log_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = Path("known.csv")
    table.write_text("position,propensity\n" + "".join(f"{k},{1 / k}\n" for k in range(1, 61)))
    done = ultr("train", log_path, "--out", "run", *options)
    assert done.returncode == 0, done.stderr
    table.unlink()  # the configuration has its content
    done = ultr("train", "--config", "run/config.json", "--out", "again")
    assert done.returncode == 0, done.stderr
    assert read_config(Path("again")) == read_config(Path("run"))
    assert digest(Path("again")) == digest(Path("run"))


def test_all_files_of_runs_and_exports_have_the_permissions_of_the_umask(ultr, log_path, tmp_path):
    mask = 0o027
    before = os.umask(mask)
    try:
        assert ultr("train", log_path, "--out", tmp_path / "run", *FEW).returncode == 0
        assert ultr("export", tmp_path / "run", "--out", tmp_path / "exported").returncode == 0
        assert ultr("score", tmp_path / "run", log_path, "--out", tmp_path / "scores.parquet").returncode == 0
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert len([path for path in modes if path.suffix == ".safetensors"]) > 2
    assert {path: mode for path, mode in modes.items() if mode != (0o777 if path.is_dir() else 0o666) & ~mask} == {}


def test_a_resumed_run_needs_none_of_its_options_and_takes_no_others(ultr, log_path, tmp_path):
    assert ultr("train", log_path, "--out", tmp_path / "run", *SMALL).returncode == 0
    assert ultr("train", log_path, "--out", tmp_path / "run", "--resume").returncode == 0
    done = ultr("train", log_path, "--out", tmp_path / "run", "--resume", "--set", "lr=0.1", "--steps", 7)
    assert done.returncode == 2
    assert "network.lr (0.1; the run has 0.02)" in done.stderr
    assert "network.steps (7; the run has 2)" in done.stderr


def test_training_needs_data(ultr, tmp_path):
    done = ultr("train", "--out", tmp_path / "run")
    assert (done.returncode, "there is no data to train on" in done.stderr) == (2, True)
