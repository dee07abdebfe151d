"""Load finished runs from their run directories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ultr.errors import AbsentError
from ultr.evaluation.importance import FeatureImportance
from ultr.training.checkpoints import read_metrics
from ultr.training.config import RunConfig
from ultr.training.outcome import RunOutcome, read_outcome, value_of_run
from ultr.utils.arguments import checked
from ultr.utils.html import facts_html
from ultr.utils.jsonfiles import read_json

JUDGE_FILE = "judge/judge.json"
OLDER = "An older version of ultr trained this run and did not save these data; train it again to see them."


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run, with the content of its files; `name` is its name on the page."""

    name: str
    folder: Path
    config: RunConfig
    versions: Mapping[str, str]
    metrics: list[dict[str, Any]]
    bias: Mapping[str, Any] | None
    outcome: RunOutcome | None
    judge: Mapping[str, Any] | None = None  # the description of the model that estimated its off-policy metrics

    @cached_property
    def selected(self) -> tuple[str, float, int]:
        """The name of the selection metric, its value for the saved model, and the best step."""
        return value_of_run(self.folder)

    @property
    def warnings(self) -> list[str]:
        of_data = [] if self.outcome is None else self.outcome.about.get("warnings", [])
        return [f"{w['name']}: {w['what']}" for w in [*of_data, *(self.bias or {}).get("warnings", [])]]

    @property
    def true_theta(self) -> tuple[list[str], list[float]] | None:
        """Positions and their true examination by simulated users; None if users were not simulated."""
        if self.outcome is None or "true_theta" not in self.outcome.about["data"]:
            return None
        facts = self.outcome.about["data"]
        return facts["by_position"]["positions"], facts["true_theta"]

    def _repr_html_(self) -> str:
        config, (metric, value, step) = self.config, self.selected
        facts = {
            f"{metric} on validation": f"{value:.4f} (step {step:,})",
            "method, ranker": f"{config.method}, {config.ranker_name}",
            "data": f"{config.data or 'in memory'}{f', users {config.users}' if config.users else ''}",
            "label": config.label,
            "theta from": str((self.bias or {}).get("theta_from", "not estimated")),
        }
        return facts_html(f"Run {self.name}", facts, self.warnings)

    @property
    def importance(self) -> list[FeatureImportance]:
        """The most important features, most important first; empty if the run has not saved them."""
        saved = {} if self.outcome is None else self.outcome.about.get("importance", {})
        return [FeatureImportance(**each) for each in saved.get("features", [])]


def load_runs(folders: Sequence[Path], names: Sequence[str] = ()) -> list[Run]:
    """Load finished runs, each with a different name: one of `names`, or else the name of its folder."""
    return [load_run(folder, name) for folder, name in zip(folders, names or _names(folders), strict=True)]


@checked
def load_run(folder: str | Path, name: str | None = None) -> Run:
    """Load the configuration, metrics, bias and outcome of a finished run; a notebook shows a summary of it.

    `name` is its name in reports (default: that of the folder). `load_model` loads what scores items.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise AbsentError("this folder is not a run", where=folder, hint="pass a folder that ultr train wrote")
    if not (folder / "model").is_dir():
        raise AbsentError("the run is not finished", where=folder, hint="finish it with ultr train --resume")
    content = read_json(folder / "config.json")
    config = RunConfig.from_json(content, where=folder)
    versions: dict[str, str] = {key: content[key] for key in ("ultr", "torch", "lightgbm", "xgboost") if key in content}
    bias, judge = (read_json(path) if path.is_file() else None for path in (folder / "bias.json", folder / JUDGE_FILE))
    return Run(
        name or folder.resolve().name, folder, config, versions, read_metrics(folder), bias, read_outcome(folder), judge
    )


def _names(folders: Sequence[Path]) -> list[str]:
    """Return a name for each folder: the last parts of its path, as many as make all names different."""
    parts = [folder.resolve().parts for folder in folders]
    for last in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-last:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({i})" for i, name in enumerate(names, start=1)]
