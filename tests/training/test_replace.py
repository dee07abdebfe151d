"""A run that replaces another: the old run can be used until the new one is complete."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from conftest import make_shown_log
from ultr.datasets.simulate import simulate_log
from ultr.datasets.users import User
from ultr.errors import DataError, OutputError
from ultr.log import write_log
from ultr.rankers.model import load_model
from ultr.training.checkpoints import lock_run
from ultr.training.config import TREE_TRAINING, RunConfig, TrainingOptions
from ultr.training.replace import MARK, begin_successor, successor, take_place
from ultr.training.run import run_training
from ultr.utils import files
from ultr.utils.files import REPLACED

SMALL = {"steps": 8, "bias_steps": 3, "batch": 16, "evaluate_every": 2, "device": "cpu"}


class StoppedError(Exception):
    pass


def stop(progress) -> None:
    if progress.step == 4:
        raise StoppedError


@pytest.fixture
def log_path(tmp_path):
    log, _ = simulate_log(make_shown_log(requests=60), User())
    write_log(replace(log, relevance=None), tmp_path / "log.parquet")
    return tmp_path / "log.parquet"


def config(path: Path, seed: int, *, ranker: str = "mlp", **changes) -> RunConfig:
    default, ranker_options = (TrainingOptions(), {"hidden": [8]}) if ranker == "mlp" else (TREE_TRAINING, {})
    training = replace(default, **SMALL, patience=0, seed=seed)
    options = {"propensities": {str(at): 1 / at for at in range(1, 20)}, "select": "feedback-ndcg@10", **changes}
    return RunConfig(data=str(path), ranker=ranker, ranker_options=ranker_options, training=training, **options)


def contents(run: Path) -> dict[str, bytes]:
    files = (p for p in run.rglob("*") if p.is_file() and p.name != ".lock")
    return {p.relative_to(run).as_posix(): p.read_bytes() for p in files}


def hidden_files_next_to(run: Path) -> list[str]:
    return [p.name for p in run.parent.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("ranker", ["mlp", "lightgbm"])
def test_a_stopped_replacement_resumes_and_replaces_the_old_run(ranker, log_path, tmp_path):
    old, new = config(log_path, 1, ranker=ranker), config(log_path, 2, ranker=ranker)
    expected = contents(run_training(new, tmp_path / "expected"))
    run = run_training(old, tmp_path / "run")
    before = contents(run)
    assert before != expected
    with pytest.raises(StoppedError):
        run_training(new, run, overwrite=True, checkpoint_seconds=0, on_progress=stop)
    assert contents(run) == before
    load_model(run)
    steps = []
    run_training(new, run, resume=True, on_progress=lambda progress: steps.append(progress.step))
    assert steps[0] > 2  # it did not start again
    assert contents(run) == expected
    assert hidden_files_next_to(run) == []


def test_an_error_does_not_change_the_old_run(log_path, tmp_path):
    run = run_training(config(log_path, 1), tmp_path / "run")
    before = contents(run)
    with pytest.raises(DataError, match="item ids"):
        run_training(config(log_path, 2, propensities=None, method_options={"theta": "items"}), run, overwrite=True)
    assert contents(run) == before
    assert hidden_files_next_to(run) == []


def test_a_second_replacement_starts_again(log_path, tmp_path):
    run = run_training(config(log_path, 1), tmp_path / "run")
    with pytest.raises(StoppedError):
        run_training(config(log_path, 2), run, overwrite=True, checkpoint_seconds=0, on_progress=stop)
    run_training(config(log_path, 3), run, overwrite=True)
    assert contents(run) == contents(run_training(config(log_path, 3), tmp_path / "expected"))


def test_no_other_process_can_train_there_at_the_same_time(log_path, tmp_path):
    run = run_training(config(log_path, 1), tmp_path / "run")

    def try_too(_progress) -> None:
        for options in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(OutputError, match="another process"):
                run_training(config(log_path, 2), run, **options)

    run_training(config(log_path, 2), run, overwrite=True, on_progress=try_too)
    assert contents(run) == contents(run_training(config(log_path, 2), tmp_path / "expected"))
    with lock_run(run):
        pass


@pytest.mark.parametrize("in_one_step", [True, False])
def test_a_replacement_killed_at_its_very_end_is_finished_later(in_one_step, log_path, tmp_path, monkeypatch):
    run, new = run_training(config(log_path, 1), tmp_path / "run"), config(log_path, 2)
    expected = contents(run_training(new, tmp_path / "expected"))
    if not in_one_step:  # other systems cannot exchange two folders
        monkeypatch.setattr(files, "_rename_at_once", lambda *_: False)
    monkeypatch.setattr("ultr.training.replace.settle", lambda _: (_ for _ in ()).throw(StoppedError))
    with pytest.raises(StoppedError):
        run_training(new, run, overwrite=True)
    monkeypatch.undo()
    assert contents(run) == {**expected, MARK: b""}
    assert hidden_files_next_to(run) != []
    run_training(new, run, resume=True)
    assert contents(run) == expected
    assert hidden_files_next_to(run) == []


def test_a_kill_between_two_renames_loses_no_run(log_path, tmp_path):
    run, new = run_training(config(log_path, 1), tmp_path / "run"), config(log_path, 2)
    with pytest.raises(StoppedError):
        run_training(new, run, overwrite=True, checkpoint_seconds=0, on_progress=stop)
    place = successor(run)
    (place.parent / REPLACED).mkdir()
    run.rename(place.parent / REPLACED / run.name)
    run_training(new, run, resume=True)
    assert contents(run) == contents(run_training(new, tmp_path / "expected"))
    assert hidden_files_next_to(run) == []


def test_a_symbolic_link_stays(log_path, tmp_path):
    run = run_training(config(log_path, 1), tmp_path / "elsewhere" / "run")
    (tmp_path / "link").symlink_to(run)
    run_training(config(log_path, 2), tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert contents(run) == contents(run_training(config(log_path, 2), tmp_path / "expected"))


def test_a_mounted_file_system_is_an_error_before_training(log_path, tmp_path, monkeypatch):
    run = run_training(config(log_path, 1), tmp_path / "run")
    monkeypatch.setattr(Path, "is_mount", lambda self: self == run)
    with pytest.raises(OutputError, match="mounted here"):
        run_training(config(log_path, 2), run, overwrite=True)


def test_a_successor_replaces_the_run(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "old").touch()
    begin_successor(run)
    (successor(run) / "new").touch()
    take_place(run)
    assert [p.name for p in run.iterdir()] == ["new"]
    assert hidden_files_next_to(run) == []
