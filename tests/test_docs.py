"""Run every example in the documents: Python blocks in order, and `ultr` and `torchrun` lines of console blocks."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import ultr as package
from ultr.cli import app
from ultr.methods import METHODS, TREE_METHODS
from ultr.training.config import check_path, short_names

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "NOTEBOOK.md"  # source distributions do not have it
DOCUMENTS = sorted([ROOT / "README.md", *([NOTEBOOK] if NOTEBOOK.exists() else []), *(ROOT / "docs").rglob("*.md")])
LONG = {"reproduce.md", "scale.md", "trees.md"}
MODULES = sorted(m.name for m in pkgutil.walk_packages(package.__path__, "ultr.") if "main" not in m.name)
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OF_THEIR_DAY = {NOTEBOOK.name, "results.md"}  # they have commands of benchmarks, and of earlier versions
OF_OTHER_PROGRAMS = {
    *("--cov", "--exported", "--first-seed", "--logs", "--max-restarts", "--no-compile", "--nproc-per-node"),
    "--standalone",
}


# Packages of other extras than `train`, by the names of their modules.
OF_OTHER_EXTRAS = {
    "duckdb",
    "grpc",
    "ibis",
    "implicit",
    "mlflow",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "orjson",
    "pandas",
}
OF_OTHER_EXTRAS |= {"polars", "prometheus_client", "pyspark", "starlette", "tensorboard", "uvicorn", "xgboost"}
ONLY_TRAIN = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in {OF_OTHER_EXTRAS}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
"""


def marked(path: Path) -> Any:
    return pytest.param(path, id=str(path.relative_to(ROOT)), marks=pytest.mark.long if path.name in LONG else ())


@pytest.mark.parametrize("path", [marked(path) for path in DOCUMENTS])
def test_examples_run(path, ultr, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    blocks = BLOCK.findall(path.read_text())
    if path.name == "README.md":  # it says that the extra train is enough
        script = ONLY_TRAIN + "".join(text for language, text in blocks if language == "python")
        subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)
        blocks = [block for block in blocks if block[0] == "console"]
    for language, text in blocks:
        if language == "python":
            exec(compile(text, path.name, "exec"), names)  # noqa: S102
            continue
        for line in re.findall(r"^\$ ((?:ultr|torchrun) .*)$", text, re.MULTILINE):
            program, *arguments = shlex.split(line)
            if program == "ultr":
                done = ultr(*arguments)
            else:
                command = [sys.executable, "-m", "torch.distributed.run", *arguments]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{line}\n{done.stderr}"


def test_the_readme_has_examples():
    assert len(BLOCK.findall((ROOT / "README.md").read_text())) >= 2


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if p.name not in OF_THEIR_DAY], ids=lambda path: path.stem)
def test_options_that_the_text_names_exist(path):
    commands = {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in get_command(app).commands.items()
    }
    text = path.read_text()
    for code in re.findall(r"`([^`\n]+)`", text) + re.findall(r"^ {4}(ultr .*)$", text, re.MULTILINE):
        program = re.match(r"(?:torchrun .*)?ultr (\w+)", code)
        known = commands.get(program[1], set()) if program else set().union(*commands.values())
        if program or code.startswith("--"):
            options = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", code)) - {"--help", *OF_OTHER_PROGRAMS}
            assert options <= known, code
    for name in re.findall(r"--set '?([\w.]+)=", text):
        check_path(short_names().get(name, name))


def test_the_page_of_options_has_all_options():
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "options_page.py", "--print"], capture_output=True, text=True, check=True
    )
    assert (ROOT / "docs" / "options.md").read_text() == done.stdout, "run: python tools/options_page.py"


def test_the_pages_of_methods_have_all_methods_and_their_options():
    text = "".join(path.read_text() for path in (ROOT / "docs" / "methods").glob("*.md"))
    tables = [METHODS, TREE_METHODS]
    names = {name for table in tables for name, method in table.items() for name in (name, *method.OPTIONS)}
    assert {name for name in names if not re.search(rf"`{name}[`=]", text)} == set()


@pytest.mark.parametrize("name", MODULES)
def test_doctests_pass(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_links_between_documents_point_to_files():
    for path in DOCUMENTS:
        for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", path.read_text()):
            if not link.startswith("http") and (Path(link).name != NOTEBOOK.name or NOTEBOOK.exists()):
                assert (path.parent / link).exists(), f"{path.name} links to {link}"


@pytest.mark.skipif(not NOTEBOOK.exists(), reason="a source distribution has no notebook")
def test_links_to_the_notebook_point_to_its_sections():
    headings = re.findall(r"^## (.+)$", NOTEBOOK.read_text(), re.MULTILINE)
    sections = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    links = {link for path in DOCUMENTS for link in re.findall(r"NOTEBOOK\.md#([^)]+)\)", path.read_text())}
    assert len(links) > 20
    assert links <= sections
