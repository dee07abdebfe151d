"""`ultr bias` from the command line: what it prints, what it writes, what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from propensity.worlds import THETA, world
from ultr import examination
from ultr.examination import read_propensities
from ultr.log import write_log


@pytest.fixture(autouse=True)
def linear_logging_score(monkeypatch):
    monkeypatch.setattr(examination, "MUCH_OPEN", np.inf)


@pytest.fixture
def path(tmp_path):
    write_log(world("random", requests=2000), tmp_path / "log.parquet")
    return tmp_path / "log.parquet"


FAST = ("--bootstrap", 20)


def test_a_verdict_is_printed_with_what_it_rests_on(ultr, path):
    done = ultr("bias", path, *FAST)
    assert done.returncode == 0, done.stderr
    assert "verdict: identified - correct for it: items were shown at several positions" in done.stderr
    assert "harvest and items agree" in done.stderr
    assert "all positions hang together" in done.stderr
    assert "requests in random order" in done.stderr
    assert "Examination relative to position 1" in done.stdout
    for heading in ("position", "shown", "rate", "harvest", "items", "held-out"):
        assert heading in done.stdout


def test_json_goes_to_stdout_alone(ultr, path):
    done = ultr("bias", path, *FAST, "--json", "--seed", 3)
    report = json.loads(done.stdout)
    assert report["verdict"]["status"] == "identified"
    assert report["positions"] == [1, 2, 3, 4, 5]
    np.testing.assert_allclose(report["estimates"]["harvest"]["theta"], THETA / THETA[0], rtol=0.3)
    assert json.loads(ultr("bias", path, *FAST, "--json", "--seed", 3).stdout) == report


def test_propensities_are_written_as_training_takes_them(ultr, path, tmp_path):
    out = tmp_path / "bias"
    done = ultr("bias", path, *FAST, "--out", out)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in out.iterdir()) == ["bias.html", "bias.json", "propensities.csv"]
    assert f"next: ultr train {path} --propensities {out}/propensities.csv" in done.stderr
    found = read_propensities(out / "propensities.csv")
    assert list(map(str, found)) == ["1", "2", "3", "4", "5"]
    report = json.loads((out / "bias.json").read_text())
    theta = np.array(report["estimates"]["items"]["theta"])
    np.testing.assert_allclose(list(found.values()), 0.7 * theta / theta.max(), rtol=1e-5)
    assert "feedback rate" in (out / "bias.html").read_text()
    again = ultr("bias", path, *FAST, "--propensities", out / "propensities.csv", "--json")
    assert json.loads(again.stdout)["verdict"]["anchor"] == "known"


def test_an_output_is_not_overwritten_unless_asked(ultr, path, tmp_path):
    out = tmp_path / "bias"
    out.mkdir()
    (out / "precious").write_text("kept")
    refused = ultr("bias", path, *FAST, "--out", out)
    assert refused.returncode == 1
    assert "--overwrite" in refused.stderr
    assert [p.name for p in out.iterdir()] == ["precious"]
    assert ultr("bias", path, *FAST, "--out", out, "--overwrite").returncode == 0
    assert (out / "propensities.csv").exists()


def test_a_log_that_tells_nothing_says_so(ultr, tmp_path):
    path, out = tmp_path / "log.parquet", tmp_path / "bias"
    write_log(world("deterministic", requests=300), path)
    done = ultr("bias", path, *FAST, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "verdict: not identified - collect a little randomisation first" in done.stderr
    assert "next:" not in done.stderr
    assert (out / "propensities.csv").read_text() == "position,propensity\n"
    assert json.loads((out / "bias.json").read_text())["verdict"]["anchor"] is None


def test_features_are_told_of(ultr, tmp_path):
    path = tmp_path / "log.parquet"
    write_log(world("deterministic", requests=600, features=3), path)
    done = ultr("bias", path, *FAST, "--sample", 1000)
    assert done.returncode == 0, done.stderr
    assert "(200 requests)" in done.stderr
    assert "of the order" in done.stderr
    assert "strata and regression" in done.stderr


def test_items_that_are_not_compared_are_told_of(ultr, tmp_path):
    log = world("random", requests=300, features=3)
    other = np.random.default_rng(0).normal(size=log.features.shape).astype(np.float32)
    write_log(replace(log, features=other, context={}), tmp_path / "log.parquet")
    done = ultr("bias", tmp_path / "log.parquet", *FAST)
    assert "note: items recur with other features" in done.stderr


def with_segments(names):
    log = world("random", requests=2000)
    segment = pa.array([names[i % 2] for i in range(2000)])
    return replace(log, context={**log.context, "segment": segment})


def test_segments_are_shown_and_written_apart(ultr, tmp_path):
    path, out = tmp_path / "log.parquet", tmp_path / "bias"
    write_log(with_segments(["desk", "phone"]), path)
    done = ultr("bias", path, *FAST, "--segment", "segment", "--out", out)
    assert done.returncode == 0, done.stderr
    for name in ("desk", "phone"):
        assert f"Segment '{name}' (1,000 requests)" in done.stdout
    found = read_propensities(out / "propensities.csv")
    assert set(found) == {f"{k}{name}" for k in range(1, 6) for name in ("", "@desk", "@phone")}
    assert max(found.values()) == pytest.approx(0.7)
    again = ultr("bias", path, *FAST, "--segment", "segment", "--propensities", out / "propensities.csv", "--json")
    parts = json.loads(again.stdout)["segments"]
    assert [part["verdict"]["anchor"] for part in parts.values()] == ["known", "known"]


def segmented(ultr, folder, name):
    write_log(with_segments(["desk", name]), folder / "log.parquet")
    return ultr("bias", folder / "log.parquet", *FAST, "--segment", "segment", "--out", folder / "bias")


def test_the_name_of_a_segment_may_hold_a_comma(ultr, tmp_path):
    assert segmented(ultr, tmp_path, "phone, old").returncode == 0
    assert "1@phone, old" in read_propensities(tmp_path / "bias" / "propensities.csv")


def test_the_name_of_a_segment_may_hold_brackets(ultr, tmp_path):
    assert "Segment '[b]'" in segmented(ultr, tmp_path, "[b]").stdout


def test_positions_that_are_not_told_are_left_open_in_print_and_written_as_those_around(ultr, tmp_path):
    log = world("random", requests=1000)
    clicks = log.actions["click"] * (log.positions != 4)
    path, out = tmp_path / "log.parquet", tmp_path / "bias"
    write_log(replace(log, actions={"click": clicks}), path)
    done = ultr("bias", path, *FAST, "--out", out)
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if line.strip("│ ").startswith("4 "))
    assert "-" in row
    assert list(map(int, read_propensities(out / "propensities.csv"))) == [1, 2, 3, 4, 5]


def test_a_long_list_is_cut_in_print(ultr, tmp_path):
    path = tmp_path / "log.parquet"
    log = world("random", requests=300)
    write_log(replace(log, positions=log.positions + 5 * np.repeat(np.arange(300) % 8, 5)), path)
    done = ultr("bias", path, *FAST)
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
        (["--position", "psoition"], 1, "no column 'psoition' for the position"),
        (["--item", "itme"], 1, "did you mean 'item'"),
        (["--segment", "device"], 1, "no column 'device' for the segment"),
        (["--label", "clicks"], 1, "click"),
        (["--label", "click > 5"], 1, "no positive feedback"),
        (["--bootstrap", 1], 2, "--bootstrap"),
        (["--propensities", "nowhere.csv"], 1, "no such file"),
    ],
)
def test_a_refusal_is_one_message(ultr, path, arguments, code, message):
    done = ultr("bias", path, *FAST, *arguments)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_no_file_is_refused(ultr, tmp_path):
    done = ultr("bias", tmp_path / "nowhere.parquet")
    assert done.returncode == 1
    assert "no such file" in done.stderr


def test_a_broken_file_is_no_internal_error(ultr, tmp_path):
    (tmp_path / "log.parquet").write_text("this is no Parquet")
    done = ultr("bias", tmp_path / "log.parquet")
    assert done.returncode == 1
    assert "internal error" not in done.stderr


def test_examination_of_a_search_engine_is_identified(ultr, real_data):
    done = ultr("bias", real_data("yandex-clicks") / "impressions.csv.gz", "--bootstrap", 40, "--json")
    report = json.loads(done.stdout)
    assert report["verdict"]["status"] == "identified"
    assert report["verdict"]["anchor"] == "items"
    found = {(a["first"], a["second"]): a["agree"] for a in report["agreements"]}
    assert found["harvest", "items"]
    theta = np.array(report["estimates"]["harvest"]["theta"])
    assert (np.diff(theta) < 0.02).all()
    assert theta[-1] < 0.4
