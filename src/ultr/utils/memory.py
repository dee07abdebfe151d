"""The memory that is available to this process, and the parsing of sizes such as 2GB."""

from __future__ import annotations

from pathlib import Path

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


def parse_bytes(text: str) -> int:
    """Return a size such as 512MB, 2GB or 1.5GiB in bytes (1 KB = 1024); raise ValueError if the text is not a size."""
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in "KMGT" else ""
    size = float(number.removesuffix(unit)) * 1024 ** " KMGT".index(unit or " ")
    if not 0 <= size < 2**63:
        raise ValueError("must be from 0 to 2^63 - 1 bytes")
    return int(size)
