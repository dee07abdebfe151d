"""The live test as an experiment: its text, its claims and its plot."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from ultr.compare import Workers
from ultr.datasets.synthetic import make_synthetic
from ultr.errors import DataError
from ultr.experiments import EXPERIMENTS, QUICK, Lab, abtest, live
from ultr.experiments.claims import DIRECTION, HELD, NOT, REVERSED

SMALL = make_synthetic(requests=(120, 10, 10))
TINY = live.LiveOptions(
    days=2,
    sessions=60,
    entries=("pal-click", "pairwise-em:loss=opt", "lambdarank"),
    hidden=(4,),
    steps=4,
    bias_steps=4,
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
def test_a_lift_is_held_only_if_its_interval_is_above_zero(low, mean, high, verdict):
    assert abtest._verdict({"low": low, "mean": mean, "high": high}) == verdict


def test_the_live_test_says_lifts_days_and_claims(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "cached_dataset", lambda name, data_dir: SMALL)
    monkeypatch.setattr(abtest, "QUICK_LIVE", TINY)
    lab = Lab(tmp_path, QUICK, Workers(1), runs=2, device="cpu")
    outcome = EXPERIMENTS["live"](lab)
    text, result = outcome.text(), outcome.figures
    lift = result["lifts"]["pairwise-em:loss=opt"]["expected"]
    assert f"| pairwise-em:loss=opt | {lift['mean']:+.2%} [{lift['low']:+.2%}, {lift['high']:+.2%}] |" in text
    course = [f"{day['expected']:.3f}" for day in result["course"]["lambdarank"]]
    assert f"| lambdarank | {' | '.join(course)} |" in text
    assert len(outcome.claims) == 2
    whole, last = outcome.claims
    assert whole.verdict == abtest._verdict(lift)
    last_day = result["lifts"]["pairwise-em:loss=opt"]["by_day"][-1]["expected"]
    assert last.evidence.startswith(f"{last_day['mean']:+.2%}")
    json.dumps(outcome.to_json(), allow_nan=False)
    plot = ElementTree.parse(tmp_path / "live.svg").getroot()  # noqa: S314 - our own file
    assert len(list(plot.iter("{http://www.w3.org/2000/svg}polyline"))) == 3 + 2  # buckets, and lifts over the first


def test_the_live_test_takes_one_data_set(tmp_path, monkeypatch):
    monkeypatch.setattr(Lab, "find", lambda self, names: (["synthetic", "mq2007"], {}))
    with pytest.raises(DataError, match="one data set"):
        EXPERIMENTS["live"](Lab(tmp_path, QUICK, Workers(1)))
