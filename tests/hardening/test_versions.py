"""Check the formats of files: older ones are read, newer ones are rejected with a hint to update."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from hardening.make_golden import FEATURES, GOLDEN
from ultr.bias import propensities
from ultr.datasets import SPLITS, cache, load_dataset
from ultr.errors import DataError
from ultr.evaluation import judge as judging
from ultr.evaluation.judge import load_judge
from ultr.log import read_log, shards
from ultr.log.shards import Shards
from ultr.rankers import model as models
from ultr.rankers.model import load_model
from ultr.report import write_report
from ultr.serving import exported
from ultr.serving.exported import load_exported, onnx_scores
from ultr.training import checkpoints as checkpoint
from ultr.training import comparison
from ultr.training import config as configs
from ultr.training import outcome as outcomes
from ultr.training.checkpoints import newest_checkpoint, write_checkpoint
from ultr.training.config import RunConfig
from ultr.training.data import load_run_data
from ultr.training.inputs import method_inputs
from ultr.training.outcome import read_outcome
from ultr.training.selection import best_evaluation
from ultr.utils.jsonfiles import check_format, read_json

VERSIONS = sorted(GOLDEN.iterdir())


@pytest.fixture(params=VERSIONS, ids=lambda folder: folder.name)
def golden(request, tmp_path, monkeypatch) -> Path:
    folder = Path(shutil.copytree(request.param, tmp_path / "golden"))
    monkeypatch.chdir(folder)
    return folder


def read_bias(folder: Path) -> object:
    config = RunConfig(data="log.parquet", bias=str(folder / "network" / "bias.json"))
    return method_inputs(config, load_run_data(config)).propensities


def read_checkpoint(folder: Path) -> object:
    return newest_checkpoint(folder / "network", lambda _, meta: meta)


# For each kind: the file with its format, the newest format, and a function that reads it.
KINDS = {
    "run": ("network/config.json", configs.FORMAT, lambda f: best_evaluation(f / "network")),
    "model": ("network/model/model.json", models.FORMAT, lambda f: load_model(f / "network")),
    "trees": ("trees/model/model.json", models.FORMAT, lambda f: load_model(f / "trees")),
    "outcome": ("network/outcome/outcome.json", outcomes.FORMAT, lambda f: read_outcome(f / "network")),
    "judge": ("network/judge/judge.json", judging.FORMAT, lambda f: load_judge(f / "network" / "judge")),
    "bias": ("network/bias.json", propensities.BIAS_FORMAT, read_bias),
    "checkpoint": ("network/checkpoints/step-000002/meta.json", checkpoint.FORMAT, read_checkpoint),
    "lists": ("lists/lists.json", shards.FORMAT, lambda f: Shards(f / "lists").read_all()),
    "exported": ("exported/model.json", exported.FORMAT, lambda f: load_exported(f / "exported")),
    "comparison": (
        "compared/comparison.json",
        comparison.FORMAT,
        lambda f: write_report([f / "compared"], f / "page.html", overwrite=True),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_newer_formats_are_rejected_with_a_hint_to_update(kind, golden):
    name, newest, read = KINDS[kind]
    if kind == "checkpoint":
        write_checkpoint(golden / "network", 2, lambda _: {})
    assert read(golden) is not None
    content = {key: value for key, value in json.loads((golden / name).read_text()).items() if key != "seal"}
    for newer in (newest + 1, 10**6):
        (golden / name).write_text(json.dumps({**content, "format": newer}))
        with pytest.raises(DataError, match=f"newer version.*, got format {newer}, expected {newest}; update ultr"):
            read(golden)
    for odd in (0, -1, None, True, "1", 1.5, [1], 10.0**300):
        (golden / name).write_text(json.dumps({**content, "format": odd}))
        with pytest.raises(DataError, match=r"has a different format.*(again|export)"):
            read(golden)
    del content["format"]
    (golden / name).write_text(json.dumps(content))
    with pytest.raises(DataError, match="has a different format, got format None"):
        read(golden)


def test_every_file_that_describes_a_folder_has_a_format(golden):
    for path in golden.rglob("*.json"):
        if path.name not in ("scores.json", "metrics.jsonl"):
            assert isinstance(json.loads(path.read_text()).get("format"), int), path


def test_a_cache_in_another_format_is_built_again(own_cache):
    first = load_dataset("synthetic")
    metas = list(own_cache.rglob("meta.json"))
    for meta in metas:
        meta.write_text(json.dumps({**json.loads(meta.read_text()), "format": cache.FORMAT + 1}))
    again = load_dataset("synthetic")
    for split in SPLITS:
        np.testing.assert_array_equal(first[split].features, again[split].features)
    for meta in metas:
        assert json.loads(meta.read_text())["format"] == cache.FORMAT


def test_a_format_is_a_whole_number():
    check_format({"format": 3}, 3, what="it", where="here", hint="make it again")
    for content in ([], None, "format", 3):
        with pytest.raises(DataError, match="cannot be read"):
            check_format(content, 3, what="it", where="here", hint="make it again")


# --- Golden -------------------------------------------------------------------------------------------------------


def test_runs_of_earlier_versions_score_as_they_did(golden):
    expected = json.loads((golden / "scores.json").read_text())
    for run in ("network", "trees"):
        np.testing.assert_allclose(load_model(run).score_features(FEATURES), expected[run], rtol=1e-5, atol=1e-6)
    session = load_exported("exported").session(threads=1)
    np.testing.assert_allclose(onnx_scores(session, FEATURES[None])[0], expected["network"], rtol=1e-5, atol=1e-5)


def test_files_of_earlier_versions_are_read(golden):
    log = read_log("log.parquet")
    lists = [Shards("lists", split).read_all() for split in ("train", "validation")]
    assert sum(len(part) for part in lists) == len(log)
    assert RunConfig.from_json(read_json(Path("network/config.json"))).data == "log.parquet"
    judge = load_judge(Path("network/judge"))
    assert judge.value(log, log.features[:, 0], "off-policy-reward@10", label="click").per_request.shape == (len(log),)
    write_report(["network", "trees"], "page.html")
