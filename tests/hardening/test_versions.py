"""Check the formats of files: golden ones are read, and newer ones are rejected with a hint to update."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from hardening.make_golden import FEATURES, GOLDEN
from ultr.bias import examination, propensities
from ultr.bias.examination import Examination
from ultr.datasets import Dataset, base
from ultr.errors import DataError
from ultr.evaluation import off_policy
from ultr.evaluation.off_policy import load_off_policy_model
from ultr.log import read_log, shards
from ultr.log.shards import Shards
from ultr.rankers import model as models
from ultr.rankers.model import load_model
from ultr.report import write_report
from ultr.serving import exported
from ultr.serving.exported import load_exported, onnx_scores
from ultr.training import config as configs
from ultr.training import data
from ultr.training import folder as folders
from ultr.training import outcome as outcomes
from ultr.training.comparing import results
from ultr.training.config import make_config
from ultr.training.data import Decisions, load_run_data
from ultr.training.examining import best_evaluation, known_theta
from ultr.training.folder import newest_checkpoint, read_config, write_checkpoint
from ultr.training.outcome import read_outcome
from ultr.utils.jsonfiles import check_format, read_json, write_json

VERSIONS = sorted(GOLDEN.iterdir())


@pytest.fixture(params=VERSIONS, ids=lambda folder: folder.name)
def golden(request, tmp_path, monkeypatch) -> Path:
    folder = Path(shutil.copytree(request.param, tmp_path / "golden"))
    monkeypatch.chdir(folder)
    return folder


def read_bias(folder: Path) -> object:
    config = make_config("log.parquet", bias=str(folder / "network" / "bias.json"))
    return known_theta(config, load_run_data(config))


def read_checkpoint(folder: Path) -> object:
    return newest_checkpoint(folder / "network", lambda _, meta: meta)


# For each kind: the file with its format, the newest format, and a function that reads it.
KINDS = {
    "run": ("network/config.json", configs.FORMAT, lambda f: best_evaluation(f / "network")),
    "model": ("network/model/model.json", models.FORMAT, lambda f: load_model(f / "network")),
    "trees": ("trees/model/model.json", models.FORMAT, lambda f: load_model(f / "trees")),
    "outcome": ("network/outcome/outcome.json", outcomes.FORMAT, lambda f: read_outcome(f / "network")),
    "decisions": ("network/decisions.json", data.FORMAT, lambda f: Decisions.load(f / "network")),
    "examination": (
        "network/examination.json",
        examination.FORMAT,
        lambda f: Examination.load(f / "network" / "examination.json"),
    ),
    "off-policy model": (
        "network/off-policy/model.json",
        off_policy.FORMAT,
        lambda f: load_off_policy_model(f / "network" / "off-policy"),
    ),
    "bias": ("network/bias.json", propensities.BIAS_FORMAT, read_bias),
    "checkpoint": ("network/checkpoints/step-000002/meta.json", folders.FORMAT, read_checkpoint),
    "lists": ("lists/lists.json", shards.FORMAT, lambda f: Shards(f / "lists").read_all()),
    "exported": ("exported/model.json", exported.FORMAT, lambda f: load_exported(f / "exported")),
    "comparison": (
        "compared/comparison.json",
        results.FORMAT,
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


def test_a_cache_in_another_format_is_built_again(own_cache, shown_log):
    built = []

    def build() -> Dataset:
        built.append(1)
        return Dataset("small", shown_log, shown_log, shown_log, max_grade=4, fingerprint="x")

    base.cached("small", "key", build)
    meta = own_cache / "small-key" / "meta.json"
    for number in (0, base.FORMAT + 1):
        write_json(meta, {**read_json(meta), "format": number})
        base.cached("small", "key", build)
        assert read_json(meta)["format"] == base.FORMAT
    base.cached("small", "key", build)
    assert len(built) == 3


def test_a_format_is_a_whole_number():
    check_format({"format": 3}, 3, what="it", where="here", hint="make it again")
    for content in ([], None, "format", 3):
        with pytest.raises(DataError, match="cannot be read"):
            check_format(content, 3, what="it", where="here", hint="make it again")


# --- Golden -------------------------------------------------------------------------------------------------------


def test_golden_runs_score_as_they_did(golden):
    expected = json.loads((golden / "scores.json").read_text())
    for run in ("network", "trees"):
        np.testing.assert_allclose(load_model(run).score_features(FEATURES), expected[run], rtol=1e-5, atol=1e-6)
    session = load_exported("exported").session(threads=1)
    np.testing.assert_allclose(onnx_scores(session, FEATURES[None])[0], expected["network"], rtol=1e-5, atol=1e-5)


def test_golden_files_are_read(golden):
    log = read_log("log.parquet")
    lists = [Shards("lists", split).read_all() for split in ("train", "validation")]
    assert sum(len(part) for part in lists) == len(log)
    assert read_config(Path("network")).data.source == "log.parquet"
    model = load_off_policy_model(Path("network/off-policy"))
    assert model.estimator(log, "off-policy-reward@10", label="click").per_request(log.features[:, 0]).shape == (
        len(log),
    )
    write_report(["network", "trees"], "page.html")
