"""The page on a small screen, in the dark, from the keyboard, read aloud."""

from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect
from visitor import Visitor

WIDE, SMALL = {"width": 1280, "height": 900}, {"width": 360, "height": 740}


@pytest.mark.parametrize("viewport", [WIDE, SMALL], ids=["wide", "small"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_that_axe_finds(visit, scheme, viewport):
    visitor = visit(color_scheme=scheme, viewport=viewport, reduced_motion="reduce")
    visitor.ready()
    if viewport is SMALL:
        visitor.click("Documents")
        expect(visitor.documents().first).to_be_visible()
        _check(visitor)
        visitor.click("Options")
        _check(visitor)
    visitor.options(passages=1, tokens=12, compare=True, trace=True)
    if viewport is SMALL:
        visitor.click("Options")
        expect(visitor.page.locator("#side")).to_be_hidden()
    turn = visitor.answered("How many gates has the harbour, and https://example.org/" + "a-long-word" * 12 + "?")
    for summary in turn.locator("summary").all():
        summary.click()
    expect(turn.locator(".part span").last).to_be_attached()
    _check(visitor)


def _check(visitor: Visitor) -> None:
    """Axe finds nothing, and nothing scrolls sideways."""
    rules = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}
    found: dict[str, Any] = Axe().run(visitor.page, options=rules).response
    assert [(v["id"], [node["html"] for node in v["nodes"]]) for v in found["violations"]] == []
    assert visitor.page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_on_a_small_screen_each_button_opens_what_it_names(visit):
    page = visit(viewport=SMALL).page
    documents, options = (page.get_by_role("button", name=name) for name in ("Documents", "Options"))
    entries, field = page.get_by_role("list", name="Documents"), page.get_by_label("Passages to find")
    documents.click()
    expect(entries.get_by_role("listitem").first).to_be_in_viewport()
    expect(field).to_be_hidden()
    options.click()
    expect(field).to_be_in_viewport()
    expect(entries).to_be_hidden()
    expect(options).to_have_attribute("aria-expanded", "true")
    options.click()
    expect(page.get_by_label("Your question")).to_be_visible()


@pytest.mark.parametrize("viewport", [WIDE, SMALL], ids=["wide", "small"])
def test_a_number_out_of_range_is_shown_and_not_sent(visit, viewport):
    visitor = visit(viewport=viewport)
    visitor.ready()
    page, field = visitor.page, visitor.page.get_by_label("Passages to find")
    if viewport is SMALL:
        visitor.click("Options")
    field.fill("0")
    if viewport is SMALL:
        visitor.click("Options")
        expect(field).to_be_hidden()
    page.get_by_label("Your question").fill("How many?")
    visitor.click("Send")
    expect(field).to_be_focused()
    assert visitor.sent == []
    expect(page.get_by_label("Your question")).to_have_value("How many?")


def test_dark_is_dark_and_motion_is_spared(visit):
    def brightness(visitor: Visitor) -> int:
        colour = visitor.page.evaluate("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)")
        return int(sum(colour[:3]))

    dark, light = visit(color_scheme="dark", reduced_motion="reduce"), visit(color_scheme="light")
    assert brightness(dark) < 100 < 600 < brightness(light)
    scrolling = "getComputedStyle(document.documentElement).scrollBehavior"
    assert [visitor.page.evaluate(scrolling) for visitor in (dark, light)] == ["auto", "smooth"]


def test_what_a_screen_reader_is_told(visit):
    visitor = visit().options()
    page = visitor.page
    turn = visitor.answered()
    expect(turn.locator(".spoken")).to_have_attribute("aria-live", "polite")
    expect(turn.locator(".spoken")).to_have_attribute("aria-busy", "false")
    expect(page.locator("#status")).to_have_text("Answer complete")
    expect(page.locator("#status")).to_have_role("status")
    for role, name in (("main", None), ("complementary", "Documents and options"), ("region", "Conversation")):
        expect(page.get_by_role(role, name=name)).to_have_count(1)
    assert page.title().startswith("kvblend")


def test_a_model_that_is_loading_is_no_error(visit):
    """The server's answer while it loads is played to the page, then the server answers itself."""
    visitor = visit(refused=True)
    page = visitor.page
    message = "the server is not ready: it loads its model, or completes its store; try again in a moment"
    body = {"error": {"message": message, "code": "loading"}}
    page.route("**/v1/models", lambda route: route.fulfill(status=503, json=body))
    page.reload()
    note = page.get_by_role("status").filter(has_text="The model is loading")
    expect(note).to_be_visible()
    expect(page.get_by_role("alert").filter(visible=True)).to_have_count(0)
    page.unroute("**/v1/models")
    visitor.ready()
    expect(note).to_be_hidden()


def test_the_keyboard_is_enough(visit):
    visitor = visit()
    page, keys = visitor.page, visitor.page.keyboard
    question, compare = page.get_by_label("Your question"), page.get_by_label("Compare with full prefill")
    expect(question).to_be_focused()
    visitor.ready()
    visitor.options(trace=True)
    _walk(visitor, "Shift+Tab", "textarea", "Your question")
    keys.type("How many gates")
    keys.press("Shift+Enter")
    keys.type("has the harbour?")
    keys.press("Enter")
    expect(page.locator(".spoken")).to_have_attribute("aria-busy", "false")
    assert visitor.sent[0]["messages"][0]["content"] == "How many gates\nhas the harbour?"
    expect(question).to_be_focused()
    _walk(visitor, "Shift+Tab", "summary", "The prompt")
    keys.press("Enter")
    expect(page.locator(".part span").first).to_be_attached()
    _walk(visitor, "Shift+Tab", "summary", "found in the corpus")
    keys.press("Enter")
    _walk(visitor, "Shift+Tab", "span", "hit")
    _walk(visitor, "Shift+Tab", "button", "Copy")
    expect(page.locator(".sources details[open] .passage")).to_be_visible()
    _walk(visitor, "Tab", "input", "Compare with full prefill")
    keys.press("Space")
    expect(compare).to_be_checked()
    _walk(visitor, "Tab", "button", "Delete")


def _walk(visitor: Visitor, key: str, tag: str, name: str) -> None:
    """Press `key` until the focus is on such an element; it must be seen wherever it goes."""
    seen = []
    for _ in range(40):
        visitor.page.keyboard.press(key)
        focus = visitor.page.evaluate(
            "() => { const e = document.activeElement, shown = e.matches('#files') ? e.previousElementSibling : e,"
            " style = getComputedStyle(e.matches('#question') ? e.parentElement : shown);"
            " return [e.localName, e.ariaLabel || e.labels?.[0]?.innerText || e.innerText,"
            " style.outlineStyle !== 'none' || style.boxShadow !== 'none']; }"
        )
        assert focus[2], f"no one sees that {focus[:2]} has the focus"
        seen.append(focus[:2])
        if focus[0] == tag and name in focus[1]:
            return
    raise AssertionError(f"{key} never came to {name}: {seen}")
