"""A log of any size for an audit: all rows without their features, and some requests with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ultr.log import Log, read_log
from ultr.log.build import as_data_error
from ultr.log.readers import file_kind
from ultr.log.schema import resolve_columns

SAMPLE_ROWS = 200_000
SAMPLE_VALUES = 40_000_000  # rows times features
WHOLE_ROWS = 1_000_000  # a file with fewer is read at once


def read_for_audit(
    source: str | Path, *, sample_rows: int = SAMPLE_ROWS, seed: int = 0, **columns: Any
) -> tuple[Log, Log | None]:
    """The log without features, and random requests with them; none if it has no features.

    A large Parquet log is read twice, features only in the second pass and only those of the sample are kept.
    """
    shards = _shards(Path(source))
    for shard in shards:
        file_kind(shard)  # is it what its name says?
    with as_data_error(Path(source), "Parquet"):
        rows = sum(pq.ParquetFile(shard).metadata.num_rows for shard in shards)
    if rows <= WHOLE_ROWS:
        log = read_log(source, **columns)
        if not log.feature_names:
            return log, None
        return log.without_features(), log.select(_sampled(log, len(log.feature_names), sample_rows, seed))
    light = read_log(source, **{**columns, "features": [], "categorical": []})
    found = resolve_columns(pq.read_schema(shards[0]), where=source, **columns)
    if not found.features and not found.categorical:
        return light, None
    filled = next(shard for shard in shards if pq.ParquetFile(shard).metadata.num_rows)
    first = read_log(pq.ParquetFile(filled).read_row_group(0, columns=found.used).slice(0, 1), **columns)
    chosen = _sampled(light, len(first.feature_names), sample_rows, seed)
    ids = light.request_ids.take(pa.array(chosen))
    parts = []
    for shard in shards:
        file = pq.ParquetFile(shard)
        for group in range(file.num_row_groups):  # iter_batches would hold on to all that it has given
            rows = file.read_row_group(group, columns=found.used)
            chosen_rows = np.flatnonzero(pc.is_in(rows[found.request], ids).to_numpy())
            parts.append(rows.take(pa.array(chosen_rows)))
    table = pa.concat_tables(parts, promote_options="permissive").combine_chunks()
    return light, read_log(table.replace_schema_metadata(pq.read_schema(shards[0]).metadata), **columns)


def _shards(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(p for p in path.iterdir() if p.suffix.lower() in (".parquet", ".pq") and p.name[0] not in "._")
    return [path] if path.suffix.lower() in (".parquet", ".pq") and path.is_file() else []


def _sampled(log: Log, features: int, rows: int, seed: int) -> np.ndarray:
    """Random requests with about so many rows, in order."""
    order = np.random.default_rng(seed).permutation(len(log))
    most = min(rows, SAMPLE_VALUES // max(1, features))
    fits = max(1, int(np.searchsorted(np.cumsum(log.lengths[order]), most, "right")))
    return np.sort(order[:fits])
