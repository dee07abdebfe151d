"""Training batches from shards larger than memory, which background threads read ahead of the training."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ultr.errors import DataError, OptionError
from ultr.lists import ListBatches, Lists, Part
from ultr.log import Log
from ultr.log.shards import RowGroup, Shards, concatenate_logs
from ultr.training.feed import padded_length, step_seed
from ultr.utils.distributed import PARTS, local_size, parts_of, size

BUFFER_BYTES = 128 << 20  # size of the shuffle buffer; memory holds twice this while the next requests are read
AHEAD = 4  # batches prepared in advance
MOST_WORKERS = 8  # largest default number of reading threads


class Piece(NamedTuple):
    """Some requests of a row group (a block of a Parquet file): every `of`-th one, from index `first` on."""

    group: RowGroup
    first: int = 0
    of: int = 1

    @property
    def requests(self) -> int:
        return len(range(self.first, self.group.requests, self.of))


class Span(NamedTuple):
    """Requests `first` to `last` - 1 of a window (see `Lane`), in the shuffled order of the window."""

    window: int
    first: int
    last: int


class Lane:
    """A fixed share of the training requests; every batch takes `take` requests from it.

    Each pass over a lane (epoch) takes its pieces in a new order, in windows of up to `at_once` requests, and shuffles
    the requests of each window. Processes have different lanes, so they read different files.
    """

    def __init__(self, number: int, pieces: Sequence[Piece], *, take: int, seed: int, at_once: float) -> None:
        self.number, self.take, self._seed = number, take, seed
        self._pieces, self._at_once = pieces, at_once
        self._requests = sum(piece.requests for piece in pieces)
        self.windows, self.ends = lru_cache(maxsize=3)(self._windows), lru_cache(maxsize=3)(self._ends)

    def _windows(self, number: int) -> list[list[Piece]]:
        """Return the windows of pass `number`: groups of pieces with up to `at_once` requests, or of one piece."""
        order = np.random.default_rng(step_seed(self._seed, number, 3, self.number)).permutation(len(self._pieces))
        windows: list[list[Piece]] = []
        requests = self._at_once
        for piece in (self._pieces[i] for i in order):
            if requests + piece.requests > self._at_once:
                windows.append([])
                requests = 0
            windows[-1].append(piece)
            requests += piece.requests
        return windows

    def _ends(self, number: int) -> list[int]:
        """Return for each window of pass `number` the count of requests from the start of the pass to its end."""
        return list(accumulate(sum(piece.requests for piece in window) for window in self.windows(number)))

    def spans(self, step: int) -> list[tuple[int, Span]]:
        """Return the requests that a step takes, as pairs (number of the pass, span of a window)."""
        spans, first, last = [], step * self.take, (step + 1) * self.take
        while first < last:
            number, offset = divmod(first, self._requests)
            ends = self.ends(number)
            window = bisect_right(ends, offset)
            window_start = ends[window - 1] if window else 0
            start = offset - window_start
            stop = min(ends[window] - window_start, start + last - first)
            spans.append((number, Span(window, start, stop)))
            first += stop - start
        return spans

    def next_window(self, number: int, window: int) -> tuple[int, int]:
        return (number, window + 1) if window + 1 < len(self.windows(number)) else (number + 1, 0)

    def order(self, number: int, window: int, requests: int) -> Tensor:
        generator = torch.Generator().manual_seed(step_seed(self._seed, number, 4, self.number, window))
        return torch.randperm(requests, generator=generator)


class Window(NamedTuple):
    """The requests of a window, read into memory, and their shuffled order."""

    lists: ListBatches
    order: Tensor


class Stream:
    """Batches from shards: background threads read pieces of them into a buffer of bounded size and shuffle there.

    `workers` is the number of reading threads (0: chosen by the number of cores); batches do not depend on it.
    """

    def __init__(
        self,
        shards: Shards,
        *,
        batch: int,
        seed: int,
        device: torch.device | str = "cpu",
        workers: int = 0,
        buffer_bytes: int = BUFFER_BYTES,
        view: Callable[[Log], Log] = lambda log: log,
    ) -> None:
        if batch < PARTS:
            raise OptionError(f"streaming needs batches of at least {PARTS} lists", got=batch, hint="raise --batch")
        if not shards.manifest.actions:
            hint = "run ultr prepare again, and name the feedback columns with --actions"
            raise DataError("the lists have no actions to learn from", hint=hint)
        self._shards, self._device, self._view, self._seed = shards, torch.device(device), view, seed
        parts = parts_of(min(batch, len(shards)))
        count = PARTS if PARTS % size() == 0 else size()
        request_bytes = shards.row_bytes * shards.rows / len(shards)
        at_once = buffer_bytes / count / request_bytes
        pieces = divide(shards, count)
        self._lanes = [Lane(n, pieces[n], take=take, seed=seed, at_once=at_once) for n, take in parts]
        self._windows: dict[tuple[int, int, int], Future[Window]] = {}
        self._readers = ThreadPoolExecutor(workers or default_workers(), thread_name_prefix="ultr-read")
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="ultr-batch")
        self._batches: deque[tuple[int, Future[Lists]]] = deque()
        self._copies = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._longest = shards.manifest.splits[shards.split]["longest"]
        self._moved: Lists | None = None  # the next batch, on its way to a GPU

    def __call__(self, step: int) -> Lists:
        return self.choose(step)

    def choose(self, step: int) -> Lists:
        if not self._batches or self._batches[0][0] != step:
            for _, future in self._batches:
                future.cancel()
            self._batches.clear()
            self._moved = None
        while len(self._batches) < AHEAD:
            ahead = step + len(self._batches)
            self._batches.append((ahead, self._maker.submit(self._make, ahead)))
        lists = self._moved or self._move(self._batches[0][1].result())
        self._batches.popleft()
        if self._copies is None:
            return lists
        # The next batch is copied while the GPU works on this one.
        self._moved = self._move(self._batches[0][1].result()) if self._batches[0][1].done() else None
        key = torch.full((), step_seed(self._seed, step, 1), device=self._device)
        return self._arrived(lists, self._copies).with_parts(lists.parts, key)

    def lists(self, batch: Lists) -> Lists:
        return batch

    def _move(self, lists: Lists) -> Lists:
        """Copy a batch to the device; to a GPU on a stream of its own, from pinned memory."""
        if self._copies is None:
            return lists.to(self._device)
        with torch.cuda.stream(self._copies):
            return lists.map(lambda values: values.to(self._device, non_blocking=True))

    def _arrived(self, lists: Lists, copies: torch.cuda.Stream) -> Lists:
        """Let the work on the current stream of a GPU wait for the copies of a batch, and return the batch."""
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(copies)
        for values in lists.tensors:
            values.record_stream(current)  # their memory is not given to others before the stream has used them
        return lists

    def _make(self, step: int) -> Lists:
        """Make the batch of a step from all lanes. Only one thread calls this, so no lock is needed."""
        spans_of_lanes = [(lane, lane.spans(step)) for lane in self._lanes]
        for lane, spans in spans_of_lanes:
            self._request_windows(lane, [(number, span.window) for number, span in spans])
        for lane, spans in spans_of_lanes:  # then also the next windows, which this step does not need
            windows = [(number, span.window) for number, span in spans]
            self._request_windows(lane, [*windows, lane.next_window(*windows[-1])])
        batches, parts = [], []
        for lane, spans in spans_of_lanes:
            pieces = []
            for number, span in spans:
                window = self._windows[lane.number, number, span.window].result()
                pieces.append(window.lists[window.order[span.first : span.last]])
            lists = Lists.together(pieces)
            batches.append(lists)
            parts.append(Part(lane.number, len(lists), lists.where.shape[1]))
        together = Lists.together(batches)
        if self._copies is not None:
            length = padded_length(together.where.shape[1], self._longest)
            together = together.padded_to(length).map(Tensor.pin_memory)
            parts = [part._replace(longest=length) for part in parts]
        return together.with_parts(tuple(parts))

    def _request_windows(self, lane: Lane, windows: list[tuple[int, int]]) -> None:
        """Start to read those `windows` of a lane that are not in memory; drop all others of it except the next one."""
        kept = [*windows, lane.next_window(*windows[-1])]
        for key in [key for key in self._windows if key[0] == lane.number and key[1:] not in kept]:
            self._windows.pop(key).cancel()
        for number, window in windows:
            key = (lane.number, number, window)
            if key not in self._windows:
                self._windows[key] = self._readers.submit(self._read, lane, number, window)

    def _read(self, lane: Lane, number: int, window: int) -> Window:
        logs = []
        for piece in lane.windows(number)[window]:
            log = self._view(self._shards.read(piece.group))
            logs.append(log if piece.of == 1 else log.select(np.arange(piece.first, len(log), piece.of)))
        lists = ListBatches(concatenate_logs(logs))
        return Window(lists, lane.order(number, window, len(lists)))


def default_workers() -> int:
    """Return the default number of reading threads: cores per training process minus one; at least 1, at most 8."""
    return max(1, min(MOST_WORKERS, (os.cpu_count() or 1) // local_size() - 1))


def divide(shards: Shards, count: int) -> list[list[Piece]]:
    """Divide the row groups of shards into `count` lists of pieces with about the same number of requests.

    Every batch takes equally many requests from each of them. If `count` does not divide the number of row groups, the
    remaining row groups are cut into `count` pieces each.
    """
    groups = sorted(shards.groups, key=lambda group: -group.requests)
    whole = len(groups) - len(groups) % count
    cut = [Piece(group, first, count) for group in groups[whole:] for first in range(count)]
    parts: list[list[Piece]] = [[] for _ in range(count)]
    requests = [0] * count
    for piece in [*(Piece(group) for group in groups[:whole]), *sorted(cut, key=lambda piece: -piece.requests)]:
        if piece.requests:
            smallest = requests.index(min(requests))
            parts[smallest].append(piece)
            requests[smallest] += piece.requests
    if not min(requests):
        raise DataError(f"streaming needs at least {count} training requests", got=len(shards), hint="pass --stream no")
    return parts
