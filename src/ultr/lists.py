"""`Lists`: a few requests as padded tensors, the only shape that training and evaluation see."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ultr.errors import DataError
from ultr.log import Log


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

    @staticmethod
    def from_log(log: Log, *, device: torch.device | str = "cpu") -> Lists:
        """A whole log at once; for large ones take batches from `ListBatches`."""
        return ListBatches(log, device=device)[torch.arange(len(log))]


class ListBatches:
    """A log on a device, from which lists are taken by the indices of their requests.

    Rows are stored once, unpadded; a batch is padded to its own longest list.
    """

    def __init__(self, log: Log, *, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._offsets = torch.from_numpy(np.ascontiguousarray(log.offsets)).to(self.device)
        self._lengths = torch.from_numpy(log.lengths)
        self._features = self._tensor(log.features)
        self._weights = torch.ones(len(log), device=self.device) if log.weights is None else self._tensor(log.weights)
        self._positions = None if log.positions is None else self._tensor(log.positions)
        self._actions = {name: self._tensor(values) for name, values in log.actions.items()}
        self._relevance = None if log.relevance is None else self._tensor(log.relevance)

    def _tensor(self, values: np.ndarray) -> Tensor:
        with warnings.catch_warnings():  # memory-mapped data cannot be written, and nothing here writes it
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

    def __len__(self) -> int:
        """The number of requests."""
        return len(self._lengths)

    @property
    def has_actions(self) -> bool:
        return bool(self._actions)

    def __getitem__(self, requests: Tensor) -> Lists:
        """The lists of the given requests, in the given order."""
        lengths = self._lengths[requests.cpu()]  # known here, so that the device is not waited for
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
