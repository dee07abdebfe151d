"""Arms that swap items: their text, their effect on a log, and what a log tells about the order before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ultr.errors import ColumnError, DataError
from ultr.log import Log, read_log, write_log
from ultr.log.swaps import parse_swap, production_positions, swap_items
from ultr.log.table import SHIFT, by_segment


def lists(*lengths: int) -> Log:
    """Return requests of these lengths at positions 1, 2, ...; the id of an item is its row."""
    rows = sum(lengths)
    return Log(
        features=np.empty((rows, 0), np.float32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        request_ids=pa.array(np.arange(len(lengths))),
        feature_names=(),
        positions=np.concatenate([np.arange(1, n + 1) for n in lengths]),
        actions={"click": np.zeros(rows, np.float32)},
        item_ids=pa.array(np.arange(rows)),
    )


def items_of(log: Log) -> list[list[int]]:
    return [log.item_ids.to_pylist()[a:b] for a, b in zip(log.offsets, log.offsets[1:], strict=False)]


@pytest.mark.parametrize(
    ("text", "places"), [("", ()), ("  ", ()), ("1-3", (1, 3)), (" 10-2 ", (10, 2)), ("1-2-3", (1, 2, 3))]
)
def test_an_arm_is_positions_joined_by_dashes(text, places):
    assert parse_swap(text) == places


@pytest.mark.parametrize("text", ["1", "1-1", "1-2-1", "1->3", "a-b", "1-", "-1-2", "1 - 3", "1-1000000000000000000"])
def test_other_texts_are_an_error_with_a_hint(text):
    with pytest.raises(ColumnError, match=r"two or more different positions.*1-3"):
        parse_swap(text)


def test_items_are_shown_at_the_next_position_of_the_arm():
    swapped = swap_items(lists(4, 4, 4, 2), ["", "1-3", "1-2-4", "1-3"])
    # In the arm 1-2-4 the first item moves to 2, the second to 4, the fourth to 1. The last request has no position 3.
    assert items_of(swapped) == [[0, 1, 2, 3], [6, 5, 4, 7], [11, 8, 10, 9], [12, 13]]
    assert swapped.context["swaps"].to_pylist() == ["", "1-3", "1-2-4", "1-3"]
    np.testing.assert_array_equal(swapped.positions, lists(4, 4, 4, 2).positions)


def test_the_order_of_production_follows_from_the_arms():
    rng = np.random.default_rng(0)
    log = lists(*rng.integers(1, 7, 300))
    arms = rng.choice(["", "1-2", "2-3", "1-5", "1-2-3", "1-3-2", "2-6-4-1"], len(log))
    swapped = swap_items(log, arms)
    production, compared = production_positions(swapped)
    before = dict(zip(log.item_ids.to_pylist(), log.positions.tolist(), strict=True))
    np.testing.assert_array_equal(production, [before[item] for item in swapped.item_ids.to_pylist()])
    moved = production != swapped.positions
    assert compared[moved].all()
    for i, arm in enumerate(arms):  # rows that an arm does not move are compared only if it moves nothing
        rows = slice(swapped.offsets[i], swapped.offsets[i + 1])
        assert (compared[rows] == (moved[rows] | (not moved[rows].any()))).all(), arm


def test_segments_do_not_matter():
    log = replace(swap_items(lists(3, 3), ["1-3", "1-3"]), context={"segment": pa.array(["a", "b"])})
    log = replace(log, context={**log.context, "swaps": pa.array(["1-3", None])})
    in_segments = by_segment(log)[0]
    assert in_segments.positions.max() >> SHIFT
    for a, b in zip(production_positions(log), production_positions(in_segments), strict=True):
        np.testing.assert_array_equal(a, b)


def test_positions_may_be_large_numbers():
    log = replace(lists(3), positions=np.array([10**9, 10**9 + 1, 10**9 + 2]))
    swapped = swap_items(log, [f"{10**9}-{10**9 + 2}"])
    assert items_of(swapped) == [[2, 1, 0]]
    np.testing.assert_array_equal(swapped.positions, log.positions)
    assert production_positions(swapped)[1].tolist() == [True, False, True]


def test_each_request_needs_an_arm():
    with pytest.raises(DataError, match="1 arms of 2 requests"):
        swap_items(lists(2, 2), ["1-2"])


def table(arms, **columns) -> pa.Table:
    rows = {"request": [1, 1, 2, 2], "position": [1, 2, 1, 2], "click": [0, 1, 1, 0], "arm": arms}
    return pa.table({**rows, **columns})


def test_a_log_has_the_arms_of_its_requests(tmp_path):
    log = read_log(table([None, None, " 1-2", " 1-2"]), swaps="arm")
    assert log.context["swaps"].to_pylist() == ["", "1-2"]
    assert log.columns["swaps"] == "arm"
    write_log(log, tmp_path / "log.parquet")
    assert read_log(tmp_path / "log.parquet").context["swaps"].to_pylist() == ["", "1-2"]
    (tmp_path / "log.csv").write_text("request,position,click,swap\n1,1,0,\n1,2,1,\n2,1,0,1-2\n2,2,0,1-2\n")
    assert read_log(tmp_path / "log.csv").context["swaps"].to_pylist() == ["", "1-2"]
    pq.write_table(table([None] * 4), tmp_path / "none.parquet")
    assert read_log(tmp_path / "none.parquet", swaps="arm").context["swaps"].to_pylist() == ["", ""]


@pytest.mark.parametrize(
    ("arms", "match"),
    [
        (["", "", "1", "1"], "column 'arm'.*two or more different positions"),
        ([0.5] * 4, "two or more different positions"),
        (["", "1-2", "", ""], "one value per request"),
    ],
)
def test_arms_that_cannot_be_read_are_an_error(arms, match):
    with pytest.raises(ColumnError, match=match):
        read_log(table(arms), swaps="arm")
