"""A folder of lists, as `ultr prepare` writes it: Parquet files with one row per request, read by row group.

LISTS/lists.json           the columns, and counts, positions and categories of all files (class `Manifest`)
LISTS/train/*.parquet      `request`, `weight` and the context of a request as single values; `position`, `item`, each
LISTS/validation/*.parquet action, `relevance` and each categorical feature as lists; `features` as a list of lists
LISTS/test/*.parquet

The context of a request is its query, segment and randomised mark. Requests are in the order of hashes of their ids.
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

from ultr.errors import DataError, OptionError
from ultr.log.build import decayed
from ultr.log.columns import CONTEXT, as_data_error, check_features
from ultr.log.table import Log
from ultr.utils.arguments import check_fields
from ultr.utils.files import atomic_path
from ultr.utils.jsonfiles import add_checksum, load_description
from ultr.utils.stores import as_path, as_url, fetched, find

FORMAT = 1
MANIFEST = "lists.json"
SPLITS = ("train", "validation", "test")
AGAIN = "run ultr prepare again"


@dataclass(frozen=True)
class Manifest:
    """The content of `lists.json`, which describes a folder of lists."""

    features: tuple[str, ...]  # the names of the numeric features, in the order of the lists in column `features`
    actions: tuple[str, ...]
    positions: tuple[int, ...]  # the position ids of the train split, in increasing order
    splits: Mapping[str, Mapping[str, int]]  # split -> {"requests": ..., "rows": ..., "longest": ...}
    categorical: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # name -> sorted values in the train split
    binary: tuple[str, ...] = ()  # the actions with only the values 0 and 1 in the train split
    label: str | None = None  # the expression of the action `label`, if there is one
    about: Mapping[str, Any] = field(default_factory=dict)  # how it was made: source, engine, filters, split, sampling
    footers: Mapping[str, str] = field(default_factory=dict)  # shard -> the checksum of its Parquet footer
    appended: Sequence[Mapping[str, Any]] = ()  # for each later source: its name, its fingerprint and its `shards`

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.splits or any(name not in SPLITS for name in self.splits):
            raise DataError(f"splits must be among {', '.join(SPLITS)}", got=", ".join(self.splits) or "none")
        for name, counts in self.splits.items():
            if min(int(counts[key]) for key in ("requests", "rows", "longest")) < 1:
                raise DataError(f"the split '{name}' is empty", got=dict(counts))

    def day_of(self, shard: str) -> int:
        """Return the number of the source of a shard: 0 for the first, and from 1 on for those that were appended."""
        return next((n for n, part in enumerate(self.appended, 1) if shard in part["shards"]), 0)

    def save(self, folder: Path) -> None:
        with atomic_path(folder / MANIFEST, overwrite=True) as temporary:
            temporary.write_text(json.dumps(add_checksum({"format": FORMAT, **asdict(self)}), indent=2) + "\n")

    @staticmethod
    def load(folder: str | Path) -> Manifest:
        path = fetched(folder) / MANIFEST
        try:
            content = load_description(path, FORMAT, what="this folder of lists", hint=AGAIN)
            values = {f.name: content[f.name] for f in fields(Manifest)}
            values["footers"] = dict(values["footers"])
            values["appended"] = tuple(values["appended"])
            for name in ("features", "actions", "positions", "binary"):
                if not isinstance(values[name], list):
                    raise TypeError(f"'{name}' must be a list")
                values[name] = tuple(values[name])
            values["categorical"] = {name: tuple(entries) for name, entries in values["categorical"].items()}
            return Manifest(**values)
        except (OptionError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"cannot be read ({error})", where=path, hint=AGAIN) from error


def is_lists(path: str | Path) -> bool:
    """Return whether a path is a folder that `ultr prepare` wrote."""
    url = as_url(path)
    return (as_path(path) / MANIFEST).is_file() if url is None else find(f"{url.rstrip('/')}/{MANIFEST}") is not None


def footer_sum(path: Path) -> str:
    """Return the CRC-32 of a Parquet file's footer; the pages of the file have their own checksums."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 8))
        length = int.from_bytes(file.read(4), "little")
        file.seek(max(0, size - 8 - length))
        return f"{zlib.crc32(file.read()):08x}"


class RowGroup(NamedTuple):
    """A row group of a Parquet file, the smallest part of it that is read; `requests` and `rows` are its counts."""

    path: Path
    number: int
    requests: int
    rows: int


class Shards:
    """One split (train, validation or test) of a folder of lists; its row groups can be read as logs."""

    def __init__(self, folder: str | Path, split: str = "train", *, decay: float | None = None) -> None:
        self.folder, self.split, self.manifest = fetched(folder), split, Manifest.load(folder)
        self._decay = decay
        if decay is not None and not self.manifest.appended:
            hint = "append each day with ultr prepare --append, or leave out the decay"
            raise OptionError("the days of the lists are not known, so weights cannot decay", got=folder, hint=hint)
        if split not in self.manifest.splits:
            got = f"only {', '.join(self.manifest.splits)}"
            raise DataError(f"the lists have no split '{split}'", where=folder, got=got, hint=AGAIN)
        self.groups: list[RowGroup] = []
        self._footers: dict[Path, Any] = {}  # cached, so that a footer is not read again with every row group
        for path in self.paths:
            with as_data_error(path, "Parquet"):
                # This check comes first because Arrow aborts the process on some damaged footers.
                if self.manifest.footers.get(f"{split}/{path.name}", checksum := footer_sum(path)) != checksum:
                    raise DataError("the file has changed since it was written", where=path, hint=AGAIN)
                self._footers[path] = pq.read_metadata(path)
            schema = self._footers[path].schema.to_arrow_schema()
            _check_schema(schema, self.manifest, path)
            if not schema.equals(next(iter(self._footers.values())).schema.to_arrow_schema()):
                raise DataError("its columns differ from the first shard", where=path, hint=AGAIN)
            self.groups += _row_groups(path, self._footers[path])
        if len(self) != self.manifest.splits[split]["requests"]:
            expected = f"{self.manifest.splits[split]['requests']:,}"
            raise DataError(f"shards must have {expected} requests", where=folder, got=f"{len(self):,}", hint=AGAIN)

    @property
    def paths(self) -> list[Path]:
        """The Parquet files of the split; files that the manifest does not have are those of a killed append."""
        paths, listed = sorted((self.folder / self.split).glob("*.parquet")), self.manifest.footers
        return [path for path in paths if f"{self.split}/{path.name}" in listed] if listed else paths

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
        """The approximate memory of a row (an item of a list), in bytes."""
        return 4 * (self.width + len(self.manifest.actions) + 3)

    @property
    def fingerprint(self) -> str:
        """A digest of the manifest, and of the names and sizes of the split's files."""
        files = [(path.name, path.stat().st_size) for path in self.paths]
        content = [(self.folder / MANIFEST).read_text(), files]
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()

    def check_names(self, named: Mapping[str, Any]) -> None:
        """Raise OptionError if `named` has columns (by role) other than those chosen when the lists were prepared."""
        manifest = self.manifest
        prepared = manifest.about.get("columns") or {}
        chosen = {"actions": manifest.actions, "features": ("features",), "categorical": tuple(manifest.categorical)}
        for role, value in named.items():
            names = _listed(value)
            expected = chosen.get(role, (role,))
            if names and set(names) not in (set(expected), set(_listed(prepared.get(role)))):
                what, got = "the columns of prepared lists cannot be changed", f"{role}={','.join(names)}"
                hint = f"leave '{role}' out, or name it '{','.join(expected)}'; to change it, run ultr prepare again"
                raise OptionError(what, where=self.folder, got=got, hint=hint)

    def read(self, group: RowGroup) -> Log:
        """Read the requests of a row group as a log."""
        footer = self._footers[group.path]
        with (
            as_data_error(group.path, "Parquet"),
            pq.ParquetFile(group.path, metadata=footer, memory_map=True, page_checksum_verification=True) as file,
        ):
            table = file.read_row_group(group.number, use_threads=False)
        log = _log_of(table, self.manifest, where=f"{group.path}, row group {group.number}")
        if self._decay is None:
            return log
        day = self.manifest.day_of(f"{self.split}/{group.path.name}")
        return decayed(log, len(self.manifest.appended) - day, self._decay)

    def read_all(self, groups: Iterable[RowGroup] | None = None) -> Log:
        """Read the requests of some row groups, or of all, as one log."""
        groups = self.groups if groups is None else list(groups)
        features = np.empty((sum(group.rows for group in groups), self.width), np.float32)
        others, first = [], 0
        for group in groups:
            log = self.read(group)
            features[first : first + log.rows] = log.features  # at once, because two copies may not fit in memory
            others.append(log.without_features())
            first += log.rows
        names, vocabularies = log.feature_names, log.vocabularies
        return replace(concatenate_logs(others), features=features, feature_names=names, vocabularies=vocabularies)

    def sample(self, rows: int, seed: int) -> Log:
        """Read random row groups with about `rows` rows in total as one log; all row groups if there are fewer rows."""
        order = np.random.default_rng(seed).permutation(len(self.groups))
        count = int(np.searchsorted(np.cumsum([self.groups[i].rows for i in order]), rows)) + 1
        return self.read_all(self.groups[i] for i in sorted(order[:count]))


def _check_schema(schema: pa.Schema, manifest: Manifest, path: Path) -> None:
    """Raise DataError if the columns of a shard are not those of the manifest."""

    def number(kind: Any) -> bool:
        return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))

    def numbers(kind: Any) -> bool:
        return bool(pa.types.is_list(kind)) and number(kind.value_type)

    lists: dict[str, Callable[[Any], bool]] = {"position": pa.types.is_integer}
    lists |= dict.fromkeys(manifest.actions, number) | dict.fromkeys(manifest.categorical, lambda _: True)
    lists |= {"features": numbers} if manifest.features else {}
    if missing := sorted({"request", *lists} - set(schema.names)):
        raise DataError(f"the column '{missing[0]}' is missing", where=path, hint=AGAIN)
    optional = {"relevance": number, "item": lambda _: True}
    lists |= {name: test for name, test in optional.items() if name in schema.names}
    for name, test in lists.items():
        kind = schema.field(name).type
        if not pa.types.is_list(kind) or not test(kind.value_type):
            raise DataError(f"the column '{name}' has a wrong type", where=path, got=kind, hint=AGAIN)


def _row_groups(path: Path, about: Any) -> list[RowGroup]:
    names = [about.schema.column(i).path.split(".")[0] for i in range(about.num_columns)]
    place, groups = names.index("position"), map(about.row_group, range(about.num_row_groups))
    return [RowGroup(path, n, group.num_rows, group.column(place).num_values) for n, group in enumerate(groups)]


def _listed(names: Any) -> list[str]:
    """Return names of columns that are None, a text with commas, or a sequence as a list."""
    return names.split(",") if names and isinstance(names, str) else list(names or ())


def concatenate_logs(logs: Sequence[Log]) -> Log:
    """Return a log with the requests of several logs, which must have the same columns; all data is copied."""
    first = logs[0]

    def joined(parts: Sequence[Any]) -> Any:
        if parts[0] is None:
            return None
        return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else pa.concat_arrays(parts)

    arrays = ("features", "positions", "relevance", "weights", "request_ids", "item_ids")
    return replace(
        first,
        offsets=np.concatenate([[0], np.cumsum(joined([log.lengths for log in logs]))]),
        actions={name: joined([log.actions[name] for log in logs]) for name in first.actions},
        context={name: joined([log.context[name] for log in logs]) for name in first.context},
        **{name: joined([getattr(log, name) for log in logs]) for name in arrays},
    )


def _log_of(table: pa.Table, manifest: Manifest, *, where: str) -> Log:
    """Return a row group as a log; raise DataError if lists differ in length, or numbers are negative or not finite."""
    table = table.combine_chunks()
    names = set(table.column_names)

    def single(name: str) -> Any:
        return table[name].chunk(0)

    offsets = single("position").offsets.to_numpy().astype(np.int64)
    offsets = offsets - offsets[0]
    if (np.diff(offsets) < 1).any():
        raise DataError("each request must have at least one item", where=where, hint=AGAIN)

    def of_rows(name: str) -> Any:
        column = single(name)
        if column.null_count or not np.array_equal(column.offsets.to_numpy() - column.offsets[0].as_py(), offsets):
            raise DataError(f"lists of '{name}' must be as long as the lists of positions", where=where, hint=AGAIN)
        return column.flatten()

    def numbers(name: str, kind: Any = np.float32) -> np.ndarray:
        values = of_rows(name)
        array: np.ndarray = values.to_numpy(zero_copy_only=False)
        if values.null_count or not ((array >= 0) & (array < np.inf)).all():
            raise DataError(f"'{name}' must be finite and not negative", where=where, hint=AGAIN)
        return array.astype(kind, copy=False)

    matrix = _matrix(of_rows("features"), len(manifest.features), where) if manifest.features else None
    parts = [] if matrix is None else [matrix]
    vocabularies = {name: pa.array(values, pa.string()) for name, values in manifest.categorical.items()}
    for name, values in vocabularies.items():
        codes = pc.fill_null(pc.index_in(of_rows(name).cast(pa.string()), values), -1)
        parts.append((codes.to_numpy(zero_copy_only=False) + 1).astype(np.float32)[:, None])
    if not parts:
        raise DataError("the lists have no features", where=where, hint=AGAIN)
    features = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    check_features(features, [*manifest.features, *vocabularies], where=where, missing="keep")
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
        columns=dict(manifest.about.get("columns") or {}),
    )


def _matrix(rows: Any, width: int, where: str) -> np.ndarray:
    """Return lists of `width` numbers as a matrix [lists, width]; raise DataError if one has another length."""
    numbers = rows.flatten()
    if (
        rows.null_count
        or len(numbers) != len(rows) * width
        or bool(pc.any(pc.not_equal(pc.list_value_length(rows), width)).as_py())
    ):
        raise DataError(f"each item must have {width} features", where=where, hint=AGAIN)
    values: np.ndarray = numbers.to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    return values.reshape(len(rows), width)
