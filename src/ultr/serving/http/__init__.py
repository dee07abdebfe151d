"""The HTTP server: it scores requests by the Open Inference Protocol, and reloads newer models."""

from __future__ import annotations

from ultr.errors import MissingExtraError

try:
    import onnxruntime  # noqa: F401
    import orjson  # noqa: F401
    import prometheus_client  # noqa: F401
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise MissingExtraError("ultr serve", package=error.name or "starlette", extra="serve") from error

from ultr.serving.http.server import listen, serve

__all__ = ["listen", "serve"]
