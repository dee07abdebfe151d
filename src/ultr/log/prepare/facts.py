"""Counts, positions and categories of all shards, for `lists.json`; they are found without reading features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ultr.errors import ColumnError, DataError
from ultr.log.shards import SPLITS
from ultr.log.values import MAX_CATEGORIES


@dataclass
class Facts:
    """The counts of each split; the positions, categories and binary actions (0 or 1) of the train split."""

    splits: dict[str, dict[str, int]] = field(default_factory=dict)
    positions: tuple[int, ...] = ()
    categorical: dict[str, tuple[str, ...]] = field(default_factory=dict)
    binary: tuple[str, ...] = ()
    tied: int = 0  # items with the same position as the item before them in their request


def shard_facts(folder: Path, *, actions: Sequence[str], categorical: Sequence[str], feedback: Sequence[str]) -> Facts:
    """Return the facts of a folder of shards; a request has feedback if one of the actions `feedback` is above 0."""
    facts, positions, binary = Facts(), np.zeros(0, np.int64), set(actions)
    values: dict[str, pa.Array] = {name: pa.array([], pa.string()) for name in categorical}
    for split in SPLITS:
        shards = sorted((folder / split).glob("*.parquet"))
        counts = {"requests": 0, "rows": 0, "longest": 0, "with_feedback": 0}
        names = ["position", *actions, *(categorical if split == "train" else ())]
        for table in (t for shard in shards for t in _row_groups(shard, names)):
            offsets = table["position"].chunk(0).offsets.to_numpy()
            lengths = np.diff(offsets)
            columns = {name: table[name].chunk(0).flatten() for name in names}
            shown = columns["position"].to_numpy()
            acted = np.logical_or.reduce([columns[name].to_numpy() > 0 for name in feedback] or [np.zeros(len(shown))])
            total = np.concatenate([[0], np.cumsum(acted)])
            starts = offsets[:-1] - offsets[0]
            counts["requests"] += len(table)
            counts["rows"] += len(shown)
            counts["longest"] = max(counts["longest"], int(lengths.max()))
            counts["with_feedback"] += int((total[starts + lengths] > total[starts]).sum())
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
