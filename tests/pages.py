"""Pages in tests: the plots of a report, read from its data, and the messages of a browser."""

from __future__ import annotations

import json
import re
from typing import Any


def plots_of(text: str) -> list[dict[str, Any]]:
    """Return the data and layout of each plot of a page, in order."""
    match = re.search(r'<script type="application/json" id="plots">(.*?)</script>', text, re.DOTALL)
    assert match
    plots: list[dict[str, Any]] = json.loads(match.group(1))
    assert len(plots) == text.count('class="plot"')
    return plots


def titles_of(text: str) -> list[str]:
    """Return the title of each plot of a page, in order."""
    return re.findall(r"<figcaption><b>(.*?)</b>", text)


class Messages(list):
    """Console messages and requests of a browser, without those of the page's own file."""

    def append(self, message: str) -> None:
        if not message.startswith(("file:", "data:", "blob:")):
            super().append(message)
