"""Evaluate rankings by relevance judgments (qrels), with the measures and their names of ir_measures and trec_eval.

| name                              | value of a query                                                                 |
|-----------------------------------|----------------------------------------------------------------------------------|
| `nDCG@10`, `nDCG`                 | Σ grade / log2(rank + 1), over that of the best ranking of all judged items      |
| `nDCG(dcg='exp-log2')@10`         | the same with the gain 2^grade - 1                                               |
| `P@10`, `P(rel=2)@10`             | share of the first 10 with a grade of at least `rel` (1)                         |
| `R@10`                            | share of such items that are among the first 10                                  |
| `AP`, `AP@10`                     | average precision                                                                |
| `RR`, `RR@10`                     | 1 over the rank of the first such item; 0 without one                            |
| `Success@10`                      | 1 if there is one                                                                |
| `Judged@10`                       | share of the first 10 that are judged                                            |

Items without a judgment count as not relevant, and so do all items of a query that a ranking does not have. Means are
over the queries of the judgments. Items with equal scores are in the falling order of their ids, as in trec_eval.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import csv

from ultr.bias.judgment_files import trec_id
from ultr.errors import DataError, OptionError, nearest
from ultr.evaluation.comparing import RankerComparison, RankerValue, tested_values
from ultr.evaluation.scores import mean_with_interval, paired_test
from ultr.log.columns import NAMES, as_data_error
from ultr.utils.files import content_kind, existing_file

EXPONENTIAL = "exp-log2"
DCG = ("log2", EXPONENTIAL)
MEASURE = re.compile(r"(\w+)(?:\((.*)\))?(?:@(\d{1,9}))?")
BETWEEN = re.compile(r",(?![^(]*\))")  # commas that are not within parentheses
TABLES = (".csv", ".tsv", ".parquet", ".pq")
COLUMNS = {
    "query": NAMES["query"],
    "item": NAMES["item"],
    "grade": f"{NAMES['relevance']} rating rel",
    "score": "score prediction",
}
Judged = Mapping[str, Mapping[str, float]]  # query -> item -> grade, or score


@dataclass(frozen=True)
class Measure:
    """A measure of a ranking: its name, its cut-off, the least relevant grade, and whether gains are exponential."""

    name: str
    k: int | None = None
    rel: float = 1.0
    exponential: bool = False

    def __call__(self, ranking: Sequence[str], judged: Mapping[str, float]) -> float:
        """Return the value of a ranking of items, best first."""
        first = ranking[: self.k]
        if self.name == "nDCG":
            best = self._dcg(sorted(judged.values(), reverse=True)[: self.k])
            return self._dcg([judged.get(item, 0.0) for item in first]) / best if best else 0.0
        if self.name == "Judged":
            return sum(item in judged for item in first) / len(first) if first else 0.0
        relevant = [judged.get(item, -math.inf) >= self.rel for item in first]
        return OF_RELEVANT[self.name](relevant, sum(grade >= self.rel for grade in judged.values()), self.k)

    def _dcg(self, grades: Iterable[float]) -> float:
        gains = (2**grade - 1 if self.exponential else grade for grade in grades)
        return sum(max(gain, 0.0) / math.log2(rank + 1) for rank, gain in enumerate(gains, 1))


def _precision(relevant: list[bool], _: int, k: int | None) -> float:
    return sum(relevant) / (k or max(len(relevant), 1))


def _average_precision(relevant: list[bool], total: int, _: int | None) -> float:
    found = np.cumsum(relevant) / np.arange(1, len(relevant) + 1)
    return float(found[relevant].sum() / total) if total and relevant else 0.0


def _reciprocal_rank(relevant: list[bool], _: int, __: int | None) -> float:
    return 1 / (relevant.index(True) + 1) if any(relevant) else 0.0


OF_RELEVANT: dict[str, Callable[[list[bool], int, int | None], float]] = {
    "P": _precision,
    "R": lambda relevant, total, _: sum(relevant) / total if total else 0.0,
    "AP": _average_precision,
    "RR": _reciprocal_rank,
    "Success": lambda relevant, _, __: float(any(relevant)),
}
NEED_CUT = ("P", "R", "Success", "Judged")


def parse_measure(text: str) -> Measure:
    """Return the measure with a name such as `nDCG@10` or `P(rel=2)@10`."""
    found = MEASURE.fullmatch(text.strip())
    names = ["nDCG", "Judged", *OF_RELEVANT]
    if found is None or found[1] not in names:
        hint = nearest(text.partition("@")[0].partition("(")[0].strip(), names)
        raise OptionError(f"no measure '{text.strip()}' of judgments", hint=hint)
    name, inside, cut = found.groups()
    k = None if cut is None else int(cut)
    if k == 0 or (k is None and name in NEED_CUT):
        raise OptionError(f"the measure {name} needs a cut-off above 0", got=f"'{text.strip()}'", hint=f"use {name}@10")
    options = dict(_option(part, name) for part in (inside or "").split(",") if part.strip())
    if len(options) > 1:
        raise OptionError(f"the measure {name} has one parameter", got=f"'{inside}'")
    return Measure(name, k, float(options.get("rel", 1)), options.get("dcg") == EXPONENTIAL)


def _option(text: str, name: str) -> tuple[str, str]:
    key, _, value = (part.strip().strip("'\"") for part in text.partition("="))
    if key == "dcg" and name == "nDCG" and value in DCG:
        return key, value
    if key == "rel" and name in OF_RELEVANT and value.isdecimal():
        return key, value
    hint = "use rel=2 with P, R, AP, RR and Success, or dcg='exp-log2' with nDCG"
    raise OptionError(f"the measure {name} has no such parameter", got=f"'{text.strip()}'", hint=hint)


def read_qrels(path: str | Path) -> dict[str, dict[str, float]]:
    """Read judgments: `query 0 item grade` on each line, or a table with columns such as query, item and grade.

    In a table with a column `sure`, such as that of `ultr judgments`, only sure grades count.
    """
    return _read(path, "grade", lines=("query", None, "item", "grade"), what="judgments")


def read_run(path: str | Path) -> dict[str, dict[str, float]]:
    """Read scores: `query Q0 item rank score name` on each line, or a table with the columns query, item and score.

    If an item occurs several times in a query, its highest score counts.
    """
    return _read(path, "score", lines=("query", None, "item", None, "score", None), what="scores")


def _read(path: str | Path, value: str, *, lines: Sequence[str | None], what: str) -> dict[str, dict[str, float]]:
    file = existing_file(path)
    if file.suffix.lower() in TABLES:
        queries, items, texts = _columns(file, value)
    else:
        queries, items, texts = _fields(file, lines, value, what)
    try:
        values = [float(text) for text in texts]
    except (TypeError, ValueError) as error:
        raise DataError(f"a {value} is not a number", where=file, hint="correct or drop the row") from error
    if bad := next((each for each in values if not math.isfinite(each)), None):
        raise DataError(f"a {value} is not finite", where=file, got=bad, hint="correct or drop the row")
    found: dict[str, dict[str, float]] = {}
    for query, item, each in zip(queries, items, values, strict=True):
        of_query = found.setdefault(query, {})
        if value == "grade" and of_query.get(item, each) != each:
            raise DataError("an item has two grades for one query", where=file, got=f"{query}, {item}")
        of_query[item] = max(each, of_query.get(item, each))
    if not found:
        raise DataError(f"the file has no {what}", where=file, hint="check the command that wrote it")
    return found


def _fields(file: Path, names: Sequence[str | None], value: str, what: str) -> tuple[list[str], list[str], list[str]]:
    """Return queries, items and values of a file whose lines have fields with these names."""
    with as_data_error(file, "text"):
        rows = [line.split() for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    if wrong := next((row for row in rows if len(row) != len(names)), None):
        got = " ".join(wrong)[:80]
        hint = f"use a name that ends in {', '.join(TABLES)} for tables"
        raise DataError(f"each line of {what} must have {len(names)} fields", where=file, got=f"'{got}'", hint=hint)
    query, item, number = ([row[names.index(name)] for row in rows] for name in ("query", "item", value))
    return query, item, number


def _columns(file: Path, value: str) -> tuple[list[str], list[str], list[Any]]:
    """Return queries, items and values of a table."""
    table = _table(file)
    by_lower = {name.lower(): name for name in reversed(table.column_names)}
    taken = {role: next((by_lower[n] for n in COLUMNS[role].split() if n in by_lower), None) for role in COLUMNS}
    if missing := [role for role in ("query", "item", value) if taken[role] is None]:
        got = ", ".join(table.column_names[:8])
        raise DataError(f"found no column '{missing[0]}'", where=file, got=got, hint="rename the column")
    if value == "grade" and "sure" in by_lower:
        table = table.filter(pc.fill_null(table[by_lower["sure"]].cast(pa.bool_()), False))
    query, item = ([trec_id(str(each)) for each in table[taken[role]].to_pylist()] for role in ("query", "item"))
    return query, item, table[taken[value]].to_pylist()


def _table(file: Path) -> pa.Table:
    with as_data_error(file, "a table"):
        if content_kind(file) == "Parquet":
            return pq.read_table(file)
        parsing = csv.ParseOptions(delimiter="\t" if file.suffix.lower() == ".tsv" else ",")
        with csv.open_csv(file, parse_options=parsing) as opened:
            texts = dict.fromkeys(opened.schema.names, pa.string())  # ids such as 007 stay as they are
        return csv.read_csv(file, parse_options=parsing, convert_options=csv.ConvertOptions(column_types=texts))


def compare_judged(
    qrels: Judged, runs: Mapping[str, Judged], measures: Sequence[str], *, against: str | None = None
) -> RankerComparison:
    """Compare rankings by judgments: means over queries, and paired tests against one of them, by default the first."""
    parsed = {text.strip(): parse_measure(text) for text in measures}
    against = next(iter(runs)) if against is None else against
    if against not in runs:
        raise OptionError(f"no ranking '{against}'", hint=nearest(against, runs))
    ranked = {name: {query: ranking_of(run.get(query, {})) for query in qrels} for name, run in runs.items()}
    values: dict[str, dict[str, RankerValue]] = {name: {} for name in runs}
    for text, measure in parsed.items():
        found = {
            name: np.array([measure(ranking[query], judged) for query, judged in qrels.items()])
            for name, ranking in ranked.items()
        }
        by_ranker = {name: RankerValue(mean_with_interval(each)) for name, each in found.items()}
        tests = {name: [paired_test(each, found[against])] for name, each in found.items()}
        for name, value in tested_values(by_ranker, tests, text, against).items():
            values[name][text] = value
    return RankerComparison(values, against, len(qrels), evidence="judgments")


def ranking_of(scores: Mapping[str, float]) -> list[str]:
    """Return items by their scores, best first; those with equal scores in the falling order of their ids."""
    return sorted(sorted(scores, reverse=True), key=lambda item: -scores[item])


def split_measures(text: str) -> list[str]:
    """Return the measures of a comma-separated text; commas within parentheses do not separate."""
    return [part.strip() for part in BETWEEN.split(text)]
