from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from conftest import make_shown_log
from ultr.datasets.simulate import simulate_log
from ultr.datasets.users import User
from ultr.errors import DivergedError, OptionError, UltrError, UnfinishedError
from ultr.evaluation.judge import load_judge
from ultr.evaluation.scores import holm, paired_test
from ultr.log import write_log
from ultr.rankers.model import load_model
from ultr.report import write_comparison_page
from ultr.training import workers as working
from ultr.training.compare import FIRST_TUNING_SEED, Plan, compare, compare_all
from ultr.training.comparison import Difference, Row, with_tests
from ultr.training.config import RunConfig, TrainingOptions
from ultr.training.data import load_run_data
from ultr.training.entries import Entry, Setting, run_folder
from ultr.training.run import run_training
from ultr.training.selection import mean_metrics
from ultr.training.tasks import ONE_JUDGE, RunTask, read_requests
from ultr.training.workers import Workers
from ultr.utils.jsonfiles import read_json, write_json

BASE = RunConfig(
    data="synthetic",
    users="pbm",
    ranker="linear",
    select="ndcg@10",
    training=TrainingOptions(steps=5, batch=32, evaluate_every=5, bias_steps=5, device="cpu"),
)
METHODS = ["pointwise", "lambdarank", "lambdarank:from=no-bias"]


def test_methods_are_tuned_alike_run_with_all_seeds_and_never_twice(tmp_path, monkeypatch, small_synthetic):
    result = compare(BASE, METHODS, tmp_path, seeds=3, rates=[0.001, 0.1], jobs=1)
    assert [row.entry for row in result.rows] == METHODS
    assert result.metrics == ["ndcg@10", "reward@10"]
    runs = sorted(p.relative_to(tmp_path / "runs").as_posix() for p in (tmp_path / "runs").glob("*/*/*"))
    for row in result.rows:
        folder = run_folder(tmp_path, Entry.parse(row.entry), row.setting, 0).parent
        tuned = [f"seed-{FIRST_TUNING_SEED + i}" for i in range(3)]
        assert sorted(p.name for p in folder.iterdir()) == sorted(["seed-0", "seed-1", "seed-2", *tuned])
    assert len(runs) == 3 * (2 * 3 + 3)  # two rates with three seeds, then three other seeds
    reference = result.rows[0]
    assert reference.against == {}
    for row in result.rows[1:]:
        expected = paired_test(np.array(row.results["ndcg@10"]), np.array(reference.results["ndcg@10"]))
        assert row.against["ndcg@10"].seeds == expected
        of_runs = [
            np.mean(
                [read_requests(run_folder(tmp_path, Entry.parse(r.entry), r.setting, s))["ndcg@10"] for s in range(3)],
                0,
            )
            for r in (row, reference)
        ]
        assert row.against["ndcg@10"].requests == paired_test(*of_runs)
        assert float(of_runs[0].mean()) == pytest.approx(np.mean(row.results["ndcg@10"]))
    saved = json.loads((tmp_path / "comparison.json").read_text())
    assert saved["rows"][1]["figures"]["ndcg@10"]["seeds"] == result.rows[1].results["ndcg@10"]
    monkeypatch.setattr(
        "ultr.training.networks.NetworkRun.train", lambda *_: pytest.fail("a finished run was repeated")
    )
    assert compare(BASE, METHODS, tmp_path, seeds=3, rates=[0.001, 0.1], jobs=1).to_json() == result.to_json()
    assert working.default_jobs() >= 1


def test_runs_that_need_the_bias_model_of_another_come_after_the_first_runs_of_the_next_comparison(tmp_path):
    methods = ["pairwise-em", "pairwise-em:loss=ipw", "pointwise"]
    plans = [Plan(BASE, [Entry.parse(text) for text in methods], tmp_path / name, rates=[0.1]) for name in "abc"]
    order = []

    class Recorded(Workers):
        def run(self, tasks, on_done):
            pass

        def run_stages(self, stages, total, on_done):
            order.extend("/".join(Path(str(stage.tasks[0])).relative_to(tmp_path).parts[0:3:2]) for stage in stages)
            raise UnfinishedError("recorded")

    with pytest.raises(UnfinishedError, match="recorded"), Recorded(1) as workers:
        compare_all(plans, workers)
    first = [[f"{name}/pairwise-em", f"{name}/pointwise"] for name in "abc"]
    later = [[f"{name}/pairwise-em_loss=ipw"] for name in "abc"]
    assert order == [*first[0], *first[1], *later[0], *first[2], *later[1], *later[2]]


def test_the_judge_of_a_seed_is_made_once(tmp_path, small_synthetic):
    by_feedback = replace(BASE, select="off-policy-gain@10", sessions=100)
    plan = Plan(by_feedback, [Entry.parse("pointwise")], tmp_path, seeds=2, rates=[0.1])
    first, _ = plan.shared_tasks()
    assert not first.finished
    first.perform()
    assert [task.finished for task in plan.shared_tasks()] == [True, False]
    assert len(list((tmp_path / "bias").glob("judge-*"))) == 1
    other = replace(plan, base=replace(by_feedback, sessions=120))
    assert not any(task.finished for task in other.shared_tasks())
    by_labels = replace(plan, base=replace(by_feedback, select="ndcg@10"))  # without a judge
    assert not any(task.finished for task in by_labels.shared_tasks())


def test_a_setting_that_diverges_is_not_chosen_and_not_tried_again(tmp_path, monkeypatch):
    rates = [1e38, 0.01]  # steps of the first are so large that the scores overflow
    result = compare(BASE, ["pointwise"], tmp_path, seeds=1, rates=rates, tuning_seeds=2, jobs=1)
    assert result.rows[0].setting.lr == 0.01
    diverged = sorted(path.parent.name for path in tmp_path.glob("runs/*/lr-1e*38/*/diverged.json"))
    assert diverged == [f"seed-{FIRST_TUNING_SEED + i}" for i in range(2)]
    monkeypatch.setattr(
        "ultr.training.networks.NetworkRun.train", lambda *_: pytest.fail("a finished run was repeated")
    )
    again = compare(BASE, ["pointwise"], tmp_path, seeds=1, rates=rates, tuning_seeds=2, jobs=1)
    assert again.to_json() == result.to_json()
    monkeypatch.undo()
    with pytest.raises(DivergedError, match="lower --lr"):  # a tested run
        compare(BASE, ["pointwise"], tmp_path, seeds=1, rates=rates[:1], tuning_seeds=2, jobs=1)


def test_runs_side_by_side_have_memory_enough(monkeypatch):
    pages = 8 * 2**30 // working.os.sysconf("SC_PAGE_SIZE")
    real = working.os.sysconf
    monkeypatch.setattr(working.os, "sysconf", lambda name: pages if name == "SC_PHYS_PAGES" else real(name))
    monkeypatch.setattr(working.os, "sched_getaffinity", lambda _: range(64), raising=False)
    assert working.default_jobs() == 2  # of 8 GiB, half at 1.5 each
    pages *= 100
    assert working.default_jobs() == 10


def test_methods_on_a_log_are_judged_on_requests_that_selection_never_saw(tmp_path):
    log, _ = simulate_log(make_shown_log(requests=60), User())
    write_log(log, tmp_path / "log.parquet")
    base = replace(BASE, data=str(tmp_path / "log.parquet"), users=None, select="feedback-ndcg@10")
    result = compare(base, ["pointwise"], tmp_path / "out", seeds=1, rates=[0.1], jobs=1)
    (run,) = (tmp_path / "out" / "runs").glob("*/*/*")
    config = RunConfig.from_json(json.loads((run / "config.json").read_text()))
    test = load_run_data(config).test
    assert len(test) == 12
    scores = load_model(run).score(test)
    expected = mean_metrics(test, scores, ["feedback-ndcg@10"], user=None, label=config.label)
    assert result.rows[0].results["feedback-ndcg@10"] == [pytest.approx(expected["feedback-ndcg@10"])]


def test_one_judge_judges_all_runs_and_the_logged_ranking(tmp_path):
    log = replace(simulate_log(make_shown_log(requests=120), User())[0], relevance=None)
    weights = np.random.default_rng(0).integers(1, 4, len(log)).astype(np.float32)
    write_log(replace(log, weights=weights), tmp_path / "log.parquet")
    base = replace(BASE, data=str(tmp_path / "log.parquet"), users=None, select="auto")
    metric = base.selection
    result = compare(base, ["pointwise", "lambdarank"], tmp_path / "out", seeds=2, rates=[0.1], jobs=1)
    runs = {seed: next((tmp_path / "out" / "runs" / "pointwise").glob(f"*/seed-{seed}")) for seed in (0, 1)}
    judges = [load_judge(run / "judge") for run in runs.values()]
    assert judges[0].theta != judges[1].theta  # each seed has its own training requests
    test = load_run_data(RunConfig.from_json(read_json(runs[1] / "config.json"))).test
    for run in runs.values():
        value = judges[0].value(test, load_model(run).score(test), metric, label=base.label)
        np.testing.assert_allclose(read_requests(run)[metric], value.per_request)
    logged = judges[0].value(test, -test.positions, metric, label=base.label)
    assert result.logged[metric].mean == pytest.approx(logged.value)
    for row in result.rows:
        expected = paired_test(row.by_request[metric], logged.per_request, test.weights)
        assert row.against_logged[metric].requests.p == pytest.approx(expected.p)
    tests = [row.against_logged[metric] for row in result.rows]
    assert [test.holm for test in tests] == holm([test.requests.p for test in tests])
    saved = read_json(tmp_path / "out" / "comparison.json")
    assert saved["logged"][metric]["mean"] == result.logged[metric].mean
    page = write_comparison_page(tmp_path / "out", tmp_path / "page.html").read_text()
    assert "minus the logged ranking" in page


def test_values_by_a_judge_of_the_run_itself_are_judged_again(tmp_path):
    task = RunTask({}, str(tmp_path), "", ("off-policy-reward@10", "ndcg@10"))
    values = {"off-policy-reward@10": 1.0, "ndcg@10": 0.5}
    write_json(tmp_path / "test.json", values)  # as older versions wrote it
    assert not task.finished
    write_json(tmp_path / "test.json", {**values, ONE_JUDGE: True})
    assert task.finished


def test_processes_side_by_side_give_the_same_figures(tmp_path):
    alone = compare(BASE, ["pointwise"], tmp_path / "one", seeds=2, rates=[0.01], jobs=1)
    beside = compare(BASE, ["pointwise"], tmp_path / "two", seeds=2, rates=[0.01], jobs=2)
    np.testing.assert_allclose(alone.rows[0].results["ndcg@10"], beside.rows[0].results["ndcg@10"], rtol=1e-4)


def test_wrong_entries_and_references_are_refused(tmp_path):
    for text, message in [
        ("lamdarank", "did you mean 'lambdarank'"),
        ("lambdarank:form=truth", "no option 'form'; did you mean 'from'"),
        ("lambdarank:truth", "must have the form key=value"),
    ]:
        with pytest.raises(OptionError, match=message):
            Entry.parse(text)
    with pytest.raises(OptionError, match="not among the methods"):
        compare(BASE, METHODS, tmp_path, reference="pal")
    with pytest.raises(OptionError, match="must be at least 1"):
        compare(BASE, METHODS, tmp_path, seeds=0)
    with pytest.raises(UltrError, match="'learn_from' must be one of"):
        compare(BASE, ["lambdarank:from=love"], tmp_path, seeds=1, rates=[0.1])


def test_runs_that_differ_in_what_comes_after_share_a_bias_model(tmp_path, small_synthetic):
    base = replace(BASE, training=replace(BASE.training, bias_steps=5))
    methods = ["pairwise-em", "pairwise-em:loss=ipw", "pairwise-em:loss=bayes-ipw"]
    compare(base, methods, tmp_path, seeds=1, rates=[0.01, 0.1], limits=(), tuning_seeds=1, jobs=1)
    biases = list((tmp_path / "bias").glob("*/weights.safetensors"))
    assert len(biases) == 2 * 2  # of a tuning seed and a tested one; the last method has trust by pairs besides
    entry = Entry.parse("pairwise-em:loss=ipw")
    (shared,) = (tmp_path / "runs" / "pairwise-em_loss=ipw").glob("*/seed-0")
    setting = next(s for s in (Setting(0.01), Setting(0.1)) if s.name == shared.parent.name)
    alone = run_training(entry.config(base, setting, 0), tmp_path / "alone")
    weights = [(run / "model" / "weights.safetensors").read_bytes() for run in (alone, shared)]
    assert weights[0] == weights[1]


@pytest.fixture
def performed(monkeypatch):
    """The folders of the runs that were performed, in order; made up, so that they take no time."""
    folders = []

    def made_up(task):
        config, folder = RunConfig.from_json(task.config), Path(task.folder)
        (folder / "model").mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", task.config)
        good = 1 / (1 + abs(config.training.lr - (0.1 if config.method == "pointwise" else 0.01)))
        good += {None: 0.0, 3.0: 0.1, "none": -0.1}[config.method_options.get("max_weight")]
        good += 0.1 * config.ranker_options.get("dropout", 0.0)
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, config.select: good}) + "\n")
        if task.metrics:
            figures = {m: good + 0.01 * config.training.seed + 0.1 * i for i, m in enumerate(task.metrics)}
            write_json(folder / "test.json", figures)
        folders.append(folder)
        return task.folder

    monkeypatch.setattr(RunTask, "perform", made_up)
    return folders


@pytest.fixture
def threads(monkeypatch):
    """Threads in place of processes, so that made-up runs are seen by them."""
    monkeypatch.setattr(working, "ProcessPoolExecutor", lambda jobs, *_, **__: ThreadPoolExecutor(jobs))


def plan_of(out, methods=("pointwise", "lambdarank"), **options):
    given = {"seeds": 2, "rates": (0.001, 0.01, 0.1), "tuning_seeds": 1, **options}
    return Plan(BASE, [Entry.parse(m) for m in methods], out, **given)


def all_of(plans, *, jobs=1, until=inf, on_done=lambda *_: None):
    with Workers(jobs, until=until) as workers:
        return compare_all(plans, workers, on_done)


def test_no_run_is_begun_after_the_time_is_up(tmp_path, performed):
    plan = plan_of(tmp_path)
    with pytest.raises(UnfinishedError, match="the time limit was reached with 0 of 10 runs finished"):
        all_of([plan], until=time.monotonic() - 1)
    assert not performed
    assert UnfinishedError("").exit_code == 3


def test_a_run_on_its_way_when_the_time_is_up_is_finished_and_a_later_call_does_the_others(
    tmp_path, performed, monkeypatch
):
    expected = all_of([plan_of(tmp_path / "at once")])
    performed.clear()
    clock = iter(range(100))
    monkeypatch.setattr(working, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with pytest.raises(UnfinishedError, match="with 4 of 10 runs"):
        all_of([plan_of(tmp_path / "parts")], until=3 + 4)  # what the runs of three seeds share, and four runs
    assert len(performed) == 4
    heard = []
    with pytest.raises(UnfinishedError, match="with 9 of 10 runs"):
        all_of([plan_of(tmp_path / "parts")], until=next(clock) + 6, on_done=lambda *what: heard.append(what[:2]))
    assert heard == [(done, 10) for done in (5, 6, 7, 8, 9)]
    assert [r.to_json() for r in all_of([plan_of(tmp_path / "parts")])] == [r.to_json() for r in expected]
    assert len(performed) == 6 + 4


def test_runs_side_by_side_stop_when_the_time_is_up_and_a_later_call_does_the_others(
    tmp_path, performed, threads, monkeypatch
):
    plan = plan_of(tmp_path, seeds=20, rates=(0.1,))
    original, lock, calls = RunTask.perform, threading.Lock(), []

    def until_the_fourth(task):
        with lock:
            calls.append(original(task))
            if len(calls) == 4:
                monkeypatch.setattr(working, "time", SimpleNamespace(monotonic=lambda: 10.0))
            return task.folder

    monkeypatch.setattr(working, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(RunTask, "perform", until_the_fourth)
    with pytest.raises(UnfinishedError, match=r"with (\d+) of 40 runs") as stopped:
        all_of([plan], jobs=2, until=5.0)
    done = len(performed)
    assert 4 <= done <= 4 + 2 * 2 + 1  # none but those that were handed out
    assert f"with {done} of 40" in str(stopped.value)
    (result,) = all_of([plan], jobs=2)
    assert len(performed) == len(set(performed)) == 40
    assert [len(row.results["ndcg@10"]) for row in result.rows] == [20, 20]


def test_no_run_is_begun_side_by_side_after_the_time_is_up(tmp_path, performed, threads):
    with pytest.raises(UnfinishedError, match="with 0 of 10 runs"):
        all_of([plan_of(tmp_path)], jobs=2, until=time.monotonic() - 1)
    assert not performed


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_method_is_tested_as_soon_as_its_rate_is_chosen(tmp_path, performed, threads, jobs, monkeypatch):
    original, first_tested = RunTask.perform, []

    def wait_for_the_other(task):
        """The last tuning run of lambdarank takes until pointwise is tested."""
        if jobs == 2 and "lambdarank/lr-0.1/" in task.folder and not task.metrics:
            deadline = time.monotonic() + 30
            while not first_tested and time.monotonic() < deadline:
                time.sleep(0.01)
        done = original(task)
        if task.metrics:
            first_tested.append(task.folder)
        return done

    monkeypatch.setattr(RunTask, "perform", wait_for_the_other)
    all_of([plan_of(tmp_path)], jobs=jobs)
    assert "pointwise/lr-0.1" in first_tested[0]
    assert len(performed) == 10


@pytest.mark.parametrize("jobs", [1, 2])
def test_comparisons_made_at_once_are_those_made_alone(tmp_path, performed, threads, jobs):
    def plans(out):
        return [
            plan_of(out / "a", reference="lambdarank"),
            plan_of(out / "b", ["lambdarank", "pal-click"], metrics=["reward@3"], seeds=3),
        ]

    together = all_of(plans(tmp_path / "together"), jobs=jobs)
    total = len(performed)
    alone = [all_of([plan], jobs=jobs)[0] for plan in plans(tmp_path / "alone")]
    assert [result.to_json() for result in together] == [result.to_json() for result in alone]
    assert len(performed) == 2 * total == 2 * (6 + 4 + 6 + 6)
    assert [row.setting.lr for row in together[0].rows] == [0.1, 0.01]
    assert [row.entry for row in together[1].rows] == ["lambdarank", "pal-click"]
    assert [result.reference for result in together] == ["lambdarank", "lambdarank"]
    assert [len(row.results["reward@3"]) for row in together[1].rows] == [3, 3]


def test_what_a_method_has_is_chosen_one_after_another_by_other_seeds_than_those_tested(tmp_path, performed):
    methods = ["pointwise", "dla", "dla:max_weight=none", "pairwise-em", "pairwise-em:variant=released"]
    plan = plan_of(tmp_path, methods, rates=(0.1, 0.01), dropouts=(0.0, 0.3), limits=(3.0, "none"), tuning_seeds=2)
    plan = replace(plan, base=replace(BASE, ranker="mlp", ranker_options={"hidden": [4], "dropout": 0.0}))
    (result,) = all_of([plan])
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
    assert [*map(Setting.from_json, (row.to_json() for row in result.rows))] == [row.setting for row in result.rows]


def test_all_methods_have_as_many_steps_in_total(tmp_path):
    base = replace(BASE, training=replace(BASE.training, steps=100, bias_steps=40), ranker="mlp")
    steps = {"pointwise": 140, "pairwise-em": 100, "pairwise-em:em=joint": 140, "pairwise-em:variant=released": 140}
    steps |= {"pairwise-em:from=truth": 140, "lambdarank:ranker=lightgbm": 500}
    assert {text: Entry.parse(text).steps(base) for text in steps} == steps
    plan = replace(plan_of(tmp_path, [*steps]), base=base)
    for entry in plan.entries:
        task = replace(plan, rates=(0.1,)).final_tasks(entry)[0]
        assert RunConfig.from_json(task.config).training.steps == steps[entry.text]


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
        config, folder = RunConfig.from_json(task.config), Path(task.folder)
        (folder / "model").mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", task.config)
        top = best[config.training.steps // 10]
        lines = [{"step": s, config.select: 1.0 - abs(s - top)} for s in range(5, config.training.steps + 1, 5)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        write_json(folder / "test.json", dict.fromkeys(task.metrics, 1.0))
        return task.folder

    monkeypatch.setattr(RunTask, "perform", made_up)
    plan = plan_of(tmp_path, ["pointwise"], rates=(0.1,), longest=longest)
    plan = replace(plan, base=replace(BASE, training=replace(BASE.training, patience=patience)))
    (result,) = all_of([plan])
    (row,) = result.rows
    assert row.setting == Setting(0.1, longer=longer)
    assert (row.steps.best, row.steps.bound) == (best[longer], 10 * longer)
    assert {p.name for p in (tmp_path / "runs" / "pointwise").iterdir()} == {
        Setting(0.1, longer=times).name for times in best
    }


def test_sessions_are_counted_for_every_method(tmp_path, performed):
    methods = ["pointwise", "pairwise-em"]
    (fresh,) = all_of([plan_of(tmp_path / "fresh", methods)])
    assert [row.sessions for row in fresh.rows] == [32, (1 + 2 * 5) * 32]  # made-up runs have one step
    plan = plan_of(tmp_path / "one log", methods)
    (equal,) = all_of([replace(plan, base=replace(BASE, sessions=50))])
    assert [row.sessions for row in equal.rows] == [50, 50]


def test_a_difference_must_be_significant_over_runs_and_over_requests():
    rng = np.random.default_rng(0)
    requests = rng.normal(size=200)

    def row(name, seeds, by_request):
        return Row(name, Setting(0.1), {"m": list(seeds)}, by_request={"m": by_request})

    base = row("base", [1.0, 1.1, 1.2], requests)
    both = row("both", [2.0, 2.11, 2.2], requests + 1 + rng.normal(size=200) / 10)
    by_runs = row("by runs", [2.0, 2.1, 2.21], requests + rng.normal(size=200))
    by_requests = row("by requests", [0.0, 1.5, 2.9], requests + 1 + rng.normal(size=200) / 10)
    rows = with_tests([base, both, by_runs, by_requests], "base")
    assert rows[0].against == {}
    assert [r.against["m"].significant for r in rows[1:]] == [True, False, False]
    raw = [r.tested(base)["m"] for r in rows[1:]]
    smallest = min(test.seeds.p for test in raw)
    assert min(r.against["m"].holm[0] for r in rows[1:]) == pytest.approx(3 * smallest)
    assert Difference(raw[0].seeds).significant
    assert not Difference(raw[0].seeds, raw[0].requests, holm=(0.04, 0.06)).significant


def test_one_rate_needs_no_tuning(tmp_path, performed):
    (result,) = all_of([plan_of(tmp_path, rates=[0.3])])
    assert [row.setting.lr for row in result.rows] == [0.3, 0.3]
    assert len(performed) == 4


def test_only_the_rate_that_is_chosen_is_judged_on_test(tmp_path, performed):
    all_of([plan_of(tmp_path)])
    judged = {p.parent.relative_to(tmp_path / "runs").as_posix() for p in tmp_path.rglob("test.json")}
    assert judged == {f"{m}/seed-{s}" for m in ("pointwise/lr-0.1", "lambdarank/lr-0.01") for s in range(2)}


def test_what_is_tuned_is_chosen_by_a_metric_of_which_less_is_better(tmp_path, performed):
    plan = plan_of(tmp_path, ["pointwise"])
    (result,) = all_of([replace(plan, base=replace(BASE, select="feedback-arp"))])
    assert result.rows[0].setting.lr == 0.001


def test_a_run_is_finished_when_all_that_is_asked_for_is_there(tmp_path, performed):
    tuning, asked, more = (RunTask({}, str(tmp_path / "run"), "", metrics) for metrics in ((), ("a",), ("a", "b")))
    assert not any(task.finished for task in (tuning, asked, more))
    (tmp_path / "run" / "model").mkdir(parents=True)
    assert [task.finished for task in (tuning, asked, more)] == [True, False, False]
    write_json(tmp_path / "run" / "test.json", {"a": 1.0})
    assert [task.finished for task in (tuning, asked, more)] == [True, True, False]
    write_json(tmp_path / "run" / "test.json", {"a": 1.0, "b": 1.0})
    assert [task.finished for task in (tuning, asked, more)] == [True, True, True]


def test_a_metric_added_later_is_judged_without_training_again(tmp_path, monkeypatch):
    plan = plan_of(tmp_path, ["pointwise"], seeds=1, rates=[0.1], metrics=["ndcg@10"])
    (first,) = all_of([plan])
    monkeypatch.setattr(
        "ultr.training.networks.NetworkRun.train", lambda *_: pytest.fail("a finished run was repeated")
    )
    (second,) = all_of([replace(plan, metrics=["ndcg@10", "reward@3"])])
    assert second.rows[0].results["ndcg@10"] == first.rows[0].results["ndcg@10"]
    assert 0 < second.rows[0].results["reward@3"][0] < 10


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_cannot_be_made_says_why(tmp_path, threads, jobs, monkeypatch):
    def refuses(task):
        raise OptionError("too steep")

    monkeypatch.setattr(RunTask, "perform", refuses)
    with pytest.raises(UltrError, match="too steep") as refused:
        all_of([plan_of(tmp_path)], jobs=jobs)
    assert not isinstance(refused.value, UnfinishedError)
    if jobs == 2:
        assert str(tmp_path / "runs") in str(refused.value)  # which of them


def test_a_plan_refuses_what_cannot_be_compared(tmp_path):
    for wrong, says in (
        ({"seeds": 0}, "must be at least 1"),
        ({"tuning_seeds": 0}, "must be at least 1"),
        ({"reference": "pointwize"}, "not among the methods; did you mean 'pointwise'"),
    ):
        with pytest.raises(OptionError, match=says):
            plan_of(tmp_path, **wrong)
