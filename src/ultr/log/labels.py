"""Labels to learn from, computed from the actions of users: c = Φ(actions), such as `click + dwell / exp(3)`.

The expression is parsed to a small tree of nodes and never evaluated as code. It may contain

    numbers, action names (`in backquotes` if they have blanks), + - * / ** and unary -, < <= > >= == !=, parentheses,
    exp log log1p sqrt abs (one argument), min max (two or more), clip(x, low, high)

Comparisons give 0 or 1. The same label works on NumPy arrays, on torch tensors and on columns of DuckDB and Spark.
"""

from __future__ import annotations

import ast
import keyword
import operator
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Any

import numpy as np

from ultr.errors import LabelError, nearest
from ultr.utils.arguments import as_numbers

DEFAULT_LABEL = "click + dwell / exp(3)"
CLICKS = ("click", "clicks", "clicked")  # common names of clicks; case is ignored
QUOTED = re.compile(r"`([^`]+)`")
MAX_LENGTH = 1000  # characters of an expression
MAX_DEPTH = 50  # levels of nesting in an expression

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_UNARY = ("exp", "log", "log1p", "sqrt", "abs")
_FUNCTIONS = (*_UNARY, "min", "max", "clip")

# A node of the parsed expression: a function of the array library (NumPy or torch) and the actions, to its values.
_Node = Callable[[Any, Mapping[str, Any]], Any]


def click_label(actions: Iterable[str]) -> str:
    """Return the label that is the click, or else the first action; the default label if there are no actions."""
    names = list(actions)
    action = next((name for name in names if name.lower() in CLICKS), next(iter(names), None))
    if action is None:
        return DEFAULT_LABEL
    plain = action.isidentifier() and not keyword.iskeyword(action) and action not in _FUNCTIONS
    return action if plain else f"`{action}`"


def default_label(actions: Iterable[str]) -> str:
    """Return the label for a log with these actions: `click + dwell / exp(3)` if it has both, else the click alone."""
    names = list(actions)
    return DEFAULT_LABEL if {"click", "dwell"} <= set(names) else click_label(names)


def is_time(action: str) -> bool:
    """Return whether an action has the name of a time that users spent on an item."""
    return "dwell" in action.lower() or "watch" in action.lower()


def weighted_goals(goals: Mapping[str, float] | Iterable[str]) -> tuple[str, ...]:
    """Return the labels of several goals, which may have weights: `{"click": 1, "purchase": 5}`."""
    if not isinstance(goals, Mapping):
        found = tuple(goals)
    elif any(not isinstance(goal, str) for goal in goals):
        raise LabelError("goals must be labels", got=repr(dict(goals))[:200], hint="pass for example {'purchase': 5}")
    elif any(isinstance(w, bool) or not isinstance(w, int | float) or not 0 < w < 1e12 for w in goals.values()):
        raise LabelError("the weights of goals must be numbers above 0", got=repr(dict(goals))[:200])
    else:
        found = tuple(goal if weight == 1 else f"{weight!r} * {_in_sum(goal, '+-')}" for goal, weight in goals.items())
    for goal in found:
        Label(goal)
    return found


def sum_of_goals(goals: Iterable[str]) -> str:
    """Return the label that is the sum of several labels."""
    return " + ".join(_in_sum(goal) for goal in goals)


def _in_sum(goal: str, more: str = "") -> str:
    """Return a label in brackets, if it has an operator that binds less than a sum, or one of `more`."""
    return f"({goal})" if set(goal) & set(f"<>=!{more}") else goal


class Label:
    """A label expression. Call it with actions (name -> array or tensor) to get the labels c, finite and >= 0.

    `actions` are the names in the expression:

        >>> Label("click + dwell / exp(3)").actions
        ('click', 'dwell')
    """

    def __init__(self, expression: str = DEFAULT_LABEL) -> None:
        if not isinstance(expression, str):
            raise LabelError("a label must be a string", got=repr(expression), hint="pass for example 'click'")
        self.expression = expression.strip()
        self._names: dict[str, None] = {}
        self._quoted: dict[str, str] = {}  # identifier -> the name in backquotes that it stands for
        self._node = self._parse()

    @staticmethod
    def of(label: Label | str) -> Label:
        return label if isinstance(label, Label) else Label(label)

    def __repr__(self) -> str:
        return f"Label({self.expression!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Label) and other.expression == self.expression

    def __hash__(self) -> int:
        return hash(self.expression)

    @property
    def actions(self) -> tuple[str, ...]:
        """The actions in the expression, in order of appearance."""
        return tuple(self._names)

    def __call__(self, actions: Mapping[str, Any], *, check: bool = True) -> Any:
        """Return the label of every entry of the actions; `check=False` skips its check, which would wait for a GPU."""
        # Not `checked`: Spark sends this method to its workers by value, and they cannot resolve its type hints.
        if not isinstance(actions, Mapping):
            got, hint = type(actions).__name__, "pass for example {'click': values}"
            raise LabelError("'actions' must be a mapping from names to values", got=got, hint=hint)
        self.check_actions(actions)
        with np.errstate(all="ignore"):  # _check finds values that are not finite
            library, numbers = _as_numbers({name: actions[name] for name in self._names})
            values = self._node(library, numbers)
        if check:
            self._check(values, numbers)
        return values

    def check_actions(self, names: Iterable[str]) -> None:
        """Raise LabelError if an action of the expression is not among these."""
        names = list(names)
        for name in self._names:
            if name not in names:
                hint = f"{nearest(name, names)}; --actions names the columns of actions"
                raise LabelError(f"label '{self.expression}' needs the action '{name}'", hint=hint)

    def on_engine(self, actions: Mapping[str, Any]) -> Any:
        """Return the label as an Ibis expression, given an Ibis column for each action; its values are not checked."""
        return self._node(_Columns, actions)

    def _check(self, values: Any, actions: Mapping[str, Any]) -> None:
        bad = ~((values >= 0) & (values < float("inf")))
        if bool(bad.any()):
            first = int(bad.ravel().nonzero()[0][0])
            inputs = ", ".join(f"{name}={float(actions[name].ravel()[first]):g}" for name in self._names)
            raise LabelError(
                f"label '{self.expression}' must be finite and not negative",
                got=f"{float(values.ravel()[first])} where {inputs} ({int(bad.sum())} such rows)",
                hint="change the expression, e.g. with clip(x, low, high) or max(x, 0)",
            )

    def _parse(self) -> _Node:
        if not self.expression or len(self.expression) > MAX_LENGTH:
            raise LabelError(f"a label must have 1 to {MAX_LENGTH} characters", got=len(self.expression))
        try:
            tree = ast.parse(QUOTED.sub(self._placeholder, self.expression), mode="eval").body
            node = self._build(tree, 0)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise self._error(f"cannot be parsed ({getattr(error, 'msg', error)})") from error
        if not self._names:
            raise self._error("has no action", hint="name at least one, e.g. click")
        return node

    def _placeholder(self, match: re.Match[str]) -> str:
        """Return an identifier that stands for a name in backquotes."""
        self._quoted[identifier := f"__action_{len(self._quoted)}"] = match[1]
        return identifier

    def _error(self, what: str, hint: str | None = None) -> LabelError:
        allowed = f"use numbers, action names, + - * / ** comparisons and {' '.join(_FUNCTIONS)}"
        return LabelError(f"label '{self.expression}' {what}", hint=hint or allowed)

    def _build(self, tree: ast.AST, depth: int) -> _Node:
        if depth > MAX_DEPTH:
            raise self._error(f"is nested deeper than {MAX_DEPTH} levels")
        match tree:
            case ast.Constant(value=bool() | None | str() | bytes() | complex()):
                raise self._error(f"contains {tree.value!r}, which is not a number")
            case ast.Constant(value=int() | float() as number):
                constant = float(number) if abs(number) < 1e300 else float("inf")
                return lambda _, __: constant
            case ast.Name(id=name):
                action = self._quoted.get(name, name)
                self._names[action] = None
                return lambda _, actions: actions[action]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self._build(operand, depth + 1)
                return lambda library, actions: -inner(library, actions)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                apply, a, b = _OPERATORS[type(op)], self._build(left, depth + 1), self._build(right, depth + 1)
                return lambda library, actions: _quiet(apply, a(library, actions), b(library, actions))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
                apply, a, b = _OPERATORS[type(op)], self._build(left, depth + 1), self._build(right, depth + 1)
                return lambda library, actions: _zero_or_one(apply(a(library, actions), b(library, actions)), actions)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                return self._call(name, [self._build(arg, depth + 1) for arg in args])
        raise self._error(f"contains {type(tree).__name__.lower()}, which is not allowed")

    def _call(self, name: str, args: list[_Node]) -> _Node:
        if name not in _FUNCTIONS:
            raise self._error(f"calls '{name}', which is not a known function", hint=nearest(name, _FUNCTIONS))
        usage = {"min": "two or more arguments", "max": "two or more arguments", "clip": "clip(x, low, high)"}
        fits = len(args) == 1 if name in _UNARY else len(args) == 3 if name == "clip" else len(args) >= 2
        if not fits:
            raise self._error(f"calls {name} with {len(args)} arguments", hint=f"use {usage.get(name, 'one argument')}")
        if name == "clip":
            name, args = "min", [self._extreme("max", args[:2]), args[2]]
        return self._unary(name, args[0]) if name in _UNARY else self._extreme(name, args)

    @staticmethod
    def _unary(name: str, inner: _Node) -> _Node:
        def apply(library: Any, actions: Mapping[str, Any]) -> Any:
            value = inner(library, actions)
            if isinstance(value, float):
                return float(getattr(np, name)(value))
            return getattr(library, name)(value)

        return apply

    @staticmethod
    def _extreme(name: str, args: list[_Node]) -> _Node:
        def apply(library: Any, actions: Mapping[str, Any]) -> Any:
            values = [arg(library, actions) for arg in args]
            if all(isinstance(value, float) for value in values):
                return min(values) if name == "min" else max(values)
            array = next(value for value in values if not isinstance(value, float))
            # `full_like` raises for a number too large for the precision; in a sum it becomes infinite.
            arrays = [library.zeros_like(array) + v if isinstance(v, float) else v for v in values]
            return reduce(library.minimum if name == "min" else library.maximum, arrays)

        return apply


class _Columns:
    """The functions of an array library that labels use, for columns of Ibis."""

    exp, sqrt, abs = (staticmethod(operator.methodcaller(name)) for name in ("exp", "sqrt", "abs"))
    log = staticmethod(operator.methodcaller("ln"))

    @staticmethod
    def log1p(column: Any) -> Any:
        return (column + 1.0).ln()

    @staticmethod
    def zeros_like(column: Any) -> Any:
        return column * 0.0

    @staticmethod
    def minimum(a: Any, b: Any) -> Any:
        return (a < b).ifelse(a, b)

    @staticmethod
    def maximum(a: Any, b: Any) -> Any:
        return (a > b).ifelse(a, b)


def _quiet(apply: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """Apply an operator; where Python floats raise an error or become complex, return NaN, as arrays do."""
    try:
        value = apply(a, b)
    except (ZeroDivisionError, OverflowError):
        return float("nan")
    return float("nan") if isinstance(value, complex) else value


def _zero_or_one(truth: Any, actions: Mapping[str, Any]) -> Any:
    """Return the result of a comparison as 0 or 1, in the floating-point type of the actions."""
    if isinstance(truth, bool):
        return float(truth)
    if hasattr(truth, "ifelse"):  # a column of Ibis
        return truth.ifelse(1.0, 0.0)
    dtype = next(iter(actions.values())).dtype
    return truth.astype(dtype) if isinstance(truth, np.ndarray) else truth.to(dtype)


def _as_numbers(actions: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the array library of the actions (NumPy or torch), and the actions as float arrays of one shape."""
    torch: Any = sys.modules.get("torch")
    library: Any = np
    if torch is not None and all(isinstance(values, torch.Tensor) for values in actions.values()):
        library, kind = torch, torch.get_default_dtype()
        numbers = {n: v if v.is_floating_point() else v.to(kind) for n, v in actions.items() if not v.is_complex()}
    else:
        arrays = {name: as_numbers(name, values) for name, values in actions.items()}
        numbers = {n: v if v.dtype.kind == "f" else v.astype(np.float64) for n, v in arrays.items()}
    shapes = [tuple(values.shape) for values in numbers.values()]
    if () in shapes or any(shape != shapes[0] for shape in shapes) or len(numbers) < len(actions):
        got = ", ".join(f"{name} {list(np.shape(values))}" for name, values in actions.items())
        raise LabelError("the actions of a label must be arrays of numbers of the same shape", got=got)
    return library, numbers
