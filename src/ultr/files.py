"""Files: written whole or not at all, and recognised by their first bytes."""

from __future__ import annotations

import difflib
import errno
import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ultr.errors import DataError, OutputError

REPLACED = ".ultr-replaced"  # in a temporary place: what stood where the new one goes
AT_FDCWD, NO_REPLACE, EXCHANGE = -100, 1, 2  # of Linux's renameat2


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
    renamed over it at the end, and removed on any exception. What a process that was killed has left of an earlier
    attempt is removed at the start; what another is just writing is refused, unless it may be overwritten.
    """
    target = Path(target)
    place = target.resolve()  # a link keeps pointing where it does
    written_now = remove_abandoned(place.parent, place.name)
    refuse_existing(target, overwrite=overwrite, folder=folder)
    if written_now and not overwrite:
        raise OutputError("another process is writing it now", where=place, mend="wait for it, or choose another path")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        holder, lock = _new_holder(place)
    except OSError as error:
        raise OutputError(f"cannot write here ({error.strerror})", where=place, mend="choose another path") from error
    temporary = holder / place.name
    try:
        if folder:
            temporary.mkdir()
        yield temporary
        _sync(temporary)
        take_name(temporary, place, overwrite=overwrite)
        sync_folder(place.parent)
    except OSError as error:
        mend = "nothing was changed; free the way and run again"
        raise OutputError(f"writing failed ({error.strerror or error})", where=place, mend=mend) from error
    finally:
        shutil.rmtree(holder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


@contextmanager
def output_errors(where: object) -> Iterator[None]:
    """A disk that is full, or a place that cannot be written, as a refusal."""
    try:
        yield
    except OSError as error:
        mend = "free the way and run again, or choose another path"
        raise OutputError(f"writing failed ({error.strerror or error})", where=where, mend=mend) from error


# --- Temporaries: each is held by its process, and the system lets go of it however that ends -------------------------


def remove_abandoned(folder: Path, name: str | None = None) -> bool:
    """Remove what killed processes have left of outputs in a folder, or of one; whether any is being written now."""
    pattern = re.compile(rf"\.{'.*' if name is None else re.escape(name[:100])}\.[a-z0-9_]{{8}}\.partial")
    written_now = False
    try:
        holders = [Path(entry.path) for entry in os.scandir(folder) if pattern.fullmatch(entry.name)]
    except OSError:
        return False
    for holder in holders:
        try:
            lock = _lock(holder, wait=False)
        except BlockingIOError:
            written_now = True
            continue
        except OSError:  # it has just gone
            continue
        if lock is None:  # there are no locks here, so that none knows whether it is in use
            continue
        try:
            for replaced in (holder / REPLACED).glob("*"):  # killed before the new one had taken its name
                if not os.path.lexists(folder / replaced.name):
                    replaced.replace(folder / replaced.name)
            shutil.rmtree(holder, ignore_errors=True)
        finally:
            os.close(lock)
    return written_now


def _new_holder(target: Path) -> tuple[Path, int | None]:
    while True:
        holder = Path(tempfile.mkdtemp(prefix=f".{target.name[:100]}.", suffix=".partial", dir=target.parent))
        try:
            lock = _lock(holder, wait=True)
        except FileNotFoundError:
            continue
        if holder.is_dir():
            return holder, lock
        if lock is not None:  # taken for abandoned, in the moment before it was held
            os.close(lock)


def _lock(folder: Path, *, wait: bool) -> int | None:
    """Hold a folder until the descriptor is closed; none where systems or file systems have no such locks."""
    try:
        import fcntl
    except ImportError:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


# --- Renaming ---------------------------------------------------------------------------------------------------------


def take_name(temporary: Path, target: Path, *, overwrite: bool) -> None:
    """Rename a file or folder to the name of another, which is what was there before or what comes at any moment.

    A folder that it replaces takes the place of `temporary`, or is in the folder `REPLACED` beside it.
    """
    if not overwrite:
        try:
            if _rename_at_once(temporary, target, NO_REPLACE):
                return
        except FileExistsError:
            pass  # another process was faster
        refuse_existing(target, overwrite=False)
        temporary.replace(target)
    elif not target.is_dir():
        temporary.replace(target)
    elif not _rename_at_once(temporary, target, EXCHANGE):
        replaced = temporary.parent / REPLACED / target.name
        replaced.parent.mkdir()
        target.replace(replaced)
        try:
            temporary.replace(target)
        except OSError:
            replaced.replace(target)
            raise


def _rename_at_once(old: Path, new: Path, flag: int) -> bool:
    """Rename in a way that Linux has and POSIX lacks, in one step; False where there is no such way."""
    if sys.platform != "linux":
        return False
    import ctypes

    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    sys.audit("os.rename", str(old), str(new), -1, -1)  # as of any renaming by Python
    if rename(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flag) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(new))


def _sync(path: Path) -> None:
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        elif file.is_dir():
            sync_folder(file)
    if path.is_dir():
        sync_folder(path)


def sync_folder(folder: Path) -> None:
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
