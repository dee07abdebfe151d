"""`ultr train` and `ultr compare` use the evidence of a log about examination, and say which they used."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from bias.shop import error_of, shop
from ultr.bias import logging_policy
from ultr.log import write_log

QUICK = (
    "--label",
    "click",
    "--ranker",
    "mlp",
    "--set",
    "hidden=4",
    "--steps",
    2,
    "--set",
    "batch=16",
    "--set",
    "bias_steps=2",
    "--set",
    "evaluate_every=2",
)
ODD = {"item": "ware", "query": "phrase", "randomised": "shuffled"}
ODD_NAMES = tuple(part for role, name in ODD.items() for part in (f"--{role}", name))
BY_ITEMS = "clicks on items shown at several positions for the same query"


@pytest.fixture(autouse=True)
def linear_logging_score(monkeypatch):
    monkeypatch.setattr(logging_policy, "MUCH_OPEN", np.inf)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A log with the common names of columns, and one with other names next to it."""
    path = tmp_path_factory.mktemp("shop") / "log.parquet"
    write_log(shop(2500), path)
    table = pq.read_table(path)
    pq.write_table(table.rename_columns([ODD.get(name, name) for name in table.column_names]), path.with_name("odd.pq"))
    return path


def trained(ultr, path, out, *options):
    done = ultr("train", path, "--out", out, *QUICK, *options)
    assert done.returncode == 0, done.stderr
    return json.loads((out / "bias.json").read_text()), done.stderr


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--method", "ipw-listwise"),
        ("--ranker", "lightgbm", "--method", "direct"),
        ("--ranker", "lightgbm"),
    ],
)
def test_training_takes_theta_from_the_best_evidence_and_names_it(ultr, path, tmp_path, options):
    if "--ranker" in options:
        pytest.importorskip("lightgbm")
    bias, messages = trained(ultr, path, tmp_path / "run", *options)
    assert bias["theta_from"].endswith(BY_ITEMS)
    assert 0.03 < bias["theta_standard_error"] < 0.5  # 32 requests in random order cannot exclude much
    assert error_of(np.array(bias["theta"])) < 0.15
    assert (np.array(bias["theta_used"]) >= bias["theta"]).all()  # corrected by less, as the estimate is unsure
    assert bias["theta_used"][-1] > bias["theta"][-1]
    assert f"evidence: {bias['theta_from']}, with a standard error of " in messages
    assert "users: compared with position 1, they look 0." in messages
    off_policy = json.loads((tmp_path / "run" / "off-policy" / "model.json").read_text())["theta"]
    assert error_of(np.array(list(off_policy.values()))) < 0.15


def test_columns_with_other_names_reach_training(ultr, path, tmp_path):
    odd = path.with_name("odd.pq")
    by_common_names, _ = trained(ultr, path, tmp_path / "common")
    by_options, _ = trained(ultr, odd, tmp_path / "named", *ODD_NAMES)
    assert by_options["theta"] == by_common_names["theta"]
    unnamed, messages = trained(ultr, odd, tmp_path / "unnamed")
    assert unnamed["theta_from"] == "features alone (rows with similar scores of the logging ranker)"
    assert "theta_standard_error" not in unnamed
    assert "evidence: features alone" in messages
    assert "would help: some requests in random order" in messages


def test_a_bias_model_that_is_loaded_keeps_the_source_of_theta(ultr, path, tmp_path):
    first, _ = trained(ultr, path, tmp_path / "first")
    second, messages = trained(ultr, path, tmp_path / "second", "--bias", tmp_path / "first")
    assert second["theta_from"] == first["theta_from"]
    assert f"evidence: {first['theta_from']}" in messages


def test_compare_reads_the_columns_of_the_evidence(ultr, path, tmp_path):
    odd = path.with_name("odd.pq")
    options = (*QUICK, *ODD_NAMES, "--methods", "ipw-listwise", "--seeds", 1, "--lrs", 0.01)
    options += ("--tune", "max_weight=none", "--tune", "seeds=1", "--jobs", 1)
    done = ultr("compare", odd, "--out", tmp_path / "comparison", *options)
    assert done.returncode == 0, done.stderr
    found = [json.loads(file.read_text())["theta_from"] for file in (tmp_path / "comparison").rglob("bias.json")]
    assert found
    assert all(text.endswith(BY_ITEMS) for text in found)


def test_the_next_command_of_bias_names_the_columns(ultr, path, tmp_path):
    done = ultr("bias", path.with_name("odd.pq"), *ODD_NAMES, "--bootstrap", 10, "--out", tmp_path / "bias")
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stderr.splitlines() if line.startswith("next: ultr train"))
    assert "--item ware --query phrase" in line
    assert "--randomised shuffled" in line
