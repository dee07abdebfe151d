"""Data sets with true labels, each split into training, validation and test requests."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ultr.datasets.base import SPLITS, Dataset, highest_grade
from ultr.datasets.initial import initial_ranker, randomise, ranking_svm, show
from ultr.datasets.letor import read_letor
from ultr.datasets.movielens import read_movielens
from ultr.datasets.synthetic import make_synthetic, make_synthetic_trees
from ultr.errors import AbsentError, DataError, nearest
from ultr.utils.arguments import checked

__all__ = [
    "DATASETS",
    "GENERATED",
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
    """The reader of a named data set, and a sentence on where to get the data."""

    read: Callable[[Path], Dataset]
    get: str


GENERATED: dict[str, Callable[[], Dataset]] = {"synthetic": make_synthetic, "synthetic-trees": make_synthetic_trees}
DATASETS: dict[str, Source] = {
    "istella-s": Source(read_letor, "ISTI-CNR sends Istella-S on request"),
    "ml-1m": Source(read_movielens, "GroupLens offers MovieLens-1M as ml-1m.zip"),
    "mq2007": Source(
        # Grades 0-2 are doubled to the 0-4 of the other sets.
        lambda path: read_letor(path, name="mq2007", grade_scale=2, drop_irrelevant=True),
        "Microsoft Research offers MQ2007 as part of LETOR 4.0",
    ),
    "mq2008": Source(
        lambda path: read_letor(path, name="mq2008", grade_scale=2, drop_irrelevant=True),
        "Microsoft Research offers MQ2008 as part of LETOR 4.0",
    ),
    "mslr-web30k": Source(read_letor, "Microsoft Research offers MSLR-WEB30K"),
    "yahoo": Source(read_letor, "Yahoo Webscope sends the Learning to Rank Challenge set 1 on request"),
}


@checked
def load_dataset(name: str | Path, *, data_dir: str | Path | None = None) -> Dataset:
    """Load a data set by name (`synthetic`, `ml-1m`, `mq2007`, ...) or by the path of a LETOR-format file or folder.

    Named sets that are not generated are read from the folder `data_dir/NAME`. The default of `data_dir` is the value
    of the environment variable `ULTR_DATA`.
    """
    if str(name) in GENERATED:
        return GENERATED[str(name)]()
    if str(name) in DATASETS:
        source = DATASETS[str(name)]
        folder = data_dir or os.environ.get("ULTR_DATA")
        if not folder:
            hint = f"put it into a folder {name}, and name the parent folder with data.folder, --data-dir or ULTR_DATA"
            raise AbsentError(f"the data set {name} was not found ({source.get})", hint=hint)
        path = Path(folder) / str(name)
        if not path.exists():
            what, hint = f"the data set {name} was not found ({source.get})", f"put its files into {path}"
            raise AbsentError(what, where=path, hint=hint)
        return source.read(path)
    if not Path(name).exists():
        names = [*GENERATED, *DATASETS]
        raise DataError(f"'{name}' is not a data set, a file or a folder", hint=nearest(str(name), names))
    return read_letor(name)
