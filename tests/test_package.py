"""The wheel holds all it needs: built, installed into an empty environment, and used there."""

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
    # Dependencies are borrowed from here, which spares downloading them again; a path in a .pth file does not bring
    # along this environment's own (editable) ultr. That they are declared is tested in test_architecture.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    ask = [python, "-c", "import ultr; print(ultr.__file__)"]
    where = subprocess.run(ask, check=True, capture_output=True, text=True)
    assert str(environment) in where.stdout
    command = [bin_folder / "ultr", "demo", "--out", str(tmp_path / "demo"), "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "demo" / "log.parquet").is_file()
    assert (tmp_path / "demo" / "report.html").is_file()  # for which the wheel must hold its template
    assert (site / "ultr" / "py.typed").is_file()
