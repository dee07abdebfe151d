"""Figures 3, 4 and 5."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pages import plots_of, titles_of
from ultr.datasets.synthetic import make_synthetic
from ultr.datasets.users import EYE_TRACKING
from ultr.evaluation.scores import mean_with_interval, paired_test
from ultr.experiments import figures
from ultr.experiments import lab as labs
from ultr.experiments.figures import figure3, figure4, figure5
from ultr.experiments.lab import DIRECTION, FULL, HELD, NOT, QUICK, Lab
from ultr.experiments.paper import BAYES, DEFAULT, OPT
from ultr.training.comparing.plan import run_folder
from ultr.training.comparing.results import Comparison, Row, Setting
from ultr.training.comparing.tasks import Workers
from ultr.utils.jsonfiles import write_json

ENTRIES = [DEFAULT, OPT, "dla", "regression-em", "pal-click", "lambdarank"]
NAMES = ["pairs and likelihood (the default)", "Our Method (loss_opt)", "DLA", "Regression EM", "PAL-Click"]
TINY = replace(QUICK, name="tiny", hidden=(4,), dropout=0.0, steps=4, bias_steps=4, sessions=300, runs=2, rates=(0.05,))


def comparison(metric, **values):
    entry_of = {"default": DEFAULT, "opt": OPT, "pal": "pal-click"}
    rows = [Row(entry_of.get(name, name), Setting(0.1), {metric: v}) for name, v in values.items()]
    return Comparison(rows, [metric], "lambdarank")


def lab_of(out, budget=QUICK, **options):
    return Lab(out, budget, Workers(1), **{"runs": 4, "data": ("synthetic",), "device": "cpu", **options})


@pytest.fixture
def all_here(monkeypatch):
    monkeypatch.setattr(labs, "load_dataset", lambda name, data_dir=None: None)


def setting_in(plan, place):
    """Return a setting that differs between the worlds it was tuned in."""
    lr = 0.01 * (place + 1) + (0.1 if plan.base.label == "click" else 0) + plan.base.simulation.eta
    return Setting(round(lr, 4), dropout=0.25)


def made_up(plan):
    eta = plan.base.simulation.eta
    rows = []
    for i, entry in enumerate(plan.entries):
        noise = np.random.default_rng([i, plan.seeds]).normal(0, 0.01, plan.seeds)
        values = (2 + eta + len(plan.base.label) / 10 - 0.2 * i + noise).tolist()
        results = {m: [v / (3 - k) for v in values] for k, m in enumerate(plan.metrics)}
        rows.append(Row(entry.text, setting_in(plan, i), results))
    return Comparison(rows, list(plan.metrics), plan.reference)


@pytest.fixture
def calls(monkeypatch, all_here):
    """The plans of each call of `compare_all`."""
    plans_of_calls = []

    def compare_all(plans, workers, on_done):
        plans_of_calls.append(list(plans))
        return [made_up(plan) for plan in plans]

    monkeypatch.setattr(labs, "compare_all", compare_all)
    return plans_of_calls


def drawn(result, out):
    """Write a result, and return the lines by name, the number of bands and the heat maps of each plot of its page."""
    result.write(out)
    plots = []
    for plot in plots_of((out / f"{result.name}.html").read_text()):
        lines = {trace["name"]: trace for trace in plot["data"] if "name" in trace}
        bands = sum("fill" in trace for trace in plot["data"])
        plots.append((lines, bands, [trace["z"] for trace in plot["data"] if trace["type"] == "heatmap"]))
    return plots


def sections(text):
    by_title = {}
    for part in text.split("\n## ")[1:]:
        lines = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")]
        if lines:
            by_title[part.splitlines()[0]] = lines
    return by_title


def test_a_gain_is_the_mean_of_the_relative_differences_of_runs():
    gain = figures._gain(comparison("m", dla=[1.1, 2.4], lambdarank=[1.0, 2.0]), "dla", "m")
    assert gain.mean == pytest.approx(0.15)  # and not 3.5 / 3 - 1
    half = 12.7062 * 0.05  # t at 1 degree of freedom, times the standard error of 0.1 and 0.2
    assert (gain.low, gain.high) == pytest.approx((0.15 - half, 0.15 + half), rel=1e-4)


@given(st.lists(st.tuples(st.floats(0.5, 9), st.floats(0.5, 9)), min_size=2, max_size=6))
def test_a_gain_does_not_change_with_the_scale_of_a_run(pairs):
    values, lower = map(np.array, zip(*pairs, strict=True))
    scale = 1 + np.arange(len(values))
    one = figures._gain(comparison("m", dla=values.tolist(), lambdarank=lower.tolist()), "dla", "m")
    other = figures._gain(
        comparison("m", dla=(scale * values).tolist(), lambdarank=(scale * lower).tolist()), "dla", "m"
    )
    assert (one.mean, one.low, one.high) == pytest.approx((other.mean, other.low, other.high))


def test_figure_3_tunes_every_method_at_every_eta(tmp_path, calls):
    figure3(lab_of(tmp_path))
    (plans,) = calls
    assert [(p.base.label, p.base.simulation.eta) for p in plans] == [
        (label, eta) for label in ("click + dwell / exp(3)", "click") for eta in (0.0, 0.5, 1.0, 1.5, 2.0)
    ]
    for plan in plans:
        assert [entry.text for entry in plan.entries] == ENTRIES
        assert plan.reference == "lambdarank"
        metric = "ndcg" if plan.base.label == "click" else "reward"
        assert plan.metrics == [f"{metric}@{k}" for k in (3, 5, 10)]
        assert plan.base.selection == "off-policy-likelihood"
        assert (plan.seeds, plan.rates, plan.base.simulation.sessions) == (4, QUICK.rates, 5000)
        assert all(plan.choices(entry) == {"lr": [*QUICK.rates]} for entry in plan.entries)
    assert [p.out.relative_to(tmp_path / "runs" / "quick").as_posix() for p in plans[::5]] == [
        "synthetic/continuous-delta-3-eta-0-5000-sessions-off-policy",
        "synthetic/clicks-eta-0-5000-sessions-off-policy",
    ]
    assert len({plan.out for plan in plans}) == 10


def test_figure_4_tunes_every_method_at_every_delta(tmp_path, calls):
    figure4(lab_of(tmp_path, FULL, data=("yahoo", "ml-1m")))
    (plans,) = calls
    assert [(p.base.data.source, p.base.label) for p in plans] == [
        (data, f"click + dwell / exp({delta})") for data in ("yahoo", "ml-1m") for delta in (1, 2, 3, 4, 5)
    ]
    for plan in plans:
        assert [entry.text for entry in plan.entries] == ENTRIES
        assert plan.base.simulation.user_options == {"eta": 1.0, "epsilon": 0.1}
        assert plan.base.selection == "off-policy-likelihood"
        assert all(plan.choices(entry)["lr"] == list(FULL.rates) for entry in plan.entries)
    assert len({plan.out for plan in plans}) == 10


def test_figures_select_as_they_are_told_to(tmp_path, calls):
    figure3(lab_of(tmp_path, selections=("truth",)))
    (plans,) = calls
    assert [plan.base.selection for plan in plans] == ["reward@10"] * 5 + ["ndcg@10"] * 5


@pytest.mark.parametrize(
    ("make", "name", "axis", "values", "heads", "kinds"),
    [
        (
            figure3,
            "figure3",
            "eta",
            [0.0, 0.5, 1.0, 1.5, 2.0],
            ["continuous label, Default data (synthetic)", "clicks, Default data (synthetic)"],
            ["reward", "ndcg"],
        ),
        (figure4, "figure4", "delta", [1.0, 2.0, 3.0, 4.0, 5.0], ["Default data (synthetic)"], ["reward"]),
    ],
)
def test_gains_are_shown_by_the_value_they_belong_to(tmp_path, calls, make, name, axis, values, heads, kinds):
    result = make(lab_of(tmp_path))
    result.write(tmp_path)
    by_title = sections(result.text())
    assert list(by_title) == heads
    assert list(result.results) == heads
    (final,) = calls
    content = json.loads((tmp_path / f"{name}.json").read_text())["figures"]
    for number, (head, kind) in enumerate(zip(heads, kinds, strict=True)):
        plans = final[5 * number : 5 * number + 5]
        first, *lines = by_title[head]
        assert first == ["method", *(f"{axis} {value:g}" for value in values)]
        assert [line[0] for line in lines] == NAMES
        assert content[head]["metric"] == f"{kind}@10"
        assert content[head][axis] == values
        for i, entry in enumerate(ENTRIES[:-1]):
            for at, plan in enumerate(plans):
                rows = {row.entry: np.array(row.results[f"{kind}@10"]) for row in made_up(plan).rows}
                gain = mean_with_interval(rows[entry] / rows["lambdarank"] - 1)
                assert lines[i][1 + at] == f"{gain.mean:+.2%} [{gain.low:+.2%}, {gain.high:+.2%}]"
                assert content[head]["gain"][entry][at]["mean"] == pytest.approx(gain.mean)
                assert content[head]["seeds"][entry][at] == rows[entry].tolist()
        assert set(content[head]["seeds"]) == set(ENTRIES)
        assert set(content[head]["gain"]) == set(ENTRIES[:-1])
    assert [claim.data for claim in result.claims] == [head for head in heads for _ in range(2)]
    assert [claim.verdict for claim in result.claims] == [HELD] * 2 * len(heads)
    for printed, ours in zip(result.claims[::2], result.claims[1::2], strict=True):
        assert printed.text.startswith("loss_opt is robust to the ")
        assert ours.text == printed.text.replace("loss_opt", "The default")
        assert f"the largest gain at every {axis}" in printed.text
    assert titles_of((tmp_path / f"{name}.html").read_text()) == heads
    for head, (lines, bands, _) in zip(heads, drawn(result, tmp_path), strict=True):
        assert list(lines) == NAMES
        assert bands == 5
        for entry, line in zip(ENTRIES, lines.values(), strict=False):
            assert line["x"] == values
            assert line["y"] == pytest.approx([100 * gain["mean"] for gain in content[head]["gain"][entry]], rel=1e-5)


def test_figures_use_the_data_sets_of_the_paper_and_the_default_data(tmp_path, calls):
    for make in (figure3, figure4):
        calls.clear()
        make(lab_of(tmp_path, data=()))
        assert [plan.base.data.source for plan in calls[0][::5]] == (
            ["yahoo", "yahoo", "ml-1m", "ml-1m", "synthetic", "synthetic"]
            if make is figure3
            else ["yahoo", "ml-1m", "synthetic"]
        )


def test_gains_of_one_run_have_no_band(tmp_path, calls):
    result = figure4(lab_of(tmp_path, runs=1))
    ((lines, bands, _),) = drawn(result, tmp_path)
    assert (len(lines), bands) == (5, 0)
    assert "[" not in sections(result.text())["Default data (synthetic)"][1][1]


def test_figures_of_one_run_are_plain_json(tmp_path, calls):
    plain = json.dumps(figure4(lab_of(tmp_path, runs=1)).to_json(), allow_nan=False)
    gains = json.loads(plain)["figures"]["Default data (synthetic)"]["gain"][OPT]
    assert {(gain["low"], gain["high"]) for gain in gains} == {(None, None)}
    assert all(np.isfinite(gain["mean"]) for gain in gains)


SURE = {"opt": [2.0, 2.1, 2.2], "dla": [1.0, 1.11, 1.2], "pal": [1.5, 1.61, 1.7], "lambdarank": [1.0, 1.0, 1.0]}
FIRST = SURE | {"opt": [1.6, 1.5, 1.8]}  # above PAL-Click, but not significantly
SECOND = SURE | {"dla": [3.0, 3.1, 3.3]}
OURS = {"opt": (OPT, "default"), "default": (DEFAULT, "opt")}


@pytest.mark.parametrize(
    ("worlds", "verdict", "first", "sure"),
    [
        ([SURE, SURE], HELD, 2, 2),
        ([SURE, FIRST], DIRECTION, 2, 1),
        ([FIRST, FIRST], DIRECTION, 2, 0),
        ([SURE, SECOND], NOT, 1, 1),
        ([SECOND, SECOND], NOT, 0, 0),
    ],
)
@pytest.mark.parametrize("name", OURS)
def test_the_claim_of_the_largest_gain_holds_only_if_it_is_significant_everywhere(worlds, verdict, first, sure, name):
    method, other = OURS[name]
    best_of_all = {other: [9.0, 9.1, 9.3]}  # our other method is not compared
    results = [comparison("m", **(world | {name: world["opt"]} | best_of_all)) for world in worlds]
    gains = {e: [figures._gain(r, e, "m") for r in results] for e in (DEFAULT, OPT, "dla", "pal-click")}
    claim = figures._largest("text", "head", method, gains, results, "m")
    assert (claim.text, claim.data, claim.verdict) == ("text", "head", verdict)
    start, words = claim.evidence.split(": ", 1)
    assert start == f"first at {first} of 2, significantly at {sure}"
    for world, word in zip(worlds, words.split("; "), strict=True):
        best = "dla" if world is SECOND else "pal"
        test = paired_test(np.array(world["opt"]), np.array(world[best]))
        shown = {"dla": "DLA", "pal": "PAL-Click"}[best]
        assert word == f"{test.difference:+.4f} over {shown} (p = {test.p:.2g})"


def test_the_largest_gain_must_also_be_significant_over_requests():
    sure = comparison("m", **SURE)
    by_request = {OPT: [2.0, 0.0, 3.0, 1.0], "pal-click": [1.0, 1.0, 1.0, 2.0]}
    rows = [replace(r, by_request={"m": np.array(by_request.get(r.entry, [0.0] * 4))}) for r in sure.rows]
    gains = {e: [figures._gain(sure, e, "m")] for e in (OPT, "dla", "pal-click")}
    claim = figures._largest("text", "head", OPT, gains, [replace(sure, rows=rows)], "m")
    p = paired_test(*(np.array(by_request[e]) for e in (OPT, "pal-click"))).p
    assert p > 0.05
    assert claim.verdict == DIRECTION
    assert claim.evidence.startswith("first at 1 of 1, significantly at 0: ")
    assert f"over PAL-Click (p = {p:.2g})" in claim.evidence


@pytest.mark.parametrize(
    ("theta", "verdict", "falls"),
    [
        ([[0.7, 0.5, 0.3, 0.1], [0.7, 0.6, 0.5, 0.4]], HELD, 3),
        ([[0.7, 0.2, 0.3, 0.1]], DIRECTION, 2),
        ([[0.7, 0.5, 0.5, 0.1]], DIRECTION, 2),
        ([[0.1, 0.3, 0.5, 0.7]], NOT, 0),
        ([[0.1, 0.05, 0.5, 0.7]], NOT, 1),
        ([[0.7, 0.1, 0.4, 0.3], [0.7, 0.9, 0.2, 0.1]], HELD, 3),  # on the mean
    ],
)
def test_a_curve_falls_with_position_if_it_falls_at_every_step(theta, verdict, falls):
    rising = np.array([[0.1, 0.2, 0.4, 0.8]])
    first, second = figures._falling("head", {"theta": np.array(theta), "P(c>0) / theta": rising})
    assert first.verdict == verdict
    assert first.evidence.startswith(f"{falls} of 3 steps fall, from {np.mean(theta, 0)[0]:.3f} to ")
    assert second.verdict == NOT
    assert "relevance" in second.text
    assert "from 0.100 to 0.800; correlation +0.9" in second.evidence
    assert {first.data, second.data} == {"head"}
    first, second = figures._falling("head", {"P(c>0) / theta": np.array(theta), "theta": rising})
    assert (first.verdict, second.verdict) == (NOT, verdict)


REPORTS = [
    {
        "positions": [1, 2, 3],
        "theta": [0.8, 0.5, 0.2],
        "clicks": [40, 20, 6],
        "impressions": [100, 100, 60],
        "m": [[0.0, 0.9, 0.6], [0.8, 0.0, 0.0], [0.4, 0.0, 0.0]],
    },
    {
        "positions": [1, 2, 3],
        "theta": [0.6, 0.3, 0.4],
        "clicks": [30, 30, 20],
        "impressions": [100, 200, 100],
        "m": [[0.0, 0.7, 0.0], [0.6, 0.0, 0.0], [0.2, 0.0, 0.0]],
    },
]


def write_reports(lab, data, setting):
    out = lab.plan(lab.world(data), [BAYES], reference=BAYES).out
    for seed, report in enumerate(REPORTS):
        write_json(run_folder(out, BAYES, setting, seed) / "bias.json", report)


def test_figure_5_shows_the_bias_of_its_runs(tmp_path, calls):
    lab = lab_of(tmp_path, runs=2, data=("synthetic", "yahoo"))
    (compared,) = labs.compare_all([lab.plan(lab.world("synthetic"), [BAYES], reference=BAYES)], None, None)
    calls.clear()
    for data in lab.data:
        write_reports(lab, data, compared.rows[0].setting)  # the one that was chosen
    result = figure5(lab)
    result.write(tmp_path)
    ((first, second),) = calls
    assert [entry.text for entry in first.entries] == [BAYES]
    assert (first.base.label, first.base.simulation.eta) == ("click + dwell / exp(3)", 1.0)
    assert (first.base.data.source, second.base.data.source) == ("synthetic", "yahoo")
    content = json.loads((tmp_path / "figure5.json").read_text())["figures"]
    json.dumps(content, allow_nan=False)
    for data in lab.data:
        saved = content[data]
        assert saved["positions"] == [1, 2, 3]
        assert saved["theta"] == [[0.8, 0.5, 0.2], [0.6, 0.3, 0.4]]
        np.testing.assert_allclose(saved["P(c>0)"], [[0.4, 0.2, 0.1], [0.3, 0.15, 0.2]])
        np.testing.assert_allclose(saved["P(c>0) / theta"], [[0.5, 0.4, 0.5], [0.5, 0.5, 0.5]])
        assert saved["true_theta"] == list(EYE_TRACKING[:3])
        m = np.array(saved["m"], dtype=float)
        expected = [[np.nan, 0.8, 0.6], [0.7, np.nan, np.nan], [0.3, np.nan, np.nan]]  # over runs that saw the pair
        np.testing.assert_allclose(m, expected)
    first, *table = sections(result.text())["Default data (synthetic)"]
    assert first == ["position", "1", "2", "3"]
    assert table == [
        ["theta", "0.700", "0.400", "0.300"],
        ["P(c>0)", "0.350", "0.175", "0.150"],
        ["P(c>0) / theta", "0.500", "0.450", "0.500"],
        ["true theta", "0.680", "0.610", "0.480"],
    ]
    assert "m_ij over pairs of positions: 0.30 to 0.80, deviation 0.187" in result.text()
    assert [(claim.data, claim.verdict) for claim in result.claims] == [
        ("Default data (synthetic)", HELD),
        ("Default data (synthetic)", NOT),
        ("Yahoo! LETOR set 1", HELD),
        ("Yahoo! LETOR set 1", NOT),
    ]
    plots = drawn(result, tmp_path)
    assert len(plots) == 2 * 2
    for (lines, bands, _), (_, _, (heat_map,)) in zip(plots[::2], plots[1::2], strict=True):
        assert {name: line["y"] for name, line in lines.items()} == {
            line[0]: pytest.approx([float(cell) for cell in line[1:]], abs=5e-4) for line in table
        }
        assert bands == 3  # the true theta has no interval
        np.testing.assert_allclose(np.array(heat_map, float), expected, rtol=1e-5)


def test_figure_5_of_one_run_has_no_band(tmp_path, calls):
    lab = lab_of(tmp_path, runs=1)
    write_reports(lab, "synthetic", Setting(1.01, dropout=0.25))
    result = figure5(lab)
    assert result.results["synthetic"]["theta"] == [[0.8, 0.5, 0.2]]
    (lines, bands, _), _ = drawn(result, tmp_path)
    assert (len(lines), bands) == (4, 0)


def test_figures_work_with_real_runs(tmp_path, monkeypatch):
    small = make_synthetic(requests=(60, 10, 10))
    monkeypatch.setattr("ultr.training.data.cached_dataset", lambda name, data_dir: small)
    monkeypatch.setattr("ultr.training.comparing.tasks.cached_dataset", lambda name, data_dir: small)
    monkeypatch.setattr(labs, "load_dataset", lambda name, data_dir=None: small)
    monkeypatch.setattr(figures, "FIGURE_METHODS", (DEFAULT, OPT, "lambdarank"))
    monkeypatch.setattr(figures, "ETAS", (0.0, 1.0))
    lab = lab_of(tmp_path, TINY, runs=1)
    curves = figure5(lab).results["synthetic"]
    assert np.shape(curves["theta"]) == (1, 10)
    assert np.shape(curves["m"]) == (10, 10)
    assert 0 < np.min(curves["theta"]) <= np.max(curves["theta"]) < 1
    np.testing.assert_allclose(np.array(curves["P(c>0) / theta"]) * curves["theta"], curves["P(c>0)"])
    folders = {Path(p).parent for p in tmp_path.rglob("test.json")}
    result = figure3(lab)
    runs = {p.parent for p in tmp_path.rglob("test.json")} - folders
    assert len(runs) == 2 * 2 * 3  # labels, etas, methods
    assert [list(lines) for lines, _, _ in drawn(result, tmp_path)] == [NAMES[:2]] * 2
    gains = result.results["clicks, Default data (synthetic)"]["seeds"]
    assert all(len(set(map(tuple, values))) == 2 for values in gains.values())  # eta has an effect
