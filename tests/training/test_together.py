"""Runs of a comparison that are trained together give the results of runs that are trained one by one."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partialmethod

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ultr.training.tasks
import ultr.training.together
from ultr.training.compare import Plan, compare
from ultr.training.config import RunConfig, TrainingOptions, with_training
from ultr.training.entries import Entry, Setting, run_folder
from ultr.training.feed import Feed
from ultr.training.run import run_training
from ultr.training.stack import Stack
from ultr.training.tasks import RunsTask, grouped
from ultr.training.workers import _perform_safely
from ultr.utils.jsonfiles import read_json

METHODS = ["pairwise-em:loss=opt:weights=exact", "pal-click"]


def base(device: str) -> RunConfig:
    training = TrainingOptions(steps=12, batch=64, evaluate_every=4, bias_steps=30, device=device, precision="float32")
    options = {"hidden": [16, 8], "dropout": 0.2}
    return RunConfig("synthetic", users="pbm", ranker_options=options, select="reward@10", training=training)


@pytest.fixture
def as_on_a_gpu(monkeypatch, small_synthetic):
    """Let runs on the CPU be trained together, with the random numbers of a GPU."""
    monkeypatch.setattr(Feed, "__init__", partialmethod(Feed.__init__, keyed=True))

    def switch(on: bool) -> None:
        monkeypatch.setattr(ultr.training.tasks, "_on_gpu", lambda _: on)

    return switch


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))],
)
def test_runs_together_have_the_results_of_runs_one_by_one(as_on_a_gpu, device, tmp_path, monkeypatch):
    asked = []
    perform = RunsTask.perform
    monkeypatch.setattr(RunsTask, "perform", lambda self: (asked.append(self.runs), perform(self))[1])
    biases, train_biases = [], ultr.training.together._train_biases
    monkeypatch.setattr(
        ultr.training.together, "_train_biases", lambda several: (biases.append(len(several)), train_biases(several))
    )
    results = []
    for together in (False, True):
        as_on_a_gpu(together)
        out = tmp_path / f"together-{together}"
        options = {"seeds": 3, "rates": (0.01, 0.05), "limits": (), "tuning_seeds": 1}
        results.append(compare(base(device), METHODS, out, jobs=1, **options))
    assert len(asked) == 2 * len(METHODS)  # two learning rates, then three seeds
    assert set(asked) == {2, 3}
    assert biases == [4]  # of pairwise-em, for all seeds at once
    for alone, joined in zip(results[0].rows, results[1].rows, strict=True):
        assert alone.setting == joined.setting
        for metric, values in alone.results.items():
            assert joined.results[metric] == pytest.approx(values, rel=2e-3)
    for text in METHODS:
        entry = Entry.parse(text)
        setting = next(row.setting for row in results[0].rows if row.entry == text)
        runs = [run_folder(tmp_path / f"together-{together}", entry, setting, 1) for together in (False, True)]
        names = [sorted(path.relative_to(run).as_posix() for path in run.rglob("*")) for run in runs]
        assert names[0] == names[1]
        lines = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs]
        last = 12 if text.startswith("pairwise-em") else 42  # without a bias model, its steps too
        evaluated = [*range(4, last, 4), last]
        assert [line["step"] for line in lines[0]] == [line["step"] for line in lines[1]] == evaluated
        losses = [[line["loss"] for line in of_run] for of_run in lines]
        assert losses[1] == pytest.approx(losses[0], rel=1e-3)
        configs = [read_json(run / "config.json") for run in runs]
        assert configs[0] == configs[1]


def test_runs_that_stop_early_leave_the_stack(as_on_a_gpu, tmp_path, monkeypatch):
    stacks, only = [], Stack.only
    monkeypatch.setattr(Stack, "only", lambda self, numbers: (stacks.append(len(numbers)), only(self, numbers))[1])
    config = with_training(base("cpu"), patience=1, evaluate_every=2)
    options = {"seeds": 4, "rates": (0.05,), "limits": (), "jobs": 1}
    results = []
    for together in (False, True):
        as_on_a_gpu(together)
        results.append(compare(config, ["lambdarank"], tmp_path / f"{together}", **options))
    assert stacks
    assert max(stacks) < 4
    alone, joined = (result.rows[0] for result in results)
    assert alone.steps == joined.steps
    assert joined.results["reward@10"] == pytest.approx(alone.results["reward@10"], rel=2e-3)
    assert len({p.read_text().count("\n") for p in (tmp_path / "True").rglob("metrics.jsonl")}) > 1


def test_finished_and_interrupted_runs_of_a_group_are_not_trained_again(as_on_a_gpu, tmp_path):
    as_on_a_gpu(True)
    first = compare(base("cpu"), ["lambdarank"], tmp_path, seeds=2, rates=(0.05,), jobs=1)
    entry = Entry.parse("lambdarank")
    weights = run_folder(tmp_path, entry, Setting(0.05), 0) / "model" / "weights.safetensors"
    written = weights.stat().st_mtime_ns
    more = compare(base("cpu"), ["lambdarank"], tmp_path, seeds=4, rates=(0.05,), jobs=1)
    assert weights.stat().st_mtime_ns == written
    name = next(iter(first.rows[0].results))
    assert more.rows[0].results[name][:2] == first.rows[0].results[name]
    assert len(set(more.rows[0].results[name])) == 4


def test_only_runs_that_differ_in_seed_and_rate_are_grouped(as_on_a_gpu, tmp_path):
    as_on_a_gpu(True)
    plan = Plan(
        base("cpu"),
        [Entry.parse("lambdarank"), Entry.parse("pointwise"), Entry.parse("lambdarank:ranker=lightgbm")],
        tmp_path,
        seeds=13,
        rates=(0.01, 0.02),
        tuning_seeds=2,
    )
    networks, trees = plan.entries[:2], plan.entries[2]
    for entry in networks:
        assert [task.runs for task in grouped(plan.tuning_tasks(entry, 0))] == [4]
        assert [task.runs for task in grouped(replace(plan, rates=(0.01,)).final_tasks(entry))] == [12, 1]
    together = [task for entry in networks for task in plan.tuning_tasks(entry, 0)]
    assert [task.runs for task in grouped(together)] == [4, 4]
    assert [task.runs for task in grouped(plan.tuning_tasks(trees, 0))] == [1] * 4
    assert [task.runs for task in grouped(replace(plan, rates=(0.1,)).final_tasks(trees))] == [1] * 13
    as_on_a_gpu(False)
    assert [task.runs for task in grouped(together)] == [1] * 8


def test_methods_that_cannot_be_stacked_are_trained_one_by_one(as_on_a_gpu, tmp_path):
    as_on_a_gpu(True)
    result = compare(base("cpu"), ["regression-em:targets=sampled"], tmp_path / "c", seeds=2, rates=(0.05,), jobs=1)
    entry = Entry.parse("regression-em:targets=sampled")
    config = with_training(entry.config(base("cpu"), Setting(0.05), 1), steps=entry.steps(base("cpu")))
    alone = run_training(config, tmp_path / "alone")
    run = run_folder(tmp_path / "c", entry, Setting(0.05), 1)
    first, second = (load_file(folder / "model" / "weights.safetensors") for folder in (run, alone))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert np.isfinite(result.rows[0].results["ndcg@10"]).all()


def test_runs_for_which_the_gpu_has_too_little_memory_together_are_trained_one_by_one(
    as_on_a_gpu, tmp_path, monkeypatch
):
    as_on_a_gpu(True)
    plan = Plan(base("cpu"), [Entry.parse("pal-click")], tmp_path, seeds=2, rates=(0.01,))

    def too_large(*_args, **_options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ultr.training.tasks, "run_together", too_large)
    (task,) = grouped(plan.final_tasks(plan.entries[0]))
    assert task.runs == 2
    task.perform()
    assert task.finished


def test_too_little_memory_for_one_run_is_said_in_words():
    class TooLarge:
        runs, finished = 1, False

        def __str__(self) -> str:
            return "the run"

        def perform(self) -> str:
            raise torch.OutOfMemoryError("CUDA out of memory")

    assert "the run: the GPU has too little free memory" in json.loads(_perform_safely(TooLarge()))["error"]
