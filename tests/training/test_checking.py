"""Problems of the data of a run: leaks stop it, bots can be left out, and requests of one item are recognised."""

from __future__ import annotations

import csv

import numpy as np
import pandas as pd
import pytest

from runs import PLAIN, quick
from ultr.errors import DataError, OptionError
from ultr.log import read_log
from ultr.rankers.model import load_model
from ultr.training.config import Config
from ultr.training.data import GROUPED, in_groups, load_run_data
from ultr.training.folder import read_metrics
from ultr.training.loop import Listeners
from ultr.training.outcome import read_outcome
from ultr.training.run import run_training

REQUESTS, ITEMS = 300, 10


def frame(seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    rows = REQUESTS * ITEMS
    data = pd.DataFrame({"request": np.repeat(np.arange(REQUESTS), ITEMS), "f1": rng.normal(size=rows)})
    data["position"] = np.tile(np.arange(1, ITEMS + 1), REQUESTS)
    data["f2"] = rng.normal(size=rows)
    relevance = 1 / (1 + np.exp(1 - data["f1"]))
    data["click"] = (rng.random(rows) < relevance / np.sqrt(data["position"])).astype(int)
    return data.assign(dwell=data["click"] * rng.gamma(2, 10, rows))


def with_bots(bots: int = 20) -> pd.DataFrame:
    data = frame()
    copies = data[data["request"] < bots].assign(request=lambda rows: rows["request"] + 1000, click=1)
    return pd.concat([data, copies])


def config(data: pd.DataFrame, folder, **options) -> Config:
    data.to_parquet(folder / "log.parquet", index=False)
    return quick(folder / "log.parquet", ranker="linear", label="click").with_options(**{**PLAIN, **options})


def findings_of(chosen: Config, out) -> dict[str, str]:
    """Train a run and return its findings, which are in its outcome too."""
    found = {}
    listeners = Listeners(on_finding=lambda pitfall: found.update({pitfall.name: pitfall.what}))
    run_training(chosen, out, listeners=listeners)
    assert {each["name"]: each["what"] for each in read_outcome(out).about["warnings"]} == found
    return found


def by_day(days: int = 6) -> pd.DataFrame:
    """A log whose requests are spread over days, in the order of their ids."""
    data = frame()
    return data.assign(time=pd.Timestamp("2026-03-01") + pd.to_timedelta(data["request"] * days // REQUESTS, unit="D"))


def without_feedback(data: pd.DataFrame, *days: int) -> pd.DataFrame:
    silent = data["time"].dt.day.isin(days)
    return data.assign(click=data["click"].where(~silent, 0), dwell=data["dwell"].where(~silent, 0))


def test_days_without_feedback_are_found(tmp_path):
    split = {"split": "time", "time": "time"}
    (tmp_path / "a").mkdir()
    found = findings_of(config(without_feedback(by_day(), 2), tmp_path / "a", **split), tmp_path / "run")
    assert found["no feedback"] == "the label is 0 in all requests of 2026-03-02"
    (tmp_path / "b").mkdir()
    chosen = config(without_feedback(by_day(10), 10), tmp_path / "b", **split)
    assert "test requests" in findings_of(chosen, tmp_path / "run-2")["no feedback"]
    later = config(without_feedback(by_day(), 5, 6), tmp_path, **split)
    assert findings_of(later, tmp_path / "run-3")["no feedback"] == (
        "the label is 0 in all 50 validation and 50 test requests, which cannot select or test"
    )


def test_a_feature_that_follows_a_click_stops_training(tmp_path):
    leak = config(frame(), tmp_path, columns={"features": "f1,dwell"})
    with pytest.raises(DataError, match="features follow the feedback on their item") as raised:
        run_training(leak, tmp_path / "run")
    assert "'dwell'" in raised.value.what
    assert "allow_leaks" in raised.value.hint
    assert not (tmp_path / "run").exists()
    found = findings_of(leak.with_options(allow_leaks=True), tmp_path / "run")
    assert set(found) == {"features that follow feedback"}
    assert findings_of(config(frame(), tmp_path), tmp_path / "honest") == {}


def test_a_feature_that_follows_a_click_below_noise_is_a_finding_and_no_error(tmp_path):
    rng = np.random.default_rng(0)
    data = frame().assign(item=rng.permutation(np.arange(REQUESTS * ITEMS) % 500))
    data["seen"] = np.log1p(data["dwell"]) + rng.normal(size=len(data))
    data["rate"] = data.groupby("item")["click"].transform("mean")
    found = findings_of(config(data, tmp_path, columns={"features": "f1,seen,rate", "item": "item"}), tmp_path / "run")
    what = found["features that may depend on feedback of their row"]
    assert "'seen' tells rows of one item with 'click' from those without" in what
    assert "'rate' has a part of the 'click' of the rows that it describes" in what


def test_problems_are_not_sought_if_nobody_listens(tmp_path):
    leak = config(frame(), tmp_path, columns={"features": "f1,dwell"})
    run_training(leak, tmp_path / "run", listeners=Listeners(on_finding=None))
    assert read_outcome(tmp_path / "run").about["warnings"] == []


def test_features_of_the_old_order_bots_and_repeated_items_are_findings(tmp_path):
    data = with_bots()
    noise = np.random.default_rng(0).normal(size=len(data))
    data["f3"], data["f4"] = 1 / data["position"], -data["position"] + 0.3 * noise
    data["item"] = np.random.default_rng(0).integers(0, 10, len(data))
    found = findings_of(config(data, tmp_path), tmp_path / "run")
    assert set(found) == {
        "features that encode position",
        "features that order as positions do",
        "impossible click rates",
        "items twice in a request",
    }
    assert found["features that encode position"].endswith(": f3")
    assert found["features that order as positions do"].endswith(": f4")


def test_suspicious_requests_can_be_left_out_and_are_listed(tmp_path):
    dropping = config(with_bots(), tmp_path, drop_suspicious=True)
    found = findings_of(dropping, tmp_path / "run")
    assert set(found) == {"suspicious requests"}
    assert found["suspicious requests"].startswith("20 requests")
    with (tmp_path / "run" / "suspicious.csv").open() as file:
        assert [row["request"] for row in csv.DictReader(file)] == [str(1000 + i) for i in range(20)]
    kept = load_run_data(dropping)
    assert sum(map(len, (kept.train, kept.validation, kept.test))) == REQUESTS
    run_training(config(frame(), tmp_path, drop_suspicious=True), tmp_path / "clean")
    assert (tmp_path / "clean" / "suspicious.csv").read_text().split() == ["request"]


def test_suspicious_requests_of_lists_are_left_out_when_they_are_prepared(tmp_path):
    from ultr import prepare_lists

    with_bots().to_parquet(tmp_path / "log.parquet", index=False)
    prepare_lists(tmp_path / "log.parquet", tmp_path / "lists", drop_suspicious=True)
    listed = (tmp_path / "lists" / "suspicious.csv").read_text().split()
    assert sorted(listed[1:]) == sorted(str(1000 + i) for i in range(20))
    lists = [read_log(tmp_path / "lists" / split) for split in ("train", "validation", "test")]
    assert sorted(i for part in lists for i in part.request_ids.to_pylist()) == list(range(REQUESTS))
    with pytest.raises(OptionError) as raised:
        run_training(quick(tmp_path / "lists", label="click", drop_suspicious=True), tmp_path / "run")
    assert "--drop-suspicious to ultr prepare" in raised.value.hint


# --- Requests with one item -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranker", ["linear", "lightgbm"])
@pytest.mark.parametrize("method", ["pairwise-em", "lambdarank"])
def test_methods_that_learn_an_order_reject_a_log_of_one_item_per_request(method, ranker, tmp_path):
    alone = config(frame().assign(request=np.arange(REQUESTS * ITEMS)), tmp_path, ranker=ranker)
    with pytest.raises(DataError, match="all 2,250 requests have one item"):
        run_training(alone.with_options(method=method), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_affine_learns_from_requests_of_one_item_only_by_its_pointwise_loss(tmp_path):
    alone = config(frame().assign(request=np.arange(REQUESTS * ITEMS)), tmp_path, method="affine")
    with pytest.raises(DataError, match="all 2,250 requests have one item"):
        run_training(alone.with_options(method_options={"loss": "listwise"}), tmp_path / "run")
    run_training(alone.with_options(steps=2), tmp_path / "run")


@pytest.mark.parametrize("ranker", ["linear", "lightgbm"])
@pytest.mark.parametrize("method", ["pointwise", "direct"])
def test_pointwise_methods_learn_from_requests_of_one_item(method, ranker, tmp_path):
    data = frame()
    alone = data.assign(request=np.arange(len(data)))
    options = {"ranker": ranker, "steps": 40, "lr": 0.1, "batch": 256, "select": "auto"}
    found = findings_of(config(alone, tmp_path, method=method, **options), tmp_path / "run")
    assert found["requests with one item"].startswith("100.0% of the requests have one item")
    scores = load_model(tmp_path / "run").score(read_log(alone))
    assert np.corrcoef(scores, data["f1"])[0, 1] > 0.6
    values = {line["off-policy-likelihood"] for line in read_metrics(tmp_path / "run")}
    assert len(values) > 1  # validation requests are ranked in groups


@pytest.mark.parametrize("method", ["pointwise", "lambdarank"])
def test_some_requests_of_one_item_are_a_finding_with_their_share(method, tmp_path):
    data = frame()
    some = data[(data["request"] >= 30) | (data["position"] == 1)]
    found = findings_of(config(some, tmp_path, method=method), tmp_path / "run")
    share = float(found["requests with one item"].split("%")[0])
    assert share == pytest.approx(10, abs=4)


def test_validation_requests_of_one_item_become_lists_in_the_order_of_positions():
    log = read_log(frame().assign(request=np.arange(REQUESTS * ITEMS), position=lambda rows: 11 - rows["position"]))
    grouped = in_groups(log)
    assert grouped.lengths.tolist() == [GROUPED] * REQUESTS
    assert grouped.positions[:GROUPED].tolist() == list(range(1, 11))
    np.testing.assert_array_equal(grouped.features[:GROUPED], log.features[:GROUPED][::-1])
    assert in_groups(grouped) is grouped
