"""The folder of a run: it is trained next to its output, and gets its name when it is complete."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Thread

import pytest
import torch

from runs import (
    FEEDBACK,
    KNOWN,
    PLAIN,
    Killed,
    contents,
    feedback_log,
    kill,
    killed_at,
    quick,
    steps_to,
    write_feedback,
)
from ultr.errors import DataError, OptionError, OutputError
from ultr.lists import ListBatches
from ultr.log.labels import Label
from ultr.methods import MethodInputs, make_method
from ultr.rankers.model import load_model
from ultr.training.config import TrainingOptions
from ultr.training.feed import Feed
from ultr.training.folder import (
    MARK,
    append_metrics,
    current_folder,
    load_checkpoint,
    lock_run,
    partial_of,
    read_config,
    read_metrics,
    rewind_metrics,
    save_checkpoint,
    wait_for_lock,
)
from ultr.training.loop import Listeners, TrainingState, start, take_step
from ultr.training.run import run_training
from ultr.utils import files
from ultr.utils.files import REPLACED


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    return write_feedback(tmp_path_factory.mktemp("folder"), 60)


@pytest.fixture(scope="module")
def expected(log, tmp_path_factory) -> dict[str, bytes]:
    """Return the contents of the run that replaces another one in most of these tests."""
    return contents(run_training(plain(log, 2), tmp_path_factory.mktemp("expected") / "run"))


@pytest.fixture
def run(log, tmp_path) -> Path:
    return run_training(plain(log, 1), tmp_path / "run")


def plain(log: Path, seed: int, **options):
    return quick(log, seed=seed, **{**PLAIN, **options})


def names_next_to(run: Path) -> list[str]:
    return sorted(path.name for path in run.parent.iterdir())


# --- Replacing a run --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranker", ["mlp", "lightgbm"])
def test_a_killed_replacement_resumes_and_replaces_the_old_run(ranker, log, tmp_path):
    known = {"propensities": KNOWN, "select": FEEDBACK}
    old, new = (
        quick(log, ranker=ranker, seed=seed, method_options={"final": "pairs"}, **{**known, "trees.rounds": 12})
        for seed in (1, 2)
    )
    expected = contents(run_training(new, tmp_path / "expected"))
    run = run_training(old, tmp_path / "run")
    before = contents(run)
    assert before != expected
    with pytest.raises(Killed):
        run_training(new, run, overwrite=True, listeners=killed_at(8))
    assert contents(run) == before
    load_model(run)
    assert read_config(current_folder(run)).seed == 2
    steps: list[tuple[str, int]] = []
    run_training(new, run, resume=True, listeners=steps_to(steps))
    assert steps[0][1] > 4  # it did not start again
    assert contents(run) == expected
    assert names_next_to(run) == ["expected", "run"]


def test_an_error_does_not_change_the_old_run(log, run):
    before = contents(run)
    with pytest.raises(DataError, match="item ids"):
        run_training(quick(log, method_options={"theta": "items"}), run, overwrite=True)
    assert contents(run) == before
    assert names_next_to(run) == ["run"]


def test_another_replacement_starts_again(log, run, expected):
    with pytest.raises(Killed):
        run_training(plain(log, 3), run, overwrite=True, listeners=killed_at(8))
    run_training(plain(log, 2), run, overwrite=True)
    assert contents(run) == expected


def test_a_replacement_killed_at_its_very_start_or_end_is_finished_later(log, run, expected, monkeypatch):
    for place in ("ultr.training.run._train", "ultr.training.run.finish", "ultr.training.folder.take_name"):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(place, kill)
            run_training(plain(log, 2), run, resume=partial_of(run).exists(), overwrite=True)
        assert read_config(run).seed == 1
    run_training(plain(log, 2), run, resume=True)
    assert contents(run) == expected
    assert names_next_to(run) == ["run"]


@pytest.mark.parametrize("in_one_step", [True, False])
def test_what_a_kill_after_the_renaming_leaves_is_deleted_later(in_one_step, log, run, expected, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("ultr.training.folder.sync_folder", kill)
        if not in_one_step:  # other systems cannot exchange two folders
            patch.setattr(files, "_rename_at_once", lambda *_: False)
        run_training(plain(log, 2), run, overwrite=True)
    assert contents(run) == {**expected, MARK: b""}
    assert len(names_next_to(run)) == 2  # the old run
    run_training(plain(log, 2), run, resume=True)
    assert contents(run) == expected
    assert names_next_to(run) == ["run"]


def test_a_kill_between_two_renames_loses_no_run(log, run, expected):
    with pytest.raises(Killed):
        run_training(plain(log, 2), run, overwrite=True, listeners=killed_at(8))
    (run.parent / REPLACED).mkdir()
    run.rename(run.parent / REPLACED / run.name)
    run_training(plain(log, 2), run, resume=True)
    assert contents(run) == expected
    assert names_next_to(run) == ["run"]


def test_a_symbolic_link_stays(log, run, expected):
    link = run.parent / "elsewhere" / "link"
    link.parent.mkdir()
    link.symlink_to(run)
    run_training(plain(log, 2), link, overwrite=True)
    assert link.is_symlink()
    assert contents(run) == expected


def test_a_mounted_file_system_can_be_trained_on_but_not_replaced(log, run, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "is_mount", lambda self: self in (run, tmp_path / "empty"))
    with pytest.raises(OutputError, match="mounted here"):
        run_training(plain(log, 2), run, overwrite=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(Killed):
        run_training(plain(log, 2), tmp_path / "empty", overwrite=True, listeners=killed_at(8))
    run_training(plain(log, 2), tmp_path / "empty", resume=True)
    assert contents(tmp_path / "empty") == expected


# --- The output -------------------------------------------------------------------------------------------------------


def test_an_existing_run_is_an_error_or_resumed_or_replaced(log, run, expected):
    before = contents(run)
    with pytest.raises(OutputError) as raised:
        run_training(plain(log, 1), run)
    assert "--resume or --overwrite" in raised.value.hint
    steps: list[tuple[str, int]] = []
    run_training(plain(log, 1, device="auto"), run, resume=True, listeners=steps_to(steps))  # it is finished
    assert steps == []
    assert contents(run) == before
    run_training(plain(log, 2), run, overwrite=True)
    assert contents(run) == expected


def test_an_unfinished_run_is_an_error_or_resumed_or_replaced(log, expected, tmp_path):
    run = tmp_path / "run"
    for seed in (1, 2):
        with pytest.raises(Killed):
            run_training(plain(log, seed), run, overwrite=seed == 2, listeners=killed_at(8))
        with pytest.raises(OutputError) as raised:
            run_training(plain(log, 2), run)
        assert "--resume to continue" in raised.value.hint
        assert current_folder(run) == partial_of(run) == tmp_path / "run.partial"
    assert run_training(plain(log, 2), run, resume=True) == run
    assert contents(run) == expected
    assert names_next_to(run) == ["run"]


def test_folders_that_are_not_runs_are_kept(log, tmp_path):
    (tmp_path / "notes.txt").write_text("of someone else")
    with pytest.raises(OutputError, match="not a run"):
        run_training(plain(log, 1), tmp_path, overwrite=True)
    (tmp_path / "run" / "model").mkdir(parents=True)
    with pytest.raises(OutputError, match="not a run"):
        run_training(plain(log, 1), tmp_path / "run", resume=True)
    assert names_next_to(tmp_path / "run") == ["notes.txt", "run"]


def test_a_mounted_folder_with_files_of_others_is_never_changed(log, tmp_path, monkeypatch):
    """A run is trained in a mounted folder itself, as it cannot be renamed: what is there must stay."""
    (tmp_path / "mounted" / "etc").mkdir(parents=True)
    (tmp_path / "mounted" / "etc" / "hosts").write_text("of someone else")
    monkeypatch.setattr(Path, "is_mount", lambda self: self == tmp_path / "mounted")
    for how in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(OutputError):
            run_training(plain(log, 1), tmp_path / "mounted", **how)
        assert (tmp_path / "mounted" / "etc" / "hosts").read_text() == "of someone else"


def test_a_run_is_not_resumed_with_other_options(log, run):
    """Also after its end: the caller would take the old run for one with the new options."""
    other = plain(f"{log}2", 9, label="click", lr=0.5)
    with pytest.raises(OptionError) as raised:
        run_training(other, run, resume=True)
    for text in (
        "data.source",
        "label (click; the run has none)",
        "network.lr (0.5; the run has 0.02)",
        "training.seed (9; the run has 1)",
    ):
        assert text in raised.value.what
    few = plain(log, 1).with_options(label="click")
    with pytest.raises(OptionError, match="label"):
        run_training(few, run, resume=True, all_options=False)
    whole = run_training(plain(log, 1, label="click"), run.parent / "whole")
    run_training(plain(log, 1), run, resume=True, all_options=False)  # unset options are those of the run
    assert read_config(whole).label == "click"
    assert run_training(plain(log, 1), whole, resume=True, all_options=False) == whole


# --- Locks ------------------------------------------------------------------------------------------------------------


def test_no_other_process_can_train_there_at_the_same_time(log, run, expected):
    tried = []

    def try_too(progress) -> None:
        for options in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(OutputError, match="another process") as raised:
                run_training(plain(log, 2), run, **options)
            tried.append(raised.value.got)

    run_training(plain(log, 2), run, overwrite=True, listeners=Listeners(on_progress=try_too))
    assert len(tried) == 6
    assert all(holder.startswith("process ") for holder in tried)
    assert contents(run) == expected
    with lock_run(run):
        pass


def test_a_run_that_another_process_has_finished_meanwhile_is_not_trained_again(log, tmp_path, monkeypatch):
    import ultr.training.run as module

    run, load, steps = tmp_path / "run", module.load_run_data, []

    def finished_first(*args, **options):
        monkeypatch.setattr(module, "load_run_data", load)
        run_training(plain(log, 1), run)
        return load(*args, **options)

    monkeypatch.setattr(module, "load_run_data", finished_first)
    run_training(plain(log, 1), run, resume=True, listeners=steps_to(steps))
    assert steps == []
    assert names_next_to(run) == ["run"]


def test_a_shared_path_is_waited_for(tmp_path):
    done = []

    def work() -> None:
        with wait_for_lock(tmp_path / "shared"):
            done.append("second")

    with wait_for_lock(tmp_path / "shared"):
        other = Thread(target=work)
        other.start()
        other.join(0.1)
        done.append("first")
    other.join()
    assert done == ["first", "second"]


# --- Checkpoints and metrics ------------------------------------------------------------------------------------------


def new_state(seed: int, options: TrainingOptions) -> TrainingState:
    torch.manual_seed(seed)
    inputs = MethodInputs(Label(), features=3, positions=tuple(range(1, 13)), ranker_options={"hidden": (8,)})
    return start(make_method("lambdarank", inputs), feedback_log(), options)


def trained(state: TrainingState, steps: int, options: TrainingOptions) -> TrainingState:
    feed = Feed(ListBatches(feedback_log()), batch=8, seed=0)
    while state.step < steps:
        take_step(state, feed(state.step), options)
    state.best_weights = {name: tensor.clone() for name, tensor in state.method.state_dict().items()}
    return state


def assert_same_weights(one: TrainingState, other: TrainingState) -> None:
    for a, b in zip(one.method.state_dict().values(), other.method.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_a_checkpoint_brings_back_every_bit(optimizer, tmp_path):
    options = TrainingOptions(optimizer=optimizer, device="cpu", batch=8)
    save_checkpoint(tmp_path, trained(new_state(0, options), 7, options))
    resumed = new_state(99, options)
    assert load_checkpoint(tmp_path, resumed)
    assert resumed.step == 7
    assert_same_weights(trained(resumed, 12, options), trained(new_state(0, options), 12, options))


def test_the_newest_checkpoint_that_is_not_damaged_is_loaded(tmp_path):
    options = TrainingOptions(device="cpu", batch=8)
    state = new_state(0, options)
    assert not load_checkpoint(tmp_path, state)
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, trained(state, step, options))
    folders = sorted((tmp_path / "checkpoints").iterdir())
    assert [folder.name for folder in folders] == ["step-000002", "step-000003"]  # older ones are deleted
    (folders[1] / "state.safetensors").write_bytes(b"damaged")
    resumed = new_state(99, options)
    with pytest.warns(UserWarning, match="resuming from step-000002"):
        assert load_checkpoint(tmp_path, resumed)
    assert_same_weights(resumed, trained(new_state(0, options), 2, options))
    (folders[0] / "meta.json").write_text("{")
    with pytest.raises(DataError):
        load_checkpoint(tmp_path, resumed)


def test_metrics_are_read_back_without_an_incomplete_last_line(tmp_path):
    lines = [{"ranker": "mlp", "step": step, "loss": None} for step in (1, 2)]
    assert read_metrics(tmp_path) == []
    for line in lines:
        append_metrics(tmp_path, line)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3')
    assert read_metrics(tmp_path) == lines
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1}) + '\n{"step": }\n{"step": 2}\n')
    with pytest.raises(DataError, match="a line cannot be read"):
        read_metrics(tmp_path)


def test_metrics_are_rewound_for_each_ranker_alone(tmp_path):
    for ranker in ("mlp", "lightgbm"):
        for step in (1, 2, 3):
            append_metrics(tmp_path, {"ranker": ranker, "step": step})
    rewind_metrics(tmp_path, "lightgbm", 1)
    assert [(line["ranker"], line["step"]) for line in read_metrics(tmp_path)] == [
        *(("mlp", step) for step in (1, 2, 3)),
        ("lightgbm", 1),
    ]
