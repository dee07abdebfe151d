"""Training batches, made of lists (the items of a request), from a log in memory; `ultr.training.stream` has others.

The requests of a batch depend only on the seed and the step number, so training that was stopped can resume with the
next step. If several processes train one model, each gets some parts of every batch, and the batches are the same as
with one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ultr.datasets.users import User
from ultr.errors import DataError
from ultr.lists import ListBatches, Lists, Part
from ultr.utils.distributed import own_share, parts_of, size
from ultr.utils.noise import Noise

STEPS_AT_ONCE, REQUESTS_AT_ONCE = 64, 1 << 18  # bounds of what a feed in memory chooses at once
MOST_REQUESTS = 1 << 24  # of a part of a batch


class Batch(Protocol):
    """The choice of a feed for a step: tensors on the device of the feed, and the parts of the batch."""

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

    def __call__(self, step: int) -> Lists:
        return self.lists(self.choose(step))


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


class Feed(Feeding):
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
        return Plan(own.to(device), keys.to(device), self._parts(lengths), requests)

    def _parts(self, lengths: Tensor) -> list[tuple[Part, ...]]:
        """Return the parts of each batch, given the lengths of its lists [batches, lists].

        Those of a keyed feed are padded to one of few lengths, because a GPU captures a step for each length.
        """
        counts = [count for _, count in self._sizes]
        if self._keyed:
            longest = lengths.amax(1).tolist()
            of_parts = [[padded_length(most, self._longest)] * len(counts) for most in longest]
        else:
            of_parts = torch.stack([part.amax(1) for part in torch.split(lengths, counts, dim=1)], dim=1).tolist()
        return [
            tuple(Part(n, count, most) for (n, count), most in zip(self._sizes, longest, strict=True))
            for longest in of_parts
        ]

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


class FeedStack(Feeding):
    """The batches of several keyed feeds of the same size: the lists of the first feed, then those of the next."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._feeds, self._user = list(feeds), feeds[0].user
        sources = list(dict.fromkeys(feed.source for feed in feeds))  # runs with the same seed share their requests
        self._source = ListBatches.joined(sources)
        firsts = dict(zip(sources, np.cumsum([0, *map(len, sources)]).tolist(), strict=False))
        self._first = [firsts[feed.source] for feed in feeds]
        self._plan = lru_cache(maxsize=2)(self._make_plan)

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
