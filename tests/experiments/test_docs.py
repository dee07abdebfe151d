"""The pages and plots of experiments in the documentation, which are made from JSON files."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from ultr import __version__
from ultr.experiments import lab
from ultr.experiments.lab import HELD, QUICK, Claim, ExperimentResult, Lab, pages, provenance, write_docs
from ultr.experiments.paper import TableRow
from ultr.experiments.tables import table_section
from ultr.report.bias import pair_map
from ultr.report.page import Code, Grid, Heading, Notes, Section, Table, Text
from ultr.report.plots import dot_plot, heat_map, line_plot
from ultr.training.comparing.results import Comparison, Row, Setting, with_tests
from ultr.training.comparing.tasks import Workers
from ultr.utils.jsonfiles import load_json, read_json

RESULTS = Path(__file__).parents[2] / "docs" / "results"
SVG = "{http://www.w3.org/2000/svg}"
TITLE = "Gain of a < b & c"


def made_up(**changes) -> ExperimentResult:
    lines = {"one & only": ([0.5, 1.0, 2.0], [0.1, -0.2, 0.3]), "two": ([0.5, 1.0, 2.0], [0.2, None, 0.1])}
    bands = {"two": ([0.1, None, 0.0], [0.3, None, 0.2])}
    cells = heat_map("m < 1", [[None, 0.5], [0.25, None]], columns=["1", "2"], rows=["1", "2"], x="other", y="item")
    sections = [
        Section(
            "First & foremost",
            [
                Text("A text about it."),
                line_plot(TITLE, lines, x="eta", y="gain, %", bands=bands, caption="With intervals.", categories=True),
                Table(["method", "reward"], [["a", "1.5"], ["b", ""]], "In words"),
            ],
        ),
        Section(
            "Second",
            [
                Heading("A heading"),
                Grid([dot_plot("reward@10", {"<a>": [1.0, 1.25, 1.75], "b:c=d": [0.5, 0.5, 0.75]}, x="reward"), cells]),
                line_plot("One line", {"only": ([100, 200], [0.25, 0.5])}, x="step", y="reward"),
                Code("a command"),
            ],
        ),
    ]
    options = {
        "name": "table9",
        "title": "Table 9: made up",
        "about": "Three runs.",
        "sections": sections,
        "claims": [Claim("it works", "one set", HELD, "a minus b +0.1", 0.1, 0.01)],
        "results": {"one set": [1.0, None, 1 / 3]},
        "absent": {"yahoo": "put it there"},
    }
    return ExperimentResult(**{**options, **changes})


def elements(text: str, kind: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(text).findall(f".//{SVG}{kind}")  # noqa: S314


def test_a_page_its_plots_and_the_numbers_are_written(tmp_path):
    write_docs(made_up(), tmp_path / "new" / "results", "ultr reproduce table9")
    folder = tmp_path / "new" / "results"
    svgs = [f"table9-{i}.svg" for i in range(1, 5)]
    assert sorted(path.name for path in folder.iterdir()) == [*svgs, "table9.json", "table9.md"]
    page = (folder / "table9.md").read_text()
    assert re.findall(r"!\[(.*?)\]\((.*?)\)", page) == list(
        zip([TITLE, "reward@10", "m < 1", "One line"], svgs, strict=True)
    )
    assert "[table9.json](table9.json)" in page
    blocks = page.split("\n\n")
    assert blocks[:2] == ["# Table 9: made up", "Three runs."]
    assert blocks[3:] == [
        "## First & foremost",
        "A text about it.",
        f"![{TITLE}](table9-1.svg)",
        "With intervals.",
        "In words",
        "| method | reward |\n|---|---|\n| a | 1.5 |\n| b |  |",
        "## Second",
        "A heading",
        "![reward@10](table9-2.svg)",
        "![m < 1](table9-3.svg)",
        "![One line](table9-4.svg)",
        "a command",
        "yahoo is missing: put it there",
        "## Claims",
        "it works:",
        "- one set: **held**. a minus b +0.1\n",
    ]


def test_the_json_file_has_the_results_and_how_they_were_made(tmp_path):
    result = made_up()
    write_docs(result, tmp_path, "ultr reproduce table9 --quick")
    content = load_json(tmp_path / "table9.json", finite=True)
    assert content == json.loads(json.dumps(content))
    assert {name: content[name] for name in result.to_json()} == result.to_json()
    assert (content["name"], content["about"]) == ("table9", "Three runs.")
    assert content["made"] == provenance("ultr reproduce table9 --quick")
    first, second = content["sections"]
    assert [part["kind"] for part in first["parts"]] == ["text", "plot", "table"]
    assert [part["kind"] for part in second["parts"]] == ["heading", "plot", "plot", "plot", "code"]


def test_the_page_names_the_command_commit_and_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_COMMIT", "0123456789ab")
    write_docs(made_up(), tmp_path, "ultr reproduce table9 --runs 3")
    made = read_json(tmp_path / "table9.json")["made"]
    assert made["version"] == __version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", made["date"])
    assert re.search(r", \d+ cores, .*torch \d", made["machine"])
    page = (tmp_path / "table9.md").read_text()
    assert (
        f"Made by `ultr reproduce table9 --runs 3` from commit 0123456789ab (ultr {__version__}) on {made['date']}: "
        f"{made['machine']}." in page
    )


@pytest.mark.parametrize("read", [read_json, lambda path: json.loads(path.read_text())])
def test_the_page_and_plots_can_be_made_again_from_the_json_file(tmp_path, read):
    write_docs(made_up(), tmp_path, "ultr reproduce table9")
    again = pages(read(tmp_path / "table9.json"))
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != "table9.json"}
    assert {name: text.encode() for name, text in again.items()} == written


def test_files_are_replaced_when_an_experiment_is_repeated(tmp_path):
    write_docs(made_up(), tmp_path, "ultr reproduce table9")
    write_docs(made_up(title="Another title"), tmp_path, "ultr reproduce table9 --runs 9")
    page = (tmp_path / "table9.md").read_text()
    assert page.startswith("# Another title\n")
    assert "--runs 9" in page
    assert not [path for path in tmp_path.iterdir() if path.suffix not in (".json", ".md", ".svg")]


def test_a_result_without_claims_and_plots_has_a_short_page():
    page = {
        "sections": [],
        "claims": [],
        "absent": {},
        "name": "n",
        "title": "T",
        "about": "A",
        "made": provenance("c"),
    }
    (text,) = pages(page).values()
    assert "Claims" not in text
    assert text.endswith("[n.json](n.json).\n")


@pytest.mark.parametrize(
    ("file", "title", "lines", "texts"),
    [
        ("table9-1.svg", TITLE, 2, ["one & only", "two", "eta", "gain, %", "0.5", "1.0", "2.0"]),
        ("table9-2.svg", "reward@10", 0, ["<a>", "b:c=d", "reward", "runs", "mean, 95% interval"]),
        ("table9-3.svg", "m < 1", 0, ["0.50", "0.25", "other", "item"]),
        ("table9-4.svg", "One line", 1, ["step", "reward"]),
    ],
)
def test_every_plot_is_xml_with_its_title_and_one_polyline_for_each_line(tmp_path, file, title, lines, texts):
    write_docs(made_up(), tmp_path, "ultr reproduce table9")
    text = (tmp_path / file).read_text()
    shown = [element.text for element in elements(text, "text")]
    assert shown[0] == title
    assert set(texts) <= set(shown)
    assert len(elements(text, "polyline")) == lines
    assert "Gain of a < b" not in text


def test_a_plot_has_its_bands_dots_and_cells(tmp_path):
    write_docs(made_up(), tmp_path, "ultr reproduce table9")
    first, second, third = ((tmp_path / f"table9-{i}.svg").read_text() for i in (1, 2, 3))
    (band,) = elements(first, "polygon")
    assert len(band.attrib["points"].split()) == 4  # two ends, low and high
    assert [len(line.attrib["points"].split()) for line in elements(first, "polyline")] == [3, 2]
    assert len(elements(second, "circle")) == 6 + 2  # runs and means
    assert len([e for e in elements(third, "rect") if "fill-opacity" in e.attrib]) == 2


def test_pairs_that_no_run_has_seen_are_blank(tmp_path):
    seen = pair_map("m", [[0.0, math.nan], [0.75, 0.0]], ["1", "2"])
    write_docs(made_up(sections=[Section("Pairs", [Grid([seen])])]), tmp_path, "ultr reproduce figure5")
    load_json(tmp_path / "table9.json", finite=True)
    plot = (tmp_path / "table9-1.svg").read_text()
    assert "nan" not in plot
    assert len([e for e in elements(plot, "rect") if "fill-opacity" in e.attrib]) == 1


def test_other_parts_are_left_out(tmp_path):
    write_docs(made_up(sections=[Section("S", [Notes(["a note"]), Text("a text")])]), tmp_path, "ultr reproduce x")
    page = (tmp_path / "table9.md").read_text()
    assert "a note" not in page
    assert "## S\n\na text\n" in page


def test_the_commit_is_that_of_the_sources(monkeypatch):
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    assert re.fullmatch(r"[0-9a-f]{12}\+?|unknown", lab._commit())


def test_the_commit_of_a_copy_of_the_sources_is_in_the_environment(monkeypatch):
    monkeypatch.setenv("GIT_COMMIT", "fedcba987654")
    assert lab._commit() == "fedcba987654"
    assert provenance("a command")["commit"] == "fedcba987654"


@pytest.mark.parametrize("program", ["missing", "outside a repository"])
def test_the_commit_is_unknown_without_git(monkeypatch, tmp_path, program):
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(lab, "__file__", str(tmp_path / "lab.py"))
    if program == "missing":
        monkeypatch.setenv("PATH", str(tmp_path))
    assert lab._commit() == "unknown"


def table_rows(page: str, title: str) -> list[dict[str, str]]:
    """Return the rows of the first table under a title of a page, by the head of the column."""
    part = page.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]
    table = re.search(r"^\|.*\|$(\n\|.*\|$)*", part, re.MULTILINE)
    assert table
    head, _, *lines = ([cell.strip() for cell in line[1:-1].split(" |")] for line in table.group().splitlines())
    return [dict(zip(head, line, strict=True)) for line in lines]


def check_files(path: Path) -> int:
    """Check that the page and plots next to a JSON file have its content; return the number of means in tables."""
    content = read_json(path)
    files = pages(content)
    for name, text in files.items():
        assert (path.parent / name).read_bytes() == text.encode(), f"{name} is not made from {path.name}"
    plots = [name for name in files if name.endswith(".svg")]
    assert sorted(p.name for p in path.parent.glob(f"{path.stem}-*.svg")) == sorted(plots)
    for name in plots:
        ElementTree.fromstring(files[name])  # noqa: S314
    assert content["name"] == path.stem
    page = files[f"{path.stem}.md"]
    tables = [s["title"] for s in content["sections"] if any("entry" in part.get("head", ()) for part in s["parts"])]
    parts = content["figures"].items() if isinstance(content["figures"], dict) else ()
    compared = {name: part.get("test", part) for name, part in parts if isinstance(part, dict)}
    compared = {name: part for name, part in compared.items() if "rows" in part}
    if path.stem == "worlds":
        return check_worlds(page, compared)
    if path.stem == "real-logs":
        return check_real_logs(page, content["figures"])
    means = 0
    for title, (name, result) in zip(tables, compared.items(), strict=True):
        assert path.stem == "trees" or title in (name, f"{name}: test")
        by_entry = {row["entry"]: row for row in table_rows(page, title)}
        assert set(by_entry) == {row["method"] for row in result["rows"]}
        for row in result["rows"]:
            for metric, summary in row["figures"].items():
                cell = by_entry[row["method"]][metric.capitalize().replace("Ndcg", "NDCG")]
                shown = f"{summary['mean']:.4f} ± {summary['deviation']:.4f}"
                assert cell.rstrip("*") == shown, f"{title}, {row['method']}, {metric}"
                means += 1
    return means


def check_worlds(page: str, compared: dict[str, dict]) -> int:
    """Check that the table of all worlds has the means of a JSON file; return the number of means."""
    lines = table_rows(page, "Cell by cell")
    for line, (name, result) in zip(lines, compared.items(), strict=True):
        (metric,) = result["metrics"]
        means = {row["method"]: row["figures"][metric]["mean"] for row in result["rows"]}
        bound, default = means.pop("pairwise-em:theta=oracle", None), means["pairwise-em"]
        first = max(means, key=means.__getitem__)
        logged = float(np.mean(result["logging_ranker"]))
        expected = [name, f"{default:.4f}", f"{logged:.4f}", first, f"{means[first] / default - 1:+.2%}"]
        names = ("world", "the default", "logging ranker", "first", "first over the default")
        assert [line[name].rstrip("*") for name in names] == expected
        assert line["bound over the default"] == ("" if bound is None else f"{bound / default - 1:+.2%}")
    return 2 * len(lines)


def check_real_logs(page: str, figures: dict[str, dict]) -> int:
    """Check that the tables of estimates and click models have the numbers of a JSON file; return their number."""
    numbers = 0
    for name, log in figures.items():
        if "examination" not in log:
            continue
        part = page.split(f"\n## {name}\n", 1)[1].split("\n## ", 1)[0]
        rows = {cells[0]: cells[1:] for cells in (line[2:-2].split(" | ") for line in part.splitlines() if "|" in line)}
        positions = log["examination"]["positions"]
        shown = [positions.index(int(head.removeprefix("position "))) for head in rows["estimate"][:-1]]
        for estimate, curve in log["examination"]["estimates"].items():
            theta = [f"{curve['theta'][i]:.3f}" for i in shown]
            assert [cell.split(" ")[0] for cell in rows[estimate][: len(shown)]] == theta, estimate
            numbers += len(shown)
        for model in log["click_models"]:
            assert rows[model["model"]][0] == f"{model['log_likelihood']:.5f}", model["model"]
            numbers += 1
    return numbers


ROWS = (TableRow("ours", "pairwise-em"), TableRow("PAL-Click", "pal-click"), TableRow("other", "dla:rate=1"))


def table_result(out: Path) -> ExperimentResult:
    """Return a result of two data sets with a table each."""
    lab = Lab(out, QUICK, Workers(1), selections=("off-policy", "truth"))
    sections, results = [], {}
    for world in lab.worlds(["synthetic"]):
        rows = []
        for i, row in enumerate(ROWS):
            values = {m: [1.0 + i / 7, 2.0 + i / 3 + len(world.title)] for m in world.metrics}
            rows.append(Row(row.entry, Setting(0.01), values))
        result = Comparison(with_tests(rows, "pairwise-em"), world.metrics, "pairwise-em")
        sections.append(table_section(world.title, world, result, ROWS))
        results[world.title] = result.to_json()
    return made_up(sections=sections, results=results)


def test_the_means_in_the_json_file_of_a_table_are_those_on_its_page(tmp_path):
    write_docs(table_result(tmp_path), tmp_path / "docs", "ultr reproduce table9")
    assert check_files(tmp_path / "docs" / "table9.json") == 2 * 3 * 3  # data sets, rows and metrics


def test_the_check_of_a_page_finds_numbers_and_files_that_differ(tmp_path):
    write_docs(table_result(tmp_path), tmp_path / "docs", "ultr reproduce table9")
    path = tmp_path / "docs" / "table9.json"
    whole, page = path.read_text(), (tmp_path / "docs" / "table9.md").read_text()
    changed = json.loads(whole)
    del changed["seal"]
    next(iter(changed["figures"].values()))["rows"][1]["figures"]["reward@5"]["mean"] += 1e-3
    path.write_text(json.dumps(changed))
    with pytest.raises(AssertionError, match=r"pal-click, reward@5"):
        check_files(path)
    path.write_text(whole)
    (tmp_path / "docs" / "table9.md").write_text(page + " ")
    with pytest.raises(AssertionError, match=r"table9.md is not made from table9.json"):
        check_files(path)
    (tmp_path / "docs" / "table9.md").write_text(page)
    (tmp_path / "docs" / "table9-3.svg").write_text("")
    with pytest.raises(AssertionError):
        check_files(path)


def test_the_pages_and_plots_of_the_documentation_are_made_from_their_json_files():
    files = sorted(RESULTS.glob("*.json"))
    if not RESULTS.is_dir():
        pytest.skip(f"{RESULTS} does not exist")
    assert files
    assert {path.stem for path in RESULTS.glob("*.md")} - {"protocol"} <= {path.stem for path in files}
    for path in files:
        means = check_files(path)
        assert means or not path.stem.startswith(("table", "trees", "settling", "real")), path.name
