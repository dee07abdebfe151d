"""`ultr options`: list the options of a run, which --set and the files of --config name by their paths."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ultr.cli.messages import plain, words
from ultr.cli.options import Json, print_table
from ultr.errors import OptionError, nearest

if TYPE_CHECKING:
    from ultr.training.config import OptionInfo

METHOD = "method."  # start of the paths of a method's options


def options(
    path: Annotated[
        str | None, typer.Argument(help="A section (network), an option (network.lr) or a method (method.pairwise-em).")
    ] = None,
    as_toml: Annotated[bool, typer.Option("--toml", help="Print a TOML file for --config, with all options.")] = False,
    as_json: Json = False,
) -> None:
    """List the options of a run: path, type, default and a description.

    Pass them with --set PATH=VALUE, in a TOML file with --config, or as arguments of `ultr.train`. The last word of a
    path is enough where no other path ends with it.
    """
    from ultr.methods import METHODS
    from ultr.training.config import all_options

    chosen = all_options() if path is None else _chosen(path)
    if as_toml:
        print("\n".join(_toml(chosen)))
        return
    of_methods = {name: list(method_options(name)) for name in METHODS} if path in (None, "method") else {}
    if as_json:
        methods = {name: [asdict(option) for option in found] for name, found in of_methods.items()}
        print(json.dumps({"options": [asdict(option) for option in chosen], "methods": methods}))
        return
    _print_options(chosen)
    if path == "method":
        _print_methods(of_methods)
    elif path is None:
        words.say("options of a method: ultr options method.pairwise-em; a file of all options: ultr options --toml")
    elif path.removeprefix(METHOD) in METHODS:
        words.say(str(inspect.getdoc(METHODS[path.removeprefix(METHOD)])))


def _chosen(path: str) -> Sequence[OptionInfo]:
    """Return the options of a section or of a method, or the one option with this path or short name."""
    from ultr.methods import METHODS
    from ultr.training.config import all_options, short_names

    every = all_options()
    if found := [option for option in every if option.path.startswith(f"{path}.")]:
        return found
    if path.removeprefix(METHOD) in METHODS:
        return list(method_options(path.removeprefix(METHOD)))
    name = short_names().get(path, path)
    if found := [option for option in every if option.path == name or option.path.endswith(f".{path}")]:
        return found
    sections = {option.path.rpartition(".")[0] for option in every} - {""}
    methods = [METHOD + name for name in METHODS]
    hint = nearest(path, [*sections, *methods, *short_names(), *(option.path for option in every)])
    raise OptionError(f"there is no option or section '{path}'", hint=hint)


def method_options(name: str) -> Iterator[OptionInfo]:
    """Yield the options of a method, by their paths in the tree: those for networks, and those for trees alone."""
    from ultr.methods import METHODS, TREE_METHODS
    from ultr.training.config import OptionInfo, type_text

    network, trees = METHODS[name], TREE_METHODS.get(name)
    for option, kind in network.OPTIONS.items():
        about = "networks only" if trees is not None and option not in trees.OPTIONS else ""
        yield OptionInfo(METHOD + option, type_text(kind), _default_of(option, network), about)
    if trees is not None:
        for option in sorted(trees.OPTIONS.keys() - network.OPTIONS.keys()):
            yield OptionInfo(
                METHOD + option, type_text(trees.OPTIONS[option]), _default_of(option, trees), "trees only"
            )


def _default_of(option: str, kind: type) -> Any:
    """Return the default of an option of a method: that of the constructor which has it as a parameter."""
    for base in kind.__mro__:
        if "__init__" in vars(base):
            parameter = inspect.signature(vars(base)["__init__"]).parameters.get(option)
            if parameter is not None and parameter.default is not parameter.empty:
                return parameter.default
    return None


def _by_section(options: Iterable[OptionInfo]) -> dict[str, list[OptionInfo]]:
    """Return section -> its options; those at the top of the tree come first."""
    sections: dict[str, list[OptionInfo]] = {"": []}
    for option in options:
        sections.setdefault(option.path.rpartition(".")[0], []).append(option)
    return {name: found for name, found in sections.items() if found}


def _print_options(options: Iterable[OptionInfo]) -> None:
    table = Table()
    for heading in ("option", "type", "default", "description"):
        table.add_column(heading, no_wrap=heading == "option")
    for section in _by_section(options).values():
        for option in section:
            table.add_row(*map(plain, (option.path, option.type, _text(option.default), option.description)))
        table.add_section()
    print_table(table)


def _print_methods(of_methods: Mapping[str, Sequence[OptionInfo]]) -> None:
    from ultr.methods import METHODS

    table = Table("method", "options", "description")
    for name, found in of_methods.items():
        about = str(inspect.getdoc(METHODS[name])).split("\n")[0].rstrip(":")
        table.add_row(name, ", ".join(option.path.removeprefix(METHOD) for option in found), plain(about))
    print_table(table)


def _text(value: Any) -> str:
    if value is None or value in ("", (), {}):
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _toml(options: Iterable[OptionInfo]) -> list[str]:
    """Return the lines of a TOML file in which all options are comments with their defaults."""
    lines = ["# Options of a run. Remove the # before an option to set it."]
    for name, section in _by_section(options).items():
        lines += ["", f"[{name}]"] if name else [""]
        for option in section:
            value = "" if option.default is None else f" {json.dumps(option.default, ensure_ascii=False)}"
            lines += [f"# {option.description} ({option.type})", f"# {option.path.rpartition('.')[2]} ={value}"]
    return lines
