"""`Dataset`: requests with true labels in three splits. Also checks of numbers and grades, and values by grade."""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import torch
from torch import Tensor

from ultr.errors import DataError, OptionError, OutputError, UltrError
from ultr.log import Log, read_log
from ultr.utils.arguments import check_value
from ultr.utils.files import atomic_path, remove_abandoned
from ultr.utils.jsonfiles import add_checksum, file_checksum, load_json

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
MAX_GRADE = 30  # the highest grade for which users are simulated


@dataclass(frozen=True, eq=False)
class Dataset:
    """Requests with true labels (grades 0 to `max_grade`) in three splits; `fingerprint` identifies their source."""

    name: str
    train: Log
    validation: Log
    test: Log
    max_grade: int
    fingerprint: str

    def __getitem__(self, split: str) -> Log:
        log: Log = getattr(self, check_value("split", split, Split))
        return log


def highest_grade(*logs: Log, where: object) -> int:
    """Return the highest true label of the logs, rounded up, at least 1; raise DataError if it is above `MAX_GRADE`."""
    highest = max(float(log.true_relevance.max()) for log in logs)
    if highest > MAX_GRADE:
        what = f"true labels ('relevance') must be grades of at most {MAX_GRADE}"
        raise DataError(what, where=where, got=highest, hint="scale the labels, for example to 0 to 4")
    return max(1, math.ceil(highest))


def checked_numbers(
    name: str, values: Sequence[float], *, low: float = -math.inf, high: float = math.inf
) -> tuple[float, ...]:
    """Return the argument `name` as floats; raise OptionError unless all are finite and from `low` to `high`."""
    try:
        numbers = tuple(float(value) for value in values)
    except (TypeError, ValueError) as error:
        raise OptionError(f"'{name}' must be numbers", got=repr(values)) from error
    if not numbers or not all(math.isfinite(number) and low <= number <= high for number in numbers):
        bounds = f" from {low:g} to {high:g}" if math.isfinite(high) else f" from {low:g}" if math.isfinite(low) else ""
        raise OptionError(f"'{name}' must be finite numbers{bounds}", got=repr(values))
    return numbers


def check_grades(relevance: Tensor, max_grade: int) -> None:
    if relevance.numel() and not bool(((relevance >= 0) & (relevance <= max_grade)).all()):
        got = f"{float(relevance.min())} to {float(relevance.max())}"
        raise DataError(f"grades must be 0 to {max_grade}", got=got, hint="pass the max_grade of the data to make_user")


def checked_lists(relevance: Tensor, positions: Tensor, where: Tensor | None) -> Tensor:
    """Return the grades `relevance` as float32 or float64; raise DataError for tensors of wrong types or shapes."""
    tensors = [tensor for tensor in (relevance, positions, where) if tensor is not None]
    shapes, dtypes = [list(tensor.shape) for tensor in tensors], [tensor.dtype for tensor in tensors]
    if not relevance.ndim or any(shape != shapes[0] for shape in shapes) or relevance.is_complex():
        raise DataError("relevance, positions and where must be real, of the same shape", got=f"{shapes} of {dtypes}")
    if positions.dtype not in (torch.int32, torch.int64) or (where is not None and where.dtype != torch.bool):
        raise DataError("positions must be whole numbers, and where must be boolean", got=dtypes)
    return relevance if relevance.dtype in (torch.float32, torch.float64) else relevance.float()


def by_grade(values: Sequence[Any], relevance: Tensor, max_grade: int) -> Tensor:
    """Return the value of each grade, interpolated between `values`, which are spread over grades 0 to `max_grade`."""
    table = _device_table(tuple(values), relevance.dtype, relevance.device)
    last = len(table) - 1
    place = (relevance * (last / max_grade)).clamp(0, last)
    low = place.long()
    part = place - low
    part = part.view(*part.shape, *[1] * (table.ndim - 1))
    return table[low].lerp(table[(low + 1).clamp(max=last)], part.expand(*relevance.shape, *table.shape[1:]))


@lru_cache(maxsize=256)
def _device_table(values: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return values as a tensor on a device; the cache avoids a copy to the device in every call."""
    return torch.tensor(values, dtype=dtype, device=device)


# --- Cache ------------------------------------------------------------------------------------------------------------
# A cache on disk: data sets as Arrow files, which are mapped into memory, and arrays as .npz files.

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


def fitted_arrays(
    path: Path, shapes: Mapping[str, tuple[int, ...]], fit: Callable[[], Sequence[np.ndarray]]
) -> Sequence[np.ndarray]:
    """Return the arrays cached in an .npz file; if it is missing or damaged, call `fit` and cache the result."""
    if (arrays := cached_arrays(path, shapes)) is not None:
        return arrays
    fitted = fit()
    named: dict[str, Any] = dict(zip(shapes, fitted, strict=True))
    # A cache that cannot be written only costs time.
    with suppress(OutputError), atomic_path(path, overwrite=True) as temporary, temporary.open("wb") as handle:
        np.savez(handle, **named)
    return fitted


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
