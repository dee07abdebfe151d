"""Requests as padded tensors (`Lists`), and batches of them from a log (`ListBatches`), for training and evaluation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ultr.errors import DataError
from ultr.log import Log
from ultr.utils.arguments import check_fields, checked
from ultr.utils.distributed import as_device


class Part(NamedTuple):
    """A part of a training batch: adjacent requests that use one stream of random numbers."""

    number: int  # index of the part in the batch, from 0
    requests: int  # number of requests
    longest: int  # number of items in the longest list


@dataclass(frozen=True, eq=False)
class Lists:
    """Requests padded with zeros to one length; `where` is true for items and false for padding.

    `positions` are ids of the places where items were shown. `relevance` are true labels. Both are None if unknown.
    """

    features: Tensor  # [requests, length, features]
    where: Tensor  # [requests, length] bool
    weights: Tensor  # [requests]
    positions: Tensor | None = None  # [requests, length] int64
    actions: Mapping[str, Tensor] = field(default_factory=dict)  # name -> [requests, length]
    relevance: Tensor | None = None  # [requests, length]
    parts: tuple[Part, ...] = ()  # of the batch of a training step; empty for other lists
    key: Tensor | None = None  # on a GPU: the seed of the random numbers of a training step

    def __post_init__(self) -> None:
        check_fields(self)
        shape = list(self.where.shape)
        if len(shape) != 2 or self.where.dtype != torch.bool:
            raise DataError("'where' must be boolean, [requests, items]", got=f"{shape} of {self.where.dtype}")
        tensors = {"features": self.features, "weights": self.weights, "positions": self.positions}
        expected = {"features": [*shape, *self.features.shape[2:3]], "weights": shape[:1]}
        for name, values in (tensors | {"relevance": self.relevance} | dict(self.actions)).items():
            if values is not None and list(values.shape) != expected.get(name, shape):
                what = f"'{name}' must have the shape {expected.get(name, shape)} if 'where' has {shape}"
                raise DataError(what, got=list(values.shape))

    def __len__(self) -> int:
        return len(self.where)

    @property
    def shown_positions(self) -> Tensor:
        """The positions of the items; raises DataError if the lists have none."""
        if self.positions is None:
            raise DataError("these lists have no positions", hint="give items positions with ultr.show(log, scores)")
        return self.positions

    @property
    def true_relevance(self) -> Tensor:
        """The true labels of the items; raises DataError if the lists have none."""
        if self.relevance is None:
            raise DataError("these lists have no true labels", hint="use labelled data, such as 'synthetic'")
        return self.relevance

    def with_actions(self, actions: Mapping[str, Tensor]) -> Lists:
        """Return a copy with `actions` in place of the recorded feedback."""
        return replace(self, actions=dict(actions))

    def with_parts(self, parts: tuple[Part, ...], key: Tensor | None = None) -> Lists:
        """Return a copy that is marked as the batch of a training step with these parts, and on a GPU this key."""
        return replace(self, parts=parts, key=key)

    def to(self, device: torch.device | str) -> Lists:
        """Return a copy on a device."""
        return self.map(lambda values: values.to(device))

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, in a fixed order."""
        return [value for value in (*vars(self).values(), *self.actions.values()) if isinstance(value, Tensor)]

    def map(self, function: Callable[[Tensor], Tensor]) -> Lists:
        """Return a copy with `function` applied to every tensor."""
        mapped: dict[str, Any] = {n: function(value) for n, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **mapped, actions={name: function(values) for name, values in self.actions.items()})

    def padded_to(self, length: int) -> Lists:
        """Return a copy with more padding, so that lists have this length."""
        short = length - self.where.shape[1]
        if not short:
            return self
        return self.map(lambda values: values if values.ndim < 2 else _padded(values, short))

    @staticmethod
    def together(several: Sequence[Lists]) -> Lists:
        """Concatenate several `Lists` with the same fields: one after another, padded to the longest list."""
        if len(several) == 1:
            return several[0]
        longest = max(lists.where.shape[1] for lists in several)

        several = [lists.padded_to(longest) for lists in several]

        def joined(name: str) -> Tensor | None:
            values = [getattr(lists, name) for lists in several]
            return None if values[0] is None else torch.cat(values)

        tensors = {name: joined(name) for name in ("features", "where", "positions", "relevance")}
        actions = {name: torch.cat([lists.actions[name] for lists in several]) for name in several[0].actions}
        weights = torch.cat([lists.weights for lists in several])
        parts = tuple(part for lists in several for part in lists.parts)
        return Lists(**tensors, weights=weights, actions=actions, parts=parts)  # type: ignore[arg-type]

    @staticmethod
    def from_log(log: Log, *, device: torch.device | str = "cpu") -> Lists:
        """Return a whole log as one `Lists`; use `ListBatches` for a log that is too large to be padded at once."""
        return ListBatches(log, device=device)[torch.arange(len(log))]


def _padded(values: Tensor, short: int) -> Tensor:
    """Return values [requests, length, ...] with `short` more items, which are zero."""
    return pad(values, (0, 0, 0, short) if values.ndim == 3 else (0, short))


def _as_tensor(values: np.ndarray) -> Tensor:
    values = np.ascontiguousarray(values)
    if values.flags.writeable:
        return torch.from_numpy(values)
    with warnings.catch_warnings():  # memory-mapped data is read-only, and nothing here writes to it
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(values)


OF_REQUESTS = ("_starts", "_counts", "_lengths", "_weights")  # tensors of `ListBatches` by request; others are by row


class ListBatches:
    """A log as tensors on a device; `batches[indices]` returns the requests with these indices as `Lists`.

    The log is stored without padding. `Lists` are padded to the longest list among them.
    """

    @checked
    def __init__(self, log: Log, *, device: torch.device | str = "cpu") -> None:
        self.device = as_device(device)
        self._starts = torch.from_numpy(np.ascontiguousarray(log.offsets[:-1])).to(self.device)  # the first rows
        self._counts = torch.from_numpy(log.lengths).to(self.device)
        self._lengths = torch.from_numpy(log.lengths)  # stay on the CPU, because reading from a GPU waits for it
        self.padded = len(np.unique(log.lengths)) > 1  # lists have different lengths, so most need padding
        self._features = self._tensor(log.features)
        self._weights = torch.ones(len(log), device=self.device) if log.weights is None else self._tensor(log.weights)
        self._positions = None if log.positions is None else self._tensor(log.positions)
        self._actions = {name: self._tensor(values) for name, values in log.actions.items()}
        self._relevance = None if log.relevance is None else self._tensor(log.relevance)

    def _tensor(self, values: np.ndarray) -> Tensor:
        return _as_tensor(values).to(self.device)

    def __len__(self) -> int:
        """The number of requests."""
        return len(self._lengths)

    @property
    def has_actions(self) -> bool:
        return bool(self._actions)

    @property
    def lengths(self) -> Tensor:
        """The number of items of each request, on the CPU."""
        return self._lengths

    @staticmethod
    def of_each(logs: Sequence[Log], *, device: torch.device | str = "cpu") -> list[ListBatches]:
        """Return a `ListBatches` of each log, with the same columns; `joined` does not copy the rows of these."""
        bare = [ListBatches(log.without_features(), device=device) for log in logs]
        whole = ListBatches.joined(bare)
        ends = np.cumsum([0, *(log.rows for log in logs)]).tolist()
        whole._features = torch.empty(ends[-1], logs[0].features.shape[1], device=whole.device)
        requests = np.cumsum([0, *map(len, logs)]).tolist()
        parts = []
        for number, log in enumerate(logs):
            rows, own = slice(*ends[number : number + 2]), slice(*requests[number : number + 2])
            whole._features[rows] = _as_tensor(log.features)  # one log at a time, because two copies may not fit
            part = copy(whole)
            for name in OF_REQUESTS:
                setattr(part, name, getattr(whole, name)[own])
            part.padded = bare[number].padded
            parts.append(part)
        return parts

    @staticmethod
    def joined(several: Sequence[ListBatches]) -> ListBatches:
        """Return the requests of several `ListBatches` of the same columns and device as one."""
        if len(several) == 1:
            return several[0]
        whole = copy(several[0])
        firsts = [0] * len(several)
        if any(each._features is not whole._features for each in several):  # otherwise they have the same rows
            firsts = np.cumsum([0, *(len(each._features) for each in several[:-1])]).tolist()
            for name in ("_features", "_positions", "_relevance"):
                if getattr(whole, name) is not None:
                    setattr(whole, name, torch.cat([getattr(each, name) for each in several]))
            whole._actions = {name: torch.cat([each._actions[name] for each in several]) for name in whole._actions}
        for name in OF_REQUESTS:
            setattr(whole, name, torch.cat([getattr(each, name) for each in several]))
        whole._starts = torch.cat([each._starts + first for each, first in zip(several, firsts, strict=True)])
        whole.padded = len(np.unique(whole._lengths.numpy())) > 1
        return whole

    def without_features(self) -> ListBatches:
        """Return a copy whose lists have zero features."""
        light = copy(self)
        light._features = self._features[:, :0]
        return light

    @checked
    def __getitem__(self, requests: Tensor) -> Lists:
        """Return the requests with these indices (a vector, in any order) as `Lists`."""
        chosen = requests.cpu()
        if chosen.ndim != 1 or chosen.dtype not in (torch.int32, torch.int64) or not len(chosen):
            got = f"{list(chosen.shape)} of {chosen.dtype}"
            raise DataError("the index must be a vector of request indices, with at least one", got=got)
        if int(chosen.min()) < 0 or int(chosen.max()) >= len(self):
            got = f"{int(chosen.min())} to {int(chosen.max())}"
            raise DataError(f"indices of requests must be 0 to {len(self) - 1}", got=got)
        lengths = self._lengths[chosen]
        longest = int(lengths.max())
        return self.gather(requests.to(self.device), longest, padded=int(lengths.min()) < longest)

    def gather(self, requests: Tensor, length: int, *, padded: bool = True) -> Lists:
        """Return requests, given by indices on this device, as `Lists` padded to `length`, without waiting for a GPU.

        Nothing is checked. `padded=False` if every list has exactly this length.
        """
        slots = torch.arange(length, device=self.device)
        rows = self._starts[requests][:, None] + slots
        where = torch.ones_like(rows, dtype=torch.bool)
        if padded:
            where = slots < self._counts[requests][:, None]
            rows = torch.where(where, rows, 0)

        def as_lists(values: Tensor) -> Tensor:
            lists = values.index_select(0, rows.view(-1)).view(*rows.shape, *values.shape[1:])
            return lists.masked_fill_(~where.view(*where.shape, *[1] * (values.ndim - 1)), 0) if padded else lists

        return Lists(
            features=as_lists(self._features),
            where=where,
            weights=self._weights[requests],
            positions=None if self._positions is None else as_lists(self._positions),
            actions={name: as_lists(values) for name, values in self._actions.items()},
            relevance=None if self._relevance is None else as_lists(self._relevance),
        )

    def rows(self, requests: Tensor, where: Tensor) -> Tensor:
        """Return the row in the log of each item of some requests, whose lists have these items; 0 for padding."""
        slots = torch.arange(where.shape[1], device=self.device)
        starts = self._starts[requests.to(self.device)] - self._starts[0]
        return torch.where(where, starts[:, None] + slots, 0)

    def by_length(self, max_items: int = 1 << 16) -> Iterator[tuple[Tensor, Lists]]:
        """Yield all requests once, in batches of similar length: the indices of the requests, and their `Lists`.

        A batch has at most `max_items` items including padding, or a single request with more items.
        """
        lengths = self._lengths.numpy()
        order = np.argsort(lengths, kind="stable")
        start = 0
        while start < len(order):
            following = lengths[order[start : start + max_items]]  # sorted, so the last list of a batch is its longest
            slots = following * np.arange(1, len(following) + 1)
            stop = start + max(1, int(np.searchsorted(slots, max_items, side="right")))
            requests = torch.from_numpy(order[start:stop])
            yield requests, self[requests]
            start = stop
