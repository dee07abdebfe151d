"""Data sets with true labels, each split into training, validation and test requests."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ultr.arguments import checked
from ultr.datasets.base import SPLITS, Dataset, highest_grade
from ultr.datasets.initial import initial_ranker, randomise, ranking_svm, show
from ultr.datasets.letor import read_letor
from ultr.datasets.movielens import read_movielens
from ultr.datasets.synthetic import make_synthetic
from ultr.errors import AbsentError, DataError, nearest

__all__ = [
    "DATASETS",
    "SPLITS",
    "Dataset",
    "Source",
    "highest_grade",
    "initial_ranker",
    "load_dataset",
    "randomise",
    "ranking_svm",
    "show",
]


@dataclass(frozen=True)
class Source:
    """How a named data set is read from its folder, and where a person gets it."""

    read: Callable[[Path], Dataset]
    get: str


DATASETS: dict[str, Source] = {
    "istella-s": Source(read_letor, "istella22 and istella-s are offered by ISTI-CNR on request"),
    "ml-1m": Source(read_movielens, "MovieLens-1M is offered by GroupLens as ml-1m.zip"),
    "mq2007": Source(
        # Grades 0-2 are doubled to the 0-4 of the other sets.
        lambda path: read_letor(path, name="mq2007", grade_scale=2, drop_irrelevant=True),
        "MQ2007 is part of LETOR 4.0, offered by Microsoft Research",
    ),
    "mq2008": Source(
        lambda path: read_letor(path, name="mq2008", grade_scale=2, drop_irrelevant=True),
        "MQ2008 is part of LETOR 4.0, offered by Microsoft Research",
    ),
    "mslr-web30k": Source(read_letor, "MSLR-WEB30K is offered by Microsoft Research"),
    "yahoo": Source(read_letor, "the Yahoo! Learning to Rank Challenge set 1 is offered by Yahoo Webscope on request"),
}


@checked
def load_dataset(name: str | Path, *, data_dir: str | Path | None = None) -> Dataset:
    """A data set by name (`synthetic`, `ml-1m`, `mq2007`, ...) or by the path of a LETOR-format file or folder.

    Named sets other than `synthetic` are looked for in the folder `NAME` under `data_dir`, or else under the folder
    that the environment variable `ULTR_DATA` names.
    """
    if name == "synthetic":
        return make_synthetic()
    if str(name) in DATASETS:
        source = DATASETS[str(name)]
        folder = data_dir or os.environ.get("ULTR_DATA")
        if not folder:
            mend = "name the folder that holds it with --data-dir or ULTR_DATA"
            raise AbsentError(f"where is {name}? {source.get}", mend=mend)
        path = Path(folder) / str(name)
        if not path.exists():
            raise AbsentError(f"{name} is not here; {source.get}", where=path, mend=f"put it into {path}")
        return source.read(path)
    if not Path(name).exists():
        known = ["synthetic", *DATASETS]
        raise DataError(f"'{name}' is no data set and no file or folder", mend=nearest(str(name), known))
    return read_letor(name)
