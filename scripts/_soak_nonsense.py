"""What no server should have to hear: each of these is to be refused with a clear error, and to harm nobody else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

CHAT = "/v1/chat/completions"
MEGABYTE = 1 << 20


class Nonsense(NamedTuple):
    """A request that deserves a status from 400 to 499."""

    name: str
    content: bytes
    method: str = "POST"
    path: str = CHAT


def nonsense(model: str) -> tuple[Nonsense, ...]:
    """Bodies that are no JSON, JSON that is no request, and requests that ask for what is not."""
    good = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    bodies: Mapping[str, Any] = {
        "a list": [good],
        "a number": 7,
        "no messages": {"model": model},
        "messages of another type": {**good, "messages": "Hello"},
        "an empty conversation": {**good, "messages": []},
        "an unknown role": {**good, "messages": [{"role": "judge", "content": "Hello"}]},
        "content of another type": {**good, "messages": [{"role": "user", "content": 7}]},
        "an unknown field": {**good, "temprature": 0},
        "an unknown field of ours": {**good, "kvblend": {"retreive": {}}},
        "tokens in words": {**good, "max_tokens": "many"},
        "tokens below nothing": {**good, "max_tokens": -1},
        "a temperature beyond all": {**good, "temperature": 9},
        "two answers": {**good, "n": 2},
        "stream in words": {**good, "stream": "yes"},
        "an unknown model": {**good, "model": "nobody/nothing"},
        "documents of another type": {**good, "documents": {"text": "x"}},
        "a document without text": {**good, "documents": [{"title": "x"}]},
        "a document that is not there": {**good, "documents": [{"id": "no-such-document"}]},
        "a corpus that is not there": {**good, "kvblend": {"retrieve": {"corpus": "no-such-corpus"}}},
    }
    found = [Nonsense(name, json.dumps(body).encode()) for name, body in bodies.items()]
    text = json.dumps(good).encode()
    found += [
        Nonsense("nothing", b""),
        Nonsense("half of it", text[: len(text) // 2]),
        Nonsense("no UTF-8", text.replace(b"Hello", b"\xff\xfe\xfa")),
        Nonsense("half a surrogate pair", text.replace(b"Hello", b"\\ud800")),
        Nonsense("not a number", text.replace(b'"max_tokens": 1', b'"temperature": NaN')),
        Nonsense("very deep", b"[" * 100_000),
        Nonsense("another method", b"", "DELETE"),
        Nonsense("another path", text, "POST", "/v1/nothing"),
        Nonsense("a document that is not there, deleted", b"", "DELETE", "/v1/documents/no-such-document"),
        Nonsense("documents in words", b'{"documents": "x"}', "POST", "/v1/documents"),
    ]
    return tuple(found)


def huge(model: str, megabytes: int) -> tuple[Nonsense, ...]:
    """So many megabytes of one message, and of nothing that is JSON."""
    words = "a question that does not end "
    text = words * (megabytes * MEGABYTE // len(words) + 1)
    chat = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    return (
        Nonsense(f"{megabytes} MB of a message", json.dumps(chat).encode()),
        Nonsense(f"{megabytes} MB of nothing", b"\x00" * (megabytes * MEGABYTE)),
    )
