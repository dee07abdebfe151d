"""The server as an ASGI application: the endpoints of the Open Inference Protocol, version 2, on Starlette."""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from ultr._version import __version__
from ultr.serving.exported import INPUT, OUTPUT
from ultr.serving.http import metrics
from ultr.serving.http.served import Scorer, Served
from ultr.serving.http.wire import Limits, RequestError, read_request, write_answer

INLINE_SECONDS = 0.005  # longer requests are scored in another thread, so that health checks need not wait for them
BODY_SECONDS = 30.0  # the time in which a client must send the body
MOST_BYTES = 1 << 27  # of all bodies that are being received or scored
SMALL_BODY = 1 << 20  # bytes; a body up to this size is accepted whatever the others take
MOST_WAITING = 1024  # requests that may wait for their answer
ARRIVED, WAITING = "ultr.arrived", "ultr.waiting"  # in the scope: time of the head; requests that waited then
RETRY = {"Retry-After": "1", "Connection": "close"}
CONTENT_TYPES = ("", "application/json", "application/octet-stream")
JSON_LENGTH = "Inference-Header-Content-Length"
PLATFORM = "onnxruntime"
WITHOUT_TOKEN = re.compile(r"/v2/health/(live|ready)|/v2/models/[^/]+(/versions/[^/]+)?/ready")  # paths of probes


class App:
    """An ASGI application that serves one model under one name."""

    def __init__(self, served: Served, *, name: str, max_rows: int, token: str | None = None, threads: int = 1) -> None:
        self.served, self.name, self.max_rows = served, name, max_rows
        self._token = None if token is None else token.encode()
        self._pool = ThreadPoolExecutor(threads, "ultr-score")
        self._bytes = 0  # of all bodies that are being received or scored
        self._inline_seconds = INLINE_SECONDS if threads == 1 else 0.0  # several threads score in parallel
        self._router = Router(self._routes(), redirect_slashes=False)
        self._handle = ExceptionMiddleware(self._authorise, {HTTPException: self._error, Exception: self._error})
        self._rows, self._seconds = metrics.ROWS.labels(name), metrics.REQUEST_SECONDS.labels(name)
        self._predict_seconds = metrics.PREDICT_SECONDS.labels(name)
        self._show_model()
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
        metrics.RELOADS.labels(self.name, "taken" if loaded else "broken").inc()
        if loaded:
            self._show_model()

    def _show_model(self) -> None:
        metrics.MODEL_INFO.labels(self.name).info({"version": self.served.scorer.version, "platform": PLATFORM})
        metrics.MODEL_LOADED.labels(self.name).set(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and count it if it asks for scores."""
        start, status = scope.get(ARRIVED) or time.perf_counter(), 0

        async def send_and_note_status(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        scope["app"] = self  # makes Starlette raise an exception for an unknown path or method
        await self._handle(scope, receive, send_and_note_status)
        if scope["path"].endswith("/infer"):
            metrics.REQUESTS.labels(self.name, status).inc()
            self._seconds.observe(time.perf_counter() - start)

    async def _authorise(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the token before anything else, so that without it all other paths look the same."""
        if self._token is not None and not WITHOUT_TOKEN.fullmatch(scope["path"]):
            scheme, _, token = (_header(Request(scope), "authorization") or "").partition(" ")
            right = hmac.compare_digest(token.strip().encode(), self._token)
            if not right or scheme.lower() != "bearer":
                hint = "send the header Authorization: Bearer TOKEN"
                headers = {"WWW-Authenticate": "Bearer"}
                raise RequestError("the token is missing or wrong", status=401, hint=hint, headers=headers)
        if scope.get(WAITING, 0) >= MOST_WAITING and scope["path"].endswith("/infer"):
            hint = "try again later"
            raise RequestError("too many requests are waiting", status=503, hint=hint, headers=RETRY)
        await self._router(scope, receive, send)

    async def _error(self, request: Request, error: Exception) -> Response:
        """Return the answer to a request that failed."""
        if isinstance(error, HTTPException):
            error = self._routing_error(request, error)
        elif not isinstance(error, RequestError):
            self.served.say(f"internal error ({type(error).__name__}: {error})")
            error = RequestError(f"internal error ({type(error).__name__})", status=500)
        return _json({"error": str(error)}, error.status, error.headers)

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
        return _json({"ready": True})

    async def _models(self, _: Request) -> Response:
        return _json({"models": [self.name]})

    async def _metrics(self, _: Request) -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    async def _model_ready(self, request: Request) -> Response:
        self._scorer(request)
        return _json({"name": self.name, "ready": True})

    async def _model_metadata(self, request: Request) -> Response:
        scorer = self._scorer(request)
        return _json(
            {
                "name": self.name,
                "versions": [scorer.version],
                "platform": PLATFORM,
                "inputs": [{"name": INPUT, "datatype": "FP32", "shape": [-1, len(scorer.feature_names)]}],
                "outputs": [{"name": OUTPUT, "datatype": "FP32", "shape": [-1]}],
                "parameters": {"feature_names": scorer.feature_names, "categorical": [*scorer.vocabularies]},
            }
        )

    async def _infer(self, request: Request) -> Response:
        scorer = self._scorer(request)
        content_type = (_header(request, "content-type") or "").split(";")[0].strip().lower()
        if content_type not in CONTENT_TYPES:
            hint = "send application/json, or application/octet-stream with binary data"
            raise RequestError("the content type is unknown", status=415, got=_quoted(content_type), hint=hint)
        if encoding := _header(request, "content-encoding"):
            hint = "send the body uncompressed"
            raise RequestError("compressed bodies are not supported", status=415, got=_quoted(encoding), hint=hint)
        limits = Limits(len(scorer.feature_names), self.max_rows, scorer.keeps_missing)
        json_length = _header(request, JSON_LENGTH)
        share = _Share(self)
        try:
            body = await _read_body(request, limits.body, share.grow)
            rows = len(body) // (4 * limits.features)  # the exact number for binary data, too high for JSON
            if rows * scorer.seconds_per_row <= self._inline_seconds:
                return self._score(scorer, limits, body, json_length)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pool, self._score, scorer, limits, body, json_length)
        finally:
            share.end()

    def take_bytes(self, number: int) -> int:
        """Add to the bytes of all bodies, and return their sum."""
        self._bytes += number
        return self._bytes

    def _scorer(self, request: Request) -> Scorer:
        """Return the scorer; raise RequestError if the path names another model or version."""
        scorer, name, version = self.served.scorer, request.path_params["name"], request.path_params.get("version")
        if name != self.name:
            raise RequestError("the model is unknown", status=404, got=_quoted(name), hint=f"use '{self.name}'")
        if version not in (None, scorer.version):
            hint = f"use '{scorer.version}', or no version"
            raise RequestError("the version is not served", status=404, got=_quoted(version), hint=hint)
        return scorer

    def _score(self, scorer: Scorer, limits: Limits, body: bytes, json_length: str | None) -> Response:
        request = read_request(body, json_length, limits)
        scorer.check(request.features)
        start = time.perf_counter()
        scores = scorer(request.features)
        self._predict_seconds.observe(time.perf_counter() - start)
        self._rows.inc(len(scores))
        answer, length = write_answer(request, scores, name=self.name, version=scorer.version)
        if length is None:
            return Response(answer, media_type="application/json")
        return Response(answer, headers={JSON_LENGTH: str(length)}, media_type="application/octet-stream")


class _Share:
    """The bytes of one body, as a part of the bytes of all bodies, which are limited."""

    def __init__(self, app: App) -> None:
        self._app, self._size = app, 0

    def grow(self, size: int) -> None:
        """Set the size of the body; raise RequestError if it is large and there is no room for it."""
        if size > self._size:
            total = self._app.take_bytes(size - self._size)
            self._size = size
            if total > MOST_BYTES and size > SMALL_BODY:
                hint = f"try again later, or send at most {SMALL_BODY} bytes at a time"
                raise RequestError("too many large requests are in progress", status=503, hint=hint, headers=RETRY)

    def end(self) -> None:
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
