"""What was shown and what users did: the `Log`, read from files, tables and frames. Nothing here needs torch."""

from ultr.log.readers import read_log
from ultr.log.table import Log, write_log

__all__ = ["Log", "read_log", "write_log"]
