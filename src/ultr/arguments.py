"""What callers pass, held against the types that signatures and fields say: here once, so that no function has to."""

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
from typing import Annotated, Any, Literal, NamedTuple, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from ultr.errors import DataError, OptionError

P = ParamSpec("P")
R = TypeVar("R")
WIDEST = 2**63  # whole numbers are of 64 bits
LONGEST_NAME = 255  # of a file, in bytes
WORDS = {int: "whole number", float: "number", str: "text", Path: "path"}


class Within(NamedTuple):
    """Bounds of a number."""

    low: int
    high: int


Seed = Annotated[int, Within(0, WIDEST - 2)]


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Refuse in words what is not of the type that the signature says.

    What is said to be an array may be anything like one, and reaches the function as an array of numbers.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        given, hints = signature.bind(*args, **kwargs), _hints(function)
        for name, value in given.arguments.items():
            if name in hints and signature.parameters[name].kind is not inspect.Parameter.VAR_KEYWORD:
                given.arguments[name] = taken(name, value, hints[name])
        return function(*given.args, **given.kwargs)

    return call


def check_fields(instance: Any) -> None:
    """The same for the fields of a dataclass; numbers of NumPy become Python's, which can be written as JSON."""
    kind: Any = type(instance)
    hints = _hints(kind)
    for field in fields(instance):
        value = getattr(instance, field.name)
        if (found := taken(field.name, value, hints[field.name])) is not value:
            object.__setattr__(instance, field.name, found)


@functools.cache
def _hints(of: Any) -> dict[str, Any]:
    return get_type_hints(of, include_extras=True)


def taken(name: str, value: Any, kind: Any) -> Any:
    """A value as the type has it, or a refusal."""
    kinds = _alternatives(kind)
    if np.ndarray in kinds and not (value is None and type(None) in kinds):
        return as_numbers(name, value)
    if not any(_fits(value, one) for one in kinds):
        words = " or ".join(dict.fromkeys(_words(one) for one in kinds))
        raise OptionError(f"'{name}' should be {words}", got=_brief(value))
    if Path in kinds and isinstance(value, str | Path):
        _check_path(name, value)
    return value.item() if isinstance(value, np.generic) else value


def _check_path(name: str, path: str | Path) -> None:
    """Refuse what no file can be called; asked whether it exists, Python raises this or that."""
    try:
        longest = max((len(os.fsencode(part)) for part in Path(path).parts), default=0)
    except UnicodeEncodeError:
        longest = LONGEST_NAME + 1
    if "\0" in str(path) or longest > LONGEST_NAME:
        raise OptionError(f"'{name}' cannot be the path of a file", got=_brief(str(path)), mend="shorten or rename it")


def as_numbers(name: str, values: Any) -> np.ndarray:
    """Whatever is like an array, if it holds numbers."""
    mend = "pass an array of numbers"
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise DataError(f"'{name}' is no array ({_line(error)})", got=type(values).__name__, mend=mend) from error
    if array.dtype.kind not in "biuf":
        raise DataError(f"'{name}' should hold numbers", got=f"{array.dtype}: {_brief(values)}", mend=mend)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


@functools.cache
def _alternatives(kind: Any) -> tuple[Any, ...]:
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(one for part in get_args(kind) for one in _alternatives(part))
    return (kind,)


def _fits(value: Any, kind: Any) -> bool:
    origin, inner = get_origin(kind), get_args(kind)
    if kind in (Any, object) or isinstance(kind, TypeVar):
        return True
    if origin is Annotated:
        return _fits(value, inner[0]) and inner[1].low <= value <= inner[1].high
    if origin is Literal:
        return isinstance(value, str)  # which one is the function's to say
    if origin is collections.abc.Callable:
        return callable(value)
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and _all_fit(value, inner[0]) and _all_fit(value.values(), inner[1])
    if origin is not None:  # of one thing after another
        listed = hasattr(value, "__len__") and getattr(value, "ndim", 1) == 1
        return listed and not isinstance(value, str | bytes | Mapping) and _all_fit(value, inner[0])
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
        return " or ".join(map(repr, inner))
    if origin is collections.abc.Callable:
        return "a function"
    if origin is not None:
        held = [" or ".join(_words(one, many=True) for one in _alternatives(part)) for part in inner if part != ...]
        return f"a mapping from {held[0]} to {held[1]}" if issubclass(origin, Mapping) else f"a list of {held[0]}"
    if kind in (Any, object, bool, type(None)):
        return {bool: "True or False", type(None): "None"}.get(kind, "anything")
    word = WORDS.get(kind, kind.__name__)
    return f"{word}s" if many else f"a {word}"


def _brief(value: Any) -> str:
    return f"{type(value).__name__} {' '.join(reprlib.repr(value).split())}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
