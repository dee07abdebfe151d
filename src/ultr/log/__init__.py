"""Impression logs: the class `Log`, and functions that read and write it. Nothing here imports torch."""

from ultr.log.readers import read_log
from ultr.log.table import Log, write_log

__all__ = ["Log", "read_log", "write_log"]
