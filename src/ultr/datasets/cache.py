"""Data sets are read or computed once and kept as Arrow files, which are mapped into memory, not read."""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from ultr.datasets.base import SPLITS, Dataset
from ultr.errors import OutputError, UltrError
from ultr.files import atomic_path, remove_abandoned
from ultr.formats import load_json
from ultr.log import Log, read_log
from ultr.seals import checksum, sealed

FORMAT = 2
HEADER_BYTES = 16_384  # at most, of an array in a file


def cache_folder() -> Path:
    """`ULTR_CACHE`, or the user's own cache folder."""
    if own := os.environ.get("ULTR_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ultr"


def cached(name: str, key: str, build: Callable[[], Dataset]) -> Dataset:
    """The data set kept under this name and key, or else built and kept. A damaged or older copy is built again."""
    folder = cache_folder() / f"{name}-{key}"
    remove_abandoned(folder.parent)
    if folder.is_dir():
        kept = _load(folder)
        if kept is not None:
            return kept
    dataset = build()
    try:
        _save(dataset, folder)
    except OutputError:  # no cache can be written here: slower next time, and no reason to fail
        return dataset
    return _load(folder) or dataset


def kept_arrays(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> list[np.ndarray] | None:
    """The arrays kept in a file, if they are finite numbers of these shapes: never objects, nor more than expected."""
    try:
        with zipfile.ZipFile(path) as archive:
            for name, shape in shapes.items():
                if archive.getinfo(f"{name}.npy").file_size > 8 * math.prod(shape) + HEADER_BYTES:
                    return None
        with np.load(path, allow_pickle=False) as kept:
            found = [kept[name] for name in shapes]
    except Exception:  # none is kept, or a damaged one, of which NumPy tells in many ways
        return None
    fits = all(
        values.shape == shape and values.dtype.kind == "f" and np.isfinite(values).all()
        for values, shape in zip(found, shapes.values(), strict=True)
    )
    return found if fits else None


def _save(dataset: Dataset, folder: Path) -> None:
    with atomic_path(folder, overwrite=True, folder=True) as temporary:
        for split in SPLITS:
            table = dataset[split].to_table(fixed_size=True).combine_chunks()
            with pa.ipc.new_file(str(temporary / f"{split}.arrow"), table.schema) as writer:
                writer.write_table(table)
        meta = {
            "format": FORMAT,
            "name": dataset.name,
            "max_grade": dataset.max_grade,
            "fingerprint": dataset.fingerprint,
            "rows": {split: dataset[split].rows for split in SPLITS},
            "sums": {split: checksum(temporary / f"{split}.arrow") for split in SPLITS},
        }
        (temporary / "meta.json").write_text(json.dumps(sealed(meta)))


def _load(folder: Path) -> Dataset | None:
    try:
        meta = load_json(folder / "meta.json", finite=True)
        if meta["format"] != FORMAT or any(
            checksum(folder / f"{split}.arrow") != meta["sums"][split] for split in SPLITS
        ):
            return None
        logs: dict[str, Log] = {split: read_log(folder / f"{split}.arrow") for split in SPLITS}
        if any(logs[split].rows != meta["rows"][split] for split in SPLITS):
            return None
        return Dataset(meta["name"], **logs, max_grade=int(meta["max_grade"]), fingerprint=str(meta["fingerprint"]))
    except (OSError, ValueError, KeyError, TypeError, UltrError):
        return None
