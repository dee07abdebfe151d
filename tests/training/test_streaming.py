"""Runs on prepared lists: streamed or in memory, stopped and resumed, with weights and segments."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

import ultr.log.readers
import ultr.training.data
from conftest import some_always
from lists_folder import write_lists
from runs import FEEDBACK, KNOWN, Killed, feedback_log, killed_at, quick, weights
from ultr.errors import DataError, LabelError, OptionError
from ultr.lists import Lists
from ultr.log import read_log, write_log
from ultr.log.labels import Label
from ultr.log.shards import MANIFEST, Manifest, Shards
from ultr.methods import METHODS, MethodInputs, make_method
from ultr.rankers.model import load_model
from ultr.training.config import Config, TrainingOptions
from ultr.training.data import Decisions, load_run_data
from ultr.training.feed import Feed
from ultr.training.folder import read_config, read_metrics
from ultr.training.run import run_training
from ultr.training.stream import Stream
from ultr.utils.jsonfiles import read_json

LOOP = {"steps": 12, "bias_steps": 10, "batch": 16, "device": "cpu"}


@pytest.fixture
def lists(tmp_path) -> Path:
    return write_lists(feedback_log(100), tmp_path / "lists", group=8)


def config(path: Path, **options) -> Config:
    return quick(path, **{"propensities": KNOWN, "dropout": 0.2, **options})


def streamed(run: Path) -> bool:
    return Decisions.load(run).streamed


def assert_same_bits(run: Path, other: Path) -> None:
    one, two = weights(run), weights(other)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert read_metrics(run) == read_metrics(other)


@pytest.mark.parametrize("stream", ["yes", "no"])
def test_a_run_on_lists_can_be_repeated(stream, lists, tmp_path):
    run = run_training(config(lists, stream=stream), tmp_path / "run")
    assert [line["step"] for line in read_metrics(run)] == [0, 4, 8, 12]
    assert streamed(run) == (stream == "yes")
    log = read_log(lists / "validation")
    assert np.isfinite(load_model(run).score(log)).all()
    assert_same_bits(run, run_training(config(lists, stream=stream), tmp_path / "again"))


@pytest.mark.parametrize(("memory", "choice"), [(1 << 40, "no"), (1000, "yes")])
def test_lists_that_do_not_fit_in_memory_are_streamed_also_when_resumed(memory, choice, lists, tmp_path, monkeypatch):
    monkeypatch.setattr(ultr.training.data, "available_memory", lambda: memory)
    run = run_training(config(lists), tmp_path / "auto")
    assert streamed(run) == (choice == "yes")
    with pytest.raises(Killed):
        run_training(config(lists), tmp_path / "again", listeners=killed_at(4))
    other = (1 << 40) + 1000 - memory
    monkeypatch.setattr(ultr.training.data, "available_memory", lambda: other)
    assert_same_bits(run_training(read_config(run), tmp_path / "again", resume=True), run)


def test_the_lists_of_all_processes_of_a_machine_may_take_half_of_the_memory(lists, monkeypatch):
    shards = Shards(lists)
    needed = shards.rows * shards.row_bytes
    for processes, memory, streamed in [(1, 2 * needed + 2, False), (1, 2 * needed, True), (4, 7 * needed, True)]:
        monkeypatch.setattr(ultr.training.data, "available_memory", lambda memory=memory: memory)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        assert (load_run_data(config(lists)).stream is not None) is streamed


def test_the_feed_is_a_stream_if_lists_are_streamed(lists):
    for choice, kind in {"yes": Stream, "no": Feed}.items():
        run_data = load_run_data(config(lists, stream=choice))
        assert isinstance(run_data.feed(TrainingOptions(**LOOP)), kind)
        assert run_data.positions == Manifest.load(lists).positions
        assert run_data.binary == ("click",)


def test_a_sample_is_read_if_lists_are_streamed(lists, monkeypatch):
    monkeypatch.setattr(ultr.training.data, "PART_SAMPLE_ROWS", 100)
    whole = Shards(lists)
    sample = load_run_data(config(lists, stream="yes")).train
    assert 100 <= sample.rows < whole.rows
    assert load_run_data(config(lists, stream="no")).train.rows == whole.rows


@pytest.mark.parametrize("method", some_always(METHODS, ("pairwise-em", "direct", "dla", "lambdarank", "affine")))
def test_every_method_learns_from_a_stream(method, lists, tmp_path):
    small = {"steps": 4, "bias_steps": 3, "evaluate_every": 2, "select": FEEDBACK}
    known = None if method == "affine" else KNOWN  # affine does not use propensities
    run = run_training(config(lists, method=method, stream="yes", propensities=known, **small), tmp_path / "run")
    assert [line["step"] for line in read_metrics(run) if line["step"]] == [2, 4]


@pytest.mark.parametrize("stream", ["yes", "no"])
def test_a_stopped_run_resumes_to_the_same_bits(stream, lists, tmp_path, monkeypatch):
    whole = run_training(config(lists, stream=stream), tmp_path / "whole")
    with pytest.raises(Killed):
        run_training(config(lists, stream=stream), tmp_path / "stopped", listeners=killed_at(8))
    assert not (tmp_path / "stopped").exists()
    monkeypatch.setattr(ultr.training.data, "available_memory", lambda: 1 << 40)
    stopped = run_training(config(lists), tmp_path / "stopped", resume=True, all_options=False)  # it keeps its option
    assert streamed(stopped) == (stream == "yes")
    assert_same_bits(stopped, whole)


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from training.test_streaming import config
from ultr.training.loop import Listeners
from ultr.training.run import run_training

def stop(progress):
    if progress.step == 8:
        os.kill(os.getpid(), signal.SIGKILL)

listeners = Listeners(on_progress=stop, checkpoint_seconds=0)
run_training(config(Path(sys.argv[1]), stream="yes"), Path(sys.argv[2]), listeners=listeners)
"""


def test_a_killed_streaming_run_resumes_to_the_same_bits(lists, tmp_path):
    """Kill the run while its threads read."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    command = [sys.executable, "-c", KILLED, str(lists), str(killed)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == -9, done.stderr
    run_training(config(lists), killed, resume=True, all_options=False)
    assert_same_bits(killed, run_training(config(lists, stream="yes"), whole))


def test_only_prepared_lists_are_streamed(tmp_path):
    write_log(feedback_log(30), tmp_path / "log.parquet")
    with pytest.raises(OptionError, match=r"only prepared lists can be streamed.*ultr prepare"):
        run_training(config(tmp_path / "log.parquet", stream="yes"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("stream", ["yes", "no"])
def test_lists_without_a_required_split_are_errors(stream, lists, tmp_path):
    about = Manifest.load(lists)
    replace(about, splits={"train": about.splits["train"]}).save(lists)
    with pytest.raises(DataError, match="no split 'validation'"):
        run_training(config(lists, stream=stream), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("stream", ["yes", "no"])
def test_lists_with_errors_leave_no_run_behind(stream, lists, tmp_path):
    with pytest.raises(LabelError, match="did you mean 'click'"):
        run_training(config(lists, stream=stream, label="clik"), tmp_path / "run")
    (lists / "train" / "part-00001.parquet").unlink()
    with pytest.raises(DataError, match="must have 80 requests"):
        run_training(config(lists, stream=stream), tmp_path / "run")
    (lists / MANIFEST).write_text("{")
    with pytest.raises(DataError, match=r"lists\.json: cannot be read"):
        run_training(config(lists, stream=stream), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("stream", ["yes", "no"])
def test_examination_differs_between_segments_of_lists(stream, tmp_path):
    log = feedback_log()
    names = np.random.default_rng(7).choice(["desk", "phone"], len(log)).tolist()
    log = replace(log, context={"segment": pa.array(names)})
    folder = write_lists(log, tmp_path / "lists", group=8)
    known = {f"{k}@{name}": 1 / k for k in range(1, 13) for name in ("desk", "phone")}
    columns = {"segment": "segment"}
    run = run_training(config(folder, stream=stream, columns=columns, propensities=known), tmp_path / "run")
    positions = read_json(run / "bias.json")["positions"]
    assert set(positions) == {f"{k}@{name}" for k in range(1, 13) for name in ("desk", "phone")}


def test_a_stream_by_segment_has_the_positions_of_lists_in_memory(tmp_path):
    log = feedback_log()
    names = np.random.default_rng(7).choice(["desk", "phone", "watch"], len(log)).tolist()
    named = replace(log, context={"segment": pa.array(names)})
    folder = write_lists(named, tmp_path / "lists", shards=1, group=10)
    in_memory, streamed = (
        load_run_data(config(folder, stream=stream, columns={"segment": "segment"})) for stream in ("no", "yes")
    )
    assert streamed.segments == in_memory.segments == ("desk", "phone", "watch")
    feed = streamed.feed(TrainingOptions(**{**LOOP, "batch": 80}))
    lists = feed(0)  # all requests
    assert sorted(lists.positions[lists.where].tolist()) == sorted(in_memory.train.positions.tolist())


@pytest.mark.parametrize("method", ["pointwise", "lambdarank", "pairwise-em"])
def test_a_weight_of_two_counts_like_two_requests(method, tmp_path):
    log = feedback_log(50)
    held_out, twice = np.arange(10), np.arange(10, 34)  # 24 of the 40 training requests count twice
    weighted = replace(log, weights=np.where(np.isin(np.arange(50), twice), 2, 1).astype(np.float32))
    repeated = log.select(np.concatenate([held_out, np.arange(10, 50), twice]))
    folders = {
        "weighted": write_lists(weighted, tmp_path / "weighted", shards=1, group=5),
        "repeated": write_lists(repeated, tmp_path / "repeated", validation=10 / 74, shards=1, group=8),
    }
    torch.manual_seed(0)
    learner = make_method(method, MethodInputs(Label(), features=3, positions=tuple(range(1, 13)))).eval()
    losses = []
    for folder in folders.values():
        for stream in ("yes", "no"):
            run_data = load_run_data(config(folder, stream=stream))
            lists: Lists = run_data.feed(TrainingOptions(**{**LOOP, "batch": 1000}))(0)  # all requests
            losses.append(float(learner.loss(lists).detach()))
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)
    plain = load_run_data(config(write_lists(log, tmp_path / "plain", shards=1, group=5)))
    unweighted = learner.loss(plain.feed(TrainingOptions(**{**LOOP, "batch": 1000}))(0)).detach()
    assert float(unweighted) != pytest.approx(losses[0], rel=1e-4)


def test_a_log_larger_than_memory_gets_a_hint_to_prepare_it(tmp_path, monkeypatch):
    write_log(feedback_log(30), tmp_path / "log.parquet")
    monkeypatch.setattr(ultr.log.readers, "available_memory", lambda: 1000)
    with pytest.raises(DataError, match=r"does not fit in memory.*ultr prepare"):
        load_run_data(quick(tmp_path / "log.parquet"))


@pytest.mark.parametrize(("role", "column"), [("features", "f1"), ("segment", "device"), ("actions", "click")])
def test_column_names_that_lists_do_not_have_are_errors(role, column, lists):
    with pytest.raises(OptionError, match=f"cannot be changed, got {role}={column}; leave '{role}' out, or name it '"):
        load_run_data(quick(lists, columns={role: column}))
