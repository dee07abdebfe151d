"""Serving: a run or an exported model answers by the Open Inference Protocol, and newer ones take over as they come."""

from __future__ import annotations

from ultr.errors import MissingExtraError

try:
    import orjson  # noqa: F401  # which kserve brings
except ImportError as error:
    raise MissingExtraError("ultr serve", package="kserve", extra="serve") from error

from ultr.serving.server import listen, serve

__all__ = ["listen", "serve"]
