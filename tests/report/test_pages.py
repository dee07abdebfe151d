"""Pages: their content, errors for wrong input, and that no text of the data is executed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from dataclasses import asdict, replace
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import plotly.graph_objects
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bias.worlds import with_rare_positions, world
from pages import plots_of
from ultr.errors import AbsentError, DataError, OptionError, OutputError, UltrError
from ultr.evaluation.off_policy import compare_values, load_off_policy_model, off_policy_value
from ultr.evaluation.scores import Mean, holm, mean_with_interval
from ultr.log import write_log
from ultr.rankers.model import load_model
from ultr.report import write_bias_page, write_comparison_page, write_report
from ultr.report.bias import bias_section
from ultr.report.page import (
    Answers,
    Card,
    Cards,
    Code,
    Folded,
    Grid,
    Heading,
    Headline,
    Notes,
    Plot,
    Section,
    Table,
    Text,
    page,
)
from ultr.report.plots import bar_plot, dot_plot, heat_map, histogram, interval_plot, line_plot
from ultr.report.runs import _names, load_run
from ultr.report.runs import answer as answer_of
from ultr.training.comparing.results import Comparison, Row, Setting, with_tests
from ultr.training.data import load_run_data
from ultr.training.examining import examination_of
from ultr.training.folder import read_config, read_metrics
from ultr.training.outcome import LOGGED, RunOutcome, read_outcome
from ultr.utils.jsonfiles import read_json, write_json


def without_plotly(text: str) -> str:
    """Return a page without plotly.js."""
    first, rest = text.split("<script>", 1)
    return first + rest.split("</script>", 1)[1]


NAMES = ("em", "trust", "towers", "affine", "plain", "both")


@pytest.fixture(scope="session")
def six(runs, tmp_path_factory) -> str:
    """The page of six runs of one log."""
    path = write_report([runs[name] for name in NAMES], tmp_path_factory.mktemp("page") / "report.html")
    assert path.stat().st_size < 8e6
    return path.read_text()


@pytest.fixture
def changed(runs, tmp_path):
    """Copy a run and change facts about its data."""

    def change(name: str, **facts) -> Path:
        folder = tmp_path / "changed" / name
        shutil.copytree(runs[name], folder)
        about = read_json(folder / "outcome" / "outcome.json")
        about["data"] |= facts
        write_json(folder / "outcome" / "outcome.json", about)
        return folder

    return change


ABOUT = {"means": {}, "against_logged": {}, "decisions": {}, "confirmed": True, "split": {"name": "test"}}


def test_every_section_is_there(six):
    titles = re.findall(r"<h2>(.*?)</h2>", six)
    assert titles == [
        "Summary",
        "Data",
        "Learning",
        "Metrics",
        "Bias",
        "Calibration",
        "Features",
        "Rankings",
        "Configuration",
    ]
    for run in NAMES:
        assert f">{run}<" in six


def test_plotly_accepts_every_plot(six):
    for figure in plots_of(six):
        plotly.graph_objects.Figure(figure)  # raises an error for unknown names and values


def test_the_page_begins_with_an_answer_in_words(runs, tmp_path):
    page = write_report([runs["plain"], runs["em"]], tmp_path / "page.html", names=["old one", "new one"]).read_text()
    assert "<title>old one and new one" in page
    order = (
        "Decision on ",
        "Compared with the logged",
        "Is it better?",
        "Which run is best?",
        "How sure?",
        "What to do?",
    )
    words = [page.index(each) for each in order]
    assert words == sorted(words)
    assert words[-1] < page.index("on test, at step")  # before the cards
    for names in (["one"], ["same", "same"]):
        with pytest.raises(OptionError, match="a name of its own"):
            write_report([runs["plain"], runs["em"]], tmp_path / "other.html", names=names)


@pytest.mark.parametrize(
    ("shift", "answer", "do"),
    [
        (0.2, "Yes. With new, the expected feedback on the first 10 items is 20.0% higher", "a later log"),
        (-0.2, "No. With new, the expected feedback on the first 10 items is 20.0% lower", "Keep the"),
        (0.0005, "Not clear. With new, the expected feedback", "Collect more requests"),
    ],
)
def test_the_answer_follows_from_the_difference_to_the_logged_ranking(shift, answer, do):
    rng, metric = np.random.default_rng(0), "off-policy-reward@10"
    logged = 1 + rng.normal(0, 0.01, 400)
    logged += 1 - logged.mean()
    results = {metric: logged + shift + rng.permutation(np.linspace(-0.1, 0.1, 400)), LOGGED + metric: logged}
    outcome = RunOutcome(ABOUT, [], np.ones(400), np.zeros(400), results)
    bias = {"theta_from": "1,000 requests in random order", "theta_standard_error": 0.3}
    run = SimpleNamespace(
        name="new",
        folder=Path("my run"),
        value=(metric, 1.2, 5),
        outcome=outcome,
        bias=bias,
        warnings=["few clicks"],
    )
    headline, answers = answer_of([run], None)
    verdict, better = answer.split(". ")[0], answers.answers["Is it better?"]
    assert headline == Headline(f"Is new better than the logged ranking? {verdict}.", good=shift == 0.2)
    assert better.startswith(answer)
    assert do in answers.answers["What to do?"]
    for words in ("over 400 test requests", f"{bias['theta_from']} (standard error 30%)", "the warning below"):
        assert words in answers.answers["How sure?"]
    run.outcome = replace(outcome, about={**ABOUT, "confirmed": False})
    headline, answers = answer_of([run], None)
    unsure = "Probably, if the estimated examination is right" if verdict == "Yes" else verdict
    assert headline == Headline(f"Is new better than the logged ranking? {unsure}.")
    assert answers.answers["Is it better?"].startswith(answer.replace("Yes.", f"{unsure}."))
    assert "nothing confirms it" in answers.answers["How sure?"]
    decision = {"action": "test it on a part of the users", "reason": "it is better", "worse": 0.01, "requests": None}
    run.outcome = replace(outcome, about={**ABOUT, "decisions": {metric: decision}})
    headline, _ = answer_of([run], None)
    assert headline == Headline("Decision: test it on a part of the users", "It is better.", good=shift == 0.2)
    run.outcome = replace(outcome, about={**ABOUT, "confirmed": False})
    run.decisions = SimpleNamespace(label="click")
    headline, answers = answer_of([run, run], "new and new have different labels")
    assert headline == Headline("Which run is best: not known here", "new and new have different labels.")
    alone = answers.answers["Is new better than the logged ranking?"]
    assert alone.startswith(f"{unsure}: the expected feedback on the first 10")
    assert "(click) is" in alone


def test_the_page_shows_the_metrics_of_the_run(six, runs):
    outcome = read_outcome(runs["em"])
    metric = "off-policy-reward@10"
    mean, test = outcome.mean(metric), outcome.test(metric, outcome, LOGGED + metric)
    for text in (f"{mean.mean:.4f}", f"{mean.low:.4f} to {mean.high:.4f}", f"{test.difference:+.4f}"):
        assert f"<td>{text}</td>" in six
    other = read_outcome(runs["plain"])
    between = other.test(metric, outcome, metric)
    assert f"plain minus em</th><td>{between.difference:+.4f}</td>" in six


def test_a_report_has_the_intervals_of_evaluate(runs):
    """`ultr evaluate` has a θ of its own; here both have that of the run. Nothing confirms it."""
    run = runs["em"]
    outcome, metric = read_outcome(run), "off-policy-reward@10"
    data = load_run_data(read_config(run))
    scores = load_model(run).score(data.test)
    model, examination = load_off_policy_model(run / "off-policy"), examination_of(run)[1]
    theta = model.theta_of(examination.positions)
    draws = [dict(zip(examination.positions, each, strict=True)) for each in examination.draws(30)]
    expected = []
    for power in (1.0, 0.5, 1.5):
        values = [
            off_policy_value(
                data.test,
                each,
                theta={k: t**power for k, t in theta.items()},
                label=data.label,
                kind="reward",
                direct=model.direct(data.test) * [theta[k] ** (1 - power) for k in data.test.positions],
                replicates=[{k: t**power for k, t in draw.items()} for draw in draws],
            )
            for each in (scores, data.logged_scores(data.test))
        ]
        expected.append((values[0], compare_values(*values)))
    assert not outcome.confirmed
    found, mean = outcome.test(metric, outcome, LOGGED + metric), outcome.mean(metric)
    assert found.difference == pytest.approx(expected[0][1].difference)
    differences = [(test.difference, test.high - test.difference) for _, test in expected]
    means = [(value.value, value.high - value.value) for value, _ in expected]
    for interval, under in ((found, differences), (mean, means)):
        margins = [min(margin, under[0][1]) for _, margin in under]
        assert interval.low == pytest.approx(min(v - m for (v, _), m in zip(under, margins, strict=True)))
        assert interval.high == pytest.approx(max(v + m for (v, _), m in zip(under, margins, strict=True)))


def test_a_difference_of_two_runs_has_the_errors_of_both():
    rng, metric = np.random.default_rng(0), "off-policy-gain@10"
    results = {metric: rng.normal(1.2, 1, 400)}
    plain = RunOutcome(ABOUT, [], np.ones(400), np.zeros(400), results)
    mean, other = (
        plain.mean(metric),
        RunOutcome(ABOUT, [], np.ones(400), np.zeros(400), {metric: rng.normal(1, 1, 400)}),
    )
    wide = Mean(mean.mean, mean.mean - 0.3, mean.mean + 0.3, 400)
    one = replace(plain, about={**ABOUT, "means": {metric: asdict(wide)}})
    before, after = (each.test(metric, other, metric) for each in (plain, one))
    more = 0.3**2 - ((mean.high - mean.low) / 2) ** 2
    half = (before.high - before.low) / 2
    assert (after.high - after.low) / 2 == pytest.approx(np.sqrt(half**2 + more), rel=1e-3)


def test_p_values_of_a_page_are_corrected_for_the_number_of_tests(runs, tmp_path):
    metric = "off-policy-reward@10"
    a, b = (read_outcome(runs[name]) for name in ("em", "plain"))
    pairs = [(a, LOGGED + metric, a), (b, LOGGED + metric, b), (b, metric, a)]
    raw = [new.test(metric, old, name).p for new, name, old in pairs]
    text = write_report([runs["em"], runs["plain"]], tmp_path / "page.html").read_text()
    table = text.split("p over requests</th>")[1].split("</table>")[0]
    assert [row[-1] for row in re.findall(r"(<td>([^<]*)</td>)\n?</tr>", table)] == [f"{p:.2g}" for p in holm(raw)]


def test_the_importance_of_features_is_drawn(six, runs):
    found = read_outcome(runs["em"]).about["importance"]
    assert found["metric"] == "off-policy-likelihood"
    drops = [each["drop"] for each in found["features"]]
    assert len(drops) == 4
    assert drops == sorted(drops, reverse=True)
    bars = [trace for figure in plots_of(six) for trace in figure["data"] if trace.get("orientation") == "h"]
    assert len(bars) == len(NAMES)
    assert any(trace["x"] == pytest.approx(drops, abs=1e-4) for trace in bars)


def test_bias_is_drawn(six, runs):
    bias = json.loads((runs["em"] / "bias.json").read_text())
    drawn = [trace for figure in plots_of(six) for trace in figure["data"]]
    theta = next(trace for trace in drawn if trace.get("name") == "θ")
    np.testing.assert_allclose(theta["y"], np.array(bias["theta"]) / bias["theta"][0], rtol=1e-4)
    trust = json.loads((runs["trust"] / "bias.json").read_text())
    maps = [trace["z"] for trace in drawn if trace["type"] == "heatmap"]
    off, plus = ~np.eye(len(trust["positions"]), dtype=bool), np.array(trust["eps_plus"])
    assert any(np.allclose(np.array(z, float)[off], plus[off]) for z in maps if len(z) == len(off))
    assert "tower of click" in six
    assert "No bias model: plain." in six


def test_true_examination_is_drawn_where_it_is_known(changed, tmp_path):
    run = changed("em")
    at = json.loads((run / "outcome" / "outcome.json").read_text())["data"]["by_position"]["positions"]
    truth = np.linspace(0.8, 0.1, len(at)).tolist()
    shutil.rmtree(run)
    text = write_report([changed("em", true_theta=truth)], tmp_path / "page.html").read_text()
    true = next(t for figure in plots_of(text) for t in figure["data"] if t.get("name") == "true")
    np.testing.assert_allclose(true["y"], np.array(truth) / truth[0], rtol=1e-4)


def test_both_rankers_of_a_run_have_curves_and_their_best_step(six, runs):
    lines = [line for line in read_metrics(runs["both"]) if line["ranker"] == "lightgbm"]
    drawn = [trace for figure in plots_of(six) for trace in figure["data"] if trace.get("name") == "both: lightgbm"]
    metric = "off-policy-likelihood"
    assert [trace["x"] for trace in drawn] == [[line["step"] for line in lines]]  # trees of the library have no loss
    assert drawn[0]["y"] == pytest.approx([line[metric] for line in lines], rel=1e-4)
    best = max(lines, key=lambda line: line[metric])
    row = f"both: lightgbm</th><td>{metric}</td><td>{best[metric]:.4f}</td><td>{best['step']}</td>"
    assert row in re.sub(r">\s+<", "><", six)
    alone = write_report([runs["both"]], runs["both"].with_name("both.html")).read_text()
    names = {trace.get("name") for figure in plots_of(alone) for trace in figure["data"]}
    assert {"mlp", "lightgbm"} <= names
    assert "pairwise-em, mlp + lightgbm" in alone


def test_the_page_shows_warnings(six, runs):
    for warning in json.loads((runs["em"] / "bias.json").read_text())["warnings"]:
        assert f"<li>em: {warning['name']}: " in six


def test_the_page_shows_the_command_that_repeats_a_run(six, log_path):
    assert f"ultr train {log_path} --out em --set rankers=mlp" in unescape(six)


def test_the_page_loads_nothing_from_the_network(six):
    page = without_plotly(six)
    assert "default-src &#39;none&#39;" in page or "default-src 'none'" in page
    assert not re.search(r"""(src|href)=["']?(?!data:)\w""", page)
    assert "http" not in page.replace("http-equiv", "")


HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=alert(1)>\"'&\u2028{{7*7}}"


def test_no_text_of_the_data_is_executed(runs, tmp_path):
    odd = tmp_path / "</b><i>run"
    shutil.copytree(runs["em"], tmp_path / "run")
    config = read_json(tmp_path / "run" / "config.json")
    write_json(tmp_path / "run" / "config.json", {**config, "data": {**config["data"], "source": HOSTILE}})
    about = read_json(tmp_path / "run" / "outcome" / "outcome.json")
    about["examples"][0]["items"][0]["item"] = HOSTILE
    about["data"]["by_position"]["positions"][0] = HOSTILE
    write_json(tmp_path / "run" / "outcome" / "outcome.json", about)
    (tmp_path / "run").rename(tmp_path / odd.name.replace("/", "_"))
    text = without_plotly(write_report([tmp_path / odd.name.replace("/", "_")], tmp_path / "page.html").read_text())
    assert "<script>window" not in text
    assert "<img" not in text
    assert "<i>" not in text
    assert plots_of(text)
    assert "{{7*7}}" in text


@given(st.text(), st.text())
def test_any_text_is_shown_literally(name, value):
    name, value = ("".join(c for c in text if c.isprintable()) for text in (name, value))
    everything = [
        Text(value),
        Heading(value),
        Notes([value]),
        Headline(value, value),
        Answers({name: value}),
        Cards([Card(name, value, [value])]),
        Table([name], [[value]], value, [0]),
        Grid([line_plot(name, {value: ([name], [1.0])}, x=name, y=value)]),
        Code(value),
        Folded(name, [Text(value)]),
    ]
    text = without_plotly(page(name, value, [Section("A", everything)]))
    assert f"<p>{value}</p>" in unescape(text)
    assert text.count("<script") == text.count("</script>") == 2
    (figure,) = plots_of(text)
    assert figure["data"][0]["name"] == value


def test_values_that_are_not_finite_are_blank():
    (figure,) = plots_of(page("a", "b", [Section("A", [line_plot("p", {"l": ([1], [np.nan])}, x="x", y="y")])]))
    assert figure["data"][0]["y"] == [None]


def test_an_interval_is_a_band_around_its_line_in_its_colour():
    lines = {"bare": ([1, 2, 3], [1.0, 1.0, 1.0]), "l": ([1, 2, 3], [1.0, 2.0, 3.0])}
    bands = {"l": ([0.5, 1.5, 2.5], [1.5, 2.5, 3.5])}
    _, band, line = line_plot("p", lines, x="x", y="y", bands=bands).figure["data"]
    assert band["x"] == [1, 2, 3, 3, 2, 1]
    assert band["y"] == [1.5, 2.5, 3.5, 2.5, 1.5, 0.5]
    assert (line["name"], line["line"]["color"], band["fillcolor"]) == ("l", "#d55e00", "rgba(213,94,0,0.15)")


@pytest.mark.parametrize(("low", "at"), [([-np.inf] * 2, None), ([None, np.nan], None), ([0.0, None], [1, 1])])
def test_a_band_has_only_finite_ends(low, at):
    high = [None if value is None else -value for value in low]
    plot = line_plot("p", {"l": ([1, 2], [0.0, 0.0])}, x="x", y="y", bands={"l": (low, high)})
    assert [trace["x"] for trace in plot.figure["data"]] == [*([at] if at else []), [1, 2]]


@given(st.lists(st.lists(st.floats(-9, 9), min_size=1, max_size=4), min_size=1, max_size=4))
def test_a_dot_plot_has_every_value_and_the_interval_of_each_mean(rows):
    dots, mean = dot_plot("p", {f"row {i}": values for i, values in enumerate(rows)}, x="x").figure["data"]
    assert dots["x"] == [value for values in rows for value in values]
    assert dots["y"] == [f"row {i}" for i, values in enumerate(rows) for _ in values]
    for i, values in enumerate(rows):
        expected = mean_with_interval(np.array(values))
        ends = (expected.low, expected.high) if len(values) > 1 else (expected.mean, expected.mean)
        assert mean["x"][i] == expected.mean
        assert mean["customdata"][i] == list(ends)


def test_a_heat_map_has_its_first_row_on_top():
    plot = heat_map("m", [[None, 0.25], [0.5, None]], columns=["a", "b"], rows=["c", "d"], x="x", y="y")
    (trace,) = plot.figure["data"]
    assert (trace["z"], trace["x"], trace["y"]) == ([[None, 0.25], [0.5, None]], ["a", "b"], ["c", "d"])
    assert plot.figure["layout"]["yaxis"]["autorange"] == "reversed"


def test_plots_of_little_data_are_plots():
    nothing = np.array([np.nan])
    for plot in (
        histogram("h", {"a": nothing}, np.linspace(-1, 1, 5), x="x"),
        heat_map("m", [[None]], columns=["1"], rows=["1"], x="x", y="y"),
        interval_plot("i", {"a": (1.0, 1.0, 1.0)}, x="x"),
        bar_plot("b", {"a": (["x"], [None])}, y="y"),
        dot_plot("d", {"a": [1.0]}, x="x"),
        line_plot("l", {"a": (["1"], [None])}, x="x", y="y", bands={"a": ([None], [None])}),
    ):
        assert isinstance(plot, Plot)
        plotly.graph_objects.Figure(plot.figure)


def test_metrics_of_other_requests_are_not_compared(runs, changed, six, tmp_path):
    other = changed("plain", fingerprint="of another log")
    text = write_report([runs["em"], other], tmp_path / "page.html").read_text()
    assert "plain minus em" not in text
    assert "the logged ranking (plain)" in text
    assert "em and plain have different data" in text
    assert "p over requests" not in text
    assert "plain minus em" in six


def test_runs_that_were_evaluated_under_different_examination_are_not_compared(runs, log_path, tmp_path):
    shutil.copytree(runs["plain"], tmp_path / "own theta")
    file = tmp_path / "own theta" / "off-policy" / "model.json"
    model = read_json(file)
    write_json(file, {**model, "theta": dict.fromkeys(model["theta"], 1.0)})
    text = write_report([runs["em"], tmp_path / "own theta"], tmp_path / "page.html").read_text()
    assert "em and own theta were evaluated under different estimates of examination" in text
    assert text.count("p over requests") == 1  # of ndcg@10, which uses true labels
    assert "(p = " not in text
    command = shlex.join(["ultr", "evaluate", str(runs["em"]), f"{tmp_path}/own theta", "--data", str(log_path)])
    assert command in unescape(text)


def test_runs_have_different_names():
    assert _names([Path("/a/x"), Path("/a/y")]) == ["x", "y"]
    assert _names([Path("/a/x"), Path("/b/x")]) == ["a/x", "b/x"]
    assert len(set(_names([Path("/a/x"), Path("/a/x")]))) == 2


def test_a_run_has_the_name_that_the_user_gave_also_through_a_symlink(runs, tmp_path, monkeypatch):
    (tmp_path / "live").symlink_to(runs["plain"])
    monkeypatch.chdir(tmp_path)
    assert _names([Path("live"), Path("live/../other")]) == ["live", "other"]
    assert load_run("live").name == "live"
    assert "<title>live</title>" in write_report(["live"], tmp_path / "page.html").read_text()


def test_a_section_without_content_has_no_tab(changed, tmp_path):
    run = changed("plain")  # it has no bias model
    about = read_json(run / "outcome" / "outcome.json")
    del about["moves"]  # as for data without a logged ranking
    write_json(run / "outcome" / "outcome.json", about)
    titles = re.findall(r"<h2>(.*?)</h2>", write_report([run], tmp_path / "page.html").read_text())
    assert "Summary" in titles
    assert not {"Bias", "Rankings"} & set(titles)


def test_only_finished_runs_are_accepted(runs, tmp_path, monkeypatch):
    out = tmp_path / "page.html"
    with pytest.raises(OptionError, match="at least one run"):
        write_report([], out)
    with pytest.raises(AbsentError, match="the folder does not exist"):
        write_report([tmp_path / "nowhere"], out)
    (tmp_path / "empty").mkdir()
    with pytest.raises(AbsentError, match="this folder is not a run"):
        write_report([tmp_path / "empty"], out)
    for missing in ("model", "outcome"):
        shutil.copytree(runs["plain"], tmp_path / f"no {missing}")
        shutil.rmtree(tmp_path / f"no {missing}" / missing)
        with pytest.raises(AbsentError, match="not finished"):
            write_report([tmp_path / f"no {missing}"], out)
    assert not out.exists()
    out.write_text("mine")
    with pytest.raises(OutputError):
        write_report([runs["plain"]], out)
    assert out.read_text() == "mine"
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UltrError, match="an HTML page needs jinja2; run: pip install jinja2"):
        write_report([runs["plain"]], out, overwrite=True)
    assert out.read_text() == "mine"


def compared(folder: Path, by_request: dict[str, list[float]] | None = None, **results: list[float]) -> dict:
    known = {name: {"ndcg@10": np.array(values)} for name, values in (by_request or {}).items()}
    rows = [
        Row(name, Setting(0.1), {"ndcg@10": values}, by_request=known.get(name, {})) for name, values in results.items()
    ]
    result = Comparison(with_tests(rows, rows[0].entry), ["ndcg@10"], rows[0].entry).to_json()
    folder.mkdir()
    (folder / "comparison.json").write_text(json.dumps(result))
    return result


def table_of(text: str, metric: str = "ndcg@10") -> dict[str, dict[str, str]]:
    """Return the table of a comparison's page: method -> column -> text; the column `marked` is 'marked' or empty."""
    (head,) = re.findall(rf"<tr>(<th[^>]*>method</th><th[^>]*>{metric}</th>.*?)</tr>", text.replace("\n", ""))
    columns = re.findall(r"<th[^>]*>(.*?)</th>", head)[1:]
    rows = re.findall(r'<tr(?: class="(marked)")?>\n?<th scope="row">(.*?)</th>(.*?)</tr>', text, re.DOTALL)
    return {
        name: {**dict(zip(columns, re.findall(r"<td>(.*?)</td>", cells), strict=True)), "marked": marked}
        for marked, name, cells in rows
    }


def test_a_comparison_has_its_page(tmp_path):
    result = compared(tmp_path / "c", pointwise=[0.5, 0.51, 0.52], dla=[0.7, 0.72, 0.73])
    text = write_report([tmp_path / "c"], tmp_path / "page.html").read_text()
    for figure in plots_of(text):
        plotly.graph_objects.Figure(figure)
    test = result["rows"][1]["figures"]["ndcg@10"]["against"]
    assert f"<td>{test['difference']:+.4f}</td>" in text
    assert '<tr class="marked">\n<th scope="row">dla</th>' in text
    assert '<p class="decision">Best method: dla</p><p>By ndcg@10: 0.7167.</p>' in text
    assert "<dt>How sure?</dt><dd>It is 40.5% higher than pointwise (p = " in text
    assert "<dt>What to do?</dt><dd>Train dla (lr 0.1) with ultr train" in text
    table = table_of(text)
    assert list(table["dla"]) == [
        "ndcg@10",
        "standard deviation",
        "setting",
        "minus pointwise",
        "p over runs",
        "p over requests",
        "marked",
    ]
    assert table["dla"]["setting"] == "lr 0.1"
    assert (table["dla"]["p over runs"], table["dla"]["p over requests"]) == (f"{test['p']:.2g}", "")
    assert list(table["pointwise"].values()) == ["0.5100", "0.0100", "lr 0.1", "", "", "", ""]
    (tmp_path / "c" / "comparison.json").write_text("{}")
    with pytest.raises(DataError, match="compare again"):
        write_comparison_page(tmp_path / "c", tmp_path / "other.html")


def test_the_page_of_a_comparison_marks_what_is_significant_over_runs_and_requests_after_correction(tmp_path):
    requests = {name: [0.7, 0.71, 0.69, 0.7] for name in ("dla", "affine", "listwise")}
    result = compared(
        tmp_path / "c",
        {**requests, "pointwise": [0.5, 0.5, 0.5, 0.5], "towers": [0.9, 0.1, 0.2, 0.9]},
        pointwise=[0.5, 0.51, 0.52],
        dla=[0.7, 0.72, 0.73],
        towers=[0.7, 0.72, 0.73],  # not significant over requests
        affine=[0.56, 0.545, 0.555],  # p = 0.035 over runs, before the correction
        listwise=[0.5, 0.53, 0.51],
    )
    text = write_report([tmp_path / "c"], tmp_path / "page.html").read_text()
    table = table_of(text)
    assert {name for name, row in table.items() if row["marked"]} == {"dla"}
    tests = {row["method"]: row["figures"]["ndcg@10"]["against"] for row in result["rows"][1:]}
    for name, test in tests.items():
        assert [table[name][f"p over {what}"] for what in ("runs", "requests")] == [f"{p:.2g}" for p in test["holm"]]
    assert tests["affine"]["p"] < 0.05 < tests["affine"]["holm"][0]
    assert "corrected by Holm&#39;s method" in text


@pytest.mark.parametrize(("p", "marked"), [(0.0497, "marked"), (0.05, ""), (0.0503, "")])
def test_the_p_value_and_not_its_rounded_text_marks_a_row(tmp_path, p, marked):
    result = compared(tmp_path / "c", pointwise=[0.5, 0.51, 0.52], dla=[0.7, 0.72, 0.73])
    result["rows"][1]["figures"]["ndcg@10"]["against"]["holm"] = [p, 0.0]
    (tmp_path / "c" / "comparison.json").write_text(json.dumps(result))
    row = table_of(write_report([tmp_path / "c"], tmp_path / "page.html").read_text())["dla"]
    assert (row["p over runs"], row["marked"]) == ("0.05", marked)


def test_the_page_of_a_comparison_names_all_that_was_chosen(tmp_path):
    settings = {
        "dla": (Setting(0.02, 0.0, 3.0), "lr 0.02, dropout 0, weights to 3"),
        "towers": (Setting(0.005, max_weight="none", longer=2), "lr 0.005, weights without a limit, 2 times the steps"),
        "pointwise": (Setting(0.1), "lr 0.1"),
    }
    rows = [Row(name, setting, {"ndcg@10": [0.5, 0.6]}) for name, (setting, _) in settings.items()]
    (tmp_path / "c").mkdir()
    write_json(tmp_path / "c" / "comparison.json", Comparison(rows, ["ndcg@10"], "dla").to_json())
    table = table_of(write_report([tmp_path / "c"], tmp_path / "page.html").read_text())
    assert {name: row["setting"] for name, row in table.items()} == {n: text for n, (_, text) in settings.items()}


@pytest.mark.parametrize("setting", [{"lr": "fast"}, {"lr": 0.1, "dropout": "x"}, {"max_weight": []}])
def test_a_comparison_without_a_valid_setting_is_an_error(tmp_path, setting):
    result = compared(tmp_path / "c", pointwise=[0.5, 0.51, 0.52], dla=[0.7, 0.72, 0.73])
    del result["rows"][1]["lr"]
    result["rows"][1] |= setting
    (tmp_path / "c" / "comparison.json").write_text(json.dumps(result))
    with pytest.raises(DataError, match="compare again"):
        write_comparison_page(tmp_path / "c", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_the_command(ultr, runs, tmp_path):
    out = tmp_path / "page.html"
    done = ultr("report", runs["em"], runs["plain"], "--out", out)
    assert done.returncode == 0, done.stderr
    assert out.is_file()
    assert "open it in a browser" in done.stderr
    assert done.stdout.count("Importance of features in") == 2
    assert read_outcome(runs["em"]).about["importance"]["features"][0]["feature"] in done.stdout
    again = ultr("report", runs["em"], "--out", out)
    assert again.returncode == 1
    assert "--overwrite" in again.stderr
    assert ultr("report", runs["em"], "--out", out, "--overwrite").returncode == 0
    assert ultr("report", tmp_path / "no", "--out", tmp_path / "b.html").returncode == 5


def test_curves_by_position_do_not_fold_back(ultr, tmp_path):
    """The band of an estimator lacks the positions without an interval; it must not decide the order of the axis."""
    write_log(with_rare_positions(world("random", requests=500, features=3)), tmp_path / "log.parquet")
    done = ultr("bias", tmp_path / "log.parquet", "--bootstrap", 10, "--out", tmp_path / "bias")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "bias" / "bias.html").read_text()
    assert "95% intervals cover sampling error only" in text
    assert "<dt>how biased</dt><dd>compared with position 1" in text
    assert "position does not depend on its relevance to this request" in text
    assert "After positions were shuffled within requests" in text
    report = json.loads((tmp_path / "bias" / "bias.json").read_text())
    for estimate in report["estimates"].values():  # as in files of older versions, which do not pool rare positions
        estimate["low"][5:], estimate["high"][5:] = [None] * 36, [None] * 36
    del report["refutations"], report["verdict"]["assumption"]
    text = write_bias_page(report, tmp_path / "older.html", source="log").read_text()
    figure = plots_of(text)[0]
    assert figure["layout"]["xaxis"]["categoryarray"] == [str(k) for k in range(1, 42)]
    assert any(len(set(trace["x"])) < 41 for trace in figure["data"])


def test_runs_with_different_positions_share_a_sorted_axis():
    def run(positions, theta):
        return {
            "positions": positions,
            "theta": theta,
            "theta_from": "strata",
            "theta_scale": "1",
            "warnings": [],
        }, None

    short, long = run(["1", "3", "10"], [1, 0.5, 0.2]), run(["1", "2", "10"], [1, 0.6, 0.3])
    plot = bias_section({"a": short, "b": long}).parts[0]
    assert plot.figure["layout"]["xaxis"]["categoryarray"] == ["1", "2", "3", "10"]
    assert [trace["x"] for trace in plot.figure["data"]] == [["1", "3", "10"], ["1", "2", "10"]]
    assert plot.figure["data"][1]["y"] == [1, 0.6, 0.3]


def test_the_bias_of_a_log_has_its_page(ultr, log_path, tmp_path):
    done = ultr("bias", log_path, "--bootstrap", 10, "--out", tmp_path / "bias")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "bias" / "bias.json").read_text())
    text = (tmp_path / "bias" / "bias.html").read_text()
    assert f'class="decision">Position bias: {report["verdict"]["status"]}<' in text
    for figure in plots_of(text):
        plotly.graph_objects.Figure(figure)
    assert ultr("report", tmp_path / "bias", "--out", tmp_path / "again.html").returncode == 0
    again = (tmp_path / "again.html").read_text()
    assert plots_of(again) == plots_of(text)
    (tmp_path / "bias" / "bias.json").write_text("{}")
    failed = ultr("report", tmp_path / "bias", "--out", tmp_path / "third.html")
    assert failed.returncode == 5
    assert "has a different format" in failed.stderr
    assert "run the command that wrote it again" in failed.stderr
