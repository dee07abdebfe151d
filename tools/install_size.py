"""Install ultr with an extra into an empty environment, and print the size of its packages on disk.

    python tools/install_size.py [--extra serve] [--limit 150] [--keep FOLDER]

The size is that of the files of the packages, in MB (10^6 bytes), without bytecode, which pip adds unless it gets
--no-compile. The exit code is 1 if the size exceeds the limit. With --keep, the environment stays in that folder.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]


def install(folder: Path, extra: str) -> Path:
    """Make an environment with only ultr, the extra, and their dependencies; return its folder of packages."""
    venv.create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--quiet",
        "--disable-pip-version-check",
        "--python",
        str(folder / "bin/python"),
    ]
    subprocess.run([*pip, "install", "--no-compile", f"{ROOT}[{extra}]"], check=True)
    return site


def sizes(site: Path) -> Counter[str]:
    """Return the bytes of each entry of a folder of packages, without bytecode."""
    found: Counter[str] = Counter()
    for path in site.rglob("*"):
        if path.is_file() and path.suffix != ".pyc":
            found[path.relative_to(site).parts[0]] += path.stat().st_size
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extra", default="serve")
    parser.add_argument("--limit", type=float, default=150.0, help="MB")
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        site = install(options.keep or Path(temporary) / "environment", options.extra)
        found = sizes(site)
        packages = len([*site.glob("*.dist-info")])
    for name, size in found.most_common(10):
        print(f"{size / 1e6:8.1f} MB  {name}")
    total = sum(found.values()) / 1e6
    print(f"{total:8.1f} MB  ultr[{options.extra}]: {packages} packages; the limit is {options.limit:g} MB")
    return int(total > options.limit)


if __name__ == "__main__":
    sys.exit(main())
