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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ultr._version import __version__
from ultr.bias.propensities import BIAS_FILE
from ultr.errors import DataError, MissingExtraError, OutputError, redact
from ultr.evaluation.scores import FEEDBACK, OFF_POLICY
from ultr.rankers.boosters import TreeRanker
from ultr.rankers.combined import Blend
from ultr.rankers.model import ROWS_KEPT, Model, kept_rows, load_model, spread
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
from ultr.serving.onnx_graphs import NotInOnnxError, blend_to_onnx, trees_to_onnx
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
# The model card: the data, method, quality, bias and limits of a model, as Markdown.
#
# Text from data is shown as code, shortened and on one line, so that no name can look like text of the card.

SHOWN = 50  # the largest number of features, and of positions, in the card
LONGEST = 80  # the largest number of characters of a name
VERSIONS = ("ultr", "torch", "lightgbm", "xgboost")
FROM_METRIC = {
    OFF_POLICY: "logged feedback, corrected for position bias; no experiment has confirmed it",
    FEEDBACK: "logged feedback, with its position bias",
}


def model_card(run: Path, about: Mapping[str, Any]) -> str:
    """Return the card of a run's model as Markdown; `about` is the content of the exported model.json."""
    config_json = read_json(run / CONFIG)
    config, decisions = Config.from_json(config_json, where=run), Decisions.load(run)
    bias = read_json(run / BIAS_FILE) if (run / BIAS_FILE).is_file() else None
    parts = [
        _summary(run, config, decisions, about),
        _data(run, config, about),
        _training(run, config, decisions, bias, config_json),
        _quality(run, decisions),
        _bias(bias),
        _limits(config, decisions, about, bias),
        _features(about),
        _use(about),
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def code(text: object, longest: int = LONGEST) -> str:
    """Return text of unknown origin as one code span on one line."""
    line = " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", " ", str(text)).split()).replace("`", "'")
    return f"`{line[: longest - 1] + '…' if len(line) > longest else line or ' '}`"


def _block(text: str, language: str = "") -> list[str]:
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return [f"{fence}{language}", text, fence]


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(code(f"{name}={value}") for name, value in options.items()) or "defaults"


def _summary(run: Path, config: Config, decisions: Decisions, about: Mapping[str, Any]) -> list[str]:
    return [
        f"# {code(run.resolve().name)}",
        "",
        f"A ranker: it computes a score from {len(about['feature_names']):,} features of an item.",
        "The items of a request are ordered by score, highest first.",
        f"It was trained with the method {code(config.method.name)} for the label {code(decisions.label, 1000)}.",
        "The estimated bias was used only in training: this model does not contain it.",
    ]


def _data(run: Path, config: Config, about: Mapping[str, Any]) -> list[str]:
    lines = [
        "## Data",
        "",
        f"- {code(redact(config.data.source) or 'data in memory', 200)}, fingerprint {code(about['data'])}",
    ]
    if config.users is not None:
        options = _options(config.simulation.user_options)
        lines.append(f"- feedback of simulated users ({code(config.users)}, options: {options}), not of people")
    path = run / OUTCOME / "outcome.json"
    if path.is_file():
        outcome = read_json(path)
        training, held_out = outcome["data"], outcome["split"]
        sample = " (a sample of the training data)" if training.get("sample") else ""
        lines.append(f"- training: {training['requests']:,} requests with {training['rows']:,} items{sample}")
        lines.append(
            f"- judged on {held_out['name']}: {held_out['requests']:,} requests with {held_out['rows']:,} items"
        )
    if (learn_from := config.simulation.learn_from) != "feedback":
        lines.append(f"- trained on {learn_from}, as an upper bound: logs do not contain it")
    return lines


def _training(
    run: Path, config: Config, decisions: Decisions, bias: Mapping[str, Any] | None, content: Mapping[str, Any]
) -> list[str]:
    command, notes = train_command(config)
    versions = ", ".join(f"{name} {content[name]}" for name in VERSIONS if name in content)
    sources = {"started from the run": config.training.warm_start, "bias taken from": config.examination.bias}
    return [
        "## Training",
        "",
        f"- method {code(config.method.name)}, options: {_options(config.method.options)}",
        *_parts(run, config, decisions, (bias or {}).get("shares", {})),
        f"- seed {config.seed}",
        *(f"- {what} {code(path, 200)}" for what, path in sources.items() if path is not None),
        f"- versions: {versions}",
        "",
        "The command that repeats the training:",
        "",
        *_block(command, "sh"),
        *(f"- {code(note, 300)}" for note in notes),
    ]


def _parts(run: Path, config: Config, decisions: Decisions, shares: Mapping[str, float]) -> list[str]:
    """Return a line for each part of the ranker, with its share, and the reasons why other parts are left out."""
    lines = [] if len(decisions.rankers) == 1 else [f"- the ranker is the sum of {len(decisions.rankers)} parts"]
    for kind in decisions.rankers:
        options = dict(config.trees.parameters) if is_trees(kind) else {}
        if kind == "mlp":
            options = {"hidden": list(decisions.hidden or ()), **config.network.model_dump(include={"dropout", "norm"})}
        share = f", {shares[kind]:.0%} of the sum" if kind in shares else ""
        loop, (_, best) = config.loop(kind), best_evaluation(run, kind)
        how = f"at most {loop.steps:,} steps, the best of which is {best['step']:,}; learning rate {loop.lr:g}"
        lines.append(f"- ranker {code(kind)}{share}, options: {_options(options)}; {how}")
    return [*lines, *(f"- {code(note, 300)}" for note in decisions.notes)]


def _quality(run: Path, decisions: Decisions) -> list[str]:
    select, value, step = value_of_run(run)
    at_step = "" if len(decisions.rankers) > 1 else f", at step {step:,}, which was selected"
    split = read_json(run / OUTCOME / "outcome.json")["split"]["name"] if (run / OUTCOME).is_dir() else "validation"
    lines = ["## Quality", "", f"- {code(select)} on {split}: {_number(value)}{at_step}"]
    source = next((words for start, words in FROM_METRIC.items() if select.startswith(start)), None)
    if source is not None:
        lines.append(f"- computed from {source}")
        lines += [] if split == "test" else ["- slightly too high, because these requests selected the step"]
    if (run / "test.json").is_file():
        for name, value in read_json(run / "test.json").items():
            lines.append(f"- on test: {code(name)} {_number(value)}")
    else:
        lines.append("- the run has no results on test requests")
    return lines


def _bias(bias: Mapping[str, Any] | None) -> list[str]:
    lines = ["## Estimated bias", ""]
    if bias is None:
        return [*lines, "None: the method does not estimate position bias, or its feedback has none."]
    columns = {name: bias[name] for name in ("theta", "t_plus", "t_minus") if _is_column(bias, bias.get(name))}
    columns |= {
        f"tower of {name}": column for name, column in bias.get("towers", {}).items() if _is_column(bias, column)
    }
    if columns:
        heads = [code(name) for name in columns]
        lines += [f"| position | {' | '.join(h.replace('|', '/') for h in heads)} |", "|---|" + "---|" * len(columns)]
        for i, position in enumerate(bias["positions"][:SHOWN]):
            values = " | ".join(_number(column[i]) for column in columns.values())
            lines.append(f"| {code(position).replace('|', '/')} | {values} |")
        lines += [*_more(len(bias["positions"]), "positions"), ""]
    if "theta" in columns:
        lines.append("- theta: the probability that users examine an item at the position")
    for name, words in (("theta_from", "estimated by"), ("theta_scale", "scale"), ("label", "for the label")):
        if bias.get(name):
            lines.append(f"- {words}: {code(bias[name], 300)}")
    for warning in bias.get("warnings", ()):
        lines.append(f"- warning: {code(warning['name'])}: {code(warning['what'], 300)}")
    if not bias.get("warnings"):
        lines.append("- no warnings; this does not prove that the estimate is right")
    return lines


def _is_column(bias: Mapping[str, Any], values: object) -> bool:
    return isinstance(values, list) and len(values) == len(bias.get("positions", ()))


MISSING_IN_TREES = "- A missing value is NaN, and follows the branches that trees chose for it in training."
MISSING_IN_NETWORKS = "- A missing value is NaN; networks take the mean of training rows, and an indicator."


def _limits(
    config: Config, decisions: Decisions, about: Mapping[str, Any], bias: Mapping[str, Any] | None
) -> list[str]:
    trees = [is_trees(kind) for kind in decisions.rankers]
    missing = [MISSING_IN_TREES] * any(trees) + [MISSING_IN_NETWORKS] * (not all(trees))
    clipped = "- Numbers more than 10 standard deviations from the mean in training are clipped."
    lines = [
        "## Limits",
        "",
        "- Scores are comparable only within one request. They are not probabilities.",
        "- Features must be computed as for training, and be in the order below.",
        *(missing if about["keeps_missing"] else [clipped]),
        "- A category that was not in the training data has code 0.",
    ]
    if bias is not None:
        lines.append(
            "- Position is assumed to affect feedback only by examination and trust, and equally for all requests"
            + ("." if decisions.segment is None else f" of a segment ({code(decisions.segment)}).")
        )
    elif config.simulation.learn_from == "feedback":
        lines.append("- Position bias was not corrected: items that were shown at the top may get too high scores.")
    lines.append(
        "- Not measured: other kinds of bias (items that were never shown, neighbouring items), quality on later data, "
        "fairness between groups of items or people, and the reaction of users to its rankings."
    )
    return lines


def _features(about: Mapping[str, Any]) -> list[str]:
    vocabularies = about["vocabularies"]
    lines = ["## Features, in order", ""]
    for index, name in enumerate(about["feature_names"][:SHOWN]):
        kind = f": a category, codes 1 to {len(vocabularies[name]):,}" if name in vocabularies else ""
        lines.append(f"{index}. {code(name)}{kind}")
    return [*lines, *_more(len(about["feature_names"]), "features", where=ABOUT)]


def _more(count: int, what: str, where: str = "the run's bias.json") -> list[str]:
    return ["", f"{count - SHOWN:,} more {what} are in {where}."] if count > SHOWN else []


def _use(about: Mapping[str, Any]) -> list[str]:
    lines = ["## Use", ""]
    if ONNX not in about["files"]:
        return [*lines, f"There is no ONNX model: {about['no_onnx']}. The library's own file is next to this card."]
    parity = about["parity"]
    rows, largest, allowed = parity["rows"], parity["largest_difference"], parity["tolerance"]
    example = f"""import json

import numpy as np
import onnxruntime

names = json.load(open("{ABOUT}"))["feature_names"]
session = onnxruntime.InferenceSession("{ONNX}")
items = [dict.fromkeys(names, 0.0), dict.fromkeys(names, 1.0)]  # two items of one request
features = np.array([[[item[name] for name in names] for item in items]], np.float32)
scores = session.run(["{OUTPUT}"], {{"{INPUT}": features}})[0]  # [requests, items]"""
    codes = [f"A category is a code: its index in `vocabularies` of {ABOUT} plus 1, or 0 if it is not there."]
    return [
        *lines,
        *_block(example, "python"),
        "",
        *(codes if about["vocabularies"] else []),
        f"On {rows:,} real rows, the scores differ from the run's by at most {largest:.1e} ({allowed:.1e} is allowed).",
    ]


def _number(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) and math.isfinite(value) else "unknown"


# --- Export -----------------------------------------------------------------------------------------------------------
# Export of a run's model as ONNX, without the bias; real rows must get the same scores as from the run.

OPSET = 18
TOLERANCE = 1e-5  # the largest difference of a score, relative to the largest score or to 1, whichever is larger
SHARED = ("ranker", "feature_names", "vocabularies", "label", "data")  # keys of model.json, as in the run's model.json
CODES = "the code of a category is its index in the vocabulary + 1; any other value has code 0"
DAMAGED_RUN = "the files of the run are incomplete or damaged"


@checked
def export_run(run: str | Path, out: str | Path, *, rows: str | None = None, overwrite: bool = False) -> Exported:
    """Write the model of a finished run to a folder: ONNX, a description of its inputs, and a model card.

    The ONNX model must score the same as the run on rows that the run kept of its validation requests, or on rows of
    the log `rows`. If it does not, nothing is written.
    """
    run = Path(run)
    check_output(out, overwrite=overwrite, folder=True)
    if (folder := Path(out)).is_dir() and any(folder.iterdir()) and not is_exported(folder):
        what = "exists and is not an exported model, so it is not replaced"
        raise OutputError(what, where=out, hint="choose another path")
    _import_onnx()
    model = load_model(run)
    with content_errors(DAMAGED_RUN, where=run, hint="train again"):
        about = _describe(run, model)
    sample = _sample_rows(run, model, rows)
    contents: dict[str, bytes] = {}
    try:
        contents[ONNX] = onnx_bytes(model)
        about["parity"] = check_parity(model, contents[ONNX], sample)
    except NotInOnnxError as error:
        about["no_onnx"] = error.what
    if isinstance(model.ranker, TreeRanker):
        contents[model.ranker.booster.FILE] = (run / MODEL / model.ranker.booster.FILE).read_bytes()
    elif isinstance(model.ranker, Blend):
        about["parts"] = [part.to_json() for part in model.ranker.parts]
    about["files"] = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    with content_errors(DAMAGED_RUN, where=run, hint="train again"):
        contents[CARD] = model_card(run, about).encode()
    about["files"][CARD] = hashlib.sha256(contents[CARD]).hexdigest()
    contents[ABOUT] = (json.dumps(add_checksum(about), indent=2) + "\n").encode()
    with atomic_path(out, overwrite=overwrite, folder=True) as temporary:
        for name, content in contents.items():
            (temporary / name).write_bytes(content)
    return load_exported(fetched(out))


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
        "parity": None,
    }


def _sample_rows(run: Path, model: Model, rows: str | None) -> np.ndarray:
    """Return real rows with the features of the model, in its order."""
    if rows is not None:
        data_dir = read_config(run).data.folder
        columns = {**columns_for_run(run, model, {"actions": [], "segment": None}), "on_duplicates": "first"}
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
    largest = float(np.max([np.abs(onnx_scores(session, x).ravel() - scores).max() for x, scores in cases]))
    tolerance = TOLERANCE * max(1.0, float(np.abs(expected).max()))
    if not largest <= tolerance:
        got = f"a difference of {largest:.2g} where {tolerance:.2g} is allowed"
        what = "the ONNX model scores real rows differently from the run, so it is not written"
        raise DataError(what, got=got, hint="report this as a bug of ultr")
    return {"rows": len(rows), "largest_difference": largest, "tolerance": tolerance}


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
