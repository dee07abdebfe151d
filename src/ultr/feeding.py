"""Batches of lists by the number of the step: from a log in memory, or from shards that are larger than it.

Which requests a step has follows from the seed and its number alone, so that training stopped at any step goes on with
the next one, and so that several processes, each with its parts of every batch, take the steps that one would take.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ultr.errors import DataError, OptionError
from ultr.lists import ListBatches, Lists, Part
from ultr.log import Log
from ultr.log.shards import RowGroup, Shards, joined_logs
from ultr.processes import PARTS, local_size, own_share, parts_of, size
from ultr.simulate import User

BUFFER_BYTES = 128 << 20  # of requests that are mixed with one another, and as much again while the next are read
AHEAD = 4  # batches made before they are asked for
MOST_WORKERS = 8  # threads that read, where there are cores for them


class Feeding(Protocol):
    """The lists of a step."""

    def __call__(self, step: int) -> Lists: ...


def step_seed(seed: int, *numbers: int) -> int:
    """A seed of its own for each step and purpose."""
    return int(np.random.SeedSequence((seed, *numbers)).generate_state(1, np.uint64)[0] >> 1)


class Feed:
    """From a log in memory: each request once before any comes again, in an order by the seed.

    With a `user`, feedback is drawn anew for every step; otherwise it is that of the log. `requests` are those that are
    taken, by their number; all if not given.
    """

    def __init__(
        self,
        lists: ListBatches,
        *,
        batch: int,
        seed: int,
        user: User | None = None,
        requests: np.ndarray | None = None,
    ) -> None:
        self._lists = lists
        self._requests = torch.arange(len(lists)) if requests is None else torch.from_numpy(requests)
        self._batch, self._seed, self._user = min(batch, len(self._requests)), seed, user
        self._parts, self._own = parts_of(self._batch), own_share(self._batch)
        self._shown = lists if size() == 1 or user is None else lists.without_features()
        self._generator = torch.Generator(lists.device)
        self._order: dict[int, Tensor] = {}
        if user is None and not lists.has_actions:
            raise DataError("the log has no actions to learn from", mend="name them with --actions, or pass --users")

    def __call__(self, step: int) -> Lists:
        first = step * self._batch
        wanted = np.arange(first, first + self._batch)
        passes = wanted // len(self._requests)
        requests = torch.cat(
            [self._pass(p)[wanted[passes == p] % len(self._requests)] for p in np.unique(passes).tolist()]
        )
        lists = self._lists.batch(requests[self._own], self._parts)
        if self._user is None:
            return lists
        whole = lists if self._shown is self._lists else self._shown[requests]  # users are drawn for all processes
        self._generator.manual_seed(step_seed(self._seed, step, 1))
        relevance, positions = whole.true_relevance, whole.shown_positions
        feedback = self._user.sample(relevance, positions, self._generator, where=whole.where, check=False)
        if whole is lists:
            return lists.with_actions(feedback.actions)
        longest = lists.where.shape[1]
        return lists.with_actions({name: drawn[self._own, :longest] for name, drawn in feedback.actions.items()})

    def _pass(self, number: int) -> Tensor:
        if number not in self._order:
            generator = torch.Generator().manual_seed(step_seed(self._seed, number, 0))
            self._order = {n: order for n, order in self._order.items() if n == number - 1}
            self._order[number] = self._requests[torch.randperm(len(self._requests), generator=generator)]
        return self._order[number]


class Piece(NamedTuple):
    """Every `of`-th request of a row group, from the `first` on; all of them but where row groups are few."""

    group: RowGroup
    first: int = 0
    of: int = 1

    @property
    def requests(self) -> int:
        return len(range(self.first, self.group.requests, self.of))


class Span(NamedTuple):
    """Some of the requests of a window, in the order they are mixed to."""

    window: int
    first: int
    last: int


class Lane:
    """The requests that one part of every batch is taken from: pieces in an order by the pass, a few at a time mixed.

    Lanes divide the shards, so that processes that have different parts read different files.
    """

    def __init__(self, number: int, pieces: Sequence[Piece], *, take: int, seed: int, at_once: float) -> None:
        self.number, self.take, self._seed = number, take, seed
        self._pieces, self._at_once = pieces, at_once
        self._requests = sum(piece.requests for piece in pieces)
        self.windows, self.ends = lru_cache(maxsize=3)(self._windows), lru_cache(maxsize=3)(self._ends)

    def _windows(self, number: int) -> list[list[Piece]]:
        """The pieces of a pass, in groups of about so many requests as are mixed at once."""
        order = np.random.default_rng(step_seed(self._seed, number, 3, self.number)).permutation(len(self._pieces))
        windows: list[list[Piece]] = []
        held = self._at_once
        for piece in (self._pieces[i] for i in order):
            if held + piece.requests > self._at_once:
                windows.append([])
                held = 0
            windows[-1].append(piece)
            held += piece.requests
        return windows

    def _ends(self, number: int) -> list[int]:
        """How many requests of a pass have come by the end of each window."""
        return list(accumulate(sum(piece.requests for piece in window) for window in self.windows(number)))

    def spans(self, step: int) -> list[tuple[int, Span]]:
        """What a step takes: of which pass, and of it which requests of which window."""
        found, first, last = [], step * self.take, (step + 1) * self.take
        while first < last:
            number, offset = divmod(first, self._requests)
            ends = self.ends(number)
            window = bisect_right(ends, offset)
            begun = ends[window - 1] if window else 0
            start = offset - begun
            stop = min(ends[window] - begun, start + last - first)
            found.append((number, Span(window, start, stop)))
            first += stop - start
        return found

    def next_window(self, number: int, window: int) -> tuple[int, int]:
        return (number, window + 1) if window + 1 < len(self.windows(number)) else (number + 1, 0)

    def order(self, number: int, window: int, requests: int) -> Tensor:
        generator = torch.Generator().manual_seed(step_seed(self._seed, number, 4, self.number, window))
        return torch.randperm(requests, generator=generator)


class Window(NamedTuple):
    """Requests in memory, and the order they come in."""

    lists: ListBatches
    order: Tensor


class Stream:
    """From shards: pieces are read in the background and mixed in a buffer of bounded size.

    Memory does not depend on the size of the data, and batches not on the number of `workers` (0: as cores allow).
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
            raise OptionError(f"a batch from shards has {PARTS} lists or more", got=batch, mend="raise --batch")
        if not shards.manifest.actions:
            raise DataError("the lists have no actions to learn from", mend="name them to ultr prepare with --actions")
        self._shards, self._device, self._view = shards, torch.device(device), view
        parts = parts_of(min(batch, len(shards)))
        count = PARTS if PARTS % size() == 0 else size()
        bytes_a_request = shards.row_bytes * shards.rows / len(shards)
        at_once = buffer_bytes / count / bytes_a_request
        pieces = divided(shards, count)
        self._lanes = [Lane(n, pieces[n], take=take, seed=seed, at_once=at_once) for n, take in parts]
        self._windows: dict[tuple[int, int, int], Future[Window]] = {}
        self._readers = ThreadPoolExecutor(workers or usual_workers(), thread_name_prefix="ultr-read")
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="ultr-batch")
        self._made: deque[tuple[int, Future[Lists]]] = deque()

    def __call__(self, step: int) -> Lists:
        if not self._made or self._made[0][0] != step:
            for _, future in self._made:
                future.cancel()
            self._made.clear()
        while len(self._made) < AHEAD:
            ahead = step + len(self._made)
            self._made.append((ahead, self._maker.submit(self._make, ahead)))
        return self._made.popleft()[1].result().to(self._device)

    def _make(self, step: int) -> Lists:
        """The lists of a step, lane after lane; only one thread is ever in here."""
        found = []
        needed = [(lane, lane.spans(step)) for lane in self._lanes]
        for lane, spans in needed:
            self._ask(lane, [(number, span.window) for number, span in spans])
        for lane, spans in needed:  # what comes next is asked for after what is needed now
            number, last = spans[-1]
            self._ask(lane, [(n, span.window) for n, span in spans] + [lane.next_window(number, last.window)])
        for lane, spans in needed:
            taken = []
            for number, span in spans:
                window = self._windows[lane.number, number, span.window].result()
                taken.append(window.lists[window.order[span.first : span.last]])
            lists = Lists.together(taken)
            found.append((lists, Part(lane.number, len(lists), lists.where.shape[1])))
        parts = tuple(part for _, part in found)
        return Lists.together([lists for lists, _ in found]).in_parts(parts)

    def _ask(self, lane: Lane, wanted: list[tuple[int, int]]) -> None:
        """Have these windows of a lane read, if they are not yet; others are let go, but the one after them."""
        kept = [*wanted, lane.next_window(*wanted[-1])]
        for key in [key for key in self._windows if key[0] == lane.number and key[1:] not in kept]:
            self._windows.pop(key).cancel()
        for number, window in wanted:
            key = (lane.number, number, window)
            if key not in self._windows:
                self._windows[key] = self._readers.submit(self._read, lane, number, window)

    def _read(self, lane: Lane, number: int, window: int) -> Window:
        logs = []
        for piece in lane.windows(number)[window]:
            log = self._view(self._shards.read(piece.group))
            logs.append(log if piece.of == 1 else log.select(np.arange(piece.first, len(log), piece.of)))
        lists = ListBatches(joined_logs(logs))
        return Window(lists, lane.order(number, window, len(lists)))


def usual_workers() -> int:
    """A thread for each core of this process but the one that trains."""
    return max(1, min(MOST_WORKERS, (os.cpu_count() or 1) // local_size() - 1))


def divided(shards: Shards, count: int) -> list[list[Piece]]:
    """The pieces of shards in so many parts, alike in their number of requests: each gives as much to a batch.

    Row groups go to the parts in rounds, those alike in size together; what is left over is cut, for all to have a bit.
    """
    groups = sorted(shards.groups, key=lambda group: -group.requests)
    whole = len(groups) - len(groups) % count
    left = [Piece(group, first, count) for group in groups[whole:] for first in range(count)]
    parts: list[list[Piece]] = [[] for _ in range(count)]
    held = [0] * count
    for piece in [*(Piece(group) for group in groups[:whole]), *sorted(left, key=lambda piece: -piece.requests)]:
        if piece.requests:
            least = held.index(min(held))
            parts[least].append(piece)
            held[least] += piece.requests
    if not min(held):
        raise DataError(f"there should be {count} requests or more to read in pieces", got=len(shards))
    return parts
