"""Comparisons: what is trained, which settings are chosen, and what is tested."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from runs import feedback_log, weights
from ultr.errors import DataError, DivergedError, OptionError, UltrError, UnfinishedError
from ultr.evaluation.off_policy import load_off_policy_model
from ultr.evaluation.scores import holm, paired_test
from ultr.log import write_log
from ultr.rankers.model import load_model
from ultr.training.comparing.plan import (
    FIRST_TUNING_SEED,
    PATIENCE,
    SESSIONS,
    Entry,
    Plan,
    compare,
    compare_all,
    run_folder,
)
from ultr.training.comparing.results import Setting
from ultr.training.comparing.tasks import RunTask, Workers, read_requests
from ultr.training.config import make_config
from ultr.training.data import load_run_data
from ultr.training.examining import VALUES
from ultr.training.folder import read_config
from ultr.training.run import run_training
from ultr.utils.jsonfiles import read_json, write_json

BASE = make_config(
    "synthetic",
    users="pbm",
    ranker="linear",
    select="ndcg@10",
    sessions=0,
    steps=5,
    batch=32,
    evaluate_every=5,
    patience=0,
    bias_steps=5,
    device="cpu",
)
METHODS = ["pointwise", "lambdarank", "lambdarank:from=no-bias"]


@pytest.fixture
def no_training(monkeypatch):
    """Call the function that is returned to let all later training fail."""
    fail = "ultr.training.networks.NetworkFit.fit"
    return lambda: monkeypatch.setattr(fail, lambda *_, **__: pytest.fail("a finished run was repeated"))


# --- Whole comparisons ----------------------------------------------------------------------------------------------


def test_methods_are_tuned_run_with_all_seeds_and_never_twice(tmp_path, no_training, small_synthetic):
    result = compare(BASE, METHODS, tmp_path, seeds=3, rates=[0.001, 0.1], jobs=1)
    assert [row.entry for row in result.rows] == METHODS
    assert result.metrics == ["ndcg@10", "reward@10"]
    for row in result.rows:
        folder = run_folder(tmp_path, row.entry, row.setting, 0).parent
        tuned = [f"seed-{FIRST_TUNING_SEED + i}" for i in range(3)]
        assert sorted(p.name for p in folder.iterdir()) == sorted(["seed-0", "seed-1", "seed-2", *tuned])
    assert len(list((tmp_path / "runs").glob("*/*/*"))) == 3 * (2 * 3 + 3)  # rates and tuning seeds, and tested seeds
    reference = result.rows[0]
    assert reference.against == {}
    for row in result.rows[1:]:
        expected = paired_test(np.array(row.results["ndcg@10"]), np.array(reference.results["ndcg@10"]))
        assert row.against["ndcg@10"].seeds == expected
        of_runs = [
            np.mean([read_requests(run_folder(tmp_path, r.entry, r.setting, s))[0]["ndcg@10"] for s in range(3)], 0)
            for r in (row, reference)
        ]
        assert row.against["ndcg@10"].requests == paired_test(*of_runs)
        assert float(of_runs[0].mean()) == pytest.approx(np.mean(row.results["ndcg@10"]))
    assert read_json(tmp_path / "comparison.json")["rows"] == json.loads(json.dumps(result.to_json()["rows"]))
    no_training()
    assert compare(BASE, METHODS, tmp_path, seeds=3, rates=[0.001, 0.1], jobs=1).to_json() == result.to_json()


def test_a_setting_that_diverges_is_not_chosen_and_not_tried_again(tmp_path, no_training, small_synthetic):
    rates = [1e38, 0.01]  # steps of the first are so large that the scores overflow
    options = {"seeds": 1, "tuning_seeds": 2, "jobs": 1}
    result = compare(BASE, ["pointwise"], tmp_path / "out", rates=rates, **options)
    assert result.rows[0].setting.lr == 0.01
    diverged = sorted(path.parent.name for path in tmp_path.glob("out/runs/*/lr-1e*38/*/diverged.json"))
    assert diverged == [f"seed-{FIRST_TUNING_SEED + i}" for i in range(2)]
    with pytest.raises(DivergedError, match=r"lower network\.lr"):  # a tested run
        compare(BASE, ["pointwise"], tmp_path / "other", rates=rates[:1], **options)
    no_training()
    assert compare(BASE, ["pointwise"], tmp_path / "out", rates=rates, **options).to_json() == result.to_json()


def test_methods_on_a_log_are_tested_on_requests_that_selection_never_saw(tmp_path):
    write_log(feedback_log(60), tmp_path / "log.parquet")
    base = BASE.with_options(data=str(tmp_path / "log.parquet"), users=None, select="feedback-ndcg@10")
    result = compare(base, ["pointwise"], tmp_path / "out", seeds=1, rates=[0.1], jobs=1)
    (run,) = (tmp_path / "out" / "runs").glob("*/*/*")
    test = load_run_data(read_config(run)).test
    assert len(test) == 12  # a fifth
    assert len(read_requests(run)[0]["feedback-ndcg@10"]) == len(test)
    assert set(result.rows[0].results) == {"feedback-ndcg@10"}
    other = compare(base.with_options(test=0.5), ["pointwise"], tmp_path / "half", seeds=1, rates=[0.1], jobs=1)
    assert other.rows[0].by_request["feedback-ndcg@10"].shape == (30,)


def test_one_model_evaluates_all_runs_and_the_logged_ranking(tmp_path):
    log = feedback_log(120)
    request_weights = np.random.default_rng(0).integers(1, 4, len(log)).astype(np.float32)
    write_log(replace(log, weights=request_weights), tmp_path / "log.parquet")
    base = BASE.with_options(data=str(tmp_path / "log.parquet"), users=None, select="auto")
    metric = "off-policy-reward@10"
    result = compare(base, ["pointwise", "lambdarank"], tmp_path / "out", seeds=2, rates=[0.1], jobs=1)
    runs = [next((tmp_path / "out" / "runs" / "pointwise").glob(f"*/seed-{seed}")) for seed in (0, 1)]
    models = [load_off_policy_model(run / VALUES) for run in runs]
    assert models[0].theta != models[1].theta  # each seed has its own training requests
    data = load_run_data(read_config(runs[1]))
    test = data.test
    for run in runs:
        value = models[0].estimator(test, metric, label=data.label)(load_model(run).score(test))
        np.testing.assert_allclose(read_requests(run)[0][metric], value.per_request)
    logged = models[0].estimator(test, metric, label=data.label)(-test.positions)
    assert result.logged[metric].mean == pytest.approx(logged.value)
    for row in result.rows:
        expected = paired_test(row.by_request[metric], logged.per_request, test.weights)
        assert row.against_logged[metric].requests.p == pytest.approx(expected.p)
    tests = [row.against_logged[metric] for row in result.rows]
    assert [test.holm for test in tests] == holm([test.requests.p for test in tests])
    assert read_json(tmp_path / "out" / "comparison.json")["logged"][metric]["mean"] == result.logged[metric].mean


def test_the_default_of_ultr_train_is_a_row_that_is_not_tuned(tmp_path):
    write_log(feedback_log(60), tmp_path / "log.parquet")
    base = BASE.with_options(
        data=str(tmp_path / "log.parquet"), users=None, select="feedback-ndcg@10", **{"trees.rounds": 4}
    )
    result = compare(base, ["pointwise", "pairwise-em:ranker=auto"], tmp_path / "out", seeds=2, rates=[0.1], jobs=1)
    row = result.rows[1]
    assert row.setting == Setting()
    assert (row.steps, row.sessions) == (None, 0)
    runs = sorted((tmp_path / "out" / "runs" / "pairwise-em_ranker=auto").glob("*/*"))
    assert [run.relative_to(run.parents[1]).as_posix() for run in runs] == ["default/seed-0", "default/seed-1"]
    assert read_json(runs[0] / "decisions.json")["rankers"] == ["mlp", "lightgbm"]
    assert read_json(tmp_path / "out" / "comparison.json")["rows"][1]["steps"] is None


def test_notes_and_problems_are_reported_before_anything_is_trained(tmp_path):
    log = feedback_log(60)
    leak = log.actions["click"][:, None] + np.zeros((1, 1), np.float32)
    leaky = replace(log, features=np.hstack([log.features, leak]), feature_names=(*log.feature_names, "clicked"))
    write_log(leaky, tmp_path / "log.parquet")
    base = BASE.with_options(data=str(tmp_path / "log.parquet"), users=None, select="feedback-ndcg@10")
    with pytest.raises(DataError, match="features follow the feedback"):
        compare(base, ["pointwise"], tmp_path / "out", jobs=1)
    assert not (tmp_path / "out").exists()
    notes, warnings = [], []
    hear = {"on_note": notes.append, "on_warning": warnings.append, "jobs": 1, "seeds": 1, "rates": [0.1]}
    compare(base.with_options(allow_leaks=True), ["pointwise", "dla"], tmp_path / "out", **hear)
    assert any("follow" in warning.what or "clicked" in warning.what for warning in warnings)
    assert any(note.startswith("dla: trained on clicks only; 'click + dwell / exp(3)'") for note in notes)


def test_parallel_processes_give_the_same_results(tmp_path):
    write_log(feedback_log(60), tmp_path / "log.parquet")
    base = BASE.with_options(data=str(tmp_path / "log.parquet"), users=None, select="feedback-ndcg@10")
    alone, parallel = (
        compare(base, ["pointwise"], tmp_path / str(jobs), seeds=2, rates=[0.01], jobs=jobs).rows[0] for jobs in (1, 2)
    )
    metric = "feedback-ndcg@10"
    np.testing.assert_allclose(alone.results[metric], parallel.results[metric], rtol=1e-4)


def test_runs_that_differ_only_after_the_bias_model_share_it(tmp_path, small_synthetic):
    methods = ["pairwise-em", "pairwise-em:loss=ipw", "pairwise-em:loss=bayes-ipw"]
    compare(BASE, methods, tmp_path, seeds=1, rates=[0.01, 0.1], limits=(), tuning_seeds=1, jobs=1)
    biases = list((tmp_path / "bias").glob("*/weights.safetensors"))
    assert len(biases) == 3 * 2  # of a tuning seed and a tested one; the methods have no pairs, no trust, and both
    (shared,) = (tmp_path / "runs" / "pairwise-em_loss=ipw").glob("*/seed-0")
    alone = run_training(read_config(shared), tmp_path / "alone")
    for name, values in weights(shared).items():
        np.testing.assert_array_equal(values, weights(alone)[name])


def test_a_metric_that_is_added_later_is_computed_without_training_again(tmp_path, no_training, small_synthetic):
    plan = plan_of(tmp_path, ["pointwise"], seeds=1, rates=[0.1], metrics=["ndcg@10"])
    (first,) = all_of([plan])
    no_training()
    (second,) = all_of([replace(plan, metrics=["ndcg@10", "reward@3"])])
    assert second.rows[0].results["ndcg@10"] == first.rows[0].results["ndcg@10"]
    assert 0 < second.rows[0].results["reward@3"][0] < 10


def test_what_the_runs_of_a_seed_share_is_made_once(tmp_path, small_synthetic):
    by_feedback = BASE.with_options(select="off-policy-gain@10", sessions=100)
    plan = Plan(by_feedback, [Entry.parse("pointwise")], tmp_path, seeds=2, rates=[0.1])
    first, _ = plan.shared_tasks()
    assert not first.finished
    first.perform()
    assert [task.finished for task in plan.shared_tasks()] == [True, False]
    assert len([path for path in (tmp_path / "bias").glob(f"{VALUES}-*") if path.is_dir()]) == 1
    for options in ({"sessions": 120}, {"select": "ndcg@10"}):  # other data, or no off-policy metrics
        other = replace(plan, base=by_feedback.with_options(**options))
        assert not any(task.finished for task in other.shared_tasks())


# --- Entries and options --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lamdarank", "did you mean 'lambdarank'"),
        ("lambdarank:form=truth", "no option 'form'; did you mean 'from'"),
        ("lambdarank:truth", "must have the form key=value"),
        ("lambdarank:ranker=lightgmb", "did you mean 'lightgbm'"),
        ("dla:ranker=lightgbm", "no method 'dla' for lightgbm"),
    ],
)
def test_wrong_entries_are_errors(text, message):
    with pytest.raises(OptionError, match=message):
        Entry.parse(text)


def test_wrong_options_are_errors(tmp_path):
    for options, message in (
        ({"reference": "pointwize"}, "not among the methods; did you mean 'pointwise'"),
        ({"seeds": 0}, "must be at least 1"),
        ({"tuning_seeds": 0}, "must be at least 1"),
    ):
        with pytest.raises(OptionError, match=message):
            plan_of(tmp_path, **options)
    with pytest.raises(UltrError, match="'learn_from' must be one of feedback, truth"):
        compare(BASE, ["lambdarank:from=love"], tmp_path / "out", seeds=1, rates=[0.1])
    assert not (tmp_path / "out").exists()


def test_entries_name_their_ranker_or_have_that_of_the_comparison():
    base = make_config("synthetic", users="pbm", hidden=(4,))
    for text, rankers, tuned in (
        ("pairwise-em", ("mlp",), ("lr", "dropout")),
        ("pairwise-em:ranker=lightgbm", ("lightgbm",), ("lr",)),
        ("pairwise-em:ranker=auto", "auto", ()),
        ("pairwise-em:ranker=mlp+xgboost", ("mlp", "xgboost"), ()),
        ("pairwise-em:loss=opt", ("mlp",), ("lr", "dropout", "max_weight")),
        ("dla:max_weight=2", ("mlp",), ("lr", "dropout")),
        ("pairwise-em:variant=released", ("mlp",), ("lr",)),
    ):
        entry = Entry.parse(text)
        assert (entry.config(base, Setting(), 3).rankers, entry.tuned()) == (rankers, tuned)
    assert Entry.parse("pointwise", ("xgboost",)).kind == "xgboost"


def test_options_that_are_not_set_have_the_defaults_of_a_comparison(tmp_path, performed):
    compare(make_config("synthetic", users="pbm"), ["pointwise"], tmp_path / "a", seeds=1, rates=[0.1], jobs=1)
    config = read_config(performed[-1])
    assert (config.rankers, config.simulation.sessions) == (("mlp",), SESSIONS)
    assert (config.network.patience, config.network.hidden) == (PATIENCE, (512, 256, 128))
    base = make_config("synthetic", users="pbm", ranker="linear", sessions=50, patience=3, hidden=(8,))
    compare(base, ["pointwise"], tmp_path / "b", seeds=1, rates=[0.1], jobs=1)
    config = read_config(performed[-1])
    assert (config.rankers, config.simulation.sessions) == (("linear",), 50)
    assert (config.network.patience, config.network.hidden) == (3, (8,))


def test_all_networks_have_as_many_steps_in_total():
    base = BASE.with_options(steps=100, bias_steps=40, ranker="mlp")
    steps = {"pointwise": 140, "pairwise-em": 100, "pairwise-em:em=joint": 140, "pairwise-em:variant=released": 140}
    steps |= {"pairwise-em:from=truth": 140, "lambdarank:ranker=lightgbm": 500}
    for text, expected in steps.items():
        entry = Entry.parse(text)
        assert [entry.config(base, Setting(0.1, longer=n), 0).loop(entry.kind).steps for n in (1, 2)] == [
            expected,
            2 * expected,
        ]
    unchanged = Entry.parse("pairwise-em:ranker=auto").config(base, Setting(), 0)
    assert (unchanged.network.steps, unchanged.trees.rounds) == (100, 500)


# --- Plans, with runs that take no time -----------------------------------------------------------------------------


def plan_of(out, methods=("pointwise", "lambdarank"), **options):
    given = {"base": BASE, "seeds": 2, "rates": (0.001, 0.01, 0.1), "limits": (), "tuning_seeds": 1, **options}
    return Plan(entries=[Entry.parse(m, given["base"].kinds) for m in methods], out=out, **given)


def all_of(plans, **options):
    with Workers(1) as workers:
        return compare_all(plans, workers, **options)


def write_run(task, lines, means):
    (task.folder / "model").mkdir(parents=True, exist_ok=True)
    write_json(task.folder / "config.json", task.config.to_json())
    (task.folder / "metrics.jsonl").write_text("".join(json.dumps({"ranker": "x", **line}) + "\n" for line in lines))
    if task.metrics:
        write_json(task.folder / "test.json", means)


@pytest.fixture
def performed(monkeypatch):
    """The folders of the runs that were performed, in order; made up, so that they take no time."""
    folders = []

    def made_up(task):
        config = task.config
        good = 1 / (1 + abs(config.network.lr - (0.1 if config.method.name == "pointwise" else 0.01)))
        good += {None: 0.0, 3.0: 0.1, "none": -0.1}[config.method.options.get("max_weight")]
        good += 0.1 * config.network.dropout
        means = {m: good + 0.01 * config.seed + 0.1 * i for i, m in enumerate(task.metrics)}
        write_run(task, [{"step": 1, config.selection: good}], means)
        folders.append(task.folder)

    monkeypatch.setattr(RunTask, "perform", made_up)
    return folders


def test_runs_that_need_the_bias_model_of_another_come_after_the_first_runs_of_the_next_comparison(tmp_path):
    methods = ["pairwise-em", "pairwise-em:loss=ipw", "pointwise"]
    plans = [plan_of(tmp_path / name, methods, rates=[0.1]) for name in "abc"]
    order = []

    class Recorded(Workers):
        def run(self, tasks, on_done):
            pass

        def run_stages(self, works, on_done):
            firsts = [next(iter(stages))[0].folder for stages, _ in works]
            order.extend("/".join(folder.relative_to(tmp_path).parts[0:3:2]) for folder in firsts)
            raise UnfinishedError("recorded")

    with pytest.raises(UnfinishedError, match="recorded"), Recorded(1) as workers:
        compare_all(plans, workers)
    first = [[f"{name}/pairwise-em", f"{name}/pointwise"] for name in "abc"]
    later = [[f"{name}/pairwise-em_loss=ipw"] for name in "abc"]
    assert order == [*first[0], *first[1], *later[0], *first[2], *later[1], *later[2]]


def test_a_method_is_tested_as_soon_as_its_setting_is_chosen(tmp_path, performed):
    all_of([plan_of(tmp_path)])
    names = [folder.relative_to(tmp_path / "runs").as_posix() for folder in performed]
    assert names == [
        *(f"pointwise/lr-{lr}/seed-1000" for lr in ("0.001", "0.01", "0.1")),
        *(f"pointwise/lr-0.1/seed-{seed}" for seed in (0, 1)),
        *(f"lambdarank/lr-{lr}/seed-1000" for lr in ("0.001", "0.01", "0.1")),
        *(f"lambdarank/lr-0.01/seed-{seed}" for seed in (0, 1)),
    ]
    tested = {path.parent for path in tmp_path.rglob("test.json")}
    assert tested == {folder for folder in performed if folder.name != "seed-1000"}


def test_comparisons_made_together_are_those_made_alone(tmp_path, performed):
    def plans(out):
        return [
            plan_of(out / "a", reference="lambdarank"),
            plan_of(out / "b", ["lambdarank", "pal-click"], metrics=["reward@3"], seeds=3),
        ]

    together = all_of(plans(tmp_path / "together"))
    assert len(performed) == 6 + 4 + 6 + 6
    alone = [all_of([plan])[0] for plan in plans(tmp_path / "alone")]
    assert [result.to_json() for result in together] == [result.to_json() for result in alone]
    assert [row.setting.lr for row in together[0].rows] == [0.1, 0.01]
    assert [row.entry for row in together[1].rows] == ["lambdarank", "pal-click"]
    assert [result.reference for result in together] == ["lambdarank", "lambdarank"]
    assert [len(row.results["reward@3"]) for row in together[1].rows] == [3, 3]


def test_settings_are_chosen_one_after_another_by_other_seeds_than_those_tested(tmp_path, performed):
    methods = ["pointwise", "dla", "dla:max_weight=none", "pairwise-em", "pairwise-em:variant=released"]
    base = BASE.with_options(ranker="mlp", hidden=(4,), dropout=0.0)
    options = {"rates": (0.1, 0.01), "dropouts": (0.0, 0.3), "limits": (3.0, "none"), "tuning_seeds": 2}
    (result,) = all_of([plan_of(tmp_path, methods, base=base, **options)])
    assert {row.entry: row.setting for row in result.rows} == {
        "pointwise": Setting(0.1, 0.3),
        "dla": Setting(0.01, 0.3, 3.0),
        "dla:max_weight=none": Setting(0.01, 0.3),
        "pairwise-em": Setting(0.01, 0.3),
        "pairwise-em:variant=released": Setting(0.01),  # which has no dropout
    }
    of_dla = [p.relative_to(tmp_path / "runs" / "dla").as_posix() for p in performed if p.parent.parent.name == "dla"]
    tuned = ["lr-0.1", "lr-0.01", "lr-0.01-dropout-0.3"]
    tuned += [f"lr-0.01-dropout-0.3-max-weight-{limit}" for limit in ("3", "none")]
    assert of_dla == [f"{name}/seed-{seed}" for name in tuned for seed in (1000, 1001)] + [
        f"lr-0.01-dropout-0.3-max-weight-3/seed-{seed}" for seed in (0, 1)
    ]
    assert not list(tmp_path.rglob("seed-1000/test.json"))


def test_the_settings_that_are_known_need_no_runs(tmp_path, performed):
    known, counted = {"pointwise": Setting(0.1)}, []
    all_of([plan_of(tmp_path, settings=known)], on_done=lambda *event: counted.append(event[:2]))
    assert len(performed) == 2 + 3 + 2  # two seeds of each method, and three rates of the second one
    assert counted == [(done, len(performed)) for done in range(1, len(performed) + 1)]


def test_one_rate_needs_no_tuning(tmp_path, performed):
    (result,) = all_of([plan_of(tmp_path, rates=[0.3])])
    assert [row.setting.lr for row in result.rows] == [0.3, 0.3]
    assert len(performed) == 4


def test_a_metric_of_which_less_is_better_chooses_the_lowest(tmp_path, performed):
    (result,) = all_of([plan_of(tmp_path, ["pointwise"], base=BASE.with_options(select="feedback-arp"))])
    assert result.rows[0].setting.lr == 0.001


@pytest.mark.parametrize(
    ("patience", "longest", "best", "longer"),
    [
        (0, 4, {1: 10, 2: 20, 4: 40}, 4),  # always the last step
        (0, 1, {1: 10}, 1),
        (0, 4, {1: 10, 2: 15}, 2),
        (0, 4, {1: 5}, 1),
        (1, 4, {1: 5}, 1),  # it stopped because one evaluation was no better
        (2, 4, {1: 5, 2: 5}, 2),  # it might have improved after the last step
    ],
)
def test_a_method_that_still_improves_has_more_steps(tmp_path, monkeypatch, patience, longest, best, longer):
    def made_up(task):
        config = task.config
        top = best[config.network.steps // 10]
        steps = range(5, config.network.steps + 1, 5)
        lines = [{"step": step, config.selection: 1.0 - abs(step - top)} for step in steps]
        write_run(task, lines, dict.fromkeys(task.metrics, 1.0))

    monkeypatch.setattr(RunTask, "perform", made_up)
    base, counted = BASE.with_options(patience=patience), []
    plan = plan_of(tmp_path, ["pointwise"], base=base, rates=(0.1,), longest=longest)
    (result,) = all_of([plan], on_done=lambda *event: counted.append(event[:2]))
    (row,) = result.rows
    assert [done for done, _ in counted] == [*range(1, 2 * len(best) + 1)]
    assert all(done < total for done, total in counted[:-1])
    assert counted[-1] == (2 * len(best), 2 * len(best))
    assert row.setting == Setting(0.1, longer=longer)
    assert (row.steps.best, row.steps.bound) == (best[longer], 10 * longer)
    assert {p.name for p in (tmp_path / "runs" / "pointwise").iterdir()} == {
        Setting(0.1, longer=times).name for times in best
    }


def test_sessions_are_counted_for_every_method(tmp_path, performed):
    methods = ["pointwise", "pairwise-em"]
    (fresh,) = all_of([plan_of(tmp_path / "fresh", methods)])
    assert [row.sessions for row in fresh.rows] == [32, (1 + 2 * 5) * 32]  # made-up runs have one step
    (equal,) = all_of([plan_of(tmp_path / "one log", methods, base=BASE.with_options(sessions=50))])
    assert [row.sessions for row in equal.rows] == [50, 50]


def test_a_run_is_finished_when_it_has_all_its_metrics(tmp_path):
    tuning, tested, more = (RunTask(BASE, tmp_path / "run", Path(), metrics) for metrics in ((), ("a",), ("a", "b")))
    found = []
    for write in (
        lambda: None,
        lambda: (tmp_path / "run" / "model").mkdir(parents=True),
        lambda: write_json(tmp_path / "run" / "test.json", {"a": 1.0}),
        lambda: write_json(tmp_path / "run" / "test.json", {"a": 1.0, "b": 1.0}),
    ):
        write()
        found.append([task.finished for task in (tuning, tested, more)])
    assert found == [[False] * 3, [True, False, False], [True, True, False], [True] * 3]
