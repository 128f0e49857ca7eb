"""What a reload of the page keeps, and for whom."""

from playwright.sync_api import expect
from visitor import Visit


def test_a_reload_keeps_conversation_and_options(visit: Visit) -> None:
    visitor = visit().options(passages=2, tokens=12)
    page = visitor.page
    expect(page.get_by_label("Show the prompt’s tokens")).not_to_be_checked()
    visitor.trace()
    turn = visitor.answered("How many gates has the harbour?")
    before = [turn.locator(part).inner_text() for part in (".question", ".prose", ".facts", ".times summary")]
    page.reload()
    expect(page.locator(".turn")).to_have_count(1)
    assert [turn.locator(part).inner_text() for part in (".question", ".prose", ".facts", ".times summary")] == before
    expect(turn.locator(".sources li")).to_have_count(2)
    expect(page.get_by_label("Passages to find")).to_have_value("2")
    expect(page.get_by_label("Longest answer, tokens")).to_have_value("12")
    expect(page.get_by_label("Show the prompt’s tokens")).to_be_checked()
    visitor.answered("And the orchard?")
    first, second = (body["messages"] for body in visitor.sent)
    assert second[:1] == first
    assert [message["role"] for message in second] == ["user", "assistant", "user"]


def test_a_new_conversation_leaves_nothing_behind(visit: Visit) -> None:
    visitor = visit().options(tokens=5)
    page = visitor.page
    visitor.answered("How many gates has the harbour?")
    other = page.context.new_page()
    other.goto(visitor.url)
    expect(other.locator("#welcome")).to_be_visible()
    page.get_by_role("button", name="New conversation").click()
    assert "harbour" not in page.evaluate("Object.values(sessionStorage).join() + Object.values(localStorage).join()")
    page.reload()
    expect(page.locator("#welcome")).to_be_visible()
    expect(page.locator(".turn")).to_have_count(0)
