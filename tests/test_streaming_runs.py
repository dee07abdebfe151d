"""Runs on prepared lists: read while training or first into memory, stopped and resumed, with weights and segments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

import ultr.preparing
from conftest import make_shown_log
from lists_folder import write_lists
from ultr.checkpoint import read_metrics
from ultr.errors import DataError, LabelError, OptionError
from ultr.feeding import Feed, Stream
from ultr.labels import Label
from ultr.lists import Lists
from ultr.log import Log, read_log, write_log
from ultr.log.shards import MANIFEST, Manifest, Shards
from ultr.methods import METHODS, MethodInputs, make_method
from ultr.models import load_model
from ultr.preparing import RunConfig, prepare
from ultr.runs import run_training
from ultr.simulate import User, simulate_log
from ultr.training import TrainingOptions

FAST = {"steps": 15, "bias_steps": 10, "batch": 16, "evaluate_every": 5, "device": "cpu"}
KNOWN = {str(position): 1 / position for position in range(1, 13)}  # found from a log, it takes long


def feedback_log(requests: int = 100) -> Log:
    log, _ = simulate_log(make_shown_log(requests=requests), User())
    return log


@pytest.fixture
def lists(tmp_path) -> Path:
    return write_lists(feedback_log(), tmp_path / "lists", group=8)


def config(path: Path, **changes) -> RunConfig:
    training = TrainingOptions(**{**FAST, **changes.pop("training", {})})
    given = {"propensities": KNOWN, "ranker_options": {"hidden": [8], "dropout": 0.2}, **changes}
    return RunConfig(data=str(path), training=training, **given)


def kept_choice(run: Path) -> str:
    return json.loads((run / "config.json").read_text())["stream"]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "weights.safetensors")


def assert_same_bits(run: Path, other: Path) -> None:
    one, two = weights(run), weights(other)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert read_metrics(run) == read_metrics(other)


@pytest.mark.parametrize("stream", ["yes", "no"])
def test_a_run_on_lists_is_a_run_like_others(stream, lists, tmp_path):
    run = run_training(config(lists, stream=stream), tmp_path / "run")
    assert [line["step"] for line in read_metrics(run)] == [5, 10, 15]
    assert kept_choice(run) == stream
    log = read_log(lists / "validation")
    assert np.isfinite(load_model(run).score(log)).all()
    assert_same_bits(run, run_training(config(lists, stream=stream), tmp_path / "again"))


@pytest.mark.parametrize(("memory", "choice"), [(1 << 40, "no"), (1000, "yes")])
def test_what_does_not_fit_in_memory_is_streamed_and_stays_so(memory, choice, lists, tmp_path, monkeypatch):
    monkeypatch.setattr(ultr.preparing, "available_memory", lambda: memory)
    run = run_training(config(lists), tmp_path / "auto")
    assert kept_choice(run) == choice
    monkeypatch.setattr(ultr.preparing, "available_memory", lambda: (1 << 40) + 1000 - memory)  # the other way round
    again = RunConfig.from_json(json.loads((run / "config.json").read_text()))
    assert_same_bits(run_training(again, tmp_path / "again"), run)


def test_half_the_memory_is_for_lists_once_for_each_process_of_a_machine(lists, monkeypatch):
    shards = Shards(lists)
    needed = shards.rows * shards.row_bytes
    for processes, memory, streamed in [(1, 2 * needed + 2, False), (1, 2 * needed, True), (4, 7 * needed, True)]:
        monkeypatch.setattr(ultr.preparing, "available_memory", lambda memory=memory: memory)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        assert (prepare(config(lists)).stream is not None) is streamed


def test_the_feed_is_a_stream_where_lists_are_streamed(lists):
    for choice, kind in {"yes": Stream, "no": Feed}.items():
        prepared = prepare(config(lists, stream=choice))
        assert isinstance(prepared.feed(TrainingOptions(**FAST)), kind)
        assert prepared.positions == Manifest.load(lists).positions
        assert prepared.binary == ("click",)


def test_a_sample_is_looked_at_where_lists_are_streamed(lists, monkeypatch):
    monkeypatch.setattr(ultr.preparing, "SAMPLE_ROWS", 100)
    whole = Shards(lists)
    sample = prepare(config(lists, stream="yes")).train
    assert 100 <= sample.rows < whole.rows
    assert prepare(config(lists, stream="no")).train.rows == whole.rows


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_from_a_stream(method, lists, tmp_path):
    small = {"steps": 4, "bias_steps": 3, "evaluate_every": 2}
    known = None if method == "affine" else KNOWN  # which say nothing of what it corrects
    chosen = config(lists, method=method, stream="yes", training=small, propensities=known, select="feedback-ndcg@10")
    run = run_training(chosen, tmp_path / "run")
    assert len(read_metrics(run)) == 2


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("stream", ["yes", "no"])
def test_a_run_that_is_stopped_goes_on_to_the_same_bits(stream, lists, tmp_path, monkeypatch):
    whole = run_training(config(lists, stream=stream), tmp_path / "whole")

    def stop(progress) -> None:
        if progress.step == 10:
            raise StoppedError

    with pytest.raises(StoppedError):
        run_training(config(lists, stream=stream), tmp_path / "stopped", checkpoint_seconds=0, on_progress=stop)
    assert not (tmp_path / "stopped" / "model").exists()
    monkeypatch.setattr(ultr.preparing, "available_memory", lambda: 1 << 40)
    stopped = run_training(config(lists), tmp_path / "stopped", resume=True)  # auto: it keeps to what it had
    assert kept_choice(stopped) == stream
    assert_same_bits(stopped, whole)


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from test_streaming_runs import config
from ultr.runs import run_training

def stop(progress):
    if progress.step == 10:
        os.kill(os.getpid(), signal.SIGKILL)

run_training(config(Path(sys.argv[1]), stream="yes"), Path(sys.argv[2]), checkpoint_seconds=0, on_progress=stop)
"""


def test_a_streaming_run_that_is_killed_goes_on_to_the_same_bits(lists, tmp_path):
    """Threads that read are in the middle of it then."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    command = [sys.executable, "-c", KILLED, str(lists), str(killed)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == -9, done.stderr
    run_training(config(lists), killed, resume=True)
    assert_same_bits(killed, run_training(config(lists, stream="yes"), whole))


def test_only_prepared_lists_are_streamed(tmp_path):
    write_log(feedback_log(30), tmp_path / "log.parquet")
    with pytest.raises(OptionError, match=r"only prepared lists are streamed.*ultr prepare"):
        run_training(config(tmp_path / "log.parquet", stream="yes"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_options_of_streaming_are_checked(lists):
    with pytest.raises(OptionError, match="'stream' should be auto, yes or no, got 'maybe'"):
        config(lists, stream="maybe")
    with pytest.raises(OptionError, match="'workers' should be 0 or more, got -1"):
        config(lists, workers=-1)


@pytest.mark.parametrize("stream", ["yes", "no"])
def test_lists_without_a_split_that_is_needed_are_refused(stream, lists, tmp_path):
    with pytest.raises(DataError, match="no split 'test'"):
        run_training(config(lists, stream=stream, judged=0.1), tmp_path / "run")
    about = Manifest.load(lists)
    replace(about, splits={"train": about.splits["train"]}).save(lists)
    with pytest.raises(DataError, match="no split 'validation'"):
        run_training(config(lists, stream=stream), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("stream", ["yes", "no"])
def test_what_cannot_be_learned_from_lists_leaves_nothing_behind(stream, lists, tmp_path):
    with pytest.raises(LabelError, match="did you mean 'click'"):
        run_training(config(lists, stream=stream, label="clik"), tmp_path / "run")
    (lists / "train" / "part-00001.parquet").unlink()
    with pytest.raises(DataError, match=r"should hold 80 requests"):
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
    positions = json.loads((run / "bias.json").read_text())["positions"]
    assert set(positions) == {f"{k}@{name}" for k in range(1, 13) for name in ("desk", "phone")}


def test_a_stream_by_segment_has_the_places_of_lists_in_memory(tmp_path):
    log = feedback_log()
    names = np.random.default_rng(7).choice(["desk", "phone", "watch"], len(log)).tolist()
    named = replace(log, context={"segment": pa.array(names)})
    folder = write_lists(named, tmp_path / "lists", shards=1, group=10)
    in_memory, streamed = (
        prepare(config(folder, stream=stream, columns={"segment": "segment"})) for stream in ("no", "yes")
    )
    assert streamed.segments == in_memory.segments == ("desk", "phone", "watch")
    feed = streamed.feed(TrainingOptions(**{**FAST, "batch": 80}))
    lists = feed(0)  # all of them
    assert sorted(lists.positions[lists.where].tolist()) == sorted(in_memory.train.positions.tolist())


@pytest.mark.parametrize("method", ["pointwise", "lambdarank", "pairwise-em"])
def test_a_weight_of_two_counts_like_two_requests(method, tmp_path):
    log = feedback_log(50)
    held, twice = np.arange(10), np.arange(10, 34)  # of the train split, 24 of 40
    weighed = replace(log, weights=np.where(np.isin(np.arange(50), twice), 2, 1).astype(np.float32))
    repeated = log.select(np.concatenate([held, np.arange(10, 50), twice]))
    folders = {
        "weighed": write_lists(weighed, tmp_path / "weighed", shards=1, group=5),
        "repeated": write_lists(repeated, tmp_path / "repeated", validation=10 / 74, shards=1, group=8),
    }
    torch.manual_seed(0)
    learner = make_method(method, MethodInputs(Label(), features=3, positions=tuple(range(1, 13)))).eval()
    losses = []
    for folder in folders.values():
        for stream in ("yes", "no"):
            prepared = prepare(config(folder, stream=stream))
            lists: Lists = prepared.feed(TrainingOptions(**{**FAST, "batch": 1000}))(0)  # all of them
            losses.append(float(learner.loss(lists).detach()))
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)
    plain = prepare(config(write_lists(log, tmp_path / "plain", shards=1, group=5)))
    unweighed = learner.loss(plain.feed(TrainingOptions(**{**FAST, "batch": 1000}))(0)).detach()
    assert float(unweighed) != pytest.approx(losses[0], rel=1e-4)


def test_a_log_that_memory_cannot_hold_is_sent_to_prepare(tmp_path, monkeypatch):
    log = simulate_log(make_shown_log(), User(), seed=0)[0]
    write_log(log, tmp_path / "log.parquet")
    monkeypatch.setattr(ultr.preparing, "available_memory", lambda: 1000)
    with pytest.raises(DataError, match=r"does not fit in memory.*ultr prepare"):
        prepare(RunConfig(str(tmp_path / "log.parquet")))


@pytest.mark.parametrize(
    ("named", "mend"),
    [
        ({"features": "f1"}, "use features"),
        ({"segment": "device"}, "use segment"),
        ({"actions": "click"}, "click,dwell"),
    ],
)
def test_names_that_lists_do_not_have_are_refused_and_not_passed_over(named, mend, lists):
    with pytest.raises(OptionError, match=f"names of their own, got .*{mend}"):
        prepare(RunConfig(str(lists), columns=named))
