"""A trained model: load it, score with it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from ultr.errors import DataError, OptionError, nearest
from ultr.log import Log
from ultr.log.columns import ROLES, SEVERAL, Missing
from ultr.log.labels import Label
from ultr.log.readers import as_table
from ultr.rankers import FeatureEncoder, Hurdle, Product, Synthesised, WithConstants, make_ranker, score_rows
from ultr.rankers.boosters import BOOSTERS, TreeRanker, is_trees
from ultr.rankers.combined import Blend, Combined, Part
from ultr.rankers.feedback import HURDLES
from ultr.rankers.matching import features_of, load_weights, match_features, resize_embeddings
from ultr.utils.arguments import checked
from ultr.utils.calibration import Calibration, of_model
from ultr.utils.distributed import choose_device
from ultr.utils.files import atomic_path
from ultr.utils.jsonfiles import check_format, load_tensors, read_json, save_tensors, write_json

FORMAT = 1
MAX_LAYERS = 1000
ROWS, ROWS_KEPT = "rows.safetensors", 512  # file of rows that check a model, and their number


@dataclass(frozen=True, eq=False)
class Model:
    """A trained ranker, its features, and the label it was trained for."""

    ranker: nn.Module
    feature_names: tuple[str, ...]
    label: str
    vocabularies: Mapping[str, Any] = field(default_factory=dict)  # categorical feature -> its values, as for Log
    columns: Mapping[str, Any] = field(default_factory=dict)  # role -> its column in the training log, as in Log
    indicators: tuple[int, ...] | None = None  # features whose missing values a network recognises; None: takes none
    calibration: Calibration | None = None  # of scores; None for a model of an older version, or of a comparison

    @property
    def missing(self) -> Missing:
        """How a log for this model treats missing values: networks trained with `data.missing=error` reject them."""
        return "keep" if self.indicators is not None or _are_trees(self.ranker) else "reject"

    @checked
    def score(
        self, log: Log, *, device: str = "cpu", calibrated: bool = False, at_position: int | str | None = None
    ) -> np.ndarray:
        """Return scores [rows] of a log, which must have the features of the model, in any order.

        If they are `calibrated`, they are the expected feedback (the label) at a position: the first one, or
        `at_position` (`3`, or `3@phone` where segments differ).
        """
        scores = self.score_features(self.columns_of(log), device=device)
        if not calibrated and at_position is not None:
            raise OptionError("only calibrated scores depend on a position", hint="pass calibrated=True")
        return self.expected(scores, log, at_position) if calibrated else scores

    def expected(self, scores: np.ndarray, log: Log, at_position: int | str | None = None) -> np.ndarray:
        """Return the expected feedback on the rows of a log, which have these scores."""
        calibration = of_model(self.calibration, "this model")
        segments = None
        if "segment" in log.context and "@" not in str(at_position):
            segments = log.context["segment"].cast(pa.string()).take(pa.array(log.request_of_row)).to_pylist()
        return calibration.expected(scores, None if at_position is None else str(at_position), segments)

    @checked
    def score_features(self, features: np.ndarray, *, device: str = "cpu") -> np.ndarray:
        """Return scores [rows] of features [rows, features], with columns in the order of `feature_names`."""
        chosen, width = choose_device(device), len(self.feature_names)
        if features.ndim != 2 or features.shape[1] != width:
            raise DataError(f"features must have the shape [rows, {width}], as in training", got=list(features.shape))
        with np.errstate(over="ignore"):  # values too large for float32 become infinite, and are clipped as outliers
            features = features.astype(np.float32, copy=False)
        if self.missing == "reject" and np.isnan(features).any():
            name = self.feature_names[int(np.isnan(features).any(0).argmax())]
            hint = "fill them, or train again without data.missing=error"
            raise DataError(f"feature '{name}' has missing values, which the model was trained to reject", hint=hint)
        return score_rows(self.ranker.to(chosen), features, device=chosen)

    def view(self, log: Log) -> Log:
        """Return the log with only the features of the model, in the model's order and codes of categories."""
        features, names = self.columns_of(log), self.feature_names
        return replace(log, features=features, feature_names=names, vocabularies=self.vocabularies)

    def columns_of(self, log: Log) -> np.ndarray:
        """Return the features of a log in the order and codes of the model, matched by name and by value."""
        return match_features(self, log).columns(log.features)


def _are_trees(ranker: nn.Module) -> bool:
    """Return whether a ranker is made of trees, and of nothing but an anchor next to them."""
    if isinstance(ranker, Blend):
        return isinstance(ranker.parts[0].ranker, TreeRanker) and all(part.name != "mlp" for part in ranker.parts)
    return isinstance(ranker, TreeRanker)


def save_model(
    folder: Path,
    ranker: nn.Module,
    log: Log,
    *,
    name: str,
    options: Mapping[str, Any],
    label: str,
    data: str,
    held_out: Log | None = None,
    indicators: Sequence[int] | None = None,
) -> None:
    """Write a model for scoring: the weights of a network or the library's file of trees, and a description.

    The names of features come from `log`. `name` and `options` are those of the ranker, `data` names its data. Rows of
    `held_out` are saved too, so that the model can be checked wherever it is used. `indicators` are the features whose
    missing values a network recognises; None if it takes no missing values.
    """
    about: dict[str, Any] = {
        "format": FORMAT,
        "ranker": name,
        "feature_names": list(log.feature_names),
        "vocabularies": {name: values.to_pylist() for name, values in log.vocabularies.items()},
        "label": label,
        "data": data,
        "columns": dict(log.columns),
    }
    with atomic_path(folder, overwrite=True, folder=True) as temporary:
        if isinstance(ranker, Blend):
            about["parts"] = []
            for number, part in enumerate(ranker.parts):
                (temporary / f"part-{number}").mkdir()
                saved = _save_ranker(temporary / f"part-{number}", part.ranker, part.options, part.indicators)
                about["parts"].append({**part.to_json(), **saved})
        else:
            about |= _save_ranker(temporary, ranker, options, indicators)
        _save_rows(temporary, held_out)
        write_json(temporary / "model.json", about)


def _save_ranker(
    folder: Path, ranker: nn.Module, options: Mapping[str, Any], indicators: Sequence[int] | None
) -> dict[str, Any]:
    """Write the weights or trees of a ranker into a folder; return what describes it in model.json."""
    if isinstance(ranker, TreeRanker):
        file = folder / ranker.booster.FILE
        ranker.booster.save(file, rounds=ranker.rounds)
        first = min(ranker.booster.first, ranker.rounds)
        return {"rounds": ranker.rounds, "first_rounds": first, "sha256": _sha256(file)}
    save_tensors(folder / "weights.safetensors", ranker.state_dict())
    about = {
        "ranker_options": dict(options),
        "constants": len(ranker.constants) if isinstance(ranker, WithConstants) else 0,
        "binary": list(ranker.binary) if isinstance(ranker, Synthesised) else None,
        "hurdle": ranker.KIND if isinstance(ranker, Hurdle) else None,
        "product": isinstance(ranker, Product),
        "combined": isinstance(ranker, Combined),
    }
    return about if indicators is None else {**about, "missing": list(indicators)}


def _save_rows(folder: Path, log: Log | None) -> None:
    """Save the features of up to 512 rows, evenly spread over a log, to check the model with later."""
    if log is not None and log.rows:
        rows = log.features[spread(log.rows, ROWS_KEPT)]
        save_tensors(folder / ROWS, {"features": torch.from_numpy(np.array(rows, np.float32))})


def spread(count: int, most: int) -> np.ndarray:
    """Return at most `most` indices below `count`, evenly spread."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(np.int64)


def kept_rows(run: str | Path) -> np.ndarray | None:
    """Return features [rows, features] of the held-out rows that a run has saved; None if there are none."""
    path = Path(run) / "model" / ROWS
    if not path.is_file():
        return None
    rows = load_tensors(path).get("features")
    if rows is None or rows.ndim != 2 or not len(rows):
        raise DataError("the file has no rows of features", where=path, hint="train again")
    return np.asarray(rows.numpy(), np.float32)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _load_trees(folder: Path, about: Mapping[str, Any], categorical: tuple[int, ...]) -> TreeRanker:
    """Load trees from a file of the library. Its checksum must match, as libraries do not validate all they read."""
    library = BOOSTERS[about["ranker"]]
    path = folder / library.FILE
    if not path.is_file() or _sha256(path) != about["sha256"]:
        hint = "restore it from a copy, or train again"
        raise DataError("the file of trees is missing or was changed", where=path, hint=hint)
    booster = library.load(path, categorical)
    booster.first = int(about["first_rounds"])
    return TreeRanker(booster)


def _network(about: Mapping[str, Any], inputs: int, categories: Mapping[int, int], constants: int) -> nn.Module:
    label = Label(about["label"])
    binary = about.get("binary")
    options = dict(about["ranker_options"])
    if len(options.get("hidden", ())) > MAX_LAYERS:
        raise ValueError(f"{len(options['hidden']):,} layers, at most {MAX_LAYERS} are allowed")
    hurdle = about.get("hurdle")
    is_product = about.get("product") is True
    is_combined = about.get("combined") is True
    outputs = HURDLES[hurdle].OUTPUTS if hurdle else 2 if is_product else 1 if binary is None else len(label.actions)
    outputs = Combined.OUTPUTS if is_combined else outputs
    indicators = [int(i) for i in about.get("missing") or ()]
    if not all(0 <= i < inputs and i not in categories for i in indicators):
        raise ValueError(f"'missing' must be indices of numeric features, got {indicators[:5]}")
    encoder = FeatureEncoder(inputs, categories, indicators=indicators)
    ranker = make_ranker(about["ranker"], encoder, outputs=outputs, **options)
    if binary is not None:
        ranker = Synthesised(ranker, label, binary)
    if hurdle:
        ranker = HURDLES[hurdle](ranker)
    if is_product:
        ranker = Product(ranker)
    if is_combined:
        ranker = Combined(ranker)
    return WithConstants(ranker, torch.zeros(constants)) if constants else ranker


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


@checked
def load_model(run: str | Path) -> Model:
    """Load the trained model from the folder of a finished run."""
    folder = Path(run) / "model"
    about = read_json(folder / "model.json")
    check_format(about, FORMAT, what="the model", where=folder, hint="train again")
    try:
        names = tuple(about["feature_names"])
        if not all(isinstance(name, str) for name in names):
            raise TypeError("feature_names must be a list of names")
        vocabularies = {name: pa.array(values, pa.string()) for name, values in about["vocabularies"].items()}
        columns = _checked_columns(about["columns"])
        categories = {names.index(name): len(values) + 1 for name, values in vocabularies.items()}
        ranker = (
            _load_blend(folder, about, names, categories)
            if "parts" in about
            else _load_ranker(folder, about, names, categories)
        )
        described = (about, *about.get("parts", ()))
        missing = next((part["missing"] for part in described if part.get("missing") is not None), None)
        indicators = None if missing is None else tuple(int(i) for i in missing)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OptionError, OverflowError) as error:
        raise DataError(f"the model cannot be loaded ({error})", where=folder, hint="train again") from error
    return Model(ranker.eval(), names, str(about["label"]), vocabularies, columns, indicators, Calibration.load(folder))


def _load_blend(folder: Path, about: Mapping[str, Any], names: tuple[str, ...], categories: Mapping[int, int]) -> Blend:
    parts = []
    for number, described in enumerate(about["parts"]):
        weight = float(described["weight"])
        if not np.isfinite(weight):
            raise ValueError(f"the weight of part {number} must be finite")
        ranker = _load_ranker(folder / f"part-{number}", {**about, **described}, names, categories)
        options = described.get("ranker_options", {})
        parts.append(Part(ranker, str(described["ranker"]), options, weight))
    if not parts:
        raise ValueError("a blend must have parts")
    return Blend(parts)


def _load_ranker(
    folder: Path, about: Mapping[str, Any], names: tuple[str, ...], categories: Mapping[int, int]
) -> nn.Module:
    """Load the network or trees of a folder, which `about` describes."""
    if is_trees(about["ranker"]):
        return _load_trees(folder, about, tuple(sorted(categories)))
    constants = int(about.get("constants", 0))
    weights = load_tensors(folder / "weights.safetensors")
    if len(names) + constants < 1:
        raise TypeError("feature_names must be a list of names")
    if constants != weights.get("constants", torch.empty(0)).numel():
        raise ValueError("the constants in weights.safetensors do not match model.json")
    with torch.device("meta"):  # no memory is used until the shapes are known to match the file
        expected = _network(about, len(names) + constants, categories, constants)
        resize_embeddings(expected, weights)
    if _kinds(expected.state_dict()) != _kinds(weights):
        raise ValueError("weights.safetensors does not match the network that model.json describes")
    ranker = _network(about, len(names) + constants, categories, constants)
    load_weights(ranker, weights)
    return ranker


def _checked_columns(columns: Any) -> dict[str, Any]:
    """Return the columns of training from model.json; raise TypeError if a role has no column or list of columns."""
    for role, names in columns.items():
        listed = names if role in SEVERAL else [names]
        if role not in ROLES or not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            raise TypeError(f"'columns' must map roles to names of columns, got {role}")
    return dict(columns)


# --- MLflow -----------------------------------------------------------------------------------------------------------
# The flavour `pyfunc` of MLflow: `mlflow.pyfunc.load_model(uri).predict(frame)` scores the rows of a pandas frame.


class ScoredRows:
    """A model that scores frames. Columns are matched by name with the features of training, others are ignored."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def predict(self, frame: Any, params: dict[str, Any] | None = None) -> np.ndarray:
        """Return the score of each row of a pandas frame."""
        names, present = self.model.feature_names, [str(name) for name in frame.columns]
        if absent := [name for name in names if name not in present]:
            what = f"the frame has no column '{absent[0]}', which was a feature in training"
            raise DataError(what, hint=nearest(absent[0], present))
        categorical = [name for name in names if name in self.model.vocabularies]
        numeric = [name for name in names if name not in self.model.vocabularies]
        table, missing = as_table(frame[list(names)]), self.model.missing
        rows = features_of(self.model, table, numeric, categorical, missing=missing, where="the frame")
        return self.model.score_features(rows)


def _load_pyfunc(path: str) -> ScoredRows:
    """Load the folder `model` of a run. MLflow calls this function."""
    return ScoredRows(load_model(Path(path).parent))
