"""A folder of lists is read as it was written, by row group, and errors name the damaged file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import make_shown_log
from lists_folder import write_lists
from ultr.datasets.users import User, simulate_log
from ultr.errors import DataError, OptionError
from ultr.log import Log, read_log
from ultr.log.shards import MANIFEST, Manifest, Shards, concatenate_logs, is_lists

ABOUT = Manifest(
    features=("f0", "f1"),
    actions=("click", "dwell"),
    positions=(1, 2, 40),
    splits={"train": {"requests": 5, "rows": 9, "longest": 3}},
    categorical={"shop": ("x", "y")},
    binary=("click",),
    label="click + dwell",
    about={"source": "here", "sampled": 0.5},
)


def feedback_log(requests: int = 60, seed: int = 0) -> Log:
    log, _ = simulate_log(make_shown_log(requests=requests, seed=seed), User(), seed=seed)
    return log


@pytest.fixture
def log() -> Log:
    return feedback_log()


@pytest.fixture
def folder(log, tmp_path) -> Path:
    return write_lists(log, tmp_path / "lists")


def assert_same_log(found: Log, wanted: Log) -> None:
    np.testing.assert_array_equal(found.features, wanted.features)
    assert found.features.dtype == np.float32
    np.testing.assert_array_equal(found.offsets, wanted.offsets)
    np.testing.assert_array_equal(found.positions, wanted.positions)
    assert found.feature_names == wanted.feature_names
    assert found.request_ids.to_pylist() == wanted.request_ids.to_pylist()
    assert found.actions.keys() == wanted.actions.keys()
    for name, values in wanted.actions.items():
        np.testing.assert_array_equal(found.actions[name], values)
    for name in ("relevance", "weights"):
        one, other = getattr(found, name), getattr(wanted, name)
        assert (one is None) == (other is None)
        assert one is None or np.array_equal(one, other)
    assert (found.item_ids is None) == (wanted.item_ids is None)
    assert found.item_ids is None or found.item_ids.to_pylist() == wanted.item_ids.to_pylist()
    assert {name: v.to_pylist() for name, v in found.vocabularies.items()} == {
        name: v.to_pylist() for name, v in wanted.vocabularies.items()
    }
    assert {name: v.to_pylist() for name, v in found.context.items()} == {
        name: v.to_pylist() for name, v in wanted.context.items()
    }


@st.composite
def drawn_logs(draw) -> Log:
    """Logs with and without what is optional; where there is a category, some of its values are missing."""
    requests = draw(st.integers(10, 30))
    log = feedback_log(requests=requests, seed=draw(st.integers(0, 100)))
    rng = np.random.default_rng(draw(st.integers(0, 100)))
    changes: dict = {}
    if draw(st.booleans()):
        changes["relevance"] = None
    if draw(st.booleans()):
        changes["weights"] = rng.uniform(0.1, 9, requests).astype(np.float32)
    if draw(st.booleans()):
        changes["item_ids"] = pa.array([f"i{n}" for n in rng.integers(0, 9, log.rows)])
    if draw(st.booleans()):
        codes = rng.integers(0, 4, (log.rows, 1)).astype(np.float32)
        changes["features"] = np.concatenate([log.features, codes], axis=1)
        changes["feature_names"] = (*log.feature_names, "shop")
        changes["vocabularies"] = {"shop": pa.array(["x", "y", "z"])}
    if draw(st.booleans()):
        changes["context"] = {
            "query": pa.array([f"q{n}" for n in rng.integers(0, 3, requests)]),
            "segment": pa.array(rng.choice(["phone", "desk"], requests).tolist()),
            "randomised": pa.array((rng.random(requests) < 0.5).tolist()),
        }
    return replace(log, **changes)


def test_a_manifest_is_read_back_equal(tmp_path):
    assert not is_lists(tmp_path)
    ABOUT.save(tmp_path)
    assert is_lists(tmp_path)
    assert Manifest.load(tmp_path) == ABOUT


def test_a_manifest_of_another_version_is_an_error(tmp_path):
    ABOUT.save(tmp_path)
    content = json.loads((tmp_path / MANIFEST).read_text())
    del content["seal"]
    (tmp_path / MANIFEST).write_text(json.dumps({**content, "format": 99}))
    with pytest.raises(DataError, match=r"lists\.json.*newer version of ultr, got format 99, expected 1; update ultr"):
        Manifest.load(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '{"format": 1}', '{"format": 1, "features": 3}'])
def test_the_error_of_a_broken_manifest_names_it(text, tmp_path):
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(DataError, match=r"lists\.json"):
        Manifest.load(tmp_path)


@pytest.mark.parametrize("name", ["features", "actions", "positions", "splits", "categorical", "binary", "label"])
def test_a_manifest_without_a_field_is_an_error(name, tmp_path):
    ABOUT.save(tmp_path)
    content = json.loads((tmp_path / MANIFEST).read_text())
    del content["seal"]
    del content[name]
    (tmp_path / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(DataError, match=rf"lists\.json.*'{name}'"):
        Manifest.load(tmp_path)


@pytest.mark.parametrize("splits", [{"train": {}}, {"train": 3}])
def test_a_manifest_with_empty_splits_is_an_error(splits, folder):
    content = json.loads((folder / MANIFEST).read_text())
    del content["seal"]
    (folder / MANIFEST).write_text(json.dumps({**content, "splits": splits}))
    with pytest.raises(DataError):
        Shards(folder)


def test_splits_are_train_validation_and_test(folder):
    for splits in ({}, {"trian": {"requests": 1, "rows": 1, "longest": 1}}):
        with pytest.raises(DataError, match="splits must be among train, validation, test"):
            replace(ABOUT, splits=splits)
    with pytest.raises(DataError, match=r"no split 'test', got .*train"):
        Shards(folder, "test")
    with pytest.raises(DataError, match="no split 'trian'"):
        Shards(folder, "trian")


def test_a_folder_without_lists_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"lists\.json"):
        Shards(tmp_path)


@settings(max_examples=15)
@given(log=drawn_logs(), shards=st.integers(1, 3), group=st.integers(2, 16))
def test_what_was_written_is_read_back(log, shards, group):
    held = round(0.2 * len(log))
    with tempfile.TemporaryDirectory() as name:
        folder = write_lists(log, Path(name) / "lists", shards=shards, group=group)
        assert_same_log(Shards(folder).read_all(), log.select(np.arange(held, len(log))))
        assert_same_log(Shards(folder, "validation").read_all(), log.select(np.arange(held)))


def test_pieces_are_read_one_by_one_and_counted_by_their_footers(log, folder):
    shards = Shards(folder)
    assert len(shards) == 48
    assert shards.rows == sum(log.lengths[12:])
    assert [group.requests for group in shards.groups] == [16, 8, 16, 8]  # two shards of 24, in groups of 16
    assert sum(group.rows for group in shards.groups) == shards.rows
    for group in shards.groups:
        piece = shards.read(group)
        assert (len(piece), piece.rows) == (group.requests, group.rows)
    assert_same_log(concatenate_logs([shards.read(group) for group in shards.groups]), shards.read_all())
    assert_same_log(shards.read_all(shards.groups[1:2]), shards.read(shards.groups[1]))
    assert (shards.width, shards.row_bytes) == (3, 4 * (3 + 2 + 3))  # features; and actions, position, relevance, item


def test_a_shard_without_requests_adds_none(log, folder):
    shards = sorted((folder / "train").iterdir())
    pq.write_table(pq.read_table(shards[0]).slice(0, 0), folder / "train" / "part-00009.parquet")
    assert_same_log(Shards(folder).read_all(), log.select(np.arange(12, 60)))


def test_values_that_the_manifest_does_not_know_have_the_code_of_the_missing(log, tmp_path):
    values = np.random.default_rng(0).choice(["x", "y", "z"], log.rows)
    codes = 1 + np.searchsorted(["x", "y", "z"], values)
    log = replace(
        log,
        features=np.column_stack([log.features, codes]).astype(np.float32),
        feature_names=(*log.feature_names, "shop"),
        vocabularies={"shop": pa.array(["x", "y", "z"])},
    )
    folder = write_lists(log, tmp_path / "lists")
    about = Manifest.load(folder)
    replace(about, categorical={"shop": ("x", "z")}).save(folder)  # y was only seen elsewhere
    found = Shards(folder).read_all()
    wanted = [{"x": 1, "y": 0, "z": 2}[value] for value in values[log.offsets[12] :]]
    np.testing.assert_array_equal(found.features[:, 3], wanted)
    assert found.vocabularies["shop"].to_pylist() == ["x", "z"]


def test_lists_with_categories_alone_are_read(log, tmp_path):
    codes = np.random.default_rng(0).integers(0, 3, (log.rows, 1)).astype(np.float32)
    shop = {"shop": pa.array(["x", "y"])}
    folder = write_lists(replace(log, features=codes, feature_names=("shop",), vocabularies=shop), tmp_path / "lists")
    np.testing.assert_array_equal(Shards(folder).read_all().features, codes[log.offsets[12] :])


def test_a_sample_is_of_whole_pieces_by_the_seed(folder):
    shards = Shards(folder)
    by_id = {shards.read(group).request_ids[0].as_py(): group for group in shards.groups}
    samples = []
    for seed in range(8):
        sample = shards.sample(60, seed)
        assert_same_log(sample, shards.sample(60, seed))
        ids = sample.request_ids.to_pylist()
        chosen = [by_id[name] for name in ids if name in by_id]
        assert_same_log(sample, shards.read_all(chosen))
        rows = [group.rows for group in chosen]
        assert sum(rows) >= 60 > sum(rows) - max(rows)  # as many as are needed, and no more
        samples.append(tuple(ids))
    assert len(set(samples)) > 1
    assert_same_log(shards.sample(10**9, 0), shards.read_all())
    assert_same_log(shards.sample(shards.rows, 3), shards.read_all())


def test_a_folder_is_a_log_of_its_train_split_and_each_split_is_one(log, folder):
    assert_same_log(read_log(folder), log.select(np.arange(12, 60)))
    assert_same_log(read_log(str(folder / "train")), read_log(folder))
    assert_same_log(read_log(folder / "validation"), log.select(np.arange(12)))
    with pytest.raises(DataError, match="no split 'test'"):
        read_log(folder / "test")


@pytest.mark.parametrize(
    "named",
    [
        {"actions": "click,dwell"},
        {"actions": ["dwell", "click"]},
        {"actions": []},
        {"features": "features"},
        {"request": "request", "position": "position", "relevance": "relevance"},
        {"segment": "segment"},
        {"categorical": []},
    ],
)
def test_names_that_are_those_of_the_lists_are_taken(named, folder):
    assert_same_log(read_log(folder, **named), read_log(folder))


@pytest.mark.parametrize(
    "named",
    [{"actions": "click"}, {"request": "session"}, {"features": "f0,f1"}, {"categorical": ["shop"]}, {"item": "doc"}],
)
def test_other_names_are_an_error(named, folder):
    with pytest.raises(OptionError, match=f"cannot be changed, got {next(iter(named))}="):
        read_log(folder, **named)


def test_the_fingerprint_follows_the_manifest_and_the_files(log, folder, tmp_path):
    before = Shards(folder).fingerprint
    assert Shards(write_lists(log, tmp_path / "again")).fingerprint == before
    assert Shards(write_lists(log, tmp_path / "smaller", group=8)).fingerprint != before
    replace(Manifest.load(folder), about={"source": "elsewhere"}).save(folder)
    assert Shards(folder).fingerprint != before


def first_shard(folder: Path) -> Path:
    return folder / "train" / "part-00000.parquet"


def rewrite(change: Callable[[pa.Table], pa.Table]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = first_shard(folder)
        pq.write_table(change(pq.read_table(path)), path, row_group_size=16)

    return damage


def with_values(name: str, change: Callable[[list], list | None]) -> Callable[[Path], None]:
    """Other values of the first request, or none."""

    def changed(table: pa.Table) -> pa.Table:
        values = table[name].to_pylist()
        values[0] = change(values[0])
        return table.set_column(table.schema.get_field_index(name), name, pa.array(values, table[name].type))

    return rewrite(changed)


def truncate(folder: Path) -> None:
    path = first_shard(folder)
    path.write_bytes(path.read_bytes()[:-100])


def blank(folder: Path) -> None:
    """Overwrite the data of a file, and leave its footer."""
    path = first_shard(folder)
    content = bytearray(path.read_bytes())
    content[4 : len(content) // 2] = bytes(len(content) // 2 - 4)
    path.write_bytes(bytes(content))


DAMAGED = {
    "truncated": (truncate, "cannot be read as Parquet"),
    "overwritten": (blank, "cannot be read as Parquet"),
    "no Parquet": (lambda folder: first_shard(folder).write_text("request,position\n"), "cannot be read as Parquet"),
    "empty": (lambda folder: first_shard(folder).write_bytes(b""), "cannot be read as Parquet"),
    "without positions": (rewrite(lambda table: table.drop(["position"])), "column 'position' is missing"),
    "without an action": (rewrite(lambda table: table.drop(["dwell"])), "column 'dwell' is missing"),
    "without features": (rewrite(lambda table: table.drop(["features"])), "column 'features' is missing"),
    "without requests": (rewrite(lambda table: table.drop(["request"])), "column 'request' is missing"),
    "a longer list": (with_values("click", lambda values: [*values, 1.0]), "lists of 'click' must be as long"),
    "a shorter list": (with_values("relevance", lambda values: values[:-1]), "lists of 'relevance' must be as long"),
    "no list": (with_values("dwell", lambda _: None), "lists of 'dwell' must be as long"),
    "no list of positions": (with_values("position", lambda _: None), "must have at least one item"),
    "no list of features": (with_values("features", lambda _: None), "lists of 'features' must be as long"),
    "an item without features": (with_values("features", lambda v: [None, *v[1:]]), "must have 3 features"),
    "an infinity": (with_values("features", lambda v: [[0, 0, float("inf")], *v[1:]]), "'f2' has values that are not"),
    "a feature more": (with_values("features", lambda v: [[0.0] * 4, *v[1:]]), "each item must have 3 features"),
    "a feature moved": (
        with_values("features", lambda v: [[0.0] * 4, [0.0] * 2, *v[2:]]),
        "each item must have 3 features",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_the_error_of_a_damaged_shard_names_it(damage, folder):
    change, message = DAMAGED[damage]
    change(folder)
    with pytest.raises(DataError, match=message) as raised:
        Shards(folder).read_all()
    assert str(first_shard(folder)) in str(raised.value)


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
@pytest.mark.parametrize(
    "damage",
    [
        with_values("click", lambda values: [None, *values[1:]]),
        with_values("dwell", lambda values: [float("nan"), *values[1:]]),
        with_values("position", lambda values: [None, *values[1:]]),
        rewrite(lambda table: table.drop(["position"]).append_column("position", pa.array([1] * len(table)))),
        rewrite(lambda table: table.drop(["click"]).append_column("click", pa.array([1.0] * len(table)))),
    ],
    ids=[
        "a null action",
        "a NaN action",
        "a null position",
        "positions that are no lists",
        "actions that are no lists",
    ],
)
def test_the_error_of_a_bad_number_in_a_list_names_the_shard(damage, folder):
    damage(folder)
    with pytest.raises(DataError) as raised:
        Shards(folder).read_all()
    assert str(first_shard(folder)) in str(raised.value)


def test_a_request_without_items_is_an_error(folder):
    def emptied(table: pa.Table) -> pa.Table:
        for name in ("position", "click", "dwell", "relevance", "features"):
            values = [[], *table[name].to_pylist()[1:]]
            table = table.set_column(table.schema.get_field_index(name), name, pa.array(values, table[name].type))
        return table

    rewrite(emptied)(folder)
    with pytest.raises(DataError):
        Shards(folder).read_all()


def test_a_lost_shard_is_noticed_before_anything_is_read(folder):
    first_shard(folder).unlink()
    with pytest.raises(DataError, match=r"shards must have 48 requests, got 24; run ultr prepare again") as raised:
        Shards(folder)
    assert str(folder) in str(raised.value)


def test_a_shard_too_many_is_noticed(folder):
    (folder / "train" / "part-00009.parquet").write_bytes(first_shard(folder).read_bytes())
    with pytest.raises(DataError, match=r"must have 48 requests, got 72"):
        Shards(folder)


def test_an_empty_split_is_an_error(folder):
    about = Manifest.load(folder)
    with pytest.raises(DataError, match="the split 'validation' is empty"):
        replace(about, splits={**about.splits, "validation": {"requests": 0, "rows": 0, "longest": 0}})
