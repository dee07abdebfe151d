"""Check the layers of the packages, the public names, and the declared dependencies."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import ultr
from ultr.errors import TRAIN_PACKAGES

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "ultr"

# The layers, from the bottom up. A package imports only from lower layers and from itself.
SPINE = [
    {"errors", "_version"},
    {"utils"},
    {"log"},
    {"lists"},
    {"datasets", "rankers"},
    {"checks"},
    {"bias"},
    {"evaluation"},
    {"methods"},
    {"training"},
    {"serving", "report", "sklearn"},
    {"api"},
    {"experiments"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(SPINE) for name in names}
FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@cache
def imports_of(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def test_every_package_has_a_layer():
    assert {package_of(path) for path in FILES} <= LEVEL.keys(), "add the package to SPINE"


def test_packages_import_only_from_lower_layers():
    offenders = [
        f"{path.relative_to(SOURCE)} imports {imported}, which is not in a lower layer"
        for path in FILES
        for imported in packages_imported_by(path) - {package_of(path)}
        if LEVEL[imported] >= LEVEL[package_of(path)]
    ]
    assert not offenders, "\n".join(offenders)


def packages_imported_by(path: Path) -> set[str]:
    """Return the packages of ultr that a file imports."""
    parts = [name.split(".") for name in imports_of(path)]
    return {part[1] for part in parts if part[0] == "ultr" and len(part) > 1 and part[1] in LEVEL}


def test_the_source_folder_has_at_most_21_entries():
    assert len([path for path in SOURCE.iterdir() if path.name != "__pycache__"]) <= 21


def test_modules_of_a_package_import_one_another_without_a_cycle():
    graph = {module_of(path): {to for name in imports_of(path) if (to := imported_module(name))} for path in FILES}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join([*above[above.index(module) :], module])
        if module not in done:
            for to in graph.get(module, ()):
                if to != module:
                    visit(to, (*above, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imported_module(name: str) -> str | None:
    """Return the module of ultr that an import of a name loads, or None."""
    modules = {module_of(path) for path in FILES}
    return next((m for m in (name, name.rpartition(".")[0]) if m in modules), None)


def test_the_page_of_the_architecture_names_every_module():
    page = (ROOT / "docs" / "architecture.md").read_text()
    names = {path.stem for path in FILES} - {"__init__", "__main__", "_version"}
    commands = {path.stem for path in (SOURCE / "cli").glob("*.py")}  # one module for each command
    assert {name for name in names - commands if not re.search(rf"`{name}(\.py)?`", page)} == set()


def test_the_log_package_does_not_import_torch():
    offenders = [
        str(path.relative_to(SOURCE))
        for path in (SOURCE / "log").rglob("*.py")
        if any(name.split(".")[0] == "torch" for name in imports_of(path))
    ]
    assert not offenders, offenders


def test_every_third_party_import_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    used = ("train", "movielens", "prepare", "spark", "trees", "export", "serve", "grpc", "tensorboard", "mlflow")
    declared = [*project["dependencies"], *(name for extra in used for name in extras[extra])]
    names = {re.split(r"[<>=\[ ]", dependency)[0] for dependency in declared}
    module_of = {"scikit-learn": "sklearn", "ibis-framework": "ibis", "prometheus-client": "prometheus_client"}
    module_of |= {"grpcio": "grpc", "protobuf": "google", "mlflow-skinny": "mlflow"}
    allowed = {module_of.get(name, name) for name in names} | {"ultr"} | set(sys.stdlib_module_names)
    offenders = [
        f"{path.relative_to(SOURCE)} imports {name}, which is not declared"
        for path in SOURCE.rglob("*.py")
        for name in imports_of(path)
        if name.split(".")[0] not in allowed
    ]
    assert not offenders, "\n".join(offenders)


def test_public_names_are_sorted_and_exist():
    assert ultr.__all__ == sorted(ultr.__all__)
    for name in ultr.__all__:
        assert getattr(ultr, name) is not None
    assert set(dir(ultr)) == set(ultr.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ultr.nothing


def test_a_server_needs_nothing_of_training_and_all_other_extras_include_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]

    def all_of(extra: str) -> set[str]:
        inner = re.findall(r"ultr\[(.*?)\]", " ".join(extras[extra]))
        names = {extra, *(name for part in inner for name in part.split(","))}
        return names if names == {extra} else names.union(*map(all_of, names - {extra}))

    assert {extra for extra in extras if "train" not in all_of(extra)} == {"serve", "grpc"}
    named = {re.split(r"[<>=\[ ]", requirement)[0] for requirement in extras["train"]}
    assert {"sklearn" if name == "scikit-learn" else name for name in named} == TRAIN_PACKAGES
    assert not named & {re.split(r"[<>=\[ ]", requirement)[0] for requirement in project["dependencies"]}


def test_the_demo_installs_only_what_training_needs(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    steps = {
        target: subprocess.run(["make", "--dry-run", target], cwd=tmp_path, capture_output=True, text=True, check=True)
        for target in ("demo", "test", "test-long")
    }
    assert '--constraint constraints.txt --editable ".[train]"\n' in steps["demo"].stdout
    assert "--group" not in steps["demo"].stdout
    assert "--editable . --group test\n" in steps["test"].stdout
    assert "--editable . --group long\n" in steps["test-long"].stdout
