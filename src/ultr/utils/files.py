"""Files and folders: atomic writing, checks of paths, file types by the first bytes, and locks."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ultr.errors import DataError, OutputError, closest
from ultr.utils.stores import COMPLETE, as_path, as_url, check_writable, fetched, send

REPLACED = ".ultr-replaced"  # folder inside a temporary one, for the old output while the new one takes its name
AT_FDCWD, NO_REPLACE, EXCHANGE = -100, 1, 2  # arguments of Linux's renameat2


def check_output(target: str | Path, *, overwrite: bool, folder: bool = False) -> None:
    """Raise OutputError if `target` exists and must not be replaced, or cannot be written.

    Call this before long work, to fail early.
    """
    if (url := as_url(target)) is not None:
        check_writable(url, overwrite=overwrite, folder=folder)
        return
    target = as_path(target)
    above = next(path for path in target.absolute().parents if os.path.lexists(path))
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        reason = "it is read-only for this user" if above.is_dir() else "it is not a folder"
        raise OutputError(f"cannot write into {above} ({reason})", where=target, hint="choose another path")
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise OutputError("output exists already", where=target, hint="choose another path or pass --overwrite")
    if not (target.is_dir() if folder else target.is_file()):
        kind = "folder" if folder else "regular file"
        raise OutputError(f"not a {kind}; not overwritten", where=target, hint="choose another path")


@contextmanager
def atomic_path(target: str | Path, *, overwrite: bool = False, folder: bool = False) -> Iterator[Path]:
    """Yield a temporary path next to `target` for the caller to write to; rename it to `target` after the `with` block.

    Whatever happens inside the block, `target` is either unchanged or complete. The temporary file or folder is synced
    to disk before it is renamed, and removed on any exception. Those that a killed process has left are removed first.
    Raise OutputError if another process is writing the same target, unless `overwrite` is true.

    If `target` is a URL, the temporary path is in the system's temporary folder, and its content is sent to the URL
    after the block. Files in `COMPLETE` are sent last.
    """
    if (url := as_url(target)) is not None:
        url = url.rstrip("/")
        check_writable(url, overwrite=overwrite, folder=folder)
        with tempfile.TemporaryDirectory(prefix="ultr-") as above:
            sent = Path(above) / url.rsplit("/", 1)[-1]
            if folder:
                sent.mkdir()
            with output_errors(above):
                yield sent
            send(sent, url, last=COMPLETE)
        return
    target = as_path(target)
    place = target.resolve()  # a symbolic link stays, and the file it points to is replaced
    written_now = remove_abandoned(place.parent, place.name)
    check_output(target, overwrite=overwrite, folder=folder)
    if written_now and not overwrite:
        raise OutputError("another process is writing it now", where=place, hint="wait, or choose another path")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        holder, lock_descriptor = _new_holder(place)
    except OSError as error:
        raise OutputError(f"cannot write here ({error.strerror})", where=place, hint="choose another path") from error
    temporary = holder / place.name
    try:
        if folder:
            temporary.mkdir()
        yield temporary
        _sync(temporary)
        take_name(temporary, place, overwrite=overwrite)
        sync_folder(place.parent)
    except OSError as error:
        hint = "nothing was changed; check the disk and the permissions, then run again"
        raise OutputError(f"writing failed ({error.strerror or error})", where=place, hint=hint) from error
    finally:
        shutil.rmtree(holder, ignore_errors=True)
        if lock_descriptor is not None:
            os.close(lock_descriptor)


@contextmanager
def output_errors(where: object) -> Iterator[None]:
    """Turn an OSError, such as a full disk, into an OutputError."""
    try:
        yield
    except OSError as error:
        hint = "check the disk and the permissions, then run again, or choose another path"
        raise OutputError(f"writing failed ({error.strerror or error})", where=where, hint=hint) from error


# --- Temporary outputs: each is in a folder that its process locks; the system unlocks it when the process ends -------


def remove_abandoned(folder: Path, name: str | None = None) -> bool:
    """Remove temporary outputs that killed processes have left in `folder`: of the output `name`, or of all outputs.

    Return whether another process is writing such an output now.
    """
    pattern = re.compile(rf"\.{'.*' if name is None else re.escape(name[:100])}\.[a-z0-9_]{{8}}\.partial")
    written_now = False
    try:
        holders = [Path(entry.path) for entry in os.scandir(folder) if pattern.fullmatch(entry.name)]
    except OSError:
        return False
    for holder in holders:
        try:
            lock_descriptor = _lock_folder(holder, wait=False)
        except BlockingIOError:
            written_now = True
            continue
        except OSError:  # another process has just removed it
            continue
        if lock_descriptor is None:  # the file system has no locks, so the folder may be in use
            continue
        try:
            for replaced in (holder / REPLACED).glob("*"):  # the process was killed between two renames
                if not os.path.lexists(folder / replaced.name):
                    replaced.replace(folder / replaced.name)
            shutil.rmtree(holder, ignore_errors=True)
        finally:
            os.close(lock_descriptor)
    return written_now


def _new_holder(target: Path) -> tuple[Path, int | None]:
    while True:
        holder = Path(tempfile.mkdtemp(prefix=f".{target.name[:100]}.", suffix=".partial", dir=target.parent))
        try:
            lock_descriptor = _lock_folder(holder, wait=True)
        except FileNotFoundError:
            continue
        if holder.is_dir():
            return holder, lock_descriptor
        if lock_descriptor is not None:  # another process removed it as abandoned before it was locked
            os.close(lock_descriptor)


def _lock_folder(folder: Path, *, wait: bool) -> int | None:
    """Lock a folder until the returned file descriptor is closed; return None if the file system has no locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if lock(descriptor, wait=wait):
            return descriptor
    except BlockingIOError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


# --- Folders in memory ------------------------------------------------------------------------------------------------


def read_contents(folder: Path, *, without: Collection[str] = ()) -> dict[str, bytes]:
    """Return the contents of all files of a folder by relative path, but for files with the names in `without`."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in without]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def write_contents(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write what `read_contents` returned into a folder."""
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


# --- Renaming ---------------------------------------------------------------------------------------------------------


def take_name(temporary: Path, target: Path, *, overwrite: bool) -> None:
    """Rename `temporary` to `target`, in one step where the system can.

    If `target` was a folder, the old one is now at `temporary`, or in the folder `REPLACED` next to it.
    """
    if not overwrite:
        try:
            if _rename_at_once(temporary, target, NO_REPLACE):
                return
        except FileExistsError:
            pass  # another process was faster
        check_output(target, overwrite=False)
        temporary.replace(target)
    elif not target.is_dir():
        temporary.replace(target)
    elif not _rename_at_once(temporary, target, EXCHANGE):
        replaced = temporary.parent / REPLACED / target.name
        replaced.parent.mkdir(exist_ok=True)
        target.replace(replaced)
        try:
            temporary.replace(target)
        except OSError:
            replaced.replace(target)
            raise


def _rename_at_once(old: Path, new: Path, flag: int) -> bool:
    """Rename `old` to `new` in one step with Linux's `renameat2` and a flag; return False if the system cannot."""
    if sys.platform != "linux":
        return False
    import ctypes

    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    sys.audit("os.rename", str(old), str(new), -1, -1)  # os.rename reports its calls in this way
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
    """Return the path of a file; raise DataError if it is not an existing file, or is empty. A URL is copied first."""
    path = fetched(path)
    try:
        if path.is_dir():
            raise DataError("is a folder, not a file", where=path, hint="pass the path of a file in it")
        if path.is_file():
            if path.stat().st_size == 0:
                raise DataError("the file is empty", where=path, hint="create the file again")
            return path
        siblings = sorted(p.name for p in path.parent.glob("*") if p.is_file()) if path.parent.is_dir() else []
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror})", where=path, hint="check the path") from error
    raise DataError("no such file", where=path, hint=closest(path.name, siblings) or "check the path")


_MAGIC = {b"PAR1": "Parquet", b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"ARROW1": "Arrow", b"\x89HDF": "HDF5"}


def content_kind(path: Path) -> str:
    """Return the type of a file by its first bytes: `Parquet`, `gzip`, `zip`, ..., `text` or `unknown binary data`."""
    with path.open("rb") as handle:
        head = handle.read(1024)
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    return "unknown binary data" if b"\0" in head else "text"


def fingerprint(path: Path) -> str:
    """Return a hexadecimal digest of a file's content, or of the names and contents of all files in a folder."""
    digest = hashlib.blake2b(digest_size=16)
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    for file in files:
        if path.is_dir():
            digest.update(file.relative_to(path).as_posix().encode() + b"\0")
        with file.open("rb") as handle:
            while block := handle.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


# --- Locks ------------------------------------------------------------------------------------------------------------
# File locks that the operating system releases when their process ends, even if it is killed.


def lock(descriptor: int, *, wait: bool) -> bool:
    """Lock an open file or folder for this process until its descriptor is closed.

    Return False if the operating system or the file system has no locks. Raise BlockingIOError if another process
    holds the lock and `wait` is False.
    """
    try:
        import fcntl
    except ImportError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True
