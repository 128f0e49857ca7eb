"""From the engine's events to the client's: text, thoughts, calls of functions, sources and estimates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from blend.answers import NONE_RETRIEVED
from blend.layout import PlaceOrigin
from blend.serve.events import (
    BLENDED_BEFORE,
    COLD,
    IN_MEMORY,
    NOTHING,
    SHORT,
    Event,
    Finished,
    OnEvent,
    Output,
    Started,
    Token,
)
from blend.serve.failures import LOG, STORE_UNREACHABLE
from blend.serve.forms.thoughts import ThoughtParser
from blend.serve.forms.tool_calls import CallFormat, CallParser
from blend.serve.outputs.detokenizer import Detokenizer, StopSearch, StopText
from blend.serve.prompt import Prompt
from blend.serve.reasons import EDITED, NEW, TOO_SHORT, ComputedPart, PartsTokens, tokens_by_reason, with_edited
from blend.serve.request import ToolCall

if TYPE_CHECKING:
    from blend.serve.engine.profile import PrefillProfile
    from blend.serve.prompts.tenant import StoreWatch


class OutputProcessor:
    """Adds text and sources to the events of one prompt.

    Args:
        tokenizer: the model's.
        prompt: what the engine answers.
        send: takes the events.
        profile: says how long full prefill would take.
        watch: notices an outage of the store.
        form: how the model writes calls of functions.

    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Prompt,
        send: OnEvent,
        profile: PrefillProfile,
        watch: StoreWatch,
        form: CallFormat,
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._send = send
        self._profile = profile
        self._watch = watch
        stops = [StopText(text) for text in dict.fromkeys(prompt.request.stop)]
        answers = range(prompt.sampling.n)
        self._going = {index: AnswerText(tokenizer, prompt, form, index, send, stops) for index in answers}

    def on_event(self, event: Event) -> None:
        """Take an event of the engine."""
        if isinstance(event, Started):
            self._send(self._started(event))
        elif isinstance(event, Output):
            for token in event.tokens:
                self._going[event.answer].add(token)
        else:
            if isinstance(event, Finished):
                for index in list(self._going) if event.last else [event.answer]:
                    answer = self._going.pop(index)
                    answer.finish()
                    if index == event.answer:
                        event = event._replace(stop=answer.stop)
            self._send(event)

    def _started(self, started: Started) -> Started:
        prompt = self._prompt
        request = prompt.request
        figures = started.figures
        if figures.reason == STORE_UNREACHABLE:
            self._watch.lost("it could be read when a question came, and not when its caches were loaded")
        for problem in started.problems:
            LOG.warning("damaged", extra={"why": problem})
        sources = tuple(passage.source(hit=hit) for passage, hit in zip(prompt.cited, started.hits, strict=True))
        ids = prompt.layout.token_ids
        name = hash((request.tenant, ids))
        if request.cold and figures.rows_computed == figures.rows:
            self._profile.took(name, figures.ttft_s - figures.waited_s)
        measured = self._profile.measured(name)
        retrieved = any(passage.kind in ("retrieved", "document") for passage in prompt.cited)
        notes = (NONE_RETRIEVED,) if request.top_k is not None and not retrieved else ()
        parts = _not_reused(prompt, started)
        figures = figures._replace(
            reason=_word(figures.reason, parts),
            not_reused=parts,
            kept=prompt.kept,
            full_estimated_s=self._profile.seconds(figures.rows) if measured is None else None,
            full_measured_s=measured,
            notes=(*figures.notes, *notes, *request.notes),
        )
        texts = self._tokenizer.batch_decode([[token] for token in ids]) if started.trace else ()
        trace = tuple(row._replace(text=text) for row, text in zip(started.trace, texts, strict=True))
        return started._replace(figures=figures, sources=sources, trace=trace)


def _not_reused(prompt: Prompt, started: Started) -> tuple[PartsTokens, ...]:
    """Tokens that were computed though text might be reused, by reason; none if all was to be computed, or had to be."""
    figures = started.figures
    hits = started.hits
    if figures.method == "full" and figures.reason not in (NOTHING, COLD, SHORT, IN_MEMORY, BLENDED_BEFORE, EDITED):
        return ()
    layout = prompt.layout
    places = zip(layout.places, layout.chunk_spans, strict=True)
    cited = [(place, span) for place, span in places if place.origin is not PlaceOrigin.TEXT]
    moved = {span for (place, span), hit in zip(cited, hits, strict=True) if hit and place.stored is None}
    parts = [part for part in prompt.computed if (part.start, part.stop) not in moved]
    absent = prompt.absent or (NEW,) * len(cited)
    for (place, span), hit, missing in zip(cited, hits, absent, strict=True):
        if place.stored is not None and not hit:
            parts.append(ComputedPart(*span, TOO_SHORT if figures.reason == SHORT else missing))
    return tokens_by_reason(with_edited(parts, started.edited), figures.rows_reused)


def _word(reason: str, parts: Sequence[PartsTokens]) -> str:
    """The engine's reason in a word: that of the largest part, if text was new, missing or short."""
    if reason == SHORT:
        return TOO_SHORT
    if reason in (NOTHING, COLD):
        return parts[0].reason if parts else TOO_SHORT
    return reason


class AnswerText:
    """Adds text to the tokens of one answer, and reads thoughts and calls of functions.

    index: among the prompt's answers. stops: texts that end it.
    """

    def __init__(
        self, tokenizer: Any, prompt: Prompt, form: CallFormat, index: int, send: OnEvent, stops: Sequence[StopText]
    ) -> None:
        tools = prompt.request.tools
        self._prompt = prompt
        self._index = index
        self._send = send
        shown = [*(form.markers if tools is not None else ()), *(prompt.thinking.markers if prompt.thinking else ())]
        self._detokenizer = Detokenizer(tokenizer, shown)
        self._thoughts = ThoughtParser(prompt.thinking)
        self._stop = StopSearch(stops)
        self._calls: CallParser | None = None
        if tools is not None:
            names = [function.name for function in tools.functions]
            self._calls = CallParser(form, names, parallel=tools.parallel, required=bool(tools.required))
        self._held: list[Token] = []  # until their text is certain

    def add(self, token: Token) -> None:
        """The next token."""
        spelled = self._prompt.sampling.logprobs is not None
        self._held.append(self._detokenizer.spelled(token) if spelled else token)
        if text := self._detokenizer.add(token.id):
            text = self._stop.add(self._without_thoughts(text))
            if text:
                for piece in self._calls.add(text) if self._calls is not None else [text]:
                    self._send_held(piece)
        if self._stop.found or (self._calls is not None and self._calls.ended):
            self._prompt.stopped.add(self._index)

    @property
    def stop(self) -> str:
        """The stop text that ended the answer, or ""."""
        return self._stop.found

    def finish(self) -> None:
        """Send what is still held; no token follows."""
        text = self._without_thoughts(self._detokenizer.finish(), final=True)
        text = self._stop.add(text) + self._stop.finish()
        pieces: list[str | ToolCall] = [text] if text else []
        if self._calls is not None:
            pieces = self._calls.add(text) + self._calls.finish()
        if self._held and not pieces:
            pieces = [""]
        for piece in pieces:
            self._send_held(piece)

    def _without_thoughts(self, text: str, *, final: bool = False) -> str:
        """Send the thoughts, with the tokens that belong to them; return the text."""
        thoughts, text = self._thoughts.add(text, final=final)
        if thoughts or (self._thoughts.inside and self._held):
            self._send_held(thoughts, thoughts=True)
        return text

    def _send_held(self, piece: str | ToolCall, *, thoughts: bool = False) -> None:
        """Send a text or a call with the tokens that were held back for it."""
        text, calls = (piece, ()) if isinstance(piece, str) else ("", (piece,))
        self._send(Output(tuple(self._held), text, calls, self._index, thoughts))
        self._held = []
