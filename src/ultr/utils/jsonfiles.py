"""JSON files and files of tensors: size limits, format numbers, and checksums that detect damage.

A checksum detects damage by disks, networks and interrupted copies. It does not protect against deliberate changes.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ultr.errors import DataError
from ultr.utils.files import atomic_path

if TYPE_CHECKING:
    from torch import Tensor

MAX_BYTES = 256 << 20  # a larger JSON file is not read
CHECKSUM = "seal"  # the key that holds the checksum of everything else in a JSON object or a file of tensors


def file_checksum(path: Path) -> str:
    """Return the CRC-32 of a file as 8 hexadecimal digits; it is nine times as fast as a cryptographic digest."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return f"{crc:08x}"


def add_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a JSON object with the checksum of its content added."""
    return {**content, CHECKSUM: _content_checksum(json.loads(json.dumps(content)))}


def verify_checksum(content: Any, *, where: object = None) -> Any:
    """Return a JSON object without its checksum; raise DataError if the checksum does not match the content.

    Content that has no checksum is returned as it is.
    """
    if not isinstance(content, dict) or CHECKSUM not in content:
        return content
    plain = {name: value for name, value in content.items() if name != CHECKSUM}
    if content[CHECKSUM] != _content_checksum(plain):
        hint = f"restore it from a copy, or create it again; if you edited it on purpose, remove its key '{CHECKSUM}'"
        raise DataError("the file has changed since it was written", where=where, hint=hint)
    return plain


def _content_checksum(content: Any) -> str:
    """Return a checksum that does not depend on the order of keys or on white space."""
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def load_json(path: Path, *, finite: bool = False) -> Any:
    """Read JSON from a file that may be damaged or hostile; raise ValueError if it is too large or not JSON.

    If the content has a checksum, it is verified. With `finite`, NaN and Infinity also raise ValueError.
    """
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{size:,} bytes; the limit is {MAX_BYTES:,}")
    return verify_checksum(parse_json(path.read_bytes(), finite=finite), where=path)


def parse_json(text: str | bytes, *, finite: bool = False) -> Any:
    try:
        return json.loads(text, parse_constant=_reject_constant if finite else None)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _reject_constant(constant: str) -> None:
    raise ValueError(f"it contains {constant}")


def finite(content: Any) -> Any:
    """Return content with None instead of numbers that are not finite, which JSON does not have."""
    if isinstance(content, dict):
        return {name: finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def write_json(path: Path, content: Any) -> None:
    """Write JSON to a file, which is replaced in one step; a dict gets a checksum."""
    with atomic_path(path, overwrite=True) as temporary:
        complete = add_checksum(content) if isinstance(content, dict) else content
        temporary.write_text(json.dumps(complete, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file in a run directory, which is the folder that `ultr train` writes."""
    try:
        content = load_json(path)
    except FileNotFoundError as error:
        what = "this is not a run directory, or the run is not finished"
        raise DataError(what, where=path, hint="check the path") from error
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read ({error})", where=path, hint="train again") from error
    if not isinstance(content, dict):
        got = type(content).__name__
        raise DataError("the file must hold a JSON object", where=path, got=got, hint="train again")
    return content


def check_format(content: Any, known: int, *, what: str, where: object, hint: str) -> None:
    """Raise DataError if the format number in `content` is not `known`; the message says if it is newer."""
    if not isinstance(content, dict):
        raise DataError(f"{what} cannot be read", where=where, got=type(content).__name__, hint=hint)
    number = content.get("format")
    if type(number) is int and number == known:
        return
    got = f"format {str(number)[:50]}, expected {known}"
    if type(number) is int and number > known:
        raise DataError(f"{what} was written by a newer version of ultr", where=where, got=got, hint="update ultr")
    raise DataError(f"{what} has a different format", where=where, got=got, hint=hint)


def load_description(path: Path, known: int, *, what: str, hint: str) -> dict[str, Any]:
    """Read the JSON object that describes a folder, and check its format number; `what` names the folder in errors."""
    try:
        content = load_json(path, finite=True)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read ({str(error)[:300]})", where=path, hint=hint) from error
    check_format(content, known, what=what, where=path, hint=hint)
    return dict(content)


@contextmanager
def content_errors(what: str, *, where: object, hint: str) -> Iterator[None]:
    """Turn the exceptions that malformed file content causes into a DataError that starts with `what`."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DataError(f"{what} ({error!r})", where=where, hint=hint) from error


# --- Tensors: safetensors files ---------------------------------------------------------------------------------------


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors and their checksum to a file."""
    from safetensors.torch import save

    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    path.write_bytes(save(copies, {CHECKSUM: _tensor_checksum(copies)}))  # save_file would let only its owner read it


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file; raise DataError if it cannot be read or its checksum is wrong."""
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
        with safe_open(path, "pt") as file:
            checksum = (file.metadata() or {}).get(CHECKSUM)
    except (OSError, SafetensorError) as error:
        raise DataError(f"cannot be read ({error})", where=path, hint="train again") from error
    if checksum is not None and checksum != _tensor_checksum(tensors):
        hint = "restore it from a copy, or train again"
        raise DataError("the file has changed since it was written", where=path, hint=hint)
    return tensors


def _tensor_checksum(tensors: dict[str, Tensor]) -> str:
    import torch

    crc = 0
    for name, tensor in sorted(tensors.items()):
        crc = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), crc)
        if tensor.numel():  # a slice without elements cannot be seen as bytes
            crc = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"
