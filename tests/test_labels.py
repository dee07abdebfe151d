from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ultr.errors import LabelError
from ultr.labels import Label

ACTIONS = {
    "click": np.array([0.0, 1.0, 1.0, 0.0]),
    "dwell": np.array([0.0, 20.0, 0.5, 0.0]),
    "like": np.array([0.0, 1.0, 0.0, 0.0]),
}
CLICK, DWELL, LIKE = ACTIONS.values()

EXPRESSIONS = [
    ("click", CLICK),
    ("click + dwell / exp(3)", CLICK + DWELL / math.exp(3)),
    ("0.7*click + 0.2*like + log1p(dwell)", 0.7 * CLICK + 0.2 * LIKE + np.log1p(DWELL)),
    ("click * (dwell > 10)", CLICK * (DWELL > 10)),
    ("(dwell >= 0.5) + (dwell < 1) + (like == 1) + (like != 0) + (click <= 0)",
     1.0 * (DWELL >= 0.5) + (DWELL < 1) + (LIKE == 1) + (LIKE != 0) + (CLICK <= 0)),
    ("clip(dwell, 1, 10)", np.clip(DWELL, 1, 10)),
    ("min(dwell, 5) + max(click, like, 0.5)", np.minimum(DWELL, 5) + np.maximum(np.maximum(CLICK, LIKE), 0.5)),
    ("sqrt(dwell) ** 2 - -click", np.sqrt(DWELL) ** 2 + CLICK),
    ("abs(click - like) * max(2, 3) * min(1, 2)", np.abs(CLICK - LIKE) * 3),
    ("click * exp(log(2))", CLICK * 2),
]  # fmt: skip


@pytest.mark.parametrize(("expression", "expected"), EXPRESSIONS)
def test_a_label_equals_its_arithmetic_in_numpy_and_torch(expression, expected):
    label = Label(expression)
    np.testing.assert_allclose(label(ACTIONS), expected, rtol=1e-12)
    tensors = {name: torch.from_numpy(values) for name, values in ACTIONS.items()}
    np.testing.assert_allclose(label(tensors).numpy(), expected, rtol=1e-12)


def test_single_precision_stays_single_and_counts_become_floats():
    single = {name: torch.from_numpy(values).float() for name, values in ACTIONS.items()}
    assert Label()(single).dtype == torch.float32
    for values in (ACTIONS, {name: torch.from_numpy(v) for name, v in ACTIONS.items()}):
        assert str(Label("dwell > 10")(values).dtype).endswith("float64")
    counts = {"click": np.array([0, 1, 3])}
    np.testing.assert_allclose(Label("click / 2")(counts), [0, 0.5, 1.5])
    np.testing.assert_allclose(Label("-click + 1")({"click": torch.tensor([True, False])}), [0, 1])


def test_it_knows_the_actions_it_reads():
    assert Label("click + dwell / exp(3) + click").actions == ("click", "dwell")


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "1 to 1000 characters"),
        ("click +", "cannot be parsed"),
        ("3 + 4", "reads no action"),
        ("clik(click)", "calls 'clik'; did you mean 'clip'"),
        ("exp(click, 2)", "gives exp 2 arguments"),
        ("clip(click, 2)", r"clip\(x, low, high\)"),
        ("min(click)", "two or more"),
        ("click and like", "not allowed"),
        ("click if like else 0", "not allowed"),
        ("click < like < 2", "not allowed"),
        ("click.real", "not allowed"),
        ("click[0]", "not allowed"),
        ("__import__('os')", "not a number|calls '__import__'"),
        ("(lambda: click)()", "not allowed"),
        ("'a' * click", "not a number"),
        ("click + True", "not a number"),
        ("click % 2", "not allowed"),
        ("exp(x=click)", "not allowed"),
        ("click" + " + click" * 500, "1 to 1000 characters"),
        ("-" * 100 + "click", "nested deeper|cannot be parsed"),
        ("(" * 400 + "click" + ")" * 400, "cannot be parsed|nested deeper"),
    ],
)
def test_what_is_not_a_label_is_refused(expression, message):
    with pytest.raises(LabelError, match=message):
        Label(expression)


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("click - 1", r"-1\.0 where click=0"),
        ("1 / click", r"inf where click=0"),
        ("log(dwell)", "-inf where dwell=0"),
        ("click / 0", "nan where click=0"),
        ("click * (-1) ** 0.5", "nan where click=0"),
        ("click * 10 ** 1000", "nan where click=0"),
        ("exp(dwell * 100) + click", "inf where dwell=20, click=1"),
    ],
)
def test_values_that_are_negative_or_not_finite_are_refused_with_what_they_came_from(expression, shown):
    with pytest.raises(LabelError, match=shown):
        Label(expression)(ACTIONS)
    with pytest.raises(LabelError, match=shown):
        Label(expression)({name: torch.from_numpy(values) for name, values in ACTIONS.items()})


def test_a_missing_action_is_named_with_the_nearest():
    with pytest.raises(LabelError, match="needs the action 'dwel'; did you mean 'dwell'"):
        Label("click + dwel")(ACTIONS)


@given(st.text(alphabet="click dwell+-*/()<>=!.,0123456789e**_'\"[]{}:lambdaexpminmax\n", max_size=60))
def test_any_text_is_a_label_or_a_label_error(text):
    try:
        label = Label(text)
    except LabelError:
        return
    actions = dict.fromkeys(label.actions, ACTIONS["click"])
    try:
        values = label(actions)
    except LabelError:
        return
    assert np.isfinite(values).all()
    assert (values >= 0).all()
