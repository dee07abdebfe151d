"""The command that repeats a run, from its configuration."""

from __future__ import annotations

import shlex
from dataclasses import fields
from typing import Any

from ultr.preparing import RunConfig
from ultr.rankers.boosters import is_trees
from ultr.training import usual_training

USER_OPTIONS = ("eta", "epsilon")  # of simulated users, that the command line has
AS_THEY_ARE = ("learn_from", "select", "sessions", "bias", "stream", "workers")


def train_command(config: RunConfig, *, out: str = "run") -> tuple[str, list[str]]:
    """`ultr train ...` with all that differs from what is usual, and in words what no command can say."""
    usual = RunConfig(data=config.data)
    given: list[tuple[str, Any]] = [("out", out), ("method", config.method)]
    given += [("option", f"{name}={_text(value)}") for name, value in config.method_options.items()]
    given.append(("label", config.label))
    if config.ranker != usual.ranker:
        given.append(("ranker", config.ranker))
    if is_trees(config.ranker):
        given += [("ranker-option", f"{name}={_text(value)}") for name, value in config.ranker_options.items()]
    else:
        given += [(name, _text(value)) for name, value in config.ranker_options.items()]
    given += [(name, getattr(config, name)) for name in AS_THEY_ARE if getattr(config, name) != getattr(usual, name)]
    if config.users is not None:
        given.append(("users", config.users))
        given += [(name, config.user_options[name]) for name in USER_OPTIONS if name in config.user_options]
        if config.data_dir is not None:
            given.append(("data-dir", config.data_dir))
    given += [(name, _text(value)) for name, value in config.columns.items()]
    ordinary = usual_training(config.ranker)
    for field in fields(config.training):
        value = getattr(config.training, field.name)
        if value != getattr(ordinary, field.name):
            given.append((field.name, value))
    words = [part for name, value in given for part in (f"--{name.replace('_', '-')}", _text(value))]
    return shlex.join(["ultr", "train", config.data, *words]), _unsaid(config, usual)


def _unsaid(config: RunConfig, usual: RunConfig) -> list[str]:
    found = []
    if config.propensities is not None:
        found.append("with --propensities, the table of examination by position that is in the configuration")
    others = {name: value for name, value in config.user_options.items() if name not in USER_OPTIONS}
    if others:
        found.append(f"users had other options than the command line has: {others}")
    for name in ("items", "share", "held_out", "judged"):
        if getattr(config, name) != getattr(usual, name):
            found.append(f"'{name}' was {getattr(config, name)}, which is set from Python")
    return found


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
