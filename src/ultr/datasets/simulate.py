"""Simulate a log: the feedback of simulated users on the items of requests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import torch

from ultr.datasets.base import check_grades
from ultr.datasets.users import Feedback, User
from ultr.errors import DataError, OptionError
from ultr.lists import ListBatches
from ultr.log import Log
from ultr.utils.arguments import Seed, checked
from ultr.utils.memory import available_memory

ROW_BYTES = 64  # memory of a simulated row without its features


@checked
def draw_sessions(log: Log, sessions: int, *, seed: Seed = 0) -> Log:
    """Draw `sessions` requests of a log with replacement; they get new ids, and keep the old id as their query."""
    if sessions < 1:
        raise OptionError("'sessions' must be at least 1", got=sessions)
    needed = sessions * log.rows // max(1, len(log)) * (4 * len(log.feature_names) + ROW_BYTES)
    if needed > available_memory():
        got = f"{needed / 2**30:,.0f} GiB needed, {available_memory() / 2**30:.1f} GiB available"
        raise OptionError(f"{sessions:,} sessions do not fit in memory", got=got, hint="lower --sessions")
    chosen = np.random.default_rng(seed).integers(len(log), size=sessions)
    drawn = log.select(chosen)
    context = {"query": drawn.request_ids, **drawn.context}
    return replace(drawn, request_ids=pa.array(np.arange(sessions)), context=context)


@checked
def simulate_log(log: Log, user: User, *, seed: Seed = 0, sessions: int | None = None) -> tuple[Log, Feedback]:
    """Draw the feedback of a user on each item of a log, which must have positions and true relevance.

    With `sessions`, that many requests are drawn with replacement and get new ids; otherwise each is used once.
    Return the log with the drawn actions, and the `Feedback` of each row with its hidden variables.
    """
    if log.positions is None or log.relevance is None:
        what = "simulated feedback needs items with positions and true relevance"
        raise DataError(what, hint="give items positions with ultr.show(log, scores)")
    check_grades(torch.from_numpy(log.relevance), user.max_grade)
    if sessions is not None:
        log = draw_sessions(log, sessions, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    bare = replace(log.without_features(), actions={})
    drawn = Feedback(
        {name: torch.zeros(log.rows) for name in user.actions},
        torch.zeros(log.rows, dtype=torch.bool),
        torch.zeros(log.rows, dtype=torch.bool),
    )
    for requests, lists in ListBatches(bare).by_length():
        feedback = user.sample(lists.true_relevance, lists.shown_positions, generator, where=lists.where, check=False)
        first = torch.from_numpy(log.offsets)[requests]
        rows = (first[:, None] + torch.arange(lists.where.shape[1]))[lists.where]
        drawn.examined[rows] = feedback.examined[lists.where]
        drawn.relevant[rows] = feedback.relevant[lists.where]
        for name, values in feedback.actions.items():
            drawn.actions[name][rows] = values[lists.where].float()
    return replace(log, actions={name: values.numpy() for name, values in drawn.actions.items()}), drawn
