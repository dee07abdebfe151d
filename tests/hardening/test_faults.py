"""Full and read-only disks, outputs that other processes write, and files with a flipped bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hardening.faults import contents, feedback_log, network, trees
from ultr.bias.examination import Examination
from ultr.datasets.base import Dataset, cached
from ultr.errors import DataError, OutputError, UltrError
from ultr.evaluation.off_policy import load_off_policy_model
from ultr.log import read_log, write_log
from ultr.log.prepare.pipeline import prepare_lists
from ultr.log.shards import SPLITS, Shards
from ultr.rankers.model import kept_rows, load_model
from ultr.serving.export import export_run
from ultr.serving.exported import load_exported
from ultr.training.biases import load_bias
from ultr.training.config import Config
from ultr.training.data import Decisions, decide, load_run_data
from ultr.training.examining import EXAMINATION
from ultr.training.fitting import FitInputs
from ultr.training.folder import (
    fit_folder,
    load_checkpoint,
    lock_run,
    newest_checkpoint,
    partial_of,
    read_config,
    read_metrics,
)
from ultr.training.loop import Listeners
from ultr.training.networks import NetworkFit
from ultr.training.outcome import read_outcome
from ultr.training.run import run_training
from ultr.training.trees import TreeFit
from ultr.utils import files
from ultr.utils.files import atomic_path, remove_abandoned
from ultr.utils.jsonfiles import CHECKSUM, read_json, write_json

FEW, MANY = 4, 150  # bits flipped in each file


def count(**what: Any) -> None:
    if "ULTR_COUNTS" in os.environ:
        with Path(os.environ["ULTR_COUNTS"]).open("a") as file:
            file.write(json.dumps({"test": "faults", **what}) + "\n")


# --- Temporaries and names --------------------------------------------------------------------------------------------


def test_files_of_killed_processes_are_removed_and_those_of_running_ones_are_not(tmp_path):
    for name in (".out.abcdefgh.partial", ".out.txt.abcdefgh.partial", ".out.txt.mine.partial"):
        (tmp_path / name / "half").mkdir(parents=True)
    with atomic_path(tmp_path / "out.txt") as temporary:
        temporary.write_text("whole")
        assert {path.name for path in tmp_path.iterdir()} == {
            ".out.abcdefgh.partial",  # of another output
            ".out.txt.mine.partial",  # not a temporary name of ultr
            temporary.parent.name,
        }
        assert remove_abandoned(tmp_path)
        assert temporary.is_file()
        with pytest.raises(OutputError, match="another process is writing it now"), atomic_path(tmp_path / "out.txt"):
            pass
        with atomic_path(tmp_path / "out.txt", overwrite=True) as other:
            other.write_text("of another")
        temporary.unlink()
        (tmp_path / "out.txt").unlink()
        temporary.write_text("whole")
    assert (tmp_path / "out.txt").read_text() == "whole"
    assert not remove_abandoned(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {".out.txt.mine.partial", "out.txt"}


@pytest.mark.parametrize("at_once", [True, False], ids=["renameat2", "plain"])
@pytest.mark.parametrize("folder", [True, False])
def test_an_output_that_came_in_the_meantime_is_left_alone(folder, at_once, tmp_path, monkeypatch):
    if not at_once:
        monkeypatch.setattr(files, "_rename_at_once", lambda *_: False)
    target = tmp_path / "out"
    with pytest.raises(OutputError, match="exists already"), atomic_path(target, folder=folder) as temporary:
        for path in (target, temporary):
            path.mkdir(exist_ok=True) if folder else path.touch()
            (path / "file" if folder else path).write_text(f"by {path.parent.name[:1]}")
    assert (target / "file" if folder else target).read_text() == f"by {tmp_path.name[:1]}"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def replaced_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: type[BaseException]) -> Path:
    """Replace a folder where the system cannot exchange names, and fail between the two renamings."""
    monkeypatch.setattr(files, "_rename_at_once", lambda *_: False)
    target, rename = tmp_path / "out", Path.replace
    target.mkdir()
    (target / "file").write_text("old")

    def replace(self: Path, other: Path) -> Path:
        if self.parent.name.endswith(".partial") and Path(other) == target:
            raise fails
        return rename(self, other)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        with pytest.raises(fails if fails is KeyboardInterrupt else OutputError):
            if fails is KeyboardInterrupt:
                patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # a killed process does not clean up
            with atomic_path(target, overwrite=True, folder=True) as temporary:
                (temporary / "file").write_text("new")
    return target


def test_a_folder_that_cannot_be_replaced_comes_back(tmp_path, monkeypatch):
    target = replaced_by_hand(tmp_path, monkeypatch, OSError)
    assert (target / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_whose_replacement_was_killed_comes_back_with_the_next(tmp_path, monkeypatch):
    target = replaced_by_hand(tmp_path, monkeypatch, KeyboardInterrupt)
    assert not target.exists()
    with pytest.raises(OutputError, match="exists already"), atomic_path(target, folder=True):
        pass
    assert (target / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_output_below_a_file_is_rejected(run, log_path, tmp_path):
    (tmp_path / "file").write_text("mine")
    place = tmp_path / "file" / "out"
    for work in (
        lambda: run_training(network(log_path), place),
        lambda: write_log(read_log(log_path), place.with_suffix(".parquet")),
        lambda: prepare_lists(log_path, place),
        lambda: lock_run(place).__enter__(),
    ):
        with pytest.raises(OutputError):
            work()
    assert (tmp_path / "file").read_text() == "mine"


def test_only_a_run_is_replaced_and_only_a_complete_one_is_resumed(log_path, run, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(OutputError, match="not a run; "):
        run_training(network(log_path), tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"
    shutil.copytree(run, tmp_path / "half")
    (tmp_path / "half" / "config.json").unlink()
    with pytest.raises(OutputError, match="not a run; "):
        run_training(network(log_path), tmp_path / "half", resume=True)


def run_disks(folder: Path, *names: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-W", "ignore", "-m", "hardening.disks", str(folder), *names]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for line in lines:
        count(**line)
    return lines


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork to start work quickly")
def test_processes_that_write_the_same_output_do_no_harm(tmp_path):
    names = ("train", "prepare", "write_log")
    assert [line["case"] for line in run_disks(tmp_path, *names)] == list(names)


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork to start work quickly")
def test_work_in_parallel_and_on_small_and_read_only_disks(tmp_path):
    lines = run_disks(tmp_path)
    if "not allowed" in lines[-1]:
        pytest.skip("this system does not allow a process to mount a disk")
    small = [line for line in lines if line["how"] == "small disk"]
    assert all(line.get("error", 0) >= 1 for line in small if line["case"] != "cache")
    read_only = [line for line in lines if line["how"] == "read-only disk"]
    assert all("error" in line for line in read_only if line["case"] != "cache")


# --- Flipped bits -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def log_path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("faults") / "log.parquet"
    write_log(feedback_log(), path)
    return path


@pytest.fixture(scope="module")
def run(log_path, tmp_path_factory) -> Path:
    return run_training(network(log_path), tmp_path_factory.mktemp("faults") / "run")


@pytest.fixture(scope="module")
def tree_run(log_path, tmp_path_factory) -> Path:
    config = trees(log_path, method_options={"final": "pairs"}, bias_steps=10)
    return run_training(config, tmp_path_factory.mktemp("faults") / "run")


@pytest.fixture(scope="module")
def lists(log_path, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("faults") / "lists"
    prepare_lists(log_path, folder, threads=1)
    return folder


def stopped(config: Config, out: Path) -> Path:
    """Start a run and stop it when it has two checkpoints; return the folder of its fit."""
    folder = fit_folder(partial_of(out), config.kinds[0])

    def stop(_: object) -> None:
        if len(list((folder / "checkpoints").glob("step-*"))) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_training(config, out, listeners=Listeners(checkpoint_seconds=0, on_progress=stop))
    return folder


def is_flipped_checksum(name: str) -> bool:
    """Return whether a key is that of a checksum with a flipped bit, which is then a key that nothing reads."""
    return len(name) == len(CHECKSUM) and sum(a != b for a, b in zip(name, CHECKSUM, strict=True)) == 1


def plain(value: Any) -> Any:
    """Convert a value so that `==` compares all of it."""
    if isinstance(value, dict):
        return {str(name): plain(part) for name, part in value.items() if not is_flipped_checksum(str(name))}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    return value.tobytes() if isinstance(value, np.ndarray) else repr(value)


def read_run(folder: Path) -> Any:
    """Read every file of a run."""
    log, outcome, values = feedback_log(20), read_outcome(folder), load_off_policy_model(folder / "off-policy")
    model, (kind,) = load_model(folder), Decisions.load(folder).rankers
    assert outcome is not None
    parts = [model.score(log), model.label, kept_rows(folder), repr(read_config(folder)), read_metrics(folder)]
    parts += [repr(Decisions.load(folder)), read_json(fit_folder(folder, kind) / "report.json")]
    if (folder / EXAMINATION).is_file():
        parts.append(vars(Examination.load(folder / EXAMINATION)))
    about = {name: value for name, value in outcome.about.items() if name != "sum"}
    parts += [read_json(folder / "bias.json"), about, outcome.requests, outcome.weights, outcome.agreement]
    parts += [outcome.results, None if values is None else [values.theta, values.direct.weights, values.direct.lowest]]
    return plain(parts)


def read_network_run(folder: Path) -> Any:
    config = read_config(folder)
    method = NetworkFit(inputs_of(config, "mlp")).method
    load_bias(fit_folder(folder, "mlp") / "bias", method.bias_learner())
    return [read_run(folder), plain(method.bias_learner().state_dict())]


def read_tree_run(folder: Path) -> Any:
    pair_model = TreeFit(inputs_of(read_config(folder), "lightgbm")).method.pairs
    assert pair_model is not None
    load_bias(fit_folder(folder, "lightgbm") / "bias", pair_model.bias_model)
    return [read_run(folder), plain(pair_model.bias_model.state_dict())]


def inputs_of(config: Config, kind: str) -> FitInputs:
    data = load_run_data(config)
    return FitInputs(config, data, decide(config, data), kind)


def read_lists(folder: Path) -> Any:
    parts: list[Any] = []
    for split in SPLITS:
        shards = Shards(folder, split)
        log = shards.read_all()
        parts += [log.features, log.offsets, log.positions, dict(log.actions), log.request_ids.to_pylist()]
    return plain([*parts, vars(shards.manifest)])


def flipped(path: Path, rng: np.random.Generator) -> Callable[[], None]:
    """Flip a bit of a file; return a function that restores the file."""
    content = path.read_bytes()
    place, bit = int(rng.integers(len(content))), int(rng.integers(8))
    path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
    return lambda: path.write_bytes(content) and None


def flip_all(folder: Path, read: Callable[[Path], Any], times: int, *, skip: tuple[str, ...] = (".lock",)) -> Counter:
    """Flip bits of every file, one at a time; count the reads that name the file in an error, or give the same."""
    expected, outcomes, rng = read(folder), Counter[str](), np.random.default_rng(0)
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in skip):
        for _ in range(times):
            put_back = flipped(path, rng)
            try:
                same = read(folder) == expected
            except UltrError as error:
                named = path.name in str(error) or path.parent.name in str(error)
                outcomes["rejected" if named else f"rejected without naming {path.name}: {error}"] += 1
            else:
                outcomes["harmless" if same else f"silently wrong: {path.relative_to(folder)}"] += 1
            put_back()
    return outcomes


def check_flips(name: str, outcomes: Counter) -> None:
    count(how="bits flipped", case=name, **outcomes)
    assert set(outcomes) <= {"rejected", "harmless"}, outcomes
    assert outcomes["rejected"] > 3 * outcomes["harmless"], outcomes  # a bit of a space, or one that nothing reads


@pytest.mark.parametrize("times", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
def test_a_flipped_bit_in_a_run_is_found(times, run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    check_flips("run", flip_all(tmp_path / "run", read_network_run, times))


@pytest.mark.parametrize("times", [1, pytest.param(MANY // 5, marks=pytest.mark.long)])
def test_a_flipped_bit_in_a_run_of_trees_is_found(times, tree_run, tmp_path):
    shutil.copytree(tree_run, tmp_path / "run")
    check_flips("trees", flip_all(tmp_path / "run", read_tree_run, times))


@pytest.mark.parametrize("times", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
def test_a_flipped_bit_in_prepared_lists_is_found(times, lists, tmp_path):
    shutil.copytree(lists, tmp_path / "lists")
    check_flips("lists", flip_all(tmp_path / "lists", read_lists, times))


@pytest.mark.parametrize("times", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
def test_a_flipped_bit_in_an_exported_model_is_found(times, tree_run, tmp_path):
    pytest.importorskip("onnx")
    folder = export_run(tree_run, tmp_path / "model").folder

    def read(folder: Path) -> Any:
        model = load_exported(folder)
        return plain([model.onnx(), dict(model.about)])

    check_flips("exported", flip_all(folder, read, times, skip=("README.md", "lightgbm.txt")))


@pytest.mark.parametrize("times", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
def test_a_cache_with_a_flipped_bit_is_built_again(times, log_path, own_cache):
    log, built = read_log(log_path), []

    def build() -> Dataset:
        built.append(1)
        return Dataset("small", log, log, log, max_grade=4, fingerprint="x")

    def read(_: Path) -> Any:
        dataset = cached("small", "key", build)
        return plain([part.features for part in (dataset.train, dataset.validation, dataset.test)])

    expected, rng = read(own_cache), np.random.default_rng(0)
    cache_files = sorted(p for p in own_cache.rglob("*") if p.is_file())
    assert len(cache_files) == 4
    for path in cache_files:
        for _ in range(times):
            flipped(path, rng)
            assert read(own_cache) == expected
    assert len(built) > 3 * times
    count(how="bits flipped", case="cache", rebuilt=len(built) - 1, harmless=4 * times - len(built) + 1)


@pytest.mark.parametrize("times", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
def test_a_flipped_bit_in_the_newest_checkpoint_loads_the_one_before(times, log_path, tmp_path):
    half = stopped(network(log_path), tmp_path / "half")
    inputs = inputs_of(network(log_path), "mlp")

    def load() -> Any:
        state = NetworkFit(inputs).state
        assert load_checkpoint(half, state)
        return plain([state.step, state.stopping.to_json(), state.method.state_dict(), state.best_weights])

    older, newer = sorted((half / "checkpoints").iterdir())
    newest = load()
    newer.rename(tmp_path / "aside")
    before = load()
    (tmp_path / "aside").rename(newer)
    outcomes, rng = Counter[str](), np.random.default_rng(0)
    for path in sorted(newer.iterdir()):
        for _ in range(times):
            put_back = flipped(path, rng)
            with warnings.catch_warnings(record=True) as messages:
                warnings.simplefilter("always")
                result = load()
            put_back()
            if result == newest:
                outcomes["harmless"] += 1
            else:
                assert result == before
                assert f"resuming from {older.name}" in str(messages[0].message)
                assert path.name in str(messages[0].message)
                outcomes["rejected"] += 1
    check_flips("checkpoint", outcomes)


@pytest.mark.parametrize("make", [network, trees])
def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one_to_the_same_bits(make, log_path, tmp_path):
    options = {"method_options": {"final": "pairs"}} if make is trees else {}
    config = make(log_path, steps=6, **options)
    whole = run_training(config, tmp_path / "whole")
    half = stopped(config, tmp_path / "half")
    older, newer = sorted((half / "checkpoints").iterdir())
    largest = max(newer.iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[-3] ^= 1
    largest.write_bytes(content)
    with pytest.warns(UserWarning, match=f"resuming from {older.name}"):
        resumed = run_training(config, tmp_path / "half", resume=True)
    assert contents(resumed) == contents(whole)


def test_a_run_without_an_undamaged_checkpoint_raises_an_error(log_path, tmp_path):
    half = stopped(network(log_path), tmp_path / "half")
    for folder in (half / "checkpoints").iterdir():
        (folder / "weights.safetensors").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"weights\.safetensors: cannot be read"):
        run_training(network(log_path), tmp_path / "half", resume=True)
    assert len(list((half / "checkpoints").iterdir())) == 2


def test_checkpoints_beyond_a_million_steps_are_in_order(tmp_path):
    for step in (999_999, 1_000_000):
        folder = tmp_path / "checkpoints" / f"step-{step:06}"
        folder.mkdir(parents=True)
        write_json(folder / "meta.json", {"format": 1, "step": step})
    assert newest_checkpoint(tmp_path, lambda _, meta: meta["step"]) == 1_000_000
