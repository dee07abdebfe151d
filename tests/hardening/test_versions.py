"""What is kept on disk says its format: older is read, newer is refused with the advice to update."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from hardening.make_golden import FEATURES, GOLDEN
from ultr import checkpoint, compare, exported, judging, models, outcomes, preparing, stages
from ultr.checkpoint import newest_checkpoint, read_json, write_checkpoint
from ultr.datasets import SPLITS, cache, load_dataset
from ultr.errors import DataError
from ultr.exported import load_exported, onnx_scores
from ultr.formats import check_format
from ultr.judging import load_judge
from ultr.log import read_log, shards
from ultr.log.shards import Shards
from ultr.models import load_model
from ultr.outcomes import read_outcome
from ultr.preparing import RunConfig, prepare
from ultr.report import write_report
from ultr.runs import best_evaluation
from ultr.stages import method_inputs

VERSIONS = sorted(GOLDEN.iterdir())


@pytest.fixture(params=VERSIONS, ids=lambda folder: folder.name)
def golden(request, tmp_path, monkeypatch) -> Path:
    folder = Path(shutil.copytree(request.param, tmp_path / "golden"))
    monkeypatch.chdir(folder)
    return folder


def bias_taken(folder: Path) -> object:
    config = RunConfig(data="log.parquet", bias=str(folder / "network" / "bias.json"))
    return method_inputs(config, prepare(config)).propensities


def checkpoint_read(folder: Path) -> object:
    return newest_checkpoint(folder / "network", lambda _, meta: meta)


# Each kind: the file that says its format, the newest format known, and what reads it.
KINDS = {
    "run": ("network/config.json", preparing.FORMAT, lambda f: best_evaluation(f / "network")),
    "model": ("network/model/model.json", models.FORMAT, lambda f: load_model(f / "network")),
    "trees": ("trees/model/model.json", models.FORMAT, lambda f: load_model(f / "trees")),
    "outcome": ("network/outcome/outcome.json", outcomes.FORMAT, lambda f: read_outcome(f / "network")),
    "judge": ("network/judge/judge.json", judging.FORMAT, lambda f: load_judge(f / "network" / "judge")),
    "bias": ("network/bias.json", stages.FORMAT, bias_taken),
    "checkpoint": ("network/checkpoints/step-000002/meta.json", checkpoint.FORMAT, checkpoint_read),
    "lists": ("lists/lists.json", shards.FORMAT, lambda f: Shards(f / "lists").read_all()),
    "exported": ("exported/model.json", exported.FORMAT, lambda f: load_exported(f / "exported")),
    "comparison": (
        "compared/comparison.json",
        compare.FORMAT,
        lambda f: write_report([f / "compared"], f / "page.html", overwrite=True),
    ),
}
UNMARKED = ("judge", "bias", "comparison")  # that were written before they said their format


@pytest.mark.parametrize("kind", KINDS)
def test_newer_is_refused_with_the_advice_to_update_and_older_is_read_or_made_again(kind, golden):
    name, known, use = KINDS[kind]
    if kind == "checkpoint":
        write_checkpoint(golden / "network", 2, lambda _: {})
    assert use(golden) is not None
    content = {key: value for key, value in json.loads((golden / name).read_text()).items() if key != "seal"}
    for newer in (known + 1, 10**6):
        (golden / name).write_text(json.dumps({**content, "format": newer}))
        with pytest.raises(DataError, match=f"newer ultr, got format {newer} where {known} is known; update ultr"):
            use(golden)
    for odd in (0, -1, None, True, "1", 1.5, [1], 10.0**300):
        (golden / name).write_text(json.dumps({**content, "format": odd}))
        with pytest.raises(DataError, match=r"of another version.*(again|export)"):
            use(golden)
    del content["format"]
    (golden / name).write_text(json.dumps(content))
    if kind in UNMARKED:
        assert use(golden) is not None
    else:
        with pytest.raises(DataError, match="of another version"):
            use(golden)


def test_every_file_that_describes_a_folder_says_its_format(golden):
    for path in golden.rglob("*.json"):
        if path.name not in ("scores.json", "metrics.jsonl"):
            assert isinstance(json.loads(path.read_text()).get("format"), int), path


def test_what_is_cached_in_another_format_is_made_again(own_cache):
    made = load_dataset("synthetic")
    metas = list(own_cache.rglob("meta.json"))
    for meta in metas:
        meta.write_text(json.dumps({**json.loads(meta.read_text()), "format": cache.FORMAT + 1}))
    again = load_dataset("synthetic")
    for split in SPLITS:
        np.testing.assert_array_equal(made[split].features, again[split].features)
    for meta in metas:
        assert json.loads(meta.read_text())["format"] == cache.FORMAT


def test_a_format_is_a_whole_number():
    check_format({"format": 3}, 3, what="it", where="here", mend="make it again")
    for content in ([], None, "format", 3):
        with pytest.raises(DataError, match="cannot be read"):
            check_format(content, 3, what="it", where="here", mend="make it again")


# --- Golden -------------------------------------------------------------------------------------------------------


def test_runs_of_earlier_versions_score_as_they_did(golden):
    expected = json.loads((golden / "scores.json").read_text())
    for run in ("network", "trees"):
        np.testing.assert_allclose(load_model(run).score_features(FEATURES), expected[run], rtol=1e-5, atol=1e-6)
    session = load_exported("exported").session(threads=1)
    np.testing.assert_allclose(onnx_scores(session, FEATURES[None])[0], expected["network"], rtol=1e-5, atol=1e-5)


def test_what_earlier_versions_left_is_still_read(golden):
    log = read_log("log.parquet")
    lists = [Shards("lists", split).read_all() for split in ("train", "validation")]
    assert sum(len(part) for part in lists) == len(log)
    assert RunConfig.from_json(read_json(Path("network/config.json"))).data == "log.parquet"
    judge = load_judge(Path("network/judge"))
    assert judge.value(log, log.features[:, 0], "off-policy-reward@10", label="click").per_request.shape == (len(log),)
    write_report(["network", "trees"], "page.html")
