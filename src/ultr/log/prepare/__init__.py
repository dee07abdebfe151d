"""Prepare a log of any size for training: group impressions and events by request, and write Parquet files of lists."""

from ultr.log.prepare.pipeline import prepare_lists

__all__ = ["prepare_lists"]
