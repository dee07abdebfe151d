"""LightGBM and XGBoost with one interface, and the tasks that each is given."""

from __future__ import annotations

import sys

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ultr.errors import DataError, MissingExtraError, OptionError
from ultr.log import Log
from ultr.log.labels import Label
from ultr.methods import MethodInputs, make_tree_method
from ultr.methods.trees import BUCKETS, bucketed
from ultr.rankers.boosters import (
    BOOSTERS,
    VALUES_PER_THREAD,
    Boosting,
    TreeRanker,
    TreeRows,
    check_parameters,
    lightgbm_parameters,
    parse_parameters,
)
from ultr.rankers.tree_objective import PairTerms, PairwiseObjective

REQUESTS, ITEMS = 120, 5
SMALL = {"lightgbm": {"num_leaves": 7}, "xgboost": {"max_depth": 3}}
STUMPS = {
    "lightgbm": {"num_leaves": 2, "min_data_per_group": 1, "min_data_in_leaf": 1, "cat_smooth": 0},
    "xgboost": {"max_depth": 1, "min_child_weight": 0},
}
DRAWN = {
    "lightgbm": {"bagging_fraction": 0.5, "bagging_freq": 1, "num_leaves": 7},
    "xgboost": {"subsample": 0.5, "max_depth": 3},
}

every_library = pytest.mark.parametrize("library", BOOSTERS)


def rows_of(features: np.ndarray, **changes) -> TreeRows:
    lengths = np.full(len(features) // ITEMS, ITEMS)
    names = tuple(f"f{i}" for i in range(features.shape[1]))
    return TreeRows(features.astype(np.float32), **{"lengths": lengths, "names": names, **changes})


def gaps_of(value: np.ndarray) -> PairwiseObjective:
    return PairwiseObjective(PairTerms(np.arange(0, len(value) + 1, ITEMS), np.ones(len(value) // ITEMS), value))


@pytest.fixture
def toy() -> tuple[TreeRows, PairwiseObjective]:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(REQUESTS * ITEMS, 3))
    return rows_of(features), gaps_of((features[:, 0] + 0.3 * rng.normal(size=len(features)) > 0.5).astype(float))


def grown(library: str, rows: TreeRows, objective=None, *, rounds: int = 8, start=None, stop: int = 0, **how):
    found = []

    def after(booster, number: int) -> bool:
        found.append((booster, number))
        return number == stop

    how = {"parameters": SMALL[library], **how}
    BOOSTERS[library].grow(rows, Boosting(rounds, 0.3, objective=objective, **how), after, start=start)
    assert found[-1][0].rounds == found[-1][1] == (stop or rounds)
    return found[-1][0]


# --- Trees and their files ----------------------------------------------------------------------------------------


@every_library
def test_trees_are_saved_up_to_a_round_and_read_again(library, toy, tmp_path):
    booster, path = grown(library, *toy), tmp_path / BOOSTERS[library].FILE
    for rounds in (8, 3):
        booster.save(path, rounds=rounds)
        again = BOOSTERS[library].load(path)
        assert again.rounds == rounds
        np.testing.assert_array_equal(again.predict(toy[0].features), booster.predict(toy[0].features, 0, rounds))
    assert len(np.unique(booster.predict(toy[0].features))) > 10


@every_library
def test_rounds_add_up(library, toy):
    booster, features = grown(library, *toy), toy[0].features
    parts = [booster.predict(features, first, last) for first, last in ((0, 3), (3, 4), (4, 8))]
    np.testing.assert_allclose(sum(parts), booster.predict(features), atol=1e-6)
    assert not booster.predict(features, 4, 4).any()
    assert booster.predict(features[:0]).shape == (0,)


@every_library
def test_rounds_of_a_mean_add_up_too(library, toy):
    """Labels are far from zero: the base score must count once."""
    log = make_log(label=20 + toy[0].features[:, 0])
    (task,) = tree_method("pointwise", library).tasks(log)
    booster, features = grown(library, task.rows, library_options=task.library_options), toy[0].features
    parts = [booster.predict(features, first, last) for first, last in ((0, 3), (3, 8))]
    np.testing.assert_allclose(sum(parts), booster.predict(features), rtol=1e-5)


@every_library
def test_a_stopped_run_can_be_resumed(library, toy, tmp_path):
    rows, objective = toy
    whole, path = grown(library, rows, objective), tmp_path / BOOSTERS[library].FILE
    half = grown(library, rows, objective, stop=4)
    half.save(path, rounds=4)
    resumed = grown(library, rows, objective, start=BOOSTERS[library].load(path))
    np.testing.assert_allclose(resumed.predict(rows.features), whole.predict(rows.features), atol=1e-5)
    resumed.save(path, rounds=8)
    assert BOOSTERS[library].load(path).rounds == 8


@every_library
def test_one_seed_gives_the_same_bits(library, toy, tmp_path):
    rows, objective = toy
    first, same, other = (grown(library, rows, objective, seed=s, parameters=DRAWN[library]) for s in (1, 1, 2))
    for name, booster in (("first", first), ("same", same)):
        booster.save(tmp_path / name, rounds=8)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "same").read_bytes()
    assert (first.predict(rows.features) != other.predict(rows.features)).any()


@every_library
@pytest.mark.parametrize("content", ["", "no trees at all\n"])
def test_a_file_without_trees_is_rejected(library, content, tmp_path):
    path = tmp_path / BOOSTERS[library].FILE
    path.write_text(content)
    with pytest.raises(DataError, match="train again") as raised:
        BOOSTERS[library].load(path)
    assert raised.value.where == path
    with pytest.raises(DataError, match="train again"):
        BOOSTERS[library].load(tmp_path / "absent")


@every_library
def test_trees_are_a_ranker(library, toy):
    booster, features = grown(library, *toy), torch.from_numpy(toy[0].features)
    scores = TreeRanker(booster)(features.view(REQUESTS, ITEMS, -1))
    assert scores.shape == (REQUESTS, ITEMS)
    assert scores.dtype == torch.float32
    np.testing.assert_allclose(scores.flatten(), booster.predict(toy[0].features), rtol=1e-6)


# --- Features -----------------------------------------------------------------------------------------------------


@every_library
def test_missing_values_are_learned_from(library):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(REQUESTS * ITEMS, 2))
    absent = rng.uniform(size=len(features)) < 0.3
    features[absent, 1] = np.nan
    scores = grown(library, rows_of(features), gaps_of(absent.astype(float))).predict(features)
    assert scores[absent].min() > scores[~absent].max()


@every_library
def test_categories_are_split_by_set_and_not_by_size(library, tmp_path):
    """Codes 2 and 5 of 1 to 6 are preferred: one split separates them if codes are categories. 0 is missing."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 7, (REQUESTS * ITEMS, 1)).astype(np.float32)
    liked = np.isin(codes[:, 0], (2, 5)).astype(float)
    every = np.arange(7, dtype=np.float32)[:, None]

    def stump(categorical):
        rows = rows_of(codes, categorical=categorical)
        return grown(library, rows, gaps_of(liked), rounds=1, parameters=STUMPS[library])

    known, numbers = stump((0,)), stump(()).predict(every)
    path = tmp_path / BOOSTERS[library].FILE
    known.save(path, rounds=1)
    for booster in (known, BOOSTERS[library].load(path, (0,))):
        scores = booster.predict(every)
        assert np.array_equal(scores == scores.max(), np.isin(np.arange(7), (2, 5)))
        np.testing.assert_array_equal(scores[[2, 0]], booster.predict(every[[2, 0]]))
    assert not np.array_equal(numbers == numbers.max(), np.isin(np.arange(7), (2, 5)))


@every_library
def test_codes_are_not_changed(library):
    codes = np.random.default_rng(0).integers(0, 4, (REQUESTS * ITEMS, 1)).astype(np.float32)
    before = codes.copy()
    rows = rows_of(codes, categorical=(0,))
    grown(library, rows, gaps_of(np.isin(codes[:, 0], (0, 2)).astype(float)), rounds=2).predict(rows.features)
    np.testing.assert_array_equal(rows.features, before)


@every_library
@pytest.mark.parametrize(
    "names", [("a b", "x[1]", "c"), ("a", "a", "b"), ("a<b", "c,d", '{"e":1}'), ("ä", "日", "c"), ("", "b", "c")]
)
def test_any_names_of_features_are_accepted(library, names, toy, tmp_path):
    rows, objective = toy
    named = grown(library, rows_of(rows.features, names=names), objective, rounds=2)
    path = tmp_path / BOOSTERS[library].FILE
    named.save(path, rounds=2)
    expected = grown(library, rows, objective, rounds=2).predict(rows.features)
    np.testing.assert_array_equal(BOOSTERS[library].load(path).predict(rows.features), expected)


# --- Parameters ---------------------------------------------------------------------------------------------------


@every_library
def test_reserved_parameters_are_rejected(library):
    for name in BOOSTERS[library].RESERVED:
        with pytest.raises(OptionError, match=f"'{name}' .* use method.name, trees.lr"):
            check_parameters(library, {name: 1})
    check_parameters(library, {"lambda": 1.0} if library == "xgboost" else {"lambda_l2": 1.0, "min_child_samples": 5})


@pytest.mark.parametrize("alias", ["n_estimators", "num_round", "shrinkage_rate", "eta", "random_state", "application"])
def test_aliases_of_reserved_parameters_are_rejected(alias):
    with pytest.raises(OptionError, match=f"'{alias}'"):
        check_parameters("lightgbm", {alias: 1})


def test_unknown_parameters_are_rejected():
    with pytest.raises(OptionError, match="did you mean 'num_lea"):
        check_parameters("lightgbm", {"num_leafs": 7})


@every_library
def test_wrong_values_are_rejected_with_the_message_of_the_library(library, toy):
    for value in (-3, "many"):
        name = "num_leaves" if library == "lightgbm" else "max_depth"
        with pytest.raises(OptionError, match=rf"(?s){name}.*trees.parameters") as raised:
            grown(library, *toy, parameters={name: value})
        assert "[bt]" not in str(raised.value)


def test_errors_of_xgboost_have_no_stack_trace(toy):
    with pytest.raises(OptionError) as raised:
        grown("xgboost", *toy, parameters={"tree_method": "exact"})
    assert "[bt]" not in str(raised.value)


@every_library
def test_users_can_set_the_number_of_bins(library, toy):
    rows, objective = toy
    few = grown(library, rows, objective, rounds=1, parameters={**SMALL[library], "max_bin": 3}).predict(rows.features)
    assert len(np.unique(few)) > 1


def test_parameters_are_parsed():
    read = parse_parameters(["a=1", "b=0.5", "c=1e-3", "d=gbdt", "e=-2", "f=2.0", "g=a=b", "h=", "i=nan", "j=true"])
    assert read == {
        "a": 1, "b": 0.5, "c": 0.001, "d": "gbdt", "e": -2, "f": 2.0, "g": "a=b", "h": "", "i": "nan", "j": "true",
    }  # fmt: skip
    assert [type(read[name]) for name in "abef"] == [int, float, int, float]
    for text in ("a", "=1"):
        with pytest.raises(OptionError, match="key=value"):
            parse_parameters([text])


@every_library
def test_a_library_that_is_not_installed_is_named(library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtraError, match=r"ultr\[trees\]"):
        check_parameters(library, {})


# --- Objectives of the libraries ----------------------------------------------------------------------------------


def make_log(label: np.ndarray | None = None, *, positions: bool = True, weights: np.ndarray | None = None) -> Log:
    rng = np.random.default_rng(0)
    rows = REQUESTS * ITEMS
    features = rng.normal(size=(rows, 3)).astype(np.float32)
    label = np.where(features[:, 0] > 0.4, rng.uniform(0, 50, rows), 0) if label is None else label
    return Log(
        features=features,
        offsets=np.arange(0, rows + 1, ITEMS),
        request_ids=pa.array(range(REQUESTS)),
        feature_names=tuple("abc"),
        positions=np.tile(np.arange(1, ITEMS + 1), REQUESTS) if positions else None,
        actions={"dwell": label.astype(np.float32)},
        weights=weights,
    )


def tree_method(name: str, library: str, **options):
    inputs = MethodInputs(Label("dwell"), 3, tuple(range(1, ITEMS + 1)), ranker=library)
    return make_tree_method(name, inputs, **options)


def test_lightgbm_rejects_labels_that_are_not_whole_numbers():
    for label in (None, np.arange(REQUESTS * ITEMS) % 40):
        with pytest.raises(DataError, match=r"method\.labels to buckets or click"):
            tree_method("lambdarank", "lightgbm").tasks(make_log(label))
    levels = np.arange(REQUESTS * ITEMS) % 31
    np.testing.assert_array_equal(tree_method("lambdarank", "lightgbm").tasks(make_log(levels))[0].rows.label, levels)


@every_library
@pytest.mark.parametrize("correction", ["none", "own"])
@pytest.mark.parametrize("labels", ["values", "click", "buckets"])
def test_a_library_ranks_by_its_own_objective(library, labels, correction):
    log = make_log(weights=np.linspace(0.5, 2, REQUESTS).astype(np.float32))
    if library == "lightgbm" and labels == "values":
        log = make_log(np.arange(REQUESTS * ITEMS) % 4 * (log.features[:, 0] > 0.4), weights=log.weights)
    (task,) = tree_method("lambdarank", library, labels=labels, correction=correction).tasks(log)
    options, value = dict(task.library_options), log.actions["dwell"]
    assert task.objective is None
    assert options["objective"] == ("lambdarank" if library == "lightgbm" else "rank:ndcg")
    assert np.array_equal(task.rows.label > 0, value > 0)
    assert (task.rows.positions is not None) == (library == "lightgbm" and correction == "own")
    if library == "xgboost":
        assert options["lambdarank_unbiased"] == (correction == "own")
        assert options["ndcg_exp_gain"] == (labels == "click")
        assert task.rows.label.sum() == pytest.approx((value > 0).sum() if labels == "click" else value.sum(), rel=1e-5)
    elif labels == "buckets":
        assert len(options["label_gain"]) == task.rows.label.max() + 1 == BUCKETS + 1
    scores = grown(library, task.rows, library_options=options).predict(log.features)
    assert scores[value > 0].mean() > scores[value == 0].mean() + 0.1


def test_correction_needs_positions():
    with pytest.raises(DataError, match="--position"):
        tree_method("lambdarank", "xgboost", correction="own").tasks(make_log(positions=False))


@every_library
def test_pointwise_trees_predict_the_label(library):
    weights = np.linspace(0.5, 2, REQUESTS).astype(np.float32)
    log = make_log(weights=weights)
    (task,), label = tree_method("pointwise", library).tasks(log), log.actions["dwell"]
    assert task.rows.lengths is None
    np.testing.assert_array_equal(task.rows.row_weights, np.repeat(weights, ITEMS))
    scores = grown(library, task.rows, library_options=task.library_options).predict(log.features)
    assert np.square(scores - label).mean() < 0.6 * label.var()
    assert np.average(scores, weights=task.rows.row_weights) == pytest.approx(
        np.average(label, weights=task.rows.row_weights), rel=0.1
    )


labels = st.lists(st.just(0.0) | st.floats(0.0009765625, 1000, width=32) | st.sampled_from([1.0, 2.0]), min_size=1)


@given(labels)
def test_buckets_keep_order_and_zero(values):
    label = np.array(values, np.float32)
    found, means = bucketed(label)
    level = found.astype(int)
    assert found.dtype == np.float32
    assert np.array_equal(found > 0, label > 0)
    assert found.max() <= BUCKETS
    assert len(means) == found.max() + 1
    assert means[0] == 0
    order = np.argsort(label, kind="stable")
    assert (np.diff(found[order]) >= 0).all()
    for each in np.unique(level):
        assert means[each] == pytest.approx(label[level == each].mean(dtype=np.float64), rel=1e-5)
    assert (np.diff([means[each] for each in np.unique(level)]) > 0).all()
    assert np.sum(np.array(means)[level]) == pytest.approx(label.sum(dtype=np.float64), rel=1e-4)


def test_buckets_divide_the_labels_above_zero():
    found, means = bucketed(np.concatenate([np.zeros(50), np.arange(1, 101)]).astype(np.float32))
    assert np.bincount(found.astype(int)).tolist() == [50, 25, 25, 25, 25]
    assert means == pytest.approx([0, 13, 38, 63, 88])
    found, means = bucketed(np.array([0, 3, 3, 3], np.float32))
    assert found.tolist() == [0, 1, 1, 1]
    assert means == [0, 3]


@pytest.mark.parametrize(("values", "threads"), [(0, 1), (1000, 1), (2 * VALUES_PER_THREAD, 2), (10**12, 3)])
def test_small_tables_have_one_thread_of_lightgbm(values, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert lightgbm_parameters(0.1, 0, values)["num_threads"] == threads
