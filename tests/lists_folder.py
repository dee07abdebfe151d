"""Write a log as a folder of lists, as `ultr prepare` does, without DuckDB or Spark."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ultr.log import Log
from ultr.log.shards import Manifest


def lists_table(log: Log) -> pa.Table:
    def nested(values) -> pa.Array:
        return pa.ListArray.from_arrays(pa.array(log.offsets.astype(np.int32)), values)

    numeric = [i for i, name in enumerate(log.feature_names) if name not in log.vocabularies]
    flat = pa.array(np.ascontiguousarray(log.features[:, numeric]).reshape(-1))
    rows = pa.ListArray.from_arrays(pa.array(np.arange(log.rows + 1, dtype=np.int32) * len(numeric)), flat)
    columns = {"request": log.request_ids, "position": nested(pa.array(log.positions)), "features": nested(rows)}
    columns |= {name: nested(pa.array(values)) for name, values in log.actions.items()}
    for name, values in log.vocabularies.items():
        codes = log.features[:, log.feature_names.index(name)].astype(np.int64)
        columns[name] = nested(values.take(pa.array(codes - 1, mask=codes == 0)))
    if log.relevance is not None:
        columns["relevance"] = nested(pa.array(log.relevance))
    if log.item_ids is not None:
        columns["item"] = nested(log.item_ids)
    if log.weights is not None:
        columns["weight"] = pa.array(log.weights)
    return pa.table({**columns, **log.context})


def write_lists(log: Log, folder: Path, *, validation: float = 0.2, shards: int = 2, group: int = 16) -> Path:
    """Write the first requests as the validation split, and the others as the train split."""
    held_out = round(validation * len(log))
    splits = {"validation": log.select(np.arange(held_out)), "train": log.select(np.arange(held_out, len(log)))}
    for name, part in splits.items():
        (folder / name).mkdir(parents=True)
        for number, requests in enumerate(np.array_split(np.arange(len(part)), shards)):
            table = lists_table(part.select(requests))
            pq.write_table(table, folder / name / f"part-{number:05}.parquet", row_group_size=group)
    train = splits["train"]
    Manifest(
        features=tuple(name for name in log.feature_names if name not in log.vocabularies),
        actions=tuple(log.actions),
        positions=tuple(np.unique(train.positions).tolist()),
        splits={
            name: {"requests": len(part), "rows": part.rows, "longest": int(part.lengths.max())}
            for name, part in splits.items()
        },
        categorical={name: tuple(values.to_pylist()) for name, values in log.vocabularies.items()},
        binary=tuple(name for name, values in train.actions.items() if np.isin(values, (0, 1)).all()),
    ).save(folder)
    return folder
