"""Somebody at the page: what they do, and what must not happen to them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import BrowserContext, ConsoleMessage, Locator, Request, expect

KEY = "a-key-for-tests"
QUESTION = "How many gates has the harbour?"
SOURCE = {"kind": "retrieved", "title": "The mill", "text": "It has two wheels.", "hit": True, "tokens": 6}


class Visitor:
    """A page that is open at `url`. `leave` tells what went wrong while nobody looked.

    refused: whether the server refuses something in this test, which the browser writes to its console.
    """

    def __init__(self, context: BrowserContext, url: str, refused: bool) -> None:
        self.url, self.page, self.refused = url, context.new_page(), refused
        self.sent: list[dict[str, Any]] = []
        self.wrong: list[str] = []
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.wrong.append(f"script: {error}"))
        self.page.on("dialog", lambda dialog: (self.wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("request", self._request)
        self.page.goto(url)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not (self.refused and "Failed to load" in message.text):
            self.wrong.append(f"{message.type}: {message.text}")

    def _request(self, request: Request) -> None:
        if urlsplit(request.url).netloc != urlsplit(self.url).netloc:
            self.wrong.append(f"asked another host: {request.url}")
        if request.url.endswith("/chat/completions"):
            self.sent.append(json.loads(request.post_data or "null"))

    def leave(self) -> None:
        self.page.context.close()
        assert not self.wrong, self.wrong

    def options(self, *, passages: int = 3, tokens: int = 24, compare: bool = False, trace: bool = False) -> Visitor:
        self.page.get_by_label("Passages to find").fill(str(passages))
        self.page.get_by_label("Longest answer, tokens").fill(str(tokens))
        self.page.get_by_label("Compare with full prefill").set_checked(compare)
        self.page.get_by_label("Show the prompt’s tokens").set_checked(trace)
        return self

    def ready(self) -> None:
        """Wait until the page knows the server's corpora."""
        expect(self.page.locator("#corpus option")).not_to_have_count(0)

    def click(self, button: str) -> None:
        self.page.get_by_role("button", name=button).click()

    def send(self, question: str) -> None:
        self.ready()
        box = self.page.get_by_label("Your question")
        box.fill(question)
        box.press("Enter")

    def ask(self, question: str = QUESTION) -> Locator:
        """Send it; the turn that it begins."""
        turns = self.page.locator(".turn")
        count = turns.count()
        self.send(question)
        expect(turns).to_have_count(count + 1)
        return turns.nth(count)

    def answered(self, question: str = QUESTION) -> Locator:
        """Send it and wait for the whole answer."""
        turn = self.ask(question)
        expect(self.page.get_by_role("button", name="Stop")).to_be_hidden()
        return turn

    def documents(self) -> Locator:
        return self.page.get_by_role("list", name="Documents").get_by_role("listitem")

    def play(self, *answers: tuple[str, dict[str, Any]], sources: Sequence[dict[str, Any]] = (SOURCE,)) -> None:
        """Answer the next questions with these texts, figures and sources, in the server's place."""
        streams = (_stream(*answer, sources) for answer in answers)
        self.page.route("**/chat/completions", lambda route: route.fulfill(body=next(streams), headers=_EVENTS))

    def drop(self, *files: Path) -> None:
        contents = [[path.name, path.read_text(encoding="utf-8")] for path in files]
        transfer = self.page.evaluate_handle(
            "(files) => { const held = new DataTransfer();"
            " for (const [name, text] of files) held.items.add(new File([text], name)); return held; }",
            contents,
        )
        for kind in ("dragover", "drop"):
            self.page.dispatch_event("body", kind, {"dataTransfer": transfer})


_EVENTS = {"Content-Type": "text/event-stream"}
_FIGURES = {"method": "blend", "reason": "", "rows": 400, "rows_computed": 90, "rows_reused": 0, "ttft_s": 0.1}


def _stream(text: str, figures: dict[str, Any], sources: Sequence[dict[str, Any]]) -> str:
    opened = {"choices": [], "kvblend": {"sources": sources, "figures": {**_FIGURES, **figures}}}
    said = {"choices": [{"delta": {"content": text}, "finish_reason": "stop"}]}
    return "".join(f"data: {data}\n\n" for data in (json.dumps(opened), json.dumps(said), "[DONE]"))
