"""Draws of extreme numbers for floating point and for the models, and helpers that fill in arguments by name.

A new function in a table of the project is tested automatically if its parameters have names that are listed here. A
parameter with another name fails, with a message that says where to add it.
"""

from __future__ import annotations

import inspect
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ultr.lists import Lists
from ultr.log.labels import Label
from ultr.methods import Method, MethodInputs, make_method

DENORMAL = 1e-40  # in single precision
NEARLY_ONE = 1 - 2.0**-24  # the largest number below one in single precision
PROBABILITIES = (0.0, 1e-12, 1e-6, 1e-3, 0.3, 0.5, 0.9, 1 - 1e-3, NEARLY_ONE, 1.0)
EXAMINED = (1e-6, 1e-3, 0.01, 0.3, 0.7, NEARLY_ONE, 1.0)
SCORES = (0.0, DENORMAL, -DENORMAL, 1e-7, 1.0, -1.0, 3.0, -17.0, 88.0, -88.0, 104.0, -104.0, 1e4, -1e4)
VAST_SCORES = (*SCORES, 1e30, -1e30)
LABELS = (0.0, 0.0, 1e-36, 1e-30, 0.05, 1.0, 1.0, 3.5, 1e6)
VAST_LABELS = (*LABELS, 1e30)
GARBAGE = (np.nan, np.inf, -np.inf, 1e38, -1e38)

FEW, MANY = 6, 100
effort = pytest.mark.parametrize("examples", [pytest.param(FEW, id="few"), pytest.param(MANY, id="many", marks=pytest.mark.long)])  # fmt: skip  # noqa: E501

TRIED: Counter[str] = Counter()
LARGEST: dict[str, float] = {}


def check_draws(what: str, examples: int, strategy: st.SearchStrategy[Any], holds: Callable[[Any], None]) -> None:
    """Check a property for `examples` drawn cases, and count them."""

    @settings(max_examples=examples)
    @given(strategy)
    def property_(case: Any) -> None:
        TRIED[what] += 1
        holds(case)

    property_()


def record(what: str, difference: float) -> float:
    """Record a difference if it is the largest of its kind, and return it."""
    LARGEST[what] = max(LARGEST.get(what, 0.0), difference)
    return difference


def write_counts(module: str) -> Iterator[None]:
    """Append the counts and largest differences of a test module, as JSON, to the file that `ULTR_COUNTS` names."""
    TRIED.clear()
    LARGEST.clear()
    yield
    if path := os.environ.get("ULTR_COUNTS"):
        line = {"test": module, "inputs": sum(TRIED.values()), "by": dict(TRIED), "largest": LARGEST}
        with Path(path).open("a") as file:
            file.write(json.dumps(line) + "\n")


def assert_near(what: str, single: Tensor, double: Tensor, *, rtol: float, scale: Tensor | float = 0.0) -> None:
    """Check that both are finite, and differ by at most `rtol` times the larger of the double value and `scale`."""
    assert torch.isfinite(single).all(), f"{what} is not finite in single precision"
    assert torch.isfinite(double).all(), f"{what} is not finite in double precision"
    assert double.dtype == torch.float64
    size = torch.maximum(double.abs(), torch.as_tensor(scale, dtype=torch.float64))
    smallest = torch.finfo(torch.float32).tiny  # smaller numbers have fewer digits
    off = ((single.double() - double).abs() / size.clamp(min=smallest / rtol)).max().item() if double.numel() else 0.0
    assert record(what, off) <= rtol, f"{what} differs by {off:.2e} of its size"


# --- Arguments by name --------------------------------------------------------------------------------------------


def public_functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return the public functions that a module defines."""
    functions = inspect.getmembers(module, inspect.isfunction)
    return {name: f for name, f in functions if f.__module__ == module.__name__ and not name.startswith("_")}


def arguments_of(function: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a function, taken from `values` by name."""
    names = [
        p.name for p in inspect.signature(function).parameters.values() if p.name in values or p.default is p.empty
    ]
    if unknown := [name for name in names if name not in values]:
        pytest.fail(f"{function.__name__} takes {unknown}: add draws of these names to tests/hardening")
    return {name: values[name] for name in names}


def tensors_in(result: Any) -> list[Tensor]:
    """Return the tensors of a result: a tensor, a dataclass or a sequence."""
    if isinstance(result, Tensor):
        return [result]
    if is_dataclass(result):
        return [getattr(result, field.name) for field in fields(result)]
    return list(result)


def in_double(value: Any) -> Any:
    """Return a value with all its tensors in double precision, also those in dataclasses and dicts."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{field.name: in_double(getattr(value, field.name)) for field in fields(value)})
    if isinstance(value, dict):
        return {name: in_double(values) for name, values in value.items()}
    return value


def pools(seed: int) -> Callable[..., Tensor]:
    """Return a function that draws a tensor of a shape from some values, in single precision."""
    rng = np.random.default_rng(seed)
    return lambda values, *shape: torch.from_numpy(rng.choice(np.array(values, np.float32), shape))


# --- Lists --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Ranked:
    """Scores, labels, weights and the padding mask of a few lists."""

    scores: Tensor
    labels: Tensor
    where: Tensor
    weights: Tensor
    seed: int

    def with_garbage(self, *names: str) -> Ranked:
        """Return a copy with NaN, infinite and huge numbers in the padding."""
        draw = pools(self.seed)
        garbage = {
            name: torch.where(self.where, values := getattr(self, name), draw(GARBAGE, *values.shape)) for name in names
        }
        return Ranked(**{**vars(self), **garbage})


@st.composite
def ranked(
    draw: Any, scores: tuple[float, ...] = VAST_SCORES, labels: tuple[float, ...] = VAST_LABELS, longest: int = 7
) -> Ranked:
    """Draw six lists, some with one item or only padding, with tied scores and equal or very different labels."""
    seed, length = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from([min(5, longest), 1, 2, longest]))
    rng = np.random.default_rng(seed)

    def by_list(values: tuple[float, ...], most: int) -> Tensor:
        """Draw a few of the values for each list."""
        rows = [
            rng.choice(rng.choice(np.array(values, np.float32), rng.integers(1, most + 1)), length) for _ in range(6)
        ]
        return torch.from_numpy(np.stack(rows))

    ties, noise = by_list(scores, length + 1), torch.from_numpy(rng.normal(size=(6, length)).astype(np.float32))
    blurred = ties + noise * torch.from_numpy(rng.integers(0, 2, (6, 1)).astype(np.float32))
    where = torch.from_numpy(rng.random((6, length)) < np.array([[1.0], [1.0], [0.7], [0.3], [0.1], [0.0]]))
    weights = torch.from_numpy(rng.choice(np.array([1e-3, 0.5, 1.0, 1e3], np.float32), 6))
    return Ranked(blurred, by_list(labels, 3), where, weights, seed)


# --- Methods ------------------------------------------------------------------------------------------------------

FEATURES = 3
POSITIONS = (1, 2, 3, 40, 1000)
LABEL = "click + dwell / length"  # 0/0 for padding
VARIANTS: dict[str, list[dict[str, str]]] = {
    "pairwise-em": [
        {"loss": "posterior"},
        {"loss": "posterior", "trust": "values"},
        {"loss": "posterior", "trust": "clicks", "theta": "regression"},
        {"loss": "opt"},
        {"loss": "ipw"},
        {"loss": "bayes-ipw", "weights": "exact"},
        {"loss": "bayes-ipw", "weights": "paper"},
        {"loss": "opt", "weights": "exact"},
        {"loss": "opt-posterior"},
        {"loss": "opt", "em": "joint"},
        {"variant": "released", "targets": "soft"},
    ],
    "ipw-listwise": [{}, {"labels": "values"}],
    "ipw-pointwise": [{}, {"labels": "values"}],
    "pairwise-debias": [{}, {"regularisation": "200"}],
    "pl-rank": [{}, {"labels": "values", "discount": "theta", "cutoff": "none"}],
    "prpo": [{}, {"labels": "values", "discount": "theta", "clip": "1"}],
    "safe-ipw": [{}, {"labels": "values", "discount": "theta", "delta": "0.001"}],
}


def extreme_method(name: str, options: dict[str, str], seed: int, *, size: float = 1.0, double: bool = False) -> Method:
    """Make a method as in training, with scores of about `size` and extreme parameters of bias."""
    torch.manual_seed(seed)
    inputs = MethodInputs(
        label=Label(LABEL),
        features=FEATURES,
        positions=POSITIONS,
        ranker_options={"hidden": (6,)},
        feature_names=tuple(f"f{i}" for i in range(FEATURES)),
        binary=("click",),
    )
    method, pool, places = make_method(name, inputs, **options).eval(), pools(seed), len(POSITIONS)
    theta = pool(EXAMINED, places)
    edges = {
        "theta": theta,
        "zeta": theta * pool((0.0, 0.5, NEARLY_ONE), places),
        "theta_minus": pool(EXAMINED, places),
        "rho": pool((0.01, 1.0, 100.0), places),
        "plus": pool((0.01, 0.5, 0.99), places, places),
        "minus": pool((0.01, 0.3), places, places).clamp(max=0.01),
    }
    with torch.no_grad():
        for key, buffer in method.named_buffers():
            values = edges.get(key.rsplit(".", 1)[-1])
            if values is not None and values.shape == buffer.shape:
                buffer.copy_(values)
        for key, parameter in method.named_parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
            if key.startswith("ranker") and "layers" in key and parameter.shape[0] <= len(Label(LABEL).actions):
                parameter.mul_(size)
    return method.double() if double else method


@st.composite
def some_lists(draw: Any) -> Lists:
    """Draw a batch with full, one-item and empty lists, clicks on all or no items, and extreme dwell times."""
    seed, length, n = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from([5, 1, 2])), 6
    rng, pool = np.random.default_rng(seed), pools(seed)
    where = torch.from_numpy(rng.random((n, length)) < np.array([[1.0], [1.0], [1.0], [0.7], [0.3], [0.0]]))
    click = (rng.random((n, length)) < rng.choice([0.0, 0.4, 0.4, 1.0], (n, 1))).astype(np.float32)
    click, dwell = torch.from_numpy(click), pool((0.0, DENORMAL, 1e-30, 1.0, 30.0, 1e4), n, length)
    features = pool((0.0, 1.0, -1.0, 2.5, 1e30, -1e30, np.nan), n, length, FEATURES)
    positions = torch.from_numpy(rng.choice(np.array([0, 1, 2, 3, 40, 900, 2**53, 2**62]), (n, length)))
    zero = torch.where(where, 1.0, 0.0)
    return Lists(
        features=features * zero[..., None],
        where=where,
        weights=pool((1e-3, 1.0, 1e3), n),
        positions=positions * where,
        actions={"click": click * zero, "dwell": dwell * click * zero, "length": pool((1.0, 100.0), n, length) * zero},
        relevance=pool((0.0, 1.0, 4.0), n, length) * zero,
    )


def with_garbage(lists: Lists, seed: int = 0) -> Lists:
    """Return the lists with garbage in the padding."""
    draw = pools(seed)

    def padded(values: Tensor) -> Tensor:
        where = lists.where if values.ndim == 2 else lists.where[..., None].expand_as(values)
        return torch.where(where, values, draw(GARBAGE, *values.shape).to(values.dtype))

    positions = torch.where(lists.where, lists.shown_positions, 2**62)
    actions = {name: padded(values) for name, values in lists.actions.items()}
    return Lists(padded(lists.features), lists.where, lists.weights, positions, actions, padded(lists.true_relevance))


def gradients(method: torch.nn.Module, loss: Tensor) -> Tensor:
    """Return the gradients of all parameters that are learned, in one tensor."""
    learned = [parameter for parameter in method.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, learned, allow_unused=True)
    found = [torch.zeros_like(p) if g is None else g for p, g in zip(learned, gradients, strict=True)]
    return torch.cat([gradient.flatten() for gradient in found])
