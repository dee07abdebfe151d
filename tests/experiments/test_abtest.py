"""The live test as an experiment: its text, its claims and its plots."""

from __future__ import annotations

import json

import pytest

from pages import plots_of, titles_of
from ultr.datasets.synthetic import make_synthetic
from ultr.errors import DataError
from ultr.experiments import EXPERIMENTS, QUICK, Lab, live
from ultr.experiments.lab import DIRECTION, HELD, NOT, REVERSED
from ultr.training.comparing.tasks import Workers

SMALL = make_synthetic(requests=(120, 10, 10))
TINY = live.LiveOptions(
    live.BASE.with_options(hidden=(4,), steps=4, bias_steps=4),
    days=2,
    sessions=60,
    entries=("pal-click", "pairwise-em", "pairwise-em:loss=opt", "lambdarank"),
)


@pytest.mark.parametrize(
    ("low", "mean", "high", "verdict"),
    [
        (0.01, 0.02, 0.03, HELD),
        (-0.01, 0.02, 0.05, DIRECTION),
        (None, 0.02, None, DIRECTION),
        (-0.05, -0.02, 0.01, NOT),
        (None, -0.02, None, NOT),
        (-0.05, -0.02, -0.01, REVERSED),
    ],
)
def test_the_claim_of_a_lift_holds_only_if_its_interval_is_above_zero(low, mean, high, verdict):
    assert live._verdict({"low": low, "mean": mean, "high": high}) == verdict


def test_the_live_test_shows_lifts_days_and_claims(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "cached_dataset", lambda name, data_dir: SMALL)
    monkeypatch.setattr(live, "QUICK_LIVE", TINY)
    lab = Lab(tmp_path, QUICK, Workers(1), runs=2, device="cpu")
    outcome = EXPERIMENTS["live"](lab)
    text, results = outcome.text(), outcome.results
    lift = results["lifts"]["pairwise-em:loss=opt"]["expected"]
    assert f"| pairwise-em:loss=opt | {lift['mean']:+.2%} [{lift['low']:+.2%}, {lift['high']:+.2%}] |" in text
    course = [f"{day['expected']:.3f}" for day in results["course"]["lambdarank"]]
    assert f"| lambdarank | {' | '.join(course)} |" in text
    assert len(outcome.claims) == 4
    for entry, (whole, last) in zip(
        ("pairwise-em", "pairwise-em:loss=opt"), (outcome.claims[2:], outcome.claims[:2]), strict=True
    ):
        lifts = results["lifts"][entry]
        assert whole.verdict == live._verdict(lifts["expected"])
        last_day = lifts["by_day"][-1]["expected"]
        assert last.evidence.startswith(f"{last_day['mean']:+.2%}")
    json.dumps(outcome.to_json(), allow_nan=False)
    outcome.write(tmp_path)
    page = (tmp_path / "live.html").read_text()
    assert titles_of(page) == ["Lift over pal-click by day", "The live metric by day"]
    lifts, metric = ({trace["name"]: trace for trace in plot["data"]} for plot in plots_of(page))
    assert list(lifts) == list(TINY.entries[1:])
    assert list(metric) == list(TINY.entries)
    assert metric["lambdarank"]["x"] == [0, 1, 2]
    days = [day["expected"] for day in results["course"]["lambdarank"]]
    assert metric["lambdarank"]["y"] == pytest.approx(days, rel=1e-5)
    assert lifts["pairwise-em:loss=opt"]["y"][-1] == pytest.approx(100 * last_day["mean"], rel=1e-5)


def test_the_live_test_takes_one_data_set(tmp_path, monkeypatch):
    monkeypatch.setattr(Lab, "find", lambda self, names: (["synthetic", "mq2007"], {}))
    with pytest.raises(DataError, match="one data set"):
        EXPERIMENTS["live"](Lab(tmp_path, QUICK, Workers(1)))
