"""The memory that is available to this process, that Parquet files need, and the parsing of sizes such as 2GB."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from ultr.errors import DataError

CGROUPS = (  # files with the limit and the use of this process's control group, in version 2 and version 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
UNKNOWN = 4 << 30  # bytes assumed if the system does not report its memory


def available_memory() -> int:
    """Return the bytes that can be used without swapping, within the limits of the machine and the control group."""
    sizes = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes.append(next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")))
    except (OSError, StopIteration, ValueError, IndexError):
        pass
    for limit, used in CGROUPS:
        try:
            sizes.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # no such group, or it has no limit
            continue
    return max(0, min(sizes)) if sizes else UNKNOWN


# Bytes of a value in memory, by its type in Parquet; of texts (BYTE_ARRAY), those of their lengths or codes.
WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 4}
TEXT_COPIES = 2  # of texts, while the parts of a column are joined


def check_parquet_fits(files: Iterable[Callable[..., Any]], names: Sequence[str], *, where: object, hint: str) -> None:
    """Raise DataError if columns of Parquet files need more memory than is free.

    A value that repeats takes almost no room in a file, so the size of a file does not say how large its columns are.
    Each of `files` is a function that opens a file, with the options of `pq.ParquetFile`.
    """
    import pyarrow as pa

    free, size = available_memory(), 0
    for open_file in files:
        try:
            size += _parquet_bytes(open_file, names, free - size)
        except (pa.ArrowException, OSError):
            continue  # reading the log reports the error
        if size > free:
            got = f"at least {size / 2**30:,.1f} GiB; {free / 2**30:,.1f} GiB are free"
            raise DataError("the log does not fit in memory", where=where, got=got, hint=hint)


def _parquet_bytes(open_file: Callable[..., Any], names: Sequence[str], free: int) -> int:
    """Return the bytes that columns of a file need, or a part of them that is more than `free`."""
    chunks = list(_chunks(open_file(), set(names)))
    size: int = sum(chunk.num_values * WIDTHS.get(chunk.physical_type, 1) for _, chunk in chunks)
    texts = [(name, chunk) for name, chunk in chunks if chunk.physical_type == "BYTE_ARRAY"]
    most = sum(chunk.num_values * chunk.total_uncompressed_size for _, chunk in texts if chunk.has_dictionary_page)
    if size <= free < size + TEXT_COPIES * most:
        return size + _bytes_of_texts(open_file, sorted({name for name, _ in texts}), free - size)
    plain: int = sum(chunk.total_uncompressed_size for _, chunk in texts)
    return size + TEXT_COPIES * plain


def _chunks(file: Any, names: set[str]) -> Iterable[tuple[str, Any]]:
    """Yield the parts of columns in a Parquet file, each with the name of its column."""
    footer = file.metadata
    for group in map(footer.row_group, range(footer.num_row_groups)):
        for chunk in map(group.column, range(group.num_columns)):
            # A column name may contain dots, which also separate the parts of a path in Parquet.
            starts = accumulate(chunk.path_in_schema.split("."), "{}.{}".format)
            if (name := next((start for start in starts if start in names), None)) is not None:
                yield name, chunk


def _bytes_of_texts(open_file: Callable[..., Any], names: list[str], free: int) -> int:
    """Return the bytes of columns of texts, or of the first rows that need more than `free`; texts are read once."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    size, file = 0, open_file(read_dictionary=names)
    for batch in file.iter_batches(1 << 16, columns=names):
        for column in batch.columns:
            if pa.types.is_dictionary(column.type):
                lengths = pc.binary_length(column.dictionary).fill_null(0).to_numpy(zero_copy_only=False)
                codes = column.indices.drop_null().to_numpy(zero_copy_only=False)
                size += TEXT_COPIES * int(np.bincount(codes, minlength=len(lengths)) @ lengths.astype(float))
            else:
                size += TEXT_COPIES * column.nbytes
        if size > free:
            break
    return size


def parse_bytes(text: str) -> int:
    """Return a size such as 512MB, 2GB or 1.5GiB in bytes (1 KB = 1024); raise ValueError if the text is not a size."""
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in "KMGT" else ""
    size = float(number.removesuffix(unit)) * 1024 ** " KMGT".index(unit or " ")
    if not 0 <= size < 2**63:
        raise ValueError("must be from 0 to 2^63 - 1 bytes")
    return int(size)
