"""Spark scores rows as `score_file` does, with the exported ONNX model."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_sessions import ON_SPARK
from ultr.errors import DataError, OutputError
from ultr.rankers.model import load_model
from ultr.serving.scoring import score_file
from ultr.serving.spark_scoring import score_on_spark
from ultr.training.config import make_config
from ultr.training.run import run_training


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run whose log has a category and missing values, and with the log, as Parquet and as CSV."""
    folder, rng = tmp_path_factory.mktemp("spark-scoring"), np.random.default_rng(0)
    rows = 600
    table = pa.table(
        {
            "request": [f"r{n // 6}" for n in range(rows)],
            "item": rng.permutation(rows),
            "position": np.arange(rows) % 6 + 1,
            "click": rng.integers(0, 2, rows),
            "f1": np.where(rng.random(rows) < 0.1, np.nan, rng.normal(size=rows)),
            "f2": rng.normal(size=rows).astype(np.float32),
            "shop": rng.choice(["a", "b", "c"], rows),
            "randomised": (np.arange(rows) // 6 % 2).astype(np.int8),
        }
    )
    (folder / "log").mkdir()
    for i, part in enumerate((table.slice(0, 250), table.slice(250))):
        pq.write_table(part, folder / "log" / f"{i}.parquet")
    columns = {"categorical": ["shop"], "features": ["f1", "f2"]}
    few = {"ranker": "mlp", "hidden": (8,), "steps": 2, "batch": 32, "bias_steps": 2}
    config = make_config(str(folder / "log"), label="click", method="pointwise", columns=columns, **few)
    run_training(config, folder / "run")
    return folder


class TestSpark:
    pytestmark = ON_SPARK

    def test_spark_gives_the_scores_of_one_machine(self, place, tmp_path):
        source, where = place / "log", ["position <= 5"]
        number = score_on_spark(place / "run", source, tmp_path / "scores", where=where)
        score_file(load_model(place / "run"), str(source), tmp_path / "scores.parquet", where=where)
        expected = pq.read_table(tmp_path / "scores.parquet").sort_by("item")
        found = pq.read_table(tmp_path / "scores").sort_by("item")
        assert number == len(found) == 500
        assert {path.suffix for path in (tmp_path / "scores").iterdir()} == {".parquet"}
        assert found.drop("score").cast(expected.drop("score").schema).equals(expected.drop("score"))
        np.testing.assert_allclose(found["score"], expected["score"], atol=1e-6, rtol=1e-6)
        with pytest.raises(OutputError, match="exists already"):
            score_on_spark(place / "run", source, tmp_path / "scores")
        with pytest.raises(DataError, match="there are no rows"):
            score_on_spark(place / "run", source, tmp_path / "none", where=["position > 99"])
        assert not (tmp_path / "none").exists()


def test_the_command_names_the_engines_that_can_score(ultr, place, tmp_path):
    failed = ultr("score", place / "run", place / "log", "--out", tmp_path / "scores", "--engine", "duckdb")
    assert (failed.returncode, "--engine duckdb; pass --engine spark" in failed.stderr) == (2, True)
    failed = ultr("score", place / "run", place / "log", "--out", tmp_path / "s.parquet", "--master", "local[1]")
    assert (failed.returncode, "--master is an option of engines" in failed.stderr) == (2, True)
