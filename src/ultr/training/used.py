"""The requests that a run was trained and selected on, by their hashes: a run that continues it holds out others."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ultr.log import Log
from ultr.log.hashes import request_hashes
from ultr.log.parts import LogParts
from ultr.log.queries import queries_of, split_by_query
from ultr.rankers.model import load_model
from ultr.training.config import RunConfig
from ultr.utils.tensors import load_tensors

OUTCOME, USED = "outcome", "used.safetensors"  # folder in a run, and the file of hashes in it


def read_used(run: Path) -> dict[str, np.ndarray] | None:
    """Return the hashes of the requests that a run was `trained` on and `selected` on; None if it has not saved them.

    Runs of older versions have not, nor have runs whose lists were streamed.
    """
    path = run / OUTCOME / USED
    if not path.is_file():
        return None
    tensors = load_tensors(path)
    return {name: tensors[name].numpy() for name in ("trained", "selected")}


def used_requests(run: Path, log: Log | LogParts) -> tuple[np.ndarray, np.ndarray] | None:
    """Return masks of the requests of a log that a run was trained on, and that it was selected on."""
    if (used := read_used(run)) is None:
        return None
    model = load_model(run)
    hashes = (LogParts.of(log) if isinstance(log, Log) else log).mapped(lambda part: request_hashes(model.view(part)))
    return np.isin(hashes, used["trained"]), np.isin(hashes, used["selected"])


def random_split(log: Log, config: RunConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the requests for training, validation and testing, chosen at random.

    A query that the run `config.warm_start` was trained on stays for training, and one that it was selected on for
    validation. Else validation would favour that run, which may know its requests.
    """
    used = None if config.warm_start is None else used_requests(Path(config.warm_start), log)
    if used is None:
        return _split(log, config)
    query = queries_of(log)
    trained, selected = (np.bincount(query, mask)[query] > 0 for mask in used)
    new = np.flatnonzero(~(trained | selected))
    parts = _split(log.select(new), config) if len(new) else (new, new, new)
    learned, held_out, judged = (new[part] for part in parts)
    learned = np.union1d(learned, np.flatnonzero(trained))
    held_out = np.union1d(held_out, np.flatnonzero(selected & ~trained))
    return (learned, held_out, judged) if len(learned) and len(held_out) else _split(log, config)


def _split(log: Log, config: RunConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    wanted = [max(1, round(share * len(log))) if share else 0 for share in (config.held_out, config.judged)]
    judged, others = split_by_query(log, wanted[1:], seed=0) if config.judged else (np.arange(0), np.arange(len(log)))
    chosen, rest = split_by_query(log.select(others) if len(judged) else log, wanted[:1], seed=config.training.seed)
    return others[rest], others[chosen], judged
