"""Check that input is never run as code, reaches no file outside its folder, and does not fill memory."""

from __future__ import annotations

import ast
import hashlib
import json
import math
import shutil
import struct
import subprocess
import sys
import tracemalloc
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import make_shown_log
from hardening import licences
from lists_folder import write_lists
from ultr.bias.audit import audit
from ultr.bias.examination import Examination
from ultr.datasets import base, movielens
from ultr.datasets.initial import initial_ranker
from ultr.datasets.users import User, simulate_log
from ultr.errors import DataError, LabelError, UltrError
from ultr.evaluation.off_policy import load_off_policy_model
from ultr.log import write_log
from ultr.log.labels import Label
from ultr.log.shards import Shards
from ultr.rankers.model import load_model
from ultr.report import write_report
from ultr.serving.exported import load_exported, onnx_session, refers_to_files
from ultr.training.comparing.plan import run_folder
from ultr.training.comparing.results import Setting
from ultr.training.config import make_config
from ultr.training.data import Decisions
from ultr.training.examining import best_evaluation
from ultr.training.outcome import read_outcome
from ultr.training.run import run_training
from ultr.utils.jsonfiles import load_tensors, read_json

SOURCE = Path(__file__).parents[2] / "src" / "ultr"
FILES = sorted(SOURCE.rglob("*.py"))

# --- Source code --------------------------------------------------------------------------------------------------

FORBIDDEN_IMPORTS = {
    *("pickle", "cPickle", "marshal", "shelve", "dill", "joblib", "cloudpickle", "yaml", "subprocess", "pty"),
    *("requests", "httpx", "aiohttp", "urllib", "http", "ftplib", "smtplib", "telnetlib", "socketserver"),
}
FORBIDDEN_NAMES = {"eval", "exec", "compile", "__import__", "execfile"}
FORBIDDEN_ATTRIBUTES = {
    "os": ("system", "popen", "exec", "spawn", "posix_spawn", "fork"),
    "torch": ("load",),
    "jit": ("load",),
    "pd": ("read_pickle", "eval"),
    "pandas": ("read_pickle", "eval"),
    "tempfile": ("mktemp",),
    "shutil": ("unpack_archive",),
    "builtins": ("eval", "exec", "compile"),
}
FORBIDDEN_METHODS = {"extractall", "extract", "create_connection", "urlopen", "read_pickle", "to_pickle", "save_pickle"}


def dangers(source: str) -> list[str]:
    """Return the parts of a source that could run input as code, unpack it, or use the network."""
    parts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            parts += [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_IMPORTS]
        elif isinstance(node, ast.ImportFrom):
            imported = [f"{node.module}.{alias.name}" for alias in node.names]
            harmless = node.module == "urllib.parse"  # it only takes texts apart
            parts += [name for name in imported if name.split(".")[0] in FORBIDDEN_IMPORTS and not harmless]
            parts += [name for name in imported if _attribute(*name.rpartition(".")[::2])]
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")
            if _attribute(owner, node.attr) or node.attr in FORBIDDEN_METHODS:
                parts.append(f"{owner}.{node.attr}")
        elif isinstance(node, ast.Name) and node.id in FORBIDDEN_NAMES:
            parts.append(node.id)
        if isinstance(node, ast.Call):
            options = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
            name = ast.unparse(node.func)
            if options.get("shell"):
                parts.append("shell=True")
            if name in ("np.load", "numpy.load") and options.get("allow_pickle") is not False:
                parts.append(name)
            if name.endswith("import_module") and not isinstance(node.args[0], ast.Constant):
                parts.append(name)
    return parts


def _attribute(owner: str, name: str) -> bool:
    return any(name == bad or (owner == "os" and name.startswith(bad)) for bad in FORBIDDEN_ATTRIBUTES.get(owner, ()))


def test_no_input_is_ever_run_as_code():
    found = {str(path.relative_to(SOURCE)): parts for path in FILES if (parts := dangers(path.read_text()))}
    assert found == {"__init__.py": ["import_module"]}  # imports the modules of the public names


def test_forbidden_code_is_found():
    lines = [
        "import pickle",
        "from joblib import load",
        "import urllib.request",
        "eval(text)",
        "run = exec",
        "os.system('ls')",
        "os.execv(a, b)",
        "from os import popen",
        "torch.load(path)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "run(text, shell=True)",
        "tempfile.mktemp()",
        "archive.extractall()",
        "import yaml",
        "importlib.import_module(name)",
        "builtins.eval(x)",
    ]
    assert [line for line in lines if not dangers(f"def f():\n    {line}\n")] == []


# Audit events that commands must not cause, and the modules that may cause them, with the reason.
ALLOWED = {
    "pickle.find_class": {
        "numba": "its cache of compiled code, in a folder of the user (SECURITY.md)",
        "multiprocessing": "processes that ultr starts",
    },
    "subprocess.Popen": {},
    "os.system": {},
    "os.exec": {},
    "os.fork": {},
    "os.posix_spawn": {},
    "socket.connect": {},
    "socket.getaddrinfo": {},
    "urllib.Request": {},
    "shutil.unpack_archive": {},
}
WATCHED = """
import sys
ALLOWED = {allowed!r}
def watch(event, arguments):
    if event not in ALLOWED:
        return
    frame, callers = sys._getframe(1), []
    while frame is not None:
        callers.append(frame.f_globals.get("__name__", "?"))
        frame = frame.f_back
    if not any(name.split(".")[0] in ALLOWED[event] for name in callers):
        print("FORBIDDEN", event, arguments, callers[:8], file=sys.__stderr__, flush=True)
        raise RuntimeError(event)
sys.addaudithook(watch)
from ultr.cli import main
for command in {commands!r}:
    sys.argv = ["ultr", *command]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (command, end.code)
    print("DONE", command[0], file=sys.__stderr__)
"""
FEW_STEPS = ["--steps", "3", "--set", "bias_steps=3", "--device", "cpu"]
SMALL = ["--ranker", "mlp", "--set", "hidden=4", "--set", "batch=16", *FEW_STEPS]
COMPARED = ["--methods", "pointwise,lambdarank", "--seeds", "1", "--lrs", "0.1", "--jobs", "1"]
FEW = [
    ["describe", "log.parquet"],
    ["train", "log.parquet", "--out", "net", "--method", "pointwise", "--set", "select=feedback-ndcg@10", *SMALL],
    ["score", "net", "log.parquet", "--out", "scores.parquet"],
    ["report", "net", "--out", "net.html"],
]
ALL = [
    *FEW,
    ["simulate", "synthetic", "--out", "simulated.parquet", "--sessions", "200"],
    ["prepare", "simulated.parquet", "--out", "lists"],
    ["bias", "simulated.parquet", "--out", "bias", "--bootstrap", "10"],
    ["explore", "simulated.parquet", "--out", "swaps.csv"],
    ["judgments", "simulated.parquet", "--out", "judgments.csv"],
    ["train", "lists", "--out", "em", *SMALL],
    ["train", "lists", "--out", "both", "--set", "hidden=4", "--set", "rounds=3", *FEW_STEPS],
    ["train", "simulated.parquet", "--out", "lightgbm", "--ranker", "lightgbm", *FEW_STEPS],
    ["train", "simulated.parquet", "--out", "xgboost", "--ranker", "xgboost", *FEW_STEPS],
    ["evaluate", "em", "synthetic", "--metrics", "ndcg@10"],
    ["compare", "simulated.parquet", "--out", "compared", *COMPARED, *SMALL],
    ["report", "em", "lightgbm", "--out", "report.html"],
    ["report", "compared", "--out", "compared.html"],
    ["export", "em", "--out", "exported"],
    ["export", "lightgbm", "--out", "exported-lightgbm"],
    ["export", "xgboost", "--out", "exported-xgboost"],
]


@pytest.mark.parametrize("commands", [pytest.param(FEW, id="few"), pytest.param(ALL, id="all", marks=pytest.mark.long)])
def test_no_command_unpickles_starts_a_program_or_connects(commands, log, tmp_path):
    write_log(log, tmp_path / "log.parquet")
    allowed = {event: sorted(who) for event, who in ALLOWED.items()}
    script = WATCHED.format(allowed=allowed, commands=commands)
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "FORBIDDEN" not in done.stderr, done.stderr[-3000:]
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("DONE") == len(commands)


@pytest.mark.parametrize("code", ["import os; os.system('true')", "import pickle; pickle.loads(pickle.dumps(print))"])
def test_the_audit_hook_finds_forbidden_events(code, tmp_path):
    script = WATCHED.format(allowed={event: [] for event in ALLOWED}, commands=[]) + code
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "FORBIDDEN" in done.stderr
    assert done.returncode


# --- Labels -------------------------------------------------------------------------------------------------------

ACTIONS = {"click": np.array([0.0, 1.0, 1.0]), "dwell": np.array([0.0, 3.0, 1e6]), "like": np.array([0.0, 0.0, 1.0])}
PIECES = st.sampled_from(
    [
        *("click", "dwell", "like", "share", "__class__", "exp", "log", "min", "clip", "lambda", "None", "print"),
        *("0", "1", "2.5", "1e308", "1e999", "9" * 30, "-1", "1j", "0x10", "'a'", "b''", "...", "True", "½"),
        *("+", "-", "*", "/", "**", "//", "%", "@", "<<", "<", "<=", "==", "!=", "is", "in", "not", "if", "else"),
        *("(", ")", "[", "]", "{", "}", ",", ".", ":", ":=", "=", ";", "\n", "\\", "#", "`", "\0", "é", "\ud800", " "),
    ]
)
EXPRESSIONS = st.recursive(
    st.sampled_from(["click", "dwell", "like", "0", "1", "2.5", "1e300", "9"]),
    lambda inner: (
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "**", "<", ">="]), inner).map(
            lambda parts: f"({parts[0]} {parts[1]} {parts[2]})"
        )
        | st.tuples(st.sampled_from(["exp", "log", "log1p", "sqrt", "abs", "-"]), inner).map("{0[0]}({0[1]})".format)
        | st.tuples(st.sampled_from(["min", "max"]), inner, inner).map("{0[0]}({0[1]}, {0[2]})".format)
    ),
    max_leaves=20,
)


@st.composite
def mutated(draw):
    text = draw(EXPRESSIONS)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(PIECES) + text[at + draw(st.integers(0, 2)) :]
    return text


def label_holds(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            label = Label(text)
            for actions in (ACTIONS, {name: torch.from_numpy(values) for name, values in ACTIONS.items()}):
                values = np.asarray(label(actions))
                assert values.shape == (3,)
                assert np.isfinite(values).all()
                assert (values >= 0).all()
        except LabelError:
            return
    called = {node.func.id for node in ast.walk(ast.parse(text.strip(), mode="eval")) if isinstance(node, ast.Call)}
    assert called <= {"exp", "log", "log1p", "sqrt", "abs", "min", "max", "clip"}
    assert not [node for node in ast.walk(ast.parse(text.strip(), mode="eval")) if isinstance(node, ast.Attribute)]


TEXTS = st.text(max_size=60) | st.lists(PIECES, max_size=25).map("".join) | EXPRESSIONS | mutated()


@settings(max_examples=300)
@given(TEXTS)
def test_a_label_is_computed_or_rejected(text):
    label_holds(text)


@pytest.mark.long
@settings(max_examples=20_000)
@given(TEXTS)
def test_twenty_thousand_labels_are_computed_or_rejected(text):
    label_holds(text)


DANGEROUS_LABELS = [
    "9**9**9 * click",
    "click + 9**9**9**9",
    "(" * 100_000 + "click" + ")" * 100_000,
    "(" * 400 + "click" + ")" * 400,
    "-" * 900 + "click",
    "+".join(["click"] * 160),
    "**".join(["click"] * 120),
    "click * " + "9" * 900,
    "1e999 * click",
    "click.__class__",
    "click.real",
    "exp.__globals__",
    "().__class__.__bases__[0].__subclasses__()",
    "__import__('os').system('true') + click",
    "open('x') + click",
    "(lambda: click)()",
    "[click for click in (1,)]",
    "f'{click}'",
    "click if click else 0",
    "click := 1",
    "exp(click, click)",
    "exp(*click)",
    "clip(click, high=1, low=0)",
    "min(key=click)",
    "log(0 * click)",
    "1 / (0 * click)",
    "(0 * click) ** -1",
    "-1 - click",
    "sqrt(-1 - click)",
    "(-8) ** (1 / 3) + click",
    "await click",
    "click\0",
    "\ud800 + click",
]


def accepted(text: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            Label(text)(ACTIONS)
        except LabelError:
            return False
    return True


def test_dangerous_labels_are_rejected():
    assert [text[:60] for text in DANGEROUS_LABELS if accepted(text)] == []


# --- Archives -----------------------------------------------------------------------------------------------------


def zipped(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        link = zipfile.ZipInfo("ml-1m/link")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    return path


def test_an_archive_writes_no_file_whatever_its_names(tmp_path, own_cache):
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    evil = {"../../evil": b"x", "/evil": b"x", str(tmp_path / "evil"): b"x", "ml-1m/../../../evil": b"x"}
    zipped(inside / "ml-1m.zip", {**evil, "ml-1m/ratings.dat": b"1::2::3::4\n"})
    with pytest.raises(DataError, match=r"ratings\.dat is not the file of MovieLens-1M"):
        movielens.read_movielens(inside)
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["ml-1m.zip"]
    assert list(own_cache.rglob("*")) == []


def test_an_archive_that_would_fill_memory_is_rejected_before_it_is_read(tmp_path):
    bomb = zipped(tmp_path / "ml-1m.zip", {"ml-1m/ratings.dat": bytes(movielens.MAX_BYTES + 1)})
    assert bomb.stat().st_size < 1 << 20
    tracemalloc.start()
    with pytest.raises(DataError, match="too large"):
        movielens.read_movielens(bomb)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 << 20


def test_an_archive_with_false_sizes_or_damage_is_rejected(tmp_path):
    whole = zipped(tmp_path / "whole.zip", {"ml-1m/ratings.dat": bytes(5 << 20)}).read_bytes()
    place = whole.index(b"PK\x01\x02")  # the first member in the directory at the end
    lying = bytearray(whole)
    lying[place + 24 : place + 28] = struct.pack("<I", 100)
    encrypted = bytearray(whole)
    encrypted[place + 8] |= 1
    encrypted[6] |= 1
    unknown = bytearray(whole)
    unknown[place + 10 : place + 12] = struct.pack("<H", 77)
    torn = bytearray(whole)
    torn[60:200] = bytes(140)
    for number, content in enumerate((lying, encrypted, unknown, torn, whole[:-30], b"PK\x03\x04")):
        path = tmp_path / f"{number}.zip"
        path.write_bytes(content)
        with pytest.raises(DataError, match="MovieLens-1M was not found"):
            movielens.read_movielens(path)


class Mine:
    """An object that prints a line if it is unpickled."""

    def __reduce__(self):
        return (print, ("UNPICKLED",))


def crafted_npz(path: Path, shape: str, *, descr: str = "'<f8'", data: bytes = b"") -> None:
    """Write an archive whose arrays claim a shape."""
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data
    zipped(path, dict.fromkeys(("mean.npy", "scale.npy", "weights.npy"), content))


def test_cached_arrays_are_numbers_of_the_expected_shape(tmp_path, capsys):
    path, shapes = tmp_path / "kept.npz", dict.fromkeys(("mean", "scale", "weights"), (3,))
    np.savez(path, **dict.fromkeys(shapes, np.ones(3)))
    assert len(base.cached_arrays(path, shapes)) == 3
    objects = np.array([Mine(), Mine(), Mine()], dtype=object)
    for wrong in (objects, np.ones(4), np.ones((3, 1)), np.full(3, np.nan), np.array(["a", "b", "c"])):
        np.savez(path, **dict.fromkeys(shapes, wrong))
        assert base.cached_arrays(path, shapes) is None
    for shape in ("(10**15,)", "(1000000000000,)", "(-1,)", "3", "'x'", "(3,", "__import__('os')"):
        crafted_npz(path, shape)
        assert base.cached_arrays(path, shapes) is None
    crafted_npz(path, "(3,)", descr="'|O'", data=b"cbuiltins\nprint\n(S'UNPICKLED'\ntR.")
    assert base.cached_arrays(path, shapes) is None
    np.savez_compressed(path, **dict.fromkeys(shapes, np.zeros(10_000_000)))
    assert base.cached_arrays(path, shapes) is None
    assert "UNPICKLED" not in capsys.readouterr().out


def test_a_cached_ranker_of_objects_is_fitted_again(own_cache, capsys):
    from ultr.datasets import Dataset

    log = make_shown_log(60)
    dataset = Dataset("toy", log, log, log, max_grade=4, fingerprint="toy")
    fitted = initial_ranker(dataset, share=1.0)
    (cached,) = own_cache.glob("initial-*.npz")
    objects = np.array([Mine()] * 3, dtype=object)
    np.savez(cached, mean=objects, scale=objects, weights=objects)
    again = initial_ranker(dataset, share=1.0)
    np.testing.assert_array_equal(fitted.weights, again.weights)
    assert "UNPICKLED" not in capsys.readouterr().out


# --- Tensors ------------------------------------------------------------------------------------------------------


def tensor_file(header: bytes | dict, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape: list[int], size: int, dtype: str = "F32") -> dict:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        tensor_file(b"{}", length=2**63),
        tensor_file(b"{}", length=2**64 - 1),
        tensor_file(b"{}", length=1000),
        tensor_file(b" " * (100 << 20) + b"{}"),
        tensor_file(b"{" * 50_000),
        tensor_file(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
        tensor_file(b"\xff\xfe{}"),
        tensor_file(b"[]"),
        tensor_file({"w": 3}),
        tensor_file(entry([2**62, 2], 8), bytes(8)),
        tensor_file(entry([2**63, 2**63], 8), bytes(8)),
        tensor_file(entry([-1], 4), bytes(4)),
        tensor_file(entry([2], 8), bytes(4)),
        tensor_file(entry([2], 8, "F33"), bytes(8)),
        tensor_file({**entry([2], 8), "v": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, bytes(12)),
    ],
    ids=range(17),
)
def test_tensor_files_with_false_headers_are_rejected(content, tmp_path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read"):
        load_tensors(path)


@pytest.fixture(scope="module")
def log():
    shown = make_shown_log(60, seed=3)
    return replace(simulate_log(shown, User(max_grade=4), seed=0)[0], relevance=None)


@pytest.fixture(scope="module")
def run(log, tmp_path_factory) -> Path:
    """A finished run that is selected off policy, so that it has a model of off-policy metrics."""
    folder = tmp_path_factory.mktemp("runs")
    write_log(log, folder / "log.parquet")
    few = {"steps": 2, "bias_steps": 2, "batch": 16, "evaluate_every": 1, "device": "cpu"}
    config = make_config(str(folder / "log.parquet"), ranker="mlp", hidden=(4,), **few)
    made = run_training(config, folder / "run")
    add_other_folders(made, log)
    return made


@pytest.fixture
def copy(run, tmp_path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def rewrite(path: Path, **changes: object) -> None:
    content = {name: value for name, value in json.loads(path.read_text()).items() if name != "seal"}
    path.write_text(json.dumps({**content, **changes}))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda w: w.pop("ranker.layers.0.0.weight"),
        lambda w: w.update(extra=torch.zeros(3)),
        lambda w: w.update({"ranker.layers.0.0.weight": w["ranker.layers.0.0.weight"].T.contiguous()}),
        lambda w: w.update({"ranker.layers.0.0.weight": w["ranker.layers.0.0.weight"].double()}),
        lambda w: w.update({"ranker.layers.0.0.weight": w["ranker.layers.0.0.weight"].to(torch.int64)}),
        lambda w: w.update({"ranker.layers.0.0.weight": w["ranker.layers.0.0.weight"].to(torch.complex64)}),
        lambda w: w.clear(),
    ],
    ids=["missing", "extra", "shape", "double", "whole", "complex", "none"],
)
def test_weights_that_do_not_fit_the_network_are_rejected(spoil, copy):
    from safetensors.torch import load_file, save_file

    path = copy / "model" / "weights.safetensors"
    weights = load_file(path)
    spoil(weights)
    save_file(weights, path)
    with pytest.raises(DataError, match="cannot be loaded"):
        load_model(copy)


@pytest.mark.parametrize(
    "changes",
    [
        {"ranker_options": {"hidden": [10**9]}},
        {"ranker_options": {"hidden": [10**12, 10**12]}},
        {"ranker_options": {"hidden": [1] * 100_000}},
        {"ranker_options": {"hidden": [10**400]}},
        {"constants": 10**11},
        {"constants": 10**400},
        {"ranker": "../../evil"},
        {"ranker_options": {"encoder": 3}},
        {"feature_names": ["f0"] * 100_000},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_networks_larger_than_their_weights_take_no_memory(changes, copy):
    rewrite(copy / "model" / "model.json", **changes)
    with pytest.raises(UltrError):
        load_model(copy)


# --- Descriptions -------------------------------------------------------------------------------------------------

INVALID_DESCRIPTIONS = [
    "[" * 100_000,
    '{"format": ' * 100_000,
    '{"format": 1, "a": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "[]",
    "null",
    "3",
    '"text"',
    "",
    "{",
    "NaN",
    "9" * 5000,
    '{"format": ' + "9" * 5000 + "}",
    "\udcff",
    "{}",
]
ODD_VALUES = [
    *(None, True, 0, -1, 10**30, 1e308, math.nan, math.inf, "", "../../../etc/passwd", "/etc/passwd", "\0", [], {}),
    *([[]], [None], {"a": None}, {"../x": 1}, ["../x"], [1, "a"], [[[[1]]]]),
]


def add_other_folders(run: Path, log) -> None:
    """Add to a run one of each other kind of folder that has a description."""
    summary = {"ndcg@10": {"mean": 0.5, "deviation": 0.1, "seeds": [0.4, 0.6], "against": None}}
    test = {"difference": 0.1, "low": 0.0, "high": 0.2, "p": 0.04, "requests": 2}
    against = {"ndcg@10": {**summary["ndcg@10"], "against": {**test, "over_requests": test, "holm": [0.04, 0.04]}}}
    steps = {"best": 10.0, "last": 20.0, "bound": 20, "at_bound": 0}
    about_row = {"lr": 0.1, "dropout": 0.2, "max_weight": 3.0, "longer": 2, "steps": steps, "sessions": 30}
    rows = [
        {"method": "pointwise", "lr": 0.1, "figures": summary},
        {"method": "dla", **about_row, "figures": against},
    ]
    compared = {"format": 1, "metrics": ["ndcg@10"], "reference": "pointwise", "rows": rows}
    files = {"model.onnx": hashlib.sha256(b"").hexdigest()}
    about = {"format": 1, "feature_names": ["a", "b"], "vocabularies": {"b": ["x"]}, "label": "click", "ranker": "mlp"}
    contents = {
        "compared/comparison.json": compared,
        "exported/model.json": {**about, "keeps_missing": False, "files": files},
        "audited/bias.json": {"format": 1, **audit(log, bootstrap=0).to_json()},
    }
    for name, content in contents.items():
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(json.dumps(content))
    write_lists(log, run / "lists")


def report(folder: Path) -> Path:
    return write_report([folder], folder / "page.html", overwrite=True)


READERS = {
    "model/model.json": load_model,
    "config.json": best_evaluation,
    "outcome/outcome.json": read_outcome,
    "decisions.json": Decisions.load,
    "examination.json": lambda folder: Examination.load(folder / "examination.json"),
    "off-policy/model.json": lambda folder: load_off_policy_model(folder / "off-policy"),
    "exported/model.json": lambda folder: load_exported(folder / "exported"),
    "lists/lists.json": lambda folder: Shards(folder / "lists").read_all(),
    "compared/comparison.json": lambda folder: report(folder / "compared"),
    "audited/bias.json": lambda folder: report(folder / "audited"),
}


@pytest.mark.parametrize("kind", READERS)
def test_text_that_is_not_a_description_is_rejected(kind, copy):
    for text in INVALID_DESCRIPTIONS:
        (copy / kind).write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(UltrError):
            READERS[kind](copy)


def try_odd_values(path: Path, use, content: dict, names: list[str]) -> int:
    """Put odd values into a description, one at a time; return the number of values."""
    for name in names:
        for odd in ODD_VALUES:
            path.write_text(json.dumps({**content, name: odd}))
            try:
                use()
            except UltrError:
                pass
            except Exception as error:
                raise AssertionError(f"{path.name}: {name} = {odd!r} gives {error!r}") from error
    return len(names) * len(ODD_VALUES)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] if kind.startswith("audited") else []) for kind in READERS]
)
def test_odd_values_in_a_description_are_accepted_or_rejected(kind, copy):
    whole = {name: value for name, value in read_json(copy / kind).items() if name != "seal"}
    assert try_odd_values(copy / kind, lambda: READERS[kind](copy), whole, list(whole)) > 20


@pytest.mark.parametrize("odd_values", [ODD_VALUES[::5], pytest.param(ODD_VALUES, marks=pytest.mark.long)], ids=len)
def test_odd_rows_of_a_comparison_are_accepted_or_rejected(odd_values, copy):
    path, use = copy / "compared" / "comparison.json", lambda: report(copy / "compared")
    whole = read_json(path)
    first, row = whole["rows"]
    summary = row["figures"]["ndcg@10"]
    test = summary["against"]

    def with_row(**changes):
        return {**whole, "rows": [first, {**row, **changes}]}

    def with_test(**changes):
        return with_row(figures={"ndcg@10": {**summary, "against": {**test, **changes}}})

    for odd in odd_values:
        changed = [with_row(**{name: odd}) for name in row]
        changed += [with_row(figures={"ndcg@10": {**summary, name: odd}}) for name in summary]
        changed += [with_test(**{name: odd}) for name in test]
        changed += [with_test(over_requests={**test["over_requests"], "p": odd}), with_test(holm=[odd, odd])]
        for content in changed:
            path.write_text(json.dumps(content))
            try:
                use()
            except UltrError:
                pass
            except Exception as error:
                raise AssertionError(f"{content['rows'][1]} gives {error!r}") from error


@pytest.mark.long
@pytest.mark.parametrize("kind", ["config.json", "outcome/outcome.json", "bias.json"])
def test_reports_of_odd_runs_are_written_or_rejected(kind, copy):
    whole = {name: value for name, value in read_json(copy / kind).items() if name != "seal"}
    try_odd_values(copy / kind, lambda: report(copy), whole, list(whole))
    if kind == "outcome/outcome.json":
        for part in ("data", "moves"):
            for name in whole[part]:
                for odd in ODD_VALUES:
                    changed = {**whole, part: {**whole[part], name: odd}}
                    try_odd_values(copy / kind, lambda: report(copy), changed, [])


# --- Paths --------------------------------------------------------------------------------------------------------


def test_names_in_descriptions_reach_no_file_outside(copy, tmp_path):
    outside = tmp_path / "outside"
    shutil.copytree(copy / "lists" / "train", outside)
    manifest = read_json(copy / "lists" / "lists.json")
    rewrite(copy / "lists" / "lists.json", splits={"../../outside": manifest["splits"]["train"]})
    with pytest.raises(DataError, match="splits must be among"):
        Shards(copy / "lists", "../../outside")
    (tmp_path / "model.onnx").write_bytes(b"")
    digest = hashlib.sha256(b"").hexdigest()
    for name in ("../model.onnx", str(tmp_path / "model.onnx"), "a/../../model.onnx"):
        rewrite(copy / "exported" / "model.json", files={name: digest, "model.onnx": digest})
        with pytest.raises(DataError, match="the files must be a model and its card"):
            load_exported(copy / "exported")
    for method in ("..", "../../..", "/", "a/b", "\0"):
        assert run_folder(copy, method, Setting(0.1), 0).resolve().is_relative_to(copy.resolve())
    for odd in (*ODD_VALUES, "..", "../..", "a/b"):
        for name in ("lr", "dropout", "max_weight", "longer"):
            try:
                setting = Setting.from_json({"lr": 0.1, name: odd})
            except DataError:
                continue
            folder = run_folder(copy, "dla", setting, 0)
            assert folder.resolve().parents[2] == (copy / "runs").resolve(), (name, odd)


def external_model(place: str, *, nested: bool = False) -> bytes:
    """Make an ONNX model whose weights are in another file."""
    onnx = pytest.importorskip("onnx")
    weights = onnx.TensorProto(name="w", data_type=1, dims=[3], data_location=1)
    for key, value in {"location": place, "offset": "0", "length": "12"}.items():
        weights.external_data.add(key=key, value=value)
    helper = onnx.helper
    features = helper.make_tensor_value_info("features", 1, ["a", "b", 3])
    scores = helper.make_tensor_value_info("scores", 1, ["a", "b", 3])
    constant = helper.make_node("Constant", [], ["w"], value=weights)
    nodes = [*([constant] if nested else []), helper.make_node("Mul", ["features", "w"], ["scores"])]
    graph = helper.make_graph(nodes, "g", [features], [scores], [] if nested else [weights])
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 18)]).SerializeToString()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("place", ["secret.bin", "../secret.bin", "/etc/hostname"])
def test_onnx_with_weights_in_other_files_is_rejected(place, nested, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.ones(3, np.float32).tofile(tmp_path / "secret.bin")
    with pytest.raises(DataError, match="other files"):
        onnx_session(external_model(place, nested=nested))


def test_onnx_that_only_mentions_locations_is_accepted():
    onnx = pytest.importorskip("onnx")
    node = onnx.helper.make_node("Identity", ["features"], ["scores"], doc_string="location")
    ends = [onnx.helper.make_tensor_value_info(name, 1, ["a", "b", 3]) for name in ("features", "scores")]
    graph = onnx.helper.make_graph([node], "location", ends[:1], ends[1:])
    model = onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 18)])
    assert not refers_to_files(model.SerializeToString())
    onnx_session(model.SerializeToString())
    for damaged in (b"location\xff\xff\xff", model.SerializeToString()[:-3], b"\x0b location"):
        with pytest.raises(DataError):
            onnx_session(damaged)


# --- Licences -----------------------------------------------------------------------------------------------------


def test_every_dependency_and_its_licence_is_on_the_page():
    named, listed = licences.dependencies(), licences.table()
    assert named.keys() == listed.keys()
    for package, text in listed.items():
        families = licences.families(licences.licence(package) or text)
        assert licences.families(text) & families, f"{package}: its metadata says {families}"
        assert not {"GPL", "AGPL"} & families, package
