"""How much memory there is to use."""

from __future__ import annotations

from pathlib import Path

CGROUPS = (  # the limit of this process's group and what is used of it, in the two versions that Linux has
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
UNKNOWN = 4 << 30


def available_memory() -> int:
    """Bytes that can be taken without swapping, by the system or the group of processes this one is limited with."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")))
    except (OSError, StopIteration, ValueError, IndexError):
        pass
    for limit, used in CGROUPS:
        try:
            found.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # no such group, or it has no limit
            continue
    return max(0, min(found)) if found else UNKNOWN


def parse_bytes(text: str) -> int:
    """A size such as 512MB, 2GB or 1.5GiB in bytes."""
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in "KMGT" else ""
    size = float(number.removesuffix(unit)) * 1024 ** " KMGT".index(unit or " ")
    if not 0 <= size < 2**63:
        raise ValueError("no size that there is")
    return int(size)
