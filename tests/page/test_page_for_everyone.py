"""The page on a small screen, in the dark, from the keyboard, read aloud."""

from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect
from visitor import Visit, Visitor

WIDE, SMALL = {"width": 1280, "height": 900}, {"width": 360, "height": 740}


def _everything_open(visitor: Visitor) -> None:
    turn = visitor.answered("How many gates has the harbour, and https://example.org/" + "a-long-word" * 12 + "?")
    for summary in turn.locator("summary").all():
        summary.click()
    expect(turn.locator(".part span").last).to_be_attached()


@pytest.mark.parametrize("viewport", [WIDE, SMALL], ids=["wide", "small"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_that_axe_finds(visit: Visit, scheme: str, viewport: dict[str, int]) -> None:
    visitor = visit(color_scheme=scheme, viewport=viewport, reduced_motion="reduce")
    expect(visitor.page.locator("#corpus option")).not_to_have_count(0)
    if viewport is SMALL:
        visitor.page.get_by_role("button", name="Documents").click()
        expect(visitor.page.get_by_role("list", name="Documents")).to_be_visible()
        assert not visitor.scrolls_sideways()
        _check(visitor)
        visitor.page.get_by_role("button", name="Options").click()
        assert not visitor.scrolls_sideways()
        _check(visitor)
        visitor.compare().trace().options(passages=1, tokens=12)
        visitor.page.get_by_role("button", name="Options").click()
        expect(visitor.page.locator("#side")).to_be_hidden()
    else:
        visitor.compare().trace().options(passages=1, tokens=12)
    _everything_open(visitor)
    _check(visitor)
    assert not visitor.scrolls_sideways()


def _check(visitor: Visitor) -> None:
    rules = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}
    found: dict[str, Any] = Axe().run(visitor.page, options=rules).response
    assert [(v["id"], [node["html"] for node in v["nodes"]]) for v in found["violations"]] == []


def test_a_model_that_is_loading_is_no_error(visit: Visit) -> None:
    """The server's answer while it loads is played to the page, then the server answers itself."""
    visitor = visit()
    visitor.refused = True
    page = visitor.page
    body = {"error": {"message": "the server is loading its model; try again in a moment", "code": "loading"}}
    page.route("**/v1/models", lambda route: route.fulfill(status=503, json=body))
    page.reload()
    note = page.get_by_role("status").filter(has_text="The model is loading")
    expect(note).to_be_visible()
    expect(page.get_by_role("alert").filter(visible=True)).to_have_count(0)
    page.unroute("**/v1/models")
    expect(page.locator("#corpus option")).not_to_have_count(0)
    expect(note).to_be_hidden()


def test_the_keyboard_is_enough(visit: Visit) -> None:
    visitor = visit()
    page, keys = visitor.page, visitor.page.keyboard
    expect(page.get_by_label("Your question")).to_be_focused()
    expect(page.locator("#corpus option")).not_to_have_count(0)
    visitor.options().trace()
    _walk(visitor, "Shift+Tab", "textarea", "Your question")
    keys.type("How many gates")
    keys.press("Shift+Enter")
    keys.type("has the harbour?")
    keys.press("Enter")
    expect(page.locator(".spoken")).to_have_attribute("aria-busy", "false")
    assert visitor.sent[0]["messages"][0]["content"] == "How many gates\nhas the harbour?"
    expect(page.get_by_label("Your question")).to_be_focused()
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
    expect(page.get_by_label("Compare with full prefill")).to_be_checked()
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
