"""The reference of a run: requests of its last good logs, which judge the next update next to its own log.

Each log has a file, `reference/1.parquet` the newest one. They have requests that the run was not trained on.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from ultr.log import Log, read_log, write_log
from ultr.log.table import without_segments
from ultr.utils.files import atomic_path

REFERENCE = "reference"  # folder of a run
MOST_LOGS = 8
MOST_REQUESTS, MOST_NUMBERS = 5_000, 2_000_000  # requests, and rows times features, of a log
NEEDED = ("segment", "query", "randomised")  # columns of requests that judging uses


def write_reference(run: Path, log: Log) -> None:
    """Write requests of the log of a run that chose nothing as its reference."""
    if log.positions is None or not len(log):
        return
    (run / REFERENCE).mkdir(exist_ok=True)
    numbers = np.cumsum(log.lengths) * max(1, len(log.feature_names))
    count = min(MOST_REQUESTS, int(np.searchsorted(numbers, MOST_NUMBERS, "right")), len(log))
    chosen = np.sort(np.random.default_rng(0).permutation(len(log))[: max(1, count)])
    kept = without_segments(log.select(chosen))
    context = {name: values for name, values in kept.context.items() if name in NEEDED}
    write_log(replace(kept, context=context), run / REFERENCE / "1.parquet", overwrite=True)


def extend_reference(run: Path, before: Path) -> None:
    """Add the newest logs of the run `before` to the reference of a run."""
    for number, file in enumerate(_files(before)[: MOST_LOGS - 1], start=2):
        (run / REFERENCE).mkdir(exist_ok=True)
        with atomic_path(run / REFERENCE / f"{number}.parquet", overwrite=True) as temporary:
            shutil.copyfile(file, temporary)


def read_reference(run: Path) -> list[Log]:
    """Return the logs of the reference of a run, the newest first."""
    logs = []
    for file in _files(run):
        names = {*pq.read_schema(file).names}
        columns: dict[str, Any] = {name: name for name in NEEDED if name in names}
        logs.append(read_log(file, missing="keep", **columns))
    return logs


def _files(run: Path) -> list[Path]:
    numbers = (int(file.stem) for file in (run / REFERENCE).glob("*.parquet") if file.stem.isdigit())
    return [run / REFERENCE / f"{number}.parquet" for number in sorted(numbers)]
