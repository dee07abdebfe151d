from __future__ import annotations

import re
import subprocess
import sys

import pytest

from ultr.errors import (
    TRAIN_PACKAGES,
    ColumnError,
    MissingExtraError,
    OptionError,
    UltrError,
    missing_for_training,
    nearest,
)


def test_a_message_says_where_what_got_and_hint():
    error = ColumnError("no column 'pos'", where="log.csv", got="2 columns", hint="did you mean 'position'?")
    assert str(error) == "log.csv: no column 'pos', got 2 columns; did you mean 'position'?"


def test_a_wrong_call_exits_2_and_bad_data_exits_1():
    assert OptionError("x").exit_code == 2
    assert ColumnError("x").exit_code == UltrError("x").exit_code == 1


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
