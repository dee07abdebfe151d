"""The simulated live test: traffic, learning from day to day, and lifts."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from scipy import stats

from ultr.datasets import ranking_svm
from ultr.datasets.synthetic import make_synthetic
from ultr.errors import DataError, LabelError, OptionError, OutputError, UnfinishedError
from ultr.evaluation.scores import evaluate_scores
from ultr.experiments import live
from ultr.experiments.live import (
    BASE,
    Arm,
    BucketTask,
    LiveOptions,
    LiveResult,
    Traffic,
    arm_of,
    lift_of,
    metric_of,
    run_live,
    run_one,
)
from ultr.log.labels import Label
from ultr.training.comparing.tasks import Workers
from ultr.utils.jsonfiles import load_json, load_tensors, read_json, write_json

SMALL = make_synthetic(requests=(120, 10, 10))
TINY = LiveOptions(
    BASE.with_options(hidden=(4,), steps=4, bias_steps=4, device="cpu"),
    days=2,
    sessions=60,
    entries=("pal-click", "pal-click", "pairwise-em:loss=opt", "pointwise"),
)
PLAIN = replace(TINY, entries=("pointwise", "pointwise"))
OWN = {field.name for field in fields(LiveOptions)}


def changed(options, **changes):
    """Return options with other values; those that a live test does not have are options of its configuration."""
    base = options.base.with_options(**{name: value for name, value in changes.items() if name not in OWN})
    return replace(options, base=base, **{name: value for name, value in changes.items() if name in OWN})


@pytest.fixture(autouse=True)
def small_data(monkeypatch):
    monkeypatch.setattr(live, "cached_dataset", lambda name, data_dir: SMALL)


@pytest.fixture
def trained(monkeypatch):
    """The training logs, in order."""
    logs = []

    def spy(config, out, *, source, **options):
        logs.append(source)
        return original(config, out, source=source, **options)

    original = live.run_training
    monkeypatch.setattr(live, "run_training", spy)
    return logs


@pytest.fixture(scope="module")
def tiny_result(tmp_path_factory):
    return finished(TINY, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def plain_result(tmp_path_factory):
    return finished(PLAIN, tmp_path_factory.mktemp("plain"))


def finished(options, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "cached_dataset", lambda name, data_dir: SMALL)
        return folder, run_live(options, folder)


def of_sample(values):
    return Arm(float(np.mean(values)), float(np.var(values, ddof=1)) / len(values))


def test_day_0_is_served_by_the_initial_ranker_in_every_bucket(tiny_result):
    _, result = tiny_result
    scores = ranking_svm(SMALL.train, seed=0)(SMALL.train.features)
    reward = evaluate_scores(SMALL.train, scores, ["reward@10"], user=TINY.user(4), label=TINY.label)["reward@10"]
    days = result.runs[0]["buckets"]
    assert [days[name][0]["expected"] for name in TINY.buckets] == pytest.approx([reward.mean()] * 4, rel=1e-5)
    assert [lift["by_day"][0]["expected"] for lift in result.runs[0]["lifts"].values()] == [0, 0, 0]
    assert len({days[name][1]["expected"] for name in TINY.buckets}) == 4
    assert len({days[name][0]["mean"] for name in TINY.buckets}) == 4


def test_rankers_that_learn_are_served(tmp_path):
    options = changed(PLAIN, entries=("pointwise", "lambdarank:from=truth"), steps=40, hidden=(16,), sessions=150)
    days = run_one(options, tmp_path, 0)["buckets"]["lambdarank:from=truth"]
    assert days[2]["expected"] > 1.1 * days[0]["expected"]


def test_a_bucket_has_no_lift_over_the_same_bucket():
    arm = of_sample(np.random.default_rng(0).exponential(size=500))
    lift = lift_of(arm, arm)
    assert lift.lift == 0
    assert lift.low < 0 < lift.high
    assert lift.p == 1
    assert lift_of(Arm(2, 0), Arm(1, 0)).p == 0


def test_the_interval_of_a_lift_agrees_with_a_bootstrap():
    rng = np.random.default_rng(1)
    a, b = rng.gamma(1.0, 1.5, 1500), rng.gamma(0.5, 2.0, 800)
    lift = lift_of(of_sample(a), of_sample(b))
    again = [(values[rng.integers(len(values), size=(4000, len(values)))]).mean(1) for values in (a, b)]
    low, high = np.quantile(again[0] / again[1] - 1, (0.025, 0.975))
    assert lift.lift == pytest.approx(a.mean() / b.mean() - 1)
    assert (lift.low, lift.high) == pytest.approx((low, high), abs=0.08 * (high - low))
    assert lift.p == pytest.approx(stats.ttest_ind(a, b, equal_var=False).pvalue, rel=0.05)


def test_an_a_a_test_has_its_nominal_error_rate():
    rng = np.random.default_rng(2)
    lifts = [lift_of(of_sample(rng.exponential(size=300)), of_sample(rng.exponential(size=300))) for _ in range(3000)]
    assert np.mean([lift.low <= 0 <= lift.high for lift in lifts]) == pytest.approx(0.95, abs=0.015)
    assert np.mean([lift.p < 0.2 for lift in lifts]) == pytest.approx(0.2, abs=0.03)


def test_days_have_equal_weights_whatever_their_sessions():
    rng = np.random.default_rng(3)
    days = [rng.exponential(scale, size) for scale, size in ((1, 100), (3, 300))]
    records = [{"sessions": len(x), "mean": x.mean(), "variance": x.var(ddof=1)} for x in days]
    arm = arm_of(records)
    assert arm.mean == pytest.approx((days[0].mean() + days[1].mean()) / 2)
    draws = np.mean([rng.choice(x, (20000, len(x))).mean(1) for x in days], axis=0)
    assert arm.variance == pytest.approx(draws.var(), rel=0.05)


def test_a_control_without_feedback_is_an_error():
    with pytest.raises(DataError, match="no feedback"):
        lift_of(Arm(1, 1), Arm(0, 0))


def test_the_sampled_metric_agrees_with_the_exact_one():
    traffic = Traffic.make(replace(PLAIN, sessions=20_000), 0)
    upside_down = replace(traffic, first_scores=-traffic.first_scores)
    days = [metric_of(traffic.served(traffic.shown(None), bucket, 0), traffic.options.label) for bucket in (0, 1)]
    errors = [(day["variance"] / day["sessions"]) ** 0.5 for day in days]
    exact, wrong = traffic.expected(traffic.shown(None)), traffic.expected(upside_down.shown(None))
    for day, error in zip(days, errors, strict=True):
        assert abs(day["mean"] - exact) < 3 * error
        assert abs(day["mean"] - wrong) > 10 * error
    assert days[0]["mean"] != days[1]["mean"]


def test_the_metric_of_a_session_is_the_sum_of_its_labels():
    traffic = Traffic.make(PLAIN, 0)
    log = traffic.served(traffic.shown(None), 1, 0)
    metric = metric_of(log, "click + 2 * like")
    sums = [
        sum(log.actions["click"][a:b]) + 2 * sum(log.actions["like"][a:b])
        for a, b in zip(log.offsets[:-1], log.offsets[1:], strict=True)
    ]
    assert metric["sessions"] == len(sums)
    assert (metric["mean"], metric["variance"]) == pytest.approx((np.mean(sums), np.var(sums, ddof=1)))
    assert metric["actions"]["dwell"] == pytest.approx(log.actions["dwell"].sum() / len(sums))


def test_likes_and_shares_follow_clicks_and_grades():
    traffic = Traffic.make(replace(PLAIN, sessions=20_000), 0)
    log = traffic.served(traffic.shown(None), 0, 0)
    clicked = log.actions["click"] > 0
    for name in ("like", "share"):
        assert not log.actions[name][~clicked].any()
        best, worst = (log.actions[name][clicked & chosen] for chosen in (log.relevance >= 3, log.relevance == 0))
        assert best.mean() > 3 * worst.mean() > 0


def test_every_session_is_served_by_one_bucket():
    traffic = Traffic.make(TINY, 0)
    ids = [
        traffic.served(traffic.shown(None), bucket, day).request_ids.to_numpy() for day in (0, 1) for bucket in range(4)
    ]
    assert sorted(np.concatenate(ids)) == list(range(2 * 4 * 60))
    assert len({len(sessions) for sessions in ids}) > 1


def test_users_of_two_buckets_or_days_act_independently():
    traffic = Traffic.make(replace(PLAIN, sessions=3000), 0)
    logs = [traffic.served(traffic.shown(None), bucket, day) for bucket, day in ((0, 0), (1, 0), (0, 1))]
    clicks = np.stack([log.actions["click"][:25_000].reshape(-1, 10) for log in logs])
    noise = (clicks - clicks.mean(1, keepdims=True)).reshape(3, -1)
    assert np.abs(np.corrcoef(noise) - np.eye(3)).max() < 0.03


def test_a_log_holds_what_was_shown_with_an_id_for_each_session(tmp_path, trained):
    run_one(PLAIN, tmp_path, 0)
    first, second = trained[:2]
    scores = ranking_svm(SMALL.train, seed=0)(SMALL.train.features)
    for log in (first, second):
        assert len(log.request_ids.unique()) == len(log)
        assert (log.lengths == 10).all()
        np.testing.assert_array_equal(log.positions.reshape(-1, 10), np.tile(np.arange(1, 11), (len(log), 1)))
        rows = log.item_ids.to_numpy()
        np.testing.assert_array_equal(log.features, SMALL.train.features[rows])
        np.testing.assert_array_equal(log.relevance, SMALL.train.relevance[rows])
    for rows in first.item_ids.to_numpy().reshape(-1, 10)[:20]:
        request = SMALL.train.request_of_row[rows[0]]
        candidates = np.flatnonzero(SMALL.train.request_of_row == request)
        np.testing.assert_array_equal(rows, candidates[np.argsort(-scores[candidates])][:10])
    days = read_json(tmp_path / "run-0" / "pointwise" / "day-01" / "traffic.json")
    assert len(second) == len(first) + days["sessions"]
    np.testing.assert_array_equal(second.item_ids.to_numpy()[: first.rows], first.item_ids.to_numpy())
    np.testing.assert_array_equal(second.actions["dwell"][: first.rows], first.actions["dwell"])


def test_a_window_keeps_the_last_days(tmp_path, trained):
    run_one(replace(PLAIN, window=1), tmp_path, 0)
    first, second = trained[:2]
    assert not set(first.request_ids.to_pylist()) & set(second.request_ids.to_pylist())
    assert len(second) == read_json(tmp_path / "run-0" / "pointwise" / "day-01" / "traffic.json")["sessions"]


def test_training_takes_the_last_step():
    config = TINY.config(2, 1, 0)
    assert config.network.steps == config.network.evaluate_every == 4
    assert config.method.options == {"loss": "opt"}
    assert TINY.config(0, 1, 0).network == TINY.config(3, 1, 0).network
    assert replace(TINY, rates={"pointwise": 0.5}).config(3, 1, 0).network.lr == 0.5


def test_retraining_starts_from_the_weights_of_the_day_before(tmp_path, monkeypatch):
    def hardly_learns_after_day_1(config, out, **options):
        if config.training.warm_start is not None:
            config = config.with_options(lr=1e-9)
        return original(config, out, **options)

    original = live.run_training
    monkeypatch.setattr(live, "run_training", hardly_learns_after_day_1)
    run_one(replace(PLAIN, days=3), tmp_path, 0)
    layers = [
        load_tensors(tmp_path / "run-0" / "pointwise" / f"day-0{day}" / "ranker" / "model" / "weights.safetensors")[
            "layers.0.weight"
        ]
        for day in (1, 2, 3)
    ]
    torch.manual_seed(PLAIN.config(0, 2, 0).seed)
    untrained = torch.nn.Linear(layers[0].shape[1], 4).weight
    torch.testing.assert_close(layers[1], layers[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(layers[2], layers[0], atol=1e-6, rtol=0)
    assert not torch.allclose(layers[0], untrained, atol=1e-2)


def test_the_same_seed_gives_the_same_result(tiny_result, tmp_path):
    _, result = tiny_result
    assert run_live(TINY, tmp_path).to_json() == result.to_json()


@pytest.mark.parametrize("lost", ["pal-click/day-02", "pairwise-em_loss=opt/day-02", "pointwise"])
def test_only_lost_days_are_repeated(tiny_result, tmp_path, trained, lost):
    folder, _ = tiny_result
    shutil.copytree(folder, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "run-0" / lost)
    run_live(TINY, tmp_path / "out")
    assert (tmp_path / "out" / "live.json").read_bytes() == (folder / "live.json").read_bytes()
    assert len(trained) == (2 if lost == "pointwise" else 1)


@pytest.mark.parametrize(("name", "call"), [("run_training", 3), ("metric_of", 2), ("metric_of", 6), ("write_json", 4)])
def test_a_killed_test_resumes_to_the_same_result(plain_result, tmp_path, monkeypatch, name, call):
    folder, _ = plain_result
    calls = 0

    def killed(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    original = getattr(live, name)
    with monkeypatch.context() as patch:
        patch.setattr(live, name, killed)
        with pytest.raises(KeyboardInterrupt):
            run_live(PLAIN, tmp_path)
    assert not (tmp_path / "live.json").exists()
    run_live(PLAIN, tmp_path)
    assert (tmp_path / "live.json").read_bytes() == (folder / "live.json").read_bytes()


def test_a_finished_test_is_not_repeated(tiny_result, trained, monkeypatch):
    folder, result = tiny_result
    monkeypatch.setattr(live, "metric_of", lambda *_: pytest.fail("a day was served again"))
    assert run_live(TINY, folder).to_json() == result.to_json()
    assert not trained


def test_days_can_be_added_but_no_other_option_changed(plain_result, tmp_path):
    run_live(replace(PLAIN, days=1), tmp_path / "grown")
    assert run_live(PLAIN, tmp_path / "grown").to_json() == plain_result[1].to_json()
    with pytest.raises(OutputError, match=r"made with 'network.steps' = 4, got 5"):
        run_live(changed(PLAIN, steps=5), tmp_path / "grown")


def test_theta_is_compared_with_that_of_the_users(tiny_result, tmp_path):
    traffic = Traffic.make(TINY, 0)
    true = traffic.user.theta(torch.arange(1, 4)).tolist()
    write_json(tmp_path / "bias.json", {"positions": [1, 2, 3], "theta": [true[0] / 2, true[1] / 2, true[2] / 2 * 1.3]})
    assert traffic.theta(tmp_path)["error"] == pytest.approx(0.3)
    towers = {"click": [0.5, 0.5 * true[1] / true[0], 0.5 * true[2] / true[0] * 0.6]}
    write_json(tmp_path / "bias.json", {"positions": [1, 2, 3], "tower": "multiplies", "towers": towers})
    assert traffic.theta(tmp_path)["error"] == pytest.approx(0.4)
    write_json(tmp_path / "bias.json", {"positions": [1, 2, 3], "tower": "adds", "towers": towers})
    assert traffic.theta(tmp_path) is None
    write_json(tmp_path / "bias.json", {"positions": [1, 2], "theta": [0.0, 0.1]})
    assert traffic.theta(tmp_path)["error"] is None
    days = tiny_result[1].runs[0]["buckets"]
    assert [day["theta"] is None for day in days["pairwise-em:loss=opt"]] == [True, False, False]
    assert [day["theta"] is None for day in days["pal-click"]] == [True, False, False]
    assert [day["theta"] is None for day in days["pointwise"]] == [True, True, True]
    assert tiny_result[1].course["pal-click"][2]["theta_error"] == days["pal-click"][2]["theta"]["error"]


def test_lifts_leave_day_0_out(tiny_result):
    run = tiny_result[1].runs[0]
    control, treated = run["buckets"]["pal-click"], run["buckets"]["pointwise"]
    lift = run["lifts"]["pointwise"]
    assert lift["expected"] == pytest.approx(
        (treated[1]["expected"] + treated[2]["expected"]) / (control[1]["expected"] + control[2]["expected"]) - 1
    )
    assert lift["lift"] == pytest.approx(
        (treated[1]["mean"] + treated[2]["mean"]) / (control[1]["mean"] + control[2]["mean"]) - 1
    )
    assert lift["by_day"][1]["lift"] == pytest.approx(treated[1]["mean"] / control[1]["mean"] - 1)


def test_runs_have_different_seeds_and_an_interval_over_them(tmp_path):
    progress = []
    result = run_live(PLAIN, tmp_path, runs=3, on_done=lambda *event: progress.append(event))
    assert [run["seed"] for run in result.runs] == [0, 1, 2]
    assert [(done, total) for done, total, _ in progress] == [(i, 6) for i in range(1, 7)]  # three runs of two buckets
    for kind, key in (("expected", "expected"), ("sampled", "lift")):
        lifts = [run["lifts"]["pointwise (A/A)"][key] for run in result.runs]
        assert len(set(lifts)) == 3
        lift = result.lifts["pointwise (A/A)"][kind]
        low, high = stats.t.interval(0.95, 2, np.mean(lifts), stats.sem(lifts))
        assert (lift["mean"], lift["low"], lift["high"]) == pytest.approx((np.mean(lifts), low, high))


def test_the_result_is_plain_json(tiny_result):
    folder, result = tiny_result
    text = json.dumps(result.to_json(), allow_nan=False)
    assert json.loads(text) == load_json(folder / "live.json")
    assert result.lifts["pointwise"]["expected"]["low"] is None  # one run has no interval
    assert LiveResult(TINY, json.loads(json.dumps(list(result.runs)))).lifts == result.lifts


def test_buckets_of_the_same_entry_have_different_names():
    assert replace(TINY, entries=["dla", "dla", "pointwise", "dla"]).buckets == (
        "dla",
        "dla (A/A)",
        "pointwise",
        "dla (A/A 2)",
    )
    assert Label(LiveOptions().label).actions == ("click", "dwell", "like", "share")
    assert LiveOptions().buckets[:2] == ("pal-click", "pal-click (A/A)")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"days": 0}, "'days' must be at least 1"),
        ({"sessions": 29}, "'sessions' must be at least 30"),
        ({"items": 0}, "'items'"),
        ({"window": -1}, "'window'"),
        ({"seed": -1}, "'seed'"),
        ({"entries": ["pointwise"]}, "a control and at least one other entry"),
        ({"entries": ["pointwise", "pal-clik"]}, "did you mean 'pal-click'"),
        ({"entries": ["pointwise", "dla:from=no-bias"]}, "live users have position bias"),
        ({"entries": ["pointwise", "dla:from=nowhere"]}, "'learn_from' must be"),
        ({"label": "click + buy"}, "no action 'buy'"),
        ({"like": (0.1, 1.1)}, "'like' must be"),
        ({"rates": {"lambdarank": 0.1}}, "unknown entry 'lambdarank'"),
        ({"lr": 0}, "'lr' must be"),
        ({"steps": 0}, "'steps'"),
    ],
)
def test_options_are_checked(wrong, says):
    with pytest.raises(OptionError, match=says):
        changed(PLAIN, **wrong)


def test_labels_are_checked():
    with pytest.raises(LabelError):
        changed(PLAIN, label="click +")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"entries": ["pointwise", "pairwise-em:scale=estimated"]}, "add theta=regression"),
        ({"hidden": (0,)}, "'hidden' must be"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_an_entry_that_cannot_be_trained_is_an_error_before_anything_is_written(tmp_path, wrong, says):
    with pytest.raises(OptionError, match=says):
        run_live(changed(PLAIN, **wrong), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_there_is_at_least_one_run(tmp_path):
    with pytest.raises(OptionError, match="'runs' must be at least 1"):
        run_live(PLAIN, tmp_path, runs=0)


def test_buckets_served_by_workers_give_the_same_result(tmp_path, plain_result):
    with Workers(1) as workers:
        assert run_live(PLAIN, tmp_path, workers=workers).to_json() == plain_result[1].to_json()


def test_no_day_starts_after_the_time_limit_and_the_same_call_continues(tmp_path, plain_result, trained):
    with Workers(1, until=0.0) as workers, pytest.raises(UnfinishedError, match="0 of 2"):
        run_live(PLAIN, tmp_path, workers=workers)
    task = BucketTask(PLAIN, str(tmp_path), 0, 0, until=0.0)
    task.perform()  # the time limit passed while it waited
    assert not task.finished
    assert not trained
    assert run_live(PLAIN, tmp_path).to_json() == plain_result[1].to_json()
    assert task.finished
