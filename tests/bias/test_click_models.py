"""Click models against the enumeration of all clicks and of all hidden variables of a list."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ultr.bias.click_models import (
    MODELS,
    conditional_log_likelihood,
    log1mexp,
    log_examination,
    make_click_model,
    marginal_log_likelihood,
)
from ultr.errors import OptionError

LONGEST = 5


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def goes_on(name: str, k: int, clicked: int, satisfied: int, p: list[float]) -> float:
    """Return the probability that the user goes on after an examined item."""
    if name == "dcm":
        return p[k] if clicked else 1.0
    if name == "ccm":
        return p[0] if not clicked else p[2] if satisfied else p[1]
    if clicked and (satisfied or name == "cascade"):
        return 0.0
    return p[0] if name == "dbn" else 1.0


def hidden_paths(name: str, a: list[float], s: list[float], p: list[float]):
    """Yield (probability, clicks, examined) of each path of the hidden variables, with everything as probabilities.

    A path chooses for every item whether it is attractive, satisfies, and whether the user goes on (or looks).
    """
    n = len(a)
    for attracted, satisfied, on in itertools.product(*(list(itertools.product((0, 1), repeat=n)) for _ in range(3))):
        probability, examined, clicks, reached, last = 1.0, [], [], 1, 0
        for k in range(n):
            satisfaction = a[k] if name == "ccm" else s[k]
            probability *= a[k] if attracted[k] else 1 - a[k]
            probability *= satisfaction if satisfied[k] else 1 - satisfaction
            if name in ("pbm", "ubm"):  # `on`: whether the user looks at this item
                look = p[k] if name == "pbm" else p[k * (n + 1) + last]
                e = on[k]
                probability *= look if e else 1 - look
            else:
                e = reached
            c = e * attracted[k]
            last = k + 1 if c else last
            examined.append(e)
            clicks.append(c)
            if name not in ("pbm", "ubm"):
                go = goes_on(name, k, clicks[k], satisfied[k], p)
                probability *= go if on[k] else 1 - go
                reached = reached * on[k]
        if probability:
            yield probability, tuple(clicks), examined


def up_to_first(clicks: list[int]) -> list[int]:
    return [int(c and not any(clicks[:k])) for k, c in enumerate(clicks)]


def drawn(name: str, n: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    model = make_click_model(name, n)
    logits = [2 * torch.randn(1, n, generator=generator, dtype=torch.float64) for _ in range(2)]
    parameters = torch.randn(model.size, generator=generator, dtype=torch.float64)
    return model, logits, parameters


def every_vector(n: int) -> torch.Tensor:
    return torch.tensor(list(itertools.product((0, 1), repeat=n))).bool()


def for_all(model, logits, n: int):
    clicked = every_vector(n)
    shape = clicked.shape
    return clicked, {
        "logits": [each.expand(shape) for each in logits[: model.OUTPUTS]],
        "where": torch.ones(shape, dtype=torch.bool),
        "place": torch.arange(n).expand(shape),
    }


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n", [1, 2, 6])
def test_the_probabilities_of_all_clicks_add_up_to_one(name, n):
    model, logits, parameters = drawn(name, n, seed=n)
    clicked, lists = for_all(model, logits, n)
    total = conditional_log_likelihood(model, clicked, parameters=parameters, **lists).sum(-1).exp()
    if name == "cascade":  # a list with several clicks counts up to its first click
        total = total[clicked.sum(-1) <= 1]
    assert float(total.sum()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n", [1, 3, 4])
def test_likelihoods_equal_the_sums_over_hidden_variables(name, n):
    model, logits, parameters = drawn(name, n, seed=10 + n)
    a, s = ([sigmoid(x) for x in each[0].tolist()] for each in logits)
    p = [sigmoid(x) for x in parameters.tolist()]
    joint: dict[tuple[int, ...], float] = {}
    click, examined = [0.0] * n, [0.0] * n
    for probability, clicks, looked in hidden_paths(name, a, s, p):
        joint[clicks] = joint.get(clicks, 0.0) + probability
        for k in range(n):
            click[k] += probability * clicks[k]
            examined[k] += probability * looked[k]
    assert sum(joint.values()) == pytest.approx(1)
    clicked, lists = for_all(model, logits, n)
    found = conditional_log_likelihood(model, clicked, parameters=parameters, **lists)
    for row, clicks_of_list in zip(found, clicked.int().tolist(), strict=True):
        vector = up_to_first(clicks_of_list) if name == "cascade" else clicks_of_list
        assert float(row.sum().exp()) == pytest.approx(joint[tuple(vector)], rel=1e-9)
        for k in range(n):  # P(c_k | c_<k) is a ratio of sums of the joint probability
            with_k, above = (
                sum(q for v, q in joint.items() if v[:upto] == tuple(vector[:upto])) for upto in (k + 1, k)
            )
            if name != "cascade" or sum(vector[:k]) == 0:
                assert float(row[k].exp()) == pytest.approx(with_k / above, rel=1e-9)
    marginal = marginal_log_likelihood(model, clicked, parameters=parameters, **lists).exp()
    reached = log_examination(model, parameters=parameters, **lists).exp()
    for row, looked, vector in zip(marginal.tolist(), reached.tolist(), clicked.tolist(), strict=True):
        assert row == pytest.approx([click[k] if vector[k] else 1 - click[k] for k in range(n)], rel=1e-9)
        assert looked == pytest.approx(examined, rel=1e-9)


@given(
    st.sampled_from(sorted(MODELS)),
    st.lists(st.tuples(st.floats(-90, 90), st.floats(-90, 90), st.booleans()), min_size=1, max_size=LONGEST),
    st.integers(0, 3),
    st.floats(0, 80),
)
def test_extreme_logits_and_padding_give_finite_likelihoods_and_gradients(name, items, padding, scale):
    n = len(items) + padding
    model = make_click_model(name, n)
    logits = [torch.tensor([[item[i] for item in items] + [torch.nan] * padding]) for i in range(2)]
    logits = [each.requires_grad_() for each in logits[: model.OUTPUTS]]
    parameters = (scale * torch.linspace(-1, 1, max(model.size, 1))[: model.size]).requires_grad_()
    where = torch.tensor([[True] * len(items) + [False] * padding])
    clicked = torch.tensor([[item[2] for item in items] + [True] * padding])
    lists = {"logits": logits, "where": where, "place": torch.arange(n)[None], "parameters": parameters}
    found = conditional_log_likelihood(model, clicked, **lists)
    assert torch.isfinite(found).all()
    assert (found <= 0).all()
    assert not found[~where].any()
    found.sum().backward()
    for each in (*logits, parameters):
        assert each.grad is None or torch.isfinite(each.grad).all()
    assert not logits[0].grad[~where].any()
    shorter = {**lists, "logits": [each[:, : len(items)] for each in logits]}
    shorter |= {"where": where[:, : len(items)], "place": lists["place"][:, : len(items)]}
    alone = conditional_log_likelihood(model, clicked[:, : len(items)], **shorter)
    torch.testing.assert_close(found[:, : len(items)], alone)
    assert torch.isfinite(marginal_log_likelihood(model, clicked, **lists)).all()


def test_the_likelihood_is_accurate_where_the_difference_from_one_is_lost():
    """With a = sigmoid(60), no click on the first, examined item has probability exp(-60), not 0."""
    for name in ("cascade", "sdbn", "dcm", "dbn", "ccm"):
        model = make_click_model(name, 2)
        logits = [torch.tensor([[60.0, 0.0]])] * model.OUTPUTS
        found = conditional_log_likelihood(
            model,
            torch.zeros(1, 2, dtype=torch.bool),
            logits,
            where=torch.ones(1, 2, dtype=torch.bool),
            place=torch.arange(2)[None],
            parameters=torch.zeros(model.size),
        )
        assert float(found[0, 0]) == pytest.approx(-60)


def test_the_simplified_dbn_is_the_dbn_that_always_goes_on():
    model, logits, _ = drawn("sdbn", 5, seed=0)
    clicked, lists = for_all(model, logits, 5)
    simple = conditional_log_likelihood(model, clicked, parameters=torch.zeros(0), **lists)
    dbn = make_click_model("dbn", 5)
    always = conditional_log_likelihood(dbn, clicked, parameters=torch.tensor([50.0], dtype=torch.float64), **lists)
    torch.testing.assert_close(simple, always)


def test_the_cascade_is_the_dependent_click_model_that_never_goes_on_after_a_click():
    model, logits, _ = drawn("dcm", 5, seed=0)
    clicked, lists = for_all(model, logits, 5)
    never = conditional_log_likelihood(model, clicked, parameters=torch.full((5,), -700.0).double(), **lists)
    cascade = make_click_model("cascade", 5)
    expected = conditional_log_likelihood(cascade, clicked, parameters=torch.zeros(0), **lists)
    modelled = cascade.modelled(clicked, lists["where"])
    torch.testing.assert_close(never[modelled], expected[modelled])


def test_the_ubm_looks_up_positions_and_not_ranks():
    """A list at positions 2 and 4 of four, with a click on the first item: γ[2, none] and γ[4, 2]."""
    model = make_click_model("ubm", 4)
    parameters = torch.arange(20.0) / 10
    found = conditional_log_likelihood(
        model,
        torch.tensor([[True, True]]),
        [torch.full((1, 2), 100.0)],
        where=torch.ones(1, 2, dtype=torch.bool),
        place=torch.tensor([[1, 3]]),
        parameters=parameters,
    )
    expected = [math.log(sigmoid(float(parameters[i]))) for i in (1 * 5 + 0, 3 * 5 + 2)]
    assert found[0].tolist() == pytest.approx(expected)


@given(st.floats(-100, -1e-30))
def test_log1mexp_is_accurate_near_zero_and_far_from_it(x):
    expected = math.log(-math.expm1(x)) if x > -1 else math.log1p(-math.exp(x))
    assert float(log1mexp(torch.tensor(x, dtype=torch.float64))) == pytest.approx(expected, rel=1e-12)


def test_an_unknown_model_is_rejected_with_the_nearest_name():
    with pytest.raises(OptionError, match="did you mean 'dbn'"):
        make_click_model("dnb", 3)
