"""Runs that are trained together give the results of runs that are trained one by one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch

from runs import Killed, files_of, kill, killed_at, quick, weights
from ultr.training import together
from ultr.training.comparing import tasks
from ultr.training.comparing.tasks import RunsTask, RunTask, _perform_safely, grouped
from ultr.training.config import Config
from ultr.training.feed import Feed
from ultr.training.folder import read_config, read_metrics
from ultr.training.outcome import value_of_run
from ultr.training.run import run_training
from ultr.training.together import Stack, run_together

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch, small_synthetic):
    """Give runs on the CPU the random numbers of a GPU."""
    monkeypatch.setattr(Feed, "__init__", partialmethod(Feed.__init__, keyed=True))


def config(seed: int, **options: Any) -> Config:
    common = {"users": "pbm", "select": "reward@10", "hidden": (16, 8), "dropout": 0.2, "bias_steps": 30, "batch": 64}
    common |= {"device": DEVICE, "precision": "float32", "seed": seed}
    return quick("synthetic", **common).with_options(**options)


def alone(configs: Sequence[Config], folder: Path) -> list[Path]:
    outs = [folder / "alone" / str(number) for number in range(len(configs))]
    return [run_training(each, out) for each, out in zip(configs, outs, strict=True)]


def in_a_stack(configs: Sequence[Config], folder: Path, **options: Any) -> list[Path]:
    outs = [folder / "together" / str(number) for number in range(len(configs))]
    run_together(configs, outs, folder / "shared", **options)
    return outs


def assert_same_results(one: Path, other: Path) -> None:
    assert files_of(one) == files_of(other)
    assert read_config(one) == read_config(other)
    lines = [read_metrics(run) for run in (one, other)]
    assert [line["step"] for line in lines[0]] == [line["step"] for line in lines[1]]
    assert [line["loss"] for line in lines[1]] == pytest.approx([line["loss"] for line in lines[0]], rel=1e-3)
    assert value_of_run(other)[1] == pytest.approx(value_of_run(one)[1], rel=2e-3)


@pytest.mark.parametrize(
    ("method", "options", "biases"),
    [("pairwise-em", {"loss": "opt", "weights": "exact"}, [3]), ("pal-click", {}, [])],
)
def test_runs_together_have_the_results_of_runs_one_by_one(method, options, biases, tmp_path, monkeypatch):
    fitted, train_biases = [], together._train_biases
    monkeypatch.setattr(
        together, "_train_biases", lambda several: (fitted.append(len(several)), train_biases(several))[1]
    )
    configs = [
        config(seed, method=method, method_options=options, lr=lr) for seed, lr in ((0, 0.01), (0, 0.05), (1, 0.05))
    ]
    later = [config(seed, method=method, method_options=options) for seed in range(3)]
    runs = in_a_stack(configs, tmp_path, later=later)
    assert fitted == biases  # for all seeds at once, also those of later runs
    for one, other in zip(alone(configs, tmp_path), runs, strict=True):
        assert_same_results(one, other)
    assert {path.name for path in (tmp_path / "together").iterdir()} == {"0", "1", "2"}


def test_runs_that_stop_early_leave_the_stack(tmp_path, monkeypatch):
    stacks, only = [], Stack.only
    monkeypatch.setattr(Stack, "only", lambda self, numbers: (stacks.append(len(numbers)), only(self, numbers))[1])
    configs = [config(seed, method="lambdarank", lr=0.05, patience=1, evaluate_every=2) for seed in range(4)]
    runs = in_a_stack(configs, tmp_path)
    assert stacks
    assert max(stacks) < 4
    assert len({len(read_metrics(run)) for run in runs}) > 1
    for one, other in zip(alone(configs, tmp_path), runs, strict=True):
        assert_same_results(one, other)


def test_finished_runs_are_not_trained_again(tmp_path, monkeypatch):
    configs = [config(seed, method="lambdarank") for seed in range(4)]
    first = in_a_stack(configs[:2], tmp_path)
    written = [(run / "model" / "weights.safetensors").stat().st_mtime_ns for run in first]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(together, "train_together", kill)
        in_a_stack(configs, tmp_path)
    runs = in_a_stack(configs, tmp_path)
    assert [(run / "model" / "weights.safetensors").stat().st_mtime_ns for run in first] == written
    assert len({value_of_run(run)[1] for run in runs}) == 4


def test_a_run_killed_before_it_has_its_name_gets_it(tmp_path, monkeypatch):
    configs = [config(seed, method="lambdarank") for seed in range(3)]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("ultr.training.folder.take_name", kill)
        run_training(configs[0], tmp_path / "together" / "0")
    in_a_stack(configs, tmp_path)
    assert {path.name for path in (tmp_path / "together").iterdir()} == {"0", "1", "2"}


@pytest.mark.parametrize("how", ["draws", "checkpoints", "two rankers"])
def test_runs_that_cannot_be_stacked_are_trained_one_by_one(how, tmp_path, monkeypatch):
    options: dict[str, Any] = {"method": "lambdarank"}
    if how == "draws":
        options = {"method": "regression-em", "method_options": {"targets": "sampled"}}
    if how == "two rankers":
        options = {"method": "pointwise", "ranker": "mlp,lightgbm", "sessions": 100, "select": "ndcg@10"}
    configs = [config(seed, **options) for seed in range(2)]
    if how == "checkpoints":
        with pytest.raises(Killed):
            run_training(configs[0], tmp_path / "together" / "0", listeners=killed_at(8))
    monkeypatch.setattr(together, "train_together", kill)
    for one, other in zip(alone(configs, tmp_path), in_a_stack(configs, tmp_path), strict=True):
        assert value_of_run(one) == value_of_run(other)
        if how != "two rankers":
            assert all(torch.equal(weights(one)[name], tensor) for name, tensor in weights(other).items())


# --- Groups of a comparison -------------------------------------------------------------------------------------------


def task(folder: Path, number: int, chosen: Config) -> RunTask:
    return RunTask(chosen, folder / str(number), folder / "shared", ())


def test_only_networks_on_a_gpu_that_differ_in_seed_and_rate_are_grouped(tmp_path, monkeypatch):
    def sizes(configs: Sequence[Config]) -> list[int]:
        return [each.runs for each in grouped([task(tmp_path, n, each) for n, each in enumerate(configs)])]

    pairs = [(seed, lr) for seed in range(2) for lr in (0.01, 0.02)]
    networks = [config(seed, method=name, lr=lr) for name in ("lambdarank", "pointwise") for seed, lr in pairs]
    monkeypatch.setattr(tasks, "_on_gpu", lambda _: True)
    assert sizes(networks) == [4, 4]
    assert sizes([config(seed, method="lambdarank") for seed in range(13)]) == [12, 1]
    assert sizes([config(seed, ranker="lightgbm", method="lambdarank") for seed in range(3)]) == [1] * 3
    assert sizes([config(seed, ranker="mlp,lightgbm") for seed in range(3)]) == [1] * 3
    monkeypatch.setattr(tasks, "_on_gpu", lambda _: False)
    assert sizes(networks) == [1] * 8


def test_runs_for_which_the_gpu_has_too_little_memory_together_are_trained_one_by_one(tmp_path, monkeypatch):
    def too_large(*_args: object, **_options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(tasks, "run_together", too_large)
    group = RunsTask(tuple(task(tmp_path, seed, config(seed, method="pal-click")) for seed in range(2)))
    group.perform()
    assert group.finished


def test_too_little_memory_for_one_run_is_an_error_with_advice():
    class TooLarge:
        runs, finished = 1, False

        def __str__(self) -> str:
            return "the run"

        def perform(self) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    assert "--jobs" in str(_perform_safely(TooLarge()))
