"""Methods: how a ranker learns from feedback. A new one is a file, a row in `METHODS`, and a section in the docs."""

from __future__ import annotations

from typing import Any

from ultr.errors import OptionError, nearest
from ultr.methods.base import Method, MethodInputs
from ultr.methods.lambdarank import LambdaRank
from ultr.methods.pointwise import Pointwise
from ultr.methods.position_feature import PositionFeature

__all__ = ["METHODS", "Method", "MethodInputs", "make_method"]

METHODS: dict[str, type[Method]] = {
    "lambdarank": LambdaRank,
    "pointwise": Pointwise,
    "position-feature": PositionFeature,
}


def make_method(name: str, inputs: MethodInputs, **options: Any) -> Method:
    """A method by its name in the table `METHODS`, with the options it takes."""
    if name not in METHODS:
        raise OptionError(f"no method '{name}'", mend=nearest(name, METHODS))
    method = METHODS[name]
    for option in options:
        if option not in method.OPTIONS:
            known = nearest(option, method.OPTIONS) if method.OPTIONS else "it takes none"
            raise OptionError(f"method '{name}' has no option '{option}'", mend=known)
    return method(inputs, **options)
