"""From the body of a question to the engine, and back: preparation in turn with other clients, and the channel of events."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from starlette.requests import Request as HttpRequest

from blend.errors import ContextLengthError
from blend.serve.events import Event, Failed, Finished, OnEvent, Output, QueueFullError, Started
from blend.serve.failures import log_error
from blend.serve.http.bodies import CommonBody, read_body
from blend.serve.http.errors import ApiError, ended_early, failure_of
from blend.serve.http.state import admitted, client_of, disconnected, is_forwarded, session_of, state_of
from blend.serve.http.to_requests import CORPUS_CODES, ModelNames, requests_of
from blend.serve.http.tracing import entry_of
from blend.serve.prompt import Prompt
from blend.serve.turns import Slices

BodyT = TypeVar("BodyT", bound=CommonBody)


async def submit(request: HttpRequest, kind: type[BodyT]) -> tuple[BodyT, EventChannel]:
    """Receive a question and submit it. Its body counts towards the budget until it is a prompt.

    Forms are compiled after everything else, in turns for themselves: a question without one never waits for them.
    """
    state = state_of(request)
    admitted(request)
    state.require_service()
    with state.bodies.receiving(request) as received:
        raw = await received.body()
        channel = EventChannel(request)
        client = client_of(request)
        formed = list[Formed]()
        try:
            body = await state.questions.run(client, _prepared(raw, kind, channel, formed))
            if formed:
                await state.forms.run(client, _compiled(formed, kind, channel))
        except BaseException:
            channel.close()
            raise
        channel.entry.accepted = time.monotonic()
        return body, channel


Formed = tuple[Prompt, OnEvent]
"""A prompt that waits for its grammar, with what takes its events."""


def _prepared(raw: bytes, kind: type[BodyT], channel: EventChannel, formed: list[Formed]) -> Slices[BodyT]:
    """Prepare all prompts, submit those without a form, and add the others to `formed`."""
    channel.require()  # the body may have taken a while
    service = channel.state.require_service()
    tenant = channel.entry.tenant
    body = read_body(raw, kind)
    try:
        requests = requests_of(body, ModelNames.of(service, tenant), channel.state.limits)
    except ApiError as error:
        if error.code in CORPUS_CODES:  # which corpora exist is unknown while the store is unreachable
            service.require_store(tenant)
        raise
    joined = JoinedPrompts(len(requests), body.n, channel.send)
    for number, request in enumerate(requests):
        yield
        send = partial(joined.send, number)
        request = replace(
            request,
            id=channel.entry.id,
            session=channel.session(request.session),
            client=channel.client,
            forwarded=channel.forwarded,
            arrived=channel.begun,
            cancelled=channel.cancelled,
        )
        with _failures(kind, channel):
            service.engine.require_room(tenant)  # before the search, which would be in vain
            prompt = service.prepare(request, partial(channel.require, request.deadline_s))
            if request.has_form:
                formed.append((prompt, send))
            else:
                service.take(prompt, send)
    return body


def _compiled(formed: list[Formed], kind: type[CommonBody], channel: EventChannel) -> Slices[None]:
    """Submit the prompts with a form."""
    for prompt, send in formed:
        channel.require(prompt.request.deadline_s)
        service = channel.state.require_service()
        with _failures(kind, channel):
            service.take(service.compile(prompt), send)
        yield


@contextmanager
def _failures(kind: type[CommonBody], channel: EventChannel) -> Iterator[None]:
    """Name the field of a prompt that is too long, and tell a server that is closing from a full one."""
    try:
        yield
    except ContextLengthError as error:
        failure = failure_of(error)
        failure.param = kind.asks
        raise failure from error
    except QueueFullError:
        channel.state.require_service()
        raise


class JoinedPrompts:
    """Joins the events of several prompts into those of one request. Threads may share it.

    prompts: how many. answers: to each; answer i to prompt p becomes answer `p * answers + i`. The first failure ends all.
    """

    def __init__(self, prompts: int, answers: int, send: OnEvent) -> None:
        self._going = prompts
        self._answers = answers
        self._send = send
        self._lock = threading.Lock()

    def send(self, prompt: int, event: Event) -> None:
        """Pass on an event of this prompt."""
        with self._lock:
            if not self._going:
                return
            if not isinstance(event, Failed):
                event = event._replace(answer=prompt * self._answers + event.answer)
            if failure_in(event):
                self._going = 0
            elif isinstance(event, Finished) and event.last:
                self._going -= 1
                event = event._replace(last=not self._going)
            self._send(event)


class EventChannel:
    """Carries the events of one request from the engine's threads to the event loop; a disconnect cancels the request.

    request: HTTP's, with its body already read. begun: when it came. session: gives a session its name among all holders'.
    client: see `client_of`. forwarded: whether a proxy has passed the request on. cancelled: of the service's request.
    `send` is for other threads; the rest is for the event loop.
    """

    def __init__(self, request: HttpRequest) -> None:
        self._request = request
        self.entry = entry_of(request)
        self.state = state_of(request)
        self._metrics = self.state.metrics
        self._tracing = self.state.tracing
        self.begun = time.monotonic()
        self.session = partial(session_of, request)
        self.client = client_of(request)
        self.forwarded = is_forwarded(request)
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self.cancelled = threading.Event()
        self._tokens = Counter[int]()  # of each running answer
        self._token_at: dict[int, float] = {}
        self._watch = asyncio.create_task(self._until_disconnected())

    def send(self, event: Event) -> None:
        """Pass an event on."""
        self._count(event)
        self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    def require(self, deadline_s: float | None = None) -> None:
        """Raise `ApiError` if the server is closing, the client has left or the deadline has passed."""
        self.state.require_service()
        if self.cancelled.is_set():
            raise ended_early("cancelled")
        if deadline_s is not None and time.monotonic() - self.begun > deadline_s:
            raise ended_early("deadline")

    async def next(self, seconds: float | None = None) -> Event | None:
        """The next event, `Finished("cancelled")` when the client has left; None if none comes in `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                return await self._queue.get()
        except TimeoutError:
            return None

    async def collect(self) -> list[Event]:
        """All events of answers that end. Raises `ApiError` if they fail."""
        events = list[Event]()
        while not (events and is_last(events[-1])):
            event = await self._queue.get()
            if failure := failure_in(event):
                raise failure
            events.append(event)
        return events

    def close(self) -> None:
        """Cancel what has not been answered, and export the request's spans. Later calls do nothing."""
        self.cancelled.set()
        self._watch.cancel()
        if self._tracing is not None:
            entry = self.entry
            entry.outcome = entry.outcome or ("cancelled" if entry.accepted else "refused")
            entry.ended = entry.ended or time.monotonic()
            self._tracing.record(entry, self._request.headers)
            self._tracing = None

    async def _until_disconnected(self) -> None:
        await disconnected(self._request)
        self._queue.put_nowait(Finished("cancelled"))
        self.cancelled.set()

    def _count(self, event: Event) -> None:
        now = time.monotonic()
        entry = self.entry
        seconds = now - self.begun
        if isinstance(event, Started):
            if entry.figures is None:
                entry.first = now
                entry.ttft_s = seconds
                entry.figures = event.figures
            self._metrics.started(event, seconds)
        elif isinstance(event, Output):
            for token in event.tokens:
                if event.answer in self._token_at:
                    self._metrics.gap(token.at - self._token_at[event.answer])
                self._token_at[event.answer] = token.at
            entry.tokens += len(event.tokens)
            self._tokens[event.answer] += len(event.tokens)
        elif isinstance(event, Finished):
            entry.outcome = event.reason
            entry.ended = now
            if event.check is not None:
                self._metrics.checked(event.check)
                return
            tokens = self._tokens.total() if event.last else self._tokens.pop(event.answer)
            self._metrics.finished(event.reason, tokens, seconds)
        else:
            entry.outcome = "failed"
            entry.ended = now
            if failure_of(event.error).status >= 500:
                log_error(event.error, entry.id)


def is_last(event: Event) -> bool:
    """Whether no event of the request follows."""
    return isinstance(event, Failed) or (isinstance(event, Finished) and event.last)


def failure_in(event: Event) -> ApiError | None:
    """The error for the client if this event ends an answer early; else None."""
    if isinstance(event, Failed):
        return failure_of(event.error)
    if isinstance(event, Finished) and event.reason not in ("stop", "length"):
        return ended_early(event.reason)
    return None
