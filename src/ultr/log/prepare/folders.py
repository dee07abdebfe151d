"""The folder of lists: the facts in its `lists.json`, and shards of a further log that are appended to it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ultr.errors import ColumnError, DataError, OptionError, OutputError
from ultr.log.cleaning import SUSPICIOUS_FILE
from ultr.log.columns import MAX_CATEGORIES, as_names, some
from ultr.log.prepare.engines import Engine, Tables
from ultr.log.prepare.nesting import any_positive
from ultr.log.prepare.options import Preparation
from ultr.log.shards import SPLITS, Manifest, Shards, is_lists
from ultr.log.sources import PARTITION, Source, SourceFile
from ultr.utils.files import lock, output_errors, sync_folder
from ultr.utils.stores import as_path, as_url

# --- Facts of shards --------------------------------------------------------------------------------------------------
# Counts, positions and categories of all shards, for `lists.json`; they are found without reading features.


@dataclass
class Facts:
    """The counts of each split; the positions, categories and binary actions (0 or 1) of the train split."""

    splits: dict[str, dict[str, int]] = field(default_factory=dict)
    positions: tuple[int, ...] = ()
    categorical: dict[str, tuple[str, ...]] = field(default_factory=dict)
    binary: tuple[str, ...] = ()
    tied: int = 0  # items with the same position as the item before them in their request


def shard_facts(
    folder: Path,
    *,
    actions: Sequence[str],
    categorical: Sequence[str],
    feedback: Sequence[str],
    only: Collection[str] | None = None,
) -> Facts:
    """Return the facts of the shards in a folder, or of those with the names `only`.

    A request has feedback if one of the actions `feedback` is above 0.
    """
    facts = Facts()
    positions = np.zeros(0, np.int64)
    binary = set(actions)
    values: dict[str, pa.Array] = {name: pa.array([], pa.string()) for name in categorical}
    for split in SPLITS:
        shards = [p for p in sorted((folder / split).glob("*.parquet")) if only is None or f"{split}/{p.name}" in only]
        counts = {"requests": 0, "rows": 0, "longest": 0, "with_feedback": 0}
        names = ["position", *actions, *(categorical if split == "train" else ())]
        for table in (t for shard in shards for t in _row_groups(shard, names)):
            offsets = table["position"].chunk(0).offsets.to_numpy()
            lengths = np.diff(offsets)
            columns = {name: table[name].chunk(0).flatten() for name in names}
            shown = columns["position"].to_numpy()
            starts = offsets[:-1] - offsets[0]
            acted = any_positive([columns[name].to_numpy() for name in feedback], starts, lengths)
            counts["requests"] += len(table)
            counts["rows"] += len(shown)
            counts["longest"] = max(counts["longest"], int(lengths.max()))
            counts["with_feedback"] += int(acted.sum()) if feedback else 0
            inside = np.ones(len(shown), bool)
            inside[starts] = False
            facts.tied += int(((np.diff(shown, prepend=-1) == 0) & inside).sum())
            if split != "train":
                continue
            positions = np.union1d(positions, shown)
            binary -= {name for name in binary if not np.isin(columns[name].to_numpy(), (0, 1)).all()}
            for name in categorical:
                values[name] = _with_new(values[name], columns[name], name)
        if counts["requests"]:
            facts.splits[split] = counts
    if "train" not in facts.splits:
        raise DataError("no request is left for training", hint="relax --where, or lower --validation and --test")
    facts.positions = tuple(positions.tolist())
    facts.binary = tuple(name for name in actions if name in binary)
    facts.categorical = {name: tuple(sorted(array.to_pylist())) for name, array in values.items()}
    return facts


def _row_groups(shard: Path, columns: Sequence[str]) -> Iterator[pa.Table]:
    with pq.ParquetFile(shard) as file:
        for number in range(file.num_row_groups):
            yield file.read_row_group(number, columns=list(columns)).combine_chunks()


def _with_new(categories: pa.Array, column: pa.Array, name: str) -> pa.Array:
    """Return the categories, and after them those of a column that are new."""
    distinct = pc.unique(pa.concat_arrays([categories, pc.unique(column).drop_null()]))
    if len(distinct) >= MAX_CATEGORIES:
        hint = "merge rare categories, or do not name it in --categorical"
        raise ColumnError(f"'{name}' has too many categories", got=f"{len(distinct):,}", hint=hint)
    return distinct


# --- Appending --------------------------------------------------------------------------------------------------------
# Append a further log to a folder of lists: its shards are added, and the others stay as they are.

# Options that must be those of the lists, and where the manifest has them; an append takes them from there.
OPTIONAL = (
    "relevance",
    "weight",
    "item",
    "query",
    "segment",
    "randomised",
    "swaps",
    "shown",
)  # roles that lists may lack
FIXED = ("on_duplicates", "min_items", "max_items", "keep_clickless")
PART = ("source", "partitions", "fingerprint")  # what `lists.json` says of a source, next to COUNTS and its shards
COUNTS = ("rows", "requests", "requests_dropped")
NUMBER = pa.schema([("part", pa.int64())])  # the number of the part that a shard belongs to, as a partition of its file


@contextmanager
def locked(lists: str | Path) -> Iterator[Path]:
    """Lock a folder of lists on this machine for an append; raise OutputError if another process appends to it."""
    if as_url(lists) is not None:
        hint = "append on this machine, and copy the folder"
        raise OptionError("lists in a store cannot be appended to", got=lists, hint=hint)
    folder = as_path(lists)
    if not is_lists(folder):
        hint = "prepare the first day with --out"
        raise DataError("is not a folder of lists, so nothing can be appended to it", where=folder, hint=hint)
    with output_errors(folder), (folder / ".lock").open("w") as file:
        try:
            lock(file.fileno(), wait=False)
        except BlockingIOError as error:
            raise OutputError("another process appends to these lists", where=folder, hint="wait") from error
        yield folder


def options_of_lists(manifest: Manifest, given: Mapping[str, Any], *, where: object) -> dict[str, Any]:
    """Return the options to prepare a further log with: those of the lists, and the others as given.

    Conditions on rows are those of the lists, unless others are given.
    Raise OptionError if an option that decides what the lists contain is given with another value.
    """
    about, defaults = manifest.about, {field.name: field.default for field in fields(Preparation)}
    split = about["split"]
    if split["by"] != "hash":
        hint = "prepare all days again; the latest requests are held out"
        raise OptionError("lists that are split by time cannot be appended to", where=where, hint=hint)
    columns = {role: names for role, names in about["columns"].items() if role in defaults}
    of_lists = {**columns, "label": manifest.label, **{name: about[name] for name in FIXED}}
    of_lists |= {"split": "hash", "by_query": split.get("by_query"), "format": about.get("format")}
    of_lists |= {name: split[name] for name in ("validation", "test")}
    for name, value in given.items():
        values = as_names(value) if isinstance(value, str) else value
        if name in of_lists and value not in (defaults[name], of_lists[name]) and values != of_lists[name]:
            what = f"the option '{name.replace('_', '-')}' is that of the lists"
            got = f"{value}; the lists have {of_lists[name]}"
            raise OptionError(what, where=where, got=got, hint="leave it out")
    where_of_rows = given.get("where") or about["where"]
    return {**given, **dict.fromkeys(OPTIONAL, ""), **of_lists, "where": tuple(where_of_rows)}


def parts_of(manifest: Manifest) -> list[dict[str, Any]]:
    """Return a description of each source of the lists, in their order: the first one, and those that were appended."""
    about, later = manifest.about, [dict(part) for part in manifest.appended]
    of_later = {shard for part in later for shard in part["shards"]}
    first = {name: about.get(name) for name in PART}
    first |= {key: about[key] - sum(part.get(key, 0) for part in later) for key in COUNTS}
    return [{**first, "shards": [name for name in manifest.footers if name not in of_later]}, *later]


def parts_to_replace(
    parts: Sequence[Mapping[str, Any]], texts: Sequence[str], source: Source, *, where: object
) -> tuple[int, ...]:
    """Return the numbers of the parts of the lists that `--replace NAME=VALUE` names.

    Raise OptionError if there is no such part, if a part has other partitions too, or if the source has other ones.
    """
    wanted: dict[str, set[str]] = {}
    for text in texts:
        if (match := PARTITION.fullmatch(text)) is None:
            hint = "write the column and the value of the partition, such as date=2026-01-05"
            raise OptionError("--replace must be NAME=VALUE", got=f"'{text}'", hint=hint)
        wanted.setdefault(match[1], set()).add(unquote(match[2]))
    chosen = []
    for number, part in enumerate(parts):
        values = {name: set((part.get("partitions") or {}).get(name, ())) for name in wanted}
        if not all(values[name] & wanted[name] for name in wanted):
            continue
        if others := [f"{name}={value}" for name in wanted for value in sorted(values[name] - wanted[name])]:
            what = f"the lists of {' '.join(texts)} were prepared together with {some(others, 5)}"
            raise OptionError(
                what, where=where, hint="name all of them with --replace, and pass a log with all of them"
            )
        chosen.append(number)
    for name, expected in wanted.items():
        there = {value for part in parts for value in (part.get("partitions") or {}).get(name, ())}
        if missing := sorted(expected - there if chosen else expected):
            hint = f"the lists have {some([f'{name}={v}' for v in sorted(there)], 5) or 'no partitions of this name'}"
            raise OptionError("the lists have no such partition", where=where, got=f"{name}={missing[0]}", hint=hint)
        given = set(source.partition_values().get(name, expected))
        if given != expected:
            got = ", ".join(f"{name}={value}" for value in sorted(given))
            hint = "replace the partitions that the log has"
            raise OptionError(
                "the partitions of the log are not those of --replace", where=source.name, got=got, hint=hint
            )
    return tuple(chosen)


def reject_known_requests(engine: Engine, lists: Path, parts: Sequence[Mapping[str, Any]], new: Path) -> None:
    """Raise DataError if a request of the shards in `new` is in one of the `parts` of the lists.

    The engine joins the ids of both, on disk if they do not fit in memory.
    """

    def ids(files: Sequence[SourceFile]) -> Any:
        return engine.read(Tables(Source(str(lists), tuple(files), "Parquet", NUMBER), ()))

    known = [SourceFile(f"{lists / s}", partitions={"part": f"{n}"}) for n, p in enumerate(parts) for s in p["shards"]]
    if not known:
        return
    added = ids([SourceFile(str(path), partitions={"part": "0"}) for path in sorted(new.glob("*/*.parquet"))])
    twice = ids(known).select("request", "part").semi_join(added.select("request"), "request")
    counts = engine.fetch(twice.group_by("part").aggregate(count=twice.count())).to_pylist()
    if not counts:
        return
    some = engine.fetch(twice.order_by("request").limit(3))["request"].to_pylist()
    values = [(parts[each["part"]].get("partitions") or {}) for each in counts]
    names = sorted({f"{name}={value}" for each in values for name, listed in each.items() for value in listed})
    hint = "leave them out of the log, or prepare all days again"
    if all(values):
        hint = f"to replace a corrected day, pass {' '.join(f'--replace {name}' for name in names[:3])}"
    what = f"{sum(each['count'] for each in counts):,} requests of the log are in the lists already"
    raise DataError(what, where=lists, got=f"{', '.join(map(str, some))}, ...", hint=hint)


def append_shards(
    lists: Path, new: Path, added: Manifest, part: Mapping[str, Any], *, replaced: Collection[int] = ()
) -> Manifest:
    """Move the shards of the folder `new` to the folder `lists`, and return the manifest of both.

    `part` describes the source of the new shards. They replace the parts with the numbers `replaced`. The manifest is
    saved last. Until then the lists are those of before, because shards that the manifest does not have are not read.
    """
    old, moved = Manifest.load(lists), {}
    for split in SPLITS:
        numbers = [int(Path(name).stem.rsplit("-", 1)[1]) for name in old.footers if name.startswith(f"{split}/")]
        (lists / split).mkdir(exist_ok=True)
        for number, path in enumerate(sorted((new / split).glob("*.parquet")), max(numbers, default=-1) + 1):
            target = lists / split / f"part-{number:05}.parquet"
            with path.open("rb") as file:
                os.fsync(file.fileno())
            path.replace(target)
            moved[f"{split}/{path.name}"] = f"{split}/{target.name}"
        sync_folder(lists / split)
    if (new / SUSPICIOUS_FILE).is_file():
        ids = (new / SUSPICIOUS_FILE).read_text().split("\n", 1)[1]
        before = (lists / SUSPICIOUS_FILE).read_text() if (lists / SUSPICIOUS_FILE).is_file() else "request\n"
        (lists / SUSPICIOUS_FILE).write_text(before + ids)
    manifest = _joined(old, added, moved, part, replaced, lists)
    manifest.save(lists)
    remove_unlisted(lists, manifest)
    return manifest


def remove_unlisted(lists: Path, manifest: Manifest) -> None:
    """Remove shards that the manifest does not have: those of a killed append, and those that were replaced."""
    for path in lists.glob("*/*.parquet"):
        if path.parent.name in SPLITS and f"{path.parent.name}/{path.name}" not in manifest.footers:
            path.unlink()


def check_same(old: Manifest, added: Manifest, lists: Path, new: Path) -> None:
    """Raise ColumnError if the new shards have other columns or types than the lists."""
    for what, before, after in (
        ("features", old.features, added.features),
        ("actions", old.actions, added.actions),
        ("categorical features", tuple(old.categorical), tuple(added.categorical)),
    ):
        if before != after:
            got, hint = f"{some(after, 5)}; the lists have {some(before, 5)}", "write the columns of the lists"
            raise ColumnError(f"the {what} of the log are not those of the lists", where=lists, got=got, hint=hint)
    schemas = [pq.read_schema(Shards(folder).paths[0]) for folder in (lists, new)]
    kinds = [dict(zip(schema.names, schema.types, strict=True)) for schema in schemas]
    differing = [name for name in {**kinds[0], **kinds[1]} if kinds[0].get(name) != kinds[1].get(name)]
    if differing:
        name = differing[0]
        got = f"{kinds[1].get(name, 'no such column')}; the lists have {kinds[0].get(name, 'no such column')}"
        what = f"the type of '{name}' is not that of the lists"
        raise ColumnError(what, where=lists, got=got, hint="convert the column of the log")


def _joined(
    old: Manifest,
    added: Manifest,
    moved: Mapping[str, str],
    part: Mapping[str, Any],
    replaced: Collection[int],
    lists: Path,
) -> Manifest:
    """Return the manifest of lists and of the shards that were added; `moved` has their old and new names."""
    categorical = {}
    for name, values in old.categorical.items():
        categorical[name] = (*values, *sorted({*added.categorical[name]} - {*values}))  # codes of old values stay
    for name, values in categorical.items():
        if len(values) >= MAX_CATEGORIES:
            hint = "prepare all days again, with rare categories merged"
            raise ColumnError(f"'{name}' has too many categories", got=f"{len(values):,}", hint=hint)
    parts = parts_of(old)
    place = min(replaced, default=len(parts))  # a corrected day stays where it was
    parts = [each for number, each in enumerate(parts) if number not in replaced]
    parts.insert(place, {**part, **{key: added.about[key] for key in COUNTS}, "shards": sorted(moved.values())})
    footers = {**old.footers, **{moved[name]: value for name, value in added.footers.items()}}
    footers = {name: value for name, value in footers.items() if any(name in each["shards"] for each in parts)}
    if replaced:
        feedback = old.actions if old.label is None else ("label",)
        facts = shard_facts(lists, actions=old.actions, categorical=(), feedback=feedback, only=footers)
    else:
        facts = Facts(
            splits=_summed(old.splits, added.splits),
            positions=tuple(sorted({*old.positions, *added.positions})),
            binary=tuple(name for name in old.binary if name in added.binary),
        )
    counts = {key: sum(each.get(key, 0) for each in parts) for key in COUNTS}
    return replace(
        old,
        positions=facts.positions,
        splits=facts.splits,
        categorical=categorical,
        binary=facts.binary,
        about={**old.about, **{name: parts[0][name] for name in PART}, **counts, "notes": added.about["notes"]},
        footers=footers,
        appended=tuple(parts[1:]),
    )


def _summed(old: Mapping[str, Mapping[str, int]], added: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Return the counts of the splits of lists and of shards that were added."""
    splits = {}
    for split in (name for name in SPLITS if name in old or name in added):
        parts = [each[split] for each in (old, added) if split in each]
        splits[split] = {key: (max if key == "longest" else sum)(part[key] for part in parts) for key in parts[0]}
    return splits
