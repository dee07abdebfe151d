"""`Lists`: a few requests as padded tensors, the only shape that training and evaluation see."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ultr.arguments import check_fields, checked
from ultr.errors import DataError, OptionError
from ultr.log import Log


def as_device(name: torch.device | str) -> torch.device:
    """A device by its name, if it can be used here."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        if str(name).startswith("cuda") and not torch.cuda.is_available():
            mend = "use --device cpu"
            raise OptionError("this machine has no usable GPU", got=f"--device {name}", mend=mend) from error
        raise OptionError(f"no device '{name}'", mend="use cpu, cuda or cuda:1") from error
    if device.type == "meta":
        raise OptionError("numbers of the device 'meta' have no values", mend="use cpu, cuda or cuda:1")
    return device


class Part(NamedTuple):
    """Requests of a batch that follow one another and belong to one of its parts, by its number."""

    number: int
    requests: int
    longest: int  # of their lists


@dataclass(frozen=True, eq=False)
class Lists:
    """Requests padded to one length; `where` is true for items and false for padding, and is the last word on it.

    `positions` are ids, not ranks (None where nothing was shown). `relevance` is the true label where it is known.
    Padding holds zeros.
    """

    features: Tensor  # [requests, length, features]
    where: Tensor  # [requests, length] bool
    weights: Tensor  # [requests]
    positions: Tensor | None = None  # [requests, length] int64
    actions: Mapping[str, Tensor] = field(default_factory=dict)  # name -> [requests, length]
    relevance: Tensor | None = None  # [requests, length]
    parts: tuple[Part, ...] = ()  # of the whole batch of a step, that these lists are; none where it is no step's

    def __post_init__(self) -> None:
        check_fields(self)
        shape = list(self.where.shape)
        if len(shape) != 2 or self.where.dtype != torch.bool:
            raise DataError("'where' should be true or false, [requests, items]", got=f"{shape} of {self.where.dtype}")
        whole = {"features": self.features, "weights": self.weights, "positions": self.positions}
        wanted = {"features": [*shape, *self.features.shape[2:3]], "weights": shape[:1]}
        for name, values in (whole | {"relevance": self.relevance} | dict(self.actions)).items():
            if values is not None and list(values.shape) != wanted.get(name, shape):
                got = list(values.shape)
                raise DataError(f"'{name}' should be {wanted.get(name, shape)} where 'where' is {shape}", got=got)

    def __len__(self) -> int:
        return len(self.where)

    @property
    def shown_positions(self) -> Tensor:
        """The positions, which must be there."""
        if self.positions is None:
            raise DataError("these lists have no positions: their items were not shown", mend="show them first")
        return self.positions

    @property
    def true_relevance(self) -> Tensor:
        """The true labels, which must be there."""
        if self.relevance is None:
            raise DataError("these lists have no true labels", mend="use data that has them, such as 'synthetic'")
        return self.relevance

    def with_actions(self, actions: Mapping[str, Tensor]) -> Lists:
        """The same lists with other feedback."""
        return replace(self, actions=dict(actions))

    def in_parts(self, parts: tuple[Part, ...]) -> Lists:
        """The same lists as parts of the batch of a step."""
        return replace(self, parts=parts)

    def to(self, device: torch.device | str) -> Lists:
        """The same lists on a device."""
        moved: dict[str, Any] = {n: value.to(device) for n, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved, actions={name: values.to(device) for name, values in self.actions.items()})

    @staticmethod
    def together(several: Sequence[Lists]) -> Lists:
        """Several as one, padded to the longest; they have the same fields."""
        if len(several) == 1:
            return several[0]
        longest = max(lists.where.shape[1] for lists in several)

        def padded(values: Tensor) -> Tensor:
            short = longest - values.shape[1]
            return pad(values, (0, 0, 0, short) if values.ndim == 3 else (0, short)) if short else values

        def joined(name: str) -> Tensor | None:
            values = [getattr(lists, name) for lists in several]
            return None if values[0] is None else torch.cat([padded(v) for v in values])

        tensors = {name: joined(name) for name in ("features", "where", "positions", "relevance")}
        actions = {name: torch.cat([padded(lists.actions[name]) for lists in several]) for name in several[0].actions}
        weights, parts = (
            torch.cat([lists.weights for lists in several]),
            tuple(p for lists in several for p in lists.parts),
        )
        return Lists(**tensors, weights=weights, actions=actions, parts=parts)  # type: ignore[arg-type]

    @staticmethod
    def from_log(log: Log, *, device: torch.device | str = "cpu") -> Lists:
        """A whole log at once; for large ones take batches from `ListBatches`."""
        return ListBatches(log, device=device)[torch.arange(len(log))]


class ListBatches:
    """A log on a device, from which lists are taken by the indices of their requests.

    Rows are stored once, unpadded; a batch is padded to its own longest list.
    """

    @checked
    def __init__(self, log: Log, *, device: torch.device | str = "cpu") -> None:
        self.device = as_device(device)
        self._offsets = torch.from_numpy(np.ascontiguousarray(log.offsets)).to(self.device)
        self._lengths = torch.from_numpy(log.lengths)
        self._features = self._tensor(log.features)
        self._weights = torch.ones(len(log), device=self.device) if log.weights is None else self._tensor(log.weights)
        self._positions = None if log.positions is None else self._tensor(log.positions)
        self._actions = {name: self._tensor(values) for name, values in log.actions.items()}
        self._relevance = None if log.relevance is None else self._tensor(log.relevance)

    def _tensor(self, values: np.ndarray) -> Tensor:
        values = np.ascontiguousarray(values)
        if values.flags.writeable:
            return torch.from_numpy(values).to(self.device)
        with warnings.catch_warnings():  # memory-mapped data cannot be written, and nothing here writes it
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(values).to(self.device)

    def __len__(self) -> int:
        """The number of requests."""
        return len(self._lengths)

    @property
    def has_actions(self) -> bool:
        return bool(self._actions)

    def without_features(self) -> ListBatches:
        """The same requests, where only what was shown and done is looked at."""
        light = copy(self)
        light._features = self._features[:, :0]
        return light

    def batch(self, requests: Tensor, parts: Iterable[tuple[int, int]]) -> Lists:
        """The lists of the given requests, which are parts of a step's batch: number and requests of each."""
        found, first = [], 0
        for number, count in parts:
            found.append(Part(number, count, int(self._lengths[requests[first : first + count]].max())))
            first += count
        return self[requests].in_parts(tuple(found))

    @checked
    def __getitem__(self, requests: Tensor) -> Lists:
        """The lists of the given requests, in the given order."""
        chosen = requests.cpu()
        if chosen.ndim != 1 or chosen.dtype not in (torch.int32, torch.int64) or not len(chosen):
            raise DataError("requests are taken by their numbers", got=f"{list(chosen.shape)} of {chosen.dtype}")
        if int(chosen.min()) < 0 or int(chosen.max()) >= len(self):
            got = f"{int(chosen.min())} to {int(chosen.max())}"
            raise DataError(f"requests are numbered 0 to {len(self) - 1}", got=got)
        lengths = self._lengths[chosen]  # known here, so that the device is not waited for
        longest, padded = int(lengths.max()), int(lengths.min()) < int(lengths.max())
        requests = requests.to(self.device)
        slots = torch.arange(longest, device=self.device)
        rows = self._offsets[requests][:, None] + slots
        where = torch.ones_like(rows, dtype=torch.bool)
        if padded:
            where = slots < lengths.to(self.device)[:, None]
            rows = torch.where(where, rows, 0)

        def taken(values: Tensor) -> Tensor:
            chosen = values.index_select(0, rows.view(-1)).view(*rows.shape, *values.shape[1:])
            return chosen.masked_fill_(~where.view(*where.shape, *[1] * (values.ndim - 1)), 0) if padded else chosen

        return Lists(
            features=taken(self._features),
            where=where,
            weights=self._weights[requests],
            positions=None if self._positions is None else taken(self._positions),
            actions={name: taken(values) for name, values in self._actions.items()},
            relevance=None if self._relevance is None else taken(self._relevance),
        )

    def by_length(self, max_items: int = 1 << 16) -> Iterator[tuple[Tensor, Lists]]:
        """All lists once, lists alike in length together, at most `max_items` slots at a time (or one list).

        Each batch comes with the indices of its requests.
        """
        lengths = self._lengths.numpy()
        order = np.argsort(lengths, kind="stable")
        start = 0
        while start < len(order):
            ahead = lengths[order[start : start + max_items]]  # they rise: the last of a batch is its longest
            slots = ahead * np.arange(1, len(ahead) + 1)
            stop = start + max(1, int(np.searchsorted(slots, max_items, side="right")))
            requests = torch.from_numpy(order[start:stop])
            yield requests, self[requests]
            start = stop
