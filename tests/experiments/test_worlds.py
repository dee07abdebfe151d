"""The grid of simulated worlds: what is in it, its tests, and the experiment on a small budget."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from conftest import make_shown_log
from ultr.datasets.synthetic import make_synthetic
from ultr.datasets.users import User, simulate_log
from ultr.errors import DataError
from ultr.experiments import lab as labs
from ultr.experiments import worlds as experiment
from ultr.experiments.lab import QUICK, Lab, World
from ultr.experiments.worlds import DEFAULT, KNOWN, Against, WorldResult
from ultr.log import write_log
from ultr.training.comparing.plan import Entry
from ultr.training.comparing.results import Row, Setting
from ultr.training.comparing.tasks import Workers
from ultr.training.config import make_config
from ultr.training.data import decide, load_run_data

TINY = replace(QUICK, hidden=(4,), steps=2, bias_steps=2, evaluate_every=2, sessions=100, runs=3, rates=(0.05,))
GRID = [world for name in experiment.DATA for world in experiment.worlds_of(name)]


def test_the_grid_has_every_value_often():
    assert len(GRID) == len(set(GRID)) == len({world.name for world in GRID}) == 32
    for name, least in (("data", 8), ("logging", 4), ("clicks", 16), ("users", 2), ("sessions", 4), ("curve", 2)):
        assert min(Counter(getattr(world, name) for world in GRID).values()) >= least, name


def test_every_world_has_the_methods_that_are_right_in_it():
    for world in GRID:
        entries = experiment.entries_of(world)
        assert entries[0] == DEFAULT
        assert (KNOWN in entries) == (world.users in experiment.KNOWN_THETA)
        needed = {"trust": ("affine", "pairwise-em:trust=clicks"), "cascade": ("cascade", "dbn"), "dcm": ("dcm",)}
        assert set(needed.get(world.users, ())) <= set(entries)
        assert ("sum-click" in entries) != world.clicks
        for text in entries:
            Entry.parse(text)


def test_the_default_of_the_grid_is_that_of_a_log(tmp_path):
    path = tmp_path / "log.parquet"
    log, _ = simulate_log(make_shown_log(requests=40, features=3), User(), seed=0)
    write_log(log, path)
    config = make_config(str(path))
    assert decide(config, load_run_data(config)).rankers == Entry.parse(DEFAULT).kinds == ("mlp", "lightgbm")
    assert config.method.name == Entry.parse(DEFAULT).method


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    small = make_synthetic(requests=(60, 10, 10))
    with pytest.MonkeyPatch.context() as patch:
        for module in ("training.data", "training.comparing.tasks", "experiments.worlds"):
            patch.setattr(f"ultr.{module}.cached_dataset", lambda name, data_dir: small)
        patch.setattr(labs, "load_dataset", lambda name, data_dir=None: small)
        patch.setattr(experiment, "RIVALS", ("direct", "pointwise"))
        patch.setattr(experiment, "OF_CLICKS", ())
        patch.setattr(experiment, "FEW", 2)
        patch.setattr(experiment, "CLOSEST", 1)
        patch.setattr("ultr.bias.logging_policy.NETWORK_STEPS", 5)
        lab = Lab(tmp_path_factory.mktemp("worlds"), TINY, Workers(1), data=("synthetic",), device="cpu")
        yield lab, experiment.compare_worlds(lab)


def test_every_world_has_the_default_its_parts_and_rivals(done):
    lab, result = done
    files = [*(lab.out / "worlds").iterdir()]
    assert len(result.results) == len(files) == 2
    for figures in result.results.values():
        seeds = {entry: len(values) for entry, values in figures["values"].items()}
        assert [*seeds] == [DEFAULT, *experiment.PARTS[:2], "direct", "pointwise"]
        assert seeds[DEFAULT] == 3
        assert sorted(seeds.values()) == [2, 2, 2, 3, 3]  # one rival has all logs
        assert set(figures["against"]) == {*seeds} - {DEFAULT}
        assert len(figures["logged"]) == 3
    json.dumps(result.to_json(), allow_nan=False)
    assert "non-inferior to all" in result.text()


def test_finished_worlds_are_read_and_damaged_ones_are_an_error(done):
    lab, result = done
    again = experiment.compare_worlds(replace(lab, workers=None))
    assert again.text() == result.text()
    path = next((lab.out / "worlds").iterdir())
    text = path.read_text()
    try:
        path.write_text(json.dumps({**json.loads(text), "more": 1, "seal": None}).replace(', "seal": null', ""))
        with pytest.raises(DataError, match="the result of a world cannot be read"):
            experiment.compare_worlds(replace(lab, workers=None))
    finally:
        path.write_text(text)


def test_the_error_is_that_of_crossed_logs_and_requests():
    rng = np.random.default_rng(0)
    covered, widths = [], []
    for _ in range(300):
        by_log, by_request = rng.normal(0, 0.05, (12, 1)), rng.normal(0, 0.3, (1, 60))
        both = 1 + by_log + by_request + rng.normal(0, 0.2, (12, 60))
        rows = [
            Row(name, Setting(), {"m": (of + 2).mean(1).tolist()}, by_request={"m": (of + 2).mean(0)})
            for name, of in ((DEFAULT, both), ("direct", np.zeros_like(both)))
        ]
        found = experiment.difference(*rows, "m")
        covered.append(abs(found.difference - 0.5) < found.half_width)  # 1 / 2
        widths.append(found.error)
    assert 0.93 <= np.mean(covered) <= 0.99
    spread = (0.05**2 / 12 + 0.3**2 / 60 + 0.2**2 / 720) ** 0.5 / 2
    assert np.mean(widths) == pytest.approx(spread, rel=0.1)


def against(difference: float, error: float = 0.002, entry: str = "direct") -> Against:
    return Against(entry, 20, difference, error, 0.0, 500)


def test_p_values_are_those_of_student():
    each = against(0.003)
    assert each.freedom == pytest.approx(19)
    assert each.p == pytest.approx(2 * stats.t.sf(1.5, 19))
    assert each.p_above(-0.01) == pytest.approx(stats.t.sf(6.5, 19))
    assert each.half_width == pytest.approx(0.002 * stats.t.ppf(0.975, 19))


def result_of(*rivals: Against) -> WorldResult:
    values = {DEFAULT: [1.0], **{each.entry: [1.0] for each in rivals}}
    return WorldResult("a world", "reward@10", values, {}, {each.entry: each for each in rivals}, [0.5], {})


def test_verdicts_have_a_margin_and_a_correction():
    found = result_of(
        against(0.02, entry="a"), against(0.0, entry="b"), against(-0.02, entry="c"), against(0.0, 0.02, entry="d")
    )
    assert found.verdicts == {"a": "win", "b": "level", "c": "loss", "d": "open"}
    assert not found.not_inferior
    assert found.closest.entry == "c"
    assert result_of(against(0.02, entry="a"), against(-0.004, entry="b")).not_inferior
    assert not result_of(against(0.02, entry="a"), against(-0.008, entry="b")).not_inferior
    nearly = against(0.0045, entry="a")  # p = 0.036, which is not enough among three
    assert result_of(nearly).verdicts == {"a": "win"}
    assert result_of(nearly, against(0.0, entry="b"), against(0.0, entry="c")).verdicts["a"] == "level"


def test_the_mean_over_data_sets_counts_each_once_with_the_interval_of_student():
    found = [
        (World(name), result_of(against(each)))
        for name, each in (("synthetic", 0.01), ("synthetic", 0.03), ("ml-1m", 0.0), ("mq2007", 0.01))
    ]
    mean, half, means = experiment.over_data_sets(found, "direct")
    assert means == {"synthetic": pytest.approx(0.02), "ml-1m": 0.0, "mq2007": 0.01}
    assert mean == pytest.approx(0.01)
    assert half == pytest.approx(stats.t.ppf(0.975, 2) * 0.01 / 3**0.5)
    (row,) = experiment._methods(found).parts[1].rows
    assert row[:3] == ["direct", "4", "+1.00%"]
    assert row[4:8] == ["3", "1", "0", "0"]
