"""Bad days: what `ultr update` does with the log of a day on which something broke, and with quiet days.

    python benchmarks/bad_days.py [--worlds shop,clips] [--seeds 3000,3001] [--requests 3000] [--ranker auto]
                                  [--kinds units,noise] [--quiet 15]

For each seed a world of tests/worlds gives a log, of which the first two days train a run. Then the log of the next day
is spoilt in each of the ways of `KINDS`, and `ultr update` gets it. The true value of a run is the expected feedback on
the first ten items of 2,000 later requests, as they are; a run that is written with a value more than 1% below that of
the run before is a miss. `--quiet` days as they are follow each other; one that is not written is a false alarm.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import ultr
from ultr.errors import UltrError
from ultr.training.config import make_config
from ultr.training.run import run_training
from ultr.training.update import update_run

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from worlds.world import World, positions  # type: ignore[import-not-found]

TESTED = 2000  # requests that the true value is from
WORSE = 0.01  # relative; a run this much below the one before is bad
FIRST_DAYS = 2


@dataclass(frozen=True)
class Names:
    """The columns of a world by their roles, and its label."""

    request: str
    item: str
    position: str
    label: str
    segment: str | None = None


WORLDS = {
    "shop": Names("request_id", "item_id", "position", "click", "device"),
    "clips": Names("list_id", "clip", "slot", "watch_seconds", "surface"),
    "feed": Names("session", "video", "rank", "watch_ratio"),
    "news": Names("impression_id", "article_id", "position", "click"),
}


@dataclass(frozen=True, eq=False)
class Day:
    """The log of a day that is to be spoilt, and all that a spoiler may use."""

    table: pa.Table
    names: Names
    features: tuple[str, ...]
    categorical: tuple[str, ...]
    other: pa.Table  # a day of another market
    rng: np.random.Generator

    def __getitem__(self, name: str) -> np.ndarray:
        return np.asarray(self.table[name].to_numpy(zero_copy_only=False))

    @property
    def label(self) -> np.ndarray:
        return self[self.names.label]

    @property
    def requests(self) -> np.ndarray:
        """The number of the request of each row."""
        return np.unique(self[self.names.request], return_inverse=True)[1]

    def set(self, **columns: Any) -> pa.Table:
        table = self.table
        for name, values in columns.items():
            table = table.set_column(table.column_names.index(name), name, pa.array(values))
        return table

    def set_label(self, values: np.ndarray) -> pa.Table:
        return self.set(**{self.names.label: values.astype(self.label.dtype)})

    def drawn(self, clicked: np.ndarray) -> pa.Table:
        """Return the table with feedback in these rows, of sizes that are drawn from those of the day."""
        sizes = self.label[self.label > 0]
        return self.set_label(np.where(clicked, self.rng.choice(sizes, len(clicked)), 0))

    def keep(self, rows: np.ndarray) -> pa.Table:
        return self.table.filter(pa.array(rows))

    def by_request(self, probability: float) -> np.ndarray:
        """Return a mask of the rows of random requests."""
        return np.asarray((self.rng.random(self.requests.max() + 1) < probability)[self.requests])

    def strongest(self) -> str:
        """Return the number that is most correlated with feedback, the first feature of what spoilers change."""
        clicked = self.label > 0
        found = [abs(np.corrcoef(np.nan_to_num(self[name]), clicked)[0, 1]) for name in self.features]
        return self.features[int(np.argmax(np.nan_to_num(found)))]


def _rising_noise(day: Day) -> pa.Table:
    rate = (day.label > 0).mean()
    place = day[day.names.position].astype(float)
    return day.drawn(day.rng.random(len(place)) < rate * place / place.mean())


def _inverted(day: Day) -> pa.Table:
    """Feedback goes to the row at the mirrored place of its request."""
    label, request = day.label, day.requests
    order = np.lexsort((day[day.names.position], request))
    mirrored = np.lexsort((-day[day.names.position], request))
    values = np.empty_like(label)
    values[order] = label[mirrored]
    return day.set_label(values)


def _bots(day: Day) -> pa.Table:
    bots = day.by_request(0.2)
    return day.drawn(np.where(bots, day.rng.random(len(bots)) < 0.7, day.label > 0))


def _next_row(day: Day) -> pa.Table:
    """Each row has the feedback of the row above it, as if one table started at position 0 and the other at 1."""
    request = day.requests
    order = np.lexsort((day[day.names.position], request))
    values = np.zeros_like(day.label)
    values[order[1:]] = np.where(request[order[1:]] == request[order[:-1]], day.label[order[:-1]], 0)
    return day.set_label(values)


def _first_position(day: Day) -> pa.Table:
    """Feedback is logged at the first place of its request."""
    request = day.requests
    total = np.zeros(request.max() + 1)
    np.maximum.at(total, request, day.label)
    first = day[day.names.position] == day[day.names.position].min()
    return day.set_label(np.where(first, total[request], 0))


def _swapped(day: Day) -> pa.Table:
    strong = day.strongest()
    other = next(name for name in day.features if name != strong)
    return day.set(**{strong: day[other], other: day[strong]})


def _joined_wrongly(day: Day) -> pa.Table:
    """All features are those of other rows."""
    order = day.rng.permutation(len(day.table))
    return day.set(**{name: day[name][order] for name in (*day.features, *day.categorical)})


def _renamed(day: Day) -> pa.Table:
    name = (*day.categorical, day.names.segment or day.features[0])[0]
    values = day[name]
    return day.set(**{name: [f"{value}".upper() for value in values]} if values.dtype == object else {name: values + 1})


def _new_category(day: Day) -> pa.Table:
    name = (*day.categorical, day.names.segment or day.features[0])[0]
    values, changed = day[name], day.by_request(0.5)
    new: Any = "brand new" if values.dtype == object else values.max() * 10 + 1
    return day.set(**{name: np.where(changed, new, values)})


def _late(day: Day) -> pa.Table:
    """The last third of the requests has a fifth of its feedback yet."""
    late = day.requests > 2 / 3 * day.requests.max()
    return day.set_label(np.where(late & (day.rng.random(len(late)) < 0.8), 0, day.label))


def _twice(day: Day) -> pa.Table:
    """The same events come twice, the second time as requests of their own."""
    ids = day[day.names.request]
    again = day.set(**{day.names.request: ids + 10 * int(ids.max()) + 1})
    return pa.concat_tables([day.table, again])


def _shuffled_positions(day: Day) -> pa.Table:
    order = np.lexsort((day.rng.random(len(day.table)), day.requests))
    by_position = np.lexsort((day[day.names.position], day.requests))
    values = np.empty(len(order), np.int64)
    values[order] = day[day.names.position][by_position]
    return day.set(**{day.names.position: values})


def _strongest(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Day], pa.Table]:
    def spoil(day: Day) -> pa.Table:
        name = day.strongest()
        return day.set(**{name: change(day[name].astype(float))})

    return spoil


KINDS: dict[str, Callable[[Day], pa.Table]] = {
    "units": _strongest(lambda x: x * 1000),
    "constant": _strongest(np.zeros_like),
    "missing": _strongest(lambda x: np.full_like(x, np.nan)),
    "negated": _strongest(lambda x: -x),
    "half missing": _strongest(lambda x: np.where(np.arange(len(x)) % 2, np.nan, x)),
    "swapped": _swapped,
    "joined wrongly": _joined_wrongly,
    "renamed": _renamed,
    "new category": _new_category,
    "noise": lambda day: day.drawn(day.rng.random(len(day.table)) < (day.label > 0).mean()),
    "rising noise": _rising_noise,
    "inverted": _inverted,
    "bots": _bots,
    "next row": _next_row,
    "first position": _first_position,
    "shuffled positions": _shuffled_positions,
    "label in other units": lambda day: day.set_label(
        day.label * 1000 if day.label.dtype.kind == "f" else (day.rng.random(len(day.label)) < 0.9).astype(int)
    ),
    "no feedback": lambda day: day.set_label(np.zeros_like(day.label)),
    "late feedback": _late,
    "clicks lost": lambda day: day.set_label(np.where(day.rng.random(len(day.table)) < 0.8, 0, day.label)),
    "only with feedback": lambda day: day.keep(np.bincount(day.requests, day.label > 0)[day.requests] > 0),
    "half of the traffic": lambda day: day.keep(day.by_request(0.5)),
    "twice": _twice,
    "empty": lambda day: day.table.slice(0, 0),
    "tiny": lambda day: day.keep(day.requests < 20),
    "another market": lambda day: day.other,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="shop,clips")
    parser.add_argument("--seeds", default="3000,3001")
    parser.add_argument("--requests", type=int, default=3000, help="of a day")
    parser.add_argument("--ranker", default="auto")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--quiet", type=int, default=15, help="quiet days after each other, for each seed")
    parser.add_argument("--out", type=Path, help="file for a line of JSON for each day")
    given = parser.parse_args()
    found = []
    kinds = [kind for kind in given.kinds.split(",") if kind]
    for world in given.worlds.split(","):
        for seed in map(int, given.seeds.split(",")):
            for result in days(world, seed, given.requests, given.ranker, kinds, given.quiet):
                found.append(result)
                print(json.dumps(result), file=sys.stderr, flush=True)
                if given.out:
                    with given.out.open("a") as file:
                        file.write(json.dumps(result) + "\n")
    print(summary(found))


def summary(found: list[dict[str, Any]]) -> str:
    """Return the misses and false alarms in words, and by kind of day what stopped it."""
    bad = [each for each in found if each["kind"] != "quiet"]
    quiet = [each for each in found if each["kind"] == "quiet"]
    missed = [each for each in bad if each["written"] and each["change"] < -WORSE]
    stopped = [each for each in quiet if not each["written"]]
    lines = [
        f"{len(missed)} of {len(bad)} bad days gave a run more than {WORSE:.0%} below the one before",
        f"{len(stopped)} of {len(quiet)} quiet days were stopped",
        "",
        f"{'day':22} {'days':>5} {'written':>8} {'missed':>7}  {'change':>8}  stopped by",
    ]
    for kind in dict.fromkeys(each["kind"] for each in found):
        rows = [each for each in found if each["kind"] == kind]
        changes = [each["change"] for each in rows if each["change"] is not None]
        names = Counter(name for each in rows for name in each["reasons"])
        by = ", ".join(f"{name} ({count})" for name, count in names.most_common(4))
        written, misses = sum(each["written"] for each in rows), sum(each in missed for each in rows)
        mean = f"{np.mean(changes):+.2%}" if changes else ""
        lines.append(f"{kind:22} {len(rows):5} {written:8} {misses:7}  {mean:>8}  {by}")
    return "\n".join(lines)


def days(world: str, seed: int, requests: int, ranker: str, kinds: list[str], quiet: int) -> Iterator[dict[str, Any]]:
    """Yield the results of the bad days and of the quiet days of a world."""
    names, make = WORLDS[world], getattr(import_module(f"worlds.{world}"), world)
    whole: World = make((FIRST_DAYS + max(quiet, 1)) * requests + TESTED, seed=seed)
    other: World = make(requests, seed=seed + 7777)
    starts = np.cumsum(whole.lengths) - whole.lengths

    def part(first: int, last: int) -> pa.Table:
        begin, end = starts[first], starts[last] if last < len(starts) else len(whole.log)
        return whole.log.slice(begin, end - begin)

    value = _value(whole, names, len(whole.lengths) - TESTED)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)

        def write(table: pa.Table, name: str) -> str:
            pq.write_table(table, folder / f"{name}.parquet")
            return str(folder / f"{name}.parquet")

        roles = {"request": names.request, "item": names.item, "position": names.position, "segment": names.segment}
        columns: dict[str, Any] = {role: name for role, name in roles.items() if name} | {
            "features": list(whole.features),
            "categorical": list(whole.categorical),
            "actions": [names.label],
        }
        first = folder / "first"
        source = write(part(0, FIRST_DAYS * requests), "first-log")
        run_training(make_config(source, label=names.label, ranker=ranker, columns=columns, seed=seed), first)
        before = value(first)
        rng = np.random.default_rng([seed, 5])
        day = Day(
            part(FIRST_DAYS * requests, (FIRST_DAYS + 1) * requests),
            names,
            whole.features,
            whole.categorical,
            other.log,
            rng,
        )
        for kind in kinds:
            done = _updated(first, write(KINDS[kind](day), "bad"), folder / f"bad-{kind}", value, before)
            yield {"world": world, "seed": seed, "kind": kind, "before": before, **done}
        run = first
        for number in range(quiet):
            begin = (FIRST_DAYS + number) * requests
            out = folder / f"quiet-{number}"
            done = _updated(run, write(part(begin, begin + requests), "quiet"), out, value, before)
            yield {"world": world, "seed": seed, "kind": "quiet", "before": before, **done}
            if done["written"]:
                run, before = out, before * (1 + done["change"])


def _value(world: World, names: Names, first: int) -> Callable[[Path], float]:
    """Return the true value of a run on the requests from `first` on."""
    request = np.repeat(np.arange(len(world.lengths)), world.lengths)
    rows = request >= first
    shown = positions(world.lengths)
    table = world.log.filter(pa.array(rows))

    def value(run: Path) -> float:
        model = ultr.load_model(run)
        log = ultr.read_log(table, columns=model.columns, categorical=list(model.vocabularies) or None, missing="keep")
        scores = model.score(log)
        order = np.lexsort((-scores, request[rows]))
        place = np.empty(rows.sum(), np.int64)
        place[order] = positions(world.lengths[first:])
        position = shown.copy()
        position[rows] = place
        return float(world.expected(position)[rows][place <= 10].sum() / (len(world.lengths) - first))

    return value


def _updated(run: Path, log: str, out: Path, value: Callable[[Path], float], before: float) -> dict[str, Any]:
    """Return whether `ultr update` wrote a run, the relative change of the true value, and why it did not."""
    try:
        done = update_run(run, log, out)
    except UltrError as error:
        return {
            "written": False,
            "status": "error",
            "reasons": [type(error).__name__],
            "what": str(error),
            "change": None,
        }
    reasons = [each.name for each in done.reasons]
    change = None if done.run is None else value(done.run) / before - 1
    return {"written": done.accepted, "status": done.status, "reasons": reasons, "change": change}


if __name__ == "__main__":
    main()
