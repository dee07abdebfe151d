"""Export of a run: its model as ONNX, a description of the inputs, and a model card."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, PackageLoader, StrictUndefined, UndefinedError
from torch import nn

from ultr._version import __version__
from ultr.bias.propensities import BIAS_FILE
from ultr.errors import DataError, MissingExtraError, OptionError, OutputError, nearest, redact
from ultr.evaluation.scores import FEEDBACK, OFF_POLICY
from ultr.rankers.boosters import BOOSTERS, PLAIN_NAME, Booster, TreeRanker
from ultr.rankers.combined import Blend, Part
from ultr.rankers.model import ROWS_KEPT, Model, kept_rows, load_model, spread
from ultr.serving.distilling import distil
from ultr.serving.engines import ENGINES, engine_trees
from ultr.serving.exported import (
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
from ultr.serving.forests import UnsupportedTreesError
from ultr.serving.onnx_graphs import blend_to_onnx, trees_to_onnx
from ultr.training.config import Config, is_trees, train_command
from ultr.training.data import OUTCOME, Decisions, columns_for_run, read_rows
from ultr.training.examining import best_evaluation
from ultr.training.folder import CONFIG, MODEL, read_config
from ultr.training.outcome import value_of_run
from ultr.utils.arguments import checked
from ultr.utils.files import atomic_path, check_output
from ultr.utils.jsonfiles import add_checksum, content_errors, read_json
from ultr.utils.stores import fetched

# --- Model card -------------------------------------------------------------------------------------------------------
# The model card: the data, method, quality, bias and limits of a model, as Markdown. Its text is in card.md.jinja.

SHOWN = 50  # the largest number of features, and of positions, in the card
LONGEST = 80  # the largest number of characters of a name
VERSIONS = ("ultr", "torch", "lightgbm", "xgboost")
FROM_METRIC = {
    OFF_POLICY: "logged feedback, corrected for position bias; no experiment has confirmed it",
    FEEDBACK: "logged feedback, with its position bias",
}


def model_card(run: Path, about: Mapping[str, Any]) -> str:
    """Return the card of a run's model as Markdown; `about` is the content of the exported model.json."""
    environment = Environment(  # noqa: S701  # this is no HTML: texts are marked as code
        loader=PackageLoader("ultr.serving", "."), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"code": code, "block": _block, "options": _options, "number": _number}
    environment.filters["thousands"] = "{:,}".format
    content = read_json(run / CONFIG)
    config, decisions = Config.from_json(content, where=run), Decisions.load(run)
    files = (run / BIAS_FILE, run / OUTCOME / "outcome.json", run / "test.json")
    bias, outcome, test = (read_json(path) if path.is_file() else None for path in files)
    command, not_in_command = train_command(config)
    metric, value, step = value_of_run(run)
    source = next((words for start, words in FROM_METRIC.items() if metric.startswith(start)), None)
    split = "validation" if outcome is None else outcome["split"]["name"]
    try:
        return environment.get_template("card.md.jinja").render(
            name=run.resolve().name,
            about=about,
            config=config,
            decisions=decisions,
            source=redact(config.data.source) or "data in memory",
            outcome=outcome,
            parts=_parts(run, config, decisions, (bias or {}).get("shares", {})),
            versions=", ".join(f"{name} {content[name]}" for name in VERSIONS if name in content),
            command=command,
            not_in_command=not_in_command,
            quality={"metric": metric, "value": value, "step": step, "split": split, "source": source},
            test=test or {},
            has_test=test is not None,
            bias=bias,
            columns={} if bias is None else _columns(bias),
            has_trees=any(map(is_trees, decisions.rankers)),
            has_network=not all(map(is_trees, decisions.rankers)),
            most=SHOWN,
            onnx=next((name for name in about["files"] if name.endswith(ONNX)), None),
        )
    except UndefinedError as error:
        raise ValueError(error.message) from error


def code(text: object, longest: int = LONGEST) -> str:
    """Return text of unknown origin as one code span on one line."""
    line = " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", " ", str(text)).split()).replace("`", "'")
    return f"`{line[: longest - 1] + '…' if len(line) > longest else line or ' '}`"


def _block(text: str, language: str) -> str:
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(code(f"{name}={value}") for name, value in options.items()) or "defaults"


def _number(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) and math.isfinite(value) else "unknown"


def _parts(run: Path, config: Config, decisions: Decisions, shares: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return for each part of the ranker its kind, options, training and share of the sum."""
    parts = []
    for kind in decisions.rankers:
        options = dict(config.trees.parameters) if is_trees(kind) else {}
        if kind == "mlp":
            options = {"hidden": list(decisions.hidden or ()), **config.network.model_dump(include={"dropout", "norm"})}
        best = best_evaluation(run, kind)[1]["step"]
        parts.append(
            {"kind": kind, "options": options, "loop": config.loop(kind), "best": best, "share": shares.get(kind)}
        )
    return parts


def _columns(bias: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the estimates of a bias.json that have one value for each position."""
    estimates = {name: bias.get(name) for name in ("theta", "t_plus", "t_minus")}
    estimates |= {f"tower of {name}": values for name, values in bias.get("towers", {}).items()}
    count = len(bias.get("positions", ()))
    return {name: values for name, values in estimates.items() if isinstance(values, list) and len(values) == count}


# --- Export -----------------------------------------------------------------------------------------------------------
# Export of a run's model as ONNX, without the bias; real rows must get the same scores as from the run.

OPSET = 18
TOLERANCE = 1e-5  # the largest difference of a score, relative to the largest score or to 1, whichever is larger
SHARED = ("ranker", "feature_names", "vocabularies", "label", "data")  # keys of model.json, as in the run's model.json
CODES = "the code of a category is its index in the vocabulary + 1; any other value has code 0"
DAMAGED_RUN = "the files of the run are incomplete or damaged"


@checked
def export_run(
    run: str | Path,
    out: str | Path,
    *,
    rows: str | None = None,
    format: str = "onnx",
    distill: str | None = None,
    layout: str = "folder",
    name: str = "ranker",
    overwrite: bool = False,
) -> Exported:
    """Write the model of a finished run to a folder: ONNX, a description of its inputs, and a model card.

    The model must score the same as the run on rows that the run kept of its validation requests, or on rows of the
    log `rows`. If it does not, nothing is written.

    With another `format` (vespa, solr, elasticsearch, opensearch, lightgbm or xgboost), only the trees of the run are
    written; or trees that learned the scores of the whole ranker on the rows of the log `distill`. The `layout` triton
    is a model of a repository of Triton. `name` is the name of the model in a search engine.
    """
    run, plan = Path(run), _Plan(format, distill, layout, name)
    check_output(out, overwrite=overwrite, folder=True)
    if (folder := Path(out)).is_dir() and any(folder.iterdir()) and not is_exported(folder):
        what = "not an exported model; not overwritten"
        raise OutputError(what, where=out, hint="choose another path")
    model = load_model(run)
    with content_errors(DAMAGED_RUN, where=run, hint="train again"):
        about = _describe(run, model)
    contents = _trees(run, model, about, plan, rows) if plan.of_trees else _onnx(run, model, about, rows)
    if layout == "triton":
        contents = _in_repository(contents, Path(out), len(model.feature_names))
    about["files"] = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    with content_errors(DAMAGED_RUN, where=run, hint="train again"):
        contents[CARD] = model_card(run, about).encode()
    about["files"][CARD] = hashlib.sha256(contents[CARD]).hexdigest()
    contents[ABOUT] = (json.dumps(add_checksum(about), indent=2) + "\n").encode()
    with atomic_path(out, overwrite=overwrite, folder=True) as temporary:
        for file, content in contents.items():
            (temporary / file).parent.mkdir(exist_ok=True)
            (temporary / file).write_bytes(content)
    return load_exported(fetched(out))


@dataclass(frozen=True)
class _Plan:
    """The form of an exported model; it is checked when it is made."""

    format: str
    distill: str | None
    layout: str
    name: str

    def __post_init__(self) -> None:
        formats = ("onnx", *ENGINES, *BOOSTERS)
        if self.format not in formats:
            hint = nearest(self.format, formats)
            raise OptionError(f"--format must be one of {', '.join(formats)}", got=self.format, hint=hint)
        if self.layout not in ("folder", "triton"):
            raise OptionError("--layout must be folder or triton", got=self.layout)
        if self.of_trees and self.layout == "triton":
            raise OptionError("Triton needs ONNX", got=f"--format {self.format}", hint="leave out --format")
        if self.distill is not None and not self.of_trees:
            hint = f"add --format with one of {', '.join(formats[1:])}"
            raise OptionError("--distill is for formats of trees; ONNX exports the whole ranker", hint=hint)
        if not PLAIN_NAME.fullmatch(self.name):
            hint = "use letters, digits, _, . and -"
            raise OptionError("the name of the model has other characters", got=self.name, hint=hint)

    @property
    def of_trees(self) -> bool:
        return self.format != "onnx"


def _onnx(run: Path, model: Model, about: dict[str, Any], rows: str | None) -> dict[str, bytes]:
    """Return the model as ONNX, and trees also as the library's own file; add to the description."""
    _import_onnx()
    sample = _sample_rows(run, model, rows)
    contents: dict[str, bytes] = {}
    try:
        contents[ONNX] = onnx_bytes(model)
        about["parity"] = check_parity(model, contents[ONNX], sample)
    except UnsupportedTreesError as error:
        if isinstance(model.ranker, Blend):  # no file of a library has the whole sum
            what = f"the trees of this sum have no ONNX ({error.what}), so it cannot be exported"
            raise DataError(what, where=run, hint="score with the run itself (ultr score), or train again") from error
        about["no_onnx"] = error.what
    if isinstance(model.ranker, TreeRanker):
        contents[model.ranker.booster.FILE] = (run / MODEL / model.ranker.booster.FILE).read_bytes()
    elif isinstance(model.ranker, Blend):
        about["parts"] = [part.to_json() for part in model.ranker.parts]
    return contents


# --- Trees ------------------------------------------------------------------------------------------------------------


def _trees(run: Path, model: Model, about: dict[str, Any], plan: _Plan, rows: str | None) -> dict[str, bytes]:
    """Return the files of trees for an engine or a library; add to the description."""
    boosters = None if plan.distill else _boosters_of(model.ranker)
    if boosters is None:
        library = plan.format if plan.format in BOOSTERS else "lightgbm"
        distilled = distil(run, model, plan.distill, library=library)
        boosters, about["distilled"] = [(distilled.booster, 1.0)], distilled.to_json()
        about["calibration"] = None  # it is of the scores of the ranker
    about |= {"format_of_trees": plan.format, "name": plan.name, "keeps_missing": True}
    about["ranker"] = boosters[0][0].LIBRARY
    sample = _sample_rows(run, model, rows)
    if plan.format in BOOSTERS:
        libraries = [booster.LIBRARY for booster, _ in boosters]
        if libraries != [plan.format]:
            what = f"the file format {plan.format} holds one ensemble of its own trees; this ranker is different"
            hint = "learn trees from its scores: add --distill LOG"
            raise DataError(what, where=run, got=" + ".join(libraries), hint=hint)
        boosters = [(boosters[0][0], 1.0)]
        scores, files = _library_file(boosters[0][0], sample)
    else:
        try:
            trees = engine_trees(boosters, model.feature_names, about["vocabularies"], plan.format)
            texts = ENGINES[plan.format](trees, model.feature_names, plan.name)
        except UnsupportedTreesError as error:
            raise DataError(error.what, where=run, got=error.got, hint=error.hint) from error
        scores = trees.scores(sample)
        files = {name: text.encode() for name, text in texts.items()}
    expected = np.sum([weight * booster.predict(sample) for booster, weight in boosters], axis=0)
    about["parity"] = {"rows": len(sample), **_difference(scores, expected)}
    return files


def _boosters_of(ranker: nn.Module) -> list[tuple[Booster, float]] | None:
    """Return the trees of a ranker and their weights; None if it has anything else."""
    parts = ranker.parts if isinstance(ranker, Blend) else (Part(ranker, ""),)
    trees = [(part.ranker, part.weight) for part in parts if isinstance(part.ranker, TreeRanker)]
    if len(trees) < len(parts):
        return None
    return [(trees.booster.shortened(trees.rounds), weight) for trees, weight in trees]


def _library_file(booster: Booster, rows: np.ndarray) -> tuple[np.ndarray, dict[str, bytes]]:
    """Return the scores of rows by the library's own file, and this file."""
    with TemporaryDirectory(prefix="ultr-export-") as folder:
        path = Path(folder) / booster.FILE
        booster.save(path, rounds=booster.rounds)
        return type(booster).load(path, booster.categorical).predict(rows), {booster.FILE: path.read_bytes()}


def _difference(scores: np.ndarray, expected: np.ndarray) -> dict[str, float]:
    """Return the largest difference of scores, and the largest that is allowed; raise DataError if it is larger."""
    largest = float(np.abs(scores - expected).max())
    tolerance = TOLERANCE * max(1.0, float(np.abs(expected).max()))
    if not largest <= tolerance:
        got = f"a difference of {largest:.2g} where {tolerance:.2g} is allowed"
        what = "the exported model scores real rows differently from the run, so it is not written"
        raise DataError(what, got=got, hint="report this as a bug of ultr")
    return {"largest_difference": largest, "tolerance": tolerance}


# --- Triton -----------------------------------------------------------------------------------------------------------
# A model of a repository of Triton: its name is that of the folder, and each export has the next version.


def _in_repository(contents: dict[str, bytes], folder: Path, features: int) -> dict[str, bytes]:
    """Return the files of a model in the layout of Triton."""
    if ONNX not in contents:
        raise DataError("the trees have no ONNX, so Triton cannot serve them", hint="use ultr score")
    versions = [int(path.parent.name) for path in folder.glob(f"*/{ONNX}") if path.parent.name.isdecimal()]
    config = f"""name: {json.dumps(folder.resolve().name)}
backend: "onnxruntime"
max_batch_size: 0  # the dimensions below are all that a request has: [requests, items, features]
input [
  {{ name: "{INPUT}", data_type: TYPE_FP32, dims: [ -1, -1, {features} ] }}
]
output [
  {{ name: "{OUTPUT}", data_type: TYPE_FP32, dims: [ -1, -1 ] }}
]
"""
    return {f"{max(versions, default=0) + 1}/{ONNX}": contents[ONNX], "config.pbtxt": config.encode()}


def _describe(run: Path, model: Model) -> dict[str, Any]:
    """Return the content of model.json, without the files."""
    of_run = read_json(run / MODEL / "model.json")
    lists: list[Any] = ["requests", "items"]
    return {
        "format": FORMAT,
        **{key: of_run[key] for key in SHARED},
        "ultr": __version__,
        "method": read_config(run).method.name,
        "codes": CODES,
        "keeps_missing": model.missing == "keep",
        "input": {"name": INPUT, "type": "float32", "shape": [*lists, len(model.feature_names)]},
        "output": {"name": OUTPUT, "type": "float32", "shape": lists},
        "calibration": None if model.calibration is None else model.calibration.to_json(),
        "parity": None,
    }


def _sample_rows(run: Path, model: Model, rows: str | None) -> np.ndarray:
    """Return real rows with the features of the model, in its order."""
    if rows is not None:
        data_dir = read_config(run).data.folder
        columns = {**columns_for_run(run, model, {"actions": [], "segment": None}), "on_duplicates": "sum"}
        log, _ = read_rows(rows, split="validation", data_dir=data_dir, columns=columns)
        return np.asarray(model.columns_of(log)[spread(log.rows, ROWS_KEPT)])
    sample = kept_rows(run)
    hint = f"pass a log with its features: ultr export {run} --out DIR --rows LOG"
    if sample is None:
        raise DataError("the run has no rows to test the exported model with", where=run, hint=hint)
    if sample.shape[1] != len(model.feature_names):
        what = f"the rows that the run kept must have {len(model.feature_names)} features"
        raise DataError(what, where=run, got=sample.shape[1], hint=hint)
    return sample


def check_parity(model: Model, content: bytes, rows: np.ndarray) -> dict[str, Any]:
    """Score rows with a model and with its ONNX, as one list, as several and alone; raise DataError if they differ."""
    expected = model.score_features(rows).astype(np.float64)
    if not np.isfinite(expected).all():
        what, hint = "the model's score of some rows is not finite", "train again, with a smaller learning rate"
        raise DataError(what, got=expected[~np.isfinite(expected)][0], hint=hint)
    session = onnx_session(content, threads=1)
    lists = len(rows) // 3 or 1  # lists of three items
    used = min(len(rows), 3 * lists)
    cases = [
        (rows[None], expected),
        (rows[:used].reshape(lists, -1, rows.shape[1]), expected[:used]),
        (rows[:1][None], expected[:1]),
    ]
    scored = np.concatenate([onnx_scores(session, x).ravel() for x, _ in cases])
    return {"rows": len(rows), **_difference(scored, np.concatenate([scores for _, scores in cases]))}


def onnx_bytes(model: Model) -> bytes:
    """Return the ranker, with its normalisation of features, as ONNX.

    The input is `features`, float32 [requests, items, features]; the output is `scores`, float32 [requests, items].
    """
    if isinstance(model.ranker, Blend):
        return blend_to_onnx([(part, _ranker_bytes(part.ranker, model)) for part in model.ranker.parts])
    return _ranker_bytes(model.ranker, model)


def _ranker_bytes(ranker: nn.Module, model: Model) -> bytes:
    onnx = _import_onnx()
    if isinstance(ranker, TreeRanker):
        return trees_to_onnx(ranker.booster, len(model.feature_names))
    ranker = copy.deepcopy(ranker).cpu().eval()
    example = torch.zeros(2, 3, len(model.feature_names))
    with _silent_exporter():
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
            what = f"torch cannot export the ranker ({str(error).splitlines()[0]})"
            raise DataError(what, hint="try another version of torch") from error
    proto = program.model_proto
    _remove_source_paths(proto)
    onnx.checker.check_model(proto)
    return bytes(proto.SerializeToString())


def _remove_source_paths(proto: Any) -> None:
    """Remove the places in the source code that the exporter notes for each node: they name folders of this machine."""
    for part in (proto, proto.graph, *proto.graph.node, *proto.graph.value_info, *proto.graph.input):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")


@contextmanager
def _silent_exporter() -> Iterator[None]:
    """Silence the messages of torch's exporter."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _import_onnx() -> Any:
    try:
        import onnx
        import onnxscript  # noqa: F401  # torch's exporter needs it
    except ImportError as error:
        raise MissingExtraError("export", package=error.name or "onnx", extra="export") from error
    return onnx
