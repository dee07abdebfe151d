"""Checks of function arguments and dataclass fields against their type hints."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import os
import reprlib
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from numbers import Integral
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np

from ultr.errors import DataError, OptionError, closest

if TYPE_CHECKING:
    from pydantic import ValidationError

P = ParamSpec("P")
R = TypeVar("R")
WIDEST = 2**63  # whole numbers must be below this, and at least -WIDEST: 64 bits
LONGEST_NAME = 255  # most bytes in the name of a file
WORDS = {int: "whole number", float: "number", str: "string", Path: "path"}


class Within(NamedTuple):
    """The inclusive bounds of a number, for the type hint `Annotated[int, Within(low, high)]`."""

    low: int
    high: int


Seed = Annotated[int, Within(0, WIDEST - 2)]


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that each call checks its arguments against the type hints; a wrong one is an OptionError.

    For a parameter with the type hint `np.ndarray`, callers may pass anything array-like; it is converted to an array.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        bound, hints = signature.bind(*args, **kwargs), _hints(function)
        for name, value in bound.arguments.items():
            if name in hints and signature.parameters[name].kind is not inspect.Parameter.VAR_KEYWORD:
                bound.arguments[name] = check_value(name, value, hints[name])
        return function(*bound.args, **bound.kwargs)

    return call


def check_fields(instance: Any) -> None:
    """Check the fields of a dataclass against their type hints; convert NumPy numbers to Python numbers, for JSON."""
    kind: Any = type(instance)
    hints = _hints(kind)
    for field in fields(instance):
        value = getattr(instance, field.name)
        if (accepted := check_value(field.name, value, hints[field.name])) is not value:
            object.__setattr__(instance, field.name, accepted)


@functools.cache
def _hints(of: Any) -> dict[str, Any]:
    return get_type_hints(of, include_extras=True)


def check_value(name: str, value: Any, kind: Any) -> Any:
    """Return `value`, with arrays and NumPy numbers converted; raise OptionError if it does not fit the hint `kind`."""
    kinds = _alternatives(kind)
    if np.ndarray in kinds and not (value is None and type(None) in kinds):
        return as_numbers(name, value)
    if not any(_fits(value, one) for one in kinds):
        words = " or ".join(dict.fromkeys(_words(one) for one in kinds))
        choices = [choice for one in kinds if get_origin(one) is Literal for choice in get_args(one)]
        if choices and isinstance(value, str):
            raise OptionError(f"'{name}' must be {words}", got=reprlib.repr(value), hint=closest(value, choices))
        raise OptionError(f"'{name}' must be {words}", got=_brief(value))
    if Path in kinds and isinstance(value, str | Path):
        _check_path(name, value)
    return value.item() if isinstance(value, np.generic) else value


def _check_path(name: str, path: str | Path) -> None:
    """Raise OptionError if no file can have this path: it contains NUL, a part is too long, or it cannot be encoded."""
    try:
        longest = max((len(os.fsencode(part)) for part in Path(path).parts), default=0)
    except UnicodeEncodeError:
        longest = LONGEST_NAME + 1
    if "\0" in str(path) or longest > LONGEST_NAME:
        raise OptionError(f"'{name}' cannot be the path of a file", got=_brief(str(path)), hint="shorten or rename it")


def as_numbers(name: str, values: Any) -> np.ndarray:
    """Return array-like values as an array; raise DataError if they are not numbers."""
    hint = "pass an array of numbers"
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise DataError(f"'{name}' is not an array ({_line(error)})", got=type(values).__name__, hint=hint) from error
    if array.dtype.kind not in "biuf":
        raise DataError(f"'{name}' must hold numbers", got=f"{array.dtype}: {_brief(values)}", hint=hint)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


@functools.cache
def _alternatives(kind: Any) -> tuple[Any, ...]:
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(one for part in get_args(kind) for one in _alternatives(part))
    return (kind,)


@functools.cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind), get_args(kind)


def _fits(value: Any, kind: Any) -> bool:
    origin, inner = _parts(kind)
    if kind in (Any, object) or isinstance(kind, TypeVar):
        return True
    if origin is Annotated:
        return _fits(value, inner[0]) and inner[1].low <= value <= inner[1].high
    if origin is Literal:
        return isinstance(value, str) and value in inner
    if origin is collections.abc.Callable:
        return callable(value)
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and _all_fit(value, inner[0]) and _all_fit(value.values(), inner[1])
    if origin is not None:  # a sequence
        is_list = hasattr(value, "__len__") and getattr(value, "ndim", 1) == 1
        return is_list and not isinstance(value, str | bytes | Mapping) and _all_fit(value, inner[0])
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool) and -WIDEST <= int(value) < WIDEST
    if kind is float:
        return isinstance(value, float | np.floating) or _fits(value, int)
    return isinstance(value, (bool, np.bool_) if kind is bool else kind)


def _all_fit(values: Iterable[Any], kind: Any) -> bool:
    kinds = _alternatives(kind)
    return all(any(_fits(value, one) for one in kinds) for value in values)


def _words(kind: Any, *, many: bool = False) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return f"{_words(inner[0])} from {inner[1].low} to {inner[1].high}"
    if origin is Literal:
        return f"one of {', '.join(map(repr, inner))}"
    if origin is collections.abc.Callable:
        return "a function"
    if origin is not None:
        parts = [" or ".join(_words(one, many=True) for one in _alternatives(part)) for part in inner if part != ...]
        return f"a mapping from {parts[0]} to {parts[1]}" if issubclass(origin, Mapping) else f"a list of {parts[0]}"
    if kind in (Any, object, bool, type(None)):
        return {bool: "True or False", type(None): "None"}.get(kind, "anything")
    word = WORDS.get(kind, kind.__name__)
    return f"{word}s" if many else f"a {word}"


def _brief(value: Any) -> str:
    return f"{type(value).__name__} {' '.join(reprlib.repr(value).split())}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def as_seed(random_state: Any) -> int:
    """Return the seed that scikit-learn's `random_state` stands for: a whole number, a generator, or None."""
    from sklearn.utils import check_random_state

    try:
        is_seed = isinstance(random_state, int | np.integer)
        return int(random_state if is_seed else check_random_state(random_state).randint(1 << 31))
    except (TypeError, ValueError) as error:
        raise OptionError("'random_state' is not a whole number", got=repr(random_state)[:100]) from error


def requirement(error: ValidationError) -> str:
    """Return what pydantic required of a value, in words that follow "must be", such as "at least 0"."""
    return " or ".join(dict.fromkeys(_required(problem) for problem in error.errors()))


def _required(problem: Mapping[str, Any]) -> str:
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "literal_error":
        values = str(context["expected"]).replace("'", "").replace(" or ", ", ")
        return f"one of {values}" if "," in values else values
    if kind == "too_short":
        return f"a list of at least {context['min_length']}"
    for bound, words in (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below")):
        if bound in context:
            return f"{words} {context[bound]:g}"
    for start, words in (
        ("float", "a number"),
        ("finite", "finite"),
        ("int", "a whole number"),
        ("bool", "true or false"),
    ):
        if kind.startswith(start):
            return words
    return str(problem["msg"]).removeprefix("Input ").removeprefix("Value ").removeprefix("should be ")
