"""Training batches, made of lists (the items of a request): from a log in memory, or from shards larger than memory.

The requests of a batch depend only on the seed and the step number, so training that was stopped can resume with the
next step. If several processes train one model, each gets some parts of every batch, and the batches are the same as
with one process.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ultr.datasets.users import User
from ultr.errors import DataError, OptionError
from ultr.lists import ListBatches, Lists, Part
from ultr.log import Log
from ultr.log.shards import RowGroup, Shards, concatenate_logs
from ultr.utils.distributed import PARTS, local_size, own_share, parts_of, size
from ultr.utils.noise import Noise

BUFFER_BYTES = 128 << 20  # size of the shuffle buffer; memory holds twice this while the next requests are read
AHEAD = 4  # batches prepared in advance
STEPS_AT_ONCE, REQUESTS_AT_ONCE = 64, 1 << 18  # bounds of what a feed in memory chooses at once
MOST_REQUESTS = 1 << 24  # of a part of a batch
MOST_WORKERS = 8  # largest default number of reading threads


class Batch(Protocol):
    """What a feed has chosen for a step: tensors on the device of the feed, and the parts of the batch."""

    @property
    def parts(self) -> tuple[Part, ...]: ...

    @property
    def tensors(self) -> list[Tensor]: ...

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return a copy with `function` applied to every tensor."""


class Feeding(Protocol):
    """A source of training batches. `feed(step)` returns the lists of a step, which are made in two stages.

    `choose` returns what the lists are made of. `lists` makes them, by work on the device alone, which a GPU can repeat
    for other tensors of the same shapes.
    """

    def choose(self, step: int) -> Batch: ...

    def lists(self, batch: Any) -> Lists: ...

    def __call__(self, step: int) -> Lists: ...


def step_seed(seed: int, *numbers: int) -> int:
    """Derive a seed from `seed` and further numbers, such as the step and a code for the purpose."""
    return int(np.random.SeedSequence((seed, *numbers)).generate_state(1, np.uint64)[0] >> 1)


class Chosen(NamedTuple):
    """The requests that a feed has chosen for a step, and the seed of their simulated feedback."""

    requests: Tensor  # indices of the requests of this process
    key: Tensor  # the seed of random numbers on a GPU
    parts: tuple[Part, ...]
    everyone: Tensor  # indices of the requests of all processes, on the CPU
    step: int

    @property
    def tensors(self) -> list[Tensor]:
        return [self.requests, self.key]

    def map(self, function: Callable[[Tensor], Tensor]) -> Chosen:
        return self._replace(requests=function(self.requests), key=function(self.key))


class Feed:
    """Batches from a log in memory. Each pass over the log (epoch) takes the requests in a new random order.

    With a simulated `user`, new feedback is sampled at each step; without, the feedback of the log is used. `requests`
    are the indices of the requests to use; the default is all requests. The lists of a `keyed` feed have a key for
    random numbers, as a GPU needs it; the default is whether the log is on a GPU.
    """

    def __init__(
        self,
        lists: ListBatches,
        *,
        batch: int,
        seed: int,
        user: User | None = None,
        requests: np.ndarray | None = None,
        keyed: bool | None = None,
    ) -> None:
        self.source = lists
        self._requests = torch.arange(len(lists)) if requests is None else torch.from_numpy(requests)
        self._batch, self._seed, self.user = min(batch, len(self._requests)), seed, user
        self._sizes, self._own = parts_of(self._batch), own_share(self._batch)
        self._keyed = lists.device.type == "cuda" if keyed is None else keyed
        self._shown = lists if size() == 1 or user is None else lists.without_features()
        self._generator = torch.Generator(lists.device)
        self._order: dict[int, Tensor] = {}
        self.steps_at_once = max(1, min(STEPS_AT_ONCE, REQUESTS_AT_ONCE // self._batch))
        self.plan = lru_cache(maxsize=2)(self._make_plan)
        self._longest = int(lists.lengths.max())
        if user is None and not lists.has_actions:
            hint = "name the feedback columns with --actions, or pass --users to simulate feedback"
            raise DataError("the log has no actions to learn from", hint=hint)

    def __call__(self, step: int) -> Lists:
        return self.lists(self.choose(step))

    def choose(self, step: int) -> Chosen:
        number, place = divmod(step, self.steps_at_once)
        return self.plan(number).at(place, step)

    def lists(self, batch: Chosen) -> Lists:
        if self._keyed:
            return keyed_lists(self.source, batch, self.user)
        lists = self.source[batch.requests].with_parts(batch.parts)
        if self.user is None:
            return lists
        # Feedback is sampled for the whole batch, so that it does not depend on the number of processes.
        whole = lists if self._shown is self.source else self._shown[batch.everyone]
        self._generator.manual_seed(step_seed(self._seed, batch.step, 1))
        actions = feedback_on(whole, self.user, self._generator)
        if whole is lists:
            return lists.with_actions(actions)
        longest = lists.where.shape[1]
        return lists.with_actions({name: values[self._own, :longest] for name, values in actions.items()})

    def _make_plan(self, number: int) -> Plan:
        """Choose the requests of several steps at once, because every copy to a GPU takes time."""
        steps = range(number * self.steps_at_once, (number + 1) * self.steps_at_once)
        places = np.arange(steps.start * self._batch, steps.stop * self._batch)
        passes = places // len(self._requests)
        requests = torch.cat(
            [self._pass(p)[places[passes == p] % len(self._requests)] for p in np.unique(passes).tolist()]
        ).view(len(steps), self._batch)
        keys = torch.tensor([step_seed(self._seed, step, 1) if self._keyed else 0 for step in steps])
        own = requests[:, self._own]
        lengths = self.source.lengths[own]
        device = self.source.device
        return Plan(own.to(device), keys.to(device), [self._parts(row) for row in lengths], requests)

    def _parts(self, lengths: Tensor) -> tuple[Part, ...]:
        """Return the parts of a batch, given the lengths of its lists.

        Those of a keyed feed are padded to one of few lengths, because a GPU captures a step for each length.
        """
        counts = [count for _, count in self._sizes]
        longest = [int(part.max()) for part in torch.split(lengths, counts)]
        if self._keyed:
            longest = [padded_length(max(longest), self._longest)] * len(counts)
        return tuple(Part(n, count, most) for (n, count), most in zip(self._sizes, longest, strict=True))

    def _pass(self, number: int) -> Tensor:
        if number not in self._order:
            generator = torch.Generator().manual_seed(step_seed(self._seed, number, 0))
            self._order = {n: order for n, order in self._order.items() if n == number - 1}
            self._order[number] = self._requests[torch.randperm(len(self._requests), generator=generator)]
        return self._order[number]


class Plan(NamedTuple):
    """The requests of several steps."""

    requests: Tensor  # [steps, requests of this process], on the device
    keys: Tensor  # [steps] seeds of simulated feedback, on the device
    parts: list[tuple[Part, ...]]
    everyone: Tensor  # [steps, requests of all processes], on the CPU

    def at(self, place: int, step: int) -> Chosen:
        return Chosen(self.requests[place], self.keys[place], self.parts[place], self.everyone[place], step)


class FeedStack:
    """The batches of several keyed feeds of the same size: the lists of the first feed, then those of the next."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._feeds, self._user = list(feeds), feeds[0].user
        sources = list(dict.fromkeys(feed.source for feed in feeds))  # runs with the same seed share their requests
        self._source = ListBatches.joined(sources)
        firsts = dict(zip(sources, np.cumsum([0, *map(len, sources)]).tolist(), strict=False))
        self._first = [firsts[feed.source] for feed in feeds]
        self._plan = lru_cache(maxsize=2)(self._make_plan)

    def __call__(self, step: int) -> Lists:
        return self.lists(self.choose(step))

    def choose(self, step: int) -> Chosen:
        number, place = divmod(step, self._feeds[0].steps_at_once)
        return self._plan(number).at(place, step)

    def lists(self, batch: Chosen) -> Lists:
        return keyed_lists(self._source, batch, self._user)

    def _make_plan(self, number: int) -> Plan:
        plans = [feed.plan(number) for feed in self._feeds]
        return Plan(
            torch.cat([plan.requests + first for plan, first in zip(plans, self._first, strict=True)], dim=1),
            torch.stack([plan.keys for plan in plans], dim=1),
            [max(parts, key=lambda p: p[0].longest) for parts in zip(*(plan.parts for plan in plans), strict=True)],
            plans[0].everyone,
        )


def feedback_on(lists: Lists, user: User, noise: torch.Generator | Noise) -> dict[str, Tensor]:
    relevance, positions = lists.true_relevance, lists.shown_positions
    return user.sample(relevance, positions, noise, where=lists.where, check=False).actions


def keyed_lists(source: ListBatches, batch: Chosen, user: User | None) -> Lists:
    """Return the requests of a batch as lists, with newly simulated feedback if there is a `user`."""
    lists = source.gather(batch.requests, batch.parts[0].longest, padded=source.padded)
    lists = lists.with_parts(batch.parts, batch.key)
    return lists if user is None else lists.with_actions(feedback_on(lists, user, noise_of(lists)))


def padded_length(longest: int, most: int) -> int:
    """Return a length to pad lists to: the next multiple of 8, but not above `most`, the longest list of the log."""
    return min(most, -(-longest // 8) * 8)


def noise_of(lists: Lists) -> Noise:
    """Return the random numbers of a training step on a GPU, which depend on the key and the parts of its batch."""
    assert lists.key is not None  # noqa: S101 - the batch of a step on a GPU has a key
    return Noise(lists.key, row_numbers(lists.parts, lists.where.device), lists.where.shape[1])


@lru_cache(maxsize=64)
def row_numbers(parts: tuple[Part, ...], device: torch.device) -> Tensor:
    """Return a number for each request of a batch that does not depend on how processes divide the batch."""
    numbers = [torch.arange(part.requests) + part.number * MOST_REQUESTS for part in parts]
    return torch.cat(numbers).to(device)


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
