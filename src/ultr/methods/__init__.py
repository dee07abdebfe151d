"""Methods: how a ranker learns from feedback. A new one is a file, a row in `METHODS`, and a section in the docs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ultr.errors import OptionError, nearest
from ultr.labels import Label
from ultr.methods.affine import Affine
from ultr.methods.base import Method, MethodInputs
from ultr.methods.dla import DLA
from ultr.methods.ipw import IPWListwise, IPWPointwise
from ultr.methods.lambdarank import LambdaRank
from ultr.methods.pairwise_debias import PairwiseDebias
from ultr.methods.pairwise_em import PairwiseEM
from ultr.methods.pointwise import Pointwise
from ultr.methods.position_feature import PositionFeature
from ultr.methods.regression_em import RegressionEM
from ultr.methods.towers import PalClick, PalClickDwell, PalSynthesize, SumClick, SumSynthesize
from ultr.methods.trees import TREE_METHODS, TreeMethod
from ultr.rankers.boosters import is_trees

__all__ = [
    "METHODS",
    "TREE_METHODS",
    "Method",
    "MethodInputs",
    "TreeMethod",
    "make_method",
    "make_tree_method",
    "parse_options",
    "thresholds",
]

METHODS: dict[str, type[Method]] = {
    "affine": Affine,
    "dla": DLA,
    "ipw-listwise": IPWListwise,
    "ipw-pointwise": IPWPointwise,
    "lambdarank": LambdaRank,
    "pairwise-debias": PairwiseDebias,
    "pairwise-em": PairwiseEM,
    "pal-click": PalClick,
    "pal-click-dwell": PalClickDwell,
    "pal-synthesize": PalSynthesize,
    "pointwise": Pointwise,
    "position-feature": PositionFeature,
    "regression-em": RegressionEM,
    "sum-click": SumClick,
    "sum-synthesize": SumSynthesize,
}


def _method(name: str, ranker: str = "mlp") -> type[Method] | type[TreeMethod]:
    table: Mapping[str, type[Method] | type[TreeMethod]] = TREE_METHODS if is_trees(ranker) else METHODS
    if name not in table:
        what = f"no method '{name}'" + (f" for {ranker}" if name in METHODS else "")
        raise OptionError(what, mend=nearest(name, table))
    return table[name]


def thresholds(name: str, label: str, options: Mapping[str, Any], *, ranker: str = "mlp") -> bool:
    """Whether a method takes of this label no more than whether it is above zero."""
    if Label(label).expression == "click":
        return False
    if options.get("labels") == "click":
        return True
    return _method(name, ranker).CLICKS_ALONE and options.get("labels") != "values"


def parse_options(
    name: str, texts: Iterable[str], *, beside: Iterable[str] = (), ranker: str = "mlp"
) -> dict[str, Any]:
    """Options of a method from texts that read key=value; `beside` are options of others that may have been meant."""
    known, found = _method(name, ranker).OPTIONS, {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise OptionError("an option of a method reads key=value", got=f"'{text}'")
        if key not in known:
            mend = nearest(key, [*beside, *known]) if known or beside else "it takes none"
            raise OptionError(f"method '{name}' has no option '{key}'", mend=mend)
        found[key] = known[key](value)
    return found


def make_method(name: str, inputs: MethodInputs, **options: Any) -> Method:
    """A method by its name in the table `METHODS`, with the options it takes."""
    given = _read(name, options, "mlp")
    return METHODS[name](inputs, **given)


def make_tree_method(name: str, inputs: MethodInputs, **options: Any) -> TreeMethod:
    """A method by its name in the table `TREE_METHODS`, with the options it takes."""
    given = _read(name, options, inputs.ranker)
    return TREE_METHODS[name](inputs, **given)


def _read(name: str, options: Mapping[str, Any], ranker: str) -> dict[str, Any]:
    texts = {key: "+".join(value) if isinstance(value, list | tuple) else value for key, value in options.items()}
    return parse_options(name, (f"{key}={value}" for key, value in texts.items()), ranker=ranker)
