"""`ultr.train`, `evaluate`, `compare` and `audit` do the same as the commands and as `UnbiasedRanker`."""

from __future__ import annotations

import gc
import json

import numpy as np
import pandas as pd
import pytest

import ultr
from ultr.errors import OptionError
from ultr.training.config import flat
from ultr.training.folder import read_config

FEW = {"steps": 6, "bias_steps": 4, "trees.rounds": 6, "trees.evaluate_every": 3}
FEW_SET = tuple(word for name, value in FEW.items() for word in ("--set", f"{name}={value}"))


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    """A log of users who click by the first feature, with clicks that fall with position, and the time they stay."""
    rng, requests = np.random.default_rng(0), 150
    rows = requests * 5
    good = rng.normal(size=rows)
    frame = pd.DataFrame({"request": np.repeat(np.arange(requests), 5), "position": np.tile(np.arange(1, 6), requests)})
    frame["item"] = [f"s{number}" for number in rng.permutation(rows)]
    frame["feature_good"], frame["feature_noise"] = good, rng.normal(size=rows)
    frame["shop"] = rng.choice(["a", "b"], rows)
    clicked = (good + 0.3 * rng.normal(size=rows) > 0) & (rng.random(rows) < 1 / frame["position"])
    return frame.assign(click=clicked.astype(float), dwell=clicked * rng.gamma(2, 10, rows))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, frame):
    folder = tmp_path_factory.mktemp("api")
    frame.to_parquet(folder / "log.parquet", index=False)
    return folder


@pytest.fixture
def run(ultr, folder):
    """A run of `ultr train`, once for all tests."""
    out = folder / "run"
    if not out.exists():
        done = ultr("train", folder / "log.parquet", "--out", out, "--seed", 3, "--categorical", "shop", *FEW_SET)
        assert done.returncode == 0, done.stderr
    return out


@pytest.fixture
def api(ultr):
    """The package; the fixture `ultr` hides its name."""
    import ultr as package

    return package


def test_the_command_the_function_and_the_estimator_give_the_same_scores(api, run, folder, frame):
    in_memory = api.train(frame, seed=3, categorical="shop", **FEW)
    from_file = api.train(folder / "log.parquet", seed=3, categorical=["shop"], **FEW)
    expected = api.load_run(run)
    assert expected.decisions.rankers == ("mlp", "lightgbm")
    assert expected.decisions.label == "click + dwell / exp(3)"
    scores = expected.score(frame)
    np.testing.assert_array_equal(in_memory.score(frame), scores)
    np.testing.assert_array_equal(from_file.score(folder / "log.parquet"), scores)
    ranker = api.UnbiasedRanker(random_state=3, categorical=["shop"], options=FEW).fit(frame)
    by_row = pd.Series(ranker.predict(frame), frame.index)
    np.testing.assert_array_equal(by_row[frame.sort_values(["request", "position"]).index], scores)


@pytest.mark.parametrize(
    "options",
    [
        ("--tensorboard",),
        pytest.param(("--mlflow", "{store}"), id="--mlflow", marks=pytest.mark.long),
        ("--set", "machine.precision=float32"),
        ("--set", "machine.workers=2"),
        ("--device", "cpu"),
    ],
    ids=" ".join,
)
@pytest.mark.filterwarnings("ignore")  # of MLflow's own code
def test_options_that_are_not_about_the_model_train_the_same_model(options, ultr, api, run, folder, frame, tmp_path):
    if "--mlflow" in options:
        pytest.importorskip("mlflow", reason="MLflow is not installed; make test-long installs it")
    words = [word.format(store=tmp_path / "store") for word in options]
    done = ultr(
        *("train", folder / "log.parquet", "--out", tmp_path / "run", "--seed", 3, "--categorical", "shop"),
        *(*FEW_SET, *words),
    )
    assert done.returncode == 0, done.stderr
    assert "mlp + lightgbm" in done.stderr
    other, expected = api.load_run(tmp_path / "run"), api.load_run(run)
    assert other.decisions == expected.decisions
    np.testing.assert_array_equal(other.score(frame), expected.score(frame))


def test_options_of_the_network_keep_the_trees(ultr, folder, tmp_path):
    done = ultr("train", folder / "log.parquet", "--out", tmp_path / "run", "--set", "network.hidden=16", *FEW_SET)
    assert done.returncode == 0, done.stderr
    decisions = json.loads((tmp_path / "run" / "decisions.json").read_text())
    assert (decisions["rankers"], decisions["hidden"]) == (["mlp", "lightgbm"], [16])


def test_options_of_the_function_are_those_of_the_command(api, folder, run):
    config = api.make_config(str(folder / "log.parquet"), seed=3, categorical="shop", **FEW)
    assert dict(flat(read_config(run).model_dump())) == dict(flat(config.model_dump()))
    with pytest.raises(OptionError, match="there is no option 'stepps'; did you mean 'steps'"):
        api.train(folder / "log.parquet", stepps=3)


def test_a_run_without_a_folder_is_deleted_with_its_object(api, frame, tmp_path):
    quick = {"ranker": "linear", "method": "pointwise", "steps": 2}
    run = api.train(frame, **quick)
    folder = run.folder
    assert folder.is_dir()
    assert run.config.method.name == "pointwise"
    assert "Run run" in run._repr_html_()
    del run
    gc.collect()
    assert not folder.parent.exists()
    kept = api.train(api.read_log(frame), tmp_path / "run", **quick)
    assert kept.folder == tmp_path / "run"
    with pytest.raises(api.UltrError, match="exists already"):
        api.train(frame, tmp_path / "run", **quick)
    again = api.train(api.read_log(frame), tmp_path / "run", resume=True)
    np.testing.assert_array_equal(again.score(frame), kept.score(frame))


def test_evaluation_has_the_values_of_the_command(ultr, api, run, folder, frame):
    log = folder / "new.parquet"
    new = frame.assign(request=frame["request"] + 1000, feature_noise=-frame["feature_noise"])
    new.to_parquet(log, index=False)
    expected = json.loads(ultr("evaluate", run, log, "--json").stdout)
    for data in (log, new):
        found = api.evaluate(run, data).to_json()
        assert found["rankers"].keys() == expected["rankers"].keys()
        assert json.loads(json.dumps({**found, "data": str(log)})) == {**expected, "data": str(log)}
    scored = api.evaluate([api.load_run(run)], new, score_columns=["feature_good"], metrics="feedback-ndcg@10")
    assert set(scored.comparison.rankers) == {"the logged ranking", str(run), "feature_good"}
    in_log = api.evaluate(run, api.read_log(new, categorical="shop"), metrics=["feedback-ndcg@10"]).comparison.rankers
    assert in_log[str(run)] == api.evaluate(run, new, metrics="feedback-ndcg@10").comparison.rankers[str(run)]


def test_a_comparison_has_the_values_of_the_command(ultr, api, folder, frame, tmp_path):
    methods = ["pointwise", "lambdarank"]
    few = {"seeds": 1, "tuning_seeds": 1, "rates": [0.1], "limits": ["none"], "jobs": 1, "ranker": "linear", "steps": 2}
    few["bias_steps"] = 2
    done = ultr(
        *("compare", folder / "log.parquet", "--methods", ",".join(methods), "--out", tmp_path / "out", "--json"),
        *("--seeds", 1, "--lrs", 0.1, "--tune", "seeds=1", "--tune", "max_weight=none", "--jobs", 1),
        *("--ranker", "linear", "--steps", 2, "--set", "bias_steps=2"),
    )
    assert done.returncode == 0, done.stderr
    expected = json.loads(done.stdout)
    found = api.compare(folder / "log.parquet", methods, tmp_path / "here", **few).to_json()
    assert json.loads(json.dumps(found)) == expected
    in_memory = api.compare(frame, methods, **few)
    assert [row.results for row in in_memory.rows] == [
        {metric: each["seeds"] for metric, each in row["figures"].items()} for row in expected["rows"]
    ]


def test_an_audit_has_the_estimates_of_the_command(ultr, api, folder, frame):
    expected = json.loads(ultr("bias", folder / "log.parquet", "--bootstrap", 10, "--json").stdout)
    for data in (folder / "log.parquet", frame, api.read_log(frame)):
        found = json.loads(json.dumps(api.audit(data, bootstrap=10).to_json()))
        assert found["estimates"] == expected["estimates"]
        assert found["verdict"] == expected["verdict"]
    known = {k: 1 / k for k in range(1, 6)}
    assert api.audit(frame, propensities=known, bootstrap=10).verdict.anchor == "known"


def test_public_functions_are_imported_when_they_are_used():
    assert {"train", "evaluate", "compare", "audit", "Config", "make_config", "run_training"} <= set(ultr.__all__)
