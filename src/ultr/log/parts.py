"""A log in parts: all columns but the features are in memory, and features are read part by part, whenever needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from ultr.log.sampling import sample_requests
from ultr.log.shards import Shards, concatenate_logs
from ultr.log.table import Log

SAMPLE_ROWS, SAMPLE_BYTES = 1_000_000, 256 << 20  # largest sample of a log that is not in memory


@dataclass(frozen=True, eq=False)
class LogParts:
    """The rows of a log, in parts of whole requests."""

    log: Log  # all requests; without features, if these are not in memory
    read: Callable[[], Iterator[Log]]  # return all parts in order, with features
    most: int | None = None  # the most rows with features that are kept in memory at once; None: all

    @staticmethod
    def of(log: Log) -> LogParts:
        """Return a log in memory as one part."""
        return LogParts(log, lambda: iter([log]))

    @staticmethod
    def on_disk(shards: Shards) -> LogParts:
        """Return prepared lists, whose row groups are read when they are needed."""

        def read() -> Iterator[Log]:
            return map(shards.read, shards.groups)

        light = concatenate_logs([part.without_features() for part in read()])
        return LogParts(light, read, min(SAMPLE_ROWS, SAMPLE_BYTES // shards.row_bytes))

    def __len__(self) -> int:
        return len(self.log)

    def viewed(self, view: Callable[[Log], Log]) -> LogParts:
        """Return the same requests as `view` shows them; it must not change their number or order."""
        if self.most is None:
            return LogParts.of(view(self.log))
        return replace(self, read=lambda: map(view, self.read()))

    def mapped(self, function: Callable[[Log], np.ndarray], requests: np.ndarray | None = None) -> np.ndarray:
        """Return the values of a function of logs, for all parts or for the requests of a mask, as one array."""
        values = [function(part) for part in self._chosen(requests)]
        return np.concatenate(values) if values else np.empty(0)

    def sample(self, requests: np.ndarray, *, seed: int = 0) -> Log:
        """Return the requests of a mask with their features, or random ones of them if they are not in memory."""
        if self.most is None:
            return self.log.select(requests)
        chosen = np.flatnonzero(requests)
        kept = chosen[sample_requests(self.log.select(chosen), self.most, seed=seed)]
        requests = np.isin(np.arange(len(self.log)), kept)
        return concatenate_logs(list(self._chosen(requests)))

    def _chosen(self, requests: np.ndarray | None) -> Iterator[Log]:
        first = 0
        for part in self.read():
            chosen = None if requests is None else requests[first : first + len(part)]
            first += len(part)
            if chosen is None:
                yield part
            elif chosen.any():
                yield part.select(chosen)
