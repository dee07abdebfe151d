"""Write judgments in the formats of other programs.

| format       | of                                           | content                                            |
|--------------|----------------------------------------------|----------------------------------------------------|
| `csv`        |                                              | all columns of `Judgments.table`, for all pairs    |
| `parquet`    |                                              | the same                                           |
| `qrels`      | trec_eval 9.0, ir_measures                   | `query 0 item grade`                               |
| `opensearch` | Search Relevance Workbench of OpenSearch 3.9 | body of `PUT _plugins/_search_relevance/judgments` |
| `quepid`     | Quepid 7.15 and later                        | CSV with the columns `query,docid,rating`          |
| `ranklib`    | RankLib 2.18, also LETOR and SVM-rank        | `grade qid:1 1:0.5 2:3 # item query`               |

Formats other than CSV and Parquet have sure pairs only, unless all pairs are wanted: their readers take a pair that is
not there as not judged.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO, get_args

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from ultr.bias.relevance import Judgments
from ultr.errors import DataError, OptionError, OutputError
from ultr.utils.arguments import checked
from ultr.utils.files import atomic_path

Format = Literal["csv", "parquet", "qrels", "opensearch", "quepid", "ranklib"]
FORMATS: tuple[Format, ...] = get_args(Format)
BY_SUFFIX: dict[str, Format] = {".csv": "csv", ".parquet": "parquet", ".pq": "parquet", ".qrels": "qrels"}
RATING = "{:.3f}"  # of OpenSearch, which takes ratings as texts


def format_of(path: str | Path, wanted: str | None) -> Format:
    """Return the format that is wanted, or that of a file name; raise OptionError if there is none."""
    found = BY_SUFFIX.get(Path(path).suffix.lower()) if wanted is None else wanted
    if found not in FORMATS:
        got = f"'{path}'" if wanted is None else f"'{wanted}'"
        raise OptionError("the format of judgments is not known", got=got, hint=f"use --format {', '.join(FORMATS)}")
    return next(each for each in FORMATS if each == found)


@checked
def write_judgments(
    judgments: Judgments,
    path: str | Path,
    *,
    format: str | None = None,
    keep_unsure: bool = False,
    overwrite: bool = False,
) -> int:
    """Write judgments to a file, whose name says the format if `format` does not; return how many pairs it has.

    `keep_unsure` keeps pairs whose grade is not sure in formats that cannot mark them.
    """
    chosen = format_of(path, format)
    try:
        return _write(judgments, path, chosen, keep_unsure=keep_unsure, overwrite=overwrite)
    except (pa.ArrowException, UnicodeError) as error:
        brief = " ".join(str(error).split())[:200]
        hint = "write Parquet, or correct the ids in the columns of --item and --query"
        raise OutputError(f"judgments cannot be written ({brief})", where=path, hint=hint) from error


def _write(judgments: Judgments, path: str | Path, chosen: Format, *, keep_unsure: bool, overwrite: bool) -> int:
    if chosen in ("csv", "parquet"):
        table = judgments.table()
        if chosen == "csv":
            table.validate(full=True)  # texts must be UTF-8
        with atomic_path(path, overwrite=overwrite) as temporary:
            (pq.write_table if chosen == "parquet" else pa_csv.write_csv)(table, temporary)
        return len(judgments)
    if chosen == "ranklib" and not judgments.pairs.feature_names:
        hint = "name feature columns with --features, or choose another format"
        raise DataError("RankLib needs features, and the log has no numeric ones", hint=hint)
    rows = _Rows.of(judgments, np.ones(len(judgments), bool) if keep_unsure else judgments.sure)
    with atomic_path(path, overwrite=overwrite) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        WRITERS[chosen](rows, file)
    return len(rows.items)


@dataclass(frozen=True, eq=False)
class _Rows:
    """The pairs that are written; those of a query are adjacent."""

    queries: list[str]
    items: list[str]
    grades: list[int]
    query: list[int]  # numbers of the queries, from 1
    features: np.ndarray
    label: str

    @staticmethod
    def of(judgments: Judgments, chosen: np.ndarray) -> _Rows:
        pairs = judgments.pairs
        if pairs.queries is None:
            hint = "name the column of queries with --query, or write CSV or Parquet"
            raise DataError("judgments in this format need queries, and the log has none", hint=hint)
        queries, items = (_texts(each.filter(pa.array(chosen))) for each in (pairs.queries, pairs.items))
        number = (np.unique(pairs.query[chosen], return_inverse=True)[1] + 1).tolist()
        features = pairs.features[chosen]
        return _Rows(queries, items, judgments.grade[chosen].tolist(), number, features, judgments.label)

    def __iter__(self) -> Iterator[tuple[str, str, int]]:
        return zip(self.queries, self.items, self.grades, strict=True)


def _texts(values: Any) -> list[str]:
    """Return ids as texts on one line; a missing query is empty."""
    return [" ".join(str(value).splitlines()) if value is not None else "" for value in values.to_pylist()]


def trec_id(text: str) -> str:
    """Return an id without white space, as files of trec_eval need it: `red dress` becomes `red%20dress`."""
    encoded = "".join(f"%{ord(letter):02X}" if letter.isspace() or letter == "%" else letter for letter in text)
    return encoded or "%"


def _write_qrels(rows: _Rows, file: TextIO) -> None:
    file.writelines(f"{trec_id(query)} 0 {trec_id(item)} {grade}\n" for query, item, grade in rows)


def _write_quepid(rows: _Rows, file: TextIO) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["query", "docid", "rating"])
    writer.writerows(rows)


def _write_opensearch(rows: _Rows, file: TextIO) -> None:
    head = {"name": "ultr", "description": f"Judgments from feedback: {rows.label}", "type": "IMPORT_JUDGMENT"}
    file.write(json.dumps(head, ensure_ascii=False)[:-1] + ', "judgmentRatings": [')
    last = None
    for query, item, grade in rows:
        rating = json.dumps({"docId": item, "rating": RATING.format(grade)}, ensure_ascii=False)
        if query != last:
            file.write("" if last is None else "]},")
            file.write(f'\n{{"query": {json.dumps(query, ensure_ascii=False)}, "ratings": [{rating}')
        else:
            file.write(f", {rating}")
        last = query
    file.write("]}" if rows.items else "")
    file.write("\n]}\n")


def _write_ranklib(rows: _Rows, file: TextIO) -> None:
    for (query, item, grade), number, features in zip(rows, rows.query, rows.features, strict=True):
        values = " ".join(f"{i}:{value:.9g}" for i, value in enumerate(features, 1) if np.isfinite(value))
        file.write(f"{grade} qid:{number} {values} # {item} {query}\n")


WRITERS: dict[str, Callable[[_Rows, TextIO], None]] = {
    "qrels": _write_qrels,
    "opensearch": _write_opensearch,
    "quepid": _write_quepid,
    "ranklib": _write_ranklib,
}
