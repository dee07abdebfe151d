"""Export: a run's model as ONNX, with nothing of the bias, shown to score as the run does on real rows."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ultr import __version__
from ultr.arguments import checked
from ultr.checkpoint import read_json
from ultr.errors import DataError, MissingExtraError, OutputError
from ultr.exported import (
    ABOUT,
    CARD,
    FORMAT,
    INPUT,
    ONNX,
    OUTPUT,
    Exported,
    is_exported,
    load_exported,
    onnx_scores,
    onnx_session,
)
from ultr.files import atomic_path, refuse_existing
from ultr.formats import content_errors
from ultr.model_card import model_card
from ultr.models import ROWS_KEPT, Model, kept_rows, load_model, spread
from ultr.onnx_trees import NotInOnnxError, trees_to_onnx
from ultr.preparing import RunConfig, read_rows
from ultr.rankers.boosters import TreeRanker
from ultr.seals import sealed

OPSET = 18
TOLERANCE = 1e-5  # of the largest score, or of 1 if that is more
CODES = "of a category: its index in its vocabulary + 1; 0 for any other value"


@checked
def export_run(run: str | Path, out: str | Path, *, rows: str | None = None, overwrite: bool = False) -> Exported:
    """Write the model of a finished run to a folder: ONNX, what its inputs are, and a model card.

    The model is tried on rows that the run has kept of its validation requests, or on those of the log `rows`. If ONNX
    scores them differently, nothing is written.
    """
    run, out = Path(run), Path(out)
    refuse_existing(out, overwrite=overwrite, folder=True)
    if out.is_dir() and any(out.iterdir()) and not is_exported(out):
        raise OutputError(
            "exists and is no exported model, so it is not replaced", where=out, mend="choose another path"
        )
    _onnx()
    model = load_model(run)
    with content_errors("what the run holds cannot be described", where=run, mend="train again"):
        about = _about(run, model)
    sample = _real_rows(run, model, rows)
    contents: dict[str, bytes] = {}
    try:
        contents[ONNX] = onnx_bytes(model)
        about["parity"] = check_parity(model, contents[ONNX], sample)
    except NotInOnnxError as error:
        about["no_onnx"] = error.what
    if isinstance(model.ranker, TreeRanker):
        contents[model.ranker.booster.FILE] = (run / "model" / model.ranker.booster.FILE).read_bytes()
    about["files"] = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    with content_errors("what the run holds cannot be described", where=run, mend="train again"):
        contents[CARD] = model_card(run, about).encode()
    about["files"][CARD] = hashlib.sha256(contents[CARD]).hexdigest()
    contents[ABOUT] = (json.dumps(sealed(about), indent=2) + "\n").encode()
    with atomic_path(out, overwrite=overwrite, folder=True) as temporary:
        for name, content in contents.items():
            (temporary / name).write_bytes(content)
    return load_exported(out)


def _about(run: Path, model: Model) -> dict[str, Any]:
    config, own = read_json(run / "config.json"), read_json(run / "model" / "model.json")
    lists: list[Any] = ["requests", "items"]
    return {
        "format": FORMAT,
        "ultr": __version__,
        "ranker": own["ranker"],
        "method": config["method"],
        "label": model.label,
        "data": own["data"],
        "features": list(model.feature_names),
        "vocabularies": {name: values.to_pylist() for name, values in model.vocabularies.items()},
        "codes": CODES,
        "missing": model.missing,
        "input": {"name": INPUT, "type": "float32", "shape": [*lists, len(model.feature_names)]},
        "output": {"name": OUTPUT, "type": "float32", "shape": lists},
        "parity": None,
    }


def _real_rows(run: Path, model: Model, rows: str | None) -> np.ndarray:
    """Rows to try a model on, in the order of its features."""
    if rows is not None:
        config = RunConfig.from_json(read_json(run / "config.json"), where=run)
        named = {name: config.columns[name] for name in ("request", "features") if name in config.columns}
        columns = {**named, "categorical": list(model.vocabularies) or None, "actions": [], "missing": model.missing}
        log, _ = read_rows(rows, split="validation", data_dir=config.data_dir, columns=columns)
        return np.asarray(model.columns_of(log)[spread(log.rows, ROWS_KEPT)])
    found = kept_rows(run)
    if found is None:
        mend = "pass a log with its features: --rows LOG"
        raise DataError("the run has kept no rows to try the model on, as it was trained before", where=run, mend=mend)
    if found.shape[1] != len(model.feature_names):
        raise DataError("the rows it has kept are of other features", where=run, mend="pass --rows LOG")
    return found


def check_parity(model: Model, content: bytes, rows: np.ndarray) -> dict[str, Any]:
    """Score rows by a model and by its ONNX, as one list, as several and alone, or refuse it where they differ."""
    expected = model.score_features(rows).astype(np.float64)
    if not np.isfinite(expected).all():
        raise DataError("the model has no finite score for some rows", got=expected[~np.isfinite(expected)][0])
    session = onnx_session(content)
    several = len(rows) // 3 or 1  # lists of three items
    whole = min(len(rows), 3 * several)
    tried = [
        (rows[None], expected),
        (rows[:whole].reshape(several, -1, rows.shape[1]), expected[:whole]),
        (rows[:1][None], expected[:1]),
    ]
    off = float(np.max([np.abs(onnx_scores(session, x).ravel() - scores).max() for x, scores in tried]))
    tolerance = TOLERANCE * max(1.0, float(np.abs(expected).max()))
    if not off <= tolerance:
        got = f"a difference of {off:.2g} where {tolerance:.2g} is allowed"
        raise DataError("ONNX scores real rows differently than the model, so it is not written", got=got)
    return {"rows": len(rows), "largest_difference": off, "tolerance": tolerance}


def onnx_bytes(model: Model) -> bytes:
    """The ranker and its normalisation of features as ONNX: `features` [requests, items, features] of float32 to
    `scores` [requests, items].
    """
    onnx = _onnx()
    if isinstance(model.ranker, TreeRanker):
        return trees_to_onnx(model.ranker.booster, len(model.feature_names))
    ranker = copy.deepcopy(model.ranker).cpu().eval()
    example = torch.zeros(2, 3, len(model.feature_names))
    with _silence():
        try:
            program: Any = torch.onnx.export(
                ranker,
                (example,),
                dynamo=True,
                input_names=[INPUT],
                output_names=[OUTPUT],
                dynamic_shapes=({0: torch.export.Dim("requests"), 1: torch.export.Dim("items")},),
                opset_version=OPSET,
                verbose=False,
            )
        except torch.onnx.OnnxExporterError as error:
            raise DataError(f"torch cannot export the ranker ({str(error).splitlines()[0]})") from error
    proto = program.model_proto
    _forget_origin(proto)
    onnx.checker.check_model(proto)
    return bytes(proto.SerializeToString())


def _forget_origin(proto: Any) -> None:
    """Drop what the exporter notes of where in the code each node comes from, which also names folders."""
    for part in (proto, proto.graph, *proto.graph.node, *proto.graph.value_info, *proto.graph.input):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")


@contextmanager
def _silence() -> Iterator[None]:
    """Without what the exporter says of itself."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _onnx() -> Any:
    try:
        import onnx
        import onnxscript  # noqa: F401  # torch's exporter needs it
    except ImportError as error:
        raise MissingExtraError("export", package=error.name or "onnx", extra="export") from error
    return onnx
