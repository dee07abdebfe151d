"""The messages of the Open Inference Protocol, version 2: requests are validated before they are used."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import orjson

from ultr.errors import UltrError
from ultr.serving.exported import EXPECTED, INPUT, OUTPUT

DATATYPES: dict[str, np.dtype[Any]] = {"FP32": np.dtype("<f4"), "FP64": np.dtype("<f8"), "FP16": np.dtype("<f2")}
OUTPUTS = {OUTPUT: "FP32", EXPECTED: "FP64"}  # scores that differ in single precision have expectations that differ
EXPECTED_AT = "expected_at"  # the parameter that asks for expected feedback at a position
LONGEST_ID = 1024
LONGEST_NUMBER = 26  # characters of a number in JSON, such as -1.7976931348623157e+308, and of a separator
SPARE_BYTES = 1 << 16  # bytes of a body for everything except the data
SPARE_TOKENS = 1000  # tokens of JSON for everything except the data


class RequestError(UltrError):
    """An error that a request gets as its answer, with an HTTP status."""

    def __init__(
        self,
        what: str,
        *,
        status: int = 400,
        got: object = None,
        hint: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(what, got=got, hint=hint)
        self.status, self.headers = status, headers


@dataclass(frozen=True)
class Limits:
    """The limits of a request."""

    features: int  # the number of features of each row
    rows: int  # the largest number of rows
    missing: bool  # True if null is allowed as a missing value

    @property
    def body(self) -> int:
        """The largest number of bytes in a body: that of a request in JSON."""
        return SPARE_BYTES + self.rows * self.features * LONGEST_NUMBER


@dataclass(frozen=True, eq=False)
class ScoreRequest:
    """A request for scores."""

    features: np.ndarray  # float32 [rows, features]
    shape: tuple[int, ...]  # the shape of the scores
    id: str | None
    binary: bool  # True if the client wants the scores in binary
    expected_at: str | None = None  # the position whose expected feedback the client wants too; empty: the first


def read_request(body: bytes, json_length: str | None, limits: Limits) -> ScoreRequest:
    """Read a request from a body; `json_length` is the header that says how many of its bytes are JSON, if any."""
    text, binary = _split(body, json_length)
    content = _parse(text, limits)
    tensor = _only_tensor(content.get("inputs"), "inputs", INPUT)
    shape, datatype = _shape(tensor.get("shape"), limits), _datatype(tensor.get("datatype"))
    size = _parameter(tensor, "binary_data_size", int, f"input '{INPUT}'")
    if size is not None:
        if "data" in tensor:
            raise RequestError("the input has data in JSON and in binary", hint="remove data or binary_data_size")
        if size != len(binary):
            what = "binary_data_size is not the number of bytes after the JSON"
            raise RequestError(what, got=f"{size} for {len(binary)} bytes", hint="send all of the data, and its length")
        numbers = _binary_numbers(binary, shape, datatype)
    elif len(binary):
        hint = "send its length as the parameter binary_data_size of the input"
        raise RequestError("the body has binary data that belongs to no input", got=f"{len(binary)} bytes", hint=hint)
    else:
        numbers = _json_numbers(tensor.get("data"), shape, limits)
    request = _score_request(numbers, shape, content.get("id"), _wants_binary(content))
    position = (content.get("parameters") or {}).get(EXPECTED_AT)
    if position is not None and type(position) not in (int, str):
        what, hint = f"parameter '{EXPECTED_AT}' must be a position", "send a number or a text, or '' for the first"
        raise RequestError(what, got=_brief(position), hint=hint)
    return request if position is None else replace(request, expected_at=str(position))


def score_request(
    data: bytes | np.ndarray, shape: list[int], datatype: str, request_id: str | None, *, binary: bool, limits: Limits
) -> ScoreRequest:
    """Make a request from the data of a gRPC message: raw bytes, or an array of numbers."""
    checked = _shape(shape, limits)
    if isinstance(data, bytes):
        return _score_request(_binary_numbers(data, checked, _datatype(datatype)), checked, request_id, binary)
    if _datatype(datatype) == "FP16":
        raise RequestError("numbers of FP16 have no typed contents", hint="send them in raw_input_contents")
    if data.size != math.prod(checked):
        hint = "send as many numbers as the shape has"
        what = f"the data does not fill the shape of {math.prod(checked)} numbers"
        raise RequestError(what, got=data.size, hint=hint)
    return _score_request(data, checked, request_id, binary)


def _score_request(numbers: np.ndarray, shape: tuple[int, ...], request_id: Any, binary: bool) -> ScoreRequest:
    with np.errstate(
        over="ignore"
    ):  # numbers too large for float32 become infinite, and the model's check rejects them
        features = np.require(numbers.reshape(-1, shape[-1]), np.float32, ["C", "A"])
    if request_id is not None and (not isinstance(request_id, str) or len(request_id) > LONGEST_ID):
        hint = f"send at most {LONGEST_ID} characters"
        raise RequestError("the id must be a short string", got=_brief(request_id), hint=hint)
    return ScoreRequest(features, shape[:-1], request_id, binary)


def write_answer(
    request: ScoreRequest, outputs: Mapping[str, np.ndarray], *, name: str, version: str
) -> tuple[bytes, int | None]:
    """Return the body of an answer, and the number of its bytes that are JSON if the outputs are in binary."""
    tensors = [{"name": output, "datatype": OUTPUTS[output], "shape": request.shape} for output in outputs]
    answer: dict[str, Any] = {"model_name": name, "model_version": version}
    if request.id is not None:
        answer["id"] = request.id
    numbers = [np.ascontiguousarray(values, DATATYPES[OUTPUTS[output]]) for output, values in outputs.items()]
    if not request.binary:
        answer["outputs"] = [{**tensor, "data": values} for tensor, values in zip(tensors, numbers, strict=True)]
        return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY), None
    sizes = ({"parameters": {"binary_data_size": values.nbytes}} for values in numbers)
    answer["outputs"] = [{**tensor, **size} for tensor, size in zip(tensors, sizes, strict=True)]
    text = orjson.dumps(answer)
    return b"".join([text, *(values.tobytes() for values in numbers)]), len(text)


def _split(body: bytes, json_length: str | None) -> tuple[bytes, memoryview]:
    """Return the JSON of a body, and the bytes after it."""
    if json_length is None:
        return body, memoryview(b"")
    hint = "send the number of bytes of its JSON"
    if not re.fullmatch("[0-9]{1,15}", json_length):
        raise RequestError("Inference-Header-Content-Length must be a number", got=_brief(json_length), hint=hint)
    length = int(json_length)
    if length > len(body):
        what = "Inference-Header-Content-Length is larger than the body"
        raise RequestError(what, got=f"{length} of {len(body)} bytes", hint=hint)
    if SPARE_BYTES < length < len(body):
        hint = f"send at most {SPARE_BYTES} bytes"
        raise RequestError("the JSON before the binary data is too long", got=f"{length} bytes", hint=hint)
    return body[:length], memoryview(body)[length:]


def _parse(text: bytes, limits: Limits) -> Mapping[str, Any]:
    """Parse JSON, after a check of its number of tokens: parsed values take far more memory than their text."""
    most = {b"[": 2 * limits.rows, b"{": 0, b'"': 0, b",": limits.rows * (limits.features + 2)}
    for token, number in most.items():
        if text.count(token) > number + SPARE_TOKENS:
            hint = f"send at most {limits.rows} rows of {limits.features} features"
            raise RequestError(f"the JSON has too many '{token.decode()}'", hint=hint)
    try:
        content = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        hint = "send JSON, and the header Inference-Header-Content-Length if binary data follows"
        raise RequestError(f"the request is not JSON ({str(error)[:200]})", hint=hint) from error
    if not isinstance(content, dict):
        raise RequestError("the request must be a JSON object", got=_brief(content), hint='send {"inputs": [...]}')
    return content


def _only_tensor(tensors: Any, what: str, name: str) -> dict[str, Any]:
    """Return the only tensor of a list, after a check of its name."""
    hint = f"send one tensor named '{name}'"
    if not isinstance(tensors, list) or not all(isinstance(tensor, dict) for tensor in tensors):
        raise RequestError(f"{what} must be a list of tensors", got=_brief(tensors), hint=hint)
    if len(tensors) != 1:
        raise RequestError(f"{what} must have one tensor", got=len(tensors), hint=hint)
    tensor: dict[str, Any] = tensors[0]
    if tensor.get("name") != name:
        raise RequestError(f"{what} has a tensor of another name", got=_brief(tensor.get("name")), hint=hint)
    return tensor


def _shape(shape: Any, limits: Limits) -> tuple[int, ...]:
    hint = f"send [items, {limits.features}] or [requests, items, {limits.features}]"
    if not isinstance(shape, list) or not all(type(size) is int for size in shape) or len(shape) not in (2, 3):
        raise RequestError(f"the shape of '{INPUT}' must be two or three whole numbers", got=_brief(shape), hint=hint)
    if min(shape) < 0 or shape[-1] != limits.features:
        raise RequestError(f"the shape of '{INPUT}' does not fit the model", got=_brief(shape), hint=hint)
    if max(shape[:-1]) > limits.rows or math.prod(shape[:-1]) > limits.rows:
        hint = f"send at most {limits.rows} rows at a time, or start the server with a larger --max-rows"
        raise RequestError("there are too many rows in one request", status=413, got=_brief(shape), hint=hint)
    return tuple(shape)


def _datatype(datatype: Any) -> str:
    if not isinstance(datatype, str) or datatype not in DATATYPES:
        what = f"the datatype of '{INPUT}' is not supported"
        raise RequestError(what, got=_brief(datatype), hint=f"send {', '.join(DATATYPES)}")
    return datatype


def _binary_numbers(data: bytes | memoryview, shape: tuple[int, ...], datatype: str) -> np.ndarray:
    dtype = DATATYPES[datatype]
    if len(data) != (size := math.prod(shape) * dtype.itemsize):
        hint = f"send {dtype.itemsize} bytes for each number, little-endian"
        raise RequestError(f"the data does not fill the shape, which needs {size} bytes", got=len(data), hint=hint)
    return np.frombuffer(data, dtype)


def _json_numbers(data: Any, shape: tuple[int, ...], limits: Limits) -> np.ndarray:
    """Return the numbers of a flat list, or of a list that is nested like the shape."""
    if not isinstance(data, list):
        raise RequestError("data must be a list of numbers", got=_brief(data), hint="send it in JSON or in binary")
    if data and isinstance(data[0], list):
        fits = len(data) == shape[0]
        for size in shape[1:]:
            fits = fits and all(type(part) is list and len(part) == size for part in data)
            if not fits:
                raise RequestError(
                    "nested data does not fit the shape", hint=f"nest it as {list(shape)}, or flatten it"
                )
            data = list(chain.from_iterable(data))
    if len(data) != math.prod(shape):
        hint = "send as many numbers as the shape has"
        raise RequestError(f"the data does not fill the shape of {math.prod(shape)} numbers", got=len(data), hint=hint)
    if not set(map(type, data)) <= ({int, float, type(None)} if limits.missing else {int, float}):
        invalid = next(value for value in data if type(value) not in (int, float))
        hint = "send numbers, and null for a missing value" if limits.missing else "send a number for every feature"
        if isinstance(invalid, str):
            hint = "send a category as its code: its place in the vocabulary of model.json, counted from 1, or 0"
        raise RequestError("data must be numbers", got=_brief(invalid), hint=hint)
    return np.array(data, np.float64)


def _wants_binary(content: Mapping[str, Any]) -> bool:
    """Return True if the request asks for scores in binary: for this output, or for all outputs."""
    for_all = bool(_parameter(content, "binary_data_output", bool, "the request", only=False))
    outputs = content.get("outputs")
    if outputs is None or outputs == []:
        return for_all
    for_output = _parameter(_only_tensor(outputs, "outputs", OUTPUT), "binary_data", bool, f"output '{OUTPUT}'")
    return for_all if for_output is None else bool(for_output)


def _parameter(holder: Mapping[str, Any], name: str, kind: type, where: str, *, only: bool = True) -> Any:
    """Return a parameter of a request or tensor, or None; `only` makes other parameters an error."""
    parameters = holder.get("parameters")
    if parameters is None:
        return None
    if not isinstance(parameters, dict):
        raise RequestError(f"parameters of {where} must be an object", got=_brief(parameters))
    if only and (unknown := sorted(parameters.keys() - {name})):
        raise RequestError(f"{where} has unknown parameters", got=_brief(unknown), hint=f"send only '{name}'")
    value = parameters.get(name)
    if value is not None and type(value) is not kind:
        raise RequestError(f"parameter '{name}' of {where} must be of type {kind.__name__}", got=_brief(value))
    return value


def _brief(value: Any) -> str:
    """Return a short representation of any value."""
    return reprlib.repr(value)
