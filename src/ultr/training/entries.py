"""The rows of a comparison: methods with their options, and the settings that are chosen for each on validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ultr.errors import DataError, OptionError, nearest
from ultr.methods import METHODS, parse_options
from ultr.rankers import RANKERS
from ultr.rankers.boosters import BOOSTERS, is_trees
from ultr.training.config import RunConfig, default_training, with_training


@dataclass(frozen=True)
class Setting:
    """The settings of a method that validation requests choose."""

    lr: float
    dropout: float | None = None  # of the ranker; None: that of the comparison
    max_weight: float | str | None = None  # largest weight of a pair or an item; None: the default of the method
    longer: int = 1  # times the steps of the comparison, for a method that still improves at its last step

    @property
    def name(self) -> str:
        """The name of the folder of the runs with this setting."""
        others = [f"dropout-{self.dropout:g}"] if self.dropout is not None else []
        if self.max_weight is not None:
            limit = self.max_weight if isinstance(self.max_weight, str) else f"{self.max_weight:g}"
            others.append(f"max-weight-{limit}")
        if self.longer > 1:
            others.append(f"longer-{self.longer}")
        return "-".join([f"lr-{self.lr:g}", *others])

    def to_json(self) -> dict[str, Any]:
        """Return the values that are not the default."""
        default = Setting(self.lr)
        return {name: value for name, value in asdict(self).items() if name == "lr" or value != getattr(default, name)}

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> Setting:
        """Return the setting in a row of a comparison.json."""
        try:
            dropout, limit = row.get("dropout"), row.get("max_weight")
            return Setting(
                float(row["lr"]),
                None if dropout is None else float(dropout),
                limit if limit in (None, "none") else float(limit),
                int(row.get("longer", 1)),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            what = f"a row of the comparison has no valid setting ({error})"
            raise DataError(what, hint="run ultr compare again") from error


@dataclass(frozen=True)
class Entry:
    """A row of a comparison: a method and its options, separated by colons, such as `pairwise-em:loss=opt`."""

    text: str
    method: str
    learn_from: str
    options: Mapping[str, Any]
    ranker: str = ""  # empty: the ranker of the comparison

    @staticmethod
    def parse(text: str, ranker: str = "mlp") -> Entry:
        """Parse the text of a row, such as `lambdarank:ranker=lightgbm`; `ranker` is used if the text names none."""
        name, _, rest = text.strip().partition(":")
        parts = [part for part in rest.split(":") if part]
        method_options = [part for part in parts if not part.startswith(("from=", "ranker="))]
        learn_from = [part.removeprefix("from=") for part in parts if part.startswith("from=")]
        rankers = [part.removeprefix("ranker=") for part in parts if part.startswith("ranker=")]
        names = [*RANKERS, *BOOSTERS]
        if rankers and rankers[-1] not in names:
            raise OptionError(f"no ranker '{rankers[-1]}'", hint=nearest(rankers[-1], names))
        row_ranker = rankers[-1] if rankers else ""
        options = parse_options(name, method_options, others=["from", "ranker"], ranker=row_ranker or ranker)
        return Entry(text.strip(), name, learn_from[-1] if learn_from else "feedback", options, row_ranker)

    def config(self, base: RunConfig, setting: Setting, seed: int) -> RunConfig:
        """Return the configuration of a run of this method with a setting."""
        ranker = {} if self.ranker in ("", base.ranker) else {"ranker": self.ranker, "ranker_options": {}}
        options = {"method": self.method, "method_options": self.options, "learn_from": self.learn_from, **ranker}
        config = replace(base, **options)  # type: ignore[arg-type]
        if is_trees(config.ranker) != is_trees(base.ranker):  # trees have fewer, longer steps (rounds)
            default = default_training(config.ranker)
            budget = {name: getattr(default, name) for name in ("steps", "evaluate_every", "patience")}
            config = with_training(config, **budget)
        if setting.dropout is not None:
            config = replace(config, ranker_options={**config.ranker_options, "dropout": setting.dropout})
        if setting.max_weight is not None:
            config = replace(config, method_options={**config.method_options, "max_weight": setting.max_weight})
        return with_training(config, lr=setting.lr, seed=seed)

    def tuned(self, base: RunConfig) -> tuple[str, ...]:
        """Return the names of what can be chosen for this method: the learning rate, for networks also others."""
        if is_trees(self.ranker or base.ranker):
            return ("lr",)
        kind, corrects = METHODS[self.method], self.learn_from != "truth"
        names = ["lr"] + ["dropout"] * kind.has_dropout(self.options)
        return (*names, *(["max_weight"] if corrects and kind.limits_weights(self.options) else []))

    def steps(self, base: RunConfig) -> int:
        """Return the largest number of steps of the ranker, so that all methods have as many steps in total.

        A method with a bias stage has `bias_steps` of them for its bias model.
        """
        config = self.config(base, Setting(base.training.lr), 0)
        steps, bias_steps = config.training.steps, config.training.bias_steps
        if is_trees(config.ranker):
            return steps
        has_bias_stage = METHODS[self.method].has_bias_stage(self.options) and self.learn_from != "truth"
        return steps if has_bias_stage else steps + bias_steps


def run_folder(out: Path, entry: Entry, setting: Setting, seed: int) -> Path:
    """Return the folder of a run below the folder of its comparison."""
    safe = "".join(c if c.isalnum() or c in "-=." else "_" for c in entry.text)
    return out / "runs" / safe / setting.name / f"seed-{seed}"
