"""`ultr evaluate`: several runs and score columns on the same requests of a log."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import make_shown_log
from lists_folder import write_lists
from ultr.bias.examination import SOURCES
from ultr.cli.evaluate import _passes
from ultr.datasets.users import User, simulate_log
from ultr.evaluation.comparing import DEPLOY, LOGGED_RANKING, REJECT, TEST, UNCLEAR, Decision
from ultr.evaluation.scores import holm
from ultr.log import sampling, write_log
from ultr.log.shards import Shards
from ultr.training.config import make_config
from ultr.training.run import run_training

REWARD = "off-policy-reward@10"
TRAINING = {"ranker": "linear", "steps": 2, "batch": 16, "evaluate_every": 2, "device": "cpu"}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with the log that two runs were trained on, and a log of other requests with a column of scores."""
    folder = tmp_path_factory.mktemp("evaluate")
    for name, seed in (("log", 0), ("new", 1)):
        log = simulate_log(make_shown_log(requests=200, features=4, seed=seed), User(), seed=seed)[0]
        table = log.to_table().drop_columns(["relevance"])
        scores = pa.array(np.random.default_rng(seed).normal(size=log.rows))
        pq.write_table(table.append_column("production_score", scores), folder / f"{name}.parquet")
    for name, label in (("a", "click"), ("b", "click"), ("other label", "click + dwell / exp(3)")):
        method = "lambdarank" if name == "b" else "pointwise"
        config = make_config(str(folder / "log.parquet"), method=method, label=label, **TRAINING)
        run_training(config, folder / name)
    (folder / "theta.csv").write_text("position,propensity\n" + "".join(f"{k},{1 / k}\n" for k in range(1, 13)))
    return folder


def test_runs_and_score_columns_are_compared_next_to_the_logged_ranking(ultr, here):
    arguments = (here / "a", here / "b", "--data", here / "new.parquet", "--score-column", "production_score")
    found = json.loads(ultr("evaluate", *arguments, "--json").stdout)
    names = [str(here / "a"), str(here / "b"), "production_score"]
    assert list(found["rankers"]) == [LOGGED_RANKING, *names]
    assert (found["requests"], found["against"], found["warnings"]) == (200, LOGGED_RANKING, [])
    assert found["examination"]["source"] == SOURCES["strata"]
    assert set(found["examination"]["theta"]) == {str(k) for k in range(1, 13)}
    values = [found["rankers"][name][REWARD] for name in names]
    assert all(value["low"] < value["mean"] < value["high"] for value in values)
    assert [value["holm"] for value in values] == holm([value["difference"]["p"] for value in values])
    alone = json.loads(ultr("evaluate", here / "b", here / "new.parquet", "--json").stdout)
    assert alone["rankers"][names[1]][REWARD]["mean"] == values[1]["mean"]  # examination is not that of a run
    done = ultr("evaluate", *arguments, "--against", "production_score", "--propensities", here / "theta.csv")
    assert done.returncode == 0, done.stderr
    title = "Differences to production_score: paired tests over requests, p corrected by Holm's method"
    assert title in " ".join(done.stdout.split())
    assert "p over requests" in done.stdout
    assert "one examination for all rankers: 1 0.5 0.333" in done.stderr
    assert "(known propensities)" in done.stderr


def test_the_first_line_is_a_decision_and_the_exit_code_may_follow_it(ultr, here):
    arguments = ("evaluate", here / "a", here / "new.parquet")
    done = ultr(*arguments)
    said = next(line for line in done.stderr.splitlines() if "by off-policy-reward@10" in line or "clicks" in line)
    assert said.startswith(f"{here / 'a'}: ")
    assert "half to one and a half times this bias" in done.stderr  # the log has nothing but features
    found = json.loads(ultr(*arguments, "--json").stdout)
    assert found["examination"]["confirmed"] is False
    decision = found["decisions"][str(here / "a")]
    assert said == f"{here / 'a'}: {decision['action']}: {decision['reason']}"
    assert 0 <= decision["worse"] <= 1
    assert ultr(*arguments, "--fail-unless", "deploy").returncode == 3
    assert ultr(*arguments, "--json", "--fail-unless", "test").returncode == 3 * (
        not decision["action"].startswith("test")
    )
    assert ultr(*arguments, "--fail-if-worse").returncode == 3 * (decision["action"] == "do not deploy")
    known = json.loads(ultr(*arguments, "--propensities", here / "theta.csv", "--json").stdout)
    assert known["examination"]["confirmed"] is True
    wide, narrow = (each["rankers"][str(here / "a")][REWARD] for each in (found, known))
    assert wide["high"] - wide["low"] > narrow["high"] - narrow["low"]
    assert "--fail-unless must be deploy or test" in ultr(*arguments, "--fail-unless", "best").stderr


@pytest.mark.parametrize(
    ("actions", "least", "or_worse", "passes"),
    [
        ([REJECT], None, False, True),
        ([REJECT], None, True, False),
        ([DEPLOY, REJECT], None, True, False),
        ([UNCLEAR, DEPLOY, None], None, True, True),
        ([DEPLOY, DEPLOY], "deploy", True, True),
        ([DEPLOY, TEST], "deploy", False, False),
        ([DEPLOY, TEST], "test", True, True),
        ([DEPLOY, None], "test", False, False),
    ],
)
def test_decisions_set_the_exit_code(actions, least, or_worse, passes):
    decisions = {f"{i}": action and Decision(action, "", 0.5) for i, action in enumerate(actions)}
    found = SimpleNamespace(rankers={"logged": {}, **decisions}, against="logged", decision=decisions.get)
    assert _passes(found, least, or_worse=or_worse) is passes


def test_requests_that_a_run_was_trained_on_or_chosen_by_are_left_out(ultr, here):
    done = ultr("evaluate", here / "a", here / "b", "--data", here / "log.parquet", "--json")
    found = json.loads(done.stdout)
    assert found["requests"] == 20
    assert "180 of the 200 requests trained a run or chose its step" in done.stderr


def test_score_columns_need_no_run_and_no_features(ultr, here, tmp_path):
    bare = pq.read_table(here / "new.parquet").drop_columns(["features"]).replace_schema_metadata(None)
    pq.write_table(bare, tmp_path / "bare.parquet")
    scores = ("--score-column", "production_score", "--label", "click", "--json")
    found = json.loads(ultr("evaluate", tmp_path / "bare.parquet", *scores).stdout)
    assert list(found["rankers"]) == [LOGGED_RANKING, "production_score"]
    renamed = bare.rename_columns([{"request": "search", "position": "place"}.get(n, n) for n in bare.column_names])
    pq.write_table(renamed, tmp_path / "renamed.parquet")
    columns = ("--request", "search", "--position", "place")
    again = json.loads(ultr("evaluate", tmp_path / "renamed.parquet", *columns, *scores).stdout)
    assert again["rankers"] == found["rankers"]


def test_true_labels_are_used_if_there_are_any(ultr, here, tmp_path):
    write_log(simulate_log(make_shown_log(requests=50, features=4, seed=2), User())[0], tmp_path / "true.parquet")
    found = json.loads(ultr("evaluate", here / "a", tmp_path / "true.parquet", "--json").stdout)
    assert found["examination"] is None
    assert list(found["rankers"][str(here / "a")]) == ["ndcg@10"]


def test_what_cannot_be_evaluated_is_an_error(ultr, here):
    log = here / "new.parquet"
    for arguments, message in [
        ([here / "a"], "there is nothing to evaluate; pass a run, or --score-column"),
        (["--score-column", "s"], "there is no data to evaluate on; pass a log with --data"),
        ([here / "a", here / "a", log], "each run and score column must be given once"),
        ([here / "a", here / "other label", log], "the runs have different labels"),
        ([here / "a", log, "--score-column", "production"], "did you mean 'production_score'"),
        ([here / "a", log, "--against", "b"], "'b' is not among the rankers"),
    ]:
        done = ultr("evaluate", *arguments)
        assert done.returncode != 0
        assert message in done.stderr
    done = ultr("evaluate", here / "a", here / "other label", log, "--label", "click")
    assert done.returncode == 0, done.stderr


def test_a_folder_of_files_and_conditions_are_read_as_by_train(ultr, here, tmp_path):
    table = pq.read_table(here / "new.parquet")
    folder = tmp_path / "log"
    folder.mkdir()
    parts = pa.array(table["request"].to_numpy(zero_copy_only=False) < "r2")
    for number, part in enumerate((table.filter(parts), table.filter(pa.compute.invert(parts)))):
        pq.write_table(part, folder / f"{number}.parquet")
    one, several = (
        json.loads(ultr("evaluate", here / "a", source, "--json").stdout)["rankers"][str(here / "a")][REWARD]["mean"]
        for source in (here / "new.parquet", folder)
    )
    assert several == pytest.approx(one, rel=0.2)  # requests are in another order, so the halves differ
    done = ultr("evaluate", here / "a", folder, "--where", "request < r2", "--metrics", "feedback-ndcg@10", "--json")
    assert json.loads(done.stdout)["requests"] == len(table.filter(parts)["request"].unique())
    again = table.slice(0, 8)
    other = pa.array(1 - again["click"].to_numpy(), table.schema.field("click").type)
    again = again.set_column(table.column_names.index("click"), table.schema.field("click"), other)
    pq.write_table(pa.concat_tables([table, again]), tmp_path / "twice.parquet")
    assert ultr("evaluate", here / "a", tmp_path / "twice.parquet").returncode == 5
    first = ("--on-duplicates", "first", "--metrics", "feedback-ndcg@10", "--json")
    assert json.loads(ultr("evaluate", here / "a", tmp_path / "twice.parquet", *first).stdout)["requests"] == 200
    rejected = ultr("evaluate", here / "a", "synthetic", "--where", "x = 1")
    assert (rejected.returncode, "conditions (--where) need a log" in rejected.stderr) == (2, True)


@pytest.fixture(scope="module")
def lists(here):
    """Prepared lists with segments and a category, in many row groups, and a run of them."""
    log, rng = simulate_log(make_shown_log(requests=300, features=4), User())[0], np.random.default_rng(0)
    log = replace(
        log,
        relevance=None,
        features=np.column_stack([log.features, rng.integers(1, 3, log.rows)]).astype(np.float32),
        feature_names=(*log.feature_names, "shop"),
        vocabularies={"shop": pa.array(["a", "b"])},
        context={"segment": pa.array(rng.choice(["phone", "desktop"], len(log)))},
    )
    folder = write_lists(log, here / "lists", validation=0.5, group=16)
    run_training(make_config(str(folder), method="pointwise", label="click", **TRAINING), here / "of lists")
    return folder


def test_streamed_lists_have_the_values_of_lists_in_memory(ultr, here, lists, monkeypatch):
    run = str(here / "of lists")
    arguments = ("evaluate", run, lists, "--split", "validation", "--score-column", "f1", "--json")
    metrics = ("--metrics", f"{REWARD},feedback-ndcg@10")
    expected = json.loads(ultr(*arguments, *metrics, "--stream", "no").stdout)
    monkeypatch.setattr(Shards, "read_all", None)  # reads all features at once
    found = json.loads(ultr(*arguments, *metrics, "--stream", "yes").stdout)
    assert found["warnings"] == expected["warnings"]
    assert found["examination"]["theta"] == pytest.approx(expected["examination"]["theta"])
    for name, values in expected["rankers"].items():
        for metric in values:
            for key in ("mean", "low", "high"):
                assert found["rankers"][name][metric][key] == pytest.approx(values[metric][key], rel=1e-5)
    monkeypatch.setattr(sampling, "PART_SAMPLE_ROWS", 400)
    sampled = json.loads(ultr(*arguments, "--stream", "yes").stdout)["rankers"][run][REWARD]["mean"]
    assert sampled != expected["rankers"][run][REWARD]["mean"]
    assert sampled == pytest.approx(expected["rankers"][run][REWARD]["mean"], rel=0.3)


def test_only_lists_are_streamed(ultr, here):
    failed = ultr("evaluate", here / "a", here / "new.parquet", "--stream", "yes")
    assert (failed.returncode, "only prepared lists can be streamed" in failed.stderr) == (2, True)
    failed = ultr("evaluate", here / "a", here / "new.parquet", "--stream", "maybe")
    assert (failed.returncode, "stream must be auto, yes or no, got maybe" in failed.stderr) == (2, True)
