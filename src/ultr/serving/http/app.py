"""The server as an ASGI application: the endpoints of the Open Inference Protocol, version 2, on Starlette."""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import orjson
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from ultr._version import __version__
from ultr.serving.exported import EXPECTED, INPUT, OUTPUT
from ultr.serving.http import ServerOptions, metrics
from ultr.serving.http.served import Scorer, Served
from ultr.serving.http.wire import Limits, RequestError, ScoreRequest, read_request, write_answer

INLINE_SECONDS = 0.005  # longer requests are scored in another thread, so that health checks need not wait for them
BODY_SECONDS = 30.0  # the time in which a client must send the body
MOST_BYTES = 1 << 27  # of all bodies that are being received or scored, by all workers
SMALL_BODY = 1 << 20  # bytes; a body up to this size is accepted whatever the others take
MOST_WAITING = 1024  # requests that may wait for their answer
ARRIVED, WAITING = "ultr.arrived", "ultr.waiting"  # in the scope: time of the head; requests that waited then
RETRY = {"Retry-After": "1", "Connection": "close"}
CONTENT_TYPES = ("", "application/json", "application/octet-stream")
JSON_LENGTH = "Inference-Header-Content-Length"
PLATFORM = "onnxruntime"
Answer = TypeVar("Answer")
WITHOUT_TOKEN = re.compile(r"/v2/health/(live|ready)|/v2/models/[^/]+(/versions/[^/]+)?/ready")  # paths of probes


class App:
    """An ASGI application that serves one model under one name."""

    def __init__(self, served: Served, options: ServerOptions) -> None:
        self.served, self.name, self.max_rows = served, options.name, options.max_rows
        self.workers = options.workers
        self.draining = False  # True when the server stops: it is not ready, and each answer closes its connection
        self._token = None if options.token is None else options.token.encode()
        self._pool = ThreadPoolExecutor(options.threads, "ultr-score")
        self._bytes = 0  # of all bodies that are being received or scored
        self._inline_seconds = INLINE_SECONDS if options.threads == 1 else 0.0  # several threads score in parallel
        self._router = Router(self._routes(), redirect_slashes=False)
        self._handle = ExceptionMiddleware(self._authorise, {HTTPException: self._error, Exception: self._error})
        self._rows, self._seconds = metrics.ROWS.labels(self.name), metrics.REQUEST_SECONDS.labels(self.name)
        self._predict_seconds = metrics.PREDICT_SECONDS.labels(self.name)
        metrics.show_model(self.name, served.scorer.version, PLATFORM)
        served.on_reload = self._on_reload

    def _routes(self) -> list[Route]:
        model, version = "/v2/models/{name}", "/v2/models/{name}/versions/{version}"
        return [
            *(Route(f"{path}/infer", self._infer, methods=["POST"]) for path in (model, version)),
            *(Route(f"{path}/ready", self._model_ready) for path in (model, version)),
            *(Route(path, self._model_metadata) for path in (model, version)),
            Route("/v2", self._server_metadata),
            Route("/v2/health/live", self._live),
            Route("/v2/health/ready", self._ready),
            Route("/v2/models", self._models),
            Route("/metrics", self._metrics),
        ]

    def close(self) -> None:
        """Wait for the requests that are being scored."""
        self._pool.shutdown()

    def _on_reload(self, loaded: bool) -> None:
        if self.workers == 1:  # otherwise the parent of the workers counts
            metrics.count_reload(self.name, loaded)
        if loaded:
            metrics.show_model(self.name, self.served.scorer.version, PLATFORM)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and count it if it asks for scores."""
        start, status = scope.get(ARRIVED) or time.perf_counter(), 0

        async def send_and_note_status(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            if self.draining and message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        scope["app"] = self  # makes Starlette raise an exception for an unknown path or method
        await self._handle(scope, receive, send_and_note_status)
        if scope["path"].endswith("/infer"):
            self.count(status, time.perf_counter() - start)

    def count(self, status: int, seconds: float) -> None:
        """Count a request for scores by the status of its answer."""
        metrics.REQUESTS.labels(self.name, status).inc()
        self._seconds.observe(seconds)

    async def _authorise(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the token before anything else, so that without it all other paths look the same."""
        if self._token is not None and not WITHOUT_TOKEN.fullmatch(scope["path"]):
            self.check_token(_header(Request(scope), "authorization"))
        if scope.get(WAITING, 0) >= MOST_WAITING and scope["path"].endswith("/infer"):
            hint = "try again later"
            raise RequestError("too many requests are waiting", status=503, hint=hint, headers=RETRY)
        await self._router(scope, receive, send)

    def check_token(self, authorization: str | None) -> None:
        """Raise RequestError if the server has a token and a request does not send it."""
        if self._token is not None:
            scheme, _, token = (authorization or "").partition(" ")
            right = hmac.compare_digest(token.strip().encode(), self._token)
            if not right or scheme.lower() != "bearer":
                hint = "send the header Authorization: Bearer TOKEN"
                headers = {"WWW-Authenticate": "Bearer"}
                raise RequestError("the token is missing or wrong", status=401, hint=hint, headers=headers)

    async def _error(self, request: Request, error: Exception) -> Response:
        """Return the answer to a request that failed."""
        failure = self._routing_error(request, error) if isinstance(error, HTTPException) else self.request_error(error)
        return _json({"error": str(failure)}, failure.status, failure.headers)

    def request_error(self, error: Exception) -> RequestError:
        """Return an error as a client gets it; print it if it is a fault of the server."""
        if isinstance(error, RequestError):
            return error
        self.served.say(f"internal error ({type(error).__name__}: {error})", "error")
        return RequestError(f"internal error ({type(error).__name__})", status=500)

    def _routing_error(self, request: Request, error: HTTPException) -> RequestError:
        if error.status_code == 405 and error.headers is not None:
            hint = f"use {' or '.join(sorted(error.headers['Allow'].split(', ')))}"
            got = _quoted(request.method)
            return RequestError("the method is not allowed here", status=405, got=got, hint=hint, headers=error.headers)
        hint = f"POST to /v2/models/{self.name}/infer for scores, or GET /v2/models/{self.name} for the model's inputs"
        return RequestError("the path is unknown", status=404, got=_quoted(request.scope["path"]), hint=hint)

    # --- Endpoints ------------------------------------------------------------------------------------------------

    async def _server_metadata(self, _: Request) -> Response:
        return _json({"name": "ultr", "version": __version__, "extensions": ["binary_tensor_data"]})

    async def _live(self, _: Request) -> Response:
        return _json({"live": True})

    async def _ready(self, _: Request) -> Response:
        return self._readiness({})

    async def _models(self, _: Request) -> Response:
        return _json({"models": [self.name]})

    async def _metrics(self, _: Request) -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def _model_ready(self, request: Request) -> Response:
        self._scorer_of(request)
        return self._readiness({"name": self.name})

    def _readiness(self, content: dict[str, Any]) -> Response:
        return _json({**content, "ready": not self.draining}, 503 if self.draining else 200)

    async def _model_metadata(self, request: Request) -> Response:
        return _json(self.describe(self._scorer_of(request)))

    async def _infer(self, request: Request) -> Response:
        scorer = self._scorer_of(request)
        content_type = (_header(request, "content-type") or "").split(";")[0].strip().lower()
        if content_type not in CONTENT_TYPES:
            hint = "send application/json, or application/octet-stream with binary data"
            raise RequestError("the content type is unknown", status=415, got=_quoted(content_type), hint=hint)
        if encoding := _header(request, "content-encoding"):
            hint = "send the body uncompressed"
            raise RequestError("compressed bodies are not supported", status=415, got=_quoted(encoding), hint=hint)
        limits, json_length = self.limits(scorer), _header(request, JSON_LENGTH)
        with self.share() as share:
            body = await _read_body(request, limits.body, share.grow)
            return await self.run(scorer, len(body), self._score, scorer, limits, body, json_length)

    def _score(self, scorer: Scorer, limits: Limits, body: bytes, json_length: str | None) -> Response:
        request = read_request(body, json_length, limits)
        answer, length = write_answer(request, self.outputs(scorer, request), name=self.name, version=scorer.version)
        if length is None:
            return Response(answer, media_type="application/json")
        return Response(answer, headers={JSON_LENGTH: str(length)}, media_type="application/octet-stream")

    def _scorer_of(self, request: Request) -> Scorer:
        return self.scorer(request.path_params["name"], request.path_params.get("version"))

    # --- What HTTP and gRPC share -----------------------------------------------------------------------------------

    def scorer(self, name: str, version: str | None) -> Scorer:
        """Return the scorer; raise RequestError if a request names another model or version."""
        scorer = self.served.scorer
        if name != self.name:
            raise RequestError("the model is unknown", status=404, got=_quoted(name), hint=f"use '{self.name}'")
        if version and version != scorer.version:
            hint = f"use '{scorer.version}', or no version"
            raise RequestError("the version is not served", status=404, got=_quoted(version), hint=hint)
        return scorer

    def describe(self, scorer: Scorer) -> dict[str, Any]:
        """Return the metadata of the model."""
        return {
            "name": self.name,
            "versions": [scorer.version],
            "platform": PLATFORM,
            "inputs": [{"name": INPUT, "datatype": "FP32", "shape": [-1, len(scorer.feature_names)]}],
            "outputs": [{"name": OUTPUT, "datatype": "FP32", "shape": [-1]}],
            "parameters": {"feature_names": scorer.feature_names, "categorical": [*scorer.vocabularies]},
        }

    def limits(self, scorer: Scorer) -> Limits:
        return Limits(len(scorer.feature_names), self.max_rows, scorer.keeps_missing)

    def share(self) -> Share:
        return Share(self)

    def take_bytes(self, number: int) -> int:
        """Add to the bytes of all bodies, and return their sum."""
        self._bytes += number
        return self._bytes

    async def run(self, scorer: Scorer, size: int, function: Callable[..., Answer], *arguments: Any) -> Answer:
        """Call a function that scores a body of `size` bytes: here if that is quick, otherwise in another thread."""
        rows = size // (4 * len(scorer.feature_names))  # the exact number for binary data, too high for JSON
        if rows * scorer.seconds_per_row <= self._inline_seconds:
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    def outputs(self, scorer: Scorer, request: ScoreRequest) -> dict[str, np.ndarray]:
        """Return the scores of a request, and the expected feedback if it asks for that; measure the model's time."""
        scorer.check(request.features)
        start = time.perf_counter()
        scores = scorer(request.features)
        self._predict_seconds.observe(time.perf_counter() - start)
        self._rows.inc(len(scores))
        if request.expected_at is None:
            return {OUTPUT: scores}
        return {OUTPUT: scores, EXPECTED: scorer.expected(scores, request.expected_at)}


class Share:
    """The bytes of one body, as a part of the bytes of all bodies, which are limited."""

    def __init__(self, app: App) -> None:
        self._app, self._size = app, 0

    def __enter__(self) -> Share:
        return self

    def grow(self, size: int) -> None:
        """Set the size of the body; raise RequestError if it is large and there is no room for it."""
        if size > self._size:
            total = self._app.take_bytes(size - self._size)
            self._size = size
            if total > MOST_BYTES // self._app.workers and size > SMALL_BODY:
                hint = f"try again later, or send at most {SMALL_BODY} bytes at a time"
                raise RequestError("too many large requests are in progress", status=503, hint=hint, headers=RETRY)

    def __exit__(self, *_: object) -> None:
        self._app.take_bytes(-self._size)


def _json(content: Any, status: int = 200, headers: Any = None) -> Response:
    return Response(orjson.dumps(content), status, headers, "application/json")


def _quoted(text: str) -> str:
    return f"'{text[:100]}'"


def _header(request: Request, name: str) -> str | None:
    values = request.headers.getlist(name)
    if len(values) > 1:
        raise RequestError(f"the header {name} occurs {len(values)} times", hint="send it once")
    return values[0] if values else None


async def _read_body(request: Request, limit: int, grow: Callable[[int], None]) -> bytes:
    """Return the body; raise RequestError as soon as it is longer than `limit` bytes.

    `grow` is called with its size as far as it is known: first the declared one, then what has arrived.
    """
    declared = _header(request, "content-length") or ""
    length = int(declared) if declared.isdecimal() and len(declared) < 20 else 0
    parts: list[bytes] = []
    received = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            if length <= limit:
                grow(length)
                async for part in request.stream():
                    parts.append(part)
                    received += len(part)
                    if received > limit:
                        break
                    grow(received)
    except TimeoutError as error:
        hint, headers = f"send all of it within {BODY_SECONDS:g} seconds", {"Connection": "close"}
        raise RequestError("the body did not arrive in time", status=408, hint=hint, headers=headers) from error
    except ClientDisconnect as error:
        raise RequestError("the client closed the connection", status=499) from error
    if max(length, received) > limit:
        got = f"{max(length, received)} bytes or more"
        raise RequestError("the body is too long", status=413, got=got, hint=f"send at most {limit} bytes")
    return b"".join(parts)
