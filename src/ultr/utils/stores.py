"""Files in object stores and other remote places, which URLs name: `s3://`, `gs://`, `hdfs://` and some of fsspec.

pyarrow's file systems read and write them; fsspec does for the schemes that pyarrow does not have. `file://` URLs are
paths on this machine. A `Path` made of a URL, which turns `s3://bucket` into `s3:/bucket`, is still recognised. In a
text, one slash is an error, so that a mistyped URL never becomes a folder on this machine.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from ultr.errors import DataError, NetworkError, OptionError, OutputError, UltrError

# One letter is a Windows drive. A known scheme without any slash, as in `s3:bucket`, is a mistyped URL too.
URL = re.compile(r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]+):(?P<slashes>/+)(?P<rest>.*)", re.DOTALL)
COMPLETE = ("lists.json", "model")  # files and folders that say that a folder of lists, or a run, is complete
NATIVE = ("s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss")  # schemes of pyarrow's own file systems
HOSTLESS = ("hdfs", "viewfs", "memory")  # schemes whose URLs may have three slashes
OTHER = ("az", "adl", "oss", "cos", "memory")  # schemes of fsspec; others, such as http and ssh, are not stores of logs
SENDING = ".ultr-sending"  # a file in a folder of a store that is being written, or whose writing was killed
PROBE = ".ultr-probe"  # end of the name of an empty file that is written and removed, to check permissions
CONNECT_SECONDS, ANSWER_SECONDS, ATTEMPTS = 3, 5, 3  # S3: three attempts of at most five seconds without an answer
# Texts of exceptions of stores that could not be reached, or that did not answer.
NETWORK = re.compile(
    r"NETWORK_CONNECTION|curlCode|REQUEST_TIMEOUT|SERVICE_UNAVAILABLE|SLOW_DOWN|INTERNAL_FAILURE|timed out"
    r"|Connection (refused|reset|aborted)|(resolve|connect to) (host|server)|UNAVAILABLE:",
    re.IGNORECASE,
)


class Stored(NamedTuple):
    """A file or folder in a store."""

    url: str
    filesystem: Any
    path: str  # in the file system
    size: int | None  # of a file; None for a folder
    changed: int | None = None  # the time of the last change of a file in nanoseconds, if the store tells it


def as_url(path: str | Path) -> str | None:
    """Return a path as a URL of a store; None if it is a path on this machine."""
    match = URL.fullmatch(str(path))
    scheme = str(path).partition(":")[0].lower() if match is None else match["scheme"].lower()
    if scheme == "file" or (match is None and (scheme == str(path).lower() or scheme not in (*NATIVE, *OTHER))):
        return None
    rest = "" if match is None else match["rest"]
    slashes = 2 if match is None or isinstance(path, Path) else len(match["slashes"])
    complete = match is not None and bool(rest) and (slashes == 2 or (slashes > 2 and scheme in HOSTLESS))
    if scheme in (*NATIVE, *OTHER) and not complete:
        hint = f"write two slashes and a name, such as {scheme}://bucket/folder"
        raise OptionError("this is not a complete URL", got=f"'{path}'", hint=hint)
    if scheme in (*NATIVE, *OTHER) and re.match(r"[^/@]*:[^/]*@", rest):  # a run records where its data is from
        hint = "set the environment variables of the store, such as AWS_SECRET_ACCESS_KEY"
        raise OptionError("a URL must not have a password", got=f"'{path}'", hint=hint)
    return f"{scheme}://{'/' * (slashes > 2)}{rest}"


def url_below(path: str | Path, name: str) -> str:
    """Return the path or URL of a file or folder in a folder."""
    url = as_url(path)
    return str(as_path(path) / name) if url is None else f"{url.rstrip('/')}/{name}"


def as_path(path: str | Path) -> Path:
    """Return a path on this machine; the part after `file://` of a URL."""
    match = URL.fullmatch(str(path))
    return Path(path) if match is None else Path("/" + unquote(match["rest"]))


def on_this_machine(path: str | Path) -> Path:
    """Return a path; raise OptionError if it is a URL of a store."""
    if as_url(path) is not None:
        raise OptionError("this must be a path on this machine", got=shown(path), hint="copy the files afterwards")
    return as_path(path)


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
        reject_network(error, url)
        kind = OutputError if writing else DataError
        brief = " ".join(str(error).split())[:300]
        hint = "check the URL, the credentials, and the endpoint (AWS_ENDPOINT_URL for s3://)"
        if isinstance(error, ImportError) or "not built with" in brief:
            hint = "install the fsspec package for this store, such as s3fs or gcsfs"
        raise kind(f"the store cannot be used ({brief})", where=url, hint=hint) from error


def reject_network(error: BaseException, where: object) -> None:
    """Raise NetworkError if an exception says that a store or another host could not be reached, or did not answer."""
    text = " ".join(str(error).split())
    if isinstance(error, ConnectionError | TimeoutError) or NETWORK.search(text):
        hint = "check the network and the address (AWS_ENDPOINT_URL for s3://), then run the same command again"
        raise NetworkError(f"the connection failed ({text[:200]})", where=where, hint=hint) from error


def _s3(bucket: str) -> Any:
    """Return the file system of a bucket in S3; it gives up after seconds, where that of a URL takes minutes."""
    import pyarrow.fs

    address = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    scheme, _, host = address.rpartition("://")
    options = {"endpoint_override": host.rstrip("/"), "scheme": scheme or "https"} if host else {}
    return pyarrow.fs.S3FileSystem(
        region=pyarrow.fs.FileSystem.from_uri(f"s3://{bucket}/")[0].region,
        connect_timeout=CONNECT_SECONDS,
        request_timeout=ANSWER_SECONDS,
        retry_strategy=pyarrow.fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
        **options,
    )


@lru_cache(maxsize=64)
def _filesystem(scheme: str, host: str) -> Any:
    """Return the file system of a bucket or host; `lru_cache` keeps its connections."""
    import pyarrow as pa
    import pyarrow.fs

    if scheme in NATIVE:
        try:
            if scheme == "s3":
                return _s3(host)
            limit = f"?retry_limit_seconds={ATTEMPTS * ANSWER_SECONDS}" if scheme in ("gs", "gcs") else ""
            return pyarrow.fs.FileSystem.from_uri(f"{scheme}://{host}/{limit}")[0]
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
    if info.type != pyarrow.fs.FileType.File:
        return Stored(url, filesystem, inside, None)
    return Stored(url, filesystem, inside, info.size, info.mtime_ns)


def files_below(folder: Stored) -> list[Stored]:
    """Return all files below a folder of a store, sorted by path."""
    import pyarrow.fs

    with store_errors(folder.url):
        infos = folder.filesystem.get_file_info(pyarrow.fs.FileSelector(folder.path, recursive=True))
    base = len(folder.path.strip("/"))
    files = [info for info in infos if info.type == pyarrow.fs.FileType.File]
    return [
        Stored(folder.url + info.path.lstrip("/")[base:], folder.filesystem, info.path, info.size, info.mtime_ns)
        for info in sorted(files, key=lambda info: info.path)
    ]


def stored_files(url: str) -> tuple[object, ...] | None:
    """Return the names, sizes and times of the files of a folder; None if it is not there or not complete."""
    stored = find(url)
    files = [] if stored is None or stored.size is not None else files_below(stored)
    if not files or any(file.url.endswith(f"/{SENDING}") for file in files):
        return None
    return tuple((file.url, file.size, file.changed) for file in files)


def copy_here(url: str, folder: Path) -> Path:
    """Copy the file or folder of a URL into a folder of this machine; return its path."""
    stored, target = find(url), folder / url.rsplit("/", 1)[-1]
    if stored is None:
        raise DataError("no such file or folder", where=url, hint="check the URL")
    files = [stored] if stored.size is not None else files_below(stored)
    if any(file.url.endswith(f"/{SENDING}") for file in files):
        hint = "wait, or run that command again"
        raise DataError("it is being written, or the command that wrote it was stopped", where=url, hint=hint)
    for file in files:
        part = target if stored.size is not None else target / file.url[len(url) + 1 :]
        part.parent.mkdir(parents=True, exist_ok=True)
        with store_errors(file.url), file.filesystem.open_input_stream(file.path) as source, part.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 22)
    if stored.size is None and files_below(stored) != files:
        raise DataError("it was changed while it was read", where=url, hint="try again")
    return target


@lru_cache(maxsize=64)
def _fetched(url: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="ultr-fetched-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return copy_here(url, folder)


def fetched(path: str | Path) -> Path:
    """Return a path on this machine with the file or folder; a URL is copied once, and removed when Python ends."""
    url = as_url(path)
    return as_path(path) if url is None else _fetched(url.rstrip("/"))


@contextmanager
def named(folder: Path, url: str) -> Iterator[None]:
    """Let messages of errors name a URL in place of the folder on this machine that holds its files."""
    try:
        yield
    except UltrError as error:
        error.args = (str(error).replace(str(folder), url),)
        raise


@contextmanager
def kept_here(out: str | Path, cache: Path, *, resume: bool, overwrite: bool, writes: bool) -> Iterator[Path]:
    """Yield the folder on this machine in which an output folder is written, which may take long and be resumed.

    For a path this is the path itself. For a URL it is a folder in `cache`, which is sent to the URL and removed after
    the block, if `writes` is true, with the folders next to it. It stays if the work fails, so that the work can be
    resumed on this machine. With `resume`, it begins with what is at the URL.
    """
    url = as_url(out)
    if url is None:
        yield as_path(out)
        return
    url = url.rstrip("/")
    folder = cache / hashlib.blake2b(url.encode(), digest_size=8).hexdigest() / url.rsplit("/", 1)[-1]
    check_writable(url, overwrite=overwrite or resume, folder=True)
    before = stored_files(url) if resume else None
    fetches = writes and not folder.exists() and before is not None
    if writes and not resume:
        shutil.rmtree(folder.parent, ignore_errors=True)
    if fetches:
        shutil.copytree(fetched(url), folder)
    copied = _files_here(folder) if fetches else []
    try:
        with named(folder, url):
            yield folder
    except UltrError:
        if fetches:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if writes and folder.parent.is_dir():
        above = url.rsplit("/", 1)[0]
        for each in sorted(folder.parent.iterdir()):
            if not copied or each != folder or _files_here(folder) != copied:
                send(each, f"{above}/{each.name}", last=COMPLETE)
        shutil.rmtree(folder.parent, ignore_errors=True)


def _files_here(folder: Path) -> list[tuple[object, ...]]:
    return sorted((str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file())


def send(source: Path, url: str, *, last: tuple[str, ...]) -> None:
    """Copy a file or folder to a URL, in place of what is there; files with a part named in `last` come last.

    A store replaces a file in one step, but not a folder. The last files say that a folder is complete. While a folder
    is sent, and if the process is killed meanwhile, it has a file `SENDING`: it is not read, and it may be replaced.
    """
    files = sorted(p for p in source.rglob("*") if p.is_file()) if source.is_dir() else [source]
    names = {file: "" if file == source else f"/{file.relative_to(source).as_posix()}" for file in files}
    # First those with such a part further down: they belong to a folder inside this one.
    parts = {file: names[file].split("/")[1:] for file in files}
    files.sort(key=lambda file: bool(set(parts[file]) & set(last)) + (parts[file][:1] != [] and parts[file][0] in last))
    old = {}
    if source.is_dir() and (stored := find(url)) is not None and stored.size is None:
        old = {file.url: file for file in files_below(stored) if file.url != f"{url}/{SENDING}"}
    with store_errors(url, writing=True):
        filesystem, base = _place(url)
        if source.is_dir():
            _write(filesystem, url, f"{base}/{SENDING}")
        for number, file in enumerate(files):
            if number == len(files) - 1:
                for name in old.keys() - {url + name for name in names.values()}:
                    filesystem.delete_file(old[name].path)
            _write(filesystem, url, base + names[file], file)
        if source.is_dir():
            filesystem.delete_file(f"{base}/{SENDING}")
    _fetched.cache_clear()


def _write(filesystem: Any, url: str, target: str, file: Path | None = None) -> None:
    """Write a file to a path of a store: a copy of `file`, or an empty one."""
    if not url.startswith(("s3:", "gs:", "gcs:")):  # these have no folders
        filesystem.create_dir(target.rsplit("/", 1)[0], recursive=True)
    with filesystem.open_output_stream(target) as copy:
        if file is not None:
            with file.open("rb") as content:
                shutil.copyfileobj(content, copy, 1 << 22)


def check_writable(url: str, *, overwrite: bool, folder: bool) -> None:
    """Raise OutputError if a URL exists and must not be replaced, cannot be written, or names nothing in a bucket.

    A folder whose writing was stopped may be replaced.
    """
    url = url.rstrip("/")
    if not url.split("://", 1)[1].rstrip("/").count("/"):
        raise OutputError("the URL names no file or folder", where=url, hint="add a name after the bucket or host")
    stored = find(url)
    stopped = stored is not None and folder and stored.size is None and find(f"{url}/{SENDING}") is not None
    if stored is not None and not stopped:
        if not overwrite:
            raise OutputError("output exists already", where=url, hint="choose another path or pass --overwrite")
        if (stored.size is None) != folder:
            kind = "folder" if folder else "regular file"
            what = f"not a {kind}; not overwritten"
            raise OutputError(what, where=url, hint="choose another path")
    with store_errors(url, writing=True):
        filesystem, base = _place(url)
        _write(filesystem, url, base + PROBE)
        filesystem.delete_file(base + PROBE)
