"""A hook of mkdocs: it adds the pages that are generated, and corrects links to files outside docs/.

Generated pages are the reference of the command line, from the commands themselves, and the documents of the root
folder (contributing, security, changelog).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from ultr.cli import app

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {"CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md", "CHANGELOG.md": "changelog.md"}
NOTEBOOK = re.compile(r"\[([^]]+)\]\((?:\.\./)*NOTEBOOK\.md(?:#[^)]*)?\)")  # not on the site: links become text
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)]*)?\)")


def on_files(files: Files, /, *, config: MkDocsConfig) -> Files:
    """Add the generated pages and the licence."""
    for source, target in ROOT_PAGES.items():
        text = LINK.sub(_from_root, NOTEBOOK.sub(r"\1", (ROOT / source).read_text(encoding="utf-8")))
        files.append(File.generated(config, target, content=text))
    files.append(File.generated(config, "LICENSE.txt", content=(ROOT / "LICENSE").read_text(encoding="utf-8")))
    files.append(File.generated(config, "cli.md", content=command_line()))
    return files


def on_page_markdown(markdown: str, /, *, page: Page, **_: Any) -> str:
    """Return a page whose links to files of the root folder point to the generated pages."""
    if page.file.src_uri.startswith(("concepts/", "methods/", "tutorials/")):
        page.meta["search"] = {"boost": 3}  # they come first in results, before the long pages
    up = "../" * page.file.src_uri.count("/")

    def corrected(match: re.Match[str]) -> str:
        name = match[1].removeprefix(f"{up}../") if match[1].startswith(f"{up}../") else ""
        target = "LICENSE.txt" if name == "LICENSE" else ROOT_PAGES.get(name)
        return match[0] if target is None else f"]({up}{target}{match[2] or ''})"

    return LINK.sub(corrected, NOTEBOOK.sub(r"\1", markdown))


def _from_root(match: re.Match[str]) -> str:
    """Return a link of a document of the root folder as a link from docs/."""
    target = ROOT_PAGES.get(match[1], match[1].removeprefix("docs/"))
    return f"]({target}{match[2] or ''})"


def command_line() -> str:
    """Return the reference of the command line as Markdown, with one section for each command."""
    group: Any = typer.main.get_command(app)
    commands = group.commands.items()
    overview = [[f"[`ultr {name}`](#ultr-{name})", _text(command.help).split(". ")[0]] for name, command in commands]
    parts = [
        "# Command line",
        "This page is generated from the commands. `ultr COMMAND --help` prints the same texts. Data goes to stdout, "
        "and messages go to stderr. [Reliability](reliability.md#exit-codes) lists the exit codes.",
        _table(["command", "what it does"], overview),
    ]
    for name, command in commands:
        context = command.make_context(name, [], resilient_parsing=True)
        usage = " ".join(piece.strip("{}").upper() for piece in command.collect_usage_pieces(context))
        parts += [f"## ultr {name}", _text(command.help), f"    ultr {name} {usage}"]
        records = [parameter.get_help_record(context) for parameter in command.params if parameter.name != "help"]
        if rows := [[f"`{record[0]}`", _text(record[1])] for record in records if record is not None]:
            parts.append(_table(["argument or option", "meaning"], rows))
    return "\n\n".join(parts) + "\n"


def _text(text: str) -> str:
    """Return text as Markdown on one line, without HTML."""
    return re.sub(r"\s+", " ", text).replace("<", "&lt;").replace("[", "\\[").strip()


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
