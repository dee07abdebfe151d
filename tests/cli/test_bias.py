"""`ultr bias` from the command line: its messages, its files and its errors."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bias.worlds import THETA, world
from ultr.bias import logging_policy
from ultr.bias.propensities import read_bias_theta, read_propensities
from ultr.log import write_log
from worlds.shop import shop


@pytest.fixture(autouse=True)
def linear_logging_score(monkeypatch):
    monkeypatch.setattr(logging_policy, "MUCH_OPEN", np.inf)


@pytest.fixture
def path(tmp_path):
    write_log(world("random", requests=2000), tmp_path / "log.parquet")
    return tmp_path / "log.parquet"


FAST = ("--bootstrap", 20)


def test_a_verdict_is_printed_with_its_reasons(ultr, path):
    done = ultr("bias", path, *FAST, "--verbose")
    assert done.returncode == 0, done.stderr
    verdict = "identified under an assumption - correct for position bias if the assumption holds."
    assert f"verdict: {verdict} Items were shown at several positions. No test of the" in done.stderr
    assert "test 'other items' passed: " in done.stderr
    assert "harvest and items agree" in done.stderr
    assert "items shown at several positions link all positions" in done.stderr
    assert "Examination relative to position 1" in done.stdout
    assert "95% intervals cover sampling error only" in done.stderr
    for heading in ("position", "shown", "rate", "harvest", "items", "held-out"):
        assert heading in done.stdout


def test_a_result_is_a_few_lines(ultr, path):
    done = ultr("bias", path, *FAST)
    lines = done.stderr.splitlines()
    assert done.stdout == ""
    names = ["how biased", "verdict", "assumption", "tests", "positions", "next step"]
    assert [line.split(":")[0] for line in lines[1:]] == names
    assert "compared with position 1, users look 0." in lines[1]
    assert lines[3] == "assumption: an item's position does not depend on its relevance to this request"
    assert lines[4] == "tests: passed: halves of items, shuffled, halves of time, position given the item, other items"
    assert "1 to 5 known to within 30% (100.0% of rows)" in lines[5]
    assert "ultr explore" in lines[6]


def test_nothing_is_left_to_do_if_the_order_was_random(ultr, tmp_path):
    log = world("random", requests=2000)
    log = replace(log, item_ids=None, context={"randomised": pa.array(np.ones(2000, bool))})
    write_log(log, tmp_path / "log.parquet")
    lines = ultr("bias", tmp_path / "log.parquet", *FAST).stderr.splitlines()
    assert lines[2] == "verdict: identified - correct for position bias. Some requests were in random order."
    assert lines[-1] == "next step: none"


def test_json_goes_to_stdout_alone(ultr, path):
    done = ultr("bias", path, *FAST, "--json", "--seed", 3)
    report = json.loads(done.stdout)
    assert report["verdict"]["status"] == "identified under an assumption"
    assert report["verdict"]["assumption"].startswith("an item's position does not depend")
    assert {"name", "passed", "value", "text", "severe"} == set(report["refutations"][0])
    assert report["positions"] == [1, 2, 3, 4, 5]
    np.testing.assert_allclose(report["estimates"]["harvest"]["theta"], THETA / THETA[0], rtol=0.3)
    assert json.loads(ultr("bias", path, *FAST, "--json", "--seed", 3).stdout) == report


def test_propensities_are_written_in_the_format_that_training_reads(ultr, path, tmp_path):
    out = tmp_path / "bias"
    done = ultr("bias", path, *FAST, "--out", out)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in out.iterdir()) == ["bias.html", "bias.json", "propensities.csv"]
    assert "next:" not in done.stderr  # rankers need features, which this log does not have
    propensities = read_propensities(out / "propensities.csv")
    assert list(map(str, propensities)) == ["1", "2", "3", "4", "5"]
    report = json.loads((out / "bias.json").read_text())
    theta = np.array(report["estimates"]["items"]["theta"])
    np.testing.assert_allclose(list(propensities.values()), 0.7 * theta / theta.max(), rtol=1e-5)
    assert "feedback rate" in (out / "bias.html").read_text()
    again = ultr("bias", path, *FAST, "--propensities", out / "propensities.csv", "--json")
    assert json.loads(again.stdout)["verdict"]["anchor"] == "known"


def test_click_models_are_compared_on_held_out_requests(ultr, path, tmp_path):
    done = ultr("bias", path, *FAST, "--models", "cascade,dbn,pbm", "--out", tmp_path / "bias")
    assert done.returncode == 0, done.stderr
    assert "Click models on 400 held-out requests" in done.stdout
    rows = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("│ pbm", "│ dbn", "│ cascade"))]
    assert rows[:2] in (["pbm", "dbn"], ["dbn", "pbm"])
    assert rows[2] == "cascade*"
    assert "* cascade: only items up to the first click count" in done.stderr
    models = json.loads((tmp_path / "bias" / "bias.json").read_text())["click_models"]
    assert [each["model"] for each in models["models"]] == ["cascade", "dbn", "pbm"]
    assert models["models"][2]["perplexity"] > 1


def test_an_output_is_not_overwritten_unless_asked(ultr, path, tmp_path):
    out = tmp_path / "bias"
    out.mkdir()
    (out / "precious").write_text("kept")
    done = ultr("bias", path, *FAST, "--out", out)
    assert done.returncode == 1
    assert "--overwrite" in done.stderr
    assert [p.name for p in out.iterdir()] == ["precious"]
    assert ultr("bias", path, *FAST, "--out", out, "--overwrite").returncode == 0
    assert (out / "propensities.csv").exists()


def test_a_log_that_does_not_identify_examination_gets_that_verdict(ultr, tmp_path):
    path, out = tmp_path / "log.parquet", tmp_path / "bias"
    write_log(world("deterministic", requests=300), path)
    done = ultr("bias", path, *FAST, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "verdict: not identified - show some requests in random order first." in done.stderr
    assert "next:" not in done.stderr
    assert not (out / "propensities.csv").exists()
    assert "note: propensities.csv is not written, because examination could not be estimated" in done.stderr
    assert json.loads((out / "bias.json").read_text())["verdict"]["anchor"] is None
    for what in ("--randomised", "--propensities"):
        assert what in done.stderr


def test_estimates_that_the_log_cannot_confirm_are_marked(ultr, tmp_path):
    path, out = tmp_path / "log.parquet", tmp_path / "bias"
    write_log(replace(world("fresh", requests=600, features=3), item_ids=None, context={}), path)
    done = ultr("bias", path, *FAST, "--out", out)
    assert "verdict: not identified" in done.stderr
    assert "note: propensities.csv has estimates that this log cannot confirm" in done.stderr
    assert f"next: ultr train {path} --label click --out run" in done.stderr
    assert len(read_propensities(out / "propensities.csv")) == 5


def test_suspicious_requests_are_left_out_unless_they_are_kept(ultr, tmp_path):
    log = world("random", requests=2000, theta=0.9 / np.arange(1, 9))
    clicks = np.maximum(log.actions["click"], np.repeat(np.arange(2000) % 80 == 0, 8))
    write_log(replace(log, actions={"click": clicks.astype(np.float32)}), tmp_path / "log.parquet")
    done = ultr("bias", tmp_path / "log.parquet", *FAST, "--models", "pbm", "--verbose")
    assert "note: The estimates leave out 25 suspicious requests (--keep-suspicious keeps them)." in done.stderr
    assert "verdict: identified under an assumption - " in done.stderr
    assert "Click models on 400 held-out requests" not in done.stdout  # a fifth of all 2,000 requests
    kept = ultr("bias", tmp_path / "log.parquet", *FAST, "--keep-suspicious", "--verbose")
    assert "estimates leave out" not in kept.stderr
    assert "verdict: identified with care - " in kept.stderr
    assert "The estimates use 25 suspicious requests (see the warnings)." in kept.stderr


def test_estimates_from_features_are_printed(ultr, tmp_path):
    path = tmp_path / "log.parquet"
    write_log(world("deterministic", requests=600, features=3), path)
    done = ultr("bias", path, *FAST, "--sample", 1000, "--verbose")
    assert done.returncode == 0, done.stderr
    assert "(200 requests)" in done.stderr
    assert "of the logged order" in done.stderr
    assert "strata and regression" in done.stderr


def test_a_note_says_which_items_are_not_compared(ultr, tmp_path):
    log = world("random", requests=300, features=3)
    other = np.random.default_rng(0).normal(size=log.features.shape).astype(np.float32)
    write_log(replace(log, features=other, context={}), tmp_path / "log.parquet")
    done = ultr("bias", tmp_path / "log.parquet", *FAST, "--verbose")
    assert "note: Items are not compared across positions" in done.stderr


def with_segments(names, features=0):
    log = world("random", requests=2000, features=features)
    segment = pa.array([names[i % 2] for i in range(2000)])
    return replace(log, context={**log.context, "segment": segment})


def test_segments_are_printed_and_written_separately(ultr, tmp_path):
    path, out = tmp_path / "log.parquet", tmp_path / "bias"
    write_log(with_segments(["desk", "phone"], features=1), path)
    done = ultr("bias", path, *FAST, "--segment", "segment", "--out", out, "--verbose")
    assert done.returncode == 0, done.stderr
    assert f"next: ultr train {path} --segment segment --bias {out} --label click --out run" in done.stderr
    for name in ("desk", "phone"):
        assert f"Segment '{name}' (1,000 requests)" in done.stdout
        what = "identified under an assumption; compared with position 1"
        assert f"segment '{name}' (1,000 requests): {what}" in done.stderr
    propensities = read_propensities(out / "propensities.csv")
    assert set(propensities) == {f"{k}{name}" for k in range(1, 6) for name in ("", "@desk", "@phone")}
    assert max(propensities.values()) == pytest.approx(0.7)
    again = ultr("bias", path, *FAST, "--segment", "segment", "--propensities", out / "propensities.csv", "--json")
    parts = json.loads(again.stdout)["segments"]
    assert [part["verdict"]["anchor"] for part in parts.values()] == ["known", "known"]


@pytest.mark.parametrize("options", [(), ("--segment", "segment")], ids=["all", "by segment"])
def test_training_uses_the_examination_that_bias_wrote(options, ultr, tmp_path):
    path, out, run = (tmp_path / name for name in ("log.parquet", "bias", "run"))
    write_log(with_segments(["desk", "phone"], features=3), path)
    assert ultr("bias", path, *FAST, *options, "--out", out).returncode == 0
    small = ("--ranker", "mlp", "--set", "hidden=8", "--steps", 5, "--set", "bias_steps=5", "--device", "cpu")
    done = ultr("train", path, "--bias", out, *options, "--label", "click", "--out", run, *small)
    assert done.returncode == 0, done.stderr
    known, used = read_bias_theta(out), read_bias_theta(run)
    segments = ("@desk", "@phone") if options else ("",)
    assert set(used) == {f"{k}{segment}" for k in range(1, 6) for segment in segments}
    assert used == pytest.approx({slot: known[slot] for slot in used}, abs=1e-5)
    assert not options or used["4@desk"] != used["4@phone"]


def segmented(ultr, folder, name):
    write_log(with_segments(["desk", name]), folder / "log.parquet")
    return ultr("bias", folder / "log.parquet", *FAST, "--segment", "segment", "--out", folder / "bias")


def test_the_name_of_a_segment_may_contain_a_comma(ultr, tmp_path):
    assert segmented(ultr, tmp_path, "phone, old").returncode == 0
    assert "1@phone, old" in read_propensities(tmp_path / "bias" / "propensities.csv")


def test_the_name_of_a_segment_may_contain_brackets(ultr, tmp_path):
    assert "segment '[b]'" in segmented(ultr, tmp_path, "[b]").stderr


def test_positions_without_clicks_share_an_estimate_with_their_neighbours(ultr, tmp_path):
    log = world("random", requests=1000)
    clicks = log.actions["click"] * (log.positions != 4)
    path, out = tmp_path / "log.parquet", tmp_path / "bias"
    write_log(replace(log, actions={"click": clicks}), path)
    done = ultr("bias", path, *FAST, "--out", out, "--verbose")
    assert done.returncode == 0, done.stderr
    rows = [line.strip("│ ").split("│")[0].strip() for line in done.stdout.splitlines() if line.startswith("│")]
    assert rows[:4] == ["1", "2", "3", "4 to 5"]
    assert "positions with few clicks share one estimate: 4 to 5" in done.stderr
    theta = read_propensities(out / "propensities.csv")
    assert theta["4"] == theta["5"]


def test_a_long_table_is_cut(ultr, tmp_path):
    path = tmp_path / "log.parquet"
    log = world("random", requests=5000)
    write_log(replace(log, positions=log.positions + 5 * np.repeat(np.arange(5000) % 8, 5)), path)
    done = ultr("bias", path, *FAST, "--verbose")
    assert done.returncode == 0, done.stderr
    assert "and 10 more positions" in done.stderr


def test_feedback_other_than_clicks_is_found_by_its_column(ultr, tmp_path):
    log = world("random", requests=500)
    table = replace(log, actions={"watch": 3 * log.actions["click"]})
    write_log(table, tmp_path / "log.parquet")
    assert "feedback: watch > 0" in ultr("bias", tmp_path / "log.parquet", *FAST).stderr
    assert "feedback: watch > 2 > 0" in ultr("bias", tmp_path / "log.parquet", *FAST, "--label", "watch > 2").stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--position", "psoition"], 5, "no column 'psoition' for the position"),
        (["--item", "itme"], 5, "did you mean 'item'"),
        (["--segment", "device"], 5, "no column 'device' for the segment"),
        (["--label", "clicks"], 2, "click"),
        (["--label", "click > 5"], 5, "no positive feedback"),
        (["--bootstrap", 1], 2, "--bootstrap"),
        (["--propensities", "nowhere.csv"], 5, "no such file"),
        (["--models", "pbm,bdn"], 2, "no click model 'bdn'"),
    ],
)
def test_an_error_is_one_message(ultr, path, arguments, code, message):
    done = ultr("bias", path, *FAST, *arguments)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_missing_file_is_an_error(ultr, tmp_path):
    done = ultr("bias", tmp_path / "nowhere.parquet")
    assert done.returncode == 5
    assert "no such file" in done.stderr


def test_a_broken_file_is_not_an_internal_error(ultr, tmp_path):
    (tmp_path / "log.parquet").write_text("not Parquet")
    done = ultr("bias", tmp_path / "log.parquet")
    assert done.returncode == 5
    assert "internal error" not in done.stderr


def test_examination_of_a_search_engine_is_identified(ultr, real_data):
    done = ultr("bias", real_data("yandex-clicks") / "impressions.csv.gz", "--bootstrap", 40, "--json")
    report = json.loads(done.stdout)
    assert report["verdict"]["status"] in ("identified under an assumption", "identified with care")
    assert report["verdict"]["anchor"] == "items"
    found = {(a["first"], a["second"]): a["agree"] for a in report["agreements"]}
    assert found["harvest", "items"]
    theta = np.array(report["estimates"]["harvest"]["theta"])
    assert (np.diff(theta) < 0.02).all()
    assert theta[-1] < 0.4


def test_models_of_sequences_predict_the_clicks_of_a_search_engine_better(ultr, real_data):
    path = real_data("yandex-clicks") / "impressions.csv.gz"
    done = ultr("bias", path, "--bootstrap", 10, "--json", "--models", "pbm,ubm,dbn,sdbn,ccm")
    report = json.loads(done.stdout)
    found = {each["model"]: each["log_likelihood"] for each in report["click_models"]["models"]}
    assert found["ubm"] > found["dbn"] > found["ccm"] > found["pbm"] > -0.3155
    assert found["sdbn"] > -0.3155
    assert found["pbm"] == pytest.approx(report["estimates"]["items"]["held_out_log_likelihood"], rel=2e-3)


@pytest.mark.parametrize("same", [True, False])
def test_without_features_unused_numbers_show_whether_items_are_the_same(same, ultr, tmp_path):
    rng = np.random.default_rng(0)
    requests, items = 400, 6
    item = np.concatenate([rng.permutation(12)[:items] for _ in range(requests)])
    position = np.tile(np.arange(1, items + 1), requests)
    match = item if same else rng.normal(size=len(item))
    click = rng.random(len(item)) < 0.9 / position
    columns = {"request": np.repeat(np.arange(requests), items), "position": position, "item": item, "match": match}
    pq.write_table(pa.table({**columns, "click": click.astype(int)}), tmp_path / "log.parquet")
    done = ultr("bias", tmp_path / "log.parquet", "--bootstrap", "10")
    assert done.returncode == 0, done.stderr
    assert ("tems were not compared across positions" in " ".join(done.stderr.split())) is not same


def test_the_next_command_after_clicks_and_seconds_watched_trains_for_both(ultr, tmp_path):
    frame = shop(300).log.to_pandas()
    frame["watch_seconds"] = frame["click"] * np.random.default_rng(0).gamma(2, 10, len(frame))
    frame.to_parquet(tmp_path / "log.parquet", index=False)
    command = ("bias", tmp_path / "log.parquet", "--features", "text_match", "--bootstrap", 10)
    mean = frame["watch_seconds"][frame["click"] > 0].mean()
    assert f"--label 'click + watch_seconds / {mean:.2g}'" in ultr(*command).stderr.splitlines()[-1]
    assert "--label click " in ultr(*command, "--label", "click").stderr.splitlines()[-1]
