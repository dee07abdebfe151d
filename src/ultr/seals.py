"""Checksums that are kept with what was written, so that a damaged file is told from a whole one.

They find what disks, cables and half-done copies do, not what someone does on purpose.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ultr.errors import DataError

SEAL = "seal"  # of a JSON object: the checksum of all else in it


def checksum(path: Path) -> str:
    """The CRC-32 of a file: nine times as fast as a cryptographic digest, which matters with gigabytes."""
    found = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            found = zlib.crc32(block, found)
    return f"{found:08x}"


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """JSON with a checksum of itself."""
    return {**content, SEAL: _sum_of(json.loads(json.dumps(content)))}


def unsealed(content: Any, *, where: object = None) -> Any:
    """JSON as it was before it was sealed, or a refusal if it has changed; what has no seal is taken as it is."""
    if not isinstance(content, dict) or SEAL not in content:
        return content
    plain = {name: value for name, value in content.items() if name != SEAL}
    if content[SEAL] != _sum_of(plain):
        mend = f"restore it from a copy, or make it again; if you changed it on purpose, remove its '{SEAL}'"
        raise DataError("the file is not as it was written", where=where, mend=mend)
    return plain


def _sum_of(content: Any) -> str:
    """The same however it is laid out."""
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
