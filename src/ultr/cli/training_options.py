"""The options of runs on the command line and in files, and the configuration that is made from them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ultr.cli.options import FOUND_SEGMENT, LOG_COLUMNS, ActionDelay, Where, columns, one_source
from ultr.errors import OptionError

if TYPE_CHECKING:
    from ultr.training.config import Config

# --- Options in a file ------------------------------------------------------------------------------------------------
# Options in a file: TOML with the tree of options as tables, or the config.json of a run.


def read_options(file: Path) -> dict[str, Any]:
    """Return the options of a file, by path (`network.steps`) or, at the top of TOML, by short name (`steps`)."""
    from ultr.training.config import Config, all_options
    from ultr.utils.jsonfiles import read_json

    if file.suffix == ".json":
        content = Config.from_json(read_json(file), where=file).model_dump(exclude_none=True)
    else:
        content = _read_toml(file)
    return dict(_by_path(content, {option.path for option in all_options()}))


def _by_path(content: Mapping[str, Any], paths: set[str], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, Mapping) and above + name not in paths:
            yield from _by_path(value, paths, f"{above}{name}.")
        else:
            yield above + name, value


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        what = f"the file of options cannot be read ({error.strerror if isinstance(error, OSError) else error})"
        raise OptionError(what, where=file, hint="write one with: ultr options --toml > options.toml") from error


# --- Options of commands ----------------------------------------------------------------------------------------------
# Options that both `ultr train` and `ultr compare` have, and the `Config` that is made from them.


def _option(name: str, metavar: str, text: str) -> Any:
    return typer.Option(name, metavar=metavar, help=text)


_DATA = "A log: files, folders, 'patterns*.parquet' or URLs; prepared lists; with --users, a data set (ml-1m)."
# The options of commands that are also options of `Config`, by short name; some name columns.
OPTIONS = {
    "data": Annotated[list[str] | None, typer.Argument(metavar="DATA...", help=_DATA, show_default=False)],
    "label": Annotated[
        list[str] | None,
        _option("--label", "EXPR", "What to learn, over actions; several are goals. Default: click, with dwell."),
    ],
    "method": Annotated[
        str | None, _option("--method", "NAME", "pairwise-em, or a baseline; see: ultr options method.")
    ],
    "ranker": Annotated[
        str | None, _option("--ranker", "KIND", "auto, mlp, linear, lightgbm, xgboost, or a sum: mlp,lightgbm.")
    ],
    "users": Annotated[
        str | None,
        _option("--users", "KIND", "Simulate users: pbm, trust, cascade, dcm, clickbait, watch, grid or carousel."),
    ],
    "propensities": Annotated[
        Path | None, _option("--propensities", "FILE", "Known examination: a table of position,propensity.")
    ],
    "bias": Annotated[str | None, _option("--bias", "RUN", "Take examination from a run, or from ultr bias --out.")],
    "steps": Annotated[int | None, _option("--steps", "N", "Maximum steps of the network, or rounds of trees alone.")],
    "seed": Annotated[int | None, _option("--seed", "N", "The same seed gives the same result. Default: 0.")],
    "device": Annotated[str | None, _option("--device", "DEVICE", "auto, cpu, cuda or cuda:1.")],
    "where": Where,
    "action_delay": ActionDelay,
    **columns(*LOG_COLUMNS),
    **FOUND_SEGMENT,
}
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any option that ultr options lists; may be repeated."),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Options in TOML, or the config.json of a run to repeat."),
]
PROPENSITIES = "examination.propensities"
TABLES = ("trees.parameters.", "simulation.options.")  # paths in these tables have values of any type


def training_config(options: Mapping[str, Any], *, sets: Sequence[str] = (), file: Path | None = None) -> Config:
    """Return the configuration with these options, by short name; None is an option that the user has not given.

    `sets` are the texts NAME=VALUE of --set. Options replace those of the file, and both replace the defaults.
    """
    from ultr.training.config import AUTO, _by_path, make_config

    given = {name: value for name, value in options.items() if value is not None and value != []}
    if len(given.get("label", ())) == 1:
        (given["label"],) = given["label"]
    if "data" in given:
        given["data"] = one_source(given["data"])
    layers = [{} if file is None else read_options(file), _parsed(sets), given]
    ranker = next((layer[name] for layer in layers[1:] for name in ("ranker", "rankers") if name in layer), AUTO)
    of_file, of_sets, of_command = (_read(_by_path(layer, ranker)) for layer in layers)
    for path in of_sets.keys() & of_command.keys():
        if str(of_sets[path]) != str(of_command[path]):
            got = f"{of_sets[path]} and {of_command[path]}"
            raise OptionError(f"'{path}' is given twice", got=got, hint="pass it once, as an option or with --set")
    chosen = {**of_sets, **of_command}
    if chosen.get("method.name", of_file.get("method.name")) != of_file.get("method.name"):
        of_file = {path: value for path, value in of_file.items() if not path.startswith("method.")}
    try:
        return make_config(**{"data": "", **of_file, **chosen})
    except OptionError as error:
        if file is not None and _message(of_file) == error.what:
            raise OptionError(error.what, where=file, got=error.got, hint=error.hint) from error
        raise


def _message(options: Mapping[str, Any]) -> str | None:
    """Return what is wrong with options; None if nothing is."""
    from ultr.training.config import make_config

    try:
        make_config(**options)
    except OptionError as error:
        return error.what
    return None


def _parsed(texts: Sequence[str]) -> dict[str, str]:
    """Return the options of --set by name; their values are texts."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not (equals and name):
            hint = "pass, for example, --set network.hidden=64,32"
            raise OptionError("--set must have the form NAME=VALUE", got=f"'{text}'", hint=hint)
        if found.setdefault(name, value) != value:
            raise OptionError(f"'{name}' is given twice", got=f"{found[name]} and {value}", hint="pass it once")
    return found


def _read(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by path; texts become what the options need where `Config` does not convert them."""
    from ultr.bias.propensities import read_propensities
    from ultr.rankers.boosters import parse_parameters

    read = dict(options)
    for path, value in options.items():
        if path == PROPENSITIES and isinstance(value, str | Path):
            read[path] = read_propensities(value)
        elif path == "data.where" and isinstance(value, str):
            read[path] = [value]
        elif path.startswith(TABLES) and isinstance(value, str):
            read[path] = parse_parameters([f"value={value}"])["value"]
    return read
