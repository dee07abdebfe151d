"""Data sets are read or computed once and kept as Arrow files, which are mapped into memory, not read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc

from ultr.datasets.base import SPLITS, Dataset
from ultr.errors import OutputError, UltrError
from ultr.files import atomic_path
from ultr.log import Log, read_log

FORMAT = 1


def cache_folder() -> Path:
    """`ULTR_CACHE`, or the user's own cache folder."""
    if own := os.environ.get("ULTR_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ultr"


def cached(name: str, key: str, build: Callable[[], Dataset]) -> Dataset:
    """The data set kept under this name and key, or else built and kept. A damaged or older copy is built again."""
    folder = cache_folder() / f"{name}-{key}"
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
        }
        (temporary / "meta.json").write_text(json.dumps(meta))


def _load(folder: Path) -> Dataset | None:
    try:
        meta = json.loads((folder / "meta.json").read_text())
        if meta["format"] != FORMAT:
            return None
        logs: dict[str, Log] = {split: read_log(folder / f"{split}.arrow") for split in SPLITS}
        if any(logs[split].rows != meta["rows"][split] for split in SPLITS):
            return None
        return Dataset(meta["name"], **logs, max_grade=int(meta["max_grade"]), fingerprint=str(meta["fingerprint"]))
    except (OSError, ValueError, KeyError, TypeError, UltrError):
        return None
