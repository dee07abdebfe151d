from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import make_shown_log
from ultr.errors import DataError
from ultr.lists import ListBatches, Lists


def test_lists_hold_each_request_at_its_own_length_and_zeros_beyond(shown_log):
    lists = Lists.from_log(shown_log)
    assert len(lists) == len(shown_log)
    for i, length in enumerate(shown_log.lengths):
        rows = slice(shown_log.offsets[i], shown_log.offsets[i + 1])
        assert lists.where[i].tolist() == [True] * length + [False] * (12 - length)
        np.testing.assert_array_equal(lists.features[i, :length], shown_log.features[rows])
        np.testing.assert_array_equal(lists.shown_positions[i, :length], shown_log.positions[rows])
        np.testing.assert_array_equal(lists.true_relevance[i, :length], shown_log.relevance[rows])
        assert not lists.features[i, length:].any()
        assert not lists.shown_positions[i, length:].any()
    assert lists.weights.tolist() == [1.0] * len(shown_log)


def test_weights_and_actions_travel_with_their_requests(shown_log):
    weights = np.arange(1, len(shown_log) + 1, dtype=np.float32)
    log = replace(shown_log, weights=weights, actions={"click": np.ones(shown_log.rows, np.float32)})
    lists = ListBatches(log)[torch.tensor([7, 3, 7])]
    assert lists.weights.tolist() == [8.0, 4.0, 8.0]
    assert torch.equal(lists.actions["click"].bool(), lists.where)


@given(st.integers(1, 60), st.integers(0, 5))
def test_batches_by_length_hold_every_request_once_within_their_bound(max_items, seed):
    log = make_shown_log(seed=seed)
    seen = []
    for requests, lists in ListBatches(log).by_length(max_items):
        assert lists.where.numel() <= max_items or len(lists) == 1
        assert lists.where.sum(1).tolist() == log.lengths[requests.numpy()].tolist()
        seen += requests.tolist()
    assert sorted(seen) == list(range(len(log)))


def test_lists_without_positions_or_labels_say_so_when_asked(shown_log):
    lists = Lists.from_log(replace(shown_log, positions=None, relevance=None))
    with pytest.raises(DataError, match="no positions"):
        _ = lists.shown_positions
    with pytest.raises(DataError, match="no true labels"):
        _ = lists.true_relevance


def test_memory_mapped_rows_are_taken_without_a_warning(shown_log):
    features = shown_log.features.copy()
    features.flags.writeable = False
    assert len(Lists.from_log(replace(shown_log, features=features))) == len(shown_log)


def test_other_feedback_replaces_the_old(shown_log):
    lists = Lists.from_log(shown_log)
    lists = lists.with_actions({"like": torch.ones(lists.where.shape)})
    assert list(lists.actions) == ["like"]


def test_lists_of_several_logs_are_parts_of_one_that_is_not_copied():
    logs = [make_shown_log(seed=seed) for seed in range(3)]
    logs = [
        replace(log, weights=np.full(len(log), i + 1, np.float32), actions={"click": np.full(log.rows, i, np.float32)})
        for i, log in enumerate(logs)
    ]
    parts = ListBatches.of_each(logs)
    for part, log in zip(parts, logs, strict=True):
        requests, alone = torch.arange(len(log)).flip(0), ListBatches(log)
        assert_same(part[requests], alone[requests])
        assert torch.equal(part.rows(requests, part[requests].where), alone.rows(requests, alone[requests].where))
    for chosen in ([0, 1, 2], [2, 0], [1]):
        joined, copied = (
            ListBatches.joined([lists[i] for i in chosen]) for lists in (parts, [ListBatches(log) for log in logs])
        )
        requests = torch.arange(len(joined)).flip(0)
        assert_same(joined[requests], copied[requests])
        assert joined._features is parts[0]._features
        assert_same(ListBatches.joined([joined, copied])[requests], joined[requests])


def assert_same(lists, others):
    assert lists.actions.keys() == others.actions.keys()
    for values, expected in zip(lists.tensors, others.tensors, strict=True):
        assert torch.equal(values, expected)
