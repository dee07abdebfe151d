"""The command that repeats a run is parsed to the same configuration."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ultr.training import run as runs
from ultr.training.command import train_command
from ultr.training.config import RunConfig, TrainingOptions, default_training

LOGS = RunConfig(data="a log.parquet", ranker_options={"hidden": [512, 256, 128], "dropout": 0.0, "norm": "none"})
TREES = replace(LOGS, ranker="lightgbm", ranker_options={}, training=default_training("lightgbm"))
CONFIGS = {
    "default": LOGS,
    "options": replace(LOGS, method_options={"loss": "bayes-ipw"}, label="click + 2 * dwell"),
    "bounds": replace(LOGS, data="synthetic", users="trust", user_options={"eta": 0.5, "epsilon": 0.2}, sessions=300),
    "columns": replace(LOGS, columns={"request": "a; b", "features": "f_*", "segment": "device"}),
    "trees": replace(TREES, ranker_options={"num_leaves": 7}, bias="run/bias.json"),
    "training": replace(LOGS, training=TrainingOptions(steps=7, lr=0.3, optimizer="adam", seed=5), select="ndcg@5"),
}


@pytest.fixture
def read_back(ultr, monkeypatch):
    """A function that returns the configuration of a command."""

    class CalledError(Exception):
        pass

    def run_training(config, out, **_):
        raise CalledError(config)

    def read(command: str) -> RunConfig:
        monkeypatch.setattr(runs, "run_training", run_training)
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
    st.builds(
        TrainingOptions,
        steps=st.integers(1, 10**6),
        batch=st.integers(1, 4096),
        lr=st.floats(1e-6, 1),
        clip=st.floats(0, 10),
        evaluate_every=st.integers(1, 1000),
        patience=st.integers(0, 50),
        seed=st.integers(0, 2**32 - 1),
    )
)
def test_training_options_of_any_value(read_back, training):
    command, _ = train_command(replace(LOGS, training=training))
    assert read_back(command).training == training


def test_notes_name_the_settings_that_no_option_can_set():
    config = replace(LOGS, propensities={"1": 0.5}, held_out=0.3, logging="network", users=None)
    _, notes = train_command(config)
    assert len(notes) == 3
    assert "--propensities" in notes[0]
    assert "'logging' is network" in notes[1]
    assert "'held_out' is 0.3" in notes[2]
    users = replace(LOGS, data="synthetic", users="cascade", user_options={"patience": 0.5})
    assert "patience" in train_command(users)[1][0]


def test_the_rows_and_the_split_of_a_log_are_repeated():
    config = RunConfig("log.parquet", where=("a = 1", "b > 2"), split="time", time="day", on_duplicates="sum")
    command, notes = train_command(config)
    assert "--on-duplicates sum --split time --time day --where 'a = 1' --where 'b > 2'" in command
    assert not notes
