"""The command `ultr compare`, called in this process."""

from __future__ import annotations

import json

import pytest

from runs import write_feedback
from ultr.training.folder import read_config
from ultr.utils.jsonfiles import read_json

FAST = ("--ranker", "linear", "--steps", 5, "--set", "network.batch=16", "--set", "bias_steps=5", "--device", "cpu")
FAST += ("--set", "select=feedback-ndcg@10", "--jobs", 1)
ONE_EACH = ("--seeds", 1, "--lrs", 0.1, "--tune", "max_weight=none", "--tune", "seeds=1")


@pytest.fixture
def log(tmp_path):
    return write_feedback(tmp_path, requests=60)


def test_the_results_are_printed_and_written(ultr, log, tmp_path):
    methods = ("--methods", "pointwise,dla:ranker=mlp", "--set", "hidden=4")
    done = ultr("compare", log, "--out", tmp_path / "out", *methods, *FAST, *ONE_EACH, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == read_json(tmp_path / "out" / "comparison.json")
    assert [row["method"] for row in result["rows"]] == ["pointwise", "dla:ranker=mlp"]
    assert (result["reference"], result["metrics"]) == ("pointwise", ["feedback-ndcg@10"])
    assert "trained on clicks only" in done.stderr
    assert (tmp_path / "out" / "comparison.html").is_file()
    configs = [read_config(path.parent) for path in (tmp_path / "out" / "runs").rglob("config.json")]
    assert {config.network.steps for config in configs} == {10}  # with those of a bias model
    assert {(config.rankers, config.network.batch, config.data.test) for config in configs} == {
        (("linear",), 16, 0.2),
        (("mlp",), 16, 0.2),
    }
    again = ultr("compare", log, "--out", tmp_path / "out", *methods, *FAST, *ONE_EACH)
    assert again.returncode == 0, again.stderr
    assert "pointwise" in again.stdout
    assert f"wrote {tmp_path / 'out' / 'comparison.json'} and " in again.stderr
    assert "next: ultr report " in again.stderr


def test_settings_to_choose_from_and_a_file_of_options(ultr, log, tmp_path):
    (tmp_path / "options.toml").write_text('[network]\nevaluate_every = 1\npatience = 0\n\n[columns]\nitem = ""\n')
    (tmp_path / "good.toml").write_text("[network]\nevaluate_every = 1\npatience = 0\n")
    tune = ("--tune", "max_weight=2,none", "--tune", "seeds=1", "--tune", "longest=1", "--tune", "dropout=0")
    command = ("compare", log, "--methods", "dla", "--out", tmp_path / "out", *FAST, "--seeds", 1, "--lrs", "0.1,0.2")
    assert ultr(*command, *tune, "--config", tmp_path / "options.toml").returncode == 2
    done = ultr(*command, *tune, "--config", tmp_path / "good.toml")
    assert done.returncode == 0, done.stderr
    tuned = {path.parent.name for path in (tmp_path / "out" / "runs" / "dla").glob("*/seed-1000")}
    best = next(name for name in tuned if name in ("lr-0.1-max-weight-2", "lr-0.2-max-weight-2"))[:6]
    assert tuned == {"lr-0.1", "lr-0.2", f"{best}-max-weight-2", f"{best}-max-weight-none"}
    config = read_config(next((tmp_path / "out" / "runs" / "dla").glob("*/seed-0")))
    assert (config.network.evaluate_every, config.network.patience) == (1, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tune", "dropuot=0"), "did you mean 'dropout'"),
        (("--tune", "dropout=none"), "--tune dropout must be comma-separated numbers"),
        (("--tune", "longest=0.5"), "--tune longest must be a whole number of at least 1"),
        (("--tune", "seeds=1,2"), "--tune seeds must be a whole number of at least 1"),
        (("--lrs", "fast"), "--lrs must be comma-separated numbers"),
        (("--reference", "pointwize"), "did you mean 'pointwise'"),
        (("--set", "netwrok.hidden=4"), "did you mean 'network.hidden'"),
        (("--methods", "pointwize"), "did you mean 'pointwise'"),
    ],
)
def test_wrong_options_are_errors_before_anything_is_written(ultr, log, tmp_path, options, message):
    methods = () if "--methods" in options else ("--methods", "pointwise")
    done = ultr("compare", log, "--out", tmp_path / "out", *methods, *FAST, *options)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


def test_the_help_fits_on_two_screens(ultr, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert len(ultr("compare", "--help").stdout.splitlines()) <= 70
