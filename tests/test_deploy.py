"""The image and the manifest of deploy/, checked without Docker and Kubernetes, and the size of the install."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

import ultr
from ultr.serving.http import ServerOptions
from ultr.serving.http.workers import STOP_SECONDS

ROOT = Path(__file__).parents[1]
SCHEMA = json.loads((ROOT / "tests" / "inference_service.schema.json").read_text())
MANIFEST = yaml.safe_load((ROOT / "deploy" / "inference-service.yaml").read_text())


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile with their arguments."""
    text = re.sub(r"^#.*\n", "", (ROOT / "deploy" / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


def test_the_image_is_pinned_has_no_root_and_checks_its_health():
    steps = instructions()
    images = [arguments for name, arguments in steps if name == "FROM"]
    assert all(re.match(r"python:\d+\.\d+\.\d+-slim-\w+( AS build)?$", image) for image in images)
    last = dict(steps[max(i for i, (name, _) in enumerate(steps) if name == "FROM") :])
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last["USER"])
    assert "/v2/health/ready" in last["HEALTHCHECK"]
    assert json.loads(last["ENTRYPOINT"]) == ["/venv/bin/ultr", "serve"]
    text = (ROOT / "deploy" / "Dockerfile").read_text().lower()
    assert not re.search(r"password|secret|_key|token=|\badd\b", text)
    copied = {path for name, arguments in steps if name == "COPY" for path in arguments.split()[:-1]}
    assert all((ROOT / path).exists() for path in copied - {"--from=build", "/venv"})


def test_the_image_and_the_manifest_start_the_server_with_options_that_exist(ultr_options):
    (command,) = [json.loads(arguments) for name, arguments in instructions() if name == "CMD"]
    (container,) = MANIFEST["spec"]["predictor"]["containers"]
    for arguments in (command, container["args"]):
        assert arguments[0] == "/mnt/models"
        assert {option for option in arguments if option.startswith("--")} <= ultr_options
    assert container["image"].endswith(f":{ultr.__version__}")
    sleeps = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    most = ServerOptions("ranker").drain + STOP_SECONDS
    assert MANIFEST["spec"]["predictor"]["terminationGracePeriodSeconds"] > sleeps + most
    assert container["ports"][0]["containerPort"] == container["readinessProbe"]["httpGet"]["port"] == 8080


@pytest.fixture
def ultr_options() -> set[str]:
    from typer.main import get_command

    from ultr.cli import app

    return {option for parameter in get_command(app).commands["serve"].params for option in parameter.opts}


def test_the_manifest_is_valid_for_kserve():
    jsonschema.validate(MANIFEST, SCHEMA)


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [
        (["spec", "predictor"], "minReplica", 2),
        (["spec", "predictor", "containers", 0], "name", 5),
        (["spec", "predictor", "containers", 0, "readinessProbe", "httpGet"], "route", "/"),
        ([], "kind", "Service"),
    ],
)
def test_the_schema_rejects_mistakes(place, key, value):
    wrong = json.loads(json.dumps(MANIFEST))
    part = wrong
    for step in place:
        part = part[step]
    part[key] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, SCHEMA)


@pytest.mark.long
def test_a_server_takes_less_than_150_mb():
    tool = [sys.executable, str(ROOT / "tools" / "install_size.py"), "--limit", "150"]
    done = subprocess.run(tool, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch" not in done.stdout


@pytest.mark.long
def test_the_steps_of_the_image_give_a_server(tmp_path):
    for name, arguments in instructions():
        if name == "RUN":
            local = arguments.replace("/venv", str(tmp_path / "venv")).replace("python -m", f"{sys.executable} -m")
            subprocess.run(shlex.split(local), cwd=ROOT, check=True, capture_output=True)
    packages = [sys.executable, "-m", "pip", "--python", str(tmp_path / "venv/bin/python"), "list"]
    listed = subprocess.run(packages, capture_output=True, text=True, check=True).stdout
    assert not re.search(r"^(torch|pyarrow|scipy|kubernetes)\b", listed, re.MULTILINE)
    command = [tmp_path / "venv/bin/ultr", "serve", str(tmp_path / "none"), "--port", "0", "--grpc-port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 5
    assert "there is no model here" in done.stderr
