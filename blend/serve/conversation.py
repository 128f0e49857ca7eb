"""One question on its way: the engine's events become replies in words, text as soon as it is sure."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from blend.answering import NONE_RETRIEVED
from blend.serve.engine import ASKED_FOR, Ended, EndReason, Event, Failed, Handle, Sampling, Started, Token
from blend.serve.failures import LOG, STORE_UNREACHABLE, StoreWatch
from blend.serve.request import (
    AnswerRequest,
    Closed,
    Delta,
    Figures,
    Opened,
    Refused,
    Reply,
    Source,
    TokenPart,
    TokenText,
    TracedToken,
)
from blend.serve.text import Speaker

if TYPE_CHECKING:
    from blend.rag import Rag
    from blend.serve.profile import Profile
    from blend.serve.tenant import Cited
    from blend.types import PromptLayout

OnReply = Callable[[Reply], None]


class Conversation:
    """One question on its way; a `Handle`."""

    def __init__(
        self,
        rag: Rag,
        request: AnswerRequest,
        sampling: Sampling,
        layout: PromptLayout,
        cited: Sequence[Cited],
        on_reply: OnReply,
        profile: Profile,
        before_s: float,
        watch: StoreWatch,
    ) -> None:
        self._handle: Handle | None = None
        self._cancelled = False
        self.before_s = before_s
        self._decoder, self._request, self._sampling, self._layout = rag.decoder, request, sampling, layout
        self._cited, self._on_reply, self._profile, self._watch = cited, on_reply, profile, watch
        self._speaker = Speaker(rag.decoder.tokenizer, request.stop)
        self._tokens, self._first, self._last = 0, 0.0, 0.0
        self._named: list[TokenText] = []
        self._gaps: list[float] = []
        self._closed = False

    def cancel(self) -> None:
        """Give it up, now or as soon as the engine has it."""
        self._cancelled = True
        if self._handle is not None:
            self._handle.cancel()

    def follow(self, handle: Handle) -> None:
        """The engine has it; events may have come already."""
        self._handle = handle
        if self._cancelled:
            handle.cancel()

    def on_event(self, event: Event) -> None:
        """Of the engine, in words."""
        if self._closed:
            return
        if isinstance(event, Started):
            self._on_reply(self._opened(event))
        elif isinstance(event, Token):
            self._hear(event)
        elif isinstance(event, Ended):
            self._close(event.reason)
        elif isinstance(event, Failed):
            self._closed = True
            self._on_reply(Refused(event.error))

    def _hear(self, token: Token) -> None:
        before, self._last = self._last, time.monotonic()
        self._first = self._first or self._last
        if self._tokens:
            self._gaps.append(self._last - before)
        self._tokens += 1
        if self._sampling.logprobs is not None:
            self._named.append(self._speaker.named(token))
        said = self._speaker.hear(token.id)
        if said.text or said.ended:
            self._say(said.text)
        if said.ended:
            self._close("stop")
            self.cancel()

    def _say(self, text: str) -> None:
        named, self._named = tuple(self._named), []
        if text or named:
            self._on_reply(Delta(text, named, self._told_gaps()))

    def _told_gaps(self) -> tuple[float, ...]:
        gaps, self._gaps = tuple(self._gaps), []
        return gaps

    def _close(self, reason: EndReason) -> None:
        self._say(self._speaker.finish())
        self._closed = True
        gaps = self._tokens - 1
        tpot_s = (self._last - self._first) / gaps if gaps > 0 else None
        self._on_reply(Closed(reason, self._tokens, tpot_s, self._told_gaps()))

    def _opened(self, started: Started) -> Opened:
        if started.reason == STORE_UNREACHABLE:
            self._watch.lost("it could be read when a question came, and not when its caches were loaded")
        for line in started.problems:
            LOG.warning("damaged", extra={"why": line})
        sources = tuple(
            Source(one.kind, one.id, one.document, one.title, one.text, one.score, hit, len(one.passage.ids))
            for one, hit in zip(self._cited, started.hits, strict=True)
        )
        measured = self._full_measured(started)
        figures = Figures(
            method="full" if started.reason and not started.rows_inexact else "blend",
            reason="" if started.reason == ASKED_FOR else started.reason,
            rows=started.rows,
            rows_computed=started.rows_computed,
            rows_reused=started.rows_reused,
            rows_inexact=started.rows_inexact,
            hits=sum(started.hits),
            chunks=len(started.hits),
            bytes_loaded=started.bytes_loaded,
            lacking=started.lacking,
            stages={"prepare": self.before_s, **started.stages},
            waited_s=started.waited_s,
            ttft_s=self.before_s + started.ttft_s,
            full_estimated_s=self._profile.seconds(started.rows) if measured is None else None,
            full_measured_s=measured,
            notes=(*started.notes, NONE_RETRIEVED) if self._none_retrieved else started.notes,
        )
        cached = started.rows - started.rows_computed
        return Opened(started.rows, cached, sources, figures, self._traced(started), len(started.problems))

    @property
    def _none_retrieved(self) -> bool:
        return self._request.top_k is not None and not any(one.kind in ("retrieved", "document") for one in self._cited)

    def _full_measured(self, started: Started) -> float | None:
        """Seconds that full prefill of this prompt took, now or when the tenant last asked for it; None where it did not."""
        prompt = hash((self._request.tenant, self._layout.token_ids))
        if self._request.cold and started.stages and started.rows_computed == started.rows:
            self._profile.took(prompt, self.before_s + started.ttft_s - started.waited_s)
        return self._profile.measured(prompt)

    def _traced(self, started: Started) -> tuple[TracedToken, ...]:
        """The prompt's tokens, one by one."""
        if not started.trace:
            return ()
        layout, names = self._layout, list[TokenPart]()
        names += ["prefix"] * len(layout.prefix)
        for place, chunk in enumerate(layout.chunks):
            names += ["text" if place in layout.plain else "chunk"] * len(chunk)
        names += ["suffix"] * len(layout.suffix)
        texts = self._decoder.tokenizer.batch_decode([[token] for token in layout.token_ids])
        rows = zip(texts, names, started.trace, strict=True)
        return tuple(TracedToken(text, part, computed, score) for text, part, (computed, score) in rows)
