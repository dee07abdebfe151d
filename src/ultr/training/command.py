"""Build the `ultr train` command that repeats a run from the configuration of the run."""

from __future__ import annotations

import shlex
from dataclasses import fields
from typing import Any

from ultr.rankers.boosters import is_trees
from ultr.training.config import AUTO, RunConfig, default_training

USER_OPTIONS = ("eta", "epsilon")  # options of simulated users that `ultr train` can set
# Options with the same name in RunConfig and `ultr train`.
SAME_NAME = (
    *("learn_from", "select", "sessions", "bias", "warm_start", "stream", "workers"),
    *("on_duplicates", "split", "time", "decay", "missing"),
)
FLAGS = ("allow_leaks", "drop_suspicious")  # options without a value


def train_command(config: RunConfig, *, out: str = "run") -> tuple[str, list[str]]:
    """Return the `ultr train` command that repeats a run, and a note for each setting that it cannot set."""
    default = RunConfig(data=config.data)
    options: list[tuple[str, Any]] = [("out", out), ("method", config.method)]
    options += [("option", f"{name}={_text(value)}") for name, value in config.method_options.items()]
    options.append(("label", config.label))
    if config.both or config.ranker != default.ranker:
        options.append(("ranker", AUTO if config.both else config.ranker))
    if is_trees(config.ranker):
        options += [("ranker-option", f"{name}={_text(value)}") for name, value in config.ranker_options.items()]
    else:
        options += [(name, _text(value)) for name, value in config.ranker_options.items()]
    options += [(name, None) for name in FLAGS if getattr(config, name)]
    options += [(name, getattr(config, name)) for name in SAME_NAME if getattr(config, name) != getattr(default, name)]
    if config.users is not None:
        options.append(("users", config.users))
        options += [(name, config.user_options[name]) for name in USER_OPTIONS if name in config.user_options]
        if config.data_dir is not None:
            options.append(("data-dir", config.data_dir))
    options += [(name, _text(value)) for name, value in config.columns.items()]
    options += [("where", condition) for condition in config.where]
    training = default_training(config.ranker)
    for field in fields(config.training):
        value = getattr(config.training, field.name)
        if value != getattr(training, field.name):
            options.append((field.name, value))
    words = []
    for name, value in options:
        words += [f"--{name.replace('_', '-')}", *(() if value is None else (_text(value),))]
    return shlex.join(["ultr", "train", config.data, *words]), _notes(config, default)


def _notes(config: RunConfig, default: RunConfig) -> list[str]:
    notes = []
    if config.propensities is not None:
        notes.append("--propensities: pass a file with the values of 'propensities' in the configuration")
    other_options = {name: value for name, value in config.user_options.items() if name not in USER_OPTIONS}
    if other_options:
        notes.append(f"options of simulated users that can only be set from Python: {other_options}")
    if config.both and config.warm_start is not None:
        notes.append("a network and trees are trained further by ultr update")
    for name in ("items", "logging", "share", "held_out", "judged"):
        if getattr(config, name) != getattr(default, name):
            notes.append(f"'{name}' is {getattr(config, name)}, which can only be set from Python")
    return notes


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
