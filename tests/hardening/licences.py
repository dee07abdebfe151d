"""Write docs/licences.md, the licences of the dependencies: `python tests/hardening/licences.py`."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "licences.md"
FAMILIES = ("Apache", "BSD", "ISC", "MIT", "MPL", "AGPL", "LGPL", "GPL")
NOT_EVERYWHERE = {"xgboost": "Apache-2.0"}  # replaces xgboost-cpu where that is not available
INTRO = """\
# Licences

`ultr` is under Apache-2.0 ([LICENSE](../LICENSE)). These are its direct dependencies, with the licences in their
metadata; their own dependencies have their own. Reports contain plotly.js (MIT). No licence below is the GPL. MPL-2.0
covers only changes to its own files.

`python tests/hardening/licences.py` writes this page, and a test checks it.

| package | for | licence |
|---|---|---|
"""


def dependencies() -> dict[str, list[str]]:
    """Return the packages that pyproject.toml names, each with its uses: `core`, extras, or groups."""
    file = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, groups = file["project"], file["dependency-groups"]
    uses: dict[str, list[str]] = {}
    for use, requirements in {"core": project["dependencies"], **project["optional-dependencies"], **groups}.items():
        for requirement in requirements:
            if isinstance(requirement, dict):  # another group, which has its own rows
                continue
            uses.setdefault(re.split(r"[^\w.-]", requirement)[0].lower(), []).append(use)
    del uses["ultr"]
    return uses


def licence(package: str) -> str | None:
    """Return the licence in the metadata of an installed package, in one line."""
    try:
        about = metadata(package)
    except PackageNotFoundError:
        return None
    classes = [line.split(" :: ")[-1] for line in about.get_all("Classifier") or [] if line.startswith("License")]
    text = about["License"] or ""
    short = text if 0 < len(text) < 30 and "\n" not in text and "BSD" not in text else None
    return about["License-Expression"] or short or ", ".join(classes) or text.split("\n")[0]


def families(text: str) -> set[str]:
    named = {family for family in FAMILIES if re.search(rf"\b{family}\b", text.replace("0BSD", ""))}
    return named | ({"MPL"} if "Mozilla Public" in text else set())


def table() -> dict[str, str]:
    """Return the table of the page: package -> licence."""
    rows = PAGE.read_text().split("|---|---|---|")[1]
    return {row[0]: row[1] for row in re.findall(r"^\| ([\w.-]+) \| .* \| (.+) \|$", rows, re.MULTILINE)}


if __name__ == "__main__":
    lines = [
        f"| {package} | {', '.join(uses)} | {licence(package) or NOT_EVERYWHERE[package]} |\n"
        for package, uses in dependencies().items()
    ]
    PAGE.write_text(INTRO + "".join(lines))
