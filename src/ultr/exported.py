"""An exported model: the folder that `ultr export` writes, read and checked without torch.

folder/model.onnx      features [requests, items, features] -> scores [requests, items]; not for trees ONNX cannot hold
folder/lightgbm.txt    of trees, the library's own file, or xgboost.json
folder/model.json      the features in order, the codes of categories, and digests of the files
folder/README.md       the model card
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ultr.arguments import checked
from ultr.errors import DataError, MissingExtraError, OptionError
from ultr.formats import check_format, load_json

FORMAT = 1
ONNX, ABOUT, CARD = "model.onnx", "model.json", "README.md"
LIBRARY_FILES = ("lightgbm.txt", "xgboost.json")
INPUT, OUTPUT = "features", "scores"
AGAIN = "export it again with ultr export"


@dataclass(frozen=True, eq=False)
class Exported:
    """A model that was exported, and what a caller must know to use it."""

    folder: Path
    feature_names: tuple[str, ...]
    vocabularies: Mapping[str, tuple[str, ...]]  # categorical feature -> its values: the code is the index + 1
    label: str
    ranker: str
    keeps_missing: bool  # whether NaN is a value like others, as to trees, or should not be given
    files: Mapping[str, str]  # name -> SHA-256
    about: Mapping[str, Any]  # all of model.json

    @property
    def has_onnx(self) -> bool:
        return ONNX in self.files

    @cached_property
    def codes(self) -> dict[str, dict[str, int]]:
        """Of each categorical feature, the code of each value; all others have code 0."""
        return {name: {value: i + 1 for i, value in enumerate(known)} for name, known in self.vocabularies.items()}

    def onnx(self) -> bytes:
        """The content of model.onnx, which must be what was written."""
        if not self.has_onnx:
            what = f"these {self.ranker} trees have no ONNX, only {self.ranker}'s own file"
            raise DataError(what, where=self.folder, mend=f"load that with {self.ranker}, or see {CARD}")
        return _content(self.folder / ONNX, self.files[ONNX])

    def session(self, *, threads: int = 0) -> Any:
        """An onnxruntime session of the model on the CPU; `threads` 0 leaves their number to onnxruntime."""
        return onnx_session(self.onnx(), threads=threads, where=self.folder / ONNX)


def onnx_session(content: bytes, *, threads: int = 0, where: object = None) -> Any:
    """An onnxruntime session on the CPU of a model with one input `features` and one output `scores`."""
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError("scoring with ONNX", package="onnxruntime", extra="export") from error
    if threads < 0:
        raise OptionError("threads should be 0 or more", got=threads)
    if refers_to_files(content):
        raise DataError("the model keeps weights in other files, which are never read", where=where, mend=AGAIN)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    try:
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors share no class
        raise DataError(f"onnxruntime cannot load the model ({_line(error)})", where=where, mend=AGAIN) from error
    names = [tensor.name for tensor in (*session.get_inputs(), *session.get_outputs())]
    if names != [INPUT, OUTPUT]:
        raise DataError(f"a model has one input, {INPUT}, and one output, {OUTPUT}", where=where, got=", ".join(names))
    return session


# Of the messages in a model (onnx.proto), which fields hold messages that tensors are in.
_INSIDE: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}


def refers_to_files(content: bytes) -> bool:
    """Whether a tensor of a model lies in a file beside it, by a path that the model names."""
    if b"location" not in content:  # the key of such a path
        return False
    waiting = [("model", memoryview(content))]
    while waiting:
        kind, message = waiting.pop()
        for field, value in _fields(message):
            if kind == "tensor":
                if field == 13 or (field == 14 and value == 1):  # external_data, or a data_location that is external
                    return True
            elif field in _INSIDE[kind] and isinstance(value, memoryview):
                waiting.append((_INSIDE[kind][field], value))
    return False


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The fields of a protocol buffer: numbers as they are, all else as bytes."""
    at = 0

    def number() -> int:
        nonlocal at
        found = shift = 0
        while True:
            byte = message[at]
            at += 1
            found |= (byte & 127) << shift
            if byte < 128:
                return found
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
        raise DataError("this is no ONNX model", mend=AGAIN) from error


def onnx_scores(session: Any, features: np.ndarray) -> np.ndarray:
    """Scores [requests, items] of features [requests, items, features]."""
    return np.asarray(session.run([OUTPUT], {INPUT: np.ascontiguousarray(features, np.float32)})[0])


def is_exported(folder: str | Path) -> bool:
    """Whether a folder is what `ultr export` writes, and no run."""
    path = Path(folder)
    return (path / ABOUT).is_file() and not (path / "config.json").is_file()


@checked
def load_exported(folder: str | Path) -> Exported:
    """The model that `ultr export` wrote to a folder; torch is not imported for it."""
    folder = Path(folder)
    about = _about(folder)
    try:
        names = tuple(map(str, _list_of(about["features"], str)))
        vocabularies = {name: tuple(_list_of(values, str)) for name, values in dict(about["vocabularies"]).items()}
        files = {str(name): str(digest) for name, digest in dict(about["files"]).items()}
        found = Exported(
            folder,
            names,
            vocabularies,
            str(about["label"]),
            str(about["ranker"]),
            about["missing"] == "keep",
            files,
            about,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"cannot be read ({error})", where=folder / ABOUT, mend=AGAIN) from error
    if not names or len(set(names)) < len(names) or not vocabularies.keys() <= set(names):
        raise DataError("features should differ, and categories be among them", where=folder / ABOUT, mend=AGAIN)
    if not files.keys() <= {ONNX, CARD, *LIBRARY_FILES} or not files.keys() & {ONNX, *LIBRARY_FILES}:
        raise DataError("there is no model among its files", where=folder / ABOUT, got=sorted(files)[:5], mend=AGAIN)
    return found


def _about(folder: Path) -> dict[str, Any]:
    path = folder / ABOUT
    try:
        about = load_json(path, finite=True)
    except FileNotFoundError as error:
        if (folder / "config.json").is_file():
            mend = f"export it with: ultr export {folder} --out DIR"
            raise DataError("this is a run, not an exported model", where=folder, mend=mend) from error
        raise DataError("there is no exported model here", where=folder, mend="check the path") from error
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read ({error})", where=path, mend=AGAIN) from error
    check_format(about, FORMAT, what="the exported model", where=path, mend=AGAIN)
    return dict(about)


def _list_of(values: Any, kind: type) -> list[Any]:
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise TypeError(f"a list of {kind.__name__} was expected")
    return values


def _content(path: Path, digest: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror})", where=path, mend=AGAIN) from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise DataError("the file is not the one that was exported", where=path, mend=f"restore it, or {AGAIN}")
    return content


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
