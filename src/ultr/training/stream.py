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
from ultr.training.feed import STEPS_AT_ONCE, Feeding, padded_length, step_seed
from ultr.utils.distributed import PARTS, local_size, parts_of, size

BUFFER_BYTES = 128 << 20  # size of the shuffle buffer; memory holds twice this while the next requests are read
BLOCK_BYTES = 64 << 20  # about the most that the batches of a block take on a GPU
AHEAD, GPU_AHEAD = 4, 2  # blocks prepared in advance
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

    def spans(self, steps: range) -> list[tuple[int, Span]]:
        """Return the requests that some steps take, as pairs (number of the pass, span of a window)."""
        spans, first, last = [], steps.start * self.take, steps.stop * self.take
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


class Block(NamedTuple):
    """The batches of several steps, one after another."""

    lists: Lists
    parts: tuple[Part, ...]  # of each batch
    keys: Tensor | None  # of a keyed stream: the seed of the random numbers of each step
    ready: torch.cuda.Event | None  # on a GPU: when the lists are complete

    def at(self, place: int) -> Taken:
        count = 1 if self.keys is None else len(self.keys)
        size = len(self.lists) // count
        tensors = [values[place * size : (place + 1) * size] for values in self.lists.tensors]
        return Taken(self.lists, self.parts, tensors if self.keys is None else [*tensors, self.keys[place]])


class Taken(NamedTuple):
    """The batch of a step, as tensors, because making `Lists` of them takes time that a GPU does not wait for."""

    lists: Lists  # with the same fields
    parts: tuple[Part, ...]
    tensors: list[Tensor]  # those of `lists`, then the key of the step if the stream is keyed

    def map(self, function: Callable[[Tensor], Tensor]) -> Taken:
        return self._replace(tensors=[function(values) for values in self.tensors])


class Stream(Feeding):
    """Batches from shards: background threads read pieces of them into a buffer of bounded size and shuffle there.

    The buffer of a GPU is in its memory, and the batches of many steps are taken from it at once, on a CUDA stream of
    its own, while the GPU trains. `workers` is the number of reading threads (0: chosen by the number of cores);
    batches do not depend on it. The lists of a `keyed` stream have a key for random numbers, as a GPU needs it; the
    default is whether the device is a GPU.
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
        keyed: bool | None = None,
    ) -> None:
        if batch < PARTS:
            raise OptionError(
                f"streaming needs batches of at least {PARTS} lists", got=batch, hint="raise network.batch"
            )
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
        self._blocks: deque[tuple[int, Future[Block]]] = deque()  # the current one, and those made in advance
        self._longest = shards.manifest.splits[shards.split]["longest"]
        on_gpu = self._device.type == "cuda"
        self._copies = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._keyed = on_gpu if keyed is None else keyed
        self._steps, self._ahead = 1, AHEAD  # steps of a block, and blocks made in advance
        if self._keyed:
            most = int(BLOCK_BYTES / (sum(take for _, take in parts) * request_bytes))
            self._steps, self._ahead = max(1, min(STEPS_AT_ONCE, most)), GPU_AHEAD

    def choose(self, step: int) -> Taken:
        number, place = divmod(step, self._steps)
        return self._block(number).at(place)

    def lists(self, batch: Taken) -> Lists:
        values = iter(batch.tensors)
        lists = batch.lists.map(lambda _: next(values))
        return lists.with_parts(batch.parts, next(values, None))

    def _block(self, number: int) -> Block:
        """Return a block of steps, and let the next ones be made."""
        if self._blocks and self._blocks[0][0] == number:
            return self._blocks[0][1].result()
        if self._blocks:
            self._blocks.popleft()
        if not self._blocks or self._blocks[0][0] != number:
            for _, future in self._blocks:
                future.cancel()
            self._blocks.clear()
        while len(self._blocks) <= self._ahead:
            following = number + len(self._blocks)
            self._blocks.append((following, self._maker.submit(self._make, following)))
        block = self._blocks[0][1].result()
        if block.ready is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(block.ready)
            for values in (*block.lists.tensors, *(() if block.keys is None else (block.keys,))):
                values.record_stream(current)  # their memory is not given to others before the stream has used them
        return block

    def _make(self, number: int) -> Block:
        """Make a block of steps from all lanes. Only one thread calls this, so no lock is needed."""
        steps = range(number * self._steps, (number + 1) * self._steps)
        spans_of_lanes = [(lane, lane.spans(steps)) for lane in self._lanes]
        for lane, spans in spans_of_lanes:
            self._request_windows(lane, [(number, span.window) for number, span in spans])
        for lane, spans in spans_of_lanes:  # then also the next windows, which these steps do not need
            windows = [(number, span.window) for number, span in spans]
            self._request_windows(lane, [*windows, lane.next_window(*windows[-1])])
        with torch.cuda.stream(self._copies):  # without effect if there is none
            of_lanes = []
            for lane, spans in spans_of_lanes:
                windows_read = [self._windows[lane.number, number, span.window].result() for number, span in spans]
                read = zip(windows_read, spans, strict=True)
                of_lanes.append(Lists.together([w.lists[w.order[span.first : span.last]] for w, (_, span) in read]))
            lists, lanes = Lists.together(of_lanes), zip(self._lanes, of_lanes, strict=True)
            parts = tuple(Part(lane.number, lane.take, of_lane.where.shape[1]) for lane, of_lane in lanes)
            if not self._keyed:
                return Block(lists, parts, None, None)
            length = padded_length(lists.where.shape[1], self._longest)
            order = self._by_step().to(self._device)
            lists = lists.padded_to(length).map(lambda values: values[order])
            keys = torch.tensor([step_seed(self._seed, step, 1) for step in steps], device=self._device)
            parts = tuple(part._replace(longest=length) for part in parts)
            return Block(lists, parts, keys, None if self._copies is None else self._copies.record_event())

    def _by_step(self) -> Tensor:
        """Return the order that takes the lists of a block, which are lane by lane, step by step."""
        takes = [lane.take for lane in self._lanes]
        firsts = accumulate((take * self._steps for take in takes), initial=0)
        of_lanes = [torch.arange(take * self._steps) + first for take, first in zip(takes, firsts, strict=False)]
        return torch.cat([places.view(self._steps, -1) for places in of_lanes], dim=1).flatten()

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
        with torch.cuda.stream(self._copies):
            lists = ListBatches(concatenate_logs(logs), device=self._device)
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
        raise DataError(
            f"streaming needs at least {count} training requests", got=len(shards), hint="set data.stream=no"
        )
    return parts
