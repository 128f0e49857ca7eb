"""Documents on the page: dropped, watched, asked about, deleted; and the key of a server that wants one."""

import json
from pathlib import Path

import pytest
from playwright.sync_api import expect
from visitor import KEY, Visit

HOSTILE = '<img src=x onerror="alert(1)">'


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    path = tmp_path / "foundry <b>bold.md"
    lines = (f"The foundry casts {part} bells a day and {HOSTILE} is painted on each." for part in range(6))
    path.write_text("# The foundry <script>alert(2)</script>\n\n" + "\n\n".join(lines), encoding="utf-8")
    return path


def test_a_dropped_file_is_prepared_asked_about_and_deleted(visit: Visit, hostile: Path) -> None:
    visitor = visit().options(passages=2)
    page = visitor.page
    entries = page.get_by_role("list", name="Documents").get_by_role("listitem")
    expect(entries).to_have_count(4)
    visitor.drop(hostile)
    entry = entries.filter(has_text="foundry")
    expect(entry).to_contain_text("passage", timeout=60_000)
    expect(page.locator("#document-count")).to_have_text("5")
    turn = visitor.answered("How many bells does the foundry cast?")
    source = turn.locator(".sources li").filter(has_text="foundry").first
    source.locator("summary").click()
    expect(source.locator(".passage")).to_contain_text(HOSTILE)
    assert page.locator("img, main script, b:has-text('bold')").count() == 0
    button = entry.get_by_role("button")
    button.click()
    expect(button).to_have_text("Really?")
    expect(entries).to_have_count(5)
    button.click()
    expect(entries).to_have_count(4)
    turn = visitor.answered("How many bells does the foundry cast?")
    expect(turn.locator(".sources li")).to_have_count(2)
    expect(turn.locator(".sources li").filter(has_text="foundry")).to_have_count(0)


def test_a_file_of_records_is_one_document(visit: Visit, tmp_path: Path) -> None:
    visitor = visit()
    page = visitor.page
    path = tmp_path / "mills.jsonl"
    records = [{"id": str(i), "title": f"Mill {i}", "text": f"Mill {i} has {i + 2} wheels."} for i in range(3)]
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    visitor.drop(path)
    entries = page.get_by_role("list", name="Documents").get_by_role("listitem")
    expect(entries.filter(has_text="mills.jsonl")).to_contain_text("3 records · 3 passages", timeout=60_000)
    expect(entries).to_have_count(5)
    expect(entries.filter(has_text="harbour.md")).to_contain_text("The harbour")
    button = entries.filter(has_text="mills.jsonl").get_by_role("button")
    button.click()
    button.click()
    expect(entries).to_have_count(4)


def test_a_file_that_cannot_be_read_is_told(visit: Visit, tmp_path: Path) -> None:
    visitor = visit()
    visitor.refused = True
    path = tmp_path / "broken.pdf"
    path.write_text("no PDF at all")
    visitor.drop(path)
    told = visitor.page.locator("#document-trouble, #documents .bad").filter(has_text="broken.pdf")
    expect(told.first).to_be_visible(timeout=60_000)
    assert "\n" not in told.first.inner_text()


def test_a_key_is_asked_for_and_kept_for_this_tab_only(visit: Visit, locked_url: str) -> None:
    visitor = visit(locked_url)
    visitor.refused = True
    page = visitor.page
    dialog = page.get_by_role("dialog", name="This server wants an API key")
    field = dialog.get_by_label("API key")
    expect(field).to_be_focused()
    field.fill("wrong")
    field.press("Enter")
    expect(dialog.get_by_role("alert")).to_contain_text("does not know the key")
    field.fill(KEY)
    field.press("Enter")
    expect(dialog).to_be_hidden()
    visitor.options().answered("How many gates has the harbour?")
    stored = page.evaluate("[Object.values(sessionStorage), Object.values(localStorage), document.cookie]")
    assert [value for value in stored[0] if KEY in value] == [KEY]
    assert stored[1:] == [[], ""]
    page.reload()
    expect(page.locator("#corpus option")).not_to_have_count(0)
    expect(dialog).to_be_hidden()
    page.get_by_role("button", name="Forget the API key").click()
    expect(dialog).to_be_visible()
    left = page.evaluate("Object.values(sessionStorage).join()")
    assert KEY not in left
    assert "harbour" not in left, "the conversation goes with the key"
