"""The requests of a log on which several runs can be judged: those that none of them was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ultr.datasets import DATASETS, load_dataset
from ultr.log import Log
from ultr.log.parts import LogParts
from ultr.log.shards import Shards, is_lists
from ultr.training.outcome import read_outcome
from ultr.training.used import used_requests


@dataclass(frozen=True)
class Split:
    """The split of a data set or of prepared lists that is judged, and the fingerprint of the data."""

    fingerprint: str
    name: str


def split_of(data: str, name: str, data_dir: str | Path | None) -> Split | None:
    """Return the split of data that has splits; None for a log."""
    if is_lists(data):
        return Split(Shards(data).fingerprint, name)
    if data == "synthetic" or data in DATASETS:
        return Split(load_dataset(data, data_dir=data_dir).fingerprint, name)
    return None


def fresh_requests(
    runs: Mapping[str, tuple[Path, Log | LogParts]], split: Split | None, *, unselected: bool = False
) -> tuple[np.ndarray, list[str]]:
    """Return a mask of the requests of a log on which rankers can be judged, and warnings.

    `runs` maps the name of a run to its folder and to the log, whole or in parts, with the features of its model. The
    mask has the requests that no run was trained on, or all requests if there are none such. With `unselected`, those
    that selected the best step of a run are left out too, and there are no warnings about requests that are left out.
    """
    count = len(next(iter(runs.values()))[1])
    fresh, warnings, partly = np.ones(count, bool), [], []
    chosen_on: dict[str, np.ndarray] = {}
    for name, (folder, log) in runs.items():
        trained, selected = _used(folder, log, split)
        if trained is None or selected is None:
            warnings.append(
                f"{name} does not record the requests it was trained on: its lists were streamed, or an older version "
                "of ultr trained it. If it was trained on these requests, its value is too high."
            )
            continue
        if unselected:
            fresh &= ~(trained | selected)
            continue
        chosen_on[name] = selected
        if trained.any():
            fresh &= ~trained
            partly.append(f"{name} was trained on {int(trained.sum()):,} of the {count:,} requests.")
    if not fresh.any():
        hint = "pass requests that no run was trained on"
        warnings += [*partly, f"No other requests are left, so the values of the runs are too high; {hint}."]
        return np.ones(count, bool), warnings
    if partly:
        warnings += [*partly, f"All rankers are judged on the other {int(fresh.sum()):,} requests."]
    for name, selected in chosen_on.items():
        if both := int((selected & fresh).sum()):
            warnings.append(
                f"{both:,} of the judged requests selected the best step of {name}, so its value is slightly too high."
            )
    return fresh, warnings


def _used(folder: Path, log: Log | LogParts, split: Split | None) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return masks of the requests that a run was trained on, and that selected its best step; None if not known."""
    outcome = read_outcome(folder)
    if split is not None and outcome is not None and outcome.about["data"]["fingerprint"] == split.fingerprint:
        return np.full(len(log), split.name == "train"), np.full(len(log), split.name == "validation")
    return used_requests(folder, log) or (None, None)
