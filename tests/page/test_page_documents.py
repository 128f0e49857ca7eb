"""Documents on the page: dropped, watched, asked about, deleted; and the key of a server that wants one."""

import json

from playwright.sync_api import expect
from visitor import KEY

HOSTILE = '<img src=x onerror="alert(1)">'


def test_a_dropped_file_is_prepared_asked_about_and_deleted(visit, tmp_path):
    path = tmp_path / "foundry <b>bold.md"
    lines = (f"The foundry casts {part} bells a day and {HOSTILE} is painted on each." for part in range(6))
    path.write_text("# The foundry <script>alert(2)</script>\n\n" + "\n\n".join(lines), encoding="utf-8")
    visitor = visit().options(passages=2)
    entries = visitor.documents()
    expect(entries).to_have_count(4)
    visitor.drop(path)
    entry = entries.filter(has_text="foundry")
    expect(entry).to_contain_text("passage", timeout=60_000)
    expect(visitor.page.locator("#document-count")).to_have_text("5")
    turn = visitor.answered("How many bells does the foundry cast?")
    source = turn.locator(".sources li").filter(has_text="foundry").first
    source.locator("summary").click()
    expect(source.locator(".passage")).to_contain_text(HOSTILE)
    assert visitor.page.locator("img, main script, b:has-text('bold')").count() == 0
    button = entry.get_by_role("button")
    button.click()
    expect(button).to_have_text("Really?")
    expect(entries).to_have_count(5)
    button.click()
    expect(entries).to_have_count(4)
    turn = visitor.answered("How many bells does the foundry cast?")
    expect(turn.locator(".sources li")).to_have_count(2)
    expect(turn.locator(".sources li").filter(has_text="foundry")).to_have_count(0)


def test_a_file_of_records_is_one_document(visit, tmp_path):
    visitor = visit()
    path = tmp_path / "mills.jsonl"
    records = [{"id": str(i), "title": f"Mill {i}", "text": f"Mill {i} has {i + 2} wheels."} for i in range(3)]
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    visitor.drop(path)
    entry = visitor.documents().filter(has_text="mills.jsonl")
    expect(entry).to_contain_text("3 records · 3 passages", timeout=60_000)
    expect(visitor.documents()).to_have_count(5)
    expect(visitor.documents().filter(has_text="harbour.md")).to_contain_text("The harbour")
    button = entry.get_by_role("button")
    button.click()
    button.click()
    expect(entry).to_have_count(0)


def test_a_file_that_cannot_be_read_is_told(visit, tmp_path):
    visitor = visit(refused=True)
    path = tmp_path / "broken.pdf"
    path.write_text("no PDF at all")
    visitor.drop(path)
    told = visitor.page.locator("#document-trouble, #documents .bad").filter(has_text="broken.pdf")
    expect(told.first).to_be_visible(timeout=60_000)
    assert "\n" not in told.first.inner_text()


def test_an_upload_under_way_is_shown(visit, tmp_path):
    """The upload is held back, then answered."""
    visitor = visit()
    uploads = []
    visitor.page.route(
        "**/v1/documents*", lambda route: uploads.append(route) if route.request.method == "POST" else route.continue_()
    )
    path = tmp_path / "foundry <b>bold.md"
    path.write_text("# The foundry")
    visitor.drop(path)
    note = visitor.page.get_by_role("status").filter(has_text="Uploading foundry <b>bold.md")
    expect(note).to_be_visible()
    uploads[0].fulfill(status=202, json={"object": "list", "data": []})
    expect(note).to_be_hidden()


def test_a_poll_that_failed_is_not_the_last(visit):
    """The listing is played to the page: under way, then a server that does not answer, then ready."""
    visitor = visit(refused=True)
    page, entries = visitor.page, visitor.documents()
    expect(entries.filter(has_text="harbour")).to_be_visible()
    mill = {"id": "mill.md", "file": "mill.md", "title": "The mill", "chunks": 0, "reason": None}
    mill["progress"] = {"done": 100, "total": 200}
    listings = iter([{**mill, "status": "computing"}, None, {**mill, "status": "ready", "chunks": 7}])

    def play(route):
        document = next(listings)
        route.abort() if document is None else route.fulfill(json={"object": "list", "data": [document]})

    page.route("**/v1/documents*", play)
    page.evaluate("document.getElementById('corpus').dispatchEvent(new Event('change'))")
    expect(entries.get_by_role("progressbar")).to_be_visible()
    expect(entries).to_contain_text("being computed: 50 %")
    trouble = page.locator("#document-trouble")
    expect(trouble).to_contain_text("cannot be reached")
    expect(entries).to_contain_text("7 passages")
    expect(trouble).to_be_hidden()


def test_a_key_is_asked_for_and_kept_for_this_tab_only(visit, locked_url):
    visitor = visit(locked_url, refused=True)
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
    visitor.options().answered()
    stored = page.evaluate("[Object.values(sessionStorage), Object.values(localStorage), document.cookie]")
    assert [value for value in stored[0] if KEY in value] == [KEY]
    assert stored[1:] == [[], ""]
    page.reload()
    visitor.ready()
    expect(dialog).to_be_hidden()
    visitor.click("Forget the API key")
    expect(dialog).to_be_visible()
    left = page.evaluate("Object.values(sessionStorage).join()")
    assert KEY not in left
    assert "harbour" not in left, "the conversation goes with the key"
