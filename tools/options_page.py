"""Write docs/options.md, the page of all options of a run: python tools/options_page.py (--print only prints it)."""

from __future__ import annotations

import sys
from pathlib import Path

from ultr.cli.show_options import METHOD, method_options
from ultr.methods import METHODS
from ultr.training.config import OptionInfo, all_options, short_names

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
INTRO = """# Options

`python tools/options_page.py` writes this page. `ultr options` prints the same tables.

`ultr train` has command-line options for the most common of these options (`--label`, `--ranker`, `--steps`, ...).
There are three ways to pass any of them:

    ultr train LOG --out RUN --set network.hidden=64,32 --set network.dropout=0.3
    ultr train LOG --out RUN --config options.toml
    ultr.train("log.parquet", "run", hidden=[64, 32], dropout=0.3)

- `ultr options --toml > options.toml` writes a file with all options as comments. Options of the command line replace
  those of the file.
- The last word of a path is enough where no other path ends with it: `--set hidden=64,32`.
- `steps`, `lr`, `evaluate_every` and `patience` without a section are those of the network, or of trees if only trees
  are trained.
- Values of tables have a path too: `--set trees.parameters.num_leaves=31`.
- The options of the section `machine` never change which model is trained."""
OF_METHODS = """## Options of methods

[Methods](methods/index.md) explains them, and `ultr options method.NAME` prints their types and defaults. Their paths
begin with `method`: `--set method.max_weight=20`."""


def options_page() -> str:
    """Return the page as Markdown, with one table for each section."""
    parts, sections = [INTRO], dict[str, list[OptionInfo]]()
    for option in sorted(all_options(), key=lambda option: "." in option.path):  # options without a section come first
        sections.setdefault(option.path.rpartition(".")[0], []).append(option)
    for section, options in sections.items():
        parts.append(f"## {section or 'Label and rankers'}")
        parts.append(_table(["option", "type", "default", "meaning"], [_row(option) for option in options]))
    renamed = [[f"`{name}`", f"`{path}`"] for name, path in short_names().items() if not path.endswith(name)]
    parts += ["## Short names", _table(["name", "option"], renamed), OF_METHODS]
    of_methods = [[f"`{name}`", ", ".join(_options_of(name))] for name in METHODS]
    parts.append(_table(["method", "options"], of_methods))
    return "\n\n".join(parts) + "\n"


def _options_of(method: str) -> list[str]:
    return [f"`{option.path.removeprefix(METHOD)}`" for option in method_options(method)]


def _row(option: OptionInfo) -> list[str]:
    default = option.default
    text = "" if default is None or default in ("", (), {}) else f"`{str(default).lower()}`"
    return [f"`{option.path}`", option.type, text, option.description]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        print(options_page(), end="")
    else:
        PAGE.write_text(options_page(), encoding="utf-8")
