"""The command that repeats a run is read back as the same configuration."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ultr import runs
from ultr.commands import train_command
from ultr.preparing import RunConfig
from ultr.training import TrainingOptions, usual_training

LOGS = RunConfig(data="a log.parquet", ranker_options={"hidden": [512, 256, 128], "dropout": 0.0, "norm": "none"})
TREES = replace(LOGS, ranker="lightgbm", ranker_options={}, training=usual_training("lightgbm"))
CONFIGS = {
    "as usual": LOGS,
    "options": replace(LOGS, method_options={"loss": "bayes-ipw"}, label="click + 2 * dwell"),
    "bounds": replace(LOGS, data="synthetic", users="trust", user_options={"eta": 0.5, "epsilon": 0.2}, sessions=300),
    "columns": replace(LOGS, columns={"request": "a; b", "features": "f_*", "segment": "device"}),
    "trees": replace(TREES, ranker_options={"num_leaves": 7}, bias="run/bias.json"),
    "training": replace(LOGS, training=TrainingOptions(steps=7, lr=0.3, optimizer="adam", seed=5), select="ndcg@5"),
}


@pytest.fixture
def read_back(ultr, monkeypatch):
    """The configuration that a command comes to."""

    class ToldError(Exception):
        pass

    def told(config, out, **_):
        raise ToldError(config)

    def read(command: str) -> RunConfig:
        monkeypatch.setattr(runs, "run_training", told)
        monkeypatch.setenv("ULTR_DEBUG", "1")
        program, *arguments = shlex.split(command)
        assert program == "ultr"
        with pytest.raises(ToldError) as end:
            ultr(*arguments)
        return end.value.args[0]

    return read


@pytest.mark.parametrize("name", CONFIGS)
def test_a_command_comes_to_the_configuration_it_was_made_from(name, read_back):
    command, unsaid = train_command(CONFIGS[name], out="my run")
    assert unsaid == []
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


def test_what_no_command_can_say_is_said_in_words():
    config = replace(LOGS, propensities={"1": 0.5}, held_out=0.3, users=None)
    _, unsaid = train_command(config)
    assert len(unsaid) == 2
    assert "--propensities" in unsaid[0]
    assert "'held_out' was 0.3" in unsaid[1]
    users = replace(LOGS, data="synthetic", users="cascade", user_options={"patience": 0.5})
    assert "patience" in train_command(users)[1][0]
