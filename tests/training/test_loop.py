from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import make_shown_log
from runs import quick
from ultr.datasets.users import User, simulate_log
from ultr.errors import DataError, OptionError
from ultr.lists import ListBatches
from ultr.log.labels import Label
from ultr.methods import MethodInputs, make_method
from ultr.rankers import FeatureEncoder, make_ranker, score_rows
from ultr.training.config import TrainingOptions
from ultr.training.data import Data, decide
from ultr.training.feed import Feed
from ultr.training.fitting import FitInputs
from ultr.training.loop import precision, start, take_step, train
from ultr.training.networks import NetworkFit
from ultr.utils.distributed import choose_device

CPU = torch.device("cpu")


def feedback_log(**options):
    log, _ = simulate_log(make_shown_log(**options), User())
    return log


def method(**ranker_options):
    torch.manual_seed(0)
    options = {"hidden": (8,), **ranker_options}
    return make_method("pointwise", MethodInputs(Label(), features=3, positions=(1, 2, 3), ranker_options=options))


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({}, [0.1, 0.1, 0.1, 0.1]),
        ({"schedule": "linear"}, [0.1, 0.075, 0.05, 0.025]),
        ({"schedule": "cosine"}, [0.1, 0.05 * (1 + np.cos(np.pi / 4)), 0.05, 0.05 * (1 + np.cos(3 * np.pi / 4))]),
        ({"warmup": 1}, [0.05, 0.1, 0.1, 0.1]),
    ],
)
def test_the_learning_rate_follows_its_schedule_and_is_really_applied(options, rates):
    settings = TrainingOptions(steps=4, lr=0.1, device="cpu", **options)
    log = feedback_log()
    state = start(method(), log, settings)
    feed = Feed(ListBatches(log), batch=8, seed=0)
    for step, rate in enumerate(rates):
        take_step(state, feed(step), settings)
        assert state.optimizer.param_groups[0]["lr"] == pytest.approx(rate)


def test_a_learning_rate_near_zero_does_not_change_the_weights():
    log = feedback_log()
    moved = []
    for lr in (1e-12, 0.1):
        settings = TrainingOptions(lr=lr, device="cpu")
        state = start(method(), log, settings)
        before = torch.cat([p.detach().flatten().clone() for p in state.method.parameters()])
        take_step(state, Feed(ListBatches(log), batch=8, seed=0)(0), settings)
        after = torch.cat([p.detach().flatten() for p in state.method.parameters()])
        moved.append(float((after - before).abs().max()))
    assert moved[0] < 1e-9
    assert moved[1] > 1e-3


@pytest.mark.parametrize("optimizer", ["adagrad", "adam", "adamw"])
def test_every_optimizer_lowers_the_loss(optimizer):
    log = feedback_log(requests=64)
    settings = TrainingOptions(lr=0.02, optimizer=optimizer, device="cpu")
    state = start(method(), log, settings)
    batch = Feed(ListBatches(log), batch=64, seed=0)(0)
    first = float(take_step(state, batch, settings))
    for _ in range(60):
        last = float(take_step(state, batch, settings))
    assert last < first


def test_each_network_is_clipped_apart():
    log = feedback_log()
    settings = TrainingOptions(clip=1e-3, optimizer="adam", device="cpu")  # Adagrad does not change the gradients
    state = start(method(), log, settings)
    take_step(state, Feed(ListBatches(log), batch=8, seed=0)(0), settings)
    for network in state.method.children():
        norm = torch.cat([p.grad.flatten() for p in network.parameters()]).norm()
        assert norm <= 1e-3 * 1.001


def test_feedback_is_fresh_for_every_step_and_the_same_for_the_same_step():
    log = make_shown_log(requests=8)
    feed = Feed(ListBatches(log), batch=8, seed=0, user=User())
    first, again, second = (feed(step).actions["click"] for step in (0, 0, 1))
    assert torch.equal(first, again)
    assert first.shape != second.shape or not torch.equal(first, second)


def test_training_stops_when_patience_runs_out_and_keeps_the_best_weights():
    log = feedback_log()
    settings = TrainingOptions(steps=100, batch=8, evaluate_every=5, patience=3, device="cpu")
    state = start(method(), log, settings)
    values = iter([1.0, 3.0, 2.0, 2.5, 2.9, 99.0])
    weights_at_best = {}

    def evaluate(trained):
        value = next(values)
        if value == 3.0:
            weights_at_best.update({n: t.clone() for n, t in trained.state_dict().items()})
        return {"figure": value}

    steps = [p.step for p in train(state, Feed(ListBatches(log), batch=8, seed=0), evaluate, settings, select="figure")]
    assert steps == [5, 10, 15, 20, 25]
    assert (state.stopping.best, state.stopping.best_step) == (3.0, 10)
    assert all(torch.equal(state.best_weights[n], t) for n, t in weights_at_best.items())


def test_a_metric_where_less_is_better_is_selected_by_its_least():
    log = feedback_log()
    settings = TrainingOptions(steps=3, batch=8, evaluate_every=1, device="cpu")
    state = start(method(), log, settings)
    values = iter([3.0, 1.0, 2.0])
    feed = Feed(ListBatches(log), batch=8, seed=0)
    list(train(state, feed, lambda _: {"arp": next(values)}, settings, select="arp"))
    assert state.stopping.best_step == 2


def test_divergence_is_an_error():
    log = feedback_log()
    settings = TrainingOptions(steps=5, evaluate_every=5, device="cpu")
    state = start(method(), log, settings)
    with torch.no_grad():
        next(state.method.parameters()).fill_(torch.nan)
    with pytest.raises(DataError, match=r"diverged.*lower network.lr"):
        list(train(state, Feed(ListBatches(log), batch=8, seed=0), lambda _: {"x": 0.0}, settings, select="x"))


def test_dropout_depends_on_the_step_and_not_on_earlier_random_numbers():
    log = feedback_log()
    settings = TrainingOptions(device="cpu", batch=8)
    weights = []
    for noise in (0, 5):
        torch.manual_seed(7)
        state = start(method(dropout=0.5), log, settings)
        torch.rand(noise)
        take_step(state, Feed(ListBatches(log), batch=8, seed=0)(0), settings)
        weights.append(torch.cat([p.detach().flatten() for p in state.method.parameters()]))
    assert torch.equal(*weights)


def test_missing_devices_are_errors():
    assert choose_device("cpu") == CPU
    with pytest.raises(OptionError, match="no device 'gpu'"):
        choose_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(OptionError, match="no usable GPU"):
            choose_device("cuda")


def test_logs_without_features_or_feedback_are_errors():
    log = make_shown_log()
    with pytest.raises(DataError, match="no actions to learn from"):
        Feed(ListBatches(log), batch=8, seed=0)
    bare = replace(log, features=np.empty((log.rows, 0), np.float32), feature_names=())
    with pytest.raises(DataError, match="no features"):
        start(method(), bare, TrainingOptions(device="cpu"))


def test_matrix_products_have_the_precision_of_the_options():
    def found(device: str, chosen: str) -> tuple[str, bool]:
        with precision(torch.device(device), TrainingOptions(device="cpu", precision=chosen)):
            return torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")

    assert found("cpu", "auto") == found("cpu", "float32") == found("cuda", "float32") == ("highest", False)
    assert found("cuda", "auto") == found("cuda", "tf32") == ("high", False)
    assert found("cpu", "bf16") == ("highest", True)
    assert torch.get_float32_matmul_precision() == "highest"


def test_bf16_stays_close_to_single_precision():
    log = feedback_log()
    batch = Feed(ListBatches(log), batch=32, seed=0)(0)
    losses = []
    for chosen in ("float32", "bf16"):
        settings = TrainingOptions(device="cpu", precision=chosen)
        losses.append(float(take_step(start(method(), log, settings), batch, settings)))
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_features_are_normalised_by_the_training_log_inside_the_ranker(monkeypatch):
    rng = np.random.default_rng(0)
    matrix = (rng.normal(size=(5000, 3)) * [1e-3, 1.0, 1e4] + [5.0, 0.0, -1e5]).astype(np.float32)
    matrix[:, 1] = 7.0
    encoder = FeatureEncoder(3)
    monkeypatch.setattr("ultr.rankers.networks.NUMBERS_AT_ONCE", 3 * 999)  # block by block
    encoder.fit(matrix)
    encoded = encoder(torch.from_numpy(matrix)).numpy()
    np.testing.assert_allclose(encoded[:, [0, 2]].mean(0), 0, atol=0.01)
    np.testing.assert_allclose(encoded[:, [0, 2]].std(0), 1, atol=0.01)
    assert not encoded[:, 1].any()  # a constant feature has no effect
    assert encoder(torch.tensor([[1e9, 0.0, 0.0]])).abs().max() <= 10


def test_categories_are_embedded_and_unknown_codes_share_one_place():
    encoder = FeatureEncoder(3, {1: 5})
    assert encoder.width == 2 + encoder.embeddings["1"].embedding_dim
    features = torch.tensor([[0.5, 2.0, 1.0], [0.5, 3.0, 1.0], [0.5, 2.0, 1.0]])
    encoded = encoder(features)
    assert torch.equal(encoded[0], encoded[2])
    assert not torch.equal(encoded[0], encoded[1])
    ranker = make_ranker("linear", encoder)
    ranker(features).sum().backward()
    touched = encoder.embeddings["1"].weight.grad.abs().sum(1) > 0
    assert touched.tolist() == [False, False, True, True, False]


def test_an_encoder_may_keep_to_some_features():
    matrix = np.random.default_rng(0).normal(3, 2, size=(500, 5)).astype(np.float32)
    matrix[:, 1], matrix[:, 4] = np.arange(500) % 4, np.arange(500) % 3
    whole = FeatureEncoder(5, {1: 4, 4: 3})
    some = FeatureEncoder(5, {1: 4, 4: 3}, only=[3, 1, 0])
    for encoder in (whole, some):
        encoder.fit(matrix)
    some.embeddings["1"].load_state_dict(whole.embeddings["1"].state_dict())
    assert list(some.categories) == [1]
    assert some.width == 2 + some.embeddings["1"].embedding_dim
    assert whole.width == 3 + sum(e.embedding_dim for e in whole.embeddings.values())
    features = torch.from_numpy(matrix)
    kept = [0, 2, *range(3, 3 + whole.embeddings["1"].embedding_dim)]  # of numbers 0, 2, 3, and the first category
    assert torch.equal(some(features), whole(features)[:, kept])
    features[:, [2, 4]] += 1
    assert torch.equal(some(features), whole(torch.from_numpy(matrix))[:, kept])
    assert FeatureEncoder(5, {1: 4}, only=[1]).width == some.embeddings["1"].embedding_dim
    assert FeatureEncoder(5, {1: 4}, only=[2])(features).shape == (500, 1)


def test_a_feature_named_twice_is_encoded_once():
    features = torch.tensor([[1.0, 5.0], [2.0, 7.0]])
    assert torch.equal(FeatureEncoder(2, only=[0, 0])(features), features[:, :1])


def test_scoring_in_blocks_equals_scoring_at_once():
    features = np.random.default_rng(0).normal(size=(100, 3)).astype(np.float32)
    ranker = method(dropout=0.0).ranker
    whole = ranker(torch.from_numpy(features)).detach().numpy()
    np.testing.assert_allclose(score_rows(ranker, features, device="cpu", block=7), whole, rtol=1e-5, atol=1e-6)


def test_unknown_rankers_and_shapes_are_errors():
    for name, options, message in [
        ("mpl", {}, "did you mean 'mlp'"),
        ("mlp", {"hidden": ()}, "at least one unit"),
        ("mlp", {"dropout": 1.0}, "below 1"),
        ("mlp", {"norm": "batch"}, "'norm' must be one of"),
    ]:
        with pytest.raises(OptionError, match=message):
            make_ranker(name, FeatureEncoder(2), **options)


def test_a_fit_has_the_patience_of_its_log_unless_it_was_chosen():
    log = feedback_log(requests=20)

    def patience(data: Data, **options) -> int:
        chosen = quick("log", method="pointwise", evaluate_every=5, **options)
        return NetworkFit(FitInputs(chosen, data, decide(chosen, data), "mlp")).options.patience

    data = Data(log, log, "")
    assert patience(data) == 30
    assert patience(data, patience=0) == 0
    assert patience(data, patience=7) == 7
    assert patience(replace(data, feeding_user=User())) is None
