from __future__ import annotations

import gc
import os
import random
import shutil
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import settings

from ultr.datasets.base import Dataset
from ultr.datasets.synthetic import make_synthetic
from ultr.log import Log

TESTS = Path(__file__).parent
CHROMIUM_OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
FILES_BEFORE = pytest.StashKey[set[str]]()
# Tests that `make test-fast` leaves out: a browser, other processes, hostile input, examples of the documentation, and
# whole runs that take seconds each.
SLOW = (
    "bias/test_audit.py",
    "cli/",
    "evaluation/test_off_policy_model.py",
    "experiments/",
    "hardening/",
    "log/prepare/",
    "methods/test_contract.py",
    "methods/test_pairwise_em.py",
    "report/",
    "serving/",
    "test_docs.py",
    "test_notebooks.py",
    "test_package.py",
    "test_site.py",
    "test_sklearn.py",
    "training/comparing/",
    "training/test_combining.py",
    "training/test_feed.py",
    "training/test_folder.py",
    "training/test_graphs.py",
    "training/test_run.py",
    "training/test_stack.py",
    "training/test_streaming.py",
    "training/test_together.py",
    "training/test_trees.py",
    "utils/test_distributed.py",
)

settings.register_profile("ultr", deadline=None, derandomize=True, max_examples=60)
settings.register_profile("fast", settings.get_profile("ultr"), max_examples=15)  # of `make test-fast`
settings.load_profile("ultr")
torch.set_num_threads(1)  # tests run in parallel
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the commands that tests start


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="shuffle the modules, and the tests in each")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(TESTS).as_posix().startswith(SLOW):
            item.add_marker(pytest.mark.slow)
    if (seed := config.getoption("--shuffle")) is not None:
        rng = random.Random(seed)  # noqa: S311
        rng.shuffle(items)
        places = {path: rng.random() for path in sorted({item.path for item in items})}
        items.sort(key=lambda item: places[item.path])  # so that fixtures of a module are made once


def pytest_sessionstart(session: pytest.Session) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        session.config.stash[FILES_BEFORE] = project_files()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if a test wrote into the project: tests write into their own temporary folders."""
    if FILES_BEFORE in session.config.stash:
        new = sorted(project_files() - session.config.stash[FILES_BEFORE])
        if new and session.exitstatus == pytest.ExitCode.OK:
            print(f"\ntests left files in the project: {', '.join(new[:10])}", file=sys.stderr)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def project_files() -> set[str]:
    """Return the files of the project, without caches and hidden folders."""
    files = set()
    for folder, inner, names in os.walk(TESTS.parent):
        inner[:] = [name for name in inner if not name.startswith((".", "__pycache__"))]
        files |= {os.path.relpath(os.path.join(folder, name), TESTS.parent) for name in names if name[0] != "."}  # noqa: PTH118
    return files


@pytest.fixture(autouse=True)
def shared_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the tests of all processes one shared cache, instead of the cache of the user."""
    base = tmp_path_factory.getbasetemp()
    workers = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    monkeypatch.setenv("ULTR_CACHE", str(workers / "shared-cache"))


@pytest.fixture
def own_cache(shared_cache, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for one test."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("ULTR_CACHE", str(folder))
    return folder


@pytest.fixture
def real_data():
    """Find the folder of a real data set, or skip the test if it is missing."""

    def find(name: str) -> Path:
        folder = os.environ.get("ULTR_DATA")
        if not folder:
            pytest.skip("ULTR_DATA is not set")
        path = Path(folder) / name
        if not path.exists():
            pytest.skip(f"{name} is missing in {folder}")
        return path

    return find


@pytest.fixture
def small_synthetic(monkeypatch):
    """Let the runs of this process have a small data set in place of `synthetic`."""
    for module in ("data", "comparing.tasks"):
        monkeypatch.setattr(f"ultr.training.{module}.cached_dataset", lambda name, data_dir: _small_synthetic())


@cache
def _small_synthetic() -> Dataset:
    return make_synthetic(requests=(400, 40, 40))


@pytest.fixture
def ultr(monkeypatch, capsys):
    """Run the command line in this process, because a new process takes seconds to start."""
    from ultr.cli import main

    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["ultr", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        return SimpleNamespace(returncode=end.value.code or 0, stdout=printed.out, stderr=printed.err)

    return run


@pytest.fixture(scope="module")
def browser():
    """Chromium, for tests of pages; they are skipped if it is not installed."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("Chromium is not installed: install Debian's package chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        chrome = started.chromium.launch(executable_path=chromium, args=list(CHROMIUM_OPTIONS))
        yield chrome
        chrome.close()


def some_always(names: Iterable[str], always: Iterable[str]) -> list[Any]:
    """Return parameters for `parametrize`; those that are not in `always` get the marker `long`."""
    return [pytest.param(name, marks=() if name in always else pytest.mark.long) for name in names]


@pytest.fixture
def shown_log() -> Log:
    return make_shown_log()


def make_shown_log(requests: int = 40, seed: int = 0, features: int = 3, longest: int = 12) -> Log:
    """Make a log of lists with 1 to `longest` items at positions 1, 2, ... and grades 0-4."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, requests)
    rows = int(lengths.sum())
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Log(
        features=rng.normal(size=(rows, features)).astype(np.float32),
        offsets=offsets,
        request_ids=pa.array([f"r{i}" for i in range(requests)]),
        feature_names=tuple(f"f{i}" for i in range(features)),
        positions=np.arange(rows) - np.repeat(offsets[:-1], lengths) + 1,
        relevance=rng.integers(0, 5, rows).astype(np.float32),
    )


@pytest.fixture(scope="session")
def spark_session() -> Iterable[Any]:
    """One session of Spark for all tests of a process, as it takes seconds to start."""
    pytest.importorskip("pyspark", reason="pyspark is not installed; make test-long installs it")
    if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
        pytest.skip("Spark needs Java")
    from ultr.log.prepare import engines

    # A virtual machine that starts fast, and few partitions for few rows.
    options = {
        "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "PYSPARK_SUBMIT_ARGS": "--conf spark.sql.shuffle.partitions=2 pyspark-shell",
    }
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in options.items():
            patch.setenv(name, value)
        session = engines._new_session(Path(folder), "local[2]")
        yield session
        session.stop()


@pytest.fixture
def spark(spark_session: Any) -> Iterable[Any]:
    """The session of Spark; PySpark leaves sockets behind, which are collected here, where that is no error."""
    yield spark_session
    gc.collect()
