"""`synthetic`: a generated data set with the traits of web search, which needs no download.

A document has a hidden vector: a vector of its request plus a vector of its own. Its 136 features are noisy views
(random projections) of the hidden vector: plain, squashed, heavy-tailed, sparse or quantised. Some views show the
request's vector only. The grade is a noisy function of the hidden vector that no linear ranker can represent: a linear
part, products, a bump (best in the middle) and a part whose sign depends on the request. Thresholds turn its value into
grades that are as frequent as in web search. Each seed draws other views, and all seeds are about equally hard.

`synthetic-trees`: a generated data set with another law, by which no default was chosen. Its 24 features are of the
kinds of a shop: heavy-tailed, counts, shares and marks, some of the request only. The grade is a noisy sum of small
decision trees, and lists are of very different lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ultr.datasets.base import Dataset
from ultr.log import Log

SHORTEST, LONGEST = 10, 40  # documents of a request
HIDDEN = 16  # numbers in a hidden vector
REQUEST_SHARE = 0.5  # share of the request's vector in the variance of the hidden vector

GRADE_SHARES = (0.52, 0.32, 0.13, 0.02, 0.01)  # share of documents with grade 0 to 4
LINEAR, PRODUCTS, BUMP, GATED, NOISE = 0.6, 0.5, 0.4, 0.45, 0.4  # standard deviation of each part of the grade
REFERENCE_REQUESTS = 8000  # requests drawn to place the cuts between grades

DOCUMENT_VIEWS = {"plain": 30, "squashed": 26, "heavy": 24, "sparse": 22, "quantised": 22}
REQUEST_VIEWS = 12  # fewer than `HIDDEN`, so that they do not determine the request's vector
FEATURES = sum(DOCUMENT_VIEWS.values()) + REQUEST_VIEWS
VIEW_NOISE = (0.4, 1.5)  # minimum and maximum noise of a feature, for a signal of standard deviation 1


def make_synthetic(seed: int = 0, requests: tuple[int, int, int] = (3000, 600, 600)) -> Dataset:
    """Generate a data set; `requests` are the numbers of training, validation and test requests."""
    return _generated("synthetic", _World, seed, requests)


def _generated(name: str, make: type[_World | _TreeWorld], seed: int, requests: tuple[int, int, int]) -> Dataset:
    # The world and each split have their own random streams, so that the world does not depend on the sizes of splits.
    world_stream, *streams = np.random.default_rng(seed).spawn(1 + len(requests))
    world = make(world_stream)
    first_ids = np.cumsum((0, *requests[:-1]))
    train, validation, test = map(world.log, streams, requests, first_ids)
    fingerprint = "-".join((f"{name}-v1", f"seed{seed}", *map(str, requests)))
    return Dataset(name, train, validation, test, max_grade=len(world.cuts), fingerprint=fingerprint)


class _Drawn(NamedTuple):
    lengths: np.ndarray  # [requests]
    request: np.ndarray  # [requests, HIDDEN] the request's vector, of standard deviation 1
    hidden: np.ndarray  # [rows, HIDDEN] of standard deviation 1


class _World:
    """The random views and the cuts between grades, which are the same in every split."""

    def __init__(self, rng: np.random.Generator) -> None:
        directions = _normal(rng, HIDDEN, FEATURES)
        self.directions = directions / np.linalg.norm(directions, axis=0)
        self.noise = rng.uniform(*VIEW_NOISE, FEATURES).astype(np.float32)
        self.cuts = np.quantile(_worth(rng, _draw(rng, REFERENCE_REQUESTS)), np.cumsum(GRADE_SHARES[:-1]))

    def log(self, rng: np.random.Generator, requests: int, first_id: int) -> Log:
        drawn = _draw(rng, requests)
        return Log(
            features=self._features(rng, drawn),
            offsets=np.concatenate(([0], np.cumsum(drawn.lengths))),
            request_ids=pa.array(np.arange(first_id, first_id + requests, dtype=np.int64)),
            feature_names=tuple(str(number) for number in range(1, FEATURES + 1)),
            relevance=np.searchsorted(self.cuts, _worth(rng, drawn)).astype(np.float32),
        )

    def _features(self, rng: np.random.Generator, drawn: _Drawn) -> np.ndarray:
        *bounds, documents_end = np.cumsum(list(DOCUMENT_VIEWS.values()))
        of_document, of_request = slice(None, documents_end), slice(documents_end, None)
        views = self._views(rng, drawn.hidden, of_document)
        plain, squashed, heavy, sparse, quantised = np.split(views, bounds, axis=1)
        request = np.repeat(self._views(rng, drawn.request, of_request), drawn.lengths, axis=0)
        columns = (plain, np.tanh(squashed), np.exp(heavy), np.maximum(sparse - 1, 0), np.rint(2 * quantised), request)
        return np.concatenate(columns, axis=1)

    def _views(self, rng: np.random.Generator, hidden: np.ndarray, features: slice) -> np.ndarray:
        """Return the noisy views of hidden vectors that `features` selects, each of standard deviation 1."""
        signal, noise = hidden @ self.directions[:, features], self.noise[features]
        views: np.ndarray = (signal + noise * _normal(rng, *signal.shape)) / np.sqrt(1 + noise**2)
        return views


def _draw(rng: np.random.Generator, requests: int) -> _Drawn:
    lengths = rng.integers(SHORTEST, LONGEST, requests, endpoint=True)
    request = _normal(rng, requests, HIDDEN)
    own = _normal(rng, lengths.sum(), HIDDEN)
    hidden = REQUEST_SHARE**0.5 * np.repeat(request, lengths, axis=0) + (1 - REQUEST_SHARE) ** 0.5 * own
    return _Drawn(lengths, request, hidden)


def _worth(rng: np.random.Generator, drawn: _Drawn) -> np.ndarray:
    """Return the value of each document that is cut into grades: a weighted sum of uncorrelated parts of variance 1."""
    z = drawn.hidden.T
    linear = (z[0] + z[1] + z[2]) / 3**0.5
    products = (z[3] * z[4] + z[5] * z[6]) / 2**0.5
    bump = np.exp(-(z[7] ** 2)) / 0.337  # the standard deviation of exp(-z²) for a standard normal z
    gated = np.repeat(np.sign(drawn.request[:, 8]), drawn.lengths) * z[9]
    noise = _normal(rng, len(linear))
    worth: np.ndarray = LINEAR * linear + PRODUCTS * products + BUMP * bump + GATED * gated + NOISE * noise
    return worth


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


# --- synthetic-trees --------------------------------------------------------------------------------------------------

TREES, DEPTH = 40, 4  # trees whose sum is cut into grades; each splits all its nodes of a level in the same way
KINDS = 4  # of features: heavy-tailed, counts, shares, marks
OF_ITEM, OF_REQUEST = 18, 6  # features
FACTORS = 5  # hidden numbers that features of an item have in common
TREE_GRADES = (0.6, 0.2, 0.12, 0.05, 0.03)  # share of items with grade 0 to 4
TREE_NOISE = 0.5  # standard deviation, where that of the sum of trees is 1
TREE_LENGTHS = (2.9, 0.6, 5, 80)  # of lists: mean and deviation of the logarithm, smallest, largest


def make_synthetic_trees(seed: int = 0, requests: tuple[int, int, int] = (3000, 600, 2000)) -> Dataset:
    """Generate a data set whose grades are a noisy sum of trees of few, mixed features."""
    return _generated("synthetic-trees", _TreeWorld, seed, requests)


class _TreeWorld:
    """The trees, what the features of an item have in common, and the cuts between grades."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.loadings = _normal(rng, FACTORS, OF_ITEM)
        self.features = rng.integers(OF_ITEM + OF_REQUEST, size=(TREES, DEPTH))
        self.splits = _normal(rng, TREES, DEPTH) * 0.7
        self.leaves = _normal(rng, TREES, 2**DEPTH)
        self.scale = 1.0
        _, hidden = self._draw(rng, REFERENCE_REQUESTS)
        self.scale = float(self._sum(hidden).std())
        self.cuts = np.quantile(self._worth(rng, hidden), np.cumsum(TREE_GRADES[:-1]))

    def log(self, rng: np.random.Generator, requests: int, first_id: int) -> Log:
        lengths, hidden = self._draw(rng, requests)
        return Log(
            features=_seen(hidden),
            offsets=np.concatenate(([0], np.cumsum(lengths))),
            request_ids=pa.array(np.arange(first_id, first_id + requests, dtype=np.int64)),
            feature_names=tuple(f"f{number}" for number in range(OF_ITEM + OF_REQUEST)),
            relevance=np.searchsorted(self.cuts, self._worth(rng, hidden)).astype(np.float32),
        )

    def _draw(self, rng: np.random.Generator, requests: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the lengths of lists, and the hidden value of each feature, of standard deviation about 1."""
        mean, deviation, shortest, longest = TREE_LENGTHS
        lengths = np.clip(np.exp(mean + deviation * _normal(rng, requests)), shortest, longest).astype(np.int64)
        rows = int(lengths.sum())
        common = _normal(rng, rows, FACTORS) @ self.loadings / FACTORS**0.5
        own = (common + _normal(rng, rows, OF_ITEM)) / 2**0.5
        return lengths, np.concatenate([own, np.repeat(_normal(rng, requests, OF_REQUEST), lengths, axis=0)], axis=1)

    def _sum(self, hidden: np.ndarray) -> np.ndarray:
        total = np.zeros(len(hidden), np.float32)
        for features, splits, leaves in zip(self.features, self.splits, self.leaves, strict=True):
            total += leaves[(hidden[:, features] > splits) @ (1 << np.arange(DEPTH))]
        return total / np.float32(self.scale)

    def _worth(self, rng: np.random.Generator, hidden: np.ndarray) -> np.ndarray:
        worth: np.ndarray = self._sum(hidden) + TREE_NOISE * _normal(rng, len(hidden))
        return worth


def _seen(hidden: np.ndarray) -> np.ndarray:
    """Return features as a shop has them: prices, counts, shares and marks, in turn."""
    seen = hidden.copy()
    seen[:, 0::KINDS] = np.exp(1.2 * hidden[:, 0::KINDS])
    seen[:, 1::KINDS] = np.floor(np.exp(hidden[:, 1::KINDS] + 1.5))
    seen[:, 2::KINDS] = 1 / (1 + np.exp(-2 * hidden[:, 2::KINDS]))
    seen[:, 3::KINDS] = hidden[:, 3::KINDS] > np.float32(0.5)
    return seen
