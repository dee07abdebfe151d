"""JSON that is kept on disk: read with bounds, and of which format it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ultr.errors import DataError
from ultr.seals import unsealed

MAX_BYTES = 256 << 20


def load_json(path: Path, *, finite: bool = False) -> Any:
    """The content of a file that anyone may have written; ValueError where it is no JSON that could be ours.

    What carries a seal must be as it was written. `finite` refuses NaN and Infinity, which figures may be and
    descriptions may not.
    """
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{size:,} bytes, where {MAX_BYTES:,} are the most")
    return unsealed(parse_json(path.read_bytes(), finite=finite), where=path)


def parse_json(text: str | bytes, *, finite: bool = False) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse if finite else None)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse(constant: str) -> None:
    raise ValueError(f"it holds {constant}")


def check_format(content: Any, known: int, *, what: str, where: object, mend: str, unmarked: bool = False) -> None:
    """Refuse what is not of the known format, by whether it is newer; `unmarked` takes what says nothing of it."""
    if not isinstance(content, dict):
        raise DataError(f"{what} cannot be read", where=where, got=type(content).__name__, mend=mend)
    found = content.get("format")
    if (type(found) is int and found == known) or (unmarked and "format" not in content):
        return
    got = f"format {str(found)[:50]} where {known} is known"
    if type(found) is int and found > known:
        raise DataError(f"{what} was made by a newer ultr", where=where, got=got, mend="update ultr")
    raise DataError(f"{what} is of another version", where=where, got=got, mend=mend)


def load_description(path: Path, known: int, *, what: str, where: object = None, mend: str) -> dict[str, Any]:
    """The JSON object that a folder describes itself by, if it is of the known format."""
    try:
        content = load_json(path, finite=True)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read ({str(error)[:300]})", where=path, mend=mend) from error
    check_format(content, known, what=what, where=where or path, mend=mend)
    return dict(content)


@contextmanager
def content_errors(what: str, *, where: object, mend: str) -> Iterator[None]:
    """What is wrong with the content of files, which pages and cards take as they find it, as a refusal."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DataError(f"{what} ({error!r})", where=where, mend=mend) from error
