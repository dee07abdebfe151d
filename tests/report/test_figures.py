"""Figures and tables for notebooks: plots of bias and of comparisons, and `_repr_html_` of results."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

import ultr
from conftest import make_shown_log
from ultr.errors import AbsentError, OptionError
from ultr.evaluation.scores import Mean, PairedTest
from ultr.training.comparing.results import Comparison, Row, Setting
from ultr.utils.display import table_html

THETA = {k: 1 / k for k in range(1, 13)}


@pytest.fixture(scope="module")
def log():
    log, _ = ultr.simulate_log(make_shown_log(requests=300), ultr.User())
    return log


@pytest.fixture(scope="module")
def report(log):
    return ultr.audit(log.without_features(), bootstrap=0, propensities=THETA)


def lines(figure) -> dict[str, list[float]]:
    return {trace.name: list(trace.y) for trace in figure.data if trace.name}


def test_the_bias_of_a_report_is_plotted_next_to_the_truth(report):
    figure = ultr.plot_bias(report, truth=THETA)
    assert lines(figure)["known"] == pytest.approx([THETA[k] for k in report.positions.tolist()])
    assert lines(figure)["true"] == pytest.approx(list(THETA.values()))
    assert figure.layout.title.text == "Examination by position"
    assert "true" not in lines(ultr.plot_bias(report))


def test_the_bias_of_a_folder_is_that_of_its_file(report, runs, tmp_path):
    (tmp_path / "bias.json").write_text(json.dumps({"format": 1, **report.to_json()}))
    assert lines(ultr.plot_bias(tmp_path))["known"] == lines(ultr.plot_bias(report))["known"]
    run = json.loads((runs["em"] / "bias.json").read_text())
    plotted = lines(ultr.plot_bias(runs["em"]))
    assert plotted["θ"] == pytest.approx([value / run["theta"][0] for value in run["theta"]])
    assert "true" in lines(ultr.plot_bias(runs["em"], truth=THETA))
    assert lines(ultr.plot_bias(SimpleNamespace(bias_=run)))["θ"] == plotted["θ"]


def test_sources_without_an_estimate_of_bias_are_rejected(runs, tmp_path):
    with pytest.raises(AbsentError, match=r"no bias.json; pass a folder that ultr bias wrote"):
        ultr.plot_bias(tmp_path)
    with pytest.raises(AbsentError, match=r"no bias\.json"):
        ultr.plot_bias(runs["plain"])
    with pytest.raises(OptionError, match=r"no estimate of bias, got UnbiasedRanker; pass the result of ultr.audit"):
        ultr.plot_bias(ultr.UnbiasedRanker())
    with pytest.raises(OptionError, match="does not estimate examination"):
        ultr.plot_bias(SimpleNamespace(bias_={"positions": [1]}))


def test_rankers_are_compared_with_their_intervals(log):
    values = np.array([0.1, 0.2, 0.6])
    mean = ultr.mean_with_interval(values)
    scores = -log.positions.astype(float)
    theta = dict.fromkeys(range(1, 13), 1.0)
    value = ultr.off_policy_value(log, scores, theta=theta, label="click", estimator="ips")
    figure = ultr.plot_comparison({"values": values, "mean": mean, "off policy": value}, "clicks@10")
    (trace,) = figure.data
    assert list(trace.y) == ["values", "mean", "off policy"]
    assert list(trace.x) == pytest.approx([0.3, 0.3, value.value])
    assert list(trace.error_x.array) == pytest.approx([mean.high - 0.3, mean.high - 0.3, value.high - value.value])
    assert figure.layout.xaxis.title.text == "clicks@10"


@pytest.fixture
def comparison() -> Comparison:
    rows = [
        Row(name, Setting(0.1), {"ndcg@10": [0.5, 0.6], "mrr": [0.1, value]}) for name, value in (("a", 1), ("b", 2))
    ]
    return Comparison(rows, ["ndcg@10", "mrr"], "a", {"ndcg@10": Mean(0.4, 0.3, 0.5, 9), "mrr": Mean(0.2, 0.1, 0.3, 9)})


def test_a_metric_of_a_comparison_is_plotted(comparison, tmp_path):
    (tmp_path / "comparison.json").write_text(json.dumps(comparison.to_json()))
    assert ultr.plot_comparison(tmp_path).layout.title.text == "ndcg@10"
    assert list(ultr.plot_comparison(comparison, "mrr").data[0].x) == [0.1, 1, 0.1, 2]
    with pytest.raises(OptionError, match=r"no metric 'ndcg'; .*ndcg@10"):
        ultr.plot_comparison(comparison, "ndcg")


@pytest.mark.parametrize("source", [{}, 3, {"a": "text"}])
def test_sources_without_values_are_rejected(source):
    with pytest.raises(ultr.UltrError, match=r"nothing to compare|'values' must hold numbers"):
        ultr.plot_comparison(source)


def test_results_are_tables_in_notebooks(report, comparison):
    html = report._repr_html_()
    assert report.verdict.status in html
    assert html.count("<tr>") == 3 + len(report.positions)  # verdict, requests, the head, and the positions
    assert "significant" in PairedTest(0.1, 0.05, 0.15, 0.01, 9)._repr_html_()
    assert "0.4000 [0.3000, 0.5000]" in Mean(0.4, 0.3, 0.5, 9)._repr_html_()
    assert comparison._repr_html_().count("<tr>") == 4  # the head, two methods and the logged ranking


def test_a_run_is_a_table_in_notebooks(runs):
    run = ultr.load_run(runs["em"])
    assert run.name == runs["em"].name
    html = run._repr_html_()
    assert run.value[0] in html
    assert "pairwise-em" in html


def test_texts_of_tables_are_escaped():
    assert "<b>" not in table_html(["a"], [["<b>"]], "<b>")


def test_a_fitted_ranker_shows_its_results_in_notebooks(log):
    ranker = ultr.UnbiasedRanker(method="pointwise", ranker="linear", label="click", steps=1, select="feedback-ndcg@10")
    before = ranker._repr_html_()
    assert "not estimated" not in before
    html = ranker.fit(log.select(log.lengths > 1).to_table().drop_columns(["relevance"]))._repr_html_()
    assert "Fitted" in html
    assert "feedback-ndcg@10" in html
    assert "not estimated" in html  # theta, by this method
