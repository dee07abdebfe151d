"""Logs whose features are not all in memory: random samples of requests, and logs that are read in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ultr.log import Log, read_log
from ultr.log.build import Reading
from ultr.log.cleaning import OnDuplicates
from ultr.log.columns import as_data_error, combined, resolve_columns
from ultr.log.readers import prepared
from ultr.log.shards import Shards, concatenate_logs
from ultr.log.sources import SourceFile, all_columns, as_common, common_schema, open_source, read_schemas

# --- Samples ----------------------------------------------------------------------------------------------------------
# Random samples of requests; a large log is read without its features, which are read for a sample only.

SAMPLE_ROWS = 200_000  # rows in a sample, at most about
SAMPLE_VALUES = 40_000_000  # rows times features in a sample, at most about
WHOLE_ROWS = 1_000_000  # a log with at most this many rows is read once, with features


def sample_requests(log: Log, rows: int, *, seed: int = 0) -> np.ndarray:
    """Return the indices, in increasing order, of random requests that have at most about `rows` rows in total."""
    if log.rows <= rows:
        return np.arange(len(log))
    order = np.random.default_rng(seed).permutation(len(log))
    count = max(1, int(np.searchsorted(np.cumsum(log.lengths[order]), rows, "right")))
    return np.sort(order[:count])


def sample_log(log: Log, rows: int, *, seed: int = 0) -> Log:
    """Return random requests of a log with at most about `rows` rows in total, or the log if it has fewer."""
    return log if log.rows <= rows else log.select(sample_requests(log, rows, seed=seed))


def read_for_audit(
    source: str | Path,
    *,
    sample_rows: int = SAMPLE_ROWS,
    seed: int = 0,
    on_duplicates: OnDuplicates = "error",
    where: Sequence[str] = (),
    **columns: Any,
) -> tuple[Log, Log | None]:
    """Return the whole log without features, and a sample of its requests with features (None if it has no features).

    A large Parquet log is read twice. The second pass reads features and keeps those of the sampled requests.
    """
    reading: dict[str, Any] = {"on_duplicates": on_duplicates, "where": where}
    files = None if prepared(source) is not None else open_source(source).only(where)
    if files is None or files.kind != "Parquet" or files.sum(lambda footer: footer.num_rows) <= WHOLE_ROWS:
        log = read_log(source, **reading, **columns)
        if not log.feature_names:
            return log, None
        return log.without_features(), log.select(_sample(log, len(log.feature_names), sample_rows, seed))
    light = read_log(source, **reading, **{**columns, "features": [], "categorical": []})
    columns["request"] = light.columns["request"]
    if "segment" in light.columns:  # with the bins of all rows
        columns["segment"] = light.columns["segment"]
    schemas = read_schemas(files.files)
    schema = all_columns(files, schemas)
    resolved = resolve_columns(schema, where=source, **columns)
    if not resolved.features and not resolved.categorical:
        return light, None
    names = Reading(where=tuple(where)).names(resolved, schema.names, source)
    common = common_schema(files, schemas, names, resolved)

    def rows_of(file: SourceFile, opened: Any, group: int) -> pa.Table:
        # iter_batches would keep the row groups that it has read in memory
        with as_data_error(file, "Parquet"):
            rows = as_common(opened.read_row_group(group, columns=common.names), common)
        return files.with_partitions(rows, file, names)

    filled_file, opened, group = next((f, p, i) for f in files.files for p in [f.parquet()] for i in _groups(p))
    first = read_log(rows_of(filled_file, opened, group).slice(0, 1), missing="keep", **columns)
    chosen = _sample(light, len(first.feature_names), sample_rows, seed)
    ids = light.request_ids.take(pa.array(chosen))
    parts = []
    for file in files.files:
        opened = file.parquet()
        for group in _groups(opened):
            rows = rows_of(file, opened, group)
            wanted = np.flatnonzero(pc.is_in(combined(rows[resolved.request]), ids).to_numpy(zero_copy_only=False))
            parts.append(rows.take(pa.array(wanted)))
    table = pa.concat_tables(parts).combine_chunks().replace_schema_metadata(schema.metadata)
    return light, read_log(table, missing="keep", **reading, **columns)


def _groups(file: Any) -> list[int]:
    """Return the numbers of the row groups of a Parquet file that have rows."""
    return [i for i in range(file.num_row_groups) if file.metadata.row_group(i).num_rows]


def _sample(log: Log, features: int, rows: int, seed: int) -> np.ndarray:
    """Return the indices of random requests with at most about `rows` rows, or fewer if there are many features."""
    return sample_requests(log, min(rows, SAMPLE_VALUES // max(1, features)), seed=seed)


# --- Logs in parts ----------------------------------------------------------------------------------------------------
# A log in parts: all columns but the features are in memory, and features are read part by part, whenever needed.

PART_SAMPLE_ROWS, PART_SAMPLE_BYTES = 1_000_000, 256 << 20  # largest sample of a log that is not in memory


@dataclass(frozen=True, eq=False)
class LogParts:
    """The rows of a log, in parts of whole requests."""

    log: Log  # all requests; without features, if these are not in memory
    read: Callable[[], Iterator[Log]]  # return all parts in order, with features
    most: int | None = None  # the most rows with features that are kept in memory at once; None: all

    @staticmethod
    def of(log: Log) -> LogParts:
        """Return a log in memory as one part."""
        return LogParts(log, lambda: iter([log]))

    @staticmethod
    def on_disk(shards: Shards) -> LogParts:
        """Return prepared lists, whose row groups are read when they are needed."""

        def read() -> Iterator[Log]:
            return map(shards.read, shards.groups)

        light = concatenate_logs([part.without_features() for part in read()])
        return LogParts(light, read, min(PART_SAMPLE_ROWS, PART_SAMPLE_BYTES // shards.row_bytes))

    def __len__(self) -> int:
        return len(self.log)

    def viewed(self, view: Callable[[Log], Log]) -> LogParts:
        """Return the same requests as `view` shows them; it must not change their number or order."""
        if self.most is None:
            return LogParts.of(view(self.log))
        return replace(self, read=lambda: map(view, self.read()))

    def mapped(self, function: Callable[[Log], np.ndarray], requests: np.ndarray | None = None) -> np.ndarray:
        """Return the values of a function of logs, for all parts or for the requests of a mask, as one array."""
        values = [function(part) for part in self._chosen(requests)]
        return np.concatenate(values) if values else np.empty(0)

    def sample(self, requests: np.ndarray, *, seed: int = 0) -> Log:
        """Return the requests of a mask with their features, or random ones of them if they are not in memory."""
        if self.most is None:
            return self.log.select(requests)
        chosen = np.flatnonzero(requests)
        kept = chosen[sample_requests(self.log.select(chosen), self.most, seed=seed)]
        requests = np.isin(np.arange(len(self.log)), kept)
        return concatenate_logs(list(self._chosen(requests)))

    def _chosen(self, requests: np.ndarray | None) -> Iterator[Log]:
        first = 0
        for part in self.read():
            chosen = None if requests is None else requests[first : first + len(part)]
            first += len(part)
            if chosen is None:
                yield part
            elif chosen.any():
                yield part.select(chosen)
