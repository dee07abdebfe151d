"""The experiment on what decides where the printed loss stands."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from ultr.datasets.synthetic import make_synthetic
from ultr.experiments import lab as labs
from ultr.experiments import tables as experiment
from ultr.experiments.lab import QUICK, Lab
from ultr.experiments.paper import DEFAULT
from ultr.methods import METHODS
from ultr.training.comparing.tasks import Workers
from ultr.training.folder import read_config, read_metrics

pytestmark = pytest.mark.long  # one fixture trains 40 runs
TINY = replace(QUICK, hidden=(4,), bias_steps=4, evaluate_every=2, sessions=300, tuning_runs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("settling")


@pytest.fixture(scope="module")
def result(folder):
    small = make_synthetic(requests=(60, 10, 10))
    with pytest.MonkeyPatch.context() as patch:
        for module in ("data", "comparing.tasks"):
            patch.setattr(f"ultr.training.{module}.cached_dataset", lambda name, data_dir: small)
        patch.setattr(labs, "load_dataset", lambda name, data_dir=None: small)
        patch.setattr(experiment, "QUICK_STEPS", (2, 4))
        patch.setattr(experiment, "QUICK_TOTAL", 8)
        return experiment.settle(Lab(folder, TINY, Workers(1), runs=2, data=("synthetic",), device="cpu"))


def test_the_best_cell_of_each_source_by_validation_is_tested(result):
    (figures,) = result.results.values()
    cells = figures["validation"]
    assert set(cells) == {f"{s} dcg {limit}" for s in ("oracle", "staged", "joint") for limit in ("3", "10")}
    tested = [row["method"] for row in figures["test"]["rows"]]
    assert tested[0] == figures["test"]["reference"] == DEFAULT
    for place, source in enumerate(("oracle", "staged", "joint"), start=1):
        best = max((cell for cell in cells if cell.startswith(source)), key=lambda cell: np.max(cells[cell]))
        assert tested[place] == f"pairwise-em:loss=opt:em={source}:delta=dcg:max_weight={best.split()[-1]}"
    assert tested[4:] == [row.entry for row in experiment.OTHERS[1:]]
    json.dumps(result.to_json(), allow_nan=False)


def test_courses_are_means_over_runs_of_the_best_evaluation_so_far(result, folder):
    (figures,) = result.results.values()
    course = np.array(figures["validation"]["joint dcg 3"])
    assert course.shape == (2, 4)  # rates, evaluations of eight steps
    (cell,) = folder.rglob("pairwise-em_loss=opt_em=joint_delta=dcg_max_weight=3")
    for lr, line in zip(experiment.RATES, course, strict=True):
        runs = [read_metrics(cell / f"lr-{lr:g}" / f"seed-{seed}") for seed in (1000, 1001)]
        expected = np.mean([np.maximum.accumulate([each["reward@10"] for each in run]) for run in runs], axis=0)
        np.testing.assert_allclose(line, expected)
    table = result.sections[0].parts[0]
    (row,) = [row for row in table.rows if row[:3] == ["joint EM", "Delta DCG", "3"]]
    assert [float(cell) for cell in row[3:]] == pytest.approx(
        [course[:, 0].max(), course[:, :2].max(), course.max()], abs=5e-5
    )


def test_all_take_as_many_steps_with_their_bias_model(result, folder):
    seen = set()
    for path in folder.rglob("config.json"):
        method = read_config(path.parent).method
        staged = METHODS[method.name].has_bias_stage(method.options)
        seen.add((method.name, staged))
        assert read_metrics(path.parent)[-1]["step"] == (4 if staged else 8)
    assert seen == {("pairwise-em", True), ("pairwise-em", False), ("pal-click", False)}
