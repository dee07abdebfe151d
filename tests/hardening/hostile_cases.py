"""A table of hostile files; the name of each describes it."""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from hardening.hostile import (
    ITEMS,
    KINDS,
    ROWS,
    base,
    clean,
    csv_bytes,
    holds,
    parquet_bytes,
    svmlight_bytes,
    with_column,
)

MANY = 100_000


class Case(NamedTuple):
    name: str
    make: Callable[[Path], Path]  # makes the file in an empty folder


CASES: dict[str, Case] = {}
LARGE: dict[str, Case] = {}  # cases that take seconds


def case(name: str, make: Callable[[Path], Path], *, large: bool = False) -> None:
    table = LARGE if large else CASES
    assert name not in CASES, name
    table[name] = Case(name, make)


def changed(name: str, values: Callable[[pa.Table], Any]) -> Callable[[Path], Path]:
    def content() -> bytes:
        return parquet_bytes(with_column(base(), name, values(base())))

    return holds(content, ".parquet")


def one_is(value: Any) -> Callable[[pa.Table, str], Any]:
    """Return a function that replaces one value of a column."""
    return lambda table, name: [value if i == ROWS // 2 else v for i, v in enumerate(table[name].to_pylist())]


def one(name: str, value: Any) -> None:
    case(f"{name} has {value!r}", changed(name, lambda table: one_is(value)(table, name)))


def every(name: str, what: str, value: Any) -> None:
    case(f"{name} is {what}", changed(name, lambda table: [value(i) for i in range(ROWS)]))


def table_case(name: str, make: Callable[[pa.Table], pa.Table]) -> None:
    case(name, holds(lambda: parquet_bytes(make(base())), ".parquet"))


def text_case(name: str, make: Callable[[str], str | bytes], suffix: str = ".csv") -> None:
    def content() -> bytes:
        text = make(clean(suffix).decode())
        return text if isinstance(text, bytes) else text.encode()

    case(name, holds(content, suffix))


# Bytes that are not a log

for _suffix in (".parquet", ".csv", ".txt", ".arrow"):
    case(f"an empty {_suffix}", holds(b"", _suffix))
    case(f"random bytes in a {_suffix}", holds(lambda: np.random.default_rng(1).bytes(3000), _suffix))
    case(f"gzip in a {_suffix}", holds(lambda: gzip.compress(csv_bytes(base()), mtime=0), _suffix))
    case(f"zip in a {_suffix}", holds(b"PK\x03\x04" + bytes(range(256)) * 4, _suffix))
    case(f"zeros in a {_suffix}", holds(bytes(1000), _suffix))
    case(f"line ends in a {_suffix}", holds(b"\n" * 1000, _suffix))
for _suffix in KINDS:
    for _share in (0.02, 0.5, 0.98):
        case(
            f"a {_suffix} cut at {_share:.0%}",
            holds(lambda s=_suffix, p=_share: clean(s)[: int(p * len(clean(s)))], _suffix),
        )
case("plain text in a .csv.gz", holds(lambda: clean(".csv"), ".csv.gz"))
case("a gzip of nothing", holds(gzip.compress(b"", mtime=0), ".csv.gz"))
case("a gzip of noise", holds(lambda: gzip.compress(np.random.default_rng(1).bytes(3000), mtime=0), ".csv.gz"))
case("Parquet of a magic alone", holds(b"PAR1", ".parquet"))
case("Parquet of two magics", holds(b"PAR1PAR1", ".parquet"))
case("Parquet with a long footer", holds(b"PAR1" + bytes(20) + b"\xff\xff\xff\x7fPAR1", ".parquet"))
case("a name without a kind", holds(lambda: clean(".csv"), ""))

# CSV

text_case("a byte order mark", lambda text: b"\xef\xbb\xbf" + text.encode())
text_case("UTF-16", lambda text: text.encode("utf-16"))
text_case("carriage returns", lambda text: text.replace("\n", "\r\n"))
text_case("carriage returns alone", lambda text: text.replace("\n", "\r"))
text_case("no last line end", lambda text: text.rstrip("\n"))
text_case("bytes that are not UTF-8 in an id", lambda text: text.encode().replace(b"r7", b"\xff\xfe7"))
text_case("bytes that are not UTF-8 in the header", lambda text: text.encode().replace(b"f1", b"\xff1", 1))
text_case("NUL in a value", lambda text: text + 'r99,1,1,0,0,0,"\0",1\n')
text_case("NUL at the end", lambda text: text + "\0" * 2000)
text_case("a quote that never ends", lambda text: text.replace('"r5"', '"r5', 1))
text_case("a quote in the middle", lambda text: text.replace('"r5"', 'r"5', 1))
text_case("a header quote that never ends", lambda text: text.replace('"f1"', '"f1', 1))
text_case("a short row", lambda text: text + "r99,1,1\n")
text_case("a long row", lambda text: text + "r99,1,1,0,0,0,1,1,1,1,1\n")
text_case("words in a feature", lambda text: text + "r99,1,1,0,0,0,much,1\n")
text_case("words in a position", lambda text: text + "r99,1,first,0,0,0,1,1\n")
text_case("words in a click", lambda text: text + "r99,1,1,yes,0,0,1,1\n")
text_case("true and false as clicks", lambda text: text.replace(",1,0,", ",1,true,") + "r99,1,9,false,0,0,1,1\n")
text_case("a missing request in CSV", lambda text: text + ",1,1,0,0,0,1,1\n")
text_case("a missing position in CSV", lambda text: text + "r99,1,,0,0,0,1,1\n")
text_case("a missing feature in CSV", lambda text: text + "r99,1,1,0,0,0,,1\n")
text_case("NaN and inf in CSV", lambda text: text + "r99,1,1,0,0,0,NaN,inf\n")
text_case("a number beyond float64 in CSV", lambda text: text + "r99,1,1,0,0,0,1e999,1\n")
text_case("a position beyond 64 bits in CSV", lambda text: text + "r99,1,99999999999999999999,0,0,0,1,1\n")
text_case("a very long line", lambda text: text + f"{'r' * 3_000_000},1,1,0,0,0,1,1\n")
text_case("a very long header", lambda text: text.replace('"f2"', f'"{"f" * 3_000_000}"', 1))
text_case("a header alone", lambda text: text.split("\n")[0] + "\n")
text_case("a header without a line end", lambda text: text.split("\n")[0])
text_case("one row", lambda text: "\n".join(text.split("\n")[:2]) + "\n")
text_case("no header", lambda text: text.split("\n", 1)[1])
text_case("an empty first line", lambda text: "\n" + text)
text_case("blank lines", lambda text: text.replace("\n", "\n\n"))
text_case("commas alone", lambda text: ",,,,,\n" * 50)
text_case("a formula", lambda text: text + '"=cmd|/C calc",1,1,0,0,0,1,1\n')
text_case("ids mixed of numbers and words", lambda text: text.replace('"r5"', "5").replace('"r6"', "5.0"))
text_case("huge ids in CSV", lambda text: text.replace('"r5"', "9" * 400))
text_case("semicolons", lambda text: text.replace(",", ";"))

# Names of columns

for _name in (
    *("", " ", "\t", "f 1", "ф1", "f1\n", "a'b", 'a"b', 'f1"; DROP TABLE t; --', "__proto__", "[bold]", "f_[/]"),
    *("*", "features[0]", "f1,f2", "label", "score", "CLICK", "\U0001f600", "%s{}", "a.b", "x" * 5000),
):
    table_case(f"a column called {_name[:30]!r}", lambda table, n=_name: table.append_column(n, table["f1"]))
    table_case(
        f"a request called {_name[:30]!r}", lambda table, n=_name: table.rename_columns([n, *table.column_names[1:]])
    )
table_case("two columns of one name", lambda table: table.append_column("f1", table["f2"]))
text_case("two columns of one name in CSV", lambda text: text.replace('"f2"', '"f1"', 1))
text_case("empty names in CSV", lambda text: text.replace('"f2"', "", 1).replace('"item"', "", 1))
for _name in ("request", "position", "click", "f1"):
    table_case(f"no {_name}", lambda table, n=_name: table.drop_columns([n]))
table_case("no columns", lambda table: table.select([]))
table_case("no rows", lambda table: table.slice(0, 0))
table_case("one row of Parquet", lambda table: table.slice(0, 1))
table_case("one request", lambda table: table.slice(0, ITEMS))
table_case("two requests", lambda table: table.slice(0, 2 * ITEMS))
table_case("lists of one item", lambda table: table.take(list(range(0, ROWS, ITEMS))))
table_case(
    "metadata that is not JSON", lambda t: t.replace_schema_metadata({"ultr.feature_names": "[", "ultr.actions": "]"})
)
table_case(
    "metadata of another shape",
    lambda t: t.replace_schema_metadata(
        {"ultr.feature_names": "7", "ultr.actions": "7", "ultr.categorical": '{"f1": 1}'}
    ),
)
table_case(
    "metadata that is not UTF-8",
    lambda t: t.replace_schema_metadata({"ultr.feature_names": b"\xff", "ultr.actions": b"\xff"}),
)

# Values

for _value in (0, -1, 10**9, 2**53, 2**63 - 1, -(2**63), 1.5, math.nan, math.inf, -math.inf, 1e30, None):
    one("position", _value)
for _value in ("first", True):
    every("position", repr(_value), lambda i, v=_value: v)
case("position has 2**64-1", changed("position", lambda t: pa.array([2**64 - 1 - i for i in range(ROWS)], pa.uint64())))
every("position", "always 1", lambda i: 1)
every("position", "from 10**9", lambda i: 10**9 + i % ITEMS)
every("position", "another in every row", lambda i: i * 10**6)
for _value in (1e38, 3.4e38, 1e308, 5e-324, 1e-45, -0.0, float("inf"), -float("inf"), float("nan"), None):
    one("f1", _value)
every("f1", "3e38 or -3e38", lambda i: 3e38 * (-1) ** i)
every("f1", "1e38", lambda i: 1e38)
every("f1", "1e-40", lambda i: 1e-40 * i)
every("f1", "the same", lambda i: 7.0)
every("f1", "16777217", lambda i: 16777217 + i)
every("f1", "2**63", lambda i: 2**62 + i)
every("f1", "missing", lambda i: None)
every("f1", "NaN", lambda i: float("nan"))
every("f1", "true or false", lambda i: i % 3 == 0)
every("f1", "a date", lambda i: date(2024, 1, 1 + i % 28))
every("f1", "a decimal", lambda i: Decimal(i) / 7)
every("f1", "a struct", lambda i: {"a": i, "b": [i]})
every("f1", "a list of lists", lambda i: [[i, 1], [2]])
every("f1", "lists", lambda i: [i, i + 1])
every("f1", "lists that differ in length", lambda i: [1.0] * (i % 3))
every("f1", "empty lists", lambda i: pa.scalar([], pa.list_(pa.float32())).as_py())
every("f1", "lists of nothing", lambda i: [None, 1.0])
every("f1", "bytes", lambda i: b"\xff\x00")
every("f1", "words", lambda i: "much")
every("f1", "numbers as text", str)
case("f1 is a dictionary", changed("f1", lambda t: pa.array([f"c{i % 3}" for i in range(ROWS)]).dictionary_encode()))
case(
    "f1 is a dictionary of numbers", changed("f1", lambda t: pa.array([i % 3 for i in range(ROWS)]).dictionary_encode())
)
case("f1 is a map", changed("f1", lambda t: pa.array([[("a", 1)]] * ROWS, pa.map_(pa.string(), pa.int64()))))
case("f1 is half precision", changed("f1", lambda t: pa.array(np.arange(ROWS).astype(np.float16))))
case("f1 is a large decimal", changed("f1", lambda t: pa.array([Decimal(10) ** 60] * ROWS, pa.decimal256(70))))
case("f1 is a duration", changed("f1", lambda t: pa.array(range(ROWS), pa.duration("s"))))
for _name in ("click", "dwell", "relevance"):
    for _value in (-1, 1e30, 1e39, float("nan"), float("inf"), None):
        one(_name, float(_value) if _value is not None else None)
    every(_name, "always 0", lambda i: 0)
    every(_name, "always 1", lambda i: 1)
    every(_name, "1e-40", lambda i: 1e-40)
    every(_name, "3e38", lambda i: 3e38)
    every(_name, "words", lambda i: "yes")
    every(_name, "a struct", lambda i: {"a": 1})
    every(_name, "a list", lambda i: [1.0, 0.0])
every("click", "true or false", lambda i: i % 2 == 0)
for _value in (None, "", " ", "\0", "r" * 10**6, "\U0001f600", "[red]x[/]", "=1+1", 'a"b,c\n'):
    case(f"request has {str(_value)[:20]!r}", changed("request", lambda t, v=_value: one_is(v)(t, "request")))
every("request", "missing", lambda i: None)
every("request", "another in every row", lambda i: f"r{i}")
every("request", "a huge number", lambda i: 2**63 - 1 - i // ITEMS)
every("request", "a fraction", lambda i: i // ITEMS + 0.5)
every("request", "NaN", lambda i: float("nan"))
every("request", "infinite", lambda i: float("inf") if i // ITEMS % 2 else -float("inf"))
every("request", "true or false", lambda i: i < ITEMS)
every("request", "a date", lambda i: date(2024, 1, 1 + i // ITEMS))
every("request", "bytes", lambda i: bytes([255, i // ITEMS]))
every("request", "a struct", lambda i: {"a": i // ITEMS})
every("request", "a list", lambda i: [i // ITEMS])
every("request", "a decimal", lambda i: Decimal(i // ITEMS) / 4)
every("item", "a struct", lambda i: {"a": i})
every("item", "a list", lambda i: [i])
every("item", "missing", lambda i: None)
every("item", "bytes", lambda i: b"\xff\x00")
every("item", "NaN", lambda i: float("nan"))
for _name, _other in (
    *(("weight", weight) for weight in (0.0, -1.0, 1e38, 1e-40, None)),
    *(("randomised", 2), ("randomised", None), ("query", None)),
):
    table_case(
        f"a {_name} of {_other}", lambda t, n=_name, v=_other: t.append_column(n, pa.array([v] * ROWS, pa.float64()))
    )
table_case("a weight that differs in a request", lambda t: t.append_column("weight", pa.array(range(1, ROWS + 1))))
table_case("a query of structs", lambda t: t.append_column("query", pa.array([{"a": 1}] * ROWS)))

# SVMlight

text_case("qid without a number", lambda text: text + "1 qid: 1:2\n", ".txt")
text_case("qid of words", lambda text: text + "1 qid:one 1:2\n", ".txt")
text_case("a broken qid", lambda text: text + "1 qdi:3 1:2\n", ".txt")
text_case("no qid", lambda text: text + "1 1:2\n", ".txt")
text_case("a qid with a fraction", lambda text: text + "1 qid:3.5 1:2\n", ".txt")
text_case("a huge qid", lambda text: text + f"1 qid:{2**63} 1:2\n", ".txt")
text_case("a negative qid", lambda text: text + "1 qid:-7 1:2\n", ".txt")
text_case("a feature twice", lambda text: text + "1 qid:99 1:2 1:3\n", ".txt")
text_case("features out of order", lambda text: text + "1 qid:99 2:2 1:3\n", ".txt")
text_case("feature 0", lambda text: text + "1 qid:99 0:2\n", ".txt")
text_case("feature -1", lambda text: text + "1 qid:99 -1:2\n", ".txt")
text_case("feature 10**9", lambda text: text + f"1 qid:99 {10**9}:2\n", ".txt")
text_case("feature 10**30", lambda text: text + f"1 qid:99 {10**30}:2\n", ".txt")
text_case("a feature without a value", lambda text: text + "1 qid:99 1:\n", ".txt")
text_case("a feature without a name", lambda text: text + "1 qid:99 :2\n", ".txt")
text_case("a feature of words", lambda text: text + "1 qid:99 1:much\n", ".txt")
text_case("features that are not finite", lambda text: text + "1 qid:99 1:nan 2:inf\n", ".txt")
text_case("a feature over float32", lambda text: text + "1 qid:99 1:1e300\n", ".txt")
text_case("a grade that is not finite", lambda text: text + "nan qid:99 1:1\n", ".txt")
text_case("a grade below zero", lambda text: text + "-1 qid:99 1:1\n", ".txt")
text_case("a grade of 1e30", lambda text: text + "1e30 qid:99 1:1\n", ".txt")
text_case("a grade of words", lambda text: text + "good qid:99 1:1\n", ".txt")
text_case("a row without features", lambda text: text + "1 qid:99\n", ".txt")
text_case("rows without features", lambda text: "".join(f"1 qid:{i}\n" for i in range(20)), ".txt")
text_case("comments alone", lambda text: "# nothing\n" * 50, ".txt")
text_case("comments everywhere", lambda text: "# head\n" + text.replace("\n", " # docid = 7 ## #\n"), ".txt")
text_case("comments that are not UTF-8", lambda text: text.encode().replace(b"\n", b" # \xff\xfe\n"), ".txt")
text_case("NUL in SVMlight", lambda text: text + "1 qid:99 1:\0\n", ".txt")
text_case("SVMlight with carriage returns", lambda text: text.replace("\n", "\r\n"), ".txt")
text_case("SVMlight with a byte order mark", lambda text: "\ufeff" + text, ".txt")
text_case("SVMlight without a last line end", lambda text: text.rstrip("\n"), ".txt")
text_case("one line of SVMlight", lambda text: text.split("\n")[0], ".txt")
text_case("SVMlight with hexadecimal", lambda text: text + "0x1 qid:99 1:0x10\n", ".txt")
text_case("CSV named .txt", lambda text: clean(".csv"), ".txt")
text_case("SVMlight named .csv", lambda text: clean(".txt"))

# Paths that are not regular files


def _made(make: Callable[[Path], object]) -> Callable[[Path], Path]:
    def path(folder: Path) -> Path:
        target = folder / "hostile.parquet"
        make(target)
        return target

    return path


def _folder_of(**files: bytes) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        path.mkdir()
        for name, content in files.items():
            (path / name.replace("__", ".")).write_bytes(content)

    return make


case("a missing path", _made(lambda path: None))
case("a path under a file", lambda folder: holds(b"x", "")(folder) / "more.parquet")
case("a path that is too long", lambda folder: folder / ("long" * 100 + ".parquet"))
case("an empty folder", _made(Path.mkdir))
case("a folder of empty shards", _made(_folder_of(a__parquet=b"", b__parquet=b"")))
case(
    "a folder of a good and a bad shard",
    _made(_folder_of(a__parquet=clean(".parquet"), b__parquet=clean(".parquet")[:500])),
)
case(
    "a folder of shards that differ",
    _made(_folder_of(a__parquet=clean(".parquet"), b__parquet=parquet_bytes(base().drop_columns(["f1"])))),
)
case(
    "a folder of shards of other types",
    _made(_folder_of(a__parquet=clean(".parquet"), b__parquet=parquet_bytes(with_column(base(), "f1", ["x"] * ROWS)))),
)
case(
    "a folder of shards with one request in both",
    _made(_folder_of(a__parquet=clean(".parquet"), b__parquet=clean(".parquet"))),
)
case("a folder of words", _made(_folder_of(read__me=b"hello")))
case("a link to itself", _made(lambda path: path.symlink_to(path)))
case("a link to nothing", _made(lambda path: path.symlink_to("nowhere")))
case("the null device", lambda folder: Path("/dev/null"))
case("a link to the null device", _made(lambda path: path.symlink_to("/dev/null")))
case("a name with a line end", lambda folder: Path("hostile\n.parquet"))
if os.geteuid():
    case("a file that may not be read", _made(lambda path: (path.write_bytes(clean(".parquet")), path.chmod(0))))

# Large

case("a request of 10**5 items", holds(lambda: parquet_bytes(base(1, MANY)), ".parquet"), large=True)
case(
    "10**5 columns, a header alone",
    holds(lambda: ",".join(["request", "position", "click", *(f"f{i}" for i in range(MANY))]) + "\n", ".csv"),
    large=True,
)
case(
    "10**5 columns, one row",
    holds(
        lambda: (
            ",".join(["request", "position", "click", *(f"f{i}" for i in range(MANY))])
            + "\n"
            + ",".join(["1"] * (MANY + 3))
            + "\n"
        ),
        ".csv",
    ),
    large=True,
)
case(
    "10**5 unused columns, one row",
    holds(
        lambda: (
            ",".join(["request", "position", "click", "f1", *(f"c{i}" for i in range(MANY))])
            + "\n"
            + ",".join(["1"] * (MANY + 4))
            + "\n"
        ),
        ".csv",
    ),
    large=True,
)
case("feature 10**6 of SVMlight", holds(lambda: svmlight_bytes() + b"1 qid:99 1000000:2\n", ".txt"), large=True)
case(
    "10**5 positions",
    holds(lambda: parquet_bytes(with_column(base(100, 1000), "position", np.arange(MANY))), ".parquet"),
    large=True,
)

# Propensities

PROPENSITIES: dict[str, Case] = {}
GOOD = "position,propensity\n" + "".join(f"{k},{1 / k}\n" for k in range(1, ITEMS + 1))
for _name, _text in {
    "good propensities": GOOD,
    "a segment": GOOD.replace("\n", ",phone\n").replace("propensity,phone", "propensity,segment"),
    "nothing": "",
    "a header of propensities": "position,propensity\n",
    "one position": "position,propensity\n1,1\n",
    "other positions": "position,propensity\n101,1\n102,0.5\n",
    "two of one position": GOOD + "1,0.5\n",
    "a propensity of 0": GOOD.replace("1,1.0", "1,0"),
    "a propensity above 1": GOOD.replace("1,1.0", "1,1.5"),
    "a negative propensity": GOOD.replace("1,1.0", "1,-0.5"),
    "a propensity of NaN": GOOD.replace("1,1.0", "1,NaN"),
    "a propensity of inf": GOOD.replace("1,1.0", "1,inf"),
    "a tiny propensity": GOOD.replace("4,0.25", "4,1e-300"),
    "a denormal propensity": GOOD.replace("4,0.25", "4,5e-324"),
    "a missing propensity": GOOD.replace("1,1.0", "1,"),
    "a missing position": GOOD.replace("1,1.0", ",1.0"),
    "a propensity of words": GOOD.replace("1,1.0", "1,much"),
    "a position of words": GOOD.replace("1,1.0", "first,1"),
    "a position with a fraction": GOOD.replace("1,1.0", "1.5,1"),
    "a huge position": GOOD + f"{2**63 - 1},0.5\n",
    "a position over 64 bits": GOOD + f"{2**70},0.5\n",
    "a negative position": GOOD + "-1,0.5\n",
    "dates for positions": GOOD.replace("1,1.0", "2024-01-01,1").replace("2,", "2024-01-02,"),
    "other names": GOOD.replace("propensity", "p"),
    "names the other way round": "propensity,position\n1,1\n",
    "no header of propensities": GOOD.split("\n", 1)[1],
    "semicolons for commas": GOOD.replace(",", ";"),
    "ragged propensities": GOOD + "5\n",
    "a quote in propensities": GOOD + '"5,1\n',
    "two columns of one name in propensities": "position,position\n1,1\n",
    "carriage returns in propensities": GOOD.replace("\n", "\r\n"),
    "a byte order mark in propensities": "\ufeff" + GOOD,
    "NUL in propensities": GOOD + "5,\0\n",
    "a segment of structs": "position,propensity,segment\n1,1,\n",
}.items():
    PROPENSITIES[_name] = Case(_name, holds(_text, ".csv"))
PROPENSITIES["noise"] = Case("noise", holds(lambda: np.random.default_rng(1).bytes(999), ".csv"))
PROPENSITIES["not UTF-8"] = Case("not UTF-8", holds(GOOD.encode() + b"5,\xff\n", ".csv"))
PROPENSITIES["a cut Parquet"] = Case("a cut Parquet", holds(lambda: clean(".parquet")[:700], ".parquet"))
PROPENSITIES["a log"] = Case("a log", holds(lambda: clean(".parquet"), ".parquet"))
for _type, _values in {
    "structs": [{"a": 1}] * 2,
    "lists": [[1.0]] * 2,
    "bytes": [b"1", b"2"],
    "true": [True, False],
    "decimals": [Decimal("0.5")] * 2,
    "dates": [date(2024, 1, 1)] * 2,
    "nothing": [None, None],
}.items():
    for _column in ("position", "propensity", "segment"):
        _name = f"a {_column} of {_type}"
        _table = {"position": [1, 2], "propensity": [1.0, 0.5], "segment": ["a", "b"]} | {_column: _values}
        PROPENSITIES[_name] = Case(_name, holds(lambda t=_table: parquet_bytes(pa.table(t)), ".parquet"))
for _name in ("a missing path", "an empty folder", "a link to itself", "the null device", "a path that is too long"):
    PROPENSITIES[_name] = CASES[_name]

# Other texts: dwell times, tokens

TEXTS: dict[str, Case] = {}
for _name, _text in {
    "dwell times": "".join(f"{1 + i % 37}\n" for i in range(100)),
    "dwell times with a heading": "seconds\n" + "".join(f"{1 + i % 37}\n" for i in range(100)),
    "dwell times of zero": "0\n" * 100,
    "dwell times below zero": "-1\n" * 100,
    "dwell times that do not vary": "7\n" * 100,
    "extreme dwell times": "1e308\n1e-308\n" * 50,
    "dwell times of NaN": "nan\n" * 100,
    "dwell times of inf": "inf\n" * 100,
    "few dwell times": "1\n2\n",
    "a dwell time of words": "1\nlong\n",
    "a word": "secret",
    "a word and a line end": "secret\n",
    "words": "two words\n",
    "other letters": "пароль\n",
    "NUL": "\0\0",
    "an empty text": "",
    "line ends": "\n\n\n",
    "a long line": "7" * 10**6,
}.items():
    TEXTS[_name] = Case(_name, holds(_text, ".txt"))
TEXTS["not UTF-8"] = Case("not UTF-8", holds(b"\xff\xfe\n", ".txt"))
for _name in ("a missing path", "an empty folder", "a link to itself", "a path that is too long"):
    TEXTS[_name] = CASES[_name]

# Runs


def run_cases(run: Path) -> dict[str, Case]:
    """Return cases in which a file of a run is missing, empty, cut, noise, a folder, or JSON of another shape."""
    cases: dict[str, Case] = {}

    def add(what: str, spoil: Callable[[Path], object]) -> None:
        def make(folder: Path) -> Path:
            spoil(Path(shutil.copytree(run, folder / "run")))
            return folder / "run"

        cases[what] = Case(what, make)

    for path in sorted(p.relative_to(run) for p in run.rglob("*") if p.is_file() and p.name != ".lock"):
        content = (run / path).read_bytes()
        add(f"no {path}", lambda to, p=path: (to / p).unlink())
        contents = {"empty": b"", "cut": content[: len(content) // 2], "noise": np.random.default_rng(0).bytes(500)}
        if path.suffix == ".json":
            contents |= {text: text.encode() for text in ("[]", "{}", "null", "7", '"x"', "NaN", "[" * 9000)}
            about = json.loads(content)
            if isinstance(about, dict):
                contents |= {f"without {key}": json.dumps(_without(about, key)).encode() for key in list(about)[:12]}
                contents |= {f"{key} null": json.dumps({**about, key: None}).encode() for key in list(about)[:12]}
        for what, new in contents.items():
            add(f"{path} {what}", lambda to, p=path, new=new: (to / p).write_bytes(new))
        add(f"{path} a folder", lambda to, p=path: ((to / p).unlink(), (to / p).mkdir()))
    add("nothing left", lambda to: (shutil.rmtree(to), to.mkdir()))
    add("a file", lambda to: (shutil.rmtree(to), to.write_text("x")))
    add("missing", shutil.rmtree)
    add("a link to itself", lambda to: (shutil.rmtree(to), to.symlink_to(to)))
    add("the null device", lambda to: (shutil.rmtree(to), to.symlink_to("/dev/null")))
    return cases


def _without(about: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in about.items() if name != key}
