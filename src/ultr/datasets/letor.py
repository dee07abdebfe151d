"""LETOR-format data sets: SVMlight files of graded documents, in the layouts of their publishers.

| layout                     | files                                                           |
|----------------------------|-----------------------------------------------------------------|
| Yahoo! LETOR set 1         | set1.train.txt, set1.valid.txt, set1.test.txt                    |
| MSLR-WEB30K, MQ2007, ...   | train.txt, vali.txt, test.txt, in the folder or in its Fold1     |
| Istella-S                  | train.txt, vali.txt, test.txt, in the folder or in its sample    |
| LETOR 4.0 blocks           | S1.txt to S5.txt: three for training, one validation, one test   |

Each file may be gzipped. Requests of a single file are split at random: 60% training, 20% validation, 20% test.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from ultr.datasets.base import Dataset, cached, highest_grade
from ultr.errors import DataError
from ultr.log import Log
from ultr.log.shards import concatenate_logs
from ultr.log.svmlight import read_svmlight
from ultr.utils.files import existing_file, fingerprint

LAYOUTS: tuple[tuple[str, str, str], ...] = (  # file names, without .txt, of the three splits
    ("set1.train", "set1.valid", "set1.test"),
    ("train", "vali", "test"),
    ("train", "valid", "test"),
    ("S1 S2 S3", "S4", "S5"),
)
SUBFOLDERS = (".", "Fold1", "sample", "set1")


def read_letor(
    path: str | Path, *, name: str | None = None, grade_scale: float = 1, drop_irrelevant: bool = False
) -> Dataset:
    """Read a LETOR-format file or folder; the result is cached on disk for the next call.

    `grade_scale` multiplies the grades. `drop_irrelevant` drops requests without a relevant document from validation
    and test, because all rankings of such a request are equally good.
    """
    path = Path(path)
    splits = find_splits(path) if path.is_dir() else [[existing_file(path)]]
    files = [file for split in splits for file in split]
    name = name or path.name.split(".")[0]
    options = f"{grade_scale}-{drop_irrelevant}"
    stamp = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    key = hashlib.blake2b(repr((stamp, options)).encode(), digest_size=12).hexdigest()

    def build() -> Dataset:
        if len(splits) == 1:
            train, validation, test = split_by_request(read_svmlight(files[0]), where=files[0])
        else:
            train, validation, test = (join([read_svmlight(file) for file in split]) for split in splits)
        train, validation, test = same_width([train, validation, test])
        if not train.feature_names:
            raise DataError("the data has no features", where=path, hint="write features as 1:0.5 2:0.1 ...")
        scaled = [replace(log, relevance=log.true_relevance * grade_scale) for log in (train, validation, test)]
        max_grade = highest_grade(*scaled, where=path)
        if drop_irrelevant:
            scaled[1:] = [
                log.select(np.flatnonzero(np.maximum.reduceat(log.true_relevance, log.offsets[:-1]) > 0))
                for log in scaled[1:]
            ]
        digest = hashlib.blake2b(digest_size=16)
        for file in files:
            digest.update(fingerprint(file).encode())
        train, validation, test = scaled
        return Dataset(name, train, validation, test, max_grade, f"{digest.hexdigest()}-{options}")

    return cached(name, key, build)


def find_splits(folder: Path) -> list[list[Path]]:
    """Return the files of the training, validation and test split of a folder in one of the known layouts."""
    for subfolder in SUBFOLDERS:
        for layout in LAYOUTS:
            files = [[_file(folder / subfolder, stem) for stem in split.split()] for split in layout]
            if all(file is not None for split in files for file in split):
                return [[file for file in split if file is not None] for split in files]
    names = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
    hint = "it must have train.txt, vali.txt and test.txt (or set1.train.txt ..., or S1.txt to S5.txt), plain or .gz"
    raise DataError("the folder has no data set in a known layout", where=folder, got=names, hint=hint)


def _file(folder: Path, stem: str) -> Path | None:
    return next((p for p in (folder / f"{stem}.txt", folder / f"{stem}.txt.gz") if p.is_file()), None)


def split_by_request(log: Log, *, where: Path) -> tuple[Log, Log, Log]:
    """Split the requests of a log at random into training (60%), validation (20%) and test (20%)."""
    if len(log) < 5:
        what, hint = "a single file must have at least 5 requests to be split", "pass a folder with one file per split"
        raise DataError(what, where=where, got=len(log), hint=hint)
    order = np.random.default_rng(0).permutation(len(log))
    a, b = int(0.6 * len(log)), int(0.8 * len(log))
    return log.select(np.sort(order[:a])), log.select(np.sort(order[a:b])), log.select(np.sort(order[b:]))


def join(logs: list[Log]) -> Log:
    """Concatenate logs; raise DataError if two requests have the same id."""
    if len(logs) == 1:
        return logs[0]
    log = concatenate_logs(same_width(logs))
    if len(log.request_ids.unique()) < len(log):
        raise DataError("a request is in two files of one split", hint="give each request its own id")
    return log


def same_width(logs: list[Log]) -> list[Log]:
    """Return the logs with as many features as the widest; added features are 0, because sparse files omit zeros."""
    widest = max(logs, key=lambda log: len(log.feature_names))
    width = len(widest.feature_names)
    return [
        log
        if log.features.shape[1] == width
        else replace(
            log,
            features=np.pad(log.features, ((0, 0), (0, width - log.features.shape[1]))),
            feature_names=widest.feature_names,
        )
        for log in logs
    ]
