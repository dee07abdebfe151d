"""Methods that learn a ranker from feedback. To add one, write a module, a row in `METHODS` and its docs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ultr.errors import OptionError, nearest
from ultr.log.labels import Label
from ultr.methods.affine import Affine
from ultr.methods.base import Method, MethodInputs
from ultr.methods.click_models import CCM, DBN, SDBN, UBM, Cascade
from ultr.methods.direct import Direct
from ultr.methods.dla import DLA
from ultr.methods.doubly_robust import DoublyRobust
from ultr.methods.ipw import IPWLambdaLoss, IPWListwise, IPWPointwise
from ultr.methods.lambdarank import LambdaRank
from ultr.methods.pairwise_debias import PairwiseDebias
from ultr.methods.pairwise_em import PairwiseEM
from ultr.methods.plackett_luce import PLRank
from ultr.methods.pointwise import Pointwise
from ultr.methods.position_feature import PositionFeature
from ultr.methods.regression_em import RegressionEM
from ultr.methods.safe import PRPO, SafeIPW
from ultr.methods.towers import PalClick, PalClickDwell, PalSynthesize, SumClick, SumSynthesize
from ultr.methods.trees import TREE_METHODS, TreeMethod
from ultr.methods.upe import UPE
from ultr.rankers.boosters import is_trees

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


def learns_alone(name: str, *, ranker: str = "mlp") -> bool:
    """Return True if the method `name` can learn from requests with one item, as pointwise methods do."""
    return _method(name, ranker).LEARNS_ALONE


def thresholds(name: str, label: str, options: Mapping[str, Any], *, ranker: str = "mlp") -> bool:
    """Return True if the method `name` uses only whether this label is above zero, and not its value."""
    if Label(label).expression == "click":
        return False
    if options.get("labels") == "click":
        return True
    return _method(name, ranker).CLICKS_ALONE and options.get("labels") != "values"


def parse_options(
    name: str, texts: Iterable[str], *, others: Iterable[str] = (), ranker: str = "mlp"
) -> dict[str, Any]:
    """Parse options of the method `name` from texts key=value; the hint for an unknown key also suggests `others`."""
    readers, options = _method(name, ranker).OPTIONS, {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise OptionError("an option of a method must have the form key=value", got=f"'{text}'")
        if key not in readers:
            hint = nearest(key, [*others, *readers]) if readers or others else "remove it: this method has no options"
            raise OptionError(f"method '{name}' has no option '{key}'", hint=hint)
        options[key] = readers[key](value)
    return options


def make_method(name: str, inputs: MethodInputs, **options: Any) -> Method:
    """Make the method for networks that has this name in the table `METHODS`."""
    checked = _read(name, options, "mlp")
    return METHODS[name](inputs, **checked)


def make_tree_method(name: str, inputs: MethodInputs, **options: Any) -> TreeMethod:
    """Make the method for boosted trees that has this name in the table `TREE_METHODS`."""
    checked = _read(name, options, inputs.ranker)
    return TREE_METHODS[name](inputs, **checked)


def _read(name: str, options: Mapping[str, Any], ranker: str) -> dict[str, Any]:
    texts = {key: "+".join(value) if isinstance(value, list | tuple) else value for key, value in options.items()}
    return parse_options(name, (f"{key}={value}" for key, value in texts.items()), ranker=ranker)
