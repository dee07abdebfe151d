"""A folder of lists, as `ultr prepare` writes it: Parquet with one row per request, in shards that are read in pieces.

LISTS/lists.json           what the columns are, and what training has to know of the whole
LISTS/train/*.parquet      `request`, `weight` and the context of a request as single values; `position`, `item`, each
LISTS/validation/*.parquet action, `relevance` and each categorical feature as lists; `features` as a list of lists
LISTS/test/*.parquet

Requests stand in the order of a hash of their ids, which is random: neighbours have nothing in common.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ultr.arguments import check_fields
from ultr.errors import DataError, OptionError
from ultr.files import atomic_path
from ultr.formats import load_description
from ultr.log.build import as_data_error, check_features
from ultr.log.schema import CONTEXT
from ultr.log.table import Log
from ultr.seals import sealed

FORMAT = 1
MANIFEST = "lists.json"
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Manifest:
    """What a folder of lists holds."""

    features: tuple[str, ...]  # the names of the numeric features, in the order they stand in `features`
    actions: tuple[str, ...]
    positions: tuple[int, ...]  # the position ids of the train split, rising
    splits: Mapping[str, Mapping[str, int]]  # split -> {"requests": ..., "rows": ..., "longest": ...}
    categorical: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # -> its values in the train split, rising
    binary: tuple[str, ...] = ()  # the actions that are 0 or 1 in the train split
    label: str | None = None  # the expression behind the action `label`, where one was asked for
    about: Mapping[str, Any] = field(default_factory=dict)  # how it was made: source, engine, filters, split, sampling
    footers: Mapping[str, str] = field(default_factory=dict)  # shard -> the checksum of what it says of itself

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.splits or any(name not in SPLITS for name in self.splits):
            raise DataError(f"splits should be among {', '.join(SPLITS)}", got=", ".join(self.splits) or "none")
        for name, counts in self.splits.items():
            if min(int(counts[part]) for part in ("requests", "rows", "longest")) < 1:
                raise DataError(f"the split '{name}' is empty", got=dict(counts))

    def save(self, folder: Path) -> None:
        with atomic_path(folder / MANIFEST, overwrite=True) as temporary:
            temporary.write_text(json.dumps(sealed({"format": FORMAT, **asdict(self)}), indent=2) + "\n")

    @staticmethod
    def load(folder: Path) -> Manifest:
        path = folder / MANIFEST
        try:
            content = load_description(path, FORMAT, what="this folder of lists", mend=AGAIN)
            known = {f.name: content[f.name] for f in fields(Manifest) if f.name != "footers"}
            known["footers"] = dict(content.get("footers", {}))  # of older lists, none
            for name in ("features", "actions", "positions", "binary"):
                if not isinstance(known[name], list):
                    raise TypeError(f"'{name}' should be a list")
                known[name] = tuple(known[name])
            known["categorical"] = {name: tuple(values) for name, values in known["categorical"].items()}
            return Manifest(**known)
        except (OptionError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"cannot be read ({error})", where=path, mend=AGAIN) from error


AGAIN = "run ultr prepare again"


def is_lists(path: str | Path) -> bool:
    """Whether this is a folder that `ultr prepare` wrote."""
    return (Path(path) / MANIFEST).is_file()


def footer_sum(path: Path) -> str:
    """The CRC-32 of a Parquet file's footer, which tells of all else; pages have checksums of their own."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 8))
        length = int.from_bytes(file.read(4), "little")
        file.seek(max(0, size - 8 - length))
        return f"{zlib.crc32(file.read()):08x}"


class RowGroup(NamedTuple):
    """A piece of a shard, the least that is read at once."""

    path: Path
    number: int
    requests: int
    rows: int


class Shards:
    """A split of a folder of lists: the pieces it is made of, and each of them as a log."""

    def __init__(self, folder: str | Path, split: str = "train") -> None:
        self.folder, self.split, self.manifest = Path(folder), split, Manifest.load(Path(folder))
        if split not in self.manifest.splits:
            got = ", ".join(self.manifest.splits)
            raise DataError(f"the lists have no split '{split}'", where=folder, got=got, mend=AGAIN)
        self.groups: list[RowGroup] = []
        self._footers: dict[Path, Any] = {}  # so that they are read once, not with every piece
        for path in sorted((self.folder / split).glob("*.parquet")):
            with as_data_error(path, "Parquet"):
                # Before Arrow sees it: on some damage it ends the process.
                if self.manifest.footers.get(f"{split}/{path.name}", found := footer_sum(path)) != found:
                    raise DataError("the file is not as it was written", where=path, mend=AGAIN)
                self._footers[path] = pq.read_metadata(path)
            schema = self._footers[path].schema.to_arrow_schema()
            _check_schema(schema, self.manifest, path)
            if not schema.equals(next(iter(self._footers.values())).schema.to_arrow_schema()):
                raise DataError("its columns are not those of the first shard", where=path, mend=AGAIN)
            self.groups += _row_groups(path, self._footers[path])
        if len(self) != self.manifest.splits[split]["requests"]:
            expected = f"{self.manifest.splits[split]['requests']:,}"
            raise DataError(f"shards should hold {expected} requests", where=folder, got=f"{len(self):,}", mend=AGAIN)

    def __len__(self) -> int:
        """The number of requests."""
        return sum(group.requests for group in self.groups)

    @property
    def rows(self) -> int:
        return self.manifest.splits[self.split]["rows"]

    @property
    def width(self) -> int:
        """The number of features."""
        return len(self.manifest.features) + len(self.manifest.categorical)

    @property
    def row_bytes(self) -> int:
        """What a row takes in memory."""
        return 4 * (self.width + len(self.manifest.actions) + 3)

    @property
    def fingerprint(self) -> str:
        """A digest of what the folder says of itself, and of the names and sizes of its files."""
        files = sorted((path.name, path.stat().st_size) for path in (self.folder / self.split).glob("*.parquet"))
        content = [(self.folder / MANIFEST).read_text(), files]
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()

    def check_names(self, named: Mapping[str, Any]) -> None:
        """Refuse names for parts that are not those the lists have; what was chosen, was chosen in preparing them."""
        about = self.manifest
        own = {"actions": about.actions, "features": ("features",), "categorical": tuple(about.categorical)}
        for part, name in named.items():
            asked = [] if name is None else name.split(",") if isinstance(name, str) else list(name)
            names = own.get(part, (part,))
            if asked and set(asked) != set(names):
                got, mend = f"{part}={','.join(asked)}", f"use {','.join(names) or 'none'}, or prepare them otherwise"
                raise OptionError("prepared lists have names of their own", where=self.folder, got=got, mend=mend)

    def read(self, group: RowGroup) -> Log:
        """The requests of a piece."""
        known = self._footers[group.path]
        with (
            as_data_error(group.path, "Parquet"),
            pq.ParquetFile(group.path, metadata=known, memory_map=True, page_checksum_verification=True) as file,
        ):
            table = file.read_row_group(group.number, use_threads=False)
        return _log_of(table, self.manifest, where=f"{group.path}, row group {group.number}")

    def read_all(self, groups: Iterable[RowGroup] | None = None) -> Log:
        """The requests of some pieces, or of all, as one log."""
        groups = self.groups if groups is None else list(groups)
        features = np.empty((sum(group.rows for group in groups), self.width), np.float32)
        others, first = [], 0
        for group in groups:
            log = self.read(group)
            features[first : first + log.rows] = log.features  # the only large part: never there twice
            others.append(log.without_features())
            first += log.rows
        names, vocabularies = log.feature_names, log.vocabularies
        return replace(joined_logs(others), features=features, feature_names=names, vocabularies=vocabularies)

    def sample(self, rows: int, seed: int) -> Log:
        """Random pieces with about so many rows; all requests where there are no more."""
        order = np.random.default_rng(seed).permutation(len(self.groups))
        count = int(np.searchsorted(np.cumsum([self.groups[i].rows for i in order]), rows)) + 1
        return self.read_all(self.groups[i] for i in sorted(order[:count]))


def _check_schema(schema: pa.Schema, manifest: Manifest, path: Path) -> None:
    """Refuse a shard whose columns are not what the manifest says."""

    def whole(kind: Any) -> bool:
        return bool(pa.types.is_integer(kind))

    def number(kind: Any) -> bool:
        return whole(kind) or bool(pa.types.is_floating(kind))

    def numbers(kind: Any) -> bool:
        return bool(pa.types.is_list(kind)) and number(kind.value_type)

    inside: dict[str, Callable[[Any], bool]] = {"position": whole, **dict.fromkeys(manifest.actions, number)}
    inside |= dict.fromkeys(manifest.categorical, lambda _: True)
    inside |= {"features": numbers} if manifest.features else {}
    if lacking := sorted({"request", *inside} - set(schema.names)):
        raise DataError(f"lacks the column '{lacking[0]}'", where=path, mend=AGAIN)
    inside |= {
        name: test for name, test in {"relevance": number, "item": lambda _: True}.items() if name in schema.names
    }
    for name, test in inside.items():
        kind = schema.field(name).type
        if not pa.types.is_list(kind) or not test(kind.value_type):
            raise DataError(f"'{name}' should hold lists, of numbers but for ids", where=path, got=kind, mend=AGAIN)


def _row_groups(path: Path, about: Any) -> list[RowGroup]:
    groups = [about.row_group(number) for number in range(about.num_row_groups)]
    paths = [about.schema.column(i).path for i in range(about.num_columns)]
    place = next((i for i, name in enumerate(paths) if name.split(".")[0] == "position"), None)
    if place is None:
        raise DataError("lacks the column 'position'", where=path, mend=AGAIN)
    return [RowGroup(path, n, group.num_rows, group.column(place).num_values) for n, group in enumerate(groups)]


def joined_logs(logs: Sequence[Log]) -> Log:
    """Logs with the same columns as one, in memory of its own."""
    first = logs[0]

    def rows(values: Callable[[Log], Any]) -> Any:
        return None if values(first) is None else np.concatenate([values(log) for log in logs])

    def entries(values: Callable[[Log], Any]) -> Any:
        return None if values(first) is None else pa.concat_arrays([values(log) for log in logs])

    lengths = np.concatenate([log.lengths for log in logs])
    return replace(
        first,
        features=np.concatenate([log.features for log in logs]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        request_ids=entries(lambda log: log.request_ids),
        positions=rows(lambda log: log.positions),
        actions={name: rows(lambda log, name=name: log.actions[name]) for name in first.actions},  # type: ignore[misc]
        relevance=rows(lambda log: log.relevance),
        weights=rows(lambda log: log.weights),
        item_ids=entries(lambda log: log.item_ids),
        context={name: entries(lambda log, name=name: log.context[name]) for name in first.context},  # type: ignore[misc]
    )


def _log_of(table: pa.Table, manifest: Manifest, *, where: str) -> Log:
    """A piece as a log; its lists must be alike in length, and its features numbers."""
    table = table.combine_chunks()
    names = set(table.column_names)

    def single(name: str) -> Any:
        return table[name].chunk(0)

    offsets = single("position").offsets.to_numpy().astype(np.int64)
    offsets = offsets - offsets[0]
    if (np.diff(offsets) < 1).any():
        raise DataError("each request should have an item or more", where=where, mend=AGAIN)

    def of_rows(name: str) -> Any:
        column = single(name)
        if column.null_count or not np.array_equal(column.offsets.to_numpy() - column.offsets[0].as_py(), offsets):
            raise DataError(f"lists of '{name}' should be as long as those of positions", where=where, mend=AGAIN)
        return column.flatten()

    def numbers(name: str, kind: Any = np.float32) -> np.ndarray:
        values = of_rows(name)
        found: np.ndarray = values.to_numpy(zero_copy_only=False)
        if values.null_count or not ((found >= 0) & (found < np.inf)).all():
            raise DataError(f"'{name}' should hold numbers from 0 on", where=where, mend=AGAIN)
        return found.astype(kind, copy=False)

    matrix = _matrix(of_rows("features"), len(manifest.features), where) if manifest.features else None
    parts = [] if matrix is None else [matrix]
    vocabularies = {name: pa.array(values, pa.string()) for name, values in manifest.categorical.items()}
    for name, values in vocabularies.items():
        codes = pc.fill_null(pc.index_in(of_rows(name).cast(pa.string()), values), -1)
        parts.append((codes.to_numpy(zero_copy_only=False) + 1).astype(np.float32)[:, None])
    if not parts:
        raise DataError("the lists have no features", where=where, mend=AGAIN)
    features = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    check_features(features, [*manifest.features, *vocabularies], where=where, missing="refuse")
    return Log(
        features=features,
        offsets=offsets,
        request_ids=single("request"),
        feature_names=(*manifest.features, *vocabularies),
        positions=numbers("position", np.int64),
        actions={name: numbers(name) for name in manifest.actions},
        relevance=numbers("relevance") if "relevance" in names else None,
        weights=single("weight").to_numpy(zero_copy_only=False).astype(np.float32) if "weight" in names else None,
        item_ids=of_rows("item") if "item" in names else None,
        vocabularies=vocabularies,
        context={name: single(name) for name in CONTEXT if name in names},
    )


def _matrix(rows: Any, width: int, where: str) -> np.ndarray:
    """Lists of one length as a matrix."""
    numbers = rows.flatten()
    if (
        rows.null_count
        or len(numbers) != len(rows) * width
        or bool(pc.any(pc.not_equal(pc.list_value_length(rows), width)).as_py())
    ):
        raise DataError(f"each item should have {width} features", where=where, mend=AGAIN)
    values: np.ndarray = numbers.to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    return values.reshape(len(rows), width)
