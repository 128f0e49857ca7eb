"""Two servers over one model, one that blends and one that does not, and the project's own text to ask them with."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from _paths import ROOT

if TYPE_CHECKING:
    from blend.rag import Rag
    from blend.serve.events import Started
    from blend.serve.prompt import Prompt
    from blend.serve.request import Message, Tools
    from blend.serve.service import Service


def prose() -> list[str]:
    """Paragraphs of the documentation."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    parts = [part.strip() for page in pages for part in re.split(r"\n\n+", page.read_text())]
    return [part for part in parts if len(part) > 80 and "|" not in part]


def passages(count: int, characters: int) -> list[str]:
    """Different passages of about so many characters."""
    paragraphs = iter(prose())
    texts = list[str]()
    while len(texts) < count:
        parts = [next(paragraphs)]
        while sum(map(len, parts)) < characters:
            parts.append(next(paragraphs))
        texts.append("\n\n".join(parts)[:characters].rsplit(" ", 1)[0])
    return texts


class Reply(NamedTuple):
    """What a server makes of a request."""

    prompt: Prompt
    started: Started


class Arms:
    """A server that blends and learns, and one that computes everything, over one model; used as a context."""

    def __init__(self, model: str, folder: Path, twice: Sequence[str] = ()) -> None:
        """twice: texts for which, twice, the learned text has room; without any it has 4 GiB."""
        from blend.model.decoder import Decoder
        from blend.rag import Rag
        from blend.serve.engine.scheduler import EmbeddedEngine
        from blend.serve.service import Service
        from blend.weights import resolve_model

        decoder = Decoder.load(str(resolve_model(model)), name=model, dtype="auto")
        kinds = 2  # of caches: isolated and contextual
        row_bytes = kinds * 2 * sum(layer.width for layer in decoder.rotations)  # in the codec bfloat16
        rows = sum(len(decoder.tokenizer.encode(text, add_special_tokens=False)) for text in twice)
        learn_budget = 2 * rows * row_bytes or 4 << 30
        self._services: dict[bool, Service] = {}
        for full in (False, True):
            rag = Rag(folder / str(full), decoder=decoder)
            engine = EmbeddedEngine(rag.blender, blender_of=lambda _, __, own=rag: own.blender)  # type: ignore[misc]
            self._services[full] = Service(rag, engine, learn_budget=learn_budget, full=full, unnamed="author")
            self._services[full].warm_up()

    def __enter__(self) -> Arms:
        return self

    def __exit__(self, *_: object) -> None:
        for service in self._services.values():
            service.close()

    @property
    def rag(self) -> Rag:
        """Of the server that blends."""
        return self._services[False].tenant("").rag()

    def ask(self, messages: Sequence[Message], *, full: bool, tools: Tools | None = None) -> Reply:
        """Have one of the servers answer with two tokens. Returns when what the prompt brought is learned."""
        from blend.sampling import Sampling
        from blend.serve.events import Failed, Finished, Started
        from blend.serve.request import Request

        service = self._services[full]
        done = threading.Event()
        events = list[Any]()

        def on_event(event: Any) -> None:
            events.append(event)
            if isinstance(event, Finished | Failed):
                done.set()

        prompt = service.prepare(Request(tuple(messages), tools=tools, sampling=Sampling(max_tokens=2)))
        service.take(prompt, on_event)
        done.wait()
        while not service.engine.stats().idle:  # what is learned is stored
            time.sleep(0.005)
        while not full and not service.corrector.done:
            time.sleep(0.1)
        started = events[0]
        if not isinstance(started, Started):
            raise SystemExit(f"a request failed: {started}")
        return Reply(prompt, started)


def reused(prompt: Prompt, started: Started) -> int:
    """Tokens that came out of caches, behind the beginning that all prompts share."""
    from blend.types import PlaceOrigin

    layout = prompt.layout
    rows = set(range(started.figures.rows_reused))
    places = zip(layout.places, layout.chunk_spans, strict=True)
    spans = [span for place, span in places if place.origin is not PlaceOrigin.TEXT]
    for span, hit in zip(spans, started.hits, strict=True):
        rows.update(range(span.start, span.stop) if hit else ())
    return len(rows - set(range(layout.shared_prefix_rows)))
