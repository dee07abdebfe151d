"""Run the notebooks of examples/: they have no saved outputs, run without an error, and show plots and tables."""

from __future__ import annotations

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="the dependency group test is not installed")
nbclient = pytest.importorskip("nbclient", reason="the dependency group test is not installed")

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))
REAL = {"real-clicks": "yandex-clicks", "movielens-dwell": "ml-1m"}  # notebook -> the real data that it can use


def run(path: Path, folder: Path) -> list[dict]:
    """Run a notebook in a folder, and return the data of its outputs, by MIME type."""
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    return [output.data for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_and_show_plots_and_tables(path, tmp_path, monkeypatch):
    monkeypatch.delenv("ULTR_DATA", raising=False)  # real data take longer
    outputs = run(path, tmp_path)
    assert sum("application/vnd.plotly.v1+json" in output for output in outputs) >= 1
    assert sum("text/html" in output for output in outputs) >= 1


@pytest.mark.long
@pytest.mark.parametrize("name", REAL)
def test_notebooks_run_with_real_data(name, tmp_path, real_data):
    real_data(REAL[name])
    assert run(next(path for path in NOTEBOOKS if path.stem == name), tmp_path)


def test_there_are_four_notebooks_without_saved_outputs():
    assert len(NOTEBOOKS) == 4
    for path in NOTEBOOKS:
        for cell in nbformat.read(path, as_version=4).cells:
            assert not cell.get("outputs"), f"{path.name} has saved outputs: clear them"
