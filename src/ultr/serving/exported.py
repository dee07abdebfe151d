"""An exported model: the folder that `ultr export` writes, read and checked without torch.

folder/model.onnx      features [requests, items, features] -> scores [requests, items]; not for all trees
folder/lightgbm.txt    for trees, the library's own file; or xgboost.json
folder/...             in the layout of Triton, config.pbtxt and 1/model.onnx; for a search engine, its files
folder/model.json      the keys of a run's model/model.json that scoring needs, the calibration of scores, and the
                       tensors and hashes of the files
folder/README.md       the model card
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ultr.errors import DataError, MissingExtraError, OptionError
from ultr.utils.arguments import checked
from ultr.utils.calibration import Calibration, of_model
from ultr.utils.jsonfiles import load_description

FORMAT = 1
ONNX, ABOUT, CARD = "model.onnx", "model.json", "README.md"
MODEL_FILE = re.compile(r"([1-9]\d*/)?model\.onnx|[\w.-]+\.(json|txt|profile|pbtxt)")
INPUT, OUTPUT, EXPECTED = "features", "scores", "expected"
AGAIN = "export it again with ultr export"


@dataclass(frozen=True, eq=False)
class Exported:
    """An exported model, and what a caller needs to use it."""

    folder: Path
    feature_names: tuple[str, ...]
    vocabularies: Mapping[
        str, tuple[str, ...]
    ]  # categorical feature -> its values; the code of a value is its index + 1
    label: str
    ranker: str
    keeps_missing: bool  # True if NaN is a missing value, as for trees; False if it must not be sent
    files: Mapping[str, str]  # name -> SHA-256
    about: Mapping[str, Any]  # the content of model.json
    calibration: Calibration | None = None  # from scores to expected feedback; None in a folder of an older version

    @property
    def has_onnx(self) -> bool:
        """True if the folder has model.onnx."""
        return self.onnx_file is not None

    @property
    def onnx_file(self) -> str | None:
        """The path of model.onnx in the folder, which has a version in the layout of Triton."""
        return next((name for name in self.files if name.rpartition("/")[2] == ONNX), None)

    @cached_property
    def codes(self) -> dict[str, dict[str, int]]:
        """The code of each value of each categorical feature; any other value has code 0."""
        return {name: {value: i + 1 for i, value in enumerate(values)} for name, values in self.vocabularies.items()}

    def onnx(self) -> bytes:
        """Return the content of model.onnx; raise DataError if it is not the file that was exported."""
        if (name := self.onnx_file) is None:
            what = f"these {self.ranker} trees have no ONNX, only {self.ranker}'s own file"
            hint = f"load that file with {self.ranker}, or see {CARD}"
            if "format_of_trees" in self.about:
                what, hint = f"this model was exported for {self.about['format_of_trees']}, without ONNX", f"see {CARD}"
            raise DataError(what, where=self.folder, hint=hint)
        path = self.folder / name
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot be read ({error.strerror})", where=path, hint=AGAIN) from error
        if hashlib.sha256(content).hexdigest() != self.files[name]:
            raise DataError("the file is not the one that was exported", where=path, hint=f"restore it, or {AGAIN}")
        return content

    def expected(self, scores: np.ndarray, at_position: str | None = None) -> np.ndarray:
        """Return the expected feedback on items with these scores at a position; without one, at the first."""
        return of_model(self.calibration, self.folder).expected(scores, at_position)

    def session(self, *, threads: int = 0) -> Any:
        """Open the model with onnxruntime on the CPU; `threads` 0 lets onnxruntime choose their number."""
        return onnx_session(self.onnx(), threads=threads, where=self.folder / str(self.onnx_file))


def onnx_session(content: bytes, *, threads: int = 0, where: object = None) -> Any:
    """Open a model with one input `features` and one output `scores` with onnxruntime on the CPU."""
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError("scoring with ONNX", package="onnxruntime", extra="serve") from error
    if threads < 0:
        raise OptionError("'threads' must be at least 0", got=threads)
    if refers_to_files(content):
        raise DataError("the model refers to weights in other files, which are never read", where=where, hint=AGAIN)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    try:
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors have no common class
        line = " ".join(str(error).split())[:300]
        raise DataError(f"onnxruntime cannot load the model ({line})", where=where, hint=AGAIN) from error
    names = [tensor.name for tensor in (*session.get_inputs(), *session.get_outputs())]
    if names != [INPUT, OUTPUT]:
        what = f"the model must have one input '{INPUT}' and one output '{OUTPUT}'"
        raise DataError(what, where=where, got=", ".join(names), hint=AGAIN)
    return session


# For each kind of message in a model (onnx.proto), the fields with messages that can contain tensors.
_NESTED: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}


def refers_to_files(content: bytes) -> bool:
    """Return True if a tensor of the model is stored in another file, at a path that the model names."""
    if b"location" not in content:  # every such path has this key
        return False
    waiting = [("model", memoryview(content))]
    while waiting:
        kind, message = waiting.pop()
        for field, value in _fields(message):
            if kind == "tensor":
                if field == 13 or (field == 14 and value == 1):  # external_data, or data_location EXTERNAL
                    return True
            elif field in _NESTED[kind] and isinstance(value, memoryview):
                waiting.append((_NESTED[kind][field], value))
    return False


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the fields of a protocol buffer: numbers as int, everything else as bytes."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    try:
        while at < len(message):
            tag = number()
            if tag & 7 == 0:
                yield tag >> 3, number()
                continue
            length = {1: 8, 2: -1, 5: 4}[tag & 7]
            length = number() if length < 0 else length
            yield tag >> 3, message[at : at + length]
            at += length
    except (IndexError, KeyError) as error:
        raise DataError("this is not an ONNX model", hint=AGAIN) from error


def onnx_scores(session: Any, features: np.ndarray) -> np.ndarray:
    """Return scores [requests, items] for features [requests, items, features]."""
    return np.asarray(session.run([OUTPUT], {INPUT: np.ascontiguousarray(features, np.float32)})[0])


def is_exported(folder: str | Path) -> bool:
    """Return True if a folder is an exported model, and not a run."""
    path = Path(folder)
    return (path / ABOUT).is_file() and not (path / "config.json").is_file()


@checked
def load_exported(folder: str | Path) -> Exported:
    """Read a model that `ultr export` wrote to a folder, without importing torch."""
    folder = Path(folder)
    path = folder / ABOUT
    if not path.is_file():
        if (folder / "config.json").is_file():
            hint = f"export it with: ultr export {folder} --out DIR"
            raise DataError("this is a run, not an exported model", where=folder, hint=hint)
        raise DataError("there is no exported model here", where=folder, hint="check the path")
    about = load_description(path, FORMAT, what="the exported model", hint=AGAIN)
    try:
        names = tuple(_strings(about["feature_names"]))
        vocabularies = {name: tuple(_strings(values)) for name, values in dict(about["vocabularies"]).items()}
        files = {str(name): str(digest) for name, digest in dict(about["files"]).items()}
        label = str(about["label"])
        ranker = str(about["ranker"])
        keeps_missing = bool(about["keeps_missing"])
        calibration = about.get("calibration")
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"cannot be read ({error!r})", where=path, hint=AGAIN) from error
    if not names or len(set(names)) < len(names) or not vocabularies.keys() <= set(names):
        raise DataError(
            "feature names must be unique, and every vocabulary must be of a feature", where=path, hint=AGAIN
        )
    models = files.keys() - {CARD}
    if not models or not all(MODEL_FILE.fullmatch(name) for name in models):
        what = "the files must be a model and its card"
        raise DataError(what, where=path, got=sorted(files)[:5], hint=AGAIN)
    found = None if calibration is None else Calibration.from_json(calibration, where=path)
    return Exported(folder, names, vocabularies, label, ranker, keeps_missing, files, about, found)


def _strings(values: Any) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError("a list of strings was expected")
    return values
