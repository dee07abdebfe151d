from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import ultr.errors
from ultr.errors import (
    TRAIN_PACKAGES,
    ColumnError,
    MissingExtraError,
    UltrError,
    missing_for_training,
    nearest,
)

ROOT = Path(__file__).parents[1]


def test_a_message_says_where_what_got_and_hint():
    error = ColumnError("no column 'pos'", where="log.csv", got="2 columns", hint="did you mean 'position'?")
    assert str(error) == "log.csv: no column 'pos', got 2 columns; did you mean 'position'?"


def subclasses(kind: type[UltrError]) -> set[type[UltrError]]:
    return {kind}.union(*map(subclasses, kind.__subclasses__()))


def test_the_exit_codes_are_those_of_the_table():
    codes = {kind.__name__: kind.exit_code for kind in subclasses(UltrError) if kind.__module__ == "ultr.errors"}
    expected = dict.fromkeys(codes, 1) | {"OptionError": 2, "LabelError": 2, "UnfinishedError": 3, "NetworkError": 4}
    expected |= {"DataError": 5, "AbsentError": 5, "ColumnError": 5}
    assert codes == expected
    row = re.compile(r"^\| +(\d+) +\|", re.MULTILINE)
    page = (ROOT / "docs" / "reliability.md").read_text()
    listed = row.findall(page.split("## Exit codes")[1].split("\n## ")[0])
    assert row.findall(ultr.errors.__doc__) == listed == ["0", "1", "2", "3", "4", "5", "130"]
    for name in codes:
        assert name in ultr.errors.__doc__


def test_a_missing_extra_names_its_install_command():
    assert "pip install 'ultr[movielens]'" in str(MissingExtraError("MovieLens", package="implicit", extra="movielens"))


BLOCKED = f"import sys\nfor name in {sorted(TRAIN_PACKAGES)}: sys.modules[name] = None\n"


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", BLOCKED + code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", ["train x --out y", "bias x", "report x", "export x --out y"])
def test_without_the_packages_of_training_a_command_names_the_extra(command):
    done = run(f"sys.argv = ['ultr', *{command.split()}]\nfrom ultr.cli import main\nmain()")
    assert done.returncode == 1
    assert re.fullmatch(
        rf"error: ultr {command.split()[0]} needs the package '(torch|pyarrow|pydantic)', which is not installed; "
        r"install it with: pip install 'ultr\[train\]'\n",
        done.stderr,
    )


def test_without_the_packages_of_training_help_and_the_import_work_and_names_say_the_same():
    assert "serve" in run("sys.argv = ['ultr', '--help']\nfrom ultr.cli import main\nmain()").stdout
    done = run("import ultr\ntry: ultr.read_log\nexcept ultr.UltrError as error: print(error)")
    assert done.stdout.startswith("ultr.read_log needs the package 'pyarrow', which is not installed; install it with")


def test_another_missing_package_stays_an_import_error():
    assert missing_for_training("x", ModuleNotFoundError(name="yaml")) is None
    assert missing_for_training("x", ModuleNotFoundError("no name")) is None


def test_the_nearest_name_is_suggested_and_otherwise_the_choices():
    assert nearest("Positon", ["request", "position"]) == "did you mean 'position'?"
    assert nearest("zzz", ["request", "position"]) == "use one of position, request"
    assert nearest("zzz", []) == "there are no names to choose from"
    assert nearest("zzz", [f"column{i:02}" for i in range(30)]).endswith("and 10 more")
