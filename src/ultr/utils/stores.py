"""Files in object stores and other remote places, which URLs name: `s3://`, `gs://`, `hdfs://` and some of fsspec.

pyarrow's file systems read and write them; fsspec does for the schemes that pyarrow does not have. `file://` URLs are
paths on this machine. A URL that went through `Path`, which makes `s3:/bucket` of `s3://bucket`, is still recognised.
"""

from __future__ import annotations

import atexit
import hashlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ultr.errors import DataError, OutputError

URL = re.compile(r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]+):/+(?P<rest>.*)", re.DOTALL)  # one letter is a Windows drive
COMPLETE = ("lists.json", "model")  # files and folders that say that a folder of lists, or a run, is complete
NATIVE = ("s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss")  # schemes of pyarrow's own file systems
OTHER = ("az", "adl", "oss", "cos", "memory")  # schemes of fsspec; others, such as http and ssh, are not stores of logs


class Stored(NamedTuple):
    """A file or folder in a store."""

    url: str
    filesystem: Any
    path: str  # in the file system
    size: int | None  # of a file; None for a folder


def as_url(path: str | Path) -> str | None:
    """Return a path as a URL of a store; None if it is a path on this machine."""
    match = URL.fullmatch(str(path))
    if match is None or match["scheme"].lower() == "file":
        return None
    return f"{match['scheme'].lower()}://{match['rest']}"


def as_path(path: str | Path) -> Path:
    """Return a path on this machine; the part after `file://` of a URL."""
    match = URL.fullmatch(str(path))
    return Path(path) if match is None else Path("/" + unescaped(match["rest"]))


def unescaped(text: str) -> str:
    """Return a part of a URL with %20 and the like replaced by the characters that they stand for."""
    letters = re.sub(rb"%([0-9A-Fa-f]{2})", lambda match: bytes([int(match[1], 16)]), text.encode())
    return letters.decode(errors="replace")


def shown(path: str | Path) -> str:
    """Return a path for messages, or a URL as it was before it went through `Path`."""
    return as_url(path) or str(path)


@contextmanager
def store_errors(url: str, *, writing: bool = False) -> Iterator[None]:
    """Turn the exceptions of a store into a DataError or, if something is written, an OutputError."""
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException, ImportError, ValueError, NotImplementedError) as error:
        kind = OutputError if writing else DataError
        brief = " ".join(str(error).split())[:300]
        hint = "check the URL, the credentials, and the endpoint (AWS_ENDPOINT_URL for s3://)"
        if isinstance(error, ImportError) or "not built with" in brief:
            hint = "install the fsspec package for this store, such as s3fs or gcsfs"
        raise kind(f"the store cannot be used ({brief})", where=url, hint=hint) from error


@lru_cache(maxsize=64)
def _filesystem(scheme: str, host: str) -> Any:
    """Return the file system of a bucket or host; `lru_cache` keeps its connections."""
    import pyarrow as pa
    import pyarrow.fs

    if scheme in NATIVE:
        try:
            return pyarrow.fs.FileSystem.from_uri(f"{scheme}://{host}/")[0]
        except (pa.ArrowNotImplementedError, ImportError, AttributeError):
            pass  # pyarrow was built without this store
    elif scheme not in OTHER:
        hint = f"use one of {', '.join(f'{name}://' for name in ('file', *NATIVE, *OTHER[:-1]))}"
        raise DataError("this kind of URL is not supported", got=f"{scheme}://{host}", hint=hint)
    import fsspec

    return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fsspec.filesystem(scheme)))


def _place(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it: with a bucket in an object store, without a host in HDFS."""
    scheme, rest = url.split("://", 1)
    host, _, path = rest.partition("/")
    return _filesystem(scheme, host), f"/{path}" if scheme in ("hdfs", "viewfs") else rest


def as_fsspec(filesystem: Any, scheme: str) -> Any:
    """Return a file system of pyarrow for libraries that use fsspec, which name its files `SCHEME://PATH`."""
    from fsspec.implementations.arrow import ArrowFSWrapper

    def path_in_store(path: str) -> str:
        return path.removeprefix(f"{scheme}://")

    parts = {"protocol": (scheme,), "_strip_protocol": staticmethod(path_in_store), "cachable": False}
    return type("Store", (ArrowFSWrapper,), parts)(filesystem)


def find(path: str | Path) -> Stored | None:
    """Return what a URL names; None if there is nothing."""
    import pyarrow.fs

    url = str(as_url(path)).rstrip("/")
    with store_errors(url):
        filesystem, inside = _place(url)
        info = filesystem.get_file_info(inside)
    if info.type == pyarrow.fs.FileType.NotFound:
        return None
    return Stored(url, filesystem, inside, info.size if info.type == pyarrow.fs.FileType.File else None)


def files_below(folder: Stored) -> list[Stored]:
    """Return all files below a folder of a store, sorted by path."""
    import pyarrow.fs

    with store_errors(folder.url):
        infos = folder.filesystem.get_file_info(pyarrow.fs.FileSelector(folder.path, recursive=True))
    base = len(folder.path.strip("/"))
    files = [info for info in infos if info.type == pyarrow.fs.FileType.File]
    return [
        Stored(folder.url + info.path.lstrip("/")[base:], folder.filesystem, info.path, info.size)
        for info in sorted(files, key=lambda info: info.path)
    ]


@lru_cache(maxsize=64)
def _fetched(url: str) -> Path:
    stored = find(url)
    if stored is None:
        raise DataError("no such file or folder", where=url, hint="check the URL")
    folder = Path(tempfile.mkdtemp(prefix="ultr-fetched-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    target = folder / url.rsplit("/", 1)[-1]
    for file in [stored] if stored.size is not None else files_below(stored):
        part = target if stored.size is not None else target / file.url[len(url) + 1 :]
        part.parent.mkdir(parents=True, exist_ok=True)
        with store_errors(file.url), file.filesystem.open_input_stream(file.path) as source, part.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 22)
    return target


def fetched(path: str | Path) -> Path:
    """Return a path on this machine with the file or folder; a URL is copied once, and removed when Python ends."""
    url = as_url(path)
    return as_path(path) if url is None else _fetched(url.rstrip("/"))


@contextmanager
def kept_here(out: str | Path, cache: Path, *, resume: bool, overwrite: bool, writes: bool) -> Iterator[Path]:
    """Yield the folder on this machine in which an output folder is written, which may take long and be resumed.

    For a path this is the path itself. For a URL it is a folder in `cache`, which is sent to the URL and removed after
    the block, if `writes` is true. It stays if the work fails, so that the work can be resumed on this machine.
    """
    url = as_url(out)
    if url is None:
        yield as_path(out)
        return
    url = url.rstrip("/")
    folder = cache / hashlib.blake2b(url.encode(), digest_size=8).hexdigest() / url.rsplit("/", 1)[-1]
    if not resume:
        check_writable(url, overwrite=overwrite, folder=True)
        if writes:
            shutil.rmtree(folder.parent, ignore_errors=True)
    elif writes and not folder.exists() and find(url) is not None:
        shutil.copytree(fetched(url), folder)
    yield folder
    if writes:
        send(folder, url, last=COMPLETE)
        shutil.rmtree(folder.parent, ignore_errors=True)


def send(source: Path, url: str, *, last: tuple[str, ...]) -> None:
    """Copy a file or folder to a URL, in place of what is there; files with a part named in `last` come last.

    A store replaces a file in one step, but not a folder. The last files say that a folder is complete.
    """
    files = sorted(p for p in source.rglob("*") if p.is_file()) if source.is_dir() else [source]
    names = {file: "" if file == source else f"/{file.relative_to(source).as_posix()}" for file in files}
    # First those with such a part further down: they belong to a folder inside this one.
    parts = {file: names[file].split("/")[1:] for file in files}
    files.sort(key=lambda file: bool(set(parts[file]) & set(last)) + (parts[file][:1] != [] and parts[file][0] in last))
    old = {}
    if source.is_dir() and (stored := find(url)) is not None and stored.size is None:
        old = {file.url: file for file in files_below(stored)}
    with store_errors(url, writing=True):
        filesystem, base = _place(url)
        for number, file in enumerate(files):
            if number == len(files) - 1:
                for name in old.keys() - {url + name for name in names.values()}:
                    filesystem.delete_file(old[name].path)
            target = base + names[file]
            if not url.startswith(("s3:", "gs:", "gcs:")):  # these have no folders
                filesystem.create_dir(target.rsplit("/", 1)[0], recursive=True)
            with file.open("rb") as content, filesystem.open_output_stream(target) as copy:
                shutil.copyfileobj(content, copy, 1 << 22)
    _fetched.cache_clear()


def check_writable(url: str, *, overwrite: bool, folder: bool) -> None:
    """Raise OutputError if a URL exists and must not be replaced, or names no file or folder in a bucket."""
    if not url.split("://", 1)[1].rstrip("/").count("/"):
        raise OutputError("the URL names no file or folder", where=url, hint="add a name after the bucket or host")
    stored = find(url)
    if stored is None:
        return
    if not overwrite:
        raise OutputError("output exists already", where=url, hint="choose another path or pass --overwrite")
    if (stored.size is None) != folder:
        kind = "folder" if folder else "plain file"
        raise OutputError(f"exists and is not a {kind}; it is not replaced", where=url, hint="choose another path")
