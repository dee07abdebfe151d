"""The options of a server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerOptions:
    """The options of a server, as `ultr serve` gets them; every worker gets the same."""

    name: str  # of the model, in URLs
    max_rows: int = 10_000  # the largest number of rows in one request
    threads: int = 1  # requests that each process scores in parallel
    token: str | None = None  # what clients must send
    poll: float = 5.0  # seconds between checks for a newer model
    any_schema: bool = False  # also load newer models with other features
    workers: int = 1  # processes
