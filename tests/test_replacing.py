"""A run that replaces another: the old one can be used until the new one is complete, whatever happens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from conftest import make_shown_log
from ultr import files
from ultr.checkpoint import locked
from ultr.errors import DataError, OutputError
from ultr.files import REPLACED
from ultr.log import write_log
from ultr.models import load_model
from ultr.preparing import RunConfig
from ultr.replacing import MARK, begin_successor, successor, take_place
from ultr.runs import run_training
from ultr.simulate import User, simulate_log
from ultr.training import TREE_TRAINING, TrainingOptions

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
    usual, options = (TrainingOptions(), {"hidden": [8]}) if ranker == "mlp" else (TREE_TRAINING, {})
    training = replace(usual, **SMALL, patience=0, seed=seed)
    given = {"propensities": {str(at): 1 / at for at in range(1, 20)}, "select": "feedback-ndcg@10", **changes}
    return RunConfig(data=str(path), ranker=ranker, ranker_options=options, training=training, **given)


def contents(run: Path) -> dict[str, bytes]:
    found = {p.relative_to(run).as_posix(): p.read_bytes() for p in run.rglob("*") if p.is_file()}
    return {name: held for name, held in found.items() if name != ".lock"}


def left_beside(run: Path) -> list[str]:
    return [p.name for p in run.parent.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("ranker", ["mlp", "lightgbm"])
def test_it_goes_on_where_it_was_stopped_and_then_takes_the_place_of_the_old(ranker, log_path, tmp_path):
    old, new = config(log_path, 1, ranker=ranker), config(log_path, 2, ranker=ranker)
    expected = contents(run_training(new, tmp_path / "expected"))
    run = run_training(old, tmp_path / "run")
    before = contents(run)
    assert before != expected
    with pytest.raises(StoppedError):
        run_training(new, run, overwrite=True, checkpoint_seconds=0, on_progress=stop)
    assert contents(run) == before
    load_model(run)
    heard = []
    run_training(old, run, resume=True, on_progress=lambda progress: heard.append(progress.step))
    assert heard[0] > 2  # it did not begin again
    assert contents(run) == expected
    assert left_beside(run) == []


def test_what_is_refused_leaves_the_old_as_it_was(log_path, tmp_path):
    run = run_training(config(log_path, 1), tmp_path / "run")
    before = contents(run)
    with pytest.raises(DataError, match="item ids"):
        run_training(config(log_path, 2, propensities=None, method_options={"theta": "items"}), run, overwrite=True)
    assert contents(run) == before
    assert left_beside(run) == []


def test_another_attempt_begins_anew(log_path, tmp_path):
    run = run_training(config(log_path, 1), tmp_path / "run")
    with pytest.raises(StoppedError):
        run_training(config(log_path, 2), run, overwrite=True, checkpoint_seconds=0, on_progress=stop)
    run_training(config(log_path, 3), run, overwrite=True)
    assert contents(run) == contents(run_training(config(log_path, 3), tmp_path / "expected"))


def test_while_it_is_trained_no_other_process_trains_there(log_path, tmp_path):
    run = run_training(config(log_path, 1), tmp_path / "run")

    def try_too(_progress) -> None:
        for asked in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(OutputError, match="another process"):
                run_training(config(log_path, 3), run, **asked)

    run_training(config(log_path, 2), run, overwrite=True, on_progress=try_too)
    assert contents(run) == contents(run_training(config(log_path, 2), tmp_path / "expected"))
    with locked(run):
        pass


@pytest.mark.parametrize("in_one_step", [True, False])
def test_a_kill_at_the_very_end_is_cleared_up(in_one_step, log_path, tmp_path, monkeypatch):
    run, new = run_training(config(log_path, 1), tmp_path / "run"), config(log_path, 2)
    expected = contents(run_training(new, tmp_path / "expected"))
    if not in_one_step:  # other systems cannot exchange two folders
        monkeypatch.setattr(files, "_rename_at_once", lambda *_: False)
    monkeypatch.setattr("ultr.replacing.settle", lambda _: (_ for _ in ()).throw(StoppedError))
    with pytest.raises(StoppedError):
        run_training(new, run, overwrite=True)
    monkeypatch.undo()
    assert contents(run) == {**expected, MARK: b""}
    assert left_beside(run) != []
    run_training(new, run, resume=True)
    assert contents(run) == expected
    assert left_beside(run) == []


def test_where_folders_cannot_be_exchanged_a_kill_between_two_renamings_loses_neither(log_path, tmp_path):
    run, new = run_training(config(log_path, 1), tmp_path / "run"), config(log_path, 2)
    with pytest.raises(StoppedError):
        run_training(new, run, overwrite=True, checkpoint_seconds=0, on_progress=stop)
    place = successor(run)
    (place.parent / REPLACED).mkdir()
    run.rename(place.parent / REPLACED / run.name)
    run_training(new, run, resume=True)
    assert contents(run) == contents(run_training(new, tmp_path / "expected"))
    assert left_beside(run) == []


def test_a_link_goes_on_pointing_where_it_does(log_path, tmp_path):
    run = run_training(config(log_path, 1), tmp_path / "elsewhere" / "run")
    (tmp_path / "link").symlink_to(run)
    run_training(config(log_path, 2), tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert contents(run) == contents(run_training(config(log_path, 2), tmp_path / "expected"))


def test_a_mounted_file_system_is_refused_before_anything_is_trained(log_path, tmp_path, monkeypatch):
    run = run_training(config(log_path, 1), tmp_path / "run")
    monkeypatch.setattr(Path, "is_mount", lambda self: self == run)
    with pytest.raises(OutputError, match="mounted here"):
        run_training(config(log_path, 2), run, overwrite=True)


def test_a_place_is_taken_by_what_was_made_for_it(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "old").touch()
    begin_successor(run)
    (successor(run) / "new").touch()
    take_place(run)
    assert [p.name for p in run.iterdir()] == ["new"]
    assert left_beside(run) == []
