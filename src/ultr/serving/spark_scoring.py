"""Scoring on the workers of Spark, with the exported ONNX model. Workers need numpy, pyarrow and onnxruntime."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ultr.errors import ColumnError, DataError, OptionError
from ultr.log.build import Reading
from ultr.log.columns import (
    GRID_ROLES,
    Columns,
    Missing,
    check_no_nulls,
    combined,
    is_list,
    non_negative,
    place_values,
)
from ultr.log.prepare.engines import Spark, Tables, engine_errors, find_tables, start_engine
from ultr.log.prepare.impressions import filtered
from ultr.log.readers import Selection
from ultr.rankers.matching import features_of
from ultr.rankers.model import load_model
from ultr.serving.export import export_run
from ultr.serving.exported import onnx_scores, onnx_session
from ultr.serving.scoring import output_names
from ultr.utils.arguments import checked
from ultr.utils.display import begin_stage
from ultr.utils.files import atomic_path, check_output

PLACES = ("position", *GRID_ROLES)


@checked
def score_on_spark(
    run: str | Path,
    source: str | Path,
    out: str | Path,
    *,
    request: str | None = None,
    position: str | None = None,
    row: str | None = None,
    column: str | None = None,
    item: str | None = None,
    features: Sequence[str] | str | None = None,
    where: Sequence[str] = (),
    calibrated: bool = False,
    at_position: str | None = None,
    master: str | None = None,
    overwrite: bool = False,
    on_start: Callable[[Columns], None] = lambda _columns: None,
) -> int:
    """Score the rows of a source on Spark with the model of a run; write a folder of Parquet files.

    Columns and scores are those of `score_file`. The rows have the order in which Spark reads them. All workers must
    share the folder `out`. `on_start` gets the columns. Return the number of scores.
    """
    check_output(out, overwrite=overwrite, folder=True)
    if calibrated or at_position is not None:
        raise OptionError("Spark computes scores only", hint="leave out --engine, or --calibrated")
    model = load_model(run)
    named: dict[str, Any] = {"request": request, "position": position, "row": row, "column": column}
    named |= {"item": item, "features": features}
    given = {role: name for role, name in named.items() if name is not None}
    reading = Reading(model.missing, where=tuple(where))
    selection = Selection(model.feature_names, tuple(model.vocabularies), given, model.columns, reading)

    def ids(schema: pa.Schema) -> Iterable[str | None]:
        return selection.columns(schema, source).ids

    with atomic_path(out, overwrite=overwrite, folder=True) as folder:
        scratch = folder.parent / "scratch"  # in the temporary folder that atomic_path removes
        scratch.mkdir()
        files = find_tables(source, scratch=scratch / "source", ids=ids, where=where)
        columns = selection.columns(files.schema, files.name)
        used = reading.names(columns, files.schema.names, files.name)
        files.check(used, columns)
        _check_flat(files, columns)
        on_start(columns)
        begin_stage("exporting the model")
        exported = export_run(run, scratch / "model")
        task = ScoringTask(
            onnx=exported.onnx(),
            feature_names=exported.feature_names,
            vocabularies=exported.vocabularies,
            columns=columns,
            missing=model.missing,
            metadata=dict(files.schema.metadata or {}),
            where=files.name,
        )
        begin_stage("starting Spark")
        engine: Any
        with (
            start_engine("spark", scratch=scratch, memory=0, threads=None, master=master) as engine,
            engine_errors(source),
        ):
            rows = filtered(engine.read(files), where).select(*columns.used)
            begin_stage("scoring")
            _write(engine, rows, task, folder)
        scores = sum(int(pq.read_metadata(path).num_rows) for path in folder.glob("*.parquet"))
        if not scores:
            hint = "check --where, or the query that made the data"
            raise DataError("there are no rows", where=source, hint=hint)
        return scores


def _check_flat(files: Tables, columns: Columns) -> None:
    keys = [name for name in columns.used if name not in columns.features]
    if nested := [name for name in keys if is_list(files.schema.field(name).type)]:
        what = f"'{nested[0]}' holds lists; Spark needs one row per item"
        raise ColumnError(what, where=files.name, hint="score this log without --engine")


def _write(engine: Spark, rows: Any, task: ScoringTask, folder: Path) -> None:
    from pyspark.sql import types

    kinds: dict[str, Any] = dict.fromkeys(PLACES, types.LongType())
    kinds |= {"relevance": types.FloatType(), "randomised": types.BooleanType()}

    def schema(of_rows: Any) -> Any:
        keys = [kinds.get(role) or of_rows[name].dataType for role, name in task.keys.items()]
        fields = {**dict(zip(task.names, keys, strict=True)), "score": types.FloatType()}
        return types.StructType([types.StructField(name, kind) for name, kind in fields.items()])

    engine.map_to_parquet(rows, task, schema, folder)


@dataclass(frozen=True, kw_only=True)
class ScoringTask:
    """The work of a Spark worker: keys and scores from record batches with the columns of a source."""

    onnx: bytes = field(repr=False)
    feature_names: tuple[str, ...]
    vocabularies: Mapping[str, tuple[str, ...]]
    columns: Columns
    missing: Missing
    metadata: Mapping[bytes, bytes]  # of the schema: names of features in columns of lists
    where: str

    @property
    def keys(self) -> dict[str, str]:
        """The columns that are written next to the score, by role, in the order of `Log.to_table`."""
        single = {role: getattr(self.columns, role) for role in ("request", "item")}
        single |= {**self.columns.place_roles, "relevance": self.columns.relevance}
        context = {role: name for role, name in self.columns.context.items() if role != "segment"}
        segment = {"segment": self.columns.segments[0]} if len(self.columns.segments) == 1 else {}
        return {role: name for role, name in {**single, **context, **segment}.items() if name is not None}

    @property
    def names(self) -> list[str]:
        """The names of these columns in the output."""
        return output_names(self.columns.by_role, list(self.keys))

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        session = onnx_session(self.onnx, threads=1)
        for batch in batches:
            if batch.num_rows:
                yield self.scored(session, pa.Table.from_batches([batch]))

    def scored(self, session: Any, table: pa.Table) -> pa.RecordBatch:
        scores = onnx_scores(session, self._features(table)[None])[0]
        keys = [self._key(role, name, table[name]) for role, name in self.keys.items()]
        return pa.record_batch({**dict(zip(self.names, keys, strict=True)), "score": pa.array(scores, pa.float32())})

    def _features(self, table: pa.Table) -> Any:
        """Return the features of rows in the order and codes of the model."""
        named, columns = table.replace_schema_metadata(dict(self.metadata)), self.columns
        settings: dict[str, Any] = {"missing": self.missing, "where": self.where}
        return features_of(self, named, columns.features, columns.categorical, **settings)

    def _key(self, role: str, name: str, column: pa.ChunkedArray) -> Any:
        if role in PLACES:
            return pa.array(place_values(column, name, self.where), pa.int64())
        if role == "relevance":
            return pa.array(non_negative(column, name, role, self.where), pa.float32())
        values = combined(column)
        if role == "request":
            check_no_nulls(values, name, self.where, what=role)
        return pc.not_equal(values.cast(pa.float64()), 0.0) if role == "randomised" else values
