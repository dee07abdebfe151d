"""Pages: what stands in them, what is refused, and that nothing of the data can act in them."""

from __future__ import annotations

import json
import re
import shutil
import sys
from html import unescape
from pathlib import Path

import numpy as np
import plotly.graph_objects
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultr.checkpoint import read_json, write_json
from ultr.compare import Comparison, Row
from ultr.errors import AbsentError, DataError, OptionError, OutputError, UltrError
from ultr.evaluation import mean_with_interval, paired_test
from ultr.outcomes import LOGGED, read_outcome
from ultr.report import write_comparison_page, write_report
from ultr.report.page import page
from ultr.report.parts import Card, Cards, Code, Folded, Grid, Heading, Notes, Plot, Section, Table, Text
from ultr.report.plots import bar_plot, dot_plot, heat_map, histogram, interval_plot, line_plot
from ultr.report.run import _names


def own(text: str) -> str:
    """A page without plotly.js."""
    first, rest = text.split("<script>", 1)
    return first + rest.split("</script>", 1)[1]


def plots_of(text: str) -> list[dict]:
    found = re.search(r'<script type="application/json" id="plots">(.*?)</script>', text, re.DOTALL)
    return json.loads(found.group(1))


@pytest.fixture(scope="session")
def five(runs, tmp_path_factory) -> str:
    """A page of five runs of one log."""
    chosen = [runs[name] for name in ("em", "trust", "towers", "affine", "plain")]
    path = write_report(chosen, tmp_path_factory.mktemp("page") / "report.html")
    assert path.stat().st_size < 8e6
    return path.read_text()


@pytest.fixture
def changed(runs, tmp_path):
    """A copy of a run with something else in what it left of its data."""

    def change(name: str, **facts) -> Path:
        folder = tmp_path / "changed" / name
        shutil.copytree(runs[name], folder)
        about = read_json(folder / "outcome" / "outcome.json")
        about["data"] |= facts
        write_json(folder / "outcome" / "outcome.json", about)
        return folder

    return change


def test_every_section_is_there(five):
    titles = re.findall(r"<h2>(.*?)</h2>", five)
    assert titles == ["Summary", "Data", "Learning", "Metrics", "Bias", "Rankings", "Configuration"]
    for run in ("em", "trust", "towers", "affine", "plain"):
        assert f">{run}<" in five


def test_every_plot_is_one_that_plotly_takes(five):
    for figure in plots_of(five):
        plotly.graph_objects.Figure(figure)  # it refuses names and values that it does not know
    assert len(plots_of(five)) == five.count('class="plot"')


def test_figures_are_those_of_the_run(five, runs):
    outcome = read_outcome(runs["em"])
    metric = "off-policy-reward@10"
    mean = mean_with_interval(outcome.figures[metric], outcome.weights)
    test = paired_test(outcome.figures[metric], outcome.figures[LOGGED + metric], outcome.weights)
    for text in (f"{mean.mean:.4f}", f"{mean.low:.4f} to {mean.high:.4f}", f"{test.difference:+.4f}", f"{test.p:.2g}"):
        assert f"<td>{text}</td>" in five
    other = read_outcome(runs["plain"])
    between = paired_test(other.figures[metric], outcome.figures[metric], outcome.weights)
    assert f"plain less em</th><td>{between.difference:+.4f}</td>" in five


def test_bias_is_drawn(five, runs):
    bias = json.loads((runs["em"] / "bias.json").read_text())
    drawn = [trace for figure in plots_of(five) for trace in figure["data"]]
    theta = next(trace for trace in drawn if trace.get("name") == "θ")
    np.testing.assert_allclose(theta["y"], np.array(bias["theta"]) / bias["theta"][0], rtol=1e-4)
    trust = json.loads((runs["trust"] / "bias.json").read_text())
    maps = [trace["z"] for trace in drawn if trace["type"] == "heatmap"]
    off, plus = ~np.eye(len(trust["positions"]), dtype=bool), np.array(trust["eps_plus"])
    assert any(np.allclose(np.array(z, float)[off], plus[off]) for z in maps if len(z) == len(off))
    assert "tower of click" in five
    assert "No bias model: plain." in five


def test_true_examination_is_drawn_where_it_is_known(changed, tmp_path):
    run = changed("em")
    at = json.loads((run / "outcome" / "outcome.json").read_text())["data"]["by_position"]["positions"]
    truth = np.linspace(0.8, 0.1, len(at)).tolist()
    shutil.rmtree(run)
    text = write_report([changed("em", true_theta=truth)], tmp_path / "page.html").read_text()
    true = next(t for figure in plots_of(text) for t in figure["data"] if t.get("name") == "true")
    np.testing.assert_allclose(true["y"], np.array(truth) / truth[0], rtol=1e-4)


def test_warnings_stand_on_the_first_page(five, runs):
    for warning in json.loads((runs["em"] / "bias.json").read_text())["warnings"]:
        assert f"<li>em: {warning['name']}: " in five


def test_the_command_that_repeats_a_run_is_there(five, log_path):
    assert f"ultr train {log_path} --out em --method pairwise-em" in unescape(five)


def test_nothing_is_fetched(five):
    page = own(five)
    assert "default-src &#39;none&#39;" in page or "default-src 'none'" in page
    assert not re.search(r"""(src|href)=["']?(?!data:)\w""", page)
    assert "http" not in page.replace("http-equiv", "")


HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=alert(1)>\"'&\u2028{{7*7}}/*plotly*/"


def test_no_text_of_the_data_acts(runs, tmp_path):
    odd = tmp_path / "</b><i>run"
    shutil.copytree(runs["em"], tmp_path / "run")
    config = read_json(tmp_path / "run" / "config.json")
    write_json(tmp_path / "run" / "config.json", {**config, "data": HOSTILE})
    about = read_json(tmp_path / "run" / "outcome" / "outcome.json")
    about["examples"][0]["items"][0]["item"] = HOSTILE
    about["data"]["by_position"]["positions"][0] = HOSTILE
    write_json(tmp_path / "run" / "outcome" / "outcome.json", about)
    (tmp_path / "run").rename(tmp_path / odd.name.replace("/", "_"))
    text = own(write_report([tmp_path / odd.name.replace("/", "_")], tmp_path / "page.html").read_text())
    assert "<script>window" not in text
    assert "<img" not in text
    assert "<i>" not in text
    assert plots_of(text)
    assert "{{7*7}}" in text


@given(st.text(), st.text())
def test_any_text_is_shown_as_it_is(name, value):
    name, value = ("".join(c for c in text if c.isprintable()) for text in (name, value))
    everything = [
        Text(value),
        Heading(value),
        Notes([value]),
        Cards([Card(name, value, [value])]),
        Table([name], [[value]], value, [0]),
        Grid([line_plot(name, {value: ([name], [1.0])}, x=name, y=value)]),
        Code(value),
        Folded(name, [Text(value)]),
    ]
    text = own(page(name, value, [Section("A", everything)]))
    assert f"<p>{value}</p>" in unescape(text)
    assert text.count("<script") == text.count("</script>") == 2
    (figure,) = plots_of(text)
    assert figure["data"][0]["name"] == value


def test_what_is_no_number_is_left_blank():
    (figure,) = plots_of(page("a", "b", [Section("A", [line_plot("p", {"l": ([1], [np.nan])}, x="x", y="y")])]))
    assert figure["data"][0]["y"] == [None]


def test_plots_of_odd_data_are_plots():
    nothing = np.array([np.nan])
    for plot in (
        histogram("h", {"a": nothing}, np.linspace(-1, 1, 5), x="x"),
        heat_map("m", [[None]], columns=["1"], rows=["1"], x="x", y="y"),
        interval_plot("i", {"a": (1.0, 1.0, 1.0)}, x="x"),
        bar_plot("b", {"a": (["x"], [None])}, y="y"),
        dot_plot("d", {"a": ([1.0], 1.0, 1.0)}, x="x"),
        line_plot("l", {"a": (["1"], [None])}, x="x", y="y", bands={"a": ([None], [None])}),
    ):
        assert isinstance(plot, Plot)
        plotly.graph_objects.Figure(plot.figure)


def test_runs_of_older_versions_are_shown_as_far_as_they_go(runs, tmp_path):
    shutil.copytree(runs["em"], tmp_path / "older")
    shutil.rmtree(tmp_path / "older" / "outcome")
    text = write_report([tmp_path / "older", runs["plain"]], tmp_path / "page.html").read_text()
    assert "older: The run was trained before this was kept" in text
    alone = write_report([tmp_path / "older"], tmp_path / "alone.html").read_text()
    assert "train it again to see it" in alone


def test_figures_of_other_requests_are_not_compared(runs, changed, five, tmp_path):
    other = changed("plain", fingerprint="of another log")
    text = write_report([runs["em"], other], tmp_path / "page.html").read_text()
    assert "plain less em" not in text
    assert "the logged ranking (plain)" in text
    assert "plain less em" in five


def test_names_tell_runs_apart():
    assert _names([Path("/a/x"), Path("/a/y")]) == ["x", "y"]
    assert _names([Path("/a/x"), Path("/b/x")]) == ["a/x", "b/x"]
    assert len(set(_names([Path("/a/x"), Path("/a/x")]))) == 2


def test_what_is_no_finished_run_is_refused(runs, tmp_path, monkeypatch):
    out = tmp_path / "page.html"
    with pytest.raises(OptionError, match="a run or more"):
        write_report([], out)
    with pytest.raises(AbsentError, match="no such folder"):
        write_report([tmp_path / "nowhere"], out)
    (tmp_path / "empty").mkdir()
    with pytest.raises(AbsentError, match="no run here"):
        write_report([tmp_path / "empty"], out)
    shutil.copytree(runs["plain"], tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "model")
    with pytest.raises(AbsentError, match="not finished"):
        write_report([tmp_path / "half"], out)
    assert not out.exists()
    out.write_text("mine")
    with pytest.raises(OutputError):
        write_report([runs["plain"]], out)
    assert out.read_text() == "mine"
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UltrError, match="pip install jinja2 plotly"):
        write_report([runs["plain"]], out, overwrite=True)
    assert out.read_text() == "mine"


def compared(folder: Path, **figures: list[float]) -> dict:
    rows = [Row(name, 0.1, {"ndcg@10": values}, {}) for name, values in figures.items()]
    rows = [rows[0], *(Row(r.entry, r.lr, r.figures, r.tested(rows[0])) for r in rows[1:])]
    result = Comparison(rows, ["ndcg@10"], rows[0].entry).to_json()
    folder.mkdir()
    (folder / "comparison.json").write_text(json.dumps(result))
    return result


def test_a_comparison_has_its_page(tmp_path):
    result = compared(tmp_path / "c", pointwise=[0.5, 0.51, 0.52], dla=[0.7, 0.72, 0.73])
    text = write_report([tmp_path / "c"], tmp_path / "page.html").read_text()
    for figure in plots_of(text):
        plotly.graph_objects.Figure(figure)
    test = result["rows"][1]["figures"]["ndcg@10"]["against"]
    assert f"<td>{test['difference']:+.4f}</td>" in text
    assert '<tr class="marked">\n<th scope="row">dla</th>' in text
    assert re.search(r'class="name">dla</div><div class="figure">0.7167', text)
    (tmp_path / "c" / "comparison.json").write_text("{}")
    with pytest.raises(DataError, match="compare again"):
        write_comparison_page(tmp_path / "c", tmp_path / "other.html")


def test_the_command(ultr, runs, tmp_path):
    out = tmp_path / "page.html"
    done = ultr("report", runs["em"], runs["plain"], "--out", out)
    assert done.returncode == 0, done.stderr
    assert out.is_file()
    assert "open it in a browser" in done.stderr
    again = ultr("report", runs["em"], "--out", out)
    assert again.returncode == 1
    assert "--overwrite" in again.stderr
    assert ultr("report", runs["em"], "--out", out, "--overwrite").returncode == 0
    assert ultr("report", tmp_path / "no", "--out", tmp_path / "b.html").returncode == 1


def test_the_bias_of_a_log_has_its_page(ultr, log_path, tmp_path):
    done = ultr("bias", log_path, "--bootstrap", 10, "--out", tmp_path / "bias")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "bias" / "bias.json").read_text())
    text = (tmp_path / "bias" / "bias.html").read_text()
    assert f'class="figure">{report["verdict"]["status"]}<' in text
    for figure in plots_of(text):
        plotly.graph_objects.Figure(figure)
    assert ultr("report", tmp_path / "bias", "--out", tmp_path / "again.html").returncode == 0
    again = (tmp_path / "again.html").read_text()
    assert plots_of(again) == plots_of(text)
    (tmp_path / "bias" / "bias.json").write_text("{}")
    refused = ultr("report", tmp_path / "bias", "--out", tmp_path / "third.html")
    assert refused.returncode == 1
    assert "run ultr bias again" in refused.stderr
