"""`ultr judgments`: a file, a summary, and errors."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest

from bias.judged import judged_world
from ultr.log import write_log


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("judgments") / "log.parquet"
    write_log(judged_world(0, queries=60).log, path)
    return path


def test_a_table_is_written_and_its_grades_are_printed(ultr, log, tmp_path):
    done = ultr("judgments", log, "--out", tmp_path / "j.parquet")
    assert done.returncode == 0, done.stderr
    assert "pairs have enough evidence for a grade" in done.stderr
    assert "Sure pairs by grade" in done.stdout
    table = pq.read_table(tmp_path / "j.parquet")
    assert f"wrote {tmp_path / 'j.parquet'}: {len(table):,} of {len(table):,} pairs (parquet)" in done.stderr
    assert "exists already" in ultr("judgments", log, "--out", tmp_path / "j.parquet").stderr


def test_json_has_the_cut_points_and_the_counts(ultr, log, tmp_path):
    options = ("--format", "opensearch", "--grades", 4, "--sure", 0.5, "--weight", 1, "--json")
    done = ultr("judgments", log, "--out", tmp_path / "j.json", *options)
    found = json.loads(done.stdout)
    assert (len(found["cuts"]), len(found["grades"]), found["format"]) == (4, 5, "opensearch")
    assert found["written"] == found["sure"] == sum(found["grades"]) < found["pairs"]
    body = json.loads((tmp_path / "j.json").read_text())
    assert sum(len(query["ratings"]) for query in body["judgmentRatings"]) == found["written"]
    again = ultr("judgments", log, "--out", tmp_path / "k.json", "--cuts", "0.01,0.1", "--keep-unsure", *options)
    again = json.loads(again.stdout)
    assert (again["cuts"], again["written"]) == ([0.01, 0.1], again["pairs"])


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--out", "j.txt"], 2, "--format csv"),
        (["--out", "j.csv", "--cuts", "high"], 2, "--cuts must be numbers"),
        (["--out", "j.csv", "--cuts", "0.3,0.1"], 2, "cut points must increase"),
        (["--out", "j.csv", "--weight", "2"], 2, "--weight"),
        (["--out", "j.csv", "--item", ""], 5, "judgments need item ids"),
        (["--out", "j.csv", "--label", "purchase"], 2, "purchase"),
    ],
)
def test_errors_say_what_to_do(ultr, log, tmp_path, monkeypatch, options, code, message):
    monkeypatch.chdir(tmp_path)
    done = ultr("judgments", log, *options)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
    assert not list(tmp_path.iterdir())
