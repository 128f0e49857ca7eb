"""A service that answers through the real engine and a tiny model; it splits prompts in the simplest way."""

from __future__ import annotations

from collections.abc import Callable

from blend.blender import Blender
from blend.config import BlendConfig
from blend.errors import PromptError
from blend.model.decoder import Decoder
from blend.serve.ask import Ask, Closed, Delta, Figures, Opened, Refused, Reply, Source, TokenText
from blend.serve.embedded import EmbeddedEngine
from blend.serve.engine import Ended, Event, Failed, Handle, Started, Token, Work
from blend.store import open_store
from blend.types import PromptLayout


class SimpleService:
    alive = True

    def __init__(self, decoder: Decoder, **options: int) -> None:
        self.model, self.ready = decoder.name, True
        self._tokenizer = decoder.tokenizer
        self.engine = EmbeddedEngine(Blender(decoder, open_store("memory:"), BlendConfig()), **options)

    def corpora(self, tenant: str) -> tuple[str, ...]:
        return ()

    def close(self, finish_s: float = 0.0) -> None:
        self.engine.close(finish_s)

    def submit(self, ask: Ask, on_reply: Callable[[Reply], None]) -> Handle:
        words = ask.prompt if ask.prompt is not None else "\n".join(one.content for one in ask.messages)
        if not words.strip():
            raise PromptError("the question is empty")
        chunks = tuple(tuple(self._ids(one.text)) for one in ask.documents)
        layout = PromptLayout(tuple(self._ids("Answer:")), chunks, tuple(self._ids(words)))
        sources = tuple(Source("document", "", one.title, one.text, None, False, 1) for one in ask.documents)
        told = _Told(ask, sources, self._tokenizer, on_reply)
        work = Work(layout, ask.sampling, priority=ask.priority, deadline_s=ask.deadline_s)
        return self.engine.submit(work, told)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


class _Told:
    def __init__(
        self, ask: Ask, sources: tuple[Source, ...], tokenizer: object, on_reply: Callable[[Reply], None]
    ) -> None:
        self.ask, self.sources, self.tokenizer, self.on_reply = ask, sources, tokenizer, on_reply
        self.count = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Started):
            hits, chunks = sum(event.hits), len(event.hits)
            told = (event.rows, event.rows_computed, 0, hits, chunks, event.stages, event.waited_s, event.ttft_s)
            figures = Figures("blend", "", *told, None, event.notes)
            self.on_reply(Opened(event.rows, event.rows - event.rows_computed, self.sources, figures))
        elif isinstance(event, Token):
            self.count += 1
            text = self._text(event.id)
            top = tuple((self._text(one), self._text(one).encode(), logprob) for one, logprob in event.top)
            tokens = () if event.logprob is None else (TokenText(text, text.encode(), event.logprob, top),)
            self.on_reply(Delta(text, tokens))
        elif isinstance(event, Ended):
            self.on_reply(Closed(event.reason, self.count, None))
        elif isinstance(event, Failed):
            self.on_reply(Refused(event.error))

    def _text(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))  # type: ignore[attr-defined]
