"""The results of experiments in the documentation: a page and plots, all made from one JSON file.

NAME.json    the numbers, tables, plots and claims, and how they were made: command, commit, date and machine
NAME.md      the page, with NAME-1.svg, NAME-2.svg, ...
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ultr._version import __version__
from ultr.experiments.lab import Claim, ExperimentResult, claims_text, table_text
from ultr.report.page import Grid, Part, Plot, Table, Text
from ultr.report.plots import svg
from ultr.utils.files import atomic_path
from ultr.utils.jsonfiles import write_json

COMMIT = "GIT_COMMIT"  # environment variable with the commit, for a copy of the sources without their history


def write_docs(result: ExperimentResult, folder: Path, command: str) -> None:
    """Write the page of an experiment, its plots, and the JSON file that they are made from."""
    folder.mkdir(parents=True, exist_ok=True)
    content = as_json(result, provenance(command))
    write_json(folder / f"{result.name}.json", content)
    files = pages(content)
    for old in folder.glob(f"{result.name}-*.svg"):
        if old.name not in files:  # of a result with more plots
            old.unlink()
    for name, text in files.items():
        with atomic_path(folder / name, overwrite=True) as temporary:
            temporary.write_text(text, encoding="utf-8")


def provenance(command: str) -> dict[str, str]:
    """Return how results are made: command, version, commit, date and machine."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {
        "command": command,
        "version": __version__,
        "commit": _commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{gpu}, {os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}",
    }


def _commit() -> str:
    """Return the commit of the sources, of which a checkout has the history next to its folder `src`."""
    if given := os.environ.get(COMMIT):
        return given
    history = Path(__file__).parents[3] / ".git"
    try:
        head = (history / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head[:12]
        branch = head.removeprefix("ref: ")
        if (history / branch).is_file():
            return (history / branch).read_text().strip()[:12]
        packed = (line.split(" ") for line in (history / "packed-refs").read_text().splitlines())
        return next((words[0][:12] for words in packed if words[1:] == [branch]), "unknown")
    except OSError:
        return "unknown"


def as_json(result: ExperimentResult, made: Mapping[str, str]) -> dict[str, Any]:
    """Return an experiment's result as JSON values from which `pages` makes its page and plots."""
    sections = [{"title": section.title, "parts": [*_parts(section.parts)]} for section in result.sections]
    return {"name": result.name, "about": result.about, "made": dict(made), **result.to_json(), "sections": sections}


def _parts(parts: Sequence[Part]) -> Iterator[dict[str, Any]]:
    for part in parts:
        if isinstance(part, Grid):
            yield from _parts(part.plots)
        elif isinstance(part, Text | Table | Plot):
            yield {"kind": part.KIND, **asdict(part)}


def pages(content: Mapping[str, Any]) -> dict[str, str]:
    """Return file name -> text of the page and plots of an experiment, from the content of its JSON file."""
    made, name = content["made"], content["name"]
    blocks = [
        f"# {content['title']}",
        content["about"],
        f"Made by `{made['command']}` from commit {made['commit']} (ultr {made['version']}) on {made['date']}: "
        f"{made['machine']}. The numbers are in [{name}.json]({name}.json).",
    ]
    files: dict[str, str] = {}
    for section in content["sections"]:
        blocks.append(f"## {section['title']}")
        for part in section["parts"]:
            if part["kind"] == Plot.KIND:
                file = f"{name}-{len(files) + 1}.svg"
                files[file] = svg(part["title"], part["figure"], part["height"])
                blocks += [f"![{part['title']}]({file})", *([part["caption"]] if part["caption"] else [])]
            elif part["kind"] == Table.KIND:
                blocks += [*([part["caption"]] if part["caption"] else []), table_text(part["head"], part["rows"])]
            else:
                blocks.append(part["text"])
    blocks += [f"{data} is missing: {why}" for data, why in content["absent"].items()]
    if content["claims"]:
        blocks.append(claims_text([Claim(**claim) for claim in content["claims"]]))
    return {f"{name}.md": "\n\n".join(blocks) + "\n", **files}
