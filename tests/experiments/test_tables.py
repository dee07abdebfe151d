"""The figures the paper printed, and Tables 1 and 2 beside them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from ultr.compare import Comparison, Entry, Row, RunTask, Workers
from ultr.datasets import load_dataset
from ultr.datasets.synthetic import make_synthetic
from ultr.errors import DataError, MissingExtraError
from ultr.experiments import lab as labs
from ultr.experiments import tables
from ultr.experiments.claims import HELD, REVERSED
from ultr.experiments.lab import FULL, QUICK, Budget, Lab, World
from ultr.experiments.paper import BAYES, BEYOND1, BEYOND2, CUTOFFS, IPW, OPT, TABLE1, TABLE2, UPPER
from ultr.experiments.tables import table1, table2
from ultr.formats import load_json

PAPER = Path(__file__).parents[3] / "shared" / "paper"
TINY = Budget("tiny", (4,), 0.0, 4, 4, (0.05,), 2, False)
MADE = {"table1": (table1, TABLE1), "table2": (table2, TABLE2)}


def printed(rows, data):
    return {row.entry: row.printed[data] for row in rows}


def test_the_rows_of_the_tables_have_figures_for_two_sets_and_three_cutoffs():
    for rows, sets in ((TABLE1, {"yahoo", "ml-1m"}), (TABLE2, {"yahoo", "mslr-web30k"})):
        for row in rows:
            assert set(row.printed) == sets
            for figures in row.printed.values():
                means, deviations = zip(*figures, strict=True)
                assert len(means) == len(CUTOFFS)
                assert list(means) == sorted(means)  # more is seen, further down
                assert all(0 < d < 0.02 * m for m, d in figures)
                assert len(deviations) == 3
    assert (len(TABLE1), len(TABLE2)) == (10, 8)


def test_the_rows_that_are_not_in_the_paper_have_no_figures():
    assert all(not row.printed for row in BEYOND1 + BEYOND2)


@pytest.mark.parametrize("rows", [TABLE1 + BEYOND1, TABLE2 + BEYOND2])
def test_every_row_names_a_method_of_its_own(rows):
    parsed = [Entry.parse(row.entry) for row in rows]
    assert len({(e.method, e.learn_from, str(sorted(e.options.items()))) for e in parsed}) == len(rows)
    assert len({row.name for row in rows}) == len(rows)


def test_some_figures_are_as_printed():
    assert printed(TABLE1, "yahoo")[OPT] == ((2.3319, 6.9e-3), (2.7185, 7.5e-3), (2.9735, 5.9e-3))
    assert printed(TABLE1, "ml-1m")["lambdarank"][2] == (8.9387, 4.7e-2)
    assert printed(TABLE1, "ml-1m")["pal-click-dwell"][0] == (5.7569, 2.7e-2)
    assert printed(TABLE2, "yahoo")[UPPER][0] == (0.6960, 1.4e-3)
    assert printed(TABLE2, "mslr-web30k")["regression-em"][1] == (0.3766, 3.7e-3)


def test_the_printed_order_of_methods_is_that_of_the_text():
    for data in ("yahoo", "ml-1m"):
        at10 = {entry: figures[2][0] for entry, figures in printed(TABLE1, data).items()}
        assert max(at10, key=at10.get) == OPT
        assert min(at10, key=at10.get) == "lambdarank"
        assert at10["pal-click"] > at10["pal-click-dwell"]
    for data in ("yahoo", "mslr-web30k"):
        for k in range(3):
            at = {entry: figures[k][0] for entry, figures in printed(TABLE2, data).items()}
            assert max(at, key=at.get) == UPPER
            assert min(at, key=at.get) == "lambdarank"
            assert at[BAYES] > at[IPW]


def test_every_figure_is_that_of_the_source_of_the_paper():
    sources = [p for p in PAPER.glob("*") if p.is_file()] if PAPER.is_dir() else []
    if not sources:
        pytest.skip(f"the source of the paper is not in {PAPER}")
    lines = [line for path in sources for line in path.read_text().splitlines() if r"$\pm$" in line and "&" in line]
    rows = TABLE1 + TABLE2
    assert len(lines) == len(rows)
    for line, row in zip(lines, rows, strict=True):
        name, *cells = line.replace(r"\\", "").split("&")
        numbers = [tuple(map(float, re.findall(r"\d+\.\d+(?:e-\d+)?", cell))) for cell in cells]
        assert [pair for figures in row.printed.values() for pair in figures] == numbers, row.name
        plain = re.sub(r"\\cite\{.*?\}|[${}]", "", name).strip()
        assert row.name.startswith(plain), name


def levels(rows, **by_entry):
    """A level for each row: those that are not given stand far below."""
    return {row.entry: 1.0 + i / 100 for i, row in enumerate(rows)} | by_entry


def made_up(level_of, metrics, reference, seeds=5):
    """Methods that differ by far more than their runs do on the last metric, and the other way round on the others."""
    rows = []
    for i, (entry, level) in enumerate(level_of.items()):
        noise = np.random.default_rng(i).normal(0, 1e-4, (len(metrics), seeds))
        sign = [-1] * (len(metrics) - 1) + [1]
        figures = {m: (10 + s * level + n).tolist() for m, s, n in zip(metrics, sign, noise, strict=True)}
        rows.append(Row(entry, 0.01 * (i + 1), figures, {}))
    of = next(row for row in rows if row.entry == reference)
    if seeds > 1:
        rows = [row if row is of else Row(row.entry, row.lr, row.figures, row.tested(of)) for row in rows]
    return Comparison(rows, list(metrics), reference)


@pytest.fixture
def all_here(monkeypatch):
    monkeypatch.setattr(labs, "load_dataset", lambda name, data_dir=None: None)


@pytest.fixture
def asked(monkeypatch):
    """What was compared; comparisons are made up of `asked.levels`."""

    class Asked(list):
        levels = None
        figures = None

    found = Asked()

    def compare(self, worlds, entries, *, reference, rate_of=None):
        found.append((worlds, entries, reference, rate_of))
        level_of = found.levels or {entry: 1.0 + i / 100 for i, entry in enumerate(entries)}
        return {world: made_up(level_of, world.metrics, reference, self.seeds) for world in worlds}

    monkeypatch.setattr(Lab, "compare", compare)
    return found


def lab_of(out, budget=TINY, **options):
    return Lab(out, budget, Workers(1), **{"device": "cpu", "runs": 5, **options})


def sections(text):
    """The rows of each table of a text, by the title above it."""
    found = {}
    for part in text.split("\n## ")[1:]:
        lines = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")]
        if lines:
            # Cells at the end may be empty, which the strip above takes away.
            rows = [dict(zip(lines[0], line + [""] * (len(lines[0]) - len(line)), strict=True)) for line in lines[1:]]
            found[part.splitlines()[0]] = rows
    return found


@pytest.mark.parametrize(
    ("name", "titles"),
    [
        ("table1", {"yahoo": "Yahoo! LETOR set 1", "ml-1m": "MovieLens-1M"}),
        ("table2", {"yahoo": "Yahoo! LETOR set 1", "mslr-web30k": "MSLR-WEB30K"}),
    ],
)
@pytest.mark.parametrize("beyond", [False, True])
def test_printed_figures_stand_beside_ours_where_the_paper_has_the_data(
    tmp_path, all_here, asked, name, titles, beyond
):
    make, rows = MADE[name]
    budget = FULL if beyond else QUICK
    found = sections(make(lab_of(tmp_path, budget)).text())
    last = "Reward" if name == "table1" else "NDCG"
    over = "PAL-Click" if name == "table1" else "DLA"
    assert set(found) == {*titles.values(), "MQ2007", "Default data (synthetic)"}
    beside = (BEYOND1 if name == "table1" else BEYOND2) if beyond else ()
    for title, lines in found.items():
        assert [line["method"] for line in lines] == [row.name for row in (*rows, *beside)]
        assert [line["as"] for line in lines] == [f"`{row.entry}`" for row in (*rows, *beside)]
        in_paper = [key for key in lines[0] if key.startswith("paper")]
        expected = [f"paper {last}@{k}" for k in CUTOFFS] + [f"paper, over {over}"]
        assert in_paper == (expected if title in titles.values() else [])
    reference = next(row for row in rows if row.name == over)
    for data, title in titles.items():
        for row, line in zip(rows, found[title], strict=False):
            for k, (mean, deviation) in zip(CUTOFFS, row.printed[data], strict=True):
                assert line[f"paper {last}@{k}"] == f"{mean:.4f} ± {deviation:.4f}"
            gain = 100 * (row.printed[data][2][0] - reference.printed[data][2][0]) / reference.printed[data][2][0]
            assert float(line[f"paper, over {over}"].rstrip("%")) == pytest.approx(gain, abs=0.00501)
        for line in found[title][len(rows) :]:
            assert {line[key] for key in line if key.startswith("paper")} == {""}


def test_printed_gains_are_those_one_computes_by_hand(tmp_path, all_here, asked):
    first = sections(table1(lab_of(tmp_path)).text())
    assert first["Yahoo! LETOR set 1"][0]["paper, over PAL-Click"] == "+1.57%"  # 2.9735 / 2.9274
    assert first["MovieLens-1M"][0]["paper, over PAL-Click"] == "+0.90%"
    assert first["MovieLens-1M"][9]["paper, over PAL-Click"] == "-1.32%"
    second = sections(table2(lab_of(tmp_path)).text())
    assert second["MSLR-WEB30K"][1]["paper, over DLA"] == "+0.73%"
    assert second["Yahoo! LETOR set 1"][4]["paper, over DLA"] == "+0.00%"


def test_gains_are_of_means_over_the_reference_and_stars_tell_what_differs(tmp_path, all_here, monkeypatch):
    def compare(self, worlds, entries, *, reference, rate_of=None):
        figures = {e: [2.0, 2.2] for e in entries}
        figures["pal-click"] = [1.9, 2.1]
        figures[OPT] = [2.0, 2.1]  # + 2.5%, not significantly
        figures[BAYES] = [1.8, 2.002]  # - 4.95%, significantly
        own = [
            Row(e, 0.02, {m: f if m == "reward@10" else [1.0, 1.0] for m in worlds[0].metrics}, {})
            for e, f in figures.items()
        ]
        of = next(row for row in own if row.entry == reference)
        rows = [row if row is of else Row(row.entry, row.lr, row.figures, row.tested(of)) for row in own]
        return {worlds[0]: Comparison(rows, worlds[0].metrics, reference)}

    monkeypatch.setattr(Lab, "compare", compare)
    (lines,) = sections(table1(lab_of(tmp_path, data=("synthetic",), runs=2)).text()).values()
    by = {line["as"].strip("`"): line for line in lines}
    assert by[OPT]["Reward@10"] == "2.0500 ± 0.0707"
    assert by[OPT]["Reward@10 over PAL-Click"] == "+2.50%"
    assert by[BAYES]["Reward@10"] == "1.9010 ± 0.1428*"
    assert by[BAYES]["Reward@10 over PAL-Click"] == "-4.95%"
    assert by["pal-click"]["Reward@10 over PAL-Click"] == "+0.00%"
    assert by[OPT]["Reward@3"] == "1.0000 ± 0.0000"
    assert by[OPT]["rate"] == "0.02"


@pytest.mark.parametrize(
    ("name", "reference", "clicks", "beyond"),
    [("table1", "pal-click", False, BEYOND1), ("table2", "dla", True, BEYOND2)],
)
def test_all_rows_are_compared_on_all_sets_with_their_reference(
    tmp_path, all_here, asked, name, reference, clicks, beyond
):
    make, rows = MADE[name]
    for budget in (QUICK, FULL):
        make(lab_of(tmp_path, budget))
    second = "mslr-web30k" if clicks else "ml-1m"
    worlds = [World(data, clicks, 1.0, 3.0) for data in ("yahoo", second, "mq2007", "synthetic")]
    entries = [row.entry for row in rows]
    assert asked == [
        (worlds, entries, reference, None),
        (worlds, entries + [row.entry for row in beyond], reference, None),
    ]


def verdicts(outcome):
    return {claim.text.partition(":")[0]: claim.verdict for claim in outcome.claims}


GOOD1 = levels(TABLE1, **{OPT: 3.0, BAYES: 2.0, IPW: 1.9, "pal-click": 1.8, "pointwise": 1.7, "lambdarank": 0.5})
GOOD2 = levels(TABLE2, **{UPPER: 4.0, OPT: 3.0, BAYES: 2.0, IPW: 1.9, "dla": 1.8, "lambdarank": 0.5})
CLAIMS1 = {
    "LambdaRank on biased labels is worse than pointwise": ("pointwise", "lambdarank"),
    "A shallow tower on dwell time harms": ("pal-click", "pal-click-dwell"),
    "loss_Bayes-IPW improves on loss_IPW (MovieLens": (BAYES, IPW),
    "loss_opt improves on loss_Bayes-IPW": (OPT, BAYES),
}
CLAIMS2 = {
    "loss_Bayes-IPW improves on loss_IPW": (BAYES, IPW),
    "loss_opt improves on loss_Bayes-IPW (Yahoo": (OPT, BAYES),
    "loss_opt beats the lower bound": (OPT, "lambdarank"),
}


@pytest.mark.parametrize(
    ("name", "good", "pairs", "whole"),
    [
        ("table1", GOOD1, CLAIMS1, "loss_opt beats every baseline"),
        ("table2", GOOD2, CLAIMS2, "loss_opt is competitive on clicks"),
    ],
)
def test_claims_are_judged_on_their_rows_at_the_last_cutoff(tmp_path, all_here, asked, name, good, pairs, whole):
    make, _ = MADE[name]
    lab = lab_of(tmp_path, data=("mq2007",))
    asked.levels = good
    found = make(lab)
    assert verdicts(found) == {**dict.fromkeys(pairs, HELD), whole: HELD}
    assert {claim.data for claim in found.claims} == {"MQ2007"}
    for text, (above, below) in pairs.items():
        asked.levels = good | {above: good[below], below: good[above]}
        assert verdicts(make(lab))[text] == REVERSED, text
        asked.levels = good
        (claim,) = [c for c in found.claims if c.text.startswith(text)]
        assert claim.evidence.startswith(f"{above} less {below} +")


@pytest.mark.parametrize("better", [row.entry for row in TABLE1 if row.entry not in (OPT, BAYES, IPW)])
def test_loss_opt_beats_every_baseline_only_if_each_is_beaten(tmp_path, all_here, asked, better):
    asked.levels = GOOD1 | {better: 3.5}
    (claim,) = [c for c in table1(lab_of(tmp_path, data=("mq2007",))).claims if "every baseline" in c.text]
    assert claim.verdict == REVERSED
    assert claim.evidence.endswith(f"not significantly above: {better}")


@pytest.mark.parametrize(
    ("better", "verdict"),
    [("dla", REVERSED), ("regression-em", REVERSED), ("pairwise-debias", REVERSED), (UPPER, HELD), (BAYES, HELD)],
)
def test_loss_opt_is_competitive_unless_below_the_best_of_three(tmp_path, all_here, asked, better, verdict):
    asked.levels = GOOD2 | {better: 5.0}
    found = verdicts(table2(lab_of(tmp_path, data=("mq2007",))))
    assert found["loss_opt is competitive on clicks"] == verdict


def test_dwell_from_all_rows_is_judged_only_where_it_was_run(tmp_path, all_here, asked):
    lab = lab_of(tmp_path, FULL, data=("yahoo",))
    asked.levels = levels(TABLE1 + BEYOND1, **GOOD1, **{"pal-click:rows=all": 1.0, "pal-click-dwell:rows=all": 1.5})
    found = verdicts(table1(lab))
    assert found["The same, dwell learned from all rows"] == REVERSED
    assert found["A shallow tower on dwell time harms"] == HELD
    asked.levels = asked.levels | {"pal-click:rows=all": 1.6}
    assert verdicts(table1(lab))["The same, dwell learned from all rows"] == HELD
    asked.levels = None
    assert "The same, dwell learned from all rows" not in verdicts(table1(lab_of(tmp_path, QUICK, data=("yahoo",))))


def test_each_set_is_judged_by_itself(tmp_path, all_here, asked):
    claims = table2(lab_of(tmp_path)).claims
    assert len(claims) == 4 * 4
    assert [c.data for c in claims[::4]] == ["Yahoo! LETOR set 1", "MSLR-WEB30K", "MQ2007", "Default data (synthetic)"]


def test_one_run_judges_no_claim(tmp_path, all_here, asked):
    for make in (table1, table2):
        outcome = make(lab_of(tmp_path, runs=1))
        assert outcome.claims == []
        assert "± 0.0000" in outcome.text()
        json.dumps(outcome.to_json(), allow_nan=False)


@pytest.mark.parametrize("name", ["table1", "table2"])
def test_the_figures_by_seed_and_those_printed_are_kept_as_json(tmp_path, all_here, asked, name):
    make, rows = MADE[name]
    outcome = make(lab_of(tmp_path, runs=4))
    outcome.write(tmp_path)
    content = outcome.to_json()
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert load_json(tmp_path / f"{name}.json") == content
    assert (tmp_path / f"{name}.md").read_text() == outcome.text()
    worlds, entries, reference, _ = asked[0]
    for world in worlds:
        expected = made_up({e: 1.0 + i / 100 for i, e in enumerate(entries)}, world.metrics, reference, 4)
        kept = content["figures"][world.data]
        assert [row["method"] for row in kept["rows"]] == entries
        for got, row in zip(kept["rows"], expected.rows, strict=True):
            assert {m: got["figures"][m]["seeds"] for m in world.metrics} == row.figures
        beside = {row.entry: [list(p) for p in row.printed[world.data]] for row in rows if world.data in row.printed}
        assert kept["paper"] == beside
    assert [claim["verdict"] for claim in content["claims"]] == [claim.verdict for claim in outcome.claims]


def test_a_plot_of_each_set_is_written_and_named(tmp_path, all_here, asked):
    outcome = table1(lab_of(tmp_path / "new", data=("yahoo", "synthetic"), runs=3))
    assert outcome.plots == ["table1-yahoo.svg", "table1-synthetic.svg"]
    assert "Plots: table1-yahoo.svg, table1-synthetic.svg" in outcome.text()
    for name in outcome.plots:
        root = ElementTree.parse(tmp_path / "new" / name).getroot()  # noqa: S314 - our own file
        dots = [e for e in root.iter() if e.get("class") == "dot"]
        assert len(dots) == 3 * 3 * len(TABLE1)


def test_sets_that_are_absent_are_named_with_where_to_get_and_put_them(tmp_path, asked, monkeypatch):
    monkeypatch.delenv("ULTR_DATA", raising=False)

    def only_synthetic(name, data_dir=None):
        return None if name == "synthetic" else load_dataset(name, data_dir=data_dir)

    monkeypatch.setattr(labs, "load_dataset", only_synthetic)
    (tmp_path / "empty").mkdir()
    outcome = table2(lab_of(tmp_path / "out", data_dir=str(tmp_path / "empty")))
    assert [world.data for world in asked[0][0]] == ["synthetic"]
    assert list(outcome.absent) == ["yahoo", "mslr-web30k", "mq2007"]
    text = outcome.text()
    assert "Yahoo! LETOR set 1 is absent: " in text
    for name, offered in (("yahoo", "Yahoo Webscope"), ("mslr-web30k", "Microsoft Research"), ("mq2007", "LETOR 4.0")):
        assert offered in outcome.absent[name]
        assert f"put it into {tmp_path / 'empty' / name}" in outcome.absent[name]
        assert outcome.absent[name] in text
    assert outcome.to_json()["absent"] == outcome.absent
    nowhere = table1(lab_of(tmp_path / "out"))
    assert "--data-dir or ULTR_DATA" in nowhere.absent["ml-1m"]


def test_where_no_set_is_here_all_of_them_are_named(tmp_path, asked):
    with pytest.raises(DataError, match="none of the data sets is here") as refused:
        table1(lab_of(tmp_path, data=("mq2007", "ml-1m"), data_dir=str(tmp_path)))
    assert "LETOR 4.0" in str(refused.value)
    assert "GroupLens" in str(refused.value)
    assert not asked


def test_a_set_that_needs_a_package_is_absent_without_it(tmp_path, asked, monkeypatch):
    def needs(name, data_dir=None):
        if name == "ml-1m":
            raise MissingExtraError("MovieLens", package="implicit", extra="movielens")

    monkeypatch.setattr(labs, "load_dataset", needs)
    assert "pip install 'ultr[movielens]'" in table1(lab_of(tmp_path)).absent["ml-1m"]
    with pytest.raises(DataError, match="pip install"):
        table1(lab_of(tmp_path, data=("ml-1m",)))


def test_a_set_that_cannot_be_read_is_not_taken_for_absent(tmp_path):
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
        (World("yahoo"), "yahoo/continuous-delta-3-eta-1", "click + dwell / exp(3)", "reward"),
        (World("ml-1m", eta=0.5, delta=2), "ml-1m/continuous-delta-2-eta-0.5", "click + dwell / exp(2)", "reward"),
        (World("mq2007", clicks=True, eta=0), "mq2007/clicks-eta-0", "click", "ndcg"),
    ],
)
def test_a_world_is_what_its_runs_are_made_of(tmp_path, world, name, label, metric):
    lab = lab_of(tmp_path, QUICK, runs=7, data_dir="there")
    plan = lab.plan(world, ["dla", OPT], reference=OPT, rate_of={"dla": 0.3})
    assert plan.out == tmp_path / "runs" / "quick" / name
    assert plan.base.label == label
    assert plan.metrics == [f"{metric}@{k}" for k in (3, 5, 10)]
    assert plan.base.select == f"{metric}@10"
    assert (plan.base.data, plan.base.data_dir, plan.base.users) == (world.data, "there", "pbm")
    assert plan.base.user_options == {"eta": world.eta, "epsilon": 0.1}
    assert plan.base.ranker_options == {"hidden": [64, 32], "dropout": 0.1, "norm": "none"}
    training = plan.base.training
    assert (training.steps, training.bias_steps, training.device) == (QUICK.steps, QUICK.bias_steps, "cpu")
    assert (plan.seeds, plan.rates, plan.rate_of, plan.reference) == (7, QUICK.rates, {"dla": 0.3}, OPT)
    assert [entry.text for entry in plan.entries] == ["dla", OPT]


def test_runs_are_those_of_the_budget_unless_given():
    assert lab_of(Path(), FULL, runs=0).seeds == 10
    assert lab_of(Path(), QUICK, runs=0).seeds == 3
    assert lab_of(Path(), FULL, runs=2).seeds == 2


@pytest.fixture(scope="module")
def small():
    return make_synthetic(requests=(60, 10, 10))


@pytest.fixture
def few_rows(monkeypatch, small):
    """Little data, and of Table 1 the rows that claims are about."""
    monkeypatch.setattr("ultr.preparing.cached_dataset", lambda name, data_dir: small)
    monkeypatch.setattr("ultr.compare.cached_dataset", lambda name, data_dir: small)
    monkeypatch.setattr(labs, "load_dataset", lambda name, data_dir=None: small)
    needed = [e for pair in CLAIMS1.values() for e in pair]
    rows = tuple(row for row in TABLE1 if row.entry in needed)
    monkeypatch.setattr(tables, "TABLE1", rows)
    monkeypatch.setattr(tables, "BASELINES1", [row.entry for row in rows if row.entry not in (OPT, BAYES, IPW)])
    return [row.entry for row in rows]


def test_a_table_is_made_of_runs_that_are_never_repeated(tmp_path, few_rows, monkeypatch):
    performed, original = [], RunTask.perform

    def spy(task):
        performed.append(task.folder)
        return original(task)

    monkeypatch.setattr(RunTask, "perform", spy)
    heard = []
    lab = lab_of(tmp_path, runs=0, data=("synthetic",), on_done=lambda *what: heard.append(what))
    outcome = table1(lab)
    outcome.write(tmp_path)
    assert len(performed) == 2 * len(few_rows)
    assert [what[:2] for what in heard] == [(i, len(performed)) for i in range(1, len(performed) + 1)]
    assert (tmp_path / "table1.md").read_text() == outcome.text()
    kept = json.loads((tmp_path / "table1.json").read_text())
    ElementTree.parse(tmp_path / "table1-synthetic.svg")  # noqa: S314 - our own file
    judged = lab.plan(World("synthetic"), few_rows, reference="pal-click", rate_of={}).out / "runs"
    for row in kept["figures"]["synthetic"]["rows"]:
        folder = judged / row["method"].replace(":", "_") / "lr-0.05"
        tests = [json.loads((folder / f"seed-{s}" / "test.json").read_text()) for s in range(2)]
        for k in CUTOFFS:
            assert row["figures"][f"reward@{k}"]["seeds"] == [test[f"reward@{k}"] for test in tests]
    seeds = [row["figures"]["reward@10"]["seeds"] for row in kept["figures"]["synthetic"]["rows"]]
    assert len({value for pair in seeds for value in pair}) == 2 * len(few_rows)
    assert len(kept["claims"]) == 5
    performed.clear()
    again = table1(lab)
    assert not performed
    assert again.text() == outcome.text()
    more = table1(lab_of(tmp_path, runs=3, data=("synthetic",)))
    assert sorted(Path(folder).name for folder in performed) == ["seed-2"] * len(few_rows)
    for old, new in zip(outcome.figures["synthetic"]["rows"], more.figures["synthetic"]["rows"], strict=True):
        assert new["figures"]["reward@10"]["seeds"][:2] == old["figures"]["reward@10"]["seeds"]
        assert len(new["figures"]["reward@10"]["seeds"]) == 3
