"""The gRPC server of the Open Inference Protocol, next to the HTTP server in the same event loop."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import numpy as np
import orjson
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from ultr._version import __version__
from ultr.serving.exported import INPUT, OUTPUT
from ultr.serving.http.app import MOST_WAITING, App
from ultr.serving.http.served import Scorer
from ultr.serving.http.wire import (
    DATATYPES,
    EXPECTED_AT,
    OUTPUTS,
    SPARE_BYTES,
    Limits,
    RequestError,
    ScoreRequest,
    score_request,
)

# --- Messages ---------------------------------------------------------------------------------------------------------
# The messages of the Open Inference Protocol over gRPC.
#
# Their classes are made here from a table, with protobuf itself, so that no generated code depends on its version. The
# names, numbers and types are those of open_inference_grpc.proto; fields that the server does not use are left out.

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"
CONTENTS = {"FP32": "fp32_contents", "FP64": "fp64_contents"}  # datatype -> field of InferTensorContents

_MODEL = {"name": (1, "string"), "version": (2, "string")}
_TENSOR = {"name": (1, "string"), "datatype": (2, "string"), "shape": (3, "repeated int64")}
_FIELDS: dict[str, dict[str, tuple[int, str]]] = {
    "ServerLiveRequest": {},
    "ServerLiveResponse": {"live": (1, "bool")},
    "ServerReadyRequest": {},
    "ServerReadyResponse": {"ready": (1, "bool")},
    "ModelReadyRequest": _MODEL,
    "ModelReadyResponse": {"ready": (1, "bool")},
    "ServerMetadataRequest": {},
    "ServerMetadataResponse": {**_MODEL, "extensions": (3, "repeated string")},
    "ModelMetadataRequest": _MODEL,
    "TensorMetadata": _TENSOR,
    "Property": {"key": (1, "string"), "value": (2, "string")},  # an entry of the map `properties`
    "ModelMetadataResponse": {
        "name": (1, "string"),
        "versions": (2, "repeated string"),
        "platform": (3, "string"),
        "inputs": (4, "repeated TensorMetadata"),
        "outputs": (5, "repeated TensorMetadata"),
        "properties": (6, "repeated Property"),
    },
    "InferParameter": {"int64_param": (2, "int64"), "string_param": (3, "string")},
    "Parameter": {"key": (1, "string"), "value": (2, "InferParameter")},  # an entry of the map `parameters`
    "InferTensorContents": {"fp32_contents": (6, "repeated float"), "fp64_contents": (7, "repeated double")},
    "InferTensor": {**_TENSOR, "contents": (5, "InferTensorContents")},
    "InferRequestedOutputTensor": {"name": (1, "string")},
    "ModelInferRequest": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "parameters": (4, "repeated Parameter"),
        "inputs": (5, "repeated InferTensor"),
        "outputs": (6, "repeated InferRequestedOutputTensor"),
        "raw_input_contents": (7, "repeated bytes"),
    },
    "ModelInferResponse": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "outputs": (5, "repeated InferTensor"),
        "raw_output_contents": (6, "repeated bytes"),
    },
}


def _classes() -> dict[str, Any]:
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="open_inference.proto", package=PACKAGE, syntax="proto3")
    for message, fields in _FIELDS.items():
        described = file.message_type.add(name=message)
        for name, (number, text) in fields.items():
            label = field.LABEL_REPEATED if text.startswith("repeated ") else field.LABEL_OPTIONAL
            kind = text.removeprefix("repeated ")
            if kind in _FIELDS:
                of = {"type": field.TYPE_MESSAGE, "type_name": f".{PACKAGE}.{kind}"}
            else:
                of = {"type": field.Type.Value(f"TYPE_{kind.upper()}")}
            described.field.add(name=name, number=number, label=label, **of)
    # This pool is not the default one, because other packages may have added the same names there.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in _FIELDS}


MESSAGES: dict[str, Any] = _classes()  # name -> class


# --- Server -----------------------------------------------------------------------------------------------------------

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    503: grpc.StatusCode.UNAVAILABLE,
}
WITHOUT_TOKEN = ("ServerLive", "ServerReady", "ModelReady")  # the methods of probes
LARGEST_NUMBER = 8  # bytes of a number: FP64
MOST_STREAMS = 256  # requests in progress of one connection

Method = Callable[[Any, int], Awaitable[dict[str, Any]]]  # (request, its bytes) -> the fields of the answer


class GrpcServer:
    """A gRPC server at an address HOST:PORT, which the servers of other workers may use too."""

    def __init__(self, app: App, address: str) -> None:
        self._app = app
        largest = SPARE_BYTES + app.max_rows * len(app.served.scorer.feature_names) * LARGEST_NUMBER
        options = [
            ("grpc.so_reuseport", 1),
            ("grpc.max_receive_message_length", largest),
            ("grpc.max_concurrent_streams", MOST_STREAMS),
        ]
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MOST_WAITING)
        methods: dict[str, Method] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._model_infer,
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(self._handler(name, method)) for name, method in methods.items()
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.port: int = self._server.add_insecure_port(address)

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, seconds: float) -> None:
        """Finish the requests that have started, in at most some seconds."""
        await self._server.stop(seconds)

    def _handler(self, name: str, method: Method) -> Callable[[bytes, Any], Awaitable[bytes]]:
        """Return a function from the bytes of a request to those of its answer."""

        async def handle(request: bytes, context: Any) -> bytes:
            start = time.perf_counter()
            status = 200
            error = None
            try:
                if name not in WITHOUT_TOKEN:
                    self._app.check_token(dict(context.invocation_metadata() or ()).get("authorization"))
                try:
                    message = MESSAGES[f"{name}Request"].FromString(request)
                except DecodeError as wrong:
                    raise RequestError(f"the request is not a {name}Request ({wrong})") from wrong
                content = await method(message, len(request))
                return bytes(MESSAGES[f"{name}Response"](**content).SerializeToString())
            except Exception as raised:
                error = self._app.request_error(raised)
                status = error.status
            finally:
                if name == "ModelInfer":
                    self._app.count(status, time.perf_counter() - start)
            await context.abort(CODES.get(status, grpc.StatusCode.INTERNAL), str(error))
            raise AssertionError  # abort raises

        return handle

    async def _server_live(self, _: Any, _size: int) -> dict[str, Any]:
        return {"live": True}

    async def _server_ready(self, _: Any, _size: int) -> dict[str, Any]:
        return {"ready": not self._app.draining}

    async def _model_ready(self, request: Any, _size: int) -> dict[str, Any]:
        self._app.scorer(request.name, request.version)
        return {"ready": not self._app.draining}

    async def _server_metadata(self, _: Any, _size: int) -> dict[str, Any]:
        return {"name": "ultr", "version": __version__}

    async def _model_metadata(self, request: Any, _size: int) -> dict[str, Any]:
        about = self._app.describe(self._app.scorer(request.name, request.version))
        properties = [{"key": key, "value": orjson.dumps(value)} for key, value in about.pop("parameters").items()]
        return {**about, "properties": properties}

    async def _model_infer(self, request: Any, size: int) -> dict[str, Any]:
        scorer = self._app.scorer(request.model_name, request.model_version)
        with self._app.share() as share:
            share.grow(size)
            return await self._app.run(scorer, size, self._infer, scorer, request)

    def _infer(self, scorer: Scorer, message: Any) -> dict[str, Any]:
        request = read_message(message, self._app.limits(scorer))
        outputs = self._app.outputs(scorer, request)
        tensors: list[dict[str, Any]] = [
            {"name": name, "datatype": OUTPUTS[name], "shape": request.shape} for name in outputs
        ]
        numbers = [np.ascontiguousarray(values, DATATYPES[OUTPUTS[name]]) for name, values in outputs.items()]
        answer = {"model_name": self._app.name, "model_version": scorer.version, "id": request.id or ""}
        if request.binary:
            return {**answer, "outputs": tensors, "raw_output_contents": [values.tobytes() for values in numbers]}
        pairs = zip(tensors, numbers, strict=True)
        contents = [{**tensor, "contents": {CONTENTS[tensor["datatype"]]: values.ravel()}} for tensor, values in pairs]
        return {**answer, "outputs": contents}


def read_message(message: Any, limits: Limits) -> ScoreRequest:
    """Read a ModelInferRequest; an answer has its numbers in the form of the request, raw or typed."""
    if len(message.inputs) != 1 or message.inputs[0].name != INPUT:
        names = [tensor.name[:100] for tensor in message.inputs[:5]]
        raise RequestError("inputs must have one tensor", got=names, hint=f"send one tensor named '{INPUT}'")
    if outputs := [tensor.name[:100] for tensor in message.outputs[:5] if tensor.name != OUTPUT]:
        raise RequestError("outputs has an unknown tensor", got=outputs, hint=f"request '{OUTPUT}', or none")
    tensor, raw = message.inputs[0], message.raw_input_contents
    contents = getattr(tensor.contents, CONTENTS.get(tensor.datatype, ""), ())
    if len(raw) > 1 or (len(raw) == 1 and tensor.HasField("contents")):
        what = "the input has data more than once"
        raise RequestError(what, hint="send raw_input_contents with one element, or contents")
    data = raw[0] if raw else np.array(contents, np.float64)
    found = score_request(
        data, list(tensor.shape), tensor.datatype, message.id or None, binary=bool(raw), limits=limits
    )
    return replace(found, expected_at=_expected_at(message))


def _expected_at(message: Any) -> str | None:
    """Return the parameter that asks for expected feedback at a position, as text; None if there is none."""
    values = [parameter.value for parameter in message.parameters if parameter.key == EXPECTED_AT]
    return None if not values else values[-1].string_param or str(values[-1].int64_param or "")
