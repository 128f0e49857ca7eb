"""Asking on the page: the answer as it comes, where it came from, where the time went."""

from __future__ import annotations

import re
from collections.abc import Callable

from playwright.sync_api import expect
from visitor import Visitor

Visit = Callable[..., Visitor]
HOSTILE = "<img src=x onerror=alert(1)> <script>alert(2)</script>"


def test_an_answer_comes_bit_by_bit(visit: Visit) -> None:
    visitor = visit().options(tokens=800)
    turn = visitor.ask("How many gates has the harbour?")
    spoken = turn.locator(".spoken")
    lengths = {0}
    while len(lengths) < 4:
        assert spoken.get_attribute("aria-busy") == "true", "it came at once"
        lengths.add(len(spoken.inner_text()))
    visitor.page.keyboard.press("Escape")
    expect(spoken).to_have_attribute("aria-busy", "false")


def test_sources_and_times(visit: Visit) -> None:
    turn = visit().options().answered("How many gates has the harbour?")
    expect(turn.locator(".facts")).to_have_text(
        re.compile(r"to the first token · \d+ prompt tokens, \d+ computed.* · 24 answer tokens")
    )
    times = turn.get_by_role("group", name="Where the time went")
    expect(times.locator(".timed").first).to_contain_text("Blended")
    assert times.locator(".legend li").count() >= 2
    sources = turn.locator(".sources li")
    expect(sources).to_have_count(3)
    for source in sources.all():
        expect(source.locator("summary")).to_have_text(
            re.compile(r"(hit|miss)found in the corpus · \d+ tokens · score \d")
        )
        expect(source.locator(".passage")).to_be_hidden()
    sources.first.locator("summary").click()
    expect(sources.first.locator(".passage")).to_contain_text("visitors a day")


def test_the_prompt_token_by_token(visit: Visit) -> None:
    visitor = visit().options()
    turn = visitor.answered("How many gates has the harbour?")
    summary = turn.locator(".tokens summary")
    recomputed, tokens = map(int, re.findall(r"\d+", summary.inner_text()))
    assert turn.locator(".part span").count() == 0, "drawn before anybody wants to see it"
    summary.click()
    expect(turn.locator(".part span")).to_have_count(tokens)
    expect(turn.locator(".part span.row")).to_have_count(recomputed)
    assert 0 < recomputed < tokens
    assert turn.locator(".part span[class*=heat]").count() > 0
    expect(turn.locator(".part h4").nth(1)).to_contain_text("Passage 1")
    turn.get_by_role("group", name="The prompt, token by token").press("ArrowRight")
    expect(turn.locator(".told")).to_contain_text("token 1 ·")


def test_a_conversation_goes_on_until_a_new_one_begins(visit: Visit) -> None:
    visitor = visit().options()
    for question in ("How many gates has the harbour?", "And the orchard?"):
        visitor.answered(question)
    roles = [[message["role"] for message in body["messages"]] for body in visitor.sent]
    assert roles == [["user"], ["user", "assistant", "user"]]
    first = visitor.page.locator(".turn .prose").first
    assert _words(visitor.sent[1]["messages"][1]["content"]) == _words(first.inner_text())
    visitor.page.get_by_role("button", name="New conversation").click()
    expect(visitor.page.locator(".turn")).to_have_count(0)
    visitor.answered("How many gates has the library?")
    assert len(visitor.sent[2]["messages"]) == 1


def test_stop_keeps_what_has_come(visit: Visit) -> None:
    visitor = visit().options(tokens=2000)
    turn = visitor.ask("How many gates has the harbour?")
    expect(turn.locator(".prose")).not_to_be_empty()
    visitor.page.get_by_role("button", name="Stop").click()
    expect(turn.locator(".remark").last).to_have_text("Stopped.")
    expect(visitor.page.get_by_label("Your question")).to_be_focused()
    said = turn.locator(".prose").inner_text()
    visitor.options(tokens=5).answered("And the orchard?")
    assert _words(visitor.sent[1]["messages"][1]["content"]) == _words(said)


def _words(text: str) -> list[str]:
    """Marks of lists, code and bold are shown as what they mean."""
    return re.findall(r"\w+", text)


def test_both_ways_side_by_side(visit: Visit) -> None:
    visitor = visit().options()
    visitor.page.get_by_label("Compare with full prefill").check()
    visitor.answered("How many gates has the harbour?")
    visitor.page.get_by_role("button", name="New conversation").click()
    turn = visitor.answered("How many gates has the harbour?")  # its beginning is in memory now
    assert [body["kvblend"]["method"] for body in visitor.sent] == ["blend", "full"] * 2
    expect(turn.locator(".answer h3.method")).to_have_text(["Blended", "Full prefill"])
    expect(turn.locator(".verdict")).to_have_text(
        re.compile(r"^[\d.]+ m?s instead of [\d.]+ m?s to the first token: blending was .* as (fast|slow)\. .*answers")
    )
    expect(turn.locator(".verdict")).to_contain_text("Full prefill computes every token anew")
    facts = turn.locator(".facts").nth(1).inner_text()
    rows, computed, *reused = map(int, re.findall(r"(\d+) (?:prompt|computed|of an earlier)", facts))
    assert (computed, reused) == (rows, [])


def test_what_an_earlier_turn_blended_is_not_called_full_prefill(visit: Visit) -> None:
    page = visit().page
    script = "figures => import('./page/times.js').then(times => times.timeView(figures).textContent)"
    figures = {"ttft_s": 0.1, "full_s": 0.4, "stages": {}, "reason": "blended in an earlier turn"}
    said = page.evaluate(script, {**figures, "method": "blend"})
    assert "4.0 times as fast as full prefill" in said
    assert "Nothing more was blended: blended in an earlier turn." in said
    assert "Nothing was blended: short." in page.evaluate(script, {**figures, "method": "full", "reason": "short"})


def test_the_model_alone_retrieves_nothing(visit: Visit) -> None:
    visitor = visit().options()
    visitor.page.get_by_label("Answer from").select_option(label="The model alone")
    expect(visitor.page.get_by_label("Passages to find")).to_be_disabled()
    turn = visitor.answered("How many gates has the harbour?")
    assert "retrieve" not in visitor.sent[0]["kvblend"]
    expect(turn.locator(".sources")).to_have_count(0)


def test_what_is_refused_is_one_line_and_loses_nothing(visit: Visit) -> None:
    visitor = visit().options()
    visitor.refused = True
    question = "How many gates? " * 2000
    visitor.send(question)
    alert = visitor.page.locator("#trouble")
    expect(alert).to_be_visible()
    assert "\n" not in alert.inner_text()
    assert re.search(r"\d", alert.inner_text()), "it says how long is too long"
    expect(visitor.page.get_by_label("Your question")).to_have_value(question.strip())
    expect(visitor.page.locator(".turn")).to_have_count(0)
    visitor.page.context.set_offline(True)
    visitor.send("Anybody there?")
    expect(alert).to_have_text("The server cannot be reached. See whether `blend serve` is running, then try again.")
    visitor.page.context.set_offline(False)
    visitor.answered("How many gates has the harbour?")
    expect(alert).to_be_hidden()
    assert len(visitor.sent[-1]["messages"]) == 1, "what was refused is no part of the conversation"


def test_a_number_out_of_range_is_not_sent(visit: Visit) -> None:
    visitor = visit().options(passages=0)
    visitor.page.get_by_label("Your question").fill("How many?")
    visitor.page.get_by_role("button", name="Send").click()
    expect(visitor.page.get_by_label("Passages to find")).to_be_focused()
    assert visitor.sent == []


def test_text_is_text(visit: Visit) -> None:
    visitor = visit().options()
    turn = visitor.answered(HOSTILE)
    expect(turn.locator(".question")).to_contain_text(HOSTILE)
    turn.locator(".tokens summary").click()
    expect(turn.locator(".part").last).to_contain_text("onerror=alert(1)")
    assert visitor.page.locator("img, main script").count() == 0
