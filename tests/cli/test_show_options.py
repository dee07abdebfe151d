"""`ultr options`: the tree of options, its sections, and the options of methods."""

from __future__ import annotations

import json
import re
import tomllib

import pytest

from ultr.cli.show_options import method_options
from ultr.methods import METHODS, TREE_METHODS
from ultr.training.config import all_options


def listed(ultr, *arguments):
    done = ultr("options", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return [option["path"] for option in json.loads(done.stdout)["options"]]


def test_all_options_are_listed(ultr):
    content = json.loads(ultr("options", "--json").stdout)
    assert [option["path"] for option in content["options"]] == [option.path for option in all_options()]
    assert all(option["description"] and option["type"] for option in content["options"])
    assert set(content["methods"]) == set(METHODS)
    printed = ultr("options").stdout
    assert all(option.path in printed for option in all_options())


def test_a_path_is_a_section_an_option_or_a_short_name(ultr):
    assert set(listed(ultr, "network")) > {"network.hidden", "network.lr"}
    assert listed(ultr, "data.columns")[0] == "data.columns.request"
    assert listed(ultr, "network.lr") == ["network.lr"]
    assert listed(ultr, "lr") == ["network.lr", "trees.lr"]
    assert listed(ultr, "held_out") == ["data.validation"]


def test_an_unknown_path_has_a_suggestion(ultr):
    for path, nearest in (("netwrk", "network"), ("network.hiden", "network.hidden"), ("method.dlaa", "method.dla")):
        done = ultr("options", path)
        assert done.returncode == 2
        assert f"there is no option or section '{path}'; did you mean '{nearest}'?" in done.stderr


def test_the_options_of_a_method_have_their_values_and_defaults(ultr):
    content = json.loads(ultr("options", "method.pairwise-em", "--json").stdout)["options"]
    found = {option["path"]: option for option in content}
    assert found["method.loss"]["type"].startswith("posterior | opt-posterior")
    assert found["method.variant"] == {
        "path": "method.variant",
        "type": "standard | released",
        "default": "standard",
        "description": "networks only",
    }
    done = ultr("options", "method")
    assert all(name in done.stdout for name in METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_every_option_of_every_method_is_listed(name):
    paths = {option.path for option in method_options(name)}
    trees = TREE_METHODS[name].OPTIONS if name in TREE_METHODS else {}
    assert paths == {f"method.{option}" for option in {**METHODS[name].OPTIONS, **trees}}


def test_the_toml_file_has_all_options_as_comments(ultr, tmp_path):
    text = ultr("options", "--toml").stdout
    assert all(not values for values in flat_tables(tomllib.loads(text)))
    set_options = tomllib.loads(re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE))
    assert set_options["network"]["steps"] == 1000
    assert set_options["rankers"] == "auto"
    assert set_options["trees"]["parameters"] == {}


def flat_tables(content):
    """Return the values in a nested table that are not tables."""
    for value in content.values():
        yield from flat_tables(value) if isinstance(value, dict) else [value]


def test_the_help_of_train_fits_on_two_screens(ultr, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    done = ultr("train", "--help")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) <= 60
