"""Random samples of requests; a large log is read without its features, which are read for a sample only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ultr.log import Log, read_log
from ultr.log.duplicates import OnDuplicates
from ultr.log.readers import file_kind, parquet_files
from ultr.log.schema import resolve_columns
from ultr.log.values import as_data_error

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
    **columns: Any,
) -> tuple[Log, Log | None]:
    """Return the whole log without features, and a sample of its requests with features (None if it has no features).

    A large Parquet log is read twice. The second pass reads features and keeps those of the sampled requests.
    """
    shards = _shards(Path(source))
    for shard in shards:
        file_kind(shard)  # raises DataError if the content of a file does not match its name
    with as_data_error(Path(source), "Parquet"):
        rows = sum(pq.ParquetFile(shard).metadata.num_rows for shard in shards)
    if rows <= WHOLE_ROWS:
        log = read_log(source, on_duplicates=on_duplicates, **columns)
        if not log.feature_names:
            return log, None
        return log.without_features(), log.select(_sample(log, len(log.feature_names), sample_rows, seed))
    light = read_log(source, on_duplicates=on_duplicates, **{**columns, "features": [], "categorical": []})
    resolved = resolve_columns(pq.read_schema(shards[0]), where=source, **columns)
    if not resolved.features and not resolved.categorical:
        return light, None
    with_rows = next(shard for shard in shards if pq.ParquetFile(shard).metadata.num_rows)
    first = read_log(pq.ParquetFile(with_rows).read_row_group(0, columns=resolved.used).slice(0, 1), **columns)
    chosen = _sample(light, len(first.feature_names), sample_rows, seed)
    ids = light.request_ids.take(pa.array(chosen))
    parts = []
    for shard in shards:
        file = pq.ParquetFile(shard)
        for group in range(file.num_row_groups):  # iter_batches would keep the row groups that it has read in memory
            rows = file.read_row_group(group, columns=resolved.used)
            chosen_rows = np.flatnonzero(pc.is_in(rows[resolved.request], ids).to_numpy())
            parts.append(rows.take(pa.array(chosen_rows)))
    table = pa.concat_tables(parts, promote_options="permissive").combine_chunks()
    table = table.replace_schema_metadata(pq.read_schema(shards[0]).metadata)
    return light, read_log(table, on_duplicates=on_duplicates, **columns)


def _shards(path: Path) -> list[Path]:
    if path.is_dir():
        return parquet_files(path)
    return [path] if path.suffix.lower() in (".parquet", ".pq") and path.is_file() else []


def _sample(log: Log, features: int, rows: int, seed: int) -> np.ndarray:
    """Return the indices of random requests with at most about `rows` rows, or fewer if there are many features."""
    return sample_requests(log, min(rows, SAMPLE_VALUES // max(1, features)), seed=seed)
