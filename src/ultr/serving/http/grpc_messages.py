"""The messages of the Open Inference Protocol over gRPC.

Their classes are made here from a table, with protobuf itself, so that no generated code depends on its version. The
names, numbers and types are those of open_inference_grpc.proto; fields that the server does not use are left out.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

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
    "InferTensorContents": {"fp32_contents": (6, "repeated float"), "fp64_contents": (7, "repeated double")},
    "InferTensor": {**_TENSOR, "contents": (5, "InferTensorContents")},
    "InferRequestedOutputTensor": {"name": (1, "string")},
    "ModelInferRequest": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
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
    pool = (
        descriptor_pool.DescriptorPool()
    )  # its own, because other packages may have added the same names to the default
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in _FIELDS}


MESSAGES: dict[str, Any] = _classes()  # name -> class
