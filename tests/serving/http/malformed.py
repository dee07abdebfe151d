"""Malformed requests, drawn from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from serving.http.client import FEATURES, INFER, MAX_ROWS, SHOPS, rows, tensor

ODD = (None, True, -1, 0.5, 2**40, 2**63, "x", "", [], {}, [[]], [None], {"a": 1}, 1e300, "😀" * 5, [1] * 50)


class Request(NamedTuple):
    kind: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    method: str = "POST"
    path: str = INFER


def _text(content: Any) -> bytes:
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def _valid(rng: random.Random) -> tuple[dict[str, Any], np.ndarray]:
    shape = rng.choice([(1,), (3,), (2, 3)])
    features = rows(*shape, seed=rng.randrange(1000))
    return {"inputs": [tensor(features, data=features.ravel().tolist())]}, features


def odd_shape(rng: random.Random) -> Request:
    content, features = _valid(rng)
    n = features.size // FEATURES
    content["inputs"][0]["shape"] = rng.choice(
        [
            [n + 1, FEATURES],
            [n, FEATURES + rng.randint(1, 9)],
            [n, FEATURES - 1],
            [-n, FEATURES],
            [-1, FEATURES],
            [n, float(FEATURES)],
            [float(n), FEATURES],
            [True, FEATURES],
            [str(n), FEATURES],
            [2**40, FEATURES],
            [2**62, 2**62, FEATURES],
            [2**32, 0, FEATURES],
            [MAX_ROWS + 1, FEATURES],
            [n * FEATURES],
            [1, 1, n, FEATURES],
            [[n], FEATURES],
            [n, None],
            [FEATURES, n + FEATURES],
            *(value for value in ODD),
        ]
    )
    return Request("shape", _text(content))


def odd_field(rng: random.Random) -> Request:
    content, _ = _valid(rng)
    field = rng.choice(["name", "datatype", "data", "parameters"])
    allowed = (None, {}) if field == "parameters" else ()
    content["inputs"][0][field] = rng.choice([value for value in ODD if value not in allowed])
    if rng.random() < 0.3:
        del content["inputs"][0][rng.choice(["name", "datatype", "data", "shape"])]
    return Request(field, _text(content))


def odd_datatype(rng: random.Random) -> Request:
    content, _ = _valid(rng)
    content["inputs"][0]["datatype"] = rng.choice(["BYTES", "INT32", "INT64", "UINT8", "BOOL", "BF16", "fp32", "FP32 "])
    return Request("datatype", _text(content))


def odd_data(rng: random.Random) -> Request:
    content, features = _valid(rng)
    data = content["inputs"][0]["data"]
    how = rng.randrange(6)
    place = rng.randrange(len(data))
    if how == 0:
        data[place] = rng.choice(["1", "nan", True, False, [1.0], {}, 1e39, -1e300])
    elif how == 1:
        del data[place]
    elif how == 2:
        data.append(1.0)
    elif how == 3:
        nested = features.tolist()
        nested[rng.randrange(len(nested))] = rng.choice([[], [1.0], 1.0, None, nested[0] + [1.0]])
        content["inputs"][0]["data"] = nested
    elif how == 4:
        place = FEATURES * rng.randrange(features.size // FEATURES) + FEATURES - 1
        data[place] = rng.choice([-1, 0.5, len(SHOPS) + 1, 1e9])  # not a code of a category
    else:
        text = _text(content).decode()
        odd = rng.choice(["NaN", "Infinity", "-Infinity", "1e400", "0x1", "01", "+1", ".5", "1.", "--1", "1_0"])
        return Request("literal", text.replace('"data":[', f'"data":[{odd},', 1).encode())
    return Request("data", _text(content))


def odd_parts(rng: random.Random) -> Request:
    content, _ = _valid(rng)
    how = rng.randrange(5)
    if how == 0:
        content["inputs"] = rng.choice([*ODD, content["inputs"] * 2, [*content["inputs"], {"name": "other"}]])
    elif how == 1:
        odd = (
            [{"name": "other"}],
            [{}],
            [{"name": "scores"}] * 2,
            [{"name": "scores", "parameters": {"binary_data": 1}}],
        )
        content["outputs"] = rng.choice([*(v for v in ODD if v not in (None, [])), *odd])
    elif how == 2:
        content["id"] = rng.choice([*(v for v in ODD if v is not None and not isinstance(v, str)), "i" * 2000])
    elif how == 3:
        named = [{"binary_data_output": v} for v in ODD if v not in (None, True)]
        content["parameters"] = rng.choice([*(v for v in ODD if v is not None and not isinstance(v, dict)), *named])
    else:
        return Request("top", _text(rng.choice([v for v in ODD if v != content])))
    return Request("parts", _text(content))


def odd_binary(rng: random.Random) -> Request:
    features = rows(rng.randint(1, 4), seed=rng.randrange(1000))
    size: Any = features.nbytes
    payload = features.tobytes()
    length = None
    how = rng.randrange(7)
    if how == 0:
        size = rng.choice([size + 1, size - 4, 0, -size, 2**50, 2**70, float(size), str(size), True, [size]])
    elif how == 1:
        payload = payload[: rng.randrange(len(payload))]
    elif how == 2:
        payload += rng.randbytes(rng.randint(1, 50))
    elif how == 3:
        features = features.copy()
        features[0, rng.randrange(FEATURES)] = rng.choice([np.inf, -np.inf])
        payload = features.tobytes()
    elif how == 4:
        length = rng.choice(["", "-1", "abc", "1e2", "0", "1", "99999999", "9" * 40, "+5", "٣", "5 5", "0x10"])
        length = length.encode().decode("latin-1")
    features_tensor: dict[str, Any] = tensor(features, parameters={"binary_data_size": size})
    if how == 5:
        features_tensor["data"] = features.ravel().tolist()
    if how == 6:
        features_tensor["parameters"] = rng.choice(
            [{}, {"shared_memory_region": "x"}, {"binary_data_size": size, "more": 1}]
        )
    text = _text({"inputs": [features_tensor]})
    return Request(
        "binary", text + payload, (("Inference-Header-Content-Length", str(len(text)) if length is None else length),)
    )


def odd_bytes(rng: random.Random) -> Request:
    content, _ = _valid(rng)
    text = _text(content)
    deep = rng.choice([2000, 100_000])
    body = rng.choice(
        [
            lambda: rng.randbytes(rng.randint(0, 200)),
            lambda: text[: rng.randrange(len(text))],
            lambda: text + rng.choice([b"}", b"[", b"x", b"\0", text]),
            lambda: b"[" * deep + rng.choice([b"", b"]" * deep]),
            lambda: b'{"inputs":' * deep,
            lambda: b"[" + b"[]," * 5000 + b"[]]",
            lambda: b"[" + b'"ab",' * 5000 + b'""]',
            lambda: b'{"inputs":[' + b"1," * 20_000 + b"1]}",
            lambda: text.decode().encode("utf-16"),
            lambda: b"\xef\xbb\xbf" + text,
            lambda: text.replace(b'"FP32"', b'"FP32\xff"'),
        ]
    )()
    return Request("bytes", body)


def odd_headers(rng: random.Random) -> Request:
    content, _ = _valid(rng)
    text = _text(content)
    headers = rng.choice(
        [
            (
                (
                    "Content-Type",
                    rng.choice(["text/plain", "application/x-www-form-urlencoded", "*/*", "\xff\xfe", "json"]),
                ),
            ),
            (("Content-Encoding", rng.choice(["gzip", "deflate", "br", "identity, gzip"])),),
            (("Inference-Header-Content-Length", "3"), ("Inference-Header-Content-Length", str(len(text)))),
            (("Content-Type", "application/json"), ("Content-Type", "application/json")),
        ]
    )
    return Request("headers", text, headers)


def odd_path(rng: random.Random) -> Request:
    content, _ = _valid(rng)
    path = rng.choice(
        [
            "/v2/models/other/infer",
            "/v2/models/ranker/versions/0/infer",
            "/v2/models/ranker/infer/",
            "/v2/models//infer",
            "/v2/repository/models/ranker/unload",
            "/v2/repository/models/ranker/load",
            "/v1/models/ranker:predict",
            "/v2/models/ranker/generate",
            "/docs",
            "/openapi.json",
            "/",
            "//",
            "/v2/models/../ranker/infer",
            "/" + "a" * 3000,
            "/v2/models/" + "é" * 20 + "/infer",
        ]
    )
    if rng.random() < 0.5:
        paths = ["/v2", INFER, "/v2/health/live", "/v2/health/ready", "/metrics", "/v2/models/ranker"]
        method = rng.choice(["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
        return Request("method", _text(content), method=method, path=rng.choice(paths))
    return Request("path", _text(content), method=rng.choice(["POST", "GET"]), path=path)


KINDS: tuple[Callable[[random.Random], Request], ...] = (
    odd_shape,
    odd_field,
    odd_datatype,
    odd_data,
    odd_parts,
    odd_binary,
    odd_bytes,
    odd_headers,
    odd_path,
)


def malformed(count: int, seed: int) -> Iterator[Request]:
    rng = random.Random(seed)  # noqa: S311
    for i in range(count):
        yield KINDS[i % len(KINDS)](rng)


def broken_http(count: int, seed: int) -> Iterator[bytes]:
    """Yield bytes that are not HTTP, or not complete."""
    rng = random.Random(seed)  # noqa: S311
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\n".encode()
    body = _text(_valid(rng)[0])
    for _ in range(count):
        yield rng.choice(
            [
                lambda: rng.randbytes(rng.randint(1, 300)),
                lambda: head + b"Content-Length: -5\r\n\r\n" + body,
                lambda: head + b"Content-Length: abc\r\n\r\n" + body,
                lambda: head + b"Content-Length: 99999999999999999999999999\r\n\r\n" + body,
                lambda: head + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\n" + body,
                lambda: head + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n" + body,
                lambda: head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + body,
                lambda: head + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n" + body,
                lambda: head + b"No colon here\r\n\r\n",
                lambda: head + b"Bad\x00Name: x\r\n\r\n",
                lambda: head + b"X: \x00\x01\r\n\r\n",
                lambda: b"POST\r\n\r\n",
                lambda: b"FETCH / HTTP/1.1\r\n\r\n",
                lambda: b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
                lambda: b"GET /v2 HTTP/9.9\r\n\r\n",
                lambda: b"GET /v2 HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + rng.randbytes(20),
                lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                lambda: head + b"Content-Length: %d\r\n\r\n" % (len(body) + rng.randint(1, 99)) + body,
                lambda: head + b"Content-Length: %d\r\n\r\n" % len(body) + body[: rng.randrange(len(body))],
                lambda: head[: rng.randrange(len(head))],
            ]
        )()
