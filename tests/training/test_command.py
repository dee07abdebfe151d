"""The command that repeats a run is parsed to the same configuration."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ultr.training.config import Config, make_config, train_command

LOG = "a log.parquet"
CONFIGS = {
    "default": make_config(LOG),
    "options": make_config(LOG, method_options={"loss": "bayes-ipw"}, label="click + 2 * (dwell >= 3)"),
    "bounds": make_config("synthetic", users="trust", eta=0.5, epsilon=0.2, sessions=300, logging="both"),
    "users": make_config("synthetic", users="cascade", user_options={"patience": 0.5}),
    "columns": make_config(LOG, columns={"request": "a; b", "features": "f_*", "segment": "device"}),
    "feature names": make_config(LOG, features="price,age", where=("a = 1", "b > 2")),
    "trees": make_config(LOG, ranker="lightgbm", tree_parameters={"num_leaves": 7}, bias="run/bias.json"),
    "two": make_config(LOG, ranker=("linear", "xgboost"), missing="error", allow_leaks=True),
    "training": make_config(LOG, steps=7, optimizer="adam", seed=5, select="ndcg@5", hidden=(64, 32)),
    "split": make_config(LOG, split="time", time="day", on_duplicates="sum", decay=3.5, held_out=0.3, test=0.1),
}


@pytest.fixture
def read_back(ultr, monkeypatch):
    """A function that returns the configuration of a command."""

    class CalledError(Exception):
        pass

    def run_training(config, out, **_):
        raise CalledError(config)

    def read(command: str) -> Config:
        monkeypatch.setattr("ultr.training.run.run_training", run_training)
        monkeypatch.setenv("ULTR_DEBUG", "1")
        program, *arguments = shlex.split(command)
        assert program == "ultr"
        with pytest.raises(CalledError) as end:
            ultr(*arguments)
        return end.value.args[0]

    return read


@pytest.mark.parametrize("name", CONFIGS)
def test_a_command_gives_the_configuration_it_was_made_from(name, read_back):
    command, notes = train_command(CONFIGS[name], out="my run")
    assert notes == []
    assert read_back(command) == CONFIGS[name]


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.fixed_dictionaries(
        {
            "network.steps": st.integers(1, 10**6),
            "network.batch": st.integers(1, 4096),
            "network.lr": st.floats(1e-6, 1),
            "network.clip": st.floats(0, 10),
            "network.evaluate_every": st.integers(1, 1000),
            "network.patience": st.none() | st.integers(0, 50),
            "trees.rounds": st.integers(1, 1000),
            "trees.lr": st.floats(1e-6, 1),
            "seed": st.integers(0, 2**32 - 1),
        }
    )
)
def test_training_options_of_any_value(read_back, options):
    config = make_config(LOG, **options)
    assert read_back(train_command(config)[0]) == config


def test_a_note_names_the_setting_that_no_option_can_set():
    command, notes = train_command(make_config(LOG, propensities={1: 0.5, 2: 0.25}))
    assert len(notes) == 1
    assert notes[0].startswith("--propensities: pass a file")
    assert "propensities" not in command


def test_conditions_on_rows_are_options_of_their_own():
    command, _ = train_command(CONFIGS["feature names"])
    assert "--where 'a = 1' --where 'b > 2'" in command
