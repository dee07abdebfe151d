"""The Open Inference Protocol, version 2, over HTTP: a request checked before anything is made of it; its answer."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import orjson

from ultr.errors import UltrError
from ultr.exported import INPUT, OUTPUT

DATATYPES: dict[str, np.dtype[Any]] = {"FP32": np.dtype("<f4"), "FP64": np.dtype("<f8"), "FP16": np.dtype("<f2")}
LONGEST_ID = 1024
LONGEST_NUMBER = 26  # characters of JSON: -1.7976931348623157e+308, and what stands between two
SPARE_BYTES = 1 << 16  # of a body, for all that is not data
SPARE_TOKENS = 1000  # of JSON, likewise


class RequestError(UltrError):
    """A request that is not answered, and the HTTP status that says so."""

    def __init__(
        self,
        what: str,
        *,
        status: int = 400,
        got: object = None,
        mend: str | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(what, got=got, mend=mend)
        self.status, self.headers = status, headers


@dataclass(frozen=True)
class Limits:
    """What a model takes: so many features, and a request so many rows."""

    features: int
    rows: int
    missing: bool  # whether null is a value like others

    @property
    def body(self) -> int:
        """Bytes of the longest request, which is one of JSON."""
        return SPARE_BYTES + self.rows * self.features * LONGEST_NUMBER


@dataclass(frozen=True, eq=False)
class Question:
    """Features to score, and how the answer is wanted."""

    features: np.ndarray  # [rows, features] of float32
    shape: tuple[int, ...]  # of the scores
    id: str | None
    binary: bool


def read_question(body: bytes, header: bytes | None, limits: Limits) -> Question:
    """What a body asks for; `header` says how much of it is JSON, where tensors follow in binary."""
    text, rest = _split(body, header)
    asked = _parsed(text, limits)
    given = _one(asked.get("inputs"), "inputs", INPUT)
    shape = _shape(given.get("shape"), limits)
    kind = given.get("datatype")
    if not isinstance(kind, str) or kind not in DATATYPES:
        raise RequestError(
            f"the datatype of '{INPUT}' is not taken", got=_shown(kind), mend=f"send {', '.join(DATATYPES)}"
        )
    size = _parameter(given, "binary_data_size", int, f"input '{INPUT}'")
    if size is not None:
        if "data" in given:
            raise RequestError("data is given as JSON and in binary", mend="leave out data or binary_data_size")
        numbers = _binary(rest, size, math.prod(shape), DATATYPES[kind])
    elif len(rest):
        mend = "give its length as the parameter binary_data_size of the input"
        raise RequestError("there is binary data that no input lays claim to", got=f"{len(rest)} bytes", mend=mend)
    else:
        numbers = _numbers(given.get("data"), shape, limits)
    with np.errstate(over="ignore"):  # what float32 cannot hold is infinite, and refused as that
        features = np.require(numbers.reshape(-1, shape[-1]), np.float32, ["C", "A"])
    name = asked.get("id")
    if name is not None and (not isinstance(name, str) or len(name) > LONGEST_ID):
        raise RequestError(
            "the id should be a short text", got=_shown(name), mend=f"send {LONGEST_ID} characters at most"
        )
    return Question(features, shape[:-1], name, _wants_binary(asked))


def write_answer(question: Question, scores: np.ndarray, *, name: str, version: str) -> tuple[bytes, int | None]:
    """The body of an answer, and how much of it is JSON where the rest is binary."""
    output: dict[str, Any] = {"name": OUTPUT, "datatype": "FP32", "shape": question.shape}
    answer: dict[str, Any] = {"model_name": name, "model_version": version}
    if question.id is not None:
        answer["id"] = question.id
    scores = np.ascontiguousarray(scores, "<f4")
    if not question.binary:
        return orjson.dumps(
            {**answer, "outputs": [{**output, "data": scores}]}, option=orjson.OPT_SERIALIZE_NUMPY
        ), None
    text = orjson.dumps({**answer, "outputs": [{**output, "parameters": {"binary_data_size": scores.nbytes}}]})
    return text + scores.tobytes(), len(text)


def _split(body: bytes, header: bytes | None) -> tuple[bytes, memoryview]:
    """The JSON of a body and what follows it."""
    if header is None:
        return body, memoryview(b"")
    mend = "send the number of bytes of its JSON"
    if not re.fullmatch(rb"[0-9]{1,15}", header):
        raise RequestError("Inference-Header-Content-Length should be a number", got=_shown(header), mend=mend)
    length = int(header)
    if length > len(body):
        what = "Inference-Header-Content-Length is more than the body has"
        raise RequestError(what, got=f"{length} of {len(body)} bytes", mend=mend)
    if length > SPARE_BYTES and length < len(body):
        raise RequestError("the JSON before binary data is too long", got=f"{length} bytes", mend=f"send {SPARE_BYTES}")
    return body[:length], memoryview(body)[length:]


def _parsed(text: bytes, limits: Limits) -> Mapping[str, Any]:
    """JSON as it is, if it has no more parts than a request can have: parts take far more memory than their text."""
    most = {b"[": 2 * limits.rows, b"{": 0, b'"': 0, b",": limits.rows * (limits.features + 2)}
    for token, number in most.items():
        if text.count(token) > number + SPARE_TOKENS:
            mend = f"send {limits.rows} rows of {limits.features} features at most"
            raise RequestError(f"the JSON has more '{token.decode()}' than a request can have", mend=mend)
    try:
        asked = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        mend = "send JSON, or Inference-Header-Content-Length where binary data follows it"
        raise RequestError(f"the request is no JSON ({str(error)[:200]})", mend=mend) from error
    if not isinstance(asked, dict):
        raise RequestError("the request should be a JSON object", got=_shown(asked), mend='send {"inputs": [...]}')
    return asked


def _one(tensors: Any, what: str, name: str) -> Mapping[str, Any]:
    """The only tensor of a list of them, which has the name it should have."""
    mend = f"send one, named '{name}'"
    if not isinstance(tensors, list) or not all(isinstance(tensor, dict) for tensor in tensors):
        raise RequestError(f"{what} should be a list of tensors", got=_shown(tensors), mend=mend)
    if len(tensors) != 1:
        raise RequestError(f"{what} should have one tensor", got=len(tensors), mend=mend)
    if tensors[0].get("name") != name:
        raise RequestError(f"there is no such tensor among {what}", got=_shown(tensors[0].get("name")), mend=mend)
    found: Mapping[str, Any] = tensors[0]
    return found


def _shape(shape: Any, limits: Limits) -> tuple[int, ...]:
    mend = f"send [items, {limits.features}] or [requests, items, {limits.features}]"
    if not isinstance(shape, list) or not all(type(size) is int for size in shape) or len(shape) not in (2, 3):
        raise RequestError(f"the shape of '{INPUT}' should be two or three whole numbers", got=_shown(shape), mend=mend)
    if min(shape) < 0 or shape[-1] != limits.features:
        raise RequestError(f"the shape of '{INPUT}' does not fit the model", got=_shown(shape), mend=mend)
    if max(shape[:-1]) > limits.rows or math.prod(shape[:-1]) > limits.rows:
        mend = f"send {limits.rows} at a time, or start the server with more --max-rows"
        raise RequestError("there are too many rows in one request", status=413, got=_shown(shape), mend=mend)
    return tuple(shape)


def _binary(rest: memoryview, size: int, count: int, kind: np.dtype[Any]) -> np.ndarray:
    if size != len(rest):
        what = "binary_data_size is not what follows the JSON"
        raise RequestError(what, got=f"{size} for {len(rest)} bytes", mend="send all of the data, and its length")
    if size != count * kind.itemsize:
        what = f"the data does not fill the shape, which takes {count * kind.itemsize} bytes"
        raise RequestError(what, got=size, mend=f"send {kind.itemsize} bytes for each number, little-endian")
    return np.frombuffer(rest, kind)


def _numbers(data: Any, shape: tuple[int, ...], limits: Limits) -> np.ndarray:
    """Numbers of JSON, in one list or nested as the shape is."""
    if not isinstance(data, list):
        raise RequestError("data should be a list of numbers", got=_shown(data), mend="send it in JSON or in binary")
    if data and isinstance(data[0], list):
        fits = len(data) == shape[0]
        for size in shape[1:]:
            fits = fits and all(type(part) is list and len(part) == size for part in data)
            if not fits:
                raise RequestError(
                    "nested data does not fit the shape", mend=f"nest it as {list(shape)}, or not at all"
                )
            data = list(chain.from_iterable(data))
    if len(data) != math.prod(shape):
        mend = "send as many numbers as the shape has"
        raise RequestError(f"the data does not fill the shape, of {math.prod(shape)}", got=len(data), mend=mend)
    kinds = set(map(type, data))
    if not kinds <= ({int, float, type(None)} if limits.missing else {int, float}):
        odd = next(value for value in data if type(value) not in (int, float))
        mend = "send numbers" + (
            ", and null for what is missing" if limits.missing else "; this model needs all of them"
        )
        raise RequestError("data should be numbers", got=_shown(odd), mend=mend)
    return np.array(data, np.float64)


def _wants_binary(asked: Mapping[str, Any]) -> bool:
    """Whether the scores are to be sent in binary: asked for of the output, or of all outputs."""
    binary = bool(_parameter(asked, "binary_data_output", bool, "the request", only=False))
    outputs = asked.get("outputs")
    if outputs is None or outputs == []:
        return binary
    own = _parameter(_one(outputs, "outputs", OUTPUT), "binary_data", bool, f"output '{OUTPUT}'")
    return binary if own is None else bool(own)


def _parameter(holder: Mapping[str, Any], name: str, kind: type, where: str, *, only: bool = True) -> Any:
    """A parameter of a request or tensor, if given; of a tensor there are no others."""
    parameters = holder.get("parameters")
    if parameters is None:
        return None
    if not isinstance(parameters, dict):
        raise RequestError(f"parameters of {where} should be an object", got=_shown(parameters))
    if only and parameters.keys() - {name}:
        got = _shown(sorted(parameters.keys() - {name}))
        raise RequestError(f"parameters of {where} that are not known", got=got, mend=f"'{name}' is the only one")
    value = parameters.get(name)
    if value is not None and type(value) is not kind:
        raise RequestError(f"parameter '{name}' of {where} should be of type {kind.__name__}", got=_shown(value))
    return value


def _shown(value: Any) -> str:
    """A value as a message can show it: short, whatever it is."""
    return reprlib.repr(value)
