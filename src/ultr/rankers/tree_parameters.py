"""The parameters of LightGBM and XGBoost that a user sets: parse and check them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ultr.errors import OptionError, nearest
from ultr.rankers.boosters import BOOSTERS, Boosting, TreeRows, tree_library


def check_parameters(ranker: str, parameters: Mapping[str, Any], *, features: int = 1) -> None:
    """Raise an error if the library of a ranker is not installed, or if a parameter is reserved or rejected by it."""
    kind = BOOSTERS[ranker]
    tree_library(ranker)
    names = _names_of_lightgbm() if ranker == "lightgbm" else {}
    for name, value in parameters.items():
        if names and name not in names:
            raise OptionError(f"lightgbm has no parameter '{name}'", hint=nearest(name, names))
        parameter = names.get(name, name)
        if parameter in kind.RESERVED:
            hint = "use --method, --lr, --steps, --patience, --seed or --select instead"
            raise OptionError(f"'{name}' of {kind.LIBRARY} cannot be set as a parameter", hint=hint)
        if parameter in ("boosting", "booster") and value not in ("gbdt", "gbtree", "goss"):
            hint = "remove it: later rounds must not change earlier trees"
            raise OptionError(f"'{name}={value}' cannot be evaluated round by round", hint=hint)
    if parameters:  # try one round on random rows, so that wrong values are found before long work starts
        rng = np.random.default_rng(0)
        rows = TreeRows(rng.random((200, features), np.float32), None, (), label=rng.random(200, np.float32))
        squared = {"objective": "regression" if ranker == "lightgbm" else "reg:squarederror"}
        kind.grow(rows, Boosting(1, 0.1, parameters=parameters, library_options=squared), lambda *_: True)


def parse_parameters(texts: Iterable[str]) -> dict[str, Any]:
    """Parse parameters of a tree library from texts key=value; values become numbers where possible."""
    parameters: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (equals and name):
            raise OptionError("a parameter must have the form key=value", got=f"'{text}'", hint="add = and a value")
        try:
            number = float(value)
            parameters[name] = int(value) if number == int(number) and not {".", "e"} & {*value} else number
        except (ValueError, OverflowError):
            parameters[name] = value
    return parameters


def _names_of_lightgbm() -> dict[str, str]:
    """Return LightGBM's parameter for each name and alias of it; empty if the library has no table of aliases."""
    aliases: Any = getattr(tree_library("lightgbm").basic, "_ConfigAliases", None)
    try:
        aliases.get("num_leaves")
        return {name: parameter for parameter, names in aliases.aliases.items() for name in [parameter, *names]}
    except (AttributeError, TypeError):
        return {}
