"""Training steps on a GPU, each as one CUDA graph.

A step of a small network is many short kernels, and starting each of them takes longer than its work. A graph starts
them all at once. It repeats exactly the work that was captured, on whatever its input tensors hold by then, so the
requests, the learning rate and the keys of random numbers are tensors that are overwritten before each step.

While a graph takes a step, another branch of it makes the lists of the next step.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ultr.lists import Lists
from ultr.training.feed import Batch, Feeding
from ultr.utils.distributed import is_main, size

WARM_UP = 3  # steps that are taken as usual before a graph is captured, so that libraries have set themselves up
MOST_GRAPHS = 16  # captured at most: one for each length of padded lists and length of the next ones

WorkOfStep = Callable[[Lists], Tensor]  # takes a step by work on the device alone, and returns its loss


@dataclass(frozen=True)
class Graph:
    """A captured step."""

    graph: torch.cuda.CUDAGraph
    loss: Tensor  # written by the graph


class GraphedSteps:
    """Take training steps on the batches of a feed: the first of a shape as usual, the others by a graph.

    A step that cannot be captured is taken as usual, with the same result; a warning says so once.
    """

    def __init__(self, feed: Feeding, work: WorkOfStep, device: torch.device) -> None:
        self._feed, self._work, self._device = feed, work, device
        self._stream, self._side = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._next: tuple[int, Batch] | None = None  # the next step and what the feed has chosen for it
        self._graphs: dict[Hashable, Graph] = {}
        self._seen: Counter[Hashable] = Counter()
        self._batches: dict[Hashable, Batch] = {}  # by shape: what a graph makes the next lists of
        self._lists: dict[Hashable, Lists] = {}  # by shape of their batch: lists that a graph reads
        self._made = -1  # the step whose lists are in `_lists`
        self._pool: Any = None
        self._enabled = size() == 1
        if not self._enabled and is_main():
            _warn("several processes train this model")

    def choose(self, step: int) -> Batch:
        """Return what the feed chooses for a step."""
        return self._feed.choose(step) if self._next is None or self._next[0] != step else self._next[1]

    def take(self, step: int, batch: Batch) -> Tensor:
        """Take a step with the lists of a batch; return its loss, which the next step overwrites."""
        if not self._enabled:
            return self._take_as_usual(batch)
        self._next = step + 1, self._feed.choose(step + 1)
        shape, following = _shape(batch), _shape(self._next[1])
        if (graph := self._graphs.get((shape, following))) is None:
            self._seen[shape] += 1
            if self._seen[shape] <= WARM_UP or len(self._graphs) == MOST_GRAPHS:
                return self._take_as_usual(batch)
            if (graph := self._capture(batch, self._next[1])) is None:
                return self._take_as_usual(batch)
            self._graphs[shape, following] = graph
        if self._made != step:
            _copy(self._feed.lists(batch).tensors, self._lists[shape].tensors)
        _copy(self._next[1].tensors, self._batches[following].tensors)
        graph.graph.replay()
        self._made = step + 1
        return graph.loss

    def _take_as_usual(self, batch: Batch) -> Tensor:
        """Take a step on the stream of the captures, because a graph must not depend on work of another stream."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            loss = self._work(self._feed.lists(batch))
        current.wait_stream(self._stream)
        return loss

    def _capture(self, batch: Batch, following: Batch) -> Graph | None:
        """Record a step, without taking it; return None if it contains work that cannot be recorded."""
        for each in (batch, following):
            if _shape(each) not in self._batches:
                self._batches[_shape(each)] = each.map(torch.clone)
                self._lists[_shape(each)] = self._feed.lists(each).map(torch.clone)
        lists, next_batch, next_lists = (
            self._lists[_shape(batch)],
            self._batches[_shape(following)],
            self._lists[_shape(following)],
        )
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        try:
            # Other threads may go on to fill the memory of the GPU with the next requests of a stream.
            mode = "thread_local"
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode):
                self._side.wait_stream(self._stream)
                with torch.cuda.stream(self._side):
                    made = self._feed.lists(next_batch)
                loss = self._work(lists)
                self._stream.wait_stream(self._side)
                _copy(made.tensors, next_lists.tensors)
        except RuntimeError as error:
            self._enabled = False
            _warn(" ".join(str(error).split())[:300])
            return None
        self._pool = graph.pool()
        return Graph(graph, loss)


def _shape(batch: Batch) -> Hashable:
    return batch.parts, tuple(values.shape for values in batch.tensors)


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    torch._foreach_copy_(targets, sources)


def _warn(why: str) -> None:
    warnings.warn(f"steps are not captured as CUDA graphs, so training is slower: {why}", stacklevel=3)
