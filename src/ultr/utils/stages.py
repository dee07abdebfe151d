"""The stages of long work, as records of Python's logging: logger `ultr`, level INFO, with the attribute `stage`."""

from __future__ import annotations

import logging

logger = logging.getLogger("ultr")


def begin_stage(name: str) -> None:
    """Log that a stage of long work begins, such as "reading the data"."""
    logger.info(name, extra={"stage": name})
