"""Trees for search engines: files have the scores of the trees by the rules of each engine."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import make_shown_log
from grown_trees import CATEGORIES, GROWN, NAMES, grow
from ultr.datasets.users import User, simulate_log
from ultr.errors import DataError, OptionError
from ultr.log import Log, write_log
from ultr.rankers.boosters import LightGBM, XGBoost
from ultr.rankers.model import load_model
from ultr.serving import engines
from ultr.serving.distilling import distil
from ultr.serving.engines import ENGINES, FILL_IN, _solr_threshold, engine_trees
from ultr.serving.export import export_run
from ultr.serving.exported import load_exported, onnx_scores
from ultr.serving.forests import UnsupportedTreesError, forest_of
from ultr.training.config import make_config
from ultr.training.data import Decisions
from ultr.training.run import run_training

VALUES = tuple(f"shade {i}" for i in range(1, CATEGORIES))  # of the codes 1, 2, ...
KINDS = [
    ("lightgbm", "default"),
    ("lightgbm", "missing"),
    ("xgboost", "default"),
    ("xgboost", "missing"),
    ("xgboost", "pruned"),
]

# --- Readers of the files, by the rules of the engines ------------------------------------------------------------


parsed = cache(json.loads)


def vespa_score(text: str, row: np.ndarray) -> float:
    """Evaluate the ranking expression that Vespa makes of LightGBM's JSON, in double precision."""
    content = parsed(text)
    names, infos = content["feature_names"], content["feature_infos"]
    categorical = [i for i, name in enumerate(names) if infos[name]["values"]]
    strings = dict(zip(categorical, content["pandas_categorical"], strict=True))

    def value(node: dict) -> float:
        if "leaf_value" in node:
            return node["leaf_value"]
        column = node["split_feature"]
        x = float(row[column])
        if node["decision_type"] == "==":
            attribute = VALUES[int(x) - 1] if x else ""
            wanted = {strings[column][int(index)] for index in node["threshold"].split("||")}
            goes_left = attribute in wanted
            assert not node["default_left"]  # isNan of a string is not defined
        else:
            threshold = float(node["threshold"])
            goes_left = not x >= threshold if node["default_left"] else x < threshold
        return value(node["left_child"] if goes_left else node["right_child"])

    return sum(value(tree["tree_structure"]) for tree in content["tree_info"])


def engine_values(names: list[str], row: np.ndarray) -> dict[str, np.float32]:
    """Return the features as an engine with one feature for each category has them."""
    columns = dict(zip(NAMES, row, strict=True))
    colour = VALUES[int(columns["colour"]) - 1] if columns["colour"] else None
    return {
        name: np.float32(name.partition(":")[2] == colour) if ":" in name else np.float32(columns[name])
        for name in names
    }


def solr_score(text: str, row: np.ndarray) -> float:
    """Evaluate a MultipleAdditiveTreesModel of Solr 9.2 or later."""
    content = parsed(text)
    values = engine_values([feature["name"] for feature in content["features"]], row)
    assert content["params"]["isNullSameAsZero"] is False
    score = np.float32(0)
    for tree in content["params"]["trees"]:
        node = tree["root"]
        while "feature" in node:
            x, threshold = values[node["feature"]], np.float32(node["threshold"]) + np.float32(1e-6)
            side = "left" if x <= threshold else "right" if x > threshold else node["missing"]
            node = node[side]
        score += np.float32(tree["weight"]) * np.float32(node["value"])
    return float(score)


def ltr_score(text: str, row: np.ndarray) -> float:
    """Evaluate a model of the type model/xgboost+json of OpenSearch 3.8 or later."""
    model = parsed(text)["model"]["model"]
    assert model["type"] == "model/xgboost+json"
    score = np.float32(0)
    for tree in parsed(model["definition"]):
        node = tree
        while "leaf" not in node:
            yes, no = node["children"]
            assert (node["yes"], node["no"]) == (yes["nodeid"], no["nodeid"])
            assert isinstance(node["depth"], int)
            x = engine_values([node["split"]], row)[node["split"]]
            left = node["missing"] == node["yes"] if np.isnan(x) else np.float32(node["split_condition"]) > x
            node = yes if left else no
        score += np.float32(node["leaf"])
    return float(score)


READERS = {
    "vespa": ("m.json", vespa_score),
    "solr": ("solr-model.json", solr_score),
    "opensearch": ("ltr-model.json", ltr_score),  # elasticsearch has the same function
}


@cache
def written(library: str, kind: str, engine: str) -> tuple[object, str, tuple[list[float], ...]]:
    """Return trees, their file for an engine, and for each column values on each threshold and next to it."""
    booster = grow(library, {"max_cat_to_onehot": 8, **GROWN[kind]}, missing=kind == "missing", rounds=3)
    model = engine_trees([(booster, 1.0)], NAMES, {"colour": VALUES}, engine)
    name, _ = READERS[engine]
    values = []
    for column in range(4):
        if column == 2:
            values.append([float(code) for code in range(CATEGORIES)])
            continue
        on = np.concatenate([tree.threshold[tree.feature == column] for tree in forest_of(booster).trees])
        on = on.astype(np.float32)
        # Solr reaches some thresholds only up to their last digit.
        step = 2 * np.maximum(np.spacing(np.abs(on)), np.float32(2e-13)) if engine == "solr" else None
        around = (
            [on - step, on + step]
            if step is not None
            else [on, np.nextafter(on, np.float32(-9)), np.nextafter(on, np.float32(9))]
        )
        values.append(
            np.concatenate([[np.nan, 0.0, -0.0, -3e38, 3e38, 0.5, -1.25], *around]).astype(np.float32).tolist()
        )
    return booster, ENGINES[engine](model, NAMES, "m")[name], tuple(values)


@pytest.mark.parametrize("engine", READERS)
@pytest.mark.parametrize(("library", "kind"), KINDS)
@given(data=st.data())
def test_an_engine_has_the_scores_of_the_library(engine, library, kind, data):
    booster, text, values = written(library, kind, engine)
    count = data.draw(st.integers(1, 5))
    columns = [data.draw(st.lists(st.sampled_from(v), min_size=count, max_size=count)) for v in values]
    rows = np.array(columns, np.float32).T
    scores = [READERS[engine][1](text, row) for row in rows]
    expected = booster.predict(rows)
    np.testing.assert_allclose(scores, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("library", "kind"), KINDS)
def test_the_trees_of_these_tests_have_sets_and_both_directions_of_missing_values(library, kind):
    trees = forest_of(written(library, kind, "vespa")[0]).trees
    assert any(len(values) > 1 for tree in trees for values in tree.categories.values())
    if kind == "missing":
        assert {bool(way) for tree in trees for way in tree.missing_left[tree.feature == 0]} == {True, False}
    if library == "xgboost":
        assert any(tree.missing_left[split] for tree in trees for split in tree.categories)


@given(bits=st.integers(0, 2**32 - 1))
def test_a_threshold_of_solr_is_at_most_one_step_from_that_of_the_trees(bits):
    below = np.uint32(bits).view(np.float32)
    if not np.isfinite(below):
        return
    wanted = np.nextafter(below, np.float32(-np.inf))
    with np.errstate(over="ignore"):
        reached = _solr_threshold(below) + np.float32(1e-6)
        step = max(float(np.spacing(np.abs(wanted))), 1.2e-13)
        assert not np.isfinite(wanted) or float(wanted) - step <= float(reached) <= float(wanted)


def test_weighted_sums_of_trees_and_their_base_scores_are_added():
    first, second = grow("lightgbm", {}, missing=True, rounds=2), grow("xgboost", {}, missing=True, rounds=2)
    model = engine_trees([(first, 0.25), (second, 3.0)], NAMES, {"colour": VALUES}, "opensearch")
    text = ENGINES["opensearch"](model, NAMES, "m")["ltr-model.json"]
    rows = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
    rows[:, 2] = np.arange(30)
    expected = 0.25 * first.predict(rows) + 3 * second.predict(rows)
    np.testing.assert_allclose([ltr_score(text, row) for row in rows], expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(model.scores(rows), expected, rtol=1e-6)


def test_trees_without_a_split_are_constant():
    booster = grow("lightgbm", {"min_data_in_leaf": 10_000}, missing=False, rounds=2)
    for engine, (name, read) in READERS.items():
        model = engine_trees([(booster, 1.0)], NAMES, {"colour": VALUES}, engine)
        score = read(ENGINES[engine](model, NAMES, "m")[name], np.zeros(4, np.float32))
        assert score == pytest.approx(booster.predict(np.zeros((1, 4), np.float32))[0], rel=1e-6)


# --- What an engine cannot express --------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_zeros_as_missing_values_are_an_error(engine):
    booster = grow("lightgbm", {"zero_as_missing": True}, missing=False)
    with pytest.raises(UnsupportedTreesError, match=rf"{engine} cannot treat zero as a missing value.*--distill"):
        engine_trees([(booster, 1.0)], NAMES, {"colour": VALUES}, engine)


@pytest.mark.parametrize("engine", ["solr", "opensearch"])
def test_sets_of_too_many_categories_are_an_error(engine, monkeypatch):
    monkeypatch.setattr(engines, "MAX_NODES", 30)
    model = engine_trees([(grow("xgboost", {}, missing=False), 1.0)], NAMES, {"colour": VALUES}, engine)
    with pytest.raises(UnsupportedTreesError, match=r"more than 30 nodes.*--distill"):
        ENGINES[engine](model, NAMES, "m")


def test_trees_that_are_too_deep_are_an_error(monkeypatch):
    monkeypatch.setattr(engines, "MAX_DEPTH", 2)
    with pytest.raises(UnsupportedTreesError, match="deeper than 2 splits"):
        engine_trees([(grow("lightgbm", {}, missing=False), 1.0)], NAMES, {"colour": VALUES}, "solr")


def test_a_category_that_vespa_cannot_quote_is_an_error():
    values = ('the "red" one', *VALUES[1:])
    model = engine_trees([(grow("lightgbm", {}, missing=False), 1.0)], NAMES, {"colour": values}, "vespa")
    with pytest.raises(UnsupportedTreesError, match=r'got .the "red" one.; replace quotes'):
        ENGINES["vespa"](model, NAMES, "m")


def test_a_feature_with_the_name_of_a_category_is_an_error():
    names = ("colour:shade 3", "b", "colour", "d")
    with pytest.raises(DataError, match="two features have the same name in solr"):
        engine_trees([(grow("lightgbm", {}, missing=False), 1.0)], names, {"colour": VALUES}, "solr")


# --- Names and features -------------------------------------------------------------------------------------------


def test_vespa_has_rank_features_by_name_and_functions_for_all_others():
    names = ("bm25(title)", "the price", "colour", "1st")
    booster = grow("lightgbm", {}, missing=False)
    files = ENGINES["vespa"](engine_trees([(booster, 1.0)], names, {"colour": VALUES}, "vespa"), names, "my-model")
    assert json.loads(files["my_model.json"])["feature_names"] == ["bm25(title)", "the_price", "colour", "_1st"]
    profile = files["my_model.profile"]
    assert 'lightgbm("my_model.json")' in profile
    used = {names[i] for tree in forest_of(booster).trees for i in tree.feature}
    functions = {"the price": "the_price", "colour": "colour", "1st": "_1st"}
    assert set(re.findall(r"function (\w+)\(\)", profile)) == {functions[name] for name in used & functions.keys()}
    assert profile.count(f"attribute({FILL_IN})") == len(used & functions.keys())


def test_names_of_functions_are_unique():
    names = ("a b", "a-b", "colour", "a_b")
    model = engine_trees([(grow("lightgbm", {}, missing=False), 1.0)], names, {"colour": VALUES}, "vespa")
    found = json.loads(ENGINES["vespa"](model, names, "m")["m.json"])["feature_names"]
    assert len(set(found)) == 4


def test_templates_have_each_feature_of_the_trees_with_a_place_to_fill_in():
    booster = grow("lightgbm", {}, missing=True)
    for engine, model_file, features_file in (
        ("solr", "solr-model.json", "solr-features.json"),
        ("opensearch", "ltr-model.json", "ltr-features.json"),
    ):
        files = ENGINES[engine](engine_trees([(booster, 1.0)], NAMES, {"colour": VALUES}, engine), NAMES, "m")
        features = json.loads(files[features_file])
        features = features if engine == "solr" else features["featureset"]["features"]
        named = [feature["name"] for feature in features]
        used = set(re.findall(r'\\?"(?:split|feature)\\?": \\?"(.*?)\\?"', files[model_file]))
        assert set(named) == used
        assert {"a", "d"} < used
        assert sum(FILL_IN in json.dumps(feature) for feature in features) == len(features)
        one_hot = next(feature for feature in features if feature["name"].startswith("colour:"))
        assert one_hot["name"].removeprefix("colour:") in json.dumps(
            one_hot[{"solr": "params"}.get(engine, "template")]
        )


# --- Runs ---------------------------------------------------------------------------------------------------------

FAST = {
    "network.steps": 8,
    "bias_steps": 10,
    "batch": 16,
    "hidden": (8,),
    "device": "cpu",
    "trees.rounds": 8,
    "select": "feedback-ndcg@10",
    "label": "click",
    "propensities": {str(k): 1 / k for k in range(1, 20)},
}


PAIRS = {"method_options": {"final": "pairs"}}


def coloured_log(requests: int = 300, seed: int = 0) -> Log:
    log, _ = simulate_log(make_shown_log(requests=requests, features=len(NAMES), seed=seed), User(), seed=seed)
    features = log.features.copy()
    features[:, 2] = np.random.default_rng(seed).integers(1, 4, len(features))
    vocabularies = {"colour": pa.array(["red", "green", "blue"])}
    return replace(log, features=features, feature_names=NAMES, vocabularies=vocabularies, relevance=None)


@pytest.fixture(scope="module")
def log_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("log") / "log.parquet"
    write_log(coloured_log(), path)
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory, log_file) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    kinds = {"trees": "lightgbm", "xgboost": "xgboost", "mlp": "mlp"}
    options = {"mlp": {}, "trees": PAIRS, "xgboost": PAIRS}
    columns = {"categorical": ("colour",)}
    return {
        name: run_training(make_config(str(log_file), ranker=ranker, **columns, **options[name], **FAST), folder / name)
        for name, ranker in kinds.items()
    }


@pytest.mark.parametrize(
    ("format", "files"),
    [
        ("vespa", {"ranker.json", "ranker.profile"}),
        ("solr", {"solr-model.json", "solr-features.json"}),
        ("elasticsearch", {"ltr-model.json", "ltr-features.json"}),
        ("opensearch", {"ltr-model.json", "ltr-features.json"}),
        ("lightgbm", {"lightgbm.txt"}),
    ],
)
def test_a_run_of_trees_alone_is_exported_as_it_is(format, files, runs, tmp_path):
    exported = export_run(runs["trees"], tmp_path / "model", format=format)
    assert {path.name for path in exported.folder.iterdir()} == {"model.json", "README.md"} | files
    assert "distilled" not in exported.about
    assert exported.about["parity"]["largest_difference"] <= 1e-6
    assert f"are for {format}; the model has the name `ranker`" in (exported.folder / "README.md").read_text()
    with pytest.raises(DataError, match=f"exported for {format}, without ONNX"):
        exported.session()
    export_run(runs["mlp"], tmp_path / "model", overwrite=True)  # an exported model may be replaced


@pytest.mark.parametrize("library", [LightGBM, XGBoost])
def test_the_file_of_a_library_is_read_by_the_library(library, runs, tmp_path):
    run = runs["trees" if library is LightGBM else "xgboost"]
    folder = export_run(run, tmp_path / "model", format=library.LIBRARY).folder
    log = coloured_log(seed=3)
    model = load_model(run)
    scores = library.load(folder / library.FILE, (2,)).predict(model.columns_of(log))
    np.testing.assert_allclose(scores, model.score(log), rtol=1e-6, atol=1e-6)


def test_another_library_is_learned_from_the_scores(runs, log_file, tmp_path):
    with pytest.raises(DataError, match=r"the file format xgboost holds one ensemble.*got lightgbm; .*--distill"):
        export_run(runs["trees"], tmp_path / "model", format="xgboost")
    exported = export_run(runs["trees"], tmp_path / "model", format="xgboost", distill=str(log_file))
    assert exported.about["distilled"]["library"] == exported.ranker == "xgboost"


def test_a_network_is_learned_from_the_log_of_training(runs, log_file, tmp_path, ultr):
    done = ultr("export", runs["mlp"], "--out", tmp_path / "model", "--format", "solr", "--name", "mine")
    assert done.returncode == 0, done.stderr
    about = load_exported(tmp_path / "model").about
    distilled = about["distilled"]
    assert distilled["log"] == str(log_file)
    assert distilled["unused"]
    assert distilled["metric"] == "feedback-ndcg@10"
    assert about["calibration"] is None
    values = distilled["values"]
    assert values["difference"] == pytest.approx(values["trees"] - values["ranker"])
    assert f"{values['trees']:.4f} for the trees" in done.stderr
    assert f"Kendall's τ) of both: {distilled['agreement']:.3f}" in done.stderr
    card = " ".join((tmp_path / "model" / "README.md").read_text().split())
    assert f"{values['ranker']:.4f} for the ranker and {values['trees']:.4f} for the trees" in card
    assert '"name": "mine"' in (tmp_path / "model" / "solr-model.json").read_text()


def test_trees_learn_the_order_of_a_ranker(runs, tmp_path):
    """The network is a smooth function of four features, so that 300 rounds on enough rows have nearly its order."""
    write_log(coloured_log(1500, seed=5), tmp_path / "more.parquet")
    found = distil(runs["mlp"], load_model(runs["mlp"]), str(tmp_path / "more.parquet"), library="lightgbm")
    assert found.agreement > 0.9
    assert found.requests > 200
    again = distil(runs["mlp"], load_model(runs["mlp"]), str(tmp_path / "more.parquet"), library="lightgbm")
    assert again.to_json() == found.to_json()


def test_a_log_without_feedback_gives_the_rank_correlation_alone(runs, tmp_path):
    log = replace(coloured_log(seed=5), actions={}, positions=None)
    write_log(log, tmp_path / "candidates.parquet")
    found = distil(runs["mlp"], load_model(runs["mlp"]), str(tmp_path / "candidates.parquet"), library="lightgbm")
    assert (found.metric, found.values) == (None, {})
    assert 0 < found.agreement <= 1


def test_the_off_policy_value_of_a_run_with_segments_is_compared(tmp_path):
    log = coloured_log()
    device = pa.array([("phone", "desk")[i % 2] for i in range(len(log))])
    log = replace(log, context={**log.context, "segment": device}, columns={**log.columns, "segment": "device"})
    write_log(log, tmp_path / "log.parquet")
    names = [name for name in pq.read_schema(tmp_path / "log.parquet").names if name in ("segment", "device")]
    options = {**FAST, "select": "off-policy-reward@10", "propensities": None, "segment": names[0]}
    run = run_training(make_config(str(tmp_path / "log.parquet"), ranker="mlp", **options), tmp_path / "run")
    assert Decisions.load(run).segments == ("desk", "phone")
    found = distil(run, load_model(run), None, library="lightgbm")
    assert found.metric == "off-policy-reward@10"
    assert found.values["difference"] == pytest.approx(found.values["trees"] - found.values["ranker"])


def test_without_a_log_a_network_is_an_error_that_says_what_to_do(tmp_path):
    config = make_config("gone.parquet", ranker="mlp", **FAST)
    run = run_training(config, tmp_path / "run", source=coloured_log())
    with pytest.raises(DataError, match=r"cannot learn its scores from the log of training.*add --distill LOG"):
        export_run(run, tmp_path / "model", format="vespa")
    with pytest.raises(DataError, match="no such file"):
        export_run(run, tmp_path / "model", format="vespa", distill=str(tmp_path / "other.parquet"))
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "sorl"}, r"must be one of onnx, vespa, .* got sorl; .*solr"),
        ({"layout": "kserve"}, "--layout must be folder or triton"),
        ({"layout": "triton", "format": "solr"}, "Triton needs ONNX"),
        ({"distill": "log.parquet"}, "--distill is for formats of trees.*add --format"),
        ({"name": "a b"}, "the name of the model has other characters, got a b"),
    ],
)
def test_options_that_contradict_each_other_are_an_error(options, message, runs, tmp_path):
    with pytest.raises(OptionError, match=message):
        export_run(runs["trees"], tmp_path / "model", **options)


# --- Triton -------------------------------------------------------------------------------------------------------


def read_pbtxt(text: str) -> dict:
    """Read the part of protobuf's text format that a configuration has: numbers, texts, names, lists and messages."""
    rest = iter(re.findall(r'"[^"]*"|[\w.-]+|[{}\[\]:,]', re.sub(r"#.*", "", text)))

    def value(word: str) -> object:
        if word == "{":
            return message("}")
        if word == "[":
            items = []
            while (word := next(rest)) != "]":
                items += [] if word == "," else [value(word)]
            return items
        return json.loads(word) if word[0] in '"-0123456789' else word

    def message(end: str | None) -> dict:
        fields = {}
        for name in rest:
            if name == end:
                break
            if name != ",":
                word = next(rest)
                fields[name] = value(next(rest) if word == ":" else word)
        return fields

    return message(None)


@pytest.mark.parametrize("run", ["mlp", "trees"])
def test_the_configuration_of_triton_is_that_of_the_onnx_model(run, runs, tmp_path):
    exported = export_run(runs[run], tmp_path / "repository" / "shop", layout="triton")
    config = read_pbtxt((exported.folder / "config.pbtxt").read_text())
    assert (config["name"], config["backend"], config["max_batch_size"]) == ("shop", "onnxruntime", 0)
    graph = onnx.load(exported.folder / "1" / "model.onnx").graph
    types = {onnx.TensorProto.FLOAT: "TYPE_FP32"}
    for tensors, described in ((graph.input, config["input"]), (graph.output, config["output"])):
        assert described == [
            {
                "name": tensor.name,
                "data_type": types[tensor.type.tensor_type.elem_type],
                "dims": [each.dim_value or -1 for each in tensor.type.tensor_type.shape.dim],
            }
            for tensor in tensors
        ]


def test_each_export_to_triton_has_the_next_version_and_can_be_read(runs, tmp_path):
    for version in ("1", "2"):
        exported = export_run(runs["mlp"], tmp_path / "shop", layout="triton", overwrite=True)
        assert [path.name for path in exported.folder.iterdir() if path.is_dir()] == [version]
    log, model = coloured_log(seed=3), load_model(runs["mlp"])
    scores = onnx_scores(exported.session(threads=1), model.columns_of(log)[None])[0]
    np.testing.assert_allclose(scores, model.score(log), rtol=1e-5, atol=1e-5)
    assert 'InferenceSession("2/model.onnx")' in (exported.folder / "README.md").read_text()
