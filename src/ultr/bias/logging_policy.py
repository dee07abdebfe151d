"""The logging policy: the ranker that ordered the items of a log, recovered from the order that it showed.

A Plackett-Luce model of the features, linear or a network, gives a score under which that order is most likely. Items
with similar scores form a stratum: the logging ranker found them equally good, so where their positions differ, only
examination differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from ultr.lists import ListBatches, Lists
from ultr.log import Log
from ultr.log.sampling import sample_requests
from ultr.log.splits import queries_of, row_hashes, split_by_query
from ultr.rankers import FeatureEncoder, LinearRanker, fit_encoders, make_ranker, score_rows
from ultr.utils.distributed import threads_for
from ultr.utils.files import atomic_path
from ultr.utils.jsonfiles import load_tensors, save_tensors
from ultr.utils.optimisation import EarlyStopping, FlatAdagrad, minimise

SCORED_ROWS = 20_000  # the linear score is learned from a sample of this many rows, or thirty per feature if more
STRATA = 20  # most quantiles of the score, and of its mean over a list
CLICKS_IN_STRATUM = 25  # mean number of clicks that a stratum should have
HELD_OUT = 1000  # most requests on which a network is compared with a linear score
FEW_REQUESTS = 500  # a network is not tried with this many requests or fewer
MUCH_OPEN = 0.2  # a network is tried if a linear score leaves more than this share of the order unexplained (in nats)
CLEARLY_MORE = 0.02  # a network is used if it explains this much more of the order than a linear score
NETWORK = {"hidden": (128, 64), "dropout": 0.1}
NETWORK_LR, NETWORK_STEPS, NETWORK_EVALUATE_EVERY, NETWORK_PATIENCE = 0.05, 1000, 50, 3
NETWORK_BATCH = 64  # requests per step; 256 take three times as long, and explain the order as well


@dataclass(frozen=True, eq=False)
class LoggingScore:
    """The score of each row in a model of the logging ranker, under which the logged order is most likely."""

    score: np.ndarray  # [rows]
    explained: float  # share of the order of held-out requests, in nats: 0 for chance, 1 for an exact prediction
    ranker: torch.nn.Module  # the model: a LinearRanker, or the network that `policy_network` makes


_CACHE: MutableMapping[Log, dict[int, LoggingScore]] = WeakKeyDictionary()
_FOLDERS: MutableMapping[Log, Path] = WeakKeyDictionary()


def strata_of(log: Log, score: np.ndarray, *, clicks: float) -> np.ndarray:
    """Return the stratum of each row: a group of rows with similar scores and similar mean scores of their lists.

    The number of strata grows with the number of clicks.
    """
    request = log.request_of_row
    mean = (np.bincount(request, score) / np.maximum(1, log.lengths))[request]
    along = int(np.clip(np.sqrt(clicks / CLICKS_IN_STRATUM), 1, STRATA))
    codes = np.zeros(log.rows, np.int64)
    for values in (score, mean):
        edges = np.quantile(values, np.linspace(0, 1, along + 1)[1:-1])
        codes = codes * along + np.searchsorted(edges, values)
    return codes


def logging_score(log: Log, *, seed: int = 0, device: torch.device | str = "cpu") -> LoggingScore:
    """Return `recovered_score` of a log; the result is cached, because several parts of a run need it."""
    cached = _CACHE.setdefault(log, {})
    if seed not in cached:
        folder = _FOLDERS.get(log)
        file = None if folder is None else folder / f"logging-{_content(log, seed)}.safetensors"
        if file is not None and file.is_file():
            cached[seed] = _load(file, log, device)
        else:
            cached[seed] = recovered_score(log, seed=seed, device=device)
            if file is not None:
                _save(file, cached[seed])
    return cached[seed]


def share_logging_score(log: Log, folder: Path) -> None:
    """Let `logging_score` of this log read its result from a folder, or write it there, for other processes."""
    _FOLDERS[log] = folder


def _content(log: Log, seed: int) -> str:
    """Return a hash of all that `recovered_score` depends on."""
    found = hashlib.blake2b(repr((seed, log.feature_names, sorted(log.categories.items()))).encode(), digest_size=12)
    for values in (log.lengths, log.shown_positions("the logging ranker"), queries_of(log), row_hashes(log)):
        found.update(np.ascontiguousarray(values).data)
    return found.hexdigest()


def _save(file: Path, logged: LoggingScore) -> None:
    weights = {f"ranker.{name}": values for name, values in logged.ranker.state_dict().items()}
    with atomic_path(file, overwrite=True) as temporary:
        save_tensors(temporary, {**weights, "explained": torch.tensor(logged.explained, dtype=torch.float64)})


def _load(file: Path, log: Log, device: torch.device | str) -> LoggingScore:
    tensors = load_tensors(file)
    explained = float(tensors.pop("explained"))
    weights = {name.removeprefix("ranker."): values for name, values in tensors.items()}
    ranker: torch.nn.Module = LinearRanker(FeatureEncoder(len(log.feature_names), log.categories))
    if weights.keys() != ranker.state_dict().keys():
        ranker = policy_network(len(log.feature_names), log.categories)
    ranker.load_state_dict(weights)
    ranker = ranker.to(device).eval()
    return LoggingScore(score_rows(ranker, log.features, device=device), explained, ranker)


def recovered_score(
    log: Log, *, seed: int = 0, device: torch.device | str = "cpu", network: bool = True
) -> LoggingScore:
    """Recover the logging ranker from the order that it showed (Plackett-Luce).

    The score is linear in the features, unless that leaves much of the order of held-out requests unexplained and a
    network explains more of it. The linear score of a large log is learned from a sample.
    """
    torch.manual_seed(seed)
    held_out, learned = split_by_query(log, [min(HELD_OUT, len(log) // 5)], seed=seed)
    sampled = sample_requests(log, max(SCORED_ROWS, 30 * len(log.feature_names)), seed=seed)
    ranker: torch.nn.Module = _linear_score(log, sampled, device)
    if not len(held_out):
        return LoggingScore(score_rows(ranker, log.features, device=device), 0.0, ranker)
    held_out_lists = _by_position(Lists.from_log(log.select(np.sort(held_out)), device=device))
    separate = ranker if len(sampled) <= len(learned) else _linear_score(log, learned, device)
    where = held_out_lists[1]
    by_chance = max(1e-9, float(_order_loss(torch.zeros(where.shape, device=device), where)))
    unexplained = _unexplained(separate, held_out_lists)
    if network and len(learned) > FEW_REQUESTS and unexplained > MUCH_OPEN * by_chance:
        with threads_for(log.rows):
            by_network, unexplained_by_it = _network_score(log, learned, held_out_lists, seed, device)
        if unexplained_by_it < unexplained - CLEARLY_MORE * by_chance:
            ranker, unexplained = by_network, unexplained_by_it
    return LoggingScore(score_rows(ranker, log.features, device=device), 1 - unexplained / by_chance, ranker)


def policy_network(features: int, categories: Mapping[int, int]) -> torch.nn.Module:
    """Make the small network that models a logging ranker."""
    return make_ranker("mlp", FeatureEncoder(features, categories), **NETWORK)


def _linear_score(log: Log, requests: np.ndarray, device: torch.device | str) -> LinearRanker:
    ranker = LinearRanker(FeatureEncoder(len(log.feature_names), log.categories))
    ranker.encoder.fit(log.features)
    ranker.to(device)
    torch.nn.init.zeros_(ranker.output.weight)  # a feature that is constant in every list keeps weight zero
    features, where = _by_position(Lists.from_log(log.select(np.sort(requests)), device=device))
    score: torch.nn.Module = ranker
    if not log.categories:  # then the encoding does not change while the weights are learned
        score, features = ranker.output, ranker.encoder(features)
    weights = ranker.output.weight
    minimise(
        list(ranker.parameters()),
        lambda: _order_loss(score(features).view(where.shape), where) + 1e-4 * weights.square().sum(),
    )
    return ranker


def _network_score(
    log: Log, requests: np.ndarray, held_out: tuple[Tensor, Tensor], seed: int, device: torch.device | str
) -> tuple[torch.nn.Module, float]:
    """Train a small network to predict the logged order; return it and its `_order_loss` on held-out requests."""
    network = policy_network(len(log.feature_names), log.categories)
    fit_encoders(network, log.features)
    network.to(device)
    lists, rng = ListBatches(log, device=device), np.random.default_rng(seed)
    optimizer = FlatAdagrad([list(network.parameters())], lr=torch.tensor(NETWORK_LR, device=device))
    weights, stopping = network.state_dict(), EarlyStopping()
    for step in range(1, NETWORK_STEPS + 1):
        network.train()
        batch = torch.from_numpy(rng.choice(requests, min(NETWORK_BATCH, len(requests)), replace=False))
        features, where = _by_position(lists[batch])
        optimizer.zero_grad()
        scores = torch.zeros(where.shape, device=device).masked_scatter(where, network(features[where]))
        _order_loss(scores, where).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % NETWORK_EVALUATE_EVERY == 0:
            if stopping.update(-_unexplained(network.eval(), held_out), step):
                weights = {name: values.clone() for name, values in network.state_dict().items()}
            if stopping.is_over(NETWORK_PATIENCE):
                break
    network.load_state_dict(weights)
    return network.eval(), -stopping.best


def _by_position(lists: Lists) -> tuple[Tensor, Tensor]:
    """Return the features of lists with items in the order that was shown, and the mask of items."""
    order = torch.where(lists.where, lists.shown_positions, torch.iinfo(torch.int64).max).argsort(dim=-1)
    features = lists.features.gather(-2, order[..., None].expand_as(lists.features))
    return features, lists.where.gather(-1, order)


def _order_loss(scores: Tensor, where: Tensor) -> Tensor:
    """Return the mean over rows of minus the log Plackett-Luce probability of the order in which items are given."""
    scores = scores.masked_fill(~where, -1e9)
    below = scores.flip(-1).logcumsumexp(-1).flip(-1)
    return torch.where(where, below - scores, 0.0).sum() / where.sum()


@torch.no_grad()
def _unexplained(ranker: torch.nn.Module, lists: tuple[Tensor, Tensor]) -> float:
    features, where = lists
    return float(_order_loss(ranker(features), where))
