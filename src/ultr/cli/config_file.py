"""Options of a command in a TOML file: `--config FILE` reads it, and `--write-config FILE` writes it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import typer

from ultr.errors import OptionError, nearest
from ultr.utils.files import atomic_path

OWN = ("config_file", "write_config")  # the parameters of a command that a file cannot have
ONCE = ("overwrite", "resume", "help")  # parameters that are chosen for one call, and not written to a file


def read_config(context: typer.Context, file: Path | None) -> Path | None:
    """Take options from a TOML file as the defaults of a command; options on the command line replace them."""
    if file is None:
        return None
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        what = f"the file of options cannot be read ({error.strerror if isinstance(error, OSError) else error})"
        raise OptionError(what, where=file, hint="write one with ultr train --write-config") from error
    parameters: dict[str, Any] = {p.name: p for p in context.command.params if p.name not in OWN}
    options = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name not in parameters:
            known = [known.replace("_", "-") for known in parameters]
            raise OptionError(f"there is no option '{key}'", where=file, hint=nearest(key.replace("_", "-"), known))
        options[name] = _as_option(key, value, parameters[name], file)
    context.default_map = options
    return file


def _as_option(key: str, value: Any, parameter: Any, file: Path) -> Any:
    """Return a value of a TOML file in the form that the option has on the command line."""
    several = getattr(parameter, "multiple", False) or parameter.nargs == -1  # an argument may have several values
    if isinstance(value, dict) and several:  # such as [option] with key = value
        return [f"{name}={_text(each)}" for name, each in value.items()]
    if isinstance(value, list) and not any(isinstance(each, list | dict) for each in value):
        return [_text(each) for each in value] if several else ",".join(map(_text, value))
    is_flag = getattr(parameter, "is_flag", False)
    if isinstance(value, dict | list) or isinstance(value, bool) != is_flag:
        what = f"'{key}' must be {'true or false' if is_flag else 'a text or a number'}"
        raise OptionError(what, where=file, got=_text(value), hint="write one with ultr train --write-config")
    return [_text(value)] if several else value


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def chosen_options(context: typer.Context) -> set[str]:
    """Return the names of the options that the user chose: on the command line, or in a file with another value."""
    chosen = set()
    for parameter in context.command.params:
        name = str(parameter.name)
        source = getattr(context.get_parameter_source(name), "name", "DEFAULT")
        usual = str(context.params.get(name)) == str(parameter.default)
        if source != "DEFAULT" and not (source == "DEFAULT_MAP" and usual):
            chosen.add(name)
    return chosen


def write_config(context: typer.Context, file: Path, *, overwrite: bool) -> None:
    """Write all options of a command to a TOML file, each with its help; options without a value are comments."""
    lines = [f"# Options of ultr {context.info_name}. Run it with: ultr {context.info_name} --config {file.name}"]
    for parameter in context.command.params:
        name, value = str(parameter.name), context.params.get(str(parameter.name))
        if name in (*OWN, *ONCE):
            continue
        key = name.replace("_", "-")
        lines += ["", f"# {' '.join(str(getattr(parameter, 'help', None) or '').split())}"]
        lines.append(f"# {key} =" if value is None else f"{key} = {_toml(value)}")
    with atomic_path(file, overwrite=overwrite) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _toml(value: Any) -> str:
    if isinstance(value, bool | int | float):
        return _text(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
