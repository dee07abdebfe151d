"""Call public functions with bad values: each call works, or is rejected with a message that says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import torch
from hypothesis import strategies as st

import ultr
from hardening.values import (
    NUMBERS,
    TEXTS,
    Case,
    arrays,
    frame,
    framed,
    is_finite,
    logs,
    make_log,
    tensors,
)
from ultr.datasets import randomise
from ultr.datasets.users import USERS, User, make_user
from ultr.errors import DataError
from ultr.evaluation.metrics import METRICS, ranks_of, sampled_reward_metric
from ultr.evaluation.scores import Mean, parse_any_metric
from ultr.lists import ListBatches, Lists
from ultr.log import Log
from ultr.log.labels import Label
from ultr.training.config import TrainingOptions, all_options

ROWS = 6
SEEDS = st.sampled_from([-1, 0, 2**32, 2**63 - 2, 2**63 - 1, 2**64, 1.0, True, np.int64(5), "0", None])
COUNTS = st.sampled_from([-1, 0, 1, 3, 10**9, 2**63 - 1, 2**64, 2.0, True, "3", None, float("nan")])
NAMES = st.sampled_from(
    ["", "x", "NDCG@10", "ndcg@0", "ndcg@-1", "ndcg@999999", "ndcg@²", "arp@3", "reward@3", None, 3]
)
TENSORS = tensors()
THETAS = st.sampled_from(
    [
        *({}, {1: 1.0}, {1: 0, 2: 0, 3: 0, 4: 0}, dict.fromkeys(range(5), -1.0), {k: float("nan") for k in range(5)}),
        *(dict.fromkeys(range(5), 1e-300), {1: 1.0, 2: 1e300, 3: 1, 4: 1}, {"1": 1.0}, {1: None}, [1.0]),
    ]
)
EXPRESSIONS = st.sampled_from(
    [
        *(
            "click",
            "click / 0",
            "0 ** -1 + click",
            "click ** 1e9",
            "log(click)",
            "exp(dwell)",
            "min(click)",
            "clip(click)",
        ),
        *("-click", "click + nothing", "click.x", "f(click)", "()", "click if 1 else 0", "1e999 * click", "9" * 400),
        *(
            "click\0",
            "(" * 200,
            "click+" * 60 + "click",
            "max(1, 2)",
            "1 < click < 2",
            "click @ dwell",
            "exp(999) * click",
        ),
    ]
)


@cache
def shown() -> Log:
    return make_log()


@cache
def value() -> Any:
    theta = {k: 1 / k for k in range(1, 5)}
    return ultr.off_policy_value(shown(), np.arange(32.0), theta=theta, label="click", estimator="snips")


def a_log() -> dict[str, Any]:
    return {"log": shown()}


def vectors() -> dict[str, Any]:
    return {"a": np.arange(6.0), "b": np.ones(6), "weights": None, "confidence": 0.9}


def ranked() -> dict[str, Any]:
    where = torch.tensor([[True, True, True], [True, True, False]])
    return {"scores": torch.randn(2, 3), "labels": torch.tensor([[0.0, 1, 2], [1, 0, 0]]), "k": 2, "where": where}


def user_arguments() -> dict[str, Any]:
    options = {"examination": (0.9, 0.5), "eta": 1.0, "epsilon": 0.1, "max_grade": 4, "dwell": None, "further": {}}
    return {**options, "attraction": None}


def log_arguments() -> dict[str, Any]:
    return {
        "features": np.ones((6, 2), np.float32),
        "offsets": np.array([0, 2, 6]),
        "request_ids": pa.array([1, 2]),
        "feature_names": ("a", "b"),
        "positions": np.arange(6),
        "actions": {"click": np.ones(6)},
        "relevance": None,
        "weights": None,
        "item_ids": None,
        "vocabularies": {},
        "context": {},
    }


def list_arguments() -> dict[str, Any]:
    return dict(vars(Lists.from_log(make_log((2, 3)))))


def interval(result: Any) -> bool:
    """Return whether a result is finite; the interval of a single request has no ends."""
    ends = [] if result.requests == 1 else [result.low, result.high]
    return is_finite([result.mean if isinstance(result, Mean) else result.p, *ends])


def used(make: Callable[..., User]) -> Callable[..., Any]:
    """Return a function that makes a user and calls its methods."""

    def call(**options: Any) -> Any:
        user, grades, places = make(**options), torch.tensor([[0.0, 1.0]]), torch.tensor([[1, 10**9]])
        return user.sample(grades, places), user.expected(grades, places, "click"), user.unbiased()

    return call


def call_method(method: str) -> Callable[..., Any]:
    def call(user: Any, relevance: Any, positions: Any, where: Any) -> Any:
        more = {"label": "click"} if method == "expected" else {}
        return getattr(make_user(user), method)(relevance, positions, where=where, **more)

    return call


def as_json(config: ultr.Config) -> str:
    """Return a configuration as JSON, which must be possible for every valid one."""
    return json.dumps(config.to_json())


LOG = {"log": logs()}
WHOLE = st.lists(st.sampled_from([0, 1, 2, 5, 6, -1, 2**63 - 1]), max_size=6).map(sorted)
LOG_BAD = {
    "features": arrays(6, 2),
    "offsets": WHOLE,
    "request_ids": arrays(2),
    "feature_names": st.lists(TEXTS, max_size=3),
    "positions": WHOLE | arrays(),
    "actions": st.dictionaries(TEXTS | st.just("item"), arrays(), max_size=2),
    "relevance": arrays(),
    "weights": arrays(2),
    "item_ids": arrays(),
    "context": st.dictionaries(TEXTS, arrays(2)),
    "vocabularies": st.dictionaries(TEXTS, arrays(2), max_size=1),
}
REAL = st.sampled_from([number for number in NUMBERS if isinstance(number, float)])
SHARES = st.lists(REAL, max_size=2)
USER_BAD = {
    "max_grade": COUNTS,
    "examination": SHARES,
    "eta": REAL,
    "epsilon": REAL,
    "attraction": SHARES,
    "dwell": st.just(ultr.Dwell((50.0,), (5.0,), -10.0)),
    "further": st.fixed_dictionaries({"like": SHARES}),
}
MEASURED = {"scores": TENSORS, "labels": TENSORS, "where": TENSORS, "k": COUNTS}
OPTIONS = {option.path: option.default for option in all_options() if option.path != "data.source"}
OPTIONS_BAD = dict.fromkeys(OPTIONS, st.sampled_from(NUMBERS))
CASES: dict[str, Case] = {
    "Log": Case(Log, log_arguments, LOG_BAD),
    "Log.select": Case(lambda requests: shown().select(requests), lambda: {"requests": [0, 1]}),
    "Lists": Case(Lists, list_arguments, dict.fromkeys(list_arguments(), TENSORS)),
    "Lists.from_log": Case(Lists.from_log, a_log, LOG),
    "ListBatches": Case(
        lambda log, requests, device: ListBatches(log, device=device)[requests],
        lambda: {**a_log(), "requests": torch.tensor([0, 1]), "device": "cpu"},
        {**LOG, "requests": st.lists(st.integers(-1, 9), max_size=3).map(torch.tensor)},
    ),
    "Label": Case(
        lambda e: Label(e)({"click": np.ones(3), "dwell": np.ones(3)}), lambda: {"e": "click"}, {"e": EXPRESSIONS}
    ),
    "Label of values": Case(
        lambda click, dwell: Label("click + dwell / exp(3)")({"click": click, "dwell": dwell}),
        lambda: {"click": np.ones(ROWS), "dwell": np.ones(ROWS)},
        {"click": arrays() | TENSORS, "dwell": arrays() | TENSORS},
    ),
    "Label of actions": Case(Label("click"), lambda: {"actions": {"click": [1.0]}}),
    "Dwell": Case(
        lambda **o: ultr.Dwell(**o).parameters(torch.tensor([0.0, 4.0]), 4),
        lambda: {"mu": (1, 2), "sigma": (1, 1), "decay": 0.1},
    ),
    "Dwell.fit": Case(
        ultr.Dwell.fit,
        lambda: {"seconds": np.geomspace(1, 9, 30), "components": 2, "decay": 0.0, "seed": 0},
        {"seconds": arrays(40), "components": COUNTS, "seed": SEEDS},
        examples=5,
    ),
    **{f"user {name}": Case(used(make), user_arguments, USER_BAD) for name, make in USERS.items()},
    "make_user": Case(used(make_user), lambda: {"name": "trust", "eta": 1.0, "trust": torch.ones_like}),
    **{
        f"User.{method}": Case(
            call_method(method),
            lambda: {"user": "pbm", "relevance": torch.ones(2, 3), "positions": torch.ones(2, 3).long(), "where": None},
            {"user": st.sampled_from(sorted(USERS)), **dict.fromkeys(["relevance", "positions", "where"], TENSORS)},
        )
        for method in ("sample", "expected", "click_probability")
    },
    **{
        f"metric {name}": Case(
            partial(metric, user=User(), label="click") if name == "reward" else metric,
            lambda name=name: {
                ("relevance" if name == "reward" and n == "labels" else n): v for n, v in ranked().items()
            },
            {**MEASURED, "relevance": TENSORS},
        )
        for name, metric in METRICS.items()
        if name != "arp"
    },
    "metric arp": Case(METRICS["arp"], lambda: ranked() | {"k": None}, MEASURED),
    "metric sampled reward": Case(
        partial(sampled_reward_metric, user=User(), label="click", generator=torch.Generator()),
        lambda: {("relevance" if name == "labels" else name): v for name, v in ranked().items()},
        {**MEASURED, "relevance": TENSORS},
    ),
    "ranks_of": Case(ranks_of, lambda: {n: ranked()[n] for n in ("scores", "where")}, MEASURED),
    "parse_any_metric": Case(parse_any_metric, lambda: {"text": "ndcg@3"}, {"text": NAMES}),
    "evaluate_scores": Case(
        ultr.evaluate_scores,
        lambda: {**a_log(), "scores": np.arange(32), "metrics": "ndcg@3,reward@2", "user": User(), "label": "click"},
        {**LOG, "scores": arrays(32), "metrics": NAMES | st.lists(NAMES, max_size=2), "label": EXPRESSIONS},
    ),
    "mean_with_interval": Case(
        lambda a, weights, confidence, b: ultr.mean_with_interval(a, weights, confidence=confidence),
        vectors,
        {"a": arrays(), "weights": arrays()},
        interval,
        30,
    ),
    "paired_test": Case(ultr.paired_test, vectors, dict.fromkeys(["a", "b", "weights"], arrays()), interval, 30),
    "off_policy_value": Case(
        ultr.off_policy_value,
        lambda: {
            **a_log(),
            "scores": np.arange(32.0),
            "theta": {k: 1 / k for k in range(1, 5)},
            "label": "click",
            "kind": "reward",
            "k": 3,
            "estimator": "dr",
            "clip": 5.0,
            "direct": np.ones(32),
            "zeta": None,
            "replicates": (),
        },
        {
            **LOG,
            "scores": arrays(32),
            "theta": THETAS,
            "label": EXPRESSIONS,
            "k": COUNTS,
            "direct": arrays(32),
            "zeta": THETAS,
            "replicates": st.lists(THETAS, max_size=2),
            "kind": st.sampled_from(["dcg", "x"]),
            "estimator": st.sampled_from(["ips", "clipped", "snips", "dr", "x"]),
        },
        lambda got: is_finite([got.value, got.unclipped, got.effective_clicks, got.clipped, got.coverage]),
        30,
    ),
    "compare_values": Case(ultr.compare_values, lambda: {"a": value(), "b": value()}, examples=10),
    "fit_direct": Case(
        lambda log, **options: ultr.fit_direct(log, **options)(log),
        lambda: {**a_log(), "theta": {k: 1 / k for k in range(1, 5)}, "label": "click", "zeta": None, "seed": 0},
        {**LOG, "theta": THETAS, "label": EXPRESSIONS, "zeta": THETAS, "seed": SEEDS},
        examples=15,
    ),
    "show": Case(
        ultr.show,
        lambda: {**a_log(), "scores": np.arange(32.0), "items": 2},
        {**LOG, "scores": arrays(32), "items": COUNTS},
    ),
    "randomise": Case(randomise, lambda: {**a_log(), "share": 0.5, "seed": 0}, {**LOG, "seed": SEEDS}),
    "ranking_svm": Case(
        lambda log, **options: ultr.ranking_svm(log, **options)(log.features),
        lambda: {**a_log(), "share": 1.0, "seed": 0},
        {**LOG, "seed": SEEDS},
    ),
    "simulate_log": Case(
        ultr.simulate_log,
        lambda: {**a_log(), "user": User(), "seed": 0, "sessions": 3},
        {**LOG, "seed": SEEDS, "sessions": COUNTS},
    ),
    "TrainingOptions": Case(
        lambda **o: json.dumps(vars(TrainingOptions(**o))),
        lambda: vars(TrainingOptions()).copy(),
        dict.fromkeys(vars(TrainingOptions()), st.sampled_from(NUMBERS)),
        examples=60,
    ),
    "make_config": Case(
        lambda **o: as_json(ultr.make_config(**o)), lambda: {"data": "x", **OPTIONS}, OPTIONS_BAD, examples=100
    ),
    "Config.from_json": Case(
        lambda **o: as_json(ultr.Config.from_json(o)),
        lambda: ultr.make_config("x").to_json(),
        {"network": st.dictionaries(st.sampled_from(["lr", "x"]), st.sampled_from(NUMBERS))},
    ),
    "read_log": Case(
        ultr.read_log,
        lambda: {"source": pa.table(frame()), "request": "request", "actions": ["click"], "missing": "reject"},
        {"source": framed(), "missing": st.sampled_from(["keep", "x"])},
        examples=60,
    ),
}


def test_a_column_name_with_nul_is_rejected_before_polars_ends_the_process():
    with pytest.raises(DataError, match="NUL"):
        ultr.read_log(pl.DataFrame({"request": [1], "f1\0": [1.0]}))


def test_options_may_be_numbers_of_numpy():
    config = ultr.make_config(ranker="mlp", steps=np.int64(5), lr=np.float32(0.5))
    assert json.loads(as_json(config))["network"]["steps"] == 5
    assert type(config.network.lr) is float
    assert type(TrainingOptions(lr=np.float32(0.5)).lr) is float


def test_masks_need_not_be_contiguous():
    arguments = ranked()
    where = arguments["where"].T.contiguous().T
    assert not where.is_contiguous()
    assert torch.equal(METRICS["ndcg"](**arguments), METRICS["ndcg"](**arguments | {"where": where}))


def test_grades_in_double_precision_are_simulated():
    log = make_log(relevance="typical", double=True)
    assert log.relevance.dtype == np.float64
    assert ultr.simulate_log(log, User())[0].actions["click"].dtype == np.float32


def test_a_request_may_have_many_items():
    log, items = make_log((10**5,)), 10**5
    scores = np.arange(items, dtype=np.float64)
    theta = {k: 1 / k for k in range(1, items + 1)}
    assert is_finite(ultr.evaluate_scores(log, scores, ["ndcg@10", "mrr", "arp", "reward@10"], user=User()))
    assert np.isfinite(ultr.off_policy_value(log, scores, theta=theta, label="click", estimator="snips").value)
    assert ultr.simulate_log(ultr.show(log, scores, items=items), User())[0].rows == items


@pytest.mark.parametrize(
    ("values", "weights"), [([1e-310, 3e-310], None), ([1, 3], [1e300, 1e300]), ([1e149, 3e149], None)]
)
def test_means_are_right_at_any_scale(values, weights):
    unit = values[0]
    result = ultr.mean_with_interval(values, weights)
    assert result.mean == pytest.approx(2 * unit, rel=1e-6)
    assert result.high - result.mean == pytest.approx(12.7062047 * unit, rel=1e-6)  # t of one degree, error 1
