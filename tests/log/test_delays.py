"""Delayed actions: durations as texts, requests that are too young, and the curve of what has arrived."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultr.errors import DataError, OptionError
from ultr.log import Log, read_log
from ultr.log.delays import (
    LEAST_SHARE,
    UNITS,
    Arrival,
    arrivals,
    old_enough,
    parse_duration,
    parse_pairs,
    parse_time,
    with_arrived,
)

DAY = 86_400


def delayed_log(ages, delays, bought, items: int = 1) -> Log:
    """Return a log of requests with these ages in days, and purchases [requests, items] after `delays` days."""
    ages, delays, bought = (np.asarray(each, np.float64) for each in (ages, delays, bought))
    known = bought * (delays <= ages[:, None])
    times = (20 - ages) * DAY
    at = np.where(known > 0, times[:, None] + delays * DAY, np.nan)
    rows = len(ages) * items
    return Log(
        features=np.zeros((rows, 1), np.float32),
        offsets=np.arange(0, rows + 1, items),
        request_ids=pa.array(np.arange(len(ages))),
        feature_names=("f",),
        positions=np.tile(np.arange(1, items + 1), len(ages)),
        actions={"purchase": known.ravel()},
        context={"time": pa.array(times)},
        extra={"bought_at": at.ravel()},
    )


PURCHASE = Arrival("purchase", 7 * DAY)
TIMED = Arrival("purchase", 7 * DAY, "bought_at")


@given(st.integers(1, 10**6), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_a_duration_is_a_number_and_a_unit(number, unit, blank):
    assert parse_duration(f"{blank}{number}{blank}{unit}") == number * UNITS[unit]
    assert parse_duration(f"{number}.5{unit}") == pytest.approx((number + 0.5) * UNITS[unit])


@given(st.text(max_size=8))
def test_any_other_text_is_an_error_with_a_hint(text):
    if text.strip()[-1:] in UNITS and text.strip()[:-1].strip().isdecimal():
        return
    with pytest.raises(OptionError, match="7d"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["", "7", "d", "-7d", "7 days", "0d", "1e3d", "٧d", "nan d", "7d7", "1d12h"])
def test_these_are_no_durations(text):
    with pytest.raises(OptionError, match="duration such as 7d"):
        parse_duration(text)


def test_pairs_have_names_and_values():
    assert parse_pairs(["a=1", " b = 2 "], "x", "a=1") == {"a": "1", "b": "2"}
    for texts, said in ((["a"], "NAME=VALUE"), (["=7d"], "NAME=VALUE"), (["a=1", "a=2"], "given twice")):
        with pytest.raises(OptionError, match=said):
            parse_pairs(texts, "x", "a=1")
    with pytest.raises(OptionError, match="are given without its delay"):
        arrivals({}, {"purchase": "bought_at"})


def test_a_time_is_a_number_or_a_date():
    assert parse_time("12.5") == 12.5
    assert parse_time("1970-01-03") == 2 * DAY
    assert parse_time("1970-01-01T01:00+01:00") == 0
    with pytest.raises(OptionError, match="must be a time"):
        parse_time("yesterday")


def test_requests_that_are_too_young_are_left_out():
    log, _ = with_arrived(delayed_log([9, 7, 6.9, 0], np.ones((4, 1)), np.ones((4, 1))), [PURCHASE])
    assert log.request_ids.to_pylist() == [0, 1]
    assert log.actions["purchase"].tolist() == [1, 1]
    assert "2 of 4 requests are too young" in log.notes[0]


def test_the_end_of_the_actions_can_be_later_than_the_last_request():
    log = delayed_log([3, 2, 1], np.ones((3, 1)), np.ones((3, 1)))
    with pytest.raises(DataError, match="old enough"):
        with_arrived(log, [PURCHASE])
    assert len(with_arrived(log, [PURCHASE], until=25 * DAY)[0]) == 2  # 8, 7 and 6 days old


def test_the_longest_delay_decides():
    log = delayed_log([9, 5, 0], np.ones((3, 1)), np.ones((3, 1)))
    log.actions["like"] = np.ones(3, np.float32)
    assert len(with_arrived(log, [Arrival("like", DAY)])[0]) == 2
    assert len(with_arrived(log, [Arrival("like", DAY), PURCHASE])[0]) == 1


def two_point_log(requests: int = 4000) -> Log:
    """Return a log where half of the purchases come after a day, and half after five; ages are 0, 2, 8 and 9 days."""
    ages = np.resize([0, 2, 8, 9], requests)
    delays = np.resize(np.repeat([1, 5], 4), (requests, 1))
    return delayed_log(ages, delays, np.ones((requests, 1)))


def test_the_curve_is_the_share_of_old_purchases_that_had_arrived():
    _, (arrival,) = with_arrived(two_point_log(), [TIMED])
    shares = arrival.share(np.array([0, 0.99, 1, 5, 7, 100]) * DAY)
    assert shares.tolist() == pytest.approx([0, 0, 0.5, 1, 1, 1])
    assert arrival.count == 2000
    low, high = arrival.interval(np.array([DAY]))
    assert (low[0], high[0]) == pytest.approx(
        (0.5 - 1.96 * (0.25 / 2000) ** 0.5, 0.5 + 1.96 * (0.25 / 2000) ** 0.5), 1e-4
    )


def test_young_requests_have_the_mean_of_old_ones():
    """At two days half of the purchases are known, and each counts twice; today's requests are left out."""
    log, _ = with_arrived(two_point_log(), [TIMED])
    values = log.actions["purchase"].reshape(-1, 3)  # by age: 2, 8 and 9 days
    assert sorted(set(values[:, 0])) == [0, 2]
    assert values.mean(0).tolist() == [1, 1, 1]


@pytest.mark.parametrize("seed", range(3))
def test_the_mean_of_each_item_is_that_of_old_requests(seed):
    """Of 200,000 simulated impressions of two items, with log-normal delays, at every age above half a day."""
    rng = np.random.default_rng(seed)
    requests, rates = 100_000, np.array([0.2, 0.5])
    delays = np.exp(rng.normal(0.4, 0.8, (requests, 2)))
    bought = (rng.random((requests, 2)) < rates) & (delays <= 7)
    log = delayed_log(rng.uniform(0, 14, requests), delays, bought, items=2)
    new, (arrival,) = with_arrived(log, [TIMED])
    truth = bought.mean(0)
    age = (log.context["time"].to_numpy().max() - new.context["time"].to_numpy()) / DAY
    assert age.min() < 1
    assert arrival.share(np.array([age.min() * DAY]))[0] >= LEAST_SHARE
    values = new.actions["purchase"].reshape(-1, 2)
    for low, high in ((0, 1.5), (1.5, 4), (4, 7), (7, 14)):
        part = values[(age >= low) & (age < high)]
        errors = np.hypot(part.std(0) / len(part) ** 0.5, 0.01 * truth)
        assert (np.abs(part.mean(0) - truth) < 4 * errors).all()
    naive = log.actions["purchase"].reshape(-1, 2).mean(0)
    assert (naive < 0.93 * truth).all()


def test_purchases_after_the_delay_do_not_count():
    log = delayed_log([14, 14, 0], np.array([[6], [8], [1]]), np.ones((3, 1)))
    assert with_arrived(log, [TIMED])[0].actions["purchase"].tolist() == [1, 0]


def test_a_known_curve_is_kept_on_a_log_of_young_requests():
    known = Arrival("purchase", 7 * DAY, "bought_at", (0.0, DAY, 1.95 * DAY), (0.0, 0.4, 0.5), 300.0)
    log = delayed_log([2.0, 1.9, 0], np.full((3, 1), 0.1), np.ones((3, 1)))
    new, (arrival,) = with_arrived(log, [known])
    assert arrival == known
    assert new.actions["purchase"].tolist() == pytest.approx([1 / 0.5, 1 / 0.4])


@pytest.mark.parametrize(
    ("arrival", "changes", "said"),
    [
        (Arrival("order", DAY), {}, "no action 'order'"),
        (PURCHASE, {"context": {}}, "need the times of requests"),
        (Arrival("purchase", DAY, "paid_at"), {}, "no column 'paid_at'"),
        (TIMED, {"extra": {"bought_at": np.full(4, np.nan)}}, "no time for 4 rows"),
        (TIMED, {"extra": {"bought_at": np.zeros(4)}}, "before the request"),
    ],
)
def test_what_is_missing_is_an_error(arrival, changes, said):
    log = replace(delayed_log([14, 12, 10, 9], np.ones((4, 1)), np.ones((4, 1))), **changes)
    with pytest.raises(DataError, match=said):
        with_arrived(log, [arrival])


@pytest.mark.parametrize(("ages", "shares"), [((1.0,), ()), ((2.0, 1.0), (0.1, 0.2)), ((1.0, 2.0), (0.2, 0.1))])
def test_a_damaged_curve_is_rejected(ages, shares):
    with pytest.raises(ValueError, match="must increase"):
        Arrival("purchase", DAY, "bought_at", ages, shares)


@pytest.mark.parametrize("clock", [True, False])
def test_the_condition_of_old_requests_is_that_of_the_log(tmp_path, clock):
    log = delayed_log([9, 7, 6.9, 0], np.ones((4, 1)), np.ones((4, 1)))
    seconds = log.context["time"].to_numpy()
    times = [datetime.fromtimestamp(each) for each in seconds] if clock else seconds
    columns = {"request": range(4), "position": [1] * 4, "purchase": [1.0] * 4, "f1": [0.0] * 4, "at": times}
    pa.parquet.write_table(pa.table(columns), tmp_path / "log.parquet")
    condition = old_enough(str(tmp_path / "log.parquet"), {"purchase": "7d"}, time="at")
    kept = read_log(tmp_path / "log.parquet", where=[condition])
    assert kept.request_ids.to_pylist() == with_arrived(log, [PURCHASE])[0].request_ids.to_pylist()


def test_extra_columns_are_numbers_or_seconds_and_follow_the_rows():
    table = pa.table(
        {
            "request": [1, 1, 2],
            "position": [2, 1, 1],
            "click": [0, 1, 0],
            "f1": [1.0, 2.0, 3.0],
            "at": pa.array([datetime(1970, 1, 2), None, datetime(1970, 1, 1, 0, 0, 1, 500_000)]),
            "long": [7, 8, 9],
        }
    )
    log = read_log(table, extra=["at", "long"])
    np.testing.assert_array_equal(log.extra["at"], [np.nan, DAY, 1.5])
    assert log.extra["long"].tolist() == [8, 7, 9]
    assert log.select([1]).extra["long"].tolist() == [9]
    with pytest.raises(DataError, match="no column 'short'"):
        read_log(table, extra=["short"])
    with pytest.raises(DataError, match="numbers or times"):
        read_log(table.append_column("name", pa.array(["a", "b", "c"])), extra=["name"])
