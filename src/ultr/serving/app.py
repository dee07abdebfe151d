"""The server as an ASGI application: kserve's endpoints behind a token, and scoring by the shortest way."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import orjson

from ultr.serving.endpoints import exposition, metrics, show_model, v2_endpoints
from ultr.serving.served import Scorer, Served
from ultr.serving.wire import Limits, RequestError, read_question, write_answer

INLINE_SECONDS = 0.005  # what takes longer is scored by another thread, so that health checks do not wait for it
BODY_SECONDS = 30.0  # in which a client has to send what it set out to send
CONTENT_TYPES = (b"", b"application/json", b"application/octet-stream")
JSON_LENGTH = b"inference-header-content-length"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Answer = tuple[list[tuple[bytes, bytes]], bytes]  # headers and body


class Route(NamedTuple):
    """What a path leads to: a method of kserve's endpoints, or one of the two that are our own."""

    to: str
    methods: tuple[str, ...] = ("GET", "HEAD")
    open: bool = False  # to those who have no token


ROUTES = {
    ("v2",): Route("metadata"),
    ("v2", "health", "live"): Route("live", open=True),
    ("v2", "health", "ready"): Route("ready", open=True),
    ("v2", "models"): Route("models"),
    ("v2", "models", "*"): Route("model_metadata"),
    ("v2", "models", "*", "ready"): Route("model_ready", open=True),
    ("v2", "models", "*", "infer"): Route("infer", ("POST",)),
    ("metrics",): Route("metrics"),
}


class Gone(Exception):  # noqa: N818  # there is nobody left to answer
    """The client went away."""


class App:
    """One model under one name, asked by the Open Inference Protocol."""

    def __init__(self, served: Served, *, name: str, max_rows: int, token: str | None = None, threads: int = 1) -> None:
        self.served, self.name, self.max_rows = served, name, max_rows
        self._token = None if token is None else token.encode()
        self._v2 = v2_endpoints(served, name)
        self._pool = ThreadPoolExecutor(threads, "ultr-score")
        self._inline_seconds = INLINE_SECONDS if threads == 1 else 0.0  # several can be scored side by side
        figures = metrics()
        self._rows, self._seconds = figures.rows.labels(name), figures.seconds.labels(name)
        self._predict_seconds, self._requests = figures.predict_seconds.labels(name), figures.requests
        self._heard(None)
        served.heard = self._heard

    def close(self) -> None:
        """Wait for what is being scored."""
        self._pool.shutdown()

    def _heard(self, taken: bool | None) -> None:
        if taken is not None:
            metrics().reloads.labels(self.name, "taken" if taken else "broken").inc()
        if taken is not False:
            show_model(self.served, self.name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; whatever is wrong with it is said in words."""
        start = time.perf_counter()
        try:
            status, (headers, body) = 200, await self._answer(scope, receive)
        except Gone:
            return
        except RequestError as refusal:
            status, headers, body = refusal.status, [*_JSON, *refusal.headers], _error(str(refusal))
        except Exception as error:  # a fault of the server, not of a request
            self.served.say(f"internal error ({type(error).__name__}: {error})")
            status, headers, body = 500, _JSON, _error(f"internal error ({type(error).__name__})")
        if scope["path"].endswith("/infer"):
            self._requests.labels(self.name, status).inc()
            self._seconds.observe(time.perf_counter() - start)
        headers = [*headers, (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Receive) -> Answer:
        parts, name, version = _parts(scope["path"])
        route = ROUTES.get(parts)
        if route is None or not route.open:
            self._check_token(scope["headers"])
        if route is None:
            mend = f"/v2/models/{self.name}/infer scores, /v2/models/{self.name} says what it takes"
            raise RequestError("there is nothing here", status=404, got=_short(scope["path"]), mend=mend)
        if name is not None and name != self.name:
            raise RequestError("there is no such model", status=404, got=_short(name), mend=f"ask for '{self.name}'")
        if version is not None and version != self.served.scorer.version:
            mend = f"ask for '{self.served.scorer.version}', or for none"
            raise RequestError("this version does not serve", status=404, got=_short(version), mend=mend)
        if scope["method"] not in route.methods:
            allow = ((b"allow", ", ".join(route.methods).encode()),)
            mend = f"use {route.methods[0]}"
            raise RequestError("no such method here", status=405, got=_short(scope["method"]), mend=mend, headers=allow)
        if route.to == "infer":
            return await self._infer(scope["headers"], receive)
        if route.to == "metrics":
            text, kind = exposition()
            return [(b"content-type", kind)], text
        ask = getattr(self._v2, route.to)
        found = await (ask() if name is None else ask(name))
        return _JSON, orjson.dumps(found.model_dump(exclude_none=True))

    def _check_token(self, headers: list[tuple[bytes, bytes]]) -> None:
        if self._token is None:
            return
        scheme, _, token = (_header(headers, b"authorization") or b"").partition(b" ")
        if not hmac.compare_digest(token.strip(), self._token) or scheme.lower() != b"bearer":
            challenge = ((b"www-authenticate", b"Bearer"),)
            mend = "send the header Authorization: Bearer TOKEN"
            raise RequestError("the token is missing or wrong", status=401, mend=mend, headers=challenge)

    async def _infer(self, headers: list[tuple[bytes, bytes]], receive: Receive) -> Answer:
        kind = (_header(headers, b"content-type") or b"").split(b";")[0].strip().lower()
        if kind not in CONTENT_TYPES:
            mend = "send application/json, or application/octet-stream where binary data follows"
            raise RequestError("the content type is not taken", status=415, got=_short(kind), mend=mend)
        if encoding := _header(headers, b"content-encoding"):
            raise RequestError(
                "compressed bodies are not taken", status=415, got=_short(encoding), mend="send it as it is"
            )
        scorer = self.served.scorer
        limits = Limits(len(scorer.feature_names), self.max_rows, scorer.missing)
        body = await _body(receive, _header(headers, b"content-length"), limits.body)
        length = _header(headers, JSON_LENGTH)
        rows = len(body) // (4 * limits.features)  # or fewer, where they come as JSON
        if rows * scorer.seconds_per_row <= self._inline_seconds:
            return self._scored(scorer, limits, body, length)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._scored, scorer, limits, body, length)

    def _scored(self, scorer: Scorer, limits: Limits, body: bytes, length: bytes | None) -> Answer:
        question = read_question(body, length, limits)
        scorer.check(question.features)
        start = time.perf_counter()
        scores = scorer(question.features)
        self._predict_seconds.observe(time.perf_counter() - start)
        self._rows.inc(len(scores))
        answer, json_length = write_answer(question, scores, name=self.name, version=scorer.version)
        if json_length is None:
            return _JSON, answer
        return [(b"content-type", b"application/octet-stream"), (JSON_LENGTH, b"%d" % json_length)], answer


_JSON = [(b"content-type", b"application/json")]


def _error(text: str) -> bytes:
    return orjson.dumps({"error": text})


def _short(text: str | bytes) -> str:
    return f"'{(text if isinstance(text, str) else text.decode('latin-1'))[:100]}'"


def _parts(path: str) -> tuple[tuple[str, ...], str | None, str | None]:
    """The parts of a path, with a star for the model, its name and, where it has one, its version."""
    parts = tuple(path.split("/")[1:])
    if parts[:2] != ("v2", "models") or len(parts) < 3:
        return parts, None, None
    name, rest = parts[2], parts[3:]
    version = rest[1] if rest[:1] == ("versions",) and len(rest) > 1 else None
    return ("v2", "models", "*", *(rest if version is None else rest[2:])), name, version


def _header(headers: list[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    found = [value for key, value in headers if key == name]
    if len(found) > 1:
        raise RequestError(f"the header {name.decode()} is given {len(found)} times", mend="send it once")
    return found[0] if found else None


async def _body(receive: Receive, declared: bytes | None, most: int) -> bytes:
    """All of a body, of which no more than the most is ever held."""
    parts: list[bytes] = []
    received = 0
    length = int(declared) if declared is not None and declared.isdigit() and len(declared) < 20 else 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while max(length, received) <= most:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                parts.append(message.get("body", b""))
                received += len(parts[-1])
                if not message.get("more_body", False) and received <= most:
                    return parts[0] if len(parts) == 1 else b"".join(parts)
    except TimeoutError as error:
        mend = f"send all of it within {BODY_SECONDS:g} seconds"
        close = ((b"connection", b"close"),)
        raise RequestError("the body did not come", status=408, mend=mend, headers=close) from error
    got = f"{max(length, received)} bytes or more"
    raise RequestError("the body is too long", status=413, got=got, mend=f"send {most} at most")
