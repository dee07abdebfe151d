from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from conftest import make_shown_log
from ultr import compare as comparing
from ultr.compare import Entry, compare, run_folder
from ultr.errors import OptionError, UltrError
from ultr.evaluation import paired_test
from ultr.log import write_log
from ultr.models import load_model
from ultr.plots import write_dot_plot
from ultr.runs import RunConfig, mean_figures, prepare, run_training
from ultr.simulate import User, simulate_log
from ultr.training import TrainingOptions

BASE = RunConfig(
    data="synthetic",
    users="pbm",
    ranker="linear",
    select="ndcg@10",
    training=TrainingOptions(steps=10, batch=32, evaluate_every=5, device="cpu"),
)
METHODS = ["pointwise", "lambdarank", "lambdarank:from=no-bias"]


def test_methods_are_tuned_alike_run_with_all_seeds_and_never_twice(tmp_path, monkeypatch):
    result = compare(BASE, METHODS, tmp_path, seeds=3, rates=[0.001, 0.1], jobs=1)
    assert [row.entry for row in result.rows] == METHODS
    assert result.metrics == ["ndcg@10", "reward@10"]
    runs = sorted(p.relative_to(tmp_path / "runs").as_posix() for p in (tmp_path / "runs").glob("*/*/*"))
    for row in result.rows:
        folder = run_folder(tmp_path, Entry.parse(row.entry), row.lr, 0).parent
        assert sorted(p.name for p in folder.iterdir()) == ["seed-0", "seed-1", "seed-2"]
    assert len(runs) == 3 * (2 + 2)  # two rates with one seed, then two more seeds
    reference = result.rows[0]
    assert reference.against == {}
    for row in result.rows[1:]:
        expected = paired_test(np.array(row.figures["ndcg@10"]), np.array(reference.figures["ndcg@10"]))
        assert row.against["ndcg@10"] == expected
    saved = json.loads((tmp_path / "comparison.json").read_text())
    assert saved["rows"][1]["figures"]["ndcg@10"]["seeds"] == result.rows[1].figures["ndcg@10"]
    write_dot_plot(tmp_path / "plot.svg", result)
    assert (tmp_path / "plot.svg").read_text().count('class="dot"') == 2 * 3 * 3
    monkeypatch.setattr("ultr.runs._train", lambda *_: pytest.fail("a finished run was repeated"))
    assert compare(BASE, METHODS, tmp_path, seeds=3, rates=[0.001, 0.1], jobs=1).to_json() == result.to_json()
    assert comparing.default_jobs() >= 1


def test_methods_on_a_log_are_judged_on_requests_that_selection_never_saw(tmp_path):
    log, _ = simulate_log(make_shown_log(requests=60), User())
    write_log(log, tmp_path / "log.parquet")
    base = replace(BASE, data=str(tmp_path / "log.parquet"), users=None, select="feedback-ndcg@10")
    result = compare(base, ["pointwise"], tmp_path / "out", seeds=1, rates=[0.1], jobs=1)
    (run,) = (tmp_path / "out" / "runs").glob("*/*/*")
    config = RunConfig.from_json(json.loads((run / "config.json").read_text()))
    test = prepare(config).test
    assert len(test) == 12
    scores = load_model(run).score(test)
    expected = mean_figures(test, scores, ["feedback-ndcg@10"], user=None, label=config.label)
    assert result.rows[0].figures["feedback-ndcg@10"] == [pytest.approx(expected["feedback-ndcg@10"])]


@pytest.mark.slow
def test_processes_side_by_side_give_the_same_figures(tmp_path):
    alone = compare(BASE, ["pointwise"], tmp_path / "one", seeds=2, rates=[0.01], jobs=1)
    beside = compare(BASE, ["pointwise"], tmp_path / "two", seeds=2, rates=[0.01], jobs=2)
    np.testing.assert_allclose(alone.rows[0].figures["ndcg@10"], beside.rows[0].figures["ndcg@10"], rtol=1e-4)


def test_wrong_entries_and_references_are_refused(tmp_path):
    for text, message in [
        ("lamdarank", "did you mean 'lambdarank'"),
        ("lambdarank:form=truth", "no option 'form'; did you mean 'from'"),
        ("lambdarank:truth", "reads key=value"),
    ]:
        with pytest.raises(OptionError, match=message):
            Entry.parse(text)
    with pytest.raises(OptionError, match="not among the methods"):
        compare(BASE, METHODS, tmp_path, reference="pal")
    with pytest.raises(OptionError, match="one seed and one rate"):
        compare(BASE, METHODS, tmp_path, seeds=0)
    with pytest.raises(UltrError, match="cannot learn from"):
        compare(BASE, ["lambdarank:from=love"], tmp_path, seeds=1, rates=[0.1])


def test_runs_that_differ_in_what_comes_after_share_a_bias_model(tmp_path):
    base = replace(BASE, training=replace(BASE.training, bias_steps=5))
    methods = ["pairwise-em", "pairwise-em:loss=ipw", "pairwise-em:loss=opt"]
    compare(base, methods, tmp_path, seeds=1, rates=[0.01, 0.1], jobs=1)
    assert len(list((tmp_path / "bias").glob("*.safetensors"))) == 2  # opt has trust by pairs besides
    alone = run_training(Entry.parse("pairwise-em:loss=ipw").config(base, 0.1, 0), tmp_path / "alone")
    shared = run_folder(tmp_path, Entry.parse("pairwise-em:loss=ipw"), 0.1, 0)
    weights = [(run / "model" / "weights.safetensors").read_bytes() for run in (alone, shared)]
    assert weights[0] == weights[1]
