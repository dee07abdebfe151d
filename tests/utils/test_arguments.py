"""Arguments and fields are checked against their type hints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
import torch

import ultr
from ultr.errors import OptionError
from ultr.evaluation.metrics import ndcg_metric
from ultr.rankers.networks import FeatureEncoder, MLPRanker
from ultr.training.config import TrainingOptions
from ultr.utils.arguments import check_fields, check_value, checked

Colour = Literal["red", "green", "blue"]


@checked
def paint(colour: Colour | None = None, *, size: int = 1, names: Sequence[str] = ()) -> Any:
    return colour


@dataclass(frozen=True)
class Paint:
    colour: Colour = "red"
    size: int = 1

    def __post_init__(self) -> None:
        check_fields(self)


def test_allowed_values_are_accepted():
    assert [paint(value) for value in ("red", "blue", None)] == ["red", "blue", None]
    assert paint(np.str_("green")) == "green"
    assert Paint("green").colour == "green"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("gren", "'colour' must be one of 'red', 'green', 'blue' or None, got 'gren'; did you mean 'green'?"),
        ("RED", "'colour' must be one of 'red', 'green', 'blue' or None, got 'RED'; did you mean 'red'?"),
        ("wall", "'colour' must be one of 'red', 'green', 'blue' or None, got 'wall'"),
        ("", "'colour' must be one of 'red', 'green', 'blue' or None, got ''"),
        (3, "'colour' must be one of 'red', 'green', 'blue' or None, got int 3"),
        (["red"], "'colour' must be one of 'red', 'green', 'blue' or None, got list ['red']"),
    ],
)
def test_the_error_of_another_value_names_the_allowed_ones_and_the_nearest(value, message):
    with pytest.raises(OptionError) as raised:
        paint(value)
    assert str(raised.value) == message


def test_fields_are_checked_like_arguments():
    with pytest.raises(OptionError, match=r"^'colour' must be one of 'red', 'green', 'blue', got 'bleu'; did you mean"):
        Paint("bleu")
    assert type(Paint(size=np.int64(3)).size) is int  # so that it can be written as JSON


def test_the_error_of_another_type_names_the_type():
    for options, message in (
        ({"size": 1.5}, "'size' must be a whole number, got float 1.5"),
        ({"names": "red"}, "'names' must be a list of strings, got str 'red'"),
        ({"names": [1]}, "'names' must be a list of strings, got list [1]"),
    ):
        with pytest.raises(OptionError) as raised:
            paint(**options)
        assert str(raised.value) == message
    with pytest.raises(OptionError, match="'path' must be a string, got NoneType None"):
        check_value("path", None, str)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TrainingOptions(optimizer="adma"), "'adagrad', 'adam', 'adamw', got 'adma'; did you mean 'adam'"),
        (lambda: ultr.read_log("x", missing="kep"), "'reject', 'keep', got 'kep'; did you mean 'keep'"),
        (lambda: ultr.prepare_lists("x", "y", engine="sparc"), "'duckdb', 'spark', got 'sparc'; did you mean 'spark'"),
        (lambda: ultr.prepare_lists("x", "y", split="date"), "'hash', 'time', got 'date'"),
        (
            lambda: ultr.load_dataset("synthetic")["tset"],
            "'train', 'validation', 'test', got 'tset'; did you mean 'test'",
        ),
        (
            lambda: ndcg_metric(torch.ones(1, 2), torch.ones(1, 2), gain="square"),
            "'exponential', 'linear', got 'square'",
        ),
        (lambda: MLPRanker(FeatureEncoder(3), norm="batch"), "'none', 'layer', got 'batch'"),
    ],
)
def test_options_with_a_fixed_set_of_values_are_checked_by_their_types(call, message):
    with pytest.raises(OptionError, match=f"must be one of {message}"):
        call()
