"""Files are scored in batches: the scores and the order are those of the file in memory, wherever batches end."""

from __future__ import annotations

import gzip
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import make_shown_log
from lists_folder import write_lists
from ultr.datasets.users import User, simulate_log
from ultr.errors import ColumnError, DataError, OptionError, OutputError
from ultr.log import Log, read_log, write_log
from ultr.rankers import FeatureEncoder, make_ranker
from ultr.rankers.boosters import TreeRanker
from ultr.rankers.model import Model
from ultr.serving.scoring import _read_ahead, first_ranking, score_file

NUMERIC = ("f0", "f1", "price")
SHOPS = ("x", "y", "z")


def make_model(names=NUMERIC, categorical=()) -> Model:
    torch.manual_seed(0)
    categories = {len(names) + i: len(SHOPS) + 1 for i in range(len(categorical))}
    ranker = make_ranker("mlp", FeatureEncoder(len(names) + len(categorical), categories), hidden=(8,))
    for embedding in ranker.encoder.embeddings.values():
        torch.nn.init.normal_(embedding.weight)
    vocabularies = {name: pa.array(SHOPS) for name in categorical}
    return Model(ranker.eval(), (*names, *categorical), "click", vocabularies)


def trees_that_count_gaps() -> Model:
    booster = SimpleNamespace(predict=lambda rows, *_: np.isnan(rows).sum(1), rounds=1)
    return replace(make_model(), ranker=TreeRanker(booster))


def frame(rows: int = 12, seed: int = 0, requests: int = 4) -> pa.Table:
    rng = np.random.default_rng(seed)
    return pa.table(
        {
            "request": rng.integers(0, requests, rows),
            "item": [f"i{n}" for n in rng.permutation(rows)],
            "position": np.arange(rows) * 3,
            **{name: rng.normal(size=rows).astype(np.float32) for name in NUMERIC},
            "weight": np.zeros(rows),  # training would reject it
        }
    )


def score(model, source, folder, *, numbers=None, block=None, out="scores.parquet", **options):
    """Score a file in batches of about `numbers` numbers or `block` bytes, and read the scores."""
    with pytest.MonkeyPatch.context() as patch:
        if numbers is not None:
            patch.setattr("ultr.log.readers.NUMBERS", numbers)
        if block is not None:
            patch.setattr("ultr.log.readers.CSV_BYTES", block)
            patch.setattr("ultr.log.svmlight.STREAM_BYTES", block)
        score_file(model, source, folder / out, overwrite=True, device="cpu", **options)
    return pq.read_table(folder / out)


# --- Every shape, wherever batches end --------------------------------------------------------------------------------


def as_parquet(table, folder, draw):
    pq.write_table(table, folder / "log.parquet", row_group_size=draw(st.integers(1, 9)))
    return folder / "log.parquet"


def as_folder(table, folder, draw):
    (folder / "shards").mkdir()
    ends = sorted(draw(st.lists(st.integers(0, len(table)), max_size=3)))
    for n, (first, last) in enumerate(zip([0, *ends], [*ends, len(table)], strict=True)):
        shard = table.slice(first, last - first)
        shard = shard.select(draw(st.permutations(shard.column_names)))
        pq.write_table(shard, folder / "shards" / f"{n}.parquet")
    return folder / "shards"


def as_csv(table, folder, _draw):
    pa.csv.write_csv(table, folder / "log.csv")
    return folder / "log.csv"


def as_gzipped_csv(table, folder, draw):
    (folder / "log.csv.gz").write_bytes(gzip.compress(as_csv(table, folder, draw).read_bytes()))
    return folder / "log.csv.gz"


def as_arrow(table, folder, draw):
    with pa.ipc.new_file(folder / "log.feather", table.schema) as file:
        file.write_table(table, max_chunksize=draw(st.integers(1, 9)))
    return folder / "log.feather"


def as_table(table, _folder, _draw):
    return table


def as_frame(table, _folder, _draw):
    return table.to_pandas()


@st.composite
def candidates(draw) -> tuple[pa.Table, tuple[str, ...]]:
    """Draw rows in any order, with ids of two kinds, unknown and missing categories, and other columns."""
    rows = draw(st.integers(1, 40))
    table = frame(rows, seed=draw(st.integers(0, 10**6)), requests=draw(st.integers(1, 50))).to_pandas()
    categorical = draw(st.sampled_from([(), ("shop",)]))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    if categorical:
        table["shop"] = rng.choice(np.array([*SHOPS, "new", None], object), rows)
        table.loc[0, "shop"] = "new"
    if draw(st.booleans()):
        table["request"] = [f"r{n}" for n in table["request"]]
    table = table.drop(columns=draw(st.lists(st.sampled_from(["position", "weight"]), unique=True)))
    if draw(st.booleans()):
        table["relevance"] = rng.integers(0, 5, rows)
    if draw(st.booleans()):
        table["query"] = "q" + table["request"].astype(str)
    table["click"] = -1  # actions are not read
    return pa.Table.from_pandas(table[draw(st.permutations(list(table.columns)))], preserve_index=False), categorical


def assert_scored_as_in_memory(scored: pa.Table, model: Model, source, items: list[str], **options) -> None:
    log = read_log(source, actions=[], categorical=list(model.vocabularies), **options)
    keys = replace(log.without_features(), actions={}, weights=None).to_table()
    expected = keys.append_column("score", pa.array(model.score(log)))
    assert scored.schema.equals(expected.schema)
    assert scored["item"].to_pylist() == items  # the order of the file
    place = {item: row for row, item in enumerate(expected["item"].to_pylist())}
    expected = expected.take([place[item] for item in items])
    assert scored.drop(["score"]).equals(expected.drop(["score"]))
    np.testing.assert_allclose(scored["score"], expected["score"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [as_parquet, as_folder, as_csv, as_gzipped_csv, as_arrow, as_table, as_frame])
@settings(max_examples=25)
@given(data=st.data())
def test_scores_are_the_same_as_in_memory_and_in_the_order_of_the_file(shape, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scores")
    table, categorical = data.draw(candidates())
    if "weight" in table.column_names:
        ones = pa.array(np.ones(len(table)))
        # reading the whole log would reject weights of 0
        table = table.set_column(table.column_names.index("weight"), "weight", ones)
    source, model = shape(table, folder, data.draw), make_model(categorical=categorical)
    numbers, block = data.draw(st.integers(1, 200)), data.draw(st.integers(300, 3000))
    scored = score(model, source, folder, numbers=numbers, block=block)
    assert_scored_as_in_memory(scored, model, source, table["item"].to_pylist(), features=list(NUMERIC))


@settings(max_examples=30)
@given(data=st.data())
def test_lists_of_whole_requests_are_scored_item_by_item(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scores")
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=12).filter(any))
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    rows = [rng.normal(size=(n, 3)).astype(np.float32).tolist() for n in lengths]
    items = np.split(np.array([f"i{n}" for n in range(sum(lengths))], object), np.cumsum(lengths)[:-1])
    table = pa.table(
        {
            "request": pa.array(np.arange(len(lengths))),
            "item": pa.array([part.tolist() for part in items], pa.list_(pa.string())),
            "features": pa.array(rows, pa.list_(pa.list_(pa.float32()))),
        }
    )
    source, model = as_parquet(table, folder, data.draw), make_model([f"features[{i}]" for i in range(3)])
    scored = score(model, source, folder, numbers=data.draw(st.integers(1, 60)))
    assert_scored_as_in_memory(scored, model, source, np.concatenate(items).tolist())


@settings(max_examples=20)
@given(data=st.data())
def test_list_columns_keep_the_names_that_were_written_with_them(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scores")
    log = replace(make_shown_log(requests=data.draw(st.integers(1, 9))), relevance=None)
    log = replace(log, item_ids=pa.array([f"i{n}" for n in range(log.rows)]))
    write_log(log, folder / "log.parquet")
    model = make_model(data.draw(st.permutations(log.feature_names)))
    scored = score(model, folder / "log.parquet", folder, numbers=data.draw(st.integers(1, 100)))
    np.testing.assert_allclose(scored["score"], model.score(log), rtol=1e-6, atol=1e-6)
    assert scored["request"].to_pylist() == [f"r{n}" for n in log.request_of_row]


@given(data=st.data())
def test_svmlight_files_are_scored_block_by_block(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scores")
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    width, lines, sparse = data.draw(st.integers(1, 5)), [], {}
    for row in range(data.draw(st.integers(1, 30))):
        sparse[row] = {int(i): round(float(rng.normal()), 3) for i in np.flatnonzero(rng.random(8) < 0.4) + 1}
        pairs = " ".join(f"{i}:{value}" for i, value in sparse[row].items())
        lines.append(f"{rng.integers(5)} qid:{rng.integers(4)} {pairs}".strip())
    suffix = data.draw(st.sampled_from([".txt", ".txt.gz"]))
    path, text = folder / f"set{suffix}", "\n".join(lines).encode()
    path.write_bytes(gzip.compress(text) if suffix == ".txt.gz" else text)
    model = make_model([str(i + 1) for i in range(width)])
    scored = score(model, path, folder, numbers=data.draw(st.integers(1, 60)), block=data.draw(st.integers(20, 200)))
    dense = np.array([[sparse[row].get(i + 1, 0.0) for i in range(width)] for row in sparse], np.float32)
    np.testing.assert_allclose(scored["score"], model.score_features(dense), rtol=1e-6, atol=1e-6)
    assert scored["request"].to_pylist() == [int(line.split("qid:")[1].split()[0]) for line in lines]
    assert scored["relevance"].to_pylist() == [float(line.split()[0]) for line in lines]
    assert scored.column_names == ["request", "relevance", "score"]


def test_prepared_lists_are_scored_a_piece_at_a_time(tmp_path):
    log, _ = simulate_log(make_shown_log(requests=60), User())
    folder, model, progress = write_lists(log, tmp_path / "lists", group=7), make_model(log.feature_names), []
    scored = score(model, folder, tmp_path, on_progress=lambda done, rows: progress.append((done, rows)))
    train = read_log(folder)
    assert scored["request"].to_pylist() == [train.request_ids[i].as_py() for i in train.request_of_row]
    np.testing.assert_allclose(scored["score"], model.score(train), rtol=1e-6, atol=1e-6)
    assert len(progress) > 5
    assert progress[-1] == (train.rows, train.rows)
    assert len(score(model, folder / "validation", tmp_path)) == log.rows - train.rows
    with pytest.raises(OptionError, match="cannot be changed"):
        score(model, folder, tmp_path, features="price")


# --- Facts of the whole file ----------------------------------------------------------------------------------------


def test_columns_with_the_names_of_the_features_are_the_features(tmp_path):
    table = frame().append_column("f9", pa.array(np.full(12, np.nan)))  # not a feature: any value is allowed
    model = make_model()
    scored = score(model, table, tmp_path)
    log = read_log(table.drop(["weight", "f9"]), features=list(NUMERIC), item="item")
    expected = dict(zip(log.item_ids.to_pylist(), model.score(log).tolist(), strict=True))
    assert scored["score"].to_pylist() == pytest.approx([expected[item] for item in table["item"].to_pylist()])
    with pytest.raises(
        DataError,
        match=r"features that the model was trained on are missing: price; name their columns with --features",
    ):
        score(model, table.drop(["f9"]), tmp_path, features="f*")


def test_shards_of_different_types_get_a_common_type(tmp_path):
    (tmp_path / "shards").mkdir()
    table, model = frame(), make_model()
    narrow = table.schema.set(0, pa.field("request", pa.int16())).set(3, pa.field("f0", pa.float64()))
    pq.write_table(table.slice(0, 5).cast(narrow), tmp_path / "shards" / "0.parquet")
    pq.write_table(table.slice(5, 0), tmp_path / "shards" / "1.parquet")  # an empty one
    pq.write_table(table.slice(5), tmp_path / "shards" / "2.parquet")
    scored = score(model, tmp_path / "shards", tmp_path, numbers=30)
    expected = score(model, table, tmp_path)
    assert scored.drop(["score"]).equals(expected.drop(["score"]))
    np.testing.assert_allclose(scored["score"], expected["score"], rtol=1e-6, atol=1e-6)
    assert scored.schema.field("request").type == pa.int64()
    pq.write_table(table.drop(["f1"]), tmp_path / "shards" / "3.parquet")
    with pytest.raises(ColumnError, match=r"column 'f1' is in 3 of 4 files, got no such column in .*3\.parquet"):
        score(model, tmp_path / "shards", tmp_path)


def test_the_type_of_a_csv_column_depends_on_all_of_its_values(tmp_path):
    rows = 300
    table = frame(rows).drop(["weight"]).to_pandas()
    table["request"] = [*range(rows - 1), "r7"]  # all but the last are whole numbers
    table["item"] = [f"{n:03}" for n in range(rows)]  # 007 and 7 are different items
    table["f0"] = [*[1] * (rows - 1), 0.5]
    table.to_csv(tmp_path / "log.csv", index=False)
    scored, model = score(make_model(), tmp_path / "log.csv", tmp_path, block=400), make_model()
    assert scored["request"].to_pylist() == [*map(str, range(rows - 1)), "r7"]
    assert scored["item"][7].as_py() == "007"
    expected = model.score_features(table[list(NUMERIC)].to_numpy(np.float32))
    np.testing.assert_allclose(scored["score"], expected, rtol=1e-5, atol=1e-6)
    gaps = np.where(np.arange(rows) < 100, np.nan, 2.5)  # nothing at all in the first blocks
    table.assign(f1=gaps).to_csv(tmp_path / "log.csv", index=False)
    scored = score(trees_that_count_gaps(), tmp_path / "log.csv", tmp_path, block=400)
    assert scored["score"].to_pylist() == np.isnan(gaps).tolist()
    table.assign(f0=[*[1] * (rows - 1), "much"]).to_csv(tmp_path / "log.csv", index=False)
    with pytest.raises(DataError, match=r"log\.csv: cannot be read as CSV .*invalid value 'much'"):
        score(model, tmp_path / "log.csv", tmp_path, block=400)


@pytest.mark.parametrize("row_group", [2000, 400_000])
def test_memory_does_not_grow_with_the_file(row_group, tmp_path):
    rows, names = 400_000, tuple(f"f{i}" for i in range(8))
    rng, held = np.random.default_rng(0), []
    table = pa.table({"request": np.arange(rows) // 99, **{name: rng.random(rows, np.float32) for name in names}})
    size, path = table.nbytes, tmp_path / "log.parquet"
    pq.write_table(table, path, row_group_size=row_group, data_page_size=1 << 16, use_dictionary=False)
    del table
    model, before = Model(make_ranker("linear", FeatureEncoder(8)).eval(), names, "click"), pa.total_allocated_bytes()
    score(model, path, tmp_path, numbers=40_000, on_progress=lambda *_: held.append(pa.total_allocated_bytes()))
    assert len(held) > 80
    assert max(held) - before < size / 3


def test_batches_are_no_larger_for_larger_row_groups_and_reading_is_never_far_ahead(tmp_path):
    rows, progress = 5000, []
    pq.write_table(frame(rows), tmp_path / "log.parquet", row_group_size=rows)
    score(make_model(), tmp_path / "log.parquet", tmp_path, numbers=600, on_progress=lambda *now: progress.append(now))
    assert progress == [(100 * (n + 1), rows) for n in range(rows // 100)]
    read: list[int] = []
    ahead = _read_ahead(read.append(n) or n + 1 for n in range(100))
    for n in ahead:
        assert len(read) <= n + 2
    assert len(read) == 100


def test_small_batches_are_written_as_one_row_group(tmp_path):
    score(make_model(), frame(500), tmp_path, numbers=10)
    assert pq.read_metadata(tmp_path / "scores.parquet").num_row_groups == 1


# --- Errors -----------------------------------------------------------------------------------------------------------


def with_nan(table: pa.Table, row: int, column: str = "f1") -> pa.Table:
    values = table[column].to_numpy().copy()
    values[row] = np.nan
    return table.set_column(table.column_names.index(column), column, pa.array(values))


@pytest.mark.parametrize("shape", [as_parquet, as_csv, as_arrow, as_table])
def test_a_bad_value_is_named_by_its_row_in_the_file(shape, tmp_path):
    source = shape(with_nan(frame(60), 41), tmp_path, lambda _: 9)
    name = r"log\.\w+" if isinstance(source, Path) else "the Table"
    with pytest.raises(ColumnError, match=rf"{name}: feature 'f1' has values that are not finite, got nan in row 42 "):
        score(make_model(), source, tmp_path, numbers=30, block=600)


def test_a_bad_value_is_named_by_its_shard(tmp_path):
    (tmp_path / "shards").mkdir()
    pq.write_table(frame(20), tmp_path / "shards" / "a.parquet")
    pq.write_table(with_nan(frame(20), 13), tmp_path / "shards" / "b.parquet")
    with pytest.raises(ColumnError, match=r"b\.parquet: feature 'f1' .* in row 14 "):
        score(make_model(), tmp_path / "shards", tmp_path, numbers=30)


def test_bad_lists_and_lines_are_named_by_their_place(tmp_path):
    table = pa.table({"request": range(5), "item": [["a"], [], ["b", "c"], ["d"], ["e"]]})
    features = [[[1.0, 2, 3]], [], [[1.0, 2, 3], [1.0, 2, np.nan]], [[1.0, 2, 3]], [[1.0, 2, 3]]]
    model = make_model([f"features[{i}]" for i in range(3)])
    with pytest.raises(ColumnError, match="not finite, got nan in row 3 "):  # the third item
        score(model, table.append_column("features", [features]), tmp_path, numbers=6)
    features = [[[1.0, 2, 3]], [], [[1.0, 2, 3], [1.0, 2, 3]], [[1.0, 2, 3]], [[1.0, 2, 3, 4]]]
    with pytest.raises(DataError, match="same length in every row, got 3 features and later 4"):
        score(model, table.append_column("features", [features]), tmp_path, numbers=6)
    features = [[[1.0, 2, 3]], [], [[1.0, 2, 3], [1.0, 2, 3]], [], [[1.0, 2, 3]]]
    with pytest.raises(ColumnError, match="must have as many values as 'item' in every row, got 0 and 1 in row 4"):
        score(model, table.append_column("features", [features]), tmp_path, numbers=6)
    (tmp_path / "set.txt").write_text("1 qid:1 1:2\n" * 30 + "1 qid:1 1:nan\n")
    with pytest.raises(ColumnError, match=r"set\.txt: feature '1' .* got nan in row 31 "):
        score(make_model(["1"]), tmp_path / "set.txt", tmp_path, block=50)


def test_trees_accept_missing_values(tmp_path):
    scored = score(trees_that_count_gaps(), with_nan(frame(20), 13), tmp_path, numbers=30)
    assert scored["score"].to_pylist() == [1.0 if row == 13 else 0.0 for row in range(20)]


def test_features_and_categories_that_differ_from_training_are_errors(tmp_path):
    shops = frame().append_column("shop", pa.array(["x"] * 12))
    with pytest.raises(ColumnError, match="no column 'shop' for the categorical features"):
        score(make_model(categorical=("shop",)), frame(), tmp_path)
    with pytest.raises(ColumnError, match="feature column 'shop' must hold numbers"):
        score(make_model(("f0", "shop")), shops, tmp_path)
    pa.csv.write_csv(frame().slice(0, 0), tmp_path / "log.csv")
    for empty in (frame().slice(0, 0), tmp_path / "log.csv"):
        with pytest.raises(DataError, match=r"there are no rows|Empty CSV"):
            score(make_model(), empty, tmp_path)
    (tmp_path / "set.txt").write_text("1 qid:1 1:2\n")
    with pytest.raises(DataError, match="features that the model was trained on are missing: f0, f1, price"):
        score(make_model(), tmp_path / "set.txt", tmp_path)
    with pytest.raises(OptionError, match=r"SVMlight files have no named columns, got features='f0'"):
        score(make_model(), tmp_path / "set.txt", tmp_path, features="f0")
    with pytest.raises(OptionError, match="no device 'abacus'"):
        score_file(make_model(), frame(), tmp_path / "scores.parquet", device="abacus")


@pytest.mark.parametrize("exists", [False, True])
def test_a_failure_in_the_middle_does_not_change_the_output(exists, tmp_path):
    out = tmp_path / "scores.parquet"
    if exists:
        out.write_text("of before")
    threads = threading.active_count()

    def stop(done: int, _rows: int | None) -> None:
        if done > 50:
            raise KeyboardInterrupt

    with pytest.raises(ColumnError, match="in row 92 "):
        score(make_model(), with_nan(frame(100), 91), tmp_path, numbers=30)
    with pytest.raises(KeyboardInterrupt):
        score(make_model(), frame(100), tmp_path, numbers=30, on_progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == (["scores.parquet"] if exists else [])
    assert not exists or out.read_text() == "of before"
    assert threading.active_count() == threads


def test_outputs_that_exist_or_have_an_unknown_suffix_are_errors(tmp_path):
    (tmp_path / "scores.csv").write_text("of before")
    with pytest.raises(OutputError, match="output exists already"):
        score_file(make_model(), frame(), tmp_path / "scores.csv")
    with pytest.raises(OptionError, match="written as Parquet or CSV"):
        score_file(make_model(), frame(), tmp_path / "scores.json")
    score_file(make_model(), frame(), tmp_path / "scores.csv", overwrite=True)
    scored, expected = pd.read_csv(tmp_path / "scores.csv"), score(make_model(), frame(), tmp_path).to_pandas()
    assert scored["score"].to_numpy() == pytest.approx(expected["score"].to_numpy(), rel=1e-6)
    pd.testing.assert_frame_equal(scored.drop(columns="score"), expected.drop(columns="score"))
    marks = frame().set_column(1, "item", pa.array([{"id": n} for n in range(12)]))
    with pytest.raises(OutputError, match=r"scores\.csv: cannot be written .*; write Parquet"):
        score_file(make_model(), marks, tmp_path / "scores.csv", overwrite=True)


def test_the_first_request_is_shown_in_its_new_order():
    requests, items = pa.array(["b", "a", "b", "b"]), pa.array(["x", "y", "z", "w"])
    keys = Log(np.zeros((4, 1), np.float32), np.arange(5), requests, ("price",), item_ids=items)
    scores = np.array([0.5, 9.0, 0.1, 0.7])
    assert first_ranking(keys, scores) == "request b, best first: items w, x, z"
    assert first_ranking(keys, scores, most=2) == "request b, best first: items w, x, ..."
    assert first_ranking(keys.select(np.array([1])), scores[1:2]) is None


# --- The command ------------------------------------------------------------------------------------------------------


def test_the_command_scores_files_and_prints_their_number(ultr, tmp_path):
    log, _ = simulate_log(make_shown_log(requests=40), User())
    write_log(log, tmp_path / "log.parquet")
    done = ultr(
        *("train", tmp_path / "log.parquet", "--out", tmp_path / "run", "--method", "pointwise", "--set", "hidden=8"),
        *("--steps", 3, "--set", "evaluate_every=3", "--set", "select=feedback-ndcg@5", "--device", "cpu"),
    )
    assert done.returncode == 0, done.stderr
    out = tmp_path / "scores.parquet"
    done = ultr("score", tmp_path / "run", tmp_path / "log.parquet", "--out", out, "--device", "cpu")
    assert (done.returncode, done.stdout) == (0, "")
    assert f"wrote {out}: {log.rows} scores" in done.stderr
    table = pq.read_table(out)
    assert table.column_names == ["request", "position", "relevance", "score"]
    first = table.filter(pc.equal(table["request"], table["request"][0])).sort_by([("score", "descending")])
    best = ", ".join(map(str, first["position"].to_pylist()[:5]))
    example = f"for example, request {table['request'][0].as_py()}, best first: what was at positions {best}"
    assert example in done.stderr
    done = ultr("score", tmp_path / "run", tmp_path / "log.parquet", "--out", out)
    assert done.returncode == 1
    assert "output exists already" in done.stderr
    done = ultr("score", tmp_path / "run", tmp_path / "log.parquet", "--out", tmp_path / "scores.txt")
    assert done.returncode == 2
