"""Do the same as `test_hostile_values` for functions that read or write files, train, or take longer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st

import ultr
from hardening.test_hostile_values import CASES as OTHER_CASES
from hardening.test_hostile_values import COUNTS
from hardening.values import NUMBERS, TEXTS, Case, arrays, check, count, framed, logs, make_log
from ultr.datasets.synthetic import make_synthetic

LINEAR = {"label": "click", "ranker": "linear", "steps": 2, "device": "cpu"}
FURTHER = {"batch": 8, "evaluate_every": 2, "bias_steps": 2}
SMALL = {**LINEAR, **FURTHER}
ESTIMATED = {**LINEAR, "options": FURTHER}


@cache
def holder() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


@cache
def a_run() -> Path:
    out = Path(holder().name) / "run"
    return ultr.run_training(ultr.make_config(**SMALL), out, source=make_log())


@cache
def exported() -> Path:
    place = Path(holder().name) / "exported"
    ultr.export_run(a_run(), place)
    return place


@cache
def parquet() -> Path:
    place = Path(holder().name) / "log.parquet"
    ultr.write_log(make_log(), place)
    return place


@cache
def model() -> ultr.Model:
    return ultr.load_model(a_run())


@cache
def estimator() -> ultr.UnbiasedRanker:
    return ultr.UnbiasedRanker(**ESTIMATED).fit(TABLE)


@contextmanager
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as name:
        yield Path(name)


def into(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that passes an output path in a temporary folder to `call`, unless it gets another."""

    def written(out: Any = None, **arguments: Any) -> Any:
        with folder() as place:
            result = call(out=place / name if out is None else out, **arguments)
            return None if isinstance(result, Path) else result

    return written


def trained(log: Any, **options: Any) -> Any:
    config = ultr.make_config(**{**SMALL, **options})
    with folder() as place:
        return ultr.load_model(ultr.run_training(config, place / "run", source=log)).score(log)


def trained_by_name(log: Any, **options: Any) -> Any:
    return ultr.train(log, **{**SMALL, **options}).score(make_log())


def evaluated(**arguments: Any) -> Any:
    json.dumps(ultr.evaluate(a_run(), **arguments).to_json(), allow_nan=False)


def compared(**arguments: Any) -> Any:
    json.dumps(ultr.compare(**{**SMALL, **arguments}).to_json(), allow_nan=False)


def audited(**arguments: Any) -> Any:
    report = ultr.audit(**arguments)
    json.dumps(report.to_json(), allow_nan=False)
    return report.propensities()


def with_judgments(**arguments: Any) -> Any:
    found = ultr.judgments(**arguments)
    json.dumps(found.summary(), allow_nan=False)
    return found.relevance


@cache
def some_judgments() -> ultr.Judgments:
    return ultr.judgments(make_log(items="distinct"), propensities={k: 1 / k for k in range(1, 5)})


TABLE = make_log().to_table()
TEAMS = TABLE.append_column("team", pa.array([str(i % 2) for i in range(TABLE.num_rows)]))
ARRAYS = {
    "X": np.arange(24.0).reshape(8, 3),
    "y": np.arange(8) % 2,
    "request": np.arange(8) // 2,
    "position": [1, 2] * 4,
}


def fitted(X: Any, y: Any, request: Any, position: Any, sample_weight: Any, **options: Any) -> Any:
    ranker = ultr.UnbiasedRanker(**{**ESTIMATED, **options})
    ranker.fit(X, y, request=request, position=position, sample_weight=sample_weight)
    return ranker.predict(X), ranker.score(X, y, request=request, position=position)


def fitted_to_frame(X: Any, **options: Any) -> Any:
    ranker = ultr.UnbiasedRanker(**{**ESTIMATED, **options}).fit(X)
    return ranker.predict(X), ranker.score(X)


ESTIMATOR = {name: value for name, value in ultr.UnbiasedRanker().get_params().items() if name not in ESTIMATED}
PATHS = st.sampled_from(["", ".", "nothing", "/dev/null", "/proc/self/mem", "a" * 300, "x\0y", Path("é" * 200)])
SEEDS = st.sampled_from([-1, 0, 2**32, 2**63 - 2, 2**63, 1.0, True, np.int64(5), None])
REAL = st.sampled_from([number for number in NUMBERS if isinstance(number, float | int)])
KNOWN = st.sampled_from(
    [{}, {1: 0.5}, {1: 0}, {1: -1.0}, {1: float("nan")}, {1: 1e300, 2: 1e-300}, {"1@0": 0.5}, {"x": 1}, {1: "x"}]
)
LOG = {"log": logs()}


SMALL_DATA = make_synthetic(requests=(3, 2, 2))
RATES = {"lr": 0.1, "clip": 5.0, "weight_decay": 0.0, "warmup": 0, "seed": 0, "batch": 8}
PREPARED = {
    "min_items": 1,
    "max_items": None,
    "keep_clickless": 1.0,
    "validation": 0.2,
    "test": 0.2,
    "where": (),
    "memory": None,
    "threads": 1,
}
PREPARED_BAD = {
    **dict.fromkeys(PREPARED, REAL),
    "where": st.lists(TEXTS | st.sampled_from(["click > 0", "1=1; drop table x"]), max_size=2),
}


def prepared(source: Any, out: Any, **options: Any) -> Any:
    return ultr.prepare_lists(source, out, **options)


CASES: dict[str, Case] = {
    "audit": Case(
        audited,
        lambda: {"log": make_log(), "label": "click", "propensities": None, "bootstrap": 3, "seed": 0},
        {**LOG, "propensities": KNOWN, "bootstrap": st.sampled_from([0, -1, 1, 10**9, 2.0]), "seed": SEEDS},
        examples=0,
        long=400,
    ),
    "judgments": Case(
        with_judgments,
        lambda: {
            "log": make_log(items="distinct"),
            "propensities": {k: 1 / k for k in range(1, 5)},
            "grades": 3,
            "cuts": None,
            "weight": 0.2,
            "sure": 0.6,
            "seed": 0,
        },
        {
            **LOG,
            "propensities": KNOWN,
            "grades": st.sampled_from([0, -1, 31, 10**9, 2.0]),
            "weight": REAL,
            "sure": REAL,
            "cuts": st.lists(REAL, max_size=3),
            "seed": SEEDS,
        },
        examples=0,
        long=200,
    ),
    "write_judgments": Case(
        into(lambda out, **options: ultr.write_judgments(some_judgments(), out, **options), "judgments.csv"),
        lambda: {"format": None, "keep_unsure": False, "overwrite": False, "out": None},
        {"out": PATHS, "format": st.sampled_from(["", "csv", "xml", "qrels", 3])},
    ),
    "load_dataset": Case(
        ultr.load_dataset,
        lambda: {"name": "synthetic", "data_dir": None},
        {"name": PATHS, "data_dir": PATHS},
        examples=4,
        long=100,
    ),
    "Dataset": Case(lambda split: SMALL_DATA[split], lambda: {"split": "test"}),
    "write_log": Case(
        into(
            lambda out, log, overwrite, metadata: ultr.write_log(log, out, overwrite=overwrite, metadata=metadata),
            "log.parquet",
        ),
        lambda: {"log": make_log(), "overwrite": False, "metadata": {"a": "b"}, "out": None},
        {**LOG, "out": PATHS, "metadata": st.dictionaries(TEXTS, TEXTS)},
    ),
    "score_file": Case(
        into(lambda out, source, **options: ultr.score_file(model(), source, out, **options), "scores.csv"),
        lambda: {"source": TABLE, "request": None, "features": None, "overwrite": False, "device": "cpu", "out": None},
        {"source": framed(), "out": PATHS},
    ),
    "Model.score": Case(lambda **a: model().score(**a), lambda: {"log": make_log(), "device": "cpu"}, LOG),
    "Model.score_features": Case(
        lambda **a: model().score_features(**a), lambda: {"features": np.ones((6, 3))}, {"features": arrays(6, 3)}
    ),
    "load_model": Case(lambda run: ultr.load_model(run).feature_names, lambda: {"run": a_run()}, {"run": PATHS}),
    "load_run": Case(lambda folder: ultr.load_run(folder).value, lambda: {"folder": a_run()}, {"folder": PATHS}),
    "plot_bias": Case(
        ultr.plot_bias,
        lambda: {"source": estimator(), "truth": {1: 0.5}},
        {"source": PATHS, "truth": st.dictionaries(st.integers(0, 9), REAL, max_size=3)},
    ),
    "plot_comparison": Case(
        ultr.plot_comparison,
        lambda: {"source": {"a": np.arange(4.0)}, "metric": "ndcg@10"},
        {"source": PATHS | st.dictionaries(TEXTS, arrays(4), max_size=3), "metric": TEXTS},
    ),
    "feature_importance": Case(
        lambda **a: ultr.feature_importance(a_run(), **a),
        lambda: {"log": make_log(), "metric": None, "rows": None, "repeats": 2, "seed": 0},
        {**LOG, "metric": TEXTS, "rows": REAL, "repeats": REAL, "seed": SEEDS},
        examples=8,
        long=100,
    ),
    "load_exported": Case(ultr.load_exported, lambda: {"folder": exported()}, {"folder": PATHS}, examples=0, long=100),
    "export_run": Case(
        into(lambda run, out, **options: ultr.export_run(run, out, **options).files, "model"),
        lambda: {"run": a_run(), "rows": None, "overwrite": False, "out": None},
        {"run": PATHS, "rows": PATHS, "out": PATHS},
        examples=0,
        long=60,
    ),
    "write_report": Case(
        into(ultr.write_report, "page.html"),
        lambda: {"folders": [a_run()], "overwrite": False, "out": None},
        {"folders": st.lists(PATHS, max_size=2), "out": PATHS},
        examples=6,
        long=100,
    ),
    "prepare_lists": Case(
        into(prepared, "lists"),
        lambda: {"source": str(parquet()), "overwrite": False, "out": None, **PREPARED},
        {"source": PATHS, "out": PATHS, **PREPARED_BAD},
        examples=0,
        long=150,
    ),
    "run_training": Case(
        trained,
        lambda: {"ranker": "linear", "log": make_log(), "held_out": 0.2, "test": 0.0, "method": "pointwise", **RATES},
        {
            **LOG,
            "ranker": st.sampled_from(["mlp", "x"]),
            "method": st.sampled_from(["pairwise-em", "ipw", "x"]),
            **dict.fromkeys(RATES, REAL),
        },
        examples=8,
        long=300,
    ),
    "train": Case(
        trained_by_name,
        lambda: {"log": TABLE, "resume": False, "overwrite": False, "label": "click", "columns": {}},
        {"log": framed(), "columns": st.sampled_from([{"x": 1}, {"request": 3}, {"actions": None}])},
        examples=6,
        long=200,
    ),
    "evaluate": Case(
        evaluated,
        lambda: {"log": TABLE, "metrics": "ndcg@3", "against": None, "label": None, "propensities": None},
        {"log": framed(), "metrics": TEXTS | st.lists(TEXTS, max_size=2), "propensities": KNOWN},
        examples=8,
        long=200,
    ),
    "interleaving": Case(
        lambda **arguments: json.dumps(ultr.interleaving(**arguments).to_json(), allow_nan=False),
        lambda: {"log": TEAMS, "team": "team", "label": None},
        {"log": framed(), "team": TEXTS, "label": TEXTS},
        examples=8,
        long=200,
    ),
    "compare": Case(
        compared,
        lambda: {"log": make_log(), "methods": ["pointwise"], "seeds": 1, "rates": [0.1], "jobs": 1, "metrics": None},
        {**LOG, "methods": st.lists(TEXTS, max_size=2), "seeds": COUNTS, "rates": st.lists(REAL, max_size=2)},
        examples=0,
        long=60,
    ),
    "run_training of files": Case(
        into(lambda out, **options: ultr.run_training(ultr.make_config(**SMALL | options), out), "run"),
        lambda: {"data": str(parquet()), "out": None, "columns": {}, "bias": None, "propensities": None},
        {
            "data": PATHS.map(str),
            "out": PATHS,
            "bias": PATHS.map(str),
            "propensities": KNOWN,
            "columns": st.sampled_from([{"x": 1}, {"request": 3}, {"actions": None}]),
        },
        examples=4,
        long=100,
    ),
    "UnbiasedRanker of arrays": Case(
        fitted,
        lambda: {
            **ARRAYS,
            "sample_weight": None,
            "held_out": 0.2,
            "random_state": 0,
            "hidden": (4,),
            "propensities": None,
        },
        {
            "X": arrays(8, 3),
            "y": arrays(8),
            "request": arrays(8),
            "position": arrays(8),
            "sample_weight": arrays(8),
            "random_state": SEEDS,
            "hidden": st.lists(REAL, max_size=2),
            "propensities": KNOWN,
        },
        examples=8,
        long=300,
    ),
    "UnbiasedRanker of frames": Case(fitted_to_frame, lambda: {"X": TABLE}, {"X": framed()}, examples=10, long=300),
    "UnbiasedRanker's options": Case(
        lambda **options: fitted_to_frame(TABLE, **options),
        lambda: ESTIMATOR | ESTIMATED,
        {
            **dict.fromkeys(["lr", "held_out"], REAL),
            "options": st.dictionaries(st.sampled_from(["network.dropout", "trees.lr", "x"]), REAL, max_size=2),
        },
        examples=8,
        long=400,
    ),
    "UnbiasedRanker.predict": Case(
        lambda X: estimator().predict(X),
        lambda: {"X": np.ones((4, 3))},
        {"X": arrays(4, 3) | framed()},
        examples=10,
        long=300,
    ),
}


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    """Use a temporary working folder, because drawn paths are relative to it."""
    monkeypatch.chdir(tmp_path)


ALL_CASES = {**OTHER_CASES, **CASES}


@pytest.mark.parametrize("name", [name for name, case in ALL_CASES.items() if case.examples])
def test_a_call_works_or_is_rejected_with_a_clear_message(name):
    check(ALL_CASES[name])


@pytest.mark.long
@pytest.mark.parametrize("name", ALL_CASES)
def test_many_calls_work_or_are_rejected_with_a_clear_message(name):
    count(name, ALL_CASES[name])


def test_features_in_double_precision_are_scored():
    features = np.random.default_rng(0).normal(size=(6, 3))
    assert np.array_equal(model().score_features(features), model().score_features(features.astype(np.float32)))


def test_every_public_name_is_tested():
    tested = {word for name in ALL_CASES for word in name.replace(".", " ").replace("'s", "").split()}
    results = {"BiasReport", "Judgments", "Model", "UltrError", "__version__"}  # of other functions
    assert set(ultr.__all__) - tested <= results
