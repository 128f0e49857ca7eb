"""Asking on the page: the answer as it comes, where it came from, where the time went."""

import re

from playwright.sync_api import expect
from visitor import SOURCE, Visit

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
    expect(turn.locator(".facts")).to_have_text(re.compile(r"\d+ prompt tokens, \d+ computed.* · 24 answer tokens"))
    times = turn.get_by_role("group", name="Where the time went")
    expect(times.locator("summary")).to_have_text(re.compile(r"^First token after [\d.]+ m?s"))
    expect(times.locator(".timed").first).to_be_hidden()
    times.locator("summary").click()
    expect(times.locator(".timed").first).to_contain_text("Blended")
    expect(times.locator(".timed").first).to_be_visible()
    assert times.locator(".legend li").count() >= 2
    sources = turn.locator(".sources li")
    expect(sources).to_have_count(3)
    for source in sources.all():
        expect(source.locator("summary")).to_have_text(
            re.compile(r"(hit|miss)\w+\.md · found in the corpus · \d+ tokens · score \d")
        )
        expect(source.locator(".passage")).to_be_hidden()
    sources.first.locator("summary").click()
    expect(sources.first.locator(".passage")).to_contain_text("visitors a day")


def test_earlier_turns_are_no_sources(visit: Visit) -> None:
    earlier = {**SOURCE, "kind": "learned", "title": "", "text": "assistant\nIt has two wheels."}
    visitor = visit()
    visitor.play(("Two.", {}), sources=(earlier, SOURCE, {**SOURCE, "kind": "pasted", "hit": False}))
    turn = visitor.answered("How many?")
    sources = turn.get_by_role("group", name="Sources")
    expect(sources.locator("h3")).to_have_text("Sources 1 hit of 2")
    expect(sources.locator(".number")).to_have_text(["2", "3"])
    expect(sources).not_to_contain_text("assistant")
    expect(turn.get_by_role("group", name="Text of the conversation").locator(".number")).to_have_text("1")


def test_the_markdown_of_an_answer_is_drawn(visit: Visit) -> None:
    visitor = visit()
    visitor.play((MARKDOWN, {}))
    prose = visitor.answered("How many?").locator(".prose")
    table = prose.get_by_role("table")
    expect(table.get_by_role("columnheader")).to_have_text(["Mill", "Wheels"])
    expect(table.get_by_role("cell")).to_have_text(["East", "2", HOSTILE, "3"])
    assert (
        table.get_by_role("cell", name="2", exact=True).evaluate("cell => getComputedStyle(cell).textAlign") == "right"
    )
    expect(prose.get_by_role("heading", name="Mills")).to_be_visible()
    expect(prose.locator("li li")).to_have_text(["two old"])
    expect(prose.locator("strong, em, code")).to_have_text(["four", "all", "turn(2)"])
    expect(prose).to_contain_text("[here](https://example.org) ![x](https://example.org/x.png)")
    assert prose.locator("a, img, script").count() == 0


def test_what_an_answer_took_from_a_passage_leads_there(visit: Visit) -> None:
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


def test_the_prompt_token_by_token(visit: Visit) -> None:
    visitor = visit().options().trace()
    turn = visitor.answered("How many gates has the harbour?")
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
    expect(turn.locator(".answer > .remark")).to_have_text("Stopped.")
    expect(visitor.page.get_by_label("Your question")).to_be_focused()
    said = turn.locator(".prose").inner_text()
    visitor.options(tokens=5).answered("And the orchard?")
    assert _words(visitor.sent[1]["messages"][1]["content"]) == _words(said)


def _words(text: str) -> list[str]:
    """Marks of lists, code and bold are shown as what they mean."""
    return re.findall(r"\w+", text)


def test_both_ways_side_by_side(visit: Visit) -> None:
    visitor = visit().options().compare()
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
    figures = {"ttft_s": 0.1, "full_estimated_s": 0.4, "stages": {}, "reason": "blended in an earlier turn"}
    said = page.evaluate(script, {**figures, "method": "blend"})
    assert "4.0 times as fast as full prefill" in said
    assert "Nothing more was blended: blended in an earlier turn." in said
    assert "nothing was blended: short" in page.evaluate(script, {**figures, "method": "full", "reason": "short"})


def test_an_estimated_speedup_says_so_and_the_expected_kl_is_shown_where_a_quality_was_asked_for(visit: Visit) -> None:
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


def test_a_comparison_shows_its_own_measurement_alone_also_after_a_reload(visit: Visit) -> None:
    """One of what was not blended claims no speed."""
    visitor = visit().compare()
    full = {"method": "full", "rows_computed": 400, "ttft_s": 0.25}
    short = {"method": "full", "reason": "short"}
    visitor.play(
        ("One.", {"full_estimated_s": 1.4}), ("One.", full), ("One.", short), ("One.", {**full, "ttft_s": 0.2})
    )
    turn = visitor.answered("How many?")
    expect(turn.locator(".verdict")).to_contain_text("2.5 times as fast")
    times = turn.locator(".times")
    expect(times.first.locator("summary")).to_contain_text("2.5 times as fast as full prefill, measured")
    times.first.locator("summary").click()
    expect(times.first.locator(".timed").last).to_have_text(re.compile(r"Full prefill, measured.*0\.25 s"))
    said = turn.text_content() or ""
    assert "estimated" not in said
    assert "1.40 s" not in said
    verdict = turn.locator(".verdict").inner_text()
    other = visitor.answered("How many?")
    expect(other.locator(".verdict")).to_contain_text("Nothing was blended")
    expect(other.locator(".verdict")).not_to_contain_text("times as")
    expect(other.locator(".times summary").first).to_contain_text("nothing was blended: short")
    visitor.page.reload()
    expect(visitor.page.get_by_label("Compare with full prefill")).to_be_checked()
    expect(turn.locator(".verdict")).to_have_text(verdict)
    expect(times.first.locator("summary")).to_contain_text("2.5 times as fast as full prefill, measured")


def test_a_comparison_has_its_sources_below_both_columns_and_cuts_no_code(visit: Visit) -> None:
    visitor = visit().compare()
    code = "Thus:\n\n```\nresult = " + " + ".join(f"a_long_name_{i}" for i in range(12)) + "\n```\n" + "\n\nMore." * 9
    visitor.play((code, {}), (code + "\n\nAnd more." * 30, {"method": "full"}))
    turn = visitor.answered("How many?")
    columns = [one.bounding_box() for one in turn.locator(".answer").all()]
    sources = turn.locator(".sources").bounding_box()
    assert sources
    assert columns[0]
    assert columns[1]
    assert columns[0]["x"] < columns[1]["x"], "they do not stand side by side"
    assert all(sources["y"] >= column["y"] + column["height"] for column in columns if column)
    assert sources["width"] > 1.5 * columns[0]["width"]
    wide = "pre => pre.scrollWidth - pre.clientWidth"
    assert [pre.evaluate(wide) for pre in turn.locator("pre").all()] == [0, 0]


def test_the_time_passes_while_a_prompt_is_read(visit: Visit) -> None:
    visitor = visit()
    visitor.page.route("**/chat/completions", lambda route: None)
    turn = visitor.ask("How many?")
    expect(turn.locator(".wait")).to_have_text("Reading the prompt… 2 s")
    visitor.page.get_by_role("button", name="Stop").click()
    expect(turn.locator(".wait")).to_have_count(0)


def test_an_answer_is_copied_as_the_model_wrote_it(visit: Visit) -> None:
    visitor = visit(permissions=["clipboard-read", "clipboard-write"])
    text = "Use **two** of them:\n\n```python\nmill.turn(2)\n```"
    visitor.play((text, {}))
    turn = visitor.answered("How many?")
    turn.get_by_role("button", name="Copy").click()
    expect(turn.get_by_role("button", name="Copied")).to_be_visible()
    assert visitor.page.evaluate("navigator.clipboard.readText()") == text


def test_an_answer_is_copied_without_a_clipboard(visit: Visit) -> None:
    """As over HTTP from another machine: what was copied is pasted into the question."""
    visitor = visit()
    visitor.page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    visitor.play(("Use two of them.", {}))
    visitor.answered("How many?").get_by_role("button", name="Copy").click()
    visitor.page.get_by_label("Your question").press("Control+v")
    expect(visitor.page.get_by_label("Your question")).to_have_value("Use two of them.")


def test_a_regenerated_answer_takes_the_place_of_the_last(visit: Visit) -> None:
    visitor = visit().options()
    visitor.answered("How many gates has the harbour?")
    turn = visitor.answered("And the orchard?")
    again = visitor.page.get_by_role("button", name="Regenerate")
    expect(again).to_have_count(1)
    again.click()
    expect(turn.locator(".spoken")).to_have_attribute("aria-busy", "false")
    expect(visitor.page.get_by_role("button", name="Stop")).to_be_hidden()
    expect(visitor.page.locator(".turn")).to_have_count(2)
    assert visitor.sent[2]["messages"] == visitor.sent[1]["messages"]
    assert [body["temperature"] > 0 for body in visitor.sent] == [False, False, True]


def test_an_answer_that_cannot_be_regenerated_stays(visit: Visit) -> None:
    visitor = visit()
    visitor.refused = True
    visitor.play(("Two wheels.", {}))
    visitor.answered("How many?")
    visitor.page.route("**/chat/completions", lambda route: route.abort())
    visitor.page.get_by_role("button", name="Regenerate").click()
    expect(visitor.page.locator("#trouble")).to_be_visible()
    expect(visitor.page.locator(".turn .prose")).to_have_text(["Two wheels."])


def test_a_long_question_is_folded(visit: Visit) -> None:
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
    expect(question).to_contain_text("Line 30 of")
    button.click()
    expect(question).not_to_contain_text("Line 30 of")
    assert visitor.sent[0]["messages"][0]["content"] == pasted


def test_terms_are_explained_to_pointer_and_keyboard(visit: Visit) -> None:
    visitor = visit()
    visitor.play(("Two.", {"rows_reused": 30, "stages": {"select": 0.05}}))
    turn = visitor.answered("How many?")
    turn.locator(".times summary").click()
    for term, meaning in (("hit", "KV cache"), ("of an earlier prompt", "memory"), ("rows", "one token")):
        explained = turn.locator("[tabindex='0'][title]").filter(has_text=term).first
        expect(explained).to_have_accessible_description(re.compile(meaning))
        explained.focus()
        shown = explained.evaluate("term => getComputedStyle(term, '::after').content")
        assert meaning in shown, f"no one who uses the keyboard sees what {term!r} means"
    expect(turn.locator(".badge")).to_have_attribute("title", re.compile("KV cache"))


def test_the_model_alone_retrieves_nothing_also_after_a_reload(visit: Visit) -> None:
    visitor = visit().options()
    visitor.page.get_by_label("Answer from").select_option(label="The model alone")
    expect(visitor.page.get_by_label("Passages to find")).to_be_disabled()
    turn = visitor.answered("How many gates has the harbour?")
    assert "retrieve" not in visitor.sent[0]["kvblend"]
    expect(turn.locator(".sources")).to_have_count(0)
    visitor.page.reload()
    expect(visitor.page.locator("#corpus option:checked")).to_have_text("The model alone")
    expect(visitor.page.get_by_label("Passages to find")).to_be_disabled()


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


def test_text_is_text(visit: Visit) -> None:
    visitor = visit().options().trace()
    turn = visitor.answered(HOSTILE)
    expect(turn.locator(".question")).to_contain_text(HOSTILE)
    turn.locator(".tokens summary").click()
    expect(turn.locator(".part").last).to_contain_text("onerror=alert(1)")
    assert visitor.page.locator("img, main script").count() == 0
