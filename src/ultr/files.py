"""Files: written whole or not at all, and recognised by their first bytes."""

from __future__ import annotations

import difflib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ultr.errors import DataError, OutputError


def refuse_existing(target: Path, *, overwrite: bool, folder: bool = False) -> None:
    """Refuse an output that must not be written; asked before long work starts, so that none is lost."""
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise OutputError("output exists already", where=target, mend="choose another path or pass --overwrite")
    if not (target.is_dir() if folder else target.is_file()):
        kind = "folder" if folder else "plain file"
        raise OutputError(f"exists and is no {kind}, so it is not replaced", where=target, mend="choose another path")


@contextmanager
def atomic_path(target: str | Path, *, overwrite: bool = False, folder: bool = False) -> Iterator[Path]:
    """A temporary path beside `target`, for a file or folder to be made there, that takes its name if all goes well.

    Whatever happens inside the block, `target` is either as it was or complete: the temporary is synced to disk and
    renamed over it at the end, and removed on any exception. A folder is replaced by moving the old one aside first.
    """
    target = Path(target)
    refuse_existing(target, overwrite=overwrite, folder=folder)
    target = target.resolve()  # a link keeps pointing where it does
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        holder = Path(tempfile.mkdtemp(prefix=f".{target.name[:100]}.", suffix=".partial", dir=target.parent))
    except OSError as error:
        raise OutputError(f"cannot write here ({error.strerror})", where=target, mend="choose another path") from error
    temporary = holder / target.name
    try:
        if folder:
            temporary.mkdir()
        yield temporary
        _sync(temporary)
        if folder and target.is_dir():
            target.replace(holder / "replaced")
        temporary.replace(target)
        _sync_folder(target.parent)
    except OSError as error:
        mend = "nothing was changed; free the way and run again"
        raise OutputError(f"writing failed ({error.strerror or error})", where=target, mend=mend) from error
    finally:
        shutil.rmtree(holder, ignore_errors=True)


def _sync(path: Path) -> None:
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())


def _sync_folder(folder: Path) -> None:
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def existing_file(path: str | Path) -> Path:
    """A path that is a file with something in it, or a refusal."""
    path = Path(path)
    try:
        if path.is_dir():
            raise DataError("is a folder, not a file", where=path, mend="name a file in it")
        if path.is_file():
            if path.stat().st_size == 0:
                raise DataError("the file is empty", where=path, mend="write it again from its source")
            return path
        siblings = sorted(p.name for p in path.parent.glob("*") if p.is_file()) if path.parent.is_dir() else []
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror})", where=path, mend="check the path") from error
    near = difflib.get_close_matches(path.name, siblings, n=1, cutoff=0.5)
    raise DataError("no such file", where=path, mend=f"did you mean '{near[0]}'?" if near else "check the path")


_MAGIC = {b"PAR1": "Parquet", b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"ARROW1": "Arrow", b"\x89HDF": "HDF5"}


def content_kind(path: Path) -> str:
    """What the first bytes say a file is: `Parquet`, `gzip`, `zip`, ..., or `text`, or `unknown binary data`."""
    with path.open("rb") as handle:
        head = handle.read(1024)
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    return "unknown binary data" if b"\0" in head else "text"


def fingerprint(path: Path) -> str:
    """A digest of a file's content, or of the names and contents of a folder's files."""
    digest = hashlib.blake2b(digest_size=16)
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    for file in files:
        if path.is_dir():
            digest.update(file.relative_to(path).as_posix().encode() + b"\0")
        with file.open("rb") as handle:
            while block := handle.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()
