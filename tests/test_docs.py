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

import ultr as package

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
LONG = {"methods.md", "reproduce.md", "scale.md", "trees.md"}
MODULES = sorted(m.name for m in pkgutil.walk_packages(package.__path__, "ultr.") if "main" not in m.name)
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def marked(path: Path) -> Any:
    return pytest.param(path, id=str(path.relative_to(ROOT)), marks=pytest.mark.long if path.name in LONG else ())


@pytest.mark.parametrize("path", [marked(path) for path in DOCUMENTS])
def test_examples_run(path, ultr, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for language, text in BLOCK.findall(path.read_text()):
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


@pytest.mark.parametrize("name", MODULES)
def test_doctests_pass(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_links_between_documents_point_to_files():
    for path in DOCUMENTS:
        for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", path.read_text()):
            if not link.startswith("http"):
                assert (path.parent / link).exists(), f"{path.name} links to {link}"
