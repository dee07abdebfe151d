"""Pages in a browser: plots are drawn, tabs and hovering work, in both themes, on a phone and in print."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pages import Messages
from ultr.report import write_report

TABS = ["Summary", "Data", "Learning", "Metrics", "Bias", "Calibration", "Features", "Rankings", "Configuration"]
SIZES = {"desktop": (1280, 900), "phone": (375, 812)}


@pytest.fixture(scope="module")
def path(runs, tmp_path_factory) -> Path:
    chosen = [runs[name] for name in ("em", "trust", "towers", "affine", "plain", "both")]
    return write_report(chosen, tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture
def opened(browser, path):
    """Open the page of six runs at a given size, and collect the browser's messages."""
    contexts = []

    def open_(size: str = "desktop", scheme: str = "light", **more):
        width, height = SIZES[size]
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, **more)
        contexts.append(context)
        page, messages = context.new_page(), Messages()
        page.on("console", lambda message: messages.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: messages.append(f"error: {error}"))
        page.on("request", lambda request: messages.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("body[data-ready]")
        return page, messages

    yield open_
    for context in contexts:
        context.close()


def drawn(page) -> list[bool]:
    """Return for each visible plot whether it is drawn and fits."""
    return page.evaluate(
        """[...document.querySelectorAll('.plot')].filter((p) => p.offsetParent).map(
            (p) => !!p.querySelector('.main-svg') && p.querySelector('.main-svg').clientWidth <= p.clientWidth + 1)"""
    )


@pytest.mark.parametrize(
    ("scheme", "size"),
    [
        ("light", "desktop"),
        ("dark", "phone"),
        pytest.param("light", "phone", marks=pytest.mark.long),
        pytest.param("dark", "desktop", marks=pytest.mark.long),
    ],
)
def test_every_plot_is_drawn_in_every_tab_without_messages(opened, size, scheme):
    page, messages = opened(size, scheme)
    assert [tab.inner_text() for tab in page.query_selector_all("[role=tab]")] == TABS
    seen = 0
    for tab in page.query_selector_all("[role=tab]"):
        tab.click()
        assert tab.get_attribute("aria-selected") == "true"
        assert len(page.query_selector_all("main section:not([hidden])")) == 1
        assert all(drawn(page))
        seen += len(drawn(page))
        assert not page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
        if shots := os.environ.get("ULTR_SCREENSHOTS"):
            page.screenshot(path=f"{shots}/{size}-{scheme}-{tab.inner_text()}.png", full_page=True)
    assert seen == len(page.query_selector_all(".plot")) > 10
    assert messages == []


@pytest.mark.parametrize("size", SIZES)
def test_the_page_opens_with_the_decision_and_one_picture(opened, size):
    page, messages = opened(size)
    decision, plot = page.query_selector(".decision"), page.query_selector(".plot")
    assert decision.inner_text().startswith("Decision on ")
    boxes = [each.bounding_box() for each in (decision, plot)]
    assert boxes[0]["y"] + boxes[0]["height"] <= boxes[1]["y"]
    assert len([True for each in page.query_selector_all(".plot") if each.is_visible()]) == 1
    if size == "desktop":
        assert boxes[1]["y"] + boxes[1]["height"] <= SIZES[size][1]
    else:
        assert boxes[1]["y"] < SIZES[size][1]  # it begins on the first screen: six runs are higher than a phone
    assert messages == []


def test_a_phone_shows_all_tabs_and_scrolls_wide_tables_inside_the_page(opened):
    page, messages = opened("phone")
    width, _ = SIZES["phone"]
    for tab in page.query_selector_all("[role=tab]"):
        box = tab.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    page.click("#tab-configuration")
    page.click("summary >> text=All settings")
    wide = page.query_selector("#configuration details[open] .scroll")
    assert wide.evaluate("(e) => e.scrollWidth > e.clientWidth")  # six runs
    wide.evaluate("(e) => { e.scrollLeft = 200; }")
    row = wide.query_selector("tbody th").bounding_box()
    assert row["x"] >= 0  # the name of a row stays in view
    assert row["width"] <= width / 2
    assert not page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
    assert messages == []


def test_hovering_shows_values(opened):
    page, messages = opened()
    page.click("#tab-learning")
    box = page.query_selector(".plot:visible .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector(".hoverlayer .legend, .hoverlayer .hovertext", timeout=5000)
    assert messages == []


def test_arrow_keys_and_addresses_select_a_tab(opened, path):
    page, _ = opened()
    page.focus("#tab-summary")
    page.keyboard.press("ArrowRight")
    assert page.get_attribute("#tab-data", "aria-selected") == "true"
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.get_attribute("#tab-configuration", "aria-selected") == "true"
    page.goto(path.as_uri() + "#bias")
    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert page.get_attribute("#tab-bias", "aria-selected") == "true"
    assert all(drawn(page))


def test_the_button_switches_between_light_and_dark(opened):
    page, messages = opened()
    page.click("#tab-learning")

    def colours() -> tuple[str, str]:
        paper = "getComputedStyle(document.body).backgroundColor"
        ink = "getComputedStyle(document.querySelector('#learning .xtick text')).fill"
        return page.evaluate(paper), page.evaluate(ink)

    light = colours()
    page.click("#theme")
    dark = colours()
    page.click("#theme")
    assert colours() == light
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    assert messages == []


def test_printing_shows_all_sections_and_leaves_the_page_as_before(opened, tmp_path):
    page, messages = opened(scheme="dark")
    page.pdf(path=str(tmp_path / "page.pdf"))
    assert (tmp_path / "page.pdf").stat().st_size > 50_000
    assert len(page.query_selector_all("main section:not([hidden])")) == 1
    page.click("#tab-bias")
    assert all(drawn(page))
    assert messages == []


def test_tables_are_readable_without_scripts(opened, browser):
    page = browser.new_context(java_script_enabled=False).new_page()
    (address,) = {opened()[0].url}
    page.goto(address)
    assert all(section.is_visible() for section in page.query_selector_all("main section"))
    page.context.close()


def test_a_command_can_be_copied(opened):
    page, messages = opened(permissions=["clipboard-read", "clipboard-write"])
    page.click("#tab-configuration")
    page.click(".copy >> nth=0")
    # Not wait_for_function: it evaluates a string, which the page's policy forbids.
    page.wait_for_selector(".copy:text-is('copied'), .copy:text-is('not copied')")
    assert messages == []
