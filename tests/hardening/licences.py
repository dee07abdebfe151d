"""The licences of what is installed beside `ultr`: `python tests/hardening/licences.py` writes docs/licences.md."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "licences.md"
FAMILIES = ("Apache", "BSD", "MIT", "MPL", "AGPL", "LGPL", "GPL")
NOT_EVERYWHERE = {"xgboost": "Apache-2.0"}  # in place of xgboost-cpu where there is none
INTRO = """\
# Licences

`ultr` is under Apache-2.0 ([LICENSE](../LICENSE)). These are the packages it asks for by name, and their licences as
their own metadata has them; what they bring with them in turn (DuckDB with ibis, under MIT, among others) has its own.
Pages that `ultr report` writes hold plotly.js (MIT). None of them names the GPL; MPL-2.0 asks for changes to its own
files alone. `python tests/hardening/licences.py` writes this page, and a test holds it against `pyproject.toml` and
what is installed.

| package | for | licence |
|---|---|---|
"""


def dependencies() -> dict[str, list[str]]:
    """Each package that pyproject.toml names, and what for: `core`, or extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, list[str]] = {}
    for use, wanted in {"core": project["dependencies"], **project["optional-dependencies"]}.items():
        for requirement in wanted:
            found.setdefault(re.split(r"[^\w.-]", requirement)[0].lower(), []).append(use)
    del found["ultr"]
    return found


def licence(package: str) -> str | None:
    """What the metadata of an installed package says, in one line."""
    try:
        about = metadata(package)
    except PackageNotFoundError:
        return None
    classes = [line.split(" :: ")[-1] for line in about.get_all("Classifier") or [] if line.startswith("License")]
    text = about["License"] or ""
    short = text if 0 < len(text) < 30 and "\n" not in text and "BSD" not in text else None
    return about["License-Expression"] or short or ", ".join(classes) or text.split("\n")[0]


def families(text: str) -> set[str]:
    found = {family for family in FAMILIES if re.search(rf"\b{family}\b", text.replace("0BSD", ""))}
    return found | ({"MPL"} if "Mozilla Public" in text else set())


def table() -> dict[str, str]:
    """Package -> licence, as the page has it."""
    rows = PAGE.read_text().split("|---|---|---|")[1]
    return {row[0]: row[1] for row in re.findall(r"^\| ([\w.-]+) \| .* \| (.+) \|$", rows, re.MULTILINE)}


if __name__ == "__main__":
    lines = [
        f"| {package} | {', '.join(uses)} | {licence(package) or NOT_EVERYWHERE[package]} |\n"
        for package, uses in dependencies().items()
    ]
    PAGE.write_text(INTRO + "".join(lines))
