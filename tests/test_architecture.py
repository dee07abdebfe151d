"""Imports go down only, public names are as listed, and what is imported is declared."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

import ultr

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "ultr"

# From the bottom up; a module imports only from layers below its own (or from its own package).
LAYERS = [
    {"errors"},
    {"seals"},
    {"arguments", "formats"},
    {"files", "labels", "memory", "processes", "exported"},
    {"log", "dwell"},
    {"lists"},
    {"simulate"},
    {"metrics"},
    {"evaluation", "datasets", "pitfalls"},
    {"rankers", "losses", "bias"},
    {"examination", "offpolicy", "onnx_trees"},
    {"propensity"},
    {"methods"},
    {"feeding"},
    {"training"},
    {"preparing"},
    {"checkpoint", "commands", "replacing"},
    {"judging"},
    {"models"},
    {"stages", "outcomes", "scoring"},
    {"boosting"},
    {"runs"},
    {"compare", "sklearn", "model_card", "tensorboard"},
    {"export"},
    {"plots", "serving"},
    {"demo", "experiments", "report"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_down_only(path):
    own = part_of(path)
    assert own in LEVEL, f"give {own} a layer"
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "ultr" and len(parts) > 1 and parts[1] in LEVEL and parts[1] != own:
            assert LEVEL[parts[1]] < LEVEL[own], f"{own} imports {parts[1]}, which is not below it"


def test_logs_need_no_torch():
    for path in (SOURCE / "log").glob("*.py"):
        assert not [name for name in imports_of(path) if name.split(".")[0] == "torch"], path


def test_every_third_party_import_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    used = ("movielens", "prepare", "spark", "trees", "export", "serve", "tensorboard")
    declared = [*project["dependencies"], *(name for extra in used for name in extras[extra])]
    names = {re.split(r"[<>=\[ ]", dependency)[0] for dependency in declared}
    module_of = {"scikit-learn": "sklearn", "ibis-framework": "ibis", "prometheus-client": "prometheus_client"}
    allowed = {module_of.get(name, name) for name in names} | {"ultr"} | set(sys.stdlib_module_names)
    for path in SOURCE.rglob("*.py"):
        for name in imports_of(path):
            assert name.split(".")[0] in allowed, f"{path.name} imports {name}, which is not declared"


def test_public_names_are_sorted_and_there():
    assert ultr.__all__ == sorted(ultr.__all__)
    for name in ultr.__all__:
        assert getattr(ultr, name) is not None
    assert set(dir(ultr)) == set(ultr.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ultr.nothing


def test_modules_and_functions_stay_small():
    for path in FILES:
        text = path.read_text()
        assert text.count("\n") <= 400, path
