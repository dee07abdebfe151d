"""`Dataset`: requests with true labels in three splits. Also checks of numbers and grades, and values by grade."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ultr.errors import DataError, OptionError
from ultr.log import Log
from ultr.utils.arguments import check_value

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
