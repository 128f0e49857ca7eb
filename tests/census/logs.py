"""Logs with known answers. Each word of `words` is one token of the estimate."""

import json
import random
from pathlib import Path
from typing import Any

from blend.census.census import Census
from blend.census.reading import LogReader
from blend.census.tokens import estimated

Message = dict[str, Any]


def words(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(count))


def message(role: str, content: Any, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def chat(*messages: Message, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), **fields}


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def count(folder: Path, *records: Any, budget: int = 10**8, cache_tokens: int = 10**6) -> Census:
    census = Census(estimated, budget, cache_tokens)
    with write(folder / "log", *records).open("rb") as stream:
        for request in LogReader().read("log", stream):
            census.add(request)
    return census


def tokens(census: Census, request: int) -> dict[str, int]:
    """Of a request, by class."""
    return dict(zip(("prefix", "shifted", "near", "new"), census.listed[request].tokens, strict=True))


def cause(census: Census) -> tuple[str, int]:
    """The only one, in words, and its tokens."""
    [only] = census.causes.largest
    return only.name.words, only.tokens
