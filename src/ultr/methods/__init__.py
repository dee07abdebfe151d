"""Methods that learn a ranker from feedback. To add one, write a module, a row in `METHODS` and its docs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ultr.errors import OptionError, nearest
from ultr.log.labels import Label
from ultr.methods.base import Method, MethodInputs
from ultr.methods.click_models import CCM, DBN, DCM, SDBN, UBM, Cascade
from ultr.methods.counterfactual import (
    DLA,
    UPE,
    Affine,
    DoublyRobust,
    IPWLambdaLoss,
    IPWListwise,
    IPWPointwise,
    LambdaRank,
    PairwiseDebias,
    Pointwise,
)
from ultr.methods.direct import Direct, RegressionEM
from ultr.methods.pairwise_em import PairwiseEM
from ultr.methods.plackett_luce import PRPO, PLRank, SafeIPW
from ultr.methods.towers import PalClick, PalClickDwell, PalSynthesize, PositionFeature, SumClick, SumSynthesize
from ultr.methods.trees import TREE_METHODS, TreeMethod
from ultr.rankers.boosters import is_trees
from ultr.utils.arguments import requirement

__all__ = [
    "METHODS",
    "TREE_METHODS",
    "Method",
    "MethodInputs",
    "TreeMethod",
    "learns_alone",
    "make_method",
    "make_tree_method",
    "parse_options",
    "thresholds",
]

METHODS: dict[str, type[Method]] = {
    "affine": Affine,
    "cascade": Cascade,
    "ccm": CCM,
    "dbn": DBN,
    "dcm": DCM,
    "direct": Direct,
    "dla": DLA,
    "doubly-robust": DoublyRobust,
    "ipw-lambdaloss": IPWLambdaLoss,
    "ipw-listwise": IPWListwise,
    "ipw-pointwise": IPWPointwise,
    "lambdarank": LambdaRank,
    "pairwise-debias": PairwiseDebias,
    "pairwise-em": PairwiseEM,
    "pal-click": PalClick,
    "pal-click-dwell": PalClickDwell,
    "pal-synthesize": PalSynthesize,
    "pl-rank": PLRank,
    "pointwise": Pointwise,
    "position-feature": PositionFeature,
    "prpo": PRPO,
    "regression-em": RegressionEM,
    "safe-ipw": SafeIPW,
    "sdbn": SDBN,
    "sum-click": SumClick,
    "sum-synthesize": SumSynthesize,
    "ubm": UBM,
    "upe": UPE,
}


def _method(name: str, ranker: str = "mlp") -> type[Method] | type[TreeMethod]:
    table: Mapping[str, type[Method] | type[TreeMethod]] = TREE_METHODS if is_trees(ranker) else METHODS
    if name not in table:
        what = f"no method '{name}'" + (f" for {ranker}" if name in METHODS else "")
        raise OptionError(what, hint=nearest(name, table))
    return table[name]


def learns_alone(name: str, options: Mapping[str, Any], *, ranker: str = "mlp") -> bool:
    """Return True if the method `name` can learn from requests with one item, as pointwise methods do."""
    return _method(name, ranker).LEARNS_ALONE and options.get("loss") != "listwise"


def thresholds(name: str, label: str, options: Mapping[str, Any], *, ranker: str = "mlp") -> bool:
    """Return True if the method `name` uses only whether this label is above zero, and not its value."""
    if Label(label).expression == "click":
        return False
    if options.get("labels") == "click":
        return True
    return _method(name, ranker).CLICKS_ALONE and options.get("labels") != "values"


def parse_options(
    name: str, options: Mapping[str, Any], *, others: Iterable[str] = (), ranker: str = "mlp"
) -> dict[str, Any]:
    """Check options of the method `name`, and convert texts to their types; None means that an option is not set.

    The hint for an unknown option also suggests `others`.
    """
    types, parsed = _method(name, ranker).OPTIONS, {}
    for key, value in options.items():
        if key not in types:
            hint = nearest(key, [*others, *types]) if types or others else "remove it: this method has no options"
            raise OptionError(f"method '{name}' has no option '{key}'", hint=hint)
        if value is not None:
            try:
                parsed[key] = TypeAdapter(types[key]).validate_python(value)
            except ValidationError as error:
                raise OptionError(f"'{key}' must be {requirement(error)}", got=repr(value)[:200]) from error
    return parsed


def make_method(name: str, inputs: MethodInputs, **options: Any) -> Method:
    """Make the method for networks that has this name in the table `METHODS`."""
    parsed = parse_options(name, options)
    return METHODS[name](inputs, **parsed)


def make_tree_method(name: str, inputs: MethodInputs, **options: Any) -> TreeMethod:
    """Make the method for boosted trees that has this name in the table `TREE_METHODS`."""
    parsed = parse_options(name, options, ranker=inputs.ranker)
    return TREE_METHODS[name](inputs, **parsed)
