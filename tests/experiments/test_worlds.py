"""The grid of simulated worlds: what is in it, and the experiment on a small budget."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from ultr.datasets.synthetic import make_synthetic
from ultr.experiments import lab as labs
from ultr.experiments import worlds as experiment
from ultr.experiments.lab import QUICK, Lab, World
from ultr.experiments.paper import DEFAULT
from ultr.training.comparing.results import Comparison, Row, Setting, with_tests
from ultr.training.comparing.tasks import Workers

TINY = replace(QUICK, hidden=(4,), steps=4, bias_steps=4, evaluate_every=2, sessions=200)
GRID = experiment.cells()


def test_the_grid_has_every_value_often_and_in_both_halves():
    assert len(GRID) >= 40
    halves = [[world for world, chooses in GRID.items() if chooses is half] for half in (True, False)]
    assert len(halves[0]) == len(halves[1])
    for name in ("data", "users", "eta", "sessions", "clicks", "logging"):
        for half in halves:
            counts = Counter(getattr(world, name) for world in half)
            assert set(counts) == {getattr(world, name) for world in GRID}, name
    for name, least in (("data", 16), ("logging", 8), ("clicks", 12), ("sessions", 6)):
        assert min(Counter(getattr(world, name) for world in GRID).values()) >= least, name


def test_the_cells_of_a_data_set_are_the_same_whatever_others_there_are():
    for name in experiment.DATA:
        assert experiment.cells([name]) == {world: chooses for world, chooses in GRID.items() if world.data == name}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    small = make_synthetic(requests=(60, 10, 10))
    with pytest.MonkeyPatch.context() as patch:
        for module in ("training.data", "training.comparing.tasks", "experiments.worlds"):
            patch.setattr(f"ultr.{module}.cached_dataset", lambda name, data_dir: small)
        patch.setattr(labs, "load_dataset", lambda name, data_dir=None: small)
        patch.setattr(experiment, "METHODS", (DEFAULT, experiment.BOUND, "pointwise", "pal-click"))
        small_grid = {replace(world, sessions=200): chooses for world, chooses in [*GRID.items()][2:4]}
        patch.setattr(experiment, "cells", lambda data: small_grid)
        patch.setattr("ultr.bias.logging_policy.NETWORK_STEPS", 5)
        folder = tmp_path_factory.mktemp("worlds")
        return experiment.compare_worlds(Lab(folder, TINY, Workers(1), runs=2, data=("synthetic",), device="cpu"))


def test_every_cell_has_the_default_the_bound_and_the_logging_ranker(result):
    assert len(result.results) == 2
    for figures in result.results.values():
        assert [row["method"] for row in figures["rows"]] == [DEFAULT, experiment.BOUND, "pointwise", "pal-click"]
        assert figures["reference"] == DEFAULT
        assert len(figures["logging_ranker"]) == 2
        assert np.all(np.array(figures["logging_ranker"]) > 0)
    assert {figures["may_choose"] for figures in result.results.values()} == {True, False}
    json.dumps(result.to_json(), allow_nan=False)
    text = result.text()
    assert "first or level with it" in text
    assert all(name in text for name in ("both", "randomised"))


def cell(**means: float) -> experiment.Cell:
    noise = np.random.default_rng(0).normal(0, 0.01, 8)
    rows = [Row(entry, Setting(0.02), {"reward@10": (mean + noise * (i + 1)).tolist()})
            for i, (entry, mean) in enumerate(means.items())]  # fmt: skip
    world = replace(World("synthetic"), users="pbm")
    return experiment.Cell(world, True, Comparison(with_tests(rows, DEFAULT), ["reward@10"], DEFAULT), [0.5] * 8)


def test_a_default_that_is_below_by_chance_is_level_and_one_that_is_clearly_below_is_not():
    near = cell(**{DEFAULT: 1.0, "direct": 1.001, experiment.BOUND: 3.0})
    assert near.first == "direct"
    assert near.is_first
    far = cell(**{DEFAULT: 1.0, "direct": 1.2, "pointwise": 0.8})
    assert not far.is_first
    assert far.significantly_behind("direct")
    assert not far.significantly_behind("pointwise")
    assert far.behind("direct") == pytest.approx(0.2, abs=0.02)


def test_the_logging_ranker_and_the_spread_are_compared_over_seeds():
    found = cell(**{DEFAULT: 1.0, "pal-click": 1.0})
    assert not found.below_logged
    assert replace(found, logged=[2.0] * 8).below_logged
    assert not replace(found, logged=[0.5] * 7 + [5.0]).below_logged  # above on average, by one seed
    steep = replace(found, world=replace(found.world, eta=2.0))
    assert steep.spread("pal-click") == pytest.approx(2 * steep.spread(DEFAULT))
    assert "0.50 times" in experiment._spread([found, steep])
    assert not experiment._spread([found])


def test_differences_of_a_method_are_means_over_cells_with_counts_of_those_above_and_below():
    found = [
        cell(**{DEFAULT: 1.0, "direct": 1.2, "pointwise": 0.8}),
        cell(**{DEFAULT: 1.0, "direct": 0.995, "pointwise": 0.7}),
    ]
    text, table = experiment._methods(found).parts
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows.keys() == {"direct", "pointwise"}
    for entry, above, below in (("direct", ["1", "1"], ["1", "0"]), ("pointwise", ["0", "0"], ["2", "2"])):
        number, mean, interval, *counts, of_data = rows[entry]
        assert (number, counts) == ("2", [*above, *below])
        assert mean == of_data == f"{np.mean([each.behind(entry) for each in found]):+.2%}"
        low, high = interval.split(" to ")
        assert float(low[:-1]) < float(mean[:-1]) < float(high[:-1])
    assert "significantly" in text.text
