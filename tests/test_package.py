"""Build the wheel, install it into an empty environment, and use it there."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.long
def test_the_wheel_works_in_an_empty_environment(tmp_path):
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("ultr-*.whl")
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    bin_folder = environment / ("Scripts" if sys.platform == "win32" else "bin")
    python = bin_folder / "python"
    (site,) = environment.glob("lib/python*/site-packages")
    install = [*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    # The dependencies come from this environment, to avoid downloading them again. A path in a .pth file does not
    # include its editable install of ultr. test_architecture checks that the dependencies are declared.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    location = [python, "-c", "import ultr; print(ultr.__file__)"]
    assert str(environment) in subprocess.run(location, check=True, capture_output=True, text=True).stdout
    command = [bin_folder / "ultr", "demo", "--out", str(tmp_path / "demo"), "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "demo" / "log.parquet").is_file()
    assert (tmp_path / "demo" / "report.html").is_file()  # the wheel contains its template
    assert (site / "ultr" / "py.typed").is_file()
