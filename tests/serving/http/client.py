"""Requests to a server, and a client that calls an application without a socket."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
import orjson

from ultr.serving.http.app import App

NUMBERS, SHOPS = 4, ("x", "y", "z")
FEATURES = NUMBERS + 1  # the last is a category
MAX_ROWS = 500
INFER = "/v2/models/ranker/infer"


def rows(*shape: int, seed: int = 0) -> np.ndarray:
    """Return random features for the models."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(*shape, FEATURES)).astype(np.float32)
    features[..., -1] = rng.integers(0, len(SHOPS) + 1, shape)
    return features


def tensor(features: np.ndarray, datatype: str = "FP32", **other: object) -> dict[str, object]:
    return {"name": "features", "shape": list(features.shape), "datatype": datatype, **other}


def json_body(features: np.ndarray, **other: object) -> bytes:
    return orjson.dumps({"inputs": [tensor(features, data=features.ravel().tolist())], **other})


def binary_body(features: np.ndarray, **other: object) -> tuple[bytes, dict[str, str]]:
    """Return a body with features in binary that asks for scores in binary, and its headers."""
    features_tensor = tensor(features, parameters={"binary_data_size": features.nbytes})
    text = orjson.dumps({"inputs": [features_tensor], "parameters": {"binary_data_output": True}, **other})
    return text + features.tobytes(), {"Inference-Header-Content-Length": str(len(text))}


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return orjson.loads(self.body)

    @property
    def scores(self) -> np.ndarray:
        length = self.headers.get("inference-header-content-length")
        if length is None:
            output = self.json["outputs"][0]
            return np.array(output["data"], np.float32).reshape(output["shape"])
        output = orjson.loads(self.body[: int(length)])["outputs"][0]
        return np.frombuffer(self.body[int(length) :], "<f4").reshape(output["shape"])


async def fetch_async(app: App, method: str, path: str, body: bytes = b"", headers=(), *, parts: int = 1) -> Answer:
    """Return the answer of an application; the body arrives in `parts` parts."""
    pairs = headers.items() if isinstance(headers, dict) else headers
    sent: list[dict] = []
    cut = max(1, -(-len(body) // parts))
    messages = [
        {"type": "http.request", "body": body[i : i + cut], "more_body": i + cut < len(body)}
        for i in range(0, max(1, len(body)), cut)
    ]

    async def receive():
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in pairs],
    }
    await app(scope, receive, send)
    head, content = sent
    answer_headers = {k.decode(): v.decode() for k, v in head["headers"]}
    assert int(answer_headers["content-length"]) == len(content["body"])
    return Answer(head["status"], answer_headers, content["body"])


def fetch(app: App, *args, **options) -> Answer:
    return asyncio.run(fetch_async(app, *args, **options))
