"""HTML for notebooks, and records of the stages of long work."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from html import escape

from ultr.errors import redact

# --- HTML for notebooks -----------------------------------------------------------------------------------------------
# Small pieces of HTML, which notebooks show for results (`_repr_html_`).


def table_html(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """Return a table of texts; the first column is aligned left, and the others right, as numbers are."""
    title = f'<caption style="text-align:left">{escape(caption)}</caption>' if caption else ""
    lines = [_row("th", head), *(_row("td", row) for row in rows)]
    return f"<table>{title}{''.join(lines)}</table>"


def facts_html(title: str, facts: Mapping[str, str], notes: Sequence[str] = ()) -> str:
    """Return a title, a table of named values, and a list of notes."""
    rows = "".join(_row("td", row, end="left") for row in facts.items())
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f"<b>{escape(title)}</b><table>{rows}</table>" + (f"<ul>{listed}</ul>" if listed else "")


def _row(cell: str, texts: Sequence[str], end: str = "right") -> str:
    cells = (
        f'<{cell} style="text-align:{"left" if i == 0 else end}">{escape(text)}</{cell}>'
        for i, text in enumerate(texts)
    )
    return f"<tr>{''.join(cells)}</tr>"


# --- Stages of long work ----------------------------------------------------------------------------------------------
# The stages of long work, as records of Python's logging: logger `ultr`, level INFO, with the attribute `stage`.

logger = logging.getLogger("ultr")


def _without_secrets(record: logging.LogRecord) -> bool:
    """Redact the message of a record; the logger then passes it on."""
    record.msg, record.args = redact(record.getMessage()), None
    return True


logger.addFilter(_without_secrets)


def begin_stage(name: str) -> None:
    """Log that a stage of long work begins, such as "reading the data"."""
    logger.info(name, extra={"stage": redact(name)})
