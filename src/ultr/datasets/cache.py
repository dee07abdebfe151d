"""A cache on disk: data sets as Arrow files, which are mapped into memory, and arrays as .npz files."""

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
from ultr.log import Log, read_log
from ultr.utils.files import atomic_path, remove_abandoned
from ultr.utils.jsonfiles import add_checksum, file_checksum, load_json

FORMAT = 2  # format number of a cached data set
MAX_HEADER_BYTES = 16_384  # most bytes of the header of an array in an .npz file


def cache_folder() -> Path:
    """Return the folder in the environment variable `ULTR_CACHE`, or else `ultr` in the user's cache folder."""
    if folder := os.environ.get("ULTR_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ultr"


def cached(name: str, key: str, build: Callable[[], Dataset]) -> Dataset:
    """Return the data set cached under this name and key; if it is missing or damaged, call `build` and cache it."""
    folder = cache_folder() / f"{name}-{key}"
    remove_abandoned(folder.parent)
    if folder.is_dir() and (dataset := _load(folder)) is not None:
        return dataset
    dataset = build()
    try:
        _save(dataset, folder)
    except OutputError:  # a cache that cannot be written only costs time
        return dataset
    return _load(folder) or dataset


def cached_arrays(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> list[np.ndarray] | None:
    """Return the arrays named in `shapes` from an .npz file; None if one is missing, damaged or not finite floats.

    Arrays of other shapes also give None. Pickled objects and larger arrays are not loaded, so the file may be hostile.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for name, shape in shapes.items():
                if archive.getinfo(f"{name}.npy").file_size > 8 * math.prod(shape) + MAX_HEADER_BYTES:
                    return None
        with np.load(path, allow_pickle=False) as file:
            arrays = [file[name] for name in shapes]
    except Exception:  # NumPy raises many types of exceptions for a damaged file
        return None
    fits = all(
        values.shape == shape and values.dtype.kind == "f" and np.isfinite(values).all()
        for values, shape in zip(arrays, shapes.values(), strict=True)
    )
    return arrays if fits else None


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
            "sums": {split: file_checksum(temporary / f"{split}.arrow") for split in SPLITS},
        }
        (temporary / "meta.json").write_text(json.dumps(add_checksum(meta)))


def _load(folder: Path) -> Dataset | None:
    try:
        meta = load_json(folder / "meta.json", finite=True)
        if meta["format"] != FORMAT or any(
            file_checksum(folder / f"{split}.arrow") != meta["sums"][split] for split in SPLITS
        ):
            return None
        logs: dict[str, Log] = {split: read_log(folder / f"{split}.arrow") for split in SPLITS}
        if any(logs[split].rows != meta["rows"][split] for split in SPLITS):
            return None
        return Dataset(meta["name"], **logs, max_grade=int(meta["max_grade"]), fingerprint=str(meta["fingerprint"]))
    except (OSError, ValueError, KeyError, TypeError, UltrError):
        return None
