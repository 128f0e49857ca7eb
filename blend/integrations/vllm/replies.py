"""vLLM's reply with what kvblend has to say of it: the field `kvblend`, as `blend serve` has it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from starlette.types import Message

from blend.integrations.vllm.signature import PARAMETER

_EVENT = b"data: "


class Telling:
    """Puts `told` into one reply: into the whole of it, or into the first event of a stream."""

    def __init__(self, told: dict[str, Any]) -> None:
        self._told = told
        self._start: Message | None = None
        self._body = bytearray()
        self._done = False

    def passed(self, message: Message) -> Iterator[Message]:
        """What is to be sent for a message of vLLM's."""
        if self._done:
            yield message
        elif message["type"] == "http.response.start":
            yield from self._begun(message)
        elif message["type"] == "http.response.body":
            yield from self._more(message)
        else:
            yield message

    def _begun(self, message: Message) -> Iterator[Message]:
        kind = dict(message.get("headers", ())).get(b"content-type", b"")
        if message["status"] != 200 or not kind.startswith((b"application/json", b"text/event-stream")):
            self._done = True
            yield message
        elif kind.startswith(b"text/event-stream"):
            yield message
        else:
            self._start = message

    def _more(self, message: Message) -> Iterator[Message]:
        if self._start is None:
            self._done = True
            yield {**message, "body": self._first_event(message.get("body", b""))}
            return
        self._body += message.get("body", b"")
        if message.get("more_body", False):
            return
        self._done = True
        body = self._added(bytes(self._body))
        headers = [pair for pair in self._start["headers"] if pair[0].lower() != b"content-length"]
        yield {**self._start, "headers": [*headers, (b"content-length", str(len(body)).encode())]}
        yield {**message, "body": body}

    def _first_event(self, body: bytes) -> bytes:
        line, mark, rest = body.partition(b"\n\n")
        if not (mark and line.startswith(_EVENT)):
            return body
        return _EVENT + self._added(line.removeprefix(_EVENT)) + mark + rest

    def _added(self, document: bytes) -> bytes:
        try:
            found = json.loads(document)
        except ValueError:
            return document
        return json.dumps({**found, **self._with_figures(found)}).encode() if isinstance(found, dict) else document

    def _with_figures(self, found: dict[str, Any]) -> dict[str, Any]:
        """What is told, with what the connector says of this prompt; a stream begins before that is known."""
        given = found.get("kv_transfer_params")
        if not (isinstance(given, dict) and PARAMETER in given):
            return {"kvblend": self._told}
        figures = {**self._told.get("figures", {}), **given[PARAMETER]}
        return {"kv_transfer_params": None, "kvblend": {**self._told, "figures": figures}}
