"""The documentation site: it builds without a warning, has every public name and command, and works in a browser."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

import ultr
from pages import Messages
from ultr.cli import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = ("index.html", "concepts/off-policy.html", "methods/index.html", "api/training.html", "cli.html")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("mkdocstrings", reason="the dependency group docs is not installed")
    out = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ})
    assert done.returncode == 0, done.stderr  # a dead link, a wrong anchor or a page outside the navigation
    return out


class Quiet(SimpleHTTPRequestHandler):
    """A server of files that prints nothing."""

    def log_message(self, *_):
        pass


class Loaded(HTMLParser):
    """The addresses that a browser loads with a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        if tag in ("script", "img", "iframe") and named.get("src"):
            self.addresses.append(named["src"])
        if tag == "link" and named.get("rel") in ("stylesheet", "icon", "preconnect", "preload"):
            self.addresses.append(named["href"])


def test_every_public_name_is_in_the_reference_with_an_example():
    pages = [path.read_text() for path in (ROOT / "docs" / "api").glob("*.md")]
    examples = "".join(block for page in pages for block in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S))
    names = set(ultr.__all__) - {"__version__"}
    assert {name for page in pages for name in re.findall(r"^::: ultr\.(\w+)$", page, re.M)} == names
    assert {name for name in ultr.__all__ if not re.search(rf"\bultr\.{name}\b", examples)} == set()


def test_the_reference_has_the_docstrings_of_public_names_and_the_options_of_commands(site):
    text = "".join(path.read_text() for path in (site / "api").glob("*.html"))
    assert {name for name in ultr.__all__ if f'id="ultr.{name}"' not in text} == {"__version__"}
    assert "Estimate the value that a ranker with these scores" in text
    commands = (site / "cli.html").read_text()
    assert {c.__name__ for c in COMMANDS if f'id="ultr-{c.__name__}"' not in commands} == set()
    assert "--propensities" in commands


def test_pages_load_nothing_from_other_hosts(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        loaded = Loaded(page.read_text()).addresses
        assert not [address for address in loaded if "//" in address], page


@pytest.fixture
def address(site):
    """Serve the site on this machine: the search of a page that is opened as a file cannot read its index."""
    handler = partial(Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_pages_fit_the_screen_and_search_works_in_a_browser(address, browser, width, scheme):
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
    page, messages = context.new_page(), Messages()
    page.on("request", lambda request: messages.append(request.url))
    page.on("pageerror", lambda error: messages.append(f"error: {error}"))
    for name in PAGES:
        page.goto(f"{address}/{name}")
        assert not page.evaluate("document.documentElement.scrollWidth > window.innerWidth"), name
        if shots := os.environ.get("ULTR_SCREENSHOTS"):
            page.screenshot(path=f"{shots}/site-{width}-{name.replace('/', '-')}.png")
    page.click("input[name=query]" if width > 1000 else "label[for=__search]")
    page.locator("input[name=query]").press_sequentially("propensity")
    page.wait_for_selector(".md-search-result__item", timeout=10_000)
    assert [message for message in messages if not message.startswith(address)] == []
    context.close()
