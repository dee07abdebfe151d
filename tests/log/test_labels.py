from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ultr.errors import LabelError
from ultr.log.labels import DEFAULT_LABEL, Label, click_label, default_label, sum_of_goals, weighted_goals

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
    ("click * exp(log(2)) + log(dwell + 1)", CLICK * 2 + np.log(DWELL + 1)),
]  # fmt: skip


@pytest.mark.parametrize(("expression", "expected"), EXPRESSIONS)
def test_a_label_equals_its_arithmetic_in_numpy_and_torch(expression, expected):
    label = Label(expression)
    np.testing.assert_allclose(label(ACTIONS), expected, rtol=1e-12)
    tensors = {name: torch.from_numpy(values) for name, values in ACTIONS.items()}
    np.testing.assert_allclose(label(tensors).numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize(("expression", "expected"), [*EXPRESSIONS, ("max(dwell, 1, 2) / min(2, dwell + 1)", None)])
def test_a_label_is_the_same_on_an_engine(expression, expected):
    ibis = pytest.importorskip("ibis")
    label, table = Label(expression), ibis.memtable(pa.table(ACTIONS))
    found = table.select(label=label.on_engine({name: table[name] for name in ACTIONS})).to_pyarrow()["label"]
    np.testing.assert_allclose(found.to_numpy(), label(ACTIONS) if expected is None else expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("actions", "click", "default"),
    [
        (["dwell", "Clicks", "like"], "Clicks", "Clicks"),
        (["like", "clicked", "click"], "clicked", "clicked"),
        (["like", "watch"], "like", "like"),
        (["dwell", "click"], "click", DEFAULT_LABEL),
        (["dwell"], "dwell", "dwell"),
        (["add to cart"], "`add to cart`", "`add to cart`"),
        (["class"], "`class`", "`class`"),
        (["max"], "`max`", "`max`"),
        ([], DEFAULT_LABEL, DEFAULT_LABEL),
    ],
)
def test_the_label_of_a_log_follows_from_its_actions(actions, click, default):
    assert click_label(iter(actions)) == click
    assert default_label(iter(actions)) == default
    assert Label(click).actions == (("click", "dwell") if click == DEFAULT_LABEL else (click.strip("`"),))


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
        ("3 + 4", "has no action"),
        ("clik(click)", "calls 'clik', which is not a known function; did you mean 'clip'"),
        ("exp(click, 2)", "calls exp with 2 arguments"),
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
        ("1 / (" * 55 + "click" + ")" * 55, "nested deeper than 50"),
        ("(" * 55 + "click" + " < 1)" * 55, "nested deeper than 50"),
        ("(1 < " * 55 + "click" + ")" * 55, "nested deeper than 50"),
    ],
)
def test_text_that_is_not_a_label_is_an_error(expression, message):
    with pytest.raises(LabelError, match=message):
        Label(expression)


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("click - 1", r"-1\.0 where click=0"),
        ("1 / click", r"inf where click=0"),
        ("log(dwell)", "-inf where dwell=0"),
        ("click / 0", "nan where click=0"),
        ("click + 1 / 0", "nan where click=0"),
        ("click * (-1) ** 0.5", "nan where click=0"),
        ("click * 10 ** 1000", "nan where click=0"),
        ("exp(dwell * 100) + click", "inf where dwell=20, click=1"),
    ],
)
def test_the_error_of_a_bad_value_shows_the_actions_it_came_from(expression, shown):
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


def test_labels_are_known_by_their_expression():
    label = Label(" click + dwell ")
    assert label == Label("click + dwell") != Label("click+dwell")
    assert label != "click + dwell"
    assert len({label, Label("click + dwell"), Label("click")}) == 2
    assert repr(label) == "Label('click + dwell')"
    assert Label.of(label) is label
    assert Label.of("click + dwell") == label
    assert Label() == Label("click + dwell / exp(3)")


def test_values_are_checked_unless_told_otherwise():
    np.testing.assert_array_equal(Label("click - 1")(ACTIONS, check=False), CLICK - 1)
    with pytest.raises(LabelError, match="not negative"):
        Label("click - 1")(ACTIONS, check=True)


def test_an_error_shows_the_first_bad_row_and_counts_them():
    actions = {"click": np.array([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0]]), "dwell": np.arange(6.0).reshape(3, 2)}
    for values in (actions, {name: torch.from_numpy(v) for name, v in actions.items()}):
        with pytest.raises(LabelError, match=r"got -1.0 where click=0, dwell=3 \(2 such rows\); change"):
            Label("click - 1 + 0 * dwell")(values)


@pytest.mark.parametrize(
    ("expression", "taken"),
    [
        ("click" + " " * 992 + "+ 1", True),
        ("click" + " " * 992 + "+ 1 ", True),  # without what surrounds it
        ("click" + " " * 993 + "+ 1", False),
        ("(" * 60 + "click" + ")" * 60, True),
        ("-" * 50 + "click", True),
        ("-" * 51 + "click", False),
        ("click" + " + 1" * 50, True),
        ("click" + " + 1" * 51, False),
        ("1 + (" * 50 + "click" + ")" * 50, True),
        ("1 + (" * 51 + "click" + ")" * 51, False),
        ("abs(" * 50 + "click" + ")" * 50, True),
        ("abs(" * 51 + "click" + ")" * 51, False),
    ],
)
def test_lengths_and_depths_up_to_their_bounds_are_taken(expression, taken):
    if taken:
        assert Label(expression).actions == ("click",)
    else:
        with pytest.raises(LabelError, match=r"1 to 1000 characters|nested deeper than 50"):
            Label(expression)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("exp()", "calls exp with 0 arguments; use one argument"),
        ("clip(click)", r"use clip\(x, low, high\)"),
        ("clip(click, 0, 1, 2)", "calls clip with 4 arguments"),
        ("max(click)", "use two or more arguments$"),
        ("max()", "use two or more arguments$"),
        ("None * click", "contains None"),
        ("b'1' * click", "not a number"),
        ("2j * click", "not a number"),
        ("not click", "contains unaryop"),
        ("+click", "contains unaryop"),
        ("click in like", "contains compare"),
        ("click is like", "contains compare"),
        ("click // 2", "contains binop"),
        ("exp(*click)", "contains starred"),
        ("max(click, like, key=click)", "contains call"),
        ("click.max(like, 1)", "contains call"),
        ("click\0", "cannot be parsed"),
        ("click\ud800", "cannot be parsed"),  # half of a pair, which is no text
        ("click +", "use numbers, action names, .* exp log log1p sqrt abs min max clip"),
    ],
)
def test_an_error_says_what_is_not_allowed_and_what_is(expression, message):
    with pytest.raises(LabelError, match=message):
        Label(expression)


def test_a_label_must_be_a_string():
    with pytest.raises(LabelError, match="a label must be a string, got 3"):
        Label(3)


BOTH = [ACTIONS, {name: torch.from_numpy(values) for name, values in ACTIONS.items()}]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("click * (2 > 1) + (1 > 2)", CLICK),
        ("(1 <= 1) * click + (1 < 1) + (1 >= 2)", CLICK),
        ("click + min(3, 2, 4) + max(1, 5, 2)", CLICK + 7),
        ("click * max(2 > 1, 0.5) + log(2 > 1)", CLICK),
        ("clip(3, 0, 2) * click", 2 * CLICK),
        ("clip(-3, 0, 2) + click", CLICK),
        ("clip(dwell, click, 1)", np.minimum(np.maximum(DWELL, CLICK), 1)),
        ("min(dwell, click, like)", np.minimum(np.minimum(DWELL, CLICK), LIKE)),
        ("max(0.25, click)", np.maximum(CLICK, 0.25)),
        ("click * sqrt(4) + log(1) + log1p(0) + abs(-1)", 2 * CLICK + 1),
        ("min(click, 1e400)", CLICK),
        ("min(click, 1e300)", CLICK),
        ("click * 1e299 / 1e299", CLICK),
        (f"min(click, 1{'0' * 400})", CLICK),
        ("click * (dwell == 0.5) + (click != like)", CLICK * (DWELL == 0.5) + (CLICK != LIKE)),
        ("(dwell > 0.5) + (dwell < 0.5) + (dwell <= 0)", 1.0 * (DWELL > 0.5) + (DWELL < 0.5) + (DWELL <= 0)),
        ("2 ** click + click ** 2 + exp(0) * like", 2.0**CLICK + CLICK**2 + LIKE),
    ],
)
def test_numbers_among_themselves_are_as_numbers_among_arrays(expression, expected):
    for actions in BOTH:
        np.testing.assert_allclose(np.asarray(Label(expression)(actions)), expected, rtol=1e-12)


def test_whole_numbers_and_truth_become_floats_of_the_usual_precision():
    whole, truth = torch.tensor([3, 0]), torch.tensor([True, False])
    assert Label("click")({"click": whole}).dtype == torch.get_default_dtype()
    assert Label("click > 1")({"click": whole}).dtype == torch.get_default_dtype()
    assert Label("click")({"click": truth}).tolist() == [1, 0]
    assert Label("click")({"click": whole.to(torch.float16)}).dtype == torch.float16
    assert Label("click")({"click": np.array([True])}).dtype == np.float64
    assert Label("click")({"click": np.array([1], np.float32)}).dtype == np.float32
    assert Label("click > 0")({"click": np.array([1], np.float32)}).dtype == np.float32
    assert Label("click")({"click": [1, 2]}).tolist() == [1, 2]
    mixed = Label("click + like")({"click": torch.tensor([1.0]), "like": np.array([2.0])})
    assert isinstance(mixed, np.ndarray)
    assert mixed.tolist() == [3]


@pytest.mark.parametrize(
    "actions",
    [
        {"click": np.zeros(2), "like": np.zeros(3)},
        {"click": torch.zeros(2), "like": torch.zeros(2, 1)},
        {"click": 1.0, "like": 2.0},
        {"click": torch.zeros(2), "like": torch.zeros(2, dtype=torch.complex64)},
    ],
)
def test_actions_of_other_shapes_or_kinds_are_errors(actions):
    with pytest.raises(LabelError, match="arrays of numbers of the same shape, got click"):
        Label("click + like")(actions)


def test_actions_without_names_are_an_error():
    with pytest.raises(LabelError, match="a mapping from names to values, got ndarray; pass for example"):
        Label("click")(CLICK)


def test_only_the_actions_it_reads_are_looked_at():
    assert Label("click")({"click": np.ones(2), "like": np.zeros(3)}).tolist() == [1, 1]


@given(
    st.dictionaries(
        st.sampled_from(["a", "a + b", "b > 0.5", "b - 0.5 * b", "max(a, b)", "a / (b + 1)", "2 * b ** 2"]),
        st.floats(0.001, 1000),
        min_size=1,
    )
)
def test_the_label_of_goals_is_their_weighted_sum(weights):
    actions = {"a": np.array([0.0, 1.0, 0.3]), "b": np.array([0.7, 0.2, 0.0])}
    expected = sum(weight * Label(goal)(actions) for goal, weight in weights.items())
    np.testing.assert_allclose(Label(sum_of_goals(weighted_goals(weights)))(actions), expected, rtol=1e-9)
