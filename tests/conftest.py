from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import settings

from ultr.cli import main
from ultr.log import Log

settings.register_profile("ultr", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("ultr")
torch.set_num_threads(1)  # tests run side by side
os.environ.setdefault("OMP_NUM_THREADS", "1")  # as do the commands they start


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run modules, and the tests in each, in another order")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (seed := config.getoption("--shuffle")) is not None:
        rng = random.Random(seed)  # noqa: S311
        rng.shuffle(items)
        places = {path: rng.random() for path in sorted({item.path for item in items})}
        items.sort(key=lambda item: places[item.path])  # fixtures of a module are made once


@pytest.fixture(autouse=True)
def shared_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests neither read nor fill the user's cache: they have one that they share, across processes."""
    base = tmp_path_factory.getbasetemp()
    workers = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    monkeypatch.setenv("ULTR_CACHE", str(workers / "shared-cache"))


@pytest.fixture
def own_cache(shared_cache, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache that no other test sees."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("ULTR_CACHE", str(folder))
    return folder


@pytest.fixture
def real_data():
    """The folder of a real data set, or a skip that says what is missing."""

    def find(name: str) -> Path:
        folder = os.environ.get("ULTR_DATA")
        if not folder:
            pytest.skip("ULTR_DATA names no folder of data sets")
        path = Path(folder) / name
        if not path.exists():
            pytest.skip(f"no {name} in {folder}")
        return path

    return find


@pytest.fixture
def ultr(monkeypatch, capsys):
    """The command line in this process, as another would take seconds to start."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["ultr", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        return SimpleNamespace(returncode=end.value.code or 0, stdout=printed.out, stderr=printed.err)

    return run


def some_always(names: Iterable[str], always: Iterable[str]) -> list[Any]:
    """Parameters of which only some are run with every change."""
    return [pytest.param(name, marks=() if name in always else pytest.mark.long) for name in names]


@pytest.fixture
def shown_log() -> Log:
    return make_shown_log()


def make_shown_log(requests: int = 40, seed: int = 0, features: int = 3) -> Log:
    """Lists of 1 to 12 items at positions 1, 2, ... with grades 0-4."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 13, requests)
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
