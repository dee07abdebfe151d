"""Methods: how a ranker learns from feedback. A new one is a file, a row in `METHODS`, and a section in the docs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ultr.errors import OptionError, nearest
from ultr.methods.base import Method, MethodInputs
from ultr.methods.lambdarank import LambdaRank
from ultr.methods.pairwise_em import PairwiseEM
from ultr.methods.pointwise import Pointwise
from ultr.methods.position_feature import PositionFeature

__all__ = ["METHODS", "Method", "MethodInputs", "make_method", "parse_options"]

METHODS: dict[str, type[Method]] = {
    "lambdarank": LambdaRank,
    "pairwise-em": PairwiseEM,
    "pointwise": Pointwise,
    "position-feature": PositionFeature,
}


def parse_options(name: str, texts: Iterable[str], *, beside: Iterable[str] = ()) -> dict[str, Any]:
    """Options of a method from texts that read key=value; `beside` are options of others that may have been meant."""
    if name not in METHODS:
        raise OptionError(f"no method '{name}'", mend=nearest(name, METHODS))
    known, found = METHODS[name].OPTIONS, {}
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
    given = parse_options(name, (f"{key}={value}" for key, value in options.items()))
    return METHODS[name](inputs, **given)
