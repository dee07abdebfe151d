"""A column on which examination depends is found where the log can tell, and no other, against simulated truth."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from bias.worlds import THETA, world
from ultr.bias import auto_segment
from ultr.bias.auto_segment import find_segment
from ultr.checks.pitfalls import suspicious_requests
from ultr.log import Log, read_log
from worlds.contexts import contexts
from worlds.shop import shop

FLAT = np.array([0.9, 0.85, 0.8, 0.75, 0.7])  # examination of another device


def table_of(log: Log, keep: np.ndarray | None = None, **by_request: np.ndarray) -> pa.Table:
    """Return a log as a table, with columns that have one value per request; `keep` marks the clicks that stay."""
    of_row = log.request_of_row
    click = log.actions["click"] if keep is None else log.actions["click"] * keep
    columns = {"request": of_row, "position": log.positions, "item": log.item_ids, "click": click}
    columns["query"] = log.context["query"].take(pa.array(of_row))
    columns |= {f"x{i}": log.features[:, i] for i in range(len(log.feature_names))}
    return pa.table(columns | {name: pa.array(np.asarray(values)[of_row]) for name, values in by_request.items()})


def two_devices(kind: str = "rankers", requests: int = 3000, other: np.ndarray = FLAT, **columns) -> pa.Table:
    """Make a log of two devices, whose users look down the list by THETA (desk) and by another curve (phone)."""
    parts = []
    for number, (device, theta) in enumerate({"desk": THETA, "phone": other}.items()):
        log = world(kind, requests=requests, seed=4, theta=theta, features=3)
        own = {name: np.full(requests, values[number]) for name, values in columns.items()}
        part = table_of(log, **(own or {"device": np.full(requests, device)}))
        parts.append(part.set_column(0, "request", pa.array(np.asarray(part["request"]) + number * requests)))
    return pa.concat_tables(parts)


@pytest.fixture(scope="module")
def devices():
    return two_devices()


def test_the_devices_of_a_shop_are_found_with_theta_near_the_truth():
    found = find_segment(shop(5000, seed=3).log)
    assert found is not None
    assert (found.column, found.values) == ("device", ("desktop", "mobile"))
    at = found.positions.index(5)
    np.testing.assert_allclose(found.theta[:, at], [1 / (1 + 0.1 * 4), 5**-0.9], rtol=0.25)
    seen = f"at position 5 users look {found.theta[0, at]:.2f} and {found.theta[1, at]:.2f} times as often as at 1"
    assert str(found) == f"'device' (desktop, mobile): {seen} (p = {found.p:.0e})"


def test_columns_on_which_examination_depends_too_are_named():
    """`os` is the device under another name: it adds nothing to it."""
    table, _ = contexts(6000, seed=5, random_share=1.0)
    found = find_segment(table.append_column("os", table["device"]), columns={"randomised": "random"})
    assert found is not None
    assert (found.column, found.further) == ("device", ("surface",))
    assert str(found).endswith("; it depends on surface too: --segment device,surface uses all")
    plain, _ = contexts(6000, seed=5, random_share=1.0, plain=True)
    assert find_segment(plain, columns={"randomised": "random"}) is None


@pytest.mark.parametrize("kind", ["items", "random order"])
def test_either_evidence_finds_the_devices(kind, devices):
    if kind == "items":
        found = find_segment(devices.drop_columns("query"))
    else:
        rows = two_devices("fresh").drop_columns(["item", "query"])
        found = find_segment(rows.append_column("randomised", pa.array(np.ones(rows.num_rows, np.int64))))
    assert found is not None
    assert found.positions == (1, 2, 3, 4, 5)
    np.testing.assert_allclose(found.theta, [THETA / THETA[0], FLAT / FLAT[0]], rtol=0.2)


def test_without_random_order_and_recurring_items_there_is_no_segment():
    assert find_segment(two_devices("deterministic"), columns={"features": "x*"}) is None
    assert find_segment(two_devices("deterministic").drop_columns(["item", "query"])) is None


def test_items_with_other_features_each_time_are_no_evidence(devices):
    noise = pa.array(np.random.default_rng(0).normal(size=devices.num_rows))
    rows = devices.drop_columns("query").append_column("f_1", noise)
    assert find_segment(rows) is None
    assert find_segment(rows, columns={"features": []}) is not None


def test_columns_that_do_not_matter_are_not_segments():
    """Of 40 columns, none is below the level of 0.001 but by chance. Some are made by chance, and some by the query."""
    chosen = []
    for seed in range(8):
        log, rng = world("rankers", requests=2000, seed=seed), np.random.default_rng(seed)
        query = log.context["query"].to_numpy()
        columns = {f"coin_{i}": rng.integers(0, i + 2, 2000) for i in range(3)} | {"odd": query % 2, "third": query % 3}
        rows = table_of(log, **{name: values.astype(str) for name, values in columns.items()})
        for name in columns:
            chosen.append(find_segment(rows.drop_columns([other for other in columns if other != name])))
    assert len(chosen) == 40
    assert [found for found in chosen if found is not None] == []


def test_a_column_that_only_changes_the_click_rate_is_not_a_segment():
    log, rng = world("rankers", requests=6000, seed=1), np.random.default_rng(1)
    engaged = rng.random(6000) < 0.5
    keep = rng.random(log.rows) < np.where(engaged[log.request_of_row], 1, 0.4)
    assert find_segment(table_of(log, keep, device=np.where(engaged, "new", "old"))) is None


def test_a_difference_that_is_sure_but_small_is_not_a_segment():
    rows = two_devices("random", 20_000, other=THETA * [1, 1.06, 1.06, 1.06, 1.06])
    assert find_segment(rows) is None
    assert find_segment(two_devices("random", 20_000, other=THETA * [1, 1.3, 1.3, 1.3, 1.3])) is not None


def test_of_two_columns_the_surer_one_is_taken(devices):
    device, rng = np.asarray(devices["device"]), np.random.default_rng(0)
    request = np.asarray(devices["request"])
    blurred = np.where((rng.random(request.max() + 1) < 0.25)[request], device[::-1], device)
    found = find_segment(devices.add_column(0, "client", pa.array(blurred)))
    assert found is not None
    assert found.column == "device"
    again = find_segment(devices.drop_columns("device").append_column("client", pa.array(blurred)))
    assert again is not None


def changed(devices: pa.Table, values: np.ndarray | pa.Array) -> pa.Table:
    column = values if isinstance(values, pa.Array) else pa.array(values)
    return devices.drop_columns("device").append_column("device", column)


def test_a_column_must_have_one_value_per_request_few_values_and_enough_clicks(devices):
    device, request = np.asarray(devices["device"]).astype(object), np.asarray(devices["request"])
    mixed = np.where(np.arange(len(device)) == len(device) - 1, "desk", device)  # in the last row
    assert find_segment(changed(devices, mixed)) is None
    assert find_segment(changed(devices, np.char.add(device.astype(str), (request % 5).astype(str)))) is None
    assert find_segment(changed(devices, np.char.add(device.astype(str), (request % 2).astype(str)))) is not None
    assert find_segment(changed(devices, np.where(request < 150, "tv", device))) is None
    encoded = devices["device"].combine_chunks().dictionary_encode()
    for same in (encoded, encoded.dictionary_decode().cast(pa.string_view())):
        assert str(find_segment(changed(devices, same))) == str(find_segment(devices))
    missing = find_segment(changed(devices, np.where(device == "desk", None, device)))
    assert missing is not None
    assert missing.values == ("", "phone")


@pytest.mark.parametrize(
    ("name", "values", "taken"),
    [
        ("is_app", (True, False), ("true", "false")),
        ("platform", (7, 3), ("7", "3")),
        ("price_band", (7, 3), None),
        ("score", (0.5, 1.5), None),
    ],
)
def test_texts_and_truth_values_are_tested_and_numbers_only_by_name(name, values, taken):
    found = find_segment(two_devices(**{name: values}))
    assert (None if found is None else found.values) == (None if taken is None else tuple(sorted(taken)))


def test_the_columns_of_other_roles_and_of_the_time_are_not_segments_but_categorical_features_may_be(devices):
    assert find_segment(devices, columns={"query": "device"}) is None
    assert find_segment(devices, time="device") is None
    named = {"features": "x*", "categorical": "device"}
    found = find_segment(devices, columns=named)
    assert found is not None
    log = read_log(devices, segment=found.column, **named)
    assert log.feature_names == ("x0", "x1", "x2", "device")
    assert set(log.context["segment"].to_pylist()) == {"desk", "phone"}


def test_files_are_read_as_tables_are(devices, tmp_path):
    expected = str(find_segment(devices))
    pq.write_table(devices, tmp_path / "log.parquet")
    pyarrow.csv.write_csv(devices, tmp_path / "log.csv")
    feather.write_feather(devices, tmp_path / "log.arrow", compression="uncompressed")
    devices.to_pandas().to_json(tmp_path / "log.jsonl", orient="records", lines=True)
    for name in ("log.parquet", "log.csv", "log.arrow", "log.jsonl"):
        assert str(find_segment(tmp_path / name)) == expected, name
    device = np.asarray(devices["device"])
    for value in ("desk", "phone"):
        (tmp_path / f"days/device={value}").mkdir(parents=True)
        part = devices.filter(pa.array(device == value)).drop_columns("device")
        pq.write_table(part, tmp_path / f"days/device={value}/part.parquet")
    assert str(find_segment(tmp_path / "days")) == expected


def test_a_sample_is_tested_but_a_rare_value_outside_of_it_counts(devices, monkeypatch):
    whole = str(find_segment(devices))
    monkeypatch.setattr(auto_segment, "SAMPLE_ROWS", 10_000)
    assert str(find_segment(devices)) not in ("None", whole)
    for request in range(6):  # some of them are not in the sample
        rare = np.where(np.asarray(devices["request"]) == request, "tv", np.asarray(devices["device"]))
        assert find_segment(changed(devices, rare)) is None


def test_a_request_that_is_left_out_of_the_test_must_have_one_value_too():
    """Training reads it, and rejects two values. The last requests are of bots, which click everything."""
    world = shop(5000, seed=3, bots=0)
    bots = np.asarray(world.log["request_id"]) >= 4900
    clicks = pa.array(np.where(bots, 1, np.asarray(world.log["click"])))
    rows = world.log.drop_columns("click").append_column("click", clicks)
    assert suspicious_requests(read_log(rows), np.asarray(clicks) > 0)[-1]
    assert find_segment(rows) is not None
    mixed = np.asarray(rows["device"]).astype(object)
    mixed[-1] = {"mobile": "desktop", "desktop": "mobile"}[mixed[-1]]
    assert find_segment(changed(rows, mixed)) is None
