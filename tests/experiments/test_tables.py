"""The printed results of the paper, and Tables 1 and 2 next to them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pages import plots_of, titles_of
from ultr.datasets import load_dataset
from ultr.datasets.synthetic import make_synthetic
from ultr.errors import DataError, MissingExtraError
from ultr.evaluation.scores import paired_test
from ultr.experiments import lab as labs
from ultr.experiments import tables
from ultr.experiments.lab import DIRECTION, FULL, HELD, OFF_POLICY, QUICK, REVERSED, SELECTIONS, TRUTH, Lab, World
from ultr.experiments.paper import (
    BAYES,
    BEYOND1,
    BEYOND2,
    CUTOFFS,
    DEFAULT,
    DEFAULT_ROW,
    IPW,
    OPT,
    TABLE1,
    TABLE2,
    UPPER,
)
from ultr.experiments.tables import table1, table2
from ultr.training.comparing.plan import Entry
from ultr.training.comparing.results import Comparison, Row, Setting, Steps, with_tests
from ultr.training.comparing.tasks import RunTask, Workers
from ultr.utils.jsonfiles import load_json

PAPER = Path(__file__).parents[3] / "shared" / "paper"
TINY = replace(QUICK, name="tiny", hidden=(4,), dropout=0.0, steps=4, bias_steps=4, sessions=300, runs=2, rates=(0.05,))
MADE = {"table1": (table1, TABLE1), "table2": (table2, TABLE2)}
TITLES = {
    "yahoo": "Yahoo! LETOR set 1",
    "ml-1m": "MovieLens-1M",
    "mslr-web30k": "MSLR-WEB30K",
    "mq2007": "MQ2007",
    "synthetic": "Default data (synthetic)",
}
WORDS = {OFF_POLICY: "without true labels", TRUTH: "with true labels"}


def title(data, select=OFF_POLICY):
    return f"{TITLES[data]}, selected {WORDS[select]}"


def printed(rows, data):
    return {row.entry: row.printed[data] for row in rows}


def test_the_rows_of_the_tables_have_results_for_two_sets_and_three_cutoffs():
    for rows, sets in ((TABLE1, {"yahoo", "ml-1m"}), (TABLE2, {"yahoo", "mslr-web30k"})):
        for row in rows:
            assert set(row.printed) == sets
            for results in row.printed.values():
                means, deviations = zip(*results, strict=True)
                assert len(means) == len(CUTOFFS)
                assert list(means) == sorted(means)  # more items are seen with a larger cutoff
                assert all(0 < d < 0.02 * m for m, d in results)
                assert len(deviations) == 3
    assert (len(TABLE1), len(TABLE2)) == (10, 8)


def test_the_rows_that_are_not_in_the_paper_have_no_printed_results():
    assert all(not row.printed for row in (DEFAULT_ROW, *BEYOND1, *BEYOND2))


@pytest.mark.parametrize("rows", [(DEFAULT_ROW, *TABLE1, *BEYOND1), (DEFAULT_ROW, *TABLE2, *BEYOND2)])
def test_every_row_has_a_different_method(rows):
    parsed = [Entry.parse(row.entry) for row in rows]
    assert len({(e.method, e.learn_from, str(sorted(e.options.items()))) for e in parsed}) == len(rows)
    assert len({row.name for row in rows}) == len(rows)


def test_some_results_are_as_printed():
    assert printed(TABLE1, "yahoo")[OPT] == ((2.3319, 6.9e-3), (2.7185, 7.5e-3), (2.9735, 5.9e-3))
    assert printed(TABLE1, "ml-1m")["lambdarank"][2] == (8.9387, 4.7e-2)
    assert printed(TABLE1, "ml-1m")["pal-click-dwell"][0] == (5.7569, 2.7e-2)
    assert printed(TABLE2, "yahoo")[UPPER][0] == (0.6960, 1.4e-3)
    assert printed(TABLE2, "mslr-web30k")["regression-em"][1] == (0.3766, 3.7e-3)


def test_the_printed_order_of_methods_agrees_with_the_text():
    for data in ("yahoo", "ml-1m"):
        at10 = {entry: results[2][0] for entry, results in printed(TABLE1, data).items()}
        assert max(at10, key=at10.get) == OPT
        assert min(at10, key=at10.get) == "lambdarank"
        assert at10["pal-click"] > at10["pal-click-dwell"]
    for data in ("yahoo", "mslr-web30k"):
        for k in range(3):
            at = {entry: results[k][0] for entry, results in printed(TABLE2, data).items()}
            assert max(at, key=at.get) == UPPER
            assert min(at, key=at.get) == "lambdarank"
            assert at[BAYES] > at[IPW]


def test_every_printed_result_is_in_the_source_of_the_paper():
    sources = [p for p in PAPER.glob("*") if p.is_file()] if PAPER.is_dir() else []
    if not sources:
        pytest.skip(f"{PAPER} does not contain the source of the paper")
    lines = [line for path in sources for line in path.read_text().splitlines() if r"$\pm$" in line and "&" in line]
    rows = TABLE1 + TABLE2
    assert len(lines) == len(rows)
    for line, row in zip(lines, rows, strict=True):
        name, *cells = line.replace(r"\\", "").split("&")
        numbers = [tuple(map(float, re.findall(r"\d+\.\d+(?:e-\d+)?", cell))) for cell in cells]
        assert [pair for results in row.printed.values() for pair in results] == numbers, row.name
        plain = re.sub(r"\\cite\{.*?\}|[${}]", "", name).strip()
        assert row.name.startswith(plain), name


def levels(rows, **by_entry):
    """Return a level for each row; levels that are not passed are low."""
    return {row.entry: 1.0 + i / 100 for i, row in enumerate(rows)} | by_entry


def made_up(level_of, metrics, reference, seeds=5):
    """Return a comparison with clear differences on the last metric, and opposite ones on the others."""
    rows = []
    for i, (entry, level) in enumerate(level_of.items()):
        noise = np.random.default_rng(i).normal(0, 1e-4, (len(metrics), seeds))
        sign = [-1] * (len(metrics) - 1) + [1]
        results = {m: (10 + s * level + n).tolist() for m, s, n in zip(metrics, sign, noise, strict=True)}
        rows.append(Row(entry, Setting(0.01 * (i + 1)), results))
    return Comparison(with_tests(rows, reference) if seeds > 1 else rows, list(metrics), reference)


@pytest.fixture
def all_here(monkeypatch):
    monkeypatch.setattr(labs, "load_dataset", lambda name, data_dir=None: None)


@pytest.fixture
def calls(monkeypatch):
    """The arguments of each call of `Lab.compare`, whose results have the levels `calls.levels`."""

    class Calls(list):
        levels = None

    recorded = Calls()

    def compare(self, worlds, entries, *, reference):
        recorded.append((worlds, entries, reference))
        level_of = recorded.levels or {entry: 1.0 + i / 100 for i, entry in enumerate(entries)}
        return {world: made_up(level_of, world.metrics, reference, self.seeds) for world in worlds}

    monkeypatch.setattr(Lab, "compare", compare)
    return recorded


def lab_of(out, budget=TINY, **options):
    return Lab(out, budget, Workers(1), **{"device": "cpu", "runs": 5, **options})


def sections(text):
    """Return the rows of each table of a Markdown text, by the title above it."""
    by_title = {}
    for part in text.split("\n## ")[1:]:
        lines = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")]
        if lines:
            # The strip above removes empty cells at the end.
            rows = [dict(zip(lines[0], line + [""] * (len(lines[0]) - len(line)), strict=True)) for line in lines[1:]]
            by_title[part.splitlines()[0]] = rows
    return by_title


@pytest.mark.parametrize(("name", "in_paper"), [("table1", ["yahoo", "ml-1m"]), ("table2", ["yahoo", "mslr-web30k"])])
@pytest.mark.parametrize("beyond", [False, True])
def test_printed_results_are_next_to_ours_if_the_paper_has_the_data(tmp_path, all_here, calls, name, in_paper, beyond):
    make, rows = MADE[name]
    budget = FULL if beyond else QUICK
    by_title = sections(make(lab_of(tmp_path, budget)).text())
    last = "Reward" if name == "table1" else "NDCG"
    over = "PAL-Click" if name == "table1" else "DLA"
    selections = (OFF_POLICY, TRUTH) if beyond else (OFF_POLICY,)
    names = [*in_paper, "mq2007", "synthetic"]
    assert list(by_title) == [title(data, select) for data in names for select in selections]
    added = (BEYOND1 if name == "table1" else BEYOND2) if beyond else ()
    printed_titles = {title(data, select): data for data in in_paper for select in selections}
    for head, lines in by_title.items():
        expected_rows = (DEFAULT_ROW, *rows, *(() if head.endswith(SELECTIONS[TRUTH]) else added))
        assert [line["method"] for line in lines] == [row.name for row in expected_rows]
        assert [line["entry"] for line in lines] == [row.entry for row in expected_rows]
        columns = [key for key in lines[0] if key.startswith("paper")]
        expected = [f"paper {last}@{k}" for k in CUTOFFS] + [f"paper, over {over}"]
        assert columns == (expected if head in printed_titles else [])
        assert (f"{last}@10 over {over}" in lines[0]) == (head in printed_titles)
    reference = next(row for row in rows if row.name == over)
    for head, data in printed_titles.items():
        default, *others = by_title[head]
        for row, line in zip(rows, others, strict=False):
            for k, (mean, deviation) in zip(CUTOFFS, row.printed[data], strict=True):
                assert line[f"paper {last}@{k}"] == f"{mean:.4f} ± {deviation:.4f}"
            gain = 100 * (row.printed[data][2][0] - reference.printed[data][2][0]) / reference.printed[data][2][0]
            assert float(line[f"paper, over {over}"].rstrip("%")) == pytest.approx(gain, abs=0.00501)
        for line in (default, *others[len(rows) :]):
            assert {line[key] for key in line if key.startswith("paper")} == {""}


def test_printed_gains_agree_with_a_calculation_by_hand(tmp_path, all_here, calls):
    first = sections(table1(lab_of(tmp_path)).text())
    assert first[title("yahoo")][1]["paper, over PAL-Click"] == "+1.57%"  # 2.9735 / 2.9274
    assert first[title("ml-1m")][1]["paper, over PAL-Click"] == "+0.90%"
    assert first[title("ml-1m")][10]["paper, over PAL-Click"] == "-1.32%"
    second = sections(table2(lab_of(tmp_path)).text())
    assert second[title("mslr-web30k")][2]["paper, over DLA"] == "+0.73%"
    assert second[title("yahoo")][5]["paper, over DLA"] == "+0.00%"


def test_gains_are_over_the_mean_of_the_reference_and_stars_mark_significant_differences(
    tmp_path, all_here, monkeypatch
):
    def compare(self, worlds, entries, *, reference):
        results = {e: [2.0, 2.2] for e in entries}
        results[DEFAULT] = [1.9, 2.1]
        results["pal-click"] = [1.9, 2.1]
        results[OPT] = [2.0, 2.1]  # + 2.5%, not significantly
        results[BAYES] = [1.8, 2.002]  # - 4.95%, significantly: p = 0.0064, corrected 0.026
        results[IPW] = [2.0063, 2.1937]  # + 5%, p = 0.04, corrected 0.12
        by_request = {e: np.linspace(2, 3, 6) for e in entries}
        by_request[DEFAULT] = np.linspace(1, 2.01, 6)
        by_request["sum-click"] = np.array([9.0, -9.0, 9.0, -9.0, 9.0, -9.0])  # not significantly over requests
        rows = [
            Row(
                e,
                Setting(0.02),
                {m: values if m == "reward@10" else [1.0, 1.0] for m in worlds[0].metrics},
                by_request={"reward@10": by_request[e]},
            )
            for e, values in results.items()
        ]
        return {worlds[0]: Comparison(with_tests(rows, reference), worlds[0].metrics, reference)}

    monkeypatch.setattr(Lab, "compare", compare)
    (lines,) = sections(table1(lab_of(tmp_path, data=("yahoo",), runs=2)).text()).values()
    by = {line["entry"]: line for line in lines}
    over = f"Reward@10 over {DEFAULT_ROW.name}"
    assert by[OPT]["Reward@10"] == "2.0500 ± 0.0707"
    assert by[OPT][over] == "+2.50%"
    assert by[OPT]["p over runs"] == "1"
    assert by[BAYES]["Reward@10"] == "1.9010 ± 0.1428*"
    assert by[BAYES][over] == "-4.95%"
    assert by[BAYES]["p over runs"] == "0.026"
    assert by[IPW]["Reward@10"] == "2.1000 ± 0.1325"
    assert by[IPW]["p over runs"] == "0.12"
    assert by["sum-click"]["Reward@10"] == "2.1000 ± 0.1414"
    assert float(by["sum-click"]["p over runs"]) < 1e-6
    assert float(by["sum-click"]["p over requests"]) > 0.5
    assert by["pal-synthesize"]["Reward@10"] == "2.1000 ± 0.1414*"
    assert by[DEFAULT]["Reward@10"] == "2.0000 ± 0.1414"
    assert by[DEFAULT][over] == "+0.00%"
    assert (by[DEFAULT]["p over runs"], by[DEFAULT]["p over requests"]) == ("", "")
    assert by[BAYES]["Reward@10 over PAL-Click"] == "-4.95%"
    assert by["pal-click"]["Reward@10 over PAL-Click"] == "+0.00%"
    assert by[OPT]["Reward@3"] == "1.0000 ± 0.0000"
    assert by[OPT]["setting"] == "lr 0.02"


def test_a_table_has_the_settings_the_best_steps_and_the_sessions(tmp_path, all_here, monkeypatch):
    settings = {DEFAULT: Setting(0.005, 0.0, 3.0), OPT: Setting(0.02, max_weight="none"), "pointwise": Setting(0.01)}
    steps = {DEFAULT: Steps(1150.0, 1200.0, 1200, 3), OPT: Steps(650.0, 900.0, 1200, 0), "pointwise": None}

    def compare(self, worlds, entries, *, reference):
        made = made_up({e: i / 100 for i, e in enumerate(entries)}, worlds[0].metrics, reference)
        rows = [
            replace(row, setting=settings[row.entry], steps=steps[row.entry], sessions=sessions[row.entry])
            if row.entry in settings
            else replace(row, sessions=5000)
            for row in made.rows
        ]
        return {world: replace(made, rows=rows) for world in worlds}

    monkeypatch.setattr(Lab, "compare", compare)
    sessions = dict.fromkeys(settings, 5000)
    text = table1(lab_of(tmp_path, data=("synthetic",))).text()
    by = {line["entry"]: line for line in sections(text)[title("synthetic")]}
    assert by[DEFAULT]["setting"] == "lr 0.005, dropout 0, weights to 3"
    assert by[OPT]["setting"] == "lr 0.02, weights without a limit"
    assert by["pointwise"]["setting"] == "lr 0.01"
    assert by[DEFAULT]["best step"] == "1,150 (3 runs still improved at 1,200)"
    assert by[OPT]["best step"] == "650"
    assert by["pointwise"]["best step"] == ""
    assert all(line["p over requests"] == "" for line in by.values())  # these rows have no results by request
    assert "Sessions that a run of a row learned from: 5,000." in text
    sessions |= {OPT: 1_228_800, "pointwise": 400}
    text = table1(lab_of(tmp_path, data=("synthetic",))).text()
    assert "Sessions that a run of a row learned from: 400 to 1,228,800." in text


@pytest.mark.parametrize(("name", "clicks", "beyond"), [("table1", False, BEYOND1), ("table2", True, BEYOND2)])
def test_all_rows_are_compared_on_all_sets_with_the_default_method(tmp_path, all_here, calls, name, clicks, beyond):
    make, rows = MADE[name]
    for budget in (QUICK, FULL):
        make(lab_of(tmp_path, budget))
    make(lab_of(tmp_path, selections=(TRUTH,), sessions=0, logging="network", users="trust"))
    names = ["yahoo", "mslr-web30k" if clicks else "ml-1m", "mq2007", "synthetic"]
    quick = [World(data, clicks, 1.0, 3.0, "pbm", 5000, "linear", OFF_POLICY) for data in names]
    full = {
        select: [World(data, clicks, 1.0, 3.0, "pbm", 30_000, "linear", select) for data in names]
        for select in (OFF_POLICY, TRUTH)
    }
    other = [World(data, clicks, 1.0, 3.0, "trust", 0, "network", TRUTH) for data in names]
    entries = ["pairwise-em", *(row.entry for row in rows)]
    assert calls == [
        (quick, entries, "pairwise-em"),
        (full[OFF_POLICY], entries + [row.entry for row in beyond], "pairwise-em"),
        (full[TRUTH], entries, "pairwise-em"),
        (other, entries, "pairwise-em"),
    ]


def verdicts(result):
    return {claim.text.partition(":")[0]: claim.verdict for claim in result.claims}


GOOD1 = levels(
    TABLE1, **{DEFAULT: 3.2, OPT: 3.0, BAYES: 2.0, IPW: 1.9, "pal-click": 1.8, "pointwise": 1.7, "lambdarank": 0.5}
)
GOOD2 = levels(TABLE2, **{UPPER: 4.0, DEFAULT: 3.2, OPT: 3.0, BAYES: 2.0, IPW: 1.9, "dla": 1.8, "lambdarank": 0.5})
CLAIMS1 = {
    "LambdaRank on biased labels is worse than pointwise": ("pointwise", "lambdarank"),
    "A shallow tower on dwell time harms": ("pal-click", "pal-click-dwell"),
    "loss_Bayes-IPW improves on loss_IPW (MovieLens": (BAYES, IPW),
    "loss_opt improves on loss_Bayes-IPW": (OPT, BAYES),
}
CLAIMS2 = {
    "The default beats the lower bound": (DEFAULT, "lambdarank"),
    "loss_Bayes-IPW improves on loss_IPW": (BAYES, IPW),
    "loss_opt improves on loss_Bayes-IPW (Yahoo": (OPT, BAYES),
    "loss_opt beats the lower bound": (OPT, "lambdarank"),
}


@pytest.mark.parametrize(
    ("name", "good", "pairs", "whole"),
    [
        (
            "table1",
            GOOD1,
            CLAIMS1,
            ("loss_opt beats every baseline", "The default beats PAL-Click and the lower bounds"),
        ),
        ("table2", GOOD2, CLAIMS2, ("loss_opt is competitive on clicks",)),
    ],
)
def test_claims_are_checked_on_their_rows_at_the_last_cutoff(tmp_path, all_here, calls, name, good, pairs, whole):
    make, _ = MADE[name]
    lab = lab_of(tmp_path, data=("mq2007",))
    calls.levels = good
    result = make(lab)
    assert verdicts(result) == dict.fromkeys((*pairs, *whole), HELD)
    assert {claim.data for claim in result.claims} == {title("mq2007")}
    assert {claim.evidence.partition("; corrected for ")[2].split(" p = ")[0] for claim in result.claims} == {
        f"{len(result.claims)} claims"
    }
    for text, (above, below) in pairs.items():
        calls.levels = good | {above: good[below], below: good[above]}
        assert verdicts(make(lab))[text] == REVERSED, text
        calls.levels = good
        (claim,) = [c for c in result.claims if c.text.startswith(text)]
        assert claim.evidence.startswith(f"{above} minus {below} +")


@pytest.mark.parametrize("better", [row.entry for row in TABLE1 if row.entry not in (OPT, BAYES, IPW)])
def test_loss_opt_beats_every_baseline_only_if_each_is_beaten(tmp_path, all_here, calls, better):
    calls.levels = GOOD1 | {better: 3.5}
    (claim,) = [c for c in table1(lab_of(tmp_path, data=("mq2007",))).claims if "every baseline" in c.text]
    assert claim.verdict == REVERSED
    assert re.search(rf"not significantly above: {better}; corrected for 6 claims p = \S+$", claim.evidence)


@pytest.mark.parametrize("better", ["pal-click", "pal-click-dwell", "pointwise", "lambdarank", "pal-click:rows=all"])
def test_the_default_beats_pal_click_and_the_lower_bounds_only_if_each_is_beaten(tmp_path, all_here, calls, better):
    rows = (DEFAULT_ROW, *TABLE1, *BEYOND1)
    calls.levels = levels(rows) | GOOD1 | {UPPER: 9.0, "lambdarank:from=no-bias": 9.0, better: 3.5}
    checked = [c for c in table1(lab_of(tmp_path, FULL, data=("mq2007",))).claims if c.text.startswith("The default")]
    for claim in checked:
        assert claim.verdict == REVERSED
        assert re.search(rf"not significantly above: {better}; corrected for 7 claims p = \S+$", claim.evidence)
    assert [claim.data for claim in checked] == [title("mq2007", select) for select in (OFF_POLICY, TRUTH)]


def test_the_methods_that_are_not_beaten_are_named_in_the_order_of_the_table(tmp_path, all_here, calls):
    better = ["pal-click", "pal-click-dwell", "pointwise", "lambdarank"]
    calls.levels = GOOD1 | dict.fromkeys(better, 3.5)
    claim = table1(lab_of(tmp_path, data=("mq2007",))).claims[0]
    assert claim.text == "The default beats PAL-Click and the lower bounds"
    assert f"not significantly above: {', '.join(better)}; corrected" in claim.evidence


def test_verdicts_are_by_p_values_corrected_for_the_claims_on_a_data_set(tmp_path, all_here, monkeypatch):
    gaps = np.array([0.2, 0.03, 0.15, 0.02, 0.2])
    p = paired_test(gaps, np.zeros(5)).p
    assert 0.025 < p < 0.05

    def compare(self, worlds, entries, *, reference):
        of = {row.entry: row for row in made_up({e: GOOD2[e] for e in entries}, worlds[0].metrics, reference).rows}
        for above, below in near:
            values = (np.array(of[above].results["ndcg@10"]) - gaps).tolist()
            of[below] = replace(of[below], results={**of[below].results, "ndcg@10": values})
        return {world: Comparison([*of.values()], world.metrics, reference) for world in worlds}

    def checked():
        claims = table2(lab_of(tmp_path, data=("mq2007", "synthetic"))).claims
        assert [claim.data for claim in claims] == [title(data) for data in ("mq2007", "synthetic") for _ in range(5)]
        return [claim for claim in claims if claim.p > 0.01]

    monkeypatch.setattr(Lab, "compare", compare)
    near = [(BAYES, IPW)]
    assert len(checked()) == 2
    for claim in checked():  # the p values of the four others are smaller
        assert claim.text == "loss_Bayes-IPW improves on loss_IPW"
        assert claim.verdict == HELD
        assert claim.evidence.endswith(f"p = {p:.2g}; corrected for 5 claims p = {p:.2g}")
    near = [(OPT, BAYES), (BAYES, IPW)]
    assert len(checked()) == 4
    for claim in checked():
        assert claim.verdict == DIRECTION
        assert claim.evidence.endswith(f"p = {p:.2g}; corrected for 5 claims p = {2 * p:.2g}")


@pytest.mark.parametrize(
    ("better", "verdict"),
    [("dla", REVERSED), ("regression-em", REVERSED), ("pairwise-debias", REVERSED), (UPPER, HELD), (BAYES, HELD)],
)
def test_loss_opt_is_competitive_unless_below_the_best_of_three(tmp_path, all_here, calls, better, verdict):
    calls.levels = GOOD2 | {better: 5.0}
    checked = verdicts(table2(lab_of(tmp_path, data=("mq2007",))))
    assert checked["loss_opt is competitive on clicks"] == verdict


def test_the_claim_on_dwell_from_all_rows_is_checked_only_if_it_was_run(tmp_path, all_here, calls):
    lab = lab_of(tmp_path, FULL, data=("yahoo",))
    own = {"pal-click:rows=all": 1.0, "pal-click-dwell:rows=all": 1.5}
    calls.levels = levels((DEFAULT_ROW, *TABLE1, *BEYOND1), **GOOD1, **own)
    checked = verdicts(table1(lab))
    assert checked["A shallow tower on dwell time also harms if it is learned from all rows"] == REVERSED
    assert checked["A shallow tower on dwell time harms"] == HELD
    calls.levels = calls.levels | {"pal-click:rows=all": 1.6}
    assert verdicts(table1(lab))["A shallow tower on dwell time also harms if it is learned from all rows"] == HELD
    calls.levels = None
    assert "A shallow tower on dwell time also harms if it is learned from all rows" not in verdicts(
        table1(lab_of(tmp_path, QUICK, data=("yahoo",)))
    )


def test_claims_are_checked_on_each_data_set(tmp_path, all_here, calls):
    claims = table2(lab_of(tmp_path)).claims
    assert len(claims) == 4 * 5
    assert [c.data for c in claims[::5]] == [title(data) for data in ("yahoo", "mslr-web30k", "mq2007", "synthetic")]
    both = table2(lab_of(tmp_path, selections=(OFF_POLICY, TRUTH), data=("yahoo", "mq2007"))).claims
    assert [c.data for c in both[::5]] == [title(d, select) for d in ("yahoo", "mq2007") for select in WORDS]


def test_one_run_is_not_enough_to_check_a_claim(tmp_path, all_here, calls):
    for make in (table1, table2):
        result = make(lab_of(tmp_path, runs=1))
        assert result.claims == []
        assert "± 0.0000" in result.text()
        json.dumps(result.to_json(), allow_nan=False)


@pytest.mark.parametrize("name", ["table1", "table2"])
def test_the_json_file_has_the_results_by_seed_and_the_printed_ones(tmp_path, all_here, calls, name):
    make, rows = MADE[name]
    result = make(lab_of(tmp_path, runs=4))
    result.write(tmp_path)
    content = result.to_json()
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert load_json(tmp_path / f"{name}.json") == content
    assert (tmp_path / f"{name}.md").read_text() == result.text()
    worlds, entries, reference = calls[0]
    assert list(content["figures"]) == [world.title for world in worlds]
    for world in worlds:
        expected = made_up({e: 1.0 + i / 100 for i, e in enumerate(entries)}, world.metrics, reference, 4)
        saved = content["figures"][title(world.data)]
        assert [row["method"] for row in saved["rows"]] == entries
        for got, row in zip(saved["rows"], expected.rows, strict=True):
            assert {m: got["figures"][m]["seeds"] for m in world.metrics} == row.results
            assert got["lr"] == row.setting.lr
            assert got["figures"][world.metrics[-1]]["against"] == (
                None if row.entry == reference else row.against[world.metrics[-1]].to_json()
            )
        in_paper = {row.entry: [list(p) for p in row.printed[world.data]] for row in rows if world.data in row.printed}
        assert saved["paper"] == in_paper
    assert [claim["verdict"] for claim in content["claims"]] == [claim.verdict for claim in result.claims]


def test_the_page_has_plots_tables_claims_and_missing_data(tmp_path, all_here, calls):
    result = replace(table1(lab_of(tmp_path, data=("yahoo", "synthetic"), runs=3)), absent={"ml-1m": "put it <here>"})
    result.write(tmp_path / "new")
    page = (tmp_path / "new" / "table1.html").read_text()
    sections = [title("yahoo"), title("synthetic"), "Claims", "Missing data"]
    assert re.findall(r"<h2>(.*?)</h2>", page) == sections
    assert result.title in page
    assert titles_of(page) == 2 * ["reward@10"]
    for data, plot in zip(("yahoo", "synthetic"), plots_of(page), strict=True):
        dots, mean = plot["data"]
        rows = result.results[title(data)]["rows"]
        values = [row["figures"]["reward@10"]["seeds"] for row in rows]
        assert dots["x"] == pytest.approx([value for seeds in values for value in seeds], rel=1e-5)
        assert dots["y"] == [row["method"] for row in rows for _ in range(3)]
        assert mean["x"] == pytest.approx([np.mean(seeds) for seeds in values], rel=1e-5)
    for claim in result.claims:
        assert f"<li>{claim.data}: {claim.verdict}. {claim.evidence}</li>" in page
    assert "<li>MovieLens-1M is missing: put it &lt;here&gt;</li>" in page
    for row in TABLE1:
        assert f'<th scope="row">{row.name}</th><td>{row.entry}</td>' in page
        mean, deviation = row.printed["yahoo"][-1]
        assert f"<td>{mean:.4f} ± {deviation:.4f}</td>" in page


def test_the_page_is_optional(tmp_path, all_here, calls):
    table1(lab_of(tmp_path)).write(tmp_path / "out", page=False)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["table1.json", "table1.md"]


def test_missing_data_sets_are_named_with_where_to_get_and_put_them(tmp_path, calls, monkeypatch):
    monkeypatch.delenv("ULTR_DATA", raising=False)

    def only_synthetic(name, data_dir=None):
        return None if name == "synthetic" else load_dataset(name, data_dir=data_dir)

    monkeypatch.setattr(labs, "load_dataset", only_synthetic)
    (tmp_path / "empty").mkdir()
    result = table2(lab_of(tmp_path / "out", data_dir=str(tmp_path / "empty")))
    assert [world.data for world in calls[0][0]] == ["synthetic"]
    assert list(result.absent) == ["yahoo", "mslr-web30k", "mq2007"]
    text = result.text()
    assert "Yahoo! LETOR set 1 is missing: " in text
    for name, offered in (("yahoo", "Yahoo Webscope"), ("mslr-web30k", "Microsoft Research"), ("mq2007", "LETOR 4.0")):
        assert offered in result.absent[name]
        assert f"put its files into {tmp_path / 'empty' / name}" in result.absent[name]
        assert result.absent[name] in text
    assert result.to_json()["absent"] == result.absent
    nowhere = table1(lab_of(tmp_path / "out"))
    assert "--data-dir or ULTR_DATA" in nowhere.absent["ml-1m"]


def test_if_no_data_set_is_available_all_are_named(tmp_path, calls):
    with pytest.raises(DataError, match="none of the data sets is available") as raised:
        table1(lab_of(tmp_path, data=("mq2007", "ml-1m"), data_dir=str(tmp_path)))
    assert "LETOR 4.0" in str(raised.value)
    assert "GroupLens" in str(raised.value)
    assert not calls


def test_a_data_set_that_needs_a_package_is_missing_without_it(tmp_path, calls, monkeypatch):
    def needs(name, data_dir=None):
        if name == "ml-1m":
            raise MissingExtraError("MovieLens", package="implicit", extra="movielens")

    monkeypatch.setattr(labs, "load_dataset", needs)
    assert "pip install 'ultr[movielens]'" in table1(lab_of(tmp_path)).absent["ml-1m"]
    with pytest.raises(DataError, match="pip install"):
        table1(lab_of(tmp_path, data=("ml-1m",)))


def test_a_data_set_that_cannot_be_read_raises_an_error(tmp_path):
    folder = tmp_path / "data" / "yahoo"
    folder.mkdir(parents=True)
    for split in ("train", "valid", "test"):
        (folder / f"set1.{split}.txt").write_text("1 qid:1 1:nan\n")
    lab = lab_of(tmp_path, data=("yahoo", "synthetic"), data_dir=str(tmp_path / "data"))
    with pytest.raises(DataError, match="not finite"):
        table1(lab)
    with pytest.raises(DataError, match="did you mean 'synthetic'"):
        table1(lab_of(tmp_path, data=("synthetc", "synthetic")))


@pytest.mark.parametrize(
    ("world", "name", "label", "metric"),
    [
        (
            World("yahoo"),
            "yahoo/continuous-delta-3-eta-1-30000-sessions-off-policy",
            "click + dwell / exp(3)",
            "reward",
        ),
        (
            World("ml-1m", eta=0.5, delta=2),
            "ml-1m/continuous-delta-2-eta-0.5-30000-sessions-off-policy",
            "click + dwell / exp(2)",
            "reward",
        ),
        (
            World("ml-1m", users="watch"),
            "ml-1m/continuous-delta-3-eta-1-watch-30000-sessions-off-policy",
            "click + dwell",
            "reward",
        ),
        (
            World("ml-1m", sessions=99, logging="network"),
            "ml-1m/continuous-delta-3-eta-1-99-sessions-network-logging-off-policy",
            "click + dwell / exp(3)",
            "reward",
        ),
        (
            World("ml-1m", sessions=0, select=TRUTH),
            "ml-1m/continuous-delta-3-eta-1-new-sessions-truth",
            "click + dwell / exp(3)",
            "reward",
        ),
        (World("mq2007", clicks=True, eta=0), "mq2007/clicks-eta-0-30000-sessions-off-policy", "click", "ndcg"),
        (World("mq2007", clicks=True, select=TRUTH), "mq2007/clicks-eta-1-30000-sessions-truth", "click", "ndcg"),
    ],
)
def test_a_world_sets_the_configuration_of_its_runs(tmp_path, world, name, label, metric):
    lab = lab_of(tmp_path, QUICK, runs=7, data_dir="there")
    plan = lab.plan(world, ["dla", OPT], reference=OPT)
    assert plan.out == tmp_path / "runs" / "quick" / name
    assert plan.base.label == label
    assert plan.metrics == [f"{metric}@{k}" for k in (3, 5, 10)]
    assert plan.base.selection == (f"{metric}@10" if world.select == TRUTH else "off-policy-likelihood")
    data, simulation, network = plan.base.data, plan.base.simulation, plan.base.network
    assert (data.source, data.folder, plan.base.machine.device) == (world.data, "there", "cpu")
    assert (simulation.users, simulation.sessions, simulation.logging) == (world.users, world.sessions, world.logging)
    assert simulation.user_options == {"eta": world.eta, "epsilon": 0.1}
    assert (network.hidden, network.dropout, network.norm) == ((64, 32), 0.1, "none")
    for option in ("steps", "bias_steps", "evaluate_every", "patience"):
        assert getattr(network, option) == getattr(QUICK, option)
    assert (plan.seeds, plan.rates, plan.reference) == (7, QUICK.rates, OPT)
    assert (plan.dropouts, plan.limits, plan.tuning_seeds, plan.longest) == ((), (), 1, 1)
    full = lab_of(tmp_path, FULL).plan(world, ["dla"], reference="dla")
    assert (full.dropouts, full.limits, full.tuning_seeds, full.longest) == ((0.0,), FULL.limits, 3, 4)
    assert [entry.text for entry in plan.entries] == ["dla", OPT]


def test_the_budget_sets_the_number_of_runs_unless_it_is_passed():
    assert lab_of(Path(), FULL, runs=0).seeds == 10
    assert lab_of(Path(), QUICK, runs=0).seeds == 3
    assert lab_of(Path(), FULL, runs=2).seeds == 2


def test_the_budget_sets_the_sessions_and_selections_unless_they_are_passed():
    assert lab_of(Path(), FULL).world("yahoo") == World("yahoo")
    assert lab_of(Path(), QUICK).world("yahoo", eta=2, delta=1) == World("yahoo", eta=2, delta=1, sessions=5000)
    assert lab_of(Path(), QUICK, sessions=0).world("yahoo", clicks=True) == World("yahoo", clicks=True, sessions=0)
    passed = lab_of(Path(), FULL, sessions=77, selections=(TRUTH,), users="trust", logging="network")
    assert passed.worlds(["yahoo"]) == [passed.world("yahoo")]
    assert passed.world("yahoo") == World("yahoo", users="trust", sessions=77, logging="network", select=TRUTH)
    assert lab_of(Path(), FULL).worlds(["mq2007", "yahoo"], clicks=True) == [
        World(data, clicks=True, select=select) for data in ("mq2007", "yahoo") for select in (OFF_POLICY, TRUTH)
    ]


def test_a_table_says_how_its_methods_were_trained_and_tuned(tmp_path, all_here, calls):
    full = table1(lab_of(tmp_path, FULL, runs=0)).about
    for words in (
        "the same 30,000 sessions, bias models included",
        "At most 6,000 steps of 256 lists",
        "stops after 600 steps without improvement",
        "up to 4 times the steps",
        "by 3 other runs of each candidate: learning rate, dropout, largest weight of a pair or item",
        "10 tested runs; network 512-256-128; users: pbm; logging ranker: linear",
    ):
        assert words in full
    quick = table1(lab_of(tmp_path, QUICK, sessions=0, users="trust", logging="network")).about
    for words in (
        "Users give new feedback at each step, also to bias models",
        "At most 450 steps of 256 lists",
        "by another run of each candidate: learning rate. 5 tested runs; network 64-32; users: trust",
        "logging ranker: network",
    ):
        assert words in quick
    assert "times the steps" not in quick


@pytest.fixture(scope="module")
def small():
    return make_synthetic(requests=(60, 10, 10))


@pytest.fixture
def few_rows(monkeypatch, small):
    """Use little data and only the rows of Table 1 that claims are about, besides the default method."""
    monkeypatch.setattr("ultr.training.data.cached_dataset", lambda name, data_dir: small)
    monkeypatch.setattr("ultr.training.comparing.tasks.cached_dataset", lambda name, data_dir: small)
    monkeypatch.setattr(labs, "load_dataset", lambda name, data_dir=None: small)
    needed = [e for pair in CLAIMS1.values() for e in pair]
    rows = tuple(row for row in TABLE1 if row.entry in needed)
    monkeypatch.setattr(tables, "TABLE1", rows)
    monkeypatch.setattr(tables, "BASELINES1", [row.entry for row in rows if row.entry not in (OPT, BAYES, IPW)])
    return [DEFAULT, *(row.entry for row in rows)]


def test_the_runs_of_a_table_are_never_repeated(tmp_path, few_rows, monkeypatch):
    performed, original = [], RunTask.perform

    def spy(task):
        performed.append(task.folder)
        return original(task)

    monkeypatch.setattr(RunTask, "perform", spy)
    progress = []
    lab = lab_of(tmp_path, runs=0, data=("synthetic",), on_done=lambda *event: progress.append(event))
    result = table1(lab)
    result.write(tmp_path)
    assert len(performed) == 2 * len(few_rows)
    assert [event[:2] for event in progress] == [(i, len(performed)) for i in range(1, len(performed) + 1)]
    assert (tmp_path / "table1.md").read_text() == result.text()
    saved = json.loads((tmp_path / "table1.json").read_text())
    assert len(plots_of((tmp_path / "table1.html").read_text())) == 1
    runs = lab.plan(lab.world("synthetic"), few_rows, reference=DEFAULT).out / "runs"
    saved_rows = saved["figures"][title("synthetic")]["rows"]
    assert [row["method"] for row in saved_rows] == few_rows
    for row in saved_rows:
        folder = runs / row["method"].replace(":", "_") / "lr-0.05"
        tests = [json.loads((folder / f"seed-{s}" / "test.json").read_text()) for s in range(2)]
        for k in CUTOFFS:
            assert row["figures"][f"reward@{k}"]["seeds"] == [test[f"reward@{k}"] for test in tests]
    seeds = [row["figures"]["reward@10"]["seeds"] for row in saved_rows]
    assert len({value for pair in seeds for value in pair}) == 2 * len(few_rows)
    assert {row["sessions"] for row in saved_rows} == {300}
    assert all(row["figures"]["reward@10"]["against"]["over_requests"]["requests"] == 10 for row in saved_rows[1:])
    assert len(saved["claims"]) == 6
    performed.clear()
    again = table1(lab)
    assert not performed
    assert again.text() == result.text()
    more = table1(lab_of(tmp_path, runs=3, data=("synthetic",)))
    assert sorted(Path(folder).name for folder in performed) == ["seed-2"] * len(few_rows)
    head = title("synthetic")
    for old, new in zip(result.results[head]["rows"], more.results[head]["rows"], strict=True):
        assert new["figures"]["reward@10"]["seeds"][:2] == old["figures"]["reward@10"]["seeds"]
        assert len(new["figures"]["reward@10"]["seeds"]) == 3
