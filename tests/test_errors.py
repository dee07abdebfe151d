from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ultr.errors
from ultr.cli.messages import messages_on_stderr, words
from ultr.errors import (
    TRAIN_PACKAGES,
    ColumnError,
    DataError,
    MissingExtraError,
    OptionError,
    UltrError,
    missing_for_training,
    nearest,
    redact,
)
from ultr.utils.display import begin_stage

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


SECRET = "pa55:w@rd"  # noqa: S105
SHOWN = {
    f"http://anna:{SECRET}@host:5000": "http://***@host:5000",
    f"s3://KEY:{SECRET}@bucket/day=1/log.parquet": "s3://***@bucket/day=1/log.parquet",
    f"s3:/KEY:{SECRET}@bucket/log.parquet": "s3:/***@bucket/log.parquet",
    f"https://host/log.csv?part=1&X-Amz-Signature={SECRET}&X-Amz-Credential={SECRET}": (
        "https://host/log.csv?part=1&X-Amz-Signature=***&X-Amz-Credential=***"
    ),
    f"https://host/log.csv?sv=2024&sig={SECRET}&part=2": "https://host/log.csv?sv=2024&sig=***&part=2",
    f"https://host/?AWSAccessKeyId={SECRET}&Signature={SECRET}": "https://host/?AWSAccessKeyId=***&Signature=***",
    f"expected a path, got 'KEY:{SECRET}@bucket/log.csv'": "expected a path, got '***@bucket/log.csv'",
    f"jdbc:x password={SECRET} user=anna": "jdbc:x password=*** user=anna",
    "Authorization: Bearer 0123456789abcdef": "Authorization: Bearer ***",
}
PLAIN = (
    "send the header Authorization: Bearer TOKEN",
    "file:///models/a@2/log.parquet",
    "https://host/models/a@2",
    "log@2.csv: no column 'token'; did you mean 'tokens'?",
    "best: ndcg@10 0.5, at 1@phone: 0.3, 2@phone: 0.2",
    "ndcg@10 0.5 = s3://bucket/significance=3/x",
)


@pytest.mark.parametrize("text", SHOWN)
def test_messages_logs_and_errors_have_no_secrets(text, capsys, caplog):
    for error in (UltrError(text), DataError("x", where=text), OptionError("x", got=text), UltrError("x", hint=text)):
        assert SHOWN[text] in str(error)
        assert SECRET not in str(error)
    assert redact(text) == SHOWN[text]
    with messages_on_stderr():
        words.say(f"reading {text}")
        words.as_json = True
        words.say(f"reading {text}", level="warning")
        logging.getLogger("ultr").info("reading %s", text)
        begin_stage(f"reading {text}")
    printed = capsys.readouterr().err
    assert printed.count("***") >= 4
    assert SECRET not in printed
    words.as_json = False


@pytest.mark.parametrize("text", PLAIN)
def test_texts_without_secrets_stay_as_they_are(text):
    assert redact(text) == text


def test_long_texts_are_redacted_quickly():
    for text in ("a" * 10**6, ":/" * 10**5, "token" * 10**5, "." * 10**5, ":@" * 10**5, "://x" * 10**5):
        assert len(redact(text)) <= len(text)


@pytest.mark.parametrize("url", ["s3://anna:geheim@host/log.parquet", "http://anna:geheim@host/log.csv?token=geheim"])
@pytest.mark.parametrize("form", [[], ["--log-json"]])
def test_the_password_of_a_source_is_not_printed(url, form, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    command = [sys.executable, "-m", "ultr", "describe", url, *form]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode > 0
    assert "***@host" in done.stderr
    assert "geheim" not in done.stderr + done.stdout


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
