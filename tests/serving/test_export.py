"""Export: ONNX gives the scores of the model for every ranker, method and row; the folder describes its use."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from conftest import make_shown_log, some_always
from grown_trees import CATEGORIES, GROWN, KINDS, NAMES, grow
from ultr.datasets.users import User, simulate_log
from ultr.errors import DataError, MissingExtraError, OutputError, UltrError
from ultr.log import Log, write_log
from ultr.log.labels import Label
from ultr.methods import METHODS, MethodInputs, make_method
from ultr.rankers import RANKERS, FeatureEncoder, Product, fit_encoders, make_ranker
from ultr.rankers.boosters import BOOSTERS, Booster
from ultr.rankers.combined import Combined
from ultr.rankers.model import ROWS_KEPT, Model, kept_rows, load_model
from ultr.serving import export
from ultr.serving.export import check_parity, code, export_run, onnx_bytes
from ultr.serving.exported import is_exported, load_exported, onnx_scores, onnx_session
from ultr.serving.forests import UnsupportedTreesError, forest_of
from ultr.serving.onnx_graphs import trees_to_onnx
from ultr.training.config import make_config
from ultr.training.outcome import value_of_run
from ultr.training.run import run_training
from ultr.utils.jsonfiles import load_json, write_json

DOCS = Path(__file__).parents[2] / "docs" / "export.md"
COLOURS = ("red", "green", "blue")
SHAPES = [(1, 1), (4, 1), (1, 7), (3, 5), (0, 3)]
FAST = {"network.steps": 8, "bias_steps": 10, "batch": 16, "network.evaluate_every": 4, "hidden": (8,), "device": "cpu"}
FAST |= {
    "trees.rounds": 8,
    "trees.evaluate_every": 4,
    "select": "feedback-ndcg@10",
    "label": "click",
}


def coloured_log(requests: int = 80, seed: int = 0, unknown: bool = False) -> Log:
    """Return a log with a categorical feature, which has code 0 for unknown values if `unknown`."""
    log, _ = simulate_log(make_shown_log(requests=requests, features=len(NAMES), seed=seed), User(), seed=seed)
    features = log.features.copy()
    features[:, 2] = np.random.default_rng(seed).integers(0 if unknown else 1, 4, len(features))
    vocabularies = {"colour": pa.array(COLOURS)}
    return replace(log, features=features, feature_names=NAMES, vocabularies=vocabularies, relevance=None)


def make_run(folder: Path, ranker: str, **changes) -> Path:
    theta = {str(k): 1 / k for k in range(1, 20)}
    config = make_config("log.parquet", ranker=ranker, propensities=theta, **{**FAST, **changes})
    return run_training(config, folder, source=coloured_log())


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    one_file = {"method_options": {"final": "pairs"}}
    runs = {ranker: make_run(folder / ranker, ranker, **one_file) for ranker in ("lightgbm", "xgboost")}
    others = {"mlp": "mlp", "blend": "lightgbm", "both": "auto"}
    return runs | {name: make_run(folder / name, ranker) for name, ranker in others.items()}


@pytest.fixture(scope="module")
def folders(runs, tmp_path_factory) -> dict[str, Path]:
    """Each run, exported."""
    folder = tmp_path_factory.mktemp("exported")
    return {ranker: export_run(run, folder / ranker).folder for ranker, run in runs.items()}


def assert_same_scores(model: Model, content: bytes, features: np.ndarray) -> None:
    session = onnx_session(content)
    for shape in SHAPES:
        rows = features[: shape[0] * shape[1]].reshape(*shape, features.shape[1])
        with torch.no_grad():
            expected = model.ranker(torch.from_numpy(rows)).numpy()
        scores = onnx_scores(session, rows)
        assert scores.dtype == np.float32
        np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5 * max(1, np.abs(expected).max(initial=0)))


# --- Networks -----------------------------------------------------------------------------------------------------


def inputs(**changes) -> MethodInputs:
    common = {"positions": tuple(range(1, 13)), "categories": {2: len(COLOURS) + 1}, "feature_names": NAMES}
    return MethodInputs(
        label=Label(), features=len(NAMES), ranker_options={"hidden": (8,)}, binary=("click",), **{**common, **changes}
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(
            pytest.param(*each.values, {}, marks=each.marks, id=each.values[0])
            for each in some_always(METHODS, {"pairwise-em", "pal-click-dwell", "position-feature"})
        ),
        pytest.param("direct", {"values": "ordinal"}, id="direct values=ordinal"),
    ],
)
def test_the_ranker_of_each_method_has_the_same_scores_in_onnx(name, options):
    torch.manual_seed(1)
    log = coloured_log(unknown=True)
    method = make_method(name, inputs(), **options)
    if options:
        method.ranker.fit_values(np.random.default_rng(0).lognormal(size=len(log.features)))
    serving = method.serving()
    for module in serving.modules():
        if isinstance(module, FeatureEncoder):
            module.fit(3 * log.features + 1)
    model = Model(serving.eval(), NAMES, "click", log.vocabularies)
    content = onnx_bytes(model)
    assert_same_scores(model, content, log.features)
    assert str(Path(export.__file__).parent).encode() not in content  # the export names no folder of this machine
    assert not any(node.metadata_props or node.doc_string for node in onnx.load_from_string(content).graph.node)


@pytest.mark.parametrize(("kind", "outputs"), [(Combined, 3), (Product, 2)])
def test_rare_clicks_have_the_same_scores_in_onnx(kind, outputs):
    """The logarithm of a probability near 0 must have all its digits."""
    torch.manual_seed(0)
    rows = coloured_log().features
    network = make_ranker("mlp", FeatureEncoder(len(NAMES)), outputs=outputs, hidden=(8,))
    fit_encoders(network, rows)
    last = [module for module in network.modules() if isinstance(module, nn.Linear) and module.bias is not None][-1]
    with torch.no_grad():
        last.bias.sub_(14)
    model = Model(kind(network).eval(), NAMES, "click")
    assert_same_scores(model, onnx_bytes(model), rows)


@pytest.mark.parametrize(
    ("ranker", "options", "categories"),
    [
        *((name, {}, {0: 3, 2: 4}) for name in RANKERS),
        ("mlp", {"hidden": (8, 4), "norm": "layer", "dropout": 0.3}, {}),
    ],
)
def test_every_ranker_has_the_same_scores_of_odd_values_in_onnx(ranker, options, categories):
    encoder = FeatureEncoder(len(NAMES), categories)
    rows = coloured_log(unknown=True).features.copy()
    encoder.fit(rows)
    rows[0, 1], rows[1, 1], rows[2, 3], rows[3, 3], rows[4, 2] = np.nan, 1e30, np.inf, -np.inf, 99
    rows[5:8, 0] = 7, -2, 1.5
    model = Model(make_ranker(ranker, encoder, **options).eval(), NAMES, "click")
    assert_same_scores(model, onnx_bytes(model), rows)


def test_export_does_not_change_the_model_and_prints_nothing(capfd):
    model = Model(make_ranker("linear", FeatureEncoder(2)).train(), ("a", "b"), "click")
    onnx_bytes(model)
    assert model.ranker.training
    assert capfd.readouterr() == ("", "")


# --- Trees --------------------------------------------------------------------------------------------------------


@cache
def forest(library: str, kind: str) -> tuple[Booster, object, tuple[np.ndarray, ...]]:
    """Return trees, their ONNX, and for each column the values on each threshold and next to it."""
    booster = grow(library, GROWN[kind], missing=kind == "missing")
    translated = forest_of(booster)
    odd = [np.nan, 0.0, -0.0, 1e-35, -1e-35, 1e-36, 1e-45, -3e38, 3e38]
    values = []
    for column in range(4):
        if column == 2:
            values.append(np.array([*range(CATEGORIES), 500], np.float32))
            continue
        at = [tree.threshold[tree.feature == column] for tree in translated.trees]
        on = np.concatenate(at).astype(np.float32)
        around = [np.nextafter(on, np.float32(side)) for side in (-np.inf, np.inf)]
        values.append(np.concatenate([odd, on, *around]).astype(np.float32))
    return booster, onnx_session(trees_to_onnx(booster, 4)), tuple(values)


@pytest.mark.parametrize(("library", "kind"), KINDS)
@given(data=st.data())
def test_rows_on_thresholds_go_the_same_way(library, kind, data):
    booster, session, values = forest(library, kind)
    count = data.draw(st.integers(1, 30))
    columns = [data.draw(st.lists(st.sampled_from(v.tolist()), min_size=count, max_size=count)) for v in values]
    rows = np.array(columns, np.float32).T
    expected = booster.predict(rows).astype(np.float32)
    scores = onnx_scores(session, rows[None])[0]
    if library == "lightgbm":
        np.testing.assert_array_equal(scores, expected)  # both add in double precision
    else:
        np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("library", "kind"), KINDS)
def test_the_trees_of_these_tests_have_double_thresholds_sets_and_missing_values(library, kind):
    booster, *_ = forest(library, kind)
    translated = forest_of(booster)
    assert any(len(values) > 1 for tree in translated.trees for values in tree.categories.values())
    if library == "lightgbm":
        thresholds = np.concatenate([tree.threshold for tree in translated.trees])
        assert (thresholds != thresholds.astype(np.float32)).any()
    if kind == "zero is missing":
        assert translated.zero_is_missing > {2}


@pytest.mark.parametrize("library", BOOSTERS)
def test_only_the_rounds_of_the_booster_are_in_onnx(library):
    booster = grow(library, {}, missing=False)
    fewer = type(booster)(booster.trees, 3, booster.categorical)
    rows = np.random.default_rng(1).normal(size=(1, 50, 4)).astype(np.float32)
    rows[..., 2] = 3
    scores = onnx_scores(onnx_session(trees_to_onnx(fewer, 4)), rows)[0]
    np.testing.assert_allclose(scores, fewer.predict(rows[0]), rtol=1e-5, atol=1e-5)
    assert np.abs(scores - booster.predict(rows[0])).max() > 1e-3


@pytest.mark.parametrize("library", BOOSTERS)
def test_trees_without_a_split_are_constant(library):
    none = {"lightgbm": {"min_data_in_leaf": 10_000}, "xgboost": {"min_child_weight": 1e9}}
    booster = grow(library, none[library], missing=False, rounds=2)
    rows = np.zeros((2, 3, 4), np.float32)
    scores = onnx_scores(onnx_session(trees_to_onnx(booster, 4)), rows)
    np.testing.assert_allclose(scores, booster.predict(rows.reshape(-1, 4)).reshape(2, 3), rtol=1e-6)


def test_trees_with_linear_leaves_are_an_error():
    booster = grow("lightgbm", {"linear_tree": True}, missing=False)
    with pytest.raises(UnsupportedTreesError, match="the leaves are linear models"):
        trees_to_onnx(booster, 4)


def test_trees_too_large_for_onnx_are_an_error(monkeypatch):
    monkeypatch.setattr("ultr.serving.onnx_graphs.MAX_NODES", 50)
    with pytest.raises(UnsupportedTreesError, match="more than 50 nodes"):
        trees_to_onnx(grow("xgboost", {}, missing=False), 4)


# --- The folder ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranker", ["mlp", "lightgbm", "xgboost"])
def test_an_exported_folder_has_the_scores_of_its_run(ranker, runs, folders):
    exported, log = load_exported(folders[ranker]), coloured_log(seed=3)
    library = {"lightgbm": {"lightgbm.txt"}, "xgboost": {"xgboost.json"}}.get(ranker, set())
    assert {path.name for path in exported.folder.iterdir()} == {"model.onnx", "model.json", "README.md"} | library
    for name, digest in exported.files.items():
        assert hashlib.sha256((exported.folder / name).read_bytes()).hexdigest() == digest
    if library:
        name = next(iter(library))
        assert (exported.folder / name).read_bytes() == (runs[ranker] / "model" / name).read_bytes()
    assert exported.feature_names == NAMES
    assert exported.codes == {"colour": {"red": 1, "green": 2, "blue": 3}}
    assert (exported.label, exported.ranker, exported.keeps_missing) == ("click", ranker, True)
    parity = exported.about["parity"]
    assert parity["rows"] == len(kept_rows(runs[ranker]))
    assert 0 <= parity["largest_difference"] <= parity["tolerance"]
    scores = onnx_scores(exported.session(threads=1), log.features[None])[0]
    np.testing.assert_allclose(scores, load_model(runs[ranker]).score(log), rtol=1e-5, atol=1e-5)


def test_a_blend_is_one_onnx_model(runs, folders):
    exported, log = load_exported(folders["blend"]), coloured_log(seed=3)
    assert {path.name for path in exported.folder.iterdir()} == {"model.onnx", "model.json", "README.md"}
    assert [part["ranker"] for part in exported.about["parts"]] == ["lightgbm", "linear"]
    assert exported.keeps_missing
    scores = onnx_scores(exported.session(threads=1), log.features[None])[0]
    np.testing.assert_allclose(scores, load_model(runs["blend"]).score(log), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ranker", ["mlp", "lightgbm"])
def test_model_json_has_the_same_keys_in_a_run_and_in_an_exported_folder(ranker, runs, folders):
    of_run, exported = load_json(runs[ranker] / "model" / "model.json"), load_json(folders[ranker] / "model.json")
    shared = {"format", "ranker", "feature_names", "vocabularies", "label", "data"}
    assert of_run.keys() & exported.keys() == shared
    assert {key: of_run[key] for key in shared} == {key: exported[key] for key in shared}


def test_a_run_keeps_rows_spread_over_validation(tmp_path):
    log = coloured_log(requests=700)
    config = make_config("log", method="pointwise", ranker="linear", held_out=0.5, **FAST)
    run = run_training(config, tmp_path / "run", source=log)
    rows = kept_rows(run)
    assert rows.shape == (ROWS_KEPT, len(NAMES))
    of_log = {tuple(row) for row in log.features.tolist()}
    assert all(tuple(row) in of_log for row in rows.tolist())
    assert len({tuple(row) for row in rows.tolist()}) == ROWS_KEPT


def test_a_difference_is_an_error_and_nothing_is_written(runs, tmp_path, monkeypatch):
    def other_weights(model: Model) -> bytes:
        model.ranker.weights.add_(0.1)
        content = onnx_bytes(model)
        model.ranker.weights.sub_(0.1)
        return content

    monkeypatch.setattr(export, "onnx_bytes", other_weights)
    with pytest.raises(DataError, match="scores real rows differently") as error:
        export_run(runs["mlp"], tmp_path / "model")
    assert re.search(r"a difference of [\d.e-]+ where [\d.e-]+ is allowed", str(error.value))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "content"), [("bias.json", "[]"), ("bias.json", '{"towers": 3}'), ("config.json", "{}")]
)
def test_a_run_with_damaged_files_is_not_exported(name, content, runs, tmp_path):
    run = shutil.copytree(runs["lightgbm"], tmp_path / "run")
    (run / name).write_text(content)
    with pytest.raises(DataError):
        export_run(run, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_scores_that_are_not_finite_are_an_error():
    rows = np.ones((4, 1), np.float32)
    good, bad = (Model(make_ranker("linear", FeatureEncoder(1)).eval(), ("a",), "click") for _ in range(2))
    with torch.no_grad():
        bad.ranker.output.bias.fill_(torch.nan)
    with pytest.raises(DataError, match="some rows is not finite"):
        check_parity(bad, b"", rows)
    with pytest.raises(DataError, match="a difference of nan"):
        check_parity(good, onnx_bytes(bad), rows)


def test_a_run_without_rows_needs_a_log(runs, tmp_path, ultr):
    old = shutil.copytree(runs["mlp"], tmp_path / "old")
    (old / "model" / "rows.safetensors").unlink()
    done = ultr("export", old, "--out", tmp_path / "model")
    assert done.returncode == 5
    assert f"ultr export {old} --out DIR --rows LOG" in done.stderr
    write_log(coloured_log(seed=5), tmp_path / "rows.parquet")
    done = ultr("export", old, "--out", tmp_path / "model", "--rows", tmp_path / "rows.parquet")
    assert done.returncode == 0, done.stderr
    assert load_exported(tmp_path / "model").about["parity"]["rows"] == min(ROWS_KEPT, coloured_log(seed=5).rows)


def test_the_command_prints_its_output_and_the_next_command(runs, tmp_path, ultr):
    out = tmp_path / "my model"
    done = ultr("export", runs["lightgbm"], "--out", out)
    assert (done.returncode, done.stdout) == (0, "")
    assert f"wrote {out}: README.md, lightgbm.txt, model.onnx" in done.stderr
    assert "real rows, scores differ by" in done.stderr
    assert done.stderr.rstrip().endswith(f"next: ultr serve '{out}'")
    assert ultr("export", runs["lightgbm"], "--out", out).returncode == 1
    exported = json.loads(ultr("export", runs["lightgbm"], "--out", out, "--overwrite", "--json").stdout)
    assert (exported["out"], exported["files"]) == (str(out), ["README.md", "lightgbm.txt", "model.onnx"])
    assert exported["parity"]["largest_difference"] <= exported["parity"]["tolerance"]


def test_only_an_exported_model_is_replaced(runs, tmp_path):
    run = shutil.copytree(runs["lightgbm"], tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(OutputError, match="not an exported model"):
        export_run(run, run, overwrite=True)
    with pytest.raises(OutputError, match="not an exported model"):
        export_run(run, tmp_path, overwrite=True)
    with pytest.raises(OutputError, match="exists already"):
        export_run(run, tmp_path / "empty")
    assert is_exported(export_run(run, tmp_path / "empty", overwrite=True).folder)
    assert not is_exported(run)


def test_trees_without_onnx_are_exported_as_the_librarys_file(runs, tmp_path, monkeypatch, ultr):
    def fail(*_: object) -> bytes:
        raise UnsupportedTreesError("the leaves are linear models")

    monkeypatch.setattr(export, "trees_to_onnx", fail)
    done = ultr("export", runs["lightgbm"], "--out", tmp_path / "model")
    assert done.returncode == 0
    assert "no ONNX model: the leaves are linear models" in done.stderr
    assert "ultr serve" not in done.stderr
    exported = load_exported(tmp_path / "model")
    assert not exported.has_onnx
    assert set(exported.files) == {"lightgbm.txt", "README.md"}
    assert "There is no ONNX model: the leaves are linear models." in (exported.folder / "README.md").read_text()
    with pytest.raises(DataError, match="have no ONNX"):
        exported.session()


def test_a_sum_whose_trees_have_no_onnx_is_an_error_because_no_file_of_a_library_has_it(runs, tmp_path, monkeypatch):
    def fail(*_: object) -> bytes:
        raise UnsupportedTreesError("the leaves are linear models")

    monkeypatch.setattr(export, "trees_to_onnx", fail)
    with pytest.raises(DataError, match=r"the trees of this sum have no ONNX \(the leaves .*ultr score"):
        export_run(runs["both"], tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_the_card_says_for_which_part_of_a_ranker_numbers_are_clipped(folders):
    cards = {name: (folders[name] / "README.md").read_text() for name in ("both", "mlp", "lightgbm")}
    assert "from the mean in training are clipped for the network, and not for the trees." in cards["both"]
    assert "from the mean in training are clipped." in cards["mlp"]
    assert "are clipped" not in cards["lightgbm"]


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_a_missing_package_names_its_install_command(package, runs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"'{package}'.*pip install 'ultr\[export\]'"):
        export_run(runs["mlp"], tmp_path / "model")


# --- Reading it ---------------------------------------------------------------------------------------------------


def test_a_folder_that_was_changed_is_an_error(folders, tmp_path):
    folder = shutil.copytree(folders["mlp"], tmp_path / "model")
    content = (folder / "model.onnx").read_bytes()
    (folder / "model.onnx").write_bytes(content[:-1] + b"\0")
    with pytest.raises(DataError, match="not the one that was exported"):
        load_exported(folder).session()
    (folder / "model.onnx").unlink()
    with pytest.raises(DataError, match="cannot be read"):
        load_exported(folder).session()
    with pytest.raises(DataError, match="no exported model here"):
        load_exported(tmp_path)
    with pytest.raises(DataError, match="onnxruntime cannot load"):
        onnx_session(b"nothing")


def test_a_run_is_not_an_exported_model(runs):
    with pytest.raises(DataError, match=r"this is a run.*ultr export"):
        load_exported(runs["mlp"])


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"feature_names": []},
        {"feature_names": ["a", "a", "colour", "d"]},
        {"feature_names": "abcd"},
        {"feature_names": ["a", 1]},
        {"vocabularies": {"shape": ["round"]}},
        {"vocabularies": {"colour": [1, 2]}},
        {"files": {"README.md": "0"}},
        {"files": {"../model.onnx": "0", "model.onnx": "0"}},
        {"files": None},
    ],
    ids=str,
)
def test_an_invalid_description_is_an_error(changes, folders, tmp_path):
    about = {**load_json(folders["mlp"] / "model.json"), **changes}
    (tmp_path / "model.json").write_text(json.dumps(about))
    with pytest.raises(DataError):
        load_exported(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(
    about=JSON
    | st.fixed_dictionaries(
        {
            "format": st.just(1),
            "feature_names": JSON,
            "vocabularies": JSON,
            "files": JSON,
            "label": JSON,
            "ranker": JSON,
        },
        optional={"keeps_missing": JSON},
    )
)
def test_random_descriptions_raise_only_ultr_errors(about, tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd")
    (folder / "model.json").write_text(json.dumps(about))
    with pytest.raises(UltrError):
        load_exported(folder)


# --- Elsewhere ----------------------------------------------------------------------------------------------------


def run_without(blocked: tuple[str, ...], script: str, folder: Path) -> str:
    """Return the output of a script in a new process that cannot import the packages `blocked`."""
    block = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in blocked)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block + script], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_in_the_docs_needs_neither_ultr_nor_torch(folders, tmp_path):
    shutil.copytree(folders["mlp"], tmp_path / "model")
    example = re.findall(r"^```python\n(.*?)^```$", DOCS.read_text(), re.MULTILINE | re.DOTALL)[0]
    run_without(("ultr", "torch", "lightgbm", "safetensors"), example, tmp_path)


@pytest.mark.parametrize("ranker", ["mlp", "xgboost"])
def test_the_example_in_the_model_card_runs_alone(ranker, folders):
    example = re.findall(r"^```python\n(.*?)^```$", (folders[ranker] / "README.md").read_text(), re.M | re.S)[0]
    shown = run_without(("ultr", "torch", "xgboost"), example + "\nprint(scores.tolist())", folders[ranker])
    rows = np.array([[[0] * 4, [1] * 4]], np.float32)
    session = onnxruntime.InferenceSession(folders[ranker] / "model.onnx")
    np.testing.assert_allclose(json.loads(shown), session.run(None, {"features": rows})[0], rtol=1e-6)


def test_an_exported_model_is_used_without_torch(folders):
    script = """
import numpy as np
from ultr.serving.exported import load_exported, onnx_scores
exported = load_exported(".")
print(onnx_scores(exported.session(), np.ones((2, 3, 4))).shape)
"""
    assert run_without(("torch",), script, folders["mlp"]).strip() == "(2, 3)"


# --- The model card -----------------------------------------------------------------------------------------------


def test_the_card_has_the_results_of_the_run(runs, folders):
    card = (folders["mlp"] / "README.md").read_text()
    about = json.loads((runs["mlp"] / "model" / "model.json").read_text())
    metric, value, _ = value_of_run(runs["mlp"])
    assert f"fingerprint `{about['data']}`" in card
    assert metric == "feedback-ndcg@10"
    assert f"`{metric}` on test: {value:.4f}, at step" in card
    assert "logged feedback, with its position bias" in card
    assert re.search(r"^\| `2` \| 0\.5000 \|", card, re.M)  # θ of the propensities in the configuration
    assert "2. `colour`: a category, codes 1 to 3" in card
    assert "its index in `vocabularies` of model.json plus 1" in card
    assert re.search(r"^ultr train log.parquet .*--set label=click .*--set rankers=mlp", card, re.M)
    assert re.search(
        r"^- ranker `mlp`, options: `hidden=\[8\]`, .*; at most 8 steps, the best of which is ", card, re.M
    )
    assert "--propensities" in card
    assert "torch " in card
    assert "XGBoost" not in card


def test_the_card_has_both_parts_of_a_ranker_and_why_a_part_is_left_out(runs, folders, tmp_path):
    card, shares = (folders["both"] / "README.md").read_text(), load_json(runs["both"] / "bias.json")["shares"]
    assert "- the ranker is the sum of 2 parts" in card
    for kind in ("mlp", "lightgbm"):
        assert re.search(rf"^- ranker `{kind}`, {shares[kind]:.0%} of the sum, options: .*at most 8 steps", card, re.M)
    assert "trees chose for it" in card
    assert "networks take the mean" in card
    run = shutil.copytree(runs["mlp"], tmp_path / "run")
    why = "the ranker is a network without trees: several processes train networks only"
    write_json(run / "decisions.json", {**load_json(run / "decisions.json"), "notes": [why]})
    assert f"- `{why}`" in (export_run(run, tmp_path / "model").folder / "README.md").read_text()


def test_results_on_test_are_in_the_card(runs, tmp_path):
    run = shutil.copytree(runs["lightgbm"], tmp_path / "run")
    (run / "test.json").write_text('{"ndcg@10": 0.4321}')
    card = (export_run(run, tmp_path / "model").folder / "README.md").read_text()
    assert "on test: `ndcg@10` 0.4321" in card
    assert "lightgbm 4." in card


def test_names_from_data_cannot_look_like_text_of_the_card(tmp_path):
    evil = "x\n# Buy\n```\n<script>alert(1)</script>`|[a](b)"
    log = make_shown_log(requests=60, features=70)
    names = (evil, *(f"f{i}" for i in range(69)))
    log = replace(simulate_log(log, User())[0], feature_names=names, relevance=None)
    config = make_config(f"log {evil}", method="pointwise", ranker="linear", **FAST)
    run = run_training(config, tmp_path / "run", source=log)
    exported = export_run(run, tmp_path / "model")
    card = (exported.folder / "README.md").read_text()
    assert exported.feature_names[0] == evil
    headings = [line for line in card.split("\n") if line.startswith("#")]
    outside = re.sub(r"^(`{3,})\w*\n.*?^\1$", "", card, flags=re.M | re.S)
    assert "# Buy" not in outside.split("\n")
    assert [line for line in outside.split("\n") if line.startswith("# ")] == ["# `run`"]
    assert len(headings) >= 8
    spans = re.sub(r"`[^`\n]*`", "", outside)
    assert "script" not in spans
    assert "20 more features are in model.json." in card
    assert "None: the method does not estimate position bias" in card
    assert "Position bias was not corrected" in card


@given(text=st.text(max_size=300), longest=st.integers(2, 100))
def test_code_is_one_span_on_one_line(text, longest):
    span = code(text, longest)
    assert len(span.splitlines()) == 1
    assert span[0] == span[-1] == "`"
    assert "`" not in span[1:-1]
    assert 1 <= len(span) - 2 <= longest
