"""Asking on the page: the answer as it comes, where it came from, where the time went, and what a reload keeps."""

import re

from playwright.sync_api import expect
from visitor import SOURCE

HOSTILE = "<img src=x onerror=alert(1)> <script>alert(2)</script>"
MARKDOWN = f"""## Mills

| Mill | Wheels |
|------|-------:|
| East | 2 |
| {HOSTILE} | 3 |

- **four** mills, *all* turned by `turn(2)`
  - two old

See [here](https://example.org) ![x](https://example.org/x.png)
"""


def test_an_answer_comes_bit_by_bit(visit):
    visitor = visit().options(tokens=800)
    turn = visitor.ask()
    spoken = turn.locator(".spoken")
    lengths = {0}
    while len(lengths) < 4:
        assert spoken.get_attribute("aria-busy") == "true", "it came at once"
        lengths.add(len(spoken.inner_text()))
    visitor.page.keyboard.press("Escape")
    expect(spoken).to_have_attribute("aria-busy", "false")


def test_sources_and_times(visit):
    turn = visit().options().answered()
    expect(turn.locator(".facts")).to_have_text(re.compile(r"\d+ prompt tokens, \d+ computed.* · 24 answer tokens"))
    times = turn.get_by_role("group", name="Where the time went")
    expect(times.locator("summary")).to_have_text(re.compile(r"^First token after [\d.]+ m?s"))
    timed = times.locator(".timed").first
    expect(timed).to_be_hidden()
    times.locator("summary").click()
    expect(timed).to_be_visible()
    expect(timed).to_contain_text("Blended")
    assert times.locator(".legend li").count() >= 2
    sources = turn.locator(".sources li")
    expect(sources).to_have_count(3)
    for source in sources.all():
        line = re.compile(r"(hit|miss)\w+\.md · found in the corpus · \d+ tokens · score \d")
        expect(source.locator("summary")).to_have_text(line)
        expect(source.locator(".passage")).to_be_hidden()
    sources.first.locator("summary").click()
    expect(sources.first.locator(".passage")).to_contain_text("visitors a day")


def test_the_markdown_of_an_answer_is_drawn(visit):
    visitor = visit()
    visitor.play((MARKDOWN, {}))
    prose = visitor.answered("How many?").locator(".prose")
    table = prose.get_by_role("table")
    expect(table.get_by_role("columnheader")).to_have_text(["Mill", "Wheels"])
    expect(table.get_by_role("cell")).to_have_text(["East", "2", HOSTILE, "3"])
    expect(table.get_by_role("cell", name="2", exact=True)).to_have_css("text-align", "right")
    expect(prose.get_by_role("heading", name="Mills")).to_be_visible()
    expect(prose.locator("li li")).to_have_text(["two old"])
    expect(prose.locator("strong, em, code")).to_have_text(["four", "all", "turn(2)"])
    expect(prose).to_contain_text("[here](https://example.org) ![x](https://example.org/x.png)")
    assert prose.locator("a, img, script").count() == 0


def test_what_an_answer_took_from_a_passage_leads_there(visit):
    visitor = visit()
    mill = {**SOURCE, "title": "", "text": "The mill at Lindale has two wheels and was built in 1672."}
    bell = {**SOURCE, "title": "Bells", "text": "The bell at Lindale weighs three tonnes."}
    learned = {**SOURCE, "kind": "learned", "title": "", "text": "Built in 1672, three tonnes."}
    text = "It **was built in 1672**. It has two wheels. The bell weighs three tonnes.\n\n- I know no more, sorry\n\nIt is."
    visitor.play((text, {}), sources=(learned, mill, bell))
    turn = visitor.answered("When was the mill built?")
    said = "It was built in 1672. It has two wheels.[2] The bell weighs three tonnes.[3]"
    expect(turn.locator(".prose p").first).to_have_text(said)
    expect(turn.locator(".cite")).to_have_text(["[2]", "[3]"])
    expect(turn.locator(".cite").last).to_have_attribute("title", re.compile("Passage 3, Bells: .* the model names no"))
    source = turn.locator(".sources li").filter(has_text="Bells")
    expect(source.locator(".passage")).to_be_hidden()
    turn.get_by_role("button", name="[3]").click()
    expect(source.locator(".passage")).to_contain_text("three tonnes")
    expect(source.locator("summary")).to_be_focused()
    visitor.page.reload()
    expect(turn.locator(".cite")).to_have_text(["[2]", "[3]"])


def test_the_prompt_token_by_token(visit):
    visitor = visit().options(trace=True)
    turn = visitor.answered()
    summary = turn.locator(".tokens summary")
    recomputed, tokens = map(int, re.findall(r"\d+", summary.inner_text()))
    assert turn.locator(".part span").count() == 0, "drawn before anybody wants to see it"
    summary.click()
    expect(turn.locator(".part span")).to_have_count(tokens)
    expect(turn.locator(".part").first).to_be_visible()
    expect(turn.locator(".part span.row")).to_have_count(recomputed)
    assert 0 < recomputed < tokens
    assert turn.locator(".part span[class*=heat]").count() > 0
    expect(turn.locator(".part h4").nth(1)).to_contain_text("Passage 1")
    turn.get_by_role("group", name="The prompt, token by token").press("ArrowRight")
    expect(turn.locator(".told")).to_contain_text("token 1 ·")


def test_a_conversation_goes_on_until_a_new_one_begins(visit):
    visitor = visit().options()
    visitor.answered()
    visitor.answered("And the orchard?")
    roles = [[message["role"] for message in body["messages"]] for body in visitor.sent]
    assert roles == [["user"], ["user", "assistant", "user"]]
    first = visitor.page.locator(".turn .prose").first
    assert _words(visitor.sent[1]["messages"][1]["content"]) == _words(first.inner_text())
    visitor.click("New conversation")
    visitor.answered("How many gates has the library?")
    assert len(visitor.sent[2]["messages"]) == 1


def test_stop_keeps_what_has_come(visit):
    visitor = visit().options(tokens=2000)
    turn = visitor.ask()
    expect(turn.locator(".prose")).not_to_be_empty()
    visitor.click("Stop")
    expect(turn.locator(".answer > .remark")).to_have_text("Stopped.")
    expect(visitor.page.get_by_label("Your question")).to_be_focused()
    said = turn.locator(".prose").inner_text()
    visitor.options(tokens=5).answered("And the orchard?")
    assert _words(visitor.sent[1]["messages"][1]["content"]) == _words(said)


def _words(text: str) -> list[str]:
    """Marks of lists, code and bold are shown as what they mean."""
    return re.findall(r"\w+", text)


def test_both_ways_side_by_side(visit):
    visitor = visit().options(compare=True)
    visitor.answered()
    visitor.click("New conversation")
    turn = visitor.answered()  # its beginning is in memory now
    assert [body["kvblend"]["method"] for body in visitor.sent] == ["blend", "full"] * 2
    expect(turn.locator(".answer h3.method")).to_have_text(["Blended", "Full prefill"])
    expect(turn.locator(".verdict")).to_have_text(
        re.compile(r"^[\d.]+ m?s instead of [\d.]+ m?s to the first token: blending was .* as (fast|slow)\. .*answers")
    )
    expect(turn.locator(".verdict")).to_contain_text("Full prefill computes every token anew")
    facts = turn.locator(".facts").nth(1).inner_text()
    rows, computed, *reused = map(int, re.findall(r"(\d+) (?:prompt|computed|of an earlier)", facts))
    assert (computed, reused) == (rows, [])


def test_a_comparison_shows_its_own_measurement_alone_also_after_a_reload(visit):
    """One of what was not blended claims no speed."""
    visitor = visit().options(compare=True)
    full, short = {"method": "full", "rows_computed": 400, "ttft_s": 0.25}, {"method": "full", "reason": "short"}
    visitor.play(
        ("One.", {"full_estimated_s": 1.4}), ("One.", full), ("One.", short), ("One.", {**full, "ttft_s": 0.2})
    )
    turn = visitor.answered("How many?")
    verdict, times = turn.locator(".verdict"), turn.locator(".times summary").first
    expect(verdict).to_contain_text("2.5 times as fast")
    measured = "2.5 times as fast as full prefill, measured"
    expect(times).to_contain_text(measured)
    said = turn.text_content()
    assert "estimated" not in said
    assert "1.40 s" not in said
    before = verdict.inner_text()
    other = visitor.answered("How many?")
    expect(other.locator(".verdict")).to_contain_text("Nothing was blended")
    expect(other.locator(".verdict")).not_to_contain_text("times as")
    visitor.page.reload()
    expect(visitor.page.get_by_label("Compare with full prefill")).to_be_checked()
    expect(verdict).to_have_text(before)
    expect(times).to_contain_text(measured)


def test_an_estimated_speedup_says_so_and_the_expected_kl_is_shown_where_a_quality_was_asked_for(visit):
    visitor = visit()
    quality = {"quality": {"kl": 0.0123, "target": 0.05, "flips": None, "ratio": 0.05}}
    visitor.play(("One.", {"full_estimated_s": 0.4}), ("Two.", {"full_measured_s": 0.3}), ("Three.", quality))
    for line in (
        "estimated 4.0 times as fast as full prefill",
        "3.0 times as fast as full prefill, measured",
        "full prefill is not measured yet",
    ):
        turn = visitor.answered("How many?")
        times = turn.locator(".times")
        expect(times.locator("summary")).to_contain_text(line)
        expect(times.locator(".name", has_text="Full prefill, estimated")).to_have_count(int("estimated" in line))
        expect(turn.locator(".facts", has_text="expected KL 0.012")).to_have_count(int("not measured" in line))


def test_rows_that_requests_in_flight_share_are_shown(visit):
    visitor = visit()
    visitor.play(
        ("One.", {"rows_shared": 1234, "rows_ahead": 1100}),
        ("Two.", {"rows_shared": 90, "rows_ahead": 0}),
        ("Three.", {}),
    )
    owner, other, alone = [visitor.answered("How many?").locator(".facts") for _ in range(3)]
    expect(owner).to_contain_text("computed · 1,234 shared with other requests · 1,100 computed for all of them")
    expect(owner.get_by_text("1,234 shared")).to_have_attribute("title", re.compile("at the same time"))
    expect(owner.get_by_text("1,100 computed")).to_have_attribute("title", re.compile("apart from its prompt"))
    expect(other).to_contain_text("90 shared with other requests")
    expect(other).not_to_contain_text("for all of them")
    expect(alone).not_to_contain_text("other requests")
    visitor.page.reload()
    expect(owner).to_contain_text("1,234 shared with other requests")


def test_an_answer_is_copied_as_the_model_wrote_it(visit):
    visitor = visit(permissions=["clipboard-read", "clipboard-write"])
    text = "Use **two** of them:\n\n```python\nmill.turn(2)\n```"
    visitor.play((text, {}))
    turn = visitor.answered("How many?")
    turn.get_by_role("button", name="Copy").click()
    expect(turn.get_by_role("button", name="Copied")).to_be_visible()
    assert visitor.page.evaluate("navigator.clipboard.readText()") == text


def test_an_answer_is_copied_over_plain_http(visit):
    """From another machine there is no clipboard to write to, but the browser copies. Pasted into the question it shows."""
    visitor = visit()
    visitor.page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    visitor.play(("Use two of them.", {}))
    visitor.answered("How many?").get_by_role("button", name="Copy").click()
    question = visitor.page.get_by_label("Your question")
    question.press("Control+v")
    expect(question).to_have_value("Use two of them.")


def test_a_long_question_is_folded(visit):
    visitor = visit()
    visitor.play(("Two.", {}))
    pasted = "\n".join(f"Line {number} of the mill's book." for number in range(60)) + "\nHow many wheels?"
    turn = visitor.answered(pasted)
    question = turn.locator(".question")
    expect(question).to_contain_text("Line 0 of")
    expect(question).to_contain_text("How many wheels?")
    expect(question).not_to_contain_text("Line 30 of")
    button = turn.locator("button[aria-expanded]")
    expect(button).to_have_attribute("aria-expanded", "false")
    expect(button).to_have_text(f"Show the whole message, {len(pasted):,} characters")
    button.click()
    expect(button).to_have_attribute("aria-expanded", "true")
    expect(question).to_contain_text("Line 30 of")
    button.click()
    expect(question).not_to_contain_text("Line 30 of")
    assert visitor.sent[0]["messages"][0]["content"] == pasted, "the model reads all of it"


def test_the_time_passes_while_a_prompt_is_read(visit):
    visitor = visit()
    visitor.page.route("**/chat/completions", lambda route: None)
    turn = visitor.ask("How many?")
    expect(turn.locator(".wait")).to_have_text("Reading the prompt… 2 s")
    visitor.click("Stop")
    expect(turn.locator(".wait")).to_have_count(0)


def test_an_answer_that_cannot_be_regenerated_stays(visit):
    visitor = visit(refused=True)
    visitor.play(("Two wheels.", {}))
    visitor.answered("How many?")
    visitor.page.route("**/chat/completions", lambda route: route.abort())
    visitor.click("Regenerate")
    expect(visitor.page.locator("#trouble")).to_be_visible()
    expect(visitor.page.locator(".turn .prose")).to_have_text(["Two wheels."])


def test_a_regenerated_answer_takes_the_place_of_the_last(visit):
    visitor = visit().options()
    visitor.answered()
    turn = visitor.answered("And the orchard?")
    again = visitor.page.get_by_role("button", name="Regenerate")
    expect(again).to_have_count(1)
    again.click()
    expect(turn.locator(".spoken")).to_have_attribute("aria-busy", "false")
    expect(visitor.page.get_by_role("button", name="Stop")).to_be_hidden()
    expect(visitor.page.locator(".turn")).to_have_count(2)
    assert visitor.sent[2]["messages"] == visitor.sent[1]["messages"]
    assert [body["temperature"] > 0 for body in visitor.sent] == [False, False, True]


def test_the_model_alone_retrieves_nothing_also_after_a_reload(visit):
    visitor = visit().options()
    visitor.page.get_by_label("Answer from").select_option(label="The model alone")
    expect(visitor.page.get_by_label("Passages to find")).to_be_disabled()
    turn = visitor.answered()
    assert "retrieve" not in visitor.sent[0]["kvblend"]
    expect(turn.locator(".sources")).to_have_count(0)
    visitor.page.reload()
    expect(visitor.page.locator("#corpus option:checked")).to_have_text("The model alone")
    expect(visitor.page.get_by_label("Passages to find")).to_be_disabled()


def test_what_is_refused_is_one_line_and_loses_nothing(visit):
    visitor = visit(refused=True).options()
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
    visitor.answered()
    expect(alert).to_be_hidden()
    assert len(visitor.sent[-1]["messages"]) == 1, "what was refused is no part of the conversation"


def test_text_is_text(visit):
    visitor = visit().options(trace=True)
    turn = visitor.answered(HOSTILE)
    expect(turn.locator(".question")).to_contain_text(HOSTILE)
    turn.locator(".tokens summary").click()
    expect(turn.locator(".part").last).to_contain_text("onerror=alert(1)")
    assert visitor.page.locator("img, main script").count() == 0


def test_a_reload_keeps_conversation_and_options(visit):
    visitor = visit().options(passages=2, tokens=12, trace=True)
    page = visitor.page
    turn = visitor.answered()
    parts = turn.locator(".question, .prose, .facts, .times summary")
    before = parts.all_inner_texts()
    page.reload()
    expect(page.locator(".turn")).to_have_count(1)
    assert parts.all_inner_texts() == before
    expect(turn.locator(".sources li")).to_have_count(2)
    expect(page.get_by_label("Passages to find")).to_have_value("2")
    expect(page.get_by_label("Longest answer, tokens")).to_have_value("12")
    expect(page.get_by_label("Show the prompt’s tokens")).to_be_checked()
    visitor.answered("And the orchard?")
    first, second = (body["messages"] for body in visitor.sent)
    assert second[:1] == first
    assert [message["role"] for message in second] == ["user", "assistant", "user"]


def test_a_reload_amid_an_answer_keeps_what_had_come(visit):
    visitor = visit().options(tokens=2000)
    turn = visitor.ask()
    expect(turn.locator(".prose")).not_to_be_empty()
    visitor.page.reload()
    expect(turn.locator(".question")).to_contain_text("How many gates has the harbour?")
    expect(turn.locator(".prose")).not_to_be_empty()
    expect(turn.locator(".answer > .remark")).to_have_text("Stopped.")


def test_what_another_version_of_the_page_kept_is_let_go(visit):
    visitor = visit()
    visitor.page.add_init_script("sessionStorage.setItem('kvblend.conversation', '[{\"question\": 7}]')")
    visitor.page.reload()
    expect(visitor.page.locator("#welcome")).to_be_visible()
    visitor.ready()


def test_a_new_conversation_leaves_nothing_behind(visit):
    visitor = visit().options(tokens=5)
    page = visitor.page
    visitor.answered()
    other = page.context.new_page()
    other.goto(visitor.url)
    expect(other.locator("#welcome")).to_be_visible()
    visitor.click("New conversation")
    assert "harbour" not in page.evaluate("Object.values(sessionStorage).join() + Object.values(localStorage).join()")
    page.reload()
    expect(page.locator("#welcome")).to_be_visible()
    expect(page.locator(".turn")).to_have_count(0)
