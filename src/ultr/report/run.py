"""A finished run, as far as pages look at it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ultr.checkpoint import read_json, read_metrics
from ultr.errors import AbsentError
from ultr.outcomes import Outcome, read_outcome
from ultr.preparing import RunConfig
from ultr.runs import best_evaluation

BEFORE = "the logged ranking"
OLDER = "The run was trained before this was kept; train it again to see it."


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run, as far as it is looked at."""

    name: str
    folder: Path
    config: RunConfig
    versions: Mapping[str, str]
    metrics: list[dict[str, Any]]
    bias: Mapping[str, Any] | None
    outcome: Outcome | None

    @cached_property
    def selected(self) -> tuple[str, float, int]:
        """The selection metric, its best value and the step that was kept."""
        name, line = best_evaluation(self.folder)
        return name, float(line[name]), int(line["step"])

    @property
    def warnings(self) -> list[str]:
        return [f"{w['name']}: {w['what']}" for w in (self.bias or {}).get("warnings", [])]


def load_runs(folders: Sequence[Path]) -> list[Run]:
    """Finished runs under names that tell them apart."""
    return [load_run(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]


def load_run(folder: Path, name: str) -> Run:
    if not (folder / "config.json").is_file():
        raise AbsentError("there is no run here", where=folder, mend="name the folder that ultr train wrote")
    if not (folder / "model").is_dir():
        raise AbsentError("the run is not finished", where=folder, mend="go on with ultr train --resume")
    content = read_json(folder / "config.json")
    config = RunConfig.from_json(content, where=folder)
    versions: dict[str, str] = {key: content[key] for key in ("ultr", "torch", "lightgbm", "xgboost") if key in content}
    bias = read_json(folder / "bias.json") if (folder / "bias.json").is_file() else None
    return Run(name, folder, config, versions, read_metrics(folder), bias, read_outcome(folder))


def _names(folders: Sequence[Path]) -> list[str]:
    """The last parts of paths, as many as tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for last in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-last:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({i})" for i, name in enumerate(names, start=1)]
