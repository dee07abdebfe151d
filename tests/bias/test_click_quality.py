"""The quality of click models on held-out requests: against closed forms, and with users of a known model."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

from conftest import make_shown_log
from ultr.bias.click_models import (
    PRIOR,
    ClickLists,
    Fit,
    checked_names,
    compare_click_models,
    evaluated,
    fit_and_evaluate,
    make_click_model,
    split_requests,
)
from ultr.bias.counts import impressions
from ultr.datasets.users import CascadeUser, simulate_log
from ultr.errors import DataError, OptionError
from ultr.log import Log
from ultr.log.splits import queries_of

ITEMS, PER_LIST = 12, 4


def item_log(requests: int = 3000, *, seed: int = 0, gamma: float = 0.8) -> Log:
    """Make the clicks of users of a DBN on lists of four of twelve items, in random order, without features."""
    rng = np.random.default_rng(seed)
    attraction, satisfaction = rng.uniform(0.1, 0.9, ITEMS), rng.uniform(0.1, 0.9, ITEMS)
    items = np.array([rng.permutation(ITEMS)[:PER_LIST] for _ in range(requests)])
    examined, clicks = np.ones(requests, bool), np.zeros(items.shape, np.float32)
    for k in range(PER_LIST):
        here = examined & (rng.random(requests) < attraction[items[:, k]])
        clicks[:, k] = here
        satisfied = here & (rng.random(requests) < satisfaction[items[:, k]])
        examined &= ~satisfied & (rng.random(requests) < gamma)
    rows = requests * PER_LIST
    return Log(
        features=np.empty((rows, 0), np.float32),
        offsets=np.arange(0, rows + 1, PER_LIST),
        request_ids=pa.array(np.arange(requests)),
        feature_names=(),
        positions=np.tile(np.arange(1, PER_LIST + 1), requests),
        actions={"click": clicks.ravel()},
        item_ids=pa.array(items.ravel()),
    )


def test_the_model_of_the_users_predicts_best_and_its_parameter_is_found():
    report = compare_click_models(item_log(8000), ["pbm", "sdbn", "dbn", "ubm"])
    found = {each.model: each for each in report.models}
    best = max(found.values(), key=lambda each: each.log_likelihood)
    assert best.model == "dbn"
    assert found["dbn"].parameters["gamma"] == pytest.approx(0.8, abs=0.03)
    assert (report.attraction, report.fitted + report.stopping + report.held_out) == ("items", 8000)
    for each in report.models:
        assert each.per_list == pytest.approx(PER_LIST * each.log_likelihood)
        assert each.modelled == 1
        assert 1 < each.conditional_perplexity < 2
    assert found["pbm"].perplexity == pytest.approx(found["pbm"].conditional_perplexity)


def test_the_cascade_is_as_good_as_its_closed_form():
    """The likelihood is largest at a = clicks / views up to the first click, for each item."""
    log = item_log(8000, seed=1)
    (found,) = compare_click_models(log, ["cascade"]).models
    seen = impressions(log, log.actions["click"] > 0)
    fitted, _, held_out = split_requests(seen, None, seed=0)
    clicked, items = (values.reshape(-1, PER_LIST) for values in (seen.clicked, seen.items))
    counts = clicked.cumsum(1) - clicked == 0
    views, clicks = (
        np.bincount(items[fitted][counts[fitted] & mark], minlength=ITEMS) for mark in (True, clicked[fitted])
    )
    a = (clicks / views)[items[held_out]]
    terms = np.where(clicked[held_out], np.log(a), np.log(1 - a))[counts[held_out]]
    assert found.log_likelihood == pytest.approx(terms.mean(), abs=2e-3)
    assert found.modelled == pytest.approx(counts[held_out].mean())


def test_perplexity_is_the_mean_over_positions():
    """Without attraction to learn, the PBM with all logits at 0 has P(c) = 1/4 at every position."""
    log = item_log(60)
    seen = impressions(log, log.actions["click"] > 0)
    lists, parts = ClickLists(seen, None), split_requests(seen, None, seed=0)
    found, _ = fit_and_evaluate(make_click_model("pbm", PER_LIST), lists, log, parts, name="pbm", epochs=1, batch=60)
    fit = Fit(make_click_model("pbm", PER_LIST), lists, log, parts[0])
    rates = seen.clicked.reshape(-1, PER_LIST)[parts[2]].mean(0)
    expected = np.exp(-(rates * math.log(1 / 4) + (1 - rates) * math.log(3 / 4))).mean()
    assert evaluated(fit, lists, parts[2])["perplexity"] == pytest.approx(expected, rel=1e-5)
    assert found.epochs == 1


def test_the_prior_is_normal_and_counts_once_over_all_requests():
    """The decay of Adam is the gradient of PRIOR / 2 Σ w² / requests, next to the mean loss of a request."""
    log = item_log(50)
    lists = ClickLists(impressions(log, log.actions["click"] > 0), None)
    fit = Fit(make_click_model("dbn", PER_LIST), lists, log, torch.arange(50))
    items, others = fit.groups(total_weight=lists.total_weight(torch.arange(50)), batch=512)
    assert items["params"] == [fit.table]
    assert items["weight_decay"] == PRIOR / 50
    assert "weight_decay" not in others
    assert {id(p) for p in others["params"]} == {id(fit.own), id(fit.mean)}


def test_batches_have_every_request_once():
    log = item_log(50)
    lists = ClickLists(impressions(log, log.actions["click"] > 0), None)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    found = list(lists.batches(order, 7))
    assert [len(batch.where) for batch in found] == [7] * 7 + [1]
    assert torch.equal(torch.cat([batch.inputs for batch in found]), lists.batch(order).inputs)


def test_lists_of_several_lengths_and_weights_count_as_repeated_requests():
    log, _ = simulate_log(make_shown_log(requests=40, features=3, seed=0), CascadeUser(), seed=0)
    seen = impressions(log, log.actions["click"] > 0)
    weights = np.random.default_rng(0).integers(1, 4, len(log)).astype(np.float32)
    lists = ClickLists(replace(seen, weights=weights), log.features)
    torch.manual_seed(0)
    fit = Fit(make_click_model("dbn", len(lists.positions)), lists, log, torch.arange(len(log)))
    repeated = torch.repeat_interleave(torch.arange(len(log)), torch.from_numpy(weights).long())
    plain = ClickLists(seen, log.features)
    torch.testing.assert_close(fit.loss(lists.batch(torch.arange(len(log)))), fit.loss(plain.batch(repeated)))


def test_with_features_requests_of_a_query_are_on_one_side():
    log, _ = simulate_log(make_shown_log(requests=300, features=3, seed=0), CascadeUser(), sessions=900, seed=0)
    report = compare_click_models(log, ["dbn", "pbm"], epochs=3)
    assert report.attraction == "features"
    seen = impressions(log, log.actions["click"] > 0)
    parts = [set(queries_of(log)[part]) for part in split_requests(seen, log, seed=0)]
    assert len(set.union(*parts)) == sum(map(len, parts))


def test_a_seed_repeats_the_result():
    log = item_log(300)
    once, again = (compare_click_models(log, ["dbn"], epochs=2, seed=3).models[0] for _ in range(2))
    assert once.log_likelihood == again.log_likelihood


def test_errors_say_what_to_do():
    log = item_log(30)
    with pytest.raises(DataError, match="need items that recur, or features"):
        compare_click_models(replace(log, item_ids=None), ["pbm"])
    with pytest.raises(DataError, match="too few requests"):
        compare_click_models(log.select([0, 1]), ["pbm"])
    with pytest.raises(OptionError, match="no click model 'bpm'"):
        checked_names("dbn,bpm")
    with pytest.raises(OptionError, match="named once"):
        checked_names("dbn, dbn")
