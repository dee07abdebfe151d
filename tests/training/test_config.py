"""The configuration of a run: options by name and path, errors, copies, files and commands."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import ultr.training
from ultr.errors import DataError, OptionError, UltrError
from ultr.training.config import (
    Config,
    TrainingOptions,
    all_options,
    check_path,
    differences,
    make_config,
    patience_for,
    short_names,
    train_command,
)


def values(config: Config) -> dict[str, Any]:
    """Return the options that were set."""
    return config.model_dump(exclude_unset=True)


# --- Names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["steps", "network.steps"])
def test_an_option_has_a_path_and_a_short_name(name):
    assert values(make_config("log.csv", **{name: 5})) == {"data": {"source": "log.csv"}, "network": {"steps": 5}}


def test_every_short_name_is_that_of_an_option():
    paths = {option.path for option in all_options()}
    assert {path for name, path in short_names().items() if name != "loss"} <= paths
    assert short_names()["loss"] == "method.loss"
    for path in paths:
        check_path(path)
    assert all(option.description and option.type for option in all_options())


@pytest.mark.parametrize(("ranker", "section"), [("auto", "network"), ("mlp,lightgbm", "network"), ("mlp", "network")])
def test_steps_are_those_of_the_network_if_there_is_one(ranker, section):
    given = {"steps": 7, "lr": 0.5, "evaluate_every": 3, "patience": 2}
    assert values(make_config("x", ranker=ranker, **given))[section] == given


def test_steps_are_rounds_if_only_trees_are_trained():
    expected = {"rounds": 7, "lr": 0.5, "evaluate_every": 3, "patience": 2}
    given = {"steps": 7, "lr": 0.5, "evaluate_every": 3, "patience": 2}
    assert values(make_config("x", ranker="xgboost", **given))["trees"] == expected
    assert values(make_config("x", ranker="xgboost").with_options(**given))["trees"] == expected  # also afterwards


def test_tables_of_options_are_given_as_dictionaries():
    config = make_config(
        "x",
        columns={"item": "sku"},
        users="pbm",
        user_options={"eta": 2, "further": {"like": [0.1] * 5}},
        tree_parameters={"num_leaves": 7},
        method_options={"loss": "opt"},
    )
    assert config.data.columns.named() == {"item": "sku"}
    assert config.simulation.user_options == {"eta": 2, "epsilon": 0.1, "further": {"like": [0.1] * 5}}
    assert config.trees.parameters == {"num_leaves": 7}
    assert config.method.options == {"loss": "opt"}
    by_path = {"data.columns.item": "sku", "simulation.eta": 2, "simulation.options.further": {"like": [0.1] * 5}}
    by_path |= {"trees.parameters.num_leaves": 7, "method.loss": "opt"}
    assert make_config("x", users="pbm", **by_path) == config


@pytest.mark.parametrize("hidden", [(16, 8), [16, 8], "16,8", np.array([16, 8]).tolist(), (np.int64(16), 8)])
def test_values_may_be_texts_and_numbers_of_numpy(hidden):
    config = make_config("x", hidden=hidden, seed=np.int64(3), lr="0.5", allow_leaks="true")
    assert (config.network.hidden, config.seed, config.network.lr) == ((16, 8), 3, 0.5)
    assert config.data.allow_leaks
    json.dumps(config.to_json())


def test_the_network_comes_first_in_the_kinds_of_rankers():
    assert make_config("x", ranker="lightgbm,mlp").kinds == ("mlp", "lightgbm")
    assert make_config("x", ranker=["xgboost", "linear"]).kinds == ("linear", "xgboost")
    assert make_config("x").kinds == ()  # the data decide


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "what", "got", "hint"),
    [
        ({"stepz": 3}, "no option 'stepz'", None, "'steps'"),
        ({"network.hiden": 3}, "no option 'network.hiden'", None, "'network.hidden'"),
        ({"columns": {"itm": "x"}}, "no option 'data.columns.itm'", None, "'data.columns.item'"),
        ({"hidden": "8,a"}, "'hidden' must be a whole number", "'a'", "network.hidden"),
        ({"hidden": ()}, "'hidden' must be a list of at least 1", "()", "network.hidden"),
        ({"steps": 0}, "'steps' must be at least 1", "0", "network.steps"),
        ({"lr": 0}, "'lr' must be above 0", "0", "network.lr"),
        ({"lr": float("nan")}, "'lr' must be finite", "nan", "network.lr"),
        ({"clip": -1}, "'clip' must be at least 0", "-1", "network.clip"),
        ({"optimizer": "adm"}, "'optimizer' must be one of adagrad, adam, adamw", "'adm'", "network.optimizer"),
        ({"schedule": "cos"}, "'schedule' must be one of constant, cosine, linear", "'cos'", "network.schedule"),
        ({"precision": "fp8"}, "'precision' must be one of auto", "'fp8'", "machine.precision"),
        ({"stream": "maybe"}, "'stream' must be one of auto, yes, no", "'maybe'", "data.stream"),
        ({"workers": -1}, "'workers' must be at least 0", "-1", "machine.workers"),
        ({"sessions": -1}, "'sessions' must be at least 0", "-1", "simulation.sessions"),
        ({"decay": 0.0}, "'decay' must be above 0", "0.0", "data.decay"),
        ({"held_out": 0.0}, "'validation' must be above 0", "0.0", "data.validation"),
        ({"held_out": 0.6, "test": 0.4}, "shares of validation (0.6) and test (0.4)", None, None),
        ({"split": "time"}, "needs both split=time and the column", None, None),
        ({"learn_from": "love"}, "'learn_from' must be one of feedback, truth, no-bias", "'love'", "simulation"),
        ({"learn_from": "no-bias"}, "needs simulated users", None, None),
        ({"propensities": {"1": 0.5}, "bias": "x"}, "given twice", None, None),
        ({"select": "ndgc@10"}, "no metric 'ndgc'", None, "'ndcg'"),
        ({"ranker": "lightgmb"}, "no ranker 'lightgmb'", None, "'lightgbm'"),
        ({"ranker": 3}, "no ranker '3'", None, "lightgbm, linear, mlp, xgboost"),
        ({"ranker": "mlp,linear"}, "two rankers must be a network and trees", "mlp,linear", "mlp,lightgbm"),
        ({"method": "pal-clik"}, "no method 'pal-clik'", None, "'pal-click'"),
        ({"method": "dla", "ranker": "lightgbm"}, "no method 'dla' for lightgbm", None, "lambdarank"),
        ({"method_options": {"los": "opt"}}, "method 'pairwise-em' has no option 'los'", None, "'loss'"),
        ({"ranker": "lightgbm", "method_options": {"variant": "released"}}, "no option 'variant'", None, "targets"),
    ],
)
def test_an_error_has_what_is_wrong_the_value_and_a_hint(options, what, got, hint):
    with pytest.raises(OptionError) as raised:
        make_config("x", **options)
    assert what in raised.value.what
    assert raised.value.got == got
    assert (hint or "") in (raised.value.hint or "")


@pytest.mark.parametrize("options", [{"propensities": {"1": 2}}, {"label": "click +"}])
def test_examination_and_labels_have_their_own_errors(options):
    with pytest.raises(UltrError):
        make_config("x", **options)


# --- It is never changed ----------------------------------------------------------------------------------------------


def test_a_configuration_cannot_be_changed():
    config = make_config("x", steps=5)
    for section, name in ((config, "label"), (config.network, "steps"), (config.data.columns, "item")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, name, "1")
    assert config == make_config("x", steps=5)


def test_no_module_of_training_changes_a_configuration():
    folder = Path(ultr.training.__file__).parent
    changed = re.compile(r"replace\(\s*(\w+\.)*config\b")
    assert [path.name for path in folder.rglob("*.py") if changed.search(path.read_text())] == []


def test_another_configuration_has_other_options():
    config = make_config("x", steps=5, hidden=(4,), tree_parameters={"num_leaves": 7}, propensities={"1": 0.5})
    other = config.with_options(lr=0.5, tree_parameters={"max_depth": 2}, propensities=None)
    assert (other.network.steps, other.network.hidden, other.network.lr) == (5, (4,), 0.5)
    assert other.trees.parameters == {"num_leaves": 7, "max_depth": 2}
    assert other.examination.propensities is None
    assert config.network.lr == 0.02


def test_another_method_has_none_of_the_options_of_the_last_one():
    config = make_config("x", method_options={"loss": "opt"})
    assert config.with_options(method="dla").method.options == {}
    assert config.with_options(method="pairwise-em").method.options == {"loss": "opt"}
    assert config.with_options(loss="ipw").method.options == {"loss": "ipw"}


# --- Files and commands -----------------------------------------------------------------------------------------------

CHOICES: dict[str, st.SearchStrategy[Any]] = {
    "ranker": st.sampled_from(["auto", "mlp", "linear", "lightgbm", "mlp,xgboost"]),
    "hidden": st.lists(st.integers(1, 99), min_size=1, max_size=3).map(tuple),
    "network.steps": st.integers(1, 10**6),
    "network.lr": st.floats(1e-9, 1e9),
    "network.patience": st.none() | st.integers(0, 99),
    "trees.rounds": st.integers(1, 10**6),
    "optimizer": st.sampled_from(["adagrad", "adam", "adamw"]),
    "label": st.sampled_from([None, "click", "click + dwell / exp(3)"]),
    "select": st.sampled_from(["auto", "feedback-ndcg@10", "off-policy-gain@10"]),
    "item": st.none() | st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1),
    "where": st.lists(st.sampled_from(["country = de", "price > 3"]), max_size=2).map(tuple),
    "held_out": st.floats(0.01, 0.5),
    "missing": st.sampled_from(["mean", "error"]),
    "allow_leaks": st.booleans(),
    "loss": st.sampled_from(["opt", "ipw", "bayes-ipw", "opt-posterior"]),
    "seed": st.integers(0, 2**63 - 2),
    "device": st.sampled_from(["auto", "cpu", "cuda:1"]),
}
OPTIONS = st.fixed_dictionaries({}, optional=CHOICES)


@given(OPTIONS)
def test_a_file_of_the_configuration_is_read_back_equal(options):
    config = make_config("log.csv", **options)
    again = Config.from_json(json.loads(json.dumps(config.to_json())))
    assert again == config
    assert differences(config, again) == {}
    assert again.loop("mlp") == config.loop("mlp")


@given(OPTIONS)
def test_the_command_of_a_configuration_gives_the_same_configuration(options):
    config = make_config("a log.csv", **options)
    command, notes = train_command(config, out="my run")
    *first, out = shlex.split(command)[:5]
    assert first == ["ultr", "train", "a log.csv", "--out"]
    assert out == "my run"
    assert notes == []
    words = shlex.split(command)[5:]
    pairs = list(zip(words[::2], words[1::2], strict=True))
    given = dict(text.split("=", 1) for flag, text in pairs if flag == "--set")
    where = [text for flag, text in pairs if flag == "--where"]
    assert differences(make_config("a log.csv", **given, where=where), config) == {}


def test_the_command_has_a_note_for_known_examination():
    command, notes = train_command(make_config("log.csv", propensities={"1": 1.0, "2": 0.5}))
    assert "propensities" not in command
    assert len(notes) == 1
    assert "--propensities" in notes[0]


@pytest.mark.parametrize("content", [{}, {"format": 1}, {"format": 99}])
def test_files_of_other_formats_are_errors(content):
    with pytest.raises(DataError) as raised:
        Config.from_json(content, where="run")
    assert raised.value.where == "run"


def test_damaged_files_are_errors():
    content = make_config("x").to_json()
    for change in ({"network": {"steps": "many"}}, {"network": {"stepz": 3}}, {"data": 3}):
        with pytest.raises(DataError, match="configuration cannot be read"):
            Config.from_json({**content, **change}, where="run")
    with pytest.raises(DataError, match="configuration cannot be read"):
        Config.from_json({name: value for name, value in content.items() if name != "trees"}, where="run")


# --- What is derived from it ------------------------------------------------------------------------------------------


def test_differences_have_both_values_and_leave_out_the_machine():
    config = make_config("x", steps=5, seed=3, device="cpu", hidden=(4,))
    other = make_config("y", steps=5, hidden=(8,), device="cuda", workers=2)
    expected = {"data.source": ("x", "y"), "training.seed": (3, 0), "network.hidden": ([4], [8])}
    assert differences(config, other) == expected
    chosen = make_config("x", seed=3)
    assert differences(chosen, other, unset=True) == {"data.source": ("x", "y"), "training.seed": (3, 0)}


def test_each_kind_of_ranker_has_its_loop():
    config = make_config("x", seed=3, device="cpu", batch=8, bias_steps=9, steps=5, rounds=6, precision="float32")
    network, trees = config.loop("mlp"), config.loop("lightgbm")
    assert (network.steps, trees.steps) == (5, 6)
    assert (network.lr, trees.lr) == (0.02, 0.1)
    assert (network.patience, trees.patience) == (None, 5)
    for options in (network, trees):  # the bias model of trees may be a network
        assert (options.seed, options.device, options.batch, options.bias_steps) == (3, "cpu", 8, 9)


def test_the_metric_that_selects_follows_from_the_data():
    assert make_config("x").selection == "off-policy-likelihood"
    assert make_config("x", users="pbm").selection == "feedback-ndcg@10"
    assert make_config("x", learn_from="truth").selection == "feedback-ndcg@10"
    assert make_config("x", select="ndcg@5").selection == "ndcg@5"


def test_trees_need_sessions_that_are_drawn_once():
    assert make_config("x", users="pbm", ranker="lightgbm").sessions_drawn == 20_000
    assert make_config("x", users="pbm", ranker="lightgbm", sessions=30).sessions_drawn == 30
    assert make_config("x", users="pbm", ranker="mlp").sessions_drawn == 0
    assert make_config("x", ranker="lightgbm").sessions_drawn == 0


def test_runs_share_their_data_and_bias_models_if_these_are_the_same():
    config = make_config("x", method="pairwise-em")
    for other in ({"lr": 0.5}, {"hidden": (4,)}, {"method": "direct"}):
        assert config.with_options(**other).data_key() == config.data_key()
    for other in ({"seed": 1}, {"held_out": 0.3}, {"label": "click"}, {"warm_start": "run"}):
        assert config.with_options(**other).data_key() != config.data_key()

    def key(**options: Any) -> str:
        return config.with_options(**options).shared_key("mlp", "click", {"em": "staged"})

    assert key(lr=0.5, hidden=(4,)) == key()
    assert len({key(), key(seed=1), key(bias_steps=5), key(held_out=0.3)}) == 4


@pytest.mark.parametrize(("requests", "evaluations"), [(10, 3), (3_000, 3), (10_000, 8), (30_000, 12), (10**6, 12)])
def test_the_patience_follows_from_the_size_of_the_log(requests, evaluations):
    assert patience_for(requests, TrainingOptions(evaluate_every=50), least=150, most=600) == evaluations


def test_the_options_of_a_loop_are_checked():
    with pytest.raises(OptionError, match="did you mean 'adam'"):
        TrainingOptions(optimizer="adm")
